//! A job of 1,400 MB goes to another machine over 1 Gbit/s: as a checkpoint, and while most of it is sent before.
//!
//! The study that asked for the queue had saved one of that size by hand, and estimated 20 to 50 s for all of it.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::programs::{VICTIM, compile};
use crate::urgent::event;
use crate::{Setting, goal, median};

/// How often each way is measured.
const TIMES: u32 = 3;

/// What the study estimated at least, in seconds.
const ESTIMATE: f64 = 20.0;

/// For so many seconds a job may stand still of which most was sent before.
const GOAL: f64 = 1.0;

/// Addresses of both machines (RFC 2544 gives 198.18.0.0/15 to benchmarks of networks), and their port there.
const ADDRESSES: [&str; 2] = ["198.18.0.1", "198.18.0.2"];
const PORT: u32 = 7777;

/// What is measured of each.
const PARTS: [&str; 9] = [
    "asked to go, until it runs there (s)",
    "of that, it stands still (s)",
    "sent (MB)",
    "of that, while it stands still (MB)",
    "asked to go, until it gives way: sent ahead (s)",
    "saved (s)",
    "digests taken, and put on this disk (s)",
    "sent, and put on the other disk (s)",
    "compared there, and brought back (s)",
];

/// What happens to a job here between the last five of these parts, and before and after them.
const STEPS: [&str; 5] = ["moving", "giving-way", "preempted", "durable", "moved"];

/// Measures and writes the table.
pub fn measure(setting: &Setting) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let victim = compile(dir.path(), "victim", VICTIM, &["gcc"])?.display().to_string();
    let network = Network::new()?;
    certificates(dir.path())?;
    let here = network.daemon(setting, dir.path(), 0)?;
    let there = network.daemon(setting, dir.path(), 1)?;
    let mut ways = Vec::new();
    for live in [false, true] {
        let mut all = vec![Vec::new(); PARTS.len()];
        for round in 0..TIMES {
            let stop = dir.path().join(format!("stop-{live}-{round}")).display().to_string();
            let words = [victim.clone(), stop, setting.mib.to_string()];
            for (values, part) in all.iter_mut().zip(once(&here, &there, &words, live)?) {
                values.push(part);
            }
        }
        ways.push(all.into_iter().map(median).collect::<Vec<f64>>());
    }
    let size = f64::from(setting.mib) * 1.048_576;
    let mut text =
        format!("| {size:.0} MB, median of {TIMES} | `move` | `move --live` |\n|---|---:|---:|\n");
    for (part, (plain, live)) in PARTS.iter().zip(ways[0].iter().zip(&ways[1])) {
        let _ = writeln!(text, "| {part} | {plain:.2} | {live:.2} |");
    }
    text += "\n";
    text += &goal("it is on another machine", ways[0][0], ESTIMATE, "s");
    text += &goal("it stands still, if most was sent before", ways[1][1], GOAL, "s");
    print!("{text}");
    setting.write("queue-move.md", &text)
}

/// Lets a job go, and end there.
fn once(here: &Daemon, there: &Daemon, victim: &[String; 3], live: bool) -> Result<Vec<f64>> {
    let id = here.submit(&["--class", "batch"], victim)?;
    while !here.ok(&["logs", &id])?.contains("ready") {
        std::thread::sleep(Duration::from_millis(100));
    }
    let way: &[&str] = if live { &["--live"] } else { &[] };
    let place = here.ok(&[&["move", &id, "--to", "b"], way].concat())?;
    let arrived = there.wait(place.trim(), |job| event(job, "resumed").is_ok())?;
    let gone = here.show(&id)?;
    std::fs::write(&victim[1], "")?;
    let ended = here.wait(&id, |job| !job["exit"].is_null())?;
    ensure!(ended["exit"] == 0, "wrong: it ended with {}: {}", ended["exit"], ended["note"]);
    let bytes = |kind: &str| {
        let event = event(&gone, kind);
        event.ok().and_then(|event| event["data"]["bytes"].as_f64()).unwrap_or_default() / 1e6
    };
    let frozen = event(&gone, "preempted")?["data"]["frozen_us"].as_f64().unwrap_or_default();
    let mut steps = STEPS.map(|kind| last(&gone, kind)).into_iter().collect::<Result<Vec<_>>>()?;
    steps.push(last(&arrived, "resumed")?);
    let (moved, back) = (bytes("moved"), steps[5]);
    let still = steps[2] - frozen / 1e6;
    let all = [back - steps[0], back - still, bytes("sent-ahead") + moved, moved];
    Ok(all.into_iter().chain(steps.windows(2).map(|part| part[1] - part[0])).collect())
}

/// When something of this kind has happened to a job, in seconds, the last time.
fn last(job: &Value, kind: &str) -> Result<f64> {
    let events = job["events"].as_array().context("no events")?;
    let event = events.iter().rev().find(|event| event["kind"] == kind);
    let at = event.and_then(|event| event["at"].as_f64());
    Ok(at.with_context(|| format!("no event {kind}"))? / 1e3)
}

/// Two machines at a cable of 1 Gbit/s: network namespaces, which go when it is dropped.
struct Network {
    names: [String; 2],
}

impl Network {
    fn new() -> Result<Self> {
        let name = |machine: &str| format!("torpor-move-{}-{machine}", std::process::id());
        let network = Self { names: [name("a"), name("b")] };
        let [a, b] = &network.names;
        shell(Path::new("/"), &format!("ip netns add {a}; ip netns add {b}"))?;
        shell(
            Path::new("/"),
            &format!("ip -n {a} link add eth0 type veth peer name eth0 netns {b}"),
        )?;
        for (name, address) in network.names.iter().zip(ADDRESSES) {
            shell(
                Path::new("/"),
                &format!(
                    "ip -n {name} address add {address}/30 dev eth0; ip -n {name} link set eth0 up; \
                     tc -n {name} qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms"
                ),
            )?;
        }
        Ok(network)
    }

    /// Starts the daemon of a machine; the other one is its peer.
    fn daemon(&self, setting: &Setting, dir: &Path, own: usize) -> Result<Daemon> {
        let at = |machine: usize| format!("https://{}:{PORT}", ADDRESSES[machine]);
        let peer = ["b", "a"][own];
        let config = json!({ "slots": 1, "pool": { peer: at(1 - own) } });
        let file = |name: &str| dir.join(name).display().to_string();
        let options = [
            ["--listen".to_owned(), at(own)],
            ["--tls-cert".to_owned(), file("certificate")],
            ["--tls-key".to_owned(), file("key")],
            ["--tls-ca".to_owned(), file("ca.pem")],
        ];
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.names[own])).arg(&setting.torpor);
        Daemon::start_by(&setting.torpor, command, &config, &options.concat())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = shell(Path::new("/"), &format!("ip netns delete {name}"));
        }
    }
}

/// An authority, and a certificate of it for both machines.
fn certificates(dir: &Path) -> Result<()> {
    let names = ADDRESSES.map(|address| format!("IP:{address}")).join(",");
    std::fs::write(dir.join("extensions"), format!("subjectAltName={names}\n"))?;
    let new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    shell(
        dir,
        &format!(
            "openssl req -x509 {new} -days 2 -subj /CN=pool -keyout ca.key -out ca.pem; \
             openssl req {new} -subj /CN=machine -keyout key -out request; \
             openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions \
             -out certificate"
        ),
    )
}

fn shell(dir: &Path, script: &str) -> Result<()> {
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{script}: {said}");
    Ok(())
}
