//! Writing an image file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::{Message, Name};
use torpor_seal::Checkpoint;
use torpor_seal::record::RecordWriter;

use crate::error::{Error, Result, debug_check_message};
use crate::kind::Kind;
use crate::reader::MAX_ENTRY;
use crate::sums::Note;

/// Writes an image file. It is complete after [`Writer::finish`] only. It
/// also implements [`Write`], for data that is streamed.
#[derive(Debug)]
#[must_use = "an image is not complete before finish()"]
pub struct Writer {
    inner: Out,
    file: PathBuf,
    kind: Kind,
    offset: u64,
    note: Option<Note>,
}

/// Where a [`Writer`] writes to.
#[derive(Debug)]
enum Out {
    Plain(BufWriter<File>),
    Sealed { records: RecordWriter<BufWriter<File>>, seal: Arc<Checkpoint>, name: String },
}

impl Writer {
    /// Starts an image of `kind` in `out`, which is empty, with its magic
    /// numbers. `file` is its name in errors.
    pub fn new(kind: Kind, file: &Path, out: File) -> Result<Self> {
        Self::start(kind, file, Out::Plain(BufWriter::new(out)), None)
    }

    /// Like [`Writer::new`], with a `note` of the sum that the file has in the end.
    pub(crate) fn noting(kind: Kind, file: &Path, out: File, note: Option<Note>) -> Result<Self> {
        Self::start(kind, file, Out::Plain(BufWriter::new(out)), note)
    }

    /// Like [`Writer::noting`], for the file `name` of the sealed checkpoint `seal`.
    pub(crate) fn sealed(
        kind: Kind,
        file: &Path,
        out: File,
        seal: &Arc<Checkpoint>,
        name: &str,
        note: Option<Note>,
    ) -> Result<Self> {
        let records = seal
            .writer(name, BufWriter::new(out))
            .map_err(|source| Error::Seal { dir: file.to_owned(), source })?;
        let (seal, name) = (Arc::clone(seal), name.to_owned());
        Self::start(kind, file, Out::Sealed { records, seal, name }, note)
    }

    fn start(kind: Kind, file: &Path, inner: Out, note: Option<Note>) -> Result<Self> {
        let mut writer = Self { inner, file: file.to_owned(), kind, offset: 0, note };
        for word in kind.header.words() {
            writer.raw(&word.to_le_bytes())?;
        }
        Ok(writer)
    }

    /// What follows is sealed by itself.
    fn seal(
        &mut self,
        end: impl FnOnce(&mut RecordWriter<BufWriter<File>>) -> io::Result<()>,
    ) -> Result<()> {
        match &mut self.inner {
            Out::Plain(_) => Ok(()),
            Out::Sealed { records, seal, .. } => (seal.times.records.measure(|| end(records)))
                .map_err(|source| Error::io(&self.file, "write", source)),
        }
    }

    /// Writes one entry.
    pub fn entry<M: Message + Name>(&mut self, message: &M) -> Result<()> {
        debug_check_message(self.kind, M::NAME);
        self.entry_bytes(&message.encode_to_vec())
    }

    /// Writes one entry that is already encoded.
    fn entry_bytes(&mut self, bytes: &[u8]) -> Result<()> {
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
        // The magic numbers go with the first entry.
        if self.offset > 4 * self.kind.header.words().len() as u64 {
            self.seal(RecordWriter::end_record)?;
        }
        self.raw(&len.to_le_bytes())?;
        self.raw(bytes)?;
        self.seal(RecordWriter::end_entry)
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
    pub fn finish(self) -> Result<()> {
        let failed = |source| Error::io(&self.file, "write", source);
        let sum = match self.inner {
            Out::Plain(mut out) => out.flush().map(|()| None).map_err(failed)?,
            Out::Sealed { records, seal, name } => {
                let (_, sum) = seal.times.records.measure(|| records.finish()).map_err(failed)?;
                seal.wrote(&name, sum);
                Some(sum)
            }
        };
        if let Some(note) = self.note {
            note.finish(sum);
        }
        Ok(())
    }
}

impl Write for Writer {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let count = match &mut self.inner {
            Out::Plain(out) => {
                let count = out.write(buf)?;
                self.note.iter_mut().for_each(|note| note.add(&buf[..count]));
                count
            }
            Out::Sealed { records, .. } => records.write(buf)?,
        };
        self.offset += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.inner {
            Out::Plain(out) => out.flush(),
            Out::Sealed { records, .. } => records.flush(),
        }
    }
}
