//! As much of HTTP/1.1 as the queue needs: requests one after the other, with a body of a
//! known length, and an answer that is whole or a stream. Parsing is `httparse`'s.

mod client;
mod server;

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

pub use client::{Address, Answer, Client, encode};
pub(crate) use client::{DEFAULT, is_cut_off};
pub(crate) use server::answer_one;
pub use server::{Body, Request, Response, answer_all};

/// No head of a request or an answer is longer.
const MAX_HEAD: usize = 64 << 10;
/// Nor has more lines.
const MAX_HEADERS: usize = 64;

/// What ends a head.
const END: &[u8] = b"\r\n\r\n";

/// From its first byte on a head comes within this time, and what else is to come then at this pace at least: who says
/// a byte from time to time is as good as silent.
const HURRY: Duration = Duration::from_secs(30);
/// Bytes in a second.
const SLOWEST: u64 = 16 << 10;

/// A connection.
pub trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// Reads up to the empty line that ends a head, which comes within `most` from its first byte on; returns the head and
/// what came after it.
fn read_head(stream: &mut dyn Stream, most: Duration) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (mut head, mut begun) = (Vec::<u8>::new(), None);
    let mut buffer = [0; 4096];
    // Nothing is looked at twice, however small the parts are in which it comes.
    let mut seen = 0_usize;
    loop {
        let new = seen.saturating_sub(END.len() - 1);
        if let Some(end) = head[new..].windows(END.len()).position(|part| part == END) {
            let rest = head.split_off(new + end + END.len());
            return Ok((head, rest));
        }
        if head.len() > MAX_HEAD {
            return Err(io::Error::other("the head is too long"));
        }
        seen = head.len();
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&buffer[..count]),
        }
        if begun.get_or_insert_with(Instant::now).elapsed() > most {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// What comes from a client that has to have said it by then.
struct InTime<'s, S: ?Sized> {
    from: &'s mut S,
    until: Instant,
}

impl<'s, S: ?Sized> InTime<'s, S> {
    /// It may take as long as so many bytes take that come slowly.
    fn new(from: &'s mut S, length: u64) -> Self {
        Self { from, until: Instant::now() + HURRY + Duration::from_secs(length / SLOWEST) }
    }
}

impl<S: Read + ?Sized> Read for InTime<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match Instant::now() > self.until {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => self.from.read(buffer),
        }
    }
}

/// The value of a header, whatever the case of its name.
fn header<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
}

fn owned(headers: &[httparse::Header<'_>]) -> Vec<(String, String)> {
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    headers.iter().map(|h| (h.name.to_owned(), text(h.value))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_head_ends_wherever_the_parts_of_it_do() {
        const HEAD: &[u8] = b"GET / HTTP/1.1\r\nA: \r\n\r\n";
        for first in 1..=HEAD.len() {
            let (mut theirs, mut ours) = UnixStream::pair().unwrap();
            let reader = std::thread::spawn(move || {
                let found = read_head(&mut ours, HURRY).unwrap();
                io::copy(&mut ours, &mut io::sink()).unwrap();
                found
            });
            for part in [&HEAD[..first], &HEAD[first..], b"body"] {
                theirs.write_all(part).unwrap();
                std::thread::yield_now();
            }
            drop(theirs);
            let (head, rest) = reader.join().unwrap();
            assert_eq!(head, HEAD);
            assert!(b"body".starts_with(&rest), "{rest:?}");
        }
    }
}
