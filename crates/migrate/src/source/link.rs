//! The connections to the destination: one for words, and one for the pages of each round.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use torpor_worker::{Event, Worker};

use crate::cancel::Cancel;
use crate::engine::{repeat, wait_readable};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::wire::Peer;
use crate::wire::frame::Line;
use crate::wire::message::{Begin, Reply, Request};
use crate::wire::relay::{Meter, metered};

/// How long the destination may be silent while something is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

/// What was waited for.
#[derive(Debug)]
pub enum Happening {
    /// The job says something.
    Job(Event),
    /// The destination says something.
    Said(Reply),
}

/// The way to the destination.
#[derive(Debug)]
pub struct Link {
    to: Peer,
    line: Line,
    token: String,
    /// Counts what goes there.
    pub meter: Arc<Meter>,
}

impl Link {
    /// Connects, and asks whether something may come.
    ///
    /// # Errors
    /// If nobody answers there, or with no.
    pub fn begin(to: &Peer, begin: Begin, limit: Option<u64>) -> Result<(Self, Host)> {
        let mut line = Line::open(to.connect()?)?;
        line.say(&Request::Begin(Box::new(begin)))?;
        match line.hear()? {
            Reply::Ready { token, host } => {
                let meter = Meter::new(limit);
                Ok((Self { to: to.clone(), line, token, meter }, host))
            }
            reply => Err(unexpected(reply)),
        }
    }

    /// A connection for the pages of a round.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn join(&self, round: u32) -> Result<OwnedFd> {
        let mut line = Line::open(self.to.connect()?)?;
        line.say(&Request::Join { token: self.token.clone(), round })?;
        match line.hear()? {
            Reply::Joined => metered(line.into_socket(), &self.meter),
            reply => Err(unexpected(reply)),
        }
    }

    /// Says something.
    ///
    /// # Errors
    /// If the link is down.
    pub fn say(&mut self, request: &Request) -> Result<()> {
        self.line.say(request)
    }

    /// Sends a piece of an image.
    ///
    /// # Errors
    /// If the link is down.
    pub fn send_data(&mut self, data: &[u8]) -> Result<()> {
        self.meter.add(data.len() as u64);
        self.line.send_data(data)
    }

    /// Waits for what the job or the destination says, or somebody who cancels.
    ///
    /// # Errors
    /// If somebody does, or the link is down.
    pub fn next(
        &mut self,
        mut worker: Option<&mut Worker>,
        cancel: Option<&Cancel>,
    ) -> Result<Happening> {
        loop {
            let mut fds = vec![self.line.as_fd()];
            fds.extend(cancel.map(AsFd::as_fd));
            fds.extend(worker.as_deref().map(AsFd::as_fd));
            // A job may take as long as memory is large.
            let patience = worker.is_none().then_some(PATIENCE);
            let ready = wait_readable(&fds, patience)?;
            if !ready.contains(&true) {
                return Err(Error::Link("no answer comes".to_owned()));
            }
            if cancel.is_some_and(Cancel::is_due) {
                return Err(Error::Cancelled);
            }
            // What the destination says explains what its end of the page connection does.
            if ready[0] {
                return match self.line.hear()? {
                    Reply::Refused { text, hint } => Err(there(text, hint)),
                    reply => Ok(Happening::Said(reply)),
                };
            }
            let Some(worker) = worker.as_deref_mut().filter(|_| ready.last() == Some(&true)) else {
                continue;
            };
            match worker.next_event()? {
                event @ (Event::Log { .. } | Event::Progress { .. }) => repeat(&event),
                event => return Ok(Happening::Job(event)),
            }
        }
    }

    /// After a job has lost its connection: what the destination has to say about it.
    pub fn explain(&mut self, error: Error) -> Error {
        const SOON: Duration = Duration::from_secs(2);
        if !matches!(error, Error::Link(_)) {
            return error;
        }
        match wait_readable(&[self.line.as_fd()], Some(SOON)) {
            Ok(ready) if ready == [true] => match self.line.hear() {
                Ok(Reply::Refused { text, hint }) => there(text, hint),
                _ => error,
            },
            _ => error,
        }
    }
}

fn there(text: String, hint: Option<String>) -> Error {
    Error::Refused { text: format!("the destination: {text}"), hint }
}

/// What to make of an answer that is not the one that was waited for.
pub fn unexpected(reply: Reply) -> Error {
    match reply {
        Reply::Refused { text, hint } => there(text, hint),
        reply => Error::Protocol(format!("it says {reply:?} out of turn")),
    }
}
