//! Volumes of containers that come along: directories of this host, below those that its agent allows.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, mkdirat, openat2, statat, unlinkat};
use rustix::io::Errno;

use super::AgentSettings;
use crate::error::{Context, Error, Result};
use crate::record::Record;

/// Whether a volume may come to `path`, which is below one of the directories `allowed`.
///
/// # Errors
/// If it may not, or something is there.
pub(super) fn judge(path: &Path, allowed: &[PathBuf]) -> Result<()> {
    let (parent, name) = parent(path, allowed)?;
    let dir = match open_below(&parent, Path::new(name)) {
        Ok(dir) => dir,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno).context(|| path.display().to_string()),
    };
    let is_empty = std::fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))
        .context(|| path.display().to_string())?
        .next()
        .is_none();
    if is_empty { Ok(()) } else { Err(taken(path)) }
}

/// Makes the empty directory of a volume.
///
/// # Errors
/// As [`judge`].
pub(super) fn make(path: &Path, allowed: &[PathBuf]) -> Result<()> {
    let (parent, name) = parent(path, allowed)?;
    // What is empty is made anew: so nothing that was here is ever taken for something that came.
    match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(Errno::NOTEMPTY | Errno::EXIST) => return Err(taken(path)),
        Err(errno) => return Err(errno).context(|| path.display().to_string()),
    }
    mkdirat(&parent, name, Mode::RWXU).context(|| path.display().to_string())
}

/// Whether nobody but root gets to a volume: a directory above it is root's alone.
pub(super) fn is_private(path: &Path) -> bool {
    let above = path.parent().and_then(|parent| parent.canonicalize().ok());
    let is_closed = |dir: &Path| {
        let meta = dir.metadata();
        meta.is_ok_and(|meta| meta.uid() == 0 && meta.mode() & 0o077 == 0)
    };
    above.is_some_and(|above| above.ancestors().any(is_closed))
}

/// Removes the volumes that were made for a migration: it has not come.
pub(super) fn remove_all(record: &Record, settings: &AgentSettings) {
    record.volumes.iter().for_each(|path| remove(path, &settings.allow_volumes));
}

fn remove(path: &Path, allowed: &[PathBuf]) {
    let removed = parent(path, allowed).and_then(|(parent, name)| {
        if matches!(statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT)) {
            return Ok(());
        }
        let there = Path::new("/proc/self/fd").join(parent.as_raw_fd().to_string()).join(name);
        std::fs::remove_dir_all(there).context(|| path.display().to_string())
    });
    if let Err(error) = removed {
        tracing::warn!("{error}");
    }
}

fn taken(path: &Path) -> Error {
    Error::refused_with(
        format!("volume {} cannot come: there are files here", path.display()),
        "without --with-volume it is taken for one that both hosts see",
    )
}

/// The directory that the one of a volume is in, and its name there. No symbolic link below an allowed directory leads
/// anywhere.
fn parent<'p>(path: &'p Path, allowed: &[PathBuf]) -> Result<(OwnedFd, &'p OsStr)> {
    let below = allowed.iter().find_map(|dir| Some((dir, path.strip_prefix(dir).ok()?)));
    let leads_down = |rest: &Path| rest.components().all(|it| matches!(it, Component::Normal(_)));
    let found = below.filter(|(_, rest)| path.is_absolute() && leads_down(rest));
    let Some((dir, (above, name))) =
        found.and_then(|(dir, rest)| Some((dir, (rest.parent()?, rest.file_name()?))))
    else {
        return Err(Error::refused_with(
            format!("volume {} may not come here", path.display()),
            "torpor agent --allow-volume DIR, of a directory above it",
        ));
    };
    let root = OwnedFd::from(File::open(dir).context(|| dir.display().to_string())?);
    match open_below(&root, above) {
        Ok(parent) => Ok((parent, name)),
        Err(errno) => Err(Error::refused_with(
            format!("volume {} cannot come: the directory above it: {errno}", path.display()),
            "make that directory here; it is no symbolic link",
        )),
    }
}

fn open_below(dir: &OwnedFd, name: &Path) -> std::result::Result<OwnedFd, Errno> {
    let name = if name.as_os_str().is_empty() { Path::new(".") } else { name };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(dir, name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_below_what_is_allowed_and_where_nothing_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("allowed/inner")).unwrap();
        fs::create_dir(at("other")).unwrap();
        symlink(at("other"), at("allowed/link")).unwrap();
        let allowed = [at("allowed")];
        for path in ["allowed", "other/new", "allowed/../other/new", "allowed/link/new"] {
            assert!(judge(&at(path), &allowed).is_err(), "{path}");
            assert!(make(&at(path), &allowed).is_err(), "{path}");
        }
        assert!(make(&at("allowed/link"), &allowed).is_err());
        assert!(make(Path::new("allowed/new"), &[PathBuf::from("allowed")]).is_err());
        let error = judge(&at("other/new"), &[]).unwrap_err();
        assert!(error.hint().unwrap().contains("--allow-volume"));
        assert_eq!(fs::read_dir(at("other")).unwrap().count(), 0);

        for name in ["allowed/new", "allowed/inner/new", "allowed/inner/new"] {
            judge(&at(name), &allowed).unwrap();
            make(&at(name), &allowed).unwrap();
            assert!(at(name).is_dir());
        }
        fs::write(at("allowed/new/file"), "").unwrap();
        assert!(judge(&at("allowed/new"), &allowed).is_err());
        assert!(make(&at("allowed/new"), &allowed).is_err());
        remove(&at("allowed/new"), &allowed);
        remove(&at("allowed/new"), &allowed);
        remove(&at("other"), &allowed);
        assert!(!at("allowed/new").exists() && at("other").exists());
    }

    #[test]
    fn a_closed_directory_above_keeps_others_out() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let allow = |name: &str, mode| {
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir_all(at("closed/inner")).unwrap();
        fs::create_dir(at("open")).unwrap();
        symlink(at("open"), at("closed/link")).unwrap();
        allow("", 0o755);
        allow("closed", 0o700);
        assert!(is_private(&at("closed/new")) && is_private(&at("closed/inner/new")));
        assert!(!is_private(&at("open/new")));
        assert!(!is_private(&at("closed/link/new")), "it is where the link leads");
        allow("closed", 0o710);
        assert!(!is_private(&at("closed/inner/new")));
    }
}
