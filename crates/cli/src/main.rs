//! The `torpor` program, `criu` and `crit`.

use std::process::ExitCode;

fn main() -> ExitCode {
    torpor_cli::program::main(std::env::args_os())
}
