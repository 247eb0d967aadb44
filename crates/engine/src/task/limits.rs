//! What a process may use, and how it stands in the kernel's accounts: resource
//! limits, OOM score, login uid.

use std::io;

use torpor_images::proto::{RlimitEntry, TaskRlimitsEntry};
use torpor_policy::{LIMITS, ResourceLimit};
use torpor_sys::process::limit_of;
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::script::{Script, write_own};
use crate::error::{Context, Error, Result};
use crate::{open_files, proc};

/// Where the limit of open files stands among the limits.
const FILES: usize = libc::RLIMIT_NOFILE as usize;

/// The questions to a process. `prlimit` from outside would need
/// `CAP_SYS_RESOURCE` over tasks of another user.
#[derive(Debug)]
pub(crate) struct Questions(Vec<(u32, Call, Slot)>);

/// The numbers of all limits.
pub(crate) fn all() -> impl Iterator<Item = u32> + Clone {
    (0..).take(LIMITS.len())
}

/// Asks for the limits with these numbers.
pub(crate) fn ask(batch: &mut Batch<'_>, which: impl Iterator<Item = u32>) -> Questions {
    let ask = |resource: u32| {
        let slot = batch.space(16);
        (resource, batch.call((libc::SYS_prlimit64, [0, resource.into(), 0, slot.addr.0])), slot)
    };
    Questions(which.map(ask).collect())
}

impl Questions {
    /// The limits.
    pub(crate) fn answer(self, out: &Outcome) -> Result<TaskRlimitsEntry> {
        let mut rlimits = Vec::new();
        for (resource, call, slot) in self.0 {
            out.expect(call, || format!("prlimit of {}", LIMITS[resource as usize]))?;
            rlimits.push(RlimitEntry { cur: out.u64_at(slot, 0), max: out.u64_at(slot, 8) });
        }
        Ok(TaskRlimitsEntry { rlimits })
    }
}

/// The limits that a husk has now, by the numbers `which`. From outside they are to be seen of a process of the
/// same user, or with `CAP_SYS_RESOURCE`; others tell it themselves.
fn of_husk(
    husk: &mut Tracee,
    which: impl Iterator<Item = u32> + Clone,
) -> Result<Vec<RlimitEntry>> {
    let pid = husk.pid();
    let seen =
        which.clone().map(|resource| limit_of(pid, resource)).collect::<io::Result<Vec<_>>>();
    if let Ok(seen) = seen {
        return Ok(seen.into_iter().map(|[cur, max]| RlimitEntry { cur, max }).collect());
    }
    let mut batch = husk.batch();
    let questions = ask(&mut batch, which);
    Ok(questions.answer(&batch.run()?)?.rlimits)
}

/// Sets the limits that are different now. What the images do not have is as the restoring program was given it.
///
/// # Errors
/// `EPERM` for a hard limit above the supervisor's, without `CAP_SYS_RESOURCE`.
pub(crate) fn restore(husk: &mut Tracee, wanted: &[ResourceLimit]) -> Result<()> {
    let files = open_files::given().map(|[soft, hard]| ResourceLimit { soft, hard });
    let files = files.filter(|_| wanted.len() <= FILES);
    if wanted.is_empty() && files.is_none() {
        return Ok(());
    }
    let now = of_husk(husk, all())?;
    let mut script = Script::new(husk);
    let wanted = wanted.iter().copied().enumerate().chain(files.map(|limit| (FILES, limit)));
    for (resource, ResourceLimit { soft, hard }) in wanted {
        let Some(old) = now.get(resource) else { continue };
        if (soft, hard) == (old.cur, old.max) {
            continue;
        }
        let name = LIMITS[resource];
        let what = match hard > old.max {
            true => format!("raising the hard limit of {name} from {} to {hard}", old.max),
            false => format!("setting {name} to {soft}, {hard}"),
        };
        let at = script.words(&[soft, hard]).0;
        script.step(what, (libc::SYS_prlimit64, [0, resource as u64, at, 0]));
    }
    script.run()?;
    Ok(())
}

/// The hard limits of this process as it was started, in the order of the kernel's numbers.
pub(crate) fn own_hard_limits() -> Result<Vec<u64>> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let mut limits = hard_limits(own)?;
    if let (Some(files), Some([_, given])) = (limits.get_mut(FILES), open_files::given()) {
        *files = given;
    }
    Ok(limits)
}

/// The hard limits of process `pid`, in the order of the kernel's numbers: proc(5) lists them
/// in that order.
pub(crate) fn hard_limits(pid: i32) -> Result<Vec<u64>> {
    let text = proc::read(pid, "limits")?;
    let hard = |line: &str| {
        // A name of 26 characters, then the soft limit.
        let word = line.get(26..)?.split_ascii_whitespace().nth(1)?;
        if word == "unlimited" { Some(u64::MAX) } else { word.parse().ok() }
    };
    Ok(text.lines().skip(1).map(|line| hard(line).unwrap_or(u64::MAX)).collect())
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

/// The user that the process logged in as, by the id that this program has for it; `u32::MAX` for
/// none.
pub(crate) fn loginuid(pid: i32) -> Result<Option<u32>> {
    number(pid, "loginuid")
}

/// Sets it, if it is different now. Only the process itself may do that, and it writes the id that the
/// user has in its own user namespace, `inside`. A user that has none there cannot be written: the login of
/// the restoring program stays.
///
/// # Errors
/// `EPERM` if it is set already.
pub(crate) fn restore_loginuid(husk: &mut Tracee, wanted: u32, inside: Option<u32>) -> Result<()> {
    if loginuid(husk.pid())?.is_none_or(|now| now == wanted) {
        return Ok(());
    }
    let Some(inside) = inside else {
        let pid = husk.pid();
        tracing::warn!(pid, "user {wanted} has logged in, who has no id in its user namespace");
        return Ok(());
    };
    write_own(husk, "self/loginuid", &inside.to_string())
}

/// A husk has the limits of the supervisor; the highest number must fit.
///
/// # Errors
/// If it does not fit the limit of this machine; if the husk has ended.
pub(crate) fn raise_files(husk: &mut Tracee, vpid: i32, highest: u32) -> Result<()> {
    let now = of_husk(husk, std::iter::once(libc::RLIMIT_NOFILE))?;
    let (soft, hard) = now.first().map_or((0, 0), |now| (now.cur, now.max));
    if u64::from(highest) < soft {
        return Ok(());
    }
    if u64::from(highest) >= hard {
        return Err(Error::invalid(
            "fdinfo",
            format!(
                "task {vpid} has fd {highest}, above this machine's limit of {hard} (ulimit -Hn)"
            ),
        ));
    }
    let mut batch = husk.batch();
    let new = batch.bytes([hard, hard].map(u64::to_ne_bytes).as_flattened());
    batch.must((libc::SYS_prlimit64, [0, FILES as u64, new.0, 0]));
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "raising the limit of descriptors".to_owned()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_policy::{IdExtent, NO_LOGIN, UserMaps};
    use torpor_tracee::Birth;

    use super::*;
    use crate::namespace::user::IdMaps;

    /// The images have the id of this host, and the task writes that of its user namespace.
    #[test]
    fn a_login_in_a_user_namespace_is_that_of_this_host() {
        let own = "/proc/thread-self/loginuid";
        if !std::path::Path::new(own).exists() {
            println!("left out: a_login_in_a_user_namespace (this kernel audits nothing)");
            return;
        }
        std::fs::write(own, NO_LOGIN.to_string()).unwrap();
        let map = |first, lower| IdExtent::new(first, lower, 1).unwrap();
        let maps = IdMaps::new(UserMaps {
            users: vec![map(0, 0), map(5, 4711), map(4712, 4713)],
            groups: vec![map(0, 0)],
        });
        let birth = Birth {
            flags: libc::CLONE_NEWUSER.cast_unsigned().into(),
            set_tid: &[],
            before: &|| Ok(()),
            prepare: &|pid| maps.apply(pid),
        };
        let (mut husk, _pidfd) = Tracee::bear(&birth).unwrap();
        let mut login = |id| {
            restore_loginuid(&mut husk, id, maps.uid_inside(id)).unwrap();
            loginuid(husk.pid()).unwrap()
        };
        // One whose number is an id of the namespace, and who has none there.
        assert_eq!(login(4712), Some(NO_LOGIN));
        assert_eq!(login(4711), Some(4711));
    }
}
