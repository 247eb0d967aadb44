//! The signal frame of a 32-bit program, which takes it back to its own registers by the `rt_sigreturn` of
//! 32-bit programs.

use torpor_sys::ptrace::Registers;
use torpor_sys::xsave;

use super::{fpstate, restarted};

/// Where `struct ucontext_ia32` is in a frame (asm/sigframe.h), behind what a handler is called with.
const UCONTEXT_AT: usize = 144;
/// Where it has the flags of the alternate stack.
const STACK_FLAGS_AT: usize = UCONTEXT_AT + 12;
/// Where it has the registers (asm/sigcontext.h, `struct sigcontext_32`).
const REGISTERS_AT: usize = UCONTEXT_AT + 20;
/// Where it has the signal mask.
const MASK_AT: usize = UCONTEXT_AT + 108;
/// Where the extended state starts in a frame.
const FPSTATE_AT: usize = 272;
/// Size of the state of the x87 as FSAVE lays it out (`struct fregs_state`).
const FSAVE: usize = 112;

/// Builds the frame to be placed at `address`. It begins with `restorer`, which a `ret` goes to whose stack
/// pointer is `address`; the `rt_sigreturn` there goes on with `regs`, `xstate` and `mask`.
pub(crate) fn build(
    address: u64,
    restorer: u64,
    regs: &Registers,
    xstate: &[u8],
    mask: u64,
) -> Vec<u8> {
    let r = restarted(regs);
    let mut out = vec![0u8; FPSTATE_AT];
    let mut put =
        |at: usize, value: u64| out[at..at + 4].copy_from_slice(&value.to_le_bytes()[..4]);
    put(0, restorer);
    // UC_FP_XSTATE
    put(UCONTEXT_AT, 1);
    // Flags that sigaltstack(2) refuses, so that the task keeps its own.
    put(STACK_FLAGS_AT, 0xffff_ffff);
    let fpstate_at = address + FPSTATE_AT as u64;
    let words = [
        r.gs, r.fs, r.es, r.ds, r.rdi, r.rsi, r.rbp, r.rsp, r.rbx, r.rdx, r.rcx, r.rax, 0, 0,
        r.rip, r.cs, r.eflags, r.rsp, r.ss, fpstate_at,
    ];
    for (i, value) in words.into_iter().enumerate() {
        put(REGISTERS_AT + 4 * i, value);
    }
    put(MASK_AT, mask);
    put(MASK_AT + 4, mask >> 32);
    out.extend(fsave(xstate));
    out.extend(fpstate(xstate));
    out
}

/// The state of the x87 in an XSAVE image, as FSAVE lays it out: the kernel takes it from here, and from what follows
/// all the rest.
fn fsave(xstate: &[u8]) -> [u8; FSAVE] {
    let mut out = [0; FSAVE];
    let Some(fxsave) = xstate.get(..xsave::LEGACY) else { return out };
    // Two bits for each register instead of one: zeros if it is in use, ones if it is empty.
    let empty = (0..8).filter(|number| fxsave[4] >> number & 1 == 0);
    let tags = empty.fold(0u16, |tags, number| tags | 3 << (2 * number));
    let half = |at: usize| [fxsave[at], fxsave[at + 1]];
    // Control, status, tags; the operation stands in the upper half of a selector; `status` once more.
    for (at, value) in [(0, half(0)), (4, half(2)), (8, tags.to_le_bytes()), (18, half(6))] {
        out[at..at + 2].copy_from_slice(&value);
    }
    out[108..110].copy_from_slice(&half(2));
    // Where the last instruction was, and its operand.
    out[12..16].copy_from_slice(&fxsave[8..12]);
    out[20..24].copy_from_slice(&fxsave[16..20]);
    for (to, from) in out[28..108].chunks_exact_mut(10).zip(fxsave[32..160].chunks_exact(16)) {
        to.copy_from_slice(&from[..10]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_of_the_x87_is_laid_out_anew() {
        let mut state = vec![0u8; xsave::LEGACY + xsave::HEADER];
        state[..8].copy_from_slice(&[0x7f, 0x03, 0x00, 0x38, 0b1000_0001, 0, 0xd8, 0x07]);
        state[32..42].fill(7);
        state[32 + 7 * 16..][..10].fill(9);
        let out = fsave(&state);
        assert_eq!(out[..12], [0x7f, 3, 0, 0, 0, 0x38, 0, 0, 0b1111_1100, 0b0011_1111, 0, 0]);
        assert_eq!(out[16..20], [0, 0, 0xd8, 7]);
        assert_eq!(out[28..38], [7; 10]);
        assert_eq!(out[38..98], [0; 60]);
        assert_eq!(out[98..108], [9; 10]);
    }
}
