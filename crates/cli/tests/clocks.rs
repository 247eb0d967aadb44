//! What images say of timers and of the clock that they go by belongs together.

#![allow(clippy::unwrap_used)]

mod sleeper;

use std::time::Duration;

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use sleeper::Sleeper;
use torpor_images::proto::{CoreEntry, FileEntry, TimensEntry};
use torpor_images::{ImageDir, kind};

/// Sets an interval timer, which goes on when it becomes another program.
const SETS_TIMER: &str = "use Time::HiRes; Time::HiRes::setitimer(0, 5000); exec 'sleep', 1000";

fn now() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().unwrap()
}

/// A timer fires at a time of its clock that is known. By the clock in the images it must not be
/// earlier: its owner would see it fire before its time, and one with an interval too often.
#[test]
fn no_timer_is_early_by_the_clock_of_the_images() {
    let end = now() + Duration::from_secs(5000);
    let file = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
    let spec = Itimerspec {
        it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: end.try_into().unwrap(),
    };
    timerfd_settime(&file, TimerfdTimerFlags::ABSTIME, &spec).unwrap();
    // The timer of the task is set after this, so it ends after `end` as well.
    let task = Sleeper::start_with(&["perl", "-e", SETS_TIMER], file.into());
    task.put_to_sleep(&[]);

    let images = ImageDir::open(task.dir.path()).unwrap();
    let clocks: TimensEntry = images.read_one(kind::TIMENS, 0).unwrap();
    let time = |sec: u64, nanos: u64| Duration::new(sec, u32::try_from(nanos).unwrap());
    let clock = time(clocks.monotonic.tv_sec, clocks.monotonic.tv_nsec);
    let files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let of_file = files.iter().find_map(|file| file.tfd.as_ref()).unwrap();
    let of_file = time(of_file.vsec, of_file.vnsec);
    let core: CoreEntry = images.read_one(kind::CORE, u64::from(task.pid.unsigned_abs())).unwrap();
    let of_task = core.tc.unwrap().timers.unwrap().real;
    let of_task = time(of_task.vsec, of_task.vusec * 1000);
    for (name, left) in [("the file", of_file), ("the task", of_task)] {
        assert!(!left.is_zero(), "{name} has a timer");
        let early = end.checked_sub(clock + left).unwrap_or_default();
        assert!(early.is_zero(), "the timer of {name} is {early:?} early");
    }
}
