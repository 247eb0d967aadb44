//! What is not kept, and can be done without as a rule: it is named in a warning, and refused if
//! everything is wanted (`--strict`).

use std::collections::HashSet;
use std::sync::LazyLock;

use torpor_sys::ptrace;
use torpor_tracee::{Call, Mapping, Slot, Tracee};

use super::{Dump, Task, sem_undo};
use crate::error::Result;
use crate::memory::vma::unknown_flags;
use crate::proc;
use crate::task::unkept::{AT_ONCE, Policies, Unkept};

/// Operations of keyctl(2).
const DESCRIBE: u64 = libc::KEYCTL_DESCRIBE as u64;
const READ: u64 = libc::KEYCTL_READ as u64;
/// How many keys of a keyring are looked at, and how much of a description.
const KEYS: usize = 64;
const TEXT: usize = 128;

/// What a thread has, if it leads its process with what that has.
#[derive(Debug)]
pub(super) struct Asking {
    /// The task, and the id of its thread.
    pub task: usize,
    pub tid: i32,
    pub of_thread: Vec<&'static str>,
    pub of_process: Option<Unkept>,
}

/// What processes and threads have asked the kernel for.
///
/// A task that asks for the keyring of its session, and has none, gets that of its user, which is
/// where its keys are searched for in any case.
pub(super) fn check(cx: &mut Dump<'_>) -> Result<()> {
    let mut sessions = HashSet::new();
    for Asking { task, tid, of_thread, of_process } in std::mem::take(&mut cx.found) {
        let leave_out = |object| cx.leave_out(tid, object, "is not kept");
        of_thread.into_iter().try_for_each(leave_out)?;
        if let Some(Unkept { session, objects, chosen }) = of_process {
            objects.into_iter().try_for_each(leave_out)?;
            check_policies(cx, task, chosen)?;
            check_session(cx, task, session.filter(|&ring| sessions.insert(ring)))?;
        }
    }
    cx.tasks.iter().try_for_each(|task| check_threads(cx, task))?;
    cx.tasks.iter().try_for_each(|task| check_mappings(cx, task))?;
    check_groups(cx)?;
    for pid in sem_undo::adjusting(&mut cx.tasks, cx.guardian.pid())? {
        let object = "what is undone to semaphores when it ends (SEM_UNDO)";
        cx.leave_out(pid, object, "is not kept")?;
    }
    Ok(())
}

/// Mappings that take their pages from chosen nodes of memory (mbind(2)): so many of the first ones
/// are known to.
fn check_policies(cx: &mut Dump<'_>, task: usize, mut chosen: usize) -> Result<()> {
    let others = cx.tasks[task].maps.iter().skip(AT_ONCE).cloned().collect::<Vec<_>>();
    for maps in others.chunks(AT_ONCE) {
        let mut batch = cx.tasks.remote(task)?.batch();
        let policies = Policies::ask(&mut batch, maps);
        chosen += policies.chosen(&batch.run()?);
    }
    if chosen == 0 {
        return Ok(());
    }
    let reason = format!("is not kept for {chosen} of them");
    cx.leave_out(cx.tasks[task].pid, "the NUMA policy of its mappings (mbind)", &reason)
}

/// What the session of a task has: its keyring, if nobody has looked at that, and a nice value.
fn check_session(cx: &mut Dump<'_>, task: usize, keyring: Option<u64>) -> Result<()> {
    if let Some(ring) = keyring {
        check_keyring(cx, task, ring)?;
    }
    let pid = cx.tasks[task].pid;
    let leads = cx.tasks[task].stat.sid == pid;
    if leads && proc::read(pid, "autogroup").is_ok_and(|text| !text.trim().ends_with(" 0")) {
        cx.leave_out(pid, "the nice value of its session (autogroup)", "is not kept")?;
    }
    Ok(())
}

/// Whether the user namespace of the tree has given up setgroups(2), as `unshare --map-root-user`
/// has it do: whoever has a group less there cannot become a member again.
fn check_groups(cx: &Dump<'_>) -> Result<()> {
    let pid = cx.tasks[0].pid;
    if cx.id_maps.known().is_some()
        && proc::read(pid, "setgroups").is_ok_and(|text| text.trim() == "deny")
    {
        let object = "that its user namespace denies setgroups(2)";
        cx.leave_out(pid, object, "is not kept")?;
    }
    Ok(())
}

/// What a tracer sees of each thread.
fn check_threads(cx: &Dump<'_>, task: &Task) -> Result<()> {
    for tid in task.threads.iter().map(Tracee::tid) {
        let lost = [
            (
                ptrace::has_dispatch(tid),
                "its system calls that come back (PR_SET_SYSCALL_USER_DISPATCH)",
            ),
            (ptrace::has_ports(tid), "its ports of devices (ioperm)"),
            (
                torpor_sys::sched::core_cookie(tid) != 0,
                "with whom it shares a core (PR_SCHED_CORE)",
            ),
            (
                is_in_resctrl_group(&resctrl_groups(task.pid, tid)),
                "its group of cache and memory bandwidth (resctrl)",
            ),
        ];
        let mut lost = lost.into_iter().filter(|(is, _)| *is);
        lost.try_for_each(|(_, object)| cx.leave_out(tid, object, "is not kept"))?;
    }
    Ok(())
}

/// What the kernel says of mappings and nobody here knows.
fn check_mappings(cx: &Dump<'_>, task: &Task) -> Result<()> {
    for (vma, code) in task.vmas.iter().flat_map(|vma| unknown_flags(vma).map(move |c| (vma, c))) {
        let (Mapping { start, end, .. }, code) = (&vma.map, String::from_utf8_lossy(&code));
        let object = format!("what `{code}` means in the VmFlags of mapping {start:x}-{end:x}");
        cx.leave_out(task.pid, &object, "is not known, so it is not kept")?;
    }
    Ok(())
}

/// What the kernel says of the groups of a thread in resctrl; nothing in most kernels.
fn resctrl_groups(pid: i32, tid: i32) -> String {
    static IS_THERE: LazyLock<bool> =
        LazyLock::new(|| std::path::Path::new("/proc/self/cpu_resctrl_groups").exists());
    if !*IS_THERE {
        return String::new();
    }
    proc::read(pid, &format!("task/{tid}/cpu_resctrl_groups")).unwrap_or_default()
}

/// Whether that is another group than the first one, which all have that are in no other: of what is allotted
/// (`res:/` then), or of what is counted (`mon:`).
fn is_in_resctrl_group(groups: &str) -> bool {
    let mut names = groups.lines().filter_map(|line| line.split_once(':'));
    names.any(|(_, name)| !["", "/"].contains(&name.trim()))
}

/// The keys in the keyring of a session that a task is in.
fn check_keyring(cx: &mut Dump<'_>, task: usize, ring: u64) -> Result<()> {
    let leader = cx.tasks.remote(task)?;
    let mut batch = leader.batch();
    let ids = batch.space(KEYS * 4);
    let read = batch.call((libc::SYS_keyctl, [READ, ring, ids.addr.0, (KEYS * 4) as u64]));
    let out = batch.run()?;
    let len = out.result(read).unwrap_or(0);
    let count = usize::try_from(len / 4).unwrap_or(0).min(KEYS);
    let keys = (0..count).map(|n| u64::from(out.u32_at(ids, n * 4)));
    let mut batch = leader.batch();
    let asked: Vec<_> = std::iter::once(ring)
        .chain(keys)
        .map(|key| {
            let text = batch.space(TEXT);
            let args = [DESCRIBE, key, text.addr.0, TEXT as u64];
            (batch.call((libc::SYS_keyctl, args)), text)
        })
        .collect();
    let out = batch.run()?;
    // Type, owner, rights, and last the name.
    let name = |&(call, text): &(Call, Slot)| {
        out.result(call).ok()?;
        let text = out.bytes(text).split(|&byte| byte == 0).next()?;
        String::from_utf8_lossy(text).splitn(5, ';').last().map(str::to_owned)
    };
    let names: Vec<String> = asked.iter().map(|key| name(key).unwrap_or_default()).collect();
    // Everybody has the user's keyrings, by name.
    let own = names.iter().skip(1).filter(|name| !name.starts_with("_uid")).count();
    if own == 0 || names.first().is_some_and(|ring| ring.starts_with("_uid_ses.")) {
        return Ok(());
    }
    let object = format!("the keyring of its session ({})", names[0]);
    cx.leave_out(cx.tasks[task].pid, &object, &format!("is not kept, with its keys ({own})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_resctrl_are_told_from_the_first() {
        let is_in_none = ["", "res:\nmon:\n", "res:/\nmon:\n"];
        assert!(is_in_none.into_iter().all(|groups| !is_in_resctrl_group(groups)));
        let is_in_one = ["res:/\nmon:mon0\n", "res:group0\nmon:\n", "res:group0\nmon:mon1\n"];
        assert!(is_in_one.into_iter().all(is_in_resctrl_group));
    }
}
