//! Requests of owners, one by one.
//!
//! Whoever asks waits for the daemon's state, and all others wait meanwhile. Of those who are no administrators each owner has
//! one request at a time that does: however many come at once, the others wait for one of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::access::Identity;

/// Whose turn it is. Owners are those of the tokens, and users of this machine.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<BTreeMap<String, Arc<Mutex<()>>>>);

impl Turns {
    /// Does something when it is this one's turn.
    pub(super) fn take<T>(&self, who: &Identity, work: impl FnOnce() -> T) -> T {
        let Some(owner) = who.owner.as_ref().filter(|_| !who.admin) else { return work() };
        let turn = Arc::clone(lock(&self.0).entry(owner.clone()).or_default());
        let _turn = lock(&turn);
        work()
    }
}

fn lock<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_owner_has_one_request_at_a_time() {
        let turns = Turns::default();
        let who = |owner: &str, admin| {
            let owner = Some(owner.to_owned());
            Identity { owner, user: None, admin, machine: false }
        };
        let (ann, is_busy) = (who("ann", false), AtomicBool::new(false));
        let ask = || {
            turns.take(&ann, || {
                let was_busy = is_busy.swap(true, Ordering::AcqRel);
                thread::sleep(Duration::from_millis(10));
                // Others do not wait for her.
                turns.take(&who("bob", false), || ());
                turns.take(&who("ann", true), || ());
                is_busy.store(false, Ordering::Release);
                was_busy
            })
        };
        thread::scope(|scope| {
            let asked = [(); 4].map(|()| scope.spawn(ask));
            assert!(!asked.map(|asked| asked.join().unwrap()).contains(&true));
        });
    }
}
