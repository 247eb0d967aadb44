//! Images whose content is known: other threads write them while this one asks tasks.
//!
//! Only the thread that has seized the tasks can control them. It spends most of its time
//! with that, so that to encode and write an image is left to others. If they cannot keep up
//! it helps them, and no more than so many images are in memory.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use prost::{Message, Name};
use torpor_images::{ImageDir, Kind};

use crate::error::{Error, Result};

/// A file of one entry.
type OneEntry = Box<dyn FnOnce(&ImageDir) -> Result<()> + Send>;

/// The images that are still to be written.
pub(super) struct Later {
    images: Arc<ImageDir>,
    /// How many threads write, with this one.
    workers: usize,
    /// Those that no writer has yet.
    collected: Vec<OneEntry>,
    writers: Option<Writers>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("collected", &self.collected.len()).finish_non_exhaustive()
    }
}

impl Later {
    /// So many go to a writer together: to wake it takes its time.
    const TOGETHER: usize = 16;

    /// None yet; at most `workers` threads are to write.
    pub(super) fn new(images: Arc<ImageDir>, workers: usize) -> Self {
        Later { images, workers, collected: Vec::new(), writers: None }
    }

    /// Takes the one entry of a file.
    pub(super) fn add<M>(&mut self, kind: Kind, id: u64, message: M)
    where
        M: Message + Name + Send + 'static,
    {
        self.collected.push(Box::new(move |images| Ok(images.write_one(kind, id, &message)?)));
    }

    /// Lets others write what has been taken, if it is worth it.
    ///
    /// # Errors
    /// If an image cannot be written, also one of those that were taken before.
    pub(super) fn begin(&mut self) -> Result<()> {
        if self.collected.len() < Self::TOGETHER {
            return Ok(());
        }
        let some = std::mem::take(&mut self.collected);
        if self.workers <= 1 {
            return write(&self.images, some);
        }
        let start = || Writers::start(&self.images, self.workers);
        let writers = self.writers.get_or_insert_with(start);
        match writers.to.try_send(some) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(some)) => write(&self.images, some),
            // They end before they are told to if they have failed.
            Err(TrySendError::Disconnected(_)) => self.finish(),
        }
    }

    /// Writes what is left, and waits for what others write.
    ///
    /// # Errors
    /// If an image cannot be written.
    pub(super) fn finish(&mut self) -> Result<()> {
        let own = write(&self.images, std::mem::take(&mut self.collected));
        let others = self.writers.take().map_or(Ok(()), Writers::finish);
        own.and(others)
    }
}

impl Drop for Later {
    /// Nothing is written any more behind a dump that has failed.
    fn drop(&mut self) {
        if let Some(writers) = self.writers.take()
            && let Err(e) = writers.finish()
        {
            tracing::debug!("{e}");
        }
    }
}

fn write(images: &ImageDir, some: Vec<OneEntry>) -> Result<()> {
    some.into_iter().try_for_each(|image| image(images))
}

/// Threads that write images.
struct Writers {
    to: SyncSender<Vec<OneEntry>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Writers {
    /// So many parcels of images wait for them at most.
    const WAITING: usize = 16;

    /// All but one of `workers`.
    fn start(images: &Arc<ImageDir>, workers: usize) -> Self {
        let (to, from) = sync_channel(Self::WAITING);
        let from = Arc::new(Mutex::new(from));
        let start = |_| {
            let (images, from) = (Arc::clone(images), Arc::clone(&from));
            std::thread::spawn(move || work(&images, &from))
        };
        Writers { to, threads: (1..workers).map(start).collect() }
    }

    /// Waits until they have written all that they have.
    fn finish(self) -> Result<()> {
        let Writers { to, threads } = self;
        drop(to);
        let ends = threads.into_iter().map(|thread| {
            let panicked = |_| Err(Error::Bug("a thread that writes images panicked".into()));
            thread.join().unwrap_or_else(panicked)
        });
        // All of them are waited for, whatever one has met.
        ends.fold(Ok(()), Result::and)
    }
}

/// The life of a writer: until nothing more comes, or the first error.
fn work(images: &ImageDir, from: &Mutex<Receiver<Vec<OneEntry>>>) -> Result<()> {
    loop {
        let next = from.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(some) => write(images, some)?,
            Err(_) => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use torpor_images::kind;
    use torpor_images::proto::FsEntry;

    fn entry(n: u32) -> FsEntry {
        FsEntry { cwd_id: n, root_id: n, umask: None }
    }

    #[test]
    fn all_are_written_by_whomever() {
        let temp = tempfile::tempdir().unwrap();
        let images = Arc::new(ImageDir::open(temp.path()).unwrap());
        for workers in [1, 2, 5] {
            let mut later = Later::new(Arc::clone(&images), workers);
            for n in 1..3000 {
                later.add(kind::FS, n.into(), entry(n + u32::try_from(workers).unwrap()));
                later.begin().unwrap();
            }
            later.finish().unwrap();
            for n in 1..3000 {
                let read: FsEntry = images.read_one(kind::FS, n.into()).unwrap();
                assert_eq!(read, entry(n + u32::try_from(workers).unwrap()));
            }
        }
    }

    #[test]
    fn what_cannot_be_written_is_an_error_that_names_it() {
        let temp = tempfile::tempdir().unwrap();
        let images = Arc::new(ImageDir::open(temp.path()).unwrap());
        // A directory is not replaced by a file.
        std::fs::create_dir(temp.path().join("fs-40.img")).unwrap();
        for workers in [1, 2, 5] {
            let mut later = Later::new(Arc::clone(&images), workers);
            let mut all = (1..3000).map(|n: u32| {
                later.add(kind::FS, n.into(), entry(n));
                later.begin()
            });
            let early = all.find_map(Result::err);
            let error = early.unwrap_or_else(|| later.finish().unwrap_err());
            assert!(error.to_string().contains("fs-40.img"), "{error}");
        }
    }
}
