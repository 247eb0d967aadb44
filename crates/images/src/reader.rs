//! Reading the entries of an image file one after the other.

use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use prost::{Message, Name};

use crate::error::{Error, Result, debug_check_message};
use crate::kind::Kind;

/// The largest entry that is accepted, in bytes.
pub const MAX_ENTRY: u64 = 64 << 20;

/// The largest piece of data that [`Reader::raw`] returns, in bytes. What can
/// be larger (pages, shared memory, file contents) is read as a stream.
const MAX_RAW: u64 = 1 << 30;

/// Reads an image file. It also implements [`Read`], for data that is better
/// streamed than held in memory.
pub struct Reader {
    inner: BufReader<Box<dyn Read + Send>>,
    file: PathBuf,
    kind: Kind,
    offset: u64,
    len: u64,
}

impl Reader {
    /// Reads `source`, which has `len` bytes, as a file of `kind` and checks
    /// its magic numbers. `file` is its name in errors.
    pub fn new(kind: Kind, file: &Path, source: Box<dyn Read + Send>, len: u64) -> Result<Self> {
        let mut reader =
            Self { inner: BufReader::new(source), file: file.to_owned(), kind, offset: 0, len };
        for expected in kind.header.words() {
            let offset = reader.offset;
            let found = reader.word("the magic number")?;
            if found != expected {
                if torpor_seal::record::is_sealed(&found.to_le_bytes()) {
                    return Err(Error::Sealed { file: reader.file });
                }
                return Err(Error::BadMagic { file: reader.file, offset, expected, found });
            }
        }
        Ok(reader)
    }

    /// Reads bytes in memory; see [`Reader::new`].
    pub fn from_bytes(kind: Kind, file: &Path, bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.to_owned();
        let len = bytes.len() as u64;
        Self::new(kind, file, Box::new(io::Cursor::new(bytes)), len)
    }

    /// The next entry, or `None` at the end of the file.
    #[allow(clippy::should_implement_trait, reason = "an entry's type may differ from the last")]
    pub fn next<M: Message + Name + Default>(&mut self) -> Result<Option<M>> {
        debug_check_message(self.kind, M::NAME);
        let offset = self.offset;
        let Some(bytes) = self.next_bytes()? else { return Ok(None) };
        match M::decode(bytes.as_slice()) {
            Ok(message) => Ok(Some(message)),
            Err(source) => {
                let file = self.file.clone();
                Err(Error::Decode { file, offset, message: M::NAME, source })
            }
        }
    }

    /// The next entry, which must be there.
    pub fn expect<M: Message + Name + Default>(&mut self) -> Result<M> {
        let offset = self.offset;
        match self.next()? {
            Some(message) => Ok(message),
            None => Err(Error::Empty { file: self.file.clone(), offset }),
        }
    }

    /// The encoded bytes of the next entry, or `None` at the end of the file.
    pub fn next_bytes(&mut self) -> Result<Option<Vec<u8>>> {
        if self.remaining() == 0 {
            return Ok(None);
        }
        let len = u64::from(self.word("the length of an entry")?);
        self.take(len, "an entry", MAX_ENTRY).map(Some)
    }

    /// `len` bytes of data that are no entry.
    pub fn raw(&mut self, len: u64) -> Result<Vec<u8>> {
        self.take(len, "data", MAX_RAW)
    }

    /// Everything up to the end of the file.
    pub fn rest(&mut self) -> Result<Vec<u8>> {
        self.raw(self.remaining())
    }

    /// Fails unless the end of the file is reached.
    pub fn end(&self) -> Result<()> {
        match self.remaining() {
            0 => Ok(()),
            left => Err(Error::Trailing { file: self.file.clone(), offset: self.offset, left }),
        }
    }

    /// Where in the file the next read starts.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes are left.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.len.saturating_sub(self.offset)
    }

    /// The file's name, for errors.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// An error that says that what stands at `offset` makes no sense.
    pub fn invalid(&self, offset: u64, reason: impl Into<String>) -> Error {
        Error::Invalid { file: self.file.clone(), offset, reason: reason.into() }
    }

    fn word(&mut self, what: &'static str) -> Result<u32> {
        let mut bytes = [0; 4];
        self.check(4, what)?;
        self.fill(&mut bytes, what)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn take(&mut self, len: u64, what: &'static str, limit: u64) -> Result<Vec<u8>> {
        self.check(len, what)?;
        let too_large = || Error::TooLarge {
            file: self.file.clone(),
            offset: self.offset,
            what,
            size: len,
            limit,
        };
        if len > limit {
            return Err(too_large());
        }
        let mut bytes = vec![0; usize::try_from(len).map_err(|_| too_large())?];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    /// Fails if fewer than `wanted` bytes are left, before memory is taken.
    fn check(&self, wanted: u64, what: &'static str) -> Result<()> {
        let left = self.remaining();
        if wanted <= left {
            return Ok(());
        }
        Err(Error::Truncated { file: self.file.clone(), offset: self.offset, what, wanted, left })
    }

    fn fill(&mut self, bytes: &mut [u8], what: &'static str) -> Result<()> {
        match self.inner.read_exact(bytes) {
            Ok(()) => {
                self.offset += bytes.len() as u64;
                Ok(())
            }
            // The file has become shorter since it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Error::Truncated {
                file: self.file.clone(),
                offset: self.offset,
                what,
                wanted: bytes.len() as u64,
                left: 0,
            }),
            Err(source) => Err(Error::io(&self.file, "read", source)),
        }
    }
}

impl Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        self.offset += count as u64;
        Ok(count)
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({}, {} of {})", self.file.display(), self.offset, self.len)
    }
}
