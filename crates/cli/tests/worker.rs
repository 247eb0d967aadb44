//! Jobs of the engine in workers, as daemons with threads run them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use torpor_images::proto::CoreEntry;
use torpor_images::{ImageDir, kind};
use torpor_sys::process::{Status, wait};
use torpor_worker::{Class, Event, Job, Level, Outcome, Worker};

mod sleeper;

use sleeper::{Sleeper, wait_until};

fn start(task: &Sleeper, args: &[&str], holds: &[&str]) -> Worker {
    start_marked(task, args, holds, &[])
}

/// One that leaves a file behind at the points `marks`.
fn start_marked(task: &Sleeper, args: &[&str], holds: &[&str], marks: &[&str]) -> Worker {
    let words = |all: &[&str]| all.iter().map(|&word| word.to_owned()).collect();
    let job = Job {
        args: words(args),
        dir: task.dir.path().to_owned(),
        holds: words(holds),
        marks: words(marks),
        ..Job::default()
    };
    Worker::start_with(Path::new(env!("CARGO_BIN_EXE_torpor")), &job, &[]).unwrap()
}

fn dump(task: &Sleeper, holds: &[&str]) -> Worker {
    let pid = task.pid.to_string();
    start(task, &["dump", "--tree", &pid, "--images-dir", "images", "--shell-job"], holds)
}

/// Lets the worker go on until it waits at `point`, or ends.
fn until_held(worker: &mut Worker, point: &str) -> Option<Outcome> {
    loop {
        match worker.next_event().unwrap() {
            Event::Point { name, held: true, .. } if name == point => return None,
            Event::Ended(outcome) => return Some(outcome),
            _ => {}
        }
    }
}

/// The task has been killed.
fn reap(task: &Sleeper) {
    assert_eq!(wait(task.pid, true).unwrap(), Some((task.pid, Status::Signaled(libc::SIGKILL))));
}

#[test]
fn a_held_dump_ends_its_task_only_after_the_word() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &["post-dump"]);
    assert_eq!(until_held(&mut worker, "post-dump"), None);
    assert!(task.lives());
    worker.answer(true).unwrap();
    let outcome = worker.finish().unwrap();
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    assert_eq!(outcome.report.tasks, Some(1));
    assert!(outcome.report.statistics["pages_written"] > 0);
    reap(&task);

    let args = ["restore", "--images-dir", "images", "--shell-job", "--restore-detached"];
    let restored = start(&task, &args, &[]).finish().unwrap();
    assert_eq!(restored.class, Class::Done, "{}", restored.text);
    assert_eq!(restored.report.pid, Some(task.pid));
    assert!(task.lives());
}

#[test]
fn a_restore_leaves_a_mark_when_its_task_runs() {
    let task = Sleeper::start();
    assert_eq!(dump(&task, &[]).finish().unwrap().class, Class::Done);
    reap(&task);
    let mark = task.dir.path().join("post-resume");
    let args = ["restore", "--images-dir", "images", "--shell-job", "--restore-detached"];
    for go_on in [false, true] {
        let mut worker = start_marked(&task, &args, &["pre-resume"], &["post-resume"]);
        assert_eq!(until_held(&mut worker, "pre-resume"), None);
        assert!(!mark.exists());
        worker.answer(go_on).unwrap();
        let outcome = worker.finish().unwrap();
        assert_eq!(outcome.class == Class::Done, go_on, "{}", outcome.text);
        assert_eq!(mark.exists(), go_on);
    }
    assert!(task.lives());
}

#[test]
fn a_dump_tells_how_far_it_is() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &[]);
    let mut told = Vec::new();
    let outcome = loop {
        match worker.next_event().unwrap() {
            Event::Progress { done, total } => told.push((done, total)),
            Event::Ended(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    assert!(told.is_sorted_by_key(|&(done, _)| done), "{told:?}");
    let (done, total) = *told.last().unwrap();
    assert!(done == total && total > 0, "{told:?}");
    reap(&task);
}

#[test]
fn after_a_no_the_task_goes_on() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &["post-dump"]);
    assert_eq!(until_held(&mut worker, "post-dump"), None);
    worker.answer(false).unwrap();
    let outcome = worker.finish().unwrap();
    assert_eq!(outcome.class, Class::Vetoed, "{}", outcome.text);
    assert!(task.lives());
    assert!(!task.dir.path().join("images/inventory.img").exists());
}

#[test]
fn a_cancelled_dump_lets_its_task_go_on() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &["post-dump"]);
    assert_eq!(until_held(&mut worker, "post-dump"), None);
    worker.cancel().unwrap();
    wait_until(|| task.sleeps());
}

/// In the middle of its work, at no point at which it waits. It could not end the task before it has asked.
#[test]
fn a_dump_that_is_cancelled_while_it_copies_lets_its_task_go_on() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &["post-dump"]);
    loop {
        match worker.next_event().unwrap() {
            Event::Progress { .. } => break,
            Event::Ended(outcome) => panic!("it has ended before: {}", outcome.text),
            _ => {}
        }
    }
    worker.cancel().unwrap();
    wait_until(|| task.sleeps());
    let outcome = dump(&task, &[]).finish().unwrap();
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    reap(&task);
}

#[test]
fn a_worker_that_dies_lets_its_task_go_on() {
    let task = Sleeper::start();
    let mut worker = dump(&task, &["post-dump"]);
    assert_eq!(until_held(&mut worker, "post-dump"), None);
    let pid = rustix::process::Pid::from_raw(worker.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(worker.finish().unwrap().class, Class::Died);
    wait_until(|| task.sleeps());
}

/// A restore that waits with everything made: the task is there, and has not run yet.
fn held_restore(task: &Sleeper) -> Worker {
    let outcome = dump(task, &[]).finish().unwrap();
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    reap(task);
    let args = ["restore", "--images-dir", "images", "--shell-job", "--restore-detached"];
    let mut worker = start(task, &args, &["post-restore"]);
    assert_eq!(until_held(&mut worker, "post-restore"), None);
    assert!(task.lives());
    worker
}

/// Nothing is left of a restore that was not finished: the task ends, and its pid is free for the
/// next try.
fn can_be_restored(task: &Sleeper) {
    wait_until(|| !Path::new(&format!("/proc/{}", task.pid)).exists());
    let args = ["restore", "--images-dir", "images", "--shell-job", "--restore-detached"];
    let restored = start(task, &args, &[]).finish().unwrap();
    assert_eq!(restored.class, Class::Done, "{}", restored.text);
    assert_eq!(restored.report.pid, Some(task.pid));
    wait_until(|| task.sleeps());
}

#[test]
fn a_cancelled_restore_leaves_nothing() {
    let task = Sleeper::start();
    held_restore(&task).cancel().unwrap();
    can_be_restored(&task);
}

#[test]
fn a_restoring_worker_that_dies_leaves_nothing() {
    let task = Sleeper::start();
    let worker = held_restore(&task);
    let pid = rustix::process::Pid::from_raw(worker.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(worker.finish().unwrap().class, Class::Died);
    can_be_restored(&task);
}

/// The value that the kernel adds to how large a process is, where it looks for one to kill.
fn score(pid: u32) -> i32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    text.trim().parse().unwrap()
}

/// Where memory runs out the kernel kills a job, and not the daemon with all of its jobs. That is not handed on to whoever
/// stays when the job is killed, nor to the task, also where its image does not say what it had.
#[test]
fn a_job_is_killed_before_its_daemon() {
    let task = Sleeper::start();
    let daemon = score(std::process::id());
    let mut worker = dump(&task, &["post-dump"]);
    assert_eq!(until_held(&mut worker, "post-dump"), None);
    assert!(score(worker.pid()) > daemon);
    let children = format!("/proc/{0}/task/{0}/children", worker.pid());
    let children = std::fs::read_to_string(children).unwrap();
    let guardian = children.split_whitespace().map(|pid| pid.parse().unwrap()).find(|pid| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "torpor-guard\n"
    });
    assert_eq!(score(guardian.unwrap()), daemon);
    assert_eq!(score(task.pid.cast_unsigned()), daemon);
    worker.answer(true).unwrap();
    assert_eq!(worker.finish().unwrap().class, Class::Done);
    reap(&task);

    let images = ImageDir::open(task.dir.path().join("images")).unwrap();
    let id = images.ids(kind::CORE).unwrap()[0];
    let mut core: CoreEntry = images.read_one(kind::CORE, id).unwrap();
    assert_eq!(core.tc.as_mut().unwrap().oom_score_adj.take(), Some(daemon));
    images.write_one(kind::CORE, id, &core).unwrap();
    let args = ["restore", "--images-dir", "images", "--shell-job", "--restore-detached"];
    let mut worker = start(&task, &args, &["post-restore"]);
    assert_eq!(until_held(&mut worker, "post-restore"), None);
    assert!(score(worker.pid()) > daemon);
    worker.answer(true).unwrap();
    let outcome = worker.finish().unwrap();
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    assert_eq!(score(task.pid.cast_unsigned()), daemon);
}

/// A daemon need not take a sentence apart.
#[test]
fn records_of_the_log_have_fields() {
    let task = Sleeper::start();
    let pid = task.pid.to_string();
    let args = ["dump", "-v3", "--tree", &pid, "--images-dir", "images", "--shell-job"];
    let mut worker = start(&task, &args, &[]);
    let mut records = Vec::new();
    let outcome = loop {
        match worker.next_event().unwrap() {
            Event::Log { level, text, fields } => records.push((level, text, fields)),
            Event::Ended(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
    let fields = vec![("tasks".to_owned(), "1".to_owned())];
    let frozen = (Level::Info, "Frozen tasks=1".to_owned(), fields);
    assert!(records.contains(&frozen), "{records:?}");
    reap(&task);
}

#[test]
fn what_cannot_work_is_told_by_its_class() {
    let task = Sleeper::start();
    let outcome = |args: &[&str]| start(&task, args, &[]).finish().unwrap();
    assert_eq!(outcome(&["dump", "--no-such-option"]).class, Class::Usage);
    assert_eq!(outcome(&["swrk", "3"]).class, Class::Refused);
    std::fs::create_dir(task.dir.path().join("empty")).unwrap();
    let damaged = outcome(&["restore", "--images-dir", "empty"]);
    assert_eq!(damaged.class, Class::BadImage, "{}", damaged.text);
}

#[test]
fn ten_run_at_once_in_a_program_with_threads() {
    let hold = || {
        let task = Sleeper::start();
        let mut worker = dump(&task, &["post-dump"]);
        assert_eq!(until_held(&mut worker, "post-dump"), None);
        (task, worker)
    };
    let go_on = |(task, worker): (Sleeper, Worker)| {
        worker.answer(true).unwrap();
        let outcome = worker.finish().unwrap();
        assert_eq!(outcome.class, Class::Done, "{}", outcome.text);
        reap(&task);
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..10).map(|_| scope.spawn(hold)).collect();
        // Nobody goes on before all ten are held.
        let all: Vec<_> = all.into_iter().map(|one| one.join().unwrap()).collect();
        all.into_iter().for_each(|one| drop(scope.spawn(|| go_on(one))));
    });
}
