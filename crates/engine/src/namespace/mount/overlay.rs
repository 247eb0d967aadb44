//! Overlay mounts inside of a container: their layers are directories there, which
//! the other mounts bring back.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat, fstat, openat2};

use torpor_policy::OVERLAY_LAYERS;

use super::collect::open_root;
use super::fs::{join_options, split_options};
use super::mountinfo::Mount;
use super::superblock;
use crate::error::{Context, Error, Result};

/// The options with absolute paths: the kernel shows them as they were given, which
/// may have been relative to a directory that one of `bases` is likely to be.
/// `merged` is the root of the overlay, `root` that of its namespace.
///
/// # Errors
/// Why the layers cannot be named.
pub(super) fn absolute(
    mount: &Mount,
    merged: &Stat,
    root: BorrowedFd<'_>,
    bases: &[PathBuf],
) -> std::result::Result<OsString, String> {
    let anywhere = [PathBuf::from("/")];
    for base in anywhere.iter().chain(bases) {
        let mut found = true;
        let mut layers = Vec::new();
        let options: Vec<OsString> = split_options(&mount.options)
            .map(|option| match layers_of(option) {
                None => option.to_owned(),
                Some((key, paths)) => {
                    let mut paths: Vec<PathBuf> = paths.iter().map(|p| base.join(p)).collect();
                    for path in &mut paths {
                        let layer = find(root, path);
                        found &= layer.is_some();
                        if let Some((at, stat)) = layer {
                            *path = at;
                            layers.push((key.to_owned(), stat));
                        }
                    }
                    let joined: Vec<&[u8]> =
                        paths.iter().map(|p| p.as_os_str().as_bytes()).collect();
                    OsString::from_vec([key.as_bytes(), b"=", &joined.join(&b':')].concat())
                }
            })
            .collect();
        if found && fits(merged, &layers) {
            return Ok(join_options(options.iter().map(OsString::as_os_str)));
        }
    }
    Err(format!(
        "its layers ({}) cannot be found by these paths; mount it with absolute ones, or provide \
         it with --external mnt[{}]:KEY",
        mount.options.display(),
        mount.mountpoint.display()
    ))
}

/// The key and the paths of an option that names layers.
fn layers_of(option: &OsStr) -> Option<(&str, Vec<&Path>)> {
    let bytes = option.as_bytes();
    let at = bytes.iter().position(|&b| b == b'=')?;
    let key = OVERLAY_LAYERS.iter().find(|k| k.as_bytes() == &bytes[..at])?;
    let paths = bytes[at + 1..].split(|&b| b == b':').filter(|p| !p.is_empty());
    Some((key, paths.map(|p| Path::new(OsStr::from_bytes(p))).collect()))
}

fn look(root: BorrowedFd<'_>, path: &Path) -> Option<Stat> {
    let path = path.strip_prefix("/").unwrap_or(path);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // A link could lead out of the mount that the policy has judged the layer by.
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let layer = openat2(root, path, flags, Mode::empty(), resolve).ok()?;
    fstat(layer).ok()
}

/// A directory, and its path without symbolic links: Docker names layers by some (`overlay2/l`).
fn find(root: BorrowedFd<'_>, path: &Path) -> Option<(PathBuf, Stat)> {
    if let Some(stat) = look(root, path) {
        return Some((path.to_owned(), stat));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let relative = path.strip_prefix("/").unwrap_or(path);
    let layer = openat2(root, relative, flags, Mode::empty(), resolve).ok()?;
    let at = std::fs::read_link(format!("/proc/self/fd/{}", layer.as_raw_fd())).ok()?;
    let (wanted, stat) = (fstat(layer).ok()?, look(root, &at)?);
    ((wanted.st_dev, wanted.st_ino) == (stat.st_dev, stat.st_ino)).then_some((at, stat))
}

/// Where all layers are on one file system, the root of an overlay has the inode
/// number of its topmost layer.
fn fits(merged: &Stat, layers: &[(String, Stat)]) -> bool {
    let top = |key: &str| layers.iter().find(|(k, _)| k == key).map(|(_, stat)| stat);
    let Some(topmost) = top("upperdir").or(top("lowerdir")).or(top("lowerdir+")) else {
        return false;
    };
    let one = layers.iter().all(|(_, stat)| stat.st_dev == topmost.st_dev);
    !one || topmost.st_ino == merged.st_ino
}

/// Makes an overlay whose layers are below `root`, in the calling thread, whose
/// root directory nobody shares.
///
/// # Errors
/// If a layer is not there, or behind a symbolic link; if the kernel refuses to make the overlay.
pub(super) fn make(mount: &Mount, root: BorrowedFd<'_>) -> Result<OwnedFd> {
    let layers = split_options(&mount.options).filter_map(layers_of);
    for path in layers.flat_map(|(_, paths)| paths) {
        if look(root, path).is_none() {
            let reason = "is no directory, or a symbolic link leads to it";
            return Err(Error::invalid(
                "mountpoints",
                format!("the layer {} of an overlay {reason}", path.display()),
            ));
        }
    }
    let old = open_root()?;
    enter(root)?;
    let made = superblock::make_here(mount);
    enter(old.as_fd())?;
    made
}

fn enter(root: BorrowedFd<'_>) -> Result<()> {
    rustix::process::fchdir(root)
        .and_then(|()| rustix::process::chroot("."))
        .context(|| "change the root directory".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_layers_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lower", "upper", "work"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let upper = std::fs::File::open(dir.path().join("upper")).unwrap();
        let other = std::fs::File::open(dir.path().join("lower")).unwrap();
        let root = open_root().unwrap();
        let mount = Mount {
            options: "lowerdir=lower:lower,upperdir=upper,workdir=work,xino=off".into(),
            ..Mount::default()
        };
        let found = |merged: &std::fs::File, bases: &[PathBuf]| {
            absolute(&mount, &fstat(merged).unwrap(), root.as_fd(), bases)
        };
        let at = dir.path().to_str().unwrap();
        assert_eq!(
            found(&upper, &["/nowhere".into(), dir.path().into()]).unwrap(),
            OsString::from(format!(
                "lowerdir={at}/lower:{at}/lower,upperdir={at}/upper,workdir={at}/work,xino=off"
            ))
        );
        assert!(found(&upper, &[]).is_err());
        assert!(found(&other, &[dir.path().into()]).is_err());
    }

    #[test]
    fn layers_behind_links_are_named_without_them() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lower", "upper", "work", "l"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::os::unix::fs::symlink("../lower", dir.path().join("l/SHORT")).unwrap();
        std::os::unix::fs::symlink("../gone", dir.path().join("l/GONE")).unwrap();
        let at = dir.path().to_str().unwrap();
        let upper = std::fs::File::open(dir.path().join("upper")).unwrap();
        let named = |lower: &str| {
            let options = format!("lowerdir={lower},upperdir={at}/upper,workdir={at}/work");
            let mount = Mount { options: options.into(), ..Mount::default() };
            absolute(&mount, &fstat(&upper).unwrap(), open_root().unwrap().as_fd(), &[])
        };
        let wanted = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
        assert_eq!(named(&format!("{at}/l/SHORT")).unwrap(), OsString::from(wanted));
        assert!(named(&format!("{at}/l/GONE")).is_err());
    }
}
