//! The root directory of a container, with what a program needs that is linked dynamically.
//!
//! Thousands of cases have one, so it is made without a shell: the few commands that one took for each file were a
//! tenth of all that the zoo takes.

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid, chownat, makedev, mknodat};
use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const DIRECTORIES: [&str; 8] =
    ["bin", "proc", "sys", "dev/pts", "dev/shm", "dev/mqueue", "dev/net", "tmp"];

/// Character devices, with their numbers.
const DEVICES: [(&str, u32, u32); 5] =
    [("null", 1, 3), ("zero", 1, 5), ("tty", 5, 0), ("urandom", 1, 9), ("net/tun", 10, 200)];

/// What loads programs of 64 and of 32 bits; each knows of its own kind only.
const LOADERS: [&str; 2] = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux.so.2"];

/// Fills `root` for the programs that are to be there under the names beside them, with the files of the host that they
/// want; all belongs to the user and the group `owner`, if one is named.
///
/// # Errors
/// A file cannot be made, or copied; the loader does not say what a program loads.
pub(crate) fn fill(
    root: &Path,
    programs: &[(&Path, &str)],
    files: &[String],
    owner: Option<u32>,
) -> Result<()> {
    for name in DIRECTORIES {
        std::fs::create_dir_all(root.join(name))?;
    }
    let mut libraries = BTreeSet::new();
    for (program, name) in programs {
        copy(program, &root.join(name))?;
        libraries.extend(loaded_by(program)?);
    }
    for file in files.iter().map(Path::new) {
        libraries.extend(loaded_by(file)?);
        libraries.insert(file.to_owned());
    }
    for file in libraries {
        copy(&file, &root.join(file.strip_prefix("/")?))?;
    }
    for (name, major, minor) in DEVICES {
        let path = root.join("dev").join(name);
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), makedev(major, minor))?;
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o666))?;
    }
    symlink("pts/ptmx", root.join("dev/ptmx"))?;
    symlink("/proc/self/fd", root.join("dev/fd"))?;
    owner.map_or(Ok(()), |owner| give(root, owner))
}

/// Copies a file, or what a link leads to.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.parent().context("no directory")?)?;
    std::fs::copy(from, to).with_context(|| format!("copy {}", from.display()))?;
    Ok(())
}

/// The libraries that a program, or a library, loads; none of one that loads nothing.
fn loaded_by(file: &Path) -> Result<Vec<PathBuf>> {
    for loader in LOADERS.iter().filter(|loader| Path::new(loader).exists()) {
        let said = Command::new(loader).arg("--list").arg(file).output().context(*loader)?;
        if said.status.success() {
            let said = String::from_utf8(said.stdout)?;
            ensure!(!said.contains("not found"), "{} loads: {said}", file.display());
            let paths = said.split_whitespace().filter(|word| word.starts_with('/'));
            return Ok(paths.map(PathBuf::from).collect());
        }
    }
    Ok(Vec::new())
}

/// Gives a directory away, and all that is in it.
fn give(path: &Path, owner: u32) -> Result<()> {
    let (user, group) = (Uid::from_raw(owner), Gid::from_raw(owner));
    chownat(CWD, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    if path.symlink_metadata()?.is_dir() {
        for entry in std::fs::read_dir(path)? {
            give(&entry?.path(), owner)?;
        }
    }
    Ok(())
}
