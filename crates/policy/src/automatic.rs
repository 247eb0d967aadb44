//! Automatic mounts (autofs): who is asked for what is to be mounted there. Read of their image once,
//! listed with the mount, and made.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use torpor_images::proto::AutofsEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::raw;

/// The file system.
pub(crate) const NAME: &str = "autofs";

/// What the file system of an automatic mount is made with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Automatic {
    /// Who is asked; `None` if nobody is any more.
    pub daemon: Option<Daemon>,
    /// Which accesses are asked about.
    pub triggers: Triggers,
    /// After how many seconds without use the daemon is asked to unmount.
    pub timeout: u32,
    /// The versions of the protocol that may be spoken, the lowest and the highest.
    pub protocols: (u32, u32),
    /// The user and the group that its directories belong to, unless that is root.
    pub owner: (Option<u32>, Option<u32>),
    /// The directories in it, each behind the one that it is in.
    pub directories: Vec<Directory>,
}

/// Who is asked for mounts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Daemon {
    /// Its process group.
    pub group: u32,
    /// The number by which the kernel knows the writing end of the pipe that it asks through. No task need
    /// have it open.
    pub writing: u32,
    /// The number of the reading end in a task of the group, if the image has one.
    pub reading: Option<u32>,
}

/// Which accesses are asked about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Triggers {
    /// Those to the mount itself.
    Direct,
    /// Those to names in it.
    #[default]
    Indirect,
    /// Those to a mount itself that is a part of another automatic one.
    Offset,
}

/// A directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Directory {
    /// Its path from the root of the file system.
    #[serde(with = "raw")]
    pub path: PathBuf,
    /// Its rights.
    pub mode: u32,
}

impl Triggers {
    /// In the order of their numbers in the images.
    const ALL: [Self; 3] = [Triggers::Direct, Triggers::Indirect, Triggers::Offset];

    /// The option of a mount, as the kernel has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Triggers::Direct => "direct",
            Triggers::Indirect => "indirect",
            Triggers::Offset => "offset",
        }
    }

    /// Its number in the images.
    #[must_use]
    pub fn number(self) -> i32 {
        match self {
            Triggers::Direct => 0,
            Triggers::Indirect => 1,
            Triggers::Offset => 2,
        }
    }
}

impl Automatic {
    /// What images have of the automatic mount on a device, if anything.
    ///
    /// # Errors
    /// A damaged image; one that makes no sense.
    pub(crate) fn read(images: &ImageDir, device: u32) -> Result<Option<Self>> {
        let entries: Vec<AutofsEntry> = images.read_all_or_empty(kind::AUTOFS, device.into())?;
        let Some(entry) = entries.into_iter().next() else { return Ok(None) };
        let image = || kind::AUTOFS.file_name(device.into());
        let read = Self::of(&entry).map_err(|reason| Error::Invalid { image: image(), reason })?;
        Ok(Some(read))
    }

    fn of(entry: &AutofsEntry) -> std::result::Result<Self, String> {
        let number = |what: &str, value: i32| {
            u32::try_from(value).map_err(|_| format!("{value} is no {what}"))
        };
        let daemon = match entry.fd {
            ..0 => None,
            _ => Some(Daemon {
                group: number("process group", entry.pgrp)?,
                writing: number("descriptor", entry.fd)?,
                reading: entry.read_fd.map(|fd| number("descriptor", fd)).transpose()?,
            }),
        };
        let triggers = Triggers::ALL.into_iter().find(|triggers| triggers.number() == entry.mode);
        let directories = entry.torpor_directories.iter().map(|directory| {
            let (path, mode) = (Path::new(OsStr::from_bytes(&directory.path)), directory.mode);
            let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
            match is_below && mode & !0o7777 == 0 {
                true => Ok(Directory { path: path.to_owned(), mode }),
                false => Err(format!("it has no directory {} ({mode:o})", path.display())),
            }
        });
        Ok(Automatic {
            daemon,
            triggers: triggers.ok_or_else(|| format!("there is no mode {}", entry.mode))?,
            timeout: number("timeout", entry.timeout)?,
            protocols: (
                number("version of a protocol", entry.minproto)?,
                number("version of a protocol", entry.maxproto)?,
            ),
            owner: (
                entry.uid.map(|id| number("user", id)).transpose()?,
                entry.gid.map(|id| number("group", id)).transpose()?,
            ),
            directories: directories.collect::<std::result::Result<_, String>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::TorporAutofsDirectory;

    use super::*;

    fn entry() -> AutofsEntry {
        AutofsEntry {
            fd: 4,
            pgrp: 7,
            timeout: 300,
            minproto: 5,
            maxproto: 5,
            mode: 1,
            read_fd: Some(3),
            ..AutofsEntry::default()
        }
    }

    #[test]
    fn what_images_have_is_read() {
        let read = Automatic::of(&entry()).unwrap();
        assert_eq!(read.daemon, Some(Daemon { group: 7, writing: 4, reading: Some(3) }));
        assert_eq!(
            (read.triggers, read.timeout, read.protocols),
            (Triggers::Indirect, 300, (5, 5))
        );
        let nobody = AutofsEntry { fd: -1, read_fd: None, ..entry() };
        assert_eq!(Automatic::of(&nobody).unwrap().daemon, None);
        for triggers in Triggers::ALL {
            let read = Automatic::of(&AutofsEntry { mode: triggers.number(), ..entry() });
            assert_eq!(read.unwrap().triggers, triggers);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let why = |entry: AutofsEntry| Automatic::of(&entry).unwrap_err();
        assert_eq!(why(AutofsEntry { mode: 3, ..entry() }), "there is no mode 3");
        assert_eq!(why(AutofsEntry { pgrp: -1, ..entry() }), "-1 is no process group");
        assert_eq!(why(AutofsEntry { timeout: -1, ..entry() }), "-1 is no timeout");
        for (path, mode) in [("/etc", 0o755), ("a/../..", 0o755), ("a", 0o100_755)] {
            let path = path.as_bytes().to_vec();
            let torpor_directories = vec![TorporAutofsDirectory { path, mode }];
            let why = why(AutofsEntry { torpor_directories, ..entry() });
            assert!(why.starts_with("it has no directory "), "{why}");
        }
    }
}
