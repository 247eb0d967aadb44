//! The checkpoints that a node has: a directory for each, in one for each namespace.

use std::fs::{self, DirBuilder, DirEntry};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::statvfs;
use tar::{Builder, Entry, EntryType, Header};
use torpor_store::{each_entry, each_entry_with_seek};

use super::late::{LIST, LateFile};
use crate::error::{Context, Error, Result};
use crate::message::{LOGS, PARENT, ROUNDS_DIR};
use crate::pod::is_name;

/// The end of the name of a directory that is not complete: no name has one like it.
const PART: &str = "+part";
/// What errors call a checkpoint that comes here.
const STREAM: &str = "a checkpoint from another node";

/// The checkpoints of a node.
#[derive(Debug)]
pub(super) struct Store {
    dir: PathBuf,
}

fn make(dir: &Path) -> Result<()> {
    let made = DirBuilder::new().mode(0o700).recursive(true).create(dir);
    made.context(|| dir.display().to_string())
}

impl Store {
    /// Opens it.
    ///
    /// # Errors
    /// If the directory cannot be made.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        make(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// How many bytes are free where checkpoints are; none if that cannot be told.
    #[must_use]
    pub(super) fn free(&self) -> u64 {
        statvfs(&self.dir).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Where a checkpoint is, if it is here.
    #[must_use]
    pub(super) fn find(&self, namespace: &str, name: &str) -> Option<PathBuf> {
        let dir = self.place(namespace, name).ok()?;
        dir.is_dir().then_some(dir)
    }

    /// Where a checkpoint is until it is complete.
    ///
    /// # Errors
    /// If this is no name of one.
    pub(super) fn part(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        let dir = self.place(namespace, name)?;
        Ok(dir.with_file_name(format!("{name}{PART}")))
    }

    fn place(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        match is_name(namespace) && is_name(name) {
            true => Ok(self.dir.join(namespace).join(name)),
            false => Err(Error::new(format!("{namespace:?}/{name:?} is no name"))),
        }
    }

    /// An empty directory for a checkpoint that is to come.
    ///
    /// # Errors
    /// If what is left of an earlier try cannot be removed, or the directory not be made.
    pub(super) fn begin(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        let dir = self.part(namespace, name)?;
        remove(&dir)?;
        make(&dir)?;
        Ok(dir)
    }

    /// The checkpoint that was begun is complete, or has been before. Returns its size.
    ///
    /// # Errors
    /// If nothing was begun under this name, or its directory cannot be renamed.
    pub(super) fn complete(&self, namespace: &str, name: &str) -> Result<u64> {
        let dir = self.place(namespace, name)?;
        let part = self.part(namespace, name)?;
        if dir.is_dir() && !part.exists() {
            return Ok(size(&dir));
        }
        remove(&dir)?;
        fs::rename(&part, &dir).context(|| part.display().to_string())?;
        Ok(size(&dir))
    }

    /// Removes a checkpoint, complete or not.
    ///
    /// # Errors
    /// If a file of it cannot be removed.
    pub(super) fn remove(&self, namespace: &str, name: &str) -> Result<()> {
        remove(&self.place(namespace, name)?)?;
        remove(&self.part(namespace, name)?)
    }

    /// All that are here, complete or not: namespace and name.
    #[must_use]
    pub(super) fn all(&self) -> Vec<(String, String)> {
        let names = |dir: &Path| -> Vec<String> {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
        };
        let mut found = Vec::new();
        for namespace in names(&self.dir) {
            for name in names(&self.dir.join(&namespace)) {
                let name = name.strip_suffix(PART).unwrap_or(&name).to_owned();
                found.push((namespace.clone(), name));
            }
        }
        found
    }
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(|| dir.display().to_string())
        }
        _ => Ok(()),
    }
}

/// The bytes of all files in a directory.
pub(super) fn size(dir: &Path) -> u64 {
    let mut bytes = 0;
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => todo.push(entry.path()),
                Ok(meta) => bytes += meta.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

/// Writes a checkpoint as one stream: all but the logs of those who have made it, the links of those who restore it
/// here, or have tried to, and the first rounds of its memory, if the other end has some.
///
/// # Errors
/// If it cannot be read, or the other end is gone.
pub(super) fn pack(dir: &Path, had: u32, to: &mut dyn Write) -> std::io::Result<()> {
    pack_without(dir, &mut Without { rounds: had, ..Without::default() }, to)?.finish()
}

/// The same without the memory that was copied last, and a list of what that lacks; without that of the rounds as well, if
/// whoever asks knows that rounds may come late.
///
/// # Errors
/// As [`pack`].
pub(super) fn pack_early(dir: &Path, late_rounds: bool, to: &mut dyn Write) -> std::io::Result<()> {
    let mut without = Without { rounds: 0, pages: Some(Vec::new()), late_rounds };
    let mut archive = pack_without(dir, &mut without, to)?;
    let list = serde_json::to_vec(&without.pages)?;
    let mut header = Header::new_gnu();
    header.set_size(list.len() as u64);
    header.set_mode(0o600);
    archive.append_data(&mut header, LIST, list.as_slice())?;
    archive.finish()
}

/// What is left out of a stream.
#[derive(Default)]
struct Without {
    /// The rounds up to this one.
    rounds: u32,
    /// The files of pages, which are noted here.
    pages: Option<Vec<LateFile>>,
    /// Whether those of rounds are, too.
    late_rounds: bool,
}

fn pack_without<'w>(
    dir: &Path,
    without: &mut Without,
    to: &'w mut dyn Write,
) -> std::io::Result<Builder<&'w mut dyn Write>> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name() != LOGS {
            append(&mut archive, &entry, Path::new(""), without)?;
        }
    }
    Ok(archive)
}

/// Writes one round of the memory of all containers of a checkpoint that is being made.
///
/// # Errors
/// As [`pack`].
pub(super) fn pack_round(dir: &Path, round: u32, to: &mut dyn Write) -> std::io::Result<()> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    for container in fs::read_dir(dir.join(ROUNDS_DIR))? {
        let container = container?;
        let parent = Path::new(ROUNDS_DIR).join(container.file_name());
        for entry in fs::read_dir(container.path())? {
            let entry = entry?;
            if round_of(&parent.join(entry.file_name())) == Some(round) {
                append(&mut archive, &entry, &parent, &mut Without::default())?;
            }
        }
    }
    archive.finish()
}

/// Which round the directory of a checkpoint with this name is, if it is one.
fn round_of(name: &Path) -> Option<u32> {
    match name.iter().collect::<Vec<_>>().as_slice() {
        [rounds, _, round] if *rounds == ROUNDS_DIR => round.to_str()?.parse().ok(),
        _ => None,
    }
}

/// Writes what is in a directory of a checkpoint, and all below it but what is left out.
fn append(
    archive: &mut Builder<&mut dyn Write>,
    entry: &DirEntry,
    parent: &Path,
    without: &mut Without,
) -> std::io::Result<()> {
    let (name, path, kind) = (entry.file_name(), entry.path(), entry.file_type()?);
    if kind.is_symlink() && name == PARENT {
        return Ok(());
    }
    let name = parent.join(name);
    if round_of(&name).is_some_and(|round| round <= without.rounds) {
        return Ok(());
    }
    if kind.is_file()
        && let Some(pages) = &mut without.pages
        && let Some(file) = LateFile::at(&name, entry.metadata()?.len())
        && (without.late_rounds || file.images.round.is_none())
    {
        pages.push(file);
        return Ok(());
    }
    if !kind.is_dir() {
        return archive.append_path_with_name(path, name);
    }
    archive.append_dir(&name, &path)?;
    fs::read_dir(path)?.try_for_each(|entry| append(archive, &entry?, &name, without))
}

/// Reads what [`pack`] has written: plain files in directories, nothing else, and no logs, which this node alone writes.
///
/// # Errors
/// What holds anything else, or leads out of the directory; no place.
pub(super) fn unpack(from: impl Read, dir: &Path) -> Result<()> {
    let mut count = 0;
    each_entry(from, damaged, |entry| {
        count += 1;
        unpack_one(entry, dir)
    })?;
    has_some(count)
}

/// The same without the files of pages, and makes a list of what is lacking, as it is in what [`pack_early`] has written. What is
/// left out is not read.
///
/// # Errors
/// As [`unpack`], and if the list cannot be written.
pub(super) fn unpack_early(from: impl Read + Seek, dir: &Path) -> Result<()> {
    let (mut count, mut pages) = (0, Vec::new());
    each_entry_with_seek(from, damaged, |entry| {
        count += 1;
        match pages_of(entry)? {
            Some(file) => pages.push(file),
            None => unpack_one(entry, dir)?,
        }
        Ok(())
    })?;
    has_some(count)?;
    let list = serde_json::to_vec(&pages).context(|| LIST)?;
    fs::write(dir.join(LIST), list).context(|| LIST)
}

/// The files of pages in what [`pack`] has written, and where each begins in it. They are not read.
///
/// # Errors
/// If it cannot be read, or is something else.
pub(super) fn pages_in(from: impl Read + Seek) -> Result<Vec<(LateFile, u64)>> {
    let mut pages = Vec::new();
    each_entry_with_seek(from, damaged, |entry| {
        let file = pages_of(entry)?;
        pages.extend(file.map(|file| (file, entry.raw_file_position())));
        Ok(())
    })?;
    Ok(pages)
}

/// The file of pages that is next, if it is one.
fn pages_of<R: Read>(entry: &Entry<'_, R>) -> Result<Option<LateFile>> {
    let path = entry.path().context(|| STREAM)?;
    let is_file = entry.header().entry_type() == EntryType::Regular;
    Ok(LateFile::at(&path, entry.size()).filter(|_| is_file))
}

fn unpack_one<R: Read>(entry: &mut Entry<'_, R>, dir: &Path) -> Result<()> {
    let what = || STREAM;
    if !matches!(entry.header().entry_type(), EntryType::Regular | EntryType::Directory) {
        let path = entry.path().map(|p| p.display().to_string()).unwrap_or_default();
        return Err(Error::new(format!("{STREAM}: {path} is no plain file")));
    }
    if is_of_logs(&entry.path().context(what)?) {
        return Err(Error::new(format!("{STREAM} has logs of its own")));
    }
    match entry.unpack_in(dir).context(what)? {
        true => Ok(()),
        false => Err(Error::new(format!("{STREAM} leads out of its directory"))),
    }
}

fn has_some(count: u64) -> Result<()> {
    if count > 0 { Ok(()) } else { Err(Error::new(format!("{STREAM} is empty"))) }
}

fn damaged(error: io::Error) -> Error {
    Error::new(format!("{STREAM}: {error}"))
}

/// Whether a file belongs to the logs of a checkpoint, as tar(1) unpacks it.
fn is_of_logs(path: &Path) -> bool {
    let mut parts = path.components().filter(|part| matches!(part, Component::Normal(_)));
    parts.next().is_some_and(|first| first.as_os_str() == LOGS)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_checkpoint_is_there_when_it_is_complete() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let part = store.begin("a", "web-0").unwrap();
        fs::write(part.join("x"), "12345").unwrap();
        fs::create_dir_all(part.join("containers/main")).unwrap();
        fs::write(part.join("containers/main/y"), "").unwrap();
        assert_eq!(store.find("a", "web-0"), None);
        assert_eq!(store.all(), [("a".to_owned(), "web-0".to_owned())]);
        assert_eq!(store.complete("a", "web-0").unwrap(), 5);
        assert_eq!(store.complete("a", "web-0").unwrap(), 5, "it is told twice");
        let dir = store.find("a", "web-0").unwrap();
        let mut bytes = Vec::new();
        pack(&dir, 0, &mut bytes).unwrap();
        let other = place.path().join("other");
        fs::create_dir(&other).unwrap();
        unpack(bytes.as_slice(), &other).unwrap();
        assert_eq!(fs::read_to_string(other.join("x")).unwrap(), "12345");
        assert!(other.join("containers/main/y").exists());
        store.remove("a", "web-0").unwrap();
        assert_eq!(store.find("a", "web-0"), None);
    }

    #[test]
    fn what_a_restore_has_left_stays_here() {
        let place = tempfile::tempdir().unwrap();
        let [dir, other] = ["dir", "other"].map(|name| place.path().join(name));
        let (images, round) = (Path::new("containers/parent"), Path::new("rounds/parent/2"));
        for below in [images, round] {
            fs::create_dir_all(dir.join(below)).unwrap();
            fs::write(dir.join(below).join("pages"), "12345").unwrap();
            symlink("../1", dir.join(below).join(PARENT)).unwrap();
        }
        fs::create_dir(&other).unwrap();
        let mut bytes = Vec::new();
        pack(&dir, 0, &mut bytes).unwrap();
        unpack(bytes.as_slice(), &other).unwrap();
        for below in [images, round] {
            assert_eq!(fs::read_to_string(other.join(below).join("pages")).unwrap(), "12345");
            assert!(dir.join(below).join(PARENT).is_symlink(), "somebody may be restored from it");
            assert!(!other.join(below).join(PARENT).is_symlink());
        }
        // Nobody who restores makes another link: a checkpoint that holds one is refused.
        symlink("../1", dir.join(images).join("pages-1.img")).unwrap();
        let mut bytes = Vec::new();
        pack(&dir, 0, &mut bytes).unwrap();
        assert!(unpack(bytes.as_slice(), &other).is_err());
    }

    #[test]
    fn what_came_before_does_not_come_again() {
        let place = tempfile::tempdir().unwrap();
        let [dir, other] = ["dir", "other"].map(|name| place.path().join(name));
        fs::create_dir(&other).unwrap();
        let put = |below: &str, text: &str| {
            fs::create_dir_all(dir.join(below)).unwrap();
            fs::write(dir.join(below).join("pages"), text).unwrap();
        };
        let got = |below: &str| fs::read_to_string(other.join(below).join("pages")).ok();
        let images = ["rounds/main/1", "rounds/main/2", "rounds/other/1", "containers/main"];
        images.iter().for_each(|below| put(below, "then"));
        let mut bytes = Vec::new();
        pack_round(&dir, 1, &mut bytes).unwrap();
        unpack(bytes.as_slice(), &other).unwrap();
        let then = || Some("then".to_owned());
        assert_eq!(images.map(got), [then(), None, then(), None]);
        images.iter().for_each(|below| put(below, "now"));
        let mut bytes = Vec::new();
        pack(&dir, 1, &mut bytes).unwrap();
        unpack(bytes.as_slice(), &other).unwrap();
        let now = || Some("now".to_owned());
        assert_eq!(images.map(got), [then(), now(), then(), now()]);
    }

    #[test]
    fn memory_stays_where_it_is_and_the_rest_goes() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("dir");
        let (memory, others) = (
            ["containers/main/pages-1.img", "rounds/main/1/pages-1.img"],
            [
                "containers/main/core-1.img",
                "rounds/main/1/core-1.img",
                "containers/work/core-1.img",
            ],
        );
        for name in memory.into_iter().chain(others) {
            fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
            fs::write(dir.join(name), "12345").unwrap();
        }
        // Whoever does not know that rounds may come late gets them at once.
        for late_rounds in [false, true] {
            let other = place.path().join(format!("other-{late_rounds}"));
            fs::create_dir(&other).unwrap();
            let mut bytes = Vec::new();
            pack_early(&dir, late_rounds, &mut bytes).unwrap();
            unpack(bytes.as_slice(), &other).unwrap();
            assert!(others.iter().all(|name| other.join(name).exists()));
            assert_eq!(memory.map(|name| other.join(name).exists()), [false, !late_rounds]);
            let list: Vec<LateFile> =
                serde_json::from_slice(&fs::read(other.join(LIST)).unwrap()).unwrap();
            let mut rounds: Vec<_> = list.iter().map(|file| file.images.round).collect();
            rounds.sort_unstable();
            assert_eq!(rounds, [None, Some(1)][..1 + usize::from(late_rounds)]);
            assert!(list.iter().all(|file| (file.id, file.len) == (1, 5)));
        }
        // Where any part of a whole one can be read, the same is left out.
        let other = place.path().join("other");
        fs::create_dir(&other).unwrap();
        let mut bytes = Vec::new();
        pack(&dir, 0, &mut bytes).unwrap();
        unpack_early(Cursor::new(&bytes), &other).unwrap();
        assert!(others.iter().all(|name| other.join(name).exists()));
        assert!(!memory.iter().any(|name| other.join(name).exists()));
        let list: Vec<LateFile> =
            serde_json::from_slice(&fs::read(other.join(LIST)).unwrap()).unwrap();
        let pages = pages_in(Cursor::new(&bytes)).unwrap();
        assert!(list.len() == 2 && list.iter().eq(pages.iter().map(|(file, _)| file)));
        for (_, begin) in pages {
            assert_eq!(&bytes[usize::try_from(begin).unwrap()..][..5], b"12345");
        }
    }

    /// Names are in memory as a whole, however long they are.
    #[test]
    fn no_name_fills_the_memory() {
        let place = tempfile::tempdir().unwrap();
        let name = vec![b'x'; 5 << 20];
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(name.len() as u64);
        header.set_cksum();
        let mut archive = Builder::new(Vec::new());
        archive.append(&header, name.as_slice()).unwrap();
        let bytes = archive.into_inner().unwrap();
        let [one, other] = [
            unpack(bytes.as_slice(), place.path()),
            unpack_early(Cursor::new(&bytes), place.path()),
        ];
        for error in [one, other, pages_in(Cursor::new(&bytes)).map(drop)].map(Result::unwrap_err) {
            assert!(error.to_string().contains("is described by more than"), "{error}");
        }
    }

    #[test]
    fn names_do_not_lead_out() {
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        for (namespace, name) in [("..", "x"), ("a", "../x"), ("a/b", "x"), ("", "x")] {
            assert!(store.begin(namespace, name).is_err() && store.find(namespace, name).is_none());
        }
    }

    #[test]
    fn forged_archives_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let archive = |kind: EntryType, name: &str| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(0);
            header.set_mode(0o644);
            let bytes = header.as_gnu_mut().unwrap();
            bytes.name[..name.len()].copy_from_slice(name.as_bytes());
            if kind == EntryType::Symlink {
                bytes.linkname[..4].copy_from_slice(b"/etc");
            }
            header.set_cksum();
            let mut archive = Builder::new(Vec::new());
            archive.append(&header, std::io::empty()).unwrap();
            archive.into_inner().unwrap()
        };
        for bytes in [
            archive(EntryType::Symlink, "x"),
            archive(EntryType::Regular, "../x"),
            archive(EntryType::Char, "null"),
            archive(EntryType::Link, "x"),
            archive(EntryType::Regular, "work/late.json"),
            archive(EntryType::Regular, "./work/late.json"),
            archive(EntryType::Regular, "/work/late.json"),
            archive(EntryType::Directory, "work"),
            Vec::new(),
        ] {
            assert!(unpack(bytes.as_slice(), place.path()).is_err());
            assert!(unpack_early(Cursor::new(bytes), place.path()).is_err());
        }
        assert!(fs::read_dir(place.path()).unwrap().next().is_none());
    }
}
