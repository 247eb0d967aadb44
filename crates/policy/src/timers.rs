//! Timers of processes, with a descriptor or without: read of their entries once, judged, and made.
//! Their times are relative: what was left when the process was stopped.

use torpor_images::proto::{FileEntry, ItimerEntry, PosixTimerEntry, TaskCoreEntry};

/// `CLOCK_REALTIME_ALARM` and `CLOCK_BOOTTIME_ALARM` (linux/time.h).
const ALARMS: [u32; 2] = [8, 9];

/// The timers of a process that have no descriptor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timers {
    /// `ITIMER_REAL`, `ITIMER_VIRTUAL`, `ITIMER_PROF` (setitimer(2)), in microseconds.
    pub intervals: [Times; 3],
    /// Those of timer_create(2), in nanoseconds.
    pub posix: Vec<PosixTimer>,
}

/// When a timer fires: seconds, and parts of a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// What is left.
    pub left: (u64, u64),
    /// How long it takes from then on, each time.
    pub interval: (u64, u64),
}

/// A timer of timer_create(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixTimer {
    /// Its number in the process.
    pub id: u32,
    /// `CLOCK_*` (linux/time.h), or the clock of a task.
    pub clock: u32,
    /// The signal that it sends.
    pub signal: u32,
    /// `SIGEV_*` (sigevent(3type)).
    pub notify: u32,
    /// The thread that is told.
    pub thread: Option<i32>,
    /// What it is told.
    pub value: u64,
    /// When it fires.
    pub times: Times,
}

/// A timer with a descriptor (timerfd_create(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timerfd {
    /// Its number in the images.
    pub id: u32,
    /// `CLOCK_*` (linux/time.h).
    pub clock: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// The flags of timerfd_settime(2).
    pub settime_flags: u32,
    /// How often it has fired, and nobody has read it.
    pub ticks: u64,
    /// When it fires, in nanoseconds.
    pub times: Times,
}

impl Timers {
    /// Those of a process; `None` of an image without them.
    #[must_use]
    pub fn of(process: &TaskCoreEntry) -> Option<Self> {
        let timers = process.timers.as_ref()?;
        let interval = |timer: &ItimerEntry| Times {
            left: (timer.vsec, timer.vusec),
            interval: (timer.isec, timer.iusec),
        };
        let posix = |timer: &PosixTimerEntry| PosixTimer {
            id: timer.it_id,
            clock: timer.clock_id,
            signal: timer.si_signo,
            notify: timer.it_sigev_notify,
            thread: timer.notify_thread_id,
            value: timer.sival_ptr,
            times: Times { left: (timer.vsec, timer.vnsec), interval: (timer.isec, timer.insec) },
        };
        Some(Timers {
            intervals: [&timers.real, &timers.virt, &timers.prof].map(interval),
            posix: timers.posix.iter().map(posix).collect(),
        })
    }

    /// Whether one of them wakes the host from its sleep.
    #[must_use]
    pub(crate) fn wake_the_host(&self) -> bool {
        self.posix.iter().any(|timer| ALARMS.contains(&timer.clock))
    }
}

impl Timerfd {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let timer = entry.tfd.as_ref()?;
        Some(Timerfd {
            id: timer.id,
            clock: timer.clockid,
            flags: timer.flags,
            settime_flags: timer.settime_flags,
            ticks: timer.ticks,
            times: Times { left: (timer.vsec, timer.vnsec), interval: (timer.isec, timer.insec) },
        })
    }

    /// Whether it wakes the host from its sleep.
    #[must_use]
    pub(crate) fn wakes_the_host(&self) -> bool {
        ALARMS.contains(&self.clock)
    }
}
