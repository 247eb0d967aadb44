//! How long a migration will take, from what was measured.

use std::time::Duration;

use serde_json::{Value, json};

use crate::mode::Mode;
use crate::report::millis;

/// What was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Measured {
    /// Bytes of memory that would be sent.
    pub memory: u64,
    /// Bytes of images other than pages.
    pub state: u64,
    /// Bytes of images that rounds have brought, of which the last one brings what was written since: as large a part
    /// as of memory.
    pub compared: u64,
    /// Bytes of files in memory that a restore takes out of an archive that was not packed.
    pub archived: u64,
    /// Bytes that the tasks write in a second.
    pub writes: f64,
    /// Bytes that go over the link in a second.
    pub link: f64,
    /// How long a dump stops the tasks, without their pages.
    pub freeze: Duration,
    /// The part of it in which files in memory are saved: pages go out meanwhile.
    pub saving: Duration,
    /// How long a restore takes, without their pages.
    pub restore: Duration,
    /// Bytes of memory that a restore brings into place in a second.
    pub fill: f64,
    /// Bytes of files that go along.
    pub files: u64,
    /// How long it takes to find out which of these have changed.
    pub scan: Duration,
    /// How long a round takes that brings nothing; not shorter than the tasks are stopped for it.
    pub each: Duration,
    /// The part of memory that the last rounds of earlier migrations have brought: how fast tasks write while half a second of
    /// nothing disturbs them says less.
    pub last: Option<f64>,
}

/// The parts of the time for which nothing runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Pause {
    /// Until the tasks are stopped and known, and the first page goes out.
    pub freeze: Duration,
    /// Until the last byte is there.
    pub transfer: Duration,
    /// Until the tasks run.
    pub restore: Duration,
}

impl Pause {
    /// All of it.
    #[must_use]
    pub(crate) fn total(&self) -> Duration {
        self.freeze + self.transfer + self.restore
    }

    /// For programs.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        json!({
            "downtime_ms": millis(self.total()),
            "freeze_ms": millis(self.freeze),
            "transfer_ms": millis(self.transfer),
            "restore_ms": millis(self.restore),
        })
    }
}

impl Measured {
    /// What is expected if the tasks are stopped when `left` bytes of memory are to be sent. What is
    /// not built before is built in the pause, all memory with it, and files in memory are made. Images that are compared are
    /// read for that.
    #[must_use]
    pub(crate) fn pause(&self, mode: Mode, left: f64) -> Pause {
        let (waits, each) = match mode.is_lazy() {
            true => (0.0, Duration::ZERO),
            false => (left, self.each.saturating_sub(self.freeze)),
        };
        // A tree that is built before gets what the last round brings.
        let filled = match (mode.is_lazy(), mode.builds_early()) {
            (true, _) => 0.0,
            (false, true) => left,
            (false, false) => float(self.memory),
        };
        let written = (left / float(self.memory).max(1.0)).min(1.0);
        let state = float(self.state) + float(self.compared) * written;
        let made = if mode.builds_early() { written } else { 1.0 };
        let filled = filled + float(self.archived) * made;
        let read = seconds(float(self.compared) / FILL);
        let [pages, state] = [waits, state].map(|bytes| seconds(bytes / self.link.max(1.0)));
        // Files are saved when pages go out already. Those that are fetched later do not.
        let beside = if mode.is_lazy() { Duration::ZERO } else { self.saving.min(self.freeze) };
        Pause {
            freeze: self.freeze - beside,
            transfer: (pages + each).max(beside) + state + read + self.scan,
            restore: self.restore + seconds(filled / self.fill.max(1.0)),
        }
    }

    /// How long pages are fetched after the pause.
    #[must_use]
    pub(crate) fn after(&self, mode: Mode, left: f64) -> Duration {
        if mode.is_lazy() { seconds(left / self.link.max(1.0)) } else { Duration::ZERO }
    }
}

/// Whether there is no further round of tasks that run: what they would wait for by now, `wait`, is short enough, or rounds do
/// not pay, since one has sent `bytes` and the one before hardly more.
#[must_use]
pub(crate) fn is_last(
    wait: Duration,
    max_downtime: Duration,
    bytes: f64,
    before: Option<f64>,
) -> bool {
    wait <= max_downtime || before.is_some_and(|before| bytes >= before * 0.9)
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Wish {
    /// How it is to be done.
    pub mode: Mode,
    /// Bytes a second while the tasks run, at most.
    pub bandwidth: Option<u64>,
    /// Rounds until the pause is expected to be this short.
    pub max_downtime: Duration,
    /// No more rounds than that.
    pub max_rounds: u32,
}

/// What is expected.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Forecast {
    /// Rounds, the last one of stopped tasks.
    pub rounds: u32,
    /// All of it.
    pub total: Duration,
    /// For how long nothing runs.
    pub pause: Pause,
}

impl Forecast {
    /// Goes through the rounds as a migration would. `within` tells how many bytes the tasks write
    /// in a time.
    #[must_use]
    pub(crate) fn new(of: &Measured, wish: Wish, within: impl Fn(Duration) -> f64) -> Self {
        let memory = float(of.memory);
        let slow = wish.bandwidth.map_or(of.link, |limit| of.link.min(float(limit)));
        let (mut rounds, mut left, mut before) = (0, memory, None);
        let mut total = seconds(float(of.files) / slow.max(1.0));
        if wish.mode.has_rounds() {
            while rounds < wish.max_rounds.max(1) {
                rounds += 1;
                let time = of.each.max(of.freeze) + of.scan + seconds(left / slow.max(1.0));
                total += time;
                let sent = std::mem::replace(&mut left, within(time).min(memory));
                let wait = of.pause(wish.mode, left).total() + of.after(wish.mode, left);
                if is_last(wait, wish.max_downtime, sent, before) {
                    break;
                }
                before = Some(sent);
            }
            left = of.last.map_or(left, |last| last * memory);
        }
        let pause = of.pause(wish.mode, left);
        total += pause.total() + of.after(wish.mode, left);
        Self { rounds: rounds + 1, total, pause }
    }

    /// For programs.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let mut all = self.pause.json();
        all["rounds"] = self.rounds.into();
        all["total_ms"] = millis(self.total).into();
        all
    }
}

/// Bytes that a restore brings into place in a second: 0.67 to 0.79 times what `cp` takes, of
/// about 1 GB/s (README.md).
pub(crate) const FILL: f64 = 1.3e9;

/// A time; one that is none is very long.
#[must_use]
pub(crate) fn seconds(time: f64) -> Duration {
    Duration::try_from_secs_f64(time).unwrap_or(Duration::MAX / 4)
}

/// Bytes, to reckon with.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "an estimate")]
pub(crate) fn float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Measured = Measured {
        memory: 1_000_000_000,
        state: 100_000,
        compared: 0,
        archived: 0,
        writes: 10e6,
        link: 100e6,
        freeze: Duration::from_millis(10),
        saving: Duration::ZERO,
        restore: Duration::from_millis(10),
        fill: FILL,
        files: 0,
        scan: Duration::ZERO,
        each: Duration::from_millis(10),
        last: None,
    };

    fn forecast(mode: Mode, writes: f64) -> Forecast {
        let wish =
            Wish { mode, bandwidth: None, max_downtime: Duration::from_millis(50), max_rounds: 10 };
        Forecast::new(&MEASURED, wish, |time| writes * time.as_secs_f64())
    }

    #[test]
    fn rounds_shrink_as_far_as_the_tasks_let_them() {
        let all = forecast(Mode::StopAndCopy, 0.0);
        assert_eq!((all.rounds, all.pause.transfer.as_secs()), (1, 10));
        let quiet = forecast(Mode::Pipelined, 10e6);
        assert!(quiet.pause.total() < Duration::from_millis(50), "{quiet:?}");
        assert!(quiet.rounds > 3 && quiet.total > Duration::from_secs(10), "{quiet:?}");
        // As fast as the link: rounds do not pay.
        let busy = forecast(Mode::Pipelined, 200e6);
        assert_eq!((busy.rounds, busy.pause.transfer.as_secs()), (3, 10));
        let later = forecast(Mode::PreCopy, 10e6);
        assert!(later.pause.restore > quiet.pause.restore * 10, "{later:?}");
        // What the last round brings has to get into its place.
        assert!(busy.pause.restore > quiet.pause.restore * 10, "{busy:?}");
        for lazy in [Mode::PostCopy, Mode::Hybrid] {
            let lazy = forecast(lazy, 200e6);
            assert!(lazy.pause.total() < Duration::from_millis(50), "{lazy:?}");
            assert!(lazy.total > Duration::from_secs(10), "{lazy:?}");
        }
    }

    #[test]
    fn rounds_end_for_one_of_two_reasons() {
        let ms = Duration::from_millis;
        assert!(is_last(ms(50), ms(50), 1e6, None), "short enough");
        assert!(!is_last(ms(51), ms(50), 1e6, None), "the first of all");
        assert!(!is_last(ms(51), ms(50), 0.89e6, Some(1e6)), "they pay");
        assert!(is_last(ms(51), ms(50), 0.9e6, Some(1e6)), "they do not");
    }

    /// What the last round of earlier migrations was is what it is expected to be.
    #[test]
    fn the_last_round_is_like_those_of_before() {
        let wish = Wish {
            mode: Mode::Pipelined,
            bandwidth: None,
            max_downtime: Duration::from_millis(50),
            max_rounds: 10,
        };
        let like = |last| Forecast::new(&Measured { last, ..MEASURED }, wish, |_| 900e6).pause;
        assert_eq!(like(None).transfer.as_millis(), 9001);
        assert_eq!(like(Some(0.01)).transfer.as_millis(), 101);
        let wish = Wish { mode: Mode::StopAndCopy, ..wish };
        let all = Forecast::new(&Measured { last: Some(0.01), ..MEASURED }, wish, |_| 0.0);
        assert_eq!(all.pause.transfer.as_secs(), 10, "there are no rounds");
    }

    /// Files in memory that rounds have brought cost what was written of them, and what it takes to look at all.
    #[test]
    fn files_in_memory_are_waited_for_as_far_as_they_differ() {
        let files = 500_000_000;
        let more = Measured { compared: files, archived: files, ..MEASURED };
        let waits = |mode, left| {
            let [with, without] = [&more, &MEASURED].map(|it| it.pause(mode, left));
            let waits = [with.transfer - without.transfer, with.restore - without.restore];
            waits.map(|it| it.as_secs_f64())
        };
        let look = float(files) / FILL;
        let is = |[transfer, restore]: [f64; 2], expected: [f64; 2]| {
            let off = (transfer - expected[0]).abs() + (restore - expected[1]).abs();
            assert!(off < 1e-6, "{transfer} {restore} {expected:?}");
        };
        is(waits(Mode::Pipelined, 0.0), [look, 0.0]);
        is(waits(Mode::Pipelined, 100e6), [look + 0.5, look / 10.0]);
        // All of them, once.
        is(waits(Mode::Pipelined, 2000e6), [look + 5.0, look]);
        // Where no tree is built before, all files are made in the pause.
        is(waits(Mode::PreCopy, 0.0), [look, look]);
    }

    /// Files in memory are saved while pages go out: whoever takes longer is waited for.
    #[test]
    fn pages_go_out_while_files_are_saved() {
        let freeze = Duration::from_millis(510);
        let of = |saving| Measured { freeze, saving, ..MEASURED };
        let [apart, beside] = [0, 500].map(|ms| of(Duration::from_millis(ms)));
        let waits = |it: &Measured, left| it.pause(Mode::Pipelined, left).total();
        let gained = |left| (waits(&apart, left) - waits(&beside, left)).as_millis();
        assert_eq!([0.0, 10e6, 200e6].map(gained), [0, 100, 500]);
        // As they are measured: until the first page goes out, and from then on.
        let parts = |mode| {
            let pause = beside.pause(mode, 10e6);
            [pause.freeze, pause.transfer].map(|part| part.as_millis())
        };
        assert_eq!((parts(Mode::Pipelined), parts(Mode::PostCopy)), ([10, 501], [510, 1]));
    }

    #[test]
    fn files_and_state_are_waited_for() {
        let wish = Wish {
            mode: Mode::StopAndCopy,
            bandwidth: Some(50_000_000),
            max_downtime: Duration::ZERO,
            max_rounds: 1,
        };
        let before = Forecast::new(&MEASURED, wish, |_| 0.0);
        let (files, scan) = (1_000_000_000, Duration::from_millis(300));
        let more = Measured { files, scan, state: MEASURED.state + 100_000_000, ..MEASURED };
        let after = Forecast::new(&more, wish, |_| 0.0);
        // State goes over the link in the pause; files go before, as fast as they may.
        let waits = after.pause.total() - before.pause.total();
        assert_eq!(waits.as_millis(), 1300, "{after:?}");
        assert_eq!((after.total - before.total).as_millis(), 21_300, "{after:?}");
    }
}
