//! Sockets of all families.
//!
//! A socket's own descriptor tells its options and names; what it is connected to
//! and what waits in it is asked from the kernel's lists ([`diag`]), once for each
//! network namespace and family.

mod address;
mod datagram;
pub mod diag;
mod inet;
mod inject;
mod multicast;
mod netlink;
mod options;
mod packet;
mod ping;
mod procfs;
mod queue;
pub mod tcp;
#[cfg(test)]
pub(crate) mod testing;
mod unix;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use torpor_images::proto::FileEntry;
use torpor_sys::socket;

pub use self::address::Address;
pub use self::inet::InetRestorer;
pub use self::netlink::NetlinkRestorer;
pub use self::packet::PacketRestorer;
pub use self::unix::UnixRestorer;

use self::diag::{InetSocket, NetlinkSocket, PacketSocket, UnixSocket};
use self::options::Defaults;
use self::queue::QueueWriter;
use super::{Dumper, Found};
use crate::dump::Dump;
use crate::error::{Context, Error, Result};
use crate::namespace::run_in;
use crate::restore::Restore;

/// `TCP_*` states (net/tcp_states.h), which the kernel uses for sockets of all
/// families.
pub mod state {
    #![allow(missing_docs)]
    pub const ESTABLISHED: u32 = 1;
    pub const SYN_SENT: u32 = 2;
    pub const SYN_RECV: u32 = 3;
    pub const FIN_WAIT1: u32 = 4;
    pub const FIN_WAIT2: u32 = 5;
    pub const TIME_WAIT: u32 = 6;
    pub const CLOSE: u32 = 7;
    pub const CLOSE_WAIT: u32 = 8;
    pub const LAST_ACK: u32 = 9;
    pub const LISTEN: u32 = 10;
    pub const CLOSING: u32 = 11;
}

/// What kind of socket a description is.
#[derive(Debug, Clone, Copy)]
pub struct Socket {
    /// `AF_*`.
    pub domain: i32,
    /// `SOCK_*`.
    pub kind: i32,
    /// `IPPROTO_*` or what else the family has.
    pub protocol: i32,
    /// Inode number.
    pub inode: u32,
    /// Inode number of its network namespace.
    pub space: u64,
    /// The number of its network namespace in the images.
    pub ns_id: u32,
}

impl Socket {
    fn look(cx: &Dump<'_>, found: &Found, spaces: &mut Spaces) -> Result<Self> {
        let fd = found.file.as_fd();
        let int = |name: i32| {
            socket::get_int(fd, libc::SOL_SOCKET, name)
                .context(|| format!("getsockopt({name}) of {}", found.link.display()))
        };
        let space = spaces.enter(fd)?;
        let ns_id = match cx.ns.by_inode(space) {
            Some(ns) => ns.id,
            None => {
                return Err(found.refuse(
                    "it belongs to a network namespace that no task of the tree lives in",
                ));
            }
        };
        Ok(Socket {
            domain: int(libc::SO_DOMAIN)?,
            kind: int(libc::SO_TYPE)?,
            protocol: int(libc::SO_PROTOCOL)?,
            inode: u32::try_from(found.stat.st_ino)
                .map_err(|_| found.refuse("its inode number has more than 32 bits"))?,
            space,
            ns_id,
        })
    }
}

/// The kernel's lists, by the inode number of the network namespace.
#[derive(Debug, Default)]
pub struct Spaces(HashMap<u64, Space>);

#[derive(Debug)]
struct Space {
    file: OwnedFd,
    inet: HashMap<(i32, i32), HashMap<u32, InetSocket>>,
    /// Ports of listeners to which connections are being established.
    handshakes: HashSet<u16>,
    unix: Option<HashMap<u32, UnixSocket>>,
    groups: Option<Vec<multicast::Group>>,
    packet: Option<HashMap<u32, PacketSocket>>,
    netlink: Option<HashMap<u32, NetlinkSocket>>,
}

impl Space {
    fn new(file: OwnedFd) -> Self {
        Space {
            file,
            inet: HashMap::new(),
            handshakes: HashSet::new(),
            unix: None,
            groups: None,
            packet: None,
            netlink: None,
        }
    }

    /// What the kernel lists of a family and protocol.
    fn inet(&mut self, key: (i32, i32)) -> Result<&HashMap<u32, InetSocket>> {
        if !self.inet.contains_key(&key) {
            let all = run_in(&[self.file.as_fd()], || diag::inet(key.0, key.1))?;
            let half_open = |s: &&InetSocket| u32::from(s.state) == state::SYN_RECV;
            self.handshakes.extend(all.iter().filter(half_open).map(|s| s.source_port));
            self.inet.insert(key, all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(&self.inet[&key])
    }
}

impl Spaces {
    /// The namespace of a socket, which becomes known.
    fn enter(&mut self, socket: BorrowedFd<'_>) -> Result<u64> {
        let file = socket::network_namespace(socket)
            .context(|| "network namespace of a socket".to_owned())?;
        let inode = rustix::fs::fstat(&file).context(|| "fstat of a namespace".to_owned())?.st_ino;
        self.0.entry(inode).or_insert_with(|| Space::new(file));
        Ok(inode)
    }

    /// What the kernel lists of an Internet socket; `None` if it does not list it:
    /// only what is bound or connected is listed.
    fn inet(&mut self, socket: &Socket) -> Result<Option<&InetSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        let protocol =
            if socket.kind == libc::SOCK_RAW { libc::IPPROTO_RAW } else { socket.protocol };
        Ok(space.inet((socket.domain, protocol))?.get(&socket.inode))
    }

    /// The multicast groups of all devices.
    fn groups(&mut self, socket: &Socket) -> Result<&[multicast::Group]> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(&[]) };
        let groups = match space.groups.take() {
            Some(groups) => groups,
            None => run_in(&[space.file.as_fd()], multicast::groups)?,
        };
        Ok(space.groups.insert(groups))
    }

    /// Whom a socket is connected to that has no ports, or is connected to port 0, of which
    /// getpeername(2) does not tell.
    fn portless_peer(&mut self, socket: &Socket) -> Result<Option<Address>> {
        let inode = socket.inode;
        let seen = match socket.kind {
            libc::SOCK_DGRAM if !ping::is_ping(socket.kind, socket.protocol) => {
                self.inet(socket)?.cloned()
            }
            _ => match self.0.get(&socket.space) {
                Some(space) => run_in(&[space.file.as_fd()], || procfs::find(socket, inode))?,
                None => None,
            },
        };
        let peer = seen.filter(|s| u32::from(s.state) == state::ESTABLISHED).map(|s| Address {
            words: s.destination,
            port: s.destination_port,
            scope: s.device,
            ..Address::unspecified(socket.domain)
        });
        Ok(peer)
    }

    /// Whether connections to a port, that nobody can accept yet, are being established.
    fn handshakes(&mut self, socket: &Socket, port: u32) -> Result<bool> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(false) };
        for family in [libc::AF_INET, libc::AF_INET6] {
            space.inet((family, libc::IPPROTO_TCP))?;
        }
        Ok(u16::try_from(port).is_ok_and(|port| space.handshakes.contains(&port)))
    }
}

impl Spaces {
    /// All Unix sockets of a socket's namespace, by inode number.
    fn unix(&mut self, socket: &Socket) -> Result<Option<&HashMap<u32, UnixSocket>>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.unix.is_none() {
            let all = run_in(&[space.file.as_fd()], diag::unix)?;
            space.unix = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.unix.as_ref())
    }
}

impl Spaces {
    /// What the kernel lists of a packet socket.
    fn packet(&mut self, socket: &Socket) -> Result<Option<&PacketSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.packet.is_none() {
            let all = run_in(&[space.file.as_fd()], diag::packet)?;
            space.packet = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.packet.as_ref().and_then(|all| all.get(&socket.inode)))
    }

    /// What the kernel lists of a netlink socket.
    fn netlink(&mut self, socket: &Socket) -> Result<Option<&NetlinkSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.netlink.is_none() {
            let all = run_in(&[space.file.as_fd()], diag::netlink)?;
            space.netlink = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.netlink.as_ref().and_then(|all| all.get(&socket.inode)))
    }
}

/// The dump half of all sockets.
#[derive(Debug, Default)]
pub struct SocketDumper {
    spaces: Spaces,
    defaults: Defaults,
    unix: unix::Dumped,
    queues: QueueWriter,
}

impl Dumper for SocketDumper {
    fn describe(&mut self, cx: &mut Dump<'_>, found: &Found) -> Result<Option<FileEntry>> {
        let kind = rustix::fs::FileType::from_raw_mode(found.stat.st_mode);
        let path_only = OFlags::from_bits_retain(found.info.flags).contains(OFlags::PATH);
        if kind != rustix::fs::FileType::Socket || path_only {
            return Ok(None);
        }
        let socket = Socket::look(cx, found, &mut self.spaces)?;
        match socket.domain {
            libc::AF_INET | libc::AF_INET6 => inet::dump(self, cx, found, &socket).map(Some),
            libc::AF_UNIX => unix::dump(self, cx, found, &socket).map(Some),
            libc::AF_PACKET => packet::dump(self, cx, found, &socket).map(Some),
            libc::AF_NETLINK => netlink::dump(self, cx, found, &socket).map(Some),
            other => Err(found
                .refuse(format!("sockets of the family {} are not supported", family_name(other)))),
        }
    }

    fn finish(&mut self, cx: &mut Dump<'_>) -> Result<()> {
        unix::finish(self, cx)?;
        self.queues.finish()
    }
}

/// What a family is called (socket(2)); its number if it is a rare one.
fn family_name(family: i32) -> String {
    match family {
        libc::AF_BLUETOOTH => "AF_BLUETOOTH",
        libc::AF_CAN => "AF_CAN",
        libc::AF_TIPC => "AF_TIPC",
        libc::AF_ALG => "AF_ALG",
        libc::AF_VSOCK => "AF_VSOCK",
        libc::AF_XDP => "AF_XDP",
        other => return other.to_string(),
    }
    .to_owned()
}

/// The flags of an image that are set on a socket when all else is done.
fn restore_flags(fd: BorrowedFd<'_>, flags: u32) -> Result<()> {
    let wanted = OFlags::from_bits_retain(flags) & OFlags::NONBLOCK;
    let now = rustix::fs::fcntl_getfl(fd).context(|| "F_GETFL".to_owned())?;
    if now & OFlags::NONBLOCK == wanted {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(fd, (now - OFlags::NONBLOCK) | wanted).context(|| "F_SETFL".to_owned())
}

/// The network namespace that an entry belongs to: entries of old images do not say,
/// they mean the root task's.
fn netns_of(cx: &Restore<'_>, ns_id: Option<u32>) -> u32 {
    ns_id.unwrap_or_else(|| {
        cx.ns.of_kind(crate::namespace::NsKind::Net).next().map_or(0, |ns| ns.id)
    })
}

/// Makes a socket in a network namespace of the images.
fn create(
    cx: &Restore<'_>,
    ns_id: Option<u32>,
    domain: u32,
    kind: u32,
    protocol: u32,
) -> Result<OwnedFd> {
    cx.in_netns(netns_of(cx, ns_id), || {
        socket::socket(domain.cast_signed(), kind.cast_signed(), protocol.cast_signed())
            .context(|| format!("socket({domain}, {kind}, {protocol})"))
    })
}

/// The error for an entry that contradicts itself.
fn bad_entry(id: u32, reason: impl std::fmt::Display) -> Error {
    Error::invalid("files.img", format!("socket {id}: {reason}"))
}
