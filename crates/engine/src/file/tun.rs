//! Descriptors of `/dev/net/tun`: queues of network devices, or of none yet.
//!
//! What waits in a queue to be read is not kept, with a warning: it is on its way, as on a wire.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use torpor_images::proto::{FdTypes, FileEntry, TunfileEntry};
use torpor_policy::TunFile;
use torpor_policy::network::Tun;
use torpor_sys::tun;

use super::description::{is_tun, open_flags};
use super::opener::Opener;
use super::remap::Paths;
use super::{Found, regular};
use crate::error::{Context, Error, Result};
use crate::namespace::Namespaces;
use crate::namespace::net::configure_tun;

/// Describes the file, or says that it is of another kind (`None`). `home` is the network
/// namespace of its task.
///
/// # Errors
/// Refused, if its device is not of the tree's own network namespaces, or something of it is not
/// kept; as [`regular::entry`], for its path.
pub(crate) fn describe(
    spaces: &Namespaces,
    paths: &mut Paths<'_>,
    home: Option<u32>,
    found: &Found,
) -> Result<Option<FileEntry>> {
    if !is_tun(&found.stat) || found.is_path_only() {
        return Ok(None);
    }
    let mut tunf = TunfileEntry { id: found.id, ns_id: home, ..TunfileEntry::default() };
    match tun::device(found.file.as_fd()) {
        Ok((name, flags)) => {
            tunf.ns_id = Some(home_of(spaces, found, &name)?);
            tunf.detached = (flags & tun::IFF_DETACH_QUEUE != 0).then_some(true);
            check_left_out(paths.strict, found)?;
            tunf.netdev = Some(name);
        }
        // A queue of no device yet.
        Err(e) if e.raw_os_error() == Some(libc::EBADFD) => {}
        Err(e) => return Err(e).context(|| format!("device of {}", found.object())),
    }
    tunf.torpor_reg = Some(regular::entry(paths, found, found.id)?);
    Ok(Some(FileEntry { tunf: Some(tunf), ..found.entry(FdTypes::Tunf) }))
}

/// What is on its way in a queue, and what the kernel does not show.
fn check_left_out(strict: bool, found: &Found) -> Result<()> {
    let mut waits = [PollFd::new(&found.file, PollFlags::IN)];
    rustix::event::poll(&mut waits, Some(&Timespec::default())).context(|| "poll".to_owned())?;
    if waits[0].revents().contains(PollFlags::IN) {
        found.leave_out(strict, "packets that wait in its queue to be read are not kept")?;
    }
    if tun::has_filter(found.file.as_fd()) {
        found.leave_out(strict, "the filter of its device (TUNATTACHFILTER) is not kept")?;
    }
    Ok(())
}

/// The network namespace of the device.
fn home_of(spaces: &Namespaces, found: &Found, name: &str) -> Result<u32> {
    let space = tun::namespace(found.file.as_fd()).context(|| format!("namespace of {name}"))?;
    let inode = rustix::fs::fstat(&space).context(|| format!("namespace of {name}"))?.st_ino;
    let home = spaces.by_inode(inode).filter(|ns| !ns.is_host);
    home.map(|ns| ns.id).ok_or_else(|| {
        found.refuse(format!(
            "its network device {name} is not in a network namespace of the tree's own, so it is \
             not saved; run the program in one"
        ))
    })
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct TunRestorer {
    /// The settings of their devices, by the numbers of the open files.
    devices: HashMap<u32, Tun>,
}

impl TunRestorer {
    /// Takes note of the settings of devices, by the numbers of the open files.
    pub(crate) fn load(&mut self, devices: HashMap<u32, Tun>) {
        self.devices = devices;
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If its path leads to something else; if its network device is not there or refuses a queue.
    pub(crate) fn open(&self, cx: &mut Opener<'_>, id: u32, of: &TunFile) -> Result<OwnedFd> {
        let device = &of.path;
        let place = regular::open(cx, &device.opened_with(OFlags::PATH.bits()))?;
        let stat = rustix::fs::fstat(&place).context(|| "fstat".to_owned())?;
        if !is_tun(&stat) {
            return Err(Error::invalid(device.text(), "is not the device tun here"));
        }
        let home = of.network.unwrap_or(0);
        let device_of_it = of.device.as_ref().zip(self.devices.get(&id));
        // The namespace that it is opened in is its own.
        cx.spaces.in_netns(home, || {
            let file = cx.roots.open_limited_at_home(&place, open_flags(device.flags))?;
            if let Some((name, settings)) = device_of_it {
                let what = || format!("queue of network device {name}");
                attach(&file, name, settings, of.detached).context(what)?;
            }
            Ok(file)
        })
    }
}

/// Makes a descriptor the queue that it was.
fn attach(file: &OwnedFd, name: &str, settings: &Tun, detached: bool) -> std::io::Result<()> {
    let fd = file.as_fd();
    tun::attach(fd, name, settings.flags & !tun::IFF_PERSIST)?;
    configure_tun(file, settings)?;
    // It was persistent as long as no descriptor held it.
    tun::set_persistent(fd, settings.flags & tun::IFF_PERSIST != 0)?;
    if detached {
        tun::enable_queue(fd, false)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::Permissions;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, FileType, Mode};
    use torpor_images::proto::RegFileEntry;
    use torpor_images::{ImageDir, kind};

    use super::*;
    use crate::file::testing::World;
    use crate::restore::Restore;

    /// As with every other device.
    #[test]
    fn it_is_opened_with_no_more_rights_than_are_given() {
        let world = World::new();
        std::fs::set_permissions(world.dir.path(), Permissions::from_mode(0o755)).unwrap();
        let path = world.path("tun");
        let device = rustix::fs::makedev(10, 200);
        rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::RUSR, device).unwrap();
        let name = path.as_os_str().as_bytes().to_vec();
        let torpor_reg = Some(RegFileEntry { id: 5, name, ..RegFileEntry::default() });
        let tunf = Some(TunfileEntry { id: 5, torpor_reg, ..TunfileEntry::default() });
        let entry = FileEntry { id: 5, r#type: FdTypes::Tunf.into(), tunf, ..FileEntry::default() };
        let images = ImageDir::create(&world.opts.images_dir).unwrap();
        images.write_one(kind::FILES, 0, &entry).unwrap();
        let mut cx = Restore::into_this_process(&world.opts).unwrap();
        cx.roots.limit_to_user(65534, (65534, vec![]));
        let error = cx.open_all(&[5]).unwrap_err().to_string();
        assert!(error.contains("no more rights than --files-as gives"), "{error}");
    }
}
