//! How fast a tree writes to its memory, found out without stopping it: pages are read twice.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Result};
use crate::task::Task;

const PAGE: u64 = 4096;
/// Pages that are compared: 64 MiB are copied.
const MAX_PAGES: usize = 16384;
/// When they are looked at again.
const LOOKS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];
/// Entries of /proc/PID/pagemap that are read at once.
const ENTRIES: usize = 1 << 16;
/// A page is in memory, or swapped out (`Documentation/admin-guide/mm/pagemap.rst`).
const THERE: u64 = 0b11 << 62;

/// What a tree does to its memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Writes {
    /// Bytes that it may write to and that are there.
    pub bytes: u64,
    /// So long after the beginning, such a share of them was written.
    pub shares: Vec<(Duration, f64)>,
}

impl Writes {
    /// Looks at the memory of tasks for half a second.
    ///
    /// # Errors
    /// If the first of them has ended.
    pub(super) fn sample(tasks: &[Task]) -> Result<Self> {
        let mut spaces = Vec::new();
        for (number, task) in tasks.iter().enumerate() {
            match pages(task.pid) {
                Ok(pages) => spaces.push((task.pid, pages)),
                Err(error) if number == 0 => return Err(error),
                // It has ended.
                Err(_) => {}
            }
        }
        let all: usize = spaces.iter().map(|(_, pages)| pages.len()).sum();
        let step = all.div_ceil(MAX_PAGES).max(1);
        let mut first = Vec::new();
        for (pid, pages) in &spaces {
            let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else { continue };
            for &page in pages.iter().step_by(step) {
                if let Some(bytes) = read(&memory, page) {
                    first.push((*pid, page, bytes));
                }
            }
        }
        let (start, mut shares) = (Instant::now(), Vec::new());
        for look in LOOKS {
            thread::sleep(look.saturating_sub(start.elapsed()));
            let time = start.elapsed();
            shares.push((time, changed(&first)));
        }
        Ok(Self { bytes: all as u64 * PAGE, shares })
    }

    /// The bytes that are written within `time`: evenly between looks.
    #[must_use]
    pub(super) fn within(&self, time: Duration) -> f64 {
        let mut before = (0.0, 0.0);
        for &(at, share) in &self.shares {
            let (at, share) = (at.as_secs_f64(), share.max(before.1));
            if time.as_secs_f64() <= at {
                let slope = (share - before.1) / (at - before.0).max(1e-9);
                let share = before.1 + slope * (time.as_secs_f64() - before.0);
                return share * as_float(self.bytes);
            }
            before = (at, share);
        }
        self.later(time.as_secs_f64()) * as_float(self.bytes)
    }

    /// The share that is written within a time after the last look.
    ///
    /// A program that writes one page after the other writes as many in each time. One that writes here and there meets
    /// pages again: were all of them as likely, `-ln(1 - share)` would grow with time, and with a power
    /// of it that is below 1 if some are written more often (Heaps' law).
    fn later(&self, time: f64) -> f64 {
        let [.., first, last] = self.shares.as_slice() else { return 0.0 };
        let [(t1, s1), (t2, s2)] =
            [first, last].map(|(at, share)| (at.as_secs_f64().max(1e-9), share.min(1.0 - 1e-9)));
        let ratio = time / t2;
        if s1 <= 0.0 || s2 / t2 >= s1 / t1 {
            return (s2 * ratio).min(1.0);
        }
        let met = |share: f64| -(1.0 - share).ln();
        let power = ((met(s2) / met(s1)).ln() / (t2 / t1).ln()).clamp(0.0, 1.0);
        1.0 - (-met(s2) * ratio.powf(power)).exp()
    }

    /// Bytes that are written in a second.
    #[must_use]
    pub(super) fn rate(&self) -> f64 {
        let last = self.shares.last().map(|&(at, share)| share / at.as_secs_f64().max(1e-9));
        last.unwrap_or(0.0) * as_float(self.bytes)
    }
}

#[allow(clippy::cast_precision_loss, reason = "an estimate")]
fn as_float(bytes: u64) -> f64 {
    bytes as f64
}

/// The share of pages that are not as they were.
fn changed(first: &[(i32, u64, Vec<u8>)]) -> f64 {
    let (mut changed, mut memory, mut of) = (0, None, 0);
    for (pid, page, bytes) in first {
        if of != *pid {
            memory = File::open(format!("/proc/{pid}/mem")).ok();
            of = *pid;
        }
        let now = memory.as_ref().and_then(|memory| read(memory, *page));
        changed += usize::from(now.is_some_and(|now| now != *bytes));
    }
    as_float(changed as u64) / as_float(first.len().max(1) as u64)
}

fn read(memory: &File, page: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(PAGE).unwrap_or(0)];
    memory.read_exact_at(&mut bytes, page).ok().map(|()| bytes)
}

/// The addresses of pages that a task may write to and that are there.
fn pages(pid: i32) -> Result<Vec<u64>> {
    let name = |what: &str| format!("/proc/{pid}/{what}");
    let maps = File::open(name("maps")).context(|| name("maps"))?;
    let pagemap = File::open(name("pagemap")).context(|| name("pagemap"))?;
    let mut found = Vec::new();
    // A file that is mapped may have any bytes in its name.
    for line in BufReader::new(maps).split(b'\n') {
        let line = line.context(|| name("maps"))?;
        let Some((start, end)) = written(&String::from_utf8_lossy(&line)) else { continue };
        let mut at = start;
        while at < end {
            let count = usize::try_from((end - at) / PAGE).unwrap_or(ENTRIES).min(ENTRIES);
            let mut entries = vec![0; count * 8];
            if pagemap.read_exact_at(&mut entries, at / PAGE * 8).is_err() {
                break;
            }
            let there = |entry: &[u8]| {
                let entry = entry.try_into().map(u64::from_ne_bytes).unwrap_or(0);
                entry & THERE != 0
            };
            let pages = (at..end).step_by(4096).zip(entries.chunks(8));
            found.extend(pages.filter(|(_, entry)| there(entry)).map(|(page, _)| page));
            at += count as u64 * PAGE;
        }
    }
    Ok(found)
}

/// The mapping that a line of /proc/PID/maps is of, if its pages would be sent when they are
/// written: not those of a file that is shared.
fn written(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let how = words.next()?;
    let path = words.nth(3).unwrap_or_default();
    let in_memory = ["/dev/zero", "/memfd:", "/SYSV"].iter().any(|it| path.starts_with(it));
    let is_file = how.ends_with('s') && path.starts_with('/') && !in_memory;
    let special = path.starts_with("[v");
    let number = |text| u64::from_str_radix(text, 16).ok();
    (how.contains('w') && !is_file && !special).then(|| number(start).zip(number(end))).flatten()
}

/// Whether a process is in another user namespace than this one. One that has ended is in none.
#[must_use]
pub(super) fn has_own_users(pid: i32) -> bool {
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).ok();
    of(&pid.to_string()).is_some_and(|own| Some(own) != of("self"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn mappings_whose_pages_are_sent() {
        let sent = "7f00-9f00 rw-p 00000000 00:00 0 [heap]";
        assert_eq!(written(sent), Some((0x7f00, 0x9f00)));
        assert!(written("7f00-9f00 rw-s 00000000 00:01 9 /memfd:x (deleted)").is_some());
        for line in [
            "7f00-9f00 r--p 00000000 00:00 0",
            "7f00-9f00 rw-s 00000000 fe:01 9 /var/lib/data",
            "7f00-9f00 rw-p 00000000 00:00 0 [vvar]",
            "",
        ] {
            assert_eq!(written(line), None, "{line}");
        }
    }

    #[test]
    fn programs_have_any_bytes_in_their_names() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;

        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(OsStr::from_bytes(b"a \xff\nb"));
        // By another process: what this one has open for writing is open in what other tests start, too (`ETXTBSY`).
        let copy = std::process::Command::new("cp").arg("/bin/sleep").arg(&program).status();
        assert!(copy.unwrap().success());
        let mut child = std::process::Command::new(&program).arg("1000").spawn().unwrap();
        let task = Task::find(child.id().cast_signed()).unwrap();
        let pages = pages(task.pid);
        let shape = crate::shape::Shape::of(&[task]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!pages.unwrap().is_empty());
        assert_eq!(shape.tasks, 1, "{shape:?}");
    }

    #[test]
    fn what_is_written_is_seen() {
        let mut memory = vec![1_u8; 8 << 20];
        let writes = thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let memory = &mut memory;
            scope.spawn(move || {
                let mut value = 0_u8;
                while stopped.try_recv().is_err() {
                    value = value.wrapping_add(1);
                    memory.iter_mut().step_by(4096).for_each(|byte| *byte = value);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let writes = Writes::sample(&[Task::this().unwrap()]).unwrap();
            stop.send(()).unwrap();
            writes
        });
        assert!(writes.bytes >= 8 << 20, "{writes:?}");
        assert!(writes.rate() > f64::from(4 << 20), "{writes:?}");
    }

    #[test]
    fn shares_grow_on() {
        let shares = vec![(Duration::from_secs(1), 0.25), (Duration::from_secs(2), 0.5)];
        let writes = Writes { bytes: 4000, shares };
        let within = |millis| writes.within(Duration::from_millis(millis)).round();
        assert_eq!([within(500), within(1000), within(1500)], [500.0, 1000.0, 1500.0]);
        assert_eq!([within(3000), within(9000)], [3000.0, 4000.0]);
        assert_eq!(writes.rate().round(), 1000.0);
    }

    /// Pages that are written at random, half of them in a second, and pages of which few are written often.
    #[test]
    fn pages_that_are_met_again_count_once() {
        let at = |millis, share| (Duration::from_millis(millis), share);
        let half_life = |time: f64| 1.0 - 0.5_f64.powf(time);
        let shares = vec![at(100, half_life(0.1)), at(500, half_life(0.5))];
        let random = Writes { bytes: 1000, shares };
        for time in [1.0, 2.0, 8.0] {
            let expected = half_life(time) * 1000.0;
            assert!((random.within(Duration::from_secs_f64(time)) - expected).abs() < 1.0);
        }
        let often = Writes { bytes: 1000, shares: vec![at(100, 0.04), at(500, 0.08)] };
        let within = often.within(Duration::from_secs(8));
        assert!(within > 80.0 && within < 300.0, "{within}");
        assert_eq!(
            Writes { bytes: 1000, shares: vec![at(100, 0.0), at(500, 0.0)] }.within(Duration::MAX),
            0.0
        );
    }
}
