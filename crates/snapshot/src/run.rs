//! `torpor snapshot run`: from the snapshot if it fits, else from the beginning.

use std::cell::{Cell, OnceCell};
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::json;
use torpor_blobs::reference::Reference;
use torpor_blobs::traffic;
use torpor_images::pagemap::page_size;
use torpor_seal::keys::Identities;
use torpor_worker::tell;

use crate::belief::Said;
use crate::description::Origin;
use crate::error::{Context, Error, Result};
use crate::instance::Own;
use crate::mounts::Bind;
use crate::podman::Podman;
use crate::ready::{Container, Output, Ready, Waiting};
use crate::report::Picture;
use crate::runc::{Runc, Runtime};
use crate::sealed::Openers;
use crate::signature::{Believed, TrustIn};
use crate::source::{Base, Source};
use crate::{cache, events, feed, instance, interrupt, own, places};

mod awake;
mod by_podman;
mod by_runc;
mod found;
mod so_far;

use found::{FoundSnapshot, Snapshot};
use so_far::SoFar;

/// What a picture shows.
const SECOND: Duration = Duration::from_secs(1);

/// How long a snapshot is tried before it is said how long that was.
const LONG: Duration = Duration::from_secs(1);

/// The exit status of a cold start in place of one from the snapshot.
const COLD: u8 = 3;

/// Whether a snapshot is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum Policy {
    /// If there is one that fits; else the container is started cold.
    IfPresent,
    /// If there is none that fits nothing is started.
    Always,
    /// The container is started cold.
    Never,
}

/// When memory comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Prefetch {
    /// When it is touched, or before.
    None,
    /// Before anything starts.
    All,
}

/// Starts a container from a snapshot, or cold if there is none that fits. It belongs to its
/// runtime afterwards. The exit status is 0 if it was started as it was asked for, 3 if it was
/// started cold because the snapshot could not be used, and 1 if nothing was started.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    /// The name of the container
    #[arg(long, value_name = "NAME")]
    id: String,
    /// Whether the snapshot is used
    #[arg(long, value_enum, default_value = "IfPresent")]
    policy: Policy,
    /// Start so many containers: NAME-1, NAME-2, ...
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// What is started cold, if it is not where the snapshot was made from
    #[arg(long, value_name = "SOURCE")]
    from: Option<Source>,
    /// The host name inside; by default the name of the container
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// A file with variables, one a line: it is /run/torpor/environment inside, and part of the
    /// environment after a cold start
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// A file or directory of this host that the container has, in place of what it would have
    /// there: type=bind,source=PATH,destination=PATH, with options=ro:nosuid:nodev:noexec if it is
    /// to be mounted so
    #[arg(long, value_name = "MOUNT")]
    mount: Vec<Bind>,
    /// The network that the container has: a name of ip netns, or the path of a network namespace;
    /// for a container of Podman the name of a network of Podman
    #[arg(long, value_name = "NETWORK")]
    network: Option<String>,
    /// A port of a container of Podman that is one of this host as well, as podman run has it
    #[arg(long, value_name = "[[ADDRESS:]PORT:]PORT")]
    publish: Vec<String>,
    /// What is to happen inside after a restore: a command, or the name of a signal for the first
    /// process
    #[arg(long, value_name = "CMD|SIGNAL")]
    after_restore: Option<String>,
    /// How long to wait for a registry or an object store that cannot be reached yet, before a cold
    /// start
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u64,
    /// When memory comes
    #[arg(long, value_enum, default_value = "none")]
    prefetch: Prefetch,
    /// Open a sealed snapshot with the private key in FILE
    #[arg(long, value_name = "KEY")]
    identity: Vec<PathBuf>,
    #[command(flatten)]
    trust: TrustIn,
    /// Append what the container prints to FILE, by a process that ends with the container; by
    /// default it goes nowhere
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Wait until the application answers: http://HOST:PORT/PATH or https://HOST:PORT/PATH, tcp:PORT
    /// or exec:CMD, as for create. A container that does not is ended, and started cold if it came from the snapshot
    #[arg(long, value_name = "WHAT")]
    ready: Option<Ready>,
    /// How long it may take until it answers, and --after-restore
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Write a picture of the first second to FILE, as HTML: pages that were asked for, pages
    /// that were there, the first answer
    #[arg(long, value_name = "FILE", requires = "ready")]
    report: Option<PathBuf>,
    /// Print a JSON object: started_from (snapshot, cold), reason, first_instruction_ms, pid
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: Runtime,
    /// What the container runs instead of what its bundle or image says, if the snapshot was made so
    #[arg(last = true)]
    command: Vec<String>,
}

impl RunArgs {
    /// What the caller says of what is started, with the mounts `binds`.
    fn said<'a>(&'a self, binds: &'a [Bind]) -> Said<'a> {
        Said { from: self.from.as_ref(), command: &self.command, binds }
    }

    /// The variables of --env-file.
    fn environment(&self) -> Result<Vec<String>> {
        let Some(file) = &self.env_file else { return Ok(Vec::new()) };
        let text = fs::read_to_string(file).context(|| file.display().to_string())?;
        variables(&text).map_err(|error| error.during(file.display()))
    }

    /// What is known here of the place of the snapshot.
    fn known(&self) -> Option<Origin> {
        places::noted(&self.reference)
    }
}

/// How a container was started.
#[derive(Default)]
struct Started {
    snapshot: bool,
    /// Whether it shares the memory of a template.
    shares: bool,
    /// Whether it is a container of Podman.
    by_podman: bool,
    /// Why not from the snapshot.
    reason: Option<Error>,
    pid: u32,
    milliseconds: f64,
    /// Milliseconds until the application answered, if that was waited for.
    answer: Option<f64>,
    /// Milliseconds until it was known that the snapshot could not be used.
    tried: Option<f64>,
    /// Milliseconds from when the snapshot could not be used to when the runtime was called.
    fallback: Option<f64>,
    /// What was waited for and fetched until then.
    sum: events::Sum,
}

/// Starts containers. What is sealed is opened with keys that are `configured`, too.
///
/// # Errors
/// If nothing could be started.
pub fn run(args: &RunArgs, configured: fn() -> Identities) -> Result<ExitCode> {
    let begin = Instant::now();
    check_options(args)?;
    let binds = &args.mount.iter().map(Bind::found).collect::<Result<Vec<_>>>()?;
    let openers = Openers { files: &args.identity, configured };
    let runc = Runc::new(args.runtime.root.as_deref())?;
    let ids = names(args, &runc)?;
    let believed = args.trust.read()?;
    let (mut cold, snapshot, origin) = (false, OnceCell::new(), OnceCell::new());
    let mut running = SoFar::new(&runc);
    for (number, id) in ids.iter().enumerate() {
        interrupt::check().map_err(|error| running.removed(error))?;
        let begin = if number == 0 { begin } else { Instant::now() };
        let (snapshot, origin, runc, believed) = (&snapshot, &origin, &runc, &believed);
        let (podman, failed) = (OnceCell::new(), Cell::default());
        let start = Start {
            args,
            runc,
            podman,
            id,
            begin,
            binds,
            openers,
            believed,
            snapshot,
            origin,
            failed,
        };
        let started = start.start().map_err(|error| running.removed(interrupt::cause(error)))?;
        running.add(id, started.by_podman);
        cold |= !started.snapshot && args.policy != Policy::Never;
        report(args, id, &started);
    }
    Ok(if cold { ExitCode::from(COLD) } else { ExitCode::SUCCESS })
}

/// Fails for options that make no sense, whatever the snapshot is.
fn check_options(args: &RunArgs) -> Result<()> {
    if args.ready.as_ref().is_some_and(Ready::is_told) {
        return Err(Error::new("a container that is restored does not say again that it is ready")
            .hint("--ready exec:CMD, tcp:PORT or an address"));
    }
    if args.report.is_some() && args.count > 1 {
        return Err(Error::new("--report is of one container"));
    }
    args.after_restore.as_deref().map_or(Ok(()), awake::check_signal)?;
    // A file that is wrong is so for a start from the snapshot and for a cold one.
    args.environment().map(drop)
}

/// The names of the containers, which may have them.
fn names(args: &RunArgs, runc: &Runc) -> Result<Vec<String>> {
    let ids: Vec<String> =
        (1..=args.count).map(|number| own::name(&args.id, number, args.count)).collect();
    ids.iter().try_for_each(|id| check_id(id, runc))?;
    let hostnames: Vec<&str> = match &args.hostname {
        Some(name) => vec![name],
        None => ids.iter().map(String::as_str).collect(),
    };
    hostnames.into_iter().try_for_each(own::check_hostname)?;
    Ok(ids)
}

/// A name is part of paths, and of one container.
fn check_id(id: &str, runc: &Runc) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_+-.".contains(c);
    if id.is_empty() || id.starts_with('.') || !id.chars().all(plain) {
        return Err(Error::new(format!("{id:?} is no name for a container"))
            .hint("letters, digits and _ + - . make names"));
    }
    if runc.knows(id) {
        return Err(Error::new(format!("there is a container {id} already")));
    }
    let dir = places::instances().join(id);
    if dir.exists() { Err(instance::taken(&dir)) } else { Ok(()) }
}

fn report(args: &RunArgs, id: &str, started: &Started) {
    let from = if started.snapshot { "snapshot" } else { "cold" };
    let reason = started.reason.as_ref().map(ToString::to_string);
    if let Some(error) = &started.reason {
        let tried = Duration::from_secs_f64(started.tried.unwrap_or_default() / 1000.0);
        let after = match tried >= LONG {
            true => format!(" (after {:.1} s)", tried.as_secs_f64()),
            false => String::new(),
        };
        tell!("{id} is started cold: {error}{after}");
        if let Some(hint) = &error.hint {
            tell!("Hint: {hint}");
        }
    }
    let text = if args.json {
        json!({
            "id": id,
            "reference": args.reference.to_string(),
            "started_from": from,
            "reason": reason,
            "first_instruction_ms": rounded(started.milliseconds),
            "first_answer_ms": started.answer.map(rounded),
            "tried_ms": started.tried.map(rounded),
            "fallback_ms": started.fallback.map(rounded),
            "requests": started.sum.traffic.requests,
            "bytes": started.sum.traffic.bytes,
            "waits": started.sum.waits,
            "unforeseen": started.sum.unforeseen,
            "pid": started.pid,
            "template": started.shares,
        })
        .to_string()
    } else {
        format!("{id} {from} {}", started.pid)
    };
    // It runs, and those after it are still to be started, also if nobody reads that.
    if let Err(error) = writeln!(io::stdout(), "{text}") {
        tell!("Warning: {id} runs ({from}) as process {}; standard output: {error}", started.pid);
    }
}

/// Milliseconds, to the microsecond.
fn rounded(milliseconds: f64) -> f64 {
    (milliseconds * 1000.0).round() / 1000.0
}

/// The start of one container.
struct Start<'a> {
    args: &'a RunArgs,
    runc: &'a Runc,
    /// Podman, when it was asked for what the container needs of it.
    podman: OnceCell<Podman>,
    id: &'a str,
    begin: Instant,
    /// What it has mounted of its own.
    binds: &'a [Bind],
    /// Who may open it.
    openers: Openers<'a>,
    /// Whose signatures of it count.
    believed: &'a Believed,
    /// The snapshot, when it has been found and fits.
    snapshot: &'a OnceCell<Snapshot>,
    /// What it was made from, when it has been found.
    origin: &'a OnceCell<Origin>,
    /// When it could not be started from the snapshot.
    failed: Cell<Option<Instant>>,
}

impl Start<'_> {
    fn start(&self) -> Result<Started> {
        let reason = match self.args.policy {
            Policy::Never => None,
            Policy::Always => return self.warm(),
            Policy::IfPresent => match self.warm() {
                Ok(started) => return Ok(started),
                Err(error) => {
                    interrupt::check()?;
                    // A disk that the cache has filled would keep all starts cold.
                    let _ = cache::evict();
                    Some(error)
                }
            },
        };
        let started = self.cold_base().and_then(|base| match base {
            Base::Bundle(bundle) => self.started_by_runc(bundle),
            Base::Image(image) => self.started_by_podman(&image),
        });
        let started = started.map_err(|error| match &reason {
            Some(reason) if reason.to_string() != error.to_string() => {
                let hints: Vec<&str> =
                    [reason, &error].into_iter().filter_map(Error::told).collect();
                let hint = hints.join("; ");
                let error = error.during(format!("{reason}; and no cold start"));
                if hint.is_empty() { error } else { error.hint(hint) }
            }
            _ => error,
        })?;
        let failed = self.failed.get().filter(|_| reason.is_some());
        let tried = failed.map(|at| (at - self.begin).as_secs_f64() * 1000.0);
        Ok(Started { reason, tried, ..started })
    }

    /// Milliseconds since the snapshot could not be used, if it should have been.
    fn fallback(&self) -> Option<f64> {
        self.failed.get().map(|failed| failed.elapsed().as_secs_f64() * 1000.0)
    }

    /// Waits until the application of a container that was started answers.
    fn answered(&self, runtime: &dyn Container, mut started: Started) -> Result<Started> {
        interrupt::check()?;
        if let Some(ready) = &self.args.ready {
            let output = Output::default();
            let waiting = Waiting { runtime, id: self.id, output: &output, notify: None };
            waiting.until_of(started.pid, ready, Duration::from_secs(self.args.timeout))?;
            started.answer = Some(self.elapsed());
        }
        started.sum = events::until(&events::read(&self.dir()), events::now());
        started.sum.traffic = started.sum.traffic + traffic::so_far();
        feed::release(&self.dir());
        // A container that answers is worth more than its picture.
        if let Err(error) = self.picture(&started) {
            tell!("there is no picture (--report): {error}");
        }
        Ok(started)
    }

    /// Writes the picture that was asked for, when its second is over.
    fn picture(&self, started: &Started) -> Result<()> {
        let (Some(file), Some(first_answer)) = (&self.args.report, started.answer) else {
            return Ok(());
        };
        thread::sleep(SECOND.saturating_sub(self.begin.elapsed()));
        let begin = Duration::from_nanos(events::now()).saturating_sub(self.begin.elapsed());
        let from = if started.snapshot { "from its snapshot" } else { "cold" };
        let memory = self.snapshot.get().map_or(0, |snapshot| snapshot.description.memory);
        let picture = Picture {
            title: format!("{} started {from}: {}", self.id, self.args.reference),
            begin: u64::try_from(begin.as_nanos()).unwrap_or(u64::MAX),
            first_instruction: started.milliseconds,
            first_answer,
            pages: memory / page_size(),
            events: &events::read(&self.dir()),
        };
        fs::write(file, picture.html()).context(|| file.display().to_string())
    }

    fn elapsed(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * 1000.0
    }

    /// Milliseconds from the start of the command to `at`, by [`events::now`].
    fn until(&self, at: u64) -> f64 {
        let ago = Duration::from_nanos(events::now().saturating_sub(at));
        self.begin.elapsed().saturating_sub(ago).as_secs_f64() * 1000.0
    }

    fn dir(&self) -> PathBuf {
        places::instances().join(self.id)
    }

    fn hostname(&self) -> &str {
        self.args.hostname.as_deref().unwrap_or(self.id)
    }

    fn own(&self) -> Own<'_> {
        let runtime = self.args.runtime.root.as_deref();
        Own { hostname: Some(self.hostname()), released: true, runtime, ..Own::default() }
    }

    /// What is started cold. The place of the snapshot is not asked again for that: it may not answer,
    /// and what it says may be nothing to believe.
    fn cold_base(&self) -> Result<Base> {
        let said = self.args.said(self.binds);
        if let Some(origin) = said.origin() {
            return Base::of(&origin);
        }
        let noted = || self.args.known().map(|known| said.over(&known));
        let origin = match self.origin.get().cloned().or_else(noted) {
            Some(origin) => origin,
            None if self.args.policy == Policy::Never => {
                FoundSnapshot::open(self.args, self.believed)?.origin(&said, &self.openers)?
            }
            None => {
                return Err(Error::new("nothing says what to start")
                    .hint("--from runc:BUNDLE says what is started cold"));
            }
        };
        Base::of(&origin)
    }

    /// Starts from the snapshot. Nothing is left if that does not work.
    fn warm(&self) -> Result<Started> {
        let started = self.try_warm();
        if started.is_err() && self.failed.get().is_none() {
            self.failed.set(Some(Instant::now()));
        }
        started
    }

    fn try_warm(&self) -> Result<Started> {
        if self.snapshot.get().is_none() {
            let _ = self.snapshot.set(Snapshot::open(self, self.origin)?);
        }
        let snapshot = self.snapshot.get().ok_or_else(|| Error::new("there is no snapshot"))?;
        match &snapshot.base {
            Base::Bundle(bundle) => self.restored_by_runc(snapshot, bundle),
            Base::Image(_) => self.restored_by_podman(snapshot),
        }
    }
}

/// The variables in the text of an --env-file.
fn variables(text: &str) -> Result<Vec<String>> {
    let lines = text.lines().map(str::trim).enumerate();
    let said = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let checked = said.map(|(at, line)| match line.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(line.to_owned()),
        _ => Err(Error::new(format!("line {} is no NAME=VALUE", at + 1))),
    });
    checked.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_that_is_no_variable_is_named() {
        let all = variables("A=1\n# comment\n\n  B=x = y\nC=\n").unwrap();
        assert_eq!(all, ["A=1", "B=x = y", "C="]);
        for (text, line) in [("A=1\n\nHOME\n", 3), ("=x", 1)] {
            let error = variables(text).unwrap_err().to_string();
            assert_eq!(error, format!("line {line} is no NAME=VALUE"));
        }
    }
}
