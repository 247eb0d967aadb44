//! Programs that verify what they do, and count it in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::answers::Answers;
use super::service::Load;
use crate::process::until;

/// How often the file is looked at.
const PAUSE: Duration = Duration::from_millis(1);

/// Looks at the count all the time.
pub struct Counted {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<()>>,
}

struct Shared {
    answers: Answers,
    stop: AtomicBool,
    count: AtomicU64,
}

impl Counted {
    /// Waits until something is counted. `read` says how much that is by now.
    pub fn start(path: PathBuf, read: fn(&Path) -> u64) -> Result<Self> {
        until("the first that is counted", || read(&path) > 0)?;
        let shared = Shared {
            answers: Answers::new(),
            stop: AtomicBool::new(false),
            count: AtomicU64::new(read(&path)),
        };
        let shared = Arc::new(shared);
        let seen = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while !seen.stop.load(Ordering::Relaxed) {
                let (now, before) = (read(&path), seen.count.load(Ordering::Relaxed));
                let more = now.checked_sub(before).context("it counts back")?;
                seen.answers.add(u32::try_from(more)?)?;
                seen.count.store(now, Ordering::Relaxed);
                thread::sleep(PAUSE);
            }
            Ok(())
        });
        Ok(Self { shared, thread })
    }
}

impl Load for Counted {
    fn answers(&self) -> &Answers {
        &self.shared.answers
    }

    /// A program that has found something wrong has ended, and counts no more.
    fn finish(self: Box<Self>) -> Result<()> {
        let count = || self.shared.count.load(Ordering::Relaxed);
        let before = count();
        let counts = until("more that is counted", || count() > before + 2);
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("who looks at the count panicked"))??;
        counts
    }
}

/// The number that a file holds.
pub fn number(path: &Path) -> u64 {
    fs::read(path).unwrap_or_default().try_into().map_or(0, u64::from_le_bytes)
}

/// How long a file is.
pub fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

/// Compiles a program of the tests of migrations.
pub fn compiled(dir: &Path, name: &str) -> Result<PathBuf> {
    let source =
        format!("{}/../crates/migrate/tests/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = dir.join(name);
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).status()?;
    ensure!(status.success(), "{name} is not compiled");
    Ok(program)
}
