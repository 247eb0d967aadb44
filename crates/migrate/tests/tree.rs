//! Trees of processes move to an agent; what fails leaves them where they are.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{Counter, Host, Killed, child_of, judge, state_of, wait_until};
use torpor_runtimes_tests::mounts::QUIET;

const MODES: [&str; 5] = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];

/// What scripts rely on.
fn check_report(report: &Value) {
    for name in ["total_ms", "downtime_ms", "freeze_ms", "transfer_ms", "restore_ms"] {
        assert!(report[name].as_f64().unwrap() > 0.0, "{name}: {report}");
    }
    let part = |name: &str| report[name].as_f64().unwrap();
    let parts = part("freeze_ms") + part("transfer_ms") + part("restore_ms");
    assert!((parts - part("downtime_ms")).abs() < 1.0, "{report}");
    assert!(part("downtime_ms") < part("total_ms"), "{report}");
    let expected = |name: &str| report["estimate"][name].as_f64().unwrap();
    let parts = expected("freeze_ms") + expected("transfer_ms") + expected("restore_ms");
    assert!((parts - expected("downtime_ms")).abs() < 1.0 && parts > 0.0, "{report}");
    let rounds = report["rounds"].as_array().unwrap();
    for round in rounds {
        assert!(round["ms"].as_f64().unwrap() > 0.0, "{report}");
        assert!(round["bytes"].as_u64().unwrap() > 0, "{report}");
    }
    let sum: u64 = rounds.iter().map(|round| round["bytes"].as_u64().unwrap()).sum();
    assert_eq!(report["bytes"].as_u64().unwrap(), sum, "{report}");
    assert!(rounds[0]["pages"].as_u64().unwrap() >= 2000, "{report}");
}

fn moved(counter: &mut Counter, hosts: [&Host; 2], report: &Value) {
    check_report(report);
    wait_until("it has ended here", || counter.has_ended_here());
    counter.goes_on();
    let there = i32::try_from(report["pid"].as_i64().unwrap()).unwrap();
    assert!(counter.running().iter().any(|&(pid, _)| pid == there), "{report}");
    assert_eq!(hosts[0].phases("source"), ["moved"]);
    wait_until("the destination tidies up", || hosts[1].is_clean());
    assert_eq!(hosts[1].phases("destination"), ["moved"]);
    assert!(hosts[0].is_clean());
}

#[test]
fn every_mode_over_either_kind_of_address() {
    for mode in MODES {
        for listen in [None, Some("127.0.0.1:0")] {
            let (here, mut there) = (Host::new(), Host::new());
            if let Some(listen) = listen {
                there.listen = listen.to_owned();
            }
            there.start_agent();
            let mut counter = Counter::start(2000, 10);
            let report = here.moves(counter.pid, mode, &there.address).unwrap();
            assert_eq!(report["mode"], mode);
            moved(&mut counter, [&here, &there], &report);
        }
    }
}

#[test]
fn every_mode_over_several_connections() {
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let mut counter = Counter::start(2000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--connections", "3", "--json"];
        let output = here.migrate(&args).arg(&there.address).output().unwrap();
        moved(&mut counter, [&here, &there], &judge(&output).unwrap());
    }
}

/// A round has not more bytes than its time is worth, however many connections it goes over.
#[test]
fn a_bandwidth_is_of_all_connections_together() {
    const BANDWIDTH: f64 = 16e6;
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let mut counter = Counter::start(2000, 10);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "pre-copy", "--connections", "4", "--bandwidth", "16M"];
    let output = here.migrate(&args).args(["--json", &there.address]).output().unwrap();
    let report = judge(&output).unwrap();
    let (_, running) = report["rounds"].as_array().unwrap().split_last().unwrap();
    assert!(!running.is_empty(), "{report}");
    for round in running {
        let (bytes, ms) = (round["bytes"].as_f64().unwrap(), round["ms"].as_f64().unwrap());
        assert!(bytes <= BANDWIDTH * ms / 1000.0, "{report}");
    }
    moved(&mut counter, [&here, &there], &report);
}

#[test]
fn an_agent_takes_no_more_connections_than_it_says() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    for number in ["0", "17"] {
        let args = ["--pid", &pid, "--connections", number, &there.address];
        let error = judge(&here.migrate(&args).output().unwrap()).unwrap_err();
        assert!(error.contains("1 to 16 are possible"), "{error}");
    }
    counter.goes_on();
    assert!(there.phases("destination").is_empty());
}

#[test]
fn memory_that_is_written_all_the_time_arrives_as_it_is() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    // It looks at each page before it writes it, and ends if it is not as it was left.
    let mut counter = Counter::start(20_000, 500);
    let args = ["--pid", &counter.pid.to_string(), "--max-downtime", "0", "--max-rounds", "4"];
    let output = here
        .migrate(&args)
        .args(["--mode", "pre-copy", "--json", &there.address])
        .output()
        .unwrap();
    let report = support::judge(&output).unwrap();
    let rounds = report["rounds"].as_array().unwrap().len();
    assert!(rounds > 2, "{report}");
    // No terminal: a line for each round of tasks that run, and nothing else.
    let told = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = told.lines().filter(|line| line.contains(": round ")).collect();
    assert_eq!(lines.len(), rounds - 1, "{told}");
    assert!(lines[1].contains("MB/s are written, it would be stopped for about"), "{told}");
    moved(&mut counter, [&here, &there], &report);
    let before = counter.count();
    wait_until("it has seen its pages", || counter.count() > before + 200);
}

/// What is said of a migration does not decide about it, and no status says that it has not moved.
#[test]
fn it_moves_although_nobody_can_be_told() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    for is_heard in [true, false] {
        let mut counter = Counter::start(2000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", "pre-copy", "--json", &there.address];
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut migrate = here.migrate(&args);
        migrate.stdout(full);
        if !is_heard {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            migrate.stderr(writer);
        }
        let output = migrate.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert_eq!(told.contains("has moved, and runs there as process"), is_heard, "{told}");
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
    }
}

/// A page that nobody writes goes once, whichever round it is in.
#[test]
fn what_is_not_written_goes_once() {
    const PAGES: u64 = 10_000;
    const OWN: u64 = 100;
    for mode in ["pre-copy", "pipelined", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        // It writes one page, and looks at that one only, before it counts on.
        let mut counter = Counter::start(PAGES, 1);
        let before = counter.count();
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--max-downtime", "0", "--json"];
        let output = here.migrate(&args).arg(&there.address).output().unwrap();
        let report = judge(&output).unwrap();
        // The more the longer it took.
        let written = counter.count() - before;
        let rounds = report["rounds"].as_array().unwrap();
        assert!(rounds.len() > 1, "{report}");
        let later: Vec<u64> = rounds[1..].iter().map(|it| it["bytes"].as_u64().unwrap()).collect();
        // Each time it notes in one of twenty pages more what it has written; and there are its stack and the images.
        let own = OWN * later.len() as u64;
        assert!(later.iter().sum::<u64>() < (own + written) * 4096, "{written}: {report}");
        moved(&mut counter, [&here, &there], &report);
    }
}

/// The tree is built there by a later round, by all of its structure in each, or both.
#[test]
fn when_it_is_built_and_by_what_can_be_chosen() {
    for more in [
        &["--start-restore-after", "2"][..],
        &["--state", "full"],
        &["--state", "full", "--start-restore-after", "3"],
        // There are not so many rounds: it is built in the pause.
        &["--start-restore-after", "100"],
    ] {
        for mode in ["pipelined", "hybrid"] {
            let (here, mut there) = (Host::new(), Host::new());
            there.start_agent();
            let mut counter = Counter::start(2000, 100);
            let pid = counter.pid.to_string();
            let args = ["--pid", &pid, "--mode", mode, "--max-downtime", "0", "--json"];
            let mut migrate = here.migrate(&args);
            let output = migrate.args(more).arg(&there.address).output().unwrap();
            let report = judge(&output).unwrap_or_else(|e| panic!("{more:?}: {e} {}", there.log()));
            assert!(!there.log().contains("built anew"), "{more:?}: {}", there.log());
            moved(&mut counter, [&here, &there], &report);
        }
    }
}

/// How many processes have the number `id` in the pid namespace of `other`.
fn number_of(id: &str, other: i32) -> usize {
    let home = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let theirs = home(&other.to_string());
    let has_it = |pid: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        ids.and_then(|ids| ids.split_whitespace().last()) == Some(id) && home(pid) == theirs
    };
    let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    all.filter(|name| name.to_str().is_some_and(has_it)).count()
}

/// A task that was born since the first round has a husk there before the tasks are stopped, if a later round has brought it
/// and the tree is built by that one.
#[test]
fn a_tree_is_built_by_the_newest_round_that_has_its_structure() {
    const FAMILY: &str = "import os, sys, time\n\
        while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n\
        end, own = os.pipe()\n\
        child = os.fork()\n\
        if not child:\n    os.close(own)\n    os.read(end, 1)\n    sys.exit()\n\
        open(sys.argv[2], 'w').write(str(child))\n\
        time.sleep(1000000)";
    let here = Host::new();
    // Nobody has its process ids there.
    let mut there = Host::apart(&["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]);
    there.start_agent();
    let agent = child_of(there.agent.as_ref().unwrap().id());
    let [first, bear, born] = ["first", "bear", "born"].map(|name| here.path(name));
    let [stopped, released] = ["stopped", "released"].map(|name| here.path(name));
    let mut family = Command::new("setsid");
    family.args(["python3", "-c", FAMILY]).args([&bear, &born]).stdin(Stdio::null());
    let mut family = family.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let root = Killed(family.id().cast_signed());
    let rounds = format!(
        "test $CRTOOLS_SCRIPT_ACTION != pre-dump || {{ \
         if test -e {first}; then touch {bear}; until test -s {born}; do sleep 0.01; done; fi; touch {first}; }}",
        first = first.display(),
        bear = bear.display(),
        born = born.display(),
    );
    let held = format!(
        "test $TORPOR_STAGE != stopped || {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        stopped.display(),
        released.display(),
    );
    let mut migrate = here.migrate(&["--pid", &root.0.to_string(), "--max-downtime", "0"]);
    migrate.args(["--max-rounds", "2", "--start-restore-after", "2", "--state", "full"]);
    migrate.args(["--dump-option=--action-script", &format!("--dump-option={rounds}")]);
    let mut migration =
        migrate.args(["--script", &held, "--json", &there.address]).spawn().unwrap();
    wait_until("the tasks are stopped", || {
        stopped.exists() || migration.try_wait().unwrap().is_some()
    });
    let child = fs::read_to_string(&born).unwrap_or_default();
    let husks = number_of(&child, agent);
    fs::write(&released, "").unwrap();
    let report = judge(&migration.wait_with_output().unwrap());
    let report = report.unwrap_or_else(|error| panic!("{error}\n{}", there.log()));
    assert_eq!(husks, 1, "{child}: {}", there.log());
    assert!(!there.log().contains("built anew"), "{}", there.log());
    assert_eq!(report["pid"].as_i64().unwrap(), i64::from(root.0));
    drop(root);
    family.wait().unwrap();
}

/// Rounds leave less to be fetched when the tasks run there.
#[test]
fn hybrid_takes_rounds() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let mut counter = Counter::start(2000, 20);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "hybrid", "--max-downtime", "0", "--json"];
    let output = here.migrate(&args).arg(&there.address).output().unwrap();
    let report = judge(&output).unwrap();
    assert!(report["rounds"].as_array().unwrap().len() > 2, "{report}");
    moved(&mut counter, [&here, &there], &report);
    // It looks at each page before it writes it, and ends if it is not as it was left.
    let before = counter.count();
    wait_until("it has seen its pages", || counter.count() > before + 100);
}

/// The first round loses there what the second one has anew.
#[test]
fn a_page_takes_room_there_once() {
    const PAGES: u64 = 4000;
    /// In pages: images that have none, and what a page more or less of the program's takes.
    const REST: u64 = 200;
    for mode in ["pre-copy", "pipelined", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        // It writes most of its pages in each round.
        let mut counter = Counter::start(PAGES, PAGES);
        let (used, first) = (here.path("used"), there.path("taken/one/1"));
        let script = format!(
            "test $TORPOR_STAGE != stopped || du --block-size=4096 -s {} >{}",
            first.display(),
            used.display()
        );
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--id", "one", "--mode", mode, "--max-downtime", "0"];
        let mut migrate = here.migrate(&args);
        migrate.args(["--script", &script, "--json", &there.address]);
        let report = judge(&migrate.output().unwrap()).unwrap_or_else(|e| panic!("{mode}: {e}"));
        let used = fs::read_to_string(used).unwrap();
        let used: u64 = used.split_whitespace().next().unwrap().parse().unwrap();
        let pages = |round: usize| report["rounds"][round]["pages"].as_u64().unwrap();
        assert!(used < pages(0).saturating_sub(pages(1)) + REST, "{mode}: {used}, {report}");
        moved(&mut counter, [&here, &there], &report);
    }
}

/// Over a link that is slower than this host pages are compressed, if that is asked for.
#[test]
fn what_a_slow_link_carries_is_compressed_on_demand() {
    const PAGES: u64 = 4000;
    let mut bytes = Vec::new();
    for (mode, compress) in [("pre-copy", false), ("pre-copy", true), ("hybrid", true)] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let mut counter = Counter::start(PAGES, 1);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--bandwidth", "20M", "--max-rounds", "1"];
        let mut migrate = here.migrate(&args);
        migrate.args(compress.then_some("--compress")).args(["--json", &there.address]);
        let report = judge(&migrate.output().unwrap()).unwrap();
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
        bytes.push(report["rounds"][0]["bytes"].as_u64().unwrap());
    }
    let [plain, compressed @ ..] = &bytes[..] else { panic!("{bytes:?}") };
    assert!(*plain > PAGES * 4096 && compressed.iter().all(|it| *it < plain / 2), "{bytes:?}");
}

#[test]
fn a_tree_moves_as_a_whole() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let script = "sleep 1000 & \"$@\" & wait";
    let counter = Counter::start_under(&["setsid", "sh", "-c", script, "sh"], 2000, 10);
    let report = here.moves(counter.pid, "pre-copy", &there.address).unwrap();
    counter.goes_on();
    let root = report["pid"].as_u64().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{root}/task/{root}/children")).unwrap();
    let children: Vec<&str> = children.split_whitespace().collect();
    assert_eq!(children.len(), 2, "{children:?}");
    for pid in [root.to_string().as_str()].iter().chain(&children) {
        let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }
}

#[test]
fn a_tree_with_a_pid_namespace_of_its_own_gets_a_new_one() {
    let (here, mut there) = (Host::new(), Host::new());
    // Its mounts are copies of all that this machine has, which nobody gets without being allowed to.
    for rule in ["sources=\"all\"", "file-systems=\"all\""] {
        there.options.push("--restore-option=--policy-rule".to_owned());
        there.options.push(format!("--restore-option=foreign.mounts.{rule}"));
    }
    there.start_agent();
    let script = format!("{QUIET}; exec \"$@\" < /dev/null > /dev/null 2>&1");
    let prefix = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", &script, "sh"];
    let mut counter = Counter::start_under(&prefix, 2000, 10);
    counter.pid = child_of(counter.child.id());
    let report = here.moves(counter.pid, "pre-copy", &there.address).unwrap();
    moved(&mut counter, [&here, &there], &report);
    let there = report["pid"].as_u64().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{there}/status")).unwrap();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(ids.split_whitespace().last(), Some("1"), "{ids}");
}

/// A tree that has got a pid namespace and a time namespace on its way, of which it was born in none, goes on from there.
#[test]
fn a_tree_that_has_moved_moves_on() {
    let hosts = [(); 2].map(|()| {
        let mut host = Host::new().with_quiet_mounts();
        host.start_agent();
        host
    });
    let mut counter = Counter::start(2000, 10);
    let mut pid = counter.pid;
    for (number, mode) in ["stop-and-copy", "pipelined", "hybrid", "pre-copy"].iter().enumerate() {
        let (from, to) = (&hosts[number % 2], &hosts[(number + 1) % 2]);
        let report = from.moves(pid, mode, &to.address).unwrap();
        assert!(!to.log().contains("built anew"), "{mode}: {}", to.log());
        pid = i32::try_from(report["pid"].as_i64().unwrap()).unwrap();
        counter.goes_on();
        assert_eq!(counter.running(), [(pid, true)], "{report}");
        // In its own eyes it is who it was.
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
        let ids: Vec<&str> = ids.split_whitespace().collect();
        assert_eq!(ids, [pid.to_string(), counter.pid.to_string()], "{mode}");
    }
    wait_until("it has ended here", || counter.has_ended_here());
    wait_until("all tidy up", || hosts.iter().all(Host::is_clean));
}

/// What sandboxes are made of: a task of the tree is in a user namespace below that of the others. It comes along in every mode
/// in which its memory is there before it runs; the others are refused before anything is asked of the destination.
#[test]
fn user_namespaces_inside_of_a_tree_come_along() {
    let sandbox = "unshare --user --map-root-user --ipc --uts --net --pid --fork \"$@\" & wait";
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let counter = Counter::start_under(&["setsid", "sh", "-c", sandbox, "sh"], 2000, 10);
        let link = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
        let ids = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
        let before = ids(counter.running()[0].0);
        let pid = counter.pid.to_string();
        let dry = ["--pid", &pid, "--mode", mode, "--dry-run", "--json", &there.address];
        let output = here.migrate(&dry).output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let report = here.moves(counter.pid, mode, &there.address);
        if matches!(mode, "post-copy" | "hybrid") {
            let (error, why) = (report.unwrap_err(), format!("cannot move by {mode}"));
            assert!(error.contains(&why) && error.contains("--mode pipelined"), "{error}");
            assert!(said["refused"].to_string().contains(&why), "{said}");
            counter.goes_on();
            assert_eq!(link(counter.pid), link(std::process::id().cast_signed()), "{mode}");
            assert!(here.phases("source").is_empty() && there.phases("destination").is_empty());
            continue;
        }
        assert_eq!(said["refused"].as_array().unwrap().len(), 0, "{said}");
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        counter.goes_on();
        let (root, inside) = (report["pid"].as_i64().unwrap(), counter.running()[0].0);
        assert_ne!(link(i32::try_from(root).unwrap()), link(inside), "{mode}");
        assert_eq!(ids(inside), before, "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        // All of it ends with its root's children.
        let root = Pid::from_raw(i32::try_from(root).unwrap()).unwrap();
        kill_process(root, Signal::KILL).unwrap();
    }
}

/// Pid namespaces two levels below that of the root task, and a time namespace, come along in every mode.
#[test]
fn pid_and_time_namespaces_inside_of_a_tree_come_along() {
    const DAY: u64 = 86400;
    let inside =
        format!("unshare --time --monotonic {DAY} --pid --fork unshare --pid --fork \"$@\" & wait");
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let counter = Counter::start_under(&["setsid", "sh", "-c", &inside, "sh"], 2000, 10);
        let begun = Instant::now();
        let report = here.moves(counter.pid, mode, &there.address);
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        counter.goes_on();
        let pid = counter.running()[0].0;
        let of_task = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
        let status = of_task("status");
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
        let levels: Vec<&str> = ids.split_whitespace().collect();
        assert!(levels.len() >= 3 && levels.ends_with(&["1"]), "{mode}: {ids}");
        let offsets = of_task("timens_offsets");
        let ahead = offsets.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        // Its clock stood while the tasks were on their way.
        let least = DAY - 1 - begun.elapsed().as_secs();
        assert!((least..=DAY).contains(&ahead), "{mode}: {offsets}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let root = Pid::from_raw(i32::try_from(report["pid"].as_i64().unwrap()).unwrap()).unwrap();
        kill_process(root, Signal::KILL).unwrap();
    }
}

#[test]
fn programs_of_32_bits_move() {
    if !support::makes_32_bits() {
        println!("left out: programs_of_32_bits_move (the compiler makes none)");
        return;
    }
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let mut counter = Counter::start_program(&["setsid"], "counter-32", &["2000", "10"]);
        let report = here.moves(counter.pid, mode, &there.address);
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        moved(&mut counter, [&here, &there], &report);
        let program = std::fs::read(format!("/proc/{}/exe", counter.running()[0].0)).unwrap();
        assert_eq!(program[4], 1, "ELFCLASS32");
    }
}

/// A service that runs something in a sandbox of bubblewrap, whose mounts are those of both hosts. All of `/tmp` would
/// bring mounts of other tests along.
#[test]
fn a_sandbox_inside_of_a_tree_comes_along() {
    if Command::new("bwrap").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("left out: a_sandbox_inside_of_a_tree_comes_along (there is no bubblewrap)");
        return;
    }
    let sandbox = "bwrap --ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
                   --bind \"${1%/*}\" \"${1%/*}\" --proc /proc --unshare-all --uid 0 \"$@\" & wait";
    for mode in ["stop-and-copy", "pre-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        for rule in ["sources=\"all\"", "file-systems=\"all\""] {
            there.options.push("--restore-option=--policy-rule".to_owned());
            there.options.push(format!("--restore-option=foreign.mounts.{rule}"));
        }
        for word in ["--external", "mnt[]"] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start_under(&["setsid", "sh", "-c", sandbox, "sh"], 2000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let external = ["--dump-option=--external", "--dump-option=mnt[]"];
        let report = judge(&here.migrate(&args).args(external).output().unwrap());
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        counter.goes_on();
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let root = Pid::from_raw(i32::try_from(report["pid"].as_i64().unwrap()).unwrap()).unwrap();
        kill_process(root, Signal::KILL).unwrap();
    }
}

#[test]
fn an_agent_with_processes_mounts_and_network_of_its_own() {
    let here = Host::new();
    let apart = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"];
    let mut there = Host::apart(&apart);
    there.start_agent();
    let mut counter = Counter::start(2000, 10);
    let report = here.moves(counter.pid, "pre-copy", &there.address).unwrap();
    check_report(&report);
    wait_until("it has ended here", || counter.has_ended_here());
    counter.goes_on();
    // No process there has its id, so that it keeps it.
    assert_eq!(report["pid"].as_i64().unwrap(), i64::from(counter.pid));
    assert!(counter.running()[0].0 != counter.pid);
    // The agent is the first process there, and all others end with it.
    there.stop_agent();
    wait_until("it ends", || counter.running().is_empty());
}

/// As a container's only process is: the kernel gives a first process no signal that it has no handler for, and the tasks
/// that come are its children in the end.
#[test]
fn an_agent_that_is_the_first_process_buries_its_dead_and_ends_when_told() {
    for signal in [Signal::TERM, Signal::INT] {
        let here = Host::new();
        let apart = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"];
        let mut there = Host::apart(&apart);
        there.start_agent();
        let counter = Counter::start(100, 1);
        here.moves(counter.pid, "stop-and-copy", &there.address).unwrap();
        counter.goes_on();
        let (came, _) = counter.running()[0];
        kill_process(Pid::from_raw(came).unwrap(), Signal::KILL).unwrap();
        wait_until("nothing is left of what came", || state_of(came).is_none());
        let mut outside = there.agent.take().unwrap();
        let first = Pid::from_raw(child_of(outside.id())).unwrap();
        kill_process(first, signal).unwrap();
        wait_until("it ends", || outside.try_wait().unwrap().is_some());
        assert!(outside.wait().unwrap().success(), "{}", there.log());
        assert!(!there.path("agent.socket").exists() && there.is_clean());
    }
}

/// At each of these the restore fails, and the tasks go on where they were.
#[test]
fn a_restore_that_fails_leaves_the_tasks_where_they_are() {
    for point in ["pre-restore", "setup-namespaces", "post-restore", "pre-resume"] {
        let (here, mut there) = (Host::new(), Host::new());
        let script = format!("test $CRTOOLS_SCRIPT_ACTION != {point}");
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(2000, 10);
        let error = here.moves(counter.pid, "stop-and-copy", &there.address).unwrap_err();
        assert!(error.contains("restore") || error.contains("go on here"), "{error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(here.phases("source"), ["stayed"]);
        assert_eq!(there.phases("destination"), ["stayed"]);
    }
}

#[test]
fn what_a_dump_refuses_is_said_and_undone() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let (counter, root) = Counter::start_refused();
    let error = here.moves(root, "pre-copy", &there.address).unwrap_err();
    assert!(error.contains("its time namespace"), "{error}");
    counter.goes_on();
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

#[test]
fn nobody_there_nothing_there_and_nonsense() {
    let here = Host::new();
    let counter = Counter::start(100, 1);
    let nowhere = format!("unix:{}", here.path("nobody").display());
    let error = here.moves(counter.pid, "pre-copy", &nowhere).unwrap_err();
    assert!(error.contains("no agent answers") && error.contains("torpor agent"), "{error}");
    let mut there = Host::new();
    there.start_agent();
    let error = here.moves(4_194_000, "pre-copy", &there.address).unwrap_err();
    assert!(error.contains("there is no process 4194000"), "{error}");
    let error = here.moves(counter.pid, "pre-copy", "elsewhere").unwrap_err();
    assert!(error.contains("expected unix:PATH or HOST:PORT"), "{error}");
    for words in [&[][..], &[&there.address[..]]] {
        let error = judge(&here.migrate(words).output().unwrap()).unwrap_err();
        assert!(error.contains("nothing to move is named"), "{words:?}: {error}");
    }
    counter.goes_on();
}

#[test]
fn an_agent_without_certificates_is_for_this_host_only() {
    let mut agent = Command::new(support::torpor());
    agent.args(["agent", "--listen", "0.0.0.0:0"]).stdout(Stdio::null());
    let host = Host::new();
    agent.arg("--state-dir").arg(host.path("state")).arg("--work-dir").arg(host.path("work"));
    let output = agent.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("--cert"), "{error}");
}

/// Somebody changes their mind while nobody answers at the destination.
#[test]
fn cancelled_before_anybody_answers() {
    let here = Host::new();
    let path = here.path("silent.socket");
    let silent = UnixListener::bind(&path).unwrap();
    let counter = Counter::start(100, 1);
    let (pid, to) = (counter.pid.to_string(), format!("unix:{}", path.display()));
    let migration = here.migrate(&["--pid", &pid, &to]).spawn().unwrap();
    let _taken = silent.accept().unwrap();
    kill_process(Pid::from_child(&migration), Signal::INT).unwrap();
    let output = migration.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("cancelled"), "{said}");
    counter.goes_on();
    assert!(here.phases("source").is_empty());
}

#[test]
fn cancelled_it_goes_on_here() {
    for by_signal in [true, false] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let counter = Counter::start(50_000, 1000);
        let args = ["--pid", &counter.pid.to_string(), "--max-downtime", "0", "--id", "one"];
        let mut migration = here.migrate(&args);
        migration.args(["--mode", "pre-copy", "--bandwidth", "20M", &there.address]);
        let mut migration = migration.spawn().unwrap();
        let round = here.path("work/source/one/1");
        wait_until("the first round begins", || round.exists());
        if by_signal {
            let pid = Pid::from_child(&migration);
            kill_process(pid, Signal::INT).unwrap();
        } else {
            let output = here.migrate(&["--cancel", "one"]).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        assert!(!migration.wait().unwrap().success());
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(here.phases("source"), ["stayed"]);
        wait_until("it is written down", || there.phases("destination") == ["stayed"]);
    }
}
