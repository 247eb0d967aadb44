//! What is left for the end of a restore in rounds: all but pages, of a tree whose processes have threads and files.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::bench::{Bench, median, run};
use crate::process::{Running, gone};

/// How many processes, each of which has another thread and thirty files.
const TREES: [u64; 3] = [10, 100, 500];

pub fn measure(bench: &mut Bench) -> Result<()> {
    for count in TREES {
        let (mut dumps, mut steps) = (vec![], vec![]);
        for _ in 0..bench.rounds {
            let (dump, step) = once(bench, count)?;
            dumps.push(dump);
            steps.push(step);
        }
        let (dump, step) = (median(&dumps), median(&steps));
        let what = format!("last step of a restore in rounds, {count} processes");
        bench.add(what, step * 1e3, "ms", None);
        let what = format!("of the pause that it ends, {count} processes");
        bench.add(what, step / (dump + step), "× pause", None);
    }
    Ok(())
}

/// Moves a tree in rounds: seconds of its last dump, and of what a skeleton takes from there until its tasks run.
fn once(bench: &Bench, count: u64) -> Result<(f64, f64)> {
    let dirs = ["first", "second", "last"].map(|name| bench.dir.join(name));
    dirs.iter().try_for_each(fs::create_dir)?;
    // In a pid namespace: it is to be there twice.
    let mut start = Command::new("unshare");
    start.args(["--pid", "--fork", "--kill-child", "setsid"]).arg(bench.dir.join("target"));
    start.args(["family", &count.to_string()]).current_dir(&bench.dir).stderr(Stdio::null());
    let (tree, said) = Running::heard(&mut start)?;
    ensure!(said == "ready", "the target says {said:?}");
    let root = fs::read_to_string(format!("/proc/{0}/task/{0}/children", tree.pid()))?;
    let dump = |action: &str, to: &Path, options: &[&str]| -> Result<f64> {
        let mut command = Command::new(bench.torpor());
        command.args([action, "-t", root.trim(), "-D"]).arg(to).args(options);
        let start = Instant::now();
        run(&mut command)?;
        Ok(start.elapsed().as_secs_f64())
    };
    dump("dump", &dirs[0], &["--leave-running", "--track-mem"])?;
    let mut skeleton = Skeleton::build(bench, &dirs[0])?;
    dump("pre-dump", &dirs[1], &["--prev-images-dir", "../first"])?;
    skeleton.follow(&dirs[1])?;
    let dumped = dump("dump", &dirs[2], &["--prev-images-dir", "../second"])?;
    let step = skeleton.last(&dirs[2])?;
    drop(tree);
    dirs.iter().try_for_each(fs::remove_dir_all)?;
    Ok((dumped, step))
}

/// A tree that follows rounds.
struct Skeleton {
    restore: Running,
    line: BufReader<UnixStream>,
    pid: PathBuf,
}

impl Skeleton {
    fn build(bench: &Bench, first: &Path) -> Result<Self> {
        let (socket, pid) = (bench.dir.join("rounds"), bench.dir.join("pid"));
        let listener = UnixListener::bind(&socket)?;
        let mut command = Command::new(bench.torpor());
        command.args(["restore", "-d", "-D"]).arg(first).arg("--rounds").arg(&socket);
        let restore = Running::start(command.arg("--pidfile").arg(&pid))?;
        let (stream, _) = listener.accept()?;
        fs::remove_file(socket)?;
        let mut skeleton = Skeleton { restore, line: BufReader::new(stream), pid };
        skeleton.is_ready()?;
        Ok(skeleton)
    }

    fn is_ready(&mut self) -> Result<()> {
        let mut said = String::new();
        self.line.read_line(&mut said)?;
        ensure!(said == "ready\n", "the restore says {said:?}");
        Ok(())
    }

    /// It gets the pages of a round.
    fn follow(&mut self, round: &Path) -> Result<()> {
        writeln!(self.line.get_mut(), "round {}", round.display())?;
        self.is_ready()
    }

    /// Seconds until its tasks run; they end then.
    fn last(mut self, dir: &Path) -> Result<f64> {
        let start = Instant::now();
        writeln!(self.line.get_mut(), "last {}", dir.display())?;
        self.restore.end()?;
        let step = start.elapsed().as_secs_f64();
        let root: i32 = fs::read_to_string(&self.pid)?.trim().parse()?;
        fs::remove_file(&self.pid)?;
        // It may have ended with the restore, its parent now: as it would have with `unshare` (--kill-child).
        let _ = kill_process(Pid::from_raw(root).context("no pid")?, Signal::KILL);
        gone(root.unsigned_abs())?;
        Ok(step)
    }
}
