//! How fast memory goes from one host to another, without a limit: by loopback, beside a bare copy by the same, and
//! encryption alone.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use torpor_runtimes_tests::certificates::{OF_AGENTS, certificates};

use crate::bench::{Bench, Goal, median};
use crate::faults::loopback;
use crate::process::Running;
use crate::sealed;
use crate::subject::Subject;

/// MB/s of a link of 10 Gbit/s.
const LINK: f64 = 1250.0;
/// Bytes of a page.
const PAGE: f64 = 4096.0;
/// What TLS encrypts at once (RFC 8446, 5.1).
const RECORD: usize = 1 << 14;

/// A way to send.
struct Way {
    name: &'static str,
    is_encrypted: bool,
    is_sealed: bool,
    connections: u32,
    /// The way that it is compared with, by its place among all, and how much of that it is to reach.
    like: Option<(usize, f64)>,
}

const WAYS: [Way; 5] = [
    Way { name: "plain", is_encrypted: false, is_sealed: false, connections: 1, like: None },
    Way {
        name: "encrypted",
        is_encrypted: true,
        is_sealed: false,
        connections: 1,
        like: Some((0, 0.9)),
    },
    Way {
        name: "sealed and encrypted",
        is_encrypted: true,
        is_sealed: true,
        connections: 1,
        like: Some((0, 0.9)),
    },
    Way {
        name: "plain, 4 connections",
        is_encrypted: false,
        is_sealed: false,
        connections: 4,
        like: None,
    },
    Way {
        name: "encrypted, 4 connections",
        is_encrypted: true,
        is_sealed: false,
        connections: 4,
        like: Some((3, 0.9)),
    },
];

pub fn measure(bench: &mut Bench) -> Result<()> {
    let dir = bench.dir.join("stream");
    fs::create_dir(&dir)?;
    let (mut copies, mut alone, mut all) = (Vec::new(), Vec::new(), WAYS.map(|_| Vec::new()));
    for _ in 0..bench.rounds {
        copies.push(loopback(bench.mib)? * PAGE / 1e6);
        alone.push(encrypted(bench.mib)?);
        for (way, rates) in WAYS.iter().zip(&mut all) {
            rates.push(way.sent(bench, &dir).context(way.name)?);
        }
    }
    fs::remove_dir_all(&dir)?;
    let (copy, alone, all) = (median(&copies), median(&alone), all.map(|rates| median(&rates)));
    bench.add("a bare copy over loopback", copy, "MB/s", None);
    bench.add("AES-256-GCM alone, one thread", alone, "MB/s", None);
    for (way, rate) in WAYS.iter().zip(all) {
        let name = |what: &str| format!("stream, {}{what}", way.name);
        let fills = way.is_sealed.then_some(Goal::AtLeast(LINK));
        bench.add(name(""), rate, "MB/s", fills);
        bench.add(name(" : bare copy"), rate / copy, "", None);
        if let Some((like, least)) = way.like {
            let what = format!(" : {}", WAYS[like].name);
            bench.add(name(&what), rate / all[like], "", Some(Goal::AtLeast(least)));
        }
    }
    Ok(())
}

impl Way {
    /// MB/s of the memory of a process that moves this way.
    fn sent(&self, bench: &Bench, dir: &Path) -> Result<f64> {
        let host = Ipv4Addr::LOCALHOST.to_string();
        let keys = if self.is_encrypted { certificates(dir, &host, OF_AGENTS) } else { Vec::new() };
        let (identity, recipient) = sealed::keys(dir)?;
        let identity = ["--identity", identity.to_str().context("a path that is no text")?];
        let seal = ["--encrypt", "--recipient", &recipient];
        let options = |kind: &str, words: &[&str]| -> Vec<String> {
            let words = if self.is_sealed { words } else { &[] };
            words.iter().map(|word| format!("--{kind}-option={word}")).collect()
        };
        let torpor = bench.torpor().canonicalize()?;
        bench.warm_up()?;
        let mut agent = Command::new(&torpor);
        agent.args(["agent", "--listen", &format!("{host}:0")]).args(&keys);
        agent.arg("--state-dir").arg(dir.join("there")).arg("--work-dir").arg(dir.join("taken"));
        let (agent, line) = Running::heard(agent.args(options("restore", &identity)))?;
        let address = line.strip_prefix("Listening at ").context("the agent does not listen")?;
        let subject = Subject::start(&bench.dir, "small-pages", bench.mib)?;
        let mut migrate = Command::new(&torpor);
        migrate.args(["migrate", "--pid", &subject.pid().to_string(), "--json"]);
        migrate.args(["--mode", "stop-and-copy", "--connections", &self.connections.to_string()]);
        migrate.args(options("dump", &[&seal[..], &identity].concat())).args(&keys);
        migrate.arg("--state-dir").arg(dir.join("here")).arg("--work-dir").arg(dir.join("work"));
        let output = migrate.arg(address).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "it does not move: {said}");
        subject.gone()?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let root = report["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        kill_process(root.context("no process there")?, Signal::KILL)?;
        drop(agent);
        let number = |name: &str| report[name].as_f64().with_context(|| name.to_owned());
        Ok(number("bytes")? / number("transfer_ms")? / 1e3)
    }
}

/// MB/s of so many MiB that one thread encrypts as TLS does.
fn encrypted(mib: u64) -> Result<f64> {
    let failed = |_| anyhow!("AES-256-GCM");
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(failed)?);
    let mut record = vec![1; RECORD];
    let start = Instant::now();
    for number in 0..(mib << 20) / RECORD as u64 {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&number.to_le_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        let _tag =
            key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut record).map_err(failed)?;
    }
    #[allow(clippy::cast_precision_loss, reason = "to be read by people")]
    let bytes = (mib << 20) as f64;
    Ok(bytes / start.elapsed().as_secs_f64() / 1e6)
}
