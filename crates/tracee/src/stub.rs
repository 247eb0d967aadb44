//! The region that a stub has in a task: its code, and rooms for batches.

use torpor_sys::stub::{self, Record};

use crate::frame::FRAME_SIZE;
use crate::{Mapping, RemoteAddr};

pub(crate) const PAGE: u64 = 4096;
/// Batches that threads of one process can run at the same time. More would not hide more of
/// the time that a thread takes to wake up.
pub const SIDE_BY_SIDE: usize = 16;
/// The rooms behind the first one lie here.
const SIDE_ROOMS_AT: u64 = Room::FIRST.at + Room::FIRST.size();
/// Size of a stub with its data, in bytes.
pub const STUB_SIZE: u64 = SIDE_ROOMS_AT + (SIDE_BY_SIDE as u64 - 1) * Room::SIDE.size();

/// Room for a batch: a frame, records, and data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Its distance from the start of the stub.
    at: u64,
    /// Pages for records.
    record_pages: u64,
    /// Bytes for arguments and results.
    data: u64,
}

impl Room {
    /// Behind the code page, for all that may have to be done to a process.
    const FIRST: Room = Room { at: PAGE, record_pages: 12, data: 256 * 1024 };
    /// For what a thread is asked for.
    const SIDE: Room = Room { at: SIDE_ROOMS_AT, record_pages: 1, data: PAGE };

    const fn size(self) -> u64 {
        FRAME_SIZE as u64 + self.record_pages * PAGE + self.data
    }

    /// The room that the thread with this number shares with none of its neighbours.
    pub(crate) fn of(number: usize) -> Self {
        match (number % SIDE_BY_SIDE) as u64 {
            0 => Self::FIRST,
            n => Room { at: SIDE_ROOMS_AT + (n - 1) * Self::SIDE.size(), ..Self::SIDE },
        }
    }

    /// Records that fit at once.
    pub(crate) fn records(self) -> usize {
        usize::try_from(self.record_pages * PAGE).unwrap_or(0) / size_of::<Record>()
    }

    /// Bytes of arguments and results that a batch can have.
    pub(crate) fn data(self) -> usize {
        usize::try_from(self.data).unwrap_or(0)
    }
}

/// A stub inside a task, with the room that a thread uses of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stub {
    pub(crate) base: u64,
    pub(crate) room: Room,
}

impl Stub {
    /// The one at `base`, with most of its room.
    pub(crate) fn at(base: u64) -> Self {
        Stub { base, room: Room::FIRST }
    }

    /// Where the frame of the present batch is.
    pub(crate) fn frame_at(&self) -> RemoteAddr {
        RemoteAddr(self.base + self.room.at)
    }

    /// Where all frames of its rooms are.
    pub(crate) fn frames(&self) -> impl Iterator<Item = RemoteAddr> {
        let base = self.base;
        (0..SIDE_BY_SIDE).map(move |n| Stub { base, room: Room::of(n) }.frame_at())
    }

    /// Where a record is.
    pub(crate) fn record_at(&self, index: usize) -> RemoteAddr {
        RemoteAddr(self.frame_at().0 + (FRAME_SIZE + index * size_of::<Record>()) as u64)
    }

    /// Where arguments go.
    pub(crate) fn data_at(&self) -> RemoteAddr {
        RemoteAddr(self.record_at(0).0 + self.room.record_pages * PAGE)
    }

    pub(crate) fn code_contains(&self, address: u64) -> bool {
        (self.base..=self.base + stub::code().len() as u64).contains(&address)
    }

    /// Where its last `syscall` instruction is.
    pub(crate) fn syscall_at(&self) -> u64 {
        self.base + stub::code().len() as u64 - 2
    }

    /// Whether `address` is behind the call that sends the final signal. The task may
    /// have had one of its own pending, which then stops it at the start.
    pub(crate) fn is_behind_done(&self, address: u64) -> bool {
        // `mov eax, imm32; syscall` are 7 bytes.
        address == self.base + stub::code().len() as u64 - 7
    }
}

/// Where in a task with these mappings a stub can be placed: next to nothing, so that no
/// mapping can be taken for it, nor it for a part of one. To be known before it is there,
/// for whoever is to remove it if its supervisor dies.
pub fn stub_place(maps: &[Mapping]) -> Option<u64> {
    /// Free on both sides; a page of it would do.
    const ASIDE: u64 = 16 * PAGE;
    let gaps = maps.iter().zip(maps.iter().skip(1));
    // A stack grows downwards into its gap.
    let gaps = gaps.filter(|(_, above)| above.name != "[stack]" && above.end <= 1 << 47);
    gaps.rev().find_map(|(below, above)| {
        let base = above.start.checked_sub(STUB_SIZE + ASIDE)?;
        (base >= below.end.checked_add(ASIDE)?).then_some(base)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_lie_side_by_side() {
        let mut end = PAGE;
        for number in 0..SIDE_BY_SIDE {
            let room = Room::of(number);
            assert_eq!((room.at, room.at % 64), (end, 0), "room {number}");
            assert!(room.records() >= 51 && room.data() >= 4096);
            end += room.size();
        }
        assert_eq!(end, STUB_SIZE);
        assert_eq!(Room::of(SIDE_BY_SIDE).at, Room::FIRST.at);
    }
}
