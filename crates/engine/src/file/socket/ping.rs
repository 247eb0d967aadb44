//! Ping sockets: `SOCK_DGRAM` of ICMP, for programs without privileges. Those who may make one are
//! a range of groups that the network namespace has, and no capability stands above it.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use torpor_policy::SocketKind;

use super::about::{create, netns_of};
use crate::error::{Context, Error, Result};
use crate::namespace::Namespaces;

const RANGE: &str = "/proc/sys/net/ipv4/ping_group_range";

/// Whether it is a ping socket.
pub(super) fn is_ping(kind: i32, protocol: i32) -> bool {
    kind == libc::SOCK_DGRAM && matches!(protocol, libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6)
}

/// Makes an Internet socket. For a ping socket that this program's groups may not have, the range
/// of the tree's network namespace is another one meanwhile.
pub(super) fn make(spaces: &Namespaces, id: u32, socket: &SocketKind) -> Result<OwnedFd> {
    let make = || create(spaces, socket);
    let [_, kind, protocol] = socket.arguments();
    let is_ping = is_ping(kind, protocol);
    let denied = match make() {
        Err(Error::Os { source, .. })
            if is_ping && source.kind() == ErrorKind::PermissionDenied =>
        {
            source
        }
        made => return made,
    };
    let space = netns_of(spaces, socket.network());
    if spaces.by_id(space).is_none_or(|ns| ns.is_host) {
        let what = format!("ping socket {id} (net.ipv4.ping_group_range says whose group may)");
        return Err(Error::Os { what, source: denied });
    }
    let write = |range: &str| {
        std::fs::write(RANGE, range).context(|| format!("write {range:?} to {RANGE}"))
    };
    let group = rustix::process::getegid().as_raw();
    let before = spaces.in_netns(space, || {
        let before = std::fs::read_to_string(RANGE).context(|| format!("read {RANGE}"))?;
        write(&format!("{group} {group}")).map(|()| before)
    })?;
    let made = make();
    spaces.in_netns(space, || write(before.trim())).and(made)
}
