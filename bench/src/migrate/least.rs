//! What the kernel, the disk and the link take of a pause, whatever moves a service: measured beside each migration.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use serde_json::Value;

use crate::floor;

/// Bytes of a record of a migration, about.
const RECORD: usize = 1 << 10;

/// Milliseconds before anything moves: all tasks under `root` are stopped and looked at, and a decision is written down in
/// `dir` for each of both hosts.
pub fn of_hosts(root: u32, dir: &Path) -> Result<f64> {
    let stopped = floor::stop_and_look(root.cast_signed())?;
    let start = Instant::now();
    for _ in 0..2 {
        write_down(dir)?;
    }
    Ok((stopped + start.elapsed().as_secs_f64()) * 1e3)
}

/// A file that is written anew, and on the disk in whole.
fn write_down(dir: &Path) -> Result<()> {
    let [new, path] = ["least.new", "least"].map(|name| dir.join(name));
    let mut file = File::create(&new)?;
    file.write_all(&[b'x'; RECORD])?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    File::open(dir)?.sync_all()?;
    Ok(fs::remove_file(path)?)
}

/// Milliseconds in which a link of so many Gbit/s passes the last round of a migration on. In a lazy mode its pages come later.
pub fn of_link(report: &Value, gigabits: u32) -> f64 {
    let is_lazy = ["post-copy", "hybrid"].iter().any(|mode| report["mode"] == *mode);
    let last = report["rounds"].as_array().and_then(|rounds| rounds.last());
    let bytes = last.and_then(|round| round["bytes"].as_f64()).unwrap_or_default();
    if is_lazy || gigabits == 0 { 0.0 } else { bytes * 8.0 / f64::from(gigabits) / 1e6 }
}
