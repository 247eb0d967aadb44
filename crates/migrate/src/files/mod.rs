//! A tree of files that goes along: a root file system, from its directory here to one there.
//!
//! The source walks its tree as often as it likes, and tells the destination what is different from what it has told
//! before ([`Mirror`]); the destination does that to its own ([`Replica`]). Files keep their content, which goes by pieces
//! that differ, owners, modes, times of change, extended attributes (access control lists among them) and hard links.
//! What is mounted in the tree is left out. Tasks may rename what is walked: neither side follows a symbolic link.

mod mapped;
mod mirror;
mod networked;
mod replica;
mod scan;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub(crate) use self::mapped::mapped;
pub(crate) use self::mirror::{Mirror, Step};
pub(crate) use self::networked::{networked, write_out};
pub(crate) use self::replica::Replica;

/// Bytes of a file that are compared and sent together.
pub(crate) const PIECE: usize = 256 << 10;

/// A path in the tree, without a slash at its beginning; the tree itself is empty.
pub(crate) type Name = Vec<u8>;

/// What happens to the tree of the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Change {
    /// Something new, in place of what is there and is no directory.
    Make {
        /// Where.
        name: Name,
        /// What.
        what: What,
        /// What else it has.
        meta: Meta,
    },
    /// What is there gets other attributes, and a file this length.
    Update {
        /// Where.
        name: Name,
        /// The length, of a regular file.
        len: Option<u64>,
        /// All attributes that it has.
        meta: Meta,
    },
    /// The last file that was made or updated has these bytes, which follow as one piece of data.
    Write {
        /// Where in it.
        offset: u64,
    },
    /// Another name for a file, in place of what is there and is no directory.
    Link {
        /// Where.
        name: Name,
        /// A name that it has already.
        old: Name,
    },
    /// It is not there any more, nor what is below it.
    Remove {
        /// Where.
        name: Name,
    },
}

/// Kinds of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// A directory.
    Directory,
    /// A regular file of this length.
    Regular {
        /// Bytes.
        len: u64,
    },
    /// A symbolic link.
    Symlink {
        /// What it says.
        to: Vec<u8>,
    },
    /// A device, a FIFO or a socket.
    Special {
        /// The type bits of its mode.
        mode: u32,
        /// The number of a device.
        number: u64,
    },
}

/// The attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// Permissions, with the bits above them.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// When its content was changed: seconds and nanoseconds.
    pub changed: (i64, i64),
    /// Extended attributes of files and directories.
    pub attributes: Vec<(String, Vec<u8>)>,
}

/// A name as a path.
fn path(name: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(name))
}

/// The directory that something is in, and its name there.
fn split(name: &[u8]) -> (&[u8], &[u8]) {
    match name.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&name[..at], &name[at + 1..]),
        None => (b"", name),
    }
}

#[cfg(test)]
mod tests;
