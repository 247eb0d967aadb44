//! Job control: stopped processes stay stopped.

use torpor_sys::process::kill_thread;
use torpor_sys::ptrace;

use crate::stop::StopState;
use crate::{Error, Result, Tracee};

impl Tracee {
    /// Stops the process of this thread by job control, as `signal` would do it. The
    /// thread, and the others that [`Tracee::join_stop`], stay stopped until `SIGCONT` once
    /// released. To be called when its registers and mask are those to go on with; no code of
    /// it runs.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn stop_group(&mut self, signal: i32) -> Result<()> {
        let tid = self.tid;
        // Whatever else is pending must not be handled before the stop.
        ptrace::set_signal_mask(tid, !(1u64 << (signal - 1)))
            .map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        kill_thread(self.pid, tid, signal).map_err(Error::os(tid, "tgkill"))?;
        let mut deliver = 0;
        loop {
            ptrace::cont(tid, deliver).map_err(Error::os(tid, "PTRACE_CONT"))?;
            match self.wait_stop()? {
                (found, 0) if found == signal => deliver = signal,
                (found, 0) => {
                    self.held.push(found);
                    deliver = 0;
                }
                (found, ptrace::EVENT_STOP) if found == signal => break,
                _ => deliver = 0,
            }
        }
        self.state = StopState::Group(signal);
        ptrace::set_signal_mask(tid, self.own_mask).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))
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
