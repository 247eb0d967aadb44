//! The content of tmpfs mounts (`tmpfs-dev-DEV.tar.gz.img`), written by tar(1): it knows
//! modes, owners, times, devices, hard links, holes, and extended attributes. Access control
//! lists are of these: as lists (`--acls`), they would have names of users for their ids, whatever
//! `--numeric-owner` says. It is read by [`super::unpack`].

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;

use torpor_images::Writer;

use crate::error::{Error, Result};
use crate::tool;

/// Owners as numbers, and what else files have.
pub(super) const COMMON: &[&str] = &["--numeric-owner", "--xattrs", "--xattrs-include=*"];

/// Writes all below `root` to `archive`. User and group ids are those of the user
/// namespace, if one is given.
///
/// # Errors
/// If tar fails.
pub(super) fn save(
    root: BorrowedFd<'_>,
    mut archive: Writer,
    userns: Option<OwnedFd>,
) -> Result<()> {
    let mut tar = tar(root, userns);
    // Times finer than seconds, and attributes, need the posix format. The content
    // is packed while tasks are frozen, so speed counts for more than size. The same content makes
    // the same archive: a restore in rounds compares them.
    tar.args(["--create", "--format=posix", "--sparse", "--atime-preserve=system", "--sort=name"])
        .arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime")
        .args(["--use-compress-program=gzip -1n", "--warning=no-file-ignored"])
        .args(COMMON)
        .arg(".");
    run(tar, &mut archive)?;
    Ok(archive.finish()?)
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

fn run(mut tar: Command, output: &mut (dyn Write + Send)) -> Result<()> {
    let args: Vec<_> = tar.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let program = format!("tar {}", args.join(" "));
    match tool::run(&mut tar, None, output)? {
        Some(done) if done.status.success() => Ok(()),
        // The last line only sums up ("Exiting with failure status …"). The shell that starts the packer finds no path
        // of its directory, and says so before anybody else says anything.
        Some(done) => {
            let cause = done.messages.lines().find(|line| !line.starts_with("sh: "));
            Err(tool::failed(program, done.status, cause))
        }
        None => Err(Error::Program { program, reason: "not found; install tar".to_owned() }),
    }
}
