//! What an archive makes.

use torpor_images::pagemap::page_size;

use super::list::AccessList;
use crate::device::Device;

/// Data without a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Where in the file it begins.
    pub at: u64,
    /// How many bytes it has.
    pub len: u64,
}

impl Stretch {
    /// How many pages it takes in memory.
    pub(super) fn pages(&self) -> u64 {
        let end = self.at.saturating_add(self.len);
        match self.len {
            0 => 0,
            _ => end.div_ceil(page_size()) - self.at / page_size(),
        }
    }
}

/// What an entry makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Make {
    /// A file of `size` bytes: those of the stretches, which are in the archive in this
    /// order, and holes.
    File {
        /// Its length.
        size: u64,
        /// Where its data belongs.
        data: Vec<Stretch>,
    },
    /// A directory.
    Directory,
    /// A symbolic link to this.
    Symlink(Vec<u8>),
    /// A further name of the file with this path.
    Link(Vec<u8>),
    /// A device node.
    Device(Device),
    /// A named pipe.
    Fifo,
}

/// An entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it is: names without empty ones, `.` and `..` between slashes; nothing for the
    /// directory itself that is filled.
    pub path: Vec<u8>,
    /// What it is.
    pub make: Make,
    /// Its permissions, with set-uid, set-gid and sticky bit.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// When it was changed: seconds and nanoseconds.
    pub modified: (i64, u32),
    /// Extended attributes but for lists.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Access control lists: that of itself, and that of what comes into it.
    pub lists: [Option<AccessList>; 2],
}
