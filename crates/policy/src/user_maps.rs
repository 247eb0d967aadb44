//! The ids of user namespaces, and what they are outside: read of an entry once, and checked.

use torpor_images::proto::{UidGidExtent, UsernsEntry};

/// Ids that follow each other in a user namespace and outside of it: some, and none behind the last that there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdExtent {
    first: u32,
    lower: u32,
    count: u32,
}

impl IdExtent {
    /// `count` ids, the first of which is `first` inside and `lower` outside; `None` if there are no such ids.
    #[must_use]
    pub fn new(first: u32, lower: u32, count: u32) -> Option<Self> {
        let ends = [first, lower].map(|first| first.checked_add(count));
        (count > 0 && !ends.contains(&None)).then_some(IdExtent { first, lower, count })
    }

    /// As a configuration has them, which the kernel judges: ids behind the last that there is are none.
    pub(crate) fn given(first: u32, lower: u32, count: u32) -> Self {
        IdExtent { first, lower, count }
    }

    /// The first inside, the first outside, and how many there are.
    #[must_use]
    pub fn numbers(&self) -> (u32, u32, u32) {
        (self.first, self.lower, self.count)
    }

    /// What an id outside is inside.
    #[must_use]
    pub fn inside(&self, id: u32) -> Option<u32> {
        shifted(id, self.lower, self.first, self.count)
    }

    /// What an id inside is outside.
    #[must_use]
    pub fn outside(&self, id: u32) -> Option<u32> {
        shifted(id, self.first, self.lower, self.count)
    }
}

fn shifted(id: u32, from: u32, to: u32, count: u32) -> Option<u32> {
    let offset = id.checked_sub(from).filter(|&offset| offset < count)?;
    to.checked_add(offset)
}

/// The maps of a user namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserMaps {
    /// Its users.
    pub users: Vec<IdExtent>,
    /// Its groups.
    pub groups: Vec<IdExtent>,
}

impl UserMaps {
    /// Those of an entry; `None` if the kernel would take no such maps.
    #[must_use]
    pub(crate) fn read(entry: &UsernsEntry) -> Option<Self> {
        /// Most extents that a map can have (user_namespaces(7)).
        const EXTENTS: usize = 340;
        let map = |all: &[UidGidExtent]| {
            let of = |e: &UidGidExtent| IdExtent::new(e.first, e.lower_first, e.count);
            let map: Option<Vec<IdExtent>> = all.iter().map(of).collect();
            map.filter(|map| map.len() <= EXTENTS)
        };
        Some(UserMaps { users: map(&entry.uid_map)?, groups: map(&entry.gid_map)? })
    }

    /// The entry that says so.
    #[must_use]
    pub fn entry(&self) -> UsernsEntry {
        let of = |IdExtent { first, lower: lower_first, count }: &IdExtent| UidGidExtent {
            first: *first,
            lower_first: *lower_first,
            count: *count,
        };
        let map = |all: &[IdExtent]| all.iter().map(of).collect();
        UsernsEntry { uid_map: map(&self.users), gid_map: map(&self.groups), torpor_nested: None }
    }

    /// All extents: of users (`false`) and of groups.
    pub fn extents(&self) -> impl Iterator<Item = (bool, &IdExtent)> {
        let users = self.users.iter().map(|extent| (false, extent));
        users.chain(self.groups.iter().map(|extent| (true, extent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_that_cannot_be_are_none() {
        let read = |extents: &[(u32, u32, u32)]| {
            let of = |&(first, lower_first, count)| UidGidExtent { first, lower_first, count };
            let gid_map = extents.iter().map(of).collect();
            UserMaps::read(&UsernsEntry { gid_map, ..UsernsEntry::default() })
        };
        assert_eq!(read(&[]), Some(UserMaps::default()));
        let whole = read(&[(0, 0, u32::MAX)]).map(|maps| maps.entry());
        assert_eq!(whole.map(|entry| entry.gid_map.len()), Some(1));
        for wrong in [(0, 0, 0), (1, 0, u32::MAX), (0, 1, u32::MAX)] {
            assert_eq!(read(&[(5, 5, 5), wrong]), None, "{wrong:?}");
        }
        assert!(read(&[(0, 0, 1); 340]).is_some() && read(&[(0, 0, 1); 341]).is_none());
    }

    #[test]
    fn ids_are_shifted_both_ways() {
        let extent = IdExtent::new(10, 1000, 5);
        let of = |id| extent.map(|extent| (extent.outside(id), extent.inside(id)));
        assert_eq!(of(12), Some((Some(1002), None)));
        assert_eq!(of(1004), Some((None, Some(14))));
        assert_eq!(of(15), Some((None, None)));
    }
}
