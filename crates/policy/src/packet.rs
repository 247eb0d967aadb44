//! Packet sockets: options, rings, groups and what they are bound to, read of their entries once, and
//! made. Whoever may have one may have all of that (`CAP_NET_RAW`, see [`crate::SocketKind`]). Only the
//! memory of rings is judged besides: the kernel counts it for nobody.

use torpor_images::proto::{FileEntry, PacketRing, PacketSockEntry};

use crate::request::Ask;
use crate::words::RING_SIZE;

/// The longest address of a group (`struct packet_mreq_max`).
const MAX_ADDRESS: usize = 32;
/// How much memory the rings of a socket may take without being asked for, in bytes.
const MAX_RINGS: u64 = 256 << 20;
/// `SOCK_PACKET` of linux/net.h, the type of long ago.
const OLD: u32 = 10;

/// A packet socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketSocket {
    /// The protocol that it receives, in network byte order.
    pub protocol: u16,
    /// The index of the device that it is bound to; 0 for all.
    pub device: u32,
    /// It is of the type of long ago (`SOCK_PACKET`).
    pub old: bool,
    /// `PACKET_VERSION`.
    pub version: u32,
    /// `PACKET_RESERVE`.
    pub reserve: u32,
    /// `PACKET_AUXDATA`.
    pub auxiliary: bool,
    /// `PACKET_ORIGDEV`.
    pub original_device: bool,
    /// `PACKET_VNET_HDR`.
    pub virtual_header: bool,
    /// `PACKET_LOSS`.
    pub loss: bool,
    /// `PACKET_TIMESTAMP`.
    pub timestamp: u32,
    /// `PACKET_COPY_THRESH`.
    pub copy_threshold: u32,
    /// What it receives beyond its own address, as often as each was joined.
    pub groups: Vec<PacketGroup>,
    /// `PACKET_FANOUT`: number, kind and flags of a group.
    pub fanout: Option<u32>,
    /// `PACKET_RX_RING`.
    pub receive: Option<Ring>,
    /// `PACKET_TX_RING`.
    pub send: Option<Ring>,
    /// Where the kernel stands in the ring for receiving, if that is mapped.
    pub position: Option<RingPosition>,
}

/// A group of a device, or all that it gets (`struct packet_mreq`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketGroup {
    /// The index of the device.
    pub device: u32,
    /// `PACKET_MR_*`.
    pub kind: u16,
    /// Its address.
    pub address: Vec<u8>,
}

/// A ring (`struct tpacket_req3`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Bytes of a block, and how many blocks there are.
    pub blocks: (u32, u32),
    /// Bytes of a frame, and how many frames there are.
    pub frames: (u32, u32),
    /// What rings of `TPACKET_V3` have more: time limit, private bytes, features.
    pub more: [u32; 3],
}

/// A place in a ring.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RingPosition {
    /// The frame or block that is filled next.
    pub next: u32,
    /// Those that the program has still to read, by their numbers, the oldest first.
    pub unread: Vec<(u32, Vec<u8>)>,
}

impl From<&PacketRing> for Ring {
    fn from(entry: &PacketRing) -> Self {
        Ring {
            blocks: (entry.block_size, entry.block_nr),
            frames: (entry.frame_size, entry.frame_nr),
            more: [entry.retire_tmo, entry.sizeof_priv, entry.features],
        }
    }
}

impl Ring {
    /// Bytes of memory.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::from(self.blocks.0) * u64::from(self.blocks.1)
    }
}

impl PacketSocket {
    /// That of an open file; `None` of one that is none.
    ///
    /// # Errors
    /// A protocol, a group or a place in a ring that there cannot be.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let read =
            |socket| Self::read(socket).map_err(|reason| format!("socket {}: {reason}", entry.id));
        entry.psk.as_ref().map(read).transpose()
    }

    fn read(entry: &PacketSockEntry) -> Result<Self, String> {
        let group = |group: &torpor_images::proto::PacketMclist| {
            let address = Some(group.addr.clone()).filter(|address| address.len() <= MAX_ADDRESS);
            let kind = u16::try_from(group.r#type).ok();
            Some(PacketGroup { device: group.index, kind: kind?, address: address? })
        };
        let groups = entry.mclist.iter().map(group).collect::<Option<_>>();
        let protocol = u16::try_from(entry.protocol);
        let position = entry.torpor_position.as_ref().map(|position| RingPosition {
            next: position.next,
            unread: position.unread.iter().map(|s| (s.index, s.content.clone())).collect(),
        });
        let socket = PacketSocket {
            protocol: protocol.map_err(|_| "receives a protocol that there is not")?,
            device: entry.ifindex,
            old: entry.r#type == OLD,
            version: entry.version,
            reserve: entry.reserve,
            auxiliary: entry.aux_data,
            original_device: entry.orig_dev,
            virtual_header: entry.vnet_hdr,
            loss: entry.loss,
            timestamp: entry.timestamp,
            copy_threshold: entry.copy_thresh,
            groups: groups.ok_or("is in a group that there cannot be")?,
            fanout: entry.fanout.filter(|&group| group != u32::MAX),
            receive: entry.rx_ring.as_ref().map(Ring::from),
            send: entry.tx_ring.as_ref().map(Ring::from),
            position,
        };
        // To get there takes as many packets as there are slots before it.
        if socket.position.is_some() && socket.rings() > MAX_RINGS {
            return Err(format!("its rings of {} bytes are mapped", socket.rings()));
        }
        Ok(socket)
    }

    /// The memory of its rings.
    fn rings(&self) -> u64 {
        let sizes = [&self.receive, &self.send].into_iter().flatten().map(Ring::size);
        sizes.fold(0, u64::saturating_add)
    }

    /// What is judged of it: the memory of its rings, if it is much.
    #[must_use]
    pub fn ask(&self) -> Option<Ask> {
        let much = Some(self.rings()).filter(|&size| size > MAX_RINGS);
        much.map(|size| Ask::Raise { name: RING_SIZE, to: size.into() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{PacketMclist, TorporPacketPosition};

    use super::*;

    fn read(entry: PacketSockEntry) -> Result<PacketSocket, String> {
        let file = FileEntry { id: 7, psk: Some(entry), ..FileEntry::default() };
        PacketSocket::of(&file).map(Option::unwrap)
    }

    fn ring(block_nr: u32) -> Option<PacketRing> {
        Some(PacketRing { block_size: 1 << 20, block_nr, ..PacketRing::default() })
    }

    #[test]
    fn the_memory_of_rings_is_asked_for() {
        let of = |receive, send| {
            let (rx_ring, tx_ring) = (receive, send);
            read(PacketSockEntry { rx_ring, tx_ring, ..Default::default() }).unwrap().ask()
        };
        let raised = |mib: i128| Some(Ask::Raise { name: RING_SIZE, to: mib << 20 });
        assert_eq!(of(None, None), None);
        assert_eq!(of(ring(255), ring(1)), None);
        assert_eq!(of(ring(257), None), raised(257));
        assert_eq!(of(ring(1), ring(256)), raised(257));
        let most = Some(PacketRing { block_size: u32::MAX, ..ring(u32::MAX).unwrap() });
        assert!(matches!(of(most, most), Some(Ask::Raise { to, .. }) if to == u64::MAX.into()));
    }

    #[test]
    fn sockets_that_there_cannot_be() {
        let group = |r#type, len| {
            let mclist = vec![PacketMclist { index: 1, r#type, addr: vec![0; len] }];
            PacketSockEntry { mclist, ..PacketSockEntry::default() }
        };
        assert_eq!(read(group(1, MAX_ADDRESS)).unwrap().groups[0].kind, 1);
        let place = Some(TorporPacketPosition::default());
        let mapped = |blocks| PacketSockEntry {
            rx_ring: ring(blocks),
            torpor_position: place.clone(),
            ..PacketSockEntry::default()
        };
        assert!(read(mapped(256)).is_ok());
        for (entry, wanted) in [
            (group(1, MAX_ADDRESS + 1), "is in a group"),
            (group(1 << 16, 6), "is in a group"),
            (PacketSockEntry { protocol: 1 << 16, ..Default::default() }, "receives a protocol"),
            (mapped(257), "are mapped"),
        ] {
            let error = read(entry).unwrap_err();
            assert!(error.contains("socket 7: ") && error.contains(wanted), "{error}");
        }
        let fanout =
            |fanout| read(PacketSockEntry { fanout, ..Default::default() }).unwrap().fanout;
        assert_eq!([fanout(None), fanout(Some(u32::MAX)), fanout(Some(7))], [None, None, Some(7)]);
    }
}
