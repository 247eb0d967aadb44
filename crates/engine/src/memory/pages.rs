//! Pages: found without touching holes, copied by all cores.
//!
//! A task's pages go to `pages-N.img` in the order of its pagemap, so the place of
//! each is known before the first is copied and workers need not wait for each other.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use torpor_images::packed::Packer;
use torpor_images::pages::{PagesWriter, Span};
use torpor_sys::ipc::Attached;
use torpor_sys::vm::{self, PageRegion, Scan, page};

use super::changes::Means;
use super::scan;
use super::vma::{PAGE, Vma, status};
use crate::error::{Context, Error, Result};
use crate::proc;

/// A run of pages to be saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSpan {
    /// First address.
    pub start: u64,
    /// Address behind the last page.
    pub end: u64,
    /// They have not been written since changes of them are tracked ([`super::track`]).
    pub clean: bool,
    /// The id in the images of the process that they are saved with ([`super::relatives`]).
    pub relative: Option<u32>,
}

impl PageSpan {
    /// Whether the images get the pages anew: nobody else has them there.
    pub(crate) fn is_copied(&self) -> bool {
        !self.clean && self.relative.is_none()
    }
}

/// What a scan of one mapping found.
#[derive(Debug, Default)]
pub(crate) struct Census {
    /// Pages to be saved, in order.
    pub pages: Vec<PageSpan>,
    /// Guard pages (`MADV_GUARD_INSTALL`), in order.
    pub guards: Vec<PageSpan>,
    /// Number of pages looked at that exist.
    pub scanned: u64,
}

/// Finds the pages of a private mapping that differ from what a fresh mapping of
/// the same file, or of nothing, would show.
///
/// # Errors
/// If the task is gone, or the pagemap may not be scanned or read.
pub(crate) fn census(pagemap: &File, vma: &Vma) -> Result<Census> {
    let mut found = Census::default();
    let whole = vma.is(status::VDSO | status::AIO_RING);
    if vma.is(status::VVAR | status::VSYSCALL) || !vma.is_private() && !whole {
        return Ok(found);
    }
    if whole {
        let (start, end) = (vma.map.start, vma.map.end);
        found.pages.push(PageSpan { start, end, ..PageSpan::default() });
        return Ok(found);
    }
    // What may be dropped at any time (`MAP_DROPPABLE`: state of random number generators) must not
    // be there twice: it comes back empty, and the images do not have it either.
    if vma.has(b"dp") || vma.is_empty == Some(true) && !scan::is_quick() {
        return Ok(found);
    }
    let means = Means::of_this_kernel().ok();
    // To tell pages of files the kernel looks at each page's descriptor, which takes ten times
    // as long as all the rest; without a file there are none.
    let of_file = if vma.has_file() { page::IS_FILE } else { 0 };
    let what = Scan {
        start: vma.map.start,
        end: vma.map.end,
        any_of: page::IS_PRESENT | page::IS_SWAPPED | page::IS_GUARD,
        report: of_file | page::IS_PFNZERO | page::IS_GUARD | means.map_or(0, Means::report),
        ..Scan::default()
    };
    scan::for_each_region(pagemap, &what, |region| {
        let clean = means.is_some_and(|means| means.is_clean(vma, region.categories));
        let (start, end) = (region.start, region.end);
        let place = PageSpan { start, end, clean, relative: None };
        found.scanned += (region.end - region.start) / PAGE;
        if region.categories & page::IS_GUARD != 0 {
            push(&mut found.guards, PageSpan { clean: false, ..place });
        } else if region.categories & (page::IS_FILE | page::IS_PFNZERO) == 0
            || anon_file(vma, region)
        {
            push(&mut found.pages, place);
        }
    })?;
    Ok(found)
}

/// Private pages of a hugetlb mapping count as pages of its file.
fn anon_file(vma: &Vma, region: &PageRegion) -> bool {
    vma.has(b"ht") && region.categories & page::IS_PFNZERO == 0
}

/// Adds a run behind those in `list`, joined with the last one if they are adjacent and
/// alike.
pub(crate) fn push(list: &mut Vec<PageSpan>, place: PageSpan) {
    match list.last_mut() {
        Some(last) if *last == (PageSpan { start: last.start, end: place.start, ..place }) => {
            last.end = place.end;
        }
        _ => list.push(place),
    }
}

/// Where pages are copied from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A file of shared memory.
    File(Arc<File>),
    /// The memory of a process that is stopped.
    Stopped(Arc<File>),
    /// The memory of a twin, and its pid: to be copied when its original runs on.
    Twin(Arc<File>, i32),
    /// The memory of a process that stays stopped until a lazy restore has asked for it: not to
    /// be copied at all.
    Served(Arc<File>),
    /// The memory of a process that runs on and may have less of it by now.
    Running(Arc<File>),
    /// A System V segment, by offset: its last page can hold more than its file shows.
    Segment(Arc<Attached>),
}

/// A stretch of a pages file and the memory that goes there.
#[derive(Debug)]
pub(crate) struct Job {
    source: Source,
    ranges: Vec<(u64, usize)>,
    target: Arc<PagesWriter>,
    span: Span,
}

impl Job {
    /// Whether it is for when the tree runs on.
    pub(crate) fn can_wait(&self) -> bool {
        self.twin().is_some()
    }

    /// The pid of the twin whose memory is copied.
    pub(crate) fn twin(&self) -> Option<i32> {
        if let Source::Twin(_, pid) = self.source { Some(pid) } else { None }
    }

    /// The memory that is copied: addresses and lengths.
    pub(crate) fn ranges(&self) -> &[(u64, usize)] {
        &self.ranges
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.1 as u64).sum()
    }
}

/// Bytes copied at once: two such buffers stay in a core's second-level cache.
pub(crate) const CHUNK: usize = 512 * 1024;
/// The nice value of those who copy while the tree runs: a tenth of the share that the tree
/// has, enough to come to an end on a busy machine.
const NICE: i32 = 10;
/// Ranges read at once (`IOV_MAX`).
const MAX_RANGES: usize = 1024;

/// Cuts runs of pages into jobs.
#[derive(Debug)]
pub(crate) struct Cutter {
    /// Where from, and which memory goes there, in the order of the file.
    parts: Vec<(Source, Vec<(u64, usize)>)>,
    target: Arc<PagesWriter>,
}

impl Cutter {
    /// Pages that go to `target` from its start on.
    pub(crate) fn new(target: Arc<PagesWriter>) -> Self {
        Cutter { parts: Vec::new(), target }
    }

    /// Adds a run of pages.
    pub(crate) fn push(&mut self, source: &Source, run: PageSpan) {
        let mut at = run.start;
        while at < run.end {
            let left = usize::try_from(run.end - at).unwrap_or(CHUNK);
            let room = self.room(source);
            let len = left.min(room);
            match self.parts.last_mut() {
                Some((_, ranges)) if room < CHUNK => match ranges.last_mut() {
                    Some(last) if last.0 + last.1 as u64 == at => last.1 += len,
                    _ => ranges.push((at, len)),
                },
                _ => self.parts.push((source.clone(), vec![(at, len)])),
            }
            at += len as u64;
        }
    }

    /// Bytes that still fit into the last job; a whole chunk if a new one is due.
    fn room(&self, source: &Source) -> usize {
        let Some((last, ranges)) = self.parts.last() else { return CHUNK };
        let used: usize = ranges.iter().map(|r| r.1).sum();
        let same = match (last, source) {
            (Source::File(a), Source::File(b))
            | (Source::Stopped(a), Source::Stopped(b))
            | (Source::Served(a), Source::Served(b))
            | (Source::Twin(a, _), Source::Twin(b, _))
            | (Source::Running(a), Source::Running(b)) => Arc::ptr_eq(a, b),
            (Source::Segment(a), Source::Segment(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        if !same || used >= CHUNK || ranges.len() >= MAX_RANGES { CHUNK } else { CHUNK - used }
    }

    /// The jobs and the number of bytes that they copy.
    pub(crate) fn finish(self) -> (Vec<Job>, u64) {
        let mut bytes = 0;
        let jobs = self.parts.into_iter().map(|(source, ranges)| {
            let len = ranges.iter().map(|r| r.1 as u64).sum::<u64>();
            bytes += len;
            let span = self.target.span(len / PAGE);
            Job { source, ranges, target: Arc::clone(&self.target), span }
        });
        (jobs.collect(), bytes)
    }
}

/// Copies everything, with at most `workers` threads.
/// `done` is told each finished job, from any thread, and says whether to go on.
///
/// # Errors
/// If pages cannot be read or written, or `done` fails: the error that came first. The other workers stop then.
pub(crate) fn copy<'j>(
    jobs: &'j [Job],
    workers: usize,
    done: &(dyn Fn(&'j Job) -> Result<()> + Sync),
) -> Result<()> {
    let workers = workers.min(jobs.len());
    let runs_on = |job: &Job| matches!(job.source, Source::Twin(..) | Source::Running(_));
    let beside_the_tree = jobs.iter().any(runs_on);
    if workers <= 1 && !beside_the_tree {
        return work(jobs, &AtomicUsize::new(0), done);
    }
    let next = AtomicUsize::new(0);
    let work = |next| {
        // The tree comes first. Of threads on Linux each has a nice value of its own.
        if beside_the_tree && let Err(e) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!("setpriority: {e}");
        }
        work(jobs, next, done)
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(|| work(&next))).collect();
        handles
            .into_iter()
            .map(|h| {
                h.join().unwrap_or_else(|_| Err(Error::Bug("a copying thread panicked".to_owned())))
            })
            .fold(Ok(()), Result::and)
    })
}

fn work<'j>(
    jobs: &'j [Job],
    next: &AtomicUsize,
    done: &(dyn Fn(&'j Job) -> Result<()> + Sync),
) -> Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    let mut packer = Packer::default();
    while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
        let len: usize = job.ranges.iter().map(|range| range.1).sum();
        let copied = read(&job.source, &job.ranges, &mut buffer[..len]).and_then(|()| {
            let runs: Vec<_> =
                job.ranges.iter().map(|&(at, len)| (at, len as u64 / PAGE)).collect();
            Ok(job.target.write(&job.span, &runs, &mut buffer[..len], &mut packer)?)
        });
        if let Err(e) = copied.and_then(|()| done(job)) {
            next.store(jobs.len(), Ordering::Relaxed);
            return Err(e);
        }
    }
    Ok(())
}

/// Reads `ranges` (addresses and lengths), which fill `buffer`.
///
/// # Errors
/// If the task is gone, or not all of that is there.
pub(crate) fn read(source: &Source, ranges: &[(u64, usize)], buffer: &mut [u8]) -> Result<()> {
    match source {
        Source::Segment(attached) => {
            let at = |&(offset, len): &(u64, usize)| (attached.address() + offset, len);
            let ranges: Vec<_> = ranges.iter().map(at).collect();
            read_memory(rustix::process::getpid().as_raw_nonzero().get(), &ranges, buffer)
        }
        Source::File(file) => read_each(ranges, buffer, |part, at| read_to_end(file, part, at)),
        // The kernel shows no memory at all of a process that has been killed.
        Source::Stopped(file) | Source::Twin(file, _) | Source::Served(file) => {
            read_each(ranges, buffer, |part, at| file.read_exact_at(part, at))
        }
        Source::Running(file) => read_each(ranges, buffer, |part, at| read_what_is(file, part, at)),
    }
}

fn read_each(
    ranges: &[(u64, usize)],
    mut buffer: &mut [u8],
    mut read: impl FnMut(&mut [u8], u64) -> std::io::Result<()>,
) -> Result<()> {
    for &(address, len) in ranges {
        let (part, rest) = buffer.split_at_mut(len);
        read(part, address).context(|| format!("read memory at {address:x}"))?;
        buffer = rest;
    }
    Ok(())
}

/// As [`read_to_end`]; what is not mapped any more is zero, too. Nobody will miss it: the
/// next dump does not refer to pages that are not there.
fn read_what_is(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
    let page = usize::try_from(PAGE).unwrap_or(4096);
    let mut at = 0;
    while at < buffer.len() {
        match file.read_at(&mut buffer[at..], offset + at as u64) {
            Ok(0) => {
                buffer[at..].fill(0);
                break;
            }
            Ok(n) => at += n,
            Err(e) if e.raw_os_error() == Some(libc::EIO) => {
                let end = (at / page + 1) * page;
                buffer[at..end].fill(0);
                at = end;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fills `buffer` from `offset`; what lies behind the end of the file is zero.
fn read_to_end(file: &File, mut buffer: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !buffer.is_empty() {
        match file.read_at(buffer, offset)? {
            0 => {
                buffer.fill(0);
                break;
            }
            n => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}

fn read_memory(pid: i32, ranges: &[(u64, usize)], buffer: &mut [u8]) -> Result<()> {
    let first = ranges.first().map_or(0, |r| r.0);
    let what = || format!("read memory of task {pid} at {first:x}");
    let n = vm::read_ranges(pid, ranges, buffer).context(what)?;
    if n == buffer.len() {
        return Ok(());
    }
    Err(std::io::Error::from_raw_os_error(libc::EFAULT)).context(what)
}

/// Where the pages of a task can be read: its `/proc/PID/mem`. process_vm_readv(2) would
/// pin the pages, for which the kernel ends their sharing with relatives, and needs twice the
/// time; nor can it read what the task itself may not.
///
/// With `running` the pages are copied when the task runs again.
///
/// # Errors
/// If the task is gone, or its memory may not be opened.
pub(crate) fn source_of(pid: i32, running: bool) -> Result<Source> {
    let memory = Arc::new(proc::open(pid, "mem")?);
    Ok(if running { Source::Running(memory) } else { Source::Stopped(memory) })
}

/// The stretches of a file of shared memory that hold data.
///
/// # Errors
/// If the file does not tell its length or where its data is.
pub(crate) fn data_runs(file: &File) -> Result<Vec<PageSpan>> {
    use rustix::fs::SeekFrom;
    let mut runs = Vec::new();
    let size =
        rustix::fs::fstat(file.as_fd()).context(|| "fstat".to_owned())?.st_size.cast_unsigned();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            // hugetlbfs knows no holes.
            Err(rustix::io::Errno::INVAL) => {
                return Ok(vec![PageSpan { start: 0, end: size, ..PageSpan::default() }]);
            }
            Err(e) => return Err(e).context(|| "SEEK_DATA".to_owned()),
        };
        let end =
            rustix::fs::seek(file, SeekFrom::Hole(start)).context(|| "SEEK_HOLE".to_owned())?;
        let (start, end) = (start & !(PAGE - 1), end.next_multiple_of(PAGE));
        push(&mut runs, PageSpan { start, end, ..PageSpan::default() });
        at = end;
    }
    Ok(runs)
}
