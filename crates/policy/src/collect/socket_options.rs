//! What sockets can only have by a capability: the restore gives it to them with its own.
//!
//! | field of images | what the kernel asks for |
//! |---|---|
//! | `so_mark`, `so_priority` above 6 | judged as `marked` sockets ([`super::sockets`]) |
//! | `so_sndbuf`, `so_rcvbuf` | `CAP_NET_ADMIN` above the limits of this host |
//! | `torpor_options` | those of [`TAKES`]; a congestion control that not everybody may have |
//! | `groups`, `dst_portid`, `dst_group` of netlink | what the protocol keeps for the mighty |
//! | `src_port`, sockets for pings | judged by their network ([`super::ports`]) |
//! | packet sockets, `SOCK_RAW` | judged as such, with all that they have; rings above 256 MiB also as a limit that is raised |
//! | `so_bound_dev`, `ifname` | nothing since Linux 5.7, on sockets that are bound to no device |
//! | `torpor_uid`, `torpor_gid`, `torpor_peer` | judged as ids |
//! | `tcp-stream-N.img` | judged as a connection, unless it is closed ([`super::sockets`]) |
//! | others: time limits, `so_filter`, `so_linger`, `so_reuseport`, `torpor_memberships` … | nothing |

use torpor_images::proto::FileEntry;

use super::checkpoint::Requests;
use super::values::Values;
use crate::capabilities::number::{AUDIT_READ, NET_ADMIN, NET_BROADCAST, NET_RAW};
use crate::error::{Error, Result};
use crate::netlink::Netlink;
use crate::request::Ask;
use crate::socket_options::SocketOptions;

/// The settings that the limits of this host are in, and the congestion controls for everybody.
const SETTINGS: [&str; 8] = [
    "net/core/rmem_max",
    "net/core/rmem_default",
    "net/core/wmem_max",
    "net/core/wmem_default",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_allowed_congestion_control",
    "net/ipv4/tcp_congestion_control",
];

/// To this size the kernel lets buffers of TCP grow by itself (Linux 6.16, `tcp_init`).
const TUNED: u64 = 32 << 20;

/// Levels of options.
const SOCKET: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const TCP: i32 = libc::IPPROTO_TCP;
const IPV6: i32 = libc::IPPROTO_IPV6;
const NETLINK: i32 = libc::SOL_NETLINK;
const CONGESTION: (i32, i32) = (TCP, libc::TCP_CONGESTION);

/// Options that take a capability when they get a value above this one, as a number without a sign: level, number, name,
/// value. To switch one on, -1 is as good as 1. The number of `SO_RCVPRIORITY` is of asm-generic/socket.h.
const TAKES: [((i32, i32), &str, u32, u32); 9] = [
    ((SOCKET, libc::SO_DEBUG), "SO_DEBUG", 0, NET_ADMIN),
    ((SOCKET, libc::SO_BUSY_POLL), "SO_BUSY_POLL", 0, NET_ADMIN),
    ((SOCKET, libc::SO_PREFER_BUSY_POLL), "SO_PREFER_BUSY_POLL", 0, NET_ADMIN),
    ((SOCKET, libc::SO_BUSY_POLL_BUDGET), "SO_BUSY_POLL_BUDGET", 8, NET_ADMIN),
    ((SOCKET, libc::SO_RCVMARK), "SO_RCVMARK", 0, NET_RAW),
    ((SOCKET, 82), "SO_RCVPRIORITY", 0, NET_RAW),
    ((IP, libc::IP_TRANSPARENT), "IP_TRANSPARENT", 0, NET_RAW),
    ((IPV6, libc::IPV6_TRANSPARENT), "IPV6_TRANSPARENT", 0, NET_RAW),
    ((NETLINK, libc::NETLINK_LISTEN_ALL_NSID), "NETLINK_LISTEN_ALL_NSID", 0, NET_BROADCAST),
];

/// What anybody may have on this host.
#[derive(Debug, Default)]
pub(super) struct Host {
    receive: u64,
    send: u64,
    receive_tcp: u64,
    send_tcp: u64,
    congestion: Vec<String>,
}

impl Host {
    /// What `here` says of this host: nothing for what it does not know.
    pub(super) fn of(here: Values<'_>) -> Self {
        let values = here(&SETTINGS.map(str::to_owned));
        let mut values = values.iter().map(|value| value.as_deref().unwrap_or_default());
        let mut next = || values.next().unwrap_or_default();
        // The kernel doubles what a program asks for, but not what a new socket has.
        let mut most = || {
            let [most, default] = [next(), next()].map(|text| text.parse().unwrap_or(0_u64));
            default.max(most.saturating_mul(2))
        };
        let (receive, send) = (most(), most());
        let mut tuned = || {
            let most = next().split_ascii_whitespace().filter_map(|n| n.parse().ok()).max();
            most.map_or(0, |most: u64| most.max(TUNED))
        };
        let (receive_tcp, send_tcp) = (tuned().max(receive), tuned().max(send));
        let names = [next(), next()];
        let congestion = names.into_iter().flat_map(str::split_ascii_whitespace);
        let congestion = congestion.map(str::to_owned).collect();
        Host { receive, send, receive_tcp, send_tcp, congestion }
    }
}

/// Asks for what of the options of a socket takes a capability. `given`: its network is this host's, or the caller gives it.
pub(super) fn collect(
    entry: &FileEntry,
    options: &SocketOptions,
    (host, given): (&Host, bool),
    image: &str,
    all: &mut Requests,
) -> Result<()> {
    let mut add = |text: String, capability| {
        all.add(image, None, Ask::SocketOption { file: entry.id, text, capability, given });
    };
    let is_stream = entry.isk.as_ref().is_some_and(|socket| socket.r#type == 1);
    let locked = |bit: u32| options.buffer_locks.is_some_and(|locks| locks & bit != 0);
    for (name, value, bit, most, tuned) in [
        ("SO_SNDBUF", options.send_buffer, 1, host.send, host.send_tcp),
        ("SO_RCVBUF", options.receive_buffer, 2, host.receive, host.receive_tcp),
    ] {
        let most = if is_stream && !locked(bit) { tuned } else { most };
        if u64::from(value) > most {
            add(format!("{name} of {value}"), NET_ADMIN);
        }
    }
    for option in &options.more {
        let key = (option.level, option.name);
        if key == CONGESTION {
            let name = String::from_utf8_lossy(&option.value);
            if !host.congestion.iter().any(|known| *known == name) {
                add(format!("TCP_CONGESTION of {name:?}"), NET_ADMIN);
            }
        }
        let value = option.value.first_chunk().map_or(u32::MAX, |value| u32::from_le_bytes(*value));
        let takes = TAKES.iter().find(|(known, ..)| *known == key);
        if let Some((_, name, _, capability)) = takes.filter(|(_, _, most, _)| value > *most) {
            add(format!("{name} of {value}"), *capability);
        }
    }
    if let Some(socket) = &entry.nlsk {
        let invalid = |reason| Error::Invalid { image: image.to_owned(), reason };
        let socket = Netlink::read(socket).map_err(invalid)?;
        of_netlink(&socket).into_iter().for_each(|(text, capability)| add(text, capability));
    }
    Ok(())
}

/// What of a netlink socket takes a capability: groups that not everybody may listen to
/// (`NL_CFG_F_NONROOT_RECV` and the `bind` of the protocols), and whom it sends to without saying so
/// each time (`NL_CFG_F_NONROOT_SEND`).
fn of_netlink(socket: &Netlink) -> Vec<(String, u32)> {
    const ROUTE: u32 = libc::NETLINK_ROUTE.cast_unsigned();
    const USERSOCK: u32 = libc::NETLINK_USERSOCK.cast_unsigned();
    const SOCK_DIAG: u32 = libc::NETLINK_SOCK_DIAG.cast_unsigned();
    const SELINUX: u32 = libc::NETLINK_SELINUX.cast_unsigned();
    const AUDIT: u32 = libc::NETLINK_AUDIT.cast_unsigned();
    const KOBJECT_UEVENT: u32 = libc::NETLINK_KOBJECT_UEVENT.cast_unsigned();
    const GENERIC: u32 = libc::NETLINK_GENERIC.cast_unsigned();
    const MULTICAST_ROUTES: [u32; 2] = [libc::RTNLGRP_IPV4_MROUTE_R, libc::RTNLGRP_IPV6_MROUTE_R];
    /// `notify` of `nlctrl`, which tells of families; the numbers of others are by chance.
    const FAMILIES: u32 = 16;
    let kept = socket.groups.iter().find(|&group| match socket.protocol {
        ROUTE => MULTICAST_ROUTES.contains(group),
        SOCK_DIAG | SELINUX | KOBJECT_UEVENT => false,
        GENERIC => *group != FAMILIES,
        _ => true,
    });
    let listens = kept.map(|group| {
        let capability = if socket.protocol == AUDIT { AUDIT_READ } else { NET_ADMIN };
        (format!("group {group} of netlink protocol {}", socket.protocol), capability)
    });
    let sends = socket.protocol != USERSOCK && socket.peer.is_some_and(|peer| peer != (0, 0));
    let sends = sends.then(|| {
        let text = format!("a peer by netlink protocol {} that is not the kernel", socket.protocol);
        (text, NET_ADMIN)
    });
    listens.into_iter().chain(sends).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::InetSkEntry;

    use super::*;
    use crate::socket_options::SocketOption;

    fn host() -> Host {
        Host::of(&|names| {
            assert_eq!(names, SETTINGS);
            ["1000", "900", "2000", "9000", "1 2 50000000", "1 2 3", "reno", "cubic"]
                .map(|value| Some(value.to_owned()))
                .to_vec()
        })
    }

    fn asks(entry: FileEntry, options: &SocketOptions) -> Vec<String> {
        let mut all = Requests::default();
        collect(&entry, options, (&host(), false), "files.img", &mut all).unwrap();
        all.0.iter().map(|request| request.ask.to_string()).collect()
    }

    fn stream() -> FileEntry {
        let socket = InetSkEntry { r#type: 1, ..InetSkEntry::default() };
        FileEntry { id: 5, isk: Some(socket), ..FileEntry::default() }
    }

    #[test]
    fn sizes_of_buffers() {
        let sizes = |send_buffer, receive_buffer, buffer_locks| SocketOptions {
            send_buffer,
            receive_buffer,
            buffer_locks,
            ..SocketOptions::default()
        };
        // A default may be above what can be asked for.
        assert!(asks(FileEntry::default(), &sizes(9000, 2000, None)).is_empty());
        assert_eq!(
            asks(FileEntry::default(), &sizes(9001, 2001, None)),
            [
                "a socket with SO_SNDBUF of 9001 (file 0), which takes CAP_NET_ADMIN",
                "a socket with SO_RCVBUF of 2001 (file 0), which takes CAP_NET_ADMIN",
            ]
        );
        // Those of streams grow by themselves, unless somebody has set them.
        assert!(asks(stream(), &sizes(32 << 20, 50_000_000, None)).is_empty());
        assert_eq!(asks(stream(), &sizes((32 << 20) + 1, 50_000_001, None)).len(), 2);
        assert_eq!(asks(stream(), &sizes(9001, 2001, Some(1))).len(), 1);
        assert_eq!(asks(stream(), &sizes(9001, 2001, Some(3))).len(), 2);
        let unknown = Host::of(&|names| vec![None; names.len()]);
        assert_eq!((unknown.receive_tcp, unknown.send), (0, 0));
    }

    #[test]
    fn options_that_take_a_capability() {
        let set = |level, name, value: &[u8]| {
            let option = SocketOption { level, name, value: value.to_vec() };
            let options = SocketOptions { more: vec![option], ..SocketOptions::default() };
            asks(stream(), &options)
        };
        for ((level, name), text, most, _) in TAKES {
            let [harmless, more, negative] = [most, most + 1, u32::MAX].map(u32::to_le_bytes);
            assert!(set(level, name, &harmless).is_empty(), "{text}");
            for more in [more, negative] {
                assert!(set(level, name, &more).concat().contains(text), "{text} {more:?}");
            }
            // Whatever it means.
            assert!(set(level, name, &[])[0].contains(text), "{text}");
        }
        assert!(set(TCP, 13, b"reno").is_empty() && set(TCP, 13, b"cubic").is_empty());
        assert!(set(TCP, 13, b"dctcp")[0].contains("TCP_CONGESTION of \"dctcp\""));
    }

    #[test]
    fn groups_of_netlink() {
        let socket = |protocol, groups: &[u32]| Netlink {
            protocol,
            number: 0,
            groups: groups.to_vec(),
            peer: None,
        };
        let kernel = Netlink { peer: Some((0, 0)), ..socket(15, &[]) };
        for free in [socket(0, &[1, 32]), socket(15, &[1, 2]), socket(16, &[16]), kernel] {
            assert_eq!(of_netlink(&free), []);
        }
        for (socket, capability) in [
            (socket(0, &[30]), NET_ADMIN),
            (socket(9, &[1]), AUDIT_READ),
            (socket(12, &[33]), NET_ADMIN),
            (socket(16, &[33]), NET_ADMIN),
            (socket(2, &[1]), NET_ADMIN),
            (Netlink { peer: Some((0, 1)), ..socket(15, &[]) }, NET_ADMIN),
            (Netlink { peer: Some((9, 0)), ..socket(0, &[]) }, NET_ADMIN),
        ] {
            let found = of_netlink(&socket);
            assert_eq!(found.iter().map(|(_, cap)| *cap).collect::<Vec<_>>(), [capability]);
        }
        let peer = Netlink { peer: Some((9, 0)), ..socket(2, &[]) };
        assert_eq!(of_netlink(&peer), []);
    }
}
