//! Jobs that behave badly are contained, named and cleaned up.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{Daemon, ask, leaks, until};

#[test]
fn a_job_that_forks_without_end_is_held_and_cleared() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(
        &["--pids", "60", "--time", "5"],
        &["bash", "-c", "f() { f | f & }; f; sleep 1000"],
    );
    let job = daemon.wait_for(id, "failed");
    let note = job["note"].as_str().unwrap();
    let is_held = note.contains("it had as many processes and threads as it may (--pids)");
    assert!(is_held && note.contains("bash"), "{note}");
    until("its shepherd ends", || common::shepherds(&daemon.data()).is_empty().then_some(()));
    let well = daemon.submit(&[], &["true"]);
    daemon.wait_for(well, "done");
}

#[test]
fn a_fork_bomb_without_a_limit_of_its_own_is_held_and_named() {
    let daemon = Daemon::configured(&serde_json::json!({ "pids": 40 }), &[]);
    let bomb = ["bash", "-c", "f() { f | f & }; f; sleep 1000"];
    let id = daemon.submit(&["--time", "5"], &bomb);
    let job = daemon.wait_for(id, "failed");
    let note = job["note"].as_str().unwrap();
    assert!(
        note.contains("as many processes and threads as a job may that names no --pids"),
        "{note}"
    );
    assert_eq!(daemon.show(id)["limits"]["usual_pids"], 40);
    // A job that needs more says so.
    let many =
        "for i in $(seq 60); do sleep 1000 & done; [ $(jobs -p | wc -l) = 60 ] && kill $(jobs -p)";
    let id = daemon.submit(&["--pids", "100"], &["bash", "-c", many]);
    let job = daemon.wait_for(id, "done");
    assert!(!job["note"].as_str().unwrap_or_default().contains("--pids"), "{job}");
}

#[test]
fn a_job_that_fills_the_disk_is_ended_and_named() {
    let daemon = Daemon::start(&[]);
    let input = tempfile::tempdir().unwrap();
    let options = ["--disk", "8M", "--input", input.path().to_str().unwrap()];
    // By its output, and by files of its own.
    for to in ["", ">>filler"] {
        let script = format!("while :; do head -c 1M /dev/zero {to}; sleep 0.02; done");
        let id = daemon.submit(&options, &["bash", "-c", &script]);
        let job = daemon.wait_for(id, "failed");
        assert!(job["note"].as_str().unwrap().contains("written more than it may"), "{job}");
        assert_eq!(job["exit"], 137);
    }
    until("their shepherds end", || common::shepherds(&daemon.data()).is_empty().then_some(()));
    let well = daemon.submit(&options, &["bash", "-c", "head -c 1M /dev/zero >small"]);
    daemon.wait_for(well, "done");
}

/// So many that no path is as long as their names.
#[test]
fn a_job_that_makes_directories_in_directories_hides_and_leaves_nothing() {
    let daemon = Daemon::start(&[]);
    let input = tempfile::tempdir().unwrap();
    let input = input.path().to_str().unwrap();
    let deep = "import os, time\nfor i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n";
    let large = format!("{deep}open('large', 'wb').write(bytes(64 << 20))\ntime.sleep(1000)");
    let hides = daemon.submit(&["--disk", "48M", "--input", input], &["python3", "-c", &large]);
    let leaves = daemon.submit(&["--input", input], &["python3", "-c", deep]);
    let job = daemon.wait_for(hides, "failed");
    assert!(job["note"].as_str().unwrap().contains("written more than it may (--disk)"), "{job}");
    daemon.wait_for(leaves, "done");
    for id in [hides, leaves] {
        let work = daemon.data().join(format!("jobs/{id}/work"));
        until("its directory is gone", || (!work.exists()).then_some(()));
    }
}

#[test]
fn a_job_without_a_limit_of_its_own_does_not_fill_the_disk() {
    let daemon = Daemon::configured(&serde_json::json!({ "default_disk": 8 << 20 }), &[]);
    let script = "while :; do head -c 1M /dev/zero; sleep 0.02; done";
    let id = daemon.submit(&[], &["bash", "-c", script]);
    let job = daemon.wait_for(id, "failed");
    let note = job["note"].as_str().unwrap();
    assert!(note.contains("written more than a job may that names no --disk"), "{note}");
    assert_eq!(daemon.show(id)["limits"]["usual_disk"], 8 << 20);
    // A job that needs more says so.
    let id = daemon.submit(&["--disk", "64M"], &["bash", "-c", "head -c 16M /dev/zero; sleep 1"]);
    daemon.wait_for(id, "done");
}

/// Neither what jobs were given, nor what they have written; nor can anybody hold a lock that says that a job lives.
#[test]
fn others_can_read_nothing_of_what_a_daemon_keeps() {
    use std::os::unix::process::CommandExt;
    let daemon = Daemon::start(&[]);
    let [asleep, runs] = [(), ()].map(|()| {
        let id = daemon.submit(&[], &["sh", "-c", "echo begun; exec sleep 1000"]);
        daemon.wait_for_output(id, "begun");
        id
    });
    daemon.ok(&["preempt", &asleep.to_string()]);
    daemon.wait_for(runs, "running");
    let path = format!("/v1/jobs/{runs}/stdin?at=0&end=1");
    assert_eq!(ask(&daemon, "PUT", &path, "", "secret").0, 200);
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), open).unwrap();
    let found = |uid: u32| {
        let mut find = std::process::Command::new("find");
        find.arg(daemon.data()).args(["-type", "f", "-readable"]).uid(uid).gid(uid);
        String::from_utf8(find.output().unwrap().stdout).unwrap()
    };
    let own = found(0);
    assert!(["queue.db", "run-1/lock", "spec.json"].iter().all(|name| own.contains(name)), "{own}");
    assert_eq!(found(65534), "");
    // Nobody can list a job's directory, but whoever knows a name there can open it.
    let mut find = std::process::Command::new("find");
    find.arg(daemon.data().join("jobs")).args(["-mindepth", "2", "-maxdepth", "2"]);
    find.args(["-type", "f", "-perm", "/044"]);
    assert_eq!(String::from_utf8(find.output().unwrap().stdout).unwrap(), "");
}

/// Its jobs would all fail.
#[test]
fn only_root_may_serve() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let mut serve = std::process::Command::new("unshare");
    serve.arg("--user").arg(common::torpor()).args(["queue", "serve", "--data"]).arg(&data);
    let output = serve.output().unwrap();
    assert!(!output.status.success() && !data.exists());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("must be root"), "{text}");
}

/// Each run has a directory, and the disk would have no more of these for others.
#[test]
fn a_job_that_fails_again_and_again_leaves_little() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&["--retries", "5"], &["false"]);
    daemon.wait_for(id, "failed");
    assert_eq!(daemon.show(id)["failures"], 5);
    let entries = std::fs::read_dir(daemon.data().join(format!("jobs/{id}"))).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut runs: Vec<String> = names.filter(|name| name.starts_with("run-")).collect();
    runs.sort();
    assert_eq!(runs, ["run-5", "run-6"]);
}

/// Its daemon ignores some, as in the background of a script.
#[test]
fn a_job_ignores_and_blocks_no_signals_by_itself() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

#[test]
fn a_job_that_ignores_signals_is_killed() {
    let config = serde_json::json!({ "grace": 300 });
    let daemon = Daemon::configured(&config, &[]);
    let script = "trap '' TERM INT HUP; echo ready; while :; do sleep 0.05; done";
    let id = daemon.submit(&[], &["bash", "-c", script]);
    daemon.wait_for_output(id, "ready");
    daemon.ok(&["cancel", &id.to_string()]);
    let job = daemon.wait_for(id, "cancelled");
    assert_eq!(job["exit"], 137);
    let shown = daemon.ok(&["show", &id.to_string()]);
    assert!(shown.contains("it had not ended 300 ms after it was told to: killed"), "{shown}");
}

#[test]
fn what_detaches_is_named_and_ends_with_the_job() {
    let daemon = Daemon::start(&[]);
    let script = "setsid -f sleep 7321; (setsid nohup sleep 7321 >/dev/null 2>&1 &); \
                  until [ $(pgrep -fc '^sleep 7321$') = 2 ]; do sleep 0.05; done; exit 0";
    let id = daemon.submit(&[], &["bash", "-c", script]);
    let job = daemon.wait_for(id, "done");
    assert!(job["note"].as_str().unwrap().contains("sleep"), "{job}");
    let left = std::process::Command::new("pgrep").args(["-f", "^sleep 7321$"]).output().unwrap();
    assert!(left.stdout.is_empty());
}

#[test]
fn what_detaches_is_a_part_of_the_checkpoint() {
    let daemon = Daemon::start(&[]);
    let ended = daemon.dir.path().join("ended");
    let [ended, may_end] = [&ended, &daemon.may_end()].map(|path| path.display().to_string());
    // Its first process waits for the one that has detached, and that one until it may end.
    let script = "(setsid bash -c 'for i in 1 2 3 4 5 6 7 8; do echo apart $i; sleep 0.2; done; \
                  until [ -e $0 ]; do sleep 0.05; done; echo >$1' $0 $1 &) ; \
                  until [ -e $1 ]; do sleep 0.05; done; echo end";
    let id = daemon.submit(&[], &["bash", "-c", script, &may_end, &ended]);
    daemon.wait_for_output(id, "apart 2");
    daemon.ok(&["preempt", &id.to_string()]);
    daemon.let_end();
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
    let expected: String = (1..=8).map(|i| format!("apart {i}\n")).collect();
    assert_eq!(daemon.output(id), format!("{expected}end\n"));
}

#[test]
fn a_job_out_of_memory_says_so() {
    let daemon = Daemon::start(&[]);
    let script = "x = bytearray(400 << 20)\nprint('not reached')";
    let id = daemon.submit(&["--memory", "64M"], &["python3", "-c", script]);
    let job = daemon.wait_for(id, "failed");
    assert_eq!(job["exit"], 137);
    assert!(job["note"].as_str().unwrap().contains("out of its memory"), "{job}");
}

#[test]
fn output_may_be_opened_anew_by_its_name() {
    let daemon = Daemon::start(&[]);
    let script =
        "echo one; echo two >/dev/stdout; echo three >>/proc/self/fd/1; echo e >/dev/stderr";
    let output = daemon.queue(&["submit", "--wait", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "one\ntwo\nthree\n");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "e\n");
}

/// A file system of 6 MiB, and of a thousand files.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Self {
        let disk = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=6m,nr_inodes=1000", "none"])
            .arg(disk.path())
            .status()
            .unwrap();
        assert!(mounted.success());
        std::fs::create_dir(disk.path().join("jobs")).unwrap();
        Self(disk)
    }

    /// A daemon whose jobs' files are there.
    fn daemon(&self) -> Daemon {
        self.daemon_with(&serde_json::json!({ "default_disk": null }))
    }

    /// The same with this configuration.
    fn daemon_with(&self, config: &serde_json::Value) -> Daemon {
        let mut daemon = Daemon::configured(config, &[]);
        daemon.kill();
        let link = daemon.data().join("jobs");
        std::fs::remove_dir(&link).unwrap();
        std::os::unix::fs::symlink(self.0.path().join("jobs"), &link).unwrap();
        daemon.launch();
        daemon
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn input_fills_no_disk() {
    let disk = SmallDisk::new();
    let daemon = disk.daemon();
    let part = "x".repeat(1 << 20);
    let put = |id: u64, at: usize, part: &str| {
        ask(&daemon, "PUT", &format!("/v1/jobs/{id}/stdin?at={at}"), "", part)
    };
    let id = daemon.submit(&["--disk", "1M"], &["sleep", "1000"]);
    assert_eq!(put(id, 0, &part).0, 200);
    let (status, said) = put(id, 1 << 20, "x");
    assert!(status == 413 && said.contains("--disk"), "{status} {said}");
    // Two at a time may run where there are two processors.
    daemon.ok(&["cancel", &id.to_string()]);
    let id = daemon.submit(&[], &["sleep", "1000"]);
    let refused =
        (0..6).map(|number| put(id, number << 20, &part)).find(|(status, _)| *status != 200);
    let (status, said) = refused.unwrap();
    assert!(status == 507 && said.contains("disk is full"), "{status} {said}");
    // What others need stays.
    let other = daemon.submit(&[], &["echo", "well"]);
    daemon.wait_for(other, "done");
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
}

/// How much a job may have says whoever submits it.
#[test]
fn a_job_that_may_write_more_than_there_is_does_not_keep_the_disk_full() {
    let disk = SmallDisk::new();
    let daemon = disk.daemon_with(&serde_json::json!({}));
    let input = tempfile::tempdir().unwrap();
    let input = input.path().to_str().unwrap();
    // What is lost of it makes no difference.
    let options = ["--disk", "1G", "--input", input, "--artefact", "nowhere"];
    // By what is in files, and by files in which there is nothing.
    for script in ["head -c 100M /dev/zero >filler", "for i in $(seq 2000); do touch $i; done"] {
        let id = daemon.submit(&options, &["bash", "-c", &format!("{script}; sleep 1000")]);
        let job = daemon.wait_for(id, "failed");
        let note = job["note"].as_str().unwrap_or_default();
        assert!(note.contains("written more than it may (--disk)"), "{script}: {job}");
        let work = disk.0.path().join(format!("jobs/{id}/work"));
        until("its files are gone", || (!work.exists()).then_some(()));
        let other = daemon.submit(&[], &["echo", "well"]);
        daemon.wait_for(other, "done");
    }
}

/// Neither does that of a job that reads none, nor of one that is over: nobody looks how much they have.
#[test]
fn input_that_nobody_reads_takes_little_of_the_disk() {
    use std::os::unix::fs::MetadataExt;
    const PART: u64 = 4 << 20;
    let daemon = Daemon::start(&[]);
    let part = "x".repeat(4 << 20);
    // A machine of the pool may say that it has taken it.
    let put = |id: u64, number: u64| {
        let path = format!("/v1/jobs/{id}/stdin?at={}&taken=1", number * PART);
        ask(&daemon, "PUT", &path, "", &part)
    };
    let reads_none = daemon.submit(&[], &["sleep", "1000"]);
    let refused = (0..10).map(|number| put(reads_none, number)).find(|(status, _)| *status != 200);
    let (status, said) = refused.expect("all of it was kept");
    assert!(status == 429 && said.contains("has not read"), "{status} {said}");
    daemon.ok(&["cancel", &reads_none.to_string()]);
    daemon.wait_for(reads_none, "cancelled");
    let over = daemon.submit(&[], &["true"]);
    daemon.wait_for(over, "done");
    for number in 0..10 {
        assert_eq!(put(over, number).0, 200);
    }
    let kept = daemon.data().join(format!("jobs/{over}/in")).metadata().unwrap();
    assert!(kept.len() == 10 * PART && kept.blocks() * 512 < PART, "{kept:?}");
}

/// What is copied is as large as whoever submits a job likes.
#[test]
fn a_copy_of_input_fills_no_disk() {
    let disk = SmallDisk::new();
    let daemon = disk.daemon();
    let input = tempfile::tempdir().unwrap();
    for number in 0..160 {
        std::fs::write(input.path().join(number.to_string()), vec![1; 64 << 10]).unwrap();
    }
    let id = daemon.submit(&["--input", input.path().to_str().unwrap()], &["true"]);
    let job = daemon.wait_for(id, "failed");
    let note = job["note"].as_str().unwrap();
    assert!(note.contains("the disk is full, but for what the queue needs itself"), "{note}");
    // What others need stays.
    let other = daemon.submit(&[], &["echo", "well"]);
    daemon.wait_for(other, "done");
}

#[test]
fn a_full_disk_holds_a_job_up_and_loses_nothing() {
    let disk = SmallDisk::new();
    let filler = disk.0.path().join("filler");
    std::fs::write(&filler, vec![0; 3 << 20]).unwrap();
    let jobs = disk.0.path().join("jobs");
    let daemon = disk.daemon();
    let script = "import sys\nfor i in range(60000):\n    sys.stdout.write('%060d\\n' % i)";
    let id = daemon.submit(&[], &["python3", "-c", script]);
    until("the disk is full", || {
        (std::fs::metadata(jobs.join(format!("{id}/out"))).map_or(0, |m| m.len()) > 2_500_000)
            .then_some(())
    });
    assert_eq!(daemon.job(id)["state"], "running");
    std::fs::remove_file(filler).unwrap();
    daemon.wait_for(id, "done");
    let expected: String = (0..60000).map(|i| format!("{i:060}\n")).collect();
    assert!(daemon.output(id) == expected);
}

#[test]
fn a_job_that_goes_to_another_cgroup_gives_way_and_ends_all_the_same() {
    let daemon = Daemon::start(&[]);
    // The whole tree goes to the topmost cgroups. Where there is no group the name would become
    // a file, which is taken for a sign of the second version.
    let script = "for c in /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs; do \
                  [ -e $c ] && echo $$ >$c; done 2>/dev/null; (while :; do echo apart; sleep 0.02; done) & \
                  for i in $(seq 40); do echo line $i; sleep 0.05; done; \
                  until [ -e $0 ]; do sleep 0.05; done; kill $!; echo end";
    let may_end = daemon.may_end();
    let id = daemon.submit(&[], &["bash", "-c", script, may_end.to_str().unwrap()]);
    daemon.wait_for_output(id, "line 3");
    for means in ["stop", "checkpoint"] {
        daemon.ok(&["preempt", &id.to_string(), "--means", means]);
        let shown = daemon.ok(&["show", &id.to_string()]);
        assert!(shown.contains("left its cgroup and was brought back: bash"), "{shown}");
        // What it had written before may still be on its way.
        until(&format!("it stands still by {means}"), || {
            let before = daemon.output(id);
            std::thread::sleep(std::time::Duration::from_millis(200));
            (daemon.output(id) == before).then_some(())
        });
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "running");
    }
    daemon.let_end();
    daemon.wait_for(id, "done");
    let output = daemon.output(id);
    let lines: Vec<&str> = output.lines().filter(|line| *line != "apart").collect();
    let expected: Vec<String> = (1..=40).map(|i| format!("line {i}")).collect();
    assert_eq!(lines[..40], expected);
    assert_eq!(lines[40..], ["end"]);
}

/// Only a job of root can.
#[test]
fn groups_that_a_job_has_made_in_its_own_go_with_it() {
    let daemon = Daemon::start(&[]);
    let script = "own=$(grep -m 1 -o '/torpor-queue/.*' /proc/self/cgroup); \
                  for group in /sys/fs/cgroup/*$own /sys/fs/cgroup$own; do \
                  [ -e $group/cgroup.procs ] && mkdir -p $group/made/more && echo made; done; true";
    let id = daemon.submit(&[], &["sh", "-c", script]);
    daemon.wait_for(id, "done");
    assert!(daemon.output(id).starts_with("made\n"), "{}", daemon.output(id));
    leaks::assert_none(&daemon, &[]);
}
