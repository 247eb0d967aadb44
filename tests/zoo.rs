//! Each program of the zoo in each of its modes, as a test of its own.

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use torpor_tests::case::{Case, Outcome};
use torpor_tests::{build, program, status};

/// How many of the cases that took longest are named in the end.
const SLOWEST: usize = 20;
/// How long each case took.
static TIMES: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

fn main() -> anyhow::Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    // A case waits more than it works: for processes to begin and to end, and for the kernel to clear away networks.
    let cores = std::thread::available_parallelism()?.get();
    arguments.test_threads.get_or_insert(2 * cores);
    let programs = if arguments.list { program::all()? } else { build::everything()? };
    let trials = Case::all(&programs).into_iter().map(trial).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
    times.sort_unstable_by(|a, b| b.cmp(a));
    for (time, name) in times.iter().take(SLOWEST) {
        println!("{:6.2} s  {name}", time.as_secs_f64());
    }
    Ok(conclusion.exit_code())
}

fn trial(case: Case) -> Trial {
    Trial::test(case.name(), move || {
        let begun = Instant::now();
        let outcome = case.run(Path::new(env!("CARGO_BIN_EXE_zoo")), false)?;
        let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        times.push((begun.elapsed(), case.name()));
        drop(times);
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
