//! Bounded waiting: conditions are polled, never timed.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Polls until `look` finds something.
///
/// # Errors
/// What `look` reports, or that nothing was found within `limit`.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > end {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}
