//! What saving and restoring costs, as Prometheus reads it.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

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

#[cfg(test)]
mod tests {
    use super::*;

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
