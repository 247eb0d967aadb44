//! Connections for pages that come to an agent, until all of a round are there.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use crate::error::{Error, Result};
use crate::origin::Origin;
use crate::wire::carrier::Carrier;
use crate::wire::spread::unite;

/// A connection for pages, and the round that it is for.
pub(super) type Joined = (u32, OwnedFd);

/// Who waits for connections for pages.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Of which migration they are.
    pub id: String,
    /// Who has begun it.
    pub origin: Origin,
    /// Where a round takes its connection from.
    pub rounds: SyncSender<Joined>,
    /// What needs connections as long as the tasks lack pages.
    pub carrier: Option<Arc<Carrier>>,
    /// How many make one.
    pub connections: usize,
    /// Those that belong together.
    pub set: Set,
}

/// Connections that belong together: the source has numbered the set. One of a higher number begins it anew.
#[derive(Debug, Default)]
pub(super) struct Set {
    number: u64,
    announced: usize,
    there: Vec<OwnedFd>,
}

impl Waiting {
    /// Whether a connection of this set is one of those that are waited for. It is to be handed over then.
    pub(super) fn announce(&mut self, set: u64) -> bool {
        if set > self.set.number {
            self.set = Set { number: set, ..Set::default() };
        }
        let is_one = set == self.set.number && self.set.announced < self.connections;
        self.set.announced += usize::from(is_one);
        is_one
    }

    /// Nobody brings the pages that its tasks lack any more, if that is who has begun it.
    pub(super) fn leave_alone(&self, asks: &Origin) {
        if let Some(carrier) = self.carrier.as_ref().filter(|_| asks.may_ask(Some(&self.origin))) {
            carrier.give_up();
        }
    }

    /// Takes one that was announced. The last of a set makes one connection of all of them, and that is used.
    ///
    /// # Errors
    /// If another set has begun, or nobody takes it.
    pub(super) fn hand_over(&mut self, set: u64, round: u32, connection: OwnedFd) -> Result<()> {
        let too_late = || Error::Protocol("a connection joined too late".to_owned());
        if set != self.set.number {
            return Err(too_late());
        }
        self.set.there.push(connection);
        if self.set.there.len() < self.connections {
            return Ok(());
        }
        let one = unite(std::mem::take(&mut self.set.there), None)?;
        match &self.carrier {
            Some(carrier) => {
                carrier.attach(one);
                Ok(())
            }
            None => self.rounds.try_send((round, one)).map_err(|_| too_late()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, sync_channel};

    use super::*;

    fn waiting(connections: usize) -> (Waiting, Receiver<Joined>) {
        let (rounds, joined) = sync_channel(1);
        let (id, set) = ("one".to_owned(), Set::default());
        let origin = Origin::Host("a".to_owned());
        (Waiting { id, origin, rounds, carrier: None, connections, set }, joined)
    }

    fn socket() -> OwnedFd {
        UnixStream::pair().unwrap().0.into()
    }

    /// Whose tasks run here and lack pages would have them ended by whoever knows its number.
    #[test]
    fn only_who_has_begun_a_migration_gives_its_pages_up() {
        let (mut waiting, _joined) = waiting(1);
        let (carrier, ours) = Carrier::start(None).unwrap();
        waiting.carrier = Some(Arc::clone(&carrier));
        waiting.leave_alone(&Origin::Host("b".to_owned()));
        // Whoever waits for a connection is told at once when none comes any more.
        assert!(carrier.wait_lost());
        waiting.leave_alone(&waiting.origin);
        assert!(!carrier.wait_lost());
        drop(ours);
    }

    #[test]
    fn no_more_connections_than_were_announced() {
        let (mut waiting, joined) = waiting(2);
        assert!(waiting.announce(1) && waiting.announce(1));
        assert!(!waiting.announce(1), "a third one");
        waiting.hand_over(1, 7, socket()).unwrap();
        assert!(joined.try_recv().is_err());
        waiting.hand_over(1, 7, socket()).unwrap();
        assert_eq!(joined.try_recv().unwrap().0, 7);
        assert!(!waiting.announce(1) && !waiting.announce(0), "this set is there");
        // One that did not come to be, and the next one.
        assert!(waiting.announce(2) && waiting.announce(2));
        waiting.hand_over(2, 8, socket()).unwrap();
        assert!(waiting.announce(3) && waiting.announce(3));
        assert!(waiting.hand_over(2, 8, socket()).is_err());
        waiting.hand_over(3, 8, socket()).unwrap();
        waiting.hand_over(3, 8, socket()).unwrap();
        // Nobody has taken that, and one more comes.
        assert!(waiting.announce(4) && waiting.announce(4));
        waiting.hand_over(4, 9, socket()).unwrap();
        assert!(waiting.hand_over(4, 9, socket()).is_err());
        assert_eq!(joined.try_recv().unwrap().0, 8);
    }
}
