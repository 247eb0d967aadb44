//! Ping sockets: `SOCK_DGRAM` of ICMP, for programs without privileges. Those who may make one are
//! a range of groups that the network namespace has, and no capability stands above it.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use torpor_policy::SocketKind;

use super::about::{SocketOwner, create, netns_of};
use crate::error::{Context, Error, Result};
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;

const RANGE: &str = "/proc/sys/net/ipv4/ping_group_range";

/// Whether it is a ping socket.
pub(super) fn is_ping(kind: i32, protocol: i32) -> bool {
    kind == libc::SOCK_DGRAM && matches!(protocol, libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6)
}

/// Makes an Internet socket in the name of its owner. For a ping socket that this program's groups may not have, it is in
/// one that may for the moment. If none may, the range of a namespace that the restore makes is another one meanwhile;
/// in others people live already.
pub(super) fn make(
    spaces: &Namespaces,
    id_maps: &IdMaps,
    owner: SocketOwner,
    id: u32,
    socket: &SocketKind,
) -> Result<OwnedFd> {
    let make = |groups| owner.make_in(id_maps, groups, || create(spaces, socket));
    let [_, kind, protocol] = socket.arguments();
    let is_ping = is_ping(kind, protocol);
    let denied = match make(vec![]) {
        Err(Error::Os { source, .. })
            if is_ping && source.kind() == ErrorKind::PermissionDenied =>
        {
            source
        }
        made => return made,
    };
    let space = netns_of(spaces, socket.network());
    let before = spaces
        .in_netns(space, || std::fs::read_to_string(RANGE).context(|| format!("read {RANGE}")))?;
    if let Some(group) = first_of(&before) {
        return make(vec![group]);
    }
    let is_made =
        spaces.by_id(space).is_some_and(|ns| !ns.is_host && !spaces.given.contains_key(&ns.id));
    if !is_made {
        let what = format!("ping socket {id} (net.ipv4.ping_group_range says whose group may)");
        return Err(Error::Os { what, source: denied });
    }
    let write = |range: &str| {
        std::fs::write(RANGE, range).context(|| format!("write {range:?} to {RANGE}"))
    };
    let group = rustix::process::getegid().as_raw();
    spaces.in_netns(space, || write(&format!("{group} {group}")))?;
    let made = make(vec![]);
    spaces.in_netns(space, || write(before.trim())).and(made)
}

/// The first group of a range, if there is one in it.
fn first_of(range: &str) -> Option<u32> {
    let numbers: Vec<u32> = range.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    match *numbers {
        [first, last] if first <= last => Some(first),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{FileEntry, InetSkEntry};
    use torpor_policy::GivenNamespace;

    use super::super::testing::{in_netns, namespaces};
    use super::*;

    /// Others live in such a network: a restore makes use of the range, and leaves it alone.
    #[test]
    fn the_range_of_a_network_that_is_given_stays() {
        in_netns(|| {
            let mut spaces = namespaces();
            let id = spaces.all[0].id;
            let isk = InetSkEntry {
                family: libc::AF_INET.cast_unsigned(),
                r#type: libc::SOCK_DGRAM.cast_unsigned(),
                proto: libc::IPPROTO_ICMP.cast_unsigned(),
                ns_id: Some(id),
                ..InetSkEntry::default()
            };
            let entry = FileEntry { isk: Some(isk), ..FileEntry::default() };
            let kind = SocketKind::of(&entry).unwrap().unwrap();
            let open = |spaces: &Namespaces, range: &str| {
                std::fs::write(RANGE, range).unwrap();
                make(spaces, &IdMaps::identity(), SocketOwner::default(), 5, &kind)
            };
            open(&spaces, "1 0").unwrap();
            let given = GivenNamespace { kind: "net", number: id, key: None };
            spaces.given.insert(id, given);
            open(&spaces, "4711 4712").unwrap();
            let error = open(&spaces, "1 0").unwrap_err().to_string();
            assert!(error.contains("ping socket 5 (net.ipv4.ping_group_range"), "{error}");
        });
    }
}
