//! The stub: how it gets into a task and out again.
//!
//! The first mapping must be made before there is any code or data of ours in the
//! task. It is made so that a task whose tracer dies in the middle still finds
//! back: the registers point at a `syscall; ret` that the task's own libraries
//! contain, and the stack pointer at a place where the return address is that of a
//! signal restorer (`mov $15, %eax; syscall`), above it a signal frame with the
//! task's own registers. That place is at the low end of its stack, in pages that
//! it never used, or below them: the kernel grows the stack when a tracer writes there.
//! Where a task has no such stack or no such code, the registers are changed and put
//! back by ptrace alone, with a window of some 10 µs.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use torpor_sys::ptrace::{self, Registers};
use torpor_sys::stub::{self, Record};

use crate::frame;
use crate::stop::{BATCH_MASK, other_threads};
use crate::stub::{PAGE, Room, STUB_SIZE, Stub};
use crate::{Error, Mapping, RemoteAddr, Result, Tracee, parse_maps};

/// How long a task is left alone at most before it is stopped again to see where it is.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// The signals that no mask holds: SIGKILL, SIGSTOP.
const NEVER_BLOCKED: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

/// Number and arguments.
type SystemCall = (libc::c_long, [u64; 6]);

/// Anonymous memory: first address and length.
fn mmap(range: [u64; 2], prot: i32, flags: i32) -> SystemCall {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let [prot, flags] = [prot, flags].map(|bits| u64::from(bits.cast_unsigned()));
    (libc::SYS_mmap, [range[0], range[1], prot, flags, u64::MAX, 0])
}

/// A single system call with nothing of ours mapped in the task.
struct LoneCall<'t> {
    tracee: &'t mut Tracee,
    maps: &'t [Mapping],
    call: SystemCall,
    way_back: Option<WayBack>,
    /// What the kernel answered, once it has.
    answer: Result<u64>,
}

impl<'t> LoneCall<'t> {
    fn new(tracee: &'t mut Tracee, maps: &'t [Mapping], call: SystemCall) -> Self {
        LoneCall { tracee, maps, call, way_back: None, answer: Ok(0) }
    }

    /// Makes the calls, all of them at the same time, and returns the tasks with the answers.
    fn run_all(mut calls: Vec<Self>) -> Vec<(&'t mut Tracee, Result<u64>)> {
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
        let (number, args) = self.call;
        let mut regs = Registers {
            rax: number.cast_unsigned(),
            rdi: args[0],
            rsi: args[1],
            rdx: args[2],
            r10: args[3],
            r8: args[4],
            r9: args[5],
            orig_rax: u64::MAX,
            ..self.tracee.own
        };
        self.way_back = self.tracee.way_back(self.maps)?;
        if let Some(way) = &self.way_back {
            (regs.rip, regs.rsp) = (way.rip, way.place + 56);
        } else {
            let tid = self.tracee.tid;
            let any = find_code(tid, self.maps, &[&[0x0f, 0x05]])?;
            let Some([rip]) = any.as_deref() else {
                let reason = "no syscall instruction in its memory".to_owned();
                return Err(Error::Unusable { pid: tid, reason });
            };
            regs.rip = *rip;
        }
        self.tracee.start_syscall(&regs).map(|()| 0)
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

/// How a task finds back from a single system call.
#[derive(Debug)]
struct WayBack {
    /// A `syscall; ret` of its own.
    rip: u64,
    /// The place on its stack.
    place: u64,
    /// Its size.
    len: u64,
    memory: File,
}

impl Tracee {
    /// Maps a stub into the task, at `base` ([`stub_place`](crate::stub_place)). `maps` are
    /// the mappings of the task.
    ///
    /// # Errors
    /// Unusable for 32-bit tasks and for tasks without a `syscall` instruction.
    pub fn inject(&mut self, maps: &[Mapping], base: u64) -> Result<()> {
        Self::inject_all([(self, maps, base)])
    }

    /// Maps stubs into several processes: while one of them works the next ones are looked after.
    ///
    /// # Errors
    /// The first of those of [`Tracee::inject`]; the others have theirs.
    pub fn inject_all<'t>(
        tasks: impl IntoIterator<Item = (&'t mut Self, &'t [Mapping], u64)>,
    ) -> Result<()> {
        let (read_write, exec) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_EXEC);
        let new = libc::MAP_FIXED_NOREPLACE;
        let (mut places, mut calls) = (Vec::new(), Vec::new());
        for (tracee, maps, base) in tasks {
            let call = mmap([base, STUB_SIZE], read_write | exec, new);
            places.push((maps, base));
            calls.push(LoneCall::new(tracee, maps, call));
        }
        let done = LoneCall::run_all(calls).into_iter().zip(places);
        let all: Vec<Result<()>> = done
            .map(|((tracee, mapped), (maps, base))| {
                match mapped.and_then(|at| tracee.answer("mmap of the stub", at)) {
                    Ok(_) => tracee.write(RemoteAddr(base), stub::code())?,
                    // It may have no memory that is writable and executable (PR_SET_MDWE,
                    // SELinux): the code gets a page of its own, that only a tracer can write.
                    Err(e) if is_denied(&e) => {
                        tracee.map(maps, mmap([base, STUB_SIZE], read_write, new))?;
                        tracee.map(
                            maps,
                            mmap([base, PAGE], libc::PROT_READ | exec, libc::MAP_FIXED),
                        )?;
                        memory(tracee.tid)
                            .and_then(|memory| memory.write_all_at(stub::code(), base))
                            .map_err(Error::os(tracee.tid, "writing the stub"))?;
                    }
                    Err(e) => return Err(e),
                }
                tracee.stub = Some(Stub::at(base));
                Ok(())
            })
            .collect();
        all.into_iter().collect()
    }

    fn map(&mut self, maps: &[Mapping], call: SystemCall) -> Result<()> {
        let result = self.call_without_stub(maps, call)?;
        self.answer("mmap of the stub", result).map(drop)
    }

    /// Uses the stub that another thread of the same process has. Those of its threads whose
    /// `number`s differ in less than [`SIDE_BY_SIDE`](crate::SIDE_BY_SIDE) can run batches at
    /// the same time; that of number 0 has the most room, which its owner has too.
    pub fn share_stub(&mut self, of: &Tracee, number: usize) {
        self.stub = of.stub.map(|stub| Stub { base: stub.base, room: Room::of(number) });
    }

    /// Where the stub is: first address and length.
    pub fn stub_range(&self) -> Option<(u64, u64)> {
        self.stub.map(|s| (s.base, STUB_SIZE))
    }

    /// Unmaps the stub and puts the task's own registers back.
    ///
    /// # Errors
    /// Gone; or the kernel's.
    pub fn eject(&mut self, maps: &[Mapping]) -> Result<()> {
        Self::eject_all([(self, maps)]).into_iter().collect()
    }

    /// Does the same to several processes: while one of them works the next ones are looked after.
    pub fn eject_all<'t>(
        tasks: impl IntoIterator<Item = (&'t mut Self, &'t [Mapping])>,
    ) -> Vec<Result<()>> {
        let calls = tasks.into_iter().filter_map(|(tracee, maps)| {
            let stub = tracee.stub.take()?;
            let call = (libc::SYS_munmap, [stub.base, STUB_SIZE, 0, 0, 0, 0]);
            Some(LoneCall::new(tracee, maps, call))
        });
        let done = LoneCall::run_all(calls.collect()).into_iter();
        done.map(|(tracee, result)| tracee.answer("munmap of the stub", result?).map(drop))
            .collect()
    }

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
    fn call_without_stub(&mut self, maps: &[Mapping], call: SystemCall) -> Result<u64> {
        let done = LoneCall::run_all(vec![LoneCall::new(self, maps, call)]);
        done.into_iter().next().map_or(Err(Error::Gone { pid: 0 }), |(_, result)| result)
    }

    /// Prepares the return path on fresh stack: the addresses of `syscall; ret` and
    /// of the stack pointer to run it with. `None` if the task does not offer it.
    fn way_back(&mut self, maps: &[Mapping]) -> Result<Option<WayBack>> {
        let code: [&[u8]; 2] =
            [&[0x0f, 0x05, 0xc3], &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05]];
        let Some(found) = find_code(self.tid, maps, &code)? else { return Ok(None) };
        let Some(stack) = maps.iter().find(|m| m.name == "[stack]") else { return Ok(None) };
        let (tid, own, mask) = (self.tid, self.own, self.own_mask);
        let Ok(memory) = memory(self.tid) else { return Ok(None) };
        let state = self.xstate()?;
        let len = scratch::len_for(frame::build(0, tid, &own, state, mask).len());
        let place = scratch::find(&memory, stack.start, len);
        let content = frame::build(place + 64, tid, &own, state, mask);
        if scratch::write(&memory, place, found[1], &content).is_err() {
            return Ok(None);
        }
        Ok(Some(WayBack { rip: found[0], place, len, memory }))
    }

    /// Its stub.
    pub(crate) fn stub(&self) -> Result<Stub> {
        self.stub
            .ok_or_else(|| Error::Unusable { pid: self.tid, reason: "it has no stub".to_owned() })
    }

    /// Sends the thread through records in its stub, without waiting for it.
    pub(crate) fn start_records(&mut self, records: &[Record], data: &[u8]) -> Result<()> {
        let stub = self.stub()?;
        let frame = if self.husk { Vec::new() } else { self.frame(stub)? };
        let bytes: Vec<u8> = records.iter().flat_map(to_bytes).collect();
        self.write_parts(&[
            (stub.frame_at(), &frame),
            (stub.record_at(0), &bytes),
            (stub.data_at(), data),
        ])?;
        let regs = Registers {
            rip: stub.base,
            rsp: stub.frame_at().0,
            r12: stub.record_at(0).0,
            r13: records.len() as u64,
            orig_rax: u64::MAX,
            ..self.own
        };
        self.start_at(&regs)
    }

    /// Waits for the end of what [`Tracee::start_records`] has started, and reads the results and
    /// `data` back.
    pub(crate) fn finish_records(&mut self, records: &mut [Record], data: &mut [u8]) -> Result<()> {
        let stub = self.stub()?;
        self.run_to_done()?;
        let mut bytes = vec![0; size_of_val(records)];
        self.read_parts(&mut [(stub.record_at(0), &mut bytes), (stub.data_at(), data)])?;
        for (record, bytes) in records.iter_mut().zip(bytes.chunks_exact(size_of::<Record>())) {
            let mut value = [0u8; 8];
            value.copy_from_slice(&bytes[56..64]);
            record.result = u64::from_le_bytes(value);
        }
        Ok(())
    }

    /// Gives a thread its signal mask back whose supervisor died when it had set the thread's
    /// own registers already, and not yet its mask. The frame of its last batch is still there,
    /// and nobody blocks all but this signal but who runs one.
    fn take_back_mask(&mut self, stub: Stub) -> Result<()> {
        if self.own_mask | NEVER_BLOCKED != BATCH_MASK | NEVER_BLOCKED {
            return Ok(());
        }
        for frame in stub.frames() {
            let mut head = [0; frame::HEAD];
            self.read(frame, &mut head)?;
            if let Some(mask) = frame::mask_of(&head, self.tid) {
                ptrace::set_signal_mask(self.tid, mask)
                    .map_err(Error::os(self.tid, "PTRACE_SETSIGMASK"))?;
                self.own_mask = mask;
            }
        }
        Ok(())
    }

    /// The way back of this thread from the stub, which it shares with the other threads.
    fn frame(&mut self, stub: Stub) -> Result<Vec<u8>> {
        let (tid, own, mask) = (self.tid, self.own, self.own_mask);
        Ok(frame::build(stub.frame_at().0, tid, &own, self.xstate()?, mask))
    }
}

fn to_bytes(r: &Record) -> [u8; 80] {
    let words = [
        r.number, r.args[0], r.args[1], r.args[2], r.args[3], r.args[4], r.args[5], r.result,
        r.forward, r.flags,
    ];
    let mut out = [0u8; 80];
    for (to, word) in out.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    out
}

/// Whether a task may not do what it was made to.
fn is_denied(e: &Error) -> bool {
    matches!(e, Error::Remote { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied)
}

/// The memory of a task, which a tracer can write wherever it is private.
fn memory(pid: i32) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// A place on a program's stack that the program has nothing in.
mod scratch {
    use super::{File, FileExt, PAGE};

    /// Size of the place for a frame of `len` bytes: pages that nothing else is in.
    pub(super) fn len_for(len: usize) -> u64 {
        (len as u64 + 64).next_multiple_of(PAGE)
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
    pub(super) fn contains(stack_pointer: u64, stack_start: u64) -> bool {
        [56, 64].contains(&stack_pointer.wrapping_sub(stack_start))
    }

    /// Writes the return address at `at + 56` and the frame at `at + 64`.
    pub(super) fn write(
        memory: &File,
        at: u64,
        restorer: u64,
        frame: &[u8],
    ) -> std::io::Result<()> {
        let mut content = restorer.to_le_bytes().to_vec();
        content.extend_from_slice(frame);
        memory.write_all_at(&content, at + 56)
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
    // The C library has both, so look there first.
    let executable = |m: &&Mapping| m.prot & libc::PROT_EXEC != 0 && m.name != "[vsyscall]";
    let (libc_first, rest): (Vec<_>, Vec<_>) =
        maps.iter().filter(executable).partition(|m| m.name.contains("/libc"));
    for mapping in libc_first.into_iter().chain(rest) {
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
        if let Some(i) = buf[..n].windows(bytes.len()).position(|w| w == bytes) {
            return Some(at - mapping.start + i as u64);
        }
        at += CHUNK;
    }
    None
}

/// Removes the stub that a dead supervisor may have left behind at `base` in process
/// `pid`, which runs on its own again.
///
/// # Errors
/// Gone; the kernel's.
pub fn remove_leftover(pid: i32, base: u64, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    let stub = Stub::at(base);
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(mut threads) = stop_again(pid, deadline)? {
            let maps = read_maps(pid)?;
            if !in_use(&threads, stub, &maps) {
                for thread in &mut threads {
                    thread.take_back_mask(stub)?;
                }
                let gone = match threads.first_mut() {
                    Some(leader) if is_leftover(pid, base, &maps) => {
                        leader.stub = Some(stub);
                        leader.eject(&maps)
                    }
                    _ => Ok(()),
                };
                return finish_all(threads).and(gone);
            }
            finish_all(threads)?;
            // It would end its process to take away what one of its threads executes.
            if Instant::now() > deadline {
                let reason = format!("it does not leave the stub at {base:x}");
                return Err(Error::Unusable { pid, reason });
            }
        }
        // On a busy machine a task that is stopped too often never gets to its next instruction.
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Makes one system call in process `pid`, which runs on its own, with nothing of ours
/// mapped there: to close a descriptor, or to reap a child, that it knows nothing of.
///
/// # Errors
/// Gone; traced by somebody else; the kernel's answer in `Remote`.
pub fn call_once(pid: i32, what: &str, call: SystemCall, patience: Duration) -> Result<u64> {
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

/// Stops all threads of a process whose supervisor has just died, the leader first; `None`
/// if that has not let them go yet: it closes its files, by which others know of its end,
/// before. There may be more threads than the list of them has, if some of them end.
fn stop_again(pid: i32, deadline: Instant) -> Result<Option<Vec<Tracee>>> {
    let mut threads: Vec<Tracee> = Vec::new();
    loop {
        let mut ended_leader = 0;
        for tid in std::iter::once(pid).chain(other_threads(pid)) {
            if is_zombie(tid) {
                ended_leader = 1;
                continue;
            }
            if threads.iter().any(|t| t.tid == tid) {
                continue;
            }
            match stop_thread(pid, tid, deadline) {
                Ok(Some(thread)) => threads.push(thread),
                Ok(None) => return Ok(None),
                Err(Error::Gone { .. }) if tid != pid => {}
                Err(e) => return Err(e),
            }
        }
        if thread_count(pid)? <= threads.len() + ended_leader || Instant::now() > deadline {
            return Ok(Some(threads));
        }
    }
}

/// Stops a thread; `None` if somebody else has it.
fn stop_thread(pid: i32, tid: i32, deadline: Instant) -> Result<Option<Tracee>> {
    let filtered = !read_status(pid)?.contains("Seccomp:\t0\n");
    match Tracee::seize(tid, filtered) {
        Err(Error::Os { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied
                && Instant::now() < deadline =>
        {
            return Ok(None);
        }
        seized => seized?,
    }
    let left = deadline.saturating_duration_since(Instant::now());
    match Tracee::stopped(pid, tid, left)? {
        None => Err(Error::Unusable { pid: tid, reason: "it does not stop".to_owned() }),
        stopped => Ok(stopped),
    }
}

/// Lets all threads go; the first error of one that is not just gone.
fn finish_all(threads: Vec<Tracee>) -> Result<()> {
    let mut all = Ok(());
    for thread in threads {
        match thread.finish() {
            Ok(()) | Err(Error::Gone { .. }) => {}
            Err(e) => all = all.and(Err(e)),
        }
    }
    all
}

fn read_status(pid: i32) -> Result<String> {
    std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|_| Error::Gone { pid })
}

/// Whether a thread has ended and is still there: the leader of others that run on.
pub(crate) fn is_zombie(tid: i32) -> bool {
    read_status(tid).is_ok_and(|status| status.contains("State:\tZ"))
}

fn thread_count(pid: i32) -> Result<usize> {
    let status = read_status(pid)?;
    let count = status.lines().find_map(|line| line.strip_prefix("Threads:"));
    count.and_then(|n| n.trim().parse().ok()).ok_or(Error::Gone { pid })
}

fn read_maps(pid: i32) -> Result<Vec<Mapping>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_err(Error::os(pid, "/proc/PID/maps"))?;
    Ok(parse_maps(&text))
}

/// Whether there is a stub at `base`: it begins with the code, or is anonymous memory
/// of just its size that is empty, where the supervisor died right after it had mapped it.
fn is_leftover(pid: i32, base: u64, maps: &[Mapping]) -> bool {
    let end = base + STUB_SIZE;
    let parts: Vec<_> = maps.iter().filter(|m| m.start < end && m.end > base).collect();
    let mut head = vec![0u8; stub::code().len()];
    let readable = torpor_sys::vm::read(pid, base, &mut head).is_ok_and(|n| n == head.len());
    let whole = parts.first().is_some_and(|m| m.start == base)
        && parts.last().is_some_and(|m| m.end == end);
    readable
        && parts.iter().all(|m| m.inode == 0 && m.name.is_empty())
        && (head == stub::code() || whole && head.iter().all(|&byte| byte == 0))
}

/// Whether one of these threads, the leader first, still is where its dead supervisor has
/// sent it: in the stub, or only just about to map it.
fn in_use(threads: &[Tracee], stub: Stub, maps: &[Mapping]) -> bool {
    let stack = maps.iter().find(|m| m.name == "[stack]").map_or(0, |m| m.start);
    threads.first().is_some_and(|leader| scratch::contains(leader.own.rsp, stack))
        || threads.iter().any(|thread| stub.code_contains(thread.own.rip))
}
