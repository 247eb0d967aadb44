//! Benchmarks of dump and restore: `make bench`.
//!
//! Everything is measured in one run on one tmpfs, as medians, and stated as ratios to
//! something that was measured in the same run, so that machines can be compared.

mod bench;
mod beside;
mod compress;
mod container;
mod cow;
mod faults;
mod floor;
mod judged;
mod last_step;
mod lazy;
mod memory;
mod migrate;
mod place;
mod process;
mod redis;
mod registry;
mod relatives;
mod rounds;
mod sealed;
mod snapshot;
mod starts;
mod subject;
mod tasks;
mod tools;
mod touches;
mod working_set;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};

use bench::Bench;

/// A part of the benchmark: its name and what it measures.
type Part = (&'static str, fn(&mut Bench) -> Result<()>);

const PARTS: [Part; 25] = [
    ("memory", memory::measure),
    ("rounds", rounds::measure),
    ("last-step", last_step::measure),
    ("cow", cow::measure),
    ("cow-redis", cow::redis),
    ("lazy", lazy::measure),
    ("faults", faults::measure),
    ("working-set", working_set::measure),
    ("compress", compress::measure),
    ("relatives", relatives::measure),
    ("processes", tasks::processes),
    ("threads", tasks::threads),
    ("small", tasks::small),
    ("judged", judged::measure),
    ("beside", beside::measure),
    ("mappings", tasks::mappings),
    ("sealed", sealed::memory),
    ("stress-ng", container::stress_ng),
    ("nginx", container::nginx),
    ("snapshot", snapshot::measure),
    ("starts", starts::measure),
    ("migrate", migrate::measure),
    ("stream", migrate::stream),
    ("fetched", migrate::fetched),
    ("cancelled", migrate::cancelled),
];

const USAGE: &str = "usage: torpor-bench TORPOR DIRECTORY-ON-TMPFS RESULT.json [PART...]
BENCH_ROUNDS: how often everything is measured (5)
BENCH_MIB: how much memory is dumped (1024)
BENCH_BESIDE: another build of torpor, which the part \"beside\" measures in turns with this one
MIGRATE_SERVICES: what is migrated (\"redis mariadb graph tree\"); MIGRATE_PROCESSES: of the tree (500)
MIGRATE_MODES, MIGRATE_GBITS, MIGRATE_READS: how (all modes, \"1 10\", \"95 10\")
MIGRATE_MIB: how much data there is, several sizes if wanted, the least first (BENCH_MIB)
MIGRATE_BANDWIDTH: the most that rounds may send a second, as --bandwidth has it (no limit)
MIGRATE_TIMES: how often (1); MIGRATE_MARGIN: milliseconds of load before and after (3000)";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["peak", program, rest @ ..] => peak_of(program, rest),
        [torpor, dir, json, parts @ ..] => {
            measure(Path::new(torpor), Path::new(dir), Path::new(json), parts)
        }
        _ => anyhow::bail!(USAGE),
    }
}

/// Runs a program and prints the most memory that it had, in KiB. In a process of its
/// own, since the kernel counts all children together.
fn peak_of(program: &str, args: &[&str]) -> Result<()> {
    ensure!(Command::new(program).args(args).status()?.success(), "{program} failed");
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}

fn measure(torpor: &Path, dir: &Path, result: &Path, parts: &[&str]) -> Result<()> {
    if let Some(unknown) = parts.iter().find(|part| !PARTS.iter().any(|(name, _)| name == *part)) {
        let names: Vec<&str> = PARTS.iter().map(|(name, _)| *name).collect();
        anyhow::bail!("there is no part {unknown}; there are {}", names.join(", "));
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let number = |name: &str, default: u64| match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}: {text:?} is no number")),
        Err(_) => Ok(default),
    };
    let (rounds, mib) = (number("BENCH_ROUNDS", 5)?, number("BENCH_MIB", 1024)?);
    let results = result.parent().unwrap_or(Path::new("."));
    let mut bench = Bench::new(torpor, dir, results, rounds, mib);
    for (name, part) in PARTS {
        if parts.is_empty() || parts.contains(&name) {
            part(&mut bench).with_context(|| format!("part {name}"))?;
        }
    }
    print!("{}", bench.table());
    Ok(fs::write(result, serde_json::to_string_pretty(&bench.json())? + "\n")?)
}
