//! Passes bytes on between a process here and a connection: counts them, holds them back.
//!
//! The engine's processes speak their own protocol over a plain socket. What stands between
//! that socket and the network is here.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::Shutdown as How;

use crate::error::{Context, Result};

/// What is read and written at a time.
const BUFFER: usize = 256 * 1024;

/// Bytes that went out, and how fast they may.
#[derive(Debug)]
pub(crate) struct Meter {
    sent: AtomicU64,
    /// Bytes a second; 0 is as fast as it goes.
    limit: AtomicU64,
    /// Nanoseconds from the start to when the first byte since [`Meter::mark`] was sent.
    first: AtomicU64,
    /// Nanoseconds for which it held back what was to go out.
    held: AtomicU64,
    start: Instant,
}

impl Meter {
    /// One that lets so many bytes a second through.
    #[must_use]
    pub(crate) fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            sent: AtomicU64::new(0),
            limit: AtomicU64::new(limit.unwrap_or(0)),
            first: AtomicU64::new(0),
            held: AtomicU64::new(0),
            start: Instant::now(),
        })
    }

    /// Bytes so far.
    #[must_use]
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes that went another way.
    pub(crate) fn add(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// For how long the limit has held bytes back.
    #[must_use]
    pub(crate) fn held(&self) -> Duration {
        Duration::from_nanos(self.held.load(Ordering::Relaxed))
    }

    /// Watches for the next byte.
    pub(crate) fn mark(&self) {
        self.first.store(0, Ordering::Relaxed);
    }

    /// When the first byte since [`Meter::mark`] went out.
    #[must_use]
    pub(crate) fn first(&self) -> Option<Instant> {
        let nanos = self.first.load(Ordering::Relaxed);
        (nanos > 0).then(|| self.start + Duration::from_nanos(nanos))
    }

    /// Bytes a second from now on; as fast as it goes if not given.
    pub(crate) fn limit(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(0), Ordering::Relaxed);
    }

    /// Counts bytes that go out now, and waits as long as the limit asks for.
    pub(crate) fn pass(&self, bytes: usize, budget: &mut Budget) {
        thread::sleep(self.count(bytes, budget));
    }

    /// Counts bytes that go out now: how long the limit asks to wait.
    pub(crate) fn count(&self, bytes: usize, budget: &mut Budget) -> Duration {
        let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1);
        let _ = self.first.compare_exchange(0, nanos, Ordering::Relaxed, Ordering::Relaxed);
        self.add(bytes as u64);
        let wait = budget.owe(bytes as u64, self.limit.load(Ordering::Relaxed), Instant::now());
        let nanos = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        self.held.fetch_add(nanos, Ordering::Relaxed);
        wait
    }
}

/// What may still go now.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Bytes that have gone ahead of their time are paid for until then.
    paid: Instant,
}

impl Budget {
    /// Of whom has not sent anything yet.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { paid: Instant::now() }
    }

    /// For how long a sender of so many bytes has to wait, from `now` on.
    fn owe(&mut self, bytes: u64, limit: u64, now: Instant) -> Duration {
        let Some(nanos) = bytes.saturating_mul(1_000_000_000).checked_div(limit) else {
            return Duration::ZERO;
        };
        self.paid = self.paid.max(now) + Duration::from_nanos(nanos);
        self.paid.saturating_duration_since(now)
    }

    /// Until when all that was sent is paid for.
    #[cfg(test)]
    pub(crate) fn paid(&self) -> Instant {
        self.paid
    }
}

/// Puts a meter before a connection. What is returned is spoken to instead of it.
///
/// # Errors
/// If there are no more descriptors.
pub(crate) fn metered(connection: OwnedFd, meter: &Arc<Meter>) -> Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair().context(|| "socketpair".to_owned())?;
    let far = File::from(connection);
    let (near_in, far_out) = (ours.try_clone(), far.try_clone());
    let (near_in, far_out) = (near_in.context(dup)?, far_out.context(dup)?);
    let meter = Arc::clone(meter);
    thread::spawn(move || {
        let mut budget = Budget::new();
        forward(near_in, &far_out, |bytes| meter.pass(bytes, &mut budget));
        let _ = rustix::net::shutdown(&far_out, How::Write);
    });
    thread::spawn(move || {
        forward(far, &ours, |_| {});
        let _ = ours.shutdown(Shutdown::Both);
    });
    Ok(theirs.into())
}

fn dup() -> String {
    "dup".to_owned()
}

/// Passes on what comes until nothing does, or nobody takes it any more.
pub(crate) fn forward(mut from: impl Read, mut to: impl Write, mut passed: impl FnMut(usize)) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        passed(len);
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn both_ways_and_counted() {
        let (far, other) = UnixStream::pair().unwrap();
        let meter = Meter::new(None);
        let mut near = UnixStream::from(metered(other.into(), &meter).unwrap());
        let mut far = far;
        near.write_all(b"question").unwrap();
        let mut heard = [0; 8];
        far.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"question");
        far.write_all(b"answer").unwrap();
        drop(far);
        let mut answer = String::new();
        near.read_to_string(&mut answer).unwrap();
        assert_eq!((answer.as_str(), meter.sent()), ("answer", 8));
        assert!(meter.first().is_some());
    }

    #[test]
    fn no_faster_than_allowed() {
        let mut budget = Budget::new();
        let (now, ms) = (budget.paid(), Duration::from_millis);
        assert_eq!(budget.owe(50_000, 1_000_000, now), ms(50));
        // A sender that did not wait for that owes it still, and one that has not sent anything for long has nothing to
        // spare.
        assert_eq!(budget.owe(50_000, 1_000_000, now + ms(10)), ms(90));
        assert_eq!(budget.owe(1_000, 1_000_000, now + ms(500)), ms(1));
        assert_eq!(budget.owe(u64::MAX / 2, 0, now), ms(0));
        let (meter, mut budget) = (Meter::new(Some(1_000_000)), Budget::new());
        meter.pass(5_000, &mut budget);
        meter.limit(None);
        meter.pass(5_000, &mut budget);
        assert_eq!((meter.held(), meter.sent()), (ms(5), 10_000), "what it has waited is known");
    }
}
