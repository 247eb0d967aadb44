//! The conversations that an agent has which is told to end. It does not wait for those that can still be given up.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use crate::error::{Context, Result};

/// How long an agent stays after the last of them that it has ended: what it has said why is on its way, and whoever has not
/// heard it asks.
const LINGER: Duration = Duration::from_secs(1);

/// All conversations that can be given up.
#[derive(Debug, Default)]
pub(super) struct OpenLines(Mutex<LinesState>);

#[derive(Debug, Default)]
struct LinesState {
    /// How many there have been.
    count: u64,
    sockets: HashMap<u64, OwnedFd>,
    /// The last one that there was when they were hung up on.
    last: Option<u64>,
    /// When the last of these was over.
    over: Option<Instant>,
}

/// A conversation that is one of these as long as this is there.
#[derive(Debug)]
pub(super) struct OpenLine {
    all: Arc<OpenLines>,
    number: u64,
}

impl OpenLines {
    /// Takes one among them.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(super) fn add(self: &Arc<Self>, line: &impl AsFd) -> Result<OpenLine> {
        let socket = line.as_fd().try_clone_to_owned();
        let socket = socket.context(|| "a second descriptor".to_owned())?;
        let mut state = self.state();
        state.count += 1;
        let number = state.count;
        state.sockets.insert(number, socket);
        drop(state);
        Ok(OpenLine { all: Arc::clone(self), number })
    }

    /// Whoever listens to the other end hears that it has ended, and can still say why.
    pub(super) fn hang_up(&self) {
        let mut state = self.state();
        let count = state.count;
        state.last.get_or_insert(count);
        for socket in state.sockets.values() {
            let _ = shutdown(socket, Shutdown::Read);
        }
    }

    /// Whether somebody may not have heard yet why it has ended.
    pub(super) fn are_heard_out(&self) -> bool {
        self.state().over.is_none_or(|over| over.elapsed() > LINGER)
    }

    fn state(&self) -> MutexGuard<'_, LinesState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenLine {
    fn drop(&mut self) {
        let mut state = self.all.state();
        state.sockets.remove(&self.number);
        // Those that come later do not keep the agent for ever.
        if state.last.is_some_and(|last| self.number <= last) {
            state.over = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_is_hung_up_on_is_told_why() {
        let lines = Arc::new(OpenLines::default());
        let [mut given_up, mut decided] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let open = lines.add(&given_up.1).unwrap();
        drop(lines.add(&decided.1).unwrap());
        assert!(lines.state().over.is_none(), "what was decided before");
        lines.hang_up();
        assert!(lines.are_heard_out());
        drop(lines.add(&decided.1).unwrap());
        assert!(lines.state().over.is_none(), "one that comes later");
        assert_eq!(given_up.1.read(&mut [0]).unwrap(), 0);
        given_up.1.write_all(b".").unwrap();
        given_up.0.read_exact(&mut [0]).unwrap();
        decided.0.write_all(b".").unwrap();
        assert_eq!(decided.1.read(&mut [0]).unwrap(), 1);
        drop(open);
        assert!(lines.state().over.is_some());
    }
}
