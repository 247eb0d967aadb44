//! What earlier migrations took, against what was expected of them: estimates learn from it.
//!
//! How long a host takes for a mapping or a socket, and how fast two hosts pass pages on, is not to
//! be known beforehand. Each migration that succeeds leaves how far its estimate was off, and the
//! next one of the same program, about as large, to the same destination, in the same mode, is corrected by the median of
//! these.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::forecast::{Pause, float};
use crate::mode::Mode;
use crate::pace::Pace;
use crate::record::make_private;
use crate::report::Round;
use crate::shape::Shape;

/// Migrations of all kinds that are kept, the last ones.
const KEPT: usize = 200;
/// Migrations of one kind that count, the last ones: few, since a program that gets other work is another one for rounds.
const COUNTED: usize = 3;
/// No file of [`KEPT`] samples is longer.
const MAX_LEN: u64 = 256 << 10;
/// What is further off than this has other reasons.
const MOST: f64 = 100.0;

/// What is comparable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MoveKind {
    /// The agent that it goes to.
    pub to: String,
    /// How it is done.
    pub mode: Mode,
    /// Whether a runtime takes part.
    pub is_container: bool,
    /// What the root of the tree runs, by its name.
    pub program: String,
    /// How large the tree is.
    pub size: Size,
    /// Whether the link was measured for it: what is expected of one that was not may be far off.
    #[serde(default)]
    pub is_measured: bool,
}

impl MoveKind {
    /// Whether what one of them took says something about the other one.
    fn is_like(&self, other: &Self) -> bool {
        self.size.is_like(other.size) && *self == Self { size: self.size, ..other.clone() }
    }
}

/// How large a tree is, in powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Size {
    /// The power for the number of its tasks.
    tasks: u32,
    /// The power for the mebibytes of its memory, and of its files in memory.
    mebibytes: u32,
}

impl Size {
    /// That of a tree.
    #[must_use]
    pub(crate) fn of(shape: &Shape) -> Self {
        let power = |number: u64| number.checked_ilog2().unwrap_or(0);
        let mebibytes = power((shape.memory + shape.files_in_memory) >> 20);
        Self { tasks: power(shape.tasks.into()), mebibytes }
    }

    /// Whether none is much larger: one that grows a little is not another one.
    fn is_like(self, other: Self) -> bool {
        self.tasks.abs_diff(other.tasks) <= 1 && self.mebibytes.abs_diff(other.mebibytes) <= 1
    }
}

/// How the parts of a pause relate to what was expected of them, as factors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Factors {
    /// Until the first page goes out.
    pub freeze: f64,
    /// Until the last byte is there.
    pub transfer: f64,
    /// Until the tasks run.
    pub restore: f64,
}

impl Factors {
    /// What makes `expected` become `real`.
    #[must_use]
    pub(crate) fn between(expected: &Pause, real: &Pause) -> Self {
        let factor = |expected: std::time::Duration, real: std::time::Duration| {
            let factor = real.as_secs_f64() / expected.as_secs_f64().max(1e-6);
            factor.clamp(1.0 / MOST, MOST)
        };
        Self {
            freeze: factor(expected.freeze, real.freeze),
            transfer: factor(expected.transfer, real.transfer),
            restore: factor(expected.restore, real.restore),
        }
    }

    /// Corrects an estimate.
    #[must_use]
    pub(crate) fn correct(&self, expected: &Pause) -> Pause {
        Pause {
            freeze: expected.freeze.mul_f64(self.freeze),
            transfer: expected.transfer.mul_f64(self.transfer),
            restore: expected.restore.mul_f64(self.restore),
        }
    }

    /// The middle one of each part. None of none.
    fn middle(all: impl Iterator<Item = Self>) -> Option<Self> {
        let all: Vec<Self> = all.collect();
        let of = |part: fn(&Self) -> f64| median(all.iter().map(part));
        Some(Self {
            freeze: of(|it| it.freeze)?,
            transfer: of(|it| it.transfer)?,
            restore: of(|it| it.restore)?,
        })
    }

    fn are_sane(&self) -> bool {
        let sane = |factor: f64| (1.0 / MOST..=MOST).contains(&factor);
        sane(self.freeze) && sane(self.transfer) && sane(self.restore)
    }
}

/// A migration that was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    kind: MoveKind,
    factors: Factors,
    /// The same of what a rehearsal would have expected, if there were rounds.
    #[serde(default)]
    rehearsed: Option<Factors>,
    /// How long its rounds took, if there were several.
    pace: Option<Pace>,
    /// Pages that the last round brought, for each of the first.
    #[serde(default)]
    last: Option<f64>,
}

impl Sample {
    /// A migration of a kind: how far it was off, and what its rounds were.
    #[must_use]
    pub(crate) fn new(kind: MoveKind, factors: Factors, rounds: &[Round], mode: Mode) -> Self {
        // Pages that were fetched when the tasks ran there are of no round that they waited for.
        let waited = rounds.len() - usize::from(mode.is_lazy());
        let last = match rounds {
            [first, .., last] => Some(float(last.pages) / float(first.pages).max(1.0)),
            _ => None,
        };
        let (pace, last) = (Pace::of(&rounds[..waited]), last.map(|it| it.min(1.0)));
        Self { kind, factors, rehearsed: None, pace, last }
    }

    /// How long its rounds took, and what part of the first the last one was, if there were several.
    pub(crate) fn rounds(&self) -> Option<(Pace, f64)> {
        self.pace.zip(self.last)
    }

    /// That a rehearsal would have been off by this.
    #[must_use]
    pub(crate) fn rehearsed(self, rehearsed: Option<Factors>) -> Self {
        Self { rehearsed, ..self }
    }

    fn is_sane(&self) -> bool {
        self.factors.are_sane()
            && self.rehearsed.is_none_or(|factors| factors.are_sane())
            && self.pace.is_none_or(|pace| pace.is_sane())
            && self.last.is_none_or(|last| (0.0..=1.0).contains(&last))
    }
}

/// What earlier migrations of a kind say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Lesson {
    /// What corrects estimates.
    pub factors: Factors,
    /// What corrects rehearsals, if there were rounds.
    pub rehearsed: Option<Factors>,
    /// How long rounds take, if there were any.
    pub pace: Option<Pace>,
    /// Pages of the last round for each of the first, if there were several.
    pub last: Option<f64>,
    /// How many migrations say so.
    pub of: usize,
}

/// All that is remembered of earlier migrations.
#[derive(Debug)]
pub(crate) struct Experience {
    path: PathBuf,
    samples: Vec<Sample>,
}

impl Experience {
    /// What is remembered in `dir`: nothing, if it cannot be read.
    #[must_use]
    pub(crate) fn of(dir: &Path) -> Self {
        let path = dir.join("experience.json");
        let read = || -> Option<Vec<Sample>> {
            let mut text = Vec::new();
            fs::File::open(&path).ok()?.take(MAX_LEN).read_to_end(&mut text).ok()?;
            serde_json::from_slice(&text).ok()
        };
        let mut samples = read().unwrap_or_default();
        samples.retain(Sample::is_sane);
        Self { path, samples }
    }

    /// What migrations of this kind say, if there were any.
    #[must_use]
    pub(crate) fn lesson(&self, kind: &MoveKind) -> Option<Lesson> {
        let like = self.samples.iter().rev().filter(|it| it.kind.is_like(kind)).take(COUNTED);
        let like: Vec<&Sample> = like.collect();
        let factors = Factors::middle(like.iter().map(|it| it.factors))?;
        let rehearsed = Factors::middle(like.iter().filter_map(|it| it.rehearsed));
        let paces =
            |of: fn(&Pace) -> f64| median(like.iter().filter_map(|it| it.pace.as_ref().map(of)));
        let pace = paces(|it| it.each).zip(paces(|it| it.rate));
        let pace = pace.map(|(each, rate)| Pace { each, rate });
        let last = median(like.iter().filter_map(|it| it.last));
        Some(Lesson { factors, rehearsed, pace, last, of: like.len() })
    }

    /// Remembers a migration. Another one that does so at the same time may be forgotten.
    ///
    /// # Errors
    /// If the file cannot be written, or its directory not be made.
    pub(crate) fn add(mut self, sample: Sample) -> Result<()> {
        self.samples.push(sample);
        let first = self.samples.len().saturating_sub(KEPT);
        let text = serde_json::to_vec(&self.samples[first..])
            .map_err(|error| Error::refused(error.to_string()))?;
        if let Some(dir) = self.path.parent() {
            make_private(dir)?;
        }
        let new = self.path.with_extension(format!("new-{}", std::process::id()));
        let failed = || self.path.display().to_string();
        fs::write(&new, text).and_then(|()| fs::rename(&new, &self.path)).context(failed)
    }
}

/// The middle one.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    fn pause(freeze: u64, transfer: u64, restore: u64) -> Pause {
        let [freeze, transfer, restore] = [freeze, transfer, restore].map(Duration::from_millis);
        Pause { freeze, transfer, restore }
    }

    fn kind(mode: Mode) -> MoveKind {
        of("server", 1, 100, mode)
    }

    fn of(program: &str, tasks: u32, mebibytes: u64, mode: Mode) -> MoveKind {
        let shape = Shape { tasks, memory: mebibytes << 20, ..Shape::default() };
        let (to, program, size) = ("there".to_owned(), program.to_owned(), Size::of(&shape));
        MoveKind { to, mode, is_container: false, program, size, is_measured: false }
    }

    /// A graph of a gigabyte says nothing about a tree of processes, nor about a small graph.
    #[test]
    fn others_teach_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let factors = Factors::between(&pause(1, 1, 1), &pause(2, 2, 2));
        let graph = of("walker", 1, 1000, Mode::PreCopy);
        let measured = MoveKind { is_measured: true, ..graph.clone() };
        let sample = Sample { kind: graph, factors, rehearsed: None, pace: None, last: None };
        Experience::of(dir.path()).add(sample).unwrap();
        assert!(
            Experience::of(dir.path()).lesson(&measured).is_none(),
            "of a link that was guessed"
        );
        let learned = |program, tasks, mebibytes| {
            let kind = of(program, tasks, mebibytes, Mode::PreCopy);
            Experience::of(dir.path()).lesson(&kind).is_some()
        };
        // Which power of two it is just below or above is no difference.
        assert!(
            learned("walker", 1, 1000) && learned("walker", 2, 1030) && learned("walker", 1, 300)
        );
        assert!(!learned("ring", 1, 1000), "another program");
        assert!(!learned("walker", 500, 1000), "many processes");
        assert!(!learned("walker", 1, 100) && !learned("walker", 1, 8000), "another size");
        let files = Shape { tasks: 1, files_in_memory: 1000 << 20, ..Shape::default() };
        let memory = Shape { memory: 1000 << 20, files_in_memory: 0, ..files };
        assert_eq!(Size::of(&files), Size::of(&memory));
    }

    #[test]
    fn what_was_off_is_corrected() {
        let dir = tempfile::tempdir().unwrap();
        let (asked, other) = (kind(Mode::Pipelined), kind(Mode::PreCopy));
        assert_eq!(Experience::of(dir.path()).lesson(&asked), None);
        let pace = Some(Pace { each: 0.5, rate: 5e6 });
        let all = [pause(20, 10, 5), pause(30, 10, 6), pause(900, 900, 900)];
        for (real, last) in all.into_iter().zip([0.1, 0.9, 0.2]) {
            let factors = Factors::between(&pause(10, 10, 10), &real);
            let rehearsed = Some(Factors::between(&pause(10, 10, 20), &real));
            let sample = Sample { kind: asked.clone(), factors, rehearsed, pace, last: Some(last) };
            Experience::of(dir.path()).add(sample).unwrap();
        }
        let lesson = Experience::of(dir.path()).lesson(&asked).unwrap();
        assert_eq!((lesson.of, lesson.pace, lesson.last), (3, pace, Some(0.2)));
        // One that was far off for reasons of its own changes little.
        assert_eq!(lesson.factors.correct(&pause(10, 20, 10)), pause(30, 20, 6));
        assert_eq!(lesson.rehearsed.unwrap().correct(&pause(10, 20, 20)), pause(30, 20, 6));
        assert_eq!(Experience::of(dir.path()).lesson(&other), None);
    }

    /// What rounds brought; of pages that are fetched later the pace says nothing.
    #[test]
    fn rounds_teach_what_the_last_brings() {
        let round = |pages: u64| Round {
            start: std::time::Instant::now(),
            pages,
            bytes: pages * 4096,
            time: Duration::from_millis(pages),
            held: Duration::ZERO,
            frozen: Duration::ZERO,
        };
        let factors = Factors::between(&pause(1, 1, 1), &pause(1, 1, 1));
        let sample = |pages: &[u64], mode| {
            let rounds: Vec<Round> = pages.iter().copied().map(round).collect();
            Sample::new(kind(mode), factors, &rounds, mode)
        };
        let [pre_copy, hybrid] =
            [Mode::PreCopy, Mode::Hybrid].map(|mode| sample(&[1000, 200, 50], mode));
        assert_eq!((pre_copy.last, hybrid.last), (Some(0.05), Some(0.05)));
        assert!(pre_copy.pace.is_some() && hybrid.pace.is_some());
        assert_eq!(sample(&[1000, 4000], Mode::PreCopy).last, Some(1.0), "it has grown");
        assert_eq!(sample(&[1000], Mode::StopAndCopy).last, None);
        assert!(sample(&[0, 0], Mode::PreCopy).is_sane());
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_damaged_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let factors = Factors::between(&pause(1, 1, 1), &pause(2, 2, 2));
        for _ in 0..KEPT + 3 {
            let sample = Sample::new(kind(Mode::Hybrid), factors, &[], Mode::StopAndCopy);
            let sample = Sample { last: Some(0.5), ..sample.rehearsed(Some(factors)) };
            Experience::of(dir.path()).add(sample).unwrap();
        }
        let kept = Experience::of(dir.path());
        assert_eq!(kept.samples.len(), KEPT);
        assert_eq!(kept.lesson(&kind(Mode::Hybrid)).map(|it| it.of), Some(COUNTED));
        let path = dir.path().join("experience.json");
        assert!(path.metadata().unwrap().len() < MAX_LEN);
        let text = fs::read_to_string(&path).unwrap();
        let replaced = |to| text.replace("2.0", to);
        let more = text.replace("0.5", "1.5");
        for wrong in ["{".to_owned(), replaced("0.0"), replaced("1e300"), more] {
            fs::write(&path, wrong).unwrap();
            assert_eq!(Experience::of(dir.path()).lesson(&kind(Mode::Hybrid)), None);
        }
    }
}
