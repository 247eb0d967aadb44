//! The memory of a process and what the kernel keeps with it: read of its image once, judged, and made.

mod area;
pub mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::Range;

use torpor_images::proto::{AioRingEntry, MmEntry, TorporMemoryName};
use torpor_images::{ImageDir, kind};

pub use area::{Advice, AreaForm, AreaKind, KEYS, MemoryArea, MemoryLock, Sharing};

use crate::error::Error;
use area::PAGE;

/// More words than the auxiliary vector of any kernel has (`AT_VECTOR_SIZE` is about 50).
const MOST_AUXILIARY: usize = 128;
/// How long the name of memory can be (`ANON_VMA_NAME_MAX_LEN` of the kernel, without the zero).
const LONGEST_NAME: usize = 79;

/// The memory of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The open file that is its program.
    pub program: u32,
    /// Where the parts of that are.
    pub layout: ProgramLayout,
    /// Its auxiliary vector (getauxval(3)).
    pub auxiliary: Vec<u64>,
    /// Its mappings, by their addresses.
    pub areas: Vec<MemoryArea>,
    /// Guard pages (`MADV_GUARD_INSTALL`) in these.
    pub guards: Vec<Range<u64>>,
    /// Its AIO contexts. A ring without one is inherited.
    pub contexts: Vec<AioContext>,
    /// The names of its memory.
    pub names: Vec<AreaName>,
    /// The protection keys that it has allocated, as bits.
    pub keys: u32,
    /// Whether it can be dumped and traced (`PR_SET_DUMPABLE`), if the image has it.
    pub dumpable: Option<Dumpable>,
    /// It gets no huge pages (`PR_SET_THP_DISABLE`), with these flags.
    pub no_huge_pages: Option<u32>,
    /// It gets no executable memory (`PR_SET_MDWE`), with these bits.
    pub no_new_code: Option<u32>,
    /// The kernel merges pages of it that are the same (`PR_SET_MEMORY_MERGE`).
    pub merges: bool,
    /// Which kinds of memory go into a core dump (core(5)), if others than usual.
    pub core_dump: Option<u32>,
}

/// Where the parts of a program are: `struct prctl_mm_map` of linux/prctl.h.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProgramLayout {
    /// First address of its code, and the one behind.
    pub code: [u64; 2],
    /// Likewise, its data.
    pub data: [u64; 2],
    /// Likewise, its heap.
    pub heap: [u64; 2],
    /// Where its stack begins.
    pub stack: u64,
    /// As the code, its arguments.
    pub arguments: [u64; 2],
    /// Likewise, its environment.
    pub environment: [u64; 2],
}

/// A context of io_setup(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AioContext {
    /// Where its ring begins.
    pub start: u64,
    /// For how many requests it is.
    pub requests: u32,
}

/// The name of anonymous memory (`PR_SET_VMA_ANON_NAME`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AreaName {
    /// What it is the name of.
    pub range: Range<u64>,
    /// The name.
    pub name: String,
}

/// Whether a process can be dumped and traced; the number is that of `PR_GET_DUMPABLE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dumpable {
    /// Nobody may.
    No = 0,
    /// Its user may.
    Yes = 1,
    /// Only the superuser gets a dump (`fs.suid_dumpable`).
    ByRoot = 2,
}

impl ProcessMemory {
    /// That of the task with this pid in the images.
    ///
    /// # Errors
    /// If the image is missing or damaged; what of it there cannot be.
    pub fn read(images: &ImageDir, pid: u32) -> crate::error::Result<Self> {
        let entry = images.read_one(kind::MM, pid.into())?;
        let invalid = |reason| Error::Invalid { image: kind::MM.file_name(pid.into()), reason };
        Self::of(entry).map_err(invalid)
    }

    fn of(entry: MmEntry) -> Result<Self, String> {
        let (guards, areas): (Vec<_>, Vec<_>) =
            entry.vmas.iter().partition(|vma| vma.status & status::GUARD != 0);
        let areas = areas.into_iter().map(MemoryArea::of).collect::<Result<_, _>>()?;
        let memory = ProcessMemory {
            program: entry.exe_file_id,
            layout: ProgramLayout::of(&entry),
            areas,
            guards: guards.into_iter().map(|vma| vma.start..vma.end).collect(),
            contexts: Vec::new(),
            keys: entry.torpor_pkeys.unwrap_or_default(),
            dumpable: entry.dumpable.map(Dumpable::of).transpose()?,
            no_huge_pages: (entry.thp_disabled == Some(true))
                .then(|| entry.torpor_thp_flags.unwrap_or_default()),
            no_new_code: entry.torpor_mdwe,
            merges: entry.torpor_memory_merge(),
            core_dump: entry.torpor_coredump_filter,
            auxiliary: entry.mm_saved_auxv,
            names: Vec::new(),
        };
        memory.check()?;
        let name = |TorporMemoryName { start, end, name }| AreaName { range: start..end, name };
        let names: Vec<AreaName> = entry.torpor_names.into_iter().map(name).collect();
        names.iter().try_for_each(|name| memory.check_name(name))?;
        let contexts = memory.contexts_of(&entry.aios)?;
        Ok(ProcessMemory { names, contexts, ..memory })
    }

    fn check(&self) -> Result<(), String> {
        let mut sorted = self.areas.windows(2);
        if let Some(pair) = sorted.find(|pair| pair[1].start < pair[0].end) {
            let MemoryArea { start, end, .. } = pair[1];
            return Err(format!("mapping {start:x}-{end:x} is impossible here"));
        }
        if let Some(Range { start, end }) = self.guards.iter().find(|guard| !self.has(guard)) {
            return Err(format!("guard pages {start:x}-{end:x} are in no mapping"));
        }
        if self.auxiliary.len() > MOST_AUXILIARY {
            let words = self.auxiliary.len();
            return Err(format!("has an auxiliary vector of {words} words"));
        }
        if self.keys & 1 != 0 || self.keys >= 1 << KEYS {
            let keys = self.keys;
            return Err(format!("has the protection keys {keys:#x}, which there cannot be"));
        }
        Ok(())
    }

    fn check_name(&self, AreaName { range, name }: &AreaName) -> Result<(), String> {
        if name.len() > LONGEST_NAME {
            return Err(format!("has a name of {} bytes for memory", name.len()));
        }
        match self.has(range) {
            true => Ok(()),
            false => {
                Err(format!("has a name for {:x}-{:x}, which it lacks", range.start, range.end))
            }
        }
    }

    fn contexts_of(&self, entries: &[AioRingEntry]) -> Result<Vec<AioContext>, String> {
        let mut seen = BTreeSet::new();
        let context = |entry: &AioRingEntry| {
            let start = entry.id;
            let place = self.areas.binary_search_by_key(&start, |area| area.start).ok();
            let ring = place.map(|place| &self.areas[place]);
            let is_ring = ring.is_some_and(|ring| {
                ring.kind == AreaKind::AioRing && ring.len() == u64::from(entry.ring_len)
            });
            match is_ring && seen.insert(start) {
                true => Ok(AioContext { start, requests: entry.nr_req }),
                false => Err(format!("an AIO context at {start:x} has no ring of its own")),
            }
        };
        entries.iter().map(context).collect()
    }

    /// Whether it has whole pages in mappings from the one end of a range to the other.
    fn has(&self, range: &Range<u64>) -> bool {
        let first = self.areas.partition_point(|area| area.end <= range.start);
        let mut at = range.start;
        let here = self.areas[first..].iter().take_while(|area| area.start < range.end);
        for area in here {
            if area.start > at {
                return false;
            }
            at = area.end;
        }
        let is_aligned = range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
        is_aligned && range.start < range.end && at >= range.end
    }
}

impl ProgramLayout {
    fn of(entry: &MmEntry) -> Self {
        ProgramLayout {
            code: [entry.mm_start_code, entry.mm_end_code],
            data: [entry.mm_start_data, entry.mm_end_data],
            heap: [entry.mm_start_brk, entry.mm_brk],
            stack: entry.mm_start_stack,
            arguments: [entry.mm_arg_start, entry.mm_arg_end],
            environment: [entry.mm_env_start, entry.mm_env_end],
        }
    }
}

impl Dumpable {
    fn of(number: i32) -> Result<Self, String> {
        match number {
            0 => Ok(Dumpable::No),
            1 => Ok(Dumpable::Yes),
            2 => Ok(Dumpable::ByRoot),
            other => Err(format!("has {other} in place of whether it can be dumped")),
        }
    }
}
