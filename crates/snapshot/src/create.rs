//! `torpor snapshot create`: from a cold start to a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use torpor_blobs::oci::Manifest;
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};
use torpor_images::proto::StatsEntry;
use torpor_images::{ImageDir, kind};
use torpor_kernel::processor::instructions;
use torpor_seal::keys::AgeIdentity;
use torpor_worker::tell;

use crate::asked::Listener;
use crate::bundle::Bundle;
use crate::changes::Change;
use crate::description::{Description, Machine, Origin, VERSION};
use crate::error::{Context, Error, Result};
use crate::instance::{Instance, Own};
use crate::layer::Layer;
use crate::network::Inner;
use crate::patience::patiently;
use crate::pause::Pause;
use crate::podman::{self, Podman};
use crate::progress::size;
use crate::publish::{Parts, Published, publish};
use crate::ready::{Container, NOTIFY, Output, Ready, Waiting, of_code};
use crate::runc::{Restore, Runc, Runtime, Streams};
use crate::sealed::Seal;
use crate::sealed_pack::Blocks;
use crate::signature::SignWith;
use crate::source::{Image, Source};
use crate::{
    archive, changes, cri, feed, generation, instance, interrupt, layer, mounts, network, places,
    runc, streams, touched,
};

/// Makes a snapshot: starts the container, waits until it is ready, puts it to sleep, and packs
/// it. With a snapshot of the same name there, or --base, only pages that are new are stored.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Where the snapshot is to be: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    /// What it is made from: runc:BUNDLE, podman:IMAGE or running:CONTAINER
    #[arg(long, value_name = "SOURCE")]
    from: Source,
    /// Another snapshot in the same place, the release before for example, whose pages are not stored again. A snapshot
    /// that has the name REF already is taken in its stead
    #[arg(long, value_name = "REF", conflicts_with = "recipient")]
    base: Option<Reference>,
    /// What shows that the application is ready: http://HOST:PORT/PATH or https://HOST:PORT/PATH,
    /// tcp:PORT, log:REGEX, exec:CMD (in the container, or on this host if it has no such program)
    /// or notify (the application writes READY=1 to the socket that NOTIFY_SOCKET names)
    #[arg(long, value_name = "WHAT")]
    ready: Option<Ready>,
    /// A command that warms the application up once it is ready
    #[arg(long, value_name = "CMD")]
    warmup: Vec<String>,
    /// How long it may take until the application is ready, and each --warmup
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// How long to wait for a registry or an object store that cannot be reached yet, or any more
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
    /// Do not start the snapshot for a trial (twice), which also shows what memory it needs first
    #[arg(long)]
    no_trial: bool,
    /// Start it for a trial even if that writes to what is not the container's own: to files of the
    /// host that are mounted in it, or to a network that a container which runs (running:) shares
    #[arg(long, conflicts_with = "no_trial")]
    trial: bool,
    /// Seal the images for WHO: age1..., a file with a certificate, or provider:/PROGRAM:KEY
    #[arg(long, value_name = "WHO")]
    recipient: Vec<String>,
    #[command(flatten)]
    sign: SignWith,
    /// Print a JSON object that says what was made
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: Runtime,
    /// What the container runs instead of what its bundle says
    #[arg(last = true)]
    command: Vec<String>,
}

/// How many trial starts there are: no two of them touch the same pages.
const TRIALS: usize = 2;
/// How long the trial goes on when the application is ready.
const SETTLE: Duration = Duration::from_millis(500);
/// How often it is looked whether all pages of a container are there.
const GLANCE: Duration = Duration::from_millis(50);

/// The file, in the directory of what a command makes, that says that the container is one of Podman.
const BY_PODMAN: &str = "by-podman";

/// What came out of a container of runc.
struct Slept {
    bundle: Bundle,
    /// The archive of what it has changed in its files, if it has a layer of its own for that.
    changes: Option<PathBuf>,
    images: PathBuf,
    /// Its standard streams that are files of the host.
    streams: BTreeMap<u8, String>,
    /// Whether it has the number of its start in a file.
    generation: bool,
}

/// Makes a snapshot.
///
/// # Errors
/// If the container does not become ready, or cannot be put to sleep or packed.
pub fn create(args: &CreateArgs) -> Result<ExitCode> {
    let store = store::open(&args.reference)?;
    let signer = args.sign.signer()?;
    let base = base(args, &*store)?;
    if args.ready.is_none() && !matches!(args.from, Source::Running(_)) {
        tell!("without --ready it is put to sleep at once, wherever its start is then");
    }
    interrupt::heed();
    let (work, owner) = places::scratch(places::CREATE)?;
    instance::note_runtime(work.path(), args.runtime.root.as_deref())?;
    let is_tried_sealed = !args.no_trial && !args.recipient.is_empty();
    let maker = Maker {
        args,
        runc: Runc::new(args.runtime.root.as_deref())?,
        id: work
            .path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .replace(places::CREATE, "torpor-create-"),
        work: work.path(),
        trial_key: is_tried_sealed.then(TrialKey::new).transpose()?,
    };
    let result = maker.make(&*store, base.as_ref());
    maker.clean();
    drop(owner);
    let (description, published) = result.map_err(interrupt::cause)?;
    if let Some(signer) = &signer {
        args.sign.sign(signer, &args.reference, &published.digest)?;
    }
    places::note_made(&published.digest)?;
    places::note(&args.reference, &description.origin)?;
    report(args, &description, &published);
    Ok(ExitCode::SUCCESS)
}

/// What the snapshot has pages in common with: the one that has its name so far, else that of --base.
fn base(args: &CreateArgs, store: &dyn Store) -> Result<Option<Manifest>> {
    if let Some(other) = args.base.as_ref().filter(|other| !other.is_beside(&args.reference)) {
        let text = format!("--base {other} is not in the same place as {}", args.reference);
        return Err(Error::new(text)
            .hint("a snapshot refers to pages in its own repository, directory or prefix only"));
    }
    let patience = Duration::from_secs(args.wait);
    let own = patiently(patience, || store.manifest())?;
    match (&args.base, own) {
        (Some(other), None) => named_base(other, patience),
        // Another image of this name is replaced, and has no packs.
        (_, own) => Ok(own.and_then(|bytes| Manifest::parse(&bytes).ok())),
    }
}

/// The snapshot of --base. Where it is none that has pages to share, a line says so: all pages are stored then.
fn named_base(reference: &Reference, patience: Duration) -> Result<Option<Manifest>> {
    let store = store::open(reference)?;
    let Some(bytes) = patiently(patience, || store.manifest())? else {
        tell!("there is no snapshot {reference} yet (--base): all pages are stored");
        return Ok(None);
    };
    let found = Manifest::parse(&bytes).map_err(Error::from).and_then(|manifest| {
        let description = Description::read(&*store, &manifest)?;
        Ok((manifest, description.sealed))
    });
    let why = match found {
        Ok((manifest, false)) => return Ok(Some(manifest)),
        Ok((_, true)) => "it is sealed".to_owned(),
        Err(error) => error.to_string(),
    };
    tell!("{reference} has no pages to share (--base): {why}; all pages are stored");
    Ok(None)
}

fn report(args: &CreateArgs, description: &Description, published: &Published) {
    if args.json {
        let object = serde_json::json!({
            "reference": args.reference.to_string(),
            "digest": published.digest,
            "size": published.size,
            "uploaded": published.uploaded,
            "memory": description.memory,
            "working_set": description.working_set,
        });
        println!("{object}");
    } else {
        println!("{} {}", args.reference, published.digest);
        let (stored, new) = (size(published.size), size(published.uploaded));
        let (memory, first) = (size(description.memory), size(description.working_set));
        match description.sealed {
            true => tell!("sealed in {stored}, of which {new} are new"),
            false => {
                tell!(
                    "{memory} of memory in {stored}, of which {new} are new; {first} are needed first"
                );
            }
        }
    }
}

/// The making of one snapshot.
struct Maker<'a> {
    args: &'a CreateArgs,
    runc: Runc,
    id: String,
    work: &'a Path,
    /// What opens the images for the trial, if they are sealed.
    trial_key: Option<TrialKey>,
}

/// A key that a snapshot is sealed for as well while it is made, so that it can be tried: the keys of its
/// recipients are elsewhere. It is in memory only, and nobody has it afterwards.
struct TrialKey {
    recipient: String,
    file: fs::File,
}

impl TrialKey {
    fn new() -> Result<Self> {
        let what = || "a key for the trial start";
        let (identity, text) = AgeIdentity::generate().context(what)?;
        let file = memfd_create("trial-key", MemfdFlags::CLOEXEC).context(what)?;
        let mut file = fs::File::from(file);
        file.write_all(text.as_bytes()).context(what)?;
        Ok(Self { recipient: identity.recipient().to_string(), file })
    }

    /// The line by which the engine finds it, as long as this process lives.
    fn identity(&self) -> String {
        format!("identity /proc/{}/fd/{}\n", std::process::id(), self.file.as_raw_fd())
    }
}

impl Maker<'_> {
    fn make(&self, store: &dyn Store, base: Option<&Manifest>) -> Result<(Description, Published)> {
        // Whom nothing can be sealed for is found before anything is started.
        let seal = || Seal::new(&self.args.recipient);
        let (seal, slept) = match &self.args.from {
            Source::Runc(bundle) => (seal()?, self.sleep_bundle(bundle)?),
            Source::Running(id) => (seal()?, self.sleep_running(id)?),
            Source::Podman(image) => return self.make_of_image(image, store, base),
        };
        let tried = self.is_tried(&slept.bundle);
        let first = if tried { self.trials(&slept)? } else { Blocks::new() };
        let description = Description {
            tried,
            configuration: serde_json::to_string(&slept.bundle.config).unwrap_or_default(),
            configuration_digest: slept.bundle.configuration_digest()?,
            files_digest: slept.bundle.files_digest()?,
            streams: slept.streams,
            generation: slept.generation,
            ..self.describe(slept.bundle.origin(), &slept.images)?
        };
        // It is for runtimes that restore no sealed snapshot.
        let spec = ("spec.dump", description.configuration.clone().into_bytes());
        let parts = Parts {
            images: &slept.images,
            changes: slept.changes.as_deref(),
            work: self.work,
            others: if seal.is_none() { vec![spec] } else { Vec::new() },
            annotations: BTreeMap::new(),
            seal: seal.as_ref(),
            first,
            patience: self.patience(),
        };
        self.publish(store, description, parts, base)
    }

    /// A snapshot of a container of an image of Podman, which restores it from its own storage.
    fn make_of_image(
        &self,
        image: &str,
        store: &dyn Store,
        base: Option<&Manifest>,
    ) -> Result<(Description, Published)> {
        if self.args.ready.as_ref().is_some_and(Ready::is_told) {
            return Err(Error::new("Podman's containers are not asked by log: or notify")
                .hint("--ready exec:CMD, tcp:PORT or an address"));
        }
        if !self.args.recipient.is_empty() {
            return Err(Error::new("Podman restores no sealed snapshot")
                .hint("--from runc:BUNDLE makes one, torpor snapshot run starts it"));
        }
        let podman = Podman::new()?;
        let made_of = Image { name: image.to_owned(), command: self.args.command.clone() };
        let mark = self.work.join(BY_PODMAN);
        fs::write(&mark, "").context(|| mark.display().to_string())?;
        podman.start(&made_of, &self.id, &[])?;
        podman.check_volumes(&self.id, image)?;
        let output = Output::default();
        let waiting = Waiting { runtime: &podman, id: &self.id, output: &output, notify: None };
        self.wait(&waiting)?;
        let dir = self.work.join("exported");
        places::make(&dir)?;
        podman.checkpoint(&self.id, &dir)?;
        let images = dir.join(archive::IMAGES);
        cri::any_root(&ImageDir::open(&images)?)?;
        let mut annotations = podman.annotations(&dir, &self.id)?;
        cri::annotate(&mut annotations, &self.id);
        let mut others = podman::others(&dir)?;
        cri::complete(&mut others, &self.id, &podman.reference(image)?)?;
        let parts = Parts {
            images: &images,
            changes: None,
            work: self.work,
            others,
            annotations,
            seal: None,
            first: Blocks::new(),
            patience: self.patience(),
        };
        // Podman says by itself which image it needs.
        let from = Source::Podman(image.to_owned()).to_string();
        let origin = Origin { from, command: self.args.command.clone(), mounts: Vec::new() };
        let description = self.describe(origin, &images)?;
        self.publish(store, description, parts, base)
    }

    /// What is known without the container's configuration.
    fn describe(&self, origin: Origin, images: &Path) -> Result<Description> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Description {
            version: VERSION,
            created: now.as_secs(),
            origin,
            configuration: String::new(),
            configuration_digest: String::new(),
            files_digest: String::new(),
            machine: Machine { instructions: instructions(), ..Machine::here() },
            packs: Vec::new(),
            memory: 0,
            working_set: 0,
            tried: false,
            sealed: !self.args.recipient.is_empty(),
            tasks: ImageDir::open(images)?.ids(kind::MM)?.len(),
            generation: false,
            streams: BTreeMap::new(),
            hidden: None,
        })
    }

    fn publish(
        &self,
        store: &dyn Store,
        description: Description,
        parts: Parts<'_>,
        base: Option<&Manifest>,
    ) -> Result<(Description, Published)> {
        let origin = description.origin.clone();
        let published = publish(store, description, parts, base)?;
        // What the packing has found out is in the published description.
        let manifest = store::manifest(store)?;
        Ok((Description { origin, ..Description::read(store, &manifest)? }, published))
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.args.wait)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.args.timeout)
    }

    /// Starts a container of the bundle and puts it to sleep when it is ready.
    fn sleep_bundle(&self, bundle: &Path) -> Result<Slept> {
        let bundle = Bundle::open(bundle)?.running(&self.args.command);
        let notify = matches!(self.args.ready, Some(Ready::Notify));
        let environment = if notify { vec![format!("NOTIFY_SOCKET={NOTIFY}")] } else { vec![] };
        let generation = Some(generation::new()?);
        let own = Own { environment, generation, ..Own::default() };
        let instance = Instance::make(&self.work.join("cold"), &bundle, &own, |_| Ok(()))?;
        let socket = notify.then(|| notify_socket(instance.root())).transpose()?;
        let output = Output::default();
        self.runc.run(&instance.dir, &self.id, piped(&output)?)?;
        let waiting =
            Waiting { runtime: &self.runc, id: &self.id, output: &output, notify: socket.as_ref() };
        self.wait(&waiting)?;
        let images = instance.dir.join("images");
        self.runc
            .checkpoint(&self.id, &images, &instance.dir.join("work"), false, &self.options()?)
            .context(|| "putting the container to sleep")?;
        let changes = Some(self.keep(&changes::list(&instance.changes())?)?);
        let generation = generation::is_given(&instance.dir);
        let streams = BTreeMap::new();
        Ok(Slept { bundle, changes, images, streams, generation })
    }

    /// Takes a container that runs, and goes on running.
    fn sleep_running(&self, id: &str) -> Result<Slept> {
        let state = self.runc.state(id)?;
        let state = state.ok_or_else(|| Error::new(format!("there is no container {id}")))?;
        let dir = Path::new(state["bundle"].as_str().unwrap_or_default());
        let (bundle, layer) = instance::bundle_of(dir)?;
        let pid = runc::running(id, Some(&state))?;
        self.wait_for_pages(dir, pid)?;
        tell_connections(&network::inner_ports(pid, Inner::Addressed));
        let streams = streams::outside(pid)?;
        let (images, work) = (self.work.join("running"), self.work.join("work"));
        places::make(&images)?;
        places::make(&work)?;
        let mut options = self.options()? + "cow\n";
        for key in streams.values() {
            options += &format!("external {key}\n");
        }
        let checkpoint =
            |more: &str| self.runc.checkpoint(id, &images, &work, true, &(options + more));
        let changes = match layer {
            Some(layer) => Some(self.take(&layer, checkpoint)?),
            None => checkpoint("").map(|()| None)?,
        };
        let generation = generation::is_given(dir);
        tell!("its processes were stopped for {} ms", stopped(&work)?.as_millis());
        Ok(Slept { bundle, changes, images, streams, generation })
    }

    /// Waits until all pages of a container are there: one that came from a snapshot runs before that.
    fn wait_for_pages(&self, dir: &Path, pid: u32) -> Result<()> {
        let end = Instant::now() + self.timeout();
        while feed::goes_on(dir, pid) {
            interrupt::check()?;
            if Instant::now() >= end {
                let time = self.timeout();
                let text =
                    format!("not all pages of the container came within {time:?} (--timeout)");
                return Err(Error::new(text)
                    .hint(format!("{} says what came", dir.join("feed.log").display())));
            }
            std::thread::sleep(GLANCE);
        }
        Ok(())
    }

    /// Takes what a container has changed in its files, its layer, while its tasks are stopped: files that
    /// do not fit its memory are of no use. What comes of it is in an archive.
    fn take(&self, layer: &Path, checkpoint: impl FnOnce(&str) -> Result<()>) -> Result<PathBuf> {
        let pool = self.work.join("files");
        places::make(&pool)?;
        let mut layer = Layer::new(layer, &pool);
        layer.follow()?;
        let pause = Pause::new(self.work)?;
        let changes = pause.during(|| checkpoint(&pause.option()), || layer.take())?;
        layer::dress(&changes)?;
        let archive = self.keep(&changes)?;
        fs::remove_dir_all(&pool).context(|| pool.display().to_string())?;
        Ok(archive)
    }

    /// Writes the archive of what was changed.
    fn keep(&self, changes: &[Change]) -> Result<PathBuf> {
        let path = self.work.join("changes.tar");
        let shown = || path.display().to_string();
        let mut file = fs::File::create(&path).context(shown)?;
        changes::write(&mut file, changes)?;
        Ok(path)
    }

    /// What the engine is told beside what runc says: connections to outside are not kept.
    fn options(&self) -> Result<String> {
        let mut options = "close-outside\ncompress lz4\ndedup-relatives\nwipe-on-fork\n".to_owned();
        if let Some(key) = &self.trial_key {
            options += &format!("recipient {}\n", key.recipient);
        }
        for recipient in &self.args.recipient {
            // The engine is started elsewhere.
            let file = fs::canonicalize(recipient).ok();
            let who = file.map_or_else(|| recipient.clone(), |path| path.display().to_string());
            options += &format!("encrypt\nrecipient {who}\n");
        }
        if !self.args.recipient.is_empty() {
            let with = &self.args.sign;
            for (name, file) in [("sign-key", &with.sign_key), ("sign-cert", &with.sign_cert)] {
                options += &files_option(name, file)?;
            }
        }
        Ok(options)
    }

    /// Waits until the container is ready, and warms it up.
    fn wait(&self, waiting: &Waiting<'_>) -> Result<()> {
        if let Some(ready) = &self.args.ready {
            waiting.until(ready, self.timeout())?;
        }
        let pid = waiting.runtime.pid(waiting.id)?;
        for command in &self.args.warmup {
            let code = waiting.command(command, pid, Instant::now() + self.timeout())?;
            let said = match code {
                Some(Some(0)) => continue,
                Some(code) => of_code(code),
                None => format!("it had not ended after {:?} (--timeout)", self.timeout()),
            };
            return Err(Error::new(format!("--warmup {command:?}: {said}")));
        }
        let closed = match self.args.from {
            Source::Podman(_) => Inner::All,
            _ => Inner::Addressed,
        };
        tell_connections(&network::inner_ports(pid, closed));
        Ok(())
    }

    /// Whether the snapshot is started for a trial. Unless that is asked for, no second copy of an application
    /// works on the data of the first.
    fn is_tried(&self, bundle: &Bundle) -> bool {
        if self.args.trial || self.args.no_trial {
            return self.args.trial;
        }
        let mut shared: Vec<String> = mounts::writable(&bundle.config)
            .into_iter()
            .map(|place| format!("write to {place} of the host"))
            .collect();
        if matches!(self.args.from, Source::Running(_)) && !bundle.makes_network() {
            shared.push("talk in the network of the container that runs".to_owned());
        }
        if !shared.is_empty() {
            tell!(
                "it is not started for a trial, which would {}: nobody knows yet whether it starts, and which memory it \
                 needs first. --trial does it all the same",
                shared.join(" and ")
            );
        }
        shared.is_empty()
    }

    /// Starts the snapshot for a trial: shows that it starts, and what it touches until it is ready. Of a sealed one
    /// that is the blocks that are returned; else the images have it.
    fn trials(&self, slept: &Slept) -> Result<Blocks> {
        let images = ImageDir::open(&slept.images)?;
        let (mut first, mut entries) = (Blocks::new(), Vec::new());
        for _ in 0..TRIALS {
            first.extend(self.trial(slept)?);
            match touched::take(&images)? {
                Some(list) => entries.extend(list),
                None if self.trial_key.is_some() => {}
                // It may come late, and would be taken for that of the next one.
                None => break,
            }
        }
        touched::write(&images, &entries)?;
        Ok(first)
    }

    /// One of these starts.
    fn trial(&self, slept: &Slept) -> Result<Blocks> {
        interrupt::check()?;
        let id = format!("{}-trial", self.id);
        let generation = slept.generation.then(generation::new).transpose()?;
        let own = Own { generation, ..Own::default() };
        let instance = Instance::make(&self.work.join("trial"), &slept.bundle, &own, |upper| {
            slept.changes.as_ref().map_or(Ok(()), |archive| unpack(archive, upper))
        })?;
        let output = Output::default();
        let (options, listener) = match &self.trial_key {
            Some(key) => (key.identity(), Some(Listener::start(&slept.images)?)),
            // Until the container is ended.
            None => ("record-working-set 86400\n".to_owned(), None),
        };
        let options = options + &streams::given(&slept.streams)?;
        let restore = Restore {
            bundle: &instance.dir,
            id: &id,
            images: &slept.images,
            work: &instance.dir.join("work"),
            lazy: true,
            options: &options,
        };
        let tried = self.runc.restore(&restore, piped(&output)?, || Ok(())).and_then(|()| {
            let waiting = Waiting { runtime: &self.runc, id: &id, output: &output, notify: None };
            match &self.args.ready {
                Some(ready) if !ready.is_told() => waiting.until(ready, self.timeout())?,
                _ => {}
            }
            std::thread::sleep(SETTLE);
            self.runc.pid(&id).map(drop)
        });
        self.runc.delete(&id);
        let recorded = slept.images.join(kind::WORKING_SET.file_name(0));
        // The pager writes its list when the tasks are gone.
        let end = Instant::now() + Duration::from_secs(10);
        let is_recorded = || listener.is_some() || recorded.exists();
        while tried.is_ok() && !is_recorded() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        let first = listener.map(Listener::finish).unwrap_or_default();
        instance.remove();
        tried.context(|| "the trial start of the snapshot")?;
        Ok(first)
    }

    /// Nothing is left of what was started.
    fn clean(&self) {
        clean(&self.runc, &self.id, self.work);
    }
}

/// Removes what the making of a snapshot has started: containers, and mounts in `work`. Returns how many bytes that were.
pub fn clean(runc: &Runc, id: &str, work: &Path) -> u64 {
    let mut freed = 0;
    if work.join(BY_PODMAN).exists()
        && let Ok(podman) = Podman::new()
    {
        podman.delete(id);
    }
    for (id, dir) in [(id.to_owned(), "cold"), (format!("{id}-trial"), "trial")] {
        let dir = work.join(dir);
        if dir.exists() {
            runc.delete(&id);
            freed += instance::release(&dir);
        }
    }
    freed
}

/// Options of the engine that name files, as lines of its configuration.
///
/// # Errors
/// If a file is not there.
pub(crate) fn files_option<'f>(
    name: &str,
    files: impl IntoIterator<Item = &'f PathBuf>,
) -> Result<String> {
    let mut lines = String::new();
    for file in files {
        let path = fs::canonicalize(file).context(|| file.display().to_string())?;
        lines += &format!("{name} {}\n", path.display());
    }
    Ok(lines)
}

/// Says at which ports a container loses connections between its own processes.
fn tell_connections(ports: &BTreeSet<u16>) {
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    if !ports.is_empty() {
        tell!(
            "connections between processes of the container are closed as well, at port {}: they have to \
             connect again after each start",
            ports.join(", ")
        );
    }
}

/// The socket at which the application says that it is ready.
fn notify_socket(root: &Path) -> Result<UnixDatagram> {
    // The bundle may have links there, which lead out of it.
    for part in [root.join("run"), root.join("run/torpor")] {
        if fs::symlink_metadata(&part).is_ok_and(|meta| !meta.is_dir()) {
            return Err(Error::new("/run or /run/torpor of the container is no directory"));
        }
        if !part.exists() {
            fs::create_dir(&part).context(|| part.display().to_string())?;
        }
    }
    let path = root.join(NOTIFY.trim_start_matches('/'));
    let socket = UnixDatagram::bind(&path).context(|| path.display().to_string())?;
    socket.set_nonblocking(true).context(|| path.display().to_string())?;
    Ok(socket)
}

/// Streams whose output is collected here.
fn piped(output: &Output) -> Result<Streams> {
    let (from, to) = pipe_with(PipeFlags::CLOEXEC).context(|| "a pipe")?;
    output.collect(fs::File::from(from));
    Ok(Streams { out: to.try_clone().context(|| "a pipe")?.into(), err: to.into() })
}

/// Unpacks the archive of what was changed.
fn unpack(archive: &Path, upper: &Path) -> Result<()> {
    let mut file = fs::File::open(archive).context(|| archive.display().to_string())?;
    changes::apply(&mut file, upper, changes::SetId::Taken)
}

/// For how long the tasks were stopped, as the engine has noted in `work`.
fn stopped(work: &Path) -> Result<Duration> {
    let stats: StatsEntry = ImageDir::open(work)?.read_one(kind::STATS_DUMP, 0)?;
    Ok(Duration::from_micros(stats.dump.map_or(0, |dump| dump.frozen_time.into())))
}
