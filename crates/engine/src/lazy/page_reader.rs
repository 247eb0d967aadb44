//! Reads pages of the images ahead of the pager, in a thread of its own: while pages are put
//! in place the next ones are read, and verified and unpacked where that is needed.
//!
//! What a program has touched at its start is often single pages. To wake another thread for each of them takes longer
//! than to read it, so a few that are asked for one after the other go there and come back together.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::error::{Context, Error, Result};
use crate::page_server::{Asked, Request};
use crate::restore::pages::Pages;

/// Bytes that are read together at most, unless one request asks for more.
pub(super) const TOGETHER: u64 = 64 * 1024;
/// Buffers that are kept for later.
const SPARE: usize = 8;

/// Pages to be read, and then what they hold.
struct Reading {
    request: Request,
    pages: Arc<Pages>,
    bytes: Vec<u8>,
    outcome: Result<()>,
}

impl Reading {
    fn read(&mut self) {
        let range = &self.request.range;
        let len = usize::try_from(range.end - range.start).unwrap_or(0);
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        self.outcome = self.pages.read(range.start, &mut self.bytes[..len]);
    }
}

/// The thread. Answers come in the order of the requests.
pub(super) struct PageReader {
    jobs: Sender<Vec<Reading>>,
    done: Receiver<Vec<Reading>>,
    /// Has a byte for all that was read together and not told of, and an end when the thread has ended.
    answers: OwnedFd,
    /// How often it has told of answers that were not taken.
    told: usize,
    asked: Asked,
    /// What goes to the thread together.
    next: Vec<Reading>,
    /// What has come from it together, as far as it was not taken.
    come: VecDeque<Reading>,
    /// Buffers that are free.
    spare: Vec<Vec<u8>>,
}

impl PageReader {
    /// Starts the thread, which ends with this value.
    ///
    /// # Errors
    /// If there are no more threads or descriptors.
    pub(super) fn start() -> Result<Self> {
        let what = || "starting a thread that reads pages".to_owned();
        let (answers, answered) = pipe_with(PipeFlags::CLOEXEC).context(what)?;
        let ((jobs, todo), (to, done)) = (channel::<Vec<Reading>>(), channel());
        let work = move || {
            torpor_images::feed::read_ahead();
            for mut together in todo {
                together.iter_mut().for_each(Reading::read);
                if to.send(together).is_err() || rustix::io::write(&answered, b".").is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().spawn(work).context(what)?;
        let (asked, told) = (Asked::default(), 0);
        let (next, come, spare) = (Vec::new(), VecDeque::new(), Vec::new());
        Ok(PageReader { jobs, done, answers, told, asked, next, come, spare })
    }

    /// What is still to be answered.
    pub(super) fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Asks for pages, which `pages` has; of [`TOGETHER`] bytes together at once, of fewer by [`PageReader::flush`].
    ///
    /// # Errors
    /// If the thread has ended.
    pub(super) fn ask(&mut self, request: Request, pages: &Arc<Pages>) -> Result<()> {
        let bytes = self.spare.pop().unwrap_or_default();
        self.asked.push(request.clone());
        self.next.push(Reading { request, pages: Arc::clone(pages), bytes, outcome: Ok(()) });
        match self.next.iter().map(|job| job.request.bytes()).sum::<u64>() {
            ..TOGETHER => Ok(()),
            _ => self.flush(),
        }
    }

    /// Has all be read that was asked for.
    ///
    /// # Errors
    /// If the thread has ended.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.next.is_empty() {
            return Ok(());
        }
        self.jobs.send(std::mem::take(&mut self.next)).map_err(|_| ended())
    }

    /// Whether an answer is there that nobody has to wait for, nor look for.
    pub(super) fn has_answer(&self) -> bool {
        self.told > 0 || !self.come.is_empty()
    }

    /// Waits for the answer to the first request: the beginning of what takes the place of
    /// `buffer`.
    ///
    /// # Errors
    /// If the file cannot be read, or its pages are not those that were sealed; if the thread that
    /// reads has ended.
    pub(super) fn receive(&mut self, buffer: &mut Vec<u8>) -> Result<Request> {
        if self.come.is_empty() {
            self.wait()?;
        }
        let job = self.come.pop_front().ok_or_else(ended)?;
        self.asked.pop();
        job.outcome?;
        let before = std::mem::replace(buffer, job.bytes);
        if self.spare.len() < SPARE {
            self.spare.push(before);
        }
        Ok(job.request)
    }

    /// Waits for what is read together next.
    fn wait(&mut self) -> Result<()> {
        self.flush()?;
        if self.told == 0 {
            let read = rustix::io::read(&self.answers, &mut [0_u8; SPARE]);
            // At its end there is none, which shows below.
            self.told = read.context(|| "waiting for pages that are read".to_owned())?.max(1);
        }
        self.told -= 1;
        self.come = self.done.recv().map_err(|_| ended())?.into();
        Ok(())
    }
}

impl AsFd for PageReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.answers.as_fd()
    }
}

fn ended() -> Error {
    Error::Bug("the thread that reads pages has ended".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma::PAGE;
    use std::io::Write;
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::{ImageDir, kind};

    /// Three pages, of which the last is cut off when all have been found.
    fn pages(dir: &std::path::Path) -> Arc<Pages> {
        let images = ImageDir::open(dir).unwrap();
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 1).unwrap();
        map.push(Run { vaddr: PAGE, pages: 3, present: true, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let mut file = images.raw_file_create(kind::PAGES, 1).unwrap();
        file.write_all(&[[1; 4096], [2; 4096], [3; 4096]].concat()).unwrap();
        let pages = Pages::load(&images, kind::PAGEMAP, 7).unwrap();
        file.set_len(2 * PAGE).unwrap();
        Arc::new(pages)
    }

    #[test]
    fn answers_come_in_the_order_of_the_requests() {
        let dir = tempfile::tempdir().unwrap();
        let pages = pages(dir.path());
        let mut reader = PageReader::start().unwrap();
        let request =
            |first: u64, count: u64| Request { id: 7, range: first * PAGE..(first + count) * PAGE };
        for asked in [request(2, 1), request(1, 2), request(3, 1)] {
            reader.ask(asked, &pages).unwrap();
        }
        assert_eq!(reader.asked().bytes(), 4 * PAGE);
        assert!(reader.asked().has(7, 2 * PAGE) && !reader.asked().has(8, 2 * PAGE));
        let mut buffer = Vec::new();
        assert!(!reader.has_answer(), "nobody has looked");
        assert_eq!(reader.receive(&mut buffer).unwrap(), request(2, 1));
        assert_eq!(buffer[..4096], [2; 4096]);
        assert_eq!(reader.receive(&mut buffer).unwrap(), request(1, 2));
        assert_eq!(buffer[..8192], [[1; 4096], [2; 4096]].concat());
        assert!(reader.receive(&mut buffer).is_err());
        assert!(reader.asked().is_empty() && !reader.has_answer());
    }

    #[test]
    fn a_few_pages_come_together() {
        let dir = tempfile::tempdir().unwrap();
        let pages = pages(dir.path());
        let mut reader = PageReader::start().unwrap();
        let request = |first: u64| Request { id: 7, range: first * PAGE..(first + 1) * PAGE };
        let few = TOGETHER / PAGE;
        let mut buffer = Vec::new();
        for asked in [few, few - 1] {
            (0..asked).for_each(|number| reader.ask(request(1 + number % 2), &pages).unwrap());
            assert_eq!(reader.asked().bytes(), asked * PAGE);
            // As many as there are at most have gone without that.
            assert_eq!(reader.next.is_empty(), asked == few);
            reader.flush().unwrap();
            for number in 0..asked {
                assert_eq!(reader.has_answer(), number > 0, "one look finds all of them");
                assert_eq!(reader.receive(&mut buffer).unwrap(), request(1 + number % 2));
            }
            assert_eq!((reader.asked().bytes(), reader.has_answer()), (0, false));
        }
    }
}
