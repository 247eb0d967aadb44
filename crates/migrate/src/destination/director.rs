//! Tells a restore in rounds (`torpor restore --rounds`) which rounds there are.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};

/// What the restore says when it has done what it was told.
const READY: &[u8; 6] = b"ready\n";

/// The connection to a restore in rounds.
#[derive(Debug)]
pub(super) struct Director {
    /// Where it connects.
    pub socket: PathBuf,
    listener: UnixListener,
    stream: Option<UnixStream>,
    /// What is to be said when it has connected.
    unsaid: String,
    /// Rounds that it has not got yet, in order.
    rounds: VecDeque<u32>,
}

impl Director {
    /// One whose socket is in `dir`. The restore builds the tree by the round `first`.
    ///
    /// # Errors
    /// If the socket cannot be bound there.
    pub(super) fn new(dir: &Path, first: u32) -> Result<Self> {
        let socket = dir.join("rounds.socket");
        let listener = UnixListener::bind(&socket).context(|| socket.display().to_string())?;
        let rounds = VecDeque::from([first]);
        Ok(Self { socket, listener, stream: None, unsaid: String::new(), rounds })
    }

    /// A further round is in `dir`.
    ///
    /// # Errors
    /// If the restore is gone.
    pub(super) fn round(&mut self, number: u32, dir: &Path) -> Result<()> {
        self.rounds.push_back(number);
        self.say("round", dir)
    }

    /// The last round is in `dir`.
    ///
    /// # Errors
    /// If the restore is gone.
    pub(super) fn last(&mut self, dir: &Path) -> Result<()> {
        self.say("last", dir)
    }

    fn say(&mut self, word: &str, dir: &Path) -> Result<()> {
        self.unsaid.push_str(&format!("{word} {}\n", dir.display()));
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let words = std::mem::take(&mut self.unsaid);
        stream.write_all(words.as_bytes()).context(|| "speak to the restore".to_owned())
    }

    /// Readable when the restore says something.
    pub(super) fn voice(&self) -> BorrowedFd<'_> {
        self.stream.as_ref().map_or_else(|| self.listener.as_fd(), |stream| stream.as_fd())
    }

    /// What the restore says: the round that it has got; `None` if it has only connected.
    ///
    /// # Errors
    /// If it is gone: it has said why.
    pub(super) fn listen(&mut self) -> Result<Option<u32>> {
        let Some(stream) = &mut self.stream else {
            let (stream, _) = self.listener.accept().context(|| "accept".to_owned())?;
            self.stream = Some(stream);
            return self.flush().map(|()| None);
        };
        // Nothing is read ahead: what has been read is no voice any more.
        let mut word = [0; READY.len()];
        match stream.read_exact(&mut word) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
            read => read.context(|| "listen to the restore".to_owned())?,
        }
        match self.rounds.pop_front() {
            Some(number) if word == *READY => Ok(Some(number)),
            _ => Err(Error::refused("restore: it has gone away")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::engine::wait_readable;

    #[test]
    fn two_words_at_once_are_both_heard() {
        let dir = tempfile::tempdir().unwrap();
        let mut director = Director::new(dir.path(), 2).unwrap();
        director.round(3, dir.path()).unwrap();
        let mut restore = UnixStream::connect(&director.socket).unwrap();
        assert_eq!(director.listen().unwrap(), None);
        restore.write_all(&READY.repeat(2)).unwrap();
        assert_eq!(director.listen().unwrap(), Some(2));
        let ready = wait_readable(&[director.voice()], Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, [true], "there is more");
        assert_eq!(director.listen().unwrap(), Some(3));
        drop(restore);
        assert!(director.listen().is_err());
    }
}
