//! The machine's disk fails at random points of the work, with all that the queue has on it: nothing is taken in that cannot be
//! kept, and when the machine is started anew each job that was acknowledged ends once with the right result.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{
    Daemon, PATIENCE, ask, counted, end_shepherds, leaks, long, shepherds, until, work_of,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use torpor_tests::random::Random;

/// How a disk fails.
#[derive(Debug, Clone, Copy)]
enum Failure {
    /// Nothing can be read or written any more (EIO).
    Gone,
    /// The kernel has found an error, and lets nothing be written any more (EROFS).
    ReadOnly,
}

/// A disk with a file system of its own.
struct Disk {
    /// What the disk is.
    dir: TempDir,
    /// Where it is mounted.
    place: PathBuf,
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", common::shown(&output));
}

impl Disk {
    fn at(place: &Path) -> Self {
        let dir = in_memory();
        File::create(dir.path().join("image")).unwrap().set_len(128 << 20).unwrap();
        fs::create_dir(place).unwrap();
        let disk = Self { dir, place: place.to_owned() };
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(disk.image()));
        disk.mount();
        disk
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount(&self) {
        let options = ["-t", "ext4", "-o", "loop,errors=remount-ro"];
        run(Command::new("mount").args(options).arg(self.image()).arg(&self.place));
    }

    fn fail(&self, failure: Failure) {
        match failure {
            Failure::Gone => {
                // FS_IOC_SHUTDOWN, without writing anything that is not on disk yet.
                let script = "import fcntl, os, struct, sys\n\
                    fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, struct.pack('I', 2))";
                run(Command::new("python3").args(["-c", script]).arg(&self.place));
            }
            Failure::ReadOnly => {
                let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
                let is_this = |line: &&str| line.split(' ').nth(4) == self.place.to_str();
                let mount = mounts.lines().find(is_this).unwrap();
                let source =
                    mount.split_once(" - ext4 /dev/").unwrap().1.split(' ').next().unwrap();
                fs::write(format!("/sys/fs/ext4/{source}/trigger_fs_error"), "1").unwrap();
            }
        }
    }

    /// Lets it work again. Nobody uses it.
    fn repair(&self) {
        until("nobody uses it", || {
            let output = Command::new("umount").arg(&self.place).output().unwrap();
            output.status.success().then_some(())
        });
        // Mount namespaces of others may keep what failed: it stays as it is, and what was on it is another disk.
        let failed = self.dir.path().join("failed");
        fs::rename(self.image(), &failed).unwrap();
        run(Command::new("cp").arg("--sparse=always").arg(&failed).arg(self.image()));
        fs::remove_file(failed).unwrap();
        // 1: there were errors, and are none any more.
        let checked = Command::new("e2fsck").arg("-fy").arg(self.image()).output().unwrap();
        assert!(matches!(checked.status.code(), Some(0 | 1)), "{}", common::shown(&checked));
        self.mount();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.place).status();
    }
}

/// In memory syncing costs nothing.
fn in_memory() -> TempDir {
    let shm = Path::new("/dev/shm");
    let place = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("torpor-queue-").tempdir_in(place).unwrap()
}

/// A job that was acknowledged: how many lines it writes, and how it had ended when that was seen.
struct Task {
    lines: u32,
    ended: Option<Value>,
}

struct World {
    // Unmounted before the daemon's directory is removed.
    disk: Disk,
    daemon: Daemon,
    random: Random,
    tasks: BTreeMap<u64, Task>,
    /// Jobs that were done, and others that were given up.
    done: u32,
    given_up: u32,
}

impl World {
    fn new() -> Self {
        let dir = in_memory();
        let disk = Disk::at(&dir.path().join("data"));
        let config = json!({
            "shortest_interval": 200, "mean_time_between_failures": 500, "default_disk": null,
        });
        let daemon = Daemon::below(dir, &config, &["--slots", "2"], &[]);
        let (random, tasks) = (Random::printed(), BTreeMap::new());
        Self { disk, daemon, random, tasks, done: 0, given_up: 0 }
    }

    fn submit(&mut self) {
        let lines = 20 + u32::try_from(self.random.below(40)).unwrap();
        let script = "i=0; while [ $i -lt $0 ]; do echo $i; i=$((i+1)); sleep 0.03; done; echo end";
        let id =
            self.daemon.submit(&["--class", "batch"], &["sh", "-c", script, &lines.to_string()]);
        let before = self.tasks.insert(id, Task { lines, ended: None });
        assert!(before.is_none(), "job {id} was acknowledged before");
    }

    /// Notes who has ended; who had stays so.
    fn look(&mut self) {
        let (_, list) = ask(&self.daemon, "GET", "/v1/jobs", "", "");
        let list: Vec<Value> = serde_json::from_str(&list).unwrap();
        for (id, task) in &mut self.tasks {
            let job = list.iter().find(|job| job["id"] == *id);
            let job = job.unwrap_or_else(|| panic!("job {id}, which was acknowledged, is gone"));
            let ended = Some(json!([job["exit"], job["run"]])).filter(|ended| !ended[0].is_null());
            assert!(task.ended.is_none() || task.ended == ended, "job {id} had ended: {job}");
            task.ended = ended;
        }
    }

    /// Waits until a process of the queue has worked some more, whichever.
    fn work(&self) {
        let processes = [shepherds(&self.daemon.data()), vec![self.daemon.pid()]].concat();
        let pid = processes[self.random.place(processes.len())];
        let Some(before) = work_of(pid) else { return };
        let more = self.random.below(300);
        until("it works", || {
            // It may have ended.
            work_of(pid).is_none_or(|work| work >= before + more).then_some(())
        });
    }

    /// Nobody is told that something was done that cannot be kept.
    fn nothing_is_taken(&self) {
        let output = self.daemon.queue(&["submit", "--", "true"]).output().unwrap();
        assert!(!output.status.success(), "{}", common::shown(&output));
    }

    /// The machine is started anew, and its disk works again.
    fn start_anew(&mut self) {
        self.daemon.kill();
        end_shepherds(&self.daemon.data());
        self.disk.repair();
        self.daemon.launch();
        self.look();
    }

    fn finish(&mut self) {
        let begun = Instant::now();
        while let Some((&id, _)) = self.tasks.iter().find(|(_, task)| task.ended.is_none()) {
            assert!(begun.elapsed() < PATIENCE, "it does not end: {}", self.daemon.show(id));
            std::thread::sleep(Duration::from_millis(20));
            self.look();
        }
        for (&id, task) in &self.tasks {
            let shown = self.daemon.show(id);
            assert_eq!(self.daemon.events(id, "ended").len(), 1, "{shown}");
            if shown["state"] == "done" {
                assert_eq!(self.daemon.output(id), counted(task.lines), "{shown}");
                self.done += 1;
            } else {
                // Given up, with the reason.
                let note = shown["note"].as_str().unwrap_or_default();
                assert!(note.contains("without a checkpoint"), "{shown}");
                self.given_up += 1;
            }
        }
        self.tasks.clear();
    }
}

#[test]
fn a_disk_that_fails_at_random_costs_no_job() {
    let name = "a_disk_that_fails_at_random_costs_no_job: 200 failures";
    let failures = if long(name) { 200 } else { 4 };
    if !Path::new("/dev/loop-control").exists() {
        println!("a_disk_that_fails_at_random_costs_no_job: left out, there are no loop devices");
        return;
    }
    let mut world = World::new();
    for count in 0..failures {
        while world.tasks.values().filter(|task| task.ended.is_none()).count() < 3 {
            world.submit();
        }
        world.work();
        world.look();
        let failure = [Failure::Gone, Failure::ReadOnly][world.random.place(2)];
        println!("failure {count}: {failure:?}");
        world.disk.fail(failure);
        world.nothing_is_taken();
        // What the jobs do meanwhile cannot be kept either.
        (0..world.random.below(4)).for_each(|_| world.nothing_is_taken());
        world.start_anew();
        // What is over is not looked at for ever.
        if world.tasks.len() > 20 {
            world.finish();
        }
    }
    world.finish();
    let World { done, given_up, .. } = world;
    println!("{failures} failures: {done} jobs were done, {given_up} given up");
    assert!(done > 0, "all {given_up} jobs were given up");
    leaks::assert_none(&world.daemon, &[]);
}
