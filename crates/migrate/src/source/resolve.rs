//! What becomes of a migration whose command has ended too early, on the host of the source.

use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use torpor_sys::process::set_name;
use torpor_tls::Keys;
use torpor_worker::{Channel, Heir, Worker};

use super::decide::{Verdict, answer, ask_until, go_on, kill};
use crate::address;
use crate::engine::{SELF, wait_readable};
use crate::error::{Context, Error, Result};
use crate::host::{boot, pid_namespace};
use crate::record::{Ledger, Phase, Record, Side, look};
use crate::runtime;
use crate::task::Task;
use crate::wire::Peer;
use crate::wire::frame::BEATS;
use crate::work;

/// How long a command that ends may take to let go of its record.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process that asks the destination may have it.
const TURN: Duration = Duration::from_secs(60);
/// How long the destination is asked in the background.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long at a time: in between somebody else may decide who knows better.
const AT_ONCE: Duration = Duration::from_secs(5);
/// How long it is not asked then.
const BREAK: Duration = Duration::from_millis(500);
/// How often is looked.
const PAUSE: Duration = Duration::from_millis(5);

/// What the watch is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Word {
    /// All is well: it may go.
    Done,
    /// The command lives.
    Beat,
    /// The destination is about to be told to go: tasks there will need the command, whether it hangs for a while or not.
    LetBe,
    /// The same, and the job that holds the tasks comes along, as a descriptor: it waits for the answer that the command may
    /// not live to give.
    Job,
}

/// A process that looks on, and brings a migration to its end if this one is killed or hangs.
#[derive(Debug)]
pub(super) struct Watch {
    /// Its process, if that has not ended yet.
    pub task: Option<Task>,
    channel: Arc<Channel>,
    _alive: Sender<()>,
}

impl Watch {
    /// Starts it.
    ///
    /// # Errors
    /// If the kernel starts no process, or has no socket for it.
    pub(super) fn start(
        state_dir: &Path,
        id: &str,
        patience: u32,
        key_files: &[String],
    ) -> Result<Self> {
        let (ours, theirs) = Channel::pair().context(|| "socketpair".to_owned())?;
        let pid = Command::new(SELF)
            .args(["migrate", "--watch", id, "--patience", &patience.to_string(), "--state-dir"])
            .arg(state_dir)
            .args(key_files)
            .stdin(Stdio::from(theirs.into_socket()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context(|| "start a process that looks on".to_owned())?
            .id();
        let channel = Arc::new(ours);
        let (beats, each) = (Arc::clone(&channel), interval(patience));
        let (alive, ended) = mpsc::channel::<()>();
        thread::spawn(move || {
            while ended.recv_timeout(each) == Err(RecvTimeoutError::Timeout)
                && beats.send(&Word::Beat, &[]).is_ok()
            {}
        });
        Ok(Self { task: Task::find(pid.cast_signed()).ok(), channel, _alive: alive })
    }

    /// The destination is about to be told to go, and from now on this process may hang.
    ///
    /// # Errors
    /// If it lives and cannot be told: it would think that the destination was told nothing.
    pub(super) fn let_be(&self) -> Result<()> {
        self.tell(Word::LetBe, &[])
    }

    /// The destination is about to be told to go, and from now on it gives this job its answer if this process does not: until
    /// then the tasks stay as they are, and their packets are held back.
    ///
    /// # Errors
    /// As [`Watch::let_be`].
    pub(super) fn entrust(&self, job: &Worker) -> Result<()> {
        self.tell(Word::Job, &[job.as_fd()])
    }

    fn tell(&self, word: Word, fds: &[BorrowedFd<'_>]) -> Result<()> {
        match self.channel.send(&word, fds) {
            // If it is gone, it is.
            Err(e) if [BrokenPipe, ConnectionReset].contains(&e.kind()) => Ok(()),
            told => told.context(|| "tell the process that looks on".to_owned()),
        }
    }

    /// There is nothing to look after any more.
    pub(super) fn dismiss(self) {
        // If it is gone, it is.
        let _ = self.channel.send(&Word::Done, &[]);
    }
}

/// How often a process says that it lives.
fn interval(patience: u32) -> Duration {
    Duration::from_secs(patience.into()) / BEATS
}

/// The process that looks on.
///
/// # Errors
/// If a migration that is left to it stays undecided.
pub(crate) fn watch(state_dir: &Path, id: &str, patience: u32, keys: Option<Keys>) -> Result<()> {
    // Without its name it does its work all the same.
    let _ = set_name(c"torpor-watch");
    let failed = || "standard input".to_owned();
    let socket = rustix::stdio::stdin().try_clone_to_owned().context(failed)?;
    let channel = Channel::new(socket);
    let (mut job, mut silent, mut may_hang) = (None, 0, false);
    loop {
        // Counted, not measured: a host that was halted is no command that hangs.
        if wait_readable(&[channel.as_fd()], Some(interval(patience)))? == [true] {
            silent = 0;
            match channel.receive() {
                // A command that says what is no word is not waited for.
                Ok(None) | Err(_) => break,
                Ok(Some((Word::Done, _))) => return Ok(()),
                Ok(Some((Word::LetBe, _))) => may_hang = true,
                Ok(Some((Word::Job, mut sockets))) => job = sockets.pop().map(Heir::new),
                Ok(Some((Word::Beat, _))) => {}
            }
            continue;
        }
        silent += 1;
        if silent == BEATS && !may_hang {
            let owner = look(state_dir, Side::Source, id)?.and_then(|record| record.owner);
            owner.inspect(|owner| owner.signal(Signal::KILL));
        }
    }
    // One that was not told to go cannot do so any more: its line to the command is gone.
    let was_told = may_hang || job.is_some();
    ask_all_day(state_dir, id, keys.as_ref(), (&mut job, !was_told))
}

/// Brings a migration to its end: with `keep_here` as soon as it can, or else whenever the destination answers.
fn ask_all_day(
    state_dir: &Path,
    id: &str,
    keys: Option<&Keys>,
    (job, keep_here): (&mut Option<Heir>, bool),
) -> Result<()> {
    let start = Instant::now();
    // Without a record nobody can know any more what it was.
    while look(state_dir, Side::Source, id)?.is_some() {
        match bring_to_end(state_dir, id, job, keep_here, keys.cloned(), AT_ONCE) {
            Ok(_) => break,
            Err(error) if start.elapsed() > DAY => return Err(error),
            Err(error) => tracing::debug!("{error}"),
        }
        thread::sleep(BREAK);
    }
    Ok(())
}

/// Brings a migration to its end that nobody works on any more; with `keep_here`, without
/// asking the destination. In words, what has become of it.
///
/// # Errors
/// If somebody works on it; if the destination does not answer.
pub(crate) fn resolve(
    state_dir: &Path,
    id: &str,
    keep_here: bool,
    keys: Option<Keys>,
    patience: Duration,
) -> Result<&'static str> {
    bring_to_end(state_dir, id, &mut None, keep_here, keys, patience)
}

/// [`resolve`] by whoever may answer the job that holds the tasks.
fn bring_to_end(
    state_dir: &Path,
    id: &str,
    job: &mut Option<Heir>,
    keep_here: bool,
    keys: Option<Keys>,
    patience: Duration,
) -> Result<&'static str> {
    let mut ledger = take_over(state_dir, id)?;
    let done = settle(&mut ledger, job, keep_here, keys, patience)?;
    // Where the tasks have not ended by its answer, they stay.
    answer(job.take(), false, PATIENCE);
    address::settle(&mut ledger);
    if let Some(dir) = &ledger.record().work {
        work::clear(dir, PATIENCE);
    }
    Ok(done)
}

fn settle(
    ledger: &mut Ledger,
    job: &mut Option<Heir>,
    keep_here: bool,
    keys: Option<Keys>,
    patience: Duration,
) -> Result<&'static str> {
    let record = ledger.record();
    if record.is_held || matches!(record.phase, Phase::Deciding | Phase::Moved) {
        judge_place(record)?;
    }
    match record.phase {
        Phase::Preparing => {
            end_job(record);
            ledger.conclude(Phase::Stayed);
            return Ok("it has stayed here");
        }
        Phase::Moved => {
            kill(ledger, job.take());
            return Ok("it has moved");
        }
        Phase::Stayed => {
            // Whoever wrote that was killed before they went on.
            if record.is_held && record.boot == boot() {
                let_go(ledger, job);
            }
            return Ok("it has stayed here");
        }
        Phase::Deciding => {}
    }
    let was_here = record.boot == boot();
    let verdict = if keep_here {
        Verdict::Here
    } else {
        let address = record.peer.parse().map_err(|why| {
            Error::refused(format!("record of {}: destination {:?}: {why}", record.id, record.peer))
        })?;
        ask_until(&Peer { address, keys }, record, patience)?
    };
    match verdict {
        Verdict::There(_) => {
            ledger.conclude(Phase::Moved);
            kill(ledger, job.take());
            Ok("it has moved")
        }
        Verdict::Here => {
            if keep_here {
                // Nobody but the record knows it then.
                ledger.advance(Phase::Stayed, |_| {})?;
            }
            if !was_here {
                ledger.conclude(Phase::Stayed);
                return Ok("it has not moved, and has ended when this host was restarted");
            }
            let_go(ledger, job);
            Ok("it goes on here")
        }
    }
}

/// Whether the process ids of a record are those of its tasks here. In another pid namespace they are those of others, or of
/// nobody: the tasks would wait for ever.
fn judge_place(record: &Record) -> Result<()> {
    if record.boot != boot() || Some(record.pids) == pid_namespace("self") {
        return Ok(());
    }
    Err(Error::refused_with(
        format!(
            "migration {} was begun in another pid namespace: its tasks are not known here",
            record.id
        ),
        "call it where it was begun: inside of a container, or outside of this one",
    ))
}

/// Ends the job that may have stopped the tasks: it would notice late that nobody waits for it, and its guardian lets them go on at
/// once. Elsewhere, and after a restart of the host, others have its number.
fn end_job(record: &Record) {
    if record.boot != boot() || Some(record.pids) != pid_namespace("self") {
        return;
    }
    record.worker.iter().for_each(|worker| worker.signal(Signal::KILL));
    if let (Some(_), Some(dir)) = (&record.container, &record.work) {
        runtime::end(dir);
    }
}

/// Lets the tasks go on, and writes that down. The job that holds them may be in the hands of the process that looks on, which
/// nobody needs any more: a job that has lost all of those who could give it an answer lets them go.
fn let_go(ledger: &mut Ledger, job: &mut Option<Heir>) {
    let watch = ledger.record().watch.filter(|watch| Task::this().ok().as_ref() != Some(watch));
    match job.take() {
        None => watch.iter().for_each(Task::end),
        job => answer(job, false, PATIENCE),
    }
    go_on(ledger);
    ledger.conclude(Phase::Stayed);
}

fn take_over(state_dir: &Path, id: &str) -> Result<Ledger> {
    let Some(record) = look(state_dir, Side::Source, id)? else {
        return Err(Error::refused(format!("no migration {id} has started here")));
    };
    let start = Instant::now();
    let is_at_work = || record.owner.is_some_and(|owner| owner.lives());
    loop {
        if let Some(ledger) = Ledger::take_over(state_dir, Side::Source, id)? {
            return Ok(ledger);
        }
        if start.elapsed() > if is_at_work() { PATIENCE } else { TURN } {
            return Err(Error::refused(format!("migration {id} is in progress")));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Asks a migration that is in progress to end, and waits until it has. In words, what has
/// become of it.
///
/// # Errors
/// If no migration of that id is in progress here.
pub(crate) fn cancel(state_dir: &Path, id: &str) -> Result<&'static str> {
    let none = || Error::refused(format!("no migration {id} has started here"));
    let record = look(state_dir, Side::Source, id)?.ok_or_else(none)?;
    if let Some(owner) = record.owner.filter(|_| !record.phase.is_over()) {
        judge_place(&record)?;
        owner.signal(Signal::INT);
        while owner.lives() {
            std::thread::sleep(PAUSE);
        }
    }
    match look(state_dir, Side::Source, id)?.ok_or_else(none)?.phase {
        Phase::Stayed => Ok("it goes on here"),
        Phase::Moved => Err(Error::refused("it is too late: it has moved")),
        Phase::Preparing | Phase::Deciding => Err(Error::refused_with(
            "its command has ended too early",
            format!("torpor migrate --resolve {id}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::record::tests::record;

    /// By their process ids somebody else is signalled, or nobody.
    #[test]
    fn who_sees_other_processes_decides_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let task = Task::find(other.id().cast_signed()).unwrap();
        for (phase, pids) in [(Phase::Deciding, 1), (Phase::Moved, 1), (Phase::Preparing, 1)] {
            let (is_held, tasks) = (phase == Phase::Deciding, vec![task]);
            let record = Record { phase, pids, is_held, tasks, owner: Some(task), ..record() };
            let id = record.id.clone();
            drop(Ledger::create(dir.path(), Side::Source, record).unwrap());
            let resolved = resolve(dir.path(), &id, true, None, PATIENCE);
            let is_over = look(dir.path(), Side::Source, &id).unwrap().unwrap().phase.is_over();
            match phase {
                // None of its tasks waits for anybody.
                Phase::Preparing => assert_eq!(resolved.unwrap(), "it has stayed here"),
                _ => {
                    let error = resolved.unwrap_err();
                    assert!(error.to_string().contains("another pid namespace"), "{error}");
                    assert_eq!(is_over, phase == Phase::Moved);
                }
            }
        }
        let begun = Record { pids: 1, owner: Some(task), ..record() };
        let id = begun.id.clone();
        let _ledger = Ledger::create(dir.path(), Side::Source, begun).unwrap();
        let error = cancel(dir.path(), &id).unwrap_err();
        assert!(error.to_string().contains("another pid namespace"), "{error}");
        let is_alive = other.try_wait().unwrap().is_none();
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(is_alive, "it was signalled");
    }
}
