//! The pagemaps: which pages of an address space are where.

use std::ops::Range;

use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::kind::{self, Kind};
use crate::proto::{PagemapEntry, PagemapHead};
use crate::reader::Reader;
use crate::writer::Writer;

/// The pages are in the parent directory's images.
pub const PE_PARENT: u32 = 1;
/// The pages may be brought in after the task runs.
pub const PE_LAZY: u32 = 2;
/// The pages are in `pages-N.img`.
pub const PE_PRESENT: u32 = 4;
/// The pages are those of a relative, in the same directory and at the same addresses.
/// Torpor's own.
const PE_RELATIVE: u32 = 1 << 16;

/// Adjacent pages that are found in the same way. With none of the flags set
/// they are pages of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Address of the first page (offset in the segment for shared memory).
    pub vaddr: u64,
    /// How many pages.
    pub pages: u64,
    /// See [`PE_PARENT`].
    pub in_parent: bool,
    /// See [`PE_LAZY`].
    pub lazy: bool,
    /// See [`PE_PRESENT`].
    pub present: bool,
    /// The id of the pagemap that has the pages itself, see [`PE_RELATIVE`].
    pub relative: Option<u32>,
}

/// A pagemap: runs in the order of their addresses. Those that are present
/// stand one after the other in the pages file, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pagemap {
    /// The N of `pages-N.img`.
    pub pages_id: u32,
    /// They are compressed: in `pages-packed-N.img`.
    pub packed: bool,
    /// The number in its own name: a process or a segment of shared memory.
    pub owner: u64,
    /// What is mapped, in ascending order.
    pub runs: Vec<Run>,
}

/// The size of a page on this machine.
#[must_use]
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

impl Run {
    /// The addresses that the run covers.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.vaddr..self.vaddr.saturating_add(self.bytes())
    }

    /// The size of the run in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.saturating_mul(page_size())
    }

    /// The `flags` of the entry that stands for this run.
    #[must_use]
    pub fn flags(&self) -> u32 {
        let relative = self.relative.is_some();
        [
            (self.in_parent, PE_PARENT),
            (self.lazy, PE_LAZY),
            (self.present, PE_PRESENT),
            (relative, PE_RELATIVE),
        ]
        .iter()
        .filter(|(set, _)| *set)
        .fold(0, |flags, (_, flag)| flags | flag)
    }

    /// Whether pages that follow are found in the same way.
    fn is_like(&self, other: &Self) -> bool {
        self.flags() == other.flags() && self.relative == other.relative
    }

    /// The run for an entry, or what is wrong with the entry by itself.
    fn from_entry(entry: &PagemapEntry) -> Result<Self, String> {
        // Before there were flags, what was not in the parent was present.
        let in_parent = entry.in_parent.unwrap_or(false);
        let flags = entry.flags.unwrap_or(if in_parent { PE_PARENT } else { PE_PRESENT });
        let run = Self {
            vaddr: entry.vaddr,
            pages: entry.nr_pages.unwrap_or_else(|| entry.compat_nr_pages.into()),
            in_parent: flags & PE_PARENT != 0 || in_parent,
            lazy: flags & PE_LAZY != 0,
            present: flags & PE_PRESENT != 0,
            relative: entry.torpor_relative,
        };
        if flags & !(PE_PARENT | PE_LAZY | PE_PRESENT | PE_RELATIVE) != 0 {
            return Err(format!("unknown page flags {flags:#x}"));
        }
        let (relative, others) = (flags & PE_RELATIVE != 0, flags & !PE_RELATIVE != 0);
        if relative != run.relative.is_some() || relative && (others || in_parent) {
            return Err("pages that are a relative's, and are not".into());
        }
        if run.in_parent && run.present {
            return Err("pages that are both here and in the parent".into());
        }
        if run.pages == 0 {
            return Err("a run of no pages".into());
        }
        if !run.vaddr.is_multiple_of(page_size()) {
            return Err(format!("address {:#x} is not that of a page", run.vaddr));
        }
        let bytes = run.pages.checked_mul(page_size());
        if bytes.and_then(|bytes| run.vaddr.checked_add(bytes)).is_none() {
            return Err(format!("{} pages at {:#x} are out of range", run.pages, run.vaddr));
        }
        Ok(run)
    }

    /// The entry that stands for this run.
    #[must_use]
    pub fn to_entry(&self) -> PagemapEntry {
        PagemapEntry {
            vaddr: self.vaddr,
            // Readers that do not know `nr_pages` have to make do with this.
            compat_nr_pages: u32::try_from(self.pages).unwrap_or(u32::MAX),
            in_parent: self.in_parent.then_some(true),
            flags: Some(self.flags()),
            nr_pages: Some(self.pages),
            torpor_relative: self.relative,
        }
    }
}

impl Pagemap {
    /// Reads the pagemap of `kind` ([`kind::PAGEMAP`] or
    /// [`kind::SHMEM_PAGEMAP`]) for `id`. Runs are sorted and do not overlap,
    /// and the present ones are no more than the pages file holds.
    pub fn read(dir: &ImageDir, kind: Kind, id: u64) -> Result<Self> {
        let map = Self::read_unbacked(dir, kind, id)?;
        let wanted = map.present_bytes();
        // The index says where compressed pages are.
        if wanted > 0 && !map.packed {
            let file = dir.path().join(kind::PAGES.file_name(map.pages_id.into()));
            let meta = dir.raw_file_open(kind::PAGES, map.pages_id.into())?.metadata();
            let left = meta.map_err(|error| Error::io(&file, "stat", error))?.len();
            if left < wanted {
                let what = "the pages in the pagemap";
                return Err(Error::Truncated { file, offset: 0, what, wanted, left });
            }
        }
        Ok(map)
    }

    /// Like [`Pagemap::read`], for pages that are elsewhere: the pages file
    /// is not looked at.
    pub fn read_unbacked(dir: &ImageDir, kind: Kind, id: u64) -> Result<Self> {
        let file = dir.path().join(kind.file_name(id));
        let map = Self::from_reader(&mut dir.reader(kind, id)?.ok_or(Error::Missing { file })?)?;
        Ok(Self { owner: id, ..map })
    }

    /// Reads a pagemap up to the end of its file; its owner is not in it.
    pub fn from_reader(reader: &mut Reader) -> Result<Self> {
        let head: PagemapHead = reader.expect()?;
        let mut map =
            Self { pages_id: head.pages_id, packed: head.torpor_packed(), owner: 0, runs: vec![] };
        let mut end = 0;
        loop {
            let offset = reader.offset();
            let Some(entry) = reader.next::<PagemapEntry>()? else { break };
            let run = Run::from_entry(&entry).map_err(|reason| reader.invalid(offset, reason))?;
            if run.vaddr < end {
                let reason = format!("pages at {:#x} overlap those before them", run.vaddr);
                return Err(reader.invalid(offset, reason));
            }
            end = run.range().end;
            map.runs.push(run);
        }
        Ok(map)
    }

    /// How large the pages file of this pagemap is.
    #[must_use]
    pub fn present_bytes(&self) -> u64 {
        // Sorted and disjoint runs cannot add up to more than a u64 holds.
        self.runs.iter().filter(|run| run.present).map(Run::bytes).sum()
    }

    /// Each run, with its offset in the pages file where it is present.
    pub fn offsets(&self) -> impl Iterator<Item = (Run, Option<u64>)> + '_ {
        let mut next = 0;
        self.runs.iter().map(move |run| {
            let offset = run.present.then_some(next);
            next += if run.present { run.bytes() } else { 0 };
            (*run, offset)
        })
    }
}

/// Writes a pagemap run by run, in the order of their addresses. Adjacent
/// runs that are found in the same way become one.
#[derive(Debug)]
#[must_use = "a pagemap is not complete before finish()"]
pub struct PagemapWriter {
    writer: Writer,
    last: Option<Run>,
}

impl PagemapWriter {
    /// Starts the pagemap of `kind` for `id`; its pages are in
    /// `pages-PAGES_ID.img`.
    pub fn create(dir: &ImageDir, kind: Kind, id: u64, pages_id: u32) -> Result<Self> {
        Self::start(dir, kind, id, PagemapHead { pages_id, torpor_packed: None })
    }

    /// Like [`PagemapWriter::create`], for pages that are compressed.
    pub fn packed(dir: &ImageDir, kind: Kind, id: u64, pages_id: u32) -> Result<Self> {
        Self::start(dir, kind, id, PagemapHead { pages_id, torpor_packed: Some(true) })
    }

    fn start(dir: &ImageDir, kind: Kind, id: u64, head: PagemapHead) -> Result<Self> {
        let mut writer = dir.writer(kind, id)?;
        writer.entry(&head)?;
        Ok(Self { writer, last: None })
    }

    /// Adds a run, which must lie behind those before it.
    pub fn push(&mut self, run: Run) -> Result<()> {
        match &mut self.last {
            Some(last) if last.range().end == run.vaddr && last.is_like(&run) => {
                last.pages += run.pages;
                Ok(())
            }
            last => match last.replace(run) {
                Some(done) => self.writer.entry(&done.to_entry()),
                None => Ok(()),
            },
        }
    }

    /// Completes the file.
    pub fn finish(mut self) -> Result<()> {
        if let Some(last) = self.last.take() {
            self.writer.entry(&last.to_entry())?;
        }
        self.writer.finish()
    }
}
