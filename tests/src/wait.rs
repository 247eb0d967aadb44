//! Bounded waiting: conditions are polled, never timed.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// How many times as long as elsewhere everything may take: `TORPOR_SLOWNESS` says so of an emulated
/// machine.
fn slowness() -> u32 {
    std::env::var("TORPOR_SLOWNESS").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Polls until `look` finds something.
///
/// # Errors
/// What `look` reports, or that nothing was found within `limit`, on a machine of ordinary speed.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let limit = limit * slowness();
    let end = Instant::now() + limit;
    // What is there soon is not waited for much longer than that.
    let mut pause = Duration::from_micros(200);
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > end {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(3));
    }
}
