//! Packets in the name of a peer.
//!
//! That a peer has closed its side, has acknowledged our closing or has reset the
//! connection cannot be set on a TCP socket, only received by it; and so it is with the
//! sender of a UDP datagram. So the restore sends the packet itself, from the peer's
//! address, through a raw socket.

use std::io::ErrorKind;
use std::os::fd::AsFd;

use torpor_kernel::netlink::{Body, ROUTE, Socket};
use torpor_sys::socket::{self, Message};

use super::address::Address;
use crate::error::{Context, Error, Result};
use crate::network::rules::MARK;

/// Flags of a TCP header.
pub(super) const FIN: u8 = 0x01;
pub(super) const RST: u8 = 0x04;
pub(super) const ACK: u8 = 0x10;

const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// A segment without data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) from: Address,
    pub(super) to: Address,
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
}

impl Segment {
    /// Sends it to a socket in the network namespace of this thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_RAW`.
    pub(super) fn send(&self) -> Result<()> {
        send(self.from, self.to, &self.to_packet())
    }

    fn to_packet(self) -> Vec<u8> {
        packet(self.from, self.to, libc::IPPROTO_TCP, &self.header())
    }

    fn header(&self) -> [u8; TCP_HEADER] {
        let mut header = [0; TCP_HEADER];
        header[0..2].copy_from_slice(&self.from.port.to_be_bytes());
        header[2..4].copy_from_slice(&self.to.port.to_be_bytes());
        header[4..8].copy_from_slice(&self.seq.to_be_bytes());
        header[8..12].copy_from_slice(&self.ack.to_be_bytes());
        header[12] = 5 << 4;
        header[13] = self.flags;
        // The window; the real one is set by TCP_REPAIR_WINDOW afterwards.
        header[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        let sum = checksum(self.from, self.to, libc::IPPROTO_TCP, &header);
        header[16..18].copy_from_slice(&sum.to_be_bytes());
        header
    }
}

/// A datagram of UDP.
#[derive(Debug, Clone, Copy)]
pub(super) struct Datagram<'a> {
    pub(super) from: Address,
    pub(super) to: Address,
    pub(super) data: &'a [u8],
}

impl Datagram<'_> {
    /// Sends it to a socket in the network namespace of this thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_RAW`; `EMSGSIZE`.
    pub(super) fn send(&self) -> Result<()> {
        send(self.from, self.to, &self.to_packet())
    }

    fn to_packet(self) -> Vec<u8> {
        let mut content = Vec::with_capacity(UDP_HEADER + self.data.len());
        let len = u16::try_from(UDP_HEADER + self.data.len()).unwrap_or(0);
        for field in [self.from.port, self.to.port, len, 0] {
            content.extend(field.to_be_bytes());
        }
        content.extend(self.data);
        // Zero would say that there is no sum.
        let sum = match checksum(self.from, self.to, libc::IPPROTO_UDP, &content) {
            0 => u16::MAX,
            sum => sum,
        };
        content[6..8].copy_from_slice(&sum.to_be_bytes());
        packet(self.from, self.to, libc::IPPROTO_UDP, &content)
    }
}

/// Sends a packet with the mark that passes locks. Both addresses are of one family.
///
/// It stays on this host: images say who the peer is, and nobody else is to hear from us in the
/// name of somebody.
fn send(from: Address, to: Address, packet: &[u8]) -> Result<()> {
    let what = || format!("packet from {from} to {to}");
    if !is_ours(to)? {
        return Err(std::io::Error::from(ErrorKind::AddrNotAvailable)).context(what);
    }
    let raw = socket::socket(to.family, libc::SOCK_RAW, libc::IPPROTO_RAW).context(what)?;
    let mark = MARK.cast_signed();
    socket::set_int(raw.as_fd(), libc::SOL_SOCKET, libc::SO_MARK, mark).context(what)?;
    let to = Address { port: 0, ..to }.to_bytes();
    let message = Message { address: Some(&to), data: packet, ..Message::default() };
    socket::send(raw.as_fd(), &message, 0).context(what).map(drop)
}

/// Whether packets to an address stay in the network namespace of this thread. That a socket can be bound to it does not
/// say so: where `net.ipv4.ip_nonlocal_bind` is set, one can be to any.
fn is_ours(address: Address) -> Result<bool> {
    // struct rtmsg: family, length of the address, length of the source; at last the kind of route.
    const KIND: usize = 7;
    let bytes = address_bytes(address);
    let family = u8::try_from(address.family).unwrap_or(0);
    let bits = u8::try_from(8 * bytes.len()).unwrap_or(0);
    let mut body = Body::new(&[family, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    body.put(libc::RTA_DST, &bytes);
    body.put_word(libc::RTA_MARK, MARK);
    if address.scope != 0 {
        body.put_word(libc::RTA_OIF, address.scope);
    }
    let route = match Socket::open(ROUTE)?.get(libc::RTM_GETROUTE, &body.0).map_err(Error::from) {
        // None leads there.
        Err(Error::Os { .. }) => None,
        found => found?,
    };
    Ok(route.is_some_and(|route| route.body().get(KIND) == Some(&libc::RTN_LOCAL)))
}

/// An IP packet that does not get farther than the next host, in case that the address is
/// not one of this one.
fn packet(from: Address, to: Address, protocol: i32, content: &[u8]) -> Vec<u8> {
    const HOPS: u8 = 1;
    let protocol = u8::try_from(protocol).unwrap_or(0);
    let length = |all: usize| u16::try_from(all).unwrap_or(0).to_be_bytes();
    let mut packet = Vec::with_capacity(40 + content.len());
    if to.is_v6() {
        // Version, payload length, next header, hop limit.
        let [high, low] = length(content.len());
        packet.extend([0x60, 0, 0, 0, high, low, protocol, HOPS]);
    } else {
        // Version and header length, total length, no fragments, time to live,
        // protocol; the kernel adds the checksum.
        let [high, low] = length(20 + content.len());
        packet.extend([0x45, 0, high, low, 0, 0, 0, 0, HOPS, protocol, 0, 0]);
    }
    packet.extend(address_bytes(from));
    packet.extend(address_bytes(to));
    packet.extend(content);
    packet
}

/// RFC 9293, section 3.1: over addresses, protocol, length and content.
fn checksum(from: Address, to: Address, protocol: i32, content: &[u8]) -> u16 {
    let mut covered = address_bytes(from);
    covered.extend(address_bytes(to));
    covered.extend(u16::try_from(protocol).unwrap_or(0).to_be_bytes());
    covered.extend(u16::try_from(content.len()).unwrap_or(0).to_be_bytes());
    covered.extend(content);
    // Filled up to whole words.
    covered.resize(covered.len().next_multiple_of(2), 0);
    let words = covered.as_chunks::<2>().0.iter();
    let mut sum: u32 = words.map(|w| u32::from(u16::from_be_bytes(*w))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

fn address_bytes(address: Address) -> Vec<u8> {
    address.to_image().iter().flat_map(|w| w.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{command, in_netns};
    use super::*;

    fn address(last: u8, port: u16) -> Address {
        Address {
            words: [u32::from_ne_bytes([10, 0, 0, last]), 0, 0, 0],
            port,
            ..Address::unspecified(libc::AF_INET)
        }
    }

    #[test]
    fn a_segment_is_laid_out_as_the_standard_says() {
        let (from, to) = (address(1, 80), address(2, 4660));
        let packet = Segment { from, to, seq: 1, ack: 2, flags: FIN | ACK }.to_packet();
        let mut expected = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 1, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        expected.extend([0, 80, 0x12, 0x34, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x11, 0xff, 0xff]);
        // The sum of all 16-bit words and this one is ffff.
        expected.extend([0x89, 0x4a, 0, 0]);
        assert_eq!(packet, expected);
    }

    #[test]
    fn packets_stay_on_this_host() {
        in_netns(|| {
            command("ip", &["link", "set", "lo", "up"]);
            command("ip", &["addr", "add", "10.0.0.2/32", "dev", "lo"]);
            command("ip", &["route", "add", "default", "dev", "lo"]);
            // Whoever is there or not: sockets can be bound to any address.
            std::fs::write("/proc/sys/net/ipv4/ip_nonlocal_bind", "1").unwrap();
            let send = |to| Datagram { from: address(1, 80), to, data: b"abc" }.send();
            send(address(2, 53)).unwrap();
            let group =
                Address { words: [u32::from_ne_bytes([224, 0, 0, 1]), 0, 0, 0], ..address(0, 53) };
            for others in [address(3, 53), group] {
                let error = send(others).unwrap_err().to_string();
                assert!(error.contains("packet from 10.0.0.1:80 to "), "{error}");
            }
        });
    }

    #[test]
    fn a_datagram_of_odd_length_is_summed_up_whole() {
        let datagram = Datagram { from: address(1, 80), to: address(2, 81), data: b"abc" };
        let packet = datagram.to_packet();
        assert_eq!(packet[..12], [0x45, 0, 0, 31, 0, 0, 0, 0, 1, 17, 0, 0]);
        assert_eq!(packet[20..26], [0, 80, 0, 81, 0, 11]);
        // 0a00 0001 0a00 0002 0011 000b 0050 0051 000b 6162 6300 and this make ffff.
        assert_eq!(packet[26..], [0x26, 0xd2, b'a', b'b', b'c']);
    }
}
