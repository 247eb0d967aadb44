//! The memory of the dumped tasks: mappings first, all pages in one go later.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind};
use torpor_images::packed::Packed;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run};
use torpor_images::pages::PagesWriter;
use torpor_images::proto::{MmEntry, VmaEntry};

use super::outbox::{self, Away, to_run};
use super::{Dump, files, micros, twin};
use crate::error::{Error, Result};
use crate::file::socket::ring;
use crate::halt::Halt;
use crate::hooks::Hooks;
use crate::lazy;
use crate::memory::pages::{self, Cutter, Job, PageSpan, Source};
use crate::memory::relatives::Relatives;
use crate::memory::vma::{PAGE, Vma, as_restored, status, to_entry};
use crate::memory::{aio, names, track};
use crate::page_server::Lent;
use crate::proc;
use crate::task::MmFlags;

/// Words of an auxiliary vector that CRIU takes. Kernels have room for more since Linux 6.3, but
/// with these it is full but for its end, which a restore adds.
const AUXV_WORDS: usize = 44;

/// What is to be copied, and the objects of shared memory met so far.
#[derive(Debug, Default)]
pub(super) struct PlannedMemory {
    jobs: Vec<Job>,
    /// What can be copied when the tree runs on.
    later: Vec<Job>,
    targets: Vec<Arc<PagesWriter>>,
    /// Where pages go to if not into files.
    pub away: Option<Away>,
    bytes: u64,
    copied: u64,
    last_pages_id: u32,
    /// What a lazy restore will ask for.
    pub lent: Lent,
    /// Objects of shared anonymous memory whose pages are planned.
    shared: HashMap<u64, ()>,
    /// Finds the pages that tasks share since they were forked, if these are to be saved once.
    pub relatives: Option<Relatives>,
}

/// Writes `mm-PID.img` and `pagemap-PID.img` of a task and plans its pages.
pub(super) fn dump_mappings(cx: &mut Dump<'_>, task: usize, flags: &MmFlags) -> Result<()> {
    cx.know_all()?;
    let vpid = cx.tasks[task].vpid;
    let vmas = std::mem::take(&mut cx.tasks[task].vmas);
    let mut entries = Vec::new();
    // Before the pages: tracking them can join mappings, and their names are gone then.
    for vma in &vmas {
        let entry = describe(cx, task, vma)?;
        log_mapping(vpid, vma, &entry);
        entries.push(entry);
    }
    for (at, guards) in plan_private(cx, task, &vmas, false)?.into_iter().enumerate().rev() {
        entries.splice(at + 1..at + 1, guards.iter().map(guard_entry));
    }
    join_kernel_data(&mut entries);
    let aios = aio::dump(&mut cx.tasks, task, &vmas)?;
    let torpor_names = names::of(&vmas);
    cx.tasks[task].vmas = vmas;
    let mm = MmEntry { aios, torpor_names, ..mm_entry(cx, task, entries, flags)? };
    cx.later.add(kind::MM, u64::from(vpid.cast_unsigned()), mm);
    Ok(())
}

/// Writes `pagemap-PID.img` of a task and plans the pages that are its own, to be copied
/// while it runs again or before. Returns the guard pages in each mapping.
fn plan_private(
    cx: &mut Dump<'_>,
    task: usize,
    vmas: &[Vma],
    running: bool,
) -> Result<Vec<Vec<PageSpan>>> {
    let (pid, vpid) = (cx.tasks[task].pid, cx.tasks[task].vpid);
    let id = u64::from(vpid.cast_unsigned());
    let Dump { memory, opts, tracking, tasks, guardian, .. } = cx;
    let mut base = |parent: &ImageDir| {
        in_parent(&mut memory.away, opts.memory.lazy, parent, kind::PAGEMAP, id)
    };
    let tracker = track::begin(tracking, tasks, task, guardian, &mut base)?;
    let pagemap = proc::open(pid, "pagemap")?;
    let source = pages::source_of(pid, running)?;
    let twin = if running { None } else { twin::memory_of(cx, task)? };
    let mut guards = Vec::with_capacity(vmas.len());
    let mut runs: Vec<(Source, PageSpan)> = Vec::new();
    let served = match &source {
        Source::Stopped(memory) if cx.opts.memory.lazy => Some(Source::Served(Arc::clone(memory))),
        _ => None,
    };
    for vma in vmas {
        let census = track::survey(pid, tracker.as_ref(), &pagemap, vma)?;
        cx.stats.pages_scanned += census.scanned;
        guards.push(census.guards);
        let area = as_restored(vma)?;
        let is_left_out = cx.opts.memory.wipe_on_fork && area.advice.wipes_on_fork();
        let pages = match &mut cx.memory.relatives {
            // A page that is in no image was never touched.
            _ if is_left_out => Vec::new(),
            Some(relatives) => {
                relatives.part((pid, vpid.cast_unsigned()), &pagemap, census.pages)?
            }
            None => census.pages,
        };
        let source = match (&served, &twin) {
            (Some(served), _) if lazy::may_wait(&area) => served,
            (_, Some(twin)) if twin::inherits(vma) => twin,
            _ => &source,
        };
        if let Source::Twin(_, pid) = source {
            cx.twins.spare(*pid, pages.iter().filter(|run| !run.is_copied()).copied());
        }
        runs.extend(pages.into_iter().map(|run| (source.clone(), run)));
    }
    track::end(&mut cx.tracking, tracker)?;
    tracing::debug!("task {vpid}: {} runs of pages, {} mappings", runs.len(), vmas.len());
    plan(cx, kind::PAGEMAP, id, runs)?;
    Ok(guards)
}

/// Writes `pagemap-PID.img` and plans the pages of a task that runs on before they are
/// copied. Of shared memory nothing: it can be written by ways that are not tracked.
pub(super) fn pre_dump_pages(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let vmas = std::mem::take(&mut cx.tasks[task].vmas);
    plan_private(cx, task, &vmas, true).map(drop)
}

fn guard_entry(run: &PageSpan) -> VmaEntry {
    VmaEntry {
        start: run.start,
        end: run.end,
        status: status::GUARD,
        fd: -1,
        ..VmaEntry::default()
    }
}

/// Says what becomes of a mapping.
fn log_mapping(vpid: i32, vma: &Vma, entry: &VmaEntry) {
    tracing::debug!(
        "task {vpid}: mapping {:x}-{:x} {}: status {:#x}, flags {:#x}, prot {:#x}, object {}",
        entry.start,
        entry.end,
        vma.map.name,
        entry.status,
        entry.flags,
        entry.prot,
        entry.shmid
    );
}

/// Makes one area of the vDSO's data, which the kernel shows as several since Linux 6.13: a
/// restore has to place them side by side.
fn join_kernel_data(entries: &mut Vec<VmaEntry>) {
    entries.dedup_by(|next, last| {
        let joined = last.status & next.status & status::VVAR != 0 && last.end == next.start;
        if joined {
            last.end = next.end;
            last.torpor_sealed = last.torpor_sealed.or(next.torpor_sealed);
        }
        joined
    });
}

/// Describes a mapping and, if it is the first of its shared object, plans the pages
/// of that.
fn describe(cx: &mut Dump<'_>, task: usize, vma: &Vma) -> Result<VmaEntry> {
    let mut entry = to_entry(vma);
    if vma.is(status::SYSVIPC) {
        let ipc_is_host =
            cx.ns.by_id(cx.tasks[task].ids.ipc_ns_id.unwrap_or(0)).is_none_or(|ns| ns.is_host);
        if ipc_is_host {
            return Err(Error::refused(
                cx.tasks[task].pid,
                format!("SysV shared memory at {:x}", vma.map.start),
                "belongs to the IPC namespace of the host; start the tree in one of its own \
                 (unshare --ipc, afl-fuzz in it)",
            ));
        }
        entry.shmid = vma.map.inode;
        // `mw`: it may be made writable, so it was attached to be written.
        let mode = if vma.has(b"mw") { libc::O_RDWR } else { libc::O_RDONLY };
        entry.fdflags = Some(mode.cast_unsigned());
    } else if vma.is(status::MEMFD) {
        let (id, flags) = files::describe_memfd(cx, task, vma)?;
        entry.shmid = u64::from(id);
        entry.fdflags = Some(flags);
    } else if vma.is(status::IO_URING) {
        entry.shmid = u64::from(cx.kinds.ring_of_mapping(&cx.tasks, task, vma)?);
    } else if vma.is(status::SOCKET) {
        entry.shmid = u64::from(ring::of_mapping(&cx.files, cx.tasks[task].pid, vma)?);
    } else if vma.is(status::FILE_PRIVATE | status::FILE_SHARED) {
        let (id, flags) = files::describe_mapped(cx, task, vma)?;
        entry.shmid = u64::from(id);
        entry.fdflags = Some(flags);
        entry.torpor_flock = cx.kinds.locks.of_mapping(task, vma.map.start);
    } else if vma.is(status::ANON_SHARED) {
        let (id, flags) = files::describe_memfd(cx, task, vma)?;
        entry.shmid = u64::from(id);
        entry.fdflags = Some(flags);
        entry.flags &= !libc::MAP_ANONYMOUS.cast_unsigned();
        entry.status = entry.status & !status::ANON_SHARED | status::FILE_SHARED | status::MEMFD;
    }
    Ok(entry)
}

/// Plans the pages of an object of shared memory, once: `pagemap-shmem-ID.img`,
/// where addresses are offsets into the object.
///
/// # Errors
/// If the kernel does not tell where the object has data; if the image cannot be written.
pub(crate) fn dump_shared(cx: &mut Dump<'_>, id: u64, file: std::fs::File) -> Result<()> {
    let runs = pages::data_runs(&file)?;
    plan_shared(cx, id, runs, &Source::File(Arc::new(file)))
}

/// Plans pages of an object of shared memory, once.
///
/// # Errors
/// If the image cannot be written, or the parent's is damaged.
pub(crate) fn plan_shared(
    cx: &mut Dump<'_>,
    id: u64,
    runs: Vec<PageSpan>,
    source: &Source,
) -> Result<()> {
    if cx.memory.shared.insert(id, ()).is_some() {
        return Ok(());
    }
    let runs: Vec<_> = runs.into_iter().map(|run| (source.clone(), run)).collect();
    let pages: u64 = runs.iter().map(|(_, r)| (r.end - r.start) / PAGE).sum();
    for counter in [&mut cx.stats.shpages_scanned, &mut cx.stats.shpages_written] {
        *counter = Some(counter.unwrap_or(0) + pages);
    }
    plan(cx, kind::SHMEM_PAGEMAP, id, runs)
}

/// What the checkpoint before, which `parent` is, has of an object of memory.
fn in_parent(
    away: &mut Option<Away>,
    lazy: bool,
    parent: &ImageDir,
    kind: Kind,
    id: u64,
) -> Result<Vec<Run>> {
    match away {
        Some(away) => away.sent_before(parent, kind, id),
        // There is no server to be asked: if the restore has no such pages it fails, and the
        // tasks go on here.
        None if lazy => outbox::noted(parent, kind, id),
        None if parent.has(kind, id)? => Ok(Pagemap::read(parent, kind, id)?.runs),
        None => Ok(Vec::new()),
    }
}

/// Writes a pagemap and plans the copying of its pages.
fn plan(cx: &mut Dump<'_>, kind: Kind, id: u64, runs: Vec<(Source, PageSpan)>) -> Result<()> {
    let pages = |which: fn(&PageSpan) -> bool| {
        let runs = runs.iter().map(|(_, run)| run).filter(|run| which(run));
        runs.map(|run| (run.end - run.start) / PAGE).sum::<u64>()
    };
    cx.stats.pages_skipped_parent += pages(|run| run.clean);
    if let Some(found) = &mut cx.stats.torpor_relative_pages {
        *found += pages(|run| run.relative.is_some());
    }
    if let Some(Away::Pages(outbox)) = &mut cx.memory.away {
        cx.memory.bytes += outbox.push(&cx.images, kind, id, runs)?;
        return Ok(());
    }
    cx.memory.last_pages_id += 1;
    let pages_id = cx.memory.last_pages_id;
    let start = if cx.opts.memory.compress.is_some() {
        PagemapWriter::packed
    } else {
        PagemapWriter::create
    };
    let mut pagemap = start(&cx.images, kind, id, pages_id)?;
    let depot = cx.memory.away.as_ref().and_then(Away::depot);
    let target = PagesWriter::create(&cx.images, pages_id, id, cx.opts.memory.compress, depot)?;
    let target = Arc::new(target);
    let mut cutter = Cutter::new(Arc::clone(&target));
    for (source, run) in runs {
        let lazy = matches!(source, Source::Served(_)) && !run.clean;
        let there = to_run(&run);
        pagemap.push(Run { lazy, present: there.present && !lazy, ..there })?;
        if lazy {
            cx.stats.pages_lazy += there.pages;
            cx.memory.lent.push(id, source, run);
        } else if run.is_copied() {
            cutter.push(&source, run);
        }
    }
    pagemap.finish()?;
    let (jobs, bytes) = cutter.finish();
    let (later, now): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(Job::can_wait);
    cx.memory.jobs.extend(now);
    cx.memory.later.extend(later);
    cx.memory.targets.push(target);
    cx.memory.bytes += bytes;
    Ok(())
}

/// Copies the planned pages; those of twins when the others have been.
///
/// # Errors
/// If pages cannot be read or written, or the page server does not take them; if what is done at the same time fails,
/// as `halt` says between two pieces.
pub(crate) fn copy_pages(cx: &mut Dump<'_>, hooks: &mut dyn Hooks, halt: &Halt) -> Result<()> {
    let start = Instant::now();
    if cx.twins.any()
        && !cx.released
        && let Some(away) = &mut cx.memory.away
        && away.keep(halt)?
    {
        return Ok(());
    }
    let total = cx.memory.bytes;
    hooks.progress(cx.memory.copied, total);
    let workers = cx.opts.memory.workers();
    let bytes = total - cx.memory.copied;
    tracing::debug!("copying up to {bytes} bytes of memory, with up to {workers} threads");
    let jobs = std::mem::take(&mut cx.memory.jobs);
    let done = AtomicU64::new(cx.memory.copied);
    let count = |bytes: u64| {
        done.fetch_add(bytes, Ordering::Relaxed);
        halt.check()
    };
    if bytes < LONG && !jobs.iter().any(Job::can_wait) {
        pages::copy(&jobs, workers, &|job| count(job.bytes()))?;
    } else {
        let twins = &mut cx.twins;
        if jobs.iter().any(Job::can_wait) {
            twins.release_spare();
        }
        let copy = |tell: &(dyn Fn(_) + Sync)| {
            pages::copy(&jobs, workers, &|job| {
                tell(job);
                count(job.bytes())
            })
        };
        while_working(copy, |news: Option<&Job>| match news {
            Some(job) => twins.release(job),
            None => hooks.progress(done.load(Ordering::Relaxed), total),
        })?;
    }
    if let Some(away) = cx.memory.away.take() {
        let packed = away.finish(&count)?;
        cx.count_packed(packed);
    }
    cx.memory.copied = done.into_inner();
    hooks.progress(cx.memory.copied, total);
    cx.stats.memdump_time = cx.stats.memdump_time.saturating_add(micros(start.elapsed()));
    cx.stats.memwrite_time = cx.stats.memdump_time;
    cx.memory.jobs = std::mem::take(&mut cx.memory.later);
    if cx.memory.jobs.is_empty() {
        finish(cx)?;
        cx.stats.pages_written = total / PAGE - cx.stats.shpages_written.unwrap_or(0);
    }
    Ok(())
}

/// Completes the pages files.
fn finish(cx: &mut Dump<'_>) -> Result<()> {
    for target in std::mem::take(&mut cx.memory.targets) {
        target.finish(&cx.images)?;
        cx.count_packed(target.packed());
    }
    Ok(())
}

impl Dump<'_> {
    /// Notes memory that was compressed, in the images or on its way.
    pub(super) fn count_packed(&mut self, part: Option<Packed>) {
        let Some(part) = part else { return };
        let stats = &mut self.stats;
        *stats.torpor_compress_from_bytes.get_or_insert_default() += part.from;
        *stats.torpor_compress_to_bytes.get_or_insert_default() += part.to;
        *stats.torpor_compress_time.get_or_insert_default() += u64::from(micros(part.time));
    }
}

/// Memory from which on it is worth telling how far the copying is.
const LONG: u64 = 64 << 20;

/// Lets `work` be done by other threads, and attends to what it tells, and every now and
/// then to nothing: only this thread may call hooks and control tasks.
fn while_working<T: Send>(
    work: impl FnOnce(&(dyn Fn(T) + Sync)) -> Result<()> + Send,
    mut attend: impl FnMut(Option<T>),
) -> Result<()> {
    const INTERVAL: Duration = Duration::from_millis(100);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        // It is heard until it ends.
        let worker = scope.spawn(move || work(&|news| drop(tell.send(news))));
        let mut tick = Instant::now() + INTERVAL;
        loop {
            match told.recv_timeout(tick.saturating_duration_since(Instant::now())) {
                Ok(news) => attend(Some(news)),
                Err(RecvTimeoutError::Timeout) => {
                    attend(None);
                    tick = Instant::now() + INTERVAL;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let panicked = |_| Err(Error::Bug("a copying thread panicked".to_owned()));
        worker.join().unwrap_or_else(panicked)
    })
}

fn mm_entry(
    cx: &mut Dump<'_>,
    task: usize,
    vmas: Vec<VmaEntry>,
    flags: &MmFlags,
) -> Result<MmEntry> {
    let pid = cx.tasks[task].pid;
    let exe_file_id = files::describe_exe(cx, task)?;
    let auxv = proc::bytes(pid, "auxv")?;
    let stat = &cx.tasks[task].stat;
    Ok(MmEntry {
        mm_start_code: stat.start_code,
        mm_end_code: stat.end_code,
        mm_start_data: stat.start_data,
        mm_end_data: stat.end_data,
        mm_start_stack: stat.start_stack,
        mm_start_brk: stat.start_brk,
        mm_brk: flags.brk,
        mm_arg_start: stat.arg_start,
        mm_arg_end: stat.arg_end,
        mm_env_start: stat.env_start,
        mm_env_end: stat.env_end,
        exe_file_id,
        mm_saved_auxv: auxv
            .chunks_exact(8)
            .map(|w| w.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b)))
            .take(AUXV_WORDS)
            .collect(),
        vmas,
        dumpable: Some(flags.dumpable),
        aios: Vec::new(),
        thp_disabled: Some(flags.thp_disabled),
        torpor_thp_flags: flags.thp_flags,
        torpor_mdwe: flags.mdwe,
        torpor_memory_merge: flags.memory_merge.then_some(true),
        torpor_coredump_filter: flags.coredump_filter,
        torpor_pkeys: flags.keys,
        torpor_names: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::hooks::NoHooks;
    use crate::namespace::Namespaces;
    use crate::options::Options;

    /// Files in memory that cannot be saved, say: the tasks stand still for pages that nobody will want.
    #[test]
    fn pages_are_not_copied_to_the_end_where_all_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        let opts = Options { images_dir: dir.path().to_owned(), ..Options::default() };
        let copied = |halt: &Halt| {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&vec![7; 8 * pages::CHUNK], 0).unwrap();
            let runs = vec![PageSpan { end: 8 * pages::CHUNK as u64, ..PageSpan::default() }];
            let images = opts.new_images().unwrap();
            let mut cx = Dump::bare(&opts, images, Namespaces::default());
            plan_shared(&mut cx, 1, runs, &Source::File(Arc::new(file))).unwrap();
            copy_pages(&mut cx, &mut NoHooks, halt)
        };
        let halt = Halt::default();
        copied(&halt).unwrap();
        halt.note(Err(Error::Gone { pid: 1 }));
        let error = copied(&halt).unwrap_err().to_string();
        assert!(error.ends_with("has failed: task 1 is gone"), "{error}");
    }

    #[test]
    fn data_of_the_kernel_is_one_area() {
        let area = |start, end, status| VmaEntry { start, end, status, ..VmaEntry::default() };
        let mut all = vec![
            area(1, 4, status::REGULAR | status::VVAR),
            area(4, 6, status::REGULAR | status::VVAR),
            area(6, 8, status::REGULAR | status::VDSO),
            area(9, 10, status::REGULAR | status::VVAR),
        ];
        join_kernel_data(&mut all);
        let places: Vec<_> = all.iter().map(|v| (v.start, v.end)).collect();
        assert_eq!(places, [(1, 6), (6, 8), (9, 10)]);
    }

    #[test]
    fn news_are_attended_to_while_the_work_goes_on() {
        let (heard, ticks) = (AtomicU64::new(0), AtomicU64::new(0));
        let wait_for = |what: &AtomicU64| {
            while what.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
        };
        let work = |tell: &(dyn Fn(u64) + Sync)| {
            tell(7);
            wait_for(&heard);
            wait_for(&ticks);
            Err(Error::Hook("the end".to_owned()))
        };
        let result = while_working(work, |news| match news {
            Some(news) => heard.store(news, Ordering::Relaxed),
            None => ticks.store(1, Ordering::Relaxed),
        });
        assert!(result.unwrap_err().to_string().contains("the end"));
        assert_eq!(heard.into_inner(), 7);
    }
}
