//! User namespaces below that of the root task: read of their images once, judged, and made.

use torpor_images::proto::UsernsEntry;
use torpor_images::{ImageDir, kind};

use crate::capabilities::number;
use crate::error::{Error, Result};
use crate::namespace::{Home, NsKind, NsSet};
use crate::passed::Passed;
use crate::user_maps::UserMaps;

/// One of them. Its ids outside are those of the root task's user namespace.
#[derive(Debug, Clone)]
pub struct NestedUser {
    /// Its number in the images.
    pub number: u32,
    /// That of the one directly above it; `None` is the root task's.
    pub parent: Option<u32>,
    /// Who has made it.
    pub owner: u32,
    /// Nobody in there may change groups.
    pub denies_groups: bool,
    /// The namespaces that belong to it.
    pub owned: Vec<u32>,
    /// Users and groups.
    pub maps: UserMaps,
}

/// How deep they can be nested (user_namespaces(7)).
const DEEPEST: usize = 32;

/// All of them, parents first. `homes` are the namespaces of the tasks, the root first.
///
/// # Errors
/// Images that are missing or make no sense.
pub fn nested_users(images: &ImageDir, homes: &[NsSet]) -> Result<Vec<NestedUser>> {
    let mut all: Vec<NestedUser> = Vec::new();
    let user = |homes: &NsSet| homes.get(NsKind::User);
    let Some(root) = homes.first().map(user) else { return Ok(all) };
    for home in homes.iter().map(user).filter(|home| *home != root) {
        let Home::Own(number) = home else {
            return Err(invalid(0, "a task lives above the user namespace of the root task"));
        };
        let mut line = Vec::new();
        let mut next = Some(number);
        while let Some(number) = next.filter(|number| all.iter().all(|u| u.number != *number)) {
            if line.len() == DEEPEST || Home::Own(number) == root {
                return Err(invalid(number, "it is nested too deep, or in itself"));
            }
            let user = read(images, number)?;
            next = user.parent;
            line.push(user);
        }
        all.extend(line.into_iter().rev());
    }
    let kinds: Vec<NsKind> = NsKind::ALL.into_iter().filter(|&kind| kind != NsKind::User).collect();
    let has = |home: &NsSet, number| kinds.iter().any(|kind| home.own(*kind) == Some(number));
    for (index, user) in all.iter().enumerate() {
        let own = |number: &u32| has(&homes[0], *number) || !homes.iter().any(|h| has(h, *number));
        if user.owned.iter().any(own) {
            return Err(invalid(user.number, "it owns what no task below the root task lives in"));
        }
        let others = all.iter().skip(index + 1);
        if others.flat_map(|other| &other.owned).any(|number| user.owned.contains(number)) {
            return Err(invalid(user.number, "what it owns belongs to another one as well"));
        }
    }
    Ok(all)
}

/// Whether what is mounted for them is to be locked in place: their tasks have all rights over their mounts, and those of the
/// configuration have none, so what hides or protects something has to stay.
#[must_use]
pub fn locks_mounts(passed: &Passed) -> bool {
    passed.spec.is_some() && !passed.grants(number::SYS_ADMIN)
}

fn read(images: &ImageDir, number: u32) -> Result<NestedUser> {
    let entry: UsernsEntry = images.read_one(kind::USERNS, number.into())?;
    let maps = UserMaps::read(&entry).ok_or_else(|| impossible(number))?;
    let Some(nested) = entry.torpor_nested else {
        return Err(invalid(number, "what it is below is not known"));
    };
    Ok(NestedUser {
        number,
        parent: nested.parent,
        owner: nested.owner,
        denies_groups: nested.denies_groups == Some(true),
        owned: nested.owned,
        maps,
    })
}

/// The maps of a user namespace are none that there can be.
pub(crate) fn impossible(number: u32) -> Error {
    invalid(number, "its maps are impossible")
}

fn invalid(number: u32, reason: &str) -> Error {
    Error::Invalid { image: kind::USERNS.file_name(number.into()), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{TaskKobjIdsEntry, TorporNestedUserEntry, UidGidExtent};

    use super::*;
    use crate::namespace::HostSpaces;

    fn home(user: u32, net: u32) -> NsSet {
        let host = TaskKobjIdsEntry { user_ns_id: Some(1), ..TaskKobjIdsEntry::default() };
        let ids = TaskKobjIdsEntry {
            user_ns_id: Some(user),
            net_ns_id: Some(net),
            ..TaskKobjIdsEntry::default()
        };
        NsSet::read(&ids, &HostSpaces::of(&host))
    }

    /// Namespaces: a number, the one above, and what belongs to it.
    fn read(users: &[(u32, Option<u32>, &[u32])], homes: &[NsSet]) -> Result<Vec<u32>> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        for &(number, parent, owned) in users {
            let (owner, owned) = (0, owned.to_vec());
            let nested = TorporNestedUserEntry { parent, owner, denies_groups: None, owned };
            let one = vec![UidGidExtent { first: 0, lower_first: 5, count: 1 }];
            let entry = UsernsEntry {
                uid_map: one.clone(),
                gid_map: one,
                torpor_nested: (number != 99).then_some(nested),
            };
            images.write_one(kind::USERNS, number.into(), &entry).unwrap();
        }
        Ok(nested_users(&images, homes)?.iter().map(|user| user.number).collect())
    }

    #[test]
    fn they_come_with_those_above_them_which_come_first() {
        let users: [(u32, Option<u32>, &[u32]); 3] =
            [(5, Some(9), &[]), (9, None, &[7]), (3, Some(5), &[])];
        let homes = [home(1, 2), home(3, 7), home(9, 7), home(5, 2)];
        assert_eq!(read(&users, &homes).unwrap(), [9, 5, 3]);
        assert!(read(&[], &[home(1, 2), home(1, 7)]).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let homes = [home(1, 2), home(9, 7)];
        let wrong = |users: &[(u32, Option<u32>, &[u32])], homes: &[NsSet], why: &str| {
            let error = read(users, homes).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        // In themselves; below what is not there; from another program; above the root task.
        wrong(&[(9, Some(8), &[]), (8, Some(9), &[])], &homes, "nested too deep");
        wrong(&[(9, Some(8), &[])], &homes, "userns-8.img");
        wrong(&[(99, None, &[])], &[home(1, 2), home(99, 2)], "is not known");
        wrong(&[(4, None, &[])], &[home(4, 2), home(1, 2)], "lives above");
        // They own what is the root task's, what nobody has, and the same.
        wrong(&[(9, None, &[2])], &homes, "no task below the root task");
        wrong(&[(9, None, &[70])], &homes, "no task below the root task");
        wrong(&[(9, Some(8), &[7]), (8, None, &[7])], &homes, "another one as well");
    }
}
