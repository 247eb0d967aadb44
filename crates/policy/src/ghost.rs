//! Unlinked files that tasks have open: read of their images once, judged, and made.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{GhostFileEntry, Timeval};
use torpor_images::{ImageDir, Reader, kind};

use crate::error::{Error, Result};
use crate::remap::{FoundElsewhere, Remap};

/// The type of a file in its mode, and its values.
const TYPE: u32 = libc::S_IFMT;
const SOCKET: u32 = libc::S_IFSOCK;
const LINK: u32 = libc::S_IFLNK;
const REGULAR: u32 = libc::S_IFREG;
const BLOCK: u32 = libc::S_IFBLK;
const DIRECTORY: u32 = libc::S_IFDIR;
const CHARACTER: u32 = libc::S_IFCHR;
const FIFO: u32 = libc::S_IFIFO;

/// An unlinked file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ghost {
    /// What it is.
    pub kind: GhostKind,
    /// Its permissions, with those that make a program run with other rights.
    pub permissions: u32,
    /// The user and the group that own it, as the tree's user namespace has them.
    pub owner: (u32, u32),
    /// When it was read and changed: seconds and nanoseconds.
    pub times: Option<[(i64, i64); 2]>,
    /// The device, as the kernel encodes it, and the inode that it was.
    pub was: Option<(u32, u64)>,
}

/// What an unlinked file is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GhostKind {
    /// A regular file.
    Regular {
        /// Its length; older images do not say it.
        size: Option<u64>,
        /// Its content is in pieces, with holes between.
        in_chunks: bool,
    },
    /// A directory.
    Directory,
    /// A symbolic link to a path.
    Link(Vec<u8>),
    /// A pipe with a name.
    Fifo,
    /// The file of a Unix socket.
    Socket,
    /// A device.
    Device {
        /// A block device, else a character device.
        block: bool,
        /// Its number, as the kernel packs it for programs.
        number: u32,
    },
}

impl Ghost {
    /// The ghost with a number; `None` if there is no image.
    ///
    /// # Errors
    /// Damaged images; a file of no type.
    pub fn read(images: &ImageDir, number: u32) -> Result<Option<Self>> {
        let Some((entry, _)) = Self::open(images, number)? else { return Ok(None) };
        let image = || kind::GHOST_FILE.file_name(number.into());
        let ghost = Self::of(entry).map_err(|reason| Error::Invalid { image: image(), reason });
        ghost.map(Some)
    }

    /// The image of the ghost with a number, which has its content from here on; `None` if there is no image.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn content(images: &ImageDir, number: u32) -> Result<Option<Reader>> {
        Ok(Self::open(images, number)?.map(|(_, reader)| reader))
    }

    fn open(images: &ImageDir, number: u32) -> Result<Option<(GhostFileEntry, Reader)>> {
        let Some(mut reader) = images.reader(kind::GHOST_FILE, number.into())? else {
            return Ok(None);
        };
        Ok(Some((reader.expect()?, reader)))
    }

    /// Those that are made, with the images that ask for them and the first names that files had;
    /// `name` knows these by the numbers of the files.
    ///
    /// # Errors
    /// As [`Ghost::read`].
    pub fn all(
        images: &ImageDir,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<(String, String, Self)>> {
        let (mut seen, mut all) = (BTreeSet::new(), vec![]);
        for Remap { file, by } in Remap::all(images)? {
            let FoundElsewhere::Ghost(number) = by else { continue };
            if !seen.insert(number) {
                continue;
            }
            // One that is missing ends the restore by itself.
            let Some(ghost) = Self::read(images, number)? else { continue };
            all.push((kind::GHOST_FILE.file_name(number.into()), name(file), ghost));
        }
        Ok(all)
    }

    fn of(entry: GhostFileEntry) -> std::result::Result<Self, String> {
        let kind = match entry.mode & TYPE {
            REGULAR => GhostKind::Regular { size: entry.size, in_chunks: entry.chunks() },
            DIRECTORY => GhostKind::Directory,
            LINK => GhostKind::Link(entry.symlnk_target.clone().unwrap_or_default()),
            FIFO => GhostKind::Fifo,
            SOCKET => GhostKind::Socket,
            ty @ (CHARACTER | BLOCK) => {
                GhostKind::Device { block: ty == BLOCK, number: entry.rdev() }
            }
            _ => return Err(format!("a file of mode {:o} has no type", entry.mode)),
        };
        let time = |time: Timeval| {
            let nanos = i64::try_from(time.tv_usec % 1_000_000).unwrap_or_default() * 1000;
            (time.tv_sec.cast_signed(), nanos)
        };
        Ok(Ghost {
            kind,
            permissions: entry.mode & !TYPE & 0o7777,
            owner: (entry.uid, entry.gid),
            times: entry.atim.zip(entry.mtim).map(|(read, changed)| [time(read), time(changed)]),
            was: entry.dev.zip(entry.ino),
        })
    }
}

impl fmt::Display for Ghost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            GhostKind::Regular { size: Some(size), .. } => write!(f, "file of {size} bytes")?,
            GhostKind::Regular { size: None, .. } => f.write_str("file")?,
            GhostKind::Directory => f.write_str("directory")?,
            GhostKind::Link(to) => {
                write!(f, "symbolic link to {:?}", String::from_utf8_lossy(to))?;
            }
            GhostKind::Fifo => f.write_str("fifo")?,
            GhostKind::Socket => f.write_str("file of a socket")?,
            GhostKind::Device { .. } => f.write_str("device")?,
        }
        let (user, group) = self.owner;
        write!(f, ", of {user}:{group}, mode {:o}", self.permissions)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::request::Ask;

    fn ghost(mode: u32) -> std::result::Result<Ghost, String> {
        let (rdev, size) = (Some(0x103), Some(7));
        Ghost::of(GhostFileEntry { mode, rdev, size, ..GhostFileEntry::default() })
    }

    #[test]
    fn devices_and_programs_are_asked_for() {
        let text = |mode| ghost(mode).unwrap().judged("/x".into()).map(|ask| ask.to_string());
        assert_eq!(text(CHARACTER | 0o600).as_deref(), Some("device c 1:3 at \"/x\""));
        assert_eq!(text(BLOCK | 0o600).as_deref(), Some("device b 1:3 at \"/x\""));
        let program = Some("a set-uid or set-gid file at \"/x\" (mode 104755)".to_owned());
        assert_eq!(text(REGULAR | 0o4755), program);
        for harmless in [REGULAR | 0o755, DIRECTORY | 0o2755, LINK | 0o777, FIFO, SOCKET] {
            assert_eq!(text(harmless), None, "{harmless:o}");
        }
    }

    #[test]
    fn a_plan_has_each() {
        for (mode, expected, judged) in [
            (REGULAR | 0o640, "file of 7 bytes, of 0:0, mode 640", 0),
            (REGULAR | 0o4755, "file of 7 bytes, of 0:0, mode 4755", 1),
            (DIRECTORY | 0o755, "directory, of 0:0, mode 755", 0),
            (LINK | 0o777, "symbolic link to \"\", of 0:0, mode 777", 0),
            (FIFO, "fifo, of 0:0, mode 0", 0),
            (SOCKET, "file of a socket, of 0:0, mode 0", 0),
            (BLOCK | 0o600, "device, of 0:0, mode 600", 1),
        ] {
            let asks: Vec<Ask> = ghost(mode).unwrap().asks("/x".into()).collect();
            assert_eq!(asks[0].to_string(), format!("unlinked \"/x\": {expected}"));
            assert_eq!(asks.len(), 1 + judged);
        }
    }

    #[test]
    fn files_of_no_type_are_refused() {
        for mode in [0o4755, 0o050_000, 0o170_000] {
            assert_eq!(ghost(mode).unwrap_err(), format!("a file of mode {mode:o} has no type"));
        }
        assert_eq!(ghost(0o1_100_644).unwrap().permissions, 0o644);
    }
}
