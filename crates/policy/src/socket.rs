//! Sockets, as socket(2) makes them: read of their entries once, judged, and made.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FileEntry;

use crate::inet::InetEnds;
use crate::inet_options::InetOptions;
use crate::membership::Membership;
use crate::netlink::Netlink;
use crate::socket_kind::SocketKind;
use crate::socket_options::SocketOptions;
use crate::unix_end::{UnixEnd, UnixLink};

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        IpOptsEntry, NetlinkSkEntry, SkMembership, TcpOptsEntry, UnixSkEntry,
    };

    use super::*;
    use crate::socket_kind::tests::{inet, packet};
    use crate::socket_kind::{DATAGRAM, INET, INET6, RAW, SEQPACKET, STREAM, TCP, UDP};

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
}
