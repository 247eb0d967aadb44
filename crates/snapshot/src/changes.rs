//! What a container has changed in its files: the layer `upper` of an overlay, and the archive of it,
//! with whiteouts as OCI has them.

use std::fs::{self, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, getxattr, mknodat, setxattr};
use tar::{Builder, EntryType, Header};

use crate::archive::header;
use crate::error::{Context, Error, Result};

/// What marks a file that is gone, in front of its name.
const WHITEOUT: &str = ".wh.";
/// What marks a directory that hides the one below it.
const OPAQUE: &str = ".wh..wh..opq";

/// A name in the layer.
#[derive(Debug)]
pub struct Change {
    /// The name in the root file system.
    name: PathBuf,
    /// What was said of it when it was listed.
    pub meta: Metadata,
    /// What has that name.
    pub what: What,
}

/// What has a name in the layer.
#[derive(Debug)]
pub enum What {
    /// Nothing any more.
    Gone,
    /// A directory, and whether it hides the one below.
    Dir(bool),
    /// A file with the content of the one at this path.
    File(PathBuf),
    /// A link to this path.
    Link(PathBuf),
    /// A pipe.
    Fifo,
}

/// Lists what was changed in the layer `upper`. Sockets are left out: who restores one makes it; and what goes
/// meanwhile, if tasks run.
///
/// # Errors
/// If it cannot be read.
pub fn list(upper: &Path) -> Result<Vec<Change>> {
    let mut found = Vec::new();
    let mut todo = vec![upper.to_owned()];
    while let Some(dir) = todo.pop() {
        let shown = || dir.display().to_string();
        let Some(entries) = there(fs::read_dir(&dir)).context(shown)? else { continue };
        for entry in entries {
            let path = entry.context(shown)?.path();
            let Some(meta) = there(fs::symlink_metadata(&path)).context(shown)? else { continue };
            let Some(what) = there(What::of(&path, &meta)).context(shown)?.flatten() else {
                continue;
            };
            if matches!(what, What::Dir(_)) {
                todo.push(path.clone());
            }
            let name = path.strip_prefix(upper).unwrap_or(&path).to_owned();
            found.push(Change { name, meta, what });
        }
    }
    Ok(found)
}

/// What is there, if it still is.
fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

impl What {
    fn of(path: &Path, meta: &Metadata) -> io::Result<Option<Self>> {
        let kind = meta.file_type();
        Ok(Some(if kind.is_char_device() && meta.rdev() == 0 {
            Self::Gone
        } else if kind.is_dir() {
            Self::Dir(is_opaque(path))
        } else if kind.is_file() {
            Self::File(path.to_owned())
        } else if kind.is_symlink() {
            Self::Link(fs::read_link(path)?)
        } else if kind.is_fifo() {
            Self::Fifo
        } else {
            return Ok(None);
        }))
    }
}

fn is_opaque(dir: &Path) -> bool {
    let mut value = [0; 4];
    let found = getxattr(dir, "trusted.overlay.opaque", &mut value[..]);
    found.is_ok_and(|len| &value[..len] == b"y")
}

/// Writes the archive of what was changed.
///
/// # Errors
/// If a file cannot be read, or the archive not be written.
pub fn write(to: &mut dyn Write, changes: &[Change]) -> Result<()> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    for change in changes {
        change.write(&mut archive).context(|| change.name.display().to_string())?;
    }
    archive.finish().context(|| "the archive of changed files")
}

impl Change {
    fn write(&self, archive: &mut Builder<&mut dyn Write>) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(&self.meta);
        let name = &self.name;
        match &self.what {
            What::Gone => {
                let base = name.file_name().unwrap_or_default().to_string_lossy();
                empty(archive, &name.with_file_name(format!("{WHITEOUT}{base}")))
            }
            What::Dir(opaque) => {
                archive.append_data(&mut header, name, io::empty())?;
                if *opaque { empty(archive, &name.join(OPAQUE)) } else { Ok(()) }
            }
            What::File(content) => archive.append_path_with_name(content, name),
            What::Link(target) => archive.append_link(&mut header, name, target),
            What::Fifo => archive.append_data(&mut header, name, io::empty()),
        }
    }
}

fn empty(archive: &mut Builder<&mut dyn Write>, path: &Path) -> io::Result<()> {
    archive.append_data(&mut header(EntryType::Regular, 0, 0o600), path, io::empty())
}

/// Unpacks what [`write`] has packed into `upper`, an empty layer of an overlay.
///
/// # Errors
/// An archive that is damaged or leads out of the layer; no place.
pub fn apply(from: &mut dyn Read, upper: &Path) -> Result<()> {
    let what = || "the archive of changed files";
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    for entry in archive.entries().context(what)? {
        let mut entry = entry.context(what)?;
        let path = entry.path().context(what)?.into_owned();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent = path.parent().unwrap_or(Path::new(""));
        if path.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(Error::new(format!("changed files lead to {}", path.display())));
        }
        if name == OPAQUE {
            let dir = plain_dir(upper, parent)?;
            setxattr(&dir, "trusted.overlay.opaque", b"y", XattrFlags::empty()).context(what)?;
        } else if let Some(gone) = name.strip_prefix(WHITEOUT) {
            let place = plain_dir(upper, parent)?.join(gone);
            mknodat(CWD, &place, FileType::CharacterDevice, Mode::empty(), 0).context(what)?;
        } else if entry.header().entry_type() == EntryType::Fifo {
            let mode = Mode::from_raw_mode(entry.header().mode().context(what)? & 0o777);
            let place = plain_dir(upper, parent)?.join(name);
            mknodat(CWD, &place, FileType::Fifo, mode, 0).context(what)?;
        } else {
            entry.unpack_in(upper).context(what)?;
        }
    }
    Ok(())
}

/// A directory of the layer that no link leads to.
fn plain_dir(upper: &Path, dir: &Path) -> Result<PathBuf> {
    let mut path = upper.to_owned();
    for part in dir.components() {
        path.push(part);
        let meta = fs::symlink_metadata(&path).context(|| path.display().to_string())?;
        if !meta.is_dir() {
            return Err(Error::new(format!("{} is no directory", path.display())));
        }
    }
    Ok(path)
}
