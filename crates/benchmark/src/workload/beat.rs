//! A program that shows that it is alive.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

/// What a heartbeat writes: how often, the longest silence, and when that ended; times in ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Beat {
    /// How many times it has written.
    pub count: u64,
    /// The longest silence.
    pub silence: Duration,
    /// When it ended, since the epoch.
    woke: Duration,
}

impl Beat {
    /// What a file says, if a heartbeat has written to it.
    #[must_use]
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let time = |at: usize| word(at).map(Duration::from_nanos);
        Some(Self { count: word(0)?, silence: time(8)?, woke: time(16)? })
    }

    /// How long after a call the program gave a sign of life again, if it has: what was asleep in a file wakes
    /// from its longest silence, and tells by its own clock when that was.
    #[must_use]
    pub(crate) fn woke_after(&self, called: SystemTime) -> Option<Duration> {
        (SystemTime::UNIX_EPOCH + self.woke).duration_since(called).ok()
    }

    fn bytes(self) -> Vec<u8> {
        let time = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let words = [self.count, time(self.silence), time(self.woke)];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// One more beat, so long after the last.
    fn next(&mut self, silence: Duration, now: SystemTime) {
        self.count += 1;
        if silence > self.silence {
            self.silence = silence;
            self.woke = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        }
    }
}

/// Holds memory, and writes for ever.
pub(super) fn heartbeat(size: usize, path: &Path) -> io::Result<Value> {
    let mut memory = vec![0_u8; size << 20];
    fastrand::Rng::with_seed(1).fill(&mut memory);
    std::hint::black_box(&memory);
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut beat = Beat::default();
    let mut last = SystemTime::now();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        // The clock of the world: it goes on while this program is asleep in a file.
        let now = SystemTime::now();
        beat.next(now.duration_since(last).unwrap_or_default(), now);
        last = now;
        file.write_all_at(&beat.bytes(), 0)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_wakes_tells_when() {
        let ms = Duration::from_millis;
        let at = |time| SystemTime::UNIX_EPOCH + ms(time);
        let mut beat = Beat::default();
        for (silence, now) in [(1, 1001), (2, 1003), (1, 1004)] {
            beat.next(ms(silence), at(now));
        }
        let called = at(1500);
        assert_eq!(Beat::read(&beat.bytes()), Some(beat));
        assert_eq!((beat.count, beat.silence, beat.woke_after(called)), (3, ms(2), None));
        // It was asleep from 1004 to 1540, then goes on.
        beat.next(ms(536), at(1540));
        beat.next(ms(3), at(1543));
        assert_eq!(Beat::read(&beat.bytes()).unwrap().woke_after(called), Some(ms(40)));
    }
}
