//! The working set: which pages a restored tree touched first, and in which order.
//!
//! A lazy restore with `--record-working-set` notes each page that is waited for in its
//! first seconds, brings in these pages only, one by one, and leaves the list beside the
//! images (`working-set.img`). Later lazy restores bring in these pages before all others.
//! The list is advice: whatever it says, each page comes in its place, and once.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use torpor_images::pagemap::page_size;
use torpor_images::proto::WorkingSetEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::options::Memory;

/// How many runs of pages a list has at most.
const MOST: usize = 1 << 20;

/// How many pages a run has at most: what is brought in at once.
const LONGEST: u64 = 64;

/// Addresses in the images.
type Run = Range<u64>;

/// Whether this restore may record.
///
/// # Errors
/// Sealed images: nothing is added to them, and what the tasks touch is nobody's business.
/// Pages that a dump still has, since there will be no second restore of them.
pub(super) fn check(memory: &Memory, images: &ImageDir) -> Result<()> {
    let with = if memory.record_working_set.is_none() {
        return Ok(());
    } else if images.is_sealed()? {
        "sealed images"
    } else if memory.page_server.is_some() {
        "--page-server"
    } else {
        return Ok(());
    };
    Err(Error::Unsupported(format!("--record-working-set with {with}")))
}

/// How often it is looked whether the tasks have ended.
const GLANCE: Duration = Duration::from_millis(200);

/// Notes what is touched.
pub(super) struct Recorder<'a> {
    images: &'a ImageDir,
    /// The pidfds of the tasks.
    tasks: &'a [OwnedFd],
    end: Instant,
    /// When it is to be looked again whether they have ended.
    glance: Instant,
    list: Vec<(u64, Run)>,
}

impl<'a> Recorder<'a> {
    /// Begins, if it is asked for, to note what `tasks` (their pidfds) touch.
    pub(super) fn new(memory: &Memory, images: &'a ImageDir, tasks: &'a [OwnedFd]) -> Option<Self> {
        let now = Instant::now();
        let end = now + memory.record_working_set?;
        Some(Recorder { images, tasks, end, glance: now, list: Vec::new() })
    }

    /// A page is waited for, of the address space `id`.
    pub(super) fn note(&mut self, id: u64, page: u64) {
        let run = page..page.saturating_add(page_size());
        if let Some((of, last)) = self.list.last_mut()
            && (*of, last.end) == (id, run.start)
            && last.end - last.start < LONGEST * page_size()
        {
            last.end = run.end;
        } else if self.list.len() < MOST {
            self.list.push((id, run));
        }
    }

    /// For how long nobody need look; none if it is over.
    pub(super) fn left(&mut self) -> Option<Duration> {
        let now = Instant::now();
        if now >= self.glance {
            // A userfaultfd does not say when its tasks are gone.
            if self.tasks.iter().all(has_ended) {
                return None;
            }
            self.glance = now + GLANCE;
        }
        let goes_on = now < self.end && self.list.len() < MOST;
        goes_on.then(|| self.end.min(self.glance) - now)
    }

    /// Writes the list, as a whole: whoever waits for the file reads it once it is there. Should it
    /// fail the tasks are none the worse for it.
    pub(super) fn finish(self) {
        let pages: u64 = self.list.iter().map(|(_, run)| (run.end - run.start) / page_size()).sum();
        let entries: Vec<WorkingSetEntry> = (self.list.iter())
            .map(|(id, run)| WorkingSetEntry {
                id: *id,
                vaddr: run.start,
                nr_pages: (run.end - run.start) / page_size(),
            })
            .collect();
        let written = self.images.replace(kind::WORKING_SET, 0, |writer| {
            entries.iter().try_for_each(|entry| writer.entry(entry))
        });
        match written {
            Ok(()) => tracing::info!("The working set of {pages} pages is recorded"),
            Err(error) => tracing::warn!("the working set is not recorded: {error}"),
        }
    }
}

fn has_ended(task: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(task, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// What is to be brought in first, for each address space.
#[derive(Debug, Default)]
pub(super) struct WorkingSet(HashMap<u64, VecDeque<Run>>);

impl WorkingSet {
    /// Reads the list beside the images, if there is one that makes sense.
    pub(super) fn load(images: &ImageDir) -> Self {
        match Self::read(images) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!("the working set is not used: {error}");
                Self::default()
            }
        }
    }

    fn read(images: &ImageDir) -> Result<Self> {
        let mut found = Self::default();
        let Some(mut reader) = images.reader(kind::WORKING_SET, 0)? else { return Ok(found) };
        let (mut runs, mut pages) = (0, 0);
        loop {
            let offset = reader.offset();
            let Some(entry) = reader.next::<WorkingSetEntry>()? else { break };
            let bytes = (entry.nr_pages <= LONGEST).then(|| entry.nr_pages * page_size());
            let end = bytes.and_then(|bytes| entry.vaddr.checked_add(bytes));
            let Some(end) = end.filter(|_| entry.vaddr.is_multiple_of(page_size())) else {
                return Err(reader.invalid(offset, "a run of pages out of range").into());
            };
            runs += 1;
            if runs > MOST {
                return Err(reader.invalid(offset, format!("more than {MOST} runs")).into());
            }
            pages += u128::from(entry.nr_pages);
            found.0.entry(entry.id).or_default().push_back(entry.vaddr..end);
        }
        if runs > 0 {
            tracing::info!("A working set of {pages} pages in {runs} runs comes first");
        }
        Ok(found)
    }

    /// The list of an address space.
    pub(super) fn take(&mut self, id: u64) -> VecDeque<Run> {
        self.0.remove(&id).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn images() -> (tempfile::TempDir, ImageDir) {
        let temp = tempfile::tempdir().unwrap();
        let images = ImageDir::open(temp.path()).unwrap();
        (temp, images)
    }

    fn page(number: u64) -> u64 {
        number * page_size()
    }

    #[test]
    fn what_was_recorded_comes_back_in_its_order() {
        let (_temp, images) = images();
        let memory =
            Memory { record_working_set: Some(Duration::from_secs(1000)), ..Memory::default() };
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let tasks = [crate::proc::pidfd(own).unwrap()];
        let mut recorder = Recorder::new(&memory, &images, &tasks).unwrap();
        for (id, number) in [(7, 20), (7, 21), (8, 22), (7, 5), (7, 22), (7, 6)] {
            recorder.note(id, page(number));
        }
        assert!(recorder.left().is_some());
        recorder.finish();
        let mut found = WorkingSet::load(&images);
        assert_eq!(
            found.take(7),
            [page(20)..page(22), page(5)..page(6), page(22)..page(23), page(6)..page(7)]
        );
        assert_eq!(found.take(8).pop_front(), Some(page(22)..page(23)));
        assert!(found.take(9).is_empty());
    }

    #[test]
    fn who_waits_for_the_list_finds_it_whole() {
        use rustix::fs::inotify;
        let (temp, images) = images();
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        let flags = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&watch, temp.path(), flags).unwrap();
        let (glance, list) = (Instant::now(), vec![(7, page(1)..page(2))]);
        Recorder { images: &images, tasks: &[], end: glance, glance, list }.finish();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(watch, &mut buffer);
        let mut shown = Vec::new();
        while let Ok(event) = events.next() {
            if event.file_name().is_some_and(|name| name == c"working-set.img") {
                shown.push(event.events());
            }
        }
        assert_eq!(shown, [inotify::ReadFlags::MOVED_TO]);
    }

    #[test]
    fn no_list_and_nonsense_are_no_list() {
        let (temp, images) = images();
        assert!(WorkingSet::load(&images).take(7).is_empty());
        let entry = |vaddr, nr_pages| WorkingSetEntry { id: 7, vaddr, nr_pages };
        for wrong in [entry(1, 1), entry(page(1), u64::MAX), entry(u64::MAX - page(1) + 1, 2)] {
            images.write_all(kind::WORKING_SET, 0, &[entry(page(1), 1), wrong]).unwrap();
            assert!(WorkingSet::read(&images).is_err());
            assert!(WorkingSet::load(&images).take(7).is_empty());
        }
        std::fs::write(temp.path().join("working-set.img"), "no image").unwrap();
        assert!(WorkingSet::load(&images).take(7).is_empty());
    }
}
