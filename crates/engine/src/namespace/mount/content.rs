//! The content of tmpfs mounts (`tmpfs-dev-DEV.tar.gz.img`), written and read by
//! tar(1): it knows modes, owners, times, devices, hard links, holes, extended
//! attributes and access control lists.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;

use torpor_images::{Reader, Writer};

use crate::error::{Error, Result};
use crate::tool;

/// Options that saving and loading have in common.
const COMMON: &[&str] = &["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls"];

/// Writes all below `root` to `archive`. User and group ids are those of the user
/// namespace, if one is given.
///
/// # Errors
/// If tar fails.
pub fn save(root: BorrowedFd<'_>, mut archive: Writer, userns: Option<OwnedFd>) -> Result<()> {
    let mut tar = tar(root, userns);
    // Times finer than seconds, and attributes, need the posix format. The content
    // is packed while tasks are frozen, so speed counts for more than size.
    tar.args(["--create", "--format=posix", "--sparse", "--atime-preserve=system"])
        .args(["--use-compress-program=gzip -1", "--warning=no-file-ignored"])
        .args(COMMON)
        .arg(".");
    run(tar, None, &mut archive)?;
    Ok(archive.finish()?)
}

/// Unpacks `archive` below `root`.
///
/// # Errors
/// If tar fails, because the archive is damaged or the file system is full.
pub fn load(root: BorrowedFd<'_>, mut archive: Reader, userns: Option<OwnedFd>) -> Result<()> {
    let mut tar = tar(root, userns);
    tar.args(["--extract", "--gzip", "--preserve-permissions", "--same-owner"]).args(COMMON);
    run(tar, Some(&mut archive), &mut std::io::sink())
}

/// A tar that works below `root`, a directory that may be in no mount namespace.
fn tar(root: BorrowedFd<'_>, userns: Option<OwnedFd>) -> Command {
    let mut tar = Command::new("tar");
    tar.current_dir(format!("/proc/self/fd/{}", root.as_raw_fd()))
        .env("LC_ALL", "C")
        .env_remove("TAR_OPTIONS")
        .env_remove("GZIP");
    if let Some(userns) = userns {
        torpor_sys::ns::start_in_user_namespace(&mut tar, userns);
    }
    tar
}

fn run(
    mut tar: Command,
    input: Option<&mut (dyn Read + Send)>,
    output: &mut (dyn Write + Send),
) -> Result<()> {
    let args: Vec<_> = tar.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let program = format!("tar {}", args.join(" "));
    match tool::run(&mut tar, input, output)? {
        Some(done) if done.status.success() => Ok(()),
        // The last line only sums up ("Exiting with failure status …").
        Some(done) => Err(tool::failed(program, done.status, done.messages.lines().next())),
        None => Err(Error::Program { program, reason: "not found; install tar".to_owned() }),
    }
}
