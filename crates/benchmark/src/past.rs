//! What was found in 2019 by the one study before this (containerd 1.2, runc 1.0-rc8, gVisor of May
//! 2019 with ptrace, on two processors), and what is found now.

use serde_json::{Value, json};

use crate::results::Results;
use crate::statistics::{Ratio, ratio};

/// A finding: a benchmark of today, what was measured then, and medians with containerd of runc
/// and of runsc.
type Finding = (&'static str, &'static str, f64, f64);

const THEN: &[Finding] = &[
    ("performance.cpu.total", "CPU time, s", 23.86, 26.29),
    ("performance.memory.total", "memory, total time, s", 10.12, 10.6),
    ("performance.memory.minimal", "memory, least latency, ms", 0.10, 0.14),
    ("performance.memory.average", "memory, average latency, ms", 0.11, 0.19),
    ("performance.memory.maximal", "memory, greatest latency, ms", 3.55, 1.98),
    ("performance.disk.random-read", "random read, s", 0.03, 0.29),
    ("performance.disk.sequential-read", "sequential read, s", 0.36, 3.32),
    ("performance.disk.random-write", "random write, s", 6.39, 12.74),
    ("performance.disk.sequential-rewrite", "sequential rewrite, s", 2.64, 6.74),
    ("performance.disk.sequential-write", "sequential write, s", 2.71, 6.80),
    // In 2019 gVisor had no memory of its own below a root: these have the same way to a file as it had then.
    ("performance.disk-bind.random-read", "random read, s", 0.03, 0.29),
    ("performance.disk-bind.sequential-read", "sequential read, s", 0.36, 3.32),
    ("performance.disk-bind.random-write", "random write, s", 6.39, 12.74),
    ("performance.disk-bind.sequential-rewrite", "sequential rewrite, s", 2.64, 6.74),
    ("performance.disk-bind.sequential-write", "sequential write, s", 2.71, 6.80),
    ("operations.life.total", "create and run, then destroy, s", 1.16, 1.08),
    ("scalability.containers-5.start", "starting 5, s", 3.49, 2.96),
    ("scalability.containers-10.start", "starting 10, s", 8.35, 5.99),
    ("scalability.containers-50.start", "starting 50, s", 37.69, 43.36),
];

/// How far apart two runtimes are when one is called slower than the other.
const APART: f64 = 1.1;

/// What is said where the samples are too few, or too far apart.
const UNSURE: &str = "this run cannot tell";

/// What the interval of today's ratio says of the ratio of 2019, both as how many times slower gVisor is.
fn holds(then: f64, now: Ratio) -> &'static str {
    let (low, high) = (now.low, now.high);
    let has = |times: f64| low <= times && times <= high;
    let alike = 1.0 / APART..=APART;
    if alike.contains(&then) {
        // What was found is that none of the two is slower.
        return match (alike.contains(&low), alike.contains(&high)) {
            (true, true) => "holds",
            (false, false) if low > APART || high < 1.0 / APART => "a difference now",
            _ => UNSURE,
        };
    }
    match (has(then), has(1.0)) {
        (true, true) => UNSURE,
        (true, false) => "holds",
        (false, true) => "less than then, if at all",
        (false, false) if (then > 1.0) != (low > 1.0) => "the other way round",
        (false, false) if (then > 1.0) == (high < then) => "less than then",
        (false, false) => "more than then",
    }
}

/// A ratio with its interval, for people.
fn told(times: Ratio) -> String {
    format!("{:.2} ({:.2} to {:.2})", times.estimate, times.low, times.high)
}

/// What was measured in 2019 for a benchmark, with runc and with runsc.
#[must_use]
pub(crate) fn medians(benchmark: &str) -> Option<String> {
    let &(_, what, runc, runsc) = THEN.iter().find(|(name, ..)| *name == benchmark)?;
    let unit = what.rsplit(' ').next()?;
    Some(format!("{runc} / {runsc} {unit}"))
}

/// The findings of 2019 beside those of a run. Amounts of work differ, so that what can be compared is how
/// much slower gVisor is than runc: then and now, where the run has both.
#[must_use]
pub(crate) fn findings(
    median: impl Fn(&str, &str) -> Option<f64>,
    results: &Results,
) -> Vec<Value> {
    // Both under one endpoint: the first that has values of both, or else of runc.
    let endpoints = || {
        let of = |target: &crate::results::Target| Some(target.name.rsplit_once('/')?.0.to_owned());
        results.targets.iter().filter_map(of)
    };
    let first = |name: &str| {
        let of = |endpoint: &str, handler: &str| median(name, &format!("{endpoint}/{handler}"));
        let both = endpoints().find(|e| of(e, "runc").is_some() && of(e, "runsc").is_some());
        both.or_else(|| endpoints().find(|e| of(e, "runc").is_some())).unwrap_or_default()
    };
    let values = |name: &str, target: &str| {
        let row = results.rows.iter().find(|r| r.benchmark == name && r.target == target);
        row.map(crate::results::Row::values).unwrap_or_default()
    };
    THEN.iter()
        .filter_map(|&(name, what, then_runc, then_runsc)| {
            let benchmark = results.benchmarks.iter().find(|b| b.name == name)?;
            let endpoint = first(name);
            let [runc, runsc] = ["runc", "runsc"].map(|handler| format!("{endpoint}/{handler}"));
            let (a, b) = (median(name, &runc), median(name, &runsc));
            let more = benchmark.direction == crate::catalogue::Direction::Higher;
            let (base, slow) = (values(name, &runc), values(name, &runsc));
            let times = if more { ratio(&slow, &base) } else { ratio(&base, &slow) };
            let both = a.zip(b);
            let times = both.and(times);
            let shown = |value: Option<f64>| value.map_or("—".into(), crate::chart::number);
            Some(json!({
                "name": name,
                "unit": benchmark.unit,
                "what": what,
                "then": [then_runc.to_string(), then_runsc.to_string()],
                "then_times": format!("{:.2}", then_runsc / then_runc),
                "now": [shown(a), shown(b)],
                "now_times": times.map_or("—".into(), told),
                "holds": match (both, times) {
                    (None, _) => "",
                    (_, None) => UNSURE,
                    (_, Some(times)) => holds(then_runsc / then_runc, times),
                },
            }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_judged_by_the_interval_of_today() {
        for (then, low, high, said) in [
            (9.7, 8.0, 12.0, "holds"),
            // A difference in the same direction is not the same difference.
            (9.7, 1.6, 4.1, "less than then"),
            (1.2, 3.0, 3.5, "more than then"),
            (0.5, 0.7, 0.9, "less than then"),
            (0.8, 0.3, 0.5, "more than then"),
            // What the interval leaves out is told, also where it holds that there is no difference.
            (9.2, 0.9, 1.4, "less than then, if at all"),
            (1.7, 0.9, 1.8, "this run cannot tell"),
            (1.7, 0.3, 0.6, "the other way round"),
            (0.93, 2.2, 3.8, "a difference now"),
            (1.05, 0.95, 1.08, "holds"),
            (1.05, 0.95, 1.5, "this run cannot tell"),
        ] {
            let now = Ratio { estimate: f64::midpoint(low, high), low, high };
            assert_eq!(holds(then, now), said, "{then}: {low} to {high}");
        }
    }

    #[test]
    fn the_past_is_told_with_its_unit() {
        assert_eq!(medians("performance.cpu.total").as_deref(), Some("23.86 / 26.29 s"));
        // A file of the host and one in the root of a container stand beside the same finding.
        let [root, bind] = ["disk", "disk-bind"].map(|of| format!("performance.{of}.random-read"));
        assert_eq!(medians(&root).as_deref(), Some("0.03 / 0.29 s"));
        assert_eq!(medians(&bind), medians(&root));
        assert_eq!(medians("operations.image.pull"), None);
    }
}
