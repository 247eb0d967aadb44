//! Checkpoints in the object store: when they go there, when they come back, what they take.
//!
//! A checkpoint goes there after it is on this machine's disk, on a thread of its own, one after
//! the other. So nobody waits for the store, and what fails there is tried again later. A job
//! whose checkpoint is nowhere else gets it back before it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use torpor_blobs::error::{Context, Error, Result};

use super::core::{Core, Queue};
use super::import::Alone;
use super::record::{Place, Record, Stored};
use super::transfer::Handover;
use super::{disk, import, lease, threads};
use crate::files::{self, JobDir};
use crate::objects::{Objects, Parts, Pieces};
use crate::scheduler::{JobId, Millis, share};
use crate::shepherd::digests::{self, Which};

/// What failed is tried again after so long; after each further failure twice as long.
const FIRST_PAUSE: Millis = 500;
/// No pause is longer.
const LONGEST_PAUSE: Millis = 60_000;

/// What is to be done in the object store.
#[derive(Debug, Clone)]
enum StoreTask {
    Put(Box<Put>),
    Remove { id: JobId, name: String },
    Collect,
}

/// A checkpoint that is to be stored.
#[derive(Debug, Clone)]
struct Put {
    name: String,
    record: Record,
    dir: JobDir,
    seq: u64,
    recipient: Option<String>,
}

/// What came of it.
enum StoreEnd {
    Put {
        pieces: Pieces,
        new: u64,
    },
    /// Another daemon goes on with the job.
    Adopted,
    Other,
}

impl Core {
    /// The object store, if there is one.
    pub(super) fn place(&self) -> Option<Objects> {
        self.config.store.as_deref().and_then(|place| Objects::at(place).ok())
    }

    /// Under which name a job's checkpoint is stored.
    fn stored_as(&self, id: JobId) -> String {
        format!("{}-{id}", self.name)
    }

    /// Reads what is known of the objects of jobs.
    pub(super) fn read_pieces(&mut self) {
        let stored = self.jobs.values().filter(|job| job.stored.is_some()).map(|job| job.id);
        for id in stored.collect::<Vec<_>>() {
            // What is lost is known again after the next checkpoint, or when it is fetched.
            let text = fs::read(self.dir(id).pieces()).unwrap_or_default();
            if let Ok(pieces) = serde_json::from_slice(&text) {
                self.depot.pieces.insert(id, pieces);
            }
        }
        self.count_stored();
    }

    /// Counts what the checkpoints of jobs take in the store: what several share counts once.
    pub(super) fn count_stored(&mut self) {
        let jobs = &self.jobs;
        let kept = |id: &JobId| jobs.get(id).is_some_and(|job| job.stored.is_some());
        self.depot.pieces.retain(|id, _| kept(id));
        let (mut all, mut by_name) = (BTreeMap::new(), BTreeMap::<String, BTreeMap<_, _>>::new());
        for (id, pieces) in &self.depot.pieces {
            let pieces = pieces.iter().map(|(digest, size)| (digest.as_str(), *size));
            all.extend(pieces.clone());
            let Some(job) = jobs.get(id) else { continue };
            for name in share::names(&job.spec.owner, &job.spec.project) {
                by_name.entry(name).or_default().extend(pieces.clone());
            }
        }
        let sums = by_name.into_iter().map(|(name, pieces)| (name, pieces.values().sum()));
        (self.depot.bytes, self.depot.by_name) = (all.values().sum(), sums.collect());
    }

    /// Does the next thing that is due in the store.
    pub(super) fn tend_store(&mut self, now: Millis) {
        if self.depot.busy || now < self.depot.again.0 {
            return;
        }
        let (Some(place), Some(queue)) = (self.place(), self.queue.upgrade()) else { return };
        let Some(task) = self.next_task(now) else { return };
        if let StoreTask::Put(put) = &task {
            let id = put.record.id;
            self.depot.storing = Some((id, put.seq));
            if let Some(record) = self.jobs.get_mut(&id).filter(|record| !record.named) {
                // It is known before anything is there, so that it is removed whatever happens.
                record.named = true;
                self.save(id, None);
            }
        }
        self.depot.busy = true;
        threads::run(move || {
            let done = task.carry_out(&place).map_err(|e| e.to_string());
            queue.change(|core| core.store_done(task, done));
        });
    }

    fn next_task(&mut self, now: Millis) -> Option<StoreTask> {
        let unwanted = |job: &&Record| job.named && job.stored.is_none() && job.durable.is_none();
        let is_over = |job: &&Record| matches!(job.place, Place::Ended | Place::Away);
        let gone = |job: &&Record| unwanted(job) || job.named && is_over(job);
        if let Some(job) = self.jobs.values().find(gone) {
            return Some(StoreTask::Remove { id: job.id, name: self.stored_as(job.id) });
        }
        let due = self.jobs.values().filter(|job| !is_over(job)).find(|job| {
            let newer = job.durable > job.stored.map(|stored| stored.seq);
            newer && !job.only_stored && !job.cancelled
        });
        if let Some(record) = due.cloned() {
            let (id, seq) = (record.id, record.durable?);
            let (name, dir, recipient) =
                (self.stored_as(id), self.dir(id), self.style(id).recipient);
            return Some(StoreTask::Put(Box::new(Put { name, record, dir, seq, recipient })));
        }
        let (is_garbage, since) = self.depot.garbage;
        if is_garbage && now - since >= self.config.shortest_interval {
            self.depot.garbage = (false, now);
            return Some(StoreTask::Collect);
        }
        None
    }

    fn store_done(&mut self, task: StoreTask, done: Result<StoreEnd, String>) {
        let now = files::now();
        (self.depot.busy, self.depot.storing) = (false, None);
        self.depot.trouble = done.as_ref().err().cloned();
        let pause = match &done {
            Ok(_) => 0,
            Err(_) => (self.depot.again.1 * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
        };
        self.depot.again = (now + pause, pause);
        match (task, done) {
            (StoreTask::Put(put), done) => self.put_done(&put, done),
            (StoreTask::Remove { id, .. }, Ok(_)) => {
                if let Some(record) = self.jobs.get_mut(&id) {
                    record.named = false;
                    self.depot.garbage.0 = true;
                    self.save(id, None);
                }
            }
            (StoreTask::Remove { .. }, Err(_)) | (StoreTask::Collect, Ok(_)) => {}
            (StoreTask::Collect, Err(_)) => self.depot.garbage.0 = true,
        }
    }

    fn put_done(&mut self, put: &Put, done: Result<StoreEnd, String>) {
        let (id, seq) = (put.record.id, put.seq);
        if matches!(done, Ok(StoreEnd::Adopted)) {
            return self.give_up(id);
        }
        let Some(record) = self.jobs.get_mut(&id) else { return };
        // An attempt that has failed meanwhile does not count any more, nor what was saved of it.
        let counts = !matches!(record.place, Place::Ended | Place::Away)
            && record.failures == put.record.failures
            && record.durable.is_some_and(|durable| durable >= seq);
        let event = match done {
            Ok(StoreEnd::Put { pieces, new }) if counts => {
                record.stored = Some(Stored { seq, saved: put.record.saved });
                let bytes: u64 = pieces.values().sum();
                self.depot.pieces.insert(id, pieces);
                ("stored", json!({ "seq": seq, "bytes": bytes, "new": new }))
            }
            Err(why) if counts => ("not-stored", json!({ "seq": seq, "why": why })),
            _ => return,
        };
        self.depot.garbage.0 |= event.0 == "stored";
        self.count_stored();
        // What it was made from was kept for it.
        if let Some(durable) = self.jobs.get(&id).and_then(|record| record.durable) {
            let gone = disk::keep_only(&self.dir(id), durable);
            self.clear(gone);
        }
        self.save(id, Some(event));
    }

    /// The oldest checkpoint of a job that must stay on disk, if its newest is `newest`.
    pub(super) fn oldest_needed(&self, id: JobId, newest: u64) -> u64 {
        match self.depot.storing {
            Some((job, seq)) if job == id => seq.min(newest),
            _ => newest,
        }
    }

    /// Whether the checkpoint of a job is in the store, so that none is needed on disk.
    pub(super) fn is_stored(&self, record: &Record) -> bool {
        record.durable.is_some() && record.durable == record.stored.map(|stored| stored.seq)
    }

    /// Whether the files of a job are being stored.
    pub(super) fn is_storing(&self, id: JobId) -> bool {
        self.depot.storing.is_some_and(|(job, _)| job == id)
    }

    /// Whether a job's checkpoint has to come from the store.
    pub(super) fn must_fetch(&self, id: JobId) -> bool {
        let Some(record) = self.jobs.get(&id) else { return false };
        self.is_stored(record) && disk::newest(&self.dir(id)) < record.durable
    }

    /// Why a job waits for the store, if it does.
    pub(super) fn waits_for_store(&self, id: JobId) -> Option<String> {
        match self.depot.fetches.get(&id)? {
            None => Some("its checkpoint comes from the object store".to_owned()),
            Some((until, why)) => (files::now() < *until)
                .then(|| format!("its checkpoint cannot be had from the object store: {why}")),
        }
    }

    /// Brings the checkpoint of a job to this machine's disk.
    pub(super) fn fetch(&mut self, id: JobId) {
        if self.waits_for_store(id).is_some() {
            return;
        }
        let (Some(place), Some(queue)) = (self.place(), self.queue.upgrade()) else {
            let why = "this daemon was started without it".to_owned();
            self.depot.fetches.insert(id, Some((files::now() + LONGEST_PAUSE, why)));
            return;
        };
        self.depot.fetches.insert(id, None);
        let name = self.stored_as(id);
        let to = self.data.join("incoming").join(&name);
        let identity = self.style(id).identity;
        self.save(id, Some(("fetching", json!({}))));
        threads::run(move || {
            let came = place.get(&name, |_| identity, |job, files| import::unpack(job, files, &to));
            let came = came.map(|(_, pieces)| (pieces, disk::bytes(&JobDir::at(to.clone()))));
            let came = came.map_err(|e| e.to_string());
            queue.change(|core| core.fetched(id, &to, came));
        });
    }

    /// A checkpoint has come to `from`, which takes so many bytes; or has not.
    fn fetched(&mut self, id: JobId, from: &Path, came: Result<(Pieces, u64), String>) {
        self.depot.fetches.remove(&id);
        let dir = self.dir(id);
        let Some(record) = self.jobs.get(&id).filter(|job| job.place != Place::Ended) else {
            // It may be much, and nobody waits for it. What cannot be removed now is removed when the name is used again.
            let from = from.to_owned();
            return threads::run(move || drop(files::remove_trees(&[from])));
        };
        let seq = record.durable;
        let came = came.and_then(|came| {
            disk::put_back(from, &dir).map_err(|e| format!("put its files in place: {e}"))?;
            match disk::newest(&dir) >= seq {
                true => Ok(came),
                false => Err("it is another one than it should be".to_owned()),
            }
        });
        match came {
            Ok((pieces, bytes)) => {
                if let Some(record) = self.jobs.get_mut(&id) {
                    (record.only_stored, record.image_bytes) = (false, bytes);
                }
                self.depot.pieces.insert(id, pieces);
                self.depot.brought.insert(id);
                self.count_stored();
                self.save(id, Some(("fetched", json!({ "bytes": bytes }))));
            }
            Err(why) => {
                let until = files::now() + FIRST_PAUSE * 10;
                self.depot.fetches.insert(id, Some((until, why.clone())));
                self.save(id, Some(("not-fetched", json!({ "why": why }))));
            }
        }
    }

    /// The checkpoints in the store that are of no job here.
    fn strange_names(&self, all: Vec<(String, String)>) -> Vec<(String, String)> {
        let own: BTreeSet<String> = self.jobs.keys().map(|id| self.stored_as(*id)).collect();
        // A name becomes that of a directory.
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let strange =
            |name: &str| !own.contains(name) && name.len() < 100 && name.chars().all(plain);
        all.into_iter().filter(|(name, _)| strange(name)).collect()
    }
}

impl StoreTask {
    fn carry_out(&self, place: &Objects) -> Result<StoreEnd> {
        match self {
            StoreTask::Put(put) => put.carry_out(place),
            StoreTask::Remove { name, .. } => place.remove(name).map(|_| StoreEnd::Other),
            StoreTask::Collect => place.collect().map(|_| StoreEnd::Other),
        }
    }
}

impl Put {
    fn carry_out(&self, place: &Objects) -> Result<StoreEnd> {
        if place.sign(&self.name)?.is_some() {
            return Ok(StoreEnd::Adopted);
        }
        let whole = digests::verify(&self.dir, self.seq, Which::All);
        whole.map_err(|damage| Error::new(damage.text))?;
        let handover = Handover { record: self.record.clone(), ahead: false };
        let job = serde_json::to_vec(&handover).context(|| "the description of the job")?;
        let files =
            disk::bundle(&self.dir, Some(self.seq), None).context(|| "the files of the job")?;
        let (class, recipient) = (self.record.spec.class.as_str(), self.recipient.as_deref());
        let parts = Parts { class, recipient, job: &job, files: &files };
        let (pieces, new) = place.put(&self.name, &parts)?;
        let noted = files::write_stable(&self.dir.pieces(), &pieces);
        noted.context(|| "note what is stored")?;
        Ok(StoreEnd::Put { pieces, new })
    }
}

fn place_of(queue: &Queue) -> Result<Objects, String> {
    queue.lock().place().ok_or_else(|| "this daemon has no object store (serve --store)".to_owned())
}

/// The checkpoints of other daemons in the store.
///
/// # Errors
/// If this daemon has no store, or the store does not answer.
pub(super) fn others(queue: &Queue) -> Result<Value, String> {
    let all = place_of(queue)?.names().map_err(|e| e.to_string())?;
    let found = queue.lock().strange_names(all);
    let shown = found.iter().map(|(name, class)| json!({ "name": name, "class": class }));
    Ok(shown.collect())
}

/// Lets a job go on here whose daemon is gone for good, which is made sure of first unless `force`
/// says that it does not matter. Of several who do that at the same time one gets it: the one that
/// takes its name away.
///
/// # Errors
/// If the store has no such checkpoint of another daemon, or does not answer; if that daemon lives; if the checkpoint cannot
/// be read, or not be kept here; if somebody else has taken it meanwhile.
pub(super) fn adopt(queue: &Arc<Queue>, name: &str, force: bool) -> Result<JobId, String> {
    let place = place_of(queue)?;
    let known = place.names().map_err(|e| e.to_string())?;
    let known = queue.lock().strange_names(known);
    if !known.iter().any(|(other, _)| other == name) {
        return Err(format!("there is no checkpoint {name} of another daemon"));
    }
    let (daemon, _) = name.rsplit_once('-').unwrap_or((name, ""));
    if !force {
        lease::wait_until_gone(&place, daemon)?;
    }
    let _alone = Alone::wait(queue, name);
    let to = queue.lock().data.join("incoming").join(name);
    let identity = |class: &str| -> Option<PathBuf> { queue.lock().style_of(class).identity };
    let taken = place.get(name, identity, |job, files| import::unpack(job, files, &to));
    let (Handover { record, .. }, _) = taken.map_err(|e| e.to_string())?;
    // Where it was before there is nobody to take it back.
    let record = Record { returns: false, ..record };
    let id = import::adopt(queue, name, record, &to).map_err(|e| e.to_string())?;
    // Should its daemon live all the same, or come back, it learns that before its name is gone.
    let own = queue.lock().name.clone();
    match place.set_sign(name, Some(own.as_bytes())).and_then(|()| place.remove(name)) {
        Ok(true) => {
            queue.change(|core| core.set_held(id, false));
            Ok(id)
        }
        Ok(false) => Err(format!(
            "somebody else has taken {name}: here it is job {id}, which waits; cancel it, or resume \
             it if it runs nowhere else"
        )),
        Err(e) => Err(format!("take {name} away: {e}; job {id} waits until it is resumed")),
    }
}
