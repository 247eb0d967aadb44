//! The benchmark without the engine: for hosts, and for images, that need nothing else.

use std::process::ExitCode;

use clap::Parser;
use torpor_benchmark::BenchmarkCommand;

/// Measure container runtimes through the CRI.
#[derive(Debug, Parser)]
#[command(name = "torpor-benchmark", version)]
struct Arguments {
    #[command(subcommand)]
    command: BenchmarkCommand,
}

fn main() -> ExitCode {
    torpor_benchmark::run(Arguments::parse().command).unwrap_or_else(|outcome| {
        if std::env::args().any(|word| word == "--json") {
            outcome.print();
        }
        eprintln!("Error: {}", outcome.text);
        ExitCode::FAILURE
    })
}
