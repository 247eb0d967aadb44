//! `torpor snapshot run`: from the snapshot if it fits, else from the beginning.

use std::cell::{Cell, OnceCell};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rustix::process::Signal;
use serde_json::json;
use torpor_blobs::reference::Reference;
use torpor_blobs::traffic;
use torpor_images::pagemap::page_size;
use torpor_seal::keys::Identities;
use torpor_worker::tell;

use crate::belief::{self, Said};
use crate::bundle::Bundle;
use crate::create::files_option;
use crate::description::Origin;
use crate::error::{Context, Error, Result};
use crate::feed::{Feeder, Prepared};
use crate::fetch::Fetch;
use crate::instance::{Instance, Own};
use crate::mounts::Bind;
use crate::podman::Podman;
use crate::ready::{Container, Output, Ready, Waiting, of_code};
use crate::report::Picture;
use crate::runc::{Restore, Runc, Runtime, Streams, ran_at};
use crate::sealed::Openers;
use crate::signature::{Believed, TrustIn};
use crate::source::{Base, Source};
use crate::template::Template;
use crate::{
    cache, events, feed, generation, instance, interrupt, limit, log, mounts, network, own, places,
    streams, template, unpack,
};

mod by_podman;
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
    /// Where the snapshot is: dir:PATH:NAME or HOST/NAME:TAG
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
    if args.ready.as_ref().is_some_and(Ready::is_told) {
        return Err(Error::new("a container that is restored does not say again that it is ready")
            .hint("--ready exec:CMD, tcp:PORT or an address"));
    }
    if args.report.is_some() && args.count > 1 {
        return Err(Error::new("--report is of one container"));
    }
    args.after_restore.as_deref().map_or(Ok(()), check_signal)?;
    let binds = args.mount.iter().map(Bind::found).collect::<Result<Vec<_>>>()?;
    let binds = &binds;
    let openers = Openers { files: &args.identity, configured };
    let runc = Runc::new(args.runtime.root.as_deref())?;
    let mut cold = false;
    let (snapshot, origin) = (OnceCell::new(), OnceCell::new());
    let ids: Vec<String> =
        (1..=args.count).map(|number| own::name(&args.id, number, args.count)).collect();
    ids.iter().try_for_each(|id| check_id(id, &runc))?;
    let hostnames: Vec<&str> = match &args.hostname {
        Some(name) => vec![name],
        None => ids.iter().map(String::as_str).collect(),
    };
    hostnames.into_iter().try_for_each(own::check_hostname)?;
    // A file that is wrong is so for a start from the snapshot and for a cold one.
    args.environment()?;
    let believed = args.trust.read()?;
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
            Base::Bundle(bundle) => self.cold(bundle),
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

    /// Starts a container of a bundle from the beginning. Nothing is left if that does not work.
    fn cold(&self, bundle: Bundle) -> Result<Started> {
        let generation = Some(generation::new()?);
        let own = Own { environment: self.args.environment()?, generation, ..self.own() };
        let bundle = bundle.mounting(self.binds).in_network(self.namespace()?.as_deref())?;
        interrupt::heed();
        let instance = Instance::make(&self.dir(), &bundle, &own, |_| Ok(()))?;
        let fallback = self.fallback();
        let done =
            self.streams().and_then(|streams| self.runc.run(&instance.dir, self.id, streams));
        let milliseconds = self.elapsed();
        let started = done.and_then(|()| self.runc.pid(self.id)).and_then(|pid| {
            let started = Started { pid, milliseconds, fallback, ..Started::default() };
            self.answered(self.runc, started)
        });
        if started.is_err() {
            self.runc.delete(self.id);
            instance.remove();
        }
        started
    }

    /// The network namespace that a container of runc is to have.
    fn namespace(&self) -> Result<Option<PathBuf>> {
        if !self.args.publish.is_empty() {
            return Err(Error::new("runc gives no ports of the host to a container (--publish)")
                .hint("--network NETWORK gives it a network that has them"));
        }
        self.args.network.as_deref().map(network::namespace).transpose()
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

    fn streams(&self) -> Result<Streams> {
        self.args.log.as_deref().map_or_else(|| Ok(Streams::null()), log::streams)
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

    /// Restores a container of runc. Nothing is left if that does not work.
    fn restored_by_runc(&self, snapshot: &Snapshot, base: &Bundle) -> Result<Started> {
        let set_id = belief::set_id(snapshot.is_believed, &base.config);
        let unpack = |upper: &Path| {
            let opened = snapshot.opened.as_ref();
            unpack::container(snapshot.small(&self.args.reference)?, opened, upper, set_id)
        };
        if snapshot.description.sealed {
            mounts::check_sealed(&base.config, self.binds)?;
        }
        let namespace = self.namespace()?;
        let bundle = base.clone().mounting(self.binds).in_network(namespace.as_deref())?;
        // Where the runtime gave it none, it is not what the runtime expects of the engine.
        let joined = namespace.filter(|_| base.makes_network());
        let number = generation::new()?;
        let generation = snapshot.description.generation.then_some(number);
        let own = Own { generation, ..self.own() };
        interrupt::heed();
        let instance = Instance::make(&self.dir(), &bundle, &own, unpack)?;
        let watch = limit::Watch::of(&bundle);
        let restored = self.restore(snapshot, &instance, number, joined.as_deref());
        let restored = restored.map_err(|error| watch.cause(error));
        if restored.is_err() {
            self.failed.set(Some(Instant::now()));
            self.runc.delete(self.id);
            instance.remove();
        }
        restored
    }

    /// Restores a container, which has the number `generation`, and joins a network namespace that it did
    /// not have.
    fn restore(
        &self,
        snapshot: &Snapshot,
        instance: &Instance,
        generation: u64,
        joined: Option<&Path>,
    ) -> Result<Started> {
        let Snapshot { description, template, .. } = snapshot;
        let (images, work) = (instance.dir.join("images"), instance.dir.join("work"));
        if !description.sealed {
            own::set_hostname(&images, self.hostname())?;
            mounts::set(&images, self.binds)?;
        }
        generation::mark(instance.root(), generation)?;
        self.write_environment(instance.root())?;
        let prepared = self.bring(snapshot, &instance.dir)?;
        let lazy = prepared.is_some();
        // Those between tasks of a template stay its own.
        let mut options = template.as_ref().map_or("", |_| "tcp-close\n").to_owned();
        options += &files_option("template", &template.as_ref().map(Template::process))?;
        options += &files_option("identity", &self.args.identity)?;
        if description.sealed {
            options += &files_option("trust", &self.args.trust.trust)?;
            if self.args.trust.require_signature && !self.args.trust.trust.is_empty() {
                options += "require-signature\n";
            }
        }
        options += &streams::given(&description.streams)?;
        if let Some(network) = joined {
            options += &format!("join-ns net:{}\n", network.display());
        }
        let restore = Restore {
            bundle: &instance.dir,
            id: self.id,
            images: &images,
            work: &work,
            lazy,
            options: &options,
        };
        let mut feeder = None;
        let start = || {
            feeder = prepared.map(Prepared::start).transpose()?;
            Ok(())
        };
        let restored =
            self.streams().and_then(|streams| self.runc.restore(&restore, streams, start));
        // Before that a directory may lose what the container needs.
        let restored =
            restored.and_then(|it| feeder.as_mut().map_or(Ok(()), Feeder::wait).map(|()| it));
        if let (Err(_), Some(feeder)) = (&restored, &mut feeder) {
            feeder.end();
        }
        restored?;
        // The runtime has more to do when the tasks run already.
        let ran = ran_at(&work.join("restore.log")).map(|at| self.until(at));
        let milliseconds = ran.unwrap_or_else(|| self.elapsed());
        let pid = self.runc.pid(self.id)?;
        if description.sealed {
            // It stands in images that cannot be changed.
            own::rename_host(pid, self.hostname())?;
        }
        self.wake(self.runc, pid, generation, Some(instance.root()))?;
        let shares = template.is_some() && template::was_used(&work);
        let started = Started { snapshot: true, shares, pid, milliseconds, ..Started::default() };
        let started = self.answered(self.runc, started)?;
        if !lazy {
            // All of it is in memory. To give space back takes a while on some disks.
            let _ = fs::remove_dir_all(&images);
        }
        Ok(started)
    }

    /// Has the packs of a snapshot be beside the images in `dir`: now, or by a process that brings them while the container
    /// runs.
    fn bring(&self, snapshot: &Snapshot, dir: &Path) -> Result<Option<Prepared>> {
        let Snapshot { store, manifest, description, template, .. } = snapshot;
        let images = dir.join("images");
        if let Some(template) = template {
            template.link_packs(&images)?;
            return Ok(None);
        }
        if description.comes_whole() {
            return Ok(None);
        }
        let is_near = self.args.reference.is_near();
        let fetch = |is_cached| Fetch::new(&**store, (description, manifest), &images, is_cached);
        if self.args.prefetch == Prefetch::All {
            fetch(!is_near)?.shown()?;
            return Ok(None);
        }
        feed::hold(dir)?;
        // The engine opens the files of the packs when it starts.
        let fetch = fetch(true)?;
        fetch.check_room()?;
        fetch.hold()?;
        feed::prepare(&self.args.reference, (description, manifest), dir).map(Some)
    }

    fn write_environment(&self, root: &Path) -> Result<()> {
        let lines = self.args.environment()?;
        if lines.is_empty() {
            return Ok(());
        }
        crate::instance::write_inside(root, "environment", &(lines.join("\n") + "\n"))
    }

    /// Tells the application that it was restored; it may be marked in the file system `marked`.
    fn wake(
        &self,
        runtime: &dyn Container,
        pid: u32,
        number: u64,
        marked: Option<&Path>,
    ) -> Result<()> {
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        match marked.filter(|_| generation::is_marked(&root, number)) {
            Some(marked) => generation::announce(marked, number)?,
            None => {
                // /run is a file system of its own, which came with the images.
                generation::mark(&root, number)?;
                self.write_environment(&root)?;
            }
        }
        let Some(after) = &self.args.after_restore else { return Ok(()) };
        if let Some(signal) = signal_of(after) {
            let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
            let pid = pid.ok_or_else(|| Error::new("the container has no process"))?;
            return rustix::process::kill_process(pid, signal).context(|| "--after-restore");
        }
        let mut call = runtime.exec(self.id, &["/bin/sh", "-c", after]);
        let timeout = Duration::from_secs(self.args.timeout);
        let call = call.stdin(Stdio::null()).stdout(Stdio::null());
        let status = interrupt::status(call, Instant::now() + timeout);
        let said = match status.context(|| "--after-restore")? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => of_code(status.code()),
            None => format!("it had not ended after {timeout:?} (--timeout)"),
        };
        Err(Error::new(format!("--after-restore {after:?}: {said}")))
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

/// The signals that --after-restore sends, by their names.
const SIGNALS: [(&str, Signal); 8] = [
    ("HUP", Signal::HUP),
    ("INT", Signal::INT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("CONT", Signal::CONT),
    ("TERM", Signal::TERM),
    ("WINCH", Signal::WINCH),
    ("ALRM", Signal::ALARM),
];

/// The signal of this name.
fn signal_of(name: &str) -> Option<Signal> {
    let name = name.strip_prefix("SIG").unwrap_or(name);
    SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, signal)| *signal)
}

/// Fails for a word that is to be a signal and is none, rather than having it run as a command.
fn check_signal(after: &str) -> Result<()> {
    let is_name = after.starts_with("SIG")
        && after.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit());
    if !is_name || signal_of(after).is_some() {
        return Ok(());
    }
    let known = SIGNALS.map(|(name, _)| name).join(", ");
    Err(Error::new(format!("--after-restore {after}: there is no such signal, only {known}")))
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
