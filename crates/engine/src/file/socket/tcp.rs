//! TCP connections, by way of the kernel's repair mode.
//!
//! In repair mode (`TCP_REPAIR`) sequence numbers, queues, options and windows of a
//! socket can be read and set, connect(2) connects without a packet, and close(2)
//! sends none. What a socket of a running task is in repair mode for must be short:
//! writing to it fails meanwhile. So it is left again as soon as all is read, and
//! entered once more only when the tasks are to be killed.
//!
//! A new socket is in repair mode until the tasks are woken. It is made with its
//! queues as far as they were sent; what was not sent yet is sent when it wakes.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use libc::{TCP_QUEUE_SEQ, TCP_REPAIR_QUEUE, TCP_TIMESTAMP};
use torpor_images::proto::{InetSkEntry, TcpStreamEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::{Connection, InetEnds, InetSocket, TcpStream};
use torpor_sys::socket::{self, Instruction, Message, Opt};

use super::about::{Socket, netns_of};
use super::address::Address;
use super::around::Around;
use super::inet::{addresses, polled};
use super::inject::{ACK, FIN, RST, Segment};
use super::repair::{
    REPAIR_OFF, REPAIR_OFF_SILENT, REPAIR_ON, Repaired, TCP_REPAIR, get, set, silence, undo_repair,
    undo_silence,
};
use super::{options, state};
use crate::error::{Context, Error, Result};
use crate::file::Found;
use crate::guardian::Guardian;
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;
use crate::network::rules::MARK;
use crate::network::tracked;

/// linux/tcp.h
const RECV_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;

/// Bits of `tcpi_options`, which `opt_mask` of the images has as well.
const OPT_TIMESTAMPS: u32 = 1;
const OPT_SACK: u32 = 2;
const OPT_WSCALE: u32 = 4;
/// Kinds of TCP options (RFC 9293, RFC 7323, RFC 2018), as `TCP_REPAIR_OPTIONS` wants.
const KIND_MSS: u32 = 2;
const KIND_WINDOW: u32 = 3;
const KIND_SACK_PERMITTED: u32 = 4;
const KIND_TIMESTAMP: u32 = 8;

/// How many milliseconds a segment in the name of a peer may take to arrive, and the last one.
const TRIES: u32 = 50;
const LAST_TRIES: u32 = 1000;
/// How many closed connections may fail to learn their last peers before no other one is told its own.
const MOST_LOST: u32 = 2;

/// How much of a queue is set at once.
const CHUNK: usize = 64 * 1024;

/// Whether the peer has closed its side: the sequence numbers count its FIN.
fn fin_received(state: u32) -> bool {
    matches!(state, state::CLOSE_WAIT | state::LAST_ACK | state::CLOSING)
}

/// Whether this side is closed: the sequence numbers count our FIN.
fn fin_queued(state: u32) -> bool {
    matches!(state, state::FIN_WAIT1 | state::FIN_WAIT2 | state::LAST_ACK | state::CLOSING)
}

/// The ends of a connection as packets have them, the remote one first: IPv4 even if the socket
/// is IPv6.
pub(crate) fn ends(of: &InetEnds) -> (Address, Address) {
    let (local, remote) = (Address::from(of.local), Address::from(of.remote));
    (remote.as_v4().unwrap_or(remote), local.as_v4().unwrap_or(local))
}

/// Saves a connection, with the state, addresses and options in `isk`.
pub(super) fn dump(
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
    isk: &mut InetSkEntry,
) -> Result<()> {
    let fd = found.file.as_fd();
    let mut ulp = [0; 16];
    if socket::get(fd, Opt::TCP_ULP, &mut ulp).is_ok_and(|len| len > 0) {
        return Err(found.refuse("its protocol is handled in the kernel (TCP_ULP, e.g. TLS)"));
    }
    if polled(fd).urgent {
        return Err(found.refuse("urgent data waits in it, which cannot be kept"));
    }
    let (local, remote) = addresses(isk)?;
    if isk.state != state::CLOSE {
        let Around { connections, guardian, spaces, .. } = *around;
        around.network.hold(connections, guardian, spaces, (about.space, remote, local))?;
    }
    let reuse = isk.opts.reuseaddr().into();
    let undo = undo_repair(found.holder, isk.ino, reuse);
    around.guardian.watch_file(&undo, fd)?;
    // A task that reads a connection in repair mode gets EPERM.
    let hurry = around.guardian.hurry();
    let repaired = Repaired::enter(fd)?;
    let saved = read_stream(found, isk);
    repaired.leave()?;
    drop(hurry);
    around.guardian.forget(&undo)?;
    let (stream, queues) = saved?;
    write_stream(around.images, isk.ino, &stream, &queues)?;
    around.network.add_connection(fd, isk.ino)
}

fn write_stream(
    images: &ImageDir,
    inode: u32,
    stream: &TcpStreamEntry,
    queues: &[Vec<u8>; 2],
) -> Result<()> {
    let mut writer = images.writer(kind::TCP_STREAM, inode.into())?;
    writer.entry(stream)?;
    for queue in queues {
        writer.raw(queue)?;
    }
    Ok(writer.finish()?)
}

/// Everything about a stream, in repair mode: the entry, receive and send queue.
fn read_stream(found: &Found, isk: &InetSkEntry) -> Result<(TcpStreamEntry, [Vec<u8>; 2])> {
    let fd = found.file.as_fd();
    let what = || format!("state of {}", found.link.display());
    let mut info = [0; 32];
    socket::get(fd, Opt::TCP_INFO, &mut info).context(what)?;
    let [_, _, _, _, _, tcpi_options, scales, ..] = info;
    let inq = socket::receive_queue(fd).unwrap_or(0);
    // Both count an unacknowledged FIN, which is no byte of the queue.
    let (sent, unsent) = if isk.state == state::CLOSE || isk.state == state::SYN_SENT {
        (0, 0)
    } else {
        (socket::send_queue(fd).context(what)?, socket::unsent(fd).context(what)?)
    };
    let fin = u32::from(fin_queued(isk.state));
    let outq = sent.saturating_sub(fin);
    let mut window = [0; 20];
    socket::get(fd, Opt::TCP_REPAIR_WINDOW, &mut window).context(what)?;
    let window = |i: usize| window.as_chunks::<4>().0.get(i).map(|w| u32::from_ne_bytes(*w));
    let mask = OPT_TIMESTAMPS | OPT_SACK | OPT_WSCALE;
    let (inq_seq, received) = read_queue(fd, RECV_QUEUE, inq).context(what)?;
    let (outq_seq, queued) = read_queue(fd, SEND_QUEUE, outq).context(what)?;
    let stream = TcpStreamEntry {
        inq_len: inq,
        inq_seq,
        outq_len: outq,
        outq_seq,
        opt_mask: u32::from(tcpi_options) & mask,
        snd_wscale: u32::from(scales & 0xf),
        mss_clamp: get(fd, libc::TCP_MAXSEG).context(what)?,
        rcv_wscale: Some(u32::from(scales >> 4)),
        timestamp: get(fd, TCP_TIMESTAMP).ok(),
        unsq_len: Some(unsent.saturating_sub(fin).min(outq)),
        snd_wl1: window(0),
        snd_wnd: window(1),
        max_window: window(2),
        rcv_wnd: window(3),
        rcv_wup: window(4),
        torpor_reset: (isk.state == state::CLOSE && polled(fd).error).then_some(true),
        ..TcpStreamEntry::default()
    };
    Ok((stream, [received, queued]))
}

/// The sequence number behind a queue, and its content.
fn read_queue(fd: BorrowedFd<'_>, queue: i32, len: u32) -> std::io::Result<(u32, Vec<u8>)> {
    socket::set_int(fd, libc::IPPROTO_TCP, TCP_REPAIR_QUEUE, queue)?;
    let seq = get(fd, TCP_QUEUE_SEQ)?;
    let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
    if !data.is_empty() {
        // A program may have set a place to look at from.
        let offset = socket::get_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap_or(-1);
        let look_from = |at| socket::set_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, at);
        if offset >= 0 {
            look_from(-1)?;
        }
        let looked = socket::receive(fd, &mut data, libc::MSG_PEEK | libc::MSG_DONTWAIT);
        if offset >= 0 {
            look_from(offset)?;
        }
        if looked?.len != data.len() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((seq, data))
}

/// A connection whose socket is in repair mode until its task wakes.
#[derive(Debug)]
pub(crate) struct Sleeping {
    socket: OwnedFd,
    of: InetSocket,
    stream: TcpStream,
    unsent: Vec<u8>,
    local: Address,
    remote: Address,
}

/// Makes the socket of a connection: bound, connected, its queues filled, in repair
/// mode. `socket` is new, but for options that are needed before it is bound.
pub(super) fn open(
    images: &ImageDir,
    stream: TcpStream,
    of: &InetSocket,
    socket: &OwnedFd,
) -> Result<Sleeping> {
    let fd = socket.as_fd();
    let ends = &of.ends;
    let on_device = |address| Address::from(address).on_device(fd, ends.device.as_deref());
    let (local, remote) = (on_device(ends.local)?, on_device(ends.remote)?);
    let (received, mut queued) = TcpStream::queues(images, of)?;
    set(fd, TCP_REPAIR, REPAIR_ON)?;
    // The numbers of the first bytes of the queues. Of a connection that is to be
    // established, only that of the first packet.
    let fins = (u32::from(fin_received(of.state)), u32::from(fin_queued(of.state)));
    let first = |(seq, len): (u32, u32), fin: u32| seq.wrapping_sub(fin).wrapping_sub(len);
    let send_seq = match of.state {
        state::SYN_SENT => stream.queued.0.wrapping_sub(1),
        _ => first(stream.queued, fins.1),
    };
    set_seq(fd, RECV_QUEUE, first(stream.received, fins.0))?;
    set_seq(fd, SEND_QUEUE, send_seq)?;
    set(fd, TCP_REPAIR_QUEUE, 0)?;
    socket::bind(fd, &local.to_bytes())
        .context(|| format!("bind socket {} to {local}", of.file))?;
    let keep = |unsent| {
        let (of, stream) = (of.clone(), stream);
        let socket = socket.try_clone().context(|| "dup".to_owned())?;
        Ok(Sleeping { socket, of, stream, unsent, local, remote })
    };
    if of.state == state::SYN_SENT {
        return keep(Vec::new());
    }
    socket::connect(fd, &remote.to_bytes())
        .context(|| format!("connect socket {} to {remote}", of.file))?;
    // Not before: the first window depends on the buffers.
    options::raise_buffers(fd);
    socket::attach_filter(fd, &only_marked()).context(|| "attach a socket filter".to_owned())?;
    restore_negotiated(fd, &stream)?;
    for (option, on) in [(libc::TCP_NODELAY, stream.no_delay), (libc::TCP_CORK, stream.cork)] {
        if on {
            set(fd, option, 1)?;
        }
    }
    let sent = queued.len().saturating_sub(usize::try_from(unsent_len(of, &stream)).unwrap_or(0));
    let unsent = queued.split_off(sent);
    fill(fd, RECV_QUEUE, &received)?;
    fill(fd, SEND_QUEUE, &queued)?;
    keep(unsent)
}

/// How many bytes at the end of the send queue are left for the time after the repair.
/// Where the kernel must believe that our FIN was sent, they were sent, too.
fn unsent_len(of: &InetSocket, stream: &TcpStream) -> u32 {
    if of.state == state::CLOSING { 0 } else { stream.unsent }
}

fn set_seq(fd: BorrowedFd<'_>, queue: i32, seq: u32) -> Result<()> {
    set(fd, TCP_REPAIR_QUEUE, queue)?;
    set(fd, TCP_QUEUE_SEQ, seq.cast_signed())
}

/// What the two ends had agreed on.
fn restore_negotiated(fd: BorrowedFd<'_>, stream: &TcpStream) -> Result<()> {
    let mut options = Vec::new();
    let mut add = |kind: u32, value: u32| {
        options.extend(kind.to_ne_bytes());
        options.extend(value.to_ne_bytes());
    };
    if stream.selective {
        add(KIND_SACK_PERMITTED, 0);
    }
    if let Some((send, receive)) = stream.scales {
        add(KIND_WINDOW, send | receive << 16);
    }
    if stream.timestamps {
        add(KIND_TIMESTAMP, 0);
    }
    if stream.segment != 0 {
        add(KIND_MSS, stream.segment);
    }
    // The kernel takes no empty list.
    if !options.is_empty() {
        socket::set(fd, Opt::TCP_REPAIR_OPTIONS, &options)
            .context(|| "TCP_REPAIR_OPTIONS".to_owned())?;
    }
    match stream.time {
        Some(timestamp) => set(fd, TCP_TIMESTAMP, timestamp.cast_signed()),
        None => Ok(()),
    }
}

/// Puts data into a queue of a socket in repair mode.
fn fill(fd: BorrowedFd<'_>, queue: i32, data: &[u8]) -> Result<()> {
    set(fd, TCP_REPAIR_QUEUE, queue)?;
    send_all(fd, data).context(|| format!("fill queue {queue} of a TCP socket"))
}

fn send_all(fd: BorrowedFd<'_>, mut data: &[u8]) -> std::io::Result<()> {
    let mut chunk = CHUNK;
    while !data.is_empty() {
        let part = data.get(..chunk.min(data.len())).unwrap_or(data);
        let message = Message { data: part, ..Message::default() };
        match socket::send(fd, &message, libc::MSG_DONTWAIT) {
            Ok(n) => data = data.get(n..).unwrap_or_default(),
            // Memory for smaller parts is found more easily.
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && chunk > 1024 => chunk /= 2,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Until it wakes, a socket takes the restore's own packets only, by the mark: the kernel
/// would answer others before all sockets are there.
fn only_marked() -> [Instruction; 4] {
    const PACKET_MARK: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_MARK).cast_unsigned();
    options::only_with(PACKET_MARK, MARK)
}

impl Sleeping {
    /// Brings a socket whose connection is closed, or half closed, into its state. Comes
    /// when the sockets of all connections are there. `lost` counts those that did not get there, and do not have to.
    pub(super) fn connect(&self, spaces: &Namespaces, lost: &mut u32) -> Result<()> {
        let fd = self.socket.as_fd();
        if self.of.state == state::SYN_SENT {
            return Ok(());
        }
        if self.of.state != state::CLOSE && tracked::is_there() {
            let (from, to) = self.ends();
            let space = netns_of(spaces, self.of.kind.network());
            spaces.in_netns(space, || tracked::carry_on(from, to))?;
        }
        // However full the receive queue is, there must be room for a FIN.
        self.set_window(wide_open(self.receive_seq()?))?;
        // The kernel believes that our FIN was sent: the send queue is chosen.
        let shut = || {
            rustix::net::shutdown(fd, rustix::net::Shutdown::Write)
                .context(|| "shutdown of a TCP socket".to_owned())
        };
        let reach = |flags, wanted| self.reach(spaces, flags, wanted);
        match self.of.state {
            state::CLOSE_WAIT | state::LAST_ACK => reach(FIN | ACK, state::CLOSE_WAIT)?,
            state::FIN_WAIT2 => {
                shut()?;
                reach(ACK, state::FIN_WAIT2)?;
            }
            state::CLOSING => {
                shut()?;
                reach(FIN | ACK, state::CLOSING)?;
            }
            state::CLOSE if self.stream.reset => reach(RST, state::CLOSE)?,
            // What keeps these from it keeps others as well, each for a second.
            state::CLOSE if *lost >= MOST_LOST && self.of.connection == Connection::LastPeer => {
                self.forget_peer("others do not know theirs any more, either")?;
            }
            state::CLOSE => {
                let closed = reach(FIN | ACK, state::CLOSE_WAIT)
                    .and_then(|()| shut())
                    .and_then(|()| reach(ACK, state::CLOSE));
                match closed {
                    Err(e) if self.of.connection == Connection::LastPeer => {
                        *lost += u32::from(is_late(&e));
                        self.forget_peer(e)?;
                    }
                    closed => closed?,
                }
            }
            _ => {}
        }
        options::restore_buffers(fd, &self.of.options)?;
        match self.stream.window {
            Some(window) if self.of.state != state::CLOSE => {
                self.set_window(window)?;
                self.fit_segments()
            }
            _ => Ok(()),
        }
    }

    /// Leaves a closed socket without the peer that it had last, which few programs ask for.
    fn forget_peer(&self, reason: impl std::fmt::Display) -> Result<()> {
        tracing::warn!("socket {} does not know its last peer any more: {reason}", self.of.file);
        let fd = self.socket.as_fd();
        let nobody = [0; 16];
        socket::connect(fd, &nobody).context(|| format!("disconnect socket {}", self.of.file))?;
        // What is left of that is an error, which is fetched by this.
        let _ = socket::get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
        super::inet::shut_down(fd, self.of.shut);
        Ok(())
    }

    /// The size of segments depends on the window, but is computed only when something
    /// else changes: options of IP packets. For IPv6 some must be added to be removed.
    fn fit_segments(&self) -> Result<()> {
        // No next header, eight bytes in all, a padding of six bytes (RFC 8200).
        const PADDING: [u8; 8] = [59, 0, 1, 4, 0, 0, 0, 0];
        let fd = self.socket.as_fd();
        let done = if self.local.as_v4().is_some() {
            socket::set(fd, Opt::IP_OPTIONS, &[])
        } else {
            socket::set(fd, Opt::IPV6_HOPOPTS, &PADDING)
                .and_then(|()| socket::set(fd, Opt::IPV6_HOPOPTS, &[]))
        };
        done.context(|| "IP options".to_owned())
    }

    /// The receive queue is chosen for no longer than that: only while the other one is,
    /// the kernel sends nothing that becomes due.
    fn receive_seq(&self) -> Result<u32> {
        let fd = self.socket.as_fd();
        set(fd, TCP_REPAIR_QUEUE, RECV_QUEUE)?;
        let seq = get(fd, TCP_QUEUE_SEQ).context(|| "TCP_QUEUE_SEQ".to_owned());
        set(fd, TCP_REPAIR_QUEUE, SEND_QUEUE)?;
        seq
    }

    fn first_unacknowledged(&self) -> u32 {
        let fin = u32::from(fin_queued(self.of.state));
        let (behind, len) = self.stream.queued;
        behind.wrapping_sub(fin).wrapping_sub(len)
    }

    /// Brings the socket into a state by a segment from the peer that acknowledges everything;
    /// one that closes, all that was sent before that.
    fn reach(&self, spaces: &Namespaces, flags: u8, wanted: u32) -> Result<()> {
        let ack = match flags & FIN {
            0 => get(self.socket.as_fd(), TCP_QUEUE_SEQ).context(|| "TCP_QUEUE_SEQ".to_owned())?,
            _ => self.first_unacknowledged(),
        };
        // A firewall that knows nothing of the connection drops it, perhaps on its way out.
        let is_sent = match self.inject_with(spaces, flags, ack) {
            Err(Error::Os { source, .. }) if source.kind() == ErrorKind::PermissionDenied => false,
            sent => sent.map(|()| true)?,
        };
        if is_sent && self.is_in_state(wanted, TRIES)? {
            return Ok(());
        }
        let (from, to) = self.ends();
        spaces.in_netns(netns_of(spaces, self.of.kind.network()), || tracked::enter(from, to))?;
        self.inject_with(spaces, flags, ack)?;
        if self.is_in_state(wanted, LAST_TRIES)? {
            return Ok(());
        }
        Err(Error::Os {
            what: format!(
                "TCP socket {} does not get to state {wanted}; is there a firewall that drops \
                 packets with mark {MARK:#x}?",
                self.of.file
            ),
            source: ErrorKind::TimedOut.into(),
        })
    }

    /// The addresses of the two ends as packets have them: the peer's and ours.
    fn ends(&self) -> (Address, Address) {
        match (self.remote.as_v4(), self.local.as_v4()) {
            (Some(from), Some(to)) => (from, to),
            _ => (self.remote, self.local),
        }
    }

    fn inject_with(&self, spaces: &Namespaces, flags: u8, ack: u32) -> Result<()> {
        // A socket that belongs to a device hears nothing from others.
        let fd = self.socket.as_fd();
        let wanted = &self.of.options;
        if wanted.device.is_some() {
            socket::set(fd, Opt::BINDTODEVICE, b"\0").context(|| "SO_BINDTODEVICE".to_owned())?;
        }
        let (from, to) = self.ends();
        let seq = self.receive_seq()?;
        let segment = Segment { from, to, seq, ack, flags };
        spaces.in_netns(netns_of(spaces, self.of.kind.network()), || segment.send())?;
        options::restore_device(fd, wanted)
    }

    /// Packets over the loopback device arrive at once, as a rule.
    fn is_in_state(&self, wanted: u32, tries: u32) -> Result<bool> {
        let mut info = [0; 4];
        for _ in 0..tries {
            socket::get(self.socket.as_fd(), Opt::TCP_INFO, &mut info)
                .context(|| "TCP_INFO".to_owned())?;
            if u32::from(info[0]) == wanted {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    }

    fn set_window(&self, words: [u32; 5]) -> Result<()> {
        let words = words.map(u32::to_ne_bytes);
        socket::set(self.socket.as_fd(), Opt::TCP_REPAIR_WINDOW, words.as_flattened())
            .context(|| format!("TCP_REPAIR_WINDOW of socket {}", self.of.file))
    }

    /// The number of the socket in the images.
    pub(crate) fn id(&self) -> u32 {
        self.of.file
    }

    /// The filter that it has until it wakes, and gets its own.
    pub(crate) fn filter(&self) -> Vec<Instruction> {
        match self.of.state {
            state::SYN_SENT => vec![],
            _ => only_marked().to_vec(),
        }
    }

    /// Closed from here on, it is closed without a word to the peer.
    pub(crate) fn silence(&self) {
        if let Err(e) = silence(self.socket.as_fd()) {
            tracing::error!("the peer of socket {} may see it end: {e}", self.of.file);
        }
    }

    /// Lets the guardian silence it, should the restore be killed.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(super) fn guard(&self, guardian: &Guardian) -> Result<()> {
        guardian.watch_file(&undo_silence(self.of.inode), self.socket.as_fd())
    }

    /// Lets the connection go on, now that nothing holds its packets back.
    ///
    /// # Errors
    /// If the socket does not leave repair mode, or does not take its options or what was not sent.
    pub(crate) fn wake(&self, id_maps: &IdMaps) -> Result<()> {
        let fd = self.socket.as_fd();
        // The own filter, if any, comes with the other options.
        if !self.filter().is_empty() {
            socket::set_int(fd, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0)
                .context(|| "SO_DETACH_FILTER".to_owned())?;
        }
        // Only images of engines that did not know the window leave anything to be asked for.
        let quiet = self.of.state != state::ESTABLISHED || self.stream.window.is_some();
        set(fd, TCP_REPAIR, if quiet { REPAIR_OFF_SILENT } else { REPAIR_OFF })?;
        super::inet::restore_options(id_maps, fd, &self.of)?;
        if !self.unsent.is_empty() {
            options::raise_buffers(fd);
            send_all(fd, &self.unsent).context(|| "send what was not sent yet".to_owned())?;
        }
        match self.of.state {
            state::FIN_WAIT1 | state::LAST_ACK => {
                rustix::net::shutdown(fd, rustix::net::Shutdown::Write)
                    .context(|| "shutdown of a TCP socket".to_owned())?;
            }
            state::SYN_SENT => self.dial()?,
            _ => {}
        }
        options::restore_buffers(fd, &self.of.options)?;
        super::about::restore_flags(fd, self.of.flags)
    }

    /// Sends the first packet once more, with the same number.
    fn dial(&self) -> Result<()> {
        let fd = self.socket.as_fd();
        super::about::restore_flags(fd, libc::O_NONBLOCK.cast_unsigned())?;
        match socket::connect(fd, &self.remote.to_bytes()) {
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
            other => other.context(|| format!("connect socket {}", self.of.file)),
        }
    }
}

/// Whether something was waited for in vain.
fn is_late(error: &Error) -> bool {
    matches!(error, Error::Os { source, .. } if source.kind() == ErrorKind::TimedOut)
}

/// A window that takes anything behind `seq`.
fn wide_open(seq: u32) -> [u32; 5] {
    const SIZE: u32 = 1 << 16;
    [seq, SIZE, SIZE, SIZE, seq]
}

#[cfg(test)]
mod tests;
