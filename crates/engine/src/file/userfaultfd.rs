//! userfaultfds of programs: features, what is registered, and the marks that they set on pages.
//!
//! A userfaultfd is of the address space of the task that made it, whoever has it now. The kernel
//! does not say of which, nor which of several has a mapping: the dump tries it out.
//!
//! A thread that waits for a page is interrupted when it is stopped, and touches the page again
//! when it goes on. So nothing is in flight in a stopped tree: what has waited to be read by the
//! program is told again, and what it has read, but not answered, is told twice. Any signal does
//! the same. Whoever forks, moves or drops memory and waits for the program to read of it
//! (`UFFD_FEATURE_EVENT_*`) cannot be stopped.
//!
//! The restore makes a userfaultfd in the husk of its task, and registers when all pages are in
//! place.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::proto::{FdTypes, FileEntry, TorporUserfaultfdArea, TorporUserfaultfdEntry};
use torpor_policy::Userfaultfd;
use torpor_policy::collect::uses::LOWEST_ADDRESS;
use torpor_policy::memory::MemoryArea;
use torpor_sys::uffd;
use torpor_sys::vm::{self, Scan, page};
use torpor_tracee::syscall::{self, RemoteFd};

use super::found::own_pid;
use super::open::OpenFiles;
use super::{FdInfo, Found};
use crate::dump::tasks::{Task, Tasks};
use crate::error::{Context, Error, Result};
use crate::memory::pages::PageSpan as Run;
use crate::memory::registered::{self, Marks};
use crate::memory::scan;
use crate::memory::vma::{PAGE, Vma, status};
use crate::proc;
use crate::ranges::Ranges;
use crate::restore::tasks;

/// The features in what fdinfo shows: above them is a bit of the kernel's own, that it is set up.
const FEATURES: u64 = (1 << 31) - 1;
/// A page, in bytes.
const ONE_PAGE: usize = 4096;
/// The end of the addresses of programs.
const END: u64 = 1 << 47;

/// The dump half.
#[derive(Debug, Default)]
pub(crate) struct UserfaultfdDumper {
    /// The tasks whose forks wait until the program has read of them.
    telling: Vec<usize>,
}

impl UserfaultfdDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the kernel does not show its features, if no task of the tree is its owner, or
    /// if a mapping cannot be registered again; if a task has ended.
    pub(crate) fn describe(
        &mut self,
        tasks: &mut Tasks,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        if !found.is_anon("[userfaultfd]") {
            return Ok(None);
        }
        tasks.know_mappings()?;
        let features = features(&found.info)
            .ok_or_else(|| found.refuse("its fdinfo does not show its features"))?;
        let (owner, user_mode_only) = owner(tasks, found)?;
        if features & uffd::EVENT_FORK != 0 {
            self.telling.push(owner);
        }
        let mut entry = TorporUserfaultfdEntry {
            id: found.id,
            flags: found.flags(),
            pid: tasks[owner].vpid.cast_unsigned(),
            features,
            user_mode_only,
            ..TorporUserfaultfdEntry::default()
        };
        note_areas(&mut tasks[owner], found, &mut entry)?;
        Ok(Some(FileEntry { torpor_userfaultfd: Some(entry), ..found.entry(FdTypes::Ext) }))
    }

    /// Whether a fork of a task waits until the program has read of it: no copy of it can be made.
    pub(crate) fn tells_of_forks(&self, task: usize) -> bool {
        self.telling.contains(&task)
    }
}

/// Why changes of memory are not tracked.
pub(crate) const IN_THE_WAY: &str = "the tree uses userfaultfd itself, and a mapping that is registered to \
                              track its changes cannot be registered by the program";

/// Whether any of the tasks has a userfaultfd open.
///
/// # Errors
/// If a task is gone.
pub(crate) fn is_used(tasks: &[Task]) -> Result<bool> {
    let live = tasks.iter().filter(|task| !task.is_zombie());
    for task in live {
        for fd in proc::numbers(task.pid, "fd")? {
            let link = std::fs::read_link(format!("/proc/{}/fd/{fd}", task.pid));
            if link.is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]") {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// The features: the middle one of three numbers.
fn features(info: &FdInfo) -> Option<u64> {
    let text = info.values("API").next()?.split(':').nth(1)?;
    Some(u64::from_str_radix(text, 16).ok()? & FEATURES)
}

/// How a userfaultfd answers for a page of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// It is of another address space, or not set up.
    NotHere,
    /// It is of this one, and tells of faults of the program only.
    OfProgram,
    /// It is of this one, and tells of those of the kernel as well.
    OfAll,
}

/// The task whose address space it is of, and whether it tells of faults of the program only.
fn owner(tasks: &mut Tasks, found: &Found) -> Result<(usize, bool)> {
    let place = free_place(tasks);
    let mut all: Vec<usize> = tasks.live();
    // Most have their own.
    all.sort_by_key(|&task| task != found.task);
    for task in all {
        match try_out(tasks, task, found.file.as_fd(), place)? {
            Answer::NotHere => {}
            answer => return Ok((task, answer == Answer::OfProgram)),
        }
    }
    Err(found.refuse(
        "it is not set up yet (UFFDIO_API), or of the memory of a process that is outside of the \
         tree, has ended, or runs another program now",
    ))
}

/// An address at which no task has anything. It is a low one, where programs do not have anything
/// either that are outside of the tree.
fn free_place(tasks: &[Task]) -> u64 {
    let mut taken: Vec<_> = tasks.iter().flat_map(|task| &task.vmas).map(|v| &v.map).collect();
    taken.sort_unstable_by_key(|map| map.start);
    let mut at = LOWEST_ADDRESS;
    for map in taken {
        if map.start >= at + PAGE {
            break;
        }
        at = at.max(map.end);
    }
    at
}

/// Registers a page that a task has for this moment, and has it read by the kernel. If that has to
/// wait, it is answered.
fn try_out(tasks: &mut Tasks, task: usize, uffd: BorrowedFd<'_>, place: u64) -> Result<Answer> {
    let pid = tasks[task].pid;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let range = place..place + PAGE;
    let made = syscall::mmap_anonymous(range.clone(), ProtFlags::READ | ProtFlags::WRITE, flags);
    tasks.remote(task)?.call("mmap of a page", made)?;
    let answer = if uffd::register_missing(uffd, place, PAGE).is_ok() {
        let answer = touch(pid, uffd, place);
        // Before it is unmapped: of that the program would be told.
        uffd::unregister(uffd, place, PAGE).context(|| "UFFDIO_UNREGISTER".to_owned())?;
        answer
    } else {
        Ok(Answer::NotHere)
    };
    tasks.remote(task)?.call("munmap of a page", syscall::munmap(range))?;
    answer
}

/// Reads a page that may be missing.
fn touch(pid: i32, uffd: BorrowedFd<'_>, place: u64) -> Result<Answer> {
    let waits = || -> Result<bool> {
        let info = proc::read(own_pid(), &format!("fdinfo/{}", uffd.as_raw_fd()))?;
        Ok(FdInfo::parse(&info).values("pending").next().is_some_and(|count| count != "0"))
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| vm::read(pid, place, &mut [0]));
        let mut waited = false;
        while !reader.is_finished() {
            if !waited && waits()? {
                uffd::zero(uffd, place, ONE_PAGE).context(|| "UFFDIO_ZEROPAGE".to_owned())?;
                waited = true;
            }
            std::thread::yield_now();
        }
        let read = reader.join().map_err(|_| Error::Bug("a reading thread panicked".to_owned()))?;
        Ok(match read {
            Ok(1) if waited => Answer::OfAll,
            Ok(1) => Answer::NotHere,
            _ => Answer::OfProgram,
        })
    })
}

/// The faults that a mapping is registered for.
fn modes(vma: &Vma) -> u64 {
    let all = [(b"um", uffd::MODE_MISSING), (b"uw", uffd::MODE_WP), (b"ui", uffd::MODE_MINOR)];
    all.into_iter().filter(|(code, _)| vma.has(code)).map(|(_, mode)| mode).sum()
}

/// Finds what is registered with it, and the marks there.
fn note_areas(task: &mut Task, found: &Found, entry: &mut TorporUserfaultfdEntry) -> Result<()> {
    let pagemap = proc::open(task.pid, "pagemap")?;
    for vma in task.vmas.iter_mut().filter(|vma| modes(vma) != 0) {
        let (start, end, modes) = (vma.map.start, vma.map.end, modes(vma));
        // Once more changes nothing, and is refused if it is another's.
        match uffd::register_for(found.file.as_fd(), start, end - start, modes) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => continue,
            other => other.context(|| format!("UFFDIO_REGISTER of {start:x}-{end:x}"))?,
        }
        check(found, vma)?;
        vma.status |= status::USERFAULTFD;
        let modes = u32::try_from(modes).ok();
        entry.areas.push(TorporUserfaultfdArea { start, end, modes });
        let Marks { zero, protected, poisoned, .. } = registered::look(task.pid, &pagemap, vma)?;
        let area = |run: Run| TorporUserfaultfdArea { start: run.start, end: run.end, modes: None };
        entry.zero.extend(zero.into_iter().map(area));
        entry.protected.extend(protected.into_iter().map(area));
        entry.poisoned.extend(poisoned.into_iter().map(area));
    }
    Ok(())
}

/// Refuses what could not be told from something else when it is restored.
fn check(found: &Found, vma: &Vma) -> Result<()> {
    let reason = if vma.has(b"ht") {
        "huge pages of a pool (hugetlbfs), which is not supported"
    } else if vma.has(b"um") && vma.has(b"lo") && !vma.is_private() {
        "shared memory that is locked, which cannot have missing pages after a restore"
    } else if vma.has(b"um") && vma.freed_lazily {
        // One that the kernel drops before it is read would keep its reader waiting for ever.
        "pages that the kernel may drop at any moment (MADV_FREE); try again when it has"
    } else {
        return Ok(());
    };
    let (start, end) = (vma.map.start, vma.map.end);
    Err(found.refuse(format!("its mapping {start:x}-{end:x} has {reason}")))
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct UserfaultfdRestorer {
    wanted: Vec<Userfaultfd>,
}

impl UserfaultfdRestorer {
    /// Reads and checks the images of this kind, before anything is made.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(&mut self, all: &[&Userfaultfd]) -> Result<()> {
        for &uffd in all {
            let marks = [&uffd.zero, &uffd.protected, &uffd.poisoned].into_iter().flatten();
            let is_page = |at: u64| at.is_multiple_of(PAGE) && (PAGE..END).contains(&at);
            let bad =
                |area: &Range<u64>| !is_page(area.start) || !is_page(area.end) || area.is_empty();
            if uffd.areas.iter().map(|(area, _)| area).chain(marks).any(bad) {
                let reason = format!("userfaultfd {} is registered for what is no memory", uffd.id);
                return Err(Error::invalid("files.img", reason));
            }
            self.wanted.push(uffd.clone());
        }
        Ok(())
    }

    /// Makes it in the husk of its task, with its features.
    ///
    /// # Errors
    /// If it is of a pid that no task has; if the kernel does not allow one, or not its features.
    pub(crate) fn open(&self, tasks: &mut [tasks::Task], uffd: &Userfaultfd) -> Result<OwnedFd> {
        let task = owner_of(tasks, uffd)?;
        let only = if uffd.user_mode_only { uffd::USER_MODE_ONLY } else { 0 };
        let settable = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
        let flags = u64::from(uffd.flags & settable) | only;
        let pidfd = proc::pidfd(tasks[task].pid)?;
        let husk = tasks[task].remote()?;
        let name = "userfaultfd (it must be allowed: sysctl vm.unprivileged_userfaultfd)";
        let fd = husk.call(name, (libc::SYS_userfaultfd, [flags]))?;
        let number = i32::try_from(fd).unwrap_or(-1);
        let fetched = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty());
        husk.call("close", syscall::close(RemoteFd(fd)))?;
        let fetched = fetched.context(|| "fetching a userfaultfd".to_owned())?;
        uffd::enable(fetched.as_fd(), uffd.features)
            .context(|| format!("features {:#x} of a userfaultfd (UFFDIO_API)", uffd.features))?;
        Ok(fetched)
    }

    /// Registers what was registered, with its marks. The address spaces are as they are to be.
    ///
    /// # Errors
    /// If the kernel refuses to register an area or set a mark; if pages are there that are to be
    /// missing.
    pub(crate) fn register(&self, tasks: &mut [tasks::Task], files: &OpenFiles) -> Result<()> {
        for uffd in &self.wanted {
            // Those that no task holds were not made.
            let Some(file) = files.get(uffd.id) else { continue };
            let task = owner_of(tasks, uffd)?;
            let what = format!("userfaultfd {} of task {}", uffd.id, uffd.pid);
            empty(&mut tasks[task], uffd)?;
            mark(file.as_fd(), uffd).context(|| what.clone())?;
            verify(&tasks[task], uffd)?;
        }
        Ok(())
    }
}

fn owner_of(tasks: &[tasks::Task], uffd: &Userfaultfd) -> Result<usize> {
    let own = |task: &tasks::Task| task.vpid.cast_unsigned() == uffd.pid && !task.image.is_zombie();
    tasks.iter().position(own).ok_or_else(|| {
        let reason = format!("userfaultfd {} is of {}, which is no task", uffd.id, uffd.pid);
        Error::invalid("files.img", reason)
    })
}

/// The private parts of what is registered for missing pages.
fn private(task: &tasks::Task, wanted: &Userfaultfd) -> Vec<MemoryArea> {
    let missing = |(_, modes): &&(Range<u64>, u64)| modes & uffd::MODE_MISSING != 0;
    let areas: Vec<_> = wanted.areas.iter().filter(missing).map(|(area, _)| area).collect();
    let vmas = task.image.areas().filter(|vma| vma.is_private());
    let parts = vmas.flat_map(|vma| {
        areas.iter().filter_map(move |area| {
            let (start, end) = (vma.start.max(area.start), vma.end.min(area.end));
            (start < end).then_some(MemoryArea { start, end, ..*vma })
        })
    });
    parts.collect()
}

/// Drops what is to be missing: pages that came as parts of a huge one, or with a lock on the
/// mapping.
fn empty(task: &mut tasks::Task, wanted: &Userfaultfd) -> Result<()> {
    let pages = task.image.pages.ranges();
    let parts = private(task, wanted);
    let mut batch = task.remote()?.batch();
    for vma in parts {
        let advice = match vma.locked {
            None => libc::MADV_DONTNEED as u64,
            Some(_) => libc::MADV_DONTNEED_LOCKED as u64,
        };
        let whole: Ranges = std::iter::once(vma.start..vma.end).collect();
        for gap in whole.without(&pages).as_slice() {
            batch.must((libc::SYS_madvise, [gap.start, gap.end - gap.start, advice]));
        }
    }
    match batch.run()?.first_error() {
        None => Ok(()),
        Some((_, e)) => Err(e).context(|| "dropping what a userfaultfd brings in".to_owned()),
    }
}

/// Registers, and sets the marks.
fn mark(uffd: BorrowedFd<'_>, wanted: &Userfaultfd) -> std::io::Result<()> {
    for (area, modes) in &wanted.areas {
        uffd::register_for(uffd, area.start, area.end - area.start, *modes)?;
    }
    for area in &wanted.zero {
        let mut at = area.start;
        while at < area.end {
            let left = usize::try_from(area.end - at).unwrap_or(usize::MAX);
            at += uffd::zero(uffd, at, left)? as u64;
        }
    }
    for area in &wanted.poisoned {
        uffd::poison(uffd, area.start, area.end - area.start)?;
    }
    for area in &wanted.protected {
        uffd::protect(uffd, area.start, area.end - area.start)?;
    }
    Ok(())
}

/// Makes sure that nothing is there that is to be missing: the kernel can have made a huge page of
/// what was filled in before it was registered.
fn verify(task: &tasks::Task, wanted: &Userfaultfd) -> Result<()> {
    let pagemap = proc::open(task.pid, "pagemap")?;
    let marks = wanted.zero.iter().chain(&wanted.protected).chain(&wanted.poisoned);
    let known: Ranges = marks.cloned().collect();
    let known = known.or(&task.image.pages.ranges());
    for vma in private(task, wanted) {
        let any_of = page::IS_PRESENT | page::IS_SWAPPED;
        let what = Scan { start: vma.start, end: vma.end, any_of, ..Scan::default() };
        let mut there = Vec::new();
        scan::for_each_region(&pagemap, &what, |region| there.push(region.start..region.end))?;
        let guards = task.image.memory.iter().flat_map(|memory| &memory.guards);
        let guards: Ranges = guards.cloned().collect();
        let there: Ranges = there.into_iter().collect();
        if let Some(extra) = there.without(&known).without(&guards).as_slice().first() {
            let (start, end) = (extra.start, extra.end);
            let reason = format!("pages {start:x}-{end:x}, which are to be missing, are there");
            return Err(Error::invalid(format!("the memory of task {}", wanted.pid), reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_the_program() {
        let info = |text: &str| features(&FdInfo::parse(text));
        assert_eq!(info("pending:\t0\ntotal:\t0\nAPI:\taa:80000001:1ffff\n"), Some(1));
        assert_eq!(info("API:\taa:0:1ff\n"), Some(0));
        assert_eq!(info("pending:\t0\n"), None);
    }
}
