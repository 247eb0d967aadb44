//! What people want of a job: that it gives way, goes on, or ends.

use serde_json::json;

use super::core::Core;
use super::record::Place;
use crate::preemption::{Facts, Means, Pressure, prices};
use crate::scheduler::JobId;

impl Core {
    /// Wants a job to stay where it is, or no longer.
    pub(super) fn set_held(&mut self, id: JobId, held: bool) {
        if let Some(record) = self.jobs.get_mut(&id)
            && record.place != Place::Ended
            && record.held != held
        {
            record.held = held;
            if !held {
                record.unwoken = None;
            }
            let event = if held { "held" } else { "released" };
            self.save(id, Some((event, json!({}))));
        }
    }

    /// Ends a job because a person wants that. One that was told to already gets the signal, too.
    ///
    /// # Errors
    /// If there is no such job, or it is over.
    pub(super) fn cancel_by_hand(&mut self, id: JobId, signal: i32) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        if record.place == Place::Ended {
            return Err(record.over());
        }
        if record.cancelled {
            self.pass_signal(id, signal, false);
        } else {
            self.cancel(id, signal, None);
        }
        Ok(())
    }

    /// Lets a job go on that was told to stay where it is.
    ///
    /// # Errors
    /// If there is no such job, it is over or elsewhere, or nobody has told it to stay.
    pub(super) fn resume(&mut self, id: JobId) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        if record.place == Place::Ended {
            return Err(record.over());
        }
        if let Some(elsewhere) = record.elsewhere() {
            return Err(elsewhere);
        }
        if record.held {
            self.set_held(id, false);
            return Ok(());
        }
        if matches!(record.place, Place::Starting | Place::Running | Place::Waking) {
            return Err(format!("job {id} runs already"));
        }
        let why = self.reasons.get(&id).map(|reason| self.explain(reason));
        let why = why.unwrap_or_else(|| "it goes on when it is its turn".to_owned());
        Err(format!("job {id} was not preempted by hand, so there is nothing to resume: {why}"))
    }

    /// Lets a job give way because a person wants it, until it is resumed.
    ///
    /// # Errors
    /// If there is no such job, it is over or elsewhere, has given way already, or has no means to give way like that.
    pub(super) fn preempt(&mut self, id: JobId, means: Option<Means>) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        match (record.place, record.elsewhere()) {
            (Place::Ended, _) => return Err(record.over()),
            (Place::Running, _) => {}
            (Place::Away, Some(elsewhere)) => return Err(elsewhere),
            (Place::Queued | Place::Stopped | Place::Asleep, elsewhere) if record.held => {
                let told =
                    || format!("job {id} has given way already, until torpor queue resume {id}");
                return Err(elsewhere.unwrap_or_else(told));
            }
            // Once it runs it is made to give way.
            _ => {
                self.set_held(id, true);
                return Ok(());
            }
        }
        let world = self.world();
        let view = world.jobs.iter().find(|job| job.id == id).ok_or_else(|| record.over())?;
        let allowed = match means {
            Some(means) => vec![means],
            // A client that asks for a job to go wants its memory, too.
            None => vec![Means::Checkpoint, Means::Command, Means::Stop],
        };
        let pressure = Pressure { memory_free: world.memory_free, memory_needed: 0 };
        // A person may try again what has failed a moment ago, and by name what is said to be impossible.
        let refused = means.is_none() && self.refusal(&record.spec).is_some();
        let facts = Facts { refused, ..view.facts };
        let possible = prices(&facts, &allowed, pressure);
        let price =
            allowed.iter().find_map(|means| possible.iter().find(|p| p.means == *means).copied());
        let Some(price) = price else {
            let why = self.refusal_text(&record.spec);
            let why = why.unwrap_or_else(|| "it has no such means".to_owned());
            return Err(format!("job {id} cannot give way like that: {why}"));
        };
        self.set_held(id, true);
        self.let_give_way(id, None, price);
        Ok(())
    }
}
