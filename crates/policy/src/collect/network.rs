//! Network namespaces: devices, settings, routes, firewalls.

use std::io;

use torpor_images::{ImageDir, Kind, kind};

use super::checkpoint::{Checkpoint, Requests};
use super::lists::{List, ROUTES4, ROUTES6, RULES4, RULES6};
use super::routing::{Addresses, route, rule, texts};
use super::settings::Written;
use super::values::{SysctlValues, Values};
use crate::error::{Error, Result};
use crate::firewall::PacketFilter;
use crate::namespace::NsKind;
use crate::network::{Network, external_key};
use crate::passed::Passed;
use crate::request::Ask;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    settings: &SysctlValues<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let images = checkpoint.images;
    let users = checkpoint.nested_users()?;
    for number in checkpoint.namespaces(NsKind::Net) {
        if external_key(images, number)?.is_some() {
            continue;
        }
        let id = u64::from(number);
        let network = Network::read(images, number, &settings.names)?;
        let owned = users.iter().any(|user| user.owned.contains(&number));
        for device in &network.devices {
            let image = kind::NETDEV.file_name(id);
            all.add(&*image, None, device.ask());
            if passed.devices_of_network.contains(&device.name) {
                device.reach(owned).into_iter().for_each(|ask| all.add(&*image, None, ask));
            }
        }
        sysctls(&network.settings, settings, all);
        let addresses = Addresses::read(images, id)?;
        for ask in addresses.asks(&network.devices) {
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

fn sysctls(written: &Written, settings: &SysctlValues<'_>, all: &mut Requests) {
    let asked = written.all().map(|setting| {
        let ask = Ask::Sysctl { name: setting.key(), value: setting.value.clone() };
        (setting.base_path(), setting.image.clone(), ask)
    });
    let differing = without(asked.collect(), settings.here);
    // What a new namespace has by itself is not asked for either.
    for (_, image, ask) in without(differing, settings.fresh) {
        all.add(image, None, ask);
    }
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
    let messages = list.read(images, id)?.unwrap_or_default();
    for text in texts(messages.iter().map(|message| List::body(message)), describe) {
        all.add(&*image, None, Ask::Route { text });
    }
    Ok(())
}
