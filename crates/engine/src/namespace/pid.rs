//! Pid namespaces. What they hold is the tree; only one that is left to the caller
//! (`--external pid[INODE]:NAME`) has an image.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_images::kind;
use torpor_images::proto::PidnsEntry;

use super::NsKind;
use super::space::inherited;
use crate::dump::Dump;
use crate::error::Result;
use crate::external::External;
use crate::restore::Restore;

/// Writes `pidns-ID.img` if the namespace is external.
///
/// # Errors
/// The image file's.
pub fn dump(cx: &mut Dump<'_>, ns_id: u32) -> Result<()> {
    let inode = cx.ns.by_id(ns_id).map_or(0, |ns| ns.inode);
    let name = cx.opts.external.iter().find_map(|external| match external {
        External::Pid { inode: i, name } if *i == inode => Some(name.clone()),
        _ => None,
    });
    let Some(name) = name else { return Ok(()) };
    let entry = PidnsEntry { ext_key: Some(name) };
    Ok(cx.images.write_one(kind::PIDNS, ns_id.into(), &entry)?)
}

/// The caller's namespace to restore into, if the tree's was external.
///
/// # Errors
/// Damaged images; a namespace that was not handed over.
pub fn external(cx: &Restore<'_>) -> Result<Option<OwnedFd>> {
    let Some(ns) = cx.ns.of_kind(NsKind::Pid).find(|ns| !ns.is_host) else { return Ok(None) };
    let entry: Option<PidnsEntry> = cx.images.read_opt(kind::PIDNS, ns.id.into())?;
    match entry.and_then(|e| e.ext_key) {
        Some(key) => inherited(cx, &key).map(Some),
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
