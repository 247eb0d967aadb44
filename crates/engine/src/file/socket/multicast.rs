//! Multicast groups that Internet sockets have joined.
//!
//! The kernel lists the groups of a device, and tells of a socket only whether it is in
//! a group that is named. So every group of every device is asked for.

use std::os::fd::BorrowedFd;

use rustix::net::netdevice;
use torpor_images::proto::SkMembership;
use torpor_policy::Membership;
use torpor_sys::socket::{self, Opt};

use crate::error::{Context, Result};

/// A group on a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MulticastGroup {
    device: u32,
    /// 4 or 16 bytes.
    address: Vec<u8>,
}

/// `struct group_filter` (linux/in.h) without its sources: device, group, mode, number
/// of sources.
const FILTER: usize = 144;
/// `struct sockaddr_storage`.
const ADDRESS: usize = 128;
/// All sources but those that are named; the other mode is `MCAST_INCLUDE`.
const EXCLUDE: u32 = libc::MCAST_EXCLUDE.cast_unsigned();

/// All groups in the network namespace of this thread.
///
/// # Errors
/// If procfs' lists of groups cannot be read.
pub(super) fn groups() -> Result<Vec<MulticastGroup>> {
    let read = |name: &str| {
        let path = format!("/proc/thread-self/net/{name}");
        match std::fs::read_to_string(&path) {
            // A kernel may be without IPv6, or without multicasting.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            text => text.context(|| format!("read {path}")),
        }
    };
    let mut all = parse_v4(&read("igmp")?);
    all.extend(read("igmp6")?.lines().filter_map(parse_v6));
    all.sort();
    Ok(all)
}

/// A line for each device (its index first), followed by lines for its groups.
fn parse_v4(text: &str) -> Vec<MulticastGroup> {
    let mut device = None;
    let mut all = Vec::new();
    for line in text.lines().skip(1) {
        let Some(word) = line.split_whitespace().next() else { continue };
        if line.starts_with(|c: char| c.is_ascii_digit()) {
            device = word.parse().ok();
        } else if let (Some(device), Ok(address)) = (device, u32::from_str_radix(word, 16)) {
            all.push(MulticastGroup { device, address: address.to_ne_bytes().to_vec() });
        }
    }
    all
}

/// Index and name of a device, the group, its users …
fn parse_v6(line: &str) -> Option<MulticastGroup> {
    let mut words = line.split_whitespace();
    let device = words.next()?.parse().ok()?;
    let address = u128::from_str_radix(words.nth(1)?, 16).ok()?;
    Some(MulticastGroup { device, address: address.to_be_bytes().to_vec() })
}

/// The memberships of a socket among `groups`.
///
/// # Errors
/// If the socket does not tell its filters, or a device has no name any more.
pub(super) fn dump(
    fd: BorrowedFd<'_>,
    family: i32,
    groups: &[MulticastGroup],
) -> Result<Vec<SkMembership>> {
    let mut all = Vec::new();
    for group in groups {
        // An IPv6 socket can be in groups of both families.
        if family == libc::AF_INET && group.address.len() != 4 {
            continue;
        }
        let Some((mode, sources)) = filter(fd, group)? else { continue };
        let device = netdevice::index_to_name(fd, group.device)
            .context(|| format!("name of network device {}", group.device))?;
        all.push(SkMembership {
            level: level(&group.address).cast_unsigned(),
            group: group.address.clone(),
            device,
            exclude: mode == EXCLUDE,
            sources,
        });
    }
    Ok(all)
}

fn level(address: &[u8]) -> i32 {
    if address.len() == 4 { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 }
}

/// Mode and sources, if the socket is in the group.
fn filter(fd: BorrowedFd<'_>, group: &MulticastGroup) -> Result<Option<(u32, Vec<Vec<u8>>)>> {
    let mut room = 0;
    loop {
        let mut value = header(group, 0, room);
        let size = FILTER + ADDRESS * usize::try_from(room).unwrap_or(0);
        value.resize(size, 0);
        let option =
            if group.address.len() == 4 { Opt::MCAST_MSFILTER_V4 } else { Opt::MCAST_MSFILTER_V6 };
        match socket::get(fd, option, &mut value) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(None),
            // The group is not one that sockets join, or this socket is of a kind that joins none.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOPROTOOPT)) => {
                return Ok(None);
            }
            Err(e) => return Err(e).context(|| "MCAST_MSFILTER".to_owned()),
        }
        let word = |at: usize| value.get(at..).and_then(|b| b.first_chunk().copied());
        let word = |at: usize| word(at).map_or(0, u32::from_ne_bytes);
        let (mode, count) = (word(136), word(140));
        if count <= room {
            let (slots, _) = value.get(FILTER..).unwrap_or_default().as_chunks::<ADDRESS>();
            let count = usize::try_from(count).unwrap_or(0);
            let sources = slots.iter().take(count).filter_map(bytes_of);
            return Ok(Some((mode, sources.collect())));
        }
        room = count;
    }
}

/// Device, group, mode and number of sources.
fn header(group: &MulticastGroup, mode: u32, count: u32) -> Vec<u8> {
    let mut value = join(group);
    value.extend(mode.to_ne_bytes());
    value.extend(count.to_ne_bytes());
    value
}

/// `struct group_req`: device and group.
fn join(group: &MulticastGroup) -> Vec<u8> {
    let mut value = group.device.to_ne_bytes().to_vec();
    value.extend([0; 4]);
    value.extend(storage(&group.address));
    value
}

/// An address without a port, as `struct sockaddr_storage`.
fn storage(address: &[u8]) -> Vec<u8> {
    let v4 = address.len() == 4;
    let family = if v4 { libc::AF_INET } else { libc::AF_INET6 };
    let mut value = u16::try_from(family).unwrap_or(0).to_ne_bytes().to_vec();
    value.resize(if v4 { 4 } else { 8 }, 0);
    value.extend(address);
    value.resize(ADDRESS, 0);
    value
}

fn bytes_of(storage: &[u8; ADDRESS]) -> Option<Vec<u8>> {
    let (family, _) = storage.split_first_chunk()?;
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_INET => Some(storage.get(4..8)?.to_vec()),
        libc::AF_INET6 => Some(storage.get(8..24)?.to_vec()),
        _ => None,
    }
}

/// Lets a socket join its groups again.
///
/// # Errors
/// If a device is missing, or the kernel refuses a group.
pub(super) fn restore(fd: BorrowedFd<'_>, id: u32, all: &[Membership]) -> Result<()> {
    for membership in all {
        let Membership { group, device, exclude, sources } = membership;
        let index = netdevice::name_to_index(fd, device)
            .context(|| format!("network device {device} of a multicast group"))?;
        let group = MulticastGroup { device: index, address: group.clone() };
        let (request, filter) = if group.address.len() == 4 {
            (Opt::MCAST_JOIN_V4, Opt::MCAST_MSFILTER_V4)
        } else {
            (Opt::MCAST_JOIN_V6, Opt::MCAST_MSFILTER_V6)
        };
        let what = || format!("socket {id} joins a multicast group on {device}");
        socket::set(fd, request, &join(&group)).context(what)?;
        if *exclude && sources.is_empty() {
            continue;
        }
        let count = u32::try_from(sources.len()).unwrap_or(u32::MAX);
        let mut value = header(&group, u32::from(!exclude), count);
        value.extend(sources.iter().flat_map(|source| storage(source)));
        socket::set(fd, filter, &value).context(what)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
    use std::os::fd::{AsFd, OwnedFd};

    use super::super::testing::{command, cycle, in_netns};
    use super::*;
    use crate::options::Options;

    #[test]
    fn lists_are_understood() {
        let v4 = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                  2\teth0      :     1      V3\n\t\t\t\t230100E0     1 0:00000000\t\t0\n";
        let expected = MulticastGroup { device: 2, address: vec![0xe0, 0, 1, 0x23] };
        assert_eq!(parse_v4(v4), [expected]);
        let v6 = "1    lo              ff020000000000000000000000000001     1 0000000C 0";
        let MulticastGroup { device, address } = parse_v6(v6).unwrap();
        assert_eq!((device, address[0], address[15]), (1, 0xff, 1));
    }

    fn memberships(fd: &OwnedFd, family: i32) -> Vec<SkMembership> {
        dump(fd.as_fd(), family, &groups().unwrap()).unwrap()
    }

    #[test]
    fn groups_are_joined_again() {
        in_netns(|| {
            command("ip", &["link", "add", "left", "type", "veth", "peer", "name", "right"]);
            command("ip", &["link", "set", "left", "up"]);
            command("ip", &["addr", "add", "10.0.0.1/24", "dev", "left"]);
            let v4 = UdpSocket::bind("0.0.0.0:0").unwrap();
            let any: Ipv4Addr = "224.0.1.1".parse().unwrap();
            v4.join_multicast_v4(&any, &Ipv4Addr::new(10, 0, 0, 1)).unwrap();
            v4.join_multicast_v4(&any, &Ipv4Addr::LOCALHOST).unwrap();
            let v6 = UdpSocket::bind("[::]:0").unwrap();
            let group: Ipv6Addr = "ff02::1:1234".parse().unwrap();
            v6.join_multicast_v6(&group, 1).unwrap();
            let files: Vec<OwnedFd> = vec![v4.into(), v6.into()];
            // Only from one source, and from all but two.
            let only = |membership: &str, exclude, sources: &[[u8; 4]]| Membership {
                group: membership.parse::<Ipv4Addr>().unwrap().octets().to_vec(),
                device: "left".to_owned(),
                exclude,
                sources: sources.iter().map(|s| s.to_vec()).collect(),
            };
            let filtered = [
                only("224.0.1.2", false, &[[10, 0, 0, 7]]),
                only("224.0.1.3", true, &[[10, 0, 0, 8], [10, 0, 0, 9]]),
            ];
            restore(files[0].as_fd(), 0, &filtered).unwrap();
            restore(files[1].as_fd(), 0, &filtered[..1]).unwrap();
            let families = [libc::AF_INET, libc::AF_INET6];
            let look = |files: &[OwnedFd]| -> Vec<Vec<SkMembership>> {
                files.iter().zip(families).map(|(f, family)| memberships(f, family)).collect()
            };
            let before = look(&files);
            assert_eq!((before[0].len(), before[1].len()), (4, 2));
            let as_joined = |filtered: &Membership| {
                let Membership { group, device, exclude, sources } = filtered.clone();
                SkMembership { level: 0, group, device, exclude, sources }
            };
            assert!(filtered.iter().all(|filtered| before[0].contains(&as_joined(filtered))));
            let restored = cycle(&Options::default(), files);
            assert_eq!(look(&restored), before);
        });
    }
}
