//! What a dump or a restore is asked to do.

use std::path::PathBuf;

/// The options of a dump or restore.
#[derive(Debug, Default)]
pub struct Options {
    /// Directory of the images.
    pub images_dir: PathBuf,
}
