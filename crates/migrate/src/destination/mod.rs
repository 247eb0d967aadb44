//! The destination: an agent that takes in what other hosts send.
//!
//! It is a daemon with a thread for each connection. Whatever traces tasks, forks or changes
//! namespaces is a job of the engine in a process of its own.

mod alone;
mod audit;
mod callers;
mod director;
mod identity;
mod joining;
mod pager;
mod rehearsal;
mod reservation;
mod restore;
mod round;
mod session;
mod settle;
mod volume;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use torpor_tls::Keys;

use self::alone::Alone;
use self::callers::{Caller, Callers};
use self::joining::Waiting;
use crate::error::{Context, Error, Result};
use crate::record::{Side, all, make_private};
use crate::runtime::{Container, Runtime, Terms};
use crate::wire::address::Listener;
use crate::wire::frame::Line;
use crate::wire::message::{Reply, Request, Subject, Summary};
use crate::wire::owner;

/// Connections at a time of which it is known what they are for: more wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// Migrations that are listed: as many as a message has room for.
const MAX_LISTED: usize = 200;

/// What to do about a policy that does not allow what comes.
const ALLOW: &str =
    "there: torpor agent --restore-option=--policy-rule --restore-option=RULE, or --policy FILE";

/// What an agent is told.
#[derive(Debug, Clone)]
pub(crate) struct AgentSettings {
    /// Where records are kept.
    pub state_dir: PathBuf,
    /// Where images are kept until their tasks run.
    pub work_dir: PathBuf,
    /// Certificates, if connections are encrypted.
    pub keys: Option<Keys>,
    /// What the user wants to do when addresses move.
    pub script: Option<String>,
    /// More options for restores.
    pub restore_options: Vec<String>,
    /// Where runc keeps its state, if not where it usually does.
    pub runtime_root: Option<PathBuf>,
    /// Whether containers may bring programs that run on this host.
    pub allow_hooks: bool,
    /// Below which directories containers may bring volumes.
    pub allow_volumes: Vec<PathBuf>,
}

impl AgentSettings {
    /// Where containers that came here have their bundles.
    fn bundles(&self) -> PathBuf {
        self.state_dir.join("bundles")
    }

    /// What a container may bring, with or without its root file system.
    fn terms(&self, rootfs: bool) -> Terms {
        Terms { hooks: self.allow_hooks, rootfs }
    }

    /// The container that something that comes in is to become.
    fn container(&self, subject: &Subject) -> Option<Container> {
        match subject {
            Subject::Container { runtime, id, .. } => {
                let root = self.runtime_root.clone().filter(|_| *runtime == Runtime::Runc);
                Some(Container { runtime: *runtime, id: id.clone(), root })
            }
            Subject::Tree { .. } => None,
        }
    }
}

/// The daemon.
#[derive(Debug)]
pub(crate) struct Agent {
    settings: AgentSettings,
    /// The number that this agent is known by.
    identity: String,
    _alone: Alone,
    /// Who waits for connections for pages, by the token that these show.
    joining: Mutex<HashMap<String, Waiting>>,
    connections: AtomicUsize,
    callers: Arc<Callers>,
}

/// A connection that is counted as long as this is there.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn among(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Agent {
    /// One that has settled what an agent before it has left undecided.
    ///
    /// # Errors
    /// If its directories cannot be made, or another agent has one of them.
    pub(crate) fn new(settings: AgentSettings) -> Result<Arc<Self>> {
        make_private(&settings.state_dir)?;
        make_private(&settings.work_dir)?;
        let alone = Alone::claim(&[&settings.state_dir, &settings.work_dir])?;
        let identity = identity::of(&settings.state_dir)?;
        settle::leftovers(&settings);
        let (joining, connections) = (Mutex::default(), AtomicUsize::new(0));
        let callers = Callers::new();
        Ok(Arc::new(Self { settings, identity, _alone: alone, joining, connections, callers }))
    }

    /// Serves whoever connects, for ever.
    pub(crate) fn serve(self: &Arc<Self>, listener: &Listener) {
        loop {
            if self.connections.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
            let accepted = listener.accept().context(|| "accept".to_owned());
            if let Err(error) = accepted.and_then(|socket| self.start(socket)) {
                tracing::warn!("{error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    fn start(self: &Arc<Self>, socket: OwnedFd) -> Result<()> {
        let (agent, caller) = (Arc::clone(self), self.callers.add(&socket)?);
        thread::spawn(move || {
            if let Err(error) = agent.handle(socket, caller) {
                tracing::warn!("{error}");
            }
        });
        Ok(())
    }

    fn handle(&self, socket: OwnedFd, caller: Caller) -> Result<()> {
        let socket = match &self.settings.keys {
            Some(keys) => keys.accept(socket)?,
            None => match owner::check(&socket) {
                Ok(()) => socket,
                Err(error) => {
                    // A peer that speaks the protocol hears why.
                    let _ = turn_away(socket, &error);
                    return Err(error);
                }
            },
        };
        let mut line = Line::open(socket)?;
        let request = line.hear()?;
        drop(caller);
        let _counted = Counted::among(&self.connections);
        // Whether something may come is asked of runtimes and of the policy, which may take long.
        if let Request::Begin(begin) | Request::Rehearse(begin) = &request {
            line.beat(begin.silence())?;
        }
        match request {
            Request::Begin(begin) => session::run(self, line, *begin),
            Request::Rehearse(begin) => rehearsal::run(self, line, &begin),
            Request::Join { token, round, set } => self.join(line, &token, round, set),
            Request::Query { id } => {
                self.leave_alone(&id);
                let reply = settle::answer(&self.settings, &self.identity, &id);
                line.say(&reply.unwrap_or_else(|error| refusal(&error)))
            }
            Request::Status => line.say(&Reply::Migrations { all: self.migrations()? }),
            request => Err(Error::Protocol(format!("it begins with {request:?}"))),
        }
    }

    fn join(&self, mut line: Line, token: &str, round: u32, set: u64) -> Result<()> {
        let announced = self.joining().get_mut(token).map(|waiting| waiting.announce(set));
        if announced != Some(true) {
            return line.say(&refusal(&Error::refused("no migration waits for this connection")));
        }
        line.say(&Reply::Joined)?;
        match self.joining().get_mut(token) {
            Some(waiting) => waiting.hand_over(set, round, line.into_socket()),
            None => Ok(()),
        }
    }

    /// A source that asks what has become of a migration does not serve its pages any more.
    fn leave_alone(&self, id: &str) {
        for waiting in self.joining().values().filter(|waiting| waiting.id == id) {
            if let Some(carrier) = &waiting.carrier {
                carrier.give_up();
            }
        }
    }

    fn joining(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn migrations(&self) -> Result<Vec<Summary>> {
        let records = all(&self.settings.state_dir, Side::Destination)?;
        let newest = records.into_iter().rev().take(MAX_LISTED);
        let listed = newest.map(|record| Summary {
            id: record.id,
            subject: record.subject,
            peer: record.peer,
            phase: record.phase,
            pid: record.tasks.first().map(|root| root.pid),
        });
        Ok(listed.collect())
    }
}

/// Answers what is asked, whatever that is, with a refusal.
fn turn_away(socket: OwnedFd, error: &Error) -> Result<()> {
    let mut line = Line::open(socket)?;
    let _: Request = line.hear()?;
    line.say(&refusal(error))
}

/// An error, for the other end.
fn refusal(error: &Error) -> Reply {
    Reply::Refused {
        text: error.to_string(),
        hint: error.hint().map(str::to_owned),
        by_source: matches!(error, Error::Link(_)),
    }
}
