//! Whatever fails, each job ends exactly once with the right result.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::time::Instant;

use common::{Daemon, PATIENCE, connected, counted, counter, leaks, long, shepherds, until, words};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_kernel::proc;
use torpor_tests::kill::{Watched, watch_other, watch_since, while_at};
use torpor_tests::random::Random;

fn kill(pid: i32) {
    // It may have ended by itself.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

/// The shepherd that keeps a job, once it has started that.
fn shepherd_of(daemon: &Daemon, id: u64) -> Option<i32> {
    let dir = daemon.data().join(format!("jobs/{id}"));
    let keeps = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let named = line.split(|byte| *byte == 0).nth(3).unwrap_or_default();
        std::path::Path::new(std::str::from_utf8(named).unwrap_or_default()).starts_with(&dir)
    };
    let mut all = shepherds(&daemon.data()).into_iter();
    all.find(keeps).filter(|shepherd| !proc::children_of(*shepherd).is_empty())
}

#[test]
fn a_new_daemon_finds_jobs_in_every_state() {
    let mut daemon = Daemon::start(&["--slots", "4"]);
    let [running, asleep, stopped] =
        [60, 200, 200].map(|last| daemon.submit(&[], &words(&daemon.counter(last, 0.05))));
    let go = daemon.dir.path().join("go");
    let script = "until [ -e $0 ]; do sleep 0.01; done; echo done; exit 5";
    let short = daemon.submit(&[], &["sh", "-c", script, go.to_str().unwrap()]);
    daemon.wait_for_output(running, "1\n");
    daemon.wait_for_output(asleep, "1\n");
    daemon.wait_for_output(stopped, "1\n");
    daemon.ok(&["preempt", &asleep.to_string()]);
    daemon.ok(&["preempt", &stopped.to_string(), "--means", "stop"]);
    let shepherd = until("the short one runs", || shepherd_of(&daemon, short));
    daemon.kill();
    // The short one ends while nobody is there.
    std::fs::write(go, "").unwrap();
    until("it has ended", || proc::children_of(shepherd).is_empty().then_some(()));
    daemon.launch();
    assert_eq!(daemon.wait_for(short, "failed")["exit"], 5);
    assert_eq!(daemon.output(short), "done\n");
    assert_eq!(daemon.wait_for(asleep, "preempted")["in_memory"], false);
    assert_eq!(daemon.wait_for(stopped, "preempted")["in_memory"], true);
    daemon.let_end();
    daemon.ok(&["resume", &asleep.to_string()]);
    daemon.ok(&["resume", &stopped.to_string()]);
    for (id, last) in [(running, 60), (asleep, 200), (stopped, 200)] {
        assert_eq!(daemon.wait_for(id, "done")["run"], 1);
        assert_eq!(daemon.output(id), counted(last));
    }
}

#[test]
fn a_job_whose_machine_failed_goes_on_from_its_checkpoint() {
    let mut daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &words(&daemon.counter(60, 0.05)));
    daemon.wait_for_output(id, "10\n");
    daemon.ok(&["preempt", &id.to_string()]);
    daemon.let_end();
    until("the checkpoint is durable", || daemon.show(id)["checkpoint"].as_u64());
    // As if the machine had failed: the daemon and all of the job are gone.
    daemon.kill();
    shepherds(&daemon.data()).into_iter().for_each(kill);
    until("nothing is left", || shepherds(&daemon.data()).is_empty().then_some(()));
    daemon.launch();
    daemon.ok(&["resume", &id.to_string()]);
    let job = daemon.wait_for(id, "done");
    assert_eq!(job["run"], 2);
    assert_eq!(daemon.output(id), counted(60));
}

/// A freezer of cgroups of version 1 keeps even what was killed.
#[test]
fn a_job_that_was_frozen_when_its_shepherd_was_killed_runs_again() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &words(&daemon.counter(5, 0.01)));
    daemon.wait_for_output(id, "4\n");
    daemon.ok(&["preempt", &id.to_string(), "--means", "stop"]);
    shepherds(&daemon.data()).into_iter().for_each(kill);
    until("its run is over", || (daemon.show(id)["lost_ms"] != 0).then_some(()));
    daemon.let_end();
    daemon.ok(&["resume", &id.to_string()]);
    assert_eq!(daemon.wait_for(id, "done")["run"], 2);
    assert_eq!(daemon.output(id), counted(5));
}

#[test]
fn what_was_written_after_a_checkpoint_is_written_once() {
    let config = json!({ "shortest_interval": 500, "mean_time_between_failures": 1000 });
    let daemon = Daemon::configured(&config, &[]);
    let script = "import os, sys, time\ni = 0\nwhile not os.path.exists(sys.argv[1]):\n    \
                  print(i, flush=True)\n    i += 1\n    time.sleep(0.02)\nprint('end')";
    let may_end = daemon.may_end();
    let id = daemon.submit(&[], &["python3", "-c", script, may_end.to_str().unwrap()]);
    let mut follower = daemon.queue(&["logs", "-f", &id.to_string()]);
    let follower = follower.stdout(std::process::Stdio::piped()).spawn().unwrap();
    until("a periodic checkpoint", || daemon.show(id)["checkpoint"].as_u64());
    let until_there_are = |lines: usize| {
        until("more output", || (daemon.output(id).lines().count() > lines).then_some(()));
    };
    until_there_are(daemon.output(id).lines().count() + 5);
    let before = daemon.output(id).lines().count();
    let victims = shepherds(&daemon.data());
    assert_eq!(victims.len(), 1);
    victims.into_iter().for_each(kill);
    until("its next run", || (daemon.job(id)["run"].as_u64() >= Some(2)).then_some(()));
    // Further than it can have come before it was killed.
    until_there_are(before + 200);
    daemon.let_end();
    let job = daemon.wait_for(id, "done");
    assert_eq!(job["preemptions"], 0);
    let output = daemon.output(id);
    let last = u32::try_from(output.lines().count() - 1).unwrap();
    assert_eq!(output, counted(last));
    let followed = follower.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(followed.stdout).unwrap(), output);
    let show = daemon.show(id);
    let lost = show["lost_ms"].as_i64().unwrap();
    assert!(lost > 0 && lost < show["ran_ms"].as_i64().unwrap(), "{show}");
}

#[test]
fn a_job_without_a_checkpoint_begins_again_and_not_for_ever() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &words(&daemon.counter(40, 0.05)));
    daemon.wait_for_output(id, "5\n");
    shepherds(&daemon.data()).into_iter().for_each(kill);
    until("it begins again", || (daemon.job(id)["run"] == 2).then_some(()));
    daemon.let_end();
    assert_eq!(daemon.wait_for(id, "done")["run"], 2);
    assert_eq!(daemon.output(id), counted(40));
    let doomed = daemon.submit(&[], &["sleep", "1000"]);
    let job = until("it is given up", || {
        shepherds(&daemon.data()).into_iter().for_each(kill);
        let job = daemon.job(doomed);
        (job["state"] == "failed").then_some(job)
    });
    assert_eq!(job["exit"], 125);
    assert!(job["note"].as_str().unwrap().contains("without a checkpoint"));
}

/// A process that works for a shepherd: that saves a job or brings it back.
fn worker_of(shepherd: i32) -> Option<i32> {
    proc::children_of(shepherd).into_iter().find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(torpor_worker::COMMAND.as_bytes())
    })
}

/// Has `daemon` do something, and the worker that does it watched. What came of that; nothing if none was
/// met before its end.
fn with_worker<T>(
    daemon: &Daemon,
    command: &[&str],
    watch: impl FnOnce(i32) -> Option<T>,
) -> Option<T> {
    let (shepherd, verb) = (shepherds(&daemon.data())[0], command[0]);
    let mut command = daemon.queue(command);
    let command = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut client = command.spawn().unwrap();
    // A client that asks for a job to go on does not wait until it does.
    let resumes = verb == "resume";
    let over = || !resumes || daemon.ok(&["list", "--state", "running", "--json"]).trim() != "[]";
    let begun = Instant::now();
    let found = loop {
        let worker = worker_of(shepherd);
        if worker.is_some() || (client.try_wait().unwrap().is_some() && over()) {
            break worker;
        }
        assert!(begun.elapsed() < PATIENCE, "there is neither a worker nor an end");
    };
    let watched = found.and_then(watch);
    // It says that the job could not give way, or that it had done so already.
    client.wait().unwrap();
    watched
}

/// Kills the worker at point `at` of its work, if there is one.
fn with_killed_worker(daemon: &Daemon, command: &[&str], at: Option<u64>) -> Option<Watched> {
    with_worker(daemon, command, |worker| watch_other(worker, at).ok())
}

/// Each of these jobs, which are over, has ended once, and nothing is left of them, nor of connections that have one of these
/// ports.
fn assert_over(daemon: &Daemon, ids: &[u64], ports: &[u16]) {
    for &id in ids {
        assert_eq!(daemon.events(id, "ended").len(), 1, "{}", daemon.show(id));
    }
    leaks::assert_none(daemon, ports);
}

/// The job goes on if the process that saves it is killed, and is brought back from the same checkpoint if the one that
/// brings it back is.
#[test]
fn a_worker_that_is_killed_costs_no_job() {
    let name = "a_worker_that_is_killed_costs_no_job: 200 kills of each";
    let kills = if long(name) { 200 } else { 4 };
    let daemon = Daemon::start(&[]);
    let stop = daemon.dir.path().join("stop");
    let script = "import hashlib, os, sys, time\n\
                  data = os.urandom(1 << 20) * 32\n\
                  before = hashlib.sha256(data).digest()\n\
                  i = 0\n\
                  while not os.path.exists(sys.argv[1]):\n    print(i, flush=True)\n    i += 1\n    time.sleep(0.01)\n\
                  print('end', hashlib.sha256(data).digest() == before)";
    let id = daemon.submit(&[], &["python3", "-c", script, stop.to_str().unwrap()]);
    let word = id.to_string();
    daemon.wait_for_output(id, "9\n");
    let preempt = ["preempt", word.as_str(), "--means", "checkpoint"];
    let resume = ["resume", word.as_str()];
    let points = until("both workers were met", || {
        let both = [&preempt[..], &resume].map(|words| with_killed_worker(&daemon, words, None));
        daemon.wait_for(id, "running");
        let points = |watched: Watched| match watched {
            Watched::Ended { stops, success: true } => stops,
            other => panic!("{other:?}"),
        };
        Some([points(both[0]?), points(both[1]?)])
    });
    let (random, mut killed) = (Random::printed(), [0, 0]);
    // Not every point that is drawn is reached: until both have been killed so often, or it is plain that one never is.
    for round in 0.. {
        if killed.iter().all(|&killed| killed >= kills) {
            println!("{killed:?} of {round} each were killed");
            break;
        }
        assert!(round < 10 * kills, "{killed:?} of {round} each were killed");
        // A part of the work is done before its worker is met.
        let [save, wake] = points.map(|points| Some(1 + random.below(points / 2)));
        let watched = with_killed_worker(&daemon, &preempt, save);
        killed[0] += u32::from(watched == Some(Watched::Killed));
        let state = until("it runs, or sleeps", || {
            let state = daemon.job(id)["state"].as_str().unwrap().to_owned();
            ["running", "preempted"].contains(&state.as_str()).then_some(state)
        });
        if state == "running" {
            daemon.ok(&preempt);
        }
        let watched = with_killed_worker(&daemon, &resume, wake);
        killed[1] += u32::from(watched == Some(Watched::Killed));
        daemon.wait_for(id, "running");
        let seen = daemon.output(id).lines().count();
        until("it goes on", || (daemon.output(id).lines().count() > seen).then_some(()));
    }
    std::fs::write(stop, "").unwrap();
    daemon.wait_for(id, "done");
    let output = daemon.output(id);
    let last = u32::try_from(output.lines().count() - 1).unwrap();
    assert_eq!(output, counted(last).replace("end", "end True"));
    assert_over(&daemon, &[id], &[]);
}

/// The newest checkpoint of a job that is complete, on stable storage or not.
fn complete(daemon: &Daemon, id: u64) -> Option<u64> {
    let entries = std::fs::read_dir(daemon.data().join(format!("jobs/{id}"))).unwrap();
    let complete = entries.flatten().filter(|entry| entry.path().join("record.json").exists());
    let number = |name: &str| name.strip_prefix("checkpoint-")?.parse().ok();
    complete.filter_map(|entry| number(entry.file_name().to_str()?)).max()
}

/// Its images are complete then. The whole of the job goes on, in its run; a moment later a part of it may have ended, and the
/// whole of it goes on from there.
#[test]
fn a_worker_that_is_killed_while_it_ends_a_job_costs_none() {
    let daemon = Daemon::start(&[]);
    // It would end too early if only the one that counts did.
    let script =
        "(i=0; until [ -e $0 ]; do echo $i; i=$((i+1)); sleep 0.02; done) & wait; echo end";
    let may_end = daemon.may_end();
    let id = daemon.submit(&[], &["sh", "-c", script, may_end.to_str().unwrap()]);
    let word = id.to_string();
    // Nearer and nearer to the end of its work, and then after that.
    let (mut killed, mut unharmed, mut more) = (0, 0, 1);
    for round in 0.. {
        assert!(round < 100, "killed {killed} times, and its end was never met");
        let seen = daemon.output(id).lines().count();
        until("it goes on", || (daemon.output(id).lines().count() > seen).then_some(()));
        let (before, run) = (complete(&daemon, id), daemon.job(id)["run"].clone());
        let is_saved = || complete(&daemon, id) > before;
        let preempt = ["preempt", word.as_str(), "--means", "checkpoint"];
        let watch = |worker| watch_since(worker, is_saved, more).ok();
        let watched = with_worker(&daemon, &preempt, watch);
        let job = until("it runs, or sleeps", || {
            let job = daemon.job(id);
            ["running", "preempted"].contains(&job["state"].as_str()?).then_some(job)
        });
        let sleeps = job["state"] == "preempted";
        if matches!(watched, Some(Watched::Killed)) {
            assert!(
                if sleeps { complete(&daemon, id) > before } else { job["run"] == run },
                "{job}"
            );
        }
        if sleeps {
            daemon.ok(&["resume", &word]);
            daemon.wait_for(id, "running");
        }
        unharmed += u32::from(!sleeps);
        match watched {
            Some(Watched::Ended { .. }) => break,
            Some(_) => (killed, more) = (killed + 1, more * 2),
            // It was over before it was met.
            None => {}
        }
    }
    assert!(killed > 2 && unharmed > 0, "killed {killed} times, {unharmed} without harm");
    daemon.let_end();
    daemon.wait_for(id, "done");
    let last = u32::try_from(daemon.output(id).lines().count() - 1).unwrap();
    assert_eq!(daemon.output(id), counted(last));
    assert_over(&daemon, &[id], &[]);
}

/// Waits until the jobs have written some more lines, all together, or all have ended.
fn work_goes_on(daemon: &Daemon, lines: usize) {
    let list =
        || -> serde_json::Value { serde_json::from_str(&daemon.ok(&["list", "--json"])).unwrap() };
    let all = list();
    let runs = |job: &&serde_json::Value| job["exit"].is_null();
    let ids = |all: &serde_json::Value| -> Vec<u64> {
        let jobs = all.as_array().unwrap().iter().filter(runs);
        jobs.map(|job| job["id"].as_u64().unwrap()).collect()
    };
    let watched = ids(&all);
    let written = || -> usize { watched.iter().map(|&id| daemon.output(id).lines().count()).sum() };
    let before = written();
    until("the jobs go on, or end", || {
        (written() >= before + lines || ids(&list()).is_empty()).then_some(())
    });
}

/// Whoever cleans up may have taken it away.
#[test]
fn a_socket_that_is_gone_is_made_again() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir.path().join("socket");
    let answers = || daemon.queue(&["list"]).output().unwrap().status.success().then_some(());
    std::fs::remove_file(&socket).unwrap();
    until("it answers", answers);
    // Another daemon's, which is gone. In one step: the daemon may make it again at any time.
    let other = daemon.dir.path().join("other");
    drop(std::os::unix::net::UnixListener::bind(&other).unwrap());
    std::fs::rename(other, &socket).unwrap();
    until("it answers", answers);
}

/// Where no service manager has made the directory.
#[test]
fn the_directory_of_the_default_socket_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs none /run && exec \"$0\" queue serve --data \"$1\"";
    let mut serve = std::process::Command::new("unshare");
    serve.args(["--mount", "sh", "-c", script]).arg(common::torpor()).arg(dir.path());
    let mut daemon = serve.spawn().unwrap();
    let socket = format!("/proc/{}/root/run/torpor/queue.sock", daemon.id());
    let answers = || std::os::unix::net::UnixStream::connect(&socket).ok();
    let answered = std::panic::catch_unwind(|| drop(until("it listens", answers)));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    answered.unwrap();
}

/// What a job has open may have been moved away while it slept.
#[test]
fn a_checkpoint_that_cannot_be_brought_back_is_kept_until_it_can() {
    let mut daemon = Daemon::start(&[]);
    let [log, away, end] = ["log", "away", "end"].map(|name| daemon.dir.path().join(name));
    let script = "exec 3>>$0; for word in begun end; do echo $word >&3; echo $word; \
                  until [ -e $1 ]; do sleep 0.05; done; done";
    let [kept, go] = [&log, &end].map(|path| path.to_str().unwrap());
    let id = daemon.submit(&[], &["sh", "-c", script, kept, go]);
    let word = id.to_string();
    daemon.wait_for_output(id, "begun");
    daemon.ok(&["preempt", &word]);
    std::fs::rename(&log, &away).unwrap();
    daemon.ok(&["resume", &word]);
    let held = |daemon: &Daemon| {
        let job = daemon.show(id);
        // A daemon that has just begun has to find out first whether somebody keeps the job.
        job["why_text"].as_str().filter(|_| job["held"] == true).map(str::to_owned)
    };
    let why = until("it is held", || held(&daemon));
    assert!(why.contains("could not be brought back") && why.contains(kept), "{why}");
    // The next daemon knows as much.
    daemon.kill();
    daemon.launch();
    assert_eq!(until("it is held", || held(&daemon)), why);
    assert_eq!(daemon.job(id)["state"], "preempted");
    std::fs::rename(&away, &log).unwrap();
    std::fs::write(&end, "").unwrap();
    daemon.ok(&["resume", &word]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "begun\nend\n");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "begun\nend\n");
}

/// A file system of its own, until it is dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    fn of(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(dir.path());
        assert!(mount.status().unwrap().success());
        Self(dir)
    }

    fn filler(&self) -> std::path::PathBuf {
        self.0.path().join("filler")
    }

    /// Takes all that is free.
    fn fill(&self) {
        let mut filler = std::fs::File::create(self.filler()).unwrap();
        while std::io::Write::write_all(&mut filler, &[0; 64 << 10]).is_ok() {}
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// A daemon whose jobs lie on a disk, and where.
fn daemon_on(disk: &Disk, config: &Value) -> (Daemon, std::path::PathBuf) {
    let jobs = disk.0.path().join("jobs");
    std::fs::create_dir(&jobs).unwrap();
    let mut daemon = Daemon::configured(config, &[]);
    daemon.kill();
    std::fs::remove_dir(daemon.data().join("jobs")).unwrap();
    std::os::unix::fs::symlink(&jobs, daemon.data().join("jobs")).unwrap();
    daemon.launch();
    (daemon, jobs)
}

/// A daemon whose state is on a disk that is soon full.
fn on_a_small_disk() -> (Disk, Daemon) {
    let disk = Disk::of("24m");
    let mut daemon = Daemon::start(&[]);
    daemon.kill();
    std::fs::remove_dir_all(daemon.data()).unwrap();
    std::os::unix::fs::symlink(disk.0.path(), daemon.data()).unwrap();
    daemon.launch();
    (disk, daemon)
}

/// What is acknowledged is on disk: what cannot be written there is not done, and fails.
#[test]
fn nothing_is_acknowledged_that_cannot_be_kept() {
    let (disk, mut daemon) = on_a_small_disk();
    let script = "echo begun; exec sleep 1000";
    let id = daemon.submit(&["--retries", "3"], &["sh", "-c", script]);
    let over = daemon.submit(&[], &["true"]);
    daemon.wait_for(over, "done");
    daemon.wait_for_output(id, "begun");
    daemon.wait_for(id, "running");
    disk.fill();
    let (id, over) = (id.to_string(), over.to_string());
    let asked: [&[&str]; 8] = [
        &["cancel", &id],
        &["preempt", &id],
        &["preempt", "--means", "stop", &id],
        &["resume", &id],
        &["forget", &over],
        &["drain"],
        &["quota", "owner:x", "--slots", "3"],
        &["submit", "--", "true"],
    ];
    for words in asked {
        let output = daemon.queue(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("full"), "{words:?}: {output:?}");
    }
    daemon.kill();
    disk.free();
    daemon.launch();
    daemon.wait_for(id.parse().unwrap(), "running");
    let job = daemon.show(id.parse().unwrap());
    assert_eq!((&job["run"], &job["held"]), (&json!(1), &json!(false)), "{job}");
    let machine: serde_json::Value = serde_json::from_str(&daemon.ok(&["top", "--json"])).unwrap();
    assert_eq!(machine["draining"], false, "{machine}");
    let quota = daemon.queue(&["quota", "owner:x"]).output().unwrap();
    assert!(String::from_utf8_lossy(&quota.stderr).contains("has no quota"), "{quota:?}");
    daemon.ok(&["cancel", &id]);
    daemon.wait_for(id.parse().unwrap(), "cancelled");
}

/// Where little can be written, and not all, nothing is done of which it is said that it has failed.
#[test]
fn what_is_not_acknowledged_is_not_done() {
    let (disk, daemon) = on_a_small_disk();
    let go = daemon.dir.path().join("go");
    let script =
        "trap 'echo told' TERM; echo begun; until [ -e $0 ]; do sleep 0.02; done; echo end";
    let id = daemon.submit(&[], &["sh", "-c", script, go.to_str().unwrap()]);
    daemon.wait_for_output(id, "begun");
    daemon.wait_for(id, "running");
    disk.fill();
    let filler = std::fs::File::options().write(true).open(disk.filler()).unwrap();
    filler.set_len((filler.metadata().unwrap().len() & !4095) - (12 << 10)).unwrap();
    let output = daemon.queue(&["cancel", &id.to_string()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("full"), "{output:?}");
    disk.free();
    std::fs::write(go, "").unwrap();
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "begun\nend\n");
}

/// Output leaves room for how the job ends, and a job whose end was heard of does not begin again.
#[test]
fn a_job_that_fills_a_disk_ends_once_when_it_is_told_to() {
    let disk = Disk::of("24m");
    let (daemon, jobs) = daemon_on(&disk, &json!({ "default_disk": null }));
    let script = "head -c 40000000 /dev/zero; echo done >&2";
    let mut client = daemon.queue(&["submit", "--wait", "--", "sh", "-c", script]);
    let mut client = client.stdout(std::process::Stdio::null()).spawn().unwrap();
    let out = jobs.join("1/out");
    until("the disk is full", || (std::fs::metadata(&out).ok()?.len() > 20 << 20).then_some(()));
    // The rest of it as well.
    disk.fill();
    let pid = Pid::from_child(&client);
    kill_process(pid, Signal::TERM).unwrap();
    let status = client.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15), "{status}");
    let job = daemon.job(1);
    assert_eq!((&job["exit"], &job["run"]), (&json!(143), &json!(1)), "{job}");
}

/// It may last for a while, and is no fault of theirs.
#[test]
fn a_full_disk_costs_no_job_that_has_not_begun() {
    let disk = Disk::of("24m");
    let (daemon, _) = daemon_on(&disk, &json!({ "slots": 1 }));
    let go = daemon.dir.path().join("go");
    let wait = "until [ -e $0 ]; do sleep 0.05; done";
    let first = daemon.submit(&[], &["sh", "-c", wait, go.to_str().unwrap()]);
    daemon.wait_for(first, "running");
    let waiting = [(); 3].map(|()| daemon.submit(&[], &["echo", "well"]));
    disk.fill();
    std::fs::write(go, "").unwrap();
    until("it was tried", || {
        let why = daemon.show(waiting[0])["why_text"].to_string();
        (why.contains("could not begin a job") && why.contains("No space left")).then_some(())
    });
    assert!(waiting.iter().all(|&id| daemon.job(id)["state"] == "queued"), "{:?}", daemon.jobs());
    disk.free();
    for id in waiting {
        daemon.wait_for(id, "done");
        assert_eq!(daemon.output(id), "well\n");
    }
}

/// What it may write unless somebody says otherwise leaves room for others, and what it was given counts for nothing.
#[test]
fn a_job_may_write_a_part_of_what_is_free() {
    let disk = Disk::of("256m");
    let (daemon, _) = daemon_on(&disk, &json!({}));
    let input = tempfile::tempdir().unwrap();
    std::fs::write(input.path().join("given"), vec![1; 100 << 20]).unwrap();
    let options = ["--input", input.path().to_str().unwrap()];
    let script = "while head -c 1M /dev/zero >>filler; do sleep 0.02; done; exit 3";
    let id = daemon.submit(&options, &["bash", "-c", script]);
    let job = daemon.wait_for(id, "failed");
    let note = job["note"].as_str().unwrap();
    assert!(note.contains("written more than a job may that names no --disk"), "{note}");
    until("its files are gone", || {
        (!daemon.data().join(format!("jobs/{id}/work")).exists()).then_some(())
    });
    let well = daemon.submit(&options, &["bash", "-c", "head -c 1M /dev/zero >small; sleep 1"]);
    daemon.wait_for(well, "done");
}

/// A job that cannot be saved for want of space goes on, and what was saved comes to the disk when there
/// is some again.
#[test]
fn a_disk_that_is_full_at_random_moments_costs_no_job() {
    let name = "a_disk_that_is_full_at_random_moments_costs_no_job: 200 rounds";
    let rounds = if long(name) { 200 } else { 4 };
    let disk = Disk::of("64m");
    let (daemon, _) = daemon_on(&disk, &json!({ "default_disk": null }));
    let stop = daemon.dir.path().join("stop");
    let script = "import hashlib, os, sys, time\ndata = os.urandom(16 << 20)\n\
                  before = hashlib.sha256(data).digest()\ni = 0\n\
                  while not os.path.exists(sys.argv[1]):\n    print(i, flush=True)\n    i += 1\n    time.sleep(0.01)\n\
                  print('end', hashlib.sha256(data).digest() == before)";
    let id = daemon.submit(&[], &["python3", "-c", script, stop.to_str().unwrap()]);
    let word = id.to_string();
    daemon.wait_for_output(id, "9\n");
    let preempt = ["preempt", word.as_str(), "--means", "checkpoint"];
    let points = until("its worker was met", || {
        let watched = with_killed_worker(&daemon, &preempt, None);
        daemon.ok(&["resume", &word]);
        daemon.wait_for(id, "running");
        match watched? {
            Watched::Ended { stops, success: true } => Some(stops),
            other => panic!("{other:?}"),
        }
    });
    let (random, mut filled, mut refused) = (Random::printed(), 0, 0);
    // Until the disk was full often enough while a worker wrote, and one of them could not go on for it.
    for round in 0.. {
        if filled >= rounds && refused > 0 {
            break;
        }
        assert!(round < 10 * rounds, "in {round} rounds {filled} times full, {refused} refused");
        let before = daemon.show(id)["checkpoint"].as_u64();
        // A part of the work is done before its worker is met.
        let at = 1 + random.below(points / 2);
        // It says that the job goes on, or that it has given way already.
        let met = with_worker(&daemon, &preempt, |pid| while_at(pid, at, || disk.fill()).ok());
        let is_full = met == Some(true);
        filled += u64::from(is_full);
        let state = until("it runs, or sleeps", || {
            let state = daemon.job(id)["state"].as_str().unwrap().to_owned();
            ["running", "preempted"].contains(&state.as_str()).then_some(state)
        });
        if is_full {
            disk.free();
        }
        refused += u64::from(state == "running");
        if state == "running" {
            daemon.ok(&preempt);
        }
        until("it is durable", || (daemon.show(id)["checkpoint"].as_u64() > before).then_some(()));
        daemon.ok(&["resume", &word]);
        daemon.wait_for(id, "running");
        let seen = daemon.output(id).lines().count();
        until("it goes on", || (daemon.output(id).lines().count() > seen).then_some(()));
    }
    std::fs::write(stop, "").unwrap();
    daemon.wait_for(id, "done");
    let output = daemon.output(id);
    let last = u32::try_from(output.lines().count() - 1).unwrap();
    assert_eq!(output, counted(last).replace("end", "end True"));
    assert_over(&daemon, &[id], &[]);
}

#[test]
fn random_failures_lose_nothing() {
    let failures = if long("random_failures_lose_nothing: 200 failures") { 200 } else { 4 };
    let config = json!({ "shortest_interval": 300, "mean_time_between_failures": 500 });
    let mut daemon = Daemon::configured(&config, &["--slots", "2"]);
    let random = Random::printed();
    // Its connection is locked whenever it sleeps.
    let (connected, listener, _peer) = connected(&daemon);
    let group = daemon.data().join(format!("jobs/{connected}"));
    assert!(!leaks::groups(&group).is_empty(), "groups have other names");
    let (mut ids, mut urgent, mut failed) = (Vec::new(), Vec::new(), 0);
    // In some rounds nobody fails, or there is no shepherd to do so.
    for round in 0.. {
        if failed == failures {
            println!("{failed} failures in {round} rounds");
            break;
        }
        assert!(round < 10 * failures, "{failed} failures in {round} rounds");
        let last = 20 + u32::try_from(random.below(20)).unwrap();
        ids.push((daemon.submit(&["--class", "batch"], &words(&counter(last, 0.03))), last));
        work_goes_on(&daemon, random.place(40));
        match random.below(3) {
            0 => {
                daemon.kill();
                daemon.launch();
                failed += 1;
            }
            1 => {
                let victims = shepherds(&daemon.data());
                // One failure for each job at most: more without a checkpoint are given up.
                if let Some(&victim) = victims.get(round % victims.len().max(1)) {
                    kill(victim);
                    failed += 1;
                }
            }
            _ => {
                urgent.push(daemon.submit(&["--class", "urgent"], &["true"]));
                daemon.wait_for(urgent[urgent.len() - 1], "done");
            }
        }
    }
    let mut given_up = 0;
    for &(id, last) in &ids {
        let job = until("it ends", || {
            let job = daemon.job(id);
            (!job["exit"].is_null()).then_some(job)
        });
        if job["state"] == "done" {
            assert_eq!(daemon.output(id), counted(last), "{}", daemon.show(id));
        } else {
            // Given up, with the reason.
            assert!(job["note"].as_str().unwrap().contains("without a checkpoint"), "{job}");
            given_up += 1;
        }
    }
    // A failure takes two jobs at most, and each of these was lost four times.
    assert!(2 * given_up <= failed, "{failed} failures, {given_up} jobs given up");
    // It may have been given up.
    daemon.queue(&["cancel", &connected.to_string()]).output().unwrap();
    until("it ends", || (!daemon.job(connected)["exit"].is_null()).then_some(()));
    let all: Vec<u64> =
        ids.into_iter().map(|(id, _)| id).chain(urgent).chain([connected]).collect();
    assert_over(&daemon, &all, &[listener.local_addr().unwrap().port()]);
}
