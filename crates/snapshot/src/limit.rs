//! The memory limit of a container, which may be what ends its start.

use std::fs;

use crate::bundle::Bundle;
use crate::error::Error;
use crate::progress::size;

/// A start that the kernel may end for want of memory.
#[derive(Debug)]
pub struct Watch {
    /// The limit of the container, in bytes.
    limit: Option<u64>,
    /// How many processes the kernel had killed for want of memory when the start began.
    before: Option<u64>,
}

impl Watch {
    /// Watches the start of a container of `bundle`.
    #[must_use]
    pub fn of(bundle: &Bundle) -> Self {
        let limit = bundle.config["linux"]["resources"]["memory"]["limit"].as_u64();
        Self { limit, before: killed() }
    }

    /// Why the start has failed, where `error` says only that something was gone. A limit is of a cgroup that goes
    /// with the container, so it is told by what the kernel has killed meanwhile, on the whole machine.
    #[must_use]
    pub fn cause(&self, error: Error) -> Error {
        match self.limit {
            Some(limit) if killed() > self.before => Error::new(format!(
                "killed by the memory limit of the container ({}): {error}",
                size(limit)
            ))
            .hint("raise linux.resources.memory.limit in its config.json (torpor snapshot inspect shows its memory)"),
            _ => error,
        }
    }
}

/// How many processes the kernel has killed for want of memory, here or in a cgroup.
fn killed() -> Option<u64> {
    let counters = fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_has_a_limit_is_killed_by_it() {
        let cause = |config, before| {
            let limit = Watch::of(&Bundle::unread(Path::new("/none"), config)).limit;
            Watch { limit, before }.cause(Error::new("gone")).to_string()
        };
        let limited = json!({"linux": {"resources": {"memory": {"limit": 30_000_000}}}});
        let said = cause(limited.clone(), None);
        assert_eq!(said, "killed by the memory limit of the container (30 MB): gone");
        assert_eq!(cause(limited, Some(u64::MAX)), "gone");
        assert_eq!(cause(json!({}), None), "gone");
    }
}
