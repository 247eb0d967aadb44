//! Internet sockets: TCP that listens or is closed, UDP, UDP-Lite, ICMP ("ping") and
//! raw. Connections of TCP are in [`tcp`].

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use torpor_images::ImageDir;
use torpor_images::proto::{FdTypes, FileEntry, InetSkEntry, SkShutdown};
use torpor_kernel::sock_diag as diag;
use torpor_policy::{Connection, InetEnds, InetSocket, ShutDown, SocketMessage, TcpStream};
use torpor_sys::socket::{self, Opt};

use super::about::{Socket, SocketOwner, create, netns_of, restore_flags};
use super::address::Address;
use super::around::Around;
use super::inet_options::{dump_ip, dump_tcp_options, freebind, restore_ip, restore_tcp_options};
use super::queue;
use super::repair::{Repaired, leave_repair};
use super::spaces::Lists;
use super::tcp;
use super::{datagram, multicast, options, ping, state};
use crate::error::{Context, Error, Result};
use crate::file::{Found, OpenFiles};
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;
use crate::network::asleep::Asleep;
use crate::network::listed::tcp_sockets;

/// Describes an Internet socket.
pub(super) fn dump(
    sockets: &mut Lists,
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
) -> Result<FileEntry> {
    check_kind(found, about)?;
    options::leave_out_times(around.strict, found)?;
    let fd = found.file.as_fd();
    let parse = |bytes: Vec<u8>| Address::parse(&bytes);
    let local = socket::local_address(fd)
        .ok()
        .and_then(parse)
        .unwrap_or(Address::unspecified(about.domain));
    let remote = match socket::peer_address(fd).ok().and_then(parse) {
        None if about.kind != libc::SOCK_STREAM => sockets.spaces.portless_peer(about)?,
        remote => remote,
    };
    let mut isk = InetSkEntry {
        id: found.id,
        ino: about.inode,
        family: about.domain.cast_unsigned(),
        r#type: about.kind.cast_unsigned(),
        proto: about.protocol.cast_unsigned(),
        state: if remote.is_some() { state::ESTABLISHED } else { state::CLOSE },
        src_port: local.port.into(),
        src_addr: local.to_image(),
        flags: found.info.flags & !libc::O_CLOEXEC.cast_unsigned(),
        fown: found.fown,
        opts: options::dump(around.id_maps, found, about, &mut sockets.defaults)?,
        v6only: v6only(fd, about.domain),
        ip_opts: Some(dump_ip(fd, about)),
        ifname: local.device(fd),
        ns_id: Some(about.ns_id),
        ..InetSkEntry::default()
    };
    if let Some(remote) = remote {
        isk.dst_port = remote.port.into();
        isk.dst_addr = remote.to_image();
        isk.ifname = isk.ifname.or_else(|| remote.device(fd));
    } else {
        isk.dst_addr = Address::unspecified(about.domain).to_image();
    }
    if about.kind == libc::SOCK_STREAM {
        dump_tcp(sockets, around, found, about, &mut isk)?;
    } else {
        let listed = sockets.spaces.inet(about)?;
        isk.shutdown =
            in_images(listed.map_or_else(|| shutdown_unlisted(fd), |s| shutdown(s.shutdown)));
        refuse_corked(found, about)?;
        datagram::dump(&mut sockets.queues, around.images, found, about, &isk)?;
        isk.opts.torpor_memberships =
            multicast::dump(fd, about.domain, sockets.spaces.groups(about)?)?;
    }
    Ok(FileEntry {
        r#type: FdTypes::Inetsk.into(),
        id: found.id,
        isk: Some(isk),
        ..FileEntry::default()
    })
}

fn check_kind(found: &Found, about: &Socket) -> Result<()> {
    match (about.kind, about.protocol) {
        (libc::SOCK_STREAM, libc::IPPROTO_TCP | libc::IPPROTO_MPTCP)
        | (libc::SOCK_DGRAM, libc::IPPROTO_UDP | libc::IPPROTO_UDPLITE | libc::IPPROTO_ICMP)
        | (libc::SOCK_DGRAM, libc::IPPROTO_ICMPV6)
        | (libc::SOCK_RAW, _) => Ok(()),
        (_, libc::IPPROTO_SCTP) => Err(found.refuse("SCTP is not supported")),
        (kind, protocol) => Err(found.refuse(format!(
            "Internet sockets of type {kind} and protocol {protocol} are not supported"
        ))),
    }
}

fn v6only(fd: BorrowedFd<'_>, family: i32) -> Option<bool> {
    let get = || socket::get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY).ok();
    (family == libc::AF_INET6).then(get).flatten().map(|v| v != 0)
}

/// What poll(2) tells about a socket that nothing can be read from or written to.
pub(super) struct Polled {
    /// Nothing will come any more: its reading side was shut down.
    pub ended: bool,
    /// Both sides were shut down, or it is a stream that is not connected.
    pub hung_up: bool,
    /// There is an error to be fetched.
    pub error: bool,
    /// Urgent data waits.
    pub urgent: bool,
    /// Something waits to be read.
    pub readable: bool,
}

pub(super) fn polled(fd: BorrowedFd<'_>) -> Polled {
    let mut polled = [PollFd::new(&fd, PollFlags::RDHUP | PollFlags::PRI | PollFlags::IN)];
    let seen = match poll(&mut polled, Some(&Timespec::default())) {
        Ok(_) => polled[0].revents(),
        Err(_) => PollFlags::empty(),
    };
    Polled {
        ended: seen.contains(PollFlags::RDHUP),
        hung_up: seen.contains(PollFlags::HUP),
        error: seen.contains(PollFlags::ERR),
        urgent: seen.contains(PollFlags::PRI),
        readable: seen.contains(PollFlags::IN),
    }
}

/// The kernel lists only what is bound; of others the writing side does not show.
fn shutdown_unlisted(fd: BorrowedFd<'_>) -> SkShutdown {
    match polled(fd) {
        Polled { hung_up: true, .. } => SkShutdown::Both,
        Polled { ended: true, .. } => SkShutdown::Read,
        _ => SkShutdown::None,
    }
}

/// CRIU shuts down what the images say anything of.
fn in_images(shutdown: SkShutdown) -> Option<i32> {
    (shutdown != SkShutdown::None).then_some(shutdown.into())
}

fn shutdown(bits: u8) -> SkShutdown {
    SkShutdown::try_from(i32::from(bits & 3)).unwrap_or(SkShutdown::None)
}

/// Data that waits for an uncorked send has no way into an image. Packets that have
/// only not left the host yet do not count: they leave.
fn refuse_corked(found: &Found, about: &Socket) -> Result<()> {
    const ATTEMPTS: u32 = 100;
    if about.kind != libc::SOCK_DGRAM {
        return Ok(());
    }
    for attempt in 0..ATTEMPTS {
        let waiting = socket::send_queue(found.file.as_fd()).unwrap_or(0);
        if waiting == 0 {
            return Ok(());
        }
        let corked = socket::get_int(found.file.as_fd(), libc::IPPROTO_UDP, libc::UDP_CORK);
        if corked.is_ok_and(|c| c != 0) || attempt + 1 == ATTEMPTS {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(found.refuse("it holds data that is corked (UDP_CORK, MSG_MORE), which cannot be read"))
}

fn dump_tcp(
    sockets: &mut Lists,
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
    isk: &mut InetSkEntry,
) -> Result<()> {
    let fd = found.file.as_fd();
    let mut info = [0; 32];
    socket::get(fd, Opt::TCP_INFO, &mut info).context(|| "TCP_INFO".to_owned())?;
    let word = |at: usize| info.get(at..).and_then(|b| b.first_chunk().copied());
    let word = |at: usize| word(at).map_or(0, u32::from_ne_bytes);
    isk.state = u32::from(info[0]);
    isk.tcp_opts = Some(dump_tcp_options(fd));
    // What a listener of Multipath TCP accepts from peers that know only TCP is plain TCP.
    if about.protocol == libc::IPPROTO_MPTCP && !is_idle(isk.state, fd) {
        return Err(found.refuse(
            "it is a connection of Multipath TCP, which is not supported; run the program \
             without (GODEBUG=multipathtcp=0 for one built with Go)",
        ));
    }
    refuse_signed(sockets, found, about)?;
    match isk.state {
        state::LISTEN => {
            // In this state tcpi_unacked and tcpi_sacked are the accept queue's.
            let (waiting, backlog) = (word(24), word(28));
            isk.backlog = backlog;
            let handshakes = sockets.spaces.handshakes(about, isk.src_port)?;
            if (waiting > 0 || handshakes) && !around.connections.skip_in_flight {
                return Err(found.refuse(
                    "a connection waits to be accepted, which cannot be kept; \
                     --skip-in-flight leaves it out",
                ));
            }
            Ok(())
        }
        state::CLOSE => dump_closed(around, found, about, isk),
        _ if closes(sockets, around, about, isk)? => {
            isk.state = state::CLOSE;
            isk.shutdown = Some(SkShutdown::Both.into());
            isk.dst_port = 0;
            isk.dst_addr = Address::unspecified(about.domain).to_image();
            Ok(())
        }
        _ if !around.connections.tcp_established && !around.connections.close_outside => Err(found
            .refuse("it is a TCP connection; --tcp-established keeps it, --tcp-close closes it")),
        state::SYN_SENT => {
            // It has no peer yet that getpeername(2) would tell.
            let listed = sockets.spaces.inet(about)?;
            let listed = listed.ok_or_else(|| found.refuse("the kernel does not list it"))?;
            isk.dst_port = listed.destination_port.into();
            isk.dst_addr =
                Address { words: listed.destination, ..Address::unspecified(about.domain) }
                    .to_image();
            tcp::dump(around, found, about, isk)
        }
        _ => tcp::dump(around, found, about, isk),
    }
}

/// Refuses sockets whose segments are signed (TCP MD5 signatures, TCP-AO): the images have no place for the keys. A
/// listener without them would be open to all, and the peer of a connection would take nothing any more.
fn refuse_signed(sockets: &mut Lists, found: &Found, about: &Socket) -> Result<()> {
    // struct tcp_ao_info_opt
    let mut info = [0; 64];
    let option = if socket::get(found.file.as_fd(), Opt::TCP_AO_INFO, &mut info).is_ok() {
        "TCP_AO_ADD_KEY"
    } else if sockets.spaces.inet(about)?.is_some_and(|listed| listed.signed) {
        "TCP_MD5SIG"
    } else {
        return Ok(());
    };
    Err(found.refuse(format!(
        "its segments are signed ({option}), and the keys are not kept; close it, or end its program first"
    )))
}

/// Whether a connection is to come back closed. One that is kept by `--close-outside` can be, wherever the
/// tree comes back: it is between tasks of the tree, over the loopback device of a namespace of their own.
fn closes(
    sockets: &mut Lists,
    around: &Around<'_>,
    about: &Socket,
    isk: &InetSkEntry,
) -> Result<bool> {
    let network = around.connections;
    if network.tcp_close || !network.close_outside {
        return Ok(network.tcp_close);
    }
    let is_own = around.spaces.by_inode(about.space).is_some_and(|ns| !ns.is_host);
    let ends = InetEnds::read(isk).ok().map(|ends| tcp::ends(&ends));
    let ends = ends.filter(|(to, from)| is_own && to.is_loopback() && from.is_loopback());
    let live = around.tasks.iter().filter(|task| !task.is_zombie());
    let pids = || live.map(|task| task.pid).collect();
    let is_kept = ends.map(|ends| sockets.has_other_end(pids, about, ends)).transpose()?;
    Ok(is_kept != Some(true))
}

/// Whether a TCP socket has neither a peer nor anything of one.
fn is_idle(state: u32, fd: BorrowedFd<'_>) -> bool {
    let Polled { readable, error, .. } = polled(fd);
    state == state::LISTEN || state == state::CLOSE && !readable && !error
}

/// A closed TCP socket is just that, unless there is something left to be read: then it
/// is kept as the connection that it was. Its peer is not known any more.
fn dump_closed(
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
    isk: &mut InetSkEntry,
) -> Result<()> {
    let fd = found.file.as_fd();
    let Polled { ended, error, readable, .. } = polled(fd);
    // Whether it can write makes no difference: it cannot.
    isk.shutdown = in_images(if ended { SkShutdown::Both } else { SkShutdown::None });
    // Multipath TCP counts a byte where there is none.
    let unread = readable && socket::receive_queue(fd).is_ok_and(|bytes| bytes > 0);
    if isk.src_port == 0 || !(unread || error) {
        // It may have had a peer when that was asked for, and been closed since.
        (isk.dst_port, isk.dst_addr) = (0, Address::unspecified(about.domain).to_image());
        note_last_peer(fd, about, isk);
        return Ok(());
    }
    (isk.dst_port, isk.dst_addr) = (isk.src_port, isk.src_addr.clone());
    tcp::dump(around, found, about, isk)
}

/// Notes whom a closed socket was connected to: SO_PEERNAME still tells.
fn note_last_peer(fd: BorrowedFd<'_>, about: &Socket, isk: &mut InetSkEntry) {
    let length = Address::unspecified(about.domain).to_bytes().len();
    let peer = socket::last_peer_address(fd, length).ok().and_then(|bytes| Address::parse(&bytes));
    let is_tcp = about.protocol == libc::IPPROTO_TCP;
    if let Some(peer) = peer.filter(|peer| is_tcp && peer.port != 0 && isk.src_port != 0) {
        isk.torpor_peer_port = Some(peer.port.into());
        isk.torpor_peer_addr = peer.to_image();
    }
}

/// Local and remote address of an entry that a dump writes.
pub(super) fn addresses(isk: &InetSkEntry) -> Result<(Address, Address)> {
    let ends = InetEnds::read(isk).map_err(|reason| Error::invalid("files.img", reason))?;
    Ok((ends.local.into(), ends.remote.into()))
}

/// What several sockets may be bound to: network namespace, family-independent
/// protocol, port.
type Port = (u32, i32, u16);

fn port(socket: &InetSocket) -> Port {
    let [.., protocol] = socket.kind.arguments();
    (socket.kind.network().unwrap_or(0), protocol, socket.ends.local.port)
}

/// The restore half of Internet sockets.
#[derive(Debug, Default)]
pub(crate) struct InetRestorer {
    /// Ports that sockets share by `SO_REUSEPORT`. All of them need it while they are
    /// bound, although some may have lost it since.
    shared: HashSet<Port>,
    /// Whose sockets are of which the images do not say it.
    owner: SocketOwner,
    /// Connections of TCP, by socket.
    streams: HashMap<u32, TcpStream>,
    /// What waits to be read, by socket.
    queued: HashMap<u32, Vec<SocketMessage>>,
    opened: Vec<InetSocket>,
    /// For how long datagrams that were sent again were waited for, in milliseconds.
    waited: u32,
    /// Connections come back closed (`--tcp-close`, of the restore or of the dump).
    close: bool,
}

impl InetRestorer {
    /// Reads and checks the images; connections come back closed with `close`.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(
        &mut self,
        close: bool,
        (images, streams): (&ImageDir, HashMap<u32, TcpStream>),
        owner: SocketOwner,
        sockets: &[&InetSocket],
    ) -> Result<()> {
        self.streams = streams;
        self.owner = owner;
        self.close = close;
        let sharing = sockets.iter().filter(|socket| socket.options.reuse_port == Some(true));
        self.shared.extend(sharing.map(|socket| port(socket)));
        let files: HashSet<u32> = sockets.iter().map(|socket| socket.file).collect();
        self.queued = queue::load(images, |file| files.contains(&file))?;
        Ok(())
    }

    /// Makes the socket.
    ///
    /// # Errors
    /// If the socket cannot be made, set up or bound.
    pub(crate) fn open(
        &mut self,
        images: &ImageDir,
        spaces: &Namespaces,
        id_maps: &IdMaps,
        network: &mut Asleep,
        of: &InetSocket,
    ) -> Result<OwnedFd> {
        let owner = self.owner.or_of(&of.options);
        let fd = ping::make(spaces, id_maps, owner, of.file, &of.kind)?;
        self.prepare(fd.as_fd(), of)?;
        if of.connection != Connection::None && !self.close {
            self.spare_listeners(spaces, of)?;
            let stream = self.streams.get(&of.file).copied().unwrap_or_default();
            let sleeping = tcp::open(images, stream, of, &fd)?;
            sleeping.guard(&network.guardian)?;
            network.sleeping.push(sleeping);
            return Ok(fd);
        }
        bind(spaces, fd.as_fd(), of)?;
        if let Some(messages) = self.queued.remove(&of.file) {
            datagram::restore(spaces, fd.as_fd(), of, &messages, &mut self.waited)?;
        }
        self.opened.push(of.clone());
        Ok(fd)
    }

    /// Only when everything is bound: what listens forbids others to bind its port.
    /// Connects what is open.
    ///
    /// # Errors
    /// If the socket cannot be connected, cannot listen, or does not take its options or data.
    pub(crate) fn connect(
        &mut self,
        spaces: &Namespaces,
        id_maps: &IdMaps,
        files: &OpenFiles,
        network: &Asleep,
    ) -> Result<()> {
        for of in self.opened.drain(..) {
            let Some(fd) = files.get(of.file) else { continue };
            if of.connection != Connection::None {
                shut_down(fd, ShutDown { receiving: true, sending: true });
            }
            finish(spaces, id_maps, fd, &of)?;
        }
        let mut lost = 0;
        network.sleeping.iter().try_for_each(|s| s.connect(spaces, &mut lost))
    }
}

impl InetRestorer {
    /// Makes sure that a connection that is closed takes no port from somebody who listens there by now: its socket is
    /// bound in repair mode, which asks nobody.
    fn spare_listeners(&self, spaces: &Namespaces, of: &InetSocket) -> Result<()> {
        if of.state != state::CLOSE {
            return Ok(());
        }
        let probe = create(spaces, &of.kind)?;
        self.prepare(probe.as_fd(), of)?;
        match bind_once(probe.as_fd(), of) {
            Err(error) if is_in_use(&error) && others_listen(spaces, of)? => Err(error),
            _ => Ok(()),
        }
    }

    /// What must be set before a socket is bound.
    fn prepare(&self, fd: BorrowedFd<'_>, of: &InetSocket) -> Result<()> {
        let family = of.ends.local.family;
        let set = |(level, name): (i32, i32), value: bool| {
            if socket::get_int(fd, level, name).is_ok_and(|now| now == i32::from(value)) {
                return Ok(());
            }
            socket::set_int(fd, level, name, value.into())
                .context(|| format!("setsockopt({level}, {name})"))
        };
        let wanted = &of.options;
        options::restore_device(fd, wanted)?;
        options::restore_more(fd, wanted)?;
        if let Some(v6only) = of.inet_options.only_ipv6.filter(|_| family == libc::AF_INET6) {
            set((libc::IPPROTO_IPV6, libc::IPV6_V6ONLY), v6only)?;
        }
        // An address may be gone from the host, or never have been there.
        set(freebind(family), true)?;
        set((libc::SOL_SOCKET, libc::SO_REUSEADDR), true)?;
        if self.shared.contains(&port(of)) {
            set((libc::SOL_SOCKET, libc::SO_REUSEPORT), true)?;
        }
        Ok(())
    }
}

fn bind(spaces: &Namespaces, fd: BorrowedFd<'_>, of: &InetSocket) -> Result<()> {
    let local = Address::from(of.ends.local);
    if local.is_unspecified() && (of.kind.is_raw() || local.port == 0) {
        return Ok(());
    }
    let bind = || bind_once(fd, of);
    match bind() {
        Err(error) if of.kind.is_stream() && is_in_use(&error) => {
            // No socket of the tree listens yet.
            if others_listen(spaces, of)? {
                return Err(error);
            }
        }
        bound => return bound,
    }
    // The remains of connections occupy a port for a minute.
    if of.state == state::CLOSE && Repaired::enter(fd).is_ok() {
        let bound = bind();
        return leave_repair(fd, 1).and(bound);
    }
    despite_remains(spaces, of, local.port, bind)
}

fn bind_once(fd: BorrowedFd<'_>, of: &InetSocket) -> Result<()> {
    let local = Address::from(of.ends.local).on_device(fd, of.ends.device.as_deref())?;
    socket::bind(fd, &local.to_bytes()).context(|| format!("bind socket {} to {local}", of.file))
}

fn is_in_use(error: &Error) -> bool {
    matches!(error, Error::Os { source, .. } if source.raw_os_error() == Some(libc::EADDRINUSE))
}

/// Whether somebody listens at the address and port of a socket, in its network namespace. One of another family may
/// hear both.
fn others_listen(spaces: &Namespaces, of: &InetSocket) -> Result<bool> {
    const ANY: [u32; 4] = [0; 4];
    let local = Address::from(of.ends.local);
    let meets = |socket: &diag::InetSocket| {
        let (own, other) = (local.words, socket.source);
        i32::from(socket.family) != local.family || own == other || own == ANY || other == ANY
    };
    let listens = |socket: &diag::InetSocket| {
        let is_there = socket.source_port == local.port && meets(socket);
        is_there && u32::from(socket.state) == state::LISTEN
    };
    let listed = spaces.in_netns(netns_of(spaces, of.kind.network()), tcp_sockets)?;
    Ok(listed.iter().any(listens))
}

/// Takes a port, after the remains of connections if need be: a listener cannot be in
/// repair mode, which would pass over them.
fn despite_remains(
    spaces: &Namespaces,
    of: &InetSocket,
    port: u16,
    take: impl Fn() -> Result<()>,
) -> Result<()> {
    match take() {
        Err(error) if of.kind.is_stream() && is_in_use(&error) => {
            spaces
                .in_netns(netns_of(spaces, of.kind.network()), || Ok(diag::forget_closed(port)?))?;
            take()
        }
        taken => taken,
    }
}

/// Connects or listens, and sets what must be set last.
fn finish(
    spaces: &Namespaces,
    id_maps: &IdMaps,
    fd: BorrowedFd<'_>,
    of: &InetSocket,
) -> Result<()> {
    let InetEnds { local, remote, device, .. } = &of.ends;
    match of.state {
        state::LISTEN if of.kind.is_stream() => {
            let backlog = i32::try_from(of.backlog).unwrap_or(i32::MAX);
            despite_remains(spaces, of, local.port, || {
                rustix::net::listen(fd, backlog).context(|| format!("listen on socket {}", of.file))
            })?;
        }
        state::ESTABLISHED if !of.kind.is_stream() => {
            let remote = Address::from(*remote).on_device(fd, device.as_deref())?;
            socket::connect(fd, &remote.to_bytes())
                .context(|| format!("connect socket {} to {remote}", of.file))?;
        }
        _ => {}
    }
    shut_down(fd, of.shut);
    multicast::restore(fd, of.file, &of.memberships)?;
    restore_options(id_maps, fd, of)?;
    restore_flags(fd, of.flags)
}

/// Gives a socket its options when it is what it shall be.
pub(super) fn restore_options(id_maps: &IdMaps, fd: BorrowedFd<'_>, of: &InetSocket) -> Result<()> {
    restore_ip(fd, of.ends.local.family, &of.inet_options)?;
    restore_tcp_options(fd, &of.inet_options.tcp)?;
    options::restore(id_maps, fd, &of.options)
}

/// The kernel shuts down what is not connected, too, but complains.
pub(super) fn shut_down(fd: BorrowedFd<'_>, how: ShutDown) {
    let how = match (how.receiving, how.sending) {
        (false, false) => return,
        (true, false) => rustix::net::Shutdown::Read,
        (false, true) => rustix::net::Shutdown::Write,
        (true, true) => rustix::net::Shutdown::Both,
    };
    if let Err(e) = rustix::net::shutdown(fd, how) {
        tracing::debug!("shutdown of an unconnected socket: {e}");
    }
}

#[cfg(test)]
mod tests;
