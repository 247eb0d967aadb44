//! Templates: husks that are left behind, stopped, for others to be born as copies of them.
//!
//! A template is in a session of its own: the kernel ends stopped processes whose group is
//! orphaned by the end of a parent in the same session. It has no files open.

use torpor_sys::ptrace::{self, option};

use crate::husk::OPTIONS;
use crate::stop::send;
use crate::syscall::prctl;
use crate::{Error, Result, Tracee};

/// What a template calls itself, so that whoever looks for it knows whose it is.
const NAME: &str = "torpor-template";

impl Tracee {
    /// Leaves a husk behind. It stays, stopped, when the supervisor ends.
    ///
    /// # Errors
    /// Gone; `Remote`, if it cannot become a session leader.
    pub fn leave_behind(mut self) -> Result<()> {
        self.call("setsid", (libc::SYS_setsid, []))?;
        let mut batch = self.batch();
        let name = batch.cstr(NAME);
        batch.call(prctl(libc::PR_SET_NAME, [name.0]));
        batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
        batch.run()?;
        self.put_back()?;
        self.set_options(0)?;
        let tid = self.tid;
        send(self.pid, libc::SIGSTOP).map_err(Error::os(tid, "kill"))?;
        self.held_back = false;
        ptrace::detach(tid, 0).map_err(Error::os(tid, "PTRACE_DETACH"))
    }

    /// Makes a husk that is a copy of this template, which has a stub, and a child of its parent.
    /// `set_tid` are its pids, innermost namespace first.
    ///
    /// # Errors
    /// Gone; `Remote`, with the answer to clone3(2): a pid that is taken, a limit of processes.
    pub fn copy_of_template(&mut self, flags: u64, set_tid: &[i32]) -> Result<Self> {
        self.set_options(option::TRACECLONE | option::TRACEFORK)?;
        // A parent reaps whom it has an exit signal of: that of a sibling is its sibling's.
        let born = self.spawn_child(flags | libc::CLONE_PARENT as u64, 0, set_tid);
        self.set_options(0)?;
        let husk = born?;
        ptrace::set_options(husk.tid, OPTIONS).map_err(Error::os(husk.tid, "PTRACE_SETOPTIONS"))?;
        Ok(husk)
    }
}
