//! Packet sockets: what they are bound to, options, groups, rings, fanout.
//!
//! Frames that were received and not read yet cannot be put back (they come from a
//! device): they are left out with a warning, but for those in a ring that is mapped ([`ring`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use libc::{
    PACKET_AUXDATA, PACKET_COPY_THRESH, PACKET_FANOUT, PACKET_LOSS, PACKET_ORIGDEV, PACKET_RESERVE,
    PACKET_TIMESTAMP, PACKET_VERSION, PACKET_VNET_HDR,
};
use rustix::net::netdevice;
use torpor_images::proto::{FdTypes, FileEntry, PacketMclist, PacketRing, PacketSockEntry};
use torpor_kernel::sock_diag as diag;
use torpor_policy::{PacketGroup, PacketSocket, Ring, SocketSetup};
use torpor_sys::socket::{self, Opt};

use super::about::{Socket, SocketOwner, bad_entry, create, restore_flags};
use super::around::Around;
use super::spaces::Lists;
use super::{options, ring};
use crate::error::{Context, Result};
use crate::file::Found;
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;

pub(super) const TPACKET_V3: u32 = libc::tpacket_versions::TPACKET_V3 as u32;
/// Ways of fanout that are decided by a program: classic and extended BPF.
const FANOUT_PROGRAMS: [u32; 2] = [6, 7];
/// The longest address of a group (`struct packet_mreq_max`).
const MAX_ADDRESS: usize = 32;

/// Bits of `pdi_flags` (linux/packet_diag.h).
mod flag {
    pub(super) const AUXDATA: u32 = 0x2;
    pub(super) const ORIGDEV: u32 = 0x4;
    pub(super) const VNET_HDR: u32 = 0x8;
    pub(super) const LOSS: u32 = 0x10;
}

/// Describes a packet socket.
pub(super) fn dump(
    sockets: &mut Lists,
    around: &Around<'_>,
    found: &Found,
    about: &Socket,
) -> Result<FileEntry> {
    options::leave_out_times(around.strict, found)?;
    let id_maps = around.id_maps;
    let fd = found.file.as_fd();
    let seen = sockets.spaces.packet(about)?;
    let seen = seen.ok_or_else(|| found.refuse("the kernel does not list it"))?.clone();
    if seen.device == u32::MAX {
        return Err(found.refuse("it is bound to a network device that is gone"));
    }
    if socket::receive_queue(fd).is_ok_and(|bytes| bytes > 0) {
        found.leave_out(
            around.strict,
            "its packets that were not read yet are not kept: they cannot be received again",
        )?;
    }
    let mut psk = PacketSockEntry {
        id: found.id,
        r#type: about.kind.cast_unsigned(),
        // As socket(2) takes it: in network byte order.
        protocol: seen.protocol.to_be().into(),
        flags: found.info.flags & !libc::O_CLOEXEC.cast_unsigned(),
        ifindex: seen.device,
        fown: found.fown,
        opts: options::dump(id_maps, found, about, &mut sockets.defaults)?,
        version: seen.version,
        reserve: seen.reserve,
        aux_data: seen.flags & flag::AUXDATA != 0,
        orig_dev: seen.flags & flag::ORIGDEV != 0,
        vnet_hdr: seen.flags & flag::VNET_HDR != 0,
        loss: seen.flags & flag::LOSS != 0,
        timestamp: seen.timestamp,
        copy_thresh: seen.copy_thresh,
        mclist: memberships(&seen),
        fanout: fanout(found, &seen)?,
        rx_ring: seen.rx_ring.map(geometry),
        tx_ring: seen.tx_ring.map(geometry),
        ns_id: Some(about.ns_id),
        torpor_position: None,
    };
    psk.torpor_position = ring::dump(around.tasks, found, about.inode, &psk)?;
    Ok(FileEntry { psk: Some(psk), ..found.entry(FdTypes::Packetsk) })
}

/// As often as each was joined; the kernel lists the latest first.
fn memberships(seen: &diag::PacketSocket) -> Vec<PacketMclist> {
    let mut all = Vec::new();
    for m in seen.memberships.iter().rev() {
        let entry =
            PacketMclist { index: m.device, r#type: m.kind.into(), addr: m.address.clone() };
        all.extend((0..m.count.max(1)).map(|_| entry.clone()));
    }
    all
}

/// Number, kind and flags of the group.
fn fanout(found: &Found, seen: &diag::PacketSocket) -> Result<Option<u32>> {
    if seen.fanout.is_none() {
        return Ok(None);
    }
    let value = socket::get_int(found.file.as_fd(), libc::SOL_PACKET, PACKET_FANOUT)
        .context(|| "PACKET_FANOUT".to_owned())?
        .cast_unsigned();
    if FANOUT_PROGRAMS.contains(&(value >> 16 & 0xff)) {
        return Err(found.refuse("a program distributes its packets (PACKET_FANOUT_DATA)"));
    }
    Ok(Some(value))
}

fn geometry(r: diag::PacketRing) -> PacketRing {
    PacketRing {
        block_size: r.block_size,
        block_nr: r.block_nr,
        frame_size: r.frame_size,
        frame_nr: r.frame_nr,
        retire_tmo: r.retire_tmo,
        sizeof_priv: r.sizeof_priv,
        features: r.features,
    }
}

/// Checks the images.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(crate) fn load<'f>(all: impl Iterator<Item = (u32, &'f PacketSocket)>) -> Result<()> {
    for (id, packets) in all {
        if !ring::is_possible(packets) {
            return Err(bad_entry(id, "has a ring that there cannot be"));
        }
    }
    Ok(())
}

/// Makes the socket.
///
/// # Errors
/// If the socket cannot be made or bound, or does not take its options, rings or fanout group.
pub(crate) fn open(
    spaces: &Namespaces,
    id_maps: &IdMaps,
    owner: SocketOwner,
    id: u32,
    (setup, packets): &(SocketSetup, PacketSocket),
) -> Result<OwnedFd> {
    let kind = setup.kind;
    let owner = owner.or_of(&setup.options);
    let socket = owner.make(id_maps, || create(spaces, &kind))?;
    let fd = socket.as_fd();
    let wanted = &setup.options;
    options::restore_more(fd, wanted)?;
    let what = |what: &str| format!("{what} of packet socket {id}");
    restore_options(fd, packets).context(|| what("an option"))?;
    restore_rings(fd, packets).context(|| what("a ring"))?;
    ring::restore(fd, id, packets, || create(spaces, &kind.sender_to()))?;
    bind(fd, packets).context(|| what("the address"))?;
    packets.groups.iter().try_for_each(|group| {
        restore_membership(fd, group)
            .context(|| what(&format!("a group of device {}", group.device)))
    })?;
    if let Some(fanout) = packets.fanout {
        socket::set_int(fd, libc::SOL_PACKET, PACKET_FANOUT, fanout.cast_signed())
            .context(|| what("the fanout group"))?;
    }
    options::restore(id_maps, fd, wanted)?;
    restore_flags(fd, setup.flags)?;
    Ok(socket)
}

/// All these must be known before there is a ring.
fn restore_options(fd: BorrowedFd<'_>, socket: &PacketSocket) -> io::Result<()> {
    let options = [
        (PACKET_VERSION, socket.version),
        (PACKET_RESERVE, socket.reserve),
        (PACKET_AUXDATA, socket.auxiliary.into()),
        (PACKET_ORIGDEV, socket.original_device.into()),
        (PACKET_VNET_HDR, socket.virtual_header.into()),
        (PACKET_LOSS, socket.loss.into()),
        (PACKET_TIMESTAMP, socket.timestamp),
        (PACKET_COPY_THRESH, socket.copy_threshold),
    ];
    let mut set = options.into_iter().filter(|(_, value)| *value != 0);
    set.try_for_each(|(name, value)| {
        socket::set_int(fd, libc::SOL_PACKET, name, value.cast_signed())
    })
}

fn restore_rings(fd: BorrowedFd<'_>, socket: &PacketSocket) -> io::Result<()> {
    let rings = [(socket.receive, Opt::PACKET_RX_RING), (socket.send, Opt::PACKET_TX_RING)];
    for (ring, option) in rings {
        let Some(Ring { blocks, frames, more }) = ring else { continue };
        // struct tpacket_req, and what tpacket_req3 has more.
        let mut words = vec![blocks.0, blocks.1, frames.0, frames.1];
        if socket.version == TPACKET_V3 {
            words.extend(more);
        }
        let value: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        socket::set(fd, option, &value)?;
    }
    Ok(())
}

fn bind(fd: BorrowedFd<'_>, socket: &PacketSocket) -> io::Result<()> {
    let &PacketSocket { protocol, device, old, .. } = socket;
    if device == 0 && (old || protocol == 0) {
        return Ok(());
    }
    let address = if old {
        let mut address = u16::try_from(libc::AF_PACKET).unwrap_or(0).to_ne_bytes().to_vec();
        // struct sockaddr_pkt up to the name of the device; nothing may follow.
        address.extend(netdevice::index_to_name(fd, device)?.into_bytes());
        address.resize(16, 0);
        address
    } else {
        address(protocol, device)
    };
    socket::bind(fd, &address)
}

/// A `struct sockaddr_ll`: protocol, in network byte order, and device; the rest does not matter.
pub(super) fn address(protocol: u16, device: u32) -> Vec<u8> {
    let mut address = u16::try_from(libc::AF_PACKET).unwrap_or(0).to_ne_bytes().to_vec();
    address.extend(protocol.to_ne_bytes());
    address.extend(device.to_ne_bytes());
    address.resize(20, 0);
    address
}

fn restore_membership(fd: BorrowedFd<'_>, group: &PacketGroup) -> io::Result<()> {
    let PacketGroup { device, kind, address } = group;
    let mut value = device.to_ne_bytes().to_vec();
    value.extend(kind.to_ne_bytes());
    value.extend(u16::try_from(address.len()).unwrap_or(0).to_ne_bytes());
    value.extend(address);
    value.resize(8 + MAX_ADDRESS, 0);
    socket::set(fd, Opt::PACKET_ADD_MEMBERSHIP, &value)
}

#[cfg(test)]
mod tests {
    use torpor_sys::number::short;

    use super::super::testing::{cycle, dump, entries, in_netns};
    use super::*;
    use crate::options::Options;

    /// In the order of the network: nothing of it comes over the loopback device.
    const ARP: i32 = short(libc::ETH_P_ARP).to_be() as i32;

    fn new(kind: i32) -> OwnedFd {
        socket::socket(libc::AF_PACKET, kind, ARP).unwrap()
    }

    fn look(files: &[OwnedFd]) -> Vec<PacketSockEntry> {
        let dir = tempfile::tempdir().unwrap();
        dump(&Options::default(), dir.path(), files).unwrap();
        entries(dir.path()).into_iter().map(|e| e.psk.unwrap()).collect()
    }

    #[test]
    fn packet_sockets_come_back() {
        in_netns(|| {
            let set = |fd: &OwnedFd, name, value| {
                socket::set_int(fd.as_fd(), libc::SOL_PACKET, name, value).unwrap();
            };
            let bound = new(libc::SOCK_RAW);
            let address = [17, 0, 0x08, 0x06, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            socket::bind(bound.as_fd(), &address).unwrap();
            // Promiscuous, twice, and a group.
            let groups = [(1, Vec::new()), (1, Vec::new()), (0, vec![1, 2, 3, 4, 5, 6])];
            for (kind, addr) in groups {
                let group = PacketGroup { device: 1, kind, address: addr };
                restore_membership(bound.as_fd(), &group).unwrap();
            }
            set(&bound, PACKET_FANOUT, 7 | 1 << 16 | 0x10 << 24);
            let ringed = new(libc::SOCK_DGRAM);
            set(&ringed, PACKET_VERSION, 2);
            let words = [8192u32, 4, 2048, 16, 50, 16, 1];
            let request: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
            socket::set(ringed.as_fd(), Opt::PACKET_RX_RING, &request).unwrap();
            let old = new(10);
            let mut address = b"\x11\0lo".to_vec();
            address.resize(16, 0);
            socket::bind(old.as_fd(), &address).unwrap();
            let files = vec![bound, ringed, old, new(libc::SOCK_RAW)];
            let before = look(&files);
            assert_eq!((before[0].ifindex, before[0].protocol), (1, 0x0608));
            assert_eq!(before[0].mclist.len(), 3);
            assert_eq!(before[0].fanout(), 7 | 1 << 16 | 0x10 << 24);
            assert_eq!(before[1].rx_ring.as_ref().unwrap().sizeof_priv, 16);
            assert_eq!((before[2].r#type, before[2].ifindex), (10, 1));
            assert_eq!(look(&cycle(&Options::default(), files)), before);
        });
    }

    #[test]
    fn unread_packets_are_refused_if_all_is_wanted() {
        in_netns(|| {
            // ETH_P_ALL
            let all = socket::socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300).unwrap();
            let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            udp.send_to(b"x", udp.local_addr().unwrap()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let strict = Options { strict: true, ..Options::default() };
            let files = [all];
            let error = dump(&strict, dir.path(), &files).unwrap_err().to_string();
            assert!(error.contains("not read yet"), "{error}");
            dump(&Options::default(), dir.path(), &files).unwrap();
        });
    }
}
