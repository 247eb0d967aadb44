//! Benchmarks of dump and restore: `make bench`.
//!
//! Everything is measured in one run on one tmpfs, as medians of five, and stated as
//! ratios to `cp` of a file of 1 GiB there, so that machines can be compared.

mod subject;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use subject::Subject;

/// How often everything is measured.
const ROUNDS: usize = 5;
/// Size of the memory to dump, in MiB.
const MEMORY: u64 = 1024;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["peak", program, rest @ ..] => peak_of(program, rest),
        [torpor, dir, json] => measure(Path::new(torpor), Path::new(dir), Path::new(json)),
        _ => anyhow::bail!("usage: torpor-bench TORPOR DIRECTORY-ON-TMPFS RESULT.json"),
    }
}

/// Runs a program and prints the most memory that it had, in KiB. In a process of its
/// own, since the kernel counts all children together.
fn peak_of(program: &str, args: &[&str]) -> Result<()> {
    ensure!(Command::new(program).args(args).status()?.success(), "{program} failed");
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}

/// A line of the result.
struct Line {
    what: String,
    value: f64,
    unit: &'static str,
    /// What the project promises at most.
    target: Option<f64>,
}

fn measure(torpor: &Path, dir: &Path, result: &Path) -> Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let mut bench = Bench { torpor: torpor.to_owned(), dir: dir.to_owned(), lines: Vec::new() };
    bench.memory()?;
    bench.many("process", "processes", 500, 100.0)?;
    bench.many("thread", "threads", 2000, 50.0)?;
    bench.small()?;
    bench.mappings()?;
    print!("{}", bench.table());
    fs::write(result, serde_json::to_string_pretty(&bench.json())? + "\n")?;
    Ok(())
}

struct Bench {
    torpor: PathBuf,
    dir: PathBuf,
    lines: Vec<Line>,
}

/// Seconds of a dump, its freeze, and the restore.
#[derive(Default)]
struct Times {
    dump: Vec<f64>,
    frozen: Vec<f64>,
    restore: Vec<f64>,
}

impl Bench {
    fn add(
        &mut self,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: Option<f64>,
    ) {
        let what = what.into();
        eprintln!("{what}: {value:.2} {unit}");
        self.lines.push(Line { what, value, unit, target });
    }

    /// 1 GiB of random private memory, in small and in huge pages, against `cp`.
    fn memory(&mut self) -> Result<()> {
        let mut copies = Vec::new();
        for kind in ["small-pages", "huge-pages"] {
            let mut times = Times::default();
            for _ in 0..ROUNDS {
                copies.push(self.copy()?);
                self.round(kind, MEMORY, &mut times)?;
            }
            let copy = median(&copies);
            self.add(
                format!("dump of 1 GiB, {kind}"),
                median(&times.dump) / copy,
                "× cp",
                Some(1.0),
            );
            self.add(
                format!("restore of 1 GiB, {kind}"),
                median(&times.restore) / copy,
                "× cp",
                Some(1.0),
            );
        }
        self.add("cp of 1 GiB", median(&copies), "s", None);
        self.peak()
    }

    /// Seconds that `cp` of a file as large as the memory takes.
    fn copy(&self) -> Result<f64> {
        let (from, to) = (self.dir.join("from"), self.dir.join("to"));
        if !from.exists() {
            let count = format!("count={MEMORY}");
            let of = format!("of={}", from.display());
            let args = ["if=/dev/urandom", "bs=1M", &count, &of, "status=none"];
            ensure!(Command::new("dd").args(args).status()?.success(), "dd failed");
        }
        let start = Instant::now();
        ensure!(Command::new("cp").arg(&from).arg(&to).status()?.success(), "cp failed");
        let time = start.elapsed().as_secs_f64();
        fs::remove_file(&to)?;
        Ok(time)
    }

    /// One dump and restore of a fresh process.
    fn round(&self, kind: &str, count: u64, times: &mut Times) -> Result<()> {
        let subject = Subject::start(&self.dir, kind, count)?;
        let images = self.dir.join("images");
        fs::create_dir(&images)?;
        let start = Instant::now();
        self.run(&["dump", "-t", &subject.pid().to_string()])?;
        times.dump.push(start.elapsed().as_secs_f64());
        times.frozen.push(frozen(&images)?);
        subject.gone()?;
        let start = Instant::now();
        self.run(&["restore", "-d"])?;
        times.restore.push(start.elapsed().as_secs_f64());
        subject.end()?;
        Ok(fs::remove_dir_all(&images)?)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.torpor);
        command.args(args).arg("-D").arg(self.dir.join("images"));
        command
    }

    fn run(&self, args: &[&str]) -> Result<()> {
        let output = self.command(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "torpor {args:?}: {said}");
        Ok(())
    }

    /// The most memory that torpor needs for 1 GiB.
    fn peak(&mut self) -> Result<()> {
        let subject = Subject::start(&self.dir, "small-pages", MEMORY)?;
        fs::create_dir(self.dir.join("images"))?;
        let dump = self.peak_run(&["dump", "-t", &subject.pid().to_string()])?;
        subject.gone()?;
        let restore = self.peak_run(&["restore", "-d"])?;
        subject.end()?;
        fs::remove_dir_all(self.dir.join("images"))?;
        self.add("peak memory of the dump of 1 GiB", dump, "MiB", Some(64.0));
        self.add("peak memory of the restore of 1 GiB", restore, "MiB", Some(64.0));
        Ok(())
    }

    fn peak_run(&self, args: &[&str]) -> Result<f64> {
        let inner = self.command(args);
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("peak").arg(inner.get_program()).args(inner.get_args());
        let output = command.output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let kib: f64 =
            text.lines().last().unwrap_or_default().trim().parse().with_context(|| {
                format!("torpor {args:?}: {}", String::from_utf8_lossy(&output.stderr))
            })?;
        Ok(kib / 1024.0)
    }

    /// A tree of many processes, or a process of many threads: per task.
    fn many(&mut self, name: &str, kind: &str, count: u32, target: f64) -> Result<()> {
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            self.round(kind, u64::from(count), &mut times)?;
        }
        let each = |times: &[f64]| median(times) / f64::from(count) * 1e6;
        self.add(
            format!("dump of {count} {kind}, per {name}"),
            each(&times.dump),
            "µs",
            Some(target),
        );
        self.add(format!("freeze of {count} {kind}, per {name}"), each(&times.frozen), "µs", None);
        self.add(
            format!("restore of {count} {kind}, per {name}"),
            each(&times.restore),
            "µs",
            None,
        );
        Ok(())
    }

    fn small(&mut self) -> Result<()> {
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            self.round("sleep", 0, &mut times)?;
        }
        self.add("dump of a small process", median(&times.dump) * 1e3, "ms", Some(15.0));
        self.add("restore of a small process", median(&times.restore) * 1e3, "ms", Some(15.0));
        Ok(())
    }

    fn mappings(&mut self) -> Result<()> {
        let mut times = Times::default();
        for _ in 0..ROUNDS {
            self.round("mappings", 20_000, &mut times)?;
        }
        self.add("dump of 20,000 mappings", median(&times.dump) * 1e3, "ms", None);
        self.add("restore of 20,000 mappings", median(&times.restore) * 1e3, "ms", Some(100.0));
        Ok(())
    }

    fn table(&self) -> String {
        let mut out = String::from("| what | measured | at most |\n|---|---:|---:|\n");
        for line in &self.lines {
            let target = line.target.map_or(String::new(), |t| format!("{t} {}", line.unit));
            out += &format!("| {} | {:.2} {} | {target} |\n", line.what, line.value, line.unit);
        }
        out
    }

    fn json(&self) -> Value {
        self.lines
            .iter()
            .map(|l| json!({"what": l.what, "value": l.value, "unit": l.unit, "at_most": l.target}))
            .collect()
    }
}

/// Seconds that the tree was frozen, by `stats-dump`.
fn frozen(images: &Path) -> Result<f64> {
    use torpor_images::{ImageDir, kind, proto::StatsEntry};
    let stats: StatsEntry = ImageDir::open(images)?.read_one(kind::STATS_DUMP, 0)?;
    let dump = stats.dump.context("stats-dump holds nothing of a dump")?;
    Ok(f64::from(dump.frozen_time) / 1e6)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
