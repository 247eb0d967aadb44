//! Files in memory (memfd_create(2)), and shared anonymous memory: read of their entries once, listed, and made.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{FileEntry, MemfdInodeEntry};
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// The name that images give to shared anonymous memory.
const ANONYMOUS: &[u8] = b"/dev/zero";

/// A file in memory that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MemoryFile {
    /// Its number in the images.
    pub file: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// Where in it is read and written next.
    pub position: u64,
    /// What it is a description of.
    pub inode: u32,
}

/// What files in memory are descriptions of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MemoryInode {
    /// Its number in the images.
    pub number: u32,
    /// Its name.
    pub name: Vec<u8>,
    /// The user and group that it belongs to, as the tasks know them.
    pub owner: (u32, u32),
    /// How many bytes it has.
    pub size: u64,
    /// The number of its pages in the images.
    pub pages: u32,
    /// `F_SEAL_*` (fcntl(2)).
    pub seals: u32,
    /// The flags of memfd_create(2) that choose the size of its pages.
    pub huge: Option<u32>,
    /// Its type and permissions, if the images have them.
    pub mode: Option<u32>,
    /// It is shared anonymous memory.
    pub anonymous: bool,
}

impl MemoryFile {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let memfd = entry.memfd.as_ref()?;
        Some(MemoryFile {
            file: memfd.id,
            flags: memfd.flags,
            position: memfd.pos,
            inode: memfd.inode_id,
        })
    }
}

impl MemoryInode {
    /// All of the images.
    ///
    /// # Errors
    /// If the image is damaged; a number that there cannot be.
    pub fn all(images: &ImageDir) -> Result<Vec<Self>> {
        let entries = images.read_all_or_empty::<MemfdInodeEntry>(kind::MEMFD_INODE, 0)?;
        entries.into_iter().map(Self::read).collect()
    }

    fn read(entry: MemfdInodeEntry) -> Result<Self> {
        let number = u32::try_from(entry.inode_id).map_err(|_| Error::Invalid {
            image: kind::MEMFD_INODE.file_name(0),
            reason: "an inode number is out of range".to_owned(),
        })?;
        Ok(MemoryInode {
            number,
            owner: (entry.uid, entry.gid),
            size: entry.size,
            pages: entry.shmid,
            seals: entry.seals,
            huge: entry.hugetlb_flag,
            mode: entry.mode,
            anonymous: entry.torpor_anonymous(),
            name: entry.name,
        })
    }

    /// Whether it has the name of shared anonymous memory: a program can give a file that, too.
    #[must_use]
    pub fn is_called_anonymous(&self) -> bool {
        self.name == ANONYMOUS
    }
}

impl fmt::Display for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a file in memory, inode {} (file {})", self.inode, self.file)
    }
}

impl fmt::Display for MemoryInode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryInode { number, size, owner: (user, group), .. } = self;
        let name = String::from_utf8_lossy(&self.name);
        write!(f, "inode {number} in memory, {name:?}: {size} bytes of {user}:{group}")?;
        self.mode.map_or(Ok(()), |mode| write!(f, " (mode {:o})", mode & 0o7777))
    }
}
