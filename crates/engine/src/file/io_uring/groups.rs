//! Rings of buffers that requests choose from (`IORING_REGISTER_PBUF_RING`).
//!
//! Such a ring is memory of the program, which puts buffers into it; the kernel takes the next one for a request,
//! and counts them. It keeps the page frames of the ring and not its address: that is where the program has these
//! frames. A restore registers the ring there, and takes as many buffers as were taken, each by a request that
//! reads from an eventfd: those count among the ones that do nothing.

use std::fs::File;
use std::ops::Range;

use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use torpor_images::proto::TorporIoUringGroup;
use torpor_policy::{BufferGroup, IoUring};
use torpor_sys::io_uring::PBUF_STATUS;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{RemoteAddr, Tracee};

use super::inside::{HeldGroup, KernelView};
use crate::error::{Error, Result};
use crate::file::Found;
use crate::memory::frames;
use crate::memory::vma::{PAGE, Vma, status};
use crate::proc;

/// `IORING_REGISTER_PBUF_RING`, and its flag for buffers of which parts are taken.
const REGISTER_PBUF_RING: u64 = 22;
const PARTS: u64 = 2;
/// How much memory is searched at a time.
const AT_ONCE: u64 = 1 << 30;
/// The most buffers that a ring has room for.
const MAX_ENTRIES: u32 = 1 << 15;
/// `struct io_uring_buf`, and where in the first one the end of all is.
const BUFFER: usize = 16;
const TAIL: usize = 14;
/// `struct io_uring_sqe`: code, flags, length, and group; the request to read, and the flag that it takes a buffer.
const LENGTH: usize = 24;
const GROUP: usize = 40;
const READ: u8 = 22;
const BUFFER_SELECT: u8 = 1 << 5;
/// How many bytes the count of an eventfd has.
const COUNT: u8 = 8;
/// `struct io_uring_buf_status`, and where in it the next buffer is.
const STATUS: usize = 40;
const STATUS_HEAD: usize = 4;

/// The groups of buffers of an instance that has taken `requests`; its task has the mappings `vmas`. `None` if there
/// is one that cannot be kept, or this kernel is another one.
///
/// # Errors
/// If the task is gone.
pub(super) fn look(
    view: &KernelView,
    found: &Found,
    vmas: &[Vma],
    requests: u32,
) -> Result<Option<Vec<TorporIoUringGroup>>> {
    let held = view.object(&found.file).and_then(|instance| view.groups(instance));
    let Some(held) = held else { return Ok(None) };
    // A request may take several (`IORING_RECVSEND_BUNDLE`).
    let taken: u64 = held.iter().map(|group| u64::from(group.head)).sum();
    if taken > requests.into() {
        return Ok(None);
    }
    if held.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let pagemap = proc::open(found.pid, "pagemap")?;
    Ok(held.iter().map(|group| placed(&pagemap, vmas, group)).collect())
}

/// A group with the address that it has.
fn placed(pagemap: &File, vmas: &[Vma], group: &HeldGroup) -> Option<TorporIoUringGroup> {
    let HeldGroup { number, entries, head, parts, frames } = group;
    let address = place_of(pagemap, vmas, frames)?;
    let parts = parts.then_some(true);
    Some(TorporIoUringGroup { number: *number, address, entries: *entries, head: *head, parts })
}

/// Where a task has some page frames one after the other, in memory that it can write, and nobody outside of the tree: a restore
/// takes no others. A ring is in a small mapping as a rule: these come first.
fn place_of(pagemap: &File, vmas: &[Vma], wanted: &[u64]) -> Option<u64> {
    let is_of_tree = |vma: &&Vma| {
        let is_new = vma.is(status::ANON_SHARED | status::MEMFD) && !vma.is(status::SYSVIPC);
        vma.map.prot & libc::PROT_WRITE != 0 && (vma.is_private() || is_new)
    };
    let writable = vmas.iter().filter(is_of_tree).map(|vma| &vma.map);
    let mut ranges: Vec<Range<u64>> = writable.map(|map| map.start..map.end).collect();
    ranges.sort_by_key(|range| range.end - range.start);
    // What begins in one part may end in the next.
    let beyond = u64::try_from(wanted.len()).ok()? * PAGE;
    let parts = ranges.into_iter().flat_map(|range| {
        let starts =
            (range.start..range.end).step_by(usize::try_from(AT_ONCE).unwrap_or(usize::MAX));
        starts.map(move |start| start..range.end.min(start + AT_ONCE + beyond))
    });
    let in_part = |part: Range<u64>| {
        let entries = frames::entries(pagemap, &part).ok()?;
        let all: Vec<Option<u64>> = entries.into_iter().map(frames::Entry::frame).collect();
        let are_there =
            |some: &[Option<u64>]| some.iter().copied().eq(wanted.iter().copied().map(Some));
        let page = all.windows(wanted.len().max(1)).position(are_there)?;
        Some(part.start + u64::try_from(page).ok()? * PAGE)
    };
    parts.into_iter().find_map(in_part)
}

/// How many calls it takes to take as many buffers as were taken.
pub(super) fn calls(groups: &[BufferGroup], at_once: u32) -> u32 {
    let calls = |group: &BufferGroup| group.head / group.entries.min(at_once).max(1) + 1;
    groups.iter().map(calls).fold(0, u32::saturating_add)
}

/// Whether an instance that has taken `requests` can have these groups.
pub(super) fn are_groups(groups: &[BufferGroup], requests: u32) -> bool {
    let is_one = |group: &BufferGroup| {
        group.number <= u16::MAX.into()
            && group.head <= u16::MAX.into()
            && group.entries.is_power_of_two()
            && group.entries <= MAX_ENTRIES
            && group.address.is_multiple_of(PAGE)
    };
    let taken: u64 = groups.iter().map(|group| u64::from(group.head)).sum();
    groups.iter().all(is_one) && taken <= requests.into()
}

/// Whether each of these groups is in one mapping that its task can write to: `writable` has the addresses of those.
pub(super) fn are_in(groups: &[BufferGroup], writable: &[Range<u64>]) -> bool {
    let is_in = |group: &BufferGroup| {
        let end = group.address.checked_add(group.size());
        let has = |range: &Range<u64>| {
            range.start <= group.address && end.is_some_and(|end| end <= range.end)
        };
        writable.iter().any(has)
    };
    groups.iter().all(is_in)
}

/// Registers the groups that an instance, descriptor `fd` of a husk, had.
///
/// # Errors
/// If the kernel does not take one; if the husk is gone.
pub(super) fn register(husk: &mut Tracee, fd: u64, ring: &IoUring) -> Result<()> {
    for group in &ring.groups {
        let flags = if group.parts { PARTS } else { 0 };
        let numbers = u64::from(group.entries) | u64::from(group.number) << 32 | flags << 48;
        // struct io_uring_buf_reg: the address, these, and nothing more.
        let words = [group.address, numbers, 0, 0, 0].map(u64::to_ne_bytes);
        let mut batch = husk.batch();
        let at = batch.bytes(words.as_flattened()).0;
        let made = batch.call((libc::SYS_io_uring_register, [fd, REGISTER_PBUF_RING, at, 1]));
        let what = || "registering buffers to choose from with io_uring".to_owned();
        batch.run()?.expect(made, what)?;
    }
    Ok(())
}

/// Takes as many buffers of each group as were taken. The requests are where the husk has mapped them, each of a
/// size; `submit` has those between two counts done. Returns how many that took.
///
/// # Errors
/// If the kernel does not take as many; if the husk is gone.
pub(super) fn take(
    husk: &mut Tracee,
    fd: u64,
    (requests, size): (RemoteAddr, usize),
    ring: &IoUring,
    submit: impl Fn(&mut Tracee, Range<u32>) -> Result<()>,
) -> Result<u32> {
    if ring.groups.iter().all(|group| group.head == 0) {
        return Ok(0);
    }
    let (prot, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let into = husk.call("mmap", syscall::mmap_anonymous(0..PAGE, prot, private))?;
    // Each read takes one of its count.
    let each = (EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).bits();
    let mut done = 0;
    for group in &ring.groups {
        // The content is the program's, and for a moment another one.
        let mut content = vec![0; usize::try_from(group.size()).unwrap_or_default()];
        husk.read(RemoteAddr(group.address), &mut content)?;
        let event = (libc::SYS_eventfd2, [group.head.into(), each.into()]);
        let event = husk.call("eventfd2", event)?;
        let request = request(group, event, size);
        husk.write(requests, &request.repeat(ring.sq_entries as usize))?;
        let mut taken = 0;
        while taken < group.head {
            let some = group.entries.min(group.head - taken);
            husk.write(RemoteAddr(group.address), &buffers(group, into, taken + some))?;
            submit(husk, done..done + some)?;
            (taken, done) = (taken + some, done + some);
        }
        husk.write(RemoteAddr(group.address), &content)?;
        husk.call("close", syscall::close(RemoteFd(event)))?;
        check(husk, fd, group)?;
    }
    husk.write(requests, &vec![0; ring.requests.len()])?;
    husk.call("munmap", syscall::munmap(into..into + PAGE))?;
    Ok(done)
}

/// The request that reads from an eventfd into a buffer of a group.
fn request(group: &BufferGroup, event: u64, size: usize) -> Vec<u8> {
    let mut request = vec![0; size];
    (request[0], request[1], request[LENGTH]) = (READ, BUFFER_SELECT, COUNT);
    request[4..8].copy_from_slice(&event.to_ne_bytes()[..4]);
    request[GROUP..GROUP + 2].copy_from_slice(&group.number.to_ne_bytes()[..2]);
    request
}

/// A ring that is full of buffers for one count, all of which are `into`, up to the count of buffers `end`.
fn buffers(group: &BufferGroup, into: u64, end: u32) -> Vec<u8> {
    let mut buffer = [0; BUFFER];
    buffer[..8].copy_from_slice(&into.to_ne_bytes());
    buffer[8] = COUNT;
    let mut all = buffer.repeat(group.entries as usize);
    all[TAIL..BUFFER].copy_from_slice(&end.to_ne_bytes()[..2]);
    all
}

/// Makes sure that the kernel takes the right buffer next.
fn check(husk: &mut Tracee, fd: u64, group: &BufferGroup) -> Result<()> {
    let mut status = [0; STATUS];
    status[..4].copy_from_slice(&group.number.to_ne_bytes());
    let mut batch = husk.batch();
    let place = batch.inout(&status);
    let asked = batch.call((libc::SYS_io_uring_register, [fd, PBUF_STATUS, place.addr.0, 1]));
    let out = batch.run()?;
    out.expect(asked, || "asking an io_uring for a group of buffers".to_owned())?;
    match out.u32_at(place, STATUS_HEAD) == group.head {
        true => Ok(()),
        false => {
            let reason = format!("group {} of an io_uring does not take buffers", group.number);
            Err(Error::invalid("files.img", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_lies_in_one_mapping() {
        let at =
            |address, entries| BufferGroup { number: 0, address, entries, head: 0, parts: false };
        let writable = [0x1000..0x3000, 0x3000..0x4000];
        assert!(are_in(&[at(0x1000, 512), at(0x3000, 256)], &writable));
        for outside in [at(0x2000, 512), at(0, 1), at(0x4000, 1), at(u64::MAX - 0xfff, 512)] {
            assert!(!are_in(&[at(0x1000, 1), outside], &writable), "{outside:?}");
        }
    }

    #[test]
    fn requests_and_buffers_are_those_of_the_kernel() {
        let group = BufferGroup { number: 300, address: 0x1000, entries: 2, head: 5, parts: true };
        let request = request(&group, 7, 128);
        assert_eq!((request.len(), request[0], request[1]), (128, 22, 32));
        assert_eq!((request[4], request[24], request[40], request[41]), (7, 8, 44, 1));
        let buffers = buffers(&group, 0x2000, 5);
        assert_eq!(buffers.len(), 32);
        assert_eq!((buffers[1], buffers[8], buffers[14], buffers[30]), (0x20, 8, 5, 0));
        // Two, two, and one.
        assert_eq!(calls(&[group], 8), 3);
    }
}
