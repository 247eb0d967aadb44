//! Rings of packet sockets that are mapped (packet_mmap.rst of the kernel).
//!
//! Kernel and program go round such a ring, each with a place of its own. The kernel does not tell
//! its place, nor can it be set. So the dump finds it in the ring: which slots (frames, or blocks
//! of `TPACKET_V3`) the program has still to read, and which one is the latest. The restore lets a
//! new ring be filled as far, by frames over the loopback device that nobody else is to have, and
//! puts what is unread back.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_images::proto::{PacketRing, PacketSockEntry, TorporPacketPosition, TorporPacketSlot};
use torpor_policy::{PacketSocket, Ring, RingPosition};
use torpor_sys::socket::{self, Instruction, Message};
use torpor_sys::vm::{self, Window};

use super::options::only_with;
use super::packet::{TPACKET_V3, address};
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::file::Found;
use crate::file::found::own_pid;
use crate::memory::vma::{Vma, status};

/// The first version of rings.
const TPACKET_V1: u32 = libc::tpacket_versions::TPACKET_V1 as u32;
/// The program has the slot.
const USER: u32 = libc::TP_STATUS_USER;
/// The largest ring whose unread packets are kept.
const MAX_RING: u64 = 256 << 20;
/// An EtherType for experiments (IEEE 802 local experimental 1), which nothing listens to.
const EXPERIMENTAL: u16 = 0x88b5;
/// The loopback device of a network namespace.
const LOOPBACK: u32 = 1;
/// Where a frame has the address of its sender.
const ADDRESS: u32 = 6;
/// How long a frame may be under way that is sent over it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of frames. The loopback device takes 65536.
const SHORT: usize = 64;
const LONG: usize = 60000;

/// Where a slot has its fields: these depend on the version.
#[derive(Debug, Clone, Copy)]
struct Layout {
    version: u32,
    /// Slots, and what is between their beginnings.
    slots: u32,
    block: usize,
    frame: usize,
}

/// Offsets in `struct tpacket_block_desc`.
const PACKETS: usize = 12;
const FIRST: usize = 16;
const LENGTH: usize = 20;
const SEQUENCE: usize = 24;
/// Bytes of a header up to behind the last field that is looked at.
const HEADER: usize = 32;

impl Layout {
    /// None of a ring that cannot be.
    fn of(version: u32, ring: Ring) -> Option<Self> {
        let Ring { blocks: (block, blocks), frames: (frame, frames), .. } = ring;
        let (block, frame) = (block as usize, frame as usize);
        let whole = block.checked_mul(blocks as usize)?;
        let fits = frame >= HEADER && block >= frame && block.is_multiple_of(4096);
        let slots = if version == TPACKET_V3 { blocks } else { frames };
        let all = (block / frame.max(1)).checked_mul(blocks as usize)?;
        let counted = frames as usize == all && slots > 0;
        (fits && counted && whole as u64 <= u64::from(u32::MAX)).then_some(Layout {
            version,
            slots,
            block,
            frame,
        })
    }

    fn is_of_blocks(&self) -> bool {
        self.version == TPACKET_V3
    }

    /// Where a slot is in the ring.
    fn place(&self, slot: u32) -> Range<usize> {
        let slot = slot as usize;
        if self.is_of_blocks() {
            return slot * self.block..(slot + 1) * self.block;
        }
        let each = self.block / self.frame;
        let start = slot / each * self.block + slot % each * self.frame;
        start..start + self.frame
    }

    fn word(&self, ring: &[u8], slot: u32, offset: usize) -> u32 {
        let at = self.place(slot).start + offset;
        ring.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |w| u32::from_ne_bytes(*w))
    }

    /// Where a slot says whose it is.
    fn status(&self) -> usize {
        if self.is_of_blocks() { 8 } else { 0 }
    }

    fn is_unread(&self, ring: &[u8], slot: u32) -> bool {
        self.word(ring, slot, self.status()) & USER != 0
    }

    /// What grows from slot to slot: the number of a block, the time of a frame.
    fn order(&self, ring: &[u8], slot: u32) -> u64 {
        let at = match self.version {
            _ if self.is_of_blocks() => [SEQUENCE + 4, SEQUENCE],
            TPACKET_V1 => [20, 24],
            _ => [16, 20],
        };
        let [high, low] = at.map(|at| u64::from(self.word(ring, slot, at)));
        high << 32 | low
    }

    fn next(&self, slot: u32) -> u32 {
        (slot + 1) % self.slots
    }

    /// The slot whose successor does not come after it: the latest one.
    fn latest(&self, ring: &[u8]) -> u32 {
        let mut latest = 0;
        for slot in 1..self.slots {
            if self.order(ring, slot) >= self.order(ring, latest) {
                latest = slot;
            }
        }
        // Frames of one moment may begin behind the end of the ring.
        let same = |slot| self.order(ring, slot) == self.order(ring, latest);
        if latest + 1 == self.slots && same(0) && !(0..self.slots).all(same) {
            latest = (0..self.slots).take_while(|&slot| same(slot)).last().unwrap_or(latest);
        }
        latest
    }

    /// The slot that the kernel goes on with, and those that are unread. The ring was read twice,
    /// while the kernel went on: what is unread in the first has all that came before in the second.
    fn position(&self, first: &[u8], second: &[u8]) -> (u32, Vec<u32>) {
        let all = 0..self.slots;
        if self.is_of_blocks() {
            let active = self.latest(first);
            let unread = all.filter(|&slot| {
                let before = self.order(second, slot) < self.order(first, active);
                before && self.is_unread(second, slot)
            });
            return (active, unread.collect());
        }
        let unread = |ring: &[u8], slot| self.is_unread(ring, slot);
        if all.clone().all(|slot| !unread(second, slot)) {
            let latest = self.latest(second);
            let used = self.order(second, latest) != 0;
            return (if used { self.next(latest) } else { 0 }, Vec::new());
        }
        let before = |slot: u32| (slot + self.slots - 1) % self.slots;
        let start = all.clone().find(|&s| unread(second, s) && !unread(second, before(s)));
        // If all are unread, behind the latest one is the oldest.
        let start = start.unwrap_or_else(|| self.next(self.latest(second)));
        let run: Vec<u32> = (0..self.slots)
            .map(|n| (start + n) % self.slots)
            .take_while(|&slot| unread(second, slot))
            .collect();
        let count = run.iter().rposition(|&slot| unread(first, slot)).map_or(0, |at| at + 1);
        let next = (start + u32::try_from(count).unwrap_or(0)) % self.slots;
        (next, run[..count].to_vec())
    }
}

/// The mapping of a socket's rings in some task: its process, and where it is.
fn mapping(tasks: &[Task], inode: u32) -> Option<(i32, &Vma)> {
    let of_it = |vma: &&Vma| vma.is(status::SOCKET) && vma.map.inode == u64::from(inode);
    tasks.iter().find_map(|task| Some((task.pid, task.vmas.iter().find(of_it)?)))
}

/// Where the kernel stands in a ring that a task has mapped; `None` if none has.
///
/// # Errors
/// Refused, if the rings are mapped in part only, are too large, or do not tell where the kernel
/// stands; if the memory of their task cannot be read.
pub(super) fn dump(
    tasks: &[Task],
    found: &Found,
    inode: u32,
    psk: &PacketSockEntry,
) -> Result<Option<TorporPacketPosition>> {
    let Some((pid, vma)) = mapping(tasks, inode) else { return Ok(None) };
    let len = |ring: &Option<PacketRing>| ring.as_ref().map_or(0, |ring| Ring::from(ring).size());
    let (received, sent) = (len(&psk.rx_ring), len(&psk.tx_ring));
    let (start, end) = (vma.map.start, vma.map.end);
    if vma.map.offset != 0 || end - start != received + sent {
        return Err(found.refuse(format!("its rings at {start:x} are mapped in part only")));
    }
    let read = |at: u64, len: u64| -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let read = vm::read(pid, at, &mut bytes).context(|| format!("read the ring at {at:x}"))?;
        match read == bytes.len() {
            true => Ok(bytes),
            false => Err(found.refuse("its rings cannot be read")),
        }
    };
    if received + sent > MAX_RING {
        return Err(found.refuse(format!(
            "its rings have {} MiB, more than the {} that are supported; let the program take \
             smaller ones (tcpdump -B)",
            (received + sent) >> 20,
            MAX_RING >> 20
        )));
    }
    if read(start + received, sent)?.iter().any(|&byte| byte != 0) {
        return Err(found.refuse(
            "its ring for sending (PACKET_TX_RING) has been used: where the kernel stands in it \
             is not told",
        ));
    }
    let Some(ring) = &psk.rx_ring else { return Ok(Some(TorporPacketPosition::default())) };
    let layout = Layout::of(psk.version, ring.into());
    let layout = layout.ok_or_else(|| found.refuse("its ring has a form that is not known"))?;
    let (first, second) = (read(start, received)?, read(start, received)?);
    let (next, unread) = layout.position(&first, &second);
    let slot = |index| TorporPacketSlot { index, content: second[layout.place(index)].to_vec() };
    Ok(Some(TorporPacketPosition { next, unread: unread.into_iter().map(slot).collect() }))
}

/// Checks what the images say of a ring.
pub(super) fn is_possible(socket: &PacketSocket) -> bool {
    let Some(position) = &socket.position else { return true };
    let Some(ring) = socket.receive else {
        return *position == RingPosition::default();
    };
    Layout::of(socket.version, ring).is_some_and(|layout| {
        let fits = |(slot, content): &(u32, Vec<u8>)| {
            *slot < layout.slots && content.len() == layout.place(*slot).len()
        };
        position.next < layout.slots && position.unread.iter().all(fits)
    })
}

/// Brings a new ring to where it was. The socket receives nothing yet; `sender` makes another one
/// in its network namespace.
///
/// # Errors
/// If the packets that move the ring on cannot be sent, or do not arrive there.
pub(super) fn restore(
    fd: BorrowedFd<'_>,
    id: u32,
    packets: &PacketSocket,
    sender: impl FnOnce() -> Result<OwnedFd>,
) -> Result<()> {
    let (Some(position), Some(ring)) = (&packets.position, packets.receive) else { return Ok(()) };
    if position.next == 0 && position.unread.is_empty() {
        return Ok(());
    }
    let Some(layout) = Layout::of(packets.version, ring) else { return Ok(()) };
    let what = || format!("ring of packet socket {id}");
    let len = ring.size() + packets.send.map_or(0, |ring| ring.size());
    let window = Window::new(fd, usize::try_from(len).unwrap_or(usize::MAX)).context(what)?;
    let ring = NewRing::new(layout, window, sender()?, packets.reserve).context(what)?;
    socket::attach_filter(fd, &ring.only_own()).context(what)?;
    socket::bind(fd, &address(EXPERIMENTAL.to_be(), LOOPBACK)).context(what)?;
    let advanced = ring.advance(position);
    // Its own filter, if any, comes with the other options.
    socket::set_int(fd, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0).context(what)?;
    match advanced {
        Ok(()) => {}
        // The device is down.
        Err(e) if e.raw_os_error() == Some(libc::ENETDOWN) => {
            tracing::warn!(
                "packet socket {id}: the loopback device is down, so that the ring begins anew: its \
                 program gets packets late, and what was unread not at all"
            );
            return Ok(());
        }
        Err(e) => return Err(e).context(what),
    }
    ring.put(position).context(what)
}

/// A new ring.
struct NewRing {
    layout: Layout,
    window: Window,
    sender: OwnedFd,
    /// What its sender's frames have as their sender's address; no other restore's have it.
    name: u32,
    /// `PACKET_RESERVE`.
    reserved: usize,
}

impl NewRing {
    fn new(
        layout: Layout,
        window: Window,
        sender: OwnedFd,
        reserved: u32,
    ) -> std::io::Result<Self> {
        // Sockets have numbers of 32 bits.
        let [.., a, b, c, d] = rustix::fs::fstat(&sender)?.st_ino.to_be_bytes();
        let name = u32::from_be_bytes([a, b, c, d]);
        Ok(NewRing { layout, window, sender, name, reserved: reserved as usize })
    }

    /// Takes its own sender's frames only: another restore may fill a ring beside this one.
    fn only_own(&self) -> [Instruction; 4] {
        const SENDER: u32 = libc::SKF_LL_OFF.cast_unsigned() + ADDRESS;
        only_with(SENDER, self.name)
    }

    fn word(&self, slot: u32, offset: usize) -> std::io::Result<u32> {
        let mut bytes = [0; 4];
        let at = self.window.address() + (self.layout.place(slot).start + offset) as u64;
        vm::read(own_pid(), at, &mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn write(&self, slot: u32, offset: usize, bytes: &[u8]) -> std::io::Result<()> {
        let at = self.window.address() + (self.layout.place(slot).start + offset) as u64;
        vm::write(own_pid(), at, bytes).map(drop)
    }

    /// The number of a block; that of the one that is filled is the highest.
    fn sequence(&self, slot: u32) -> std::io::Result<u64> {
        let low = u64::from(self.word(slot, SEQUENCE)?);
        Ok(u64::from(self.word(slot, SEQUENCE + 4)?) << 32 | low)
    }

    /// Sends a frame, which arrives at once.
    fn send(&self, len: usize) -> std::io::Result<()> {
        let mut frame = vec![0; len];
        let sender = ADDRESS as usize;
        frame[sender..sender + 4].copy_from_slice(&self.name.to_be_bytes());
        frame[12..14].copy_from_slice(&EXPERIMENTAL.to_be_bytes());
        let to = address(EXPERIMENTAL.to_be(), LOOPBACK);
        let message = Message { address: Some(&to), data: &frame, ..Message::default() };
        socket::send(self.sender.as_fd(), &message, 0).map(drop)
    }

    /// Fills slots, and gives each back, until the kernel is where it was.
    fn advance(&self, position: &RingPosition) -> std::io::Result<()> {
        if self.layout.is_of_blocks() {
            return self.advance_blocks(position);
        }
        for slot in 0..position.next {
            self.send(SHORT)?;
            wait(|| Ok(self.word(slot, 0)? & USER != 0))?;
            self.write(slot, 0, &[0; 4])?;
        }
        Ok(())
    }

    /// How long a frame may be to fill a block, if it is not full: the one that does not fit any
    /// more has to be short, since it is in the next block.
    fn filling(&self, slot: u32) -> std::io::Result<usize> {
        /// What a frame takes besides, but for what the program has reserved.
        const HEADERS: usize = 256;
        let used = self.word(slot, LENGTH)? as usize + self.reserved;
        Ok(self.layout.block.saturating_sub(used + HEADERS).clamp(SHORT, LONG))
    }

    fn advance_blocks(&self, position: &RingPosition) -> std::io::Result<()> {
        // Blocks have numbers, and those that are unread are to have lower ones: another round.
        let again = position.unread.iter().any(|(slot, _)| *slot >= position.next);
        let rounds = if again { u64::from(self.layout.slots) } else { 0 };
        let least = u64::from(position.next) + rounds + 1;
        let (mut slot, mut number) = (0, 1);
        loop {
            let next = self.layout.next(slot);
            let is_next = || self.sequence(next).map(|found| found == number + 1);
            if number >= least && slot == position.next {
                self.empty(slot)?;
                if !is_next()? {
                    return Ok(());
                }
            } else {
                let before = self.word(slot, PACKETS)?;
                self.send(self.filling(slot)?)?;
                wait(|| Ok(is_next()? || self.word(slot, PACKETS)? != before))?;
            }
            if is_next()? {
                self.write(slot, self.layout.status(), &[0; 4])?;
                (slot, number) = (next, number + 1);
            }
        }
    }

    /// Takes the frame out of a block that did not fit into the last one: it is none of the
    /// program's. When the time of a block is over, the kernel goes on to the next one, unless it is
    /// empty: that may have happened before.
    fn empty(&self, slot: u32) -> std::io::Result<()> {
        /// More than the kernel takes to close a block, if it has just found a frame in it.
        const CLOSING: Duration = Duration::from_millis(1);
        if self.word(slot, PACKETS)? > 0 {
            let length = self.word(slot, LENGTH)?;
            self.write(slot, FIRST, &length.to_ne_bytes())?;
            self.write(slot, PACKETS, &[0; 4])?;
            std::thread::sleep(CLOSING);
        }
        Ok(())
    }

    /// Puts what is unread in its place.
    fn put(&self, position: &RingPosition) -> std::io::Result<()> {
        let Layout { slots, .. } = self.layout;
        for (index, content) in &position.unread {
            let mut content = content.clone();
            if self.layout.is_of_blocks() {
                let back = u64::from((position.next + slots - index) % slots);
                let number = self.sequence(position.next)?.saturating_sub(back);
                content[SEQUENCE..SEQUENCE + 8].copy_from_slice(&number.to_ne_bytes());
            }
            self.write(*index, 0, &content)?;
        }
        Ok(())
    }
}

/// Waits until a frame has arrived.
fn wait(mut arrived: impl FnMut() -> std::io::Result<bool>) -> std::io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !arrived()? {
        if Instant::now() > deadline {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The number of the socket whose rings a mapping of a task shows.
///
/// # Errors
/// Refused, if no task has it open.
pub(crate) fn of_mapping(
    table: &crate::file::table::FileTable,
    pid: i32,
    vma: &Vma,
) -> Result<u32> {
    table.open_on(vma.map.inode).map(|(_, _, id)| id).next().ok_or_else(|| {
        Error::refused(
            pid,
            format!("mapping {:x}-{:x}", vma.map.start, vma.map.end),
            "shows the rings of a packet socket that no task has open any more",
        )
    })
}

#[cfg(test)]
mod tests {
    use torpor_sys::socket::Opt;

    use super::super::testing::in_netns;
    use super::*;

    const LAYOUT: Layout = Layout { version: 1, slots: 4, block: 4096, frame: 2048 };

    /// A ring of frames: whether each is unread, and when it came.
    fn ring(frames: [(u32, u32); 4]) -> Vec<u8> {
        let mut ring = vec![0; 8192];
        for (frame, (status, time)) in ring.chunks_mut(2048).zip(frames) {
            frame[..4].copy_from_slice(&status.to_ne_bytes());
            frame[16..20].copy_from_slice(&time.to_ne_bytes());
        }
        ring
    }

    #[test]
    fn the_place_of_the_kernel_is_found() {
        let at = |frames| LAYOUT.position(&ring(frames), &ring(frames));
        assert_eq!(at([(0, 0); 4]), (0, vec![]));
        assert_eq!(at([(0, 5), (0, 6), (0, 3), (0, 4)]), (2, vec![]));
        assert_eq!(at([(0, 5), (0, 0), (0, 0), (0, 0)]), (1, vec![]));
        assert_eq!(at([(1, 5), (0, 2), (0, 3), (1, 4)]), (1, vec![3, 0]));
        assert_eq!(at([(1, 5), (1, 6), (1, 3), (1, 4)]), (2, vec![2, 3, 0, 1]));
        // All of one moment, and over the end.
        assert_eq!(at([(0, 5), (0, 5), (0, 4), (0, 5)]), (2, vec![]));
    }

    #[test]
    fn what_comes_while_it_is_read_is_left_out() {
        let before = ring([(0, 1), (0, 2), (1, 7), (0, 4)]);
        let after = ring([(1, 8), (1, 6), (1, 7), (1, 7)]);
        assert_eq!(LAYOUT.position(&before, &after).1.last(), Some(&2));
        let (first, second) =
            (ring([(0, 1), (0, 2), (0, 3), (0, 4)]), ring([(1, 5), (0, 2), (0, 3), (0, 4)]));
        assert_eq!(LAYOUT.position(&first, &second), (0, vec![]));
    }

    #[test]
    fn rings_that_cannot_be_are_not_believed() {
        let ring = |block, blocks, frame, frames| Ring {
            blocks: (block, blocks),
            frames: (frame, frames),
            more: [0; 3],
        };
        assert!(Layout::of(1, ring(4096, 4, 2048, 8)).is_some());
        for wrong in [
            ring(4096, 4, 0, 8),
            ring(4096, 4, 2048, 9),
            ring(0, 4, 2048, 8),
            ring(4096, u32::MAX, 2048, 8),
        ] {
            assert!(Layout::of(1, wrong).is_none());
        }
    }

    /// A ring of four blocks, whose time is over after a millisecond, and its socket.
    fn ring_of_blocks() -> (OwnedFd, NewRing) {
        let fd = socket::socket(libc::AF_PACKET, libc::SOCK_RAW, 0).unwrap();
        let version = TPACKET_V3.cast_signed();
        socket::set_int(fd.as_fd(), libc::SOL_PACKET, libc::PACKET_VERSION, version).unwrap();
        let request: Vec<u8> =
            [4096u32, 4, 2048, 8, 1, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        socket::set(fd.as_fd(), Opt::PACKET_RX_RING, &request).unwrap();
        let layout = Layout { version: TPACKET_V3, slots: 4, block: 4096, frame: 2048 };
        let window = Window::new(fd.as_fd(), 4 * 4096).unwrap();
        let sender = socket::socket(libc::AF_PACKET, libc::SOCK_RAW, 0).unwrap();
        let ring = NewRing::new(layout, window, sender, 0).unwrap();
        socket::attach_filter(fd.as_fd(), &ring.only_own()).unwrap();
        socket::bind(fd.as_fd(), &address(EXPERIMENTAL.to_be(), LOOPBACK)).unwrap();
        (fd, ring)
    }

    #[test]
    fn a_block_whose_time_is_over_is_not_where_the_kernel_stands() {
        in_netns(|| {
            let (_fd, ring) = ring_of_blocks();
            let status = || ring.word(0, ring.layout.status());
            ring.send(SHORT).unwrap();
            wait(|| Ok(status()? & USER != 0)).unwrap();
            ring.advance(&RingPosition { next: 0, unread: Vec::new() }).unwrap();
            assert_eq!((ring.word(0, PACKETS).unwrap(), status().unwrap()), (0, 0));
            ring.send(SHORT).unwrap();
            wait(|| Ok(ring.word(0, PACKETS)? == 1)).unwrap();
        });
    }

    #[test]
    fn rings_that_are_filled_side_by_side_take_their_own_frames() {
        in_netns(|| {
            let (_one, one) = ring_of_blocks();
            let (_other, other) = ring_of_blocks();
            other.send(SHORT).unwrap();
            one.send(SHORT).unwrap();
            wait(|| Ok(one.word(0, PACKETS)? > 0)).unwrap();
            assert_eq!(one.word(0, PACKETS).unwrap(), 1);
        });
    }
}
