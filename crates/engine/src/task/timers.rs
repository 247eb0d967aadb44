//! Interval timers and POSIX timers of a process. Their times are relative: what
//! was left when the process was stopped is left when it goes on.

use torpor_images::proto::{ItimerEntry, PosixTimerEntry, TaskTimersEntry};
use torpor_policy::{PosixTimer, Timers, Times};
use torpor_sys::process::PR_TIMER_CREATE_RESTORE_IDS;
use torpor_tracee::syscall;
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::script::Script;
use crate::error::{Error, Result};

/// Kernels without [`PR_TIMER_CREATE_RESTORE_IDS`] number timers one after the other; more steps than this to
/// reach a number are not made.
const MAX_STEPS: u32 = 1 << 20;

/// The questions to a process.
#[derive(Debug)]
pub(crate) struct Questions {
    intervals: [(Call, Slot); 3],
    posix: Vec<(PosixTimerEntry, Call, Slot, Call)>,
}

/// Asks for the state of all timers.
///
/// # Errors
/// If the task is gone.
pub(crate) fn ask(batch: &mut Batch<'_>, posix: Vec<PosixTimerEntry>) -> Questions {
    let intervals = [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF].map(|which| {
        let slot = batch.space(32);
        let args = [u64::from(which.cast_unsigned()), slot.addr.0];
        (batch.call((libc::SYS_getitimer, args)), slot)
    });
    let posix = posix
        .into_iter()
        .map(|timer| {
            let slot = batch.space(32);
            let id = u64::from(timer.it_id);
            let time = batch.call((libc::SYS_timer_gettime, [id, slot.addr.0]));
            let overrun = batch.call((libc::SYS_timer_getoverrun, [id]));
            (timer, time, slot, overrun)
        })
        .collect();
    Questions { intervals, posix }
}

impl Questions {
    /// The timers.
    pub(crate) fn answer(self, out: &Outcome) -> Result<TaskTimersEntry> {
        let mut intervals = Vec::new();
        for (call, slot) in self.intervals {
            out.expect(call, || "getitimer".to_owned())?;
            intervals.push(ItimerEntry {
                isec: out.u64_at(slot, 0),
                iusec: out.u64_at(slot, 8),
                vsec: out.u64_at(slot, 16),
                vusec: out.u64_at(slot, 24),
            });
        }
        let mut posix = Vec::new();
        for (mut timer, time, slot, overrun) in self.posix {
            out.expect(time, || format!("timer_gettime of timer {}", timer.it_id))?;
            let overrun = out.expect(overrun, || format!("overrun of timer {}", timer.it_id))?;
            timer.isec = out.u64_at(slot, 0);
            timer.insec = out.u64_at(slot, 8);
            timer.vsec = out.u64_at(slot, 16);
            timer.vnsec = out.u64_at(slot, 24);
            timer.overrun = u32::try_from(overrun).unwrap_or(u32::MAX);
            posix.push(timer);
        }
        let mut intervals = intervals.into_iter();
        let mut next = || intervals.next().unwrap_or_default();
        Ok(TaskTimersEntry { real: next(), virt: next(), prof: next(), posix })
    }
}

/// The POSIX timers of a process without their times, in the order of their ids.
/// `own_tid` translates thread ids from the supervisor's pid namespace.
///
/// # Errors
/// If the task is gone.
pub(crate) fn list(
    pid: i32,
    text: &str,
    own_tid: &dyn Fn(i32) -> Option<i32>,
) -> Result<Vec<PosixTimerEntry>> {
    let mut all = parse(text, own_tid)
        .ok_or_else(|| Error::invalid(format!("/proc/{pid}/timers"), "unknown layout"))?;
    all.sort_by_key(|t| t.it_id);
    Ok(all)
}

/// Parses `/proc/PID/timers`: four lines for each timer.
fn parse(text: &str, own_tid: &dyn Fn(i32) -> Option<i32>) -> Option<Vec<PosixTimerEntry>> {
    let mut lines = text.lines();
    let mut all = Vec::new();
    while let Some(line) = lines.next() {
        let mut timer = PosixTimerEntry {
            it_id: line.strip_prefix("ID: ")?.parse().ok()?,
            ..Default::default()
        };
        let (signal, value) = lines.next()?.strip_prefix("signal: ")?.split_once('/')?;
        timer.si_signo = signal.parse::<i32>().ok()?.cast_unsigned();
        timer.sival_ptr = u64::from_str_radix(value, 16).ok()?;
        // "signal/pid.12": how, and whom: the process or (tid) one thread.
        let (how, whom) = lines.next()?.strip_prefix("notify: ")?.split_once('/')?;
        timer.it_sigev_notify = match how {
            "signal" => libc::SIGEV_SIGNAL,
            "none" => libc::SIGEV_NONE,
            "thread" => libc::SIGEV_THREAD,
            _ => return None,
        }
        .cast_unsigned();
        if let Some(tid) = whom.strip_prefix("tid.") {
            timer.it_sigev_notify |= libc::SIGEV_THREAD_ID.cast_unsigned();
            timer.notify_thread_id = Some(own_tid(tid.parse().ok()?)?);
        }
        let clock = lines.next()?.strip_prefix("ClockID: ")?;
        timer.clock_id = clock.parse::<i32>().ok()?.cast_unsigned();
        all.push(timer);
    }
    Some(all)
}

/// Makes the POSIX timers with their ids, not yet running. The kernel counts the signal that each may queue for the real user of
/// whoever makes it, and a husk is root still: they are made for `user`, by the id in the user namespace of the task.
///
/// # Errors
/// See timer_create(2), of which the user has a limit (`RLIMIT_SIGPENDING`); if an id is out of reach on this kernel.
pub(crate) fn create(husk: &mut Tracee, timers: &Timers, user: Option<u32>) -> Result<()> {
    if timers.posix.is_empty() {
        return Ok(());
    }
    let own = husk.call("getuid", (libc::SYS_getuid, []))?;
    let user = user.map(u64::from).filter(|&user| user != own);
    // The effective user, and with it all rights, stay.
    let real = |id: u64| (libc::SYS_setresuid, [id, u64::MAX, u64::MAX]);
    if let Some(user) = user {
        husk.call("setresuid", real(user))?;
    }
    create_all(husk, timers)?;
    if user.is_some() {
        husk.call("setresuid", real(own))?;
    }
    Ok(())
}

fn create_all(husk: &mut Tracee, timers: &Timers) -> Result<()> {
    if husk.call("prctl", syscall::prctl(PR_TIMER_CREATE_RESTORE_IDS, [1])).is_ok() {
        for chunk in timers.posix.chunks(1000) {
            let mut script = Script::new(husk);
            for timer in chunk {
                create_one(&mut script, timer, timer.id);
            }
            script.run()?;
        }
        husk.call("prctl", syscall::prctl(PR_TIMER_CREATE_RESTORE_IDS, [0]))?;
        return Ok(());
    }
    let mut next = 0;
    for timer in &timers.posix {
        next = create_by_steps(husk, timer, next)?;
    }
    Ok(())
}

/// Adds the call that makes a timer; where the kernel numbers timers itself,
/// `wanted` has no effect. Returns the place of its id.
fn create_one(script: &mut Script<'_>, timer: &PosixTimer, wanted: u32) -> Slot {
    let id = script.inout(&wanted.to_le_bytes());
    // struct sigevent: value, signal, notification, thread, and up to 64 bytes.
    let thread = timer.thread.unwrap_or_default().cast_unsigned();
    let event = script.words(&[
        timer.value,
        u64::from(timer.signal) | u64::from(timer.notify) << 32,
        u64::from(thread),
        0,
        0,
        0,
        0,
        0,
    ]);
    let what = format!("timer_create of timer {}", timer.id);
    script.step(what, (libc::SYS_timer_create, [u64::from(timer.clock), event.0, id.addr.0]));
    id
}

/// Makes a timer on a kernel that counts up: those on the way there are deleted.
/// Returns the number that follows.
fn create_by_steps(husk: &mut Tracee, timer: &PosixTimer, next: u32) -> Result<u32> {
    let unreachable =
        || Error::Unsupported(format!("timer id {} on a kernel before Linux 6.15", timer.id));
    let steps = timer.id.checked_sub(next).filter(|&s| s < MAX_STEPS).ok_or_else(unreachable)?;
    for start in (0..steps).step_by(250) {
        let mut script = Script::new(husk);
        for step in start..steps.min(start + 250) {
            create_one(&mut script, timer, next + step);
            let args = [u64::from(next + step)];
            script.step("timer_delete of a step", (libc::SYS_timer_delete, args));
        }
        script.run()?;
    }
    let mut script = Script::new(husk);
    let id = create_one(&mut script, timer, timer.id);
    let out = script.run()?;
    if out.u32_at(id, 0) == timer.id { Ok(timer.id + 1) } else { Err(unreachable()) }
}

/// Starts the interval timers; as late as possible.
pub(crate) fn arm_intervals(script: &mut Script<'_>, timers: &Timers) {
    let intervals = [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF];
    for (which, timer) in intervals.into_iter().zip(timers.intervals) {
        if timer != Times::default() {
            // One that has expired starts its next interval when its signal, which is
            // pending, is delivered, and has nothing left meanwhile: to set that would
            // disarm it. If it expires once more now, nothing is added to the signal.
            let Times { left, interval } = timer;
            let left = if left == (0, 0) { (0, 1) } else { left };
            let new = script.words(&[interval.0, interval.1, left.0, left.1]);
            let args = [u64::from(which.cast_unsigned()), new.0, 0];
            script.step("setitimer", (libc::SYS_setitimer, args));
        }
    }
}

/// Starts the POSIX timers; as late as possible.
///
/// # Errors
/// If the husk has ended; if it has no timer of that id, or a time is none (`EINVAL`).
pub(crate) fn arm(husk: &mut Tracee, timers: &Timers) -> Result<()> {
    for chunk in timers.posix.chunks(1000) {
        let mut script = Script::new(husk);
        for timer in chunk {
            let Times { left, interval } = timer.times;
            let new = script.words(&[interval.0, interval.1, left.0, left.1]);
            let what = format!("timer_settime of timer {}", timer.id);
            let args = [u64::from(timer.id), 0, new.0, 0];
            script.step(what, (libc::SYS_timer_settime, args));
        }
        script.run()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Tasks take none of what this host's root may have, and no more than their own user may.
    #[test]
    fn timers_count_for_the_user_of_their_process() {
        // One that nobody else is.
        let user = 3_000_000_000 - std::process::id();
        let timer = |id| PosixTimer {
            id,
            clock: 1,
            signal: 14,
            notify: 0,
            thread: None,
            value: 0,
            times: Times::default(),
        };
        let timers = Timers { posix: [1, 5, 7].map(timer).to_vec(), ..Timers::default() };
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        create(&mut husk, &timers, Some(user)).unwrap();
        let pid = husk.pid();
        let line = |key: &str| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            status.lines().find_map(|line| Some(line.strip_prefix(key)?.to_owned())).unwrap()
        };
        assert_eq!(line("Uid:"), "\t0\t0\t0\t0");
        let user = u64::from(user);
        husk.call("setresuid", (libc::SYS_setresuid, [user, u64::MAX, u64::MAX])).unwrap();
        assert!(line("SigQ:").starts_with("\t3/"), "{}", line("SigQ:"));
        husk.exit_with(0).unwrap();
    }

    #[test]
    fn the_kernels_list_is_understood() {
        let text = "ID: 3\nsignal: 34/00007ffd00000010\nnotify: signal/tid.77\nClockID: 1\n\
                    ID: 0\nsignal: 0/0000000000000000\nnotify: none/pid.70\nClockID: -6\n";
        let timers = parse(text, &|tid| Some(tid - 70)).unwrap();
        assert_eq!(timers.len(), 2);
        assert_eq!((timers[0].it_id, timers[0].si_signo, timers[0].clock_id), (3, 34, 1));
        assert_eq!(timers[0].sival_ptr, 0x7ffd_0000_0010);
        assert_eq!((timers[0].it_sigev_notify, timers[0].notify_thread_id), (4, Some(7)));
        assert_eq!((timers[1].it_sigev_notify, timers[1].clock_id.cast_signed()), (1, -6));
        assert!(parse("ID: x\n", &Some).is_none());
    }
}
