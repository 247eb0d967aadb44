//! Frames: one message, or one piece of a file.
//!
//! ```text
//!     preamble   "torpor-m"  oldest version u16  newest version u16      each end, once
//!     frame      kind u8     three zero bytes    length u32   length bytes
//! ```
//!
//! Numbers are little-endian. No frame is longer than [`MAX_FRAME`]: an end that announces
//! more is cut off before a byte of it is stored.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The longest frame.
pub const MAX_FRAME: usize = 1 << 20;
/// The version of the protocol that this program speaks, and the oldest that it does.
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"torpor-m";
const HEADER: usize = 8;
const PREAMBLE: usize = MAGIC.len() + 4;
const MESSAGE: u8 = 1;
const DATA: u8 = 2;
/// How long the other end may take to finish what it has begun to say.
const PATIENCE: Duration = Duration::from_secs(20);

/// One end of a connection, between preambles and its end.
#[derive(Debug)]
pub struct Line {
    file: File,
}

fn lost(error: &std::io::Error) -> Error {
    Error::Link(match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "it was closed".to_owned(),
        std::io::ErrorKind::WouldBlock => "nothing comes any more".to_owned(),
        _ => error.to_string(),
    })
}

impl Line {
    /// Exchanges preambles over a connection.
    ///
    /// # Errors
    /// If the other end is none of ours, or speaks other versions only.
    pub fn open(socket: OwnedFd) -> Result<Self> {
        let mut line = Self { file: File::from(socket) };
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&line.file, which, Some(PATIENCE))
                .map_err(|e| lost(&std::io::Error::from(e)))?;
        }
        let mut ours = [0; PREAMBLE];
        ours[..MAGIC.len()].copy_from_slice(MAGIC);
        ours[8..10].copy_from_slice(&VERSION.to_le_bytes());
        ours[10..].copy_from_slice(&VERSION.to_le_bytes());
        line.file.write_all(&ours).map_err(|e| lost(&e))?;
        let mut theirs = [0; PREAMBLE];
        line.file.read_exact(&mut theirs).map_err(|e| lost(&e))?;
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

    /// Says something.
    ///
    /// # Errors
    /// If the connection is down.
    pub fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(message).map_err(|e| Error::Protocol(e.to_string()))?;
        self.send(MESSAGE, &text)
    }

    /// Sends a piece of a file.
    ///
    /// # Errors
    /// If the connection is down.
    pub fn send_data(&mut self, data: &[u8]) -> Result<()> {
        self.send(DATA, data)
    }

    fn send(&mut self, kind: u8, payload: &[u8]) -> Result<()> {
        let len = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_FRAME);
        let len = len.ok_or_else(|| Error::Protocol("a message is too long".to_owned()))?;
        let mut frame = Vec::with_capacity(HEADER + payload.len());
        frame.extend_from_slice(&[kind, 0, 0, 0]);
        frame.extend_from_slice(&len.to_le_bytes());
        frame.extend_from_slice(payload);
        self.file.write_all(&frame).map_err(|e| lost(&e))
    }

    /// What the other end says next.
    ///
    /// # Errors
    /// If the connection is down, or it is no message.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let text = self.receive(MESSAGE)?;
        serde_json::from_slice(&text).map_err(|e| Error::Protocol(e.to_string()))
    }

    /// The next piece of a file.
    ///
    /// # Errors
    /// If the connection is down, or it is something else.
    pub fn receive_data(&mut self) -> Result<Vec<u8>> {
        self.receive(DATA)
    }

    fn receive(&mut self, expected: u8) -> Result<Vec<u8>> {
        let mut header = [0; HEADER];
        self.file.read_exact(&mut header).map_err(|e| lost(&e))?;
        let [kind, 0, 0, 0, len @ ..] = header else {
            return Err(Error::Protocol("a frame has no header".to_owned()));
        };
        let len = u32::from_le_bytes(len) as usize;
        if kind != expected || len > MAX_FRAME {
            return Err(Error::Protocol(format!("a frame of kind {kind} and {len} bytes")));
        }
        let mut payload = vec![0; len];
        self.file.read_exact(&mut payload).map_err(|e| lost(&e))?;
        Ok(payload)
    }

    /// The connection itself, for what follows.
    #[must_use]
    pub fn into_socket(self) -> OwnedFd {
        for which in [Timeout::Recv, Timeout::Send] {
            // It has taken one before.
            let _ = set_socket_timeout(&self.file, which, None);
        }
        self.file.into()
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
