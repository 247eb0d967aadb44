//! Memfds: files in memory that never had a name in a directory.
//!
//! In the images shared anonymous memory is one, too, named `/dev/zero`: as that it is in CRIU's.
//! A restore makes anonymous memory of it again.
//!
//! The content of one goes into the images of shared memory, under a number that the
//! segments of System V, which are known by their id, cannot have.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use torpor_images::proto::{FdTypes, FileEntry, MemfdFileEntry, MemfdInodeEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::{MemoryFile, MemoryInode};

use super::Found;
use super::description::{
    access, duplicate, inside, open_flags, outside, reopen, set_status_flags,
};
use super::regular::Links;
use super::remap::DELETED;
use super::table::FileTable;
use crate::error::{Context, Error, Result};
use crate::memory::vma::Vma;
use crate::namespace::user::IdMaps;
use crate::restore::object;
use crate::restore::pages::Pages;
use crate::restore::tasks::Task;

/// The file systems that memfds are on.
const TMPFS: i64 = libc::TMPFS_MAGIC;
const HUGETLBFS: i64 = libc::HUGETLBFS_MAGIC;

/// The name that CRIU gives to shared anonymous memory.
const ANONYMOUS: &[u8] = b"/dev/zero";

/// Added to the numbers of memfds in the images of shared memory.
const FIRST_SHMID: u32 = 1 << 31;

/// Whether a file is a memfd. Its inode lies on a mount inside the kernel.
pub(crate) fn is_memfd(found: &Found) -> bool {
    name_of(found).is_some()
        && matches!(found.fs_type, TMPFS | HUGETLBFS)
        && found.stat.st_nlink == 0
}

fn name_of(found: &Found) -> Option<&[u8]> {
    found.link_bytes().strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")
}

/// Whether a descriptor is of shared anonymous memory: somebody has opened the link of a mapping
/// in `/proc/PID/map_files`. Its inode lies on the same mount inside the kernel as a memfd's.
fn is_anonymous_memory(found: &Found) -> Result<bool> {
    if found.link_bytes() != [ANONYMOUS, DELETED].concat() || found.fs_type != TMPFS {
        return Ok(false);
    }
    let what = || "find the device of memfds".to_owned();
    let other = rustix::fs::memfd_create("torpor", MemfdFlags::CLOEXEC).context(what)?;
    Ok(rustix::fs::fstat(&other).context(what)?.st_dev == found.stat.st_dev)
}

/// The inodes that the dump has met.
#[derive(Debug, Default)]
pub(crate) struct Memfds {
    known: HashMap<(u64, u64), u32>,
    entries: Vec<MemfdInodeEntry>,
    unsaved: Vec<(u64, File)>,
}

impl Memfds {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// If the file cannot be asked for its status or seals.
    pub(crate) fn describe(
        &mut self,
        id_maps: &IdMaps,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        if !is_memfd(found) && !is_anonymous_memory(found)? || found.is_path_only() {
            return Ok(None);
        }
        let memfd = self.file_entry(id_maps, found, found.id)?;
        Ok(Some(FileEntry { memfd: Some(memfd), ..found.entry(FdTypes::Memfd) }))
    }

    /// Inodes whose pages are still to be saved, with their numbers as shared memory.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(u64, File)> {
        std::mem::take(&mut self.unsaved)
    }

    /// Writes the image.
    ///
    /// # Errors
    /// If the image cannot be written.
    pub(crate) fn write(&self, images: &ImageDir) -> Result<()> {
        Ok(images.write_unless_empty(kind::MEMFD_INODE, 0, &self.entries)?)
    }

    fn file_entry(&mut self, id_maps: &IdMaps, found: &Found, id: u32) -> Result<MemfdFileEntry> {
        let inode_id = self.inode(id_maps, found, name_of(found))?;
        let pos = u64::try_from(found.info.pos).unwrap_or(0);
        Ok(MemfdFileEntry { id, flags: found.flags(), pos, fown: found.fown, inode_id })
    }

    /// Describes the memfd behind a mapping, or the anonymous memory: its number as a file, and the
    /// flags it must be opened with.
    ///
    /// # Errors
    /// As for descriptors.
    pub(crate) fn describe_mapped(
        &mut self,
        id_maps: &IdMaps,
        table: &mut FileTable,
        links: &mut Links,
        pid: i32,
        vma: &Vma,
    ) -> Result<(u32, u32)> {
        let writable = vma.map.shared && vma.has(b"mw");
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY }.bits();
        let key = (0, vma.map.dev, vma.map.inode, vma.map.name.clone(), 0);
        if let Some(&known) = links.mapped.get(&key) {
            return Ok((known, flags));
        }
        let found = Found::through_link(pid, &vma.map_files_name(), 0)?;
        let id = self.describe_unopened(id_maps, table, &found)?;
        links.mapped.insert(key, id);
        Ok((id, flags))
    }

    /// Describes a memfd that no descriptor refers to: mapped, or executed.
    ///
    /// # Errors
    /// As for descriptors.
    pub(crate) fn describe_unopened(
        &mut self,
        id_maps: &IdMaps,
        table: &mut FileTable,
        found: &Found,
    ) -> Result<u32> {
        let id = table.next_id();
        let memfd = self.file_entry(id_maps, found, id)?;
        table.push(FileEntry {
            id,
            r#type: FdTypes::Memfd.into(),
            memfd: Some(memfd),
            ..FileEntry::default()
        });
        Ok(id)
    }

    /// The number of the inode, whose content is planned to be saved.
    fn inode(&mut self, id_maps: &IdMaps, found: &Found, name: Option<&[u8]>) -> Result<u32> {
        let key = (found.stat.st_dev, found.stat.st_ino);
        if let Some(&known) = self.known.get(&key) {
            return Ok(known);
        }
        let inode_id = u32::try_from(self.known.len() + 1).unwrap_or(0);
        let file = reopen(&found.file, OFlags::RDONLY)?;
        let seals = rustix::fs::fcntl_get_seals(&file)
            .context(|| format!("F_GET_SEALS of {}", found.link.display()))?;
        let (uid, gid) = inside(id_maps, &found.stat);
        let entry = MemfdInodeEntry {
            name: name.unwrap_or(ANONYMOUS).to_vec(),
            uid,
            gid,
            size: found.stat.st_size.cast_unsigned(),
            shmid: FIRST_SHMID | inode_id,
            seals: seals.bits(),
            inode_id: u64::from(inode_id),
            hugetlb_flag: huge_pages(found, &file)?,
            mode: Some(found.stat.st_mode),
            torpor_anonymous: name.is_none().then_some(true),
        };
        self.unsaved.push((u64::from(entry.shmid), File::from(file)));
        self.known.insert(key, inode_id);
        self.entries.push(entry);
        Ok(inode_id)
    }
}

/// The flags of memfd_create(2) that chose the size of its pages.
fn huge_pages(found: &Found, file: &OwnedFd) -> Result<Option<u32>> {
    if found.fs_type != HUGETLBFS {
        return Ok(None);
    }
    let stat = rustix::fs::fstatfs(file).context(|| "fstatfs".to_owned())?;
    let size = u64::try_from(stat.f_bsize).unwrap_or(0);
    let log = size.checked_ilog2().ok_or_else(|| found.refuse("its pages have no size"))?;
    Ok(Some(MemfdFlags::HUGETLB.bits() | log << libc::MFD_HUGE_SHIFT))
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct MemfdRestorer {
    inodes: HashMap<u32, MemoryInode>,
    made: HashMap<u32, OwnedFd>,
    /// Inodes whose first description, the one of memfd_create(2), is in use.
    given: HashSet<u32>,
    /// Files that are no memfds, but shared anonymous memory, by id.
    pub anonymous: HashMap<u32, MemoryInode>,
}

impl MemfdRestorer {
    /// Takes note of what files in memory are descriptions of, and which of it is shared anonymous memory.
    pub(crate) fn load(&mut self, inodes: Vec<MemoryInode>, tasks: &[Task], files: &[&MemoryFile]) {
        self.inodes = inodes.into_iter().map(|inode| (inode.number, inode)).collect();
        for memfd in files {
            let inode = self.inodes.get(&memfd.inode);
            if let Some(inode) = inode.filter(|inode| is_anonymous(tasks, inode, files)) {
                self.anonymous.insert(memfd.file, inode.clone());
            }
        }
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If its inode or pages are not in the images; if the kernel refuses to make it or its content (memory is short, no
    /// huge pages are left), or its seals.
    pub(crate) fn open(
        &mut self,
        images: &ImageDir,
        id_maps: &IdMaps,
        memfd: &MemoryFile,
    ) -> Result<OwnedFd> {
        if !self.made.contains_key(&memfd.inode) {
            let Some(inode) = self.inodes.get(&memfd.inode) else {
                return Err(Error::invalid("memfd.img", format!("no inode {}", memfd.inode)));
            };
            self.made.insert(memfd.inode, make(images, id_maps, inode)?);
        }
        let first = &self.made[&memfd.inode];
        let is_first = access(memfd.flags) == OFlags::RDWR && self.given.insert(memfd.inode);
        // Unlike those that are opened later, it does not count as open for writing:
        // what it refers to can be executed.
        let file = match is_first {
            true => duplicate(first.as_fd())?,
            false => reopen(first, open_flags(memfd.flags))?,
        };
        as_it_was(file, memfd)
    }

    /// When all descriptions are open: seals those that may still be written to through a mapping.
    /// By now the memory of all tasks is mapped: a mapping that is older than the seal may stay
    /// writable.
    ///
    /// # Errors
    /// If the kernel refuses a seal.
    pub(crate) fn connect(&self) -> Result<()> {
        for (id, file) in &self.made {
            let seals = self.inodes.get(id).map_or(SealFlags::empty(), seals);
            if seals.contains(SealFlags::FUTURE_WRITE) {
                add_seals(file, seals)?;
            }
        }
        Ok(())
    }
}

/// Opens a description of shared anonymous memory.
///
/// # Errors
/// If the memory cannot be opened with its flags.
pub(crate) fn open_anonymous(memory: &OwnedFd, memfd: &MemoryFile) -> Result<OwnedFd> {
    as_it_was(reopen(memory, open_flags(memfd.flags))?, memfd)
}

/// Gives a new description its flags and its position.
fn as_it_was(file: OwnedFd, memfd: &MemoryFile) -> Result<OwnedFd> {
    set_status_flags(&file, memfd.flags)?;
    if memfd.position > 0 {
        rustix::fs::seek(&file, SeekFrom::Start(memfd.position))
            .context(|| format!("seek in memfd {}", memfd.file))?;
    }
    Ok(file)
}

/// Whether an inode is of shared anonymous memory. In CRIU's images it looks as a memfd would
/// that a program has given such a name; they do not have that memory open.
fn is_anonymous(tasks: &[Task], inode: &MemoryInode, files: &[&MemoryFile]) -> bool {
    let mut of_inode = files.iter().filter(|memfd| memfd.inode == inode.number);
    let fds = || tasks.iter().flat_map(|task| &task.image.fds);
    let mut is_open = || of_inode.any(|memfd| fds().any(|fd| fd.file == memfd.file));
    inode.anonymous || inode.is_called_anonymous() && !is_open()
}

fn seals(inode: &MemoryInode) -> SealFlags {
    SealFlags::from_bits_retain(inode.seals)
}

/// Makes the inode, with its content.
fn make(images: &ImageDir, id_maps: &IdMaps, inode: &MemoryInode) -> Result<OwnedFd> {
    let what = || format!("memfd {}", String::from_utf8_lossy(&inode.name));
    let huge = MemfdFlags::from_bits_retain(inode.huge.unwrap_or(0));
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
    // Kernels before 6.3 do not know MFD_EXEC, which later ones want to be told.
    let file = match rustix::fs::memfd_create(&*inode.name, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(&*inode.name, flags),
        made => made,
    };
    let file = file.context(what)?;
    rustix::fs::ftruncate(&file, inode.size).context(what)?;
    let pages = Pages::load(images, kind::SHMEM_PAGEMAP, u64::from(inode.pages))?;
    let file = File::from(file);
    object::fill(&pages, &file, 0)?;
    // It may end within a page, and pages were written as a whole.
    rustix::fs::ftruncate(&file, inode.size).context(what)?;
    let (uid, gid) = outside(id_maps, inode.owner.0, inode.owner.1);
    rustix::fs::fchown(&file, uid, gid).context(what)?;
    if let Some(mode) = inode.mode {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o7777)).context(what)?;
    }
    let seals = seals(inode);
    if !seals.contains(SealFlags::FUTURE_WRITE) {
        add_seals(&file, seals)?;
    }
    Ok(file.into())
}

fn add_seals(file: impl AsFd, seals: SealFlags) -> Result<()> {
    if seals.is_empty() {
        return Ok(());
    }
    rustix::fs::fcntl_add_seals(file, seals).context(|| format!("F_ADD_SEALS {seals:?}"))
}

/// Opens a memfd of the images for a mapping, with the flags that the images have for it. In images of CRIU's a file that is mapped only
/// is open for reading, also where the mapping is not.
///
/// # Errors
/// As for descriptors.
pub(crate) fn open_for_mapping(file: BorrowedFd<'_>, flags: Option<u32>) -> Result<OwnedFd> {
    let own = rustix::fs::fcntl_getfl(file).context(|| "F_GETFL".to_owned())?;
    let wanted = flags.map_or(own, OFlags::from_bits_retain);
    if wanted & OFlags::RWMODE == own & OFlags::RWMODE {
        return duplicate(file.as_fd());
    }
    reopen(file, wanted & OFlags::RWMODE)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::file::testing::{World, fdinfo, link};

    fn dump_pages(world: &World, files: &[OwnedFd]) -> Vec<FileEntry> {
        world.dump(files).unwrap()
    }

    #[test]
    fn content_seals_mode_and_descriptions_come_back() {
        let world = World::new();
        let name = "a b (deleted)";
        let file = rustix::fs::memfd_create(name, MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 10 << 20).unwrap();
        let file = File::from(file);
        file.write_all_at(b"data", 5 << 20).unwrap();
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o751)).unwrap();
        rustix::fs::seek(&file, SeekFrom::Start(5 << 20)).unwrap();
        add_seals(&file, SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL).unwrap();
        let files = vec![file.into()];
        let before = (fdinfo(&files[0]), link(&files[0]));
        let entries = dump_pages(&world, &files);
        let file = File::from(world.restore(&entries).unwrap().pop().unwrap());
        assert_eq!((fdinfo(&file), link(&file)), before);
        let stat = rustix::fs::fstat(&file).unwrap();
        assert_eq!((stat.st_size, stat.st_mode & 0o7777), (10 << 20, 0o751));
        assert!(stat.st_blocks < 64);
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap();
        assert_eq!(seals, SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        let mut data = [0; 4];
        rustix::io::read(&file, &mut data).unwrap();
        assert_eq!(&data, b"data");
    }

    #[test]
    fn a_file_ends_within_its_last_page() {
        let world = World::new();
        let files = [5, 4096, 4097].map(|len| {
            let file = rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
            File::from(file.try_clone().unwrap()).write_all_at(&vec![7; len], 0).unwrap();
            file
        });
        let entries = dump_pages(&world, &files);
        let files = world.restore(&entries).unwrap();
        let sizes = files.iter().map(|file| rustix::fs::fstat(file).unwrap().st_size);
        assert_eq!(sizes.collect::<Vec<_>>(), [5, 4096, 4097]);
    }

    #[test]
    fn two_descriptions_of_one_inode() {
        let world = World::new();
        let file = rustix::fs::memfd_create("two", MemfdFlags::CLOEXEC).unwrap();
        let second = reopen(&file, OFlags::RDONLY).unwrap();
        let files = world.round_trip(vec![file, second]);
        rustix::io::write(&files[0], b"seen").unwrap();
        let mut data = [0; 4];
        rustix::io::read(&files[1], &mut data).unwrap();
        assert_eq!(&data, b"seen");
    }
}
