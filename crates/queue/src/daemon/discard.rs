//! Checkpoints that jobs sleep in and that nobody wants any more. A daemon may be killed after any step, and the next one
//! takes all of them again: the images go last.

use std::fs;
use std::path::PathBuf;

use torpor_worker::tell;

use super::core::Core;
use super::left::{self, Names};
use super::record::{Place, Record};
use super::threads;
use crate::files;
use crate::scheduler::JobId;
use crate::shepherd::checkpoint;

/// Where they wait for that, in the data directory: on the disk of the jobs.
const DISCARDED: &str = "jobs/discarded";

/// A checkpoint that was put aside.
#[derive(Debug)]
pub(super) struct Discarded(PathBuf);

impl Core {
    /// Puts the newest checkpoint of a job aside, if it was made since this machine was started: what was left
    /// for another's restore is not here.
    pub(super) fn put_aside(&self, id: JobId) -> Option<Discarded> {
        let dir = self.dir(id);
        let seq = checkpoint::numbers(&dir).pop()?;
        let place = dir.checkpoint(seq);
        checkpoint::record(&place).ok().filter(|record| record.boot == checkpoint::boot())?;
        let all = self.data.join(DISCARDED);
        let aside = all.join(format!("{id}-{seq}"));
        let moved = fs::create_dir_all(&all).and_then(|()| fs::rename(&place, &aside));
        match moved {
            Ok(()) => Some(Discarded(aside)),
            Err(e) => {
                tell!("torpor queue: put {} aside: {e}", place.display());
                None
            }
        }
    }

    /// Discards those that a daemon before this one has put aside.
    pub(super) fn discard_the_rest(&self) {
        for entry in fs::read_dir(self.data.join(DISCARDED)).into_iter().flatten().flatten() {
            // A job that is not over may have an older checkpoint that needs them.
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.split('-').next()?.parse().ok());
            let is_over =
                |id: &JobId| self.jobs.get(id).is_some_and(|job| job.place == Place::Ended);
            let names = id.filter(is_over).map_or(Names::Stay, |id| self.names(id));
            Discarded(entry.path()).discard(names);
        }
    }

    /// What becomes of the names that a dump has given to files of a job that does not go on from there.
    pub(super) fn names(&self, id: JobId) -> Names {
        let is_container = |job: &Record| job.spec.container.is_some();
        if self.jobs.get(&id).is_some_and(is_container) { Names::Stay } else { Names::Go }
    }
}

impl Discarded {
    /// Removes it with all that its dump has left on this machine. Nobody waits for that.
    pub(super) fn discard(self, names: Names) {
        threads::run(move || {
            if let Err(e) = left::take_away(&self.0, names) {
                tell!("torpor queue: {}: what its dump has left: {e}", self.0.display());
            }
            if let Err(e) = files::remove_trees(&[&self.0]) {
                tell!("torpor queue: remove {}: {e}", self.0.display());
            }
        });
    }
}
