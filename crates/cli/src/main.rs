//! The `torpor` program, `criu` and `crit`.

use std::process::ExitCode;

/// Reports say how often an operation has allocated.
#[global_allocator]
static HEAP: torpor_sys::heap::Counted = torpor_sys::heap::Counted;

fn main() -> ExitCode {
    torpor_cli::program::main(std::env::args_os())
}
