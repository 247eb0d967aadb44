//! One migration that comes in.

use std::os::fd::AsFd;
use std::time::Duration;

use torpor_images::kind;
use torpor_kernel::shortage::Shortage;
use torpor_worker::Class;

use super::director::Director;
use super::lines::OpenLine;
use super::pager::Pager;
use super::rehearsal::measure;
use super::reservation::Reservation;
use super::restore::{Beginning, Restore};
use super::round::Incoming;
use super::{ALLOW, Agent, refusal, settle};
use crate::address::{self, Script, Stage};
use crate::announce::{announce, has_own_network};
use crate::engine::{self, judge, wait_readable};
use crate::error::{Error, Result};
use crate::files::{Change, Replica};
use crate::host::Host;
use crate::origin::Origin;
use crate::record::Phase;
use crate::runtime;
use crate::wire::difference::Allowance;
use crate::wire::frame::Line;
use crate::wire::message::{Begin, Reply, Request, RoundKind, Subject};

/// How long the connection for a round's pages may take.
const SOON: Duration = Duration::from_secs(20);
/// No migration takes more rounds.
const MAX_ROUNDS: u32 = 1000;

/// One migration that comes in. Dropped before the tasks run, nothing of it is left.
struct Session<'a> {
    line: Line,
    round: Option<Incoming>,
    rounds: u32,
    /// What the next round may repeat of earlier images.
    allowance: Allowance,
    /// The tree that changes are of.
    tree: usize,
    restore: Option<Restore>,
    pager: Option<Pager>,
    /// The round that the tree is to have before the source takes the next one.
    waiting: Option<u32>,
    /// Whether addresses may have come for the tasks.
    is_arriving: bool,
    shortage: Shortage,
    /// As long as it can be given up.
    open: Option<OpenLine>,
    place: Reservation<'a>,
}

/// Who may have something to say.
#[derive(Debug, Clone, Copy)]
enum Speaker {
    Source,
    Pages,
    Restore,
    Director,
}

/// Takes a migration in, to its end.
///
/// # Errors
/// If there is no room for it, or what it asks for is not allowed; if the other end is lost or gives up; if a restore fails. The other
/// end has been told.
pub(super) fn run(
    agent: &Agent,
    (mut line, open): (Line, OpenLine),
    begin: Begin,
    origin: Origin,
) -> Result<()> {
    let place = match Reservation::new(agent, begin, origin) {
        Ok(place) => place,
        Err(error) => {
            line.say(&refusal(&error))?;
            return Err(error);
        }
    };
    let own = std::process::id().cast_signed();
    let mut session = Session {
        line,
        round: None,
        rounds: 0,
        allowance: Allowance::default(),
        tree: 0,
        restore: None,
        pager: None,
        waiting: None,
        is_arriving: false,
        shortage: Shortage::of([own]).and_host(),
        open: Some(open),
        place,
    };
    let done = session.carry_out();
    let done = done.map_err(|error| match &session.open {
        Some(_) => agent.explain(error),
        None => error,
    });
    let done = done.map_err(|error| short_of_memory(error, &session.shortage));
    if let Err(error) = &done {
        session.undo(error);
    }
    if !session.place.ledger.record().phase.is_over() {
        // What is in there tells what has become of the tasks.
        session.place.work.leave();
    }
    done
}

impl Session<'_> {
    fn carry_out(&mut self) -> Result<()> {
        let (token, agent) = (self.place.token.clone(), self.place.agent.identity.clone());
        self.line.say(&Reply::Ready { token, host: Host::this(), agent })?;
        loop {
            let Some(speaker) = self.next()? else { continue };
            match speaker {
                // What a job says explains what the source says.
                Speaker::Restore => self.restoring()?,
                Speaker::Director => self.following()?,
                Speaker::Pages => self.receiving()?,
                Speaker::Source => {
                    let request = self.line.hear()?;
                    if self.obey(request)? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Who has something to say; nobody, if it is only that the source lives.
    fn next(&mut self) -> Result<Option<Speaker>> {
        let mut fds = Vec::new();
        if let Some(restore) = &self.restore {
            fds.push((Speaker::Restore, restore.as_fd()));
            fds.extend(restore.director.as_ref().map(|them| (Speaker::Director, them.voice())));
        }
        fds.extend(self.round.as_ref().and_then(Incoming::voice).map(|fd| (Speaker::Pages, fd)));
        let (speakers, fds): (Vec<Speaker>, Vec<_>) = fds.into_iter().unzip();
        let Some(ready) = self.line.wait(&fds)? else { return Ok(None) };
        // What the source says comes last.
        let others = speakers.into_iter().zip(&ready[1..]).find(|&(_, &ready)| ready);
        let source = ready[0].then_some(Speaker::Source);
        Ok(others.map(|(speaker, _)| speaker).or(source))
    }

    /// Does what the source says; whether that was the last of it.
    fn obey(&mut self, request: Request) -> Result<bool> {
        // While the tasks are made, whoever makes them works in the files that come: runc makes mount points there as root.
        let takes_more = !self.is_arriving && self.waiting.is_none();
        match (request, &mut self.round, &mut self.restore) {
            (Request::Round { number, kind }, None, _) if takes_more => {
                self.begin_round(number, kind)?;
            }
            (Request::File { name, len, since }, Some(round), _) => {
                let received = round.receive(&mut self.line, &name, len, since);
                received.map_err(|error| short_of_room(error, &self.place))?;
            }
            (Request::Files { files }, Some(round), _) => {
                let received = round.receive_together(&mut self.line, &files);
                received.map_err(|error| short_of_room(error, &self.place))?;
            }
            (Request::End { number }, Some(round), _) if round.number == number => {
                self.end_round()?;
            }
            (Request::Tree { number }, ..) if takes_more => self.tree = number,
            (Request::Change(change), ..) if takes_more => self.change(*change)?,
            (Request::Settle, ..) if takes_more => {
                self.place.trees.iter_mut().try_for_each(Replica::finish)?;
                self.line.say(&Reply::Settled)?;
            }
            (Request::Go, None, Some(restore)) if restore.root.is_some() => self.go()?,
            (Request::Over, ..) if self.place.ledger.record().phase == Phase::Moved => {
                return Ok(true);
            }
            (Request::Measure { len }, None, None) => measure(&mut self.line, len)?,
            (request, ..) => return Err(end_by(request)),
        }
        Ok(false)
    }

    fn change(&mut self, change: Change) -> Result<()> {
        let line = &mut self.line;
        let tree = self.place.trees.get_mut(self.tree);
        let tree = tree.ok_or_else(|| Error::Protocol("files of no container".to_owned()))?;
        tree.apply(change, || line.receive_data())
    }

    fn begin_round(&mut self, number: u32, kind: RoundKind) -> Result<()> {
        if number != self.rounds + 1 || number > MAX_ROUNDS {
            return Err(Error::Protocol(format!("round {number} after {}", self.rounds)));
        }
        let joined = self.place.joined.recv_timeout(SOON);
        let pages = match joined {
            Ok((round, pages)) if round == number => pages,
            Ok((round, _)) => {
                return Err(Error::Protocol(format!("pages of round {round} in round {number}")));
            }
            Err(_) => return Err(Error::Link("no connection for pages comes".to_owned())),
        };
        self.rounds = number;
        let pages = if kind == RoundKind::Lazy { self.place.carry(pages)? } else { pages };
        let (work, built) = (&self.place.work, self.place.begin.build_after);
        self.round = Some(Incoming::start(work, (number, kind), pages, built, self.allowance)?);
        Ok(())
    }

    /// The job that receives pages says something.
    fn receiving(&mut self) -> Result<()> {
        match &mut self.round {
            Some(round) => round.listen().map_err(|error| short_of_room(error, &self.place)),
            None => Ok(()),
        }
    }

    fn end_round(&mut self) -> Result<()> {
        let Some(round) = self.round.take() else { return Ok(()) };
        let (number, kind) = (round.number, round.kind);
        self.allowance = round.allowance();
        let finished = round.finish().map_err(|error| short_of_room(error, &self.place));
        let (dir, pages) = finished?;
        let after = self.place.begin.build_after;
        if kind == RoundKind::Running {
            return match &mut self.restore {
                Some(Restore { director: Some(director), .. }) => {
                    director.round(number, &dir)?;
                    self.waiting = Some(number);
                    Ok(())
                }
                _ if after > 0 && number >= after => self.build_early(number),
                _ => self.line.say(&Reply::Arrived { number }),
            };
        }
        self.line.say(&Reply::Arrived { number })?;
        self.arrive()?;
        match &mut self.restore {
            Some(Restore { director: Some(director), .. }) => director.last(&dir)?,
            _ => self.restore = Some(Restore::start(self.beginning(number), None)?),
        }
        // The restore has it to find only when it hands the tasks over.
        if let Some((pages, pager)) = pages {
            let options = &self.place.agent.settings.restore_options;
            let dir = self.place.work.path();
            self.pager = Some(Pager::start(pager, dir, number, &pages, options)?);
        }
        self.record_worker()
    }

    /// Addresses may come. Whoever brings them is ended if the source gives up meanwhile.
    fn arrive(&mut self) -> Result<()> {
        self.is_arriving = true;
        let script = self.place.agent.settings.script.clone();
        if script.is_some() {
            // The next agent takes them away if this one is killed.
            self.place.ledger.advance(Phase::Preparing, |record| record.script = script)?;
        }
        let script = Script::start(&self.place.ledger, Stage::Arriving)?;
        let Some(script) = script else { return Ok(()) };
        loop {
            match self.line.wait(&[script.as_fd()])?.as_deref() {
                Some([_, true]) => return script.finish(None),
                Some([true, _]) => return Err(end_by(self.line.hear()?)),
                _ => script.time_left()?,
            };
        }
    }

    /// The tree is built while its tasks still run at the source, by the newest round that has all of its structure.
    fn build_early(&mut self, number: u32) -> Result<()> {
        let work = self.place.work.path();
        let dir = |round: u32| work.join(round.to_string());
        let is_whole = |&round: &u32| dir(round).join(kind::PSTREE.file_name(0)).exists();
        let first = (1..=number).rev().find(is_whole).unwrap_or(1);
        let mut director = Director::new(work, first)?;
        for round in first + 1..=number {
            director.round(round, &dir(round))?;
        }
        self.restore = Some(Restore::start(self.beginning(first), Some(director))?);
        self.waiting = Some(number);
        self.record_worker()
    }

    fn beginning(&self, round: u32) -> Beginning<'_> {
        Beginning {
            subject: &self.place.begin.subject,
            dir: self.place.work.path(),
            round,
            is_lazy: self.place.begin.is_lazy,
            options: &self.place.agent.settings.restore_options,
            base: self.place.base.as_ref(),
            container: self.place.ledger.record().container.as_ref(),
        }
    }

    /// Writes down the last process that may end the tasks again.
    fn record_worker(&mut self) -> Result<()> {
        let worker = match (&self.pager, &self.restore) {
            (Some(pager), _) => pager.task()?,
            (None, Some(restore)) => restore.task()?,
            (None, None) => return Ok(()),
        };
        self.place.ledger.advance(Phase::Preparing, |record| record.worker = Some(worker))
    }

    /// The tree that is built early has got a round.
    fn following(&mut self) -> Result<()> {
        let Some(Restore { director: Some(director), .. }) = &mut self.restore else {
            return Ok(());
        };
        match director.listen() {
            Ok(Some(number)) if self.waiting == Some(number) => {
                self.waiting = None;
                self.line.say(&Reply::Arrived { number })
            }
            Ok(_) => Ok(()),
            // The job says why, behind what else it has said.
            Err(error) => loop {
                let fds: Vec<_> = self.restore.iter().map(AsFd::as_fd).collect();
                if !wait_readable(&fds, Some(SOON))?.contains(&true) {
                    return Err(error);
                }
                self.restoring()?;
            },
        }
    }

    /// The job that makes the tasks says something.
    fn restoring(&mut self) -> Result<()> {
        let Some(restore) = &mut self.restore else { return Ok(()) };
        let had_root = restore.root.is_some();
        match restore.listen()? {
            Some(mut outcome) => {
                // The images that its own hint is about are gone when it is read.
                if outcome.class == Class::Forbidden && outcome.hint.is_some() {
                    outcome.hint = Some(ALLOW.to_owned());
                }
                judge("restore", outcome).map_err(|error| self.explain(error))?;
                Err(Error::refused("restore: it did not wait"))
            }
            None if !had_root && restore.root.is_some() => {
                self.line.say(&Reply::Prepared)?;
                // While the source writes its decision down.
                restore.look()
            }
            None => Ok(()),
        }
    }

    /// A restore that has lost its pager knows only that: the pager says why.
    fn explain(&mut self, error: Error) -> Error {
        match error {
            Error::Link(_) => self.pager.take().and_then(Pager::failure).unwrap_or(error),
            _ => error,
        }
    }

    /// The point of no return.
    fn go(&mut self) -> Result<()> {
        let Some(mut restore) = self.restore.take() else { return Ok(()) };
        let Some(root) = restore.root else { return Ok(()) };
        self.open = None;
        let tasks = std::mem::take(&mut restore.tasks);
        self.place.ledger.advance(Phase::Deciding, |record| record.tasks = tasks)?;
        let (woken, pager) = (restore.wake(), self.pager.take());
        let mut said = None;
        if woken.is_ok() {
            // Tasks that lack pages may still be ended. A link that is lost lets them wait until there is another one.
            if pager.is_none() {
                self.place.ledger.conclude(Phase::Moved);
            }
            said = Some(self.tell_running(root.pid));
        }
        let finish = |job| engine::finish("restore", job).map(drop);
        let done = woken.and_then(|job| job.map_or(Ok(()), finish));
        // However the restore has ended: if it has let them run, the pager alone can still end them.
        let done = done.and(pager.map_or(Ok(()), Pager::finish));
        if let Err(error) = done {
            // What counts is whether the tasks run, or have run: what they have done is done.
            if settle::decide(&mut self.place.ledger)?.is_none() {
                return Err(error);
            }
            tracing::warn!("{error}");
        }
        if self.place.ledger.record().phase != Phase::Moved {
            self.place.ledger.conclude(Phase::Moved);
        }
        let said = said.unwrap_or_else(|| self.tell_running(root.pid));
        address::forget(&mut self.place.ledger);
        said
    }

    /// Tells the source, and whoever sends to their addresses.
    fn tell_running(&mut self, pid: i32) -> Result<()> {
        let said = self.line.say(&Reply::Running { pid });
        self.announce(pid);
        said
    }

    /// The tasks run here: whoever sends to their addresses is to send here.
    fn announce(&self, root: i32) {
        let has_script = self.place.agent.settings.script.is_some();
        let tell = || {
            if let Err(error) = announce(root) {
                tracing::warn!("{error}");
            }
        };
        // In a network of this host, addresses have come only if somebody has brought them.
        if has_own_network(root) || has_script {
            tell();
        }
        // That may take long, and bring more of them.
        if let Err(error) = address::run(&self.place.ledger, Stage::Moved, None) {
            tracing::warn!("{error}");
        }
        if has_script {
            tell();
        }
    }

    /// Nothing of it is to be left, and the source is told.
    fn undo(&mut self, error: &Error) {
        self.round = None;
        self.restore = None;
        self.pager = None;
        let container = self.place.ledger.record().container.clone();
        if container.is_some() {
            runtime::wait(self.place.work.path());
        }
        if self.place.ledger.record().phase == Phase::Deciding
            && let Err(error) = settle::decide(&mut self.place.ledger)
        {
            tracing::warn!("{error}");
        }
        let has_stayed = |phase| matches!(phase, Phase::Preparing | Phase::Stayed);
        if let Some(container) = container.filter(|_| has_stayed(self.place.ledger.record().phase))
        {
            let settings = &self.place.agent.settings;
            runtime::remove(self.place.work.path(), &container, &settings.bundles());
            settle::tidy(settings, self.place.ledger.record());
        }
        // If this is killed before, the next agent removes the rest.
        if self.place.ledger.record().phase == Phase::Preparing {
            self.place.ledger.conclude(Phase::Stayed);
        }
        address::settle(&mut self.place.ledger);
        if self.place.ledger.record().phase == Phase::Stayed
            && let Err(error) = self.line.say(&refusal(error))
        {
            tracing::debug!("{error}");
        }
    }
}

/// The source says that it gives up, or what it may not say now.
fn end_by(request: Request) -> Error {
    match request {
        Request::Abort { reason } => Error::refused(format!("the source gave up: {reason}")),
        request => Error::Protocol(format!("it says {request:?} out of turn")),
    }
}

/// Whoever is killed since memory has run out cannot say so.
fn short_of_memory(error: Error, shortage: &Shortage) -> Error {
    match (error, shortage.place()) {
        (Error::Refused { text, hint: None } | Error::Link(text), Some(place)) => {
            Error::refused_with(
                format!("{text}; memory ran out {place}"),
                "there: give the agent, or what moves, more memory",
            )
        }
        (error, _) => error,
    }
}

/// Images for which there is no room: a page server says no more than the kernel does.
fn short_of_room(error: Error, place: &Reservation<'_>) -> Error {
    let full = std::io::Error::from_raw_os_error(libc::ENOSPC).to_string();
    let text = error.to_string();
    if !text.contains(&full) {
        return error;
    }
    let dir = place.agent.settings.work_dir.display();
    let hint =
        format!("there: make room in {dir}, or torpor agent --work-dir DIR on a larger disk");
    Error::refused_with(text, hint)
}

/// As much of an id as tells containers apart: Podman's are long.
fn short(id: &str) -> &str {
    if id.len() == 64 { id.get(..12).unwrap_or(id) } else { id }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tree { pid, .. } => write!(f, "process {pid}"),
            Self::Container { id, .. } => write!(f, "container {}", short(id)),
        }
    }
}
