//! What waits in Unix and UDP sockets: messages with their boundaries, senders,
//! credentials and descriptors.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::{ScmEntry, SkPacketEntry};
use torpor_images::{ImageDir, Writer, kind};
use torpor_policy::SocketMessage;
use torpor_sys::socket::{self, Credentials, Received};

use crate::error::{Context, Error, Result};
use crate::file::Found;

/// Messages that a socket can hold at most, as far as we believe an image.
const MAX_MESSAGES: usize = 1 << 20;

/// A message that was found in a queue.
#[derive(Debug)]
pub(super) struct Queued {
    /// Its content.
    pub(super) data: Vec<u8>,
    /// The sender's address, with the family; empty for none.
    pub(super) address: Vec<u8>,
    /// Its descriptors.
    pub(super) files: Vec<OwnedFd>,
    /// The sender's credentials.
    pub(super) credentials: Option<Credentials>,
}

/// Looks at everything in the queue of a socket, which stays there. `ended` says that
/// nothing more will come.
///
/// # Errors
/// Refused, if urgent data waits in it; if the queue cannot be peeked at.
pub(super) fn peek(found: &Found, kind: i32, ended: bool) -> Result<Vec<Queued>> {
    let fd = found.file.as_fd();
    if kind == libc::SOCK_STREAM {
        if socket::receive(fd, &mut [0], urgent()).is_ok() {
            return Err(found.refuse("urgent data (MSG_OOB) waits in it, which cannot be kept"));
        }
        if !socket::receive_queue(fd).is_ok_and(|bytes| bytes > 0) {
            return Ok(Vec::new());
        }
    }
    let what = || format!("queue of {}", found.link.display());
    let own = socket::get_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF).context(what)?;
    let all = if kind == libc::SOCK_STREAM {
        seek(fd, 0).and_then(|()| peek_stream(fd))
    } else {
        peek_packets(fd, ended && kind == libc::SOCK_SEQPACKET)
    };
    seek(fd, own).context(what)?;
    all.context(what)
}

/// With an offset, each look goes on where the last one ended; without (-1), it begins
/// at the front.
pub(super) fn seek(fd: BorrowedFd<'_>, at: i32) -> std::io::Result<()> {
    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, at)
}

fn urgent() -> i32 {
    libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_OOB
}

pub(super) fn look(fd: BorrowedFd<'_>, data: &mut [u8], flags: i32) -> std::io::Result<Received> {
    socket::receive(fd, data, flags | libc::MSG_PEEK | libc::MSG_DONTWAIT)
}

/// `None` when there is nothing more.
pub(super) fn more<T>(looked: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match looked {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

fn queued(received: Received, mut data: Vec<u8>) -> Queued {
    data.truncate(received.len);
    let Received { address, files, credentials, .. } = received;
    // The address of a sender without a name is its family.
    let address = if address.len() > 2 { address } else { Vec::new() };
    Queued { data, address, files, credentials }
}

/// An empty packet is passed over by the looks after the one that found it. The end of
/// a connection looks like an empty packet, but does not go away.
fn peek_packets(fd: BorrowedFd<'_>, ended: bool) -> std::io::Result<Vec<Queued>> {
    const ENOUGH: usize = 64;
    let mut all = Vec::new();
    let mut empty = Vec::new();
    seek(fd, -1)?;
    let Some(first) = more(look(fd, &mut [], libc::MSG_TRUNC))? else { return Ok(all) };
    if first.len == 0 {
        empty.push(queued(first, Vec::new()));
    }
    seek(fd, 0)?;
    while all.len() < MAX_MESSAGES && !(ended && empty.len() > ENOUGH) {
        let Some(size) = more(look(fd, &mut [], libc::MSG_TRUNC))? else { break };
        if size.len == 0 {
            empty.push(queued(size, Vec::new()));
            continue;
        }
        let mut data = vec![0; size.len];
        let Some(received) = more(look(fd, &mut data, 0))? else { break };
        all.append(&mut empty);
        all.push(queued(received, data));
    }
    if !ended {
        all.append(&mut empty);
    }
    Ok(all)
}

/// A look at a stream ends behind the first message with descriptors, as a read does.
/// Unlike a read, it also has the descriptors of a message that begins behind the
/// bytes asked for (seen with Linux 6.18), so that where it begins cannot be found out:
/// the descriptors come with the first of all bytes that were found together.
fn peek_stream(fd: BorrowedFd<'_>) -> std::io::Result<Vec<Queued>> {
    let mut all = Vec::new();
    let mut left = usize::try_from(socket::receive_queue(fd)?).unwrap_or(0);
    while left > 0 {
        let mut data = vec![0; left];
        let Some(received) = more(look(fd, &mut data, 0))? else { break };
        if received.len == 0 {
            break;
        }
        left = left.saturating_sub(received.len);
        all.push(queued(received, data));
    }
    Ok(all)
}

/// Writes `sk-queues.img`.
#[derive(Debug, Default)]
pub(super) struct QueueWriter(Option<Writer>);

impl QueueWriter {
    /// Writes a message; `entry` lacks its length.
    ///
    /// # Errors
    /// If the message has 4 GiB or more; if the image cannot be written.
    pub(super) fn write(
        &mut self,
        images: &ImageDir,
        mut entry: SkPacketEntry,
        data: &[u8],
    ) -> Result<()> {
        entry.length = u32::try_from(data.len())
            .map_err(|_| Error::Unsupported("a message of 4 GiB".to_owned()))?;
        let writer = match &mut self.0 {
            Some(writer) => writer,
            none => none.insert(images.writer(kind::SK_QUEUES, 0)?),
        };
        writer.entry(&entry)?;
        Ok(writer.raw(data)?)
    }

    /// Completes the file, if there is one.
    ///
    /// # Errors
    /// If the image cannot be written.
    pub(super) fn finish(&mut self) -> Result<()> {
        Ok(self.0.take().map_or(Ok(()), Writer::finish)?)
    }
}

/// The descriptors of a message, as the images have them.
pub(super) fn rights(ids: Vec<u32>) -> Vec<ScmEntry> {
    let kind = libc::SCM_RIGHTS.cast_unsigned();
    if ids.is_empty() { Vec::new() } else { vec![ScmEntry { r#type: kind, rights: ids }] }
}

/// The messages of the images, by the sockets that they wait in; those of `theirs` only.
///
/// # Errors
/// If the image is damaged; a message that comes with something else than open files.
pub(super) fn load(
    images: &ImageDir,
    theirs: impl Fn(u32) -> bool,
) -> Result<HashMap<u32, Vec<SocketMessage>>> {
    let mut queued: HashMap<u32, Vec<SocketMessage>> = HashMap::new();
    SocketMessage::each(images, |message| {
        if theirs(message.socket) {
            queued.entry(message.socket).or_default().push(message);
        }
    })?;
    Ok(queued)
}
