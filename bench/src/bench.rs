//! What all parts of the benchmark share: rounds of dump and restore, and the table.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use torpor_images::proto::{DumpStatsEntry, RestoreStatsEntry, StatsEntry};
use torpor_images::{ImageDir, kind};

use crate::subject::Subject;

/// A line of the result.
struct Line {
    what: String,
    value: f64,
    unit: &'static str,
    goal: Option<Goal>,
}

/// What the project promises.
#[derive(Clone, Copy)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn met(self, value: f64) -> bool {
        match self {
            Goal::AtMost(most) => value <= most,
            Goal::AtLeast(least) => value >= least,
        }
    }

    fn text(self, unit: &str) -> String {
        match self {
            Goal::AtMost(most) => format!("≤ {most} {unit}"),
            Goal::AtLeast(least) => format!("≥ {least} {unit}"),
        }
    }
}

/// Seconds of each dump, its freeze, and the restore.
#[derive(Default)]
pub struct Times {
    pub dump: Vec<f64>,
    pub frozen: Vec<f64>,
    pub restore: Vec<f64>,
    /// Of the restore: until a process without rights had read the images.
    pub reading: Vec<f64>,
    /// Bytes of the images.
    pub size: u64,
    /// What the last dump says of itself.
    pub stats: DumpStatsEntry,
    /// What the last restore does.
    pub restored: RestoreStatsEntry,
}

/// One way to dump and restore: further words for both commands.
#[derive(Default)]
pub struct Way {
    pub dump: Vec<String>,
    pub restore: Vec<String>,
}

pub struct Bench {
    torpor: PathBuf,
    /// On a tmpfs; everything that is made lies here.
    pub dir: PathBuf,
    /// Where tables are left that are more than lines of this one.
    pub results: PathBuf,
    /// How often everything is measured.
    pub rounds: u64,
    /// Size of the memory to dump.
    pub mib: u64,
    lines: Vec<Line>,
}

impl Bench {
    pub fn new(torpor: &Path, dir: &Path, results: &Path, rounds: u64, mib: u64) -> Self {
        let [torpor, dir, results] = [torpor, dir, results].map(Path::to_owned);
        Bench { torpor, dir, results, rounds, mib, lines: Vec::new() }
    }

    /// The same for another program under test.
    pub fn of(&self, torpor: &Path) -> Bench {
        Bench::new(torpor, &self.dir, &self.results, self.rounds, self.mib)
    }

    /// Adds a line to the table.
    pub fn add(
        &mut self,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        goal: Option<Goal>,
    ) {
        let what = what.into();
        eprintln!("{what}: {value:.2} {unit}");
        self.lines.push(Line { what, value, unit, goal });
    }

    /// What each round gives, in a directory of its own that is gone afterwards.
    pub fn rounds_in<T>(&self, name: &str, run: impl Fn(&Path) -> Result<T>) -> Result<Vec<T>> {
        let dir = self.dir.join(name);
        let round = |_| {
            fs::create_dir(&dir)?;
            let seen = run(&dir)?;
            Ok(fs::remove_dir_all(&dir).map(|()| seen)?)
        };
        (0..self.rounds).map(round).collect()
    }

    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// The program under test.
    pub fn torpor(&self) -> &Path {
        &self.torpor
    }

    pub fn command(&self, words: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(&self.torpor);
        command.args(words).arg("-D").arg(self.images());
        command
    }

    /// One dump and restore of a fresh process.
    pub fn round(&self, kind: &str, count: u64, way: &Way, times: &mut Times) -> Result<()> {
        let subject = Subject::start(&self.dir, kind, count)?;
        fs::create_dir(self.images())?;
        self.warm_up()?;
        let start = Instant::now();
        run(self.command(&["dump", "-t", &subject.pid().to_string()]).args(&way.dump))?;
        times.dump.push(start.elapsed().as_secs_f64());
        times.stats = stats(&self.images())?;
        times.frozen.push(f64::from(times.stats.frozen_time) / 1e6);
        times.size = size(&self.images())?;
        subject.gone()?;
        let start = Instant::now();
        run(self.command(&["restore", "-d"]).args(&way.restore))?;
        times.restore.push(start.elapsed().as_secs_f64());
        times.restored = restored(&self.images())?;
        // An older build has no such process.
        if let Some(reading) = times.restored.torpor_reading_time {
            times.reading.push(f64::from(u32::try_from(reading)?) / 1e6);
        }
        subject.end()?;
        Ok(fs::remove_dir_all(self.images())?)
    }

    /// Uses as much memory as a file of images takes. The host of a virtual machine takes back
    /// what has not been used for a moment, and to have it again takes seconds for a GiB: more
    /// than all that is to be measured.
    pub fn warm_up(&self) -> Result<()> {
        let path = self.dir.join("warm");
        let mut file = fs::File::create(&path)?;
        let chunk = vec![1; 1 << 20];
        (0..self.mib).try_for_each(|_| file.write_all(&chunk))?;
        Ok(fs::remove_file(path)?)
    }

    pub fn table(&self) -> String {
        let mut out = String::from("| what | measured | goal | |\n|---|---:|---:|---|\n");
        for line in &self.lines {
            let goal = line.goal.map_or(String::new(), |goal| goal.text(line.unit));
            let missed = line.goal.is_some_and(|goal| !goal.met(line.value));
            let verdict = if missed { "missed" } else { "" };
            let (what, value, unit) = (&line.what, line.value, line.unit);
            out += &format!("| {what} | {value:.2} {unit} | {goal} | {verdict} |\n");
        }
        out
    }

    pub fn json(&self) -> Value {
        let line = |line: &Line| {
            let (least, most) = match line.goal {
                Some(Goal::AtLeast(least)) => (Some(least), None),
                Some(Goal::AtMost(most)) => (None, Some(most)),
                None => (None, None),
            };
            let (what, value, unit) = (&line.what, line.value, line.unit);
            json!({"what": what, "value": value, "unit": unit, "at_least": least, "at_most": most})
        };
        self.lines.iter().map(line).collect()
    }
}

/// Runs a command to its end; its words are in the error if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(())
}

/// What a dump says of itself.
pub fn stats(images: &Path) -> Result<DumpStatsEntry> {
    let stats: StatsEntry = ImageDir::open(images)?.read_one(kind::STATS_DUMP, 0)?;
    stats.dump.context("stats-dump holds nothing of a dump")
}

/// Seconds that the tree was frozen.
pub fn frozen(images: &Path) -> Result<f64> {
    Ok(f64::from(stats(images)?.frozen_time) / 1e6)
}

/// What a restore says of itself.
fn restored(images: &Path) -> Result<RestoreStatsEntry> {
    let stats: StatsEntry = ImageDir::open(images)?.read_one(kind::STATS_RESTORE, 0)?;
    stats.restore.context("stats-restore holds nothing of a restore")
}

/// Bytes of all files in a directory.
pub fn size(dir: &Path) -> Result<u64> {
    let (pages, rest) = sizes(dir)?;
    Ok(pages + rest)
}

/// How many times `to` goes into `from`.
#[allow(clippy::cast_precision_loss, reason = "sizes of files, for a ratio")]
pub fn ratio(from: u64, to: u64) -> f64 {
    from as f64 / to as f64
}

/// Bytes of the pages in a directory of images, and of all other files in it.
pub fn sizes(dir: &Path) -> Result<(u64, u64)> {
    let (mut pages, mut rest) = (0, 0);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Not their tags.
        let number = name.strip_prefix("pages-").unwrap_or_default();
        let is_pages = number.starts_with(|first: char| first.is_ascii_digit());
        *(if is_pages { &mut pages } else { &mut rest }) += entry.metadata()?.len();
    }
    Ok((pages, rest))
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
