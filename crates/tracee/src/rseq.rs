//! Restartable sequences (rseq(2)).
//!
//! A thread that is interrupted inside a critical section must not go on there: the
//! kernel sends it to the section's abort handler, but looks for that only on the way
//! back to the thread's own code. Once anything else is run in the thread it forgets
//! the section. So a thread that is found in one is taken out of it as the kernel
//! would do it, before anything is run.

use torpor_sys::ptrace::{self, RseqConfig};

use crate::{Error, RemoteAddr, Result, Tracee};

/// Where `struct rseq` (linux/rseq.h) points to the critical section; its flags follow.
const RSEQ_CS: u64 = 8;

/// `struct rseq_cs`.
struct Section {
    flags: u32,
    start: u64,
    len: u64,
    abort: u64,
}

impl Tracee {
    /// Moves a thread that was found in a critical section to its abort handler.
    pub(crate) fn leave_critical_section(&mut self) -> Result<()> {
        let Some(config) = self.rseq()? else { return Ok(()) };
        let area = config.address;
        let Some([at, flags]) = self.words(area + RSEQ_CS) else { return Ok(()) };
        if at == 0 {
            return Ok(());
        }
        let Some(section) = self.section(at) else { return Ok(()) };
        if self.own.rip.wrapping_sub(section.start) < section.len {
            // Flags that forbid the abort: kept by kernels before 6.1, fatal since.
            let flags = section.flags | u32::try_from(flags & 0xffff_ffff).unwrap_or_default();
            let [signature] = self.words(section.abort.wrapping_sub(4)).unwrap_or_default();
            let signed = signature & 0xffff_ffff == u64::from(config.signature);
            if flags != 0 || !signed {
                self.critical_section = Some((area + RSEQ_CS, at));
                return Ok(());
            }
            self.own.rip = section.abort;
        }
        // As the kernel would do it. Until then the section could be all around what is run in the thread, which would go on in
        // its own code for ever.
        self.write(RemoteAddr(area + RSEQ_CS), &[0; 8])
    }

    /// What the thread has registered with rseq(2). One that was stopped has been asked already.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn rseq(&mut self) -> Result<Option<RseqConfig>> {
        if self.rseq.is_none() {
            self.rseq = match ptrace::rseq(self.tid) {
                Ok(config) => Some(config),
                // A kernel without restartable sequences.
                Err(e) if e.raw_os_error() == Some(libc::EIO) => None,
                Err(e) => return Err(Error::os(self.tid, "PTRACE_GET_RSEQ_CONFIGURATION")(e)),
            };
        }
        Ok(self.rseq.filter(|config| config.address != 0))
    }

    /// The segments for 32-bit code that the thread has, as `set_thread_area(2)` sets them:
    /// three, empty as a rule; none on a kernel without 32-bit code.
    ///
    /// # Errors
    /// Gone; `Os`, if ptrace(2) does not know the request for another reason.
    pub fn segments(&self) -> Result<Vec<ptrace::SegmentDescriptor>> {
        /// `GDT_ENTRY_TLS_MIN` of asm/segment.h, and how many there are.
        const NUMBERS: std::ops::Range<u32> = 12..15;
        NUMBERS
            .map(|number| ptrace::thread_area(self.tid, number))
            .collect::<std::io::Result<_>>()
            .or_else(|e| if e.raw_os_error() == Some(libc::EIO) { Ok(Vec::new()) } else { Err(e) })
            .map_err(Error::os(self.tid, "PTRACE_GET_THREAD_AREA"))
    }

    /// Gives the thread a segment for 32-bit code.
    ///
    /// # Errors
    /// Gone; `Os`, if the kernel gives such a segment to nobody.
    pub fn set_segment(&self, segment: &ptrace::SegmentDescriptor) -> Result<()> {
        ptrace::set_thread_area(self.tid, segment)
            .map_err(Error::os(self.tid, "PTRACE_SET_THREAD_AREA"))
    }

    /// The critical section that the thread is in and must be found in again, if it
    /// cannot be aborted.
    pub fn critical_section(&self) -> Option<u64> {
        self.critical_section.map(|(_, section)| section)
    }

    /// Points the thread to its critical section again, if it has to be in one.
    pub(crate) fn enter_critical_section(&self) -> Result<()> {
        match self.critical_section {
            Some((place, section)) => self.write(RemoteAddr(place), &section.to_le_bytes()),
            None => Ok(()),
        }
    }

    fn words<const N: usize>(&self, at: u64) -> Option<[u64; N]> {
        let mut words = [[0u8; 8]; N];
        self.read(RemoteAddr(at), words.as_flattened_mut()).ok()?;
        Some(words.map(u64::from_le_bytes))
    }

    fn section(&self, at: u64) -> Option<Section> {
        let [first, start, len, abort] = self.words(at)?;
        Some(Section { flags: u32::try_from(first >> 32).ok()?, start, len, abort })
    }
}
