//! A day of CI, scaled to some seconds or to an hour, on a real daemon by several policies.

use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use torpor_queue::scheduler::Millis;
use torpor_queue::scheduler::simulation::of_ci;

use crate::daemon::Daemon;
use crate::programs::{UNITS, compile};
use crate::{Setting, goal, svg};

/// Slots of the machine, which the trace fills.
pub const SLOTS: u32 = 2;

/// How jobs are served: its name in a command, its name in a table, what short jobs are before long ones, and how
/// these give way.
type Policy = (&'static str, &'static str, i64, &'static [&'static str]);

const POLICIES: [Policy; 4] = [
    ("fifo", FIRST, 0, &[]),
    ("kill", KILL, 600, &["kill"]),
    ("checkpoint", "checkpoint", 600, &["checkpoint"]),
    ("stop", "stop, then checkpoint", 600, &["stop", "checkpoint"]),
];

/// What the others are compared with.
const FIRST: &str = "first in, first out";
const KILL: &str = "kill and restart";

/// A job of the trace: when it comes and how long it works, in seconds, and the MiB that it holds.
pub struct Task {
    pub at: f64,
    pub work: f64,
    pub class: &'static str,
    pub memory: u32,
}

/// Numbers that are the same each time.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        f64::from(u32::try_from(self.0 >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }

    /// Log-normal, with this median.
    fn skewed(&mut self, median: f64, sigma: f64) -> f64 {
        let (a, b) = (self.unit().max(1e-9), self.unit());
        median * (sigma * (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()).exp()
    }
}

/// A dense day in some seconds: short jobs by the hour (the peak 1.55 times the mean, as published CI workloads have it),
/// a fifth of the machine's work; the rest are five long ones.
pub fn dense(day: f64) -> Vec<Task> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut tasks = Vec::new();
    let mut at = 0.0;
    loop {
        let load = 1.0 + 0.55 * (at / day * std::f64::consts::TAU - 3.7).cos();
        at += -random.unit().max(1e-9).ln() * 2.0 / load;
        if at > day * 0.8 {
            break;
        }
        let work = random.skewed(0.6, 0.8).clamp(0.1, 4.0);
        tasks.push(Task { at, work, class: "short", memory: 16 });
    }
    for (start, memory) in [(0.0, 64), (0.0, 256), (0.1, 128), (0.2, 32), (0.3, 512)] {
        tasks.push(Task { at: start * day, work: 0.32 * day, class: "long", memory });
    }
    tasks.sort_by(|a, b| a.at.total_cmp(&b.at));
    tasks
}

/// The day that `torpor queue simulate` makes up, in so many seconds. Its short jobs hold little here: to fill half a
/// GiB takes as long as one of them works in so short a day.
pub fn simulated(day: f64) -> Vec<Task> {
    let scale = day / 86_400.0;
    let of = |task: torpor_queue::scheduler::simulation::Task| {
        let (at, work) = (seconds(task.at) * scale, seconds(task.work) * scale);
        let mib = u32::try_from(task.memory >> 20).unwrap_or(u32::MAX);
        if task.class == "short" {
            Task { at, work, class: "short", memory: 16 }
        } else {
            Task { at, work, class: "long", memory: mib }
        }
    };
    let mut tasks: Vec<Task> = of_ci().into_iter().map(of).collect();
    tasks.sort_by(|a, b| a.at.total_cmp(&b.at));
    tasks
}

/// Seconds of a time.
#[expect(clippy::cast_precision_loss, reason = "some days")]
pub fn seconds(millis: Millis) -> f64 {
    millis as f64 / 1000.0
}

/// What a policy has made of the day, in seconds. Where jobs were unfinished when it was given up, all but their waiting is
/// at least that.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    name: String,
    unfinished: usize,
    wait_p95: f64,
    wait_longest: f64,
    long_mean: f64,
    makespan: f64,
    used: f64,
    lost: f64,
    waste: f64,
    jobs: Vec<Value>,
}

/// Runs a day by each policy, or by those that `only` names; its results are called `name`. What other policies have made of
/// the same day before, by the same build, is told and drawn with them: a long day is run in pieces.
pub fn measure(setting: &Setting, name: &str, tasks: &[Task], only: &str) -> Result<()> {
    let policies = chosen(only)?;
    let dir = std::env::temp_dir().join(format!("torpor-bench-day-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let program = compile(&dir, "units", UNITS, &["gcc"])?.display().to_string();
    let per_second = calibrate(&program)?;
    let day = Day { name, trace: trace(tasks), build: build(&setting.torpor)? };
    for (key, policy, priority, means) in policies {
        let classes = json!({
            "short": { "priority": priority }, "long": { "priority": 0, "means": means },
        });
        let config = json!({ "slots": SLOTS, "rules": { "classes": classes } });
        let daemon = Daemon::start(&setting.torpor, &config)?;
        let most = setting.limit.map(|seconds| Duration::from_secs(seconds.into()));
        let outcome = run(&daemon, policy, &program, per_second, tasks, most)?;
        setting.write(&day.file(key), &day.kept(&outcome))?;
    }
    std::fs::remove_dir_all(&dir)?;
    let outcomes = day.all(&setting.results);
    let table = format!("{}\n{}", table(&outcomes), goals(&outcomes));
    print!("{table}");
    setting.write(&format!("queue-{name}.md"), &table)?;
    setting.write(&format!("queue-{name}.svg"), &plot(&outcomes))?;
    // What is saved loses nothing: work that was done again is no figure, but wrong.
    for outcome in outcomes.iter().filter(|outcome| outcome.name.contains("checkpoint")) {
        ensure!(outcome.lost == 0.0, "wrong: {} has lost {} s of work", outcome.name, outcome.lost);
    }
    Ok(())
}

/// The jobs of a day, as text: results of two days are not put side by side.
fn trace(tasks: &[Task]) -> String {
    let one = |task: &Task| format!("{} {} {} {}", task.at, task.work, task.class, task.memory);
    tasks.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// What says which build it is that is measured.
fn build(torpor: &Path) -> Result<String> {
    let output = Command::new(torpor).arg("--version").output()?;
    ensure!(output.status.success(), "{} --version fails", torpor.display());
    let bytes = std::fs::metadata(torpor)?.len();
    Ok(format!("{}, {bytes} bytes", String::from_utf8(output.stdout)?.trim()))
}

/// A day whose results are kept.
struct Day<'d> {
    name: &'d str,
    trace: String,
    build: String,
}

impl Day<'_> {
    /// The name of the file that keeps what a policy has made of it.
    fn file(&self, policy: &str) -> String {
        format!("queue-{}-{policy}.json", self.name)
    }

    fn kept(&self, outcome: &Outcome) -> String {
        json!({
            "trace": self.trace,
            "build": self.build,
            "unfinished": outcome.unfinished,
            "wait_p95": outcome.wait_p95,
            "wait_longest": outcome.wait_longest,
            "long_mean": outcome.long_mean,
            "makespan": outcome.makespan,
            "used": outcome.used,
            "lost": outcome.lost,
            "waste": outcome.waste,
            "jobs": outcome.jobs,
        })
        .to_string()
    }

    /// What each policy has made of it, as far as that was run.
    fn all(&self, results: &Path) -> Vec<Outcome> {
        let outcome = |(key, name, ..): Policy| {
            let text = std::fs::read(results.join(self.file(key))).ok()?;
            let found: Value = serde_json::from_slice(&text).ok()?;
            let is_it = found["trace"] == *self.trace && found["build"] == *self.build;
            if !is_it {
                println!("{name}: what is kept is of another day or build, and left out");
                return None;
            }
            let number = |key: &str| found[key].as_f64();
            Some(Outcome {
                name: name.to_owned(),
                unfinished: usize::try_from(found["unfinished"].as_u64()?).ok()?,
                wait_p95: number("wait_p95")?,
                wait_longest: number("wait_longest")?,
                long_mean: number("long_mean")?,
                makespan: number("makespan")?,
                used: number("used")?,
                lost: number("lost")?,
                waste: number("waste")?,
                jobs: found["jobs"].as_array()?.clone(),
            })
        };
        POLICIES.into_iter().filter_map(outcome).collect()
    }
}

fn chosen(only: &str) -> Result<Vec<Policy>> {
    if only.is_empty() {
        return Ok(POLICIES.to_vec());
    }
    let named = |name: &str| {
        let policy = POLICIES.into_iter().find(|policy| policy.0 == name);
        policy.with_context(|| format!("{name:?} is no policy: {:?}", POLICIES.map(|one| one.0)))
    };
    only.split(',').map(named).collect()
}

/// What the policies that save jobs were to reach: by themselves, and beside the others if these were measured.
fn goals(outcomes: &[Outcome]) -> String {
    let by = |name: &str| outcomes.iter().find(|outcome| outcome.name == name);
    let saving = outcomes.iter().filter(|outcome| outcome.name.contains("checkpoint"));
    let of = |outcome: &Outcome| {
        let name = &outcome.name;
        let mut text = goal(&format!("{name}, short jobs wait, 95 %"), outcome.wait_p95, 3.0, "s");
        if let Some(first) = by(FIRST) {
            let slower = (outcome.long_mean / first.long_mean - 1.0) * 100.0;
            text += &goal(&format!("{name}, long jobs are slowed"), slower, 10.0, "%");
        }
        if let Some(kill) = by(KILL) {
            let waste = outcome.waste / kill.waste * 100.0;
            text += &goal(&format!("{name}, waste, beside that of killing"), waste, 10.0, "%");
        }
        text
    };
    saving.map(of).collect()
}

/// Units of work in a second of this machine, when both slots are taken.
fn calibrate(program: &str) -> Result<f64> {
    const UNITS: f64 = 300.0;
    let begun = Instant::now();
    let mut both = Vec::new();
    for _ in 0..SLOTS {
        let mut command = Command::new(program);
        both.push(command.args([UNITS.to_string(), "1".to_owned()]).stdout(Stdio::null()).spawn()?);
    }
    for mut child in both {
        child.wait()?;
    }
    Ok(UNITS / begun.elapsed().as_secs_f64())
}

fn run(
    daemon: &Daemon,
    name: &str,
    program: &str,
    per_second: f64,
    tasks: &[Task],
    most: Option<Duration>,
) -> Result<Outcome> {
    let begun = Instant::now();
    let mut ids = Vec::new();
    for task in tasks {
        sleep(Duration::from_secs_f64(task.at).saturating_sub(begun.elapsed()));
        let units = format!("{:.0}", (task.work * per_second).max(1.0));
        let command = [program.to_owned(), units, task.memory.to_string()];
        ids.push(daemon.submit(&["--class", task.class], &command)?);
    }
    let mut jobs = Vec::new();
    for id in &ids {
        let is_given_up = || most.is_some_and(|most| begun.elapsed() >= most);
        jobs.push(daemon.wait(id, |job| job["state"] == "done" || is_given_up())?);
    }
    let unfinished = give_up(&mut jobs)?;
    let seconds = |value: &Value| value.as_f64().unwrap_or(0.0) / 1000.0;
    let of = |class: &'static str| jobs.iter().filter(move |job| job["class"] == class);
    let wait = |job: &Value| seconds(&job["started"]) - seconds(&job["submitted"]);
    let mut waits: Vec<f64> = of("short").map(wait).collect();
    waits.sort_by(f64::total_cmp);
    let spans: Vec<f64> =
        of("long").map(|job| seconds(&job["ended"]) - seconds(&job["submitted"])).collect();
    let first = jobs.iter().map(|job| seconds(&job["submitted"])).fold(f64::MAX, f64::min);
    let last = jobs.iter().map(|job| seconds(&job["ended"])).fold(0.0, f64::max);
    let lost: f64 = jobs.iter().map(|job| seconds(&job["lost_ms"])).sum();
    let overhead: f64 = jobs.iter().map(|job| seconds(&job["overhead_ms"])).sum();
    let work: f64 = tasks.iter().map(|task| task.work).sum();
    Ok(Outcome {
        name: name.to_owned(),
        unfinished,
        wait_p95: *waits.get(waits.len() * 95 / 100).context("no short jobs")?,
        wait_longest: *waits.last().context("no short jobs")?,
        long_mean: spans.iter().sum::<f64>() / f64::from(u32::try_from(spans.len())?),
        makespan: last - first,
        used: work / f64::from(SLOTS) / (last - first),
        lost,
        waste: lost + overhead,
        jobs,
    })
}

/// Counts what is not done as ended now, and as started now if it has not; returns how many jobs that are.
fn give_up(jobs: &mut [Value]) -> Result<usize> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
    let now = json!(u64::try_from(now)?);
    let mut count = 0;
    for job in jobs.iter_mut().filter(|job| job["ended"].is_null()) {
        count += 1;
        job["ended"] = now.clone();
        if job["started"].is_null() {
            job["started"] = now.clone();
        }
    }
    Ok(count)
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = "| policy | short jobs wait, 95 % | longest | long jobs, mean | makespan | useful work | work lost | waste |\n\
                    |---|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for o in outcomes {
        let (more, less) = if o.unfinished > 0 { ("> ", "< ") } else { ("", "") };
        let _ = writeln!(
            text,
            "| {} | {:.1} s | {:.1} s | {more}{:.1} s | {more}{:.1} s | {less}{:.0} % | {more}{:.1} s | {more}{:.1} s |",
            o.name,
            o.wait_p95,
            o.wait_longest,
            o.long_mean,
            o.makespan,
            o.used * 100.0,
            o.lost,
            o.waste,
        );
    }
    for o in outcomes.iter().filter(|o| o.unfinished > 0) {
        let _ = writeln!(text, "\n{}: given up when {} jobs were not done.", o.name, o.unfinished);
    }
    text
}

/// A row for each job of each policy: pale from its submission to its end, dark while it ran.
fn plot(outcomes: &[Outcome]) -> String {
    const WIDTH: f64 = 700.0;
    let jobs = outcomes.iter().map(|outcome| outcome.jobs.len()).max().unwrap_or(1);
    // Of many jobs each has less.
    let row = (500.0 / f64::from(u32::try_from(jobs).unwrap_or(u32::MAX))).clamp(1.0, 4.0);
    let height = row * 0.75;
    let longest = outcomes.iter().map(|outcome| outcome.makespan).fold(1.0, f64::max);
    let mut body = String::new();
    let mut top = 10.0;
    for outcome in outcomes {
        body += &svg::text(10.0, top + 12.0, false, &outcome.name);
        top += 18.0;
        let first = outcome
            .jobs
            .iter()
            .filter_map(|job| job["submitted"].as_f64())
            .fold(f64::MAX, f64::min);
        let x =
            |at: &Value| 10.0 + (at.as_f64().unwrap_or(first) - first) / 1000.0 / longest * WIDTH;
        for job in &outcome.jobs {
            let (pale, dark) = if job["class"] == "short" {
                ("#f6d9b0", "#d55e00")
            } else {
                ("#d5e6f3", "#0072b2")
            };
            let mut bar = |from: f64, to: f64, colour: &str| {
                let width = (to - from).max(0.5);
                let _ = writeln!(
                    body,
                    "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.2}\" fill=\"{colour}\"/>"
                );
            };
            bar(x(&job["submitted"]), x(&job["ended"]), pale);
            for (from, to) in spells(job) {
                bar(x(from), x(to), dark);
            }
            top += row;
        }
        top += 14.0;
    }
    body += &svg::text(10.0 + WIDTH, top, true, &format!("{longest:.0} s"));
    svg::document(WIDTH + 20.0, top + 10.0, &body)
}

/// From when until when a job ran.
fn spells(job: &Value) -> Vec<(&Value, &Value)> {
    let mut spells = Vec::new();
    let mut since = None;
    for event in job["events"].as_array().into_iter().flatten() {
        match event["kind"].as_str() {
            Some("started" | "resumed" | "continued" | "running") => {
                since = since.or(Some(&event["at"]));
            }
            Some("preempted" | "lost" | "killed") => {
                spells.extend(since.take().map(|since| (since, &event["at"])));
            }
            _ => {}
        }
    }
    spells.extend(since.map(|since| (since, &job["ended"])));
    spells
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn outcome(name: &str, makespan: f64) -> Outcome {
        let job = json!({
            "class": "long", "submitted": 1000, "started": 2000, "ended": 5000,
            "events": [{ "kind": "started", "at": 2000 }],
        });
        Outcome {
            name: name.to_owned(),
            unfinished: 0,
            wait_p95: 1.5,
            wait_longest: 2.5,
            long_mean: 100.25,
            makespan,
            used: 0.75,
            lost: 0.0,
            waste: 8.5,
            jobs: vec![job],
        }
    }

    /// A policy takes an hour: the others are run on other days.
    #[test]
    fn what_was_run_before_is_told_with_what_is_run_now() {
        let dir = tempfile::tempdir().unwrap();
        let day = |tasks: &[Task], build: &str| Day {
            name: "hour",
            trace: trace(tasks),
            build: build.to_owned(),
        };
        let now = day(&simulated(60.0), "1");
        let keep = |day: &Day<'_>, policy: &str, outcome: &Outcome| {
            std::fs::write(dir.path().join(day.file(policy)), day.kept(outcome)).unwrap();
        };
        let (first, stop) = (outcome(FIRST, 60.0), outcome("stop, then checkpoint", 61.0));
        let kill = Outcome { unfinished: 2, waste: 400.0, ..outcome(KILL, 90.0) };
        keep(&now, "stop", &stop);
        assert_eq!(now.all(dir.path()), std::slice::from_ref(&stop));
        keep(&now, "fifo", &first);
        keep(&now, "kill", &kill);
        let all = now.all(dir.path());
        assert_eq!(all, [first, kill, stop]);
        let text = table(&all);
        assert!(text.contains("| > 90.0 s | < 75 % | > 0.0 s | > 400.0 s |"), "{text}");
        assert!(
            text.ends_with("\nkill and restart: given up when 2 jobs were not done.\n"),
            "{text}"
        );
        assert!(goals(&all).contains("waste, beside that of killing: 10 % at most, 2.1 % seen"));
        let drawn = plot(&all);
        assert!(all.iter().all(|one| drawn.contains(&one.name)), "{drawn}");
        // What is of another day or build is nothing to compare with.
        keep(&day(&dense(60.0), "1"), "checkpoint", &outcome("checkpoint", 1.0));
        keep(&day(&simulated(60.0), "2"), "fifo", &outcome(FIRST, 1.0));
        let names: Vec<String> = now.all(dir.path()).into_iter().map(|one| one.name).collect();
        assert_eq!(names, [KILL, "stop, then checkpoint"]);
    }

    #[test]
    fn who_is_given_up_counts_as_if_it_ended_then() {
        let mut jobs =
            [json!({ "started": 5, "ended": 7 }), json!({ "started": 5 }), json!({ "id": 3 })];
        assert_eq!(give_up(&mut jobs).unwrap(), 2);
        assert_eq!(jobs[0], json!({ "started": 5, "ended": 7 }));
        assert!(jobs[1]["started"] == 5 && jobs[1]["ended"].as_u64().unwrap() > 7);
        assert_eq!(jobs[2]["started"], jobs[2]["ended"]);
    }
}
