//! `/proc/PID/mountinfo`: what the kernel says about the mounts of a namespace
//! (proc_pid_mountinfo(5)).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use super::fs::{self, FsType, split_options, take_flags};

/// A mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mount {
    /// Its number, unique on a machine while it lives.
    pub id: u32,
    /// The mount that it is mounted on.
    pub parent: u32,
    /// The device of its superblock, as the kernel encodes it: major << 20 | minor.
    pub dev: u32,
    /// The directory or file of the file system that is its root.
    pub root: PathBuf,
    /// Whether that has been unlinked.
    pub deleted: bool,
    /// Where it is mounted, seen from the root of the namespace.
    pub mountpoint: PathBuf,
    /// `MS_*` flags of the mount itself, `MS_UNBINDABLE` included.
    pub flags: u64,
    /// Other options of the mount itself, such as `idmapped`.
    pub unknown: Vec<String>,
    /// The peer group that it shares events with.
    pub shared: Option<u32>,
    /// The peer group that it receives events from.
    pub master: Option<u32>,
    /// The type of its file system, with a subtype as in `fuse.sshfs`.
    pub fs: String,
    /// What the images know that type as.
    pub ty: FsType,
    /// The source given when it was mounted.
    pub source: OsString,
    /// `MS_*` flags of the superblock.
    pub sb_flags: u64,
    /// Other options of the superblock, separated by commas.
    pub options: OsString,
    /// Set where the mount belongs to the outside.
    pub external: Option<External>,
    /// Set where its peer group has members outside that are to stay in it.
    pub outside_peers: bool,
}

/// What is known about a mount that comes from outside of the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum External {
    /// The caller of the restore names the source under this key.
    Key(String),
    /// It was found at this path of the host.
    Auto(PathBuf),
    /// The caller of the restore names the block device under this key.
    Device(String),
}

/// A line that is not as documented.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct Malformed {
    /// Its number, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// Parses the file.
///
/// # Errors
/// The first line that is not as documented.
pub fn parse(text: &[u8]) -> Result<Vec<Mount>, Malformed> {
    text.split(|&b| b == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
        .map(|(i, line)| parse_line(line).map_err(|what| Malformed { line: i + 1, what }))
        .collect()
}

/// ```text
/// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
/// ```
///
/// Fields are separated by one space, so that an empty source stands between two.
fn parse_line(line: &[u8]) -> Result<Mount, &'static str> {
    let mut fields = line.split(|&b| b == b' ');
    let mut next = || fields.next().ok_or("too few fields");
    let mut mount = Mount {
        id: number(next()?).ok_or("no mount id")?,
        parent: number(next()?).ok_or("no parent id")?,
        dev: device(next()?).ok_or("no device number")?,
        ..Mount::default()
    };
    let root = unescape(next()?);
    let live = root.strip_suffix(b"//deleted");
    mount.deleted = live.is_some();
    mount.root = path(live.unwrap_or(&root));
    mount.mountpoint = path(&unescape(next()?));
    (mount.flags, mount.unknown) = mount_flags(next()?);
    loop {
        match next()? {
            b"-" => break,
            b"unbindable" => mount.flags |= libc::MS_UNBINDABLE,
            tag => propagation(&mut mount, tag)?,
        }
    }
    mount.fs = String::from_utf8_lossy(&unescape(next()?)).into_owned();
    mount.ty = fs::by_name(&mount.fs);
    mount.source = OsString::from_vec(unescape(next()?));
    let options = unescape(next()?);
    (mount.sb_flags, mount.options) = take_flags(OsStr::from_bytes(&options));
    Ok(mount)
}

fn propagation(mount: &mut Mount, tag: &[u8]) -> Result<(), &'static str> {
    let group = |digits| number(digits).map(Some).ok_or("a peer group is no number");
    if let Some(id) = tag.strip_prefix(b"shared:") {
        mount.shared = group(id)?;
    } else if let Some(id) = tag.strip_prefix(b"master:") {
        mount.master = group(id)?;
    }
    // propagate_from: follows from the masters. New tags are to be ignored.
    Ok(())
}

/// The kernel never shows `strictatime`: it is the absence of the other two.
fn mount_flags(text: &[u8]) -> (u64, Vec<String>) {
    let (mut flags, mut unknown) = (0, Vec::new());
    for option in split_options(OsStr::from_bytes(text)) {
        match option.as_bytes() {
            b"rw" => {}
            b"ro" => flags |= libc::MS_RDONLY,
            b"nosuid" => flags |= libc::MS_NOSUID,
            b"nodev" => flags |= libc::MS_NODEV,
            b"noexec" => flags |= libc::MS_NOEXEC,
            b"noatime" => flags |= libc::MS_NOATIME,
            b"nodiratime" => flags |= libc::MS_NODIRATIME,
            b"relatime" => flags |= libc::MS_RELATIME,
            b"nosymfollow" => flags |= fs::MS_NOSYMFOLLOW,
            other => unknown.push(String::from_utf8_lossy(other).into_owned()),
        }
    }
    if flags & (libc::MS_RELATIME | libc::MS_NOATIME) == 0 {
        flags |= libc::MS_STRICTATIME;
    }
    (flags, unknown)
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn device(text: &[u8]) -> Option<u32> {
    let at = text.iter().position(|&b| b == b':')?;
    let (major, minor) = (number(&text[..at])?, number(&text[at + 1..])?);
    (major < 1 << 12 && minor < 1 << 20).then_some(major << 20 | minor)
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// Undoes the kernel's escapes: a backslash and three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(line: &str) -> Mount {
        parse(line.as_bytes()).unwrap().remove(0)
    }

    #[test]
    fn a_line_of_the_manual_page() {
        let mount =
            one("36 35 98:3 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n");
        assert_eq!((mount.id, mount.parent, mount.dev), (36, 35, 98 << 20 | 3));
        assert_eq!(mount.root.to_str(), Some("/mnt1"));
        assert_eq!(mount.mountpoint.to_str(), Some("/mnt2"));
        assert_eq!(mount.flags, libc::MS_NOATIME);
        assert_eq!((mount.shared, mount.master), (None, Some(1)));
        assert_eq!((mount.fs.as_str(), mount.sb_flags), ("ext3", 0));
        assert_eq!(mount.options, "errors=continue");
    }

    #[test]
    fn blanks_backslashes_and_an_empty_source() {
        let mount = one(
            r"1 2 0:4 /a\040b//deleted /c\011\012\134d ro,idmapped shared:7 master:3 propagate_from:2 - tmpfs  ro,sync,size=4k",
        );
        assert_eq!(mount.root.to_str(), Some("/a b"));
        assert!(mount.deleted);
        assert_eq!(mount.mountpoint.to_str(), Some("/c\t\n\\d"));
        assert_eq!(mount.unknown, ["idmapped"]);
        assert_eq!(mount.flags, libc::MS_RDONLY | libc::MS_STRICTATIME);
        assert_eq!((mount.shared, mount.master), (Some(7), Some(3)));
        assert_eq!(mount.source, "");
        assert_eq!(mount.sb_flags, libc::MS_RDONLY | libc::MS_SYNCHRONOUS);
        assert_eq!(mount.options, "size=4k");
    }

    #[test]
    fn this_machine() {
        let text = std::fs::read("/proc/self/mountinfo").unwrap();
        assert!(parse(&text).unwrap().iter().any(|m| m.mountpoint.to_str() == Some("/")));
    }

    #[test]
    fn nonsense_is_an_error() {
        for line in [
            "x",
            "1 2 3 / / rw - a b c",
            "1 2 0:1 / / rw a b c",
            "1 2 0:1 / / rw shared:x - a b c",
            "1 2 4096:1 / / rw - a b c",
            "1 2 0:1 / / rw - a b",
        ] {
            assert!(parse(line.as_bytes()).is_err(), "{line}");
        }
        assert_eq!(parse(b"1 2 0:1 / / rw - a b c\nx").unwrap_err().line, 2);
    }

    fn escape(bytes: &[u8]) -> Vec<u8> {
        bytes
            .iter()
            .flat_map(|&b| match b {
                b' ' | b'\t' | b'\n' | b'\\' => format!("\\{b:03o}").into_bytes(),
                _ => vec![b],
            })
            .collect()
    }

    proptest! {
        #[test]
        fn any_path_is_read_back(bytes in proptest::collection::vec(1u8.., 1..40)) {
            prop_assert_eq!(unescape(&escape(&bytes)), bytes);
        }

        #[test]
        fn any_text_is_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
