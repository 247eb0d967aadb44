//! A connection between a page client and a page server.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::DerefMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, getpeername, getsockname, listen,
    shutdown, socket_with, sockopt,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustls::{ConnectionCommon, SideData, StreamOwned};
use torpor_sys::keepalive::keep_alive;
use torpor_sys::socket;

use super::protocol::{ASK, Command, Op, YES};
use super::tls;
use super::wire::Manner;
use crate::error::{Context, Error, Result};
use crate::options::PageServer;

/// Bytes of small messages that are sent together.
const BUFFER: usize = 64 * 1024;
/// After so long without a word the other end is asked whether it is there.
const SILENCE: Duration = Duration::from_secs(10);
/// For so long a page server may take to answer the first question.
const ANSWER: Duration = Duration::from_secs(30);
/// An end that says nothing and takes nothing for so long is given up. A dump may have much else to write in between.
pub(super) const PATIENCE: Duration = Duration::from_mins(10);
/// Clients that may be connected at once before one of them asks for something.
const PEERS: usize = 64;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// One end: bytes in both directions, encrypted or not.
pub struct Connection {
    stream: Box<dyn Stream + Send>,
    /// What has been said but not sent: a page server is told much in small pieces.
    said: Vec<u8>,
    /// How pages go over it to another Torpor, if nobody has said how.
    manner: Manner,
    /// Whether the other end has asked what this one is.
    knows: bool,
}

trait Stream: Read + Write {
    /// Whether bytes that have come in already can be read.
    fn has_more(&mut self) -> bool;

    fn socket(&self) -> &File;
}

impl Stream for File {
    fn has_more(&mut self) -> bool {
        false
    }

    fn socket(&self) -> &File {
        self
    }
}

impl<C, D> Stream for StreamOwned<C, File>
where
    C: DerefMut<Target = ConnectionCommon<D>>,
    D: SideData,
{
    fn has_more(&mut self) -> bool {
        // An error shows itself when it is read.
        self.conn.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    fn socket(&self) -> &File {
        &self.sock
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to the server that `to` names.
    ///
    /// # Errors
    /// If it cannot be reached, or has no right certificate.
    pub fn connect(to: &PageServer) -> Result<Self> {
        let host = to.address.as_deref().unwrap_or("127.0.0.1");
        let socket: OwnedFd = match &to.socket {
            Some(socket) => socket.try_clone().context(|| "dup".to_owned())?,
            None if to.port == 0 => {
                return Err(Error::Usage("--page-server needs the server's --port".to_owned()));
            }
            None => {
                let name = format!("page server {host} port {}", to.port);
                let stream = TcpStream::connect((host, to.port)).context(|| name)?;
                keep_alive(&stream, SILENCE).context(|| "setsockopt".to_owned())?;
                stream.into()
            }
        };
        match &to.tls {
            Some(files) => Ok(Self::encrypted(tls::client(File::from(socket), host, files)?)),
            None => Ok(Self::open(File::from(socket), to)),
        }
    }

    /// Over a network pages are compressed as long as that is faster.
    fn open(socket: File, options: &PageServer) -> Self {
        let manner =
            if options.compress || is_far(&socket) { Manner::Adaptive } else { Manner::Plain };
        Self::over(socket, manner)
    }

    /// What is encrypted is not compressed unasked: how well that goes shows something of it.
    fn encrypted(stream: impl Stream + Send + 'static) -> Self {
        Self::over(stream, Manner::Plain)
    }

    fn over(stream: impl Stream + Send + 'static, manner: Manner) -> Self {
        Connection {
            stream: Box::new(stream),
            said: Vec::with_capacity(BUFFER),
            manner,
            knows: false,
        }
    }

    /// Whether the client is Torpor's as well: [`Listener::accept_first`] has told it what this is.
    pub fn knows(&self) -> bool {
        self.knows
    }

    /// Asks whether the other end is Torpor's as well: not CRIU's, which does not notice.
    ///
    /// # Errors
    /// If the other end is gone, or gives no answer for [`ANSWER`].
    pub(crate) fn is_torpor(&mut self) -> Result<bool> {
        self.is_torpor_within(ANSWER)
    }

    pub(super) fn is_torpor_within(&mut self, patience: Duration) -> Result<bool> {
        let mut answer = [0; 4];
        self.expect_words_within(Some(patience))?;
        let ask = Command::bare(Op::Parent, Some(ASK)).send(self);
        let asked = ask.and_then(|()| self.flush()).and_then(|()| self.read_exact(&mut answer));
        asked.context(|| "asking what the other end is".to_owned())?;
        self.expect_words_within(None)?;
        Ok(i32::from_le_bytes(answer) == YES)
    }

    /// From now on reading fails when the other end says nothing for so long; it waits without end if that is none.
    ///
    /// # Errors
    /// If the kernel refuses the time.
    pub(crate) fn expect_words_within(&self, patience: Option<Duration>) -> Result<()> {
        sockopt::set_socket_timeout(self, sockopt::Timeout::Recv, patience)
            .context(|| "setsockopt".to_owned())
    }

    /// From now on reading and writing fail when the other end says nothing, or takes nothing, for so long; they wait without
    /// end if that is none.
    ///
    /// # Errors
    /// If the kernel refuses the time.
    pub(super) fn give_up_after(&self, patience: Option<Duration>) -> Result<()> {
        self.expect_words_within(patience)?;
        sockopt::set_socket_timeout(self, sockopt::Timeout::Send, patience)
            .context(|| "setsockopt".to_owned())
    }

    /// How pages go to another Torpor, if nobody has said how.
    pub fn manner(&self) -> Manner {
        self.manner
    }

    /// Whether the network has not taken everything yet that it was given.
    pub(crate) fn is_behind(&self) -> bool {
        // Only a TCP socket can tell: one to a process here, which passes pages on, has what that has not read yet.
        let queued = || socket::send_queue(self.as_fd());
        // An answer that there is none is not an error worth ending for.
        socket::unsent(self.as_fd()).or_else(|_| queued()).is_ok_and(|bytes| bytes > 0)
    }

    /// Whether something can be read that [`Connection::as_fd`] does not tell of.
    pub fn has_more(&mut self) -> bool {
        self.stream.has_more()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.socket().as_fd()
    }
}

/// Whether a socket's other end has another address than this one: it is on another host, or in
/// another network namespace.
fn is_far(socket: &File) -> bool {
    let ends = [getsockname(socket).ok(), getpeername(socket).ok().flatten()];
    let [here, there] = ends.map(|end| SocketAddr::try_from(end?).ok().map(|end| end.ip()));
    here.is_some() && there.is_some() && here != there
}

impl Read for Connection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buf).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the other end is silent")
            }
            _ => error,
        })
    }
}

impl Write for Connection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.said.len() + buf.len() < BUFFER {
            self.said.extend_from_slice(buf);
            return Ok(buf.len());
        }
        // Together: what was said would go in a packet of its own.
        let both = [IoSlice::new(&self.said), IoSlice::new(buf)];
        let sent = self.stream.write_vectored(&both)?;
        let said = sent.min(self.said.len());
        self.said.drain(..said);
        self.stream.write_all(&self.said)?;
        self.said.clear();
        if sent == said { self.stream.write(buf) } else { Ok(sent - said) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.said)?;
        self.said.clear();
        self.stream.flush()
    }
}

/// A socket that has an address, and does not listen yet.
fn bound(address: &SocketAddr) -> std::result::Result<TcpListener, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The port may have connections left that are about to end.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, address)?;
    Ok(socket.into())
}

/// What a page server waits for its client at.
#[derive(Debug)]
pub struct Listener<'a> {
    options: &'a PageServer,
    bound: Option<TcpListener>,
}

impl<'a> Listener<'a> {
    /// Begins to listen, unless the connection is there already.
    ///
    /// # Errors
    /// If the address is none of this host's, or the port is taken.
    pub fn new(options: &'a PageServer) -> Result<Self> {
        let listener = Self::bind(options)?;
        listener.listen()?;
        Ok(listener)
    }

    /// Takes the address, unless the connection is there already. Clients are refused until
    /// [`Listener::listen`].
    ///
    /// # Errors
    /// If the address is none of this host's, or the port is taken.
    pub fn bind(options: &'a PageServer) -> Result<Self> {
        let bound = match &options.socket {
            Some(_) => None,
            None => {
                let address = options.address.as_deref().unwrap_or_default();
                // Nobody else is to reach it unless that is said.
                let own = [SocketAddr::from((Ipv4Addr::LOCALHOST, options.port))];
                let addresses = match address {
                    "" => own.to_vec(),
                    host => (host, options.port)
                        .to_socket_addrs()
                        .context(|| format!("address {host}"))?
                        .collect(),
                };
                let host = if address.is_empty() { "127.0.0.1" } else { address };
                let what = || format!("listen at {host} port {}", options.port);
                let mut socket = Err(Errno::ADDRNOTAVAIL);
                for address in &addresses {
                    socket = bound(address);
                    if socket.is_ok() {
                        break;
                    }
                }
                Some(socket.context(what)?)
            }
        };
        Ok(Listener { options, bound })
    }

    /// From now on clients can connect.
    ///
    /// # Errors
    /// If another program has begun to listen at the port.
    pub fn listen(&self) -> Result<()> {
        let Some(bound) = &self.bound else { return Ok(()) };
        listen(bound, BACKLOG).context(|| format!("listen at port {}", self.options.port))
    }

    /// The port that a client is to connect to.
    pub fn port(&self) -> Option<u16> {
        self.bound.as_ref()?.local_addr().ok().map(|address| address.port())
    }

    /// Whether another client can come when one has gone.
    pub fn goes_on(&self) -> bool {
        self.bound.is_some()
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// If there is no socket to wait at, or it fails; if a client has no right certificate, or says
    /// nothing of one.
    fn accept(&self) -> Result<Connection> {
        match (&self.bound, &self.options.socket) {
            (Some(bound), _) => self.greet(accept(bound)?),
            (None, Some(socket)) => self.greet(socket.try_clone().context(|| "dup".to_owned())?),
            (None, None) => Err(Error::Usage("no socket to wait at".to_owned())),
        }
    }

    /// Waits for the first client that asks for something. Others may connect meanwhile and
    /// show no right certificate, or say nothing: they are let go.
    ///
    /// # Errors
    /// If the socket to wait at fails; on a connection that is there already, what its client did
    /// wrong.
    pub(crate) fn accept_first(&self) -> Result<(Connection, Command)> {
        let first = self.accept_next(None)?;
        first.ok_or_else(|| Error::Bug("no client was waited for".to_owned()))
    }

    /// As [`Listener::accept_first`], for further clients too; none if `until` can be read before
    /// there is one.
    ///
    /// # Errors
    /// See [`Listener::accept_first`].
    pub(crate) fn accept_next(
        &self,
        until: Option<BorrowedFd<'_>>,
    ) -> Result<Option<(Connection, Command)>> {
        let Some(bound) = &self.bound else {
            return first_command(self.accept()?).map(Some);
        };
        let what = || "wait for a client".to_owned();
        let (reading, writing) = pipe_with(PipeFlags::CLOEXEC).context(what)?;
        let first = Mutex::new(None);
        std::thread::scope(|scope| {
            let mut peers: VecDeque<OwnedFd> = VecDeque::new();
            let found = loop {
                let waited_for = [bound.as_fd(), reading.as_fd()].into_iter().chain(until);
                let mut fds: Vec<PollFd<'_>> =
                    waited_for.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                match poll(&mut fds, None) {
                    Err(Errno::INTR) => continue,
                    other => drop(other.context(what)?),
                }
                let ready = first.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(ready) = ready {
                    break Ok(Some(ready));
                }
                if fds.get(2).is_some_and(|fd| !fd.revents().is_empty()) {
                    break Ok(None);
                }
                if !fds[0].revents().contains(PollFlags::IN) {
                    continue;
                }
                let socket = match accept(bound) {
                    Ok(socket) => socket,
                    Err(error) => break Err(error),
                };
                if peers.len() >= PEERS
                    && let Some(oldest) = peers.pop_front()
                {
                    // It may have gone by itself.
                    let _ = shutdown(&oldest, Shutdown::Both);
                }
                peers.push_back(socket.try_clone().context(what)?);
                let (first, writing) = (&first, &writing);
                scope.spawn(move || {
                    let asked = self.greet(socket).and_then(first_command);
                    match asked {
                        Ok(ready) => {
                            let mut slot = first.lock().unwrap_or_else(PoisonError::into_inner);
                            slot.get_or_insert(ready);
                            let _ = rustix::io::write(writing, &[0]);
                        }
                        Err(error) => tracing::warn!("a client was let go: {error}"),
                    }
                });
            };
            // All but the one: their threads end.
            let kept = found.as_ref().ok().and_then(Option::as_ref);
            let kept = kept.and_then(|(connection, _)| address_of(connection));
            for peer in peers.iter().filter(|peer| address_of(*peer) != kept) {
                let _ = shutdown(peer, Shutdown::Both);
            }
            found
        })
    }

    /// Lets a client show its certificate, if it has to.
    fn greet(&self, socket: OwnedFd) -> Result<Connection> {
        match &self.options.tls {
            Some(files) => {
                let stream = tls::server(File::from(socket), files, tls::HANDSHAKE)?;
                Ok(Connection::encrypted(stream))
            }
            None => Ok(Connection::open(File::from(socket), self.options)),
        }
    }
}

/// The first command with which a client does something; whose server this is, it may ask before.
fn first_command(mut connection: Connection) -> Result<(Connection, Command)> {
    loop {
        let command = Command::receive(&mut connection)?;
        if command.op != Op::Parent || command.object != Some(ASK) {
            return Ok((connection, command));
        }
        let said = connection.write_all(&YES.to_le_bytes()).and_then(|()| connection.flush());
        said.context(|| "answer the page client".to_owned())?;
        connection.knows = true;
    }
}

fn accept(bound: &TcpListener) -> Result<OwnedFd> {
    let (stream, from) = bound.accept().context(|| "accept".to_owned())?;
    tracing::info!("accepted a connection from {from}");
    keep_alive(&stream, SILENCE).context(|| "setsockopt".to_owned())?;
    Ok(stream.into())
}

/// The address of a socket's other end, which tells it from others.
fn address_of(socket: impl AsFd) -> Option<SocketAddr> {
    SocketAddr::try_from(getpeername(socket).ok().flatten()?).ok()
}
