//! Addresses, routes and routing rules: what messages of netlink stand for in requests.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use torpor_images::ImageDir;

use super::lists::{ADDRESSES, List};
use crate::error::Result;
use crate::network::{NetDevice, NetKind};
use crate::request::Ask;

/// The length of `struct rtmsg` and `struct fib_rule_hdr` (linux/rtnetlink.h, linux/fib_rules.h),
/// and that of `struct ifaddrmsg` (linux/if_addr.h).
const BODY: usize = 12;
const ADDRESS_BODY: usize = 8;

/// The attributes behind the body of a message. The kernel takes the last of each type.
struct Attributes<'m>(Vec<(u16, &'m [u8])>);

impl<'m> Attributes<'m> {
    fn of(message: &'m [u8], body: usize) -> Self {
        let mut rest = message.get(body..).unwrap_or_default();
        let mut all = vec![];
        while let Some((head, _)) = rest.split_first_chunk::<4>() {
            let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
            // The upper bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
            let ty = u16::from_ne_bytes([head[2], head[3]]) & 0x3fff;
            let Some(content) = rest.get(4..len) else { break };
            all.push((ty, content));
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        Attributes(all)
    }

    fn find(&self, wanted: u16) -> Option<&'m [u8]> {
        self.0.iter().rfind(|(ty, _)| *ty == wanted).map(|(_, content)| *content)
    }

    fn word(&self, wanted: u16) -> Option<u32> {
        self.find(wanted).and_then(|content| content.first_chunk()).copied().map(u32::from_ne_bytes)
    }

    /// Whether there are none but these.
    fn only(&self, known: &[u16]) -> bool {
        self.0.iter().all(|(ty, _)| known.contains(ty))
    }

    /// Whether what a route says of connections, if it does, is how large their packets are and how far they go. The rest chooses
    /// their control of congestion, and how much they send at once.
    fn has_plain_metrics(&self) -> bool {
        /// `RTAX_MTU`, `RTAX_ADVMSS`, `RTAX_HOPLIMIT` of linux/rtnetlink.h.
        const PLAIN: [u16; 3] = [2, 8, 10];
        let metrics = self.find(libc::RTA_METRICS);
        metrics.is_none_or(|metrics| Attributes::of(metrics, 0).only(&PLAIN))
    }
}

/// The addresses that a restore gives to the devices of a network namespace.
#[derive(Debug, Default)]
pub struct Addresses {
    all: Vec<Address>,
    /// What they come with a route to: a device, the length of a prefix, and the network. Images may have millions of
    /// addresses and of routes.
    networks: HashSet<(u32, u8, Vec<u8>)>,
}

#[derive(Debug)]
struct Address {
    /// The number of the device.
    device: u32,
    /// Its own, and, of two ends that are connected directly, that of the other.
    local: Vec<u8>,
    other: Vec<u8>,
    prefix: u8,
}

impl Addresses {
    /// Those in the image of a namespace.
    ///
    /// # Errors
    /// A file that holds something else.
    pub(super) fn read(images: &ImageDir, id: u64) -> Result<Self> {
        let messages = ADDRESSES.read(images, id)?.unwrap_or_default();
        Ok(Addresses::of(messages.iter().map(|message| List::body(message))))
    }

    /// Those that messages say, each without its header.
    pub fn of<'m>(messages: impl Iterator<Item = &'m [u8]>) -> Self {
        Addresses::new(messages.filter_map(Address::of).collect())
    }

    fn new(all: Vec<Address>) -> Self {
        let of = |address: &Address| {
            let Address { device, prefix, .. } = *address;
            [&address.local, &address.other].map(|end| (device, prefix, masked(end, prefix)))
        };
        let networks = all.iter().flat_map(of).collect();
        Addresses { all, networks }
    }

    /// What is asked for by them.
    #[must_use]
    pub fn asks(&self, devices: &[NetDevice]) -> Vec<Ask> {
        let known: HashMap<u32, &NetDevice> =
            devices.iter().rev().map(|device| (device.index, device)).collect();
        let ask = |address: &Address| {
            let device = known.get(&address.device);
            if device.is_some_and(|device| address.is_of_kernel(device)) {
                return None;
            }
            let name = device.map_or_else(|| address.device.to_string(), |d| d.name.clone());
            let text = format!("address {}/{}", shown(&address.local), address.prefix);
            Some(Ask::Address { device: name, text })
        };
        self.all.iter().filter_map(ask).collect()
    }

    /// Whether one of them comes with a route over a device to a network.
    fn lead_to(&self, device: Option<u32>, network: &[u8], prefix: u8) -> bool {
        device.is_some_and(|device| self.networks.contains(&(device, prefix, network.to_vec())))
    }
}

impl Address {
    fn of(message: &[u8]) -> Option<Self> {
        let attributes = Attributes::of(message, ADDRESS_BODY);
        let [_, prefix, ..] = *message else { return None };
        let device = u32::from_ne_bytes(*message.get(4..)?.first_chunk()?);
        let other = attributes.find(libc::IFA_ADDRESS).unwrap_or_default();
        let local = attributes.find(libc::IFA_LOCAL).unwrap_or(other);
        Some(Address { device, local: local.to_vec(), other: other.to_vec(), prefix })
    }

    /// Whether the kernel gives it to a device by itself: those of the loopback device, and the
    /// one that is made of the hardware address (RFC 4291, appendix A).
    fn is_of_kernel(&self, device: &NetDevice) -> bool {
        // Another end would come with a route to its network.
        if self.other != self.local {
            return false;
        }
        if device.kind == NetKind::Loopback {
            let own = [(IpAddr::from(Ipv4Addr::LOCALHOST), 8), (Ipv6Addr::LOCALHOST.into(), 128)];
            return ip(&self.local).is_some_and(|ip| own.contains(&(ip, self.prefix)));
        }
        let Some(&[a, b, c, d, e, f]) = device.address.as_deref() else { return false };
        let of_hardware = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
        self.local == of_hardware && self.prefix == 64
    }
}

/// An address without what is behind its first bits.
fn masked(address: &[u8], bits: u8) -> Vec<u8> {
    let kept = |at: usize| usize::from(bits).saturating_sub(at * 8).min(8);
    let mask = |at: usize| u8::try_from(0xff00_u32 >> kept(at) & 0xff).unwrap_or_default();
    address.iter().enumerate().map(|(at, byte)| byte & mask(at)).collect()
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn shown(bytes: &[u8]) -> String {
    ip(bytes).map_or_else(|| format!("{bytes:02x?}"), |ip| ip.to_string())
}

/// What messages of a list stand for in requests, where each stands for what `describe` says. Of those that stand for nothing
/// a restore sends a few only without being asked for them: each takes memory of the kernel's, and time.
pub fn texts<'m>(
    messages: impl Iterator<Item = &'m [u8]>,
    describe: impl Fn(&[u8]) -> Option<String>,
) -> Vec<String> {
    const FEW: usize = 1024;
    let (mut all, mut silent) = (vec![], 0);
    for message in messages {
        match describe(message) {
            Some(text) => all.push(text),
            None => silent += usize::from(!comes_with_address(message)),
        }
    }
    if silent > FEW {
        all.push(format!("{silent} that are the kernel's own"));
    }
    all
}

/// Whether the kernel makes a route by itself with an address, so that no restore sends it.
#[must_use]
pub fn comes_with_address(message: &[u8]) -> bool {
    const KINDS: [u8; 4] =
        [libc::RTN_LOCAL, libc::RTN_BROADCAST, libc::RTN_ANYCAST, libc::RTN_MULTICAST];
    let [_, _, _, _, _, protocol, _, kind, ..] = *message else { return false };
    protocol == libc::RTPROT_KERNEL && KINDS.contains(&kind)
}

/// What a message of a route stands for in requests: nothing for those to the networks of a
/// device's own addresses, which the kernel makes with the address.
#[must_use]
pub fn route(message: &[u8], addresses: &Addresses) -> Option<String> {
    /// Those that only come with an address, and those that lead nowhere.
    const HARMLESS: [u8; 7] = [
        libc::RTN_LOCAL,
        libc::RTN_BROADCAST,
        libc::RTN_ANYCAST,
        libc::RTN_MULTICAST,
        libc::RTN_BLACKHOLE,
        libc::RTN_UNREACHABLE,
        libc::RTN_PROHIBIT,
    ];
    /// What such a route consists of.
    const OWN: [u16; 8] = [
        libc::RTA_DST,
        libc::RTA_OIF,
        libc::RTA_PREFSRC,
        libc::RTA_METRICS,
        libc::RTA_CACHEINFO,
        libc::RTA_TABLE,
        libc::RTA_PREF,
        libc::RTA_PRIORITY,
    ];
    /// Packets to several on the device, before Linux 5 by a route of this kind.
    const MULTICAST: ([u8; 16], u8) = ([0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8);
    let [_, length, _, _, table, protocol, _, kind, ..] = *message else { return None };
    let attributes = Attributes::of(message, BODY);
    let to = attributes.find(libc::RTA_DST);
    let own = |to: &[u8]| {
        (to, length) == (&MULTICAST.0, MULTICAST.1)
            || addresses.lead_to(attributes.word(libc::RTA_OIF), to, length)
    };
    let harmless = match kind {
        libc::RTN_UNICAST => to.is_some_and(own),
        kind => HARMLESS.contains(&kind),
    };
    let plain = attributes.only(&OWN) && attributes.has_plain_metrics();
    if protocol == libc::RTPROT_KERNEL && plain && harmless {
        return None;
    }
    let to = to.map_or_else(|| "default".to_owned(), |to| format!("{}/{length}", shown(to)));
    let through = attributes.find(libc::RTA_GATEWAY);
    let through = through.map_or(String::new(), |to| format!(" through {}", shown(to)));
    Some(format!("{to}{through}, table {table}"))
}

/// What a message of a routing rule stands for: nothing for the three that every namespace has.
#[must_use]
pub fn rule(message: &[u8]) -> Option<String> {
    /// `FR_ACT_TO_TBL` of linux/fib_rules.h.
    const TO_TABLE: u8 = 1;
    /// `FRA_PRIORITY`, `FRA_SUPPRESS_PREFIXLEN`, `FRA_TABLE`, `FRA_PROTOCOL`.
    const OWN: [u16; 4] = [PRIORITY, 14, TABLE, 21];
    const PRIORITY: u16 = 6;
    const TABLE: u16 = 15;
    /// Tables and priorities: local, main, default.
    const FIRST: [(u32, u32); 3] = [
        (libc::RT_TABLE_LOCAL as u32, 0),
        (libc::RT_TABLE_MAIN as u32, 32766),
        (libc::RT_TABLE_DEFAULT as u32, 32767),
    ];
    let attributes = Attributes::of(message, BODY);
    let priority = attributes.word(PRIORITY).unwrap_or(0);
    let [_, a, b, c, table, _, _, action, d, e, f, g, ..] = *message else { return None };
    // One that the attribute names counts more.
    let table = attributes.word(TABLE).unwrap_or(table.into());
    let plain = [a, b, c, d, e, f, g] == [0; 7] && action == TO_TABLE;
    match plain && attributes.only(&OWN) && FIRST.contains(&(table, priority)) {
        true => None,
        false => Some(format!("rule of priority {priority} to table {table}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn message(body: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut all = body.to_vec();
        for (ty, content) in attributes {
            let len = u16::try_from(4 + content.len()).unwrap();
            all.extend([len.to_ne_bytes(), ty.to_ne_bytes()].as_flattened());
            all.extend(*content);
            all.resize(all.len().next_multiple_of(4), 0);
        }
        all
    }

    fn addresses(all: &[(&[u8], u8, u8)]) -> Addresses {
        let one = |(ip, prefix, device): &(&[u8], u8, u8)| {
            let body = [2, *prefix, 0, 0, *device, 0, 0, 0];
            Address::of(&message(&body, &[(1, &[9; 4]), (1, ip), (2, ip)])).unwrap()
        };
        Addresses::new(all.iter().map(one).collect())
    }

    #[test]
    fn addresses_of_the_kernel_are_not_asked_for() {
        let mac = [2, 0, 0, 0, 0, 7];
        let device = |index, name: &str, kind, address| {
            let name = name.to_owned();
            NetDevice { name, index, kind, mtu: 0, flags: 0, address, master: None }
        };
        let devices = [
            device(1, "lo", NetKind::Loopback, None),
            device(2, "eth0", NetKind::Veth(None), Some(mac.to_vec())),
        ];
        let one = Ipv6Addr::LOCALHOST.octets();
        let own = "fe80::ff:fe00:7".parse::<Ipv6Addr>().unwrap().octets();
        let other = "fe80::ff:fe00:8".parse::<Ipv6Addr>().unwrap().octets();
        let texts = |all: Addresses| -> Vec<String> {
            all.asks(&devices).iter().map(ToString::to_string).collect()
        };
        let asks = |all: &[(&[u8], u8, u8)]| texts(addresses(all));
        let body = [2, 8, 0, 0, 1, 0, 0, 0];
        let with_peer = message(&body, &[(1, &[10, 0, 0, 1]), (2, &[127, 0, 0, 1])]);
        let found = texts(Addresses::of([with_peer.as_slice()].into_iter()));
        assert_eq!(found, ["network device \"lo\": address 127.0.0.1/8"]);
        assert!(asks(&[(&[127, 0, 0, 1], 8, 1), (&one, 128, 1), (&own, 64, 2)]).is_empty());
        let found = asks(&[
            (&[127, 0, 0, 1], 1, 1),
            (&[10, 0, 0, 1], 8, 1),
            (&[127, 0, 0, 1], 8, 2),
            (&other, 64, 2),
            (&own, 10, 2),
            (&[10, 7, 0, 1], 24, 3),
        ]);
        let expected = [
            "network device \"lo\": address 127.0.0.1/1",
            "network device \"lo\": address 10.0.0.1/8",
            "network device \"eth0\": address 127.0.0.1/8",
            "network device \"eth0\": address fe80::ff:fe00:8/64",
            "network device \"eth0\": address fe80::ff:fe00:7/10",
            "network device \"3\": address 10.7.0.1/24",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn routes_of_addresses_are_not_asked_for() {
        let known = addresses(&[(&[10, 7, 0, 1], 24, 2)]);
        let route = |length, kind, attributes: &[(u16, &[u8])]| {
            let body = [2, length, 0, 0, 254, 2, 253, kind, 0, 0, 0, 0];
            route(&message(&body, attributes), &known)
        };
        let (to, over) = ((1, &[10, 7, 0, 0][..]), (4, &[2, 0, 0, 0][..]));
        assert_eq!(route(24, 1, &[to, over]), None);
        let metrics = |kind: u16| {
            let size = [8_u16.to_ne_bytes(), kind.to_ne_bytes()].concat();
            route(24, 1, &[to, over, (8, &[size.as_slice(), &[1, 2, 3, 4]].concat()[..])])
        };
        // The largest packet, the control of congestion, and what is sent at first.
        let wanted = || Some("10.7.0.0/24, table 254".to_owned());
        assert_eq!([2, 16, 11].map(metrics), [None, wanted(), wanted()]);
        // Local, and one that leads nowhere.
        assert_eq!(route(0, 2, &[over]), None);
        assert_eq!(route(0, 7, &[over]), None);
        for (length, kind, attributes, wanted) in [
            (1, 1, &[(1, &[0, 0, 0, 0][..]), over][..], "0.0.0.0/1, table 254"),
            (23, 1, &[to, over], "10.7.0.0/23, table 254"),
            (24, 1, &[to, (4, &[3, 0, 0, 0])], "10.7.0.0/24, table 254"),
            (24, 1, &[to, (1, &[10, 8, 0, 0]), over], "10.8.0.0/24, table 254"),
            (24, 1, &[to, over, (5, &[10, 7, 0, 9])], "10.7.0.0/24 through 10.7.0.9, table 254"),
            (0, 1, &[over], "default, table 254"),
            (24, 9, &[to, over], "10.7.0.0/24, table 254"),
        ] {
            assert_eq!(route(length, kind, attributes).as_deref(), Some(wanted));
        }
    }

    #[test]
    fn many_messages_are_asked_for_whatever_they_say() {
        let route = |kind| message(&[2, 0, 0, 0, 254, 2, 253, kind, 0, 0, 0, 0], &[]);
        // One that leads nowhere, and one that comes with an address.
        let (nowhere, local) = (route(6), route(2));
        let asked =
            |count, message: &[u8]| texts(std::iter::repeat_n(message, count), |_| None).concat();
        assert_eq!([asked(1024, &nowhere), asked(9000, &local)], ["", ""]);
        assert_eq!(asked(1025, &nowhere), "1025 that are the kernel's own");
        let named = texts([&*nowhere, &*local].into_iter(), |_| Some("one".to_owned()));
        assert_eq!(named, ["one", "one"]);
    }

    #[test]
    fn the_first_rules_are_not_asked_for() {
        let rule = |table: u8, attributes: &[(u16, &[u8])]| {
            rule(&message(&[2, 0, 0, 0, table, 0, 0, 1, 0, 0, 0, 0], attributes))
        };
        let [main, other] = [32766_u32, 100].map(u32::to_ne_bytes);
        let table = 254_u32.to_ne_bytes();
        assert_eq!(rule(254, &[(6, &main), (15, &table)]), None);
        let expected = Some("rule of priority 32766 to table 100".to_owned());
        assert_eq!(rule(254, &[(6, &main), (15, &other)]), expected);
        assert_eq!(rule(254, &[(6, &main), (15, &table), (15, &other)]), expected);
        let second = rule(254, &[(6, &main), (6, &other)]);
        assert_eq!(second.unwrap(), "rule of priority 100 to table 254");
    }
}
