//! `torpor snapshot run`: from the snapshot if it fits, else from the beginning.

use std::cell::OnceCell;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Instant;

use clap::{Args, ValueEnum};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::json;
use torpor_images::proto::UtsnsEntry;
use torpor_images::{ImageDir, kind};

use crate::bundle::Bundle;
use crate::create::files_option;
use crate::description::{Description, Origin};
use crate::error::{Context, Error, Result};
use crate::fetch::Fetch;
use crate::instance::{Instance, Own, is_marked, mark_restored};
use crate::oci::{self, Manifest};
use crate::ready::Container;
use crate::reference::Reference;
use crate::runc::{Restore, Runc, Streams};
use crate::source::Source;
use crate::store::{self, Store};
use crate::template::Template;
use crate::{Runtime, archive, feed, fits, places, template};

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
    #[arg(long, value_name = "N", default_value_t = 1)]
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
    /// What is to happen inside after a restore: a command, or the name of a signal for the first
    /// process
    #[arg(long, value_name = "CMD|SIGNAL")]
    after_restore: Option<String>,
    /// When memory comes
    #[arg(long, value_enum, default_value = "none")]
    prefetch: Prefetch,
    /// Open a sealed snapshot with the private key in FILE
    #[arg(long, value_name = "KEY")]
    identity: Vec<PathBuf>,
    /// Believe only signatures that come from the authorities in FILE
    #[arg(long, value_name = "FILE")]
    trust: Vec<PathBuf>,
    /// Start only from a sealed snapshot that is signed by somebody whom --trust believes
    #[arg(long, requires = "trust")]
    require_signature: bool,
    /// Append what the container prints to FILE; by default it goes nowhere
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Print a JSON object: started_from (snapshot, cold), reason, first_instruction_ms, pid
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: Runtime,
}

/// How a container was started.
struct Started {
    snapshot: bool,
    /// Whether it shares the memory of a template.
    shares: bool,
    /// Why not from the snapshot.
    reason: Option<Error>,
    pid: u32,
    milliseconds: f64,
}

/// Starts containers.
///
/// # Errors
/// If nothing could be started.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let begin = Instant::now();
    let runc = Runc::new(args.runtime.root.as_deref())?;
    let mut cold = false;
    let snapshot = OnceCell::new();
    for number in 1..=args.count {
        let id = if args.count == 1 { args.id.clone() } else { format!("{}-{number}", args.id) };
        check_id(&id)?;
        if runc.state(&id)?.is_some() {
            return Err(Error::new(format!("there is a container {id} already")));
        }
        let begin = if number == 1 { begin } else { Instant::now() };
        let start = Start { args, runc: &runc, id: &id, begin, snapshot: &snapshot };
        let started = start.start()?;
        cold |= !started.snapshot && args.policy != Policy::Never;
        report(args, &id, &started);
    }
    Ok(if cold { ExitCode::from(COLD) } else { ExitCode::SUCCESS })
}

/// A name is part of paths.
fn check_id(id: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_+-.".contains(c);
    if id.is_empty() || id.starts_with('.') || !id.chars().all(plain) {
        return Err(Error::new(format!("{id:?} is no name for a container"))
            .hint("letters, digits and _ + - . make names"));
    }
    Ok(())
}

fn report(args: &RunArgs, id: &str, started: &Started) {
    let from = if started.snapshot { "snapshot" } else { "cold" };
    let reason = started.reason.as_ref().map(ToString::to_string);
    if let Some(error) = &started.reason {
        eprintln!("{id} is started cold: {error}");
        if let Some(hint) = &error.hint {
            eprintln!("Hint: {hint}");
        }
    }
    if args.json {
        let object = json!({
            "id": id,
            "reference": args.reference.to_string(),
            "started_from": from,
            "reason": reason,
            "first_instruction_ms": (started.milliseconds * 1000.0).round() / 1000.0,
            "pid": started.pid,
            "template": started.shares,
        });
        println!("{object}");
    } else {
        println!("{id} {from} {}", started.pid);
    }
}

/// The start of one container.
struct Start<'a> {
    args: &'a RunArgs,
    runc: &'a Runc,
    id: &'a str,
    begin: Instant,
    /// The snapshot, when it has been found and fits.
    snapshot: &'a OnceCell<Snapshot>,
}

/// A snapshot that fits, and what it is restored with.
struct Snapshot {
    store: Box<dyn Store>,
    manifest: Manifest,
    description: Description,
    bundle: Bundle,
    template: Option<Template>,
}

impl Snapshot {
    /// Finds the snapshot that is asked for.
    fn open(args: &RunArgs) -> Result<Self> {
        let store = store::open(&args.reference)?;
        let bytes = store.manifest()?.ok_or_else(|| Error::new("there is no such snapshot"))?;
        let manifest = Manifest::parse(&bytes)?;
        let description = Description::read(&*store, &manifest)?;
        let mut origin = description.origin.clone();
        if let Some(source) = &args.from {
            origin.from = source.to_string();
        }
        let bundle = bundle_of(&origin)?;
        fits::check(&description, &bundle)?;
        // For when the place does not answer. That it cannot be noted is no reason not to start.
        let _ = places::note(&args.reference.to_string(), &origin);
        let mut template = template::find(&args.reference, &oci::sha256(&bytes));
        if template.is_none() && args.count > 1 && !description.sealed {
            let made = template::for_batch(&args.reference, &*store, (&description, &manifest));
            // Without one each has its own memory.
            template = made.map_err(|error| eprintln!("They share no memory: {error}")).ok();
        }
        Ok(Self { store, manifest, description, bundle, template })
    }
}

impl Start<'_> {
    fn start(&self) -> Result<Started> {
        let reason = match self.args.policy {
            Policy::Never => None,
            Policy::Always => return self.warm(),
            Policy::IfPresent => match self.warm() {
                Ok(started) => return Ok(started),
                Err(error) => Some(error),
            },
        };
        let bundle = self.cold_bundle().map_err(|error| match &reason {
            Some(reason) => error.during(format!("{reason}; and no cold start")),
            None => error,
        })?;
        let own = Own { environment: self.environment()?, ..self.own() };
        let instance = Instance::make(&self.dir(), &bundle, &own, |_| Ok(()))?;
        let done = self.runc.run(&instance.dir, self.id, self.streams()?);
        let pid = done.and_then(|()| self.runc.pid(self.id));
        let milliseconds = self.elapsed();
        match pid {
            Ok(pid) => Ok(Started { snapshot: false, shares: false, reason, pid, milliseconds }),
            Err(error) => {
                self.runc.delete(self.id);
                instance.remove();
                Err(error)
            }
        }
    }

    fn elapsed(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * 1000.0
    }

    fn dir(&self) -> PathBuf {
        places::instances().join(self.id)
    }

    fn hostname(&self) -> &str {
        self.args.hostname.as_deref().unwrap_or(self.id)
    }

    fn own(&self) -> Own<'_> {
        Own { hostname: Some(self.hostname()), released: true, ..Own::default() }
    }

    fn environment(&self) -> Result<Vec<String>> {
        let Some(file) = &self.args.env_file else { return Ok(Vec::new()) };
        let text = fs::read_to_string(file).context(|| file.display().to_string())?;
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        Ok(lines.map(str::to_owned).collect())
    }

    fn streams(&self) -> Result<Streams> {
        self.args.log.as_deref().map_or_else(|| Ok(Streams::null()), Streams::file)
    }

    /// What is started cold. The place of the snapshot need not answer for that.
    fn cold_bundle(&self) -> Result<Bundle> {
        if let Some(source) = &self.args.from {
            return bundle_of(&Origin { from: source.to_string(), command: Vec::new() });
        }
        let reference = self.args.reference.to_string();
        let origin = match places::noted(&reference) {
            Some(noted) => noted,
            None => {
                let store = store::open(&self.args.reference)?;
                Description::read(&*store, &store::manifest(&*store)?)?.origin
            }
        };
        bundle_of(&origin)
    }

    /// Starts from the snapshot. Nothing is left if that does not work.
    fn warm(&self) -> Result<Started> {
        if self.snapshot.get().is_none() {
            let _ = self.snapshot.set(Snapshot::open(self.args)?);
        }
        let snapshot = self.snapshot.get().ok_or_else(|| Error::new("there is no snapshot"))?;
        let unpack = |upper: &Path| unpack(&*snapshot.store, &snapshot.manifest, upper);
        let instance = Instance::make(&self.dir(), &snapshot.bundle, &self.own(), unpack)?;
        let restored = self.restore(snapshot, &instance);
        if restored.is_err() {
            self.runc.delete(self.id);
            instance.remove();
        }
        restored
    }

    fn restore(&self, snapshot: &Snapshot, instance: &Instance) -> Result<Started> {
        let Snapshot { store, manifest, description, template, .. } = snapshot;
        let store = &**store;
        let (images, work) = (instance.dir.join("images"), instance.dir.join("work"));
        let bytes = torpor_seal::secret::random::<8>().map_err(|e| Error::new(e.to_string()))?;
        let generation = u64::from_le_bytes(bytes);
        if !description.sealed {
            set_hostname(&images, self.hostname())?;
        }
        mark_restored(instance.root(), generation)?;
        self.write_environment(instance.root())?;
        let remote = !matches!(self.args.reference, Reference::Dir { .. });
        let lazy = !description.sealed && template.is_none();
        let fed = lazy && remote && self.args.prefetch == Prefetch::None;
        let mut feeder = None;
        if let Some(template) = template {
            template.link_packs(&images)?;
        } else if fed {
            // The engine opens the files of the packs when it starts.
            drop(Fetch::new(store, (description, manifest), &images, remote)?);
            feeder = Some(feed::start(&self.args.reference, manifest, &instance.dir)?);
        } else if lazy {
            Fetch::new(store, (description, manifest), &images, remote)?.all(&|| false)?;
        }
        let mut options = "tcp-close\n".to_owned();
        options += &files_option("template", &template.as_ref().map(Template::process))?;
        options += &files_option("identity", &self.args.identity)?;
        options += &files_option("trust", &self.args.trust)?;
        if self.args.require_signature {
            options += "require-signature
";
        }
        let restore = Restore {
            bundle: &instance.dir,
            id: self.id,
            images: &images,
            work: &work,
            lazy: lazy && (fed || self.args.prefetch == Prefetch::None),
            options: &options,
        };
        let restored = self.streams().and_then(|streams| self.runc.restore(&restore, streams));
        if let (Err(_), Some(feeder)) = (&restored, &mut feeder) {
            let _ = feeder.kill();
            let _ = feeder.wait();
        }
        restored?;
        let milliseconds = self.elapsed();
        let pid = self.runc.pid(self.id)?;
        self.wake(pid, generation, description.sealed)?;
        if !restore.lazy {
            // All of it is in memory.
            let _ = fs::remove_dir_all(&images);
        }
        let shares = template.is_some() && template::was_used(&work);
        Ok(Started { snapshot: true, shares, reason: None, pid, milliseconds })
    }

    fn write_environment(&self, root: &Path) -> Result<()> {
        let lines = self.environment()?;
        if lines.is_empty() {
            return Ok(());
        }
        crate::instance::write_inside(root, "environment", &(lines.join("\n") + "\n"))
    }

    /// Tells the application that it was restored.
    fn wake(&self, pid: u32, generation: u64, sealed: bool) -> Result<()> {
        if sealed {
            // It stands in images that cannot be changed.
            rename_host(pid, self.hostname())?;
        }
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        if !is_marked(&root, generation) {
            // /run is a file system of its own, which came with the images.
            mark_restored(&root, generation)?;
            self.write_environment(&root)?;
        }
        let Some(after) = &self.args.after_restore else { return Ok(()) };
        if let Some(signal) = signal_of(after) {
            let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
            let pid = pid.ok_or_else(|| Error::new("the container has no process"))?;
            return rustix::process::kill_process(pid, signal).context(|| "--after-restore");
        }
        let mut call: Command = self.runc.exec(self.id, &["/bin/sh", "-c", after]);
        let status = call.stdin(Stdio::null()).stdout(Stdio::null()).status();
        match status.context(|| "--after-restore")? {
            status if status.success() => Ok(()),
            status => Err(Error::new(format!("--after-restore {after:?}: {status}"))),
        }
    }
}

fn bundle_of(origin: &Origin) -> Result<Bundle> {
    match origin.from.parse().map_err(Error::new)? {
        Source::Runc(path) => Ok(Bundle::open(&path)?.running(&origin.command)),
        other => Err(Error::new(format!("{other} cannot be started here"))),
    }
}

/// Unpacks the small layer of a snapshot beside the layer `upper`, and what was changed into it.
fn unpack(store: &dyn Store, manifest: &Manifest, upper: &Path) -> Result<()> {
    let dir = upper.parent().unwrap_or(upper);
    let changes = dir.join("work").join(archive::CHANGES);
    unpack_images(store, manifest, &dir.join("images"), &changes)?;
    if changes.exists() {
        let mut file = fs::File::open(&changes).context(|| changes.display().to_string())?;
        archive::apply_changes(&mut file, upper)?;
        let _ = fs::remove_file(&changes);
    }
    Ok(())
}

/// Unpacks the small layer of a snapshot: its images to `images`, and the archive of what was
/// changed in the container's files to `changes`.
///
/// # Errors
/// If it is damaged; no place.
pub fn unpack_images(
    store: &dyn Store,
    manifest: &Manifest,
    images: &Path,
    changes: &Path,
) -> Result<()> {
    let layer = manifest.layers.first().ok_or_else(|| Error::new("the snapshot has no layers"))?;
    let packed = store::whole(store, layer, archive::MAX_SMALL)?;
    let mut plain = zstd::Decoder::new(packed.as_slice()).context(|| "unpacking the images")?;
    archive::read_small(&mut plain, images, changes)
}

/// Gives the restored host its name.
fn set_hostname(images: &Path, name: &str) -> Result<()> {
    let dir = ImageDir::open(images)?;
    for id in dir.ids(kind::UTSNS)? {
        let mut entry: UtsnsEntry = dir.read_one(kind::UTSNS, id)?;
        name.clone_into(&mut entry.nodename);
        dir.write_one(kind::UTSNS, id, &entry)?;
    }
    Ok(())
}

/// Gives the host of a container that runs its name.
fn rename_host(pid: u32, name: &str) -> Result<()> {
    let path = format!("/proc/{pid}/ns/uts");
    let own = fs::metadata("/proc/self/ns/uts").context(|| path.clone())?;
    let namespace = fs::File::open(&path).context(|| path.clone())?;
    if namespace.metadata().context(|| path.clone())?.ino() == own.ino() {
        return Ok(());
    }
    let renamed = thread::scope(|scope| {
        let rename = || {
            let kind = Some(LinkNameSpaceType::HostNameAndNISDomainName);
            move_into_link_name_space(namespace.as_fd(), kind)?;
            rustix::system::sethostname(name.as_bytes())
        };
        scope.spawn(rename).join()
    });
    let renamed = renamed.map_err(|_| Error::new("a thread that renames the host has ended"))?;
    renamed.context(|| format!("the host name {name}"))
}

/// The signal of this name.
fn signal_of(name: &str) -> Option<rustix::process::Signal> {
    use rustix::process::Signal;
    let name = name.strip_prefix("SIG").unwrap_or(name);
    Some(match name {
        "HUP" => Signal::HUP,
        "INT" => Signal::INT,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        "CONT" => Signal::CONT,
        "TERM" => Signal::TERM,
        "WINCH" => Signal::WINCH,
        "ALRM" => Signal::ALARM,
        _ => return None,
    })
}
