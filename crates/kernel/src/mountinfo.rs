//! `/proc/PID/mountinfo`: the mounts of a namespace (proc_pid_mountinfo(5)).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::error::{self, Error};
use crate::proc;

/// A mount, as the kernel shows it.
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
    /// Where it is mounted, seen from the root of the reader.
    pub mountpoint: PathBuf,
    /// Options of the mount itself, separated by commas.
    pub options: OsString,
    /// The peer group that it shares events with.
    pub shared: Option<u32>,
    /// The peer group that it receives events from.
    pub master: Option<u32>,
    /// Whether it cannot be mounted elsewhere.
    pub unbindable: bool,
    /// The type of its file system, with a subtype as in `fuse.sshfs`.
    pub fs: String,
    /// The source given when it was mounted.
    pub source: OsString,
    /// Options of the superblock, separated by commas.
    pub super_options: OsString,
    /// Whether one of them has a comma or a backslash in it, which looks like any other here.
    pub ambiguous: bool,
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

/// The mounts of a process's namespace, those that are mounted later behind those that they cover.
///
/// # Errors
/// If the process has ended; if the file is not as documented.
pub fn of(pid: i32) -> error::Result<Vec<Mount>> {
    let malformed = |error: Malformed| Error::invalid("mountinfo", error.to_string());
    parse(&proc::bytes(pid, "mountinfo")?).map_err(malformed)
}

/// The one of these that a path, which is no link, leads into: the innermost; of several at one place, the last.
#[must_use]
pub fn holding<'m>(mounts: &'m [Mount], path: &Path) -> Option<&'m Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.mountpoint));
    above.max_by_key(|mount| mount.mountpoint.components().count())
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
    mount.root = PathBuf::from(OsStr::from_bytes(live.unwrap_or(&root)));
    mount.mountpoint = PathBuf::from(OsString::from_vec(unescape(next()?)));
    mount.options = OsString::from_vec(unescape(next()?));
    loop {
        match next()? {
            b"-" => break,
            b"unbindable" => mount.unbindable = true,
            tag => propagation(&mut mount, tag)?,
        }
    }
    mount.fs = String::from_utf8_lossy(&unescape(next()?)).into_owned();
    mount.source = OsString::from_vec(unescape(next()?));
    let options = next()?;
    mount.super_options = OsString::from_vec(unescape(options));
    mount.ambiguous = [&b"\\054"[..], b"\\134"]
        .iter()
        .any(|escape| options.windows(escape.len()).any(|found| found == *escape));
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

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn device(text: &[u8]) -> Option<u32> {
    let at = text.iter().position(|&b| b == b':')?;
    let (major, minor) = (number(&text[..at])?, number(&text[at + 1..])?);
    (major < 1 << 12 && minor < 1 << 20).then_some(major << 20 | minor)
}

/// Undoes the kernel's escapes of paths: a backslash and three octal digits.
#[must_use]
pub fn unescape(text: &[u8]) -> Vec<u8> {
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
    #![allow(clippy::unwrap_used)]

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
        assert_eq!(mount.options, "rw,noatime");
        assert_eq!((mount.shared, mount.master), (None, Some(1)));
        assert_eq!((mount.fs.as_str(), mount.source.to_str()), ("ext3", Some("/dev/root")));
        assert_eq!(mount.super_options, "rw,errors=continue");
    }

    #[test]
    fn blanks_backslashes_and_an_empty_source() {
        let mount = one(
            r"1 2 0:4 /a\040b//deleted /c\011\012\134d ro,idmapped shared:7 master:3 propagate_from:2 - tmpfs  ro,sync,size=4k",
        );
        assert_eq!(mount.root.to_str(), Some("/a b"));
        assert!(mount.deleted);
        assert_eq!(mount.mountpoint.to_str(), Some("/c\t\n\\d"));
        assert_eq!(mount.options, "ro,idmapped");
        assert_eq!((mount.shared, mount.master), (Some(7), Some(3)));
        assert_eq!(mount.source, "");
        assert_eq!(mount.super_options, "ro,sync,size=4k");
        assert!(!mount.ambiguous);
        assert!(one(r"1 2 0:4 / / rw - overlay none rw,upperdir=/a\054b").ambiguous);
    }

    #[test]
    fn this_machine() {
        let own = std::process::id().cast_signed();
        assert!(of(own).unwrap().iter().any(|m| m.mountpoint.to_str() == Some("/")));
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
