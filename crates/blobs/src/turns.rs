//! Turns of those who store and of those who collect in an object store, which has no locks.
//!
//! Each says in an object of its own that it begins, and then looks whether the other has said so:
//! of two that begin at once, at least one sees the other, since what a store has taken everybody
//! sees from then on. A collector gives way; whoever stores waits. A name says since when, for a
//! program that is killed removes nothing.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::Push;
use crate::error::{Error, Result};
use crate::oci::hex;
use crate::s3::S3;

/// How long a program that stores something is believed to be at it: 160 GB, the most, at 2 MB/s.
const PUSH: Duration = Duration::from_secs(24 * 60 * 60);
/// The same for a program that collects.
const COLLECTION: Duration = Duration::from_secs(10 * 60);
/// When a collector stops by itself. The rest is for clocks that differ, and for a request that
/// is under way: one is made five times, and waits 30 seconds each time.
const SHIFT: Duration = Duration::from_secs(5 * 60);
/// How long is waited before the next look.
const PAUSE: Duration = Duration::from_millis(100);

const PUSHES: &str = "pushes";
const COLLECTIONS: &str = "collections";

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'s> {
    store: &'s S3,
    object: String,
    since: Duration,
}

impl<'s> Turn<'s> {
    fn begin(store: &'s S3, kind: &str) -> Result<Self> {
        let since = now();
        let mut own = [0; 8];
        let drawn = aws_lc_rs::rand::fill(&mut own);
        drawn.map_err(|_| Error::new("the kernel gives no random numbers"))?;
        let object = format!("{kind}/{}-{}", since.as_secs(), hex(&own));
        let turn = Turn { store, object, since };
        store.note(&turn.object, &[])?;
        Ok(turn)
    }

    /// Whether the collector may go on.
    pub(crate) fn goes_on(&self) -> bool {
        now().saturating_sub(self.since) < SHIFT
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // It runs out by itself if this fails.
        let _ = self.store.erase(&self.object);
    }
}

impl Push for Turn<'_> {
    fn holds(&self) -> Result<()> {
        match self.store.list(&self.object)?.is_empty() {
            false => Ok(()),
            true => {
                Err(Error::new("others take what is stored here for left over: it took too long")
                    .hint("do it again; what is there already is not stored twice"))
            }
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Whether there is a turn of this kind. Those that have run out are removed.
fn any(store: &S3, kind: &str, lasts: Duration) -> Result<bool> {
    let mut found = false;
    for (object, _) in store.list(&format!("{kind}/"))? {
        let since = object.strip_prefix(kind).and_then(|name| name[1..].split_once('-'));
        let since = since.and_then(|(since, _)| since.parse().ok()).map(Duration::from_secs);
        // What cannot be read was not made here, and is left alone.
        match since {
            Some(since) if since.saturating_add(lasts) > now() => found = true,
            Some(_) => store.erase(&object)?,
            None => {}
        }
    }
    Ok(found)
}

/// Begins to store something, when nobody collects.
///
/// # Errors
/// If the store does not answer; if others collect all the time.
pub(crate) fn push(store: &S3) -> Result<Turn<'_>> {
    let begun = now();
    loop {
        let turn = Turn::begin(store, PUSHES)?;
        if !any(store, COLLECTIONS, COLLECTION)? {
            return Ok(turn);
        }
        // It is not to wait for this one either.
        drop(turn);
        if now().saturating_sub(begun) > COLLECTION * 2 {
            return Err(Error::new("somebody collects in the object store all the time"));
        }
        thread::sleep(PAUSE);
    }
}

/// Begins to collect, unless something is being stored.
///
/// # Errors
/// If something is, or the store does not answer.
pub(crate) fn collect(store: &S3) -> Result<Turn<'_>> {
    let turn = Turn::begin(store, COLLECTIONS)?;
    match any(store, PUSHES, PUSH)? {
        false => Ok(turn),
        true => {
            Err(Error::new("something is being stored there, and would be taken for left over")
                .hint("run it again when that is done; what was given up counts for a day"))
        }
    }
}

#[cfg(test)]
mod tests;
