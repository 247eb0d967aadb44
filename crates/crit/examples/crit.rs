//! CRIU's image tool.
fn main() -> std::process::ExitCode {
    torpor_crit::crit(std::env::args_os())
}
