//! Packs the content of a tmpfs into an archive, entry by entry, as [`super::unpack`] makes it again, and as tar(1) does.
//!
//! All is read by this process, below the root of the mount that it holds: no program is started that a task could look
//! into. What is read is what root of the tasks' user namespace would see ([`InsideView`]).
//!
//! Entries are in the order of their names, each directory before what is in it: the same content makes the same archive.
//! A name that is packed is known by its path from the root, so that neither descriptors nor the stack limit the depth. A path
//! that the kernel does not take ends the dump: no restore could make the file.

mod inside;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Known;
use std::ffi::{CString, OsStr};
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::vec::IntoIter;

use rustix::fs::{OFlags, readlinkat};
use rustix::io::Errno;
use torpor_kernel::sparse::next_data;
use torpor_kernel::tree::{self, Id};
use torpor_policy::Device;
use torpor_policy::archive::{END, Entry, MAX_CONTENT, Make, Stretch, padding};

use self::inside::InsideView;
use crate::error::{Context, Result};
use crate::namespace::user::IdMaps;

/// Bytes that are read at once.
const CHUNK: usize = 1 << 18;
/// What a block of a file is counted in (stat(2)).
const UNIT: u64 = 512;

/// What others have changed first while it was read, and how; `None` if they have not.
pub(super) type Changed = Option<String>;

/// Packs all below `root`, with ids of the user namespace with these maps. Sockets are left out, as by tar(1): a restore
/// makes those that are in use.
///
/// # Errors
/// If a file cannot be read, by its name; those of `out`.
pub(super) fn pack(root: BorrowedFd<'_>, maps: &IdMaps, out: &mut dyn Write) -> Result<Changed> {
    let packing = Packing {
        root,
        view: InsideView(maps),
        out: Out { to: out, left: MAX_CONTENT },
        path: Vec::new(),
        links: HashMap::new(),
        buffer: vec![0; CHUNK],
        changed: None,
    };
    packing.all()
}

/// What is written to.
struct Out<'a> {
    to: &'a mut dyn Write,
    /// How many bytes there is room for.
    left: u64,
}

impl Out<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let left = self.left.checked_sub(bytes.len() as u64);
        let full = || io::Error::other(format!("no archive has more than {MAX_CONTENT} bytes"));
        self.left = left.ok_or_else(full).context(|| "pack them".to_owned())?;
        self.to.write_all(bytes).context(|| "write the archive".to_owned())
    }
}

struct Packing<'a> {
    root: BorrowedFd<'a>,
    view: InsideView<'a>,
    out: Out<'a>,
    /// What is being packed, by its path from the root.
    path: Vec<u8>,
    /// Files that have further names: the first one, and how many are to come.
    links: HashMap<Id, (Vec<u8>, u64)>,
    buffer: Vec<u8>,
    changed: Changed,
}

/// A directory whose content is being packed.
struct Level {
    /// Bytes of its path.
    path_len: usize,
    /// What it was before it was listed.
    meta: Metadata,
    /// The names in it that are left, in order.
    names: IntoIter<CString>,
}

impl Packing<'_> {
    fn all(mut self) -> Result<Changed> {
        let mut levels: Vec<Level> = self.add()?.into_iter().collect();
        while let Some(level) = levels.last_mut() {
            self.path.truncate(level.path_len);
            if let Some(name) = level.names.next() {
                if !self.path.is_empty() {
                    self.path.push(b'/');
                }
                self.path.extend(name.to_bytes());
                levels.extend(self.add()?);
            } else {
                let meta = &level.meta;
                let now = tree::open(self.root, self.path(), OFlags::PATH);
                let now = now.and_then(|dir| tree::metadata(&dir.into()));
                if !now.is_ok_and(|now| is_same(meta, &now)) {
                    self.has_changed("changed while it was read");
                }
                levels.pop();
            }
        }
        self.out.put(&END)?;
        Ok(self.changed)
    }

    fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.path))
    }

    fn shown(&self) -> String {
        format!("./{}", self.path().display())
    }

    fn what(&self, do_what: &str) -> String {
        format!("{do_what} {}", self.shown())
    }

    fn has_changed(&mut self, how: &str) {
        let shown = self.shown();
        self.changed.get_or_insert_with(|| format!("{shown} {how}"));
    }

    /// Adds what has the path. Returns what is to be packed next if it is a directory.
    fn add(&mut self) -> Result<Option<Level>> {
        let file: File = match tree::open(self.root, self.path(), OFlags::PATH) {
            Err(errno) if tree::is_gone(errno) => {
                self.has_changed("was removed before it was read");
                return Ok(None);
            }
            found => found.context(|| self.what("open"))?.into(),
        };
        let meta = tree::metadata(&file).context(|| self.what("look at"))?;
        let kind = meta.file_type();
        let make = if kind.is_socket() {
            return Ok(None);
        } else if let Some(first) = self.first_name(&meta) {
            Make::Link(first)
        } else if kind.is_dir() {
            return self.add_directory(&file, &meta).map(Some);
        } else if kind.is_file() {
            return self.add_file(&file, &meta).map(|()| None);
        } else if kind.is_symlink() {
            let target = readlinkat(&file, "", Vec::new()).context(|| self.what("read"))?;
            Make::Symlink(target.into_bytes())
        } else if kind.is_fifo() {
            Make::Fifo
        } else {
            let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
            let block = kind.is_block_device();
            Make::Device(Device { block, major: Some(major), minor: Some(minor) })
        };
        self.put_header(&file, &meta, make)?;
        Ok(None)
    }

    /// The name that it is in the archive by already. Notes this one if others are to come.
    fn first_name(&mut self, meta: &Metadata) -> Option<Vec<u8>> {
        if meta.is_dir() || meta.nlink() < 2 {
            return None;
        }
        match self.links.entry(tree::id(meta)) {
            Known::Vacant(place) => {
                place.insert((self.path.clone(), meta.nlink() - 1));
                None
            }
            Known::Occupied(mut known) => {
                let (first, left) = known.get_mut();
                *left -= 1;
                Some(if *left == 0 { known.remove().0 } else { first.clone() })
            }
        }
    }

    fn add_directory(&mut self, dir: &File, meta: &Metadata) -> Result<Level> {
        let dir = self.reopen(dir, meta)?;
        self.put_header(&dir, meta, Make::Directory)?;
        let mut names = tree::names(&dir).context(|| self.what("list"))?;
        names.sort_unstable();
        let (path_len, names) = (self.path.len(), names.into_iter());
        Ok(Level { path_len, meta: meta.clone(), names })
    }

    fn add_file(&mut self, file: &File, meta: &Metadata) -> Result<()> {
        let file = self.reopen(file, meta)?;
        let data = stretches(&file, meta).context(|| self.what("find the holes of"))?;
        let make = Make::File { size: meta.len(), data };
        let entry = self.put_header(&file, meta, make)?;
        let Make::File { data, .. } = &entry.make else { return Ok(()) };
        let mut missing = 0;
        for stretch in data {
            missing += self.copy(&file, *stretch)?;
        }
        self.out.put(padding(entry.data_len()))?;
        let now = tree::metadata(&file).context(|| self.what("look at"))?;
        if missing > 0 {
            self.has_changed(&format!("became {missing} bytes shorter while it was read"));
        } else if !is_same(meta, &now) {
            self.has_changed("changed while it was read");
        }
        Ok(())
    }

    /// Opens what is to be read, without a trace in it.
    fn reopen(&self, file: &File, meta: &Metadata) -> Result<File> {
        self.view.check_readable(meta).context(|| self.what("open"))?;
        tree::reopen(file, OFlags::RDONLY | OFlags::NOATIME).context(|| self.what("open"))
    }

    fn put_header(&mut self, file: &File, meta: &Metadata, make: Make) -> Result<Entry> {
        let (uid, gid) = self.view.owner(meta);
        let (attributes, lists) = match make {
            // What it leads to has them.
            Make::Link(_) => Default::default(),
            _ => {
                let read = self.view.attributes(file, || self.shown());
                read.context(|| self.what("read the attributes of"))?
            }
        };
        let entry = Entry {
            path: self.path.clone(),
            make,
            mode: meta.mode() & 0o7777,
            uid,
            gid,
            modified: (meta.mtime(), u32::try_from(meta.mtime_nsec()).unwrap_or_default()),
            attributes,
            lists,
        };
        let header = entry.header().map_err(io::Error::other).context(|| self.what("pack"))?;
        self.out.put(&header)?;
        Ok(entry)
    }

    /// Copies data. Returns how much of it is not there any more, in whose place there are zeros.
    fn copy(&mut self, file: &File, stretch: Stretch) -> Result<u64> {
        let (mut at, end) = (stretch.at, stretch.at.saturating_add(stretch.len));
        let mut missing = 0;
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let piece = &mut self.buffer[..len];
            let mut read = match file.read_at(piece, at) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => {
                    read.context(|| format!("read ./{}", String::from_utf8_lossy(&self.path)))?
                }
            };
            if read == 0 {
                piece.fill(0);
                read = len;
                missing += len as u64;
            }
            self.out.put(&piece[..read])?;
            at += read as u64;
        }
        Ok(missing)
    }
}

/// Whether it is the same, as it was.
fn is_same(before: &Metadata, now: &Metadata) -> bool {
    let of = |meta: &Metadata| (tree::id(meta), meta.len(), meta.ctime(), meta.ctime_nsec());
    of(before) == of(now)
}

/// Where a file has data. Of one with holes the last stretch is empty, and says to tar(1) where the file ends.
fn stretches(file: &File, meta: &Metadata) -> rustix::io::Result<Vec<Stretch>> {
    let size = meta.len();
    if meta.blocks() >= size.div_ceil(UNIT) {
        return Ok(vec![Stretch { at: 0, len: size }]);
    }
    let (mut found, mut next) = (Vec::new(), 0);
    loop {
        match next_data(file, next, size) {
            Ok(Some((at, len))) if len > 0 => {
                found.push(Stretch { at, len });
                next = at.saturating_add(len);
            }
            // There is no more, or none any more where some has just been found.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error),
        }
    }
    found.push(Stretch { at: size, len: 0 });
    Ok(found)
}

#[cfg(test)]
mod tests;
