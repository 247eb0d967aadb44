//! Tests of kinds of files: files of this process go through images and back.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;
use torpor_images::proto::FileEntry;

use super::FdInfo;
use crate::dump::{Dump, files};
use crate::error::Result;
use crate::options::Options;
use crate::restore::Restore;

/// A place for images, and options that point to it.
#[derive(Debug)]
pub(crate) struct World {
    /// The place.
    pub dir: TempDir,
    /// The options of dump and restore.
    pub opts: Options,
}

impl World {
    /// An empty one.
    pub(crate) fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let opts = Options { images_dir: dir.path().join("images"), ..Options::default() };
        World { dir, opts }
    }

    /// A path inside.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes images of files of this process.
    pub(crate) fn dump(&self, files: &[impl AsFd]) -> Result<Vec<FileEntry>> {
        let mut cx = Dump::of_this_process(&self.opts)?;
        let described = files
            .iter()
            .map(|file| files::describe_own(&mut cx, file.as_fd().as_raw_fd()))
            .collect::<Result<Vec<_>>>()?;
        files::finish(&mut cx)?;
        let (hooks, halt) = (&mut crate::hooks::NoHooks, &crate::halt::Halt::default());
        crate::dump::memory::copy_pages(&mut cx, hooks, halt)?;
        cx.remaps.keep();
        Ok(described)
    }

    /// Restores files of the images.
    pub(crate) fn restore(&self, entries: &[FileEntry]) -> Result<Vec<OwnedFd>> {
        let mut cx = Restore::into_this_process(&self.opts)?;
        let ids: Vec<u32> = entries.iter().map(|entry| entry.id).collect();
        let files = cx.open_all(&ids)?;
        cx.temporary.succeed()?;
        let sleepers = std::mem::take(&mut cx.files.sleepers);
        super::notify::wake(&cx.tasks, sleepers)?;
        Ok(files)
    }

    /// Dumps files, closes them, and restores them.
    pub(crate) fn round_trip(&self, files: Vec<OwnedFd>) -> Vec<OwnedFd> {
        let entries = self.dump(&files).unwrap();
        drop(files);
        self.restore(&entries).unwrap()
    }
}

/// Waits until there is something to read, or it has come to its end: a child that another test starts at this
/// moment has the other end, too, which was closed here, until it executes its program.
pub(crate) fn await_readable(file: impl AsFd) {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let mut waiting = [PollFd::new(&file, PollFlags::IN)];
    assert_eq!(poll(&mut waiting, Some(&limit)).unwrap(), 1, "nothing comes");
}

/// The text of procfs's link of a descriptor of this process.
pub(crate) fn link(file: impl AsFd) -> String {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    std::fs::read_link(path).unwrap().to_str().unwrap().to_owned()
}

/// The `fdinfo` of a descriptor of this process, less what is the descriptor's, and
/// the numbers that a restore cannot keep.
pub(crate) fn fdinfo(file: impl AsFd) -> Vec<String> {
    let path = format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let mut info = FdInfo::parse(&std::fs::read_to_string(path).unwrap());
    info.rest.retain(|line| !line.starts_with("eventfd-id"));
    let flags = info.flags & !libc::O_CLOEXEC.cast_unsigned();
    info.rest.extend([format!("flags {flags:o}"), format!("pos {}", info.pos)]);
    info.rest
}
