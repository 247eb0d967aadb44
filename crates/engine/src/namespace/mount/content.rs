//! The content of tmpfs mounts (`tmpfs-dev-DEV.tar.gz.img`): an archive as tar(1) has them ([`super::pack`]), packed for
//! gzip(1) or stored. It is read by [`super::unpack`].

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use torpor_images::Writer;

use super::pack::{Changed, pack};
use super::packer::Packer;
use super::storer::Storer;
use crate::error::{About, Context, Error, Result};
use crate::halt::{Halt, Until};
use crate::namespace::user::IdMaps;

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

/// Writes all below `root` to `archive`, with ids of the user namespace that has these maps.
///
/// # Errors
/// If a file cannot be read, or others than the tree have changed one that it has alone; those of [`Halt::check`], which is
/// asked before each piece.
pub(super) fn save(
    root: BorrowedFd<'_>,
    mut archive: Writer,
    maps: &IdMaps,
    place: SavedFileSystem<'_>,
    halt: &Halt,
) -> Result<()> {
    let what = || place.what();
    if place.is_stored {
        let mut storer = Storer::new(&mut archive);
        place.judge(pack(root, maps, &mut Until { halt, out: &mut storer }).about(what)?)?;
        storer.finish().context(what)?;
    } else {
        let mut packer = Packer::new(&mut archive);
        place.judge(pack(root, maps, &mut Until { halt, out: &mut packer }).about(what)?)?;
        packer.finish().context(what)?;
    }
    Ok(archive.finish()?)
}

impl SavedFileSystem<'_> {
    fn what(self) -> String {
        format!("pack the files at {}", self.at.display())
    }

    /// Whether what is packed is what there was. The archive is complete in any case, and files that others have changed while
    /// they were read are as they were at some moment: more than that nobody can say of what is not the tree's alone.
    fn judge(self, changed: Changed) -> Result<()> {
        let Some(cause) = changed else { return Ok(()) };
        if self.is_shared {
            let at = self.at.display();
            tracing::warn!(
                "{at} is not of these tasks alone, and changes while it is saved: {cause}"
            );
            return Ok(());
        }
        let reason = format!(
            "{cause}: a process outside of the tree writes there; try again when it does not"
        );
        Err(Error::Os { what: self.what(), source: io::Error::other(reason) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::{self, File};
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::chown;
    use std::process::Command;

    use torpor_images::kind;
    use torpor_policy::{IdExtent, UserMaps};

    use super::*;

    fn place(is_shared: bool) -> SavedFileSystem<'static> {
        SavedFileSystem { at: Path::new("/dev/shm"), is_shared, is_stored: false }
    }

    /// What is written goes on, and something happens before a file's data does.
    struct Meanwhile<W, F> {
        out: W,
        happens: F,
    }

    impl<W: Write, F: FnMut()> Write for Meanwhile<W, F> {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            if data.starts_with(b"xxxx") {
                (self.happens)();
            }
            self.out.write(data)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What tar(1) lists of an archive, and one of its files.
    fn listed(archive: &Path, file: &str) -> (String, Vec<u8>) {
        let tar = |how: &[&str]| {
            let output = Command::new("tar").arg(how[0]).arg(archive).args(&how[1..]).output();
            let output = output.unwrap();
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            output.stdout
        };
        (String::from_utf8(tar(&["-tzf"])).unwrap(), tar(&["-xOzf", file]))
    }

    /// They grow, become shorter and go when the first part of one has been read.
    #[test]
    fn files_of_others_may_change_meanwhile() {
        const LEN: usize = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let (log, next) = (root.join("log"), root.join("next"));
        let save = |happens: &dyn Fn(), names: &str| {
            fs::write(&log, vec![b'x'; LEN]).unwrap();
            fs::write(&next, "").unwrap();
            let there = File::open(&root).unwrap();
            let mut out = Meanwhile { out: Packer::new(Vec::new()), happens };
            let changed = pack(there.as_fd(), &IdMaps::identity(), &mut out).unwrap();
            let path = dir.path().join("tar.gz");
            fs::write(&path, out.out.finish().unwrap()).unwrap();
            let (listed, content) = listed(&path, "./log");
            assert_eq!((listed.as_str(), content.len()), (names, LEN), "it is complete");
            place(true).judge(changed.clone()).unwrap();
            let error = place(false).judge(changed).unwrap_err().to_string();
            let why = error.strip_prefix("pack the files at /dev/shm: ");
            let why = why.unwrap_or_else(|| panic!("{error}"));
            (why.split_once(':').unwrap().0.to_owned(), content)
        };
        let open = || File::options().append(true).open(&log).unwrap();
        let (why, content) = save(&|| open().write_all(b"+").unwrap(), "./\n./log\n./next\n");
        assert_eq!(why, "./log changed while it was read");
        assert!(content.iter().all(|&byte| byte == b'x'));
        let (why, content) = save(&|| open().set_len(300_000).unwrap(), "./\n./log\n./next\n");
        let expected = format!("./log became {} bytes shorter while it was read", LEN - 300_000);
        assert_eq!(why, expected);
        assert!(content.ends_with(&[0; LEN - 300_000]));
        let (why, _) = save(&|| drop(fs::remove_file(&next)), "./\n./log\n");
        assert_eq!(why, "./next was removed before it was read");
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
            let archive = Writer::new(kind::TMPFS_DEV, &path, file).unwrap();
            let place = SavedFileSystem { is_stored, ..place(false) };
            let root = File::open(&root).unwrap();
            save(root.as_fd(), archive, &IdMaps::identity(), place, &Halt::default()).unwrap();
            assert_eq!(listed(&path, "./rows"), ("./\n./rows\n".to_owned(), vec![b'7'; 1 << 20]));
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
            let archive = Writer::new(kind::TMPFS_DEV, &path, file).unwrap();
            let place = SavedFileSystem { is_stored, ..place(false) };
            let saved = save(root.as_fd(), archive, &IdMaps::identity(), place, &halt);
            let error = saved.unwrap_err().to_string();
            assert!(error.ends_with("has failed: task 1 is gone"), "{error}");
            assert_eq!(path.metadata().unwrap().len(), 0);
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        chown(dir.path(), Some(100_000), Some(100_000)).unwrap();
        let map = vec![IdExtent::new(0, 100_000, 1000).unwrap()];
        let maps = IdMaps::new(UserMaps { users: map.clone(), groups: map });
        let path = dir.path().with_extension("gz");
        let archive = Writer::new(kind::TMPFS_DEV, &path, tempfile::tempfile().unwrap()).unwrap();
        let root = File::open(dir.path()).unwrap();
        let saved = save(root.as_fd(), archive, &maps, place(true), &Halt::default());
        let error = saved.unwrap_err().to_string();
        let expected =
            "pack the files at /dev/shm: open ./file: its user namespace does not have the owner";
        assert!(error.starts_with(expected), "{error}");
    }
}
