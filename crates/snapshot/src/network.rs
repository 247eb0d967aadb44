//! The network namespace that a container of runc is given.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use serde_json::{Value, json};

use crate::bundle::Bundle;
use crate::error::{Context, Error, Result};

/// Where `ip netns` keeps network namespaces by their names.
const NAMED: &str = "/run/netns";

/// The file of the network namespace of this name (`ip netns`), or at this path.
///
/// # Errors
/// If nothing is at the path, or no network namespace.
pub fn namespace(name: &str) -> Result<PathBuf> {
    let path = if name.contains('/') { name.into() } else { Path::new(NAMED).join(name) };
    let kind = statfs(&path).context(|| format!("the network {}", path.display()))?.f_type;
    match kind {
        libc::NSFS_MAGIC => Ok(path),
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
    pub(crate) fn makes_network(&self) -> bool {
        let mut all = self.config["linux"]["namespaces"].as_array().into_iter().flatten();
        all.any(|other| other["type"] == "network" && no_path(other))
    }
}

fn no_path(namespace: &Value) -> bool {
    namespace["path"].as_str().is_none_or(str::is_empty)
}

/// Connections between processes of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inner {
    /// All of them.
    All,
    /// Those that are not over the loopback device: by addresses that another container may not have.
    Addressed,
}

/// The ports at which processes of a container are connected with each other. In the network of this host it cannot be
/// told of whom the ends are: there are none.
#[must_use]
pub(crate) fn inner_ports(pid: u32, which: Inner) -> BTreeSet<u16> {
    let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    if network(&pid.to_string()) == network("self") {
        return BTreeSet::new();
    }
    let read = |kind| fs::read_to_string(format!("/proc/{pid}/net/{kind}")).unwrap_or_default();
    connected_within(&(read("tcp") + &read("tcp6")), which)
}

/// The ports that something listens at, of connections of which both ends are in the kernel's tables of sockets.
fn connected_within(tables: &str, which: Inner) -> BTreeSet<u16> {
    // IPv4 in IPv6, as the tables write it.
    const MAPPED: &str = "0000000000000000FFFF0000";
    let end = |text: &'_ str| text.strip_prefix(MAPPED).unwrap_or(text).to_owned();
    let port = |end: &str| u16::from_str_radix(end.rsplit(':').next().unwrap_or(""), 16).ok();
    let (mut listening, mut connected) = (BTreeSet::new(), BTreeSet::new());
    for line in tables.lines() {
        let mut fields = line.split_whitespace().skip(1);
        let (Some(from), Some(to), Some(state)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        match state {
            "0A" => listening.extend(port(from)),
            "01" => drop(connected.insert((end(from), end(to)))),
            _ => {}
        }
    }
    // 127.0.0.0/8 and ::1.
    let is_loopback = |end: &str| {
        end.get(6..8) == Some("7F") || end.starts_with("00000000000000000000000001000000:")
    };
    let asked = |end: &str| which == Inner::All || !is_loopback(end);
    let within = connected
        .iter()
        .filter(|(from, to)| asked(from) && connected.contains(&(to.clone(), from.clone())));
    within.filter_map(|(from, _)| port(from)).filter(|port| listening.contains(port)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn connections_within_a_container_are_told_from_others() {
        let tables = "  sl  local_address rem_address   st tx_queue rx_queue\n\
             0: 0100007F:1770 00000000:0000 0A\n\
             1: 0100007F:1770 0100007F:9C40 01\n\
             2: 0100007F:9C40 0100007F:1770 01\n\
             3: 0201A8C0:0050 0301A8C0:9C40 01\n\
             sl  local_address rem_address   st tx_queue rx_queue\n\
             0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A\n\
             1: 0000000000000000FFFF00000100007F:0050 0000000000000000FFFF00000100007F:9C42 01\n\
             2: 0100007F:9C42 0100007F:0050 01\n";
        assert_eq!(connected_within(tables, Inner::All), BTreeSet::from([6000, 80]));
        assert_eq!(connected_within(tables, Inner::Addressed), BTreeSet::new());
        let addressed = tables.replace("0100007F:", "0201A8C0:");
        assert_eq!(connected_within(&addressed, Inner::Addressed), BTreeSet::from([6000, 80]));
        let (v6, loopback) =
            ("0000000000000000FFFF00000100007F", "00000000000000000000000001000000");
        let v6_only = tables.replace("0100007F:", &format!("{loopback}:")).replace(v6, loopback);
        assert_eq!(connected_within(&v6_only, Inner::All), BTreeSet::from([6000, 80]));
        assert_eq!(connected_within(&v6_only, Inner::Addressed), BTreeSet::new());
        let outside = tables.lines().filter(|line| !line.contains("7F:9C4")).collect::<Vec<_>>();
        assert_eq!(connected_within(&outside.join("\n"), Inner::All), BTreeSet::new());
        assert_eq!(inner_ports(std::process::id(), Inner::All), BTreeSet::new());
    }

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
