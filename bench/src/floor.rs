//! The least that a dump of many tasks can take: what the kernel needs to stop each, to
//! tell what it is, and to make files of the same sizes, with nothing done in between.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use torpor_tracee::Tracee;

use crate::bench::{Bench, run};
use crate::subject::Subject;

/// How long a task may take to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// Seconds for `count` tasks of a kind, without ending them and without asking them
/// anything that only they can answer.
pub fn floor(bench: &Bench, kind: &str, count: u64) -> Result<f64> {
    let subject = Subject::start(&bench.dir, kind, count)?;
    fs::create_dir(bench.images())?;
    run(&mut bench.command(&["dump", "--leave-running", "-t", &subject.pid().to_string()]))?;
    let files = contents(&bench.images())?;
    let copies = bench.dir.join("copies");
    fs::create_dir(&copies)?;
    let start = Instant::now();
    let stopped = stop(subject.pid())?;
    for task in &stopped {
        look(task.pid(), task.tid())?;
    }
    for (name, content) in &files {
        fs::write(copies.join(name), content)?;
    }
    stopped.into_iter().try_for_each(Tracee::finish)?;
    let seconds = start.elapsed().as_secs_f64();
    subject.end()?;
    fs::remove_dir_all(&copies)?;
    fs::remove_dir_all(bench.images())?;
    Ok(seconds)
}

/// Seconds in which the kernel stops a process, with its threads and children, tells what each is, and lets all go on.
pub fn stop_and_look(root: i32) -> Result<f64> {
    let start = Instant::now();
    let stopped = stop(root)?;
    for task in &stopped {
        look(task.pid(), task.tid())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    stopped.into_iter().try_for_each(Tracee::finish)?;
    Ok(seconds)
}

fn contents(dir: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let entries = fs::read_dir(dir)?;
    entries
        .map(|entry| {
            let entry = entry?;
            Ok((entry.file_name().into(), fs::read(entry.path())?))
        })
        .collect()
}

/// Stops a process, its threads and its children, all at once.
fn stop(root: i32) -> Result<Vec<Tracee>> {
    let mut tasks = Vec::new();
    for tid in fs::read_dir(format!("/proc/{root}/task"))? {
        let tid = tid?.file_name().into_string().ok().context("a name that is no number")?;
        tasks.push((root, tid.parse()?));
        for child in fs::read_to_string(format!("/proc/{root}/task/{tid}/children"))?.split(' ') {
            if let Ok(child) = child.trim().parse() {
                tasks.push((child, child));
            }
        }
    }
    for &(_, tid) in &tasks {
        Tracee::seize(tid, false)?;
    }
    let stopped = tasks.into_iter().map(|(pid, tid)| {
        Tracee::stopped(pid, tid, PATIENCE)?.with_context(|| format!("task {tid} does not stop"))
    });
    stopped.collect()
}

/// Reads what only procfs tells of a thread, and of its process if it is the leader.
fn look(pid: i32, tid: i32) -> Result<()> {
    fs::read(format!("/proc/{pid}/task/{tid}/status"))?;
    if pid == tid {
        for name in ["stat", "smaps", "auxv", "timers", "fdinfo/0"] {
            fs::read(format!("/proc/{pid}/{name}"))?;
        }
    }
    Ok(())
}
