//! What was measured, as a table, and against what was promised.

use std::fmt::Write;

use anyhow::{Context, Result};
use serde_json::Value;

use super::service::Service;
use crate::bench::{Bench, Goal, median};

/// A migration.
#[derive(Default)]
pub struct Sample {
    /// What `torpor migrate --json` has printed.
    pub report: Value,
    /// What `--dry-run` has expected.
    pub rehearsal: Value,
    /// Answers a second before, during and after it.
    pub rates: [f64; 3],
    /// Milliseconds of the longest time without any answer.
    pub silence: u32,
    /// Seconds of processor time here and there.
    pub processor: [f64; 2],
    /// Bytes that the programs here and there had at most.
    pub peak: [u64; 2],
    /// Milliseconds of the pause that are the kernel's, the disk's and the link's.
    pub least: f64,
}

impl Sample {
    /// A number of the report.
    pub fn number(&self, name: &str) -> Result<f64> {
        self.report[name].as_f64().with_context(|| format!("no {name} in {}", self.report))
    }

    fn or_zero(&self, name: &str) -> f64 {
        self.report[name].as_f64().unwrap_or_default()
    }
}

/// A column: its name, and how many digits it has behind the point.
type Column = (&'static str, usize, fn(&Sample) -> f64);

#[allow(clippy::cast_precision_loss, reason = "to be read by people")]
const COLUMNS: [Column; 17] = [
    ("total, s", 1, |it| it.or_zero("total_ms") / 1e3),
    ("rounds", 0, |it| it.report["rounds"].as_array().map_or(0, Vec::len) as f64),
    ("sent, MB", 0, |it| it.or_zero("bytes") / 1e6),
    ("downtime, ms", 0, downtime),
    ("expected", 0, |it| it.report["estimate"]["downtime_ms"].as_f64().unwrap_or_default()),
    ("by --dry-run", 0, |it| it.rehearsal["downtime_ms"].as_f64().unwrap_or_default()),
    ("freeze", 1, |it| it.or_zero("freeze_ms")),
    ("transfer", 1, |it| it.or_zero("transfer_ms")),
    ("restore", 1, restore),
    ("no answer for, ms", 0, |it| f64::from(it.silence)),
    ("answers/s before", 0, |it| it.rates[0]),
    ("during", 0, |it| it.rates[1]),
    ("after", 0, |it| it.rates[2]),
    ("CPU here, s", 1, |it| it.processor[0]),
    ("there, s", 1, |it| it.processor[1]),
    ("memory here, MB", 0, |it| it.peak[0] as f64 / 1e6),
    ("there, MB", 0, |it| it.peak[1] as f64 / 1e6),
];

fn downtime(sample: &Sample) -> f64 {
    sample.or_zero("downtime_ms")
}

/// For how long a peer hears nothing besides the time for which the tasks are stopped.
fn stall(sample: &Sample) -> f64 {
    (f64::from(sample.silence) - downtime(sample)).max(0.0)
}

fn restore(sample: &Sample) -> f64 {
    sample.or_zero("restore_ms")
}

/// Samples of a mode.
pub type Row<'a> = (&'a str, Vec<Sample>);

fn middle(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> f64 {
    median(&samples.iter().map(value).collect::<Vec<_>>())
}

/// The medians of all modes.
pub fn of(title: &str, rows: &[Row<'_>]) -> String {
    let mut text = format!("{title}:\n\n| mode |");
    COLUMNS.iter().for_each(|(name, ..)| text += &format!(" {name} |"));
    text += &format!("\n|---|{}\n", "---:|".repeat(COLUMNS.len()));
    for (mode, samples) in rows {
        let _ = write!(text, "| {mode} |");
        for (_, digits, value) in COLUMNS {
            let _ = write!(text, " {:.digits$} |", middle(samples, value));
        }
        text.push('\n');
    }
    text + "\n"
}

/// An estimate of a migration.
type Expected = fn(&Sample) -> &Value;

/// Counts those estimates that were within a fifth of what it took, over all migrations, and over those that could learn from
/// one before.
pub fn judge_estimates<'a>(bench: &mut Bench, samples: impl Iterator<Item = &'a Sample> + Clone) {
    #[allow(clippy::cast_precision_loss, reason = "to be read by people")]
    let number = |count: usize| count as f64;
    let learned = |sample: &&Sample| sample.report["estimate"]["learned_from"].as_u64() > Some(0);
    let sets = [
        ("", samples.clone().collect::<Vec<_>>()),
        (", learned", samples.filter(learned).collect()),
    ];
    let kinds: [(&str, Expected); 2] = [
        ("estimates", |sample| &sample.report["estimate"]),
        ("estimates of --dry-run", |sample| &sample.rehearsal),
    ];
    let chosen = sets.iter().filter(|(_, samples)| !samples.is_empty());
    for ((which, samples), (name, of)) in chosen.flat_map(|set| kinds.map(|kind| (set, kind))) {
        let is_near = |sample: &&&Sample| {
            let expected = of(sample)["downtime_ms"].as_f64().unwrap_or_default();
            let real = downtime(sample);
            (0.8 * real..=1.2 * real).contains(&expected)
        };
        let (all, near) = (samples.len(), samples.iter().filter(is_near).count());
        let least = Some(Goal::AtLeast((number(all) * 0.95).ceil()));
        let name = format!("migration: {name}{which} within 20 %, of {all}");
        bench.add(name, number(near), "", least);
    }
}

fn samples_of<'r>(rows: &'r [Row<'_>], name: &str) -> Option<&'r [Sample]> {
    rows.iter().find(|(mode, _)| *mode == name).map(|(_, samples)| samples.as_slice())
}

/// Compares `pipelined` with `pre-copy`, and says what was promised.
pub fn judge(
    bench: &mut Bench,
    title: &str,
    (gigabits, service): (u32, &Service),
    rows: &[Row<'_>],
) {
    let of = |name: &str| samples_of(rows, name);
    let name = |what: &str| format!("migration, {title}: {what}");
    for (mode, samples) in rows {
        let most = Some(Goal::AtMost(200.0));
        bench.add(
            name(&format!("no answer beyond the downtime, {mode}")),
            middle(samples, stall),
            "ms",
            most,
        );
    }
    for (mode, samples) in rows.iter().filter(|(mode, _)| ["pipelined", "hybrid"].contains(mode)) {
        let name = name(&format!("of the kernel, the disk and the link, {mode}"));
        bench.add(name, middle(samples, |it| it.least), "ms", None);
    }
    if let Some(hybrid) = of("hybrid") {
        let most = Some(Goal::AtMost(50.0));
        bench.add(name("downtime, hybrid"), middle(hybrid, downtime), "ms", most);
    }
    let (Some(baseline), Some(pipelined)) = (of("pre-copy"), of("pipelined")) else { return };
    let ratio = |value: fn(&Sample) -> f64| middle(baseline, value) / middle(pipelined, value);
    #[allow(clippy::cast_precision_loss, reason = "for a ratio")]
    let peak = 1.0 / ratio(|it| it.peak[1] as f64);
    let most = Some(Goal::AtMost(1.1));
    bench.add(name("memory there, pipelined : pre-copy"), peak, "", most);
    let most = Some(Goal::AtMost(1.25));
    let processor = 1.0 / ratio(|it| it.processor[1]);
    bench.add(name("CPU there, pipelined : pre-copy"), processor, "", most);
    let &Service::Redis(reads) = service else { return };
    let reads_much = reads > 50;
    let least = Some(Goal::AtLeast(if reads_much { 38.0 } else { 10.0 }));
    bench.add(name("restore, pre-copy : pipelined"), ratio(restore), "", least);
    let least = match gigabits {
        1 if reads_much => Some(Goal::AtLeast(2.7)),
        1 => Some(Goal::AtLeast(1.5)),
        10 => Some(Goal::AtLeast(5.0)),
        _ => None,
    };
    bench.add(name("downtime, pre-copy : pipelined"), ratio(downtime), "", least);
}

/// How many of its answers a service gives while rounds are taken that may not send as much as they could.
pub fn judge_service(bench: &mut Bench, title: &str, rows: &[Row<'_>]) {
    let share = |sample: &Sample| {
        let [before, during, _] = sample.rates;
        // In the pause there is none, whatever rounds take.
        during / before / (1.0 - downtime(sample) / sample.or_zero("total_ms"))
    };
    for (mode, samples) in rows {
        let name = format!("migration, {title}: answers during rounds, of those before, {mode}");
        bench.add(name, middle(samples, share) * 100.0, "%", Some(Goal::AtLeast(95.0)));
    }
}

/// Whether the restore part of `pipelined` depends on how much data there is.
pub fn judge_sizes(bench: &mut Bench, title: &str, sizes: [&Vec<Row<'_>>; 2]) {
    let [Some(small), Some(large)] = sizes.map(|rows| samples_of(rows, "pipelined")) else {
        return;
    };
    let name = format!("migration, {title}: restore of most data : of least, pipelined");
    let ratio = middle(large, restore) / middle(small, restore);
    bench.add(name, ratio, "", Some(Goal::AtMost(1.2)));
}
