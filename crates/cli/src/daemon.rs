//! Programs that go on in the background.

use std::process::ExitCode;

use crate::failure::Failure;

/// Goes on in a child that has left the terminal; this process is done.
///
/// # Errors
/// If no child can be started. What goes wrong in `work` goes to the log.
pub(crate) fn into_background(
    work: impl FnOnce() -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    in_child(work)?;
    Ok(ExitCode::SUCCESS)
}

/// Lets a child that has left the terminal do some work, and returns its pid.
///
/// # Errors
/// If no child can be started. What goes wrong in `work` goes to the log.
pub(crate) fn in_child(work: impl FnOnce() -> Result<ExitCode, Failure>) -> Result<i32, Failure> {
    let child = || {
        let result = rustix::process::setsid()
            .map_err(|e| Failure::io("setsid", &e.into()))
            .and_then(|_| close_standard_files())
            .and_then(|()| work());
        match result {
            Ok(_) => 0,
            Err(failure) => {
                tracing::error!("{failure}");
                1
            }
        }
    };
    torpor_sys::process::fork(child).map_err(|e| Failure::io("fork", &e))
}

fn close_standard_files() -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::io("/dev/null", &e);
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| failed(e.into()))?;
    rustix::stdio::dup2_stdout(&null).map_err(|e| failed(e.into()))?;
    rustix::stdio::dup2_stderr(&null).map_err(|e| failed(e.into()))
}
