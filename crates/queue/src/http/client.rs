//! The side that asks.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::{MAX_HEADERS, Stream, header, owned, read_head};
use crate::files;

/// Where a daemon listens, and is looked for, that nobody tells where. Its directory is made.
pub(crate) const DEFAULT: &str = "unix:/run/torpor/queue.sock";

/// No answer that is not a stream is longer.
const MAX_ANSWER: u64 = 256 << 20;

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
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let plain = text.strip_prefix("http://").or_else(|| text.strip_prefix("tcp:"));
        if let Some(place) = plain {
            return Ok(Self::Plain(place.trim_end_matches('/').to_owned()));
        }
        let secure = text.strip_prefix("https://").or_else(|| text.strip_prefix("tls:"));
        match secure {
            Some(place) => Ok(Self::Secure(place.trim_end_matches('/').to_owned())),
            None => Err(format!("{text} is no address: use unix:PATH or https://HOST:PORT")),
        }
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
    /// If it is cut off.
    pub fn whole(mut self) -> io::Result<Vec<u8>> {
        let length = header(&self.headers, "Content-Length").and_then(|n| n.parse().ok());
        let mut body = Vec::new();
        let count = self.by_ref().take(length.unwrap_or(MAX_ANSWER)).read_to_end(&mut body)?;
        if length.is_some_and(|length: u64| (count as u64) < length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(body)
    }
}

impl Client {
    fn connect(&self) -> io::Result<Box<dyn Stream>> {
        match &self.address {
            Address::Unix(path) => {
                Ok(Box::new(files::with_short_name(path, |short| UnixStream::connect(short))?))
            }
            Address::Plain(place) => Ok(Box::new(TcpStream::connect(place)?)),
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
                Ok(Box::new(rustls::StreamOwned::new(session, TcpStream::connect(place)?)))
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
        let mut stream = self.connect()?;
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
        let (head, before) = read_head(&mut *stream)?;
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Response::new(&mut headers);
        let Ok(httparse::Status::Complete(_)) = parsed.parse(&head) else {
            return Err(io::Error::other("what answers is no HTTP server"));
        };
        Ok(Answer {
            status: parsed.code.unwrap_or(500),
            headers: owned(parsed.headers),
            before: io::Cursor::new(before),
            stream,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("unix:/run/q".parse(), Ok(Address::Unix("/run/q".into())));
        assert_eq!("https://h:1/".parse(), Ok(Address::Secure("h:1".into())));
        assert_eq!("tcp:127.0.0.1:1".parse(), Ok(Address::Plain("127.0.0.1:1".into())));
        assert!("nowhere".parse::<Address>().is_err());
    }
}
