//! POSIX message queues that are open (mq_open(3)): through no mount of any namespace, but
//! by their name in an IPC namespace, where they are before any task is.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, OFlags};
use torpor_images::proto::{FdTypes, FileEntry, RegFileEntry};
use torpor_policy::PathFile;
use torpor_sys::mqueue;

use super::Found;
use super::description::same_inode;
use super::given_rights::GivenRights;
use crate::error::{Context, Error, Result};
use crate::namespace::mount::TreeMounts;
use crate::namespace::{Namespaces, run_in};

/// `MQUEUE_MAGIC` of linux/magic.h.
const MQUEUE: i64 = 0x1980_0202;

/// Describes the file of a task in IPC namespace `ns_id`, or says that it is of another kind (`None`).
///
/// # Errors
/// Refused, if the queue belongs to the host's IPC namespace or was removed; if the namespace
/// cannot be entered.
pub(crate) fn describe(
    spaces: &Namespaces,
    mounts: &TreeMounts,
    ns_id: u32,
    found: &Found,
) -> Result<Option<FileEntry>> {
    let regular = FileType::from_raw_mode(found.stat.st_mode) == FileType::RegularFile;
    let mounted = mounts.find(found.info.mnt_id).is_some();
    if found.fs_type != MQUEUE || !regular || mounted {
        return Ok(None);
    }
    let space = spaces.by_id(ns_id).filter(|ns| !ns.is_host).and_then(|ns| ns.file.as_ref());
    let Some(space) = space else {
        return Err(found.refuse(
            "it is a message queue in the IPC namespace of the host; run the tree in an \
             IPC namespace of its own",
        ));
    };
    let name = name(found.link_bytes()).unwrap_or_default();
    let now = run_in(&[space.as_fd()], || {
        let queue = mqueue::open(&name, libc::O_RDONLY | libc::O_NONBLOCK, 0, None);
        Ok(queue.ok().and_then(|queue| rustix::fs::fstat(queue).ok()))
    })?;
    if !now.is_some_and(|now| same_inode(&now, &found.stat)) {
        return Err(found.refuse("it is a message queue that was removed (mq_unlink)"));
    }
    let reg = RegFileEntry {
        id: found.id,
        flags: found.flags(),
        fown: found.fown,
        name: found.link_bytes().to_vec(),
        mode: Some(found.stat.st_mode),
        torpor_mqueue: Some(ns_id),
        ..RegFileEntry::default()
    };
    Ok(Some(FileEntry { reg: Some(reg), ..found.entry(FdTypes::Reg) }))
}

/// What the kernel knows a queue by.
fn name(path: &[u8]) -> Option<CString> {
    CString::new(path.strip_prefix(b"/")?).ok()
}

/// Opens the queue `file`, in the IPC namespace with number `ns_id`, with no more than these rights.
///
/// # Errors
/// If the name is none of a queue; if the namespace or the queue is not there; if the queue cannot
/// be opened, or the container's user may not open it.
pub(super) fn open(
    spaces: &Namespaces,
    rights: Option<&GivenRights>,
    file: &PathFile,
    ns_id: u32,
) -> Result<OwnedFd> {
    let what = || format!("message queue {}", file.text());
    let name = name(&file.path).ok_or_else(|| Error::invalid("files.img", what()))?;
    let flags = OFlags::from_bits_retain(file.flags) & (OFlags::RWMODE | OFlags::NONBLOCK);
    let space = spaces.open_file(ns_id)?;
    run_in(&[space.as_fd()], || {
        let limited = rights.map(|given| given.least().limit());
        let _limited = limited.transpose().context(what)?;
        mqueue::open(&name, flags.bits().cast_signed(), 0, None).context(what)
    })
}
