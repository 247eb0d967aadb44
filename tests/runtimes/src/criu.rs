//! Processes on the host, dumped and restored by calling `criu` itself.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::command::{self, Run};
use crate::network::Network;
use crate::process;
use crate::scratch::Scratch;

/// Whoever runs the tests may have left files open for all its children. They are no part of a test,
/// and a pipe to somebody outside could not be dumped.
const CLOSE_OTHERS: &str = r#"
    for fd in /proc/$$/fd/*; do
        fd=${fd##*/}
        [ "$fd" -le 2 ] || eval "exec $fd>&-"
    done
    exec "$@"
"#;

/// A process tree on the host that a test sends to sleep and wakes. It goes with this value.
#[derive(Debug)]
pub struct Job<'a> {
    scratch: &'a Scratch,
    network: Option<&'a Network>,
    pid: i32,
    /// The process, as long as it is a child of ours: that is until its first dump.
    child: Option<Child>,
    images: PathBuf,
    dumps: u32,
    /// Whether the last images are a round, for the next dump to go on from.
    in_rounds: bool,
    /// Whether it is the first process of a pid namespace, which the host knows by another number each
    /// time.
    is_first: bool,
}

impl<'a> Job<'a> {
    /// Starts a program in a session of its own, in `network` or else in the host's, its output in
    /// `output.log`.
    pub fn start(scratch: &'a Scratch, network: Option<&'a Network>, words: &[&str]) -> Self {
        let mut command = scratch.command("setsid");
        command.args(["bash", "-c", CLOSE_OTHERS, "bash"]).args(words);
        Self::start_command(scratch, network, command)
    }

    /// Starts a command that makes a session by itself.
    pub fn start_command(
        scratch: &'a Scratch,
        network: Option<&'a Network>,
        mut command: Command,
    ) -> Self {
        let log = File::create(scratch.join("output.log")).unwrap();
        command.stdin(File::open("/dev/null").unwrap());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let line = format!("{command:?}");
        let mut spawn = || command.spawn().unwrap_or_else(|error| panic!("{line}: {error}"));
        let child = match network {
            Some(network) => network.inside(spawn),
            None => spawn(),
        };
        let pid = i32::try_from(child.id()).unwrap();
        let mut job = Self::of_namespace(scratch, pid);
        (job.network, job.child, job.is_first) = (network, Some(child), false);
        job
    }

    /// The first process of a pid namespace, which somebody else has started.
    pub fn of_namespace(scratch: &'a Scratch, pid: i32) -> Self {
        Self {
            scratch,
            network: None,
            pid,
            child: None,
            images: PathBuf::new(),
            dumps: 0,
            in_rounds: false,
            is_first: true,
        }
    }

    /// The same, of a tree that lives in this network.
    #[must_use]
    pub fn within(mut self, network: &'a Network) -> Self {
        self.network = Some(network);
        self
    }

    /// The root process, as the host counts.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The directory with the images of the last dump.
    pub fn images(&self) -> &PathBuf {
        &self.images
    }

    /// Dumps the tree, which must leave nothing of it.
    #[track_caller]
    pub fn dump(&mut self, options: &[&str]) {
        let pids = process::tree(self.pid);
        self.dump_call(options).succeed();
        self.went(&pids);
    }

    /// The tree has been dumped: waits until nothing is left of it.
    #[track_caller]
    fn went(&mut self, pids: &BTreeMap<i32, process::Facts>) {
        if let Some(mut child) = self.child.take() {
            command::wait(&mut child).expect("the dumped process is gone");
        }
        process::wait_gone(pids.keys());
    }

    /// Dumps the tree and leaves it running.
    #[track_caller]
    pub fn dump_running(&mut self, options: &[&str]) {
        self.dump_call(&[&["--leave-running"], options].concat()).succeed();
        assert!(process::alive(self.pid));
    }

    /// Saves what of the memory has changed since the last round; the tree goes on. The next
    /// dump goes on from there, too.
    #[track_caller]
    pub fn pre_dump(&mut self, options: &[&str]) {
        let mut command = self.saving_call("pre-dump", options);
        command.arg("--track-mem").succeed();
        self.in_rounds = true;
        assert!(process::alive(self.pid));
    }

    /// The call of `criu dump` into a new directory.
    pub fn dump_call(&mut self, options: &[&str]) -> Command {
        let command = self.saving_call("dump", options);
        self.in_rounds = false;
        command
    }

    fn saving_call(&mut self, action: &str, options: &[&str]) -> Command {
        let before = format!("../images-{}", self.dumps);
        self.dumps += 1;
        self.images = self.scratch.dir(&format!("images-{}", self.dumps));
        let mut command = self.call(action, "dump.log", options);
        command.args(["--tree", &self.pid.to_string()]);
        if self.in_rounds {
            command.args(["--prev-images-dir", &before]);
        }
        command
    }

    /// The bytes of all pages in the images of the last dump.
    pub fn pages(&self) -> u64 {
        pages(&self.images)
    }

    /// Restores the tree from the last dump.
    #[track_caller]
    pub fn restore(&mut self, options: &[&str]) {
        let pid_file = self.images.join("pid");
        let mut command = self.call("restore", "restore.log", options);
        command.arg("--restore-detached").arg("--pidfile").arg(&pid_file);
        command.succeed();
        let pid: i32 = fs::read_to_string(pid_file).unwrap().trim().parse().unwrap();
        assert!(self.is_first || pid == self.pid, "the process id is {pid}");
        self.pid = pid;
    }

    /// Dumps the tree and restores it. Every process that was there for all of its life must be
    /// there again, with the same place in the tree.
    #[track_caller]
    pub fn sleep_and_wake(&mut self, options: &[&str]) {
        let before = process::tree(self.pid);
        self.dump(options);
        self.restore(options);
        assert_eq!(process::tree(self.pid), before);
    }

    fn call(&self, action: &str, log: &str, options: &[&str]) -> Command {
        let mut command = Command::new(self.scratch.criu());
        command.arg(action).arg("--images-dir").arg(&self.images);
        command.args(["--log-file", log, "-v4"]).args(options);
        if let Some(network) = self.network {
            command = nested(network, &command);
        }
        command
    }
}

/// The bytes of all pages in the images of a directory.
pub fn pages(images: &Path) -> u64 {
    let files = fs::read_dir(images).unwrap().map(Result::unwrap);
    let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
    pages.map(|file| file.metadata().unwrap().len()).sum()
}

/// The same command, run in a network namespace.
fn nested(network: &Network, command: &Command) -> Command {
    let mut outer = Command::new("nsenter");
    outer.arg(format!("--net={}", network.path().display()));
    outer.arg("--").arg(command.get_program()).args(command.get_args());
    outer
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        process::kill_tree(self.pid);
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
    }
}
