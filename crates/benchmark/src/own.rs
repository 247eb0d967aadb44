//! This program itself, as it is called by its other halves: the keeper, the registry, and the
//! programs that measure inside of a container.

use std::path::{Path, PathBuf};

use crate::image::ImageError;

/// The name of the program that is nothing but the benchmark.
const ALONE: &str = "torpor-benchmark";

/// The file of this program.
///
/// # Errors
/// If the kernel does not say which it is.
pub(crate) fn executable() -> Result<PathBuf, ImageError> {
    std::env::current_exe()
        .map_err(|error| ImageError::File { path: PathBuf::from("/proc/self/exe"), error })
}

/// The words that lead to the commands of the benchmark: `torpor` has it as one of its groups, and
/// the program that is nothing but the benchmark needs none.
#[must_use]
pub(crate) fn prefix() -> &'static [&'static str] {
    let alone = std::env::current_exe().is_ok_and(|path| name_of(&path) == ALONE);
    if alone { &[] } else { &["benchmark"] }
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The `torpor` that acts as `criu`: this program, or the one that lies beside it.
#[must_use]
pub(crate) fn torpor() -> Option<PathBuf> {
    let this = std::env::current_exe().ok()?;
    if name_of(&this) == "torpor" {
        return Some(this);
    }
    let beside = this.with_file_name("torpor");
    if beside.is_file() { Some(beside) } else { crate::image::find("torpor") }
}
