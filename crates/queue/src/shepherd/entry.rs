//! How a shepherd comes into being.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;
use torpor_worker::tell;

use super::{Happening, SHEPHERD, Shepherd, checkpoint, message, work};
use crate::files::{self, JobDir};

/// Where a run's socket lies, in the run's directory.
pub(crate) const SOCKET: &str = "socket";
/// What a living shepherd holds a lock on, in the run's directory.
pub(crate) const LOCK: &str = "lock";
/// What a shepherd says when it fails, in the run's directory.
pub(crate) const LOG: &str = "log";
/// Which process it is, in the run's directory.
pub(crate) const PID: &str = "pid";

/// The environment variable that marks the process inside the new namespaces.
const INSIDE: &str = "TORPOR_SHEPHERD_INSIDE";

/// Starts the shepherd of a new run. It holds `lock` for as long as it lives.
///
/// # Errors
/// If the process cannot be started, or cannot make its namespaces; `Interrupted`, if it was killed before it had done that.
pub(crate) fn start(
    dir: &JobDir,
    run: u64,
    from: Option<u64>,
    base: [u64; 2],
    lock: File,
) -> io::Result<()> {
    let log = File::options().create(true).append(true).open(dir.run(run).join(LOG))?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["queue", SHEPHERD]).arg(dir.path()).arg(run.to_string());
    command.args(["--out", &base[0].to_string(), "--err", &base[1].to_string()]);
    if let Some(seq) = from {
        command.args(["--from", &seq.to_string()]);
    }
    let status = command.stdin(lock).stdout(Stdio::null()).stderr(log).status()?;
    if status.success() {
        return Ok(());
    }
    let log = fs::read_to_string(dir.run(run).join(LOG)).unwrap_or_default();
    let was_killed = status.signal().is_some();
    let kind = if was_killed { io::ErrorKind::Interrupted } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, format!("the job's shepherd did not start: {}", log.trim())))
}

/// The hidden subcommand. The process that the daemon starts only makes the namespaces
/// and starts the shepherd in them: a process cannot enter a new pid namespace itself.
pub(crate) fn enter(dir: PathBuf, run: u64, from: Option<u64>, base: [u64; 2]) -> ExitCode {
    let inside = std::env::var_os(INSIDE).is_some();
    let done = if inside { tend(dir, run, from, base) } else { outside(&JobDir::at(dir), run) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tell!("shepherd: {e}");
            ExitCode::FAILURE
        }
    }
}

fn outside(dir: &JobDir, run: u64) -> io::Result<()> {
    // A shepherd outlives the daemon's session and its terminal.
    rustix::process::setsid()?;
    // Nor does it, or a runtime that it starts, ignore or block what the daemon was told to, as by nohup(1).
    torpor_sys::process::reset_signals()?;
    let flags = rustix::thread::UnshareFlags::NEWPID | rustix::thread::UnshareFlags::NEWNS;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    torpor_sys::ns::unshare_namespaces(flags)?;
    let mut shepherd = Command::new("/proc/self/exe");
    let shepherd = shepherd.args(std::env::args_os().skip(1)).env(INSIDE, "1").spawn()?;
    // Where the disk is full nobody can kill it before it listens.
    let _ = fs::write(dir.run(run).join(PID), shepherd.id().to_string());
    Ok(())
}

/// Keeps the job until it is over.
fn tend(dir: PathBuf, run: u64, from: Option<u64>, base: [u64; 2]) -> io::Result<()> {
    // What is mounted on the machine later is seen by the job, and nothing goes back.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None)?;
    let dir = JobDir::at(dir);
    let record = match from {
        Some(seq) => Some(checkpoint::record(&dir.checkpoint(seq))?),
        None => None,
    };
    if let Some(record) = &record {
        // Threads and helpers must not get the process ids that the job is to have again.
        fs::write("/proc/sys/kernel/ns_last_pid", record.last_pid.to_string())?;
    }
    let (inputs, happenings) = mpsc::channel();
    let mut signals = Signals::new([SIGCHLD])?;
    let children = inputs.clone();
    thread::spawn(move || {
        for _ in signals.forever() {
            let _ = children.send(Happening::Child);
        }
    });
    let mut shepherd = Shepherd::new(dir.clone(), run, record.as_ref(), base, inputs.clone())?;
    match &record {
        Some(record) => {
            work::put_back(&dir, &dir.checkpoint(record.seq))?;
            shepherd.mount()?;
            shepherd.root = record.root;
            // The daemon has compared it.
            shepherd.wake(true);
        }
        None => shepherd.start_job()?,
    }
    listen(&dir.run(run).join(SOCKET), inputs)?;
    shepherd.watch_disk();
    shepherd.watch(&happenings)
}

fn listen(path: &Path, inputs: Sender<Happening>) -> io::Result<()> {
    let listener = files::with_short_name(path, |short| UnixListener::bind(short))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (Ok(reader), inputs) = (stream.try_clone(), inputs.clone()) else { continue };
            let _ = inputs.send(Happening::Connected(stream));
            thread::spawn(move || take_orders(reader, &inputs));
        }
    });
    Ok(())
}

fn take_orders(reader: UnixStream, inputs: &Sender<Happening>) {
    let mut reader = BufReader::new(reader);
    while let Ok(Some(order)) = message::receive(&mut reader) {
        if inputs.send(Happening::Order(order)).is_err() {
            return;
        }
    }
}
