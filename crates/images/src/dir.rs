//! The image files of one checkpoint.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use prost::{Message, Name};
use torpor_seal::Checkpoint;
use torpor_seal::blocks::BlockKey;
use torpor_seal::{header, manifest};
pub use torpor_store::PARENT_LINK;
use torpor_store::{ASIDE, Directory, INVENTORY, NotRegular, Store, check_name};

use crate::error::{Error, Result};
use crate::kind::{self, Kind};
use crate::page_sums::{Label, PageSums};
use crate::parents::{ParentElsewhere, Parents};
use crate::pin::{Pins, Source, is_memory};
use crate::proto::InventoryEntry;
use crate::reader::Reader;
use crate::sealed::Unwrap;
use crate::sums::{Note, Sums};
use crate::writer::Writer;

/// The version of the format that is written here, and by CRIU.
pub const IMAGE_VERSION: u32 = 2;

/// The version of a checkpoint with compressed pages or pages of relatives, its own or of one
/// that it builds on. A program that does not know them must not restore it.
pub const EXTENDED_VERSION: u32 = 3;

/// How many `parent` directories may follow each other.
const MAX_PARENTS: u32 = 4096;
/// The empty file beside images of which pages were taken out (`dedup`, `--auto-dedup`).
const PAGES_GONE: &str = "pages-gone";

/// The image files of one checkpoint, in a [`Store`].
pub struct ImageDir {
    store: Arc<dyn Store>,
    parents: u32,
    pins: Pins,
    /// What its files are, if that is kept.
    sums: Option<Arc<Sums>>,
    /// What its pages files come to, if that is kept.
    page_sums: Option<Arc<PageSums>>,
    /// What its files are sealed with; see the module `sealed`.
    pub(crate) seal: Option<Arc<Checkpoint>>,
    /// What opens its parents.
    pub(crate) unwrap: Option<Arc<Unwrap>>,
    /// Its parents may lack their pages.
    pub(crate) pages_elsewhere: bool,
    /// Files that are there are not replaced.
    keeps_files: bool,
    /// Its parents, and theirs, if they are kept.
    kept: OnceLock<Arc<Parents>>,
}

impl ImageDir {
    /// Opens an existing directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let store = Directory::open(path).map_err(|e| Error::io(path, "open", e))?;
        Ok(Self::of(Arc::new(store)))
    }

    /// Opens a directory, which is made if it is not there (its parent must
    /// be), for its owner only.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let store = Directory::create(path).map_err(|e| Error::io(path, "create", e))?;
        Ok(Self::of(Arc::new(store)))
    }

    /// The images in a store.
    #[must_use]
    pub fn of(store: Arc<dyn Store>) -> Self {
        Self::new(store, 0)
    }

    /// Takes over a descriptor of a directory; `path` is for messages only.
    #[must_use]
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Self::of(Arc::new(Directory::from_fd(fd, path)))
    }

    fn new(store: Arc<dyn Store>, parents: u32) -> Self {
        let pins = Pins::default();
        let (sums, page_sums, seal, unwrap) = (None, None, None, None);
        Self {
            store,
            parents,
            pins,
            sums,
            page_sums,
            seal,
            unwrap,
            pages_elsewhere: false,
            keeps_files: false,
            kept: OnceLock::new(),
        }
    }

    /// The path that the directory was opened by, or the name of what it is else.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.store.path()
    }

    /// Where the images lie.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The directory itself, if they lie in one.
    #[must_use]
    pub fn directory(&self) -> Option<BorrowedFd<'_>> {
        self.store.directory()
    }

    fn failed(&self, name: &str, action: &'static str, error: io::Error) -> Error {
        Error::io(&self.path().join(name), action, error)
    }

    /// The images that this incremental dump builds on, if it is one.
    pub fn parent(&self) -> Result<Option<Self>> {
        if self.parents == MAX_PARENTS {
            let file = self.path().join(PARENT_LINK);
            return Err(Error::TooManyParents { file, limit: MAX_PARENTS });
        }
        let parent = match self.kept.get() {
            Some(kept) => kept.at(self.parents as usize, &self.store),
            None => self.store.parent(),
        };
        let Some(store) = parent.map_err(|e| self.failed(PARENT_LINK, "open", e))? else {
            return Ok(None);
        };
        let mut parent = Self::new(store, self.parents + 1);
        parent.kept = self.kept.clone();
        Ok(Some(self.open_parent(parent)?))
    }

    /// Opens all that these images build on, which are no parent of others, and keeps it: [`ImageDir::parent`] leads to the
    /// same directories from now on, and to no others but such as lie near ([`Store::parent_near`]). Those that
    /// do not are told, the nearest first.
    ///
    /// # Errors
    /// If the kernel does not say where one lies.
    pub fn keep_parents(&self) -> Result<&[ParentElsewhere]> {
        if let Some(kept) = self.kept.get() {
            return Ok(kept.elsewhere());
        }
        let opened = Parents::open(&self.store, MAX_PARENTS as usize);
        let opened = opened.map_err(|e| self.failed(PARENT_LINK, "look at", e))?;
        Ok(self.kept.get_or_init(|| Arc::new(opened)).elsewhere())
    }

    /// Those of the parents kept that do not lie near; none if none are kept.
    #[must_use]
    pub fn parents_elsewhere(&self) -> &[ParentElsewhere] {
        self.kept.get().map_or(&[], |kept| kept.elsewhere())
    }

    /// The images at `path`, relative to these.
    pub fn relative(&self, path: &Path) -> Result<Self> {
        let opened = self.store.relative(path);
        opened.map(Self::of).map_err(|e| Error::io(&self.path().join(path), "open", e))
    }

    /// The images in what is `name` in these, which is made if it is not there.
    pub fn inner(&self, name: &str) -> Result<Self> {
        self.store.inner(name).map(Self::of).map_err(|e| self.failed(name, "create", e))
    }

    /// All has been written, and what is there counts as a checkpoint.
    pub fn complete(&self) -> Result<()> {
        self.store.complete().map_err(|e| Error::io(self.path(), "write", e))
    }

    /// Whether it was opened as the parent of another.
    pub(crate) fn is_parent(&self) -> bool {
        self.parents > 0
    }

    /// Makes this an incremental dump on top of `target`, a path relative to it.
    pub fn set_parent(&self, target: &Path) -> Result<()> {
        self.remove(PARENT_LINK)?;
        self.store.set_parent(target).map_err(|e| self.failed(PARENT_LINK, "create", e))
    }

    /// The names of everything that is there, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        if let Some(known) = self.pins.names() {
            return Ok(known.to_vec());
        }
        let mut names = self.store.names().map_err(|e| Error::io(self.path(), "list", e))?;
        names.sort();
        Ok(names)
    }

    /// The names of the files that keep the memory of tasks, and say where in them it is: they are not
    /// kept by [`ImageDir::start_pinning`].
    ///
    /// # Errors
    /// If the files cannot be listed.
    pub fn memory_names(&self) -> Result<Vec<String>> {
        Ok(self.names()?.into_iter().filter(|name| is_memory(name)).collect())
    }

    /// The ids for which there is a file of `kind`, in ascending order.
    pub fn ids(&self, kind: Kind) -> Result<Vec<u64>> {
        let mut ids: Vec<u64> = self.names()?.iter().filter_map(|name| kind.id_of(name)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// From now on keeps the digest of each file that is written with a [`Writer`].
    pub fn keep_digests(&mut self) {
        self.sums = Some(Arc::default());
    }

    /// From now on keeps sums of the pages files that are written, made with `key`, which the caller
    /// knows by `label`.
    pub fn keep_page_sums(&mut self, label: Label, key: BlockKey) {
        self.page_sums = Some(Arc::new(PageSums::new(label, key)));
    }

    /// The sums of pages files, if they are kept.
    #[must_use]
    pub fn page_sums(&self) -> Option<&Arc<PageSums>> {
        self.page_sums.as_ref()
    }

    /// SHA-256 of a file as it is stored; as it was written, if that was kept, whoever has
    /// changed it since.
    pub fn digest(&self, name: &str) -> Result<[u8; 32]> {
        let sum = match self.sums.as_ref().and_then(|sums| sums.get(name)) {
            Some(sum) => sum,
            None => self.sum_of(name, true)?,
        };
        let (file, reason) = (self.path().join(name), "it has no digest".to_owned());
        sum.sha256.ok_or(Error::Invalid { file, offset: 0, reason })
    }

    /// Whether there is a file of `kind` for `id`.
    pub fn has(&self, kind: Kind, id: u64) -> Result<bool> {
        self.exists(&kind.file_name(id))
    }

    /// The inventory, after a check of its version.
    pub fn inventory(&self) -> Result<InventoryEntry> {
        let inventory: InventoryEntry = match self.read_one(kind::INVENTORY, 0) {
            Err(e) if e.is_missing() && self.exists(ASIDE)? => {
                return Err(Error::Interrupted { dir: self.path().to_owned() });
            }
            read => read?,
        };
        if ![IMAGE_VERSION, EXTENDED_VERSION].contains(&inventory.img_version) {
            return Err(Error::BadVersion {
                file: self.path().join(kind::INVENTORY.file_name(0)),
                found: inventory.img_version,
                expected: EXTENDED_VERSION,
            });
        }
        Ok(inventory)
    }

    /// Removes the inventory, if there is one. A dump writes it last, so that a directory without
    /// one is no checkpoint.
    pub fn remove_inventory(&self) -> Result<()> {
        self.remove(&kind::INVENTORY.file_name(0))
    }

    /// The names of what makes it a checkpoint, and may be removed or moved with it, the inventory
    /// first: without that there is none.
    pub fn own_names(&self) -> Result<Vec<String>> {
        let others = [header::FILE_NAME, manifest::FILE_NAME, PARENT_LINK, PAGES_GONE];
        let mut names = self.names()?;
        names.retain(|name| Kind::of_file(name).is_some() || others.contains(&name.as_str()));
        names.sort_by_key(|name| name != INVENTORY);
        Ok(names)
    }

    /// Notes that pages are about to be taken out of these images: they serve those that build on them, and are no
    /// checkpoint any more. Of sealed ones the tags tell that.
    pub fn note_pages_gone(&self) -> Result<()> {
        if self.exists(manifest::FILE_NAME)? || self.have_pages_gone()? {
            return Ok(());
        }
        self.create_file(PAGES_GONE).map(drop)
    }

    /// Whether pages were taken out of these images.
    pub fn have_pages_gone(&self) -> Result<bool> {
        self.exists(PAGES_GONE)
    }

    /// Writes a file of one entry.
    pub fn write_one<M: Message + Name>(&self, kind: Kind, id: u64, message: &M) -> Result<()> {
        self.write_all(kind, id, [message])
    }

    /// Writes a file of entries.
    pub fn write_all<'m, M: Message + Name + 'm>(
        &self,
        kind: Kind,
        id: u64,
        messages: impl IntoIterator<Item = &'m M>,
    ) -> Result<()> {
        let mut writer = self.writer(kind, id)?;
        for message in messages {
            writer.entry(message)?;
        }
        writer.finish()
    }

    /// Writes a file of entries, but none without entries: not even one that an earlier dump
    /// has left.
    pub fn write_unless_empty<M: Message + Name>(
        &self,
        kind: Kind,
        id: u64,
        messages: &[M],
    ) -> Result<()> {
        match messages {
            [] => self.remove_kind(kind, id),
            some => self.write_all(kind, id, some),
        }
    }

    /// Removes a file that an earlier dump may have left.
    pub fn remove_kind(&self, kind: Kind, id: u64) -> Result<()> {
        self.remove(&kind.file_name(id))
    }

    /// Starts a file of entries and data.
    pub fn writer(&self, kind: Kind, id: u64) -> Result<Writer> {
        let name = kind.file_name(id);
        self.write_to(kind, &name, self.create_file(&name)?)
    }

    /// Starts what is the file `name`, or will be, in `file`.
    fn write_to(&self, kind: Kind, name: &str, file: File) -> Result<Writer> {
        let path = self.path().join(name);
        let note = self.sums.as_ref().map(|sums| Note::new(sums, name));
        match self.seal_of(kind) {
            Some(seal) => Writer::sealed(kind, &path, file, seal, name, note),
            None => Writer::noting(kind, &path, file, note),
        }
    }

    /// Writes a file in the place of the one that is there: as a whole, or not at all.
    ///
    /// # Errors
    /// If it cannot be written, and stay when the machine fails.
    pub fn replace(
        &self,
        kind: Kind,
        id: u64,
        write: impl FnOnce(&mut Writer) -> Result<()>,
    ) -> Result<()> {
        let name = kind.file_name(id);
        let new = format!("{name}.new");
        let file = self.create_file(&new)?;
        let written = (self.write_to(kind, &name, file))
            .and_then(|mut writer| write(&mut writer).and_then(|()| writer.finish()));
        let placed = written.and_then(|()| {
            self.store.replace(&new, &name).map_err(|e| self.failed(&name, "write", e))
        });
        if placed.is_err() {
            // What made it fail is the error to be told.
            let _ = self.remove(&new);
        }
        placed
    }

    /// Reads a file that holds one entry and nothing else.
    pub fn read_one<M: Message + Name + Default>(&self, kind: Kind, id: u64) -> Result<M> {
        let mut reader = self.open_reader(kind, id)?;
        let message = reader.expect()?;
        reader.end()?;
        Ok(message)
    }

    /// Reads a file that holds one entry, if there is such a file.
    pub fn read_opt<M: Message + Name + Default>(&self, kind: Kind, id: u64) -> Result<Option<M>> {
        optional(self.read_one(kind, id))
    }

    /// Reads a file of entries without data between them.
    pub fn read_all<M: Message + Name + Default>(&self, kind: Kind, id: u64) -> Result<Vec<M>> {
        let mut reader = self.open_reader(kind, id)?;
        let mut messages = vec![];
        while let Some(message) = reader.next()? {
            messages.push(message);
        }
        Ok(messages)
    }

    /// Like [`ImageDir::read_all`]; no file is no entries.
    pub fn read_all_or_empty<M: Message + Name + Default>(
        &self,
        kind: Kind,
        id: u64,
    ) -> Result<Vec<M>> {
        optional(self.read_all(kind, id)).map(Option::unwrap_or_default)
    }

    /// Starts to read a file of entries and data, if it is there.
    pub fn reader(&self, kind: Kind, id: u64) -> Result<Option<Reader>> {
        optional(self.open_reader(kind, id))
    }

    fn open_reader(&self, kind: Kind, id: u64) -> Result<Reader> {
        let name = kind.file_name(id);
        let path = self.path().join(&name);
        let (source, len) = self.open_source(&name, &path)?;
        match self.seal_of(kind) {
            Some(seal) => {
                let (source, len) = self.open_records(seal, &name, source)?;
                Reader::new(kind, &path, source, len)
            }
            None => Reader::new(kind, &path, source, len),
        }
    }

    /// Creates a file that is written without a [`Writer`] (readable too), and so
    /// never sealed.
    pub fn raw_file_create(&self, kind: Kind, id: u64) -> Result<File> {
        self.create_file(&kind.file_name(id))
    }

    /// Opens a file that is read without a [`Reader`].
    pub fn raw_file_open(&self, kind: Kind, id: u64) -> Result<File> {
        self.open_file(&kind.file_name(id))
    }

    /// From now on a file that is there already is not replaced by a new one: the writer is
    /// not trusted with what others have written.
    pub fn keep_files(&mut self) {
        self.keeps_files = true;
    }

    /// Creates the file `name`, for its owner only. One that was there is
    /// unlinked, not written to: it may be a link to something else. It is an error after
    /// [`ImageDir::keep_files`].
    pub fn create_file(&self, name: &str) -> Result<File> {
        self.sums.iter().for_each(|sums| sums.forget(name));
        loop {
            match self.store.create(name) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !self.keeps_files => {
                    self.remove(name)?;
                }
                made => return made.map_err(|e| self.failed(name, "create", e)),
            }
        }
    }

    /// Opens a file for writing that [`ImageDir::create_file`] has made.
    pub fn reopen_file(&self, name: &str) -> Result<File> {
        known_name(name)?;
        self.sums.iter().for_each(|sums| sums.forget(name));
        self.store.reopen(name).map_err(|e| self.failed(name, "open", e))
    }

    /// Opens the file `name` for reading. It must be a regular file: links
    /// could make a restore read what its caller may not, fifos could block.
    pub fn open_file(&self, name: &str) -> Result<File> {
        known_name(name)?;
        self.pins.open(name, &self.path().join(name), || self.open_now(name))
    }

    /// The same, to be read from its beginning, without a descriptor where the file is kept in memory; and its size.
    pub(crate) fn open_source(&self, name: &str, path: &Path) -> Result<Source> {
        known_name(name)?;
        self.pins.source(name, path, || self.open_now(name))
    }

    /// From now on each file that is opened stays as it was at the first time, and what
    /// is missing stays missing; but for pages and pagemaps, which can be large.
    pub fn start_pinning(&self) {
        self.pins.start();
    }

    /// Opens all files of entries now, so that nothing but these and their list is looked for from
    /// now on, also after [`ImageDir::stop_pinning`]: whoever reads them need not be able to open any,
    /// and a file that is added later is not there.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn pin_all(&self) -> Result<()> {
        let names = self.names()?;
        let is_meant = |name: &&String| Kind::of_file(name).is_some() && !is_memory(name);
        for name in names.iter().filter(is_meant) {
            let path = self.path().join(name);
            self.pins.source(name, &path, || self.open_now(name)).map(drop)?;
        }
        self.pins.complete(names);
        Ok(())
    }

    /// How many bytes the files have that are kept.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pins.bytes()
    }

    /// Descriptors that the kept files are read through.
    #[must_use]
    pub fn pinned_descriptors(&self) -> Vec<RawFd> {
        self.pins.descriptors()
    }

    /// Files that have not been opened yet are opened as they are then, if they are in the list of
    /// [`ImageDir::pin_all`]; of those that have, `wanted` names the ones that stay as they were.
    pub fn stop_pinning(&self, wanted: impl Fn(&str) -> bool) {
        self.pins.stop(wanted);
    }

    fn open_now(&self, name: &str) -> Result<File> {
        self.store.open(name).map_err(|error| match NotRegular::is(&error) {
            true => Error::NotRegular { file: self.path().join(name) },
            false => self.failed(name, "open", error),
        })
    }

    /// Removes the file `name`, if there is one.
    pub fn remove(&self, name: &str) -> Result<()> {
        known_name(name)?;
        self.sums.iter().for_each(|sums| sums.forget(name));
        match self.store.remove(name) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failed(name, "remove", e)),
            _ => {
                self.seal.iter().for_each(|seal| seal.removed(name));
                Ok(())
            }
        }
    }

    pub(crate) fn exists(&self, name: &str) -> Result<bool> {
        known_name(name)?;
        if let Some(known) = self.pins.has(name) {
            return Ok(known);
        }
        self.store.exists(name).map_err(|e| self.failed(name, "stat", e))
    }
}

impl std::fmt::Debug for ImageDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageDir").field("path", &self.path()).field("seal", &self.seal).finish()
    }
}

fn known_name(name: &str) -> Result<()> {
    check_name(name).map_err(|_| Error::BadName { name: name.to_owned() })
}

fn optional<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}
