//! Containers that Podman starts: from an archive as it exports them, or from their image.

use std::time::Instant;

use super::{Snapshot, Start, Started};
use crate::error::{Error, Result};
use crate::fetch::Fetch;
use crate::podman::{self, Podman};
use crate::ready::Container;
use crate::source::Image;
use crate::{archive, generation, interrupt, places, unpack};

impl Start<'_> {
    /// Podman, which has nothing of the name of the container, and has its network. A cold start does not ask again, and
    /// wait for that.
    fn podman(&self) -> Result<&Podman> {
        if let Some(podman) = self.podman.get() {
            return Ok(podman);
        }
        if self.args.log.is_some() {
            return Err(Error::new("Podman keeps what its containers print by itself")
                .hint("podman logs NAME shows it"));
        }
        let podman = Podman::new()?;
        if podman.knows(self.id) {
            return Err(Error::new(format!("Podman has a container {} already", self.id)));
        }
        if let Some(network) = &self.args.network {
            podman.check_network(network)?;
        }
        Ok(self.podman.get_or_init(|| podman))
    }

    /// Restores a container. Nothing is left if that does not work.
    pub(super) fn restored_by_podman(&self, snapshot: &Snapshot) -> Result<Started> {
        let podman = self.podman()?;
        if !self.binds.is_empty() {
            return Err(Error::new("Podman mounts nothing more in a container that it restores"));
        }
        let Snapshot { store, manifest, description, names, .. } = snapshot;
        let store = &**store;
        // What belongs to the container has its own place then.
        let (work, _owner) = places::scratch(places::IMPORT)?;
        let dir = work.path().join("exported");
        let images =
            unpack::exported(snapshot.small(&self.args.reference)?, &dir, &podman::names())?;
        let cached = (!self.args.reference.is_near()).then_some(names);
        Fetch::new(store, (description, manifest), &images, cached)?.shown()?;
        podman::adopt(&dir, self.hostname(), self.args.network.as_deref())?;
        let file = work.path().join("exported.tar");
        archive::write_all(&file, &dir)?;
        interrupt::heed();
        let restored = podman.restore(&file, self.id, &self.args.publish);
        let is_taken = restored.as_ref().is_err_and(podman::is_taken);
        let started = restored.and_then(|()| {
            let milliseconds = self.elapsed();
            let pid = podman.pid(self.id)?;
            self.wake(podman, pid, generation::new()?, None)?;
            let started = Started {
                snapshot: true,
                by_podman: true,
                pid,
                milliseconds,
                ..Started::default()
            };
            self.answered(podman, started)
        });
        if started.is_err() {
            self.failed.set(Some(Instant::now()));
            if !is_taken {
                podman.delete(self.id);
            }
        }
        started
    }

    /// Starts a container from the beginning. Nothing is left if that does not work.
    pub(super) fn started_by_podman(&self, image: &Image) -> Result<Started> {
        let podman = self.podman()?;
        let mut options = vec![format!("--hostname={}", self.hostname())];
        options.extend(self.args.environment()?.iter().map(|entry| format!("--env={entry}")));
        options.extend(self.args.network.iter().map(|name| format!("--network={name}")));
        options.extend(self.args.publish.iter().map(|ports| format!("--publish={ports}")));
        for bind in self.binds {
            options.push(format!("--volume={}", bind.volume()?));
        }
        let fallback = self.fallback();
        interrupt::heed();
        let run = podman.start(image, self.id, &options);
        let is_taken = run.as_ref().is_err_and(podman::is_taken);
        let started = run.and_then(|()| {
            let milliseconds = self.elapsed();
            let pid = podman.pid(self.id)?;
            let by_podman = true;
            let started = Started { by_podman, pid, milliseconds, fallback, ..Started::default() };
            self.answered(podman, started)
        });
        if started.is_err() && !is_taken {
            podman.delete(self.id);
        }
        started
    }
}
