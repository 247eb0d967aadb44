//! What the pause is expected to be, from what is known while the tasks still run.

use std::time::Duration;

use torpor_kernel::proc;

use super::{LARGE, Plan, Source};
use crate::error::Result;
use crate::experience::{Experience, Factors, MoveKind, Sample, Size};
use crate::forecast::{FILL, Measured, Pause, float, seconds};
use crate::mode::Mode;
use crate::pace::{LINK, Pace};
use crate::packing::Packing;
use crate::report::{Downtime, Estimate, Round};
use crate::shape::Shape;
use crate::task;

/// What a migration is comparable with.
///
/// # Errors
/// If the process of the plan has ended.
pub(super) fn kind(plan: &Plan) -> Result<MoveKind> {
    let (to, is_container) = (plan.to.address.to_string(), plan.container.is_some());
    let size = Size::of(&Shape::of(&task::tree(plan.pid)?));
    let name = proc::stat(plan.pid).map(|stat| stat.comm).unwrap_or_default();
    let program = String::from_utf8_lossy(&name).into_owned();
    let is_measured = plan.measures_link();
    Ok(MoveKind { to, mode: plan.mode, is_container, program, size, is_measured })
}

/// Bytes of memory of which twins are made in a second, when the first round is of a whole tree: 256 MiB take 160 ms.
const TWINS: u64 = 1_700_000_000;
/// How often files in memory are unpacked: when they are judged, and when they are made.
const UNPACKED: u32 = 2;

/// How long a restore is at files in memory that a dump has stored, beside that dump: it unpacks them twice, and compares them
/// with what is there or writes them. Of a database with 240 MB of them it was 1.4 to 1.7 times as long, in three migrations
/// (2026-11-29).
const MADE: f64 = 1.5;

/// How long a restore takes, without pages, where a dump takes `freeze`: as long, but for files in memory that are stored.
pub(super) fn restore_after(freeze: Duration, shape: &Shape) -> Duration {
    match shape.stores_files {
        true => freeze + saving(freeze, shape).mul_f64(MADE - 1.0),
        false => freeze,
    }
}

/// The part of a dump that takes `freeze`, without pages, in which it saves files in memory.
pub(super) fn saving(freeze: Duration, shape: &Shape) -> Duration {
    freeze.mul_f64(shape.archive().as_secs_f64() / shape.cost().as_secs_f64())
}

/// What is known, before anything was stopped, of the time for which tasks are when no round comes before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unprepared {
    /// How long the dump takes, without pages.
    pub freeze: Duration,
    /// The part of it in which files in memory are saved.
    pub saving: Duration,
    /// How long the restore takes, without pages.
    pub restore: Duration,
    /// Bytes of files in memory as they go over the link.
    pub files: u64,
}

impl Unprepared {
    /// That of a tree of this shape, some of whose files in memory are packed to see.
    pub(super) fn of(pid: i32, shape: &Shape) -> Self {
        let packing = if shape.files_in_memory < LARGE { None } else { Packing::sample(pid) };
        packing.map_or_else(|| Self::by_shape(shape), |packing| Self::by_packing(shape, &packing))
    }

    fn by_shape(shape: &Shape) -> Self {
        let (freeze, saving) = (shape.cost(), shape.archive());
        Self { freeze, saving, restore: freeze, files: shape.files_in_memory }
    }

    fn by_packing(shape: &Shape, packing: &Packing) -> Self {
        let others = shape.cost().saturating_sub(shape.archive());
        let made = packing.unpack * UNPACKED + seconds(float(packing.bytes) / FILL);
        Self {
            freeze: others + packing.pack,
            saving: packing.pack,
            restore: others + made,
            files: packing.packed,
        }
    }
}

impl Source<'_> {
    /// What is expected if the tasks were stopped now. Nothing, if they have ended.
    pub(super) fn estimate(&self) -> Option<Estimate> {
        let stores_files = self.compares_files;
        let shape = Shape { stores_files, ..Shape::of(&task::tree(self.plan.pid).ok()?) };
        let measured = match self.rounds.first() {
            Some(first) => self.measured(first, &shape),
            None => self.unprepared(&shape),
        };
        let memory = float(measured.memory);
        let left = left(&self.rounds).map_or(memory, |left| left.min(memory));
        let plain = measured.pause(self.plan.mode, left);
        let lesson = self.experience.lesson(&self.kind);
        let pause = lesson.map_or(plain, |lesson| lesson.factors.correct(&plain));
        let after = measured.after(self.plan.mode, left);
        let learned_from = lesson.map_or(0, |lesson| lesson.of);
        Some(Estimate { measured, plain, pause, after, learned_from })
    }

    /// What there is if there were no rounds.
    fn unprepared(&self, shape: &Shape) -> Measured {
        let Unprepared { freeze, saving, restore, files } = Unprepared::of(self.plan.pid, shape);
        Measured {
            memory: shape.memory,
            state: files,
            link: self.link_speed.map_or(LINK, float),
            freeze,
            saving,
            restore,
            fill: FILL,
            scan: self.files_time,
            each: freeze,
            ..Measured::default()
        }
    }

    /// What the rounds say, of which this was the first.
    fn measured(&self, first: &Round, shape: &Shape) -> Measured {
        let builds = self.plan.builds_early();
        let pace = pace(&self.rounds, builds).unwrap_or(Pace { each: 0.0, rate: LINK });
        // The first round there was of all of the tree.
        let whole = (builds || self.brings_files).then_some(first.frozen);
        let frozen = self.rounds.last().map_or(Duration::ZERO, |last| last.frozen);
        let freeze = freeze(whole, frozen, shape);
        // Until a round has brought it, only the files in memory are known of what is no page.
        let state = match self.state_bytes {
            0 => shape.files_in_memory,
            all => all,
        };
        Measured {
            memory: first.bytes.saturating_sub(self.compared_bytes),
            state,
            compared: self.compared_bytes,
            archived: if self.compares_files { shape.files_in_memory } else { 0 },
            link: pace.rate,
            freeze,
            saving: saving(freeze, shape),
            restore: restore_after(freeze, shape),
            fill: FILL,
            scan: self.files_time,
            each: seconds(pace.each).saturating_sub(frozen) + freeze,
            ..Measured::default()
        }
    }

    /// How far the estimate was off is remembered for the next one.
    pub(super) fn learn(&self) {
        let Some(estimate) = &self.estimate else { return };
        let real = pause(&self.downtime);
        let factors = Factors::between(&estimate.plain, &real);
        let sample = Sample::new(self.kind.clone(), factors, &self.rounds, self.plan.mode);
        let expected = rehearsed(&estimate.measured, &real, &sample, self.plan.mode);
        let sample = sample.rehearsed(expected.map(|it| Factors::between(&it, &real)));
        // Others may have learned something meanwhile.
        if let Err(error) = Experience::of(&self.plan.state_dir).add(sample) {
            tracing::warn!("{error}");
        }
    }
}

/// How long rounds take. Where the first one is what a tree is built of, it takes as long as that: those after it say more,
/// if there are several.
fn pace(rounds: &[Round], builds: bool) -> Option<Pace> {
    match rounds {
        [_, others @ ..] if builds && others.len() > 1 => Pace::of(others),
        all => Pace::of(all),
    }
}

/// How long the last round stops the tasks before it sends pages. It looks at all that the first one of a tree looks at (`whole`),
/// and makes no twins of tasks that go on; those between look at memory only. It is between the two, which may be far apart: the
/// geometric mean; but files in memory are read again in whole. Without a whole one, all else costs what its `shape` says.
fn freeze(whole: Option<Duration>, last: Duration, shape: &Shape) -> Duration {
    match whole {
        Some(whole) => {
            let files = shape.archive().as_secs_f64();
            let all = shape.cost().as_secs_f64() + float(shape.memory) / float(TWINS);
            let files = whole.mul_f64(files / all);
            let others = whole.saturating_sub(files);
            files + seconds((others.as_secs_f64() * last.as_secs_f64()).sqrt())
        }
        None => shape.cost() + last,
    }
}

/// What a rehearsal of a migration with rounds would have expected of its pause, had it known how long the tasks were looked at and
/// what the rounds were: a tree that is made as fast as it was read.
fn rehearsed(measured: &Measured, real: &Pause, took: &Sample, mode: Mode) -> Option<Pause> {
    let (pace, last) = took.rounds().filter(|_| mode.has_rounds())?;
    let beside = if mode.is_lazy() { Duration::ZERO } else { measured.saving };
    let freeze = real.freeze + beside;
    let restore = freeze + measured.restore.saturating_sub(measured.freeze);
    let known =
        Measured { link: pace.rate, freeze, restore, each: seconds(pace.each), ..*measured };
    Some(known.pause(mode, last * float(known.memory)))
}

fn pause(of: &Downtime) -> Pause {
    Pause { freeze: of.freeze, transfer: of.transfer, restore: of.restore() }
}

/// Bytes that a further round would have: what is written while one as long as the last is taken.
///
/// Programs that meet pages again write less in a longer time than its length says: a power of it (Heaps' law), which is that of
/// the rounds before. Of one round that says only how much was written in one time, it is as much in each.
fn left(rounds: &[Round]) -> Option<f64> {
    let [.., last] = rounds else { return None };
    let time = |round: &Round| round.time.as_secs_f64().max(1e-6).ln();
    let written = |round: &Round| float(round.bytes.max(1)).ln();
    // What was written while a round was taken is what the next one brings.
    let points: Vec<(f64, f64)> =
        rounds.windows(2).map(|pair| (time(&pair[0]), written(&pair[1]))).collect();
    if points.is_empty() {
        return Some(float(last.bytes));
    }
    let count = float(points.len() as u64);
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|it| it.0), mean(|it| it.1));
    let spread: f64 = points.iter().map(|it| (it.0 - x) * (it.0 - x)).sum();
    let slope = points.iter().map(|it| (it.0 - x) * (it.1 - y)).sum::<f64>() / spread;
    // Of times that are all the same it is none.
    let power = if slope.is_finite() { slope.clamp(0.0, 1.0) } else { 1.0 };
    Some((y + power * (time(last) - x)).exp())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Instant;

    use super::*;

    fn round(megabytes: u64, millis: u64) -> Round {
        Round {
            start: Instant::now(),
            pages: megabytes * 250,
            bytes: megabytes * 1_000_000,
            time: Duration::from_millis(millis),
            held: Duration::ZERO,
            frozen: Duration::from_millis(2),
        }
    }

    #[test]
    fn the_last_round_looks_at_more_than_the_one_before() {
        let [whole, last] = [160, 10].map(Duration::from_millis);
        let plain = Shape::default();
        assert_eq!(freeze(Some(whole), last, &plain).as_millis(), 40);
        assert_eq!(freeze(None, last, &plain), plain.cost() + last);
        // Nearly all of it is files in memory, which the last round reads as well.
        let files = Shape { files_in_memory: 1 << 30, ..plain };
        assert!(freeze(Some(whole), last, &files).as_millis() > 158);
        assert!(freeze(None, last, &files) > files.archive());
    }

    /// The first round of a tree is long since twins of its tasks are made: files that are read again are not what took it.
    #[test]
    fn twins_are_made_in_the_first_round_only() {
        let [whole, last] = [500, 9].map(Duration::from_millis);
        let files = Shape { files_in_memory: 240 << 20, stores_files: true, ..Shape::default() };
        let with_memory = Shape { memory: 220 << 20, ..files };
        let [without, with] = [files, with_memory].map(|shape| freeze(Some(whole), last, &shape));
        assert!(with + Duration::from_millis(50) < without, "{with:?} {without:?}");
        assert!((350..450).contains(&with.as_millis()), "{with:?}");
    }

    /// What is stored is unpacked twice. A tree without such files is made as fast as it is read.
    #[test]
    fn files_that_are_stored_take_longer_to_make() {
        let freeze = Duration::from_millis(254);
        let plain = Shape { tasks: 1, ..Shape::default() };
        let packed = Shape { files_in_memory: 240 << 20, ..plain };
        let stored = Shape { stores_files: true, ..packed };
        assert_eq!(restore_after(freeze, &plain), freeze);
        assert_eq!(restore_after(freeze, &packed), freeze);
        // 360 were seen.
        let made = restore_after(freeze, &stored).as_millis();
        assert!((340..400).contains(&made), "{made}");
        let none = Shape { stores_files: true, ..plain };
        assert_eq!(restore_after(freeze, &none), freeze);
    }

    #[test]
    fn the_next_round_is_like_those_before() {
        let (first, second) = (round(100, 1000), round(10, 100));
        // 10 MB/s are written: while the second round took 100 ms, 1 MB.
        assert_eq!(left(&[first.clone(), second]).unwrap().round(), 1e6);
        let only = std::slice::from_ref(&first);
        assert_eq!((left(only), left(&[])), (Some(1e8), None));
    }

    /// Rounds of a database (megabytes, milliseconds), of which the last one brought 13.5 MB. By the two before alone it were 54.
    #[test]
    fn pages_that_are_met_again_are_sent_once() {
        let all = [(217, 5626), (44, 502), (31, 362), (11, 139), (9, 119), (25, 261)];
        let rounds: Vec<Round> = all.iter().map(|&(bytes, time)| round(bytes, time)).collect();
        let expected = left(&rounds).unwrap() / 1e6;
        assert!((12.0..22.0).contains(&expected), "{expected}");
        // Rounds of one length: what is written in it, in the mean.
        let same = [(100, 500), (50, 500), (50, 500)].map(|(bytes, time)| round(bytes, time));
        assert_eq!(left(&same).unwrap().round(), 5e7);
    }

    /// A tree that was looked at for 70 ms is made in as many, and what the last round brings is brought into place.
    #[test]
    fn what_a_rehearsal_would_have_said_is_learned() {
        let ms = Duration::from_millis;
        let measured = Measured {
            memory: 1_300_000_000,
            freeze: ms(20),
            restore: ms(20),
            fill: FILL,
            ..Measured::default()
        };
        let real = Pause { freeze: ms(70), transfer: ms(30), restore: ms(50) };
        // The last round is as long as its pages are many: each brings 100 MB in 100 ms.
        let rounds = [round(1000, 1000), round(100, 100), round(10, 10)];
        let said_of = |rounds: &[Round], mode| {
            let shape = Shape::default();
            let (to, program, size) = (String::new(), String::new(), Size::of(&shape));
            let kind =
                MoveKind { to, mode, is_container: false, program, size, is_measured: false };
            let factors = Factors::between(&real, &real);
            rehearsed(&measured, &real, &Sample::new(kind, factors, rounds, mode), mode)
        };
        let said = |mode| said_of(&rounds, mode);
        let [hybrid, pipelined, pre_copy] =
            [Mode::Hybrid, Mode::Pipelined, Mode::PreCopy].map(|mode| said(mode).unwrap());
        assert_eq!((hybrid.freeze, hybrid.restore), (ms(70), ms(70)));
        assert_eq!(pipelined.restore, ms(80));
        assert_eq!(pre_copy.restore, ms(1070));
        assert_eq!(said(Mode::StopAndCopy), None);
        assert_eq!(said_of(&rounds[..1], Mode::PreCopy), None);
    }

    /// The destination builds a tree while the first round comes, which no other one has to wait for.
    #[test]
    fn building_a_tree_is_no_pace() {
        let rounds = [round(350, 3650), round(40, 190), round(10, 70), round(20, 110)];
        let rate = |builds| (pace(&rounds, builds).unwrap().rate / 1e6).round();
        assert_eq!((rate(true), rate(false)), (250.0, 104.0));
        // One of the others says nothing about what each takes.
        assert_eq!(pace(&rounds[..2], true), Pace::of(&rounds[..2]));
    }

    /// What packs fast is dumped fast, and goes over the link as what is left of it.
    #[test]
    fn files_that_are_packed_take_what_some_of_them_took() {
        let shape = Shape { files_in_memory: 240 << 20, ..Shape::default() };
        let [pack, unpack] = [1200, 300].map(Duration::from_millis);
        let packing = Packing { bytes: 240 << 20, packed: 60 << 20, pack, unpack };
        let known = Unprepared::by_packing(&shape, &packing);
        assert_eq!(known.freeze, Shape::default().cost() + pack);
        assert_eq!(known.saving, pack);
        assert_eq!(known.files, 60 << 20);
        assert!(known.restore > unpack * 2 && known.restore < pack, "{known:?}");
        let guess = Unprepared::by_shape(&shape);
        assert_eq!((guess.freeze, guess.files), (shape.cost(), 240 << 20));
    }
}
