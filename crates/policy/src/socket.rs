//! Sockets, as socket(2) makes them: read of their entries once, judged, and made.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FileEntry;

use crate::collect::references::network_of;
use crate::inet::InetEnds;
use crate::inet_options::InetOptions;
use crate::membership::Membership;
use crate::netlink::Netlink;
use crate::request::Ask;
use crate::socket_options::SocketOptions;
use crate::unix_end::{UnixEnd, UnixLink};

const UNIX: u32 = libc::AF_UNIX.cast_unsigned();
const INET: u32 = libc::AF_INET.cast_unsigned();
const INET6: u32 = libc::AF_INET6.cast_unsigned();
const NETLINK: u32 = libc::AF_NETLINK.cast_unsigned();
const PACKET: u32 = libc::AF_PACKET.cast_unsigned();
const STREAM: u32 = libc::SOCK_STREAM.cast_unsigned();
const DATAGRAM: u32 = libc::SOCK_DGRAM.cast_unsigned();
const RAW: u32 = libc::SOCK_RAW.cast_unsigned();
const SEQPACKET: u32 = libc::SOCK_SEQPACKET.cast_unsigned();
const TCP: u32 = libc::IPPROTO_TCP.cast_unsigned();
const UDP: u32 = libc::IPPROTO_UDP.cast_unsigned();
const MPTCP: u32 = libc::IPPROTO_MPTCP.cast_unsigned();
/// The old type of packet sockets (`SOCK_PACKET` of linux/net.h): its protocol is known from the beginning.
const OLD_PACKET: u32 = 10;

/// The states of Internet sockets, from 1 (net/tcp_states.h).
const STATES: [&str; 12] = [
    "established",
    "syn-sent",
    "syn-recv",
    "fin-wait-1",
    "fin-wait-2",
    "time-wait",
    "close",
    "close-wait",
    "last-ack",
    "listen",
    "closing",
    "new-syn-recv",
];

/// What a state of Internet sockets is called; `None` of one that there is not.
pub(crate) fn state_name(state: u32) -> Option<&'static str> {
    let index = state.checked_sub(1).and_then(|index| usize::try_from(index).ok());
    index.and_then(|index| STATES.get(index).copied())
}

/// A socket that is made: anybody may have one; what not everybody may do with it is judged besides.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Socket {
    /// The number of the open file.
    pub file: u32,
    /// What it is.
    pub kind: SocketKind,
    /// What an Internet socket is bound and connected to, and its state (`TCP_*` of
    /// net/tcp_states.h).
    pub inet: Option<(InetEnds, u32)>,
    /// With what a Unix socket is connected; it is bound to a [`UnixName`](crate::UnixName).
    pub unix: Option<UnixLink>,
    /// The groups that it hears.
    pub groups: SocketGroups,
    /// Options of an Internet socket that anybody may set.
    pub options: InetOptions,
}

/// What a socket hears beside what is sent to itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SocketGroups {
    /// Multicast groups of an Internet socket.
    pub multicast: Vec<Membership>,
    /// The groups of a netlink socket, from 1.
    pub netlink: Vec<u32>,
}

impl Socket {
    /// That of an open file; `None` of one that is no socket, or one of others outside.
    ///
    /// # Errors
    /// A socket that no restore makes; an address or a group that there cannot be.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let unix = UnixEnd::of(entry)?;
        if unix.as_ref().is_some_and(|socket| socket.outside.is_some()) {
            return Ok(None);
        }
        let Some(kind) = SocketKind::of(entry)? else { return Ok(None) };
        let inet = entry.isk.as_ref();
        let inet = inet.map(|socket| Ok::<_, String>((InetEnds::read(socket)?, socket.state)));
        let groups = SocketGroups::of(entry)?;
        let options = entry.isk.as_ref().map(InetOptions::read).transpose()?.unwrap_or_default();
        let (inet, unix) = (inet.transpose()?, unix.map(|socket| socket.link));
        Ok(Some(Socket { file: entry.id, kind, inet, unix, groups, options }))
    }
}

impl SocketGroups {
    fn of(entry: &FileEntry) -> Result<Self, String> {
        let multicast = entry.isk.as_ref().map(Membership::all).transpose()?.unwrap_or_default();
        let netlink = entry.nlsk.as_ref().map(Netlink::read).transpose()?;
        let netlink = netlink.map(|socket| socket.groups).unwrap_or_default();
        Ok(SocketGroups { multicast, netlink })
    }
}

impl fmt::Display for SocketGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.multicast.iter().try_for_each(|group| write!(f, ", in group {group}"))?;
        self.netlink.iter().try_for_each(|group| write!(f, ", in group {group}"))
    }
}

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some((ends, state)) = &self.inet {
            write!(f, " {ends}, {}", state_name(*state).unwrap_or("in a state that there is not"))?;
        }
        self.unix.iter().try_for_each(|link| link.fmt(f))?;
        write!(f, "{}{} (file {})", self.groups, self.options, self.file)
    }
}

/// What packet sockets and netlink sockets have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketSetup {
    /// Its family, type and protocol, and its network namespace.
    pub kind: SocketKind,
    /// Options that all sockets have.
    pub options: SocketOptions,
    /// The flags that it is open with.
    pub flags: u32,
    /// The number of its inode, if the images say it.
    pub inode: Option<u32>,
}

impl SocketSetup {
    /// That of an open file; `None` of one that is neither.
    ///
    /// # Errors
    /// A socket that no restore makes.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let packet = entry.psk.as_ref().map(|socket| (&socket.opts, socket.flags, None));
        let netlink =
            || entry.nlsk.as_ref().map(|socket| (&socket.opts, socket.flags, Some(socket.ino)));
        let of = packet.or_else(netlink).zip(SocketKind::of(entry)?);
        let of = of.map(|((options, flags, inode), kind)| SocketSetup {
            kind,
            options: SocketOptions::read(options),
            flags,
            inode,
        });
        Ok(of)
    }
}

/// What socket(2) is told, and where. One comes from an entry of the images, or is of a kind that
/// anybody makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SocketKind {
    domain: u32,
    kind: u32,
    protocol: u32,
    network: Option<u32>,
}

impl SocketKind {
    /// That of an open file; `None` of one that is no socket.
    ///
    /// # Errors
    /// A socket that no restore makes.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let (domain, kind, protocol) = if let Some(socket) = &entry.isk {
            let (kind, protocol) = (socket.r#type, socket.proto);
            let known = match kind {
                STREAM => [TCP, MPTCP].contains(&protocol),
                DATAGRAM | RAW => true,
                _ => false,
            };
            if !known || ![INET, INET6].contains(&socket.family) {
                let (id, family) = (entry.id, socket.family);
                return Err(format!(
                    "socket {id} of family {family} has type {kind} with protocol {protocol}"
                ));
            }
            (socket.family, kind, protocol)
        } else if let Some(socket) = &entry.psk {
            // With a protocol it receives from all devices at once, before it is bound.
            let protocol = if socket.r#type == OLD_PACKET { socket.protocol } else { 0 };
            (PACKET, socket.r#type, protocol)
        } else if let Some(socket) = &entry.nlsk {
            (NETLINK, socket.torpor_type.unwrap_or(RAW), socket.protocol)
        } else if let Some(socket) = &entry.usk {
            (UNIX, socket.r#type, 0)
        } else {
            return Ok(None);
        };
        Ok(Some(SocketKind { domain, kind, protocol, network: network_of(entry) }))
    }

    /// A Unix socket.
    #[must_use]
    pub fn unix(network: Option<u32>, kind: u32) -> Self {
        SocketKind { domain: UNIX, kind, protocol: 0, network }
    }

    /// Whether Unix sockets are of this type.
    #[must_use]
    pub(crate) fn is_of_unix(&self) -> bool {
        [STREAM, DATAGRAM, SEQPACKET].contains(&self.kind)
    }

    /// Whether it is a stream.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        self.kind == STREAM
    }

    /// Whether it is raw.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.kind == RAW
    }

    /// Whether its protocol is TCP.
    #[must_use]
    pub fn is_of_tcp(&self) -> bool {
        self.protocol == TCP && [INET, INET6].contains(&self.domain)
    }

    /// Whether its protocol is multipath TCP.
    #[must_use]
    pub(crate) fn is_of_multipath(&self) -> bool {
        self.protocol == MPTCP && [INET, INET6].contains(&self.domain)
    }

    /// Whether it takes datagrams.
    #[must_use]
    pub fn is_of_datagrams(&self) -> bool {
        self.kind == DATAGRAM
    }

    /// The one that sends packets to a packet socket, which is closed again at once.
    #[must_use]
    pub fn sender_to(self) -> Self {
        SocketKind { kind: RAW, protocol: 0, ..self }
    }

    /// Family, type and protocol.
    #[must_use]
    pub fn arguments(&self) -> [i32; 3] {
        [self.domain, self.kind, self.protocol].map(u32::cast_signed)
    }

    /// The number of its network namespace, if the images say it.
    #[must_use]
    pub fn network(&self) -> Option<u32> {
        self.network
    }

    /// What is judged of it, if it is the file of a number: that it sees packets of others.
    #[must_use]
    pub fn ask(&self, file: u32) -> Option<Ask> {
        match (self.domain, self.kind) {
            (PACKET, _) => Some(Ask::RawSocket { kind: "packet", file }),
            (INET | INET6, RAW) => Some(Ask::RawSocket { kind: "raw", file }),
            _ => None,
        }
    }
}

impl fmt::Display for SocketKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self.domain {
            UNIX => "Unix",
            INET => "IPv4",
            INET6 => "IPv6",
            NETLINK => "netlink",
            _ => "packet",
        };
        let kind = match self.kind {
            STREAM => "stream",
            DATAGRAM => "datagram",
            RAW => "raw",
            SEQPACKET => "sequenced packet",
            OLD_PACKET => "old packet",
            _ => "other",
        };
        write!(f, "{family} {kind} socket")?;
        let is_inet = [INET, INET6].contains(&self.domain);
        match self.protocol {
            TCP if is_inet => f.write_str(" of TCP")?,
            MPTCP if is_inet => f.write_str(" of MPTCP")?,
            UDP if is_inet => f.write_str(" of UDP")?,
            0 => {}
            protocol => write!(f, " of protocol {protocol}")?,
        }
        self.network.map_or(Ok(()), |network| write!(f, " in net namespace {network}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        InetSkEntry, IpOptsEntry, NetlinkSkEntry, PacketSockEntry, SkMembership, TcpOptsEntry,
        UnixSkEntry,
    };

    use super::*;

    fn inet(family: u32, r#type: u32, proto: u32) -> FileEntry {
        let socket = InetSkEntry { family, r#type, proto, ..InetSkEntry::default() };
        FileEntry { id: 7, isk: Some(socket), ..FileEntry::default() }
    }

    fn packet(r#type: u32) -> FileEntry {
        let socket = PacketSockEntry { r#type, protocol: 8, ..PacketSockEntry::default() };
        FileEntry { psk: Some(socket), ..FileEntry::default() }
    }

    #[test]
    fn sockets_that_see_packets_of_others_are_asked_for() {
        let netlink = NetlinkSkEntry { protocol: 15, ..NetlinkSkEntry::default() };
        let unix = UnixSkEntry { r#type: RAW, ns_id: Some(9), ..UnixSkEntry::default() };
        for (entry, arguments, kind) in [
            (inet(INET, RAW, 1), [2, 3, 1], Some("raw")),
            (inet(INET6, RAW, 58), [10, 3, 58], Some("raw")),
            (inet(INET, DATAGRAM, 17), [2, 2, 17], None),
            (inet(INET6, STREAM, MPTCP), [10, 1, 262], None),
            (packet(RAW), [17, 3, 0], Some("packet")),
            (packet(OLD_PACKET), [17, 10, 8], Some("packet")),
            (FileEntry { nlsk: Some(netlink), ..FileEntry::default() }, [16, 3, 15], None),
            (FileEntry { usk: Some(unix), ..FileEntry::default() }, [1, 3, 0], None),
        ] {
            let socket = SocketKind::of(&entry).unwrap().unwrap();
            let ask = kind.map(|kind| Ask::RawSocket { kind, file: 7 });
            assert_eq!((socket.arguments(), socket.ask(7)), (arguments, ask));
        }
        assert_eq!(SocketKind::of(&FileEntry::default()), Ok(None));
    }

    #[test]
    fn a_plan_says_what_sockets_are() {
        let text = |entry: &FileEntry| Socket::of(entry).unwrap().map(|socket| socket.to_string());
        let mut listens = inet(INET, STREAM, TCP);
        let loopback = u32::from_ne_bytes([127, 0, 0, 1]);
        let socket = listens.isk.as_mut().unwrap();
        (socket.src_addr, socket.src_port, socket.state) = (vec![loopback], 80, 10);
        (socket.ns_id, socket.ifname) = (Some(9), Some("lo".to_owned()));
        let expected =
            "IPv4 stream socket of TCP in net namespace 9 at 127.0.0.1:80 (lo), listen (file 7)";
        assert_eq!(text(&listens).as_deref(), Some(expected));

        let mut hears = inet(INET, DATAGRAM, UDP);
        let socket = hears.isk.as_mut().unwrap();
        (socket.src_addr, socket.dst_addr) = (vec![0], vec![0]);
        let group = |exclude, sources: &[[u8; 4]]| SkMembership {
            level: 0,
            group: vec![224, 0, 0, 7],
            device: "eth0".to_owned(),
            exclude,
            sources: sources.iter().map(|source| source.to_vec()).collect(),
        };
        let groups = vec![group(true, &[]), group(true, &[[10, 0, 0, 1]]), group(false, &[])];
        hears.isk.as_mut().unwrap().opts.torpor_memberships = groups;
        let said = text(&hears).unwrap();
        let expected = ", in group 224.0.0.7 on eth0, in group 224.0.0.7 on eth0 but from 10.0.0.1, \
                        in group 224.0.0.7 on eth0 from [] only (file 7)";
        assert!(said.ends_with(expected), "{said}");

        let mut marked = inet(INET, STREAM, TCP);
        let socket = marked.isk.as_mut().unwrap();
        (socket.src_addr, socket.dst_addr, socket.state) = (vec![0], vec![0], 7);
        socket.ip_opts =
            Some(IpOptsEntry { freebind: Some(true), ttl: Some(5), ..Default::default() });
        socket.tcp_opts = Some(TcpOptsEntry { nodelay: Some(true), ..Default::default() });
        let said = text(&marked).unwrap();
        assert!(
            said.ends_with(", with IP_FREEBIND, with IP_TTL 5, with TCP_NODELAY (file 7)"),
            "{said}"
        );
        let usual = marked.isk.as_mut().unwrap();
        usual.ip_opts = Some(IpOptsEntry { ttl: Some(64), tos: Some(0), ..Default::default() });
        usual.tcp_opts = Some(TcpOptsEntry { keepidle: Some(7200), ..Default::default() });
        assert!(text(&marked).unwrap().ends_with(", close (file 7)"));

        let netlink = NetlinkSkEntry { groups: vec![0x8000_0001], ..NetlinkSkEntry::default() };
        let netlink = FileEntry { nlsk: Some(netlink), ..FileEntry::default() };
        let expected = "netlink raw socket, in group 1, in group 32 (file 0)";
        assert_eq!(text(&netlink).as_deref(), Some(expected));
        let mut connected = inet(INET6, DATAGRAM, UDP);
        let socket = connected.isk.as_mut().unwrap();
        let one = u32::from_ne_bytes([0, 0, 0, 1]);
        (socket.src_addr, socket.dst_addr) = (vec![0; 4], vec![0, 0, 0, one]);
        (socket.src_port, socket.dst_port, socket.state) = (4000, 53, 1);
        let expected = "IPv6 datagram socket of UDP at [::]:4000, connected to [::1]:53, \
                        established (file 7)";
        assert_eq!(text(&connected).as_deref(), Some(expected));
        assert_eq!(text(&packet(RAW)).as_deref(), Some("packet raw socket (file 0)"));
        let unix = |kind, state, uflags, peer| {
            let unix = UnixSkEntry { r#type: kind, state, uflags, peer, ..UnixSkEntry::default() };
            text(&FileEntry { usk: Some(unix), ..FileEntry::default() })
        };
        assert_eq!(unix(STREAM, 7, 0, 0).as_deref(), Some("Unix stream socket (file 0)"));
        let expected = "Unix sequenced packet socket, connected to inode 9 (file 0)";
        assert_eq!(unix(SEQPACKET, 1, 0, 9).as_deref(), Some(expected));
        assert_eq!(
            unix(STREAM, 10, 0, 0).as_deref(),
            Some("Unix stream socket, listening (file 0)")
        );
        let expected = "Unix stream socket, connected to the service that dumps it (file 0)";
        assert_eq!(unix(STREAM, 1, 2, 9).as_deref(), Some(expected));
        // It is not made.
        assert_eq!(unix(STREAM, 7, 1, 0), None);
        assert_eq!(text(&FileEntry::default()), None);
        let mut none = inet(INET, STREAM, TCP);
        none.isk.as_mut().unwrap().src_port = 1 << 16;
        assert!(Socket::of(&none).is_err());
    }

    #[test]
    fn other_sockets_are_refused() {
        const NONBLOCK: u32 = libc::SOCK_NONBLOCK.cast_unsigned();
        for (family, kind, protocol) in [
            (INET, RAW | NONBLOCK, 1),
            (INET, STREAM, 0),
            (INET, 5, 132),
            (PACKET, DATAGRAM, 3),
            (29, RAW, 1),
        ] {
            let error = SocketKind::of(&inet(family, kind, protocol)).unwrap_err();
            let expected =
                format!("socket 7 of family {family} has type {kind} with protocol {protocol}");
            assert_eq!(error, expected);
        }
    }
}
