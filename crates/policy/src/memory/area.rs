//! A mapping of a process: read of its entry once, judged, and mapped.

use std::ops::Range;

use torpor_images::proto::VmaEntry;

use super::status;
use crate::file_lock::LockMode;

/// The size of a page.
pub(super) const PAGE: u64 = 4096;
/// Lowest address behind user space with five-level page tables.
const TASK_SIZE_MAX: u64 = 1 << 56;
const PROTECTIONS: u32 = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC).cast_unsigned();
/// How many protection keys x86 has (`arch_max_pkey`). The first is that of all other memory.
pub const KEYS: u32 = 16;

/// Flags of mmap(2) that images have.
mod flag {
    /// Of which type it is, and the types.
    pub(super) const TYPE: u32 = libc::MAP_TYPE.cast_unsigned();
    pub(super) const SHARED: u32 = libc::MAP_SHARED.cast_unsigned();
    pub(super) const PRIVATE: u32 = libc::MAP_PRIVATE.cast_unsigned();
    pub(super) const DROPPABLE: u32 = libc::MAP_DROPPABLE.cast_unsigned();
    pub(super) const DROPPABLE_PRIVATE: u32 = DROPPABLE | PRIVATE;
    pub(super) const ANONYMOUS: u32 = libc::MAP_ANONYMOUS.cast_unsigned();
    pub(super) const GROWS_DOWN: u32 = libc::MAP_GROWSDOWN.cast_unsigned();
    /// In the place of what mlock2(2) took.
    pub(super) const LOCKED: u32 = libc::MAP_LOCKED.cast_unsigned();
    pub(super) const NO_RESERVE: u32 = libc::MAP_NORESERVE.cast_unsigned();
    /// In the place of `MLOCK_ONFAULT`.
    pub(super) const ON_FAULT: u32 = libc::MAP_NONBLOCK.cast_unsigned();
    pub(super) const HUGE: u32 = libc::MAP_HUGETLB.cast_unsigned();
    pub(super) const HUGE_SHIFT: u32 = libc::MAP_HUGE_SHIFT.cast_unsigned();
    pub(super) const HUGE_MASK: u32 = libc::MAP_HUGE_MASK.cast_unsigned();
    pub(super) const KNOWN: u32 =
        TYPE | ANONYMOUS | GROWS_DOWN | LOCKED | NO_RESERVE | ON_FAULT | HUGE;
}

/// A mapping of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryArea {
    /// Its first address.
    pub start: u64,
    /// The address behind its last one.
    pub end: u64,
    /// The place of its first byte in what it maps.
    pub offset: u64,
    /// What it maps.
    pub kind: AreaKind,
    /// How it maps that.
    pub form: AreaForm,
    /// `PROT_*` of mmap(2).
    pub prot: u32,
    /// The flags of open(2) that its file, or its segment, is mapped with, if the images have them.
    pub open_flags: Option<u32>,
    /// It alone holds a lock of its file by flock(2).
    pub flock: Option<LockMode>,
    /// The length of its object of shared anonymous memory, if the images have it.
    pub object_len: Option<u64>,
    /// What the kernel was told of how it is used.
    pub advice: Advice,
    /// How it is locked.
    pub locked: Option<MemoryLock>,
    /// Its protection key (pkeys(7)), if it has one.
    pub key: Option<u32>,
    /// It is the heap (brk(2)).
    pub heap: bool,
    /// A userfaultfd of the program's own is registered for it.
    pub watched: bool,
    /// It has a buffer that is registered with io_uring.
    pub pinned: bool,
    /// It is private and cannot be written now, and could be once.
    pub was_writable: bool,
    /// It is sealed (mseal(2)).
    pub sealed: bool,
}

/// What a mapping maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AreaKind {
    /// The fixed vsyscall page.
    Vsyscall,
    /// The code of the vDSO.
    Vdso,
    /// The kernel's data for the vDSO.
    Vvar,
    /// The ring of an AIO context.
    AioRing,
    /// Rings of the io_uring instance that is this open file.
    IoUring(u32),
    /// Rings of the packet socket that is this open file.
    PacketRing(u32),
    /// The segment of System V with this id.
    Segment(u32),
    /// This open file, which is one in memory.
    MemoryFile(u32),
    /// This open file.
    File(u32),
    /// The object of shared anonymous memory with this number, which is no open file in the images.
    SharedObject(u64),
    /// Nothing: memory of the process' own.
    Anonymous,
}

/// How something is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AreaForm {
    /// Whose is what the process writes.
    pub sharing: Sharing,
    /// It grows downwards, as a stack does.
    pub grows_down: bool,
    /// No swap space is kept for it (`MAP_NORESERVE`).
    pub no_reserve: bool,
    /// It has huge pages (`MAP_HUGETLB`): the logarithm of their size, 0 for the size that is usual.
    pub huge: Option<u32>,
}

/// Whose is what a process writes into a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Its own.
    Private,
    /// That of all who map the same.
    Shared,
    /// Its own, until the kernel drops it (`MAP_DROPPABLE`, Linux 6.11).
    Droppable,
}

/// How memory is locked (mlock2(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLock {
    /// All of it.
    All,
    /// Only pages that are there (`MLOCK_ONFAULT`).
    OnFault,
}

/// What the kernel was told of how memory is used (madvise(2)). None of it changes what is in the memory, or in a file
/// behind it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advice(u64);

const WIPE_ON_FORK: u64 = libc::MADV_WIPEONFORK as u64;
/// The advice that images have.
const ADVICE: [u64; 8] = [
    libc::MADV_RANDOM as u64,
    libc::MADV_SEQUENTIAL as u64,
    libc::MADV_DONTFORK as u64,
    libc::MADV_MERGEABLE as u64,
    libc::MADV_HUGEPAGE as u64,
    libc::MADV_NOHUGEPAGE as u64,
    libc::MADV_DONTDUMP as u64,
    WIPE_ON_FORK,
];

impl Advice {
    fn read(bits: u64) -> Result<Self, String> {
        let known = ADVICE.iter().fold(0, |all, advice| all | 1 << advice);
        match bits & !known {
            0 => Ok(Advice(bits)),
            others => Err(format!("has advice that no dump gives (bits {others:#x})")),
        }
    }

    /// Each of them, as madvise(2) takes it.
    pub fn each(self) -> impl Iterator<Item = u64> {
        ADVICE.into_iter().filter(move |advice| self.0 >> advice & 1 != 0)
    }

    /// Whether children find the memory empty (`MADV_WIPEONFORK`).
    #[must_use]
    pub fn wipes_on_fork(self) -> bool {
        self.0 >> WIPE_ON_FORK & 1 != 0
    }
}

impl MemoryArea {
    /// Reads an entry that is none of guard pages.
    ///
    /// # Errors
    /// What of the entry there cannot be.
    pub fn of(entry: &VmaEntry) -> Result<Self, String> {
        let VmaEntry { start, end, pgoff: offset, prot, .. } = *entry;
        let invalid = |why: String| format!("mapping {start:x}-{end:x} {why}");
        let kind = AreaKind::of(entry).map_err(invalid)?;
        let is_aligned = [start, end, offset].iter().all(|at| at.is_multiple_of(PAGE));
        let is_place = start < end && (end <= TASK_SIZE_MAX || kind == AreaKind::Vsyscall);
        if !is_aligned || !is_place || offset.checked_add(end - start).is_none() {
            return Err(invalid("is impossible here".to_owned()));
        }
        if prot & !PROTECTIONS != 0 {
            return Err(invalid(format!("has the protection {prot:#x}, which there is not")));
        }
        if let Some(key) = entry.torpor_pkey.filter(|key| !(1..KEYS).contains(key)) {
            return Err(invalid(format!("has the protection key {key}, which there is not")));
        }
        let flock = match entry.torpor_flock {
            None => None,
            Some(0) => Some(LockMode::Read),
            Some(1) => Some(LockMode::Write),
            Some(other) => return Err(invalid(format!("has a lock of type {other}"))),
        };
        let lock = match entry.flags & flag::ON_FAULT {
            0 => MemoryLock::All,
            _ => MemoryLock::OnFault,
        };
        Ok(MemoryArea {
            start,
            end,
            offset,
            kind,
            form: AreaForm::of(entry).map_err(invalid)?,
            prot,
            open_flags: entry.fdflags,
            flock,
            object_len: entry.torpor_object_len,
            advice: Advice::read(entry.madv.unwrap_or_default()).map_err(invalid)?,
            locked: (entry.flags & flag::LOCKED != 0).then_some(lock),
            key: entry.torpor_pkey,
            heap: entry.status & status::HEAP != 0,
            watched: entry.status & status::USERFAULTFD != 0,
            pinned: entry.status & status::PINNED != 0,
            was_writable: entry.torpor_was_writable(),
            sealed: entry.torpor_sealed(),
        })
    }

    /// Its addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// How many bytes it has; never none.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether what the process writes into it is its own. Children that inherit an AIO ring share it, whatever its
    /// flags say.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.form.sharing != Sharing::Shared && self.kind != AreaKind::AioRing
    }

    /// The file that is opened for it, and the flags that it is opened with, if others than its own.
    #[must_use]
    pub fn opens(&self) -> Option<(u32, u32)> {
        match self.kind {
            AreaKind::File(file) => Some((file, self.open_flags?)),
            _ => None,
        }
    }
}

impl AreaKind {
    fn of(entry: &VmaEntry) -> Result<Self, String> {
        use super::status::{
            AIO_RING, ANON_PRIVATE, ANON_SHARED, FILE_PRIVATE, FILE_SHARED, HEAP, IO_URING, MEMFD,
            PINNED, REGULAR, SOCKET, STACK, SYSVIPC, USERFAULTFD, VDSO, VSYSCALL, VVAR,
        };
        const MEMFD_PRIVATE: u32 = MEMFD | FILE_PRIVATE;
        const MEMFD_SHARED: u32 = MEMFD | FILE_SHARED;
        /// As Torpor's old versions wrote it.
        const MEMFD_OBJECT: u32 = MEMFD | ANON_SHARED;
        let number = || {
            let number = u32::try_from(entry.shmid).ok();
            number.ok_or_else(|| format!("is of number {}, which is out of range", entry.shmid))
        };
        let use_of_it = REGULAR | STACK | HEAP | USERFAULTFD | PINNED;
        // The kernel's own parts and AIO rings are private memory besides, in CRIU's images.
        let kind = match entry.status & !use_of_it {
            ANON_PRIVATE => AreaKind::Anonymous,
            FILE_PRIVATE | FILE_SHARED => AreaKind::File(number()?),
            MEMFD_PRIVATE | MEMFD_SHARED | MEMFD_OBJECT => AreaKind::MemoryFile(number()?),
            ANON_SHARED => AreaKind::SharedObject(entry.shmid),
            other => match other & !(ANON_PRIVATE | ANON_SHARED) {
                VSYSCALL => AreaKind::Vsyscall,
                VDSO => AreaKind::Vdso,
                VVAR => AreaKind::Vvar,
                AIO_RING => AreaKind::AioRing,
                SYSVIPC => AreaKind::Segment(number()?),
                SOCKET => AreaKind::PacketRing(number()?),
                IO_URING => AreaKind::IoUring(number()?),
                _ => return Err(format!("has the status {:#x}, which there is not", entry.status)),
            },
        };
        // What is shared decides whose pages are in which image.
        let is_shared = entry.flags & flag::TYPE == flag::SHARED;
        let fits = match kind {
            AreaKind::AioRing | AreaKind::IoUring(_) | AreaKind::PacketRing(_) => true,
            AreaKind::Segment(_) => is_shared,
            _ => is_shared == (entry.status & (FILE_SHARED | ANON_SHARED) != 0),
        };
        match fits {
            true => Ok(kind),
            false => Err(format!(
                "has the status {:#x} and the flags {:#x}, which contradict each other",
                entry.status, entry.flags
            )),
        }
    }

    /// The open file that it maps, if it maps one.
    #[must_use]
    pub fn file(self) -> Option<u32> {
        match self {
            AreaKind::File(file)
            | AreaKind::MemoryFile(file)
            | AreaKind::PacketRing(file)
            | AreaKind::IoUring(file) => Some(file),
            _ => None,
        }
    }

    /// Whether it is the vDSO, or its data.
    #[must_use]
    pub fn is_vdso(self) -> bool {
        matches!(self, AreaKind::Vdso | AreaKind::Vvar)
    }

    /// Whether the kernel maps it into every process.
    #[must_use]
    pub fn is_kernels(self) -> bool {
        self.is_vdso() || self == AreaKind::Vsyscall
    }

    /// Whether it comes with the instance of something, and not by itself.
    #[must_use]
    pub fn is_ring(self) -> bool {
        matches!(self, AreaKind::AioRing | AreaKind::IoUring(_))
    }
}

impl AreaForm {
    fn of(entry: &VmaEntry) -> Result<Self, String> {
        let flags = entry.flags;
        let size = flags >> flag::HUGE_SHIFT & flag::HUGE_MASK;
        let huge = (flags & flag::HUGE != 0).then_some(size);
        let sizes = if huge.is_some() { flag::HUGE_MASK << flag::HUGE_SHIFT } else { 0 };
        let others = flags & !(flag::KNOWN | sizes);
        let is_anonymous = entry.status & status::ANON_PRIVATE != 0;
        let sharing = match flags & flag::TYPE {
            flag::SHARED => Sharing::Shared,
            flag::PRIVATE => Sharing::Private,
            // It takes the place of the type that it is based on, or is told beside that.
            flag::DROPPABLE | flag::DROPPABLE_PRIVATE if is_anonymous => Sharing::Droppable,
            _ => return Err(format!("has the flags {flags:#x}, which are of no type")),
        };
        if others != 0 {
            return Err(format!("has flags that no dump gives (bits {others:#x})"));
        }
        Ok(AreaForm {
            sharing,
            grows_down: flags & flag::GROWS_DOWN != 0,
            no_reserve: flags & flag::NO_RESERVE != 0,
            huge,
        })
    }
}
