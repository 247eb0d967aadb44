//! IPC namespaces: their limits, and the objects in them.

use std::collections::BTreeSet;

use torpor_images::payload::{SHM_ALIGN, read_messages, read_semaphores, shm_len};
use torpor_images::proto::{
    IpcDescEntry, IpcMsgEntry, IpcSemEntry, IpcShmEntry, IpcVarEntry, MqueueEntry,
};
use torpor_images::{ImageDir, kind};

use super::limits::{LOCKED_MEMORY, most_locked};
use super::settings::Setting;
use super::{Checkpoint, Maps, Requests, Result, Values};
use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::request::{Ask, Word};

/// Where the limits of System V objects and of POSIX message queues are, below `/proc/sys`.
const SYSTEM_V: &str = "kernel";
const POSIX: &str = "fs/mqueue";
/// The bit of a segment's mode that says that its memory is locked (linux/shm.h).
const SHM_LOCKED: u32 = 0o2000;
/// The fields of msgctl(2) and mq_getattr(3) that only `CAP_SYS_RESOURCE` raises above a limit.
pub(super) const BEYOND: [Word; 3] = ["msg_qbytes", "mq_maxmsg", "mq_msgsize"];

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
    #[must_use]
    pub fn of(id: u64, entry: &IpcVarEntry) -> Self {
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

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    fresh: Values<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    for (id, entry) in &spaces(checkpoint, passed)? {
        limits(&Limits::of(*id, entry), fresh, all);
        segments(checkpoint.images, *id, passed, maps, all)?;
    }
    objects_and_queues(checkpoint, passed, maps, all)
}

/// Asks for the objects but shared memory, which may be large.
pub(super) fn objects_and_queues(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    for (id, entry) in &spaces(checkpoint, passed)? {
        queues(*id, entry, maps, all);
        objects(checkpoint.images, *id, entry, maps, all)?;
    }
    Ok(())
}

/// The namespaces in which something is made.
fn spaces(checkpoint: &Checkpoint<'_>, passed: &Passed) -> Result<Vec<(u64, IpcVarEntry)>> {
    // Nothing is made in one that is joined.
    if passed.joined.iter().any(|kind| kind == NsKind::Ipc.name()) {
        return Ok(vec![]);
    }
    let mut spaces = vec![];
    for id in checkpoint.namespaces(NsKind::Ipc).into_iter().map(u64::from) {
        // Without it nothing is made.
        spaces.extend(checkpoint.images.read_opt(kind::IPC_VAR, id)?.map(|entry| (id, entry)));
    }
    Ok(spaces)
}

/// Asks for the limits that a new namespace does not have anyway.
fn limits(limits: &Limits, fresh: Values<'_>, all: &mut Requests) {
    let paths: Vec<String> = limits.all().map(Setting::path).collect();
    for (setting, known) in limits.all().zip(fresh(&paths)) {
        if known.as_ref() != Some(&setting.value) {
            let ask = Ask::IpcLimit { name: setting.key(), value: setting.value.clone() };
            all.add(&*setting.image, None, ask);
        }
    }
}

/// POSIX message queues: in whose name they are, and what only `CAP_SYS_RESOURCE` gives them.
fn queues(id: u64, entry: &IpcVarEntry, maps: &Maps, all: &mut Requests) {
    let image = kind::IPC_VAR.file_name(id);
    let queues = &entry.torpor_mqueues;
    let owners = queues.iter().map(|queue| (queue.uid, queue.gid));
    named(&image, owners, maps, all);
    let [_, messages, size] = BEYOND;
    let most = |of: fn(&MqueueEntry) -> u64| queues.iter().map(of).max().unwrap_or_default();
    for (name, most, limit) in [
        (messages, most(|queue| queue.max_messages), entry.mq_msg_max),
        (size, most(|queue| queue.message_size), entry.mq_msgsize_max),
    ] {
        if most > limit.into() {
            all.add(&*image, None, Ask::Raise { name, to: most.into() });
        }
    }
}

/// System V message queues and semaphores, likewise.
fn objects(
    images: &ImageDir,
    id: u64,
    entry: &IpcVarEntry,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let [queue_size, ..] = BEYOND;
    if let Some(mut reader) = images.reader(kind::IPCNS_MSG, id)? {
        let image = kind::IPCNS_MSG.file_name(id);
        let mut owners = vec![];
        while let Some(queue) = reader.next::<IpcMsgEntry>()? {
            read_messages(&mut reader, &queue)?;
            owners.extend(owners_of(&queue.desc));
            if queue.qbytes > entry.msg_ctlmnb {
                let ask = Ask::Raise { name: queue_size, to: queue.qbytes.into() };
                all.add(&*image, None, ask);
            }
        }
        named(&image, owners, maps, all);
    }
    if let Some(mut reader) = images.reader(kind::IPCNS_SEM, id)? {
        let mut owners = vec![];
        while let Some(set) = reader.next::<IpcSemEntry>()? {
            read_semaphores(&mut reader, &set)?;
            owners.extend(owners_of(&set.desc));
        }
        named(&kind::IPCNS_SEM.file_name(id), owners, maps, all);
    }
    Ok(())
}

/// Shared memory: in whose name it is, and whether more of it stays in memory than anybody may lock.
fn segments(
    images: &ImageDir,
    id: u64,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let Some(mut reader) = images.reader(kind::IPCNS_SHM, id)? else { return Ok(()) };
    let image = kind::IPCNS_SHM.file_name(id);
    let (mut owners, mut locked) = (vec![], 0_u64);
    while let Some(segment) = reader.next::<IpcShmEntry>()? {
        let len = shm_len(&segment);
        let padded = len.saturating_add((SHM_ALIGN - len % SHM_ALIGN) % SHM_ALIGN);
        reader.copy_to(padded, &mut std::io::sink(), "shared memory")?;
        owners.extend(owners_of(&segment.desc));
        if segment.desc.mode & SHM_LOCKED != 0 || segment.hugetlb_flag.is_some() {
            locked = locked.saturating_add(segment.size);
        }
    }
    named(&image, owners, maps, all);
    if locked > most_locked(passed) {
        all.add(&*image, None, Ask::Raise { name: LOCKED_MEMORY, to: locked.into() });
    }
    Ok(())
}

fn owners_of(desc: &IpcDescEntry) -> [(u32, u32); 2] {
    [(desc.uid, desc.gid), (desc.cuid, desc.cgid)]
}

/// Asks for the users and groups in whose name objects are: the restore sets them, whatever the
/// tasks may do.
fn named(
    image: &str,
    owners: impl IntoIterator<Item = (u32, u32)>,
    maps: &Maps,
    all: &mut Requests,
) {
    let (users, groups): (BTreeSet<u32>, BTreeSet<u32>) = owners.into_iter().unzip();
    users.into_iter().for_each(|id| all.add(image, None, Ask::User(maps.user(id))));
    groups.into_iter().for_each(|id| all.add(image, None, Ask::Group(maps.group(id))));
}
