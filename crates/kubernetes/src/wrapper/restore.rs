//! A container that comes back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use torpor_snapshot::belief;
use torpor_worker::{logs, runc};

use super::ahead;
use super::bundle::{self, Bundle, Volume};
use super::call::{self, CallLimits};
use super::layer::Layer;
use super::made::Made;
use super::save;
use super::sealed::{self, Archives};
use super::volumes::Filled;
use super::words::Words;
use crate::error::{Context, Error, Result};

/// Where the engine works, in a bundle.
pub(super) const WORK: &str = "torpor";
/// How long a restore may do nothing.
const IDLE: Duration = Duration::from_secs(30);

/// How often it is tried to remove what a restore has left.
const ATTEMPTS: u32 = 5;

/// What the agent says of a checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    /// The key of its images.
    pub identity: Option<&'a str>,
    /// Whether its memory comes while the container runs.
    pub lazy: bool,
}

/// The file that shows that the memory of a container comes while it runs, or has.
pub(super) fn late(bundle: &Bundle) -> PathBuf {
    bundle.dir.join(WORK).join("late")
}

/// A restore.
pub(super) struct Restore<'a> {
    /// The command line of `create`.
    pub words: &'a Words,
    /// Its bundle.
    pub bundle: &'a Bundle,
    /// The container, and where the checkpoint is.
    pub made: &'a Made,
    /// What else there is to know of the checkpoint.
    pub found: Found<'a>,
    /// When it has to be over.
    pub until: Instant,
}

impl Restore<'_> {
    /// Restores the container, which then waits frozen, and marks it with where it is from.
    ///
    /// # Errors
    /// If the checkpoint has no such container, or is not what was sealed; if its files or volumes cannot be filled, or a
    /// volume is not for sure the pod's own; if runc or the engine fails, or it takes too long. All is then as before.
    pub(super) fn run(&self, mark: &Path) -> Result<()> {
        let (dir, identity) = (&self.made.dir, self.found.identity);
        let images = dir.join("containers").join(&self.made.container.name);
        if !images.join("inventory.img").exists() {
            let text = format!("the checkpoint has no container {}", self.made.container.name);
            return Err(Error::new(text));
        }
        if let Some(identity) = identity {
            sealed::check(&images, identity, !self.found.lazy)?;
        }
        ahead::link(dir, &images, &self.made.container.name)?;
        let archives = Archives::open(dir, identity)?;
        let layer = Layer::of(&self.bundle.root())?;
        let running = save::volumes_in_use(self.words, &self.made.container.uid);
        let volumes = self.bundle.volumes().into_iter().chain(running.concat());
        let volumes = bundle::distinct(volumes)?;
        let mut filled = Filled::new(&running);
        let result = self
            .fill(&archives, &layer, &volumes, &mut filled)
            .and_then(|()| self.call(&images))
            .and_then(|()| {
                let from = dir.as_os_str().as_encoded_bytes();
                fs::write(mark, from).context(|| mark.display().to_string())
            })
            .and_then(|()| filled.keep());
        if result.is_err() {
            self.undo(&layer, &filled)?;
        }
        result
    }

    /// Fills the container's layer, and those of the volumes that no other container works on. Nobody gets a program by that
    /// which gives more rights than the container could take itself.
    fn fill(
        &self,
        archives: &Archives,
        layer: &Layer,
        volumes: &[Volume],
        filled: &mut Filled,
    ) -> Result<()> {
        let (dir, set_id) = (&self.made.dir, belief::set_id(false, &self.bundle.config));
        let changes = save::changes(&self.made.container.name);
        layer.apply(archives, &dir.join(changes), set_id)?;
        let each = |volume| filled.fill(archives, volume, &dir.join(save::volume(volume)), set_id);
        volumes.iter().try_for_each(each)
    }

    /// Calls runc, which has the engine restore the container.
    fn call(&self, images: &Path) -> Result<()> {
        let Found { identity, lazy } = self.found;
        let work = self.work()?;
        let mut options = String::from("wake-frozen\ntcp-close\nskip-in-flight\n");
        // The engine reads the key out of the memory of this process.
        let key = identity.map(sealed::in_memory).transpose()?;
        if let Some((_, place)) = &key {
            options.push_str(&format!("identity {place}\n"));
        }
        let config = work.join("engine.conf");
        fs::write(&config, options).context(|| config.display().to_string())?;
        let mut call = call::command(self.words, "restore");
        call.args(["--detach", "--file-locks", "--ext-unix-sk", "--image-path"]).arg(images);
        if lazy {
            let late = late(self.bundle);
            fs::write(&late, "").context(|| late.display().to_string())?;
            call.arg("--lazy-pages");
        }
        call.arg("--work-path").arg(&work).args(&self.words.rest);
        call.env("PATH", torpor_snapshot::places::path().context(|| "PATH")?);
        call.env("CRIU_CONFIG_FILE", config).stdin(Stdio::inherit());
        let limits =
            CallLimits { idle: IDLE, whole: self.until.saturating_duration_since(Instant::now()) };
        call::within_while(&mut call, limits, &|_| self.made.is_last()).map_err(|error| {
            match logs::first_error(&work.join("restore.log")) {
                Some(reason) => Error::new(format!("{error}: {reason}")),
                None => error,
            }
        })
    }

    /// Where the engine writes its log.
    fn work(&self) -> Result<PathBuf> {
        let work = self.bundle.dir.join(WORK);
        fs::create_dir_all(&work).context(|| work.display().to_string())?;
        Ok(work)
    }

    /// Makes everything what it was. That its memory was to come late is no harm: that of a cold start does not.
    fn undo(&self, layer: &Layer, filled: &Filled) -> Result<()> {
        self.remove();
        filled.undo()?;
        layer.reset()
    }

    /// Ends a restore whose call was killed, and removes what it has left: nobody knows of this container. Another one has
    /// a layer of its own, and finds out what was done to the volumes.
    pub(super) fn abandon(&self) {
        call::stop_all("restore", &self.made.id);
        self.remove();
    }

    /// Removes what runc has left of the container.
    fn remove(&self) {
        // A runc that fails by itself leaves nothing. One that was killed does.
        for _ in 0..ATTEMPTS {
            if !self.words.root().join(&self.made.id).exists() {
                break;
            }
            save::end(self.words, &self.made.id);
            // Where runc was killed, the root lies mounted there, which it would empty and could not remove.
            runc::release(&self.words.root(), &self.made.id);
            let mut delete = call::command(self.words, "delete");
            delete.args(["--force", &self.made.id]).stdin(Stdio::null());
            delete.stdout(Stdio::null()).stderr(Stdio::null());
            // While the engine's guardian ends what was made, there are processes. If it stays there, the cold start
            // says so.
            let _ = call::within(&mut delete, call::SHORT);
        }
    }
}
