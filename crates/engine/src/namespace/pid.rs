//! Pid namespaces. What they hold is the tree; only one that is left to the caller
//! (`--external pid[INODE]:NAME`) has an image.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_images::proto::PidnsEntry;
use torpor_images::{ImageDir, kind};

use super::{Namespace, Namespaces, NsKind, external};
use crate::error::Result;
use crate::external::External;
use crate::options::Options;

/// Writes `pidns-ID.img` if the namespace is external.
///
/// # Errors
/// The image file's.
pub fn dump(opts: &Options, images: &ImageDir, ns: &Namespace) -> Result<()> {
    let inode = ns.inode;
    let name = opts.external.iter().find_map(|external| match external {
        External::Pid { inode: i, name } if *i == inode => Some(name.clone()),
        _ => None,
    });
    let Some(name) = name else { return Ok(()) };
    let entry = PidnsEntry { ext_key: Some(name) };
    Ok(images.write_one(kind::PIDNS, ns.id.into(), &entry)?)
}

/// The caller's namespace to restore into, if the tree's was external.
///
/// # Errors
/// Damaged images; a namespace that was not handed over.
pub fn external(opts: &Options, images: &ImageDir, spaces: &Namespaces) -> Result<Option<OwnedFd>> {
    let Some(ns) = spaces.of_kind(NsKind::Pid).find(|ns| !ns.is_host) else { return Ok(None) };
    let entry: Option<PidnsEntry> = images.read_opt(kind::PIDNS, ns.id.into())?;
    match entry.and_then(|e| e.ext_key) {
        Some(key) => external::inherited(opts, &key).map(Some),
        None => Ok(None),
    }
}

/// Makes the children of the calling thread live in `file`.
///
/// # Errors
/// See setns(2).
pub fn enter(file: &OwnedFd) -> io::Result<()> {
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::ProcessID))?)
}
