//! A day of CI, scaled to some seconds, on a real daemon by several policies.

use std::fmt::Write;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::programs::{UNITS, compile};
use crate::{Setting, goal, svg};

/// Slots of the machine, which the trace fills.
pub const SLOTS: u32 = 2;

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

/// The day: short jobs by the hour (the peak 1.55 times the mean, as published CI workloads have it), a fifth of
/// the machine's work; the rest are five long ones.
pub fn trace(day: f64) -> Vec<Task> {
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

/// What a policy has made of the day, in seconds.
struct Outcome {
    name: &'static str,
    wait_p95: f64,
    wait_longest: f64,
    long_mean: f64,
    makespan: f64,
    used: f64,
    lost: f64,
    waste: f64,
    jobs: Vec<Value>,
}

/// Runs the day by each policy.
pub fn measure(setting: &Setting) -> Result<()> {
    let dir = std::env::temp_dir().join(format!("torpor-bench-day-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let program = compile(&dir, "units", UNITS, &["gcc"])?.display().to_string();
    let per_second = calibrate(&program)?;
    let tasks = trace(f64::from(setting.seconds));
    let mut outcomes = Vec::new();
    for (name, priority, means) in [
        ("first in, first out", 0, json!([])),
        ("kill and restart", 600, json!(["kill"])),
        ("checkpoint", 600, json!(["checkpoint"])),
        ("stop, then checkpoint", 600, json!(["stop", "checkpoint"])),
    ] {
        let classes = json!({
            "short": { "priority": priority }, "long": { "priority": 0, "means": means },
        });
        let config = json!({ "slots": SLOTS, "rules": { "classes": classes } });
        let daemon = Daemon::start(&setting.torpor, &config)?;
        outcomes.push(run(&daemon, name, &program, per_second, &tasks)?);
    }
    std::fs::remove_dir_all(&dir)?;
    let table = format!("{}\n{}", table(&outcomes), goals(&outcomes));
    print!("{table}");
    setting.write("queue-day.md", &table)?;
    setting.write("queue-day.svg", &plot(&outcomes))?;
    // What is saved loses nothing: work that was done again is no figure, but wrong.
    for outcome in outcomes.iter().filter(|outcome| outcome.name.contains("checkpoint")) {
        ensure!(outcome.lost == 0.0, "wrong: {} has lost {} s of work", outcome.name, outcome.lost);
    }
    Ok(())
}

/// What the policies that save jobs were to reach, beside first in, first out.
fn goals(outcomes: &[Outcome]) -> String {
    let Some(plain) = outcomes.first() else { return String::new() };
    let saving = outcomes.iter().filter(|outcome| outcome.name.contains("checkpoint"));
    let of = |outcome: &Outcome| {
        let name = outcome.name;
        let slower = (outcome.long_mean / plain.long_mean - 1.0) * 100.0;
        goal(&format!("{name}, short jobs wait, 95 %"), outcome.wait_p95, 3.0, "s")
            + &goal(&format!("{name}, long jobs are slowed"), slower, 10.0, "%")
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
    name: &'static str,
    program: &str,
    per_second: f64,
    tasks: &[Task],
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
        jobs.push(daemon.wait(id, |job| job["state"] == "done")?);
    }
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
        name,
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

fn table(outcomes: &[Outcome]) -> String {
    let mut text = "| policy | short jobs wait, 95 % | longest | long jobs, mean | makespan | useful work | work lost | waste |\n\
                    |---|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for o in outcomes {
        let _ = writeln!(
            text,
            "| {} | {:.1} s | {:.1} s | {:.1} s | {:.1} s | {:.0} % | {:.1} s | {:.1} s |",
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
    text
}

/// A row for each job of each policy: pale from its submission to its end, dark while it ran.
fn plot(outcomes: &[Outcome]) -> String {
    const ROW: f64 = 4.0;
    const WIDTH: f64 = 700.0;
    let longest = outcomes.iter().map(|outcome| outcome.makespan).fold(1.0, f64::max);
    let mut body = String::new();
    let mut top = 10.0;
    for outcome in outcomes {
        body += &svg::text(10.0, top + 12.0, false, outcome.name);
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
                    "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"3\" fill=\"{colour}\"/>"
                );
            };
            bar(x(&job["submitted"]), x(&job["ended"]), pale);
            for (from, to) in spells(job) {
                bar(x(from), x(to), dark);
            }
            top += ROW;
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
