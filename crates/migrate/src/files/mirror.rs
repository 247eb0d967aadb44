//! The source's side: what the destination has, and what is different here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use torpor_kernel::tree::Tree;

use super::scan::{Id, Scanned, attributes, failed, scan};
use super::{Change, Meta, Name, PIECE, What, path};
use crate::error::{Context, Result};

/// A file that was touched so shortly before it was looked at may be touched again without a trace: times are no finer
/// than the kernel's ticks.
const RACY: Duration = Duration::from_secs(2);

/// What is to be told, in order.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// A change.
    Change(Change),
    /// The bytes of the change before.
    Data(&'a [u8]),
    /// Something was looked at, and nothing is to be told of it: so whoever listens can end a walk in which nothing differs.
    Looked,
}

/// What the destination has under a name.
#[derive(Debug)]
struct KnownEntry {
    id: Id,
    what: What,
    /// When it was touched last; nothing if it has to be looked at again.
    touched: Option<(i64, i64)>,
}

impl KnownEntry {
    /// Whether a file is what this was: an inode that is free again is soon that of something else.
    fn is_like(&self, what: &What) -> bool {
        is_regular(&self.what) && is_regular(what) || self.what == *what
    }
}

fn is_regular(what: &What) -> bool {
    matches!(what, What::Regular { .. })
}

/// What the destination has of a regular file.
#[derive(Debug)]
struct KnownFile {
    /// The name that it was told by.
    name: Name,
    /// The sum of each piece.
    sums: Vec<[u8; 32]>,
}

/// What the destination has of a tree.
#[derive(Debug)]
pub(crate) struct Mirror {
    root: Tree,
    known: BTreeMap<Name, KnownEntry>,
    files: HashMap<Id, KnownFile>,
}

impl Mirror {
    /// A mirror of a directory here, when the destination has an empty one.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub(crate) fn new(root: &Path) -> Result<Self> {
        let root = Tree::at(root).context(|| root.display().to_string())?;
        Ok(Self { root, known: BTreeMap::new(), files: HashMap::new() })
    }

    /// Bytes that would be told of the regular files that there are now, each counted once: pieces that are holes are not.
    ///
    /// # Errors
    /// If the tree has too many files, or one cannot be read (named in the error).
    pub(crate) fn bytes(&self) -> Result<u64> {
        let (mut seen, mut all) = (HashSet::new(), 0);
        for found in scan(&self.root)?.iter().filter(|found| seen.insert(found.id)) {
            all += match found.what {
                What::Regular { len } if found.stored < len => self.pieces(found, len)?,
                What::Regular { len } => len,
                _ => 0,
            };
        }
        Ok(all)
    }

    /// Bytes of the pieces of a file that are not wholly holes.
    fn pieces(&self, found: &Scanned, len: u64) -> Result<u64> {
        let file = self.root.file(path(&found.name), found.id);
        match file.and_then(|file| pieces(&file, len)) {
            Err(errno) if is_gone(errno) => Ok(0),
            bytes => bytes.map_err(|errno| failed(&found.name, errno)),
        }
    }

    /// Tells what is different from what was told before. The times of files that are `mapped` by now say nothing.
    ///
    /// # Errors
    /// If the tree has too many files, or one cannot be read (named in the error); those of `tell`.
    pub(crate) fn tell(
        &mut self,
        mapped: &HashSet<Id>,
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<()> {
        self.tell_at(SystemTime::now(), mapped, tell)
    }

    /// [`Mirror::tell`] at a time.
    pub(super) fn tell_at(
        &mut self,
        now: SystemTime,
        mapped: &HashSet<Id>,
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<()> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let settled = i64::try_from(now.saturating_sub(RACY).as_secs()).unwrap_or(0);
        let says = |found: &Scanned| found.touched.0 < settled && !mapped.contains(&found.id);
        let all = scan(&self.root)?;
        let mut told = HashSet::new();
        for found in &all {
            tell(Step::Looked)?;
            match self.tell_one(found, says(found), &mut told, tell) {
                // The next time tells.
                Err(Failure::Kernel(errno)) if is_gone(errno) => {}
                Err(Failure::Kernel(errno)) => return Err(failed(&found.name, errno)),
                Err(Failure::Told(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        self.forget(&all, tell)
    }

    /// Tells what is not there any more.
    fn forget(
        &mut self,
        all: &[Scanned],
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<()> {
        let there: HashSet<&Name> = all.iter().map(|found| &found.name).collect();
        let gone: Vec<Name> =
            self.known.keys().filter(|name| !there.contains(name)).cloned().collect();
        for name in gone {
            if self.known.contains_key(&name) {
                self.remove(&name);
                tell(Step::Change(Change::Remove { name }))?;
            }
        }
        let ids: HashSet<Id> = all.iter().map(|found| found.id).collect();
        self.files.retain(|id, _| ids.contains(id));
        Ok(())
    }

    fn remove(&mut self, name: &Name) {
        self.known.remove(name);
        // What is below it lies together: a slash comes right before 0.
        let [from, to] = [b"/", b"0"].map(|end| [name, end.as_slice()].concat());
        let below: Vec<Name> = self.known.range(from..to).map(|(known, _)| known.clone()).collect();
        for known in below {
            self.known.remove(&known);
        }
    }

    fn tell_one(
        &mut self,
        found: &Scanned,
        // Whether it cannot change any more without a trace.
        is_settled: bool,
        told: &mut HashSet<Id>,
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<(), Failure> {
        let is_directory = found.what == What::Directory;
        let known = self.known.get(&found.name);
        let stays = known.is_some_and(|known| {
            known.is_like(&found.what) && (is_directory || known.id == found.id)
        });
        let is_same = known.is_some_and(|known| known.touched == Some(found.touched));
        if stays && is_settled && is_same {
            return Ok(());
        }
        let was_directory = known.is_some_and(|known| known.what == What::Directory);
        if !stays && (was_directory || known.is_some() && is_directory) {
            self.remove(&found.name);
            tell(Step::Change(Change::Remove { name: found.name.clone() }))?;
        }
        let old = (!stays).then(|| self.name_of(found)).flatten();
        let is_there = stays || old.is_some();
        let what = found.what.clone();
        if let Some(old) = old {
            tell(Step::Change(Change::Link { name: found.name.clone(), old }))?;
            // It may be gone by now, and has to go there, too.
            let linked = KnownEntry { id: found.id, what: what.clone(), touched: None };
            self.known.insert(found.name.clone(), linked);
        }
        // The tree itself is there from the beginning.
        if !is_there || told.insert(found.id) {
            self.tell_content(found, is_there || found.name.is_empty(), tell)?;
            told.insert(found.id);
        }
        let touched = is_settled.then_some(found.touched);
        self.known.insert(found.name.clone(), KnownEntry { id: found.id, what, touched });
        Ok(())
    }

    /// A name that the destination has of a regular file. Others are made anew.
    fn name_of(&self, found: &Scanned) -> Option<Name> {
        let file = self.files.get(&found.id).filter(|_| is_regular(&found.what))?;
        let is_it = |known: &KnownEntry| known.id == found.id && is_regular(&known.what);
        if self.known.get(&file.name).is_some_and(is_it) {
            return Some(file.name.clone());
        }
        self.known.iter().find(|(_, known)| is_it(known)).map(|(name, _)| name.clone())
    }

    fn tell_content(
        &mut self,
        found: &Scanned,
        is_there: bool,
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<(), Failure> {
        let name = found.name.clone();
        let change = |what: What, meta: Meta| match (is_there, &what) {
            (false, _) => Change::Make { name, what, meta },
            (true, What::Regular { len }) => Change::Update { name, len: Some(*len), meta },
            (true, _) => Change::Update { name, len: None, meta },
        };
        match found.what {
            What::Directory => {
                let directory = self.root.dir(path(&found.name))?;
                let meta = Meta { attributes: attributes(directory)?, ..found.meta.clone() };
                tell(Step::Change(change(What::Directory, meta)))?;
            }
            What::Regular { len } => {
                let file = self.root.file(path(&found.name), found.id)?;
                let meta = Meta { attributes: attributes(&file)?, ..found.meta.clone() };
                tell(Step::Change(change(What::Regular { len }, meta)))?;
                let known = self.files.remove(&found.id).filter(|_| is_there);
                let sums = known.map_or(Vec::new(), |known| known.sums);
                let sums = tell_pieces(&file, (len, found.stored < len), &sums, tell)?;
                self.files.insert(found.id, KnownFile { name: found.name.clone(), sums });
            }
            _ => tell(Step::Change(change(found.what.clone(), found.meta.clone())))?,
        }
        Ok(())
    }
}

/// Whether what was found under a name is gone again, or something else by now.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::XDEV)
}

/// Bytes of the pieces of a file of this length that have data in them.
fn pieces(file: &File, len: u64) -> std::result::Result<u64, Errno> {
    let (mut bytes, mut end) = (0, 0);
    while end < len {
        let data = next_data(file, end)?;
        if data >= len {
            break;
        }
        let start = data - data % PIECE as u64;
        end = seek(file, SeekFrom::Hole(data))?.next_multiple_of(PIECE as u64).min(len);
        bytes += end.saturating_sub(start);
    }
    Ok(bytes)
}

/// Tells the pieces of a file that are different from those with these sums; the destination has zeros beyond. Holes are not
/// read: a file may be longer than any disk, as lists of logins by user are.
fn tell_pieces(
    file: &File,
    (len, has_holes): (u64, bool),
    sums: &[[u8; 32]],
    tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
) -> Result<Vec<[u8; 32]>, Failure> {
    let (mut buffer, mut all) = (vec![0; PIECE], Vec::new());
    let (zeros, mut data) = (sum(&buffer), if has_holes { next_data(file, 0)? } else { 0 });
    for (index, offset) in (0..len).step_by(PIECE).enumerate() {
        if has_holes && data < offset {
            data = next_data(file, offset)?;
        }
        let want = usize::try_from(len - offset).unwrap_or(PIECE).min(PIECE);
        let piece = &mut buffer[..want];
        let is_hole = want == PIECE && data >= offset + PIECE as u64;
        let sum = if is_hole {
            zeros
        } else {
            read_piece(file, piece, offset)?;
            sum(piece)
        };
        let is_same = match sums.get(index) {
            Some(before) => *before == sum,
            None => is_hole || piece.iter().all(|&byte| byte == 0),
        };
        if is_same {
            tell(Step::Looked)?;
        } else {
            if is_hole {
                piece.fill(0);
            }
            tell(Step::Change(Change::Write { offset }))?;
            tell(Step::Data(piece))?;
        }
        all.push(sum);
    }
    Ok(all)
}

fn sum(piece: &[u8]) -> [u8; 32] {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest(&SHA256, piece).as_ref());
    sum
}

/// Where the next byte at or behind `offset` is that is in no hole; behind all files if there is none.
fn next_data(file: &File, offset: u64) -> std::result::Result<u64, Errno> {
    match seek(file, SeekFrom::Data(offset)) {
        Err(Errno::NXIO) => Ok(u64::MAX),
        data => data,
    }
}

fn read_piece(file: &File, piece: &mut [u8], offset: u64) -> std::result::Result<(), Errno> {
    match file.read_exact_at(piece, offset) {
        // It has become shorter, and will be told again.
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => piece.fill(0),
        read => read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
    }
    Ok(())
}

/// Why something was not told.
enum Failure {
    Kernel(Errno),
    Told(crate::error::Error),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Kernel(errno)
    }
}

impl From<crate::error::Error> for Failure {
    fn from(error: crate::error::Error) -> Self {
        Self::Told(error)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    /// What is told of a directory now.
    fn told(mirror: &mut Mirror) -> Vec<Change> {
        let mut all = Vec::new();
        mirror
            .tell(&HashSet::new(), &mut |step| {
                if let Step::Change(change) = step {
                    all.push(change);
                }
                Ok(())
            })
            .unwrap();
        all
    }

    /// An inode that is free again is that of the next file on many file systems. What has it now is not what it was.
    #[test]
    fn what_has_the_inode_of_something_else_is_told_anew() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        symlink("one", at("link")).unwrap();
        fs::write(at("gone"), "content").unwrap();
        let mut mirror = Mirror::new(dir.path()).unwrap();
        told(&mut mirror);
        fs::remove_file(at("link")).unwrap();
        fs::remove_file(at("gone")).unwrap();
        for (name, to) in [("link", "two"), ("new", "three")] {
            symlink(to, at(name)).unwrap();
        }
        let id = |name: &str| {
            let meta = at(name).symlink_metadata().unwrap();
            (meta.dev(), meta.ino())
        };
        // As a file system does it that gives numbers out again.
        mirror.known.get_mut(&b"link"[..]).unwrap().id = id("link");
        let gone = mirror.known.get_mut(&b"gone"[..]).unwrap();
        let file = mirror.files.remove(&gone.id).unwrap();
        gone.id = id("new");
        mirror.files.insert(id("new"), file);
        let made: Vec<(Name, What)> = told(&mut mirror)
            .into_iter()
            .filter_map(|change| match change {
                Change::Make { name, what, .. } => Some((name, what)),
                Change::Update { name, .. } if !name.is_empty() => Some((name, What::Directory)),
                Change::Link { name, .. } => Some((name, What::Directory)),
                _ => None,
            })
            .collect();
        let link = |name: &[u8], to: &[u8]| (name.to_vec(), What::Symlink { to: to.to_vec() });
        assert_eq!(made, [link(b"link", b"two"), link(b"new", b"three")]);
    }

    /// To read all of a long one would take hours.
    #[test]
    fn holes_are_not_read() {
        const LEN: u64 = 1 << 30;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        // Whoever may only write it fails to read.
        let unread = File::options().write(true).open(file.path()).unwrap();
        let mut offsets = Vec::new();
        let mut tell = |step: Step<'_>| {
            if let Step::Change(Change::Write { offset }) = step {
                offsets.push(offset);
            }
            Ok(())
        };
        let Ok(sums) = tell_pieces(&unread, (LEN, true), &[], &mut tell) else {
            panic!("it is read")
        };
        let mut changed = sums.clone();
        changed[7] = [0; 32];
        let Ok(again) = tell_pieces(&unread, (LEN, true), &changed, &mut tell) else {
            panic!("it is read")
        };
        assert_eq!((again == sums, offsets), (true, vec![7 * PIECE as u64]));
        file.as_file().write_all_at(b"x", LEN / 2).unwrap();
        assert!(tell_pieces(&unread, (LEN, true), &sums, &mut |_| Ok(())).is_err());
    }
}
