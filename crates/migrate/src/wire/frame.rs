//! Frames: one message, or one piece of a file.
//!
//! ```text
//!     preamble   "torpor-m"  oldest version u16  newest version u16      each end, once
//!     frame      kind u8     three zero bytes    length u32   length bytes
//! ```
//!
//! A frame of kind 3 is empty, and says that its end lives: see [`Line::beat`].
//!
//! Numbers are little-endian. No frame is longer than [`MAX_FRAME`]: an end that announces
//! more is cut off before a byte of it is stored.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::{wait_readable, wait_writable};
use crate::error::{Context, Error, Result};

/// The longest frame.
pub(crate) const MAX_FRAME: usize = 1 << 20;
/// The version of the protocol that this program speaks, and the oldest that it does.
pub(crate) const VERSION: u16 = 6;

const MAGIC: &[u8; 8] = b"torpor-m";
const HEADER: usize = 8;
const PREAMBLE: usize = MAGIC.len() + 4;
const MESSAGE: u8 = 1;
const DATA: u8 = 2;
const BEAT: u8 = 3;
/// How records of TLS begin (RFC 8446, 5.1): what they are, and a version, whose first byte is always 3.
const TLS_ALERT: u8 = 21;
const TLS_HANDSHAKE: u8 = 22;
const TLS_MAJOR: u8 = 3;
/// An end that lives says so that many times in the time for which the other one bears its silence.
pub(crate) const BEATS: u32 = 5;
/// How long the other end may take to finish what it has begun to say.
const PATIENCE: Duration = Duration::from_secs(20);

/// One end of a connection, between preambles and its end.
#[derive(Debug)]
pub(crate) struct Line {
    file: File,
    /// Held while a frame is written.
    writing: Arc<Mutex<()>>,
    /// As long as this is there, frames say that this end lives.
    heart: Option<Heart>,
    /// What has come of the next frame, which only says that the other end lives.
    begun: Vec<u8>,
}

/// How long the other end may be silent, and since when it is.
#[derive(Debug)]
struct Heart {
    patience: Duration,
    heard: Instant,
    _alive: Sender<()>,
}

fn lost(error: &std::io::Error) -> Error {
    Error::Link(match error.kind() {
        ErrorKind::UnexpectedEof => "it was closed".to_owned(),
        ErrorKind::WouldBlock => "nothing comes any more".to_owned(),
        _ => error.to_string(),
    })
}

impl Line {
    /// Exchanges preambles over a connection.
    ///
    /// # Errors
    /// If the other end is none of ours, or speaks other versions only.
    pub(crate) fn open(socket: OwnedFd) -> Result<Self> {
        Self::open_for(socket, PATIENCE)
    }

    /// As [`Line::open`], for whoever waits so long for each word, and no longer.
    ///
    /// # Errors
    /// As [`Line::open`].
    pub(crate) fn open_for(socket: OwnedFd, patience: Duration) -> Result<Self> {
        let (file, writing, begun) = (File::from(socket), Arc::default(), Vec::new());
        let mut line = Self { file, writing, heart: None, begun };
        line.limit(patience)?;
        let mut ours = [0; PREAMBLE];
        ours[..MAGIC.len()].copy_from_slice(MAGIC);
        ours[8..10].copy_from_slice(&VERSION.to_le_bytes());
        ours[10..].copy_from_slice(&VERSION.to_le_bytes());
        line.file.write_all(&ours).map_err(|e| lost(&e))?;
        let mut theirs = [0; PREAMBLE];
        let (kind, rest) = theirs.split_at_mut(2);
        line.file.read_exact(kind).map_err(|e| lost(&e))?;
        if let [TLS_ALERT | TLS_HANDSHAKE, TLS_MAJOR] = *kind {
            return Err(Error::refused_with(
                "the other end speaks TLS: it wants to see a certificate",
                "give --cert, --key and --ca at both ends",
            ));
        }
        line.file.read_exact(rest).map_err(|e| lost(&e))?;
        if theirs[..MAGIC.len()] != *MAGIC {
            return Err(Error::Protocol("it is no agent of Torpor's".to_owned()));
        }
        let oldest = u16::from_le_bytes([theirs[8], theirs[9]]);
        let newest = u16::from_le_bytes([theirs[10], theirs[11]]);
        if !(oldest..=newest).contains(&VERSION) {
            return Err(Error::refused_with(
                format!(
                    "the other host speaks versions {oldest} to {newest} of the protocol, and this \
                     one version {VERSION}"
                ),
                "install the same version of torpor on both",
            ));
        }
        Ok(line)
    }

    /// How long the other end may take to go on with what it has begun.
    fn limit(&self, patience: Duration) -> Result<()> {
        [Timeout::Recv, Timeout::Send].into_iter().try_for_each(|which| {
            set_socket_timeout(&self.file, which, Some(patience))
                .map_err(|e| lost(&std::io::Error::from(e)))
        })
    }

    /// From now on this end says that it lives, whatever it is busy with, and expects the same of the other one: a
    /// silence of `patience` is the loss of the link.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn beat(&mut self, patience: Duration) -> Result<()> {
        self.limit(patience)?;
        let socket = self.file.try_clone().context(|| "a second descriptor".to_owned())?;
        let (alive, ended) = channel::<()>();
        let writing = Arc::clone(&self.writing);
        thread::spawn(move || {
            while ended.recv_timeout(patience / BEATS) == Err(RecvTimeoutError::Timeout) {
                let _writing = writing.lock().unwrap_or_else(PoisonError::into_inner);
                if beat_once(&socket).is_err() {
                    break;
                }
            }
        });
        self.heart = Some(Heart { patience, heard: Instant::now(), _alive: alive });
        Ok(())
    }

    /// Waits until this line or one of `others` can be read, in this order; `None` if it is only that the other end lives.
    ///
    /// # Errors
    /// If the other end is silent for too long.
    pub(crate) fn wait(&mut self, others: &[BorrowedFd<'_>]) -> Result<Option<Vec<bool>>> {
        let time = self.heart.as_ref().map(|heart| {
            let left = heart.patience.saturating_sub(heart.heard.elapsed());
            // An end that did not run for a while itself, or did not look, gives the other end the time to say
            // something.
            left.max(heart.patience / BEATS)
        });
        let fds: Vec<_> = [self.file.as_fd()].into_iter().chain(others.iter().copied()).collect();
        let mut ready = wait_readable(&fds, time)?;
        if ready[0] {
            if let Some(heart) = &mut self.heart {
                heart.heard = Instant::now();
            }
            match self.skip_beat()? {
                Some(true) => return Ok(None),
                // Nobody waits here for the rest: the other end may send that as slowly as it likes.
                Some(false) => ready[0] = false,
                None => {}
            }
        }
        let is_silent = |heart: &Heart| heart.heard.elapsed() >= heart.patience;
        if !ready[0] && self.heart.as_ref().is_some_and(is_silent) {
            return Err(Error::Link("the other host says nothing any more".to_owned()));
        }
        Ok(Some(ready))
    }

    /// Takes a frame away that only says that the other end lives, if the next one is such, as far as it has come: whether that
    /// was all of it.
    fn skip_beat(&mut self) -> Result<Option<bool>> {
        let failed = |errno: Errno| lost(&errno.into());
        if self.begun.is_empty() {
            let mut kind = [0];
            let (len, _) = recv(&self.file, &mut kind, RecvFlags::PEEK).map_err(failed)?;
            if len == 0 || kind[0] != BEAT {
                return Ok(None);
            }
        }
        while self.begun.len() < HEADER {
            let mut rest = [0; HEADER];
            let room = &mut rest[self.begun.len()..];
            match recv(&self.file, room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(None),
                Ok((len, _)) => {
                    let at = self.begun.len();
                    self.begun.extend(&rest[at..at + len]);
                }
                Err(Errno::AGAIN) => return Ok(Some(false)),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        self.header(None).map(|_| Some(true))
    }

    /// Says something.
    ///
    /// # Errors
    /// If the connection is down.
    pub(crate) fn say(&mut self, message: &impl Serialize) -> Result<()> {
        self.send(MESSAGE, &text(message)?)
    }

    /// Sends a piece of a file.
    ///
    /// # Errors
    /// If the connection is down.
    pub(crate) fn send_data(&mut self, data: &[u8]) -> Result<()> {
        self.send(DATA, data)
    }

    /// As [`Line::say`], until `end` can be read: false if not all of it was on its way by then. If a part of it was, nothing
    /// more can be said, and the connection is closed.
    ///
    /// # Errors
    /// If the connection is down, or takes nothing for as long as silence is borne.
    pub(crate) fn say_until(
        &mut self,
        message: &impl Serialize,
        end: BorrowedFd<'_>,
    ) -> Result<bool> {
        self.send_until(MESSAGE, &text(message)?, end)
    }

    /// As [`Line::send_data`], until `end` can be read.
    ///
    /// # Errors
    /// As [`Line::say_until`].
    pub(crate) fn send_data_until(&mut self, data: &[u8], end: BorrowedFd<'_>) -> Result<bool> {
        self.send_until(DATA, data, end)
    }

    fn send_until(&mut self, kind: u8, payload: &[u8], end: BorrowedFd<'_>) -> Result<bool> {
        let frame = frame(kind, payload)?;
        let patience = self.heart.as_ref().map_or(PATIENCE, |heart| heart.patience);
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = &frame[..];
        while !left.is_empty() {
            match wait_writable(self.file.as_fd(), end, patience)? {
                [_, true] => {
                    if left.len() < frame.len() {
                        let _ = shutdown(&self.file, Shutdown::Both);
                    }
                    return Ok(false);
                }
                [false, false] => return Err(lost(&ErrorKind::WouldBlock.into())),
                [true, false] => {}
            }
            match send(&self.file, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => left = &left[sent..],
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(lost(&error.into())),
            }
        }
        Ok(true)
    }

    fn send(&mut self, kind: u8, payload: &[u8]) -> Result<()> {
        let frame = frame(kind, payload)?;
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.file).write_all(&frame).map_err(|e| lost(&e))
    }

    /// What the other end says next.
    ///
    /// # Errors
    /// If the connection is down, or it is no message.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.hear_until(None)
    }

    /// As [`Line::hear`], until `end` can be read. What had come by then of a message is lost, and so is what follows.
    ///
    /// # Errors
    /// As [`Line::hear`]; [`Error::Cancelled`].
    pub(crate) fn hear_until<T: DeserializeOwned>(
        &mut self,
        end: Option<BorrowedFd<'_>>,
    ) -> Result<T> {
        let text = self.receive(MESSAGE, end)?;
        serde_json::from_slice(&text).map_err(|e| Error::Protocol(e.to_string()))
    }

    /// The next piece of a file.
    ///
    /// # Errors
    /// If the connection is down, or it is something else.
    pub(crate) fn receive_data(&mut self) -> Result<Vec<u8>> {
        self.receive(DATA, None)
    }

    fn receive(&mut self, expected: u8, end: Option<BorrowedFd<'_>>) -> Result<Vec<u8>> {
        let (kind, len) = loop {
            let header = self.header(end)?;
            if header.0 != BEAT {
                break header;
            }
        };
        if kind != expected || len > MAX_FRAME {
            return Err(Error::Protocol(format!("a frame of kind {kind} and {len} bytes")));
        }
        let mut payload = vec![0; len];
        self.fill(&mut payload, end)?;
        Ok(payload)
    }

    /// Takes as many bytes as there is room for, until `end` can be read: the other end may send one after the other.
    fn fill(&mut self, mut room: &mut [u8], end: Option<BorrowedFd<'_>>) -> Result<()> {
        let Some(end) = end else { return self.file.read_exact(room).map_err(|e| lost(&e)) };
        let patience = self.heart.as_ref().map_or(PATIENCE, |heart| heart.patience);
        while !room.is_empty() {
            match wait_readable(&[end, self.file.as_fd()], Some(patience))?[..] {
                [true, _] => return Err(Error::Cancelled),
                [_, true] => {}
                _ => return Err(lost(&ErrorKind::WouldBlock.into())),
            }
            match recv(&self.file, &mut *room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(lost(&ErrorKind::UnexpectedEof.into())),
                Ok((len, _)) => room = &mut room[len..],
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(lost(&error.into())),
            }
        }
        Ok(())
    }

    /// The kind and length of the next frame.
    fn header(&mut self, end: Option<BorrowedFd<'_>>) -> Result<(u8, usize)> {
        let (mut header, begun) = ([0; HEADER], std::mem::take(&mut self.begun));
        header[..begun.len()].copy_from_slice(&begun);
        self.fill(&mut header[begun.len()..], end)?;
        let [kind, 0, 0, 0, len @ ..] = header else {
            return Err(Error::Protocol("a frame has no header".to_owned()));
        };
        let len = u32::from_le_bytes(len) as usize;
        if kind == BEAT && len > 0 {
            return Err(Error::Protocol(format!("a sign of life of {len} bytes")));
        }
        Ok((kind, len))
    }

    /// The connection itself, for what follows.
    #[must_use]
    pub(crate) fn into_socket(self) -> OwnedFd {
        for which in [Timeout::Recv, Timeout::Send] {
            // It has taken one before.
            let _ = set_socket_timeout(&self.file, which, None);
        }
        self.file.into()
    }
}

fn text(message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message).map_err(|e| Error::Protocol(e.to_string()))
}

fn frame(kind: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let len = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_FRAME);
    let len = len.ok_or_else(|| Error::Protocol("a message is too long".to_owned()))?;
    Ok([&[kind, 0, 0, 0][..], &len.to_le_bytes(), payload].concat())
}

/// Says that this end lives. Where nothing more fits in, enough lies there that says so.
fn beat_once(mut socket: &File) -> std::io::Result<()> {
    let frame = [BEAT, 0, 0, 0, 0, 0, 0, 0];
    match send(socket, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) => socket.write_all(&frame[sent..]),
        Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixStream;

    use rustix::net::sockopt::socket_timeout;

    use super::*;

    /// A line, and its other end, which has said its preamble and nothing else.
    fn opened(patience: Duration) -> (Line, UnixStream) {
        let (near, mut far) = UnixStream::pair().unwrap();
        let opening = thread::spawn(move || Line::open_for(near.into(), patience).unwrap());
        let mut preamble = [0; PREAMBLE];
        far.read_exact(&mut preamble).unwrap();
        far.write_all(&preamble).unwrap();
        (opening.join().unwrap(), far)
    }

    /// The other end says one byte after the other: whoever wants the end of it does not wait for the last one.
    #[test]
    fn what_comes_in_part_can_be_ended() {
        let hour = Duration::from_secs(3600);
        let word = frame(MESSAGE, b"\"word\"").unwrap();
        for len in [0, 1, HEADER, word.len() - 1] {
            let (mut line, mut far) = opened(hour);
            far.write_all(&word[..len]).unwrap();
            let (mut caller, end) = UnixStream::pair().unwrap();
            caller.write_all(b"x").unwrap();
            let heard = line.hear_until::<String>(Some(end.as_fd()));
            assert!(matches!(heard, Err(Error::Cancelled)), "{len}: {heard:?}");
        }
        let (mut line, mut far) = opened(hour);
        let (_caller, end) = UnixStream::pair().unwrap();
        far.write_all(&word).unwrap();
        assert_eq!(line.hear_until::<String>(Some(end.as_fd())).unwrap(), "word");
        // Half of what says that it lives is nothing to wait for, and its rest is.
        let beat = frame(BEAT, b"").unwrap();
        line.beat(hour).unwrap();
        far.write_all(&beat[..3]).unwrap();
        assert_eq!(line.wait(&[end.as_fd()]).unwrap(), Some(vec![false; 2]));
        far.write_all(&beat[3..]).unwrap();
        assert_eq!(line.wait(&[end.as_fd()]).unwrap(), None);
        far.write_all(&word).unwrap();
        assert_eq!(line.wait(&[end.as_fd()]).unwrap(), Some(vec![true, false]));
        assert_eq!(line.hear::<String>().unwrap(), "word");
        drop(far);
        assert_eq!(line.wait(&[]).unwrap(), Some(vec![true]), "its end is one of its words");
    }

    /// The other end takes nothing, and somebody wants the end of it: nobody waits for a link that hangs.
    #[test]
    fn what_does_not_go_out_can_be_ended() {
        let patience = Duration::from_secs(7);
        let (mut line, mut far) = opened(patience);
        assert_eq!(socket_timeout(&line.file, Timeout::Recv).unwrap(), Some(patience));
        let (mut caller, end) = UnixStream::pair().unwrap();
        assert!(line.send_data_until(b"abc", end.as_fd()).unwrap());
        caller.write_all(b"x").unwrap();
        // Before a piece: the other end hears of it.
        assert!(!line.send_data_until(b"def", end.as_fd()).unwrap());
        line.say(&"it ends").unwrap();
        // Within one that does not fit in: nothing follows that would be taken for the rest.
        (&end).read_exact(&mut [0]).unwrap();
        let sending = thread::spawn(move || {
            (line.send_data_until(&vec![7; MAX_FRAME], end.as_fd()).unwrap(), line)
        });
        let mut heard = vec![0; HEADER + 3 + HEADER + 9 + HEADER + 1];
        far.read_exact(&mut heard).unwrap();
        caller.write_all(b"x").unwrap();
        let (is_sent, mut line) = sending.join().unwrap();
        assert!(!is_sent);
        line.say(&"more").unwrap_err();
        assert!(far.read_to_end(&mut heard).unwrap() < MAX_FRAME);
        assert_eq!(heard[HEADER..HEADER + 3], *b"abc");
    }
}
