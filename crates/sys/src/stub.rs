//! The machine code that runs an array of system calls inside a task.
//!
//! On entry `r12` points to the first [`Record`] and `r13` is their number; `rsp`
//! points to an `rt_sigframe` (without its return address) that holds the
//! registers to go back to. The code executes the records in order and then sends
//! [`DONE`] to its own thread, at which a tracer sees it stop. Without a tracer
//! that signal has no effect and `rt_sigreturn` takes the task back to where it was.

use core::arch::global_asm;

/// The signal that ends a batch: of those that do nothing by default it is the one
/// whose spurious arrival programs expect (Go's runtime uses it so), while a
/// spurious `SIGWINCH` would end nginx' workers.
pub const DONE: i32 = libc::SIGURG;

/// A system call to make; laid out as the code below reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    /// System call number.
    pub number: u64,
    /// Its arguments.
    pub args: [u64; 6],
    /// Its result, filled in by the code.
    pub result: u64,
    /// Address to which the result is stored too, 0 for none: an argument of a
    /// later record.
    pub forward: u64,
    /// [`Record::STOP_ON_ERROR`] and [`Record::OF_32BIT`], or 0.
    pub flags: u64,
}

impl Record {
    /// End the batch if the call fails.
    pub const STOP_ON_ERROR: u64 = 1;
    /// It is a call of 32-bit programs: its number is one of theirs, and of its arguments the
    /// kernel takes 32 bits.
    pub const OF_32BIT: u64 = 2;
    /// The result of a call that was not made.
    pub const NOT_RUN: u64 = u64::MAX << 32;
}

global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    // Global, or code that is inlined into another unit of code could not refer to them.
    ".globl torpor_stub_start",
    ".hidden torpor_stub_start",
    ".globl torpor_stub_end",
    ".hidden torpor_stub_end",
    "torpor_stub_start:",
    "2:",
    "test r13, r13",
    "jz 5f",
    "mov rax, [r12]",
    "mov rdi, [r12 + 8]",
    "mov rsi, [r12 + 16]",
    "mov rdx, [r12 + 24]",
    "mov r10, [r12 + 32]",
    "mov r8, [r12 + 40]",
    "mov r9, [r12 + 48]",
    "test dword ptr [r12 + 72], 2",
    "jnz 6f",
    "syscall",
    "7:",
    "mov [r12 + 56], rax",
    "mov rcx, [r12 + 64]",
    "test rcx, rcx",
    "jz 3f",
    "mov [rcx], rax",
    "3:",
    "test dword ptr [r12 + 72], 1",
    "jz 4f",
    "cmp rax, -4095",
    "jae 5f",
    "4:",
    "add r12, 80",
    "dec r13",
    "jmp 2b",
    "6:",
    "mov rbx, rdi",
    "mov rcx, rsi",
    "mov rsi, r10",
    "mov rdi, r8",
    "mov rbp, r9",
    "int 0x80",
    "jmp 7b",
    "5:",
    "mov eax, {getpid}",
    "syscall",
    "mov r12, rax",
    "mov eax, {gettid}",
    "syscall",
    "mov rdi, r12",
    "mov rsi, rax",
    "mov edx, {done}",
    "mov eax, {tgkill}",
    "syscall",
    "mov eax, {sigreturn}",
    "syscall",
    "torpor_stub_end:",
    ".popsection",
    getpid = const libc::SYS_getpid,
    gettid = const libc::SYS_gettid,
    tgkill = const libc::SYS_tgkill,
    sigreturn = const libc::SYS_rt_sigreturn,
    done = const DONE,
);

unsafe extern "C" {
    static torpor_stub_start: u8;
    static torpor_stub_end: u8;
}

/// The code, position-independent.
pub fn code() -> &'static [u8] {
    // SAFETY: both symbols are defined above, around one run of constant bytes in
    // .rodata, which lives as long as the program.
    unsafe {
        let start = &raw const torpor_stub_start;
        let end = &raw const torpor_stub_end;
        std::slice::from_raw_parts(start, end.offset_from_unsigned(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_layout_is_what_the_code_reads() {
        assert_eq!(size_of::<Record>(), 80);
        assert_eq!(std::mem::offset_of!(Record, result), 56);
        assert_eq!(std::mem::offset_of!(Record, forward), 64);
        assert_eq!(std::mem::offset_of!(Record, flags), 72);
        assert!(code().len() < 256);
        assert_eq!(&code()[code().len() - 2..], [0x0f, 0x05]);
    }
}
