//! Internet sockets: read of their entries once, and made. What others are told of them is a [`Socket`](crate::Socket).

use torpor_images::proto::{FileEntry, InetSkEntry, SkShutdown};

use crate::inet::InetEnds;
use crate::inet_options::InetOptions;
use crate::membership::Membership;
use crate::socket::state_name;
use crate::socket_kind::SocketKind;
use crate::socket_options::SocketOptions;
use crate::unix_end::ShutDown;

/// States (net/tcp_states.h).
const CLOSE: u32 = 7;
const LISTEN: u32 = 10;

/// An Internet socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InetSocket {
    /// The number of the open file.
    pub file: u32,
    /// The number of its inode.
    pub inode: u32,
    /// Its family, type and protocol, and its network namespace.
    pub kind: SocketKind,
    /// What it is bound and connected to.
    pub ends: InetEnds,
    /// `TCP_*` of net/tcp_states.h.
    pub state: u32,
    /// Whether it is a connection of TCP.
    pub connection: Connection,
    /// How many connections may wait to be accepted.
    pub backlog: u32,
    /// What of it was shut down.
    pub shut: ShutDown,
    /// The multicast groups that it is in.
    pub memberships: Vec<Membership>,
    /// Options of its protocols.
    pub inet_options: InetOptions,
    /// Options that all sockets have.
    pub options: SocketOptions,
    /// The flags that it is open with.
    pub flags: u32,
}

/// What the images have of a connection of TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// It is none.
    None,
    /// An image of its own.
    Kept,
    /// It is closed, and nothing is left but the peer that it had last.
    LastPeer,
}

impl InetSocket {
    /// That of an open file; `None` of what is no Internet socket.
    ///
    /// # Errors
    /// A socket that no restore makes; an address, a state, an option or a group that there cannot be.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let (Some(socket), Some(kind)) = (&entry.isk, SocketKind::of(entry)?) else {
            return Ok(None);
        };
        Self::read(socket, kind).map(Some)
    }

    fn read(entry: &InetSkEntry, kind: SocketKind) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("socket {}: is {what}", entry.id));
        let shut = match entry.shutdown.map(SkShutdown::try_from) {
            None => ShutDown::default(),
            Some(Ok(shut)) => ShutDown::from(shut),
            Some(Err(unknown)) => return wrong(&format!("shut down in way {}", unknown.0)),
        };
        if state_name(entry.state).is_none() {
            return wrong(&format!("in state {}", entry.state));
        }
        let is_connected = kind.is_stream() && entry.dst_port != 0 && entry.state != LISTEN;
        if is_connected && kind.is_of_multipath() {
            return wrong("a connection of multipath TCP");
        }
        let is_closed = entry.state == CLOSE && entry.src_port != 0;
        let can_have_one = is_closed && kind.is_stream() && kind.is_of_tcp();
        // What it says of its ends without the last peer is an address as well.
        let own = InetEnds::read(entry)?;
        let (connection, ends) = match entry.torpor_peer_port.filter(|&port| port != 0) {
            Some(dst_port) if can_have_one => {
                let dst_addr = entry.torpor_peer_addr.clone();
                let with_peer = InetSkEntry { dst_port, dst_addr, ..entry.clone() };
                (Connection::LastPeer, InetEnds::read(&with_peer)?)
            }
            Some(_) => return wrong("none that has a last peer"),
            None if is_connected => (Connection::Kept, own),
            None => (Connection::None, own),
        };
        Ok(InetSocket {
            file: entry.id,
            inode: entry.ino,
            kind,
            ends,
            state: entry.state,
            connection,
            backlog: entry.backlog,
            shut,
            memberships: Membership::all(entry)?,
            inet_options: InetOptions::read(entry)?,
            options: SocketOptions::read(&entry.opts),
            flags: entry.flags,
        })
    }

    /// Whether it is a connection of which there is an image.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.connection == Connection::Kept
    }

    /// Whether it is a connection that is not closed.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.is_kept() && self.state != CLOSE
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ESTABLISHED: u32 = 1;

    fn read(change: impl FnOnce(&mut InetSkEntry)) -> Result<InetSocket, String> {
        let mut socket = InetSkEntry {
            id: 7,
            family: 2,
            r#type: 1,
            proto: 6,
            state: CLOSE,
            src_addr: vec![1],
            src_port: 80,
            ..InetSkEntry::default()
        };
        change(&mut socket);
        let entry = FileEntry { id: 7, isk: Some(socket), ..FileEntry::default() };
        InetSocket::of(&entry).map(Option::unwrap)
    }

    #[test]
    fn connections_are_those_of_streams_that_have_a_peer() {
        let of = |change: fn(&mut InetSkEntry)| read(change).unwrap();
        let connected = |change: fn(&mut InetSkEntry)| {
            let socket = read(|socket| {
                (socket.state, socket.dst_port, socket.dst_addr) = (ESTABLISHED, 99, vec![2]);
                change(socket);
            });
            socket.unwrap()
        };
        assert_eq!(of(|_| ()).connection, Connection::None);
        assert!(connected(|_| ()).goes_on());
        let closed = connected(|socket| socket.state = CLOSE);
        assert!(closed.is_kept() && !closed.goes_on());
        assert_eq!(connected(|socket| socket.state = LISTEN).connection, Connection::None);
        let datagrams = connected(|socket| (socket.r#type, socket.proto) = (2, 17));
        assert_eq!(datagrams.connection, Connection::None);
        let last = of(|socket| {
            (socket.torpor_peer_port, socket.torpor_peer_addr) = (Some(99), vec![2]);
        });
        assert_eq!(
            (last.connection, last.is_kept(), last.goes_on()),
            (Connection::LastPeer, false, false)
        );
        assert_eq!((last.ends.remote.port, last.ends.remote.words[0]), (99, 2));
    }

    #[test]
    fn what_there_cannot_be_is_named() {
        for (change, why) in [
            ((|socket: &mut InetSkEntry| socket.state = 0) as fn(&mut InetSkEntry), "in state 0"),
            (|socket| socket.state = 13, "in state 13"),
            (|socket| socket.shutdown = Some(4), "shut down in way 4"),
            (
                |socket| (socket.proto, socket.state, socket.dst_port) = (262, 1, 9),
                "a connection of multipath TCP",
            ),
            (
                |socket| {
                    (socket.torpor_peer_port, socket.state) = (Some(9), ESTABLISHED);
                    (socket.dst_port, socket.dst_addr) = (9, vec![2]);
                },
                "none that has a last peer",
            ),
            (
                |socket| (socket.torpor_peer_port, socket.state) = (Some(9), LISTEN),
                "none that has a last peer",
            ),
            (
                |socket| (socket.torpor_peer_port, socket.src_port) = (Some(9), 0),
                "none that has a last peer",
            ),
        ] {
            assert_eq!(read(change).unwrap_err(), format!("socket 7: is {why}"));
        }
        assert!(read(|socket| socket.src_addr = vec![]).unwrap_err().contains("its address"));
        let last = read(|socket| {
            (socket.torpor_peer_port, socket.torpor_peer_addr) = (Some(1 << 16), vec![2]);
        });
        assert!(last.unwrap_err().contains("its address"));
        assert_eq!(InetSocket::of(&FileEntry::default()), Ok(None));
    }
}
