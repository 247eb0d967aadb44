//! `stats-dump` and `stats-restore`.

use torpor_images::proto::StatsEntry;
use torpor_images::{ImageDir, kind};

use crate::error::Result;
use crate::options::Options;

/// Writes `stats-dump` into the work directory.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_dump(opts: &Options, stats: &StatsEntry) -> Result<()> {
    Ok(place(opts)?.write_one(kind::STATS_DUMP, 0, stats)?)
}

/// Writes `stats-restore` into the work directory.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_restore(opts: &Options, stats: &StatsEntry) -> Result<()> {
    Ok(place(opts)?.write_one(kind::STATS_RESTORE, 0, stats)?)
}

/// Where statistics go: to the working directory, or to the images if there is none.
fn place(opts: &Options) -> Result<ImageDir> {
    match &opts.work_dir {
        Some(dir) => Ok(ImageDir::open(dir)?),
        None => opts.images(),
    }
}
