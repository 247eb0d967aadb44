//! Calls that the kernel has restarted before, after a stop: they go on as restart_syscall(2), and the kernel does not tell
//! any more which they were.

use std::os::unix::fs::FileExt;

use torpor_sys::ptrace::Registers;

use crate::frame::ERESTART_RESTARTBLOCK;
use crate::lone::memory;

/// The calls that are restarted so, because only the kernel knows until when they wait.
const CALLS: [i64; 4] =
    [libc::SYS_poll, libc::SYS_nanosleep, libc::SYS_futex, libc::SYS_clock_nanosleep];
/// How many bytes in front of a call its number is looked for.
const BEFORE: usize = 32;
/// `syscall`
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov $NUMBER, %eax`, and what in front of it makes it another register (REX.B).
const MOV_EAX: u8 = 0xb8;
const OTHER_REGISTER: u8 = 0x41;

/// The registers of a thread with the number of the call that it is in, if it is one that was restarted before. Its other
/// registers are still those of that call, so that it can be made again.
///
/// The number is found in the code, where the instruction in front of the call moves it to its register, as libraries
/// and runtimes have it. Where it is not, the registers are left as they are.
pub(crate) fn with_number(tid: i32, own: Registers) -> Registers {
    let is_restarted = own.orig_rax == libc::SYS_restart_syscall.cast_unsigned()
        && own.rax.cast_signed() == -ERESTART_RESTARTBLOCK;
    if !is_restarted || own.is_32bit() {
        return own;
    }
    let mut code = [0; BEFORE + SYSCALL.len()];
    let at = own.rip.wrapping_sub(code.len() as u64);
    let read = memory(tid).and_then(|memory| memory.read_exact_at(&mut code, at));
    match read.ok().and_then(|()| number(&code)) {
        Some(number) => Registers { orig_rax: number, ..own },
        None => own,
    }
}

/// The number of the call that code ends with.
fn number(code: &[u8]) -> Option<u64> {
    let before = code.strip_suffix(&SYSCALL)?;
    let moved = before.windows(6).rev().find_map(|bytes| match bytes {
        [prefix, MOV_EAX, number @ ..] if *prefix != OTHER_REGISTER => {
            Some(i64::from(u32::from_le_bytes(number.try_into().ok()?)))
        }
        _ => None,
    })?;
    CALLS.contains(&moved).then(|| moved.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_call_stands_in_front_of_it() {
        let code = |bytes: &[u8]| number(&[&[0x90; 20], bytes].concat());
        // mov $0xe6, %eax; syscall
        assert_eq!(code(&[0xb8, 0xe6, 0, 0, 0, 0x0f, 0x05]), Some(230));
        // mov $7, %eax; mov %rbx, %rdi; syscall
        assert_eq!(code(&[0xb8, 7, 0, 0, 0, 0x48, 0x89, 0xdf, 0x0f, 0x05]), Some(7));
        // mov $7, %r8d; syscall; mov $1, %eax (write), which is no call that is restarted; no call at all.
        assert_eq!(code(&[0x41, 0xb8, 7, 0, 0, 0, 0x0f, 0x05]), None);
        assert_eq!(code(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05]), None);
        assert_eq!(code(&[0xb8, 7, 0, 0, 0, 0x0f, 0x0b]), None);
    }
}
