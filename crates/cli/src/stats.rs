//! The statistics that a dump or restore leaves behind, for `--display-stats`.

use torpor_images::proto::{DumpStatsEntry, RestoreStatsEntry, StatsEntry};
use torpor_images::{ImageDir, kind};

use crate::failure::Failure;
use crate::options::Settings;

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Of a dump or pre-dump.
    Dump,
    /// Of a restore.
    Restore,
}

/// Prints the statistics, if they are asked for.
///
/// # Errors
/// If they cannot be read.
pub fn display(settings: &Settings, which: Which) -> Result<(), Failure> {
    lines(settings, which)?.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Logs the statistics, if they are asked for.
///
/// # Errors
/// If they cannot be read.
pub fn log(settings: &Settings, which: Which) -> Result<(), Failure> {
    lines(settings, which)?.iter().for_each(|line| tracing::info!("{line}"));
    Ok(())
}

fn lines(settings: &Settings, which: Which) -> Result<Vec<String>, Failure> {
    if !settings.display_stats {
        return Ok(Vec::new());
    }
    let failed = |e: torpor_images::Error| Failure::from(torpor_engine::Error::from(e));
    let dir = ImageDir::open(settings.engine.work_dir()).map_err(failed)?;
    let kind = match which {
        Which::Dump => kind::STATS_DUMP,
        Which::Restore => kind::STATS_RESTORE,
    };
    let entry: StatsEntry = dir.read_one(kind, 0).map_err(failed)?;
    let dump = entry.dump.iter().flat_map(dump_lines);
    Ok(dump.chain(entry.restore.iter().flat_map(restore_lines)).collect())
}

fn dump_lines(stats: &DumpStatsEntry) -> Vec<String> {
    let mut lines = vec![
        "Displaying dump stats:".to_owned(),
        format!("Freezing time: {} us", stats.freezing_time),
        format!("Frozen time: {} us", stats.frozen_time),
        format!("Memory dump time: {} us", stats.memdump_time),
        format!("Memory write time: {} us", stats.memwrite_time),
        format!("IRMAP resolve time: {} us", stats.irmap_resolve()),
        format!("Memory pages scanned: {}", stats.pages_scanned),
        format!("Memory pages skipped from parent: {}", stats.pages_skipped_parent),
        format!("Memory pages written: {}", stats.pages_written),
        format!("Lazy memory pages: {}", stats.pages_lazy),
    ];
    lines.extend(stats.torpor_cow_bytes.map(|n| format!("Copy-on-write memory: {n} bytes")));
    lines.extend(stats.torpor_relative_pages.map(|n| format!("Memory pages of relatives: {n}")));
    // Of compressed images only.
    lines.extend(stats.torpor_compress_from_bytes.map(|from| {
        let to = stats.torpor_compress_to_bytes();
        format!("Memory compressed: {from} bytes to {to} bytes")
    }));
    lines.extend(stats.torpor_compress_time.map(|t| format!("Memory compressing time: {t} us")));
    // Of sealed images only.
    lines.extend(stats.torpor_seal_records_time.map(|t| format!("Entry sealing time: {t} us")));
    lines.extend(stats.torpor_seal_pages_time.map(|t| format!("Memory sealing time: {t} us")));
    lines
}

fn restore_lines(stats: &RestoreStatsEntry) -> Vec<String> {
    let mut lines = vec![
        "Displaying restore stats:".to_owned(),
        format!("Pages compared: {}", stats.pages_compared),
        format!("Pages skipped COW: {}", stats.pages_skipped_cow),
        format!("Pages restored: {}", stats.pages_restored()),
        format!("Restore time: {} us", stats.restore_time),
        format!("Forking time: {} us", stats.forking_time),
    ];
    // Of sealed images only.
    lines.extend(stats.torpor_open_records_time.map(|t| format!("Entry opening time: {t} us")));
    lines.extend(stats.torpor_open_pages_time.map(|t| format!("Memory opening time: {t} us")));
    lines.extend(stats.torpor_verify_time.map(|t| format!("Verifying time: {t} us")));
    lines
}
