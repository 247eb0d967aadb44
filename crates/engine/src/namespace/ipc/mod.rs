//! IPC namespaces: the System V objects and POSIX message queues in them, which exist
//! without any task, and their limits. Objects keep their ids and keys.
//!
//! Not kept: what `semop` with `SEM_UNDO` has promised to undo, which the dump names, and times and
//! pids of last operations.

mod filling;
mod limits;
mod mqueue;
mod msg;
mod sem;
mod shm;

use std::os::fd::AsFd;

use torpor_images::ImageDir;
use torpor_images::proto::IpcDescEntry;
use torpor_policy::ipc::Object;
use torpor_sys::ipc::ObjectOwner;

use super::{Namespaces, run_in};
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;
use crate::restore::bulk::Bulk;

pub(crate) use filling::IpcFilling;
pub(crate) use shm::{SegmentPages, attach};

/// Writes the images of a namespace, and says what pages are to be saved.
///
/// # Errors
/// Refused, if a POSIX message queue cannot be kept; if the namespace cannot be entered, or an
/// object not be read; if an image cannot be written.
pub(crate) fn dump(
    images: &ImageDir,
    maps: &IdMaps,
    spaces: &Namespaces,
    ns_id: u32,
) -> Result<Vec<shm::SegmentPages>> {
    let space = spaces.open_file(ns_id)?;
    let pid = spaces.by_id(ns_id).map_or(0, |ns| ns.pid);
    let mut queues = Vec::new();
    for (mut entry, queue) in run_in(&[space.as_fd()], || mqueue::open_all(pid, maps))? {
        mqueue::look(&mut entry, &queue)?;
        queues.push(entry);
    }
    let segments = run_in(&[space.as_fd()], || {
        limits::dump(images, ns_id, queues)?;
        sem::dump(images, ns_id, maps)?;
        msg::dump(images, ns_id, maps)?;
        shm::open_all(maps)
    })?;
    shm::dump(images, ns_id, segments)
}

/// Makes the objects of a namespace that is new.
///
/// # Errors
/// If the namespace cannot be entered; if an object cannot be made (a limit of the namespace, an
/// owner without a number in the user namespace); if the content of a segment is damaged or missing.
pub(crate) fn restore(
    bulk: Bulk<'_>,
    maps: &IdMaps,
    spaces: &Namespaces,
    ns_id: u32,
) -> Result<()> {
    let space = spaces.open_file(ns_id)?;
    let IpcFilling { setup, semaphores, queues, segments } = spaces.filling.objects(ns_id)?;
    run_in(&[space.as_fd()], || {
        limits::restore(&setup.limits, maps)?;
        mqueue::restore(&setup.queues, maps)?;
        sem::restore(semaphores, maps)?;
        msg::restore(queues, maps)?;
        shm::restore(bulk, ns_id, segments, maps)?;
        limits::choose_next(setup.next_ids)
    })
}

/// When all tasks are attached to their segments: removes those that were to be
/// removed when the last task detaches.
///
/// # Errors
/// If the namespace cannot be entered, a segment cannot be removed, or a limit cannot be set.
pub(crate) fn finish(maps: &IdMaps, spaces: &Namespaces, ns_id: u32) -> Result<()> {
    let space = spaces.open_file(ns_id)?;
    let filling = spaces.filling.objects(ns_id)?;
    run_in(&[space.as_fd()], || {
        shm::remove(&filling.segments)?;
        limits::finish(&filling.setup.limits, maps)
    })
}

/// A line of a table in `/proc/sysvipc`, by the names of its columns.
struct TableRow<'t>(Vec<(&'t str, &'t str)>);

impl TableRow<'_> {
    /// The number in a column.
    fn number<T: TryFrom<i64>>(&self, column: &str) -> Result<T> {
        let radix = if column == "perms" { 8 } else { 10 };
        self.0
            .iter()
            .find(|(name, _)| *name == column)
            .and_then(|(_, value)| i64::from_str_radix(value, radix).ok())
            .and_then(|value| T::try_from(value).ok())
            .ok_or_else(|| Error::invalid("/proc/sysvipc", format!("no column {column}")))
    }

    /// Key, id, owners and mode; `id` is the name of the column that has it.
    fn desc(&self, id: &str, maps: &IdMaps) -> Result<IpcDescEntry> {
        let number: i32 = self.number(id)?;
        let user = |column| {
            let uid = self.number(column)?;
            maps.uid_inside(uid).ok_or_else(|| unmapped(number, column, uid))
        };
        let group = |column| {
            let gid = self.number(column)?;
            maps.gid_inside(gid).ok_or_else(|| unmapped(number, column, gid))
        };
        Ok(IpcDescEntry {
            key: self.number::<i32>("key")?.cast_unsigned(),
            uid: user("uid")?,
            gid: group("gid")?,
            cuid: user("cuid")?,
            cgid: group("cgid")?,
            mode: self.number("perms")?,
            id: number.cast_unsigned(),
        })
    }
}

fn unmapped(id: i32, column: &str, owner: u32) -> Error {
    let reason = format!("its {column} {owner} is not mapped in the user namespace of the tree");
    Error::invalid(format!("System V object {id}"), reason)
}

/// Reads a table of the calling thread's namespace.
fn table<T>(name: &str, each: impl Fn(&TableRow<'_>) -> Result<T>) -> Result<Vec<T>> {
    let path = format!("/proc/sysvipc/{name}");
    let text = std::fs::read_to_string(&path).context(|| format!("read {path}"))?;
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let columns: Vec<&str> = lines.next().into_iter().flatten().collect();
    lines.map(|line| each(&TableRow(columns.iter().copied().zip(line).collect()))).collect()
}

/// Owner and mode as the kernel of the host takes them.
fn owner(object: &Object, maps: &IdMaps) -> Result<ObjectOwner> {
    let (uid, gid) = here(object.owner, maps)?;
    Ok(ObjectOwner { uid, gid, mode: object.mode })
}

/// A user and a group as the kernel of the host takes them.
fn here((uid, gid): (u32, u32), maps: &IdMaps) -> Result<(u32, u32)> {
    Ok((outside(uid, maps.uid_outside(uid))?, outside(gid, maps.gid_outside(gid))?))
}

fn outside(id: u32, mapped: Option<u32>) -> Result<u32> {
    mapped.ok_or_else(|| Error::invalid("ipcns", format!("owner {id} is not mapped")))
}

/// Makes an object with its id: the kernel takes it from a sysctl, which it then
/// forgets. `make` is called as the object's creator.
fn make(
    object: &Object,
    next_id: &str,
    maps: &IdMaps,
    make: impl FnOnce() -> std::io::Result<i32>,
) -> Result<i32> {
    let what = || format!("making System V object {} with key {:#x}", object.id, object.key);
    let id = i32::try_from(object.id).map_err(|_| Error::invalid("ipcns", what()))?;
    limits::write(next_id, &id.to_string())?;
    let (uid, gid) = here(object.creator, maps)?;
    let made = torpor_sys::ipc::with_ids(uid, gid, make).context(what)?;
    if made == id {
        Ok(id)
    } else {
        Err(Error::invalid("ipcns", format!("{}: the kernel chose id {made}", what())))
    }
}

#[cfg(test)]
mod tests;
