//! Files that are opened by their paths: read of their entries once, listed, and opened.

use torpor_images::proto::{FileEntry, RegFileEntry};

use crate::request::Ask;

/// What is opened by a path: for a descriptor, a mapping, as a program or a directory of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathFile {
    /// Its number in the images.
    pub id: u32,
    /// How it is found.
    pub found: FoundBy,
    /// The path, or the key of the one that the caller hands over.
    pub path: Vec<u8>,
    /// The number of the mount that the path is on; below 0 if the images have no mounts.
    pub mount: i32,
    /// The flags of open(2).
    pub flags: u32,
    /// The place in the file.
    pub position: u64,
    /// How large the file was.
    pub size: Option<u64>,
    /// Its type and permissions then.
    pub mode: Option<u32>,
    /// The build id of its program.
    pub build_id: Vec<u32>,
}

/// How a file is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundBy {
    /// Its path leads to it.
    Path,
    /// Its path leads to it on its own mount only, which another one hides.
    Mount,
    /// The caller hands it over.
    Caller,
    /// It is a message queue in the IPC namespace with this number.
    Queue(u32),
}

impl PathFile {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        entry.reg.as_ref().map(Self::read)
    }

    /// The device that a descriptor of a tun was opened by.
    #[must_use]
    pub(crate) fn of_tun(entry: &FileEntry) -> Option<Self> {
        entry.tunf.as_ref()?.torpor_reg.as_ref().map(Self::read)
    }

    /// How an entry says that it is found.
    pub(crate) fn found(entry: &RegFileEntry) -> FoundBy {
        match entry.torpor_mqueue {
            _ if entry.ext() => FoundBy::Caller,
            Some(namespace) => FoundBy::Queue(namespace),
            None if entry.torpor_hidden() => FoundBy::Mount,
            None => FoundBy::Path,
        }
    }

    fn read(entry: &RegFileEntry) -> Self {
        PathFile {
            id: entry.id,
            found: Self::found(entry),
            path: entry.name.clone(),
            mount: entry.mnt_id(),
            flags: entry.flags,
            position: entry.pos,
            size: entry.size,
            mode: entry.mode,
            build_id: entry.build_id.clone(),
        }
    }

    /// The same file, opened with other flags and at its beginning.
    #[must_use]
    pub fn opened_with(&self, flags: u32) -> Self {
        PathFile { flags, position: 0, ..self.clone() }
    }

    /// Its path, as messages have it.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }

    /// How it is listed.
    #[must_use]
    pub fn ask(&self) -> Ask {
        let hidden = self.found == FoundBy::Mount;
        Ask::Open { path: self.text(), mount: self.mount, flags: self.flags, hidden }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is hidden is listed as such, whatever it is opened for.
    #[test]
    fn what_is_hidden_is_listed_as_that() {
        for hidden in [true, false] {
            let reg = RegFileEntry { torpor_hidden: Some(hidden), ..RegFileEntry::default() };
            for file in [PathFile::read(&reg), PathFile::read(&reg).opened_with(2)] {
                assert_eq!(file.ask().is_neutral(), !hidden);
                assert_eq!(file.ask().to_string().ends_with("another mount hides"), hidden);
            }
        }
    }

    #[test]
    fn the_mount_of_a_file_is_listed() {
        let text = |mnt_id| {
            let name = b"/x".to_vec();
            PathFile::read(&RegFileEntry { name, flags: 2, mnt_id, ..Default::default() })
                .ask()
                .to_string()
        };
        assert_eq!(text(Some(7)), "opens \"/x\" (flags 0o2) on mount 7");
        assert_eq!(text(None), "opens \"/x\" (flags 0o2)");
    }

    #[test]
    fn files_are_found_in_one_way() {
        let found = |change: fn(&mut RegFileEntry)| {
            let mut entry = RegFileEntry::default();
            change(&mut entry);
            let file = PathFile::read(&entry);
            (file.found, file.mount)
        };
        assert_eq!(found(|_| ()), (FoundBy::Path, -1));
        assert_eq!(found(|entry| entry.mnt_id = Some(3)), (FoundBy::Path, 3));
        assert_eq!(found(|entry| entry.torpor_hidden = Some(true)), (FoundBy::Mount, -1));
        assert_eq!(found(|entry| entry.torpor_mqueue = Some(5)), (FoundBy::Queue(5), -1));
        let both: fn(&mut RegFileEntry) =
            |entry| (entry.ext, entry.torpor_mqueue) = (Some(true), Some(5));
        assert_eq!(found(both), (FoundBy::Caller, -1));
    }
}
