//! Restore: from images to running tasks.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use torpor_images::ImageDir;
use torpor_tracee::Tracee;

use crate::error::Result;
use crate::file::OpenFiles;
use crate::namespace::Namespaces;
use crate::options::Options;

/// Everything that the restore knows and has made so far.
#[derive(Debug)]
pub struct Restore<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images are.
    pub images: ImageDir,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<Task>,
    /// The namespaces that were made or joined.
    pub ns: Namespaces,
    /// Opened file descriptions.
    pub files: OpenFiles,
}

/// A task (thread group) that is being restored.
#[derive(Debug)]
pub struct Task {
    /// Its pid here.
    pub pid: i32,
    /// Its pid in the images.
    pub vpid: i32,
    /// Its husk.
    pub husk: Option<Tracee>,
}
