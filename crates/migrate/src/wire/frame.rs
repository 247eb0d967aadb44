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
        let mut line = Self { file: File::from(socket), writing: Arc::default(), heart: None };
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
        let ready = wait_readable(&fds, time)?;
        if ready[0] {
            if let Some(heart) = &mut self.heart {
                heart.heard = Instant::now();
            }
            if self.skip_beat()? {
                return Ok(None);
            }
        }
        let is_silent = |heart: &Heart| heart.heard.elapsed() >= heart.patience;
        if !ready[0] && self.heart.as_ref().is_some_and(is_silent) {
            return Err(Error::Link("the other host says nothing any more".to_owned()));
        }
        Ok(Some(ready))
    }

    /// Takes a frame away that only says that the other end lives, if the next one is such.
    fn skip_beat(&mut self) -> Result<bool> {
        let mut kind = [0];
        let len = recv(&self.file, &mut kind, RecvFlags::PEEK)
            .map_err(|e| lost(&std::io::Error::from(e)))?
            .0;
        let is_beat = len == 1 && kind[0] == BEAT;
        if is_beat {
            self.header()?;
        }
        Ok(is_beat)
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
        let text = self.receive(MESSAGE)?;
        serde_json::from_slice(&text).map_err(|e| Error::Protocol(e.to_string()))
    }

    /// The next piece of a file.
    ///
    /// # Errors
    /// If the connection is down, or it is something else.
    pub(crate) fn receive_data(&mut self) -> Result<Vec<u8>> {
        self.receive(DATA)
    }

    fn receive(&mut self, expected: u8) -> Result<Vec<u8>> {
        let (kind, len) = loop {
            let header = self.header()?;
            if header.0 != BEAT {
                break header;
            }
        };
        if kind != expected || len > MAX_FRAME {
            return Err(Error::Protocol(format!("a frame of kind {kind} and {len} bytes")));
        }
        let mut payload = vec![0; len];
        self.file.read_exact(&mut payload).map_err(|e| lost(&e))?;
        Ok(payload)
    }

    /// The kind and length of the next frame.
    fn header(&mut self) -> Result<(u8, usize)> {
        let mut header = [0; HEADER];
        self.file.read_exact(&mut header).map_err(|e| lost(&e))?;
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

    /// The other end takes nothing, and somebody wants the end of it: nobody waits for a link that hangs.
    #[test]
    fn what_does_not_go_out_can_be_ended() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let greeting = far.try_clone().unwrap();
        let patience = Duration::from_secs(7);
        let opened = thread::spawn(move || Line::open_for(near.into(), patience).unwrap());
        let mut preamble = [0; PREAMBLE];
        far.read_exact(&mut preamble).unwrap();
        (&greeting).write_all(&preamble).unwrap();
        let mut line = opened.join().unwrap();
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
