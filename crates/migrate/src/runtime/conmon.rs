//! What stands before conmon, which Podman has look after a container that is restored.
//!
//! It is conmon that starts the runtime, and Podman gives it an environment of its own. So Podman is told of another
//! conmon: this program by the name [`NAME`], in a directory with all that the runtime is to find. It becomes the
//! real one.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};
use torpor_worker::tell;

use super::job::{CONFIGURATION, path};
use crate::error::{Context, Result};

/// The name of this program when it stands before conmon.
pub const NAME: &str = "torpor-conmon";
/// The real one, beside it.
const REAL: &str = "conmon";
/// What the real one is told besides, a word in each line.
const WORDS: &str = "conmon.words";

/// A conmon that starts a runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conmon {
    /// The program.
    pub program: PathBuf,
    /// Words for the restore of its runtime that Podman does not know.
    pub words: Vec<String>,
}

impl Conmon {
    /// Puts this program into the directory of a job's programs, before the real one: its path.
    ///
    /// # Errors
    /// If a link or the note of the real program cannot be made in there.
    pub fn put(&self, bin: &Path, own: &Path) -> Result<PathBuf> {
        let failed = || bin.display().to_string();
        symlink(&self.program, bin.join(REAL)).context(failed)?;
        symlink(own, bin.join(NAME)).context(failed)?;
        let lines = self.words.iter().map(|word| format!("--runtime-opt\n{word}\n"));
        fs::write(bin.join(WORDS), lines.collect::<String>()).context(failed)?;
        Ok(bin.join(NAME))
    }
}

/// Becomes the conmon that is beside the program of this path.
#[must_use]
pub fn run(program: &Path, args: impl Iterator<Item = OsString>) -> ExitCode {
    let bin = program.parent().unwrap_or(Path::new("/"));
    let mut command = Command::new(bin.join(REAL));
    let words = fs::read_to_string(bin.join(WORDS)).unwrap_or_default();
    command
        .args(args)
        .args(words.lines())
        .env("PATH", path(bin))
        .env("CRIU_CONFIG_FILE", bin.join(CONFIGURATION));
    let error = command.exec();
    tell!("Error: {}: {error}", bin.join(REAL).display());
    ExitCode::FAILURE
}
