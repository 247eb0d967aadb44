//! What is listed and compared, though no rule limits it: anybody may have it, or it counts in namespaces
//! that are made only. Formats of programs, which count there, too, are limited by `capabilities.use`.

use torpor_images::kind;

use super::checkpoint::{Checkpoint, Maps, Requests, Task};
use crate::clock_times::ClockTimes;
use crate::descriptor::DescriptorTable;
use crate::error::{Error, Result};
use crate::file_lock::FileLock;
use crate::given_file::GivenFile;
use crate::host_names::HostNames;
use crate::memory_file::MemoryInode;
use crate::namespace::NsKind;
use crate::open_file::{FileKind, OpenFile};
use crate::passed::Passed;
use crate::plain_file::PlainFile;
use crate::program_format::ProgramFormat;
use crate::queued::{DataQueue, QueuedData};
use crate::request::Ask;
use crate::socket::Socket;
use crate::terminal::Terminal;
use crate::terminal_input::TerminalInput;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    spaces(checkpoint, all)?;
    descriptors(checkpoint, all);
    plain_files(checkpoint, all)?;
    files(checkpoint, passed, maps, all)
}

/// Names, clocks and formats that namespaces have.
fn spaces(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    let images = checkpoint.images;
    for number in checkpoint.namespaces(NsKind::Uts) {
        let names = HostNames::read(images, number)?.map(Ask::HostNames);
        names.into_iter().for_each(|ask| {
            all.add(kind::UTSNS.file_name(number.into()), None, ask);
        });
    }
    // The clocks of the host have no number.
    for number in checkpoint.namespaces(NsKind::Time).into_iter().chain([0]) {
        let clocks = ClockTimes::read(images, number)?.map(Ask::Clocks);
        clocks.into_iter().for_each(|ask| {
            all.add(kind::TIMENS.file_name(number.into()), None, ask);
        });
    }
    if images.has(kind::BINFMT_MISC, 0)? {
        for format in ProgramFormat::all(images)? {
            all.add(kind::BINFMT_MISC.file_name(0), None, Ask::ProgramFormat(format));
        }
    }
    Ok(())
}

/// The descriptors of each table: the first task that has it stands for all.
fn descriptors(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    let has_some = |task: &&Task<'_>| !task.zombie && !task.fds.is_empty();
    for task in checkpoint.tasks.iter().filter(has_some) {
        let (table, fds) = (task.table, task.fds.to_vec());
        let ask = Ask::Descriptors(DescriptorTable { table, all: fds });
        all.add(table.image(), None, ask);
    }
}

/// Files that anybody makes, without a path, and what those in memory are descriptions of.
fn plain_files(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    let image = kind::FILES.file_name(0);
    let files = checkpoint.files.iter().filter_map(|entry| PlainFile::of(entry));
    files.for_each(|file| all.add(&*image, None, Ask::PlainFile(file)));
    for inode in MemoryInode::all(checkpoint.images)? {
        let ask = Ask::PlainFile(PlainFile::Inode(inode));
        all.add(kind::MEMFD_INODE.file_name(0), None, ask);
    }
    Ok(())
}

/// A file that belongs to this user and group.
pub(super) fn owned((user, group): (u32, u32), maps: &Maps, mut add: impl FnMut(Ask)) {
    add(Ask::User(maps.user(user)));
    add(Ask::Group(maps.group(group)));
}

/// Locks, terminals, sockets and names of Unix sockets, and what the caller gives.
fn files(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    for lock in FileLock::all(checkpoint.images)? {
        let task = Some(lock.task.cast_unsigned());
        all.add(kind::FILE_LOCKS.file_name(0), task, Ask::Lock(lock));
    }
    let terminals = Terminal::all(checkpoint.images)?;
    let image = kind::FILES.file_name(0);
    let mut sockets = Vec::new();
    for entry in &checkpoint.files {
        let file = OpenFile::read(entry);
        let file = file.map_err(|reason| Error::Invalid { image: image.clone(), reason })?;
        let given = GivenFile::of(&file, &terminals, &passed.files).map(Ask::GivenFile);
        let made = || Socket::of(entry).map(|socket| socket.map(Ask::Socket));
        let ask = given.map_or_else(made, |given| Ok(Some(given)));
        let ask = ask.map_err(|reason| Error::Invalid { image: image.clone(), reason })?;
        ask.into_iter().for_each(|ask| all.add(&*image, None, ask));
        if let FileKind::Unix(socket) = file.kind {
            sockets.push(socket);
        }
    }
    for input in TerminalInput::all(checkpoint.images)? {
        let data = QueuedData::bytes(DataQueue::Terminal(input.terminal), input.data.len());
        all.add(kind::TTY_DATA.file_name(0), None, Ask::Queued(data));
    }
    for terminal in terminals {
        all.add(kind::TTY_INFO.file_name(0), None, Ask::Terminal(terminal));
    }
    for name in sockets.into_iter().filter_map(|socket| socket.bound) {
        if let Some(owner) = name.file.as_ref().and_then(|file| file.owner) {
            owned(owner, maps, |ask| all.add(&*image, None, ask));
        }
        all.add(&*image, None, Ask::Bind(name));
    }
    Ok(())
}
