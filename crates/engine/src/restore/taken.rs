//! Numbers of processes that others have: who that is, and whether they are about to be given up.

use std::time::{Duration, Instant};

use torpor_tracee::{Birth, Tracee};

use crate::error::{Error, Result};
use crate::proc::{self, Stat};

/// Who waits for tasks that have lost their parents.
const INIT: i32 = 1;
/// For so long it may have something else to do.
const PATIENCE: Duration = Duration::from_secs(5);
/// Where all numbers are free.
const ELSEWHERE: &str = "a pid namespace (unshare --pid --fork --mount-proc)";
const PAUSE: Duration = Duration::from_millis(5);

/// Has the root husk born. The number of a task that a dump has just ended stays taken until its parent has
/// waited for it: if that is init, it will, and is given time.
///
/// Of a pid namespace that `is_given`, the processes of this one are not to be asked.
///
/// # Errors
/// Who has the number, if somebody keeps it; as [`Tracee::bear`].
pub(super) fn bear(birth: &Birth<'_>, vpid: i32, is_given: bool) -> Result<Tracee> {
    let mut deadline = None;
    loop {
        let source = match Tracee::bear(birth) {
            Ok((husk, _pidfd)) => return Ok(husk),
            Err(torpor_tracee::Error::Os { source, .. })
                if source.raw_os_error() == Some(libc::EEXIST) =>
            {
                source
            }
            Err(other) => return Err(other.into()),
        };
        let refusal = |what| Err(Error::Os { what, source });
        if is_given {
            return refusal(format!("pid {vpid} is in use in the given pid namespace"));
        }
        let deadline = *deadline.get_or_insert_with(|| {
            tracing::info!("pid {vpid} is in use");
            Instant::now() + PATIENCE
        });
        let holders = holders(vpid);
        if let Some(holder) = holders.iter().find(|holder| !holder.is_for_init()) {
            return refusal(holder.text(vpid));
        }
        while let Some(holder) = holders.iter().find(|holder| holder.is_there()) {
            if Instant::now() > deadline {
                return refusal(holder.text(vpid));
            }
            std::thread::sleep(PAUSE);
        }
        if Instant::now() > deadline {
            return refusal(format!("pid {vpid} is in use, time and again"));
        }
        // Nobody may be listed who has it: a thread, or one that was given up meanwhile.
        std::thread::sleep(PAUSE);
    }
}

/// A task that keeps a number from being given to another one.
struct PidHolder {
    pid: i32,
    stat: Stat,
}

/// Who has the number, be it as that of a task, a process group or a session. A thread is not listed.
fn holders(vpid: i32) -> Vec<PidHolder> {
    let listed = proc::processes().filter(|&pid| pid != vpid);
    let all = std::iter::once(vpid).chain(listed);
    let all = all.filter_map(|pid| Some(PidHolder { pid, stat: proc::stat(pid).ok()? }));
    all.filter(|PidHolder { pid, stat }| [*pid, stat.pgid, stat.sid].contains(&vpid)).collect()
}

impl PidHolder {
    /// Whether nothing is left of it but its exit status.
    fn has_ended(&self) -> bool {
        proc::is_over(self.pid, &self.stat)
    }

    /// Whether it has ended, and init is to wait for it.
    fn is_for_init(&self) -> bool {
        self.has_ended() && self.stat.ppid == INIT
    }

    /// Whether nobody has waited for it yet.
    fn is_there(&self) -> bool {
        proc::stat(self.pid).is_ok_and(|now| now.start_time == self.stat.start_time)
    }

    fn text(&self, vpid: i32) -> String {
        let PidHolder { pid, stat } = self;
        if *pid != vpid {
            let name = String::from_utf8_lossy(&stat.comm);
            format!(
                "pid {vpid} is in use: task {pid} ({name}) is in a session or process group of that number; end it, \
                 or restore in {ELSEWHERE}"
            )
        } else if self.has_ended() {
            format!(
                "pid {vpid} is in use: its task has ended, and its parent, {}, has not waited for it",
                stat.ppid
            )
        } else {
            format!("pid {vpid} is in use; end that task, or restore in {ELSEWHERE}")
        }
    }
}
