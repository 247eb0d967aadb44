//! Entries that nothing refers to: no dump writes any, nothing is made of them, and whoever judges them would
//! judge something else than what is made. Files as a whole may be left over, since CRIU leaves those of an
//! earlier dump in a directory.

use std::collections::{BTreeSet, HashMap};

use torpor_images::proto::{FileEntry, MemfdInodeEntry};
use torpor_images::{ImageDir, Kind, kind};

use super::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::pipe::PipeContent;
use crate::remap::{FoundElsewhere, Remap};
use crate::socket_message::SocketMessage;
use crate::terminal::Terminal;
use crate::terminal_input::TerminalInput;

/// Nothing but a name is had by it.
const O_PATH: u32 = libc::O_PATH.cast_unsigned();

/// Checks all of them.
///
/// # Errors
/// The image file, and the first such entry; damaged images.
pub(super) fn check(checkpoint: &Checkpoint<'_>) -> Result<()> {
    files(checkpoint)?;
    let images = checkpoint.images;
    let of_files = |number: fn(&FileEntry) -> Option<u32>| -> BTreeSet<u64> {
        checkpoint.files.iter().filter_map(|entry| number(entry)).map(u64::from).collect()
    };
    let inodes = images.read_all_or_empty::<MemfdInodeEntry>(kind::MEMFD_INODE, 0)?;
    let known = of_files(|entry| entry.memfd.as_ref().map(|memfd| memfd.inode_id));
    all_known(kind::MEMFD_INODE, "inode", inodes.iter().map(|inode| inode.inode_id), &known)?;
    let pipes = of_files(|entry| entry.pipe.as_ref().map(|pipe| pipe.pipe_id));
    content(images, kind::PIPES_DATA, &pipes)?;
    let fifos = of_files(|entry| entry.fifo.as_ref().map(|fifo| fifo.pipe_id));
    content(images, kind::FIFO_DATA, &fifos)?;
    let terminals = Terminal::all(images)?;
    let known = of_files(|entry| entry.tty.as_ref().map(|tty| tty.tty_info_id));
    all_known(kind::TTY_INFO, "terminal", terminals.iter().map(|info| info.id.into()), &known)?;
    let inputs = TerminalInput::all(images)?;
    all_known(kind::TTY_DATA, "terminal", inputs.iter().map(|input| input.terminal.into()), &known)
}

/// What is queued in pipes that there are.
fn content(images: &ImageDir, image: Kind, known: &BTreeSet<u64>) -> Result<()> {
    let mut pipes = vec![];
    PipeContent::each(images, image, |pipe| pipes.push(u64::from(pipe.id)))?;
    all_known(image, "pipe", pipes.into_iter(), known)
}

fn all_known(
    image: Kind,
    what: &str,
    mut numbers: impl Iterator<Item = u64>,
    known: &BTreeSet<u64>,
) -> Result<()> {
    match numbers.find(|number| !known.contains(number)) {
        None => Ok(()),
        Some(number) => Err(Error::Invalid {
            image: image.file_name(0),
            reason: format!("{what} {number}: nothing refers to it"),
        }),
    }
}

/// Open files: those of tasks, and what leads on from these.
fn files(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let links = Links::of(checkpoint)?;
    let entries: HashMap<u64, &FileEntry> =
        checkpoint.files.iter().map(|entry| (entry.id.into(), *entry)).collect();
    let (mut known, mut next) = (BTreeSet::new(), of_tasks(checkpoint));
    while let Some(id) = next.pop() {
        if known.insert(id) {
            next.extend(links.from.get(&id).into_iter().flatten().copied().map(u64::from));
            next.extend(entries.get(&id).into_iter().flat_map(|entry| links.of_file(entry)));
        }
    }
    // What refers to files that are watched is Torpor's own: whoever writes images anew with CRIU's tools
    // loses it.
    let is_path = |entry: &FileEntry| entry.reg.as_ref().is_some_and(|reg| reg.flags & O_PATH != 0);
    let opened = checkpoint.files.iter().filter(|entry| !is_path(entry));
    all_known(kind::FILES, "file", opened.map(|entry| entry.id.into()), &known)
}

/// What leads from one open file to others.
struct Links {
    /// By messages in its queue, and by the name that it goes by.
    from: HashMap<u64, Vec<u32>>,
    /// Unix sockets, by their inode numbers.
    sockets: HashMap<u32, u32>,
}

impl Links {
    fn of(checkpoint: &Checkpoint<'_>) -> Result<Self> {
        let images = checkpoint.images;
        let mut from: HashMap<u64, Vec<u32>> = HashMap::new();
        for remap in Remap::all(images)? {
            if let FoundElsewhere::Linked(file) = remap.by {
                from.entry(remap.file.into()).or_default().push(file);
            }
        }
        SocketMessage::each(images, |message| {
            from.entry(message.socket.into()).or_default().extend(message.files);
        })?;
        let sockets = checkpoint.files.iter().filter_map(|entry| entry.usk.as_ref());
        let sockets = sockets.map(|socket| (socket.ino, socket.id)).collect();
        Ok(Links { from, sockets })
    }

    /// A path, what it watches, the other end, those that wait to be accepted, and what is registered.
    fn of_file(&self, entry: &FileEntry) -> Vec<u64> {
        let mut known: Vec<u32> = vec![];
        known.extend(entry.tty.as_ref().and_then(|tty| tty.regf_id));
        known.extend(entry.fifo.as_ref().and_then(|fifo| fifo.regf_id));
        let watched = entry.epfd.iter().flat_map(|set| &set.tfd);
        known.extend(watched.filter_map(|watch| watch.torpor_file_id));
        let inodes = entry.ify.iter().flat_map(|set| &set.wd);
        known.extend(inodes.filter_map(|watch| watch.torpor_file_id));
        let marks = entry.ffy.iter().flat_map(|group| &group.mark);
        known.extend(marks.filter_map(|mark| mark.torpor_file_id));
        let others = entry.usk.iter().flat_map(|socket| {
            [socket.peer].into_iter().chain(socket.torpor_pending.iter().copied())
        });
        known.extend(others.filter_map(|inode| self.sockets.get(&inode)));
        let registered = entry.torpor_io_uring.iter().flat_map(|ring| &ring.files);
        known.extend(registered.map(|file| file.file));
        known.into_iter().map(u64::from).collect()
    }
}

/// What tasks have open, have mapped, are in, and run.
fn of_tasks(checkpoint: &Checkpoint<'_>) -> Vec<u64> {
    let mut known = vec![];
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        known.extend(task.fds.iter().map(|descriptor| u64::from(descriptor.file)));
        known.extend(task.areas.iter().filter_map(|area| area.kind.file()).map(u64::from));
        known.extend(task.places.into_iter().flatten().map(u64::from));
    }
    known
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prost::{Message, Name};
    use torpor_images::proto::{
        PipeDataEntry, RegFileEntry, TorporIoUringEntry, TorporIoUringFile, TtyDataEntry,
        TtyFileEntry, TtyInfoEntry, TtyType, UnixSkEntry,
    };

    use super::*;

    /// What is said of images of these open files, whose root task has descriptor `file`.
    fn checked(images: &ImageDir, files: &[FileEntry], file: u32) -> Result<()> {
        let inventory = crate::Inventory::default();
        let fds = [crate::Descriptor { fd: 3, file, flags: 0 }];
        let limits = crate::ProcessLimits::default();
        let process = crate::process::ProcessRest::default();
        let task = super::super::Task {
            pid: 1,
            session: 1,
            homes: crate::NsSet::default(),
            threads: &[1],
            process: &process,
            rests: &[],
            credentials: &[],
            seccomp: &[],
            limits: &limits,
            scheduling: &[],
            areas: &[],
            table: crate::TableNumber::of(1),
            fds: &fds,
            places: [None; 3],
            zombie: false,
        };
        check(&Checkpoint {
            images,
            inventory: &inventory,
            tasks: vec![task],
            files: files.iter().collect(),
        })
    }

    fn file(id: u32, change: impl FnOnce(&mut FileEntry)) -> FileEntry {
        let mut entry = FileEntry { id, ..FileEntry::default() };
        change(&mut entry);
        entry
    }

    fn images() -> (tempfile::TempDir, ImageDir) {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        (dir, images)
    }

    #[test]
    fn files_that_nobody_has_are_named() {
        let (_dir, images) = images();
        let socket = |id, peer| {
            file(id, |entry| {
                entry.usk = Some(UnixSkEntry { id, ino: id + 10, peer, ..UnixSkEntry::default() });
            })
        };
        checked(&images, &[socket(1, 12), socket(2, 0)], 1).unwrap();
        for others in [[socket(2, 0), socket(1, 0)], [socket(2, 11), socket(1, 0)]] {
            let error = checked(&images, &others, 1).unwrap_err().to_string();
            assert_eq!(error, "files.img: file 2: nothing refers to it");
        }
    }

    #[test]
    fn a_file_may_be_registered_and_closed() {
        let (_dir, images) = images();
        let files = vec![TorporIoUringFile { place: 0, file: 2 }];
        let ring = file(1, |entry| {
            let ring = TorporIoUringEntry { id: 1, files, ..TorporIoUringEntry::default() };
            entry.torpor_io_uring = Some(ring);
        });
        let regular =
            |id| file(id, |entry| entry.reg = Some(RegFileEntry { id, ..RegFileEntry::default() }));
        checked(&images, &[ring.clone(), regular(2)], 1).unwrap();
        checked(&images, &[ring, regular(3)], 1).unwrap_err();
    }

    #[test]
    fn what_watches_a_file_may_have_been_lost() {
        let (_dir, images) = images();
        let reg = |flags| {
            file(2, |entry| {
                entry.reg = Some(RegFileEntry { id: 2, flags, ..RegFileEntry::default() });
            })
        };
        checked(&images, &[file(1, |_| ()), reg(O_PATH)], 1).unwrap();
        checked(&images, &[file(1, |_| ()), reg(0)], 1).unwrap_err();
    }

    /// What is said of an entry beside a terminal that a task has.
    fn beside<E: Message + Name>(image: Kind, entry: &E) -> String {
        let (_dir, images) = images();
        let info = TtyInfoEntry { id: 7, r#type: TtyType::Pty.into(), ..TtyInfoEntry::default() };
        images.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
        let terminal = file(1, |entry| {
            let tty = TtyFileEntry { id: 1, tty_info_id: 7, ..TtyFileEntry::default() };
            entry.tty = Some(tty);
        });
        checked(&images, std::slice::from_ref(&terminal), 1).unwrap();
        images.write_all(image, 0, [entry]).unwrap();
        checked(&images, &[terminal], 1).unwrap_err().to_string()
    }

    #[test]
    fn what_no_file_refers_to_is_named() {
        let inode = MemfdInodeEntry { inode_id: 5, ..MemfdInodeEntry::default() };
        let wanted = "memfd.img: inode 5: nothing refers to it";
        assert_eq!(beside(kind::MEMFD_INODE, &inode), wanted);
        let pipe = PipeDataEntry { pipe_id: 5, ..PipeDataEntry::default() };
        let wanted = "pipes-data.img: pipe 5: nothing refers to it";
        assert_eq!(beside(kind::PIPES_DATA, &pipe), wanted);
        let wanted = "fifo-data.img: pipe 5: nothing refers to it";
        assert_eq!(beside(kind::FIFO_DATA, &pipe), wanted);
        let info = TtyInfoEntry { id: 5, r#type: TtyType::Pty.into(), ..TtyInfoEntry::default() };
        let wanted = "tty-info.img: terminal 5: nothing refers to it";
        assert_eq!(beside(kind::TTY_INFO, &info), wanted);
        let data = TtyDataEntry { tty_id: 5, ..TtyDataEntry::default() };
        let wanted = "tty-data.img: terminal 5: nothing refers to it";
        assert_eq!(beside(kind::TTY_DATA, &data), wanted);
    }
}
