//! The daemon's state, and what changes it. All of it is behind one lock; what a change
//! means for others is decided by [`crate::scheduler::decide`] right after it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use serde_json::Value;
use torpor_worker::tell;

use super::compared::Compared;
use super::config::Config;
use super::depot::Depot;
use super::kept::{Refused, Totals, WITHDRAWN, Withdrawal};
use super::peaks::Peaks;
use super::record::{Ahead, Place, Preparation, Record};
use super::stall::Stall;
use super::store::{FAILURES, FORGOTTEN, SPEED, Store, StoreError, USAGE};
use super::turns::Turns;
use crate::files::{self, JobDir};
use crate::kind::Group;
use crate::preemption::{Dirt, Failures, Speed};
use crate::scheduler::share::Usage;
use crate::scheduler::{JobId, Millis, Reason};
use crate::shepherd;
use crate::shepherd::message::{self, Order};
use crate::shepherd::pump;
use crate::spec::Spec;

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
    pub(super) unkept: BTreeSet<JobId>,
    /// Whether more was used than is on disk.
    pub(super) unkept_usage: bool,
    /// Why this machine can begin no run.
    pub(super) stall: Option<Stall>,
    /// What the clock said when it was looked at last, and when that was.
    clock: (Millis, Instant),
}

/// A clock that is so much off what has passed was set.
const JUMP: Millis = 1000;

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
            clock: (files::now(), Instant::now()),
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

    /// Moves the times that were noted with the clock, if that was set, or the machine was suspended: nobody has run, or waited,
    /// for longer by that, or less.
    pub(super) fn follow_clock(&mut self) {
        let (now, instant) = (files::now(), Instant::now());
        let (before, at) = std::mem::replace(&mut self.clock, (now, instant));
        let passed = instant.saturating_duration_since(at).as_millis();
        let jump = now - before - Millis::try_from(passed).unwrap_or(0);
        if jump.abs() < JUMP {
            return;
        }
        tell!("torpor queue: the clock was set by {jump} ms");
        let live = self.jobs.values_mut().filter(|job| job.place != Place::Ended);
        let mut live: Vec<&mut Record> = live.collect();
        let own = live.iter_mut().flat_map(|job| {
            let (guaranteed, way) = (job.guaranteed.as_mut(), job.giving_way.as_mut());
            [Some(&mut job.since), guaranteed, way.map(|way| &mut way.at)].into_iter().flatten()
        });
        let signalled = self.signalled.values_mut().map(|(_, at)| at);
        let followers = self.followers.values_mut().map(|(_, since)| since);
        let prepared = self.preparations.values_mut().filter_map(|preparation| match preparation {
            Preparation::Begun(at) | Preparation::PutOff(at) => Some(at),
            Preparation::Done => None,
        });
        let known = self.ending.values_mut().chain(self.last_save.values_mut());
        let known = known
            .chain(self.not_before.values_mut())
            .chain(signalled)
            .chain(followers)
            .chain(prepared);
        own.chain(known).for_each(|time| *time += jump);
        let ids: Vec<JobId> = live.iter().map(|job| job.id).collect();
        self.stall = None;
        ids.into_iter().for_each(|id| self.save(id, None));
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
}

/// Makes the directory of a job. What a loss of power takes of it is [made again](Core::make_dirs_again): the
/// store has it all, and a submission waits for one thing only to come to stable storage.
pub(super) fn make_dir(dir: &JobDir, spec: &Spec) -> std::io::Result<()> {
    std::fs::create_dir_all(dir.path())?;
    dir.close()?;
    if spec.stdin {
        pump::note_nothing_fed(dir)?;
    }
    files::write_whole(&dir.spec(), spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the time synchronisation of a machine that has just begun, for one.
    #[test]
    fn who_runs_has_run_for_as_long_whatever_is_done_to_the_clock() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let (command, mut limits) = (vec!["x".to_owned()], crate::spec::Limits::default());
        limits.time = Some(60);
        let id = core.submit(Spec { command, limits, dir: "/".into(), ..Spec::default() }, None);
        let id = id.unwrap();
        for set_by in [7_200_000, -7_200_000] {
            let before = files::now() - set_by;
            core.clock = (before, Instant::now());
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.since) = (Place::Running, before - 30_000);
            core.look_after();
            let ran = files::now() - core.jobs[&id].since;
            assert!((29_000..50_000).contains(&ran), "{ran}");
            assert!(!core.ending.contains_key(&id), "it was told to end");
        }
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
}
