//! Objects of a namespace of the test, restored into another one.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::IpcShmEntry;
use torpor_images::{ImageDir, kind};
use torpor_sys::ipc::{self, Attached};
use torpor_sys::mqueue;

use super::run_in;
use crate::dump::Dump;
use crate::dump::memory::{copy_pages, plan_shared};
use crate::error::Result;
use crate::namespace::NsKind;
use crate::namespace::filling::Filling;
use crate::namespace::testing::{fresh, tree};
use crate::namespace::user::IdMaps;
use crate::options::Options;
use crate::restore::bulk::Bulk;

const MIB: u64 = 1 << 20;

fn inside<T: Send>(space: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> T {
    run_in(&[space], || Ok(work())).unwrap()
}

fn write_at(id: i32, offset: u64, bytes: &[u8]) {
    let attached = Attached::new(id, false).unwrap();
    let mut memory = std::fs::File::options().write(true).open("/proc/self/mem").unwrap();
    memory.seek(SeekFrom::Start(attached.address() + offset)).unwrap();
    memory.write_all(bytes).unwrap();
}

fn read_at(id: i32, offset: u64, len: usize) -> Vec<u8> {
    let attached = Attached::new(id, true).unwrap();
    let mut memory = std::fs::File::open("/proc/self/mem").unwrap();
    memory.seek(SeekFrom::Start(attached.address() + offset)).unwrap();
    let mut bytes = vec![0; len];
    memory.read_exact(&mut bytes).unwrap();
    bytes
}

/// Tables without times and pids, and all contents.
fn describe() -> Vec<String> {
    let mut all = Vec::new();
    for (name, columns) in [("msg", 5), ("sem", 4), ("shm", 4)] {
        let text = std::fs::read_to_string(format!("/proc/sysvipc/{name}")).unwrap();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let owners = match name {
                "msg" => &words[7..11],
                "sem" => &words[4..8],
                _ => &words[7..11],
            };
            let id: i32 = words[1].parse().unwrap();
            let content = match name {
                "msg" => (0..)
                    .map_while(|i| ipc::msg_peek(id, i, 9000).unwrap())
                    .map(|m| format!("{m:?}"))
                    .collect(),
                "sem" => format!("{:?}", ipc::sem_values(id, words[3].parse().unwrap()).unwrap()),
                _ => String::new(),
            };
            all.push(format!("{name} {:?} {owners:?} {content}", &words[..columns]));
        }
    }
    for name in ["sem", "msgmax", "msgmnb", "shmmax", "sem_next_id", "msg_next_id"] {
        all.push(std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap());
    }
    all.push(std::fs::read_to_string("/proc/sys/fs/mqueue/msg_max").unwrap());
    all
}

fn populate() -> Vec<i32> {
    std::fs::write("/proc/sys/kernel/sem", "300\t20000\t50\t100").unwrap();
    std::fs::write("/proc/sys/kernel/msgmax", "9000").unwrap();
    std::fs::write("/proc/sys/fs/mqueue/msg_max", "17").unwrap();
    // An object that is gone leaves a hole in the ids.
    let gone = ipc::shm_create(5, 100, 0o600).unwrap();
    ipc::shm_remove(gone).unwrap();
    let sparse = ipc::shm_create(0x1234, 64 * MIB + 100, 0o640).unwrap();
    write_at(sparse, 0, b"first");
    write_at(sparse, 64 * MIB, b"last");
    // Behind the end of the segment, but within its last page.
    write_at(sparse, 64 * MIB + 200, b"tail");
    let private = ipc::with_ids(33, 44, || ipc::shm_create(0, 5000, 0o600)).unwrap();
    write_at(private, 4096, b"page");
    ipc::shm_set_owner(private, ipc::ObjectOwner { uid: 55, gid: 66, mode: 0o644 }).unwrap();
    let set = ipc::sem_create(-7, 10, 0o606).unwrap();
    ipc::sem_set_values(set, &(100..110).collect::<Vec<u16>>()).unwrap();
    ipc::sem_create(0, 1, 0o600).unwrap();
    let queue = ipc::msg_create(77, 0o660).unwrap();
    ipc::msg_send(queue, 3, b"three").unwrap();
    ipc::msg_send(queue, 1, b"").unwrap();
    ipc::msg_send(queue, i64::MAX, &[7; 9000]).unwrap();
    ipc::msg_set(queue, ipc::ObjectOwner { uid: 1, gid: 2, mode: 0o622 }, 12000).unwrap();
    std::fs::write("/proc/sys/kernel/sem_next_id", "1111").unwrap();
    vec![sparse, private]
}

fn dump(space: OwnedFd, dir: &std::path::Path) -> Result<()> {
    let opts = Options::default();
    let images = ImageDir::create(dir).unwrap();
    let mut cx = Dump::bare(&opts, images, tree(NsKind::Ipc, vec![space]));
    for (id, pages, source) in super::dump(&cx.images, &cx.id_maps, &cx.ns, 1)? {
        plan_shared(&mut cx, id, pages, &source)?;
    }
    copy_pages(&mut cx, &mut crate::NoHooks, &crate::halt::Halt::default())
}

fn restore(space: &OwnedFd, dir: &std::path::Path) {
    let images = ImageDir::open(dir).unwrap();
    let mut files = tree(NsKind::Ipc, vec![space.try_clone().unwrap()]);
    files.filling = Filling::read(&images, files.filled()).unwrap();
    let maps = IdMaps::identity();
    super::restore(Bulk::of(&images), &maps, &files, 1).unwrap();
    super::finish(&maps, &files, 1).unwrap();
}

#[test]
fn objects_come_back_with_ids_keys_owners_and_contents() {
    let dir = tempfile::tempdir().unwrap();
    let old = fresh(NsKind::Ipc);
    let segments = inside(old.as_fd(), populate);
    let before = inside(old.as_fd(), describe);
    dump(old.try_clone().unwrap(), dir.path()).unwrap();
    assert_eq!(inside(old.as_fd(), describe), before, "the dump changed something");

    let new = fresh(NsKind::Ipc);
    restore(&new, dir.path());
    assert_eq!(inside(new.as_fd(), describe), before);
    inside(new.as_fd(), || {
        assert_eq!(read_at(segments[0], 0, 6), b"first\0");
        assert_eq!(read_at(segments[0], 64 * MIB, 5), b"last\0");
        assert_eq!(read_at(segments[0], 64 * MIB + 200, 5), b"tail\0");
        assert_eq!(read_at(segments[1], 4095, 5), b"\0page");
    });
    let size = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len());
    assert!(size.sum::<u64>() < MIB, "holes were written");
}

#[test]
fn posix_message_queues_are_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let make = || {
        let new = mqueue::QueueAttributes::new(4, 99);
        let flags = libc::O_CREAT | libc::O_RDWR;
        let queue = mqueue::open(c"torpor-test", flags, 0o640, Some(&new)).unwrap();
        rustix::fs::fchmod(&queue, rustix::fs::Mode::from_raw_mode(0o642)).unwrap();
    };
    let look = || {
        let queue = mqueue::open(c"torpor-test", libc::O_RDONLY, 0, None).unwrap();
        let mode = rustix::fs::fstat(&queue).unwrap().st_mode & 0o777;
        (mqueue::attributes(queue.as_fd()).unwrap(), mode)
    };
    let space = fresh(NsKind::Ipc);
    inside(space.as_fd(), make);
    let before = inside(space.as_fd(), look);
    dump(space, dir.path()).unwrap();
    let new = fresh(NsKind::Ipc);
    restore(&new, dir.path());
    assert_eq!(inside(new.as_fd(), look), before);
}

/// What is made is what was read first: the image has another segment by the time that its content is looked for.
#[test]
fn a_segment_that_was_exchanged_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let old = fresh(NsKind::Ipc);
    inside(old.as_fd(), populate);
    dump(old, dir.path()).unwrap();
    let images = ImageDir::open(dir.path()).unwrap();
    let mut files = tree(NsKind::Ipc, vec![fresh(NsKind::Ipc)]);
    files.filling = Filling::read(&images, files.filled()).unwrap();
    let mut segments: Vec<IpcShmEntry> = images.read_all(kind::IPCNS_SHM, 1).unwrap();
    segments[0].size *= 2;
    images.write_all(kind::IPCNS_SHM, 1, &segments).unwrap();
    let made = super::restore(Bulk::of(&images), &IdMaps::identity(), &files, 1);
    let error = made.unwrap_err().to_string();
    assert!(error.starts_with("ipcns-shm-1.img: segment "), "{error}");
}
