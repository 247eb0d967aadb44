//! Where images lie: in a directory, in memory or in an archive; and how they go through a pipe.
//!
//! A [`Store`] holds one checkpoint: files by their names. The codec of `torpor-images` writes
//! and reads them and knows no other place; a caller that has a store of another kind gives it to
//! the engine in place of a directory.
//!
//! | store | written | read |
//! |---|---|---|
//! | [`Directory`] | file by file | file by file, while others still write it |
//! | [`Memory`] | file by file | file by file, in this process and those that it forks |
//! | [`Archive`] | as a whole, when the checkpoint is complete | as a whole, into memory |
//!
//! [`send`] and [`receive`] carry a store through a pipe or a connection.

#![warn(unreachable_pub)]

mod archive;
mod aside;
mod directory;
mod entries;
mod memory;
mod stream;

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use archive::{Archive, spare_memory};
pub use aside::{ASIDE, Aside};
pub use directory::Directory;
pub use entries::{Rationed, each_entry, each_entry_as_it_was, each_entry_with_seek};
pub use memory::{Memory, Shelf};
pub use stream::{receive, send};

/// The file that a checkpoint is complete with.
pub const INVENTORY: &str = "inventory.img";

/// The symbolic link to what an incremental checkpoint builds on.
pub const PARENT_LINK: &str = "parent";

/// A place for the files of one checkpoint.
///
/// Names are names of files directly in it: not empty, not `.` or `..`, without a slash
/// ([`check_name`]). Every method fails with what the kernel says, and with
/// [`io::ErrorKind::InvalidInput`] for another name.
pub trait Store: Debug + Send + Sync {
    /// What people know it by, for messages only.
    fn path(&self) -> &Path;

    /// Opens a file for reading, at its beginning.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]; [`io::ErrorKind::Other`] with [`NotRegular`] if it is no
    /// regular file: a link could lead elsewhere, a fifo could block.
    fn open(&self, name: &str) -> io::Result<File>;

    /// Creates a file for its owner only, to be written and read.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`].
    fn create(&self, name: &str) -> io::Result<File>;

    /// Opens a file that [`Store::create`] has made for writing.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such file.
    fn reopen(&self, name: &str) -> io::Result<File>;

    /// Removes a file, or the link to the parent. What has it open keeps it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Gives a file the name of another, which goes; both stay if the machine fails.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such file.
    fn replace(&self, from: &str, name: &str) -> io::Result<()>;

    /// Whether there is something of that name, a link included.
    ///
    /// # Errors
    /// If the directory may not be looked into, or its file system fails.
    fn exists(&self, name: &str) -> io::Result<bool>;

    /// The names of everything in it, in any order.
    ///
    /// # Errors
    /// If the directory may not be listed, or its file system fails.
    fn names(&self) -> io::Result<Vec<String>>;

    /// The store that a relative path leads to from here (`../1`).
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such directory.
    fn relative(&self, path: &Path) -> io::Result<Arc<dyn Store>>;

    /// The store of a name directly in this one, made if it is not there.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] where stores do not nest.
    fn inner(&self, name: &str) -> io::Result<Arc<dyn Store>>;

    /// The relative path of the checkpoint that this incremental one builds on.
    ///
    /// # Errors
    /// If the link may not be read, or its file system fails.
    fn parent_path(&self) -> io::Result<Option<PathBuf>>;

    /// The checkpoint that this incremental one builds on.
    ///
    /// # Errors
    /// If its path leads nowhere: pages would be missing.
    fn parent(&self) -> io::Result<Option<Arc<dyn Store>>> {
        self.parent_path()?.map(|path| self.relative(&path)).transpose()
    }

    /// The same, if it lies in this one or beside it, in the directory that this one is in; or below the one further up,
    /// if nobody but root and this user can have laid out what is on the way. A link that somebody else has made could
    /// lead to anybody's checkpoint. What is directly in `/` has nothing beside it.
    ///
    /// # Errors
    /// As [`Store::parent`]; [`io::ErrorKind::Other`] with [`Elsewhere`] if its path leads elsewhere.
    fn parent_near(&self) -> io::Result<Option<Arc<dyn Store>>> {
        self.parent()
    }

    /// Makes it an incremental checkpoint on top of the one at `path`, relative to it.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if it has a parent.
    fn set_parent(&self, path: &Path) -> io::Result<()>;

    /// Everything was written: from here on a reader finds a whole checkpoint. Whoever removes
    /// the inventory later takes that back.
    ///
    /// # Errors
    /// If the archive cannot be written, or what was written does not come to the disk.
    fn complete(&self) -> io::Result<()>;

    /// Device and inode, or what stands for them: no two stores have the same at a time.
    ///
    /// # Errors
    /// If the directory may not be looked at, or its file system fails.
    fn identity(&self) -> io::Result<(u64, u64)>;

    /// The directory itself, where there is one.
    fn directory(&self) -> Option<BorrowedFd<'_>>;
}

/// What is there is no regular file.
#[derive(Debug)]
pub struct NotRegular;

impl std::fmt::Display for NotRegular {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it is not a regular file")
    }
}

impl std::error::Error for NotRegular {}

impl NotRegular {
    fn error() -> io::Error {
        io::Error::other(NotRegular)
    }

    /// Whether an error of [`Store::open`] says this.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<NotRegular>)
    }
}

/// A checkpoint lies somewhere else than near the one that builds on it.
#[derive(Debug)]
pub struct Elsewhere;

impl std::fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it does not lie near the checkpoint that builds on it")
    }
}

impl std::error::Error for Elsewhere {}

impl Elsewhere {
    /// The error of [`Store::parent_near`] that says this.
    #[must_use]
    pub fn error() -> io::Error {
        io::Error::other(Elsewhere)
    }

    /// Whether an error of [`Store::parent_near`] says this.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<Elsewhere>)
    }
}

/// Fails unless `name` is the name of something directly in a directory.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`].
pub fn check_name(name: &str) -> io::Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        let text = format!("{name:?} is not the name of a file in a directory");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}
