//! Images as Torpor wrote them before they had CRIU's form: see docs/image-format.md, "Where Torpor's
//! images are not those of CRIU 4.2".

use std::collections::HashSet;
use std::path::Path;

use anyhow::Result;
use torpor_images::proto::{
    CgroupEntry, CoreEntry, FdinfoEntry, FileEntry, FileLockEntry, MemfdInodeEntry, MmEntry,
    VmaEntry,
};
use torpor_images::{ImageDir, kind};

/// Bits of `vma_entry.status`.
const REGULAR: u32 = 1;
const ANON_SHARED: u32 = 1 << 8;
const VVAR: u32 = 1 << 12;
const MEMFD: u32 = 1 << 14;

/// The end of the vDSO's data that was an area of its own.
const CLOCK_PAGES: u64 = 0x2000;

/// Makes of the images in `dir` what they were then.
///
/// # Errors
/// Damaged images; the kernel's.
pub fn make(dir: &Path) -> Result<()> {
    let dir = ImageDir::open(dir)?;
    let mut inventory = dir.inventory()?;
    inventory.network_lock_method = None;
    dir.write_one(kind::INVENTORY, 0, &inventory)?;
    let mut locks: Vec<FileLockEntry> = dir.read_all_or_empty(kind::FILE_LOCKS, 0)?;
    for lock in &mut locks {
        // Of an open file description, and leases.
        lock.flag = match lock.flag {
            4 => 1024,
            8 => 32,
            flag => flag,
        };
    }
    dir.write_unless_empty(kind::FILE_LOCKS, 0, &locks)?;
    groups(&dir)?;
    let files: Vec<FileEntry> = dir.read_all_or_empty(kind::FILES, 0)?;
    let memfds: Vec<MemfdInodeEntry> = dir.read_all_or_empty(kind::MEMFD_INODE, 0)?;
    for id in dir.ids(kind::MM)? {
        let mut mm: MmEntry = dir.read_one(kind::MM, id)?;
        let (data, rest) = mm.vmas.into_iter().partition(|vma| vma.status & VVAR != 0);
        mm.vmas = rest;
        mm.vmas.iter_mut().for_each(|vma| anonymous(vma, &files, &memfds));
        mm.vmas.extend(Vec::into_iter(data).flat_map(parts));
        mm.vmas.sort_by_key(|vma| vma.start);
        dir.write_one(kind::MM, id, &mm)?;
    }
    unmapped(&dir, files, memfds)
}

/// So nothing had it open, unless a task had.
fn unmapped(
    dir: &ImageDir,
    mut files: Vec<FileEntry>,
    mut memfds: Vec<MemfdInodeEntry>,
) -> Result<()> {
    let mut opened = HashSet::new();
    for id in dir.ids(kind::FDINFO)? {
        let fds: Vec<FdinfoEntry> = dir.read_all(kind::FDINFO, id)?;
        opened.extend(fds.into_iter().map(|fd| fd.id));
    }
    let inode = |file: &FileEntry| file.memfd.as_ref().map(|memfd| u64::from(memfd.inode_id));
    let anonymous = memfds.iter().filter(|memfd| memfd.torpor_anonymous());
    let anonymous: HashSet<u64> = anonymous.map(|memfd| memfd.inode_id).collect();
    files.retain(|file| {
        opened.contains(&file.id) || inode(file).is_none_or(|inode| !anonymous.contains(&inode))
    });
    memfds.retain(|memfd| files.iter().any(|file| inode(file) == Some(memfd.inode_id)));
    dir.write_all(kind::FILES, 0, &files)?;
    Ok(dir.write_all(kind::MEMFD_INODE, 0, &memfds)?)
}

/// The set of a process stood with its task, and that of the dumping program among the others.
fn groups(dir: &ImageDir) -> Result<()> {
    for id in dir.ids(kind::CORE)? {
        let mut core: CoreEntry = dir.read_one(kind::CORE, id)?;
        if let (Some(tc), Some(thread)) = (&mut core.tc, &mut core.thread_core) {
            tc.cg_set = thread.cg_set.take();
        }
        dir.write_one(kind::CORE, id, &core)?;
    }
    if let Some(mut groups) = dir.read_opt::<CgroupEntry>(kind::CGROUP, 0)? {
        let own = groups.torpor_own_set.take();
        groups.sets.splice(0..0, own);
        dir.write_one(kind::CGROUP, 0, &groups)?;
    }
    Ok(())
}

/// Shared anonymous memory was no memfd.
fn anonymous(vma: &mut VmaEntry, files: &[FileEntry], memfds: &[MemfdInodeEntry]) {
    let file = files.iter().find(|file| u64::from(file.id) == vma.shmid);
    let inode = file.and_then(|file| file.memfd.as_ref()).map(|memfd| u64::from(memfd.inode_id));
    let memfd = memfds.iter().find(|memfd| Some(memfd.inode_id) == inode);
    if let Some(memfd) = memfd.filter(|m| vma.status & MEMFD != 0 && m.torpor_anonymous()) {
        vma.status = REGULAR | ANON_SHARED;
        vma.flags |= libc::MAP_ANONYMOUS.cast_unsigned();
        (vma.shmid, vma.fdflags) = (memfd.shmid.into(), None);
    }
}

/// The vDSO's data were two areas.
fn parts(vma: VmaEntry) -> [VmaEntry; 2] {
    let middle = vma.end - CLOCK_PAGES;
    [VmaEntry { end: middle, ..vma }, VmaEntry { start: middle, ..vma }]
}
