//! A single system call in a task that has nothing of ours.
//!
//! It is made so that a task whose tracer dies in the middle still finds back: the registers
//! point at a `syscall; ret` that the task's own libraries contain, and the stack pointer at a
//! place where the return address is that of a signal restorer (`mov $15, %eax; syscall`), above
//! it a signal frame with the task's own registers. That place is at the low end of its stack, in
//! pages that it never used, or below them: the kernel grows the stack when a tracer writes there.
//! A 32-bit program has both in the kernel's own code for it, where the return from the call pops three words first.
//! Where a task has no such stack or no such code, the registers are changed and put back by
//! ptrace alone, with a window of some 10 µs.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use torpor_sys::ptrace::Registers;

use crate::leftover::{read_maps, stop_thread};
use crate::stub::PAGE;
use crate::syscall::Syscall;
use crate::{Error, Mapping, Result, Tracee, frame};

/// A single system call with nothing of ours mapped in the task.
pub(crate) struct LoneCall<'t> {
    tracee: &'t mut Tracee,
    maps: &'t [Mapping],
    call: Syscall,
    way_back: Option<WayBack>,
    /// What the kernel answered, once it has.
    answer: Result<u64>,
}

impl<'t> LoneCall<'t> {
    pub(crate) fn new(tracee: &'t mut Tracee, maps: &'t [Mapping], call: Syscall) -> Self {
        LoneCall { tracee, maps, call, way_back: None, answer: Ok(0) }
    }

    /// Makes the calls, all of them at the same time, and returns the tasks with the answers.
    pub(crate) fn run_all(mut calls: Vec<Self>) -> Vec<(&'t mut Tracee, Result<u64>)> {
        let steps = [Self::enter, Self::make, Self::leave, Self::finish];
        for step in steps {
            for call in &mut calls {
                if let Ok(before) = call.answer {
                    call.answer = step(call, before);
                }
            }
        }
        calls.into_iter().map(|call| (call.tracee, call.answer)).collect()
    }

    /// Sends the task to the call.
    fn enter(&mut self, _: u64) -> Result<u64> {
        self.way_back = self.tracee.way_back(self.maps, self.call)?;
        let regs = match &self.way_back {
            Some(way) => way.entering,
            None => self.at_its_own_code()?,
        };
        self.tracee.start_syscall(&regs).map(|()| 0)
    }

    /// The registers for the call at an instruction for it that the task has anywhere. Programs
    /// for 32 bits have `int $0x80`, and the other one by chance, as a part of others.
    fn at_its_own_code(&self) -> Result<Registers> {
        let Tracee { tid, own, .. } = *self.tracee;
        if let Some([rip]) = find_code(tid, self.maps, &[&[0x0f, 0x05]])?.as_deref() {
            return Ok(entering(&own, self.call, *rip));
        }
        if let Some(call) = self.call.of_32bit().filter(|_| own.is_32bit())
            && let Some([rip]) = find_code(tid, self.maps, &[&[0xcd, 0x80]])?.as_deref()
        {
            return Ok(entering_32bit(&own, call, *rip));
        }
        let reason = "no syscall instruction in its memory".to_owned();
        Err(Error::Unusable { pid: tid, reason })
    }

    /// It stands before the call.
    fn make(&mut self, _: u64) -> Result<u64> {
        self.tracee.wait_syscall()?;
        self.tracee.to_next_syscall().map(|()| 0)
    }

    /// It stands behind the call.
    fn leave(&mut self, _: u64) -> Result<u64> {
        let answer = self.tracee.finish_syscall()?;
        self.tracee.ask_to_trap().map(|()| answer)
    }

    /// The task gets back what is its own.
    fn finish(&mut self, answer: u64) -> Result<u64> {
        self.tracee.wait_trap()?;
        self.tracee.put_back()?;
        if let Some(way) = self.way_back.take() {
            scratch::clear(&way.memory, way.place, way.len)
                .map_err(Error::os(self.tracee.tid, "clearing its stack"))?;
        }
        Ok(answer)
    }
}

/// The registers of a task that is to make a call at `rip`.
pub(crate) fn entering(own: &Registers, Syscall { number, args }: Syscall, rip: u64) -> Registers {
    Registers {
        rax: number,
        rdi: args[0],
        rsi: args[1],
        rdx: args[2],
        r10: args[3],
        r8: args[4],
        r9: args[5],
        rip,
        orig_rax: u64::MAX,
        ..own.for_64bit()
    }
}

/// The same for a call of 32-bit programs.
fn entering_32bit(own: &Registers, Syscall { number, args }: Syscall, rip: u64) -> Registers {
    Registers {
        rax: number,
        rbx: args[0],
        rcx: args[1],
        rdx: args[2],
        rsi: args[3],
        rdi: args[4],
        rbp: args[5],
        rip,
        orig_rax: u64::MAX,
        ..*own
    }
}

/// A `syscall; ret`, and a signal restorer (`mov $15, %rax; syscall`).
const CODE: [&[u8]; 2] = [&[0x0f, 0x05, 0xc3], &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05]];
/// The same of 32-bit programs: `int $0x80; pop %ebp; pop %edx; pop %ecx; ret`, and `mov $173, %eax; int $0x80`.
const CODE_32BIT: [&[u8]; 2] =
    [&[0xcd, 0x80, 0x5d, 0x5a, 0x59, 0xc3], &[0xb8, 0xad, 0, 0, 0, 0xcd, 0x80]];

/// How a task finds back from a single system call.
#[derive(Debug)]
struct WayBack {
    /// The registers with which it begins.
    entering: Registers,
    /// The place on its stack.
    place: u64,
    /// Its size.
    len: u64,
    memory: File,
}

impl Tracee {
    /// What the kernel answered to a call in the task.
    pub(crate) fn answer(&self, what: &str, result: u64) -> Result<u64> {
        match result.cast_signed() {
            e @ -4095..0 => Err(Error::Remote {
                pid: self.tid,
                what: what.to_owned(),
                source: std::io::Error::from_raw_os_error(i32::try_from(-e).unwrap_or(0)),
            }),
            _ => Ok(result),
        }
    }

    /// Makes a system call with nothing of ours mapped in the task.
    pub(crate) fn call_without_stub(&mut self, maps: &[Mapping], call: Syscall) -> Result<u64> {
        let done = LoneCall::run_all(vec![LoneCall::new(self, maps, call)]);
        done.into_iter().next().map_or(Err(Error::Gone { pid: 0 }), |(_, result)| result)
    }

    /// Prepares the return path on fresh stack. `None` if the task does not offer it.
    fn way_back(&mut self, maps: &[Mapping], call: Syscall) -> Result<Option<WayBack>> {
        // Code is looked for last: it takes long where there is much of it.
        let Some(stack) = maps.iter().find(|m| m.name == "[stack]") else { return Ok(None) };
        let (tid, own, mask) = (self.tid, self.own, self.own_mask);
        let of_32bit = call.of_32bit().filter(|_| own.is_32bit());
        let (entering, restorer) = if let Some(call) = of_32bit
            && let Some([rip, restorer]) = find_code(tid, maps, &CODE_32BIT)?.as_deref()
        {
            (entering_32bit(&own, call, *rip), *restorer)
        } else if let Some([rip, restorer]) = find_code(tid, maps, &CODE)?.as_deref() {
            (entering(&own, call, *rip), *restorer)
        } else {
            return Ok(None);
        };
        let Ok(memory) = memory(tid) else { return Ok(None) };
        let state = self.xstate()?;
        let frame = |at| match entering.is_32bit() {
            true => frame::ia32::build(at, restorer, &own, state, mask),
            false => frame::build(at, tid, &own, state, mask),
        };
        let len = scratch::len_for(frame(0).len());
        let place = scratch::find(&memory, stack.start, len);
        let frame = frame(place + scratch::FRAME);
        let (rsp, written) = match entering.is_32bit() {
            true => (place + scratch::ENTRY_32BIT, scratch::write(&memory, place, &[], &frame)),
            false => {
                let back = restorer.to_le_bytes();
                (place + scratch::ENTRY, scratch::write(&memory, place, &back, &frame))
            }
        };
        let entering = Registers { rsp, ..entering };
        Ok(written.is_ok().then_some(WayBack { entering, place, len, memory }))
    }
}

/// The memory of a task, which a tracer can write wherever it is private.
pub(crate) fn memory(pid: i32) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// A place on a program's stack that the program has nothing in.
pub(crate) mod scratch {
    use super::{File, FileExt, PAGE};

    /// Where the frame is in the place.
    pub(super) const FRAME: u64 = 64;
    /// Where the stack pointer of a call is: at the return address.
    pub(super) const ENTRY: u64 = FRAME - 8;
    /// Where that of a 32-bit call is: three words before the return address, with which the frame begins.
    pub(super) const ENTRY_32BIT: u64 = FRAME - 12;

    /// Size of the place for a frame of `len` bytes: pages that nothing else is in.
    pub(super) fn len_for(len: usize) -> u64 {
        (len as u64 + FRAME).next_multiple_of(PAGE)
    }

    /// The place to use. The kernel makes every stack larger than it is at first, so that
    /// its lowest pages are all zero as a rule; they are made zero again afterwards. Else
    /// the stack is grown by writing below it.
    pub(super) fn find(memory: &File, stack_start: u64, len: u64) -> u64 {
        let mut now = vec![0u8; usize::try_from(len).unwrap_or(0)];
        let unused =
            memory.read_exact_at(&mut now, stack_start).is_ok() && now.iter().all(|&b| b == 0);
        if unused { stack_start } else { stack_start - len }
    }

    /// Whether a stack pointer is that of a task on its way back, before or behind the
    /// return to its signal restorer. What was written below a stack belongs to it.
    pub(crate) fn contains(stack_pointer: u64, stack_start: u64) -> bool {
        let at = stack_pointer.wrapping_sub(stack_start);
        at.is_multiple_of(4) && (ENTRY_32BIT..=FRAME + 4).contains(&at)
    }

    /// Writes the frame, and what is right before it.
    pub(super) fn write(
        memory: &File,
        at: u64,
        before: &[u8],
        frame: &[u8],
    ) -> std::io::Result<()> {
        memory.write_all_at(&[before, frame].concat(), at + FRAME - before.len() as u64)
    }

    /// Makes the place zero again.
    pub(super) fn clear(memory: &File, at: u64, len: u64) -> std::io::Result<()> {
        memory.write_all_at(&vec![0u8; usize::try_from(len).unwrap_or(0)], at)
    }
}

/// Addresses of the wanted byte sequences in the executable mappings of a task;
/// `None` if one is not found.
fn find_code(pid: i32, maps: &[Mapping], wanted: &[&[u8]]) -> Result<Option<Vec<u64>>> {
    let mut found: Vec<Option<u64>> = vec![None; wanted.len()];
    // The C library has both, so look there first; the kernel's own code has an instruction. Elsewhere
    // there may be hundreds of megabytes, such as those that a JVM has for compiled methods.
    let executable = |m: &&Mapping| m.prot & libc::PROT_EXEC != 0 && m.name != "[vsyscall]";
    let mut mappings: Vec<&Mapping> = maps.iter().filter(executable).collect();
    mappings.sort_by_key(|m| (!m.name.contains("/libc"), m.name != "[vdso]"));
    for mapping in mappings {
        for (slot, bytes) in found.iter_mut().zip(wanted) {
            if slot.is_none() {
                *slot = find_in(pid, mapping, bytes)?;
            }
        }
        if found.iter().all(Option::is_some) {
            break;
        }
    }
    Ok(found.into_iter().collect())
}

/// Offsets found so far, by file, part of it, and byte sequence: processes share
/// their libraries.
type Known = HashMap<(u64, u64, u64, Vec<u8>), Option<u64>>;
static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

fn find_in(pid: i32, mapping: &Mapping, bytes: &[u8]) -> Result<Option<u64>> {
    let key = (mapping.dev, mapping.inode, mapping.offset, bytes.to_vec());
    let cached = match KNOWN.lock() {
        Ok(known) if mapping.inode != 0 => known.as_ref().and_then(|k| k.get(&key).copied()),
        _ => None,
    };
    // A cached place is checked: a private mapping may have been changed.
    if let Some(place) = cached {
        let Some(offset) = place else { return Ok(None) };
        let mut now = vec![0u8; bytes.len()];
        let address = mapping.start + offset;
        if torpor_sys::vm::read(pid, address, &mut now).is_ok_and(|n| n == now.len())
            && now == bytes
        {
            return Ok(Some(address));
        }
    }
    let offset = search(pid, mapping, bytes);
    if let Ok(mut known) = KNOWN.lock()
        && mapping.inode != 0
    {
        known.get_or_insert_default().insert(key, offset);
    }
    Ok(offset.map(|o| mapping.start + o))
}

/// Offset of `bytes` in the first MiBs of a mapping.
fn search(pid: i32, mapping: &Mapping, bytes: &[u8]) -> Option<u64> {
    const CHUNK: u64 = 256 * 1024;
    const LIMIT: u64 = 16 * 1024 * 1024;
    let end = mapping.end.min(mapping.start + LIMIT);
    let mut at = mapping.start;
    while at < end {
        let len = (end - at).min(CHUNK + bytes.len() as u64);
        let mut buf = vec![0u8; usize::try_from(len).ok()?];
        let n = torpor_sys::vm::read(pid, at, &mut buf).ok()?;
        // Most libraries do not have it: this reads all of them while the task is stopped.
        if let Some(i) = memchr::memmem::find(&buf[..n], bytes) {
            return Some(at - mapping.start + i as u64);
        }
        at += CHUNK;
    }
    None
}

/// Makes one system call in process `pid`, which runs on its own, with nothing of ours
/// mapped there: to close a descriptor, or to reap a child, that it knows nothing of.
///
/// # Errors
/// Gone; `Os`, if somebody else traces it; `Unusable`, if it does not stop in time; `Remote`, if
/// the call is refused.
pub fn call_once(
    pid: i32,
    what: &str,
    call: impl Into<Syscall>,
    patience: Duration,
) -> Result<u64> {
    let call = call.into();
    let deadline = Instant::now() + patience;
    let mut leader = loop {
        match stop_thread(pid, pid, deadline)? {
            Some(leader) => break leader,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let result = read_maps(pid).and_then(|maps| leader.call_without_stub(&maps, call));
    let result = result.and_then(|result| leader.answer(what, result));
    leader.finish().and(result)
}
