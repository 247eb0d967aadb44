//! The process that reads images, as the kernel shows it while it does: it has nothing but their bytes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use torpor_images::proto::FileEntry;
use torpor_images::{ImageDir, kind};

mod sleeper;

use sleeper::Sleeper;

/// Entries that a reader is busy with for a while.
const MANY: u32 = 100_000;

/// A process that is stopped while it reads images.
struct Reader {
    supervisor: Child,
    pid: Pid,
}

impl Reader {
    /// Has the images in `dir` read, and stops the process that reads them when it has given up its
    /// rights.
    fn of(dir: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
        command.args(["image", "audit"]).arg(dir).env("HOME", "/nonexistent");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut supervisor = command.spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", supervisor.id());
        loop {
            let pids = fs::read_to_string(&children).unwrap_or_default();
            for pid in pids.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()) {
                let status = lines(pid, "status");
                let is_filtered = status.get("Seccomp").is_some_and(|mode| mode == "2");
                if is_filtered && status["Name"] == "torpor-reader" {
                    let pid = Pid::from_raw(pid).unwrap();
                    kill_process(pid, Signal::STOP).unwrap();
                    return Self { supervisor, pid };
                }
            }
            if supervisor.try_wait().unwrap().is_some() {
                panic!("the images were read, and by no process whose system calls are filtered");
            }
        }
    }

    /// Ends it, and returns what the supervisor says then.
    fn end(self) -> String {
        kill_process(self.pid, Signal::KILL).unwrap();
        let output = self.supervisor.wait_with_output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }
}

/// A file of /proc with a name and a value in each line; none if the process is gone.
fn lines(pid: i32, file: &str) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let pair = |line: &str| {
        let (name, value) = line.split_once(":\t")?;
        Some((name.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    text.lines().filter_map(pair).collect()
}

/// A soft limit by its name in proc_pid_limits(5).
fn limit(pid: i32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let rest = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    rest.split_whitespace().next().unwrap().parse().expect("it is limited")
}

#[test]
fn who_reads_images_has_no_rights() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let dir = ImageDir::open(task.dir.path()).unwrap();
    let mut files: Vec<FileEntry> = dir.read_all(kind::FILES, 0).unwrap();
    let entry = files[0].clone();
    files.extend((1_000_000..1_000_000 + MANY).map(|id| {
        let mut file = FileEntry { id, ..entry.clone() };
        file.reg.as_mut().unwrap().id = id;
        file
    }));
    dir.write_all(kind::FILES, 0, &files).unwrap();

    let reader = Reader::of(task.dir.path());
    let pid = reader.pid.as_raw_nonzero().get();
    let status = lines(pid, "status");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status[set], 16), Ok(0), "{set}");
    }
    for ids in ["Uid", "Gid"] {
        assert_eq!(status[ids], "65534 65534 65534 65534", "{ids}");
    }
    assert_eq!((&*status["Groups"], &*status["NoNewPrivs"]), ("", "1"));
    for fd in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let file = fs::read_link(fd.unwrap().path()).unwrap();
        let file = file.to_str().unwrap();
        assert!(["/memfd:", "socket:["].iter().any(|own| file.starts_with(own)), "{file}");
    }
    let sizes =
        fs::read_dir(task.dir.path()).unwrap().map(|f| f.unwrap().metadata().unwrap().len());
    let bytes: u64 = sizes.sum();
    let seconds = limit(pid, "Max cpu time");
    assert!(seconds <= 60 + 4 * (bytes >> 20), "{seconds} seconds for {bytes} bytes");
    let memory = limit(pid, "Max data size");
    assert!(memory <= (512 << 20) + 64 * bytes, "{memory} bytes of memory for {bytes} bytes");

    let said = reader.end();
    assert!(said.contains("the process that reads the images was ended by signal 9"), "{said}");
}
