//! ptrace(2): stopping tasks and looking inside.
//!
//! All calls must come from the thread that seized the task.

use std::io;

use crate::{Result, addr, check};

/// Group stops, `PTRACE_INTERRUPT`, and new children.
pub const EVENT_STOP: i32 = libc::PTRACE_EVENT_STOP;
/// Options of [`seize`].
pub mod option {
    /// System call stops show as `SIGTRAP | 0x80`.
    pub const TRACESYSGOOD: u64 = libc::PTRACE_O_TRACESYSGOOD as u64;
    /// Trace children of `fork`.
    pub const TRACEFORK: u64 = libc::PTRACE_O_TRACEFORK as u64;
    /// Trace children of `vfork`.
    pub const TRACEVFORK: u64 = libc::PTRACE_O_TRACEVFORK as u64;
    /// Trace children of `clone`.
    pub const TRACECLONE: u64 = libc::PTRACE_O_TRACECLONE as u64;
    /// Stop after `execve`.
    pub const TRACEEXEC: u64 = libc::PTRACE_O_TRACEEXEC as u64;
    /// Kill the task when its tracer ends.
    pub const EXITKILL: u64 = libc::PTRACE_O_EXITKILL as u64;
    /// Suspend its seccomp filters.
    pub const SUSPEND_SECCOMP: u64 = libc::PTRACE_O_SUSPEND_SECCOMP as u64;
}

/// `struct user_regs_struct` of x86-64 (sys/user.h).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

/// Code segments of programs, with their privilege level: `__USER_CS` and `__USER32_CS` of
/// asm/segment.h.
const USER_CS: u64 = 0x33;
const USER32_CS: u64 = 0x23;

impl Registers {
    /// Whether the next instruction is taken for 32-bit code.
    #[must_use]
    pub fn is_32bit(&self) -> bool {
        self.cs == USER32_CS
    }

    /// Whether the code segment is one that the kernel gives to programs.
    #[must_use]
    pub fn has_usual_code(&self) -> bool {
        [USER_CS, USER32_CS].contains(&self.cs)
    }

    /// The same for 64-bit code.
    #[must_use]
    pub fn for_64bit(self) -> Self {
        Registers { cs: USER_CS, ..self }
    }
}

/// A `siginfo_t` as bytes.
pub type SigInfo = [u8; 128];

fn request(request: libc::c_uint, tid: i32, address: u64, data: u64) -> Result<i64> {
    // SAFETY: reached only through the functions below, each of which passes what
    // its request asks for: numbers, or pointers to live objects of the right size.
    let ret = unsafe { libc::ptrace(request, tid, address, data) };
    check(ret)
}

/// Attaches without stopping (`PTRACE_SEIZE`).
///
/// # Errors
/// `EPERM` if the task is traced already or off limits, `ESRCH` if it is gone.
pub fn seize(tid: i32, options: u64) -> Result<()> {
    request(libc::PTRACE_SEIZE, tid, 0, options).map(drop)
}

/// Changes the options of a stopped tracee.
///
/// # Errors
/// `ESRCH` if it is gone or runs.
pub fn set_options(tid: i32, options: u64) -> Result<()> {
    request(libc::PTRACE_SETOPTIONS, tid, 0, options).map(drop)
}

/// Asks a seized task to stop (`PTRACE_INTERRUPT`).
///
/// # Errors
/// `ESRCH` if it is gone.
pub fn interrupt(tid: i32) -> Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0).map(drop)
}

/// Lets a stopped tracee run, delivering `signal` unless 0.
///
/// # Errors
/// `ESRCH` if it is gone.
pub fn cont(tid: i32, signal: i32) -> Result<()> {
    request(libc::PTRACE_CONT, tid, 0, u64::from(signal.cast_unsigned())).map(drop)
}

/// Lets it run to the next entry or exit of a system call.
///
/// # Errors
/// `ESRCH` if it is gone.
pub fn cont_to_syscall(tid: i32, signal: i32) -> Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, u64::from(signal.cast_unsigned())).map(drop)
}

/// Keeps a group-stopped tracee stopped but waitable (`PTRACE_LISTEN`).
///
/// # Errors
/// `EIO` if it is not in a group stop.
pub fn listen(tid: i32) -> Result<()> {
    request(libc::PTRACE_LISTEN, tid, 0, 0).map(drop)
}

/// Lets go of a stopped tracee.
///
/// # Errors
/// `ESRCH` if it is gone.
pub fn detach(tid: i32, signal: i32) -> Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, u64::from(signal.cast_unsigned())).map(drop)
}

/// General registers.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn registers(tid: i32) -> Result<Registers> {
    let mut regs = Registers::default();
    request(libc::PTRACE_GETREGS, tid, 0, addr(&raw mut regs))?;
    Ok(regs)
}

/// Sets the general registers.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs; `EIO` for values that the CPU refuses.
pub fn set_registers(tid: i32, regs: &Registers) -> Result<()> {
    request(libc::PTRACE_SETREGS, tid, 0, addr(std::ptr::from_ref(regs))).map(drop)
}

/// `NT_X86_XSTATE` of linux/elf.h.
const NT_X86_XSTATE: u64 = 0x202;

/// The extended state (x87, SSE, AVX …) in the layout of XSAVE, standard format.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn xstate(tid: i32) -> Result<Vec<u8>> {
    // 11 KiB with AMX today; the kernel says how much it filled.
    let mut buf = vec![0u8; 16384];
    let mut iov = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    request(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, addr(&raw mut iov))?;
    buf.truncate(iov.iov_len);
    Ok(buf)
}

/// Sets the extended state.
///
/// # Errors
/// `EINVAL` for features that this CPU lacks.
pub fn set_xstate(tid: i32, state: &[u8]) -> Result<()> {
    let mut iov = libc::iovec { iov_base: state.as_ptr().cast_mut().cast(), iov_len: state.len() };
    request(libc::PTRACE_SETREGSET, tid, NT_X86_XSTATE, addr(&raw mut iov)).map(drop)
}

/// Whether the tracee may use ports of devices (ioperm(2)).
#[must_use]
pub fn has_ports(tid: i32) -> bool {
    /// `NT_386_IOPERM` of linux/elf.h: a bitmap of all ports, if there is one.
    const PORTS: u64 = 0x201;
    let mut map = [0u8; 8192];
    let mut iov = libc::iovec { iov_base: map.as_mut_ptr().cast(), iov_len: map.len() };
    request(libc::PTRACE_GETREGSET, tid, PORTS, addr(&raw mut iov)).is_ok() && iov.iov_len > 0
}

/// Whether system calls of the tracee come back to it (`PR_SET_SYSCALL_USER_DISPATCH`). Kernels
/// before 6.4 do not tell.
#[must_use]
pub fn has_dispatch(tid: i32) -> bool {
    /// What it fills is the mode and three addresses.
    const GET: libc::c_uint = libc::PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG;
    let mut config = [0u64; 4];
    let size = size_of_val(&config) as u64;
    request(GET, tid, size, addr(config.as_mut_ptr())).is_ok() && config[0] != 0
}

/// The siginfo of the signal that stopped the tracee.
///
/// # Errors
/// `EINVAL` in a group stop.
pub fn siginfo(tid: i32) -> Result<SigInfo> {
    let mut info = [0u8; 128];
    request(libc::PTRACE_GETSIGINFO, tid, 0, addr(info.as_mut_ptr()))?;
    Ok(info)
}

/// The message of the last event: the new pid after a clone.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn event_message(tid: i32) -> Result<u64> {
    let mut message = 0u64;
    request(libc::PTRACE_GETEVENTMSG, tid, 0, addr(&raw mut message))?;
    Ok(message)
}

/// The blocked signals.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn signal_mask(tid: i32) -> Result<u64> {
    let mut mask = 0u64;
    request(libc::PTRACE_GETSIGMASK, tid, 8, addr(&raw mut mask))?;
    Ok(mask)
}

/// Sets the blocked signals.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn set_signal_mask(tid: i32, mask: u64) -> Result<()> {
    request(libc::PTRACE_SETSIGMASK, tid, 8, addr(&raw const mask)).map(drop)
}

/// Pending signals with their payload, without taking them: those of the thread,
/// or those of the process (`shared`), in the order of the queue.
///
/// # Errors
/// `ESRCH` if the tracee is gone or runs.
pub fn pending_signals(tid: i32, shared: bool) -> Result<Vec<SigInfo>> {
    #[repr(C)]
    struct Args {
        off: u64,
        flags: u32,
        nr: i32,
    }
    const CHUNK: usize = 32;
    let mut all = Vec::new();
    loop {
        let args = Args { off: all.len() as u64, flags: u32::from(shared), nr: 32 };
        let mut chunk = [[0u8; 128]; CHUNK];
        let n = request(
            libc::PTRACE_PEEKSIGINFO,
            tid,
            addr(&raw const args),
            addr(chunk.as_mut_ptr()),
        )?;
        let n = usize::try_from(n).map_err(|_| io::ErrorKind::InvalidData)?;
        all.extend_from_slice(&chunk[..n.min(CHUNK)]);
        if n < CHUNK {
            return Ok(all);
        }
    }
}

/// What a thread registered with rseq(2).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RseqConfig {
    /// Address of its `struct rseq`, 0 for none.
    pub address: u64,
    /// Size given at registration.
    pub size: u32,
    /// Signature before abort handlers.
    pub signature: u32,
    /// 0.
    pub flags: u32,
    /// Padding.
    pub pad: u32,
}

/// `PTRACE_GET_RSEQ_CONFIGURATION` (Linux 5.13).
///
/// # Errors
/// `EIO` on kernels without rseq.
pub fn rseq(tid: i32) -> Result<RseqConfig> {
    let mut config = RseqConfig::default();
    let size = size_of::<RseqConfig>() as u64;
    request(0x420f, tid, size, addr(&raw mut config))?;
    Ok(config)
}

/// A segment descriptor of a thread for 32-bit code: `struct user_desc` (asm/ldt.h).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// Its number in the global descriptor table.
    pub entry_number: u32,
    /// Where the segment starts.
    pub base_addr: u32,
    /// Its last byte or page.
    pub limit: u32,
    /// Bit fields: 0 32 bits, 1 and 2 contents, 3 read and execute only, 4 limit in pages,
    /// 5 not present, 6 usable.
    pub flags: u32,
}

/// `PTRACE_GET_THREAD_AREA`: the segment with this number of a thread.
///
/// # Errors
/// `EINVAL` if there is no such number, `EIO` on kernels without 32-bit code.
pub fn thread_area(tid: i32, number: u32) -> Result<SegmentDescriptor> {
    let mut segment = SegmentDescriptor::default();
    request(25, tid, u64::from(number), addr(&raw mut segment))?;
    Ok(segment)
}

/// `PTRACE_SET_THREAD_AREA`: gives a thread a segment, under the number that is in it.
///
/// # Errors
/// `EINVAL` for a segment that the kernel gives to nobody, `EIO` on kernels without 32-bit code.
pub fn set_thread_area(tid: i32, segment: &SegmentDescriptor) -> Result<()> {
    let number = u64::from(segment.entry_number);
    request(26, tid, number, addr(std::ptr::from_ref(segment))).map(drop)
}

/// Reads filter `index` (0 is the oldest) of a thread's seccomp filters as raw
/// `struct sock_filter`s, 8 bytes each. `None` behind the last one.
///
/// # Errors
/// `EACCES` without `CAP_SYS_ADMIN`, `EINVAL` if no filter is in use.
pub fn seccomp_filter(tid: i32, index: u64) -> Result<Option<Vec<u8>>> {
    /// `PTRACE_SECCOMP_GET_FILTER` of linux/ptrace.h.
    const GET_FILTER: libc::c_uint = 0x420c;
    let n = match request(GET_FILTER, tid, index, 0) {
        Ok(n) => usize::try_from(n).map_err(|_| io::ErrorKind::InvalidData)?,
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut filter = vec![0u8; n * 8];
    request(GET_FILTER, tid, index, addr(filter.as_mut_ptr()))?;
    Ok(Some(filter))
}

/// The `SECCOMP_FILTER_FLAG_*` of filter `index` (`PTRACE_SECCOMP_GET_METADATA`).
///
/// # Errors
/// As [`seccomp_filter`].
pub fn seccomp_filter_flags(tid: i32, index: u64) -> Result<u64> {
    let mut data = [index, 0u64];
    request(0x420d, tid, 16, addr(data.as_mut_ptr()))?;
    Ok(data[1])
}
