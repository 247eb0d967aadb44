//! Memory: files without a name in any file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};

use crate::{PARENT_LINK, Store, check_name};

/// What stands for the device of stores in memory; no device has this number.
const DEVICE: u64 = u64::MAX;
/// The number of the next one.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Checkpoints in memory, by their names: `../NAME` leads from one to another.
#[derive(Debug, Clone, Default)]
pub struct Shelf(Arc<Mutex<BTreeMap<String, Arc<Contents>>>>);

impl Shelf {
    /// One of no checkpoints.
    #[must_use]
    pub fn new() -> Self {
        Shelf::default()
    }

    /// The checkpoint `name`, empty if there is none of this name.
    ///
    /// # Errors
    /// A name that is none of a file.
    pub fn place(&self, name: &str) -> io::Result<Memory> {
        check_name(name)?;
        let contents = Arc::clone(locked(&self.0).entry(name.to_owned()).or_insert_with(|| {
            Arc::new(Contents {
                number: NEXT.fetch_add(1, Ordering::Relaxed),
                files: Mutex::default(),
                parent: Mutex::default(),
            })
        }));
        Ok(Memory { path: Path::new("memory").join(name), shelf: self.clone(), contents })
    }

    fn find(&self, name: &str) -> io::Result<Memory> {
        if !locked(&self.0).contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.place(name)
    }

    /// Lets go of a checkpoint; its memory is free when nobody has it open any more.
    pub fn forget(&self, name: &str) {
        locked(&self.0).remove(name);
    }
}

#[derive(Debug)]
struct Contents {
    number: u64,
    files: Mutex<BTreeMap<String, OwnedFd>>,
    parent: Mutex<Option<PathBuf>>,
}

/// A checkpoint in memory. Each of its files takes a descriptor of this process.
#[derive(Debug, Clone)]
pub struct Memory {
    path: PathBuf,
    shelf: Shelf,
    contents: Arc<Contents>,
}

/// A thread that panicked has left no half of an entry behind.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    fn file(&self, name: &str, access: OFlags) -> io::Result<File> {
        check_name(name)?;
        let files = locked(&self.contents.files);
        let file = files.get(name).ok_or(io::ErrorKind::NotFound)?;
        // Opened anew, it has a position of its own.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?.into())
    }
}

impl Store for Memory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::RDONLY)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        check_name(name)?;
        let mut files = locked(&self.contents.files);
        if files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        files.insert(name.to_owned(), memfd_create(name, MemfdFlags::CLOEXEC)?);
        drop(files);
        self.reopen(name)
    }

    fn reopen(&self, name: &str) -> io::Result<File> {
        self.file(name, OFlags::RDWR)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        let was_there = if name == PARENT_LINK {
            locked(&self.contents.parent).take().is_some()
        } else {
            locked(&self.contents.files).remove(name).is_some()
        };
        if was_there { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn replace(&self, from: &str, name: &str) -> io::Result<()> {
        check_name(name)?;
        let mut files = locked(&self.contents.files);
        let file = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        files.insert(name.to_owned(), file);
        Ok(())
    }

    fn exists(&self, name: &str) -> io::Result<bool> {
        check_name(name)?;
        let is_parent = name == PARENT_LINK && locked(&self.contents.parent).is_some();
        Ok(is_parent || locked(&self.contents.files).contains_key(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names: Vec<_> = locked(&self.contents.files).keys().cloned().collect();
        if locked(&self.contents.parent).is_some() {
            names.push(PARENT_LINK.to_owned());
        }
        Ok(names)
    }

    fn relative(&self, path: &Path) -> io::Result<Arc<dyn Store>> {
        match path.components().collect::<Vec<_>>().as_slice() {
            [Component::ParentDir, Component::Normal(name)] => {
                let name = name.to_str().ok_or(io::ErrorKind::NotFound)?;
                Ok(Arc::new(self.shelf.find(name)?))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn inner(&self, name: &str) -> io::Result<Arc<dyn Store>> {
        let text = format!("a checkpoint in memory holds no other ({name})");
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    fn parent_path(&self) -> io::Result<Option<PathBuf>> {
        Ok(locked(&self.contents.parent).clone())
    }

    fn set_parent(&self, path: &Path) -> io::Result<()> {
        let mut parent = locked(&self.contents.parent);
        if parent.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        *parent = Some(path.to_owned());
        Ok(())
    }

    fn complete(&self) -> io::Result<()> {
        Ok(())
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        Ok((DEVICE, self.contents.number))
    }

    fn directory(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
