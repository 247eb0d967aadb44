//! Two results: what has changed by more than noise.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::catalogue::{Benchmark, Direction};
use crate::results::{PULLED_FACT, Results, Row, Status, Target};
use crate::statistics::{Difference, FEWEST, Ratio, difference, median, ratio};

/// What a comparison comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing is worse.
    Same,
    /// Something is.
    Worse,
    /// There is nothing to say.
    NotComparable,
}

/// How one row has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// Not by more than noise.
    None,
    /// For the better.
    Better,
    /// For the worse.
    Worse,
    /// It gave values, and gives none any more, or too few since the others fail.
    Lost,
    /// It gave values, and too many of those that it gives do not show what they should. What was
    /// measured did not get worse: it was not measured.
    Invalid,
    /// It gave none, and does now.
    Gained,
    /// There are too few samples to tell.
    Unknown,
}

/// One row of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// The benchmark.
    pub benchmark: String,
    /// The target.
    pub target: String,
    /// How it has changed.
    pub change: Change,
    /// The unit.
    pub unit: String,
    /// The medians, old and new.
    pub medians: (Option<f64>, Option<f64>),
    /// New in relation to old.
    pub ratio: Option<Ratio>,
    /// New less old, where samples that are not above zero have no ratio.
    pub difference: Option<Difference>,
    /// What else there is to say.
    pub note: Option<String>,
}

/// A whole comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What it comes to.
    pub verdict: Verdict,
    /// Why the results cannot be compared, if so.
    pub reasons: Vec<String>,
    /// What must be known to read it.
    pub warnings: Vec<String>,
    /// The share below which a difference does not count.
    pub threshold: f64,
    /// The rows that are in both.
    pub rows: Vec<Compared>,
}

/// Compares `new` with `old`.
#[must_use]
pub fn compare(old: &Results, new: &Results, threshold: Option<f64>, across: bool) -> Comparison {
    let asked = threshold.unwrap_or(old.settings.threshold);
    let drift = drift(old, new);
    let mut comparison = Comparison {
        verdict: Verdict::NotComparable,
        reasons: reasons(old, new, across),
        warnings: warnings(old, new, drift),
        // A machine that was itself slower by so much makes every row slower by as much.
        threshold: asked.max(drift),
        rows: Vec::new(),
    };
    let known: BTreeMap<&str, &Benchmark> =
        old.benchmarks.iter().map(|b| (b.name.as_str(), b)).collect();
    for row in &new.rows {
        let (Some(before), Some(benchmark)) =
            (counterpart(old, row), known.get(row.benchmark.as_str()))
        else {
            continue;
        };
        let unit = new.benchmarks.iter().find(|b| b.name == row.benchmark);
        if unit.is_none_or(|b| b.unit != benchmark.unit || b.direction != benchmark.direction) {
            comparison.reasons.push(format!("{} has another unit or direction", row.benchmark));
            continue;
        }
        let mut compared = one(benchmark, before, row, comparison.threshold);
        if new.complete && has_failed_out(before, row) {
            compared.change = Change::Lost;
            compared.note = Some(failures(row));
        }
        comparison.rows.push(compared);
    }
    let is_told = |row: &Compared| !matches!(row.change, Change::Unknown);
    if comparison.reasons.is_empty() && !comparison.rows.iter().any(is_told) {
        comparison.reasons.push("no row has enough samples in both".into());
    }
    if comparison.reasons.is_empty() {
        let worse = |row: &Compared| matches!(row.change, Change::Worse | Change::Lost);
        match open(old, new) {
            _ if comparison.rows.iter().any(worse) => comparison.verdict = Verdict::Worse,
            None => comparison.verdict = Verdict::Same,
            Some(reason) => comparison.reasons.push(reason),
        }
    }
    comparison
}

/// Whether failures have left too few samples of a row that had enough of them.
fn has_failed_out(old: &Row, new: &Row) -> bool {
    let enough = |row: &Row| row.status == Status::Ok && row.values().len() >= FEWEST;
    enough(old) && new.status == Status::Ok && !enough(new) && new.failures > 0
}

/// How often a row has failed, and why.
fn failures(row: &Row) -> String {
    let reason = row.reason.as_deref().unwrap_or("it does not say why");
    format!("{} of its samples have failed: {reason}", row.failures)
}

/// Why a run that has not come to its end does not show that nothing is worse, if so: rows of the old one have no
/// counterpart in it yet.
fn open(old: &Results, new: &Results) -> Option<String> {
    let has = |row: &Row| row.status == Status::Ok && row.values().len() >= FEWEST;
    let before: BTreeSet<_> =
        old.rows.iter().filter(|row| has(row)).map(|row| (&row.benchmark, &row.target)).collect();
    let is_open = |row: &&Row| {
        let may_come = matches!(row.status, Status::Ok | Status::Pending) && !has(row);
        may_come && before.contains(&(&row.benchmark, &row.target))
    };
    let count = new.rows.iter().filter(is_open).count();
    (!new.complete && count > 0).then(|| {
        format!(
            "the new run is not complete: {count} rows of the old one have fewer than {FEWEST} samples \
             in it yet. The same command that began it goes on with it"
        )
    })
}

/// How much faster or slower the machine itself may have been, by the same loop: in a noisy run the far
/// end of what is sure, in a quiet one the difference. What makes a run noisy can hit runtimes harder
/// than the loop, and differ from one run to the next: it counts at least as much as the loop varied.
/// Two targets of one run had the same machine.
fn drift(old: &Results, new: &Results) -> f64 {
    let (a, b) = (&old.calibration, &new.calibration);
    if old.id == new.id || a.median <= 0.0 || b.median <= 0.0 {
        return 0.0;
    }
    match ratio(&a.samples, &b.samples).filter(|_| a.noisy || b.noisy) {
        Some(sure) => (sure.high.max(1.0 / sure.low) - 1.0).max(a.deviation).max(b.deviation),
        None => (b.median / a.median - 1.0).abs(),
    }
}

fn reasons(old: &Results, new: &Results, across: bool) -> Vec<String> {
    let mut reasons = Vec::new();
    if !across {
        let different = old.machine.differences(&new.machine);
        reasons.extend(different.into_iter().map(|text| format!("different machines: {text}")));
    }
    let (a, b) = (&old.settings, &new.settings);
    if (a.effort - b.effort).abs() > f64::EPSILON {
        reasons.push(format!("different amounts of work: effort {} and {}", a.effort, b.effort));
    }
    if a.concurrency != b.concurrency {
        reasons.push(format!("different concurrency: {} and {}", a.concurrency, b.concurrency));
    }
    let images: BTreeSet<String> = pairs(old, new).filter_map(|(a, b)| other_image(a, b)).collect();
    reasons.extend(images);
    reasons
}

/// The targets that are in both.
fn pairs<'a>(old: &'a Results, new: &'a Results) -> impl Iterator<Item = (&'a Target, &'a Target)> {
    new.targets.iter().filter_map(move |target| {
        let mut before = old.targets.iter();
        Some((before.find(|known| known.name == target.name)?, target))
    })
}

/// What is said of targets that have pulled different images.
fn other_image(old: &Target, new: &Target) -> Option<String> {
    let [a, b] = [old, new]
        .map(|target| target.facts.get(PULLED_FACT).map_or("the tool's own", String::as_str));
    (a != b).then(|| format!("different images were pulled: {a} and {b}"))
}

fn warnings(old: &Results, new: &Results, drift: f64) -> Vec<String> {
    let mut warnings = Vec::new();
    for (which, results) in [("old", old), ("new", new)] {
        if !results.complete {
            warnings.push(format!("the {which} run is not complete"));
        }
        if results.calibration.noisy {
            let deviation = 100.0 * results.calibration.deviation;
            warnings.push(format!(
                "the machine was noisy during the {which} run: the same loop varied by {deviation:.1} %"
            ));
        }
    }
    let failing = new.rows.iter().filter(|row| row.failures > 0 && row.status == Status::Ok);
    let more =
        failing.filter(|row| counterpart(old, row).is_some_and(|o| o.failures < row.failures));
    warnings.extend(told("fail more often than before, and have values", more));
    let gone = old.rows.iter().filter(|row| counterpart(new, row).is_none());
    warnings.extend(told("of the old run are not in the new one, and are not compared", gone));
    if drift > 0.02 {
        warnings.push(format!(
            "the machine itself may have differed by {:.1} % between the runs; the threshold is at least that",
            100.0 * drift
        ));
    }
    warnings
}

/// The row of the same benchmark and target.
fn counterpart<'a>(results: &'a Results, row: &Row) -> Option<&'a Row> {
    results.rows.iter().find(|r| r.benchmark == row.benchmark && r.target == row.target)
}

/// What is said of rows: how many they are, and the first of them.
fn told<'a>(what: &str, mut rows: impl Iterator<Item = &'a Row>) -> Option<String> {
    let first = rows.next()?;
    let count = 1 + rows.count();
    Some(format!("{count} rows {what}: {} of {} is the first", first.benchmark, first.target))
}

fn one(benchmark: &Benchmark, old: &Row, new: &Row, threshold: f64) -> Compared {
    let (before, after) = (old.values(), new.values());
    let ratio = ratio(&before, &after);
    let difference = if ratio.is_none() { difference(&before, &after) } else { None };
    let usable = |row: &Row| row.status == Status::Ok;
    let mut note = None;
    let change = match (usable(old), usable(new)) {
        (true, true) if before.len() < FEWEST || after.len() < FEWEST => {
            note = Some(format!("{} and {} samples are too few", before.len(), after.len()));
            Change::Unknown
        }
        (true, true) => match (ratio, difference) {
            (Some(ratio), _) => judged(benchmark.direction, as_factor(ratio, threshold)),
            (_, Some(by)) => {
                let least = threshold * median(&before).abs();
                judged(benchmark.direction, as_amount(by, least))
            }
            (None, None) => Change::Unknown,
        },
        (true, false) if new.status == Status::Pending => Change::Unknown,
        (true, false) => {
            note.clone_from(&new.reason);
            if new.status == Status::Invalid { Change::Invalid } else { Change::Lost }
        }
        (false, true) => Change::Gained,
        (false, false) => Change::None,
    };
    let middle = |row: &Row| row.summary.as_ref().map(|summary| summary.median);
    Compared {
        benchmark: benchmark.name.clone(),
        target: new.target.clone(),
        change,
        unit: benchmark.unit.clone(),
        medians: (middle(old), middle(new)),
        ratio,
        difference,
        note,
    }
}

/// Whether there is more, or less: a difference counts when its interval and the threshold both say so.
fn as_factor(ratio: Ratio, threshold: f64) -> (bool, bool) {
    let more = ratio.low > 1.0 && ratio.estimate > 1.0 + threshold;
    let less = ratio.high < 1.0 && ratio.estimate < 1.0 / (1.0 + threshold);
    (more, less)
}

/// The same of a difference that counts from an amount on.
fn as_amount(by: Difference, least: f64) -> (bool, bool) {
    (by.low > 0.0 && by.estimate > least, by.high < 0.0 && by.estimate < -least)
}

fn judged(direction: Direction, (more, less): (bool, bool)) -> Change {
    match (direction, more, less) {
        (Direction::Lower, true, _) | (Direction::Higher, _, true) => Change::Worse,
        (Direction::Lower, _, true) | (Direction::Higher, true, _) => Change::Better,
        _ => Change::None,
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for reason in &self.reasons {
            writeln!(f, "not comparable: {reason}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let count = |change| self.rows.iter().filter(|row| row.change == change).count();
        for row in self.rows.iter().filter(|row| row.change != Change::None) {
            write!(f, "{:?}: {} of {}", row.change, row.benchmark, row.target)?;
            if let (Some(old), Some(new)) = row.medians {
                write!(f, ": {old:.4} to {new:.4} {}", row.unit)?;
            }
            if let Some(Ratio { estimate, low, high }) = row.ratio {
                write!(f, ", {estimate:.3} times ({low:.3} to {high:.3})")?;
            }
            if let Some(Difference { estimate, low, high }) = row.difference {
                write!(f, ", by {estimate:.4} ({low:.4} to {high:.4})")?;
            }
            writeln!(f, "{}", row.note.as_ref().map(|n| format!(" ({n})")).unwrap_or_default())?;
        }
        writeln!(
            f,
            "{} rows: {} worse, {} better, {} without values any more, {} invalid now, {} unchanged \
             (beyond {:.1} % and an interval of 99 %)",
            self.rows.len(),
            count(Change::Worse),
            count(Change::Better),
            count(Change::Lost),
            count(Change::Invalid),
            count(Change::None),
            100.0 * self.threshold,
        )
    }
}
