//! The network namespace that a container of runc is given.

use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use serde_json::{Value, json};

use crate::bundle::Bundle;
use crate::error::{Context, Error, Result};

/// Where `ip netns` keeps network namespaces by their names.
const NAMED: &str = "/run/netns";
/// The type of the file system of namespaces (`NSFS_MAGIC`, linux/magic.h).
const NSFS: u64 = 0x6e73_6673;

/// The file of the network namespace of this name (`ip netns`), or at this path.
///
/// # Errors
/// If there is none.
pub fn namespace(name: &str) -> Result<PathBuf> {
    let path = if name.contains('/') { name.into() } else { Path::new(NAMED).join(name) };
    let kind = statfs(&path).context(|| format!("the network {}", path.display()))?.f_type;
    match u64::try_from(kind) {
        Ok(NSFS) => Ok(path),
        _ => Err(Error::new(format!("{} is no network namespace", path.display()))
            .hint("ip netns add NAME makes one")),
    }
}

impl Bundle {
    /// The same with a container that lives in this network namespace.
    ///
    /// # Errors
    /// If the container has the network of the host.
    pub fn in_network(mut self, namespace: Option<&Path>) -> Result<Self> {
        let Some(namespace) = namespace else { return Ok(self) };
        let mut all = self.config["linux"]["namespaces"].as_array_mut().into_iter().flatten();
        let network = all.find(|other| other["type"] == "network").ok_or_else(|| {
            Error::new("the container has the network of this host, and can have no other")
        })?;
        network["path"] = json!(namespace);
        Ok(self)
    }

    /// Whether the network namespace of the container is made with it.
    #[must_use]
    pub fn makes_network(&self) -> bool {
        let mut all = self.config["linux"]["namespaces"].as_array().into_iter().flatten();
        all.any(|other| other["type"] == "network" && no_path(other))
    }
}

fn no_path(namespace: &Value) -> bool {
    namespace["path"].as_str().is_none_or(str::is_empty)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_network_is_a_namespace() {
        let own = format!("/proc/{}/ns/net", std::process::id());
        assert_eq!(namespace(&own).unwrap(), Path::new(&own));
        for (name, reason) in [("/etc/passwd", "is no network namespace"), ("absent", NAMED)] {
            let error = namespace(name).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_container_gets_a_network() {
        let config = json!({"linux": {"namespaces": [{"type": "pid"}, {"type": "network"}]}});
        let bundle = |config| Bundle::unread(Path::new("/none"), config);
        let plain = bundle(config);
        assert!(plain.makes_network());
        let given = plain.in_network(Some(Path::new("/run/netns/a"))).unwrap();
        assert!(!given.makes_network());
        assert_eq!(given.config["linux"]["namespaces"][1]["path"], "/run/netns/a");
        let of_host = bundle(json!({"linux": {"namespaces": [{"type": "pid"}]}}));
        assert!(of_host.in_network(Some(Path::new("/run/netns/a"))).is_err());
    }
}
