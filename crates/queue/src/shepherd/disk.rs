//! How much a job may have: standard input, output, and files of its own.

use std::collections::HashSet;
use std::fs::{self, File};
use std::thread;
use std::time::{Duration, Instant};

use super::message::Order;
use super::pump::has_room;
use super::{Happening, Shepherd, work};
use crate::files::{self, JobDir};
use crate::spec::{Limits, Percent, Room};

/// How long it may write before anybody looks again.
const PAUSE: Duration = Duration::from_millis(500);

/// Looking takes no more than one part of the time in so many, and one: it may have millions of files, and others need the
/// processor and the disk.
const REST: u32 = 9;

/// A disk on which fewer files can be made is full, or a sixteenth of what can be if that is less: each run needs some.
const SPARE_FILES: u64 = 4096;

impl Shepherd {
    /// Notices when the job has written more than it may. Whoever submits it says how much that is: files beyond what a job
    /// may have that says nothing it has as long as the queue has room for its own state.
    pub(super) fn watch_disk(&self) {
        let limits = &self.spec.limits;
        let most = room(limits, &self.dir, used);
        let usual = Limits { disk: None, ..limits.clone() };
        let usual = [room(&usual, &self.dir, |dir| own(dir)[0]), usual_files(&usual, &self.dir)];
        if most.is_none() && usual == [None; 2] {
            return;
        }
        let (dir, inputs) = (self.dir.clone(), self.inputs.clone());
        let is_above = |most: Option<u64>, bytes: u64| most.is_some_and(|most| bytes > most);
        thread::spawn(move || {
            loop {
                let (begun, free) = (Instant::now(), free(&dir));
                let own = own(&dir);
                let used = own[0].saturating_add(streams(&dir));
                let is_short = is_short(&dir);
                let is_why = |of: &usize| is_short[*of] && is_above(usual[*of], own[*of]);
                if is_above(most, used) || [0, 1].iter().any(is_why) {
                    break;
                }
                // When so much less is free it may be what was written since.
                let enough = most.map_or(0, |most| free.saturating_sub(most.saturating_sub(used)));
                rest(&dir, begun.elapsed() * REST, enough, is_short);
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

/// Waits for so long before somebody looks again, unless less than enough is free on the disk, or it becomes short.
fn rest(dir: &JobDir, most: Duration, enough: u64, was_short: [bool; 2]) {
    let begun = Instant::now();
    loop {
        thread::sleep(PAUSE);
        if begun.elapsed() >= most || free(dir) < enough || is_short(dir) != was_short {
            return;
        }
    }
}

/// Bytes that are free on the disk of a job. One that does not tell has none, so that somebody looks.
fn free(dir: &JobDir) -> u64 {
    let system = rustix::fs::statvfs(dir.path());
    system.map_or(0, |system| system.f_bavail.saturating_mul(system.f_frsize))
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

/// How many files of its own a job may have that says nothing, with those that it has.
fn usual_files(limits: &Limits, dir: &JobDir) -> Option<u64> {
    let part = match limits.usual_disk? {
        Room::OfFree(part) => part,
        Room::Bytes(_) => Percent::new(25),
    };
    let system = rustix::fs::statvfs(dir.path()).ok()?;
    (system.f_files > 0).then(|| own(dir)[1].saturating_add(part.of(system.f_favail)))
}

/// Bytes that a job's own files take, and how many those are.
fn own(dir: &JobDir) -> [u64; 2] {
    let mut seen = HashSet::new();
    // However deep they are they can be counted. What the disk fails to tell now it tells the next time.
    let own = work::own(dir).into_iter().filter_map(|(own, _)| files::size(&own, &mut seen).ok());
    let bytes = own.fold(0, u64::saturating_add);
    [bytes, seen.len() as u64]
}

/// Bytes that a job's standard streams and its own files take.
fn used(dir: &JobDir) -> u64 {
    streams(dir).saturating_add(own(dir)[0])
}

/// Whether the disk of a job has no more free than output and input leave, and whether few more files can be made there. Some have
/// as many as they have room for.
fn is_short(dir: &JobDir) -> [bool; 2] {
    // One that does not tell is not.
    let Ok(dir) = File::open(dir.path()) else { return [false; 2] };
    let of_bytes = has_room(&dir, 0).is_ok_and(|has_room| !has_room);
    let of_files = rustix::fs::fstatvfs(&dir).is_ok_and(|system| {
        system.f_files > 0 && system.f_favail <= SPARE_FILES.min(system.f_files / 16)
    });
    [of_bytes, of_files]
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A job may have so many files that it takes long to count what they take, and write much meanwhile.
    #[test]
    fn who_has_written_much_is_looked_at_before_its_time() {
        const LONG: Duration = Duration::from_secs(3600);
        let place = tempfile::tempdir().unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=64m,nr_inodes=1000", "none"];
        assert!(Command::new("mount").args(mount).arg(place.path()).status().unwrap().success());
        let dir = JobDir::at(place.path().to_owned());
        rest(&dir, Duration::ZERO, 0, [false; 2]);
        let (had, file) = (free(&dir), place.path().join("file"));
        // One that may write a MiB more; and one that may write as much as there is.
        for (enough, bytes) in [(had - (1 << 20), 2 << 20), (0, 62 << 20)] {
            thread::scope(|scope| {
                let waits = scope.spawn(|| rest(&dir, LONG, enough, [false; 2]));
                fs::write(&file, vec![1; bytes]).unwrap();
                waits.join().unwrap();
            });
            fs::remove_file(&file).unwrap();
        }
        assert!(Command::new("umount").arg("-l").arg(place.path()).status().unwrap().success());
    }
}
