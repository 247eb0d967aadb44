//! Names that the guardian sees to if the supervisor is killed: those that files have for the moment, and those that had to
//! make room for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, RenameFlags};

use crate::error::{Context, Error, Result};
use crate::guardian::{Undo, Way, Words};

/// A name that goes: a directory, whose inode number tells it from the same name in others, the name, and the inode number of
/// the file that has it, or none for one that nobody else has.
pub(crate) static NAME: Way = Way {
    has_file: true,
    ..Way::new("unlink", |words, dir| take_away(words, dir, AtFlags::empty()))
};

/// The same for that of an empty directory.
pub(crate) static DIRECTORY: Way = Way {
    has_file: true,
    ..Way::new("rmdir", |words, dir| take_away(words, dir, AtFlags::REMOVEDIR))
};

/// What stepped aside gets its name back: the directory, the name that it has meanwhile, and its own.
pub(crate) static ASIDE: Way = Way { has_file: true, ..Way::new("rename", give_back) };

/// What takes a name away that no other file can have.
///
/// # Errors
/// If the directory cannot be looked at.
pub(super) fn undo(dir: &OwnedFd, name: &[u8]) -> Result<Undo> {
    Ok(NAME.undo(vec![inode(dir)?, word(name)]))
}

/// What takes a name away as long as it is that of `file`.
///
/// # Errors
/// If the directory or the file cannot be looked at.
pub(super) fn undo_of(dir: &OwnedFd, name: &[u8], file: &OwnedFd) -> Result<Undo> {
    Ok(NAME.undo(vec![inode(dir)?, word(name), inode(file)?]))
}

/// What takes an empty directory away, as long as the name is its own.
///
/// # Errors
/// If one of the directories cannot be looked at.
pub(super) fn undo_directory(dir: &OwnedFd, name: &[u8], made: &OwnedFd) -> Result<Undo> {
    Ok(DIRECTORY.undo(vec![inode(dir)?, word(name), inode(made)?]))
}

/// What gives a name back to a file that is called `other` meanwhile.
///
/// # Errors
/// If the directory cannot be looked at.
pub(super) fn undo_aside(dir: &OwnedFd, other: &str, name: &[u8]) -> Result<Undo> {
    Ok(ASIDE.undo(vec![inode(dir)?, word(other.as_bytes()), word(name)]))
}

fn take_away(words: &Words<'_>, dir: Option<BorrowedFd<'_>>, flags: AtFlags) -> Result<()> {
    let Some(dir) = dir else { return Ok(()) };
    let name = bytes(words, 1)?;
    let what = || format!("unlink {}", String::from_utf8_lossy(&name));
    if let Some(known) = words.rest(2).first() {
        let now = rustix::fs::statat(dir, &*name, AtFlags::SYMLINK_NOFOLLOW).context(what)?;
        // Somebody has put something else there.
        if now.st_ino.to_string() != *known {
            return Ok(());
        }
    }
    rustix::fs::unlinkat(dir, &*name, flags).context(what)
}

fn give_back(words: &Words<'_>, dir: Option<BorrowedFd<'_>>) -> Result<()> {
    let Some(dir) = dir else { return Ok(()) };
    let (other, name) = (bytes(words, 1)?, bytes(words, 2)?);
    rustix::fs::renameat_with(dir, &*other, dir, &*name, RenameFlags::NOREPLACE)
        .context(|| format!("rename {}", String::from_utf8_lossy(&other)))
}

fn inode(file: &OwnedFd) -> Result<String> {
    let stat = rustix::fs::fstat(file.as_fd()).context(|| "fstat".to_owned())?;
    Ok(stat.st_ino.to_string())
}

/// A name may be any bytes, and the guardian is told text.
fn word(name: &[u8]) -> String {
    name.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(words: &Words<'_>, at: usize) -> Result<Vec<u8>> {
    let (pairs, _) = words.text(at)?.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let name: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    name.ok_or_else(|| Error::invalid("the guardian's list", format!("word {at} is no name")))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::{self, File};
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    /// A directory, and the names in it.
    fn names(dir: &tempfile::TempDir) -> Vec<Vec<u8>> {
        let entries = fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_name_is_removed_from_its_directory() {
        let temp = tempfile::tempdir().unwrap();
        let name = b"not text\xff\n".as_slice();
        let path = temp.path().join(OsStr::from_bytes(name));
        fs::write(&path, "").unwrap();
        fs::write(temp.path().join("other"), "").unwrap();
        let dir: OwnedFd = File::open(temp.path()).unwrap().into();
        undo(&dir, name).unwrap().perform(Some(dir.as_fd())).unwrap();
        assert_eq!(names(&temp), [b"other"]);
    }

    /// Others may have given the name to something else meanwhile.
    #[test]
    fn only_what_was_made_loses_its_name() {
        let temp = tempfile::tempdir().unwrap();
        let [file, made] = ["file", "made"].map(|name| temp.path().join(name));
        fs::write(&file, "").unwrap();
        fs::create_dir(&made).unwrap();
        let open = |path| OwnedFd::from(File::open(path).unwrap());
        let (dir, kept, own) = (open(temp.path()), open(&file), open(&made));
        let of_file = undo_of(&dir, b"file", &kept).unwrap();
        let of_directory = undo_directory(&dir, b"made", &own).unwrap();
        fs::rename(&file, temp.path().join("kept")).unwrap();
        fs::write(&file, "of somebody else").unwrap();
        fs::rename(&made, temp.path().join("own")).unwrap();
        fs::create_dir(&made).unwrap();
        for undo in [&of_file, &of_directory] {
            undo.perform(Some(dir.as_fd())).unwrap();
        }
        assert_eq!(names(&temp), [&b"file"[..], b"kept", b"made", b"own"]);
        fs::rename(temp.path().join("kept"), &file).unwrap();
        fs::remove_dir(&made).unwrap();
        fs::rename(temp.path().join("own"), &made).unwrap();
        for undo in [of_file, of_directory] {
            undo.perform(Some(dir.as_fd())).unwrap();
        }
        assert!(names(&temp).is_empty());
    }

    #[test]
    fn what_has_stepped_aside_comes_back() {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("aside"), "rows").unwrap();
        let dir: OwnedFd = File::open(temp.path()).unwrap().into();
        let aside = undo_aside(&dir, "aside", b"own").unwrap();
        fs::write(temp.path().join("own"), "newer").unwrap();
        aside.perform(Some(dir.as_fd())).unwrap_err();
        assert_eq!(names(&temp), [&b"aside"[..], b"own"]);
        fs::remove_file(temp.path().join("own")).unwrap();
        aside.perform(Some(dir.as_fd())).unwrap();
        assert_eq!(fs::read(temp.path().join("own")).unwrap(), b"rows");
    }
}
