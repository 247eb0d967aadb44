//! Who is sent a signal when a file becomes ready: owner, signal and `O_ASYNC`
//! (fcntl(2), `F_SETOWN_EX`, `F_SETSIG`).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::fs::Uid;
use rustix::process::Pid;
use rustix::thread::set_thread_res_uid;
use torpor_images::proto::FownEntry;
use torpor_policy::{OpenFile, SignalOwner};
use torpor_sys::fcntl::Owner;
use torpor_tracee::syscall;

use super::description::duplicate;
use super::open::OpenFiles;
use crate::dump::pids::Pids;
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;
use crate::restore::tasks::{self, Task};

/// `F_OWNER_TID` and `F_OWNER_PGRP` of fcntl.h; between them, `F_OWNER_PID`.
const TID: u32 = 0;
const PGRP: u32 = 2;

/// The owner of a file, with its ids as the images know them.
pub(crate) fn of(pids: &Pids, id_maps: &IdMaps, file: impl AsFd) -> FownEntry {
    let Ok(owner) = torpor_sys::fcntl::owner(file) else { return FownEntry::default() };
    let mut fown = FownEntry { signum: owner.signal.cast_unsigned(), ..FownEntry::default() };
    let id = match owner.pid_type {
        PGRP => pids.group(owner.pid),
        _ => pids.thread(owner.pid),
    };
    // An owner outside of the tree, or one that has ended, gets no more signals.
    if let Some(id) = id.filter(|_| owner.pid != 0) {
        let inside = |uid| id_maps.uid_inside(uid).unwrap_or(uid);
        fown.pid_type = owner.pid_type;
        fown.pid = id.cast_unsigned();
        (fown.uid, fown.euid) = (inside(owner.uid), inside(owner.euid));
    }
    fown
}

/// Gives all files their owners. This comes when everything is connected, so that
/// what the restore itself does with the files sends no signal.
///
/// # Errors
/// If fcntl(2) refuses an owner or a signal, here or in the task.
pub(crate) fn restore(
    all: &HashMap<u32, OpenFile>,
    files: &OpenFiles,
    tasks: &mut [Task],
    id_maps: &IdMaps,
) -> Result<()> {
    let mut owned = Vec::new();
    for described in all.values() {
        let owner = described.owner(all).filter(|owner| !owner.is_none());
        if let Some((owner, file)) = owner.zip(files.get(described.id)) {
            owned.push((described.id, duplicate(file)?, owner));
        }
    }
    for (id, file, owner) in owned {
        give(tasks, id_maps, file.as_fd(), &owner).map_err(|error| match error {
            Error::Os { what, source } => Error::Os { what: format!("file {id}: {what}"), source },
            other => other,
        })?;
        if owner.is_async() {
            set_async(tasks, id, &file)?;
        }
    }
    Ok(())
}

/// Sets `O_ASYNC`. The signal tells the number under which that was done (`si_fd`), so
/// a task that has the file does it.
fn set_async(tasks: &mut [Task], id: u32, file: &OwnedFd) -> Result<()> {
    let flags = rustix::fs::fcntl_getfl(file).context(|| "F_GETFL".to_owned())?;
    let flags = flags | OFlags::from_bits_retain(libc::O_ASYNC.cast_unsigned());
    let holder = tasks.iter().enumerate().find_map(|(task, t)| {
        let fd = t.image.fds.iter().find(|fd| fd.file == id)?;
        Some((task, fd.fd))
    });
    let Some((task, fd)) = holder else {
        return rustix::fs::fcntl_setfl(file, flags).context(|| "F_SETFL O_ASYNC".to_owned());
    };
    let mut batch = tasks[task].remote()?.batch();
    let fcntl = syscall::fcntl(fd.into(), libc::F_SETFL, flags.bits().into());
    let set = batch.call(fcntl);
    batch.run()?.expect(set, || format!("F_SETFL O_ASYNC of fd {fd}"))?;
    Ok(())
}

fn give(
    tasks: &[Task],
    id_maps: &IdMaps,
    file: BorrowedFd<'_>,
    wanted: &SignalOwner,
) -> Result<()> {
    let [uid, euid] = wanted.users.map(|id| id_maps.uid_outside(id).unwrap_or(id));
    let owner = Owner {
        pid_type: wanted.kind,
        pid: real_id(tasks, wanted)?,
        signal: wanted.signal.cast_signed(),
        uid,
        euid,
    };
    as_user(&owner, || {
        torpor_sys::fcntl::set_owner(file, &owner).context(|| "F_SETOWN_EX".to_owned())
    })
}

/// The kernel notes the caller's users with the owner, so a thread becomes them.
fn as_user(owner: &Owner, work: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    if owner.pid == 0 || (owner.uid, owner.euid) == (0, 0) {
        return work();
    }
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (real, effective) = (Uid::from_raw(owner.uid), Uid::from_raw(owner.euid));
            set_thread_res_uid(real, effective, effective)
                .context(|| format!("setresuid to {} {}", owner.uid, owner.euid))?;
            work()
        });
        let panicked = || Error::Bug("a thread with other users panicked".to_owned());
        thread.join().unwrap_or_else(|_| Err(panicked()))
    })
}

/// The id here of the thread, process or group that the images name.
fn real_id(tasks: &[Task], owner: &SignalOwner) -> Result<i32> {
    if owner.id == 0 {
        return Ok(0);
    }
    let found = match owner.kind {
        TID => tasks.iter().find_map(|task| {
            let at = task.image.tree.threads.iter().position(|&tid| tid == owner.id)?;
            task.threads.get(at).map(|thread| thread.tid())
        }),
        PGRP => tasks.iter().find(|task| task.image.tree.pgid == owner.id).and_then(|task| {
            let group = rustix::process::getpgid(Pid::from_raw(task.pid)).ok()?;
            Some(group.as_raw_nonzero().get())
        }),
        _ => tasks::real_pid(tasks, owner.id.cast_signed()),
    };
    found.ok_or_else(|| {
        Error::invalid("files.img", format!("the owner {} of a file is no task", owner.id))
    })
}
