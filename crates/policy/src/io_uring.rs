//! io_uring instances: read of their entries once, judged, and made.

use torpor_images::proto::{FileEntry, TorporIoUringGroup, TorporIoUringRestrictions};

/// An io_uring instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoUring {
    /// Its number in the images.
    pub id: u32,
    /// `IORING_SETUP_*` (linux/io_uring.h).
    pub setup: u32,
    /// How many requests its ring has.
    pub sq_entries: u32,
    /// How many answers.
    pub cq_entries: u32,
    /// The memory of both rings.
    pub rings: Vec<u8>,
    /// That of the requests.
    pub requests: Vec<u8>,
    /// Where its registered buffers are, and their lengths; those of no length are empty places.
    pub buffers: Vec<(u64, u64)>,
    /// The most workers of the kernel, for files and for all else, if known.
    pub workers: Option<[u32; 2]>,
    /// How many places for registered files it has.
    pub places: u32,
    /// Those that have one: place, and number of the file in the images.
    pub files: Vec<(u32, u32)>,
    /// Threads that have registered its descriptor: id in the images, and place in their table.
    pub threads: Vec<(u32, u32)>,
    /// The processor that the thread which fetches its requests is bound to.
    pub processor: Option<u32>,
    /// What it is restricted to, if it is.
    pub restrictions: Option<RingRestrictions>,
    /// The eventfd that it tells of answers, by its number in the images, and whether only of those that
    /// its workers give.
    pub event: Option<(u32, bool)>,
    /// Rings of buffers that requests choose from.
    pub groups: Vec<BufferGroup>,
}

/// What an instance is restricted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingRestrictions {
    /// Ways of registering something (`IORING_REGISTER_*` of linux/io_uring.h).
    pub registers: Vec<u32>,
    /// Requests (`IORING_OP_*`).
    pub requests: Vec<u32>,
    /// Flags that a request may have (`IOSQE_*`).
    pub flags_allowed: u32,
    /// Those that it has to have.
    pub flags_required: u32,
}

impl RingRestrictions {
    fn of(entry: &TorporIoUringRestrictions) -> Self {
        RingRestrictions {
            registers: entry.registers.clone(),
            requests: entry.requests.clone(),
            flags_allowed: entry.flags_allowed,
            flags_required: entry.flags_required,
        }
    }
}

/// A ring of buffers, of which requests take the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferGroup {
    /// Its number.
    pub number: u32,
    /// Where in the memory of the task it is.
    pub address: u64,
    /// For how many buffers it has room.
    pub entries: u32,
    /// Which one is the next, as the kernel counts.
    pub head: u32,
    /// Whether a request may take a part of one.
    pub parts: bool,
}

impl BufferGroup {
    /// The one that an image has.
    #[must_use]
    pub fn of(group: &TorporIoUringGroup) -> Self {
        let TorporIoUringGroup { number, address, entries, head, parts } = *group;
        BufferGroup { number, address, entries, head, parts: parts.unwrap_or_default() }
    }

    /// How much memory it is.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::from(self.entries) * 16
    }
}

impl IoUring {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let ring = entry.torpor_io_uring.as_ref()?;
        let buffers = ring.buffers.iter().map(|buffer| (buffer.address, buffer.length));
        Some(IoUring {
            id: ring.id,
            setup: ring.setup,
            sq_entries: ring.sq_entries,
            cq_entries: ring.cq_entries,
            rings: ring.rings.clone(),
            requests: ring.requests.clone(),
            buffers: buffers.collect(),
            workers: ring.workers.first_chunk().copied(),
            places: ring.places.unwrap_or_default(),
            files: ring.files.iter().map(|file| (file.place, file.file)).collect(),
            threads: ring.threads.iter().map(|thread| (thread.thread, thread.place)).collect(),
            processor: ring.processor,
            restrictions: ring.restrictions.as_ref().map(RingRestrictions::of),
            event: ring.event.map(|file| (file, ring.event_async())),
            groups: ring.groups.iter().map(BufferGroup::of).collect(),
        })
    }

    /// Whether a thread of the kernel fetches its requests.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        /// `IORING_SETUP_SQPOLL`.
        const SQPOLL: u32 = 1 << 1;
        self.setup & SQPOLL != 0
    }

    /// How much memory its buffers lock.
    #[must_use]
    pub fn pinned(&self) -> u64 {
        let buffers = self.buffers.iter().map(|(_, length)| *length);
        let rings = self.groups.iter().map(BufferGroup::size);
        buffers.chain(rings).fold(0, |all: u64, length| all.saturating_add(length))
    }
}
