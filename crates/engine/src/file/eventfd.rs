//! Eventfds: a counter.

use std::os::fd::OwnedFd;

use rustix::event::EventfdFlags;
use torpor_images::proto::{EventfdFileEntry, FdTypes, FileEntry};
use torpor_policy::Eventfd;

use super::description::set_status_flags;
use super::{FdInfo, Found};
use crate::error::{Context, Result};

/// The dump half.
#[derive(Debug, Default)]
pub(crate) struct EventfdDumper {
    /// It was said that the kernel tells too little.
    warned: bool,
}

impl EventfdDumper {
    /// Whether a read takes 1 from the counter (`EFD_SEMAPHORE`), which kernels tell since 6.5.
    fn is_semaphore(&mut self, found: &Found) -> bool {
        let told = found.info.values("eventfd-semaphore").next();
        if told.is_none() && !self.warned {
            tracing::warn!(
                "this kernel does not tell which eventfds are semaphores; they are restored as counters"
            );
            self.warned = true;
        }
        told == Some("1")
    }
}

impl EventfdDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the kernel does not show its count.
    pub(crate) fn describe(&mut self, found: &Found) -> Result<Option<FileEntry>> {
        if !found.is_anon("[eventfd]") {
            return Ok(None);
        }
        let counter =
            count(&found.info).ok_or_else(|| found.refuse("its fdinfo shows no count"))?;
        let efd = EventfdFileEntry {
            id: found.id,
            flags: found.flags(),
            fown: found.fown,
            counter,
            torpor_semaphore: self.is_semaphore(found).then_some(true),
        };
        Ok(Some(FileEntry { efd: Some(efd), ..found.entry(FdTypes::Eventfd) }))
    }
}

/// What `fdinfo` says that an eventfd has counted.
fn count(info: &FdInfo) -> Option<u64> {
    let text = info.values("eventfd-count").next()?;
    u64::from_str_radix(text, 16).ok()
}

/// Opens a description.
///
/// # Errors
/// If the kernel refuses to make one, its count, or its status flags.
pub(crate) fn open(eventfd: &Eventfd) -> Result<OwnedFd> {
    let kind = if eventfd.semaphore { EventfdFlags::SEMAPHORE } else { EventfdFlags::empty() };
    let file = rustix::event::eventfd(0, kind | EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .context(|| "eventfd".to_owned())?;
    // eventfd(2) takes 32 bits only.
    if eventfd.count > 0 {
        rustix::io::write(&file, &eventfd.count.to_ne_bytes())
            .context(|| "write to an eventfd".to_owned())?;
    }
    set_status_flags(&file, eventfd.flags)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::testing::{World, fdinfo};

    #[test]
    fn counters_come_back() {
        let semaphore = EventfdFlags::SEMAPHORE.bits();
        let all = [(7, semaphore), (0, 0), (u64::MAX - 1, EventfdFlags::NONBLOCK.bits())];
        let files: Vec<_> = all
            .map(|(counter, flags)| {
                let file =
                    rustix::event::eventfd(0, EventfdFlags::from_bits_retain(flags)).unwrap();
                rustix::io::write(&file, &u64::to_ne_bytes(counter)).unwrap();
                file
            })
            .into();
        let before: Vec<_> = files.iter().map(fdinfo).collect();
        let files = World::new().round_trip(files);
        assert_eq!(files.iter().map(fdinfo).collect::<Vec<_>>(), before);
        let mut value = [0; 8];
        rustix::io::read(&files[0], &mut value).unwrap();
        assert_eq!(u64::from_ne_bytes(value), 1);
    }
}
