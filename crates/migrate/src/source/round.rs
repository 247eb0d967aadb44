//! One round: a job of the engine sends pages, and all other images follow.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use torpor_worker::{Event, Outcome, Worker};

use super::Source;
use super::link::{Happening, unexpected};
use crate::address::{self, Stage};
use crate::engine::{self, POST_DUMP, judge, over_pages};
use crate::error::{Context, Error, Result};
use crate::record::make_private;
use crate::report::Round;
use crate::runtime::{self, Call, Container};
use crate::wire::frame::MAX_FRAME;
use crate::wire::message::{Kind, Reply, Request, is_image};

impl Source<'_> {
    /// A round of tasks that run.
    pub(super) fn round(&mut self, number: u32) -> Result<Round> {
        let (start, sent) = (Instant::now(), self.link.meter.sent());
        let mut worker = self.start_round(number, Kind::Running)?;
        let outcome = loop {
            match self.next(Some(&mut worker))? {
                Happening::Job(Event::Ended(outcome)) => break outcome,
                Happening::Job(_) => {}
                Happening::Said(reply) => return Err(unexpected(reply)),
            }
        };
        let outcome = judge("pre-dump", outcome)?;
        self.send_images(number)?;
        let mut round = Round {
            pages: pages(&outcome),
            bytes: self.link.meter.sent() - sent,
            time: start.elapsed(),
            frozen: frozen(&outcome),
        };
        self.arrived(number)?;
        round.time = start.elapsed();
        Ok(round)
    }

    /// The round of stopped tasks. They stay stopped when this returns, as long as the job
    /// waits.
    pub(super) fn last_round(&mut self) -> Result<Worker> {
        let number = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX).saturating_add(1);
        let sent = self.link.meter.sent();
        let kind = if self.plan.mode.is_lazy() { Kind::Lazy } else { Kind::Last };
        let mut worker = self.start_round(number, kind)?;
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
                    judge("dump", outcome)?;
                    return Err(Error::refused("dump: it did not wait"));
                }
                Happening::Job(_) => {}
                Happening::Said(reply) => return Err(unexpected(reply)),
            }
        }
        let complete = Instant::now();
        let first = self.link.meter.first().map_or(complete, |first| first.min(complete));
        self.has_stopped = true;
        address::run(self.plan.script.as_deref(), Stage::Stopped, &self.id)?;
        self.send_images(number)?;
        self.arrived(number)?;
        let arrived = Instant::now();
        self.downtime.start = Some(start);
        self.downtime.freeze = first.saturating_duration_since(start);
        self.downtime.transfer = arrived.saturating_duration_since(first.max(start));
        self.downtime.arrived = Some(arrived);
        self.rounds.push(Round {
            pages: written_pages(&self.statistics_dir(number)),
            bytes: self.link.meter.sent() - sent,
            time: arrived.saturating_duration_since(start),
            frozen: arrived.saturating_duration_since(start),
        });
        Ok(worker)
    }

    fn start_round(&mut self, number: u32, kind: Kind) -> Result<Worker> {
        let dir = self.round_dir(number);
        make_private(&dir)?;
        let pages = self.link.join(number)?;
        self.link.say(&Request::Round { number, kind })?;
        let pid = self.plan.pid.to_string();
        // A tree can only be built by a whole dump: the first round is one, of tasks that run on.
        let is_whole = kind != Kind::Running
            || self.plan.mode.builds_early() && (number == 1 || self.plan.full_state);
        if let Some(container) = &self.plan.container {
            let (call, holds) = self.checkpoint(container, number, kind, is_whole);
            return runtime::start(&call, &self.work.0, holds, Some(pages.as_fd()));
        }
        let command = if is_whole { "dump" } else { "pre-dump" };
        let how = if kind == Kind::Lazy { "--lazy-pages" } else { "--page-server" };
        let words = [command, "--tree", &pid, "--images-dir", &number.to_string(), how];
        let mut args: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        args.extend(over_pages());
        if number > 1 {
            args.extend(["--prev-images-dir".to_owned(), format!("../{}", number - 1)]);
        }
        if is_whole {
            args.extend(["--tcp-established", "--file-locks"].map(str::to_owned));
        }
        if is_whole && kind == Kind::Running {
            args.extend(["--leave-running", "--track-mem", "--cow"].map(str::to_owned));
        }
        if self.shell_job {
            args.push("--shell-job".to_owned());
        }
        args.extend(self.plan.dump_options.iter().cloned());
        let holds: &[&str] = if kind == Kind::Running { &[] } else { &[POST_DUMP] };
        engine::start(args, &self.work.0, holds, Some(pages.as_fd()))
    }

    /// A round of a container: its runtime has the engine dump it.
    fn checkpoint(
        &self,
        container: &Container,
        number: u32,
        kind: Kind,
        is_whole: bool,
    ) -> (Call, &'static [&'static str]) {
        let dir = self.round_dir(number).display().to_string();
        let work = self.work.0.display().to_string();
        let mut words: Vec<String> =
            ["--image-path", &dir, "--work-path", &work].map(str::to_owned).to_vec();
        if number > 1 {
            words.extend(["--parent-path".to_owned(), format!("../{}", number - 1)]);
        }
        words.extend(runtime::WORDS.map(str::to_owned));
        let how = if kind == Kind::Lazy { "--lazy-pages" } else { "--page-server" };
        let mut options = vec![how.to_owned()];
        if !is_whole {
            words.push("--pre-dump".to_owned());
        } else if kind == Kind::Running {
            words.push("--leave-running".to_owned());
            options.extend(["--track-mem", "--cow"].map(str::to_owned));
        }
        options.extend(self.plan.dump_options.iter().cloned());
        let (container, action) = (container.clone(), "checkpoint".to_owned());
        let holds: &[&str] = if kind == Kind::Running { &[] } else { &[POST_DUMP] };
        (Call { container, action, words, options }, holds)
    }

    /// Where the dump of a round leaves its statistics.
    fn statistics_dir(&self, number: u32) -> PathBuf {
        match self.plan.container {
            Some(_) => self.work.0.clone(),
            None => self.round_dir(number),
        }
    }

    fn round_dir(&self, number: u32) -> PathBuf {
        self.work.0.join(number.to_string())
    }

    /// Sends all images of a round that are not pages.
    fn send_images(&mut self, number: u32) -> Result<()> {
        let dir = self.round_dir(number);
        let listed = || dir.display().to_string();
        for entry in fs::read_dir(&dir).context(listed)? {
            let entry = entry.context(listed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| is_image(name)) else { continue };
            if entry.file_type().context(listed)?.is_file() {
                self.send_file(&entry.path(), name)?;
            }
        }
        self.link.say(&Request::End { number })
    }

    fn send_file(&mut self, path: &Path, name: &str) -> Result<()> {
        let failed = || path.display().to_string();
        let mut file = File::open(path).context(failed)?;
        let len = file.metadata().context(failed)?.len();
        self.link.say(&Request::File { name: name.to_owned(), len })?;
        let mut left = len;
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(MAX_FRAME).min(MAX_FRAME);
            let mut data = vec![0; piece];
            file.read_exact(&mut data).context(failed)?;
            self.link.send_data(&data)?;
            left -= piece as u64;
        }
        Ok(())
    }

    /// Waits until a round is there in whole.
    fn arrived(&mut self, number: u32) -> Result<()> {
        match self.reply()? {
            Reply::Arrived { number: there } if there == number => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }
}

fn statistic(outcome: &Outcome, name: &str) -> u64 {
    outcome.report.statistics.get(name).copied().unwrap_or(0)
}

fn pages(outcome: &Outcome) -> u64 {
    statistic(outcome, "pages_written")
}

fn frozen(outcome: &Outcome) -> std::time::Duration {
    std::time::Duration::from_micros(statistic(outcome, "frozen_time"))
}

/// What the statistics that a dump has left in its images say.
fn written_pages(dir: &Path) -> u64 {
    use torpor_images::proto::StatsEntry;
    use torpor_images::{ImageDir, kind};
    let read = || -> torpor_images::Result<Option<StatsEntry>> {
        ImageDir::open(dir)?.read_one(kind::STATS_DUMP, 0).map(Some)
    };
    let stats = read().ok().flatten().and_then(|stats| stats.dump);
    stats.map_or(0, |stats| stats.pages_written + stats.pages_lazy)
}
