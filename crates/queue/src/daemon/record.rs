//! What the daemon knows of a job, and keeps on disk.

use serde::{Deserialize, Serialize};

use crate::preemption::{Means, Price};
use crate::scheduler::{JobId, Millis};
use crate::shepherd::message::Exit;
use crate::spec::Spec;

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Place {
    /// It has not started, or starts again.
    Queued,
    /// Its shepherd is being started.
    Starting,
    /// It runs.
    Running,
    /// It is being frozen.
    Stopping,
    /// It is frozen in memory.
    Stopped,
    /// It is giving way by checkpoint, by its own command or by being killed.
    Leaving,
    /// It is a checkpoint.
    Asleep,
    /// It is being brought back.
    Waking,
    /// It goes on on another machine.
    Away,
    /// It is over.
    Ended,
}

impl Place {
    /// Whether it needs slots to go on.
    #[must_use]
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Queued | Self::Stopped | Self::Asleep)
    }

    /// Whether it has slots.
    #[must_use]
    pub(crate) fn holds_slots(self) -> bool {
        use Place::{Leaving, Running, Starting, Stopping, Waking};
        matches!(self, Starting | Running | Stopping | Leaving | Waking)
    }
}

/// Why and how a job gives way, while it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GivingWay {
    /// For which other; nobody if a person asked for it or the machine is being drained.
    pub to: Option<JobId>,
    /// By which means.
    pub means: Means,
    /// When it was told.
    pub at: Millis,
    /// At what price, as it was thought to be.
    pub price: Price,
}

/// A job, from its submission on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its number.
    pub id: JobId,
    /// What was submitted.
    #[serde(default, skip_serializing_if = "Spec::is_nothing")]
    pub spec: Spec,
    /// Where it stands.
    pub place: Place,
    /// Since when.
    pub since: Millis,
    /// When it was submitted.
    pub submitted: Millis,
    /// When its first instruction ran.
    pub started: Option<Millis>,
    /// When it was over.
    pub ended: Option<Millis>,
    /// The run that counts; words of others are ignored.
    pub run: u64,
    /// Whether that run has a shepherd.
    pub shepherd: bool,
    /// How often it gave way.
    pub preemptions: u32,
    /// How it ended.
    pub exit: Option<Exit>,
    /// What there is to say about its end or its state, in sentences with semicolons between them.
    pub note: Option<String>,
    /// Milliseconds that it has run, without those since `since`.
    pub ran: Millis,
    /// How much of that is in its newest checkpoint.
    pub saved: Millis,
    /// The number of its newest checkpoint that is on stable storage.
    pub durable: Option<u64>,
    /// How much of it is in each checkpoint that may be on this machine's disk.
    #[serde(default)]
    pub kept: Vec<Stored>,
    /// The number that the next checkpoint gets.
    pub next_checkpoint: u64,
    /// Bytes of its newest checkpoint, as they are on the disk.
    pub image_bytes: u64,
    /// Bytes of memory that it held when that was made.
    #[serde(default)]
    pub memory: u64,
    /// How it gives way now, or gave way last.
    pub giving_way: Option<GivingWay>,
    /// Until when it is left alone because its guarantee was due.
    pub guaranteed: Option<Millis>,
    /// Whether somebody wants it to stay where it is.
    pub held: bool,
    /// Whether somebody wants it to end.
    pub cancelled: bool,
    /// How often it has failed.
    pub failures: u32,
    /// How often its run was lost since it was last saved.
    pub losses: u32,
    /// Why its checkpoint could not be brought back, if that was tried last.
    #[serde(default)]
    pub unwoken: Option<Unwoken>,
    /// Whether the machine of the pool that it came from takes it back, should its checkpoint not be
    /// brought back here.
    #[serde(default)]
    pub returns: bool,
    /// How often it was lost because the machine failed, since it was last saved.
    #[serde(default)]
    pub machine_losses: u32,
    /// The boot of the machine in which its run was started.
    #[serde(default)]
    pub boot: String,
    /// Bytes of output that were there before the attempt that counts.
    #[serde(default)]
    pub base: [u64; 2],
    /// Milliseconds that preemptions have cost it: time to go and to come back.
    pub overhead: Millis,
    /// As many before it gave way the last time.
    #[serde(default)]
    pub overhead_before: Millis,
    /// What that has cost it until it ran again.
    #[serde(default)]
    pub paid: Millis,
    /// Milliseconds of its work that were lost and done again.
    pub lost: Millis,
    /// The other machine that it goes to, or has gone to.
    #[serde(default)]
    pub destination: Option<Destination>,
    /// Whether not all of it is here yet that another machine hands over.
    #[serde(default)]
    pub arriving: bool,
    /// Whether the queue has given it up: that it has failed is not its own fault.
    #[serde(default)]
    pub given_up: bool,
    /// Whether a part of what it has written was cut off, and written again by another run.
    #[serde(default)]
    pub rewritten: bool,
    /// What the machine that it has gone to was not told yet: the end of a path and its query.
    #[serde(default)]
    pub untold: Vec<String>,
    /// Signals that came for it while it could not get them, and whether they are for its process group.
    #[serde(default)]
    pub signals: Vec<(i32, bool)>,
    /// Its newest checkpoint in the object store that counts.
    #[serde(default)]
    pub stored: Option<Stored>,
    /// Whether the object store has, or may have, something under its name.
    #[serde(default)]
    pub named: bool,
    /// Whether its newest checkpoint is in the object store only.
    #[serde(default)]
    pub only_stored: bool,
    /// Bytes that the daemon holds of what was submitted.
    #[serde(default)]
    pub described: u64,
}

/// Bytes that the daemon holds of a job besides.
const BESIDES: u64 = 4 << 10;

/// What there is to say about a job has no more bytes. Names that the job gives are in it, and each new one would be added to
/// what is written with each of its changes, and shown in each list.
const LONGEST_NOTE: usize = 8 << 10;

/// As much of what there is to say as is kept.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(LONGEST_NOTE)]
}

/// Where a job goes, or has gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Destination {
    /// The machine's name in the pool.
    pub machine: String,
    /// Under which key it is handed over.
    pub key: String,
    /// The job's number there, once it has gone.
    pub job: Option<JobId>,
    /// Whether most of it is to be sent while it still runs.
    #[serde(default)]
    pub live: bool,
    /// The checkpoint that is there already.
    #[serde(default)]
    pub ahead: Option<u64>,
}

/// A checkpoint that could not be brought back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unwoken {
    /// How often in a row.
    pub tries: u32,
    /// Why, the last time.
    pub why: String,
}

/// How far a job is that goes to another machine while it runs.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// What is being done.
    pub step: AheadStep,
    /// How many bytes were sent, each time before.
    pub sent: Vec<u64>,
}

/// What is being done for a job that goes to another machine while it runs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AheadStep {
    /// The job is to be saved.
    #[default]
    Due,
    /// The job is being saved as this checkpoint.
    Saving(u64),
    /// A checkpoint is on its way.
    Sending,
}

/// How far the preparation of a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preparation {
    /// It goes on, since then.
    Begun(Millis),
    /// The machine could not do it, and tries it again then.
    PutOff(Millis),
    /// The job needs only a slot.
    Done,
}

/// A checkpoint, and the work in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    /// Its number.
    pub seq: u64,
    /// Milliseconds of work that are in it.
    pub saved: Millis,
}

impl Record {
    /// Bytes of memory that it held when it was last saved. Of one that an earlier version saved only its images are known.
    pub(crate) fn memory(&self) -> u64 {
        if self.memory > 0 { self.memory } else { self.image_bytes }
    }

    /// A job that was just submitted.
    #[must_use]
    pub(crate) fn new(id: JobId, spec: Spec, now: Millis) -> Self {
        Self {
            described: spec.bytes(),
            id,
            spec,
            place: Place::Queued,
            since: now,
            submitted: now,
            started: None,
            ended: None,
            run: 0,
            shepherd: false,
            preemptions: 0,
            exit: None,
            note: None,
            ran: 0,
            saved: 0,
            durable: None,
            kept: Vec::new(),
            next_checkpoint: 1,
            image_bytes: 0,
            memory: 0,
            giving_way: None,
            guaranteed: None,
            held: false,
            cancelled: false,
            failures: 0,
            losses: 0,
            unwoken: None,
            returns: false,
            machine_losses: 0,
            boot: String::new(),
            base: [0, 0],
            overhead: 0,
            overhead_before: 0,
            paid: 0,
            lost: 0,
            destination: None,
            arriving: false,
            given_up: false,
            rewritten: false,
            untold: Vec::new(),
            signals: Vec::new(),
            stored: None,
            named: false,
            only_stored: false,
        }
    }

    /// What is kept of it with each change: all but what was submitted, which never changes and may be long.
    ///
    /// # Errors
    /// Of serde_json, which cannot fail for numbers and text.
    pub(crate) fn state_text(&mut self) -> serde_json::Result<String> {
        let spec = std::mem::take(&mut self.spec);
        let text = serde_json::to_string(self);
        self.spec = spec;
        text
    }

    /// Bytes that the daemon holds of it in its memory.
    #[must_use]
    pub(crate) fn held_bytes(&self) -> u64 {
        self.described + BESIDES
    }

    /// Adds a sentence to what there is to say about it; whether that is new.
    pub(crate) fn remark(&mut self, text: &str) -> bool {
        match &mut self.note {
            Some(note) if note.contains(text) || note.len() >= LONGEST_NOTE => return false,
            Some(note) => *note = format!("{note}; {text}"),
            none => *none = Some(text.to_owned()),
        }
        if let Some(note) = &mut self.note {
            note.truncate(cut(note).len());
        }
        true
    }

    /// Notes how much of its work is in checkpoint `seq`.
    pub(crate) fn keep(&mut self, seq: u64, saved: Millis) {
        self.kept.retain(|kept| kept.seq < seq);
        self.kept.push(Stored { seq, saved });
    }

    /// Moves it to another place.
    pub(crate) fn go(&mut self, place: Place, now: Millis) {
        if self.place == Place::Running || self.place == Place::Leaving {
            // While it is saved it stands still, which is counted as a cost, not as work.
            let worked = if self.place == Place::Running { now - self.since } else { 0 };
            self.ran += worked.max(0);
        }
        // One that waits goes on to wait, however.
        if !(self.place.waits() && place.waits()) {
            self.since = now;
        }
        self.place = place;
        if place == Place::Queued {
            // They were for what it was, and it begins anew.
            self.signals.clear();
        }
    }

    /// Milliseconds that it has run by now.
    #[must_use]
    pub(crate) fn ran_by(&self, now: Millis) -> Millis {
        let current = if self.place == Place::Running { (now - self.since).max(0) } else { 0 };
        self.ran + current
    }

    /// The word for where it stands, as `list` shows it.
    #[must_use]
    pub(crate) fn state(&self) -> &'static str {
        match (self.place, self.exit) {
            (Place::Ended, _) if self.cancelled => "cancelled",
            (Place::Ended, Some(Exit::Code(0))) => "done",
            (Place::Ended, _) => "failed",
            (Place::Queued, _) if self.preemptions > 0 => "preempted",
            (Place::Queued, _) => "queued",
            (Place::Starting | Place::Running, _) => "running",
            (Place::Stopping | Place::Leaving, _) => "preempting",
            (Place::Stopped | Place::Asleep, _) => "preempted",
            (Place::Waking, _) => "resuming",
            (Place::Away, _) => "moved",
        }
    }

    /// Whether others may run that are to run after it. One that was cancelled has not come to its end, whatever it says.
    #[must_use]
    pub(crate) fn has_succeeded(&self) -> bool {
        self.place == Place::Ended && !self.cancelled && self.exit == Some(Exit::Code(0))
    }

    /// What is said to somebody who wants something of it when it is over.
    #[must_use]
    pub(crate) fn over(&self) -> String {
        let (id, state) = (self.id, self.state());
        let exit = self.exit.map_or(0, Exit::number);
        format!("job {id} is over: {state}, exit status {exit} (torpor queue show {id} says more)")
    }

    /// Where it is, if it is not here or about to go.
    #[must_use]
    pub(crate) fn elsewhere(&self) -> Option<String> {
        let (id, there) = (self.id, self.destination.as_ref()?);
        let machine = &there.machine;
        Some(match there.job {
            Some(job) => format!("job {id} is on {machine}: ask there, where it is job {job}"),
            None => format!("job {id} is on its way to {machine}: ask there when it has arrived"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_to_say_has_an_end() {
        let mut record = Record::new(1, Spec::default(), 0);
        let noted = (0..LONGEST_NOTE).filter(|name| record.remark(&format!("\u{e9}\u{e9} {name}")));
        assert!(noted.count() < LONGEST_NOTE / 4);
        let note = record.note.clone().unwrap();
        assert!(note.starts_with("\u{e9}\u{e9} 0; \u{e9}\u{e9} 1; ") && note.len() <= LONGEST_NOTE);
        // One that is too long is cut, and not at a part of a letter.
        let mut record = Record::new(1, Spec::default(), 0);
        assert!(record.remark(&format!("a{}", "\u{e9}".repeat(LONGEST_NOTE))));
        assert_eq!(record.note.unwrap().len(), LONGEST_NOTE - 1);
        assert_eq!(cut("a"), "a");
    }
}
