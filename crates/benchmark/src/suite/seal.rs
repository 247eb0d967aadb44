//! The file of the engine's options: empty, or with what seals images. Runtimes hand the environment that
//! names it on to the engine.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::cell::{Trouble, failed};
use crate::program;

/// How long a key may take.
const KEY: Duration = Duration::from_secs(10);

/// The file.
pub(crate) const OPTIONS: &str = "criu.conf";

/// What only a directory of sealed images has.
pub(crate) const SEAL: &str = "seal.img";

/// Writes options that seal nothing.
///
/// # Errors
/// If the directory cannot be written to.
pub(crate) fn plain(dir: &Path) -> Result<(), Trouble> {
    fs::write(dir.join(OPTIONS), "").map_err(failed)
}

/// Makes a key, and writes options that seal with it.
///
/// # Errors
/// If `torpor` makes no key, or something cannot be written.
pub(crate) fn sealing(dir: &Path, torpor: &Path) -> Result<(), Trouble> {
    let key = dir.join("key");
    // A key file is never overwritten.
    let _ = fs::remove_file(&key);
    let mut command = std::process::Command::new(torpor);
    let made = program::output(command.args(["key", "generate"]).arg(&key), KEY);
    let made = made.map_err(|error| failed(format!("torpor key generate: {error}")))?;
    let recipient = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr);
        return Err(failed(format!("torpor key generate: {}", said.trim())));
    }
    let text = format!("encrypt\nrecipient {recipient}\nidentity {}\n", key.display());
    fs::write(dir.join(OPTIONS), text).map_err(failed)
}
