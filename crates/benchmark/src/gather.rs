//! Results from a journal.

use std::collections::{BTreeMap, BTreeSet};

use crate::catalogue::{Benchmark, wanted};
use crate::config::Config;
use crate::journal::{Line, Outcome, Past};
use crate::machine::Calibration;
use crate::overhead::Overhead;
use crate::plan::{Item, plan};
use crate::results::{Results, Row, SCHEMA, Sample, Status, Target};

/// The names of the targets of a configuration, in their order.
#[must_use]
pub fn targets(config: &Config) -> Vec<String> {
    let of = |e: &crate::config::Endpoint| -> Vec<String> {
        e.handlers.iter().map(|h| format!("{}/{}", e.name, h.name)).collect()
    };
    config.endpoints.iter().flat_map(of).collect()
}

/// Computes the results that a journal holds.
#[must_use]
pub fn gather(past: &Past) -> Results {
    let head = &past.head;
    let benchmarks = wanted(&head.config);
    let names = targets(&head.config);
    let items = plan(&head.config, &benchmarks, names.len(), head.seed);
    let mut rows = empty(&benchmarks, &names);
    let mut finished = head.started;
    let mut begun = BTreeMap::new();
    let mut overhead = Overhead::default();
    let (mut interruptions, mut calibration, mut described) = (0, Vec::new(), Vec::new());
    for line in &past.lines {
        match line {
            Line::Resumed { .. } => interruptions += 1,
            Line::Targets(list) => described.clone_from(list),
            Line::Calibration(time) => calibration.push(*time),
            Line::Begin(item) => *begun.entry(*item).or_insert(0_u32) += 1,
            Line::Done { item, time, outcomes, overhead: took } => {
                finished = finished.max(*time);
                let place = usize::try_from(*item).ok();
                let Some(item) = place.and_then(|place| items.get(place)) else {
                    continue;
                };
                if !item.warmup {
                    overhead += *took;
                }
                for outcome in outcomes {
                    let key = (outcome.benchmark.clone(), names[item.target].clone());
                    if let Some(row) = rows.get_mut(&key) {
                        add(row, item, *time, outcome);
                    }
                }
            }
            Line::Complete => {}
        }
    }
    let unknown = |name: &String| Target { name: name.clone(), ..Target::default() };
    let list = names.iter().map(|name| {
        described.iter().find(|target| target.name == *name).cloned().unwrap_or(unknown(name))
    });
    let rows = ordered(rows, &benchmarks, &names);
    Results {
        schema: SCHEMA.into(),
        tool: head.tool.clone(),
        id: head.id.clone(),
        started: head.started,
        finished,
        complete: past.complete(),
        seed: head.seed,
        interruptions,
        repeated: begun.values().map(|times| times - 1).sum(),
        settings: head.config.clone(),
        machine: head.machine.clone(),
        calibration: Calibration::of(calibration),
        overhead,
        targets: list.collect(),
        benchmarks,
        rows,
    }
}

type Rows = BTreeMap<(String, String), Row>;

fn empty(benchmarks: &[Benchmark], targets: &[String]) -> Rows {
    let mut rows = BTreeMap::new();
    for benchmark in benchmarks {
        for target in targets {
            let row = Row {
                benchmark: benchmark.name.clone(),
                target: target.clone(),
                status: Status::Pending,
                reason: None,
                failures: 0,
                summary: None,
                samples: Vec::new(),
            };
            rows.insert((benchmark.name.clone(), target.clone()), row);
        }
    }
    rows
}

fn add(row: &mut Row, item: &Item, time: f64, outcome: &Outcome) {
    if let Some(value) = outcome.value.filter(|value| value.is_finite()) {
        row.samples.push(Sample { order: item.number, time, warmup: item.warmup, value });
    }
    row.failures += u32::from(outcome.status == Status::Failed);
    row.reason = outcome.reason.clone().or(row.reason.take());
    // A single value that does not count makes the row invalid; a single failure among values that
    // do count is told with them.
    row.status = match (row.status, outcome.status) {
        (Status::Invalid, _) | (_, Status::Invalid) => Status::Invalid,
        (Status::Ok, _) => Status::Ok,
        (_, new) => new,
    };
}

/// The rows in the order of the catalogue. Samples of a warm-up alone are none.
fn ordered(mut rows: Rows, benchmarks: &[Benchmark], targets: &[String]) -> Vec<Row> {
    let mut list = Vec::new();
    let mut seen = BTreeSet::new();
    for benchmark in benchmarks {
        for target in targets {
            let key = (benchmark.name.clone(), target.clone());
            if let Some(mut row) = rows.remove(&key).filter(|_| seen.insert(key)) {
                row.summarize();
                if row.status == Status::Ok && row.summary.is_none() {
                    row.status = if row.failures > 0 { Status::Failed } else { Status::Pending };
                }
                list.push(row);
            }
        }
    }
    list
}
