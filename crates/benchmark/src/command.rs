//! The command line.

use std::io::{self, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use torpor_tls::KeyFiles;
use torpor_worker::{Outcome, tell};

use crate::catalogue::{Benchmark, wanted};
use crate::compare::{Verdict, compare};
use crate::config::{Config, ConfigError, Host};
use crate::kubernetes::{self, Cluster};
use crate::many::{self, Means, Way};
use crate::results::{self, Results};
use crate::workload::{self, Workload};
use crate::{agent, keeper, listen, registry, report, run as running, statistics};

/// The exit status of a command line that makes no sense. That of a comparison which finds something
/// worse is another.
pub const WRONG_CALL: u8 = 2;

/// The subcommands of `torpor benchmark`.
#[derive(Debug, Subcommand)]
pub enum BenchmarkCommand {
    /// Print the version of the tool, and of each runtime that answers
    Version(Listing),
    /// List all benchmarks: what they measure, and what they need
    List(Listing),
    /// Measure, and write results.json and report.html
    ///
    /// Without a configuration the runtimes of this machine are measured: those that answer at a CRI
    /// socket, or else the containerd that is installed, started with state and namespaces of its own.
    /// A run that was interrupted goes on where it was when the same command is given again.
    Run(Box<Run>),
    /// Print which runs it takes to find a difference
    Plan {
        /// Results of this machine, or their directory
        results: PathBuf,
        /// The difference, in percent
        #[arg(long, default_value_t = 10.0, value_parser = difference)]
        difference: f64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what differs between two results by more than noise
    ///
    /// A difference counts when the interval of the ratio at 99 % leaves 1 out, and the ratio itself is
    /// beyond the threshold. Exit status: 0, nothing is worse; 1, something is; 2, the results cannot be
    /// compared, or the command makes no sense; 3, one of them cannot be read, or what was found cannot
    /// be written.
    Compare(Compare),
    /// Make reports from the results of one or more machines
    Report {
        /// results.json, or their directories
        #[arg(required = true)]
        results: Vec<PathBuf>,
        /// The directory for report.html and report.md
        #[arg(long, default_value = ".")]
        output: PathBuf,
        /// Print a JSON object: the files that were written
        #[arg(long)]
        json: bool,
    },
    /// Write index.html, an overview of all results below a directory
    Index {
        /// The directory
        #[arg(default_value = ".")]
        directory: PathBuf,
        /// Print a JSON object: the file that was written
        #[arg(long)]
        json: bool,
    },
    /// What measures inside of a container
    #[command(hide = true)]
    Workload {
        /// Which program
        #[command(subcommand)]
        workload: Workload,
    },
    /// Removes what a run has made, when the run has ended
    #[command(hide = true)]
    Keep,
    /// Removes what a coordinator has made on a cluster, when it has ended
    #[command(hide = true)]
    Withdraw,
    /// Serves the images of a run
    #[command(hide = true)]
    Registry {
        /// The port on the loopback device
        #[arg(long)]
        port: u16,
        /// The directory of the images
        #[arg(long)]
        store: PathBuf,
    },
}

/// What is to be told of a configuration.
#[derive(Debug, Args)]
pub struct Listing {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is listed
    #[command(flatten)]
    configured: Configured,
}

/// A configuration, or what takes its place.
#[derive(Debug, Args)]
pub struct Configured {
    /// A configuration in YAML; see docs/benchmark.md
    config: Option<PathBuf>,
}

/// What `run` is told.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    configured: Configured,
    /// The directory for results
    #[arg(long)]
    output: Option<PathBuf>,
    /// Measure only these: names with `*` for any text, or all but those after `!`; may be given several
    /// times
    #[arg(long)]
    filter: Vec<String>,
    /// How many samples of each are kept
    #[arg(long)]
    runs: Option<u32>,
    /// The seed of the order of samples
    #[arg(long)]
    seed: Option<u64>,
    /// Begin anew, and throw away what the directory holds of a run before
    #[arg(long)]
    again: bool,
    /// Measure for a coordinator that speaks through the standard streams, or print the results of a
    /// configuration for whoever reads them
    #[arg(long, conflicts_with_all = ["host", "kubernetes"])]
    agent: bool,
    /// Measure for coordinators that connect to HOST:PORT and show a certificate, one after the other
    #[arg(long, value_name = "HOST:PORT", requires = "agent", conflicts_with = "config")]
    listen: Option<String>,
    #[command(flatten)]
    keys: KeyFiles,
    /// Measure another machine: where SSH goes as `user@host`, or where its agent listens as
    /// `tls:HOST:PORT`; may be given several times
    #[arg(long, value_name = "HOST", conflicts_with = "kubernetes")]
    host: Vec<String>,
    /// Measure nodes of a cluster that have this label: a Job on each of them
    #[arg(long, value_name = "SELECTOR", requires = "image")]
    kubernetes: Option<String>,
    /// The image with this tool in it, for `--kubernetes`
    #[arg(long)]
    image: Option<String>,
    /// The namespace of Jobs
    #[arg(long, default_value = "default")]
    namespace: String,
    /// How many minutes a Job may take
    #[arg(long, default_value_t = 240)]
    minutes: u64,
    /// Print a JSON object: where results and report are
    #[arg(long, conflicts_with = "agent")]
    json: bool,
}

impl Run {
    /// The configuration with what the command line says.
    fn config(&self) -> Result<Config, String> {
        let mut config = self.configured.read().map_err(text)?;
        config.runs = self.runs.unwrap_or(config.runs);
        config.seed = self.seed.or(config.seed);
        config.filters.0.extend(self.filter.iter().cloned());
        config.hosts.extend(self.host.iter().map(|host| Host::named(host)));
        crate::config::check(&config).map_err(text)?;
        Ok(config)
    }

    /// The cluster whose nodes are measured.
    fn cluster(&self) -> Option<Cluster> {
        Some(Cluster {
            selector: self.kubernetes.clone()?,
            namespace: self.namespace.clone(),
            image: self.image.clone()?,
            limit: self.minutes.saturating_mul(60),
        })
    }
}

/// What `compare` is told.
#[derive(Debug, Args)]
pub struct Compare {
    /// The results that are the measure
    old: PathBuf,
    /// The results that are judged
    new: PathBuf,
    /// A difference smaller than this, in percent, does not count (default: that of the results)
    #[arg(long, value_parser = percent)]
    threshold: Option<f64>,
    /// Compare results of different machines as well
    #[arg(long)]
    across: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A share in percent.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected a number of percent, at least 0".into())
}

/// A difference in percent, that is one.
fn difference(text: &str) -> Result<f64, String> {
    percent(text)
        .ok()
        .filter(|number| *number > 0.0)
        .ok_or_else(|| "expected a number of percent, above 0".into())
}

/// Carries a command out.
///
/// # Errors
/// If the command fails: what failed, on what, and what to do about it.
pub fn run(command: BenchmarkCommand) -> Result<ExitCode, Outcome> {
    match command {
        BenchmarkCommand::Version(listing) => version(&listing),
        BenchmarkCommand::List(listing) => list(&listing),
        BenchmarkCommand::Run(arguments) => measure(*arguments),
        BenchmarkCommand::Plan { results, difference, json } => {
            return plan(&results, difference, json);
        }
        BenchmarkCommand::Compare(arguments) => return Ok(compared(&arguments)),
        BenchmarkCommand::Report { results, output, json } => {
            return reports(&results, &output, json);
        }
        BenchmarkCommand::Index { directory, json } => {
            let done = report::index(&directory).map_err(text);
            done.map(|()| written(json, &[directory.join("index.html")]))
        }
        BenchmarkCommand::Workload { workload } => workload::run(workload).map_err(text),
        BenchmarkCommand::Keep => keeper::keep().map_err(text),
        BenchmarkCommand::Withdraw => kubernetes::withdraw().map_err(text),
        BenchmarkCommand::Registry { port, store } => TcpListener::bind(("127.0.0.1", port))
            .and_then(|listener| registry::serve(&listener, &store))
            .map_err(text),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Says to programs which files there are now.
fn written(json: bool, files: &[PathBuf]) {
    if json {
        println!("{}", json!({ "written": files }));
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn block_on<T>(work: impl Future<Output = T>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(text)?.block_on(work))
}

impl Configured {
    fn read(&self) -> Result<Config, ConfigError> {
        match &self.config {
            Some(path) => crate::config::read(path),
            None => Ok(Config::default()),
        }
    }
}

fn version(listing: &Listing) -> Result<(), String> {
    let mut config = listing.configured.read().map_err(text)?;
    let found = block_on(versions(&mut config))?;
    if listing.json {
        let mut versions =
            vec![json!({ "name": "torpor benchmark", "version": env!("CARGO_PKG_VERSION") })];
        versions.extend(
            found.iter().map(|(name, version)| json!({ "name": name, "version": version })),
        );
        println!("{}", Json::Array(versions));
        return Ok(());
    }
    println!("torpor benchmark {}", env!("CARGO_PKG_VERSION"));
    found.iter().for_each(|(name, version)| println!("{name}: {version}"));
    Ok(())
}

/// What answers, and each program, with its version or why it has none.
async fn versions(config: &mut Config) -> Vec<(String, String)> {
    if config.endpoints.is_empty() {
        config.endpoints = crate::config::found().await.unwrap_or_default();
    }
    let mut found = Vec::new();
    for endpoint in &config.endpoints {
        if let Some(socket) = &endpoint.socket {
            let answer = match crate::cri::Client::new(socket, Duration::from_secs(5)) {
                Ok(client) => client.version().await,
                Err(error) => Err(error),
            };
            let version = answer.map_or_else(text, |v| {
                format!("{} {}, CRI {}", v.runtime_name, v.runtime_version, v.runtime_api_version)
            });
            found.push((endpoint.name.clone(), version));
        }
        let programs = endpoint.containerd.iter();
        let programs = programs.chain(endpoint.handlers.iter().filter_map(|h| h.binary.as_ref()));
        found.extend(programs.map(|program| {
            (
                program.display().to_string(),
                crate::endpoint::version_of(program).unwrap_or_else(text),
            )
        }));
    }
    found
}

fn list(listing: &Listing) -> Result<(), String> {
    let list = wanted(&listing.configured.read().map_err(text)?);
    if listing.json {
        println!("{}", serde_json::to_string_pretty(&list).map_err(text)?);
        return Ok(());
    }
    for Benchmark { name, unit, measures, needs, .. } in list {
        let needs =
            if needs.is_empty() { String::new() } else { format!(" (needs {})", needs.join(", ")) };
        println!("{name} [{unit}]\n    {measures}{needs}");
    }
    Ok(())
}

fn measure(arguments: Run) -> Result<(), String> {
    let keys = arguments.keys.read().map_err(text)?;
    if let Some(address) = &arguments.listen {
        let keys = keys.ok_or("an agent that listens needs --cert, --key and --ca")?;
        return listen::listen(address, keys, arguments.output);
    }
    if arguments.agent {
        let config = match arguments.configured.config {
            Some(_) => Some(arguments.config()?),
            None => None,
        };
        return block_on(agent::serve(config, arguments.output, arguments.again))?;
    }
    let mut config = arguments.config()?;
    let cluster = arguments.cluster();
    let output = arguments.output.or(config.output.take());
    let output = output.ok_or("where do results go? Give a directory with --output")?;
    let mut ways: Vec<Way> = config.hosts.iter().cloned().map(Way::Host).collect();
    if let Some(cluster) = &cluster {
        ways.extend(kubernetes::nodes(cluster)?.into_iter().map(Way::Node));
    }
    if !ways.is_empty() {
        many::run(&ways, &Means { cluster, keys }, config, &output, arguments.again)?;
    } else {
        let results = block_on(running::run(config, &output, arguments.again))?.map_err(text)?;
        tell!("");
        if !arguments.json {
            println!("{}", report::summary(&results));
        }
    }
    match arguments.json {
        true => println!("{}", json!({ "written": output })),
        false => println!("{}", output.join("report.html").display()),
    }
    Ok(())
}

fn plan(path: &Path, difference: f64, json: bool) -> Result<ExitCode, Outcome> {
    let results = results::read(path)?;
    let threshold = results.settings.threshold;
    if !json {
        println!("runs to find a difference of {difference} % in 95 of 100 cases:");
    }
    let mut rows = Vec::new();
    for row in &results.rows {
        let values = row.values();
        let Some(summary) = row.summary.as_ref().filter(|s| s.n >= statistics::FEWEST) else {
            continue;
        };
        let deviation = statistics::deviation(&values) / summary.median.abs();
        let runs = statistics::runs_for(difference / 100.0, deviation, threshold);
        let (benchmark, target) = (&row.benchmark, &row.target);
        if json {
            rows.push(json!({
                "benchmark": benchmark, "target": target, "runs": runs, "deviation": deviation,
            }));
        } else {
            let runs = runs.map_or("never".into(), |runs| runs.to_string());
            let why = match deviation.is_finite() {
                true => format!("deviation {:.1} %", 100.0 * deviation),
                // There is no share of nothing.
                false => "its median is 0".into(),
            };
            println!("{runs:>8}  {benchmark} of {target} ({why})");
        }
    }
    if json {
        println!("{}", Json::Array(rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn compared(arguments: &Compare) -> ExitCode {
    let (old, new) = match (results::read(&arguments.old), results::read(&arguments.new)) {
        (Ok(old), Ok(new)) => (old, new),
        (Err(error), _) | (_, Err(error)) => {
            tell!("{error}");
            if arguments.json {
                Outcome::from(error).print();
            }
            return ExitCode::from(3);
        }
    };
    let threshold = arguments.threshold.map(|percent| percent / 100.0);
    let comparison = compare(&old, &new, threshold, arguments.across);
    let said =
        if arguments.json { format!("{}\n", json!(comparison)) } else { comparison.to_string() };
    let mut output = io::stdout();
    if let Err(error) = output.write_all(said.as_bytes()).and_then(|()| output.flush()) {
        tell!("standard output: {error}");
        return ExitCode::from(3);
    }
    match comparison.verdict {
        Verdict::Same => ExitCode::SUCCESS,
        Verdict::Worse => ExitCode::from(1),
        Verdict::NotComparable => ExitCode::from(2),
    }
}

fn reports(paths: &[PathBuf], output: &Path, json: bool) -> Result<ExitCode, Outcome> {
    let all: Vec<Results> =
        paths.iter().map(|path| results::read(path)).collect::<Result<_, _>>()?;
    let all: Vec<&Results> = all.iter().collect();
    std::fs::create_dir_all(output).map_err(text)?;
    let [page, table] = ["report.html", "report.md"].map(|name| output.join(name));
    let html = report::html(&all).map_err(text)?;
    results::write_whole(&page, html.as_bytes()).map_err(text)?;
    results::write_whole(&table, report::markdown(&all).as_bytes()).map_err(text)?;
    written(json, &[page, table]);
    Ok(ExitCode::SUCCESS)
}
