//! What this process has asked registries and object stores for, and what came.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Requests and what they brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// How many requests were made.
    pub requests: u64,
    /// How many bytes of content came.
    pub bytes: u64,
}

static REQUESTS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts a request.
pub fn asked() {
    REQUESTS.fetch_add(1, Ordering::Relaxed);
}

/// Counts content that came.
pub fn came(bytes: usize) {
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// All of this process until now.
#[must_use]
pub fn so_far() -> Traffic {
    let (requests, bytes) = (REQUESTS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    Traffic { requests, bytes }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { requests: self.requests + other.requests, bytes: self.bytes + other.bytes }
    }
}
