//! Memory that a task gives up.

use std::ops::Range;

use crate::syscall::{RemoteFd, close};
use crate::{Error, Result, Tracee};

/// Ranges that the kernel takes in one call.
const MANY: usize = libc::UIO_MAXIOV as usize;
/// Fewer are not worth the descriptor that one call for all of them needs.
const SEVERAL: usize = 8;
/// Bytes of a `struct iovec`.
const ENTRY: usize = 16;
const ADVICE: u64 = libc::MADV_DONTNEED.cast_unsigned() as u64;

impl Tracee {
    /// Has a task give up private memory, which reads as zeroes, or as its file, again.
    ///
    /// # Errors
    /// Gone; `Remote`, if nothing is mapped in a range (named in the error).
    pub fn discard(&mut self, ranges: &[Range<u64>]) -> Result<()> {
        if ranges.len() < SEVERAL || !self.discard_together(ranges)? {
            self.discard_each(ranges)?;
        }
        Ok(())
    }

    /// Many ranges in one call: whether all of them are gone. Kernels before Linux 6.13 let no task do
    /// this to itself.
    fn discard_together(&mut self, ranges: &[Range<u64>]) -> Result<bool> {
        let pid = self.call("getpid", (libc::SYS_getpid, []))?;
        let Ok(fd) = self.call("pidfd_open", (libc::SYS_pidfd_open, [pid, 0])) else {
            return Ok(false);
        };
        let done = self.discard_by(fd, ranges);
        self.call("close", close(RemoteFd(fd)))?;
        done
    }

    fn discard_by(&mut self, pidfd: u64, ranges: &[Range<u64>]) -> Result<bool> {
        let mut parts = ranges.chunks(MANY).peekable();
        while parts.peek().is_some() {
            let mut batch = self.batch();
            let mut calls = Vec::new();
            while let Some(part) = parts.next_if(|part| batch.fits(part.len() * ENTRY)) {
                let words = part.iter().flat_map(|range| [range.start, len(range)]);
                let list = batch.bytes(&words.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>());
                let args = [pidfd, list.0, part.len() as u64, ADVICE, 0];
                let call = batch.must((libc::SYS_process_madvise, args));
                calls.push((call, part.iter().map(len).sum::<u64>()));
            }
            let outcome = batch.run()?;
            // It ends at the first range that it cannot do, and says how far it came.
            let is_done = |&(call, all): &(_, u64)| outcome.result(call).is_ok_and(|n| n == all);
            if calls.is_empty() || !calls.iter().all(is_done) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn discard_each(&mut self, ranges: &[Range<u64>]) -> Result<()> {
        let pid = self.tid();
        let mut batch = self.batch();
        for range in ranges {
            batch.call((libc::SYS_madvise, [range.start, len(range), ADVICE]));
        }
        match batch.run()?.first_error() {
            Some((at, source)) => {
                let Range { start, end } = &ranges[at];
                let what = format!("giving up memory at {start:x}-{end:x}");
                Err(Error::Remote { pid, what, source })
            }
            None => Ok(()),
        }
    }
}

fn len(range: &Range<u64>) -> u64 {
    range.end - range.start
}
