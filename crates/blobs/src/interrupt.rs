//! Whoever waits for an answer can be asked to end.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on reading an answer ends with an error once `asked` is set. The first call counts.
pub fn heed(asked: Arc<AtomicBool>) {
    ASKED.get_or_init(|| asked);
}

/// Whether it is set.
pub(crate) fn is_asked() -> bool {
    ASKED.get().is_some_and(|asked| asked.load(Ordering::Relaxed))
}
