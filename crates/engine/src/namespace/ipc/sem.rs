//! System V semaphores.

use torpor_images::payload::write_semaphores;
use torpor_images::proto::IpcSemEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::ipc::Semaphores;
use torpor_sys::ipc;

use super::{limits, make, owner, table};
use crate::error::{Context, Result};
use crate::namespace::user::IdMaps;

/// Writes `ipcns-sem-ID.img`: each set with its values.
pub(super) fn dump(images: &ImageDir, ns_id: u32, maps: &IdMaps) -> Result<()> {
    let sets = table("sem", |line| {
        Ok(IpcSemEntry { desc: line.desc("semid", maps)?, nsems: line.number("nsems")? })
    })?;
    let mut writer = images.writer(kind::IPCNS_SEM, ns_id.into())?;
    for set in sets {
        let number = usize::try_from(set.nsems).unwrap_or_default();
        let values = ipc::sem_values(set.desc.id.cast_signed(), number)
            .context(|| format!("values of semaphore set {}", set.desc.id))?;
        writer.entry(&set)?;
        write_semaphores(&mut writer, &values)?;
    }
    Ok(writer.finish()?)
}

/// Makes the sets, with their values.
pub(super) fn restore(sets: &[Semaphores], maps: &IdMaps) -> Result<()> {
    sets.iter().try_for_each(|Semaphores { object, count, values }| {
        let (key, mode) = (object.key.cast_signed(), (object.mode & 0o777).cast_signed());
        let id = make(object, limits::NEXT_SEM, maps, || ipc::sem_create(key, *count, mode))?;
        let what = || format!("semaphore set {id}");
        ipc::sem_set_values(id, values).context(what)?;
        ipc::sem_set_owner(id, owner(object, maps)?).context(what)
    })
}
