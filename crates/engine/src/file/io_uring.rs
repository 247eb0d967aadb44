//! Instances of io_uring: their rings, what is in them, and registered buffers.
//!
//! No call reads the state of an instance, and none sets it. The dump lets what is in flight be
//! answered for a while, and saves the memory of the rings. The restore makes an
//! instance of the same size. The kernel counts requests and answers for itself, and the program
//! counts on: so the new instance does nothing as often as the old one did something. Then
//! its rings get the content that they had.
//!
//! What was registered with an instance is made again where it can be told ([`registered`],
//! [`files`]), by calls or by the memory of the kernel ([`inside`]), and refused where only that there is
//! something can be ([`credentials`]). The ways in which threads know it are kept as well ([`users`]). A
//! thread of the kernel may fetch its requests ([`polled`]). What it may be asked for, and which eventfd
//! it tells of answers, is in [`setup`].
//!
//! The kernel lets nobody send an instance over a socket. One that several tasks have open, since
//! children inherit it, is made by the first of them, and the others take it from there. Threads of
//! all of them may have asked for something, and each gets its answers by itself.

mod credentials;
mod enable;
mod files;
mod groups;
mod inside;
mod polled;
mod refusal;
mod registered;
mod requests;
mod restore;
mod settle;
mod setup;
mod users;

use std::cell::OnceCell;
use std::collections::HashMap;

use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::proto::{FdTypes, FileEntry, TorporIoUringEntry};
use torpor_policy::BufferGroup;
use torpor_sys::vm;
use torpor_tracee::syscall::{self, RemoteFd, Syscall};

use self::files::RegisteredFile;
use self::inside::KernelView;
pub(crate) use self::polled::fetchers;
use self::refusal::{refuse, refuse_use};
use self::registered::GroupQuestion;
pub(crate) use self::restore::IoUringRestorer;
pub(crate) use self::settle::settle;
use self::settle::wait;
use self::setup::Setup;
pub(crate) use self::users::UserQuestion;
use super::table::FileTable;
use super::{FdInfo, Found};
use crate::dump::pids::Pids;
use crate::dump::tasks::{Task, Tasks};
use crate::error::{Context, Error, Result};
use crate::memory::vma::{PAGE, Vma};

/// `IORING_SETUP_*` of linux/io_uring.h.
const SETUP_SQPOLL: u32 = 1 << 1;
const SETUP_CQSIZE: u32 = 1 << 3;
const SETUP_SUBMIT_ALL: u32 = 1 << 7;
const SETUP_TASKRUN_FLAG: u32 = 1 << 9;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_CQE32: u32 = 1 << 11;
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// What a restore makes instances with.
const KNOWN: u32 = SETUP_SQPOLL
    | SETUP_TASKRUN_FLAG
    | SETUP_SQE128
    | SETUP_CQE32
    | SETUP_SINGLE_ISSUER
    | SETUP_DEFER_TASKRUN
    | SETUP_NO_SQARRAY;

/// `IORING_ENTER_*`: asks for answers, and wakes the thread that fetches requests.
const GETEVENTS: u64 = 1;
const SQ_WAKEUP: u64 = 1 << 1;
/// `IORING_OFF_SQES`: where in its file the requests of an instance are.
const OFF_SQES: u64 = 0x1000_0000;
/// Why one with buffers that other processes have open is refused, and what to do.
const SHARED_BUFFERS: (&str, &str) = (
    "it has registered buffers, and several processes have it open: the kernel does not tell in whose \
     memory they are",
    "let the program close it in its children",
);
/// Why one whose thread fetches the requests of another as well is refused, and what to do.
const SHARED_FETCHER: (&str, &str) = (
    "the thread that fetches its requests works for another one as well (IORING_SETUP_ATTACH_WQ), and \
     the kernel does not tell in whose name it does",
    "let the program make each with a thread of its own",
);
/// The largest rings that the kernel makes.
const MAX_SQ: u32 = 32768;
/// How many calls a restore makes to count up all instances: some thirty microseconds each.
const MAX_CALLS: u32 = 1_000_000;

/// Where `struct io_rings` of the kernel has the answers: behind heads and tails of both rings, and
/// what describes them.
const ANSWERS: usize = 64;

/// Bytes of both rings, in whole pages.
fn rings_length(setup: u32, sq: u32, cq: u32) -> u64 {
    let answer = if setup & SETUP_CQE32 != 0 { 32 } else { 16 };
    let answers = ANSWERS as u64 + u64::from(cq) * answer;
    let array = if setup & SETUP_NO_SQARRAY != 0 { 0 } else { u64::from(sq) * 4 };
    (answers.next_multiple_of(64) + array).next_multiple_of(PAGE)
}

/// Bytes of a request.
fn request_size(setup: u32) -> u64 {
    if setup & SETUP_SQE128 != 0 { 128 } else { 64 }
}

/// Bytes of all requests, in whole pages.
fn requests_length(setup: u32, sq: u32) -> u64 {
    (u64::from(sq) * request_size(setup)).next_multiple_of(PAGE)
}

/// What fdinfo says of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    sq_entries: u32,
    cq_entries: u32,
    /// Requests that the program has made.
    made: u32,
    /// Those of them that the kernel has taken.
    taken: u32,
    /// Answers that it has given.
    given: u32,
}

impl Counts {
    fn parse(info: &FdInfo) -> Option<Self> {
        let number = |key: &str| -> Option<u32> {
            let text = info.values(key).next()?;
            match text.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16).ok(),
                None => text.parse().ok(),
            }
        };
        let entries = |key| number(key)?.checked_add(1).filter(|n| n.is_power_of_two());
        Some(Counts {
            sq_entries: entries("SqMask")?,
            cq_entries: entries("CqMask")?,
            made: number("SqTail")?,
            taken: number("CachedSqHead")?,
            given: number("CachedCqTail")?,
        })
    }

    /// Requests that have no answer yet. A thread that fetches them takes all that are made.
    fn in_flight(&self, polled: bool) -> u32 {
        let asked = if polled { self.made } else { self.taken };
        asked.wrapping_sub(self.given)
    }
}

/// The dump half.
#[derive(Debug, Default)]
pub(crate) struct IoUringDumper {
    met: Vec<Instance>,
    /// Threads that have used one, by task.
    users: Vec<(usize, i32)>,
    /// How many calls it takes to count all of them up.
    calls: u32,
    /// Whether they have groups of buffers: task, descriptor, and what was asked.
    groups: Vec<(usize, i32, GroupQuestion)>,
    /// The memory of the kernel, if it was needed and is to be read.
    view: OnceCell<Option<KernelView>>,
}

/// An instance that was met.
#[derive(Debug)]
struct Instance {
    /// Its number, and that of its inode.
    id: u32,
    ino: u64,
    /// The tasks that have it open, each with a descriptor of it; the one that was met comes first.
    holders: Vec<(usize, i32)>,
    /// What is registered with it.
    files: Vec<RegisteredFile>,
    /// The descriptor of the eventfd that it tells of answers.
    event: Option<i32>,
    /// The number of the thread that fetches its requests.
    fetcher: Option<i32>,
}

impl IoUringDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if it was set up or is used in a way that cannot be kept, or requests stay in
    /// flight; if its task has ended.
    pub(crate) fn describe(
        &mut self,
        tasks: &mut Tasks,
        table: &mut FileTable,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        if !found.is_anon("[io_uring]") {
            return Ok(None);
        }
        tasks.know_mappings()?;
        // The kernel takes its requests in another layout.
        if tasks[found.task].is_32bit() {
            return Err(refuse(found, "it is that of a 32-bit program, which is not supported"));
        }
        let holders = holders(tasks, found);
        check_sharing(tasks, found, &holders)?;
        let (counts, info) = wait(tasks, found, &holders)?;
        check(found, &info)?;
        let others: Vec<i32> = holders[1..].iter().map(|(task, _)| tasks[*task].pid).collect();
        let fetcher = polled::describe(tasks.remote(found.task)?, found, &info, &others)?;
        let number = fetcher.map(|fetcher| fetcher.number);
        if number.is_some() && self.met.iter().any(|met| met.fetcher == number) {
            return Err(refuse_use(found, SHARED_FETCHER.0, SHARED_FETCHER.1));
        }
        let view = || self.view.get_or_init(KernelView::open).as_ref();
        let Setup { flags, restrictions, workers, event } =
            setup::ask(tasks.remote(found.task)?, found, view)?;
        let (setup, rings, requests) = read(tasks, found, flags, counts)?;
        let groups = match view() {
            Some(view) => groups::look(view, found, &tasks[found.task].vmas, word(&rings, 0))?,
            None => None,
        };
        let known: Vec<BufferGroup> = groups.iter().flatten().map(BufferGroup::of).collect();
        let calls = calls_of(&rings, counts.sq_entries);
        self.calls = self.calls.saturating_add(calls);
        self.calls = self.calls.saturating_add(groups::calls(&known, counts.sq_entries));
        if self.calls > MAX_CALLS {
            let many = word(&rings, 0);
            let reason =
                format!("it has taken {many} requests: to count that far again takes too long");
            return Err(refuse(found, reason));
        }
        let (places, mut files) = files::registered(found, &info)?;
        if !files.is_empty()
            && let Some(view) = view()
        {
            files::look(view, found, table, &mut files)?;
        }
        // One that is restricted was looked into, and answers nobody.
        if restrictions.is_none() {
            let ask = if groups.is_some() { GroupQuestion::known } else { GroupQuestion::ask };
            self.groups.push((found.task, found.fd, ask(found)));
        }
        let buffers = registered::buffers(found, &info)?;
        let of_groups = known.iter().map(|group| (group.address, group.size()));
        let of_buffers = buffers.iter().map(|buffer| (buffer.address, buffer.length));
        let pinned: Vec<(u64, u64)> = of_buffers.chain(of_groups).collect();
        if !others.is_empty() && pinned.iter().any(|(_, length)| *length != 0) {
            let (reason, instead) = SHARED_BUFFERS;
            return Err(refuse_use(found, reason, instead));
        }
        registered::note_pinned(&mut tasks[found.task].vmas, &pinned);
        let (id, ino) = (found.id, found.stat.st_ino);
        let (event, event_async) = event.unzip();
        self.met.push(Instance { id, ino, holders, files, event, fetcher: number });
        let instance = TorporIoUringEntry {
            id: found.id,
            flags: found.flags(),
            setup: setup | fetcher.map_or(0, |_| SETUP_SQPOLL),
            sq_entries: counts.sq_entries,
            cq_entries: counts.cq_entries,
            rings,
            requests,
            buffers,
            places,
            processor: fetcher.and_then(|fetcher| fetcher.processor),
            restrictions,
            workers,
            event_async,
            groups: groups.unwrap_or_default(),
            ..TorporIoUringEntry::default()
        };
        Ok(Some(FileEntry { torpor_io_uring: Some(instance), ..found.entry(FdTypes::Ext) }))
    }

    /// The number of the instance that a mapping of a task shows.
    ///
    /// # Errors
    /// Refused, if the task does not have it open.
    pub(crate) fn of_mapping(&self, tasks: &[Task], task: usize, vma: &Vma) -> Result<u32> {
        let met = self.met.iter().find(|met| met.ino == vma.map.inode);
        let own = met.and_then(|met| met.open_in(task));
        own.map(|own| own.id).ok_or_else(|| {
            let reason = match met {
                Some(_) => {
                    "shows the rings of an io_uring instance that another task has open and it has \
                     not, which is not supported; let the program keep its descriptor, or unmap it \
                     in its children (io_uring_ring_dontfork)"
                }
                None => {
                    "shows the rings of an io_uring instance that no task has open; let the program \
                     keep its descriptor"
                }
            };
            let object = format!("mapping {:x}-{:x}", vma.map.start, vma.map.end);
            Error::refused(tasks[task].pid, object, reason)
        })
    }

    /// A thread of a task has used io_uring.
    pub(crate) fn note_user(&mut self, task: usize, tid: i32) {
        self.users.push((task, tid));
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole.
    ///
    /// # Errors
    /// Refused, if one has groups of buffers or credentials, or may have groups and everything is wanted
    /// (`strict`); if it is not known which file is registered, or a thread has registered the
    /// descriptor of one that is closed.
    pub(crate) fn finish(
        &mut self,
        tasks: &mut Tasks,
        pids: &Pids,
        table: &mut FileTable,
        strict: bool,
    ) -> Result<()> {
        for (task, fd, question) in self.groups.drain(..) {
            let pidfd = tasks[task].pidfd.try_clone().context(|| "dup".to_owned())?;
            let has_some = || {
                let view = self.view.get_or_init(KernelView::open).as_ref()?;
                let ring = pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok()?;
                view.has_credentials(view.object(ring)?)
            };
            credentials::check(tasks.remote(task)?, fd, question.about(), strict, has_some)?;
            question.check(tasks.remote(task)?, fd, strict)?;
        }
        for met in &self.met {
            let task = met.holders[0].0;
            let pid = tasks[task].pid;
            let files = files::resolve(tasks.remote(task)?, pid, table, &met.files)?;
            let number = |fd| table.id_of(pid, fd).ok_or(Error::Gone { pid });
            let event = met.event.map(number).transpose()?;
            if let Some(ring) = entry_mut(table, met.id) {
                (ring.files, ring.event) = (files, event);
            }
        }
        for &(task, tid) in &self.users {
            let own: Vec<OpenInstance> =
                self.met.iter().filter_map(|met| met.open_in(task)).collect();
            let ids = (tasks[task].pid, pids.thread(tid).unwrap_or(tid).cast_unsigned());
            let mut threads = tasks[task].threads.iter_mut();
            let thread =
                threads.find(|thread| thread.tid() == tid).ok_or(Error::Gone { pid: tid })?;
            users::describe(thread, ids, table, &own)?;
        }
        Ok(())
    }
}

/// The entry of an instance.
fn entry_mut(table: &mut FileTable, id: u32) -> Option<&mut TorporIoUringEntry> {
    table.entry_mut(id).and_then(|entry| entry.torpor_io_uring.as_mut())
}

/// An instance that a task has open: its number, and the descriptor there.
#[derive(Debug, Clone, Copy)]
struct OpenInstance {
    id: u32,
    fd: i32,
    /// Whether it tells an eventfd of answers.
    has_event: bool,
}

impl Instance {
    /// The instance as a task has it open, if it has.
    fn open_in(&self, task: usize) -> Option<OpenInstance> {
        let holder = self.holders.iter().find(|(holder, _)| *holder == task);
        let has_event = self.event.is_some();
        holder.map(|&(_, fd)| OpenInstance { id: self.id, fd, has_event })
    }
}

/// The tasks that have an instance open, each with a descriptor of it. Those before the task that it
/// was found in do not have it, or it would have been found there.
fn holders(tasks: &[Task], found: &Found) -> Vec<(usize, i32)> {
    // Each instance has an inode of its own.
    let key = (found.stat.st_dev, found.stat.st_ino);
    let listed = |task: &Task| {
        let descriptor = task.descriptors.iter().find(|listed| listed.key == key)?;
        Some((task.ids.files_id, descriptor.fd))
    };
    let own = (tasks[found.task].ids.files_id, found.fd);
    let tables: HashMap<u32, i32> =
        tasks[found.task..].iter().filter_map(listed).chain([own]).collect();
    let live = tasks.iter().enumerate().skip(found.task).filter(|(_, task)| !task.is_zombie());
    live.filter_map(|(index, task)| Some((index, *tables.get(&task.ids.files_id)?))).collect()
}

/// A task takes an instance only from one that it has all rights over.
fn check_sharing(tasks: &[Task], found: &Found, holders: &[(usize, i32)]) -> Result<()> {
    let user = |task: usize| tasks[task].ids.user_ns_id;
    if holders.iter().all(|(task, _)| user(*task) == user(found.task)) {
        return Ok(());
    }
    let reason = "tasks of several user namespaces have it open, which is not supported";
    Err(refuse_use(found, reason, SHARED_BUFFERS.1))
}

/// Refuses what fdinfo shows and no restore can make.
fn check(found: &Found, info: &FdInfo) -> Result<()> {
    // Linux 6.13 and later show it.
    if info.values("NAPI").any(|value| value != "disabled") {
        return Err(refuse_use(
            found,
            "it polls network devices itself (IORING_REGISTER_NAPI), which is not supported",
            "let the program leave that to the kernel",
        ));
    }
    // Not all kernels show them: Linux 6.18 does not, where they are searched for (credentials.rs).
    if info.rest.iter().any(|line| line.starts_with("Personalities")) {
        return Err(refuse_use(
            found,
            "it has registered credentials, which is not supported",
            "let the program make its requests with its own",
        ));
    }
    Ok(())
}

/// Reads the memory of an instance, and tells from that what else it was set up with.
fn read(
    tasks: &mut Tasks,
    found: &Found,
    setup: u32,
    counts: Counts,
) -> Result<(u32, Vec<u8>, Vec<u8>)> {
    let Counts { sq_entries, cq_entries, .. } = counts;
    // The longest that both can be, and a page more: what is longer than that is unknown.
    let longest = rings_length(SETUP_CQE32, sq_entries, cq_entries) + PAGE;
    let rings = read_part(tasks, found, 0, longest)?;
    let longest = requests_length(SETUP_SQE128, sq_entries) + PAGE;
    let requests = read_part(tasks, found, OFF_SQES, longest)?;
    let long_answers = [0, SETUP_CQE32];
    let long_requests = [0, SETUP_SQE128];
    let requests_fit = |&more: &u32| requests_length(more, sq_entries) == requests.len() as u64;
    let rings_fit = |&more: &u32| {
        let array = rings_length(more, sq_entries, cq_entries);
        let none = rings_length(more | SETUP_NO_SQARRAY, sq_entries, cq_entries);
        [array, none].contains(&(rings.len() as u64))
    };
    let unknown = || refuse(found, "its rings have a size that is not known");
    let setup = setup | long_requests.into_iter().find(requests_fit).ok_or_else(unknown)?;
    let setup = setup | long_answers.into_iter().find(rings_fit).ok_or_else(unknown)?;
    Ok((setup | array_of(setup, counts, &rings), rings, requests))
}

/// Whether requests go through an array of indexes. Programs fill it with the numbers from 0 on,
/// which is what the kernel does without: if nothing is in it yet both are the same.
fn array_of(setup: u32, counts: Counts, rings: &[u8]) -> u32 {
    let bare = rings_length(setup, counts.sq_entries, counts.cq_entries) != rings.len() as u64;
    let answer = if setup & SETUP_CQE32 != 0 { 32 } else { 16 };
    let answers = (ANSWERS + counts.cq_entries as usize * answer).next_multiple_of(64);
    let array = rings.get(answers..).unwrap_or_default();
    let array = &array[..array.len().min(counts.sq_entries as usize * 4)];
    if bare || array.iter().all(|&byte| byte == 0) { SETUP_NO_SQARRAY } else { 0 }
}

/// mmap(2) of a part of an instance, wherever the kernel likes.
fn view(fd: RemoteFd, offset: u64, length: u64) -> Syscall {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    syscall::mmap(0..length, prot, MapFlags::SHARED, (fd, offset))
}

/// Maps a part of an instance in its task for a moment, and reads what is there of `length` bytes.
fn read_part(tasks: &mut Tasks, found: &Found, offset: u64, length: u64) -> Result<Vec<u8>> {
    let mut batch = tasks.remote(found.task)?.batch();
    let mapped = batch.call(view(found.fd.into(), offset, length));
    let Ok(at) = batch.run()?.result(mapped) else {
        return Err(refuse(
            found,
            "its rings are memory of the program's own, or not to be mapped",
        ));
    };
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let read = vm::read(found.pid, at, &mut bytes);
    tasks.remote(found.task)?.call("munmap", syscall::munmap(at..at + length))?;
    let read = read.context(|| format!("read the rings of fd {}", found.fd))?;
    bytes.truncate(read);
    Ok(bytes)
}

/// How many calls it takes to count an instance up.
fn calls_of(rings: &[u8], sq_entries: u32) -> u32 {
    word(rings, 0) / sq_entries
}

/// The 32 bits at a place of the rings.
fn word(rings: &[u8], at: usize) -> u32 {
    rings.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_is_understood() {
        let text = "pos:\t0\nSqMask:\t0x7\nSqTail:\t13\nCachedSqHead:\t12\nCqMask:\t0xf\nCachedCqTail:\t10\n";
        let counts = Counts::parse(&FdInfo::parse(text)).unwrap();
        assert_eq!((counts.sq_entries, counts.cq_entries), (8, 16));
        assert_eq!([false, true].map(|polled| counts.in_flight(polled)), [2, 3]);
        assert_eq!(Counts::parse(&FdInfo::parse("SqMask:\t0xffffffff\n")), None);
    }

    #[test]
    fn lengths_are_those_of_the_kernel() {
        assert_eq!(rings_length(0, 8, 16), 4096);
        assert_eq!(rings_length(0, 256, 512), 12288);
        assert_eq!(rings_length(SETUP_NO_SQARRAY, 64, 252), 4096);
        assert_eq!(requests_length(SETUP_SQE128, 64), 8192);
    }
}
