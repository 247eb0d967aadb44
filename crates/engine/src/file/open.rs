//! The descriptions that a restore has opened.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::{Error, Result};

/// A descriptor of a restored task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holder {
    /// Its index among the tasks.
    pub task: usize,
    /// Descriptor number.
    pub fd: i32,
}

/// The descriptions that the restore has opened, by id.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles {
    by_id: HashMap<u32, OwnedFd>,
}

impl OpenFiles {
    /// The description `id`, if it is open already.
    pub(crate) fn get(&self, id: u32) -> Option<BorrowedFd<'_>> {
        self.by_id.get(&id).map(AsFd::as_fd)
    }

    /// The description `id`, which is open.
    ///
    /// # Errors
    /// If the images have no such file, or nobody has opened it.
    pub(crate) fn need(&self, id: u32) -> Result<BorrowedFd<'_>> {
        self.get(id).ok_or_else(|| Error::invalid("files.img", format!("no file {id}")))
    }

    /// Adds a description.
    pub(crate) fn insert(&mut self, id: u32, file: OwnedFd) {
        self.by_id.insert(id, file);
    }
}
