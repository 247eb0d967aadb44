//! What a husk holds while its children are born, besides its own pages.
//!
//! Children share pages with each other that their parent has overwritten since. For them to
//! share these again the parent's husk holds what they have in common when they are born, and
//! gets its own pages in place of it when all of them are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use torpor_policy::memory::MemoryArea;

use super::survives_birth;
use crate::ranges::gaps;
use crate::restore::Task;
use crate::restore::pages::{OwnPagemap, Stretch};

/// Says for each task what its husk is to hold; parents stand before their children.
pub(crate) fn plan(tasks: &mut [Task]) {
    let shares = |task: &Task| {
        let own = u64::from(task.image.tree.pid);
        task.image.pages.stretches().iter().any(|stretch| stretch.origin().pagemap != own)
    };
    // Only then do the images say what is shared.
    if !tasks.iter().any(shares) {
        return;
    }
    for parent in (0..tasks.len()).rev() {
        let (older, younger) = tasks.split_at_mut(parent + 1);
        let pid = older[parent].image.tree.pid;
        let children = younger.iter().filter(|task| task.image.tree.ppid == pid);
        let pages = children.flat_map(|child| inheritable(&older[parent], child));
        let common = in_common(pid.into(), pages);
        if !common.is_empty() {
            let bequest = older[parent].image.pages.with(common);
            older[parent].bequest = Arc::new(bequest);
        }
    }
}

/// Each husk is to hold its own pages: in a template what its children have in common is there for
/// each of them.
pub(crate) fn forget(tasks: &mut [Task]) {
    for task in tasks {
        task.bequest = Arc::clone(&task.image.pages);
    }
}

/// Those pages of a child that it can get by being born: in private mappings that its parent has
/// as well.
fn inheritable(parent: &Task, child: &Task) -> Vec<Stretch> {
    let theirs: Vec<&MemoryArea> = parent.image.areas().collect();
    let is_kept = |vma: &&MemoryArea| {
        let behind = theirs.partition_point(|theirs| theirs.start <= vma.start);
        let whole = theirs[..behind].last();
        vma.is_private() && whole.is_some_and(|whole| survives_birth(whole, vma))
    };
    let kept = child.image.areas().filter(is_kept);
    let parts = kept.flat_map(|vma| child.bequest.within(vma.range()));
    parts.map(|(stretch, range)| stretch.part(range)).collect()
}

/// The pages that two children have in common, but neither of them with their parent, whose
/// pagemap is `parent`. Where others have something else in common, the child that is first in the
/// images is preferred.
fn in_common(parent: u64, children: impl Iterator<Item = Stretch>) -> Vec<Stretch> {
    let mut by_origin: BTreeMap<OwnPagemap, Vec<Stretch>> = BTreeMap::new();
    for stretch in children.filter(|stretch| !stretch.is_zero()) {
        by_origin.entry(stretch.origin()).or_default().push(stretch);
    }
    let mut taken = TakenRanges::default();
    for (_, stretches) in by_origin.iter().filter(|(origin, _)| origin.pagemap == parent) {
        for stretch in stretches {
            taken.take(&stretch.range);
        }
    }
    let mut common = Vec::new();
    for (_, mut stretches) in by_origin.into_iter().filter(|(o, _)| o.pagemap != parent) {
        stretches.sort_by_key(|stretch| stretch.range.start);
        // Of one child they are disjoint: one that begins before this ends is another child's.
        let mut end = 0;
        for stretch in stretches {
            let both = stretch.range.start..stretch.range.end.min(end);
            common.extend(taken.take(&both).into_iter().map(|range| stretch.part(range)));
            end = end.max(stretch.range.end);
        }
    }
    common
}

/// Disjoint ranges: the first address and the one behind the last.
#[derive(Debug, Default)]
struct TakenRanges(BTreeMap<u64, u64>);

impl TakenRanges {
    /// Takes those parts of a range that have not been taken.
    fn take(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.0.range(..range.start).next_back();
        let parts = before.into_iter().chain(self.0.range(range.clone()));
        let parts = parts.map(|(start, end)| (*start).max(range.start)..(*end).min(range.end));
        let free: Vec<_> = gaps(range, parts.filter(|part| !part.is_empty())).collect();
        self.0.extend(free.iter().map(|free| (free.start, free.end)));
        free
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma::PAGE;
    use crate::restore::pages::Pages;
    use std::io::Write;
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::{ImageDir, kind};

    /// A run of pages: the first one, how many, and whose they are.
    type Part = (u64, u64, u32);

    /// The pages of tasks.
    fn family(tasks: &[(u32, &[Part])]) -> Vec<Pages> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        for &(id, runs) in tasks {
            let mut map = PagemapWriter::create(&images, kind::PAGEMAP, id.into(), id).unwrap();
            let mut pages = images.raw_file_create(kind::PAGES, id.into()).unwrap();
            for &(first, count, of) in runs {
                let (vaddr, relative) = (first * PAGE, (of != id).then_some(of));
                let present = of == id;
                map.push(Run { vaddr, pages: count, present, relative, ..Run::default() }).unwrap();
                if present {
                    pages.write_all(&vec![0; usize::try_from(count * PAGE).unwrap()]).unwrap();
                }
            }
            map.finish().unwrap();
        }
        let load = |&(id, _): &(u32, _)| Pages::load(&images, kind::PAGEMAP, id.into()).unwrap();
        tasks.iter().map(load).collect()
    }

    /// Runs as [`family`] has them.
    fn runs(stretches: &[Stretch]) -> Vec<(u64, u64, u64)> {
        let run = |s: &Stretch| (s.range.start / PAGE, (s.range.end - s.range.start) / PAGE);
        stretches.iter().map(|s| (run(s).0, run(s).1, s.origin().pagemap)).collect()
    }

    #[test]
    fn what_children_have_in_common() {
        let family = family(&[
            (1, &[(0, 10, 1)]),
            // Has written all but the first page and the last.
            (2, &[(0, 1, 1), (1, 8, 2), (9, 1, 1)]),
            (3, &[(0, 1, 1), (1, 1, 3), (2, 3, 2), (6, 1, 2), (9, 1, 1)]),
            (4, &[(0, 2, 1), (3, 4, 2), (20, 5, 4)]),
            (5, &[(1, 1, 3), (19, 3, 5), (22, 3, 4)]),
        ]);
        let of = |pages: &[Pages]| -> Vec<Stretch> {
            pages.iter().flat_map(|pages| pages.stretches().to_vec()).collect()
        };
        let mut common = in_common(1, of(&family[1..]).into_iter());
        common.sort_by_key(|stretch| stretch.range.start);
        // The second page is one that two of them share with each other, and one with the parent.
        let expected = [(2, 2, 2), (4, 1, 2), (5, 1, 2), (6, 1, 2), (22, 3, 4)];
        let joined = |runs: &[(u64, u64, u64)]| -> Vec<(u64, u64)> {
            runs.iter()
                .flat_map(|&(first, n, of)| (first..first + n).map(move |p| (p, of)))
                .collect()
        };
        assert_eq!(joined(&runs(&common)), joined(&expected));
        let bequest = family[0].with(common);
        let expected = [(0, 2, 1), (2, 5, 2), (7, 3, 1), (22, 3, 4)];
        assert_eq!(joined(&runs(bequest.stretches())), joined(&expected));
        assert!(in_common(1, of(&family[1..2]).into_iter()).is_empty());
    }
}
