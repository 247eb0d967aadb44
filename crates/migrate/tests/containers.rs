//! Containers of runc move, and that of the other host knows them.
//!
//! Both hosts are this one: each has a state directory of its own for runc.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "containers/given_up.rs"]
mod given_up;
mod support;
#[path = "containers/tidied.rs"]
mod tidied;
#[path = "containers/unusual.rs"]
mod unusual;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use support::proxy::{Fault, Plan, Point, Proxy};
use support::{Host, judge, torpor, wait_until};
use tempfile::TempDir;

/// A container that counts in a file of its own.
struct Container {
    dir: TempDir,
    id: String,
    /// Where runc keeps its state: here, and there.
    roots: [PathBuf; 2],
}

impl Container {
    fn start(change: impl FnOnce(&mut Value)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("bundle");
        let make = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/rootfs/make");
        fs::create_dir(&bundle).unwrap();
        let made = Command::new(make).arg(bundle.join("rootfs")).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        assert!(Command::new("runc").arg("spec").current_dir(&bundle).status().unwrap().success());
        let file = bundle.join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let script =
            "i=0; while :; do i=$((i+1)); echo $i > /new; mv /new /count; sleep 0.01; done";
        config["process"]["args"] = json!(["sh", "-c", script]);
        config["process"]["terminal"] = json!(false);
        config["root"]["readonly"] = json!(false);
        change(&mut config);
        fs::write(&file, config.to_string()).unwrap();
        let name = dir.path().file_name().unwrap().to_str().unwrap().trim_start_matches('.');
        let id = format!("torpor-{name}-{}", std::process::id());
        let roots = ["here", "there"].map(|name| dir.path().join(name));
        let container = Self { dir, id, roots };
        container.run();
        wait_until("it counts", || container.count() > 0);
        container
    }

    fn run(&self) {
        let mut run = self.runc(0, "run");
        run.arg("--bundle").arg(self.dir.path().join("bundle")).args(["--detach", &self.id]);
        let status = run.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(status.success());
    }

    fn runc(&self, host: usize, action: &str) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(&self.roots[host]).arg(action).stdin(Stdio::null());
        command
    }

    fn says(&self, host: usize, action: &str, words: &[&str]) -> String {
        let output = self.runc(host, action).args(words).output().unwrap();
        assert!(output.status.success(), "{action}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The ids that runc lists.
    fn listed(&self, host: usize) -> Vec<String> {
        let text = self.says(host, "list", &["--quiet"]);
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn count(&self) -> u64 {
        let text = fs::read_to_string(self.dir.path().join("bundle/rootfs/count"));
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    fn goes_on(&self) {
        let before = self.count();
        wait_until("the count grows", || self.count() > before + 3);
    }

    fn agent(&self) -> Host {
        let mut there = Host::new();
        there.options = vec!["--runtime-root".to_owned(), self.roots[1].display().to_string()];
        there.start_agent();
        there
    }

    fn moves(&self, here: &Host, mode: &str, to: &str) -> Result<Value, String> {
        self.moves_with(here, mode, &[], to)
    }

    fn moves_with(
        &self,
        here: &Host,
        mode: &str,
        more: &[&str],
        to: &str,
    ) -> Result<Value, String> {
        let root = self.roots[0].display().to_string();
        let args = [&self.id, "--runtime-root", &root, "--mode", mode, "--json", to];
        judge(&here.migrate(&args).args(more).output().unwrap())
    }

    fn state(&self, host: usize) -> Value {
        serde_json::from_str(&self.says(host, "state", &[&self.id])).unwrap()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        for host in [0, 1] {
            let _ = self.runc(host, "delete").args(["--force", &self.id]).output();
        }
    }
}

/// How many tasks the cgroup of a process may have.
fn limit_of_pids(pid: &Value) -> Option<String> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let found = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let tree = if controllers == "pids" { "/pids" } else { "" };
        fs::read_to_string(format!("/sys/fs/cgroup{tree}{path}/pids.max")).ok()
    });
    found.map(|text| text.trim().to_owned())
}

#[test]
fn a_container_of_runc_moves() {
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let container = Container::start(|config| {
            config["hostname"] = json!("travels");
            config["linux"]["resources"]["pids"] = json!({ "limit": 77 });
        });
        let (here, there) = (Host::new(), container.agent());
        let before = container.count();
        let fill = "umask 027; echo kept >/dev/shm/kept; ln /dev/shm/kept /dev/shm/twin; echo new >/dev/shm/file";
        container.says(0, "exec", &[&container.id, "sh", "-c", fill]);
        let report = container.moves(&here, mode, &there.address).unwrap();
        assert!(report["rounds"][0]["pages"].as_u64().unwrap() > 0, "{report}");
        // It has not begun anew, and what was built early is what runs.
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        container.goes_on();
        assert!(container.count() > before);
        assert!(container.listed(0).is_empty(), "{mode}: runc here has forgotten it");
        assert_eq!(container.listed(1), std::slice::from_ref(&container.id), "{mode}");
        let state = container.state(1);
        assert_eq!((&state["status"], &state["pid"]), (&json!("running"), &report["pid"]));
        assert_eq!(container.says(1, "exec", &[&container.id, "hostname"]), "travels\n", "{mode}");
        assert_eq!(limit_of_pids(&state["pid"]).as_deref(), Some("77"), "{mode}");
        // What is in its file systems in memory has come along.
        let look = "cat /dev/shm/twin /dev/shm/file; stat -c '%a %h' /dev/shm/kept";
        let seen = container.says(1, "exec", &[&container.id, "sh", "-c", look]);
        assert_eq!(seen, "kept\nnew\n640 2\n", "{mode}");
        container.says(1, "kill", &[&container.id, "KILL"]);
        wait_until("it has ended", || container.state(1)["status"] == "stopped");
        container.says(1, "delete", &[&container.id]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(here.phases("source"), ["moved"]);
        assert_eq!(there.phases("destination"), ["moved"]);
    }
}

/// What was started in it by `runc exec` is not of it, and ends with it: whoever moves it is told.
#[test]
fn what_does_not_come_along_is_named() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let mut exec = container.runc(0, "exec");
    exec.args([&container.id, "sh", "-c", "touch /reached; exec sleep 100000"]);
    let mut exec = exec.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it runs", || container.dir.path().join("bundle/rootfs/reached").exists());
    let root = container.roots[0].display().to_string();
    for more in [&["--dry-run"][..], &[]] {
        let args = [&container.id, "--runtime-root", &root, "--mode", "pre-copy", &there.address];
        let output = here.migrate(&args).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{more:?}: {said}");
        let told = "it lives in the pid namespace of the tree and is not of it";
        assert!(said.contains(told), "{more:?}: {said}");
    }
    exec.wait().unwrap();
    container.goes_on();
}

/// What a runtime has the engine do is a job of the agent's, too: where memory runs out it is killed before that, and neither
/// the runtime nor the container is.
#[test]
fn a_job_of_a_runtime_is_killed_before_its_agent() {
    let score = |pid: &Value| fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let container = Container::start(|_| {});
    let had = score(&container.state(0)["pid"]);
    let (here, mut there) = (Host::new(), Host::new());
    let [engine, runtime] = ["engine", "runtime"].map(|name| there.path(name));
    let script = format!(
        "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || {{ cat /proc/$PPID/oom_score_adj >{}; \
         read -r _ _ _ parent _ </proc/$PPID/stat; cat /proc/$parent/oom_score_adj >{}; }}",
        engine.display(),
        runtime.display()
    );
    for word in ["--action-script", &script] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.options.extend(["--runtime-root".to_owned(), container.roots[1].display().to_string()]);
    there.start_agent();
    container.moves(&here, "pipelined", &there.address).unwrap();
    let agent = score(&json!(there.agent.as_ref().unwrap().id()));
    let number = |text: &str| text.trim().parse::<i32>().unwrap();
    assert_eq!(number(&fs::read_to_string(&engine).unwrap()), number(&agent) + 300);
    assert_eq!(fs::read_to_string(&runtime).unwrap(), agent);
    assert_eq!(score(&container.state(1)["pid"]), had);
    container.goes_on();
}

/// Its engine decides where the tasks run: it ends them, or has let them go. Nobody takes them for running before. If the engine
/// is killed then, the runtime gives them up.
#[test]
fn a_runtime_that_is_killed_decides_nothing() {
    let runtime = "read -r _ _ _ runtime _ </proc/$PPID/stat; kill -9 $runtime; sleep 1";
    for (point, kill, end, has_moved) in [
        ("network-unlock", runtime, "false", false),
        ("post-resume", runtime, "true", true),
        ("post-resume", "kill -9 $PPID", "true", false),
    ] {
        let container = Container::start(|_| {});
        let (here, mut there) = (Host::new(), Host::new());
        let script = format!("test $CRTOOLS_SCRIPT_ACTION != {point} || {{ {kill}; {end}; }}");
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        let root = container.roots[1].display().to_string();
        there.options.extend(["--runtime-root".to_owned(), root]);
        there.start_agent();
        let said = container.moves(&here, "stop-and-copy", &there.address);
        assert_eq!(said.is_ok(), has_moved, "{point}: {said:?}");
        container.goes_on();
        let ids = std::slice::from_ref(&container.id);
        let (stays, comes) = if has_moved { (&[][..], ids) } else { (ids, &[][..]) };
        assert_eq!((&container.listed(0)[..], &container.listed(1)[..]), (stays, comes), "{point}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let mut forget = container.runc(usize::from(has_moved), "delete");
        assert!(forget.args(["--force", &container.id]).status().unwrap().success(), "{point}");
        assert!(container.dir.path().join("bundle/rootfs/count").exists(), "{point}");
    }
}

/// So long is the file of [`with_a_large_file`].
const LARGE: u64 = 8_000_000;

/// A container that counts and writes into a file in memory, beside which there is a large one.
fn with_a_large_file() -> Container {
    let container = Container::start(|config| {
        let script = "i=0; while :; do i=$((i+1)); echo $i >/new; mv /new /count; \
                      seq 100 >>/dev/shm/a.log; sleep 0.01; done";
        config["process"]["args"] = json!(["sh", "-c", script]);
    });
    let fill = format!("head -c {LARGE} /dev/urandom >/dev/shm/large");
    container.says(0, "exec", &[&container.id, "sh", "-c", &fill]);
    container
}

/// Rounds bring files in memory; the pause brings only what has changed since, although what has grown has moved all that is
/// behind it in the archive.
#[test]
fn files_in_memory_go_before_the_pause() {
    for mode in ["pre-copy", "pipelined", "hybrid"] {
        let container = with_a_large_file();
        let (here, there) = (Host::new(), container.agent());
        let sum = |host| container.says(host, "exec", &[&container.id, "md5sum", "/dev/shm/large"]);
        let before = sum(0);
        let more = ["--max-downtime", "0", "--max-rounds", "2"];
        let report = container.moves_with(&here, mode, &more, &there.address).unwrap();
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        let rounds = report["rounds"].as_array().unwrap();
        let bytes: Vec<u64> = rounds.iter().map(|it| it["bytes"].as_u64().unwrap()).collect();
        assert!(bytes[0] > LARGE && *bytes.last().unwrap() < LARGE / 2, "{mode}: {bytes:?}");
        assert_eq!(sum(1), before, "{mode}");
        // All that was written until it was stopped is there, and no line is torn.
        let look = "sort -u /dev/shm/a.log | wc -l; head -n 100 /dev/shm/a.log | tail -n 1";
        let seen = container.says(1, "exec", &[&container.id, "sh", "-c", look]);
        assert_eq!(seen, "100\n100\n", "{mode}");
        container.goes_on();
        container.says(1, "delete", &["--force", &container.id]);
    }
}

/// Where a dump could not copy memory while the tasks run, the first round of `pre-copy` does not stop them for files.
#[test]
fn files_in_memory_wait_for_the_pause_if_all_would_be_copied_in_another() {
    let container = with_a_large_file();
    let (here, there) = (Host::new(), container.agent());
    let more = ["--max-downtime", "0", "--max-rounds", "2", "--dump-option=--compress=lz4"];
    let report = container.moves_with(&here, "pre-copy", &more, &there.address).unwrap();
    let rounds = report["rounds"].as_array().unwrap();
    let bytes: Vec<u64> = rounds.iter().map(|it| it["bytes"].as_u64().unwrap()).collect();
    assert!(bytes[0] < LARGE && *bytes.last().unwrap() > LARGE, "{bytes:?}");
    container.goes_on();
}

/// A script that fails if files of a directory `here` have not come to `there` when the tasks are stopped. Some go then.
fn look_in_the_pause(here: &Path, there: &Path) -> String {
    let (here, there) = (here.display(), there.display());
    format!(
        "test $TORPOR_STAGE != stopped || \
         {{ cmp {here}/large {there}/large && test -e {there}/gone/x && rm -r {here}/gone; }}"
    )
}

#[test]
fn a_root_file_system_goes_along() {
    for mode in ["pipelined", "hybrid"] {
        let container = Container::start(|_| {});
        let (here, there) = (Host::new(), container.agent());
        let fill = "seq 200000 >/large; ln /large /twin; mkdir -m 1733 /spool; ln -s /large /link; \
                    mkdir /gone; touch /gone/x";
        container.says(0, "exec", &[&container.id, "sh", "-c", fill]);
        let dry = ["--with-rootfs", "--dry-run"];
        let expected = container.moves_with(&here, mode, &dry, &there.address).unwrap();
        assert!(expected["files_bytes"].as_u64().unwrap() > 1_200_000, "{expected}");
        let (root, bundles) =
            (container.dir.path().join("bundle/rootfs"), there.path("state/bundles"));
        let moved = bundles.join(&container.id).join("rootfs");
        let with = ["--with-rootfs", "--script", &look_in_the_pause(&root, &moved)];
        let report = container.moves_with(&here, mode, &with, &there.address).unwrap();
        assert!(report["files_bytes"].as_u64().unwrap() > 1_200_000, "{report}");
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        assert!(!root.join("gone").exists(), "{mode}: nobody has looked in the pause");
        let count = || fs::read_to_string(moved.join("count")).unwrap_or_default();
        let number = || count().trim().parse::<u64>().unwrap_or(0);
        let before = container.count();
        wait_until("it counts there", || number() > before + 3);
        assert_eq!(container.count(), before, "{mode}: it counts there only");
        let look =
            "tail -n 1 /link; stat -c '%a %h %u %g' /twin /spool; test ! -e /gone && echo gone";
        let seen = container.says(1, "exec", &[&container.id, "sh", "-c", look]);
        assert_eq!(seen, "200000\n644 2 0 0\n1733 2 0 0\ngone\n", "{mode}");
        container.says(1, "delete", &["--force", &container.id]);
    }
}

/// A container that sleeps is one that runc does not know: its files are not another's.
#[test]
fn what_a_container_has_left_there_stays() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let comes = || {
        let with = ["--with-rootfs"];
        container.moves_with(&here, "stop-and-copy", &with, &there.address).unwrap();
    };
    comes();
    container.says(1, "exec", &[&container.id, "touch", "/precious"]);
    container.says(1, "delete", &["--force", &container.id]);
    container.run();
    comes();
    let bundles = fs::read_dir(there.path("state/bundles")).unwrap();
    let bundles = bundles.map(|entry| entry.unwrap().path());
    let left: Vec<_> = bundles.filter(|path| path.join("rootfs/precious").exists()).collect();
    assert_eq!(left.len(), 1);
    assert!(there.log().contains(left[0].to_str().unwrap()), "{}", there.log());
    container.says(1, "exec", &[&container.id, "test", "!", "-e", "/precious"]);
    container.says(1, "delete", &["--force", &container.id]);
}

/// Somebody has started one of the same id there meanwhile. It is in the way, and none the worse for that.
#[test]
fn a_container_of_somebody_else_stays() {
    let container = Container::start(|_| {});
    let other = container.dir.path().join("other");
    fs::create_dir(&other).unwrap();
    let text = fs::read(container.dir.path().join("bundle/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["root"]["path"] = json!(container.dir.path().join("bundle/rootfs"));
    config["process"]["args"] = json!(["sleep", "100000"]);
    config["linux"]["cgroupsPath"] = json!(format!("/{}-other", container.id));
    fs::write(other.join("config.json"), config.to_string()).unwrap();
    let (here, there) = (Host::new(), container.agent());
    let script = format!(
        "test $TORPOR_STAGE != stopped || runc --root {} run --bundle {} --detach {} \
         </dev/null >/dev/null 2>&1",
        container.roots[1].display(),
        other.display(),
        container.id
    );
    let more = ["--script", &script];
    container.moves_with(&here, "pre-copy", &more, &there.address).unwrap_err();
    assert_eq!(container.state(1)["status"], "running");
    assert_eq!(container.state(1)["bundle"], json!(other));
    container.goes_on();
    assert_eq!(container.state(0)["status"], "running");
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// Whoever asks what has become of a migration of it, long after that, ends nothing.
#[test]
fn a_container_that_has_come_back_stays() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let more = ["--id", "one"];
    container.moves_with(&here, "stop-and-copy", &more, &there.address).unwrap();
    let mut back = Host::new();
    back.options = vec!["--runtime-root".to_owned(), container.roots[0].display().to_string()];
    back.start_agent();
    let root = container.roots[1].display().to_string();
    let args = [&container.id, "--runtime-root", &root, "--mode", "stop-and-copy", "--json"];
    judge(&there.migrate(&args).arg(&back.address).output().unwrap()).unwrap();
    let file = here.path("state/source/one.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!((&record["phase"], &record["container"]), (&json!("moved"), &Value::Null));
    // As earlier versions have left it, and as it is where the disk was full.
    record["container"] =
        json!({ "runtime": "runc", "id": container.id, "root": container.roots[0] });
    let former = record.to_string();
    record["phase"] = json!("deciding");
    for text in [None, Some(former), Some(record.to_string())] {
        text.iter().for_each(|text| fs::write(&file, text).unwrap());
        let said = judge(&here.migrate(&["--resolve", "one", "--json"]).output().unwrap()).unwrap();
        assert_eq!(said["decided"], "it has moved");
        assert_eq!(container.state(0)["status"], "running");
        container.goes_on();
    }
}

/// Another host would have it made by a bundle of its own.
#[test]
fn a_container_comes_once_at_a_time() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let plan = Plan { fault: Fault::HangLink, point: Point::Said("\"ready\"") };
    let paths = (here.path("proxy.socket"), there.path("agent.socket"));
    let proxy = Proxy::start(paths.0, paths.1, Some(plan));
    let root = container.roots[0].display().to_string();
    let to = format!("unix:{}", proxy.path.display());
    let args = [&container.id, "--runtime-root", &root, "--patience", "3600", &to];
    let mut first = here.migrate(&args).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the first one has begun", || proxy.seen().struck);
    let error = container.moves(&Host::new(), "stop-and-copy", &there.address).unwrap_err();
    assert!(error.contains("is on its way to this host with another migration"), "{error}");
    proxy.end();
    assert!(!first.wait().unwrap().success());
    wait_until("the agent notices", || there.phases("destination") == ["stayed"]);
    container.moves(&Host::new(), "stop-and-copy", &there.address).unwrap();
}

/// What `torpor agent` says of bundles at a host: their names, and what has become of their containers.
fn bundles(host: &Host, root: &Path, words: &[&str]) -> Result<Vec<(String, String)>, String> {
    let mut agent = Command::new(torpor());
    agent.arg("agent").args(words).args(["--json", "--runtime-root"]).arg(root);
    let said = judge(&agent.arg("--state-dir").arg(host.path("state")).output().unwrap())?;
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let all = said.as_array().unwrap();
    assert!(all.iter().all(|it| it["bytes"].as_u64() > Some(1_000_000)), "{said}");
    Ok(all.iter().map(|it| (text(&it["name"]), text(&it["container"]))).collect())
}

/// They are named with what has become of their containers; those that may be needed go only by name.
#[test]
fn bundles_that_nobody_needs_can_be_removed() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let (id, root) = (&container.id, &container.roots[1]);
    container.moves_with(&here, "stop-and-copy", &["--with-rootfs"], &there.address).unwrap();
    let listed = || bundles(&there, root, &["bundles"]).unwrap();
    let is = |standing: &str| [(id.clone(), standing.to_owned())];
    assert_eq!(listed(), is("running"));
    for words in [&["prune", id][..], &["prune", "../state"]] {
        let error = bundles(&there, root, words).unwrap_err();
        assert!(error.contains("stays: runc knows its") || error.contains("no bundle"), "{error}");
    }
    assert_eq!(bundles(&there, root, &["prune"]).unwrap(), []);
    // It may sleep.
    container.says(1, "delete", &["--force", id]);
    assert_eq!(listed(), is("ended"));
    assert_eq!(bundles(&there, root, &["prune"]).unwrap(), []);
    assert_eq!(bundles(&there, root, &["prune", id]).unwrap(), is("ended"));
    assert_eq!((listed(), there.path("state/bundles").read_dir().unwrap().count()), (vec![], 0));
    // The next one moves on.
    container.run();
    container.moves_with(&here, "stop-and-copy", &["--with-rootfs"], &there.address).unwrap();
    let mut back = Host::new();
    back.options = vec!["--runtime-root".to_owned(), container.roots[0].display().to_string()];
    back.start_agent();
    let root_there = root.display().to_string();
    let args = [id, "--runtime-root", &root_there, "--mode", "stop-and-copy", "--with-rootfs"];
    judge(&there.migrate(&args).args(["--json", &back.address]).output().unwrap()).unwrap();
    assert_eq!(bundles(&there, root, &["prune"]).unwrap(), is("moved-on"));
    assert_eq!((listed(), container.listed(0)), (vec![], vec![id.clone()]));
}

/// A directory of volumes, and a container that counts in one of them as well.
fn with_volume() -> (TempDir, Container) {
    let volumes = tempfile::tempdir().unwrap();
    let data = volumes.path().join("data");
    fs::create_dir(&data).unwrap();
    let container = Container::start(|config| {
        let script = "i=0; while :; do i=$((i+1)); for d in / /data/; do \
                      echo $i >${d}new; mv ${d}new ${d}count; done; sleep 0.01; done";
        config["process"]["args"] = json!(["sh", "-c", script]);
        let options = ["rbind", "rw"];
        let mount =
            json!({ "destination": "/data", "type": "bind", "source": data, "options": options });
        config["mounts"].as_array_mut().unwrap().push(mount);
    });
    (volumes, container)
}

/// An agent that has a directory of volumes of its own under the same path.
fn agent_apart(container: &Container, volumes: &Path, options: &[&str]) -> Host {
    let mount = format!("mount -t tmpfs volumes {} && exec \"$@\"", volumes.display());
    let mut there = Host::apart(&["unshare", "--mount", "sh", "-c", &mount, "agent"]);
    there.options = vec!["--runtime-root".to_owned(), container.roots[1].display().to_string()];
    there.options.extend(options.iter().map(|&word| word.to_owned()));
    there.start_agent();
    there
}

/// A path, as the agent of a host sees it.
fn seen_by(there: &Host, path: &Path) -> PathBuf {
    let root = format!("/proc/{}/root", there.agent.as_ref().unwrap().id());
    Path::new(&root).join(path.strip_prefix("/").unwrap())
}

#[test]
fn a_volume_goes_along() {
    for (mode, more) in [("pipelined", &[][..]), ("hybrid", &["--with-rootfs"])] {
        let (volumes, container) = with_volume();
        let allow = ["--allow-volume", volumes.path().to_str().unwrap()];
        let (here, there) = (Host::new(), agent_apart(&container, volumes.path(), &allow));
        let fill = "seq 200000 >/data/large; ln /data/large /data/twin; mkdir -m 1733 /data/spool; \
                    mkdir /data/gone; touch /data/gone/x";
        container.says(0, "exec", &[&container.id, "sh", "-c", fill]);
        let with = [more, &["--with-volume", "/data"]].concat();
        let dry = [&with[..], &["--dry-run"]].concat();
        let expected = container.moves_with(&here, mode, &dry, &there.address).unwrap();
        assert_eq!(expected["refused"], json!([]), "{expected}");
        assert!(expected["files_bytes"].as_u64().unwrap() > 1_200_000, "{expected}");
        let data = volumes.path().join("data");
        let moved = seen_by(&there, &data);
        let script = look_in_the_pause(&data, &moved);
        let with = [&with[..], &["--script", &script]].concat();
        let report = container.moves_with(&here, mode, &with, &there.address).unwrap();
        assert!(report["files_bytes"].as_u64().unwrap() > 1_200_000, "{report}");
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        assert!(!data.join("gone").exists(), "{mode}: nobody has looked in the pause");
        let count = |dir: &Path| {
            let text = fs::read_to_string(dir.join("count")).unwrap_or_default();
            text.trim().parse::<u64>().unwrap_or(0)
        };
        let before = count(&data);
        wait_until("it counts there", || count(&moved) > before + 3);
        assert_eq!(count(&data), before, "{mode}: it counts there only");
        let look = "tail -n 1 /data/large; stat -c '%a %h' /data/twin /data/spool; test ! -e /data/gone && echo gone";
        let seen = container.says(1, "exec", &[&container.id, "sh", "-c", look]);
        assert_eq!(seen, "200000\n644 2\n1733 2\ngone\n", "{mode}");
        container.says(1, "delete", &["--force", &container.id]);
    }
}

#[test]
fn a_volume_that_may_not_come_leaves_the_container_here() {
    let (volumes, container) = with_volume();
    let data = volumes.path().join("data");
    let allow = ["--allow-volume", volumes.path().to_str().unwrap()];
    let fails = [
        "--restore-option=--action-script",
        "--restore-option=test $CRTOOLS_SCRIPT_ACTION != post-restore",
    ];
    let stays = |options: &[&str], at: &str, prepare: &dyn Fn(&Path)| {
        let (here, there) = (Host::new(), agent_apart(&container, volumes.path(), options));
        let moved = seen_by(&there, &data);
        prepare(&moved);
        let with = ["--with-volume", at];
        let error = container.moves_with(&here, "pipelined", &with, &there.address).unwrap_err();
        assert_eq!(container.state(0)["status"], "running");
        container.goes_on();
        assert!(container.listed(1).is_empty());
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let left = fs::read_dir(&moved).map_or(0, Iterator::count);
        (error, moved.exists(), left)
    };
    let (error, is_there, _) = stays(&[], "/data", &|_| {});
    assert!(error.contains("may not come here") && error.contains("--allow-volume"), "{error}");
    assert!(!is_there);
    let (error, ..) = stays(&allow, "/nowhere", &|_| {});
    assert!(error.contains("no directory of this host is mounted"), "{error}");
    let (error, _, left) = stays(&allow, "/data", &|moved| {
        fs::create_dir(moved).unwrap();
        fs::write(moved.join("own"), "file").unwrap();
    });
    assert!(error.contains("there are files here"), "{error}");
    assert_eq!(left, 1, "what was there is as it was");
    let (_, is_there, _) = stays(&[&allow[..], &fails].concat(), "/data", &|_| {});
    assert!(!is_there, "what has come is gone again");
    let esc = "touch /data/esc; chmod 4755 /data/esc";
    container.says(0, "exec", &[&container.id, "sh", "-c", esc]);
    let (error, is_there, _) = stays(&allow, "/data", &|_| {});
    assert!(error.contains("/esc is a set-user-ID") && error.contains("chmod 700"), "{error}");
    assert!(!is_there);
}

#[test]
fn a_container_is_looked_at_and_stays() {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let root = container.roots[0].display().to_string();
    let args = [&container.id, "--runtime-root", &root, "--dry-run", "--json", &there.address];
    let said = judge(&here.migrate(&args).output().unwrap()).unwrap();
    assert_eq!(said["refused"], json!([]), "{said}");
    assert!(said["memory_bytes"].as_u64().unwrap() > 0, "{said}");
    assert!(said["estimate"]["downtime_ms"].as_f64().unwrap() > 0.0, "{said}");
    container.goes_on();
    assert_eq!(container.state(0)["status"], "running");
    assert!(container.listed(1).is_empty());
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

#[test]
fn a_container_that_cannot_come_stays() {
    let container = Container::start(|_| {});
    for (mode, point, more) in [
        ("stop-and-copy", "pre-restore", &[][..]),
        ("pipelined", "post-restore", &["--with-rootfs"]),
        ("post-copy", "pre-restore", &[]),
        ("hybrid", "post-restore", &[]),
    ] {
        let (here, mut there) = (Host::new(), Host::new());
        let script = format!("test $CRTOOLS_SCRIPT_ACTION != {point}");
        there.options = ["--runtime-root", container.roots[1].to_str().unwrap()]
            .into_iter()
            .map(str::to_owned)
            .chain(["--action-script", &script].map(|word| format!("--restore-option={word}")))
            .collect();
        there.start_agent();
        container.moves_with(&here, mode, more, &there.address).unwrap_err();
        container.goes_on();
        assert_eq!(container.state(0)["status"], "running");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        wait_until("it is written down", || there.phases("destination") == ["stayed"]);
        assert_eq!(here.phases("source"), ["stayed"]);
        assert!(container.listed(1).is_empty());
        assert!(!there.path("state/bundles").join(&container.id).exists());
    }
}

/// Whoever takes part in a migration of it is killed while pages go out: it goes on, and nothing is left.
#[test]
fn a_container_stays_when_its_migration_is_killed() {
    let container = Container::start(|_| {});
    let root = container.roots[0].display().to_string();
    for mode in ["pre-copy", "pipelined"] {
        let (here, there) = (Host::new(), container.agent());
        let args = [&container.id, "--runtime-root", &root, "--mode", mode, "--id", "one"];
        let slowly = ["--bandwidth", "10K", &there.address];
        let mut migration = here.migrate(&args).args(slowly).spawn().unwrap();
        wait_until("it takes a round", || here.path("work/source/one/1").exists());
        migration.kill().unwrap();
        migration.wait().unwrap();
        wait_until("it has stayed", || here.phases("source") == ["stayed"]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        wait_until("it is written down", || there.phases("destination") == ["stayed"]);
        container.goes_on();
        assert_eq!(container.state(0)["status"], "running", "{mode}");
        assert!(container.listed(1).is_empty());
    }
}

#[test]
fn names_hooks_and_roots_are_judged_first() {
    let hook = json!([{ "path": "/bin/true" }]);
    let container = Container::start(|config| config["hooks"] = json!({ "poststop": hook }));
    let (here, there) = (Host::new(), container.agent());
    let error = container.moves(&here, "pipelined", &there.address).unwrap_err();
    assert!(error.contains("hooks") && error.contains("--allow-hooks"), "{error}");
    // runc takes these for the same.
    let other = Container::start(|config| config["Hooks"] = json!({ "poststop": hook }));
    let error = other.moves(&here, "pipelined", &there.address).unwrap_err();
    assert!(error.contains("Hooks"), "{error}");
    other.goes_on();
    let args = ["nobody", "--runtime-root", container.roots[0].to_str().unwrap(), &there.address];
    let error = judge(&here.migrate(&args).output().unwrap()).unwrap_err();
    assert!(error.contains("runc knows no container nobody"), "{error}");
    container.goes_on();
}

/// What a runtime does by a configuration comes before its restore: the policy is asked before that.
#[test]
fn a_policy_counts_for_what_the_runtime_does_and_is_told() {
    let own = format!("/torpor-policy-{}", std::process::id());
    let container = Container::start(|config| config["linux"]["cgroupsPath"] = json!(own));
    let root = container.dir.path().join("bundle/rootfs").display().to_string();
    for (rule, wanted) in [
        ("cgroups.allow=[\"/torpor-guests\"]", format!("the control group {own}")),
        ("mounts.sources=[\"/torpor-nowhere\"]", format!("the root file system {root}")),
        ("capabilities.allow=[]", "(capabilities.allow)".to_owned()),
    ] {
        let (here, mut there) = (Host::new(), Host::new());
        there.options = vec!["--runtime-root".to_owned(), container.roots[1].display().to_string()];
        let options = ["--policy-rule", rule].map(|word| format!("--restore-option={word}"));
        there.options.extend(options);
        there.start_agent();
        let error = container.moves(&here, "stop-and-copy", &there.address).unwrap_err();
        assert!(error.contains(&wanted) && error.contains("--policy FILE"), "{rule}: {error}");
        container.goes_on();
        assert!(container.listed(1).is_empty());
        assert!(!there.path("state/bundles").join(&container.id).exists());
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
    }
}

/// An upgrade puts a newer program in its place, and the agent goes on.
#[test]
fn an_agent_works_whose_program_is_removed() {
    let container = Container::start(|_| {});
    let program = container.dir.path().join("torpor");
    let copy = format!("cp \"$0\" {0} && exec {0} \"$@\"", program.display());
    let (here, mut there) = (Host::new(), Host::apart(&["sh", "-c", &copy]));
    there.options = vec!["--runtime-root".to_owned(), container.roots[1].display().to_string()];
    there.start_agent();
    fs::remove_file(&program).unwrap();
    container.moves(&here, "pipelined", &there.address).unwrap();
    container.goes_on();
}
