//! TCP: both ends of connections.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{BLOCK, nanoseconds};

/// The port of a program that serves.
const PORT: u16 = 7000;

/// Both ends in one process.
pub(super) fn loopback(size: usize) -> io::Result<Value> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || answer(&listener));
    converse_with(address, size)
}

/// The first byte of a connection says what it is for.
const BULK: u8 = b'b';
const ECHO: u8 = b'e';

/// The one end.
pub(super) fn serve() -> io::Result<Value> {
    answer(&TcpListener::bind(("0.0.0.0", PORT))?)
}

fn answer(listener: &TcpListener) -> io::Result<Value> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that goes away is no reason to end.
        let _ = converse(stream);
    }
}

fn converse(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == BULK {
        let mut buffer = vec![0; BLOCK];
        while stream.read(&mut buffer)? > 0 {}
        return stream.write_all(&kind);
    }
    while stream.read(&mut kind)? == 1 {
        stream.write_all(&kind)?;
    }
    Ok(())
}

/// The other end.
pub(super) fn connect(address: &str, size: usize) -> io::Result<Value> {
    converse_with((address, PORT), size)
}

#[allow(clippy::cast_precision_loss, reason = "a number of MiB")]
fn converse_with(address: impl ToSocketAddrs + Copy, size: usize) -> io::Result<Value> {
    let mut bulk = patiently(address)?;
    bulk.write_all(&[BULK])?;
    let block = vec![1; BLOCK];
    let begun = Instant::now();
    for _ in 0..size {
        bulk.write_all(&block)?;
    }
    bulk.shutdown(std::net::Shutdown::Write)?;
    // The other end answers when it has read everything.
    let mut byte = [0];
    bulk.read_exact(&mut byte)?;
    let throughput = size as f64 / begun.elapsed().as_secs_f64();
    let mut echo = patiently(address)?;
    echo.set_nodelay(true)?;
    echo.write_all(&[ECHO])?;
    let times = 2000;
    let begun = Instant::now();
    for _ in 0..times {
        echo.write_all(&byte)?;
        echo.read_exact(&mut byte)?;
    }
    let latency = nanoseconds(begun, times) / 1000.0;
    Ok(json!({ "throughput": throughput, "latency": latency }))
}

/// Connects, and waits a while for the other end to be there.
fn patiently(address: impl ToSocketAddrs + Copy) -> io::Result<TcpStream> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
