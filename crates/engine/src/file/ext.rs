//! Files from outside of the tree: named by the dump, brought by the restore's caller.
//!
//! `--external file[MNT_ID:INODE]` and `tty[RDEV:DEV]` let a dump pass over what a
//! descriptor refers to; `--inherit-fd` gives a restore an open file for a key, which
//! may also be a pipe, a socket or a path that the dump treats like any other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, fstat, makedev};

use crate::error::{Context, Result};
use crate::external::External;
use crate::file::description::reopen;
use crate::namespace::mount::Roots;
use crate::options::Given;

/// The null device (Documentation/admin-guide/devices.txt in the kernel's sources).
const NULL: (u32, u32) = (1, 3);

/// The file that the caller of a restore gave for `key`.
pub(crate) fn inherited<'o>(given: &'o Given, key: &str) -> Option<BorrowedFd<'o>> {
    given.inherit_fd.iter().find(|i| i.key == key).map(|i| i.fd.as_fd())
}

/// The file that the caller gave for a pipe or socket. Its key is the text of
/// procfs's link, `pipe:[1]`; the manual's `pipe[1]` is taken as well.
pub(crate) fn inherited_number<'o>(
    given: &'o Given,
    kind: &str,
    inode: u32,
) -> Option<BorrowedFd<'o>> {
    inherited(given, &format!("{kind}:[{inode}]"))
        .or_else(|| inherited(given, &format!("{kind}[{inode}]")))
}

/// The file that the caller gave for a path, with or without its leading slash.
pub(crate) fn inherited_path<'o>(given: &'o Given, path: &[u8]) -> Option<BorrowedFd<'o>> {
    let bare = |p: &[u8]| p.strip_prefix(b"/").unwrap_or(p).to_vec();
    let wanted = bare(path);
    given.inherit_fd.iter().find(|i| bare(i.key.as_bytes()) == wanted).map(|i| i.fd.as_fd())
}

/// The null device of the tree's own mounts in place of `file`, if that is a null device too. A
/// runtime does the same when it starts a container: a later dump would find one of the host's
/// outside of the tree.
///
/// # Errors
/// fstat(2).
pub(crate) fn own_null(
    roots: &Roots,
    file: BorrowedFd<'_>,
    flags: OFlags,
) -> Result<Option<OwnedFd>> {
    let is_null =
        |file: BorrowedFd<'_>| fstat(file).map(|stat| stat.st_rdev == makedev(NULL.0, NULL.1));
    if !is_null(file).context(|| "fstat".to_owned())? {
        return Ok(None);
    }
    // A tree without one keeps what the caller gave. What has the name may be something else, which
    // must not be opened.
    let node =
        roots.open_path(-1, b"/dev/null", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
    let node = node.filter(|node| is_null(node.as_fd()).unwrap_or(false));
    node.map(|node| reopen(node, flags)).transpose()
}

/// The name in the images of an open file, if the dump was told that it is external.
pub(crate) fn external_file(given: &Given, mnt_id: i32, inode: u64) -> Option<String> {
    let wanted = External::File { mnt_id: u32::try_from(mnt_id).ok()?, inode };
    given.external.contains(&wanted).then(|| wanted.to_string())
}

/// The name in the images of a terminal, if the dump was told that it is external.
pub(crate) fn external_tty(given: &Given, rdev: u64, dev: u64) -> Option<String> {
    let wanted = External::Tty { rdev, dev };
    given.external.contains(&wanted).then(|| wanted.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::options::InheritFd;

    #[test]
    fn keys_are_found() {
        let file = || Arc::new(rustix::pipe::pipe().unwrap().0);
        let key = |key: &str| InheritFd { fd: file(), key: key.to_owned() };
        let given = Given {
            inherit_fd: vec![key("pipe:[7]"), key("socket[8]"), key("tmp/x")],
            external: vec!["file[1f:2a6]".parse().unwrap(), "tty[8800:d]".parse().unwrap()],
            ..Given::default()
        };
        assert!(inherited_number(&given, "pipe", 7).is_some());
        assert!(inherited_number(&given, "socket", 8).is_some());
        assert!(inherited_number(&given, "pipe", 8).is_none());
        assert!(inherited_path(&given, b"/tmp/x").is_some());
        assert_eq!(external_file(&given, 0x1f, 0x2a6).unwrap(), "file[1f:2a6]");
        assert_eq!(external_file(&given, -1, 0x2a6), None);
        assert!(external_tty(&given, 0x8800, 0xd).is_some());
    }
}
