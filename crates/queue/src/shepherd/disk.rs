//! How much a job may have: standard input, output, and files of its own.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::Duration;

use super::message::Order;
use super::{Happening, Shepherd, work};
use crate::files::{self, JobDir};
use crate::spec::{Limits, Room};

/// How long it may write before anybody looks again.
const PAUSE: Duration = Duration::from_millis(500);

impl Shepherd {
    /// Notices when the job has written more than it may.
    pub(super) fn watch_disk(&self) {
        let Some(most) = room(&self.spec.limits, &self.dir, used) else { return };
        let (dir, inputs) = (self.dir.clone(), self.inputs.clone());
        thread::spawn(move || {
            while used(&dir) <= most {
                thread::sleep(PAUSE);
            }
            let _ = inputs.send(Happening::DiskUsed);
        });
    }

    /// Ends a job that has.
    pub(super) fn disk_used(&mut self) {
        self.out_of_disk = true;
        self.order(Order::Kill);
    }
}

/// How many bytes a job may have from now on, with those that it has, as `used` counts them.
pub(crate) fn room(limits: &Limits, dir: &JobDir, used: fn(&JobDir) -> u64) -> Option<u64> {
    limits.disk.or_else(|| match limits.usual_disk? {
        Room::Bytes(most) => Some(most),
        // What it was given, and what it has written before it slept, was there before.
        Room::OfFree(part) => {
            let system = rustix::fs::statvfs(dir.path()).ok()?;
            let free = system.f_bavail.saturating_mul(system.f_frsize);
            Some(used(dir).saturating_add(part.of(free)))
        }
    })
}

/// Bytes that a job's standard streams take.
pub(crate) fn streams(dir: &JobDir) -> u64 {
    let streams = [dir.stdin(), dir.out(), dir.err()];
    streams.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum()
}

/// Bytes that a job's standard streams and its own files take.
fn used(dir: &JobDir) -> u64 {
    let mut seen = HashSet::new();
    // However deep they are they can be counted. What the disk fails to tell now it tells the next time.
    let own = work::own(dir).into_iter().filter_map(|(own, _)| files::size(&own, &mut seen).ok());
    own.fold(streams(dir), u64::saturating_add)
}
