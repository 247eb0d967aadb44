//! Results from a journal.

use std::collections::{BTreeMap, BTreeSet};

use crate::catalogue::{Benchmark, wanted};
use crate::config::Config;
use crate::journal::{Line, Outcome, Past, Work};
use crate::machine::{Calibration, Ticks};
use crate::overhead::Overhead;
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
    let mut cells = Cells::new();
    let mut finished = head.started;
    let mut begun = BTreeMap::new();
    let mut overhead = Overhead::default();
    let (mut interruptions, mut calibration) = (0, Vec::new());
    let mut passed = Ticks::default();
    for line in &past.lines {
        match line {
            Line::Resumed { .. } => interruptions += 1,
            Line::Targets(_) | Line::Complete => {}
            Line::Calibration(time) => calibration.push(*time),
            Line::Passed(ticks) => passed += *ticks,
            Line::Begin(item) => *begun.entry(*item).or_insert(0_u32) += 1,
            Line::Done { item, work, time, outcomes, overhead: took } => {
                finished = finished.max(*time);
                // Whose samples these are a journal of before does not say.
                let Some(work) = work else { continue };
                if !work.warmup {
                    overhead += *took;
                }
                for outcome in outcomes {
                    let key = (outcome.benchmark.clone(), work.target.clone());
                    let cell = cells.entry(key).or_default();
                    cell.add(*item, *time, work, outcome);
                }
            }
        }
    }
    let described = described(&past.lines);
    let unknown = |name: &String| Target { name: name.clone(), ..Target::default() };
    let list = names.iter().map(|name| {
        described.iter().find(|target| target.name == *name).cloned().unwrap_or(unknown(name))
    });
    let rows = ordered(cells, &benchmarks, &names);
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
        calibration: Calibration { stolen: passed.stolen(), ..Calibration::of(calibration) },
        overhead,
        targets: list.collect(),
        benchmarks,
        rows,
    }
}

/// What was found out about the targets, each by the first who did.
#[must_use]
pub fn described(lines: &[Line]) -> Vec<Target> {
    let mut all: Vec<Target> = Vec::new();
    for line in lines {
        let Line::Targets(list) = line else { continue };
        for target in list {
            if !all.iter().any(|known| known.name == target.name) {
                all.push(target.clone());
            }
        }
    }
    all
}

/// Cells by the names of benchmark and target.
type Cells = BTreeMap<(String, String), Gathered>;

/// What has come of a cell so far.
#[derive(Debug, Default)]
struct Gathered {
    samples: Vec<Sample>,
    /// How many there were of each kind, and why, without those of the warm-up.
    ok: u32,
    invalid: u32,
    failures: u32,
    lacks: bool,
    reasons: Vec<(Status, String)>,
    /// What the last one of the warm-up came to, if it did not succeed.
    warmup: Option<(Status, Option<String>)>,
}

/// A row is invalid when more than one of so many of its values are.
const INVALID: u32 = 4;

impl Gathered {
    fn add(&mut self, order: u64, time: f64, work: &Work, outcome: &Outcome) {
        let invalid = outcome.status == Status::Invalid;
        let Work { warmup, cold, .. } = *work;
        if let Some(value) = outcome.value.filter(|value| value.is_finite()) {
            self.samples.push(Sample { order, time, warmup, value, invalid, cold });
        }
        if warmup {
            let lacks = outcome.status != Status::Ok;
            self.warmup = lacks.then(|| (outcome.status, outcome.reason.clone()));
            return;
        }
        match outcome.status {
            Status::Ok => self.ok += 1,
            Status::Invalid => self.invalid += 1,
            Status::Failed => self.failures += 1,
            Status::Unsupported => self.lacks = true,
            Status::Pending => {}
        }
        if let Some(reason) = &outcome.reason {
            self.reasons.push((outcome.status, reason.clone()));
        }
    }

    /// What it comes to, and why. A warm-up tells that only where there is nothing else: what cannot be
    /// done, or fails again and again, is not tried any more.
    fn status(&self) -> (Status, Option<String>) {
        let status = if self.invalid * INVALID > self.ok + self.invalid {
            Status::Invalid
        } else if self.ok > 0 {
            Status::Ok
        } else if self.failures > 0 {
            Status::Failed
        } else if self.lacks {
            Status::Unsupported
        } else {
            let told = self.warmup.clone().filter(|(status, _)| *status != Status::Invalid);
            return told.unwrap_or((Status::Pending, None));
        };
        let own = self.reasons.iter().rfind(|(of, _)| *of == status);
        let reason = own.or(self.reasons.last()).map(|(_, reason)| reason.clone());
        (status, reason)
    }

    fn row(self, benchmark: &str, target: &str) -> Row {
        let (status, reason) = self.status();
        let mut row = Row {
            benchmark: benchmark.to_owned(),
            target: target.to_owned(),
            status,
            reason,
            failures: self.failures,
            invalid: self.invalid,
            summary: None,
            samples: self.samples,
        };
        row.summarize();
        row
    }
}

/// The rows in the order of the catalogue.
fn ordered(mut cells: Cells, benchmarks: &[Benchmark], targets: &[String]) -> Vec<Row> {
    let mut list = Vec::new();
    let mut seen = BTreeSet::new();
    for benchmark in benchmarks {
        for target in targets {
            let key = (benchmark.name.clone(), target.clone());
            let cell = cells.remove(&key).unwrap_or_default();
            if seen.insert(key) {
                list.push(cell.row(&benchmark.name, target));
            }
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Group;
    use crate::journal::Head;
    use crate::machine::Machine;

    /// The row that such outcomes make: whether they are of the warm-up, and what they came to.
    fn row(outcomes: &[(bool, Status)]) -> Row {
        let mut cell = Gathered::default();
        for (order, (warmup, status)) in (0..).zip(outcomes) {
            let value = matches!(status, Status::Ok | Status::Invalid).then_some(1.0);
            let reason = (*status != Status::Ok).then(|| format!("{status:?} {order}"));
            let benchmark = "a".to_owned();
            let (target, warmup) = ("b".to_owned(), *warmup);
            let work = Work { target, group: Group::Image, warmup, cold: order == 1 };
            cell.add(order, 1.0, &work, &Outcome { benchmark, status: *status, value, reason });
        }
        cell.row("a", "b")
    }

    fn after(warmup: Status, others: &[(usize, Status)]) -> Row {
        let mut all = vec![(true, warmup)];
        for (times, status) in others {
            all.extend(vec![(false, *status); *times]);
        }
        row(&all)
    }

    #[test]
    fn samples_belong_to_what_they_name() {
        let text = "{endpoints: [{name: e, socket: /s, handlers: [{name: x}, {name: y}]}], \
                    filters: [operations.image.*]}";
        let config: Config = serde_saphyr::from_str(text).unwrap();
        let head = Head {
            schema: SCHEMA.into(),
            tool: "1".into(),
            id: "x".into(),
            started: 1.0,
            seed: 2,
            plan: None,
            config,
            machine: Machine::default(),
        };
        let pulled = |item: u64, target: &str, warmup: bool, value: f64| {
            let (target, group) = (target.to_owned(), Group::Image);
            let outcome = Outcome {
                benchmark: "operations.image.pull".into(),
                status: Status::Ok,
                value: Some(value),
                reason: None,
            };
            let cold = item == 7000;
            let (work, outcomes) = (Some(Work { target, group, warmup, cold }), vec![outcome]);
            Line::Done { item, work, time: 1.0, outcomes, overhead: Overhead::default() }
        };
        // Whatever a tool of today would do at these places, or has no place for.
        let lines = vec![
            pulled(0, "e/y", false, 3.0),
            pulled(1, "e/y", true, 4.0),
            pulled(7000, "e/x", false, 5.0),
            Line::Passed(Ticks { stolen: 3, all: 40 }),
            Line::Passed(Ticks { stolen: 0, all: 60 }),
        ];
        let results = gather(&Past { head, lines });
        let row = |target: &str| {
            let mut rows = results.rows.iter();
            let is = |row: &&Row| row.benchmark == "operations.image.pull" && row.target == target;
            rows.find(is).unwrap()
        };
        let [x, y] = ["e/x", "e/y"].map(row);
        assert_eq!((x.values(), y.values()), (vec![5.0], vec![3.0]));
        // What met an endpoint that was cold says so, and counts.
        assert_eq!((x.cold(), y.cold()), (1, 0));
        assert_eq!(results.calibration.stolen, Some(3.0));
    }

    #[test]
    fn a_warm_up_decides_nothing() {
        for warmup in [Status::Invalid, Status::Failed] {
            let row = after(warmup, &[(5, Status::Ok)]);
            assert_eq!((row.status, row.failures, row.invalid), (Status::Ok, 0, 0), "{row:?}");
            assert_eq!((row.reason, row.summary.unwrap().n), (None, 5));
        }
        // What cannot be done is not tried again.
        for status in [Status::Unsupported, Status::Failed] {
            let row = after(status, &[]);
            assert_eq!((row.status, row.reason), (status, Some(format!("{status:?} 0"))));
        }
        for status in [Status::Ok, Status::Invalid] {
            assert_eq!(after(status, &[]).status, Status::Pending);
        }
    }

    #[test]
    fn a_row_is_invalid_when_more_than_a_quarter_of_its_values_are() {
        for (ok, invalid, status) in [
            (0, 1, Status::Invalid),
            (2, 1, Status::Invalid),
            (3, 1, Status::Ok),
            (5, 2, Status::Invalid),
            (9, 3, Status::Ok),
        ] {
            let row = after(Status::Ok, &[(ok, Status::Ok), (invalid, Status::Invalid)]);
            assert_eq!(row.status, status, "{ok} and {invalid}");
            assert_eq!(row.invalid as usize, invalid);
            // They are kept, and counted only where nothing else is.
            let counted = if status == Status::Ok { ok } else { ok + invalid };
            assert_eq!((row.samples.len(), row.summary.unwrap().n), (1 + ok + invalid, counted));
            assert!(row.reason.unwrap().starts_with("Invalid"));
        }
        // A failure has no value, and is told with the values that there are.
        let row = after(Status::Ok, &[(2, Status::Ok), (3, Status::Failed)]);
        assert_eq!((row.status, row.failures, row.invalid), (Status::Ok, 3, 0));
    }
}
