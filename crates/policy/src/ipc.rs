//! IPC namespaces: their limits, and the objects in them: read of their images once, judged, and made.

use torpor_images::payload::{SHM_ALIGN, read_messages, read_semaphores, shm_len};
use torpor_images::proto::{
    IpcDescEntry, IpcMsgEntry, IpcSemEntry, IpcShmEntry, IpcVarEntry, MqueueEntry,
};
use torpor_images::{ImageDir, Reader, Result, kind};

use crate::collect::settings::Setting;

/// Where the limits of System V objects and of POSIX message queues are, below `/proc/sys`.
const SYSTEM_V: &str = "kernel";
const POSIX: &str = "fs/mqueue";
/// Bits of the mode that say what is to happen with a segment (linux/shm.h).
const SHM_DEST: u32 = 0o1000;
const SHM_LOCKED: u32 = 0o2000;

/// What is made in a namespace before there are System V objects.
#[derive(Debug)]
pub struct IpcSetup {
    /// Its limits.
    pub limits: Limits,
    /// The bytes that anybody may let a System V queue have.
    pub queue_bytes: u32,
    /// The messages that anybody may let a POSIX queue have, and how long they may be.
    pub posix: (u32, u32),
    /// Its POSIX message queues.
    pub queues: Vec<PosixQueue>,
    /// The ids that were chosen for the next message queue, semaphore set and segment.
    pub next_ids: [Option<u32>; 3],
}

impl IpcSetup {
    /// That of namespace `id`; `None` if its image is missing, without which nothing is made.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn read(images: &ImageDir, id: u64) -> Result<Option<Self>> {
        let entry = images.read_opt::<IpcVarEntry>(kind::IPC_VAR, id)?;
        Ok(entry.map(|entry| IpcSetup {
            limits: Limits::of(id, &entry),
            queue_bytes: entry.msg_ctlmnb,
            posix: (entry.mq_msg_max, entry.mq_msgsize_max),
            next_ids: [entry.msg_next_id, entry.sem_next_id, entry.shm_next_id],
            queues: entry.torpor_mqueues.into_iter().map(PosixQueue::read).collect(),
        }))
    }
}

/// A POSIX message queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PosixQueue {
    /// Its name, without the slash.
    pub name: Vec<u8>,
    /// Its permissions.
    pub mode: u32,
    /// User and group, as the tree's user namespace has them.
    pub owner: (u32, u32),
    /// The messages that it takes.
    pub max_messages: u64,
    /// How long they may be.
    pub message_size: u64,
    /// Those that wait in it: priority and text.
    pub messages: Vec<(u32, Vec<u8>)>,
}

impl PosixQueue {
    fn read(entry: MqueueEntry) -> Self {
        let messages = entry.messages.into_iter();
        PosixQueue {
            name: entry.name,
            mode: entry.mode,
            owner: (entry.uid, entry.gid),
            max_messages: entry.max_messages,
            message_size: entry.message_size,
            messages: messages.map(|message| (message.priority, message.data)).collect(),
        }
    }
}

/// What all System V objects have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its key.
    pub key: u32,
    /// Its id.
    pub id: u32,
    /// User and group, as the tree's user namespace has them.
    pub owner: (u32, u32),
    /// Those of its maker, likewise.
    pub creator: (u32, u32),
    /// Its permissions, and of segments what is to happen with them.
    pub mode: u32,
}

impl Object {
    fn read(entry: &IpcDescEntry) -> Self {
        Object {
            key: entry.key,
            id: entry.id,
            owner: (entry.uid, entry.gid),
            creator: (entry.cuid, entry.cgid),
            mode: entry.mode,
        }
    }
}

/// A System V message queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageQueue {
    /// Id, key, owners.
    pub object: Object,
    /// The bytes that it takes.
    pub bytes: u32,
    /// Those that wait in it: type and text.
    pub messages: Vec<(u64, Vec<u8>)>,
}

impl MessageQueue {
    /// Calls `each` for those of namespace `id`, one by one.
    ///
    /// # Errors
    /// A damaged image, and those of `each`.
    pub fn each<E: From<torpor_images::Error>>(
        images: &ImageDir,
        id: u64,
        mut each: impl FnMut(Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let Some(mut reader) = images.reader(kind::IPCNS_MSG, id)? else { return Ok(()) };
        while let Some(entry) = reader.next::<IpcMsgEntry>()? {
            let messages = read_messages(&mut reader, &entry)?.into_iter();
            let messages = messages.map(|(message, text)| (message.mtype, text)).collect();
            let object = Object::read(&entry.desc);
            each(MessageQueue { object, bytes: entry.qbytes, messages })?;
        }
        Ok(())
    }
}

/// A set of System V semaphores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Semaphores {
    /// Id, key, owners.
    pub object: Object,
    /// How many there are.
    pub count: u32,
    /// The value of each.
    pub values: Vec<u16>,
}

impl Semaphores {
    /// Calls `each` for the sets of namespace `id`, one by one.
    ///
    /// # Errors
    /// A damaged image, and those of `each`.
    pub fn each<E: From<torpor_images::Error>>(
        images: &ImageDir,
        id: u64,
        mut each: impl FnMut(Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let Some(mut reader) = images.reader(kind::IPCNS_SEM, id)? else { return Ok(()) };
        while let Some(entry) = reader.next::<IpcSemEntry>()? {
            let values = read_semaphores(&mut reader, &entry)?;
            each(Semaphores { object: Object::read(&entry.desc), count: entry.nsems, values })?;
        }
        Ok(())
    }
}

/// A segment of System V shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Id, key, owners.
    pub object: Object,
    /// Its size in bytes.
    pub size: u64,
    /// The flags of shmget(2) that say that it is of huge pages, and of which.
    pub huge: Option<u32>,
    /// Its content stands in a pagemap, not behind its entry.
    pub in_pagemap: bool,
}

impl Segment {
    /// Whether it stays in memory.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.object.mode & SHM_LOCKED != 0
    }

    /// Whether it is removed when its last user has left it.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.object.mode & SHM_DEST != 0
    }
}

/// The segments of a namespace.
#[derive(Debug)]
pub struct Segments {
    reader: Option<Reader>,
    /// What stands behind the last entry and was not read: content, and what pads it.
    unread: (u64, u64),
}

impl Segments {
    /// Those of namespace `id`.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn of(images: &ImageDir, id: u64) -> Result<Self> {
        Ok(Segments { reader: images.reader(kind::IPCNS_SHM, id)?, unread: (0, 0) })
    }

    /// The next one. What was not read of the content of the last is passed over.
    ///
    /// # Errors
    /// If the image is damaged.
    #[allow(clippy::should_implement_trait, reason = "it may fail")]
    pub fn next(&mut self) -> Result<Option<Segment>> {
        self.content(&mut std::io::sink())?;
        let Some(reader) = &mut self.reader else { return Ok(None) };
        let Some(entry) = reader.next::<IpcShmEntry>()? else { return Ok(None) };
        let len = shm_len(&entry);
        self.unread = (len, (SHM_ALIGN - len % SHM_ALIGN) % SHM_ALIGN);
        Ok(Some(Segment {
            object: Object::read(&entry.desc),
            size: entry.size,
            huge: entry.hugetlb_flag,
            in_pagemap: entry.in_pagemaps(),
        }))
    }

    /// Copies the content of the last one, if it stands behind its entry.
    ///
    /// # Errors
    /// A damaged image, and those of `out`.
    pub fn content(&mut self, out: &mut impl std::io::Write) -> Result<()> {
        let (len, padding) = std::mem::take(&mut self.unread);
        let Some(reader) = self.reader.as_mut().filter(|_| len > 0) else { return Ok(()) };
        reader.copy_to(len, out, "shared memory")?;
        reader.raw(padding).map(drop)
    }
}

/// The limits that a restore sets in an IPC namespace. The policy judges those that a new namespace
/// does not have by itself.
#[derive(Debug)]
pub struct Limits {
    /// Those that are set before there are objects.
    pub first: Vec<Setting>,
    /// Removes segments that nobody is attached to: set when the tasks are attached to theirs.
    pub last: Setting,
}

impl Limits {
    /// Those of namespace `id`.
    fn of(id: u64, entry: &IpcVarEntry) -> Self {
        let setting = |directory: &str, name, value| Setting {
            image: kind::IPC_VAR.file_name(id),
            directory: directory.to_owned(),
            name,
            base: directory.to_owned(),
            value,
        };
        let number = |directory, name, value: u64| setting(directory, name, value.to_string());
        let sem: Vec<String> = entry.sem_ctls.iter().map(u32::to_string).collect();
        let mut first = vec![];
        if !sem.is_empty() {
            first.push(setting(SYSTEM_V, "sem", sem.join("\t")));
        }
        first.extend([
            number(SYSTEM_V, "msgmax", entry.msg_ctlmax.into()),
            number(SYSTEM_V, "msgmnb", entry.msg_ctlmnb.into()),
            number(SYSTEM_V, "msgmni", entry.msg_ctlmni.into()),
            number(SYSTEM_V, "auto_msgmni", entry.auto_msgmni.into()),
            number(SYSTEM_V, "shmmax", entry.shm_ctlmax),
            number(SYSTEM_V, "shmall", entry.shm_ctlall),
            number(SYSTEM_V, "shmmni", entry.shm_ctlmni.into()),
            number(POSIX, "queues_max", entry.mq_queues_max.into()),
            number(POSIX, "msg_max", entry.mq_msg_max.into()),
            number(POSIX, "msgsize_max", entry.mq_msgsize_max.into()),
        ]);
        let default = |name, value: Option<u32>| value.map(|v| number(POSIX, name, v.into()));
        first.extend(default("msg_default", entry.mq_msg_default));
        first.extend(default("msgsize_default", entry.mq_msgsize_default));
        let last = number(SYSTEM_V, "shm_rmid_forced", entry.shm_rmid_forced.into());
        Limits { first, last }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Setting> {
        self.first.iter().chain([&self.last])
    }

    /// Whether a path below `/proc/sys` is that of such a limit.
    #[must_use]
    pub fn has(path: &str) -> bool {
        let whole = IpcVarEntry {
            sem_ctls: vec![0],
            mq_msg_default: Some(0),
            mq_msgsize_default: Some(0),
            ..IpcVarEntry::default()
        };
        Limits::of(0, &whole).all().any(|setting| setting.path() == path)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Contents stand behind entries, where they are not in pagemaps; a reader that does not want one passes it over.
    #[test]
    fn segments_and_their_contents() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        let entry = |id, size, in_pagemaps, mode| {
            let desc = IpcDescEntry { id, uid: 1, gid: 2, cuid: 3, cgid: 4, mode, key: 5 };
            IpcShmEntry { desc, size, in_pagemaps, hugetlb_flag: None }
        };
        let mut writer = images.writer(kind::IPCNS_SHM, 7).unwrap();
        writer.entry(&entry(10, 5, None, 0o600)).unwrap();
        writer.padded(b"first", SHM_ALIGN).unwrap();
        writer.entry(&entry(11, 4, None, 0o3600)).unwrap();
        writer.padded(b"next", SHM_ALIGN).unwrap();
        writer.entry(&entry(12, 1 << 40, Some(true), 0o600)).unwrap();
        writer.finish().unwrap();
        let mut segments = Segments::of(&images, 7).unwrap();
        let first = segments.next().unwrap().unwrap();
        let object = Object { key: 5, id: 10, owner: (1, 2), creator: (3, 4), mode: 0o600 };
        assert_eq!(first, Segment { object, size: 5, huge: None, in_pagemap: false });
        assert!(!first.is_locked() && !first.is_removed());
        let mut content = vec![];
        segments.content(&mut content).unwrap();
        segments.content(&mut content).unwrap();
        assert_eq!(content, b"first");
        let second = segments.next().unwrap().unwrap();
        assert!(second.is_locked() && second.is_removed());
        let third = segments.next().unwrap().unwrap();
        assert_eq!((third.object.id, third.in_pagemap), (12, true));
        assert_eq!(segments.next().unwrap(), None);
        assert_eq!(Segments::of(&images, 8).unwrap().next().unwrap(), None);
    }
}
