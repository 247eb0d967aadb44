//! The operations as the command line and the RPC both perform them: the engine's
//! work, and what belongs around it.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use torpor_engine::options::CpuCap;
use torpor_engine::{DumpReport, Error, Hooks, RestoreReport};
use torpor_images::ImageDir;

use crate::failure::{Failure, lines};
use crate::options::Settings;
use crate::stats::Freed;
use crate::{COMPATIBLE, log, rounds};

/// Opens the images and work directories for good, whatever becomes of their paths,
/// enters the work directory and opens the log there.
///
/// # Errors
/// If a directory is missing or cannot be entered, or the log cannot be opened.
pub fn prepare(settings: &mut Settings) -> Result<(), Failure> {
    let images = directory(&settings.engine.images_dir, "images")?;
    if let Some(work) = &settings.engine.work_dir {
        settings.engine.work_dir = Some(directory(work, "work")?);
    }
    settings.engine.images_dir = images;
    std::env::set_current_dir(settings.engine.work_dir())
        .map_err(|e| Failure::io(settings.engine.work_dir().display(), &e))?;
    open_log(settings)
}

fn directory(path: &Path, role: &str) -> Result<PathBuf, Failure> {
    let failed = |e| Failure::io(format_args!("{role} directory {}", path.display()), &e);
    // A client's directory that has no name here, see `rpc::request`.
    let resolved = if path.starts_with("/proc/self/fd") {
        path.to_owned()
    } else {
        path.canonicalize().map_err(failed)?
    };
    if !resolved.metadata().map_err(failed)?.is_dir() {
        return Err(failed(std::io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    Ok(resolved)
}

/// Sends the log where `settings` say, relative to the current directory.
///
/// # Errors
/// If the log file cannot be made.
pub(crate) fn open_log(settings: &Settings) -> Result<(), Failure> {
    let log = log::get();
    log.set_level(settings.verbosity);
    match &settings.log_file {
        Some(file) if !settings.log_to_stderr => log
            .to_file(file)
            .map_err(|e| Failure::io(format_args!("log file {}", file.display()), &e))?,
        // A worker's daemon has the log.
        _ if log.has_listener() && !settings.log_to_stderr => {}
        _ => log.to_stderr(),
    }
    let system = rustix::system::uname();
    tracing::info!("Version: {COMPATIBLE} (Torpor {})", env!("CARGO_PKG_VERSION"));
    tracing::info!(
        "Running on {} {} {} {}",
        system.nodename().to_string_lossy(),
        system.sysname().to_string_lossy(),
        system.release().to_string_lossy(),
        system.machine().to_string_lossy()
    );
    // Whoever has called this program sees by that where its own time went.
    tracing::info!("At (00.000000) CLOCK_MONOTONIC was {} s", log.began());
    Ok(())
}

/// Refuses to go on without the rights that the engine needs.
///
/// # Errors
/// If the caller is not root and did not say that this is meant.
pub(crate) fn require_rights(settings: &Settings) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() || settings.unprivileged {
        return Ok(());
    }
    Err(Failure::new(libc::EPERM, "you need to be root to run this command")
        .hint("with CAP_CHECKPOINT_RESTORE there is --unprivileged"))
}

/// Logs the end of an operation in the words that scripts look for.
fn concluded<T>(
    result: torpor_engine::Result<T>,
    success: &str,
    failed: &str,
) -> Result<T, Failure> {
    match result {
        Ok(report) => {
            tracing::info!("{success}");
            Ok(report)
        }
        Err(error) => {
            lines(&error.to_string()).iter().for_each(|line| tracing::error!("{line}"));
            tracing::error!("{failed}");
            Err(Failure { logged: true, ..error.into() })
        }
    }
}

/// Dumps.
///
/// # Errors
/// If the caller has no rights or names no pid; as [`torpor_engine::dump()`].
pub fn dump(settings: &Settings, hooks: &mut dyn Hooks) -> Result<DumpReport, Failure> {
    require_rights(settings)?;
    require_pid(settings)?;
    let result = torpor_engine::dump(&settings.engine, hooks);
    concluded(result, "Dumping finished successfully", "Dumping FAILED.")
}

/// Pre-dumps.
///
/// # Errors
/// If the caller has no rights or names no pid; as [`torpor_engine::pre_dump`].
pub fn pre_dump(settings: &Settings, hooks: &mut dyn Hooks) -> Result<DumpReport, Failure> {
    require_rights(settings)?;
    require_pid(settings)?;
    let result = torpor_engine::pre_dump(&settings.engine, hooks);
    concluded(result, "Pre-dumping finished successfully", "Pre-dumping FAILED.")
}

fn require_pid(settings: &Settings) -> Result<(), Failure> {
    match settings.engine.pid {
        pid if pid > 0 => Ok(()),
        0 => Err(Failure::invalid("no task to dump is given").hint("name it with --tree PID")),
        pid => Err(Failure::invalid(format!("{pid} is not a process id"))),
    }
}

/// Restores; the tasks run when this returns.
///
/// # Errors
/// If the caller has no rights; as [`torpor_engine::restore_last`]; if nobody says what the last round
/// is, where the settings name a socket of rounds.
pub fn restore(settings: &Settings, hooks: &mut dyn Hooks) -> Result<RestoreReport, Failure> {
    require_rights(settings)?;
    let result = match &settings.rounds {
        Some(socket) => rounds::restore(&settings.engine, socket, hooks),
        None => torpor_engine::restore_last(&settings.engine, hooks),
    };
    concluded(result, "Restore finished successfully. Tasks resumed.", "Restoring FAILED.")
}

/// Leaves a template behind.
///
/// # Errors
/// If the caller has no rights; as [`torpor_engine::keep_template`].
pub fn keep_template(settings: &Settings) -> Result<(), Failure> {
    require_rights(settings)?;
    let Some(file) = &settings.keep_template else { return Ok(()) };
    let result = torpor_engine::keep_template(&settings.engine, file);
    concluded(result, "The template is ready", "No template was made.").map(drop)
}

fn images(settings: &Settings) -> Result<ImageDir, Failure> {
    ImageDir::open(&settings.engine.images_dir).map_err(|e| Error::from(e).into())
}

/// Punches repeated pages out of a chain of images, which may be sealed.
///
/// # Errors
/// If an image is damaged, or no key opens it.
pub fn dedup(settings: &Settings) -> Result<Freed, Failure> {
    let mut images = images(settings)?;
    torpor_engine::seal::open(&mut images, &settings.engine)?;
    let bytes = torpor_engine::dedup::dedup_named(&images, &settings.engine)?;
    tracing::info!("Freed {bytes} bytes of pages");
    Ok(Freed { bytes })
}

/// Writes what this processor can do.
///
/// # Errors
/// If the image cannot be written.
pub(crate) fn cpuinfo_dump(settings: &Settings) -> Result<(), Failure> {
    Ok(torpor_engine::cpuinfo::dump(&images(settings)?)?)
}

/// Compares this processor with an image.
///
/// # Errors
/// If the image cannot be read; if this processor lacks something that the image names.
pub(crate) fn cpuinfo_check(settings: &Settings) -> Result<(), Failure> {
    let cap = settings.engine.cpu_cap.unwrap_or(CpuCap { fpu: true, cpu: false, ins: true });
    Ok(torpor_engine::cpuinfo::check(&images(settings)?, cap)?)
}

/// Turns this process, the parent of the restored root task, into `command`. Returns
/// only if that fails.
#[must_use]
pub(crate) fn become_parent(command: &[OsString]) -> Failure {
    let Some((program, args)) = command.split_first() else {
        return Failure::invalid("--exec-cmd names no program");
    };
    torpor_engine::open_files::give_back();
    let error = Command::new(program).args(args).exec();
    Failure::io(format_args!("--exec-cmd {}", program.display()), &error)
}

/// Waits until the task `pid` has ended, child or not, and reaps it if it is one.
///
/// # Errors
/// If the task cannot be opened or waited for, for another reason than that it has ended.
pub(crate) fn wait_for_end(pid: i32) -> Result<Option<torpor_sys::process::Status>, Failure> {
    let failed = |e: std::io::Error| Failure::io(format_args!("wait for task {pid}"), &e);
    let Some(task) = Pid::from_raw(pid).filter(|_| pid > 0) else {
        return Err(Failure::invalid(format!("{pid} is not a process id")));
    };
    let pidfd = match pidfd_open(task, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        // It may have ended and been reaped already.
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(e) => return Err(failed(e.into())),
    };
    wait_readable(&pidfd).map_err(failed)?;
    match torpor_sys::process::wait(pid, true) {
        Ok(status) => Ok(status.map(|(_, status)| status)),
        Err(e) if e.raw_os_error() == Some(libc::ECHILD) => Ok(None),
        Err(e) => Err(failed(e)),
    }
}

fn wait_readable(fd: &OwnedFd) -> std::io::Result<()> {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
