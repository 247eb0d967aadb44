//! Makes the content of a tmpfs again: what the policy has read in its archive, by the same
//! reader.
//!
//! Everything is made below the root of the new file system, which nobody else has open yet,
//! and by names that nothing has: what an archive says twice is an error.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use torpor_policy::Ask;
use torpor_policy::archive::{Archive, Entry, Make, Stretch};

use super::collect::open_beneath;
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// Bytes copied at once.
const CHUNK: usize = 1 << 18;

/// Unpacks `archive`, the image file `name`, below `root`. Its ids are those of the user
/// namespace that `maps` describes. `judged` is what the plan has of it that a policy limits.
///
/// # Errors
/// If the archive is damaged, leads out of `root`, or has more than was judged; if a file cannot be
/// made, e.g. as the file system is full.
pub(super) fn unpack(
    root: BorrowedFd<'_>,
    archive: impl Read,
    name: &str,
    (maps, judged): (&IdMaps, &HashSet<Ask>),
) -> Result<()> {
    let mut archive = Archive::new(archive);
    let invalid = |reason: String| Error::invalid(name, reason);
    let _owner = maps.own_files().context(|| "become the owner of files".to_owned())?;
    // Directories change when something comes into them.
    let mut directories: Vec<(Entry, OwnedFd)> = vec![];
    while let Some(entry) = archive.next().map_err(invalid)? {
        if let Some(ask) = entry.ask().filter(|ask| !judged.contains(ask)) {
            return Err(invalid(format!("{ask}, which the plan does not list")));
        }
        let place = NameIn::of(root, &entry.path)?;
        let what = || format!("{name}: make {}", String::from_utf8_lossy(&entry.path));
        match &entry.make {
            Make::Link(target) => {
                let target = NameIn::of(root, target)?;
                let (from, to) = (target.dir.as_fd(), place.dir.as_fd());
                rustix::fs::linkat(from, &target.name, to, &place.name, AtFlags::empty())
                    .context(what)?;
                continue;
            }
            Make::Directory => {
                if !entry.path.is_empty() {
                    rustix::fs::mkdirat(&place.dir, &place.name, Mode::RWXU).context(what)?;
                }
                let dir = open_beneath(root, Path::new(OsStr::from_bytes(&entry.path)), false);
                directories.push((entry.clone(), dir.context(what)?));
                continue;
            }
            Make::File { size, data } => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let private = Mode::RUSR | Mode::WUSR;
                let file = rustix::fs::openat(&place.dir, &place.name, flags, private);
                let file = File::from(file.context(what)?);
                fill(&file, *size, data, &mut archive).map_err(|error| match error {
                    Failed::Archive(reason) => invalid(reason),
                    Failed::File(source) => Error::Os { what: what(), source },
                })?;
            }
            Make::Symlink(target) => {
                rustix::fs::symlinkat(&target[..], &place.dir, &place.name).context(what)?;
            }
            Make::Device(device) => {
                let kind =
                    if device.block { FileType::BlockDevice } else { FileType::CharacterDevice };
                let (major, minor) = device.major.zip(device.minor).unwrap_or_default();
                let number = rustix::fs::makedev(major, minor);
                rustix::fs::mknodat(&place.dir, &place.name, kind, Mode::RUSR, number)
                    .context(what)?;
            }
            Make::Fifo => {
                rustix::fs::mknodat(&place.dir, &place.name, FileType::Fifo, Mode::RUSR, 0)
                    .context(what)?;
            }
        }
        set_attributes(&entry, place.path(), maps).context(what)?;
    }
    while let Some((entry, dir)) = directories.pop() {
        let what = || format!("{name}: set up {}", String::from_utf8_lossy(&entry.path));
        let path = PathBuf::from(format!("/proc/self/fd/{}/.", dir.as_raw_fd()));
        set_attributes(&entry, path, maps).context(what)?;
    }
    Ok(())
}

/// A name in a directory.
struct NameIn {
    dir: OwnedFd,
    name: PathBuf,
}

impl NameIn {
    fn of(root: BorrowedFd<'_>, path: &[u8]) -> Result<Self> {
        let path = Path::new(OsStr::from_bytes(path));
        let parent = path.parent().unwrap_or(Path::new(""));
        let dir = open_beneath(root, parent, false)
            .context(|| format!("open {} of a tmpfs", parent.display()))?;
        Ok(NameIn { dir, name: path.file_name().unwrap_or_default().into() })
    }

    /// A path that leads there, and no further if it is a symbolic link that is not followed.
    fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(&self.name)
    }
}

enum Failed {
    Archive(String),
    File(std::io::Error),
}

/// Writes the data of a file.
fn fill<R: Read>(
    file: &File,
    size: u64,
    data: &[Stretch],
    archive: &mut Archive<R>,
) -> std::result::Result<(), Failed> {
    let mut buffer = vec![0; CHUNK];
    for stretch in data {
        let (mut at, end) = (stretch.at, stretch.at.saturating_add(stretch.len));
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let read = archive.read(&mut buffer[..len]).map_err(Failed::Archive)?;
            if read == 0 {
                return Err(Failed::Archive("it has less data than it says".to_owned()));
            }
            file.write_all_at(&buffer[..read], at).map_err(Failed::File)?;
            at += read as u64;
        }
    }
    file.set_len(size).map_err(Failed::File)
}

/// Sets owner, mode, attributes and times of what is at `path`, whose last part is not
/// followed: the owner first, which takes set-uid bits and capabilities away, times last.
fn set_attributes(entry: &Entry, path: PathBuf, maps: &IdMaps) -> rustix::io::Result<()> {
    let uid = Uid::from_raw(maps.uid_outside(entry.uid).ok_or(Errno::INVAL)?);
    let gid = Gid::from_raw(maps.gid_outside(entry.gid).ok_or(Errno::INVAL)?);
    let here = rustix::fs::CWD;
    let link = matches!(entry.make, Make::Symlink(_));
    rustix::fs::chownat(here, &path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    if !link {
        rustix::fs::chmodat(here, &path, Mode::from_raw_mode(entry.mode), AtFlags::empty())?;
    }
    for (name, value) in &entry.attributes {
        match rustix::fs::lsetxattr(&path, &name[..], value, XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                let (name, path) = (String::from_utf8_lossy(name), path.display());
                tracing::warn!(%name, %path, "this kernel has no such attribute here");
            }
            other => other?,
        }
    }
    let names = ["system.posix_acl_access", "system.posix_acl_default"];
    for (name, text) in names.iter().zip(&entry.lists) {
        let Some(text) = text else { continue };
        let list = access_list(text, maps).ok_or(Errno::INVAL)?;
        rustix::fs::lsetxattr(&path, *name, &list, XattrFlags::empty())?;
    }
    let (seconds, nanos) = entry.modified;
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(here, &path, &times, AtFlags::SYMLINK_NOFOLLOW)
}

/// An access control list as the kernel takes it (linux/posix_acl_xattr.h), from its text with
/// numeric ids (acl(5)).
fn access_list(text: &str, maps: &IdMaps) -> Option<Vec<u8>> {
    const VERSION: u32 = 2;
    const NO_ID: u32 = u32::MAX;
    let mut list = VERSION.to_le_bytes().to_vec();
    for entry in text.split([',', '\n']).filter(|entry| !entry.trim().is_empty()) {
        // What follows is a comment on the mask.
        let entry = entry.split(['\t', '#']).next()?.trim();
        let mut parts = entry.split(':');
        let (tag, id, rights) = (parts.next()?, parts.next()?, parts.next()?);
        let (tag, id): (u16, u32) = match (tag, id) {
            ("user" | "u", "") => (0x01, NO_ID),
            ("user" | "u", id) => (0x02, maps.uid_outside(id.parse().ok()?)?),
            ("group" | "g", "") => (0x04, NO_ID),
            ("group" | "g", id) => (0x08, maps.gid_outside(id.parse().ok()?)?),
            ("mask" | "m", "") => (0x10, NO_ID),
            ("other" | "o", "") => (0x20, NO_ID),
            _ => return None,
        };
        let mut bits = 0_u16;
        for right in rights.chars() {
            bits |= match right {
                'r' => 4,
                'w' => 2,
                'x' => 1,
                '-' => 0,
                _ => return None,
            };
        }
        if parts.next().is_some() {
            return None;
        }
        list.extend(tag.to_le_bytes());
        list.extend(bits.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    Some(list)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::process::{Command, Stdio};

    use torpor_policy::{Device, scan_archive};

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
        let scanned = scan_archive(archive, &mut |ask| asked.push(ask));
        let judged = asked.iter().filter(|ask| is_listed(ask)).cloned().collect();
        let scanned = scanned.map(|()| asked);
        let dir = tempfile::tempdir().unwrap();
        let root = File::open(dir.path()).unwrap();
        let unpacked = unpack(root.as_fd(), archive, "it", (&IdMaps::identity(), &judged));
        let mut made = vec![];
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let file = file.unwrap();
            let (meta, path) =
                (file.metadata().unwrap(), format!("./{}", file.file_name().display()));
            let mode = meta.mode() & 0o7777;
            if meta.file_type().is_char_device() {
                let (major, minor) =
                    (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
                let device = Device { block: false, major: Some(major), minor: Some(minor) };
                made.push(Ask::Device { path, device });
            } else if meta.is_file() && mode & 0o6000 != 0 {
                made.push(Ask::SetUid { path, mode, capabilities: false });
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
        assert_eq!(asked.len(), 2, "{asked:?}");
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

    #[test]
    fn access_lists() {
        let of = |text| access_list(text, &IdMaps::identity());
        let list = of("user::rwx,user:1000:r--,group::r-x,mask::r-x,other::---\n").unwrap();
        assert_eq!(list.len(), 4 + 5 * 8);
        assert_eq!(list[12..20], [2, 0, 4, 0, 0xe8, 3, 0, 0]);
        assert_eq!(of("user:1:rwx\t#effective:r--"), of("u:1:rwx"));
        for wrong in ["user:name:rwx", "user", "user::rwz", "mask:1:r--", "user::r:x"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }
}
