//! Each program of the zoo in each of its modes, as a test of its own.

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;
use torpor_tests::case::{Case, Outcome};
use torpor_tests::{build, program, status};

fn main() -> anyhow::Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    // A case waits more than it works: for processes to begin and to end, and for the kernel to clear away networks.
    let cores = std::thread::available_parallelism()?.get();
    arguments.test_threads.get_or_insert(2 * cores);
    let programs = if arguments.list { program::all()? } else { build::everything()? };
    let trials = Case::all(&programs).into_iter().map(trial).collect();
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn trial(case: Case) -> Trial {
    Trial::test(case.name(), move || {
        let outcome = case.run(Path::new(env!("CARGO_BIN_EXE_zoo")), false)?;
        status::note(&case, &outcome)?;
        match outcome {
            Outcome::Fail(why) => Err(Failed::from(format!(
                "{why}\nkept in {}\nagain: {}",
                case.dir()?.display(),
                case.replay()
            ))),
            Outcome::Skip(why) => {
                println!("SKIPPED {}: {why}", case.name());
                Ok(())
            }
            Outcome::Pass | Outcome::Refused(_) => Ok(()),
        }
    })
}
