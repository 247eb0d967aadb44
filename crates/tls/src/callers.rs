//! Connections of which it is not known yet who is at the other end: nobody needs a certificate, or a token, to make one.
//!
//! Each has a short time to show who that is, and there are few at a time: of too many the one that has taken longest is
//! closed. So whoever shows nothing keeps nobody out who has something to show.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use crate::{Result, failed};

/// All connections of which it is not known yet who is at the other end.
#[derive(Debug)]
pub struct Callers {
    patience: Duration,
    most: usize,
    state: Mutex<CallersState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CallersState {
    /// How many there have been.
    count: u64,
    /// The one that has taken longest comes first.
    all: VecDeque<WaitingCaller>,
}

#[derive(Debug)]
struct WaitingCaller {
    number: u64,
    until: Instant,
    socket: OwnedFd,
}

impl WaitingCaller {
    /// Whoever reads from it or writes to it notices.
    fn close(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// A connection that is one of these as long as this is there.
#[derive(Debug)]
pub struct Caller {
    callers: Arc<Callers>,
    number: u64,
}

impl Callers {
    /// Nobody yet, and a thread that closes whoever takes longer than `patience`. There are `most` at a time.
    #[must_use]
    pub fn new(patience: Duration, most: usize) -> Arc<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let callers = Arc::new(Self { patience, most, state, changed });
        let watching = Arc::downgrade(&callers);
        thread::spawn(move || {
            while let Some(callers) = watching.upgrade() {
                callers.close_late();
            }
        });
        callers
    }

    /// Takes a connection among them, and closes another one if there are too many.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn add(self: &Arc<Self>, socket: &impl AsFd) -> Result<Caller> {
        let socket = socket.as_fd().try_clone_to_owned();
        let socket = socket.map_err(|e| failed("a second descriptor", &e))?;
        let mut state = self.state();
        state.count += 1;
        let number = state.count;
        state.all.push_back(WaitingCaller {
            number,
            until: Instant::now() + self.patience,
            socket,
        });
        if state.all.len() > self.most
            && let Some(first) = state.all.pop_front()
        {
            tracing::warn!("{} connections at once show nothing: one of them is closed", self.most);
            first.close();
        }
        drop(state);
        self.changed.notify_all();
        Ok(Caller { callers: Arc::clone(self), number })
    }

    fn state(&self) -> MutexGuard<'_, CallersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes those that have taken too long, and waits until the next one does.
    fn close_late(&self) {
        let mut state = self.state();
        let now = Instant::now();
        while let Some(late) = state.all.pop_front_if(|first| first.until <= now) {
            tracing::debug!("a connection does not show whose it is");
            late.close();
        }
        let left = state.all.front().map(|first| first.until.saturating_duration_since(now));
        // Looked at again from time to time, for nobody may come any more.
        let left = left.unwrap_or(self.patience).min(self.patience);
        drop(self.changed.wait_timeout(state, left));
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.callers.state().all.retain(|it| it.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::os::unix::net::UnixStream;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    /// A connection, and the agent's end of it.
    fn connection() -> (UnixStream, OwnedFd) {
        let (near, far) = UnixStream::pair().unwrap();
        (near, far.into())
    }

    fn is_open(mut near: &UnixStream) -> bool {
        near.set_nonblocking(true).unwrap();
        near.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    #[test]
    fn of_too_many_the_first_one_goes() {
        let callers = Callers::new(LONG, 2);
        let all = [(); 4].map(|()| connection());
        let mut known: Vec<Caller> =
            all[..2].iter().map(|it| callers.add(&it.1).unwrap()).collect();
        // One that has shown who it is, is none of them any more, and the next one may come.
        known.remove(0);
        known.push(callers.add(&all[2].1).unwrap());
        assert!(all[..3].iter().all(|(near, _)| is_open(near)));
        known.push(callers.add(&all[3].1).unwrap());
        assert_eq!([0, 1, 2, 3].map(|it: usize| is_open(&all[it].0)), [true, false, true, true]);
        assert_eq!(callers.state().all.len(), 2);
        drop(known);
        assert!(callers.state().all.is_empty());
    }

    #[test]
    fn who_takes_too_long_is_closed() {
        let callers = Callers::new(Duration::from_millis(10), 100);
        let (mut silent, theirs) = connection();
        let _caller = callers.add(&theirs).unwrap();
        // Until it is closed.
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    }
}
