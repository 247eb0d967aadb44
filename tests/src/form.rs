//! The form of images that CRIU 4.2 takes, where it takes one form alone: each rule is a line of what was
//! found when images were carried between the two (docs/image-format.md, "Where Torpor's images are not those of CRIU 4.2").

use std::collections::HashSet;

use anyhow::{Context, Result, bail, ensure};
use torpor_images::proto::{
    CgroupDirEntry, CgroupEntry, CgroupPerms, CoreEntry, EventfdFileEntry, EventpollTfdEntry,
    FdTypes, FdinfoEntry, FileEntry, FileLockEntry, GhostFileEntry, InotifyWdEntry,
    MemfdInodeEntry, MmEntry, RemapFilePathEntry, RemapType, TtyInfoEntry, VmaEntry,
};
use torpor_images::{ImageDir, Kind, kind};

/// Words of an auxiliary vector that it has room for.
const AUXV_WORDS: usize = 44;
/// Bits of `vma_entry.status`: a regular mapping, the kernel's data for the vDSO, private and shared
/// anonymous memory, a segment of System V, a private and a shared mapping of a file, one of a
/// memfd, the ring of an AIO context.
const REGULAR: u32 = 1;
const VVAR: u32 = 1 << 12;
const ANON_PRIVATE: u32 = 1 << 9;
const ANON_SHARED: u32 = 1 << 8;
const SYSVIPC: u32 = 1 << 10;
const FILE_PRIVATE: u32 = 1 << 6;
const FILE_SHARED: u32 = 1 << 7;
const MEMFD: u32 = 1 << 14;
const AIO_RING: u32 = 1 << 13;
/// Images that are there only with something in them.
const NEVER_EMPTY: [Kind; 6] = [
    kind::TTY_INFO,
    kind::TTY_DATA,
    kind::FIFO_DATA,
    kind::PIPES_DATA,
    kind::MEMFD_INODE,
    kind::REMAP_FPATH,
];

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
    let memfds: Vec<MemfdInodeEntry> = dir.read_all_or_empty(kind::MEMFD_INODE, 0)?;
    memfds.iter().try_for_each(|inode| memfd(dir, inode))?;
    for id in dir.ids(kind::MM)? {
        let mm = dir.read_one(kind::MM, id)?;
        mappings(&mm, &files, &memfds).with_context(|| format!("mm-{id}"))?;
    }
    files.iter().try_for_each(|entry| file(entry).with_context(|| format!("file {}", entry.id)))?;
    watches(dir, &files)?;
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

/// A memfd has its pages under the number that it names.
fn memfd(dir: &ImageDir, inode: &MemfdInodeEntry) -> Result<()> {
    let name = String::from_utf8_lossy(&inode.name);
    let mode = inode.mode.unwrap_or_default();
    ensure!(mode & libc::S_IFMT == libc::S_IFREG, "memfd {name}: mode {mode:o} has no type");
    let pages = kind::SHMEM_PAGEMAP.file_name(inode.shmid.into());
    ensure!(dir.has(kind::SHMEM_PAGEMAP, inode.shmid.into())?, "memfd {name} has no {pages}");
    let anonymous = inode.torpor_anonymous();
    ensure!(!anonymous || inode.name == b"/dev/zero", "anonymous memory is named {name}");
    Ok(())
}

fn mappings(mm: &MmEntry, files: &[FileEntry], memfds: &[MemfdInodeEntry]) -> Result<()> {
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
        let status = vma.status;
        ensure!(status == REGULAR | AIO_RING, "an AIO ring with the status {status:#x}");
        let described = mm.aios.iter().find(|context| context.id == vma.start);
        let len = described.map_or(vma.end - vma.start, |context| u64::from(context.ring_len));
        ensure!(len == vma.end - vma.start, "an AIO context of {len} bytes in another area");
    }
    for vma in &mm.vmas {
        memory(vma, files, memfds).with_context(|| format!("area {:x}", vma.start))?;
    }
    Ok(())
}

/// Memory that a memfd is behind, and memory that is shared.
fn memory(vma: &VmaEntry, files: &[FileEntry], memfds: &[MemfdInodeEntry]) -> Result<()> {
    let status = vma.status;
    let plain = status & (ANON_SHARED | SYSVIPC) == ANON_SHARED;
    ensure!(!plain, "shared anonymous memory with the status {status:#x}");
    if status & MEMFD == 0 {
        return Ok(());
    }
    let how = status & (REGULAR | FILE_SHARED | FILE_PRIVATE | ANON_PRIVATE);
    let right = [REGULAR | FILE_SHARED, REGULAR | FILE_PRIVATE].contains(&how);
    ensure!(right, "a memfd's status {status:#x}");
    let anonymous = vma.flags & libc::MAP_ANONYMOUS.cast_unsigned() != 0;
    ensure!(!anonymous, "a memfd's flags {:#x}", vma.flags);
    let file = files.iter().find(|file| u64::from(file.id) == vma.shmid);
    let file = file.and_then(|file| file.memfd.as_ref());
    let file = file.with_context(|| format!("memfd {} is not in files.img", vma.shmid))?;
    let inode = memfds.iter().find(|inode| inode.inode_id == u64::from(file.inode_id));
    let inode = inode.with_context(|| format!("inode {} is not in memfd.img", file.inode_id))?;
    let flags = vma.fdflags.context("a memfd without fdflags")?;
    let writable = vma.prot & libc::PROT_WRITE.cast_unsigned() != 0 || inode.torpor_anonymous();
    if status & FILE_SHARED != 0 && writable {
        ensure!(flags == libc::O_RDWR.cast_unsigned(), "a memfd's fdflags {flags:#o}");
    }
    Ok(())
}

fn file(entry: &FileEntry) -> Result<()> {
    if let Some(socket) = &entry.nlsk {
        let empty = socket.groups.iter().skip(1).any(|word| *word == 0);
        ensure!(!empty, "a second word of netlink groups that is 0");
    }
    if let Some(pidfd) = &entry.pidfd {
        // What pidfd_open(2) takes: PIDFD_NONBLOCK, PIDFD_THREAD.
        let known = (libc::O_NONBLOCK | libc::O_EXCL).cast_unsigned();
        ensure!(pidfd.flags & !known == 0, "a pidfd with the flags {:#o}", pidfd.flags);
    }
    if entry.r#type() == FdTypes::Eventfd {
        let flags = entry.efd.as_ref().map_or(0, |efd: &EventfdFileEntry| efd.flags);
        ensure!(flags & libc::EFD_SEMAPHORE.cast_unsigned() == 0, "EFD_SEMAPHORE as a flag");
    }
    Ok(())
}

/// What epoll sets and inotify descriptors watch.
fn watches(dir: &ImageDir, files: &[FileEntry]) -> Result<()> {
    let tables = dir.ids(kind::FDINFO)?.into_iter();
    let tables = tables.map(|id| Ok(dir.read_all::<FdinfoEntry>(kind::FDINFO, id)?));
    let tables = tables.collect::<Result<Vec<_>>>()?;
    let remaps = dir.read_all_or_empty::<RemapFilePathEntry>(kind::REMAP_FPATH, 0)?;
    for entry in files {
        let what = || format!("file {}", entry.id);
        for watch in entry.epfd.iter().flat_map(|epfd| &epfd.tfd) {
            epoll(watch, files, &tables).with_context(what)?;
        }
        for watch in entry.ify.iter().flat_map(|ify| &ify.wd) {
            inotify(watch, files, &remaps).with_context(what)?;
        }
    }
    Ok(())
}

/// CRIU finds a watched file by the number of its descriptor beside the set, or, if there is none,
/// by device and inode.
fn epoll(
    watch: &EventpollTfdEntry,
    files: &[FileEntry],
    tables: &[Vec<FdinfoEntry>],
) -> Result<()> {
    let number = watch.tfd;
    let (Some(_), Some(inode)) = (watch.dev, watch.inode) else {
        bail!("fd {number} is watched without dev and inode");
    };
    let target = watch.torpor_file_id.context("no torpor_file_id")?;
    let socket = files.iter().find(|file| file.id == target).and_then(|file| file.usk.as_ref());
    let same = socket.is_none_or(|socket| u64::from(socket.ino) == inode);
    ensure!(same, "fd {number} is watched as inode {inode}, which is another's");
    let holds = |fds: &&Vec<FdinfoEntry>, id| fds.iter().any(|fd| fd.id == id);
    let beside = tables.iter().filter(|fds| holds(fds, watch.id) && holds(fds, target));
    let mut at = beside.clone().flatten().filter(|fd| fd.fd == number);
    let named = at.any(|fd| fd.id == target) || beside.count() == 0;
    ensure!(named, "fd {number} is watched, which is not the watched file {target}");
    Ok(())
}

/// CRIU opens the path of a watch, and takes the ghost where there is no path.
fn inotify(
    watch: &InotifyWdEntry,
    files: &[FileEntry],
    remaps: &[RemapFilePathEntry],
) -> Result<()> {
    let id = watch.torpor_file_id.context("no torpor_file_id")?;
    let path = watch.f_handle.path.as_deref().map(String::from_utf8_lossy);
    let is_ghost = |r: &RemapFilePathEntry| r.orig_id == id && r.remap_type() == RemapType::Ghost;
    if remaps.iter().any(is_ghost) {
        ensure!(path.is_none(), "a watched ghost has the path {path:?}");
        return Ok(());
    }
    let file = files.iter().find(|file| file.id == id).and_then(|file| file.reg.as_ref());
    let name = file.map(|file| String::from_utf8_lossy(&file.name));
    ensure!(path.is_some() && path == name, "{name:?} is watched with the path {path:?}");
    Ok(())
}

/// The dumping program's set is the root's and is not written, each controller that a set
/// names has an entry, and each thread is in a set that there is.
fn cgroups(dir: &ImageDir) -> Result<()> {
    let Some(groups) = dir.read_opt::<CgroupEntry>(kind::CGROUP, 0)? else { return Ok(()) };
    let root = dir.inventory()?.root_cg_set;
    for set in &groups.sets {
        ensure!(set.id >= 2 && Some(set.id) != root, "set {} is written", set.id);
        for member in &set.ctls {
            let names: Vec<&str> = member.name.split(',').collect();
            let known = groups.controllers.iter().any(|entry| entry.cnames == names);
            ensure!(known, "no controller {:?}", member.name);
        }
    }
    let known: HashSet<_> = groups.sets.iter().map(|set| Some(set.id)).chain([root]).collect();
    for id in dir.ids(kind::CORE)? {
        let core: CoreEntry = dir.read_one(kind::CORE, id)?;
        let set = core.thread_core.map(|thread| thread.cg_set);
        ensure!(set.is_none_or(|set| known.contains(&set)), "core-{id} is in the set {set:?}");
    }
    for controller in &groups.controllers {
        ensure!(controller.is_threaded.is_some(), "a controller without is_threaded");
        controller.dirs.iter().try_for_each(group)?;
    }
    Ok(())
}

/// The modes of a group and of what it has have their types.
fn group(dir: &CgroupDirEntry) -> Result<()> {
    let name = String::from_utf8_lossy(&dir.dir_name);
    let is = |perms: Option<&CgroupPerms>, wanted| {
        perms.is_some_and(|perms| perms.mode & libc::S_IFMT == wanted)
    };
    ensure!(is(dir.dir_perms.as_ref(), libc::S_IFDIR), "group {name:?}: {:?}", dir.dir_perms);
    for property in &dir.properties {
        let right = is(property.perms.as_ref(), libc::S_IFREG);
        ensure!(right, "{} of group {name:?}: {:?}", property.name, property.perms);
    }
    dir.children.iter().try_for_each(group)
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

#[cfg(test)]
mod tests {
    use torpor_images::proto::{
        CgroupPropEntry, FhEntry, MemfdFileEntry, PidfdEntry, RegFileEntry,
    };

    use super::*;

    #[test]
    fn modes_of_groups_have_types() {
        let perms = |mode| Some(CgroupPerms { mode, ..CgroupPerms::default() });
        let with = |dir, file| {
            let property = CgroupPropEntry { perms: perms(file), ..CgroupPropEntry::default() };
            let properties = vec![property];
            let child =
                CgroupDirEntry { dir_perms: perms(dir), properties, ..CgroupDirEntry::default() };
            let dir_perms = perms(0o40755);
            group(&CgroupDirEntry { dir_perms, children: vec![child], ..CgroupDirEntry::default() })
        };
        with(0o40755, 0o100_644).unwrap();
        with(0o755, 0o100_644).unwrap_err();
        with(0o40755, 0o644).unwrap_err();
    }

    #[test]
    fn memory_of_memfds() {
        let memfd = MemfdFileEntry { id: 5, inode_id: 1, ..MemfdFileEntry::default() };
        let files = [FileEntry { id: 5, memfd: Some(memfd), ..FileEntry::default() }];
        let memfds = [MemfdInodeEntry {
            inode_id: 1,
            torpor_anonymous: Some(true),
            ..MemfdInodeEntry::default()
        }];
        let is_right = |vma: &VmaEntry| memory(vma, &files, &memfds).is_ok();
        let status = REGULAR | FILE_SHARED | MEMFD;
        let good = VmaEntry { status, shmid: 5, fdflags: Some(2), ..VmaEntry::default() };
        assert!(is_right(&good));
        assert!(!is_right(&VmaEntry { shmid: 6, ..good }));
        assert!(!is_right(&VmaEntry { fdflags: Some(0), ..good }));
        assert!(!is_right(&VmaEntry { fdflags: None, ..good }));
        let flags = libc::MAP_ANONYMOUS.cast_unsigned();
        assert!(!is_right(&VmaEntry { flags, ..good }));
        for status in [REGULAR | ANON_SHARED, REGULAR | ANON_SHARED | MEMFD, FILE_SHARED | MEMFD] {
            assert!(!is_right(&VmaEntry { status, ..good }), "{status:#x}");
        }
    }

    #[test]
    fn flags_of_pidfds() {
        let with = |flags| {
            let pidfd = Some(PidfdEntry { flags, ..PidfdEntry::default() });
            file(&FileEntry { pidfd, ..FileEntry::default() }).is_ok()
        };
        assert!([0, 0o4000, 0o200].into_iter().all(with));
        assert!(![1, 2, 0o4002, 0o2_000_000].into_iter().any(with));
    }

    #[test]
    fn files_that_are_watched() {
        let fd = |id, fd| FdinfoEntry { id, fd, ..FdinfoEntry::default() };
        let beside = [vec![fd(1, 3), fd(7, 4), fd(8, 5)], vec![fd(7, 5)]];
        let apart = [vec![fd(1, 3)], vec![fd(7, 4)]];
        let good = EventpollTfdEntry {
            id: 1,
            tfd: 4,
            dev: Some(8),
            inode: Some(9),
            torpor_file_id: Some(7),
            ..EventpollTfdEntry::default()
        };
        epoll(&good, &[], &beside).unwrap();
        epoll(&EventpollTfdEntry { tfd: 6, ..good }, &[], &apart).unwrap();
        epoll(&EventpollTfdEntry { tfd: 5, ..good }, &[], &beside).unwrap_err();
        epoll(&EventpollTfdEntry { dev: None, ..good }, &[], &beside).unwrap_err();
        epoll(&EventpollTfdEntry { inode: None, ..good }, &[], &beside).unwrap_err();

        let reg = RegFileEntry { name: b"/file".to_vec(), ..RegFileEntry::default() };
        let files = [FileEntry { id: 7, reg: Some(reg), ..FileEntry::default() }];
        let remap = RemapFilePathEntry { orig_id: 7, remap_id: 1, ..RemapFilePathEntry::default() };
        let ghost = [RemapFilePathEntry { remap_type: Some(RemapType::Ghost.into()), ..remap }];
        let with = |path: Option<&str>, remaps: &[RemapFilePathEntry]| {
            let path = path.map(|path| path.as_bytes().to_vec());
            let f_handle = FhEntry { path, ..FhEntry::default() };
            let torpor_file_id = Some(7);
            let watch = InotifyWdEntry { f_handle, torpor_file_id, ..InotifyWdEntry::default() };
            inotify(&watch, &files, remaps).is_ok()
        };
        assert!(with(Some("/file"), &[]) && with(None, &ghost));
        assert!(!with(None, &[]) && !with(Some("/other"), &[]) && !with(Some("/file"), &ghost));
    }
}
