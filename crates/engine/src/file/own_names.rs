//! Names of our own in directories that others may write to, and what is made there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// What is made is called so until it has its name.
const MADE: &[u8] = b"made";

/// A number for a name that nobody else has.
pub(super) fn random() -> rustix::io::Result<u64> {
    let mut random = [0; 8];
    aws_lc_rs::rand::fill(&mut random).map_err(|_| Errno::IO)?;
    Ok(u64::from_ne_bytes(random))
}

/// A name that nobody else has: other restores may work in the same directory, and the pids of
/// their supervisors repeat in other namespaces.
pub(super) fn own_name(what: &str, number: u32) -> rustix::io::Result<String> {
    Ok(format!(".torpor.{:016x}.{what}.{number:x}", random()?))
}

/// Takes a name away, if it is there.
pub(super) fn remove(dir: BorrowedFd<'_>, name: &[u8], flags: AtFlags) {
    match rustix::fs::unlinkat(dir, name, flags) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => tracing::warn!("{} is left over: {e}", String::from_utf8_lossy(name)),
    }
}

/// Makes, by `make`, what `name` in `dir` is to be, and opens it (`O_PATH`). There must be nothing of that name. Whoever may
/// write to `dir` could exchange it before it is open: it is made in a directory that nobody else can write to, and open when it
/// comes into its place.
///
/// # Errors
/// If there is something of that name; if it cannot be made, or `dir` has no directories that are ours alone.
pub(super) fn make(
    (dir, name): (BorrowedFd<'_>, &[u8]),
    maps: &IdMaps,
    make: impl FnOnce(BorrowedFd<'_>, &[u8]) -> rustix::io::Result<()>,
) -> Result<OwnedFd> {
    let what = || format!("make {} again", String::from_utf8_lossy(name));
    let own = own_name("dir", 0).context(what)?;
    rustix::fs::mkdirat(dir, &own, Mode::RWXU).context(what)?;
    let made = open(dir, own.as_bytes()).context(what).and_then(|private| {
        check(&private, maps)?;
        make(private.as_fd(), MADE).and_then(|()| put(&private, dir, name)).context(what)
    });
    remove(dir, own.as_bytes(), AtFlags::REMOVEDIR);
    made
}

fn open(dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// Ends the restore if somebody else could write to the directory: it is this user's, or that of the tasks' root. One that is
/// not the one that was made is as good, if it is ours alone.
fn check(private: &OwnedFd, maps: &IdMaps) -> Result<()> {
    let stat = rustix::fs::fstat(private).context(|| "fstat".to_owned())?;
    let ours = [Some(rustix::process::geteuid().as_raw()), maps.uid_outside(0)];
    if ours.contains(&Some(stat.st_uid)) && stat.st_mode & 0o022 == 0 {
        return Ok(());
    }
    let why = "an unlinked file would be made in a directory that others can write to: somebody has put it there, or that file \
               system has no others";
    Err(Error::invalid("remap-fpath.img", why))
}

/// Opens what was made, and gives it its name.
fn put(private: &OwnedFd, dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let made = open(private.as_fd(), MADE);
    let put = made.and_then(|made| rename(private.as_fd(), dir, name).map(|()| made));
    if put.is_err() {
        let gone = rustix::fs::unlinkat(private, MADE, AtFlags::empty());
        // Nothing is left of a failure but its error.
        let _ = gone.or_else(|_| rustix::fs::unlinkat(private, MADE, AtFlags::REMOVEDIR));
    }
    put
}

fn rename(private: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(private, MADE, dir, name, RenameFlags::NOREPLACE) {
        // NFS and others do not know the flag.
        Err(Errno::INVAL) => match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => rustix::fs::renameat(private, MADE, dir, name),
            other => other.and(Err(Errno::EXIST)),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;

    use rustix::fs::{fstat, mkdirat};

    use super::*;
    use crate::file::description::same_inode;

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Whoever may write to a directory could lay names out that can be guessed.
    #[test]
    fn a_name_cannot_be_guessed() {
        let names = [(); 2].map(|()| own_name("ghost", 1).unwrap());
        assert_ne!(names[0], names[1]);
        assert!(names.iter().all(|name| name.ends_with(".ghost.1")), "{names:?}");
    }

    /// Whoever may write to the directory exchanges what appears in it as soon as it is there.
    #[test]
    fn what_is_made_is_what_is_opened() {
        let temp = tempfile::tempdir().unwrap();
        let dir = File::open(temp.path()).unwrap();
        let (aside, mut number) = (temp.path().join("aside"), None);
        let made = make((dir.as_fd(), b"name"), &IdMaps::identity(), |private, name| {
            mkdirat(private, name, Mode::RWXU)?;
            let own = temp.path().join(&names(temp.path())[0]);
            number = Some(fs::metadata(own.join("made")).unwrap().ino());
            fs::rename(&own, &aside).unwrap();
            fs::create_dir_all(own.join("made")).unwrap();
            Ok(())
        });
        let made = made.unwrap();
        assert_eq!(Some(fstat(&made).unwrap().st_ino), number);
        let named = rustix::fs::stat(temp.path().join("name")).unwrap();
        assert!(same_inode(&fstat(&made).unwrap(), &named));
        assert_eq!(fs::read_dir(aside).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_left_of_what_has_no_place() {
        let temp = tempfile::tempdir().unwrap();
        let dir = File::open(temp.path()).unwrap();
        fs::create_dir(temp.path().join("name")).unwrap();
        let maps = IdMaps::identity();
        let of_dir = |private: BorrowedFd<'_>, name: &[u8]| mkdirat(private, name, Mode::RWXU);
        let error = make((dir.as_fd(), b"name"), &maps, of_dir).unwrap_err().to_string();
        assert!(error.contains("File exists"), "{error}");
        let of_link =
            |private: BorrowedFd<'_>, name: &[u8]| rustix::fs::symlinkat("to", private, name);
        make((dir.as_fd(), b"name"), &maps, of_link).unwrap_err();
        make((dir.as_fd(), b"other"), &maps, |_, _| Err(Errno::NOSPC)).unwrap_err();
        assert_eq!(names(temp.path()), ["name"]);
        make((dir.as_fd(), b"link"), &maps, of_link).unwrap();
        assert_eq!(names(temp.path()), ["link", "name"]);
    }

    #[test]
    fn nothing_is_made_where_others_can_write() {
        let temp = tempfile::tempdir().unwrap();
        let maps = IdMaps::identity();
        // A directory inherits its group from one that says so, and that bit.
        // File systems without modes show others.
        for (mode, is_private) in
            [(0o700, true), (0o2700, true), (0o755, true), (0o770, false), (0o702, false)]
        {
            fs::set_permissions(temp.path(), Permissions::from_mode(mode)).unwrap();
            let dir = File::open(temp.path()).unwrap();
            assert_eq!(check(&dir.into(), &maps).is_ok(), is_private, "{mode:o}");
        }
        fs::set_permissions(temp.path(), Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(temp.path(), Some(7), None).unwrap();
        check(&File::open(temp.path()).unwrap().into(), &maps).unwrap_err();
    }
}
