//! The daemon's state on disk: what is acknowledged is here, and survives the loss of
//! power.

use std::cell::Cell;
use std::path::Path;

use rusqlite::{Connection, OptionalExtension, params};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::kept::{Refused, Totals, WITHDRAWN, Withdrawal};
use super::record::Record;
use crate::files;
use crate::kind::Group;
use crate::preemption::{Failures, Speed};
use crate::scheduler::share::Usage;
use crate::scheduler::{JobId, Millis};

/// What can be wrong with the state.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// The database.
    #[error("the state of the queue: {0}")]
    Database(#[from] rusqlite::Error),
    /// Its file.
    #[error("the state of the queue: {0}")]
    File(#[from] std::io::Error),
    /// A row that is no such thing.
    #[error("the state of the queue is damaged: {0}")]
    Damaged(#[from] serde_json::Error),
}

impl StoreError {
    /// Whether a sync may have failed. A disk that is full says so before anything is synced.
    fn leaves_doubt(&self) -> bool {
        let Self::Database(error) = self else { return false };
        error.sqlite_error_code() != Some(rusqlite::ErrorCode::DiskFull)
    }
}

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Event {
    /// Its number; they grow.
    pub seq: i64,
    /// When.
    pub at: Millis,
    /// To which job.
    pub job: JobId,
    /// In which run.
    pub run: u64,
    /// What.
    pub kind: String,
    /// More about it.
    pub data: serde_json::Value,
}

/// So many events of a job are kept, the newest, and the last by which it is known that it has run here: whoever has a job may
/// have something happen to it as often as they like.
pub(super) const MOST_EVENTS: u32 = 1000;

/// What happens to a job only if it runs here.
pub(super) const RAN: [&str; 3] = ["resumed", "started", "running"];

/// The name of what the jobs have cost that were forgotten, among the facts.
pub(super) const FORGOTTEN: &str = "forgotten";

/// The name of what projects and owners have used, among the facts.
pub(super) const USAGE: &str = "usage";

/// The name of how fast this machine saves jobs, among the facts.
pub(super) const SPEED: &str = "speed";

/// The name of how often jobs are lost, among the facts.
pub(super) const FAILURES: &str = "failures";

/// What has changed with a job, and is kept with it or not at all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Along<'a> {
    /// What was used by whom.
    pub usage: Option<&'a Usage>,
    /// Jobs that other machines are to give up.
    pub withdrawals: Option<&'a [&'a Withdrawal]>,
}

/// The database.
#[derive(Debug)]
pub(super) struct Store {
    db: Connection,
    /// Whether a sync may have failed. What was not synced until then can still be read, but the kernel may have given it
    /// up, and counts it as written: no later sync brings it to the disk. Nothing behind it in the log would be found
    /// after a loss of power.
    in_doubt: Cell<bool>,
}

/// A commit is on stable storage, with all before it.
const SYNCED: &str = "PRAGMA synchronous = FULL";

/// The last commits may be lost with the power.
const UNSYNCED: &str = "PRAGMA synchronous = NORMAL";

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS specs (job INTEGER PRIMARY KEY, spec TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, job INTEGER NOT NULL,
        run INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
    CREATE INDEX IF NOT EXISTS events_of_job ON events (job, seq);
    CREATE TABLE IF NOT EXISTS dropped (job INTEGER PRIMARY KEY, events INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS refusals (
        owner TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL, at INTEGER NOT NULL,
        version TEXT NOT NULL, why TEXT NOT NULL, PRIMARY KEY (owner, project, kind));
    CREATE TABLE IF NOT EXISTS keys (
        key TEXT PRIMARY KEY, body TEXT NOT NULL, job INTEGER NOT NULL, at INTEGER NOT NULL);
";

/// Earlier versions have kept what was submitted in the record.
const APART: &str = "
    INSERT INTO specs (job, spec) SELECT id, json_extract(record, '$.spec') FROM jobs
    WHERE id NOT IN (SELECT job FROM specs)";

impl Store {
    /// Opens the database in the data directory, or makes it.
    ///
    /// # Errors
    /// If the directory cannot be written to, or what is there is no database or a damaged one.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        // It holds the environment of all jobs. What SQLite puts beside it gets the same mode.
        for end in ["", "-wal", "-shm"] {
            let mut file = path.as_os_str().to_owned();
            file.push(end);
            if end.is_empty() || Path::new(&file).exists() {
                files::own(Path::new(&file))?;
            }
        }
        let db = Connection::open(path)?;
        db.execute_batch("PRAGMA journal_mode = WAL")?;
        db.execute_batch(SYNCED)?;
        db.execute_batch(TABLES)?;
        db.execute_batch(APART)?;
        // Refusals of earlier versions: by kinds that were too wide, and a new version tries again.
        db.execute_batch("DROP TABLE IF EXISTS kinds;")?;
        // An earlier daemon may have failed to bring the log to stable storage.
        Ok(Self { db, in_doubt: Cell::new(true) })
    }

    /// Writes something.
    fn write<T>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.in_doubt.get() {
            self.sync_anew()?;
        }
        let written = work(&self.db);
        self.in_doubt.set(written.as_ref().is_err_and(StoreError::leaves_doubt));
        written
    }

    /// Makes a change as a whole, or not at all.
    fn change<T>(
        &self,
        work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.write(|db| {
            let change = db.unchecked_transaction()?;
            let made = work(&change)?;
            change.commit()?;
            Ok(made)
        })
    }

    /// Puts all that the log holds into the database, and begins the log anew.
    fn sync_anew(&self) -> Result<(), StoreError> {
        let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
        let is_held_up: bool = self.db.query_row(checkpoint, [], |row| row.get(0))?;
        if is_held_up {
            let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
            return Err(rusqlite::Error::SqliteFailure(busy, None).into());
        }
        self.in_doubt.set(false);
        Ok(())
    }

    /// All jobs.
    ///
    /// # Errors
    /// If the database cannot be read, or the record of a job is damaged.
    pub(super) fn jobs(&self) -> Result<Vec<Record>, StoreError> {
        let sql = "SELECT record, spec FROM jobs JOIN specs ON job = id ORDER BY id";
        let mut query = self.db.prepare(sql)?;
        let rows =
            query.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
        let whole = |(record, spec): (String, String)| -> Result<Record, StoreError> {
            let spec = serde_json::from_str(&spec)?;
            Ok(Record { spec, ..serde_json::from_str(&record)? })
        };
        rows.map(|row| whole(row?)).collect()
    }

    /// Gives a new job its number, and keeps it; `make` gets the number.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn add(
        &self,
        key: Option<(&str, &str)>,
        now: Millis,
        make: impl FnOnce(JobId) -> Record,
    ) -> Result<Record, StoreError> {
        self.change(|change| {
            change.execute("INSERT INTO jobs (record) VALUES ('')", [])?;
            let id = change.last_insert_rowid();
            let mut record = make(JobId::try_from(id).unwrap_or_default());
            let (text, spec) = (record.state_text()?, serde_json::to_string(&record.spec)?);
            change.execute("UPDATE jobs SET record = ?1 WHERE id = ?2", params![text, id])?;
            change.execute("INSERT INTO specs (job, spec) VALUES (?1, ?2)", params![id, spec])?;
            if let Some((key, body)) = key {
                let row = params![key, body, id, now];
                let sql = "INSERT INTO keys (key, body, job, at) VALUES (?1, ?2, ?3, ?4)";
                change.execute(sql, row)?;
            }
            insert(change, &record, now, "submitted", &serde_json::json!({}))?;
            Ok(record)
        })
    }

    /// What was submitted under a key before, and which job it became.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub(super) fn submitted_as(&self, key: &str) -> Result<Option<(String, JobId)>, StoreError> {
        let mut query = self.db.prepare("SELECT body, job FROM keys WHERE key = ?1")?;
        Ok(query
            .query_row([key], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))
            .optional()?
            .map(|(body, job)| (body, JobId::try_from(job).unwrap_or_default())))
    }

    /// Keeps a job as it is now, what has happened to it, and what has changed with it.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn save(
        &self,
        record: &mut Record,
        now: Millis,
        event: Option<(&str, serde_json::Value)>,
        along: Along<'_>,
    ) -> Result<(), StoreError> {
        self.change(|change| {
            let text = record.state_text()?;
            let id = i64::try_from(record.id).unwrap_or(i64::MAX);
            change.execute("UPDATE jobs SET record = ?1 WHERE id = ?2", params![text, id])?;
            if let Some((kind, data)) = event {
                insert(change, record, now, kind, &data)?;
            }
            if let Some(usage) = along.usage {
                keep_fact(change, USAGE, usage)?;
            }
            if let Some(withdrawals) = along.withdrawals {
                keep_fact(change, WITHDRAWN, &withdrawals)?;
            }
            Ok(())
        })
    }

    /// Forgets jobs, and keeps what all that were forgotten have cost, and what other machines are to give up if that
    /// is new.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn forget(
        &self,
        ids: &[JobId],
        totals: &Totals,
        withdrawals: Option<&[&Withdrawal]>,
    ) -> Result<(), StoreError> {
        self.change(|change| {
            for &id in ids {
                let id = i64::try_from(id).unwrap_or(i64::MAX);
                change.execute("DELETE FROM events WHERE job = ?1", [id])?;
                change.execute("DELETE FROM dropped WHERE job = ?1", [id])?;
                change.execute("DELETE FROM keys WHERE job = ?1", [id])?;
                change.execute("DELETE FROM specs WHERE job = ?1", [id])?;
                change.execute("DELETE FROM jobs WHERE id = ?1", [id])?;
            }
            keep_fact(change, FORGOTTEN, totals)?;
            if let Some(withdrawals) = withdrawals {
                keep_fact(change, WITHDRAWN, &withdrawals)?;
            }
            Ok(())
        })
    }

    /// Events after `seq`, of one job or of all, at most `most`.
    ///
    /// # Errors
    /// If the database cannot be read, or an event in it is damaged.
    pub(super) fn events(
        &self,
        job: Option<JobId>,
        seq: i64,
        most: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let job = job.map(|job| i64::try_from(job).unwrap_or(i64::MAX));
        let mut query = self.db.prepare(
            "SELECT seq, at, job, run, kind, data FROM events
             WHERE seq > ?1 AND (?2 IS NULL OR job = ?2) ORDER BY seq LIMIT ?3",
        )?;
        read_events(query.query(params![seq, job, most])?)
    }

    /// The newest events of a job, at most `most`, and how many there were before those, kept or not.
    ///
    /// # Errors
    /// If the database cannot be read, or an event in it is damaged.
    pub(super) fn newest_events(
        &self,
        job: JobId,
        most: u32,
    ) -> Result<(Vec<Event>, u64), StoreError> {
        let job = i64::try_from(job).unwrap_or(i64::MAX);
        let count = "SELECT (SELECT count(*) FROM events WHERE job = ?1)
                     + coalesce((SELECT events FROM dropped WHERE job = ?1), 0)";
        let count: i64 = self.db.query_row(count, [job], |row| row.get(0))?;
        let mut query = self.db.prepare(
            "SELECT seq, at, job, run, kind, data FROM events
             WHERE job = ?1 ORDER BY seq DESC LIMIT ?2",
        )?;
        let mut found = read_events(query.query(params![job, most])?)?;
        found.reverse();
        let earlier = u64::try_from(count).unwrap_or(0).saturating_sub(found.len() as u64);
        Ok((found, earlier))
    }

    /// Whether one of these has happened to a job.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub(super) fn has_happened(&self, job: JobId, kinds: [&str; 3]) -> Result<bool, StoreError> {
        let job = i64::try_from(job).unwrap_or(i64::MAX);
        let [a, b, c] = kinds;
        let sql = "SELECT EXISTS (SELECT 1 FROM events WHERE job = ?1 AND kind IN (?2, ?3, ?4))";
        Ok(self.db.query_row(sql, params![job, a, b, c], |row| row.get(0))?)
    }

    /// A fact that was kept under a name.
    ///
    /// # Errors
    /// If the database cannot be read, or the fact is damaged.
    pub(super) fn fact<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        let mut query = self.db.prepare("SELECT value FROM facts WHERE name = ?1")?;
        let text: Option<String> = query.query_row([name], |row| row.get(0)).optional()?;
        Ok(text.map(|text| serde_json::from_str(&text)).transpose()?)
    }

    /// Keeps a fact under a name.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn keep_fact(&self, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
        self.write(|db| keep_fact(db, name, value))
    }

    /// Keeps what was learned from the jobs.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn keep_learned(
        &self,
        speed: &Speed,
        usage: &Usage,
        failures: &Failures,
    ) -> Result<(), StoreError> {
        self.change(|change| {
            keep_fact(change, SPEED, speed)?;
            keep_fact(change, USAGE, usage)?;
            keep_fact(change, FAILURES, failures)
        })
    }

    /// Finds out whether anything can be written. Nobody waits until that is on stable storage, since nothing
    /// depends on it.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn try_to_write(&self, now: Millis) -> Result<(), StoreError> {
        self.db.execute_batch(UNSYNCED)?;
        let written = self.keep_fact("asked", &now);
        self.db.execute_batch(SYNCED)?;
        written
    }

    /// Why jobs of some kinds cannot be saved.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub(super) fn refusals(&self) -> Result<Vec<(Group, Refused)>, StoreError> {
        let sql = "SELECT owner, project, kind, at, version, why FROM refusals";
        let mut query = self.db.prepare(sql)?;
        let rows = query.query_map([], |row| {
            let group = Group { owner: row.get(0)?, project: row.get(1)?, kind: row.get(2)? };
            Ok((group, Refused { at: row.get(3)?, version: row.get(4)?, why: row.get(5)? }))
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Remembers why jobs of a kind cannot be saved.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn keep_refusal(&self, group: &Group, refused: &Refused) -> Result<(), StoreError> {
        let Group { owner, project, kind } = group;
        let Refused { at, version, why } = refused;
        let sql = "INSERT OR REPLACE INTO refusals (owner, project, kind, at, version, why)
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
        self.write(|db| Ok(db.execute(sql, params![owner, project, kind, at, version, why])?))?;
        Ok(())
    }

    /// Forgets why jobs of a kind cannot be saved.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn lift_refusal(&self, group: &Group) -> Result<(), StoreError> {
        let sql = "DELETE FROM refusals WHERE owner = ?1 AND project = ?2 AND kind = ?3";
        self.write(|db| Ok(db.execute(sql, params![group.owner, group.project, group.kind])?))?;
        Ok(())
    }
}

fn read_events(mut rows: rusqlite::Rows<'_>) -> Result<Vec<Event>, StoreError> {
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(Event {
            seq: row.get(0)?,
            at: row.get(1)?,
            job: JobId::try_from(row.get::<_, i64>(2)?).unwrap_or_default(),
            run: u64::try_from(row.get::<_, i64>(3)?).unwrap_or_default(),
            kind: row.get(4)?,
            data: serde_json::from_str(&row.get::<_, String>(5)?)?,
        });
    }
    Ok(found)
}

fn keep_fact(db: &Connection, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
    let text = serde_json::to_string(value)?;
    let sql = "INSERT INTO facts (name, value) VALUES (?1, ?2)
               ON CONFLICT (name) DO UPDATE SET value = ?2";
    db.execute(sql, params![name, text])?;
    Ok(())
}

fn insert(
    change: &rusqlite::Transaction<'_>,
    record: &Record,
    now: Millis,
    kind: &str,
    data: &serde_json::Value,
) -> Result<(), StoreError> {
    let run = i64::try_from(record.run).unwrap_or(i64::MAX);
    let id = i64::try_from(record.id).unwrap_or(i64::MAX);
    let sql = "INSERT INTO events (at, job, run, kind, data) VALUES (?1, ?2, ?3, ?4, ?5)";
    change.execute(sql, params![now, id, run, kind, data.to_string()])?;
    drop_old_events(change, id)
}

/// Drops the events of a job that are too many, and counts them.
fn drop_old_events(change: &rusqlite::Transaction<'_>, job: i64) -> Result<(), StoreError> {
    let [a, b, c] = RAN;
    let sql = "DELETE FROM events WHERE job = ?1
               AND seq <= (SELECT seq FROM events WHERE job = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)
               AND seq <> coalesce(
                   (SELECT max(seq) FROM events WHERE job = ?1 AND kind IN (?3, ?4, ?5)), 0)";
    let dropped = change.execute(sql, params![job, MOST_EVENTS, a, b, c])?;
    if dropped > 0 {
        let sql = "INSERT INTO dropped (job, events) VALUES (?1, ?2)
                   ON CONFLICT (job) DO UPDATE SET events = events + ?2";
        change.execute(sql, params![job, i64::try_from(dropped).unwrap_or(0)])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_only_tried_leaves_commits_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("queue.db")).unwrap();
        let level = || store.db.query_row("PRAGMA synchronous", [], |row| row.get::<_, i64>(0));
        assert_eq!(level().unwrap(), 2, "FULL");
        store.try_to_write(7).unwrap();
        assert_eq!(level().unwrap(), 2, "FULL");
    }

    /// A job that runs for days has thousands of events, and those count that came last.
    #[test]
    fn the_newest_events_are_told() {
        use crate::spec::Spec;
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("queue.db")).unwrap();
        let [mut job, other] =
            [(); 2].map(|()| store.add(None, 0, |id| Record::new(id, Spec::default(), 0)).unwrap());
        for kind in ["started", "saved", "durable", "preempted"] {
            let event = Some((kind, serde_json::json!({})));
            store.save(&mut job, 1, event, Along::default()).unwrap();
        }
        let newest = |most| {
            let (events, earlier) = store.newest_events(job.id, most).unwrap();
            (events.into_iter().map(|event| event.kind).collect::<Vec<_>>(), earlier)
        };
        assert_eq!(newest(2), (vec!["durable".to_owned(), "preempted".to_owned()], 3));
        assert_eq!((newest(5).0.len(), newest(100).1), (5, 0));
        let has_run = |id| store.has_happened(id, RAN).unwrap();
        assert_eq!((has_run(job.id), has_run(other.id)), (true, false));
    }

    /// Whoever lets a job give way and resumes it, again and again, would fill the disk for all.
    #[test]
    fn old_events_of_a_job_are_dropped_and_counted() {
        use crate::spec::Spec;
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("queue.db")).unwrap();
        let [mut job, mut other] =
            [(); 2].map(|()| store.add(None, 0, |id| Record::new(id, Spec::default(), 0)).unwrap());
        let add = |job: &mut Record, kind: &str, count: u32| {
            store.db.execute_batch("PRAGMA synchronous = OFF").unwrap();
            for _ in 0..count {
                let event = Some((kind, serde_json::json!({})));
                store.save(job, 1, event, Along::default()).unwrap();
            }
        };
        add(&mut other, "held", 5);
        add(&mut job, "running", 2);
        add(&mut job, "held", MOST_EVENTS + 7);
        let kept = store.events(Some(job.id), 0, u32::MAX).unwrap();
        let kinds: Vec<&str> = kept.iter().map(|event| event.kind.as_str()).collect();
        // That it has run is known, and by the last word of that.
        assert_eq!(
            (kinds.len(), kinds[0], kinds[1]),
            (MOST_EVENTS as usize + 1, "running", "held")
        );
        assert!(store.has_happened(job.id, RAN).unwrap());
        // With that it was submitted, and that it has run.
        let (newest, earlier) = store.newest_events(job.id, 10).unwrap();
        assert_eq!((newest.len(), earlier), (10, u64::from(MOST_EVENTS) + 7 + 3 - 10));
        assert_eq!(store.newest_events(other.id, 10).unwrap().0.len(), 6);
        store.forget(&[job.id], &Totals::default(), None).unwrap();
        assert_eq!(store.newest_events(job.id, 10).unwrap(), (Vec::new(), 0));
    }

    /// It may be long, and much happens to a job.
    #[test]
    fn what_was_submitted_is_kept_once() {
        use crate::spec::Spec;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("queue.db");
        let store = Store::open(&path).unwrap();
        let command = vec!["x".repeat(1 << 20), "\u{e9}\"\\".to_owned()];
        let spec = Spec { command, priority: i32::MIN, ..Spec::default() };
        let mut job = store.add(None, 0, |id| Record::new(id, spec.clone(), 0)).unwrap();
        let save = |store: &Store, job: &mut Record| {
            store.save(job, 1, Some(("held", serde_json::json!({}))), Along::default()).unwrap();
            assert_eq!(job.spec, spec);
            let length = "SELECT max(length(record)) FROM jobs";
            let length: i64 = store.db.query_row(length, [], |row| row.get(0)).unwrap();
            assert!(length < 10_000, "{length} bytes");
        };
        job.preemptions = 7;
        save(&store, &mut job);
        assert_eq!(store.jobs().unwrap(), [job.clone()]);
        // As an earlier version has kept it.
        store.db.execute_batch("DROP TABLE specs").unwrap();
        let whole = serde_json::to_string(&job).unwrap();
        store.db.execute("UPDATE jobs SET record = ?1", [whole]).unwrap();
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.jobs().unwrap(), [job.clone()]);
        save(&store, &mut job);
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.jobs().unwrap(), [job.clone()]);
        store.forget(&[job.id], &Totals::default(), None).unwrap();
        let left = store.db.query_row("SELECT count(*) FROM specs", [], |row| row.get::<_, i64>(0));
        assert_eq!(left.unwrap(), 0);
    }

    /// What is found if nothing of the log is.
    fn without_log(path: &Path) -> Store {
        let alone = path.with_extension("alone");
        std::fs::copy(path, &alone).unwrap();
        Store::open(&alone).unwrap()
    }

    /// What was only tried was not synced: the sync that has failed may have lost it, and nobody finds in the log what
    /// comes behind it.
    #[test]
    fn nothing_is_kept_behind_what_a_failed_sync_may_have_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("queue.db");
        let store = Store::open(&path).unwrap();
        store.keep_fact("speed", &1).unwrap();
        store.try_to_write(7).unwrap();
        assert_eq!(without_log(&path).fact::<Millis>("asked").unwrap(), None);
        let fails =
            "CREATE TRIGGER fails BEFORE INSERT ON refusals BEGIN SELECT RAISE(ABORT, 'lost'); END";
        store.db.execute_batch(fails).unwrap();
        let group = Group { owner: String::new(), project: String::new(), kind: "make".to_owned() };
        let refused = Refused { at: 1, version: String::new(), why: String::new() };
        store.keep_refusal(&group, &refused).unwrap_err();
        store.keep_fact("speed", &2).unwrap();
        let found = without_log(&path);
        assert_eq!(found.fact::<Millis>("asked").unwrap(), Some(7));
        assert_eq!(found.fact::<u32>("speed").unwrap(), Some(1), "it is in the log");
        assert_eq!(store.fact::<u32>("speed").unwrap(), Some(2));
    }
}
