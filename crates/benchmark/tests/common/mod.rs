//! What the tests share: the program, directories of their own, and what may not be left behind.

#![allow(dead_code, reason = "each test takes what it needs")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

pub mod daemon;
pub mod fake;
pub mod images;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The `torpor` of this build, which acts as `criu`; `TORPOR_BIN` names another one.
pub fn torpor() -> PathBuf {
    if let Some(path) = std::env::var_os("TORPOR_BIN") {
        return path.into();
    }
    let tool = Path::new(env!("CARGO_BIN_EXE_torpor-benchmark"));
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    build.args(["build", "--quiet", "--locked", "--package", "torpor-cli"]);
    if tool.parent().unwrap().ends_with("release") {
        build.arg("--release");
    }
    success(&build.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap());
    tool.with_file_name("torpor")
}

/// A directory in which all that a test makes has its place.
pub struct TestDir {
    dir: tempfile::TempDir,
}

impl TestDir {
    pub fn new() -> Self {
        let test_dir = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(test_dir.path("tmp")).unwrap();
        test_dir
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn config(&self, text: &str) -> PathBuf {
        let path = self.path("config.yaml");
        fs::write(&path, text).unwrap();
        path
    }

    /// The program, with this directory for its temporary files.
    pub fn tool(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor-benchmark"));
        command.env("TMPDIR", self.path("tmp")).stdin(Stdio::null());
        command
    }

    /// `run` into the directory `out`.
    pub fn run(&self) -> Command {
        let mut command = self.tool();
        command.arg("run").arg("--output").arg(self.path("out")).arg(self.path("config.yaml"));
        command
    }

    pub fn results(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("out/results.json")).unwrap()).unwrap()
    }

    /// Waits until nothing of a run is left: no directory, process, control group or mount.
    pub fn assert_clean(&self) {
        let tmp = self.path("tmp");
        wait(
            || fs::read_dir(&tmp).unwrap().next().is_none(),
            || format!("left in {}: {:?}", tmp.display(), names(&tmp)),
        );
        let text = tmp.display().to_string();
        wait(|| processes(&text).is_empty(), || format!("processes: {:?}", processes(&text)));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&text), "mounts are left: {mounts}");
    }

    /// The processes that name this directory in their command lines.
    pub fn processes(&self) -> Vec<(i32, String)> {
        processes(&self.path("tmp").display().to_string())
    }

    /// Names of control groups of runs with directories in this directory.
    pub fn groups(&self) -> Vec<String> {
        names(&self.path("tmp"))
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Whether a control group with this name is in any hierarchy.
pub fn group_exists(name: &str) -> bool {
    let root = Path::new("/sys/fs/cgroup");
    root.join(name).exists() || names(root).iter().any(|dir| root.join(dir).join(name).exists())
}

pub fn processes(text: &str) -> Vec<(i32, String)> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for name in names(Path::new("/proc")) {
        let (Ok(pid), true) = (name.parse(), name != own) else {
            continue;
        };
        let line = fs::read(format!("/proc/{name}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(text) {
            found.push((pid, line));
        }
    }
    found
}

/// Says that a test is left out for what is not installed. Where everything is to be tested it fails.
pub fn left_out(test: &str, needs: &str) {
    assert!(std::env::var_os("TORPOR_LONG").is_none(), "{test} takes {needs}");
    eprintln!("left out: {test} (it takes {needs})");
}

/// Polls until something holds.
pub fn wait(holds: impl Fn() -> bool, otherwise: impl Fn() -> String) {
    let until = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < until, "{}", otherwise());
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

pub fn success(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{said}\n{errors}", output.status);
    said
}

/// The row of a benchmark.
pub fn row<'a>(results: &'a Value, benchmark: &str, target: &str) -> &'a Value {
    let mut rows = results["rows"].as_array().unwrap().iter();
    rows.find(|row| row["benchmark"] == benchmark && row["target"] == target)
        .unwrap_or_else(|| panic!("no row of {benchmark} and {target}"))
}

/// How many samples a row has, without warm-up.
pub fn samples(row: &Value) -> usize {
    let samples = row["samples"].as_array().unwrap();
    samples.iter().filter(|sample| sample["warmup"] == false).count()
}
