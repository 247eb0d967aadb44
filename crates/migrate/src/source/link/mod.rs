//! The connections to the destination: one for words, and one for the pages of each round.

mod images;
mod written;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use torpor_worker::{Event, Outcome, Worker};

use self::images::KnownImages;
pub(super) use self::images::{MIN_COMPARED, Sent};
use self::written::Written;
use crate::cancel::Cancel;
use crate::engine::{repeat, wait_readable};
use crate::error::{Error, Result};
use crate::files::Step;
use crate::progress::Awaited;
use crate::wire::Peer;
use crate::wire::carrier::Carrier;
use crate::wire::difference::Allowance;
use crate::wire::frame::{Line, MAX_FRAME};
use crate::wire::message::{Begin, Reply, Request};
use crate::wire::relay::{Budget, Meter};
use crate::wire::spread::unite;

/// No more than so many bytes are sent at once to measure the link.
const MAX_MEASURED: u64 = 256 << 20;
/// How long after one end's failure the other end says why.
const SOON: Duration = Duration::from_secs(2);
/// How long a destination may take to hear the last word.
const HEARD: Duration = Duration::from_secs(20);
/// How long a connection that is lost while tasks wait for pages is made again.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How often.
const PAUSE: Duration = Duration::from_millis(100);

/// How often it is looked whether the images of an earlier round are read, or the destination has answered.
const LOOK: Duration = Duration::from_millis(1);

/// What was waited for.
#[derive(Debug)]
pub(super) enum Happening {
    /// The job says something.
    Job(Event),
    /// The destination says something.
    Said(Reply),
}

/// The way to the destination.
#[derive(Debug)]
pub(super) struct Link {
    line: Line,
    /// Whether the destination has said that nothing of it is left there.
    is_refused: bool,
    pages: Arc<PageConnections>,
    budget: Budget,
    /// Counts what goes there.
    pub meter: Arc<Meter>,
    earlier: KnownImages,
    /// Reads more of them, while the next round is taken.
    reading: Option<JoinHandle<Result<KnownImages>>>,
    /// What may be repeated of them.
    allowance: Allowance,
    /// Tells which images are there, while a job writes others.
    written: Option<Written>,
    /// The last round whose files in memory are read once more there, if a tree is built early.
    built: u32,
}

impl Link {
    /// Connects, and asks whether something may come. With the number of the agent that says so.
    ///
    /// # Errors
    /// If nobody answers there, or with no; if somebody cancels.
    pub(super) fn begin(
        to: &Peer,
        begin: Begin,
        limit: Option<u64>,
        cancel: &Cancel,
    ) -> Result<(Self, String)> {
        let (silence, connections, built) = (begin.silence(), begin.connections, begin.build_after);
        let (peer, request) = (to.clone(), Request::Begin(Box::new(begin)));
        let asking = thread::spawn(move || ask(&peer, &request, silence));
        let (line, token, agent) = result_of(asking, Some(cancel))?;
        let pages = PageConnections { to: to.clone(), token, connections, sets: AtomicU64::new(0) };
        Ok((Self::over(line, pages, built, limit), agent))
    }

    /// Connects, and asks whether something could come.
    ///
    /// # Errors
    /// If nobody answers there, or with no.
    pub(super) fn rehearse(to: &Peer, begin: Begin) -> Result<Self> {
        let silence = begin.silence();
        let (line, token, _) = ask(to, &Request::Rehearse(Box::new(begin)), silence)?;
        let pages =
            PageConnections { to: to.clone(), token, connections: 1, sets: AtomicU64::new(0) };
        Ok(Self::over(line, pages, 0, None))
    }

    fn over(line: Line, pages: PageConnections, built: u32, limit: Option<u64>) -> Self {
        let (budget, meter) = (Budget::new(), Meter::new(limit));
        let (pages, earlier) = (Arc::new(pages), HashMap::new());
        let (reading, allowance, written) = (None, Allowance::default(), None);
        let is_refused = false;
        Self { line, is_refused, pages, budget, meter, earlier, reading, allowance, written, built }
    }

    /// A connection for the pages of a round: one, or several that are used as one.
    ///
    /// # Errors
    /// If it does not come about, or somebody cancels.
    pub(super) fn join(&self, round: u32, cancel: &Cancel) -> Result<OwnedFd> {
        unite(self.connect(round, cancel)?, Some(&self.meter))
    }

    /// Connections for the pages of a round.
    fn connect(&self, round: u32, cancel: &Cancel) -> Result<Vec<OwnedFd>> {
        let pages = Arc::clone(&self.pages);
        let joining = thread::spawn(move || pages.join(round));
        result_of(joining, Some(cancel))?.map_err(unexpected)
    }

    /// What carries the pages that are fetched later, over as many connections as it takes, and
    /// its end for the job that has them.
    ///
    /// # Errors
    /// If the first connection does not come about, or somebody cancels.
    pub(super) fn carry(
        &self,
        round: u32,
        awaited: Awaited,
        cancel: &Cancel,
    ) -> Result<(Arc<Carrier>, OwnedFd)> {
        let first = self.connect(round, cancel)?;
        let (carrier, ours) = Carrier::start(Some(Arc::clone(&self.meter)))?;
        carrier.attach(unite(first, None)?);
        let (pages, kept) = (Arc::clone(&self.pages), Arc::clone(&carrier));
        thread::spawn(move || keep_connected(&kept, &awaited, || pages.join(round)));
        Ok((carrier, ours))
    }

    /// Says something.
    ///
    /// # Errors
    /// If the link is down.
    pub(super) fn say(&mut self, request: &Request) -> Result<()> {
        self.line.say(request)
    }

    /// Says something, unless somebody cancels before it is on its way.
    ///
    /// # Errors
    /// If the link is down, or somebody cancels.
    pub(super) fn say_unless(&mut self, request: &Request, cancel: Option<&Cancel>) -> Result<()> {
        let Some(cancel) = cancel else { return self.say(request) };
        let is_said = self.line.say_until(request, cancel.as_fd())?;
        if is_said { Ok(()) } else { Err(Error::Cancelled) }
    }

    /// Sends a piece of an image or a file.
    ///
    /// # Errors
    /// If the link is down, or somebody cancels.
    fn send_data(&mut self, data: &[u8], cancel: Option<&Cancel>) -> Result<()> {
        let wait = self.meter.count(data.len(), &mut self.budget);
        match cancel {
            Some(cancel) if wait_readable(&[cancel.as_fd()], Some(wait))? == [true] => {
                return Err(Error::Cancelled);
            }
            Some(_) => {}
            None => thread::sleep(wait),
        }
        self.send_unless(data, cancel)
    }

    fn send_unless(&mut self, data: &[u8], cancel: Option<&Cancel>) -> Result<()> {
        let Some(cancel) = cancel else { return self.line.send_data(data) };
        let is_sent = self.line.send_data_until(data, cancel.as_fd())?;
        if is_sent { Ok(()) } else { Err(Error::Cancelled) }
    }

    /// What the destination says next, unless somebody cancels before.
    ///
    /// # Errors
    /// If somebody does, or the link is down.
    pub(super) fn hear_unless(&mut self, cancel: Option<&Cancel>) -> Result<Reply> {
        if cancel.is_none() {
            return self.hear(None);
        }
        match self.next(None, cancel)? {
            Happening::Said(reply) => Ok(reply),
            Happening::Job(_) => Err(Error::refused("no job was waited for")),
        }
    }

    fn hear(&mut self, cancel: Option<&Cancel>) -> Result<Reply> {
        let reply = self.line.hear_until(cancel.map(AsFd::as_fd))?;
        self.is_refused |= matches!(reply, Reply::Refused { .. });
        Ok(reply)
    }

    /// Whether the destination has refused: it does so when nothing of it is left there, and never lets the tasks run.
    #[must_use]
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Tells what is different in a tree of files.
    ///
    /// # Errors
    /// If the link is down, or somebody cancels.
    pub(super) fn tell(&mut self, step: Step<'_>, cancel: &Cancel) -> Result<()> {
        match step {
            Step::Change(change) => {
                self.say_unless(&Request::Change(Box::new(change)), Some(cancel))
            }
            Step::Data(data) => self.send_data(data, Some(cancel)),
            Step::Looked => Ok(()),
        }
    }

    /// Waits until a round is there in whole.
    ///
    /// # Errors
    /// If the destination says something else, or the link is down.
    pub(super) fn arrived(&mut self, number: u32) -> Result<()> {
        match self.hear(None)? {
            Reply::Arrived { number: there } if there == number => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }

    /// Nothing moves after all.
    ///
    /// # Errors
    /// If the link is down.
    pub(super) fn part(&mut self) -> Result<()> {
        self.say(&Request::Abort { reason: "it was a rehearsal".to_owned() })
    }

    /// How many bytes a second go to the destination, measured for about `time`. They are none of those that are counted.
    ///
    /// # Errors
    /// If the link is down, or somebody cancels.
    pub(super) fn measure(&mut self, time: Duration, cancel: Option<&Cancel>) -> Result<u64> {
        let piece = vec![0x5a; MAX_FRAME];
        let (start, mut len) = (Instant::now(), MAX_FRAME as u64);
        loop {
            let before = Instant::now();
            self.say_unless(&Request::Measure { len }, cancel)?;
            for _ in 0..len / MAX_FRAME as u64 {
                self.send_unless(&piece, cancel)?;
            }
            match self.hear_unless(cancel)? {
                Reply::Measured => {}
                reply => return Err(unexpected(reply)),
            }
            let took = before.elapsed();
            // What goes by fast is measured with more: buffers on the way take some at once.
            if start.elapsed() >= time || len >= MAX_MEASURED {
                let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
                return Ok(len.saturating_mul(1_000_000_000) / nanos);
            }
            len *= 2;
        }
    }

    /// The job that is waited for next writes images into `dir`: each that it has finished is sent while it writes others.
    pub(super) fn send_as_written(&mut self, dir: &Path) {
        self.written = Written::watch(dir);
    }

    /// Waits for what the job or the destination says, or somebody who cancels: as long as the other end says that it
    /// lives, for what either does may take as long as memory is large. Images that are written meanwhile are sent.
    ///
    /// # Errors
    /// If somebody does, or the link is down.
    pub(super) fn next(
        &mut self,
        mut worker: Option<&mut Worker>,
        cancel: Option<&Cancel>,
    ) -> Result<Happening> {
        loop {
            let mut fds: Vec<_> = cancel.map(AsFd::as_fd).into_iter().collect();
            let clock = self.written.as_ref().map(|written| (fds.len() + 1, written.as_fd()));
            fds.extend(clock.map(|(_, clock)| clock));
            fds.extend(worker.as_deref().map(AsFd::as_fd));
            let at = clock.map(|(at, _)| at);
            let Some(ready) = self.line.wait(&fds)? else { continue };
            if cancel.is_some_and(Cancel::is_due) {
                return Err(Error::Cancelled);
            }
            // What the destination says explains what its end of the page connection does.
            if ready[0] {
                return match (self.hear(cancel)?, worker) {
                    // The job has failed, and its end comes later than the destination's echo.
                    (Reply::Refused { text, by_source: true, .. }, Some(worker)) => {
                        let end = end_of(worker, SOON)?.ok_or(Error::Link(text))?;
                        Ok(Happening::Job(Event::Ended(end)))
                    }
                    (reply @ Reply::Refused { .. }, _) => Err(unexpected(reply)),
                    (reply, _) => Ok(Happening::Said(reply)),
                };
            }
            if at.is_some_and(|at| ready[at]) {
                self.send_written(cancel)?;
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
    pub(super) fn explain(&mut self, error: Error) -> Error {
        match error {
            Error::Link(_) => self.last_word().unwrap_or(error),
            _ => error,
        }
    }

    /// Says the last word, and waits until the destination has heard it and closes the line: a process that ends takes along
    /// what it still passes on.
    ///
    /// # Errors
    /// If the link is down.
    pub(super) fn close(&mut self) -> Result<()> {
        self.say(&Request::Over)?;
        self.speaks_within(HEARD).map(drop)
    }

    /// Why the destination has refused, if it says so soon.
    pub(super) fn last_word(&mut self) -> Option<Error> {
        if !self.speaks_within(SOON).ok()? {
            return None;
        }
        match self.hear(None).ok()? {
            reply @ Reply::Refused { by_source: false, .. } => Some(unexpected(reply)),
            _ => None,
        }
    }

    /// Waits until the destination says more than that it lives, or closes the line; whether it has within this time.
    fn speaks_within(&mut self, time: Duration) -> Result<bool> {
        let start = Instant::now();
        while let Some(left) = time.checked_sub(start.elapsed())
            && wait_readable(&[self.line.as_fd()], Some(left))? == [true]
        {
            if self.line.wait(&[])?.is_some_and(|ready| ready[0]) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Asks whether something may come. The line to whoever says that it may, with the token and the number of that agent.
fn ask(to: &Peer, request: &Request, silence: Duration) -> Result<(Line, String, String)> {
    let mut line = Line::open(to.connect()?)?;
    line.say(request)?;
    line.beat(silence)?;
    match line.hear()? {
        Reply::Ready { token, agent, .. } => Ok((line, token, agent)),
        reply => Err(unexpected(reply)),
    }
}

/// Waits for what a thread does, or for somebody who cancels: it does it in vain then.
pub(super) fn result_of<T>(doing: JoinHandle<Result<T>>, cancel: Option<&Cancel>) -> Result<T> {
    while !doing.is_finished() {
        if cancel.is_some_and(Cancel::is_due) {
            return Err(Error::Cancelled);
        }
        thread::sleep(LOOK);
    }
    doing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// How connections for pages are made.
#[derive(Debug)]
struct PageConnections {
    to: Peer,
    token: String,
    /// How many are used as one.
    connections: usize,
    /// How often they were made.
    sets: AtomicU64,
}

/// Connections that are used as one, or why the destination does not want them.
type Answer = std::result::Result<Vec<OwnedFd>, Reply>;

impl PageConnections {
    /// Connects for the pages of a round.
    fn join(&self, round: u32) -> Result<Answer> {
        let set = self.sets.fetch_add(1, Ordering::Relaxed) + 1;
        let mut all = Vec::new();
        for _ in 0..self.connections {
            let mut line = Line::open(self.to.connect()?)?;
            line.say(&Request::Join { token: self.token.clone(), round, set })?;
            match line.hear()? {
                Reply::Joined => all.push(line.into_socket()),
                reply => return Ok(Err(reply)),
            }
        }
        Ok(Ok(all))
    }
}

/// Makes each connection that is lost anew, until the destination does not want it any more.
fn keep_connected(carrier: &Carrier, awaited: &Awaited, join: impl Fn() -> Result<Answer>) {
    while carrier.wait_lost() {
        // One that has ended has the tasks wait for nothing.
        let _reminder = carrier.is_spoken_to().then(|| awaited.connection(DAY));
        if carrier.is_spoken_to() {
            tracing::warn!(
                "the connection to {} for pages is lost: the tasks wait for another one",
                awaited.to
            );
        }
        let start = Instant::now();
        loop {
            let joined = match join() {
                Ok(Ok(all)) => unite(all, None),
                // It has all, or has given the tasks up.
                Ok(Err(_)) => return carrier.give_up(),
                Err(error) => Err(error),
            };
            match joined {
                Ok(one) => break carrier.attach(one),
                Err(error) if start.elapsed() > DAY => {
                    tracing::warn!("no connection to {} for pages: {error}", awaited.to);
                    return carrier.give_up();
                }
                Err(error) => tracing::debug!("{error}"),
            }
            thread::sleep(PAUSE);
        }
    }
}

/// How a job ends, if it does so within `patience`.
fn end_of(worker: &mut Worker, patience: Duration) -> Result<Option<Outcome>> {
    let start = Instant::now();
    while let Some(left) = patience.checked_sub(start.elapsed())
        && wait_readable(&[worker.as_fd()], Some(left))? == [true]
    {
        match worker.next_event()? {
            Event::Ended(outcome) => return Ok(Some(outcome)),
            // It has not failed, and waits to be told so.
            Event::Point { held: true, .. } => break,
            event => repeat(&event),
        }
    }
    Ok(None)
}

/// What to make of an answer that is not the one that was waited for.
pub(super) fn unexpected(reply: Reply) -> Error {
    match reply {
        Reply::Refused { text, hint, .. } => {
            Error::Refused { text: format!("the destination: {text}"), hint }
        }
        reply => Error::Protocol(format!("it says {reply:?} out of turn")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::wire::address::Address;

    /// A link to an end that takes what comes, with a limit.
    fn link(limit: u64) -> Link {
        let (near, mut far) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            // A preamble is what the other end says first.
            let mut bytes = [0; 4096];
            let greeted = far.read(&mut bytes).and_then(|len| far.write_all(&bytes[..len]));
            while greeted.is_ok() && far.read(&mut bytes).is_ok_and(|len| len > 0) {}
        });
        over(near, Some(limit))
    }

    /// A link over a connection.
    pub(super) fn over(near: UnixStream, limit: Option<u64>) -> Link {
        let to = Peer { address: Address::Unix(PathBuf::new()), keys: None };
        let pages =
            PageConnections { to, token: String::new(), connections: 1, sets: AtomicU64::new(0) };
        Link::over(Line::open(near.into()).unwrap(), pages, 0, limit)
    }

    #[test]
    fn a_limit_can_be_cancelled() {
        let mut link = link(1);
        let cancel = Cancel::due().unwrap();
        // Some minutes of it.
        let ended = link.send_data(&[0; 1000], Some(&cancel));
        assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
        link.meter.limit(None);
        link.send_data(&[0; 1000], Some(&Cancel::new().unwrap())).unwrap();
        assert_eq!(link.meter.sent(), 2000);
    }

    /// At an address where somebody listens and never answers.
    #[test]
    fn connecting_can_be_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.socket");
        let _silent = UnixListener::bind(&path).unwrap();
        let to = Peer { address: Address::Unix(path), keys: None };
        let pages =
            PageConnections { to, token: String::new(), connections: 1, sets: AtomicU64::new(0) };
        let link = Link { pages: Arc::new(pages), ..link(1) };
        let cancel = || Cancel::due().unwrap();
        assert!(matches!(link.join(1, &cancel()), Err(Error::Cancelled)));
        let to = link.pages.to.address.clone();
        let awaited = Awaited { id: "one".to_owned(), to, patience: Duration::ZERO };
        assert!(matches!(link.carry(1, awaited, &cancel()), Err(Error::Cancelled)));
    }

    /// Files in memory may be large, and reading them takes long.
    #[test]
    fn reading_earlier_images_can_be_cancelled() {
        let (done, not_yet) = channel::<()>();
        let reading = thread::spawn(move || {
            let _ = not_yet.recv();
            Ok(KnownImages::new())
        });
        let cancel = Cancel::due().unwrap();
        assert!(matches!(result_of(reading, Some(&cancel)), Err(Error::Cancelled)));
        drop(done);
        let reading = thread::spawn(|| Ok(KnownImages::new()));
        assert!(result_of(reading, Some(&cancel)).unwrap().is_empty(), "nobody does any more");
    }
}
