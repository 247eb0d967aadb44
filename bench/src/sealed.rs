//! Sealed against plain, and against what people do today.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use torpor_seal::keys::AgeIdentity;

use crate::bench::{Bench, Goal, Times, Way, median, ratio, run};
use crate::memory::peak;
use crate::subject::Subject;
use crate::tools;

/// The suites, with how much longer than plain they may take.
const SUITES: [(&str, f64); 2] = [("aes-256-gcm", 1.25), ("aes-256-xts+hmac-sha256", 2.0)];

/// How many times faster than the best of today's tools a sealed dump has to be.
const FASTER: f64 = 3.0;

/// Percent by which sealed images may be larger.
pub const LARGER: f64 = 0.5;

/// An age identity in a directory, which is made if it is not there, and its recipient.
pub fn keys(dir: &Path) -> Result<(PathBuf, String)> {
    let [identity, recipient] = ["identity", "recipient"].map(|name| dir.join(name));
    if !identity.exists() {
        let (made, text) = AgeIdentity::generate()?;
        fs::write(&identity, text.as_bytes())?;
        fs::write(&recipient, made.recipient().to_string())?;
    }
    Ok((identity, fs::read_to_string(recipient)?))
}

fn way(bench: &Bench, suite: &str) -> Result<Way> {
    let (identity, recipient) = keys(&bench.dir)?;
    let identity = identity.to_str().context("a path that is no text")?;
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    Ok(Way {
        dump: words(&["--encrypt", "--recipient", &recipient, "--suite", suite]),
        restore: words(&["--identity", identity]),
    })
}

pub fn memory(bench: &mut Bench) -> Result<()> {
    let ways = SUITES.map(|(suite, _)| way(bench, suite));
    let [gcm, xts] = ways;
    let (gcm, xts) = (gcm?, xts?);
    let [mut plain, mut by_gcm, mut by_xts] = [(); 3].map(|()| Times::default());
    let mut others = tools::TOOLS.map(|_| Vec::new());
    for _ in 0..bench.rounds {
        bench.round("small-pages", bench.mib, &Way::default(), &mut plain)?;
        bench.round("small-pages", bench.mib, &gcm, &mut by_gcm)?;
        bench.round("small-pages", bench.mib, &xts, &mut by_xts)?;
        for ((name, command), times) in tools::TOOLS.iter().zip(&mut others) {
            times.push(tool(bench, name, command)?);
        }
    }
    let frozen = |times: &Times| median(&times.frozen) * 1e3;
    bench.add("freeze of a plain dump", frozen(&plain), "ms", None);
    for ((suite, most), times) in SUITES.iter().zip([&by_gcm, &by_xts]) {
        let goal = Some(Goal::AtMost(*most));
        let dump = median(&times.dump) / median(&plain.dump);
        let restore = median(&times.restore) / median(&plain.restore);
        bench.add(format!("sealed dump, {suite}"), dump, "× plain", goal);
        bench.add(format!("sealed restore, {suite}"), restore, "× plain", goal);
        bench.add(format!("freeze of a dump, {suite}"), frozen(times), "ms", None);
        let larger = percent(times.size, plain.size);
        bench.add(format!("size, {suite}"), larger, "% larger", Some(Goal::AtMost(LARGER)));
    }
    let mut best = f64::INFINITY;
    for ((name, _), times) in tools::TOOLS.iter().zip(&others) {
        best = best.min(median(times));
        let ratio = median(times) / median(&by_gcm.dump);
        bench.add(format!("plain dump and {name}"), ratio, "× sealed dump", None);
    }
    let ratio = best / median(&by_gcm.dump);
    bench.add("best of these tools", ratio, "× sealed dump", Some(Goal::AtLeast(FASTER)));
    peak(bench, &gcm, "sealed ")
}

/// How many percent `size` is larger than `than`.
fn percent(size: u64, than: u64) -> f64 {
    (ratio(size, than) - 1.0) * 100.0
}

/// Seconds of a plain dump with a tool in its post-dump action script.
fn tool(bench: &Bench, name: &str, command: &str) -> Result<f64> {
    let script = tools::script(&bench.dir, name, command, u64::MAX >> 1)?;
    let subject = Subject::start(&bench.dir, "small-pages", bench.mib)?;
    fs::create_dir(bench.images())?;
    let start = Instant::now();
    let pid = subject.pid().to_string();
    run(bench.command(&["dump", "-t", &pid]).arg("--action-script").arg(script))?;
    let time = start.elapsed().as_secs_f64();
    subject.gone()?;
    fs::remove_dir_all(bench.images())?;
    Ok(time)
}
