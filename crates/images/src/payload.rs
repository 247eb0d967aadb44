//! The data that follows entries in some files.
//!
//! | file | what follows the entry |
//! |---|---|
//! | pipes-data, fifo-data | `bytes` bytes: [`Reader::raw`] |
//! | sk-queues | `length` bytes: [`Reader::raw`] |
//! | tcp-stream | `inq_len` bytes, then `outq_len` bytes: [`Reader::raw`] |
//! | bpfmap-data | `keys_bytes` + `values_bytes` bytes: [`Reader::raw`] |
//! | ipcns-shm | `size` bytes, padded to 4, unless `in_pagemaps`: [`shm_len`] |
//! | ipcns-sem | `nsems` values: [`read_semaphores`] |
//! | ipcns-msg | `qnum` messages: [`read_messages`] |
//! | ghost-file | chunks: [`next_chunk`]; or the rest of the file |

use std::io::{self, Read, Write};

use crate::error::{Error, Result};
use crate::proto::{GhostChunkEntry, IpcMsg, IpcMsgEntry, IpcSemEntry, IpcShmEntry};
use crate::reader::Reader;
use crate::writer::Writer;

/// To what the contents of shared memory are padded, in bytes.
pub const SHM_ALIGN: u64 = 4;
/// To what the values of a semaphore set are padded, in bytes.
pub const SEM_ALIGN: u64 = 8;
/// To what the text of a message is padded, in bytes.
pub const MSG_ALIGN: u64 = 8;

impl Reader {
    /// `len` bytes of data and what pads them to a multiple of `align`. What
    /// the padding is made of does not matter.
    pub fn padded(&mut self, len: u64, align: u64) -> Result<Vec<u8>> {
        let mut bytes = self.raw(len.saturating_add(padding(len, align)))?;
        bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
        Ok(bytes)
    }

    /// Copies `len` bytes of data, which are `what`, to `out`.
    pub fn copy_to(&mut self, len: u64, out: &mut impl Write, what: &'static str) -> Result<()> {
        let (offset, left) = (self.offset(), self.remaining());
        let file = self.file().to_owned();
        let truncated =
            |left| Error::Truncated { file: file.clone(), offset, what, wanted: len, left };
        if len > left {
            return Err(truncated(left));
        }
        match io::copy(&mut self.take(len), out) {
            Ok(copied) if copied == len => Ok(()),
            Ok(copied) => Err(truncated(copied)),
            Err(source) => Err(Error::Io { file, action: "copy", source }),
        }
    }
}

impl Writer {
    /// Writes data and zeros that pad it to a multiple of `align`.
    pub fn padded(&mut self, bytes: &[u8], align: u64) -> Result<()> {
        self.raw(bytes)?;
        for _ in 0..padding(bytes.len() as u64, align) {
            self.raw(&[0])?;
        }
        Ok(())
    }
}

/// How many bytes follow `len` bytes up to the next multiple of `align`.
fn padding(len: u64, align: u64) -> u64 {
    (align - len % align) % align
}

/// How many bytes (padded to [`SHM_ALIGN`]) follow a shared memory entry: none
/// if its contents are in a pagemap.
#[must_use]
pub fn shm_len(entry: &IpcShmEntry) -> u64 {
    if entry.in_pagemaps() { 0 } else { entry.size }
}

/// Reads the values of a semaphore set, which follow its entry.
pub fn read_semaphores(reader: &mut Reader, entry: &IpcSemEntry) -> Result<Vec<u16>> {
    let bytes = reader.padded(u64::from(entry.nsems) * 2, SEM_ALIGN)?;
    let (values, _) = bytes.as_chunks();
    Ok(values.iter().copied().map(u16::from_le_bytes).collect())
}

/// Writes the values of a semaphore set behind its entry.
pub fn write_semaphores(writer: &mut Writer, values: &[u16]) -> Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    writer.padded(&bytes, SEM_ALIGN)
}

/// Reads the messages of a queue, which follow its entry.
pub fn read_messages(reader: &mut Reader, entry: &IpcMsgEntry) -> Result<Vec<(IpcMsg, Vec<u8>)>> {
    let mut messages = vec![];
    for _ in 0..entry.qnum {
        let message: IpcMsg = reader.expect()?;
        let text = reader.padded(message.msize.into(), MSG_ALIGN)?;
        messages.push((message, text));
    }
    Ok(messages)
}

/// Writes one message of a queue behind the queue's entry.
pub fn write_message(writer: &mut Writer, message: &IpcMsg, text: &[u8]) -> Result<()> {
    writer.entry(message)?;
    writer.padded(text, MSG_ALIGN)
}

/// The next chunk of a ghost file that is written in chunks, or `None` after
/// the last. It is checked to lie behind `end`, where the last one ended, and
/// within a file of `size` bytes, where that is known. Its `len` bytes are
/// next in the reader.
pub fn next_chunk(
    reader: &mut Reader,
    end: u64,
    size: Option<u64>,
) -> Result<Option<GhostChunkEntry>> {
    let offset = reader.offset();
    let Some(chunk) = reader.next::<GhostChunkEntry>()? else { return Ok(None) };
    let limit = size.unwrap_or(i64::MAX.unsigned_abs());
    let inside = chunk.off.checked_add(chunk.len).is_some_and(|chunk_end| chunk_end <= limit);
    if chunk.off < end || !inside {
        let reason = format!("a chunk of {} bytes at {:#x} is out of place", chunk.len, chunk.off);
        return Err(reader.invalid(offset, reason));
    }
    Ok(Some(chunk))
}
