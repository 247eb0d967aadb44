//! What saving and restoring costs, as Prometheus reads it.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Numbers that only grow.
#[derive(Debug)]
pub(crate) struct Counters<const N: usize> {
    known: [(&'static str, &'static str); N],
    values: [AtomicU64; N],
}

impl<const N: usize> Counters<N> {
    /// Counters of these names and meanings.
    #[must_use]
    pub(crate) fn new(known: [(&'static str, &'static str); N]) -> Self {
        Self { known, values: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Adds to a counter; one of another name is none.
    pub(crate) fn add(&self, name: &str, more: u64) {
        if let Some(at) = self.known.iter().position(|(known, _)| *known == name) {
            self.values[at].fetch_add(more, Ordering::Relaxed);
        }
    }

    /// All of them, in the text format of Prometheus.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for ((name, help), value) in self.known.iter().zip(&self.values) {
            let value = value.load(Ordering::Relaxed);
            // A String takes whatever is written to it.
            let _ = write!(
                text,
                "# HELP torpor_{name} {help}\n# TYPE torpor_{name} counter\ntorpor_{name} {value}\n"
            );
        }
        text
    }
}

/// What a histogram counts apart, in microseconds: its readers ask how many took no longer than 10 ms.
const LIMITS: [u64; 8] = [500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 1_000_000];

/// How long something took that is done often.
#[derive(Debug)]
pub(crate) struct Histogram {
    name: &'static str,
    help: &'static str,
    /// How many took no longer than each limit, and longer than the one before it.
    within: [AtomicU64; LIMITS.len()],
    /// How many there were in all.
    count: AtomicU64,
    /// How long all of them took, in microseconds.
    sum: AtomicU64,
}

impl Histogram {
    /// One of this name and meaning.
    #[must_use]
    pub(crate) fn new(name: &'static str, help: &'static str) -> Self {
        let within = std::array::from_fn(|_| AtomicU64::new(0));
        Self { name, help, within, count: AtomicU64::new(0), sum: AtomicU64::new(0) }
    }

    /// Counts one that took so long.
    pub(crate) fn add(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if let Some(at) = LIMITS.iter().position(|limit| micros <= *limit) {
            self.within[at].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(micros, Ordering::Relaxed);
    }

    /// All of it, in the text format of Prometheus: in seconds, each limit with what is below it.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let (name, help) = (self.name, self.help);
        let mut text = format!("# HELP torpor_{name} {help}\n# TYPE torpor_{name} histogram\n");
        let mut below = 0;
        let mut line = |limit: &str, below: u64| {
            // A String takes whatever is written to it.
            let _ = writeln!(text, "torpor_{name}_bucket{{le=\"{limit}\"}} {below}");
        };
        for (limit, within) in LIMITS.iter().zip(&self.within) {
            below += within.load(Ordering::Relaxed);
            line(&Duration::from_micros(*limit).as_secs_f64().to_string(), below);
        }
        // One that is being counted may be in `within` and not in `count` yet.
        let count = self.count.load(Ordering::Relaxed).max(below);
        line("+Inf", count);
        let sum = Duration::from_micros(self.sum.load(Ordering::Relaxed)).as_secs_f64();
        let _ = write!(text, "torpor_{name}_sum {sum}\ntorpor_{name}_count {count}\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_count_what_is_below_each_limit() {
        let times = Histogram::new("review_duration_seconds", "How long.");
        for micros in [300, 10_000, 10_001, 2_000_000] {
            times.add(Duration::from_micros(micros));
        }
        let text = times.text();
        assert!(text.contains("# TYPE torpor_review_duration_seconds histogram\n"), "{text}");
        for (limit, count) in
            [("0.0005", 1), ("0.005", 1), ("0.01", 2), ("0.025", 3), ("1", 3), ("+Inf", 4)]
        {
            let line =
                format!("\ntorpor_review_duration_seconds_bucket{{le=\"{limit}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        let end = "_seconds_sum 2.020301\ntorpor_review_duration_seconds_count 4\n";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn counters_are_texts() {
        let counters = Counters::new([("pods_saved_total", "Pods."), ("other_total", "Others.")]);
        counters.add("pods_saved_total", 2);
        counters.add("pods_saved_total", 1);
        counters.add("unknown", 1);
        let text = counters.text();
        assert!(text.contains("\ntorpor_pods_saved_total 3\n"), "{text}");
        assert!(text.contains("# TYPE torpor_other_total counter\ntorpor_other_total 0\n"));
        assert!(!text.contains("unknown"));
    }
}
