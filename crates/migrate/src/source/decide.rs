//! Where the tasks go on: here or there, and never at both.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use torpor_kernel::proc;
use torpor_worker::{Event, Heir, Worker};

use super::Source;
use super::frozen::Frozen;
use super::link::{Happening, unexpected};
use super::round::{let_go, unless_failed};
use crate::engine;
use crate::error::{Error, Result};
use crate::host::boot;
use crate::progress::{Awaited, Reminder};
use crate::record::{Ledger, Phase, Record};
use crate::runtime::{self, Container, State};
use crate::task::Task;
use crate::wire::Peer;
use crate::wire::frame::Line;
use crate::wire::message::{Reply, Request};

/// How long the destination is asked what it has done, after the link was lost.
const PATIENCE: Duration = Duration::from_secs(60);
/// For an answer: the destination waits for whoever works on the migration, and for its restore.
const ANSWER: Duration = Duration::from_secs(90);
/// How long a job may take to let go of the tasks. Nobody else traces them: no dump would have got hold of them.
const LET_GO: Duration = Duration::from_secs(30);
/// How often.
const PAUSE: Duration = Duration::from_millis(100);

/// What the destination has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The tasks run there.
    There(i32),
    /// They do not and will not.
    Here,
}

impl Source<'_> {
    /// The tasks are stopped here and their images complete there.
    pub(super) fn decide(&mut self, mut worker: Worker) -> Result<i32> {
        // While the destination makes them.
        let ready = self.frozen().and_then(|frozen| {
            self.prepared(&mut worker)?;
            self.record_decision(frozen, Some(&worker))
        });
        let worker = unless_failed(worker, ready)?;
        let undecided = self.awaited().decision();
        let told = match self.go() {
            Ok(pid) => Ok((Verdict::There(pid), None)),
            Err(error) => self.ask(error),
        };
        drop(undecided);
        let (verdict, why) = match told {
            Ok(told) => told,
            Err(error) => {
                // The process that looks on asks further. Until then it holds the tasks and their packets back.
                worker.leave();
                return Err(error);
            }
        };
        match verdict {
            Verdict::There(pid) => {
                self.downtime.end = Some(Instant::now());
                self.ledger.conclude(Phase::Moved);
                abandon(self.ledger.record());
                // The job may have been killed meanwhile.
                let done = worker.answer(true).map_err(Error::from);
                if let Err(error) = done.and_then(|()| engine::finish("dump", worker)) {
                    tracing::warn!("{error}; the tasks are killed");
                }
                end(&mut self.ledger);
                self.over();
                Ok(pid)
            }
            Verdict::Here => {
                let_go(worker);
                go_on(&self.ledger);
                self.ledger.conclude(Phase::Stayed);
                Err(stays(why))
            }
        }
    }

    /// The tasks are stopped here, and all but their pages is there. The job serves these from
    /// here on, and ends the tasks when the destination has all of them, or lets them go on.
    pub(super) fn lend(&mut self, worker: Worker) -> Result<i32> {
        let ready = self.frozen().and_then(|frozen| self.record_decision(frozen, None));
        let mut worker = unless_failed(worker, ready)?;
        // The job ends the tasks before it is known here that they have moved.
        if let Some((container, root)) = container_of(self.ledger.record()) {
            container.look_away(root);
        }
        if let Err(error) = worker.answer(true) {
            let error = Error::from(error);
            self.take_back(worker, &error);
            return Err(error);
        }
        // From when the destination is told to go until it says that the tasks run: the link may be lost meanwhile.
        let (mut has_said_go, mut undecided) = (false, None);
        let done = self.serve(&mut worker, &mut has_said_go, &mut undecided);
        if let Err(error) = &done
            && (!has_said_go || self.link.is_refused())
        {
            drop(undecided);
            self.take_back(worker, error);
            return done.map_err(|why| if has_said_go { stays(Some(why)) } else { why });
        }
        if done.is_err() {
            // The tasks may run there, and need the pages: the job serves them as long as the
            // destination lets it, over new connections if need be.
            if let Err(error) = engine::finish("dump", worker) {
                tracing::debug!("{error}");
            }
        }
        if let Some(carrier) = self.carrier.take() {
            // The destination waits for the last word of the job.
            carrier.drain(PATIENCE);
            carrier.give_up();
        }
        let (verdict, why) = match done {
            Ok(pid) => (Verdict::There(pid), None),
            Err(error) => self.ask(error)?,
        };
        drop(undecided);
        match verdict {
            Verdict::There(pid) => {
                self.downtime.end.get_or_insert_with(Instant::now);
                self.ledger.conclude(Phase::Moved);
                kill(&mut self.ledger, None);
                self.over();
                Ok(pid)
            }
            Verdict::Here => {
                go_on(&self.ledger);
                self.ledger.conclude(Phase::Stayed);
                Err(stays(why))
            }
        }
    }

    /// The destination was not told to go, or has refused: it will not let the tasks run.
    fn take_back(&mut self, worker: Worker, why: &Error) {
        // The job lets the tasks go on when nobody fetches its pages any more.
        if let Some(carrier) = self.carrier.take() {
            carrier.give_up();
        }
        if let Err(error) = engine::finish("dump", worker) {
            tracing::debug!("{error}");
        }
        go_on(&self.ledger);
        self.ledger.conclude(Phase::Stayed);
        self.abort(why);
    }

    /// Until the job has ended and the tasks with it. Before the destination is told to go, somebody may end it.
    fn serve(
        &mut self,
        worker: &mut Worker,
        has_said_go: &mut bool,
        undecided: &mut Option<Reminder>,
    ) -> Result<i32> {
        let mut running = None;
        loop {
            let cancel = (!*has_said_go).then_some(&self.cancel);
            match self.link.next(Some(worker), cancel)? {
                Happening::Said(Reply::Prepared) => {
                    self.downtime.prepared = Some(Instant::now());
                    // The tasks there wait for pages as long as this command lives.
                    if let Some(watch) = &self.watch {
                        watch.let_be()?;
                    }
                    *has_said_go = true;
                    *undecided = Some(self.awaited().decision());
                    self.link.say(&Request::Go)?;
                }
                Happening::Said(Reply::Running { pid }) => {
                    drop(undecided.take());
                    self.downtime.end = Some(Instant::now());
                    running = Some(pid);
                }
                Happening::Said(reply) => return Err(unexpected(reply)),
                Happening::Job(Event::Ended(outcome)) => {
                    // Nobody fetches pages of it any more: the destination may say why.
                    let done = engine::judge("dump", outcome);
                    done.map_err(|error| self.link.last_word().unwrap_or(error))?;
                    return running.map_or_else(|| self.go_answer(), Ok);
                }
                Happening::Job(_) => {}
            }
        }
    }

    /// Waits until everything is made there.
    fn prepared(&mut self, worker: &mut Worker) -> Result<()> {
        loop {
            match self.next(Some(worker))? {
                Happening::Said(Reply::Prepared) => {
                    self.downtime.prepared = Some(Instant::now());
                    return Ok(());
                }
                Happening::Said(reply) => return Err(unexpected(reply)),
                Happening::Job(Event::Ended(outcome)) => {
                    engine::judge("dump", outcome)?;
                    return Err(Error::refused("the tasks have ended"));
                }
                Happening::Job(_) => {}
            }
        }
    }

    /// The tasks, whose last round is complete.
    fn frozen(&self) -> Result<Frozen> {
        let last = u32::try_from(self.rounds.len()).unwrap_or(u32::MAX);
        Frozen::of(self.plan.pid, &self.round_dir(last))
    }

    /// Whatever becomes of this process and the job, the tasks do not go on by themselves from
    /// here on. A job that waits for the decision does so even if this process ends: it holds packets back which the kernel would
    /// answer here, while the tasks run there.
    fn record_decision(&mut self, frozen: Frozen, waiting: Option<&Worker>) -> Result<()> {
        let Frozen { tasks, mut stopped } = frozen;
        // Somebody has told them to stop meanwhile: after the next signal nobody could tell.
        let is_told = |task: &&Task| {
            proc::status(task.pid).is_ok_and(|status| status.has_pending(libc::SIGSTOP))
        };
        stopped.extend(tasks.iter().filter(is_told).map(|task| task.pid));
        let told = match (&self.watch, waiting) {
            (Some(watch), Some(job)) => watch.entrust(job),
            _ => Ok(()),
        };
        let written = told.and_then(|()| {
            self.ledger.advance(Phase::Deciding, |record| {
                record.tasks.clone_from(&tasks);
                record.stopped = stopped;
                record.is_held = true;
            })
        });
        if let Err(error) = written {
            // The destination is not told to go: they stay here, whatever the record says by now.
            self.ledger.conclude(Phase::Stayed);
            self.abort(&error);
            return Err(error);
        }
        tasks.iter().for_each(|task| task.signal(Signal::STOP));
        if self.has_held(&tasks) {
            return Ok(());
        }
        // What they have done since is not in the images.
        let error =
            Error::refused("dump: whoever held the tasks was ended, and they have gone on here");
        go_on(&self.ledger);
        self.ledger.conclude(Phase::Stayed);
        self.abort(&error);
        Err(error)
    }

    /// Whether tasks, which a signal stops from now on, have been held until now by whoever has made their images, and not by
    /// whoever tidies up after it.
    fn has_held(&self, tasks: &[Task]) -> bool {
        let is_held = |task: &Task| task.tracer() == self.holder || !task.lives();
        self.holder.is_some() && tasks.iter().all(is_held)
    }

    /// Whom this waits for when it has said *go*.
    pub(super) fn awaited(&self) -> Awaited {
        Awaited {
            id: self.id.clone(),
            to: self.plan.to.address.clone(),
            patience: Duration::from_secs(self.plan.patience.into()),
        }
    }

    /// What the destination has done, and why that had to be asked. One that has refused need not be: it says so when
    /// nothing is left of the tasks there, and may be gone by now.
    fn ask(&mut self, error: Error) -> Result<(Verdict, Option<Error>)> {
        let refused = if self.link.is_refused() { None } else { self.link.last_word() };
        if self.link.is_refused() {
            return Ok((Verdict::Here, Some(refused.unwrap_or(error))));
        }
        tracing::warn!("{error}; asking the agent at {} what it has done", self.plan.to.address);
        let verdict = ask_until(&self.plan.to, self.ledger.record(), PATIENCE)?;
        // It says why before it says that it has decided.
        let refused = if verdict == Verdict::Here { self.link.last_word() } else { None };
        Ok((verdict, Some(refused.unwrap_or(error))))
    }

    fn over(&mut self) {
        if let Err(error) = self.link.close() {
            tracing::debug!("{error}");
        }
    }

    /// The point of no return.
    fn go(&mut self) -> Result<i32> {
        self.link.say(&Request::Go)?;
        self.go_answer()
    }

    fn go_answer(&mut self) -> Result<i32> {
        match self.link.next(None, None)? {
            Happening::Said(Reply::Running { pid }) => Ok(pid),
            Happening::Said(reply) => Err(unexpected(reply)),
            Happening::Job(_) => Err(Error::Protocol("no job was waited for".to_owned())),
        }
    }
}

fn stays(why: Option<Error>) -> Error {
    const TEXT: &str = "the destination could not let the tasks run; they go on here";
    let hint = why.as_ref().and_then(Error::hint).map(str::to_owned);
    let text = why.map_or_else(|| TEXT.to_owned(), |why| format!("{TEXT} ({why})"));
    Error::Refused { text, hint }
}

/// Asks the destination what has become of a migration, until it answers.
///
/// # Errors
/// If it does not, or another agent does: then nobody here can know.
pub(super) fn ask_until(to: &Peer, record: &Record, patience: Duration) -> Result<Verdict> {
    let (start, id) = (Instant::now(), &record.id);
    loop {
        match ask(to, record, patience) {
            Ok(Some(verdict)) => return Ok(verdict),
            Ok(None) => {
                return Err(Error::refused_with(
                    format!(
                        "the destination may have the tasks running, and the agent at {} does not know of it; they \
                         stay stopped here",
                        to.address
                    ),
                    format!(
                        "start the agent with the --state-dir that it had, and ask with the certificate that it began with: torpor \
                         migrate --resolve {id}; if that or its host is lost, and they do not run there: torpor migrate --resolve {id} --keep-here"
                    ),
                ));
            }
            Err(error) if start.elapsed() > patience => {
                return Err(Error::refused_with(
                    format!(
                        "the destination may have the tasks running, and does not answer: {error}; \
                         they stay stopped here until it does"
                    ),
                    format!("if its host is lost: torpor migrate --resolve {id} --keep-here"),
                ));
            }
            Err(error) => {
                tracing::debug!("{error}");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// What the destination says; nothing, if it does not know, or is not the agent that the tasks went to. One that is
/// stopped takes connections and never answers.
fn ask(to: &Peer, record: &Record, patience: Duration) -> Result<Option<Verdict>> {
    let mut line = Line::open_for(to.connect()?, patience.min(ANSWER))?;
    line.say(&Request::Query { id: record.id.clone() })?;
    let (agent, verdict) = match line.hear()? {
        Reply::State { phase: Phase::Moved, pid, agent } => {
            (agent, Some(Verdict::There(pid.unwrap_or(0))))
        }
        Reply::State { phase: Phase::Stayed, agent, .. } => (agent, Some(Verdict::Here)),
        Reply::Unknown { agent } => (agent, None),
        reply => return Err(unexpected(reply)),
    };
    let is_asked = record.agent.as_ref().is_none_or(|asked| *asked == agent);
    Ok(verdict.filter(|_| is_asked))
}

/// Ends the tasks here: they run at the destination. The job that holds them, if one still does, ends them without a word to the
/// other ends of their connections.
pub(super) fn kill(ledger: &mut Ledger, job: Option<Heir>) {
    abandon(ledger.record());
    answer(job, true, ANSWER);
    end(ledger);
}

/// The container of a migration, and its first process.
fn container_of(record: &Record) -> Option<(&Container, &Task)> {
    record.container.as_ref().zip(record.tasks.first())
}

/// The runtime is not to start the container of a migration again when it ends here, whether it can be asked or not.
fn abandon(record: &Record) {
    // After a restart of the host others have their numbers.
    if let Some((container, root)) = container_of(record).filter(|_| record.boot == boot()) {
        container.abandon(root);
    }
}

/// Answers the job that holds the tasks, if one still does and waits for this process.
pub(super) fn answer(job: Option<Heir>, go_on: bool, patience: Duration) {
    if let Some(Err(error)) = job.map(|job| job.answer(go_on, patience)) {
        tracing::debug!("{error}");
    }
}

/// The same where the runtime knows already that it is not to start the container again.
fn end(ledger: &mut Ledger) {
    let record = ledger.record();
    // After a restart of the host others have their numbers.
    if record.boot == boot() {
        record.tasks.iter().for_each(|task| task.signal(Signal::KILL));
    }
    let Some(container) = &record.container else { return };
    match container.state() {
        Ok(Some(state)) if is_other(&state, record) => return,
        // The runtime would list it as one that has ended.
        Ok(Some(_)) => container.forget(),
        Ok(None) => {}
        // Whoever asks again finds out.
        Err(error) => return tracing::warn!("{error}"),
    }
    if let Some(bundle) = &record.bundle {
        runtime::leave_bundle(bundle);
    }
    if matches!(container.state(), Ok(Some(_))) {
        return;
    }
    // Whoever asks again is told the same, and nothing is done to one of its id that has come back.
    let forgotten =
        ledger.advance(Phase::Moved, |record| (record.container, record.bundle) = (None, None));
    if let Err(error) = forgotten {
        tracing::warn!("it is not written down that nothing is left of it here: {error}");
    }
}

/// Whether the container that a runtime knows is not the one of a migration: it runs, and its first process is another one. It
/// has come back since.
fn is_other(state: &State, record: &Record) -> bool {
    Task::find(state.pid).is_ok_and(|root| record.tasks.first() != Some(&root))
}

/// Lets the tasks go on that were stopped for the decision, and no others: one that was stopped before forgets the signal
/// that it got for it when somebody lets it go on. The job lets go of them before, or it could stop them once more behind
/// that: signals that it has held back are sent again.
pub(super) fn go_on(ledger: &Ledger) {
    let record = ledger.record();
    let start = Instant::now();
    while record.tasks.iter().any(Task::is_traced) && start.elapsed() < LET_GO {
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Some((container, root)) = container_of(record) {
        container.look_on(root);
    }
    let stopped: HashSet<i32> = record.stopped.iter().copied().collect();
    let going_on = record.tasks.iter().filter(|task| !stopped.contains(&task.pid));
    going_on.for_each(|task| task.signal(Signal::CONT));
}

/// What is left of a job of the engine that has ended early is undone by another process, which lets its tasks go on. It is a
/// child of this one by then.
const GUARD: &[u8] = b"torpor-guard";

/// Waits until nothing keeps the tasks of a job from going on that has ended early, or was ended.
pub(super) fn wait_for_guard() {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let works =
        |pid: &i32| proc::stat(*pid).is_ok_and(|stat| stat.comm == GUARD && !stat.has_ended());
    let start = Instant::now();
    while proc::children_of(own).iter().any(works) && start.elapsed() < LET_GO {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::record::tests::record;
    use crate::wire::address::Address;

    #[test]
    fn an_agent_that_never_answers_is_not_waited_for_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.socket");
        let _silent = UnixListener::bind(&path).unwrap();
        let to = Peer { address: Address::Unix(path), keys: None };
        let asked = Record { id: "one".to_owned(), ..record() };
        let error = ask_until(&to, &asked, Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error}");
        assert!(error.hint().unwrap().contains("--resolve one --keep-here"), "{error}");
    }

    /// What an agent answers when it is asked what has become of a migration to agent `asked`.
    fn answered(asked: Option<&str>, answer: &Reply) -> Result<Verdict> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.socket");
        let listener = UnixListener::bind(&path).unwrap();
        let to = Peer { address: Address::Unix(path), keys: None };
        let record = Record { agent: asked.map(str::to_owned), ..record() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut line = Line::open(listener.accept().unwrap().0.into()).unwrap();
                let _: Request = line.hear().unwrap();
                line.say(answer).unwrap();
            });
            ask_until(&to, &record, PATIENCE)
        })
    }

    #[test]
    fn only_the_agent_that_they_went_to_can_tell() {
        let agent = || "a".to_owned();
        let moved = Reply::State { phase: Phase::Moved, pid: Some(7), agent: agent() };
        let stayed = Reply::State { phase: Phase::Stayed, pid: None, agent: agent() };
        // One that an older version of this program has begun is of no known agent.
        for asked in [None, Some("a")] {
            assert_eq!(answered(asked, &moved).unwrap(), Verdict::There(7));
            assert_eq!(answered(asked, &stayed).unwrap(), Verdict::Here);
            let unknown = answered(asked, &Reply::Unknown { agent: agent() }).unwrap_err();
            assert!(unknown.to_string().contains("does not know of it"), "{unknown}");
            assert!(unknown.hint().unwrap().contains("--keep-here"), "{unknown}");
        }
        for answer in [moved, stayed] {
            answered(Some("b"), &answer).unwrap_err();
        }
    }
}
