//! Ports, and sockets for pings: who may have them says the network namespace that they are in. Whether that is given
//! counts for all other rights of sockets as well.
//!
//! | socket | what the kernel asks for |
//! |---|---|
//! | of any protocol with ports, in any state | `CAP_NET_BIND_SERVICE` below `net.ipv4.ip_unprivileged_port_start` |
//! | for pings (`SOCK_DGRAM` of ICMP and ICMPv6) | a group within `net.ipv4.ping_group_range` |
//! | raw, packet | nothing here: they are judged as such ([`super::sockets`]) |
//!
//! | network namespace | whose settings count |
//! |---|---|
//! | this host's, or one that the caller gives (joined, handed over) | its own |
//! | one that the images make | the port of the configuration, else that of a new one; pings reach what the caller connects it to |
//! | one that belongs to a user namespace of the tasks | none: they have all capabilities in there |
//!
//! Where the configuration sets the first port, the caller wants it so, whatever it is at the moment.

use std::collections::{BTreeSet, HashMap};

use torpor_images::kind;
use torpor_images::proto::{FileEntry, NetnsEntry};

use super::anybody::{FIRST_OF_NEW, OpenNetwork, SETTINGS};
use super::checkpoint::{Checkpoint, Maps, Requests};
use super::values::Values;
use crate::error::{Error, Result};
use crate::inet::InetEnds;
use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::request::Ask;
use crate::socket_kind::network_of;

/// The network namespaces of sockets: what anybody may have there, and whether they are given.
#[derive(Debug)]
pub(super) struct Networks {
    /// Those of the tasks' own, by their numbers.
    own: HashMap<u32, (OpenNetwork, bool)>,
    /// That of sockets that name none.
    usual: Option<u32>,
    /// This host's.
    host: OpenNetwork,
}

impl Networks {
    pub(super) fn of(
        checkpoint: &Checkpoint<'_>,
        here: Values<'_>,
        passed: &Passed,
    ) -> Result<Self> {
        let set = passed.spec.as_ref().and_then(|spec| {
            spec.linux.sysctl.get(&SETTINGS[0].replace('/', "."))?.trim().parse().ok()
        });
        let nested = checkpoint.nested_users()?;
        let root = checkpoint.tasks.first().map(|root| root.homes);
        // The tree joins it in the place of the root task's.
        let joined = root.and_then(|homes| homes.own(NsKind::Net));
        let mut own = HashMap::new();
        for id in checkpoint.namespaces(NsKind::Net) {
            let netns: Option<NetnsEntry> = checkpoint.images.read_opt(kind::NETNS, id.into())?;
            let key = netns.and_then(|netns| netns.ext_key);
            let of_key = |key: Option<&String>| {
                passed.networks.iter().find(|(known, _)| known.as_ref() == key)
            };
            let given = of_key(None).filter(|_| joined == Some(id));
            let given = given.or_else(|| of_key(Some(key.as_ref()?)));
            let network = match given {
                Some((_, network)) => (
                    OpenNetwork { first_port: set.unwrap_or(network.first_port), ..*network },
                    true,
                ),
                None if nested.iter().any(|user| user.owned.contains(&id)) => {
                    (OpenNetwork::made(0), false)
                }
                None => (OpenNetwork::made(set.unwrap_or(FIRST_OF_NEW)), false),
            };
            own.insert(id, network);
        }
        let usual = root.and_then(|homes| homes.number(NsKind::Net));
        Ok(Networks { own, usual, host: OpenNetwork::of(here) })
    }

    fn get(&self, number: Option<u32>) -> (OpenNetwork, bool) {
        let own = number.or(self.usual).and_then(|number| self.own.get(&number));
        own.copied().unwrap_or((self.host, true))
    }

    /// Whether what an open file says of packets counts in a network of this host's, or one that the caller gives.
    pub(super) fn is_given(&self, entry: &FileEntry) -> bool {
        self.get(network_of(entry)).1
    }
}

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let image = kind::FILES.file_name(0);
    let mut sockets = vec![];
    for entry in &checkpoint.files {
        let Some(socket) = &entry.isk else { continue };
        let invalid = |reason| Error::Invalid { image: image.clone(), reason };
        let ends = InetEnds::read(socket).map_err(invalid)?;
        if ends.port().is_some() || ends.is_ping() {
            sockets.push((entry, ends));
        }
    }
    // Most trees have none.
    if sockets.is_empty() {
        return Ok(());
    }
    let networks = Networks::of(checkpoint, here, passed)?;
    let groups = groups(checkpoint, maps);
    for (entry, ends) in sockets {
        let (network, given) = networks.get(network_of(entry));
        let port = ends.port().map(u32::from);
        if let Some(port) = port.filter(|&port| port < network.first_port) {
            all.add(&*image, None, Ask::Port { file: entry.id, port, given });
        }
        if ends.is_ping() && !network.lets_ping(&groups) {
            all.add(&*image, None, Ask::RawSocket { kind: "ping", file: entry.id, given });
        }
    }
    Ok(())
}

/// The groups of all threads, as this host has them.
fn groups(checkpoint: &Checkpoint<'_>, maps: &Maps) -> BTreeSet<u32> {
    let living = checkpoint.tasks.iter().filter(|task| !task.zombie);
    let threads = living.flat_map(|task| task.credentials).flatten();
    let groups = threads.flat_map(|thread| thread.groups.iter().chain(&thread.further));
    groups.map(|&id| maps.group(id)).collect()
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::InetSkEntry;

    use super::*;

    #[test]
    fn networks_by_their_numbers() {
        let (host, own, given) = (
            OpenNetwork { first_port: 80, ping_groups: (1, 0) },
            OpenNetwork::made(1024),
            OpenNetwork { first_port: 0, ping_groups: (0, 9) },
        );
        let own = HashMap::from([(7, (own, false)), (8, (given, true))]);
        let networks = Networks { own, usual: Some(8), host };
        let of = |ns_id| {
            let isk = Some(InetSkEntry { ns_id, ..InetSkEntry::default() });
            let (network, given) =
                networks.get(network_of(&FileEntry { isk, ..FileEntry::default() }));
            (network.first_port, given)
        };
        assert_eq!([of(Some(7)), of(Some(8)), of(None)], [(1024, false), (0, true), (0, true)]);
        // This host's, by a number that the tasks' own do not have.
        assert_eq!(of(Some(9)), (80, true));
    }
}
