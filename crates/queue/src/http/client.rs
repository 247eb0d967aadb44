//! The side that asks.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::{HURRY, MAX_HEADERS, Stream, header, owned, read_head};
use crate::files;

/// Where a daemon listens, and is looked for, that nobody tells where. Its directory is made.
pub(crate) const DEFAULT: &str = "unix:/run/torpor/queue.sock";

/// No answer that is not a stream is longer.
const MAX_ANSWER: u64 = 256 << 20;

/// A connection over the network comes about within this time, or not at all.
const CONNECT: Duration = Duration::from_secs(10);

/// Who was sent something large puts so many bytes on stable storage a second, at least, before he answers.
const SLOWEST_DISK: u64 = 8 << 20;

/// Where a daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `unix:PATH`
    Unix(PathBuf),
    /// `http://HOST:PORT`, for this machine only
    Plain(String),
    /// `https://HOST:PORT`
    Secure(String),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let none = || format!("{text:?} is no address: use unix:PATH or https://HOST:PORT");
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(none()) } else { Ok(Self::Unix(path.into())) };
        }
        let place = |place: &str| {
            let place = place.trim_end_matches('/');
            let port = place.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
            match port {
                Some(Ok(_)) => Ok(place.to_owned()),
                _ => Err(format!("{text:?} has no port: use HOST:PORT, like ci.example:7777")),
            }
        };
        let plain = text.strip_prefix("http://").or_else(|| text.strip_prefix("tcp:"));
        if let Some(plain) = plain {
            return place(plain).map(Self::Plain);
        }
        let secure = text.strip_prefix("https://").or_else(|| text.strip_prefix("tls:"));
        place(secure.ok_or_else(none)?).map(Self::Secure)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Plain(place) => write!(f, "http://{place}"),
            Self::Secure(place) => write!(f, "https://{place}"),
        }
    }
}

/// A word as it can stand in a path or a query, whatever is in it.
#[must_use]
pub fn encode(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}

/// How a daemon is spoken to.
#[derive(Clone)]
pub struct Client {
    /// Where it listens.
    pub address: Address,
    /// What proves who asks.
    pub token: Option<String>,
    /// Which authorities are believed, for addresses that begin with https.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// A daemon that says nothing for so long, or takes nothing, counts as away. A stream may last for ever, as long as
    /// something comes.
    pub silence: Duration,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({})", self.address)
    }
}

/// The head of an answer, and what its body is read from.
pub struct Answer {
    /// The status.
    pub status: u16,
    headers: Vec<(String, String)>,
    before: io::Cursor<Vec<u8>>,
    stream: Box<dyn Stream>,
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Answer({})", self.status)
    }
}

impl Read for Answer {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.before.read(buffer)? {
            0 => self.stream.read(buffer),
            count => Ok(count),
        }
    }
}

impl Answer {
    /// All of the body.
    ///
    /// # Errors
    /// If it is cut off, or longer than any.
    pub fn whole(mut self) -> io::Result<Vec<u8>> {
        let length = header(&self.headers, "Content-Length").and_then(|n| n.parse().ok());
        if length.is_some_and(|length| length > MAX_ANSWER) {
            return Err(io::Error::other("what answers says that its answer is longer than any"));
        }
        let mut body = Vec::new();
        let count = self.by_ref().take(length.unwrap_or(MAX_ANSWER)).read_to_end(&mut body)?;
        if length.is_some_and(|length: u64| (count as u64) < length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(body)
    }
}

/// A connection to a daemon that may not be silent for long.
struct Patient {
    stream: Box<dyn Stream>,
    silence: Duration,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer).map_err(named(self.silence))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes).map_err(named(self.silence))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().map_err(named(self.silence))
    }
}

/// There is a daemon, which has said nothing, or taken nothing, for so long.
#[derive(Debug, thiserror::Error)]
#[error("it was silent for {} s", .0.as_secs_f32())]
struct Silent(Duration);

/// Names what has failed because nothing came, or went, for so long.
fn named(silence: Duration) -> impl Fn(io::Error) -> io::Error {
    move |error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, Silent(silence))
        }
        _ => error,
    }
}

/// Whether a daemon that was there has gone, or was silent, before it had answered: it may have done what it was asked.
#[must_use]
pub(crate) fn is_cut_off(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let is_silent = error.get_ref().is_some_and(|inner| inner.is::<Silent>());
    is_silent || matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// A connection to a daemon of this machine. One that stands still takes none, and then the kernel has room for a few.
fn connect_unix(path: &Path, silence: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(silence))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(silence))?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|e| named(silence)(e.into()))?;
    Ok(UnixStream::from(socket))
}

/// A connection to the first of the addresses of `place` that takes one.
fn connect_tcp(place: &str, silence: Duration) -> io::Result<TcpStream> {
    let mut failed = io::Error::other("its name has no address");
    for address in place.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT.min(silence)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(silence))?;
                stream.set_write_timeout(Some(silence))?;
                return Ok(stream);
            }
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

impl Client {
    /// This one, for answers that take longer.
    #[must_use]
    pub fn patient(&self, silence: Duration) -> Self {
        Self { silence, ..self.clone() }
    }

    fn connect(&self, silence: Duration) -> io::Result<Box<dyn Stream>> {
        match &self.address {
            Address::Unix(path) => {
                let stream = files::with_short_name(path, |short| connect_unix(short, silence))?;
                Ok(Box::new(stream))
            }
            Address::Plain(place) => Ok(Box::new(connect_tcp(place, silence)?)),
            Address::Secure(place) => {
                let config = self.tls.clone().ok_or_else(|| {
                    io::Error::other("https needs the authority: set TORPOR_QUEUE_CA to its file")
                })?;
                let host = place.rsplit_once(':').map_or(place.as_str(), |(host, _)| host);
                let host = host.trim_matches(['[', ']']).to_owned();
                let name =
                    rustls::pki_types::ServerName::try_from(host).map_err(io::Error::other)?;
                let session =
                    rustls::ClientConnection::new(config, name).map_err(io::Error::other)?;
                Ok(Box::new(rustls::StreamOwned::new(session, connect_tcp(place, silence)?)))
            }
        }
    }

    /// Asks, and returns the answer with its body yet to be read.
    ///
    /// # Errors
    /// If there is nobody, or what answers is no HTTP server.
    pub fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        self.send(method, path, headers, body.len() as u64, |stream| stream.write_all(body))
    }

    /// As [`ask`](Self::ask), with a body of `length` bytes that `write` writes.
    ///
    /// # Errors
    /// As those of `ask` and of `write`.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        length: u64,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<Answer> {
        let silence = self.silence + Duration::from_secs(length / SLOWEST_DISK);
        let mut stream = Patient { stream: self.connect(silence)?, silence };
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: queue\r\n");
        if let Some(token) = &self.token {
            head.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Content-Length: {length}\r\n\r\n"));
        stream.write_all(head.as_bytes())?;
        write(&mut stream)?;
        stream.flush()?;
        let (head, before) = read_head(&mut stream, HURRY)?;
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Response::new(&mut headers);
        let Ok(httparse::Status::Complete(_)) = parsed.parse(&head) else {
            return Err(io::Error::other("what answers is no HTTP server"));
        };
        Ok(Answer {
            status: parsed.code.unwrap_or(500),
            headers: owned(parsed.headers),
            before: io::Cursor::new(before),
            stream: Box::new(stream),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("unix:/run/q".parse(), Ok(Address::Unix("/run/q".into())));
        assert_eq!("https://h:1/".parse(), Ok(Address::Secure("h:1".into())));
        assert_eq!("tcp:127.0.0.1:1".parse(), Ok(Address::Plain("127.0.0.1:1".into())));
        assert_eq!("https://[::1]:7".parse(), Ok(Address::Secure("[::1]:7".into())));
        for wrong in
            ["nowhere", "", "unix:", "https://h", "http://h:", "https://h:x", "https://[::1]"]
        {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    const SILENCE: Duration = Duration::from_millis(300);

    fn client(address: Address) -> Client {
        Client { address, token: None, tls: None, silence: SILENCE }
    }

    /// A machine that takes connections, and says this on each, and no more.
    fn machine(says: &'static [u8]) -> (Client, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let there = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(says).unwrap();
            // Until the other end has lost its patience.
            let _ = io::copy(&mut stream, &mut io::sink());
        });
        (client(address), there)
    }

    /// Neither one that says nothing, nor one that stops in the middle.
    #[test]
    fn nobody_waits_for_ever_for_who_is_silent() {
        for says in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\npart"] {
            let (client, there) = machine(says);
            let error = client.ask("GET", "/", &[], b"").and_then(Answer::whole).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            assert_eq!(error.to_string(), "it was silent for 0.3 s");
            there.join().unwrap();
        }
    }

    /// All of it would be in memory.
    #[test]
    fn no_answer_is_believed_to_be_longer_than_any() {
        let (client, there) =
            machine(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\npart");
        let error = client.ask("GET", "/", &[], b"").and_then(Answer::whole).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Other, "{error}");
        there.join().unwrap();
    }

    /// Who takes nothing is sent what the kernel has room for.
    #[test]
    fn nobody_sends_for_ever_to_who_takes_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = client(Address::Plain(listener.local_addr().unwrap().to_string()));
        let sent =
            client.send("POST", "/", &[], 1, |to| io::copy(&mut io::repeat(0), to).map(drop));
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// However long a stream lasts.
    #[test]
    fn who_says_something_from_time_to_time_is_there() {
        const BEATS: usize = 12;
        let silence = Duration::from_secs(4);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let there = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_head(&mut stream, HURRY).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            for _ in 0..BEATS {
                thread::sleep(silence / 10);
                stream.write_all(b".").unwrap();
            }
        });
        let answer = client(address).patient(silence).ask("GET", "/", &[], b"").unwrap();
        assert_eq!(answer.whole().unwrap(), [b'.'; BEATS]);
        there.join().unwrap();
    }

    /// The kernel takes a few connections for a daemon that stands still, and then none.
    #[test]
    fn a_daemon_that_takes_no_connection_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // As many as wait by default are more than the descriptors that there may be.
        rustix::net::listen(&listener, 1).unwrap();
        let mut taken = Vec::new();
        let error = loop {
            match connect_unix(&path, Duration::from_millis(50)) {
                Ok(stream) => taken.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let error = client(Address::Unix(path)).ask("GET", "/", &[], b"").unwrap_err();
        assert_eq!(error.to_string(), "it was silent for 0.3 s");
    }
}
