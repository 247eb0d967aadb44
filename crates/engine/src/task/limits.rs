//! What a process may use, and how it stands in the kernel's accounts: resource
//! limits, OOM score, login uid.

use torpor_images::proto::{RlimitEntry, TaskRlimitsEntry};
use torpor_policy::LIMITS;
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::script::{Script, write_own};
use crate::error::{Context, Error, Result};
use crate::proc;

/// The questions to a process. `prlimit` from outside would need
/// `CAP_SYS_RESOURCE` over tasks of another user.
#[derive(Debug)]
pub(crate) struct Questions(Vec<(Call, Slot)>);

/// Asks for all limits.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    Questions(
        (0..LIMITS.len() as u64)
            .map(|resource| {
                let slot = batch.space(16);
                (batch.call((libc::SYS_prlimit64, [0, resource, 0, slot.addr.0])), slot)
            })
            .collect(),
    )
}

impl Questions {
    /// The limits.
    pub(crate) fn answer(self, out: &Outcome) -> Result<TaskRlimitsEntry> {
        let mut rlimits = Vec::new();
        for ((call, slot), name) in self.0.into_iter().zip(LIMITS) {
            out.expect(call, || format!("prlimit of {name}"))?;
            rlimits.push(RlimitEntry { cur: out.u64_at(slot, 0), max: out.u64_at(slot, 8) });
        }
        Ok(TaskRlimitsEntry { rlimits })
    }
}

/// Sets the limits that are different now.
///
/// # Errors
/// `EPERM` for a hard limit above the supervisor's, without `CAP_SYS_RESOURCE`.
pub(crate) fn restore(husk: &mut Tracee, wanted: &TaskRlimitsEntry) -> Result<()> {
    if wanted.rlimits.len() > LIMITS.len() {
        return Err(Error::invalid("core", format!("{} limits", wanted.rlimits.len())));
    }
    let mut batch = husk.batch();
    let questions = ask(&mut batch);
    let now = questions.answer(&batch.run()?)?;
    let mut script = Script::new(husk);
    for (resource, (new, old)) in wanted.rlimits.iter().zip(&now.rlimits).enumerate() {
        if new == old {
            continue;
        }
        let name = LIMITS[resource];
        let what = match new.max > old.max {
            true => format!("raising the hard limit of {name} from {} to {}", old.max, new.max),
            false => format!("setting {name} to {}, {}", new.cur, new.max),
        };
        let at = script.words(&[new.cur, new.max]).0;
        script.step(what, (libc::SYS_prlimit64, [0, resource as u64, at, 0]));
    }
    script.run()?;
    Ok(())
}

/// The number in `/proc/PID/NAME`, `None` if this kernel has no such file.
fn number<T: std::str::FromStr>(pid: i32, name: &str) -> Result<Option<T>> {
    match proc::read(pid, name).map_err(Error::from) {
        Ok(text) => text
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| Error::invalid(format!("/proc/{pid}/{name}"), text)),
        Err(Error::Os { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// How willingly the kernel kills the process when memory is short.
pub(crate) fn oom_score_adj(pid: i32) -> Result<Option<i32>> {
    number(pid, "oom_score_adj")
}

/// Sets it, if it is different now.
///
/// # Errors
/// `EACCES` for a lower value without `CAP_SYS_RESOURCE`.
pub(crate) fn restore_oom_score_adj(pid: i32, wanted: i32) -> Result<()> {
    if oom_score_adj(pid)? == Some(wanted) {
        return Ok(());
    }
    std::fs::write(format!("/proc/{pid}/oom_score_adj"), wanted.to_string())
        .context(|| format!("task {pid}: setting oom_score_adj to {wanted}"))
}

/// The user that the process logged in as, `u32::MAX` for none.
pub(crate) fn loginuid(pid: i32) -> Result<Option<u32>> {
    number(pid, "loginuid")
}

/// Sets it, if it is different now. Only the process itself may do that, so `/proc`
/// must be mounted where the husk lives.
///
/// # Errors
/// `EPERM` if it is set already.
pub(crate) fn restore_loginuid(husk: &mut Tracee, wanted: u32) -> Result<()> {
    if loginuid(husk.pid())?.is_none_or(|now| now == wanted) {
        return Ok(());
    }
    write_own(husk, "/proc/self/loginuid", &wanted.to_string())
}
