//! A small world for tests: a network namespace of its own, and sockets of the test
//! itself that are dumped and restored.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use torpor_images::proto::{FileEntry, FownEntry, InventoryEntry};
use torpor_images::{ImageDir, kind};
use torpor_kernel::sock_diag as diag;

use crate::dump::{Dump, files};
use crate::error::Result;
use crate::file::{FdInfo, Found};
use crate::namespace::{Namespace, Namespaces, NsKind};
use crate::options::Options;
use crate::restore::Restore;

/// Runs a test on a thread with a network namespace of its own, in which lo is up.
pub(crate) fn in_netns(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNET).unwrap();
            command("ip", &["link", "set", "lo", "up"]);
            test();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs a program that must succeed.
pub(crate) fn command(program: &str, arguments: &[&str]) {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

/// The network namespace of this thread, as the only one of a tree.
pub(super) fn namespaces() -> Namespaces {
    let file = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
    let inode = rustix::fs::fstat(&file).unwrap().st_ino;
    let net = Namespace {
        kind: NsKind::Net,
        id: 7,
        inode,
        is_host: false,
        file: Some(file.into()),
        task: 0,
        pid: 0,
    };
    Namespaces { all: vec![net], ..Namespaces::default() }
}

fn found(cx: &mut Dump<'_>, file: &OwnedFd) -> Found {
    let fd = file.as_raw_fd();
    let file = file.try_clone().unwrap();
    let stat = rustix::fs::fstat(&file).unwrap();
    let flags = rustix::fs::fcntl_getfl(&file).unwrap().bits();
    Found {
        id: cx.files.next_id(),
        task: 0,
        holder: rustix::process::getpid().as_raw_nonzero().get(),
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        fd,
        link: std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap(),
        stat,
        file,
        fs_type: 0,
        info: FdInfo { flags, ..FdInfo::default() },
        fown: FownEntry::default(),
    }
}

/// Dumps files into a directory, and leaves them as they are; returns their numbers.
pub(crate) fn dump(opts: &Options, dir: &Path, files: &[OwnedFd]) -> Result<Vec<u32>> {
    let mut cx = Dump::bare(opts, ImageDir::open(dir).unwrap(), namespaces());
    let ids = describe(&mut cx, files);
    cx.network.release(&cx.guardian);
    ids
}

/// Dumps files and closes them, as a dump does that kills.
pub(crate) fn dump_and_close(opts: &Options, dir: &Path, files: Vec<OwnedFd>) -> Result<Vec<u32>> {
    let mut cx = Dump::bare(opts, ImageDir::open(dir).unwrap(), namespaces());
    let ids = describe(&mut cx, &files)?;
    cx.network.silence();
    drop(cx);
    close(files);
    Ok(ids)
}

fn describe(cx: &mut Dump<'_>, files: &[OwnedFd]) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for file in files {
        let found = found(cx, file);
        ids.push(files::add(cx, found)?.0);
    }
    files::finish(cx)?;
    let inventory = InventoryEntry {
        img_version: 2,
        tcp_close: Some(cx.opts.network.tcp_close),
        dump_criu_run_id: Some(cx.network.id()?.to_owned()),
        ..InventoryEntry::default()
    };
    cx.images.write_one(kind::INVENTORY, 0, &inventory)?;
    Ok(ids)
}

/// The entries that a dump wrote.
pub(crate) fn entries(dir: &Path) -> Vec<FileEntry> {
    ImageDir::open(dir).unwrap().read_all(kind::FILES, 0).unwrap()
}

/// Restores files from images; returns those with the given numbers.
pub(crate) fn restore(opts: &Options, dir: &Path, ids: &[u32]) -> Result<Vec<OwnedFd>> {
    let mut cx = restore_nearly(opts, dir, ids)?;
    cx.network.let_go();
    cx.files.keep_names();
    Ok(ids
        .iter()
        .map(|id| cx.files.opened.get(*id).unwrap().try_clone_to_owned().unwrap())
        .collect())
}

/// Restores files from images, but fails at the last moment.
pub(crate) fn restore_in_vain(opts: &Options, dir: &Path, ids: &[u32]) -> Result<()> {
    let cx = restore_nearly(opts, dir, ids)?;
    let inodes: Vec<_> = ids.iter().map(|id| inode_of(cx.files.opened.get(*id).unwrap())).collect();
    drop(cx);
    wait_until_gone(&inodes);
    Ok(())
}

fn restore_nearly<'a>(opts: &'a Options, dir: &Path, ids: &[u32]) -> Result<Restore<'a>> {
    let root = std::fs::File::open("/").unwrap();
    let mut cx = Restore::bare(opts, ImageDir::open(dir).unwrap(), namespaces());
    cx.roots.by_ns = HashMap::from([(0, root.into())]);
    let entries = entries(dir);
    let mounts = entries.iter().filter_map(|e| e.usk.as_ref()).map(|u| (u.mnt_id(), 0));
    cx.roots.of_mount = mounts.collect();
    cx.inventory = torpor_policy::Inventory::read(&cx.images)?;
    cx.describe(torpor_policy::OpenFile::all(&entries)?)?;
    for id in ids.iter().chain(&cx.files.in_flight.clone()) {
        cx.table().file(*id)?;
    }
    cx.table().connect()?;
    cx.wake_network()?;
    Ok(cx)
}

/// Dumps files, closes them, restores them.
pub(crate) fn cycle(opts: &Options, files: Vec<OwnedFd>) -> Vec<OwnedFd> {
    let dir = tempfile::tempdir().unwrap();
    let ids = dump_and_close(opts, dir.path(), files).unwrap();
    restore(opts, dir.path(), &ids).unwrap()
}

/// Closes sockets, and waits until they are gone.
pub(crate) fn close(files: Vec<OwnedFd>) {
    let inodes: Vec<_> = files.iter().map(inode_of).collect();
    drop(files);
    wait_until_gone(&inodes);
}

fn inode_of(file: impl AsFd) -> u32 {
    u32::try_from(rustix::fs::fstat(file).unwrap().st_ino).unwrap()
}

/// Waits until closed sockets are gone: a child that another test starts at this moment has
/// them, too, until it executes its program.
fn wait_until_gone(inodes: &[u32]) {
    for _ in 0..6000 {
        let mut listed: Vec<u32> = diag::unix().unwrap().iter().map(|s| s.inode).collect();
        listed.extend(diag::netlink().unwrap().iter().map(|s| s.inode));
        listed.extend(diag::packet().unwrap().iter().map(|s| s.inode));
        for family in [libc::AF_INET, libc::AF_INET6] {
            for protocol in [libc::IPPROTO_TCP, libc::IPPROTO_UDP, libc::IPPROTO_RAW] {
                listed.extend(diag::inet(family, protocol).unwrap().iter().map(|s| s.inode));
            }
        }
        if !listed.iter().any(|i| inodes.contains(i)) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("closed sockets stay");
}

/// Reads exactly `len` bytes.
pub(crate) fn read(file: impl AsFd, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    let mut at = 0;
    while at < len {
        match rustix::io::read(&file, &mut data[at..]) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("read: {e}"),
        }
    }
    data.truncate(at);
    data
}
