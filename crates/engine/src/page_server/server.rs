//! The server's end: writes pagemaps and pages, or pages files as they come.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::time::Duration;

use torpor_images::compress::Compression;
use torpor_images::pagemap::{PE_PARENT, PE_PRESENT, PagemapWriter, Run};
use torpor_images::{ImageDir, kind};

pub use super::connection::Listener;
use super::connection::{Connection, PATIENCE};
use super::protocol::{ASK, Command, Object, Op, YES};
use super::wire::{self, Incoming};
use crate::error::{Context, Error, Result};
use crate::memory::pages::CHUNK;
use crate::memory::vma::PAGE;
use crate::options::Options;

/// Pages files that are open at once.
const MAX_OPEN: usize = 64;

/// Receives what one client sends and writes it to the images directory, on top of
/// `opts.memory.parent` if there is one. What a client sent that did not come to its end
/// is removed, and files that were there before are neither replaced nor removed.
///
/// # Errors
/// If the client is gone, silent for ten minutes, or breaks the protocol; if a file cannot be written.
pub fn serve(opts: &Options, listener: Listener<'_>) -> Result<()> {
    serve_within(opts, listener, PATIENCE)
}

/// The same, for a client that may be silent for `patience`, unless the connection was there already.
pub(super) fn serve_within(
    opts: &Options,
    listener: Listener<'_>,
    patience: Duration,
) -> Result<()> {
    let mut images = opts.images()?;
    images.keep_files();
    if let Some(parent) = &opts.memory.parent {
        images.set_parent(parent)?;
    }
    let (mut connection, first) = listener.accept_first()?;
    if listener.goes_on() {
        connection.expect_words_within(Some(patience))?;
    }
    drop(listener);
    let mut receiver = Receiver::new(&images)?;
    let done = receiver.all(first, &mut connection);
    if done.is_err() {
        receiver.remove()?;
    }
    // Without this the client would learn only that the connection ended.
    let status: i32 = if done.is_ok() { 0 } else { -1 };
    let told = connection.write_all(&status.to_le_bytes()).and_then(|()| connection.flush());
    done?;
    told.context(|| "answer the page client".to_owned())?;
    // Of files that came as they are stored the pagemaps are still to come.
    if opts.memory.auto_dedup && !receiver.objects.is_empty() {
        let freed = crate::dedup::dedup_round(&images, opts)?;
        tracing::info!("Freed {freed} bytes of pages in the images before");
    }
    Ok(())
}

/// Their numbers could be the same.
const MIXED: &str = "the client sent pagemaps and files of pages";

/// What is being received.
struct Receiver<'a> {
    images: &'a ImageDir,
    parent: Option<ImageDir>,
    current: Option<Current>,
    /// What has been begun, in order: the N of the N-th one's pages file.
    objects: Vec<Object>,
    /// The files that were made for them.
    made: Vec<String>,
    stored: StoredFiles,
    hands: Hands,
}

/// The pages files that come as they are stored: parts of several of them by turns.
#[derive(Default)]
struct StoredFiles {
    names: BTreeSet<String>,
    /// Those written to of late.
    open: HashMap<String, File>,
}

impl StoredFiles {
    /// The file of an object, to be written to; it is made if it is new.
    fn open(&mut self, images: &ImageDir, object: Object) -> Result<&mut File> {
        let name = object.kind.file_name(object.id);
        if self.open.len() >= MAX_OPEN && !self.open.contains_key(&name) {
            self.open.clear();
        }
        match self.open.entry(name) {
            Entry::Occupied(there) => Ok(there.into_mut()),
            Entry::Vacant(place) => {
                let name = place.key();
                let file = match self.names.contains(name) {
                    true => images.reopen_file(name)?,
                    false => images.create_file(name)?,
                };
                self.names.insert(name.clone());
                Ok(place.insert(file))
            }
        }
    }
}

/// The object that runs belong to.
struct Current {
    pagemap: PagemapWriter,
    pages: File,
    /// Behind the last run.
    end: u64,
}

impl<'a> Receiver<'a> {
    fn new(images: &'a ImageDir) -> Result<Self> {
        let parent = images.parent()?;
        Ok(Receiver {
            images,
            parent,
            current: None,
            objects: Vec::new(),
            made: Vec::new(),
            stored: StoredFiles::default(),
            hands: Hands { incoming: Incoming::default(), buffer: vec![0; CHUNK] },
        })
    }

    fn all(&mut self, first: Command, connection: &mut Connection) -> Result<()> {
        let mut next = Some(first);
        loop {
            let command = match next.take() {
                Some(command) => command,
                None => Command::receive(connection)?,
            };
            match command.op {
                Op::Open => self.open(&command, connection)?,
                Op::Parent => {
                    let there = match command.object {
                        Some(ASK) => YES,
                        _ => i32::from(self.in_parent(&command)?),
                    };
                    answer(connection, &there.to_le_bytes())?;
                }
                Op::Store => self.store(&command, connection)?,
                Op::Hole | Op::AddPages | Op::Given => self.run(&command, connection)?,
                Op::Get | Op::Greet => {
                    let reason = "the client asked for pages: only a lazy dump serves them";
                    return Err(Error::invalid("page server", reason));
                }
                Op::Close => return self.finish_current(),
                Op::Abandon => {
                    return Err(Error::Peer("the dump on the other end has failed".to_owned()));
                }
            }
        }
    }

    fn in_parent(&self, command: &Command) -> Result<bool> {
        match (&self.parent, command.object) {
            (Some(parent), Some(object)) => Ok(parent.has(object.kind, object.id)?),
            _ => Ok(false),
        }
    }

    /// Writes a part of a pages file as it comes: whoever sealed it has its key, nobody here has.
    fn store(&mut self, command: &Command, connection: &mut Connection) -> Result<()> {
        let Some(object) = command.object else { return Ok(()) };
        if !self.objects.is_empty() {
            return Err(Error::invalid("page server", MIXED));
        }
        let len = u64::from(command.pages);
        if command.vaddr.checked_add(len).and_then(|end| i64::try_from(end).ok()).is_none() {
            return Err(Error::invalid("page server", "the client sent pages out of range"));
        }
        let file = self.stored.open(self.images, object)?;
        file.seek(SeekFrom::Start(command.vaddr)).context(|| "write pages".to_owned())?;
        self.hands.carry(None, connection, file, len)
    }

    fn open(&mut self, command: &Command, connection: &mut Connection) -> Result<()> {
        let Some(object) = command.object else { return Ok(()) };
        if !self.stored.names.is_empty() {
            return Err(Error::invalid("page server", MIXED));
        }
        self.finish_current()?;
        if self.objects.contains(&object) {
            let name = object.kind.file_name(object.id);
            return Err(Error::invalid("page server", format!("the client sent {name} twice")));
        }
        self.objects.push(object);
        let number = self.objects.len();
        let pages_id = u32::try_from(number)
            .map_err(|_| Error::invalid("page server", "the client sent too many objects"))?;
        let pagemap = PagemapWriter::create(self.images, object.kind, object.id, pages_id)?;
        self.made.push(object.kind.file_name(object.id));
        let pages = self.images.raw_file_create(kind::PAGES, number as u64)?;
        self.made.push(kind::PAGES.file_name(number as u64));
        self.current = Some(Current { pagemap, pages, end: 0 });
        let there = self.in_parent(command)?;
        answer(connection, &[u8::from(there)])
    }

    fn run(&mut self, command: &Command, connection: &mut Connection) -> Result<()> {
        let wrong = |what: &str| Error::invalid("page server", format!("the client sent {what}"));
        let present = command.op == Op::AddPages;
        let in_parent = command.flags & PE_PARENT != 0;
        if present != (command.flags & PE_PRESENT != 0) || present && in_parent {
            return Err(wrong("pages with flags of other pages"));
        }
        if in_parent && self.parent.is_none() {
            return Err(wrong("pages in a parent that there is not"));
        }
        let current = self.current.as_mut().ok_or_else(|| wrong("pages of no object"))?;
        let bytes = u64::from(command.pages) * PAGE;
        let end = command.vaddr.checked_add(bytes).filter(|_| command.vaddr.is_multiple_of(PAGE));
        if command.pages == 0 || command.vaddr < current.end {
            return Err(wrong("runs that are out of order"));
        }
        current.end = end.ok_or_else(|| wrong("pages out of range"))?;
        let pages = u64::from(command.pages);
        let run = Run { vaddr: command.vaddr, pages, in_parent, present, ..Run::default() };
        current.pagemap.push(run)?;
        let how = wire::method(command.flags)?;
        let to = &mut current.pages;
        if present { self.hands.carry(how, connection, to, bytes) } else { Ok(()) }
    }

    fn finish_current(&mut self) -> Result<()> {
        match self.current.take() {
            Some(current) => Ok(current.pagemap.finish()?),
            None => Ok(()),
        }
    }

    /// Removes what has been received.
    fn remove(&mut self) -> Result<()> {
        self.current = None;
        let all = self.made.iter().chain(&self.stored.names);
        Ok(all.into_iter().try_for_each(|name| self.images.remove(name))?)
    }
}

fn answer(connection: &mut Connection, bytes: &[u8]) -> Result<()> {
    let said = connection.write_all(bytes).and_then(|()| connection.flush());
    said.context(|| "answer the page client".to_owned())
}

/// Where bytes are on their way from the connection into a file.
struct Hands {
    incoming: Incoming,
    buffer: Vec<u8>,
}

impl Hands {
    /// Carries `left` bytes over, which come as `how` says.
    fn carry(
        &mut self,
        how: Option<Compression>,
        from: &mut Connection,
        to: &mut File,
        mut left: u64,
    ) -> Result<()> {
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let piece = &mut self.buffer[..len];
            self.incoming.receive(how, piece, None, from)?;
            to.write_all(piece).context(|| "write pages".to_owned())?;
            left -= len as u64;
        }
        Ok(())
    }
}
