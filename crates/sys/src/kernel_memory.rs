//! The memory of the running kernel, read by a BPF program of a few instructions.
//!
//! Some state has no call that tells it. Whoever may trace the kernel may read it where it is. The
//! kernel looks at each address before it reads there: a wrong one is an error and does no harm.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::{Result, addr, syscall};

/// Operations of bpf(2), a type of programs, and the flag of those that may sleep (linux/bpf.h).
const PROG_LOAD: u64 = 5;
const PROG_RUN: u64 = 10;
const TYPE_SYSCALL: u32 = 31;
const SLEEPABLE: u32 = 1 << 4;
/// Functions that programs call.
const GET_CURRENT_TASK: i32 = 35;
const PROBE_READ_KERNEL: i32 = 113;
/// Whose function reads memory must name a license that the kernel takes.
const LICENSE: &std::ffi::CStr = c"Dual MIT/GPL";

/// One instruction (`struct bpf_insn`): code, registers, offset, and value.
const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = (to as u64) | (from as u64) << 4;
    let offset = offset.cast_unsigned() as u64;
    code as u64 | registers << 8 | offset << 16 | (value.cast_unsigned() as u64) << 32
}

/// Codes of instructions (linux/bpf.h): copies of a value and of a register, a sum, 64 bits from and to
/// memory, a call, and the end.
const SET: u8 = 0xb7;
const COPY: u8 = 0xbf;
const ADD: u8 = 0x07;
const LOAD: u8 = 0x79;
const STORE: u8 = 0x7b;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// How many instructions there are.
const LENGTH: u32 = 13;
/// Reads the word at [`Question::address`], and says who asks.
const PROGRAM: [u64; LENGTH as usize] = [
    instruction(COPY, 6, 1, 0, 0),
    instruction(CALL, 0, 0, 0, GET_CURRENT_TASK),
    instruction(STORE, 6, 0, 24, 0),
    instruction(LOAD, 3, 6, 0, 0),
    instruction(SET, 2, 0, 0, 8),
    instruction(COPY, 1, 10, 0, 0),
    instruction(ADD, 1, 0, 0, -8),
    instruction(CALL, 0, 0, 0, PROBE_READ_KERNEL),
    instruction(STORE, 6, 0, 16, 0),
    instruction(LOAD, 1, 10, -8, 0),
    instruction(STORE, 6, 1, 8, 0),
    instruction(SET, 0, 0, 0, 0),
    instruction(EXIT, 0, 0, 0, 0),
];

/// What the program is asked, and what it answers.
#[derive(Debug, Default)]
#[repr(C)]
struct Question {
    address: u64,
    word: u64,
    /// Not 0 if the word could not be read.
    error: i64,
    /// The `struct task_struct` of the thread that asks.
    task: u64,
}

/// Its size.
const SIZE: u32 = 32;
const _: () = assert!(size_of::<Question>() == SIZE as usize);

/// The part of `union bpf_attr` that loads a program.
#[derive(Debug, Default)]
#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    program: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
}

/// The part of `union bpf_attr` that runs one.
#[derive(Debug, Default)]
#[repr(C)]
struct Run {
    program: u32,
    returned: u32,
    data_sizes: [u32; 2],
    data: [u64; 2],
    repeat: u32,
    duration: u32,
    context_sizes: [u32; 2],
    contexts: [u64; 2],
    flags: u32,
    processor: u32,
}

/// The memory of the kernel.
#[derive(Debug)]
pub struct KernelMemory(OwnedFd);

impl KernelMemory {
    /// Loads the program that reads it.
    ///
    /// # Errors
    /// `EPERM` without `CAP_BPF` and `CAP_PERFMON` in the host's user namespace; `EINVAL` or `ENOSYS` if
    /// this kernel has no such programs (before Linux 5.14), or is locked down.
    pub fn open() -> Result<Self> {
        let load = Load {
            kind: TYPE_SYSCALL,
            instructions: LENGTH,
            program: addr(PROGRAM.as_ptr()),
            license: addr(LICENSE.as_ptr()),
            flags: SLEEPABLE,
            ..Load::default()
        };
        let args = [PROG_LOAD, addr(&raw const load), size_of::<Load>() as u64, 0, 0, 0];
        // SAFETY: the kernel reads `load`, the program and the license, which all live until it returns.
        let fd = unsafe { syscall(libc::SYS_bpf, args) }?;
        let fd = i32::try_from(fd).map_err(|_| std::io::Error::from_raw_os_error(libc::EBADF))?;
        // SAFETY: the kernel has just made it (close-on-exec), and nobody else has it.
        Ok(KernelMemory(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The 8 bytes at an address.
    ///
    /// # Errors
    /// `EFAULT` if nothing is there.
    pub fn word(&self, address: u64) -> Result<[u8; 8]> {
        let answer = self.ask(address)?;
        match answer.error {
            0 => Ok(answer.word.to_ne_bytes()),
            _ => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
        }
    }

    /// Where the `struct task_struct` of the calling thread is.
    ///
    /// # Errors
    /// If the kernel does not run the program.
    pub fn current_task(&self) -> Result<u64> {
        Ok(self.ask(0)?.task)
    }

    fn ask(&self, address: u64) -> Result<Question> {
        let mut question = Question { address, ..Question::default() };
        let mut run = Run {
            program: self.0.as_raw_fd().cast_unsigned(),
            context_sizes: [SIZE, 0],
            contexts: [addr(&raw mut question), 0],
            ..Run::default()
        };
        let args = [PROG_RUN, addr(&raw mut run), size_of::<Run>() as u64, 0, 0, 0];
        // SAFETY: the kernel reads `run` and writes what the program returns into it, and reads and writes
        // `question`, whose size it is told.
        unsafe { syscall(libc::SYS_bpf, args) }?;
        Ok(question)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn words_are_read_and_wrong_addresses_are_errors() {
        let Ok(memory) = KernelMemory::open() else {
            println!("left out: words_are_read (who may not trace the kernel)");
            return;
        };
        let task = memory.current_task().unwrap();
        assert!(memory.word(task).is_ok());
        let error = memory.word(1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        // Memory of programs is not the kernel's.
        let own = 7_u64;
        assert!(memory.word(addr(&raw const own)).is_err());
        let other = std::thread::scope(|scope| {
            scope.spawn(|| memory.current_task().unwrap()).join().unwrap()
        });
        assert_ne!(task, other);
    }
}
