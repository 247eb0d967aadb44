//! Who decides on which side the tasks live, and how that is found out when nobody has said so.

use std::fs;
use std::io::{BufRead, BufReader};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::held::Held;
use super::support::{Counter, Host, descendant, judge, pids_of, state_of, wait_until};

/// An agent is gone before its tasks have their pages: the user is told for how long another one is waited for, and what to
/// do. The next agent says that they have stayed.
#[test]
fn who_waits_for_pages_to_go_is_told_until_when() {
    for mode in ["post-copy", "hybrid"] {
        let mut held = Held::start_with(mode, "pre-resume", "false", &["--patience", "3"]);
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        held.there.stop_agent();
        let mut said = BufReader::new(held.migration.stderr.take().unwrap()).lines();
        let is_lost = |line: &String| line.contains("is lost: the tasks wait for another one");
        let lost = said.by_ref().map(Result::unwrap).find(is_lost).expect("it says nothing");
        assert!(lost.contains(&format!("the connection to {}", held.there.address)), "{lost}");
        let is_told = |line: &String| line.contains("wait for their pages");
        let told = said.by_ref().map(Result::unwrap).find(is_told).expect("it says nothing");
        assert!(told.contains(&format!("one: no connection to {}", held.there.address)), "{told}");
        assert!(told.contains("it is tried for another 23 h 59 min"), "{told}");
        let kill = format!("kill -KILL {}", held.migration.id());
        assert!(told.contains(&format!("{kill}; torpor migrate --resolve one --keep-here")));
        held.release();
        held.there.start_agent();
        let asked = format!("asking the agent at {} what it has done", held.there.address);
        assert!(said.map(Result::unwrap).any(|line| line.contains(&asked)), "{mode}");
        assert!(!held.migration.wait().unwrap().success());
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode}");
        assert_eq!(held.there.phases("destination"), ["stayed"], "{mode}");
        assert!(held.is_here(true), "they run on");
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
    }
}

/// The destination was told to let the tasks run: the command waits for what becomes of that.
#[test]
fn when_it_is_decided_it_is_too_late_to_cancel() {
    let mut held = Held::start("pipelined", "pre-resume", "true");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    let mut cancel = held.here.migrate(&["--cancel", "one"]);
    let cancel = cancel.spawn().unwrap();
    held.release();
    let output = cancel.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("too late: it has moved"), "{said}");
    assert!(held.migration.wait().unwrap().success());
    held.counter.goes_on();
    assert_eq!(held.here.phases("source"), ["moved"]);
    wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
}

/// A destination that was told to let the tasks run and does not say whether they do: the user is told what to do.
#[test]
fn who_waits_for_the_decision_is_told_what_to_do() {
    for mode in ["pre-copy", "post-copy"] {
        let mut held = Held::start_with(mode, "pre-resume", "true", &["--patience", "3"]);
        let mut said = BufReader::new(held.migration.stderr.take().unwrap()).lines();
        let is_told = |line: &String| line.contains("has not said whether they do");
        let told = said.by_ref().map(Result::unwrap).find(is_told).expect("it says nothing");
        let status = format!("torpor agent status {}", held.there.address);
        assert!(told.contains(&status), "{told}");
        let kill = format!("kill -KILL {}", held.migration.id());
        assert!(told.contains(&format!("{kill}; torpor migrate --resolve one --keep-here")));
        assert!(!held.is_here(true), "they run on");
        held.release();
        assert!(held.migration.wait().unwrap().success());
        held.counter.goes_on();
    }
}

/// The destination was told to let the tasks run when everything of the source ended.
#[test]
fn what_is_undecided_is_resolved_by_asking() {
    for (then, decided, phase) in
        [("true", "it has moved", "moved"), ("false", "it goes on here", "stayed")]
    {
        let mut held = Held::start("pre-copy", "pre-resume", then);
        held.abandon();
        held.release();
        assert_eq!(held.resolve(&[]), decided);
        held.counter.goes_on();
        assert_eq!(held.is_here(true), phase == "stayed");
        assert_eq!(held.here.phases("source"), [phase]);
        assert_eq!(held.there.phases("destination"), [phase]);
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
        // Asked again, it says the same.
        assert!(held.resolve(&[]).contains(if phase == "moved" { "moved" } else { "here" }));
    }
}

/// Who has taken addresses away is killed: whoever finds out where the tasks are says so to the script.
#[test]
fn who_decides_tells_the_script() {
    for (point, then, is_watched, stage) in [
        ("setup-namespaces", "true", true, "stayed"),
        ("pre-resume", "true", true, "moved"),
        ("pre-resume", "false", true, "stayed"),
        ("pre-resume", "true", false, "moved"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let told = dir.path().join("told");
        let script = format!("echo $TORPOR_STAGE >>{}", told.display());
        let mut held = Held::start_with("pre-copy", point, then, &["--script", &script]);
        let told = || fs::read_to_string(&told).unwrap();
        assert_eq!(told(), "stopped\n");
        if is_watched {
            wait_until("it comes to its decision", || {
                point != "pre-resume" || held.here.phases("source") == ["deciding"]
            });
            held.migration.kill().unwrap();
            held.migration.wait().unwrap();
            held.release();
        } else {
            held.abandon();
            held.release();
            held.resolve(&[]);
        }
        let expected = format!("stopped\n{stage}\n");
        wait_until(&format!("{point}, {then}: it is told"), || told() == expected);
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), [stage]);
        // Once.
        held.resolve(&[]);
        assert_eq!(told(), expected);
    }
}

/// The same of an agent that has brought them.
#[test]
fn the_next_agent_tells_the_script() {
    let (here, mut there) = (Host::new(), Host::new());
    let [told, reached, released] = ["told", "reached", "released"].map(|name| here.path(name));
    let held = format!(
        "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        reached.display(),
        released.display()
    );
    for word in ["--action-script", &held] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.options.push(format!("--script=echo $TORPOR_STAGE >>{}", told.display()));
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "pre-copy", &there.address];
    let mut migration = here.migrate(&args).spawn().unwrap();
    wait_until("it is being made", || reached.exists());
    there.stop_agent();
    fs::write(released, "").unwrap();
    assert!(!migration.wait().unwrap().success());
    counter.goes_on();
    assert_eq!(fs::read_to_string(&told).unwrap(), "arriving\n");
    for _ in 0..2 {
        there.start_agent();
        assert_eq!(fs::read_to_string(&told).unwrap(), "arriving\nstayed\n");
        there.stop_agent();
    }
}

/// The same of one that finds it out since it is asked: it did not know of it when it started.
#[test]
fn an_agent_that_is_asked_tells_the_script() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.there.stop_agent();
    held.release();
    wait_until("the restore has ended", || held.counter.running().len() == 1);
    let [path, away] = ["state/destination/one.json", "away"].map(|name| held.there.path(name));
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(record["phase"], "deciding");
    record["script"] = json!(format!("echo $TORPOR_STAGE >>{}", away.display()));
    fs::remove_file(&path).unwrap();
    held.there.start_agent();
    assert!(held.there.is_clean());
    fs::write(&path, record.to_string()).unwrap();
    let work = held.there.path("taken/one");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("torpor-in-use"), "").unwrap();
    for _ in 0..2 {
        assert!(held.resolve(&[]).ends_with("here"));
        wait_until("it is told once", || {
            fs::read_to_string(&away).is_ok_and(|told| told == "stayed\n")
        });
    }
    held.counter.goes_on();
    assert_eq!(held.there.phases("destination"), ["stayed"]);
    wait_until("both tidy up", || held.is_clean());
}

/// A script that is at work when the command is killed ends with it: what it would do later, whoever finds out where the tasks
/// are would have undone before.
#[test]
fn a_script_ends_with_its_command() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let [told, reached] = ["told", "reached"].map(|name| here.path(name));
    // Nobody else sleeps for so long.
    let sleeps = format!("400000.{}", std::process::id());
    let script = format!(
        "case $TORPOR_STAGE in stopped) sleep {sleeps} & touch {}; wait; ;; esac; echo $TORPOR_STAGE >>{}",
        reached.display(),
        told.display()
    );
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--script", &script];
    let mut migration = here.migrate(&args).arg(&there.address).spawn().unwrap();
    wait_until("the script is at work", || reached.exists());
    migration.kill().unwrap();
    migration.wait().unwrap();
    wait_until("who looks on tells it", || {
        fs::read_to_string(&told).is_ok_and(|told| !told.is_empty())
    });
    wait_until("the former is not at work any more", || pids_of(&["sleep", &sleeps]).is_empty());
    assert_eq!(fs::read_to_string(&told).unwrap(), "stayed\n");
    counter.goes_on();
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// What has stopped the tasks is killed, and whoever undoes that is slow: the command does not say before that they go on here.
#[test]
fn a_command_says_that_the_tasks_go_on_when_they_do() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let [reached, released] = ["reached", "released"].map(|name| here.path(name));
    let hangs = format!(
        "test $CRTOOLS_SCRIPT_ACTION != network-lock || {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        reached.display(),
        released.display()
    );
    let options = ["--action-script", &hangs].map(|word| format!("--dump-option={word}"));
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "stop-and-copy", &there.address];
    let mut migration = here.migrate(&args).args(&options).spawn().unwrap();
    wait_until("the tasks are stopped", || reached.exists());
    let worker = descendant(migration.id(), "worker").unwrap();
    let is_guard =
        |pid: &i32| torpor_kernel::proc::stat(*pid).is_ok_and(|stat| stat.comm == b"torpor-guard");
    let guard = torpor_kernel::proc::children_of(worker).into_iter().find(is_guard).unwrap();
    let [worker, guard] = [worker, guard].map(|pid| Pid::from_raw(pid).unwrap());
    kill_process(guard, Signal::STOP).unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    wait_until("the agent hears of it", || there.phases("destination") == ["stayed"]);
    assert_eq!(here.phases("source"), ["preparing"], "nobody has let them go yet");
    assert!(migration.try_wait().unwrap().is_none());
    kill_process(guard, Signal::CONT).unwrap();
    assert!(!migration.wait().unwrap().success());
    assert_eq!(counter.running(), [(counter.pid, true)]);
    fs::write(released, "").unwrap();
    counter.goes_on();
    assert_eq!(here.phases("source"), ["stayed"]);
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// The command is killed while what has stopped the tasks is at work: that is not waited for.
#[test]
fn a_command_that_is_killed_leaves_nothing_stopped() {
    let counter = Counter::start(100, 1);
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let reached = here.path("reached");
    let hangs = format!(
        "test $CRTOOLS_SCRIPT_ACTION != network-lock || {{ touch {0}; while test -e {0}; do sleep 0.01; done; }}",
        reached.display()
    );
    let options = ["--action-script", &hangs].map(|word| format!("--dump-option={word}"));
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "stop-and-copy", &there.address];
    let mut migration = here.migrate(&args).args(&options).spawn().unwrap();
    wait_until("the tasks are stopped", || reached.exists());
    migration.kill().unwrap();
    migration.wait().unwrap();
    counter.goes_on();
    wait_until("who looks on writes it down", || here.phases("source") == ["stayed"]);
    fs::remove_file(&reached).unwrap();
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// What is decided counts though one of both cannot write it down, and the record says so when it can be written again.
#[test]
fn what_is_decided_counts_without_a_record() {
    for (mode, side, then) in [
        ("pre-copy", "source", "true"),
        ("pre-copy", "source", "false"),
        ("post-copy", "source", "true"),
        ("pre-copy", "destination", "true"),
        ("post-copy", "destination", "true"),
        ("pre-copy", "destination", "false"),
    ] {
        let mut held = Held::start(mode, "pre-resume", then);
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        let host = if side == "source" { &held.here } else { &held.there };
        let new = host.path(&format!("state/{side}/one.new"));
        fs::create_dir(&new).unwrap();
        held.release();
        let has_moved = then == "true";
        assert_eq!(held.migration.wait().unwrap().success(), has_moved, "{mode} {side}");
        held.counter.goes_on();
        assert_eq!(held.is_here(true), !has_moved, "{mode} {side}");
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
        fs::remove_dir(new).unwrap();
        held.there.stop_agent();
        held.there.start_agent();
        held.resolve(&[]);
        let phase = if has_moved { "moved" } else { "stayed" };
        assert_eq!(held.here.phases("source"), [phase], "{mode} {side}");
        assert_eq!(held.there.phases("destination"), [phase], "{mode} {side}");
        held.counter.goes_on();
    }
}

/// What holds the tasks here is killed after the destination was told to let them run: they do not stay here, stopped.
#[test]
fn what_has_moved_ends_here_whoever_was_killed() {
    for mode in ["pre-copy", "pipelined"] {
        let mut held = Held::start(mode, "pre-resume", "true");
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        let job = descendant(held.migration.id(), "worker").unwrap();
        kill_process(Pid::from_raw(job).unwrap(), Signal::KILL).unwrap();
        held.release();
        assert!(held.migration.wait().unwrap().success(), "{mode}");
        wait_until("it has ended here", || {
            held.counter.running().iter().all(|&(pid, _)| pid != held.counter.pid)
        });
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["moved"], "{mode}");
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
    }
}

/// What holds the tasks here is killed when the destination has made them, before that is told to let them run: they have gone
/// on here since, and those there would do once more what these have done.
#[test]
fn what_went_on_meanwhile_stays_here() {
    for mode in ["stop-and-copy", "pre-copy"] {
        let more = ["--patience", "300"];
        let mut held = Held::start_with(mode, "setup-namespaces", "true", &more);
        let command = Pid::from_child(&held.migration);
        kill_process(command, Signal::STOP).unwrap();
        held.release();
        wait_until("they are made there", || held.counter.running().len() == 2);
        let (job, before) =
            (descendant(held.migration.id(), "worker").unwrap(), held.counter.count());
        kill_process(Pid::from_raw(job).unwrap(), Signal::KILL).unwrap();
        wait_until("they go on here", || held.counter.count() > before + 100);
        kill_process(command, Signal::CONT).unwrap();
        assert!(!held.migration.wait().unwrap().success(), "{mode}");
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode}");
        held.ends_here(mode, "setup-namespaces");
    }
}

/// The command ends when nobody can tell it more. What holds the tasks, and keeps the kernel from answering for them, is there
/// as long as somebody looks on.
#[test]
fn who_gives_up_asking_leaves_the_tasks_to_who_looks_on() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    let (state, away) = (held.there.path("state"), held.there.path("away"));
    held.there.stop_agent();
    fs::rename(&state, &away).unwrap();
    // It does not know of it.
    held.there.start_agent();
    assert!(!held.migration.wait().unwrap().success());
    assert_eq!(held.here.phases("source"), ["deciding"]);
    let status = torpor_kernel::proc::status(held.counter.pid).unwrap();
    assert_ne!(status.number("TracerPid", 10), Some(0), "nobody holds it");
    held.there.stop_agent();
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    held.release();
    held.there.start_agent();
    wait_until("who looks on is told", || held.here.phases("source") == ["stayed"]);
    held.counter.goes_on();
    wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
}

/// An agent that has lost its records, or is another one, decides nothing, and so the tasks run at one place only.
#[test]
fn who_does_not_know_does_not_decide() {
    let mut held = Held::start("pre-copy", "pre-resume", "true");
    held.abandon();
    held.release();
    wait_until("it runs there", || held.there.phases("destination") == ["moved"]);
    let (state, away) = (held.there.path("state"), held.there.path("away"));
    let stays = |held: &Held| {
        let error = judge(&held.here.migrate(&["--resolve", "one"]).output().unwrap()).unwrap_err();
        assert!(error.contains("does not know of it"), "{error}");
        assert!(
            error.contains("--state-dir that it had") && error.contains("--keep-here"),
            "{error}"
        );
        assert_eq!(held.here.phases("source"), ["deciding"]);
        let (here, there): (Vec<_>, Vec<_>) =
            held.counter.running().into_iter().partition(|&(pid, _)| pid == held.counter.pid);
        assert_eq!(here, [(held.counter.pid, false)]);
        assert!(there.len() == 1 && there[0].1, "{there:?}");
    };
    held.there.stop_agent();
    fs::rename(&state, &away).unwrap();
    held.there.start_agent();
    stays(&held);
    // Another one that has the number of the migration, and says that it has not come.
    let record = fs::read_to_string(away.join("destination/one.json")).unwrap();
    let other = record.replace("\"moved\"", "\"stayed\"");
    assert_ne!(record, other);
    fs::create_dir_all(state.join("destination")).unwrap();
    fs::write(state.join("destination/one.json"), other).unwrap();
    stays(&held);
    held.there.stop_agent();
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    held.there.start_agent();
    assert_eq!(held.resolve(&[]), "it has moved");
    wait_until("it has ended here", || held.counter.running().len() == 1);
    assert!(!held.is_here(true));
    held.counter.goes_on();
}

/// While a process looks on that asks an agent that is gone, the user may know better.
#[test]
fn a_lost_destination_is_not_waited_for() {
    let held = Held::start("pre-copy", "pre-resume", "false");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    is_kept_by_its_user(held);
}

/// The command and its agent are gone: the tasks stay by the word of the user, and nobody looks on any more.
fn is_kept_by_its_user(mut held: Held) {
    held.migration.kill().unwrap();
    held.migration.wait().unwrap();
    held.there.stop_agent();
    held.release();
    assert_eq!(held.resolve(&["--keep-here"]), "it goes on here");
    held.counter.goes_on();
    wait_until("nobody looks on any more", || held.watches().is_empty());
}

/// The process that looks on holds the tasks, and hangs: whoever knows better does not wait for it.
#[test]
fn who_looks_on_and_hangs_holds_nothing() {
    let held = Held::start("pre-copy", "pre-resume", "false");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    kill_process(held.watches()[0], Signal::STOP).unwrap();
    is_kept_by_its_user(held);
}

/// Who has decided that they stay was killed before they went on: whoever asks next lets them.
#[test]
fn what_stays_and_is_still_stopped_goes_on() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.there.stop_agent();
    held.release();
    wait_until("the restore has ended", || held.counter.running().len() == 1);
    let path = held.here.path("state/source/one.json");
    let record = fs::read_to_string(&path).unwrap();
    let stayed = record.replace("\"deciding\"", "\"stayed\"");
    assert_ne!(record, stayed);
    fs::write(&path, stayed).unwrap();
    assert_eq!(held.resolve(&[]), "it has stayed here");
    held.counter.goes_on();
    // Nobody else is told to go on by whoever asks once more.
    let pid = Pid::from_raw(held.counter.pid).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    assert_eq!(held.resolve(&[]), "it has stayed here");
    wait_until("it is stopped", || state_of(held.counter.pid) == Some('T'));
}

/// Only the user can know that the other host is lost for good.
#[test]
fn a_lost_destination_is_not_asked_on_demand() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.there.stop_agent();
    held.release();
    wait_until("the restore has ended", || held.counter.running().len() == 1);
    assert!(held.is_here(false), "nobody has decided");
    assert_eq!(held.resolve(&["--keep-here"]), "it goes on here");
    held.counter.goes_on();
    assert!(held.is_here(true));
    // When it comes back, its agent says the same.
    held.there.start_agent();
    assert_eq!(held.there.phases("destination"), ["stayed"]);
}

/// A host that was restarted has none of the tasks: whoever has their ids now is left alone.
#[test]
fn after_a_restart_of_the_host_nothing_is_signalled() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.release();
    let path = held.here.path("state/source/one.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert!(record["boot"].is_string(), "{record}");
    record["boot"] = json!("another");
    fs::write(&path, record.to_string()).unwrap();
    assert!(held.resolve(&[]).contains("ended when this host was restarted"));
    wait_until("the restore has ended", || held.counter.running().len() == 1);
    assert!(held.is_here(false), "it is another task now, and was not told to go on");
    kill_process(Pid::from_raw(held.counter.pid).unwrap(), Signal::KILL).unwrap();
}
