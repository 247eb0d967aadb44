//! Unix sockets, and with which others they are connected: read of their entries once, checked, listed, and made.
//! Anybody may connect what is their own. Peers outside, and in whose name a socket is another's peer, are judged.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{FileEntry, SkShutdown, SkUcred, UnixSkEntry};

use crate::socket_kind::SocketKind;
use crate::socket_options::SocketOptions;
use crate::unix_name::{EXTERNAL, UnixName};

/// The flag of the tasks' end of a connection to the service that was asked for the dump (`uflags`).
const SERVICE: u32 = 2;

/// A Unix socket of the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixEnd {
    /// The number of the open file.
    pub file: u32,
    /// Its type, and its network namespace.
    pub kind: SocketKind,
    /// With what it is connected.
    pub link: UnixLink,
    /// What it is bound to; `None` of one that is bound to nothing, or is not the tasks' own.
    pub bound: Option<UnixName>,
    /// The name of one that is not the tasks' own: it is found by this.
    pub outside: Option<Vec<u8>>,
    /// Its options.
    pub options: SocketOptions,
}

/// How a Unix socket is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UnixLink {
    /// The number of its inode, by which others name it as their peer.
    pub inode: u32,
    /// What it does.
    pub state: UnixState,
    /// The inode of its peer: of the listener, as long as the connection waits there to be accepted.
    pub peer: Option<u32>,
    /// Its peer is closed. Said of sockets for datagrams only; a connection without a peer has lost it.
    pub peer_closed: bool,
    /// Its peer is the service that was asked for the dump, in whose place the restore answers.
    pub served: bool,
    /// How many connections may wait to be accepted.
    pub backlog: u32,
    /// The inodes of those that wait, in their order.
    pub pending: Vec<u32>,
    /// What of it was shut down.
    pub shut: ShutDown,
    /// An error waits for its owner: the peer was closed before it had read everything.
    pub reset: bool,
    /// The process that it says its peer is (`SO_PEERCRED`). CRIU's images do not have it.
    pub remembered: Option<ProcessIds>,
    /// The flags that it is open with.
    pub flags: u32,
}

/// What a Unix socket does. For one of datagrams it says nothing: others change it when they connect to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UnixState {
    /// Nothing yet.
    #[default]
    Unconnected,
    /// It is, or was, an end of a connection.
    Connected,
    /// It waits for connections.
    Listening,
}

/// What of a socket was shut down (shutdown(2)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShutDown {
    /// It receives nothing more.
    pub receiving: bool,
    /// It sends nothing more.
    pub sending: bool,
}

/// A process, as a socket remembers it or a message names it.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ProcessIds {
    /// Its pid in the images; 0 if it is none of the tree's.
    pub pid: u32,
    /// Its user, as the tree's user namespace has it.
    pub user: u32,
    /// Its group, likewise.
    pub group: u32,
}

impl UnixEnd {
    /// That of an open file; `None` of what is no Unix socket.
    ///
    /// # Errors
    /// A type, a state or a name that there cannot be.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        entry.usk.as_ref().map(Self::read).transpose()
    }

    fn read(entry: &UnixSkEntry) -> Result<Self, String> {
        let kind = SocketKind::unix(entry.ns_id, entry.r#type);
        if !kind.is_of_unix() {
            return Err(format!("socket {}: is of type {}", entry.id, entry.r#type));
        }
        let bound = UnixName::read(entry)?;
        let outside = (entry.uflags & EXTERNAL != 0).then(|| entry.name.clone());
        let link = UnixLink::read(entry, &kind)?;
        let options = SocketOptions::read(&entry.opts);
        Ok(UnixEnd { file: entry.id, kind, link, bound, outside, options })
    }

    /// The bytes that it is bound to, or found by; none without a name.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        let bound = || self.bound.as_ref().map(|bound| bound.name.as_slice());
        self.outside.as_deref().or_else(bound).unwrap_or_default()
    }

    /// The other end of it, of which nothing is left but what it had shut down.
    #[must_use]
    pub fn closed_peer(&self) -> Self {
        UnixEnd {
            file: 0,
            kind: self.kind,
            link: UnixLink { shut: self.link.shut, ..UnixLink::default() },
            bound: None,
            outside: None,
            options: SocketOptions::default(),
        }
    }
}

impl UnixLink {
    fn read(entry: &UnixSkEntry, kind: &SocketKind) -> Result<Self, String> {
        let wrong = |what: &str, value: i64| Err(format!("socket {}: is {what} {value}", entry.id));
        let state = match entry.state {
            1 => UnixState::Connected,
            7 => UnixState::Unconnected,
            10 => UnixState::Listening,
            other => return wrong("in state", other.into()),
        };
        let shut = match entry.shutdown.map(SkShutdown::try_from) {
            None => ShutDown::default(),
            Some(Ok(shut)) => ShutDown::from(shut),
            Some(Err(unknown)) => return wrong("shut down in way", unknown.0.into()),
        };
        let is_connection = state == UnixState::Connected && !kind.is_of_datagrams();
        let served = entry.uflags & SERVICE != 0 && is_connection;
        Ok(UnixLink {
            inode: entry.ino,
            state,
            peer: Some(entry.peer).filter(|&peer| peer != 0 && !served),
            peer_closed: entry.torpor_peer_closed(),
            served,
            backlog: entry.backlog,
            pending: entry.torpor_pending.clone(),
            shut,
            reset: entry.torpor_reset(),
            remembered: entry.torpor_peer.map(ProcessIds::from),
            flags: entry.flags,
        })
    }
}

impl ShutDown {
    /// What it does to the other end.
    #[must_use]
    pub fn mirrored(self) -> Self {
        ShutDown { receiving: self.sending, sending: self.receiving }
    }

    /// What `other` is not.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        ShutDown {
            receiving: self.receiving && !other.receiving,
            sending: self.sending && !other.sending,
        }
    }

    /// Whether there is anything.
    #[must_use]
    pub fn is_some(self) -> bool {
        self.receiving || self.sending
    }
}

impl From<SkShutdown> for ShutDown {
    fn from(shut: SkShutdown) -> Self {
        ShutDown {
            receiving: matches!(shut, SkShutdown::Read | SkShutdown::Both),
            sending: matches!(shut, SkShutdown::Write | SkShutdown::Both),
        }
    }
}

impl From<SkUcred> for ProcessIds {
    fn from(ids: SkUcred) -> Self {
        ProcessIds { pid: ids.pid, user: ids.uid, group: ids.gid }
    }
}

impl fmt::Display for UnixLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.state, self.peer) {
            (UnixState::Listening, _) => f.write_str(", listening"),
            (_, Some(inode)) => write!(f, ", connected to inode {inode}"),
            _ if self.served => f.write_str(", connected to the service that dumps it"),
            _ => Ok(()),
        }
    }
}

/// The Unix sockets of a checkpoint: each is the peer that others take it for.
#[derive(Debug, Default)]
pub struct UnixEnds {
    by_file: BTreeMap<u32, UnixEnd>,
    /// The numbers of their files, by their inodes.
    by_inode: HashMap<u32, u32>,
}

impl UnixEnds {
    /// Those with these ends.
    ///
    /// # Errors
    /// The first that cannot be: an inode that two have; a peer that there is not, is of another type or network
    /// namespace, or has another peer.
    pub fn of(ends: impl IntoIterator<Item = UnixEnd>) -> Result<Self, String> {
        let mut all = UnixEnds::default();
        for end in ends {
            let (file, inode) = (end.file, end.link.inode);
            if all.by_inode.insert(inode, file).is_some() {
                return Err(format!("socket {file}: inode {inode} appears twice"));
            }
            all.by_file.insert(file, end);
        }
        all.iter().try_for_each(|end| all.check(end))?;
        Ok(all)
    }

    /// The one with the number of an open file.
    #[must_use]
    pub fn get(&self, file: u32) -> Option<&UnixEnd> {
        self.by_file.get(&file)
    }

    /// All, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &UnixEnd> {
        self.by_file.values()
    }

    /// What one is connected with.
    #[must_use]
    pub fn peer_of(&self, end: &UnixEnd) -> Option<&UnixEnd> {
        self.by_inode.get(&end.link.peer?).and_then(|file| self.by_file.get(file))
    }

    /// Whether messages can wait in one: it takes datagrams, or is an end of a connection that was accepted.
    pub(crate) fn has_queue(&self, end: &UnixEnd) -> bool {
        let waits = self.peer_of(end).is_some_and(|peer| peer.link.state == UnixState::Listening);
        end.kind.is_of_datagrams() || end.link.state == UnixState::Connected && !waits
    }

    fn check(&self, end: &UnixEnd) -> Result<(), String> {
        let wrong = |why: String| Err(format!("socket {}: {why}", end.file));
        let Some(inode) = end.link.peer else { return Ok(()) };
        let Some(peer) = self.peer_of(end) else {
            return wrong(format!("its peer, inode {inode}, is not in the images"));
        };
        if peer.kind != end.kind {
            return wrong(format!("cannot be connected to socket {}", peer.file));
        }
        // Any number may send datagrams to one, or wait at one. Of those outside nobody says what they are connected to.
        let many = end.kind.is_of_datagrams() || peer.link.state == UnixState::Listening;
        if !many && peer.outside.is_none() && peer.link.peer != Some(end.link.inode) {
            return wrong(format!("socket {} is its peer, but it is not the peer's", peer.file));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const STREAM: u32 = libc::SOCK_STREAM.cast_unsigned();
    const DATAGRAM: u32 = libc::SOCK_DGRAM.cast_unsigned();
    const CONNECTED: u32 = 1;
    const LISTENING: u32 = 10;

    /// A socket that is connected with inode `peer`; its own inode is its number and 10.
    fn socket(id: u32, peer: u32, change: impl FnOnce(&mut UnixSkEntry)) -> FileEntry {
        let (ino, state) = (id + 10, CONNECTED);
        let mut usk =
            UnixSkEntry { id, ino, peer, state, r#type: STREAM, ..UnixSkEntry::default() };
        change(&mut usk);
        FileEntry { id, usk: Some(usk), ..FileEntry::default() }
    }

    fn read(change: impl FnOnce(&mut UnixSkEntry)) -> Result<UnixEnd, String> {
        UnixEnd::of(&socket(7, 0, change)).map(Option::unwrap)
    }

    #[test]
    fn what_there_cannot_be_is_named() {
        for (change, why) in [
            (
                (|usk: &mut UnixSkEntry| usk.r#type = 3) as fn(&mut UnixSkEntry),
                "socket 7: is of type 3",
            ),
            (|usk| usk.state = 0, "socket 7: is in state 0"),
            (|usk| usk.state = u32::MAX, "socket 7: is in state 4294967295"),
            (|usk| usk.shutdown = Some(4), "socket 7: is shut down in way 4"),
            (|usk| usk.name = vec![b'x'; 110], "socket 7 has too long a name"),
            // A name of somebody else is no longer, either.
            (
                |usk| (usk.uflags, usk.name) = (EXTERNAL, vec![b'x'; 110]),
                "socket 7 has too long a name",
            ),
        ] {
            assert_eq!(read(change).unwrap_err(), why);
        }
        assert_eq!(UnixEnd::of(&FileEntry::default()), Ok(None));
    }

    #[test]
    fn whose_it_is() {
        let own = read(|usk| usk.name = b"\0name".to_vec()).unwrap();
        assert_eq!((own.name(), own.outside.as_ref()), (&b"\0name"[..], None));
        assert_eq!(own.bound.unwrap().name, b"\0name");
        let change =
            |usk: &mut UnixSkEntry| (usk.uflags, usk.name) = (EXTERNAL, b"/run/x\0".into());
        let outside = read(change).unwrap();
        assert_eq!((outside.name(), outside.bound.as_ref()), (&b"/run/x\0"[..], None));
        assert!(outside.outside.is_some());
        assert_eq!(read(|_| ()).unwrap().name(), b"");
        // What the peer was matters no more.
        let served = read(|usk| (usk.uflags, usk.peer) = (SERVICE, 99)).unwrap();
        assert_eq!((served.link.served, served.link.peer), (true, None));
        for change in
            [(|usk| usk.r#type = DATAGRAM) as fn(&mut UnixSkEntry), |usk| usk.state = LISTENING]
        {
            let other = read(|usk| {
                (usk.uflags, usk.peer) = (SERVICE, 99);
                change(usk);
            });
            assert_eq!(other.map(|end| (end.link.served, end.link.peer)), Ok((false, Some(99))));
        }
    }

    #[test]
    fn what_was_shut_down() {
        let both = ShutDown { receiving: true, sending: true };
        let [receiving, sending] =
            [true, false].map(|receiving| ShutDown { receiving, sending: !receiving });
        for (value, shut) in [(0, ShutDown::default()), (1, receiving), (2, sending), (3, both)] {
            assert_eq!(read(|usk| usk.shutdown = Some(value)).unwrap().link.shut, shut);
            assert_eq!(shut.mirrored().mirrored(), shut);
            assert_eq!(shut.without(shut), ShutDown::default());
            assert_eq!(shut.is_some(), value != 0);
        }
        assert_eq!((receiving.mirrored(), both.without(sending)), (sending, receiving));
        assert_eq!(read(|_| ()).unwrap().link.shut, ShutDown::default());
        let gone = read(|usk| (usk.shutdown, usk.name) = (Some(3), b"x".into())).unwrap();
        let gone = gone.closed_peer();
        assert_eq!((gone.link.shut, gone.name(), gone.link.inode), (both, &b""[..], 0));
    }

    #[test]
    fn peers_are_each_others() {
        let read = |entries: &[FileEntry]| {
            UnixEnds::of(entries.iter().map(|entry| UnixEnd::of(entry).unwrap().unwrap()))
        };
        let checked = |entries: &[FileEntry]| read(entries).map(drop);
        let wrong = |entries: &[FileEntry], why: &str| {
            assert_eq!(checked(entries).unwrap_err(), why);
        };
        let pair = [socket(1, 12, |_| ()), socket(2, 11, |_| ())];
        let ends = read(&pair).unwrap();
        let peers = ends.iter().map(|end| ends.peer_of(end).unwrap().file);
        assert_eq!(peers.collect::<Vec<_>>(), [2, 1]);
        assert!(ends.get(1).is_some() && ends.get(3).is_none());

        let [a, b] = pair;
        let third = socket(3, 11, |_| ());
        wrong(
            &[a.clone(), b.clone(), third],
            "socket 3: socket 1 is its peer, but it is not the peer's",
        );
        wrong(std::slice::from_ref(&a), "socket 1: its peer, inode 12, is not in the images");
        wrong(&[a.clone(), socket(2, 11, |usk| usk.ino = 11)], "socket 2: inode 11 appears twice");
        for change in [(|usk: &mut UnixSkEntry| usk.r#type = 5) as fn(&mut UnixSkEntry), |usk| {
            usk.ns_id = Some(9)
        }] {
            wrong(&[a.clone(), socket(2, 11, change)], "socket 1: cannot be connected to socket 2");
        }
        let queues = |entries: &[FileEntry]| {
            let ends = read(entries).unwrap();
            ends.iter().map(|end| ends.has_queue(end)).collect::<Vec<_>>()
        };
        let listener = socket(2, 0, |usk| usk.state = LISTENING);
        assert_eq!(queues(&[a.clone(), listener]), [false, false]);
        assert_eq!(queues(&[a.clone(), b]), [true, true]);
        assert_eq!(queues(&[socket(1, 0, |usk| usk.r#type = DATAGRAM)]), [true]);
        assert_eq!(queues(&[socket(1, 0, |usk| usk.state = 7)]), [false]);
        assert_eq!(queues(&[socket(1, 0, |_| ())]), [true]);
        let alone = socket(2, 0, |_| ());
        wrong(&[a.clone(), alone], "socket 1: socket 2 is its peer, but it is not the peer's");
        // Whoever waits at a listener is not its peer, and nobody outside says.
        checked(&[a.clone(), socket(2, 0, |usk| usk.state = LISTENING)]).unwrap();
        checked(&[a, socket(2, 0, |usk| usk.uflags = EXTERNAL)]).unwrap();
        let datagrams = |id, peer| socket(id, peer, |usk| usk.r#type = DATAGRAM);
        checked(&[datagrams(1, 12), datagrams(2, 12), datagrams(3, 12)]).unwrap();
    }
}
