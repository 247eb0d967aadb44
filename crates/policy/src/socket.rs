//! Sockets, as socket(2) makes them: read of their entries once, judged, and made.

use torpor_images::proto::FileEntry;

use crate::collect::references::network_of;
use crate::request::Ask;

// linux/socket.h, linux/net.h, linux/in.h.
const UNIX: u32 = 1;
const INET: u32 = 2;
const INET6: u32 = 10;
const NETLINK: u32 = 16;
const PACKET: u32 = 17;
const STREAM: u32 = 1;
const DATAGRAM: u32 = 2;
const RAW: u32 = 3;
const TCP: u32 = 6;
const MPTCP: u32 = 262;
/// The old type of packet sockets (`SOCK_PACKET`): its protocol is known from the beginning.
const OLD_PACKET: u32 = 10;

/// What socket(2) is told, and where. One comes from an entry of the images, or is of a kind that
/// anybody makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{InetSkEntry, NetlinkSkEntry, PacketSockEntry, UnixSkEntry};

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
    fn other_sockets_are_refused() {
        /// `SOCK_NONBLOCK` of socket(2).
        const NONBLOCK: u32 = 0o4000;
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
