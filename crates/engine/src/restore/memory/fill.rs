//! The pages of private memory, on all cores.

use std::iter::Peekable;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    let writable = &|vma: &MemoryArea| {
        let own = vma.kind.is_vdso() || vma.kind.is_ring();
        vma.is_private() && !own && !lazy.leaves(vma)
    };
    let vmas = || vmas.iter().filter(move |v| writable(v));
    let there = match there {
        There::Inherited(inherited) if inherited.kept.is_empty() => There::Others,
        there => there,
    };
    tracing::debug!("filling the memory of task {}, with up to {workers} threads", image.vpid());
    let filler = Filler { pid: husk.pid(), there, written: AtomicU64::new(0) };
    let total = parts(wanted, vmas()).map(|part| part.len as u64).sum();
    filler.run(Batches::new(parts(wanted, vmas())), total, workers)?;
    Ok(filler.written.into_inner())
}

/// The pages in mappings. Those of no mapping are the vDSO's, which the kernel provides.
fn parts<'a>(
    pages: &'a Pages,
    vmas: impl Iterator<Item = &'a MemoryArea>,
) -> impl Iterator<Item = Part<'a>> {
    vmas.flat_map(|vma| pages.within(vma.range())).map(|(stretch, range)| {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        Part { vaddr: range.start, len, stretch }
    })
}

/// Pieces that are copied at once, one batch after the other: images can have pages of zeros by the terabyte, and all
/// pieces of these would have no room.
struct Batches<'a, I: Iterator<Item = Part<'a>>> {
    parts: Peekable<I>,
    /// What is left of a part.
    left: Option<Part<'a>>,
}

impl<'a, I: Iterator<Item = Part<'a>>> Batches<'a, I> {
    fn new(parts: I) -> Self {
        Batches { parts: parts.peekable(), left: None }
    }

    /// The next part. It goes on in the next mapping, if the pages do.
    fn part(&mut self) -> Option<Part<'a>> {
        let mut part = self.left.take().or_else(|| self.parts.next())?;
        let goes_on = |part: &Part<'_>, next: &Part<'_>| {
            part.range().end == next.vaddr && std::ptr::eq(part.stretch, next.stretch)
        };
        while let Some(next) = self.parts.next_if(|next| goes_on(&part, next)) {
            part.len += next.len;
        }
        Some(part)
    }
}

impl<'a, I: Iterator<Item = Part<'a>>> Iterator for Batches<'a, I> {
    type Item = Vec<Part<'a>>;

    fn next(&mut self) -> Option<Vec<Part<'a>>> {
        let (mut batch, mut room) = (Vec::new(), CHUNK);
        while batch.len() < MOST {
            let Some(part) = self.part() else { break };
            let len = part.len.min(CHUNK);
            if len > room {
                self.left = Some(part);
                break;
            }
            room -= len;
            batch.push(Part { len, ..part });
            let (vaddr, rest) = (part.vaddr + len as u64, part.len - len);
            self.left = (rest > 0).then_some(Part { vaddr, len: rest, ..part });
        }
        (!batch.is_empty()).then_some(batch)
    }
}

fn bytes_of(batch: &[Part<'_>]) -> usize {
    batch.iter().map(|piece| piece.len).sum()
}

/// Whoever panicked has left nothing half done behind.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies pages into a husk, on all cores.
struct Filler<'a> {
    pid: i32,
    there: There<'a>,
    /// Bytes.
    written: AtomicU64,
}

impl Filler<'_> {
    /// Copies batches, which have `total` bytes.
    fn run<'p>(
        &self,
        batches: impl Iterator<Item = Vec<Part<'p>>> + Send,
        total: u64,
        workers: usize,
    ) -> Result<()> {
        let next = Mutex::new(Some(batches));
        let room = usize::try_from(total).unwrap_or(CHUNK).min(CHUNK);
        // A thread is not worth its start for less.
        if total < 1 << 20 || workers == 1 {
            return self.work(&next, room);
        }
        let failed: Mutex<Result<()>> = Mutex::new(Ok(()));
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    if let Err(e) = self.work(&next, room) {
                        *locked(&next) = None;
                        *locked(&failed) = Err(e);
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes batches, of `room` bytes at most, until there are no more.
    fn work<'p>(
        &self,
        next: &Mutex<Option<impl Iterator<Item = Vec<Part<'p>>>>>,
        room: usize,
    ) -> Result<()> {
        let mut buffer = vec![0u8; room];
        let compares = !matches!(self.there, There::Others);
        let mut other = vec![0u8; if compares { room } else { 0 }];
        let take = || locked(next).as_mut()?.next();
        while let Some(batch) = take() {
            if !compares {
                read_parts(&batch, &mut buffer[..bytes_of(&batch)])?;
                self.put_all(&batch, &buffer)?;
                continue;
            }
            for piece in &batch {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::proto::VmaEntry;
    use torpor_images::{ImageDir, kind};
    use torpor_policy::memory::status::{ANON_PRIVATE, REGULAR};

    use super::*;

    /// Pages of zeros: runs of these addresses.
    fn zeros(runs: &[Range<u64>]) -> Pages {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 7).unwrap();
        for run in runs {
            let (vaddr, pages) = (run.start, (run.end - run.start) / PAGE);
            map.push(Run { vaddr, pages, ..Run::default() }).unwrap();
        }
        map.finish().unwrap();
        Pages::load(&images, kind::PAGEMAP, 7).unwrap()
    }

    fn area(range: Range<u64>) -> MemoryArea {
        let (Range { start, end }, status) = (range, REGULAR | ANON_PRIVATE);
        let flags = 2; // MAP_PRIVATE
        MemoryArea::of(&VmaEntry { start, end, flags, status, ..VmaEntry::default() }).unwrap()
    }

    /// Where the pieces of the first batches are.
    fn first(pages: &Pages, areas: &[MemoryArea], count: usize) -> Vec<Vec<Range<u64>>> {
        let batches = Batches::new(parts(pages, areas.iter())).take(count);
        batches.map(|batch| batch.iter().map(Part::range).collect()).collect()
    }

    /// A few bytes of an image can stand for more pieces than there is memory for.
    #[test]
    fn pieces_are_made_as_they_are_needed() {
        let (start, end, chunk) = (1 << 20, 1 << 46, CHUNK as u64);
        let pages = zeros(std::slice::from_ref(&(start..end)));
        let batches = first(&pages, &[area(start..end)], 3);
        let at = |number: u64| start + number * chunk;
        assert!(batches.iter().all(|batch| batch.len() == 1));
        assert_eq!(batches.concat(), [0, 1, 2].map(|number| at(number)..at(number + 1)));
    }

    #[test]
    fn batches_have_what_mappings_have() {
        let at = |page: u64| (1 << 20) + page * PAGE;
        let page = |page: u64| at(page)..at(page + 1);
        let pages = zeros(&[at(0)..at(100), at(200)..at(201), at(202)..at(203)]);
        // Two neighbours, one that begins within what is there, one without pages, and one with holes.
        let areas =
            [at(1)..at(20), at(20)..at(40), at(90)..at(110), at(150)..at(160), at(200)..at(300)];
        let batches = first(&pages, &areas.map(area), 9);
        assert_eq!(batches.concat(), [at(1)..at(40), at(90)..at(100), page(200), page(202)]);
        // As many small ones as one call copies.
        let runs: Vec<_> = (0..2 * MOST as u64).map(|number| page(2 * number)).collect();
        let batches = first(&zeros(&runs), &[area(at(0)..at(4 * MOST as u64))], 9);
        let sizes: Vec<usize> = batches.iter().map(Vec::len).collect();
        assert_eq!((sizes, batches.concat()), (vec![MOST; 2], runs));
    }
}
