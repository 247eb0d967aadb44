//! Namespaces for tests, which go with the file that refers to them.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::{Namespace, Namespaces, NsKind};

/// A new namespace of `kind`.
pub(crate) fn fresh(kind: NsKind) -> OwnedFd {
    let make = move || {
        torpor_sys::ns::unshare_namespaces(i32::try_from(kind.clone_flag()).unwrap()).unwrap();
        OwnedFd::from(File::open(format!("/proc/thread-self/ns/{}", kind.name())).unwrap())
    };
    std::thread::spawn(make).join().unwrap()
}

/// The model of a tree that lives in these namespaces of `kind`, numbered from 1.
pub(crate) fn tree(kind: NsKind, files: Vec<OwnedFd>) -> Namespaces {
    let namespace = |(i, file): (usize, OwnedFd)| Namespace {
        kind,
        id: u32::try_from(i).unwrap() + 1,
        inode: rustix::fs::fstat(&file).unwrap().st_ino,
        is_host: false,
        file: Some(file),
        task: 0,
        pid: 0,
    };
    Namespaces {
        all: files.into_iter().enumerate().map(namespace).collect(),
        ..Namespaces::default()
    }
}
