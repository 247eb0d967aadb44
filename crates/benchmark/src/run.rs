//! `torpor benchmark run`: carries a plan out, and survives whatever runtimes do.

use std::cell::Cell as Counter;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use torpor_worker::tell;

use crate::catalogue::{Benchmark, Group, wanted};
use crate::cell::{Cell, Trouble, Values};
use crate::config::{Config, ConfigError, Endpoint, Handler, check_here};
use crate::endpoint::{EndpointError, ReadyEndpoint, sweep_pods};
use crate::gather::{described, gather, targets};
use crate::journal::{Head, Journal, Line, Outcome, Past, Work};
use crate::machine::{Machine, Ticks, calibrate};
use crate::overhead::{self, Overhead};
use crate::plan::{Item, forecast, plan, sum};
use crate::results::{
    self, Results, ResultsError, SCHEMA, Status, Target, without_ids, write_whole,
};
use crate::trust::keeps_what_is_mine;
use crate::{keeper, report, suite};

/// Why a run does not take place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Results cannot be written.
    #[error(transparent)]
    Results(#[from] ResultsError),
    /// A file cannot be written or read.
    #[error("{0}: {1}")]
    Io(PathBuf, #[source] io::Error),
    /// There are results of something else.
    #[error(
        "{0} holds a run with another configuration; choose another directory with --output, or \
         begin anew with --again"
    )]
    Other(PathBuf),
    /// What there is of this configuration would be mixed with samples of something else.
    #[error(
        "{0} holds a run that cannot go on: {1}. Choose another directory with --output, or begin \
         anew with --again; what is there can still be read by `torpor benchmark report`"
    )]
    Changed(PathBuf, String),
    /// Others can exchange what a run keeps.
    #[error(
        "{0} belongs to another user, or others may exchange what is in it: name a directory of \
         your own with TMPDIR"
    )]
    Unsafe(PathBuf),
    /// Another run is at work.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The configuration and the filters leave nothing.
    #[error(
        "nothing is left to measure: the filters take in no benchmark, see `torpor benchmark list`"
    )]
    Nothing,
    /// The report cannot be made.
    #[error("the report: {0}")]
    Report(String),
}

/// The file in the directory of results that all else is computed from.
pub(crate) const JOURNAL: &str = "journal.jsonl";

/// How often one may fail in a row before a target's group is given up.
const PATIENCE: u32 = 3;
/// How often files are written anew while the run goes on.
const REFRESH: Duration = Duration::from_secs(5);
/// Writing takes longer with each sample: it may take one of so many parts of the time.
const SELDOM: u32 = 50;
/// How often the loop that shows noise is run.
const CALIBRATE: Duration = Duration::from_secs(3);

/// A run in progress.
struct Running {
    config: Config,
    output: PathBuf,
    benchmarks: Vec<Benchmark>,
    journal: Journal,
    past: Past,
    places: Vec<Result<ReadyEndpoint, String>>,
    /// What is given up: why, for a group of a target.
    given_up: BTreeMap<(Group, usize), String>,
    failures: BTreeMap<(Group, usize), u32>,
    /// What was done before since its endpoint was opened.
    warm: BTreeSet<(Group, usize)>,
    /// Endpoints, by their places, where something is left that could not be removed yet, and when that is tried again.
    untidy: BTreeMap<usize, Instant>,
    /// The processors' time when it was last noted.
    ticks: Ticks,
    /// What was said about targets already.
    said: BTreeSet<(usize, String)>,
    made: Counter<u64>,
    /// The CPU time that weighing has taken in the piece of work that is done now.
    weighed: Counter<Duration>,
    /// How many pieces of work have ended, those of before included.
    done: usize,
    /// Whether the tool was started before for this run.
    is_resumed: bool,
    written: Instant,
    /// How long writing took.
    writing: Duration,
}

fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

/// Carries a configuration out, from its beginning or from where it was interrupted.
///
/// # Errors
/// If it cannot begin, or results cannot be written. What a runtime does is no error: it is in the
/// results.
pub(crate) async fn run(
    mut config: Config,
    output: &Path,
    again: bool,
) -> Result<Results, RunError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| RunError::Io(path, error)
    };
    let kept = std::env::temp_dir();
    if !keeps_what_is_mine(&kept) {
        return Err(RunError::Unsafe(kept));
    }
    // Before a journal is begun: one of nothing would be in the way of the next run, or take the place of results.
    if wanted(&config).is_empty() {
        return Err(RunError::Nothing);
    }
    std::fs::create_dir_all(output).map_err(at(output))?;
    let path = output.join(JOURNAL);
    if config.endpoints.is_empty() {
        config.endpoints = crate::config::found().await?;
    }
    config.output = None;
    let is_resumed = path.exists() && !again;
    let (journal, past) = if is_resumed {
        resume(&path, &config)?
    } else {
        check_here(&config)?;
        begin(&path, &config).map_err(at(&path))?
    };
    // Whoever has the journal is the only one who writes here.
    results::remove_unfinished(output);
    if let Some(results) = whole(output, &past) {
        return Ok(results);
    }
    let benchmarks = wanted(&past.head.config);
    let mut run = Running {
        config: past.head.config.clone(),
        output: output.to_owned(),
        benchmarks,
        journal,
        past,
        places: Vec::new(),
        given_up: BTreeMap::new(),
        failures: BTreeMap::new(),
        warm: BTreeSet::new(),
        untidy: BTreeMap::new(),
        ticks: Ticks::now(),
        said: BTreeSet::new(),
        made: Counter::new(0),
        weighed: Counter::new(Duration::ZERO),
        done: 0,
        is_resumed,
        written: Instant::now(),
        writing: Duration::ZERO,
    };
    if !run.past.complete() {
        run.all().await?;
    }
    run.write()
}

fn begin(path: &Path, config: &Config) -> io::Result<(Journal, Past)> {
    let started = now();
    let seed = config.seed.unwrap_or_else(|| fastrand::u64(..));
    let (plan, _) = planned(config, seed);
    let head = Head {
        schema: SCHEMA.into(),
        tool: env!("CARGO_PKG_VERSION").into(),
        id: format!("{:016x}", fastrand::u64(..)),
        started,
        seed,
        plan: Some(plan),
        config: config.clone(),
        machine: Machine::here(),
    };
    let journal = Journal::create(path, &head)?;
    Ok((journal, Past { head, lines: Vec::new() }))
}

/// What a configuration asks for, in its order, and the sum of both.
fn planned(config: &Config, seed: u64) -> (String, Vec<Item>) {
    let wanted = wanted(config);
    let items = plan(config, &wanted, targets(config).len(), seed);
    (sum(&items, &wanted), items)
}

fn resume(path: &Path, config: &Config) -> Result<(Journal, Past), RunError> {
    let (journal, past) =
        Journal::open(path).map_err(|error| RunError::Io(path.to_owned(), error))?;
    let dir = path.parent().unwrap_or(path);
    if past.head.schema != SCHEMA || past.head.config != *config {
        return Err(RunError::Other(dir.to_owned()));
    }
    if whole(dir, &past).is_none() {
        let changed = changes(&past);
        if !changed.is_empty() {
            return Err(RunError::Changed(dir.to_owned(), changed.join("; ")));
        }
        check_here(config)?;
    }
    Ok((journal, past))
}

/// The results of a run that has nothing left to do.
fn whole(output: &Path, past: &Past) -> Option<Results> {
    let results = results::read(output).ok().filter(|_| past.complete())?;
    let report = output.join("report.html").exists();
    (report && results.complete && results.id == past.head.id).then_some(results)
}

/// What is not as it was when a run began: samples of before and of now are not of the same.
fn changes(past: &Past) -> Vec<String> {
    let (head, tool) = (&past.head, env!("CARGO_PKG_VERSION"));
    let mut changes = Vec::new();
    if head.tool != tool {
        changes
            .push(format!("it was begun by version {} of the tool, and this is {tool}", head.tool));
    }
    match &head.plan {
        None => changes.push("the tool that began it did not note what each sample is of".into()),
        Some(plan) if *plan != planned(&head.config, head.seed).0 => {
            changes.push("this tool measures other things, or in another order".into());
        }
        Some(_) => {}
    }
    let machine = head.machine.differences(&Machine::here());
    changes.extend(machine.into_iter().map(|text| format!("the machine is another: {text}")));
    changes
}

impl Running {
    fn note(&mut self, line: Line) -> Result<(), RunError> {
        let failed = |error| RunError::Io(self.output.join(JOURNAL), error);
        self.journal.add(&line).map_err(failed)?;
        self.past.lines.push(line);
        Ok(())
    }

    /// The endpoint and the handler of a target, by its place in the list.
    fn target(&self, target: usize) -> (usize, &Endpoint, &Handler) {
        let all = self.config.endpoints.iter().enumerate().flat_map(|(place, endpoint)| {
            endpoint.handlers.iter().map(move |handler| (place, endpoint, handler))
        });
        let mut all = all;
        all.nth(target).unwrap_or_else(|| unreachable!("a target that is not in the list"))
    }

    async fn all(&mut self) -> Result<(), RunError> {
        if keeper::remove_forgotten() {
            tell!("another run is at work on this machine, or is ending: each disturbs the other");
        }
        let names = targets(&self.config);
        let (_, items) = planned(&self.config, self.past.head.seed);
        let done = self.past.done();
        self.done = done.len();
        let left: Vec<Item> =
            items.iter().filter(|item| !done.contains(&item.number)).copied().collect();
        self.announce(&names, &left);
        for endpoint in self.config.endpoints.clone() {
            let place = match ReadyEndpoint::open(&endpoint, &self.config).await {
                Err(error @ EndpointError::Taken(_)) => return Err(error.into()),
                place => place,
            };
            if let Err(error) = &place {
                tell!("{}: {error}", endpoint.name);
            }
            self.places.push(place.map_err(|error| error.to_string()));
        }
        self.describe(&names).await?;
        let mut calibrated: Option<Instant> = None;
        for item in &left {
            if calibrated.is_none_or(|last| last.elapsed() > CALIBRATE) {
                let time = calibrate();
                self.note(Line::Calibration(time))?;
                self.note_passed()?;
                calibrated = Some(Instant::now());
            }
            self.item(item, &names, items.len()).await?;
            if self.written.elapsed() > REFRESH.max(self.writing * SELDOM) {
                self.write()?;
            }
        }
        self.places.clear();
        self.note_passed()?;
        self.note(Line::Complete)
    }

    /// Notes the processors' time since it was last noted.
    fn note_passed(&mut self) -> Result<(), RunError> {
        let now = Ticks::now();
        let passed = now.since(self.ticks);
        self.ticks = now;
        self.note(Line::Passed(passed))
    }

    /// Says beforehand what will be done, and how long it takes.
    fn announce(&self, names: &[String], left: &[Item]) {
        let minutes = forecast(left, &self.config) / 60.0;
        tell!(
            "{} benchmarks of {} on {}: {} runs after {} to warm up, about {minutes:.1} minutes",
            self.benchmarks.len(),
            names.join(", "),
            self.past.head.machine.hostname,
            self.config.runs,
            self.config.warmup,
        );
        // What a comparison of two such runs can find, where samples deviate by that much.
        let found = [0.02, 0.05, 0.1].map(|deviation| {
            let share = (1..=200).map(|p| f64::from(p) / 100.0).find(|&share| {
                crate::statistics::runs_for(share, deviation, self.config.threshold)
                    .is_some_and(|runs| runs <= self.config.runs)
            });
            let share = share.map_or("nothing".into(), |s| format!("{:.0} %", s * 100.0));
            format!("{share} (deviation {:.0} %)", deviation * 100.0)
        });
        tell!("a comparison with another run finds 95 of 100 differences of: {}", found.join(", "));
    }

    async fn describe(&mut self, names: &[String]) -> Result<(), RunError> {
        let mut list = Vec::new();
        for number in 0..names.len() {
            let (place, _, handler) = self.target(number);
            if let Ok(place) = &self.places[place] {
                list.push(place.describe(handler).await);
            }
        }
        let before = described(&self.past.lines);
        let known = |target: &Target| before.iter().find(|known| known.name == target.name);
        let pairs = list.iter().filter_map(|target| Some((known(target)?, target)));
        let changed: Vec<String> = pairs.flat_map(|(then, now)| then.differences(now)).collect();
        if !changed.is_empty() {
            return Err(RunError::Changed(self.output.clone(), changed.join("; ")));
        }
        if self.is_resumed {
            self.note(Line::Resumed { time: now() })?;
        }
        self.note(Line::Targets(list))
    }

    async fn item(&mut self, item: &Item, names: &[String], all: usize) -> Result<(), RunError> {
        self.note(Line::Begin(item.number))?;
        let key = (item.group, item.target);
        let time = now();
        let (begun, before) = (Instant::now(), self.used());
        let (outcome, cold) = match self.given_up.get(&key) {
            // What cannot be done is tried once, and is said once.
            Some(_) => (None, false),
            None => {
                let (values, cold) = self.measure(item).await;
                (Some(values), cold)
            }
        };
        let weighed = self.weighed.replace(Duration::ZERO);
        let overhead = Overhead {
            // A keeper may have been exchanged for another.
            cpu: self.used().saturating_sub(before + weighed).as_secs_f64(),
            time: begun.elapsed().as_secs_f64(),
            weighing: weighed.as_secs_f64(),
        };
        if let Some(Err(trouble)) = &outcome {
            self.after(key, trouble, &names[item.target]);
        } else if outcome.is_some() {
            self.failures.remove(&key);
        }
        let outcomes = outcome.map(|values| self.outcomes(item, values)).unwrap_or_default();
        let (group, target, warmup) = (item.group, &names[item.target], item.warmup);
        let work = Some(Work { target: target.clone(), group, warmup, cold });
        self.note(Line::Done { item: item.number, work, time, outcomes, overhead })?;
        self.done += 1;
        // Nothing depends on it.
        let _ = write!(io::stderr(), "\r\x1b[K{} of {all}: {group:?} of {target}", self.done);
        Ok(())
    }

    /// The CPU time of this process and its keepers.
    fn used(&self) -> Duration {
        let keepers = self.places.iter().flatten().map(ReadyEndpoint::keeper);
        overhead::own() + keepers.map(overhead::of).sum::<Duration>()
    }

    fn after(&mut self, key: (Group, usize), trouble: &Trouble, target: &str) {
        let count = self.failures.entry(key).or_insert(0);
        *count += 1;
        let lacking = matches!(trouble, Trouble::Unsupported(_));
        if lacking || *count >= PATIENCE {
            self.given_up.insert(key, trouble.to_string());
        }
        let what = if lacking { "is not supported" } else { "has failed" };
        // A reason that many groups share, such as an endpoint that does not start, is said once.
        if self.said.insert((key.1, without_ids(&trouble.to_string()))) {
            tell!("\r\x1b[K{:?} of {target} {what}: {trouble}", key.0);
        }
    }

    /// Takes the samples of one item, and says whether nothing had warmed its endpoint up for it. Whatever the
    /// runtime does, this comes back.
    async fn measure(&mut self, item: &Item) -> (Result<Values, Trouble>, bool) {
        if let Err(trouble) = self.revive(item.target).await {
            return (Err(trouble), false);
        }
        let number = self.target(item.target).0;
        if self.untidy.get(&number).is_some_and(|&again| again <= Instant::now()) {
            self.tidy(number).await;
        }
        let cold = self.warm.insert((item.group, item.target)) && !item.warmup;
        (self.samples(item).await, cold)
    }

    /// Starts the endpoint of a target again, if it can be, and does not answer.
    async fn revive(&mut self, target: usize) -> Result<(), Trouble> {
        let (number, endpoint, _) = self.target(target);
        let endpoint = endpoint.clone();
        let alive = match &self.places[number] {
            Ok(place) => place.answers().await,
            Err(error) => return Err(Trouble::Failed(error.clone())),
        };
        if !alive && endpoint.containerd.is_some() {
            // It has crashed, or hangs: its successor gets namespaces and directories of its own.
            self.open_again(number, &endpoint).await;
        }
        Ok(())
    }

    async fn samples(&mut self, item: &Item) -> Result<Values, Trouble> {
        let (number, _, handler) = self.target(item.target);
        let place = self.places[number].as_ref().map_err(|e| Trouble::Failed(e.clone()))?;
        let (config, made, weighed) = (&self.config, &self.made, &self.weighed);
        let cell = Cell { place, handler, config, made, weighed };
        let limit = Duration::from_secs(self.config.patience);
        let values = tokio::time::timeout(limit, suite::measure(item.group, &cell)).await;
        let values = values.unwrap_or_else(|_| {
            Err(Trouble::Failed(format!("it did not end within {} s", limit.as_secs())))
        });
        if values.is_err() {
            self.tidy(number).await;
        }
        values
    }

    /// Removes what a failed item has left at an endpoint, so that the next one does not meet it. What cannot be removed
    /// by calls goes with its namespaces, or is tried again before a later item: so late that little of the run goes by
    /// with it.
    async fn tidy(&mut self, number: usize) {
        let Ok(place) = &self.places[number] else { return };
        let begun = Instant::now();
        // There may be as many containers as a sample has had the time to start.
        let limit = Duration::from_secs(self.config.patience);
        let client = place.client.within(Duration::from_secs(10));
        let done = tokio::time::timeout(limit, sweep_pods(&client)).await;
        if matches!(done, Ok(Ok(()))) {
            self.untidy.remove(&number);
        } else if place.ours() {
            let endpoint = place.endpoint.clone();
            self.open_again(number, &endpoint).await;
        } else if self.untidy.insert(number, Instant::now() + begun.elapsed() * 10).is_none() {
            let name = &place.endpoint.name;
            tell!(
                "\r\x1b[K{name}: what has failed is still there, and is measured beside until it can be removed"
            );
        }
    }

    /// Starts a containerd anew; nothing has warmed it up.
    async fn open_again(&mut self, number: usize, endpoint: &Endpoint) {
        self.places[number] = Err("it is being started again".into());
        let place = ReadyEndpoint::open(endpoint, &self.config).await;
        self.places[number] = place.map_err(|error| error.to_string());
        let warm = std::mem::take(&mut self.warm).into_iter();
        self.warm = warm.filter(|&(_, target)| self.target(target).0 != number).collect();
    }

    /// The values of a group under the names of benchmarks, for those that are asked for.
    fn outcomes(&self, item: &Item, values: Result<Values, Trouble>) -> Vec<Outcome> {
        let group = self.benchmarks.iter().filter(|benchmark| benchmark.group == item.group);
        group
            .map(|benchmark| {
                let value = match &values {
                    Ok(values) => values
                        .iter()
                        .find(|(name, _)| benchmark.name.ends_with(&format!(".{name}")))
                        .map_or(Err(Trouble::Failed("it gave no value".into())), |v| v.1.clone()),
                    Err(trouble) => Err(trouble.clone()),
                };
                outcome(&benchmark.name, value)
            })
            .collect()
    }

    fn write(&mut self) -> Result<Results, RunError> {
        let begun = Instant::now();
        let results = gather(&self.past);
        let text =
            serde_json::to_vec_pretty(&results).map_err(|e| RunError::Report(e.to_string()))?;
        write_whole(&self.output.join("results.json"), &text)?;
        let html = report::html(&[&results]).map_err(|e| RunError::Report(e.to_string()))?;
        write_whole(&self.output.join("report.html"), html.as_bytes())?;
        self.written = Instant::now();
        self.writing = begun.elapsed();
        Ok(results)
    }
}

fn outcome(name: &str, value: Result<f64, Trouble>) -> Outcome {
    let (status, value, reason) = match value {
        Ok(value) if value.is_finite() => (Status::Ok, Some(value), None),
        Ok(_) => (Status::Failed, None, Some("the value is not a number".into())),
        Err(Trouble::Unsupported(text)) => (Status::Unsupported, None, Some(text)),
        Err(Trouble::Failed(text)) => (Status::Failed, None, Some(text)),
        Err(Trouble::Invalid(value, text)) => (Status::Invalid, value, Some(text)),
    };
    Outcome { benchmark: name.to_owned(), status, value, reason }
}
