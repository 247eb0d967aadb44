//! One round: a job of the engine sends pages, and all other images follow.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use torpor_images::ImageDir;
use torpor_worker::{Event, Outcome, Worker};

use super::Source;
use super::link::{Happening, Sent, unexpected};
use crate::address::{self, Stage};
use crate::engine::{self, PAGES, POST_DUMP, WORK, judge, over_pages};
use crate::error::{Error, Result};
use crate::record::{Phase, make_private};
use crate::report::Round;
use crate::runtime::{self, Call, Container};
use crate::task::{self, Task};
use crate::wire::message::{Reply, Request, RoundKind};

/// What a job fails with whose connection for pages is closed at its other end.
const CUT_OFF: [Errno; 2] = [Errno::PIPE, Errno::CONNRESET];
/// The option of a dump that puts files in memory into the images as they are.
pub(super) const STORE: &str = "--store-tmpfs";

impl Source<'_> {
    /// A round of tasks that run.
    pub(super) fn round(&mut self, number: u32) -> Result<Round> {
        let (start, sent) = (Instant::now(), self.link.meter.sent());
        let held = self.link.meter.held();
        let mut worker = self.start_round(number, RoundKind::Running)?;
        let outcome = loop {
            match self.next(Some(&mut worker))? {
                Happening::Job(Event::Ended(outcome)) => break outcome,
                Happening::Job(_) => {}
                Happening::Said(reply) => return Err(unexpected(reply)),
            }
        };
        let what = if self.is_whole(number) { "dump" } else { "pre-dump" };
        let outcome = self.judge(what, outcome)?;
        let dir = self.round_dir(number);
        let images = self.link.send_images(&dir, number, Some(&self.cancel))?;
        let mut round = Round {
            start,
            pages: pages(&outcome),
            bytes: self.link.meter.sent() - sent,
            time: start.elapsed(),
            held: Duration::ZERO,
            frozen: frozen(&outcome),
        };
        self.arrived(number)?;
        (round.time, round.held) = (start.elapsed(), self.link.meter.held() - held);
        if self.is_whole(number) {
            self.note_images(number, images)?;
        }
        Ok(round)
    }

    /// What has become of a job that sends pages. If nobody took them any more, the destination says why.
    fn judge(&mut self, what: &str, outcome: Outcome) -> Result<Outcome> {
        let is_cut_off = CUT_OFF.iter().any(|errno| errno.raw_os_error() == outcome.errno);
        judge(what, outcome).map_err(|error| {
            let why = if is_cut_off { self.link.last_word() } else { None };
            why.unwrap_or(error)
        })
    }

    /// A round has brought all images. Those that are sealed, for whatever reason, differ as a whole from the next ones.
    fn note_images(&mut self, number: u32, sent: Sent) -> Result<()> {
        let dir = self.round_dir(number);
        let images = ImageDir::open(&dir).and_then(|images| images.is_sealed());
        let is_sealed = images.map_err(|error| Error::refused(error.to_string()))?;
        self.compares_files &= !is_sealed;
        if self.compares_files {
            (self.compared_bytes, self.state_bytes) = (sent.large, sent.small);
            self.link.compare_with(dir, number);
        } else {
            (self.compared_bytes, self.state_bytes) = (0, sent.large + sent.small);
        }
        Ok(())
    }

    /// The round of stopped tasks. They stay stopped when this returns, as long as the job
    /// waits.
    pub(super) fn last_round(&mut self) -> Result<Worker> {
        let number = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX).saturating_add(1);
        let sent = self.link.meter.sent();
        let (worker, start) = self.stop(number)?;
        let complete = self.complete(number, start, sent);
        unless_failed(worker, complete)
    }

    /// Stops the tasks: the job, which waits with its pages written, and when the tasks had to stop.
    fn stop(&mut self, number: u32) -> Result<(Worker, Instant)> {
        self.link.know_earlier(Some(&self.cancel))?;
        let kind = if self.plan.mode.is_lazy() { RoundKind::Lazy } else { RoundKind::Last };
        let mut worker = self.start_round(number, kind)?;
        self.link.send_as_written(&self.round_dir(number));
        let mut start = Instant::now();
        loop {
            match self.next(Some(&mut worker))? {
                Happening::Job(Event::Point { held: true, .. }) => break,
                Happening::Job(Event::Point { name, .. }) => match name.as_str() {
                    "pre-dump" => {
                        start = Instant::now();
                        self.link.meter.mark();
                    }
                    // They are stopped by now. What came before was no page.
                    "network-lock" => self.link.meter.mark(),
                    _ => {}
                },
                Happening::Job(Event::Ended(outcome)) => {
                    self.judge("dump", outcome)?;
                    return Err(Error::refused("dump: it did not wait"));
                }
                Happening::Job(_) => {}
                Happening::Said(reply) => return Err(unexpected(reply)),
            }
        }
        Ok((worker, start))
    }

    /// The tasks are stopped: all of the last round that is no page goes, too. It began at `start`, when `sent` bytes had gone.
    fn complete(&mut self, number: u32, start: Instant, sent: u64) -> Result<()> {
        let complete = Instant::now();
        let first = self.link.meter.first().map_or(complete, |first| first.min(complete));
        self.holder = self.find_holder()?;
        self.write_out()?;
        self.tell_stopped()?;
        // What is sent from here on, until the trees are there, counts as theirs.
        self.link.send_written(Some(&self.cancel))?;
        let files = self.send_files()?;
        if let Some(container) = &self.plan.container {
            container.complete(&self.round_dir(number), self.work.path(), &self.cancel)?;
        }
        self.link.send_images(&self.round_dir(number), number, Some(&self.cancel))?;
        self.arrived(number)?;
        let arrived = Instant::now();
        self.downtime.start = Some(start);
        self.downtime.freeze = first.saturating_duration_since(start);
        self.downtime.transfer = arrived.saturating_duration_since(first.max(start));
        self.downtime.arrived = Some(arrived);
        self.rounds.push(Round {
            start,
            pages: written_pages(&self.statistics_dir(number)),
            bytes: self.link.meter.sent() - sent - files,
            time: arrived.saturating_duration_since(start),
            held: Duration::ZERO,
            frozen: arrived.saturating_duration_since(start),
        });
        Ok(())
    }

    /// Addresses may go. Somebody brings them back if this process is killed.
    fn tell_stopped(&mut self) -> Result<()> {
        if self.plan.script.is_some() {
            let script = self.plan.script.clone();
            self.ledger.advance(Phase::Preparing, |record| record.script = script)?;
        }
        address::run(&self.ledger, Stage::Stopped, Some(&self.cancel))
    }

    /// The process that traces the tasks. The first thread of a process may have ended before others: nobody traces that.
    fn find_holder(&self) -> Result<Option<u64>> {
        match Task::find(self.plan.pid)?.tracer() {
            None => Ok(task::tree(self.plan.pid)?.iter().find_map(Task::tracer)),
            holder => Ok(holder),
        }
    }

    /// Starts the job of a round. Whoever finds out that this process was killed ends it.
    fn start_round(&mut self, number: u32, kind: RoundKind) -> Result<Worker> {
        let worker = self.start_job(number, kind)?;
        // One that has ended says so.
        let task = Task::find(worker.pid().cast_signed()).ok();
        self.ledger.advance(Phase::Preparing, |record| record.worker = task)?;
        Ok(worker)
    }

    fn start_job(&mut self, number: u32, kind: RoundKind) -> Result<Worker> {
        let dir = self.round_dir(number);
        make_private(&dir)?;
        let pages = if kind == RoundKind::Lazy {
            let (carrier, pages) = self.link.carry(number, self.awaited(), &self.cancel)?;
            self.carrier = Some(carrier);
            pages
        } else {
            self.link.join(number, &self.cancel)?
        };
        self.link.say(&Request::Round { number, kind })?;
        let fds = [(PAGES, pages.as_fd()), (WORK, self.work.as_fd())];
        let pid = self.plan.pid.to_string();
        let is_whole = kind != RoundKind::Running || self.is_whole(number);
        if let Some(container) = &self.plan.container {
            let (call, holds) = self.checkpoint(container, number, kind, is_whole);
            return runtime::start(&call, self.work.path(), holds, &fds);
        }
        let command = if is_whole { "dump" } else { "pre-dump" };
        let how = if kind == RoundKind::Lazy { "--lazy-pages" } else { "--page-server" };
        let words = [command, "--tree", &pid, "--images-dir", &number.to_string(), how];
        let mut args: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        args.extend(over_pages());
        if number > 1 {
            args.extend(["--prev-images-dir".to_owned(), format!("../{}", number - 1)]);
        }
        if is_whole {
            args.extend(["--tcp-established", "--file-locks"].map(str::to_owned));
            args.extend(self.store_files());
        }
        if is_whole && kind == RoundKind::Running {
            args.extend(["--leave-running", "--track-mem", "--cow"].map(str::to_owned));
        }
        if self.shell_job {
            args.push("--shell-job".to_owned());
        }
        args.extend(self.more_options());
        let holds: &[&str] = if kind == RoundKind::Running { &[] } else { &[POST_DUMP] };
        engine::start(args, self.work.path(), holds, &fds)
    }

    /// Whether a round of tasks that run brings more than pages: a tree can only be built by a whole
    /// dump, so the first round is one. So it is if files in memory are to come before the last round.
    fn is_whole(&self, number: u32) -> bool {
        match self.plan.builds_early() {
            true => number == 1 || self.plan.full_state,
            false => number == 1 && self.brings_files,
        }
    }

    /// The option of a whole dump of which files in memory are compared with those of another.
    fn store_files(&self) -> Option<String> {
        self.compares_files.then(|| STORE.to_owned())
    }

    /// A round of a container: its runtime has the engine dump it.
    fn checkpoint(
        &self,
        container: &Container,
        number: u32,
        kind: RoundKind,
        is_whole: bool,
    ) -> (Call, &'static [&'static str]) {
        let dir = self.round_dir(number).display().to_string();
        let work = self.work.path().display().to_string();
        let mut words: Vec<String> =
            ["--image-path", &dir, "--work-path", &work].map(str::to_owned).to_vec();
        if number > 1 {
            words.extend(["--parent-path".to_owned(), format!("../{}", number - 1)]);
        }
        words.extend(container.words().iter().map(|&word| word.to_owned()));
        // The runtime says whether pages are fetched later, or it is taken for no.
        if kind == RoundKind::Lazy {
            words.push("--lazy-pages".to_owned());
        }
        let mut options = vec!["--page-server".to_owned()];
        options.extend(is_whole.then(|| self.store_files()).flatten());
        if !is_whole {
            words.push("--pre-dump".to_owned());
        } else if kind == RoundKind::Running {
            words.push("--leave-running".to_owned());
            options.extend(["--track-mem", "--cow"].map(str::to_owned));
        }
        options.extend(self.more_options());
        let holds: &[&str] = if kind == RoundKind::Running { &[] } else { &[POST_DUMP] };
        (Call::new(&container.inner(), "checkpoint", words, options), holds)
    }

    /// What is the same for all dumps.
    fn more_options(&self) -> impl Iterator<Item = String> {
        let compress = self.plan.compress.then(|| "--ps-compress".to_owned());
        compress.into_iter().chain(self.plan.dump_options.iter().cloned())
    }

    /// Where the dump of a round leaves its statistics.
    fn statistics_dir(&self, number: u32) -> PathBuf {
        match self.plan.container {
            Some(_) => self.work.path().to_owned(),
            None => self.round_dir(number),
        }
    }

    pub(super) fn round_dir(&self, number: u32) -> PathBuf {
        self.work.path().join(number.to_string())
    }

    /// Waits until a round is there in whole.
    fn arrived(&mut self, number: u32) -> Result<()> {
        match self.reply()? {
            Reply::Arrived { number: there } if there == number => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }
}

/// The job that holds the tasks, if what had to be done meanwhile was done.
///
/// # Errors
/// Why it was not: the job has let the tasks go on then.
pub(super) fn unless_failed(worker: Worker, done: Result<()>) -> Result<Worker> {
    match done {
        Ok(()) => Ok(worker),
        Err(error) => {
            let_go(worker);
            Err(error)
        }
    }
}

/// A job that waits lets the tasks go on, and has done so when this returns: if it were ended, somebody else would, some
/// time later.
pub(super) fn let_go(worker: Worker) {
    // It says that somebody said no.
    let done = worker.answer(false).map_err(Error::from);
    let _ = done.and_then(|()| engine::finish("dump", worker));
}

fn statistic(outcome: &Outcome, name: &str) -> u64 {
    outcome.report.statistics.get(name).copied().unwrap_or(0)
}

fn pages(outcome: &Outcome) -> u64 {
    statistic(outcome, "pages_written")
}

fn frozen(outcome: &Outcome) -> Duration {
    Duration::from_micros(statistic(outcome, "frozen_time"))
}

/// What the statistics that a dump has left in its images say.
pub(super) fn written_pages(dir: &Path) -> u64 {
    use torpor_images::kind;
    use torpor_images::proto::StatsEntry;
    let read = || -> torpor_images::Result<Option<StatsEntry>> {
        ImageDir::open(dir)?.read_one(kind::STATS_DUMP, 0).map(Some)
    };
    let stats = read().ok().flatten().and_then(|stats| stats.dump);
    stats.map_or(0, |stats| stats.pages_written + stats.pages_lazy)
}
