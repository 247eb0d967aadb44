//! What a pager sees of a task's memory that no userfaultfd tells it: two kinds of advice which
//! say that what is missing is not to come.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, openat};
use torpor_sys::vm::{PageRegion, Scan, page, scan};
use torpor_tracee::parse_maps;

use super::pair::pid_of;
use crate::error::{Context, Error, Result};

/// Runs of guard pages that one look finds; more of them take another one.
const RUNS: usize = 16;

/// The memory of a task that was restored. It stays that one's, whoever has its pid later.
#[derive(Debug)]
pub(super) struct Sight {
    /// `/proc/PID`.
    dir: OwnedFd,
    pagemap: File,
}

impl Sight {
    /// Looks at the task with this pidfd.
    ///
    /// # Errors
    /// If the task is gone; if this process may not look at its memory.
    pub(super) fn of(task: &OwnedFd) -> Result<Self> {
        let pid = pid_of(task).ok_or_else(|| Error::invalid("a task", "is gone"))?;
        let what = || format!("looking at the memory of {pid}");
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).context(what)?;
        let pagemap = open(&dir, "pagemap").context(what)?;
        Ok(Sight { dir, pagemap })
    }

    /// The guard pages (`MADV_GUARD_INSTALL`) in a range. The kernel counts them as missing: a
    /// page that is copied to where one is takes its place.
    pub(super) fn guards(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let mut what = Scan {
            start: range.start,
            end: range.end,
            any_of: page::IS_GUARD,
            report: page::IS_GUARD,
            ..Scan::default()
        };
        let mut regions = [PageRegion::default(); RUNS];
        while what.start < what.end {
            // A kernel that cannot tell them, and a task that is gone, show none.
            let Ok((n, walked)) = scan(&self.pagemap, &what, &mut regions) else { break };
            found.extend(regions[..n].iter().map(|region| region.start..region.end));
            what.start = walked;
        }
        found
    }

    /// The mappings that children find empty (`MADV_WIPEONFORK`).
    pub(super) fn wiped_on_fork(&self) -> Vec<Range<u64>> {
        let mut text = String::new();
        // A task that has just forked and is gone has no mappings.
        match open(&self.dir, "smaps").map(|mut file| file.read_to_string(&mut text)) {
            Ok(Ok(_)) => wiped_on_fork(&text),
            _ => Vec::new(),
        }
    }
}

fn open(dir: &OwnedFd, name: &str) -> rustix::io::Result<File> {
    openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

fn wiped_on_fork(smaps: &str) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.extend(mapping.take().filter(|_| flags.split_whitespace().any(|f| f == "wf")));
        } else if !line.starts_with(|c: char| c.is_ascii_uppercase()) {
            mapping = parse_maps(line).pop().map(|mapping| mapping.start..mapping.end);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn mappings_that_are_wiped_on_fork() {
        let smaps = "\
1000-3000 rw-p 00000000 00:00 0
Size:                  8 kB
VmFlags: rd wr mr mw me ac sd um
3000-4000 rw-p 00000000 00:00 0
Size:                  4 kB
VmFlags: rd wr mr mw me ac wf sd um
7ffd5000-7ffd7000 r-xp 00000000 00:00 0                                  [vdso]
Size:                  8 kB
VmFlags: rd ex mr mw me de sd
";
        let found = wiped_on_fork(smaps);
        assert_eq!((found.len(), found.first()), (1, Some(&(0x3000..0x4000))));
    }
}
