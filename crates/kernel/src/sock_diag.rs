//! What the kernel tells about the sockets of a network namespace (sock_diag(7)).
//!
//! One netlink request lists all sockets of a family: what a descriptor alone does
//! not show is only found here (the peer of a Unix socket, the rings of a packet
//! socket). All functions speak about the network namespace of the calling thread.

use std::net::{IpAddr, SocketAddr};

use crate::error::{Context, Error, Result};
use crate::netlink::{NetlinkAttributes, SOCK_DIAG, Socket};

/// A Unix socket (linux/unix_diag.h).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnixSocket {
    /// Inode number of the socket; 0 for one that nobody has accepted yet.
    pub inode: u32,
    /// `SOCK_*`.
    pub kind: u8,
    /// `TCP_*` state.
    pub state: u8,
    /// The name it is bound to, without the family; empty for none.
    pub name: Vec<u8>,
    /// Inode number of the peer; `Some(0)` for a peer that is closed or that nobody has
    /// accepted yet.
    pub peer: Option<u32>,
    /// Inode numbers of those that wait to be accepted.
    pub pending: Vec<u32>,
    /// Bytes (or connections, when it listens) that wait to be received.
    pub queued: u32,
    /// The argument of `listen`.
    pub backlog: u32,
    /// What it has sent and nobody has read yet, in bytes of the kernel's memory.
    pub unread: u32,
    /// Directions that were shut down, as in `sk_shutdown`.
    pub shutdown: u8,
}

/// A TCP, UDP, UDP-Lite or raw socket (linux/inet_diag.h).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InetSocket {
    /// `AF_INET` or `AF_INET6`.
    pub family: u8,
    /// `TCP_*` state.
    pub state: u8,
    /// Inode number of the socket; 0 if it is not open as a file.
    pub inode: u32,
    /// Local address, as the kernel keeps it: in network byte order.
    pub source: [u32; 4],
    /// Local port (protocol number of a raw socket).
    pub source_port: u16,
    /// Remote address.
    pub destination: [u32; 4],
    /// Remote port.
    pub destination_port: u16,
    /// Index of the device it is bound to.
    pub device: u32,
    /// Bytes to be read; connections to be accepted when it listens.
    pub queued: u32,
    /// Bytes to be sent; the argument of `listen` when it listens.
    pub backlog: u32,
    /// Directions that were shut down, as in `sk_shutdown`.
    pub shutdown: u8,
    /// Whether it has keys that its segments are signed by (`TCP_MD5SIG`). Without `CAP_NET_ADMIN`
    /// nobody sees that.
    pub signed: bool,
}

/// A packet socket (linux/packet_diag.h).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PacketSocket {
    /// Inode number of the socket.
    pub inode: u32,
    /// `SOCK_*`.
    pub kind: u8,
    /// The protocol it receives, in host byte order.
    pub protocol: u16,
    /// Index of the device it is bound to.
    pub device: u32,
    /// `TPACKET_V1` and so on.
    pub version: u32,
    /// `PACKET_RESERVE`.
    pub reserve: u32,
    /// `PACKET_COPY_THRESH`.
    pub copy_thresh: u32,
    /// `PACKET_TIMESTAMP`.
    pub timestamp: u32,
    /// `PDI_*`.
    pub flags: u32,
    /// Its groups.
    pub memberships: Vec<PacketMembership>,
    /// Its fanout group: number and, in the upper half, type.
    pub fanout: Option<u32>,
    /// Its receive ring.
    pub rx_ring: Option<PacketRing>,
    /// Its send ring.
    pub tx_ring: Option<PacketRing>,
}

/// A group that a packet socket has joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PacketMembership {
    /// Index of the device.
    pub device: u32,
    /// How often.
    pub count: u32,
    /// `PACKET_MR_*`.
    pub kind: u16,
    /// The address of the group.
    pub address: Vec<u8>,
}

/// A ring of a packet socket (`struct packet_diag_ring`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PacketRing {
    pub block_size: u32,
    pub block_nr: u32,
    pub frame_size: u32,
    pub frame_nr: u32,
    pub retire_tmo: u32,
    pub sizeof_priv: u32,
    pub features: u32,
}

/// A netlink socket (linux/netlink_diag.h).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetlinkSocket {
    /// Inode number of the socket.
    pub inode: u32,
    /// `NETLINK_*`.
    pub protocol: u8,
    /// 1 when connected, else 0.
    pub state: u8,
    /// Its address.
    pub portid: u32,
    /// Whom it is connected to.
    pub destination_portid: u32,
    /// Which group it is connected to.
    pub destination_group: u32,
    /// The groups that it has joined, a bit set.
    pub groups: Vec<u32>,
    /// Bytes that wait to be received.
    pub queued: u32,
    /// Whether there is more of a long answer to come.
    pub answering: bool,
}

/// The request for sockets of a family (linux/sock_diag.h).
pub const SOCK_DIAG_BY_FAMILY: u16 = 20;

/// All Unix sockets.
///
/// # Errors
/// If there is no netlink socket, or this kernel does not list Unix sockets.
pub fn unix() -> Result<Vec<UnixSocket>> {
    // struct unix_diag_req: all states; name, peer, pending connections and queues.
    const SHOW: u32 = 0x1 | 0x4 | 0x8 | 0x10;
    /// `TCP_LISTEN`.
    const LISTEN: u8 = 10;
    let mut request = vec![u8_of(libc::AF_UNIX), 0, 0, 0];
    for word in [u32::MAX, 0, SHOW, 0, 0] {
        request.extend(word.to_ne_bytes());
    }
    list(&request, |message| {
        let mut found = UnixSocket {
            kind: message.u8(1)?,
            state: message.u8(2)?,
            inode: message.u32(4)?,
            ..UnixSocket::default()
        };
        for (kind, value) in message.attributes(16) {
            match kind {
                0 => found.name = value.0.to_vec(),
                2 => found.peer = value.u32(0),
                3 => found.pending = value.words(),
                // The second word is the argument of listen(2) where there is one.
                4 if found.state == LISTEN => {
                    (found.queued, found.backlog) = (value.u32(0)?, value.u32(4)?);
                }
                4 => (found.queued, found.unread) = (value.u32(0)?, value.u32(4)?),
                6 => found.shutdown = value.u8(0)?,
                _ => {}
            }
        }
        Some(found)
    })
}

/// All sockets of an Internet family and protocol (TCP, UDP, UDP-Lite, raw).
///
/// # Errors
/// If the kernel cannot be asked (netlink(7)). A protocol that it cannot list has no sockets.
pub fn inet(family: i32, protocol: i32) -> Result<Vec<InetSocket>> {
    /// `INET_DIAG_*` of linux/inet_diag.h. The last comes with the first alone.
    const INFO: u16 = 2;
    const SHUTDOWN: u16 = 8;
    const MD5SIG: u16 = 18;
    // struct inet_diag_req_v2, with the extensions that are asked for.
    let extensions = 1 << (SHUTDOWN - 1) | 1 << (INFO - 1);
    let mut request = vec![u8_of(family), u8_of(protocol), extensions, 0];
    // All states but those of sockets that are no file any more: TIME_WAIT.
    request.extend((!(1u32 << 6)).to_ne_bytes());
    request.resize(request.len() + 48, 0);
    list(&request, |message| {
        let port = |at: usize| Some(u16::from_be(message.u16(at)?));
        let address = |at: usize| {
            Some([
                message.u32(at)?,
                message.u32(at + 4)?,
                message.u32(at + 8)?,
                message.u32(at + 12)?,
            ])
        };
        let mut found = InetSocket {
            family: message.u8(0)?,
            state: message.u8(1)?,
            source_port: port(4)?,
            destination_port: port(6)?,
            source: address(8)?,
            destination: address(24)?,
            device: message.u32(40)?,
            queued: message.u32(56)?,
            backlog: message.u32(60)?,
            inode: message.u32(68)?,
            shutdown: 0,
            signed: false,
        };
        for (kind, value) in message.attributes(72) {
            match kind {
                SHUTDOWN => found.shutdown = value.u8(0)?,
                MD5SIG => found.signed = true,
                _ => {}
            }
        }
        Some(found)
    })
}

/// Which user has the TCP socket that is connected from `own` to `other`, as the user namespace of the calling thread
/// numbers them; `None` if it is open no more: of such a socket the kernel says that it is root's.
///
/// # Errors
/// If there is no such socket in this network namespace, or the kernel cannot be asked.
pub fn tcp_owner(own: SocketAddr, other: SocketAddr) -> Result<Option<u32>> {
    let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // struct inet_diag_req_v2, with what names a connection: ports, addresses, any device, no cookie.
    let mut request = vec![u8_of(family), u8_of(libc::IPPROTO_TCP), 0, 0];
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(own.port().to_be_bytes());
    request.extend(other.port().to_be_bytes());
    for address in [own, other] {
        let mut bytes = match address.ip() {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        bytes.resize(16, 0);
        request.extend(bytes);
    }
    request.extend(0u32.to_ne_bytes());
    request.extend([0xFF; 8]);
    let found = Socket::open(SOCK_DIAG)?.get(SOCK_DIAG_BY_FAMILY, &request)?;
    let owner = found.as_ref().and_then(|message| {
        let message = Bytes(message.body());
        Some((message.u32(64)?, message.u32(68)?))
    });
    Ok(owner.and_then(|(user, inode)| (inode != 0).then_some(user)))
}

/// Makes the kernel forget the closed TCP connections of a local port (`TIME_WAIT`), to
/// which nothing can come any more but what is late.
///
/// # Errors
/// If there is no netlink socket, or this kernel has no `SOCK_DESTROY`.
pub fn forget_closed(port: u16) -> Result<()> {
    const SOCK_DESTROY: u16 = 21;
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut request = vec![u8_of(family), u8_of(libc::IPPROTO_TCP), 0, 0];
        request.extend((1u32 << 6).to_ne_bytes());
        let mut all = request.clone();
        all.resize(all.len() + 48, 0);
        // The addresses and the number of a connection are named as they are listed.
        let same_port = |message: Bytes<'_>| {
            let id = message.0.get(4..52)?;
            (u16::from_be(message.u16(4)?) == port).then(|| id.to_vec())
        };
        for id in list(&all, same_port)? {
            let request = [request.as_slice(), &id].concat();
            match Socket::open(SOCK_DIAG)?.change(SOCK_DESTROY, 0, &request)? {
                Err(error) if !cannot_list(&error) => {
                    return Err(error).context(|| "SOCK_DESTROY".to_owned());
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// All packet sockets.
///
/// # Errors
/// If there is no netlink socket, or this kernel does not list packet sockets.
pub fn packet() -> Result<Vec<PacketSocket>> {
    // struct packet_diag_req: information, memberships, rings, fanout.
    let mut request = vec![u8_of(libc::AF_PACKET), 0, 0, 0];
    for word in [0u32, 0xF, 0, 0] {
        request.extend(word.to_ne_bytes());
    }
    list(&request, |message| {
        let mut found = PacketSocket {
            kind: message.u8(1)?,
            protocol: message.u16(2)?,
            inode: message.u32(4)?,
            ..PacketSocket::default()
        };
        for (kind, value) in message.attributes(16) {
            match kind {
                0 => {
                    found.device = value.u32(0)?;
                    found.version = value.u32(4)?;
                    found.reserve = value.u32(8)?;
                    found.copy_thresh = value.u32(12)?;
                    found.timestamp = value.u32(16)?;
                    found.flags = value.u32(20)?;
                }
                1 => found.memberships = memberships(value)?,
                2 => found.rx_ring = Some(ring(value)?),
                3 => found.tx_ring = Some(ring(value)?),
                4 => found.fanout = value.u32(0),
                _ => {}
            }
        }
        Some(found)
    })
}

fn memberships(value: Bytes<'_>) -> Option<Vec<PacketMembership>> {
    // struct packet_diag_mclist
    let (entries, _) = value.0.as_chunks::<44>();
    entries
        .iter()
        .map(|entry| {
            let entry = Bytes(entry);
            let len = usize::from(entry.u16(10)?);
            Some(PacketMembership {
                device: entry.u32(0)?,
                count: entry.u32(4)?,
                kind: entry.u16(8)?,
                address: entry.0.get(12..12 + len)?.to_vec(),
            })
        })
        .collect()
}

fn ring(value: Bytes<'_>) -> Option<PacketRing> {
    Some(PacketRing {
        block_size: value.u32(0)?,
        block_nr: value.u32(4)?,
        frame_size: value.u32(8)?,
        frame_nr: value.u32(12)?,
        retire_tmo: value.u32(16)?,
        sizeof_priv: value.u32(20)?,
        features: value.u32(24)?,
    })
}

/// All netlink sockets.
///
/// # Errors
/// If there is no netlink socket, or this kernel does not list netlink sockets.
pub fn netlink() -> Result<Vec<NetlinkSocket>> {
    // struct netlink_diag_req: all protocols; memory, groups, flags.
    const SHOW: u32 = 1 | 2 | 8;
    const CB_RUNNING: u32 = 1;
    let mut request = vec![u8_of(libc::AF_NETLINK), 0xFF, 0, 0];
    for word in [0u32, SHOW, 0, 0] {
        request.extend(word.to_ne_bytes());
    }
    list(&request, |message| {
        let mut found = NetlinkSocket {
            protocol: message.u8(2)?,
            state: message.u8(3)?,
            portid: message.u32(4)?,
            destination_portid: message.u32(8)?,
            destination_group: message.u32(12)?,
            inode: message.u32(16)?,
            ..NetlinkSocket::default()
        };
        for (kind, value) in message.attributes(28) {
            match kind {
                0 => found.queued = value.u32(0)?,
                1 => found.groups = value.words(),
                4 => found.answering = value.u32(0)? & CB_RUNNING != 0,
                _ => {}
            }
        }
        Some(found)
    })
}

/// The families and protocols that are given here fit.
fn u8_of(number: i32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

/// Integers at offsets in what the kernel sent.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn u8(self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    fn u16(self, at: usize) -> Option<u16> {
        Some(u16::from_ne_bytes(*self.0.get(at..)?.first_chunk()?))
    }

    fn u32(self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*self.0.get(at..)?.first_chunk()?))
    }

    fn words(self) -> Vec<u32> {
        self.0.as_chunks().0.iter().map(|w| u32::from_ne_bytes(*w)).collect()
    }

    /// The attributes from offset `at` on, up to the first that is cut off.
    fn attributes(self, at: usize) -> impl Iterator<Item = (u16, Bytes<'a>)> {
        NetlinkAttributes(self.0.get(at..).unwrap_or_default())
            .map(|(kind, value)| (kind, Bytes(value)))
    }
}

/// Sends a request of type `SOCK_DIAG_BY_FAMILY` and parses each answer.
fn list<T>(request: &[u8], parse: impl Fn(Bytes<'_>) -> Option<T>) -> Result<Vec<T>> {
    // Sockets that belong to a frozen tree do not change: what changes are others.
    let found = Socket::open(SOCK_DIAG)?.list_as_it_is(SOCK_DIAG_BY_FAMILY, request);
    match found {
        Ok(all) => Ok(all.iter().filter_map(|message| parse(Bytes(message.body()))).collect()),
        Err(Error::Os { source, .. }) if cannot_list(&source) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Whether the kernel says that there is no way to list the protocol, so that none of its sockets
/// is listed.
fn cannot_list(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOENT)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};

    use std::os::fd::AsFd;

    use rustix::event::{PollFd, PollFlags, poll};
    use torpor_sys::socket;

    use super::*;

    fn inode(file: impl AsFd) -> u32 {
        u32::try_from(rustix::fs::fstat(file).unwrap().st_ino).unwrap()
    }

    #[test]
    fn unix_sockets_know_their_peers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("listener");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        a.shutdown(std::net::Shutdown::Write).unwrap();
        let all = unix().unwrap();
        let find = |i: u32| all.iter().find(|s| s.inode == i).unwrap();
        assert_eq!(find(inode(&a)).peer, Some(inode(&b)));
        assert_eq!(find(inode(&a)).shutdown, 2);
        assert_eq!(find(inode(&b)).shutdown, 1);
        assert_eq!(find(inode(&client)).peer, Some(0));
        let listener = find(inode(&listener));
        assert_eq!(listener.pending, [inode(&client)]);
        assert_eq!(listener.state, 10);
        // The name of a path ends with the zero that the kernel adds.
        let mut name = path.into_os_string().into_encoded_bytes();
        name.push(0);
        assert_eq!(listener.name, name);
    }

    #[test]
    fn a_connection_has_an_owner_as_long_as_it_is_open() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, from) = listener.accept().unwrap();
            let at = server.local_addr().unwrap();
            let own = rustix::process::geteuid().as_raw();
            assert_eq!(tcp_owner(from, at).unwrap(), Some(own));
            drop(client);
            assert!(!matches!(tcp_owner(from, at), Ok(Some(_))), "it is closed");
        }
        let nobody = "127.0.0.1:1".parse().unwrap();
        assert!(tcp_owner(nobody, nobody).is_err());
    }

    #[test]
    fn tcp_sockets_are_listed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // The client has its answer a moment before the listener has the client.
        let mut waiting = [PollFd::new(&listener, PollFlags::IN)];
        assert_eq!(poll(&mut waiting, None).unwrap(), 1);
        let all = inet(libc::AF_INET, libc::IPPROTO_TCP).unwrap();
        let found = all.iter().find(|s| s.inode == inode(&listener)).unwrap();
        assert_eq!((found.state, found.source_port, found.queued), (10, port, 1));
        let found = all.iter().find(|s| s.inode == inode(&client)).unwrap();
        assert_eq!((found.state, found.destination_port), (1, port));
        assert_eq!(found.source[0], u32::from_ne_bytes([127, 0, 0, 1]));
    }

    #[test]
    fn sockets_whose_segments_are_signed_are_listed_as_such() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        // struct tcp_md5sig: an address of 128 bytes, flags, lengths, a device, and 80 bytes for the key.
        let mut key = [0; 216];
        key[..2].copy_from_slice(&2u16.to_ne_bytes());
        key[4..8].copy_from_slice(&[127, 0, 0, 1]);
        key[130..132].copy_from_slice(&6u16.to_ne_bytes());
        key[136..142].copy_from_slice(b"secret");
        socket::set(listener.as_fd(), socket::Opt::TCP_MD5SIG, &key).unwrap();
        let all = inet(libc::AF_INET, libc::IPPROTO_TCP).unwrap();
        let is_signed =
            |socket: &TcpListener| all.iter().find(|s| s.inode == inode(socket)).unwrap().signed;
        assert_eq!((is_signed(&listener), is_signed(&plain)), (true, false));
    }

    #[test]
    fn packet_and_netlink_sockets_are_listed() {
        let route = socket::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0).unwrap();
        // sockaddr_nl: any port, group 1
        socket::bind(route.as_fd(), &[16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).unwrap();
        let all = netlink().unwrap();
        let found = all.iter().find(|s| s.inode == inode(&route)).unwrap();
        assert_eq!((found.protocol, found.groups[0]), (0, 1));
        assert_ne!(found.portid, 0);

        let arp = socket::socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0x0608).unwrap();
        let all = packet().unwrap();
        let found = all.iter().find(|s| s.inode == inode(&arp)).unwrap();
        assert_eq!((found.protocol, found.kind), (0x0806, 2));
    }

    #[test]
    fn cut_answers_end_the_list() {
        let bytes = [8, 0, 2, 0, 1, 2, 3, 4, 200, 0, 3, 0, 1];
        let found: Vec<_> = Bytes(&bytes).attributes(0).map(|(k, v)| (k, v.u32(0))).collect();
        assert_eq!(found, [(2, Some(u32::from_ne_bytes([1, 2, 3, 4])))]);
        assert_eq!(Bytes(&[0, 0, 0, 0]).attributes(0).count(), 0);
    }
}
