//! From an urgent submission to its first instruction, while a victim of 2 GiB runs, and back.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::programs::{VICTIM, compile};
use crate::{Setting, goal, median};

/// How often it is measured.
const TIMES: u32 = 3;

/// For how many milliseconds the victim has run before: nobody has to give way who has run less
/// than ten times as long as that costs.
const RUN_BEFORE: u64 = 20_000;

/// So long, in milliseconds, each of both goals may take.
const GOAL: f64 = 1000.0;

/// The parts of the time, in milliseconds, in their order.
const PARTS: [&str; 6] = [
    "submit, until the victim stands still (rounds are written while it runs)",
    "the victim stands still, until it is written and has ended",
    "its end, until the first instruction of the urgent job",
    "**the victim stands still, until the first instruction**",
    "**the urgent job has ended, until the victim runs again**",
    "of that, the engine's part",
];

/// Measures and writes the table.
pub fn measure(setting: &Setting) -> Result<()> {
    let dir = std::env::temp_dir().join(format!("torpor-bench-urgent-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let victim = compile(&dir, "victim", VICTIM, &["gcc"])?;
    let mut all = vec![Vec::new(); PARTS.len()];
    for round in 0..TIMES {
        let stop = dir.join(format!("stop-{round}")).display().to_string();
        let parts = once(setting, &[victim.display().to_string(), stop, "2048".to_owned()])?;
        for (values, part) in all.iter_mut().zip(parts) {
            values.push(part);
        }
    }
    std::fs::remove_dir_all(&dir)?;
    let mut goals = String::new();
    let mut text = format!("| part | median of {TIMES} | longest |\n|---|---:|---:|\n");
    for (name, values) in PARTS.into_iter().zip(all) {
        let most = values.iter().copied().fold(0.0, f64::max);
        let middle = median(values);
        let _ = writeln!(text, "| {name} | {middle:.0} ms | {most:.0} ms |");
        // The two parts in bold are the goals.
        if let Some(name) = name.strip_prefix("**") {
            goals += &goal(name.trim_end_matches('*'), middle, GOAL, "ms");
        }
    }
    text = format!("{text}\n{goals}");
    print!("{text}");
    setting.write("queue-urgent.md", &text)
}

fn once(setting: &Setting, victim: &[String; 3]) -> Result<[f64; 6]> {
    let classes = json!({ "urgent": { "priority": 1000 }, "batch": { "priority": 0, "means": ["checkpoint"] } });
    let daemon =
        Daemon::start(&setting.torpor, &json!({ "slots": 1, "rules": { "classes": classes } }))?;
    let id = daemon.submit(&["--class", "batch"], victim)?;
    while !daemon.ok(&["logs", &id])?.contains("ready") {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    daemon.wait(&id, |job| job["ran_ms"].as_u64() >= Some(RUN_BEFORE))?;
    let begun = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() * 1000.0;
    let said = daemon.ok(&["submit", "--class", "urgent", "--wait", "--", "date", "+%s%N"])?;
    let first = said.trim().parse::<f64>()? / 1e6;
    let job = daemon.wait(&id, |job| job["state"] == "running")?;
    let urgent = daemon.show("2")?;
    std::fs::write(&victim[1], "")?;
    let ended = daemon.wait(&id, |job| !job["exit"].is_null())?;
    ensure!(
        ended["exit"] == 0,
        "wrong: the victim ended with {}: {}",
        ended["exit"],
        ended["note"]
    );
    let (saved, back) = (event(&job, "preempted")?, event(&job, "resumed")?);
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let (gone, frozen) = (number(&saved["at"]), number(&saved["data"]["frozen_us"]) / 1000.0);
    Ok([
        gone - frozen - begun,
        frozen,
        first - gone,
        first - gone + frozen,
        number(&back["at"]) - number(&urgent["ended"]),
        number(&back["data"]["took_us"]) / 1000.0,
    ])
}

/// What has happened to a job of this kind, the first time.
pub fn event<'a>(job: &'a Value, kind: &str) -> Result<&'a Value> {
    let events = job["events"].as_array().context("no events")?;
    events.iter().find(|event| event["kind"] == kind).with_context(|| format!("no event {kind}"))
}
