//! What Unix sockets are bound to: read of their entries once, listed, and bound. Anybody may bind a
//! socket to a name that is free; whose its file is to be is judged by itself, and a restore makes it where the
//! container's user may make files.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use torpor_images::proto::UnixSkEntry;

use crate::raw;

/// The flag of a socket that is not the tasks' (`uflags`).
pub(crate) const EXTERNAL: u32 = 1;
/// The longest name (`sun_path`).
const MAX_NAME: usize = 108;

/// A name of a Unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UnixName {
    /// The number of the socket.
    pub socket: u32,
    /// The name: of a path with the zero byte behind it; an abstract one begins with a zero byte.
    pub name: Vec<u8>,
    /// Its file; abstract names have none, nor have those whose file was removed.
    pub file: Option<SocketFile>,
}

/// The file of a socket.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SocketFile {
    /// The mount that it is on; below 0 if the images have no mounts.
    pub mount: i32,
    /// The path, as the mount namespace has it.
    #[serde(with = "raw")]
    pub path: PathBuf,
    /// The user and the group that own it, as the tree's user namespace has them.
    pub owner: Option<(u32, u32)>,
    /// Its permissions.
    pub mode: Option<u32>,
}

impl UnixName {
    /// That of a socket; `None` if it is bound to nothing, or not the tasks' own.
    ///
    /// # Errors
    /// A name that cannot be.
    pub(crate) fn read(entry: &UnixSkEntry) -> Result<Option<Self>, String> {
        if entry.name.len() > MAX_NAME + 1 {
            return Err(format!("socket {} has too long a name", entry.id));
        }
        if entry.name.is_empty() || entry.uflags & EXTERNAL != 0 {
            return Ok(None);
        }
        let is_path = entry.name[0] != 0;
        let file = (is_path && !entry.deleted()).then(|| SocketFile::read(entry)).transpose()?;
        Ok(Some(UnixName { socket: entry.id, name: entry.name.clone(), file }))
    }
}

impl SocketFile {
    fn read(entry: &UnixSkEntry) -> Result<Self, String> {
        let bytes = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
        let end = entry.name.iter().position(|byte| *byte == 0).unwrap_or(entry.name.len());
        let name = bytes(&entry.name[..end]);
        let path = match (&entry.torpor_path, &entry.name_dir) {
            (Some(path), _) => bytes(path),
            (None, Some(dir)) if name.is_relative() => bytes(dir).join(name),
            _ => Path::new("/").join(name),
        };
        // ".." must not lead anywhere else than it did.
        let path: PathBuf = path.components().filter(|c| *c != Component::CurDir).collect();
        if path.file_name().is_none() {
            let (id, path) = (entry.id, path.display());
            return Err(format!("socket {id} has the impossible path {path}"));
        }
        let perms = entry.file_perms;
        Ok(SocketFile {
            mount: entry.mnt_id(),
            path,
            owner: perms.map(|perms| (perms.uid, perms.gid)),
            mode: perms.map(|perms| perms.mode & 0o7777),
        })
    }
}

impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.strip_suffix(b"\0").unwrap_or(&self.name).escape_ascii();
        write!(f, "binds a Unix socket to \"{name}\" (file {})", self.socket)?;
        let Some(SocketFile { path, owner, mode, .. }) = &self.file else { return Ok(()) };
        write!(f, ", with the file {path:?}")?;
        if let Some(mode) = mode {
            write!(f, " (mode {mode:o})")?;
        }
        owner.map_or(Ok(()), |(user, group)| write!(f, " of {user}:{group}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn name(name: &[u8], change: impl Fn(&mut UnixSkEntry)) -> Result<Option<UnixName>, String> {
        let mut entry = UnixSkEntry { id: 7, name: name.to_vec(), ..UnixSkEntry::default() };
        change(&mut entry);
        UnixName::read(&entry)
    }

    #[test]
    fn files_are_where_the_names_lead() {
        let path = |bytes: &[u8], change: fn(&mut UnixSkEntry)| {
            name(bytes, change).unwrap().unwrap().file.map(|file| file.path)
        };
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(path(b"/run/x\0", |_| ()), at("/run/x"));
        assert_eq!(path(b"./x\0", |entry| entry.name_dir = Some(b"/a".to_vec())), at("/a/x"));
        assert_eq!(path(b"x\0", |_| ()), at("/x"));
        assert_eq!(path(b"x\0", |entry| entry.torpor_path = Some(b"/b/y".to_vec())), at("/b/y"));
        assert_eq!(path(b"\0abstract", |_| ()), None);
        assert_eq!(path(b"/gone\0", |entry| entry.deleted = Some(true)), None);
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        assert_eq!(name(b"", |_| ()), Ok(None));
        assert_eq!(name(b"/host\0", |entry| entry.uflags = EXTERNAL), Ok(None));
        assert!(name(&[b'x'; MAX_NAME + 2], |_| ()).is_err());
        for path in [&b"/\0"[..], b"/a/..\0"] {
            assert!(name(path, |_| ()).unwrap_err().contains("the impossible path"));
        }
    }
}
