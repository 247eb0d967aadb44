//! Files of a job on their way to another machine: a list of what comes, then the contents,
//! one after the other.
//!
//! What is unpacked was sent by another machine and is checked as such: names stay below
//! the directory, nothing that is there is written to, and no way leads over a link. Only the job's own directories, in its
//! checkpoints, may have anything in them. All else is opened by its names later: at any depth that are files and
//! directories only, but for links from images to those that they build on.
//!
//! A directory comes before all that is in it, and what is in it before anything else. Paths in the list are not longer
//! than paths can be: where they become long the list says so, and goes on with paths from there.

mod pack;
mod unpack;

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::Timestamps;
use serde::{Deserialize, Serialize};

use crate::marks::{self, Attributes, Marks};
use crate::name::AnyPath;
use crate::order::Extent;
pub(crate) use pack::{Bundle, there};
pub(crate) use unpack::unpack;

/// No list is longer.
const MAX_LIST: u64 = 64 << 20;

/// One thing that is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    path: AnyPath,
    what: EntryKind,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: (i64, i64),
    #[serde(default)]
    attributes: Attributes,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum EntryKind {
    Dir,
    File(u64),
    /// A file whose content comes in another order.
    Parts(u64, Vec<Extent>),
    /// A file of this size with holes: what is between those.
    Sparse(u64, Vec<Extent>),
    /// A file that came before, by its name in what came before.
    There(AnyPath),
    /// One more name of a file of this list, by its first.
    Same(AnyPath),
    Link(AnyPath),
    Fifo,
    Whiteout,
    /// From here on paths are those below this directory, which came before.
    Enter,
    /// From here on paths are as they were before the last such directory.
    Leave,
}

impl Entry {
    fn of(path: PathBuf, what: EntryKind, meta: &Metadata, attributes: Attributes) -> Self {
        Self {
            path: path.into(),
            what,
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            attributes,
        }
    }

    /// One that says something of those after it.
    fn turn(path: PathBuf, what: EntryKind) -> Self {
        let attributes = Attributes::new();
        Self { path: path.into(), what, mode: 0, uid: 0, gid: 0, mtime: (0, 0), attributes }
    }

    fn marks(&self) -> Marks {
        let time = marks::time(self.mtime);
        let times = Timestamps { last_access: time, last_modification: time };
        Marks { owner: (self.uid, self.gid), mode: self.mode, times }
    }
}

/// Files that the other end has already: their names there, by device and inode here.
pub(crate) type There = HashMap<(u64, u64), PathBuf>;

/// Bytes of all files that come with their content.
fn bytes_of(entries: &[Entry]) -> u64 {
    let sum = |extents: &[Extent]| extents.iter().map(|&(_, len)| len).fold(0, u64::saturating_add);
    let contents = entries.iter().map(|entry| match &entry.what {
        EntryKind::File(size) | EntryKind::Parts(size, _) => *size,
        EntryKind::Sparse(_, extents) => sum(extents),
        _ => 0,
    });
    contents.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::{self, File, Permissions};
    use std::io::{self, Write};
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    use std::path::Path;

    use rustix::fs::OFlags;
    use torpor_kernel::tree;

    use super::pack::list_of;
    use super::unpack::check;
    use super::*;
    use crate::{files, holes, walk};

    fn packed(root: &Path) -> Vec<u8> {
        let wanted = |path: &Path| path != Path::new("left-out");
        let bundle = Bundle::of(root, &There::new(), wanted).unwrap();
        let mut bytes = Vec::new();
        bundle.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, bundle.length());
        bytes
    }

    #[test]
    fn what_is_sent_arrives() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = ["checkpoint-1/work/a", "checkpoint-1/work/a/b"];
        let [a, b] = own;
        let of = |dir: &str, name: &str| format!("{dir}/{name}");
        fs::create_dir_all(from.path().join(b)).unwrap();
        fs::write(from.path().join(of(b, "file")), "content").unwrap();
        fs::write(from.path().join("left-out"), "content").unwrap();
        symlink("../file", from.path().join(of(a, "link"))).unwrap();
        fs::set_permissions(from.path().join(a), Permissions::from_mode(0o750)).unwrap();
        fs::create_dir(from.path().join("checkpoint-1/round-2")).unwrap();
        let parent = "checkpoint-1/round-2/parent";
        symlink("../../checkpoint-0/round-1", from.path().join(parent)).unwrap();
        // What a container has removed, and a directory that hides the one below it.
        let open = |name: &str| File::open(from.path().join(name)).unwrap();
        marks::make_whiteout(open(a), Path::new("removed")).unwrap();
        drop(marks::make_fifo(open(a), Path::new("pipe")).unwrap());
        let opaque = vec![(b"trusted.overlay.opaque".to_vec(), b"y".to_vec())];
        Marks::of(&open(a).metadata().unwrap()).give(&open(b), &opaque).unwrap();
        let times = own.map(|name| open(name).metadata().unwrap().modified().unwrap());
        let bytes = packed(from.path());
        unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
        assert_eq!(fs::read(to.path().join(of(b, "file"))).unwrap(), b"content");
        assert_eq!(fs::read_link(to.path().join(of(a, "link"))).unwrap(), Path::new("../file"));
        assert_eq!(fs::metadata(to.path().join(a)).unwrap().mode() & 0o7777, 0o750);
        assert!(!to.path().join("left-out").exists());
        let parent = fs::read_link(to.path().join(parent)).unwrap();
        assert_eq!(parent, Path::new("../../checkpoint-0/round-1"));
        let kind = |name: &str| fs::symlink_metadata(to.path().join(name)).unwrap();
        assert!(
            marks::is_whiteout(&kind(&of(a, "removed")))
                && kind(&of(a, "pipe")).file_type().is_fifo()
        );
        let open = |name: &str| File::open(to.path().join(name)).unwrap();
        assert_eq!(marks::attributes(&open(b)).unwrap(), opaque);
        assert_eq!(own.map(|name| open(name).metadata().unwrap().modified().unwrap()), times);
        for cut in [0, 5, 20, bytes.len() - 1] {
            let to = tempfile::tempdir().unwrap();
            assert!(unpack(&mut &bytes[..cut], to.path(), None).is_err(), "{cut}");
        }
    }

    /// Deeper than the path of a file can be long, and far from all that has short names. Those in the list stay short.
    #[test]
    fn what_is_deep_arrives() {
        const DEPTH: usize = 3000;
        for (name, depth) in [("d".to_owned(), DEPTH), ("d".repeat(250), 100)] {
            let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let top = "checkpoint-1/work";
            fs::create_dir_all(from.path().join(top)).unwrap();
            let (first, second) = (from.path().join(top), to.path().join(top));
            let last = walk::tests::make(&first, &name, depth);
            let file = Path::new("file");
            marks::make_file(&last, file).unwrap().write_all(b"word").unwrap();
            last.set_permissions(Permissions::from_mode(0o751)).unwrap();
            // Something comes when all of that has come.
            fs::create_dir(first.join("z")).unwrap();
            fs::write(first.join("z/after"), "after").unwrap();
            fs::write(first.join("a"), "before").unwrap();
            let before = there(from.path(), &[top.into()]).unwrap();
            assert_eq!(before.len(), 2, "{before:?}");
            let bytes = packed(from.path());
            assert!(bytes.len() < depth * 2500, "{} bytes", bytes.len());
            unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
            let came = walk::tests::bottom(&second, &name, depth).unwrap();
            let [came_meta, meta] = [&came, &last].map(|dir| dir.metadata().unwrap());
            assert_eq!(came_meta.mode() & 0o7777, 0o751);
            assert_eq!(came_meta.modified().unwrap(), meta.modified().unwrap());
            let read = tree::open(&came, file, OFlags::RDONLY).map(File::from).unwrap();
            assert_eq!(io::read_to_string(read).unwrap(), "word");
            assert_eq!(fs::read(second.join("z/after")).unwrap(), b"after");
            let [a, b] = [&first, &second].map(|top| fs::metadata(top).unwrap());
            assert_eq!(a.modified().unwrap(), b.modified().unwrap());
            files::remove_trees(&[first, second]).unwrap();
        }
    }

    /// A file of a terabyte that takes a page is sent like one of a page.
    #[test]
    fn holes_are_not_sent() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        holes::tests::make(&from.path().join("file"));
        let bytes = packed(from.path());
        assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
        unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
        assert!(holes::tests::is_made(&to.path().join("file")));
        let cut = tempfile::tempdir().unwrap();
        unpack(&mut &bytes[..bytes.len() - 1], cut.path(), None).unwrap_err();
    }

    /// The other end takes no list that is longer.
    #[test]
    fn many_files_with_many_holes_make_no_longer_a_list() {
        const LONGEST: u64 = 4096;
        let extents: Vec<Extent> = (0..1000).map(|n| (n << 20, 4096)).collect();
        let sparse = EntryKind::Sparse(1 << 30, extents.clone());
        let mut entries = ["a", "b", "c"].map(|name| entry(name, sparse.clone()));
        let whole = list_of(&mut entries, MAX_LIST).unwrap();
        assert!(entries.iter().all(|entry| entry.what == sparse));
        let list = list_of(&mut entries, LONGEST).unwrap();
        assert!(list.len() < whole.len() && list.len() as u64 <= LONGEST, "{}", list.len());
        assert_eq!(serde_json::from_slice::<Vec<Entry>>(&list).unwrap(), entries);
        for entry in &entries {
            let EntryKind::Sparse(size, parts) = &entry.what else { panic!("{entry:?}") };
            assert!(holes::are_within(parts, *size));
            let is_in = |&(at, len): &Extent| {
                parts.iter().any(|&(first, more)| first <= at && at + len <= first + more)
            };
            assert!(extents.iter().all(is_in), "{parts:?}");
        }
        // Names alone are as long as they are.
        let mut names = vec![entry(&"n".repeat(200), EntryKind::Dir); 100];
        assert!(list_of(&mut names, LONGEST).unwrap().len() as u64 > LONGEST);
    }

    #[test]
    fn what_came_before_is_there() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("first/sub")).unwrap();
        fs::create_dir(from.path().join("second")).unwrap();
        fs::write(from.path().join("first/sub/same"), "same").unwrap();
        fs::hard_link(from.path().join("first/sub/same"), from.path().join("second/kept")).unwrap();
        fs::write(from.path().join("second/new"), "new").unwrap();
        let before = there(from.path(), &["first".into()]).unwrap();
        let second = |path: &Path| path.starts_with("second");
        let mut bytes = Vec::new();
        Bundle::of(from.path(), &before, second).unwrap().write(&mut bytes).unwrap();
        unpack(&mut bytes.as_slice(), to.path(), Some(from.path())).unwrap();
        assert_eq!(fs::read(to.path().join("second/kept")).unwrap(), b"same");
        assert_eq!(fs::read(to.path().join("second/new")).unwrap(), b"new");
        // It is for lack of what came before that this fails.
        let other = to.path().join("other");
        fs::create_dir(&other).unwrap();
        assert!(unpack(&mut bytes.as_slice(), &other, None).is_err());
    }

    fn entry(path: &str, what: EntryKind) -> Entry {
        Entry {
            path: path.into(),
            what,
            mode: 0o600,
            uid: 0,
            gid: 0,
            mtime: (0, 0),
            attributes: Attributes::new(),
        }
    }

    /// What comes when these are sent with one byte.
    fn sent(entries: &[Entry]) -> Vec<u8> {
        let list = serde_json::to_vec(entries).unwrap();
        let length = (list.len() as u64).to_be_bytes();
        [&length, list.as_slice(), b"x"].concat()
    }

    /// Nothing is written of what has no room.
    #[test]
    fn no_more_comes_in_than_is_free() {
        let half = || EntryKind::File(u64::MAX / 2);
        for entries in [
            vec![entry("a", EntryKind::File(1)), entry("b", half())],
            vec![entry("a", half()), entry("b", half()), entry("c", half())],
            vec![entry("a", EntryKind::Parts(u64::MAX, vec![(0, u64::MAX)]))],
            vec![entry("a", EntryKind::Sparse(u64::MAX, vec![(0, u64::MAX)]))],
        ] {
            let to = tempfile::tempdir().unwrap();
            let error = unpack(&mut sent(&entries).as_slice(), to.path(), None).unwrap_err();
            assert!(error.to_string().contains("there is no room for its "), "{error}");
            assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn nothing_gets_out_of_its_directory() {
        let outside = tempfile::tempdir().unwrap();
        let before = tempfile::tempdir().unwrap();
        fs::write(before.path().join("secret"), "of somebody else").unwrap();
        fs::create_dir(before.path().join("came")).unwrap();
        symlink("..", before.path().join("came/up")).unwrap();
        symlink("../secret", before.path().join("came/link")).unwrap();
        let link = EntryKind::Link(outside.path().to_owned().into());
        let file = |size| EntryKind::File(size);
        let (dir, enter, leave) = (EntryKind::Dir, EntryKind::Enter, EntryKind::Leave);
        // What is put into a directory of the job's own, where anything may be.
        let own = |inside: &[(&str, EntryKind)]| {
            let dirs = ["checkpoint-1", "checkpoint-1/work"].map(|dir| entry(dir, EntryKind::Dir));
            let inside = inside
                .iter()
                .map(|(path, what)| entry(&format!("checkpoint-1/work/{path}"), what.clone()));
            dirs.into_iter().chain(inside).collect::<Vec<_>>()
        };
        let and = |mut entries: Vec<Entry>, more: &[(&str, EntryKind)]| {
            entries.extend(more.iter().map(|(path, what)| entry(path, what.clone())));
            entries
        };
        let all = |entries: &[(&str, EntryKind)]| and(Vec::new(), entries);
        let entered = || own(&[("a", EntryKind::Dir), ("a", EntryKind::Enter)]);
        for entries in [
            all(&[("../x", file(1))]),
            all(&[("/tmp/x", file(1))]),
            all(&[("", dir.clone())]),
            all(&[("a/./../../x", file(1))]),
            own(&[("a", link.clone()), ("a/x", file(1))]),
            all(&[("out", link.clone())]),
            all(&[("in", EntryKind::Fifo)]),
            all(&[("err", EntryKind::Whiteout)]),
            all(&[("a", file(0)), ("a", file(1))]),
            all(&[("a", EntryKind::Parts(1, vec![(1 << 40, 1)]))]),
            all(&[("a", EntryKind::Sparse(1, vec![(1 << 40, 1)]))]),
            all(&[("a", EntryKind::There("../secret".into()))]),
            all(&[("a", EntryKind::There(before.path().join("secret").into()))]),
            all(&[("a", EntryKind::There("up/secret".into()))]),
            all(&[("a", EntryKind::There("link".into()))]),
            all(&[("a", EntryKind::There("nothing".into()))]),
            all(&[("a", EntryKind::There("".into()))]),
            // What has not come, or is no file, or is reached over a link, has no second name.
            all(&[("a", EntryKind::Same("b".into())), ("b", file(1))]),
            all(&[("a", EntryKind::Same("../../secret".into()))]),
            all(&[("a", dir.clone()), ("b", EntryKind::Same("a".into()))]),
            own(&[("a", link.clone()), ("b", EntryKind::Same("checkpoint-1/work/a".into()))]),
            all(&[("run-1", dir.clone()), ("run-1/lock", link.clone())]),
            all(&[("run-1", dir.clone()), ("run-1", enter.clone()), ("lock", link.clone())]),
            all(&[("", leave.clone())]),
            and(entered(), &[("", leave.clone()), ("", leave)]),
            and(entered(), &[("../../x", file(1))]),
            and(entered(), &[("..", enter.clone())]),
            own(&[("a", enter.clone()), ("x", file(1))]),
            and(own(&[("a", dir), ("a/b", link.clone()), ("a/b", enter)]), &[("x", file(1))]),
            own(&[("a", EntryKind::Dir), ("a/b", link), ("a/b/x", file(1))]),
        ] {
            let bytes = sent(&entries);
            let to = tempfile::tempdir().unwrap();
            let came = before.path().join("came");
            assert!(unpack(&mut bytes.as_slice(), to.path(), Some(&came)).is_err(), "{entries:?}");
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        }
        let long = u64::MAX.to_be_bytes();
        assert!(unpack(&mut long.as_slice(), outside.path(), None).is_err());
    }

    /// They are opened by their names, by the daemon as by the engine, and would be any file of this machine.
    #[test]
    fn links_deep_in_a_checkpoint_are_refused_by_name() {
        let link = |target: &str| EntryKind::Link(target.into());
        for (path, what) in [
            ("checkpoint-1", link("/etc")),
            ("checkpoint-1/record.json", link("/etc/shadow")),
            ("checkpoint-1/digests.json", EntryKind::Fifo),
            ("checkpoint-1/durable", EntryKind::Whiteout),
            ("checkpoint-1/round-1", link("../checkpoint-0/round-1")),
            ("checkpoint-1/work", link("/etc")),
            ("checkpoint-1/upper", link("work")),
            ("checkpoint-1/round-1/core-1.img", link("/etc/shadow")),
            ("checkpoint-1/round-1/pages-1.img", link("../round-0/pages-1.img")),
            ("checkpoint-1/round-1/deep/er/link", link("x")),
            ("checkpoint-x/work/link", link("x")),
            ("work/link", link("x")),
            ("checkpoint-1/round-1", EntryKind::Enter),
            ("checkpoint-1/round-1/parent", link("/etc")),
            ("checkpoint-1/round-1/parent", link("..")),
            ("checkpoint-1/round-1/parent", link("../..")),
            ("checkpoint-1/round-1/parent", link("../work")),
            ("checkpoint-1/round-1/parent", link("../../checkpoint-0")),
            ("checkpoint-1/round-1/parent", link("../../checkpoint-0/upper")),
            ("checkpoint-1/round-1/parent", link("../../checkpoint-0/..")),
            ("checkpoint-1/round-1/parent", link("../../../7/checkpoint-1/round-1")),
            ("checkpoint-1/round-1/parent", link("../../incoming/round-1")),
            ("checkpoint-1/round-1/parent/parent", link("../round-0")),
            ("checkpoint-1/parent", link("../checkpoint-0")),
        ] {
            let to = tempfile::tempdir().unwrap();
            let bytes = sent(&[entry(path, what.clone())]);
            let error = unpack(&mut bytes.as_slice(), to.path(), None).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{path} is neither a file")), "{what:?}: {error}");
        }
        for (path, what) in [
            ("checkpoint-1/round-1/parent", link("../round-0")),
            ("checkpoint-1/round-1/parent", link("../../checkpoint-0/round-3")),
            ("checkpoint-1/work/parent", link("/etc")),
            ("checkpoint-1/upper/a/b", EntryKind::Whiteout),
        ] {
            check(&[entry(path, what)]).unwrap();
        }
    }

    #[test]
    fn names_that_are_no_text_arrive_and_one_file_stays_one() {
        use std::os::unix::ffi::OsStrExt;
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let work = Path::new("checkpoint-1/work");
        let [odd, link, again] = [&b"\xff\xfe"[..], b"link\x80", b"z"].map(OsStr::from_bytes);
        let place = from.path().join(work).join(odd);
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join(odd), "word").unwrap();
        symlink(odd, place.join(link)).unwrap();
        fs::hard_link(place.join(odd), from.path().join(work).join(again)).unwrap();
        let bytes = packed(from.path());
        unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
        let place = to.path().join(work).join(odd);
        assert_eq!(fs::read(place.join(odd)).unwrap(), b"word");
        assert_eq!(fs::read_link(place.join(link)).unwrap(), odd);
        let id = |path: &Path| tree::id(&fs::metadata(path).unwrap());
        assert_eq!(id(&place.join(odd)), id(&to.path().join(work).join(again)));
        assert_eq!(bytes.windows(4).filter(|four| four == b"word").count(), 1, "it is sent twice");
    }
}
