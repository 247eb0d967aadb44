//! One real cell: Debian's containerd with runc, started by the tool in namespaces of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::images::save;
use common::{TestDir, group_exists, kill, row, samples, success, torpor, wait};
use serde_json::Value;
use torpor_runtimes_tests::command::write_script;
use torpor_tests::random::Random;

const CELL: &str = "endpoints:\n- name: here\n  containerd: /usr/bin/containerd\n  handlers:\n  \
                    - {name: runc, binary: /usr/sbin/runc}\n";

/// What a run has made that is to go with it.
struct Made {
    /// The names of its control groups.
    groups: Vec<String>,
    /// The namespace of its processes. All networks and mounts of a run belong to processes in it.
    namespaces: Vec<Space>,
}

/// A namespace of processes. While it is open the kernel gives its number to no other.
struct Space {
    name: PathBuf,
    _open: fs::File,
}

impl Space {
    /// That of a process.
    fn of(pid: &str) -> Option<Self> {
        let open = fs::File::open(format!("/proc/{pid}/ns/pid")).ok()?;
        Some(Self { name: namespace(pid)?, _open: open })
    }
}

/// The pid namespace of a process; another user's may be gone.
fn namespace(pid: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// The processes that live in one of these namespaces, whatever their command lines say.
fn inside(namespaces: &[Space]) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let all = all.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let is_inside = |name: PathBuf| namespaces.iter().any(|space| space.name == name);
    all.filter(|pid| namespace(pid).is_some_and(is_inside)).collect()
}

fn in_test_dir(settings: &str) -> TestDir {
    let test_dir = TestDir::new();
    test_dir.config(&format!("{settings}\n{CELL}"));
    test_dir
}

/// Starts a run, and waits until its containerd works; returns what it has made, too.
fn started(test_dir: &TestDir) -> (Child, Made) {
    let mut child = test_dir.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let done = || {
        let journal = fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap_or_default();
        journal.matches("\"done\"").count()
    };
    let before = done();
    wait(|| done() > before, || format!("no sample was taken; {:?}", test_dir.processes()));
    assert!(child.try_wait().unwrap().is_none(), "it has ended too early");
    let namespaces = of(test_dir, DAEMON).iter().filter_map(|pid| Space::of(pid)).collect();
    let made = Made { groups: test_dir.groups(), namespaces };
    assert!(!inside(&made.namespaces).is_empty(), "{:?}", test_dir.processes());
    (child, made)
}

fn assert_gone(test_dir: &TestDir, made: &Made) {
    test_dir.assert_clean();
    let left = || inside(&made.namespaces);
    wait(|| left().is_empty(), || format!("processes are left: {:?}", left()));
    assert!(!made.groups.is_empty());
    for name in &made.groups {
        wait(|| !group_exists(name), || format!("the control group {name} is left"));
    }
}

/// Waits for the end of a run that has been disturbed; its results, which are complete.
fn completed(child: &mut Child, test_dir: &TestDir) -> Value {
    let until = Instant::now() + Duration::from_secs(240);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it does not end: {:?}", test_dir.processes());
        std::thread::sleep(Duration::from_millis(50));
    }
    let results = test_dir.results();
    assert_eq!(results["complete"], true);
    results
}

#[test]
fn every_suite_on_a_real_runtime() {
    let test_dir = in_test_dir("runs: 1\nwarmup: 0\nscale: [3]\nmemory: [8]\neffort: 0.05");
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    assert!(results["targets"][0]["runtime"].as_str().unwrap().contains("runc"));
    let digests = results["targets"][0]["digests"].as_object().unwrap();
    let known: Vec<&str> = digests.keys().filter_map(|path| path.rsplit('/').next()).collect();
    for name in ["runc", "containerd", "containerd-shim-runc-v2", "bridge", "sysbench", "busybox"] {
        assert!(known.contains(&name), "{name} is not among {known:?}");
    }
    for name in [
        "operations.container.start",
        "operations.container.answer",
        "operations.bridge.create",
        "operations.image.pull",
        "performance.cpu.total",
        "performance.memory.total",
        "performance.memory.fault",
        "performance.disk.random-read",
        "performance.disk-bind.sequential-write",
        "performance.disk-bind.random-read",
        "limits.raise.call",
        "performance.syscall.getppid",
        "performance.loopback.latency",
        "performance.bridge.throughput",
        "limits.pids.refusal",
        "limits.charge.idle",
        "limits.charge.runtime",
        "limits.charge.runtime-cpu",
        "scalability.containers-3.start",
        "scalability.containers-3.running",
        "scalability.containers-3.pss",
        "scalability.containers-3.cgroup",
    ] {
        let row = row(&results, name, "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
    // What is left without the program is less than the whole: a program that did not run took nothing.
    for [own, whole] in [["runtime", "idle"], ["runtime-cpu", "cpu"]] {
        let [own, whole] =
            [own, whole].map(|name| sample(&results, &format!("limits.charge.{name}")));
        assert!(own < whole, "{own} of {whole}");
    }
    for suite in ["cpu", "memory"] {
        let of = |facet: &str| sample(&results, &format!("performance.{suite}.{facet}"));
        let [least, average, most] = ["minimal", "average", "maximal"].map(of);
        // sysbench rounds the shortest and the longest time to 0.01 ms; the average is not rounded.
        let [least, most] = [least - 0.005, most + 0.005];
        assert!(0.0 <= least && least <= average && average <= most, "{least} {average} {most}");
        assert!(most > 0.0 && of("total") >= most, "{suite}: {} {most}", of("total"));
    }
    // A containerd that finds no mount of a hierarchy does not hear why a container has ended.
    let oom = row(&results, "limits.memory.oom", "here/runc");
    let reason = oom["reason"].as_str().unwrap_or_default();
    let unheard = !whole_hierarchies() && reason.contains("not OOMKilled");
    assert!(oom["status"] == "ok" || unheard, "{oom}");
    // A kernel without BFQ weighs nothing; then the reason says so.
    let weight = row(&results, "limits.io.weight", "here/runc");
    let reason = weight["reason"].as_str().unwrap_or_default();
    assert!(weight["status"] == "ok" || (!has_bfq() && reason.contains("BFQ")), "{weight}");
    // On a machine with other work the limit may not be exact; then the reason says so.
    let quota = row(&results, "limits.cpu.share", "here/runc");
    let reason = quota["reason"].as_str().unwrap_or_default();
    let judged = quota["status"] == "ok" || reason.contains("of a CPU were used under a quota");
    assert!(judged, "{quota}");
    for row in results["rows"].as_array().unwrap() {
        let told = row["status"] == "ok" || row["reason"].is_string();
        assert!(told, "every cell has a value or a reason: {row}");
    }
    let checkpoint = row(&results, "operations.container.checkpoint", "here/runc");
    assert_eq!(checkpoint["status"], "unsupported", "{checkpoint}");
    test_dir.assert_clean();
}

/// Whether control groups are mounted here from the root of their hierarchies on: in a container they may not be.
fn whole_hierarchies() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let groups = mounts.lines().filter(|line| line.contains(" - cgroup"));
    let roots: Vec<&str> = groups.filter_map(|line| line.split(' ').nth(3)).collect();
    !roots.is_empty() && roots.iter().all(|root| *root == "/")
}

/// Whether a disk of this machine can have the scheduler that weighs.
fn has_bfq() -> bool {
    let disks = fs::read_dir("/sys/block").unwrap().flatten();
    let mut lists = disks.map(|disk| fs::read_to_string(disk.path().join("queue/scheduler")));
    lists.any(|list| list.is_ok_and(|list| list.contains("bfq")))
}

/// How many of a hundred ticks of the processors nobody used while something was done.
fn idle<T>(done: impl FnOnce() -> T) -> (T, u64) {
    let ticks = || -> Vec<u64> {
        let text = fs::read_to_string("/proc/stat").unwrap();
        let words = text.lines().next().unwrap().split_whitespace().skip(1);
        words.take(8).map(|word| word.parse().unwrap()).collect()
    };
    let before = ticks();
    let value = done();
    let passed: Vec<u64> = ticks().iter().zip(before).map(|(now, then)| now - then).collect();
    (value, 100 * passed[3] / passed.iter().sum::<u64>().max(1))
}

#[test]
fn a_raised_limit_has_an_effect() {
    let test_dir = in_test_dir("runs: 1\nwarmup: 0\nfilters: [limits.raise.*]");
    let (mut told, mut most_idle) = (String::new(), 0);
    for _ in 0..5 {
        let (_, free) = idle(|| success(&test_dir.run().arg("--again").output().unwrap()));
        let results = test_dir.results();
        let raised = row(&results, "limits.raise.effect", "here/runc");
        if raised["status"] == "ok" {
            assert!(raised["samples"][0]["value"].as_f64().unwrap() > 0.0, "{raised}");
            test_dir.assert_clean();
            return;
        }
        (told, most_idle) = (raised.to_string(), free.max(most_idle));
    }
    // On a machine with other work a program does not get more at once.
    let judged = told.contains("the first limit did not hold") || told.contains("not got more CPU");
    assert!(most_idle < 50 && judged, "{most_idle} % of the machine were free: {told}");
    eprintln!("left out: a_raised_limit_has_an_effect (others have the processors)");
}

#[test]
fn an_image_of_ones_own_is_pulled_and_unpacked() {
    let test_dir = TestDir::new();
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(6);
    header.set_mode(0o644);
    archive.append_data(&mut header, "greeting", &b"hello\n"[..]).unwrap();
    let digest = save(&test_dir.path("layout"), &archive.into_inner().unwrap());
    test_dir.config(&format!(
        "runs: 2\nwarmup: 0\nfilters: [operations.image.*]\npulled_image: {}\n{CELL}",
        test_dir.path("layout").display()
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    for name in ["operations.image.pull", "operations.image.remove"] {
        let row = row(&results, name, "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 2), "{row}");
    }
    let facts = &results["targets"][0]["facts"];
    assert!(facts["pulled image"].as_str().unwrap().starts_with(&digest), "{facts}");
    assert!(facts["file system"].as_str().unwrap().contains(" on "), "{facts}");
    test_dir.assert_clean();
}

/// Over real rows, with the work of starting and ending containers.
#[test]
fn it_leaves_the_processors_to_what_it_measures() {
    let test_dir = TestDir::new();
    // What the first sample makes for all others belongs to the warm-up.
    test_dir.config(&format!(
        "runs: 1\nwarmup: 1\nmemory: [128]\neffort: 4\ncriu: {}\n\
         filters: [operations.checkpoint-*, performance.cpu.*]\n{CELL}",
        torpor().display(),
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    for name in [
        "operations.checkpoint-plain-128m.answer",
        "operations.checkpoint-sealed-128m.answer",
        "performance.cpu.total",
    ] {
        sample(&results, name);
    }
    let [cpu, time] = ["cpu", "time"].map(|of| results["overhead"][of].as_f64().unwrap());
    // What nobody has optimised takes several times as long for each call that it makes.
    let most = if cfg!(debug_assertions) { 0.04 } else { 0.01 };
    assert!(cpu > 0.0 && cpu < most * time, "{cpu} s of a processor in {time} s");
    let page = fs::read_to_string(test_dir.path("out/report.html")).unwrap();
    let told = format!("took {:.2} % of one processor", 100.0 * cpu / time);
    assert!(page.contains(&told), "the report does not say that it {told}");
}

#[test]
fn without_a_configuration_it_measures_what_is_there() {
    let test_dir = TestDir::new();
    // Not the runtimes that run on this machine: those are somebody's.
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount -t tmpfs none /run && exec \"$0\" \"$@\""]);
    command.arg(env!("CARGO_BIN_EXE_torpor-benchmark")).env("TMPDIR", test_dir.path("tmp"));
    command.args(["run", "--runs", "1", "--filter", "operations.container.start", "--output"]);
    success(&command.arg(test_dir.path("out")).stdin(Stdio::null()).output().unwrap());
    let results = test_dir.results();
    assert_eq!(results["complete"], true);
    let row = row(&results, "operations.container.start", "containerd/runc");
    assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    test_dir.assert_clean();
}

/// The one sample of a row.
fn sample(results: &Value, benchmark: &str) -> f64 {
    let row = row(results, benchmark, "here/runc");
    assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    row["samples"].as_array().unwrap().last().unwrap()["value"].as_f64().unwrap()
}

/// A runtime that nobody can move containers of, and that does not start any.
const OTHER: &str =
    "#!/bin/sh\ncase \"$*\" in *--version|*--help) echo crun version 9;; *) exit 1;; esac\n";

#[test]
fn a_container_sleeps_and_moves() {
    let test_dir = TestDir::new();
    let other = test_dir.path("other");
    write_script(&other, OTHER);
    test_dir.config(&format!(
        "runs: 1\nwarmup: 0\nmemory: [8]\nfilters: [migration.*, operations.checkpoint-*]\ncriu: {}\n\
         {CELL}  - {{name: other, binary: {}}}\n",
        torpor().display(),
        other.display(),
    ));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    let target = &results["targets"][0];
    assert!(target["digests"][torpor().to_str().unwrap()].is_string(), "{target}");
    assert!(target["facts"]["engine"].as_str().unwrap().starts_with("torpor "), "{target}");
    for mode in ["stop-and-copy", "pre-copy", "pipelined"] {
        let of = |facet: &str| sample(&results, &format!("migration.{mode}-8m.{facet}"));
        assert!(of("bytes") > 8.0, "its memory has come along");
        assert!(of("pause") > 0.0 && of("total") > of("stopped"));
        let parts = of("freeze") + of("transfer") + of("restore");
        assert!((parts - of("stopped")).abs() < 1.0, "{parts} ms in parts of {}", of("stopped"));
        let other = row(&results, &format!("migration.{mode}-8m.total"), "here/other");
        assert_eq!(other["status"], "unsupported");
        assert!(other["reason"].as_str().unwrap().contains("crun version 9"), "{other}");
    }
    for kind in ["plain", "sealed"] {
        let of =
            |facet: &str| sample(&results, &format!("operations.checkpoint-{kind}-8m.{facet}"));
        assert!(of("bytes") > 8.0 && of("frozen") > 0.0 && of("checkpoint") > of("engine"));
        assert!(of("restore") > 0.0 && of("answer") > 0.0);
        // By a clock that is fine enough, all of the caller's time is in a part with a name.
        let parts = of("frozen") + of("engine") + of("runtime");
        assert!((of("checkpoint") - parts).abs() < 1.0, "{parts} of {}", of("checkpoint"));
        assert!(of("unnamed") < 1.0 && of("runtime") > 0.0, "{}", of("unnamed"));
    }
    test_dir.assert_clean();
}

#[test]
fn killed_it_leaves_nothing_and_goes_on() {
    let test_dir =
        in_test_dir("runs: 3\nwarmup: 0\nfilters: [operations.container.*, operations.bridge.*]");
    let (mut child, made) = started(&test_dir);
    kill(&mut child);
    assert_gone(&test_dir, &made);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    assert_eq!(
        (results["complete"].as_bool(), results["interruptions"].as_u64()),
        (Some(true), Some(1))
    );
    assert!(results["repeated"].as_u64().unwrap() <= 1, "{}", results["repeated"]);
    for name in ["operations.container.start", "operations.bridge.create"] {
        assert_eq!(samples(row(&results, name, "here/runc")), 3);
    }
    test_dir.assert_clean();
}

#[test]
fn killed_it_takes_its_disk_along() {
    let test_dir = in_test_dir("runs: 3\nwarmup: 0\nfilters: [limits.io.*]");
    let mut child = test_dir.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let noted = || {
        let dirs = test_dir.groups().into_iter().map(|name| test_dir.path("tmp").join(name));
        let notes = dirs.filter_map(|dir| fs::read(dir.join("scheduler")).ok());
        notes.filter_map(|note| serde_json::from_slice::<Value>(&note).ok()).next()
    };
    wait(|| noted().is_some() || child_has_ended(&child), || "it has no disk".into());
    let note = noted();
    kill(&mut child);
    let Some(note) = note else {
        eprintln!("left out: killed_it_takes_its_disk_along (the kernel has no BFQ)");
        return;
    };
    test_dir.assert_clean();
    let scheduler = || fs::read_to_string(note["path"].as_str().unwrap()).unwrap();
    let before = format!("[{}]", note["before"].as_str().unwrap());
    let device = Path::new(note["path"].as_str().unwrap()).ancestors().nth(2).unwrap();
    let file = || fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
    let ours = test_dir.path("tmp").display().to_string();
    wait(|| !file().contains(&ours), || format!("a disk is left: {}", file()));
    // Unless the device is another test's by now.
    let is_as_before = || scheduler().contains(&before) || !file().is_empty();
    wait(is_as_before, || format!("{} has not {before}", scheduler()));
}

/// Whether a process is a zombie.
fn child_has_ended(child: &Child) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z'))
}

#[test]
fn the_keeper_killed_as_well_the_next_run_tidies_up() {
    let test_dir = in_test_dir("runs: 2\nwarmup: 0\nfilters: [operations.container.*]");
    let (mut child, made) = started(&test_dir);
    let keeper = format!("/proc/{0}/task/{0}/children", child.id());
    let keeper = fs::read_to_string(keeper).unwrap();
    let keeper = keeper.split_whitespace().next().unwrap().to_owned();
    // Both at once: nobody is left to remove anything but the kernel, which ends the processes.
    assert!(Command::new("kill").args(["-KILL", &keeper]).status().unwrap().success());
    kill(&mut child);
    success(&test_dir.run().output().unwrap());
    assert_gone(&test_dir, &made);
    assert_eq!(samples(row(&test_dir.results(), "operations.container.start", "here/runc")), 2);
}

#[test]
fn a_containerd_that_is_killed_is_started_again() {
    let test_dir = in_test_dir(
        "runs: 4\nwarmup: 0\nfilters: [operations.container.start, operations.bridge.*]",
    );
    let (mut child, made) = started(&test_dir);
    assert!(end(&test_dir, DAEMON), "no containerd was killed");
    let results = completed(&mut child, &test_dir);
    let start = row(&results, "operations.container.start", "here/runc");
    let bridge = row(&results, "operations.bridge.create", "here/runc");
    // One item may have met the end of the daemon; all others have their values.
    assert!(samples(start) + samples(bridge) >= 7, "{start} {bridge}");
    // Nothing had warmed up the first of all, nor the first of each kind after it.
    let cold = |row: &Value| {
        row["samples"].as_array().unwrap().iter().filter(|sample| sample["cold"] == true).count()
    };
    assert!(cold(start) + cold(bridge) >= 3, "{start} {bridge}");
    assert_gone(&test_dir, &made);
}

const DAEMON: &str = "/usr/bin/containerd ";
const SHIM: &str = "/usr/bin/containerd-shim";

/// The processes of a run whose command lines begin so.
fn of(test_dir: &TestDir, what: &str) -> Vec<String> {
    let all = test_dir.processes().into_iter().filter(|(_, line)| line.starts_with(what));
    all.map(|(pid, _)| pid.to_string()).collect()
}

/// Ends them, and says whether there was one: what is to be ended may have ended by itself.
fn end(test_dir: &TestDir, what: &str) -> bool {
    let ended = |pid: String| succeeds(Command::new("kill").args(["-KILL", &pid]));
    of(test_dir, what).into_iter().map(ended).filter(|ended| *ended).count() > 0
}

/// Takes the bridge away that containers are connected to, and says whether it was there.
fn cut_network(test_dir: &TestDir) -> bool {
    let cut = |pid: String| {
        let arguments = ["--net", "--target", &pid, "ip", "link", "delete", "bench0"];
        succeeds(Command::new("nsenter").args(arguments))
    };
    of(test_dir, DAEMON).into_iter().map(cut).filter(|cut| *cut).count() > 0
}

fn succeeds(command: &mut Command) -> bool {
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Waits until a run has begun or ended some more items, or has ended itself.
fn goes_on(child: &mut Child, test_dir: &TestDir, items: usize) {
    let lines = || {
        let journal = fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap_or_default();
        journal.lines().count()
    };
    let before = lines();
    let begun = Instant::now();
    while lines() < before + items && child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(240), "it does not go on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn at_any_moment_nothing_is_left() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: at_any_moment_nothing_is_left (TORPOR_LONG=1 runs it)");
        return;
    }
    let random = Random::printed();
    let test_dir = in_test_dir(
        "runs: 12\nwarmup: 0\npatience: 40\nfilters: [operations.life.*, operations.bridge.*, \
         limits.io.*]",
    );
    let (mut kills, mut hits) = (0, 0);
    for _ in 0..12 {
        let mut child = test_dir.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        goes_on(&mut child, &test_dir, random.place(6));
        let groups = test_dir.groups();
        hits += u32::from(match random.below(4) {
            0 => cut_network(&test_dir),
            1 => end(&test_dir, DAEMON),
            2 => end(&test_dir, SHIM),
            _ => false,
        });
        goes_on(&mut child, &test_dir, random.place(3));
        kill(&mut child);
        kills += 1;
        test_dir.assert_clean();
        for name in groups {
            wait(|| !group_exists(&name), || format!("the control group {name} is left"));
        }
    }
    assert!(hits > 0, "nothing but the tool was killed");
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    assert_eq!(results["complete"], true);
    assert!(results["repeated"].as_u64().unwrap() <= kills, "{}", results["repeated"]);
    test_dir.assert_clean();
}

#[test]
fn without_its_network_and_its_shims_it_comes_to_an_end() {
    let test_dir =
        in_test_dir("runs: 4\nwarmup: 0\nfilters: [operations.life.*, operations.bridge.*]");
    let (mut child, made) = started(&test_dir);
    // The bridge is there from the first sandbox with a network of its own on, a shim while there is a sandbox.
    wait(|| cut_network(&test_dir), || "there was no network to cut".into());
    wait(|| end(&test_dir, SHIM), || "there was no shim to kill".into());
    let results = completed(&mut child, &test_dir);
    for name in ["operations.life.total", "operations.bridge.create"] {
        let row = row(&results, name, "here/runc");
        // An item or two may have met the end of what was killed; then the reason is told.
        let failures = row["failures"].as_u64().unwrap();
        assert!(samples(row) as u64 + failures == 4 && failures <= 2, "{row}");
        assert!(failures == 0 || row["reason"].is_string(), "{row}");
    }
    assert_gone(&test_dir, &made);
}
