//! Job control: stopped processes stay stopped.

use torpor_sys::process::kill_thread;
use torpor_sys::ptrace;

use crate::stop::StopState;
use crate::{Error, Result, Tracee};

impl Tracee {
    /// Stops the process of this thread by job control, as `signal` would do it. The
    /// thread, and the others that [`Tracee::join_stop`], stay stopped until `SIGCONT` once
    /// released. To be called when its registers and mask are those to go on with; no code of
    /// it runs. Returns the signal that it is stopped by: `SIGSTOP` where the kernel stops nobody by another one (a group
    /// that is orphaned, the first process of a pid namespace).
    ///
    /// # Errors
    /// If the task is gone.
    pub fn stop_group(&mut self, signal: i32) -> Result<i32> {
        let tid = self.tid;
        // Whatever else is pending must not be handled before the stop.
        ptrace::set_signal_mask(tid, !(1u64 << (signal - 1)))
            .map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        kill_thread(self.pid, tid, signal).map_err(Error::os(tid, "tgkill"))?;
        let mut deliver = 0;
        loop {
            if deliver != 0 {
                // If the signal stops nobody, this does, before any code runs.
                ptrace::interrupt(tid).map_err(Error::os(tid, "PTRACE_INTERRUPT"))?;
            }
            ptrace::cont(tid, deliver).map_err(Error::os(tid, "PTRACE_CONT"))?;
            match self.wait_stop()? {
                (found, 0) if found == signal => deliver = signal,
                (found, 0) => {
                    self.held.push(found);
                    deliver = 0;
                }
                (found, ptrace::EVENT_STOP) if found == signal => break,
                _ if deliver != 0 && signal != libc::SIGSTOP => {
                    return self.stop_group(libc::SIGSTOP);
                }
                _ => deliver = 0,
            }
        }
        self.state = StopState::Group(signal);
        ptrace::set_signal_mask(tid, self.own_mask).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        Ok(signal)
    }

    /// Lets another thread of a process take part in the stop that is under way: with the last
    /// one of them the parent is told. No code of it runs.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn join_stop(&mut self, signal: i32) -> Result<()> {
        let tid = self.tid;
        loop {
            ptrace::cont(tid, 0).map_err(Error::os(tid, "PTRACE_CONT"))?;
            match self.wait_stop()? {
                (found, ptrace::EVENT_STOP) if found == signal => break,
                (found, 0) => self.held.push(found),
                _ => {}
            }
        }
        self.state = StopState::Group(signal);
        Ok(())
    }

    /// Sends a signal to the thread, or to its process (`shared`).
    ///
    /// # Errors
    /// If the task is gone.
    pub fn send(&self, signal: i32, shared: bool) -> Result<()> {
        if !shared {
            return kill_thread(self.pid, self.tid, signal).map_err(Error::os(self.tid, "tgkill"));
        }
        let (Some(pid), Some(signal)) = (
            rustix::process::Pid::from_raw(self.pid),
            rustix::process::Signal::from_named_raw(signal),
        ) else {
            return Ok(());
        };
        rustix::process::kill_process(pid, signal)
            .map_err(|e| Error::os(self.pid, "kill")(e.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel lets a process go on that nobody could wake again, and images may say that it was stopped.
    #[test]
    fn a_signal_that_stops_nobody_does_not_let_a_process_go_on() {
        let (mut leader, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        leader.call("setsid", (libc::SYS_setsid, [])).unwrap();
        let mut job = leader.spawn_child(0, 0, &[]).unwrap();
        job.call("setpgid", (libc::SYS_setpgid, [0, 0])).unwrap();
        // Its parent is in its session, and in another group.
        assert_eq!(job.stop_group(libc::SIGTSTP).unwrap(), libc::SIGTSTP);
        assert_eq!(leader.stop_group(libc::SIGTTOU).unwrap(), libc::SIGSTOP);
        assert_eq!(leader.state(), StopState::Group(libc::SIGSTOP));
        Tracee::end_all([job, leader]);
    }
}
