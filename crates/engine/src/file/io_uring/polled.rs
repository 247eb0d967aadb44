//! Instances whose requests a thread of the kernel fetches (`IORING_SETUP_SQPOLL`).
//!
//! That thread belongs to the process, and works in the name of whoever made the instance: with
//! those credentials, in those namespaces and control groups. It is kept where it may do what its
//! task may. The restore has another thread make the instance, which is there for a moment and has
//! the rights that the task itself gets later.

use torpor_sys::sched::affinity;
use torpor_tracee::Tracee;

use super::refusal::{refuse, refuse_use};
use crate::cgroup;
use crate::error::{Context, Result};
use crate::file::{FdInfo, Found};
use crate::proc;
use crate::task::processors;

/// What to do instead.
const INSTEAD: &str = "let the program submit its requests itself";

/// The thread that fetches the requests of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestThread {
    /// Its number in the first pid namespace of this host.
    pub number: i32,
    /// The processor that it is bound to.
    pub processor: Option<u32>,
}

/// The number of the thread that fetches the requests of an instance.
pub(super) fn number(info: &FdInfo) -> Option<i32> {
    let shown = info.values("SqThread").next()?.parse().ok();
    // There is none, or it has ended.
    shown.filter(|&number| number >= 0)
}

/// The thread that fetches the requests of an instance, if it has one. `task` is a thread of the task,
/// and `others` are the processes that have the instance open as well.
///
/// # Errors
/// Refused, if it may do other things than the task, or is that of another one; if the task is gone.
pub(super) fn describe(
    task: &Tracee,
    found: &Found,
    info: &FdInfo,
    others: &[i32],
) -> Result<Option<RequestThread>> {
    let Some(number) = number(info) else { return Ok(None) };
    let mut all = fetchers(found.pid)?;
    // If this program is in a pid namespace, it knows the thread by another number.
    if all.contains(&number) {
        all = vec![number];
    } else if others.iter().any(|&other| fetchers(other).is_ok_and(|all| !all.is_empty())) {
        let reason = "the thread that fetches its requests (IORING_SETUP_SQPOLL) may be that of any of \
                      the processes that have it open, which is not supported";
        return Err(refuse_use(found, reason, INSTEAD));
    }
    let mut bound = Vec::new();
    for tid in all {
        if let Some(what) = difference(found.pid, task.tid(), tid)? {
            let reason = format!(
                "the thread that fetches its requests (IORING_SETUP_SQPOLL) has other {what} than the \
                 task, which is not supported"
            );
            let instead = format!("{INSTEAD}, or make the instance when it is what it stays");
            return Err(refuse_use(found, &reason, &instead));
        }
        bound.push(bound_to(tid)?);
    }
    bound.dedup();
    match bound[..] {
        [processor] => Ok(Some(RequestThread { number, processor })),
        _ => Err(refuse(
            found,
            "which thread of its task fetches its requests is not to be seen in this pid namespace, and \
             they are bound to several processors; dump it from the host's",
        )),
    }
}

/// The threads of the kernel that fetch requests for a process.
///
/// # Errors
/// If the process is gone.
pub(crate) fn fetchers(pid: i32) -> Result<Vec<i32>> {
    let fetches = |tid: &i32| {
        proc::thread_stat(pid, *tid)
            .is_ok_and(|stat| stat.is_worker() && stat.comm.starts_with(b"iou-sqp-"))
    };
    Ok(proc::numbers(pid, "task")?.into_iter().filter(fetches).collect())
}

/// What a thread of a process has otherwise than another one, of what counts for a request.
fn difference(pid: i32, task: i32, other: i32) -> Result<Option<&'static str>> {
    const RIGHTS: [&str; 8] =
        ["Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
    const SPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "time", "user", "uts"];
    let (own, others) = (proc::thread_status(pid, task)?, proc::thread_status(pid, other)?);
    // A security module need not work.
    let text = |tid: i32, name: &str| proc::read(pid, &format!("task/{tid}/{name}")).ok();
    let differ = |name: &str| text(task, name) != text(other, name);
    if RIGHTS.iter().any(|key| own.get(key) != others.get(key)) || differ("attr/current") {
        return Ok(Some("credentials"));
    }
    let space =
        |tid: i32, name: &str| std::fs::read_link(format!("/proc/{pid}/task/{tid}/ns/{name}"));
    if SPACES.iter().any(|name| space(task, name).ok() != space(other, name).ok()) {
        return Ok(Some("namespaces"));
    }
    Ok(differ("cgroup").then_some("control groups"))
}

/// The processor that a thread is bound to: the kernel lets others run on all that their cpuset gives.
fn bound_to(tid: i32) -> Result<Option<u32>> {
    let set = affinity(tid).context(|| format!("task {tid}: sched_getaffinity"))?;
    let is_bound = set.iter().map(|byte| byte.count_ones()).sum::<u32>() == 1 && processors() > 1;
    if !is_bound || cgroup::mirrors_cpuset(tid, &set)? {
        return Ok(None);
    }
    let byte = (0..).zip(&set).find(|(_, byte)| **byte != 0);
    Ok(byte.map(|(place, byte): (u32, _)| place * 8 + byte.trailing_zeros()))
}
