//! Metrics, as Prometheus reads them.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::core::Core;
use super::record::Place;
use crate::files;

impl Core {
    /// The metrics in the text format of Prometheus.
    #[must_use]
    pub(super) fn metrics(&self) -> String {
        let now = files::now();
        let mut text = String::new();
        let mut states: BTreeMap<&str, u64> = BTreeMap::new();
        for state in ["queued", "running", "preempting", "preempted", "resuming", "moved"] {
            states.insert(state, 0);
        }
        for state in ["done", "failed", "cancelled"] {
            states.insert(state, 0);
        }
        for job in self.jobs.values() {
            *states.entry(job.state()).or_default() += 1;
        }
        family(&mut text, "jobs", "gauge", "Jobs by state.");
        for (state, count) in states {
            line(&mut text, &format!("jobs{{state=\"{state}\"}}"), &count.to_string());
        }
        let totals = self.jobs.values().fold(self.forgotten, |sum, job| sum.with(job, now));
        let seconds: [(&str, &str, i64); 4] = [
            ("work_seconds_total", "Slot time of work that counts.", totals.work),
            (
                "preemption_overhead_seconds_total",
                "Time that jobs took to give way and to come back.",
                totals.overhead,
            ),
            ("lost_work_seconds_total", "Work that was done again.", totals.lost),
            (
                "waste_seconds_total",
                "Overhead of preemptions and lost work together.",
                totals.overhead + totals.lost,
            ),
        ];
        for (name, help, millis) in seconds {
            family(&mut text, name, "counter", help);
            line(&mut text, name, &format!("{}.{:03}", millis / 1000, millis % 1000));
        }
        let count = |of: &dyn Fn(&super::record::Record) -> u64| -> u64 {
            self.jobs.values().map(of).sum()
        };
        let used = count(&|j| if j.place.holds_slots() { j.spec.slots.into() } else { 0 });
        let numbers: [(&str, &str, &str, u64); 7] = [
            ("preemptions_total", "counter", "Preemptions.", totals.preemptions),
            ("runs_total", "counter", "Runs that were started.", totals.runs),
            ("slots", "gauge", "Slots of this machine.", self.config.slots().into()),
            ("slots_used", "gauge", "Slots that jobs have.", used),
            ("image_bytes", "gauge", "Bytes of checkpoints on disk.", self.image_bytes()),
            (
                "stored_bytes",
                "gauge",
                "Bytes of checkpoints in the object store.",
                self.depot.bytes,
            ),
            (
                "stopped_jobs",
                "gauge",
                "Jobs that are frozen in memory.",
                count(&|j| u64::from(j.place == Place::Stopped)),
            ),
        ];
        for (name, kind, help, value) in numbers {
            family(&mut text, name, kind, help);
            line(&mut text, name, &value.to_string());
        }
        family(&mut text, "build_info", "gauge", "The version of the daemon.");
        let version = env!("CARGO_PKG_VERSION");
        line(&mut text, &format!("build_info{{version=\"{version}\"}}"), "1");
        text
    }
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "# HELP torpor_queue_{name} {help}");
    let _ = writeln!(text, "# TYPE torpor_queue_{name} {kind}");
}

fn line(text: &mut String, name: &str, value: &str) {
    let _ = writeln!(text, "torpor_queue_{name} {value}");
}
