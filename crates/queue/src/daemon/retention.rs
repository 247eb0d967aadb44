//! Jobs that are over are forgotten in the end, with what they have written: a daemon that runs for years
//! would fill its machine's disk and memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use torpor_worker::tell;

use super::config::Retention;
use super::core::Core;
use super::disk::{self, Gone};
use super::kept::kept_with;
use super::record::{Place, Record};
use super::taking::NotTaken;
use super::threads;
use crate::files;
use crate::scheduler::{JobId, Millis};
use crate::shepherd;

/// As many are forgotten at once: everybody else waits for that.
const MOST_AT_ONCE: usize = 100;

/// Nobody has more jobs that are not over: each decision looks at all of them, and everybody else waits for it.
const MOST_LIVE: usize = 10_000;

impl Core {
    /// Forgets a job that is over, and removes what it has written.
    ///
    /// # Errors
    /// If it is not over, somebody still needs it, or the state cannot be written; a sentence.
    pub(super) fn forget(&mut self, id: JobId) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or_else(|| format!("there is no job {id}"))?;
        if record.place != Place::Ended {
            let state = record.state();
            return Err(format!(
                "job {id} is not over: {state} (torpor queue cancel {id} ends it)"
            ));
        }
        match self.needed_by(record, &self.awaited()) {
            Some(why) => Err(format!("job {id} is still needed: {why}")),
            None => self.forget_all(&[id]),
        }
    }

    /// Forgets those whose time has come.
    pub(super) fn forget_old(&mut self, now: Millis) {
        let Retention { age, jobs } = self.config.retention;
        let over = self.jobs.values().filter(|job| job.place == Place::Ended);
        let over = over.map(|job| (job.ended.unwrap_or(job.since), job.id));
        // Its client, or the machine that it came from, may be about to ask again.
        let settled = over.filter(|(ended, _)| now - ended >= self.config.orphan_after);
        let mut over: Vec<(Millis, JobId)> = settled.collect();
        over.sort_unstable();
        let spare = jobs.map_or(0, |most| over.len().saturating_sub(most));
        let is_old = |ended: Millis| age.is_some_and(|age| now - ended > age);
        let crowd = self.crowd(&over);
        let is_due = |&(place, &(ended, id)): &(usize, &(Millis, JobId))| {
            place < spare || is_old(ended) || crowd.contains(&id)
        };
        let due = over.iter().enumerate().filter(is_due);
        let due: Vec<JobId> = due.map(|(_, (_, id))| *id).collect();
        if due.is_empty() {
            return;
        }
        let awaited = self.awaited();
        let is_free = |id: &JobId| {
            self.jobs.get(id).is_some_and(|job| self.needed_by(job, &awaited).is_none())
        };
        let due: Vec<JobId> = due.into_iter().filter(is_free).take(MOST_AT_ONCE).collect();
        if let Err(why) = self.forget_all(&due) {
            tell!("torpor queue: {why}");
        }
    }

    /// Of jobs that are over, the oldest first, those by which their owners have taken more than half of what their jobs may
    /// take.
    fn crowd(&self, over: &[(Millis, JobId)]) -> BTreeSet<JobId> {
        let Some(most) = self.config.descriptions else { return BTreeSet::new() };
        let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
        for job in self.jobs.values() {
            *taken.entry(&job.spec.owner).or_default() += job.held_bytes();
        }
        let mut crowd = BTreeSet::new();
        for job in over.iter().filter_map(|(_, id)| self.jobs.get(id)) {
            let taken = taken.entry(&job.spec.owner).or_default();
            if *taken > most / 2 {
                *taken -= job.held_bytes();
                crowd.insert(job.id);
            }
        }
        crowd
    }

    /// Whether the daemon has room for one more of an owner's jobs: nobody takes the memory, and the disk, that those of
    /// others need.
    ///
    /// # Errors
    /// `NotTaken::TooMany` if it has not: how much those take that there are.
    pub(super) fn has_place_for(&self, new: &Record) -> Result<(), NotTaken> {
        let Some(most) = self.config.descriptions else { return Ok(()) };
        let owner = &new.spec.owner;
        let own = || self.jobs.values().filter(|job| job.spec.owner == *owner);
        if own().filter(|job| job.place != Place::Ended).count() >= MOST_LIVE {
            let text = format!("{owner} has {MOST_LIVE} jobs that are not over: let some end");
            return Err(NotTaken::TooMany(text));
        }
        let taken: u64 = own().map(Record::held_bytes).sum();
        match taken + new.held_bytes() <= most {
            true => Ok(()),
            false => Err(NotTaken::TooMany(format!(
                "the jobs of {owner} take {taken} bytes by what was said of them, and may take {most}; let some end, and \
                 forget those that are over (torpor queue forget)"
            ))),
        }
    }

    /// The jobs that others are to run after.
    fn awaited(&self) -> BTreeSet<JobId> {
        let live = self.jobs.values().filter(|job| job.place != Place::Ended);
        live.flat_map(|job| job.spec.after.iter().copied()).collect()
    }

    /// Who still needs a job that is over.
    fn needed_by(&self, record: &Record, awaited: &BTreeSet<JobId>) -> Option<String> {
        if self.followers.get(&record.id).is_some_and(|&(count, _)| count > 0) {
            return Some("its client has not read all that it has written".to_owned());
        }
        if awaited.contains(&record.id) {
            return Some("another job is to run after it".to_owned());
        }
        record.named.then(|| "the object store still has something of it".to_owned())
    }

    fn forget_all(&mut self, ids: &[JobId]) -> Result<(), String> {
        if ids.is_empty() {
            return Ok(());
        }
        let records = ids.iter().filter_map(|id| self.jobs.get(id));
        let totals = records.fold(self.forgotten, |sum, job| sum.with(job, 0));
        let withdrawals = kept_with(&self.withdrawals, ids);
        let forgotten = self.store.forget(ids, &totals, withdrawals.as_deref());
        forgotten.map_err(|e| e.to_string())?;
        if withdrawals.is_some() {
            self.were_kept_with(ids);
        }
        self.forgotten = totals;
        let mut dirs = Vec::new();
        for &id in ids {
            self.jobs.remove(&id);
            self.followers.remove(&id);
            dirs.push(self.dir(id).path().to_owned());
        }
        // Nobody waits for that. What a power cut leaves goes when the daemon starts.
        threads::run(move || drop(files::remove_trees(&dirs)));
        Ok(())
    }

    /// Removes the directories of jobs that were forgotten, and what a daemon before this one has prepared of others: that is
    /// on no stable storage, and its disk may have failed since, and come back. Of those that are over go the checkpoints, which
    /// it may not have come to. What one of an earlier version has let others read they cannot any more.
    pub(super) fn sweep(&self) {
        let mut gone = Gone::default();
        for entry in fs::read_dir(self.data.join("jobs")).into_iter().flatten().flatten() {
            let id = entry.file_name().to_str().and_then(|name| name.parse::<JobId>().ok());
            let Some(id) = id else { continue };
            let Some(job) = self.jobs.get(&id) else {
                let _ = files::remove_trees(&[entry.path()]);
                continue;
            };
            let dir = self.dir(id);
            dir.hide();
            match job.place {
                Place::Ended => disk::take_all(&dir).remove(),
                _ => shepherd::unprepare(&dir),
            }
            gone = gone.and(disk::left_over(&dir));
        }
        // It may be much, and nobody waits for it.
        threads::run(move || gone.remove());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::config::Config;
    use super::*;
    use crate::shepherd::message::Exit;
    use crate::spec::Spec;

    /// What was said of jobs stays in memory and on disk for as long as they are known.
    #[test]
    fn one_owners_jobs_leave_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let config = Config { descriptions: Some(400_000), orphan_after: 0, ..Config::default() };
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        let submit = |core: &mut Core, owner: &str, key: Option<&str>| {
            let (command, owner) = (vec!["x".repeat(100_000)], owner.to_owned());
            core.submit(Spec { command, owner, dir: "/".into(), ..Spec::default() }, key)
        };
        let own: Vec<JobId> =
            (0..3).map(|_| submit(&mut core, "ann", Some("key")).unwrap()).collect();
        assert_eq!(own, [own[0]; 3], "it was submitted once");
        let more = [(); 2].map(|()| submit(&mut core, "ann", None).unwrap());
        let NotTaken::TooMany(text) = submit(&mut core, "ann", None).unwrap_err() else { panic!() };
        assert!(text.contains("the jobs of ann take"), "{text}");
        assert_eq!(submit(&mut core, "ann", Some("key")), Ok(own[0]), "there it is already");
        let long = submit(&mut core, "bob", Some(&"k".repeat(60_000)));
        assert!(matches!(long, Err(NotTaken::Senseless(_))), "{long:?}");
        let other = submit(&mut core, "bob", None).unwrap();
        // Those that are over make room by themselves, the oldest first; what lives stays.
        for id in [own[0], more[1], other] {
            core.end(id, Exit::Code(0), None);
        }
        core.jobs.get_mut(&own[0]).unwrap().ended = Some(files::now() - 1000);
        core.forget_old(files::now() + 1);
        let known: Vec<JobId> = core.jobs.keys().copied().collect();
        assert_eq!(known, [more[0], other]);
        submit(&mut core, "ann", None).unwrap();
    }

    #[test]
    fn one_owner_has_so_many_jobs_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let submit = |core: &mut Core, owner: &str| {
            let (command, owner) = (vec!["x".to_owned()], owner.to_owned());
            core.submit(Spec { command, owner, dir: "/".into(), ..Spec::default() }, None)
        };
        let first = submit(&mut core, "ann").unwrap();
        let record = core.jobs[&first].clone();
        // As if they had been submitted.
        for id in (1_000_000..).take(MOST_LIVE - 1) {
            core.jobs.insert(id, Record { id, ..record.clone() });
        }
        let NotTaken::TooMany(text) = submit(&mut core, "ann").unwrap_err() else { panic!() };
        assert!(text.contains("ann has 10000 jobs that are not over"), "{text}");
        submit(&mut core, "bob").unwrap();
        core.end(first, Exit::Code(0), None);
        submit(&mut core, "ann").unwrap();
    }

    #[test]
    fn a_new_daemon_keeps_what_it_knows_and_prepares_anew() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("jobs/77")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let job = core.dir(id).path().to_owned();
        // A directory of this name is removed; this stands for one that cannot be.
        fs::write(job.join("ready.gone"), "").unwrap();
        for name in ["ready-boot", "ready-1-2", "ready.gone-1-2-3"] {
            fs::create_dir(job.join(name)).unwrap();
            fs::write(job.join(name).join("file"), "").unwrap();
        }
        fs::write(job.join("out"), "written").unwrap();
        fs::set_permissions(job.join("out"), fs::Permissions::from_mode(0o644)).unwrap();
        core.sweep();
        assert_eq!(fs::metadata(job.join("out")).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(job.join("out")).unwrap();
        let names = |dir: &std::path::Path| -> Vec<String> {
            let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
            fs::read_dir(dir).unwrap().map(|entry| name(entry.unwrap())).collect()
        };
        assert!(fs::read(job.join("ready.gone")).is_ok(), "a file was removed");
        fs::remove_file(job.join("ready.gone")).unwrap();
        assert_eq!(names(&job), ["spec.json"]);
        assert_eq!(names(&dir.path().join("jobs")), [id.to_string()]);
        // The checkpoints of one that is over go: who ended it may have failed before they did.
        fs::create_dir(core.dir(id).checkpoint(1)).unwrap();
        core.sweep();
        assert!(core.dir(id).checkpoint(1).exists());
        core.jobs.get_mut(&id).unwrap().place = Place::Ended;
        core.sweep();
        assert!(!core.dir(id).checkpoint(1).exists());
    }
}
