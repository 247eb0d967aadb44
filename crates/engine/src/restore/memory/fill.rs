//! The pages of private memory, on all cores.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use torpor_policy::memory::MemoryArea;
use torpor_sys::vm;
use torpor_tracee::Tracee;

use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::ranges::gaps;
use crate::restore::lazy::Lazy;
use crate::restore::pages::{Pages, Part, Stretch, read_parts};
use crate::restore::tasks::Task;

/// Bytes copied at once.
pub(super) const CHUNK: usize = 256 * 1024;
/// Pieces copied at once: of a round that has changed pages here and there each is one page.
const MOST: usize = 64;

/// What a husk has before it is filled: pages of its parent, or of its children's.
#[derive(Clone, Copy)]
pub(super) struct Inherited<'a> {
    /// The pages, of which it has those that lie in `kept`.
    pub pages: &'a Pages,
    /// Mappings, in order.
    pub kept: &'a [MemoryArea],
}

/// What a husk has where pages are to be filled in.
#[derive(Clone, Copy)]
pub(super) enum There<'a> {
    /// Nothing, or other pages.
    Others,
    /// Pages of others, many of which may be the same.
    Inherited(Inherited<'a>),
    /// A copy of what another task has, most of which may be the same. It is not known what it is.
    Alike,
}

/// Drops the inherited pages that the task is not to have: they read as zeroes, or as
/// the file, again.
///
/// # Errors
/// If the husk is gone, or madvise(2) fails in it.
pub(super) fn drop_absent(
    husk: &mut Tracee,
    wanted: &Pages,
    inherited: Inherited<'_>,
) -> Result<()> {
    let mut absent = Vec::new();
    for vma in inherited.kept.iter().filter(|v| v.is_private()) {
        for (_, range) in inherited.pages.within(vma.range()) {
            let mine = wanted.within(range.clone()).map(|(_, mine)| mine);
            absent.extend(gaps(&range, mine));
        }
    }
    if absent.is_empty() {
        return Ok(());
    }
    Ok(husk.discard(&absent)?)
}

/// Fills those of the mappings `vmas` that are private with the `wanted` pages. Pages that are the
/// same as what was inherited stay shared, and those that the task is not to have have been dropped.
/// Returns how many bytes were written.
///
/// # Errors
/// If the husk has ended or its memory cannot be written; if pages cannot be read, or are not those
/// that were sealed.
pub(super) fn fill(
    task: &Task,
    lazy: &Lazy,
    workers: usize,
    wanted: &Pages,
    vmas: &[MemoryArea],
    there: There<'_>,
) -> Result<u64> {
    let image = &task.image;
    let husk = task.threads.first().ok_or(Error::Gone { pid: image.vpid() })?;
    let writable = |vma: &MemoryArea| {
        let own = vma.kind.is_vdso() || vma.kind.is_ring();
        vma.is_private() && !own && !lazy.leaves(vma)
    };
    let vmas = vmas.iter().filter(|v| writable(v));
    let there = match there {
        There::Inherited(inherited) if inherited.kept.is_empty() => There::Others,
        there => there,
    };
    let pieces = cut(wanted, vmas);
    tracing::debug!("filling the memory of task {}, with up to {workers} threads", image.vpid());
    let filler = Filler { pid: husk.pid(), there, written: AtomicU64::new(0) };
    filler.run(&batches(&pieces), workers)?;
    Ok(filler.written.into_inner())
}

/// Cuts the pages into pieces. Those of no mapping are the vDSO's, which the kernel
/// provides.
fn cut<'a>(pages: &'a Pages, vmas: impl Iterator<Item = &'a MemoryArea>) -> Vec<Part<'a>> {
    let mut pieces: Vec<Part<'_>> = Vec::new();
    for vma in vmas {
        for (stretch, range) in pages.within(vma.range()) {
            let mut at = range.start;
            while at < range.end {
                let left = usize::try_from(range.end - at).unwrap_or(CHUNK);
                // A piece goes on in the next mapping, if the pages do.
                let len = match pieces.last_mut() {
                    Some(last) if goes_on_at(last, at, stretch) => {
                        let len = left.min(CHUNK - last.len);
                        last.len += len;
                        len
                    }
                    _ => {
                        let len = left.min(CHUNK);
                        pieces.push(Part { vaddr: at, len, stretch });
                        len
                    }
                };
                at += len as u64;
            }
        }
    }
    pieces
}

/// Whether the pages of `stretch` at `address` follow a piece, and there is room for some.
fn goes_on_at(piece: &Part<'_>, address: u64, stretch: &Stretch) -> bool {
    piece.range().end == address && std::ptr::eq(piece.stretch, stretch) && piece.len < CHUNK
}

/// Puts pieces together that are copied at once.
fn batches<'p, 'a>(mut pieces: &'p [Part<'a>]) -> Vec<&'p [Part<'a>]> {
    let mut all = Vec::new();
    while !pieces.is_empty() {
        let mut len = 0;
        let fits = |piece: &&Part<'_>| {
            len += piece.len;
            len <= CHUNK
        };
        let count = pieces.iter().take(MOST).take_while(fits).count();
        let (batch, others) = pieces.split_at(count.max(1));
        all.push(batch);
        pieces = others;
    }
    all
}

fn bytes_of(batch: &[Part<'_>]) -> usize {
    batch.iter().map(|piece| piece.len).sum()
}

/// Copies pages into a husk, on all cores.
struct Filler<'a> {
    pid: i32,
    there: There<'a>,
    /// Bytes.
    written: AtomicU64,
}

impl Filler<'_> {
    fn run(&self, batches: &[&[Part<'_>]], workers: usize) -> Result<()> {
        let total: usize = batches.iter().map(|batch| bytes_of(batch)).sum();
        let next = AtomicUsize::new(0);
        // A thread is not worth its start for less.
        if total < 1 << 20 || workers == 1 {
            return self.work(batches, &next);
        }
        let failed: Mutex<Result<()>> = Mutex::new(Ok(()));
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    if let Err(e) = self.work(batches, &next) {
                        next.store(batches.len(), Ordering::Relaxed);
                        if let Ok(mut failed) = failed.lock() {
                            *failed = Err(e);
                        }
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes batches until there are no more.
    fn work(&self, batches: &[&[Part<'_>]], next: &AtomicUsize) -> Result<()> {
        let largest = batches.iter().map(|batch| bytes_of(batch)).max().unwrap_or(0);
        let mut buffer = vec![0u8; largest];
        let compares = !matches!(self.there, There::Others);
        let mut other = vec![0u8; if compares { largest } else { 0 }];
        while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !compares {
                read_parts(batch, &mut buffer[..bytes_of(batch)])?;
                self.put_all(batch, &buffer)?;
                continue;
            }
            for piece in *batch {
                self.copy_changed(piece, &mut buffer[..piece.len], &mut other[..piece.len])?;
            }
        }
        Ok(())
    }

    /// Copies the pages of a piece that differ from those that are there.
    fn copy_changed(&self, piece: &Part<'_>, bytes: &mut [u8], other: &mut [u8]) -> Result<()> {
        let known = match &self.there {
            There::Inherited(inherited) if inherited.has(piece) => return Ok(()),
            There::Inherited(inherited) => inherited.read(piece.vaddr, other)?,
            There::Alike | There::Others => self.look(piece.vaddr, other),
        };
        piece.read(bytes)?;
        self.put_changed(piece.vaddr, bytes, (other, &known))
    }

    /// Reads what the husk has at `vaddr`; says for each page whether it could be read.
    fn look(&self, vaddr: u64, out: &mut [u8]) -> Vec<bool> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let read = vm::read(self.pid, vaddr, out).unwrap_or(0);
        (0..out.len() / page).map(|at| (at + 1) * page <= read).collect()
    }

    /// Writes pieces, whose bytes lie one behind the other.
    fn put_all(&self, pieces: &[Part<'_>], mut bytes: &[u8]) -> Result<()> {
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (own, others) = bytes.split_at(piece.len);
            parts.push((piece.vaddr, own));
            bytes = others;
        }
        self.put(&parts)
    }

    fn put(&self, parts: &[(u64, &[u8])]) -> Result<()> {
        let wanted: usize = parts.iter().map(|(_, bytes)| bytes.len()).sum();
        let what = |at: u64| format!("write memory of task {} at {at:x}", self.pid);
        let n = vm::write_parts(self.pid, parts);
        let n = n.context(|| what(parts.first().map_or(0, |&(at, _)| at)))?;
        self.written.fetch_add(n as u64, Ordering::Relaxed);
        if n == wanted {
            return Ok(());
        }
        let mut left = n;
        let stopped = parts.iter().find(|(_, bytes)| {
            let is_whole = left >= bytes.len();
            left = left.saturating_sub(bytes.len());
            !is_whole
        });
        Err(Error::Os {
            what: what(stopped.map_or(0, |&(at, _)| at)),
            source: std::io::Error::from_raw_os_error(libc::EFAULT),
        })
    }

    /// Writes the pages that differ from those that are there, as far as these are known.
    fn put_changed(
        &self,
        vaddr: u64,
        bytes: &[u8],
        (other, known): (&[u8], &[bool]),
    ) -> Result<()> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut start = 0;
        let mut at = 0;
        while at < bytes.len() {
            let same = known[at / page] && bytes[at..at + page] == other[at..at + page];
            if same {
                if at > start {
                    self.put(&[(vaddr + start as u64, &bytes[start..at])])?;
                }
                start = at + page;
            }
            at += page;
        }
        if at > start {
            self.put(&[(vaddr + start as u64, &bytes[start..at])])?;
        }
        Ok(())
    }
}

impl Inherited<'_> {
    /// Whether the images say that a piece is just what the parent has.
    fn has(&self, piece: &Part<'_>) -> bool {
        let mut at = piece.vaddr;
        for (stretch, Range { start, end }) in self.within(piece.range()) {
            if start != at || stretch.origin() != piece.stretch.origin() {
                return false;
            }
            at = end;
        }
        at == piece.range().end
    }

    /// What the parent has of a range in mappings that were kept.
    fn within(&self, range: Range<u64>) -> impl Iterator<Item = (&Stretch, Range<u64>)> {
        let Range { start, end } = range;
        let first = self.kept.partition_point(|vma| vma.end <= start);
        let kept = self.kept[first..].iter().take_while(move |vma| vma.start < end);
        kept.flat_map(move |vma| self.pages.within(vma.start.max(start)..vma.end.min(end)))
    }

    /// Reads what the parent has at `vaddr`; says for each page whether it has any.
    fn read(&self, vaddr: u64, out: &mut [u8]) -> Result<Vec<bool>> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut known = vec![false; out.len() / page];
        for (stretch, Range { start, end }) in self.within(vaddr..vaddr + out.len() as u64) {
            let at = usize::try_from(start - vaddr).unwrap_or(0);
            let len = usize::try_from(end - start).unwrap_or(0);
            stretch.read(start, &mut out[at..at + len])?;
            known[at / page..(at + len) / page].fill(true);
        }
        Ok(known)
    }
}
