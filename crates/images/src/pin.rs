//! Files of an image directory as they were when they were first opened.
//!
//! Whoever may write to the directory may exchange a file between two times that it is
//! read. What a restore has judged must be what it makes, so while it judges, each file
//! that it opens, and each that it misses, is kept, and opened again from here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::error::{Error, Result};

/// Files up to this many bytes do without a descriptor while nobody reads them.
const SMALL: u64 = 1 << 20;

/// How many bytes all files that are kept may have together.
const MAX_PINNED: u64 = 4 << 30;

/// A file's content.
#[derive(Debug, Clone)]
enum Content {
    Small(Arc<[u8]>),
    /// A memory file that cannot be changed, and its size.
    Large(Arc<File>, u64),
}

/// A file that is read, wherever its bytes are.
pub(crate) trait Bytes: Read + Seek + Send {}

impl<T: Read + Seek + Send> Bytes for T {}

/// A file that is read from its beginning, and its size.
pub(crate) type Source = (Box<dyn Bytes>, u64);

#[derive(Debug, Default)]
struct State {
    /// By name; `None` for what was not there.
    kept: HashMap<String, Option<Content>>,
    /// Whether files that are opened for the first time are kept.
    open: bool,
    bytes: u64,
    /// The names of all files, sorted, if there are no others but pages.
    names: Option<Arc<[String]>>,
}

impl State {
    /// Whether `name` is among the names, if they are known. Pages may come later.
    fn lists(&self, name: &str) -> Option<bool> {
        let names = self.names.as_ref().filter(|_| !is_memory(name))?;
        // A tree of thousands of tasks has some thousands more, and asks for each what it lacks.
        Some(names.binary_search_by(|known| known.as_str().cmp(name)).is_ok())
    }
}

/// The files of a directory that are kept.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<State>);

impl Pins {
    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked has left no half of an entry behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on files are kept when they are opened.
    pub(crate) fn start(&self) {
        self.state().open = true;
    }

    /// No more files are kept; of those that are, the ones that `wanted` names. The list of names
    /// stays: a file that was not there when all were judged must not appear afterwards.
    pub(crate) fn stop(&self, wanted: impl Fn(&str) -> bool) {
        let mut state = self.state();
        state.open = false;
        state.kept.retain(|name, _| wanted(name));
    }

    /// All that there is of `names`, which are sorted, is kept by now: the rest counts as missing.
    pub(crate) fn complete(&self, names: Vec<String>) {
        self.state().names = Some(names.into());
    }

    /// The names of all files, if they are known.
    pub(crate) fn names(&self) -> Option<Arc<[String]>> {
        self.state().names.clone()
    }

    /// How many bytes all kept files have.
    pub(crate) fn bytes(&self) -> u64 {
        self.state().bytes
    }

    /// Descriptors of kept files.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let of = |content: &Option<Content>| match content {
            Some(Content::Large(file, _)) => Some(file.as_raw_fd()),
            _ => None,
        };
        self.state().kept.values().filter_map(of).collect()
    }

    /// Whether there was a file `name`, if that is known.
    pub(crate) fn has(&self, name: &str) -> Option<bool> {
        let state = self.state();
        state.kept.get(name).map(Option::is_some).or_else(|| state.lists(name))
    }

    /// The file `name`: as it is kept, else as `open` opens it, which is then kept.
    pub(crate) fn open(
        &self,
        name: &str,
        path: &Path,
        open: impl FnOnce() -> Result<File>,
    ) -> Result<File> {
        match self.kept(name, path, open)? {
            Kept::Not(file) => Ok(file),
            Kept::As(content) => {
                content.open().map_err(|error| Error::io(path, "open a copy of", error))
            }
        }
    }

    /// The same, to be read from its beginning, with its size.
    pub(crate) fn source(
        &self,
        name: &str,
        path: &Path,
        open: impl FnOnce() -> Result<File>,
    ) -> Result<Source> {
        match self.kept(name, path, open)? {
            Kept::As(content) => Ok(content.source()),
            Kept::Not(file) => {
                let len = file.metadata().map_err(|error| Error::io(path, "stat", error))?.len();
                Ok((Box::new(file), len))
            }
        }
    }

    fn kept(&self, name: &str, path: &Path, open: impl FnOnce() -> Result<File>) -> Result<Kept> {
        let missing = || Error::Missing { file: path.to_owned() };
        let mut state = self.state();
        if !state.kept.contains_key(name) {
            if state.lists(name) == Some(false) {
                return Err(missing());
            }
            let file = open();
            if !state.open || is_memory(name) {
                return file.map(Kept::Not);
            }
            let content = match file {
                Ok(file) => {
                    let left = MAX_PINNED - state.bytes.min(MAX_PINNED);
                    let (content, size) = copy(file, path, left)?;
                    state.bytes += size;
                    Some(content)
                }
                Err(error) if error.is_missing() => None,
                Err(error) => return Err(error),
            };
            state.kept.insert(name.to_owned(), content);
        }
        let content = state.kept.get(name).and_then(Option::as_ref);
        content.cloned().map(Kept::As).ok_or_else(missing)
    }
}

/// A file that was asked for.
enum Kept {
    /// It is not kept.
    Not(File),
    As(Content),
}

/// Pages of memory and where they belong: large, read once, and no right follows from
/// them.
pub(crate) fn is_memory(name: &str) -> bool {
    name.starts_with("pages-") || name.starts_with("pagemap-")
}

/// How many bytes of a file of `len` bytes are copied at most: a file that takes up no room itself is not to take that of all
/// others on this host.
fn room_for(
    len: u64,
    left: u64,
    spare: impl FnOnce() -> std::io::Result<u64>,
) -> std::io::Result<u64> {
    if len > SMALL { Ok(left.min(spare()?)) } else { Ok(left) }
}

/// Copies at most `left` bytes, and no more than there is memory for.
fn copy(file: File, path: &Path, left: u64) -> Result<(Content, u64)> {
    let failed = |error| Error::io(path, "copy", error);
    // A file may have any size and take up no room.
    let len = file.metadata().map_err(failed)?.len();
    let room = room_for(len, left, torpor_store::spare_memory).map_err(failed)?;
    let limit = if room < left { room } else { MAX_PINNED };
    let left = room;
    let too_large = |size| {
        let (file, what) = (path.to_owned(), "files other than pages");
        Error::TooLarge { file, offset: 0, what, size, limit }
    };
    if len > left {
        return Err(too_large(len));
    }
    // One read takes most of them.
    let mut bytes = Vec::with_capacity(4 << 10);
    (&file).take(SMALL.min(left) + 1).read_to_end(&mut bytes).map_err(failed)?;
    let mut size = bytes.len() as u64;
    let content = if size <= SMALL {
        Content::Small(bytes.into())
    } else {
        let mut copy = memory_file(&bytes).map_err(failed)?;
        size +=
            std::io::copy(&mut file.take(left - left.min(size) + 1), &mut copy).map_err(failed)?;
        fcntl_add_seals(&copy, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK)
            .map_err(|errno| failed(errno.into()))?;
        Content::Large(Arc::new(copy), size)
    };
    // It may have grown.
    if size > left {
        return Err(too_large(size));
    }
    Ok((content, size))
}

fn memory_file(bytes: &[u8]) -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("image", flags)?);
    file.write_all(bytes)?;
    Ok(file)
}

impl Content {
    /// A file with a position of its own.
    fn open(&self) -> std::io::Result<File> {
        match self {
            Content::Small(bytes) => {
                let mut file = memory_file(bytes)?;
                file.rewind()?;
                Ok(file)
            }
            Content::Large(file, _) => File::open(format!("/proc/self/fd/{}", file.as_raw_fd())),
        }
    }

    /// The same without a descriptor of its own.
    fn source(self) -> Source {
        match self {
            Content::Small(bytes) => {
                let len = bytes.len() as u64;
                (Box::new(Cursor::new(bytes)), len)
            }
            Content::Large(file, len) => (Box::new(At { file, at: 0, len }), len),
        }
    }
}

/// Reads a file that others read, too.
struct At {
    file: Arc<File>,
    at: u64,
    len: u64,
}

impl Read for At {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for At {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let (from, by) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(by) => (self.at, by),
            SeekFrom::End(by) => (self.len, by),
        };
        self.at = from.checked_add_signed(by).ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_large_file_takes_no_more_memory_than_there_is() {
        let room = |len, spare| room_for(len, MAX_PINNED, || Ok(spare)).unwrap();
        assert_eq!(room(SMALL + 1, 1 << 30), 1 << 30);
        assert_eq!(room(SMALL + 1, u64::MAX), MAX_PINNED);
        assert_eq!(room(SMALL, 0), MAX_PINNED);
    }
}
