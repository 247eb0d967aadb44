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
use crate::restore::pages::{Pages, Stretch};
use crate::restore::tasks::Task;

/// Bytes copied at once.
pub(super) const CHUNK: usize = 256 * 1024;

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
    filler.run(&pieces, workers)?;
    Ok(filler.written.into_inner())
}

/// A part of a stretch of pages.
#[derive(Debug, Clone, Copy)]
struct Piece<'a> {
    vaddr: u64,
    len: usize,
    stretch: &'a Stretch,
}

/// Cuts the pages into pieces. Those of no mapping are the vDSO's, which the kernel
/// provides.
fn cut<'a>(pages: &'a Pages, vmas: impl Iterator<Item = &'a MemoryArea>) -> Vec<Piece<'a>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    for vma in vmas {
        for (stretch, range) in pages.within(vma.range()) {
            let mut at = range.start;
            while at < range.end {
                let left = usize::try_from(range.end - at).unwrap_or(CHUNK);
                // A piece goes on in the next mapping, if the pages do.
                let len = match pieces.last_mut() {
                    Some(last) if last.goes_on_at(at, stretch) => {
                        let len = left.min(CHUNK - last.len);
                        last.len += len;
                        len
                    }
                    _ => {
                        let len = left.min(CHUNK);
                        pieces.push(Piece { vaddr: at, len, stretch });
                        len
                    }
                };
                at += len as u64;
            }
        }
    }
    pieces
}

impl Piece<'_> {
    fn range(&self) -> Range<u64> {
        self.vaddr..self.vaddr + self.len as u64
    }

    /// Whether the pages of `stretch` at `address` follow it, and there is room for some.
    fn goes_on_at(&self, address: u64, stretch: &Stretch) -> bool {
        self.vaddr + self.len as u64 == address
            && std::ptr::eq(self.stretch, stretch)
            && self.len < CHUNK
    }
}

/// Copies pages into a husk, on all cores.
struct Filler<'a> {
    pid: i32,
    there: There<'a>,
    /// Bytes.
    written: AtomicU64,
}

impl Filler<'_> {
    fn run(&self, pieces: &[Piece<'_>], workers: usize) -> Result<()> {
        let total: usize = pieces.iter().map(|p| p.len).sum();
        let next = AtomicUsize::new(0);
        // A thread is not worth its start for less.
        if total < 1 << 20 || workers == 1 {
            return self.work(pieces, &next);
        }
        let failed: Mutex<Result<()>> = Mutex::new(Ok(()));
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    if let Err(e) = self.work(pieces, &next) {
                        next.store(pieces.len(), Ordering::Relaxed);
                        if let Ok(mut failed) = failed.lock() {
                            *failed = Err(e);
                        }
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes pieces, several small ones at a time, until there are no more.
    fn work(&self, pieces: &[Piece<'_>], next: &AtomicUsize) -> Result<()> {
        let largest = pieces.iter().map(|piece| piece.len).max().unwrap_or(0);
        let mut buffer = vec![0u8; largest];
        let compares = !matches!(self.there, There::Others);
        let mut other = vec![0u8; if compares { largest } else { 0 }];
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = &mut buffer[..piece.len];
            match &self.there {
                There::Inherited(inherited) if inherited.has(piece) => continue,
                _ => piece.stretch.read(piece.vaddr, bytes)?,
            }
            match &self.there {
                There::Others => self.put(piece.vaddr, bytes)?,
                There::Inherited(inherited) => {
                    let other = &mut other[..piece.len];
                    let known = inherited.read(piece.vaddr, other)?;
                    self.put_changed(piece.vaddr, bytes, (other, &known))?;
                }
                There::Alike => {
                    let other = &mut other[..piece.len];
                    let known = self.look(piece.vaddr, other);
                    self.put_changed(piece.vaddr, bytes, (other, &known))?;
                }
            }
        }
        Ok(())
    }

    /// Reads what the husk has at `vaddr`; says for each page whether it could be read.
    fn look(&self, vaddr: u64, out: &mut [u8]) -> Vec<bool> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let read = vm::read(self.pid, vaddr, out).unwrap_or(0);
        (0..out.len() / page).map(|at| (at + 1) * page <= read).collect()
    }

    fn put(&self, vaddr: u64, bytes: &[u8]) -> Result<()> {
        let n = vm::write(self.pid, vaddr, bytes)
            .context(|| format!("write memory of task {} at {vaddr:x}", self.pid))?;
        self.written.fetch_add(n as u64, Ordering::Relaxed);
        if n == bytes.len() {
            return Ok(());
        }
        Err(Error::Os {
            what: format!("write memory of task {} at {vaddr:x}", self.pid),
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
                    self.put(vaddr + start as u64, &bytes[start..at])?;
                }
                start = at + page;
            }
            at += page;
        }
        if at > start {
            self.put(vaddr + start as u64, &bytes[start..at])?;
        }
        Ok(())
    }
}

impl Inherited<'_> {
    /// Whether the images say that a piece is just what the parent has.
    fn has(&self, piece: &Piece<'_>) -> bool {
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
