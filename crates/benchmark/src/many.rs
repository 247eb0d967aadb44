//! Many machines: one coordinator, an agent on each. Results are kept by machine and never mixed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use torpor_tls::Keys;
use torpor_worker::tell;

use crate::agent::{self, Request};
use crate::config::{Config, Host};
use crate::kubernetes::{self, Cluster};
use crate::program::Patient;
use crate::results::{self, Results, write_whole};
use crate::{digest, listen, report};

/// How an agent is reached.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// Through the standard streams of a command, or a connection.
    Host(Host),
    /// As a Job on a node of a cluster.
    Node(String),
}

impl Way {
    /// The directory of its results below that of all.
    fn name(&self) -> &str {
        match self {
            Self::Host(host) => &host.name,
            Self::Node(name) => name,
        }
    }
}

/// What it takes to reach agents.
#[derive(Debug)]
pub(crate) struct Means {
    /// The cluster of the nodes.
    pub cluster: Option<Cluster>,
    /// Certificates, for agents that listen.
    pub keys: Option<Keys>,
}

/// Measures on all machines at the same time. Each one's results are in a directory of its own below
/// `output`, where one report tells of all.
///
/// # Errors
/// If one of them gives no results, when all others have given theirs; or if these cannot be written.
pub(crate) fn run(
    ways: &[Way],
    means: &Means,
    mut config: Config,
    output: &Path,
    again: bool,
) -> Result<Vec<Results>, String> {
    config.hosts.clear();
    config.output = None;
    let done: Vec<Result<Results, String>> = std::thread::scope(|scope| {
        let start = |way| {
            let config = config.clone();
            scope.spawn(move || one(way, means, config, output, again))
        };
        let threads: Vec<_> = ways.iter().map(start).collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("its thread has ended".into())));
        ended.collect()
    });
    let (mut all, mut errors) = (Vec::new(), Vec::new());
    for (way, one) in ways.iter().zip(done) {
        match one {
            Ok(results) => all.push(results),
            Err(error) => errors.push(format!("{}: {error}", way.name())),
        }
    }
    for (a, b) in alike(&all) {
        tell!("{a} and {b} are one and the same machine: they have disturbed each other");
    }
    if !all.is_empty() {
        merge(&all, output)?;
    }
    if errors.is_empty() { Ok(all) } else { Err(errors.join("; ")) }
}

/// Writes the reports of all machines together.
fn merge(all: &[Results], output: &Path) -> Result<(), String> {
    let all: Vec<&Results> = all.iter().collect();
    let html = report::html(&all).map_err(|e| e.to_string())?;
    let write = |name: &str, text: &str| {
        write_whole(&output.join(name), text.as_bytes()).map_err(|e| e.to_string())
    };
    write("report.html", &html)?;
    write("report.md", &report::markdown(&all))?;
    report::index(output)
}

/// Pairs of results that come from the same boot of the same kernel.
fn alike(all: &[Results]) -> Vec<(String, String)> {
    let boot = |results: &Results| results.machine.facts.get("boot").cloned();
    let mut pairs = Vec::new();
    for (number, a) in all.iter().enumerate() {
        for b in all.iter().skip(number + 1).filter(|b| boot(b).is_some() && boot(a) == boot(b)) {
            pairs.push((a.machine.hostname.clone(), b.machine.hostname.clone()));
        }
    }
    pairs
}

fn one(
    way: &Way,
    means: &Means,
    config: Config,
    output: &Path,
    again: bool,
) -> Result<Results, String> {
    let dir = output.join(way.name());
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let request = Request { id: id(way, &config, output), config, again };
    if let (false, Some(results)) = (again, finished(&dir, &request.id)) {
        tell!("{}: its results are there already", way.name());
        return Ok(results);
    }
    tell!("{}: is asked to measure", way.name());
    let log = dir.join("log");
    let results = match (way, &means.cluster) {
        (Way::Host(host), _) => match &host.tls {
            Some(address) => over_tls(address, means.keys.as_ref(), &request, &log),
            None => over(host, &request, &log),
        },
        (Way::Node(name), Some(cluster)) => kubernetes::on_node(cluster, name, &request, &log),
        (Way::Node(_), None) => Err("there is no cluster".into()),
    };
    let results = results.map_err(|e| format!("{e} (what it said is in {})", log.display()))?;
    let text = serde_json::to_vec_pretty(&results).map_err(|e| e.to_string())?;
    let html = report::html(&[&results]).map_err(|e| e.to_string())?;
    let files: [(&str, &[u8]); 3] = [
        ("report.html", html.as_bytes()),
        ("results.json", &text),
        // Last: whoever finds it finds the others.
        (DONE, request.id.as_bytes()),
    ];
    for (name, content) in files {
        write_whole(&dir.join(name), content).map_err(|e| e.to_string())?;
    }
    tell!("{}: {}", way.name(), dir.join("report.html").display());
    Ok(results)
}

/// The file that names the work whose results are complete.
const DONE: &str = "done";

fn finished(dir: &Path, id: &str) -> Option<Results> {
    let same = fs::read_to_string(dir.join(DONE)).is_ok_and(|text| text == id);
    same.then(|| results::read(dir).ok()).flatten().filter(|results| results.complete)
}

/// A name for this work: the same command has the same one, so that agents go on where they were.
fn id(way: &Way, config: &Config, output: &Path) -> String {
    let place = fs::canonicalize(output).unwrap_or_else(|_| PathBuf::from(output));
    let text = serde_json::to_string(config).unwrap_or_default();
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let all = format!("{here}\n{}\n{}\n{text}", place.display(), way.name());
    let sum = digest::of_bytes(all.as_bytes());
    sum.trim_start_matches("sha256:").chars().take(32).collect()
}

/// Ends an agent's command when it is not needed any more, whatever came of it.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The end of its input tells the agent, which needs a moment; what hangs is ended.
        drop(self.0.stdin.take());
        for _ in 0..300 {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures on a host through the standard streams of a command.
fn over(host: &Host, request: &Request, log: &Path) -> Result<Results, String> {
    let words = host.start();
    let (program, arguments) = words.split_first().ok_or("it has no command")?;
    let text = |what: &str, e: std::io::Error| format!("{what}: {e}");
    let log = fs::File::create(log).map_err(|e| text("its log", e))?;
    let stderr = log.try_clone().map_err(|e| text("its log", e))?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .map_err(|e| text(program, e))?;
    let mut child = Ended(child);
    let (Some(input), Some(output)) = (child.0.stdin.as_mut(), child.0.stdout.take()) else {
        return Err("it has no standard streams".into());
    };
    // An agent that does not start is told by what it printed, or by its silence.
    let _ = agent::ask(&mut *input, request);
    let results = agent::receive(Patient::new(output, request.silence()), &host.name, log)?;
    // Were this lost, the agent would keep its results: no harm.
    let _ = agent::thank(input);
    Ok(results)
}

/// Measures on a host whose agent listens.
fn over_tls(
    address: &str,
    keys: Option<&Keys>,
    request: &Request,
    log: &Path,
) -> Result<Results, String> {
    let keys = keys.ok_or("--cert, --key and --ca say who asks an agent that listens")?;
    let log = fs::File::create(log).map_err(|e| format!("its log: {e}"))?;
    let end = listen::connect(address, keys)?;
    // An agent that refuses is told by what it says.
    let _ = agent::ask(&end, request);
    let results = agent::receive(Patient::new(&end, request.silence()), address, log)?;
    // Were this lost, the agent would keep its results: no harm.
    let _ = agent::thank(&end).and_then(|()| listen::finish(&end));
    Ok(results)
}
