//! Brings pages in: first those that somebody waits for, in between all others.
//!
//! One thread looks at all address spaces, so that what a task does to its memory and what
//! is brought in have an order. The kernel holds copies back (`EAGAIN`) from when a
//! task changes its mappings until that was read here: what a page's place is, and
//! whether it still has one, is never out of date.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Remote;
use super::address_space::{AROUND, AddressSpace, CHUNK, MOST_FORKED, check_forked};
use super::ahead::MOST;
use super::page_reader::{PageReader, TOGETHER};
use super::working_set::Recorder;
use crate::error::{Context, Error, Result};
use crate::page_server::{Borrower, Request};

/// What was asked for and has come.
struct Arrived {
    request: Request,
    bytes: Vec<u8>,
    /// Whether it is still to be put in place.
    is_held: bool,
}

impl Arrived {
    /// Takes what has been read and puts it in place. What was touched at a start is often single pages: to look for each who
    /// waits meanwhile takes as long as to put it in place, so that is done for a few together.
    fn take(&mut self, reader: &mut PageReader, spaces: &mut [AddressSpace]) -> Result<()> {
        let mut bytes = 0;
        loop {
            self.request = reader.receive(&mut self.bytes)?;
            self.put(spaces)?;
            bytes += self.request.bytes();
            if self.is_held || bytes >= AROUND || !reader.has_answer() {
                return Ok(());
            }
        }
    }

    /// Puts the answer in place wherever it is missing, or holds it until events have been read.
    fn put(&mut self, spaces: &mut [AddressSpace]) -> Result<()> {
        let Request { id, range } = &self.request;
        let len = usize::try_from(range.end - range.start).unwrap_or(0);
        self.is_held = false;
        for space in spaces.iter_mut().filter(|space| space.id == *id && !space.gone) {
            let placed = space.receive(range, &self.bytes[..len])?;
            self.is_held |= !placed && !space.gone;
        }
        Ok(())
    }
}

/// Brings in everything; as long as a `recorder` goes on, only what is waited for. `other` is
/// watched meanwhile: its end is an error.
///
/// # Errors
/// If pages cannot be read, or are not those that were sealed; if the dump that has them, or
/// `other`, has ended; if the tasks fork too often; if the kernel refuses to put a page in. Then `spaces` are those that lack
/// pages still. They must not be dropped while a task runs in one of them.
pub(super) fn run(
    spaces: &mut Vec<AddressSpace>,
    mut remote: Option<Remote<'_>>,
    mut recorder: Option<Recorder<'_>>,
    other: &OwnedFd,
) -> Result<()> {
    let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or(0)];
    let mut reader = PageReader::start()?;
    let request = Request { id: 0, range: 0..0 };
    let mut answer = Arrived { request, bytes: Vec::new(), is_held: false };
    let mut next = 0;
    let mut idle = false;
    let mut has_ended_early = false;
    loop {
        has_ended_early |= spaces.iter().any(AddressSpace::has_ended_early);
        spaces.retain(|space| !space.is_done());
        let left = recorder.as_mut().and_then(Recorder::left).filter(|_| !spaces.is_empty());
        if left.is_none()
            && let Some(recorder) = recorder.take()
        {
            recorder.finish();
            // There is all the rest to be brought in now.
            idle = false;
        }
        if spaces.is_empty() {
            return remote.map_or(Ok(()), |remote| remote.conclude(has_ended_early, &mut buffer));
        }
        let wait = if idle { left } else { Some(Duration::ZERO) };
        let ready = look(spaces, remote.as_mut().map(|r| &mut r.borrower), &reader, other, wait)?;
        let mut children = Vec::new();
        let mut loud = spaces.iter_mut().zip(&ready.spaces).filter(|(_, ready)| **ready);
        let read = loud.try_for_each(|(space, _)| space.read_events(&mut children));
        let has_forked = !children.is_empty();
        spaces.append(&mut children);
        read?;
        if has_forked {
            check_forked(spaces, MOST_FORKED)?;
        }
        if answer.is_held {
            answer.put(spaces)?;
        } else if let Some(remote) = remote.as_mut().filter(|_| ready.answer) {
            answer.request = remote.borrower.receive(&mut answer.bytes)?;
            remote.ahead.has_come(Instant::now());
            answer.put(spaces)?;
        } else if ready.read {
            answer.take(&mut reader, spaces)?;
        }
        let mut held = answer.is_held;
        for space in spaces.iter_mut().filter(|space| space.is_waited_for()) {
            held |= !space.serve(&mut remote, recorder.as_mut(), &mut buffer)?;
        }
        while recorder.is_none() && go_on(spaces, &mut next, &mut remote, &mut reader)? {}
        reader.flush()?;
        idle = !held;
        if let Some(remote) = &mut remote {
            remote.borrower.flush()?;
        }
    }
}

/// Asks for a little of one of the spaces, where nobody waits. False if there is nothing to do
/// before an answer comes.
fn go_on(
    spaces: &mut [AddressSpace],
    next: &mut usize,
    remote: &mut Option<Remote<'_>>,
    reader: &mut PageReader,
) -> Result<bool> {
    let is_full =
        |Remote { borrower, ahead, .. }: &Remote<'_>| !ahead.has_room(borrower.asked().bytes());
    if remote.as_ref().is_some_and(is_full) || reader.asked().bytes() >= MOST {
        return Ok(false);
    }
    for _ in 0..spaces.len() {
        *next = (*next + 1) % spaces.len();
        if ask_some(&mut spaces[*next], remote, reader)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Asks for a little of a space: what is here for a few pages, since those that were touched one after the other are
/// often of one cluster, which is unpacked once then. False if there is nothing to do before an answer comes.
fn ask_some(
    space: &mut AddressSpace,
    remote: &mut Option<Remote<'_>>,
    reader: &mut PageReader,
) -> Result<bool> {
    let (begin, mut asks) = (reader.asked().bytes(), false);
    loop {
        let before = reader.asked().bytes();
        asks |= space.go_on(remote, reader)?;
        let now = reader.asked().bytes();
        if now == before || now - begin >= TOGETHER {
            return Ok(asks);
        }
    }
}

/// Who has something to say.
struct Talking {
    spaces: Vec<bool>,
    answer: bool,
    read: bool,
}

/// Looks who has something to say; waits until somebody has, but no longer than `wait`.
fn look(
    spaces: &[AddressSpace],
    mut borrower: Option<&mut Borrower>,
    reader: &PageReader,
    other: &OwnedFd,
    wait: Option<Duration>,
) -> Result<Talking> {
    let has_answer = borrower.as_mut().is_some_and(|borrower| borrower.has_answer());
    let ends = [other.as_fd(), reader.as_fd()].map(Some);
    let ends = ends.into_iter().chain([borrower.as_ref().map(|borrower| borrower.as_fd())]);
    let mut fds: Vec<PollFd<'_>> = (spaces.iter().map(|space| space.uffd.as_fd()))
        .chain(ends.flatten())
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let wait = if has_answer || reader.has_answer() { Some(Duration::ZERO) } else { wait };
    let wait = wait.map(|wait| Timespec::try_from(wait).unwrap_or_default());
    match poll(&mut fds, wait.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e).context(|| "poll".to_owned()),
    }
    let (spaces, ends) = fds.split_at(spaces.len());
    let is_ready = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
    if ends.first().is_some_and(is_ready) {
        return Err(Error::Peer("the process that watches over the pager has ended".to_owned()));
    }
    let is_loud = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let read = reader.has_answer() || ends.get(1).is_some_and(is_loud);
    let loud = ends.get(2).is_some_and(is_loud);
    let answer = has_answer || loud && borrower.as_ref().is_some_and(|b| !b.asked().is_empty());
    if loud && !answer && borrower.as_ref().is_some_and(|borrower| borrower.is_alone()) {
        return Err(Error::Peer("the dump that serves the pages has ended".to_owned()));
    }
    Ok(Talking { spaces: spaces.iter().map(is_ready).collect(), answer, read })
}
