//! Threads of the daemon's own.
//!
//! Where the machine has no more of them for a while, as somebody forks without end, what was to be done on one is done when
//! there is one again: a job that nobody begins, or whose end nobody hears of, would stay as it is until the next daemon.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use torpor_worker::tell;

/// What is done on a thread.
type Work = Box<dyn FnOnce() + Send>;

/// What waits for one, in its order.
static WAITING: Mutex<Vec<Work>> = Mutex::new(Vec::new());

/// Does something on a thread of its own, as soon as there is one.
pub(super) fn run(work: impl FnOnce() + Send + 'static) {
    if let Err(work) = begin(Box::new(work)) {
        lock(&WAITING).push(work);
    }
}

/// Begins what waits for a thread, as far as there are some. Called with each beat of the daemon.
pub(super) fn begin_what_waits() {
    let mut waiting = std::mem::take(&mut *lock(&WAITING)).into_iter();
    while let Some(work) = waiting.next() {
        if let Err(work) = begin(work) {
            let mut left = lock(&WAITING);
            let came_meanwhile = std::mem::take(&mut *left);
            left.extend(std::iter::once(work).chain(waiting).chain(came_meanwhile));
            return;
        }
    }
}

/// Begins it; or gives it back, for which it must not be the thread's that cannot be made.
fn begin(work: Work) -> Result<(), Work> {
    let place = Arc::new(Mutex::new(Some(work)));
    let taken = Arc::clone(&place);
    let begun = thread::Builder::new().spawn(move || {
        let work = lock(&taken).take();
        work.into_iter().for_each(|work| work());
    });
    let Err(e) = begun else { return Ok(()) };
    tell!("torpor queue: begin a thread: {e}");
    lock(&place).take().map_or(Ok(()), Err)
}

fn lock<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}
