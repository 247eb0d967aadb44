//! The signal frame that takes a task back to its own registers.

pub(crate) mod ia32;

use torpor_sys::ptrace::Registers;
use torpor_sys::xsave;

/// Room for a frame: `ucontext` and the extended state of any CPU of today
/// (11 KiB with AMX).
pub(crate) const FRAME_SIZE: usize = 16384;
/// Where a frame has the id of its thread: `uc_link`, which the kernel does not look at.
const OWNER_AT: usize = 8;
/// Where the signal mask is in a frame.
const MASK_AT: usize = 296;
/// Size of the part of a frame that [`mask_of`] looks at.
pub(crate) const HEAD: usize = MASK_AT + 8;
/// Where the extended state starts in a frame; XSAVE wants 64-byte alignment.
const XSTATE_OFFSET: usize = 512;
/// `struct ucontext` of x86-64 up to and including the signal mask (asm/ucontext.h).
const UCONTEXT_SIZE: usize = 304;

// linux/errno.h, include/linux/errno.h: never seen by programs, only by tracers.
const ERESTARTSYS: i64 = 512;
const ERESTARTNOINTR: i64 = 513;
const ERESTARTNOHAND: i64 = 514;
pub(crate) const ERESTART_RESTARTBLOCK: i64 = 516;
/// The number of restart_syscall(2), and that of 32-bit programs (asm/unistd_32.h).
const RESTART_SYSCALL: [u64; 2] = [libc::SYS_restart_syscall.cast_unsigned(), 0];

/// The registers with which an interrupted task goes on by itself: an interrupted
/// system call is wound back as the kernel would do on the way out.
///
/// One that sleeps until a point in time that only the kernel remembers
/// (`restart_block`: poll, futex, nanosleep) begins anew, too, with the time that it was
/// called with. That may take longer, as any of these may; `EINTR` would tell the program
/// of a signal that never was, and some end themselves then. Only where the kernel has
/// restarted the call before, and its number could not be found
/// ([`with_number`](crate::restart::with_number)), is `EINTR` all that remains.
pub(crate) fn restarted(regs: &Registers) -> Registers {
    let mut out = *regs;
    let restart = RESTART_SYSCALL[usize::from(regs.is_32bit())];
    if regs.orig_rax.cast_signed() >= 0 {
        match -regs.rax.cast_signed() {
            ERESTART_RESTARTBLOCK if regs.orig_rax == restart => {
                out.rax = (-i64::from(libc::EINTR)).cast_unsigned();
            }
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK => {
                out.rax = regs.orig_rax;
                out.rip = regs.rip.wrapping_sub(2);
            }
            _ => {}
        }
    }
    out.orig_rax = u64::MAX;
    out
}

/// Builds the frame of thread `tid` to be placed at `address` (64-byte aligned). `rt_sigreturn`
/// with `rsp == address` goes on with `regs`, `xstate` and `mask`.
pub(crate) fn build(address: u64, tid: i32, regs: &Registers, xstate: &[u8], mask: u64) -> Vec<u8> {
    let r = restarted(regs);
    let mut out = vec![0u8; UCONTEXT_SIZE];
    let mut put = |offset: usize, value: u64| {
        out[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    };
    // UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
    put(0, 7);
    put(OWNER_AT, u64::from(tid.cast_unsigned()));
    // uc_stack: flags that sigaltstack(2) refuses, so that the task keeps its own.
    put(24, 0xffff_ffff);
    let general = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx,
        r.rax, r.rcx, r.rsp, r.rip, r.eflags,
    ];
    for (i, value) in general.into_iter().enumerate() {
        put(40 + 8 * i, value);
    }
    put(40 + 144, (r.cs & 0xffff) | (r.gs & 0xffff) << 16 | (r.fs & 0xffff) << 32 | r.ss << 48);
    put(40 + 184, address + XSTATE_OFFSET as u64);
    put(MASK_AT, mask);
    out.resize(XSTATE_OFFSET, 0);
    out.extend(fpstate(xstate));
    out
}

/// The signal mask in the head of a frame, if it is one of thread `tid`.
pub(crate) fn mask_of(head: &[u8; HEAD], tid: i32) -> Option<u64> {
    let word = |at: usize| head[at..at + 8].iter().rev().fold(0, |w, &b| w << 8 | u64::from(b));
    (word(OWNER_AT) == u64::from(tid.cast_unsigned())).then(|| word(MASK_AT))
}

/// The extended state as a signal frame holds it: the XSAVE image with the
/// software bytes (asm/sigcontext.h, `struct _fpx_sw_bytes`) and a trailing magic.
fn fpstate(xstate: &[u8]) -> Vec<u8> {
    const MAGIC1: u32 = 0x4650_5853;
    const MAGIC2: u32 = 0x4650_5845;
    const SW_BYTES: usize = 464;
    // No component behind those in use: the kernel takes only legacy state from a frame
    // that is larger than the task's own state can be, without what it never asked for (AMX).
    let xstate = &xstate[..xsave::len_in_use(xstate)];
    let mut out = xstate.to_vec();
    if out.len() < xsave::LEGACY + xsave::HEADER {
        return out;
    }
    // ptrace stores the features that the image may have where the frame has its magic.
    let mut features = [0u8; 8];
    features.copy_from_slice(&xstate[SW_BYTES..SW_BYTES + 8]);
    let size = u32::try_from(xstate.len()).unwrap_or(0);
    out[SW_BYTES..SW_BYTES + 4].copy_from_slice(&MAGIC1.to_le_bytes());
    out[SW_BYTES + 4..SW_BYTES + 8].copy_from_slice(&(size + 4).to_le_bytes());
    out[SW_BYTES + 8..SW_BYTES + 16].copy_from_slice(&features);
    out[SW_BYTES + 16..SW_BYTES + 20].copy_from_slice(&size.to_le_bytes());
    out.extend(MAGIC2.to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_no_more_state_than_is_in_use() {
        let mut state = vec![0u8; 11008];
        state[xsave::LEGACY] = 0b11;
        let frame = fpstate(&state);
        let len = xsave::LEGACY + xsave::HEADER;
        // The magic number behind it is where the software bytes say.
        assert_eq!(frame.len(), len + 4);
        assert_eq!(frame[480..484], u32::try_from(len).unwrap_or(0).to_le_bytes());
        assert_eq!(frame[468..472], u32::try_from(len + 4).unwrap_or(0).to_le_bytes());
    }

    #[test]
    fn interrupted_calls_are_wound_back() {
        let after = |call: i64, result: i64| {
            let regs = Registers {
                orig_rax: call.cast_unsigned(),
                rax: (-result).cast_unsigned(),
                rip: 0x1002,
                ..Registers::default()
            };
            let out = restarted(&regs);
            (out.rip, out.rax.cast_signed())
        };
        for result in [ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK] {
            assert_eq!(after(libc::SYS_poll, result), (0x1000, libc::SYS_poll));
        }
        let eintr = -i64::from(libc::EINTR);
        assert_eq!(after(libc::SYS_restart_syscall, ERESTART_RESTARTBLOCK), (0x1002, eintr));
        assert_eq!(after(libc::SYS_poll, -1), (0x1002, 1));
        assert_eq!(after(-1, ERESTARTSYS), (0x1002, -ERESTARTSYS));
        // In 32-bit code the number 0 is restart_syscall(2), and 219 is another call.
        for (number, rax) in [(0, eintr), (libc::SYS_restart_syscall, libc::SYS_restart_syscall)] {
            let regs = Registers {
                orig_rax: number.cast_unsigned(),
                rax: (-ERESTART_RESTARTBLOCK).cast_unsigned(),
                cs: 0x23,
                ..Registers::default()
            };
            assert_eq!(restarted(&regs).rax.cast_signed(), rax);
        }
    }
}
