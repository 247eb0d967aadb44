//! Options of IP and TCP that an Internet socket has for itself.

use std::os::fd::BorrowedFd;

use libc::{IP_CHECKSUM, IP_NODEFRAG, IPV6_FREEBIND};
use torpor_images::proto::{IpOptsEntry, IpOptsRawEntry, TcpOptsEntry};
use torpor_policy::{IcmpFilter, InetOptions, TcpOptions};
use torpor_sys::socket::{self, Opt};

use super::about::Socket;
use crate::error::{Context, Result};

/// Level and name of the filter of raw ICMP sockets (linux/icmp.h).
pub(super) const ICMP_FILTER: (i32, i32) = (255, 1);

/// Those of TCP.
pub(super) fn dump_tcp_options(fd: BorrowedFd<'_>) -> TcpOptsEntry {
    let int = |name| socket::get_int(fd, libc::IPPROTO_TCP, name).ok();
    TcpOptsEntry {
        cork: int(libc::TCP_CORK).is_some_and(|v| v != 0).then_some(true),
        nodelay: int(libc::TCP_NODELAY).is_some_and(|v| v != 0).then_some(true),
        keepcnt: int(libc::TCP_KEEPCNT).map(i32::cast_unsigned),
        keepidle: int(libc::TCP_KEEPIDLE).map(i32::cast_unsigned),
        keepintvl: int(libc::TCP_KEEPINTVL).map(i32::cast_unsigned),
    }
}

/// Where the two families have an option under different names.
fn by_family(family: i32, v4: (i32, i32), v6: (i32, i32)) -> (i32, i32) {
    if family == libc::AF_INET6 { v6 } else { v4 }
}

/// `IP_FREEBIND`: level and name.
pub(super) fn freebind(family: i32) -> (i32, i32) {
    by_family(family, (libc::IPPROTO_IP, libc::IP_FREEBIND), (libc::IPPROTO_IPV6, IPV6_FREEBIND))
}

fn pktinfo(family: i32) -> (i32, i32) {
    by_family(
        family,
        (libc::IPPROTO_IP, libc::IP_PKTINFO),
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    )
}

/// Those of IP.
pub(super) fn dump_ip(fd: BorrowedFd<'_>, about: &Socket) -> IpOptsEntry {
    let int = |(level, name): (i32, i32)| socket::get_int(fd, level, name).ok();
    let flag = |option| int(option).map(|v| v != 0);
    IpOptsEntry {
        freebind: flag(freebind(about.domain)).filter(|&on| on),
        pktinfo: flag(pktinfo(about.domain)).filter(|&on| on),
        tos: int((libc::IPPROTO_IP, libc::IP_TOS)).filter(|&v| v != 0).map(i32::cast_unsigned),
        ttl: int((libc::IPPROTO_IP, libc::IP_TTL)).map(i32::cast_unsigned),
        raw: (about.kind == libc::SOCK_RAW).then(|| IpOptsRawEntry {
            hdrincl: flag((libc::IPPROTO_IP, libc::IP_HDRINCL)),
            nodefrag: flag((libc::IPPROTO_IP, IP_NODEFRAG)),
            checksum: flag((libc::IPPROTO_IP, IP_CHECKSUM)),
            icmpv_filter: icmp_filter(fd, about),
        }),
    }
}

fn icmp_filter(fd: BorrowedFd<'_>, about: &Socket) -> Vec<u32> {
    match (about.domain, about.protocol) {
        (libc::AF_INET, libc::IPPROTO_ICMP) => socket::get_int(fd, ICMP_FILTER.0, ICMP_FILTER.1)
            .map(|v| vec![v.cast_unsigned()])
            .unwrap_or_default(),
        (libc::AF_INET6, libc::IPPROTO_ICMPV6) => {
            let mut value = [0; 32];
            match socket::get(fd, Opt::ICMP6_FILTER, &mut value) {
                Ok(_) => value.as_chunks().0.iter().map(|w| u32::from_ne_bytes(*w)).collect(),
                Err(_) => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

/// Sets those of IP that a new socket does not have.
pub(super) fn restore_ip(fd: BorrowedFd<'_>, family: i32, wanted: &InetOptions) -> Result<()> {
    let set = |(level, name): (i32, i32), value: Option<i32>| {
        let same = |v| socket::get_int(fd, level, name).is_ok_and(|now| now == v);
        match value.filter(|v| !same(*v)) {
            Some(value) => socket::set_int(fd, level, name, value)
                .context(|| format!("setsockopt({level}, {name}, {value})")),
            None => Ok(()),
        }
    };
    let ip = |name, value| set((libc::IPPROTO_IP, name), value);
    set(freebind(family), Some(wanted.free_bind.into()))?;
    set(pktinfo(family), wanted.packet_info.map(i32::from))?;
    ip(libc::IP_TOS, wanted.type_of_service.map(u32::cast_signed))?;
    ip(libc::IP_TTL, wanted.time_to_live.map(u32::cast_signed))?;
    ip(libc::IP_HDRINCL, wanted.header_included.map(i32::from))?;
    ip(IP_NODEFRAG, wanted.no_reassembly.map(i32::from))?;
    ip(IP_CHECKSUM, wanted.checksum.map(i32::from))?;
    match wanted.icmp {
        IcmpFilter::None => Ok(()),
        IcmpFilter::Four(word) => set(ICMP_FILTER, Some(word.cast_signed())),
        IcmpFilter::Six(words) => {
            let bytes = words.map(u32::to_ne_bytes);
            socket::set(fd, Opt::ICMP6_FILTER, bytes.as_flattened())
                .context(|| "ICMPV6_FILTER".to_owned())
        }
    }
}

/// The same of TCP.
pub(super) fn restore_tcp_options(fd: BorrowedFd<'_>, wanted: &TcpOptions) -> Result<()> {
    let values = [
        (libc::TCP_KEEPCNT, wanted.keep_count),
        (libc::TCP_KEEPIDLE, wanted.keep_idle),
        (libc::TCP_KEEPINTVL, wanted.keep_interval),
        (libc::TCP_NODELAY, wanted.no_delay.map(u32::from)),
        (libc::TCP_CORK, wanted.cork.map(u32::from)),
    ];
    for (name, value) in values {
        let Some(value) = value.map(u32::cast_signed) else { continue };
        if socket::get_int(fd, libc::IPPROTO_TCP, name).is_ok_and(|now| now == value) {
            continue;
        }
        socket::set_int(fd, libc::IPPROTO_TCP, name, value)
            .context(|| format!("setsockopt(TCP, {name}, {value})"))?;
    }
    Ok(())
}
