//! Open files that no dump writes.

use torpor_images::proto::{FdTypes, FileEntry, InetSkEntry, MmEntry, PipeEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::memory::status::{FILE_PRIVATE, FILE_SHARED, MEMFD, REGULAR};

use super::Asleep;

/// What an entry of `files.img` says of itself: its type, its part, and the number that this has.
#[test]
fn entries_that_are_of_no_file() {
    let task = Asleep::new(&["--uts"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let whole: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let refused = |change: fn(&mut FileEntry), why: &str| {
        let mut files = whole.clone();
        let file = files.iter_mut().find(|file| file.reg.is_some()).unwrap();
        change(file);
        let what = format!("files.img: file {}{why}", file.id);
        images.write_all(kind::FILES, 0, &files).unwrap();
        task.denied(&[], &[&what]);
    };
    let of_another = |ty| format!(": it is of type {ty}, but has a part of type REG");
    refused(|file| file.r#type = FdTypes::Und.into(), &of_another("UND"));
    refused(|file| file.r#type = 77, &of_another("UND"));
    refused(|file| file.r#type = FdTypes::Eventfd.into(), &of_another("EVENTFD"));
    let none = |file: &mut FileEntry| (file.r#type, file.reg) = (FdTypes::Und.into(), None);
    refused(none, " is of type UND, which is not supported");
    refused(|file| file.reg = None, " has no path");
    let number = |file: &mut FileEntry| file.reg.as_mut().unwrap().id = 900_002;
    refused(number, ": its part has number 900002");
    images.write_all(kind::FILES, 0, &whole).unwrap();
    task.allowed(&[]);
}

#[test]
fn sockets_in_states_that_there_are_not() {
    const LAST: &str = "none that has a last peer";
    let task = Asleep::new(&["--uts"], ":");
    let socket = |change: fn(&mut InetSkEntry)| {
        task.open(FdTypes::Inetsk, |file| {
            let mut socket = InetSkEntry {
                id: file.id,
                family: 2,
                r#type: 1,
                proto: 6,
                state: 7,
                src_port: 4000,
                src_addr: vec![0],
                ..InetSkEntry::default()
            };
            change(&mut socket);
            file.isk = Some(socket);
        });
    };
    let refused = |change: fn(&mut InetSkEntry), why: &str| {
        socket(change);
        task.denied(&[], &[&format!("files.img: socket 900001: is {why}")]);
    };
    refused(|socket| socket.state = 0, "in state 0");
    refused(|socket| socket.state = 13, "in state 13");
    refused(|socket| socket.shutdown = Some(4), "shut down in way 4");
    refused(|socket| (socket.state, socket.torpor_peer_port) = (10, Some(80)), LAST);
    refused(|socket| (socket.src_port, socket.torpor_peer_port) = (0, Some(80)), LAST);
    socket(|_| ());
    task.allowed(&[]);
    socket(|socket| (socket.torpor_peer_port, socket.torpor_peer_addr) = (Some(80), vec![1]));
    task.allowed(&[]);
}

#[test]
fn ends_of_pipes_for_nothing() {
    let task = Asleep::new(&["--uts"], ":");
    let pipe = |flags| {
        task.open(FdTypes::Pipe, |file| {
            let id = file.id;
            file.pipe = Some(PipeEntry { id, pipe_id: 5, flags, ..PipeEntry::default() });
        });
    };
    pipe(3);
    let why = "files.img: file 900001: is an end of pipe 5 for neither reading nor writing";
    task.denied(&[], &[why]);
    // Read, written, and both.
    for flags in 0..3 {
        pipe(flags);
        task.allowed(&[]);
    }
}

/// What is in memory only is opened with all rights.
#[test]
fn a_path_is_mapped_as_no_file_in_memory() {
    let task = Asleep::new(&["--uts"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let root = u64::from(task.root());
    let mut memory: MmEntry = images.read_one(kind::MM, root).unwrap();
    let area = memory.vmas.iter_mut().find(|area| area.status & FILE_PRIVATE != 0).unwrap();
    (area.status, area.flags, area.fdflags) = (REGULAR | MEMFD | FILE_SHARED, 1, Some(2));
    let (start, file) = (area.start, area.shmid);
    images.write_one(kind::MM, root, &memory).unwrap();
    let why =
        format!("mm-{root}.img: mapping {start:x} is of file {file}, which is no file in memory");
    task.denied(&[], &[&why]);
}
