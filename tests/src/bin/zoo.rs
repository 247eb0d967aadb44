//! Runs cases of the zoo by hand, and shows what came out of the last runs.
//!
//!     zoo                       lists the programs
//!     zoo PROGRAM [MODE] [--keep]   runs the program in a mode, or in all of its modes
//!     zoo build                 compiles the programs
//!     zoo status [--json|--table|--check FILE]   what the last run of each case gave

use anyhow::{Result, bail};
use std::process::ExitCode;
use torpor_tests::case::{Case, Outcome};
use torpor_tests::{build, fault, inside, program, status};

fn main() -> Result<ExitCode> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let keep = args.iter().any(|arg| arg == "--keep");
    args.retain(|arg| arg != "--keep");
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        [] => list()?,
        ["build"] => drop(build::everything()?),
        ["status"] => print!("{}", status::summary(&program::all()?)?),
        ["status", "--json"] => println!("{:#}", status::json(&program::all()?)?),
        ["status", "--check", table] => {
            let differing = status::differing(&program::all()?, &std::fs::read_to_string(table)?)?;
            if !differing.is_empty() {
                bail!("{table} tells of other outcomes; make docs\n{}", differing.join("\n"));
            }
        }
        ["status", "--table"] => print!("{}", status::table(&program::all()?)?),
        ["--inside", name, mode] => {
            let case = Case { program: program::find(name)?, mode: mode.parse()? };
            inside::run(&case)?;
        }
        ["--fault", kind, seed] => fault::inside(kind, seed.parse()?)?,
        [name] => return run(Case::all(&[program::find(name)?]), keep),
        [name, mode] => {
            let cases = Case::all(&[program::find(name)?]);
            let asked = format!("{name}::{mode}");
            let cases: Vec<Case> = cases.into_iter().filter(|case| case.name() == asked).collect();
            if cases.is_empty() {
                bail!("{name} has no mode {mode}");
            }
            return run(cases, keep);
        }
        _ => bail!(
            "usage: zoo [PROGRAM [MODE] [--keep] | build | status [--json|--table|--check FILE]]"
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn list() -> Result<()> {
    for program in program::all()? {
        println!("{:24} {}: {}", program.name, program.area, program.shows);
    }
    Ok(())
}

fn run(cases: Vec<Case>, keep: bool) -> Result<ExitCode> {
    build::everything()?;
    let mut code = ExitCode::SUCCESS;
    for case in cases {
        let outcome = case.run(&std::env::current_exe()?, keep)?;
        status::note(&case, &outcome)?;
        println!("{}: {outcome}", case.name());
        if keep || matches!(outcome, Outcome::Fail(_)) {
            println!("  kept in {}", case.dir()?.display());
        }
        if matches!(outcome, Outcome::Fail(_)) {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
