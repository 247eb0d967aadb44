//! A job's output as it comes, and its end: what `--wait` and `logs -f` read.
//!
//! The stream consists of frames: one byte for the kind, four for the length (big
//! endian), and the content. A client that was cut off goes on with the offsets that it
//! has come to.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use serde_json::json;

use super::core::{Core, Queue};
use super::record::{Place, Record};
use crate::files;
use crate::scheduler::{JobId, Millis};
use crate::shepherd::pump::read_from;

/// A frame that says that somebody is still there.
pub(super) const FRAME_BEAT: u8 = 0;
/// A frame of standard output.
pub(crate) const FRAME_OUT: u8 = 1;
/// A frame of standard error.
pub(crate) const FRAME_ERR: u8 = 2;
/// The last frame: how the job ended, in JSON.
pub(crate) const FRAME_END: u8 = 3;

/// A frame for a client that is the job: why it must not run, and what would let it.
pub(crate) const FRAME_HELD: u8 = 4;

/// A client that is a job that must not run is told so after that many milliseconds: a user who lets a job give way by
/// hand for a moment need not be heard of.
const HELD: Millis = 15_000;

/// No frame is longer.
const MOST: usize = 256 << 10;

/// So often a follower is told that somebody is there.
pub(super) const FRAME_PAUSE: Duration = Duration::from_secs(5);

/// A follower that has heard nothing for so long asks again.
pub(crate) const FRAME_SILENCE: Duration = Duration::from_secs(30);

/// So many followers hear at once that there is more, and others within [`PAUSE`]: by default the kernel has 128 bells for each
/// user, and those of root are for all that root does on the machine.
const MOST_BELLS: usize = 32;

/// How many do.
static BELLS: AtomicUsize = AtomicUsize::new(0);

/// How long a wait lasts at most.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What is followed.
#[derive(Debug)]
pub(super) struct Follow {
    /// The job.
    pub id: JobId,
    /// How much of standard output and standard error the client has.
    pub offsets: [u64; 2],
    /// Whether to wait for more until the job ends.
    pub to_the_end: bool,
    /// Whether the client is the job.
    pub is_the_job: bool,
}

impl Follow {
    /// Writes frames until the job has ended, or there is no more.
    ///
    /// # Errors
    /// If the client is gone.
    pub(super) fn run(mut self, queue: &Arc<Queue>, out: &mut dyn Write) -> io::Result<()> {
        if self.is_the_job {
            queue.lock().count_follower(self.id, 1);
            let done = self.write_all(queue, out);
            queue.lock().count_follower(self.id, -1);
            return done;
        }
        self.write_all(queue, out)
    }

    fn write_all(&mut self, queue: &Arc<Queue>, out: &mut dyn Write) -> io::Result<()> {
        let dir = queue.lock().dir(self.id);
        let bell = Bell::at(dir.path());
        let mut last = Instant::now();
        let mut is_told = !self.is_the_job;
        loop {
            // Asked for before the files are read: what is read after it is all.
            let over = match queue.lock().jobs.get(&self.id) {
                Some(record) => ending(record),
                None => return Err(io::Error::other("the job was forgotten")),
            };
            let mut moved = false;
            for (place, (kind, path)) in
                [(FRAME_OUT, dir.out()), (FRAME_ERR, dir.err())].into_iter().enumerate()
            {
                let data = read_from(&path, self.offsets[place], MOST)?;
                if !data.is_empty() {
                    self.offsets[place] += data.len() as u64;
                    frame(out, kind, &data)?;
                    moved = true;
                }
            }
            if moved {
                out.flush()?;
                last = Instant::now();
                continue;
            }
            if let Some(over) = over {
                return frame(out, FRAME_END, over.to_string().as_bytes());
            }
            if !self.to_the_end {
                return frame(out, FRAME_END, b"null");
            }
            let held = if is_told { None } else { queue.lock().held_for_long(self.id) };
            if let Some(why) = held {
                is_told = true;
                frame(out, FRAME_HELD, why.as_bytes())?;
            }
            if last.elapsed() > FRAME_PAUSE {
                frame(out, FRAME_BEAT, b"")?;
                last = Instant::now();
            }
            wait(bell.as_ref().map(|Bell(fd)| fd));
        }
    }
}

impl Core {
    /// Why a job that does nothing must not go on here, if that is so for long.
    fn held_for_long(&self, id: JobId) -> Option<String> {
        let record = self.jobs.get(&id)?;
        let is_still = matches!(record.place, Place::Queued | Place::Stopped | Place::Asleep);
        let is_held = record.held && record.destination.is_none() && is_still;
        self.hold(record).filter(|_| is_held && files::now() - record.since > HELD)
    }
}

fn ending(record: &Record) -> Option<serde_json::Value> {
    let exit = record.exit.filter(|_| record.place == Place::Ended)?;
    Some(json!({
        "exit": exit, "note": record.note, "state": record.state(),
        "given_up": record.given_up, "rewritten": record.rewritten,
    }))
}

fn frame(out: &mut dyn Write, kind: u8, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes();
    let mut head = vec![kind];
    head.extend(length);
    out.write_all(&head)?;
    out.write_all(data)?;
    out.flush()
}

/// Rings when something in a job's directory changes, and is counted.
#[derive(Debug)]
struct Bell(OwnedFd);

impl Bell {
    /// One for this directory, if there may be one more.
    fn at(dir: &Path) -> Option<Self> {
        let more = |count: usize| (count < MOST_BELLS).then_some(count + 1);
        BELLS.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        let bell = bell(dir);
        if bell.is_none() {
            BELLS.fetch_sub(1, Ordering::AcqRel);
        }
        bell.map(Self)
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        BELLS.fetch_sub(1, Ordering::AcqRel);
    }
}

fn bell(dir: &Path) -> Option<OwnedFd> {
    let bell =
        inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).ok()?;
    let what = inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE;
    inotify::add_watch(&bell, dir, what).ok()?;
    Some(bell)
}

fn wait(bell: Option<&OwnedFd>) {
    match bell {
        Some(bell) => {
            let _ = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&PAUSE));
            // What exactly has changed does not matter.
            let _ = rustix::io::read(bell, &mut [0_u8; 4096]);
        }
        None => drop(poll(&mut [], Some(&PAUSE))),
    }
}

impl super::core::Core {
    /// One client more, or less, is the job.
    fn count_follower(&mut self, id: JobId, by: i64) {
        let (count, since) = self.followers.entry(id).or_insert((0, files::now()));
        *count = u32::try_from((i64::from(*count) + by).max(0)).unwrap_or(0);
        *since = files::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever follows jobs by the hundred would leave none to the rest of the machine.
    #[test]
    fn few_bells_are_taken_however_many_follow() {
        let dir = tempfile::tempdir().unwrap();
        let bells: Vec<Bell> = (0..100).filter_map(|_| Bell::at(dir.path())).collect();
        assert!(bells.len() <= MOST_BELLS, "{}", bells.len());
        drop(bells);
        // Those are free again.
        assert!(Bell::at(&dir.path().join("missing")).is_none());
        assert_eq!(BELLS.load(Ordering::Acquire), 0);
    }
}
