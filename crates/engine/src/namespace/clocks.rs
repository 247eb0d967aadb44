//! What the two clocks of a time namespace show, and how far they are ahead of the host's.

use std::{fmt, io};

use rustix::time::{ClockId, clock_gettime};
use torpor_images::proto::{TimensEntry, Timespec};
use torpor_policy::ClockTimes;

use crate::error::{Context, Error, Result};
use crate::proc;

const NANOS: i128 = 1_000_000_000;

/// What a clock shows, in nanoseconds.
type Nanos = i128;

/// The two clocks of a time namespace, or how far they are ahead of the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clocks {
    monotonic: Nanos,
    boottime: Nanos,
}

impl Clocks {
    /// What this thread's clocks show.
    pub(super) fn now() -> Self {
        let read = |id| {
            let time = clock_gettime(id);
            i128::from(time.tv_sec) * NANOS + i128::from(time.tv_nsec)
        };
        Clocks { monotonic: read(ClockId::Monotonic), boottime: read(ClockId::Boottime) }
    }

    /// The offsets in `/proc/PID/timens_offsets`, which are those of the namespace that
    /// the children of the task live in.
    pub(super) fn offsets(pid: i32) -> Result<Self> {
        let text = proc::read(pid, "timens_offsets")?;
        parse(&text)
            .ok_or_else(|| Error::invalid(format!("/proc/{pid}/timens_offsets"), "unknown layout"))
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Clocks {
            monotonic: self.monotonic + other.monotonic,
            boottime: self.boottime + other.boottime,
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Clocks {
            monotonic: self.monotonic - other.monotonic,
            boottime: self.boottime - other.boottime,
        }
    }

    pub(super) fn to_entry(self) -> TimensEntry {
        let spec = |time: Nanos| Timespec {
            tv_sec: u64::try_from(time.div_euclid(NANOS)).unwrap_or_default(),
            tv_nsec: u64::try_from(time.rem_euclid(NANOS)).unwrap_or_default(),
        };
        TimensEntry {
            monotonic: spec(self.monotonic),
            boottime: spec(self.boottime),
            torpor_maker: None,
        }
    }

    fn of(times: &ClockTimes) -> Self {
        let nanos = |(sec, nsec): (u64, u64)| i128::from(sec) * NANOS + i128::from(nsec);
        Clocks { monotonic: nanos(times.monotonic), boottime: nanos(times.boottime) }
    }

    /// As `/proc/PID/timens_offsets` takes it.
    fn to_text(self) -> String {
        let line = |name: &str, time: Nanos| {
            format!("{name} {} {}\n", time.div_euclid(NANOS), time.rem_euclid(NANOS))
        };
        line("monotonic", self.monotonic) + &line("boottime", self.boottime)
    }
}

/// Lines of a clock's name, seconds and nanoseconds.
fn parse(text: &str) -> Option<Clocks> {
    let mut clocks = Clocks { monotonic: 0, boottime: 0 };
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let clock = match words.next()? {
            "monotonic" => &mut clocks.monotonic,
            "boottime" => &mut clocks.boottime,
            _ => return None,
        };
        let (sec, nsec): (i64, i64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        *clock = i128::from(sec) * NANOS + i128::from(nsec);
    }
    Some(clocks)
}

pub(super) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// How far the clocks of a new time namespace are to be ahead of the first one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offsets(Clocks);

impl Offsets {
    /// For clocks that go on from what an image says; from here to the end of the restore they run.
    ///
    /// # Errors
    /// If this process cannot read its own offsets.
    pub(crate) fn of(times: &ClockTimes) -> Result<Self> {
        let here = Clocks::offsets(own_pid())?;
        Ok(Offsets(Clocks::of(times).minus(Clocks::now()).plus(here)))
    }

    /// Makes the children of the calling thread live in a new time namespace with these.
    ///
    /// # Errors
    /// `ERANGE` for times that the kernel cannot show.
    pub(crate) fn apply(&self) -> io::Result<()> {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        torpor_sys::ns::unshare_time()?;
        self.set(tid).map_err(|e| io::Error::other(e.to_string()))
    }

    /// Sets those of the time namespace that the children of task `pid` will live in, and nobody
    /// lives in yet.
    ///
    /// # Errors
    /// As [`Offsets::apply`].
    pub(crate) fn set(&self, pid: i32) -> Result<()> {
        let path = format!("/proc/{pid}/timens_offsets");
        std::fs::write(&path, self.0.to_text()).context(|| format!("write {path}"))
    }

    /// Those of the time namespace that children of task `pid` are born into.
    ///
    /// # Errors
    /// If the task has ended.
    pub(crate) fn for_children(pid: i32) -> Result<Self> {
        Clocks::offsets(pid).map(Offsets)
    }
}

/// As the kernel writes them, in one line.
impl fmt::Display for Offsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_text().trim_end().replace('\n', ", "))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn offsets_are_read_and_written() {
        let text = "monotonic           -2   500000000\nboottime      86400         0\n";
        let clocks = parse(text).unwrap();
        assert_eq!(clocks.monotonic, -1_500_000_000);
        assert_eq!(parse(&clocks.to_text()), Some(clocks));
        assert_eq!(clocks.to_text().lines().next(), Some("monotonic -2 500000000"));
        let now = Clocks::now();
        assert_eq!(Clocks::of(&ClockTimes::of(0, &now.to_entry())), now);
        assert!(parse("realtime 1 2\n").is_none());
    }

    #[test]
    fn children_find_the_clocks_that_are_wanted() {
        let wanted = Clocks { monotonic: 5_000_000 * NANOS, boottime: 7_000_000 * NANOS };
        let seen = std::thread::spawn(move || {
            Offsets::of(&ClockTimes::of(0, &wanted.to_entry())).unwrap().apply().unwrap();
            let script =
                "import time; print(int(time.clock_gettime(1)), int(time.clock_gettime(7)))";
            std::process::Command::new("python3").args(["-c", script]).output().unwrap()
        });
        let seen = String::from_utf8(seen.join().unwrap().stdout).unwrap();
        let clocks: Vec<i64> = seen.split_whitespace().map(|w| w.parse().unwrap()).collect();
        assert!((5_000_000..5_001_000).contains(&clocks[0]), "{seen}");
        assert!((7_000_000..7_001_000).contains(&clocks[1]), "{seen}");
    }
}
