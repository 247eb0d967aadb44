//! The daemon's state, and what changes it. All of it is behind one lock; what a change
//! means for others is decided by [`crate::scheduler::decide`] right after it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use serde_json::{Value, json};
use torpor_worker::tell;

use super::compared::Compared;
use super::config::Config;
use super::depot::Depot;
use super::disk::{self, Gone};
use super::kept::{Refused, Totals, WITHDRAWN, Withdrawal, kept_with};
use super::peaks::Peaks;
use super::record::{Ahead, Place, Preparation, Record, cut};
use super::stall::Stall;
use super::store::{Along, FAILURES, FORGOTTEN, SPEED, Store, StoreError, USAGE};
use super::threads;
use super::turns::Turns;
use crate::files::{self, JobDir};
use crate::kind::Group;
use crate::preemption::{Dirt, Failures, Speed};
use crate::scheduler::share::Usage;
use crate::scheduler::{JobId, Millis, Reason};
use crate::shepherd;
use crate::shepherd::message::{self, Exit, LOST, Order};
use crate::shepherd::pump;
use crate::spec::{LONGEST_NAME, Spec};

/// A daemon: its state, and a bell that rings when it has changed.
#[derive(Debug)]
pub(super) struct Queue {
    core: Mutex<Core>,
    changed: Condvar,
    /// Whose turn it is to ask.
    pub(super) turns: Turns,
}

impl Queue {
    /// A daemon with this state.
    #[must_use]
    pub(super) fn new(core: Core) -> Arc<Self> {
        let (core, changed, turns) = (Mutex::new(core), Condvar::new(), Turns::default());
        let queue = Arc::new(Self { core, changed, turns });
        queue.lock().queue = Arc::downgrade(&queue);
        queue
    }

    /// The state.
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        // A panic of one request must not take the daemon away from all jobs; each change
        // is one transaction.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, decides what that means, and tells everyone who waits.
    pub(super) fn change<T>(&self, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        let result = work(&mut core);
        core.schedule();
        drop(core);
        self.changed.notify_all();
        result
    }

    /// Waits until something changes, or for so long.
    pub(super) fn wait(&self, most: std::time::Duration) {
        let core = self.lock();
        drop(self.changed.wait_timeout(core, most));
    }
}

/// The daemon's state.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) queue: Weak<Queue>,
    /// Where everything lies.
    pub data: PathBuf,
    /// What the daemon was told.
    pub config: Config,
    /// The state on disk.
    pub store: Store,
    /// All jobs, also those that are over and not forgotten yet.
    pub jobs: BTreeMap<JobId, Record>,
    /// The sockets of the shepherds.
    pub(super) links: BTreeMap<JobId, UnixStream>,
    /// How fast jobs are saved and brought back here.
    pub speed: Speed,
    /// How often jobs are lost.
    pub failures: Failures,
    /// What projects and owners have used.
    pub usage: Usage,
    /// What jobs have been seen to hold of memory.
    pub(super) peaks: Peaks,
    /// Why jobs of some kinds cannot be saved.
    pub(super) refusals: BTreeMap<Group, Refused>,
    /// Why jobs wait.
    pub reasons: BTreeMap<JobId, Reason>,
    /// Whether the machine is being drained.
    pub draining: bool,
    /// When to decide again.
    pub again: Option<Millis>,
    /// What the jobs have cost that were forgotten.
    pub(super) forgotten: Totals,
    /// Where jobs were, and since when, whose shepherds this daemon has not met yet.
    unmet: BTreeMap<JobId, (Place, Millis)>,
    /// Jobs that are being saved while they run.
    pub(super) saving: BTreeSet<JobId>,
    /// How many removals go on of what was taken away.
    pub(super) clearing: usize,
    /// Jobs that will have to give way once others have ended.
    pub(super) expected: BTreeSet<JobId>,
    /// How far jobs are prepared to which others give way.
    pub(super) preparations: BTreeMap<JobId, Preparation>,
    /// When a job was last saved, or when that was tried.
    pub(super) last_save: BTreeMap<JobId, Millis>,
    /// How fast jobs change the memory of their last checkpoint.
    pub(super) dirt: BTreeMap<JobId, Dirt>,
    /// Until when a job is not asked to give way in the way that has failed.
    pub(super) not_before: BTreeMap<JobId, Millis>,
    /// Clients that are a job, by their number; and since when there is none.
    pub(super) followers: BTreeMap<JobId, (u32, Millis)>,
    /// Jobs that are on their way to another machine, or followed there.
    pub(super) transfers: BTreeSet<JobId>,
    /// Jobs whose machine somebody tells something.
    pub(super) telling: BTreeSet<JobId>,
    /// What other machines are to give up again.
    pub(super) withdrawals: Vec<Withdrawal>,
    /// Whether somebody tells them.
    pub(super) withdrawing: bool,
    /// The keys of jobs that are being taken in.
    pub(super) coming: BTreeSet<String>,
    /// The keys of jobs that are not to come any more.
    pub(super) unwanted: BTreeSet<String>,
    /// How far those are of which something is sent ahead while they run.
    pub(super) ahead: BTreeMap<JobId, Ahead>,
    /// What has come ahead of jobs of other machines, and was compared.
    pub(super) compared: Compared,
    /// What is in the object store.
    pub depot: Depot,
    /// What names this daemon to others: nobody else's jobs have keys that begin with it.
    pub(super) name: String,
    /// How other machines of the pool are spoken to.
    pub pool: Option<Arc<rustls::ClientConfig>>,
    /// Jobs that were told to end, and when.
    pub(super) ending: BTreeMap<JobId, Millis>,
    /// The signal that would end it which a job that runs got last, and when.
    pub(super) signalled: BTreeMap<JobId, (i32, Millis)>,
    /// What is going wrong with the state on disk, so that it can be shown.
    pub trouble: Option<String>,
    /// Jobs that are not on disk as they are here: that could not be written.
    unkept: BTreeSet<JobId>,
    /// Whether more was used than is on disk.
    unkept_usage: bool,
    /// Why this machine can begin no run.
    pub(super) stall: Option<Stall>,
}

impl Core {
    /// The state in a data directory.
    ///
    /// # Errors
    /// If the database cannot be opened or is damaged.
    pub(super) fn open(data: PathBuf, mut config: Config) -> Result<Self, StoreError> {
        let store = Store::open(&data.join("queue.db"))?;
        // What had not come to its end comes again.
        let incoming = data.join("incoming");
        let _ = files::remove_trees(&[&incoming]);
        // One that cannot be made now is made when something comes.
        let _ = std::fs::DirBuilder::new().mode(0o700).create(incoming);
        // Those that were set while a daemon ran count more than those of its file.
        config.rules.quotas.extend(store.fact::<BTreeMap<_, _>>("quotas")?.unwrap_or_default());
        let jobs: BTreeMap<JobId, Record> =
            store.jobs()?.into_iter().map(|record| (record.id, record)).collect();
        let speed = store.fact(SPEED)?.unwrap_or_default();
        let failures = store.fact(FAILURES)?.unwrap_or_default();
        let usage = store.fact(USAGE)?.unwrap_or_default();
        let draining = store.fact("draining")?.unwrap_or(false);
        let forgotten = store.fact(FORGOTTEN)?.unwrap_or_default();
        let withdrawals = store.fact(WITHDRAWN)?.unwrap_or_default();
        let name = match store.fact::<String>("name")? {
            Some(name) => name,
            None => {
                let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
                let name = uuid.unwrap_or_default().trim().to_owned();
                store.keep_fact("name", &name)?;
                name
            }
        };
        let peaks = Peaks::read(&store, &config)?;
        let refusals = store.refusals()?.into_iter();
        let refusals = refusals.filter(|(_, refused)| refused.still_counts()).collect();
        let mut core = Self {
            queue: Weak::new(),
            data,
            config,
            store,
            jobs,
            links: BTreeMap::new(),
            speed,
            failures,
            usage,
            peaks,
            refusals,
            reasons: BTreeMap::new(),
            draining,
            again: None,
            forgotten,
            unmet: BTreeMap::new(),
            saving: BTreeSet::new(),
            clearing: 0,
            expected: BTreeSet::new(),
            preparations: BTreeMap::new(),
            last_save: BTreeMap::new(),
            dirt: BTreeMap::new(),
            not_before: BTreeMap::new(),
            followers: BTreeMap::new(),
            transfers: BTreeSet::new(),
            telling: BTreeSet::new(),
            withdrawals,
            withdrawing: false,
            coming: BTreeSet::new(),
            unwanted: BTreeSet::new(),
            ahead: BTreeMap::new(),
            compared: Compared::default(),
            depot: Depot::default(),
            name,
            pool: None,
            ending: BTreeMap::new(),
            signalled: BTreeMap::new(),
            trouble: None,
            unkept: BTreeSet::new(),
            unkept_usage: false,
            stall: None,
        };
        core.begin_now();
        core.make_dirs_again();
        core.read_pieces();
        Ok(core)
    }

    /// What is to come, by times that were noted, is now: the clock was set back since. Nobody would give way, be due or be
    /// killed until then.
    fn begin_now(&mut self) {
        let now = files::now();
        for record in self.jobs.values_mut().filter(|record| record.since > now) {
            (record.since, record.guaranteed) = (now, None);
        }
    }

    /// Makes what a loss of power has taken of the directories of jobs that are not over.
    fn make_dirs_again(&self) {
        for record in self.jobs.values().filter(|job| job.place != Place::Ended) {
            let dir = self.dir(record.id);
            let is_there = shepherd::read_spec(&dir).is_ok_and(|spec| spec == record.spec);
            if !is_there && let Err(e) = make_dir(&dir, &record.spec) {
                tell!("torpor queue: make the directory of job {} again: {e}", record.id);
            }
        }
    }

    /// After a start of the daemon, jobs that may have a shepherd stay as they are until
    /// it is found, or found to be gone.
    pub(super) fn schedule_nothing_yet(&mut self, found_later: &[JobId]) {
        for &id in found_later {
            if let Some(record) = self.jobs.get_mut(&id)
                && !record.place.holds_slots()
            {
                self.unmet.insert(id, (record.place, record.since));
                record.shepherd = true;
                record.place = Place::Starting;
            }
        }
    }

    /// How a job is, is known now: it was where it was when the daemon before ended.
    pub(super) fn met(&mut self, id: JobId) {
        if let Some((place, since)) = self.unmet.remove(&id)
            && let Some(record) = self.jobs.get_mut(&id)
            && record.place == Place::Starting
        {
            (record.place, record.since) = (place, since);
        }
    }

    /// The directory of a job.
    #[must_use]
    pub(super) fn dir(&self, id: JobId) -> JobDir {
        JobDir::of(&self.data, id)
    }

    /// Takes a job in; it is on disk when this returns.
    ///
    /// # Errors
    /// If it makes no sense, or cannot be kept; a sentence.
    pub(super) fn submit(&mut self, mut spec: Spec, key: Option<&str>) -> Result<JobId, NotTaken> {
        let has_class = !spec.class.is_empty();
        if !has_class {
            spec.class.clone_from(&self.config.default_class);
        }
        spec.slots = spec.slots.max(1);
        // Each decision looks for all of them, as often as they are named.
        let mut first = BTreeSet::new();
        spec.after.retain(|&id| first.insert(id));
        (spec.limits.usual_pids, spec.limits.usual_disk) = (None, None);
        spec.check().map_err(NotTaken::Senseless)?;
        // It is kept with the job, and is none of what its owner's jobs may take.
        if key.is_some_and(|key| key.len() > LONGEST_NAME) {
            let text = format!("a key has {LONGEST_NAME} bytes at most");
            return Err(NotTaken::Senseless(text));
        }
        let key = key.map(|key| owners_key(&spec.owner, key));
        let key = key.as_deref();
        if let Some(key) = key
            && let Some((before, id)) = self.store.submitted_as(key).map_err(NotTaken::broken)?
        {
            // This daemon may have another default than the one that was asked first, and its version may write more.
            let before: Option<Spec> = serde_json::from_str(&before).ok();
            let is_it = before.is_some_and(|mut before| {
                if !has_class {
                    before.class.clone_from(&spec.class);
                }
                before == spec
            });
            return if is_it { Ok(id) } else { Err(NotTaken::KeyReused) };
        }
        if let Some(missing) = spec.after.iter().find(|id| !self.jobs.contains_key(id)) {
            return Err(NotTaken::no_first(*missing));
        }
        let body = serde_json::to_string(&spec).map_err(|e| NotTaken::Broken(e.to_string()))?;
        // What the daemon gives is no part of what was asked for, which a second request must repeat.
        spec.limits.usual_pids = self.config.pids;
        spec.limits.usual_disk = self.config.default_disk;
        // Each decision asks for it, and a command may be long.
        spec.kind = Some(spec.kind());
        let now = files::now();
        let new = Record::new(0, spec, now);
        self.has_place_for(&new)?;
        let make = |id| Record { id, ..new };
        let record = self.store.add(key.map(|key| (key, body.as_str())), now, make);
        let record = record.map_err(NotTaken::broken)?;
        let (id, dir) = (record.id, self.dir(record.id));
        let made = make_dir(&dir, &record.spec);
        let after = record.spec.after.clone();
        self.jobs.insert(id, record);
        if let Err(e) = made {
            self.abandon(id, format!("make the job's directory: {e}"));
        } else if let Some(failed) = after.into_iter().find(|&first| self.has_failed(first)) {
            self.end_dependent(id, failed);
        }
        Ok(id)
    }

    /// Whether this owner has submitted a job under a key.
    pub(super) fn is_submitted(&self, owner: &str, key: &str) -> bool {
        let found = self.store.submitted_as(&owners_key(owner, key));
        found.is_ok_and(|found| found.is_some())
    }

    /// Keeps a job as it is now; `event` says what has happened to it. One that cannot be kept is kept as
    /// soon as there is room ([`catch_up`](Self::catch_up)).
    pub(super) fn save(&mut self, id: JobId, event: Option<(&str, Value)>) {
        if let Err(e) = self.keep(id, event) {
            tell!("torpor queue: {e}");
            self.unkept.insert(id);
            self.trouble = Some(e.to_string());
        }
    }

    /// Keeps a job as it is now, and all that has changed with it, at once.
    fn keep(&mut self, id: JobId, event: Option<(&str, Value)>) -> Result<(), StoreError> {
        let Some(record) = self.jobs.get_mut(&id) else { return Ok(()) };
        let withdrawals = kept_with(&self.withdrawals, &[id]);
        let usage = self.unkept_usage.then_some(&self.usage);
        let along = Along { usage, withdrawals: withdrawals.as_deref() };
        self.store.save(record, files::now(), event, along)?;
        if withdrawals.is_some() {
            self.were_kept_with(&[id]);
        }
        self.unkept_usage = false;
        self.unkept.remove(&id);
        self.trouble = None;
        Ok(())
    }

    /// Does what somebody asks for: what is answered as done is on disk. Where nothing can be written nothing
    /// is begun.
    ///
    /// # Errors
    /// What `work` refuses; if the database cannot be written, before or after.
    pub(super) fn asked<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, Undone> {
        self.store.try_to_write(files::now()).map_err(Undone::unkept)?;
        let done = work(self).map_err(Undone::Refused)?;
        self.catch_up().map_err(Undone::unkept)?;
        Ok(done)
    }

    /// Keeps the jobs that could not be kept when something happened to them.
    ///
    /// # Errors
    /// If the database does not take one of them: the disk is still full.
    pub(super) fn catch_up(&mut self) -> Result<(), StoreError> {
        while let Some(&id) = self.unkept.first() {
            self.keep(id, None)?;
            // It may have been forgotten.
            self.unkept.remove(&id);
        }
        Ok(())
    }

    /// Whether a job is on disk as it is here.
    pub(super) fn is_kept(&self, id: JobId) -> bool {
        !self.unkept.contains(&id)
    }

    /// Moves a job to another place, counts the time that it has had, and keeps it.
    pub(super) fn go(&mut self, id: JobId, place: Place, event: &str, data: Value) {
        let now = files::now();
        let Some(record) = self.jobs.get_mut(&id) else { return };
        let before = record.ran;
        record.go(place, now);
        if matches!(place, Place::Running | Place::Ended) {
            self.depot.has_served(id);
        }
        let ran = self.jobs.get(&id).map_or(0, |record| record.ran - before);
        self.count_work(id, ran);
        self.save(id, Some((event, data)));
        self.pass_kept_signals(id);
    }

    /// Counts time that a job has had.
    pub(super) fn count_work(&mut self, id: JobId, ran: Millis) {
        let Some(record) = self.jobs.get(&id).filter(|_| ran > 0) else { return };
        let half_life = self.config.rules.shares.half_life;
        self.usage.decay(files::now(), half_life);
        let spec = &record.spec;
        self.usage.add(&spec.project, &spec.owner, spec.slots, ran);
        self.failures.worked(u64::try_from(ran).unwrap_or(0));
        self.unkept_usage = true;
    }

    /// Tells a job's shepherd. If it is gone, that is noticed by whoever listens to it.
    pub(super) fn order(&mut self, id: JobId, order: &Order) {
        if let Some(link) = self.links.get_mut(&id)
            && message::send(link, order).is_err()
        {
            // A part of it may have arrived, after which nothing is understood: whoever listens connects
            // anew, and hears how the job is.
            let _ = link.shutdown(Shutdown::Both);
        }
    }

    /// A job is over.
    pub(super) fn end(&mut self, id: JobId, exit: Exit, note: Option<String>) {
        let now = files::now();
        // One that runs, here or elsewhere, has what its last dump has left.
        let may_sleep = |job: &Record| !matches!(job.place, Place::Running | Place::Away);
        let asleep =
            self.jobs.get(&id).is_some_and(may_sleep).then(|| self.put_aside(id)).flatten();
        if let Some(record) = self.jobs.get_mut(&id) {
            record.exit = Some(exit);
            record.ended = Some(now);
            // What a client tells of a job that went well comes first.
            let earlier = record.note.take();
            for text in note.iter().chain(&earlier) {
                record.remark(text);
            }
            record.shepherd = false;
            record.stored = None;
        }
        let note = note.as_deref().map(cut);
        self.go(id, Place::Ended, "ended", json!({ "exit": exit.number(), "note": note }));
        self.links.remove(&id);
        self.ending.remove(&id);
        self.signalled.remove(&id);
        self.dirt.remove(&id);
        self.not_before.remove(&id);
        self.last_save.remove(&id);
        self.saving.remove(&id);
        self.preparations.remove(&id);
        self.compared.take(id);
        self.drop_ahead(id);
        self.count_stored();
        self.keep_facts();
        let dir = self.dir(id);
        let gone = disk::take_all(&dir);
        if let Some(asleep) = asleep {
            asleep.discard(self.names(id));
        }
        let is_lost = self.jobs.get(&id).is_some_and(|record| {
            // Its output may be what is lost, of which there is no more than that.
            let is_lost = record.note.as_deref().is_some_and(|note| note.starts_with(LOST));
            is_lost && !record.spec.artefacts.is_empty()
        });
        self.clear(if is_lost { gone } else { gone.and(disk::own(&dir)) });
        shepherd::cgroups(&dir).remove();
        // Followers look for it instead of asking all the time.
        let _ = std::fs::write(dir.path().join("ended"), "");
        self.end_dependents(id);
    }

    /// Removes what was taken away. Nobody waits for that but who [makes room](Self::make_room).
    pub(super) fn clear(&mut self, gone: Gone) {
        let Some(queue) = self.queue.upgrade().filter(|_| !gone.is_empty()) else {
            return gone.remove();
        };
        self.clearing += 1;
        threads::run(move || {
            gone.remove();
            queue.lock().clearing -= 1;
        });
    }

    /// A job is over for a cause that is not its own.
    pub(super) fn abandon(&mut self, id: JobId, note: String) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.given_up = true;
        }
        self.end(id, Exit::Code(125), Some(note));
    }

    /// Jobs that were to run after one that has failed never will.
    fn end_dependents(&mut self, id: JobId) {
        if !self.has_failed(id) {
            return;
        }
        let waiting = self.waiting().filter(|job| job.spec.after.contains(&id));
        let ids: Vec<JobId> = waiting.map(|job| job.id).collect();
        for dependent in ids {
            self.end_dependent(dependent, id);
        }
    }

    /// The daemon before may have been killed before it came to that, or have judged otherwise whether one has failed.
    pub(super) fn end_dependents_of_all(&mut self) {
        let first: BTreeSet<JobId> =
            self.waiting().flat_map(|job| job.spec.after.iter().copied()).collect();
        for id in first {
            self.end_dependents(id);
        }
    }

    /// Jobs that have not begun. What has, as an earlier version let it, is not ended for how that judged.
    fn waiting(&self) -> impl Iterator<Item = &Record> {
        self.jobs.values().filter(|job| job.place.waits() && job.run == 0)
    }

    /// Whether nothing can run any more that is to run after a job.
    fn has_failed(&self, id: JobId) -> bool {
        let ended = self.jobs.get(&id).filter(|job| job.place == Place::Ended);
        ended.is_some_and(|job| !job.has_succeeded())
    }

    fn end_dependent(&mut self, id: JobId, failed: JobId) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.cancelled = true;
        }
        let is_cancelled = self.jobs.get(&failed).is_some_and(|job| job.cancelled);
        let how = if is_cancelled { "was cancelled" } else { "has failed" };
        let note = format!("job {failed}, which it was to run after, {how}");
        self.end(id, Exit::Code(125), Some(note));
    }

    /// Keeps what was learned.
    pub(super) fn keep_facts(&mut self) {
        let kept = self.store.keep_learned(&self.speed, &self.usage, &self.failures);
        if let Err(e) = kept {
            self.trouble = Some(e.to_string());
        }
    }
}

/// The key of a job. Whose it is is part of it, or others could take it first. Keys of other machines have no such byte.
fn owners_key(owner: &str, key: &str) -> String {
    format!("{owner}\0{key}")
}

/// Makes the directory of a job. What a loss of power takes of it is [made again](Core::make_dirs_again): the
/// store has it all, and a submission waits for one thing only to come to stable storage.
fn make_dir(dir: &JobDir, spec: &Spec) -> std::io::Result<()> {
    std::fs::create_dir_all(dir.path())?;
    dir.close()?;
    if spec.stdin {
        pump::note_nothing_fed(dir)?;
    }
    files::write_whole(&dir.spec(), spec)
}

/// Why something was not done that somebody has asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Undone {
    /// It cannot be done; a sentence.
    Refused(String),
    /// It could not be kept on disk.
    Unkept(String),
}

impl Undone {
    fn unkept(error: StoreError) -> Self {
        Self::Unkept(error.to_string())
    }
}

/// Why a job is not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NotTaken {
    /// It makes no sense.
    Senseless(String),
    /// Its owner may not ask for that; says what is granted.
    Beyond(String),
    /// Another job was submitted under this key.
    KeyReused,
    /// Its owner has too many already; a sentence.
    TooMany(String),
    /// It cannot be kept.
    Broken(String),
}

impl NotTaken {
    fn broken(error: StoreError) -> Self {
        Self::Broken(error.to_string())
    }

    /// A job that is to run after one that is not there, as far as its sender may know.
    pub(super) fn no_first(missing: JobId) -> Self {
        Self::Senseless(format!("there is no job {missing} to run after"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::AnyPath;

    /// Each decision needs it of all jobs: a digest of a long script each time would hold everybody up.
    #[test]
    fn the_kind_of_a_job_is_found_when_it_is_submitted() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let command = ["sh", "-c", "true"].map(str::to_owned).to_vec();
        let spec = Spec { command, dir: "/".into(), ..Spec::default() };
        let kind = spec.kind();
        let id = core.submit(spec, None).unwrap();
        assert_eq!(core.jobs[&id].spec.kind, Some(kind));
    }

    /// It was wrong when they began, and is right now.
    #[test]
    fn a_clock_that_was_set_back_leaves_no_job_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let open = || Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let mut core = open();
        let submit = |core: &mut Core| {
            let command = vec!["x".to_owned()];
            core.submit(Spec { command, dir: "/".into(), ..Spec::default() }, None).unwrap()
        };
        let [early, late] = [(); 2].map(|()| submit(&mut core));
        let later = files::now() + 86_400_000;
        let before = core.jobs[&early].since;
        for (id, since) in [(early, before), (late, later)] {
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.since, record.guaranteed) = (Place::Running, since, Some(later));
            core.save(id, None);
        }
        let core = open();
        assert_eq!((core.jobs[&early].since, core.jobs[&early].guaranteed), (before, Some(later)));
        assert!(core.jobs[&late].since < later && core.jobs[&late].guaranteed.is_none());
    }

    /// A request may hold a million of them, and each decision looks for all.
    #[test]
    fn a_job_counts_once_that_another_is_to_run_after() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let mut submit = |after: &[JobId]| {
            let command = vec!["x".to_owned()];
            let spec = Spec { command, dir: "/".into(), after: after.to_vec(), ..Spec::default() };
            core.submit(spec, Some(&format!("{after:?}"))).unwrap()
        };
        let [one, other] = [submit(&[]), submit(&[1])];
        let id = submit(&[other, one, other, one, other]);
        assert_eq!(submit(&[other, one, other, one, other]), id, "it is the same");
        assert_eq!(core.jobs[&id].spec.after, [other, one]);
    }

    /// A daemon that was started anew may have another configuration, and the job may have taken its input.
    #[test]
    fn what_is_handed_in_again_is_the_same_job() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("input");
        [&input, &dir.path().join("jobs")]
            .into_iter()
            .for_each(|dir| std::fs::create_dir(dir).unwrap());
        let open = |class: &str| {
            let config = Config { default_class: class.to_owned(), ..Config::default() };
            Core::open(dir.path().to_owned(), config).unwrap()
        };
        let input = Some(AnyPath::from(input));
        let spec = || Spec {
            command: vec!["x".to_owned()],
            dir: "/".into(),
            input: input.clone(),
            ..Spec::default()
        };
        let id = open("normal").submit(spec(), Some("key")).unwrap();
        std::fs::remove_dir(dir.path().join("input")).unwrap();
        let mut later = open("batch");
        assert_eq!(later.submit(spec(), Some("key")).unwrap(), id);
        for other in [Spec { slots: 7, ..spec() }, Spec { class: "batch".to_owned(), ..spec() }] {
            assert!(matches!(later.submit(other, Some("key")), Err(NotTaken::KeyReused)));
        }
    }
}
