//! A job's own directory: a copy of its input, which belongs to its checkpoints.
//!
//! Input and artefacts are copied by `cp` as the job's user, who must not get at other
//! files through links. Snapshots are taken while the job is frozen; a file that has not
//! changed since the snapshot before is shared with it.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::checkpoint;
use crate::container::Container;
use crate::files::{self, JobDir, WORK};
use crate::marks;
use crate::spec::Spec;

/// Does what can be done for a job before it is started: its own directory is made, and it is looked up
/// what its container is made of.
///
/// # Errors
/// If the input cannot be read, or there is no such container.
pub(crate) fn prepare(dir: &JobDir, spec: &Spec) -> io::Result<()> {
    Container::look_up(dir, spec)?;
    let Some(input) = &spec.input else { return Ok(()) };
    // Another daemon may have been killed while it did that, and its copy goes on.
    let place = dir.path().join(format!("ready-{}-{}", std::process::id(), files::now()));
    let made = copy_input(spec, input, &place).and_then(|()| {
        let ready = ready(dir);
        let _ = fs::remove_dir_all(&ready);
        fs::rename(&place, ready)
    });
    made.inspect_err(|_| drop(fs::remove_dir_all(&place)))
}

/// The job's own directory before it has started, if that was prepared. It is on no stable storage: what was
/// prepared before the power failed may not be whole, and is not used.
fn ready(dir: &JobDir) -> PathBuf {
    dir.path().join(format!("ready-{}", checkpoint::boot()))
}

/// Makes a job's own directory, if it is to have one: the one that was prepared, or a new one.
///
/// # Errors
/// If the input cannot be read.
pub(super) fn create(dir: &JobDir, spec: &Spec) -> io::Result<()> {
    let Some(input) = &spec.input else { return Ok(()) };
    let work = dir.work();
    let _ = fs::remove_dir_all(&work);
    match fs::rename(ready(dir), &work) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => copy_input(spec, input, &work),
        done => done,
    }
}

fn copy_input(spec: &Spec, input: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    chown(to, Some(spec.user.uid), Some(spec.user.gid))?;
    copy_as_user(spec, &input.join("."), to)
}

/// Shows the job its own directory, if it has one, at the place that is the same everywhere.
/// This process is in a mount namespace of the job's own.
///
/// # Errors
/// If the place cannot be made, or nothing can be mounted there.
pub(super) fn show(dir: &JobDir) -> io::Result<()> {
    if dir.work().exists() {
        fs::create_dir_all(WORK)?;
        rustix::mount::mount_bind(dir.work(), WORK)?;
    }
    Ok(())
}

/// Copies artefacts to where the job was submitted; returns what could not be copied.
pub(super) fn hand_over(dir: &JobDir, spec: &Spec) -> Vec<String> {
    let copy = |path: &std::path::PathBuf| {
        let (from, to) = (dir.work().join(path), spec.dir.join(path));
        let parent = to.parent().filter(|_| from.exists());
        let made = parent.map_or(Ok(()), |parent| make_as_user(spec, parent));
        made.and_then(|()| copy_as_user(spec, &from, &to))
            .err()
            .map(|e| format!("artefact {}: {e}", path.display()))
    };
    spec.artefacts.iter().filter_map(copy).collect()
}

fn copy_as_user(spec: &Spec, from: &Path, to: &Path) -> io::Result<()> {
    let mut copy = Command::new("cp");
    as_user(spec, copy.args(["-a", "-T", "--reflink=auto", "--"]).args([from, to]))
}

/// Makes a directory, and those that it lies in.
fn make_as_user(spec: &Spec, dir: &Path) -> io::Result<()> {
    as_user(spec, Command::new("mkdir").args(["-p", "--"]).arg(dir))
}

fn as_user(spec: &Spec, command: &mut Command) -> io::Result<()> {
    let output = command
        .uid(spec.user.uid)
        .gid(spec.user.gid)
        .current_dir("/")
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Copies a directory as it is. Regular files that are the same in `before` (a copy that
/// nobody writes to) become links to those there.
///
/// # Errors
/// If a file cannot be read or copied, or `to` is there already. Sockets and devices are left out.
pub(super) fn snapshot(from: &Path, before: Option<&Path>, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (name, meta) = (entry.file_name(), entry.metadata()?);
        let (source, target) = (entry.path(), to.join(&name));
        let old = before.map(|before| before.join(&name));
        if meta.is_dir() {
            snapshot(&source, old.as_deref(), &target)?;
        } else if meta.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
            lchown(&target, Some(meta.uid()), Some(meta.gid()))?;
        } else if meta.is_file() {
            let same = old.filter(|old| is_same(old, &meta));
            if same.is_none_or(|old| fs::hard_link(old, &target).is_err()) {
                fs::copy(&source, &target)?;
                copy_attributes(&source, &target)?;
                adorn(&target, &meta)?;
            }
        } else if marks::is_whiteout(&meta) {
            marks::make_whiteout(&target)?;
        } else if meta.file_type().is_fifo() {
            marks::make_fifo(&target)?;
            adorn(&target, &meta)?;
        }
    }
    copy_attributes(from, to)?;
    adorn(to, &fs::symlink_metadata(from)?)
}

/// Gives a copy the extended attributes of its original.
fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    marks::set_attributes(to, &marks::attributes(from)?)
}

/// Whether a file of an earlier copy is what the file with `meta` is now.
fn is_same(old: &Path, meta: &Metadata) -> bool {
    let key = |meta: &Metadata| {
        (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.mode(), meta.uid(), meta.gid())
    };
    fs::symlink_metadata(old).is_ok_and(|old| old.is_file() && key(&old) == key(meta))
}

/// Gives a copy the owner, the mode and the time of its original.
fn adorn(path: &Path, meta: &Metadata) -> io::Result<()> {
    chown(path, Some(meta.uid()), Some(meta.gid()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(meta.mode() & 0o7777))?;
    let time = |seconds: i64, nanoseconds: i64| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps {
        last_access: time(meta.atime(), meta.atime_nsec()),
        last_modification: time(meta.mtime(), meta.mtime_nsec()),
    };
    Ok(utimensat(CWD, path, &times, AtFlags::empty())?)
}

/// The names that the job's own directories have in a checkpoint.
pub(crate) const OWN: [&str; 2] = ["work", "upper"];

/// The directories of a job that belong to its checkpoints, and their names there. A job may have none.
pub(super) fn own(dir: &JobDir) -> [(PathBuf, &'static str); 2] {
    let [work, upper] = OWN;
    [(dir.work(), work), (dir.upper(), upper)]
}

/// Puts a job's own files back as they were at a checkpoint.
///
/// # Errors
/// If the files cannot be copied (disk full, for example).
pub(super) fn put_back(dir: &JobDir, checkpoint: &Path) -> io::Result<()> {
    for (place, name) in own(dir) {
        let kept = checkpoint.join(name);
        if kept.exists() {
            let _ = fs::remove_dir_all(&place);
            snapshot(&kept, None, &place)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_share_what_has_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("work/sub")).unwrap();
        fs::write(at("work/sub/same"), "same").unwrap();
        fs::write(at("work/other"), "one").unwrap();
        symlink("/nowhere", at("work/link")).unwrap();
        let (opaque, flags) = ("trusted.overlay.opaque", rustix::fs::XattrFlags::empty());
        rustix::fs::lsetxattr(at("work/sub"), opaque, b"y", flags).unwrap();
        marks::make_whiteout(&at("work/removed")).unwrap();
        fs::set_permissions(at("work/other"), fs::Permissions::from_mode(0o640)).unwrap();
        snapshot(&at("work"), None, &at("first")).unwrap();
        fs::write(at("work/other"), "two!").unwrap();
        snapshot(&at("work"), Some(&at("first")), &at("second")).unwrap();
        let inode = |name: &str| fs::metadata(at(name)).unwrap().ino();
        assert_eq!(inode("first/sub/same"), inode("second/sub/same"));
        assert_ne!(inode("first/other"), inode("second/other"));
        assert_ne!(inode("first/sub/same"), inode("work/sub/same"));
        assert_eq!(fs::read_to_string(at("first/other")).unwrap(), "one");
        assert_eq!(fs::read_to_string(at("second/other")).unwrap(), "two!");
        assert_eq!(fs::read_link(at("second/link")).unwrap(), Path::new("/nowhere"));
        assert_eq!(fs::metadata(at("second/other")).unwrap().mode() & 0o7777, 0o640);
        let mut value = [0; 2];
        assert_eq!(rustix::fs::lgetxattr(at("second/sub"), opaque, &mut value), Ok(1));
        assert!(marks::is_whiteout(&fs::symlink_metadata(at("second/removed")).unwrap()));
        assert_eq!(
            fs::metadata(at("work/other")).unwrap().mtime_nsec(),
            fs::metadata(at("second/other")).unwrap().mtime_nsec()
        );
    }
}
