//! The kernel's lists of sockets, for each network namespace.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_kernel::sock_diag::{self as diag, InetSocket, NetlinkSocket, PacketSocket, UnixSocket};
use torpor_sys::socket;

use super::about::Socket;
use super::address::Address;
use super::options::Defaults;
use super::queue::QueueWriter;
use super::{multicast, ping, procfs, state};
use crate::error::{Context, Result};
use crate::file::Found;
use crate::namespace::{Namespaces, run_in};
use crate::network::held::{ends, has_peer};
use crate::network::listed::inodes_of;

/// What the dump knows of the sockets met so far, and of those that the kernel lists.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// The kernel's lists.
    pub(super) spaces: Spaces,
    /// What new sockets have for options.
    pub(super) defaults: Defaults,
    /// What waits in sockets.
    pub(super) queues: QueueWriter,
    /// The inode numbers of the sockets that tasks of the tree have open, once somebody has asked.
    open: Option<HashSet<u32>>,
}

impl Lists {
    /// Whether the other end of a connection is open in a task of the tree, the live ones of which `pids` gives.
    /// `ends` are the remote and the local address.
    pub(super) fn has_other_end(
        &mut self,
        pids: impl FnOnce() -> Vec<i32>,
        socket: &Socket,
        ends: (Address, Address),
    ) -> Result<bool> {
        let Some(other) = self.spaces.other_end(socket, ends)? else { return Ok(false) };
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(inodes_of(&pids())?),
        };
        Ok(open.contains(&other))
    }
}

/// The kernel's lists, by the inode number of the network namespace.
#[derive(Debug, Default)]
pub(super) struct Spaces(HashMap<u64, SocketLists>);

#[derive(Debug)]
struct SocketLists {
    file: OwnedFd,
    inet: HashMap<(i32, i32), HashMap<u32, InetSocket>>,
    /// Ports of listeners to which connections are being established.
    handshakes: HashSet<u16>,
    unix: Option<HashMap<u32, UnixSocket>>,
    groups: Option<Vec<multicast::MulticastGroup>>,
    packet: Option<HashMap<u32, PacketSocket>>,
    netlink: Option<HashMap<u32, NetlinkSocket>>,
}

impl SocketLists {
    fn new(file: OwnedFd) -> Self {
        SocketLists {
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
            let all = run_in(&[self.file.as_fd()], || Ok(diag::inet(key.0, key.1)?))?;
            let half_open = |s: &&InetSocket| u32::from(s.state) == state::SYN_RECV;
            self.handshakes.extend(all.iter().filter(half_open).map(|s| s.source_port));
            self.inet.insert(key, all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(&self.inet[&key])
    }
}

impl Spaces {
    /// What kind of socket was found, whose namespace becomes known.
    pub(super) fn look(&mut self, known: &Namespaces, found: &Found) -> Result<Socket> {
        let fd = found.file.as_fd();
        let int = |name: i32| {
            socket::get_int(fd, libc::SOL_SOCKET, name)
                .context(|| format!("getsockopt({name}) of {}", found.link.display()))
        };
        let space = self.enter(fd)?;
        let ns_id = match known.by_inode(space) {
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

    /// The namespace of a socket, which becomes known.
    fn enter(&mut self, socket: BorrowedFd<'_>) -> Result<u64> {
        let file = socket::network_namespace(socket)
            .context(|| "network namespace of a socket".to_owned())?;
        let inode = rustix::fs::fstat(&file).context(|| "fstat of a namespace".to_owned())?.st_ino;
        self.0.entry(inode).or_insert_with(|| SocketLists::new(file));
        Ok(inode)
    }

    /// What the kernel lists of an Internet socket; `None` if it does not list it:
    /// only what is bound or connected is listed.
    pub(super) fn inet(&mut self, socket: &Socket) -> Result<Option<&InetSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        let protocol =
            if socket.kind == libc::SOCK_RAW { libc::IPPROTO_RAW } else { socket.protocol };
        Ok(space.inet((socket.domain, protocol))?.get(&socket.inode))
    }

    /// The inode number of the socket at the other end of a connection, if it is in the same namespace.
    fn other_end(
        &mut self,
        socket: &Socket,
        (remote, local): (Address, Address),
    ) -> Result<Option<u32>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut all = space.inet((family, libc::IPPROTO_TCP))?.values();
            let is_other = |s: &&InetSocket| has_peer(s) && ends(s) == Some((local, remote));
            if let Some(other) = all.find(is_other) {
                return Ok(Some(other.inode));
            }
        }
        Ok(None)
    }

    /// The multicast groups of all devices.
    pub(super) fn groups(&mut self, socket: &Socket) -> Result<&[multicast::MulticastGroup]> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(&[]) };
        let groups = match space.groups.take() {
            Some(groups) => groups,
            None => run_in(&[space.file.as_fd()], multicast::groups)?,
        };
        Ok(space.groups.insert(groups))
    }

    /// Whom a socket is connected to that has no ports, or is connected to port 0, of which
    /// getpeername(2) does not tell.
    pub(super) fn portless_peer(&mut self, socket: &Socket) -> Result<Option<Address>> {
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
    pub(super) fn handshakes(&mut self, socket: &Socket, port: u32) -> Result<bool> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(false) };
        for family in [libc::AF_INET, libc::AF_INET6] {
            space.inet((family, libc::IPPROTO_TCP))?;
        }
        Ok(u16::try_from(port).is_ok_and(|port| space.handshakes.contains(&port)))
    }

    /// All Unix sockets of a socket's namespace, by inode number.
    pub(super) fn unix(&mut self, socket: &Socket) -> Result<Option<&HashMap<u32, UnixSocket>>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.unix.is_none() {
            let all = run_in(&[space.file.as_fd()], || Ok(diag::unix()?))?;
            space.unix = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.unix.as_ref())
    }

    /// What the kernel lists of a packet socket.
    pub(super) fn packet(&mut self, socket: &Socket) -> Result<Option<&PacketSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.packet.is_none() {
            let all = run_in(&[space.file.as_fd()], || Ok(diag::packet()?))?;
            space.packet = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.packet.as_ref().and_then(|all| all.get(&socket.inode)))
    }

    /// What the kernel lists of a netlink socket.
    pub(super) fn netlink(&mut self, socket: &Socket) -> Result<Option<&NetlinkSocket>> {
        let Some(space) = self.0.get_mut(&socket.space) else { return Ok(None) };
        if space.netlink.is_none() {
            let all = run_in(&[space.file.as_fd()], || Ok(diag::netlink()?))?;
            space.netlink = Some(all.into_iter().map(|s| (s.inode, s)).collect());
        }
        Ok(space.netlink.as_ref().and_then(|all| all.get(&socket.inode)))
    }
}
