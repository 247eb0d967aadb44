//! Batches of system calls.

use std::io;
use std::ops::Range;

use torpor_sys::stub::Record;

use crate::syscall::Syscall;
use crate::{Error, RemoteAddr, Result, Tracee};

/// A system call of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call(usize);

/// Room inside the task that calls write results to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its address inside the task.
    pub addr: RemoteAddr,
    offset: usize,
    len: usize,
}

/// System calls to be run inside a task in one go.
#[derive(Debug)]
pub struct Batch<'t> {
    tracee: &'t mut Tracee,
    records: Vec<Record>,
    forwards: Vec<(usize, usize, usize)>,
    data: Vec<u8>,
}

impl<'t> Batch<'t> {
    pub(crate) fn new(tracee: &'t mut Tracee) -> Self {
        Batch { tracee, records: Vec::new(), forwards: Vec::new(), data: Vec::new() }
    }

    /// Adds a call; the batch goes on if it fails.
    pub fn call(&mut self, call: impl Into<Syscall>) -> Call {
        let Syscall { number, args } = call.into();
        let record = Record { number, args, result: Record::NOT_RUN, ..Record::default() };
        self.records.push(record);
        Call(self.records.len() - 1)
    }

    /// Adds a call of 32-bit programs, of which the kernel keeps that it was one; the number is
    /// one of theirs. The batch goes on if it fails.
    pub fn call_of_32bit(&mut self, call: impl Into<Syscall>) -> Call {
        let call = self.call(call);
        self.records[call.0].flags = Record::OF_32BIT;
        call
    }

    /// Ends the batch if this call fails.
    pub fn need(&mut self, call: Call) {
        self.records[call.0].flags |= Record::STOP_ON_ERROR;
    }

    /// Adds a call without which the rest makes no sense: if it fails, the calls
    /// after it are not made.
    pub fn must(&mut self, call: impl Into<Syscall>) -> Call {
        let call = self.call(call);
        self.need(call);
        call
    }

    /// Makes the result of `from` argument `arg` of the later call `to`. A result
    /// can be forwarded once.
    pub fn forward(&mut self, from: Call, to: Call, arg: usize) {
        debug_assert!(from.0 < to.0 && arg < 6);
        self.forwards.push((from.0, to.0, arg));
    }

    /// Places `bytes` inside the task for the duration of the batch.
    pub fn bytes(&mut self, bytes: &[u8]) -> RemoteAddr {
        self.place(bytes.len(), |room| room.copy_from_slice(bytes)).addr
    }

    /// Places a string with its terminating NUL inside the task.
    pub fn cstr(&mut self, string: impl AsRef<[u8]>) -> RemoteAddr {
        let string = string.as_ref();
        self.place(string.len() + 1, |room| room[..string.len()].copy_from_slice(string)).addr
    }

    /// Reserves zeroed room for a result.
    pub fn space(&mut self, len: usize) -> Slot {
        self.place(len, |_| {})
    }

    /// Reserves room with an initial content, for arguments that calls write back to.
    pub fn inout(&mut self, bytes: &[u8]) -> Slot {
        self.place(bytes.len(), |room| room.copy_from_slice(bytes))
    }

    fn place(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Slot {
        let offset = self.data.len().next_multiple_of(16);
        self.data.resize(offset + len, 0);
        fill(&mut self.data[offset..]);
        Slot { addr: RemoteAddr(self.tracee.scratch().0 + offset as u64), offset, len }
    }

    /// Number of calls so far.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no call yet.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Whether `more` further bytes of data still fit.
    pub fn fits(&self, more: usize) -> bool {
        let room = self.tracee.stub.map_or(0, |stub| stub.room.data());
        self.data.len() + more + 64 <= room
    }

    /// Runs the calls.
    ///
    /// # Errors
    /// If the task is gone or its memory cannot be reached; failed calls are not
    /// errors here, see [`Outcome::result`].
    pub fn run(self) -> Result<Outcome> {
        self.start()?.finish()
    }

    /// Runs batches of different threads at the same time; those of one process must have
    /// room for it ([`Tracee::share_stub`]). All have come to their ends when this returns.
    ///
    /// # Errors
    /// The first of those of [`Batch::run`].
    pub fn run_all(batches: Vec<Self>) -> Result<Vec<Outcome>> {
        let running: Vec<_> = batches.into_iter().map(Self::start).collect();
        let ended: Vec<_> = running.into_iter().map(|batch| batch?.finish()).collect();
        ended.into_iter().collect()
    }

    /// Lets its thread begin with the calls.
    fn start(mut self) -> Result<Running<'t>> {
        let room = self.tracee.stub()?.room.data();
        if self.data.len() > room {
            return Err(Error::Unusable {
                pid: self.tracee.tid(),
                reason: format!("{} bytes of arguments do not fit its stub", self.data.len()),
            });
        }
        let under_way = self.start_from(0)?;
        Ok(Running { batch: self, under_way })
    }

    /// Lets its thread begin with the calls from `start` on that there is room for, and returns
    /// which these are.
    fn start_from(&mut self, start: usize) -> Result<Range<usize>> {
        let room = self.tracee.stub()?.room.records();
        let part = start..self.records.len().min(start + room);
        if !part.is_empty() {
            self.link(part.start, part.end);
            self.tracee.start_records(&self.records[part.clone()], &self.data)?;
        }
        Ok(part)
    }

    /// Resolves forwards for the chunk `start..end`: inside it by address, from
    /// earlier chunks by value.
    fn link(&mut self, start: usize, end: usize) {
        for &(from, to, arg) in &self.forwards {
            if !(start..end).contains(&to) {
                continue;
            }
            if from >= start {
                let record = self.tracee.stub.map_or(0, |stub| stub.record_at(to - start).0);
                let target = record + 8 + 8 * arg as u64;
                self.records[from].forward = target;
            } else {
                self.records[to].args[arg] = self.records[from].result;
            }
        }
    }
}

/// A batch that its thread is executing.
#[must_use = "its thread has to be waited for"]
struct Running<'t> {
    batch: Batch<'t>,
    under_way: Range<usize>,
}

impl Running<'_> {
    /// Waits for its end.
    fn finish(self) -> Result<Outcome> {
        let Running { mut batch, under_way: mut part } = self;
        while !part.is_empty() {
            let records = &mut batch.records[part.clone()];
            batch.tracee.finish_records(records, &mut batch.data)?;
            let failed = |r: &Record| errno(r.result).is_some();
            if records.iter().any(|r| r.flags & Record::STOP_ON_ERROR != 0 && failed(r)) {
                break;
            }
            part = batch.start_from(part.end)?;
        }
        Ok(Outcome { pid: batch.tracee.tid(), records: batch.records, data: batch.data })
    }
}

/// The error in a raw result, if it is one.
fn errno(result: u64) -> Option<i32> {
    let value = result.cast_signed();
    if (-4095..0).contains(&value) { i32::try_from(-value).ok() } else { None }
}

/// What the calls of a batch returned.
#[derive(Debug)]
pub struct Outcome {
    pid: i32,
    records: Vec<Record>,
    data: Vec<u8>,
}

impl Outcome {
    /// The result of a call.
    ///
    /// # Errors
    /// What the kernel answered; `ECANCELED` if an earlier call ended the batch.
    pub fn result(&self, call: Call) -> io::Result<u64> {
        let result = self.records[call.0].result;
        if result == Record::NOT_RUN {
            return Err(io::Error::from_raw_os_error(libc::ECANCELED));
        }
        errno(result).map_or(Ok(result), |e| Err(io::Error::from_raw_os_error(e)))
    }

    /// The result of a call, with `what` it was for in the error.
    ///
    /// # Errors
    /// As [`Outcome::result`].
    pub fn expect(&self, call: Call, what: impl FnOnce() -> String) -> Result<u64> {
        self.result(call).map_err(|source| Error::Remote { pid: self.pid, what: what(), source })
    }

    /// The first call that failed, if any, by its position in the batch.
    pub fn first_error(&self) -> Option<(usize, io::Error)> {
        self.records
            .iter()
            .enumerate()
            .find_map(|(i, r)| errno(r.result).map(|e| (i, io::Error::from_raw_os_error(e))))
    }

    /// What the calls left in a slot.
    pub fn bytes(&self, slot: Slot) -> &[u8] {
        &self.data[slot.offset..slot.offset + slot.len]
    }

    /// A little-endian integer in a slot, at `offset`.
    pub fn u64_at(&self, slot: Slot, offset: usize) -> u64 {
        let mut value = [0u8; 8];
        value.copy_from_slice(&self.bytes(slot)[offset..offset + 8]);
        u64::from_le_bytes(value)
    }

    /// A little-endian integer in a slot, at `offset`.
    pub fn u32_at(&self, slot: Slot, offset: usize) -> u32 {
        let mut value = [0u8; 4];
        value.copy_from_slice(&self.bytes(slot)[offset..offset + 4]);
        u32::from_le_bytes(value)
    }
}
