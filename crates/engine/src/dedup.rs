//! Frees the space of pages that a newer dump of a chain holds too.
//!
//! An incremental dump has the pages that changed, and finds the others in its parent
//! directory. What the parent has of the changed ones is never read again on the way
//! from the newest dump; it is punched out of the parent's pages file, which keeps its
//! size and its pagemap. Of compressed pages a cluster goes when the last page in it is not
//! needed any more. The older dumps cannot be restored by themselves any more. Pages that a
//! relative has there, too, are needed until a newer dump has them of both.
//!
//! Sealed pages are punched out as they are: only the pagemaps are opened. With tags for
//! each page nobody misses them; out of a sum over all pages they are taken before.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{FallocateFlags, fallocate};
use torpor_images::kind::{self, Kind};
use torpor_images::packed::Index;
use torpor_images::pagemap::Pagemap;
use torpor_images::{ImageDir, pages};

use crate::error::{Context, Result};
use crate::host::Remark;
use crate::options::Options;
use crate::ranges::gaps;

/// Pages of one address space (or shared segment), such as those that newer dumps have: sorted
/// and disjoint.
type HeldPages = Vec<Range<u64>>;

/// The pages of each address space or segment, by the kind and the number of its pagemap.
type All = HashMap<(&'static str, u64), HeldPages>;

/// Whose pages need not be in older dumps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newer {
    /// Those of each dump that is newer.
    All,
    /// Those of the newest one.
    Newest,
}

/// Goes from `images` through all its parents, and returns how many bytes of pages
/// have been punched out. What this host has made stays known as that (`opts.trust.host_key`).
///
/// # Errors
/// If an image is damaged, or the file system cannot punch holes.
pub fn dedup(images: &ImageDir, opts: &Options) -> Result<u64> {
    dedup_for(Newer::All, images, opts)
}

/// The same of what `images` themselves have anew: all that there is to do for a chain each of which was treated so when it
/// came. No hole is punched twice.
///
/// # Errors
/// As [`dedup`].
pub(crate) fn dedup_round(images: &ImageDir, opts: &Options) -> Result<u64> {
    dedup_for(Newer::Newest, images, opts)
}

fn dedup_for(newer: Newer, images: &ImageDir, opts: &Options) -> Result<u64> {
    let mut freed = 0;
    let mut known = All::new();
    let mut parent = images.parent()?;
    learn(&pagemaps(images)?, &mut known);
    while let Some(dir) = parent {
        if newer == Newer::Newest && known.values().all(Vec::is_empty) {
            break;
        }
        let maps = pagemaps(&dir)?;
        let lent = lent(&maps, &known);
        let mut mark = Remark::of(opts.trust.host_key.as_deref(), &dir, opts.memory.workers())?;
        for (kind, map) in &maps {
            if let Some(known) = known.get(&(kind.name, map.owner)) {
                let needed = lent.get(&(kind.name, map.owner)).map_or(&[][..], Vec::as_slice);
                let superseded = without(known, needed);
                let gone = places(map, &superseded);
                pages::take_out(&dir, map, &gone)?;
                freed += punch(&dir, map, gone, mark.as_mut())?;
            }
        }
        mark.map_or(Ok(()), |mark| mark.write(&dir, opts.memory.workers()))?;
        match newer {
            Newer::All => learn(&maps, &mut known),
            Newer::Newest => forget(&maps, &mut known),
        }
        parent = dir.parent()?;
    }
    Ok(freed)
}

/// The same for images that somebody has named: what this host has made loses nothing by what it has not.
///
/// # Errors
/// As [`dedup`]; [`Error::Usage`] for such images.
///
/// [`Error::Usage`]: crate::Error::Usage
pub fn dedup_named(images: &ImageDir, opts: &Options) -> Result<u64> {
    crate::host::check_chain(opts, images)?;
    dedup(images, opts)
}

/// Punches out all pages of `images` and its parents, which have been restored. Returns
/// how many bytes that are.
///
/// # Errors
/// As [`dedup_named`].
pub fn free(images: &ImageDir, opts: &Options) -> Result<u64> {
    crate::host::check_chain(opts, images)?;
    let everything: HeldPages = std::iter::once(0..u64::MAX).collect();
    let mut freed = 0;
    let mut parent = None;
    loop {
        let dir = parent.as_ref().unwrap_or(images);
        for (_, map) in pagemaps(dir)? {
            freed += punch(dir, &map, places(&map, &everything), None)?;
        }
        match dir.parent()? {
            Some(next) => parent = Some(next),
            None => return Ok(freed),
        }
    }
}

fn pagemaps(dir: &ImageDir) -> Result<Vec<(Kind, Pagemap)>> {
    let mut all = Vec::new();
    for kind in [kind::PAGEMAP, kind::SHMEM_PAGEMAP] {
        for id in dir.ids(kind)? {
            all.push((kind, Pagemap::read(dir, kind, id)?));
        }
    }
    Ok(all)
}

/// Adds the pages of a dump to those that its parents need not have.
fn learn(maps: &[(Kind, Pagemap)], known: &mut All) {
    for (kind, map) in maps {
        let ranges = known.entry((kind.name, map.owner)).or_default();
        *ranges = merged(std::mem::take(ranges).into_iter().chain(own(map)).collect());
    }
}

/// Takes out the pages of a dump: older ones have lost them to it.
fn forget(maps: &[(Kind, Pagemap)], known: &mut All) {
    for (kind, map) in maps {
        let Some(ranges) = known.get_mut(&(kind.name, map.owner)) else { continue };
        *ranges = without(ranges, &merged(own(map).collect()));
    }
}

/// The pages that a dump has itself.
fn own(map: &Pagemap) -> impl Iterator<Item = Range<u64>> {
    map.runs.iter().filter(|run| !run.in_parent).map(|run| run.range())
}

/// The pages of a dump that are needed for relatives of whom they are, too: newer dumps do not
/// have them of those.
fn lent(maps: &[(Kind, Pagemap)], known: &All) -> All {
    let mut lent = All::new();
    for (kind, map) in maps {
        let newer = known.get(&(kind.name, map.owner)).map_or(&[][..], Vec::as_slice);
        for run in &map.runs {
            if let Some(relative) = run.relative {
                let needed = without(&[run.range()], newer);
                lent.entry((kind.name, relative.into())).or_default().extend(needed);
            }
        }
    }
    lent.values_mut().for_each(|ranges| *ranges = merged(std::mem::take(ranges)));
    lent
}

/// What of `ranges` does not lie in `others`; all are sorted and disjoint.
fn without(ranges: &[Range<u64>], others: &[Range<u64>]) -> HeldPages {
    ranges.iter().flat_map(|range| gaps(range, within(others, range))).collect()
}

/// Sorted, and as few as possible.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// Where the pages file of a dump has those pages that are `known`, in bytes.
fn places(map: &Pagemap, known: &[Range<u64>]) -> HeldPages {
    let mut places = Vec::new();
    for (run, offset) in map.offsets() {
        let Some(offset) = offset else { continue };
        let range = run.range();
        places.extend(within(known, &range).map(|place| {
            let at = offset + (place.start - run.vaddr);
            at..at + (place.end - place.start)
        }));
    }
    merged(places)
}

/// Punches holes into the pages file of a dump.
fn punch(
    dir: &ImageDir,
    map: &Pagemap,
    holes: HeldPages,
    mut mark: Option<&mut Remark>,
) -> Result<u64> {
    let (kind, holes) = if map.packed {
        (kind::PAGES_PACKED, clusters(&Index::read(dir, map)?, &holes))
    } else {
        (kind::PAGES, holes)
    };
    if holes.is_empty() {
        return Ok(0);
    }
    let name = dir.path().join(kind.file_name(map.pages_id.into())).display().to_string();
    let file = open_to_write(dir, kind, map.pages_id, &name)?;
    // Before the first hole: what is killed in between has some.
    dir.note_pages_gone()?;
    let mut freed = 0;
    let mut exchange = || match &mut mark {
        Some(mark) => mark.exchange(map.pages_id, &file, &holes),
        None => Ok(()),
    };
    exchange()?;
    for &Range { start, end } in &holes {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, how, start, end - start)
            .context(|| format!("punch a hole into {name}"))?;
        freed += end - start;
    }
    exchange()?;
    Ok(freed)
}

/// Where the clusters are stored all of whose pages lie in `holes`.
fn clusters(index: &Index, holes: &HeldPages) -> Vec<Range<u64>> {
    let is_free = |plain: &Range<u64>| within(holes, plain).any(|part| part == *plain);
    if index.is_gathered() {
        // Others may have the same clusters.
        return Vec::new();
    }
    let free = index.clusters().filter(|cluster| is_free(&cluster.plain()));
    merged(free.map(|cluster| cluster.stored()).collect())
}

/// What of `range` lies in the sorted `known`.
fn within(known: &[Range<u64>], range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let first = known.partition_point(|k| k.end <= range.start);
    let Range { start, end } = *range;
    known[first..]
        .iter()
        .take_while(move |k| k.start < end)
        .map(move |k| k.start.max(start)..k.end.min(end))
}

/// A pages file, opened for writing after it was found to be a regular file.
fn open_to_write(dir: &ImageDir, kind: Kind, id: u32, name: &str) -> Result<File> {
    let file = dir.raw_file_open(kind, id.into())?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .context(|| format!("open {name} for writing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restore::pages::Pages;
    use std::io::{Read, Write};
    use std::path::Path;
    use torpor_images::compress::Compression;
    use torpor_images::packed::Packer;
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::pages::PagesWriter;

    const PAGE: u64 = 4096;

    /// Adds a process to a dump of process 7, which has all of its pages.
    fn add_relative(dir: &Path, id: u64, runs: &[(u64, u64)]) {
        let images = ImageDir::open(dir).unwrap();
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, id, 2).unwrap();
        for &(first, pages) in runs {
            let run = Run { vaddr: first * PAGE, pages, relative: Some(7), ..Run::default() };
            map.push(run).unwrap();
        }
        map.finish().unwrap();
    }

    /// A dump of process 7 with these runs of pages: first page, number, in parent.
    fn dump(dir: &Path, parent: Option<&str>, runs: &[(u64, u64, bool)], fill: u8) {
        std::fs::create_dir(dir).unwrap();
        let images = ImageDir::open(dir).unwrap();
        if let Some(parent) = parent {
            images.set_parent(Path::new(parent)).unwrap();
        }
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 1).unwrap();
        let mut pages = images.raw_file_create(kind::PAGES, 1).unwrap();
        for (first, count, in_parent) in runs {
            let present = !in_parent;
            let run = Run {
                vaddr: first * PAGE,
                pages: *count,
                in_parent: *in_parent,
                present,
                ..Run::default()
            };
            map.push(run).unwrap();
            if present {
                let bytes = usize::try_from(count * PAGE).unwrap();
                pages.write_all(&vec![fill; bytes]).unwrap();
            }
        }
        map.finish().unwrap();
    }

    /// The first byte of each page in the pages file.
    fn pages(dir: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        File::open(dir.join("pages-1.img")).unwrap().read_to_end(&mut bytes).unwrap();
        bytes.chunks(4096).map(|page| page[0]).collect()
    }

    #[test]
    fn restored_pages_are_freed_along_the_chain() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 2, false)], 1);
        dump(&at("2"), Some("../1"), &[(10, 1, true), (11, 1, false)], 2);
        assert_eq!(free(&ImageDir::open(at("2")).unwrap(), &Options::default()).unwrap(), 3 * PAGE);
        assert_eq!((pages(&at("1")), pages(&at("2"))), (vec![0, 0], vec![0]));
    }

    #[test]
    fn what_a_newer_dump_has_is_freed() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 6, false), (100, 2, false)], 1);
        dump(&at("2"), Some("../1"), &[(10, 1, true), (11, 2, false), (13, 3, true)], 2);
        // Crosses a boundary of runs, and has a page that nobody else has.
        dump(&at("3"), Some("../2"), &[(12, 3, false), (15, 1, true), (200, 1, false)], 3);
        let freed = dedup(&ImageDir::open(at("3")).unwrap(), &Options::default()).unwrap();
        assert_eq!(pages(&at("3")), [3, 3, 3, 3]);
        assert_eq!(pages(&at("2")), [2, 0]);
        // Page 14 is in the third dump, 11 to 13 in the second or third.
        assert_eq!(pages(&at("1")), [1, 0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(freed, 5 * PAGE);
        // Sizes and pagemaps are as before: it can be done again.
        assert_eq!(
            dedup(&ImageDir::open(at("3")).unwrap(), &Options::default()).unwrap(),
            5 * PAGE
        );
    }

    /// As [`dump`], compressed.
    fn dump_packed(dir: &Path, parent: Option<&str>, runs: &[(u64, u64, bool)], fill: u8) {
        dump(dir, parent, runs, fill);
        let images = ImageDir::open(dir).unwrap();
        let plain = Pagemap::read(&images, kind::PAGEMAP, 7).unwrap();
        let mut map = PagemapWriter::packed(&images, kind::PAGEMAP, 7, 1).unwrap();
        plain.runs.iter().for_each(|run| map.push(*run).unwrap());
        map.finish().unwrap();
        let pages = PagesWriter::create(&images, 1, 7, Some(Compression::LZ4), None).unwrap();
        let present: Vec<_> = plain.runs.iter().filter(|run| run.present).collect();
        let places: Vec<_> = present.iter().map(|run| (run.vaddr, run.pages)).collect();
        let mut bytes = vec![fill; usize::try_from(plain.present_bytes()).unwrap()];
        let span = pages.span(plain.present_bytes() / PAGE);
        pages.write(&span, &places, &mut bytes, &mut Packer::default()).unwrap();
        pages.finish(&images).unwrap();
    }

    #[test]
    fn clusters_go_when_all_their_pages_are_superseded() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        // Clusters of pages 0 to 15, 16 to 31, 32 to 47 and 100 to 109.
        dump_packed(&at("1"), None, &[(0, 48, false), (100, 10, false)], 1);
        dump(&at("2"), Some("../1"), &[(0, 20, true), (20, 40, false)], 2);
        let images = ImageDir::open(at("2")).unwrap();
        let lower = ImageDir::open(at("1")).unwrap();
        let map = Pagemap::read(&lower, kind::PAGEMAP, 7).unwrap();
        let index = Index::read(&lower, &map).unwrap();
        let clusters: Vec<_> = index.clusters().collect();
        assert_eq!(clusters.len(), 4);
        assert_eq!(dedup(&images, &Options::default()).unwrap(), clusters[2].size);
        let stored = std::fs::read(at("1").join("pages-packed-1.img")).unwrap();
        for (number, cluster) in clusters.iter().enumerate() {
            let Range { start, end } = cluster.stored();
            let bytes = &stored[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()];
            assert_eq!(bytes.iter().all(|&byte| byte == 0), number == 2, "{number}");
        }
        // All that the newest needs is there.
        let pages = Pages::load(&images, kind::PAGEMAP, 7).unwrap();
        for (page, fill) in [(0, 1), (19, 1), (20, 2), (59, 2)] {
            let mut bytes = [0; 4096];
            let (stretch, _) = pages.within(page * PAGE..(page + 1) * PAGE).next().unwrap();
            stretch.read(page * PAGE, &mut bytes).unwrap();
            assert_eq!(bytes, [fill; 4096], "{page}");
        }
        assert_eq!(free(&lower, &Options::default()).unwrap(), stored.len() as u64);
    }

    #[test]
    fn what_a_relative_needs_stays() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 6, false)], 1);
        add_relative(&at("1"), 8, &[(11, 3)]);
        add_relative(&at("1"), 9, &[(12, 1), (15, 1)]);
        dump(&at("2"), Some("../1"), &[(10, 5, false), (15, 1, true)], 2);
        // The first of them has its pages anew but for one, the other from the first dump.
        add_relative(&at("2"), 8, &[(11, 2)]);
        dedup(&ImageDir::open(at("2")).unwrap(), &Options::default()).unwrap();
        assert_eq!(pages(&at("1")), [0, 0, 1, 1, 0, 1]);
        assert_eq!(pages(&at("2")), [2; 5]);
    }

    #[test]
    fn round_by_round_each_hole_is_punched_once() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        let images = |name: &str| ImageDir::open(at(name)).unwrap();
        let freed = |name: &str| dedup_round(&images(name), &Options::default()).unwrap();
        dump(&at("1"), None, &[(10, 6, false)], 1);
        assert_eq!(freed("1"), 0);
        dump(&at("2"), Some("../1"), &[(10, 1, true), (11, 3, false), (14, 2, true)], 2);
        assert_eq!(freed("2"), 3 * PAGE);
        dump(&at("3"), Some("../2"), &[(10, 1, true), (11, 1, true), (12, 3, false)], 3);
        // Two of the second one's, and page 14 of the first, which has lost the others.
        assert_eq!(freed("3"), 3 * PAGE);
        assert_eq!([pages(&at("1")), pages(&at("2"))], [vec![1, 0, 0, 0, 0, 1], vec![2, 0, 0]]);
        assert_eq!(pages(&at("3")), [3; 3]);
    }

    #[test]
    fn a_dump_without_a_parent_is_left_alone() {
        let top = tempfile::tempdir().unwrap();
        dump(&top.path().join("1"), None, &[(10, 6, false)], 1);
        let images = ImageDir::open(top.path().join("1")).unwrap();
        assert_eq!(dedup(&images, &Options::default()).unwrap(), 0);
        assert_eq!(pages(&top.path().join("1")), [1; 6]);
    }

    #[test]
    fn ranges() {
        assert_eq!(merged(vec![5..7, 1..3, 3..4, 6..9]), [1..4, 5..9]);
        let known = vec![1..4, 5..9, 20..30];
        assert_eq!(within(&known, &(3..21)).collect::<Vec<_>>(), [3..4, 5..9, 20..21]);
        assert_eq!(within(&known, &(9..20)).count(), 0);
        assert_eq!(without(&known, &[]), known);
        assert_eq!(without(&known, &[0..2, 3..6, 25..27, 29..40]), [2..3, 6..9, 20..25, 27..29]);
        assert_eq!(without(&[], &known), []);
    }
}
