//! What the inventory says to a restore: read once, by the function that judges it.

use torpor_images::ImageDir;
use torpor_images::kind;
use torpor_images::proto::InventoryEntry;

use crate::error::{Error, Result};
use crate::namespace::HostSpaces;

/// The longest name of a dump.
const LONGEST_NAME: usize = 64;

/// What a checkpoint is from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The namespaces of the dumping program.
    pub host: HostSpaces,
    /// The set of groups that it was in, if the image has it.
    pub group_set: Option<u32>,
    /// Connections of TCP have not been kept.
    pub tcp_close: bool,
    /// What has held the network still, if the image has it.
    pub locked_by: Option<LockedBy>,
    /// The name of the dump, if it has one. Locks of the network have it: it is hexadecimal digits and hyphens.
    pub name: Option<String>,
}

/// What holds the network still while the tasks of a dump are asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockedBy {
    /// `iptables-restore` and `ip6tables-restore`.
    Iptables,
    /// `nft`.
    Nft,
    /// Nothing does.
    Nothing,
}

impl LockedBy {
    const ALL: [LockedBy; 3] = [LockedBy::Iptables, LockedBy::Nft, LockedBy::Nothing];

    /// Its number in the image.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            LockedBy::Iptables => 0,
            LockedBy::Nft => 1,
            LockedBy::Nothing => 2,
        }
    }
}

impl Inventory {
    /// That of these images.
    ///
    /// # Errors
    /// If the image is missing or damaged, or of another version; a name or a lock that no dump gives.
    pub fn read(images: &ImageDir) -> Result<Self> {
        Inventory::of(images.inventory()?)
            .map_err(|reason| Error::Invalid { image: kind::INVENTORY.file_name(0), reason })
    }

    fn of(entry: InventoryEntry) -> std::result::Result<Self, String> {
        let tcp_close = entry.tcp_close();
        let known = |number: u32| {
            let found = LockedBy::ALL.into_iter().find(|by| by.number() == number);
            found.ok_or_else(|| {
                format!("the network was locked in way {number}, which there is not")
            })
        };
        let is_named = |c: char| c.is_ascii_hexdigit() || c == '-';
        // It goes into rules.
        let name = entry.dump_criu_run_id.filter(|name| !name.is_empty());
        if let Some(name) = &name
            && (name.len() > LONGEST_NAME || !name.chars().all(is_named))
        {
            return Err(format!("the dump has the name {name:?}, which no dump has"));
        }
        Ok(Inventory {
            host: entry.root_ids.as_ref().map(HostSpaces::of).unwrap_or_default(),
            group_set: entry.root_cg_set,
            tcp_close,
            locked_by: entry.network_lock_method.map(known).transpose()?,
            name,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::TaskKobjIdsEntry;

    use super::*;
    use crate::namespace::NsKind;

    #[test]
    fn what_images_do_not_say_is_not_known() {
        let name = Some(String::new());
        let old = InventoryEntry { dump_criu_run_id: name, ..InventoryEntry::default() };
        assert_eq!(Inventory::of(old).unwrap(), Inventory::default());
    }

    #[test]
    fn the_dump_is_named() {
        let root_ids = TaskKobjIdsEntry { net_ns_id: Some(9), ..TaskKobjIdsEntry::default() };
        let entry = InventoryEntry {
            root_ids: Some(root_ids),
            root_cg_set: Some(1),
            tcp_close: Some(true),
            network_lock_method: Some(2),
            dump_criu_run_id: Some("0a5f76b7-695d-43ef-8f62-e53f69704809".to_owned()),
            ..InventoryEntry::default()
        };
        let inventory = Inventory::of(entry.clone()).unwrap();
        assert_eq!(inventory.host.number(NsKind::Net), Some(9));
        assert_eq!(inventory.locked_by, Some(LockedBy::Nothing));
        assert!(inventory.tcp_close && inventory.name == entry.dump_criu_run_id);
    }

    #[test]
    fn names_and_locks_that_no_dump_gives_are_refused() {
        for name in ["0a5f; drop", "0a5f\n", "seven", "a".repeat(65).as_str()] {
            let dump_criu_run_id = Some(name.to_owned());
            let entry = InventoryEntry { dump_criu_run_id, ..InventoryEntry::default() };
            let said = Inventory::of(entry).unwrap_err();
            assert!(said.contains(&format!("the name {name:?}, which no dump has")), "{said}");
        }
        let network_lock_method = Some(3);
        let entry = InventoryEntry { network_lock_method, ..InventoryEntry::default() };
        let said = Inventory::of(entry).unwrap_err();
        assert_eq!(said, "the network was locked in way 3, which there is not");
    }
}
