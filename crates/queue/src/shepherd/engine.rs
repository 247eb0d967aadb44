//! Saving a job and bringing it back, each in a worker of its own and on a thread of its
//! own: the shepherd's first thread waits for its own children only, and so never takes
//! a worker's end away from the thread that waits for it.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;
use torpor_images::pagemap::page_size;
use torpor_kernel::proc;
use torpor_worker::{Class, Event, Job, Outcome, Worker};

use super::checkpoint::{self, CheckpointRecord, boot};
use super::digests::{self, Which};
use super::ending::strays;
use super::message::{Saved, Style};
use super::pump::{Input, Output};
use super::work;
use crate::cgroup::Cgroups;
use crate::container::{Container, Last};
use crate::copy::snapshot;
use crate::files::{self, JobDir};
use crate::rlimits::own_niceness;
use crate::spec::User;

/// The largest unlinked file that comes into the images.
const GHOST_LIMIT: &str = "4G";

/// Descriptors of the standard streams in a worker that restores.
const STREAM_NUMBERS: [i32; 3] = [200, 201, 202];

/// A job's three streams.
#[derive(Debug, Clone)]
pub(crate) struct Streams {
    /// Standard input, if the client sends any.
    pub input: Option<Arc<Input>>,
    /// Standard output.
    pub out: Arc<Output>,
    /// Standard error.
    pub err: Arc<Output>,
}

/// A checkpoint does not build on more than so many others, unless its job gives way or goes: each must be kept, and read.
const MOST_DEPTH: u32 = 8;

/// From so many bytes of memory on, a job runs while its memory is still coming.
const LAZY_FROM: u64 = 128 << 20;

/// How long a save waits for memory that is still coming in.
const LAZY_PATIENCE: Duration = Duration::from_secs(120);

/// By how much less nice than other things what saves a job that gives way is: it gets nine parts of a processor where they
/// get one (sched(7)).
const FIRST: i32 = 10;

/// How long what undoes the work of a worker that was lost may take: it waits for the job's processes itself.
const GUARD_PATIENCE: Duration = Duration::from_secs(120);

/// The process that does that.
const GUARD: &str = "torpor-guard";

/// The process that brings in the memory of a job that runs already.
pub(crate) const PAGER: &str = "torpor-lazy";

/// A checkpoint that the next one can build on: changes of memory are counted since.
#[derive(Debug, Clone)]
pub(crate) struct Base {
    record: CheckpointRecord,
    at: Instant,
}

/// Whether a checkpoint may build on one that builds on `depth` others. For who gives way somebody waits, and nothing
/// builds on what is saved then.
fn may_build_on(depth: u32, keep: bool, deep: bool) -> bool {
    depth < MOST_DEPTH || !keep || deep
}

/// How saving went.
#[derive(Debug)]
pub(crate) enum SaveEnd {
    /// It is saved; the record is not on stable storage yet. The next one can build on it
    /// if the job runs on.
    Saved(Saved, Option<Box<Base>>),
    /// It is saved, and whoever did that was lost when it was about to end the job, or while it did: a part of it may have
    /// ended.
    Lost,
    /// It is not, and the job goes on.
    Failed {
        /// Whether another try is useless.
        refused: bool,
        /// What the engine said.
        text: String,
    },
}

/// A checkpoint that was made, and what the next one can build on.
type SavedOnBase = (Saved, Option<Box<Base>>);

/// What is to be saved.
#[derive(Debug)]
pub(crate) struct Save {
    /// The job's directory.
    pub dir: JobDir,
    /// The number of the checkpoint.
    pub seq: u64,
    /// The job's first process.
    pub root: i32,
    /// Whether it runs on.
    pub keep: bool,
    /// Rounds before the last.
    pub rounds: u32,
    /// Whether the checkpoint may build on any number of others.
    pub deep: bool,
    /// How the images are written.
    pub style: Style,
    /// The checkpoint that this one builds on, if it can.
    pub base: Option<Box<Base>>,
    /// Its streams.
    pub streams: Streams,
    /// Its cgroups.
    pub cgroups: Cgroups,
    /// The container that it is, if it is one.
    pub container: Option<Container>,
}

impl Save {
    /// Saves the job on a thread; `done` gets the outcome there.
    pub(crate) fn start(self, done: impl FnOnce(SaveEnd) + Send + 'static) {
        thread::spawn(move || done(self.run()));
    }

    fn run(&self) -> SaveEnd {
        if !self.keep {
            go_first();
        }
        let begun = Instant::now();
        let dir = self.dir.checkpoint(self.seq);
        let _ = files::remove_trees(&[&dir]);
        let done = wait_for_memory().and_then(|()| self.save(&dir));
        if self.is_lost(&done, &dir) {
            return SaveEnd::Lost;
        }
        if !matches!(done, Ok(Ok(_))) {
            // It is of no use, and may be as large as the job. But it notes what was locked, and what undoes that may be killed.
            wait_for_guard(|| false);
            let _ = files::remove_trees(&[dir]);
        }
        match done {
            Ok(Ok((mut saved, base))) => {
                saved.took_us = micros(begun);
                SaveEnd::Saved(saved, base)
            }
            Ok(Err(outcome)) => SaveEnd::Failed {
                refused: matches!(outcome.class, Class::Refused | Class::Usage),
                text: with_hint(&outcome),
            },
            Err(e) => SaveEnd::Failed { refused: false, text: e.to_string() },
        }
    }

    /// Whether nobody says what became of a job that was to end when it was saved, and it does end. Its record is there as
    /// soon as the images are complete, and nothing of it ends before. A moment later either all of it ends or all of it
    /// goes on, whatever becomes of the worker.
    fn is_lost(&self, done: &io::Result<Result<SavedOnBase, Outcome>>, dir: &Path) -> bool {
        let unsaid = match done {
            Ok(Ok(_)) => false,
            Ok(Err(outcome)) => outcome.class == Class::Died,
            Err(_) => true,
        };
        unsaid && !self.keep && checkpoint::record(dir).is_ok() && self.ends()
    }

    /// Whether the job ends, as its processes are told by what undoes the work of its worker.
    fn ends(&self) -> bool {
        // A job that ends already goes on to end, whatever the guard still does.
        wait_for_guard(|| is_ending(self.root));
        // One that has taken its signal a moment ago does not show that.
        (0..20).any(|_| {
            let ends = is_ending(self.root);
            if !ends {
                thread::sleep(Duration::from_millis(10));
            }
            ends
        })
    }

    fn save(&self, dir: &Path) -> io::Result<Result<SavedOnBase, Outcome>> {
        // What leaves a container's tree is its init's.
        let strays = if self.container.is_none() { strays(self.root) } else { Vec::new() };
        if let Some((pid, name)) = strays.first() {
            let text = format!(
                "process {pid} ({name}) has left the job's tree, and would not be in the checkpoint"
            );
            return Ok(Err(Outcome::failed(Class::Refused, text)));
        }
        fs::DirBuilder::new().mode(0o700).create(dir)?;
        let base = self.usable_base();
        let mut before = base.map(|base| {
            format!("../checkpoint-{}/{}", base.record.seq, base.record.images.display())
        });
        let mut written = 0;
        for round in 1..=self.rounds {
            let name = format!("round-{round}");
            let outcome = self.round(dir, &name, before.as_deref())?;
            if outcome.class != Class::Done {
                return Ok(Err(outcome));
            }
            written += bytes_written(&outcome);
            before = Some(name);
        }
        let name = format!("round-{}", self.rounds + 1);
        let mut record = CheckpointRecord {
            images: name.clone().into(),
            base: base.map(|base| base.record.seq),
            depth: base.map_or(0, |base| base.record.depth + 1),
            identity: self.style.identity.clone(),
            ..self.record()?
        };
        let outcome = self.last_round(dir, &name, before.as_deref(), &mut record)?;
        if outcome.class != Class::Done {
            return Ok(Err(outcome));
        }
        if self.keep {
            self.note(&record)?;
        }
        let frozen_us = outcome.report.statistics.get("frozen_time").copied().unwrap_or(0);
        let bytes = files::size(dir, &mut HashSet::new()).unwrap_or(0);
        let since = base.map(|base| base.at.elapsed().as_millis());
        let saved = Saved {
            seq: self.seq,
            frozen_us,
            took_us: 0,
            bytes,
            written: written + bytes_written(&outcome),
            memory: record.memory,
            since_ms: since.and_then(|millis| u64::try_from(millis).ok()),
            cow_bytes: outcome.report.statistics.get("cow_bytes").copied(),
            ended_tasks: !self.keep,
        };
        let next = self.keep.then(|| Box::new(Base { record, at: Instant::now() }));
        Ok(Ok((saved, next)))
    }

    /// The checkpoint before, if this one may build on it.
    fn usable_base(&self) -> Option<&Base> {
        self.base.as_deref().filter(|base| {
            let dir = self.dir.checkpoint(base.record.seq);
            may_build_on(base.record.depth, self.keep, self.deep)
                && base.record.identity == self.style.identity
                && dir.join(&base.record.images).exists()
        })
    }

    /// Keeps the job's own files, if it has any, with the memory of the same moment.
    fn keep_files(&self) -> io::Result<()> {
        for (from, name) in work::own(&self.dir).into_iter().filter(|(from, _)| from.exists()) {
            let mut before = (1..self.seq).rev().map(|seq| self.dir.checkpoint(seq).join(name));
            let before = before.find(|path| path.exists());
            let to = self.dir.checkpoint(self.seq).join(name);
            snapshot(&from, before.as_deref(), &to)?;
        }
        Ok(())
    }

    fn record(&self) -> io::Result<CheckpointRecord> {
        let pipes = [
            self.streams.input.as_ref().map_or(Ok(0), |input| input.inode())?,
            self.streams.out.inode()?,
            self.streams.err.inode()?,
        ];
        let (seq, root) = (self.seq, self.root);
        let memory = self.cgroups.memory().unwrap_or(0);
        Ok(CheckpointRecord {
            seq,
            root,
            pipes,
            memory,
            boot: boot(),
            ..CheckpointRecord::default()
        })
    }

    /// Says that the checkpoint is complete.
    fn note(&self, record: &CheckpointRecord) -> io::Result<()> {
        let place = self.dir.checkpoint(self.seq).join(checkpoint::RECORD);
        fs::write(place, serde_json::to_vec(record)?)
    }

    fn args(&self, command: &str, images: &Path, before: Option<&str>) -> Vec<String> {
        let mut args = vec![
            command.to_owned(),
            "--tree".to_owned(),
            self.root.to_string(),
            "--images-dir".to_owned(),
            images.display().to_string(),
            "--no-default-config".to_owned(),
        ];
        if let Some(before) = before {
            args.extend(["--prev-images-dir".to_owned(), format!("../{before}")]);
        }
        args.extend(self.styled());
        if let Some(freezer) = self.cgroups.freezer() {
            args.extend(["--freeze-cgroup".to_owned(), freezer.display().to_string()]);
        }
        args
    }

    /// Options for how the images are written.
    fn styled(&self) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(method) = &self.style.compress {
            args.extend(["--compress".to_owned(), method.clone()]);
        }
        if let Some(recipient) = &self.style.recipient {
            args.extend(["--encrypt", "--recipient", recipient].map(str::to_owned));
        }
        if let Some(identity) = &self.style.identity {
            args.extend(["--identity".to_owned(), identity.display().to_string()]);
        }
        args
    }

    fn round(&self, dir: &Path, name: &str, before: Option<&str>) -> io::Result<Outcome> {
        let images = dir.join(name);
        fs::create_dir(&images)?;
        if let Some(container) = &self.container {
            let before = before.map(|before| format!("../{before}"));
            let worker = container.save(&images, before.as_deref(), None, self.styled())?;
            return follow(worker, |_, _| Ok(()));
        }
        let mut args = self.args("pre-dump", &images, before);
        args.push("--track-mem".to_owned());
        run(&Job { args, dir: dir.to_owned(), ..Job::default() }, &[], |_, _| Ok(()))
    }

    fn last_round(
        &self,
        dir: &Path,
        name: &str,
        before: Option<&str>,
        record: &mut CheckpointRecord,
    ) -> io::Result<Outcome> {
        let images = dir.join(name);
        fs::create_dir(&images)?;
        let mut is_noted = false;
        let at_rest = |_: &str, _| {
            // It has run on since, or is about to.
            if !std::mem::replace(&mut is_noted, true) {
                // The job stands still: what it has written and read so far is exact.
                record.written = [self.streams.out.drain()?, self.streams.err.drain()?];
                if let Some(input) = &self.streams.input {
                    record.read = input.consumed()?;
                }
                record.last_pid = last_pid();
                self.keep_files()?;
                if !self.keep {
                    // The images are complete, and a job that cannot be noted goes on.
                    self.note(record)?;
                }
            }
            Ok(())
        };
        let track = before.is_some() || self.keep;
        if let Some(container) = &self.container {
            let before = before.map(|before| format!("../{before}"));
            let mut options = self.styled();
            options.extend(["--ghost-limit", GHOST_LIMIT].map(str::to_owned));
            let last = Some(Last { keep: self.keep, track });
            return follow(container.save(&images, before.as_deref(), last, options)?, at_rest);
        }
        let mut args = self.args("dump", &images, before);
        for word in ["--file-locks", "--link-remap", "--tcp-established", "--ghost-limit"] {
            args.push(word.to_owned());
        }
        args.push(GHOST_LIMIT.to_owned());
        if track {
            args.push("--track-mem".to_owned());
        }
        if self.keep {
            args.extend(["--leave-running", "--cow"].map(str::to_owned));
        }
        let holds = at_rest_of(self.keep).iter().map(|&point| point.to_owned()).collect();
        let job = Job { args, dir: dir.to_owned(), holds, ..Job::default() };
        run(&job, &[], at_rest)
    }
}

/// Has what this thread does, and what it starts, go before jobs at work, as far as it may: for a job that gives way
/// somebody waits, and the jobs compute on afterwards.
fn go_first() {
    let _ = setpriority_process(None, own_niceness() - FIRST);
}

/// The points of a dump at which a job stands still, and what belongs to the moment can be noted; the
/// first that comes counts. One that is copied on write runs on before its images are complete.
#[must_use]
fn at_rest_of(keep: bool) -> &'static [&'static str] {
    if keep { &["network-unlock", "post-dump"] } else { &["post-dump"] }
}

/// Bytes of memory that a round has written.
fn bytes_written(outcome: &Outcome) -> u64 {
    let pages = |name| outcome.report.statistics.get(name).copied().unwrap_or(0);
    (pages("pages_written") + pages("shpages_written")).saturating_mul(page_size())
}

/// Whether a job runs while so much memory of it is still coming.
#[must_use]
pub(crate) fn is_lazy(memory: u64, container: bool, sealed: bool) -> bool {
    memory >= LAZY_FROM && !container && !sealed
}

/// Waits until a job that was brought back has all of its memory: before, it cannot be
/// saved.
fn wait_for_memory() -> io::Result<()> {
    let begun = Instant::now();
    while is_memory_coming() {
        if begun.elapsed() > LAZY_PATIENCE {
            return Err(io::Error::other("its memory is still being brought in"));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Waits until the work of workers that have ended is undone, or that is enough.
fn wait_for_guard(is_enough: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_enough() && super::ending::is_at_work(GUARD) && begun.elapsed() < GUARD_PATIENCE {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process has ended, or will as soon as it runs: one that is frozen does not.
pub(super) fn is_ending(pid: i32) -> bool {
    let Ok(stat) = proc::stat(pid) else { return true };
    let is_killed = || proc::status(pid).map_or(true, |status| status.is_killed());
    stat.has_ended() || stat.is_ending() || is_killed()
}

/// Whether a pager is at work in this pid namespace.
#[must_use]
pub(crate) fn is_memory_coming() -> bool {
    super::ending::is_at_work(PAGER)
}

/// The process id that was given out last in this pid namespace.
fn last_pid() -> u64 {
    let text = fs::read_to_string("/proc/sys/kernel/ns_last_pid").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// What is to be brought back.
#[derive(Debug)]
pub(crate) struct Wake {
    /// The job's directory.
    pub dir: JobDir,
    /// The number of the checkpoint.
    pub seq: u64,
    /// Whether its digests were compared just now.
    pub verified: bool,
    /// The job's streams.
    pub streams: Streams,
    /// The job's cgroups.
    pub cgroups: Cgroups,
    /// The container that the job is, if it is one.
    pub container: Option<Container>,
}

/// Why a job was not brought back.
#[derive(Debug)]
pub(crate) struct NotWoken {
    /// A sentence.
    pub text: String,
    /// The checkpoint that is damaged, if that is why.
    pub damaged: Option<u64>,
}

impl Wake {
    /// Brings the job back on a thread; `done` gets the outcome there: how long it took,
    /// or why it failed.
    pub(crate) fn start(self, done: impl FnOnce(Result<u64, NotWoken>) + Send + 'static) {
        thread::spawn(move || done(self.run()));
    }

    fn run(&self) -> Result<u64, NotWoken> {
        let begun = Instant::now();
        let failed = |text: String| NotWoken { text, damaged: None };
        if !self.verified {
            self.verify()?;
        }
        match self.wake() {
            Ok(outcome) if outcome.class == Class::Done => Ok(micros(begun)),
            Ok(outcome) => Err(failed(with_hint(&outcome))),
            Err(e) => Err(failed(e.to_string())),
        }
    }

    /// The job's own directory is still as it has left it.
    fn verify(&self) -> Result<(), NotWoken> {
        let record = checkpoint::record(&self.dir.checkpoint(self.seq)).unwrap_or_default();
        let (container, sealed) = (self.container.is_some(), record.identity.is_some());
        let lazy = is_lazy(record.memory, container, sealed);
        let which = if lazy { Which::Structure } else { Which::Images };
        digests::verify(&self.dir, self.seq, which)
            .map_err(|damage| NotWoken { text: damage.text, damaged: Some(damage.seq) })
    }

    fn wake(&self) -> io::Result<Outcome> {
        let place = self.dir.checkpoint(self.seq);
        let record = checkpoint::record(&place)?;
        let images = place.join(&record.images);
        let identity = record.identity.iter();
        let identity =
            identity.flat_map(|key| ["--identity".to_owned(), key.display().to_string()]);
        let ends: [Option<&OwnedFd>; 3] = [
            self.streams.input.as_ref().map(|input| input.job_end()),
            Some(self.streams.out.job_end()),
            Some(self.streams.err.job_end()),
        ];
        if let Some(container) = &self.container {
            return follow(container.wake(&images, ends, identity.collect())?, |_, _| Ok(()));
        }
        let mut args: Vec<String> = ["restore", "--restore-detached", "--file-locks"]
            .into_iter()
            .chain(["--tcp-established", "--no-default-config", "--images-dir"])
            .map(str::to_owned)
            .collect();
        args.push(images.display().to_string());
        args.extend(identity);
        args.extend(files_as(&super::read_spec(&self.dir)?.user));
        if is_lazy(record.memory, false, record.identity.is_some()) {
            args.push("--lazy-pages".to_owned());
        }
        let (mut fds, mut descriptors): (Vec<BorrowedFd<'_>>, Vec<i32>) = (Vec::new(), Vec::new());
        for ((end, inode), number) in ends.into_iter().zip(record.pipes).zip(STREAM_NUMBERS) {
            let Some(end) = end else { continue };
            fds.push(std::os::fd::AsFd::as_fd(end));
            descriptors.push(number);
            args.extend(["--inherit-fd".to_owned(), format!("fd[{number}]:pipe[{inode}]")]);
        }
        let holds = vec!["pre-restore".to_owned()];
        let job = Job { args, dir: place, holds, descriptors, ..Job::default() };
        run(&job, &fds, |point, worker| {
            // What the worker makes from here on is in the job's cgroups.
            if point == "pre-restore" { self.cgroups.enter(worker) } else { Ok(()) }
        })
    }
}

/// Files are opened again with the rights of the job's user: while the job sleeps that user can lay out links to what is
/// another's where its files were. Root may all.
fn files_as(User { uid, gid, groups }: &User) -> Vec<String> {
    if *uid == 0 {
        return Vec::new();
    }
    let groups: String = groups.iter().map(|group| format!(",{group}")).collect();
    vec!["--files-as".to_owned(), format!("{uid}:{gid}{groups}")]
}

/// Runs a worker of this program's own engine to its end.
fn run(
    job: &Job,
    fds: &[BorrowedFd<'_>],
    at: impl FnMut(&str, u32) -> io::Result<()>,
) -> io::Result<Outcome> {
    let program = Path::new("/proc/self/exe");
    follow(Worker::start_with(program, job, fds).map_err(io::Error::other)?, at)
}

/// Follows a worker to its end. At each point at which it waits `at` says, by an error, that
/// it is not to go on.
fn follow(
    mut worker: Worker,
    mut at: impl FnMut(&str, u32) -> io::Result<()>,
) -> io::Result<Outcome> {
    let mut objection = None;
    loop {
        match worker.next_event().map_err(io::Error::other)? {
            Event::Point { name, held: true, .. } => {
                let answer = at(&name, worker.pid());
                let go_on = answer.is_ok();
                objection = objection.or(answer.err());
                // Fails if the worker has died: its outcome says so.
                let _ = worker.answer(go_on);
            }
            Event::Ended(outcome) => {
                return objection.map_or(Ok(outcome), Err);
            }
            _ => {}
        }
    }
}

fn with_hint(outcome: &Outcome) -> String {
    match &outcome.hint {
        Some(hint) => format!("{} ({hint})", outcome.text),
        None => outcome.text.clone(),
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is sent ahead of a job that moves live builds on what was sent before, or all of it would be sent again.
    #[test]
    fn only_a_checkpoint_in_passing_builds_on_few() {
        assert!(may_build_on(MOST_DEPTH - 1, true, false));
        assert!(!may_build_on(MOST_DEPTH, true, false));
        assert!(may_build_on(MOST_DEPTH, true, true) && may_build_on(MOST_DEPTH, false, false));
    }

    /// The shepherd itself, and the job that it begins again later, are as they were.
    #[test]
    fn only_the_thread_that_saves_goes_first() {
        let before = own_niceness();
        let first = thread::spawn(|| {
            go_first();
            own_niceness()
        });
        // Without the right to be less nice all stays as it was.
        assert!([before, before - FIRST].contains(&first.join().unwrap()));
        assert_eq!(own_niceness(), before);
    }
}
