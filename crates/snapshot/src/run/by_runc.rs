//! Containers that runc starts: from their snapshot, or from their bundle.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::found::Snapshot;
use super::{Prefetch, Start, Started};
use crate::bundle::Bundle;
use crate::create::files_option;
use crate::error::{Error, Result};
use crate::feed::{Feeder, Prepared};
use crate::fetch::Fetch;
use crate::instance::{Instance, Own};
use crate::ready::Container;
use crate::runc::{Restore, Streams, ran_at};
use crate::template::Template;
use crate::{
    belief, feed, generation, interrupt, limit, log, mounts, network, own, streams, template,
    unpack,
};

impl Start<'_> {
    /// Starts a container of a bundle from the beginning. Nothing is left if that does not work.
    pub(super) fn started_by_runc(&self, bundle: Bundle) -> Result<Started> {
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

    fn streams(&self) -> Result<Streams> {
        self.args.log.as_deref().map_or_else(|| Ok(Streams::null()), log::streams)
    }

    /// Restores a container of runc. Nothing is left if that does not work.
    pub(super) fn restored_by_runc(&self, snapshot: &Snapshot, base: &Bundle) -> Result<Started> {
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
        let restore = Restore {
            bundle: &instance.dir,
            id: self.id,
            images: &images,
            work: &work,
            lazy,
            options: &self.options(snapshot, joined)?,
        };
        self.call(&restore, prepared)?;
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

    /// What the engine is told, as lines of its configuration.
    fn options(&self, snapshot: &Snapshot, joined: Option<&Path>) -> Result<String> {
        let Snapshot { description, template, .. } = snapshot;
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
        Ok(options)
    }

    /// Calls the runtime; the process that brings pages in, if there is to be one, starts meanwhile.
    fn call(&self, restore: &Restore<'_>, prepared: Option<Prepared>) -> Result<()> {
        let mut feeder = None;
        let start = || {
            feeder = prepared.map(Prepared::start).transpose()?;
            Ok(())
        };
        let restored = self.streams().and_then(|to| self.runc.restore(restore, to, start));
        // Before that a directory may lose what the container needs.
        let restored = restored.and_then(|()| feeder.as_mut().map_or(Ok(()), Feeder::wait));
        if let (Err(_), Some(feeder)) = (&restored, &mut feeder) {
            feeder.end();
        }
        restored
    }

    /// Has the packs of a snapshot be beside the images in `dir`: now, or by a process that brings them while the container
    /// runs.
    fn bring(&self, snapshot: &Snapshot, dir: &Path) -> Result<Option<Prepared>> {
        let Snapshot { store, manifest, description, names, template, .. } = snapshot;
        let images = dir.join("images");
        if let Some(template) = template {
            template.link_packs(&images)?;
            return Ok(None);
        }
        if description.comes_whole() {
            return Ok(None);
        }
        let is_near = self.args.reference.is_near();
        let fetch = |cached| Fetch::new(&**store, (description, manifest), &images, cached);
        if self.args.prefetch == Prefetch::All {
            fetch((!is_near).then_some(names))?.shown()?;
            return Ok(None);
        }
        feed::hold(dir)?;
        // The engine opens the files of the packs when it starts.
        let fetch = fetch(Some(names))?;
        fetch.check_room()?;
        fetch.hold()?;
        feed::prepare(&self.args.reference, (description, manifest), names, dir).map(Some)
    }
}
