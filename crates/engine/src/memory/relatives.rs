//! Pages that relatives still share since fork(2): saved once, with the first of them that is
//! dumped.
//!
//! Who has which page is told by its frame (`/proc/PID/pagemap`). The tasks are stopped, but the
//! kernel moves pages as it likes, and a frame that was one page's can be another's a moment
//! later. A frame counts only if the one task shows it, then the other, then the first again: for
//! two pages to have been there in turn it would have had to be emptied, filled and emptied, and
//! to get the first page back.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

use super::frames::{self, Entry, Frame};
use super::pages::{self, PageSpan};
use super::vma::PAGE;
use crate::error::Result;
use crate::proc;

/// The pages that are saved so far and that more than one task maps.
///
/// Takes some 40 bytes for each of them, which is a hundredth of their size.
#[derive(Debug, Default)]
pub(crate) struct Relatives {
    /// Their addresses, and whose they are.
    saved: HashMap<Frame, (u64, Owner)>,
    /// The pagemap of the task that was asked last: most share with the same one.
    asked: Option<(i32, File)>,
}

/// A task whose pages are saved: its pid here, and its id in the images.
type Owner = (i32, u32);

/// Pages looked at together.
const TOGETHER: u64 = 512;

impl Relatives {
    /// Parts runs of pages of a task into those that are saved with a relative at the same
    /// addresses, and those to be saved with `owner` itself, whose `pagemap` it is.
    ///
    /// # Errors
    /// If the pagemap cannot be read.
    pub(crate) fn part(
        &mut self,
        owner: Owner,
        pagemap: &File,
        runs: Vec<PageSpan>,
    ) -> Result<Vec<PageSpan>> {
        let mut parted = Vec::with_capacity(runs.len());
        for run in runs {
            if run.clean {
                pages::push(&mut parted, run);
                continue;
            }
            let mut at = run.start;
            while at < run.end {
                let end = run.end.min(at + TOGETHER * PAGE);
                self.part_some(owner, pagemap, &(at..end), &mut parted)?;
                at = end;
            }
        }
        Ok(parted)
    }

    fn part_some(
        &mut self,
        owner: Owner,
        pagemap: &File,
        range: &Range<u64>,
        out: &mut Vec<PageSpan>,
    ) -> Result<()> {
        let own = frames::entries(pagemap, range)?;
        let mut owners: Vec<_> =
            own.iter().zip(addresses(range)).map(|(entry, at)| self.seems_of(*entry, at)).collect();
        let mut first = 0;
        for same in owners.chunk_by_mut(|a, b| a == b) {
            let own = &own[first..first + same.len()];
            if let Some((other, _)) = same[0] {
                let start = range.start + first as u64 * PAGE;
                let part = start..start + same.len() as u64 * PAGE;
                let confirmed = self.confirm(own, pagemap, other, &part)?;
                for (of, confirmed) in same.iter_mut().zip(confirmed) {
                    *of = of.filter(|_| confirmed);
                }
            }
            first += same.len();
        }
        for ((entry, at), of) in own.iter().zip(addresses(range)).zip(owners) {
            let relative = of.map(|(_, id)| id);
            pages::push(out, PageSpan { start: at, end: at + PAGE, clean: false, relative });
            if let (Some(frame), None) = (entry.shared_frame(), of) {
                self.saved.insert(frame, (at, owner));
            }
        }
        Ok(())
    }

    /// Who seems to have the page at an address, too, and has it in the images.
    fn seems_of(&self, entry: Entry, at: u64) -> Option<Owner> {
        let (place, owner) = self.saved.get(&entry.shared_frame()?)?;
        (*place == at).then_some(*owner)
    }

    /// Whether a task, which had its `own` pages in a range, has the same ones as another.
    fn confirm(
        &mut self,
        own: &[Entry],
        pagemap: &File,
        other: i32,
        range: &Range<u64>,
    ) -> Result<Vec<bool>> {
        let theirs = self.entries_of(other, range)?;
        let again = frames::entries(pagemap, range)?;
        let all = own.iter().zip(theirs).zip(again);
        let is_same = |((own, theirs), again): ((&Entry, Entry), Entry)| {
            let frame = own.shared_frame();
            frame == theirs.shared_frame() && frame == again.shared_frame()
        };
        Ok(all.map(is_same).collect())
    }

    fn entries_of(&mut self, pid: i32, range: &Range<u64>) -> Result<Vec<Entry>> {
        let pagemap = match self.asked.take().filter(|(asked, _)| *asked == pid) {
            Some((_, pagemap)) => pagemap,
            None => proc::open(pid, "pagemap")?,
        };
        let entries = frames::entries(&pagemap, range);
        self.asked = Some((pid, pagemap));
        entries
    }
}

fn addresses(range: &Range<u64>) -> impl Iterator<Item = u64> {
    range.clone().step_by(4096)
}
