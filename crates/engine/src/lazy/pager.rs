//! Brings pages in: first those that somebody waits for, in between all others.
//!
//! One thread looks at all address spaces, so that what a task does to its memory and what
//! is brought in have an order. The kernel holds copies back (`EAGAIN`) from when a
//! task changes its mappings until that was read here: what a page's place is, and
//! whether it still has one, is never out of date.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use torpor_sys::uffd::{self, Event};

use super::Remote;
use super::missing::{Gap, Missing};
use super::reader::Reader;
use super::working_set::Recorder;
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::page_server::{Borrower, Request};
use crate::restore::layers::Pages;

/// Bytes brought in at once when somebody waits: what lies around the page, too.
const AROUND: u64 = 64 * 1024;
/// Bytes brought in at once when nobody does.
const CHUNK: u64 = 256 * 1024;
/// Bytes that are under way when nobody waits: some are being read while others are put in place.
/// Who waits for a page of a dump waits for these first.
const AHEAD: u64 = 3 * CHUNK;
/// Bytes that are under way at most when somebody waits.
const MOST: u64 = 64 * AROUND;

/// An address space with pages that are missing.
#[derive(Debug)]
pub struct Space {
    /// The number of its pagemap.
    id: u64,
    /// The userfaultfd that it is registered with.
    pub uffd: OwnedFd,
    /// What the images have.
    pub pages: Arc<Pages>,
    /// What is to be brought in.
    pub missing: Missing,
    /// Addresses in the images of what is brought in before everything else.
    first: VecDeque<Range<u64>>,
    /// Pages that are waited for, until events have been read.
    waiting: VecDeque<u64>,
    /// Where pages are brought in next that nobody waits for.
    next: u64,
    gone: bool,
}

impl Space {
    /// An address space that lacks all pages of `ranges`, as far as the images have any.
    /// Those of `first` (in the images) are brought in before the others.
    pub fn new(
        id: u64,
        uffd: OwnedFd,
        pages: Arc<Pages>,
        ranges: &[(u64, u64)],
        first: VecDeque<Range<u64>>,
    ) -> Self {
        let mut missing = Missing::default();
        for &(start, end) in ranges {
            for (_, range) in pages.within(start..end).filter(|(stretch, _)| !stretch.is_zero()) {
                missing.insert(&Gap { source: range.start, range });
            }
        }
        let waiting = VecDeque::new();
        Space { id, uffd, pages, missing, first, waiting, next: 0, gone: false }
    }

    fn fork(&self, uffd: OwnedFd) -> Self {
        let (pages, missing) = (Arc::clone(&self.pages), self.missing.clone());
        let (id, next, first) = (self.id, self.next, self.first.clone());
        Space { id, uffd, pages, missing, first, waiting: VecDeque::new(), next, gone: false }
    }

    /// Nobody can miss anything any more.
    fn is_done(&self) -> bool {
        self.gone || self.missing.is_empty() && self.waiting.is_empty()
    }

    /// Reads what has happened; adds the children that were forked.
    fn read_events(&mut self, children: &mut Vec<Space>) -> Result<()> {
        loop {
            let events = match uffd::events(self.uffd.as_fd()) {
                Ok(events) => events,
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => return Ok(()),
                Err(e) => return Err(e).context(|| "reading a userfaultfd".to_owned()),
            };
            for event in events {
                match event {
                    Event::Fault(address) => self.waiting.push_back(address & !(PAGE - 1)),
                    Event::Fork(uffd) => children.push(self.fork(uffd)),
                    Event::Remap { from, to, len } => self.missing.shift(from, to, len),
                    Event::Drop(start, end) => drop(self.missing.take(&(start..end))),
                }
            }
        }
    }

    /// Brings in what is waited for, or asks for it; while it is recorded, nothing more than that.
    /// False if events have to be read first.
    fn serve(
        &mut self,
        remote: &mut Option<Remote<'_>>,
        mut recorder: Option<&mut Recorder<'_>>,
        buffer: &mut [u8],
    ) -> Result<bool> {
        for _ in 0..self.waiting.len() {
            let Some(page) = self.waiting.pop_front() else { break };
            let around = page & !(AROUND - 1);
            let near = match recorder {
                None => around..around + AROUND,
                Some(_) => page..page + PAGE,
            };
            let done = match self.missing.at(page) {
                Some(gap) if self.is_remote(&gap) => {
                    let source = gap.source + (page - gap.range.start);
                    let borrower = borrower(remote, page)?;
                    if !borrower.asked().has(self.id, source) && borrower.asked().bytes() < MOST {
                        borrower.ask(self.request(&gap.within(&near)))?;
                    }
                    // It waits until the answer is in its place.
                    self.waiting.push_back(page);
                    continue;
                }
                Some(gap) => {
                    if let Some(recorder) = &mut recorder {
                        recorder.note(self.id, gap.source + (page - gap.range.start));
                    }
                    // The page itself first: what lies before it may be of another mapping.
                    let own = gap.within(&(page..near.end));
                    self.bring(&own, buffer)? && self.rest(&gap.within(&near).range, buffer)?
                }
                None => self.put_zero(page)?,
            };
            if !done {
                self.waiting.push_front(page);
                return Ok(self.gone);
            }
        }
        Ok(true)
    }

    fn is_remote(&self, gap: &Gap) -> bool {
        self.pages.within(gap.source..gap.source + 1).any(|(stretch, _)| stretch.is_remote())
    }

    /// What a gap lacks.
    fn request(&self, gap: &Gap) -> Request {
        let range = gap.source..gap.source + (gap.range.end - gap.range.start);
        Request { id: self.id, range }
    }

    /// Brings in what is missing in a range.
    fn rest(&mut self, range: &Range<u64>, buffer: &mut [u8]) -> Result<bool> {
        while let Some(gap) = self.missing.at(range.start) {
            if !self.bring(&gap.within(range), buffer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks for a part that nobody waits for. False if there is nothing to do
    /// but to wait for what was asked for.
    fn go_on(&mut self, remote: &mut Option<Remote<'_>>, reader: &mut Reader) -> Result<bool> {
        let asked = |gap: &Gap| {
            let borrower = remote.as_ref().map(|remote| &remote.borrower);
            borrower.is_some_and(|borrower| borrower.asked().has(self.id, gap.source))
                || reader.asked().has(self.id, gap.source)
        };
        let first = next_of(&mut self.first, &self.missing, asked);
        let Some(gap) = first.or_else(|| self.missing.from(self.next).find(|gap| !asked(gap)))
        else {
            return Ok(false);
        };
        let gap = gap.within(&(gap.range.start..gap.range.start + CHUNK));
        if self.first.is_empty() {
            self.next = gap.range.end;
        }
        match self.is_remote(&gap) {
            true => borrower(remote, gap.range.start)?.ask(self.request(&gap))?,
            false => reader.ask(self.request(&gap), &self.pages)?,
        }
        Ok(true)
    }

    /// Brings in a gap of at most [`AROUND`] bytes. False if events have to be read first.
    fn bring(&mut self, gap: &Gap, buffer: &mut [u8]) -> Result<bool> {
        let len = usize::try_from(gap.range.end - gap.range.start).unwrap_or(usize::MAX);
        let bytes = buffer.get_mut(..len).ok_or_else(|| lost(gap.range.start))?;
        self.pages.read(gap.source, bytes)?;
        self.put(gap.range.start, bytes)
    }

    /// Puts in place what was asked for, as far as it is missing still. False if events have to
    /// be read first.
    fn receive(&mut self, source: &Range<u64>, bytes: &[u8]) -> Result<bool> {
        for gap in self.missing.of_source(source) {
            let from = usize::try_from(gap.source - source.start).unwrap_or(usize::MAX);
            let len = usize::try_from(gap.range.end - gap.range.start).unwrap_or(usize::MAX);
            let part = bytes.get(from..from.saturating_add(len));
            if !self.put(gap.range.start, part.ok_or_else(|| lost(gap.range.start))?)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts pages in place. False if events have to be read first.
    fn put(&mut self, place: u64, bytes: &[u8]) -> Result<bool> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut at = 0;
        let len = bytes.len();
        let mut size = len;
        while at < len && !self.gone {
            let to = place + at as u64;
            let end = (at + size).min(len);
            match uffd::copy(self.uffd.as_fd(), to, &bytes[at..end]) {
                Ok(n) => {
                    self.settle(to, n as u64);
                    at += n;
                }
                Err(e) => match e.raw_os_error() {
                    // Not all of it is in one mapping: see where it ends.
                    Some(libc::ENOENT) if size > page => size = page,
                    Some(libc::EEXIST | libc::ENOENT) => {
                        self.settle(to, PAGE);
                        self.wake(to);
                        at += page;
                    }
                    _ => return self.stuck(e, to),
                },
            }
        }
        Ok(true)
    }

    /// Lets a page that the images do not have be zero.
    fn put_zero(&mut self, at: u64) -> Result<bool> {
        match uffd::zero(self.uffd.as_fd(), at, usize::try_from(PAGE).unwrap_or(4096)) {
            Ok(_) => Ok(true),
            Err(e) => match e.raw_os_error() {
                Some(libc::EEXIST | libc::ENOENT) => {
                    self.wake(at);
                    Ok(true)
                }
                _ => self.stuck(e, at),
            },
        }
    }

    fn stuck(&mut self, error: std::io::Error, at: u64) -> Result<bool> {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(false),
            Some(libc::ESRCH) => {
                self.gone = true;
                Ok(false)
            }
            _ => Err(error).context(|| format!("bringing in the page at {at:x}")),
        }
    }

    /// What is in place is not missing, and whoever waited for it was woken.
    fn settle(&mut self, at: u64, len: u64) {
        let range = at..at + len;
        self.missing.take(&range);
        self.waiting.retain(|page| !range.contains(page));
    }

    /// Whoever waits looks again: the page is there, or its mapping is not.
    fn wake(&self, at: u64) {
        // If the address space is gone nobody waits.
        let _ = uffd::wake(self.uffd.as_fd(), at, PAGE);
    }
}

/// The next gap of a working set, which loses what is there already.
fn next_of(
    set: &mut VecDeque<Range<u64>>,
    missing: &Missing,
    asked: impl Fn(&Gap) -> bool,
) -> Option<Gap> {
    while let Some(run) = set.front() {
        let gaps = missing.of_source(run);
        if let Some(gap) = gaps.into_iter().find(|gap| !asked(gap)) {
            return Some(gap);
        }
        set.pop_front();
    }
    None
}

fn borrower<'b>(remote: &'b mut Option<Remote<'_>>, at: u64) -> Result<&'b mut Borrower> {
    Ok(&mut remote.as_mut().ok_or_else(|| lost(at))?.borrower)
}

fn lost(at: u64) -> Error {
    Error::invalid("pages", format!("the gap at {at:x} is larger than what was asked for"))
}

/// What was asked for and has come.
struct Answer {
    request: Request,
    bytes: Vec<u8>,
    /// Whether it is still to be put in place.
    is_held: bool,
}

impl Answer {
    /// Puts the answer in place wherever it is missing, or holds it until events have been read.
    fn put(&mut self, spaces: &mut [Space]) -> Result<()> {
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
/// Pages that cannot be read, or are not those that were sealed; a dump that is gone with
/// them; the kernel's. Then `spaces` are those that lack pages still. They must not be
/// dropped while a task runs in one of them.
pub fn run(
    spaces: &mut Vec<Space>,
    mut remote: Option<Remote<'_>>,
    mut recorder: Option<Recorder<'_>>,
    other: &OwnedFd,
) -> Result<()> {
    let mut buffer = vec![0; usize::try_from(AROUND).unwrap_or(0)];
    let mut reader = Reader::start()?;
    let request = Request { id: 0, range: 0..0 };
    let mut answer = Answer { request, bytes: Vec::new(), is_held: false };
    let mut next = 0;
    let mut idle = false;
    loop {
        spaces.retain(|space| !space.is_done());
        let left = recorder.as_ref().and_then(Recorder::left).filter(|_| !spaces.is_empty());
        if left.is_none()
            && let Some(recorder) = recorder.take()
        {
            recorder.finish();
            // There is all the rest to be brought in now.
            idle = false;
        }
        if spaces.is_empty() {
            return remote.map_or(Ok(()), |remote| remote.conclude(&mut buffer));
        }
        let wait = if idle { left } else { Some(Duration::ZERO) };
        let ready = look(spaces, remote.as_mut().map(|r| &mut r.borrower), &reader, other, wait)?;
        let mut children = Vec::new();
        let mut loud = spaces.iter_mut().zip(&ready.spaces).filter(|(_, ready)| **ready);
        let read = loud.try_for_each(|(space, _)| space.read_events(&mut children));
        spaces.append(&mut children);
        read?;
        if answer.is_held {
            answer.put(spaces)?;
        } else if let Some(remote) = remote.as_mut().filter(|_| ready.answer) {
            answer.request = remote.borrower.receive(&mut answer.bytes)?;
            answer.put(spaces)?;
        } else if ready.read {
            answer.request = reader.receive(&mut answer.bytes)?;
            answer.put(spaces)?;
        }
        let mut held = answer.is_held;
        for space in spaces.iter_mut().filter(|space| !space.waiting.is_empty()) {
            held |= !space.serve(&mut remote, recorder.as_mut(), &mut buffer)?;
        }
        while recorder.is_none() && go_on(spaces, &mut next, &mut remote, &mut reader)? {}
        idle = !held;
        if let Some(remote) = &mut remote {
            remote.borrower.flush()?;
        }
    }
}

/// Asks for a little of one of the spaces, where nobody waits. False if there is nothing to do
/// before an answer comes.
fn go_on(
    spaces: &mut [Space],
    next: &mut usize,
    remote: &mut Option<Remote<'_>>,
    reader: &mut Reader,
) -> Result<bool> {
    let of_remote = remote.as_ref().map_or(0, |remote| remote.borrower.asked().bytes());
    if of_remote.max(reader.asked().bytes()) >= AHEAD {
        return Ok(false);
    }
    for _ in 0..spaces.len() {
        *next = (*next + 1) % spaces.len();
        if spaces[*next].go_on(remote, reader)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Who has something to say.
struct Ready {
    spaces: Vec<bool>,
    answer: bool,
    read: bool,
}

/// Looks who has something to say; waits until somebody has, but no longer than `wait`.
fn look(
    spaces: &[Space],
    mut borrower: Option<&mut Borrower>,
    reader: &Reader,
    other: &OwnedFd,
    wait: Option<Duration>,
) -> Result<Ready> {
    let has_answer = borrower.as_mut().is_some_and(|borrower| borrower.has_answer());
    let ends = [other.as_fd(), reader.as_fd()].map(Some);
    let ends = ends.into_iter().chain([borrower.as_ref().map(|borrower| borrower.as_fd())]);
    let mut fds: Vec<PollFd<'_>> = (spaces.iter().map(|space| space.uffd.as_fd()))
        .chain(ends.flatten())
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let wait = if has_answer { Some(Duration::ZERO) } else { wait };
    let wait = wait.map(|wait| Timespec::try_from(wait).unwrap_or_default());
    match poll(&mut fds, wait.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e).context(|| "poll".to_owned()),
    }
    let (spaces, ends) = fds.split_at(spaces.len());
    let is_ready = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
    if ends.first().is_some_and(is_ready) {
        return Err(Error::Hook("the process that watches over the pager has ended".to_owned()));
    }
    let is_loud = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let read = ends.get(1).is_some_and(is_loud);
    let loud = ends.get(2).is_some_and(is_loud);
    let answer = has_answer || loud && borrower.as_ref().is_some_and(|b| !b.asked().is_empty());
    if loud && !answer && borrower.as_ref().is_some_and(|borrower| borrower.is_alone()) {
        return Err(Error::Hook("the dump that serves the pages has ended".to_owned()));
    }
    Ok(Ready { spaces: spaces.iter().map(is_ready).collect(), answer, read })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_comes_first() {
        let mut missing = Missing::default();
        missing.insert(&Gap { range: 100..200, source: 1100 });
        // It was moved.
        missing.insert(&Gap { range: 300..350, source: 1300 });
        let mut set = VecDeque::from([1310..1320, 1500..1600, 1150..1155, 1100..1101]);
        let mut order = Vec::new();
        while let Some(gap) = next_of(&mut set, &missing, |_| false) {
            missing.take(&gap.range);
            order.push(gap.range);
        }
        assert_eq!(order, [310..320, 150..155, 100..101]);
        // What was asked for is on its way.
        let mut set = VecDeque::from([1160..1165, 1170..1175]);
        let next = next_of(&mut set, &missing, |gap| gap.source < 1170);
        assert_eq!(next.map(|gap| gap.range), Some(170..175));
    }
}
