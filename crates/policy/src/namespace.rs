//! The namespaces that tasks live in.

use torpor_images::proto::TaskKobjIdsEntry;

/// A kind of namespace, by its name in `/proc/PID/ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum NsKind {
    Pid,
    Net,
    Ipc,
    Uts,
    Mnt,
    User,
    Cgroup,
    Time,
}

impl NsKind {
    /// All kinds.
    pub const ALL: [NsKind; 8] = [
        NsKind::Pid,
        NsKind::Net,
        NsKind::Ipc,
        NsKind::Uts,
        NsKind::Mnt,
        NsKind::User,
        NsKind::Cgroup,
        NsKind::Time,
    ];

    /// The name of its link in `/proc/PID/ns`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            NsKind::Pid => "pid",
            NsKind::Net => "net",
            NsKind::Ipc => "ipc",
            NsKind::Uts => "uts",
            NsKind::Mnt => "mnt",
            NsKind::User => "user",
            NsKind::Cgroup => "cgroup",
            NsKind::Time => "time",
        }
    }

    /// Its `CLONE_NEW*` flag (linux/sched.h).
    #[must_use]
    pub const fn clone_flag(self) -> u64 {
        match self {
            NsKind::Pid => 0x2000_0000,
            NsKind::Net => 0x4000_0000,
            NsKind::Ipc => 0x800_0000,
            NsKind::Uts => 0x400_0000,
            NsKind::Mnt => 0x2_0000,
            NsKind::User => 0x1000_0000,
            NsKind::Cgroup => 0x200_0000,
            NsKind::Time => 0x80,
        }
    }

    fn id_in(self, ids: &TaskKobjIdsEntry) -> Option<u32> {
        let mut ids = *ids;
        *self.field(&mut ids)
    }

    /// Sets the number of a task's namespace of this kind.
    pub fn set_id_in(self, ids: &mut TaskKobjIdsEntry, id: u32) {
        *self.field(ids) = Some(id);
    }

    fn field(self, ids: &mut TaskKobjIdsEntry) -> &mut Option<u32> {
        match self {
            NsKind::Pid => &mut ids.pid_ns_id,
            NsKind::Net => &mut ids.net_ns_id,
            NsKind::Ipc => &mut ids.ipc_ns_id,
            NsKind::Uts => &mut ids.uts_ns_id,
            NsKind::Mnt => &mut ids.mnt_ns_id,
            NsKind::User => &mut ids.user_ns_id,
            NsKind::Cgroup => &mut ids.cgroup_ns_id,
            NsKind::Time => &mut ids.time_ns_id,
        }
    }
}

/// The namespaces of the dumping program, by their numbers in the images: what a task shares with it is
/// this host's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostSpaces([Option<u32>; NsKind::ALL.len()]);

impl HostSpaces {
    /// Those that an entry has.
    #[must_use]
    pub fn of(ids: &TaskKobjIdsEntry) -> Self {
        HostSpaces(NsKind::ALL.map(|kind| kind.id_in(ids)))
    }

    /// The number of the one of a kind.
    #[must_use]
    pub fn number(&self, kind: NsKind) -> Option<u32> {
        self.0[kind as usize]
    }
}

/// A namespace that a task lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// This host's, and the number that the images have for it.
    Host(Option<u32>),
    /// One of the tasks' own, by its number.
    Own(u32),
}

/// The namespaces that a task lives in, one of each kind: read of its image once, judged, and what it
/// is put into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NsSet([Home; NsKind::ALL.len()]);

impl Default for NsSet {
    /// This host's.
    fn default() -> Self {
        NsSet([Home::Host(None); NsKind::ALL.len()])
    }
}

impl NsSet {
    /// Those of an entry. `host` are those of the dumping program: what a task shared with it is this host's.
    #[must_use]
    pub fn read(ids: &TaskKobjIdsEntry, host: &HostSpaces) -> Self {
        NsSet(NsKind::ALL.map(|kind| {
            let number = kind.id_in(ids).filter(|&number| number != 0);
            match number.filter(|_| number != host.number(kind)) {
                Some(own) => Home::Own(own),
                None => Home::Host(number),
            }
        }))
    }

    /// The one of a kind.
    #[must_use]
    pub fn get(&self, kind: NsKind) -> Home {
        self.0[kind as usize]
    }

    /// The number of the one of a kind, if it is not this host's.
    #[must_use]
    pub fn own(&self, kind: NsKind) -> Option<u32> {
        match self.get(kind) {
            Home::Own(number) => Some(number),
            Home::Host(_) => None,
        }
    }

    /// The number of the one of a kind, whoever's it is.
    #[must_use]
    pub fn number(&self, kind: NsKind) -> Option<u32> {
        match self.get(kind) {
            Home::Own(number) => Some(number),
            Home::Host(number) => number,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_the_hosts_is_the_tasks_own() {
        let host = TaskKobjIdsEntry {
            net_ns_id: Some(3),
            uts_ns_id: Some(4),
            ipc_ns_id: Some(0),
            ..TaskKobjIdsEntry::default()
        };
        let ids = TaskKobjIdsEntry {
            net_ns_id: Some(3),
            uts_ns_id: Some(5),
            // What is no number is no namespace of the tasks' own, nor is the number of another kind.
            ipc_ns_id: Some(0),
            mnt_ns_id: Some(4),
            ..TaskKobjIdsEntry::default()
        };
        let homes = NsSet::read(&ids, &HostSpaces::of(&host));
        assert_eq!(homes.get(NsKind::Net), Home::Host(Some(3)));
        assert_eq!(homes.get(NsKind::Uts), Home::Own(5));
        assert_eq!(homes.get(NsKind::Ipc), Home::Host(None));
        assert_eq!(homes.get(NsKind::Mnt), Home::Own(4));
        let numbers = |kind| (homes.own(kind), homes.number(kind));
        assert_eq!(numbers(NsKind::Net), (None, Some(3)));
        assert_eq!(numbers(NsKind::Uts), (Some(5), Some(5)));
        assert_eq!(numbers(NsKind::Time), (None, None));
    }

    #[test]
    fn each_kind_has_a_place_of_its_own() {
        for (index, kind) in NsKind::ALL.into_iter().enumerate() {
            let mut ids = TaskKobjIdsEntry::default();
            kind.set_id_in(&mut ids, 7);
            assert_eq!(HostSpaces::of(&ids).number(kind), Some(7));
            assert_eq!(kind as usize, index);
            let homes = NsSet::read(&ids, &HostSpaces::default());
            let with = NsKind::ALL.into_iter().filter(|&kind| homes.own(kind).is_some());
            assert_eq!(with.collect::<Vec<_>>(), [kind]);
        }
    }
}
