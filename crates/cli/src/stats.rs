//! What a command has done, in figures: for a person (`--display-stats`), for programs (`--json`), and
//! for the daemon of a worker.

use std::io::Write as _;

use torpor_engine::{ADVICE, DumpReport, RestoreReport};
use torpor_images::proto::{DumpStatsEntry, RestoreStatsEntry};
use torpor_worker::{Outcome, Report};

use crate::failure::Failure;
use crate::options::Settings;

/// What has statistics.
pub trait Statistics {
    /// For a person: a line for each.
    fn lines(&self) -> Vec<String>;

    /// For programs.
    fn report(&self) -> Report;
}

/// Names of fields with their values, as a report has them.
fn report(numbers: Vec<(&'static str, u64)>) -> Report {
    let statistics = numbers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Report { statistics, ..Report::default() }
}

impl Statistics for DumpReport {
    fn lines(&self) -> Vec<String> {
        dump_lines(&self.stats)
    }

    fn report(&self) -> Report {
        Report { tasks: Some(self.tasks as u64), ..report(dump_numbers(&self.stats)) }
    }
}

impl Statistics for RestoreReport {
    fn lines(&self) -> Vec<String> {
        restore_lines(&self.stats)
    }

    fn report(&self) -> Report {
        Report { pid: Some(self.pid), ..report(restore_numbers(&self.stats)) }
    }
}

/// Space that is free again.
#[derive(Debug, Clone, Copy)]
pub struct Freed {
    /// How much.
    pub bytes: u64,
}

impl Statistics for Freed {
    fn lines(&self) -> Vec<String> {
        vec![format!("Freed: {} bytes", self.bytes)]
    }

    fn report(&self) -> Report {
        report(vec![("freed_bytes", self.bytes)])
    }
}

/// Prints what was done, as it is asked for. It stays done where that cannot be written, and the exit status says so.
pub fn display(settings: &Settings, of: &impl Statistics) {
    if settings.display_stats && !settings.json {
        let _ = writeln!(std::io::stdout(), "{}", of.lines().join("\n"));
    }
    done(settings, || of.report());
}

/// Prints for programs that all was done.
pub fn done(settings: &Settings, report: impl FnOnce() -> Report) {
    if settings.json {
        Outcome::done(report()).print();
    }
}

/// How something went, for programs.
#[must_use]
pub fn outcome(result: Result<Report, Failure>) -> Outcome {
    match result {
        Ok(report) => Outcome::done(report),
        Err(Failure { class, errno, text, hint, advice, .. }) => {
            let suffix = advice.as_ref().map_or(String::new(), |advice| [ADVICE, advice].concat());
            let text = text.strip_suffix(&suffix).unwrap_or(&text).to_owned();
            Outcome { class, errno, text, hint: advice.or(hint), report: Report::default() }
        }
    }
}

/// Logs the statistics, if they are asked for.
pub fn log(settings: &Settings, of: &impl Statistics) {
    if settings.display_stats {
        of.lines().iter().for_each(|line| tracing::info!("{line}"));
    }
}

fn dump_numbers(stats: &DumpStatsEntry) -> Vec<(&'static str, u64)> {
    let mut numbers = vec![
        ("freezing_time", stats.freezing_time.into()),
        ("frozen_time", stats.frozen_time.into()),
        ("memdump_time", stats.memdump_time.into()),
        ("memwrite_time", stats.memwrite_time.into()),
        ("pages_scanned", stats.pages_scanned),
        ("pages_skipped_parent", stats.pages_skipped_parent),
        ("pages_written", stats.pages_written),
        ("pages_lazy", stats.pages_lazy),
    ];
    let optional = [
        ("shpages_written", stats.shpages_written),
        ("cow_bytes", stats.torpor_cow_bytes),
        ("relative_pages", stats.torpor_relative_pages),
        ("compress_from_bytes", stats.torpor_compress_from_bytes),
        ("compress_to_bytes", stats.torpor_compress_to_bytes),
    ];
    numbers.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value?))));
    numbers.extend(dump_effort(stats).map(|(name, _, value)| (name, value)));
    numbers
}

/// A figure: its name for programs, what it is for people, and its value.
type Figure = (&'static str, &'static str, u64);

/// What an operation has cost besides time, as far as it is known.
fn effort(
    stops: Option<u64>,
    procfs_reads: Option<u64>,
    allocations: Option<u64>,
) -> impl Iterator<Item = Figure> {
    let all = [
        ("stops", "Stops of tasks", stops),
        ("procfs_reads", "Reads of procfs", procfs_reads),
        ("allocations", "Allocations", allocations),
    ];
    all.into_iter().filter_map(|(name, what, value)| Some((name, what, value?)))
}

fn dump_effort(stats: &DumpStatsEntry) -> impl Iterator<Item = Figure> {
    effort(stats.torpor_stops, stats.torpor_procfs_reads, stats.torpor_allocations)
}

fn restore_effort(stats: &RestoreStatsEntry) -> impl Iterator<Item = Figure> {
    effort(stats.torpor_stops, stats.torpor_procfs_reads, stats.torpor_allocations)
}

fn restore_numbers(stats: &RestoreStatsEntry) -> Vec<(&'static str, u64)> {
    let mut numbers = vec![
        ("pages_compared", stats.pages_compared),
        ("pages_skipped_cow", stats.pages_skipped_cow),
        ("pages_restored", stats.pages_restored()),
        ("restore_time", stats.restore_time.into()),
        ("forking_time", stats.forking_time.into()),
    ];
    numbers.extend(restore_effort(stats).map(|(name, _, value)| (name, value)));
    numbers
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
    lines.extend(dump_effort(stats).map(|(_, what, n)| format!("{what}: {n}")));
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
    lines.extend(stats.torpor_reading_time.map(|t| format!("Reading time: {t} us")));
    lines.extend(restore_effort(stats).map(|(_, what, n)| format!("{what}: {n}")));
    // Of sealed images only.
    lines.extend(stats.torpor_open_records_time.map(|t| format!("Entry opening time: {t} us")));
    lines.extend(stats.torpor_open_pages_time.map(|t| format!("Memory opening time: {t} us")));
    lines.extend(stats.torpor_verify_time.map(|t| format!("Verifying time: {t} us")));
    lines
}
