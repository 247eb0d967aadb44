//! Connections of which it is known who has made them, and what for.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::origin::Origin;

/// Connections at a time: more wait to be accepted.
const MOST: usize = 256;
/// Of one host, which keeps no others out by these.
const MOST_OF_ONE: usize = 64;

/// All that an agent serves.
#[derive(Debug, Default)]
pub(super) struct Served(Mutex<HashMap<Origin, usize>>);

/// A connection that is one of these as long as this is there.
#[derive(Debug)]
pub(super) struct ServedLine<'a> {
    all: &'a Served,
    origin: Origin,
}

impl Served {
    /// Takes a connection among them.
    ///
    /// # Errors
    /// If the host that has made it has as many as one may have.
    pub(super) fn add(&self, origin: &Origin) -> Result<ServedLine<'_>> {
        let mut all = self.all();
        let own = all.entry(origin.clone()).or_default();
        if *own >= MOST_OF_ONE && *origin != Origin::OwnUser {
            return Err(Error::refused_with(
                format!("the agent serves {MOST_OF_ONE} connections of this host already"),
                "wait for the end of a migration to it: torpor agent status",
            ));
        }
        *own += 1;
        Ok(ServedLine { all: self, origin: origin.clone() })
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Whether there are as many as there may be.
    pub(super) fn is_full(&self) -> bool {
        self.all().values().sum::<usize>() >= MOST
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Origin, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ServedLine<'_> {
    fn drop(&mut self) {
        let mut all = self.all.all();
        if let Some(own) = all.get_mut(&self.origin) {
            *own -= 1;
        }
        all.retain(|_, own| *own > 0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A source that has to ask what has become of its tasks reaches the agent, whatever another host does.
    #[test]
    fn one_host_keeps_no_others_out() {
        let served = Served::default();
        let [one, other] = ["a", "b"].map(|names| Origin::Host(names.to_owned()));
        let mut its: Vec<_> = (0..MOST_OF_ONE).map(|_| served.add(&one).unwrap()).collect();
        let error = served.add(&one).unwrap_err();
        assert!(error.to_string().contains("64 connections of this host already"), "{error}");
        let theirs = served.add(&other).unwrap();
        assert!(!served.is_full());
        its.pop();
        its.push(served.add(&one).unwrap());
        assert!(served.add(&one).is_err());
        // Whoever is of the agent's own user can end it as well.
        its.extend((0..MOST).map(|_| served.add(&Origin::OwnUser).unwrap()));
        assert!(served.is_full());
        drop((its, theirs));
        assert!(served.is_empty());
    }
}
