//! Who goes on with a job that is in the object store: one daemon, whatever others believe of it.
//!
//! A daemon shows there that it lives: its sign changes several times within its lease. A daemon that wants
//! to adopt a job of it watches the sign for as long as the lease lasts, and gives up if it changes.
//! So no two clocks are compared.
//!
//! A job that is adopted gets a sign as well. Its daemon, which may have been cut off for a while,
//! ends the job when it sees that sign. After a start it lets nothing run that it has stored before
//! it has looked.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGKILL;
use torpor_blobs::error::{Context, Result};

use super::config::LONGEST_LEASE;
use super::core::{Core, Queue};
use super::record::Place;
use crate::files;
use crate::objects::Objects;
use crate::scheduler::{JobId, Millis};

/// How often a sign changes within a lease.
const BEATS: Millis = 6;
/// How often it is looked at within a lease.
const LOOKS: u32 = 20;
/// What failed is tried again after so long, if the next beat is not sooner.
const PAUSE: Millis = 1000;
/// What is said about a job that has to end here.
const ADOPTED: &str = "another daemon has adopted it from the object store and goes on with it";

/// What shows that a daemon lives.
#[derive(Debug, Serialize, Deserialize)]
struct Sign {
    /// After so many milliseconds without a change it counts as gone.
    lease: Millis,
    /// When it was started, so that a new daemon does not repeat the beats of the one before.
    started: Millis,
    /// How often it has changed since.
    beat: u64,
}

/// Shows that this daemon lives, and looks which of its jobs were adopted; for ever, on a thread
/// of its own.
pub(super) fn keep(queue: &Arc<Queue>) {
    let core = queue.lock();
    let (place, name, lease) = (core.place(), core.name.clone(), core.config.lease);
    drop(core);
    let Some(place) = place else { return };
    let queue = Arc::clone(queue);
    thread::spawn(move || {
        let mut sign = Sign { lease, started: files::now(), beat: 0 };
        loop {
            sign.beat += 1;
            let seen = beat(&queue, &place, &name, &sign).map_err(|e| e.to_string());
            let pause = if seen.is_ok() { lease / BEATS } else { PAUSE.min(lease / BEATS) };
            queue.change(|core| core.looked(seen));
            thread::sleep(Duration::from_millis(pause.unsigned_abs()));
        }
    });
}

/// Returns the jobs that were adopted.
fn beat(queue: &Queue, place: &Objects, name: &str, sign: &Sign) -> Result<Vec<JobId>> {
    let job = |sign: &String| sign.strip_prefix(name)?.strip_prefix('-')?.parse().ok();
    let adopted: Vec<JobId> = place.signs()?.iter().filter_map(job).collect();
    let settled = queue.lock().settled(&adopted);
    for id in settled {
        place.set_sign(&format!("{name}-{id}"), None)?;
    }
    let text = serde_json::to_vec(sign).context(|| "the sign of this daemon")?;
    place.set_sign(name, Some(&text))?;
    Ok(adopted)
}

/// Waits until it is sure that a daemon is gone.
///
/// # Errors
/// If the daemon lives; if the store does not answer, or has no sign of it that can be read.
pub(super) fn wait_until_gone(place: &Objects, daemon: &str) -> Result<(), String> {
    let seen = || place.sign(daemon).map_err(|e| e.to_string());
    let first = seen()?.ok_or_else(|| {
        format!(
            "nothing in the object store tells whether daemon {daemon} lives; if it is gone for \
             good, adopt with --force"
        )
    })?;
    let sign: Sign = serde_json::from_slice(&first)
        .map_err(|e| format!("the sign of daemon {daemon} makes no sense: {e}"))?;
    let lease = Duration::from_millis(sign.lease.clamp(1, LONGEST_LEASE).unsigned_abs());
    let begun = Instant::now();
    while begun.elapsed() < lease {
        thread::sleep(lease / LOOKS);
        if seen()?.as_ref() != Some(&first) {
            return Err(format!(
                "daemon {daemon} lives and has the job; let it move or cancel it, or adopt with \
                 --force, which ends it there"
            ));
        }
    }
    Ok(())
}

impl Core {
    /// Those that are over or forgotten here, with nothing left of them in the store: their signs have served.
    fn settled(&self, adopted: &[JobId]) -> Vec<JobId> {
        let over = |id: &&JobId| {
            self.jobs.get(id).is_none_or(|job| job.place == Place::Ended && !job.named)
        };
        adopted.iter().filter(over).copied().collect()
    }

    /// What has been seen in the store.
    fn looked(&mut self, adopted: Result<Vec<JobId>, String>) {
        match adopted {
            Ok(adopted) => {
                (self.depot.looked, self.depot.silence) = (true, None);
                adopted.into_iter().for_each(|id| self.give_up(id));
            }
            Err(why) => self.depot.silence = Some(why),
        }
    }

    /// Ends a job here that another daemon goes on with.
    pub(super) fn give_up(&mut self, id: JobId) {
        self.cancel(id, SIGKILL, Some(ADOPTED.to_owned()));
    }

    /// Why a job must not run before the store has been looked at, if it must not.
    pub(super) fn waits_for_look(&self, id: JobId) -> Option<String> {
        let is_stored = self.jobs.get(&id)?.stored.is_some();
        (is_stored && self.config.store.is_some() && !self.depot.looked).then(|| {
            let text = "the object store has not told yet whether another daemon has adopted it";
            match &self.depot.silence {
                Some(why) => format!("{text}: {why}"),
                None => text.to_owned(),
            }
        })
    }
}
