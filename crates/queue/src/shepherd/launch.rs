//! The last step before a job's first instruction: the process that becomes the job.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::fs::Mode;
use rustix::process::{Gid, Uid, getegid, geteuid, getgroups, setsid, umask};
use rustix::thread::{UnshareFlags, set_thread_gid, set_thread_groups, set_thread_uid};
use torpor_worker::tell;

use crate::files::{self, JobDir};
use crate::rlimits;
use crate::spec::Spec;

/// What a shell answers where a command is not there, or cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// The environment variable by which a job knows its number.
pub(super) const NUMBER: &str = "TORPOR_JOB";

/// Becomes the job in directory `dir`; returns only if that fails.
///
/// `ready` is a descriptor that the shepherd waits to be closed.
pub(crate) fn launch(dir: PathBuf, ready: i32) -> ExitCode {
    let dir = JobDir::at(dir);
    // Closed by the kernel at the moment at which this process becomes the job.
    let ready = torpor_sys::inherited::duplicate(ready);
    match ready.map_err(|e| e.to_string()).and_then(|ready| Ok((prepare(&dir)?, ready))) {
        Ok((spec, _ready)) => become_job(&spec),
        Err(text) => {
            tell!("torpor queue: {text}");
            ExitCode::from(NOT_RUN)
        }
    }
}

/// What to become, with all about this process as the job wants it.
fn prepare(dir: &JobDir) -> Result<Spec, String> {
    let spec = super::read_spec(dir).map_err(|e| format!("read the job: {e}"))?;
    let cgroups = super::cgroups(dir);
    cgroups.enter(std::process::id()).map_err(|e| format!("enter the job's cgroup: {e}"))?;
    // System V objects are a part of a checkpoint only if they are the job's own.
    let flags = i32::try_from(UnshareFlags::NEWIPC.bits()).map_err(|e| e.to_string())?;
    torpor_sys::ns::unshare_namespaces(flags).map_err(|e| format!("an IPC namespace: {e}"))?;
    setsid().map_err(|e| format!("make a session: {e}"))?;
    // A process that loses its parent stays a descendant of the job's first process, and so a part
    // of each checkpoint.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|e| format!("become a subreaper: {e}"))?;
    let own = spec.input.is_some();
    begin_as_user(&spec, if own { Path::new(files::WORK) } else { &spec.dir })?;
    Ok(spec)
}

/// Becomes a process of the job's user, as it begins in this directory.
fn begin_as_user(spec: &Spec, start: &Path) -> Result<(), String> {
    // Who is in a session may use the keys of its keyring: those of whoever has started the daemon, and of all other jobs.
    torpor_sys::process::join_new_keyring().map_err(|e| format!("a keyring: {e}"))?;
    umask(Mode::from_raw_mode(spec.umask & 0o777));
    become_user(spec).map_err(|e| format!("become user {}: {e}", spec.user.uid))?;
    std::env::set_current_dir(start).map_err(|e| format!("enter {}: {e}", start.display()))?;
    // What the daemon was started with is not the job's, and would be in the way of its
    // checkpoints.
    torpor_sys::inherited::close_on_exec().map_err(|e| format!("close descriptors: {e}"))?;
    // Nor are the signals that it ignored, or that the C library has ignored to start this process.
    torpor_sys::process::reset_signals().map_err(|e| format!("reset signals: {e}"))?;
    // The last, since they bind this process as well.
    rlimits::take(&spec.rlimits, spec.nice).map_err(|e| format!("limits of resources: {e}"))
}

/// Becomes the user that a job runs as. This process has one thread.
///
/// # Errors
/// `EPERM`, if this process may not become another user, or not have other groups.
pub(super) fn become_user(spec: &Spec) -> rustix::io::Result<()> {
    let user = &spec.user;
    let groups: Vec<Gid> = user.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    if user.uid == geteuid().as_raw()
        && user.gid == getegid().as_raw()
        && getgroups().is_ok_and(|own| own == groups)
    {
        return Ok(());
    }
    // This process has one thread, so that what is a thread's is the process's.
    set_thread_groups(&groups)?;
    set_thread_gid(Gid::from_raw(user.gid))?;
    set_thread_uid(Uid::from_raw(user.uid))
}

/// Becomes the command by which the job in directory `dir` saves its state and ends; returns only if that fails. It has the
/// job's user and its limits, and `root` is the job's first process.
pub(crate) fn vacate(dir: PathBuf, root: i32) -> ExitCode {
    let failed = |text: String| {
        tell!("torpor queue: {text}");
        ExitCode::from(NOT_RUN)
    };
    let (spec, command) = match prepare_to_vacate(&JobDir::at(dir)) {
        Ok(prepared) => prepared,
        Err(text) => return failed(text),
    };
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &command]);
    failed(exec_in(shell, &spec, Some(("TORPOR_JOB_PID", root.to_string()))).to_string())
}

/// The job and its command, with all about this process as the command wants it.
fn prepare_to_vacate(dir: &JobDir) -> Result<(Spec, String), String> {
    let spec = super::read_spec(dir).map_err(|e| format!("read the job: {e}"))?;
    let command = spec.preempt_cmd.clone().ok_or("the job has no command for giving way")?;
    // What this process has of memory so far does not count for the job.
    let cgroups = super::cgroups(dir);
    cgroups.enter(std::process::id()).map_err(|e| format!("enter the job's cgroup: {e}"))?;
    begin_as_user(&spec, &spec.dir)?;
    Ok((spec, command))
}

fn become_job(spec: &Spec) -> ExitCode {
    let Some((program, args)) = spec.command.split_first() else {
        return ExitCode::from(NOT_RUN);
    };
    let mut job = Command::new(program);
    job.args(args);
    let error = exec_in(job, spec, std::env::var_os(NUMBER).map(|number| (NUMBER, number)));
    tell!("{}", complaint(program, &error).trim_end());
    let not_found = error.kind() == std::io::ErrorKind::NotFound;
    ExitCode::from(if not_found { NOT_FOUND } else { NOT_RUN })
}

/// Becomes a program, with the environment of the job and `more`; returns only if that fails. The program is looked for in
/// the `PATH` that it gets.
fn exec_in(
    mut program: Command,
    spec: &Spec,
    more: Option<(&str, impl AsRef<OsStr>)>,
) -> io::Error {
    program.env_clear().envs(spec.env.iter().map(|(k, v)| (k, v))).envs(more).exec()
}

fn complaint(program: &str, error: &io::Error) -> String {
    format!("torpor queue: {program}: {error}\n")
}

/// What a job's standard error says where its program is not there.
#[must_use]
pub(crate) fn not_found(program: &str) -> String {
    complaint(program, &rustix::io::Errno::NOENT.into())
}
