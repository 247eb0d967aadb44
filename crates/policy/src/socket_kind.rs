//! What a socket is: what socket(2) is told, and where.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FileEntry;

const UNIX: u32 = libc::AF_UNIX.cast_unsigned();
pub(crate) const INET: u32 = libc::AF_INET.cast_unsigned();
pub(crate) const INET6: u32 = libc::AF_INET6.cast_unsigned();
const NETLINK: u32 = libc::AF_NETLINK.cast_unsigned();
const PACKET: u32 = libc::AF_PACKET.cast_unsigned();
pub(crate) const STREAM: u32 = libc::SOCK_STREAM.cast_unsigned();
pub(crate) const DATAGRAM: u32 = libc::SOCK_DGRAM.cast_unsigned();
pub(crate) const RAW: u32 = libc::SOCK_RAW.cast_unsigned();
pub(crate) const SEQPACKET: u32 = libc::SOCK_SEQPACKET.cast_unsigned();
pub(crate) const TCP: u32 = libc::IPPROTO_TCP.cast_unsigned();
pub(crate) const UDP: u32 = libc::IPPROTO_UDP.cast_unsigned();
const MPTCP: u32 = libc::IPPROTO_MPTCP.cast_unsigned();
/// The old type of packet sockets (`SOCK_PACKET` of linux/net.h): its protocol is known from the beginning.
const OLD_PACKET: u32 = 10;

/// The number of the network namespace that an open file belongs to, where it says.
pub(crate) fn network_of(entry: &FileEntry) -> Option<u32> {
    let inet = entry.isk.as_ref().and_then(|socket| socket.ns_id);
    let unix = || entry.usk.as_ref().and_then(|socket| socket.ns_id);
    let packet = || entry.psk.as_ref().and_then(|socket| socket.ns_id);
    let netlink = || entry.nlsk.as_ref().and_then(|socket| socket.ns_id);
    let tun = || entry.tunf.as_ref().and_then(|tun| tun.ns_id);
    inet.or_else(unix).or_else(packet).or_else(netlink).or_else(tun)
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
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{InetSkEntry, NetlinkSkEntry, PacketSockEntry, UnixSkEntry};

    use super::*;
    use crate::request::Ask;

    pub(crate) fn inet(family: u32, r#type: u32, proto: u32) -> FileEntry {
        let socket = InetSkEntry { family, r#type, proto, ..InetSkEntry::default() };
        FileEntry { id: 7, isk: Some(socket), ..FileEntry::default() }
    }

    pub(crate) fn packet(r#type: u32) -> FileEntry {
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
            for given in [false, true] {
                let ask = kind.map(|kind| Ask::RawSocket { kind, file: 7, given });
                assert_eq!((socket.arguments(), socket.ask(7, given)), (arguments, ask));
            }
        }
        assert_eq!(SocketKind::of(&FileEntry::default()), Ok(None));
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
