//! Files of a container that Podman unpacks as root, and those that it removes.
//!
//! Podman follows links on the way to a file, also those that lead out of the container. So each directory on the way to
//! one must be a directory: by what was unpacked before, or in the image. What Podman gets is written anew by what was
//! read here, so that it reads nothing else.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::path::{Component, Path, PathBuf};

use tar::{Builder, Entry, EntryType, Header};
use torpor_store::each_entry;

use super::archive::{REMOVED, wrong};
use crate::error::{Context, Error, Result};

/// What there may be in an archive.
const KINDS: [EntryType; 7] = [
    EntryType::Regular,
    EntryType::Link,
    EntryType::Symlink,
    EntryType::Char,
    EntryType::Block,
    EntryType::Directory,
    EntryType::Fifo,
];
/// Headers of a file that say nothing of where it is.
const EXTRAS: [&str; 7] = ["mtime", "atime", "ctime", "uid", "gid", "uname", "gname"];
/// How those begin that hold extended attributes.
const ATTRIBUTE: &str = "SCHILY.xattr.";
/// Headers that the reader has heeded already.
const HEEDED: [&str; 3] = ["path", "linkpath", "size"];
/// Bytes of the names of all that archives make in a tree, which are in memory.
const MAX_NAMES: usize = 256 << 20;

/// A tree of files, and what archives make in it.
#[derive(Debug)]
pub(super) struct Changes<'a> {
    /// What the archives are about.
    what: &'a str,
    /// The tree that is there before; without one, it is empty.
    base: Option<&'a Path>,
    /// What was made, and whether it is a directory.
    made: BTreeMap<PathBuf, bool>,
    /// Bytes of the names of that.
    names: usize,
}

impl<'a> Changes<'a> {
    pub(super) fn new(what: &'a str, base: Option<&'a Path>) -> Self {
        Self { what, base, made: BTreeMap::new(), names: 0 }
    }

    /// Writes the archive `from` to `to`.
    ///
    /// # Errors
    /// If it holds what could be unpacked outside of the tree, or is no archive; the disk's.
    pub(super) fn copy(&mut self, from: impl Read, to: impl Write) -> Result<()> {
        let what = self.what.to_owned();
        let mut adapted = Builder::new(to);
        let failed = |source| Error::Io { what: what.clone(), source };
        each_entry(from, failed, |entry| self.entry(entry, &mut adapted))?;
        adapted.finish().context(|| what)
    }

    fn entry(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        to: &mut Builder<impl Write>,
    ) -> Result<()> {
        let what = || self.what.to_owned();
        let path = self.plain(&entry.path().context(what)?)?;
        let kind = entry.header().entry_type();
        if !KINDS.contains(&kind) || (path.as_os_str().is_empty() && kind != EntryType::Directory) {
            return Err(self.refused(&path, format!("is of the type {kind:?}")));
        }
        self.lead_to(&path)?;
        let target = entry.link_name().context(what)?.map(|target| target.into_owned());
        let target = match (kind, target) {
            (EntryType::Link, Some(target)) => {
                let target = self.plain(&target)?;
                self.lead_to(&target)?;
                Some(target)
            }
            (EntryType::Symlink, target) => target,
            _ => None,
        };
        self.extras(&path, entry, to)?;
        self.names += path.as_os_str().len();
        if self.names > MAX_NAMES {
            return Err(wrong(format!(
                "{}: its names have more than {MAX_NAMES} bytes",
                self.what
            )));
        }
        self.made.insert(path.clone(), kind == EntryType::Directory);
        let path = if path.as_os_str().is_empty() { PathBuf::from(".") } else { path };
        let mut header = self.header(&path, entry.header())?;
        header.set_size(if kind == EntryType::Regular { entry.size() } else { 0 });
        match target {
            Some(target) => to.append_link(&mut header, path, target),
            None if kind == EntryType::Regular => to.append_data(&mut header, path, entry),
            None => to.append_data(&mut header, path, std::io::empty()),
        }
        .context(what)
    }

    /// A header with what was read of one, and nothing else. Podman's reader takes bytes for the beginning of the name that
    /// this one leaves alone, by the format that a header says it has.
    fn header(&self, path: &Path, read: &Header) -> Result<Header> {
        let what = || self.what.to_owned();
        let kind = read.entry_type();
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(read.mode().context(what)?);
        header.set_uid(read.uid().context(what)?);
        header.set_gid(read.gid().context(what)?);
        header.set_mtime(read.mtime().context(what)?);
        if matches!(kind, EntryType::Char | EntryType::Block) {
            let major = read.device_major().context(what)?;
            let (major, minor) = major
                .zip(read.device_minor().context(what)?)
                .ok_or_else(|| self.refused(path, "is a device without a number".to_owned()))?;
            header.set_device_major(major).context(what)?;
            header.set_device_minor(minor).context(what)?;
        }
        Ok(header)
    }

    /// Copies the further headers of an entry.
    fn extras(
        &self,
        path: &Path,
        entry: &mut Entry<'_, impl Read>,
        to: &mut Builder<impl Write>,
    ) -> Result<()> {
        let what = || self.what.to_owned();
        let mut kept = Vec::new();
        for extra in entry.pax_extensions().context(what)?.into_iter().flatten() {
            let extra = extra.context(what)?;
            let key = String::from_utf8_lossy(extra.key_bytes()).into_owned();
            if EXTRAS.contains(&key.as_str()) || key.starts_with(ATTRIBUTE) {
                kept.push((key, extra.value_bytes().to_vec()));
            } else if !HEEDED.contains(&key.as_str()) {
                return Err(self.refused(path, format!("has the header {key:?}")));
            }
        }
        let kept = kept.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
        to.append_pax_extensions(kept).context(what)
    }

    /// Judges the names of files that are removed when all is unpacked.
    ///
    /// # Errors
    /// If one of them leads out of the tree, or is the tree.
    pub(super) fn judge_removed(mut self, names: &[String]) -> Result<()> {
        self.what = REMOVED;
        for name in names {
            let path = self.plain(Path::new(name.strip_prefix('/').unwrap_or(name)))?;
            if path.as_os_str().is_empty() {
                return Err(self.refused(&path, "is all of it".to_owned()));
            }
            self.lead_to(&path)?;
        }
        Ok(())
    }

    /// A path in the tree, without what leads nowhere or up.
    fn plain(&self, path: &Path) -> Result<PathBuf> {
        let mut plain = PathBuf::new();
        for part in path.components() {
            match part {
                Component::Normal(name) if !name.as_encoded_bytes().contains(&0) => {
                    plain.push(name)
                }
                Component::CurDir => {}
                _ => return Err(self.refused(path, "is no plain path".to_owned())),
            }
        }
        Ok(plain)
    }

    /// Whether what leads to a path are directories.
    fn lead_to(&self, path: &Path) -> Result<()> {
        let above: Vec<&Path> = path.ancestors().skip(1).collect();
        for dir in above.into_iter().rev().filter(|dir| !dir.as_os_str().is_empty()) {
            let is_directory = match (self.made.get(dir), self.base) {
                (Some(is_directory), _) => *is_directory,
                (None, None) => false,
                (None, Some(base)) => match base.join(dir).symlink_metadata() {
                    Ok(found) => found.is_dir(),
                    // Podman makes it.
                    Err(error) if error.kind() == ErrorKind::NotFound => true,
                    Err(error) => return Err(error).context(|| dir.display().to_string()),
                },
            };
            if !is_directory {
                return Err(self.refused(path, format!("is below {dir:?}, which is no directory")));
            }
        }
        Ok(())
    }

    fn refused(&self, path: &Path, why: String) -> Error {
        wrong(format!("{}: {path:?} {why}", self.what))
    }
}

/// The names of files that are removed.
///
/// # Errors
/// If the text is no list of names.
pub(super) fn removed(text: &str) -> Result<Vec<String>> {
    let names: Option<Vec<String>> =
        serde_json::from_str(text).map_err(|error| wrong(format!("{REMOVED}: {error}")))?;
    Ok(names.unwrap_or_default())
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::symlink;

    use tar::Archive;

    use super::*;

    /// An archive: names that end in `/` are directories, `a -> b` is a link, `a = b` a hard one.
    pub(crate) fn archive(entries: &[&str]) -> Vec<u8> {
        let mut made = Builder::new(Vec::new());
        for entry in entries {
            let mut header = Header::new_gnu();
            header.set_mode(0o755);
            header.set_uid(0);
            header.set_gid(0);
            header.set_size(0);
            let (name, kind, target) = match (entry.split_once(" -> "), entry.split_once(" = ")) {
                (Some((name, target)), _) => (name, EntryType::Symlink, target),
                (_, Some((name, target))) => (name, EntryType::Link, target),
                _ if entry.ends_with('/') => (*entry, EntryType::Directory, ""),
                _ => (*entry, EntryType::Regular, ""),
            };
            header.set_entry_type(kind);
            // The builder refuses some of these.
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_link_name_literal(target).unwrap();
            header.set_cksum();
            made.append(&header, std::io::empty()).unwrap();
        }
        made.into_inner().unwrap()
    }

    fn copied(base: Option<&Path>, entries: &[&str]) -> Result<Vec<String>> {
        let mut copy = Vec::new();
        Changes::new("rootfs-diff.tar", base).copy(archive(entries).as_slice(), &mut copy)?;
        let mut read = Archive::new(copy.as_slice());
        let names = read.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let link = entry.link_name().unwrap().map(|to| format!(" {}", to.display()));
            format!("{}{}", entry.path().unwrap().display(), link.unwrap_or_default())
        });
        Ok(names.collect())
    }

    #[test]
    fn nothing_is_unpacked_outside_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        symlink("/run", dir.path().join("link")).unwrap();
        let base = Some(dir.path());
        let fine =
            ["./", "etc/a", "d/", "d/l -> /etc", "file", "hard = d/f", "new/deep/x", "link/"];
        let names = copied(base, &[&fine[..], &["link/below"]].concat()).unwrap();
        assert_eq!(names[3..6], ["d/l /etc", "file", "hard d/f"]);
        for hostile in [
            &["../x"][..],
            &["/etc/x"],
            &["d/../../x"],
            &["link/below"],
            &["l -> /etc", "l/passwd"],
            &["l -> /etc", "hard = l/shadow"],
            &["hard = ../../etc/shadow"],
            &["hard = link/x"],
            &["d/", "d -> /etc", "d/x"],
        ] {
            let error = copied(base, hostile).unwrap_err().to_string();
            assert!(error.contains("rootfs-diff.tar: "), "{hostile:?}: {error}");
        }
        // A volume may get what the image has there: all of its directories are in its archive.
        copied(None, &["./", "a/", "a/b"]).unwrap();
        assert!(copied(None, &["a/b"]).is_err());
    }

    /// Podman's reader puts a prefix before the name, in more formats than the one that has it.
    #[test]
    fn nothing_of_a_header_comes_that_was_not_read() {
        const FORMAT: std::ops::Range<usize> = 257..265;
        const PREFIX: std::ops::Range<usize> = 345..500;
        for (format, expected) in
            [(b"ustar\x0000", "d/x"), (b"ustar\0xx", "x"), (b"ustar  \0", "x"), (&[0; 8], "x")]
        {
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Regular);
            header.set_mode(0o4755);
            header.set_uid(7);
            header.set_gid(8);
            header.set_mtime(9);
            header.set_size(3);
            header.set_path("x").unwrap();
            header.as_mut_bytes()[FORMAT].copy_from_slice(format);
            header.as_mut_bytes()[PREFIX.start] = b'd';
            header.set_cksum();
            let mut hostile = archive(&["d/", "d/d -> /etc"]);
            hostile.truncate(1024);
            let mut made = Builder::new(hostile);
            made.append(&header, &b"new"[..]).unwrap();
            let (mut copy, hostile) = (Vec::new(), made.into_inner().unwrap());
            Changes::new("rootfs-diff.tar", None).copy(hostile.as_slice(), &mut copy).unwrap();
            let mut read = Archive::new(copy.as_slice());
            let entry = read.entries().unwrap().nth(2).unwrap().unwrap();
            let header = entry.header();
            assert_eq!(entry.path().unwrap(), Path::new(expected));
            assert_eq!(header.as_bytes()[PREFIX], [0; 155], "{format:?}");
            let numbers = [header.mode().unwrap().into(), header.mtime().unwrap()];
            assert_eq!(numbers, [0o4755, 9]);
            assert_eq!((header.uid().unwrap(), header.gid().unwrap(), entry.size()), (7, 8, 3));
        }
    }

    #[test]
    fn nothing_is_removed_outside_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        symlink("/run", dir.path().join("link")).unwrap();
        let judged = |text: &str| {
            let mut changes = Changes::new("rootfs-diff.tar", Some(dir.path()));
            changes.copy(archive(&["new -> /"]).as_slice(), std::io::sink()).unwrap();
            changes.judge_removed(&removed(text).unwrap())
        };
        judged(r#"["/etc", "/etc/a", "link", "new", "/gone/deep"]"#).unwrap();
        for name in ["../../../../../../etc", "/", ".", "", "/etc/../..", "/link/a", "/new/etc"] {
            let error = judged(&format!("[{name:?}]")).unwrap_err().to_string();
            assert!(error.contains("deleted.files: "), "{name}: {error}");
        }
        assert!(removed("{}").is_err() && removed("[7]").is_err());
    }
}
