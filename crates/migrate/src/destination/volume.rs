//! Volumes of containers that come along: directories of this host, below those that its agent allows.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, openat, openat2, unlinkat};
use rustix::io::Errno;
use torpor_kernel::mountinfo::{self, Mount};
use torpor_kernel::proc;
use torpor_kernel::tree::{self, Id};

use super::AgentSettings;
use crate::error::{Context, Error, Result};
use crate::origin::Origin;
use crate::record::{Phase, Record};

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
    let is_empty = std::fs::read_dir(tree::by_descriptor(&dir))
        .context(|| path.display().to_string())?
        .next()
        .is_none();
    if is_empty { judge_empty(path) } else { Err(taken(path)) }
}

/// Whether the empty directory at `path` can be made anew. A container of this host may have it as its volume, and write there
/// later: it would have one then that has no name.
fn judge_empty(path: &Path) -> Result<()> {
    match is_mounted(path) {
        false => Ok(()),
        true => Err(Error::refused_with(
            format!(
                "volume {} cannot come: its directory is mounted somewhere here",
                path.display()
            ),
            "there: end the container that has it, or move that first",
        )),
    }
}

/// Whether a process of this host has a directory mounted.
fn is_mounted(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    let mounts = |pid: i32| mountinfo::of(pid).unwrap_or_default();
    let own = mounts(std::process::id().cast_signed());
    let Some(mount) = mountinfo::holding(&own, &path) else { return false };
    let rest = path.strip_prefix(&mount.mountpoint).unwrap_or(Path::new(""));
    let root = mount.root.join(rest);
    let is_it = |it: &Mount| it.dev == mount.dev && it.root == root && !it.deleted;
    let mut seen = HashSet::new();
    let space = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let others = proc::processes().filter(|&pid| seen.insert(space(pid)));
    others.map(mounts).any(|mounts| mounts.iter().any(is_it))
}

/// Whether a volume may come to `path` from whoever has begun a migration: what has come from another host keeps to itself what
/// is in it, as far as `records` tell.
///
/// # Errors
/// If it is a volume that another host has brought, or lies in one.
pub(super) fn judge_former(path: &Path, origin: &Origin, records: &[Record]) -> Result<()> {
    let theirs = records.iter().filter(|record| !origin.may_ask(record.origin.as_ref()));
    let kept = theirs.filter(|record| record.phase != Phase::Stayed);
    // Directories that are allowed may be one by several names.
    let place = |path: &Path| {
        let above = path.parent().and_then(|above| above.canonicalize().ok());
        path.file_name().zip(above).map(|(name, above)| above.join(name))
    };
    let place_of_it = place(path);
    let is_above = |volume: &&PathBuf| {
        volume.is_dir()
            && place_of_it.as_ref().zip(place(volume)).is_some_and(|(it, of)| it.starts_with(of))
    };
    match kept.flat_map(|record| &record.volumes).find(is_above) {
        None => Ok(()),
        Some(volume) => Err(Error::refused_with(
            format!(
                "volume {} cannot come: {} is one of another host's that has come here",
                path.display(),
                volume.display()
            ),
            "there: torpor agent --allow-volume of another directory, or remove what nobody needs",
        )),
    }
}

/// Makes the empty directory of a volume, and opens it: whoever may write to the directory above can exchange it afterwards.
///
/// # Errors
/// As [`judge`]; if somebody else has exchanged it before it was open.
pub(super) fn make(path: &Path, allowed: &[PathBuf]) -> Result<File> {
    let (parent, name) = parent(path, allowed)?;
    judge_empty(path)?;
    // What is empty is made anew: so nothing that was here is ever taken for something that came.
    match unlinkat(&parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(Errno::NOTEMPTY | Errno::EXIST) => return Err(taken(path)),
        Err(errno) => return Err(errno).context(|| path.display().to_string()),
    }
    match tree::make_dir(&parent, name) {
        Err(errno) if tree::is_gone(errno) => Err(Error::refused_with(
            format!("volume {} cannot come: somebody exchanges its directory", path.display()),
            "there: see who may write to the directory above it",
        )),
        made => made.context(|| path.display().to_string()),
    }
}

/// Whether nobody but root gets to a volume: a directory above it is root's alone. That is one in which the volume is, not one
/// that its path leads through by now.
pub(super) fn is_private(volume: &File) -> bool {
    is_below_closed(volume).unwrap_or(false)
}

fn is_below_closed(volume: &File) -> std::result::Result<bool, Errno> {
    let above = |dir: &File| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(dir, "..", flags, Mode::empty()).map(File::from)
    };
    let (mut last, mut dir) = (tree::id(&tree::metadata(volume)?), above(volume)?);
    loop {
        let meta = tree::metadata(&dir)?;
        if meta.uid() == 0 && meta.mode() & 0o077 == 0 {
            return Ok(true);
        }
        // The root is above itself.
        if tree::id(&meta) == last {
            return Ok(false);
        }
        (last, dir) = (tree::id(&meta), above(&dir)?);
    }
}

/// Removes the volumes that were made for a migration: it has not come. What somebody has put in the place of one stays.
pub(super) fn remove_all(record: &Record, settings: &AgentSettings) {
    let born = record.born.iter().copied().chain(std::iter::repeat(None));
    for ((path, id), born) in record.volumes.iter().zip(&record.made).zip(born) {
        remove(path, (*id, born), &settings.allow_volumes);
    }
}

/// Removes a directory that has this number, and was born then, if that is known.
fn remove(path: &Path, (id, born): (Id, Option<SystemTime>), allowed: &[PathBuf]) {
    let removed = parent(path, allowed).and_then(|(parent, name)| {
        let failed = || path.display().to_string();
        let dir = match open_below(&parent, Path::new(name)) {
            Ok(dir) => File::from(dir),
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(errno).context(failed),
        };
        let meta = tree::metadata(&dir).context(failed)?;
        if tree::id(&meta) != id || born.is_some_and(|born| meta.created().ok() != Some(born)) {
            let text = format!("{} stays: it is not the directory that was made", path.display());
            return Err(Error::refused(text));
        }
        // By its name only when nothing is in it: somebody may exchange it now.
        let removed = tree::empty(&dir).and_then(|()| unlinkat(&parent, name, AtFlags::REMOVEDIR));
        removed.context(failed)
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
    use std::time::Duration;

    use super::*;
    use crate::files::{Change, Meta, Replica, What};
    use crate::record::tests::record;

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
        let id = |name: &str| tree::id(&at(name).metadata().unwrap());
        let (new, other) = (id("allowed/new"), id("other"));
        remove(&at("allowed/new"), (new, None), &allowed);
        remove(&at("allowed/new"), (new, None), &allowed);
        remove(&at("other"), (other, None), &allowed);
        assert!(!at("allowed/new").exists() && at("other").exists());
    }

    /// It is empty for now, and a container of this host will write there.
    #[test]
    fn an_empty_directory_that_is_mounted_stays() {
        let dir = tempfile::tempdir().unwrap();
        let [own, other] = ["allowed/own", "other"].map(|name| dir.path().join(name));
        [&own, &other].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        let allowed = [dir.path().join("allowed")];
        rustix::mount::mount_bind(&own, &other).unwrap();
        let judged = [judge(&own, &allowed), make(&own, &allowed).map(drop)];
        let is_same = own.metadata().unwrap().ino() == other.metadata().unwrap().ino();
        rustix::mount::unmount(&other, rustix::mount::UnmountFlags::DETACH).unwrap();
        for judged in judged {
            let error = judged.unwrap_err().to_string();
            assert!(error.contains("is mounted somewhere here"), "{error}");
        }
        assert!(is_same);
        judge(&own, &allowed).unwrap();
        make(&own, &allowed).unwrap();
    }

    /// A program that is laid among the files of a container runs in that.
    #[test]
    fn what_has_come_from_one_host_is_no_place_for_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("volumes/web/plugins")).unwrap();
        symlink(at("volumes"), at("link")).unwrap();
        let [one, other] = ["a", "b"].map(|names| Origin::Host(names.to_owned()));
        let record = Record { origin: Some(one.clone()), ..record() };
        let moved =
            Record { phase: Phase::Moved, volumes: vec![at("volumes/web")], ..record.clone() };
        let gone = Record { volumes: vec![at("volumes/gone")], ..moved.clone() };
        let stayed = Record { phase: Phase::Stayed, volumes: vec![at("volumes/db")], ..record };
        fs::create_dir(at("volumes/db")).unwrap();
        let records = [stayed, gone, moved];
        let judge = |path: &str, origin| judge_former(&at(path), origin, &records);
        for path in ["volumes/web/plugins/new", "link/web/new", "volumes/web", "link/web"] {
            let error = judge(path, &other).unwrap_err().to_string();
            assert!(error.contains("volumes/web is one of another host's"), "{path}: {error}");
            judge(path, &one).unwrap();
            judge(path, &Origin::OwnUser).unwrap();
        }
        for path in ["volumes/webs", "volumes/db/new", "volumes/gone", "nowhere/new"] {
            judge(path, &other).unwrap();
        }
    }

    /// Whoever may write to the directory above has put it there.
    #[test]
    fn what_was_not_made_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (path, allowed) = (at("allowed/new"), [at("allowed")]);
        fs::create_dir_all(at("allowed/theirs")).unwrap();
        fs::write(at("allowed/theirs/precious"), "").unwrap();
        let meta = make(&path, &allowed).unwrap().metadata().unwrap();
        let id = (tree::id(&meta), meta.created().ok());
        fs::rename(&path, at("allowed/old")).unwrap();
        fs::rename(at("allowed/theirs"), &path).unwrap();
        remove(&path, id, &allowed);
        assert!(at("allowed/new/precious").exists());
        fs::remove_dir_all(&path).unwrap();
        symlink(at("allowed/old"), &path).unwrap();
        remove(&path, id, &allowed);
        assert!(path.is_symlink() && at("allowed/old").exists());
        fs::remove_file(&path).unwrap();
        fs::rename(at("allowed/old"), &path).unwrap();
        // Another one that has its number by now.
        if let Some(born) = id.1 {
            remove(&path, (id.0, Some(born - Duration::from_nanos(1))), &allowed);
            assert!(path.exists());
        }
        remove(&path, id, &allowed);
        assert!(!path.exists());
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
        let is_private = |above: &str| {
            let (path, allowed) = (at(above).join("new"), [at(above)]);
            super::is_private(&make(&path, &allowed).unwrap())
        };
        assert!(is_private("closed") && is_private("closed/inner"));
        assert!(!is_private("open"));
        assert!(!is_private("closed/link"), "it is where the link leads");
        allow("closed", 0o710);
        assert!(!is_private("closed/inner"));
    }

    /// By whoever may write to the directory above, as soon as it is there.
    #[test]
    fn an_exchanged_directory_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("allowed/user")).unwrap();
        fs::create_dir_all(at("closed/new")).unwrap();
        let allow = |name: &str, mode| {
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        allow("", 0o755);
        allow("closed", 0o700);
        let made = make(&at("allowed/user/new"), &[at("allowed")]).unwrap();
        fs::rename(at("allowed/user"), at("allowed/old")).unwrap();
        symlink(at("closed"), at("allowed/user")).unwrap();
        assert!(!is_private(&made), "it is not where its path leads");
        let mut replica = Replica::new(tree::Tree::of(made));
        let meta = Meta { mode: 0o777, uid: 7, gid: 7, changed: (1, 0), attributes: Vec::new() };
        let what = What::Regular { len: 0 };
        for change in [
            Change::Update { name: Vec::new(), len: None, meta: meta.clone() },
            Change::Make { name: b"file".to_vec(), what, meta },
        ] {
            replica.apply(change, || Ok(Vec::new())).unwrap();
        }
        replica.finish().unwrap();
        let other = at("closed/new").metadata().unwrap();
        assert_eq!((other.uid(), other.mode() & 0o777), (0, 0o755));
        assert_eq!(fs::read_dir(at("closed/new")).unwrap().count(), 0);
        let own = at("allowed/old/new").metadata().unwrap();
        assert_eq!((own.uid(), own.mode() & 0o777), (7, 0o777));
        assert!(at("allowed/old/new/file").exists());
    }
}
