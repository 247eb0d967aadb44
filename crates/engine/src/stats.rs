//! `stats-dump` and `stats-restore`.

use torpor_images::proto::StatsEntry;
use torpor_images::{ImageDir, kind};

use crate::error::Result;
use crate::options::Options;

/// Writes `stats-dump` into the work directory.
///
/// # Errors
/// The file's.
pub fn write_dump(opts: &Options, stats: &StatsEntry) -> Result<()> {
    Ok(ImageDir::open(opts.work_dir())?.write_one(kind::STATS_DUMP, 0, stats)?)
}

/// Writes `stats-restore` into the work directory.
///
/// # Errors
/// The file's.
pub fn write_restore(opts: &Options, stats: &StatsEntry) -> Result<()> {
    Ok(ImageDir::open(opts.work_dir())?.write_one(kind::STATS_RESTORE, 0, stats)?)
}
