#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use torpor_kernel::tree::Tree;

use super::*;

struct Pair {
    here: tempfile::TempDir,
    there: tempfile::TempDir,
    mirror: Mirror,
    copy: Replica,
}

impl Pair {
    fn new() -> Self {
        let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (mirror, copy) =
            (Mirror::new(here.path()).unwrap(), Replica::new(Tree::at(there.path()).unwrap()));
        Self { here, there, mirror, copy }
    }

    /// One round: how many bytes of content went.
    fn round(&mut self) -> usize {
        let (mut bytes, mut write) = (0, None);
        let copy = &mut self.copy;
        self.mirror
            .tell(&HashSet::new(), &mut |step| {
                match step {
                    Step::Change(change @ Change::Write { .. }) => write = Some(change),
                    Step::Change(change) => copy.apply(change, || unreachable!())?,
                    Step::Looked => {}
                    Step::Data(data) => {
                        bytes += data.len();
                        copy.apply(write.take().unwrap(), || Ok(data.to_vec()))?;
                    }
                }
                Ok(())
            })
            .unwrap();
        self.copy.finish().unwrap();
        assert_eq!(described(self.here.path()), described(self.there.path()));
        bytes
    }

    fn shell(&self, script: &str) {
        let status =
            Command::new("sh").args(["-ec", script]).current_dir(self.here.path()).status();
        assert!(status.unwrap().success(), "{script}");
    }
}

/// All that is to be the same, by path; hard links as the first path of their file.
fn described(root: &Path) -> BTreeMap<String, String> {
    let list = "find . -printf '%P %y %m %U %G %T@ %s %l\\n' | sed 's/\\( d .* \\)[0-9]* $/\\1/' | sort; \
                find . -type f -exec sha256sum {} + | sort -k 2; \
                find . -type f -links +1 -printf '%i %P\\n' | sort -k 2 | \
                awk '{ if (!($1 in first)) first[$1] = $2; print $2, \"is\", first[$1] }'";
    let output = Command::new("sh").args(["-c", list]).current_dir(root).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().enumerate().map(|(number, line)| (number.to_string(), line.to_owned())).collect()
}

#[test]
fn all_that_files_are_and_only_what_differs() {
    let mut pair = Pair::new();
    pair.shell(
        "mkdir -m 751 dir dir/deep empty; mkfifo -m 620 fifo; mknod -m 640 zero c 1 5; ln -s dir/deep link; \
         seq 300000 >dir/large; ln dir/large twin; truncate -s 9M hole; chown 7:8 dir/deep; chown -h 3:4 link; \
         echo x >'a b'; chmod 4711 'a b'; touch -d @1.5 'a b' dir",
    );
    let file = fs::File::open(pair.here.path().join("a b")).unwrap();
    let set =
        rustix::fs::fsetxattr(&file, "trusted.torpor", b"value", rustix::fs::XattrFlags::empty());
    assert!(set.is_ok() || set == Err(rustix::io::Errno::NOTSUP), "{set:?}");
    assert!(pair.round() > 1_900_000);
    let attribute =
        |root: &Path| super::scan::attributes(fs::File::open(root.join("a b")).unwrap()).unwrap();
    assert_eq!(attribute(pair.there.path()), attribute(pair.here.path()));
    assert!(pair.there.path().join("hole").metadata().unwrap().blocks() < 100);
    // Nothing has changed.
    assert_eq!(pair.round(), 0);
    // One piece of the large file, whatever its name is.
    pair.shell(
        "printf 7 | dd of=dir/large bs=1 seek=600000 conv=notrunc 2>/dev/null; mv twin other",
    );
    assert_eq!(pair.round(), PIECE);
    pair.shell("rm -r dir/deep link; ln -s elsewhere dir/deep; rm empty -d; echo file >empty; chmod 600 'a b'");
    assert_eq!(pair.round(), 5);
    // Two change places, one becomes a directory, one shorter, one longer.
    pair.shell("echo 1 >one; echo 2 >two; echo 3 >three; echo 44 >four");
    pair.round();
    pair.shell("mv one x; mv two one; mv x two; rm three; mkdir three; echo >three/in; echo 4 >four; echo >>'a b'");
    pair.round();
    pair.shell("rm -r three dir; mv other three; rm hole fifo zero");
    assert_eq!(pair.round(), 0);
}

/// What cannot go along is named, and not left behind without a word.
#[test]
fn an_attribute_without_a_proper_name_keeps_a_file_here() {
    let mut pair = Pair::new();
    pair.shell("touch odd");
    let file = fs::File::open(pair.here.path().join("odd")).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::fsetxattr(&file, &b"user.\xff"[..], b"value", flags) {
        // This file system has none.
        Err(rustix::io::Errno::NOTSUP) => return,
        set => set.unwrap(),
    }
    let error = pair.mirror.tell(&HashSet::new(), &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("/odd: "), "{error}");
}

#[test]
fn what_comes_leads_nowhere_else() {
    let mut pair = Pair::new();
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("file");
    fs::write(&victim, "mine").unwrap();
    chown(&victim, Some(0), Some(0)).unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(outside.path(), pair.there.path().join("way")).unwrap();
    symlink(&victim, pair.there.path().join("link")).unwrap();
    let meta = Meta { mode: 0o777, uid: 9, gid: 9, changed: (1, 0), attributes: Vec::new() };
    let make = |name: &str| Change::Make {
        name: name.as_bytes().to_vec(),
        what: What::Regular { len: 3 },
        meta: meta.clone(),
    };
    for name in
        ["../file", "/file", "a//b", "", ".", "a/../../file", "way/file", "way/new", "nul\0"]
    {
        assert!(pair.copy.apply(make(name), || Ok(b"bad".to_vec())).is_err(), "{name}");
    }
    let update = |len| Change::Update { name: b"link".to_vec(), len, meta: meta.clone() };
    assert!(pair.copy.apply(update(Some(0)), || Ok(Vec::new())).is_err());
    let link = Change::Link { name: b"new".to_vec(), old: b"way/file".to_vec() };
    assert!(pair.copy.apply(link, || Ok(Vec::new())).is_err());
    let remove = Change::Remove { name: b"way/file".to_vec() };
    assert!(pair.copy.apply(remove, || Ok(Vec::new())).is_err());
    assert!(pair.copy.apply(Change::Write { offset: 0 }, || Ok(b"bad".to_vec())).is_err());
    pair.copy.apply(make("new"), || Ok(Vec::new())).unwrap();
    for (offset, data) in [(2, "bad"), (u64::MAX, "b")] {
        let data = || Ok(data.as_bytes().to_vec());
        assert!(pair.copy.apply(Change::Write { offset }, data).is_err());
    }
    assert_eq!(fs::read(&victim).unwrap(), b"mine");
    let seen = victim.metadata().unwrap();
    assert_eq!((seen.mode() & 0o777, seen.uid(), seen.nlink()), (0o600, 0, 1));
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    let named = |name: &[u8]| split(name) == (b"a/b".as_slice(), b"c".as_slice());
    assert!(named(b"a/b/c") && split(b"c") == (b"".as_slice(), b"c".as_slice()));
}

#[test]
fn what_gives_rights_stays_out_where_others_could_use_it() {
    let mut pair = Pair::new();
    let meta = |mode, attributes: &[&str]| {
        let attributes = attributes.iter().map(|&name| (name.to_owned(), vec![0])).collect();
        Meta { mode, uid: 0, gid: 0, changed: (1, 0), attributes }
    };
    let make = |name: &str, what, meta| Change::Make { name: name.into(), what, meta };
    let regular = || What::Regular { len: 0 };
    let special = |mode, number| What::Special { mode, number };
    let update = |meta| Change::Update { name: b"plain".to_vec(), len: Some(0), meta };
    let mut apply = |change| pair.copy.apply(change, || Ok(Vec::new()));
    apply(make("trusted", regular(), meta(0o4755, &[]))).unwrap();
    pair.copy.share().unwrap();
    let mut apply = |change| pair.copy.apply(change, || Ok(Vec::new()));
    apply(make("plain", regular(), meta(0o755, &[]))).unwrap();
    apply(make("dir", What::Directory, meta(0o2775, &[]))).unwrap();
    apply(make("fifo", special(libc::S_IFIFO, 0), meta(0o644, &[]))).unwrap();
    apply(make("removed", special(libc::S_IFCHR, 0), meta(0o0, &[]))).unwrap();
    for (change, name) in [
        (make("esc", regular(), meta(0o4755, &[])), "/esc is a set-user-ID"),
        (make("group", regular(), meta(0o2755, &[])), "/group is a set-user-ID"),
        (make("net", regular(), meta(0o755, &["security.capability"])), "/net is a program"),
        (make("disk", special(libc::S_IFBLK, 8 << 8), meta(0o666, &[])), "/disk is a device"),
        (make("null", special(libc::S_IFCHR, 0x103), meta(0o666, &[])), "/null is a device"),
        (update(meta(0o4755, &[])), "/plain is a set-user-ID"),
    ] {
        let error = apply(change).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.hint().unwrap().contains("chmod 700"), "{error}");
    }
    for name in ["esc", "group", "net", "disk", "null"] {
        assert!(!pair.there.path().join(name).exists(), "{name}");
    }
    let plain = pair.there.path().join("plain").metadata().unwrap();
    assert_eq!(plain.mode() & 0o7777, 0o755);
}

/// What a rehearsal counts is what goes: no holes, but whole pieces around what is no hole.
#[test]
fn holes_are_counted_as_they_go() {
    let mut pair = Pair::new();
    pair.shell(
        "truncate -s 100M none; truncate -s 3000001 some; truncate -s 100M scattered
         echo first >first; ln first again; mkdir dir; echo >dir/third
         for at in 1000000 1004096 2900000; do
             printf x | dd of=some bs=1 seek=$at conv=notrunc status=none
         done
         printf x | dd of=scattered bs=1M seek=7 conv=notrunc status=none
         printf x | dd of=scattered bs=1M seek=99 conv=notrunc status=none",
    );
    let expected = pair.mirror.bytes().unwrap();
    assert_eq!(expected, pair.round() as u64);
    assert!(expected < 2 << 20, "{expected}");
}
