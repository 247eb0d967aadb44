//! Whether a server answers, by HTTP or HTTPS.
//!
//! Whoever answers may be hostile, or broken: nothing takes longer than it was given, however slowly bytes come.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use torpor_tls::{host_of, unverified};

use crate::interrupt;

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(10);
/// How often it is looked whether somebody has asked for the end.
const GLANCE: Duration = Duration::from_millis(100);
/// How much of an answer is read.
const HEAD: u64 = 4096;

/// What is asked for by HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// Whether it is asked for over TLS.
    is_encrypted: bool,
    /// Host and port.
    authority: String,
    path: String,
}

impl Url {
    /// The one that `text` is, if it is one.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        let (is_encrypted, port) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return None,
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // An address of IPv6 has colons between its brackets.
        let has_port = authority.rsplit(']').next().is_some_and(|behind| behind.contains(':'));
        let authority = match has_port {
            true => authority.to_owned(),
            false => format!("{authority}:{port}"),
        };
        let path = if path.is_empty() { "/" } else { path }.to_owned();
        (!host_of(&authority).is_empty()).then_some(Self { is_encrypted, authority, path })
    }

    /// Asks once, until `end` at most.
    ///
    /// # Errors
    /// If nobody answers in time, or not by this protocol, or with a status of 400 and more.
    pub fn ask(&self, end: Instant) -> io::Result<()> {
        let connection = Timed::connect(&self.authority, end.min(Instant::now() + ANSWER))?;
        match self.is_encrypted {
            true => {
                let over = unverified::over(connection, host_of(&self.authority));
                self.ask_over(over.map_err(io::Error::other)?)
            }
            false => self.ask_over(connection),
        }
    }

    /// The same over a connection.
    fn ask_over(&self, mut stream: impl Read + Write) -> io::Result<()> {
        let Self { authority, path, .. } = self;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        stream.flush()?;
        let mut head = String::new();
        BufReader::new(stream.take(HEAD)).read_line(&mut head)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        match status {
            Some(..400) => Ok(()),
            Some(status) => Err(io::Error::other(format!("it answered with the status {status}"))),
            None => Err(io::Error::other("its answer is not HTTP")),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_encrypted { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.path)
    }
}

/// A connection on which all that is read and written has to be through at `end`.
struct Timed {
    stream: TcpStream,
    end: Instant,
}

impl Timed {
    fn connect(authority: &str, end: Instant) -> io::Result<Self> {
        let mut last = io::Error::other("it has no address");
        for address in authority.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, rest(end)?) {
                Ok(stream) => return Ok(Self { stream, end }),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Does something that waits for the other side, for a moment at a time.
    fn wait(
        &mut self,
        mut work: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            interrupt::check().map_err(io::Error::other)?;
            let moment = Some(rest(self.end)?.min(GLANCE));
            self.stream.set_read_timeout(moment)?;
            self.stream.set_write_timeout(moment)?;
            match work(&mut self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

/// What is left until then.
fn rest(end: Instant) -> io::Result<Duration> {
    let rest = end.saturating_duration_since(Instant::now());
    match rest.is_zero() {
        true => Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time")),
        false => Ok(rest),
    }
}

impl Read for Timed {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.wait(|stream| stream.read(to))
    }
}

impl Write for Timed {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.wait(|stream| stream.write(data))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn addresses_are_read() {
        for (text, shown) in [
            ("http://localhost", "http://localhost:80/"),
            ("https://localhost/a/b?c", "https://localhost:443/a/b?c"),
            ("https://127.0.0.1:8443/", "https://127.0.0.1:8443/"),
            ("https://[::1]/x", "https://[::1]:443/x"),
            ("http://[::1]:8080", "http://[::1]:8080/"),
        ] {
            assert_eq!(Url::of(text).unwrap().to_string(), shown);
        }
        for text in ["ftp://localhost/", "localhost", "http://", "https://:8443/", "http:///x"] {
            assert_eq!(Url::of(text), None, "{text}");
        }
    }

    /// Says `word` again and again to whoever comes, until nobody listens.
    fn drip(word: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            while peer.write_all(word).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        address.to_string()
    }

    #[test]
    fn who_answers_slowly_is_waited_for_until_the_end_only() {
        // A record of TLS that is long, and a line that does not end.
        for (scheme, word) in [("https", b"\x16\x03\x03\x3f\xff".as_slice()), ("http", b"x")] {
            let url = Url::of(&format!("{scheme}://{}/", drip(word))).unwrap();
            let end = Instant::now() + Duration::from_millis(300);
            let error = url.ask(end).unwrap_err();
            assert!(Instant::now() >= end || error.kind() != io::ErrorKind::TimedOut, "{error}");
        }
    }

    #[test]
    fn a_status_is_told() {
        for (answer, said) in [
            ("HTTP/1.1 204 No Content\r\n\r\n", None),
            ("HTTP/1.1 503 Not yet\r\n\r\n", Some("the status 503")),
            ("220 mail\r\n", Some("is not HTTP")),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let url = Url::of(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
            let peer = thread::spawn(move || {
                let (mut peer, _) = listener.accept().unwrap();
                let mut asked = [0; 256];
                assert!(peer.read(&mut asked).unwrap() > 0);
                peer.write_all(answer.as_bytes()).unwrap();
            });
            let error = url.ask(Instant::now() + ANSWER).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(said.is_none_or(|said| error.unwrap().contains(said)));
            peer.join().unwrap();
        }
    }
}
