//! Descriptors of namespaces: `/proc/PID/ns/KIND`, kept open.

use std::os::fd::OwnedFd;

use torpor_images::proto::{FdTypes, FileEntry, NsFileEntry};

use super::description::part;
use super::{Dumper, Found, Restorer};
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::proc;
use crate::restore::Restore;

/// `NSFS_MAGIC` of linux/magic.h.
const NSFS: i64 = 0x6e73_6673;

/// The dump half.
#[derive(Debug, Default)]
pub struct NsFileDumper;

impl Dumper for NsFileDumper {
    fn describe(&mut self, cx: &mut Dump<'_>, found: &Found) -> Result<Option<FileEntry>> {
        if found.fs_type != NSFS || found.is_path_only() {
            return Ok(None);
        }
        let ns = cx.ns.by_inode(found.stat.st_ino).ok_or_else(|| {
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
}

/// The restore half. The tasks live in their namespaces by then.
#[derive(Debug, Default)]
pub struct NsFileRestorer;

impl Restorer for NsFileRestorer {
    fn load(&mut self, cx: &mut Restore<'_>, entries: &[FileEntry]) -> Result<()> {
        for entry in entries {
            let nsf = part(entry.id, entry.nsf.as_ref(), "namespace")?;
            if cx.ns.by_id(nsf.ns_id).is_none() {
                return Err(unknown(nsf));
            }
        }
        Ok(())
    }

    fn open(&mut self, cx: &mut Restore<'_>, entry: &FileEntry) -> Result<OwnedFd> {
        let nsf = part(entry.id, entry.nsf.as_ref(), "namespace")?;
        let ns = cx.ns.by_id(nsf.ns_id).ok_or_else(|| unknown(nsf))?;
        let member = cx.tasks.get(ns.task).ok_or_else(|| unknown(nsf))?;
        Ok(proc::open(member.pid, &format!("ns/{}", ns.kind.name()))?.into())
    }
}

fn unknown(nsf: &NsFileEntry) -> Error {
    let reason = format!("file {} is namespace {}, which no task has", nsf.id, nsf.ns_id);
    Error::invalid("files.img", reason)
}
