//! `torpor-runc`, called as containerd's shim calls a runtime, with an agent that this test is.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod containerd;
mod costs;
mod kills;
mod lazy;
mod limit;
mod pod;
mod rights;
mod rounds;
#[path = "../sleeper/mod.rs"]
mod sleeper;
mod starts;
mod volumes;

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_kubernetes::message::{Answer, Ask, Hidden, LOGS, receive, rounds_asked, send};
use torpor_seal::keys::AgeIdentity;

use kills::worker;
use sleeper::write_script;

const LIMIT: Duration = Duration::from_secs(120);
const COUNT: &str =
    "i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.02; done";

/// The volumes that come from outside and are each pod's own.
const OF_POD: [&str; 3] = [
    "kubernetes.io~projected/token",
    "kubernetes.io~configmap/config",
    "kubernetes.io~secret/secret",
];

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

/// Whether a word of the wrapper is one that is meant.
type Meant = fn(&Ask) -> bool;

/// A node: its directory, and an agent that saves what is stopped and restores what is created.
struct Node {
    place: tempfile::TempDir,
    asked: Arc<Mutex<Vec<Ask>>>,
    always: Arc<Mutex<bool>>,
    /// What the agent has images sealed for, and what it opens them with.
    key: Arc<Mutex<Option<(String, String)>>>,
    /// What it answers when a pod has been saved.
    saved: Arc<Mutex<Answer>>,
    /// How long a pod may take to be saved.
    seconds: Arc<Mutex<u64>>,
    /// Whether its memory is copied before it is frozen.
    ahead: Arc<Mutex<bool>>,
    /// Whether somebody on another node asks for what is copied then.
    moves: Arc<Mutex<bool>>,
    /// Whether there is no place for what is copied then.
    blocked: Arc<Mutex<bool>>,
    /// Whether memory comes while a container runs.
    lazy: Arc<Mutex<bool>>,
    /// To which word there is no answer for now, once for each, and whoever has got none.
    silent: Arc<Mutex<Vec<Meant>>>,
    unanswered: Arc<Mutex<Vec<UnixStream>>>,
    /// The runc that the wrapper calls.
    runc: PathBuf,
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
        let node = Self {
            place,
            asked: Arc::default(),
            always: Arc::default(),
            key: Arc::default(),
            saved: Arc::new(Mutex::new(Answer::Noted)),
            seconds: Arc::new(Mutex::new(60)),
            ahead: Arc::default(),
            moves: Arc::default(),
            blocked: Arc::default(),
            lazy: Arc::default(),
            silent: Arc::default(),
            unanswered: Arc::default(),
            runc: "runc".into(),
            bundles: Vec::new(),
        };
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

    /// Where the kubelet has the volumes of a pod.
    fn volumes(&self, pod: &str) -> PathBuf {
        self.path(&format!("pods/uid-{pod}/volumes"))
    }

    /// The emptyDir of a pod.
    fn data(&self, pod: &str) -> PathBuf {
        self.volumes(pod).join("kubernetes.io~empty-dir/data")
    }

    /// What containerd makes for a pod as its `/dev/shm`.
    fn shm(&self, pod: &str) -> PathBuf {
        self.path(&format!("io.containerd.grpc.v1.cri/sandboxes/sandbox-{pod}/shm"))
    }

    fn serve(&self) {
        let listener = UnixListener::bind(self.path("agent.sock")).unwrap();
        let (dir, asked) = (self.path("checkpoint"), Arc::clone(&self.asked));
        let always = Arc::clone(&self.always);
        let (key, saved) = (Arc::clone(&self.key), Arc::clone(&self.saved));
        let (silent, unanswered) = (Arc::clone(&self.silent), Arc::clone(&self.unanswered));
        let (moves, blocked) = (Arc::clone(&self.moves), Arc::clone(&self.blocked));
        let (seconds, ahead) = (Arc::clone(&self.seconds), Arc::clone(&self.ahead));
        let lazy = Arc::clone(&self.lazy);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let Ok(ask) = receive::<Ask>(&stream) else { continue };
                let found = silent.lock().unwrap().iter().position(|is_meant| is_meant(&ask));
                if let Some(index) = found {
                    silent.lock().unwrap().remove(index);
                    unanswered.lock().unwrap().push(stream);
                    continue;
                }
                let answer = match &ask {
                    Ask::Stop { .. } | Ask::Checkpoint { .. } => {
                        fs::create_dir(&dir).unwrap();
                        if *moves.lock().unwrap() {
                            fs::create_dir(dir.join(LOGS)).unwrap();
                            fs::write(rounds_asked(&dir), "").unwrap();
                        }
                        if *blocked.lock().unwrap() {
                            fs::write(dir.join("rounds"), "no directory").unwrap();
                        }
                        let recipient = key.lock().unwrap().clone().map(|(recipient, _)| recipient);
                        let seconds = *seconds.lock().unwrap();
                        let ahead = *ahead.lock().unwrap();
                        Answer::Save { dir: dir.clone(), recipient, seconds, ahead }
                    }
                    Ask::Create { .. } if dir.exists() => Answer::Restore {
                        dir: dir.clone(),
                        always: *always.lock().unwrap(),
                        identity: key.lock().unwrap().clone().map(|(_, key)| Hidden::new(key)),
                        lazy: *lazy.lock().unwrap(),
                    },
                    Ask::Create { .. } => Answer::Plain,
                    Ask::Begins { .. } => Answer::Noted,
                    Ask::Saved { .. } => saved.lock().unwrap().clone(),
                };
                asked.lock().unwrap().push(ask);
                let _ = send(&mut stream, &answer);
            }
        });
    }

    /// The bundle of a pod's only container, as containerd makes it.
    fn bundle(&mut self, name: &str) {
        self.bundle_of(name, name, "main", COUNT);
    }

    /// The bundle of a container of a pod, and what the container runs. The pod's containers share a PVC, an
    /// emptyDir, `/dev/shm`, and the pod's token, `ConfigMap` and Secret.
    fn bundle_of(&mut self, pod: &str, name: &str, container: &str, script: &str) {
        let dir = self.path(name);
        let volumes = self.volumes(pod);
        for below in ["rootfs", "upper", "work"] {
            fs::create_dir_all(dir.join(below)).unwrap();
        }
        for own in [self.shm(pod), self.data(pod)] {
            fs::create_dir_all(own).unwrap();
        }
        for below in OF_POD {
            fs::create_dir_all(volumes.join(below)).unwrap();
            fs::write(volumes.join(below).join("value"), pod).unwrap();
        }
        fs::create_dir_all(self.path("kubernetes.io~csi")).unwrap();
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
        config["process"]["args"] = json!(["sh", "-c", script]);
        config["root"]["readonly"] = json!(false);
        config["linux"]["cgroupsPath"] = json!(format!("/{}", self.id(name)));
        let mounts = config["mounts"].as_array_mut().unwrap();
        mounts.retain(|mount| mount["destination"] != "/dev/shm");
        for (target, source, how) in [
            ("/dev/shm", self.shm(pod), "rw"),
            ("/mnt", self.data(pod), "rw"),
            ("/media", self.path("kubernetes.io~csi"), "rw"),
            ("/token", volumes.join(OF_POD[0]), "ro"),
            ("/config", volumes.join(OF_POD[1]), "ro"),
            ("/secret", volumes.join(OF_POD[2]), "ro"),
        ] {
            mounts.push(json!({
                "type": "bind", "source": source.display().to_string(), "destination": target,
                "options": ["rbind", how],
            }));
        }
        config["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-id": format!("sandbox-{pod}"),
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": "web-0",
            "io.kubernetes.cri.sandbox-uid": format!("uid-{pod}"),
            "io.kubernetes.cri.container-name": container,
        });
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        self.bundles.push(name.to_owned());
    }

    /// Changes the configuration of a bundle.
    fn configure(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let file = self.path(name).join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        change(&mut config);
        fs::write(&file, config.to_string()).unwrap();
    }

    /// The container of a bundle: of all tests at a time, one name.
    fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.place.path().file_name().unwrap().to_str().unwrap())
    }

    /// A call of the wrapper; the last word is the name of a bundle.
    fn runc(&self, action: &str, words: &[&str]) -> Output {
        self.begin(action, words).wait_with_output().unwrap()
    }

    /// Begins a call of the wrapper.
    fn begin(&self, action: &str, words: &[&str]) -> Child {
        let null = || File::options().read(true).write(true).open("/dev/null").unwrap();
        let mut call = Command::new(self.path("bin/torpor-runc"));
        call.arg("--root").arg(self.path("runc"));
        call.arg("--log").arg(self.path("log.json")).args(["--log-format", "json", action]);
        let (out, words) = match action {
            // Nobody keeps them when the call has ended.
            "state" | "kill" | "checkpoint" => (Stdio::piped(), words),
            _ => (Stdio::from(null()), words),
        };
        for word in words {
            match self.bundles.iter().any(|name| name == word) {
                true => call.arg(self.id(word)),
                false => call.arg(word),
            };
        }
        call.env("TORPOR_AGENT_SOCKET", self.path("agent.sock")).env("TORPOR_RUNC", &self.runc);
        call.stdin(null()).stdout(out).stderr(null()).spawn().unwrap()
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
        self.begin_to_create(name).wait_with_output().unwrap()
    }

    fn begin_to_create(&self, name: &str) -> Child {
        let dir = self.path(name);
        let pid = dir.join("init.pid");
        self.begin(
            "create",
            &["--bundle", dir.to_str().unwrap(), "--pid-file", pid.to_str().unwrap(), name],
        )
    }

    /// The processes in the groups of a container.
    fn members(&self, name: &str) -> String {
        let groups = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
        let groups = groups.chain(["/sys/fs/cgroup".into()]);
        let procs = groups.map(|group| group.join(self.id(name)).join("cgroup.procs"));
        procs.map(|procs| fs::read_to_string(procs).unwrap_or_default()).collect()
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

    /// A container is restored, goes on to count to `least`, and is removed.
    #[track_caller]
    fn comes_back(&mut self, name: &str, least: u64) {
        self.asked.lock().unwrap().clear();
        self.bundle(name);
        assert!(self.create(name).status.success(), "{}", self.log());
        self.good("start", &[name]);
        assert_eq!(self.has_told(), (true, String::new()), "{name}");
        self.counted(name, least);
        self.good("delete", &["--force", name]);
    }

    /// Runs the container `old` of a script that counts, and has it give way. How far it has counted.
    fn saved_of(&mut self, script: &str) -> u64 {
        self.bundle_of("old", "old", "main", script);
        self.gives_way("old")
    }

    /// Runs the container of a bundle, and has it give way. How far it has counted.
    fn gives_way(&self, name: &str) -> u64 {
        assert!(self.create(name).status.success(), "{}", self.log());
        self.good("start", &[name]);
        self.counted(name, 5);
        // What runs no more cannot be told to end, which the shim knows how to take.
        let _ = self.runc("kill", &[name, "15"]);
        until("the container has ended", || (self.status(name) == "stopped").then_some(()));
        self.good("delete", &[name]);
        self.count(name).unwrap()
    }

    /// Runs a container, and has it give way.
    fn saved(&mut self, name: &str) -> u64 {
        self.bundle(name);
        fs::write(self.data(name).join("kept"), "in an emptyDir").unwrap();
        self.gives_way(name)
    }

    /// Runs a container of a pod that goes on after a checkpoint, and says how far it has counted.
    fn running(&mut self, name: &str) -> u64 {
        self.bundle(name);
        assert!(self.create(name).status.success(), "{}", self.log());
        self.good("start", &[name]);
        *self.saved.lock().unwrap() = Answer::Thaw;
        self.counted(name, 5)
    }

    /// Begins a checkpoint that was ordered.
    fn checkpoint(&self, name: &str) -> Child {
        let images = self.path("kubelet").display().to_string();
        let words = ["--image-path", &images, "--work-path", &images, "--leave-running", name];
        self.begin("checkpoint", &words)
    }

    /// Begins a checkpoint, and waits until the pod is frozen and the agent told, which says nothing. Returns
    /// the call and the process that does its work.
    fn unanswered(&self, name: &str) -> (Child, i32) {
        self.silent.lock().unwrap().push(|ask| matches!(ask, Ask::Saved { error: None, .. }));
        let call = self.checkpoint(name);
        until("the agent is told", || (!self.unanswered.lock().unwrap().is_empty()).then_some(()));
        assert_eq!(self.status(name), "paused");
        let worker = worker(&call);
        (call, worker)
    }

    /// From now on a checkpoint does not come to its end: what it waits for is in the file.
    fn hangs(&mut self) -> PathBuf {
        let (script, hangs) = (self.path("hanging-runc"), self.path("hangs"));
        let text = format!(
            "#!/bin/sh\nfor word; do\n\t[ $word = checkpoint ] || continue\n\
             \tsleep 10000 & echo $! >{0}.part; mv {0}.part {0}; wait\ndone\nexec runc \"$@\"\n",
            hangs.display()
        );
        write_script(&script, &text);
        self.runc = script;
        hangs
    }

    /// Waits until a checkpoint that hangs has ended: what it waits for was killed, and somebody has waited for that.
    fn has_gone(&self, hanging: &str) {
        let process = Path::new("/proc").join(hanging.trim());
        until("the checkpoint has ended", || (!process.exists()).then_some(()));
    }

    /// From now on runc fails to do something with a container, or with any if `id` is empty. Returns the runc that was.
    fn fails(&mut self, action: &str, id: &str) -> PathBuf {
        let script = self.path("failing-runc");
        let text = format!(
            "#!/bin/sh\ncase \" $* \" in *' {action} '*'{id} '*) exit 1;; esac\nexec runc \"$@\"\n"
        );
        write_script(&script, &text);
        std::mem::replace(&mut self.runc, script)
    }

    /// From now on runc freezes containers, and says that it has not. Returns the runc that was.
    fn lies(&mut self) -> PathBuf {
        let script = self.path("lying-runc");
        let text = "#!/bin/sh\ncase \" $* \" in *' pause '*) runc \"$@\"; exit 1;; esac\nexec runc \"$@\"\n";
        write_script(&script, text);
        std::mem::replace(&mut self.runc, script)
    }

    /// Whether a call of the wrapper, or what one has started, runs.
    fn is_busy(&self) -> bool {
        let place = self.place.path().to_str().unwrap();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        // What is no process has no command line.
        let line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
        processes.map(line).any(|line| String::from_utf8_lossy(&line).contains(place))
    }

    /// What went wrong with the last pod that was to be saved.
    fn not_saved(&self) -> Option<String> {
        match self.asked.lock().unwrap().last() {
            Some(Ask::Saved { error, .. }) => error.clone(),
            _ => None,
        }
    }

    /// What shows beside the checkpoint that the container of a pod has begun with it.
    fn begun(&self, pod: &str) -> PathBuf {
        self.path("checkpoint/work/begun").join(format!("uid-{pod}.main"))
    }

    /// The file that whoever lets the container of a pod go has locked, or whoever ends it.
    fn decides(&self, pod: &str) -> File {
        let file = self.path("checkpoint/work/made").join(format!("uid-{pod}.main"));
        let file = File::open(file).unwrap();
        file.lock().unwrap();
        file
    }

    /// Waits until a container has to die when it is not frozen any more.
    fn is_killed(&self, name: &str) {
        let members = self.members(name);
        let is_hit = |pid: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
            u64::from_str_radix(pending.unwrap().trim(), 16).unwrap() >> 8 & 1 == 1
        };
        until("it has to die", || members.lines().all(is_hit).then_some(()));
    }

    /// What the wrapper tells of the container that was started last, once it has begun.
    fn has_told(&self) -> (bool, String) {
        until("the agent is told of it", || self.told())
    }

    /// What the wrapper has told of the container that has begun last.
    fn told(&self) -> Option<(bool, String)> {
        let asked = self.asked.lock().unwrap();
        asked.iter().rev().find_map(|ask| match ask {
            Ask::Begins { restored, reason, .. } => Some((*restored, reason.clone())),
            _ => None,
        })
    }
}

#[test]
fn a_container_gives_way_and_waits_restored_for_its_start() {
    let Some(mut node) = Node::new("a_container_gives_way") else { return };
    let last = node.saved("old");
    node.bundle("new");
    let created = node.create("new");
    assert!(created.status.success(), "{}", node.log());
    assert_eq!(node.status("new"), "created");
    assert_eq!(node.count("new"), Some(last), "it runs before it is started");
    let pid = fs::read_to_string(node.path("new/init.pid")).unwrap();
    assert!(Path::new("/proc").join(pid.trim()).exists());
    let kept = node.data("new").join("kept");
    assert_eq!(fs::read_to_string(kept).unwrap(), "in an emptyDir");
    assert_eq!(node.count("new"), Some(last), "it runs before it is started");
    // If containerd is killed before it starts the container, it makes another one, which is restored as well.
    assert_eq!(node.told(), None);
    assert!(!node.begun("new").exists(), "it has not begun");
    node.good("start", &["new"]);
    // What comes next finds it running.
    node.good("exec", &["new", "true"]);
    assert_eq!(node.has_told(), (true, String::new()));
    assert!(node.begun("new").exists(), "what the agent finds that has not heard it");
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
    assert!(node.told().is_none() && !node.begun("cold").exists(), "it has not begun");
    assert_eq!(node.count("cold"), None, "changed files were left behind");
    let volume = node.data("cold");
    assert!(fs::read_dir(volume).unwrap().next().is_none());
    node.good("start", &["cold"]);
    let (restored, reason) = node.has_told();
    assert!(!restored && !reason.is_empty() && node.begun("cold").exists());
    assert!(node.counted("cold", 1) < last + 1000);
    node.good("delete", &["--force", "cold"]);

    *node.always.lock().unwrap() = true;
    node.bundle("never");
    assert!(!node.create("never").status.success());
    assert!(node.log().contains("restore: "), "{}", node.log());
    assert!(!node.begun("never").exists(), "it is tried again");
    assert_eq!(node.status("never"), "");
}

#[test]
fn what_a_restore_has_left_is_removed_before_a_cold_start() {
    let Some(mut node) = Node::new("what_a_restore_has_left") else { return };
    node.saved("old");
    // A restore that is killed leaves the container, and it is not removed at once.
    let (script, busy) = (node.path("killed-runc"), node.path("busy"));
    let text = format!(
        "#!/bin/sh\nfor word; do\n\tid=$word\ndone\nfor word; do\n\tcase $word in\n\
         \trestore) mkdir $2/$id; touch {0}; exit 1 ;;\n\
         \tdelete) ! rm {0} 2>/dev/null || exit 1 ;;\n\tesac\ndone\nexec runc \"$@\"\n",
        busy.display()
    );
    write_script(&script, &text);
    node.runc = script;
    node.bundle("cold");
    assert!(node.create("cold").status.success(), "{}", node.log());
    node.good("start", &["cold"]);
    assert!(!node.has_told().0 && !busy.exists());
    node.counted("cold", 1);
    node.good("delete", &["--force", "cold"]);
}

#[test]
fn a_sealed_container_comes_back_with_its_key_alone() {
    let Some(mut node) = Node::new("a_sealed_container") else { return };
    let (identity, key) = AgeIdentity::generate().unwrap();
    let recipient = identity.recipient().to_string();
    *node.key.lock().unwrap() = Some((recipient.clone(), key.to_string()));
    let last = node.saved("old");
    let checkpoint = node.path("checkpoint");
    assert!(checkpoint.join("containers/main/seal.img").exists());
    let archive = fs::read(checkpoint.join("volume.empty-dir.data.tar")).unwrap();
    assert!(!archive.windows(14).any(|part| part == b"in an emptyDir"));
    node.bundle("new");
    assert!(node.create("new").status.success(), "{}", node.log());
    let kept = node.data("new").join("kept");
    assert_eq!(fs::read_to_string(kept).unwrap(), "in an emptyDir");
    node.good("start", &["new"]);
    assert_eq!(node.has_told(), (true, String::new()));
    node.counted("new", last + 5);
    node.good("delete", &["--force", "new"]);
    // The key of another image, an image that was changed, and one that has lost its seal: all start cold, before
    // anything was made that would have to be undone.
    let (_, other) = AgeIdentity::generate().unwrap();
    *node.key.lock().unwrap() = Some((recipient.clone(), other.to_string()));
    for name in ["foreign", "changed", "stripped"] {
        if name == "changed" {
            fs::write(checkpoint.join("containers/main/core-1.img"), "forged").unwrap();
        }
        node.bundle(name);
        assert!(node.create(name).status.success(), "{}", node.log());
        assert_eq!(node.count(name), None);
        let log = node.path(name).join("torpor/restore.log");
        assert!(!log.exists(), "{name}: the engine was called");
        node.asked.lock().unwrap().clear();
        node.good("start", &[name]);
        assert!(!node.has_told().0, "{name}: {:?}", node.told());
        node.good("delete", &["--force", name]);
        *node.key.lock().unwrap() = Some((recipient.clone(), key.to_string()));
        if name == "changed" {
            fs::remove_file(checkpoint.join("containers/main/seal.img")).unwrap();
        }
    }
}

#[test]
fn a_checkpoint_that_was_ordered_lets_the_pod_go_on_or_ends_it() {
    let Some(mut node) = Node::new("a_checkpoint_that_was_ordered") else { return };
    let before = node.running("pod");
    // containerd pauses a container before, and resumes it afterwards.
    node.good("pause", &["pod"]);
    assert!(!node.checkpoint("pod").wait().unwrap().success(), "the kubelet gets nothing");
    assert!(node.path("checkpoint/containers/main/inventory.img").exists());
    assert_eq!(node.status("pod"), "paused", "it is containerd's to thaw");
    node.good("resume", &["pod"]);
    node.counted("pod", before + 5);
    // Whoever has ordered its end has it ended frozen.
    fs::remove_dir_all(node.path("checkpoint")).unwrap();
    *node.saved.lock().unwrap() = Answer::Noted;
    let _ = node.checkpoint("pod").wait().unwrap();
    until("the container has ended", || (node.status("pod") == "stopped").then_some(()));
    node.good("delete", &["pod"]);
}

#[test]
fn what_is_frozen_was_frozen_whatever_runc_says() {
    let Some(mut node) = Node::new("what_is_frozen_was_frozen") else { return };
    let before = node.running("pod");
    let runc = node.lies();
    let _ = node.checkpoint("pod").wait().unwrap();
    node.runc = runc;
    assert_eq!(node.not_saved(), None);
    assert!(node.path("checkpoint/containers/main/inventory.img").exists());
    node.counted("pod", before + 5);
    node.good("delete", &["--force", "pod"]);
}

#[test]
fn a_pod_that_is_not_saved_in_time_is_told_to_end_as_ever() {
    let Some(mut node) = Node::new("a_pod_that_is_not_saved_in_time") else { return };
    let script = format!("trap 'echo $i >/told; exit' TERM; {COUNT}");
    node.bundle_of("pod", "pod", "main", &script);
    assert!(node.create("pod").status.success(), "{}", node.log());
    node.good("start", &["pod"]);
    node.counted("pod", 5);
    let hangs = node.hangs();
    // A busy machine may take many before it hangs.
    *node.seconds.lock().unwrap() = 30;
    let mut call = node.begin("kill", &["pod", "15"]);
    let hanging = until("it hangs", || fs::read_to_string(&hangs).ok());
    let frozen = node.count("pod").unwrap();
    assert!(call.wait().unwrap().success(), "{}", node.log());
    until("it has ended by its signal", || (node.status("pod") == "stopped").then_some(()));
    let told = fs::read_to_string(node.path("pod/rootfs/told")).unwrap();
    assert!(told.trim().parse::<u64>().unwrap() >= frozen, "{told}");
    assert!(node.not_saved().is_some(), "the agent knows");
    node.has_gone(&hanging);
    node.good("delete", &["pod"]);
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
