//! Making Unix sockets again.
//!
//! What is connected cannot be connected later in just any way: the ends of a stream
//! come into being together, by socketpair(2) if no end has a name, else by connecting
//! to a listener of that name. Datagram sockets are filled before they are connected,
//! because a connected one takes messages from its peer only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message as _;
use rustix::net::{Shutdown, SocketFlags};
use torpor_images::ImageDir;
use torpor_images::proto::{CriuDumpResp, CriuReqType, CriuResp, FileEntry, SkUcred, UnixSkEntry};
use torpor_policy::{FileKey, SocketKind, SocketOptions, UnixName};
use torpor_sys::socket::{self, Credentials, Message};

use super::name::{self, Names, Reach};
use super::{EXTERN, Neighbours, SERVICE, maker, options, state};
use crate::error::{Context, Error, Result};
use crate::file::description::duplicate;
use crate::file::ext;
use crate::file::socket::about::{bad_entry, create, restore_flags};
use crate::file::socket::queue::{Packet, Packets};
use crate::restore::tasks::real_pid;

/// `sk_shutdown` as the images have it.
const RCV: i32 = 1;
const SND: i32 = 2;

/// The restore half of Unix sockets.
#[derive(Debug, Default)]
pub(crate) struct UnixRestorer {
    entries: HashMap<u32, UnixSkEntry>,
    /// The number of the socket with an inode number.
    by_inode: HashMap<u32, u32>,
    packets: Packets,
    names: Names,
    /// Listeners that do not listen yet: those of one maker do it together.
    deaf: BTreeSet<u32>,
    /// The sockets that were opened, in this order.
    opened: Vec<u32>,
    /// Other ends of sockets whose peer is closed: they live until all is sent.
    mates: HashMap<u32, OwnedFd>,
}

impl UnixRestorer {
    /// Reads and checks the images of this kind, before anything is made. Returns the
    /// descriptions that are in flight: to be opened although no task may hold them.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(
        &mut self,
        images: &ImageDir,
        all: &HashMap<u32, FileEntry>,
        entries: &[FileEntry],
    ) -> Result<Vec<u32>> {
        for entry in entries {
            let mut usk =
                entry.usk.clone().ok_or_else(|| bad_entry(entry.id, "is no Unix socket"))?;
            if is_served(&usk) {
                usk.peer = 0;
            }
            if self.by_inode.insert(usk.ino, usk.id).is_some() {
                return Err(bad_entry(usk.id, format!("inode {} appears twice", usk.ino)));
            }
            self.entries.insert(usk.id, usk);
        }
        for usk in self.entries.values() {
            self.check(usk)?;
        }
        self.packets = Packets::load(images)?;
        // Others of the file are for Internet sockets.
        let is_inet = |id: &u32| all.get(id).is_some_and(|entry| entry.isk.is_some());
        self.packets.queued.retain(|id, _| !is_inet(id));
        for id in self.packets.queued.keys().chain(self.packets.pending.keys()) {
            if !self.entries.contains_key(id) {
                return Err(Error::invalid(
                    "sk-queues.img",
                    format!("a message is for file {id}, which is no Unix or Internet socket"),
                ));
            }
        }
        for usk in self.entries.values().filter(|usk| is_served(usk)) {
            self.packets.queued.entry(usk.id).or_default().push(answer());
        }
        let mut in_flight = Vec::new();
        for id in self.packets.files() {
            if !all.contains_key(&id) {
                return Err(Error::invalid(
                    "sk-queues.img",
                    format!("file {id} is in flight, but not in files.img"),
                ));
            }
            in_flight.push(id);
        }
        Ok(in_flight)
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If the images have no such socket or not its peer; if a socket cannot be made or bound to
    /// its name; if nobody hands an external one in.
    pub(crate) fn open(&mut self, cx: &mut Neighbours<'_>, entry: &FileEntry) -> Result<OwnedFd> {
        let usk = self.entry(entry.id)?.clone();
        if let Some(file) = inherited(cx, &usk)? {
            return Ok(file);
        }
        let fd = match self.birth(&usk) {
            Pairing::Alone => self.open_alone(cx, &usk)?,
            Pairing::With(mate) => {
                let mate = self.entry(mate)?.clone();
                let (fd, other) = self.open_pair(cx, &usk, &mate)?;
                cx.files.insert(mate.id, other);
                self.opened.push(mate.id);
                fd
            }
            Pairing::Widowed => {
                let (fd, other) = self.open_pair(cx, &usk, &gone(&usk))?;
                self.mates.insert(usk.id, other);
                fd
            }
        };
        self.opened.push(usk.id);
        Ok(fd)
    }

    /// The restore has succeeded: the files of sockets stay where they are.
    pub(crate) fn keep_files(&mut self) {
        self.names.placed.keep();
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// If a peer is not in the images, is gone, or is outside and not allowed to be; if a queue
    /// does not fit; if an option of the socket is refused.
    pub(crate) fn connect(&mut self, cx: &mut Neighbours<'_>) -> Result<()> {
        self.listen(cx)?;
        self.opened.sort_unstable();
        let opened: Vec<UnixSkEntry> =
            self.opened.iter().filter_map(|id| self.entries.get(id)).cloned().collect();
        for usk in &opened {
            options::raise_buffers(file(cx, usk.id)?);
        }
        self.connect_datagrams(cx, &opened)?;
        for usk in opened.iter().filter(|u| u.state == state::LISTEN) {
            self.connect_waiting(cx, usk)?;
        }
        for usk in opened.iter().filter(|u| !is_datagram(u)) {
            self.fill_stream(cx, usk)?;
        }
        for usk in opened.iter().filter(|u| u.torpor_reset()) {
            // A peer that closes without having read all resets the connection.
            let message = Message { data: &[0], ..Message::default() };
            let _ = socket::send(file(cx, usk.id)?, &message, libc::MSG_DONTWAIT);
        }
        self.mates.clear();
        for usk in &opened {
            let fd = file(cx, usk.id)?;
            shut_down(fd, usk.shutdown() as i32)?;
            options::restore(cx.id_maps, fd, &SocketOptions::read(&usk.opts))?;
            restore_flags(fd, usk.flags)?;
        }
        Ok(())
    }
}

/// How a socket comes into being.
enum Pairing {
    /// By itself.
    Alone,
    /// Together with this other one.
    With(u32),
    /// Together with one that is closed now.
    Widowed,
}

/// The other end of a connection, of which nothing is left but that it was shut down.
fn gone(usk: &UnixSkEntry) -> UnixSkEntry {
    UnixSkEntry { shutdown: usk.shutdown, ..UnixSkEntry::default() }
}

/// Whether it is the connection to the service that was asked for the dump.
fn is_served(usk: &UnixSkEntry) -> bool {
    usk.uflags & SERVICE != 0 && usk.state == state::ESTABLISHED && !is_datagram(usk)
}

/// What a client finds that has asked for its own dump, when it is restored.
fn answer() -> Packet {
    let response = CriuResp {
        r#type: CriuReqType::Dump.into(),
        success: true,
        dump: Some(CriuDumpResp { restored: Some(true) }),
        ..CriuResp::default()
    };
    let data = response.encode_to_vec();
    Packet { data, address: Vec::new(), files: Vec::new(), credentials: None }
}

fn is_datagram(usk: &UnixSkEntry) -> bool {
    usk.r#type == libc::SOCK_DGRAM.cast_unsigned()
}

/// What `shutdown` of one end of a connection does to the other.
fn mirrored(how: i32) -> i32 {
    (how & RCV) << 1 | (how & SND) >> 1
}

fn file<'c>(cx: &'c Neighbours<'_>, id: u32) -> Result<BorrowedFd<'c>> {
    cx.files.get(id).ok_or_else(|| bad_entry(id, "is not open"))
}

/// A socket that the caller has brought along (`--inherit-fd fd[N]:socket[INODE]`).
fn inherited(cx: &Neighbours<'_>, usk: &UnixSkEntry) -> Result<Option<OwnedFd>> {
    let name = FileKey::of_socket(usk);
    match (ext::inherited(cx.given, &name), name.needed()) {
        (Some(given), _) => duplicate(given).map(Some),
        (None, Some(key)) => {
            Err(Error::Unsupported(format!("Unix socket {} without --inherit-fd {key}", usk.ino)))
        }
        (None, None) => Ok(None),
    }
}

fn shut_down(fd: BorrowedFd<'_>, how: i32) -> Result<()> {
    let how = match how {
        0 => return Ok(()),
        RCV => Shutdown::Read,
        SND => Shutdown::Write,
        _ => Shutdown::Both,
    };
    rustix::net::shutdown(fd, how).context(|| "shutdown of a Unix socket".to_owned())
}

impl UnixRestorer {
    fn entry(&self, id: u32) -> Result<&UnixSkEntry> {
        self.entries.get(&id).ok_or_else(|| bad_entry(id, "is no Unix socket"))
    }

    /// The socket with an inode number; 0 is none.
    fn peer(&self, inode: u32) -> Option<&UnixSkEntry> {
        self.by_inode.get(&inode).filter(|_| inode != 0).and_then(|id| self.entries.get(id))
    }

    fn check(&self, usk: &UnixSkEntry) -> Result<()> {
        let bad = |reason: String| Err(bad_entry(usk.id, reason));
        let kinds = [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET];
        if !kinds.contains(&usk.r#type.cast_signed()) {
            return bad(format!("is of type {}", usk.r#type));
        }
        UnixName::read(usk).map_err(|why| Error::invalid("files.img", why))?;
        if usk.peer == 0 {
            return Ok(());
        }
        let Some(peer) = self.peer(usk.peer) else {
            return bad(format!("its peer, inode {}, is not in the images", usk.peer));
        };
        if peer.r#type != usk.r#type || peer.ns_id != usk.ns_id {
            return bad(format!("cannot be connected to socket {}", peer.id));
        }
        if !is_datagram(usk) && peer.state != state::LISTEN && peer.peer != usk.ino {
            return bad(format!("socket {} is its peer, but it is not the peer's", peer.id));
        }
        Ok(())
    }

    fn birth(&self, usk: &UnixSkEntry) -> Pairing {
        let peer = self.peer(usk.peer);
        if !is_datagram(usk) {
            return match (usk.state, peer) {
                (state::ESTABLISHED, None) => Pairing::Widowed,
                (state::ESTABLISHED, Some(peer)) if peer.state != state::LISTEN => {
                    Pairing::With(peer.id)
                }
                _ => Pairing::Alone,
            };
        }
        // A datagram socket without a name can only be reached from its other end.
        let unnamed = |u: &UnixSkEntry| u.name.is_empty() && u.uflags & EXTERN == 0;
        let from = || {
            let mut all = self.entries.values();
            all.find(|u| is_datagram(u) && u.peer == usk.ino && u.ino != usk.ino)
        };
        match peer {
            Some(peer) if peer.ino == usk.ino => Pairing::Alone,
            Some(peer) if unnamed(peer) => Pairing::With(peer.id),
            Some(peer) if unnamed(usk) && peer.peer == usk.ino => Pairing::With(peer.id),
            _ if unnamed(usk) => match from() {
                Some(other) => Pairing::With(other.id),
                None if self.packets.queued.contains_key(&usk.id) => Pairing::Widowed,
                None => Pairing::Alone,
            },
            _ => Pairing::Alone,
        }
    }

    fn open_alone(&mut self, cx: &mut Neighbours<'_>, usk: &UnixSkEntry) -> Result<OwnedFd> {
        let fd = create(cx.spaces, &SocketKind::unix(usk.ns_id, usk.r#type))?;
        options::restore_more(fd.as_fd(), &SocketOptions::read(&usk.opts))?;
        if usk.uflags & EXTERN != 0 {
            return Ok(fd);
        }
        name::bind(cx, &mut self.names, fd.as_fd(), usk)?;
        if usk.state == state::LISTEN {
            self.deaf.insert(usk.id);
        }
        Ok(fd)
    }

    /// Lets those listen that do not yet.
    fn listen(&mut self, cx: &mut Neighbours<'_>) -> Result<()> {
        let mut by_maker: BTreeMap<_, Vec<(OwnedFd, u32)>> = BTreeMap::new();
        for id in std::mem::take(&mut self.deaf) {
            let usk = self.entry(id)?;
            let who = self.remembered(cx, usk).map(|who| (who.pid, who.uid, who.gid));
            let listener = (duplicate(file(cx, id)?)?, usk.backlog);
            by_maker.entry(who).or_default().push(listener);
        }
        for (who, listeners) in by_maker {
            let who = who.map(|(pid, uid, gid)| SkUcred { pid, uid, gid });
            let all: Vec<_> =
                listeners.iter().map(|(fd, backlog)| (fd.as_fd(), *backlog)).collect();
            maker::listen(cx, who, &all)?;
        }
        Ok(())
    }

    /// Both ends of a connection, that of `a` first.
    fn open_pair(
        &mut self,
        cx: &mut Neighbours<'_>,
        a: &UnixSkEntry,
        b: &UnixSkEntry,
    ) -> Result<(OwnedFd, OwnedFd)> {
        let (how_a, how_b) = (a.shutdown() as i32, b.shutdown() as i32);
        // What one end has shut down before it was connected does not show at the other.
        let (early_a, early_b) = (how_a & !mirrored(how_b), how_b & !mirrored(how_a));
        let unnamed = a.name.is_empty() && b.name.is_empty();
        let (fd_a, fd_b) = if is_datagram(a) || unnamed && early_a == 0 && early_b == 0 {
            // Both ends remember the one who made them.
            let who = a.torpor_peer.or(b.torpor_peer);
            let who = who.or_else(|| holder(cx, a.id)).or_else(|| holder(cx, b.id));
            let (fd_a, fd_b) = maker::socketpair(cx, who, a.ns_id, a.r#type)?;
            name::bind(cx, &mut self.names, fd_a.as_fd(), a)?;
            name::bind(cx, &mut self.names, fd_b.as_fd(), b)?;
            (fd_a, fd_b)
        } else if self.serves(a, b, early_a) {
            let (server, client) = self.dial(cx, a, b, early_b)?;
            (server, client)
        } else {
            let (server, client) = self.dial(cx, b, a, early_a)?;
            (client, server)
        };
        options::restore_more(fd_a.as_fd(), &SocketOptions::read(&a.opts))?;
        options::restore_more(fd_b.as_fd(), &SocketOptions::read(&b.opts))?;
        Ok((fd_a, fd_b))
    }

    /// Whether `a` rather than `b` was the one that was accepted: it has its listener's
    /// name, and could not be shut down before it was connected.
    fn serves(&self, a: &UnixSkEntry, b: &UnixSkEntry, early_a: i32) -> bool {
        if a.name.is_empty() || b.name.is_empty() {
            return !a.name.is_empty();
        }
        early_a == 0 && (self.listener(a).is_some() || self.listener(b).is_none())
    }

    /// The listener that a socket was accepted from, if it is in the images.
    fn listener(&self, usk: &UnixSkEntry) -> Option<&UnixSkEntry> {
        self.entries.values().find(|l| {
            l.state == state::LISTEN
                && (l.r#type, l.ns_id) == (usk.r#type, usk.ns_id)
                && l.name == usk.name
        })
    }

    /// Connects `client` to a listener with the name of `server`.
    fn dial(
        &mut self,
        cx: &mut Neighbours<'_>,
        server: &UnixSkEntry,
        client: &UnixSkEntry,
        early: i32,
    ) -> Result<(OwnedFd, OwnedFd)> {
        let kind = SocketKind::unix(server.ns_id, server.r#type);
        let fd = create(cx.spaces, &kind)?;
        if !client.name.is_empty() {
            // Nobody can reach it by its file, if it still has one.
            self.names.scratch.bind(fd.as_fd(), &client.name)?;
        }
        shut_down(fd.as_fd(), early)?;
        // The client remembers who listened, the server who connected.
        let known = self.listener(server).cloned();
        let own = match &known {
            Some(listener) => self.listener_file(cx, listener.id)?,
            None => {
                let listener = create(cx.spaces, &kind)?;
                self.names.scratch.bind(listener.as_fd(), &server.name)?;
                listener
            }
        };
        let listens = known.as_ref().map(|l| (l.backlog, self.remembered(cx, l)));
        let (backlog, listened) = listens.unwrap_or((1, None));
        let is_deaf = known.as_ref().is_some_and(|listener| self.deaf.remove(&listener.id));
        let differs = listens.is_none() || !same(client.torpor_peer, listened);
        if differs {
            maker::listen(cx, self.remembered(cx, client), &[(own.as_fd(), backlog.max(1))])?;
        } else if is_deaf {
            maker::listen(cx, listened, &[(own.as_fd(), backlog)])?;
        }
        let reach = name::reach(own.as_fd(), &server.name)?;
        maker::connect(cx, self.remembered(cx, server), fd.as_fd(), &reach)?;
        let accepted = rustix::net::accept_with(&own, SocketFlags::CLOEXEC)
            .context(|| format!("accept Unix socket {}", server.id))?;
        if differs && listens.is_some() {
            maker::listen(cx, listened, &[(own.as_fd(), backlog)])?;
        }
        Ok((accepted, fd))
    }

    /// A duplicate of a listener of the images, which is opened if need be.
    fn listener_file(&mut self, cx: &mut Neighbours<'_>, id: u32) -> Result<OwnedFd> {
        if cx.files.get(id).is_none() {
            let usk = self.entry(id)?.clone();
            let fd = self.open_alone(cx, &usk)?;
            cx.files.insert(id, fd);
            self.opened.push(id);
        }
        file(cx, id)?.try_clone_to_owned().context(|| "dup".to_owned())
    }

    /// Fills datagram sockets and connects them.
    fn connect_datagrams(&mut self, cx: &mut Neighbours<'_>, opened: &[UnixSkEntry]) -> Result<()> {
        let all = || opened.iter().filter(|u| is_datagram(u) && u.uflags & EXTERN == 0);
        for usk in all() {
            // Born in a pair to be reached, but connected to another, or to none.
            let Pairing::With(mate) = self.birth(usk) else { continue };
            if usk.peer != self.entry(mate)?.ino {
                let unspec = [0u8; 16];
                socket::connect(file(cx, usk.id)?, &unspec)
                    .context(|| format!("disconnect Unix socket {}", usk.id))?;
            }
        }
        for usk in all() {
            for packet in self.packets.queued.get(&usk.id).cloned().unwrap_or_default() {
                self.deliver(cx, usk, &packet)?;
            }
        }
        for usk in all() {
            self.connect_datagram(cx, usk)?;
        }
        Ok(())
    }

    fn connect_datagram(&mut self, cx: &Neighbours<'_>, usk: &UnixSkEntry) -> Result<()> {
        let fd = file(cx, usk.id)?;
        let what = || format!("connect Unix socket {}", usk.id);
        match self.peer(usk.peer) {
            Some(peer) if socket::peer_address(fd).is_ok() => {
                tracing::trace!("socket {} has its peer {} already", usk.id, peer.id);
                Ok(())
            }
            Some(peer) if peer.uflags & EXTERN != 0 => {
                if !cx.ext_unix_sk {
                    let name = String::from_utf8_lossy(&peer.name);
                    let name = name.trim_end_matches('\0');
                    let why = format!("its peer {name:?} is outside: --ext-unix-sk allows it");
                    return Err(bad_entry(usk.id, why));
                }
                let address = name::address(&peer.name);
                socket::connect(fd, &address).context(what)
            }
            Some(peer) => {
                let reach = name::reach(file(cx, peer.id)?, &peer.name)?;
                socket::connect(fd, &reach.address).context(what)
            }
            None if usk.torpor_peer_closed() && !self.mates.contains_key(&usk.id) => {
                // To one that will be closed.
                let peer = create(cx.spaces, &SocketKind::unix(usk.ns_id, usk.r#type))?;
                let name = format!("\0torpor-closed-{}-{}", std::process::id(), usk.ino);
                socket::bind(peer.as_fd(), &name::address(name.as_bytes())).context(what)?;
                socket::connect(fd, &name::address(name.as_bytes())).context(what)
            }
            None => Ok(()),
        }
    }

    /// Puts a message into the queue of a datagram socket: sent by its sender if that
    /// is there, else by somebody who has its name.
    fn deliver(&mut self, cx: &Neighbours<'_>, to: &UnixSkEntry, packet: &Packet) -> Result<()> {
        let sender = self.sender(to, packet);
        let peer = self.peer(to.peer).map(|peer| peer.id);
        let packet = &signed(cx, packet, sender.or(peer).unwrap_or(to.id));
        let mate = match self.birth(to) {
            Pairing::With(id) => Some(file(cx, id)?),
            Pairing::Widowed => self.mates.get(&to.id).map(AsFd::as_fd),
            Pairing::Alone => None,
        };
        if let Some(mate) = mate.filter(|_| to.name.is_empty() || sender.is_none()) {
            if !packet.address.is_empty() && socket::local_address(mate).is_ok_and(|a| a.len() <= 2)
            {
                self.names.scratch.bind(mate, packet.address.get(2..).unwrap_or_default())?;
            }
            return send(cx, mate, None, packet);
        }
        let reach = name::reach(file(cx, to.id)?, &to.name)?;
        if let Some(id) = sender {
            return self.deliver_from(cx, to, id, &reach, packet);
        }
        let stranger = create(cx.spaces, &SocketKind::unix(to.ns_id, to.r#type))?;
        options::raise_buffers(stranger.as_fd());
        if !packet.address.is_empty() {
            self.names
                .scratch
                .bind(stranger.as_fd(), packet.address.get(2..).unwrap_or_default())?;
        }
        send(cx, stranger.as_fd(), Some(&reach), packet)
    }

    fn deliver_from(
        &self,
        cx: &Neighbours<'_>,
        to: &UnixSkEntry,
        sender: u32,
        reach: &Reach,
        packet: &Packet,
    ) -> Result<()> {
        match send(cx, file(cx, sender)?, Some(reach), packet) {
            // A queue holds more from the one who is connected both ways.
            Err(Error::Os { source, .. })
                if source.kind() == std::io::ErrorKind::WouldBlock
                    && self.peer(to.peer).is_some_and(|p| p.id == sender) =>
            {
                let from = self.entry(sender)?;
                let back = name::reach(file(cx, sender)?, &from.name)?;
                socket::connect(file(cx, to.id)?, &back.address)
                    .context(|| format!("connect Unix socket {}", to.id))?;
                send(cx, file(cx, sender)?, Some(reach), packet)
            }
            sent => sent,
        }
    }

    /// The socket of the images that has the sender's name.
    fn sender(&self, to: &UnixSkEntry, packet: &Packet) -> Option<u32> {
        let name = packet.address.get(2..).filter(|n| !n.is_empty())?;
        let mut all = self.entries.values();
        all.find(|u| is_datagram(u) && u.ns_id == to.ns_id && u.name == name && u.uflags == 0)
            .map(|u| u.id)
    }

    /// Connects those who wait in the queue of a listener, in their order.
    fn connect_waiting(&mut self, cx: &mut Neighbours<'_>, listener: &UnixSkEntry) -> Result<()> {
        let place = |u: &UnixSkEntry| {
            listener.torpor_pending.iter().position(|i| *i == u.ino).unwrap_or(usize::MAX)
        };
        let mut waiting: Vec<&UnixSkEntry> = self
            .opened
            .iter()
            .filter_map(|id| self.entries.get(id))
            .filter(|u| u.peer == listener.ino && !is_datagram(u))
            .collect();
        waiting.sort_by_key(|u| (place(u), u.id));
        if waiting.is_empty() {
            return Ok(());
        }
        let own = duplicate(file(cx, listener.id)?)?;
        let reach = name::reach(own.as_fd(), &listener.name)?;
        let count = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
        let who = self.remembered(cx, listener);
        maker::listen(cx, who, &[(own.as_fd(), listener.backlog.max(count))])?;
        for usk in waiting {
            let fd = duplicate(file(cx, usk.id)?)?;
            maker::connect(cx, holder(cx, usk.id), fd.as_fd(), &reach)?;
            for packet in self.packets.pending.get(&usk.id).into_iter().flatten() {
                send(cx, fd.as_fd(), None, &signed(cx, packet, usk.id))?;
            }
        }
        maker::listen(cx, who, &[(own.as_fd(), listener.backlog)])
    }

    /// Fills the queue of a stream from its other end.
    fn fill_stream(&self, cx: &Neighbours<'_>, usk: &UnixSkEntry) -> Result<()> {
        let Some(packets) = self.packets.queued.get(&usk.id) else { return Ok(()) };
        let (from, sender) = match (self.mates.get(&usk.id), self.peer(usk.peer)) {
            (Some(mate), _) => (mate.as_fd(), usk.id),
            (None, Some(peer)) => (file(cx, peer.id)?, peer.id),
            _ => return Err(bad_entry(usk.id, "has a queue, but no peer")),
        };
        options::raise_buffers(from);
        packets.iter().try_for_each(|packet| send(cx, from, None, &signed(cx, packet, sender)))
    }

    /// The process that a socket remembers. The images of others do not say: it is presumably the
    /// one that has the other end, or the listener.
    fn remembered(&self, cx: &Neighbours<'_>, usk: &UnixSkEntry) -> Option<SkUcred> {
        usk.torpor_peer.or_else(|| match self.peer(usk.peer) {
            Some(peer) if usk.state != state::LISTEN => holder(cx, peer.id),
            _ => holder(cx, usk.id),
        })
    }
}

fn same(a: Option<SkUcred>, b: Option<SkUcred>) -> bool {
    a.is_none() || a == b
}

/// A message with the credentials of its sender: of the task that has the sending socket where the
/// images, which others have written, do not say.
fn signed(cx: &Neighbours<'_>, packet: &Packet, sender: u32) -> Packet {
    let credentials = packet.credentials.or_else(|| holder(cx, sender));
    Packet { credentials, ..packet.clone() }
}

/// The first task that has a socket. Who has connected one that nobody has accepted yet, say, is not
/// known; as a rule it is that.
fn holder(cx: &Neighbours<'_>, id: u32) -> Option<SkUcred> {
    let task = cx.tasks.iter().find(|t| t.image.fds.iter().any(|fd| fd.file == id))?;
    let (uid, gid) = task.image.credentials.first()?.as_ref()?.effective();
    Some(SkUcred { pid: task.vpid.cast_unsigned(), uid, gid })
}

fn send(
    cx: &Neighbours<'_>,
    from: BorrowedFd<'_>,
    to: Option<&Reach>,
    packet: &Packet,
) -> Result<()> {
    let files = packet.files.iter().map(|id| file(cx, *id)).collect::<Result<Vec<_>>>()?;
    let message = Message {
        address: to.map(|r| r.address.as_slice()),
        data: &packet.data,
        files: &files,
        credentials: packet.credentials.map(|c| credentials(cx, c)),
    };
    let sent = socket::send(from, &message, libc::MSG_DONTWAIT)
        .context(|| "fill the queue of a Unix socket".to_owned())?;
    if sent == packet.data.len() {
        return Ok(());
    }
    // A stream may take it in parts; descriptors went with the first.
    let rest = Packet {
        data: packet.data.get(sent..).unwrap_or_default().to_vec(),
        files: Vec::new(),
        ..packet.clone()
    };
    send(cx, from, to, &rest)
}

/// A process that is gone cannot be named: the kernel wants a live one.
fn credentials(cx: &Neighbours<'_>, c: torpor_images::proto::SkUcred) -> Credentials {
    let own = || rustix::process::getpid().as_raw_nonzero().get();
    Credentials {
        pid: real_pid(cx.tasks, c.pid.cast_signed()).filter(|pid| *pid != 0).unwrap_or_else(own),
        uid: cx.id_maps.uid_outside(c.uid).unwrap_or(c.uid),
        gid: cx.id_maps.gid_outside(c.gid).unwrap_or(c.gid),
    }
}
