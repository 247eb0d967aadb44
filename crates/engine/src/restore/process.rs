//! Processes that are there for a moment, for what can only be made by one with a certain pid, or
//! opened while it lives.

use std::os::fd::OwnedFd;

use torpor_tracee::Tracee;

use super::tasks::Task;
use crate::error::{Error, Result};
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind, send_into};
use crate::task::{onlookers, stand_in};

/// Works while there is a child of `root` with the pid `vpid`, or any free one.
///
/// # Errors
/// What `work` returns; if the pid is taken, or no process can be started.
pub(crate) fn with_process<T>(
    root: &mut Tracee,
    vpid: Option<i32>,
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    let mut process = start(root, vpid)?;
    let done = work(&mut process);
    end(root, process)?;
    done
}

/// What threads of a process share with each other.
pub(super) const SHARED: i32 = libc::CLONE_THREAD
    | libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_SYSVSEM;

/// Works while a process has one thread more.
///
/// # Errors
/// What `work` returns; if no thread can be started.
pub(crate) fn with_thread<T>(
    leader: &mut Tracee,
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    let mut thread = leader.spawn_child(u64::from(SHARED.cast_unsigned()), 0, &[])?;
    let done = work(&mut thread);
    thread.exit_thread()?;
    done
}

/// What it takes to give a thread the rights of a task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights<'c> {
    /// Ids of the tree's user namespace.
    pub maps: &'c IdMaps,
    /// The namespaces.
    pub spaces: &'c Namespaces,
    /// The security profile to use instead of that in the image.
    pub profile: Option<&'c str>,
}

/// Works while the husk of a task has one thread more, which has the rights that the task itself gets later.
///
/// # Errors
/// What `work` returns; if the image does not say what the task may do, or the kernel does not let the thread have that.
pub(crate) fn in_its_name<T>(
    task: &mut Task,
    rights: Rights<'_>,
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    let image = &task.image;
    let unknown = || Error::invalid("core", "a task that something is made for has no credentials");
    let credentials = image.rights().cloned().ok_or_else(unknown)?;
    let scheduling = image.scheduling.first().cloned().unwrap_or_default();
    let own = rights.spaces.ids_of(&image.homes);
    onlookers::while_hidden(task.remote()?, |husk| {
        with_thread(husk, |thread| {
            stand_in(thread, &scheduling, &credentials, (rights.maps, &own), rights.profile)?;
            work(thread)
        })
    })
}

/// Works while somebody lives in a pid namespace below that of `root`, with the rights of that.
///
/// # Errors
/// What `work` returns; if nobody can be born there.
pub(crate) fn live_in<T>(
    root: &mut Tracee,
    space: &OwnedFd,
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    with_process(root, None, |parent| {
        send_into(parent, NsKind::Pid, space)?;
        let mut inside = parent.spawn_child(0, 0, &[])?;
        let done = work(&mut inside);
        inside.exit_with(0)?;
        reap(parent)?;
        done
    })
}

/// Starts such a process.
///
/// # Errors
/// If the pid is taken, or no process can be started.
pub(crate) fn start(root: &mut Tracee, vpid: Option<i32>) -> Result<Tracee> {
    Ok(root.spawn_child(0, 0, vpid.as_slice())?)
}

/// Ends it.
///
/// # Errors
/// If the process does not end.
pub(crate) fn end(root: &mut Tracee, process: Tracee) -> Result<()> {
    process.exit_with(0)?;
    reap(root)
}

/// Reaps a child that was born without an exit signal, or it would stay as a zombie.
pub(crate) fn reap(parent: &mut Tracee) -> Result<()> {
    // __WCLONE: only such children, not the zombies that belong there.
    parent.call(
        "wait4",
        (libc::SYS_wait4, [u64::MAX, 0, u64::from(libc::__WCLONE.cast_unsigned()), 0]),
    )?;
    Ok(())
}
