//! What tasks share with each other besides their place in the tree: read of their images once, and made so.
//!
//! Each kind of thing has numbers of its own, and each of them a type: the third table of descriptors is not the
//! third of the directories.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{CoreEntry, TaskKobjIdsEntry};
use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Error, Result};
use crate::namespace::{HostSpaces, NsSet};

/// The number of a table of descriptors.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct TableNumber(u32);

/// The number of a root, a working directory and a umask that tasks may have together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct DirectoriesNumber(u32);

/// The number of an address space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct MemoryNumber(u32);

/// The number of a table of what is done on signals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct HandlersNumber(u32);

/// What a task has that another one may have as well; of one that has ended nothing is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedParts {
    /// Its table of descriptors.
    pub table: TableNumber,
    directories: DirectoriesNumber,
    memory: MemoryNumber,
    handlers: HandlersNumber,
}

impl TableNumber {
    /// The one with this number in the images.
    #[must_use]
    pub fn of(number: u32) -> Self {
        TableNumber(number)
    }

    /// The image that has what is in it.
    #[must_use]
    pub fn image(self) -> String {
        kind::FDINFO.file_name(self.0.into())
    }

    /// The number of that image.
    pub(crate) fn number(self) -> u64 {
        self.0.into()
    }
}

impl fmt::Display for TableNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl SharedParts {
    /// What a task that lives shares, and the namespaces that it lives in, of which some may be those `host` of the
    /// dumping program.
    ///
    /// # Errors
    /// If the image is missing or damaged, or lacks a number.
    pub fn read(
        images: &ImageDir,
        pid: u32,
        leader: &CoreEntry,
        host: &HostSpaces,
    ) -> Result<(Self, NsSet)> {
        let (image, ids): (Kind, TaskKobjIdsEntry) = match leader.ids {
            Some(ids) => (kind::CORE, ids),
            None => (kind::IDS, images.read_one(kind::IDS, pid.into())?),
        };
        let TaskKobjIdsEntry { vm_id, files_id, fs_id, sighand_id, .. } = ids;
        let all = [
            ("memory", vm_id),
            ("table of descriptors", files_id),
            ("set of directories", fs_id),
            ("table of signal handlers", sighand_id),
        ];
        if let Some((what, _)) = all.into_iter().find(|(_, number)| *number == 0) {
            let reason = format!("its {what} has no number");
            return Err(Error::Invalid { image: image.file_name(pid.into()), reason });
        }
        let sharing = SharedParts {
            table: TableNumber(files_id),
            directories: DirectoriesNumber(fs_id),
            memory: MemoryNumber(vm_id),
            handlers: HandlersNumber(sighand_id),
        };
        Ok((sharing, NsSet::read(&ids, host)))
    }

    /// Whether it has its descriptors together with the other; one that has ended has none.
    #[must_use]
    pub fn has_table_of(&self, other: &SharedParts) -> bool {
        self.table == other.table && self.table != TableNumber::default()
    }

    /// Whether it has its directories and its umask together with the other, likewise.
    #[must_use]
    pub fn has_directories_of(&self, other: &SharedParts) -> bool {
        self.directories == other.directories && self.directories != DirectoriesNumber::default()
    }

    /// Checks that each task, by its pid, has its memory and its signal handlers for itself: those that two
    /// processes have are in no dump, and would be two in a restore.
    ///
    /// # Errors
    /// The image of the second task that has them.
    pub fn check(all: impl Iterator<Item = (u32, SharedParts)>) -> Result<()> {
        let (mut memory, mut handlers) = (HashMap::new(), HashMap::new());
        for (pid, sharing) in all {
            let first = [
                ("memory", *memory.entry(sharing.memory).or_insert(pid)),
                ("signal handlers", *handlers.entry(sharing.handlers).or_insert(pid)),
            ];
            if let Some((what, other)) = first.into_iter().find(|(_, first)| *first != pid) {
                let image = kind::CORE.file_name(pid.into());
                let reason =
                    format!("it shares its {what} with task {other}, which is not supported");
                return Err(Error::Invalid { image, reason });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::namespace::NsKind;

    fn ids() -> TaskKobjIdsEntry {
        TaskKobjIdsEntry {
            vm_id: 1,
            files_id: 2,
            fs_id: 3,
            sighand_id: 4,
            uts_ns_id: Some(5),
            ..TaskKobjIdsEntry::default()
        }
    }

    fn images() -> (tempfile::TempDir, ImageDir) {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        (dir, images)
    }

    fn within(ids: TaskKobjIdsEntry) -> CoreEntry {
        CoreEntry { ids: Some(ids), ..CoreEntry::default() }
    }

    #[test]
    fn numbers_stand_in_the_image_of_the_leader_or_in_one_of_their_own() {
        let (_dir, images) = images();
        let host = HostSpaces::default();
        let within = SharedParts::read(&images, 7, &within(ids()), &host).unwrap();
        let missing = SharedParts::read(&images, 7, &CoreEntry::default(), &host).unwrap_err();
        assert!(missing.to_string().contains("ids-7.img"), "{missing}");
        images.write_one(kind::IDS, 7, &ids()).unwrap();
        let beside = SharedParts::read(&images, 7, &CoreEntry::default(), &host).unwrap();
        assert_eq!(beside, within);
        let (sharing, homes) = beside;
        assert_eq!((sharing.table, sharing.directories), (TableNumber(2), DirectoriesNumber(3)));
        assert_eq!(sharing.table.image(), "fdinfo-2.img");
        assert_eq!(homes.own(NsKind::Uts), Some(5));
    }

    #[test]
    fn each_has_a_number() {
        let (_dir, images) = images();
        let wrong = |ids: TaskKobjIdsEntry| {
            let host = HostSpaces::default();
            SharedParts::read(&images, 7, &within(ids), &host).unwrap_err().to_string()
        };
        let said = wrong(TaskKobjIdsEntry { files_id: 0, ..ids() });
        assert_eq!(said, "core-7.img: its table of descriptors has no number");
        let said = wrong(TaskKobjIdsEntry { vm_id: 0, ..ids() });
        assert_eq!(said, "core-7.img: its memory has no number");
        images.write_one(kind::IDS, 7, &TaskKobjIdsEntry { fs_id: 0, ..ids() }).unwrap();
        let host = HostSpaces::default();
        let said =
            SharedParts::read(&images, 7, &CoreEntry::default(), &host).unwrap_err().to_string();
        assert_eq!(said, "ids-7.img: its set of directories has no number");
    }

    #[test]
    fn memory_and_signal_handlers_are_those_of_one_task() {
        let of = |memory, handlers| SharedParts {
            memory: MemoryNumber(memory),
            handlers: HandlersNumber(handlers),
            ..SharedParts::default()
        };
        let check = |all: &[SharedParts]| SharedParts::check((7..).zip(all.iter().copied()));
        // The numbers of one kind are no numbers of another.
        check(&[of(1, 2), of(2, 1)]).unwrap();
        let said = check(&[of(1, 2), of(2, 1), of(1, 3)]).unwrap_err().to_string();
        assert_eq!(said, "core-9.img: it shares its memory with task 7, which is not supported");
        let said = check(&[of(1, 2), of(2, 2)]).unwrap_err().to_string();
        let wanted =
            "core-8.img: it shares its signal handlers with task 7, which is not supported";
        assert_eq!(said, wanted);
    }
}
