//! Datagrams of UDP that were received and not read yet.
//!
//! They come back as packets that the restore sends in the name of their senders. What
//! cannot come back like that is lost, as the network may lose it; but not silently.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use libc::UDP_GRO;
use torpor_images::ImageDir;
use torpor_images::proto::{InetSkEntry, SkPacketEntry};
use torpor_policy::{InetSocket, SocketMessage};
use torpor_sys::socket::{self, Opt};

use super::about::{Socket, bad_entry, netns_of};
use super::address::Address;
use super::inet::{self, polled};
use super::inject::Datagram;
use super::options;
use super::queue::{QueueWriter, look, more, seek};
use crate::error::{Context, Result};
use crate::file::Found;
use crate::namespace::Namespaces;

/// More than any datagram has.
const LARGEST: usize = 1 << 16;
/// How many milliseconds a datagram may take to arrive, and all of a restore together.
const ATTEMPTS: u32 = 500;
const IN_ALL: u32 = 5000;

/// Saves what waits in a socket, if it can come back.
///
/// # Errors
/// If the queue cannot be peeked at; if the image cannot be written.
pub(super) fn dump(
    queues: &mut QueueWriter,
    images: &ImageDir,
    found: &Found,
    about: &Socket,
    isk: &InetSkEntry,
) -> Result<()> {
    let fd = found.file.as_fd();
    if !polled(fd).readable {
        return Ok(());
    }
    if let Some(reason) = unkeepable(fd, about, isk) {
        let (pid, number, link) = (found.pid, found.fd, found.link.display());
        tracing::warn!(
            "task {pid}: fd {number} ({link}): datagrams that were not read yet are lost: {reason}"
        );
        return Ok(());
    }
    for (sender, data) in peek(fd).context(|| format!("queue of {}", found.link.display()))? {
        let entry =
            SkPacketEntry { id_for: found.id, torpor_addr: Some(sender), ..Default::default() };
        queues.write(images, entry, &data)?;
    }
    Ok(())
}

/// Why what waits in a socket cannot come back.
fn unkeepable(fd: BorrowedFd<'_>, about: &Socket, isk: &InetSkEntry) -> Option<&'static str> {
    let (local, _) = inet::addresses(isk).ok()?;
    let ip = isk.ip_opts.as_ref();
    if (about.kind, about.protocol) != (libc::SOCK_DGRAM, libc::IPPROTO_UDP) {
        Some("only those of UDP can be sent again")
    } else if polled(fd).error {
        // To look at the queue would take it away.
        Some("an error waits to be read before them")
    } else if local.ip().is_multicast() {
        Some("they were sent to a multicast group")
    } else if local.is_unspecified() && ip.is_some_and(|ip| ip.pktinfo == Some(true)) {
        Some("the program asks which address each was sent to (IP_PKTINFO)")
    } else if socket::get_int(fd, libc::IPPROTO_UDP, UDP_GRO).is_ok_and(|on| on != 0) {
        Some("the kernel joins them (UDP_GRO)")
    } else {
        None
    }
}

/// All datagrams, which stay there, with the addresses of their senders.
fn peek(fd: BorrowedFd<'_>) -> std::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let own = socket::get_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    // Each look begins where the last one ended.
    seek(fd, 0)?;
    let mut all = Vec::new();
    let mut buffer = vec![0; LARGEST];
    let looked = loop {
        match more(look(fd, &mut buffer, 0)) {
            Ok(Some(found)) => all.push((found.address, buffer[..found.len].to_vec())),
            Ok(None) => break Ok(all),
            Err(e) => break Err(e),
        }
    };
    seek(fd, own)?;
    looked
}

/// Puts datagrams into the queue of a socket that is bound, but not connected yet. `waited` says for how long the restore
/// has waited for datagrams that were late.
///
/// # Errors
/// If the socket cannot be freed of its device for a moment, or bound to it again. A datagram that cannot come back is no
/// error.
pub(super) fn restore(
    spaces: &Namespaces,
    fd: BorrowedFd<'_>,
    of: &InetSocket,
    messages: &[SocketMessage],
    waited: &mut u32,
) -> Result<()> {
    let wanted = &of.options;
    options::raise_buffers(fd);
    // Packets of the host to itself do not come from any other device.
    if wanted.device.is_some() {
        socket::set(fd, Opt::BINDTODEVICE, b"\0").context(|| "SO_BINDTODEVICE".to_owned())?;
    }
    let put = messages.iter().take_while(|message| match put(spaces, fd, of, message, waited) {
        Ok(()) => true,
        Err(e) => {
            tracing::debug!("socket {}: {e}", of.file);
            false
        }
    });
    let lost = messages.len() - put.count();
    if lost > 0 {
        tracing::warn!("socket {}: {lost} datagrams that were not read yet are lost", of.file);
    }
    options::restore_device(fd, wanted)
}

fn put(
    spaces: &Namespaces,
    fd: BorrowedFd<'_>,
    of: &InetSocket,
    message: &SocketMessage,
    waited: &mut u32,
) -> Result<()> {
    let Some((from, to)) = route(&message.address, of.ends.local.into()) else {
        return Err(bad_entry(of.file, "the sender of a datagram cannot be imitated"));
    };
    let before = occupied(fd)?;
    let datagram = Datagram { from, to, data: &message.data };
    spaces.in_netns(netns_of(spaces, of.kind.network()), || datagram.send())?;
    await_arrival(fd, before, &datagram, waited)
}

/// Where a datagram comes from and goes to.
fn route(sender: &[u8], local: Address) -> Option<(Address, Address)> {
    let from = Address::parse(sender).filter(|from| !from.is_link_local())?;
    let loopback = |family, words| Address { family, words, port: local.port, scope: 0 };
    match from.as_v4() {
        Some(from) if local.is_unspecified() => {
            let word = u32::from_ne_bytes([127, 0, 0, 1]);
            Some((from, loopback(libc::AF_INET, [word, 0, 0, 0])))
        }
        Some(from) => Some((from, local.as_v4()?)),
        None if local.is_unspecified() && local.is_v6() => {
            Some((from, loopback(libc::AF_INET6, [0, 0, 0, 1u32.to_be()])))
        }
        None => local.is_v6().then_some((from, local)),
    }
}

/// Bytes of memory that the receive queue of a socket occupies.
fn occupied(fd: BorrowedFd<'_>) -> Result<u32> {
    let mut memory = [0; 4];
    socket::get(fd, Opt::MEMINFO, &mut memory).context(|| "SO_MEMINFO".to_owned())?;
    Ok(u32::from_ne_bytes(memory))
}

/// Packets over the loopback device arrive at once, as a rule. All sockets together are not waited for without end: images
/// could have any number of them of which others get the datagrams.
fn await_arrival(
    fd: BorrowedFd<'_>,
    before: u32,
    datagram: &Datagram<'_>,
    waited: &mut u32,
) -> Result<()> {
    for _ in 0..=ATTEMPTS {
        if occupied(fd)? > before {
            return Ok(());
        }
        if *waited == IN_ALL {
            break;
        }
        *waited += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    let error: std::io::Error = std::io::ErrorKind::TimedOut.into();
    Err(error).context(|| format!("datagram from {} to {}", datagram.from, datagram.to))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn datagrams_of_all_sockets_are_waited_for_together() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = Address::unspecified(libc::AF_INET);
        let datagram = Datagram { from: address, to: address, data: b"" };
        let mut waited = IN_ALL - 3;
        for _ in 0..2 {
            await_arrival(socket.as_fd(), 0, &datagram, &mut waited).unwrap_err();
            assert_eq!(waited, IN_ALL);
        }
    }

    #[test]
    fn datagrams_are_sent_to_where_the_socket_is() {
        let v4 = |ip: [u8; 4], port| Address {
            words: [u32::from_ne_bytes(ip), 0, 0, 0],
            port,
            ..Address::unspecified(libc::AF_INET)
        };
        let any = |family| Address { port: 53, ..Address::unspecified(family) };
        let shown = |sender: Address, local| {
            route(&sender.to_bytes(), local).map(|(from, to)| format!("{from} {to}"))
        };
        let peer = v4([10, 0, 0, 9], 7);
        let to_any = Some("10.0.0.9:7 127.0.0.1:53".to_owned());
        assert_eq!(shown(peer, any(libc::AF_INET)), to_any);
        let bound = v4([10, 0, 0, 1], 53);
        assert_eq!(shown(peer, bound), Some("10.0.0.9:7 10.0.0.1:53".to_owned()));
        let mapped = [0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xff]), peer.words[0]];
        let mapped = Address { family: libc::AF_INET6, words: mapped, ..peer };
        assert_eq!(shown(mapped, any(libc::AF_INET6)), to_any);
        let six = Address { family: libc::AF_INET6, words: [1, 0, 0, 2], ..peer };
        assert_eq!(shown(six, any(libc::AF_INET6)).unwrap().split(' ').nth(1), Some("[::1]:53"));
        assert_eq!(shown(six, bound), None);
        let local_link = [0xfe80_0000u32.to_be(), 0, 0, 1u32.to_be()];
        assert_eq!(shown(Address { words: local_link, ..six }, any(libc::AF_INET6)), None);
    }
}
