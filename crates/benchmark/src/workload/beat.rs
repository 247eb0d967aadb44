//! A program that shows that it is alive.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

/// What a heartbeat writes: how often, and the longest silence in ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beat {
    /// How many times it has written.
    pub count: u64,
    /// The longest silence.
    pub silence: Duration,
}

impl Beat {
    /// What a file says, if a heartbeat has written to it.
    #[must_use]
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        Some(Self { count: word(0)?, silence: Duration::from_nanos(word(8)?) })
    }

    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        let silence = u64::try_from(self.silence.as_nanos()).unwrap_or(u64::MAX);
        bytes[8..].copy_from_slice(&silence.to_le_bytes());
        bytes
    }
}

/// Holds memory, and writes for ever.
pub(super) fn heartbeat(size: usize, path: &Path) -> io::Result<Value> {
    let mut memory = vec![0_u8; size << 20];
    fastrand::Rng::with_seed(1).fill(&mut memory);
    std::hint::black_box(&memory);
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut beat = Beat { count: 0, silence: Duration::ZERO };
    let mut last = SystemTime::now();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        // The clock of the world: it goes on while this program is asleep in a file.
        let now = SystemTime::now();
        beat.silence = beat.silence.max(now.duration_since(last).unwrap_or_default());
        beat.count += 1;
        last = now;
        file.write_all_at(&beat.bytes(), 0)?;
    }
}
