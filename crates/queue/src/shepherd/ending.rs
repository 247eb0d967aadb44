//! How a run ends: nothing of the job is left, and its last word is on stable storage.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use torpor_kernel::proc;
use torpor_worker::tell;

use super::engine::is_ending;
use super::message::{Ending, Exit, Report};
use super::{Shepherd, Vacating, message, work};
use crate::files;

/// How long killed processes may take to go. They are given up after that: the kernel
/// ends them with this process, which is their init.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait before the last word is written again, after that has failed.
const AGAIN: Duration = Duration::from_millis(100);

/// Bytes that are kept for the last word on a disk that is full.
const ROOM: usize = 16 << 10;

/// What keeps them, in the run's directory.
const PLACE: &str = "room";

/// Where a run's last word lies, in the run's directory.
pub(crate) const ENDING: &str = "ending.json";

impl Shepherd {
    /// Ends what is left of the job, and reports.
    pub(super) fn end(&mut self, exit: Exit) -> io::Result<()> {
        let _ = self.cgroups.set_frozen(false);
        let out_of_pids = self.cgroups.ran_out_of_pids();
        let leftover = self.clear();
        if let Some(container) = &self.container {
            container.remove();
        }
        // What cannot be written, because the disk is full, is lost; the daemon sees it.
        let whole = self.streams.out.finish().and(self.streams.err.finish());
        let synced = whole.and_then(|_| self.streams.out.sync().and(self.streams.err.sync()));
        // Without a checkpoint before, their names and that of the run are on no stable storage yet.
        let synced = synced.and_then(|()| self.dir.sync_names());
        let mut lost = work::hand_over(&self.dir, &self.spec);
        lost.extend(synced.err().map(|e| format!("the end of its output: {e}")));
        let ending = Ending {
            job: self.job,
            run: self.run,
            exit,
            leftover,
            lost,
            out_of_memory: self.cgroups.ran_out_of_memory(),
            out_of_pids,
            out_of_disk: self.out_of_disk,
            gave_way: self.gave_way(exit),
            ran: self.ran,
            at: files::now(),
        };
        self.write(&ending);
        self.cgroups.remove();
        if let Some(stream) = &mut self.daemon {
            // If nobody hears it, the next daemon reads it.
            let _ = message::send(stream, &Report::Ended(ending));
        }
        Ok(())
    }

    /// Whether the job has ended because its command for giving way has told it to. One that ends with a
    /// status other than 0, and by no signal, has come to an end of its own.
    fn gave_way(&self, exit: Exit) -> bool {
        let is_its_own = matches!(exit, Exit::Code(1..=128));
        self.vacating == Some(Vacating::Told) && !self.out_of_disk && !is_its_own
    }

    /// Puts the last word on stable storage, however long that takes: a job whose end nobody knows of would
    /// begin again.
    fn write(&self, ending: &Ending) {
        let place = self.dir.run(self.run);
        let _ = fs::remove_file(place.join(PLACE));
        while let Err(e) = files::write_stable(&place.join(ENDING), ending) {
            tell!("shepherd: the end of the job: {e}");
            std::thread::sleep(AGAIN);
        }
    }

    /// Kills what is left in this pid namespace; returns the names.
    fn clear(&mut self) -> Vec<String> {
        // What counts changes of memory, or brings memory in, is none of the job's.
        let is_left = |(pid, name): &(i32, String)| *pid != self.root && !is_ours(*pid, name);
        let names = alive().into_iter().filter(is_left);
        let mut names: Vec<String> = names.map(|(_, name)| name).collect();
        names.truncate(100);
        let begun = Instant::now();
        // A process that forks without end may be ahead of one pass.
        while !alive().is_empty() && begun.elapsed() < PATIENCE {
            let _ = signal_all(Signal::KILL);
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.reap();
        names
    }
}

/// Keeps room for the last word of the run that has this directory.
///
/// # Errors
/// If there is none: the disk is full.
pub(crate) fn keep_room(run: &Path) -> io::Result<()> {
    fs::write(run.join(PLACE), [0; ROOM])
}

/// Processes of this pid namespace but for this one and those that have ended.
pub(super) fn alive() -> Vec<(i32, String)> {
    let own = i32::try_from(std::process::id()).unwrap_or(1);
    let pids = proc::processes().filter(|&pid| pid != own);
    pids.filter_map(|pid| Some((pid, name(pid)?))).collect()
}

/// Processes of users in this pid namespace that do not descend from `root`: they have left the job's tree, and are no part
/// of a checkpoint. What saves the job is root's.
pub(super) fn strays(root: i32) -> Vec<(i32, String)> {
    let is_left = |pid| proc::descends(pid, root) == Some(false) && !is_ending(pid);
    alive().into_iter().filter(|(pid, _)| is_left(*pid) && !is_roots(*pid)).collect()
}

/// Ends them, and others that they make meanwhile; returns their names.
pub(super) fn end_strays(root: i32) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let left = strays(root);
        if left.is_empty() {
            break;
        }
        for (pid, name) in left {
            names.insert(name);
            // One that has ended meanwhile needs nothing.
            let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    names
}

/// Whether a process is one of those that save jobs and bring them back: it is named after this program, is root's, and runs
/// it. A job's own may have any name, and be root's.
pub(super) fn is_ours(pid: i32, name: &str) -> bool {
    name.starts_with("torpor-") && is_roots(pid) && runs_this_program(pid)
}

fn runs_this_program(pid: i32) -> bool {
    let program = |of: &str| {
        let file = fs::metadata(format!("/proc/{of}/exe")).ok()?;
        Some((file.dev(), file.ino()))
    };
    program("self").is_some_and(|own| program(&pid.to_string()) == Some(own))
}

/// Whether a process is root's.
fn is_roots(pid: i32) -> bool {
    proc::status(pid).is_ok_and(|status| status.number("Uid", 10) == Some(0))
}

/// Whether one of those with this name is at work in this pid namespace.
pub(super) fn is_at_work(name: &str) -> bool {
    alive().iter().any(|(pid, found)| found == name && is_ours(*pid, found))
}

/// The name of a process that has not ended.
fn name(pid: i32) -> Option<String> {
    let stat = proc::stat(pid).ok().filter(|stat| !stat.has_ended())?;
    Some(String::from_utf8_lossy(&stat.comm).into_owned())
}

/// Sends a signal to all processes of this pid namespace but its init.
pub(super) fn signal_all(signal: Signal) -> io::Result<()> {
    for (pid, _) in alive() {
        if let Some(pid) = Pid::from_raw(pid) {
            match kill_process(pid, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(())
}
