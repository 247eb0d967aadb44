//! The destination: an agent that takes in what other hosts send.
//!
//! It is a daemon with a thread for each connection. Whatever traces tasks, forks or changes
//! namespaces is a job of the engine in a process of its own.

mod alone;
mod audit;
mod coming;
mod director;
mod identity;
mod joining;
mod lines;
mod pager;
mod rehearsal;
mod reservation;
mod restore;
mod round;
mod served;
mod session;
mod settle;
mod volume;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use torpor_tls::Keys;
use torpor_tls::callers::{Caller, Callers};
use torpor_worker::tell;

use self::alone::Alone;
use self::coming::Coming;
use self::joining::Waiting;
use self::lines::OpenLines;
use self::served::Served;
use crate::cancel::Cancel;
use crate::engine::wait_readable;
use crate::error::{Context, Error, Result};
use crate::origin::Origin;
use crate::record::{Side, all, make_private};
use crate::runtime::{Container, Runtime, Terms};
use crate::wire::address::Listener;
use crate::wire::frame::Line;
use crate::wire::message::{Reply, Request, Subject, Summary};
use crate::wire::owner;

/// How long a connection may take to say what it is for.
const PATIENCE: Duration = Duration::from_secs(20);
/// Connections at a time that have not said so yet.
const MAX_CALLERS: usize = 64;
/// Migrations that are listed: as many as a message has room for.
const MAX_LISTED: usize = 200;

/// How often it is looked whether there is less to do.
const PAUSE: Duration = Duration::from_millis(10);

/// What comes is foreign, also to the host that has made it: the other one may have kept it, and send it whenever it likes.
const FOREIGN: [&str; 2] = ["--host-key", "none"];

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
    /// Whether containers may publish ports of this host.
    pub allow_ports: bool,
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
        Terms { hooks: self.allow_hooks, rootfs, ports: self.allow_ports }
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
    coming: Coming,
    served: Served,
    callers: Arc<Callers>,
    lines: Arc<OpenLines>,
    /// Whether somebody has told it to end.
    is_ending: AtomicBool,
}

impl Agent {
    /// One that has settled what an agent before it has left undecided.
    ///
    /// # Errors
    /// If its directories cannot be made, or another agent has one of them; if restores do not take its options.
    pub(crate) fn new(settings: AgentSettings) -> Result<Arc<Self>> {
        make_private(&settings.state_dir)?;
        make_private(&settings.work_dir)?;
        audit::options(&settings)?;
        let alone = Alone::claim(&[&settings.state_dir, &settings.work_dir])?;
        let identity = identity::of(&settings.state_dir)?;
        settle::leftovers(&settings);
        let (joining, served) = (Mutex::default(), Served::default());
        let (callers, lines) = (Callers::new(PATIENCE, MAX_CALLERS), Arc::default());
        Ok(Arc::new(Self {
            settings,
            identity,
            _alone: alone,
            joining,
            coming: Coming::default(),
            served,
            callers,
            lines,
            is_ending: AtomicBool::new(false),
        }))
    }

    /// Serves whoever connects, until a signal tells it to end. What has not come to its decision then stays where it was, and
    /// nothing of it is left here; what has is waited for, until there is a second signal.
    pub(crate) fn serve(self: &Arc<Self>, listener: &Listener, end: &Cancel) {
        while self.goes_on(end) {
            if self.served.is_full() {
                thread::sleep(PAUSE);
                continue;
            }
            if let Err(error) = self.take(listener, end) {
                tracing::warn!("{error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Whether there is still something to do. Connections are taken to the end: tasks that lack pages may need another one.
    fn goes_on(&self, end: &Cancel) -> bool {
        let is_told = end.is_due();
        let was_told = self.is_ending.fetch_or(is_told, Ordering::SeqCst);
        if !is_told && !was_told {
            return true;
        }
        self.lines.hang_up();
        let is_busy = !self.served.is_empty();
        let has_more = is_busy || !self.lines.are_heard_out();
        if has_more && !was_told {
            tell!("Ending when what is decided is done; a second signal ends it at once");
        }
        has_more && !(is_told && was_told)
    }

    /// Takes the next connection, if one comes before the end.
    fn take(self: &Arc<Self>, listener: &Listener, end: &Cancel) -> Result<()> {
        let patience = self.is_ending.load(Ordering::SeqCst).then_some(PAUSE);
        let ready = wait_readable(&[end.as_fd(), listener.as_fd()], patience)?;
        if ready != [false, true] {
            return Ok(());
        }
        let socket = listener.accept().context(|| "accept".to_owned())?;
        let (agent, caller) = (Arc::clone(self), self.callers.add(&socket)?);
        thread::spawn(move || {
            if let Err(error) = agent.handle(socket, caller) {
                tracing::warn!("{error}");
            }
        });
        Ok(())
    }

    fn handle(&self, socket: OwnedFd, caller: Caller) -> Result<()> {
        let (socket, origin) = match &self.settings.keys {
            Some(keys) => {
                let (socket, names) = keys.accept(socket)?;
                (socket, Origin::Host(names))
            }
            None => match owner::check(&socket) {
                Ok(()) => (socket, Origin::OwnUser),
                Err(error) => {
                    // A peer that speaks the protocol hears why.
                    let _ = turn_away(socket, &error);
                    return Err(error);
                }
            },
        };
        let mut line = Line::open(socket)?;
        let request = line.hear()?;
        if let Request::Join { token, round, set } = request {
            // It is for whoever waits for it, and those are counted.
            drop(caller);
            return self.join(line, &token, round, set);
        }
        let served = self.served.add(&origin);
        drop(caller);
        let _served = match served {
            Ok(served) => served,
            Err(error) => return line.say(&refusal(&error)),
        };
        // Whether something may come is asked of runtimes and of the policy, which may take long.
        if let Request::Begin(begin) | Request::Rehearse(begin) = &request {
            line.beat(begin.silence())?;
        }
        match request {
            Request::Begin(begin) => {
                let open = self.lines.add(&line)?;
                let name = format!("{} from {}", begin.id, begin.host.name);
                if let Err(error) = session::run(self, (line, open), *begin, origin) {
                    tracing::warn!("{name}: {error}");
                }
                Ok(())
            }
            Request::Rehearse(begin) => {
                let _open = self.lines.add(&line)?;
                rehearsal::run(self, line, &begin, &origin)
            }
            Request::Query { id } => {
                self.leave_alone(&id, &origin);
                let answer = settle::answer(&self.settings, &self.identity, &id, &origin);
                let (reply, left) = answer.unwrap_or_else(|error| (refusal(&error), None));
                let said = line.say(&reply);
                if let Some(left) = left {
                    left.close();
                }
                said
            }
            Request::Status => line.say(&Reply::Migrations { all: self.migrations(&origin)? }),
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

    /// Why a conversation has ended that ends with the agent.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::Link(_) if self.is_ending.load(Ordering::SeqCst) => Error::refused_with(
                "the agent is being stopped",
                "move it when an agent runs there again",
            ),
            error => error,
        }
    }

    /// A source that asks what has become of a migration does not serve its pages any more.
    fn leave_alone(&self, id: &str, asks: &Origin) {
        for waiting in self.joining().values().filter(|waiting| waiting.id == id) {
            waiting.leave_alone(asks);
        }
    }

    fn joining(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.joining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest migrations that `asks` may ask for.
    fn migrations(&self, asks: &Origin) -> Result<Vec<Summary>> {
        let records = all(&self.settings.state_dir, Side::Destination)?;
        let own = records.into_iter().rev().filter(|record| asks.may_ask(record.origin.as_ref()));
        let listed = own.take(MAX_LISTED).map(|record| Summary {
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
