//! Bundles and containers of unmodified runc.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use serde_json::{Value, json};

use crate::command::{Run, command, wait};
use crate::network::Network;
use crate::process;
use crate::rootfs;
use crate::scratch::Scratch;
use crate::wait::{until, until_true};

/// A directory with a root file system and a configuration: what `runc spec` gives (all default
/// namespaces, mounts, masked and read-only paths), changed by the methods.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    config: Value,
}

impl Bundle {
    /// A bundle that runs `words`, with busybox and `programs` in its root file system. It has no
    /// terminal, and its files can be written.
    pub fn new(scratch: &Scratch, programs: &[&str], words: &[&str]) -> Self {
        let dir = scratch.dir("bundle");
        rootfs::make(&dir.join("rootfs"), programs);
        scratch.command("runc").current_dir(&dir).arg("spec").succeed();
        let text = fs::read_to_string(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(words);
        config["root"]["readonly"] = json!(false);
        Self { dir, config }
    }

    /// A copy of this bundle on another host, of which the other scratch directory is the disk.
    pub fn copy_to(&self, scratch: &Scratch) -> Self {
        let dir = scratch.join("bundle");
        command("cp", &["-a"]).arg(&self.dir).arg(&dir).succeed();
        Self { dir, config: self.config.clone() }
    }

    /// Gives the container a terminal.
    pub fn terminal(mut self) -> Self {
        self.config["process"]["terminal"] = json!(true);
        self
    }

    /// Puts the container into a network namespace that exists.
    pub fn network(mut self, network: &Network) -> Self {
        for namespace in self.config["linux"]["namespaces"].as_array_mut().unwrap() {
            if namespace["type"] == "network" {
                namespace["path"] = json!(network.path());
            }
        }
        self
    }

    /// Mounts a directory of the host.
    pub fn bind(mut self, source: &Path, target: &str, access: &str) -> Self {
        self.mount(source, target, &["rbind", access]);
        self
    }

    fn mount(&mut self, source: &Path, target: &str, options: &[&str]) {
        let mount = json!({
            "type": "bind", "source": source, "destination": target, "options": options,
        });
        self.config["mounts"].as_array_mut().unwrap().push(mount);
    }

    /// Makes all programs of the host available, by read-only mounts in place of what
    /// [`rootfs::make`] has put there. What is mounted below comes and goes with others, and not along.
    pub fn host_programs(mut self) -> Self {
        let root = self.dir.join("rootfs");
        for name in ["bin", "sbin", "lib", "lib64"] {
            fs::remove_dir_all(root.join(name)).unwrap();
            std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name)).unwrap();
        }
        for dir in ["/usr", "/etc"] {
            self.mount(Path::new(dir), dir, &["bind", "private", "ro"]);
        }
        self
    }

    /// Changes the configuration in a way that this type has no name for.
    pub fn configure(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.config);
        self
    }

    /// A path in the container, as the host sees it.
    pub fn file(&self, path: &str) -> PathBuf {
        self.dir.join("rootfs").join(path.trim_start_matches('/'))
    }

    /// Writes a file into the root file system.
    pub fn write(&self, path: &str, text: &str) {
        fs::write(self.file(path), text).unwrap();
    }
}

/// A container of runc, with a state directory of its own. It goes with this value.
#[derive(Debug)]
pub struct Container<'a> {
    scratch: &'a Scratch,
    bundle: &'a Bundle,
    id: String,
    /// The runc that stays in front of a container which is not detached.
    front: Option<Child>,
    images: PathBuf,
    /// How many rounds of memory have been saved.
    rounds: u32,
}

impl<'a> Container<'a> {
    /// Runs the bundle detached.
    #[track_caller]
    pub fn start(scratch: &'a Scratch, bundle: &'a Bundle) -> Self {
        let container = Self::new(scratch, bundle);
        container.detached(container.run());
        container.begins();
        container
    }

    /// Runs the bundle detached, its terminal handed over at `console`.
    #[track_caller]
    pub fn start_with_console(scratch: &'a Scratch, bundle: &'a Bundle, console: &Path) -> Self {
        let container = Self::new(scratch, bundle);
        container
            .run()
            .arg("--detach")
            .arg("--console-socket")
            .arg(console)
            .arg(&container.id)
            .succeed();
        container.begins();
        container
    }

    /// Runs the bundle with a runc that stays in front and copies the output to `output.log`.
    #[track_caller]
    pub fn start_attached(scratch: &'a Scratch, bundle: &'a Bundle) -> Self {
        let mut container = Self::new(scratch, bundle);
        let mut command = container.run();
        command.arg(&container.id);
        container.stay_in_front(command);
        container
    }

    /// A container that has yet to be started, with [`Container::run`].
    pub fn new(scratch: &'a Scratch, bundle: &'a Bundle) -> Self {
        let text = serde_json::to_string_pretty(&bundle.config).unwrap();
        fs::write(bundle.dir.join("config.json"), text).unwrap();
        let id = scratch.name().to_owned();
        Self { scratch, bundle, id, front: None, images: scratch.dir("images"), rounds: 0 }
    }

    /// The same container on another host, of which the other scratch directory is the disk: its
    /// images are copied there.
    pub fn copy_to(&self, scratch: &'a Scratch, bundle: &'a Bundle) -> Self {
        let mut other = Self::new(scratch, bundle);
        other.id.clone_from(&self.id);
        fs::remove_dir(&other.images).unwrap();
        command("cp", &["-a"]).arg(&self.images).arg(&other.images).succeed();
        other
    }

    /// The name of the container.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// `runc run`, still without `--detach` and the name.
    pub fn run(&self) -> Command {
        let mut command = self.runc("run");
        command.arg("--bundle").arg(&self.bundle.dir);
        command
    }

    /// `runc ACTION`.
    pub fn runc(&self, action: &str) -> Command {
        let mut command = self.scratch.command("runc");
        command
            .arg("--root")
            .arg(self.scratch.join("runc"))
            .arg("--log")
            .arg(self.log())
            .arg(action);
        command
    }

    /// The first process of the container, as the host counts.
    #[track_caller]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.state()["pid"].as_i64().unwrap()).unwrap()
    }

    /// What `runc state` says.
    #[track_caller]
    pub fn state(&self) -> Value {
        serde_json::from_str(&self.runc("state").arg(&self.id).succeed()).unwrap()
    }

    /// All processes of the container by their ids inside, with name and parent.
    #[track_caller]
    pub fn processes(&self) -> BTreeMap<i32, (String, i32)> {
        inner_processes(self.pid())
    }

    /// The cgroups of the container's first process, a line each, but for the root of a hierarchy: others may
    /// mount and leave one meanwhile.
    #[track_caller]
    pub fn cgroups(&self) -> String {
        let all = fs::read_to_string(format!("/proc/{}/cgroup", self.pid())).unwrap();
        all.lines().filter(|line| !line.ends_with(":/")).collect::<Vec<_>>().join("\n")
    }

    /// `runc checkpoint`, still without the name.
    pub fn checkpoint_call(&self, options: &[&str]) -> Command {
        self.with_images("checkpoint", options)
    }

    /// Saves the memory and leaves the container running; later dumps save only what has changed.
    #[track_caller]
    pub fn pre_dump(&mut self, options: &[&str]) {
        let mut call = self.checkpoint_call(&[&["--pre-dump"], options].concat());
        call.args(self.parent()).arg(&self.id).succeed();
        self.rounds += 1;
        fs::rename(&self.images, self.round(self.rounds)).unwrap();
        self.images = self.scratch.dir("images");
    }

    /// The images of a round of [`Container::pre_dump`], counted from 1.
    pub fn round(&self, number: u32) -> PathBuf {
        self.scratch.join(&format!("round-{number}"))
    }

    /// The options that name the images of the last round.
    fn parent(&self) -> Vec<String> {
        match self.rounds {
            0 => Vec::new(),
            last => vec!["--parent-path".to_owned(), format!("../round-{last}")],
        }
    }

    /// Checkpoints the container. Nothing of it may be left.
    #[track_caller]
    pub fn checkpoint(&mut self, options: &[&str]) {
        let pids = process::tree(self.pid());
        let mut call = self.checkpoint_call(options);
        call.args(self.parent()).arg(&self.id).succeed();
        if let Some(mut front) = self.front.take() {
            wait(&mut front).expect("the runc in front ends with its container");
        }
        process::wait_gone(pids.keys());
        self.runc("state").arg(&self.id).fail();
    }

    /// `runc restore`, still without the name and without `--detach`.
    pub fn restore_call(&self, options: &[&str]) -> Command {
        let mut command = self.with_images("restore", options);
        command.arg("--bundle").arg(&self.bundle.dir);
        command
    }

    /// Restores the container detached.
    #[track_caller]
    pub fn restore(&mut self, options: &[&str]) {
        self.detached(self.restore_call(options));
        self.expect("running");
    }

    /// Restores the container detached, which is to be paused then.
    #[track_caller]
    pub fn restore_paused(&mut self, options: &[&str]) {
        self.detached(self.restore_call(options));
        self.expect("paused");
    }

    /// Waits until the program of a container that runs has begun. Its first process is a part of runc's until
    /// then, and runc does not wait for that.
    #[track_caller]
    fn begins(&self) {
        self.expect("running");
        let pid = self.pid();
        until_true("the program begins", || {
            process::name(pid).is_none_or(|name| !name.starts_with("runc:["))
        });
    }

    /// Has `runc run` or `runc restore` leave the container behind. The container gets the
    /// streams of the call: no file of the host's, which no checkpoint could have.
    #[track_caller]
    fn detached(&self, mut call: Command) {
        let null = || File::options().read(true).write(true).open("/dev/null").unwrap();
        call.arg("--detach").arg(&self.id);
        call.stdin(null()).stdout(null()).stderr(null());
        let status = wait(&mut call.spawn().unwrap()).expect("runc ends");
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        assert!(status.success(), "{call:?}: {status}\n{log}");
    }

    /// What runc has to say, beside its output.
    fn log(&self) -> PathBuf {
        self.scratch.join("runc.log")
    }

    /// Restores the container with a runc that stays in front.
    #[track_caller]
    pub fn restore_attached(&mut self, options: &[&str]) {
        let mut command = self.restore_call(options);
        command.arg(&self.id);
        self.stay_in_front(command);
    }

    /// Checkpoints and restores, with the same options. All processes must be there again.
    #[track_caller]
    pub fn sleep_and_wake(&mut self, options: &[&str]) {
        let before = self.processes();
        self.checkpoint(options);
        self.restore(options);
        assert_eq!(self.processes(), before);
    }

    fn with_images(&self, action: &str, options: &[&str]) -> Command {
        let mut command = self.runc(action);
        command.arg("--image-path").arg(&self.images);
        command.arg("--work-path").arg(self.scratch.dir("work")).args(options);
        command
    }

    #[track_caller]
    fn stay_in_front(&mut self, mut command: Command) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.scratch.join("output.log"))
            .unwrap();
        command.stdin(File::open("/dev/null").unwrap());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let line = format!("{command:?}");
        let mut front = command.spawn().unwrap();
        until(&line, || {
            if let Some(status) = front.try_wait().unwrap() {
                let log = fs::read_to_string(self.scratch.join("output.log")).unwrap();
                panic!("{line}: {status}\n{log}");
            }
            let state = self.runc("state").arg(&self.id).finish();
            let state: Value = serde_json::from_str(&state.stdout).ok()?;
            (state["status"] == "running").then_some(())
        });
        self.front = Some(front);
    }

    #[track_caller]
    fn expect(&self, status: &str) {
        assert_eq!(self.state()["status"], status);
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let _ = self.runc("delete").arg("--force").arg(&self.id).finish();
        if let Some(front) = &mut self.front {
            let _ = wait(front);
        }
    }
}

/// All processes below `root` by their ids in their innermost pid namespace, with name and parent.
/// What a shell runs for a moment only is left out: it is there in one look and not in the next. Between two looks
/// another such process lives all of its life, which takes as long as theirs on a busy machine, too.
pub fn inner_processes(root: i32) -> BTreeMap<i32, (String, i32)> {
    let mut found = look(root);
    for _ in 0..4 {
        command("sleep", &["0.05"]).succeed();
        let again = look(root);
        found.retain(|pid, facts| again.get(pid) == Some(facts));
    }
    found
}

fn look(root: i32) -> BTreeMap<i32, (String, i32)> {
    let tree = process::tree(root);
    let inner: BTreeMap<i32, i32> =
        tree.keys().filter_map(|pid| Some((*pid, process::inner_pid(*pid)?))).collect();
    let facts = tree.iter().filter_map(|(pid, facts)| {
        let parent = inner.get(&facts.parent).copied().unwrap_or(0);
        Some((*inner.get(pid)?, (facts.name.clone(), parent)))
    });
    facts.collect()
}

/// Waits until `file` has more lines than now, and returns its last whole line.
#[track_caller]
pub fn next_line(file: &Path) -> String {
    let lines = || fs::read_to_string(file).unwrap_or_default().matches('\n').count();
    let before = lines();
    until_true(&format!("{} grows", file.display()), || lines() > before);
    let text = fs::read_to_string(file).unwrap();
    text[..text.rfind('\n').unwrap()].lines().last().unwrap().to_owned()
}

/// Whether a cgroup of this name is left in any hierarchy.
pub fn cgroup_left(name: &str) -> bool {
    // Not by a walk: groups of other tests go meanwhile.
    let top = Path::new("/sys/fs/cgroup");
    let mut hierarchies = fs::read_dir(top).unwrap();
    top.join(name).exists() || hierarchies.any(|entry| entry.unwrap().path().join(name).exists())
}
