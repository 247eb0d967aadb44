//! What of a job is sent to another machine while it still runs here.
//!
//! It is saved and goes on; that checkpoint is sent. When it is there the job gives way by one that
//! builds on it, so that what is sent while the job stands still is what it has changed
//! meanwhile. If any of this fails the job goes as one that was not sent ahead.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use serde_json::json;

use super::core::{Core, Queue};
use super::disk;
use super::record::{Ahead, Destination, Place};
use super::transfer::can_go_on;
use crate::bundle;
use crate::files;
use crate::preemption::{self, Means};
use crate::scheduler::JobId;

impl Core {
    /// Does the next step for a job that runs.
    pub(super) fn send_ahead(&mut self, id: JobId) {
        if self.saving.contains(&id) {
            return;
        }
        let Some(record) = self.jobs.get(&id) else { return };
        let (durable, since) = (record.durable, self.ahead.get(&id).copied());
        let failed = self.not_before.get(&id).is_some_and(|&until| files::now() < until);
        match since {
            Some(Ahead::Sending) => {}
            Some(Ahead::Saving(seq)) if durable >= Some(seq) => self.send_checkpoint(id),
            // On its way to the disk.
            Some(Ahead::Saving(seq)) if record.kept.iter().any(|kept| kept.seq == seq) => {}
            None if !failed => {
                let memory = crate::shepherd::cgroups(&self.dir(id)).memory().unwrap_or(0);
                let memory = self.to_save(id, memory, files::now());
                self.ahead.insert(id, Ahead::Saving(record.next_checkpoint));
                self.saving.insert(id);
                let order = self.checkpoint(id, true, preemption::rounds(memory));
                self.order(id, &order);
            }
            _ => self.leave(id, None),
        }
    }

    fn send_checkpoint(&mut self, id: JobId) {
        let Some(queue) = self.queue.upgrade() else { return };
        let Some(record) = self.jobs.get(&id) else { return };
        let (Some(seq), Some(destination)) = (record.durable, record.destination.clone()) else {
            return;
        };
        self.ahead.insert(id, Ahead::Sending);
        thread::spawn(move || {
            let sent = send(&queue, id, seq, &destination);
            queue.change(|core| core.sent_ahead(id, seq, &destination, sent));
        });
    }

    fn sent_ahead(
        &mut self,
        id: JobId,
        seq: u64,
        destination: &Destination,
        sent: Result<u64, String>,
    ) {
        self.ahead.remove(&id);
        let still = |there: &Destination| there.key == destination.key && there.job.is_none();
        let record = self.jobs.get(&id).filter(|record| record.place == Place::Running);
        if record.and_then(|record| record.destination.as_ref()).is_none_or(|there| !still(there)) {
            // It has ended, gone, or is to stay.
            return self.forget_there(destination);
        }
        let event = match &sent {
            Ok(bytes) => json!({ "seq": seq, "bytes": bytes }),
            Err(why) => json!({ "why": why }),
        };
        let ahead = sent.ok().map(|_| seq);
        self.save(id, Some((if ahead.is_some() { "sent-ahead" } else { "not-sent-ahead" }, event)));
        self.leave(id, ahead);
    }

    /// The job gives way now, and goes.
    fn leave(&mut self, id: JobId, ahead: Option<u64>) {
        self.ahead.remove(&id);
        if let Some(there) = self.jobs.get_mut(&id).and_then(|record| record.destination.as_mut()) {
            (there.live, there.ahead) = (false, ahead);
        }
        if let Err(why) = self.preempt(id, Some(Means::Checkpoint)) {
            self.stay(id, &why);
        }
    }

    /// A job does not go, or is over: what was sent of it is needed no more.
    pub(super) fn drop_ahead(&mut self, id: JobId) {
        let there = self.jobs.get(&id).and_then(|record| record.destination.clone());
        if let Some(there) = there.filter(|there| there.ahead.is_some() && there.job.is_none()) {
            self.forget_there(&there);
        }
    }

    fn forget_there(&self, destination: &Destination) {
        let Ok(client) = self.peer(&destination.machine) else { return };
        let path = format!("/v1/import/{}?ahead=1", destination.key);
        // What a machine that is away keeps of it goes when that is started anew.
        thread::spawn(move || client.json("DELETE", &path, b""));
    }
}

/// Sends a checkpoint; returns how many bytes that were.
fn send(queue: &Queue, id: JobId, seq: u64, destination: &Destination) -> Result<u64, String> {
    let (client, dir) = {
        let core = queue.lock();
        (core.peer(&destination.machine)?, core.dir(id))
    };
    can_go_on(&client.json("GET", "/v1/machine", b"")?)?;
    let bundle = disk::bundle_ahead(&dir, seq).map_err(|e| e.to_string())?;
    let (path, length) = (format!("/v1/import?key={}&ahead=1", destination.key), bundle.length());
    let answer = client.send("POST", &path, &[], length, |to| bundle.write(to));
    let answer = answer.map_err(|e| client.unreachable(&e))?;
    match answer.status {
        status if status < 300 => Ok(length),
        status => Err(format!("{} answers with {status}", destination.machine)),
    }
}

/// Takes in what comes ahead of a job.
///
/// # Errors
/// If it does not come whole, or cannot be kept.
pub(super) fn receive(queue: &Queue, key: &str, body: &mut dyn Read) -> io::Result<()> {
    let place = place_of(&queue.lock().data.join("incoming").join(key));
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place)?;
    let taken = bundle::unpack(body, &place, None).and_then(|()| files::sync_tree(&place));
    taken.inspect_err(|_| {
        let _ = fs::remove_dir_all(&place);
    })
}

/// Where that is of a job that comes to `place`.
pub(super) fn place_of(place: &Path) -> PathBuf {
    place.with_extension("ahead")
}

/// Moves the checkpoints that came ahead to where the rest of the job is.
///
/// # Errors
/// If they are not there, or one came again.
pub(super) fn join(there: &Path, place: &Path) -> io::Result<()> {
    for entry in fs::read_dir(there)? {
        let entry = entry?;
        fs::rename(entry.path(), place.join(entry.file_name()))?;
    }
    Ok(())
}

/// Whether a job can come under that key, which names a directory.
pub(super) fn is_key(key: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    !key.is_empty() && key.len() < 100 && key.chars().all(plain)
}

/// Removes what has come ahead of a job that does not come, or has come.
pub(super) fn forget(queue: &Arc<Queue>, key: &str) {
    if is_key(key) {
        let place = queue.lock().data.join("incoming").join(key);
        let _ = fs::remove_dir_all(place_of(&place));
    }
}
