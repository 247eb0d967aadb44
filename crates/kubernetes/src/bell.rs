//! A bell that rings when objects change.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use torpor_worker::tell;

use crate::api::Api;

/// How long nothing may happen before it is looked after limits of time.
pub(crate) const IDLE: Duration = Duration::from_secs(5);

/// Rings whenever something changes in the list at `path`.
pub(crate) fn ring(api: Api, path: String, bell: Sender<()>) {
    thread::spawn(move || {
        loop {
            let began = Instant::now();
            // The other end is there as long as the program is.
            let watched = api.watch(&path, || {
                let _ = bell.send(());
            });
            if let Err(error) = watched {
                tell!("{error}");
            }
            // One that ends at once is not to be begun at once.
            thread::sleep(Duration::from_secs(1).saturating_sub(began.elapsed()));
        }
    });
}

/// Waits until something has changed, or it is time to look.
pub(crate) fn wait(rung: &Receiver<()>, patience: Duration) {
    match rung.recv_timeout(patience) {
        Ok(()) => while rung.try_recv().is_ok() {},
        Err(RecvTimeoutError::Timeout) => {}
        Err(RecvTimeoutError::Disconnected) => thread::sleep(patience),
    }
}
