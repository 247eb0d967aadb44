//! Ports for servers that are told where to listen, and are not asked where they do.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// The first that is given out: below are those of services.
const FIRST: u32 = 10_000;
/// So many processes in a row have ports of their own.
const PROCESSES: u32 = 300;
/// As many as the tests of one process need at the same time, and more.
const EACH: u32 = 64;

/// A port of this host that nobody listens at, and that is given to no other test until its server has
/// taken it: all lie below those that the kernel gives to those who ask for any
/// (`net.ipv4.ip_local_port_range`, from 32768 on).
///
/// # Panics
/// If all that this process may have are taken.
#[must_use]
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let own = FIRST + std::process::id() % PROCESSES * EACH;
    let of_own = |_| own + NEXT.fetch_add(1, Ordering::Relaxed) % EACH;
    let mut ports = (0..EACH).map(of_own).filter_map(|port| u16::try_from(port).ok());
    let free = ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    free.expect("a free port")
}
