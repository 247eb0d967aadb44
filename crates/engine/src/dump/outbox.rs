//! The memory of a dump that goes to a page server instead of into files.
//!
//! What is to be sent is planned while the tree is frozen, as for files, and sent in one
//! go: object by object over one connection. Sealed or compressed pages go as they would be
//! written into files, by whichever thread has them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};
use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind};
use torpor_images::packed::Packed;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run};
use torpor_images::pages::Depot;

use crate::error::{Context, Error, Result};
use crate::halt::Halt;
use crate::memory::pages::{self, CHUNK, PageSpan, Source};
use crate::memory::vma::PAGE;
use crate::options::{Memory, Trust};
use crate::page_server::{Object, Sender};

/// A directory among the images with the pagemaps that were sent: the next dump has to
/// know which pages the server has, and a server cannot be asked that.
const NOTES: &str = "sent";

/// A connection, and what is to be sent over it.
#[derive(Debug)]
pub(super) struct Outbox {
    sender: Sender,
    objects: Vec<(Object, Vec<(Source, PageSpan)>)>,
}

/// Where the memory of a dump goes to if it does not stay here.
#[derive(Debug)]
pub(super) enum Away {
    /// To a page server of anybody's, which gets pagemaps and pages.
    Pages(Box<Outbox>),
    /// To a page server of Torpor's, which stores files as they are: sealed or compressed.
    Files(Arc<Store>),
}

impl Away {
    /// Connects to the page server that the options name, if they name one. After the
    /// helpers of the dump were forked: the server is to learn when this process ends.
    ///
    /// # Errors
    /// If the server does not answer, or cannot take sealed or compressed pages.
    pub(super) fn connect(memory: &Memory, trust: &Trust) -> Result<Option<Self>> {
        let Some(server) = &memory.page_server else { return Ok(None) };
        let what = match (&trust.seal, &memory.compress) {
            (Some(_), _) => "--encrypt",
            (None, Some(_)) => "--compress",
            (None, None) => {
                let (sender, objects) = (Sender::connect(server)?, Vec::new());
                return Ok(Some(Away::Pages(Box::new(Outbox { sender, objects }))));
            }
        };
        let sender = Sender::connect_to_torpor(server, what)?;
        Ok(Some(Away::Files(Arc::new(Store { sender: Mutex::new(Some(sender)) }))))
    }

    /// What the server has, from the checkpoint before, of an object.
    ///
    /// # Errors
    /// If the server does not answer; if the notes of what was sent are damaged.
    pub(super) fn sent_before(
        &mut self,
        parent: &ImageDir,
        kind: Kind,
        id: u64,
    ) -> Result<Vec<Run>> {
        match self {
            Away::Pages(outbox) => outbox.sent_before(parent, kind, id),
            Away::Files(store) => store.sent_before(parent, kind, id),
        }
    }

    /// Where pages files go.
    pub(super) fn depot(&self) -> Option<Arc<dyn Depot>> {
        match self {
            Away::Pages(_) => None,
            Away::Files(store) => Some(Arc::clone(store) as Arc<dyn Depot>),
        }
    }

    /// The tree is about to run on while its pages are sent; whether that can be.
    ///
    /// # Errors
    /// Pages that cannot be read; no memory to keep those in that are not in twins; those of [`Halt::check`].
    pub(super) fn keep(&mut self, halt: &Halt) -> Result<bool> {
        match self {
            Away::Pages(outbox) => outbox.keep(halt).map(|()| true),
            Away::Files(_) => Ok(false),
        }
    }

    /// Sends what is planned, and waits until the server has written everything. Returns what was
    /// compressed only on its way. `progress` is told of each piece, and says whether to go on.
    ///
    /// # Errors
    /// If pages cannot be read; if the server does not take them all; those of `progress`.
    pub(super) fn finish(self, progress: &dyn Fn(u64) -> Result<()>) -> Result<Option<Packed>> {
        match self {
            Away::Pages(outbox) => outbox.send(progress),
            Away::Files(store) => store.take()?.close(),
        }
    }
}

/// A page server that stores pages files. Pagemaps, and what proves or finds the pages, stay
/// with the other images.
#[derive(Debug)]
pub(super) struct Store {
    /// Gone when everything is stored.
    sender: Mutex<Option<Sender>>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Option<Sender>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<Sender> {
        self.lock().take().ok_or_else(closed)
    }

    fn sent_before(&self, parent: &ImageDir, kind: Kind, id: u64) -> Result<Vec<Run>> {
        let mut sender = self.lock();
        let sender = sender.as_mut().ok_or_else(closed)?;
        if !parent.has(kind, id)? {
            let there = sender.has_in_parent(Object { kind, id })?;
            return if there { noted(parent, kind, id) } else { Ok(Vec::new()) };
        }
        let map = Pagemap::read_unbacked(parent, kind, id)?;
        let kind = if map.packed { kind::PAGES_PACKED } else { kind::PAGES };
        let there = sender.has_in_parent(Object { kind, id: map.pages_id.into() })?;
        Ok(if there { map.runs } else { Vec::new() })
    }
}

impl Depot for Store {
    fn write_all_at(&self, kind: Kind, id: u32, data: &[u8], offset: u64) -> io::Result<()> {
        let mut sender = self.lock();
        let sender = sender.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        sender.store(Object { kind, id: id.into() }, offset, data).map_err(io::Error::other)
    }
}

fn closed() -> Error {
    Error::Bug("the page server has been told that everything is there".to_owned())
}

impl Outbox {
    /// What was sent of an object for the checkpoint before, if the server has it as well.
    ///
    /// # Errors
    /// If the server does not answer; if the notes of what was sent are damaged.
    fn sent_before(&mut self, parent: &ImageDir, kind: Kind, id: u64) -> Result<Vec<Run>> {
        if !parent.path().join(NOTES).is_dir() || !self.sender.has_in_parent(Object { kind, id })? {
            return Ok(Vec::new());
        }
        noted(parent, kind, id)
    }

    /// Plans to send the memory of an object; returns how many bytes of pages that are.
    ///
    /// # Errors
    /// Those of the files in `images`.
    pub(super) fn push(
        &mut self,
        images: &ImageDir,
        kind: Kind,
        id: u64,
        runs: Vec<(Source, PageSpan)>,
    ) -> Result<u64> {
        // One of an earlier dump would be taken for this one's.
        images.remove(&kind.file_name(id))?;
        let notes = images.inner(NOTES)?;
        let mut pagemap = PagemapWriter::create(&notes, kind, id, 0)?;
        runs.iter().try_for_each(|(_, run)| pagemap.push(to_run(run)))?;
        pagemap.finish()?;
        let there = runs.iter().filter(|(_, run)| !run.clean);
        let bytes = there.map(|(_, run)| run.end - run.start).sum();
        self.objects.push((Object { kind, id }, runs));
        Ok(bytes)
    }

    /// The tree is about to run on: keeps what would be another thing then. What is sent from
    /// there on is what it had now, by itself or by its twins.
    fn keep(&mut self, halt: &Halt) -> Result<()> {
        let mut buffer = vec![0; CHUNK];
        for (_, runs) in &mut self.objects {
            // Pages have the same offset in it as in the memory: only what is written takes room.
            let mut kept: Option<Arc<File>> = None;
            for (source, run) in runs {
                if !run.is_copied() || matches!(source, Source::Twin(..)) {
                    continue;
                }
                let file = match &kept {
                    Some(file) => Arc::clone(file),
                    None => Arc::clone(kept.insert(Arc::new(memory_file()?))),
                };
                keep_run(source, run, &file, &mut buffer, halt)?;
                *source = Source::File(file);
            }
        }
        Ok(())
    }

    /// Sends everything, and waits until the server has written it. Returns what was compressed on
    /// its way.
    ///
    /// # Errors
    /// If pages cannot be read; if the server does not take them all; those of `progress`.
    fn send(mut self, progress: &dyn Fn(u64) -> Result<()>) -> Result<Option<Packed>> {
        let mut buffer = vec![0; CHUNK];
        for (object, runs) in std::mem::take(&mut self.objects) {
            self.sender.open(object)?;
            for (source, run) in runs {
                self.send_run(&source, run, &mut buffer, progress)?;
            }
        }
        self.sender.close()
    }

    fn send_run(
        &mut self,
        source: &Source,
        run: PageSpan,
        buffer: &mut [u8],
        progress: &dyn Fn(u64) -> Result<()>,
    ) -> Result<()> {
        self.sender.run(&to_run(&run))?;
        let mut at = if run.clean { run.end } else { run.start };
        while at < run.end {
            let len = usize::try_from(run.end - at).unwrap_or(CHUNK).min(CHUNK);
            let part = &mut buffer[..len];
            pages::read(source, &[(at, len)], part)?;
            self.sender.pages(part)?;
            progress(len as u64)?;
            at += len as u64;
        }
        Ok(())
    }
}

fn memory_file() -> Result<File> {
    let file = memfd_create("torpor-pages", MemfdFlags::CLOEXEC);
    Ok(file.context(|| "memfd_create".to_owned())?.into())
}

/// Copies the pages of a run into `file`.
fn keep_run(
    source: &Source,
    run: &PageSpan,
    file: &File,
    buffer: &mut [u8],
    halt: &Halt,
) -> Result<()> {
    let mut at = run.start;
    while at < run.end {
        halt.check()?;
        let len = usize::try_from(run.end - at).unwrap_or(CHUNK).min(CHUNK);
        let part = &mut buffer[..len];
        pages::read(source, &[(at, len)], part)?;
        file.write_all_at(part, at).context(|| "keep pages to be sent".to_owned())?;
        at += len as u64;
    }
    Ok(())
}

/// What the checkpoint before has of an object, in its own images or, by its notes, at a page
/// server. One that is sealed has its pagemaps with it wherever its pages are.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(super) fn noted(parent: &ImageDir, kind: Kind, id: u64) -> Result<Vec<Run>> {
    if parent.has(kind, id)? {
        return Ok(Pagemap::read_unbacked(parent, kind, id)?.runs);
    }
    let notes = match parent.relative(NOTES.as_ref()) {
        Err(error) if error.is_missing() => return Ok(Vec::new()),
        notes => notes?,
    };
    if notes.has(kind, id)? {
        Ok(Pagemap::read_unbacked(&notes, kind, id)?.runs)
    } else {
        Ok(Vec::new())
    }
}

/// How a pagemap has it.
pub(super) fn to_run(found: &PageSpan) -> Run {
    Run {
        vaddr: found.start,
        pages: (found.end - found.start) / PAGE,
        in_parent: found.clean,
        present: found.is_copied(),
        relative: found.relative,
        lazy: false,
    }
}
