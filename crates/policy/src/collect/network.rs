//! Network namespaces: devices, settings, routes, firewalls.

use std::io;

use torpor_images::proto::{NdType, NetDeviceEntry, NetnsEntry};
use torpor_images::{ImageDir, Kind, kind};

use super::lists::{List, ROUTES4, ROUTES6, RULES4, RULES6};
use super::routing::{Addresses, hardware, route, rule};
use super::settings::Written;
use super::{Checkpoint, Error, Requests, Result, Settings, Values};
use crate::firewall::PacketFilter;
use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::request::Ask;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    settings: &Settings<'_>,
    passed: &Passed,
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
            let image = kind::NETDEV.file_name(id);
            let kind = kind_of_link(device.r#type());
            all.add(&*image, None, Ask::Link { name: device.name.clone(), kind });
            if passed.devices_of_network.contains(&device.name) {
                let reaches = reach_of(device).into_iter();
                reaches.for_each(|ask| all.add(&*image, None, ask));
            }
        }
        sysctls(id, &netns, &devices, settings, all)?;
        let addresses = Addresses::read(images, id)?;
        for ask in addresses.asks(&devices) {
            all.add(kind::IFADDR.file_name(id), None, ask);
        }
        for list in [ROUTES4, ROUTES6] {
            messages(images, list, id, |message| route(message, &addresses), all)?;
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

/// What a device of the caller's is told that decides which packets it takes.
fn reach_of(device: &NetDeviceEntry) -> Vec<Ask> {
    /// `IFF_PROMISC`, `IFF_ALLMULTI` (linux/if.h).
    const TAKES_ALL: u32 = 0x100 | 0x200;
    /// `MACVLAN_MODE_PASSTHRU` (linux/if_link.h): the device below takes all packets, too.
    const PASSTHRU: u32 = 8;
    let address = device.address.as_deref().map(hardware);
    let all = device.flags & TAKES_ALL != 0;
    let below = device.macvlan.is_some_and(|macvlan| macvlan.mode == PASSTHRU);
    let texts = [
        address.map(|address| format!("hardware address {address}")),
        all.then(|| "takes packets for others".to_owned()),
        below.then(|| "the device below it takes packets for others".to_owned()),
    ];
    let texts = texts.into_iter().flatten();
    texts.map(|text| Ask::Address { device: device.name.clone(), text }).collect()
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

fn messages(
    images: &ImageDir,
    list: List,
    id: u64,
    describe: impl Fn(&[u8]) -> Option<String>,
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
