//! The stub: how it gets into a task and out again, and how it is run.

use std::os::unix::fs::FileExt;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_sys::ptrace::Registers;
use torpor_sys::stub::{self, Record};

use crate::lone::{LoneCall, memory};
use crate::stub::{PAGE, Room, STUB_SIZE, Stub};
use crate::syscall::{Syscall, mmap_anonymous, munmap};
use crate::{Error, Mapping, RemoteAddr, Result, Tracee, frame};

impl Tracee {
    /// Maps a stub into the task, at `base` ([`stub_place`](crate::stub_place)). `maps` are
    /// the mappings of the task.
    ///
    /// # Errors
    /// Unusable for tasks without an instruction that makes a system call.
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
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        let stub_at = |base, prot| {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
            mmap_anonymous(base..base + STUB_SIZE, prot, flags)
        };
        let (mut places, mut calls) = (Vec::new(), Vec::new());
        for (tracee, maps, base) in tasks {
            let call = stub_at(base, read_write | ProtFlags::EXEC);
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
                        let code = ProtFlags::READ | ProtFlags::EXEC;
                        let over = MapFlags::PRIVATE | MapFlags::FIXED;
                        tracee.map(maps, stub_at(base, read_write))?;
                        tracee.map(maps, mmap_anonymous(base..base + PAGE, code, over))?;
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

    fn map(&mut self, maps: &[Mapping], call: Syscall) -> Result<()> {
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
    /// Gone; `Remote`, if the stub cannot be unmapped.
    pub fn eject(&mut self, maps: &[Mapping]) -> Result<()> {
        Self::eject_all([(self, maps)]).into_iter().collect()
    }

    /// Does the same to several processes: while one of them works the next ones are looked after.
    pub fn eject_all<'t>(
        tasks: impl IntoIterator<Item = (&'t mut Self, &'t [Mapping])>,
    ) -> Vec<Result<()>> {
        let calls = tasks.into_iter().filter_map(|(tracee, maps)| {
            let stub = tracee.stub.take()?;
            let call = munmap(stub.base..stub.base + STUB_SIZE);
            Some(LoneCall::new(tracee, maps, call))
        });
        let done = LoneCall::run_all(calls.collect()).into_iter();
        done.map(|(tracee, result)| tracee.answer("munmap of the stub", result?).map(drop))
            .collect()
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
            ..self.own.for_64bit()
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
