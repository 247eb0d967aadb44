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
    is_directory: bool,
    /// When it was touched last; nothing if it has to be looked at again.
    touched: Option<(i64, i64)>,
}

/// What the destination has of a tree.
#[derive(Debug)]
pub(crate) struct Mirror {
    root: Tree,
    known: BTreeMap<Name, KnownEntry>,
    /// Sums of the pieces of each regular file.
    sums: HashMap<Id, Vec<[u8; 32]>>,
}

impl Mirror {
    /// A mirror of a directory here, when the destination has an empty one.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub(crate) fn new(root: &Path) -> Result<Self> {
        let root = Tree::at(root).context(|| root.display().to_string())?;
        Ok(Self { root, known: BTreeMap::new(), sums: HashMap::new() })
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

    /// Tells what is different from what was told before.
    ///
    /// # Errors
    /// If the tree has too many files, or one cannot be read (named in the error); those of `tell`.
    pub(crate) fn tell(&mut self, tell: &mut dyn FnMut(Step<'_>) -> Result<()>) -> Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let settled = i64::try_from(now.saturating_sub(RACY).as_secs()).unwrap_or(0);
        let all = scan(&self.root)?;
        let mut told = HashSet::new();
        for found in &all {
            tell(Step::Looked)?;
            match self.tell_one(found, settled, &mut told, tell) {
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
        self.sums.retain(|id, _| ids.contains(id));
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
        settled: i64,
        told: &mut HashSet<Id>,
        tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<(), Failure> {
        let is_directory = found.what == What::Directory;
        let known = self.known.get(&found.name);
        let stays = known.is_some_and(|known| {
            known.is_directory == is_directory && (is_directory || known.id == found.id)
        });
        if stays && known.is_some_and(|known| known.touched == Some(found.touched)) {
            return Ok(());
        }
        if !stays && known.is_some_and(|known| known.is_directory || is_directory) {
            self.remove(&found.name);
            tell(Step::Change(Change::Remove { name: found.name.clone() }))?;
        }
        let old = (!stays && !is_directory).then(|| self.name_of(found.id)).flatten();
        let is_there = stays || old.is_some();
        if let Some(old) = old {
            tell(Step::Change(Change::Link { name: found.name.clone(), old }))?;
        }
        // The tree itself is there from the beginning.
        if !is_there || told.insert(found.id) {
            self.tell_content(found, is_there || found.name.is_empty(), tell)?;
            told.insert(found.id);
        }
        let touched = (found.touched.0 < settled).then_some(found.touched);
        self.known.insert(found.name.clone(), KnownEntry { id: found.id, is_directory, touched });
        Ok(())
    }

    /// A name that the destination has of a file.
    fn name_of(&self, id: Id) -> Option<Name> {
        // Only regular files have sums: others are made anew.
        self.sums.get(&id)?;
        self.known.iter().find(|(_, known)| known.id == id).map(|(name, _)| name.clone())
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
                let sums = self.sums.remove(&found.id).filter(|_| is_there).unwrap_or_default();
                let sums = tell_pieces(&file, len, &sums, tell)?;
                self.sums.insert(found.id, sums);
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
        let data = match seek(file, SeekFrom::Data(end)) {
            Err(Errno::NXIO) => break,
            data => data?,
        };
        let start = data - data % PIECE as u64;
        end = seek(file, SeekFrom::Hole(data))?.next_multiple_of(PIECE as u64).min(len);
        bytes += end.saturating_sub(start);
    }
    Ok(bytes)
}

/// Tells the pieces of a file that are different from those with these sums; the destination has zeros beyond.
fn tell_pieces(
    file: &File,
    len: u64,
    sums: &[[u8; 32]],
    tell: &mut dyn FnMut(Step<'_>) -> Result<()>,
) -> Result<Vec<[u8; 32]>, Failure> {
    let (mut buffer, mut all) = (vec![0; PIECE], Vec::new());
    for (index, offset) in (0..len).step_by(PIECE).enumerate() {
        let want = usize::try_from(len - offset).unwrap_or(PIECE).min(PIECE);
        let piece = &mut buffer[..want];
        match file.read_exact_at(piece, offset) {
            Ok(()) => {}
            // It has become shorter, and will be told again.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => piece.fill(0),
            Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO).into()),
        }
        let mut sum = [0; 32];
        sum.copy_from_slice(digest(&SHA256, piece).as_ref());
        let is_same = match sums.get(index) {
            Some(before) => *before == sum,
            None => piece.iter().all(|&byte| byte == 0),
        };
        if !is_same {
            tell(Step::Change(Change::Write { offset }))?;
            tell(Step::Data(piece))?;
        } else {
            tell(Step::Looked)?;
        }
        all.push(sum);
    }
    Ok(all)
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
