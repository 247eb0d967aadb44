//! The pages of a checkpoint, wherever they are: in its own images, or in those of the
//! checkpoints that it builds on (`parent`, page by page the nearest one that has it). In each
//! of them they can be those of a relative, which has them itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind};
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::pages::PagesReader;

use crate::error::{Context, Error, Result};
use crate::page_server::Fetcher;
use crate::ranges::{Ranges, gaps};

/// Adjacent pages from one place.
#[derive(Debug, Clone)]
pub struct Stretch {
    /// Their addresses (offsets into an object of shared memory).
    pub range: Range<u64>,
    from: Stored,
    of: OwnPagemap,
}

/// The pagemap that has pages itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnPagemap {
    /// How many checkpoints build on its own.
    pub depth: u32,
    /// Its number.
    pub pagemap: u64,
}

/// Where pages are.
#[derive(Debug, Clone)]
enum Stored {
    /// Nowhere: they are zero.
    Zero,
    /// In a pages file, from this offset on.
    File(Arc<PagesReader>, u64),
    /// With a dump or a page server, which the pager asks for them: they are still in the tasks
    /// that were dumped, or the file is not here.
    Remote,
    /// There as well, and fetched when they are read. With the number of the task's pagemap.
    Fetched(Arc<Fetcher>, u64),
}

impl Stretch {
    /// Whether the pages hold nothing but zeros.
    pub fn is_zero(&self) -> bool {
        matches!(self.from, Stored::Zero)
    }

    /// Who has the pages itself: at the same address they are the same if this is.
    pub fn origin(&self) -> OwnPagemap {
        self.of
    }

    /// The part of it that is in `range`, which lies in it.
    pub fn part(&self, range: Range<u64>) -> Stretch {
        let from = match &self.from {
            Stored::File(file, offset) => {
                Stored::File(Arc::clone(file), offset + (range.start - self.range.start))
            }
            other => other.clone(),
        };
        Stretch { range, from, of: self.of }
    }

    /// Whether the pager has to fetch the pages from elsewhere.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self.from, Stored::Remote)
    }

    /// The same pages of task `id`, fetched when they are read.
    pub(crate) fn fetched_by(self, fetcher: &Arc<Fetcher>, id: u64) -> Self {
        Stretch { from: Stored::Fetched(Arc::clone(fetcher), id), ..self }
    }

    /// Reads what belongs at `address`, which lies in the stretch as the end of `buffer`
    /// does.
    ///
    /// # Errors
    /// If the file or the server does not give the pages, or not those that were sealed; if they
    /// are served elsewhere and nobody fetches them.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> Result<()> {
        match &self.from {
            Stored::Zero => buffer.fill(0),
            Stored::File(file, offset) => {
                file.read_exact_at(buffer, offset + (address - self.range.start))?;
            }
            Stored::Remote => {
                let what = format!("those at {address:x} are not here, but where they are served");
                return Err(Error::invalid("pages", what));
            }
            Stored::Fetched(fetcher, id) => fetcher.read(*id, address, buffer)?,
        }
        Ok(())
    }
}

/// Pages that lie in a stretch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    /// Where the first of them belongs.
    pub vaddr: u64,
    /// Bytes.
    pub len: usize,
    /// What has them.
    pub stretch: &'a Stretch,
}

impl Part<'_> {
    /// The addresses.
    pub(crate) fn range(&self) -> Range<u64> {
        self.vaddr..self.vaddr + self.len as u64
    }

    /// Reads them, as [`Stretch::read`] does.
    ///
    /// # Errors
    /// As [`Stretch::read`].
    pub(crate) fn read(&self, buffer: &mut [u8]) -> Result<()> {
        self.stretch.read(self.vaddr, buffer)
    }

    /// The file that they are in, and where.
    fn place(&self) -> Option<(&Arc<PagesReader>, u64)> {
        match &self.stretch.from {
            Stored::File(file, offset) => {
                Some((file, offset + (self.vaddr - self.stretch.range.start)))
            }
            Stored::Zero | Stored::Remote | Stored::Fetched(..) => None,
        }
    }
}

/// Reads parts one behind the other; those that lie so in one file at once, as small runs of one round do.
///
/// # Errors
/// As [`Stretch::read`].
pub(crate) fn read_parts(mut parts: &[Part<'_>], mut buffer: &mut [u8]) -> Result<()> {
    while let [first, others @ ..] = parts {
        let (mut count, mut len) = (1, first.len);
        if let Some((file, offset)) = first.place() {
            let end = |len: usize| offset + len as u64;
            let goes_on = |part: &Part<'_>, len| {
                part.place().is_some_and(|(it, at)| Arc::ptr_eq(it, file) && at == end(len))
            };
            while let Some(part) = others.get(count - 1).filter(|part| goes_on(part, len)) {
                (count, len) = (count + 1, len + part.len);
            }
            file.read_exact_at(&mut buffer[..len], offset)?;
        } else {
            first.read(&mut buffer[..len])?;
        }
        (parts, buffer) = (&parts[count..], &mut buffer[len..]);
    }
    Ok(())
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
        Ok(Self::find(images, kind, id, &Search::default())?.0)
    }

    /// As [`Pages::load`], but only those that the search asks for. The ranges are those that are
    /// as the checkpoint `search.above` has them.
    ///
    /// # Errors
    /// See [`Pages::load`].
    pub fn find(
        images: &ImageDir,
        kind: Kind,
        id: u64,
        search: &Search<'_>,
    ) -> Result<(Self, Ranges)> {
        let map = read_map(images, kind, id)?;
        let all: Ranges = map.runs.iter().map(Run::range).collect();
        if search.above.is_some() && search.above == Some(Identity::of(images)?) {
            return Ok((Pages::default(), all));
        }
        let everything = match search.within {
            Some(within) => all.and(within),
            None => all,
        };
        let mut stretches = Vec::new();
        let newest = Layer { images, kind, id, depth: 0 };
        let mut wanted = newest.take(&map, everything.as_slice(), &mut stretches)?;
        let (mut parent, mut depth) = (None, 0);
        while !wanted.is_empty() {
            let lower = match parent.as_ref().unwrap_or(images).parent() {
                Err(error) if error.is_missing() && kind == kind::PAGEMAP => {
                    stretches.extend(newest.elsewhere(std::mem::take(&mut wanted)));
                    break;
                }
                found => found?,
            };
            let lower = lower.ok_or_else(|| nowhere(images, kind, id, &wanted[0]))?;
            if search.above.is_some() && search.above == Some(Identity::of(&lower)?) {
                break;
            }
            if !lower.has(kind, id)? {
                return Err(nowhere(&lower, kind, id, &wanted[0]));
            }
            let map = read_map(&lower, kind, id)?;
            if let Some(missing) = first_gap(&map, &wanted) {
                return Err(nowhere(&lower, kind, id, &missing));
            }
            depth += 1;
            let layer = Layer { images: &lower, kind, id, depth };
            wanted = layer.take(&map, &wanted, &mut stretches)?;
            parent = Some(lower);
        }
        stretches.sort_unstable_by_key(|stretch| stretch.range.start);
        Ok((Pages { stretches }, wanted.into_iter().collect()))
    }

    /// Where there are pages.
    pub fn ranges(&self) -> Ranges {
        self.stretches.iter().map(|stretch| stretch.range.clone()).collect()
    }

    /// The same pages with others in their place, which are disjoint.
    pub fn with(&self, mut others: Vec<Stretch>) -> Self {
        others.sort_unstable_by_key(|stretch| stretch.range.start);
        let over = Pages { stretches: others };
        let mut stretches = Vec::new();
        for stretch in &self.stretches {
            let covered = over.within(stretch.range.clone()).map(|(_, range)| range);
            stretches.extend(gaps(&stretch.range, covered).map(|gap| stretch.part(gap)));
        }
        stretches.extend(over.stretches);
        stretches.sort_unstable_by_key(|stretch| stretch.range.start);
        Pages { stretches }
    }

    /// Whether each page that is read is known to be right by itself.
    pub(crate) fn are_verified_singly(&self) -> bool {
        self.stretches.iter().all(|stretch| match &stretch.from {
            Stored::File(file, _) => file.verifies_each(),
            Stored::Zero | Stored::Remote | Stored::Fetched(..) => true,
        })
    }

    /// The addresses around one whose pages come at once with its own, if that is fetched from elsewhere when it is
    /// read.
    pub(crate) fn fed_with(&self, address: u64) -> Option<Range<u64>> {
        let (stretch, _) = self.within(address..address.saturating_add(1)).next()?;
        let Stored::File(file, offset) = &stretch.from else { return None };
        let piece = file.fed_piece(offset + (address - stretch.range.start))?;
        let place = |at: u64| (stretch.range.start + at).saturating_sub(*offset);
        let (start, end) = (place(piece.start), place(piece.end));
        Some(start.max(stretch.range.start)..end.min(stretch.range.end))
    }

    /// Whether there are pages that the pager has to fetch from elsewhere.
    pub(crate) fn any_remote(&self) -> bool {
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

/// A checkpoint, by the directory that it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// That of images.
    ///
    /// # Errors
    /// If the directory cannot be asked for its status.
    pub fn of(images: &ImageDir) -> Result<Self> {
        let what = || format!("fstat of {}", images.path().display());
        let (device, inode) = images.store().identity().context(what)?;
        Ok(Identity { device, inode })
    }
}

/// Which pages are looked for; all of them by default.
#[derive(Debug, Default)]
pub struct Search<'a> {
    /// Only those that lie here.
    pub within: Option<&'a Ranges>,
    /// Only those that are not as this checkpoint has them, which is one of the parents.
    pub above: Option<Identity>,
}

/// One checkpoint of a chain, and whose pages are looked for in it.
struct Layer<'a> {
    images: &'a ImageDir,
    kind: Kind,
    id: u64,
    /// How many of the chain build on it.
    depth: u32,
}

/// The pages that a pagemap says others have: sorted and disjoint.
#[derive(Debug, Default)]
struct Elsewhere {
    /// The parent.
    lower: Vec<Range<u64>>,
    /// Relatives, by the ids of their pagemaps.
    relatives: BTreeMap<u32, Vec<Range<u64>>>,
}

impl Layer<'_> {
    /// Takes those `wanted` pages that the checkpoint has, be it as those of relatives; returns
    /// those that its parent is to have. Both lists are sorted and disjoint.
    fn take(
        &self,
        map: &Pagemap,
        wanted: &[Range<u64>],
        out: &mut Vec<Stretch>,
    ) -> Result<Vec<Range<u64>>> {
        let Elsewhere { lower, relatives } = self.take_own(map, wanted, out)?;
        for (relative, wanted) in relatives {
            let map = read_map(self.images, self.kind, relative.into())?;
            let left = self.take_own(&map, &wanted, out)?;
            // A relative that would have to ask others could send us round and round.
            let further = left.relatives.into_values().flatten().next();
            let missing = first_gap(&map, &wanted).or(left.lower.into_iter().next()).or(further);
            if let Some(missing) = missing {
                return Err(nowhere(self.images, self.kind, map.owner, &missing));
            }
        }
        Ok(lower)
    }

    /// Takes those `wanted` pages that the pages file of `map` has, or that are zero.
    fn take_own(
        &self,
        map: &Pagemap,
        wanted: &[Range<u64>],
        out: &mut Vec<Stretch>,
    ) -> Result<Elsewhere> {
        let of = OwnPagemap { depth: self.depth, pagemap: map.owner };
        let mut file = None;
        let mut left = Elsewhere::default();
        let mut next = wanted;
        for (run, offset) in map.offsets() {
            let range = run.range();
            next = &next[next.partition_point(|w| w.end <= range.start)..];
            for want in next.iter().take_while(|w| w.start < range.end) {
                let part = want.start.max(range.start)..want.end.min(range.end);
                if run.in_parent {
                    add(&mut left.lower, part);
                } else if let Some(relative) = run.relative {
                    add(left.relatives.entry(relative).or_default(), part);
                } else {
                    let offset = offset.map(|offset| offset + (part.start - range.start));
                    let from = self.place(map, &run, offset, &mut file)?;
                    out.push(Stretch { range: part, from, of });
                }
            }
        }
        Ok(left)
    }

    /// Pages of parents that are not here: a page server is to have them.
    fn elsewhere(&self, wanted: Vec<Range<u64>>) -> impl Iterator<Item = Stretch> {
        let of = OwnPagemap { depth: self.depth, pagemap: self.id };
        wanted.into_iter().map(move |range| Stretch { range, from: Stored::Remote, of })
    }

    /// Where a run is, or a part of it; `offset` is that in the pages file, which is opened
    /// once; if it is not here a page server is to have the pages of tasks. Only the dump of the
    /// newest images can still be there to serve pages, and knows by whom they are asked for.
    fn place(
        &self,
        map: &Pagemap,
        run: &Run,
        offset: Option<u64>,
        file: &mut Option<Arc<PagesReader>>,
    ) -> Result<Stored> {
        Ok(match (offset, file) {
            (Some(offset), Some(file)) => Stored::File(Arc::clone(file), offset),
            (Some(offset), file) => match PagesReader::open(self.images, map) {
                Ok(opened) => Stored::File(Arc::clone(file.insert(Arc::new(opened))), offset),
                Err(error) if error.is_missing() && self.kind == kind::PAGEMAP => Stored::Remote,
                Err(error) => return Err(error.into()),
            },
            (None, _) if run.lazy && self.depth == 0 && map.owner == self.id => Stored::Remote,
            (None, _) if run.lazy => return Err(elsewhere(self.images, map, run)),
            (None, _) => Stored::Zero,
        })
    }
}

/// Reads a pagemap. Of a task, its pages need not be here.
fn read_map(images: &ImageDir, kind: Kind, id: u64) -> Result<Pagemap> {
    match Pagemap::read(images, kind, id) {
        Err(error) if error.is_missing() && kind == kind::PAGEMAP => {
            Ok(Pagemap::read_unbacked(images, kind, id)?)
        }
        read => Ok(read?),
    }
}

/// Adds the next range, joined with the last if they are adjacent.
fn add(list: &mut Vec<Range<u64>>, range: Range<u64>) {
    match list.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => list.push(range),
    }
}

/// The first part of the `wanted` pages that a pagemap does not mention.
fn first_gap(map: &Pagemap, wanted: &[Range<u64>]) -> Option<Range<u64>> {
    for want in wanted {
        let first = map.runs.partition_point(|run| run.range().end <= want.start);
        let runs = map.runs[first..].iter().map(Run::range).take_while(|run| run.start < want.end);
        let parts = runs.map(|run| run.start.max(want.start)..run.end.min(want.end));
        if let Some(gap) = gaps(want, parts).next() {
            return Some(gap);
        }
    }
    None
}

fn nowhere(images: &ImageDir, kind: Kind, id: u64, range: &Range<u64>) -> Error {
    Error::invalid(
        images.path().join(kind.file_name(id)).display().to_string(),
        format!("pages at {:x} should be here, for another pagemap, and are not", range.start),
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
        Relative(u32),
        Zero,
    }

    fn dump(dir: &Path, parent: Option<&str>, runs: &[(u64, u64, At)]) -> ImageDir {
        std::fs::create_dir(dir).unwrap();
        let images = ImageDir::open(dir).unwrap();
        if let Some(parent) = parent {
            images.set_parent(Path::new(parent)).unwrap();
        }
        dump_task(&images, 7, runs);
        images
    }

    /// Adds the pages of a task.
    fn dump_task(images: &ImageDir, id: u32, runs: &[(u64, u64, At)]) {
        let mut map = PagemapWriter::create(images, kind::PAGEMAP, id.into(), id).unwrap();
        let mut pages = images.raw_file_create(kind::PAGES, id.into()).unwrap();
        for &(first, count, at) in runs {
            map.push(Run {
                vaddr: first * PAGE,
                pages: count,
                in_parent: matches!(at, At::Parent),
                present: matches!(at, At::Here(_)),
                relative: if let At::Relative(id) = at { Some(id) } else { None },
                ..Run::default()
            })
            .unwrap();
            if let At::Here(fill) = at {
                pages.write_all(&vec![fill; usize::try_from(count * PAGE).unwrap()]).unwrap();
            }
        }
        map.finish().unwrap();
    }

    /// Page number and first byte of all pages.
    fn content(pages: &Pages) -> Vec<(u64, u8)> {
        let mut all = Vec::new();
        for stretch in pages.stretches() {
            for at in pages_of(stretch) {
                let mut page = [9; 4096];
                stretch.read(at, &mut page).unwrap();
                assert!(page.iter().all(|&b| b == page[0]));
                all.push((at / PAGE, page[0]));
            }
        }
        all
    }

    /// The first byte of all pages, which are read at once.
    fn together(pages: &Pages) -> Vec<u8> {
        let parts = |stretch| pages_of(stretch).map(|vaddr| Part { vaddr, len: 4096, stretch });
        let parts: Vec<Part<'_>> = pages.stretches().iter().flat_map(parts).collect();
        let mut all = vec![9; parts.len() * 4096];
        read_parts(&parts, &mut all).unwrap();
        all.chunks(4096).map(|page| page[0]).collect()
    }

    fn pages_of(stretch: &Stretch) -> impl Iterator<Item = u64> + use<> {
        stretch.range.clone().step_by(4096)
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
        assert_eq!(together(&pages), expected.map(|(_, fill)| fill));
        assert_eq!(pages.end(), 22 * PAGE);
        let part: Vec<_> = pages.within(11 * PAGE..13 * PAGE).map(|(_, range)| range).collect();
        assert_eq!(part, [11 * PAGE..12 * PAGE, 12 * PAGE..13 * PAGE]);
    }

    #[test]
    fn pages_of_relatives_come_from_the_same_checkpoint() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        let lower = dump(
            &at("1"),
            None,
            &[(10, 1, At::Here(1)), (11, 4, At::Relative(5)), (15, 1, At::Relative(6))],
        );
        dump_task(&lower, 5, &[(9, 3, At::Here(5)), (12, 8, At::Here(55))]);
        dump_task(&lower, 6, &[(15, 1, At::Here(6))]);
        let images = dump(
            &at("2"),
            Some("../1"),
            &[(10, 3, At::Parent), (13, 1, At::Relative(5)), (14, 2, At::Parent)],
        );
        dump_task(&images, 5, &[(12, 2, At::Here(77))]);
        let content = |images| content(&Pages::load(images, kind::PAGEMAP, 7).unwrap());
        assert_eq!(content(&lower), [(10, 1), (11, 5), (12, 55), (13, 55), (14, 55), (15, 6)]);
        assert_eq!(content(&images), [(10, 1), (11, 5), (12, 55), (13, 77), (14, 55), (15, 6)]);
    }

    #[test]
    fn relatives_have_their_pages_themselves() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("lower"), None, &[(10, 2, At::Here(1))]);
        let error = |name: &str, relative: u32, runs: &[(u64, u64, At)]| {
            let images = dump(&at(name), Some("../lower"), &[(10, 2, At::Relative(relative))]);
            if !runs.is_empty() {
                dump_task(&images, 5, runs);
            }
            Pages::load(&images, kind::PAGEMAP, 7).unwrap_err().to_string()
        };
        let text = error("1", 5, &[(10, 1, At::Here(1))]);
        assert!(text.contains("pagemap-5.img") && text.contains("pages at b000"), "{text}");
        for (name, at) in [("2", At::Parent), ("3", At::Relative(7)), ("4", At::Relative(5))] {
            let text = error(name, 5, &[(10, 2, at)]);
            assert!(text.contains("pagemap-5.img") && text.contains("pages at a000"), "{text}");
        }
        let text = error("5", 7, &[]);
        assert!(text.contains("pagemap-7.img"), "{text}");
        let text = error("6", 8, &[]);
        assert!(text.contains("pagemap-8.img"), "{text}");
    }

    #[test]
    fn pages_whose_file_is_elsewhere_are_asked_for_and_never_made_up() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        dump(&at("1"), None, &[(10, 2, At::Here(1))]);
        std::fs::remove_file(at("1").join("pages-7.img")).unwrap();
        let runs = [(10, 1, At::Parent), (11, 1, At::Here(2)), (12, 1, At::Zero)];
        for (name, parent) in [("2", "../1"), ("3", "../gone")] {
            let pages = Pages::load(&dump(&at(name), Some(parent), &runs), kind::PAGEMAP, 7);
            let pages = pages.unwrap();
            let remote: Vec<bool> = pages.stretches().iter().map(Stretch::is_remote).collect();
            assert_eq!(remote, [true, false, false], "{parent}");
            assert!(pages.read(10 * PAGE, &mut [0; 4096]).is_err());
        }
        // Of shared memory nobody can ask for them.
        let images = dump(&at("4"), None, &[]);
        let mut map = PagemapWriter::create(&images, kind::SHMEM_PAGEMAP, 9, 9).unwrap();
        map.push(Run { pages: 1, present: true, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let error = Pages::load(&images, kind::SHMEM_PAGEMAP, 9).unwrap_err().to_string();
        assert!(error.contains("pages-9.img"), "{error}");
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
        // A chain that bites its own tail has an end.
        let text = error("6", Some("../6"), &[(10, 1, At::Parent)]);
        assert!(text.contains("parent"), "{text}");
    }
}
