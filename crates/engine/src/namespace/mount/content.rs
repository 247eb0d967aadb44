//! The content of tmpfs mounts (`tmpfs-dev-DEV.tar.gz.img`), written and read by
//! tar(1): it knows modes, owners, times, devices, hard links, holes, extended
//! attributes and access control lists.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};

/// Options that saving and loading have in common.
const COMMON: &[&str] = &["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls"];

/// Writes all below `root` to `archive`. User and group ids are those of the user
/// namespace, if one is given.
///
/// # Errors
/// If tar fails.
pub fn save(root: BorrowedFd<'_>, archive: File, userns: Option<OwnedFd>) -> Result<()> {
    let mut tar = tar(root, userns);
    // Times finer than seconds, and attributes, need the posix format. The content
    // is packed while tasks are frozen, so speed counts for more than size.
    tar.args(["--create", "--format=posix", "--sparse", "--atime-preserve=system"])
        .args(["--use-compress-program=gzip -1", "--warning=no-file-ignored"])
        .args(COMMON)
        .arg(".")
        .stdin(Stdio::null())
        .stdout(archive);
    run(tar)
}

/// Unpacks `archive` below `root`.
///
/// # Errors
/// If tar fails, because the archive is damaged or the file system is full.
pub fn load(root: BorrowedFd<'_>, archive: File, userns: Option<OwnedFd>) -> Result<()> {
    let mut tar = tar(root, userns);
    tar.args(["--extract", "--gzip", "--preserve-permissions", "--same-owner"])
        .args(COMMON)
        .stdin(archive)
        .stdout(Stdio::null());
    run(tar)
}

/// A tar that works below `root`, a directory that may be in no mount namespace.
fn tar(root: BorrowedFd<'_>, userns: Option<OwnedFd>) -> Command {
    let mut tar = Command::new("tar");
    tar.current_dir(format!("/proc/self/fd/{}", root.as_raw_fd()))
        .env("LC_ALL", "C")
        .env_remove("TAR_OPTIONS")
        .env_remove("GZIP")
        .stderr(Stdio::piped());
    if let Some(userns) = userns {
        torpor_sys::ns::start_in_user_namespace(&mut tar, userns);
    }
    tar
}

fn run(mut tar: Command) -> Result<()> {
    let args: Vec<_> = tar.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let program = format!("tar {}", args.join(" "));
    let child = tar.spawn().context(|| program.clone())?;
    let done = child.wait_with_output().context(|| program.clone())?;
    let said = String::from_utf8_lossy(&done.stderr);
    if done.status.success() {
        return Ok(());
    }
    // The last line only sums up ("Exiting with failure status …").
    let first = said.lines().next().unwrap_or_default();
    Err(Error::Program { program, reason: format!("{}: {first}", done.status) })
}
