//! Memory of all tasks but the first, which a template holds for them.
//!
//! A task is born as a copy of its parent, so that the memory which it has for itself cannot be in a
//! template where the task has it: the first task may have something else there. It is parked:
//! a copy of the template has it at an address that no task uses, and so have those that are born
//! from it. Each task moves its own to where it belongs and unmaps what no task needs that is still
//! to be born from it. Mappings are parked as a whole: one that was made from parts would stay in
//! parts for the kernel, and mremap(2) would refuse what the task may do.

use std::ops::Range;

use torpor_policy::memory::MemoryArea;
use torpor_tracee::Mapping;

use super::image::TaskImage;
use super::memory::{runs, survives_birth};
use super::order::{self, Step};
use super::tasks::Task;
use super::template;
use crate::error::Result;
use crate::memory::vma::PAGE;
use crate::ranges::{Ranges, gaps};

/// The kernel moves whole page tables where source and target have the same offset in this.
const TABLE: u64 = 2 << 20;
/// What is left free next to the mappings of tasks.
const MARGIN: u64 = 1 << 30;
/// No mapping lies at or above this address unless the program asks for it.
const END: u64 = 1 << 47;
/// A process can have 65,530 mappings, of which the first task needs some.
const MOST: usize = 16_384;
/// A mapping that a task has from its parent is parked if it has at least one page of its own for so
/// many that are common. These are in the template twice then, but only once for all containers.
const WORTH: u64 = 10;

/// One mapping, or neighbours that can be one, and where it is parked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lot {
    /// The task, by its place in the images.
    pub task: usize,
    /// Where it has that.
    pub home: Range<u64>,
    /// The address at which the mapping waits.
    pub at: u64,
}

impl Lot {
    /// The addresses at which the mapping waits.
    pub(super) fn place(&self) -> Range<u64> {
        self.at..self.at + (self.home.end - self.home.start)
    }
}

/// All that is parked; nothing in a restore without a template.
#[derive(Debug, Default)]
pub(super) struct Parking {
    /// By task, and by their addresses there.
    lots: Vec<Lot>,
    /// Who each task is born from, if that is a task and has its memory from the template.
    births: Vec<Option<usize>>,
}

impl Parking {
    /// Chooses what is to be parked, and where. `here` is what the process has that becomes the
    /// template. If there is no room, nothing is.
    ///
    /// # Errors
    /// If the parents and sessions of the tasks in the images make no tree.
    pub(super) fn plan(tasks: &[Task], here: &[Mapping]) -> Result<Self> {
        let births = births(tasks)?;
        let mut chosen = Vec::new();
        for (task, from) in births.iter().enumerate().filter(|(task, _)| *task != 0) {
            let Some(from) = from else { continue };
            let image = &tasks[task].image;
            let vmas = image.areas().filter(|vma| template::has(vma)).copied();
            for run in runs(vmas, &image.pages) {
                let own = own_bytes(&tasks[task], &tasks[*from], &run)?;
                if own > 0 {
                    chosen.push((own, Lot { task, home: extent(&run), at: 0 }));
                }
            }
        }
        if chosen.len() > MOST {
            chosen.sort_by_key(|(own, _)| std::cmp::Reverse(*own));
            chosen.truncate(MOST);
        }
        let mut lots: Vec<Lot> = chosen.into_iter().map(|(_, lot)| lot).collect();
        lots.sort_unstable_by_key(|lot| (lot.task, lot.home.start));
        let taken = tasks.iter().flat_map(|task| task.image.areas()).map(|vma| vma.start..vma.end);
        let taken = taken.chain(here.iter().map(|line| line.start..line.end)).collect();
        if !place(&mut lots, &taken) {
            tracing::warn!(
                "There is no room for the memory of all tasks: only that of the first is shared"
            );
            lots.clear();
        }
        Ok(Parking { lots, births })
    }

    /// The lots that a file names: those of `tasks`, none over another or over what a task has.
    /// None of this can be relied on until it was looked at.
    pub(super) fn parse<'t>(
        tasks: &[Task],
        lines: impl Iterator<Item = &'t str>,
        template: &[Mapping],
    ) -> std::result::Result<Self, String> {
        let births = births(tasks).map_err(|error| error.to_string())?;
        let is_private = |line: &&Mapping| !line.shared && line.inode == 0;
        let there = template.iter().filter(is_private).map(|line| line.start..line.end);
        let there: Ranges = there.collect();
        let mut lots = Vec::new();
        for line in lines {
            let lot =
                parse(line, tasks).ok_or_else(|| format!("{line:?} is no place of memory"))?;
            if !is_filled(&tasks[lot.task].image, &lot.home) || births[lot.task].is_none() {
                return Err(format!("the images have no mapping that {line:?} could name"));
            }
            let place = lot.place();
            if there.within(&place).next().as_ref() != Some(&place) {
                return Err(format!("the template has nothing where {line:?} says"));
            }
            lots.push(lot);
        }
        let home = |lot: &Lot| (lot.task, lot.home.start);
        if lots.windows(2).any(|two| home(&two[0]) >= home(&two[1])) {
            return Err("it names memory twice, or out of order".to_owned());
        }
        let places: Ranges = lots.iter().map(Lot::place).collect();
        let lens: u64 = lots.iter().map(|lot| lot.home.end - lot.home.start).sum();
        let homes = tasks.iter().flat_map(|task| task.image.areas()).map(|vma| vma.start..vma.end);
        if places.len() != lens || !places.and(&homes.collect()).is_empty() {
            return Err("places in it overlap".to_owned());
        }
        Ok(Parking { lots, births })
    }

    /// A line for each lot, as [`Parking::parse`] takes them.
    pub(super) fn lines(&self, tasks: &[Task]) -> String {
        let line = |Lot { task, home, at }: &Lot| {
            let pid = tasks[*task].image.tree.pid;
            format!("{pid} {:x} {:x} {at:x}\n", home.start, home.end)
        };
        self.lots.iter().map(line).collect()
    }

    /// What is parked for a task.
    pub(super) fn of(&self, task: usize) -> &[Lot] {
        let from = self.lots.partition_point(|lot| lot.task < task);
        let len = self.lots[from..].partition_point(|lot| lot.task == task);
        &self.lots[from..from + len]
    }

    /// The places that are parked for a task and for those that are born from it, and from these.
    pub(super) fn below(&self, task: usize) -> Ranges {
        let is_below = |lot: &&Lot| {
            let born = |of: &usize| self.births.get(*of).copied().flatten();
            std::iter::successors(Some(lot.task), born).take(self.births.len()).any(|of| of == task)
        };
        self.lots.iter().filter(is_below).map(Lot::place).collect()
    }
}

/// Whom each task is born from. Those of substitutes have nothing from a template, and nor have
/// those that are born from these.
fn births(tasks: &[Task]) -> Result<Vec<Option<usize>>> {
    let mut births = vec![None; tasks.len()];
    for step in order::steps(tasks)? {
        let (task, from) = match step {
            Step::Birth { task, from: Some(from) } => (task, from),
            Step::SiblingBirth { task, leader } | Step::OrphanBirth { task, leader } => {
                (task, leader)
            }
            Step::Birth { from: None, .. } | Step::Setsid { .. } => continue,
        };
        let is_heir = from == 0 || births.get(from).is_some_and(Option::is_some);
        if task < tasks.len() && from < tasks.len() && is_heir {
            births[task] = Some(from);
        }
    }
    Ok(births)
}

/// From the first of neighbouring mappings to the last.
fn extent(run: &[MemoryArea]) -> Range<u64> {
    run.first().map_or(0, |vma| vma.start)..run.last().map_or(0, |vma| vma.end)
}

/// Whether mappings that a template can have lie side by side from the one end of a range to the other.
fn is_filled(image: &TaskImage, range: &Range<u64>) -> bool {
    let within = |vma: &&MemoryArea| range.start <= vma.start && vma.end <= range.end;
    let vmas = image.areas().filter(within).filter(|vma| template::has(vma));
    vmas.map(|vma| vma.start..vma.end).collect::<Ranges>().as_slice() == [range.clone()]
}

/// How much memory of neighbouring mappings, which stay together, differs from what the task gets by its birth; 0
/// if it is not worth to be parked.
fn own_bytes(task: &Task, from: &Task, run: &[MemoryArea]) -> Result<u64> {
    let stays = |vma: &MemoryArea| from.image.areas().any(|theirs| survives_birth(theirs, vma));
    let inherits = run.iter().all(stays);
    let (mut own, mut common) = (0, 0);
    let mut buffers = [vec![0; COMPARED], vec![0; COMPARED]];
    for (stretch, range) in task.image.pages.within(extent(run)) {
        let theirs: Vec<_> =
            if inherits { from.image.pages.within(range.clone()).collect() } else { Vec::new() };
        own += gaps(&range, theirs.iter().map(|(_, part)| part.clone()))
            .map(|gap| gap.end - gap.start)
            .sum::<u64>();
        for (known, part) in theirs {
            let len = part.end - part.start;
            let same = if known.origin() == stretch.origin() {
                len
            } else {
                equal_bytes(stretch, known, &part, &mut buffers)?
            };
            common += same;
            own += len - same;
        }
    }
    Ok(if own.saturating_mul(WORTH) >= common { own } else { 0 })
}

/// Bytes that are compared at once.
const COMPARED: usize = 256 * 1024;

/// How much of a range is the same in both, in bytes of whole pages.
fn equal_bytes(
    one: &super::pages::Stretch,
    other: &super::pages::Stretch,
    range: &Range<u64>,
    [mine, theirs]: &mut [Vec<u8>; 2],
) -> Result<u64> {
    let page = usize::try_from(PAGE).unwrap_or(4096);
    let (mut at, mut same) = (range.start, 0);
    while at < range.end {
        let len = usize::try_from(range.end - at).unwrap_or(COMPARED).min(COMPARED);
        one.read(at, &mut mine[..len])?;
        other.read(at, &mut theirs[..len])?;
        let pages = mine[..len].chunks(page).zip(theirs[..len].chunks(page));
        same += pages.filter(|(one, other)| one == other).count() as u64 * PAGE;
        at += len as u64;
    }
    Ok(same)
}

/// Gives each lot its place, in the largest gap between what is taken. Says whether there is room.
fn place(lots: &mut [Lot], taken: &Ranges) -> bool {
    let gap = gaps(&(MARGIN..END), taken.within(&(MARGIN..END)))
        .max_by_key(|gap| gap.end - gap.start)
        .unwrap_or(0..0);
    let Some(mut at) = gap.start.checked_next_multiple_of(TABLE) else { return false };
    at += MARGIN;
    for lot in lots {
        // The lowest address from here on with the offset that the mapping has at home.
        let offset = lot.home.start % TABLE;
        at = at.next_multiple_of(TABLE) + offset;
        let len = lot.home.end - lot.home.start;
        if at.saturating_add(len).saturating_add(MARGIN) > gap.end {
            return false;
        }
        lot.at = at;
        // A page between two keeps them apart.
        at += len + PAGE;
    }
    true
}

/// A line of the file that names a template.
fn parse(line: &str, tasks: &[Task]) -> Option<Lot> {
    let mut words = line.split(' ');
    let pid = words.next()?.parse::<u32>().ok()?;
    let task = tasks.iter().position(|task| task.image.tree.pid == pid)?;
    let mut address = || u64::from_str_radix(words.next()?, 16).ok();
    let (start, end, at) = (address()?, address()?, address()?);
    let is_sound = words.next().is_none()
        && start < end
        && [start, end, at].iter().all(|address| address % PAGE == 0)
        && at >= MARGIN
        && at.checked_add(end - start)? <= END;
    is_sound.then_some(Lot { task, home: start..end, at })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use torpor_images::proto::VmaEntry;
    use torpor_policy::TreePlace;
    use torpor_policy::memory::{ProcessMemory, status};

    use super::*;

    fn lot(task: usize, home: Range<u64>) -> Lot {
        Lot { task, home, at: 0 }
    }

    #[test]
    fn places_are_free_and_keep_their_offset() {
        let home = 0x7f00_1234_5000;
        let mut lots = [lot(1, home..home + TABLE), lot(2, home..home + PAGE)];
        let taken = [0x40_0000..0x50_0000, 0x7f00_0000_0000..END].into_iter().collect::<Ranges>();
        assert!(place(&mut lots, &taken));
        let places: Ranges = lots.iter().map(Lot::place).collect();
        assert_eq!(places.len(), TABLE + PAGE);
        assert!(places.and(&taken).is_empty());
        assert!(lots.iter().all(|lot| lot.at % TABLE == lot.home.start % TABLE));
        // Without a gap that is large enough there is none.
        let taken = [0..0x7f00_0000_0000, 0x7f00_8000_0000..END].into_iter().collect();
        assert!(!place(&mut lots, &taken));
    }

    #[test]
    fn who_holds_what() {
        let mut lots = [1, 2, 3].map(|task| lot(task, TABLE..TABLE + PAGE)).to_vec();
        assert!(place(&mut lots, &Ranges::default()));
        let [one, two, three] = [0, 1, 2].map(|at: usize| lots[at].place());
        let parking = Parking { lots, births: vec![None, Some(0), Some(1), Some(0)] };
        assert_eq!(parking.below(0).as_slice(), [one.clone(), two.clone(), three.clone()]);
        assert_eq!(parking.below(1).as_slice(), [one, two.clone()]);
        assert_eq!(
            (parking.below(2).as_slice(), parking.of(2)[0].place()),
            (&[two.clone()][..], two)
        );
        assert_eq!(parking.below(3).as_slice(), [three]);
    }

    /// A parent and its child, with one mapping each that a template can hold.
    fn tasks() -> Vec<Task> {
        let task = |pid: u32, ppid: u32, start: u64| {
            let vma = VmaEntry {
                start,
                end: start + PAGE,
                flags: (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned(),
                status: status::ANON_PRIVATE,
                ..VmaEntry::default()
            };
            let areas = vec![MemoryArea::of(&vma).unwrap()];
            let image = TaskImage {
                tree: TreePlace { pid, ppid, sid: 1, pgid: 1, ..TreePlace::default() },
                memory: Some(ProcessMemory { areas, ..ProcessMemory::default() }),
                ..TaskImage::default()
            };
            let (bequest, vpid) = (Arc::default(), pid.cast_signed());
            Task {
                pid: 0,
                vpid,
                threads: Vec::new(),
                image,
                bequest,
                mapped: Vec::new(),
                places: None,
            }
        };
        vec![task(1, 0, 0x10_0000), task(2, 1, 0x20_0000), task(4, 1, 0x9000_0000)]
    }

    #[test]
    fn a_file_that_names_places_is_not_believed() {
        let tasks = tasks();
        let maps = "80000000-80002000 rw-p 00000000 00:00 0 \n\
                    80003000-80004000 rw-p 00000000 00:01 7 /file\n\
                    80005000-80006000 rw-s 00000000 00:00 0 \n\
                    90000000-90001000 rw-p 00000000 00:00 0 \n";
        let maps = torpor_tracee::parse_maps(maps);
        let parse = |text: &str| Parking::parse(&tasks, text.lines(), &maps);
        let right = "2 200000 201000 80001000\n";
        let parking = parse(right).unwrap();
        assert_eq!(parking.lines(&tasks), right);
        assert_eq!(parking.below(0).as_slice(), std::slice::from_ref(&(0x8000_1000..0x8000_2000)));
        assert!(parse("").unwrap().below(0).is_empty());
        for (wrong, why) in [
            ("", "no place"),
            ("2 200000 201000", "no place"),
            ("2 200000 201000 80001000 0", "no place"),
            ("2 201000 200000 80001000", "no place"),
            ("2 200000 201000 80001001", "no place"),
            ("2 200000 201000 fffffffffffff000", "no place"),
            ("2 200000 201000 1000", "no place"),
            ("3 200000 201000 80001000", "no place"),
            ("2 300000 301000 80001000", "no mapping"),
            ("2 200000 202000 80000000", "no mapping"),
            // The first task has its memory where it belongs.
            ("1 100000 101000 80001000", "no mapping"),
            ("2 200000 201000 80002000", "has nothing"),
            ("2 200000 201000 80003000", "has nothing"),
            ("2 200000 201000 80005000", "has nothing"),
            ("2 200000 201000 90000000", "overlap"),
            ("2 200000 201000 80001000\n4 90000000 90001000 80001000", "overlap"),
            ("2 200000 201000 80000000\n2 200000 201000 80001000", "twice"),
        ] {
            let said = parse(&format!("{wrong}\n")).map(|parking| parking.lines(&tasks));
            assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{wrong}: {said:?}");
        }
    }
}
