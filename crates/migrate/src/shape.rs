//! What a tree has that a dump and a restore work on, counted from outside.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_kernel::mountinfo;

use crate::task::Task;

/// What each dump and each restore takes: 7.9 to 10.7 and 4.5 to 7.0 ms of a small process
/// (README.md), less what its parts below take.
const FIXED: Duration = Duration::from_micros(5000);
/// Each of 500 processes takes 0.45 to 0.82 ms (README.md), with what it has.
const TASK: Duration = Duration::from_micros(300);
const THREAD: Duration = Duration::from_micros(100);
const MAPPING: Duration = Duration::from_micros(10);
const FILE: Duration = Duration::from_micros(20);
/// Queues, options and numbers are read and set one by one.
const SOCKET: Duration = Duration::from_micros(200);
/// Bytes of files in memory that are put into an archive in a microsecond. The packer alone takes 115 of a table as sysbench
/// makes them (a program that others do not disturb, 2026-11-28), and 150 of programs. gzip(1) had 94 of that table, and 62 within
/// a dump of a database, beside tar(1) and what else the machine did: two thirds.
const ARCHIVED: u64 = 77;
/// The same where they are stored and not packed.
const STORED: u64 = 700;

/// How much there is of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Processes.
    pub tasks: u32,
    /// Threads of theirs, all but the first of each.
    pub threads: u32,
    /// Mappings.
    pub mappings: u32,
    /// Open files that are no sockets.
    pub files: u32,
    /// Open sockets.
    pub sockets: u32,
    /// Bytes that are in memory and would be sent.
    pub memory: u64,
    /// Bytes of files in memory, which go along: what is in file systems of the kind tmpfs.
    pub files_in_memory: u64,
    /// Whether a dump stores these, and does not pack them.
    pub stores_files: bool,
}

impl Shape {
    /// The shape of tasks, the root first; those that have ended count for nothing.
    #[must_use]
    pub(crate) fn of(tasks: &[Task]) -> Self {
        let files_in_memory = tasks.first().map_or(0, |root| files_in_memory(root.pid));
        let mut all = Self { files_in_memory, ..Self::default() };
        for task in tasks {
            let name = |what: &str| format!("/proc/{}/{what}", task.pid);
            // It begins with the program's name, which may have any bytes.
            let Ok(status) = fs::read(name("status")) else { continue };
            let status = String::from_utf8_lossy(&status);
            all.tasks += 1;
            all.threads += count(number(&status, "Threads:")).saturating_sub(1);
            all.memory += (number(&status, "RssAnon:") + number(&status, "RssShmem:")) << 10;
            let maps = fs::read(name("maps")).unwrap_or_default();
            all.mappings += count(maps.iter().filter(|&&byte| byte == b'\n').count() as u64);
            for file in fs::read_dir(name("fd")).into_iter().flatten().flatten() {
                match fs::read_link(file.path()) {
                    Ok(to) if to.to_string_lossy().starts_with("socket:") => all.sockets += 1,
                    _ => all.files += 1,
                }
            }
        }
        all
    }

    /// What a dump or a restore of all but memory takes on an idle machine, roughly: the relations
    /// between trees count, and [`crate::experience`] finds out the rest.
    #[must_use]
    pub(crate) fn cost(&self) -> Duration {
        FIXED
            + TASK * self.tasks
            + THREAD * self.threads
            + MAPPING * self.mappings
            + FILE * self.files
            + SOCKET * self.sockets
            + self.archive()
    }

    /// What of that the files in memory take.
    #[must_use]
    pub(crate) fn archive(&self) -> Duration {
        let rate = if self.stores_files { STORED } else { ARCHIVED };
        Duration::from_micros(self.files_in_memory / rate)
    }
}

/// Bytes of files in memory that a process sees and others do not.
fn files_in_memory(pid: i32) -> u64 {
    let used = |place: &PathBuf| {
        let there = rustix::fs::statvfs(place);
        there.map_or(0, |it| it.f_blocks.saturating_sub(it.f_bfree).saturating_mul(it.f_frsize))
    };
    file_systems(pid).iter().map(used).sum()
}

/// Where this process finds the file systems in memory that another one sees and others do not: where it has mounts of its
/// own.
pub(crate) fn file_systems(pid: i32) -> Vec<PathBuf> {
    let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    if mounts(&pid.to_string()) == mounts("self") {
        return Vec::new();
    }
    let mut seen = HashSet::new();
    let all = mountinfo::of(pid).unwrap_or_default();
    // A part of a file system is one that somebody else has.
    let whole = all
        .iter()
        .filter(|it| it.fs == "tmpfs" && it.root == Path::new("/") && seen.insert(it.dev));
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let place = |place: &Path| root.join(place.strip_prefix("/").unwrap_or(place));
    whole.map(|it| place(&it.mountpoint)).collect()
}

fn count(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The number behind a name in `/proc/PID/status`.
fn number(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use super::*;

    /// Has a child answer, so that it has what it will have.
    fn echo(mut to: impl Write, mut from: impl Read) {
        to.write_all(b".").unwrap();
        from.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn more_of_everything_costs_more() {
        let mut cat = Command::new("cat");
        let mut plain = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        echo(plain.stdin.as_mut().unwrap(), plain.stdout.as_mut().unwrap());
        let (near, far) = UnixStream::pair().unwrap();
        let (input, out) = (OwnedFd::from(far.try_clone().unwrap()), OwnedFd::from(far));
        let mut talking = Command::new("cat").stdin(input).stdout(out).spawn().unwrap();
        echo(&near, &near);
        let of = |pids: &[u32]| {
            let find = |pid: &u32| Task::find(pid.cast_signed()).unwrap();
            Shape::of(&pids.iter().map(find).collect::<Vec<_>>())
        };
        let (first, second) = (of(&[plain.id()]), of(&[talking.id()]));
        let both = of(&[plain.id(), talking.id()]);
        for child in [&mut plain, &mut talking] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((first.tasks, first.threads, first.sockets), (1, 0, 0), "{first:?}");
        assert_eq!((second.files, second.sockets), (first.files - 2, 2), "{second:?}");
        assert!(first.mappings > 3 && first.memory > 0, "{first:?}");
        assert_eq!((both.tasks, both.files), (2, first.files + second.files), "{both:?}");
        assert!(second.cost() > first.cost() && both.cost() > second.cost());
        assert_eq!(first.files_in_memory, 0, "those of this host are not its own");
    }

    /// A process with mounts of its own, one of them with a file in memory.
    #[test]
    fn files_in_memory_count() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        const MIB: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let script =
            "mount -t tmpfs none \"$1\" && head --bytes=3M /dev/zero >\"$1/file\" && exec cat";
        let mut apart = Command::new("unshare");
        apart.args(["--mount", "sh", "-c", script, "sh"]).arg(dir.path());
        let mut apart = apart.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        echo(apart.stdin.as_mut().unwrap(), apart.stdout.as_mut().unwrap());
        let shape = Shape::of(&[Task::find(apart.id().cast_signed()).unwrap()]);
        apart.kill().unwrap();
        apart.wait().unwrap();
        assert!(shape.files_in_memory >= 3 * MIB, "{shape:?}");
        assert!(shape.archive() >= Duration::from_micros(3 * MIB / ARCHIVED));
        assert!(shape.cost() > shape.archive());
        let stored = Shape { stores_files: true, ..shape };
        assert!(stored.archive() < shape.archive() && stored.cost() < shape.cost());
    }
}
