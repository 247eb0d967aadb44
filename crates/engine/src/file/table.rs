//! The descriptions that the dump has met: each is described once.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use torpor_images::proto::FileEntry;
use torpor_sys::kcmp::{Object, kcmp, search};

use super::found::{Found, identity, own_pid};
use crate::error::{Context, Result};

/// The open file descriptions met so far.
#[derive(Debug, Default)]
pub(crate) struct FileTable {
    /// Descriptions by device and inode of the file they are open on, each list in the kernel's order: thousands may
    /// be open on one (`/dev/null`, all that has no file of its own).
    known: HashMap<(u64, u64), Vec<Numbered>>,
    entries: Vec<FileEntry>,
    last_id: u32,
    /// Descriptions found in flight that are still to be described.
    waiting: Vec<InFlight>,
    /// Our descriptors of those in flight: what they are compared by.
    kept: Vec<OwnedFd>,
}

/// A description with a number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbered {
    /// The process that has it open, and as which descriptor.
    pub pid: i32,
    /// See `pid`.
    pub fd: i32,
    /// Its number.
    pub id: u32,
    /// Its type in `files.img`; 0 as long as it was not described.
    pub kind: i32,
}

/// A description that lies in the queue of a socket.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// Its number.
    pub id: u32,
    /// A duplicate of it, and the number of a descriptor of this process that is kept.
    pub file: OwnedFd,
    /// See `file`.
    pub fd: i32,
    /// The task that has the socket.
    pub task: usize,
    /// Its pid.
    pub holder: i32,
    /// The socket's name.
    pub place: String,
}

impl FileTable {
    /// A number for a description that no descriptor refers to (a mapped file, the
    /// executable, a working directory).
    pub(crate) fn next_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    /// Adds the description of such a file.
    pub(crate) fn push(&mut self, entry: FileEntry) {
        self.entries.push(entry);
    }

    /// The entries so far.
    pub(crate) fn entries(&self) -> &[FileEntry] {
        &self.entries
    }

    /// An entry that is to be completed.
    pub(crate) fn entry_mut(&mut self, id: u32) -> Option<&mut FileEntry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// The descriptions open on the inode number `ino` of any file system: task, descriptor, number.
    pub(crate) fn open_on(&self, ino: u64) -> impl Iterator<Item = (i32, i32, u32)> {
        let all = self.known.iter().filter(move |((_, i), _)| *i == ino);
        all.flat_map(|(_, known)| known).map(|k| (k.pid, k.fd, k.id))
    }

    /// The number of the description behind a descriptor, if it is known.
    pub(crate) fn id_of(&self, pid: i32, fd: i32) -> Option<u32> {
        self.met(pid, fd).map(|(_, known)| known.id)
    }

    /// The inode number of what a descriptor is open on, and its description, if that is known.
    pub(crate) fn met(&self, pid: i32, fd: i32) -> Option<(u64, Numbered)> {
        let key = identity(pid, fd).ok()?;
        Some((key.1, self.find(key, pid, fd).ok()??))
    }

    /// The description behind descriptor `fd` of process `pid`, whose device and inode are `key`.
    ///
    /// # Errors
    /// If the task is gone, or kcmp(2) is not allowed.
    pub(crate) fn find(&self, key: (u64, u64), pid: i32, fd: i32) -> Result<Option<Numbered>> {
        let place = self.place(key, pid, fd)?.ok();
        Ok(place.and_then(|place| self.open_as(key).get(place)).copied())
    }

    /// Adds a description that is open on `key`.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(crate) fn note(&mut self, key: (u64, u64), known: Numbered) -> Result<()> {
        let (Ok(place) | Err(place)) = self.place(key, known.pid, known.fd)?;
        self.known.entry(key).or_default().insert(place, known);
        Ok(())
    }

    fn open_as(&self, key: (u64, u64)) -> &[Numbered] {
        self.known.get(&key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Where a description stands among those that are open on the same, or where it would stand.
    fn place(
        &self,
        key: (u64, u64),
        pid: i32,
        fd: i32,
    ) -> Result<std::result::Result<usize, usize>> {
        search(self.open_as(key), |known| kcmp(pid, known.pid, Object::File(fd, known.fd)))
            .context(|| format!("kcmp of fd {fd} of task {pid}"))
    }

    /// Says of which type description `id` is, after all.
    pub(crate) fn set_kind(&mut self, id: u32, kind: i32) {
        let same = self.known.values_mut().flatten().find(|k| k.id == id);
        if let Some(known) = same {
            known.kind = kind;
        }
    }

    /// The number of a description that was found inside of `holder`, not in a descriptor table:
    /// in flight between sockets. `file` is a duplicate of it. It is described after `holder`.
    ///
    /// # Errors
    /// If there are no more descriptors, or kcmp(2) is not allowed.
    pub(crate) fn in_flight(&mut self, holder: &Found, file: OwnedFd) -> Result<u32> {
        let (pid, fd) = (own_pid(), file.as_raw_fd());
        let key = identity(pid, fd)?;
        // The holder itself is not among the known ones yet.
        if kcmp(pid, pid, Object::File(fd, holder.file.as_raw_fd())).is_ok_and(Ordering::is_eq) {
            return Ok(holder.id);
        }
        if let Some(known) = self.find(key, pid, fd)? {
            return Ok(known.id);
        }
        // What a found file is looked up by later is the descriptor that is kept.
        let kept = file.try_clone().context(|| "dup".to_owned())?;
        let (fd, id) = (kept.as_raw_fd(), self.next_id());
        self.note(key, Numbered { pid, fd, id, kind: 0 })?;
        self.kept.push(kept);
        let place = format!("fd {} ({})", holder.fd, holder.link.display());
        let (task, holder) = (holder.task, holder.pid);
        self.waiting.push(InFlight { id, file, fd, task, holder, place });
        Ok(id)
    }

    /// A description that was found in flight, and is still to be described.
    pub(crate) fn next_in_flight(&mut self) -> Option<InFlight> {
        self.waiting.pop()
    }
}
