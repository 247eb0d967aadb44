//! What a run has found, as `results.json` holds it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use torpor_worker::{Class, Outcome};

use crate::catalogue::Benchmark;
use crate::config::Config;
use crate::machine::{Calibration, Machine};
use crate::overhead::Overhead;
use crate::statistics::{Summary, summary};

/// The format of `results.json`. A reader refuses what it does not know.
pub const SCHEMA: &str = "torpor-benchmark/1";

/// The fact of a target that tells which image was pulled, where that was not the tool's own.
pub(crate) const PULLED_FACT: &str = "pulled image";

/// The largest file of results that is read.
const LARGEST: u64 = 512 << 20;

/// A whole file of results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of the tool.
    pub tool: String,
    /// Which run this is.
    pub id: String,
    /// When it began, in seconds of the epoch.
    pub started: f64,
    /// When its last sample was taken.
    pub finished: f64,
    /// Whether it went to its end.
    pub complete: bool,
    /// The seed of the order of samples.
    pub seed: u64,
    /// How often it was interrupted and resumed.
    pub interruptions: u32,
    /// Samples that were taken again after an interruption, because the first had not ended.
    pub repeated: u32,
    /// The configuration.
    pub settings: Config,
    /// Where it ran.
    pub machine: Machine,
    /// The noise of the machine, from a loop between samples.
    pub calibration: Calibration,
    /// What the tool itself took of the machine.
    #[serde(default)]
    pub overhead: Overhead,
    /// What was measured.
    pub targets: Vec<Target>,
    /// Benchmarks with their units.
    pub benchmarks: Vec<Benchmark>,
    /// One entry for each benchmark of each target.
    pub rows: Vec<Row>,
}

/// A runtime under an endpoint, with what was found out about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// `endpoint/handler`.
    pub name: String,
    /// What the endpoint calls itself, with its version and API.
    pub endpoint: String,
    /// The first line of what the OCI runtime says about its version.
    pub runtime: String,
    /// The snapshotter, the cgroup driver, and other facts that matter.
    pub facts: BTreeMap<String, String>,
    /// The SHA-256 sums of programs.
    pub digests: BTreeMap<String, String>,
}

impl Target {
    /// What differs between what was found out at two times, as far as both tell.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let of = |what: &str, a: &str, b: &str| {
            let both = !a.is_empty() && !b.is_empty();
            (both && a != b).then(|| format!("{what} of {}: {a} and {b}", self.name))
        };
        let digests = self.digests.iter().filter_map(|(path, sum)| {
            of(&format!("the program {path}"), sum, other.digests.get(path)?)
        });
        let pulled = |target: &Self| target.facts.get(PULLED_FACT).cloned().unwrap_or_default();
        let whole = [
            of("the endpoint", &self.endpoint, &other.endpoint),
            of("the runtime", &self.runtime, &other.runtime),
            of("the pulled image", &pulled(self), &pulled(other)),
        ];
        whole.into_iter().flatten().chain(digests).collect()
    }
}

/// What came of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// There are samples.
    Ok,
    /// The runtime cannot do this, or the machine lacks something.
    Unsupported,
    /// It was tried and failed.
    Failed,
    /// There are values, but too many of them do not show what they should.
    Invalid,
    /// Not measured yet.
    Pending,
}

/// One benchmark of one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The benchmark's name.
    pub benchmark: String,
    /// The target's name.
    pub target: String,
    /// What came of it.
    pub status: Status,
    /// Why, where it is not [`Status::Ok`]; or what went wrong in some of the samples.
    pub reason: Option<String>,
    /// How many samples have failed.
    pub failures: u32,
    /// How many do not show what they should.
    #[serde(default, skip_serializing_if = "is_none")]
    pub invalid: u32,
    /// About the samples that are not warm-up.
    pub summary: Option<Summary>,
    /// Every sample.
    pub samples: Vec<Sample>,
}

/// One value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its place in the order of the run.
    pub order: u64,
    /// When it was taken, in seconds of the epoch.
    pub time: f64,
    /// Whether it belongs to the warm-up.
    pub warmup: bool,
    /// The value, in the unit of the benchmark.
    pub value: f64,
    /// Whether it does not show what it should.
    #[serde(default, skip_serializing_if = "is_false")]
    pub invalid: bool,
    /// Whether nothing has warmed the endpoint up for it. It counts.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cold: bool,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

pub(crate) fn is_false(bit: &bool) -> bool {
    !bit
}

impl Row {
    /// The values that count; of a row that is invalid as a whole, all there are.
    #[must_use]
    pub fn values(&self) -> Vec<f64> {
        self.counted().map(|sample| sample.value).collect()
    }

    fn counted(&self) -> impl Iterator<Item = &Sample> {
        let whole = self.status == Status::Invalid;
        self.samples.iter().filter(move |sample| !sample.warmup && (whole || !sample.invalid))
    }

    /// How many of them met an endpoint that was not warm.
    #[must_use]
    pub fn cold(&self) -> usize {
        self.counted().filter(|sample| sample.cold).count()
    }

    /// Computes the summary from the samples.
    pub fn summarize(&mut self) {
        self.summary = summary(&self.values());
    }
}

/// Why a file of results cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// It cannot be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, #[source] io::Error),
    /// It is not a file of results, or a damaged one.
    #[error("{0}: these are no results of this benchmark: {1}")]
    Broken(PathBuf, String),
}

impl From<ResultsError> for Outcome {
    fn from(error: ResultsError) -> Self {
        let text = error.to_string();
        match error {
            ResultsError::Broken(..) => Self::failed(Class::Refused, text),
            ResultsError::File(_, error) => {
                let failed = Self::failed(Class::Kernel, text);
                Self { errno: error.raw_os_error().unwrap_or(failed.errno), ..failed }
            }
        }
    }
}

/// Reads `results.json`, or the one in a directory.
///
/// # Errors
/// If it cannot be read, or is damaged.
pub fn read(path: &Path) -> Result<Results, ResultsError> {
    let file = if path.is_dir() { path.join("results.json") } else { path.to_owned() };
    let failed = |error| ResultsError::File(file.clone(), error);
    let size = std::fs::metadata(&file).map_err(failed)?.len();
    let broken = |text: String| ResultsError::Broken(file.clone(), text);
    if size > LARGEST {
        return Err(broken(format!("the file has {size} bytes; at most {LARGEST} are read")));
    }
    parse(&file, &std::fs::read(&file).map_err(failed)?)
}

/// The results that bytes hold which came from `name`.
///
/// # Errors
/// If they are no JSON, of another schema, or contradict themselves.
pub fn parse(name: &Path, bytes: &[u8]) -> Result<Results, ResultsError> {
    let broken = |text: String| ResultsError::Broken(name.to_owned(), text);
    let mut results: Results =
        serde_json::from_slice(bytes).map_err(|error| broken(error.to_string()))?;
    check(&results).map_err(broken)?;
    // Samples are the truth: a summary is never taken from the file.
    results.rows.iter_mut().for_each(Row::summarize);
    Ok(results)
}

fn check(results: &Results) -> Result<(), String> {
    if results.schema != SCHEMA {
        return Err(format!("its schema is `{}`, and not `{SCHEMA}`", results.schema));
    }
    let known: BTreeMap<&str, &Benchmark> =
        results.benchmarks.iter().map(|b| (b.name.as_str(), b)).collect();
    let mut seen = std::collections::BTreeSet::new();
    for row in &results.rows {
        let name = format!("{} of {}", row.benchmark, row.target);
        if !known.contains_key(row.benchmark.as_str()) {
            return Err(format!("{name}: there is no such benchmark in this file"));
        }
        if !results.targets.iter().any(|target| target.name == row.target) {
            return Err(format!("{name}: there is no such target in this file"));
        }
        if !seen.insert((&row.benchmark, &row.target)) {
            return Err(format!("{name}: there are two rows"));
        }
        if row.status == Status::Ok && row.values().is_empty() {
            return Err(format!("{name}: it is called ok and has no samples"));
        }
        if row.samples.iter().any(|sample| !sample.value.is_finite()) {
            return Err(format!("{name}: a sample is not a number"));
        }
    }
    Ok(())
}

/// A reason without the identifiers in it, which differ from one sample to the next.
#[must_use]
pub(crate) fn without_ids(reason: &str) -> String {
    let mut text = String::with_capacity(reason.len());
    let mut word = String::new();
    for c in reason.chars().chain(std::iter::once('\n')) {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        let id = word.len() >= 16 && word.chars().all(|c| c.is_ascii_hexdigit());
        text.push_str(if id { "…" } else { &word });
        word.clear();
        text.push(c);
    }
    text.pop();
    text
}

/// The beginning of the names of files that are being written.
const UNFINISHED: &str = ".torpor-benchmark-";

/// Removes what somebody was writing in a directory who was killed. Nobody else may be writing there.
pub(crate) fn remove_unfinished(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            // What stays is in nobody's way.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Writes a file whole or not at all.
///
/// # Errors
/// If the file beside it cannot be written, or not be renamed: a full disk, no right to write there.
pub fn write_whole(path: &Path, content: &[u8]) -> Result<(), ResultsError> {
    let failed = |error| ResultsError::File(path.to_owned(), error);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(dir).map_err(failed)?;
    io::Write::write_all(&mut file, content).map_err(failed)?;
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::fchmod(file.as_file(), mode).map_err(|error| failed(error.into()))?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{UNFINISHED, remove_unfinished, without_ids, write_whole};

    #[test]
    fn what_was_not_written_to_its_end_goes_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at(&format!("{UNFINISHED}x1")), "{").unwrap();
        fs::write(at(".torpor"), "somebody's").unwrap();
        write_whole(&at("results.json"), b"{}").unwrap();
        remove_unfinished(dir.path());
        let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, [".torpor", "results.json"]);
        assert_eq!(fs::read(at("results.json")).unwrap(), b"{}");
        remove_unfinished(Path::new("/nonexistent"));
    }

    #[test]
    fn identifiers_are_left_out_of_reasons() {
        let text = "task 0123456789abcdef0123: no such file (12 of abcdef)";
        assert_eq!(without_ids(text), "task …: no such file (12 of abcdef)");
    }
}
