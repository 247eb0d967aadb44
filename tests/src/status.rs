//! The outcomes of all cases, kept as files, and the compatibility table made from them.

use crate::build;
use crate::case::{Case, Outcome};
use crate::program::{Mode, Program};
use anyhow::Result;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// The modes that have a column in the compatibility table.
const MODES: [Mode; 11] = [
    Mode::Plain,
    Mode::LeaveRunning,
    Mode::Cow,
    Mode::Rounds,
    Mode::Lazy,
    Mode::Compressed,
    Mode::Foreign,
    Mode::PidNs,
    Mode::Ns,
    Mode::Sealed,
    Mode::UserNs,
];

fn path(case: &Case) -> Result<PathBuf> {
    Ok(build::area()?.join("status").join(&case.program.name).join(case.mode.to_string()))
}

/// Notes the outcome of a case.
///
/// # Errors
/// It cannot be written.
pub fn note(case: &Case, outcome: &Outcome) -> Result<()> {
    let path = path(case)?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    Ok(std::fs::write(path, outcome.to_string())?)
}

/// The last outcome of a case, if it has run.
fn last(program: &Program, mode: Mode) -> Result<Option<Outcome>> {
    let path = path(&Case { program: program.clone(), mode })?;
    Ok(std::fs::read_to_string(path).ok().map(|text| Outcome::parse(&text)))
}

/// All outcomes as JSON: program, then mode, then the verdict and its reason.
///
/// # Errors
/// See [`build::area`].
pub fn json(programs: &[Program]) -> Result<Value> {
    let mut all = serde_json::Map::new();
    for program in programs {
        let mut modes = serde_json::Map::new();
        for mode in Mode::ALL {
            if let Some(outcome) = last(program, mode)? {
                modes.insert(mode.to_string(), Value::from(outcome.to_string()));
            }
        }
        let entry = json!({ "area": program.area, "shows": program.shows, "modes": modes });
        all.insert(program.name.clone(), entry);
    }
    Ok(Value::Object(all))
}

/// How many cases came out how, as a line.
///
/// # Errors
/// See [`build::area`].
pub fn summary(programs: &[Program]) -> Result<String> {
    let mut text = String::new();
    for mode in Mode::ALL {
        let (mut good, mut refused, mut skipped, mut failed) = (0, 0, 0, 0);
        for program in programs {
            match last(program, mode)? {
                Some(Outcome::Pass) => good += 1,
                Some(Outcome::Refused(_)) => refused += 1,
                Some(Outcome::Skip(_)) => skipped += 1,
                Some(Outcome::Fail(_)) => failed += 1,
                None => {}
            }
        }
        let _ = writeln!(
            text,
            "{mode:>14}: {good} pass, {refused} refused as they should, {failed} fail, {skipped} skipped"
        );
    }
    Ok(text)
}

/// The rows of a compatibility table that the last run contradicts. What was not run, or could not be
/// where the table was made, is not judged, but for whether the table knows that it is to be run.
///
/// # Errors
/// See [`build::area`].
pub fn differing(programs: &[Program], written: &str) -> Result<Vec<String>> {
    fn cells(line: &str) -> Option<(&str, Vec<&str>)> {
        let mut cells: Vec<&str> = line.split(" | ").collect();
        let program = cells.pop()?;
        let last = cells.len().checked_sub(MODES.len())?;
        Some((program, cells.split_off(last)))
    }
    let rows: std::collections::HashMap<_, _> = written.lines().filter_map(cells).collect();
    let now = table(programs)?;
    let differs = |line: &&str| {
        cells(line).is_some_and(|(program, outcomes)| match rows.get(program) {
            Some(old) => outcomes.iter().zip(old).any(|(new, old)| match (*new, *old) {
                ("?", other) | (other, "?") => other == "–",
                (new, old) => new != old,
            }),
            None => true,
        })
    };
    Ok(now.lines().filter(differs).map(str::to_owned).collect())
}

/// The compatibility table.
///
/// # Errors
/// See [`build::area`].
pub fn table(programs: &[Program]) -> Result<String> {
    let mut text = String::from(
        "# What Torpor keeps\n\n\
         Generated from the tests' outcomes by `make docs`; do not edit. Each row is a program of\n\
         `zoo/` that sets up a state, is dumped and restored, and verifies that state; what can be\n\
         seen of it from outside is compared as well.\n\n\
         **yes**: kept. **refused**: the dump is refused with a reason and the task goes on.\n\
         **no**: fails. **–**: does not apply in this mode. **?**: not run on the machine that made this.\n\n\
         What becomes of each field that the kernel has of a task is in [task-state.md](task-state.md).\n",
    );
    let mut areas: Vec<&str> = programs.iter().map(|program| program.area.as_str()).collect();
    areas.sort_unstable();
    areas.dedup();
    for area in areas {
        let _ = writeln!(text, "\n## {area}\n");
        text.push_str(
            "| behaviour | host | left running | copy-on-write | rounds | lazy | compressed | CRIU's form | pid ns | container | sealed | user ns | program |\n",
        );
        text.push_str(
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        );
        for program in programs.iter().filter(|program| program.area == area) {
            let _ = write!(text, "| {} |", program.shows.replace('|', "\\|"));
            for mode in MODES {
                let cell = match last(program, mode)? {
                    _ if !program.modes.contains(&mode) => "–",
                    Some(Outcome::Pass) => "yes",
                    Some(Outcome::Refused(_)) => "refused",
                    Some(Outcome::Fail(_)) => "**no**",
                    Some(Outcome::Skip(_)) | None => "?",
                };
                let _ = write!(text, " {cell} |");
            }
            let _ = writeln!(text, " [{0}](../zoo/{0}.c) |", program.name);
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use crate::program;

    /// The last group of tests compares the table with outcomes: half an hour later.
    #[test]
    fn the_table_knows_what_each_program_is_tried_in() {
        let table = program::repository().join("docs/compatibility.md");
        let table = std::fs::read_to_string(table).unwrap();
        let differing = super::differing(&program::all().unwrap(), &table).unwrap();
        assert!(differing.is_empty(), "make docs\n{}", differing.join("\n"));
    }
}
