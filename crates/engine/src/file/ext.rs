//! Files from outside of the tree: named by the dump, brought by the restore's caller.
//!
//! `--external file[MNT_ID:INODE]` and `tty[RDEV:DEV]` let a dump pass over what a
//! descriptor refers to; `--inherit-fd` gives a restore an open file for a key, which
//! may also be a pipe, a socket or a path that the dump treats like any other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, OFlags, Stat, fstat, makedev};
use torpor_policy::FileKey;

use crate::error::{Context, Result};
use crate::external::External;
use crate::file::description::reopen;
use crate::namespace::mount::Roots;
use crate::options::InheritFd;

/// The null device (Documentation/admin-guide/devices.txt in the kernel's sources).
const NULL: (u32, u32) = (1, 3);

/// The open file that the caller of a restore gave for what the images call so. A namespace is given to live in: no
/// task has it as a file, whatever the images call it.
pub(crate) fn inherited<'o>(given: &'o [InheritFd], name: &FileKey<'_>) -> Option<BorrowedFd<'o>> {
    let named = given.iter().filter(|inherit| name.is(&inherit.key));
    named.map(|inherit| inherit.fd.as_fd()).find(|fd| !is_namespace(*fd))
}

/// Whether a file is a namespace.
pub(crate) fn is_namespace(file: BorrowedFd<'_>) -> bool {
    torpor_sys::ns::kind(file).is_ok()
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
    if !is_null(&fstat(file).context(|| "fstat".to_owned())?) {
        return Ok(None);
    }
    // A tree without one keeps what the caller gave. What has the name may be something else, which
    // must not be opened.
    let node = roots.find((-1, b"/dev/null"), OFlags::PATH).ok();
    let node = node.filter(|node| fstat(node).is_ok_and(|stat| is_null(&stat)));
    node.map(|node| reopen(node, flags)).transpose()
}

/// Whether it is a null device.
pub(crate) fn is_null(stat: &Stat) -> bool {
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    is_device && stat.st_rdev == makedev(NULL.0, NULL.1)
}

/// The name in the images of an open file, if the dump was told that it is external.
pub(crate) fn external_file(external: &[External], mnt_id: i32, inode: u64) -> Option<String> {
    let wanted = External::File { mnt_id: u32::try_from(mnt_id).ok()?, inode };
    external.contains(&wanted).then(|| wanted.to_string())
}

/// The name in the images of a terminal, if the dump was told that it is external.
pub(crate) fn external_tty(external: &[External], rdev: u64, dev: u64) -> Option<String> {
    let wanted = External::Tty { rdev, dev };
    external.contains(&wanted).then(|| wanted.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn keys_are_found() {
        let file = || Arc::new(rustix::pipe::pipe().unwrap().0);
        let space = || Arc::new(std::fs::File::open("/proc/self/ns/net").unwrap().into());
        let key = |key: &str| InheritFd { fd: file(), key: key.to_owned() };
        let space = |key: &str| InheritFd { fd: space(), key: key.to_owned() };
        let given =
            [key("pipe:[7]"), key("socket[8]"), key("tmp/x"), space("pipe[9]"), space("outer")];
        let external = ["file[1f:2a6]".parse().unwrap(), "tty[8800:d]".parse().unwrap()];
        let socket = |number| FileKey::Socket { number, outside: false };
        for (name, is_given) in [
            (FileKey::Pipe(7), true),
            (FileKey::Pipe(8), false),
            (socket(8), true),
            (socket(7), false),
            (FileKey::Path(b"/tmp/x"), true),
            // A namespace, whatever it is called.
            (FileKey::Pipe(9), false),
            (FileKey::Path(b"/outer"), false),
            (FileKey::Outside("outer".into()), false),
        ] {
            assert_eq!(inherited(&given, &name).is_some(), is_given, "{name:?}");
        }
        assert_eq!(external_file(&external, 0x1f, 0x2a6).unwrap(), "file[1f:2a6]");
        assert_eq!(external_file(&external, -1, 0x2a6), None);
        assert!(external_tty(&external, 0x8800, 0xd).is_some());
    }
}
