//! The root file system that goes along with a container.

use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use super::link::unexpected;
use super::{Plan, Source};
use crate::error::{Error, Result};
use crate::files::Mirror;
use crate::runtime::configuration;
use crate::wire::message::{Reply, Request};

/// Rounds that files are sent in before those of memory.
const MAX_ROUNDS: u32 = 10;
/// What is sent as fast when the tasks are stopped.
const LITTLE: u64 = 1 << 20;

/// What the destination has of the root file system, if that is to go along: nothing yet.
///
/// # Errors
/// If it is not to be found.
pub(super) fn mirror(plan: &Plan) -> Result<Option<Mirror>> {
    let Some(container) = plan.container.as_ref().filter(|_| plan.with_rootfs) else {
        return Ok(None);
    };
    let text = configuration(&container.running()?.bundle)?;
    let config: Value =
        serde_json::from_str(&text).map_err(|error| Error::refused(error.to_string()))?;
    let root = config["root"]["path"].as_str().unwrap_or_default();
    Mirror::new(Path::new(root)).map(Some)
}

impl Source<'_> {
    /// Sends files until little is left that has changed meanwhile.
    pub(super) fn send_files_in_rounds(&mut self) -> Result<()> {
        let mut before = u64::MAX;
        for _ in 0..MAX_ROUNDS {
            let sent = self.send_files()?;
            if sent < LITTLE || sent >= before / 10 * 9 {
                break;
            }
            before = sent;
        }
        Ok(())
    }

    /// Sends what is different in the files by now; how many bytes that were.
    pub(super) fn send_files(&mut self) -> Result<u64> {
        let Some(files) = &mut self.files else { return Ok(0) };
        let (start, before) = (Instant::now(), self.link.meter.sent());
        let (link, cancel) = (&mut self.link, &self.cancel);
        files.tell(&mut |step| {
            if cancel.is_due() { Err(Error::Cancelled) } else { link.tell(step) }
        })?;
        self.link.say(&Request::Settle)?;
        match self.reply()? {
            Reply::Settled => {}
            reply => return Err(unexpected(reply)),
        }
        let sent = self.link.meter.sent() - before;
        self.files_bytes += sent;
        self.files_time = start.elapsed();
        Ok(sent)
    }
}
