//! Making Unix sockets again.
//!
//! What is connected cannot be connected later in just any way: the ends of a stream
//! come into being together, by socketpair(2) if no end has a name, else by connecting
//! to a listener of that name. Datagram sockets are filled before they are connected,
//! because a connected one takes messages from its peer only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, SocketFlags};
use torpor_images::ImageDir;
use torpor_images::proto::{CriuDumpResp, CriuReqType, CriuResp};
use torpor_policy::{
    FileKey, ProcessIds, ShutDown, SocketMessage, UnixEnd, UnixEnds, UnixLink, UnixState,
};
use torpor_sys::socket::{self, Credentials, Message};

use super::name::{self, Names, Reach};
use super::{Neighbours, maker, options};
use crate::error::{Context, Error, Result};
use crate::file::description::duplicate;
use crate::file::ext;
use crate::file::own_names::random;
use crate::file::socket::about::{bad_entry, create, restore_flags};
use crate::file::socket::queue;
use crate::restore::tasks::{Task, real_pid};

/// The restore half of Unix sockets.
#[derive(Debug, Default)]
pub(crate) struct UnixRestorer {
    ends: UnixEnds,
    /// The messages that wait, by the sockets that they wait in.
    queued: HashMap<u32, Vec<SocketMessage>>,
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
    pub(crate) fn load(&mut self, images: &ImageDir, ends: &[&UnixEnd]) -> Result<Vec<u32>> {
        let ends = UnixEnds::of(ends.iter().copied().cloned());
        self.ends = ends.map_err(|reason| Error::invalid("files.img", reason))?;
        self.queued = queue::load(images, |file| self.ends.get(file).is_some())?;
        for end in self.ends.iter().filter(|end| end.link.served) {
            self.queued.entry(end.file).or_default().push(answer(end.file));
        }
        let messages = self.queued.values().flatten();
        Ok(messages.flat_map(|message| message.files.iter().copied()).collect())
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If the images have no such socket or not its peer; if that is outside, and not for datagrams; if a socket cannot
    /// be made or bound to its name; if nobody hands an external one in.
    pub(crate) fn open(&mut self, cx: &mut Neighbours<'_>, end: &UnixEnd) -> Result<OwnedFd> {
        let end = end.clone();
        if let Some(file) = inherited(cx, &end)? {
            return Ok(file);
        }
        self.can_be_connected(&end)?;
        let fd = match self.birth(&end) {
            Pairing::Alone => self.open_alone(cx, &end)?,
            Pairing::With(mate) => {
                let mate = self.end(mate)?.clone();
                let (fd, other) = self.open_pair(cx, &end, &mate)?;
                cx.files.insert(mate.file, other);
                self.opened.push(mate.file);
                fd
            }
            Pairing::Widowed => {
                let (fd, other) = self.open_pair(cx, &end, &end.closed_peer())?;
                self.mates.insert(end.file, other);
                fd
            }
        };
        self.opened.push(end.file);
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
        let opened: Vec<UnixEnd> =
            self.opened.iter().filter_map(|&file| self.ends.get(file)).cloned().collect();
        for end in &opened {
            options::raise_buffers(file(cx, end.file)?);
        }
        self.connect_datagrams(cx, &opened)?;
        for end in opened.iter().filter(|end| listens(end)) {
            self.connect_waiting(cx, end)?;
        }
        for end in opened.iter().filter(|end| !end.kind.is_of_datagrams()) {
            self.fill_stream(cx, end)?;
        }
        for end in opened.iter().filter(|end| end.link.reset) {
            // A peer that closes without having read all resets the connection.
            let message = Message { data: &[0], ..Message::default() };
            let _ = socket::send(file(cx, end.file)?, &message, libc::MSG_DONTWAIT);
        }
        self.mates.clear();
        for end in &opened {
            let fd = file(cx, end.file)?;
            shut_down(fd, end.link.shut)?;
            options::restore(cx.id_maps, fd, &end.options)?;
            restore_flags(fd, end.link.flags)?;
        }
        Ok(())
    }
}

/// So many that nobody has asked for may connect to a listener before a connection of the tree is given up.
const MOST_STRANGERS: u32 = 1 << 16;

/// How a socket comes into being.
enum Pairing {
    /// By itself.
    Alone,
    /// Together with this other one.
    With(u32),
    /// Together with one that is closed now.
    Widowed,
}

/// What a client finds that has asked for its own dump, when it is restored.
fn answer(socket: u32) -> SocketMessage {
    let response = CriuResp {
        r#type: CriuReqType::Dump.into(),
        success: true,
        dump: Some(CriuDumpResp { restored: Some(true) }),
        ..CriuResp::default()
    };
    let data = response.encode_to_vec();
    SocketMessage { socket, data, address: Vec::new(), files: Vec::new(), sender: None }
}

fn listens(end: &UnixEnd) -> bool {
    end.link.state == UnixState::Listening
}

/// Whether somebody waits to be accepted.
fn has_waiting(listener: BorrowedFd<'_>) -> Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&Timespec::default())).context(|| "poll".to_owned())? > 0)
}

fn file<'c>(cx: &'c Neighbours<'_>, id: u32) -> Result<BorrowedFd<'c>> {
    cx.files.get(id).ok_or_else(|| bad_entry(id, "is not open"))
}

/// A socket that the caller has brought along (`--inherit-fd fd[N]:socket[INODE]`).
fn inherited(cx: &Neighbours<'_>, end: &UnixEnd) -> Result<Option<OwnedFd>> {
    let name = FileKey::of_socket(end);
    match (ext::inherited(cx.given, &name), name.needed()) {
        (Some(given), _) => duplicate(given).map(Some),
        (None, Some(key)) => {
            let inode = end.link.inode;
            Err(Error::Unsupported(format!("Unix socket {inode} without --inherit-fd {key}")))
        }
        (None, None) => Ok(None),
    }
}

fn shut_down(fd: BorrowedFd<'_>, what: ShutDown) -> Result<()> {
    let how = match (what.receiving, what.sending) {
        (false, false) => return Ok(()),
        (true, false) => Shutdown::Read,
        (false, true) => Shutdown::Write,
        (true, true) => Shutdown::Both,
    };
    rustix::net::shutdown(fd, how).context(|| "shutdown of a Unix socket".to_owned())
}

impl UnixRestorer {
    fn end(&self, file: u32) -> Result<&UnixEnd> {
        self.ends.get(file).ok_or_else(|| bad_entry(file, "is no Unix socket"))
    }

    /// What is outside can be found by its name only, and only for datagrams: to others a connection would be a new one.
    fn can_be_connected(&self, end: &UnixEnd) -> Result<()> {
        match self.ends.peer_of(end) {
            Some(peer) if peer.outside.is_some() && !end.kind.is_of_datagrams() => {
                let why =
                    format!("its peer, socket {}, is outside, and not for datagrams", peer.file);
                Err(bad_entry(end.file, why))
            }
            _ => Ok(()),
        }
    }

    fn birth(&self, end: &UnixEnd) -> Pairing {
        let peer = self.ends.peer_of(end);
        if !end.kind.is_of_datagrams() {
            return match (end.link.state, peer) {
                (UnixState::Connected, None) => Pairing::Widowed,
                (UnixState::Connected, Some(peer)) if !listens(peer) => Pairing::With(peer.file),
                _ => Pairing::Alone,
            };
        }
        let inode = end.link.inode;
        // A datagram socket without a name can only be reached from its other end.
        let unnamed = |end: &UnixEnd| end.name().is_empty() && end.outside.is_none();
        let is_its = |other: &&UnixEnd| {
            let of_datagrams = other.kind.is_of_datagrams();
            of_datagrams && other.link.peer == Some(inode) && other.link.inode != inode
        };
        let from = || self.ends.iter().find(is_its);
        match peer {
            Some(peer) if peer.link.inode == inode => Pairing::Alone,
            Some(peer) if unnamed(peer) => Pairing::With(peer.file),
            Some(peer) if unnamed(end) && peer.link.peer == Some(inode) => Pairing::With(peer.file),
            _ if unnamed(end) => match from() {
                Some(other) => Pairing::With(other.file),
                None if self.queued.contains_key(&end.file) => Pairing::Widowed,
                None => Pairing::Alone,
            },
            _ => Pairing::Alone,
        }
    }

    fn open_alone(&mut self, cx: &mut Neighbours<'_>, end: &UnixEnd) -> Result<OwnedFd> {
        let fd = create(cx.spaces, &end.kind)?;
        options::restore_more(fd.as_fd(), &end.options)?;
        if end.outside.is_some() {
            return Ok(fd);
        }
        name::bind(cx, &mut self.names, fd.as_fd(), end.bound.as_ref())?;
        if listens(end) {
            self.deaf.insert(end.file);
        }
        Ok(fd)
    }

    /// Lets those listen that do not yet.
    fn listen(&mut self, cx: &mut Neighbours<'_>) -> Result<()> {
        let mut by_maker: BTreeMap<_, Vec<(OwnedFd, u32)>> = BTreeMap::new();
        for id in std::mem::take(&mut self.deaf) {
            let end = self.end(id)?;
            let who = self.remembered(cx, end);
            let listener = (duplicate(file(cx, id)?)?, end.link.backlog);
            by_maker.entry(who).or_default().push(listener);
        }
        for (who, listeners) in by_maker {
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
        a: &UnixEnd,
        b: &UnixEnd,
    ) -> Result<(OwnedFd, OwnedFd)> {
        let (shut_a, shut_b) = (a.link.shut, b.link.shut);
        // What one end has shut down before it was connected does not show at the other.
        let (early_a, early_b) =
            (shut_a.without(shut_b.mirrored()), shut_b.without(shut_a.mirrored()));
        let is_plain =
            a.name().is_empty() && b.name().is_empty() && !early_a.is_some() && !early_b.is_some();
        let (fd_a, fd_b) = if a.kind.is_of_datagrams() || is_plain {
            // Both ends remember the one who made them.
            let who = a.link.remembered.or(b.link.remembered);
            let who = who.or_else(|| holder(cx, a.file)).or_else(|| holder(cx, b.file));
            let who = who.or_else(|| root(cx));
            let (fd_a, fd_b) = maker::socketpair(cx, who, &a.kind)?;
            name::bind(cx, &mut self.names, fd_a.as_fd(), a.bound.as_ref())?;
            name::bind(cx, &mut self.names, fd_b.as_fd(), b.bound.as_ref())?;
            (fd_a, fd_b)
        } else if self.serves(a, b, early_a) {
            let (server, client) = self.dial(cx, a, b, early_b)?;
            (server, client)
        } else {
            let (server, client) = self.dial(cx, b, a, early_a)?;
            (client, server)
        };
        options::restore_more(fd_a.as_fd(), &a.options)?;
        options::restore_more(fd_b.as_fd(), &b.options)?;
        Ok((fd_a, fd_b))
    }

    /// Whether `a` rather than `b` was the one that was accepted: it has its listener's
    /// name, and could not be shut down before it was connected.
    fn serves(&self, a: &UnixEnd, b: &UnixEnd, early_a: ShutDown) -> bool {
        if a.name().is_empty() || b.name().is_empty() {
            return !a.name().is_empty();
        }
        !early_a.is_some() && (self.listener(a).is_some() || self.listener(b).is_none())
    }

    /// The listener that a socket was accepted from, if it is in the images.
    fn listener(&self, end: &UnixEnd) -> Option<&UnixEnd> {
        let is_its = |other: &&UnixEnd| {
            listens(other) && other.kind == end.kind && other.name() == end.name()
        };
        self.ends.iter().find(is_its)
    }

    /// Connects `client` to a listener with the name of `server`.
    fn dial(
        &mut self,
        cx: &mut Neighbours<'_>,
        server: &UnixEnd,
        client: &UnixEnd,
        early: ShutDown,
    ) -> Result<(OwnedFd, OwnedFd)> {
        let fd = create(cx.spaces, &server.kind)?;
        if !client.name().is_empty() {
            // Nobody can reach it by its file, if it still has one.
            self.names.scratch.bind(fd.as_fd(), client.name())?;
        }
        shut_down(fd.as_fd(), early)?;
        // The client remembers who listened, the server who connected.
        let known = self.listener(server).cloned();
        let own = match &known {
            Some(listener) => self.listener_file(cx, listener.file)?,
            None => {
                let listener = create(cx.spaces, &server.kind)?;
                self.names.scratch.bind(listener.as_fd(), server.name())?;
                listener
            }
        };
        let listens = known.as_ref().map(|l| (l.link.backlog, self.remembered(cx, l)));
        let (backlog, listened) = listens.unwrap_or((1, None));
        let is_deaf = known.as_ref().is_some_and(|listener| self.deaf.remove(&listener.file));
        let differs = listens.is_none() || !same(client.link.remembered, listened);
        if differs {
            maker::listen(cx, self.remembered(cx, client), &[(own.as_fd(), backlog.max(1))])?;
        } else if is_deaf {
            maker::listen(cx, listened, &[(own.as_fd(), backlog)])?;
        }
        let reach = name::reach(own.as_fd(), server.name())?;
        let accepted = self.connect_and_accept(cx, server, [fd.as_fd(), own.as_fd()], &reach)?;
        if differs && listens.is_some() {
            maker::listen(cx, listened, &[(own.as_fd(), backlog)])?;
        }
        Ok((accepted, fd))
    }

    /// Connects a client to a listener, and accepts what has become of it. Others may know the name, too, and be quicker: to them it
    /// is a server that ends at this moment.
    fn connect_and_accept(
        &self,
        cx: &mut Neighbours<'_>,
        server: &UnixEnd,
        [client, listener]: [BorrowedFd<'_>; 2],
        reach: &Reach,
    ) -> Result<OwnedFd> {
        let what = || format!("accept Unix socket {}", server.file);
        let who = self.remembered(cx, server);
        let mut by = maker::connect(cx, who, client, reach)?;
        for _ in 0..MOST_STRANGERS {
            if by.is_none() && !has_waiting(listener)? {
                by = maker::connect(cx, who, client, reach)?;
                continue;
            }
            let accepted = rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
            let accepted = accepted.context(what)?;
            let from = socket::peer_credentials(accepted.as_fd()).context(what)?.pid;
            if by == Some(from) {
                return Ok(accepted);
            }
        }
        Err(bad_entry(server.file, "cannot be connected: others fill the queue of its listener"))
    }

    /// A duplicate of a listener of the images, which is opened if need be.
    fn listener_file(&mut self, cx: &mut Neighbours<'_>, id: u32) -> Result<OwnedFd> {
        if cx.files.get(id).is_none() {
            let end = self.end(id)?.clone();
            let fd = self.open_alone(cx, &end)?;
            cx.files.insert(id, fd);
            self.opened.push(id);
        }
        file(cx, id)?.try_clone_to_owned().context(|| "dup".to_owned())
    }

    /// Fills datagram sockets and connects them.
    fn connect_datagrams(&mut self, cx: &mut Neighbours<'_>, opened: &[UnixEnd]) -> Result<()> {
        let is_own = |end: &&UnixEnd| end.kind.is_of_datagrams() && end.outside.is_none();
        let all = || opened.iter().filter(is_own);
        for end in all() {
            // Born in a pair to be reached, but connected to another, or to none.
            let Pairing::With(mate) = self.birth(end) else { continue };
            if end.link.peer != Some(self.end(mate)?.link.inode) {
                let unspec = [0u8; 16];
                socket::connect(file(cx, end.file)?, &unspec)
                    .context(|| format!("disconnect Unix socket {}", end.file))?;
            }
        }
        for end in all() {
            for message in self.queued.get(&end.file).cloned().unwrap_or_default() {
                self.deliver(cx, end, &message)?;
            }
        }
        for end in all() {
            self.connect_datagram(cx, end)?;
        }
        Ok(())
    }

    fn connect_datagram(&mut self, cx: &Neighbours<'_>, end: &UnixEnd) -> Result<()> {
        let fd = file(cx, end.file)?;
        let what = || format!("connect Unix socket {}", end.file);
        match self.ends.peer_of(end) {
            Some(peer) if socket::peer_address(fd).is_ok() => {
                tracing::trace!("socket {} has its peer {} already", end.file, peer.file);
                Ok(())
            }
            Some(UnixEnd { outside: Some(name), .. }) => {
                if !cx.ext_unix_sk {
                    let name = String::from_utf8_lossy(name);
                    let name = name.trim_end_matches('\0');
                    let why = format!("its peer {name:?} is outside: --ext-unix-sk allows it");
                    return Err(bad_entry(end.file, why));
                }
                socket::connect(fd, &name::address(name)).context(what)
            }
            Some(peer) => {
                let reach = name::reach(file(cx, peer.file)?, peer.name())?;
                socket::connect(fd, &reach.address).context(what)
            }
            None if end.link.peer_closed && !self.mates.contains_key(&end.file) => {
                // To one that will be closed.
                let peer = create(cx.spaces, &end.kind)?;
                let number = random().context(what)?;
                let name = format!("\0torpor-closed-{number:016x}");
                socket::bind(peer.as_fd(), &name::address(name.as_bytes())).context(what)?;
                socket::connect(fd, &name::address(name.as_bytes())).context(what)
            }
            None => Ok(()),
        }
    }

    /// Puts a message into the queue of a datagram socket: sent by its sender if that
    /// is there, else by somebody who has its name.
    fn deliver(&mut self, cx: &Neighbours<'_>, to: &UnixEnd, queued: &SocketMessage) -> Result<()> {
        let sender = self.sender(to, queued);
        let peer = self.ends.peer_of(to).map(|peer| peer.file);
        let queued = &signed(cx, queued, sender.or(peer).unwrap_or(to.file));
        let mate = match self.birth(to) {
            Pairing::With(id) => Some(file(cx, id)?),
            Pairing::Widowed => self.mates.get(&to.file).map(AsFd::as_fd),
            Pairing::Alone => None,
        };
        if let Some(mate) = mate.filter(|_| to.name().is_empty() || sender.is_none()) {
            if !queued.address.is_empty() && socket::local_address(mate).is_ok_and(|a| a.len() <= 2)
            {
                self.names.scratch.bind(mate, queued.address.get(2..).unwrap_or_default())?;
            }
            return send(cx, mate, None, queued);
        }
        let reach = name::reach(file(cx, to.file)?, to.name())?;
        if let Some(id) = sender {
            return self.deliver_from(cx, to, id, &reach, queued);
        }
        let stranger = create(cx.spaces, &to.kind)?;
        options::raise_buffers(stranger.as_fd());
        if !queued.address.is_empty() {
            self.names
                .scratch
                .bind(stranger.as_fd(), queued.address.get(2..).unwrap_or_default())?;
        }
        send(cx, stranger.as_fd(), Some(&reach), queued)
    }

    fn deliver_from(
        &self,
        cx: &Neighbours<'_>,
        to: &UnixEnd,
        sender: u32,
        reach: &Reach,
        queued: &SocketMessage,
    ) -> Result<()> {
        match send(cx, file(cx, sender)?, Some(reach), queued) {
            // A queue holds more from the one who is connected both ways.
            Err(Error::Os { source, .. })
                if source.kind() == std::io::ErrorKind::WouldBlock
                    && self.ends.peer_of(to).is_some_and(|peer| peer.file == sender) =>
            {
                let back = name::reach(file(cx, sender)?, self.end(sender)?.name())?;
                socket::connect(file(cx, to.file)?, &back.address)
                    .context(|| format!("connect Unix socket {}", to.file))?;
                send(cx, file(cx, sender)?, Some(reach), queued)
            }
            sent => sent,
        }
    }

    /// The socket of the images that has the sender's name.
    fn sender(&self, to: &UnixEnd, queued: &SocketMessage) -> Option<u32> {
        let name = queued.address.get(2..).filter(|n| !n.is_empty())?;
        let is_it =
            |end: &&UnixEnd| end.kind == to.kind && end.outside.is_none() && end.name() == name;
        self.ends.iter().find(is_it).map(|end| end.file)
    }

    /// Connects those who wait in the queue of a listener, in their order.
    fn connect_waiting(&mut self, cx: &mut Neighbours<'_>, listener: &UnixEnd) -> Result<()> {
        let UnixLink { inode, pending, backlog, .. } = &listener.link;
        let place = |end: &UnixEnd| {
            pending.iter().position(|inode| *inode == end.link.inode).unwrap_or(usize::MAX)
        };
        let opened = self.opened.iter().filter_map(|&file| self.ends.get(file));
        let waits = |end: &&UnixEnd| end.link.peer == Some(*inode) && !end.kind.is_of_datagrams();
        let mut waiting: Vec<&UnixEnd> = opened.filter(waits).collect();
        waiting.sort_by_key(|end| (place(end), end.file));
        if waiting.is_empty() {
            return Ok(());
        }
        let own = duplicate(file(cx, listener.file)?)?;
        let reach = name::reach(own.as_fd(), listener.name())?;
        let who = self.remembered(cx, listener);
        // As many as may wait anywhere: others may have connected since it listens.
        maker::listen(cx, who, &[(own.as_fd(), u32::MAX)])?;
        for end in waiting {
            let fd = duplicate(file(cx, end.file)?)?;
            let who = holder(cx, end.file).or_else(|| root(cx));
            if maker::connect(cx, who, fd.as_fd(), &reach)?.is_none() {
                return Err(bad_entry(
                    listener.file,
                    "has so many others waiting that there is no room",
                ));
            }
        }
        maker::listen(cx, who, &[(own.as_fd(), *backlog)])
    }

    /// Fills the queue of a stream from its other end.
    fn fill_stream(&self, cx: &Neighbours<'_>, end: &UnixEnd) -> Result<()> {
        let Some(messages) = self.queued.get(&end.file) else { return Ok(()) };
        let (from, sender) = match (self.mates.get(&end.file), self.ends.peer_of(end)) {
            (Some(mate), _) => (mate.as_fd(), end.file),
            (None, Some(peer)) => (file(cx, peer.file)?, peer.file),
            _ => return Err(bad_entry(end.file, "has a queue, but no peer")),
        };
        options::raise_buffers(from);
        messages.iter().try_for_each(|message| send(cx, from, None, &signed(cx, message, sender)))
    }

    /// The process that a socket remembers. The images of others do not say: it is presumably the
    /// one that has the other end, or the listener. Of what is in flight only nobody has it: then it is the root task,
    /// never the restoring program.
    fn remembered(&self, cx: &Neighbours<'_>, end: &UnixEnd) -> Option<ProcessIds> {
        let held = || match self.ends.peer_of(end) {
            Some(peer) if !listens(end) => holder(cx, peer.file),
            _ => holder(cx, end.file),
        };
        end.link.remembered.or_else(held).or_else(|| root(cx))
    }
}

fn same(a: Option<ProcessIds>, b: Option<ProcessIds>) -> bool {
    a.is_none() || a == b
}

/// A message with the credentials of its sender: of the task that has the sending socket where the
/// images, which others have written, do not say.
fn signed(cx: &Neighbours<'_>, message: &SocketMessage, sender: u32) -> SocketMessage {
    let sender = message.sender.or_else(|| holder(cx, sender));
    SocketMessage { sender, ..message.clone() }
}

/// The first task that has a socket. Who has connected one that nobody has accepted yet, say, is not
/// known; as a rule it is that.
fn holder(cx: &Neighbours<'_>, id: u32) -> Option<ProcessIds> {
    ids_of(cx.tasks.iter().find(|t| t.image.fds.iter().any(|fd| fd.file == id))?)
}

fn root(cx: &Neighbours<'_>) -> Option<ProcessIds> {
    ids_of(cx.tasks.first()?)
}

fn ids_of(task: &Task) -> Option<ProcessIds> {
    let (user, group) = task.image.ids()?;
    Some(ProcessIds { pid: task.vpid.cast_unsigned(), user, group })
}

fn send(
    cx: &Neighbours<'_>,
    from: BorrowedFd<'_>,
    to: Option<&Reach>,
    queued: &SocketMessage,
) -> Result<()> {
    let files = queued.files.iter().map(|id| file(cx, *id)).collect::<Result<Vec<_>>>()?;
    let message = Message {
        address: to.map(|r| r.address.as_slice()),
        data: &queued.data,
        files: &files,
        credentials: queued.sender.map(|sender| credentials(cx, sender)),
    };
    let sent = socket::send(from, &message, libc::MSG_DONTWAIT)
        .context(|| "fill the queue of a Unix socket".to_owned())?;
    if sent == queued.data.len() {
        return Ok(());
    }
    // A stream may take it in parts; descriptors went with the first.
    let rest = SocketMessage {
        data: queued.data.get(sent..).unwrap_or_default().to_vec(),
        files: Vec::new(),
        ..queued.clone()
    };
    send(cx, from, to, &rest)
}

/// A process that is gone cannot be named: the kernel wants a live one.
fn credentials(cx: &Neighbours<'_>, of: ProcessIds) -> Credentials {
    let own = || rustix::process::getpid().as_raw_nonzero().get();
    Credentials {
        pid: real_pid(cx.tasks, of.pid.cast_signed()).filter(|pid| *pid != 0).unwrap_or_else(own),
        uid: cx.id_maps.uid_outside(of.user).unwrap_or(of.user),
        gid: cx.id_maps.gid_outside(of.group).unwrap_or(of.group),
    }
}
