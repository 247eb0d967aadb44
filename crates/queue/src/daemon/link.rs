//! The line to a job's shepherd: starting one, finding one again, and noticing its end.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use torpor_kernel::proc;

use super::core::Queue;
use super::{disk, threads};
use crate::container::{self, Container};
use crate::files::{self, JobDir};
use crate::scheduler::JobId;
use crate::shepherd;
use crate::shepherd::digests;
use crate::shepherd::message::{self, Ending, Report};

/// A run of a job.
#[derive(Debug, Clone)]
pub(super) struct Run {
    /// The job.
    pub job: JobId,
    /// The number of the run.
    pub run: u64,
    /// The job's directory.
    pub dir: JobDir,
}

impl Run {
    /// Starts a shepherd for a new run, and listens to it to its end. Checkpoints up to `compared` were a moment ago.
    pub(super) fn start(
        self,
        queue: Arc<Queue>,
        from: Option<u64>,
        compared: Option<u64>,
        base: [u64; 2],
    ) {
        threads::run(move || {
            if let Some(seq) = from
                && let Err(damage) = digests::verify_rest(&self.dir, seq, compared)
            {
                self.adopt(&queue, Some(damage.seq));
                return queue.change(|core| core.damaged(self.job, self.run, &damage));
            }
            // That of a job that has slept was looked up when it began.
            if from.is_none()
                && let Some(why) = self.has_no_container()
            {
                return queue.change(|core| core.cannot_begin(self.job, self.run, why));
            }
            // Whoever was to start the shepherd may have been killed, and that when it had: then it keeps the job.
            if let Err(e) = self.make(from, base)
                && e.kind() != io::ErrorKind::Interrupted
                && !self.is_alive()
            {
                queue.change(|core| core.run_failed_to_start(self.job, self.run, &e.to_string()));
                return;
            }
            self.attend(&queue);
        });
    }

    /// Why there is no such container as the job is to be.
    fn has_no_container(&self) -> Option<String> {
        let spec = shepherd::read_spec(&self.dir).ok()?;
        let error = Container::look_up(&self.dir, &spec).err()?;
        // Anything else the shepherd meets as well.
        container::is_none(&error).then(|| error.to_string())
    }

    fn make(&self, from: Option<u64>, base: [u64; 2]) -> io::Result<()> {
        // Two runs of a job at the same time would be two jobs.
        self.wait_for_those_before();
        // Nobody asks for the one before that. What fails is tried again as often as its owner likes.
        let _ = files::remove_trees(&[self.dir.run(self.run.saturating_sub(2))]);
        let place = self.dir.run(self.run);
        // A lock needs no more than that a file can be read: nobody else may seem to be a shepherd.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&place)?;
        let lock = File::create(place.join(shepherd::LOCK))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        shepherd::keep_room(&place)?;
        shepherd::start(&self.dir, self.run, from, base, lock)
    }

    /// Listens to a shepherd that may still be there from before this daemon was started.
    pub(super) fn find(self, queue: Arc<Queue>) {
        threads::run(move || self.attend(&queue));
    }

    /// Listens to the shepherd until it is gone, and says how the run ended.
    fn attend(&self, queue: &Arc<Queue>) {
        while let Some(stream) = self.connect() {
            self.listen(queue, &stream);
        }
        self.wait_for_the_job();
        let ending = self.last_word();
        if ending.is_none() {
            self.adopt(queue, None);
        }
        queue.change(|core| core.run_over(self.job, self.run, ending));
    }

    /// Adopts what was saved, but for what is damaged, before the job falls back. All of it is read, however long that takes:
    /// nobody waits for it.
    fn adopt(&self, queue: &Queue, damaged: Option<u64>) {
        if queue.lock().counts(self.job, self.run) {
            disk::adopt(&self.dir, damaged);
        }
    }

    /// Connects to the shepherd, which may be just starting; `None` once it is gone.
    fn connect(&self) -> Option<UnixStream> {
        let path = self.dir.run(self.run).join(shepherd::SOCKET);
        while self.is_alive() {
            let stream = files::with_short_name(&path, |short| UnixStream::connect(short));
            if let Ok(stream) = stream {
                return Some(stream);
            }
            thread::sleep(Duration::from_millis(2));
        }
        None
    }

    fn listen(&self, queue: &Arc<Queue>, stream: &UnixStream) {
        // A shepherd that does not listen must not hold the daemon up.
        let ready = stream.set_write_timeout(Some(Duration::from_secs(5)));
        let (Ok(()), Ok(ours)) = (ready, stream.try_clone()) else { return };
        queue.change(|core| core.connected(self.job, self.run, ours));
        let mut reader = BufReader::new(stream);
        while let Ok(Some(report)) = message::receive::<Report>(&mut reader) {
            if let Report::Ended(_) = report {
                // It is on disk, where it counts.
                return;
            }
            if let Report::NotRestored { damaged, .. } = report {
                self.adopt(queue, damaged);
            }
            queue.change(|core| core.report(self.job, self.run, report));
        }
    }

    /// Whether the run's shepherd lives: it holds the lock until the kernel takes its files. All that is in its pid namespace is
    /// ended after that, and last of all itself.
    #[must_use]
    pub(super) fn is_alive(&self) -> bool {
        let Ok(lock) = File::open(self.dir.run(self.run).join(shepherd::LOCK)) else {
            return false;
        };
        flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err()
    }

    /// Waits until all of the job has ended behind a shepherd that is gone.
    fn wait_for_the_job(&self) {
        // What was frozen when it was killed stays there, killed and frozen.
        let _ = shepherd::cgroups(&self.dir).set_frozen(false);
        while self.pid().is_some_and(is_about_to_end) {
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The shepherd, or what has its number since it is gone.
    fn pid(&self) -> Option<Pid> {
        let text = fs::read_to_string(self.dir.run(self.run).join(shepherd::PID)).ok()?;
        Pid::from_raw(text.parse().ok()?)
    }

    /// Kills the run's shepherd, and with it all of the job, for one that cannot be told anything.
    pub(super) fn kill(&self) {
        // The number is that of another process as soon as it is gone.
        if let Some(pid) = self.pid().filter(|_| self.is_alive()) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Waits until all runs of the job before this one have ended. The last of them may never have begun: the daemon that waited
    /// for another with it was killed.
    fn wait_for_those_before(&self) {
        for run in self.dir.runs().into_iter().filter(|&run| run < self.run) {
            Run { run, ..self.clone() }.wait_for_its_end();
        }
    }

    fn wait_for_its_end(&self) {
        while self.is_alive() {
            thread::sleep(Duration::from_millis(2));
        }
        self.wait_for_the_job();
    }

    /// What the shepherd has left on stable storage, if the run had come to its end.
    pub(super) fn last_word(&self) -> Option<Ending> {
        let text = fs::read(self.dir.run(self.run).join(shepherd::ENDING)).ok()?;
        let ending: Ending = serde_json::from_slice(&text).ok()?;
        (ending.job == self.job && ending.run == self.run).then_some(ending)
    }
}

/// Whether a process ends, and has not yet with all of its threads. What has its number afterwards does not end.
fn is_about_to_end(pid: Pid) -> bool {
    let ends = || proc::stat(pid.as_raw_pid()).is_ok_and(|stat| stat.is_ending());
    let is_there = |pidfd: OwnedFd| {
        // It can be read when the last thread is gone.
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut ended, Some(&Timespec::default())) == Ok(0)
    };
    ends() && pidfd_open(pid, PidfdFlags::empty()).is_ok_and(is_there)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::config::Config;
    use super::super::core::Core;
    use super::super::record::Place;
    use super::*;
    use crate::shepherd::message::Exit;
    use crate::spec::Spec;

    /// What stands for the shepherd of a run, as long as this is there.
    fn shepherd(run: &Run) -> File {
        let place = run.dir.run(run.run);
        fs::create_dir_all(&place).unwrap();
        let lock = File::create(place.join(shepherd::LOCK)).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        lock
    }

    #[test]
    fn a_run_waits_for_all_before_it() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temporary.path().to_owned());
        let run = |run| Run { job: 1, run, dir: dir.clone() };
        // The second has never begun.
        let (first, has_ended) = (shepherd(&run(1)), AtomicBool::new(false));
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                run(3).wait_for_those_before();
                has_ended.load(Ordering::Acquire)
            });
            thread::sleep(Duration::from_millis(50));
            has_ended.store(true, Ordering::Release);
            drop(first);
            assert!(waits.join().unwrap(), "it has begun beside the first");
        });
    }

    /// All of it is read for that, and everybody waits for whoever has the daemon's state.
    #[test]
    fn what_a_shepherd_has_saved_is_adopted_before_anybody_waits() {
        use crate::shepherd::checkpoint::{self, CheckpointRecord};
        let temporary = tempfile::tempdir().unwrap();
        fs::create_dir(temporary.path().join("jobs")).unwrap();
        let mut core = Core::open(temporary.path().to_owned(), Config::default()).unwrap();
        let command = vec!["x".to_owned()];
        let job = core.submit(Spec { command, dir: "/".into(), ..Spec::default() }, None).unwrap();
        let dir = core.dir(job);
        fs::write(dir.out(), "").unwrap();
        fs::write(dir.err(), "").unwrap();
        fs::create_dir(dir.checkpoint(1)).unwrap();
        let record = CheckpointRecord { seq: 1, boot: checkpoint::boot(), ..Default::default() };
        let text = serde_json::to_vec(&record).unwrap();
        fs::write(dir.checkpoint(1).join(checkpoint::RECORD), text).unwrap();
        let report = Report::NotRestored { text: "x".to_owned(), damaged: None };
        let begin = |core: &mut Core| {
            let record = core.jobs.get_mut(&job).unwrap();
            (record.run, record.place, record.held) = (1, Place::Waking, true);
        };
        begin(&mut core);
        core.report(job, 1, report.clone());
        assert!(!dir.durable(1).exists() && core.jobs[&job].place == Place::Queued);
        begin(&mut core);
        let (queue, (ours, mut theirs)) = (Queue::new(core), UnixStream::pair().unwrap());
        message::send(&mut theirs, &report).unwrap();
        drop(theirs);
        Run { job, run: 1, dir: dir.clone() }.listen(&queue, &ours);
        assert!(dir.durable(1).exists() && queue.lock().jobs[&job].place == Place::Asleep);
    }

    /// It would begin again when it has ended.
    #[test]
    fn a_run_that_has_begun_all_the_same_is_attended() {
        let temporary = tempfile::tempdir().unwrap();
        fs::create_dir(temporary.path().join("jobs")).unwrap();
        let mut core = Core::open(temporary.path().to_owned(), Config::default()).unwrap();
        let command = vec!["x".to_owned()];
        let job = core.submit(Spec { command, dir: "/".into(), ..Spec::default() }, None).unwrap();
        let record = core.jobs.get_mut(&job).unwrap();
        (record.run, record.place) = (1, Place::Starting);
        let run = Run { job, run: 1, dir: core.dir(job) };
        let (place, lock, queue) = (run.dir.run(1), shepherd(&run), Queue::new(core));
        run.start(Arc::clone(&queue), None, None, [0, 0]);
        thread::sleep(Duration::from_millis(50));
        files::write_stable(&place.join(shepherd::ENDING), &Ending::good(job, 1)).unwrap();
        drop(lock);
        while queue.lock().jobs[&job].exit.is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        let job = queue.lock().jobs[&job].clone();
        assert_eq!((job.exit, job.run), (Some(Exit::Code(0)), 1));
    }
}
