//! Contexts of kernel AIO (io_setup(2)): the ring of answers.
//!
//! A context is known by the address of its ring, so that it must be there again. The
//! program sees how far it has read (`head`) and how far the kernel has written (`tail`);
//! the kernel counts the tail for itself as well, and believes only that. There is no call
//! to set it: the restore lets the new context answer as many requests to do nothing.
//!
//! The kernel does not tell of requests that are still under way. Those that are answered
//! before the pages are copied are kept, the others are not; the log warns of that.

use std::ops::Range;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_images::kind;
use torpor_images::proto::AioRingEntry;
use torpor_policy::memory::{AioContext, AreaKind, MemoryArea};
use torpor_sys::vm;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{RemoteAddr, Tracee};

use super::vma::{Vma, status};
use crate::dump::tasks::{self as dumped, Tasks};
use crate::error::{Context, Error, Result};
use crate::restore::pages::Pages;
use crate::restore::tasks::Task;
use crate::restore::transport::place_words;

/// `struct aio_ring` (fs/aio.c) before its events: number, size, head, tail, magic,
/// compatible and incompatible features, length of this header.
const HEADER: usize = 32;
const HEADER_LENGTH: u32 = 32;
const MAGIC: u32 = 0xa10a_10a1;
/// Bytes of `struct io_event`.
const EVENT: u64 = 32;
/// Bytes of `struct iocb`.
const IOCB: usize = 64;
/// Requests submitted at once.
const AT_ONCE: u64 = 512;

/// What the header of a ring says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// The number of the context in its process.
    number: u32,
    /// Events that it has room for.
    size: u32,
    tail: u32,
}

impl Header {
    /// `None` if this is no ring that we know.
    fn parse(bytes: &[u8; HEADER]) -> Option<Self> {
        let [number, size, head, tail, magic, _, incompatible, length] =
            std::array::from_fn(|i| u32::from_ne_bytes([0, 1, 2, 3].map(|b| bytes[4 * i + b])));
        let known = (magic, incompatible, length) == (MAGIC, 0, HEADER_LENGTH);
        (known && size > 2 && head < size && tail < size).then_some(Header { number, size, tail })
    }

    /// Bytes that the kernel maps for a ring of this size.
    fn mapped(&self) -> u64 {
        (EVENT * u64::from(self.size) + HEADER as u64).next_multiple_of(super::vma::PAGE)
    }
}

/// Describes the contexts of a task.
///
/// # Errors
/// Refused, if a ring is not whole, or is of another process; if the task has ended.
pub(crate) fn dump(tasks: &mut Tasks, task: usize, vmas: &[Vma]) -> Result<Vec<AioRingEntry>> {
    let mut contexts = Vec::new();
    let pid = tasks[task].pid;
    for ring in vmas.iter().filter(|vma| vma.is(status::AIO_RING)) {
        let (start, len) = (ring.map.start, ring.map.end - ring.map.start);
        let refuse = |reason| Error::refused(pid, format!("the AIO ring at {start:x}"), reason);
        let mut bytes = [0; HEADER];
        let read = vm::read(pid, start, &mut bytes).context(|| format!("read {start:x}"))?;
        let header = Header::parse(&bytes).filter(|h| read == HEADER && h.mapped() == len);
        let header = header.ok_or_else(|| refuse("is mapped in part only, or overwritten"))?;
        // Asked for nothing, a context answers without doing anything.
        let known =
            tasks.remote(task)?.call("io_getevents", (libc::SYS_io_getevents, [start, 0, 0]));
        if known.is_err() {
            if is_inherited(tasks, task, ring) {
                continue;
            }
            return Err(refuse("belongs to a context of another process"));
        }
        // The kernel doubles what was asked for and adds two.
        let nr_req = (header.size - 2) / 2;
        let ring_len = u32::try_from(len).unwrap_or(0);
        tracing::warn!(
            "task {pid}: requests of its AIO context {start:x} that are still under way are lost"
        );
        contexts.push(AioRingEntry { id: start, nr_req, ring_len });
    }
    Ok(contexts)
}

/// Whether a ring is there only because the parent has it: children inherit the mapping,
/// but not the context.
fn is_inherited(tasks: &[dumped::Task], task: usize, ring: &Vma) -> bool {
    let ppid = tasks[task].stat.ppid;
    let parent = tasks.iter().find(|t| t.tgid == ppid);
    let same = |v: &Vma| (v.map.start, v.map.inode) == (ring.map.start, ring.map.inode);
    parent.is_some_and(|t| t.vmas.iter().any(|v| v.is(status::AIO_RING) && same(v)))
}

/// Makes the contexts of a task, whose other memory is in place. The rings that it was
/// born with (`kept`) are its parent's.
///
/// # Errors
/// If the images do not describe a ring; if the kernel refuses a context
/// (`fs.aio-max-nr` limits them); if the task has ended.
pub(crate) fn restore(task: &mut Task, kept: &[MemoryArea]) -> Result<()> {
    let Some(memory) = &task.image.memory else { return Ok(()) };
    let rings = memory.areas.iter().filter(|area| area.kind == AreaKind::AioRing);
    let rings = rings.filter(|area| !kept.contains(area));
    let context = |area: &MemoryArea| memory.contexts.iter().find(|c| c.start == area.start);
    let pairs: Vec<_> = rings.map(|area| (*area, context(area).copied())).collect();
    reserve(task.remote()?, pairs.iter().map(|(area, _)| area))?;
    for (area, context) in pairs {
        let name = kind::MM.file_name(u64::from(task.image.tree.pid));
        let invalid =
            |reason| Error::invalid(&name, format!("the AIO ring at {:x} {reason}", area.start));
        let context = context.ok_or_else(|| invalid("is not described"))?;
        let pages = Arc::clone(&task.image.pages);
        let wanted = saved_header(&pages, &area)?;
        let wanted = wanted.ok_or_else(|| invalid("is none, or has another size"))?;
        let husk = task.remote()?;
        let at = setup(husk, &context)?;
        let number = advance(husk, at, &wanted)?;
        // The context goes with its ring.
        let mremap = syscall::mremap(at..at + area.len(), area.start);
        husk.call("mremap of an AIO ring", mremap)?;
        // The kernel has made one of this size, which its limits let it: images alone could say any.
        husk.write(RemoteAddr(area.start), &saved(&pages, area.range())?)?;
        husk.write(RemoteAddr(area.start), &number.to_ne_bytes())?;
    }
    Ok(())
}

/// Takes the places of the rings, so that the kernel chooses others for the new ones.
fn reserve<'a>(husk: &mut Tracee, rings: impl Iterator<Item = &'a MemoryArea>) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let mut batch = husk.batch();
    for ring in rings {
        batch.must(syscall::mmap_anonymous(ring.range(), ProtFlags::empty(), flags));
    }
    match batch.run()?.first_error() {
        None => Ok(()),
        Some((_, e)) => Err(e).context(|| "mmap for AIO rings".to_owned()),
    }
}

/// What the images say of the ring in a mapping; `None` if it is none, or not of this size.
fn saved_header(pages: &Pages, area: &MemoryArea) -> Result<Option<Header>> {
    let first = saved(pages, area.start..area.start + area.len().min(super::vma::PAGE))?;
    let header = first.first_chunk().and_then(Header::parse);
    Ok(header.filter(|header| header.mapped() == area.len()))
}

/// What the images have in a range, up to the last of its pages that they have.
fn saved(pages: &Pages, range: Range<u64>) -> Result<Vec<u8>> {
    let place = |address: u64| usize::try_from(address - range.start).unwrap_or(usize::MAX);
    let mut content = Vec::new();
    for (stretch, part) in pages.within(range.clone()) {
        content.resize(place(part.end), 0);
        stretch.read(part.start, &mut content[place(part.start)..])?;
    }
    Ok(content)
}

/// Makes a context wherever the kernel likes, and says where.
fn setup(husk: &mut Tracee, context: &AioContext) -> Result<u64> {
    let mut batch = husk.batch();
    let place = batch.space(8);
    let made = batch.call((libc::SYS_io_setup, [u64::from(context.requests), place.addr.0]));
    let out = batch.run()?;
    out.expect(made, || "io_setup (the limit is in /proc/sys/fs/aio-max-nr)".to_owned())?;
    Ok(out.u64_at(place, 0))
}

/// Lets the kernel count to the wanted tail of the context at `at`. Returns its number.
fn advance(husk: &mut Tracee, at: u64, wanted: &Header) -> Result<u32> {
    let mut before = None;
    loop {
        let mut bytes = [0; HEADER];
        husk.read(RemoteAddr(at), &mut bytes)?;
        let now =
            Header::parse(&bytes).filter(|now| now.size == wanted.size && before != Some(now.tail));
        let Some(now) = now else {
            let reason = "AIO rings of this kernel have another size: it counts other processors";
            return Err(Error::invalid("mm", reason));
        };
        match wanted.tail.checked_sub(now.tail) {
            Some(0) => return Ok(now.number),
            Some(left) => answer_nothing(husk, at, u64::from(left).min(AT_ONCE))?,
            None => return Err(Error::invalid("mm", "an AIO context answers what nobody asked")),
        }
        before = Some(now.tail);
    }
}

/// Submits requests to read nothing, which are answered at once, and takes the answers.
fn answer_nothing(husk: &mut Tracee, at: u64, count: u64) -> Result<()> {
    let mut batch = husk.batch();
    let name = batch.cstr("aio").0;
    // All zero but for the descriptor: IOCB_CMD_PREAD of no bytes.
    let request = batch.space(IOCB).addr;
    let requests: Vec<u64> = (0..count).map(|_| request.0).collect();
    let requests = place_words(&mut batch, &requests).0;
    let events = batch.space(usize::try_from(count * EVENT).unwrap_or(0)).addr.0;
    // The husk has no descriptor yet: this one is 0.
    batch.must((libc::SYS_memfd_create, [name, 0]));
    batch.must((libc::SYS_io_submit, [at, count, requests]));
    batch.must((libc::SYS_io_getevents, [at, 0, count, events, 0]));
    batch.call(syscall::close(RemoteFd(0)));
    match batch.run()?.first_error() {
        None => Ok(()),
        Some((_, e)) => Err(e).context(|| "counting up an AIO context".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use torpor_images::ImageDir;
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::proto::VmaEntry;

    use super::*;
    use crate::memory::vma::PAGE;

    /// Nobody reads a ring that is larger than it says.
    #[test]
    fn a_ring_is_as_large_as_its_mapping() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 7).unwrap();
        let first = Run { vaddr: 10 * PAGE, pages: 1, present: true, ..Run::default() };
        map.push(first).unwrap();
        map.push(Run { vaddr: 11 * PAGE, pages: 1 << 20, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let mut file = images.raw_file_create(kind::PAGES, 7).unwrap();
        let mut page = [3_u32, 127, 5, 9, MAGIC, 1, 0, 32].map(u32::to_ne_bytes).concat();
        page.resize(4096, 0);
        file.write_all(&page).unwrap();
        let pages = Pages::load(&images, kind::PAGEMAP, 7).unwrap();
        let header = |pages_of_it: u64| {
            let (start, end) = (10 * PAGE, (10 + pages_of_it) * PAGE);
            let status = status::REGULAR | status::AIO_RING;
            let entry = VmaEntry { start, end, flags: 0x22, status, ..VmaEntry::default() };
            saved_header(&pages, &MemoryArea::of(&entry).unwrap()).unwrap()
        };
        assert_eq!(header(1), Some(Header { number: 3, size: 127, tail: 9 }));
        assert_eq!([header(2), header(1 << 20)], [None, None]);
    }

    #[test]
    fn only_whole_rings_are_known() {
        let header = |words: [u32; 8]| {
            let mut bytes = [0; HEADER];
            bytes.copy_from_slice(words.map(u32::to_ne_bytes).as_flattened());
            Header::parse(&bytes)
        };
        let good = header([3, 127, 5, 9, MAGIC, 1, 0, 32]);
        assert_eq!(good, Some(Header { number: 3, size: 127, tail: 9 }));
        assert_eq!(good.map(|h| h.mapped()), Some(4096));
        assert_eq!(header([3, 127, 5, 127, MAGIC, 1, 0, 32]), None);
        assert_eq!(header([3, 127, 5, 9, MAGIC, 1, 2, 32]), None);
        assert_eq!(header([3, 127, 5, 9, 0, 1, 0, 32]), None);
    }
}
