//! Limits of an IPC namespace: sysctls, which show those of the namespace that the
//! thread lives in which opens them.

use torpor_images::proto::{IpcVarEntry, MqueueEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::collect::settings::Setting;
use torpor_policy::ipc::Limits;

use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// Sysctls that choose the id of the next object.
pub(super) const NEXT_SEM: &str = "kernel/sem_next_id";
pub(super) const NEXT_MSG: &str = "kernel/msg_next_id";
pub(super) const NEXT_SHM: &str = "kernel/shm_next_id";
const RMID_FORCED: &str = "kernel/shm_rmid_forced";

fn read(name: &str) -> Result<Option<String>> {
    let path = format!("/proc/sys/{name}");
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        // A kernel without POSIX message queues.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).context(|| format!("read {path}")),
    }
}

pub(super) fn write(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/{name}");
    std::fs::write(&path, value).context(|| format!("write {value:?} to {path}"))
}

fn number<T: std::str::FromStr>(name: &str) -> Result<Option<T>> {
    let Some(text) = read(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| Error::invalid(format!("/proc/sys/{name}"), text))
}

fn needed<T: std::str::FromStr + Default>(name: &str) -> Result<T> {
    Ok(number(name)?.unwrap_or_default())
}

/// A chosen id that no object has taken yet.
fn chosen(name: &str) -> Result<Option<u32>> {
    Ok(number::<i32>(name)?.and_then(|id| u32::try_from(id).ok()))
}

/// Writes `ipcns-var-ID.img`, with the message queues.
pub(super) fn dump(images: &ImageDir, ns_id: u32, queues: Vec<MqueueEntry>) -> Result<()> {
    let sem = read("kernel/sem")?.unwrap_or_default();
    let entry = IpcVarEntry {
        sem_ctls: sem.split_ascii_whitespace().filter_map(|v| v.parse().ok()).collect(),
        msg_ctlmax: needed("kernel/msgmax")?,
        msg_ctlmnb: needed("kernel/msgmnb")?,
        msg_ctlmni: needed("kernel/msgmni")?,
        auto_msgmni: needed("kernel/auto_msgmni")?,
        shm_ctlmax: needed("kernel/shmmax")?,
        shm_ctlall: needed("kernel/shmall")?,
        shm_ctlmni: needed("kernel/shmmni")?,
        shm_rmid_forced: needed(RMID_FORCED)?,
        mq_queues_max: needed("fs/mqueue/queues_max")?,
        mq_msg_max: needed("fs/mqueue/msg_max")?,
        mq_msgsize_max: needed("fs/mqueue/msgsize_max")?,
        mq_msg_default: number("fs/mqueue/msg_default")?,
        mq_msgsize_default: number("fs/mqueue/msgsize_default")?,
        msg_next_id: chosen(NEXT_MSG)?,
        sem_next_id: chosen(NEXT_SEM)?,
        shm_next_id: chosen(NEXT_SHM)?,
        torpor_mqueues: queues,
    };
    Ok(images.write_one(kind::IPC_VAR, ns_id.into(), &entry)?)
}

/// Chooses the ids of objects to come again, after the last object of the images has been made.
pub(super) fn choose_next(ids: [Option<u32>; 3]) -> Result<()> {
    let chosen = [NEXT_MSG, NEXT_SEM, NEXT_SHM].into_iter().zip(ids);
    let mut chosen = chosen.filter_map(|(name, id)| Some((name, id?)));
    chosen.try_for_each(|(name, id)| write(name, &id.to_string()))
}

/// Sets the limits that are different in a new namespace.
pub(super) fn restore(limits: &Limits, maps: &IdMaps) -> Result<()> {
    limits.first.iter().try_for_each(|limit| set(limit, maps))
}

/// Writes a limit unless it is so already: most are, and some may not be written. Those of a
/// namespace that a user namespace owns belong to its root, whatever else the caller may do.
fn set(limit: &Setting, maps: &IdMaps) -> Result<()> {
    let (name, value) = (limit.path(), &limit.value);
    if read(&name)?.as_ref() == Some(value) {
        return Ok(());
    }
    let (Some(uid), Some(gid)) = (maps.uid_outside(0), maps.gid_outside(0)) else {
        return write(&name, value);
    };
    let path = format!("/proc/sys/{name}");
    torpor_sys::ipc::with_ids(uid, gid, || std::fs::write(&path, value))
        .context(|| format!("write {value:?} to {path}"))
}

/// Turns on the removal of segments that nobody is attached to. Their makers are gone
/// after a restore, so it must wait until the tasks are attached.
pub(super) fn finish(limits: &Limits, maps: &IdMaps) -> Result<()> {
    set(&limits.last, maps)
}
