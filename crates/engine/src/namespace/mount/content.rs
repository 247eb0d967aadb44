//! The content of tmpfs mounts (`tmpfs-dev-DEV.tar.gz.img`), written by tar(1): it knows
//! modes, owners, times, devices, hard links, holes, and extended attributes. Access control
//! lists are of these: as lists (`--acls`), they would have names of users for their ids, whatever
//! `--numeric-owner` says. It is read by [`super::unpack`].

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use torpor_images::Writer;

use super::packer::Packer;
use super::storer::Storer;
use crate::error::{Context, Error, Result};
use crate::halt::{Halt, Until};
use crate::tool::{self, Done};

/// Owners as numbers, and what else files have.
pub(super) const COMMON: &[&str] = &["--numeric-owner", "--xattrs", "--xattrs-include=*"];

/// The file system that is saved.
#[derive(Debug, Clone, Copy)]
pub(super) struct SavedFileSystem<'a> {
    /// Where it is mounted.
    pub at: &'a Path,
    /// Whether it is mounted outside of the tree as well, where its files are not the tree's alone.
    pub is_shared: bool,
    /// Whether it is stored and not packed.
    pub is_stored: bool,
}

/// Writes all below `root` to `archive`. User and group ids are those of the user
/// namespace, if one is given.
///
/// # Errors
/// If tar fails, or finds files changed that none but the tree should have; those of [`Halt::check`], which is asked
/// before each piece.
pub(super) fn save(
    root: BorrowedFd<'_>,
    mut archive: Writer,
    userns: Option<OwnedFd>,
    place: SavedFileSystem<'_>,
    halt: &Halt,
) -> Result<()> {
    let mut tar = tar(root, userns);
    let what = || format!("pack the files at {}", place.at.display());
    if place.is_stored {
        // It is read as fast as it is written: more at once is less work.
        tar.arg("--blocking-factor=512");
        let mut storer = Storer::new(&mut archive);
        place.judge(tool::run(&mut tar, None, &mut Until { halt, out: &mut storer })?)?;
        storer.finish().context(what)?;
    } else {
        let mut packer = Packer::new(&mut archive);
        place.judge(tool::run(&mut tar, None, &mut Until { halt, out: &mut packer })?)?;
        packer.finish().context(what)?;
    }
    Ok(archive.finish()?)
}

/// A tar that saves all below `root`, a directory that may be in no mount namespace.
fn tar(root: BorrowedFd<'_>, userns: Option<OwnedFd>) -> Command {
    let mut tar = Command::new("tar");
    tar.current_dir(format!("/proc/self/fd/{}", root.as_raw_fd()))
        .env("LC_ALL", "C")
        .env_remove("TAR_OPTIONS");
    // Times finer than seconds, and attributes, need the posix format. The same content makes
    // the same archive: a restore in rounds compares them.
    tar.args(["--create", "--format=posix", "--sparse", "--atime-preserve=system", "--sort=name"])
        .arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime")
        .arg("--warning=no-file-ignored")
        .args(COMMON)
        .arg(".");
    if let Some(userns) = userns {
        torpor_sys::ns::start_in_user_namespace(&mut tar, userns);
    }
    tar
}

impl SavedFileSystem<'_> {
    /// Whether what tar has written is what there was. Files that others change while they are read (exit status 1, and the
    /// archive is complete) are as they were at some moment: more than that nobody can say of what is not the tree's alone.
    fn judge(self, done: Option<Done>) -> Result<()> {
        /// What tar says of files that change under its hands.
        const CHANGED: i32 = 1;
        let at = self.at.display();
        let program = format!("tar of the files at {at}");
        let Some(done) = done else {
            return Err(Error::Program { program, reason: "not found; install tar".to_owned() });
        };
        if done.status.success() {
            return Ok(());
        }
        // The last line only sums up ("Exiting with failure status …").
        let cause = done.messages.lines().next();
        let cause = cause.map(|line| line.strip_prefix("tar: ").unwrap_or(line));
        if done.status.code() != Some(CHANGED) {
            return Err(tool::failed(program, done.status, cause));
        }
        let cause = cause.unwrap_or_default();
        if self.is_shared {
            tracing::warn!(
                "{at} is not of these tasks alone, and changes while it is saved: {cause}"
            );
            return Ok(());
        }
        let reason = format!(
            "{cause}: a process outside of the tree writes there; try again when it does not"
        );
        Err(Error::Program { program, reason })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    fn place(is_shared: bool) -> SavedFileSystem<'static> {
        SavedFileSystem { at: Path::new("/dev/shm"), is_shared, is_stored: false }
    }

    /// Tar itself has the file grow, after it has read the first part of it.
    #[test]
    fn files_of_others_may_change_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("log"), vec![b'x'; 1 << 20]).unwrap();
        let save = || {
            let there = File::open(&root).unwrap();
            let mut tar = tar(there.as_fd(), None);
            tar.args(["--checkpoint=10", "--checkpoint-action=exec=echo more >>log"]);
            let mut archive = Vec::new();
            let mut packer = Packer::new(&mut archive);
            let done = tool::run(&mut tar, None, &mut packer).unwrap();
            packer.finish().unwrap();
            (done, archive)
        };
        let (done, archive) = save();
        place(true).judge(done).unwrap();
        fs::write(dir.path().join("tar.gz"), archive).unwrap();
        let mut list = Command::new("tar");
        list.arg("-tzf").arg(dir.path().join("tar.gz"));
        assert_eq!(list.output().unwrap().stdout, b"./\n./log\n", "it is complete");
        let error = place(false).judge(save().0).unwrap_err().to_string();
        assert!(
            error.starts_with("tar of the files at /dev/shm failed: ./log: file changed"),
            "{error}"
        );
    }

    /// It is as large as what it has, and an archive that tar(1) knows.
    #[test]
    fn what_is_stored_is_an_archive_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("rows"), vec![b'7'; 1 << 20]).unwrap();
        let lens = [false, true].map(|is_stored| {
            let path = dir.path().join(format!("{is_stored}.tar.gz"));
            let file = File::create(&path).unwrap();
            let archive = Writer::new(torpor_images::kind::TMPFS_DEV, &path, file).unwrap();
            let place = SavedFileSystem { is_stored, ..place(false) };
            let root = File::open(&root).unwrap();
            save(root.as_fd(), archive, None, place, &Halt::default()).unwrap();
            let mut list = Command::new("tar");
            assert_eq!(list.arg("-tzf").arg(&path).output().unwrap().stdout, b"./\n./rows\n");
            path.metadata().unwrap().len()
        });
        assert!(lens[0] < 1 << 16 && lens[1] > 1 << 20, "{lens:?}");
    }

    /// Pages that cannot be copied, say: the tasks stand still for an archive that nobody will want.
    #[test]
    fn nothing_is_saved_where_all_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows"), vec![b'7'; 1 << 20]).unwrap();
        let root = File::open(dir.path()).unwrap();
        let halt = Halt::default();
        halt.note(Err(Error::Gone { pid: 1 }));
        for is_stored in [false, true] {
            let path = dir.path().join("it.tar.gz");
            let file = File::create(&path).unwrap();
            let archive = Writer::new(torpor_images::kind::TMPFS_DEV, &path, file).unwrap();
            let place = SavedFileSystem { is_stored, ..place(false) };
            let error = save(root.as_fd(), archive, None, place, &halt).unwrap_err().to_string();
            assert!(error.ends_with("has failed: task 1 is gone"), "{error}");
            assert_eq!(path.metadata().unwrap().len(), 0);
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let mut tar = Command::new("tar");
        tar.env("LC_ALL", "C").args(["--create", "./no such file"]);
        let done = tool::run(&mut tar, None, &mut std::io::sink()).unwrap();
        let error = place(true).judge(done).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "tar of the files at /dev/shm failed: exit status: 2: ./no such file: "
            ),
            "{error}"
        );
        assert!(
            error.ends_with("No such file or directory") && !error.contains("--create"),
            "{error}"
        );
        let error = place(true).judge(None).unwrap_err().to_string();
        assert!(error.ends_with("install tar"), "{error}");
    }
}
