//! What a migration took.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::forecast::{Measured, Pause};
use crate::mode::Mode;
use crate::probe::Service;

/// A round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Round {
    /// When it began.
    pub start: Instant,
    /// Pages that were sent.
    pub pages: u64,
    /// Bytes that went over the link.
    pub bytes: u64,
    /// From its start to when everything was there.
    pub time: Duration,
    /// For how much of it `--bandwidth` held it back.
    pub held: Duration,
    /// For how long the tasks were stopped.
    pub frozen: Duration,
}

impl Round {
    /// How long it would have taken without a limit.
    #[must_use]
    pub(crate) fn unlimited(&self) -> Duration {
        self.time.saturating_sub(self.held)
    }

    /// For people.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let seconds = self.time.as_secs_f64().max(1e-6);
        format!(
            "{} pages, {:.1} MB in {seconds:.2} s ({:.0} MB/s), stopped for {:.1} ms",
            self.pages,
            megabytes(self.bytes),
            megabytes(self.bytes) / seconds,
            millis(self.frozen),
        )
    }

    fn json(&self) -> Value {
        json!({
            "pages": self.pages,
            "bytes": self.bytes,
            "ms": millis(self.time),
            "frozen_ms": millis(self.frozen),
        })
    }
}

/// The parts of the pause.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Downtime {
    /// When the tasks were stopped.
    pub start: Option<Instant>,
    /// From then until the first page went out.
    pub freeze: Duration,
    /// From then until the last byte was there.
    pub transfer: Duration,
    /// When that was.
    pub arrived: Option<Instant>,
    /// When everything was made.
    pub prepared: Option<Instant>,
    /// When the tasks ran again.
    pub end: Option<Instant>,
}

impl Downtime {
    /// All of it.
    #[must_use]
    pub(crate) fn total(&self) -> Duration {
        between(self.start, self.end)
    }

    /// From the last byte until the tasks ran.
    #[must_use]
    pub(crate) fn restore(&self) -> Duration {
        between(self.arrived, self.end)
    }
}

/// What the pause was expected to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimate {
    /// What it goes by.
    pub measured: Measured,
    /// By this migration alone.
    pub plain: Pause,
    /// Corrected by what earlier ones took.
    pub pause: Pause,
    /// How long pages are fetched after it.
    pub after: Duration,
    /// How many earlier ones that were.
    pub learned_from: usize,
}

impl Estimate {
    fn json(&self) -> Value {
        let mut all = self.pause.json();
        all["learned_from"] = self.learned_from.into();
        all
    }
}

fn between(from: Option<Instant>, to: Option<Instant>) -> Duration {
    match (from, to) {
        (Some(from), Some(to)) => to.saturating_duration_since(from),
        _ => Duration::ZERO,
    }
}

/// What a migration took.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// Its number.
    pub id: String,
    /// How it was done.
    pub mode: Mode,
    /// When it began.
    pub start: Instant,
    /// The root's process id at the destination.
    pub pid: i32,
    /// All of it.
    pub total: Duration,
    /// For how long nothing ran.
    pub downtime: Downtime,
    /// For how long that was expected, when the tasks were about to be stopped.
    pub estimate: Option<Estimate>,
    /// The rounds, the last one of stopped tasks.
    pub rounds: Vec<Round>,
    /// Bytes that went over the link.
    pub bytes: u64,
    /// How many of them were of files, if files went along.
    pub files_bytes: Option<u64>,
    /// What the service did meanwhile.
    pub service: Option<Service>,
}

impl Report {
    /// For programs.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        let mut all = json!({
            "id": self.id,
            "mode": self.mode,
            "pid": self.pid,
            "total_ms": millis(self.total),
            "downtime_ms": millis(self.downtime.total()),
            "freeze_ms": millis(self.downtime.freeze),
            "transfer_ms": millis(self.downtime.transfer),
            "restore_ms": millis(self.downtime.restore()),
            "rounds": self.rounds.iter().map(Round::json).collect::<Vec<_>>(),
            "bytes": self.bytes,
        });
        if let Some(estimate) = &self.estimate {
            all["estimate"] = estimate.json();
        }
        if let Some(bytes) = self.files_bytes {
            all["files_bytes"] = bytes.into();
        }
        if let Some(service) = &self.service {
            let [before, during, after] =
                service.rates(self.start, self.start + self.total).map(f64::round);
            all["answers_per_s"] = json!({ "before": before, "during": during, "after": after });
        }
        all
    }

    /// For people.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let down = &self.downtime;
        format!(
            "It runs there as process {}. {} rounds, {:.1} MB in {:.2} s; stopped for {:.1} ms \
             (freeze {:.1}, transfer {:.1}, restore {:.1}){}.",
            self.pid,
            self.rounds.len(),
            megabytes(self.bytes),
            self.total.as_secs_f64(),
            millis(down.total()),
            millis(down.freeze),
            millis(down.transfer),
            millis(down.restore()),
            self.estimate.map_or(String::new(), |it| {
                format!("; {:.1} ms were expected", millis(it.pause.total()))
            }),
        )
    }
}

/// Milliseconds with three digits behind the point.
#[must_use]
pub(crate) fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Millions of bytes.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "to be read by people")]
pub(crate) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
