//! The form of images that CRIU 4.2 takes, where it takes one form alone: each rule is a line of what was
//! found when images were carried between the two (docs/image-format.md, "Where Torpor's images are not those of CRIU 4.2").

use anyhow::{Context, Result, ensure};
use torpor_images::proto::{
    CgroupEntry, CoreEntry, EventfdFileEntry, FdTypes, FdinfoEntry, FileEntry, FileLockEntry,
    GhostFileEntry, MemfdInodeEntry, MmEntry, TtyInfoEntry,
};
use torpor_images::{ImageDir, Kind, kind};

/// Words of an auxiliary vector that it has room for.
const AUXV_WORDS: usize = 44;
/// Bits of `vma_entry.status`: a regular mapping, the kernel's data for the vDSO, private
/// anonymous memory, a shared mapping of a file, one of a memfd, the ring of an AIO context.
const REGULAR: u32 = 1;
const VVAR: u32 = 1 << 12;
const ANON_PRIVATE: u32 = 1 << 9;
const FILE_SHARED: u32 = 1 << 7;
const MEMFD: u32 = 1 << 14;
const AIO_RING: u32 = 1 << 13;
/// Images that are there only with something in them.
const NEVER_EMPTY: [Kind; 5] =
    [kind::TTY_INFO, kind::FIFO_DATA, kind::PIPES_DATA, kind::MEMFD_INODE, kind::REMAP_FPATH];

/// Checks a checkpoint of Torpor's, of tasks in namespaces of this process.
///
/// # Errors
/// The rule that it breaks; damaged images.
pub fn check(dir: &ImageDir) -> Result<()> {
    images(dir)?;
    for id in dir.ids(kind::CORE)? {
        core(&dir.read_one(kind::CORE, id)?).with_context(|| format!("core-{id}"))?;
    }
    let files: Vec<FileEntry> = dir.read_all_or_empty(kind::FILES, 0)?;
    for id in dir.ids(kind::MM)? {
        mappings(&dir.read_one(kind::MM, id)?, &files).with_context(|| format!("mm-{id}"))?;
    }
    files.iter().try_for_each(|entry| file(entry).with_context(|| format!("file {}", entry.id)))?;
    cgroups(dir)?;
    ghosts(dir)
}

/// Which images there are, and what stands in those of the whole tree.
fn images(dir: &ImageDir) -> Result<()> {
    let inventory = dir.inventory()?;
    ensure!(inventory.lsmtype.is_some(), "inventory: no lsmtype");
    ensure!(inventory.network_lock_method.is_some(), "inventory: no network_lock_method");
    ensure!(inventory.plugins_entry.is_some(), "inventory: no plugins_entry");
    ensure!(dir.has(kind::SECCOMP, 0)?, "no seccomp.img");
    ensure!(!dir.has(kind::CPUINFO, 0)?, "a cpuinfo.img that nobody asked for");
    for kind in NEVER_EMPTY.into_iter().filter(|kind| dir.has(*kind, 0).unwrap_or(true)) {
        let mut reader = dir.reader(kind, 0)?.context("gone")?;
        ensure!(reader.next_bytes()?.is_some(), "{} is empty", kind.file_name(0));
    }
    for id in dir.ids(kind::FDINFO)? {
        let fds: Vec<FdinfoEntry> = dir.read_all(kind::FDINFO, id)?;
        ensure!(!fds.is_empty(), "fdinfo-{id} is empty");
    }
    for lock in dir.read_all_or_empty::<FileLockEntry>(kind::FILE_LOCKS, 0)? {
        // POSIX, flock(2), of an open file description, a lease.
        ensure!([1, 2, 4, 8].contains(&lock.flag), "a lock of kind {}", lock.flag);
    }
    for inode in dir.read_all_or_empty::<MemfdInodeEntry>(kind::MEMFD_INODE, 0)? {
        let mode = inode.mode.unwrap_or_default();
        ensure!(mode & libc::S_IFMT == libc::S_IFREG, "memfd: mode {mode:o} has no type");
    }
    for tty in dir.read_all_or_empty::<TtyInfoEntry>(kind::TTY_INFO, 0)? {
        let all = [tty.termios.as_ref(), tty.termios_locked.as_ref()];
        let speeds = all.into_iter().flatten().all(|t| (t.c_ispeed, t.c_ospeed) == (0, 0));
        ensure!(speeds, "a terminal with speeds");
    }
    Ok(())
}

/// What each thread has.
fn core(core: &CoreEntry) -> Result<()> {
    ensure!(core.tc.as_ref().is_none_or(|tc| tc.cg_set.is_none()), "a cgroup set in tc");
    // Zombies have none.
    if let Some(thread) = &core.thread_core {
        ensure!(thread.cg_set.is_some(), "no cgroup set of the thread");
    }
    let Some(info) = &core.thread_info else { return Ok(()) };
    ensure!(info.tls.len() == 3, "{} entries of tls", info.tls.len());
    let actions = core.tc.iter().flat_map(|tc| &tc.sigactions);
    let all = actions.into_iter().all(|action| action.compat_sigaction.is_some());
    ensure!(all, "a signal action without compat_sigaction");
    Ok(())
}

fn mappings(mm: &MmEntry, files: &[FileEntry]) -> Result<()> {
    ensure!(mm.mm_saved_auxv.len() <= AUXV_WORDS, "{} words of auxv", mm.mm_saved_auxv.len());
    ensure!(mm.thp_disabled.is_some(), "no thp_disabled");
    let data: Vec<_> = mm.vmas.iter().filter(|vma| vma.status & VVAR != 0).collect();
    ensure!(data.len() <= 1, "the data of the vDSO is {} areas", data.len());
    let right = data.iter().all(|vma| vma.status == REGULAR | VVAR | ANON_PRIVATE);
    ensure!(right, "the data of the vDSO has another status");
    for vma in mm.vmas.iter().filter(|vma| vma.status & AIO_RING != 0) {
        let wanted = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
        let kind = (libc::MAP_TYPE | libc::MAP_ANONYMOUS).cast_unsigned();
        ensure!(vma.flags & kind == wanted, "an AIO ring with the flags {:#x}", vma.flags);
        let described = mm.aios.iter().find(|context| context.id == vma.start);
        let len = described.map_or(vma.end - vma.start, |context| u64::from(context.ring_len));
        ensure!(len == vma.end - vma.start, "an AIO context of {len} bytes in another area");
    }
    for vma in mm.vmas.iter().filter(|vma| vma.status & MEMFD != 0) {
        ensure!(vma.status & FILE_SHARED == 0 || vma.status & REGULAR != 0, "a memfd's status");
        let known = files.iter().any(|file| u64::from(file.id) == vma.shmid);
        ensure!(known, "a mapping of memfd {}, which files.img lacks", vma.shmid);
    }
    Ok(())
}

fn file(entry: &FileEntry) -> Result<()> {
    if let Some(socket) = &entry.nlsk {
        let empty = socket.groups.iter().skip(1).any(|word| *word == 0);
        ensure!(!empty, "a second word of netlink groups that is 0");
    }
    if let Some(pidfd) = &entry.pidfd {
        let access = libc::O_ACCMODE.cast_unsigned();
        ensure!(pidfd.flags & access == 0, "a pidfd with an access mode: {:#o}", pidfd.flags);
    }
    if entry.r#type() == FdTypes::Eventfd {
        let flags = entry.efd.as_ref().map_or(0, |efd: &EventfdFileEntry| efd.flags);
        ensure!(flags & libc::EFD_SEMAPHORE.cast_unsigned() == 0, "EFD_SEMAPHORE as a flag");
    }
    Ok(())
}

/// The dumping program's set is the root's and is not written, and each controller that a set
/// names has an entry.
fn cgroups(dir: &ImageDir) -> Result<()> {
    let Some(groups) = dir.read_opt::<CgroupEntry>(kind::CGROUP, 0)? else { return Ok(()) };
    let root = dir.inventory()?.root_cg_set;
    for set in &groups.sets {
        ensure!(set.id >= 2 && Some(set.id) != root, "set {} is written", set.id);
        for member in &set.ctls {
            let mut all = groups.controllers.iter().flat_map(|entry| &entry.cnames);
            let name = member.name.as_str();
            ensure!(all.any(|known| name.contains(known.as_str())), "no controller {name}");
        }
    }
    let threaded = groups.controllers.iter().all(|entry| entry.is_threaded.is_some());
    ensure!(threaded, "a controller without is_threaded");
    Ok(())
}

/// Devices of ghosts are as the kernel encodes them: one of those that are mounted.
fn ghosts(dir: &ImageDir) -> Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let devices: Vec<&str> =
        mounts.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    for id in dir.ids(kind::GHOST_FILE)? {
        let mut reader = dir.reader(kind::GHOST_FILE, id)?.context("gone")?;
        let ghost: GhostFileEntry = reader.next()?.context("an empty ghost")?;
        let dev = ghost.dev.unwrap_or_default();
        let shown = format!("{}:{}", dev >> 20, dev & 0xf_ffff);
        ensure!(devices.contains(&shown.as_str()), "ghost {id} is of device {shown}");
    }
    Ok(())
}
