//! Husks: empty tasks to be filled by a restore.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use torpor_sys::process::{Gate, spawn_gated};
use torpor_sys::ptrace::{self, option};
use torpor_sys::stub;

use crate::lone::entering;
use crate::stop::{StopState, wait_for};
use crate::stub::{STUB_SIZE, Stub};
use crate::syscall::{self, Syscall};
use crate::{Batch, Call, Error, RemoteAddr, Result, Tracee};

/// Where the program of a husk is linked to: above the usual `mmap_min_addr`.
const HUSK_BASE: u64 = 0x20000;

/// How long a pid may still be taken of a thread whose process has been waited for: the kernel
/// frees it only afterwards.
const LEAVING: Duration = Duration::from_millis(200);

/// Options of tasks that Torpor made: they end with it.
pub(crate) const OPTIONS: u64 = option::TRACESYSGOOD
    | option::TRACEFORK
    | option::TRACEVFORK
    | option::TRACECLONE
    | option::TRACEEXEC
    | option::EXITKILL;

/// A static executable whose one segment is the stub with its data.
fn program() -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let code = stub::code();
    let mut out = Vec::with_capacity(4096 + code.len());
    // ELF header (elf(5)): 64-bit, little-endian, ET_EXEC, EM_X86_64.
    out.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    out.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [HUSK_BASE, 64, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        out.extend(half.to_le_bytes());
    }
    // Program header: PT_LOAD, rwx, from the second page of the file.
    out.extend(1u32.to_le_bytes());
    out.extend(7u32.to_le_bytes());
    for word in [4096, HUSK_BASE, HUSK_BASE, code.len() as u64, STUB_SIZE, 4096] {
        out.extend(word.to_le_bytes());
    }
    debug_assert_eq!(out.len() as u64, HEADERS);
    out.resize(4096, 0);
    out.extend(code);
    out
}

/// How the first husk is born.
pub struct Birth<'a> {
    /// The flags of `clone3`. It is a child of the caller, or its sibling with
    /// `CLONE_PARENT`.
    pub flags: u64,
    /// Its pids, innermost namespace first; none to take what comes.
    pub set_tid: &'a [i32],
    /// Runs on the thread that it is cloned from, which ends right after: to choose
    /// namespaces that only children can be born into (pid, time).
    pub before: &'a (dyn Fn() -> io::Result<()> + Sync),
    /// Runs when it exists, with its pid, before it has any rights in a new user
    /// namespace: to write the id maps.
    pub prepare: &'a dyn Fn(i32) -> io::Result<()>,
}

impl std::fmt::Debug for Birth<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Birth { flags, set_tid, .. } = self;
        f.debug_struct("Birth")
            .field("flags", flags)
            .field("set_tid", set_tid)
            .finish_non_exhaustive()
    }
}

impl Tracee {
    /// Makes the first husk. Returns it with its pidfd.
    ///
    /// # Errors
    /// As [`Tracee::bear`].
    pub fn spawn_husk(flags: u64, set_tid: &[i32]) -> Result<(Self, OwnedFd)> {
        Self::bear(&Birth { flags, set_tid, before: &|| Ok(()), prepare: &|_| Ok(()) })
    }

    /// Makes the first husk. Returns it with its pidfd.
    ///
    /// # Errors
    /// `EEXIST` in `Os` when a pid is taken; what `before` and `prepare` return.
    pub fn bear(birth: &Birth<'_>) -> Result<(Self, OwnedFd)> {
        let pid = birth.set_tid.first().copied().unwrap_or(0);
        let os = |what| move |source| Error::Os { pid, what, source };
        let image = program_file().map_err(os("memfd_create"))?;
        let gate = Gate::new().map_err(os("pipe"))?;
        let Birth { flags, set_tid, before, prepare } = birth;
        let (pid, pidfd) = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                before().map_err(os("entering namespaces"))?;
                spawn_gated(*flags, set_tid, &gate, image.as_fd()).map_err(os("clone3"))
            });
            let panicked = || Err(os("clone3")(io::ErrorKind::Other.into()));
            thread.join().unwrap_or_else(|_| panicked())
        })?;
        ptrace::seize(pid, OPTIONS).map_err(Error::os(pid, "PTRACE_SEIZE"))?;
        if let Err(source) = prepare(pid) {
            // It ends when the gate closes.
            drop(gate);
            while wait_for(pid).is_ok() {
                let _ = ptrace::cont(pid, 0);
            }
            return Err(Error::Os { pid, what: "preparing the root husk", source });
        }
        gate.open().map_err(Error::os(pid, "gate"))?;
        loop {
            match wait_for(pid)? {
                (_, libc::PTRACE_EVENT_EXEC) => break,
                (signal, 0) => ptrace::cont(pid, signal),
                _ => ptrace::cont(pid, 0),
            }
            .map_err(Error::os(pid, "PTRACE_CONT"))?;
        }
        let mut husk = Tracee::here(pid, pid, StopState::Interrupted)?;
        husk.be_husk()?;
        husk.stub = Some(Stub::at(HUSK_BASE));
        Ok((husk, pidfd))
    }

    /// Makes a child or thread of this husk with `clone3`. `set_tid` are its pids,
    /// innermost namespace first. The new task stops before it runs anything.
    ///
    /// # Errors
    /// Gone; `Remote`, with the answer to clone3(2): a pid that is taken, a limit of processes.
    pub fn spawn_child(&mut self, flags: u64, exit_signal: i32, set_tid: &[i32]) -> Result<Self> {
        let is_thread = flags & libc::CLONE_THREAD as u64 != 0;
        let exit_signal = u64::from(exit_signal.cast_unsigned());
        let deadline = Instant::now() + LEAVING;
        // Before the thread is there: its process may be killed while this one is waited for.
        if is_thread {
            self.leads_others = Some(true);
        }
        loop {
            let mut batch = self.batch();
            let pids: Vec<u8> = set_tid.iter().flat_map(|p| p.to_le_bytes()).collect();
            let tids = batch.bytes(&pids);
            let set = if set_tid.is_empty() { [0, 0] } else { [tids.0, set_tid.len() as u64] };
            let call =
                clone3(&mut batch, [flags, 0, 0, 0, exit_signal, 0, 0, 0, set[0], set[1], 0]);
            let outcome = batch.run()?;
            let taken = outcome.result(call).err().and_then(|e| e.raw_os_error());
            if taken != Some(libc::EEXIST) || Instant::now() > deadline {
                outcome.expect(call, || format!("clone3 for pid {set_tid:?}"))?;
                return self.meet_born(is_thread);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Takes hold of the task that the last batch has made, which stops before it runs
    /// anything, and uses the stub that it has from this one.
    pub(crate) fn meet_born(&mut self, is_thread: bool) -> Result<Self> {
        let Some(child) = self.take_born().pop() else {
            return Err(Error::Unusable {
                pid: self.tid,
                reason: "clone3 made no task".to_owned(),
            });
        };
        wait_for(child)?;
        let pid = if is_thread { self.pid } else { child };
        let mut tracee = Tracee::here(pid, child, StopState::Interrupted)?;
        tracee.be_husk()?;
        // Its threads, if it ever gets any, are made by it.
        tracee.leads_others = Some(false);
        tracee.stub = self.stub;
        Ok(tracee)
    }

    /// Moves the husk's stub to `base`, which must be free, and stops using the old
    /// one (which stays mapped).
    ///
    /// # Errors
    /// `EEXIST` in `Remote` if something is mapped there.
    pub fn move_stub(&mut self, base: u64) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let mmap = syscall::mmap_anonymous(base..base + STUB_SIZE, ProtFlags::all(), flags);
        self.call("mmap of the stub", mmap)?;
        self.write(RemoteAddr(base), stub::code())?;
        self.stub = Some(Stub::at(base));
        Ok(())
    }

    /// Room for arguments of [`Tracee::call_alone`].
    pub fn scratch(&self) -> RemoteAddr {
        self.stub.map_or(RemoteAddr(0), |stub| stub.data_at())
    }

    /// Makes one call in the husk with all signals blocked, the one included that
    /// ends a batch. That one would be lost if it were pending already.
    ///
    /// # Errors
    /// Gone; `Remote`, if the call is refused.
    pub fn call_alone(&mut self, what: &str, call: impl Into<Syscall>) -> Result<u64> {
        let regs = entering(&self.own, call.into(), self.stub()?.syscall_at());
        let result = self.step_syscall(&regs)?;
        self.put_back()?;
        self.answer(what, result)
    }

    /// Makes the kernel pass over its seccomp filters as long as it is traced.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`, or if the tracer has filters itself.
    pub fn suspend_seccomp(&mut self) -> Result<()> {
        ptrace::set_options(self.tid, OPTIONS | option::SUSPEND_SECCOMP)
            .map_err(Error::os(self.tid, "PTRACE_O_SUSPEND_SECCOMP"))
    }

    /// Has husks of different processes unmap their stubs as the last thing that they do: while one
    /// of them works the next ones are looked after. Other threads of such a process must not run
    /// through its stub any more. Set registers and [`Tracee::release`] next.
    ///
    /// # Errors
    /// Gone; `Remote`, if a stub cannot be unmapped.
    pub fn drop_stubs<'t>(husks: impl IntoIterator<Item = &'t mut Self>) -> Result<()> {
        let mut under_way = Vec::new();
        for husk in husks {
            let Some(stub) = husk.stub.take() else { continue };
            husk.start_syscall(&torpor_sys::ptrace::Registers {
                rax: libc::SYS_munmap.cast_unsigned(),
                rdi: stub.base,
                rsi: STUB_SIZE,
                rip: stub.syscall_at(),
                orig_rax: u64::MAX,
                ..husk.own.for_64bit()
            })?;
            under_way.push(husk);
        }
        for husk in &mut under_way {
            husk.wait_syscall()?;
            husk.to_next_syscall()?;
        }
        for husk in under_way {
            let result = husk.finish_syscall()?;
            husk.answer("munmap of the stub", result)?;
        }
        Ok(())
    }

    /// Has this thread end alone, with a wait status of an exit code, as soon as it is
    /// released: it stands before the system call already, and needs its stub no more.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn prepare_exit(&mut self, status: u32) -> Result<()> {
        let Some(stub) = self.stub.take() else { return Ok(()) };
        let tid = self.tid;
        let regs = torpor_sys::ptrace::Registers {
            rax: libc::SYS_exit.cast_unsigned(),
            rdi: u64::from(status >> 8 & 0xff),
            rip: stub.syscall_at(),
            orig_rax: u64::MAX,
            ..self.own.for_64bit()
        };
        ptrace::set_signal_mask(tid, u64::MAX).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        ptrace::set_registers(tid, &regs).map_err(Error::os(tid, "PTRACE_SETREGS"))?;
        loop {
            ptrace::cont_to_syscall(tid, 0).map_err(Error::os(tid, "PTRACE_SYSCALL"))?;
            match self.wait_stop()? {
                (signal, 0) if signal == libc::SIGTRAP | 0x80 => return Ok(()),
                (signal, 0) => self.held.push(signal),
                _ => {}
            }
        }
    }

    /// Gives the husk the registers, extended state and signal mask of the task
    /// that it becomes. It stays stopped.
    ///
    /// # Errors
    /// `EINVAL` or `EIO` for states that this CPU refuses.
    pub fn become_task(
        &mut self,
        regs: &torpor_sys::ptrace::Registers,
        xstate: &[u8],
        mask: u64,
    ) -> Result<()> {
        let tid = self.tid;
        ptrace::set_registers(tid, regs).map_err(Error::os(tid, "PTRACE_SETREGS"))?;
        ptrace::set_xstate(tid, xstate).map_err(Error::os(tid, "NT_X86_XSTATE"))?;
        ptrace::set_signal_mask(tid, mask).map_err(Error::os(tid, "PTRACE_SETSIGMASK"))?;
        (self.own, self.own_mask, self.bare) = (*regs, mask, false);
        self.xstate = None;
        Ok(())
    }

    /// Lets the restored task run on its own from now on.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn release(mut self) -> Result<()> {
        self.held_back = false;
        ptrace::detach(self.tid, 0).map_err(Error::os(self.tid, "PTRACE_DETACH"))
    }
}

/// Adds a call of clone3(2) with the words of a `struct clone_args`, in the order of
/// `torpor_sys::process::CloneArgs`.
pub(crate) fn clone3(batch: &mut Batch<'_>, args: [u64; 11]) -> Call {
    let bytes: Vec<u8> = args.iter().flat_map(|word| word.to_le_bytes()).collect();
    let place = batch.bytes(&bytes);
    batch.call((libc::SYS_clone3, [place.0, bytes.len() as u64]))
}

fn program_file() -> std::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("husk", rustix::fs::MemfdFlags::CLOEXEC)?;
    let image = program();
    let mut rest = image.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(&file, rest)?;
        rest = &rest[n..];
    }
    Ok(file)
}
