//! Programs that make containers of their own, or live in one.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::{Value, json};
use torpor_runtimes_tests::command::wait;
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::rootfs;
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

use super::{Outcome, Row, SLEEPS, Times};

/// A machine of systemd-nspawn, which is registered nowhere. It goes with this value.
struct Machine {
    supervisor: Child,
    /// Where the host hands directories over to it, which the supervisor removes in the end.
    handed: PathBuf,
}

impl Machine {
    fn start(scratch: &Scratch, script: &str) -> Self {
        let root = scratch.join("root");
        rootfs::make(&root, &[]);
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/os-release"), "ID=test\n").unwrap();
        let mut command = scratch.command("systemd-nspawn");
        command.arg("--directory").arg(&root).arg("--machine").arg(scratch.name());
        command.args(["--quiet", "--register=no", "--keep-unit", "--pipe", "sh", "-c", script]);
        // The payload gets the streams of the call: no file of the host's.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let handed = Path::new("/run/systemd/nspawn/propagate").join(scratch.name());
        Self { supervisor: command.spawn().unwrap(), handed }
    }

    /// The first process inside.
    fn payload(&self) -> i32 {
        let supervisor = i32::try_from(self.supervisor.id()).unwrap();
        until("the payload runs", || {
            let tree = process::tree(supervisor);
            tree.into_keys().find(|pid| {
                *pid != supervisor
                    && fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "sh\n")
            })
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        process::kill_tree(i32::try_from(self.supervisor.id()).unwrap());
        let _ = self.supervisor.wait();
        let _ = fs::remove_dir(&self.handed);
    }
}

/// The payload of a machine of systemd-nspawn: its supervisor ends with it.
pub(super) fn nspawn() -> Row {
    let scratch = Scratch::new("real-nspawn");
    let script = "n=0; while sleep 0.02; do n=$((n + 1)); \
                  echo $n $$ $(hostname) $(wc -l </proc/self/cgroup) >>/inside.log; done";
    let mut machine = Machine::start(&scratch, script);
    let inside = || fs::read_to_string(scratch.join("root/inside.log")).unwrap_or_default();
    let works_on = || {
        let goal = inside().lines().count() + 5;
        until_true("it works", || inside().lines().count() > goal);
    };
    works_on();
    let mut job = Job::of_namespace(&scratch, machine.payload());
    // What the supervisor has put over files of /proc was removed at once.
    let options = [
        "--external",
        "mnt[]:ms",
        "--skip-mnt",
        "/proc/sys/kernel/random/boot_id",
        "--skip-mnt",
        "/proc/kmsg",
    ];
    let root = scratch.join("root");
    let mut times = Times::default();
    for sleep in 0..SLEEPS {
        works_on();
        let begin = Instant::now();
        job.dump(&options);
        times.asleep.push(begin.elapsed());
        times.bytes = job.pages();
        if sleep == 0 {
            wait(&mut machine.supervisor).expect("the supervisor ends with its payload");
            fs::create_dir_all(&machine.handed).unwrap();
        }
        let begin = Instant::now();
        job.restore(&["--external", "mnt[]:ms", "--root", root.to_str().unwrap()]);
        times.awake.push(begin.elapsed());
    }
    works_on();
    let output = inside();
    let rest = |line: &str| line.split_once(' ').map(|(_, rest)| rest.to_owned());
    for (number, line) in (1..).zip(output.lines()) {
        assert!(line.starts_with(&format!("{number} 1 {}", scratch.name())), "{line}");
        assert_eq!(rest(line), output.lines().next().and_then(rest));
    }
    Row {
        name: "systemd-nspawn",
        version: &["systemd-nspawn", "--version"],
        how: "the payload of a machine; mounts over files of /proc that were removed are left out",
        outcome: Outcome::Kept(times),
    }
}

/// A page that counts, as the browser's own interface shows it.
fn title(network: &Network) -> Option<u64> {
    let answer = network.inside(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9222").ok()?;
        stream.write_all(b"GET /json HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
        let mut answer = String::new();
        // The connection stays: what is whole says its own length.
        let mut part = [0; 4096];
        while !answer.trim_end().ends_with(']') {
            let length = stream.read(&mut part).ok().filter(|length| *length > 0)?;
            answer.push_str(&String::from_utf8_lossy(&part[..length]));
        }
        Some(answer)
    })?;
    let pages: Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()?;
    let page = pages.as_array()?.iter().find(|page| page["type"] == "page")?;
    page["title"].as_str()?.parse().ok()
}

/// With its sandbox: renderers in pid, network and user namespaces of their own, with an empty root
/// and seccomp filters.
pub(super) fn chromium() -> Row {
    let scratch = Scratch::new("real-chromium-runc");
    let network = Network::new(scratch.name());
    let words = "exec chromium --headless --disable-gpu --disable-breakpad --no-first-run \
                 --disable-dev-shm-usage --remote-debugging-port=9222 --user-data-dir=/data \
                 file:///page.html";
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", words]).host_programs();
    let bundle = bundle.network(&network).configure(|config| {
        config["process"]["user"] = json!({ "uid": 1000, "gid": 1000 });
        config["process"]["env"].as_array_mut().unwrap().push(json!("HOME=/data"));
        config["process"]["noNewPrivileges"] = json!(true);
    });
    bundle.write(
        "/page.html",
        "<script>let n = 0; setInterval(() => document.title = ++n, 20)</script>",
    );
    for dir in ["data", "tmp"] {
        let dir = bundle.file(dir);
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    }
    let mut container = Container::start(&scratch, &bundle);
    let works_on = |from: u64| {
        until("the page counts on", || title(&network).filter(|title| *title > from + 5))
    };
    let options = ["--tcp-established", "--file-locks"];
    let mut times = Times::default();
    let mut count = works_on(0);
    for _ in 0..SLEEPS {
        let begin = Instant::now();
        container.checkpoint(&options);
        times.asleep.push(begin.elapsed());
        times.bytes = torpor_runtimes_tests::criu::pages(&scratch.join("images"));
        let begin = Instant::now();
        container.restore(&options);
        times.awake.push(begin.elapsed());
        count = works_on(count);
    }
    Row {
        name: "Chromium in a container",
        version: &["chromium", "--version"],
        how: "headless, in a container of runc, with its sandbox; a page that counts",
        outcome: Outcome::Kept(times),
    }
}
