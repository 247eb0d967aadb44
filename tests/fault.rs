//! Whatever goes wrong, nothing is lost: see [`torpor_tests::fault`].

use libtest_mimic::{Arguments, Trial};
use std::path::Path;
use std::process::ExitCode;
use torpor_tests::{build, fault};

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::from_args();
    if !arguments.list {
        build::everything()?;
    }
    let trial = |kind: &'static str| {
        Trial::test(kind, || Ok(fault::run(Path::new(env!("CARGO_BIN_EXE_zoo")), kind)?))
    };
    let trials = fault::KINDS.into_iter().map(trial).collect();
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}
