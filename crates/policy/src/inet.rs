//! Internet sockets: the addresses of their two ends, read of an entry once, judged, and bound and
//! connected.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use torpor_images::proto::InetSkEntry;

const INET: u32 = libc::AF_INET.cast_unsigned();
const INET6: u32 = libc::AF_INET6.cast_unsigned();
/// Types of sockets, and the protocols of pings.
const DATAGRAM: u32 = libc::SOCK_DGRAM.cast_unsigned();
const RAW: u32 = libc::SOCK_RAW.cast_unsigned();
const ICMP: [u32; 2] = [libc::IPPROTO_ICMP.cast_unsigned(), libc::IPPROTO_ICMPV6.cast_unsigned()];

/// An address with a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InetAddress {
    /// `AF_INET` or `AF_INET6`.
    pub family: i32,
    /// In network byte order; one word for IPv4.
    pub words: [u32; 4],
    /// The port; of a raw socket its protocol, of one for pings a number that anybody may choose.
    pub port: u16,
}

/// What an Internet socket is bound and connected to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InetEnds {
    /// What it is bound to: not at all, if neither address nor port are said.
    pub local: InetAddress,
    /// Its peer, if its state says that it has one.
    pub remote: InetAddress,
    /// The name of the device that link-local addresses belong to.
    pub device: Option<String>,
    is_ping: bool,
    is_raw: bool,
}

impl InetEnds {
    /// Those of a socket.
    ///
    /// # Errors
    /// An address that there cannot be.
    pub fn read(entry: &InetSkEntry) -> Result<Self, String> {
        let local = address(entry.family, &entry.src_addr, entry.src_port);
        let remote = match *entry.dst_addr {
            [] => unspecified(entry.family),
            ref words => address(entry.family, words, entry.dst_port),
        };
        let ends = local.zip(remote);
        let (local, remote) =
            ends.ok_or_else(|| format!("socket {}: its address is none", entry.id))?;
        Ok(InetEnds {
            local,
            remote,
            device: entry.ifname.clone().filter(|name| !name.is_empty()),
            is_ping: entry.r#type == DATAGRAM && ICMP.contains(&entry.proto),
            is_raw: entry.r#type == RAW,
        })
    }

    /// The port that it takes from others in its network, if it takes one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        Some(self.local.port).filter(|&port| port != 0 && !self.is_raw && !self.is_ping)
    }

    /// Whether it is for pings (`SOCK_DGRAM` of ICMP and ICMPv6).
    #[must_use]
    pub fn is_ping(&self) -> bool {
        self.is_ping
    }
}

impl fmt::Display for InetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, ..] = self.words;
        let address = match self.family.cast_unsigned() {
            INET => IpAddr::from(Ipv4Addr::from(first.to_ne_bytes())),
            _ => IpAddr::from(Ipv6Addr::from(bytes(self.words))),
        };
        SocketAddr::new(address, self.port).fmt(f)
    }
}

/// The bytes of an address of IPv6, in their order.
fn bytes(words: [u32; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let parts = bytes.chunks_exact_mut(4).zip(words);
    parts.for_each(|(part, word)| part.copy_from_slice(&word.to_ne_bytes()));
    bytes
}

impl fmt::Display for InetEnds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}", self.local)?;
        if self.remote.words != [0; 4] || self.remote.port != 0 {
            write!(f, ", connected to {}", self.remote)?;
        }
        self.device.as_ref().map_or(Ok(()), |device| write!(f, " ({device})"))
    }
}

fn unspecified(family: u32) -> Option<InetAddress> {
    [INET, INET6].contains(&family).then_some(InetAddress {
        family: family.cast_signed(),
        words: [0; 4],
        port: 0,
    })
}

/// An address has as many words as its family.
fn address(family: u32, words: &[u32], port: u32) -> Option<InetAddress> {
    let port = u16::try_from(port).ok()?;
    let words = match (family, words) {
        (INET, [word]) => [*word, 0, 0, 0],
        (INET6, words) => words.try_into().ok()?,
        _ => return None,
    };
    Some(InetAddress { words, port, ..unspecified(family)? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn socket(r#type: u32, proto: u32, src_port: u32) -> InetSkEntry {
        InetSkEntry {
            family: INET,
            r#type,
            proto,
            src_port,
            src_addr: vec![0],
            ..Default::default()
        }
    }

    fn read(r#type: u32, proto: u32, src_port: u32) -> InetEnds {
        InetEnds::read(&socket(r#type, proto, src_port)).unwrap()
    }

    #[test]
    fn ports_and_pings() {
        assert_eq!(read(1, 6, 1023).port(), Some(1023));
        // UDP-Lite, MPTCP, SCTP.
        for (ty, proto) in [(2, 136), (1, 262), (1, 132), (5, 132)] {
            assert_eq!(read(ty, proto, 7).port(), Some(7));
        }
        for (ty, proto) in [(3, 1), (2, 1), (2, 58)] {
            let ends = read(ty, proto, 7);
            assert_eq!((ends.port(), ends.local.port), (None, 7));
            assert_eq!(ends.is_ping(), ty == 2);
        }
        assert_eq!(read(1, 6, 0).port(), None);
    }

    #[test]
    fn addresses_are_those_of_the_family() {
        let of = |family, src_addr: &[u32], dst_addr: &[u32], dst_port| {
            let (src_addr, dst_addr) = (src_addr.to_vec(), dst_addr.to_vec());
            let entry = InetSkEntry { family, src_addr, dst_addr, dst_port, ..socket(2, 17, 53) };
            InetEnds::read(&entry).map(|ends| (ends.local.words, ends.remote))
        };
        let remote = |family, words, port| InetAddress { family, words, port };
        assert_eq!(of(INET, &[7], &[], 9), Ok(([7, 0, 0, 0], remote(2, [0; 4], 0))));
        assert_eq!(of(INET, &[7], &[8], 9), Ok(([7, 0, 0, 0], remote(2, [8, 0, 0, 0], 9))));
        let six = [1, 2, 3, 4];
        assert_eq!(of(INET6, &six, &six, 65535), Ok((six, remote(10, six, 65535))));
        for (family, local, peer, port) in [
            (INET, &[][..], &[][..], 9),
            (INET, &six, &[], 9),
            (INET, &[7], &six, 9),
            (INET, &[7], &[8], 65536),
            (INET6, &[7], &[], 9),
            (17, &[7], &[], 9),
        ] {
            let error = of(family, local, peer, port).unwrap_err();
            assert!(error.contains("its address is none"), "{error}");
        }
        assert!(InetEnds::read(&socket(1, 6, 65536)).is_err());
    }
}
