//! Descriptors of namespaces: `/proc/PID/ns/KIND`, kept open.

use std::os::fd::OwnedFd;

use torpor_images::proto::{FdTypes, FileEntry, NsFileEntry};
use torpor_policy::NamespaceFile;

use super::Found;
use crate::error::{Error, Result};
use crate::namespace::Namespaces;
use crate::proc;

/// The file system of namespaces.
const NSFS: i64 = libc::NSFS_MAGIC;

/// Describes the file, or says that it is of another kind (`None`).
///
/// # Errors
/// Refused, if no task of the tree lives in the namespace.
pub(crate) fn describe(spaces: &Namespaces, found: &Found) -> Result<Option<FileEntry>> {
    if found.fs_type != NSFS || found.is_path_only() {
        return Ok(None);
    }
    let ns = spaces.by_inode(found.stat.st_ino).ok_or_else(|| {
        found.refuse("no task of the tree lives in this namespace, so it is not saved")
    })?;
    let nsf = NsFileEntry {
        id: found.id,
        ns_id: ns.id,
        ns_cflag: u32::try_from(ns.kind.clone_flag()).unwrap_or(0),
        flags: found.flags(),
    };
    Ok(Some(FileEntry { nsf: Some(nsf), ..found.entry(FdTypes::Ns) }))
}

/// Opens a description.
///
/// # Errors
/// If it is a namespace that the images do not have; if its task has ended.
pub(crate) fn open(spaces: &Namespaces, file: &NamespaceFile) -> Result<OwnedFd> {
    let ns = spaces.by_id(file.namespace).ok_or_else(|| unknown(*file))?;
    Ok(proc::open(ns.pid, &format!("ns/{}", ns.kind.name()))?.into())
}

fn unknown(NamespaceFile { file, namespace }: NamespaceFile) -> Error {
    let reason = format!("file {file} is namespace {namespace}, which no task has");
    Error::invalid("files.img", reason)
}
