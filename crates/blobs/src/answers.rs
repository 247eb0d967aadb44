//! A server for tests: each request gets the next of its answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;

/// A server that gives some answers, and then no more.
pub(crate) struct Answers {
    /// Where it is.
    pub(crate) host: String,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Answers {
    /// One that gives what `answers` says of the address that it has.
    pub(crate) fn start(answers: impl FnOnce(&str) -> Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let (answers, heads) = (answers(&host), Arc::<Mutex<Vec<String>>>::default());
        let known = Arc::clone(&heads);
        thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                known.lock().unwrap().push(read(&mut BufReader::new(&stream)));
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        Self { host, heads }
    }

    /// The heads of the requests so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// The head of a request, all of which is read: who closes a connection before that breaks it.
fn read(from: &mut impl BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && from.read_line(&mut head).unwrap() > 0 {}
    let lower = head.to_lowercase();
    let len = lower.lines().find_map(|line| line.strip_prefix("content-length: "));
    let len: u64 = len.map_or(0, |len| len.parse().unwrap());
    std::io::copy(&mut from.take(len), &mut std::io::sink()).unwrap();
    head
}

/// An answer with further headers, each with its end, after which the connection ends.
pub(crate) fn answer(status: &str, headers: &str, body: &str) -> String {
    let len = body.len();
    format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {len}\r\nConnection: close\r\n\r\n{body}"
    )
}
