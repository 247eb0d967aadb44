//! The power fails at random points of the work, under real daemons and real jobs: what was not synced is lost, or is
//! partly there, and each job that was acknowledged ends exactly once with the right result all the same.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;
#[path = "power/disk.rs"]
mod disk;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use common::{Daemon, PATIENCE, ask, begin_to_ask, shepherds, until};
use disk::Disk;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_tests::random::Random;

/// Jobs at the same time.
const MOST_LIVE: usize = 4;

/// Lines of a job.
const LINES: u64 = 30;

/// Writes as many as it is told.
const COUNTS: &str = "i=0; while [ $i -lt $0 ]; do echo line $i; i=$((i+1)); sleep 0.02; done";

/// What a job is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It counts.
    Counts,
    /// It is over at once.
    Tells,
    /// It repeats what its client sends.
    Reads,
    /// It repeats what is in a directory of its own.
    Owns,
}

/// A job, and how far its client is.
struct Task {
    kind: Kind,
    /// Bytes of input that were acknowledged.
    sent: usize,
    /// How it had ended when that was seen: its exit status and its run.
    ended: Option<(Value, Value)>,
}

fn line(number: u64) -> String {
    format!("line {number}\n")
}

fn input() -> String {
    (0..LINES).map(line).collect()
}

struct World {
    daemon: Daemon,
    disk: Disk,
    random: Random,
    tasks: BTreeMap<u64, Task>,
    /// Keys under which something was submitted.
    keys: u32,
    /// Runs of the jobs that were checked, and those of them from a checkpoint.
    runs: Cell<usize>,
    woken: Cell<usize>,
    /// How often the power failed at a sync.
    at_syncs: usize,
}

impl World {
    fn new() -> Self {
        // In memory syncing costs nothing.
        let shm = Path::new("/dev/shm");
        let place = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix("torpor-queue-").tempdir_in(place).unwrap();
        let disk = Disk::below(dir.path());
        std::fs::create_dir(dir.path().join("input")).unwrap();
        std::fs::write(dir.path().join("input/seed"), input()).unwrap();
        let config = json!({ "shortest_interval": 100, "mean_time_between_failures": 500 });
        let daemon = Daemon::below(dir, &config, &["--slots", "2"], &disk.env());
        Self {
            daemon,
            disk,
            random: Random::printed(),
            tasks: BTreeMap::new(),
            keys: 0,
            runs: Cell::new(0),
            woken: Cell::new(0),
            at_syncs: 0,
        }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (status, text) = ask(&self.daemon, method, path, "", body);
        (status, serde_json::from_str(&text).unwrap())
    }

    /// The jobs by their numbers.
    fn jobs(&self) -> BTreeMap<u64, Value> {
        let (_, list) = self.ask("GET", "/v1/jobs", "");
        let list = list.as_array().unwrap().iter();
        list.map(|job| (job["id"].as_u64().unwrap(), job.clone())).collect()
    }

    fn live(&self) -> Vec<u64> {
        self.tasks.iter().filter(|(_, task)| task.ended.is_none()).map(|(&id, _)| id).collect()
    }

    /// What happens until the power fails.
    fn work(&mut self) {
        for _ in 0..4 + self.random.below(50) {
            let live = self.live();
            match self.random.below(8) {
                _ if live.len() < MOST_LIVE => {
                    let (kind, job) = self.job();
                    self.keys += 1;
                    self.submit(kind, &job, self.keys);
                }
                0 => self.preempt(live[self.random.place(live.len())]),
                1..4 => self.send(live[self.random.place(live.len())]),
                _ => thread::sleep(Duration::from_millis(self.random.below(40))),
            }
            self.look();
        }
    }

    /// What is to be submitted next.
    fn job(&self) -> (Kind, String) {
        let kinds = [Kind::Counts, Kind::Tells, Kind::Reads, Kind::Owns];
        let kind = kinds[self.random.place(kinds.len())];
        let script = match kind {
            Kind::Counts => COUNTS,
            Kind::Tells => "i=0; while [ $i -lt $0 ]; do echo line $i; i=$((i+1)); done",
            Kind::Reads => "while read line; do echo $line; done",
            Kind::Owns => "while read line; do echo $line; sleep 0.02; done <seed",
        };
        let class = if self.random.below(3) == 0 { "urgent" } else { "batch" };
        let mut job = json!({
            "command": ["sh", "-c", script, LINES.to_string()], "dir": "/", "class": class,
            "stdin": kind == Kind::Reads, "env": [["PATH", std::env::var("PATH").unwrap()]],
        });
        if kind == Kind::Owns {
            job["input"] = json!(self.daemon.dir.path().join("input"));
        }
        (kind, job.to_string())
    }

    /// Submits a job under a key. What was not acknowledged before is, after that.
    fn submit(&mut self, kind: Kind, job: &str, key: u32) {
        let header = format!("Idempotency-Key: {key}\r\n");
        let (status, answer) = ask(&self.daemon, "POST", "/v1/jobs", &header, job);
        assert_eq!(status, 201, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let id = answer["id"].as_u64().unwrap();
        let before = self.tasks.insert(id, Task { kind, sent: 0, ended: None });
        assert!(before.is_none(), "job {id} was acknowledged before");
    }

    /// Lets a job give way, where that is possible.
    fn preempt(&self, id: u64) {
        self.ask("POST", &format!("/v1/jobs/{id}/preempt?means=checkpoint"), "");
        self.ask("POST", &format!("/v1/jobs/{id}/resume"), "");
    }

    /// Sends some more of a job's input.
    fn send(&mut self, id: u64) {
        let (text, sent) = (input(), self.tasks[&id].sent);
        if self.tasks[&id].kind != Kind::Reads || sent > text.len() {
            return;
        }
        let count = (text.len() - sent).min(1 + self.random.place(60));
        let end = u8::from(sent + count == text.len());
        let path = format!("/v1/jobs/{id}/stdin?at={sent}&end={end}");
        let (status, answer) = self.ask("PUT", &path, &text[sent..sent + count]);
        assert_eq!(status, 200, "input of job {id} that was acknowledged is gone: {answer}");
        let task = self.tasks.get_mut(&id).unwrap();
        // Nothing more is to be said when its end is.
        task.sent += count + usize::from(end);
    }

    /// Notes who has ended; who had stays so.
    fn look(&mut self) {
        let jobs = self.jobs();
        for (id, task) in &mut self.tasks {
            let job =
                jobs.get(id).unwrap_or_else(|| panic!("job {id}, which was acknowledged, is gone"));
            let ended = (job["exit"].clone(), job["run"].clone());
            if let Some(before) = &task.ended {
                assert_eq!(*before, ended, "job {id} had ended");
            } else if !job["exit"].is_null() {
                task.ended = Some(ended);
            }
        }
    }

    /// The power fails, and comes back.
    fn cut(&mut self) {
        if self.random.below(3) > 0 {
            self.daemon.kill();
            return self.come_back();
        }
        // Somebody submits a job meanwhile, and is told that it was taken or not.
        let (kind, job) = self.job();
        self.keys += 1;
        let header = format!("Idempotency-Key: {}\r\n", self.keys);
        self.disk.fail_at(self.random.below(3));
        let mut waiting = begin_to_ask(&self.daemon, "POST", "/v1/jobs", &header, &job);
        waiting.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut is_answered = || waiting.read(&mut [0]).is_ok_and(|count| count > 0);
        let mut answered = false;
        until("the power fails at a sync, or the job is acknowledged", || {
            answered = is_answered();
            (answered || self.disk.has_failed()).then_some(())
        });
        self.at_syncs += usize::from(!answered);
        self.daemon.kill();
        let answered = answered || is_answered();
        self.come_back();
        let known = self.jobs().len();
        self.submit(kind, &job, self.keys);
        assert!(!answered || self.jobs().len() == known, "a job was acknowledged, and is gone");
    }

    fn come_back(&mut self) {
        // One that was about to start a shepherd may have done that.
        for _ in 0..2 {
            until("nothing is left", || {
                let left = shepherds(&self.daemon.data());
                for &pid in &left {
                    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
                }
                left.is_empty().then_some(())
            });
            thread::sleep(Duration::from_millis(10));
        }
        self.disk.cut(&self.random);
        self.daemon.launch();
        self.look();
    }

    fn finish(&mut self) {
        for id in self.live() {
            // It may be held since the power failed right then.
            self.ask("POST", &format!("/v1/jobs/{id}/resume"), "");
            while self.tasks[&id].kind == Kind::Reads && self.tasks[&id].sent <= input().len() {
                self.send(id);
            }
        }
        let begun = Instant::now();
        while let Some(id) = self.live().first() {
            let shown = || self.ask("GET", &format!("/v1/jobs/{id}"), "").1;
            assert!(begun.elapsed() < PATIENCE, "it does not end: {}", shown());
            thread::sleep(Duration::from_millis(20));
            self.look();
        }
    }

    /// Lets all jobs end, and forgets them when they were checked.
    fn settle(&mut self) {
        self.finish();
        self.check();
        self.tasks.clear();
    }

    /// Compares what became of the jobs with what should have.
    fn check(&self) {
        for (id, task) in &self.tasks {
            let (_, job) = self.ask("GET", &format!("/v1/jobs/{id}"), "");
            assert_eq!(task.ended.as_ref().unwrap().0, 0, "{job}");
            let out = self.daemon.data().join(format!("jobs/{id}/out"));
            assert_eq!(std::fs::read_to_string(out).unwrap_or_default(), input(), "{job}");
            let starts = check_events(&job);
            self.runs.set(self.runs.get() + starts.len());
            let woken = starts.iter().filter(|from| from.is_some()).count();
            self.woken.set(self.woken.get() + woken);
        }
    }
}

/// A job has ended once, and what was on stable storage of it was there, and whole, each time that it went on.
/// Returns the checkpoint from which each of its runs went on.
fn check_events(job: &Value) -> Vec<Option<u64>> {
    let events = job["events"].as_array().unwrap();
    let of = |kind: &str| events.iter().filter(|event| event["kind"] == kind).count();
    assert_eq!((of("ended"), of("damaged")), (1, 0), "{job}");
    let (mut durable, mut starts) = (None, Vec::new());
    for event in events {
        match event["kind"].as_str().unwrap() {
            "durable" => durable = event["data"]["seq"].as_u64(),
            "starting" => {
                starts.push(event["data"]["from"].as_u64());
                assert!(starts.last() >= Some(&durable), "{durable:?}: {job}");
            }
            _ => {}
        }
    }
    starts
}

#[test]
fn what_was_acknowledged_outlives_the_power() {
    let cuts = if common::long("power: 1,000 cuts instead of 20") { 1000 } else { 20 };
    let mut world = World::new();
    let mut count = 0;
    // On a slow machine it takes more of them until one of the jobs goes on from a checkpoint.
    let has_met_all = |world: &World| world.woken.get() > 0 && world.at_syncs > 0;
    while count < cuts || (!has_met_all(&world) && count < 20 * cuts) {
        world.work();
        world.cut();
        count += 1;
        // What is over is not looked at for ever.
        if count >= cuts || world.tasks.len() > 40 {
            world.settle();
        }
    }
    let (runs, woken) = (world.runs.get(), world.woken.get());
    let at_syncs = world.at_syncs;
    println!("{count} power cuts, {at_syncs} at a sync: {runs} runs, {woken} from a checkpoint");
    assert!(woken > 0, "nothing was saved");
    assert!(at_syncs > 0, "the power never failed at a sync");
}
