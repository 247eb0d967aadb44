//! A stream of bytes in both directions that outlives the connections that carry it.
//!
//! In the lazy modes the tasks run at the destination while their pages are still here. A
//! connection that is lost then must not be the end of either process that speaks over it. So
//! each of the two speaks to a *carrier* on its own host, and the two carriers keep what the
//! other has not confirmed and send it again over the next connection, which the source makes:
//!
//! ```text
//!     each connection   received u64                   each end, once: where to go on
//!     data              length u32    length bytes     up to 64 KiB
//!     confirmation      0 u32         received u64
//!     end               u32::MAX                       counts as one byte
//! ```
//!
//! Numbers are little-endian. While there is no connection both processes wait.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::Shutdown as How;

use super::relay::Meter;
use crate::engine::wait_readable;
use crate::error::{Context, Result};

/// Bytes of one frame.
const PIECE: usize = 64 << 10;
/// Bytes that may be under way without having been confirmed.
const WINDOW: usize = 8 << 20;
/// Bytes that have come in are confirmed after so many.
const CONFIRM: u64 = 1 << 20;
const END: u32 = u32::MAX;

/// Both directions of the stream, at one of its ends.
///
/// One thread writes to the connection and never reads from it, the other one reads and never
/// writes: so neither waits for the other end to do both at a time.
#[derive(Debug)]
pub(crate) struct Carrier {
    state: Mutex<StreamState>,
    changed: Condvar,
    /// Wakes the thread that writes.
    bell: UnixStream,
    meter: Option<Arc<Meter>>,
}

#[derive(Debug, Default)]
struct StreamState {
    /// What the other end has not confirmed.
    kept: VecDeque<u8>,
    /// Where in the stream that begins.
    confirmed: u64,
    /// Up to where it was sent over this connection.
    sent: u64,
    /// Whether the process here has said all.
    has_ended: bool,
    /// Whether the other end knows that.
    is_end_confirmed: bool,
    /// Bytes that have come and were passed on; one more if the end has come.
    received: u64,
    /// How many of them the other end knows of.
    told: u64,
    /// Whether it is to know of the others at once.
    is_confirmation_due: bool,
    /// The connection in use.
    connection: Option<Arc<File>>,
    /// Whether it is known from where on to write to it.
    is_open: bool,
    /// One that waits for its turn.
    next: Option<File>,
    /// Whether none comes any more.
    is_over: bool,
}

impl StreamState {
    /// The position behind the last byte.
    fn end(&self) -> u64 {
        self.confirmed + self.kept.len() as u64
    }

    /// The other end has everything before `position`.
    fn confirm(&mut self, position: u64) -> io::Result<()> {
        let end = self.end();
        let known = position.min(end).checked_sub(self.confirmed);
        let known = known.filter(|_| position <= end + u64::from(self.has_ended));
        let known = known.and_then(|len| usize::try_from(len).ok());
        self.kept.drain(..known.ok_or(io::ErrorKind::InvalidData)?);
        self.confirmed = position.min(end);
        self.sent = self.sent.max(self.confirmed);
        self.is_end_confirmed |= position > end;
        Ok(())
    }

    /// The next frame that is to be written, if there is one.
    fn due(&mut self) -> Option<(Vec<u8>, Arc<File>)> {
        let connection = Arc::clone(self.connection.as_ref().filter(|_| self.is_open)?);
        if self.is_confirmation_due || self.received - self.told >= CONFIRM {
            self.is_confirmation_due = false;
            self.told = self.received;
            let frame = [&[0; 4][..], &self.received.to_le_bytes()].concat();
            return Some((frame, connection));
        }
        if self.sent < self.end() {
            let at = usize::try_from(self.sent - self.confirmed).unwrap_or(usize::MAX);
            let len = PIECE.min(self.kept.len().saturating_sub(at));
            let mut frame = u32::try_from(len).unwrap_or(0).to_le_bytes().to_vec();
            frame.extend(self.kept.range(at..at + len));
            self.sent += len as u64;
            return Some((frame, connection));
        }
        if self.has_ended && self.sent == self.end() {
            self.sent += 1;
            return Some((END.to_le_bytes().to_vec(), connection));
        }
        None
    }

    /// The connection in use is lost: whoever reads from it notices.
    fn lose(&mut self) {
        self.is_open = false;
        if let Some(connection) = &self.connection {
            let _ = rustix::net::shutdown(&**connection, How::Both);
        }
    }
}

impl Carrier {
    /// One that speaks to a process here. What is returned is for that process.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn start(meter: Option<Arc<Meter>>) -> Result<(Arc<Self>, OwnedFd)> {
        let failed = || "socketpair".to_owned();
        let (ours, theirs) = UnixStream::pair().context(failed)?;
        let (bell, heard) = UnixStream::pair().context(failed)?;
        let taken = ours.try_clone().context(failed)?;
        for end in [&bell, &heard] {
            end.set_nonblocking(true).context(failed)?;
        }
        let (state, changed) = (Mutex::default(), Condvar::new());
        let carrier = Arc::new(Self { state, changed, bell, meter });
        let (taker, bringer) = (Arc::clone(&carrier), Arc::clone(&carrier));
        thread::spawn(move || taker.take(&taken, &heard));
        thread::spawn(move || bringer.bring(&ours));
        Ok((carrier, theirs.into()))
    }

    /// Goes on over this connection.
    pub(crate) fn attach(&self, connection: OwnedFd) {
        self.change(|state| {
            state.next = Some(File::from(connection));
            state.lose();
        });
    }

    /// No further connection comes.
    pub(crate) fn give_up(&self) {
        self.change(|state| {
            state.is_over = true;
            state.next = None;
            state.lose();
        });
    }

    /// Whether the process here may have more to say.
    pub(crate) fn is_spoken_to(&self) -> bool {
        !self.state().has_ended
    }

    /// Waits until a connection is needed; false if none is any more.
    pub(crate) fn wait_lost(&self) -> bool {
        let mut state = self.state();
        while !state.is_over && (state.connection.is_some() || state.next.is_some()) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.is_over
    }

    /// Waits until the other end has all that the process here had to say, or never will have.
    pub(crate) fn drain(&self, patience: Duration) {
        let start = Instant::now();
        let mut state = self.state();
        while !state.is_over && !state.is_end_confirmed {
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and lets everybody look at it.
    fn change<T>(&self, change: impl FnOnce(&mut StreamState) -> T) -> T {
        let changed = change(&mut self.state());
        self.changed.notify_all();
        // One that is rung already will be heard.
        let _ = (&self.bell).write(b".");
        changed
    }

    /// Takes what the process here says, and writes it to the connection, until both are over.
    fn take(&self, mut from: &UnixStream, mut bell: &UnixStream) {
        let mut buffer = vec![0; PIECE];
        loop {
            let (has_room, has_ended) = {
                let state = self.state();
                if state.is_over {
                    return;
                }
                (state.kept.len() < WINDOW, state.has_ended)
            };
            while let Some((frame, connection)) = { self.state().due() } {
                if (&*connection).write_all(&frame).is_err() {
                    // Whoever reads from it notices, too, and then there may be another one.
                    let _ = rustix::net::shutdown(&*connection, How::Both);
                    break;
                }
            }
            let mut fds = vec![bell.as_fd()];
            if has_room && !has_ended {
                fds.push(from.as_fd());
            }
            let Ok(ready) = wait_readable(&fds, None) else { return self.give_up() };
            if ready[0] {
                let _ = bell.read(&mut buffer);
            }
            if ready.get(1) != Some(&true) {
                continue;
            }
            let len = from.read(&mut buffer).unwrap_or(0);
            let mut state = self.state();
            state.has_ended = len == 0;
            state.kept.extend(&buffer[..len]);
            if let Some(meter) = &self.meter {
                meter.add(len as u64);
            }
        }
    }

    /// Brings what comes over one connection after the other to the process here.
    fn bring(&self, to: &UnixStream) {
        while let Some(connection) = self.next() {
            let done = self.resume(&connection).and_then(|()| self.receive(&connection, to));
            if let Err(error) = done {
                tracing::debug!("the connection for pages: {error}");
            }
            self.change(|state| {
                state.lose();
                state.connection = None;
            });
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Waits for the next connection; none if it is over.
    fn next(&self) -> Option<Arc<File>> {
        let mut state = self.state();
        loop {
            if state.is_over {
                return None;
            }
            if let Some(connection) = state.next.take().map(Arc::new) {
                state.connection = Some(Arc::clone(&connection));
                return Some(connection);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Says and hears where to go on.
    fn resume(&self, mut connection: &File) -> io::Result<()> {
        let received = self.state().received;
        connection.write_all(&received.to_le_bytes())?;
        let position = u64::from_le_bytes(read(connection)?);
        self.change(|state| {
            state.confirm(position)?;
            state.sent = position;
            state.told = received;
            // Another one may have come meanwhile.
            state.is_open = state.next.is_none() && !state.is_over;
            Ok(())
        })
    }

    fn receive(&self, from: &File, mut to: &UnixStream) -> io::Result<()> {
        let mut buffer = vec![0; PIECE];
        loop {
            let len = u32::from_le_bytes(read(from)?);
            match usize::try_from(len).unwrap_or(usize::MAX) {
                0 => {
                    let position = u64::from_le_bytes(read(from)?);
                    self.change(|state| state.confirm(position))?;
                }
                len @ 1..=PIECE => {
                    (&*from).read_exact(&mut buffer[..len])?;
                    // A process that has ended has said so on the other way.
                    let _ = to.write_all(&buffer[..len]);
                    let mut state = self.state();
                    state.received += len as u64;
                    let is_due = state.received - state.told >= CONFIRM;
                    drop(state);
                    if is_due {
                        self.change(|_| {});
                    }
                }
                _ if len == END => {
                    let _ = to.shutdown(Shutdown::Write);
                    self.change(|state| {
                        state.received += 1;
                        state.is_confirmation_due = true;
                    });
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }
}

fn read<const LEN: usize>(mut from: &File) -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Bytes that tell where in the stream they are.
    fn bytes(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from((at / 251 + at) % 256).unwrap() ^ seed).collect()
    }

    /// Passes on so many bytes, then ends both ends.
    fn cut_after(len: u64, near: UnixStream, far: UnixStream) {
        let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut &back.0, &mut &back.1));
        let _ = io::copy(&mut (&near).take(len), &mut &far);
        let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
    }

    #[test]
    fn nothing_is_lost_or_doubled_whenever_a_connection_is() {
        let (source, there) = Carrier::start(None).unwrap();
        let (destination, here) = Carrier::start(None).unwrap();
        let connecting = (Arc::clone(&source), Arc::clone(&destination));
        thread::spawn(move || {
            let mut len = 1;
            while connecting.0.wait_lost() {
                let ((a, near), (far, b)) =
                    (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
                connecting.0.attach(a.into());
                connecting.1.attach(b.into());
                cut_after(len, near, far);
                len = len * 3 / 2 + 7;
            }
        });
        let (long, short) = (bytes(0, 5 << 20), bytes(77, 300_000));
        let (mut there, mut here) = (UnixStream::from(there), UnixStream::from(here));
        let said = (there.try_clone().unwrap(), here.try_clone().unwrap());
        let says = (long.clone(), short.clone());
        thread::spawn(move || {
            (&said.0).write_all(&says.0).unwrap();
            said.0.shutdown(Shutdown::Write).unwrap();
        });
        thread::spawn(move || {
            (&said.1).write_all(&says.1).unwrap();
            said.1.shutdown(Shutdown::Write).unwrap();
        });
        let other = thread::spawn(move || {
            let mut heard = Vec::new();
            there.read_to_end(&mut heard).unwrap();
            heard
        });
        let mut heard = Vec::new();
        here.read_to_end(&mut heard).unwrap();
        assert!(heard == long && other.join().unwrap() == short);
        source.drain(Duration::from_secs(60));
        assert!(source.state().is_end_confirmed);
        source.give_up();
        destination.give_up();
        assert!(!source.wait_lost());
    }

    #[test]
    fn positions_that_are_none_are_refused() {
        let mut state = StreamState { kept: VecDeque::from([1, 2, 3]), ..StreamState::default() };
        state.confirm(2).unwrap();
        assert!(state.confirm(1).is_err() && state.confirm(4).is_err());
        state.has_ended = true;
        state.confirm(4).unwrap();
        assert!(state.is_end_confirmed && state.kept.is_empty());
        assert!(state.confirm(5).is_err());
    }
}
