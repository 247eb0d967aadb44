//! The memory of a dump that goes to a page server instead of into files.
//!
//! What is to be sent is planned while the tree is frozen, as for files, and sent in one
//! go: object by object over one connection.

use torpor_images::ImageDir;
use torpor_images::kind::Kind;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run};

use crate::error::{Error, Result};
use crate::memory::pages::{self, CHUNK, Found, Source};
use crate::memory::vma::PAGE;
use crate::options::Options;
use crate::page_server::{Object, Sender};

/// A directory among the images with the pagemaps that were sent: the next dump has to
/// know which pages the server has, and a server cannot be asked that.
const NOTES: &str = "sent";

/// A connection, and what is to be sent over it.
#[derive(Debug)]
pub(super) struct Outbox {
    sender: Sender,
    objects: Vec<(Object, Vec<(Source, Found)>)>,
}

impl Outbox {
    /// Connects to the page server that the options name, if they name one. After the
    /// helpers of the dump were forked: the server is to learn when this process ends.
    ///
    /// # Errors
    /// A dump that is to be sealed or compressed; the connection's.
    pub fn connect(opts: &Options) -> Result<Option<Self>> {
        let Some(server) = &opts.page_server else { return Ok(None) };
        if opts.compress.is_some() {
            let what = "--compress with --page-server: its protocol has no place for";
            return Err(Error::Unsupported(format!("{what} compressed pages")));
        }
        if opts.seal.is_some() {
            let what = "--encrypt with --page-server: its protocol has no place for sealed pages";
            return Err(Error::Unsupported(format!("{what}, and plain ones must not leave")));
        }
        Ok(Some(Outbox { sender: Sender::connect(server)?, objects: Vec::new() }))
    }

    /// What was sent of an object for the checkpoint before, if the server has it as well.
    ///
    /// # Errors
    /// The connection's; damaged images.
    pub fn sent_before(&mut self, parent: &ImageDir, kind: Kind, id: u64) -> Result<Vec<Run>> {
        if !parent.path().join(NOTES).is_dir() || !self.sender.has_in_parent(Object { kind, id })? {
            return Ok(Vec::new());
        }
        noted(parent, kind, id)
    }

    /// Plans to send the memory of an object; returns how many bytes of pages that are.
    ///
    /// # Errors
    /// Those of the files in `images`.
    pub fn push(
        &mut self,
        images: &ImageDir,
        kind: Kind,
        id: u64,
        runs: Vec<(Source, Found)>,
    ) -> Result<u64> {
        // One of an earlier dump would be taken for this one's.
        images.remove(&kind.file_name(id))?;
        let notes = ImageDir::create(images.path().join(NOTES))?;
        let mut pagemap = PagemapWriter::create(&notes, kind, id, 0)?;
        runs.iter().try_for_each(|(_, run)| pagemap.push(to_run(run)))?;
        pagemap.finish()?;
        let there = runs.iter().filter(|(_, run)| !run.clean);
        let bytes = there.map(|(_, run)| run.end - run.start).sum();
        self.objects.push((Object { kind, id }, runs));
        Ok(bytes)
    }

    /// Sends everything, and waits until the server has written it.
    ///
    /// # Errors
    /// The connection's; pages that cannot be read.
    pub fn send(mut self, progress: &dyn Fn(u64)) -> Result<()> {
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
        run: Found,
        buffer: &mut [u8],
        progress: &dyn Fn(u64),
    ) -> Result<()> {
        self.sender.run(&to_run(&run))?;
        let mut at = if run.clean { run.end } else { run.start };
        while at < run.end {
            let len = usize::try_from(run.end - at).unwrap_or(CHUNK).min(CHUNK);
            let part = &mut buffer[..len];
            pages::read(source, &[(at, len)], part)?;
            self.sender.pages(part)?;
            progress(len as u64);
            at += len as u64;
        }
        Ok(())
    }
}

/// What the checkpoint before has of an object, in its own images or, by its notes, at a page
/// server.
///
/// # Errors
/// Damaged images.
pub(super) fn noted(parent: &ImageDir, kind: Kind, id: u64) -> Result<Vec<Run>> {
    if parent.has(kind, id)? {
        return Ok(Pagemap::read(parent, kind, id)?.runs);
    }
    let notes = parent.path().join(NOTES);
    if !notes.is_dir() {
        return Ok(Vec::new());
    }
    let notes = ImageDir::open(notes)?;
    if notes.has(kind, id)? {
        Ok(Pagemap::read_unbacked(&notes, kind, id)?.runs)
    } else {
        Ok(Vec::new())
    }
}

/// How a pagemap has it.
pub(super) fn to_run(found: &Found) -> Run {
    Run {
        vaddr: found.start,
        pages: (found.end - found.start) / PAGE,
        in_parent: found.clean,
        lazy: false,
        present: !found.clean,
    }
}
