#![allow(clippy::unwrap_used)]
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::process::{Command, Stdio};

use torpor_policy::{Device, scan_archive};

use super::super::pack::pack;
use super::super::packer::Packer;
use super::*;

/// An entry of an archive in the oldest of its formats, and its data.
fn entry(name: &str, kind: u8, mode: u32, data: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    let mut put = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    put(0, name);
    put(100, &format!("{mode:07o}"));
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{:011o}", data.len()));
    put(136, "00000000000");
    put(257, "ustar\x0000");
    put(329, "0000001");
    put(337, "0000003");
    header[148..156].fill(b' ');
    header[156] = kind;
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header.extend(data);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

/// The archive of these entries.
fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut tar = entries.concat();
    tar.resize(tar.len() + 1024, 0);
    let mut gzip = Command::new("gzip");
    let mut gzip = gzip.arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    gzip.stdin.take().unwrap().write_all(&tar).unwrap();
    gzip.wait_with_output().unwrap().stdout
}

/// What an archive asks for, and what is made of it: the names, and what a policy limits.
type Both = (std::result::Result<Vec<Ask>, String>, Result<Vec<Ask>>);

/// Both, where the plan has what `is_listed` picks.
fn both_of(archive: &[u8], is_listed: impl Fn(&Ask) -> bool) -> Both {
    let mut asked = vec![];
    let scanned = scan_archive(archive, &|_, id| id, &mut |ask| asked.push(ask));
    let judged = asked.iter().filter(|ask| is_listed(ask)).cloned().collect();
    let scanned = scanned.map(|_| asked);
    let dir = tempfile::tempdir().unwrap();
    let unpacked = Filled::in_dir(&dir).unpack(archive, &judged);
    let mut made = vec![];
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let file = file.unwrap();
        let (meta, path) = (file.metadata().unwrap(), format!("./{}", file.file_name().display()));
        let mode = meta.mode() & 0o7777;
        if meta.file_type().is_char_device() {
            let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
            let device = Device { block: false, major: Some(major), minor: Some(minor) };
            made.push(Ask::Device { path, device });
        } else if meta.is_file() && mode & 0o6000 != 0 {
            made.push(Ask::SetUid { path, mode, capabilities: false });
            made.extend((mode & 0o4000 != 0).then(|| Ask::User(meta.uid())));
            made.extend((mode & 0o2000 != 0).then(|| Ask::Group(meta.gid())));
        }
    }
    let sorted = |mut all: Vec<Ask>| {
        all.sort_by_key(ToString::to_string);
        all
    };
    (scanned.map(sorted), unpacked.map(|()| sorted(made)))
}

fn both(archive: &[u8]) -> Both {
    both_of(archive, |_| true)
}

/// A reader that was taken over could leave out what an archive has.
#[test]
fn what_the_plan_leaves_out_is_not_unpacked() {
    let whole = archive(&[entry("disk", b'3', 0o600, b""), entry("su", b'0', 0o4755, b"x")]);
    let devices = |ask: &Ask| matches!(ask, Ask::Device { .. });
    for (what, (_, made)) in [
        ("device c 1:3 at \"./disk\"", both_of(&whole, |ask| !devices(ask))),
        ("a set-uid or set-gid file at \"./su\" (mode 4755)", both_of(&whole, devices)),
        ("user id 0", both_of(&whole, |ask| !matches!(ask, Ask::User(_)))),
    ] {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(&format!("{what}, which the plan does not list")), "{error}");
    }
}

/// An archive is judged by the code that unpacks it: what is made is what was asked for, and what
/// one does not take the other does not take either, for the same reason.
#[test]
fn what_is_judged_is_what_is_unpacked() {
    let (asked, made) = both(&archive(&[
        entry("disk", b'3', 0o600, b""),
        entry("plain", b'0', 0o644, b"data"),
        entry("su", b'0', 0o4755, b"#!/bin/sh"),
    ]));
    let (asked, made) = (asked.unwrap(), made.unwrap());
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert_eq!(asked, made);
    for (what, entries) in [
        ("leads upwards", [entry("../su", b'0', 0o4755, b"")]),
        ("is no path in a directory", [entry("/su", b'0', 0o4755, b"")]),
        ("ends with a slash", [entry("x/", b'0', 0o4755, b"data")]),
        ("has data, but is no file", [entry("disk", b'3', 0o600, b"data")]),
    ] {
        let (asked, made) = both(&archive(&entries));
        let (asked, made) = (asked.unwrap_err(), made.unwrap_err().to_string());
        assert!(asked.contains(what) && made.ends_with(&asked), "{asked}; {made}");
    }
}

/// A directory that archives fill.
pub(crate) struct Filled {
    root: File,
    contents: Contents,
    used: HashSet<u64>,
}

impl Filled {
    pub(crate) fn in_dir(dir: &tempfile::TempDir) -> Self {
        let root = File::open(dir.path()).unwrap();
        Self { root, contents: Contents::new(), used: HashSet::new() }
    }

    pub(crate) fn unpack(&mut self, archive: &[u8], judged: &HashSet<Ask>) -> Result<()> {
        let (root, maps) = (self.root.as_fd(), &IdMaps::identity());
        let target = UnpackInto { root, name: "it", maps, judged };
        unpack(target, archive, |entry| drop(self.contents.insert(entry.path.clone(), entry)))
    }

    fn refill(&mut self, archive: &[u8], judged: &HashSet<Ask>) -> Result<()> {
        let (root, maps) = (self.root.as_fd(), &IdMaps::identity());
        let target = UnpackInto { root, name: "it", maps, judged };
        refill(target, archive, std::mem::take(&mut self.contents), &self.used)
    }
}

/// The archive of a directory, as a dump writes it.
pub(crate) fn packed(dir: &Path) -> Vec<u8> {
    let (root, mut packer) = (File::open(dir).unwrap(), Packer::new(Vec::new()));
    let changed = pack(root.as_fd(), &IdMaps::identity(), &mut packer).unwrap();
    assert_eq!(changed, None);
    packer.finish().unwrap()
}

/// All that can be seen of what is below a directory.
pub(crate) fn seen(dir: &Path) -> Vec<String> {
    let script =
        "find . -printf '%P %y %m %U %G %n %s %T@ %l\\n'; find . -type f -exec sha256sum {} +";
    let output = Command::new("sh").args(["-c", script]).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    let mut names = [0; 256];
    let len = rustix::fs::listxattr(dir.join("owned"), &mut names).unwrap();
    lines.extend(names[..len].split(|&byte| byte == 0).map(|name| {
        let mut value = [0; 64];
        let len = rustix::fs::getxattr(dir.join("owned"), name, &mut value).unwrap_or(0);
        format!("{}={:?}", String::from_utf8_lossy(name), &value[..len])
    }));
    lines.sort();
    lines
}

pub(crate) fn set(file: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(file, name, value, XattrFlags::empty()).unwrap();
}

/// An access control list as the kernel has it: the owner, user 1, who has a name on every host, the group,
/// the mask, and others.
pub(crate) const LIST: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 7, 0, 1, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255,
    255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

pub(crate) fn shell(dir: &Path, script: &str) {
    let mut shell = Command::new("sh");
    assert!(shell.args(["-ec", script]).current_dir(dir).status().unwrap().success(), "{script}");
}

/// All that a policy would be asked for an archive.
pub(crate) fn everything(archive: &[u8]) -> HashSet<Ask> {
    let mut asked = HashSet::new();
    scan_archive(archive, &|_, id| id, &mut |ask| asked.extend([ask])).unwrap();
    asked
}

/// What is there before everything changes.
const BEFORE: &str = "mkdir -p kept/below gone/below turned swapped; \
    echo kept >kept/file; echo old >changed; echo old >gone/file; echo old >gone/below/file; \
    echo old >turned/file; echo file >swapped.file; ln -s old link; ln kept/file hard; mkfifo fifo; \
    echo many >many.1; ln many.1 many.2; ln many.1 many.3; mknod node c 1 3; echo x >moved; \
    echo x >owned; \
    dd if=/dev/urandom of=holes bs=64K count=8 status=none; truncate -s 8M holes; \
    dd if=/dev/urandom of=short bs=64K count=4 status=none; echo same >same";

/// What then is done.
const CHANGES: &str = "echo newer >changed; rm -r gone; rm -r turned; echo file >turned; \
    rm swapped.file; mkdir swapped.file; echo inside >swapped.file/inside; \
    ln -sf new link; rm fifo; echo file >fifo; rm node; mknod node c 1 5; mv moved kept/below/moved; \
    rm many.1; echo other >many.1; ln -f many.1 many.3; echo new >kept/new; ln -f many.2 hard; \
    chown 3:4 owned; chmod 4711 owned; \
    fallocate --punch-hole --offset 65536 --length 131072 holes; \
    printf x | dd of=holes bs=1 seek=4M conv=notrunc status=none; truncate -s 100 short; chmod 750 kept";

/// A file system that was filled by one archive becomes what a later one says, whatever has changed.
#[test]
fn what_was_filled_follows() {
    let (source, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    shell(source.path(), BEFORE);
    let owned = source.path().join("owned");
    set(&owned, LISTS[0], &LIST);
    set(&owned, "user.gone", b"1");
    set(&owned, "user.other", b"1");
    let first = packed(source.path());
    let mut filled = Filled::in_dir(&made);
    filled.unpack(&first, &everything(&first)).unwrap();
    assert_eq!(seen(made.path()), seen(source.path()));
    let inode = |name: &str| made.path().join(name).metadata().unwrap().ino();
    let stay = ["", "kept", "changed", "holes", "same", "owned"];
    let before = stay.map(inode);
    shell(source.path(), CHANGES);
    rustix::fs::removexattr(&owned, LISTS[0]).unwrap();
    rustix::fs::removexattr(&owned, "user.gone").unwrap();
    set(&owned, "user.other", b"2");
    let second = packed(source.path());
    filled.refill(&second, &everything(&second)).unwrap();
    assert_eq!(seen(made.path()), seen(source.path()));
    assert_eq!(stay.map(inode), before);
}

/// What comes into a directory has the lists that the archive says, and not those that the directory hands on.
#[test]
fn what_follows_inherits_nothing() {
    let (source, made) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    shell(source.path(), "mkdir -p dir/below; echo x >plain; echo x >owned");
    set(&source.path().join("dir"), LISTS[1], &LIST);
    let mut filled = Filled::in_dir(&made);
    filled.unpack(&packed(source.path()), &HashSet::new()).unwrap();
    shell(source.path(), "mv plain dir; mkdir other; mv other dir/below; echo x >dir/heir");
    filled.refill(&packed(source.path()), &HashSet::new()).unwrap();
    assert_eq!(seen(made.path()), seen(source.path()));
    for file in ["dir", "dir/plain", "dir/below", "dir/below/other", "dir/heir"] {
        let lists = |dir: &Path| {
            LISTS.map(|list| {
                let mut value = [0; 64];
                let len = rustix::fs::getxattr(dir.join(file), list, &mut value);
                len.map(|len| value[..len].to_vec())
            })
        };
        assert_eq!(lists(made.path()), lists(source.path()), "{file}");
    }
}

/// A task has mapped the file, and not its name: what changes would be another file, or the same one.
#[test]
fn what_is_mapped_stays_as_it_is() {
    let file = |data: &[u8]| entry("file", b'0', 0o644, data);
    let mapped = |later: &[Vec<u8>]| {
        let dir = tempfile::tempdir().unwrap();
        let mut filled = Filled::in_dir(&dir);
        filled.unpack(&archive(&[file(b"it")]), &HashSet::new()).unwrap();
        filled.used.insert(dir.path().join("file").metadata().unwrap().ino());
        filled.refill(&archive(later), &HashSet::new())
    };
    mapped(&[file(b"it"), entry("other", b'0', 0o644, b"new")]).unwrap();
    for later in [
        &[file(b"IT")][..],
        &[file(b"it and more")],
        &[entry("file", b'0', 0o600, b"it")],
        &[entry("file", b'6', 0o644, b"")],
        &[],
    ] {
        let error = mapped(later).unwrap_err().to_string();
        assert!(error.contains("file is mapped, and has changed"), "{error}");
    }
}

/// An archive makes as much as the plan says, first and later.
#[test]
fn what_is_more_than_the_plan_has_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut filled = Filled::in_dir(&dir);
    let of = |files: &[Vec<u8>]| {
        let archive = archive(files);
        let totals = scan_archive(archive.as_slice(), &|_, id| id, &mut drop).unwrap();
        (archive, HashSet::from([Ask::Fill(totals)]))
    };
    let it = entry("file", b'0', 0o755, b"it");
    let (one, plan_of_one) = of(std::slice::from_ref(&it));
    let (two, plan_of_two) = of(&[it, entry("other", b'0', 0o755, b"it")]);
    filled.unpack(&one, &plan_of_one).unwrap();
    let error = filled.refill(&two, &plan_of_one).unwrap_err().to_string();
    let wanted = "2 files of 4 bytes, 0 directories, 0 others, which the plan does not list";
    assert!(error.contains(wanted), "{error}");
    let fresh = tempfile::tempdir().unwrap();
    let error = Filled::in_dir(&fresh).unpack(&one, &plan_of_two).unwrap_err().to_string();
    assert!(error.contains("1 files of 2 bytes"), "{error}");
}

/// A later archive is judged as the first one is, and holds nothing twice.
#[test]
fn what_follows_is_judged() {
    let after = |later: &[Vec<u8>]| {
        let dir = tempfile::tempdir().unwrap();
        let mut filled = Filled::in_dir(&dir);
        let first = [entry("file", b'0', 0o755, b"it"), entry("other", b'0', 0o755, b"it")];
        filled.unpack(&archive(&first), &HashSet::new()).unwrap();
        filled.refill(&archive(later), &HashSet::new()).unwrap_err().to_string()
    };
    let error = after(&[entry("file", b'0', 0o4755, b"it")]);
    assert!(error.contains("at \"./file\" (mode 4755), which the plan does not list"), "{error}");
    let error = after(&[entry("other", b'3', 0o600, b"")]);
    assert!(error.contains("at \"./other\", which the plan does not list"), "{error}");
    let file = entry("file", b'0', 0o755, b"it");
    let error = after(&[file.clone(), file]);
    assert!(error.contains("make file: File exists"), "{error}");
    let error = after(&[entry("../file", b'0', 0o755, b"it")]);
    assert!(error.contains("leads upwards"), "{error}");
}

/// There may be more of them than a process may have open.
#[test]
fn directories_take_no_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<_> = (0..50).map(|number| entry(&number.to_string(), b'5', 0o755, b"")).collect();
    let (root, maps) = (File::open(dir.path()).unwrap(), IdMaps::identity());
    let target =
        UnpackInto { root: root.as_fd(), name: "it", maps: &maps, judged: &HashSet::new() };
    let is_in_it = |fd: io::Result<std::fs::DirEntry>| {
        std::fs::read_link(fd.unwrap().path()).is_ok_and(|path| path.starts_with(dir.path()))
    };
    let mut most = 0;
    let made = unpack(target, &archive(&all)[..], |_| {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().map(is_in_it);
        most = most.max(open.filter(|is_in_it| *is_in_it).count());
    });
    made.unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), all.len());
    assert!(most < 5, "{most} descriptors");
}
