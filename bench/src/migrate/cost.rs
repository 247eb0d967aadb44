//! What a program costs a host: processor time, and the most memory that it and all it has started had at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::param::{clock_ticks_per_second, page_size};

/// How often memory is looked at, if that is cheap.
const PAUSE: Duration = Duration::from_millis(20);

/// A look that took a time is followed by a pause so many times as long. Looks at a tree of 500 processes one behind the other took
/// half of two processors from the migration that is measured.
const REST: u32 = 19;

/// Watches the memory of a program, its descendants, and its files in memory.
pub struct Watch {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub fn start(root: u32, files: PathBuf) -> Self {
        let (stop, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, most) = (Arc::clone(&stop), Arc::clone(&peak));
        let thread = thread::spawn(move || {
            loop {
                // The last look is one at the end, however long ago the one before was.
                let is_last = stopped.load(Ordering::Relaxed);
                let begun = Instant::now();
                let resident: u64 = descendants(root).into_iter().map(resident).sum();
                most.fetch_max(resident + stored(&files), Ordering::Relaxed);
                if is_last {
                    break;
                }
                thread::park_timeout(PAUSE.max(begun.elapsed() * REST));
            }
        });
        Self { stop, peak, thread }
    }

    /// Bytes at the peak.
    pub fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        self.thread.join().map_err(|_| anyhow!("the watch panicked"))?;
        Ok(self.peak.load(Ordering::Relaxed))
    }
}

/// Seconds of processor time that a process and its children that have ended have used.
#[allow(clippy::cast_precision_loss, reason = "to be read by people")]
pub fn processor_time(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(") ").context("a stat file")?;
    // utime, stime, cutime and cstime are fields 14 to 17, the state is the third (proc(5)).
    let ticks = rest.split(' ').skip(11).take(4).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<Result<_, _>>()?;
    Ok(ticks as f64 / clock_ticks_per_second() as f64)
}

/// A process and all that it has started.
fn descendants(root: u32) -> Vec<u32> {
    let (mut found, mut at) = (vec![root], 0);
    while let Some(&pid) = found.get(at) {
        at += 1;
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    found
}

/// Bytes that a process has in memory.
fn resident(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * page_size() as u64
}

/// Bytes that files below a directory take.
fn stored(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let meta = entry.metadata().ok()?;
        Some(if meta.is_dir() { stored(&entry.path()) } else { meta.blocks() * 512 })
    });
    sizes.sum()
}
