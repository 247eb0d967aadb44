//! User namespaces below that of the root task: read of their images once, judged, and made.

use torpor_images::proto::{UidGidExtent, UsernsEntry};
use torpor_images::{ImageDir, kind};

use crate::collect::{Error, Result};
use crate::namespace::{Home, NsKind, NsSet};

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
    pub maps: [Vec<UidGidExtent>; 2],
}

/// Most extents that a map can have (user_namespaces(7)).
const EXTENTS: usize = 340;
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
    let kinds = NsKind::ALL.into_iter().filter(|kind| ![NsKind::User, NsKind::Time].contains(kind));
    let kinds: Vec<NsKind> = kinds.collect();
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

fn read(images: &ImageDir, number: u32) -> Result<NestedUser> {
    let entry: UsernsEntry = images.read_one(kind::USERNS, number.into())?;
    let Some(nested) = entry.torpor_nested else {
        return Err(invalid(number, "what it is below is not known"));
    };
    let maps = [entry.uid_map, entry.gid_map];
    for map in &maps {
        let ends = |e: &UidGidExtent| [e.first, e.lower_first].map(|f| f.checked_add(e.count));
        if map.len() > EXTENTS || map.iter().any(|e| e.count == 0 || ends(e).contains(&None)) {
            return Err(invalid(number, "its maps are impossible"));
        }
    }
    Ok(NestedUser {
        number,
        parent: nested.parent,
        owner: nested.owner,
        denies_groups: nested.denies_groups == Some(true),
        owned: nested.owned,
        maps,
    })
}

fn invalid(number: u32, reason: &str) -> Error {
    Error::Invalid { image: kind::USERNS.file_name(number.into()), reason: reason.to_owned() }
}
