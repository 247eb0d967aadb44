//! The decision record: where the tasks of a migration run, whatever ends too early.
//!
//! Each host keeps one file for each migration, written anew and synced to disk at each step.
//! Phases never go back:
//!
//! ```text
//!     preparing ──▶ deciding ──▶ moved
//!          └────────────┴──────▶ stayed
//! ```
//!
//! | phase | the source, after a restart | the destination, after a restart |
//! |---|---|---|
//! | preparing | the tasks go on here | nothing of it is left; stayed |
//! | deciding | the tasks stay stopped; asks the destination | moved if the tasks are found running or have run (where pages follow, with all of them), else stayed |
//! | moved | what is left of the tasks is killed | the tasks run |
//! | stayed | the tasks go on here | nothing of it is left |
//!
//! The source writes *deciding* before it says go, the destination before it wakes the tasks.
//! So whether the tasks run at the destination is what decides, and the destination can
//! always tell: that agent, as long as it has its record. Another one does not know.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use torpor_kernel::tree::Id;

use crate::error::{Context, Error, Result};
use crate::origin::Origin;
use crate::runtime::Container;
use crate::task::Task;

/// Where the records of this host are, unless told otherwise.
pub(crate) const STATE_DIR: &str = "/var/lib/torpor/migrations";
/// Records of migrations that are over, and are kept for whoever has begun them and asks.
const KEPT: usize = 200;
/// No record is longer: of a tree with so many tasks none is begun that could not be read again.
const MAX_RECORD: usize = 64 << 20;

/// How far a migration has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Nothing is decided: the tasks are the source's.
    Preparing,
    /// The tasks may be made to run at the destination.
    Deciding,
    /// They run at the destination.
    Moved,
    /// They run at the source.
    Stayed,
}

impl Phase {
    /// Whether nothing comes after it.
    #[must_use]
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Moved | Self::Stayed)
    }

    /// Whether it may follow `before`.
    fn follows(self, before: Self) -> bool {
        match before {
            Self::Preparing => matches!(self, Self::Preparing | Self::Deciding | Self::Stayed),
            Self::Deciding => self != Self::Preparing,
            Self::Moved | Self::Stayed => self == before,
        }
    }

    /// Its name.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Deciding => "deciding",
            Self::Moved => "moved",
            Self::Stayed => "stayed",
        }
    }
}

/// The side that a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Side {
    /// Where the tasks come from.
    Source,
    /// Where they go to.
    Destination,
}

impl Side {
    fn directory(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// What is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The migration's number.
    pub id: String,
    /// Counts what has been written.
    pub epoch: u64,
    /// How far it has come.
    pub phase: Phase,
    /// What moves, in words.
    pub subject: String,
    /// The other host: its agent's address, or its name.
    pub peer: String,
    /// The boot of this host that it was written in.
    pub boot: String,
    /// The pid namespace that process ids are of.
    pub pids: u64,
    /// The process that works on it here, or did.
    pub owner: Option<Task>,
    /// The process that looks on at the source, and may have the job that holds the tasks.
    #[serde(default)]
    pub watch: Option<Task>,
    /// The engine's process that makes the tasks at the destination, or did; at the source that of the last round.
    pub worker: Option<Task>,
    /// The tasks here, the root first: those that are stopped at the source, those that are let go at
    /// the destination.
    pub tasks: Vec<Task>,
    /// Those of them, by process id, that were stopped before: they stay so at the source.
    #[serde(default)]
    pub stopped: Vec<i32>,
    /// Whether they may be stopped at the source for the decision: whoever finds that lets them go on when it is known that they
    /// stay.
    #[serde(default)]
    pub is_held: bool,
    /// The container that they are, if a runtime knows one.
    #[serde(default)]
    pub container: Option<Container>,
    /// The bundle that it has at the source.
    #[serde(default)]
    pub bundle: Option<PathBuf>,
    /// Directories of volumes that were made for it.
    #[serde(default)]
    pub volumes: Vec<PathBuf>,
    /// What names these directories, whatever has their paths by now.
    #[serde(default)]
    pub made: Vec<Id>,
    /// When they were born: a number that is free again is soon that of another one. An earlier version has not recorded it.
    #[serde(default)]
    pub born: Vec<Option<SystemTime>>,
    /// The directory of its images here.
    #[serde(default)]
    pub work: Option<PathBuf>,
    /// The agent that it goes to, by its number: only that can tell what has become of it.
    #[serde(default)]
    pub agent: Option<String>,
    /// Who has begun it, at the destination.
    #[serde(default)]
    pub origin: Option<Origin>,
    /// Whether tasks get their pages when they run: at the destination they have moved only when all are there.
    #[serde(default)]
    pub is_lazy: bool,
    /// The user's script that was told that addresses move, and not yet where the tasks are in the end: whoever finds that out
    /// tells it.
    #[serde(default)]
    pub script: Option<String>,
}

/// A record that this process alone writes.
#[derive(Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    record: Record,
    lock: File,
}

impl Ledger {
    /// Begins a record.
    ///
    /// # Errors
    /// If there is one of that number, or it cannot be written.
    pub(crate) fn create(dir: &Path, side: Side, record: Record) -> Result<Self> {
        check_id(&record.id)?;
        let dir = dir.join(side.directory());
        make_private(&dir)?;
        prune(&dir, KEPT, record.origin.as_ref());
        let path = dir.join(format!("{}.json", record.id));
        let lock = lock(&path)?
            .ok_or_else(|| Error::refused(format!("migration {} is in progress", record.id)))?;
        if path.exists() {
            return Err(has_been(&record.id));
        }
        let ledger = Self { path, record, lock };
        ledger.write()?;
        Ok(ledger)
    }

    /// Takes over a record that nobody works on; `None` if somebody does.
    ///
    /// # Errors
    /// If there is none, or it is none.
    pub(crate) fn take_over(dir: &Path, side: Side, id: &str) -> Result<Option<Self>> {
        check_id(id)?;
        let path = dir.join(side.directory()).join(format!("{id}.json"));
        let Some(lock) = lock(&path)? else { return Ok(None) };
        Ok(Some(Self { record: read(&path)?, path, lock }))
    }

    /// What it says.
    #[must_use]
    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    /// A duplicate of what keeps others from working on it: as long as that is open, nobody does.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn lock(&self) -> io::Result<File> {
        self.lock.try_clone()
    }

    /// Goes on to `phase`, and changes what else is to be changed. On disk when this returns.
    ///
    /// # Errors
    /// If that would be a step back, or it cannot be written.
    pub(crate) fn advance(&mut self, phase: Phase, change: impl FnOnce(&mut Record)) -> Result<()> {
        if !phase.follows(self.record.phase) {
            return Err(Error::refused(format!(
                "migration {} is {} and cannot become {}",
                self.record.id,
                self.record.phase.name(),
                phase.name()
            )));
        }
        change(&mut self.record);
        self.record.phase = phase;
        self.record.epoch += 1;
        self.write()
    }

    /// Goes on to what is decided, and done: tasks that stay go on. If that cannot be written, it counts all the same: whoever finds the record as it was finds
    /// out the same by it, and tasks that wait for a disk would run nowhere.
    pub(crate) fn conclude(&mut self, phase: Phase) {
        if let Err(error) = self.advance(phase, |record| record.is_held = false) {
            tracing::warn!("it is {}, and that is not written down: {error}", phase.name());
        }
    }

    fn write(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&self.record)
            .map_err(|e| Error::refused(format!("record of {}: {e}", self.record.id)))?;
        if text.len() > MAX_RECORD {
            let (id, tasks) = (&self.record.id, self.record.tasks.len());
            return Err(Error::refused(format!(
                "record of {id}: it is too long with {tasks} tasks"
            )));
        }
        write_synced(&self.path, &text)
    }
}

/// Writes a file anew, for its owner alone. It is on disk in whole when this returns, or as it was.
///
/// # Errors
/// If the disk is full or does not take it, or the directory is gone.
pub(crate) fn write_synced(path: &Path, text: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    let failed = || format!("record {}", path.display());
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .context(failed)?;
    file.write_all(text).and_then(|()| file.sync_all()).context(failed)?;
    fs::rename(&new, path).context(failed)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).context(failed)
}

/// The record of a migration; `None` if there is none.
///
/// # Errors
/// If the id is none of ours, or the record is damaged.
pub(crate) fn look(dir: &Path, side: Side, id: &str) -> Result<Option<Record>> {
    check_id(id)?;
    let path = dir.join(side.directory()).join(format!("{id}.json"));
    if path.exists() { read(&path).map(Some) } else { Ok(None) }
}

/// All records of one side, those of late last.
///
/// # Errors
/// If the directory cannot be read.
pub(crate) fn all(dir: &Path, side: Side) -> Result<Vec<Record>> {
    Ok(files(&dir.join(side.directory())).iter().filter_map(|path| read(path).ok()).collect())
}

/// Files of records, the oldest first.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.path().extension().is_some_and(|ext| ext == "json"))
        .map(|entry| (entry.metadata().and_then(|meta| meta.modified()).ok(), entry.path()))
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// Removes records of what is over but for the newest, so that there are no more than `kept` of an origin with one that comes.
/// Nobody has what another one has begun forgotten.
fn prune(dir: &Path, kept: usize, origin: Option<&Origin>) {
    let all = files(dir);
    if all.len() < kept {
        return;
    }
    let read = |path: PathBuf| read(&path).ok().map(|record| (path, record));
    let own: Vec<_> = all.into_iter().filter_map(read).collect();
    let own: Vec<_> = own.iter().filter(|(_, it)| it.origin.as_ref() == origin).collect();
    for (path, record) in own.iter().take((own.len() + 1).saturating_sub(kept)) {
        if record.phase.is_over() {
            for path in [path.clone(), path.with_extension("lock")] {
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn read(path: &Path) -> Result<Record> {
    let failed = || format!("record {}", path.display());
    let file = File::open(path).context(failed)?;
    let len = file.metadata().context(failed)?.len();
    if len > MAX_RECORD as u64 {
        return Err(Error::refused(format!("record {} is too long", path.display())));
    }
    serde_json::from_reader(file)
        .map_err(|e| Error::refused(format!("record {}: {e}", path.display())))
}

/// Keeps others from working on the same migration; the kernel lets go when this process ends.
fn lock(path: &Path) -> Result<Option<File>> {
    let path = path.with_extension("lock");
    let failed = || path.display().to_string();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .context(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e).context(failed),
    }
}

/// That a number has been given to another migration.
pub(crate) fn has_been(id: &str) -> Error {
    Error::refused_with(
        format!("migration {id} has been before"),
        "leave --id out, or give another",
    )
}

/// Numbers become names of files.
///
/// # Errors
/// If it is none of ours.
pub(crate) fn check_id(id: &str) -> Result<()> {
    let fits = (1..=64).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let why = || format!("{id:?} is no migration's number");
    match fits {
        true => Ok(()),
        false => Err(Error::refused_with(why(), "letters, digits and - make one, 64 at most")),
    }
}

/// Makes a directory for its owner alone, with all above it.
///
/// # Errors
/// If one of them cannot be made: there is a file of the name, or no right to write there.
pub(crate) fn make_private(dir: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .context(|| dir.display().to_string())
}

/// A number that no other migration has, on any host.
///
/// # Errors
/// If there are no random bytes.
pub(crate) fn new_id() -> Result<String> {
    let mut bytes = [0_u8; 12];
    let file = File::open("/dev/urandom");
    file.and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes))
        .context(|| "/dev/urandom".to_owned())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    pub(crate) fn record() -> Record {
        Record {
            id: new_id().unwrap(),
            epoch: 0,
            phase: Phase::Preparing,
            subject: "process 7".into(),
            peer: "there".into(),
            boot: crate::host::boot(),
            pids: 1,
            owner: None,
            watch: None,
            worker: None,
            tasks: Vec::new(),
            stopped: Vec::new(),
            is_held: false,
            container: None,
            bundle: None,
            work: None,
            volumes: Vec::new(),
            made: Vec::new(),
            born: Vec::new(),
            agent: None,
            origin: None,
            is_lazy: false,
            script: None,
        }
    }

    #[test]
    fn phases_never_go_back() {
        use Phase::{Deciding, Moved, Preparing, Stayed};
        let all = [Preparing, Deciding, Moved, Stayed];
        let allowed = [
            (Preparing, Preparing),
            (Preparing, Deciding),
            (Preparing, Stayed),
            (Deciding, Deciding),
            (Deciding, Moved),
            (Deciding, Stayed),
            (Moved, Moved),
            (Stayed, Stayed),
        ];
        for before in all {
            for after in all {
                assert_eq!(after.follows(before), allowed.contains(&(before, after)));
            }
        }
    }

    /// Its source may still have to ask.
    #[test]
    fn nobody_has_records_of_another_one_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = ["a", "b"].map(|names| Some(Origin::Host(names.to_owned())));
        let begin = |id: &str, origin: &Option<Origin>| {
            let record = Record { id: id.to_owned(), origin: origin.clone(), ..record() };
            let mut ledger = Ledger::create(dir.path(), Side::Destination, record).unwrap();
            ledger.conclude(Phase::Stayed);
        };
        begin("a", &one);
        ["b", "c", "d"].iter().for_each(|id| begin(id, &other));
        prune(&dir.path().join("destination"), 2, other.as_ref());
        let left = all(dir.path(), Side::Destination).unwrap();
        let left: Vec<&str> = left.iter().map(|record| record.id.as_str()).collect();
        assert_eq!(left, ["a", "d"]);
    }

    #[test]
    fn old_records_of_what_is_over_go() {
        let dir = tempfile::tempdir().unwrap();
        for (id, phase) in [
            ("a", Phase::Stayed),
            ("b", Phase::Preparing),
            ("c", Phase::Stayed),
            ("d", Phase::Stayed),
        ] {
            let first = Record { id: id.into(), ..record() };
            Ledger::create(dir.path(), Side::Source, first)
                .unwrap()
                .advance(phase, |_| {})
                .unwrap();
        }
        let dir = dir.path().join("source");
        prune(&dir, 2, None);
        let mut left: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|it| it.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["b.json", "b.lock", "d.json", "d.lock"]);
    }

    /// Tasks that are stopped by it would wait for ever.
    #[test]
    fn what_is_written_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let first = record();
        let id = first.id.clone();
        let mut ledger = Ledger::create(dir.path(), Side::Source, first).unwrap();
        let tasks = (1..=100_000).map(|pid| Task { pid, start: 1 << 40 }).collect();
        ledger.advance(Phase::Deciding, |record| record.tasks = tasks).unwrap();
        let read = || look(dir.path(), Side::Source, &id).unwrap().unwrap();
        assert_eq!(read().tasks.len(), 100_000);
        let long = || "x".repeat(MAX_RECORD);
        let error = ledger.advance(Phase::Deciding, |record| record.subject = long()).unwrap_err();
        assert!(error.to_string().contains("too long with 100000 tasks"), "{error}");
        assert_eq!(read().subject, "process 7");
    }

    #[test]
    fn a_record_is_there_for_who_comes_next() {
        let dir = tempfile::tempdir().unwrap();
        let first = record();
        let id = first.id.clone();
        let mut ledger = Ledger::create(dir.path(), Side::Source, first).unwrap();
        assert!(Ledger::take_over(dir.path(), Side::Source, &id).unwrap().is_none());
        ledger.advance(Phase::Deciding, |record| record.pids = 2).unwrap();
        drop(ledger);
        // A program that another test starts at this moment has all descriptors until it is executed.
        let mut next = loop {
            if let Some(next) = Ledger::take_over(dir.path(), Side::Source, &id).unwrap() {
                break next;
            }
        };
        assert_eq!(
            (next.record().phase, next.record().epoch, next.record().pids),
            (Phase::Deciding, 1, 2)
        );
        next.advance(Phase::Stayed, |_| {}).unwrap();
        assert!(next.advance(Phase::Moved, |_| {}).is_err());
        let found = look(dir.path(), Side::Source, &id).unwrap().unwrap();
        assert_eq!(found.phase, Phase::Stayed);
        assert!(look(dir.path(), Side::Destination, &id).unwrap().is_none());
        assert!(look(dir.path(), Side::Source, "../x").is_err());
    }
}
