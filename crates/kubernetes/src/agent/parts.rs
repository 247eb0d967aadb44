//! A checkpoint in the store, of which any part can be read. It lies there in chunks: those that hold the part are fetched, and no
//! others. Each is compared with its digest.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use torpor_blobs::chunks::MAX_OBJECT;
use torpor_blobs::oci::Descriptor;
use torpor_blobs::{self as blobs, Store};

use super::late::LateFile;
use super::store::pages_in;
use crate::error::{Context, Error, Result};

/// The stream of a checkpoint.
#[derive(Debug)]
pub(super) struct Parts {
    store: Box<dyn Store>,
    /// The chunks, and where each ends in the stream.
    chunks: Vec<(Descriptor, u64)>,
    /// The chunk that was fetched last, and its number: the next part begins in it, as a rule.
    last: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
    /// What errors call it.
    place: String,
}

impl Parts {
    /// The stream of these chunks.
    pub(super) fn new(store: Box<dyn Store>, layers: Vec<Descriptor>, place: String) -> Self {
        let mut end = 0_u64;
        let chunks = layers.into_iter().map(|chunk| {
            end = end.saturating_add(chunk.size);
            (chunk, end)
        });
        Self { store, chunks: chunks.collect(), last: Mutex::default(), place }
    }

    /// Where the stream ends.
    fn end(&self) -> u64 {
        self.chunks.last().map_or(0, |(_, end)| *end)
    }

    /// All of the stream.
    pub(super) fn reader(&self) -> PartsReader<'_> {
        PartsReader { parts: self, at: 0 }
    }

    /// Reads as much as one chunk has of the stream from `at` on, or as `to` takes; nothing at its end.
    ///
    /// # Errors
    /// If the store does not have the chunk, or has another one.
    fn read(&self, at: u64, to: &mut [u8]) -> Result<usize> {
        let number = self.chunks.partition_point(|(_, end)| *end <= at);
        let Some((chunk, end)) = self.chunks.get(number) else { return Ok(0) };
        let bytes = self.chunk(number, chunk)?;
        let from = usize::try_from(at.saturating_sub(end.saturating_sub(chunk.size)));
        let rest = bytes.get(from.unwrap_or(usize::MAX)..).unwrap_or_default();
        let len = rest.len().min(to.len());
        to[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn chunk(&self, number: usize, chunk: &Descriptor) -> Result<Arc<Vec<u8>>> {
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last().clone();
        if let Some((_, bytes)) = known.filter(|(known, _)| *known == number) {
            return Ok(bytes);
        }
        let bytes = blobs::whole(&*self.store, chunk, MAX_OBJECT).context(|| &self.place)?;
        let bytes = Arc::new(bytes);
        *last() = Some((number, Arc::clone(&bytes)));
        Ok(bytes)
    }
}

/// Reads the stream of a checkpoint from any place on.
#[derive(Debug)]
pub(super) struct PartsReader<'p> {
    parts: &'p Parts,
    at: u64,
}

impl Read for PartsReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let len = self.parts.read(self.at, to).map_err(io::Error::other)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for PartsReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.parts.end().checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// The files of pages of a checkpoint in the store.
#[derive(Debug)]
pub(super) struct StoredPages {
    parts: Parts,
    /// Where each begins in the stream.
    files: Vec<(LateFile, u64)>,
}

impl StoredPages {
    /// Those of a checkpoint.
    ///
    /// # Errors
    /// If it cannot be read, or is none.
    pub(super) fn of(parts: Parts) -> Result<Self> {
        let files = pages_in(parts.reader())?;
        Ok(Self { parts, files })
    }

    /// A part of a file.
    ///
    /// # Errors
    /// If there is no such file, or no such part of it; if the store does not have it.
    pub(super) fn read(&self, of: &LateFile, part: &Range<u64>) -> Result<Vec<u8>> {
        let found = self.files.iter().find(|(file, _)| file == of);
        let Some((_, begin)) = found.filter(|_| part.end <= of.len) else {
            return Err(Error::new(format!("{} has no such pages", self.parts.place)));
        };
        let len = part.end.saturating_sub(part.start);
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        let mut reader = self.parts.reader();
        let read = reader.seek(SeekFrom::Start(begin.saturating_add(part.start)));
        let read = read.and_then(|_| reader.read_exact(&mut data));
        read.context(|| &self.parts.place)?;
        Ok(data)
    }
}
