//! What jobs that are over must not leave on the machine.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::{Daemon, PATIENCE, shepherds, until};

/// Waits until nothing is left of the jobs of a daemon, which are all over: processes, control groups, mounts, checkpoints, and
/// locks of connections that have one of these ports.
pub fn assert_none(daemon: &Daemon, ports: &[u16]) {
    let begun = Instant::now();
    loop {
        let left = left(&daemon.data(), ports);
        if left.is_empty() {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "left behind: {left:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn left(data: &Path, ports: &[u16]) -> Vec<String> {
    let mut left: Vec<String> =
        shepherds(data).iter().map(|pid| format!("shepherd {pid}")).collect();
    left.extend(processes(data));
    for dir in entries(&data.join("jobs")) {
        let shown = |path: PathBuf| path.display().to_string();
        left.extend(groups(&dir).into_iter().map(shown));
        let is_saved = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("checkpoint") || dir.ends_with("discarded")
        };
        left.extend(entries(&dir).into_iter().filter(is_saved).map(shown));
    }
    left.extend(entries(&data.join("incoming")).iter().map(|path| path.display().to_string()));
    left.extend(mounts(data));
    left.extend(ports.iter().flat_map(|&port| locks(port)));
    left
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

/// Processes that work in the data directory.
fn processes(data: &Path) -> Vec<String> {
    let all = entries(Path::new("/proc")).into_iter();
    let works_there = |process: &PathBuf| {
        fs::read_link(process.join("cwd")).is_ok_and(|dir| dir.starts_with(data))
    };
    all.filter(works_there).map(|process| process.display().to_string()).collect()
}

/// The control groups that there are of the job in `dir`, by all controllers.
pub fn groups(dir: &Path) -> Vec<PathBuf> {
    let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let hash = dir.as_os_str().as_encoded_bytes().iter();
    let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let root = Path::new("/sys/fs/cgroup");
    let of = |root: &Path| root.join(format!("torpor-queue/{hash:016x}"));
    let all = entries(root).into_iter().chain([root.to_owned()]).map(|root| of(&root));
    all.filter(|group| group.exists()).collect()
}

/// What was killed takes no longer to go. A group with another one in it is never removed.
const GOING: Duration = Duration::from_secs(5);

/// Removes the control groups of jobs whose shepherds were killed: as after a failure of the machine there is no daemon that
/// does it.
pub fn remove_groups(data: &Path) {
    let begun = Instant::now();
    // The disk of a test may have failed.
    let jobs = fs::read_dir(data.join("jobs")).into_iter().flatten().flatten();
    for group in jobs.flat_map(|job| groups(&job.path())) {
        while fs::remove_dir(&group).is_err() && group.exists() && begun.elapsed() < GOING {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What is mounted below the data directory.
fn mounts(data: &Path) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    let below =
        points.filter(|point| Path::new(point) != data && Path::new(point).starts_with(data));
    below.map(|point| format!("mounted: {point}")).collect()
}

/// What locks connections that have a port: elements of nftables, and rules of iptables.
pub fn locks(port: u16) -> Vec<String> {
    let of = |program: &str, words: &[&str]| {
        until(&format!("{program} lists what there is"), || {
            match Command::new(program).args(words).output() {
                // Nobody has made anything with it.
                Err(error) if error.kind() == ErrorKind::NotFound => Some(String::new()),
                output => {
                    let Output { status, stdout, .. } = output.unwrap();
                    status.success().then(|| String::from_utf8_lossy(&stdout).into_owned())
                }
            }
        })
    };
    let port = port.to_string();
    let names_it = |line: &str| {
        let mut words = line.split(|c: char| c.is_whitespace() || ",{}".contains(c));
        words.any(|word| word == port)
    };
    let tables = of("nft", &["list", "ruleset"]);
    let tables = tables.split("table ").filter(|table| table.starts_with("inet CRIU-"));
    let elements = tables.filter(|table| names_it(table));
    let rules = of("iptables-save", &["-t", "filter"]);
    let rules = rules.lines().filter(|line| line.contains("0xc114") && names_it(line));
    elements.chain(rules).map(|lock| format!("lock: {lock}")).collect()
}
