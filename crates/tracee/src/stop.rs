//! A stopped thread.
//!
//! Between two batches a tracee has its own registers and signal mask in place, so
//! that it simply goes on if its tracer dies. During a batch its way back lies in
//! a signal frame, see [`crate::frame`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use torpor_sys::process::{Status, wait, wait_any};
use torpor_sys::ptrace::{self, Registers, RseqConfig, SigInfo, option};
use torpor_sys::stub::DONE;
use torpor_sys::xsave;

use crate::leftover::{is_zombie, read_status};
use crate::stub::Stub;
use crate::syscall::Syscall;
use crate::{Batch, Error, RemoteAddr, Result, restart};

/// What is blocked during a batch: all but the signal that ends it.
pub(crate) const BATCH_MASK: u64 = !(1 << (DONE - 1));

static STOPS: AtomicU64 = AtomicU64::new(0);

/// How many stops of threads this process has waited for.
pub fn stops() -> u64 {
    STOPS.load(Ordering::Relaxed)
}

/// Takes note of a stop: its signal and its event.
fn stop(signal: i32, event: i32) -> (i32, i32) {
    STOPS.fetch_add(1, Ordering::Relaxed);
    (signal, event)
}

/// In what kind of stop a thread was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopState {
    /// It ran (or slept in the kernel) until it was interrupted.
    Interrupted,
    /// Job control had stopped its process, with this signal.
    Group(i32),
}

/// A thread stopped under ptrace. All its methods must be called on the thread
/// that created it.
#[derive(Debug)]
pub struct Tracee {
    pub(crate) pid: i32,
    pub(crate) tid: i32,
    pub(crate) state: StopState,
    pub(crate) own: Registers,
    pub(crate) own_mask: u64,
    pub(crate) xstate: Option<Vec<u8>>,
    pub(crate) stub: Option<Stub>,
    /// Signals that arrived during batches, to be sent again.
    pub(crate) held: Vec<i32>,
    /// Children and threads that calls of a batch have created.
    pub(crate) born: Vec<i32>,
    /// Where the thread's pointer to its critical section is, and that section, if
    /// it must be found in it again.
    pub(crate) critical_section: Option<(u64, u64)>,
    /// What it has registered with rseq(2), once that has been looked up: nothing of ours is.
    pub(crate) rseq: Option<RseqConfig>,
    /// Made by us: dies with us, and has no state of its own to go back to.
    pub(crate) husk: bool,
    /// A husk that has become no task yet: it stays in its stub from one batch to the next, with
    /// all blocked that a batch blocks.
    pub(crate) bare: bool,
    /// Still ours to let go when it is dropped.
    pub(crate) held_back: bool,
    /// Whether it leads a process that has other threads, once that has been looked up.
    pub(crate) leads_others: Option<bool>,
}

/// Only the net below: a tracee is let go by [`Tracee::finish`], a husk by
/// [`Tracee::release`]. What an error left behind goes on as it was, and a husk ends.
impl Drop for Tracee {
    fn drop(&mut self) {
        if !self.held_back {
            return;
        }
        if self.husk {
            self.kill();
            self.wait_gone();
        } else {
            let _ = ptrace::detach(self.tid, 0);
        }
    }
}

impl Tracee {
    /// Attaches to thread `tid` of process `pid` and asks it to stop, without
    /// waiting for that: seize all threads first, then call [`Tracee::stopped`].
    ///
    /// # Errors
    /// `EPERM` if it is traced by somebody else; gone.
    pub fn seize(tid: i32, filtered: bool) -> Result<()> {
        let seccomp = if filtered { option::SUSPEND_SECCOMP } else { 0 };
        ptrace::seize(tid, option::TRACESYSGOOD | seccomp)
            .map_err(Error::os(tid, "PTRACE_SEIZE"))?;
        ptrace::interrupt(tid).map_err(Error::os(tid, "PTRACE_INTERRUPT"))
    }

    /// Waits until a thread that was seized has stopped, for `patience` at most
    /// (`None` then). Signals that were on their way are delivered first.
    ///
    /// # Errors
    /// Gone, if it ended instead.
    pub fn stopped(pid: i32, tid: i32, patience: Duration) -> Result<Option<Self>> {
        let deadline = Instant::now() + patience;
        let state = loop {
            match stop_before(tid, deadline)? {
                None => return Ok(None),
                Some((libc::SIGTRAP, ptrace::EVENT_STOP)) => break StopState::Interrupted,
                Some((signal, ptrace::EVENT_STOP)) => break StopState::Group(signal),
                Some((signal, event)) => {
                    let deliver = if event == 0 { signal } else { 0 };
                    ptrace::cont(tid, deliver).map_err(Error::os(tid, "PTRACE_CONT"))?;
                }
            }
        };
        let mut tracee = Self::here(pid, tid, state)?;
        tracee.leave_critical_section()?;
        Ok(Some(tracee))
    }

    /// Says whether it leads a process that has other threads, which spares to look it up.
    pub fn leads_others(&mut self, others: bool) {
        self.leads_others = Some(others);
    }

    /// The process is to end if the supervisor does before it has let the thread go.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn die_with_supervisor(&self) -> Result<()> {
        self.set_options(option::EXITKILL)
    }

    /// Sets the options of tracing: those that every task has, and `more`.
    pub(crate) fn set_options(&self, more: u64) -> Result<()> {
        let options = option::TRACESYSGOOD | more;
        // A supervisor that is filtered itself cannot suspend filters, nor has it any to
        // keep suspended: it could not have seized the thread.
        ptrace::set_options(self.tid, options | option::SUSPEND_SECCOMP)
            .or_else(|_| ptrace::set_options(self.tid, options))
            .map_err(Error::os(self.tid, "PTRACE_SETOPTIONS"))
    }

    /// Takes stock of a thread that is stopped now.
    pub(crate) fn here(pid: i32, tid: i32, state: StopState) -> Result<Self> {
        let own = ptrace::registers(tid).map_err(Error::os(tid, "PTRACE_GETREGS"))?;
        Ok(Tracee {
            pid,
            tid,
            state,
            own: restart::with_number(tid, own),
            own_mask: ptrace::signal_mask(tid).map_err(Error::os(tid, "PTRACE_GETSIGMASK"))?,
            xstate: None,
            stub: None,
            held: Vec::new(),
            born: Vec::new(),
            critical_section: None,
            rseq: None,
            husk: false,
            bare: false,
            held_back: true,
            leads_others: None,
        })
    }

    /// Takes stock of it again: it has moved since.
    pub(crate) fn look_again(&mut self) -> Result<()> {
        let tid = self.tid;
        self.own = ptrace::registers(tid).map_err(Error::os(tid, "PTRACE_GETREGS"))?;
        self.own_mask = ptrace::signal_mask(tid).map_err(Error::os(tid, "PTRACE_GETSIGMASK"))?;
        Ok(())
    }

    /// Its process, in the supervisor's pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Its thread id, in the supervisor's pid namespace.
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// How it was found.
    pub fn state(&self) -> StopState {
        self.state
    }

    /// Its own registers, as it was interrupted.
    pub fn registers(&self) -> &Registers {
        &self.own
    }

    /// Its own registers as they are to be restored: an interrupted system call is
    /// wound back to be made again.
    pub fn restartable_registers(&self) -> Registers {
        crate::frame::restarted(&self.own)
    }

    /// Its own signal mask.
    pub fn signal_mask(&self) -> u64 {
        self.own_mask
    }

    /// Its x87, SSE, AVX … state in XSAVE layout. Of a task, which is one of thousands
    /// perhaps, without unused tiles; of a husk all that it can be given.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn xstate(&mut self) -> Result<&[u8]> {
        if self.xstate.is_none() {
            let mut state =
                ptrace::xstate(self.tid).map_err(Error::os(self.tid, "NT_X86_XSTATE"))?;
            if !self.husk {
                state.truncate(xsave::len_without_tiles(&state));
                state.shrink_to_fit();
            }
            self.xstate = Some(state);
        }
        Ok(self.xstate.as_deref().unwrap_or_default())
    }

    /// Children and threads born by remote calls since the last time this was asked.
    pub(crate) fn take_born(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.born)
    }

    /// Starts a batch of system calls.
    pub fn batch(&mut self) -> Batch<'_> {
        Batch::new(self)
    }

    /// Makes one system call inside the task.
    ///
    /// # Errors
    /// Gone; `Remote`, if the call is refused; use a [`Batch`] where that is expected.
    pub fn call(&mut self, what: &str, call: impl Into<Syscall>) -> Result<u64> {
        let mut batch = self.batch();
        let call = batch.call(call);
        batch.run()?.expect(call, || what.to_owned())
    }

    /// Reads its memory.
    ///
    /// # Errors
    /// `EFAULT` if not all of it is readable.
    pub fn read(&self, address: RemoteAddr, buf: &mut [u8]) -> Result<()> {
        self.read_parts(&mut [(address, buf)])
    }

    /// Reads its memory at several places at once.
    pub(crate) fn read_parts(&self, parts: &mut [(RemoteAddr, &mut [u8])]) -> Result<()> {
        let wanted: usize = parts.iter().map(|(_, buf)| buf.len()).sum();
        let mut parts: Vec<_> = parts.iter_mut().map(|(at, buf)| (at.0, &mut **buf)).collect();
        let n = torpor_sys::vm::read_parts(self.tid, &mut parts)
            .map_err(Error::os(self.tid, "process_vm_readv"))?;
        if n == wanted { Ok(()) } else { Err(self.fault("process_vm_readv")) }
    }

    /// Writes its memory.
    ///
    /// # Errors
    /// `EFAULT` if not all of it is writable.
    pub fn write(&self, address: RemoteAddr, buf: &[u8]) -> Result<()> {
        self.write_parts(&[(address, buf)])
    }

    /// Writes its memory at several places at once.
    pub(crate) fn write_parts(&self, parts: &[(RemoteAddr, &[u8])]) -> Result<()> {
        let wanted: usize = parts.iter().map(|(_, buf)| buf.len()).sum();
        let parts: Vec<_> = parts.iter().map(|&(at, buf)| (at.0, buf)).collect();
        let n = torpor_sys::vm::write_parts(self.tid, &parts)
            .map_err(Error::os(self.tid, "process_vm_writev"))?;
        if n == wanted { Ok(()) } else { Err(self.fault("process_vm_writev")) }
    }

    fn fault(&self, what: &'static str) -> Error {
        Error::os(self.tid, what)(std::io::Error::from_raw_os_error(libc::EFAULT))
    }

    /// Lets it run from `regs` in the stub.
    pub(crate) fn start_at(&self, regs: &Registers) -> Result<()> {
        let tid = self.tid;
        if !self.bare {
            ptrace::set_signal_mask(tid, BATCH_MASK)
                .map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        }
        ptrace::set_registers(tid, regs).map_err(Error::os(tid, "PTRACE_SETREGS"))?;
        ptrace::cont(tid, 0).map_err(Error::os(tid, "PTRACE_CONT"))
    }

    /// Waits until the stub's final signal stops it, then puts the task's own registers back.
    pub(crate) fn run_to_done(&mut self) -> Result<()> {
        self.wait_done()?;
        if self.bare { Ok(()) } else { self.put_back() }
    }

    /// The thread is a husk from now on, that has become no task yet.
    pub(crate) fn be_husk(&mut self) -> Result<()> {
        let tid = self.tid;
        (self.husk, self.bare) = (true, true);
        self.own.orig_rax = u64::MAX;
        self.own_mask = BATCH_MASK;
        ptrace::set_signal_mask(tid, BATCH_MASK).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))
    }

    /// Puts the task's own registers and mask back.
    pub(crate) fn put_back(&mut self) -> Result<()> {
        ptrace::set_registers(self.tid, &self.own)
            .map_err(Error::os(self.tid, "PTRACE_SETREGS"))?;
        ptrace::set_signal_mask(self.tid, self.own_mask)
            .map_err(Error::os(self.tid, "PTRACE_SETSIGMASK"))
    }

    /// Waits for its next stop: its signal and its event. Somebody may kill its process
    /// meanwhile; the end of a leader is not reported before its other threads, which may
    /// be traced as well, have been waited for, so that to wait for it alone would last for ever.
    pub(crate) fn wait_stop(&mut self) -> Result<(i32, i32)> {
        const LOOK: Duration = Duration::from_millis(50);
        let (pid, tid) = (self.pid, self.tid);
        if tid != pid || !*self.leads_others.get_or_insert_with(|| !other_threads(pid).is_empty()) {
            return wait_for(tid);
        }
        loop {
            if let Some(stop) = stop_before(tid, Instant::now() + LOOK)? {
                return Ok(stop);
            }
            if is_zombie(tid) {
                for other in other_threads(pid).into_iter().filter(|&other| is_zombie(other)) {
                    let _ = wait(other, false);
                }
            }
        }
    }

    fn wait_done(&mut self) -> Result<()> {
        loop {
            let (signal, event) = self.wait_stop()?;
            match event {
                0 if signal == DONE && self.sent_by_stub()? => return Ok(()),
                0 if is_fault(
                    &ptrace::siginfo(self.tid).map_err(Error::os(self.tid, "siginfo"))?,
                ) =>
                {
                    let at = ptrace::registers(self.tid).map(|r| r.rip).unwrap_or_default();
                    self.put_back()?;
                    return Err(Error::Unusable {
                        pid: self.tid,
                        reason: format!("signal {signal} inside the stub, at {at:#x}"),
                    });
                }
                0 => self.held.push(signal),
                libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => {
                    let child = ptrace::event_message(self.tid)
                        .map_err(Error::os(self.tid, "PTRACE_GETEVENTMSG"))?;
                    self.born.push(i32::try_from(child).unwrap_or_default());
                }
                _ => {}
            }
            ptrace::cont(self.tid, 0).map_err(Error::os(self.tid, "PTRACE_CONT"))?;
        }
    }

    /// Whether the signal that it stopped at is the one with which a batch ends. That one is
    /// sent to the thread, and so comes before any that is sent to its process; one that
    /// somebody else sends to the thread at that moment is the same as it.
    fn sent_by_stub(&self) -> Result<bool> {
        let regs = ptrace::registers(self.tid).map_err(Error::os(self.tid, "PTRACE_GETREGS"))?;
        Ok(self.stub.as_ref().is_some_and(|s| s.is_behind_done(regs.rip)))
    }

    /// Makes it stop at a signal-handling point, where the kernel looks after
    /// interrupted system calls; needed after a stop at a system call.
    pub(crate) fn ask_to_trap(&self) -> Result<()> {
        ptrace::interrupt(self.tid).map_err(Error::os(self.tid, "PTRACE_INTERRUPT"))?;
        ptrace::cont(self.tid, 0).map_err(Error::os(self.tid, "PTRACE_CONT"))
    }

    /// Waits for that.
    pub(crate) fn wait_trap(&mut self) -> Result<()> {
        loop {
            match self.wait_stop()? {
                (_, ptrace::EVENT_STOP) => return Ok(()),
                (signal, 0) => self.held.push(signal),
                _ => {}
            }
            ptrace::cont(self.tid, 0).map_err(Error::os(self.tid, "PTRACE_CONT"))?;
        }
    }

    /// Makes the one system call that `regs` points at, and stops behind it.
    pub(crate) fn step_syscall(&mut self, regs: &Registers) -> Result<u64> {
        self.start_syscall(regs)?;
        self.wait_syscall()?;
        self.to_next_syscall()?;
        self.finish_syscall()
    }

    /// Sends it to the one system call that `regs` points at.
    pub(crate) fn start_syscall(&mut self, regs: &Registers) -> Result<()> {
        let tid = self.tid;
        ptrace::set_signal_mask(tid, u64::MAX).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        ptrace::set_registers(tid, regs).map_err(Error::os(tid, "PTRACE_SETREGS"))?;
        self.to_next_syscall()
    }

    /// Lets it run to the beginning or the end of a system call.
    pub(crate) fn to_next_syscall(&self) -> Result<()> {
        ptrace::cont_to_syscall(self.tid, 0).map_err(Error::os(self.tid, "PTRACE_SYSCALL"))
    }

    /// Waits until it is there.
    pub(crate) fn wait_syscall(&mut self) -> Result<()> {
        loop {
            match self.wait_stop()? {
                (signal, 0) if signal == libc::SIGTRAP | 0x80 => return Ok(()),
                (signal, 0) => self.held.push(signal),
                _ => {}
            }
            self.to_next_syscall()?;
        }
    }

    /// Waits until it has made the system call, and returns the answer.
    pub(crate) fn finish_syscall(&mut self) -> Result<u64> {
        self.wait_syscall()?;
        Ok(ptrace::registers(self.tid).map_err(Error::os(self.tid, "PTRACE_GETREGS"))?.rax)
    }

    /// Lets the thread go on as it was found. Signals that arrived meanwhile are sent
    /// again. The stub must have been removed before from one thread of the process.
    ///
    /// # Errors
    /// Gone, which a caller that lets go can ignore.
    pub fn finish(mut self) -> Result<()> {
        let tid = self.tid;
        for signal in std::mem::take(&mut self.held) {
            // Whoever lets it go on means the stop that came before: sent again, that would come behind.
            if !STOP_SIGNALS.contains(&signal) || !is_told_to_go_on(self.pid)? {
                send(self.pid, signal).map_err(Error::os(tid, "kill"))?;
            }
        }
        self.enter_critical_section()?;
        self.held_back = false;
        ptrace::detach(tid, 0).map_err(Error::os(tid, "PTRACE_DETACH"))
    }

    /// Waits for a thread that has been killed to be gone.
    pub fn wait_gone(&mut self) {
        self.held_back = false;
        // A leader is not reported before the other threads have been waited for.
        let others = if self.tid == self.pid { other_threads(self.pid) } else { Vec::new() };
        wait_gone(others.into_iter().chain([self.tid]).collect());
    }

    /// Waits for threads that have been killed to be gone, all together.
    pub fn wait_all_gone(threads: impl IntoIterator<Item = Self>) {
        let mut tids = Vec::new();
        for mut thread in threads {
            thread.held_back = false;
            tids.push(thread.tid);
        }
        wait_gone(tids);
    }

    /// Ends husks, all together: the first process of a pid namespace ends only after
    /// everybody else in there has been waited for.
    pub fn end_all(husks: impl IntoIterator<Item = Self>) {
        let husks: Vec<Self> = husks.into_iter().filter(|husk| husk.held_back).collect();
        for husk in &husks {
            husk.kill();
        }
        Self::wait_all_gone(husks);
    }

    /// Kills its process.
    pub(crate) fn kill(&self) {
        let _ = send(self.pid, libc::SIGKILL);
    }

    /// Ends a husk with a wait status: an exit code, or the signal that killed it.
    ///
    /// # Errors
    /// [`Error::Unusable`] if it goes on after exit_group(2), [`Error::Os`] if ptrace(2) refuses
    /// the signal.
    pub fn exit_with(mut self, status: u32) -> Result<()> {
        let tid = self.tid;
        let signal = (status & 0x7f).cast_signed();
        if signal == 0 {
            self.leave((libc::SYS_exit_group, [u64::from(status >> 8 & 0xff)]))?;
        } else {
            // The stop at the end of a batch is one at which a signal can be injected.
            self.call("getpid", (libc::SYS_getpid, []))?;
            ptrace::set_signal_mask(tid, 0).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
            ptrace::cont(tid, signal).map_err(Error::os(tid, "PTRACE_CONT"))?;
        }
        self.wait_gone();
        Ok(())
    }

    /// Ends a thread of a husk that is not its leader.
    ///
    /// # Errors
    /// [`Error::Unusable`] if it goes on after exit(2).
    pub fn exit_thread(mut self) -> Result<()> {
        self.leave((libc::SYS_exit, [0]))?;
        self.wait_gone();
        Ok(())
    }

    fn leave(&mut self, call: (i64, [u64; 1])) -> Result<()> {
        let pid = self.tid;
        let mut batch = self.batch();
        batch.call(call);
        match batch.run() {
            Err(Error::Gone { .. }) => Ok(()),
            Err(e) => Err(e),
            Ok(_) => Err(Error::Unusable { pid, reason: "it does not exit".to_owned() }),
        }
    }
}

/// Signals that stop a process by job control, see signal(7).
const STOP_SIGNALS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Whether `SIGCONT` is pending for a process: then it came after the last stop signal, which takes it away.
fn is_told_to_go_on(pid: i32) -> Result<bool> {
    let status = read_status(pid)?;
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    Ok(pending.is_some_and(|mask| mask >> (libc::SIGCONT - 1) & 1 == 1))
}

/// The threads of a process but its leader.
pub(crate) fn other_threads(pid: i32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let tids = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    tids.filter(|&tid| tid != pid).collect()
}

/// Takes note of any one child or tracee that has something to report.
fn reap_stray(tids: &mut Vec<i32>) -> bool {
    match wait_any() {
        Ok(Some((tid, Status::Stopped { .. }))) => ptrace::cont(tid, libc::SIGKILL).is_ok(),
        Ok(Some((tid, _))) => {
            tids.retain(|&t| t != tid);
            true
        }
        _ => false,
    }
}

/// Waits until none of the killed threads is left. It asks in rounds, since to wait for one of them
/// alone may be to wait for ever: a leader is not reported before its other threads have been waited
/// for, and of the first process in a pid namespace one thread, whichever it is, does not end before
/// everybody else in there, its own other threads included, has been waited for.
///
/// Some of these may have parents out there, which have ended as well, so that they wait for the process that
/// has adopted them. Their namespace's first process is not waited for then: it is past doing anything.
fn wait_gone(mut tids: Vec<i32>) {
    let mut pause = Duration::from_micros(5);
    let mut moved = Instant::now();
    while !tids.is_empty() {
        let before = tids.len();
        tids.retain(|&tid| match wait(tid, false) {
            Ok(Some((_, Status::Stopped { .. }))) => {
                // A stop on its way out, or one that was pending.
                let _ = ptrace::cont(tid, 0);
                true
            }
            Ok(Some((_, Status::Continued)) | None) => true,
            Ok(Some((_, Status::Exited(_) | Status::Signaled(_)))) | Err(_) => false,
        });
        // A task that died while it was being made is in nobody's hands, but traced all
        // the same, and holds up the first process of its pid namespace.
        let stray = tids.len() == before && !tids.is_empty() && reap_stray(&mut tids);
        pause = if tids.len() < before || stray {
            moved = Instant::now();
            Duration::from_micros(5)
        } else if moved.elapsed() > ADOPTED && tids.iter().all(|&tid| waits_for_namespace(tid)) {
            return;
        } else {
            (pause * 2).min(Duration::from_millis(2))
        };
        if !tids.is_empty() {
            std::thread::sleep(pause);
        }
    }
}

/// How long the one that has adopted a process may take to wait for it.
const ADOPTED: Duration = Duration::from_secs(1);

/// Whether a thread is the last one of the first process of a pid namespace, and ends when all
/// others in there have been waited for.
fn waits_for_namespace(tid: i32) -> bool {
    const EXITING: u32 = libc::PF_EXITING.cast_unsigned();
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{tid}/{name}")).ok();
    let is_first = read("status").is_some_and(|status| {
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        pids.is_some_and(|pids| pids.split_whitespace().last() == Some("1"))
    });
    let is_exiting = read("stat").and_then(|stat| {
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let sleeps = fields.next() == Some("S");
        let flags: u32 = fields.nth(5)?.parse().ok()?;
        Some(sleeps && flags & EXITING != 0)
    });
    is_first && is_exiting == Some(true)
}

/// Sends a signal to a process.
pub(crate) fn send(pid: i32, signal: i32) -> std::io::Result<()> {
    use rustix::process::{Pid, Signal, kill_process};
    match (Pid::from_raw(pid), Signal::from_named_raw(signal)) {
        (Some(pid), Some(signal)) => Ok(kill_process(pid, signal)?),
        _ => Err(std::io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Waits for a stop of `tid`: its signal and its event.
pub(crate) fn wait_for(tid: i32) -> Result<(i32, i32)> {
    loop {
        match wait(tid, true) {
            Ok(Some((_, Status::Stopped { signal, event }))) => return Ok(stop(signal, event)),
            Ok(Some((_, Status::Continued))) | Ok(None) => {}
            Ok(Some((_, Status::Exited(_) | Status::Signaled(_)))) => {
                return Err(Error::Gone { pid: tid });
            }
            Err(e) if e.raw_os_error() == Some(libc::ECHILD) => {
                return Err(Error::Gone { pid: tid });
            }
            Err(e) => return Err(Error::os(tid, "wait4")(e)),
        }
    }
}

/// As [`wait_for`], until `deadline`.
pub(crate) fn stop_before(tid: i32, deadline: Instant) -> Result<Option<(i32, i32)>> {
    /// A sleep takes at least 50 us (timer slack), and most threads stop sooner.
    const EAGER: u32 = 50;
    let mut tries = 0;
    let mut pause = Duration::from_micros(5);
    loop {
        match wait(tid, false) {
            Ok(Some((_, Status::Stopped { signal, event }))) => {
                return Ok(Some(stop(signal, event)));
            }
            Ok(Some((_, Status::Exited(_) | Status::Signaled(_)))) => {
                return Err(Error::Gone { pid: tid });
            }
            Ok(Some((_, Status::Continued))) => {}
            Ok(None) if tries < EAGER => {
                tries += 1;
                std::thread::yield_now();
            }
            Ok(None) if Instant::now() >= deadline => return Ok(None),
            Ok(None) => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(2));
            }
            Err(e) if e.raw_os_error() == Some(libc::ECHILD) => {
                return Err(Error::Gone { pid: tid });
            }
            Err(e) => return Err(Error::os(tid, "wait4")(e)),
        }
    }
}

/// Whether a signal comes from what the task itself executed.
fn is_fault(info: &SigInfo) -> bool {
    let signal = i32::from_le_bytes([info[0], info[1], info[2], info[3]]);
    let code = i32::from_le_bytes([info[8], info[9], info[10], info[11]]);
    code > 0
        && matches!(
            signal,
            libc::SIGSEGV
                | libc::SIGBUS
                | libc::SIGILL
                | libc::SIGFPE
                | libc::SIGTRAP
                | libc::SIGSYS
        )
}
