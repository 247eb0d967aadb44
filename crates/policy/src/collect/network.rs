//! Network namespaces: devices, settings, routes, firewalls.

use std::io;

use torpor_images::proto::{NdType, NetDeviceEntry, NetnsEntry};
use torpor_images::{ImageDir, Kind, kind};

use super::lists::{List, ROUTES4, ROUTES6, RULES4, RULES6};
use super::settings::Written;
use super::{Checkpoint, Error, Requests, Result, Settings, Values};
use crate::firewall::PacketFilter;
use crate::namespace::NsKind;
use crate::request::Ask;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    settings: &Settings<'_>,
    all: &mut Requests,
) -> Result<()> {
    let images = checkpoint.images;
    for id in checkpoint.namespaces(NsKind::Net) {
        let id = u64::from(id);
        let netns: NetnsEntry = images.read_opt(kind::NETNS, id)?.unwrap_or_default();
        // One that the caller hands over.
        if netns.ext_key.is_some() {
            continue;
        }
        let devices: Vec<NetDeviceEntry> = images.read_all_or_empty(kind::NETDEV, id)?;
        for device in &devices {
            let kind = kind_of_link(device.r#type());
            let ask = Ask::Link { name: device.name.clone(), kind };
            all.add(kind::NETDEV.file_name(id), None, ask);
        }
        sysctls(id, &netns, &devices, settings, all)?;
        for list in [ROUTES4, ROUTES6] {
            messages(images, list, id, route, all)?;
        }
        for list in [RULES4, RULES6] {
            messages(images, list, id, rule, all)?;
        }
        for image in
            [kind::IPTABLES, kind::IP6TABLES, kind::NFTABLES, kind::NETNF_CT, kind::NETNF_EXP]
        {
            firewall(images, image, id, all)?;
        }
    }
    Ok(())
}

/// The name of a kind of network device in requests.
#[must_use]
pub fn kind_of_link(ty: NdType) -> String {
    match ty {
        NdType::Extlink => "external".to_owned(),
        ty => ty.as_str_name().to_ascii_lowercase(),
    }
}

fn firewall(images: &ImageDir, image: Kind, id: u64, all: &mut Requests) -> Result<()> {
    let len = match image {
        kind::NETNF_CT | kind::NETNF_EXP => {
            let Some(mut list) = images.reader(image, id)? else { return Ok(()) };
            io::copy(&mut list, &mut io::sink()).map_err(|error| Error::Invalid {
                image: image.file_name(id),
                reason: error.to_string(),
            })?
        }
        _ => {
            let rules = PacketFilter::read(images, image, id)?;
            rules.map_or(0, |rules| rules.text().len() as u64)
        }
    };
    if len > 0 {
        all.add(image.file_name(id), None, Ask::Firewall { text: format!("{len} bytes") });
    }
    Ok(())
}

fn sysctls(
    id: u64,
    netns: &NetnsEntry,
    devices: &[NetDeviceEntry],
    settings: &Settings<'_>,
    all: &mut Requests,
) -> Result<()> {
    let written = Written::of(&settings.names, id, netns, devices)?;
    let asked = written.all().map(|setting| {
        let ask = Ask::Sysctl { name: setting.key(), value: setting.value.clone() };
        (setting.base_path(), setting.image.clone(), ask)
    });
    let differing = without(asked.collect(), settings.here);
    // What a new namespace has by itself is not asked for either.
    for (_, image, ask) in without(differing, settings.fresh) {
        all.add(image, None, ask);
    }
    Ok(())
}

/// Leaves out the settings that have these values anyway.
fn without(settings: Vec<(String, String, Ask)>, values: Values<'_>) -> Vec<(String, String, Ask)> {
    if settings.is_empty() {
        return settings;
    }
    let paths: Vec<String> = settings.iter().map(|(path, ..)| path.clone()).collect();
    let mut known = values(&paths).into_iter();
    let differs = |(_, _, ask): &(String, String, Ask)| {
        let known = known.next().flatten();
        !matches!(ask, Ask::Sysctl { value, .. } if Some(value) == known.as_ref())
    };
    let mut settings = settings;
    settings.retain(differs);
    settings
}

/// The length of `struct rtmsg` and `struct fib_rule_hdr` (linux/rtnetlink.h, linux/fib_rules.h).
const BODY: usize = 12;

fn messages(
    images: &ImageDir,
    list: List,
    id: u64,
    describe: fn(&[u8]) -> Option<String>,
    all: &mut Requests,
) -> Result<()> {
    let image = list.image.file_name(id);
    for message in list.read(images, id)?.unwrap_or_default() {
        if let Some(text) = describe(List::body(&message)) {
            all.add(&*image, None, Ask::Route { text });
        }
    }
    Ok(())
}

/// The attributes behind the body of a message: their types and contents.
fn attributes(message: &[u8]) -> Vec<(u16, &[u8])> {
    let mut rest = message.get(BODY..).unwrap_or_default();
    let mut all = vec![];
    while let Some((head, _)) = rest.split_first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        // The upper bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
        let ty = u16::from_ne_bytes([head[2], head[3]]) & 0x3fff;
        let Some(content) = rest.get(4..len) else { break };
        all.push((ty, content));
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

/// What a message of a route stands for in requests: nothing for those to the networks of a
/// device's own addresses, which the kernel makes with the address.
#[must_use]
pub fn route(message: &[u8]) -> Option<String> {
    /// `RTPROT_KERNEL`, `RTN_UNICAST`.
    const KERNEL: u8 = 2;
    const UNICAST: u8 = 1;
    /// `RTA_DST`, `RTA_OIF`, `RTA_PREFSRC`, `RTA_METRICS`, `RTA_CACHEINFO`, `RTA_TABLE`,
    /// `RTA_PREF`, `RTA_PRIORITY`: what such a route consists of.
    const OWN: [u16; 8] = [1, 4, 7, 8, 12, 15, 20, 6];
    let [_, length, _, _, table, protocol, _, kind, ..] = *message else { return None };
    let attributes = attributes(message);
    let plain = attributes.iter().all(|(ty, _)| OWN.contains(ty));
    if protocol == KERNEL && plain && (kind != UNICAST || length > 0) {
        return None;
    }
    let to = attributes.iter().find(|(ty, _)| *ty == 1).map(|(_, address)| *address);
    let to = to.map_or_else(|| "default".to_owned(), |to| format!("{}/{length}", address(to)));
    let through = attributes.iter().find(|(ty, _)| *ty == 5);
    let through = through.map_or(String::new(), |(_, to)| format!(" through {}", address(to)));
    Some(format!("{to}{through}, table {table}"))
}

fn address(bytes: &[u8]) -> String {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return std::net::Ipv4Addr::from(v4).to_string();
    }
    match <[u8; 16]>::try_from(bytes) {
        Ok(v6) => std::net::Ipv6Addr::from(v6).to_string(),
        Err(_) => format!("{bytes:02x?}"),
    }
}

/// What a message of a routing rule stands for: nothing for the three that every namespace has.
#[must_use]
pub fn rule(message: &[u8]) -> Option<String> {
    /// `FR_ACT_TO_TBL`.
    const TO_TABLE: u8 = 1;
    /// `FRA_PRIORITY`, `FRA_SUPPRESS_PREFIXLEN`, `FRA_TABLE`, `FRA_PROTOCOL`.
    const OWN: [u16; 4] = [6, 14, 15, 21];
    /// Tables and priorities: local, main, default.
    const FIRST: [(u8, u32); 3] = [(255, 0), (254, 32766), (253, 32767)];
    let attributes = attributes(message);
    let priority = attributes.iter().find(|(ty, _)| *ty == 6);
    let priority =
        priority.and_then(|(_, p)| p.first_chunk()).map_or(0, |p| u32::from_ne_bytes(*p));
    let [_, a, b, c, table, _, _, action, d, e, f, g, ..] = *message else { return None };
    let plain = [a, b, c, d, e, f, g] == [0; 7] && action == TO_TABLE;
    let own = attributes.iter().all(|(ty, _)| OWN.contains(ty));
    match plain && own && FIRST.contains(&(table, priority)) {
        true => None,
        false => Some(format!("rule of priority {priority} to table {table}")),
    }
}
