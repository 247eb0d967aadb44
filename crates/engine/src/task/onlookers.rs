//! Who may look into a husk, and so may write into its memory and open what it sees.
//!
//! The kernel lets two kinds of processes do that: those with all the same user and group ids, and those with
//! `CAP_SYS_PTRACE` in its user namespace. To the latter belongs, with capabilities or without, the user who has made
//! that namespace, or one above it. Of a process that is not dumpable (`PR_SET_DUMPABLE`) only those remain
//! with `CAP_SYS_PTRACE` in the user namespace in which its program was executed: for a husk that of this program, or
//! the new one of the root task, which nobody that there is has made ([`crate::namespace`], `user::Maker`).
//!
//! A husk has more than its task at first: the mounts of this host, keys, no filter of system calls, and
//! threads with the rights of this program. So it is hidden
//!
//! - before it enters a user namespace, whoever it is: a task's husk, the root husk that enters a given one
//!   (`--join-ns`), a process that makes or opens something in there for the moment (`namespace::send_into`, and the dump's
//!   `mount::collect`);
//! - before it bears somebody in a new user namespace below that of the root task, who is hidden by that as well
//!   (`namespace::nested_user`);
//! - before one of its threads gets the rights of the task, or works in its name ([`while_hidden`]).
//!
//! It stays so until all of its threads are tasks: the task's own flag comes last (`process::dumpable`). Copies of this
//! program that enter a namespace (`namespace::ask`, `user::with_resident`) hide themselves.
//!
//! What is hidden has two traps. Its files in `/proc` belong to user 0 of the user namespace in which its program was
//! executed, so whoever is to write some has to stay that user. And it cannot be entered by a pidfd (setns(2)) from a
//! user namespace below: the kernel asks whether the one who enters may look into it. A descriptor of the namespace has
//! no such question, and so is lent to whoever enters. Two are shown for a while, both for lack of another way: who stands
//! for a task that has ended, whose directory in `/proc` a husk of the same user is to be in, and who lives in a new
//! user namespace whose maps would not be written otherwise (`nested_user`: `follow`, `write_maps`). Where this program may not look into what is hidden either,
//! nothing is: it has no rights that a task lacks then.

use std::sync::LazyLock;

use torpor_tracee::{Tracee, syscall};

use super::script::Script;
use crate::error::Result;
use crate::proc;

/// What `PR_GET_DUMPABLE` says of a process that others may look into. There are two other values: 0, and one (2) that
/// only the kernel sets (`fs.suid_dumpable`).
const SHOWN: u64 = 1;

/// Keeps others out of a process. False if that would keep this program out as well, and nothing changes.
pub(crate) fn hide(script: &mut Script<'_>) -> bool {
    /// `CAP_SYS_PTRACE`.
    const SYS_PTRACE: u32 = 19;
    static MAY_TRACE_ALL: LazyLock<bool> = LazyLock::new(|| {
        let own = std::process::id().cast_signed();
        let permitted = proc::status(own).ok().and_then(|status| status.number("CapPrm", 16));
        permitted.is_some_and(|set| set >> SYS_PTRACE & 1 == 1)
    });
    if *MAY_TRACE_ALL {
        script.prctl("PR_SET_DUMPABLE", libc::PR_SET_DUMPABLE, 0);
    }
    *MAY_TRACE_ALL
}

/// Lets others look into a process: who changes its ids is hidden by that.
pub(crate) fn show(script: &mut Script<'_>) {
    script.prctl("PR_SET_DUMPABLE", libc::PR_SET_DUMPABLE, SHOWN);
}

/// Hides a husk if that can be, or shows it: so that it is the one or the other whatever its ids were.
///
/// # Errors
/// If the husk is gone.
pub(crate) fn hide_or_show(husk: &mut Tracee) -> Result<()> {
    let mut script = Script::new(husk);
    if !hide(&mut script) {
        show(&mut script);
    }
    script.run().map(drop)
}

/// Works while nobody may look into a husk.
///
/// # Errors
/// What `work` returns: it stays hidden then. If the husk is gone.
pub(crate) fn while_hidden<T>(
    husk: &mut Tracee,
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    let before = husk.call("PR_GET_DUMPABLE", syscall::prctl(libc::PR_GET_DUMPABLE, []))?;
    let mut script = Script::new(husk);
    hide(&mut script);
    script.run()?;
    let done = work(husk)?;
    if before == SHOWN {
        let mut script = Script::new(husk);
        show(&mut script);
        script.run()?;
    }
    Ok(done)
}
