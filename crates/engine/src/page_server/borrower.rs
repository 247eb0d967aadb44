//! The pager's end of a connection to the dump that still has the pages.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{RecvFlags, recv};
use torpor_images::kind;
use torpor_seal::Checkpoint;
use torpor_seal::transit::{SALT, Transit};

use super::PAGE_LEN;
use super::connection::Connection;
use super::protocol::{Command, Object, Op};
use super::wire::{self, Incoming, Sealing};
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::options::PageServer;

/// Pages of a task, by the addresses that they have in the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The number of the task's pagemap.
    pub id: u64,
    /// From the first page to behind the last.
    pub range: Range<u64>,
}

impl Request {
    /// The bytes that it asks for.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Requests that have not been answered, in their order.
#[derive(Debug, Default)]
pub struct Asked {
    requests: VecDeque<Request>,
    bytes: u64,
}

impl Asked {
    /// Whether all have been answered.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The bytes that they ask for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether one of them asks for a page.
    pub fn has(&self, id: u64, address: u64) -> bool {
        self.requests.iter().any(|request| request.id == id && request.range.contains(&address))
    }

    /// Adds one.
    pub fn push(&mut self, request: Request) {
        self.bytes += request.bytes();
        self.requests.push_back(request);
    }

    /// The one that is answered next.
    pub fn pop(&mut self) -> Option<Request> {
        let request = self.requests.pop_front()?;
        self.bytes -= request.bytes();
        Some(request)
    }
}

/// Asks for pages. Answers come in the order of the requests.
#[derive(Debug)]
pub struct Borrower {
    connection: Connection,
    asked: Asked,
    /// What opens the pages, if they are sealed.
    transit: Option<Transit>,
    incoming: Incoming,
}

impl Borrower {
    /// Connects to the dump of the checkpoint with this id, which may be sealed.
    ///
    /// # Errors
    /// If it cannot be reached, has no right certificate, or is of another checkpoint.
    pub fn connect(to: &PageServer, id: &str, seal: Option<&Checkpoint>) -> Result<Self> {
        let mut connection = Connection::connect(to)?;
        let transit = greet(&mut connection, id, seal)?;
        let (asked, incoming) = (Asked::default(), Incoming::default());
        Ok(Borrower { connection, asked, transit, incoming })
    }

    /// What is still to be answered.
    pub fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Asks for pages; sent by [`Borrower::flush`].
    ///
    /// # Errors
    /// If the range is too long; if the connection is down.
    pub fn ask(&mut self, request: Request) -> Result<()> {
        let Request { id, range } = &request;
        let pages = u32::try_from((range.end - range.start) / PAGE);
        let pages = pages.map_err(|_| Error::invalid("page client", "too many pages"))?;
        let object = Some(Object { kind: kind::PAGEMAP, id: *id });
        let command = Command { op: Op::Get, flags: 0, pages, vaddr: range.start, object };
        command.send(&mut self.connection).context(|| "ask for pages".to_owned())?;
        self.asked.push(request);
        Ok(())
    }

    /// Sends what was asked for.
    ///
    /// # Errors
    /// If the connection is down.
    pub fn flush(&mut self) -> Result<()> {
        self.connection.flush().context(|| "ask for pages".to_owned())
    }

    /// Whether an answer can be read, without the kernel's being asked.
    pub(crate) fn has_answer(&mut self) -> bool {
        !self.asked.is_empty() && self.connection.has_more()
    }

    /// Whether the dump has gone away. What can be read need not be an answer: the
    /// encryption has messages of its own.
    pub fn is_alone(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&self.connection, &mut [0], flags) {
            Ok((_, len)) => len == 0,
            Err(error) => error != rustix::io::Errno::AGAIN,
        }
    }

    /// Waits for the answer to the first request, which fills the beginning of `buffer` (made
    /// longer if it has to be): pages that were asked for, if not all of them.
    ///
    /// # Errors
    /// If the dump is gone; if the answer is to another question, or is not as it was sealed.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> Result<Request> {
        let answer = Command::receive(&mut self.connection)?;
        let request = self.asked.pop().ok_or_else(|| wrong("pages that nobody asked for"))?;
        let Request { id, range } = request;
        let end = range.start.checked_add(u64::from(answer.pages) * PAGE);
        let end = end.filter(|&end| end > range.start && end <= range.end);
        let (Op::AddPages, Some(end), true) = (answer.op, end, answer.vaddr == range.start) else {
            return Err(wrong("other pages than were asked for"));
        };
        let len = usize::try_from(end - range.start).unwrap_or(usize::MAX);
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let seal = self.transit.as_mut();
        let seal = seal.map(|transit| Sealing { transit, owner: id, address: range.start });
        let how = wire::method(answer.flags)?;
        self.incoming.receive(how, &mut buffer[..len], seal, &mut self.connection)?;
        Ok(Request { id, range: range.start..end })
    }

    /// Tells the dump that all pages are here. When this returns its tasks are gone.
    ///
    /// # Errors
    /// If the dump has taken its tasks back. If it does not answer any more that is no
    /// error: it knew, and cannot go on.
    pub fn close(mut self, buffer: &mut Vec<u8>) -> Result<()> {
        while !self.asked.is_empty() {
            self.receive(buffer)?;
        }
        let close = Command::bare(Op::Close, None);
        let sent = close.send(&mut self.connection).and_then(|()| self.connection.flush());
        sent.context(|| "the dump that serves the pages".to_owned())?;
        let mut status = [0; 4];
        match self.connection.read_exact(&mut status).map(|()| i32::from_le_bytes(status)) {
            Ok(0) => Ok(()),
            Ok(_) => Err(Error::Peer("the tasks go on where they were dumped".to_owned())),
            Err(error) => {
                let risk = "make sure that the tasks have ended where they were dumped";
                tracing::warn!("the dump does not say that it has ended: {error}; {risk}");
                Ok(())
            }
        }
    }
}

impl AsFd for Borrower {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Says which checkpoint is restored, if the other end understands that. Returns what opens
/// its pages, if it is sealed.
fn greet(
    connection: &mut Connection,
    id: &str,
    seal: Option<&Checkpoint>,
) -> Result<Option<Transit>> {
    if !connection.is_torpor()? {
        let what = "sealed images with a dump that is not Torpor's, and serves plain pages";
        return if seal.is_none() { Ok(None) } else { Err(Error::Unsupported(what.to_owned())) };
    }
    let pages = u32::try_from(id.len()).unwrap_or(u32::MAX);
    let greeting = Command { pages, ..Command::bare(Op::Greet, None) };
    let mut status = [0; 4];
    let mut salt = [0; SALT];
    let sent = greeting.send(connection).and_then(|()| connection.write_all(id.as_bytes()));
    sent.and_then(|()| connection.flush())
        .and_then(|()| connection.read_exact(&mut status))
        .and_then(|()| connection.read_exact(&mut salt))
        .context(|| "telling the dump which checkpoint is restored".to_owned())?;
    if status != [0; 4] {
        return Err(Error::invalid("page server", "the dump there is of other images than these"));
    }
    Ok(seal.map(|seal| seal.receive_pages(PAGE_LEN, &salt)).transpose()?)
}

fn wrong(what: &str) -> Error {
    Error::invalid("page server", format!("it sent {what}"))
}
