//! The pages of a checkpoint, wherever they are: in its own images, or in those of the
//! checkpoints that it builds on (`parent`, page by page the nearest one that has it).

use std::ops::Range;
use std::sync::Arc;

use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind};
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::pages::PagesReader;

use crate::error::{Error, Result};

/// Adjacent pages from one place.
#[derive(Debug, Clone)]
pub struct Stretch {
    /// Their addresses (offsets into an object of shared memory).
    pub range: Range<u64>,
    from: Place,
}

/// Where pages are.
#[derive(Debug, Clone)]
enum Place {
    /// Nowhere: they are zero.
    Zero,
    /// In a pages file, from this offset on.
    File(Arc<PagesReader>, u64),
    /// Still in the tasks that were dumped; their dump serves them.
    Remote,
}

impl Stretch {
    /// Whether the pages hold nothing but zeros.
    pub fn is_zero(&self) -> bool {
        matches!(self.from, Place::Zero)
    }

    /// Whether the pages have to be fetched from the dump that still has them.
    pub fn is_remote(&self) -> bool {
        matches!(self.from, Place::Remote)
    }

    /// Reads what belongs at `address`, which lies in the stretch as the end of `buffer`
    /// does.
    ///
    /// # Errors
    /// The file's; pages that are not in a file.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> Result<()> {
        match &self.from {
            Place::Zero => buffer.fill(0),
            Place::File(file, offset) => {
                file.read_exact_at(buffer, offset + (address - self.range.start))?;
            }
            Place::Remote => {
                let what = format!("the pages at {address:x} are with the dump that serves them");
                return Err(Error::invalid("pages", what));
            }
        }
        Ok(())
    }
}

/// All pages of an address space or of an object of shared memory.
#[derive(Debug, Default)]
pub struct Pages {
    stretches: Vec<Stretch>,
}

impl Pages {
    /// Finds the pages of `kind` with number `id` in `images` and its parents.
    ///
    /// # Errors
    /// Damaged images; pages that no parent has.
    pub fn load(images: &ImageDir, kind: Kind, id: u64) -> Result<Self> {
        let map = Pagemap::read(images, kind, id)?;
        let everything: Vec<Range<u64>> = map.runs.iter().map(Run::range).collect();
        let mut stretches = Vec::new();
        let mut wanted = take(images, &map, &everything, true, &mut stretches)?;
        let mut parent = None;
        while !wanted.is_empty() {
            let lower = parent.as_ref().unwrap_or(images).parent()?;
            let lower = lower.ok_or_else(|| nowhere(images, kind, id, &wanted[0]))?;
            if !lower.has(kind, id)? {
                return Err(nowhere(&lower, kind, id, &wanted[0]));
            }
            let map = Pagemap::read(&lower, kind, id)?;
            if let Some(missing) = first_gap(&map, &wanted) {
                return Err(nowhere(&lower, kind, id, &missing));
            }
            wanted = take(&lower, &map, &wanted, false, &mut stretches)?;
            parent = Some(lower);
        }
        stretches.sort_unstable_by_key(|stretch| stretch.range.start);
        Ok(Pages { stretches })
    }

    /// Whether each page that is read is known to be right by itself.
    pub fn are_verified_singly(&self) -> bool {
        self.stretches.iter().all(|stretch| match &stretch.from {
            Place::File(file, _) => file.verifies_each(),
            Place::Zero | Place::Remote => true,
        })
    }

    /// Whether there are pages that have to be fetched from the dump that still has them.
    pub fn any_remote(&self) -> bool {
        self.stretches.iter().any(Stretch::is_remote)
    }

    /// All stretches, in order.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// The address behind the last page; 0 if there is none.
    pub fn end(&self) -> u64 {
        self.stretches.last().map_or(0, |stretch| stretch.range.end)
    }

    /// Reads what belongs at `address` and behind it. The pages are there, all of them.
    ///
    /// # Errors
    /// See [`Stretch::read`].
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> Result<()> {
        for (stretch, range) in self.within(address..address + buffer.len() as u64) {
            let at = |at: u64| usize::try_from(at - address).unwrap_or(usize::MAX);
            stretch.read(range.start, &mut buffer[at(range.start)..at(range.end)])?;
        }
        Ok(())
    }

    /// Those stretches that lie in `range`, each with the part of it that does.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = (&Stretch, Range<u64>)> {
        let first = self.stretches.partition_point(|stretch| stretch.range.end <= range.start);
        let Range { start, end } = range;
        self.stretches[first..].iter().take_while(move |stretch| stretch.range.start < end).map(
            move |stretch| (stretch, stretch.range.start.max(start)..stretch.range.end.min(end)),
        )
    }
}

/// Takes those `wanted` pages that `images` itself has; returns those that its parent is
/// to have. Both lists are sorted and disjoint. Only the dump of the `newest` images can
/// still be there to serve pages.
fn take(
    images: &ImageDir,
    map: &Pagemap,
    wanted: &[Range<u64>],
    newest: bool,
    out: &mut Vec<Stretch>,
) -> Result<Vec<Range<u64>>> {
    let mut file = None;
    let mut lower: Vec<Range<u64>> = Vec::new();
    let mut next = wanted;
    for (run, offset) in map.offsets() {
        let range = run.range();
        next = &next[next.partition_point(|w| w.end <= range.start)..];
        for want in next.iter().take_while(|w| w.start < range.end) {
            let part = want.start.max(range.start)..want.end.min(range.end);
            if run.in_parent {
                match lower.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => lower.push(part),
                }
                continue;
            }
            let from = match offset {
                None if run.lazy && newest => Place::Remote,
                None if run.lazy => return Err(elsewhere(images, map, &run)),
                None => Place::Zero,
                Some(offset) => {
                    let file = match &file {
                        Some(file) => Arc::clone(file),
                        None => Arc::clone(file.insert(Arc::new(PagesReader::open(images, map)?))),
                    };
                    Place::File(file, offset + (part.start - range.start))
                }
            };
            out.push(Stretch { range: part, from });
        }
    }
    Ok(lower)
}

/// The first part of the `wanted` pages that a pagemap does not mention.
fn first_gap(map: &Pagemap, wanted: &[Range<u64>]) -> Option<Range<u64>> {
    for want in wanted {
        let mut at = want.start;
        let first = map.runs.partition_point(|run| run.range().end <= want.start);
        for run in map.runs[first..].iter().take_while(|run| run.vaddr < want.end) {
            if run.vaddr > at {
                return Some(at..run.vaddr);
            }
            at = run.range().end;
        }
        if at < want.end {
            return Some(at..want.end);
        }
    }
    None
}

fn nowhere(images: &ImageDir, kind: Kind, id: u64, range: &Range<u64>) -> Error {
    Error::invalid(
        images.path().join(kind.file_name(id)).display().to_string(),
        format!("pages at {:x} should be here for a later checkpoint, and are not", range.start),
    )
}

fn elsewhere(images: &ImageDir, map: &Pagemap, run: &Run) -> Error {
    Error::invalid(
        images.path().join(kind::PAGES.file_name(map.pages_id.into())).display().to_string(),
        format!("pages at {:x} were left to a lazy restore: nothing can build on them", run.vaddr),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma::PAGE;
    use std::io::Write;
    use std::path::Path;
    use torpor_images::pagemap::PagemapWriter;

    /// Where the pages of a run of the tests are.
    #[derive(Clone, Copy)]
    enum At {
        Here(u8),
        Parent,
        Zero,
    }

    fn dump(dir: &Path, parent: Option<&str>, runs: &[(u64, u64, At)]) -> ImageDir {
        std::fs::create_dir(dir).unwrap();
        let images = ImageDir::open(dir).unwrap();
        if let Some(parent) = parent {
            images.set_parent(Path::new(parent)).unwrap();
        }
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 1).unwrap();
        let mut pages = images.raw_file_create(kind::PAGES, 1).unwrap();
        for &(first, count, at) in runs {
            map.push(Run {
                vaddr: first * PAGE,
                pages: count,
                in_parent: matches!(at, At::Parent),
                present: matches!(at, At::Here(_)),
                ..Run::default()
            })
            .unwrap();
            if let At::Here(fill) = at {
                pages.write_all(&vec![fill; usize::try_from(count * PAGE).unwrap()]).unwrap();
            }
        }
        map.finish().unwrap();
        images
    }

    /// Page number and first byte of all pages.
    fn content(pages: &Pages) -> Vec<(u64, u8)> {
        let mut all = Vec::new();
        for stretch in pages.stretches() {
            for at in stretch.range.clone().step_by(4096) {
                let mut page = [9; 4096];
                stretch.read(at, &mut page).unwrap();
                assert!(page.iter().all(|&b| b == page[0]));
                all.push((at / PAGE, page[0]));
            }
        }
        all
    }

    #[test]
    fn each_page_comes_from_the_nearest_that_has_it() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 6, At::Here(1)), (20, 2, At::Zero)]);
        dump(
            &at("2"),
            Some("../1"),
            &[(10, 1, At::Parent), (11, 2, At::Here(2)), (13, 9, At::Parent)],
        );
        // The gap at 16 to 20 of the first is not asked for.
        let images = dump(
            &at("3"),
            Some("../2"),
            &[(10, 2, At::Parent), (12, 1, At::Here(3)), (13, 2, At::Parent), (20, 2, At::Parent)],
        );
        let pages = Pages::load(&images, kind::PAGEMAP, 7).unwrap();
        let expected = [(10, 1), (11, 2), (12, 3), (13, 1), (14, 1), (20, 0), (21, 0)];
        assert_eq!(content(&pages), expected);
        assert_eq!(pages.end(), 22 * PAGE);
        let part: Vec<_> = pages.within(11 * PAGE..13 * PAGE).map(|(_, range)| range).collect();
        assert_eq!(part, [11 * PAGE..12 * PAGE, 12 * PAGE..13 * PAGE]);
    }

    #[test]
    fn pages_that_no_parent_has_are_an_error() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 2, At::Here(1))]);
        let error = |name: &str, parent: Option<&str>, runs: &[(u64, u64, At)]| {
            let images = dump(&at(name), parent, runs);
            Pages::load(&images, kind::PAGEMAP, 7).unwrap_err().to_string()
        };
        let text = error("2", Some("../1"), &[(10, 3, At::Parent)]);
        assert!(text.contains("pages at c000"), "{text}");
        let text = error("3", Some("../1"), &[(9, 1, At::Parent)]);
        assert!(text.contains("pages at 9000"), "{text}");
        error("4", None, &[(10, 1, At::Parent)]);
        error("5", Some("../gone"), &[(10, 1, At::Parent)]);
        // A chain that bites its own tail has an end.
        let text = error("6", Some("../6"), &[(10, 1, At::Parent)]);
        assert!(text.contains("parent"), "{text}");
    }
}
