//! Power cuts, simulated: the daemon's own state machine on a real directory, with jobs that
//! are simulated, and a disk that at each cut holds what was synced, and of the rest anything.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::config::Config;
use super::core::Core;
use super::link::Run;
use super::record::Place;
use super::store::Along;
use crate::files::{self, JobDir};
use crate::preemption::Means;
use crate::scheduler::JobId;
use crate::shepherd::digests::{self, Which};
use crate::shepherd::message::{Ending, Exit, Report, RunPhase, Saved};
use crate::shepherd::{ENDING, checkpoint, read_spec};
use crate::spec::Spec;

/// Power cuts of this test: 1,000 in the long tests.
fn cuts() -> u32 {
    let long = std::env::var_os("TORPOR_LONG").is_some_and(|value| value == "1");
    if long { 1000 } else { 250 }
}

/// Lines that each job writes.
const LINES: u64 = 20;

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most.max(1)
    }

    fn once_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

fn line(number: u64) -> String {
    format!("line {number}\n")
}

/// The shepherd of a job, and the job.
struct Life {
    run: u64,
    /// The next line.
    next: u64,
    /// Checkpoints that are complete and not on stable storage yet.
    unsettled: Vec<u64>,
    /// The checkpoint that the next one builds on.
    base: Option<u64>,
}

struct PoweredMachine {
    data: PathBuf,
    core: Core,
    lives: BTreeMap<JobId, Life>,
    /// Bytes of each job's output that are on stable storage.
    synced: BTreeMap<JobId, u64>,
    random: Random,
    /// Checkpoints that were damaged after they had come to stable storage.
    rotten: u32,
}

fn open(data: &Path) -> Core {
    let config = Config { slots: Some(2), shortest_interval: i64::MAX, ..Config::default() };
    Core::open(data.to_owned(), config).unwrap()
}

impl PoweredMachine {
    fn step(&mut self) {
        self.core.schedule();
        self.begin_runs();
        let ids: Vec<JobId> = self.lives.keys().copied().collect();
        for id in ids {
            match self.random.below(6) {
                0 => self.settle(id),
                1 => self.save(id),
                2 => self.preempt(id),
                _ => self.work(id),
            }
        }
    }

    /// What a shepherd does first: it cuts the output to what counts.
    fn begin_runs(&mut self) {
        for record in self.core.jobs.values().cloned().collect::<Vec<_>>() {
            let (id, dir) = (record.id, self.core.dir(record.id));
            let known = self.lives.get(&id).is_some_and(|life| life.run == record.run);
            if record.place != Place::Starting || known {
                continue;
            }
            // As whoever starts a run does.
            if let Some(seq) = record.durable
                && let Err(damage) = digests::verify(&dir, seq, Which::All)
            {
                self.core.damaged(id, record.run, &damage);
                continue;
            }
            let (length, next) = match record.durable {
                None => (record.base[0], 0),
                Some(seq) => {
                    let saved = checkpoint::record(&dir.checkpoint(seq)).unwrap();
                    let text = fs::read(dir.checkpoint(seq).join("image")).unwrap();
                    (saved.written[0], String::from_utf8(text).unwrap().parse().unwrap())
                }
            };
            fs::create_dir_all(dir.run(record.run)).unwrap();
            let out = OpenOptions::new().create(true).append(true).open(dir.out()).unwrap();
            assert!(out.metadata().unwrap().len() >= length, "output that counts is gone");
            out.set_len(length).unwrap();
            let synced = self.synced.entry(id).or_default();
            *synced = (*synced).min(length);
            let life = Life { run: record.run, next, unsettled: Vec::new(), base: None };
            self.lives.insert(id, life);
            let state = Report::State {
                job: id,
                run: record.run,
                phase: RunPhase::Running,
                checkpoint: None,
            };
            self.core.report(id, record.run, state);
        }
    }

    fn work(&mut self, id: JobId) {
        let dir = self.core.dir(id);
        if self.core.jobs[&id].place != Place::Running {
            return;
        }
        let count = 1 + self.random.below(5);
        let Some(life) = self.lives.get_mut(&id) else { return };
        let mut out = OpenOptions::new().append(true).open(dir.out()).unwrap();
        for _ in 0..count.min(LINES - life.next) {
            out.write_all(line(life.next).as_bytes()).unwrap();
            life.next += 1;
        }
        if life.next == LINES {
            self.end(id, &dir);
        }
    }

    /// The last word is on stable storage before it is said, and may never be said.
    fn end(&mut self, id: JobId, dir: &JobDir) {
        let Some(life) = self.lives.remove(&id) else { return };
        self.synced.insert(id, fs::metadata(dir.out()).unwrap().len());
        let ending = Ending::good(id, life.run);
        files::write_stable(&dir.run(life.run).join(ENDING), &ending).unwrap();
        if self.random.once_in(3) {
            return self.cut();
        }
        self.core.run_over(id, life.run, Some(ending));
    }

    fn save(&mut self, id: JobId) {
        if self.core.jobs[&id].place == Place::Running {
            self.checkpoint(id, true);
        }
    }

    fn preempt(&mut self, id: JobId) {
        if self.core.jobs[&id].place != Place::Running {
            return;
        }
        self.core.preempt(id, Some(Means::Checkpoint)).unwrap();
        self.checkpoint(id, false);
        self.core.set_held(id, false);
        // The shepherd has nothing to do any more, and is killed as often as not.
        self.settle(id);
        if let Some(life) = self.lives.remove(&id) {
            self.core.lose(id, "its shepherd was killed");
            assert!(life.run <= self.core.jobs[&id].run);
        }
    }

    /// Writes a checkpoint; for one that is kept the daemon gives the order first.
    fn checkpoint(&mut self, id: JobId, keep: bool) {
        if keep {
            let _ = self.core.checkpoint(id, true, 0);
        }
        let dir = self.core.dir(id);
        let seq = self.core.jobs[&id].next_checkpoint - 1;
        let Some(life) = self.lives.get_mut(&id) else { return };
        let place = dir.checkpoint(seq);
        fs::create_dir(&place).unwrap();
        let saved = checkpoint::CheckpointRecord {
            seq,
            written: [fs::metadata(dir.out()).unwrap().len(), 0],
            boot: "the boot before".to_owned(),
            base: life.base.filter(|base| dir.checkpoint(*base).exists()),
            ..checkpoint::CheckpointRecord::default()
        };
        fs::write(place.join("image"), life.next.to_string()).unwrap();
        fs::write(place.join("record.json"), serde_json::to_vec(&saved).unwrap()).unwrap();
        life.unsettled.push(seq);
        life.base = Some(seq);
        let run = life.run;
        let report = Saved { seq, ended_tasks: !keep, ..Saved::default() };
        self.core.report(id, run, Report::Saved(report));
    }

    /// Puts the oldest checkpoint that is not on stable storage there. The power may fail
    /// before the daemon has noted that, but after it has removed older ones.
    fn settle(&mut self, id: JobId) {
        let dir = self.core.dir(id);
        let Some(life) = self.lives.get_mut(&id).filter(|life| !life.unsettled.is_empty()) else {
            return;
        };
        let (seq, run) = (life.unsettled.remove(0), life.run);
        let length = fs::metadata(dir.out()).unwrap().len();
        fs::File::open(dir.out()).unwrap();
        OpenOptions::new().create(true).append(true).open(dir.err()).unwrap();
        checkpoint::settle(&dir, seq).unwrap();
        self.synced.insert(id, length);
        match self.random.below(8) {
            0 => self.cut(),
            1 => {
                super::disk::keep_only(&dir, seq).remove();
                self.cut();
            }
            _ => self.core.report(id, run, Report::Durable { seq }),
        }
    }

    /// The power fails, and comes back.
    fn cut(&mut self) {
        for id in self.core.jobs.keys().copied().collect::<Vec<_>>() {
            self.damage(id);
        }
        // What runs now was started in the boot before.
        let live = self.core.jobs.values_mut().filter(|job| job.place != Place::Ended);
        for record in live {
            record.boot.clear();
            let _ = self.core.store.save(record, 0, None, Along::default());
        }
        // A commit that was torn, or never made.
        if self.random.once_in(2) {
            let wal = self.data.join("queue.db-wal");
            if let Ok(mut wal) = OpenOptions::new().append(true).open(wal) {
                let count = usize::try_from(self.random.below(5000)).unwrap();
                wal.write_all(&vec![0xa5; count]).unwrap();
            }
        }
        self.lives.clear();
        // What is not on disk is not in the new one: it only reads.
        self.core = open(&self.data);
        for record in self.core.jobs.values().filter(|job| job.place != Place::Ended) {
            assert_eq!(read_spec(&self.core.dir(record.id)).unwrap(), record.spec);
        }
        self.recover();
    }

    /// What was submitted may not have come to the disk but in the store.
    fn damage_spec(&mut self, dir: &JobDir) {
        let never_ran = !dir.out().exists();
        match self.random.below(6) {
            0 if never_ran => files::remove_trees(&[dir.path()]).unwrap(),
            1 => fs::remove_file(dir.spec()).unwrap_or_default(),
            2 => fs::write(dir.spec(), "").unwrap_or_default(),
            _ => {}
        }
    }

    /// What was not synced of a job's files is anything.
    fn damage(&mut self, id: JobId) {
        let dir = self.core.dir(id);
        self.damage_spec(&dir);
        let synced = self.synced.get(&id).copied().unwrap_or(0);
        if let Ok(out) = OpenOptions::new().write(true).open(dir.out()) {
            let length = out.metadata().unwrap().len();
            if length > synced {
                let kept = synced + self.random.below(length - synced + 1);
                out.set_len(kept).unwrap();
                if self.random.once_in(2) {
                    // The file has grown, and its content has not come to the disk.
                    out.set_len(synced).unwrap();
                    out.set_len(kept).unwrap();
                }
            }
        }
        for entry in fs::read_dir(dir.path()).into_iter().flatten().flatten() {
            let place = entry.path();
            let is_checkpoint = entry.file_name().to_string_lossy().starts_with("checkpoint-");
            if !is_checkpoint {
                continue;
            }
            if place.join("durable").exists() {
                // What is on stable storage may be damaged there, too.
                if self.random.once_in(40) {
                    fs::write(place.join("image"), "1").unwrap();
                    self.rotten += 1;
                }
                continue;
            }
            match self.random.below(4) {
                0 => files::remove_trees(&[place]).unwrap(),
                1 => fs::write(place.join("record.json"), "").unwrap(),
                2 => fs::write(place.join("image"), [0; 3]).unwrap(),
                _ => {}
            }
        }
    }

    /// As the daemon does when it starts: runs without a shepherd are over.
    fn recover(&mut self) {
        let live = self.core.jobs.values().filter(|job| job.place != Place::Ended);
        let found: Vec<_> = live
            .filter(|job| job.run > 0 && (job.place.holds_slots() || job.shepherd))
            .map(|job| (job.id, job.run))
            .collect();
        self.core.schedule_nothing_yet(&found.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        for (id, run) in found {
            let dir = self.core.dir(id);
            super::disk::adopt(&dir, None);
            let ending = Run { job: id, run, dir }.last_word();
            self.core.run_over(id, run, ending);
        }
    }
}

#[test]
fn power_cuts_lose_nothing_and_double_nothing() {
    let cuts = cuts();
    let place = Path::new("/dev/shm");
    let dir = if place.is_dir() { tempfile::tempdir_in(place) } else { tempfile::tempdir() };
    let dir = dir.unwrap();
    fs::create_dir(dir.path().join("jobs")).unwrap();
    let mut world = PoweredMachine {
        data: dir.path().to_owned(),
        core: open(dir.path()),
        lives: BTreeMap::new(),
        synced: BTreeMap::new(),
        random: Random(0x9e37_79b9_7f4a_7c15),
        rotten: 0,
    };
    let mut submitted = Vec::new();
    let spec = || Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
    for _ in 0..cuts {
        if world.core.jobs.values().filter(|job| job.place != Place::Ended).count() < 4 {
            submitted.push(world.core.submit(spec(), None).unwrap());
        }
        for _ in 0..world.random.below(8) {
            world.step();
        }
        world.cut();
    }
    for _ in 0..10_000 {
        world.step();
        if world.core.jobs.values().all(|job| job.place == Place::Ended) {
            break;
        }
    }
    let (mut done, mut given_up) = (0_u32, 0_u32);
    for id in submitted {
        let record = &world.core.jobs[&id];
        let events = world.core.store.events(Some(id), 0, 100_000).unwrap();
        assert_eq!(events.iter().filter(|event| event.kind == "ended").count(), 1, "job {id}");
        if record.exit == Some(Exit::Code(0)) {
            let expected: String = (0..LINES).map(line).collect();
            let found = fs::read_to_string(world.core.dir(id).out()).unwrap();
            assert_eq!(found, expected, "job {id}");
            done += 1;
        } else {
            let note = record.note.as_deref().unwrap_or_default();
            assert!(note.contains("without a checkpoint in between"), "job {id}: {note}");
            given_up += 1;
        }
    }
    let rotten = world.rotten;
    println!(
        "{cuts} power cuts, {rotten} damaged checkpoints: {done} jobs done, {given_up} given up with \
         the reason"
    );
    assert!(rotten > 0);
    assert!(done * 25 > cuts && given_up * 20 < done, "{done} done, {given_up} given up");
}
