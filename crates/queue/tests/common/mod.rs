//! A daemon of its own for each test, and what tests ask of it.

// Each test program uses its own part of this.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

pub mod browser;
pub mod leaks;
pub mod pair;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Longer than anything takes, on the slowest machine: not waited for, but given up after.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The `torpor` of this build.
pub fn torpor() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(path) = std::env::var_os("TORPOR_BIN") {
            return path.into();
        }
        // target/PROFILE/deps/TEST
        let test = std::env::current_exe().unwrap();
        let profile = test.ancestors().nth(2).unwrap().to_owned();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        build.args(["build", "--quiet", "--package", "torpor-cli"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(build.current_dir(manifest).status().unwrap().success(), "torpor does not build");
        profile.join("torpor")
    })
}

/// Whether the long tests are to run; says by name which one does not.
pub fn long(name: &str) -> bool {
    let wanted = std::env::var_os("TORPOR_LONG").is_some_and(|value| value == "1");
    if !wanted {
        println!("{name}: left out, set TORPOR_LONG=1 to run it");
    }
    wanted
}

/// Waits until there is something.
pub fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Asks over the Unix socket as any HTTP client would; returns status and body.
pub fn ask(daemon: &Daemon, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = begin_to_ask(daemon, method, path, headers, body);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The same without the answer, which comes on the stream.
pub fn begin_to_ask(
    daemon: &Daemon,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.dir.path().join("socket")).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: q\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    );
    // A client that is refused may be answered before all has been read.
    match stream.write_all(request.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        sent => sent.unwrap(),
    }
    stream
}

/// A daemon with a directory of its own. It and all its jobs end with the test.
pub struct Daemon {
    pub dir: TempDir,
    child: Option<Child>,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
}

impl Daemon {
    /// Starts one with these options.
    pub fn start(args: &[&str]) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let dir = tempfile::Builder::new().prefix("torpor-queue-").tempdir().unwrap();
        let mut daemon = Self { dir, child: None, args, env: Vec::new() };
        daemon.launch();
        daemon
    }

    /// Starts one with a configuration.
    pub fn configured(config: &Value, args: &[&str]) -> Self {
        Self::in_environment(config, args, &[])
    }

    /// Starts one with a configuration and these variables.
    pub fn in_environment(config: &Value, args: &[&str], env: &[(&'static str, String)]) -> Self {
        let dir = tempfile::Builder::new().prefix("torpor-queue-").tempdir().unwrap();
        Self::below(dir, config, args, env)
    }

    /// Starts one in this directory.
    pub fn below(
        dir: TempDir,
        config: &Value,
        args: &[&str],
        env: &[(&'static str, String)],
    ) -> Self {
        let file = dir.path().join("config.json");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut all = vec!["--config".to_owned(), file.to_str().unwrap().to_owned()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let mut daemon = Self { dir, child: None, args: all, env: env.to_vec() };
        daemon.launch();
        daemon
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub fn address(&self) -> String {
        format!("unix:{}", self.dir.path().join("socket").display())
    }

    /// Starts the daemon (again), and waits until it answers.
    pub fn launch(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        // It ignores what it does in the background of a script.
        let child = Command::new("sh")
            .args(["-c", "trap '' HUP INT QUIT; exec \"$0\" \"$@\""])
            .arg(torpor())
            .args(["queue", "serve", "--data"])
            .arg(self.data())
            .args(["--listen", &self.address()])
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
        until("the daemon answers", || {
            let output = self.queue(&["list", "--json"]).output().unwrap();
            output.status.success().then_some(())
        });
    }

    /// The port that it listens on for https.
    pub fn https_port(&self) -> String {
        let address = self.args.iter().find_map(|arg| arg.strip_prefix("https://localhost:"));
        address.unwrap().to_owned()
    }

    /// The process that it is.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().unwrap().id().cast_signed()
    }

    /// Kills the daemon as a crash would.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// `torpor queue` with these words.
    pub fn queue(&self, words: &[&str]) -> Command {
        let mut command = Command::new(torpor());
        command.arg("queue").args(words).env("TORPOR_QUEUE", self.address()).stdin(Stdio::null());
        command
    }

    /// What `torpor queue` prints; it must succeed.
    pub fn ok(&self, words: &[&str]) -> String {
        let output = self.queue(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Submits a job; returns its number.
    pub fn submit(&self, options: &[&str], command: &[&str]) -> u64 {
        let words: Vec<&str> =
            ["submit"].iter().chain(options).chain(&["--"]).chain(command).copied().collect();
        self.ok(&words).trim().parse().unwrap()
    }

    /// A job as `list --json` shows it.
    pub fn job(&self, id: u64) -> Value {
        let list: Value = serde_json::from_str(&self.ok(&["list", "--json"])).unwrap();
        let mut jobs = list.as_array().unwrap().iter();
        jobs.find(|job| job["id"] == id).cloned().unwrap()
    }

    /// A job as `show --json` does.
    pub fn show(&self, id: u64) -> Value {
        serde_json::from_str(&self.ok(&["show", "--json", &id.to_string()])).unwrap()
    }

    /// Waits until a job is in this state.
    pub fn wait_for(&self, id: u64, state: &str) -> Value {
        let mut last = Value::Null;
        let begun = Instant::now();
        loop {
            let job = self.job(id);
            if job["state"] == state {
                return job;
            }
            let over = !job["exit"].is_null() && job["state"] == last["state"];
            assert!(!over && begun.elapsed() < PATIENCE, "no longer {state}: {}", self.show(id));
            last = job;
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// When this is there jobs may end that wait for it: none must before all has happened that is to happen
    /// to it, however slow the machine is.
    pub fn may_end(&self) -> PathBuf {
        self.dir.path().join("may-end")
    }

    /// Lets them end.
    pub fn let_end(&self) {
        std::fs::write(self.may_end(), "").unwrap();
    }

    /// A command that counts as [`counter`] does, and ends when it may.
    pub fn counter(&self, last: u32, pause: f64) -> Vec<String> {
        let wait = format!(
            "import os\nwhile not os.path.exists('{}'):\n    time.sleep(0.02)",
            self.may_end().display()
        );
        python(&[&counting(last, pause), &wait, "print('end')"])
    }

    /// The events of a job of this kind.
    pub fn events(&self, id: u64, kind: &str) -> Vec<Value> {
        let events = self.show(id)["events"].clone();
        events.as_array().unwrap().iter().filter(|event| event["kind"] == kind).cloned().collect()
    }

    /// All jobs, as `list --json` shows them.
    pub fn jobs(&self) -> Vec<Value> {
        serde_json::from_str(&self.ok(&["list", "--json"])).unwrap()
    }

    /// What a job has written to its standard output.
    pub fn output(&self, id: u64) -> String {
        self.ok(&["logs", &id.to_string()])
    }

    /// Waits until a job's output holds a word.
    pub fn wait_for_output(&self, id: u64, word: &str) {
        until(&format!("{word} in the output"), || self.output(id).contains(word).then_some(()));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            eprintln!("the daemon's log:\n{log}");
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // What a shepherd maps must be gone before its directory is.
        end_shepherds(&self.data());
        leaks::remove_groups(&self.data());
    }
}

/// Ends all jobs of a data directory as a failure of the machine would. One shepherd may have been about to bear another.
pub fn end_shepherds(data: &Path) {
    until("shepherds end", || {
        let left = shepherds(data);
        for &pid in &left {
            let frozen = frozen(pid);
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            frozen.iter().for_each(|switch| drop(std::fs::write(switch, "THAWED")));
        }
        left.is_empty().then_some(())
    });
}

/// The switches of the groups in which a shepherd has frozen its job, which would not end with it. Those of version 2
/// end in spite of that.
fn frozen(shepherd: i32) -> Vec<PathBuf> {
    let children = std::fs::read_to_string(format!("/proc/{shepherd}/task/{shepherd}/children"));
    let groups = |child: &str| std::fs::read_to_string(format!("/proc/{child}/cgroup")).ok();
    let groups: Vec<String> =
        children.unwrap_or_default().split_whitespace().filter_map(groups).collect();
    let lines = groups.iter().flat_map(|groups| groups.lines());
    let paths = lines.filter_map(|line| line.split_once(":freezer:")).map(|(_, path)| path);
    let own = paths.filter(|path| path.starts_with("/torpor-queue/"));
    own.map(|path| PathBuf::from(format!("/sys/fs/cgroup/freezer{path}/freezer.state"))).collect()
}

/// The shepherds that keep jobs of a data directory.
pub fn shepherds(data: &Path) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let keeps = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.get(2) == Some(&&b"shepherd"[..])
            && words.get(3).is_some_and(|dir| dir.starts_with(data.as_os_str().as_encoded_bytes()))
    };
    let found: Vec<i32> = pids.filter(keeps).collect();
    // One that a shepherd has borne, and that is about to be a worker, looks like it. It may have ended since.
    let is_borne = |pid: &&i32| parent(**pid).is_none_or(|parent| found.contains(&parent));
    found.iter().filter(|pid| !is_borne(pid)).copied().collect()
}

fn parent(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// How much a process has worked, wherever its threads are: how often it has read or written.
pub fn work_of(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let count = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let (read, written): (Option<u64>, Option<u64>) = (count("syscr:"), count("syscw:"));
    Some(read? + written?)
}

/// The output of a command, for messages.
pub fn shown(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// A job that has a connection and writes lines, who listens for it, and the other end of the connection.
pub fn connected(daemon: &Daemon) -> (u64, TcpListener, TcpStream) {
    connected_with(daemon, 0)
}

/// The same with so many MiB of memory, which take a while to be saved.
pub fn connected_with(daemon: &Daemon, mib: u32) -> (u64, TcpListener, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let script = "import os, socket, sys, time\nmemory = os.urandom(int(sys.argv[2]) << 20)\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n\
                  while True:\n    print('connected', flush=True)\n    time.sleep(0.1)";
    let id =
        daemon.submit(&["--class", "batch"], &["python3", "-c", script, &port, &mib.to_string()]);
    let peer = listener.accept().unwrap().0;
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    daemon.wait_for_output(id, "connected");
    (id, listener, peer)
}

/// A command that counts to `last`, a line each `pause` seconds, and then says `end`.
pub fn counter(last: u32, pause: f64) -> Vec<String> {
    python(&[&counting(last, pause), "print('end')"])
}

fn counting(last: u32, pause: f64) -> String {
    format!(
        "import time\nfor i in range({last}):\n    print(i, flush=True)\n    time.sleep({pause})"
    )
}

fn python(parts: &[&str]) -> Vec<String> {
    vec!["python3".to_owned(), "-c".to_owned(), parts.join("\n")]
}

/// What such a command writes.
pub fn counted(last: u32) -> String {
    (0..last).map(|i| format!("{i}\n")).chain(["end\n".to_owned()]).collect()
}

/// The words of a command, to be submitted.
pub fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}
