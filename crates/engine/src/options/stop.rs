//! How a dump stops the tree, and what becomes of it.

use std::time::Duration;

/// How long a dump tries to stop a tree unless told otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// How a dump stops the tree, and what becomes of it.
#[derive(Debug, Clone, Copy)]
pub struct Stop {
    /// How long to try to stop the tree (`--timeout`); zero is for ever.
    pub timeout: Duration,
    /// Tasks run on after the dump instead of being killed (`-R`).
    pub leave_running: bool,
    /// Dump tasks with uprobes areas (`--allow-uprobes`).
    pub allow_uprobes: bool,
}

impl Default for Stop {
    fn default() -> Self {
        Self { timeout: DEFAULT_TIMEOUT, leave_running: false, allow_uprobes: false }
    }
}

impl Stop {
    /// How long a dump may try to stop the tree.
    #[must_use]
    pub fn patience(&self) -> Duration {
        const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        if self.timeout.is_zero() { FOR_EVER } else { self.timeout.min(FOR_EVER) }
    }
}
