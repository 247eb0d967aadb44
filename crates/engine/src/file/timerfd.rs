//! Timerfds: clock, remaining time, interval, and expirations not yet read.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use torpor_images::proto::{FdTypes, FileEntry, TimerfdEntry};
use torpor_policy::Timerfd;

use super::description::set_status_flags;
use super::found::own_pid;
use super::open::OpenFiles;
use super::{FdInfo, Found};
use crate::error::{Context, Error, Result};
use crate::proc;

const NANOS: u64 = 1_000_000_000;

/// Describes the file, or says that it is of another kind (`None`).
///
/// # Errors
/// Refused, if the kernel describes it in a way that is not known.
pub(crate) fn describe(found: &Found) -> Result<Option<FileEntry>> {
    if !found.is_anon("[timerfd]") {
        return Ok(None);
    }
    // A periodic timer that has fired stands still, and shows no time left, until it is
    // read or looked at: this counts what it has missed and sets it going, as its
    // reader would.
    rustix::time::timerfd_gettime(&found.file).context(|| "timerfd_gettime".to_owned())?;
    let path = format!("fdinfo/{}", found.file.as_raw_fd());
    let info = FdInfo::parse(&proc::read(own_pid(), &path)?);
    let tfd =
        parse(found, &info).ok_or_else(|| found.refuse("its fdinfo has an unknown layout"))?;
    Ok(Some(FileEntry { tfd: Some(tfd), ..found.entry(FdTypes::Timerfd) }))
}

fn parse(found: &Found, info: &FdInfo) -> Option<TimerfdEntry> {
    let text = |key| info.values(key).next();
    let (vsec, vnsec) = time(text("it_value")?)?;
    let (isec, insec) = time(text("it_interval")?)?;
    Some(TimerfdEntry {
        id: found.id,
        flags: found.flags(),
        fown: found.fown,
        clockid: text("clockid")?.parse().ok()?,
        ticks: text("ticks")?.parse().ok()?,
        settime_flags: u32::from_str_radix(text("settime flags")?, 8).ok()?,
        vsec,
        vnsec,
        isec,
        insec,
    })
}

/// `(seconds, nanoseconds)`.
fn time(text: &str) -> Option<(u64, u64)> {
    let (sec, nsec) = text.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    Some((sec.trim().parse().ok()?, nsec.trim().parse().ok()?))
}

/// The restore half. Timers are armed late, so that little of their time is lost.
#[derive(Debug, Default)]
pub(crate) struct TimerfdRestorer {
    made: Vec<Timerfd>,
    /// From now on they are armed at once: those in flight in sockets are opened late.
    late: bool,
}

impl TimerfdRestorer {
    /// Reads and checks the images of this kind, before anything is made.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(&self, timers: &[&Timerfd]) -> Result<()> {
        for timer in timers {
            spec(timer)?;
            clock(timer)?;
        }
        Ok(())
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If it is of an unknown clock; if the kernel refuses to make or arm one.
    pub(crate) fn open(&mut self, timer: &Timerfd) -> Result<OwnedFd> {
        let file = rustix::time::timerfd_create(clock(timer)?, TimerfdFlags::CLOEXEC)
            .context(|| format!("timerfd_create of clock {}", timer.clock))?;
        set_status_flags(&file, timer.flags)?;
        if self.late {
            arm(&file, timer)?;
        } else {
            self.made.push(*timer);
        }
        Ok(file)
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// If the kernel refuses to arm a timer: its times in the images are none that it can have.
    pub(crate) fn connect(&mut self, files: &OpenFiles) -> Result<()> {
        self.late = true;
        for timer in self.made.drain(..) {
            let Some(file) = files.get(timer.id) else { continue };
            arm(file, &timer)?;
        }
        Ok(())
    }
}

fn arm(file: impl AsFd, timer: &Timerfd) -> Result<()> {
    let flags = TimerfdTimerFlags::from_bits_retain(timer.settime_flags);
    let mut spec = spec(timer)?;
    let stopped = spec.it_value.tv_sec == 0 && spec.it_value.tv_nsec == 0;
    if stopped && timer.ticks > 0 {
        // It has fired: one with an interval goes on.
        spec.it_value = spec.it_interval;
    }
    let armed = spec.it_value.tv_sec != 0 || spec.it_value.tv_nsec != 0;
    if armed && flags.contains(TimerfdTimerFlags::ABSTIME) {
        // The image has what was left. The clock is the timer's, so that it still
        // follows the clock when that is set.
        let now = rustix::time::clock_gettime(match clock(timer)? {
            TimerfdClockId::Realtime | TimerfdClockId::RealtimeAlarm => {
                rustix::time::ClockId::Realtime
            }
            TimerfdClockId::Boottime | TimerfdClockId::BoottimeAlarm => {
                rustix::time::ClockId::Boottime
            }
            _ => rustix::time::ClockId::Monotonic,
        });
        spec.it_value = add(now, spec.it_value);
    }
    rustix::time::timerfd_settime(&file, flags, &spec)
        .context(|| format!("timerfd_settime of file {}", timer.id))?;
    if timer.ticks > 0 {
        torpor_sys::event::timerfd_set_ticks(&file, timer.ticks)
            .context(|| format!("TFD_IOC_SET_TICKS of file {}", timer.id))?;
    }
    Ok(())
}

fn add(a: Timespec, b: Timespec) -> Timespec {
    let nanos = a.tv_nsec + b.tv_nsec;
    let billion = NANOS.cast_signed();
    Timespec {
        tv_sec: a.tv_sec.saturating_add(b.tv_sec).saturating_add(nanos / billion),
        tv_nsec: nanos % billion,
    }
}

fn clock(timer: &Timerfd) -> Result<TimerfdClockId> {
    let known = [
        (libc::CLOCK_REALTIME, TimerfdClockId::Realtime),
        (libc::CLOCK_MONOTONIC, TimerfdClockId::Monotonic),
        (libc::CLOCK_BOOTTIME, TimerfdClockId::Boottime),
        (libc::CLOCK_REALTIME_ALARM, TimerfdClockId::RealtimeAlarm),
        (libc::CLOCK_BOOTTIME_ALARM, TimerfdClockId::BoottimeAlarm),
    ];
    let found = known.iter().find(|(number, _)| number.cast_unsigned() == timer.clock);
    found.map(|&(_, clock)| clock).ok_or_else(|| invalid(timer, "an unknown clock"))
}

fn spec(timer: &Timerfd) -> Result<Itimerspec> {
    let time = |(sec, nsec): (u64, u64)| match (i64::try_from(sec), i64::try_from(nsec)) {
        (Ok(tv_sec), Ok(tv_nsec)) if nsec < NANOS => Ok(Timespec { tv_sec, tv_nsec }),
        _ => Err(invalid(timer, "a time that is none")),
    };
    Ok(Itimerspec { it_value: time(timer.times.left)?, it_interval: time(timer.times.interval)? })
}

fn invalid(timer: &Timerfd, what: &str) -> Error {
    Error::invalid("files.img", format!("timerfd {} has {what}", timer.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::testing::{World, fdinfo};

    fn hour(flags: TimerfdTimerFlags, clock: TimerfdClockId, id: rustix::time::ClockId) -> OwnedFd {
        let file = rustix::time::timerfd_create(clock, TimerfdFlags::NONBLOCK).unwrap();
        let mut spec = Itimerspec {
            it_value: Timespec { tv_sec: 3600, tv_nsec: 0 },
            it_interval: Timespec { tv_sec: 7, tv_nsec: 9 },
        };
        if flags.contains(TimerfdTimerFlags::ABSTIME) {
            spec.it_value = add(rustix::time::clock_gettime(id), spec.it_value);
        }
        rustix::time::timerfd_settime(&file, flags, &spec).unwrap();
        file
    }

    #[test]
    fn armed_timers_go_on() {
        let abs = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        let files = vec![
            hour(abs, TimerfdClockId::Realtime, rustix::time::ClockId::Realtime),
            hour(
                TimerfdTimerFlags::empty(),
                TimerfdClockId::Boottime,
                rustix::time::ClockId::Boottime,
            ),
        ];
        let without_value = |file: &OwnedFd| -> Vec<String> {
            fdinfo(file).into_iter().filter(|l| !l.starts_with("it_value")).collect()
        };
        let before: Vec<_> = files.iter().map(without_value).collect();
        let files = World::new().round_trip(files);
        assert_eq!(files.iter().map(without_value).collect::<Vec<_>>(), before);
        for file in &files {
            let left = rustix::time::timerfd_gettime(file).unwrap().it_value.tv_sec;
            assert!((1..=3600).contains(&left), "{left}");
        }
    }

    #[test]
    fn expirations_that_were_not_read_are_there() {
        let file = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty());
        let file = file.unwrap();
        let soon = Timespec { tv_sec: 0, tv_nsec: 1 };
        let spec = Itimerspec { it_value: soon, it_interval: Timespec::default() };
        rustix::time::timerfd_settime(&file, TimerfdTimerFlags::empty(), &spec).unwrap();
        while !fdinfo(&file).contains(&"ticks: 1".to_owned()) {
            std::thread::yield_now();
        }
        let files = World::new().round_trip(vec![file]);
        let mut value = [0; 8];
        rustix::io::read(&files[0], &mut value).unwrap();
        assert_eq!(u64::from_ne_bytes(value), 1);
    }
}
