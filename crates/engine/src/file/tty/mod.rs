//! Terminals: pseudoterminals with both ends or one of them outside, `/dev/tty`,
//! consoles, and which session a terminal controls.
//!
//! In the images, `tty.img` entries are open files, each with the path that it was
//! opened by; `tty-info.img` holds the terminals themselves, one entry for each end of
//! a pair; `tty-data.img` what is queued.

mod dump;
mod info;
mod queue;
mod restore;
#[cfg(test)]
mod tests;

pub(crate) use dump::TtyDumper;
pub(crate) use restore::TtyRestorer;
use rustix::fs::{FileType, Stat};

/// What a character device is, by its number (Documentation/admin-guide/devices.txt).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TtyNode {
    /// `/dev/ptmx`: the master of a pair.
    Master,
    /// `/dev/pts/N`.
    Slave(u32),
    /// `/dev/tty`: whatever controls the session.
    Current,
    /// `/dev/console`.
    Console,
    /// `/dev/ttyN`.
    Virtual,
    /// `/dev/ttySN`.
    Serial,
}

impl TtyNode {
    fn of(device: u64) -> Option<Self> {
        let minor = rustix::fs::minor(device);
        match (rustix::fs::major(device), minor) {
            (5, 0) => Some(TtyNode::Current),
            (5, 1) => Some(TtyNode::Console),
            (5, 2) => Some(TtyNode::Master),
            (4, 0..64) => Some(TtyNode::Virtual),
            (4, _) => Some(TtyNode::Serial),
            (136..=143, _) => Some(TtyNode::Slave(minor)),
            _ => None,
        }
    }
}

/// Whether this is `/dev/tty`, which is another terminal for each session that opens it.
pub(crate) fn is_current(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && TtyNode::of(stat.st_rdev) == Some(TtyNode::Current)
}
