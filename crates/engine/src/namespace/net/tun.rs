//! Devices whose other side is a program: tun and tap.
//!
//! They are made persistent and without a program; its descriptors (`file/tun.rs`) become their
//! queues later, and take persistence back where there was none.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::PidfdGetfdFlags;
use torpor_images::proto::TunLinkEntry;
use torpor_kernel::netlink::NetlinkAttributes;
use torpor_policy::network::{NetDevice, Tun};
use torpor_sys::tun;

use super::link::Surroundings;
use crate::error::{Context, Error, Result};
use crate::file::found::FdInfo;
use crate::proc;

// linux/if_link.h
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PI: u16 = 4;
const IFLA_TUN_VNET_HDR: u16 = 5;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;

/// The device that makes descriptors of such devices.
const DEVICE: &str = "/dev/net/tun";

/// Describes the device `name`, of which the kernel says `data`. The calling thread is in its
/// namespace.
///
/// # Errors
/// Refused, if a program outside of the tree has a queue of it; if no queue can be opened to ask
/// for its settings.
pub(super) fn describe(
    around: &Surroundings<'_>,
    name: &str,
    data: &NetlinkAttributes<'_>,
) -> Result<TunLinkEntry> {
    let has = |kind| data.find(kind).and_then(|v| v.first()).is_some_and(|&on| on != 0);
    let flags = [
        (has(IFLA_TUN_VNET_HDR), tun::IFF_VNET_HDR),
        (has(IFLA_TUN_PERSIST), tun::IFF_PERSIST),
        (has(IFLA_TUN_MULTI_QUEUE), tun::IFF_MULTI_QUEUE),
        (!has(IFLA_TUN_PI), tun::IFF_NO_PI),
    ];
    let kind = data.find(IFLA_TUN_TYPE).and_then(|v| v.first()).copied().unwrap_or_default();
    let flags = flags.iter().filter(|(on, _)| *on).fold(u32::from(kind), |all, (_, bit)| all | bit);
    let queue = match find_queue(around, name)? {
        Some(queue) => queue,
        None => visit(name, flags).map_err(|e| unserved(around, name, e))?,
    };
    let what = || format!("settings of network device {name}");
    // None is -1.
    let id = |kind| data.word(kind).map_or(-1, u32::cast_signed);
    Ok(TunLinkEntry {
        flags,
        owner: id(IFLA_TUN_OWNER),
        group: id(IFLA_TUN_GROUP),
        vnethdr: tun::header_size(queue.as_fd()).context(what)?.cast_unsigned(),
        sndbuf: tun::send_buffer(queue.as_fd()).context(what)?.cast_unsigned(),
    })
}

/// A queue of a persistent device that nobody serves. A device that is plugged in would get
/// addresses.
fn visit(name: &str, flags: u32) -> std::io::Result<OwnedFd> {
    let file = open()?;
    tun::attach(file.as_fd(), name, flags & !tun::IFF_PERSIST | tun::IFF_NO_CARRIER)?;
    Ok(file)
}

/// Why nobody of the tree serves a device, and no other can.
fn unserved(around: &Surroundings<'_>, name: &str, error: std::io::Error) -> Error {
    if error.raw_os_error() != Some(libc::EBUSY) {
        return Error::Os { what: format!("look at network device {name}"), source: error };
    }
    let reason = format!(
        "is served by a program outside of the tree; leave it to the caller with \
         --external netdev[{name}]:{name}"
    );
    Error::refused(around.pid, format!("network device {name} (tun)"), reason)
}

/// A task's queue of the device of a name in this namespace.
fn find_queue(around: &Surroundings<'_>, name: &str) -> Result<Option<OwnedFd>> {
    let here = rustix::fs::stat("/proc/thread-self/ns/net").context(|| "own network".to_owned())?;
    for pid in (around.tasks)()? {
        for fd in proc::numbers(pid, "fd").unwrap_or_default() {
            let info = proc::read(pid, &format!("fdinfo/{fd}")).unwrap_or_default();
            if !FdInfo::parse(&info).values("iff").any(|iff| iff == name) {
                continue;
            }
            let file =
                rustix::process::pidfd_getfd(proc::pidfd(pid)?, fd, PidfdGetfdFlags::empty())
                    .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
            let space =
                tun::namespace(file.as_fd()).and_then(|space| Ok(rustix::fs::fstat(space)?));
            if space.is_ok_and(|space| space.st_ino == here.st_ino) {
                return Ok(Some(file));
            }
        }
    }
    Ok(None)
}

fn open() -> std::io::Result<OwnedFd> {
    Ok(File::options().read(true).write(true).open(DEVICE)?.into())
}

/// Makes a device in the namespace of the calling thread.
///
/// # Errors
/// If `/dev/net/tun` cannot be opened, or the name is taken.
pub(super) fn make(device: &NetDevice, settings: &Tun) -> Result<()> {
    let what = || format!("making network device {} ({}, tun)", device.name, device.index);
    let file = open().context(|| format!("open {DEVICE}"))?;
    let fd = file.as_fd();
    tun::set_index(fd, device.index).context(what)?;
    let flags = settings.flags & !tun::IFF_PERSIST | tun::IFF_NO_CARRIER;
    tun::attach(fd, &device.name, flags).context(what)?;
    tun::set_persistent(fd, true).context(what)?;
    if let Some(uid) = settings.owner {
        tun::set_owner(fd, uid).context(what)?;
    }
    if let Some(gid) = settings.group {
        tun::set_group(fd, gid).context(what)?;
    }
    configure(&file, settings).context(what)
}

/// Settings that a device has by its queues.
///
/// # Errors
/// If the queue does not take a setting.
pub(crate) fn configure(queue: &OwnedFd, settings: &Tun) -> std::io::Result<()> {
    tun::set_header_size(queue.as_fd(), settings.header)?;
    tun::set_send_buffer(queue.as_fd(), settings.send_buffer)
}
