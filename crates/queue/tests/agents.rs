//! Machines of a pool fail at random points of their work while a job goes to and fro between them: it ends once, on one of
//! them, and what it has written is whole.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::pair::pair;
use common::{Daemon, PATIENCE, ask, counted, leaks, long, shepherds, until, work_of};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use torpor_kernel::proc;
use torpor_tests::random::Random;

/// The names of the machines in the pool.
const NAMES: [&str; 2] = ["a", "b"];

/// Counts until a file is there.
const COUNTS: &str = "i=0; until [ -e $0 ]; do echo $i; i=$((i+1)); sleep 0.02; done; echo end";

/// Who fails while a job goes from one machine to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// The daemon of the machine that it leaves.
    Sender,
    /// The daemon of the machine that it goes to.
    Receiver,
    /// Who keeps it on the machine that it leaves, and saves it.
    Saver,
    /// Who keeps it on the other, and brings it back.
    Waker,
}

const VICTIMS: [Victim; 4] = [Victim::Sender, Victim::Receiver, Victim::Saver, Victim::Waker];

/// Where a job is: a machine and its number there. The last one is where it runs, and each of those before follows it.
type Links = Vec<(usize, u64)>;

/// A job that goes from one machine to the other, with the client that waits for that.
struct Going {
    from: (usize, u64),
    /// Who has kept jobs on the other machine before.
    keepers: Vec<i32>,
    client: Child,
}

struct Pool {
    /// What certificates and jobs need.
    dir: TempDir,
    machines: [Daemon; 2],
    /// Jobs that were submitted.
    submitted: u32,
}

impl Pool {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let machines = pair(dir.path(), &json!({}));
        Self { dir, machines, submitted: 0 }
    }

    /// The jobs of a machine.
    fn jobs(&self, machine: usize) -> Vec<Value> {
        let (_, list) = ask(&self.machines[machine], "GET", "/v1/jobs", "", "");
        serde_json::from_str(&list).unwrap()
    }

    fn job(&self, (machine, id): (usize, u64)) -> Value {
        self.jobs(machine).into_iter().find(|job| job["id"] == id).unwrap()
    }

    /// When this is there the job that was submitted last ends.
    fn may_end(&self) -> std::path::PathBuf {
        self.dir.path().join(format!("may-end-{}", self.submitted))
    }

    fn submit(&mut self, machine: usize) -> Links {
        self.submitted += 1;
        let may_end = self.may_end();
        let command = ["sh", "-c", COUNTS, may_end.to_str().unwrap()];
        let id = self.machines[machine].submit(&[], &command);
        self.machines[machine].wait_for_output(id, "3\n");
        vec![(machine, id)]
    }

    /// Lets a job go to the other machine.
    fn begin(&self, from: (usize, u64), live: bool) -> Going {
        let (machine, id) = from;
        let keepers = shepherds(&self.machines[1 - machine].data());
        let id = id.to_string();
        let mut client = self.machines[machine].queue(&["move", &id, "--to", NAMES[1 - machine]]);
        client.args(live.then_some("--live")).stdout(Stdio::null()).stderr(Stdio::null());
        Going { from, keepers, client: client.spawn().unwrap() }
    }

    /// Where else the job is, or that it has stayed: once its client knows.
    fn arrived(&self, going: &mut Going) -> Option<Option<(usize, u64)>> {
        going.client.try_wait().unwrap()?;
        self.settled(going.from)
    }

    /// The same for a job whose client has gone.
    fn settled(&self, from: (usize, u64)) -> Option<Option<(usize, u64)>> {
        let job = self.job(from);
        assert!(job["exit"].is_null(), "it has ended: {job}");
        if job["destination"].is_null() {
            return self.runs(from).then_some(None);
        }
        let there = job["destination"]["job"].as_u64().filter(|_| job["state"] == "moved")?;
        let place = (1 - from.0, there);
        self.runs(place).then_some(Some(place))
    }

    /// All about a job, and about what it has become on the other machine.
    fn shown(&self, (machine, id): (usize, u64)) -> String {
        let here = self.machines[machine].show(id);
        let there = here["destination"]["job"].as_u64();
        let there = there.map(|id| self.machines[1 - machine].show(id));
        format!("{here:#} {there:#?}")
    }

    /// Whether a job does, and not only has a shepherd, or may have one.
    fn runs(&self, (machine, id): (usize, u64)) -> bool {
        let (_, shown) = ask(&self.machines[machine], "GET", &format!("/v1/jobs/{id}"), "", "");
        let job: Value = serde_json::from_str(&shown).unwrap();
        let kinds = job["events"].as_array().unwrap().iter().rev();
        let mut kinds = kinds.filter_map(|event| event["kind"].as_str());
        let begins = ["started", "running", "resumed", "not-saved"];
        let ends = ["starting", "waking", "giving-way", "preempted", "lost", "not-resumed"];
        let last = kinds.find(|kind| begins.contains(kind) || ends.contains(kind));
        job["state"] == "running" && last.is_some_and(|kind| begins.contains(&kind))
    }

    /// The process that fails, once it is there.
    fn process(&self, going: &Going, victim: Victim) -> Option<i32> {
        let (machine, id) = going.from;
        match victim {
            Victim::Sender => Some(self.machines[machine].pid()),
            Victim::Receiver => Some(self.machines[1 - machine].pid()),
            Victim::Saver => self.shepherd_of(machine, id),
            Victim::Waker => {
                let mut all = shepherds(&self.machines[1 - machine].data()).into_iter();
                all.find(|pid| !going.keepers.contains(pid))
            }
        }
    }

    fn shepherd_of(&self, machine: usize, id: u64) -> Option<i32> {
        let data = self.machines[machine].data();
        let dir = data.join(format!("jobs/{id}"));
        shepherds(&data).into_iter().find(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(3) == Some(dir.as_os_str().as_encoded_bytes())
        })
    }

    /// How much work it is for each of them when a job goes, and nobody fails.
    fn measure(&mut self) -> [u64; 4] {
        let links = self.submit(0);
        let mut going = self.begin(links[0], false);
        let before = VICTIMS.map(|victim| {
            let pid = self.process(&going, victim);
            pid.map(|pid| (pid, work_of(pid).unwrap_or(0)))
        });
        let mut work = [0; 4];
        let place = until("it is there", || {
            for (at, victim) in VICTIMS.into_iter().enumerate() {
                let process = before[at].or_else(|| Some((self.process(&going, victim)?, 0)));
                let done = process.and_then(|(pid, before)| Some(work_of(pid)? - before));
                work[at] = work[at].max(done.unwrap_or(0));
            }
            self.arrived(&mut going)
        });
        self.finish(&[links, vec![place.unwrap()]].concat());
        println!("reads and writes of sender, receiver, saver and waker: {work:?}");
        assert!(work.iter().all(|&work| work > 0), "{work:?}");
        work
    }

    /// Kills `victim` when it has worked so much, if the job does not arrive before; whether it did.
    fn strike(&self, going: &mut Going, victim: Victim, at: u64) -> bool {
        let mut process = None;
        loop {
            // To look whether it has arrived makes work, too.
            for _ in 0..50 {
                if process.is_none() {
                    let pid = self.process(going, victim);
                    process = pid.and_then(|pid| Some((pid, work_of(pid)?)));
                }
                let Some((pid, before)) = process else { break };
                match work_of(pid) {
                    Some(work) if work < before + at => {}
                    Some(_) => {
                        return kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).is_ok();
                    }
                    None => return false,
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            if self.arrived(going).is_some() {
                return false;
            }
        }
    }

    /// Lets a job go to the other machine while `victim` fails; whether that did in time.
    fn go(&mut self, links: &mut Links, live: bool, victim: Victim, at: u64) -> bool {
        let mut going = self.begin(*links.last().unwrap(), live);
        let struck = self.strike(&mut going, victim, at);
        let machine = match victim {
            Victim::Sender => Some(going.from.0),
            Victim::Receiver => Some(1 - going.from.0),
            Victim::Saver | Victim::Waker => None,
        };
        if let Some(machine) = machine.filter(|_| struck) {
            self.machines[machine].kill();
            self.machines[machine].launch();
        }
        let begun = Instant::now();
        let place = loop {
            if let Some(place) = self.arrived(&mut going) {
                break place;
            }
            assert!(begun.elapsed() < PATIENCE, "it is nowhere: {}", self.shown(going.from));
            std::thread::sleep(Duration::from_millis(10));
        };
        links.extend(place);
        self.is_on_one(links);
        struck
    }

    /// Whoever is there besides a job that goes on, or follows it, has to go.
    fn is_on_one(&self, links: &Links) {
        let is_other = |machine: usize, job: &Value| {
            job["exit"].is_null() && !links.contains(&(machine, job["id"].as_u64().unwrap()))
        };
        until("no other is left of it", || {
            let others = [0, 1].map(|machine| {
                let jobs = self.jobs(machine).into_iter();
                jobs.filter(|job| is_other(machine, job)).collect::<Vec<_>>()
            });
            others.iter().all(Vec::is_empty).then_some(())
        });
        until("one keeps it", || {
            let all = self.machines.iter().flat_map(|machine| shepherds(&machine.data()));
            let keepers = all.filter(|pid| !proc::children_of(*pid).is_empty());
            (keepers.count() == 1).then_some(())
        });
    }

    /// Lets a job end, and compares what it has written with what it should.
    fn finish(&self, links: &[(usize, u64)]) {
        std::fs::write(self.may_end(), "").unwrap();
        for &(machine, id) in links {
            let daemon = &self.machines[machine];
            let job = until("it ends", || {
                Some(self.job((machine, id))).filter(|job| !job["exit"].is_null())
            });
            let shown = daemon.show(id);
            assert_eq!((&job["state"], &job["exit"]), (&json!("done"), &json!(0)), "{shown}");
            assert_eq!(daemon.events(id, "ended").len(), 1, "{shown}");
            let output = daemon.output(id);
            let last = u32::try_from(output.lines().count() - 1).unwrap();
            assert_eq!(output, counted(last), "{shown}");
        }
        let outputs: Vec<String> =
            links.iter().map(|&(machine, id)| self.machines[machine].output(id)).collect();
        assert!(outputs.windows(2).all(|two| two[0] == two[1]), "{outputs:?}");
    }
}

#[test]
fn machines_fail_at_random_and_each_job_ends_once() {
    let name = "machines_fail_at_random_and_each_job_ends_once: 200 failures";
    let failures = if long(name) { 200 } else { 4 };
    let mut pool = Pool::new();
    let work = pool.measure();
    let random = Random::printed();
    let (mut struck, mut tries) = (0, 0);
    while struck < failures {
        let mut links = pool.submit(random.place(2));
        for _ in 0..1 + random.below(3) {
            let victim = random.place(VICTIMS.len());
            let (live, at) = (random.below(2) == 0, 1 + random.below(work[victim]));
            println!("{:?}: {:?} fails at {at}, live {live}", links.last(), VICTIMS[victim]);
            struck += u32::from(pool.go(&mut links, live, VICTIMS[victim], at));
            tries += 1;
        }
        pool.finish(&links);
        assert!(tries < 10 * failures, "{struck} of {tries} failed in time");
    }
    for machine in &pool.machines {
        leaks::assert_none(machine, &[]);
    }
}
