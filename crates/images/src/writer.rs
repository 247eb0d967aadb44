//! Writing an image file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use prost::{Message, Name};

use crate::error::{Error, Result, debug_check_message};
use crate::kind::Kind;
use crate::reader::MAX_ENTRY;

/// Writes an image file. It is complete after [`Writer::finish`] only. It
/// also implements [`Write`], for data that is streamed.
#[derive(Debug)]
#[must_use = "an image is not complete before finish()"]
pub struct Writer {
    inner: BufWriter<File>,
    file: PathBuf,
    kind: Kind,
    offset: u64,
}

impl Writer {
    /// Starts an image of `kind` in `out`, which is empty, with its magic
    /// numbers. `file` is its name in errors.
    pub fn new(kind: Kind, file: &Path, out: File) -> Result<Self> {
        let mut writer =
            Self { inner: BufWriter::new(out), file: file.to_owned(), kind, offset: 0 };
        for word in kind.header.words() {
            writer.raw(&word.to_le_bytes())?;
        }
        Ok(writer)
    }

    /// Writes one entry.
    pub fn entry<M: Message + Name>(&mut self, message: &M) -> Result<()> {
        debug_check_message(self.kind, M::NAME);
        self.entry_bytes(&message.encode_to_vec())
    }

    /// Writes one entry that is already encoded.
    pub fn entry_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let size = bytes.len() as u64;
        // What a reader refuses is not written either.
        let len = u32::try_from(size).ok().filter(|_| size <= MAX_ENTRY);
        let len = len.ok_or_else(|| Error::TooLarge {
            file: self.file.clone(),
            offset: self.offset,
            what: "an entry",
            size,
            limit: MAX_ENTRY,
        })?;
        self.raw(&len.to_le_bytes())?;
        self.raw(bytes)
    }

    /// Writes data that is no entry.
    pub fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|source| Error::io(&self.file, "write", source))
    }

    /// Where in the file the next write goes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Writes what is still buffered; the file is complete then.
    pub fn finish(mut self) -> Result<()> {
        self.flush().map_err(|source| Error::io(&self.file, "write", source))
    }
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(buf)?;
        self.offset += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
