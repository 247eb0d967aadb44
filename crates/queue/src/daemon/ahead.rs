//! What of a job is sent to another machine while it still runs here.
//!
//! It is saved and goes on; that checkpoint is sent. What it has changed meanwhile is saved and sent in the same way, as
//! long as that becomes less. Then the job gives way by a checkpoint that builds on those, so that what is sent while it
//! stands still is what it has changed last. If any of this fails the job goes with what is there.
//!
//! The machine that it goes to compares what has come ahead with its digests as soon as it is there: to read gigabytes
//! again when the rest has come would take as long as the job stands still for all other reasons together.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::core::{Core, Queue};
use super::record::{AheadStep, Destination, Place};
use super::transfer::can_go_on;
use super::{disk, threads};
use crate::bundle;
use crate::files::{self, JobDir};
use crate::preemption::{self, Means};
use crate::scheduler::JobId;
use crate::shepherd::digests;

/// How often a job is saved and sent before it stands still, at most.
const MOST: usize = 5;

/// So few bytes are sent in no time.
const FEW: u64 = 4 << 20;

/// Whether to send what a job has changed while the last of these numbers of bytes was sent, before it stands still: not
/// if it changes its memory about as fast as that is sent.
fn is_worth_it(sent: &[u64]) -> bool {
    let shrinks = match sent {
        [.., before, last] => last.saturating_mul(2) <= *before,
        _ => true,
    };
    shrinks && sent.len() < MOST && sent.last().is_some_and(|&last| last > FEW)
}

impl Core {
    /// Does the next step for a job that runs.
    pub(super) fn send_ahead(&mut self, id: JobId) {
        if self.saving.contains(&id) {
            return;
        }
        let Some(record) = self.jobs.get(&id) else { return };
        let durable = record.durable;
        let failed = self.not_before.get(&id).is_some_and(|&until| files::now() < until);
        match self.ahead.get(&id).map(|ahead| ahead.step) {
            Some(AheadStep::Sending) => {}
            Some(AheadStep::Saving(seq)) if durable >= Some(seq) => self.send_checkpoint(id),
            // On its way to the disk.
            Some(AheadStep::Saving(seq)) if record.kept.iter().any(|kept| kept.seq == seq) => {}
            Some(AheadStep::Due) if !failed => self.save_ahead(id),
            None if !failed => {
                // What a daemon before this one has sent counts for nothing.
                self.has_sent(id, None);
                self.save_ahead(id);
            }
            _ => self.leave(id),
        }
    }

    /// Saves a job that runs on.
    fn save_ahead(&mut self, id: JobId) {
        let Some(record) = self.jobs.get(&id) else { return };
        self.ahead.entry(id).or_default().step = AheadStep::Saving(record.next_checkpoint);
        let memory = crate::shepherd::cgroups(&self.dir(id)).memory().unwrap_or(0);
        let memory = self.to_save(id, memory, files::now());
        self.saving.insert(id);
        let order = self.checkpoint(id, true, preemption::rounds(memory));
        self.order(id, &order);
    }

    fn send_checkpoint(&mut self, id: JobId) {
        let Some(queue) = self.queue.upgrade() else { return };
        let Some(record) = self.jobs.get(&id) else { return };
        let (Some(seq), Some(destination)) = (record.durable, record.destination.clone()) else {
            return;
        };
        if let Some(ahead) = self.ahead.get_mut(&id) {
            ahead.step = AheadStep::Sending;
        }
        threads::run(move || {
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
        let still = |there: &Destination| there.key == destination.key && there.job.is_none();
        let record = self.jobs.get(&id).filter(|record| record.place == Place::Running);
        if record.and_then(|record| record.destination.as_ref()).is_none_or(|there| !still(there)) {
            // It has ended, gone, or is to stay.
            return self.forget_there(destination);
        }
        let mut ahead = self.ahead.remove(&id).unwrap_or_default();
        match sent {
            Ok(bytes) => {
                ahead.sent.push(bytes);
                self.has_sent(id, Some(seq));
                if is_worth_it(&ahead.sent) {
                    ahead.step = AheadStep::Due;
                    self.ahead.insert(id, ahead);
                    // It may be being saved for another reason: then as soon as that is done.
                    return self.send_ahead(id);
                }
                let (bytes, times) = (ahead.sent.iter().sum::<u64>(), ahead.sent.len());
                let event = json!({ "seq": seq, "bytes": bytes, "times": times });
                self.save(id, Some(("sent-ahead", event)));
            }
            Err(why) => self.save(id, Some(("not-sent-ahead", json!({ "why": why })))),
        }
        self.leave(id);
    }

    /// Notes up to which checkpoint a job was sent ahead.
    fn has_sent(&mut self, id: JobId, seq: Option<u64>) {
        if let Some(there) = self.jobs.get_mut(&id).and_then(|record| record.destination.as_mut()) {
            there.ahead = seq;
        }
    }

    /// The job gives way now, and goes.
    fn leave(&mut self, id: JobId) {
        self.ahead.remove(&id);
        if let Some(there) = self.jobs.get_mut(&id).and_then(|record| record.destination.as_mut()) {
            there.live = false;
        }
        if let Err(why) = self.preempt(id, Some(Means::Checkpoint)) {
            self.stay(id, &why);
        }
    }

    /// A job does not go, or is over: what was sent of it is needed no more.
    pub(super) fn drop_ahead(&mut self, id: JobId) {
        self.ahead.remove(&id);
        let there = self.jobs.get(&id).and_then(|record| record.destination.clone());
        if let Some(there) = there.filter(|there| there.ahead.is_some() && there.job.is_none()) {
            self.forget_there(&there);
        }
    }

    fn forget_there(&self, destination: &Destination) {
        let Ok(client) = self.peer(&destination.machine) else { return };
        let path = format!("/v1/import/{}?ahead=1", destination.key);
        // What a machine that is away keeps of it goes when that is started anew.
        threads::run(move || drop(client.json("DELETE", &path, b"")));
    }
}

/// Sends a checkpoint; returns how many bytes that were.
fn send(queue: &Queue, id: JobId, seq: u64, destination: &Destination) -> Result<u64, String> {
    let (client, dir) = {
        let core = queue.lock();
        (core.peer(&destination.machine)?, core.dir(id))
    };
    can_go_on(&client.json("GET", "/v1/machine", b"")?)?;
    let bundle = disk::bundle_ahead(&dir, seq, destination.ahead).map_err(|e| e.to_string())?;
    let what = if destination.ahead.is_some() { "more" } else { "ahead" };
    let (path, length) = (format!("/v1/import?key={}&{what}=1", destination.key), bundle.length());
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
/// If it does not come whole, is not what was saved, or cannot be kept.
pub(super) fn receive(queue: &Arc<Queue>, key: &str, body: &mut dyn Read) -> io::Result<()> {
    forget(queue, key);
    let place = place_of(&incoming(queue, key));
    fs::create_dir_all(&place)?;
    let taken = bundle::unpack(body, &place, None);
    keep(queue, key, &place, taken, None)
}

/// Takes in what comes ahead of a job of which something has come before.
///
/// # Errors
/// If nothing has, or as [`receive`].
pub(super) fn receive_more(queue: &Arc<Queue>, key: &str, body: &mut dyn Read) -> io::Result<()> {
    let compared = queue.lock().compared.coming.remove(key);
    let place = place_of(&incoming(queue, key));
    let more = place.with_extension("more");
    let _ = files::remove_trees(&[&more]);
    fs::create_dir_all(&more)?;
    let taken = bundle::unpack(body, &more, Some(&place)).and_then(|()| join(&more, &place));
    let _ = files::remove_trees(&[&more]);
    keep(queue, key, &place, taken, compared)
}

/// Keeps what was taken in as a whole, and is what was saved, and nothing else. Up to `compared` it was compared before.
fn keep(
    queue: &Arc<Queue>,
    key: &str,
    place: &Path,
    taken: io::Result<()>,
    compared: Option<u64>,
) -> io::Result<()> {
    let dir = JobDir::at(place.to_owned());
    let compare = || digests::verify_ahead(&dir, compared).map_err(|damage| damage.text);
    let whole = taken
        .and_then(|()| files::sync_tree(place))
        .and_then(|()| compare().map_err(io::Error::other));
    let newest = whole.inspect_err(|_| {
        forget(queue, key);
    })?;
    queue.lock().compared.coming.extend(newest.map(|seq| (key.to_owned(), seq)));
    Ok(())
}

/// Where a job comes to.
fn incoming(queue: &Queue, key: &str) -> PathBuf {
    queue.lock().data.join("incoming").join(key)
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

/// Removes what has come ahead of a job that does not come, or has come; returns up to which checkpoint it was compared.
pub(super) fn forget(queue: &Arc<Queue>, key: &str) -> Option<u64> {
    if !is_key(key) {
        return None;
    }
    let compared = queue.lock().compared.coming.remove(key);
    let _ = files::remove_trees(&[place_of(&incoming(queue, key))]);
    compared
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::shepherd::checkpoint::CheckpointRecord;
    use crate::shepherd::message::Order;
    use crate::spec::Spec;

    /// A checkpoint whose memory holds `pages`; its digests are those of "pages".
    fn saved(dir: &JobDir, seq: u64, base: Option<u64>, pages: &str) {
        let place = dir.checkpoint(seq);
        fs::create_dir_all(place.join("round-1")).unwrap();
        let record =
            serde_json::to_vec(&CheckpointRecord { seq, base, ..CheckpointRecord::default() })
                .unwrap();
        fs::write(place.join("record.json"), record).unwrap();
        fs::write(place.join("round-1/pages-1.img"), "pages").unwrap();
        digests::take(dir, seq).unwrap();
        fs::write(place.join("round-1/pages-1.img"), pages).unwrap();
    }

    fn sent(dir: &JobDir, seq: u64, ahead: Option<u64>) -> Vec<u8> {
        let mut sent = Vec::new();
        disk::bundle_ahead(dir, seq, ahead).unwrap().write(&mut sent).unwrap();
        sent
    }

    fn daemon() -> (tempfile::TempDir, Arc<Queue>) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        (dir, Queue::new(core))
    }

    #[test]
    fn what_comes_ahead_is_what_was_saved_or_of_no_use() {
        let (dir, queue) = daemon();
        let come = |key: &str, pages: &str| {
            let from = JobDir::at(dir.path().join(key));
            saved(&from, 3, None, pages);
            receive(&queue, key, &mut &sent(&from, 3, None)[..])
        };
        come("whole", "pages").unwrap();
        let why = come("damaged", "other").unwrap_err().to_string();
        assert!(why.contains("round-1/pages-1.img is not what was saved"), "{why}");
        assert_eq!(["whole", "damaged"].map(|key| forget(&queue, key)), [Some(3), None]);
        assert_eq!(forget(&queue, "whole"), None, "it is gone");
        queue.lock().compared.has_come(7, Some(3));
        assert_eq!([(); 2].map(|()| queue.lock().compared.take(7)), [Some(3), None]);
    }

    #[test]
    fn more_comes_where_something_has_come_before() {
        let (dir, queue) = daemon();
        let from = JobDir::at(dir.path().join("from"));
        saved(&from, 1, None, "pages");
        saved(&from, 2, Some(1), "pages");
        saved(&from, 4, Some(2), "other");
        let there = || {
            let place = place_of(&incoming(&queue, "key"));
            crate::shepherd::checkpoint::numbers(&JobDir::at(place))
        };
        let more = |seq, ahead| receive_more(&queue, "key", &mut &sent(&from, seq, ahead)[..]);
        more(2, Some(1)).unwrap_err();
        receive(&queue, "key", &mut &sent(&from, 1, None)[..]).unwrap();
        more(2, Some(1)).unwrap();
        assert_eq!((there(), queue.lock().compared.coming["key"]), (vec![1, 2], 2));
        // Of what is damaged nothing is kept, nor of what it builds on.
        let why = more(4, Some(2)).unwrap_err().to_string();
        assert!(why.contains("checkpoint 4 is damaged"), "{why}");
        assert_eq!((there(), forget(&queue, "key")), (vec![], None));
        assert_eq!(fs::read_dir(dir.path().join("incoming")).unwrap().count(), 0);
    }

    /// Or all of it would have to be sent again as soon as it builds on as many as it may.
    #[test]
    fn what_was_sent_is_built_on_however_many_that_builds_on() {
        let (_dir, queue) = daemon();
        let mut core = queue.lock();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let is_deep = |core: &mut Core| match core.checkpoint(id, true, 0) {
            Order::Checkpoint { deep, .. } => deep,
            other => panic!("{other:?}"),
        };
        assert!(!is_deep(&mut core));
        for (ahead, deep) in [(None, false), (Some(3), true)] {
            let (machine, key) = ("b".to_owned(), "key".to_owned());
            let there = Destination { machine, key, job: None, live: true, ahead };
            core.jobs.get_mut(&id).unwrap().destination = Some(there);
            assert_eq!(is_deep(&mut core), deep, "{ahead:?}");
        }
    }

    #[test]
    fn it_is_sent_again_as_long_as_it_becomes_less() {
        const MIB: u64 = 1 << 20;
        assert!(is_worth_it(&[1400 * MIB]) && is_worth_it(&[1400 * MIB, 90 * MIB]));
        assert!(!is_worth_it(&[1400 * MIB, 800 * MIB]), "it changes as fast as it is sent");
        assert!(
            !is_worth_it(&[1400 * MIB, 3 * MIB]) && !is_worth_it(&[3 * MIB]),
            "that is soon done"
        );
        assert!(!is_worth_it(&[1600 * MIB, 800 * MIB, 400 * MIB, 200 * MIB, 100 * MIB]));
    }
}
