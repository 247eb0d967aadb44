//! What a network namespace is filled with.

use torpor_images::{ImageDir, Kind, kind};
use torpor_kernel::netlink::Message;
use torpor_policy::PacketFilter;
use torpor_policy::collect::Addresses;
use torpor_policy::network::Network;

use super::tables::{self, ListKind};
use super::{conf, lock_of_criu};
use crate::error::{Error, Result};

/// Devices, settings, lists of messages and rules of a network namespace.
#[derive(Debug)]
pub(crate) struct NetworkFilling {
    /// Its devices and settings.
    pub network: Network,
    /// The messages of each image that there is.
    lists: Vec<(Kind, Vec<Message>)>,
    /// The rules of each packet filter that has some.
    rules: Vec<(Kind, PacketFilter)>,
}

impl NetworkFilling {
    /// That of namespace `id`.
    ///
    /// # Errors
    /// If an image is damaged, or has a device or a rule that there cannot be.
    pub(crate) fn read(images: &ImageDir, id: u32) -> Result<Self> {
        let network = Network::read(images, id, &conf::NAMES)?;
        let mut lists = Vec::new();
        for ListKind { list, .. } in tables::ALL {
            if let Some(messages) = list.read(images, id.into())? {
                let messages = messages.into_iter().map(|bytes| Message { bytes }).collect();
                lists.push((list.image, messages));
            }
        }
        let mut rules = Vec::new();
        for image in [kind::IPTABLES, kind::IP6TABLES, kind::NFTABLES] {
            let all = PacketFilter::read(images, image, id.into())?;
            rules.extend(
                all.map(|all| meant(image, id, &all)).transpose()?.flatten().map(|r| (image, r)),
            );
        }
        Ok(NetworkFilling { network, lists, rules })
    }

    /// The messages of a list; `None` if there is no such image.
    pub(super) fn list(&self, kind: &ListKind) -> Option<&[Message]> {
        let found = self.lists.iter().find(|(image, _)| *image == kind.list.image);
        found.map(|(_, messages)| messages.as_slice())
    }

    /// Its addresses.
    pub(crate) fn addresses(&self) -> Addresses {
        Addresses::of(self.list(&tables::ADDRESSES).unwrap_or_default().iter().map(Message::body))
    }

    /// The rules that images of this kind have, if there are some.
    pub(super) fn rules(&self, kind: Kind) -> Option<&PacketFilter> {
        self.rules.iter().find(|(image, _)| *image == kind).map(|(_, rules)| rules)
    }

    /// The kinds of images that have rules of packet filters, or connections that were tracked.
    pub(crate) fn filters(&self) -> impl Iterator<Item = Kind> {
        let tracked = [&tables::CONNECTIONS, &tables::EXPECTED].into_iter();
        let tracked = tracked.filter(|kind| self.list(kind).is_some_and(|all| !all.is_empty()));
        let rules = self.rules.iter().map(|(image, _)| *image);
        rules.chain(tracked.map(|kind| kind.list.image))
    }
}

/// The rules without the lock of the program that has saved them, if any are left.
fn meant(image: Kind, id: u32, all: &PacketFilter) -> Result<Option<PacketFilter>> {
    let meant = PacketFilter::of(image, &lock_of_criu::without(all.text()))
        .map_err(|why| Error::invalid(image.file_name(id.into()), why))?;
    Ok((!meant.text().trim().is_empty()).then_some(meant))
}
