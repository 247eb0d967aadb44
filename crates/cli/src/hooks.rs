//! What the program does when the engine calls back: action scripts, the pid file,
//! the progress bar.

use std::io::{IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use torpor_engine::{Context, Error, Event, Hooks, Result, work_file};
use torpor_sys::process::signal_with_parent;

use crate::options::Settings;

/// How long work takes before a progress bar is worth its while.
const PATIENCE: Duration = Duration::from_secs(1);

/// The hooks of a dump or restore that a command line or request started.
#[derive(Debug)]
pub struct Actions {
    scripts: Vec<String>,
    images_dir: PathBuf,
    pidfile: Option<PathBuf>,
    status_fd: Option<Arc<OwnedFd>>,
    root: i32,
    /// The port of `Event::StatusReady` is told to a caller that asked for any.
    any_port: bool,
    progress: Progress,
}

impl Actions {
    /// The hooks that `settings` asks for; `visible` if a person may be watching.
    #[must_use]
    pub fn new(settings: &Settings, visible: bool) -> Self {
        Self {
            scripts: settings.action_scripts.clone(),
            images_dir: settings.engine.images_dir.clone(),
            pidfile: settings.pidfile.clone(),
            status_fd: settings.ready_fd.clone(),
            root: settings.engine.pid,
            any_port: settings.engine.memory.page_server.as_ref().is_some_and(|to| to.port == 0),
            progress: Progress::new(visible && std::io::stderr().is_terminal()),
        }
    }

    fn report_ready(&mut self, port: Option<u16>) -> Result<()> {
        if let Some(port) = port.filter(|_| self.any_port) {
            // There is no other way to know it.
            println!("PORT: {port}");
        }
        report_ready(self.status_fd.take()).context(|| "--status-fd".to_owned())
    }

    fn run(&self, script: &str, event: &Event) -> Result<()> {
        let name = event.name();
        tracing::info!("Running {name} script {script}");
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script])
            .env("CRTOOLS_SCRIPT_ACTION", name)
            .env("CRTOOLS_IMAGE_DIR", &self.images_dir)
            .stdin(Stdio::null());
        if self.root > 0 {
            command.env("CRTOOLS_INIT_PID", self.root.to_string());
        }
        // Nobody waits for it any more then.
        signal_with_parent(&mut command, libc::SIGTERM);
        let failed = |why: String| Error::Hook(format!("action script {script} at {name}: {why}"));
        let status = command.status().map_err(|e| failed(e.to_string()))?;
        if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
    }
}

impl Hooks for Actions {
    fn notify(&mut self, event: Event) -> Result<()> {
        if let Some(pid) = event.pid() {
            self.root = pid;
        }
        if let (Event::PostRestore { pid }, Some(file)) = (&event, &self.pidfile) {
            write_pidfile(file, *pid).context(|| format!("pid file {}", file.display()))?;
        }
        match event {
            Event::OrphanPtsMaster(_) => return Ok(()),
            Event::StatusReady { port } => return self.report_ready(port),
            _ => {}
        }
        self.scripts.iter().try_for_each(|script| self.run(script, &event))
    }

    fn progress(&mut self, done: u64, total: u64) {
        self.progress.update(done, total);
    }
}

/// Tells the one who gave `--status-fd` that it is time.
///
/// # Errors
/// If nobody listens.
pub(crate) fn report_ready(status_fd: Option<Arc<OwnedFd>>) -> std::io::Result<()> {
    match status_fd {
        Some(fd) => rustix::io::write(&*fd, &[0]).map(drop).map_err(Into::into),
        None => Ok(()),
    }
}

/// Writes `pid` to `path`, as other programs read it: digits and nothing else.
///
/// # Errors
/// If the file cannot be made or written; if it is a link in a work directory, or no regular file there.
pub(crate) fn write_pidfile(path: &Path, pid: i32) -> std::io::Result<()> {
    write!(work_file::begin(path, 0o644)?, "{pid}")
}

/// A progress bar that only shows up when work takes long.
#[derive(Debug)]
struct Progress {
    start: Instant,
    bar: Option<ProgressBar>,
    allowed: bool,
}

impl Progress {
    fn new(allowed: bool) -> Self {
        Self { start: Instant::now(), bar: None, allowed }
    }

    fn update(&mut self, done: u64, total: u64) {
        if !self.allowed || self.start.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| new_bar(total));
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Drawn when it is updated, never by a thread of its own: the engine forks.
fn new_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let template = "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
