//! Options that sockets of all families have (socket(7)), and a table of those for
//! which CRIU's images have no field.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Gid, Uid};
use torpor_images::proto::{SkOption, SkOptsEntry};
use torpor_policy::SocketOptions;
use torpor_sys::socket::{self, Instruction, Opt};

use super::about::Socket;
use crate::error::{Context, Error, Result};
use crate::file::Found;
use crate::namespace::user::IdMaps;

/// Options, each an `int`, that CRIU's images do not hold: level and name. They are
/// kept, in fields of our own, where they differ from those of a new socket, and
/// restored before the socket is bound. A number from an image that is not in this
/// table is refused.
const MORE: &[(i32, &[i32])] = &[
    (
        libc::SOL_SOCKET,
        &[
            libc::SO_DEBUG,
            29, // SO_TIMESTAMP_OLD
            35, // SO_TIMESTAMPNS_OLD
            37, // SO_TIMESTAMPING_OLD
            63, // SO_TIMESTAMP_NEW
            libc::SO_TIMESTAMPNS_NEW,
            libc::SO_TIMESTAMPING_NEW,
            libc::SO_RXQ_OVFL,
            libc::SO_WIFI_STATUS,
            libc::SO_PEEK_OFF,
            libc::SO_NOFCS,
            libc::SO_SELECT_ERR_QUEUE,
            libc::SO_BUSY_POLL,
            libc::SO_MAX_PACING_RATE,
            libc::SO_ZEROCOPY,
            libc::SO_PREFER_BUSY_POLL,
            libc::SO_BUSY_POLL_BUDGET,
            libc::SO_TXREHASH,
            libc::SO_RCVMARK,
            libc::SO_PASSPIDFD,
            82, // SO_RCVPRIORITY
            83, // SO_PASSRIGHTS
            84, // SO_INQ
        ],
    ),
    (
        libc::IPPROTO_IP,
        &[
            libc::IP_RECVOPTS,
            libc::IP_RETOPTS,
            libc::IP_MTU_DISCOVER,
            libc::IP_RECVERR,
            libc::IP_RECVTTL,
            libc::IP_RECVTOS,
            libc::IP_PASSSEC,
            libc::IP_TRANSPARENT,
            libc::IP_RECVORIGDSTADDR,
            libc::IP_MINTTL,
            libc::IP_BIND_ADDRESS_NO_PORT,
            libc::IP_RECVFRAGSIZE,
            26, // IP_RECVERR_RFC4884
            libc::IP_MULTICAST_TTL,
            libc::IP_MULTICAST_LOOP,
            libc::IP_MULTICAST_ALL,
            libc::IP_UNICAST_IF,
            51, // IP_LOCAL_PORT_RANGE
        ],
    ),
    (
        libc::IPPROTO_IPV6,
        &[
            libc::IPV6_CHECKSUM,
            libc::IPV6_UNICAST_HOPS,
            libc::IPV6_MULTICAST_IF,
            libc::IPV6_MULTICAST_HOPS,
            libc::IPV6_MULTICAST_LOOP,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_RECVERR,
            libc::IPV6_MULTICAST_ALL,
            libc::IPV6_ROUTER_ALERT_ISOLATE,
            31, // IPV6_RECVERR_RFC4884
            libc::IPV6_FLOWINFO_SEND,
            libc::IPV6_HDRINCL,
            libc::IPV6_RECVHOPLIMIT,
            libc::IPV6_RECVHOPOPTS,
            libc::IPV6_RECVRTHDR,
            libc::IPV6_RECVDSTOPTS,
            libc::IPV6_RECVPATHMTU,
            libc::IPV6_DONTFRAG,
            libc::IPV6_RECVTCLASS,
            libc::IPV6_TCLASS,
            libc::IPV6_AUTOFLOWLABEL,
            libc::IPV6_ADDR_PREFERENCES,
            libc::IPV6_MINHOPCOUNT,
            libc::IPV6_ORIGDSTADDR,
            libc::IPV6_TRANSPARENT,
            libc::IPV6_UNICAST_IF,
            libc::IPV6_RECVFRAGSIZE,
        ],
    ),
    (
        libc::IPPROTO_TCP,
        &[
            libc::TCP_SYNCNT,
            libc::TCP_LINGER2,
            libc::TCP_DEFER_ACCEPT,
            libc::TCP_THIN_LINEAR_TIMEOUTS,
            libc::TCP_THIN_DUPACK,
            libc::TCP_USER_TIMEOUT,
            libc::TCP_FASTOPEN,
            libc::TCP_NOTSENT_LOWAT,
            libc::TCP_SAVE_SYN,
            libc::TCP_FASTOPEN_CONNECT,
            libc::TCP_FASTOPEN_NO_COOKIE,
            libc::TCP_INQ,
            37, // TCP_TX_DELAY
            44, // TCP_RTO_MAX_MS
        ],
    ),
    (
        libc::IPPROTO_UDP,
        &[
            libc::UDP_CORK,
            libc::UDP_ENCAP,
            libc::UDP_NO_CHECK6_TX,
            libc::UDP_NO_CHECK6_RX,
            libc::UDP_SEGMENT,
            libc::UDP_GRO,
        ],
    ),
    (
        libc::IPPROTO_UDPLITE,
        &[
            10, // UDPLITE_SEND_CSCOV
            11, // UDPLITE_RECV_CSCOV
        ],
    ),
    (
        libc::SOL_NETLINK,
        &[
            libc::NETLINK_PKTINFO,
            libc::NETLINK_BROADCAST_ERROR,
            libc::NETLINK_NO_ENOBUFS,
            libc::NETLINK_LISTEN_ALL_NSID,
            libc::NETLINK_CAP_ACK,
            libc::NETLINK_EXT_ACK,
            12, // NETLINK_GET_STRICT_CHK
        ],
    ),
    (
        libc::SOL_PACKET,
        &[
            libc::PACKET_TX_HAS_OFF,
            libc::PACKET_QDISC_BYPASS,
            libc::PACKET_IGNORE_OUTGOING,
            libc::PACKET_VNET_HDR_SZ,
        ],
    ),
];

/// The name of a congestion control algorithm: the one of these options that is no `int`.
const CONGESTION: (i32, i32) = (libc::IPPROTO_TCP, libc::TCP_CONGESTION);

/// Streams show these options, but have nothing to do with them and refuse them.
const NOT_OF_STREAMS: &[(i32, i32)] = &[
    (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL),
    (libc::IPPROTO_IP, libc::IP_UNICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS),
];

/// Cannot be removed once it is set, so it comes last.
pub(crate) const LOCK_FILTER: (i32, i32) = (libc::SOL_SOCKET, 44);

/// Values of options, by level and name.
type Values = HashMap<(i32, i32), Vec<u8>>;

/// What [`MORE`] says of new sockets, by domain, type and protocol.
#[derive(Debug, Default)]
pub(super) struct Defaults(HashMap<(i32, i32, i32), Values>);

impl Defaults {
    /// A socket that the caller may not make has no defaults: all its options are kept.
    fn of(&mut self, socket: &Socket) -> &Values {
        let key = (socket.domain, socket.kind, socket.protocol);
        self.0.entry(key).or_insert_with(|| {
            socket::socket(key.0, key.1, key.2).map_or_else(|_| Values::new(), |s| more(s.as_fd()))
        })
    }
}

/// The options of [`MORE`] that a socket has.
fn more(socket: BorrowedFd<'_>) -> Values {
    let all = MORE.iter().flat_map(|(level, names)| names.iter().map(|name| (*level, *name)));
    let stream = socket::get_int(socket, libc::SOL_SOCKET, libc::SO_TYPE)
        .is_ok_and(|kind| kind == libc::SOCK_STREAM);
    let mut values: Values = all
        .filter(|key| !(stream && NOT_OF_STREAMS.contains(key)))
        .filter_map(|key| {
            let value = socket::get_int(socket, key.0, key.1).ok()?;
            Some((key, value.to_le_bytes().to_vec()))
        })
        .collect();
    let mut name = [0; 16];
    if let Ok(len) = socket::get(socket, Opt::TCP_CONGESTION, &mut name) {
        values.insert(CONGESTION, name.into_iter().take(len).take_while(|b| *b != 0).collect());
    }
    values
}

/// Describes the options of a socket.
///
/// # Errors
/// Refused for a filter that is an eBPF program; getsockopt(2).
pub(super) fn dump(
    id_maps: &IdMaps,
    found: &Found,
    about: &Socket,
    defaults: &mut Defaults,
) -> Result<SkOptsEntry> {
    let fd = found.file.as_fd();
    let int = |name: i32| {
        socket::get_int(fd, libc::SOL_SOCKET, name)
            .map(i32::cast_unsigned)
            .context(|| format!("getsockopt({name}) of {}", found.link.display()))
    };
    // A family may lack an option.
    let flag = |name: i32| int(name).ok().map(|v| v != 0);
    let (snd_sec, snd_usec) = timeout(fd, Opt::SNDTIMEO)?;
    let (rcv_sec, rcv_usec) = timeout(fd, Opt::RCVTIMEO)?;
    Ok(SkOptsEntry {
        so_sndbuf: int(libc::SO_SNDBUF)?,
        so_rcvbuf: int(libc::SO_RCVBUF)?,
        so_snd_tmo_sec: snd_sec,
        so_snd_tmo_usec: snd_usec,
        so_rcv_tmo_sec: rcv_sec,
        so_rcv_tmo_usec: rcv_usec,
        reuseaddr: flag(libc::SO_REUSEADDR),
        so_priority: int(libc::SO_PRIORITY).ok(),
        so_rcvlowat: int(libc::SO_RCVLOWAT).ok(),
        so_mark: int(libc::SO_MARK).ok().filter(|&mark| mark != 0),
        so_passcred: flag(libc::SO_PASSCRED),
        so_passsec: flag(libc::SO_PASSSEC),
        so_dontroute: flag(libc::SO_DONTROUTE),
        so_no_check: flag(libc::SO_NO_CHECK),
        so_bound_dev: bound_device(fd),
        so_filter: filter(found)?,
        so_reuseport: flag(libc::SO_REUSEPORT),
        so_broadcast: flag(libc::SO_BROADCAST),
        so_keepalive: flag(libc::SO_KEEPALIVE),
        so_oobinline: flag(libc::SO_OOBINLINE).map(u32::from),
        so_linger: linger(fd),
        so_buf_lock: int(libc::SO_BUF_LOCK).ok(),
        torpor_uid: id_maps.uid_inside(found.stat.st_uid),
        torpor_gid: id_maps.gid_inside(found.stat.st_gid),
        torpor_options: changed(fd, defaults.of(about)),
        ..SkOptsEntry::default()
    })
}

/// Leaves out by which clock the packets of a socket are sent at times of their own.
///
/// # Errors
/// The refusal, if everything is wanted (`strict`).
pub(super) fn leave_out_times(strict: bool, found: &Found) -> Result<()> {
    // struct sock_txtime
    let mut clock = [0; 8];
    match socket::get(found.file.as_fd(), Opt::TXTIME, &mut clock) {
        Ok(_) if clock != [0; 8] => {
            found.leave_out(strict, "when its packets are to be sent (SO_TXTIME) is not kept")
        }
        _ => Ok(()),
    }
}

fn changed(fd: BorrowedFd<'_>, defaults: &Values) -> Vec<SkOption> {
    let option = |(level, name): (i32, i32), value| SkOption {
        level: level.cast_unsigned(),
        name: name.cast_unsigned(),
        value,
    };
    let mut out: Vec<SkOption> = more(fd)
        .into_iter()
        .filter(|(key, value)| defaults.get(key) != Some(value))
        .map(|(key, value)| option(key, value))
        .collect();
    out.sort_by_key(|o| (o.level, o.name));
    if socket::get_int(fd, LOCK_FILTER.0, LOCK_FILTER.1).is_ok_and(|v| v != 0) {
        out.push(option(LOCK_FILTER, vec![1, 0, 0, 0]));
    }
    out
}

/// Seconds and microseconds of a `struct timeval`.
fn timeout(fd: BorrowedFd<'_>, opt: Opt) -> Result<(u64, u64)> {
    let mut value = [0; 16];
    socket::get(fd, opt, &mut value).context(|| "getsockopt of a timeout".to_owned())?;
    let (words, _) = value.as_chunks::<8>();
    let word = |i: usize| words.get(i).map_or(0, |w| u64::from_ne_bytes(*w));
    Ok((word(0), word(1)))
}

fn linger(fd: BorrowedFd<'_>) -> Option<u32> {
    let mut value = [0; 8];
    socket::get(fd, Opt::LINGER, &mut value).ok()?;
    let (words, _) = value.as_chunks::<4>();
    let [on, seconds] = words else { return None };
    (u32::from_ne_bytes(*on) != 0).then_some(u32::from_ne_bytes(*seconds))
}

fn bound_device(fd: BorrowedFd<'_>) -> Option<String> {
    let mut name = [0; 16];
    let len = socket::get(fd, Opt::BINDTODEVICE, &mut name).ok()?;
    let name = name.get(..len)?.split(|b| *b == 0).next().filter(|n| !n.is_empty())?;
    Some(String::from_utf8_lossy(name).into_owned())
}

fn filter(found: &Found) -> Result<Vec<u64>> {
    match socket::filter(found.file.as_fd()) {
        Ok(program) => Ok(program.into_iter().map(pack).collect()),
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
            Err(found.refuse("an eBPF program is attached to it, which cannot be read back"))
        }
        // Not every family has filters.
        Err(_) => Ok(Vec::new()),
    }
}

/// An instruction as the images have it.
fn pack(i: Instruction) -> u64 {
    u64::from(i.code) << 48 | u64::from(i.jt) << 40 | u64::from(i.jf) << 32 | u64::from(i.k)
}

fn unpack(word: u64) -> Instruction {
    let [.., c1, c0, jt, jf, k3, k2, k1, k0] = word.to_be_bytes();
    Instruction {
        code: u16::from_be_bytes([c1, c0]),
        jt,
        jf,
        k: u32::from_be_bytes([k3, k2, k1, k0]),
    }
}

/// A filter that lets packets with this word, in network byte order, at this place come: an offset of classic BPF
/// (linux/filter.h), be it of what the kernel knows of a packet.
pub(super) fn only_with(place: u32, word: u32) -> [Instruction; 4] {
    let i = |code, jt, jf, k| Instruction { code, jt, jf, k };
    [i(0x20, 0, 0, place), i(0x15, 0, 1, word), i(0x06, 0, 0, u32::MAX), i(0x06, 0, 0, 0)]
}

/// The filter of a socket; empty for none.
pub(crate) fn filter_of(wanted: &SocketOptions) -> Vec<Instruction> {
    wanted.filter.iter().map(|word| unpack(*word)).collect()
}

/// Whether the filter of a socket, or that there is none, cannot be changed any more.
pub(crate) fn keeps_filter(wanted: &SocketOptions) -> bool {
    wanted.more.iter().any(|option| (option.level, option.name) == LOCK_FILTER)
}

/// Gives a new socket those options of [`MORE`] that the images have: before it is
/// bound or connected.
///
/// # Errors
/// If one is not in the table, or the kernel does not know it.
pub(super) fn restore_more(fd: BorrowedFd<'_>, wanted: &SocketOptions) -> Result<()> {
    for option in &wanted.more {
        let key = (option.level, option.name);
        if key == LOCK_FILTER {
            continue;
        }
        if key == CONGESTION {
            let name = || String::from_utf8_lossy(&option.value).into_owned();
            socket::set(fd, Opt::TCP_CONGESTION, &option.value)
                .context(|| format!("congestion control {}", name()))?;
            continue;
        }
        let known = MORE.iter().any(|(level, names)| *level == key.0 && names.contains(&key.1));
        let value = option.value.as_slice().try_into().map(i32::from_le_bytes);
        let (true, Ok(value)) = (known, value) else {
            let what = format!("socket option {} of level {} is not known", key.1, key.0);
            return Err(Error::invalid("files.img", what));
        };
        // What a new socket has already may not be settable in its family.
        if socket::get_int(fd, key.0, key.1).is_ok_and(|now| now == value) {
            continue;
        }
        socket::set_int(fd, key.0, key.1, value)
            .context(|| format!("setsockopt({}, {}, {value})", key.0, key.1))?;
    }
    Ok(())
}

/// Binds a new socket to its device. It must be known before the address is.
///
/// # Errors
/// `ENODEV` if the namespace has no such device.
pub(super) fn restore_device(fd: BorrowedFd<'_>, wanted: &SocketOptions) -> Result<()> {
    let Some(name) = wanted.device.as_deref() else { return Ok(()) };
    socket::set(fd, Opt::BINDTODEVICE, name.as_bytes()).context(|| format!("bind to device {name}"))
}

/// Gives a socket its options when it is what it shall be: bound, connected, its
/// queues filled.
///
/// # Errors
/// If the kernel does not take an option: `EPERM` without the right to it (a mark, a priority above 6, a buffer beyond the
/// limit, a locked filter), `ENOPROTOOPT` where the socket's family does not have it; if its owner cannot be set.
pub(super) fn restore(id_maps: &IdMaps, fd: BorrowedFd<'_>, wanted: &SocketOptions) -> Result<()> {
    let set = |name: i32, value: u32| {
        socket::set_int(fd, libc::SOL_SOCKET, name, value.cast_signed())
            .context(|| format!("setsockopt({name}, {value})"))
    };
    restore_buffers(fd, wanted)?;
    restore_timeout(fd, Opt::SNDTIMEO, wanted.send_timeout)?;
    restore_timeout(fd, Opt::RCVTIMEO, wanted.receive_timeout)?;
    let values = [
        (libc::SO_REUSEADDR, wanted.reuse_address.map(u32::from)),
        (libc::SO_REUSEPORT, wanted.reuse_port.map(u32::from)),
        (libc::SO_PRIORITY, wanted.priority),
        (libc::SO_RCVLOWAT, wanted.receive_low_water),
        (libc::SO_MARK, wanted.mark),
        (libc::SO_PASSCRED, wanted.pass_credentials.map(u32::from)),
        (libc::SO_PASSSEC, wanted.pass_security.map(u32::from)),
        (libc::SO_DONTROUTE, wanted.do_not_route.map(u32::from)),
        (libc::SO_NO_CHECK, wanted.no_check.map(u32::from)),
        (libc::SO_BROADCAST, wanted.broadcast.map(u32::from)),
        (libc::SO_KEEPALIVE, wanted.keep_alive.map(u32::from)),
        (libc::SO_OOBINLINE, wanted.inline_urgent),
    ];
    for (name, value) in values {
        // What a new socket has already may not be settable in its family.
        let same = |v| socket::get_int(fd, libc::SOL_SOCKET, name).is_ok_and(|now| now == v);
        if let Some(value) = value.filter(|v| !same(v.cast_signed())) {
            set(name, value)?;
        }
    }
    if let Some(seconds) = wanted.linger {
        let words = [1u32.to_ne_bytes(), seconds.to_ne_bytes()];
        socket::set(fd, Opt::LINGER, words.as_flattened()).context(|| "SO_LINGER".to_owned())?;
    }
    let program = filter_of(wanted);
    if !program.is_empty() {
        socket::attach_filter(fd, &program).context(|| "attach a socket filter".to_owned())?;
    }
    if keeps_filter(wanted) {
        set(LOCK_FILTER.1, 1)?;
    }
    restore_owner(id_maps, fd, wanted.user, wanted.group)
}

/// Gives a socket the sizes of its buffers. The kernel doubles what it is told, and
/// shows the double.
///
/// # Errors
/// `EPERM` for a size beyond `net.core.wmem_max` or `rmem_max` without the right to more; if `SO_BUF_LOCK` is not
/// taken, which kernels before 5.15 do not have.
pub(super) fn restore_buffers(fd: BorrowedFd<'_>, wanted: &SocketOptions) -> Result<()> {
    const SOCK_BUF_LOCK: u32 = 3;
    for (get, force, value) in [
        (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, wanted.send_buffer),
        (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, wanted.receive_buffer),
    ] {
        let half = (value / 2).cast_signed();
        let now = socket::get_int(fd, libc::SOL_SOCKET, get).unwrap_or(0);
        if now.cast_unsigned() == value {
            continue;
        }
        socket::set_int(fd, libc::SOL_SOCKET, force, half)
            .or_else(|_| socket::set_int(fd, libc::SOL_SOCKET, get, half))
            .context(|| format!("set the size of a socket buffer to {value}"))?;
    }
    // To have set a size switches the kernel's own tuning off.
    let Some(locks) = wanted.buffer_locks else { return Ok(()) };
    let (level, locks) = (libc::SOL_SOCKET, (locks & SOCK_BUF_LOCK).cast_signed());
    // Multipath TCP shows it and does not take it.
    if socket::get_int(fd, level, libc::SO_BUF_LOCK).is_ok_and(|now| now == locks) {
        return Ok(());
    }
    socket::set_int(fd, level, libc::SO_BUF_LOCK, locks).context(|| "SO_BUF_LOCK".to_owned())
}

fn restore_timeout(fd: BorrowedFd<'_>, opt: Opt, (sec, usec): (u64, u64)) -> Result<()> {
    if (sec, usec) == (0, 0) {
        return Ok(());
    }
    let words = [sec.to_ne_bytes(), usec.to_ne_bytes()];
    socket::set(fd, opt, words.as_flattened()).context(|| "setsockopt of a timeout".to_owned())
}

/// The user that the kernel counts a socket for, and that SO_REUSEPORT compares, is the owner of its
/// inode.
///
/// # Errors
/// `EPERM` if this process may not give inodes away, `EINVAL` if its user namespace does not have the id.
pub(super) fn restore_owner(
    id_maps: &IdMaps,
    fd: BorrowedFd<'_>,
    user: Option<u32>,
    group: Option<u32>,
) -> Result<()> {
    let stat = rustix::fs::fstat(fd).context(|| "fstat of a socket".to_owned())?;
    // The last number is no id, but leaves the owner as it is.
    let other = |id: Option<u32>, now: u32| id.filter(|&id| id != now && id != u32::MAX);
    let user = other(user.and_then(|id| id_maps.uid_outside(id)), stat.st_uid);
    let group = other(group.and_then(|id| id_maps.gid_outside(id)), stat.st_gid);
    if (user, group) == (None, None) {
        return Ok(());
    }
    rustix::fs::fchown(fd, user.map(Uid::from_raw), group.map(Gid::from_raw))
        .context(|| format!("chown of a socket to {user:?}:{group:?}"))
}

/// Gives a socket buffers without a limit, for the time while its queues are filled.
pub(super) fn raise_buffers(fd: BorrowedFd<'_>) {
    for name in [libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE] {
        // Without the right to it the limits have to do.
        let _ = socket::set_int(fd, libc::SOL_SOCKET, name, i32::MAX / 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_survive_packing() {
        let i = Instruction { code: 0x15, jt: 3, jf: 7, k: 0x0800_0001 };
        assert_eq!(pack(i), 0x0015_0307_0800_0001);
        assert_eq!(unpack(pack(i)), i);
    }
}
