//! The restore half of io_uring instances.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::io::DupFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_policy::collect::uses::LOWEST_ADDRESS;
use torpor_policy::memory::{AreaKind, MemoryArea};
use torpor_policy::{IoUring, OpenFile, TableNumber};
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Mapping, RemoteAddr, Tracee, parse_maps};

use super::requests::REGISTER_RING_FDS;
use super::users::PLACES;
use super::{
    GETEVENTS, KNOWN, MAX_CALLS, MAX_SQ, OFF_SQES, SETUP_CQSIZE, SETUP_DEFER_TASKRUN,
    SETUP_SINGLE_ISSUER, SETUP_SUBMIT_ALL, SETUP_TASKRUN_FLAG, SQ_WAKEUP, calls_of, enable, groups,
    request_size, requests_length, rings_length, view, word,
};
use crate::error::{Context, Error, Result};
use crate::file::Holder;
use crate::file::open::OpenFiles;
use crate::memory::vma::PAGE;
use crate::proc;
use crate::restore::process::{Rights, in_its_name};
use crate::restore::tasks::Task;
use crate::task::Script;

/// The most registered files (`IORING_MAX_FIXED_FILES`).
const MAX_FILES: u32 = 1 << 20;
/// Offsets in `struct io_rings` of what a restore moves.
const SQ_TAIL: usize = 4;
const CQ_HEAD: usize = 8;
/// And of what only the kernel writes (`IORING_SQ_*`).
const SQ_FLAGS: usize = 36;
/// `IORING_SETUP_SQ_AFF`, and that of one that has to be enabled.
const SETUP_SQ_AFF: u32 = 1 << 2;
const SETUP_R_DISABLED: u32 = 1 << 6;

/// Where `struct io_uring_params` has what the kernel says, and its length.
const PARAMS: usize = 120;
const PARAMS_CQ_ENTRIES: usize = 4;
const PARAMS_FLAGS: usize = 8;
const PARAMS_PROCESSOR: usize = 12;
/// Offsets of: head, tail of the first ring; head, tail, answers of the second.
const PARAMS_OFFSETS: [(usize, u32); 5] = [(40, 0), (44, 4), (80, 8), (84, 12), (100, 64)];

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct IoUringRestorer {
    /// The instances that are made, and where: task and descriptor.
    made: Vec<(u32, Holder)>,
}

impl IoUringRestorer {
    /// Reads and checks the images of this kind, before anything is made. Returns the files that are registered
    /// with instances: no task may have them open.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(
        &self,
        tasks: &[Task],
        all: &HashMap<u32, OpenFile>,
        rings: &[&IoUring],
    ) -> Result<Vec<u32>> {
        let mut registered = Vec::new();
        let mut calls: u32 = 0;
        for ring in rings {
            // An instance takes no other one, and only the place of that is kept by then.
            let is_other = |file: &OpenFile| file.io_uring().is_none();
            let size = |n: u32, most: u32| n.is_power_of_two() && n <= most;
            let (sq, cq) = (ring.sq_entries, ring.cq_entries);
            let known = ring.setup & !KNOWN == 0
                && size(sq, MAX_SQ)
                && size(cq, 2 * MAX_SQ)
                && ring.rings.len() as u64 == rings_length(ring.setup, sq, cq)
                && ring.requests.len() as u64 == requests_length(ring.setup, sq)
                && word(&ring.rings, 0) == word(&ring.rings, 12)
                && (!ring.is_polled() || can_be_polled(ring))
                && ring.places <= MAX_FILES
                && ring
                    .files
                    .iter()
                    .all(|(place, id)| *place < ring.places && all.get(id).is_some_and(is_other))
                && ring
                    .event
                    .is_none_or(|(id, _)| all.contains_key(&id) && ring.restrictions.is_none())
                && ring.restrictions.as_ref().is_none_or(enable::are_restrictions)
                && groups::are_groups(&ring.groups, word(&ring.rings, 0))
                && maker(tasks, ring.id)
                    .is_none_or(|task| groups::are_in(&ring.groups, &writable(task.image.areas())))
                && ring.threads.iter().all(|(_, place)| *place < PLACES);
            if !known {
                let reason = format!("file {} is an impossible io_uring instance", ring.id);
                return Err(Error::invalid("files.img", reason));
            }
            let of_groups = groups::calls(&ring.groups, sq);
            calls = calls.saturating_add(calls_of(&ring.rings, sq)).saturating_add(of_groups);
            if calls > MAX_CALLS {
                let reason = "its io_uring instances have done more than a restore counts up";
                return Err(Error::invalid("files.img", reason));
            }
            registered.extend(ring.files.iter().map(|(_, id)| *id));
        }
        Ok(registered)
    }

    /// Keeps the place: the instance is made by the first task that has it open, and the others take
    /// it from there ([`IoUringRestorer::attach`]). A pidfd of that task lets them.
    ///
    /// # Errors
    /// If no task has it open, or there are no more descriptors.
    pub(crate) fn open(&self, tasks: &[Task], ring: &IoUring) -> Result<OwnedFd> {
        let maker = maker(tasks, ring.id).ok_or_else(|| {
            let reason = format!("no task has io_uring instance {} open", ring.id);
            Error::invalid("files.img", reason)
        })?;
        Ok(proc::pidfd(maker.pid)?)
    }

    /// Gives a task the instance that it holds the descriptor of: makes it, or takes it from the task
    /// that has made it.
    ///
    /// # Errors
    /// If the kernel refuses `io_uring_setup`, or lays the rings out differently.
    pub(crate) fn attach(
        &mut self,
        tasks: &mut [Task],
        files: &mut OpenFiles,
        holder: Holder,
        ring: &IoUring,
        rights: Rights<'_>,
    ) -> Result<()> {
        let known: Vec<Holder> = self.holders(ring.id).collect();
        let own = known.iter().find(|at| at.task == holder.task);
        let task = &mut tasks[holder.task];
        let from = match (own, known.first()) {
            (Some(own), _) => RemoteFd::from(own.fd),
            (None, Some(first)) => take(task.remote()?, holder.fd, first.fd)?,
            (None, None) => RemoteFd(make(task, files, ring, rights)?),
        };
        let fds = &task.image.fds;
        let listed = fds.iter().find(|fd| fd.fd.cast_signed() == holder.fd);
        let cloexec = listed.is_some_and(|fd| fd.flags & 1 != 0);
        let flags = if cloexec { DupFlags::CLOEXEC } else { DupFlags::empty() };
        let husk = task.remote()?;
        let dup3 = syscall::dup3(from, holder.fd.cast_unsigned(), flags);
        husk.call("dup3 of an io_uring instance", dup3)?;
        if own.is_none() {
            husk.call("close", syscall::close(from))?;
            self.made.push((ring.id, holder));
        }
        if known.is_empty() {
            let pidfd = proc::pidfd(task.pid)?;
            let file = pidfd_getfd(&pidfd, holder.fd, PidfdGetfdFlags::empty())
                .context(|| "pidfd_getfd of an io_uring instance".to_owned())?;
            files.insert(ring.id, file);
        }
        Ok(())
    }

    /// Where an instance is by now, the task that has made it first.
    fn holders(&self, id: u32) -> impl Iterator<Item = Holder> {
        self.made.iter().filter(move |(made, _)| *made == id).map(|(_, holder)| *holder)
    }

    /// All tasks have their instances: maps them where they were.
    ///
    /// # Errors
    /// If a task is gone, or the kernel does not let the rings be there.
    pub(crate) fn map(&self, tasks: &mut [Task]) -> Result<()> {
        for (id, holder) in &self.made {
            let table = tasks[holder.task].image.sharing.table;
            for task in tasks.iter_mut().filter(|task| has_table(task, table)) {
                let areas: Vec<MemoryArea> = task.image.areas().copied().collect();
                map(task.remote()?, &areas, holder.fd, *id)?;
            }
        }
        Ok(())
    }

    /// Gives threads the descriptors that they have registered.
    ///
    /// # Errors
    /// If a thread is gone or was none of a task that has the instance, or the kernel does not register
    /// a descriptor.
    pub(crate) fn register(&self, tasks: &mut [Task], all: &HashMap<u32, OpenFile>) -> Result<()> {
        for ring in all.values().filter_map(OpenFile::io_uring) {
            for &(thread, place) in &ring.threads {
                let (husk, fd) = self.user(tasks, ring.id, thread).ok_or_else(|| {
                    let reason = format!("thread {thread} of an io_uring instance is none");
                    Error::invalid("files.img", reason)
                })?;
                register_with(husk, fd, place)?;
            }
        }
        Ok(())
    }

    /// The thread with a number in the images, and its descriptor of an instance.
    fn user<'t>(
        &self,
        tasks: &'t mut [Task],
        id: u32,
        thread: u32,
    ) -> Option<(&'t mut Tracee, i32)> {
        let place = |task: &Task| task.image.tree.threads.iter().position(|id| *id == thread);
        let mut places = tasks.iter().enumerate();
        let (task, number) = places.find_map(|(index, task)| Some((index, place(task)?)))?;
        let table = |task: usize| tasks[task].image.sharing.table;
        let at = self.holders(id).find(|at| table(at.task) == table(task))?;
        Some((tasks[task].threads.get_mut(number)?, at.fd))
    }
}

/// The task that makes an instance: the first that has it open.
fn maker(tasks: &[Task], id: u32) -> Option<&Task> {
    tasks.iter().find(|task| task.image.fds.iter().any(|fd| fd.file == id))
}

/// The memory that a task can write to, and nobody outside of the tree. With a buffer in there somebody could have the kernel write
/// anywhere in a husk, which has all rights still when buffers are taken.
fn writable<'a>(areas: impl Iterator<Item = &'a MemoryArea>) -> Vec<Range<u64>> {
    let is_of_tree = |area: &&MemoryArea| {
        let is_new = matches!(area.kind, AreaKind::SharedObject(_) | AreaKind::MemoryFile(_));
        area.prot & libc::PROT_WRITE.cast_unsigned() != 0 && (area.is_private() || is_new)
    };
    areas.filter(is_of_tree).map(MemoryArea::range).collect()
}

/// Whether a task lives, and has a certain table of descriptors.
fn has_table(task: &Task, table: TableNumber) -> bool {
    !task.threads.is_empty() && task.image.sharing.table == table
}

/// Takes the instance that another husk has as `there`, by a pidfd of that husk.
fn take(husk: &mut Tracee, pidfd: i32, there: i32) -> Result<RemoteFd> {
    let [pidfd, there] = [pidfd, there].map(|fd| u64::from(fd.cast_unsigned()));
    let call = (libc::SYS_pidfd_getfd, [pidfd, there, 0]);
    Ok(RemoteFd(husk.call("pidfd_getfd of an io_uring instance", call)?))
}

/// Whether a thread of the kernel can fetch its requests. It would take those that wait at once, before
/// their task is there.
fn can_be_polled(ring: &IoUring) -> bool {
    let others = SETUP_TASKRUN_FLAG | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN;
    ring.setup & others == 0 && word(&ring.rings, SQ_TAIL) == word(&ring.rings, 0)
}

/// Registers a descriptor with a thread, at a place in its table.
fn register_with(thread: &mut Tracee, fd: i32, place: u32) -> Result<()> {
    // struct io_uring_rsrc_update: the place, nothing, and the descriptor.
    let mut script = Script::new(thread);
    let update = script.words(&[place.into(), fd.cast_unsigned().into()]).0;
    let args = [fd.cast_unsigned().into(), REGISTER_RING_FDS, update, 1];
    script.step("registering a descriptor of io_uring", (libc::SYS_io_uring_register, args));
    script.run().map(drop)
}

/// Makes an instance in a husk whose other memory is in place, and returns its descriptor. The kernel counts what an instance
/// locks for the user that has made it, for nobody if that one may lock anything, and works in the name of that one.
fn make(task: &mut Task, files: &OpenFiles, ring: &IoUring, rights: Rights<'_>) -> Result<u64> {
    let fd = in_its_name(task, rights, |thread| setup(thread, ring))?;
    enable::register(task, files, fd, ring)?;
    fill(task.remote()?, fd, ring)?;
    enable::tell_event(task, fd, ring)?;
    Ok(fd)
}

/// Counts an instance up, and gives its rings the content that they had.
fn fill(husk: &mut Tracee, fd: u64, ring: &IoUring) -> Result<()> {
    let lengths = [ring.rings.len() as u64, ring.requests.len() as u64];
    let rings = husk.call("mmap of rings", view(RemoteFd(fd), 0, lengths[0]))?;
    let requests = husk.call("mmap of requests", view(RemoteFd(fd), OFF_SQES, lengths[1]))?;
    // As often as the instance has answered something: requests that are all zero do nothing.
    let size = usize::try_from(request_size(ring.setup)).unwrap_or_default();
    let submit_some = |husk: &mut Tracee, counts: Range<u32>| submit(husk, fd, rings, ring, counts);
    let taken = groups::take(husk, fd, (RemoteAddr(requests), size), ring, submit_some)?;
    submit(husk, fd, rings, ring, taken..word(&ring.rings, 0))?;
    // The flags are the kernel's: they say whether the thread that fetches requests has to be woken.
    let (before, behind) = (&ring.rings[..SQ_FLAGS], &ring.rings[SQ_FLAGS + 4..]);
    husk.write(RemoteAddr(rings), before)?;
    husk.write(RemoteAddr(rings + SQ_FLAGS as u64 + 4), behind)?;
    husk.write(RemoteAddr(requests), &ring.requests)?;
    husk.call("munmap of rings", syscall::munmap(rings..rings + lengths[0]))?;
    husk.call("munmap of requests", syscall::munmap(requests..requests + lengths[1]))?;
    Ok(())
}

/// Calls io_uring_setup(2) for an instance that is still to be enabled ([`enable`]), and makes sure that the kernel has laid the rings out as they were.
pub(super) fn setup(husk: &mut Tracee, ring: &IoUring) -> Result<u64> {
    let mut params = [0; PARAMS];
    params[PARAMS_CQ_ENTRIES..][..4].copy_from_slice(&ring.cq_entries.to_ne_bytes());
    // Whether one that fails ends a row of requests was chosen when the instance was made, and is
    // not to be seen: a program that is used to have all taken would wait for the rest for ever.
    let bound = ring.processor.map_or(0, |_| SETUP_SQ_AFF);
    let flags = ring.setup | SETUP_CQSIZE | SETUP_SUBMIT_ALL | SETUP_R_DISABLED | bound;
    params[PARAMS_FLAGS..][..4].copy_from_slice(&flags.to_ne_bytes());
    let processor = ring.processor.unwrap_or_default();
    params[PARAMS_PROCESSOR..][..4].copy_from_slice(&processor.to_ne_bytes());
    let mut batch = husk.batch();
    let place = batch.inout(&params);
    let made = batch.call((libc::SYS_io_uring_setup, [ring.sq_entries.into(), place.addr.0]));
    let out = batch.run()?;
    // As the kernel does it when a processor is taken away.
    if let (Some(processor), Err(error)) = (ring.processor, out.result(made))
        && error.raw_os_error() == Some(libc::EINVAL)
    {
        tracing::warn!("processor {processor}, which fetched requests of an io_uring, is not here");
        return setup(husk, &IoUring { processor: None, ..ring.clone() });
    }
    let fd = out.expect(made, || {
        "io_uring_setup (it must be allowed: sysctl kernel.io_uring_disabled)".to_owned()
    })?;
    let same = PARAMS_OFFSETS.iter().all(|&(at, offset)| out.u32_at(place, at) == offset)
        && out.u32_at(place, 0) == ring.sq_entries
        && out.u32_at(place, PARAMS_CQ_ENTRIES) == ring.cq_entries;
    match same {
        true => Ok(fd),
        false => Err(Error::invalid("files.img", "io_uring rings of this kernel look differently")),
    }
}

/// Submits the requests from one count up to another, and takes their answers.
fn submit(
    husk: &mut Tracee,
    fd: u64,
    rings: u64,
    ring: &IoUring,
    counts: Range<u32>,
) -> Result<()> {
    let at_once = ring.sq_entries.min(ring.cq_entries);
    let mut done = counts.start;
    while done < counts.end {
        let count = at_once.min(counts.end - done);
        husk.write(RemoteAddr(rings + SQ_TAIL as u64), &(done + count).to_ne_bytes())?;
        // A thread that fetches them takes its time.
        let waits = ring.is_polled() || !ring.groups.is_empty();
        let (least, flags) = if waits { (count, GETEVENTS | SQ_WAKEUP) } else { (0, 0) };
        let args = [fd, count.into(), least.into(), flags, 0, 0];
        let taken = husk.call("io_uring_enter", (libc::SYS_io_uring_enter, args))?;
        let mut given = [0; 4];
        husk.read(RemoteAddr(rings + 12), &mut given)?;
        if taken != u64::from(count) || u32::from_ne_bytes(given) != done + count {
            let reason = "an io_uring instance does not do nothing as often as it is asked to";
            return Err(Error::invalid("files.img", reason));
        }
        done += count;
        husk.write(RemoteAddr(rings + CQ_HEAD as u64), &done.to_ne_bytes())?;
    }
    Ok(())
}

/// Maps the instance where the task has it. The kernel maps it only where it likes itself: so all
/// that it could like is taken for the moment, but for the right place.
fn map(husk: &mut Tracee, areas: &[MemoryArea], fd: i32, id: u32) -> Result<()> {
    for vma in areas.iter().filter(|area| area.kind == AreaKind::IoUring(id)) {
        let what = || format!("mapping {:x}-{:x} (io_uring)", vma.start, vma.end);
        let here = parse_maps(&proc::read(husk.pid(), "maps")?);
        let others = elsewhere(&here, &vma.range());
        let fixed = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        let mut batch = husk.batch();
        for place in &others {
            batch.must(syscall::mmap_anonymous(place.clone(), ProtFlags::empty(), fixed));
        }
        let prot = ProtFlags::from_bits_retain(vma.prot);
        let of_ring = (RemoteFd::from(fd), vma.offset);
        let mapped = batch.must(syscall::mmap(0..vma.len(), prot, MapFlags::SHARED, of_ring));
        for place in &others {
            batch.must(syscall::munmap(place.clone()));
        }
        let out = batch.run()?;
        if let Some((_, error)) = out.first_error() {
            return Err(error).context(what);
        }
        let at = out.expect(mapped, what)?;
        if at != vma.start {
            let reason = format!("{}: the kernel chose {at:x}", what());
            return Err(Error::invalid("mm", reason));
        }
    }
    Ok(())
}

/// The parts of an address space where nothing is and a mapping could be, but for where it is to
/// be.
fn elsewhere(here: &[Mapping], wanted: &Range<u64>) -> Vec<Range<u64>> {
    const HIGHEST: u64 = (1 << 47) - PAGE;
    let mut places = Vec::new();
    let mut from = LOWEST_ADDRESS;
    let taken = here.iter().map(|map| (map.start, map.end)).chain([(wanted.start, wanted.end)]);
    let mut taken: Vec<(u64, u64)> = taken.collect();
    taken.sort_unstable();
    let len = wanted.end - wanted.start;
    for (start, end) in taken.into_iter().chain([(HIGHEST, HIGHEST)]) {
        let gap = from..start.min(HIGHEST);
        // What touches the place would make it longer.
        let touches = gap.end == wanted.start || gap.start == wanted.end;
        if gap.start < gap.end && (touches || gap.end - gap.start >= len) {
            places.push(gap);
        }
        from = from.max(end);
    }
    places
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{FileEntry, TorporIoUringEntry, VmaEntry};

    use super::super::SETUP_SQPOLL;
    use super::*;
    use crate::memory::vma::status;

    #[test]
    fn all_instances_together_are_counted_up_in_time() {
        let instance = |id| {
            let mut rings = vec![0; usize::try_from(rings_length(0, 1, 2)).unwrap()];
            for at in [0, 12] {
                rings[at..at + 4].copy_from_slice(&(MAX_CALLS / 2 + 1).to_ne_bytes());
            }
            let requests = vec![0; usize::try_from(requests_length(0, 1)).unwrap()];
            let torpor_io_uring = Some(TorporIoUringEntry {
                id,
                sq_entries: 1,
                cq_entries: 2,
                rings,
                requests,
                ..TorporIoUringEntry::default()
            });
            IoUring::of(&FileEntry { id, torpor_io_uring, ..FileEntry::default() }).unwrap()
        };
        let restorer = IoUringRestorer::default();
        let load = |rings: &[&IoUring]| restorer.load(&[], &HashMap::new(), rings);
        load(&[&instance(1)]).unwrap();
        let error = load(&[&instance(1), &instance(2)]).unwrap_err().to_string();
        assert!(error.contains("more than a restore counts up"), "{error}");
    }

    #[test]
    fn no_request_waits_for_a_thread_that_would_take_it_before_its_task_is_there() {
        let instance = |setup, waiting: u32| {
            let mut rings = vec![0; usize::try_from(rings_length(0, 1, 2)).unwrap()];
            rings[SQ_TAIL..SQ_TAIL + 4].copy_from_slice(&waiting.to_ne_bytes());
            let torpor_io_uring = Some(TorporIoUringEntry {
                setup,
                sq_entries: 1,
                cq_entries: 2,
                rings,
                requests: vec![0; usize::try_from(requests_length(0, 1)).unwrap()],
                ..TorporIoUringEntry::default()
            });
            IoUring::of(&FileEntry { torpor_io_uring, ..FileEntry::default() }).unwrap()
        };
        let load = |ring: IoUring| IoUringRestorer::default().load(&[], &HashMap::new(), &[&ring]);
        load(instance(0, 1)).unwrap();
        load(instance(SETUP_SQPOLL, 0)).unwrap();
        let impossible = [(SETUP_SQPOLL, 1), (SETUP_SQPOLL | SETUP_TASKRUN_FLAG, 0)];
        for (setup, waiting) in impossible {
            let error = load(instance(setup, waiting)).unwrap_err().to_string();
            assert!(error.contains("impossible io_uring instance"), "{error}");
        }
    }

    #[test]
    fn nobody_else_writes_where_buffers_are_taken_from() {
        let area = |start, kind, flags, prot| {
            let status = status::REGULAR | kind;
            let entry = VmaEntry {
                start,
                end: start + PAGE,
                status,
                flags,
                prot,
                shmid: 7,
                ..VmaEntry::default()
            };
            MemoryArea::of(&entry).unwrap()
        };
        let areas = [
            area(0x1000, status::ANON_PRIVATE, 0x22, 3),
            area(0x2000, status::ANON_PRIVATE, 0x22, 1),
            area(0x3000, status::FILE_PRIVATE, 2, 3),
            area(0x4000, status::FILE_SHARED, 1, 3),
            area(0x5000, status::SYSVIPC | status::ANON_SHARED, 1, 3),
            area(0x6000, status::ANON_SHARED, 0x21, 3),
        ];
        let starts: Vec<u64> =
            writable(areas.iter()).into_iter().map(|range| range.start).collect();
        assert_eq!(starts, [0x1000, 0x3000, 0x6000]);
    }

    #[test]
    fn a_processor_that_is_not_here_binds_nobody() {
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut make = |setup_flags, processor| {
            let ring = TorporIoUringEntry {
                setup: setup_flags,
                sq_entries: 1,
                cq_entries: 2,
                processor,
                ..TorporIoUringEntry::default()
            };
            let entry = FileEntry { torpor_io_uring: Some(ring), ..FileEntry::default() };
            setup(&mut husk, &IoUring::of(&entry).unwrap())
        };
        if make(0, None).is_err() {
            println!("left out: a_processor_that_is_not_here (this kernel makes no io_uring)");
            return;
        }
        make(SETUP_SQPOLL, Some(100_000)).unwrap();
        husk.exit_with(0).unwrap();
    }

    #[test]
    fn all_is_taken_but_the_place() {
        let text = "100000-200000 r--p 00000000 00:00 0 \n203000-204000 r--p 00000000 00:00 0 \n";
        let places = elsewhere(&parse_maps(text), &(0x300000..0x302000));
        let end = (1 << 47) - PAGE;
        let all = [0x10000..0x100000, 0x200000..0x203000, 0x204000..0x300000, 0x302000..end];
        assert_eq!(places, all);
        assert_eq!(elsewhere(&parse_maps(text), &(0x200000..0x202000))[1], 0x202000..0x203000);
    }
}
