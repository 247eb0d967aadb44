//! What open files, mappings, locks and clocks refer to besides paths, mounts and namespaces: other open files,
//! terminals, files in memory, network devices, tasks. A number that leads to none of them is an error, whatever the
//! policy says.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;

use torpor_images::kind;
use torpor_images::proto::FileEntry;

use super::checkpoint::{Checkpoint, Task};
use crate::clock_times::ClockTimes;
use crate::error::{Result, invalid};
use crate::fifo::FifoEnd;
use crate::file_lock::{FileLock, LockHolders};
use crate::memory::{AreaKind, MemoryArea};
use crate::memory_file::{MemoryFile, MemoryInode};
use crate::namespace::NsKind;
use crate::plain_file::Pidfd;
use crate::terminal::{Terminal, TerminalFile};
use crate::tun_file::TunFile;
use crate::userfaultfd::Userfaultfd;

/// Checks all of them.
///
/// # Errors
/// The image file, and what refers to nothing; damaged images.
pub(super) fn check(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let image = kind::FILES.file_name(0);
    let known: BTreeSet<u32> = checkpoint.files.iter().map(|entry| entry.id).collect();
    let paths = checkpoint.files.iter().filter(|entry| entry.reg.is_some());
    let paths: BTreeSet<u32> = paths.map(|entry| entry.id).collect();
    let processes = Processes::of(checkpoint);
    for entry in &checkpoint.files {
        let id = entry.id;
        if let Some(other) = watched(entry).find(|other| !known.contains(other)) {
            let reason = format!("file {id} watches file {other}, which files.img lacks");
            return invalid(image, reason);
        }
        let fifo = FifoEnd::of(entry).or_else(|reason| invalid(&*image, reason))?;
        if fifo.is_some_and(|fifo| !paths.contains(&fifo.path)) {
            return invalid(image, format!("fifo {id} has no path"));
        }
        if let Some(pid) = processes.missing(entry) {
            return invalid(image, format!("file {id} is of process {pid}, which is no task"));
        }
        if let Some(tun) = TunFile::of(entry) {
            tun.settings(checkpoint.images)?;
        }
    }
    in_memory(checkpoint)?;
    mappings(checkpoint)?;
    terminals(checkpoint)?;
    locks(checkpoint)?;
    clocks(checkpoint)
}

/// The open files that one watches.
fn watched(entry: &FileEntry) -> impl Iterator<Item = u32> {
    let watches = entry.epfd.iter().flat_map(|set| &set.tfd);
    let inodes = entry.ify.iter().flat_map(|inotify| &inotify.wd);
    let marks = entry.ffy.iter().flat_map(|group| &group.mark);
    let watches = watches.filter_map(|watch| watch.torpor_file_id);
    let inodes = inodes.filter_map(|watch| watch.torpor_file_id);
    watches.chain(inodes).chain(marks.filter_map(|mark| mark.torpor_file_id))
}

/// The tasks of the images, of which there may be as many as there are files that are of them.
struct Processes {
    all: BTreeSet<i64>,
    living: BTreeSet<u32>,
}

impl Processes {
    fn of(checkpoint: &Checkpoint<'_>) -> Self {
        let living = checkpoint.tasks.iter().filter(|task| !task.zombie);
        Processes {
            all: checkpoint.tasks.iter().map(|task| task.pid.into()).collect(),
            living: living.map(|task| task.pid).collect(),
        }
    }

    /// The process that an open file is of, if that is no task of the images.
    fn missing(&self, entry: &FileEntry) -> Option<i64> {
        let process = Pidfd::of(entry).and_then(|pidfd| pidfd.process).map(i64::from);
        let owner = Userfaultfd::of(entry).map(|faults| faults.pid);
        let owner = owner.filter(|pid| !self.living.contains(pid));
        process.filter(|pid| !self.all.contains(pid)).or(owner.map(i64::from))
    }
}

fn living<'c, 'a>(checkpoint: &'c Checkpoint<'a>, pid: u32) -> Option<&'c Task<'a>> {
    checkpoint.tasks.iter().find(|task| task.pid == pid && !task.zombie)
}

fn in_memory(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let inodes = MemoryInode::all(checkpoint.images)?;
    let inodes: BTreeSet<u32> = inodes.iter().map(|inode| inode.number).collect();
    let mut files = checkpoint.files.iter().filter_map(|entry| MemoryFile::of(entry));
    files.find(|file| !inodes.contains(&file.inode)).map_or(
        Ok(()),
        |MemoryFile { file, inode, .. }| {
            invalid(kind::MEMFD_INODE.file_name(0), format!("no inode {inode} for file {file}"))
        },
    )
}

/// What is mapped as a file in memory, or as the rings of something, is one: the restore has made it, and opens it with
/// all rights and other flags. What a path leads to is opened as the tasks may.
fn mappings(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let files: BTreeMap<u32, &FileEntry> =
        checkpoint.files.iter().map(|entry| (entry.id, *entry)).collect();
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        if let Some(reason) = task.areas.iter().find_map(|area| of_another_kind(area, &files)) {
            return invalid(kind::MM.file_name(task.pid.into()), reason);
        }
    }
    Ok(())
}

/// What is wrong with the kind of a mapping, if its file is of another one.
fn of_another_kind(area: &MemoryArea, files: &BTreeMap<u32, &FileEntry>) -> Option<String> {
    let (file, what, is): (u32, &str, fn(&FileEntry) -> bool) = match area.kind {
        AreaKind::MemoryFile(file) => (file, "file in memory", |entry| entry.memfd.is_some()),
        AreaKind::PacketRing(file) => (file, "packet socket", |entry| entry.psk.is_some()),
        AreaKind::IoUring(file) => {
            (file, "io_uring instance", |entry| entry.torpor_io_uring.is_some())
        }
        _ => return None,
    };
    let fits = files.get(&file).is_some_and(|entry| is(entry));
    (!fits).then(|| format!("mapping {:x} is of file {file}, which is no {what}", area.start))
}

fn terminals(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let terminals = Terminal::all(checkpoint.images)?;
    let terminals: BTreeSet<u32> = terminals.iter().map(|terminal| terminal.id).collect();
    let mut files = checkpoint.files.iter().filter_map(|entry| TerminalFile::of(entry));
    let unknown = files.find(|file| !terminals.contains(&file.terminal));
    unknown.map_or(Ok(()), |TerminalFile { file, terminal, .. }| {
        invalid(kind::TTY_INFO.file_name(0), format!("no terminal {terminal} for file {file}"))
    })
}

fn locks(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let tasks = checkpoint.tasks.iter().map(|task| (task.pid, task.table, task.fds));
    let (holders, locks) = (LockHolders::of(tasks), FileLock::all(checkpoint.images)?);
    locks.iter().try_for_each(|lock| holders.find(lock).map(drop))
}

/// Time namespaces that the root task does not live in: they have clocks, and are made by a task that lives.
fn clocks(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let root = checkpoint.tasks.first().and_then(|root| root.homes.own(NsKind::Time));
    let others = checkpoint.namespaces(NsKind::Time).into_iter();
    // Where the maker of each lives.
    let mut homes = BTreeMap::new();
    for number in others.filter(|number| Some(*number) != root) {
        let image = kind::TIMENS.file_name(number.into());
        let Some(clocks) = ClockTimes::read(checkpoint.images, number)? else {
            return invalid(image, "is missing".to_owned());
        };
        let Some(pid) = clocks.maker else { continue };
        let Some(maker) = living(checkpoint, pid) else {
            let reason = format!("task {pid}, whose children it is for, does not live");
            return invalid(image, reason);
        };
        homes.extend(maker.homes.number(NsKind::Time).map(|home| (number, home)));
    }
    // A line of makers has an end.
    let circle = |number: &u32| {
        successors(Some(*number), |at| homes.get(at).copied()).nth(homes.len() + 1).is_some()
    };
    homes.keys().copied().find(circle).map_or(Ok(()), |number| {
        let reason = "its maker lives in what is made in it".to_owned();
        invalid(kind::TIMENS.file_name(number.into()), reason)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        MemfdFileEntry, PacketSockEntry, RegFileEntry, TorporIoUringEntry, VmaEntry,
    };

    use super::*;
    use crate::memory::status::{FILE_SHARED, IO_URING, MEMFD, REGULAR, SOCKET};

    #[test]
    fn what_is_mapped_is_of_the_kind_that_is_said() {
        let file = |id, change: fn(&mut FileEntry)| {
            let mut entry = FileEntry { id, ..FileEntry::default() };
            change(&mut entry);
            entry
        };
        let files = [
            file(0, |entry| entry.memfd = Some(MemfdFileEntry::default())),
            file(1, |entry| entry.psk = Some(PacketSockEntry::default())),
            file(2, |entry| entry.torpor_io_uring = Some(TorporIoUringEntry::default())),
            file(3, |entry| entry.reg = Some(RegFileEntry::default())),
        ];
        let files: BTreeMap<u32, &FileEntry> = files.iter().map(|file| (file.id, file)).collect();
        let kinds = [(MEMFD | FILE_SHARED, "memory"), (SOCKET, "socket"), (IO_URING, "instance")];
        for (own, (status, what)) in (0_u32..).zip(kinds) {
            for number in 0..5 {
                let (start, end, flags) = (0x10_0000, 0x10_1000, 1); // MAP_SHARED
                let (status, shmid) = (REGULAR | status, u64::from(number));
                let entry = VmaEntry { start, end, flags, status, shmid, ..VmaEntry::default() };
                let why = of_another_kind(&MemoryArea::of(&entry).unwrap(), &files);
                assert_eq!(why.is_none(), number == own, "{what}, file {number}: {why:?}");
                assert!(why.is_none_or(|why| why.ends_with(what)), "{what}, file {number}");
            }
        }
        // A path may be mapped as what it is.
        let entry = VmaEntry { end: 0x1000, flags: 1, shmid: 3, ..VmaEntry::default() };
        let area = MemoryArea::of(&VmaEntry { status: REGULAR | FILE_SHARED, ..entry }).unwrap();
        assert_eq!(of_another_kind(&area, &files), None);
    }
}
