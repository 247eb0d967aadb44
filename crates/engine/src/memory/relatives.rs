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
use std::os::unix::fs::FileExt;

use super::pages::{self, Found};
use super::vma::PAGE;
use crate::error::{Context, Result};
use crate::proc;

/// The pages that are saved so far and that more than one task maps.
///
/// Takes some 40 bytes for each of them, which is a hundredth of their size.
#[derive(Debug, Default)]
pub struct Relatives {
    saved: HashMap<Frame, (u64, Owner)>,
    /// The pagemap of the task that was asked last: most share with the same one.
    asked: Option<(i32, File)>,
}

/// A task whose pages are saved: its pid here, and its id in the images.
type Owner = (i32, i32);

/// The number of a page frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Frame(u64);

/// Pages looked at together.
const TOGETHER: usize = 512;

impl Relatives {
    /// Parts runs of pages of a task into those that are saved with a relative at the same
    /// addresses, and those to be saved with `owner` itself, whose `pagemap` it is.
    ///
    /// # Errors
    /// The kernel's.
    pub fn part(&mut self, owner: Owner, pagemap: &File, runs: Vec<Found>) -> Result<Vec<Found>> {
        let mut parted = Vec::with_capacity(runs.len());
        for run in runs {
            if run.clean {
                pages::push(&mut parted, run);
                continue;
            }
            let mut at = run.start;
            while at < run.end {
                let end = run.end.min(at + TOGETHER as u64 * PAGE);
                self.part_some(owner, pagemap, Found { start: at, end, ..run }, &mut parted)?;
                at = end;
            }
        }
        Ok(parted)
    }

    fn part_some(
        &mut self,
        owner: Owner,
        pagemap: &File,
        run: Found,
        out: &mut Vec<Found>,
    ) -> Result<()> {
        let own = frames(pagemap, owner.0, run)?;
        let claimed: Vec<_> = own.iter().zip(addresses(run)).map(|at| self.claimed(at)).collect();
        let mut first = 0;
        for same in claimed.chunk_by(|a, b| a == b) {
            let end = first + same.len();
            let start = run.start + first as u64 * PAGE;
            let part = Found { start, end: start + same.len() as u64 * PAGE, ..run };
            let confirmed = match same[0] {
                Some(other) => self.confirm((owner, pagemap), other, &own[first..end], part)?,
                None => vec![false; same.len()],
            };
            for ((frame, at), confirmed) in
                own[first..end].iter().zip(addresses(part)).zip(confirmed)
            {
                let relative = same[0].filter(|_| confirmed).map(|(_, id)| id.cast_unsigned());
                pages::push(out, Found { start: at, end: at + PAGE, relative, ..run });
                if let (Some(frame), None) = (frame, relative) {
                    self.saved.insert(*frame, (at, owner));
                }
            }
            first = end;
        }
        Ok(())
    }

    /// Who seems to have the page at an address.
    fn claimed(&self, (frame, at): (&Option<Frame>, u64)) -> Option<Owner> {
        let (place, owner) = self.saved.get(&(*frame)?)?;
        (*place == at).then_some(*owner)
    }

    /// Whether two tasks have the same page at each address of a run, of which one had `own`.
    fn confirm(
        &mut self,
        (owner, pagemap): (Owner, &File),
        (other, _): Owner,
        own: &[Option<Frame>],
        run: Found,
    ) -> Result<Vec<bool>> {
        let asked = match self.asked.take().filter(|(pid, _)| *pid == other) {
            Some((_, file)) => file,
            None => proc::open(other, "pagemap")?,
        };
        let theirs = frames(&asked, other, run)?;
        self.asked = Some((other, asked));
        let again = frames(pagemap, owner.0, run)?;
        let all = own.iter().zip(&theirs).zip(&again);
        Ok(all.map(|((own, theirs), again)| own == theirs && own == again).collect())
    }
}

fn addresses(run: Found) -> impl Iterator<Item = u64> {
    (run.start..run.end).step_by(4096)
}

/// The frames of those pages of a run that more than one task maps
/// (Documentation/admin-guide/mm/pagemap.rst). None where the kernel does not show them.
fn frames(pagemap: &File, pid: i32, run: Found) -> Result<Vec<Option<Frame>>> {
    const ENTRY: usize = 8;
    const PRESENT: u64 = 1 << 63;
    const ALONE: u64 = 1 << 56;
    const NUMBER: u64 = (1 << 55) - 1;
    let count = usize::try_from((run.end - run.start) / PAGE).unwrap_or(TOGETHER);
    let mut entries = vec![[0; ENTRY]; count];
    let read = pagemap.read_exact_at(entries.as_flattened_mut(), run.start / PAGE * ENTRY as u64);
    read.context(|| format!("pagemap of task {pid} at {:x}", run.start))?;
    let frame = |entry: [u8; ENTRY]| {
        let entry = u64::from_le_bytes(entry);
        let shared = entry & (PRESENT | ALONE) == PRESENT && entry & NUMBER != 0;
        shared.then_some(Frame(entry & NUMBER))
    };
    Ok(entries.into_iter().map(frame).collect())
}
