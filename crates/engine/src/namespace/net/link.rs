//! Network devices: what they are, and how they are made again.

use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{
    ARPHRD_LOOPBACK, IFLA_ADDRESS, IFLA_IFNAME, IFLA_INFO_DATA, IFLA_INFO_KIND, IFLA_LINK,
    IFLA_LINK_NETNSID, IFLA_LINKINFO, IFLA_MASTER, IFLA_MTU, IFLA_NET_NS_FD, IFLA_NEW_IFINDEX,
    RTM_GETLINK, RTM_NEWLINK,
};
use torpor_images::proto::{MacvlanLinkEntry, NdType, NetDeviceEntry, SitEntry};
use torpor_kernel::netlink::{Body, CREATE, EXCL, Message, Socket, half, word};
use torpor_policy::network::{NetDevice, NetKind};

use super::conf::Sysctls;
use super::tun;
use crate::error::{Context, Error, Result};

// linux/veth.h and linux/if_link.h.
const VETH_INFO_PEER: u16 = 1;
const MACVLAN_MODE: u16 = 1;
const MACVLAN_FLAGS: u16 = 2;
/// `struct ifinfomsg`.
const IFINFOMSG: usize = 16;

/// The flags that can be set.
const SETTABLE: u32 = (libc::IFF_UP
    | libc::IFF_DEBUG
    | libc::IFF_NOARP
    | libc::IFF_PROMISC
    | libc::IFF_ALLMULTI
    | libc::IFF_MULTICAST)
    .cast_unsigned();
const IFF_UP: u32 = libc::IFF_UP.cast_unsigned();

/// Devices that some kernels put into every network namespace.
const FALLBACK: &[&str] =
    &["tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0"];

/// The attributes of a sit tunnel (linux/if_tunnel.h), by their number.
mod tunnel {
    pub(super) const LINK: u16 = 1;
    pub(super) const LOCAL: u16 = 2;
    pub(super) const REMOTE: u16 = 3;
    pub(super) const TTL: u16 = 4;
    pub(super) const TOS: u16 = 5;
    pub(super) const FLAGS: u16 = 8;
    pub(super) const PROTO: u16 = 9;
    pub(super) const PMTUDISC: u16 = 10;
    pub(super) const RD_PREFIX: u16 = 11;
    pub(super) const RELAY_PREFIX: u16 = 12;
    pub(super) const RD_PREFIXLEN: u16 = 13;
    pub(super) const RELAY_PREFIXLEN: u16 = 14;
    pub(super) const ENCAP_TYPE: u16 = 15;
    pub(super) const ENCAP_FLAGS: u16 = 16;
    pub(super) const ENCAP_SPORT: u16 = 17;
    pub(super) const ENCAP_DPORT: u16 = 18;
}

/// A device as the kernel shows it.
#[derive(Debug)]
struct Link<'m> {
    message: &'m Message,
    name: String,
    kind: &'m str,
    flags: u32,
}

/// What the dump of a namespace needs to know about the devices.
pub(super) struct Surroundings<'a> {
    /// A task that lives in the namespace, for refusals.
    pub pid: i32,
    /// Lists all processes of the tree.
    pub tasks: &'a dyn Fn() -> Result<Vec<i32>>,
    /// The number of the namespace in the images.
    pub ns_id: u32,
    /// The number in the images of a namespace that this one knows by a number.
    pub by_nsid: &'a dyn Fn(u32) -> Option<u32>,
    /// Whether a device is left to the caller (`--external netdev[NAME]:…`).
    pub external: &'a dyn Fn(&str) -> bool,
}

/// Describes the devices of the calling thread's namespace, which `socket` belongs to.
///
/// # Errors
/// Refused, if a device is of a kind that cannot be made again; if the kernel does not list the
/// devices.
pub(super) fn dump(socket: &mut Socket, around: &Surroundings<'_>) -> Result<Vec<NetDeviceEntry>> {
    let mut all = Vec::new();
    for message in socket.list(RTM_GETLINK, &[0; IFINFOMSG])? {
        let link = parse(&message)?;
        if is_fallback(&link) {
            continue;
        }
        all.push(describe(&link, around)?);
    }
    all.sort_by_key(|d| d.ifindex);
    Ok(all)
}

/// Makes sure that nothing is lost where the calling thread's namespace is left empty; `pid` lives there.
///
/// # Errors
/// Refused, if there are devices that a new namespace does not have; if the kernel does not list them.
pub(super) fn expect_none(socket: &mut Socket, pid: i32) -> Result<()> {
    for message in socket.list(RTM_GETLINK, &[0; IFINFOMSG])? {
        let link = parse(&message)?;
        if !is_of_new(&link) {
            return Err(Error::refused(
                pid,
                format!("network device {}", link.name),
                "is in a network namespace below the container's, which is left empty as that is \
                 (--empty-ns net: runc always says so), and nobody would make it again; say `empty-ns \
                 none` in /etc/criu/runc.conf to keep networks, or remove the device",
            ));
        }
    }
    Ok(())
}

/// Whether each new namespace has such a device.
fn is_of_new(link: &Link<'_>) -> bool {
    let is_loopback = half(link.message.body(), 2) == Some(ARPHRD_LOOPBACK);
    is_loopback || is_fallback(link)
}

fn is_fallback(link: &Link<'_>) -> bool {
    FALLBACK.contains(&link.name.as_str()) && link.flags & IFF_UP == 0
}

fn parse(message: &Message) -> Result<Link<'_>> {
    let attributes = message.attributes(IFINFOMSG);
    let bad = || Error::invalid("netlink", "a device without name");
    Ok(Link {
        message,
        name: attributes.text(IFLA_IFNAME).ok_or_else(bad)?.to_owned(),
        kind: attributes.nested(IFLA_LINKINFO).text(IFLA_INFO_KIND).unwrap_or_default(),
        flags: word(message.body(), 8).unwrap_or(0),
    })
}

fn describe(link: &Link<'_>, around: &Surroundings<'_>) -> Result<NetDeviceEntry> {
    let attributes = link.message.attributes(IFINFOMSG);
    let mut entry = NetDeviceEntry {
        ifindex: word(link.message.body(), 4).unwrap_or(0),
        mtu: attributes.word(IFLA_MTU).unwrap_or(0),
        flags: link.flags,
        name: link.name.clone(),
        // The loopback device has none; CRIU would set it in vain.
        address: attributes
            .find(IFLA_ADDRESS)
            .filter(|a| a.iter().any(|&b| b != 0))
            .map(<[u8]>::to_vec),
        master: attributes.word(IFLA_MASTER),
        conf4: Sysctls::v4(&link.name).read()?,
        conf6: Sysctls::v6(&link.name).read()?,
        ..NetDeviceEntry::default()
    };
    let data = attributes.nested(IFLA_LINKINFO).nested(IFLA_INFO_DATA);
    let lower = attributes.word(IFLA_LINK);
    let lower_ns = match attributes.word(IFLA_LINK_NETNSID) {
        None => Some(around.ns_id),
        Some(nsid) => (around.by_nsid)(nsid),
    };
    let kind = match link.kind {
        _ if (around.external)(&link.name) => NdType::Extlink,
        "" if half(link.message.body(), 2) == Some(ARPHRD_LOOPBACK) => NdType::Loopback,
        "veth" => {
            entry.peer_ifindex = lower;
            entry.peer_nsid = lower_ns;
            NdType::Veth
        }
        "bridge" => NdType::Bridge,
        "macvlan" => {
            entry.macvlan = Some(MacvlanLinkEntry {
                mode: data.word(MACVLAN_MODE).unwrap_or(0),
                flags: data.find(MACVLAN_FLAGS).and_then(|v| half(v, 0)).map(u32::from),
            });
            entry.peer_ifindex = lower;
            entry.peer_nsid = lower_ns;
            NdType::Macvlan
        }
        "sit" => {
            entry.sit = Some(sit(link));
            NdType::Sit
        }
        "tun" => {
            entry.tun = Some(tun::describe(around, &link.name, &data)?);
            NdType::Tun
        }
        kind => {
            let object = match kind {
                "" => format!("network device {}", link.name),
                kind => format!("network device {} ({kind})", link.name),
            };
            let reason = format!(
                "cannot be made again; leave it to the caller with --external netdev[{0}]:{0}",
                link.name
            );
            return Err(Error::refused(around.pid, object, reason));
        }
    };
    entry.r#type = kind.into();
    Ok(entry)
}

fn sit(link: &Link<'_>) -> SitEntry {
    let data = link.message.attributes(IFINFOMSG).nested(IFLA_LINKINFO).nested(IFLA_INFO_DATA);
    let byte = |kind| data.find(kind).and_then(|v| v.first()).map(|&b| u32::from(b));
    let short = |kind| data.find(kind).and_then(|v| half(v, 0)).map(u32::from);
    let words = |kind| -> Vec<u32> {
        data.find(kind).unwrap_or_default().chunks_exact(4).filter_map(|c| word(c, 0)).collect()
    };
    SitEntry {
        link: data.word(tunnel::LINK),
        local: words(tunnel::LOCAL),
        remote: words(tunnel::REMOTE),
        ttl: byte(tunnel::TTL),
        tos: byte(tunnel::TOS),
        pmtudisc: byte(tunnel::PMTUDISC).map(|on| on != 0),
        proto: byte(tunnel::PROTO),
        flags: short(tunnel::FLAGS),
        encap_type: short(tunnel::ENCAP_TYPE),
        encap_flags: short(tunnel::ENCAP_FLAGS),
        encap_sport: short(tunnel::ENCAP_SPORT),
        encap_dport: short(tunnel::ENCAP_DPORT),
        rd_prefixlen: short(tunnel::RD_PREFIXLEN),
        rd_prefix: words(tunnel::RD_PREFIX),
        relay_prefixlen: short(tunnel::RELAY_PREFIXLEN),
        relay_prefix: words(tunnel::RELAY_PREFIX),
    }
}

/// `struct ifinfomsg` for the device with an index (0 to leave it open).
fn ifinfo(index: u32, flags: u32, change: u32) -> [u8; IFINFOMSG] {
    let mut out = [0u8; IFINFOMSG];
    for (place, value) in [(4, index), (8, flags), (12, change)] {
        out[place..place + 4].copy_from_slice(&value.to_ne_bytes());
    }
    out
}

fn request(device: &NetDevice, kind: &str, data: impl FnOnce(&mut Body)) -> Body {
    let mut body = Body::new(&ifinfo(device.index, 0, 0));
    body.put_text(IFLA_IFNAME, &device.name);
    // The loopback and some others have no address of their own.
    if let Some(address) = device.address.as_ref().filter(|a| a.iter().any(|&b| b != 0)) {
        body.put(IFLA_ADDRESS, address);
    }
    body.put_word(IFLA_MTU, device.mtu);
    body.nest(IFLA_LINKINFO, &[], |info| {
        info.put_text(IFLA_INFO_KIND, kind);
        info.nest(IFLA_INFO_DATA, &[], data);
    });
    body
}

fn send(socket: &mut Socket, device: &NetDevice, body: &Body) -> Result<()> {
    let done = socket.change(RTM_NEWLINK, CREATE | EXCL, &body.0)?;
    done.context(|| format!("making network device {} ({})", device.name, device.index))
}

fn raw(space: BorrowedFd<'_>) -> u32 {
    space.as_raw_fd().cast_unsigned()
}

/// The other end of a veth pair.
#[derive(Debug, Clone, Copy)]
pub(super) enum Peer<'a> {
    /// A device of the tree, in this namespace.
    Inside(&'a NetDevice, BorrowedFd<'a>),
    /// One with this name, in this namespace.
    Outside(&'a str, BorrowedFd<'a>),
}

/// Makes a pair of veth devices.
///
/// # Errors
/// If the kernel refuses the devices: a name is taken, or it has no veth.
pub(super) fn make_veth(socket: &mut Socket, device: &NetDevice, peer: Peer<'_>) -> Result<()> {
    let index = match peer {
        Peer::Inside(other, _) => other.index,
        _ => 0,
    };
    let body = request(device, "veth", |data| {
        data.nest(VETH_INFO_PEER, &ifinfo(index, 0, 0), |other| {
            let space = match peer {
                Peer::Inside(device, space) => {
                    other.put_text(IFLA_IFNAME, &device.name);
                    if let Some(address) = &device.address {
                        other.put(IFLA_ADDRESS, address);
                    }
                    other.put_word(IFLA_MTU, device.mtu);
                    space
                }
                Peer::Outside(name, space) => {
                    other.put_text(IFLA_IFNAME, name);
                    space
                }
            };
            other.put_word(IFLA_NET_NS_FD, raw(space));
        });
    });
    send(socket, device, &body)
}

/// Makes a bridge.
///
/// # Errors
/// If the kernel refuses the device: its name is taken, or it has no bridges.
pub(super) fn make_bridge(socket: &mut Socket, device: &NetDevice) -> Result<()> {
    send(socket, device, &request(device, "bridge", |_| {}))
}

/// Makes a macvlan device in namespace `space`, on top of device `lower` of the
/// namespace that `socket` belongs to.
///
/// # Errors
/// If the kernel refuses the device: its name is taken, or `lower` can carry none.
pub(super) fn make_macvlan(
    socket: &mut Socket,
    device: &NetDevice,
    lower: u32,
    space: BorrowedFd<'_>,
) -> Result<()> {
    let mut body = request(device, "macvlan", |data| {
        if let NetKind::Macvlan { mode, flags, .. } = device.kind {
            data.put_word(MACVLAN_MODE, mode);
            flags.into_iter().for_each(|flags| data.put(MACVLAN_FLAGS, &flags.to_ne_bytes()));
        }
    });
    body.put_word(IFLA_LINK, lower);
    body.put_word(IFLA_NET_NS_FD, raw(space));
    send(socket, device, &body)
}

/// Makes a sit tunnel.
///
/// # Errors
/// If the kernel refuses the device: its name is taken, or it has no such tunnels.
pub(super) fn make_sit(socket: &mut Socket, device: &NetDevice, sit: &SitEntry) -> Result<()> {
    let byte = |value: u32| [u8::try_from(value).unwrap_or(u8::MAX)];
    let short = |value: u32| u16::try_from(value).unwrap_or(u16::MAX).to_ne_bytes();
    let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
    let body = request(device, "sit", |data| {
        if let Some(link) = sit.link {
            data.put_word(tunnel::LINK, link);
        }
        for (kind, words) in [
            (tunnel::LOCAL, &sit.local),
            (tunnel::REMOTE, &sit.remote),
            (tunnel::RD_PREFIX, &sit.rd_prefix),
            (tunnel::RELAY_PREFIX, &sit.relay_prefix),
        ] {
            if !words.is_empty() {
                data.put(kind, &bytes(words));
            }
        }
        let bytes = [
            (tunnel::TTL, sit.ttl),
            (tunnel::TOS, sit.tos),
            (tunnel::PMTUDISC, sit.pmtudisc.map(u32::from)),
            (tunnel::PROTO, sit.proto),
        ];
        for (kind, value) in bytes {
            value.into_iter().for_each(|v| data.put(kind, &byte(v)));
        }
        let shorts = [
            (tunnel::FLAGS, sit.flags),
            (tunnel::ENCAP_TYPE, sit.encap_type),
            (tunnel::ENCAP_FLAGS, sit.encap_flags),
            (tunnel::ENCAP_SPORT, sit.encap_sport),
            (tunnel::ENCAP_DPORT, sit.encap_dport),
            (tunnel::RD_PREFIXLEN, sit.rd_prefixlen),
            (tunnel::RELAY_PREFIXLEN, sit.relay_prefixlen),
        ];
        for (kind, value) in shorts {
            value.into_iter().for_each(|v| data.put(kind, &short(v)));
        }
    });
    send(socket, device, &body)
}

/// Moves device `outer` from the namespace that `socket` belongs to into `space`, where
/// it gets the name and index of `device`.
///
/// # Errors
/// If there is no device `outer`, or it cannot be moved or renamed.
pub(super) fn move_in(
    socket: &mut Socket,
    outer: &str,
    device: &NetDevice,
    space: BorrowedFd<'_>,
) -> Result<()> {
    let what = || format!("moving network device {outer} into the tree as {}", device.name);
    let index = index_of(socket, outer)?;
    let mut body = Body::new(&ifinfo(index, 0, 0));
    body.put_text(IFLA_IFNAME, &device.name);
    body.put_word(IFLA_NET_NS_FD, raw(space));
    body.put_word(IFLA_NEW_IFINDEX, device.index);
    socket.change(RTM_NEWLINK, 0, &body.0)?.context(what)
}

/// The index of a device by its name.
///
/// # Errors
/// `ENODEV` if there is no device of that name.
pub(super) fn index_of(socket: &mut Socket, name: &str) -> Result<u32> {
    let what = || format!("network device {name}");
    let mut body = Body::new(&[0; IFINFOMSG]);
    body.put_text(IFLA_IFNAME, name);
    let answer = match socket.get(RTM_GETLINK, &body.0).map_err(Error::from) {
        Err(Error::Os { source, .. }) => return Err(source).context(what),
        other => other?,
    };
    let index = answer.as_ref().and_then(|m| word(m.body(), 4));
    index.ok_or_else(|| Error::invalid("netlink", what()))
}

/// Adds a device to a bridge, by name, and sets it up.
///
/// # Errors
/// If one of the two is not there, or the device cannot be in a bridge.
pub(super) fn attach_to_bridge(socket: &mut Socket, name: &str, bridge: &str) -> Result<()> {
    let index = index_of(socket, name)?;
    let mut body = Body::new(&ifinfo(index, IFF_UP, IFF_UP));
    body.put_word(IFLA_MASTER, index_of(socket, bridge)?);
    let what = || format!("adding {name} to bridge {bridge}");
    socket.change(RTM_NEWLINK, 0, &body.0)?.context(what)
}

/// What can only be set when all devices exist: the bridge that a device belongs to;
/// and MTU and address of devices that were not made here.
///
/// # Errors
/// If the device does not take its settings.
pub(super) fn complete(socket: &mut Socket, device: &NetDevice) -> Result<()> {
    let mut body = Body::new(&ifinfo(device.index, 0, 0));
    body.put_word(IFLA_MTU, device.mtu);
    if let Some(master) = device.master {
        body.put_word(IFLA_MASTER, master);
    }
    if matches!(device.kind, NetKind::External | NetKind::Tun(_))
        && let Some(address) = &device.address
    {
        body.put(IFLA_ADDRESS, address);
    }
    let what = || format!("setting up network device {}", device.name);
    socket.change(RTM_NEWLINK, 0, &body.0)?.context(what)
}

/// Sets the flags of a device: up or not, and so on.
///
/// # Errors
/// If the device does not take its flags.
pub(super) fn set_flags(socket: &mut Socket, name: &str, index: u32, flags: u32) -> Result<()> {
    let body = ifinfo(index, flags & SETTABLE, SETTABLE);
    let what = || format!("setting flags {flags:#x} of network device {name}");
    socket.change(RTM_NEWLINK, 0, &body)?.context(what)
}
