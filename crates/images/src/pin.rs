//! Files of an image directory as they were when they were first opened.
//!
//! Whoever may write to the directory may exchange a file between two times that it is
//! read. What a restore has judged must be what it makes, so while it judges, each file
//! that it opens, and each that it misses, is kept, and opened again from here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::error::{Error, Result};

/// Files up to this many bytes do without a descriptor while nobody reads them.
const SMALL: u64 = 1 << 20;

/// How many bytes all files that are kept may have together.
pub const MAX_PINNED: u64 = 4 << 30;

/// A file's content.
#[derive(Debug)]
enum Content {
    Small(Vec<u8>),
    /// A memory file that cannot be changed.
    Large(File),
}

#[derive(Debug, Default)]
struct State {
    /// By name; `None` for what was not there.
    kept: HashMap<String, Option<Content>>,
    /// Whether files that are opened for the first time are kept.
    open: bool,
    bytes: u64,
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

    /// No more files are kept; of those that are, the ones that `wanted` names.
    pub(crate) fn stop(&self, wanted: impl Fn(&str) -> bool) {
        let mut state = self.state();
        state.open = false;
        state.kept.retain(|name, _| wanted(name));
    }

    /// Whether there was a file `name`, if that is known.
    pub(crate) fn has(&self, name: &str) -> Option<bool> {
        self.state().kept.get(name).map(Option::is_some)
    }

    /// The file `name`: as it is kept, else as `open` opens it, which is then kept.
    pub(crate) fn open(
        &self,
        name: &str,
        path: &Path,
        open: impl FnOnce() -> Result<File>,
    ) -> Result<File> {
        let mut state = self.state();
        if !state.kept.contains_key(name) {
            let file = open();
            if !state.open || is_memory(name) {
                return file;
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
        match state.kept.get(name) {
            Some(Some(content)) => {
                content.open().map_err(|error| Error::io(path, "open a copy of", error))
            }
            _ => Err(Error::Missing { file: path.to_owned() }),
        }
    }
}

/// Pages of memory and where they belong: large, read once, and no right follows from
/// them.
pub(crate) fn is_memory(name: &str) -> bool {
    name.starts_with("pages-") || name.starts_with("pagemap-")
}

/// Copies at most `left` bytes.
fn copy(file: File, path: &Path, left: u64) -> Result<(Content, u64)> {
    let failed = |error| Error::io(path, "copy", error);
    let mut bytes = vec![];
    (&file).take(SMALL.min(left) + 1).read_to_end(&mut bytes).map_err(failed)?;
    let mut size = bytes.len() as u64;
    let content = if size <= SMALL {
        Content::Small(bytes)
    } else {
        let mut copy = memory_file(&bytes).map_err(failed)?;
        size +=
            std::io::copy(&mut file.take(left - left.min(size) + 1), &mut copy).map_err(failed)?;
        fcntl_add_seals(&copy, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK)
            .map_err(|errno| failed(errno.into()))?;
        Content::Large(copy)
    };
    if size > left {
        let file = path.to_owned();
        let what = "files other than pages";
        return Err(Error::TooLarge { file, offset: 0, what, size, limit: MAX_PINNED });
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
            Content::Large(file) => File::open(format!("/proc/self/fd/{}", file.as_raw_fd())),
        }
    }
}
