//! TCP segments in the name of a peer.
//!
//! That a peer has closed its side, has acknowledged our closing or has reset the
//! connection cannot be set on a socket, only received by it. So the restore sends the
//! segment itself, from the peer's address, through a raw socket.

use std::os::fd::AsFd;

use torpor_sys::socket::{self, Message};

use super::address::Address;
use crate::error::{Context, Result};
use crate::network::rules::MARK;

/// Flags of a TCP header.
pub(super) const FIN: u8 = 0x01;
pub(super) const RST: u8 = 0x04;
pub(super) const ACK: u8 = 0x10;

const TCP_HEADER: usize = 20;

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
    /// Sends it to a socket in the network namespace of this thread. Both addresses are of
    /// one family. It carries the mark that passes locks.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_RAW`.
    pub(super) fn send(&self) -> Result<()> {
        let what = || format!("segment from {} to {}", self.from, self.to);
        let raw =
            socket::socket(self.to.family, libc::SOCK_RAW, libc::IPPROTO_RAW).context(what)?;
        let mark = MARK.cast_signed();
        socket::set_int(raw.as_fd(), libc::SOL_SOCKET, libc::SO_MARK, mark).context(what)?;
        let to = Address { port: 0, ..self.to }.to_bytes();
        let packet = self.to_packet();
        let message = Message { address: Some(&to), data: &packet, ..Message::default() };
        socket::send(raw.as_fd(), &message, 0).context(what).map(drop)
    }

    fn to_packet(self) -> Vec<u8> {
        let tcp = self.tcp_header();
        let mut packet = Vec::with_capacity(60);
        if self.to.is_v6() {
            // Version, payload length, next header, hop limit.
            packet.extend([0x60, 0, 0, 0, 0, 20, 6, 64]);
        } else {
            // Version and header length, total length, no fragments, time to live,
            // protocol; the kernel adds the checksum.
            packet.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
        }
        packet.extend(address_bytes(self.from));
        packet.extend(address_bytes(self.to));
        packet.extend(tcp);
        packet
    }

    fn tcp_header(&self) -> [u8; TCP_HEADER] {
        let mut header = [0; TCP_HEADER];
        header[0..2].copy_from_slice(&self.from.port.to_be_bytes());
        header[2..4].copy_from_slice(&self.to.port.to_be_bytes());
        header[4..8].copy_from_slice(&self.seq.to_be_bytes());
        header[8..12].copy_from_slice(&self.ack.to_be_bytes());
        header[12] = 5 << 4;
        header[13] = self.flags;
        // The window; the real one is set by TCP_REPAIR_WINDOW afterwards.
        header[14..16].copy_from_slice(&u16::MAX.to_be_bytes());
        let sum = self.checksum(&header);
        header[16..18].copy_from_slice(&sum.to_be_bytes());
        header
    }

    /// RFC 9293, section 3.1: over addresses, protocol, length and header.
    fn checksum(&self, header: &[u8; TCP_HEADER]) -> u16 {
        let mut covered = address_bytes(self.from);
        covered.extend(address_bytes(self.to));
        covered.extend([0, 6, 0, 20]);
        covered.extend(header);
        let sum = covered.as_chunks::<2>().0.iter().map(|w| u32::from(u16::from_be_bytes(*w)));
        let mut sum: u32 = sum.sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap_or(0)
    }
}

fn address_bytes(address: Address) -> Vec<u8> {
    address.to_image().iter().flat_map(|w| w.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_laid_out_as_the_standard_says() {
        let address = |last, port| Address {
            words: [u32::from_ne_bytes([10, 0, 0, last]), 0, 0, 0],
            port,
            ..Address::unspecified(libc::AF_INET)
        };
        let (from, to) = (address(1, 80), address(2, 4660));
        let packet = Segment { from, to, seq: 1, ack: 2, flags: FIN | ACK }.to_packet();
        let mut expected = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        expected.extend([0, 80, 0x12, 0x34, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x11, 0xff, 0xff]);
        // The sum of all 16-bit words and this one is ffff.
        expected.extend([0x89, 0x4a, 0, 0]);
        assert_eq!(packet, expected);
    }
}
