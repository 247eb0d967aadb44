//! Brings pages in: first those that somebody waits for, in between all others.
//!
//! One thread looks at all address spaces, so that what a task does to its memory and what
//! is brought in have an order. The kernel holds copies back (`EAGAIN`) from when a
//! task changes its mappings until that was read here: what a page's place is, and
//! whether it still has one, is never out of date.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use torpor_sys::uffd::{self, Event};

use super::missing::{Gap, Missing};
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::restore::layers::Pages;

/// Bytes brought in at once when somebody waits: what lies around the page, too.
const AROUND: u64 = 64 * 1024;
/// Bytes brought in at once when nobody does.
const CHUNK: u64 = 256 * 1024;

/// An address space with pages that are missing.
#[derive(Debug)]
pub struct Space {
    /// The userfaultfd that it is registered with.
    pub uffd: OwnedFd,
    /// What the images have.
    pub pages: Arc<Pages>,
    /// What is to be brought in.
    pub missing: Missing,
    /// Pages that are waited for, until events have been read.
    waiting: VecDeque<u64>,
    gone: bool,
}

impl Space {
    /// An address space that lacks all pages of `ranges`, as far as the images have any.
    pub fn new(uffd: OwnedFd, pages: Arc<Pages>, ranges: &[(u64, u64)]) -> Self {
        let mut missing = Missing::default();
        for &(start, end) in ranges {
            for (_, range) in pages.within(start..end).filter(|(stretch, _)| !stretch.is_zero()) {
                missing.insert(&Gap { source: range.start, range });
            }
        }
        Space { uffd, pages, missing, waiting: VecDeque::new(), gone: false }
    }

    fn fork(&self, uffd: OwnedFd) -> Self {
        let (pages, missing) = (Arc::clone(&self.pages), self.missing.clone());
        Space { uffd, pages, missing, waiting: VecDeque::new(), gone: false }
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

    /// Brings in what is waited for.
    fn serve(&mut self, buffer: &mut [u8]) -> Result<()> {
        while let Some(&page) = self.waiting.front() {
            let around = page & !(AROUND - 1);
            let near = around..around + AROUND;
            let done = match self.missing.at(page) {
                Some(gap) => {
                    // The page itself first: what lies before it may be of another mapping.
                    let own = gap.within(&(page..near.end));
                    self.bring(&own, buffer)? && self.rest(&near, buffer)?
                }
                None => self.put_zero(page)?,
            };
            if !done {
                return Ok(());
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Brings in what is missing in a range.
    fn rest(&mut self, range: &std::ops::Range<u64>, buffer: &mut [u8]) -> Result<bool> {
        while let Some(gap) = self.missing.at(range.start) {
            if !self.bring(&gap.within(range), buffer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Brings in a part that nobody waits for.
    fn go_on(&mut self, buffer: &mut [u8]) -> Result<()> {
        if let Some(gap) = self.missing.first() {
            let part = gap.range.start..gap.range.start + CHUNK;
            self.bring(&gap.within(&part), buffer)?;
        }
        Ok(())
    }

    /// Brings in a gap of at most [`CHUNK`] bytes. False if events have to be read first.
    fn bring(&mut self, gap: &Gap, buffer: &mut [u8]) -> Result<bool> {
        let len = usize::try_from(gap.range.end - gap.range.start).unwrap_or(usize::MAX);
        let bytes = buffer.get_mut(..len).ok_or_else(|| lost(gap.range.start))?;
        for (stretch, range) in self.pages.within(gap.source..gap.source + len as u64) {
            let at = |address: u64| usize::try_from(address - gap.source).unwrap_or(usize::MAX);
            stretch.read(range.start, &mut bytes[at(range.start)..at(range.end)])?;
        }
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut at = 0;
        let mut size = len;
        while at < len {
            let to = gap.range.start + at as u64;
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

    fn settle(&mut self, at: u64, len: u64) {
        self.missing.take(&(at..at + len));
    }

    /// Whoever waits looks again: the page is there, or its mapping is not.
    fn wake(&self, at: u64) {
        // If the address space is gone nobody waits.
        let _ = uffd::wake(self.uffd.as_fd(), at, PAGE);
    }
}

fn lost(at: u64) -> Error {
    Error::invalid("pages", format!("the gap at {at:x} is larger than what was asked for"))
}

/// Brings in everything. `other` is watched meanwhile: its end is an error.
///
/// # Errors
/// Pages that cannot be read, or are not those that were sealed; the kernel's. Then
/// `spaces` are those that lack pages still. They must not be dropped while a task runs
/// in one of them.
pub fn run(spaces: &mut Vec<Space>, other: &OwnedFd) -> Result<()> {
    let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or(0)];
    let mut next = 0;
    loop {
        spaces.retain(|space| !space.is_done());
        if spaces.is_empty() {
            return Ok(());
        }
        let ready = look(spaces, other)?;
        let mut children = Vec::new();
        let mut loud = spaces.iter_mut().zip(&ready).filter(|(_, ready)| **ready);
        let read = loud.try_for_each(|(space, _)| space.read_events(&mut children));
        spaces.append(&mut children);
        read?;
        for space in spaces.iter_mut().filter(|space| !space.waiting.is_empty()) {
            space.serve(&mut buffer)?;
        }
        if !ready.contains(&true) {
            next = (next + 1) % spaces.len();
            spaces[next].go_on(&mut buffer)?;
        }
    }
}

/// Which of the spaces have something to say.
fn look(spaces: &[Space], other: &OwnedFd) -> Result<Vec<bool>> {
    let mut fds: Vec<PollFd<'_>> = std::iter::once(other)
        .chain(spaces.iter().map(|space| &space.uffd))
        .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
        .collect();
    match poll(&mut fds, Some(&Timespec::default())) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e).context(|| "poll".to_owned()),
    }
    let mut ready = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN));
    if ready.next() == Some(true) {
        return Err(Error::Hook("the process that watches over the pager has ended".to_owned()));
    }
    Ok(ready.collect())
}
