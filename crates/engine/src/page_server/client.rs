//! The client's end: a dump that sends its memory away.

use std::io::{self, Read, Write};
use std::time::Duration;

use torpor_images::packed::Packed;
use torpor_images::pagemap::Run;

use super::connection::{Connection, PATIENCE};
use super::protocol::{Command, Object, Op};
use super::wire::{Manner, Outgoing};
use crate::error::{Context, Error, Result};
#[cfg(doc)]
use crate::memory::pages::CHUNK;
use crate::options::PageServer;

/// Pages that one command can announce.
const MAX_PAGES: u64 = u32::MAX as u64;

/// Sends pagemaps and pages to a page server. What was sent counts after
/// [`Sender::close`] only; the server forgets it if this is dropped before. A server that neither
/// answers nor takes anything for ten minutes is given up.
#[derive(Debug)]
#[must_use = "what was sent counts after close() only"]
pub struct Sender {
    connection: Connection,
    outgoing: Outgoing,
    /// Whose memory is sent.
    current: Option<Object>,
    closed: bool,
}

impl Sender {
    /// Connects to a page server.
    ///
    /// # Errors
    /// If it cannot be reached, or has no right certificate.
    pub fn connect(to: &PageServer) -> Result<Self> {
        Self::connect_for(to, PATIENCE)
    }

    /// The same to a server that may take so long to answer, or to take what it is sent: the tasks stand still meanwhile.
    pub(super) fn connect_for(to: &PageServer, patience: Duration) -> Result<Self> {
        let mut connection = Connection::connect(to)?;
        let mut manner = connection.manner();
        if manner != Manner::Plain && !connection.is_torpor()? {
            manner = Manner::Plain;
        }
        connection.give_up_after(Some(patience))?;
        Ok(Self::over(connection, manner))
    }

    fn over(connection: Connection, manner: Manner) -> Self {
        Sender { connection, outgoing: Outgoing::new(manner), current: None, closed: false }
    }

    /// Connects to a page server that is Torpor's, and stores pages files as they are.
    ///
    /// # Errors
    /// If it cannot be reached, has no right certificate, or is not Torpor's; `what` is
    /// what no other server can do.
    pub(crate) fn connect_to_torpor(to: &PageServer, what: &str) -> Result<Self> {
        let mut sender = Self::over(Connection::connect(to)?, Manner::Plain);
        if sender.connection.is_torpor()? {
            sender.connection.give_up_after(Some(PATIENCE))?;
            return Ok(sender);
        }
        let why = "its protocol has no place for such pages";
        Err(Error::Unsupported(format!("{what} with a page server that is not Torpor's ({why})")))
    }

    /// Sends a part of a pages file, to be stored from `offset` on. The file is made even if
    /// the part is empty.
    ///
    /// # Errors
    /// If the part has 4 GiB or more; if the server is gone.
    pub fn store(&mut self, file: Object, offset: u64, bytes: &[u8]) -> Result<()> {
        let wrong = |_| Error::Protocol(format!("{} bytes are too many to be sent", bytes.len()));
        let pages = u32::try_from(bytes.len()).map_err(wrong)?;
        let object = Some(file);
        self.send(&Command { op: Op::Store, flags: 0, pages, vaddr: offset, object })?;
        let sent = self.connection.write_all(bytes).context(|| "send pages".to_owned());
        self.sent(sent)
    }

    /// What follows is the memory of this object. Says whether the server has the
    /// object in a parent directory.
    ///
    /// # Errors
    /// If the server is gone, or is no page server.
    pub fn open(&mut self, object: Object) -> Result<bool> {
        self.current = Some(object);
        self.send(&Command::bare(Op::Open, Some(object)))?;
        let mut there = [0];
        self.receive(&mut there)?;
        match there {
            [0] => Ok(false),
            [1] => Ok(true),
            // It says how it ends before it has answered.
            [first] if first == FAILED.to_le_bytes()[0] => Err(failed()),
            _ => Err(Error::Protocol("the other end is no page server, or wants --tls".to_owned())),
        }
    }

    /// Whether the server has the object, or the pages file, in a parent directory.
    ///
    /// # Errors
    /// If the server is gone.
    pub(crate) fn has_in_parent(&mut self, object: Object) -> Result<bool> {
        self.send(&Command::bare(Op::Parent, Some(object)))?;
        match self.status()? {
            FAILED => Err(failed()),
            there => Ok(there == 1),
        }
    }

    /// Announces a run of pages; those of a run that is present have to follow by
    /// [`Sender::pages`].
    ///
    /// # Errors
    /// If the server is gone; if the run has more than 16 TiB.
    pub fn run(&mut self, run: &Run) -> Result<()> {
        let op = if run.present { Op::AddPages } else { Op::Hole };
        let too_large = || Error::Protocol(format!("{} pages are too many to be sent", run.pages));
        let pages = u32::try_from(run.pages.min(MAX_PAGES + 1)).map_err(|_| too_large())?;
        let flags = run.flags() | if run.present { self.outgoing.flags() } else { 0 };
        // CRIU's servers want to hear again whose it is.
        self.send(&Command { op, flags, pages, vaddr: run.vaddr, object: self.current })
    }

    /// Sends the next [`CHUNK`] bytes of the pages that were announced, or the last ones.
    /// `bytes` are of no use afterwards.
    ///
    /// # Errors
    /// If the server is gone.
    pub fn pages(&mut self, bytes: &mut [u8]) -> Result<()> {
        let sent = self.outgoing.send(bytes, None, &mut self.connection);
        self.sent(sent)
    }

    /// Waits until the server has written everything. Returns what was compressed on its way.
    ///
    /// # Errors
    /// If the server could not write something, or the connection ends before it says that it has.
    pub fn close(mut self) -> Result<Option<Packed>> {
        self.closed = true;
        self.send(&Command::bare(Op::Close, None))?;
        match self.status()? {
            0 => Ok(self.outgoing.packed()),
            _ => Err(failed()),
        }
    }

    fn send(&mut self, command: &Command) -> Result<()> {
        let sent = command.send(&mut self.connection);
        self.sent(sent.context(|| "write to the page server".to_owned()))
    }

    /// What has become of what was sent: a server that has failed says so, and hears nothing any more.
    fn sent(&mut self, sent: Result<()>) -> Result<()> {
        let Err(Error::Os { source, .. }) = &sent else { return sent };
        let is_over = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        let mut status = [0; 4];
        let has_failed = is_over.contains(&source.kind())
            && self.connection.read_exact(&mut status).is_ok()
            && i32::from_le_bytes(status) == FAILED;
        if has_failed { Err(failed()) } else { sent }
    }

    /// A number that the server answers.
    fn status(&mut self) -> Result<i32> {
        let mut status = [0; 4];
        self.receive(&mut status)?;
        Ok(i32::from_le_bytes(status))
    }

    fn receive(&mut self, answer: &mut [u8]) -> Result<()> {
        let what = || "the page server's answer".to_owned();
        let flushed = self.connection.flush().context(what);
        self.sent(flushed)?;
        self.connection.read_exact(answer).context(what)
    }
}

/// What a server says that has failed, whatever it was asked.
const FAILED: i32 = -1;

fn failed() -> Error {
    Error::Peer("the page server failed; its log says why".to_owned())
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.closed {
            // The server notices as well when the connection just ends.
            let _ = self.send(&Command::bare(Op::Abandon, None));
            let _ = self.connection.flush();
        }
    }
}
