//! A pod that gives way: all its containers are frozen at once, dumped, and ended frozen.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use torpor_kernel::cgroup::{self, Freezer};
use torpor_kernel::proc;
use torpor_snapshot::feed::is_fed;
use torpor_worker::logs;

use super::ahead::{self, Ahead, Key};
use super::bundle::{self, Bundle, Volume};
use super::call::{self, CallLimits};
use super::layer::{self, Layer};
use super::restore;
use super::sealed::Archives;
use super::settled;
use super::words::Words;
use crate::error::{Context, Error, Result};
use crate::message::LOGS;

/// How often it is tried to freeze a container, or to let it go on.
const ATTEMPTS: u32 = 5;
/// How often it is looked whether the memory of a container has come.
const STEP: Duration = Duration::from_millis(100);

/// Where the changes of a container's files are in a checkpoint.
pub(super) fn changes(container: &str) -> String {
    format!("files.{container}.tar")
}

/// Where the content of a volume is in a checkpoint.
pub(super) fn volume(volume: &Volume) -> String {
    format!("volume.{}.tar", volume.name)
}

/// The containers of a pod that run.
pub(super) struct Pod<'a> {
    /// The command line of the call.
    pub(super) words: &'a Words,
    /// Their ids and bundles.
    pub(super) containers: Vec<(String, Bundle)>,
    /// The ids of those that somebody else has frozen: they are theirs to thaw.
    pub(super) held: Vec<String>,
}

/// How long a call of the engine goes on.
#[derive(Clone, Copy)]
pub(super) struct Time<'a> {
    /// When it has to be over.
    pub until: Instant,
    /// Whether it is still worth it after so much time.
    pub worth: &'a dyn Fn(Duration) -> bool,
}

/// The saving of a pod.
pub(super) struct Save<'a> {
    /// The pod.
    pub pod: &'a Pod<'a>,
    /// Where it is saved.
    pub dir: &'a Path,
    /// For whom the images are sealed.
    pub recipient: Option<&'a str>,
    /// How long it may take.
    pub limit: Duration,
    /// Whether its memory is copied before it is frozen, as far as that goes.
    pub ahead: Ahead,
}

/// What was saved of a pod, which is frozen still.
pub(super) struct Saved {
    /// The names of its containers.
    pub containers: Vec<String>,
    /// How long it has been frozen, in milliseconds.
    pub frozen_ms: u64,
}

impl<'a> Pod<'a> {
    /// The pod of a uid, as it runs now.
    ///
    /// # Errors
    /// If no container of it runs.
    pub(super) fn running(words: &'a Words, uid: &str) -> Result<Self> {
        let mut containers = bundle::of_pod(&words.root(), uid);
        containers.iter().for_each(|(id, _)| settled(words, id));
        if containers.is_empty() {
            return Err(Error::new(format!("runc knows no container of the pod {uid}")));
        }
        // One that has ended is no part of the pod any more.
        containers.retain(|(id, _)| !members(words, id).is_empty());
        if containers.is_empty() {
            return Err(Error::new("all containers have ended"));
        }
        let ids = containers.iter().map(|(id, _)| id.clone());
        let held = ids.filter(|id| call::status(words, id) == "paused").collect();
        Ok(Self { words, containers, held })
    }

    /// The ids of the containers that are frozen here.
    fn ours(&self) -> impl Iterator<Item = &String> {
        self.containers.iter().map(|(id, _)| id).filter(|id| !self.held.contains(id))
    }

    /// How much memory it has that is in no file, in bytes. What several processes share counts once.
    pub(super) fn memory(&self) -> u64 {
        let pids = self.containers.iter().flat_map(|(id, _)| members(self.words, id));
        let own = |pid| {
            // What has ended has none.
            let rollup = proc::Status::parse(proc::read(pid, "smaps_rollup").ok()?);
            Some(rollup.number("Pss_Anon", 10)?.saturating_add(rollup.number("SwapPss", 10)?))
        };
        pids.filter_map(own).fold(0, |all: u64, kib| all.saturating_add(kib << 10))
    }

    /// Lets it go on.
    pub(super) fn thaw(&self) {
        for id in self.ours() {
            resume(self.words, id);
        }
    }

    /// Ends it while it is frozen; it does nothing any more.
    pub(super) fn end(&self) {
        for (id, _) in &self.containers {
            end(self.words, id);
        }
    }
}

impl Save<'_> {
    /// Freezes the pod and saves it.
    ///
    /// # Errors
    /// If a container cannot be saved, or it takes too long. The caller thaws the pod.
    pub(super) fn take(&self) -> Result<Saved> {
        let volumes = self.pod.containers.iter().flat_map(|(_, bundle)| bundle.volumes());
        let volumes = bundle::distinct(volumes)?;
        let waited = self.wait_for_memory()?;
        let began = Instant::now();
        let left = self.limit.saturating_sub(waited);
        let key = self.go_ahead(left)?;
        let since = Instant::now();
        let until = if self.ahead == Ahead::InItsGrace { began + left } else { since + left };
        self.pod.ours().try_for_each(|id| pause(self.pod.words, id, until))?;
        let work = self.dir.join("containers");
        fs::create_dir_all(&work).context(|| work.display().to_string())?;
        let archives = Archives::create(self.dir, self.recipient)?;
        let mut containers = Vec::new();
        for (id, bundle) in &self.pod.containers {
            let name = bundle.container.as_ref().map(|c| c.name.clone()).unwrap_or_default();
            self.dump(id, &name, bundle, (&archives, key.as_ref()), until)?;
            containers.push(name);
        }
        for found in &volumes {
            layer::save(&archives, &found.dir, &self.dir.join(volume(found)))?;
        }
        let frozen_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(Saved { containers, frozen_ms })
    }

    /// Waits until all memory of the pod is here, while it runs: what comes late cannot be saved before. How long that was.
    /// At least half of the time is left for what is done while the pod is frozen.
    fn wait_for_memory(&self) -> Result<Duration> {
        let began = Instant::now();
        let mut late = self.pod.containers.clone();
        late.retain(|(_, bundle)| restore::late(bundle).exists());
        let comes =
            |(id, _): &(String, Bundle)| members(self.pod.words, id).into_iter().any(is_fed);
        while late.iter().any(comes) {
            if began.elapsed() >= self.limit / 2 {
                return Err(Error::new("its own memory is still coming from another node"));
            }
            sleep(STEP);
        }
        Ok(began.elapsed())
    }

    fn dump(
        &self,
        id: &str,
        name: &str,
        bundle: &Bundle,
        (archives, key): (&Archives, Option<&Key>),
        until: Instant,
    ) -> Result<()> {
        let images = self.dir.join("containers").join(name);
        let parent = ahead::parent(self.dir, name);
        let options = key.filter(|_| parent.is_some()).map(Key::option).unwrap_or_default();
        let options = format!("tcp-close\nskip-in-flight\nghost-limit 256M\n{options}");
        let time = Time { until, worth: &|_| true };
        self.call(id, &images, parent.as_deref(), &["--leave-running"], options, time)
            .map_err(|error| Error::new(format!("container {name}: {error}")))?;
        ahead::unlink(self.dir, &images, name)?;
        Layer::of(&bundle.root())?.save(archives, &self.dir.join(changes(name)))
    }

    /// Has the engine write images of a container, which continue those of a parent if one is named.
    ///
    /// # Errors
    /// If it fails, or takes too long.
    pub(super) fn call(
        &self,
        id: &str,
        images: &Path,
        parent: Option<&str>,
        words: &[&str],
        mut options: String,
        time: Time<'_>,
    ) -> Result<()> {
        let work = self.dir.join(LOGS);
        for dir in [images, &work] {
            fs::create_dir_all(dir).context(|| dir.display().to_string())?;
        }
        let left = time.until.saturating_duration_since(Instant::now());
        // The engine gives up earlier by itself, which a busy machine is no reason for.
        options.push_str(&format!("timeout {}\n", left.as_secs().max(1)));
        if let Some(recipient) = self.recipient {
            options.push_str(&format!("encrypt\nrecipient {recipient}\n"));
        }
        let config = work.join("engine.conf");
        fs::write(&config, options).context(|| config.display().to_string())?;
        let mut call = call::command(self.pod.words, "checkpoint");
        call.args(words).args(["--file-locks", "--ext-unix-sk", "--image-path"]).arg(images);
        if let Some(parent) = parent {
            call.args(["--parent-path", parent]);
        }
        call.arg("--work-path").arg(&work).arg(id);
        call.env("PATH", torpor_snapshot::places::path().context(|| "PATH")?);
        call.env("CRIU_CONFIG_FILE", config);
        call.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let limits = CallLimits { idle: left, whole: left };
        call::within_while(&mut call, limits, time.worth).map_err(|error| {
            match logs::first_error(&work.join("dump.log")) {
                Some(reason) => Error::new(format!("{error}: {reason}")),
                None => error,
            }
        })
    }
}

/// The volumes of each container of a pod that runs.
pub(super) fn volumes_in_use(words: &Words, uid: &str) -> Vec<Vec<Volume>> {
    let all = bundle::of_pod(&words.root(), uid).into_iter();
    let running = all.filter(|(id, _)| !members(words, id).is_empty());
    running.map(|(_, bundle)| bundle.volumes()).collect()
}

/// The group of a container that freezes it.
fn group(words: &Words, id: &str) -> Option<PathBuf> {
    let state = bundle::read_json(&words.root().join(id).join("state.json")).unwrap_or_default();
    let paths = &state["cgroup_paths"];
    ["freezer", "pids", ""].iter().find_map(|name| paths[*name].as_str()).map(PathBuf::from)
}

/// The processes of a container.
fn members(words: &Words, id: &str) -> Vec<i32> {
    group(words, id).map(|group| cgroup::processes(&group)).unwrap_or_default()
}

/// Kills the processes of a container: they die when it is not frozen any more.
pub(super) fn kill(words: &Words, id: &str) {
    for pid in members(words, id).into_iter().filter_map(Pid::from_raw) {
        // It may be gone.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Kills the processes of a container that is frozen, which die before they do anything more. Whether it was frozen when all
/// of them had to die.
pub(super) fn end(words: &Words, id: &str) -> bool {
    kill(words, id);
    let was_frozen = is_frozen(words, id);
    // Version 1 of cgroups lets nothing frozen die.
    thaw(words, id);
    was_frozen
}

/// Lets a container go on. By way of runc it takes longer than some callers live.
pub(super) fn thaw(words: &Words, id: &str) {
    let freezer = group(words, id).map(|group| Freezer::of(&group));
    if freezer.is_none_or(|freezer| freezer.set(false).is_err()) {
        resume(words, id);
    }
}

/// Whether the group of a container is frozen.
pub(super) fn is_frozen(words: &Words, id: &str) -> bool {
    group(words, id).is_some_and(|group| Freezer::of(&group).is_set().unwrap_or(false))
}

/// Whether somebody has killed a process of a container that is frozen. It does not die as long as it is frozen by version 1
/// of cgroups; by version 2 it does, and a container that waits has none left when it is killed.
pub(super) fn is_killed(words: &Words, id: &str) -> bool {
    let all = members(words, id);
    let is_hit = |pid| proc::status(pid).is_ok_and(|status| status.is_killed());
    all.is_empty() || all.into_iter().any(is_hit)
}

/// Freezes a container that runs. runc gives up, and thaws it, where one of its tasks does not come to its turn for a
/// moment, as on a busy machine. It is tried again, but not after `until`.
pub(super) fn pause(words: &Words, id: &str, until: Instant) -> Result<()> {
    let mut tries = 1;
    loop {
        let Err(error) = call::runc(words, "pause", id) else { return Ok(()) };
        // It may have been killed after it had done it.
        if call::status(words, id) == "paused" {
            return Ok(());
        }
        if tries == ATTEMPTS || Instant::now() >= until || members(words, id).is_empty() {
            return Err(error);
        }
        tries += 1;
        sleep(STEP);
    }
}

/// Lets a container go on that may have ended, or may not be frozen.
fn resume(words: &Words, id: &str) {
    for _ in 0..ATTEMPTS {
        // Somebody may have killed runc.
        if call::runc(words, "resume", id).is_ok() || call::status(words, id) != "paused" {
            return;
        }
    }
}
