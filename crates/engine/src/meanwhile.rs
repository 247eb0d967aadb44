//! Work that another thread does while this one goes on.

use std::thread::JoinHandle;

use crate::error::{Error, Result};

/// Such a thread, whose outcome is wanted later. It has ended when this is dropped: a process that has threads must not fork.
#[derive(Debug)]
pub(crate) struct Meanwhile<T> {
    thread: Option<JoinHandle<T>>,
    /// What errors call the thread: "a thread that …".
    does: &'static str,
}

impl<T> Meanwhile<T> {
    /// Begins it. Errors call it "a thread that `does`".
    pub(crate) fn start(does: &'static str, work: impl FnOnce() -> T + Send + 'static) -> Self
    where
        T: Send + 'static,
    {
        Meanwhile { thread: Some(std::thread::spawn(work)), does }
    }

    /// Waits for its outcome.
    ///
    /// # Errors
    /// [`Error::Bug`] if it panicked.
    pub(crate) fn finish(mut self) -> Result<T> {
        let outcome = self.thread.take().and_then(|thread| thread.join().ok());
        outcome.ok_or_else(|| Error::Bug(format!("a thread that {} panicked", self.does)))
    }
}

impl<T> Drop for Meanwhile<T> {
    fn drop(&mut self) {
        // Nobody wants to know any more what has become of it.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;

    #[test]
    fn it_has_ended_when_it_is_dropped() {
        assert_eq!(Meanwhile::start("counts", || 7).finish().unwrap(), 7);
        let held = Arc::new(());
        let copy = Arc::clone(&held);
        drop(Meanwhile::start("holds something", move || drop(copy)));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn one_that_panics_is_named() {
        let thread: Meanwhile<()> =
            Meanwhile::start("gives up", || std::panic::resume_unwind(Box::new(())));
        assert!(
            thread.finish().unwrap_err().to_string().contains("a thread that gives up panicked")
        );
    }
}
