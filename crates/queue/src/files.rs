//! Files that survive the loss of power, and where things lie in the data directory.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use serde::Serialize;
use torpor_kernel::tree::{self, Entry};

use crate::walk::{Step, Walk, if_there};

/// The directory of one job.
#[derive(Debug, Clone)]
pub(crate) struct JobDir(PathBuf);

/// The number of the checkpoint that has this name in a job's directory, see [`JobDir::checkpoint`].
#[must_use]
pub(crate) fn checkpoint_number(name: &OsStr) -> Option<u64> {
    name.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

impl JobDir {
    /// The directory of job `id` below the data directory.
    #[must_use]
    pub(crate) fn of(data: &Path, id: u64) -> Self {
        Self(data.join("jobs").join(id.to_string()))
    }

    /// The directory at `path`.
    #[must_use]
    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// The directory itself.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// What was submitted.
    #[must_use]
    pub(crate) fn spec(&self) -> PathBuf {
        self.0.join("spec.json")
    }

    /// All that came from the job's standard output.
    #[must_use]
    pub(crate) fn out(&self) -> PathBuf {
        self.0.join("out")
    }

    /// All that came from the job's standard error.
    #[must_use]
    pub(crate) fn err(&self) -> PathBuf {
        self.0.join("err")
    }

    /// What the client sent for the job's standard input.
    #[must_use]
    pub(crate) fn stdin(&self) -> PathBuf {
        self.0.join("in")
    }

    /// There once the client has sent all.
    #[must_use]
    pub(crate) fn stdin_end(&self) -> PathBuf {
        self.0.join("in.end")
    }

    /// How much of that has gone into the job's pipe.
    #[must_use]
    pub(crate) fn stdin_fed(&self) -> PathBuf {
        self.0.join("in.fed")
    }

    /// Lets nobody but root into it. What was copied for a job may have lain in a directory that nobody else could enter; the
    /// job, and what copies for it, have descriptors of their own directory.
    ///
    /// # Errors
    /// If the directory is not there, or its file system has failed.
    pub(crate) fn close(&self) -> io::Result<()> {
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700))
    }

    /// Takes from others what an earlier version has let them read: what the job was sent, and what it has written.
    pub(crate) fn hide(&self) {
        for path in [self.stdin(), self.stdin_end(), self.out(), self.err()] {
            // It is as it was where that fails.
            let _ = hide(&path);
        }
    }

    /// Makes its name, and those of what is in it, stable: it was made, and that was not waited for.
    ///
    /// # Errors
    /// If a directory cannot be opened or synced.
    pub(crate) fn sync_names(&self) -> io::Result<()> {
        sync_dir(&self.0)?;
        self.0.parent().map_or(Ok(()), sync_dir)
    }

    /// The directory of a run.
    #[must_use]
    pub(crate) fn run(&self, run: u64) -> PathBuf {
        self.0.join(format!("run-{run}"))
    }

    /// The numbers of the runs that have such a directory.
    #[must_use]
    pub(crate) fn runs(&self) -> Vec<u64> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let number = |name: OsString| name.to_str()?.strip_prefix("run-")?.parse().ok();
        entries.filter_map(|entry| number(entry.file_name())).collect()
    }

    /// A checkpoint: complete once its record is there.
    #[must_use]
    pub(crate) fn checkpoint(&self, seq: u64) -> PathBuf {
        self.0.join(format!("checkpoint-{seq}"))
    }

    /// There once a checkpoint is on stable storage.
    #[must_use]
    pub(crate) fn durable(&self, seq: u64) -> PathBuf {
        self.checkpoint(seq).join("durable")
    }

    /// What the object store has of the job.
    #[must_use]
    pub(crate) fn pieces(&self) -> PathBuf {
        self.0.join("pieces.json")
    }

    /// What a container is made of, once that was looked up.
    #[must_use]
    pub(crate) fn origin(&self) -> PathBuf {
        self.0.join("container.json")
    }

    /// What a container has changed in its files.
    #[must_use]
    pub(crate) fn upper(&self) -> PathBuf {
        self.0.join("upper")
    }

    /// How far a copy of its files is, while one is made.
    #[must_use]
    pub(crate) fn copying(&self) -> PathBuf {
        self.0.join(COPYING)
    }

    /// The job's own directory, if it has one.
    #[must_use]
    pub(crate) fn work(&self) -> PathBuf {
        self.0.join("work")
    }
}

/// Where in a job's directory it is told how far a copy of its files is.
pub(crate) const COPYING: &str = "copying.json";

/// Where a job finds its own directory: the same path on each machine, so that it can go on
/// on another. It is mounted there where only the job sees it.
pub(crate) const WORK: &str = "/run/torpor/job";

/// Makes the name of a directory's entries stable.
///
/// # Errors
/// If the directory cannot be opened or synced.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Makes the files of a directory, and of all below it, stable, however deep that is.
///
/// # Errors
/// If a file cannot be opened or synced.
pub(crate) fn sync_tree(dir: &Path) -> io::Result<()> {
    let mut walk = Walk::of(dir)?;
    while let Some(step) = walk.step() {
        if step == Step::OutOf {
            continue;
        }
        let dir = walk.dir()?;
        for Entry { name, meta, .. } in tree::list(&dir, Path::new(""))? {
            if meta.is_dir() {
                walk.descend(&name);
            } else if meta.is_file() {
                tree::file(&dir, &name, tree::id(&meta))?.sync_all()?;
            }
        }
        dir.sync_all()?;
    }
    Ok(())
}

/// Takes a file from others. What a link leads to is not it, and neither is what is no file.
fn hide(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    if meta.is_file() && meta.permissions().mode() & 0o077 != 0 {
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
    }
    Ok(())
}

/// A file that nobody else may read or lock, as it is, or a new one.
///
/// # Errors
/// If it cannot be made or opened, or belongs to somebody else.
pub(crate) fn own(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options.create(true).write(true).truncate(false).mode(0o600).open(path)?;
    // It may be of a version that did not mind.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Writes a file so that after a loss of power it is there whole, or as it was before.
///
/// # Errors
/// If the content is not JSON, or the file cannot be written, synced or renamed.
pub(crate) fn write_stable(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let (fresh, file) = write_beside(path, content)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Writes a file that is there whole, or as it was before, unless power is lost.
///
/// # Errors
/// If the content is not JSON, or the file cannot be written or renamed.
pub(crate) fn write_whole(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let (fresh, _) = write_beside(path, content)?;
    fs::rename(&fresh, path)
}

/// Writes what is to take the place of a file.
fn write_beside(path: &Path, content: &impl Serialize) -> io::Result<(PathBuf, File)> {
    let fresh = path.with_extension("new");
    let mut options = File::options();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(&serde_json::to_vec(content)?)?;
    Ok((fresh, file))
}

/// Bytes that a directory and all below it take, however deep that is, but for files with an inode in `seen`, where they
/// are noted. What goes away meanwhile takes none.
///
/// # Errors
/// If a directory cannot be read.
pub(crate) fn size(dir: &Path, seen: &mut HashSet<u64>) -> io::Result<u64> {
    let mut sum = 0;
    let Some(mut walk) = if_there(Walk::of(dir))? else { return Ok(0) };
    while let Some(dir) = walk.next_dir()? {
        for entry in Dir::read_from(&dir)? {
            let entry = entry?;
            let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
            if [".", ".."].iter().any(|own| name == Path::new(own)) {
                continue;
            }
            let found = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW);
            let Some(meta) = if_there(found)? else { continue };
            let bytes = u64::try_from(meta.st_blocks).unwrap_or(0) * 512;
            if FileType::from_raw_mode(meta.st_mode).is_dir() {
                sum += bytes;
                walk.descend(name);
            } else if seen.insert(meta.st_ino) {
                sum += bytes;
            }
        }
    }
    Ok(sum)
}

/// Removes directories with all that is in them, however deep that is: who goes down one by one needs as much of its
/// stack, or as many descriptors.
///
/// # Errors
/// If something cannot be removed: its file system has failed, or it is mounted.
pub(crate) fn remove_trees(dirs: &[impl AsRef<Path>]) -> io::Result<()> {
    let there: Vec<&Path> = dirs.iter().map(AsRef::as_ref).filter(|dir| dir.exists()).collect();
    if there.is_empty() {
        return Ok(());
    }
    let mut remove = Command::new("rm");
    let output = remove.args(["-rf", "--"]).args(there).stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// A short name for a path: a socket's address holds only 108 bytes.
///
/// # Errors
/// If the directory of `path` cannot be opened.
pub(crate) fn with_short_name<T>(
    path: &Path,
    work: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let dir = rustix::fs::openat(CWD, dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&dir);
    work(&PathBuf::from(format!("/proc/self/fd/{number}")).join(name))
}

/// Now, in milliseconds since 1970, by the clock of this machine as it was when this program first looked at it. Whoever sets that
/// clock, by hours or by years, takes no time from jobs, and gives them none.
#[must_use]
pub(crate) fn now() -> i64 {
    static BEGUN: OnceLock<(SystemTime, Instant)> = OnceLock::new();
    let (time, begun) = BEGUN.get_or_init(|| (SystemTime::now(), Instant::now()));
    millis(*time + begun.elapsed())
}

/// A time, in milliseconds since 1970.
#[must_use]
pub(crate) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A job that makes and removes files all the time would never have too much.
    #[test]
    fn what_goes_away_while_it_is_counted_hides_nothing() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("large"), [1; 64 << 10]).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (file, below) = (dir.path().join("file"), dir.path().join("below"));
                while !over.load(Ordering::Acquire) {
                    fs::create_dir(&below).unwrap();
                    fs::write(&file, "").unwrap();
                    fs::remove_file(&file).unwrap();
                    fs::remove_dir(&below).unwrap();
                }
            });
            let sizes: Vec<_> = (0..5000).map(|_| size(dir.path(), &mut HashSet::new())).collect();
            over.store(true, Ordering::Release);
            for size in sizes {
                assert!(size.unwrap() >= 64 << 10);
            }
        });
    }

    /// A link would have the mode of any file of this machine changed.
    #[test]
    fn only_files_are_hidden() {
        let dir = tempfile::tempdir().unwrap();
        let job = JobDir::at(dir.path().to_owned());
        let other = dir.path().join("other");
        for path in [&other, &job.stdin()] {
            fs::write(path, "").unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        std::os::unix::fs::symlink(&other, job.out()).unwrap();
        fs::create_dir(job.err()).unwrap();
        fs::set_permissions(job.err(), fs::Permissions::from_mode(0o755)).unwrap();
        job.hide();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            [&job.stdin(), &other, &job.err()].map(|path| mode(path)),
            [0o600, 0o644, 0o755]
        );
    }

    /// Where the name of a file is longer than a path can be, there is no limit to what is in it.
    #[test]
    fn what_is_deep_is_counted_and_removed() {
        const DEPTH: usize = 5000;
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let at = crate::walk::tests::make(&top, "d", DEPTH);
        let flags = OFlags::CREATE | OFlags::WRONLY;
        let file = rustix::fs::openat(&at, "large", flags, Mode::RWXU).unwrap();
        File::from(file).write_all(&[1; 64 << 10]).unwrap();
        assert!(size(&top, &mut HashSet::new()).unwrap() >= 64 << 10);
        remove_trees(&[&top]).unwrap();
        assert!(!top.exists());
    }

    /// A disk takes its time for each directory, so that these are few that have long names.
    #[test]
    fn what_is_deep_is_synced() {
        let dir = tempfile::tempdir().unwrap();
        let at = crate::walk::tests::make(dir.path(), &"d".repeat(250), 20);
        crate::marks::make_file(at, Path::new("file")).unwrap();
        sync_tree(dir.path()).unwrap();
        remove_trees(&[dir.path()]).unwrap();
        assert_eq!(sync_tree(dir.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
