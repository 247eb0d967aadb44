//! Signalfds: a set of signals. What they report are the pending signals of whoever
//! reads, so there is nothing else to keep.

use std::os::fd::OwnedFd;

use torpor_images::proto::{FdTypes, FileEntry, SignalfdEntry};
use torpor_policy::Signalfd;

use super::Found;
use super::description::set_status_flags;
use crate::error::{Context, Result};

/// Describes the file, or says that it is of another kind (`None`).
///
/// # Errors
/// Refused, if the kernel does not show its signals.
pub(crate) fn describe(found: &Found) -> Result<Option<FileEntry>> {
    if !found.is_anon("[signalfd]") {
        return Ok(None);
    }
    let sigmask = found
        .info
        .values("sigmask")
        .next()
        .and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or_else(|| found.refuse("its fdinfo shows no signals"))?;
    let sgfd = SignalfdEntry { id: found.id, flags: found.flags(), fown: found.fown, sigmask };
    Ok(Some(FileEntry { sgfd: Some(sgfd), ..found.entry(FdTypes::Signalfd) }))
}

/// Opens a description.
///
/// # Errors
/// If the kernel refuses to make one, or its status flags.
pub(crate) fn open(signalfd: &Signalfd) -> Result<OwnedFd> {
    let file = torpor_sys::event::signalfd(signalfd.signals, libc::SFD_CLOEXEC)
        .context(|| "signalfd".to_owned())?;
    set_status_flags(&file, signalfd.flags)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use crate::file::testing::{World, fdinfo};

    #[test]
    fn the_set_of_signals_comes_back() {
        let all = [(0x4000_0000_0000_0200, libc::SFD_NONBLOCK), (0, libc::SFD_CLOEXEC)];
        let files: Vec<_> =
            all.map(|(mask, flags)| torpor_sys::event::signalfd(mask, flags).unwrap()).into();
        let before: Vec<_> = files.iter().map(fdinfo).collect();
        let files = World::new().round_trip(files);
        assert_eq!(files.iter().map(fdinfo).collect::<Vec<_>>(), before);
    }
}
