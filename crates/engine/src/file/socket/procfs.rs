//! Raw and ICMP sockets as procfs lists them: not every kernel lists them elsewhere.

use torpor_kernel::sock_diag::InetSocket;

use super::about::Socket;
use super::ping::is_ping;
use crate::error::{Context, Result};

/// The entry of a raw or ICMP socket in the network namespace of this thread.
///
/// # Errors
/// If procfs' list of these sockets cannot be read.
pub(super) fn find(socket: &Socket, inode: u32) -> Result<Option<InetSocket>> {
    let kind = if is_ping(socket.kind, socket.protocol) { "icmp" } else { "raw" };
    let v6 = if socket.domain == libc::AF_INET6 { "6" } else { "" };
    let path = format!("/proc/thread-self/net/{kind}{v6}");
    let text = std::fs::read_to_string(&path).context(|| format!("read {path}"))?;
    Ok(text.lines().skip(1).filter_map(parse).find(|s| s.inode == inode))
}

/// A line: number, local and remote address, state, queues, timer, retransmissions,
/// user, timeout, inode …
fn parse(line: &str) -> Option<InetSocket> {
    let mut fields = line.split_whitespace().skip(1);
    let (source, source_port) = address(fields.next()?)?;
    let (destination, destination_port) = address(fields.next()?)?;
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(5)?.parse().ok()?;
    Some(InetSocket {
        state,
        inode,
        source,
        source_port,
        destination,
        destination_port,
        ..InetSocket::default()
    })
}

/// Words as the kernel has them, shown as numbers of the host; the port is one.
fn address(field: &str) -> Option<([u32; 4], u16)> {
    let (address, port) = field.split_once(':')?;
    let mut words = [0; 4];
    for (word, at) in words.iter_mut().zip((0..address.len()).step_by(8)) {
        *word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
    }
    Some((words, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_understood() {
        let line = "   12: 0100007F:0001 0200007F:0000 01 00000000:00000000 00:00000000 00000000 \
                    \u{20}    0        0 4711 2 0000000000000000 0";
        let found = parse(line).unwrap();
        assert_eq!((found.state, found.inode, found.source_port), (1, 4711, 1));
        assert_eq!(found.destination[0].to_ne_bytes(), [127, 0, 0, 2]);
        let (words, port) = address("0000000000000000FFFF00000100007F:0050").unwrap();
        assert_eq!((words[3].to_ne_bytes(), port), ([127, 0, 0, 1], 0x50));
        assert_eq!(parse("  sl  local_address"), None);
    }
}
