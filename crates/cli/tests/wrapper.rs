//! `torpor-runc`, called as containerd's shim calls a runtime, with an agent that this test is.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_kubernetes::message::{Answer, Ask, receive, send};

const LIMIT: Duration = Duration::from_secs(120);
const COUNT: &str =
    "i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.02; done";

fn command(program: &str, words: &[&str]) {
    let status = Command::new(program).args(words).stdin(Stdio::null()).status().unwrap();
    assert!(status.success(), "{program} {words:?}: {status}");
}

fn until<T>(what: &str, found: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// A node: its directory, and an agent that saves what is stopped and restores what is created.
struct Node {
    place: tempfile::TempDir,
    asked: Arc<Mutex<Vec<Ask>>>,
    always: Arc<Mutex<bool>>,
    bundles: Vec<String>,
}

impl Drop for Node {
    fn drop(&mut self) {
        for name in &self.bundles {
            let _ = self.runc("delete", &["--force", name]);
            let root = self.path(name).join("rootfs");
            let _ = Command::new("umount").arg("--lazy").arg(root).output();
        }
    }
}

impl Node {
    fn new(test: &str) -> Option<Self> {
        let there = Command::new("runc").arg("--version").output().is_ok();
        if !there || !rustix::process::geteuid().is_root() {
            eprintln!("{test}: skipped, since it takes root and runc");
            return None;
        }
        let place = tempfile::Builder::new().prefix("wrap-").tempdir_in("/tmp").unwrap();
        let node =
            Self { place, asked: Arc::default(), always: Arc::default(), bundles: Vec::new() };
        fs::create_dir(node.path("bin")).unwrap();
        let torpor = env!("CARGO_BIN_EXE_torpor");
        std::os::unix::fs::symlink(torpor, node.path("bin/torpor-runc")).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/rootfs/make");
        command(script.to_str().unwrap(), &[node.path("lower").to_str().unwrap()]);
        node.serve();
        Some(node)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn serve(&self) {
        let listener = UnixListener::bind(self.path("agent.sock")).unwrap();
        let (dir, asked) = (self.path("checkpoint"), Arc::clone(&self.asked));
        let always = Arc::clone(&self.always);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let Ok(ask) = receive::<Ask>(&stream) else { continue };
                let answer = match &ask {
                    Ask::Stop { .. } => {
                        fs::create_dir(&dir).unwrap();
                        Answer::Save { dir: dir.clone(), recipient: None, seconds: 60 }
                    }
                    Ask::Create { .. } if dir.exists() => Answer::Restore {
                        dir: dir.clone(),
                        always: *always.lock().unwrap(),
                        identity: None,
                    },
                    Ask::Create { .. } => Answer::Plain,
                    Ask::Created { .. } | Ask::Saved { .. } => Answer::Noted,
                };
                asked.lock().unwrap().push(ask);
                let _ = send(&mut stream, &answer);
            }
        });
    }

    /// A bundle, as containerd makes it.
    fn bundle(&mut self, name: &str) {
        let dir = self.path(name);
        for below in ["rootfs", "upper", "work", "shm", "kubernetes.io~empty-dir/data"] {
            fs::create_dir_all(dir.join(below)).unwrap();
        }
        let at = |below: &str| dir.join(below).display().to_string();
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            self.path("lower").display(),
            at("upper"),
            at("work")
        );
        command("mount", &["-t", "overlay", "-o", &options, "overlay", &at("rootfs")]);
        let made = Command::new("runc").current_dir(&dir).arg("spec").status().unwrap();
        assert!(made.success());
        let text = fs::read(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["sh", "-c", COUNT]);
        config["root"]["readonly"] = json!(false);
        config["linux"]["cgroupsPath"] = json!(format!("/{}", self.id(name)));
        let mounts = config["mounts"].as_array_mut().unwrap();
        mounts.retain(|mount| mount["destination"] != "/dev/shm");
        for (target, source) in [("/dev/shm", "shm"), ("/mnt", "kubernetes.io~empty-dir/data")] {
            mounts.push(json!({
                "type": "bind", "source": at(source), "destination": target,
                "options": ["rbind", "rw"],
            }));
        }
        config["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": "web-0",
            "io.kubernetes.cri.sandbox-uid": format!("uid-{name}"),
            "io.kubernetes.cri.container-name": "main",
        });
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        self.bundles.push(name.to_owned());
    }

    /// The container of a bundle: of all tests at a time, one name.
    fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.place.path().file_name().unwrap().to_str().unwrap())
    }

    /// A call of the wrapper; the last word is the name of a bundle.
    fn runc(&self, action: &str, words: &[&str]) -> Output {
        let null = || File::options().read(true).write(true).open("/dev/null").unwrap();
        let mut call = Command::new(self.path("bin/torpor-runc"));
        call.arg("--root").arg(self.path("runc"));
        call.arg("--log").arg(self.path("log.json")).args(["--log-format", "json", action]);
        let (out, words) = match action {
            "state" => (Stdio::piped(), words),
            _ => (Stdio::from(null()), words),
        };
        for word in words {
            match self.bundles.iter().any(|name| name == word) {
                true => call.arg(self.id(word)),
                false => call.arg(word),
            };
        }
        call.env("TORPOR_AGENT_SOCKET", self.path("agent.sock"));
        let child = call.stdin(null()).stdout(out).stderr(null()).spawn().unwrap();
        child.wait_with_output().unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log.json")).unwrap_or_default()
    }

    #[track_caller]
    fn good(&self, action: &str, words: &[&str]) {
        let output = self.runc(action, words);
        let log = self.log();
        assert!(output.status.success(), "{action}: {log} {:?}", self.asked.lock().unwrap());
    }

    fn create(&self, name: &str) -> Output {
        let dir = self.path(name);
        let pid = dir.join("init.pid");
        self.runc(
            "create",
            &["--bundle", dir.to_str().unwrap(), "--pid-file", pid.to_str().unwrap(), name],
        )
    }

    fn status(&self, name: &str) -> String {
        let output = self.runc("state", &[name]);
        let state: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        state["status"].as_str().unwrap_or_default().to_owned()
    }

    fn count(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.path(name).join("rootfs/count")).ok()?.trim().parse().ok()
    }

    fn counted(&self, name: &str, least: u64) -> u64 {
        until("the container counts", || self.count(name).filter(|count| *count >= least))
    }

    /// Runs a container, and has it give way.
    fn saved(&mut self, name: &str) -> u64 {
        self.bundle(name);
        assert!(self.create(name).status.success(), "{}", self.log());
        self.good("start", &[name]);
        let volume = self.path(name).join("kubernetes.io~empty-dir/data");
        fs::write(volume.join("kept"), "in an emptyDir").unwrap();
        self.counted(name, 5);
        // What runs no more cannot be told to end, which the shim knows how to take.
        let _ = self.runc("kill", &[name, "15"]);
        until("the container has ended", || (self.status(name) == "stopped").then_some(()));
        self.good("delete", &[name]);
        self.count(name).unwrap()
    }

    /// What the wrapper has told of a container that was created.
    fn told(&self) -> (bool, String) {
        let asked = self.asked.lock().unwrap();
        let last = asked.iter().rev().find_map(|ask| match ask {
            Ask::Created { restored, reason, .. } => Some((*restored, reason.clone())),
            _ => None,
        });
        last.unwrap()
    }
}

#[test]
fn a_container_gives_way_and_waits_restored_for_its_start() {
    let Some(mut node) = Node::new("a_container_gives_way") else { return };
    let last = node.saved("old");
    node.bundle("new");
    let created = node.create("new");
    assert!(created.status.success(), "{}", node.log());
    assert_eq!(node.told(), (true, String::new()));
    assert_eq!(node.status("new"), "created");
    assert_eq!(node.count("new"), Some(last), "it runs before it is started");
    let pid = fs::read_to_string(node.path("new/init.pid")).unwrap();
    assert!(Path::new("/proc").join(pid.trim()).exists());
    let kept = node.path("new/kubernetes.io~empty-dir/data/kept");
    assert_eq!(fs::read_to_string(kept).unwrap(), "in an emptyDir");
    assert_eq!(node.count("new"), Some(last), "it runs before it is started");
    node.good("start", &["new"]);
    assert_eq!(node.status("new"), "running");
    node.counted("new", last + 5);
    // What is killed by force is not saved again.
    node.good("kill", &["new", "9"]);
    until("it has ended", || (node.status("new") == "stopped").then_some(()));
    node.good("delete", &["new"]);
}

#[test]
fn a_container_that_cannot_be_restored_starts_cold() {
    let Some(mut node) = Node::new("a_container_that_cannot_be_restored") else { return };
    let last = node.saved("old");
    let core = node.path("checkpoint/containers/main/mm-1.img");
    fs::write(&core, "forged").unwrap();
    node.bundle("cold");
    assert!(node.create("cold").status.success(), "{}", node.log());
    let (restored, reason) = node.told();
    assert!(!restored && !reason.is_empty());
    assert_eq!(node.count("cold"), None, "changed files were left behind");
    let volume = node.path("cold/kubernetes.io~empty-dir/data");
    assert!(fs::read_dir(volume).unwrap().next().is_none());
    node.good("start", &["cold"]);
    assert!(node.counted("cold", 1) < last + 1000);
    node.good("delete", &["--force", "cold"]);

    *node.always.lock().unwrap() = true;
    node.bundle("never");
    assert!(!node.create("never").status.success());
    assert!(node.log().contains("restore: "), "{}", node.log());
    assert_eq!(node.status("never"), "");
}

#[test]
fn without_an_agent_it_is_runc() {
    let Some(mut node) = Node::new("without_an_agent") else { return };
    fs::remove_file(node.path("agent.sock")).unwrap();
    node.bundle("plain");
    assert!(node.create("plain").status.success(), "{}", node.log());
    assert_eq!(node.status("plain"), "created");
    node.good("start", &["plain"]);
    node.counted("plain", 3);
    node.good("delete", &["--force", "plain"]);
}
