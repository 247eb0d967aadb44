//! Internet addresses as the kernel and the images have them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

use rustix::net::netdevice;
use torpor_policy::InetAddress;

use crate::error::{Context, Result};

/// An IPv4 or IPv6 address with its port (or protocol, for raw sockets).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    /// `AF_INET` or `AF_INET6`.
    pub family: i32,
    /// In network byte order, as the kernel and the images keep it; one word for IPv4.
    pub words: [u32; 4],
    /// In host byte order.
    pub port: u16,
    /// Index of the device that a link-local address belongs to.
    pub scope: u32,
}

impl Address {
    /// The family's "any" address without a port.
    pub(crate) fn unspecified(family: i32) -> Self {
        Address { family, words: [0; 4], port: 0, scope: 0 }
    }

    /// From a `struct sockaddr_in` or `sockaddr_in6`.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let family = i32::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
        match family {
            libc::AF_INET => Some(Address { family, words: [word(4)?, 0, 0, 0], port, scope: 0 }),
            libc::AF_INET6 => Some(Address {
                family,
                words: [word(8)?, word(12)?, word(16)?, word(20)?],
                port,
                scope: word(24)?,
            }),
            _ => None,
        }
    }

    /// For an image.
    pub(crate) fn to_image(self) -> Vec<u32> {
        self.words.iter().copied().take(if self.is_v6() { 4 } else { 1 }).collect()
    }

    /// As `struct sockaddr_in` or `sockaddr_in6`.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(28);
        bytes.extend(u16::try_from(self.family).unwrap_or(0).to_ne_bytes());
        bytes.extend(self.port.to_be_bytes());
        if self.is_v6() {
            bytes.extend([0; 4]);
            bytes.extend(self.words.iter().flat_map(|w| w.to_ne_bytes()));
            bytes.extend(self.scope.to_ne_bytes());
        } else {
            bytes.extend(self.words[0].to_ne_bytes());
            bytes.extend([0; 8]);
        }
        bytes
    }

    /// Whether it is an IPv6 address.
    pub(crate) fn is_v6(self) -> bool {
        self.family == libc::AF_INET6
    }

    /// Whether it is the "any" address.
    pub(crate) fn is_unspecified(self) -> bool {
        self.words == [0; 4]
    }

    /// Whether it is of the loopback device, which each network namespace has.
    pub(crate) fn is_loopback(self) -> bool {
        let one = [0, 0, 0, 1_u32.to_be()];
        if self.is_v6() { self.words == one } else { self.words[0].to_ne_bytes()[0] == 127 }
    }

    /// Whether it means something on one device only.
    pub(crate) fn is_link_local(self) -> bool {
        let [a, b, ..] = self.words[0].to_ne_bytes();
        self.is_v6() && (a, b & 0xc0) == (0xfe, 0x80)
            || self.is_v6() && a == 0xff && matches!(b & 0x0f, 1 | 2)
    }

    /// The IPv4 address in an IPv4-mapped IPv6 address; itself if it is IPv4 already.
    pub(crate) fn as_v4(self) -> Option<Self> {
        let mapped = [0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xff])];
        match self.words {
            _ if !self.is_v6() => Some(self),
            [a, b, c, v4] if [a, b, c] == mapped => Some(Address {
                family: libc::AF_INET,
                words: [v4, 0, 0, 0],
                port: self.port,
                scope: 0,
            }),
            _ => None,
        }
    }

    /// The name of the device that it belongs to, in the socket's namespace.
    pub(crate) fn device(self, socket: BorrowedFd<'_>) -> Option<String> {
        (self.scope != 0).then(|| netdevice::index_to_name(socket, self.scope).ok()).flatten()
    }

    /// The same address on the device `name` of the socket's namespace.
    ///
    /// # Errors
    /// `ENODEV` if the namespace has no device of that number.
    pub(crate) fn on_device(mut self, socket: BorrowedFd<'_>, name: Option<&str>) -> Result<Self> {
        if let Some(name) = name.filter(|n| !n.is_empty() && self.is_link_local()) {
            self.scope = netdevice::name_to_index(socket, name)
                .context(|| format!("network device {name}"))?;
        }
        Ok(self)
    }
}

impl From<InetAddress> for Address {
    fn from(InetAddress { family, words, port }: InetAddress) -> Self {
        Address { family, words, port, scope: 0 }
    }
}

impl Address {
    /// Without the port.
    pub(crate) fn ip(self) -> IpAddr {
        let mut octets = [0u8; 16];
        for (to, word) in octets.chunks_exact_mut(4).zip(self.words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        let [a, b, c, d, ..] = octets;
        if self.is_v6() { Ipv6Addr::from(octets).into() } else { Ipv4Addr::new(a, b, c, d).into() }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::net::SocketAddr::new(self.ip(), self.port).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive() {
        let v4 = [2, 0, 0x1f, 0x90, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let a = Address::parse(&v4).unwrap();
        assert_eq!(a.to_string(), "127.0.0.1:8080");
        assert_eq!(a.to_bytes(), v4);

        let mut v6 = vec![10, 0, 0, 80, 0, 0, 0, 0, 0xfe, 0x80];
        v6.resize(23, 0);
        v6.extend([1, 3, 0, 0, 0]);
        let a = Address::parse(&v6).unwrap();
        assert_eq!(a.to_string(), "[fe80::1]:80");
        assert!(a.is_link_local());
        assert_eq!(a.scope, 3);
        assert_eq!(a.to_bytes(), v6);
        assert_eq!(Address::parse(&v6[..20]), None);
    }

    #[test]
    fn mapped_addresses_are_known() {
        let words = [0, 0, 0xffff_0000, 0x0100_007f];
        let mapped = Address { words, port: 7, ..Address::unspecified(libc::AF_INET6) };
        assert_eq!(mapped.as_v4().unwrap().to_string(), "127.0.0.1:7");
        assert!(Address::unspecified(libc::AF_INET6).as_v4().is_none());
    }
}
