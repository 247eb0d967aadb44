//! The event that says that events were lost, in a fanotify queue.
//!
//! Only the kernel adds `FAN_Q_OVERFLOW`, when a queue is full (fanotify(7)). So the queue is filled
//! with events on a file system that nobody else sees, until the kernel adds it, and these are
//! read again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use torpor_sys::notify::{FANOTIFY_EVENT, fanotify_add, fanotify_take};

use super::own_path;

/// More than an event on a file with the longest of handles takes, in bytes.
const LONGEST: usize = 4096;

/// Leaves one `FAN_Q_OVERFLOW` in the queue of a new descriptor, which has no marks yet.
///
/// # Errors
/// If there can be no tmpfs, or its files cannot be marked (fanotify_mark(2)).
pub(super) fn make(group: &OwnedFd) -> io::Result<()> {
    let limit = std::fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events")?;
    let limit: u64 = limit.trim().parse().map_err(io::Error::other)?;
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(fs.as_fd())?;
    let mount = fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    fanotify_add(group, libc::FAN_MARK_MOUNT, libc::FAN_OPEN, &own_path(&mount))?;
    let create = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    // Two on one file would be one event.
    for number in 0..=limit {
        let name = number.to_string();
        drop(rustix::fs::openat(&mount, &*name, create, Mode::RUSR)?);
        rustix::fs::unlinkat(&mount, &*name, AtFlags::empty())?;
    }
    let mut event = vec![0; FANOTIFY_EVENT];
    while rustix::io::ioctl_fionread(group)? > FANOTIFY_EVENT as u64 {
        match fanotify_take(group, &mut event) {
            Ok(file) => drop(file),
            // Events that name their file by a handle are longer, all of them alike.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && event.len() < LONGEST => {
                event.resize(event.len() + 4, 0);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
