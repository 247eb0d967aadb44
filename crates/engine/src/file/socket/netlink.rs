//! Netlink sockets: their numbers, groups and options.
//!
//! What the kernel has sent and nobody has read yet cannot be sent again: only the kernel
//! is believed to be the kernel. A socket that holds such messages is refused, and so is
//! one that the kernel knows as the place for packets of a queue.

use std::os::fd::{AsFd, OwnedFd};

use libc::{NETLINK_AUDIT, NETLINK_NETFILTER};
use torpor_images::proto::{FdTypes, FileEntry, NetlinkSkEntry};
use torpor_kernel::netlink;
use torpor_kernel::sock_diag::NetlinkSocket;
use torpor_policy::{Capabilities, Netlink, SocketSetup};
use torpor_sys::socket;

use super::about::{Socket, SocketOwner, restore_flags};
use super::around::Around;
use super::options;
use super::spaces::Lists;
use crate::dump::tasks::Task;
use crate::error::{Context, Result};
use crate::file::Found;
use crate::file::found::own_pid;
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, run_in};
use crate::proc;

/// Describes a netlink socket.
pub(super) fn dump(
    sockets: &mut Lists,
    around: &Around<'_>,
    found: &Found,
    about: &Socket,
) -> Result<FileEntry> {
    // Those that have neither a number nor groups are not listed.
    let seen = sockets.spaces.netlink(about)?.cloned().unwrap_or_default();
    if seen.queued > 0 || seen.answering {
        return Err(found.refuse("it is a netlink socket with messages that were not read yet"));
    }
    if let Some(role) = role(around, about, &seen)? {
        return Err(found.refuse(format!("it is a netlink socket that {role}")));
    }
    let nlsk = NetlinkSkEntry {
        id: found.id,
        ino: about.inode,
        protocol: about.protocol.cast_unsigned(),
        state: seen.state.into(),
        flags: found.info.flags & !libc::O_CLOEXEC.cast_unsigned(),
        portid: seen.portid,
        groups: one_word(seen.groups),
        dst_portid: seen.destination_portid,
        dst_group: seen.destination_group,
        fown: found.fown,
        opts: options::dump(around.id_maps, found, about, &mut sockets.defaults)?,
        ns_id: Some(about.ns_id),
        torpor_type: Some(about.kind.cast_unsigned()),
    };
    Ok(FileEntry { nlsk: Some(nlsk), ..found.entry(FdTypes::Netlinksk) })
}

/// Groups as CRIU has them: it takes no second word, not even one without a group.
fn one_word(mut groups: Vec<u32>) -> Vec<u32> {
    if groups.iter().skip(1).all(|&word| word == 0) {
        groups.truncate(1);
    }
    groups
}

/// What the kernel knows a socket as, apart from itself.
fn role(around: &Around<'_>, about: &Socket, seen: &NetlinkSocket) -> Result<Option<&'static str>> {
    match about.protocol {
        NETLINK_AUDIT => Ok(has_audit_daemon(around.tasks).then_some("may be the audit daemon's")),
        NETLINK_NETFILTER => {
            let space = around.spaces.by_inode(about.space).and_then(|ns| ns.file.as_ref());
            let Some(space) = space else { return Ok(None) };
            let receives = run_in(&[space.as_fd()], || {
                Ok(["nfnetlink_queue", "nfnetlink_log"].iter().any(|name| {
                    let path = format!("/proc/thread-self/net/netfilter/{name}");
                    let text = std::fs::read_to_string(path).unwrap_or_default();
                    is_receiver(&text, seen.portid)
                }))
            })?;
            Ok(receives.then_some("receives packets from the packet filter (NFQUEUE, NFLOG)"))
        }
        _ => Ok(None),
    }
}

/// Whether a task of the tree is the audit daemon, whom the kernel sends all events. Others write
/// a message now and then (dbus-daemon, sshd, login), or listen to a group (journald).
fn has_audit_daemon(tasks: &[Task]) -> bool {
    const AUDIT_GET: u16 = 1000;
    // struct audit_status: mask, enabled, failure, pid.
    match netlink::Socket::open(NETLINK_AUDIT).and_then(|mut kernel| kernel.ask(AUDIT_GET)) {
        Ok(status) => {
            let daemon = netlink::word(status.body(), 12).unwrap_or(0);
            tasks.iter().any(|task| daemon != 0 && task.tgid.cast_unsigned() == daemon)
        }
        // A task that may ask and is not answered is in a pid or user namespace: no daemon is there.
        Err(e) => {
            tracing::debug!("who the audit daemon is cannot be told: {e}");
            !may_ask()
        }
    }
}

/// Whether this program has `CAP_AUDIT_CONTROL`.
fn may_ask() -> bool {
    const AUDIT_CONTROL: u64 = 30;
    let status = proc::status(own_pid()).ok();
    let effective = status.and_then(|status| status.number("CapEff", 16));
    effective.is_some_and(|set| set >> AUDIT_CONTROL & 1 != 0)
}

/// Each line: number of the queue or group, number of the socket …
fn is_receiver(text: &str, portid: u32) -> bool {
    let number = |line: &str| line.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    text.lines().any(|line| number(line) == Some(portid))
}

/// Makes the socket, with no more than these capabilities for good; it is the owner's unless the images say whose it is.
///
/// # Errors
/// If the socket cannot be made, bound or connected, or does not take an option or a group.
pub(crate) fn open(
    spaces: &Namespaces,
    id_maps: &IdMaps,
    (owner, capabilities): (SocketOwner, Capabilities),
    id: u32,
    (setup, netlink): &(SocketSetup, Netlink),
) -> Result<OwnedFd> {
    let owner = owner.or_of(&setup.options);
    let socket = owner.create_with(spaces, id_maps, capabilities, &setup.kind)?;
    let fd = socket.as_fd();
    let wanted = &setup.options;
    options::restore_more(fd, wanted)?;
    let Netlink { number, ref groups, peer, .. } = *netlink;
    if number != 0 {
        let what = || format!("bind netlink socket {id} to {number}");
        socket::bind(fd, &address(number, 0)).context(what)?;
    }
    // One by one: bind(2) takes no groups above the 32nd.
    for &group in groups {
        let group = i32::try_from(group).unwrap_or(i32::MAX);
        socket::set_int(fd, libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group)
            .context(|| format!("netlink socket {id} joins group {group}"))?;
    }
    if let Some((number, groups)) = peer {
        socket::connect(fd, &address(number, groups))
            .context(|| format!("connect netlink socket {id}"))?;
    }
    options::restore(id_maps, fd, wanted)?;
    restore_flags(fd, setup.flags)?;
    Ok(socket)
}

/// `struct sockaddr_nl`: family, padding, number, groups.
fn address(portid: u32, groups: u32) -> Vec<u8> {
    let words = [libc::AF_NETLINK.to_ne_bytes(), portid.to_ne_bytes(), groups.to_ne_bytes()];
    words.as_flattened().to_vec()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{cycle, dump, entries, in_netns};
    use super::*;
    use crate::options::Options;

    fn new(protocol: i32) -> OwnedFd {
        socket::socket(libc::AF_NETLINK, libc::SOCK_DGRAM, protocol).unwrap()
    }

    #[test]
    fn numbers_groups_and_peers_come_back() {
        in_netns(|| {
            let route = new(libc::NETLINK_ROUTE);
            socket::bind(route.as_fd(), &address(4711, 0x41)).unwrap();
            // RTNLGRP_NEXTHOP is above those that bind(2) knows.
            socket::set_int(route.as_fd(), libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, 32)
                .unwrap();
            socket::set_int(route.as_fd(), libc::SOL_NETLINK, 12, 1).unwrap();
            let peer = new(libc::NETLINK_USERSOCK);
            socket::connect(peer.as_fd(), &address(99, 0)).unwrap();
            let fresh = new(libc::NETLINK_GENERIC);
            let dir = tempfile::tempdir().unwrap();
            let look = |files: &[OwnedFd]| -> Vec<NetlinkSkEntry> {
                super::super::testing::dump(&Options::default(), dir.path(), files).unwrap();
                let mut all: Vec<_> =
                    entries(dir.path()).into_iter().map(|e| e.nlsk.unwrap()).collect();
                all.iter_mut().for_each(|e| e.ino = 0);
                all
            };
            let files = vec![route, peer, fresh];
            let before = look(&files);
            assert_eq!((before[0].portid, before[0].groups[0]), (4711, 0x8000_0041));
            // NETLINK_CONNECTED.
            assert_eq!((before[1].state, before[1].dst_portid), (1, 99));
            assert_ne!(before[1].portid, 0);
            assert_eq!((before[2].portid, before[2].state), (0, 0));
            assert_eq!(look(&cycle(&Options::default(), files)), before);
        });
    }

    #[test]
    fn unread_messages_are_refused() {
        in_netns(|| {
            let (a, b) = (new(libc::NETLINK_USERSOCK), new(libc::NETLINK_USERSOCK));
            socket::bind(a.as_fd(), &address(4712, 0)).unwrap();
            let to = address(4712, 0);
            let message = socket::Message {
                address: Some(&to),
                data: b"a message of some length",
                ..socket::Message::default()
            };
            socket::send(b.as_fd(), &message, 0).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let error = dump(&Options::default(), dir.path(), &[a]).unwrap_err().to_string();
            assert!(error.contains("not read yet"), "{error}");
        });
    }

    #[test]
    fn receivers_of_packets_are_known() {
        let queues = "    0   4711     0 2 65531     0     0        0  1\n";
        assert!(is_receiver(queues, 4711) && !is_receiver(queues, 0));
    }
}
