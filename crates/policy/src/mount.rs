//! The mounts of images: read once, judged, and made as they were judged.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::automatic::Automatic;
use crate::raw;

/// A mount that images ask for. A restore makes it from this, and reads nothing else about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mount {
    /// The number of its mount namespace.
    pub space: u32,
    /// Its own number and its parent's.
    pub id: (u32, u32),
    /// The mount point.
    #[serde(with = "raw")]
    pub at: PathBuf,
    /// What it shows.
    pub from: From,
    /// Its file system.
    pub fs: FileSystem,
    /// `MS_*` flags of mount(2), but those of propagation.
    pub flags: u32,
    /// The number of the device that its file system is on. Mounts with the same number show the
    /// same file system.
    pub device: u32,
    /// The directory or file of the file system that it shows.
    #[serde(with = "raw")]
    pub root: PathBuf,
    /// Whether that had been removed.
    pub deleted: bool,
    /// The pid namespace that it shows, if it is a procfs of one below the root task's.
    pub pid_ns: Option<u32>,
    /// The namespace that it keeps, if it is one of nsfs.
    pub namespace: Option<u32>,
    /// Who is asked what is to be mounted there, if it is an automatic one and the images say so.
    pub automatic: Option<Automatic>,
    /// Which mounts it passes on, and to whom.
    pub peers: Peers,
}

/// What a mount shows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum From {
    /// The root directory that the caller gives.
    Root,
    /// A path of this host that the caller gives for a key.
    Given {
        /// The key.
        key: String,
        /// The path; `None` if none is given.
        path: Option<String>,
    },
    /// A file system on a device that the caller gives for a name.
    Device {
        /// The name.
        key: String,
        /// The device; `None` if none is given.
        path: Option<String>,
    },
    /// A path of this host that the images name.
    Host(#[serde(with = "raw")] PathBuf),
    /// A part of what a mount from outside shows.
    Part {
        /// The namespace and the number of that mount.
        whole: (u32, u32),
        /// Where it is, and its flags.
        of: (String, u32),
    },
    /// A file system that is made, or that the kernel has only one of.
    #[default]
    FileSystem,
}

/// A file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileSystem {
    /// Its type.
    pub name: String,
    /// Whether the caller of the dump trusted a plain mount to bring it back, although images have no
    /// number for its type.
    pub plain: bool,
    /// The source that it is mounted from.
    #[serde(with = "raw")]
    pub source: OsString,
    /// `MS_*` flags of the file system as a whole.
    pub flags: u32,
    /// Its other options, separated by commas.
    #[serde(with = "raw")]
    pub options: OsString,
}

/// The peer groups of a mount, by their numbers in the images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Peers {
    /// That which it shares events with.
    pub group: Option<u32>,
    /// That which it gets events from.
    pub master: Option<u32>,
    /// Whether it stays in the group that it has on this host.
    pub outside: bool,
}

impl Mount {
    /// The mount point as text.
    #[must_use]
    pub fn at(&self) -> Cow<'_, str> {
        self.at.to_string_lossy()
    }

    /// The type of the file system that is made for it, if one is.
    #[must_use]
    pub fn made(&self) -> Option<&str> {
        (self.from == From::FileSystem).then_some(&self.fs.name)
    }
}

impl FileSystem {
    /// The options as text.
    #[must_use]
    pub fn options(&self) -> Cow<'_, str> {
        self.options.to_string_lossy()
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mount at {:?}: ", self.at())?;
        let name = &self.fs.name;
        match &self.from {
            From::Root => f.write_str("the root that is given"),
            From::Given { path: Some(path), .. } => write!(f, "{path:?} of this host, as given"),
            From::Given { key, path: None } => write!(f, "what is given as {key:?}"),
            From::Device { key, .. } => {
                write!(f, "file system {name} of the device that is given as {key:?}")
            }
            From::Host(path) => write!(f, "{:?} of this host", path.to_string_lossy()),
            From::Part { whole: (_, number), .. } => {
                write!(f, "the part {:?} of mount {number}, which is given", self.root)
            }
            // That of a namespace has the name of this, and is listed with it.
            From::FileSystem if self.root == Path::new("/") || self.namespace.is_some() => {
                write!(f, "file system {name}")
            }
            From::FileSystem => write!(f, "{:?} of file system {name}", self.root),
        }?;
        if let Some(daemon) = self.automatic.as_ref().and_then(|automatic| automatic.daemon) {
            write!(f, ", for which process group {} is asked", daemon.group)?;
        }
        let read_only = self.flags & 1 != 0; // MS_RDONLY
        f.write_str(if read_only { ", read-only" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    /// What goes to another process comes back as it was, whatever the names are made of.
    #[test]
    fn names_that_are_no_text_stay_as_they_are() {
        let name = || OsString::from_vec(b"/a\xff\n\"".to_vec());
        let mount = Mount {
            space: 7,
            id: (2, 1),
            at: name().into(),
            from: From::Host(name().into()),
            fs: FileSystem { options: name(), source: "plain".into(), ..FileSystem::default() },
            root: "/".into(),
            peers: Peers { group: Some(3), master: None, outside: true },
            ..Mount::default()
        };
        let text = serde_json::to_string(&mount).unwrap();
        assert_eq!(serde_json::from_str::<Mount>(&text).unwrap(), mount);
        assert!(text.contains("\"plain\"") && text.contains("255"), "{text}");
    }
}
