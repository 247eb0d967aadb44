//! `/proc/PID`: what the kernel says about a task in text.

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, PidfdFlags};

use crate::error::{Context, Error, Result};
use crate::parallel;

static READS: AtomicU64 = AtomicU64::new(0);

/// How many files, links and directories of tasks this process has read or opened here.
pub fn reads() -> u64 {
    READS.load(Ordering::Relaxed)
}

/// The path of a file of a process, which is read now.
fn path_of(pid: i32, name: &str) -> String {
    READS.fetch_add(1, Ordering::Relaxed);
    format!("/proc/{pid}/{name}")
}

/// Reads `/proc/PID/NAME`; a task that is gone is [`Error::Gone`].
///
/// # Errors
/// [`Error::Gone`] if the task is gone, [`Error::Os`] if the file is not there or may not be read.
pub fn read(pid: i32, name: &str) -> Result<String> {
    let text = bytes(pid, name)?;
    Ok(String::from_utf8(text)
        .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
}

/// As [`read`], without decoding.
///
/// # Errors
/// As [`read`].
pub fn bytes(pid: i32, name: &str) -> Result<Vec<u8>> {
    let path = path_of(pid, name);
    read_whole(&path).map_err(|e| gone_or(pid, path, e))
}

/// Reads a file that does not say how long it is, in as few calls as the kernel allows:
/// most of these files fit the first one.
fn read_whole(path: &str) -> io::Result<Vec<u8>> {
    const ROOM: usize = 16 * 1024;
    let file = fs::File::open(path)?;
    let mut all = Vec::with_capacity(ROOM);
    loop {
        if all.capacity() - all.len() < ROOM / 2 {
            all.reserve(all.len());
        }
        let more = || rustix::io::read(&file, rustix::buffer::spare_capacity(&mut all));
        if rustix::io::retry_on_intr(more)? == 0 {
            // Some of them are kept for each of thousands of threads.
            all.shrink_to_fit();
            return Ok(all);
        }
    }
}

fn gone_or(pid: i32, path: String, e: io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone { pid },
        Some(libc::ENOENT) if path.contains("/task/") => Error::Gone { pid },
        Some(libc::ENOENT) if !fs::exists(format!("/proc/{pid}")).unwrap_or(true) => {
            Error::Gone { pid }
        }
        _ => Error::Os { what: format!("read {path}"), source: e },
    }
}

/// The numbers in the names of a directory of `/proc/PID` (`fd`, `task`), sorted.
///
/// # Errors
/// [`Error::Gone`] if the task is gone, [`Error::Os`] if the directory may not be read.
pub fn numbers(pid: i32, dir: &str) -> Result<Vec<i32>> {
    let path = path_of(pid, dir);
    let mut all = Vec::new();
    for entry in fs::read_dir(&path).map_err(|e| gone_or(pid, path.clone(), e))? {
        let entry = entry.map_err(|e| gone_or(pid, path.clone(), e))?;
        if let Some(number) = entry.file_name().to_str().and_then(|n| n.parse().ok()) {
            all.push(number);
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// Whether nothing is left of a process but its exit status. A first thread may end before others.
pub fn is_over(pid: i32, stat: &Stat) -> bool {
    stat.has_ended() && numbers(pid, "task").map_or(0, |threads| threads.len()) <= 1
}

/// The processes that `/proc` shows, in no order; none where it is not there.
pub fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whether a process is `root` or descends from it; none if it has ended, or one between the two meanwhile.
#[must_use]
pub fn descends(pid: i32, root: i32) -> Option<bool> {
    if stat(pid).ok()?.has_ended() {
        return None;
    }
    let mut at = pid;
    while at != root && at > 1 {
        at = stat(at).ok()?.ppid;
    }
    Some(at == root)
}

/// The lines of `/proc/locks`, in no order, some of them more than once: all of a process that is stopped are there.
///
/// The kernel gives the list in pieces of a page, and the next one from where it would be if nobody had taken or left a
/// lock meanwhile, so that some are left out. A list that does not come at once is read again until nothing has changed.
///
/// # Errors
/// [`Error::Os`] if the file cannot be read.
pub fn locks() -> Result<String> {
    /// Less than a page, by more than a line: the kernel had room for more, if there had been any.
    const AT_ONCE: usize = 4096 - 512;
    const READINGS: usize = 8;
    let what = || "read /proc/locks".to_owned();
    let (mut all, mut last) = (Vec::new(), Vec::new());
    for _ in 0..READINGS {
        let mut file = fs::File::open("/proc/locks").context(what)?;
        let mut now = vec![0; 1 << 16];
        let first = file.read(&mut now).context(what)?;
        now.truncate(first);
        if first > AT_ONCE {
            file.read_to_end(&mut now).context(what)?;
        }
        all.extend_from_slice(&now);
        if first <= AT_ONCE || now == last {
            break;
        }
        last = now;
    }
    Ok(String::from_utf8_lossy(&all).into_owned())
}

/// How many descriptors a process has open; `None` if the kernel does not tell (before Linux 6.2).
///
/// # Errors
/// [`Error::Gone`] if the task is gone, [`Error::Os`] if the directory may not be read.
pub fn open_descriptors(pid: i32) -> Result<Option<u64>> {
    let path = path_of(pid, "fd");
    let stat = fs::metadata(&path).map_err(|e| gone_or(pid, path, e))?;
    Ok(Some(stat.len()).filter(|&len| len != 0))
}

/// The children of all threads of a process, asked by at most `workers` threads.
///
/// # Errors
/// [`Error::Os`] if a list may not be read; a thread that is gone has no children.
pub fn children(pid: i32, threads: &[i32], workers: usize) -> Result<Vec<i32>> {
    let all = parallel::map(threads, workers, |tid| {
        match read(pid, &format!("task/{tid}/children")) {
            Ok(text) => Ok(text.split_ascii_whitespace().filter_map(|p| p.parse().ok()).collect()),
            // A thread that ended meanwhile leaves its children to another one.
            Err(Error::Gone { .. }) => Ok(Vec::new()),
            Err(Error::Os { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Vec::new())
            }
            Err(e) => Err(e),
        }
    })?;
    Ok(all.concat())
}

/// The children that a process has now, of whichever of its threads: none if it is gone, or nobody may look.
pub fn children_of(pid: i32) -> Vec<i32> {
    numbers(pid, "task").and_then(|threads| children(pid, &threads, 1)).unwrap_or_default()
}

/// `/proc/PID/stat`, as far as it is used (proc_pid_stat(5)).
#[derive(Debug, Clone, Default)]
#[allow(missing_docs)]
pub struct Stat {
    pub comm: Vec<u8>,
    pub state: char,
    pub ppid: i32,
    pub pgid: i32,
    pub sid: i32,
    pub tty_nr: i32,
    pub tpgid: i32,
    pub flags: u32,
    /// What it has used of processors, in ticks.
    pub used: u64,
    pub start_time: u64,
    pub start_code: u64,
    pub end_code: u64,
    pub start_stack: u64,
    pub start_data: u64,
    pub end_data: u64,
    pub exit_signal: i32,
    pub start_brk: u64,
    pub arg_start: u64,
    pub arg_end: u64,
    pub env_start: u64,
    pub env_end: u64,
    pub exit_code: i32,
}

impl Stat {
    /// Whether it has ended: nobody has waited for it yet.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether it is about to end (`PF_EXITING` of linux/sched.h).
    pub fn is_ending(&self) -> bool {
        self.flags & 0x4 != 0
    }

    /// Whether it is the kernel's own, and has no program (`PF_KTHREAD` of linux/sched.h).
    pub fn is_of_kernel(&self) -> bool {
        self.flags & 0x20_0000 != 0
    }

    /// Whether it is a thread of the kernel in a process with a program, which works for that: of io_uring, for
    /// example (`PF_IO_WORKER` and, from Linux 6.4 on, `PF_USER_WORKER` of linux/sched.h).
    pub fn is_worker(&self) -> bool {
        self.flags & (0x10 | 0x4000) != 0
    }
}

/// Reads `/proc/PID/stat`.
///
/// # Errors
/// As [`read`], and [`Error::Invalid`] for a file of another layout.
pub fn stat(pid: i32) -> Result<Stat> {
    parse_stat(&bytes(pid, "stat")?)
        .ok_or_else(|| Error::invalid(format!("/proc/{pid}/stat"), "unknown layout"))
}

/// Reads `/proc/PID/task/TID/stat`.
///
/// # Errors
/// As [`stat`].
pub fn thread_stat(pid: i32, tid: i32) -> Result<Stat> {
    let name = format!("task/{tid}/stat");
    parse_stat(&bytes(pid, &name)?)
        .ok_or_else(|| Error::invalid(format!("/proc/{pid}/{name}"), "unknown layout"))
}

fn parse_stat(text: &[u8]) -> Option<Stat> {
    // The name may contain anything, parentheses and blanks too: its end is the last one.
    let end = text.iter().rposition(|&b| b == b')')?;
    let start = text.iter().position(|&b| b == b'(')?;
    let comm = text.get(start + 1..end)?.to_vec();
    let tail = std::str::from_utf8(&text[end + 1..]).ok()?;
    let field: Vec<&str> = tail.split_ascii_whitespace().collect();
    // Field N of the manual page is element N - 3 here.
    let number = |n: usize| field.get(n - 3).and_then(|f| f.parse::<i64>().ok());
    let address = |n: usize| field.get(n - 3).and_then(|f| f.parse::<u64>().ok());
    let int = |n: usize| number(n).and_then(|v| i32::try_from(v).ok());
    Some(Stat {
        comm,
        state: field.first()?.chars().next()?,
        ppid: int(4)?,
        pgid: int(5)?,
        sid: int(6)?,
        tty_nr: int(7)?,
        tpgid: int(8)?,
        flags: u32::try_from(number(9)?).ok()?,
        used: address(14)?.checked_add(address(15)?)?,
        start_time: address(22)?,
        start_code: address(26)?,
        end_code: address(27)?,
        start_stack: address(28)?,
        exit_signal: int(38)?,
        start_data: address(45)?,
        end_data: address(46)?,
        start_brk: address(47)?,
        arg_start: address(48)?,
        arg_end: address(49)?,
        env_start: address(50)?,
        env_end: address(51)?,
        exit_code: int(52)?,
    })
}

/// `/proc/PID/status` as key and value.
#[derive(Debug, Clone, Default)]
pub struct Status {
    text: String,
    /// Where each line starts, its key ends, and it ends.
    lines: Vec<[usize; 3]>,
}

/// Reads `/proc/PID/status`.
///
/// # Errors
/// As [`read`].
pub fn status(pid: i32) -> Result<Status> {
    read(pid, "status").map(Status::parse)
}

/// Reads the same of a thread.
///
/// # Errors
/// As [`read`].
pub fn thread_status(pid: i32, tid: i32) -> Result<Status> {
    read(pid, &format!("task/{tid}/status")).map(Status::parse)
}

impl Status {
    /// Takes the text of the file.
    pub fn parse(text: impl Into<String>) -> Self {
        let text = text.into();
        let mut lines = Vec::with_capacity(64);
        let mut start = 0;
        for line in text.split_inclusive('\n') {
            let end = start + line.len();
            lines.extend(line.find(':').map(|colon| [start, start + colon, end]));
            start = end;
        }
        Status { text, lines }
    }

    /// The value of a line.
    pub fn get(&self, key: &str) -> Option<&str> {
        let line = self.lines.iter().find(|[start, colon, _]| self.text[*start..*colon] == *key);
        line.map(|&[_, colon, end]| self.text[colon + 1..end].trim())
    }

    /// The blank-separated numbers of a line, in base `radix`.
    pub fn numbers(&self, key: &str, radix: u32) -> Vec<u64> {
        self.get(key)
            .unwrap_or_default()
            .split_ascii_whitespace()
            .filter_map(|v| u64::from_str_radix(v, radix).ok())
            .collect()
    }

    /// Whether a kill is pending: one that is frozen does not end of it yet.
    pub fn is_killed(&self) -> bool {
        self.has_pending(libc::SIGKILL)
    }

    /// Whether a signal waits for the task, or for its process.
    pub fn has_pending(&self, signal: i32) -> bool {
        let is_in = |set| self.number(set, 16).is_some_and(|set| set >> (signal - 1) & 1 == 1);
        ["SigPnd", "ShdPnd"].into_iter().any(is_in)
    }

    /// The first number of a line.
    pub fn number(&self, key: &str, radix: u32) -> Option<u64> {
        self.numbers(key, radix).first().copied()
    }

    /// The pids of the task, outermost namespace first (`NSpid`).
    pub fn ns_pids(&self) -> Vec<i32> {
        self.in_each_ns("NSpid")
    }

    /// The numbers of a line such as `NSpgid`: one for each pid namespace that the task is in,
    /// the outermost first.
    pub fn in_each_ns(&self, key: &str) -> Vec<i32> {
        self.numbers(key, 10).into_iter().filter_map(|p| i32::try_from(p).ok()).collect()
    }
}

/// The inode number of a namespace of a task, e.g. `mnt`, `pid_for_children`.
///
/// # Errors
/// [`Error::Gone`] if the task is gone, [`Error::Os`] if its namespaces may not be looked at or
/// this kernel has none of the kind.
pub fn ns_inode(pid: i32, name: &str) -> Result<u64> {
    let path = path_of(pid, &format!("ns/{name}"));
    let link = fs::read_link(&path).map_err(|e| gone_or(pid, path.clone(), e))?;
    link.to_str()
        .and_then(|l| l.split_once('['))
        .and_then(|(_, n)| n.trim_end_matches(']').parse().ok())
        .ok_or_else(|| Error::invalid(path, format!("points to {}", link.display())))
}

/// Opens `/proc/PID/NAME` read-only.
///
/// # Errors
/// As [`read`].
pub fn open(pid: i32, name: &str) -> Result<fs::File> {
    let path = path_of(pid, name);
    fs::File::open(&path).map_err(|e| gone_or(pid, path, e))
}

/// Opens a process as a file (pidfd_open(2)).
///
/// # Errors
/// If the task is gone.
pub fn pidfd(pid: i32) -> Result<OwnedFd> {
    open_pidfd(pid, PidfdFlags::empty())
}

/// Opens a thread as a file, by which its process can be signalled and its descriptors be
/// fetched also when its leader has ended.
///
/// # Errors
/// Gone; `EINVAL` before Linux 6.9.
pub fn pidfd_of_thread(tid: i32) -> Result<OwnedFd> {
    /// `PIDFD_THREAD` of linux/pidfd.h.
    const THREAD: u32 = libc::O_EXCL.cast_unsigned();
    open_pidfd(tid, PidfdFlags::from_bits_retain(THREAD))
}

fn open_pidfd(pid: i32, flags: PidfdFlags) -> Result<OwnedFd> {
    let raw = Pid::from_raw(pid).ok_or(Error::Gone { pid })?;
    match rustix::process::pidfd_open(raw, flags) {
        Ok(fd) => Ok(fd),
        Err(rustix::io::Errno::SRCH) => Err(Error::Gone { pid }),
        Err(e) => Err(e).context(|| format!("pidfd_open {pid}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::AtomicBool;

    use rustix::fs::FlockOperation;

    use super::*;

    #[test]
    fn reads_this_process() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let stat = stat(pid).unwrap();
        // This is the state of the first thread, which may also wait for a disk.
        assert!("RSD".contains(stat.state));
        assert!(stat.arg_end > stat.arg_start);
        assert_eq!(status(pid).unwrap().ns_pids().first(), Some(&pid));
        assert!(numbers(pid, "fd").unwrap().contains(&0));
        assert!(ns_inode(pid, "mnt").unwrap() > 0);
    }

    #[test]
    fn children_of_all_threads_are_found() {
        let own = i32::try_from(std::process::id()).unwrap();
        let start = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mut here = start();
        // What a thread has started is its own child until it ends.
        let (mut there, all) =
            std::thread::spawn(move || (start(), children_of(own))).join().unwrap();
        for child in [&mut here, &mut there] {
            let pid = i32::try_from(child.id()).unwrap();
            assert!(all.contains(&pid), "{pid} is not among {all:?}");
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(children_of(pid).is_empty());
        }
    }

    #[test]
    fn no_lock_is_left_out_while_others_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let locked = |name: String| {
            let file = fs::File::create(dir.path().join(name)).unwrap();
            rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
            file
        };
        // The last one is the first in the list. All others are more than a page.
        let own: Vec<fs::File> = (0..150).map(|n| locked(format!("own-{n}"))).collect();
        let inodes: Vec<u64> = own.iter().map(|file| file.metadata().unwrap().ino()).collect();
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    drop((0..40).map(|n| locked(format!("other-{n}"))).collect::<Vec<_>>());
                }
            });
            let lists: Vec<String> = (0..400).map(|_| locks().unwrap()).collect();
            ends.store(true, Ordering::Relaxed);
            for list in lists {
                let missing = inodes.iter().find(|inode| !list.contains(&format!(":{inode} ")));
                assert_eq!(missing, None);
            }
        });
    }

    #[test]
    fn a_name_with_parentheses_does_not_confuse() {
        let tail = "S 1 2 3 0 -1 4194304 77 0 0 0 5 6 0 0 20 0 1 0 179782 3014656 425 18446744073709551615 1 2 3 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 4 5 6 7 8 9 10 0";
        let stat = parse_stat(format!("12 (a) b (c)) {tail}").as_bytes()).unwrap();
        assert_eq!(stat.comm, b"a) b (c)");
        assert_eq!((stat.ppid, stat.used, stat.start_code, stat.env_end), (1, 11, 1, 10));
    }

    #[test]
    fn threads_of_the_kernel_and_those_that_end_are_told_apart() {
        let stat = |flags: u32| Stat { flags, ..stat(1).unwrap() };
        let [of_kernel, ends] = [stat(0x20_8040), stat(0x40_0104)];
        assert!(of_kernel.is_of_kernel() && !of_kernel.is_ending());
        assert!(!ends.is_of_kernel() && ends.is_ending());
    }

    #[test]
    fn a_task_that_does_not_exist_is_gone() {
        assert!(matches!(stat(i32::MAX), Err(Error::Gone { .. })));
    }
}
