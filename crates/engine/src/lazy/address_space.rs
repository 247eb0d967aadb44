//! An address space with pages that are missing, and how they get into it.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use torpor_sys::uffd::{self, Event};

use super::Remote;
use super::missing::{Gap, Missing};
use super::page_reader::PageReader;
use super::sight::Sight;
use super::working_set::Recorder;
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::page_server::Request;
use crate::ranges::Ranges;
use crate::restore::pages::Pages;

/// Bytes brought in at once when somebody waits: what lies around the page, too.
pub(super) const AROUND: u64 = 64 * 1024;
/// Bytes brought in at once when nobody does.
pub(super) const CHUNK: u64 = 256 * 1024;
/// Bytes that are under way at most when somebody waits.
const MOST: u64 = 64 * AROUND;
/// Gaps that all forked address spaces may have together: some hundred MiB of the pager's memory, which no limit of the tasks counts.
pub(super) const MOST_FORKED: usize = 1 << 22;

/// An address space with pages that are missing.
#[derive(Debug)]
pub(super) struct AddressSpace {
    /// The number of its pagemap.
    pub id: u64,
    /// The userfaultfd that it is registered with.
    pub uffd: OwnedFd,
    /// What can be seen of it, unless it was forked since: who has it then is not told.
    sight: Option<Sight>,
    /// What the images have.
    pub pages: Arc<Pages>,
    /// What is to be brought in.
    pub missing: Missing,
    /// Addresses in the images of what is brought in before everything else.
    first: VecDeque<Range<u64>>,
    /// Pages that are waited for, until events have been read.
    waiting: VecDeque<u64>,
    /// What is in place already and whose waiters are woken later, if that is to be so.
    late: Option<Vec<Range<u64>>>,
    /// Where pages are brought in next that nobody waits for.
    next: u64,
    /// The address space is gone.
    pub gone: bool,
}

impl AddressSpace {
    /// An address space that lacks all pages of `ranges`, which are in the images.
    /// Those of `first` (in the images) are brought in before the others.
    pub(super) fn new(
        id: u64,
        (uffd, sight): (OwnedFd, Sight),
        pages: Arc<Pages>,
        ranges: &Ranges,
        first: VecDeque<Range<u64>>,
    ) -> Self {
        let mut missing = Missing::default();
        for range in ranges.as_slice() {
            for (_, range) in pages.within(range.clone()).filter(|(stretch, _)| !stretch.is_zero())
            {
                missing.insert(&Gap { source: range.start, range });
            }
        }
        let (waiting, sight) = (VecDeque::new(), Some(sight));
        let (late, next, gone) = (None, 0, false);
        AddressSpace { id, uffd, sight, pages, missing, first, waiting, late, next, gone }
    }

    /// The address space of a child, which lacks what this one does, but for what is empty there.
    fn fork(&self, uffd: OwnedFd) -> Self {
        let mut missing = self.missing.clone();
        let wiped = self.sight.iter().flat_map(Sight::wiped_on_fork);
        wiped.for_each(|range| drop(missing.take(&range)));
        AddressSpace {
            id: self.id,
            uffd,
            sight: None,
            pages: Arc::clone(&self.pages),
            missing,
            first: self.first.clone(),
            waiting: VecDeque::new(),
            late: None,
            next: self.next,
            gone: false,
        }
    }

    /// Whether somebody waits for a page.
    pub(super) fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Nobody can miss anything any more.
    pub(super) fn is_done(&self) -> bool {
        self.gone || self.missing.is_empty() && self.waiting.is_empty()
    }

    /// Its tasks have ended before all of their pages were there.
    pub(super) fn has_ended_early(&self) -> bool {
        self.gone && !self.missing.is_empty()
    }

    /// Reads what has happened; adds the children that were forked.
    ///
    /// # Errors
    /// If the kernel does not tell it; if tasks fork too often ([`check_forked`]).
    pub(super) fn read_events(&mut self, children: &mut Vec<AddressSpace>) -> Result<()> {
        loop {
            let events = match uffd::events(self.uffd.as_fd()) {
                Ok(events) => events,
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => return Ok(()),
                Err(e) => return Err(e).context(|| "reading a userfaultfd".to_owned()),
            };
            let is_all = events.len() < uffd::EVENTS;
            for event in events {
                match event {
                    Event::Fault(address) => self.waiting.push_back(address & !(PAGE - 1)),
                    Event::Fork(uffd) => children.push(self.fork(uffd)),
                    Event::Remap { from, to, len } => self.missing.shift(from, to, len),
                    Event::Drop(start, end) => drop(self.missing.take(&(start..end))),
                }
            }
            check_forked(children, MOST_FORKED)?;
            if is_all {
                return Ok(());
            }
        }
    }

    /// Brings in what is waited for, or asks for it; while it is recorded, nothing more than that.
    /// False if events have to be read first.
    pub(super) fn serve(
        &mut self,
        remote: &mut Option<Remote<'_>>,
        recorder: Option<&mut Recorder<'_>>,
        buffer: &mut [u8],
    ) -> Result<bool> {
        // Woken one by one each of them would fetch an idle processor back, which takes longer
        // than to bring its page in.
        self.late = (self.waiting.len() > 1).then(Vec::new);
        let done = self.serve_all(remote, recorder, buffer);
        self.late.take().into_iter().flatten().for_each(|range| self.wake(&range));
        done
    }

    fn serve_all(
        &mut self,
        remote: &mut Option<Remote<'_>>,
        mut recorder: Option<&mut Recorder<'_>>,
        buffer: &mut [u8],
    ) -> Result<bool> {
        for _ in 0..self.waiting.len() {
            let Some(page) = self.waiting.pop_front() else { break };
            let done = match self.missing.at(page) {
                Some(gap) if self.is_remote(&gap) => {
                    let source = gap.source + (page - gap.range.start);
                    let Remote { borrower, ahead, .. } = here(remote, page)?;
                    ahead.is_waited_for();
                    let asked = borrower.asked().bytes();
                    if !borrower.asked().has(self.id, source) && asked < MOST {
                        let near = around(page, ahead.around(asked));
                        ahead.asks(Instant::now());
                        borrower.ask(self.request(&gap.within(&near)))?;
                    }
                    // It waits until the answer is in its place.
                    self.waiting.push_back(page);
                    continue;
                }
                Some(gap) => {
                    let near = match &mut recorder {
                        None => near(&self.pages, &gap, page),
                        Some(recorder) => {
                            recorder.note(self.id, gap.source + (page - gap.range.start));
                            page..page + PAGE
                        }
                    };
                    // The page itself first: what lies before it may be of another mapping.
                    let (own, all) = (gap.within(&(page..near.end)), gap.within(&near));
                    self.bring(&own, buffer)? && (own == all || self.rest(&all.range, buffer)?)
                }
                None => self.put_zero(page)?,
            };
            if !done {
                self.waiting.push_front(page);
                return Ok(self.gone);
            }
        }
        Ok(true)
    }

    fn is_remote(&self, gap: &Gap) -> bool {
        self.pages.within(gap.source..gap.source + 1).any(|(stretch, _)| stretch.is_remote())
    }

    /// What a gap lacks.
    fn request(&self, gap: &Gap) -> Request {
        let range = gap.source..gap.source + (gap.range.end - gap.range.start);
        Request { id: self.id, range }
    }

    /// Brings in what is missing in a range.
    fn rest(&mut self, range: &Range<u64>, buffer: &mut [u8]) -> Result<bool> {
        while let Some(gap) = self.missing.at(range.start) {
            if !self.bring(&gap.within(range), buffer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks for a part that nobody waits for. False if there is nothing to do
    /// but to wait for what was asked for.
    pub(super) fn go_on(
        &mut self,
        remote: &mut Option<Remote<'_>>,
        reader: &mut PageReader,
    ) -> Result<bool> {
        let asked = |gap: &Gap| {
            let borrower = remote.as_ref().map(|remote| &remote.borrower);
            borrower.is_some_and(|borrower| borrower.asked().has(self.id, gap.source))
                || reader.asked().has(self.id, gap.source)
        };
        let first = next_of(&mut self.first, &self.missing, asked);
        let Some(gap) = first.or_else(|| self.missing.from(self.next).find(|gap| !asked(gap)))
        else {
            return Ok(false);
        };
        let is_remote = self.is_remote(&gap);
        let piece = remote.as_ref().filter(|_| is_remote).map_or(CHUNK, |it| it.ahead.piece());
        let gap = gap.within(&(gap.range.start..gap.range.start + piece));
        if self.first.is_empty() {
            self.next = gap.range.end;
        }
        if !is_remote {
            reader.ask(self.request(&gap), &self.pages)?;
            return Ok(true);
        }
        let Remote { borrower, ahead, .. } = here(remote, gap.range.start)?;
        ahead.asks(Instant::now());
        borrower.ask(self.request(&gap))?;
        Ok(true)
    }

    /// Brings in a gap of at most [`CHUNK`] bytes. False if events have to be read first.
    fn bring(&mut self, gap: &Gap, buffer: &mut [u8]) -> Result<bool> {
        let len = usize::try_from(gap.range.end - gap.range.start).unwrap_or(usize::MAX);
        let bytes = buffer.get_mut(..len).ok_or_else(|| lost(gap.range.start))?;
        self.pages.read(gap.source, bytes)?;
        self.put(gap.range.start, bytes)
    }

    /// Puts in place what was asked for, as far as it is missing still. False if events have to
    /// be read first.
    pub(super) fn receive(&mut self, source: &Range<u64>, bytes: &[u8]) -> Result<bool> {
        for gap in self.missing.of_source(source) {
            let from = usize::try_from(gap.source - source.start).unwrap_or(usize::MAX);
            let len = usize::try_from(gap.range.end - gap.range.start).unwrap_or(usize::MAX);
            let part = bytes.get(from..from.saturating_add(len));
            if !self.put(gap.range.start, part.ok_or_else(|| lost(gap.range.start))?)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts pages in place, but for those that a guard page has taken the place of. False if
    /// events have to be read first.
    fn put(&mut self, place: u64, bytes: &[u8]) -> Result<bool> {
        let range = place..place + bytes.len() as u64;
        let guards = self.sight.as_ref().map(|sight| sight.guards(&range)).unwrap_or_default();
        if guards.is_empty() {
            return self.copy(place, bytes);
        }
        for guard in guards {
            self.settle(guard.start, guard.end - guard.start);
            self.wake(&guard);
        }
        for gap in self.missing.of(&range) {
            let at = |address: u64| usize::try_from(address - place).unwrap_or(usize::MAX);
            let part = bytes.get(at(gap.range.start)..at(gap.range.end));
            if !self.copy(gap.range.start, part.ok_or_else(|| lost(place))?)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts pages in place. False if events have to be read first.
    fn copy(&mut self, place: u64, bytes: &[u8]) -> Result<bool> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut at = 0;
        let len = bytes.len();
        let mut size = len;
        while at < len && !self.gone {
            let to = place + at as u64;
            let end = (at + size).min(len);
            match uffd::copy(self.uffd.as_fd(), to, &bytes[at..end], self.late.is_none()) {
                Ok(n) => {
                    self.settle(to, n as u64);
                    if let Some(late) = &mut self.late {
                        late.push(to..to + n as u64);
                    }
                    at += n;
                }
                Err(e) => match e.raw_os_error() {
                    // Not all of it is in one mapping: see where it ends.
                    Some(libc::ENOENT) if size > page => size = page,
                    Some(libc::EEXIST | libc::ENOENT) => {
                        self.settle(to, PAGE);
                        self.wake(&(to..to + PAGE));
                        at += page;
                    }
                    _ => return self.stuck(e, to),
                },
            }
        }
        Ok(true)
    }

    /// Lets a page that the images do not have be zero.
    fn put_zero(&mut self, at: u64) -> Result<bool> {
        match uffd::zero(self.uffd.as_fd(), at, usize::try_from(PAGE).unwrap_or(4096)) {
            Ok(_) => Ok(true),
            Err(e) => match e.raw_os_error() {
                Some(libc::EEXIST | libc::ENOENT) => {
                    self.wake(&(at..at + PAGE));
                    Ok(true)
                }
                _ => self.stuck(e, at),
            },
        }
    }

    fn stuck(&mut self, error: std::io::Error, at: u64) -> Result<bool> {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(false),
            Some(libc::ESRCH) => {
                self.gone = true;
                Ok(false)
            }
            _ => Err(error).context(|| format!("bringing in the page at {at:x}")),
        }
    }

    /// What is in place is not missing, and whoever waited for it was woken.
    fn settle(&mut self, at: u64, len: u64) {
        let range = at..at + len;
        self.missing.take(&range);
        self.waiting.retain(|page| !range.contains(page));
    }

    /// Whoever waits looks again: the page is there, or its mapping is not.
    fn wake(&self, range: &Range<u64>) {
        // If the address space is gone nobody waits.
        let _ = uffd::wake(self.uffd.as_fd(), range.start, range.end - range.start);
    }
}

/// Ends the tasks that fork so often, while so many parts of their memory are missing, that what each of them lacks would take the memory
/// of this host.
///
/// # Errors
/// If those of `spaces` that were forked have more than `most` gaps together.
pub(super) fn check_forked(spaces: &[AddressSpace], most: usize) -> Result<()> {
    let forked = spaces.iter().filter(|space| space.sight.is_none());
    match forked.map(|space| space.missing.len() + space.first.len()).sum::<usize>() > most {
        true => Err(Error::Peer("the tasks fork too often for memory that is missing".to_owned())),
        false => Ok(()),
    }
}

/// What is brought in with a page that a task waits for, in a gap of what `pages` has.
fn near(pages: &Pages, gap: &Gap, page: u64) -> Range<u64> {
    let source = gap.source + (page - gap.range.start);
    match pages.fed_with(source) {
        // What is fetched from far away is stored by when it was needed, not by its address: what else lies around
        // the page would be further requests.
        Some(fed) => page.saturating_sub(source - fed.start)..page + (fed.end - source),
        None => around(page, AROUND),
    }
}

/// So many bytes, a power of two, around a page.
fn around(page: u64, bytes: u64) -> Range<u64> {
    let start = page & !(bytes - 1);
    start..start + bytes
}

/// The next gap of a working set, which loses what is there already.
fn next_of(
    set: &mut VecDeque<Range<u64>>,
    missing: &Missing,
    asked: impl Fn(&Gap) -> bool,
) -> Option<Gap> {
    while let Some(run) = set.front() {
        let gaps = missing.of_source(run);
        if let Some(gap) = gaps.into_iter().find(|gap| !asked(gap)) {
            return Some(gap);
        }
        set.pop_front();
    }
    None
}

fn here<'r, 'a>(remote: &'r mut Option<Remote<'a>>, at: u64) -> Result<&'r mut Remote<'a>> {
    remote.as_mut().ok_or_else(|| lost(at))
}

fn lost(at: u64) -> Error {
    Error::invalid("pages", format!("the gap at {at:x} is larger than what was asked for"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use torpor_images::compress::Compression;
    use torpor_images::packed::{CLUSTER, Packer};
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::pages::PagesWriter;
    use torpor_images::{ImageDir, feed, kind};

    use super::*;

    /// Forty pages from page 100 on, in clusters.
    fn packed(dir: &Path) -> ImageDir {
        const PAGES: u64 = 40;
        let images = ImageDir::open(dir).unwrap();
        let mut map = PagemapWriter::packed(&images, kind::PAGEMAP, 7, 1).unwrap();
        let run = Run { vaddr: 100 * PAGE, pages: PAGES, present: true, ..Run::default() };
        map.push(run).unwrap();
        map.finish().unwrap();
        let writer = PagesWriter::create(&images, 1, 7, Some(Compression::LZ4), None).unwrap();
        let mut data = vec![7; usize::try_from(PAGES * PAGE).unwrap()];
        let runs = [(100 * PAGE, PAGES)];
        writer.write(&writer.span(PAGES), &runs, &mut data, &mut Packer::default()).unwrap();
        writer.finish(&images).unwrap();
        images
    }

    #[test]
    fn what_is_fetched_at_once_is_brought_in_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let images = packed(dir.path());
        // It was moved by 900 pages.
        let gap = Gap { range: 1000 * PAGE..1040 * PAGE, source: 100 * PAGE };
        let brought = |page: u64| {
            let pages = Pages::load(&images, kind::PAGEMAP, 7).unwrap();
            let near = near(&pages, &gap, page * PAGE);
            near.start / PAGE..near.end / PAGE
        };
        assert_eq!(brought(1020), 1008..1024, "all around it is here");
        let _socket = UnixListener::bind(dir.path().join(feed::SOCKET)).unwrap();
        let cluster = CLUSTER as u64;
        assert_eq!(brought(1000), 1000..1000 + cluster);
        assert_eq!(brought(1020), 1000 + cluster..1000 + 2 * cluster);
        assert_eq!(brought(1039), 1000 + 2 * cluster..1040);
    }

    #[test]
    fn what_forked_tasks_lack_has_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Arc::new(Pages::load(&packed(dir.path()), kind::PAGEMAP, 7).unwrap());
        let mut missing = Missing::default();
        (0..3).for_each(|n| missing.insert(&Gap { range: 10 * n..10 * n + 1, source: 10 * n }));
        let forked = || AddressSpace {
            id: 7,
            uffd: std::fs::File::open("/dev/null").unwrap().into(),
            sight: None,
            pages: Arc::clone(&pages),
            missing: missing.clone(),
            first: VecDeque::new(),
            waiting: VecDeque::new(),
            late: None,
            next: 0,
            gone: false,
        };
        let mut spaces = vec![forked(), forked()];
        check_forked(&spaces, 6).unwrap();
        spaces.push(forked());
        let error = check_forked(&spaces, 6).unwrap_err().to_string();
        assert_eq!(error, "the tasks fork too often for memory that is missing");
        // As they end, and as memory comes, there is room again.
        spaces[0].missing.take(&(0..100));
        check_forked(&spaces, 6).unwrap();
    }

    #[test]
    fn the_working_set_comes_first() {
        let mut missing = Missing::default();
        missing.insert(&Gap { range: 100..200, source: 1100 });
        // It was moved.
        missing.insert(&Gap { range: 300..350, source: 1300 });
        let mut set = VecDeque::from([1310..1320, 1500..1600, 1150..1155, 1100..1101]);
        let mut order = Vec::new();
        while let Some(gap) = next_of(&mut set, &missing, |_| false) {
            missing.take(&gap.range);
            order.push(gap.range);
        }
        assert_eq!(order, [310..320, 150..155, 100..101]);
        // What was asked for is on its way.
        let mut set = VecDeque::from([1160..1165, 1170..1175]);
        let next = next_of(&mut set, &missing, |gap| gap.source < 1170);
        assert_eq!(next.map(|gap| gap.range), Some(170..175));
    }
}
