//! The fixture of one test: a bundle, a store, and containers that go with it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// The application that all tests use, built once.
fn app() -> &'static Path {
    static APP: OnceLock<PathBuf> = OnceLock::new();
    APP.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("snapshot-app-{}", std::process::id()));
        compile("app", &program);
        program
    })
}

/// Compiles a program of these tests.
#[track_caller]
pub fn compile(name: &str, program: &Path) {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live").join(name).with_extension("c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-static", "-o"]).arg(program).arg(source);
    assert!(cc.status().unwrap().success());
}

/// The `torpor` of this build.
pub fn torpor() -> PathBuf {
    if let Some(path) = std::env::var_os("TORPOR_BIN") {
        return path.into();
    }
    let built = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("torpor");
    assert!(built.exists(), "no {}: run `cargo build` first", built.display());
    built
}

/// Makes a script that can be run. Another process writes it: a file that this one has open for writing is open for a moment
/// in what another thread starts meanwhile, too (`ETXTBSY`).
pub fn write_script(path: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""]).arg(path).arg(text);
    assert!(shell.status().unwrap().success());
}

/// A program that is found first on a path, notes in a file what it is called with, and does what it does usually.
pub struct Noted {
    /// The path.
    pub path: OsString,
    calls: PathBuf,
}

impl Noted {
    /// The program of this name on `path`; `dir` is for the files.
    pub fn new(dir: &Path, program: &str, path: &OsStr) -> Self {
        let usual = usual(program, path);
        let (bin, calls) = (dir.join("noted"), dir.join("calls"));
        fs::create_dir_all(&bin).unwrap();
        let script = bin.join(program);
        let (shown, usual) = (calls.display(), usual.display());
        let text = format!("#!/bin/sh\necho \"$*\" >>{shown}\nexec {usual} \"$@\"\n");
        write_script(&script, &text);
        let paths = std::iter::once(bin).chain(std::env::split_paths(path));
        Self { path: std::env::join_paths(paths).unwrap(), calls }
    }

    /// What it was called with since this was asked last.
    pub fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(&self.calls).unwrap_or_default();
        let _ = fs::remove_file(&self.calls);
        calls.lines().map(str::to_owned).collect()
    }
}

/// The program that is found on a path.
#[track_caller]
pub fn usual(program: &str, path: &OsStr) -> PathBuf {
    let mut found = std::env::split_paths(path).map(|dir| dir.join(program));
    found.find(|file| file.exists()).unwrap()
}

pub struct Fixture {
    pub dir: TempDir,
    name: String,
    pages: usize,
    /// How many seconds a registry may be silent, if not as many as usual.
    pub patience: Option<u32>,
}

impl Fixture {
    /// A fixture with a bundle of the application, with so many pages.
    pub fn new(name: &str, pages: usize) -> Self {
        let dir = tempfile::Builder::new().prefix(&format!("torpor-{name}-")).tempdir().unwrap();
        let fixture = Self {
            dir,
            name: format!("torpor-{name}-{}", std::process::id()),
            pages,
            patience: None,
        };
        let root = fixture.path("bundle/rootfs");
        for part in ["proc", "sys", "dev", "tmp", "etc", "run", "bin"] {
            fs::create_dir_all(root.join(part)).unwrap();
        }
        fs::copy(app(), root.join("app")).unwrap();
        fs::copy("/usr/bin/busybox", root.join("bin/busybox")).unwrap();
        for applet in ["sh", "cat", "hostname", "test", "kill"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
        fs::write(root.join("etc/doomed"), "there").unwrap();
        fixture.configure(|config| {
            config["process"]["args"] =
                serde_json::json!(["/app", pages.to_string(), "1", "20", "1"]);
        });
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Changes the configuration of the bundle.
    pub fn configure(&self, change: impl FnOnce(&mut Value)) {
        let bundle = self.path("bundle");
        let file = bundle.join("config.json");
        if !file.exists() {
            let mut spec = Command::new("runc");
            assert!(spec.arg("spec").current_dir(&bundle).status().unwrap().success());
        }
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        config["process"]["terminal"] = false.into();
        config["root"]["readonly"] = false.into();
        change(&mut config);
        fs::write(&file, serde_json::to_vec_pretty(&config).unwrap()).unwrap();
    }

    /// The reference of a snapshot in a directory.
    pub fn reference(&self) -> String {
        format!("dir:{}", self.path("store").display())
    }

    /// The name of a container of this test.
    pub fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    pub fn torpor(&self, words: &[&str]) -> Command {
        let mut command = Command::new(torpor());
        command.arg("snapshot").args(words).stdin(Stdio::null());
        command.env("TORPOR_STATE", self.path("state")).env("TORPOR_CACHE", self.path("cache"));
        if let Some(seconds) = self.patience {
            command.env("TORPOR_REGISTRY_TIMEOUT", seconds.to_string());
        }
        command
    }

    pub fn try_create(&self, reference: &str, more: &[&str]) -> Output {
        let mut create = self.torpor(&["create", reference]);
        create.arg("--from").arg(format!("runc:{}", self.path("bundle").display()));
        create.arg("--json").arg("--runc-root").arg(self.path("runc"));
        create.args(more).output().unwrap()
    }

    /// Makes a snapshot; what is said about it.
    #[track_caller]
    pub fn create(&self, reference: &str, more: &[&str]) -> Value {
        let ready = ["--ready", "exec:/app ask page 3"];
        let output = self.try_create(reference, &[&ready, more].concat());
        assert!(output.status.success(), "{}", shown(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn try_run(&self, reference: &str, name: &str, more: &[&str]) -> Output {
        let mut run = self.torpor(&["run", reference, "--id", &self.id(name), "--json"]);
        run.arg("--runc-root").arg(self.path("runc")).args(more).output().unwrap()
    }

    /// Starts a container, which is to come from `from`; the object that is said about it.
    #[track_caller]
    pub fn run(&self, reference: &str, name: &str, from: &str, more: &[&str]) -> Value {
        let output = self.try_run(reference, name, more);
        let said: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}\n{}", shown(&output)));
        assert_eq!(said["started_from"], from, "{}", shown(&output));
        said
    }

    pub fn runc(&self, words: &[&str]) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.path("runc")).args(words).stdin(Stdio::null());
        command
    }

    /// What a command in a container prints.
    #[track_caller]
    pub fn exec(&self, name: &str, words: &[&str]) -> String {
        let output = self.runc(&["exec", &self.id(name)]).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", shown(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Waits until a container answers, which has to be what its bundle has it answer.
    #[track_caller]
    pub fn answers_right(&self, name: &str) {
        until("it answers", || {
            self.runc(&["exec", &self.id(name), "/app", "ask", "random"])
                .output()
                .unwrap()
                .status
                .success()
        });
        assert_eq!(self.exec(name, &["/app", "ask", "sum"]), sum(self.pages as u64));
    }

    /// Makes this another machine than the one that has made the snapshots so far.
    pub fn move_away(&self) {
        for known in ["notes", "made"] {
            let _ = fs::remove_dir_all(self.path("state").join(known));
        }
    }

    /// From now on what belongs to containers is on a disk of so many bytes, with what is noted of places of snapshots.
    pub fn on_a_small_disk(&self, bytes: u64) -> SmallDisk {
        let state = self.path("state");
        let notes = fs::read_dir(state.join("notes")).unwrap().flatten();
        let notes: Vec<_> =
            notes.map(|note| (note.file_name(), fs::read(note.path()).unwrap())).collect();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&state);
        assert!(mount.status().unwrap().success());
        let disk = SmallDisk(state.clone());
        fs::create_dir(state.join("notes")).unwrap();
        for (name, note) in notes {
            fs::write(state.join("notes").join(name), note).unwrap();
        }
        disk
    }

    /// Ends a container.
    pub fn delete(&self, name: &str) {
        let _ = self.runc(&["delete", "--force", &self.id(name)]).output();
    }

    /// The blob in the store that is a layer with this number of `manifest.layers`.
    pub fn layer(&self, number: usize) -> PathBuf {
        let manifest = self.manifest();
        self.blob(manifest["layers"][number]["digest"].as_str().unwrap())
    }

    pub fn blob(&self, digest: &str) -> PathBuf {
        self.path("store/blobs/sha256").join(digest.trim_start_matches("sha256:"))
    }

    fn index(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("store/index.json")).unwrap()).unwrap()
    }

    /// The manifest of the first snapshot in the store.
    pub fn manifest(&self) -> Value {
        self.document(&self.digest())
    }

    /// The digest of that manifest.
    pub fn digest(&self) -> String {
        self.index()["manifests"][0]["digest"].as_str().unwrap().to_owned()
    }

    /// A blob in the store that is JSON.
    pub fn document(&self, digest: &str) -> Value {
        serde_json::from_slice(&fs::read(self.blob(digest)).unwrap()).unwrap()
    }

    /// Stores a blob, and has `descriptor` describe it.
    pub fn put(&self, bytes: &[u8], descriptor: &mut Value) {
        let digest = torpor_snapshot::oci::sha256(bytes);
        fs::write(self.blob(&digest), bytes).unwrap();
        descriptor["digest"] = digest.into();
        descriptor["size"] = bytes.len().into();
    }

    /// Gives the snapshot in the store another description.
    pub fn describe(&self, change: impl FnOnce(&mut Value)) {
        self.change("latest", |manifest| {
            let mut config = self.document(manifest["config"]["digest"].as_str().unwrap());
            change(&mut config["org.torpor.snapshot"]);
            self.put(&serde_json::to_vec(&config).unwrap(), &mut manifest["config"]);
        });
    }

    /// Changes the manifest that has a name in the store.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut index = self.index();
        let all = index["manifests"].as_array_mut().unwrap();
        let key = "org.opencontainers.image.ref.name";
        let entry = all.iter_mut().find(|entry| entry["annotations"][key] == name).unwrap();
        let mut manifest = self.document(entry["digest"].as_str().unwrap());
        change(&mut manifest);
        self.put(&serde_json::to_vec(&manifest).unwrap(), entry);
        fs::write(self.path("store/index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
    }
}

/// A small disk, until the value is dropped.
pub struct SmallDisk(PathBuf);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// What the application has in memory, as it answers to `sum`: so many pages from the seed 1.
fn sum(pages: u64) -> String {
    let mut sum = 0_u64;
    for number in 0..pages {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_add(number + 1);
        for word in 0..512 {
            if word % 4 == 0 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
            }
            let word = if word % 4 == 0 { state } else { 1 + number };
            sum = sum.wrapping_mul(31).wrapping_add(word);
        }
    }
    format!("{sum:016x}")
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let list = self.runc(&["list", "--quiet"]).output().unwrap();
        for id in String::from_utf8_lossy(&list.stdout).lines() {
            let _ = self.runc(&["delete", "--force", id]).output();
        }
        for entry in fs::read_dir(self.path("state/templates")).into_iter().flatten().flatten() {
            let process = fs::read_to_string(entry.path().join("template")).unwrap_or_default();
            let pid = process.split(' ').next().unwrap_or_default();
            if !pid.is_empty() {
                let _ = Command::new("kill").args(["-KILL", pid]).output();
            }
        }
        for entry in fs::read_dir(self.path("state/instances")).into_iter().flatten().flatten() {
            let _ = Command::new("umount").arg("-l").arg(entry.path().join("rootfs")).output();
        }
        if std::thread::panicking() {
            let kept = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap()).keep();
            eprintln!("--- kept: {}", kept.display());
        }
    }
}

pub fn shown(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(180);
    while !so() {
        assert!(std::time::Instant::now() < end, "{what}: not within three minutes");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
