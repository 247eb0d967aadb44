//! Twins: stopped copies of processes, whose memory stays as it was while the processes
//! themselves go on.
//!
//! A twin is a child of its original without an exit signal, so that wait(2) does not
//! show it to programs that ask for ordinary children. It never runs the program's code:
//! it stops before its first instruction, and what its stack pointer leads to, should the
//! supervisor die in that moment, is the way out.

use torpor_sys::ptrace::{Registers, option};

use crate::husk::clone3;
use crate::syscall::prctl;
use crate::{Result, Tracee, frame};

/// What a twin calls itself, so that whoever looks for it knows whose it is.
const NAME: &str = "torpor-twin";
/// Below the frame that a twin starts with; only the end of its stack matters.
const STACK: u64 = 4096;

impl Tracee {
    /// Makes a twin of the process, which has a stub. It ends with the supervisor, and
    /// when it is dropped; then its original is to reap it.
    ///
    /// # Errors
    /// Gone; `Remote`, with the answer to clone3(2): no room for another process or for page
    /// tables.
    pub fn spawn_twin(&mut self) -> Result<Self> {
        self.spawn(0).map(|(twin, _)| twin)
    }

    /// Makes a *shadow* of the thread, for calls that cannot be undone: a process with credentials
    /// like its. It is in the memory of the thread's process, so that it costs the same however
    /// much that is, and only one of them may run in there. Returns it with its pid as the process
    /// knows it; behind [`Tracee::end_twin`] follows [`Tracee::reap_shadow`].
    ///
    /// # Errors
    /// Gone; `Remote`, with the answer to clone3(2): no room for another process.
    pub fn spawn_shadow(&mut self) -> Result<(Self, u64)> {
        self.spawn(libc::CLONE_VM.cast_unsigned().into())
    }

    /// Has the process reap a shadow that has ended.
    ///
    /// # Errors
    /// Gone; `ECHILD` if it has reaped it already.
    pub fn reap_shadow(&mut self, pid: u64) -> Result<()> {
        let mut batch = self.batch();
        let reap = batch.call((libc::SYS_wait4, [pid, 0, libc::__WALL.cast_unsigned().into(), 0]));
        batch.run()?.expect(reap, || "wait4 for a shadow".to_owned()).map(drop)
    }

    /// A new twin, with its pid as its original knows it.
    fn spawn(&mut self, flags: u64) -> Result<(Self, u64)> {
        self.set_options(option::TRACECLONE)?;
        let born = self.clone_twin(flags);
        // A born twin must not be lost: it is looked at first.
        let twin = born.and_then(|pid| Ok((self.meet_twin()?, pid)));
        self.set_options(0)?;
        twin
    }

    fn clone_twin(&mut self, flags: u64) -> Result<u64> {
        let stub = self.stub()?;
        let at = stub.data_at().0;
        let exit = Registers {
            rax: libc::SYS_exit_group.cast_unsigned(),
            rdi: 0,
            rip: stub.syscall_at(),
            orig_rax: u64::MAX,
            ..self.own.for_64bit()
        };
        let exit = frame::build(at, self.tid, &exit, self.xstate()?, u64::MAX);
        let mut batch = self.batch();
        let placed = batch.bytes(&exit);
        debug_assert_eq!(placed.0, at);
        // No exit signal.
        let call = clone3(&mut batch, [flags, 0, 0, 0, 0, at - STACK, STACK, 0, 0, 0, 0]);
        batch.run()?.expect(call, || "clone3 for a twin".to_owned())
    }

    /// Takes hold of the twin that was just born, and has it close all files: it must not
    /// keep the other end of a pipe open.
    fn meet_twin(&mut self) -> Result<Self> {
        let mut twin = self.meet_born(false)?;
        twin.set_options(option::EXITKILL)?;
        let mut batch = twin.batch();
        let name = batch.cstr(NAME);
        batch.call(prctl(libc::PR_SET_NAME, [name.0]));
        batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
        batch.run()?;
        Ok(twin)
    }

    /// Ends a twin. Its original has still to reap it.
    pub fn end_twin(mut self) {
        self.kill();
        self.wait_gone();
    }
}
