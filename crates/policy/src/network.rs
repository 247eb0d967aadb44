//! The devices and settings of a network namespace: read of its images once, judged, and made.

use std::collections::HashSet;

use torpor_images::proto::{MacvlanLinkEntry, NdType, NetDeviceEntry, NetnsEntry, SitEntry};
use torpor_images::{ImageDir, kind};

use crate::collect::settings::{Names, Written};
use crate::error::{Error, Result};
use crate::request::Ask;

/// What a network namespace is given.
#[derive(Debug, Default)]
pub struct Network {
    /// Its devices.
    pub devices: Vec<NetDevice>,
    /// Its settings, and those of the devices in their order.
    pub settings: Written,
    /// Other namespaces of the tree by their numbers in images, and the numbers that it knows them
    /// by.
    pub others: Vec<(u32, i32)>,
}

/// A network device.
#[derive(Debug, Clone, PartialEq)]
pub struct NetDevice {
    /// Its name.
    pub name: String,
    /// Its number in its namespace.
    pub index: u32,
    /// What it is.
    pub kind: NetKind,
    /// The longest packet that it takes.
    pub mtu: u32,
    /// `IFF_*` (linux/if.h).
    pub flags: u32,
    /// Its hardware address.
    pub address: Option<Vec<u8>>,
    /// The number of the bridge that it is part of.
    pub master: Option<u32>,
}

/// What a network device is.
#[derive(Debug, Clone, PartialEq)]
pub enum NetKind {
    /// The loopback device, which every namespace has.
    Loopback,
    /// One that the caller hands over.
    External,
    /// An end of a pair; none known is outside of the tree.
    Veth(Option<Peer>),
    /// A bridge.
    Bridge,
    /// A device on top of another one.
    Macvlan {
        /// The number of that one, if it is in the same namespace.
        below: Option<u32>,
        /// `MACVLAN_MODE_*` (linux/if_link.h).
        mode: u32,
        /// `MACVLAN_FLAG_*`.
        flags: Option<u16>,
    },
    /// A tunnel, by its attributes.
    Sit(Box<SitEntry>),
    /// A device of a program.
    Tun(Tun),
    /// One of OpenVZ, which no restore makes.
    Venet,
}

/// The other end of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number.
    pub index: u32,
    /// Its namespace; old images do not say it.
    pub network: Option<u32>,
}

/// What a device of a program has by its queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tun {
    /// `IFF_*` (linux/if_tun.h).
    pub flags: u32,
    /// The user who may attach to it; `None`: whoever may administer the network.
    pub owner: Option<u32>,
    /// The group, likewise.
    pub group: Option<u32>,
    /// The length of the header of a packet.
    pub header: i32,
    /// The size of the buffer for what is sent.
    pub send_buffer: i32,
}

/// The key of a namespace that the caller hands over: nothing is made in one.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(crate) fn external_key(images: &ImageDir, id: u32) -> Result<Option<String>> {
    let entry: Option<NetnsEntry> = images.read_opt(kind::NETNS, id.into())?;
    Ok(entry.and_then(|entry| entry.ext_key))
}

impl Network {
    /// What the images have of a namespace that is made: nothing of one that the caller hands over.
    ///
    /// # Errors
    /// Damaged images; a device that cannot be; two of the same name or number.
    pub fn read(images: &ImageDir, id: u32, names: &Names) -> Result<Self> {
        let number = u64::from(id);
        let netns: NetnsEntry = images.read_opt(kind::NETNS, number)?.unwrap_or_default();
        if netns.ext_key.is_some() {
            return Ok(Network::default());
        }
        let entries: Vec<NetDeviceEntry> = images.read_all_or_empty(kind::NETDEV, number)?;
        let settings = Written::of(names, number, &netns, &entries)?;
        Ok(Network {
            devices: NetDevice::of(id, entries)?,
            settings,
            others: netns.nsids.iter().map(|n| (n.target_ns_id, n.netnsid_value)).collect(),
        })
    }
}

impl NetDevice {
    /// Those of a namespace that is made: none of one that the caller hands over.
    ///
    /// # Errors
    /// As [`Network::read`].
    pub(crate) fn all(images: &ImageDir, network: u32) -> Result<Vec<Self>> {
        if external_key(images, network)?.is_some() {
            return Ok(Vec::new());
        }
        Self::of(network, images.read_all_or_empty(kind::NETDEV, network.into())?)
    }

    fn of(network: u32, entries: Vec<NetDeviceEntry>) -> Result<Vec<Self>> {
        let image = || kind::NETDEV.file_name(network.into());
        let invalid = |reason| Error::Invalid { image: image(), reason };
        let all = entries.into_iter().map(|entry| Self::read(network, entry).map_err(invalid));
        let all: Vec<Self> = all.collect::<Result<_>>()?;
        // What is set by the number, or by the name, would be set of another one.
        let (mut names, mut numbers) = (HashSet::new(), HashSet::new());
        for Self { name, index, .. } in &all {
            if !(names.insert(name) && numbers.insert(index)) {
                let reason = format!("two devices have the name {name:?} or the number {index}");
                return Err(invalid(reason));
            }
        }
        Ok(all)
    }

    fn read(network: u32, entry: NetDeviceEntry) -> std::result::Result<Self, String> {
        let name = &entry.name;
        // The name becomes part of a path.
        if ["", ".", ".."].contains(&name.as_str()) || name.contains(['/', '\0']) {
            return Err(format!("a device named {name:?}"));
        }
        let ty = NdType::try_from(entry.r#type);
        let ty = ty.map_err(|_| format!("device {name:?} is of type {}", entry.r#type))?;
        let kind = match ty {
            NdType::Loopback => NetKind::Loopback,
            NdType::Extlink => NetKind::External,
            NdType::Veth => NetKind::Veth(
                entry.peer_ifindex.map(|index| Peer { index, network: entry.peer_nsid }),
            ),
            NdType::Bridge => NetKind::Bridge,
            NdType::Macvlan => {
                let MacvlanLinkEntry { mode, flags } = entry.macvlan.unwrap_or_default();
                let below = entry.peer_ifindex.filter(|_| entry.peer_nsid == Some(network));
                let flags = flags.and_then(|flags| u16::try_from(flags).ok());
                NetKind::Macvlan { below, mode, flags }
            }
            NdType::Sit => NetKind::Sit(Box::new(entry.sit.unwrap_or_default())),
            NdType::Tun => {
                let tun = entry.tun.ok_or_else(|| format!("{name} has no settings"))?;
                NetKind::Tun(Tun {
                    flags: tun.flags,
                    // Nobody is -1.
                    owner: u32::try_from(tun.owner).ok(),
                    group: u32::try_from(tun.group).ok(),
                    header: tun.vnethdr.cast_signed(),
                    send_buffer: tun.sndbuf.cast_signed(),
                })
            }
            NdType::Venet => NetKind::Venet,
        };
        let NetDeviceEntry { name, ifindex: index, mtu, flags, address, master, .. } = entry;
        Ok(NetDevice { name, index, kind, mtu, flags, address, master })
    }

    /// What is judged of it.
    #[must_use]
    pub fn ask(&self) -> Ask {
        Ask::Link { name: self.name.clone(), kind: self.kind.name().to_owned() }
    }

    /// What decides which packets it takes: judged of devices of the caller's. In a network that is `owned` by a user namespace
    /// of the tasks these have all rights over it.
    #[must_use]
    pub fn reach(&self, owned: bool) -> Vec<Ask> {
        const TAKES_ALL: u32 = (libc::IFF_PROMISC | libc::IFF_ALLMULTI).cast_unsigned();
        /// `MACVLAN_MODE_PASSTHRU` (linux/if_link.h): the device below takes all packets, too.
        const PASSTHRU: u32 = 8;
        let address = self.address.as_deref().map(hardware);
        let all = self.flags & TAKES_ALL != 0;
        let below = matches!(self.kind, NetKind::Macvlan { mode: PASSTHRU, .. });
        let texts = [
            address.map(|address| format!("hardware address {address}")),
            all.then(|| "takes packets for others".to_owned()),
            below.then(|| "the device below it takes packets for others".to_owned()),
            owned.then(|| "belongs to a user namespace of the tasks".to_owned()),
        ];
        let texts = texts.into_iter().flatten();
        texts.map(|text| Ask::Address { device: self.name.clone(), text }).collect()
    }
}

impl NetKind {
    /// Its name in requests and in the policy.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            NetKind::Loopback => "loopback",
            NetKind::External => "external",
            NetKind::Veth(_) => "veth",
            NetKind::Bridge => "bridge",
            NetKind::Macvlan { .. } => "macvlan",
            NetKind::Sit(_) => "sit",
            NetKind::Tun(_) => TUN,
            NetKind::Venet => "venet",
        }
    }
}

/// The name of devices of programs.
pub(crate) const TUN: &str = "tun";

/// A hardware address as ip(8) shows it.
fn hardware(address: &[u8]) -> String {
    address.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::TunLinkEntry;

    use super::*;

    fn entry(ty: NdType, name: &str) -> NetDeviceEntry {
        NetDeviceEntry { r#type: ty.into(), name: name.to_owned(), ..NetDeviceEntry::default() }
    }

    #[test]
    fn devices_have_what_makes_them() {
        let read = |entry| NetDevice::read(7, entry).unwrap();
        let (peer_ifindex, inside, outside) = (Some(3), Some(7), Some(8));
        let veth =
            |peer_nsid| NetDeviceEntry { peer_ifindex, peer_nsid, ..entry(NdType::Veth, "a") };
        for network in [None, inside, outside] {
            assert_eq!(read(veth(network)).kind, NetKind::Veth(Some(Peer { index: 3, network })));
        }
        assert_eq!(read(entry(NdType::Veth, "a")).kind, NetKind::Veth(None));
        for (peer_nsid, below) in [(inside, Some(3)), (outside, None), (None, None)] {
            let macvlan = Some(MacvlanLinkEntry { mode: 4, flags: Some(1) });
            let entry = NetDeviceEntry { macvlan, ..veth(peer_nsid) };
            let made = read(NetDeviceEntry { r#type: NdType::Macvlan.into(), ..entry });
            assert_eq!(made.kind, NetKind::Macvlan { below, mode: 4, flags: Some(1) });
        }
        let tun = TunLinkEntry { flags: 2, owner: -1, group: 5, vnethdr: 10, sndbuf: u32::MAX };
        let made = read(NetDeviceEntry { tun: Some(tun), ..entry(NdType::Tun, "t") });
        let tun = Tun { flags: 2, owner: None, group: Some(5), header: 10, send_buffer: -1 };
        assert_eq!(made.kind, NetKind::Tun(tun));
        assert_eq!(made.ask().to_string(), "network device \"t\" (tun)");
    }

    #[test]
    fn devices_that_cannot_be_are_refused() {
        for name in ["", ".", "..", "a/b", "a\0"] {
            let error = NetDevice::read(7, entry(NdType::Bridge, name)).unwrap_err();
            assert_eq!(error, format!("a device named {name:?}"));
        }
        let error = NetDevice::read(7, entry(NdType::Tun, "t")).unwrap_err();
        assert_eq!(error, "t has no settings");
        let numbered = |name, ifindex| NetDeviceEntry { ifindex, ..entry(NdType::Loopback, name) };
        let of = |other| NetDevice::of(7, vec![numbered("lo", 1), other]);
        assert_eq!(of(numbered("x", 2)).unwrap().len(), 2);
        for (other, twice) in [(numbered("lo", 2), ("lo", 2)), (numbered("x", 1), ("x", 1))] {
            let error = of(other).unwrap_err().to_string();
            let wanted =
                format!("two devices have the name {:?} or the number {}", twice.0, twice.1);
            assert_eq!(error, format!("netdev-7.img: {wanted}"));
        }
        let unknown = NetDeviceEntry { r#type: 77, ..entry(NdType::Bridge, "b") };
        assert_eq!(NetDevice::read(7, unknown).unwrap_err(), "device \"b\" is of type 77");
    }
}
