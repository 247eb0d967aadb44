//! A container that comes back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::ahead;
use super::bundle::Bundle;
use super::call::{self, Limits};
use super::layer::Layer;
use super::save;
use super::sealed::{self, Archives};
use super::volumes::Filled;
use super::words::Words;
use crate::error::{Context, Error, Result};
use crate::message::Container;

/// How long a restore may do nothing.
const IDLE: Duration = Duration::from_secs(30);

/// How often it is tried to remove what a restore has left.
const ATTEMPTS: u32 = 5;

/// A restore.
pub(super) struct Restore<'a> {
    /// The command line of `create`.
    pub words: &'a Words,
    /// The container, as runc names it.
    pub id: &'a str,
    /// Its bundle.
    pub bundle: &'a Bundle,
    /// The container, as the pod names it.
    pub container: &'a Container,
    /// The checkpoint.
    pub dir: &'a Path,
    /// The key of its images.
    pub identity: Option<&'a str>,
    /// When it has to be over.
    pub until: Instant,
}

impl Restore<'_> {
    /// Restores the container, which then waits frozen, and marks it with where it is from.
    ///
    /// # Errors
    /// If it cannot be restored: all is then as before.
    pub(super) fn run(&self, mark: &Path) -> Result<()> {
        let images = self.dir.join("containers").join(&self.container.name);
        if !images.join("inventory.img").exists() {
            let text = format!("the checkpoint has no container {}", self.container.name);
            return Err(Error::new(text));
        }
        if let Some(identity) = self.identity {
            sealed::check(&images, identity)?;
        }
        ahead::link(self.dir, &images, &self.container.name)?;
        let archives = Archives::open(self.dir, self.identity)?;
        let layer = Layer::of(&self.bundle.root())?;
        let mut filled = Filled::new(&save::volumes_in_use(self.words, &self.container.uid));
        let result = self
            .attempt(&images, &archives, &layer, &mut filled)
            .and_then(|()| {
                let from = self.dir.as_os_str().as_encoded_bytes();
                fs::write(mark, from).context(|| mark.display().to_string())
            })
            .and_then(|()| filled.keep());
        if result.is_err() {
            self.undo(&layer, &filled)?;
        }
        result
    }

    fn attempt(
        &self,
        images: &Path,
        archives: &Archives,
        layer: &Layer,
        filled: &mut Filled,
    ) -> Result<()> {
        layer.apply(archives, &self.dir.join(save::changes(&self.container.name)))?;
        for volume in self.bundle.volumes() {
            filled.fill(archives, &volume, &self.dir.join(save::volume(&volume)))?;
        }
        let work = self.work()?;
        let mut options = String::from("wake-frozen\ntcp-close\nskip-in-flight\n");
        // The engine reads the key out of the memory of this process.
        let key = self.identity.map(sealed::in_memory).transpose()?;
        if let Some((_, place)) = &key {
            options.push_str(&format!("identity {place}\n"));
        }
        let config = work.join("engine.conf");
        fs::write(&config, options).context(|| config.display().to_string())?;
        let mut call = call::command(self.words, "restore");
        call.args(["--detach", "--file-locks", "--ext-unix-sk", "--image-path"]).arg(images);
        call.arg("--work-path").arg(&work).args(&self.words.rest);
        call.env("PATH", torpor_snapshot::places::path().context(|| "PATH")?);
        call.env("CRIU_CONFIG_FILE", config).stdin(Stdio::inherit());
        let limits =
            Limits { idle: IDLE, whole: self.until.saturating_duration_since(Instant::now()) };
        call::within(&mut call, limits).map_err(|error| match save::reason(&work, "restore.log") {
            Some(reason) => Error::new(format!("{error}: {reason}")),
            None => error,
        })
    }

    /// Where the engine writes its log.
    fn work(&self) -> Result<PathBuf> {
        let work = self.bundle.dir.join("torpor");
        fs::create_dir_all(&work).context(|| work.display().to_string())?;
        Ok(work)
    }

    /// Makes everything what it was.
    fn undo(&self, layer: &Layer, filled: &Filled) -> Result<()> {
        // A runc that fails by itself leaves nothing. One that was killed does.
        for _ in 0..ATTEMPTS {
            if !self.words.root().join(self.id).exists() {
                break;
            }
            save::end(self.words, self.id);
            let mut delete = call::command(self.words, "delete");
            delete.args(["--force", self.id]).stdin(Stdio::null());
            delete.stdout(Stdio::null()).stderr(Stdio::null());
            // While the engine's guardian ends what was made, there are processes. If it stays there, the cold start
            // says so.
            let _ = call::within(&mut delete, call::SHORT);
        }
        filled.undo()?;
        layer.reset()
    }
}
