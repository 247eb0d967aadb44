//! Cases that need a process for themselves, with one thread: the engine forks, and whoever traces waits
//! for any of its children.

use anyhow::{Result, bail};
use libtest_mimic::{Arguments, Trial};
use std::panic::catch_unwind;
use std::process::ExitCode;
use torpor_sys::process::{Status, fork, wait};

/// Runs those of `cases`, by name, that the command line asks for, as `cargo test` does, one after the other: the
/// `main` of a test program without the usual harness, whose threads would be in the way. A case fails by a
/// panic.
#[must_use]
pub fn main(cases: &[(&'static str, fn())]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // In this thread, and in no other.
    arguments.test_threads = Some(1);
    let trial = |&(name, case): &(&'static str, fn())| Trial::test(name, move || Ok(alone(case)?));
    libtest_mimic::run(&arguments, cases.iter().map(trial).collect()).exit_code()
}

/// Runs a case in a child of this process, which must have one thread.
fn alone(case: fn()) -> Result<()> {
    let pid = fork(|| i32::from(catch_unwind(case).is_err()))?;
    match wait(pid, true)? {
        Some((_, Status::Exited(0))) => Ok(()),
        Some((_, Status::Exited(1))) => bail!("it says above what is wrong"),
        other => bail!("it did not come to its end: {other:?}"),
    }
}
