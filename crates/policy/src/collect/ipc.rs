//! IPC namespaces: what of their limits and of the objects in them is judged.

use std::collections::BTreeSet;

use torpor_images::{ImageDir, kind};

use super::checkpoint::{Checkpoint, Maps, Requests};
use super::limits::most_locked;
use super::values::Values;
use crate::error::{Error, Result};
use crate::ipc::{IpcSetup, Limits, MessageQueue, Object, PosixQueue, Segments, Semaphores};
use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::queued::{DataQueue, QueuedData};
use crate::request::Ask;
use crate::words::{BEYOND, LOCKED_MEMORY};

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    fresh: Values<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    for (_, space) in &spaces(checkpoint, passed)? {
        limits(&space.limits, fresh, all);
    }
    objects(checkpoint, passed, maps, all)
}

/// Asks for all objects.
pub(super) fn objects(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    for (id, space) in &spaces(checkpoint, passed)? {
        queues(*id, space, maps, all);
        system_v(checkpoint.images, *id, space, maps, all)?;
        segments(checkpoint.images, *id, passed, maps, all)?;
    }
    Ok(())
}

/// The namespaces in which something is made.
pub(super) fn made(checkpoint: &Checkpoint<'_>, passed: &Passed) -> impl Iterator<Item = u64> {
    // Nothing is made in one that is joined, which is the root task's.
    let root = checkpoint.tasks.first().and_then(|root| root.homes.own(NsKind::Ipc));
    let joined = root.filter(|_| passed.joins(NsKind::Ipc));
    let all = checkpoint.namespaces(NsKind::Ipc).into_iter();
    all.filter(move |id| Some(*id) != joined).map(u64::from)
}

/// What they have.
fn spaces(checkpoint: &Checkpoint<'_>, passed: &Passed) -> Result<Vec<(u64, IpcSetup)>> {
    let mut spaces = vec![];
    for id in made(checkpoint, passed) {
        spaces.extend(IpcSetup::read(checkpoint.images, id)?.map(|space| (id, space)));
    }
    Ok(spaces)
}

/// Asks for the limits that a new namespace does not have anyway.
fn limits(limits: &Limits, fresh: Values<'_>, all: &mut Requests) {
    let paths: Vec<String> = limits.all().map(super::settings::Setting::path).collect();
    for (setting, known) in limits.all().zip(fresh(&paths)) {
        if known.as_ref() != Some(&setting.value) {
            let ask = Ask::IpcLimit { name: setting.key(), value: setting.value.clone() };
            all.add(&*setting.image, None, ask);
        }
    }
}

/// POSIX message queues: what waits in them, in whose name they are, and what only `CAP_SYS_RESOURCE` gives them.
fn queues(id: u64, space: &IpcSetup, maps: &Maps, all: &mut Requests) {
    let image = kind::IPC_VAR.file_name(id);
    let queues = &space.queues;
    for PosixQueue { name, messages, .. } in queues {
        let queue = DataQueue::Posix(String::from_utf8_lossy(name).into_owned());
        let lengths = messages.iter().map(|(_, text)| text.len());
        all.add(&*image, None, Ask::Queued(QueuedData::messages(queue, lengths)));
    }
    named(&image, queues.iter().map(|queue| queue.owner), maps, all);
    let [_, messages, size] = BEYOND;
    let most = |of: fn(&PosixQueue) -> u64| queues.iter().map(of).max().unwrap_or_default();
    for (name, most, limit) in [
        (messages, most(|queue| queue.max_messages), space.posix.0),
        (size, most(|queue| queue.message_size), space.posix.1),
    ] {
        if most > limit.into() {
            all.add(&*image, None, Ask::Raise { name, to: most.into() });
        }
    }
}

/// System V message queues and semaphores, likewise.
fn system_v(
    images: &ImageDir,
    id: u64,
    space: &IpcSetup,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let [queue_size, ..] = BEYOND;
    let image = kind::IPCNS_MSG.file_name(id);
    let mut owners = vec![];
    MessageQueue::each(images, id, |queue| {
        owners.extend(owners_of(&queue.object));
        let lengths = queue.messages.iter().map(|(_, text)| text.len());
        let data = QueuedData::messages(DataQueue::SystemV(queue.object.id), lengths);
        all.add(&*image, None, Ask::Queued(data));
        if queue.bytes > space.queue_bytes {
            all.add(&*image, None, Ask::Raise { name: queue_size, to: queue.bytes.into() });
        }
        Ok::<_, Error>(())
    })?;
    named(&image, owners, maps, all);
    let mut owners = vec![];
    Semaphores::each(images, id, |set| {
        owners.extend(owners_of(&set.object));
        Ok::<_, Error>(())
    })?;
    named(&kind::IPCNS_SEM.file_name(id), owners, maps, all);
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
    let image = kind::IPCNS_SHM.file_name(id);
    let (mut owners, mut locked) = (vec![], 0_u64);
    let mut segments = Segments::of(images, id)?;
    while let Some(segment) = segments.next()? {
        owners.extend(owners_of(&segment.object));
        if segment.is_locked() || segment.huge.is_some() {
            locked = locked.saturating_add(segment.size);
        }
    }
    named(&image, owners, maps, all);
    if locked > most_locked(passed) {
        all.add(&*image, None, Ask::Raise { name: LOCKED_MEMORY, to: locked.into() });
    }
    Ok(())
}

fn owners_of(object: &Object) -> [(u32, u32); 2] {
    [object.owner, object.creator]
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
