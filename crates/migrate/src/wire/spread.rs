//! One stream of bytes, in both directions, over several connections at the same time.
//!
//! At each end a thread for every connection takes the next piece of the stream when its connection is free, and sends
//! it with its number. The other end passes the pieces on in order:
//!
//! ```text
//!     piece   number u64   length u32   length bytes     up to 128 KiB
//!     end     number u64   0 u32                         on each connection: so many pieces there were
//! ```
//!
//! Numbers are little-endian. A connection that ends without having said so, or says what makes no sense, ends all of
//! them: to both processes that is the loss of the link.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::Shutdown as How;

use super::relay::{Budget, Meter, metered};
use crate::error::{Context, Result};

/// Connections of one stream.
pub(crate) const MAX_CONNECTIONS: usize = 16;
/// Bytes of one piece.
const PIECE: usize = 128 << 10;
/// A number and a length.
const HEADER: usize = 12;

/// Makes one connection of several, with a meter before it if one is given. What is returned is spoken to instead.
///
/// # Errors
/// If there are no more descriptors.
pub(crate) fn unite(mut connections: Vec<OwnedFd>, meter: Option<&Arc<Meter>>) -> Result<OwnedFd> {
    match (connections.len(), meter) {
        (1, None) => Ok(connections.remove(0)),
        (1, Some(meter)) => metered(connections.remove(0), meter),
        _ => spread(connections, meter.map(Arc::clone)).map(|(_, theirs)| theirs),
    }
}

fn spread(connections: Vec<OwnedFd>, meter: Option<Arc<Meter>>) -> Result<(Arc<Spread>, OwnedFd)> {
    let (near, theirs) = UnixStream::pair().context(|| "socketpair".to_owned())?;
    let spread = Arc::new(Spread {
        near,
        far: connections.into_iter().map(File::from).collect(),
        meter,
        outgoing: Mutex::new(Outgoing { number: 0, budget: Budget::new() }),
        ended: AtomicUsize::new(0),
        order: Mutex::default(),
        changed: Condvar::new(),
    });
    for index in 0..spread.far.len() {
        for work in [Spread::send, Spread::receive] {
            let spread = Arc::clone(&spread);
            thread::spawn(move || {
                if let Err(error) = work(&spread, &spread.far[index]) {
                    spread.fail(&error);
                }
            });
        }
    }
    Ok((spread, theirs.into()))
}

/// The stream at one of its ends.
#[derive(Debug)]
struct Spread {
    near: UnixStream,
    far: Vec<File>,
    meter: Option<Arc<Meter>>,
    outgoing: Mutex<Outgoing>,
    /// Connections over which all was sent.
    ended: AtomicUsize,
    order: Mutex<Order>,
    changed: Condvar,
}

/// What goes out. Whoever has it locked takes the next piece.
#[derive(Debug)]
struct Outgoing {
    number: u64,
    budget: Budget,
}

/// What has come in.
#[derive(Debug, Default)]
struct Order {
    /// The piece that is to be passed on next.
    next: u64,
    /// Pieces that have come, one of a connection.
    held: BTreeSet<u64>,
    /// Connections that have said their last, and how many pieces there are by that.
    ended: usize,
    end: Option<u64>,
    has_failed: bool,
}

impl Order {
    /// A connection has brought a piece.
    fn hold(&mut self, number: u64, connections: usize) -> io::Result<()> {
        if number < self.next || !self.held.insert(number) {
            return Err(ErrorKind::InvalidData.into());
        }
        self.check(connections)
    }

    /// A connection brings nothing any more; whether none does.
    fn finish(&mut self, number: u64, connections: usize) -> io::Result<bool> {
        self.ended += 1;
        if *self.end.get_or_insert(number) != number {
            return Err(ErrorKind::InvalidData.into());
        }
        if self.ended == connections && self.next == number {
            return Ok(true);
        }
        self.check(connections).map(|()| false)
    }

    /// If all connections wait for a piece that none of them has, it never comes.
    fn check(&self, connections: usize) -> io::Result<()> {
        let all_wait = self.held.len() + self.ended == connections;
        if all_wait && self.held.first() != Some(&self.next) {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(())
    }
}

impl Spread {
    /// Sends pieces of what the process here says, as fast as this connection takes them.
    fn send(&self, mut to: &File) -> io::Result<()> {
        let mut frame = vec![0; HEADER + PIECE];
        loop {
            let len = self.take(&mut frame)?;
            to.write_all(&frame[..HEADER + len])?;
            if len == 0 {
                let is_last = self.ended.fetch_add(1, Ordering::SeqCst) + 1 == self.far.len();
                return if is_last { self.wait_left() } else { Ok(()) };
            }
        }
    }

    /// Waits until the process here is gone, or both directions are over: nobody waits then for what may come. The other end
    /// could keep connections open for ever.
    fn wait_left(&self) -> io::Result<()> {
        let mut near = [PollFd::new(&self.near, PollFlags::empty())];
        loop {
            match poll(&mut near, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Err(ErrorKind::BrokenPipe.into()),
            }
        }
    }

    /// The next piece, as a frame: how long it is.
    fn take(&self, frame: &mut [u8]) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        let len = (&self.near).read(&mut frame[HEADER..])?;
        frame[..8].copy_from_slice(&outgoing.number.to_le_bytes());
        frame[8..HEADER].copy_from_slice(&u32::try_from(len).unwrap_or(0).to_le_bytes());
        if len > 0 {
            outgoing.number += 1;
            if let Some(meter) = &self.meter {
                meter.pass(len, &mut outgoing.budget);
            }
        }
        Ok(len)
    }

    /// Passes on what this connection brings, when it is its turn.
    fn receive(&self, mut from: &File) -> io::Result<()> {
        let mut buffer = vec![0; PIECE];
        loop {
            let mut header = [0; HEADER];
            from.read_exact(&mut header)?;
            let [number @ .., a, b, c, d] = header;
            let number = u64::from_le_bytes(number);
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            if len == 0 {
                return self.finish(number);
            }
            let piece = buffer.get_mut(..len).ok_or(ErrorKind::InvalidData)?;
            from.read_exact(piece)?;
            self.pass_on(number, piece)?;
        }
    }

    fn pass_on(&self, number: u64, piece: &[u8]) -> io::Result<()> {
        let mut order = lock(&self.order);
        order.hold(number, self.far.len())?;
        while order.next != number {
            if order.has_failed {
                return Err(ErrorKind::BrokenPipe.into());
            }
            order = self.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        (&self.near).write_all(piece)?;
        order.held.remove(&number);
        order.next += 1;
        self.changed.notify_all();
        Ok(())
    }

    fn finish(&self, number: u64) -> io::Result<()> {
        if lock(&self.order).finish(number, self.far.len())? {
            // The process here may be gone already.
            let _ = self.near.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Nothing goes on: neither here nor at the other end.
    fn fail(&self, error: &io::Error) {
        // First of all: somebody may wait in there, with the order locked.
        let _ = self.near.shutdown(Shutdown::Both);
        for far in &self.far {
            let _ = rustix::net::shutdown(far, How::Both);
        }
        if !std::mem::replace(&mut lock(&self.order).has_failed, true) {
            tracing::debug!("one of {} connections for pages: {error}", self.far.len());
        }
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, Instant};

    use super::*;

    /// Several connections, each with its two ends.
    fn connections(count: usize) -> (Vec<OwnedFd>, Vec<OwnedFd>) {
        (0..count)
            .map(|_| UnixStream::pair().unwrap())
            .map(|(a, b)| (OwnedFd::from(a), OwnedFd::from(b)))
            .unzip()
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from((at / 251 + at) % 256).unwrap()).collect()
    }

    #[test]
    fn all_comes_in_order_both_ways_and_is_counted_once() {
        let (here, there) = connections(3);
        let meter = Meter::new(None);
        let mut here = UnixStream::from(unite(here, Some(&meter)).unwrap());
        let mut there = UnixStream::from(unite(there, None).unwrap());
        let (long, short) = (bytes(7 << 20), bytes(100_000));
        let says = (here.try_clone().unwrap(), long.clone());
        thread::spawn(move || {
            (&says.0).write_all(&says.1).unwrap();
            says.0.shutdown(Shutdown::Write).unwrap();
        });
        let mut heard = Vec::new();
        there.read_to_end(&mut heard).unwrap();
        assert!(heard == long);
        assert_eq!(meter.sent(), long.len() as u64);
        // The other way is open still.
        there.write_all(&short).unwrap();
        drop(there);
        let mut heard = Vec::new();
        here.read_to_end(&mut heard).unwrap();
        assert!(heard == short);
    }

    /// Each piece is paid for out of one budget, whichever connection takes it.
    #[test]
    fn a_limit_is_of_all_connections_together() {
        const LIMIT: u64 = 4 << 20;
        const LEN: usize = 1 << 20;
        let (here, there) = connections(4);
        let meter = Meter::new(Some(LIMIT));
        let (spread, here) = spread(here, Some(Arc::clone(&meter))).unwrap();
        // The budget is not asked: the thread that waits for the next piece has it locked.
        let begin = Instant::now();
        let mut here = UnixStream::from(here);
        let mut there = UnixStream::from(unite(there, None).unwrap());
        let says = thread::spawn(move || {
            here.write_all(&bytes(LEN)).unwrap();
            here.shutdown(Shutdown::Write).unwrap();
            here
        });
        let mut heard = Vec::new();
        there.read_to_end(&mut heard).unwrap();
        assert_eq!((heard.len(), meter.sent()), (LEN, LEN as u64));
        drop(says.join().unwrap());
        // What was sent is worth a quarter of a second, and nobody may send before that is over.
        let paid = lock(&spread.outgoing).budget.paid();
        assert!(paid - begin >= Duration::from_millis(249), "{:?}", paid - begin);
    }

    #[test]
    fn the_loss_of_one_is_the_loss_of_all() {
        let (here, there) = connections(3);
        let cut = there[1].try_clone().unwrap();
        let mut here = UnixStream::from(unite(here, None).unwrap());
        let mut there = UnixStream::from(unite(there, None).unwrap());
        rustix::net::shutdown(&cut, How::Both).unwrap();
        assert_eq!(there.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(here.read(&mut [0; 1]).unwrap(), 0);
        assert!(here.write_all(&bytes(1 << 20)).is_err());
    }

    /// Whoever has certificates could have an agent keep connections, and threads, for ever.
    #[test]
    fn connections_that_nobody_listens_to_end() {
        let (here, there) = connections(3);
        let mut near = UnixStream::from(unite(here, None).unwrap());
        near.write_all(b"last").unwrap();
        drop(near);
        let mut heard = 0;
        for far in there {
            let mut far = UnixStream::from(far);
            // If it stays open, this fails.
            far.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            let mut all = Vec::new();
            far.read_to_end(&mut all).unwrap();
            heard += all.len();
        }
        assert_eq!(heard, HEADER + b"last".len() + 3 * HEADER);
    }

    /// What comes over two connections, and whether the stream ends in order after that.
    fn judged(frames: [&[(u64, &[u8])]; 2]) -> Vec<u8> {
        let (here, there) = connections(2);
        let mut there = UnixStream::from(unite(there, None).unwrap());
        for (connection, frames) in here.into_iter().zip(frames) {
            let mut connection = File::from(connection);
            for (number, piece) in frames {
                let len = u32::try_from(piece.len()).unwrap();
                let frame = [&number.to_le_bytes()[..], &len.to_le_bytes(), piece].concat();
                // It may have been refused already.
                let _ = connection.write_all(&frame);
            }
            // It stays open: the other end must find out by itself.
            std::mem::forget(connection);
        }
        // If nobody finds out, the answer below goes through.
        there.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut heard = Vec::new();
        // The end comes in any case; after an error nothing can be said either.
        let _ = there.read_to_end(&mut heard);
        let is_open = there.write_all(b"answer").is_ok();
        if is_open {
            heard.push(b'!')
        }
        heard
    }

    #[test]
    fn pieces_that_make_no_sense_are_refused() {
        assert_eq!(judged([&[(1, b"b"), (2, b"")], &[(0, b"a"), (2, b"")]]), b"ab!");
        assert_eq!(judged([&[(0, b"a"), (1, b"b"), (2, b"")], &[(2, b"")]]), b"ab!");
        // One that has been before.
        assert!(!judged([&[(0, b"a"), (0, b"b")], &[]]).ends_with(b"!"));
        // Both have the same.
        assert!(!judged([&[(1, b"a")], &[(1, b"b")]]).ends_with(b"!"));
        // One never comes.
        assert_eq!(judged([&[(5, b"a")], &[(7, b"b")]]), b"");
        assert_eq!(judged([&[(5, b"a")], &[(6, b"")]]), b"");
        // Ends that are none.
        assert_eq!(judged([&[(0, b"")], &[(1, b"")]]), b"");
        assert_eq!(judged([&[(3, b"")], &[(3, b"")]]), b"");
        // Longer than any.
        assert_eq!(judged([&[(0, &vec![1; PIECE + 1])], &[]]), b"");
    }
}
