//! As much of HTTP/1.1 as the queue needs: requests one after the other, with a body of a
//! known length, and an answer that is whole or a stream. Parsing is `httparse`'s.

mod client;
mod server;

use std::io::{self, Read, Write};

pub(crate) use client::DEFAULT;
pub use client::{Address, Client, encode};
pub use server::{Body, Request, Response, answer_all, answer_one};

/// No head of a request or an answer is longer.
const MAX_HEAD: usize = 64 << 10;
/// Nor has more lines.
const MAX_HEADERS: usize = 64;

/// A connection.
pub trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// Reads up to the empty line that ends a head; returns the head and what came after it.
fn read_head(stream: &mut dyn Stream) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            let rest = head.split_off(end + 4);
            return Ok((head, rest));
        }
        if head.len() > MAX_HEAD {
            return Err(io::Error::other("the head is too long"));
        }
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&buffer[..count]),
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
