//! Descriptors of `/dev/net/tun` (tuntap.rst of the kernel, linux/if_tun.h).

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{
    IFNAMSIZ, TUNGETDEVNETNS, TUNGETIFF, TUNGETSNDBUF, TUNGETVNETHDRSZ, TUNSETGROUP, TUNSETIFF,
    TUNSETIFINDEX, TUNSETOWNER, TUNSETPERSIST, TUNSETQUEUE, TUNSETSNDBUF, TUNSETVNETHDRSZ,
};

use crate::{Result, check};

/// Packets of IP.
pub const IFF_TUN: u32 = libc::IFF_TUN.cast_unsigned();
/// The device does not seem to be plugged in by the queue (Linux 6.1; ignored before).
pub const IFF_NO_CARRIER: u32 = libc::IFF_NO_CARRIER.cast_unsigned();
/// The device has several queues.
pub const IFF_MULTI_QUEUE: u32 = libc::IFF_MULTI_QUEUE.cast_unsigned();
/// A queue is made part of the device again.
const IFF_ATTACH_QUEUE: u32 = libc::IFF_ATTACH_QUEUE.cast_unsigned();
/// A queue is no part of the device for now.
pub const IFF_DETACH_QUEUE: u32 = libc::IFF_DETACH_QUEUE.cast_unsigned();
/// The device outlives its descriptors.
pub const IFF_PERSIST: u32 = libc::IFF_PERSIST.cast_unsigned();
/// No header before each packet.
pub const IFF_NO_PI: u32 = libc::IFF_NO_PI.cast_unsigned();
/// A header of virtio before each packet.
pub const IFF_VNET_HDR: u32 = libc::IFF_VNET_HDR.cast_unsigned();

/// `struct ifreq` as these requests take it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Request {
    name: [u8; IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

impl Request {
    fn new(name: &str, flags: u32) -> Result<Self> {
        let mut request = Request { name: [0; IFNAMSIZ], flags: 0, rest: [0; 22] };
        let room = request.name.get_mut(..name.len()).filter(|_| name.len() < IFNAMSIZ);
        let room = room.ok_or(std::io::ErrorKind::InvalidInput)?;
        room.copy_from_slice(name.as_bytes());
        request.flags = u16::try_from(flags).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        Ok(request)
    }

    fn pass(mut self, tun: BorrowedFd<'_>, request: libc::Ioctl) -> Result<Self> {
        // SAFETY: all requests given here read or write one struct ifreq, which this is.
        check(unsafe { libc::ioctl(tun.as_raw_fd(), request, &raw mut self) })?;
        Ok(self)
    }
}

/// The device that a descriptor is a queue of, and its flags (`IFF_*`).
///
/// # Errors
/// `EBADFD` for one that is of none.
pub fn device(tun: BorrowedFd<'_>) -> Result<(String, u32)> {
    let found = Request::new("", 0)?.pass(tun, TUNGETIFF)?;
    let name = found.name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok((String::from_utf8_lossy(name).into_owned(), found.flags.into()))
}

/// Whether a filter was attached to its device (of frames only).
#[must_use]
pub fn has_filter(tun: BorrowedFd<'_>) -> bool {
    // SAFETY: all-zero is a valid sock_fprog: no program.
    let mut program: libc::sock_fprog = unsafe { std::mem::zeroed() };
    // SAFETY: the request writes one struct sock_fprog, which `program` is. The pointer in it is
    // one of the program that attached the filter, and is not followed.
    let got = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNGETFILTER, &raw mut program) };
    check(got).is_ok() && program.len > 0
}

/// Makes a descriptor a queue of a device, which is made if it is not there.
///
/// # Errors
/// `EBUSY` if the device has all queues that it can have; `EINVAL` if it is of another kind.
pub fn attach(tun: BorrowedFd<'_>, name: &str, flags: u32) -> Result<()> {
    Request::new(name, flags)?.pass(tun, TUNSETIFF).map(drop)
}

/// Makes a queue a part of its device again, or takes it out for now.
///
/// # Errors
/// `EINVAL` if it is that already, or the device has one queue only.
pub fn enable_queue(tun: BorrowedFd<'_>, on: bool) -> Result<()> {
    let flags = if on { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE };
    Request::new("", flags)?.pass(tun, TUNSETQUEUE).map(drop)
}

/// The network namespace of a descriptor's device.
///
/// # Errors
/// `EBADFD` for a descriptor of none.
pub fn namespace(tun: BorrowedFd<'_>) -> Result<OwnedFd> {
    // SAFETY: the request takes no argument.
    let fd = check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNGETDEVNETNS, 0) })?;
    // SAFETY: the kernel has just made the descriptor; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn get(tun: BorrowedFd<'_>, request: libc::Ioctl) -> Result<i32> {
    let mut value: libc::c_int = 0;
    // SAFETY: all requests given here write one int.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}

fn set(tun: BorrowedFd<'_>, request: libc::Ioctl, value: i32) -> Result<()> {
    // SAFETY: all requests given here read one int.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), request, &raw const value) }).map(drop)
}

/// Takes a number as such.
fn tell(tun: BorrowedFd<'_>, request: libc::Ioctl, value: u32) -> Result<()> {
    // SAFETY: all requests given here take a number, no pointer.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), request, libc::c_ulong::from(value)) }).map(drop)
}

/// The index that the next device gets which the descriptor makes.
///
/// # Errors
/// `EINVAL` if it is of a device already.
pub fn set_index(tun: BorrowedFd<'_>, index: u32) -> Result<()> {
    set(tun, TUNSETIFINDEX, index.cast_signed())
}

/// Whether the device outlives its descriptors.
///
/// # Errors
/// `EBADFD` if the descriptor has no device yet.
pub fn set_persistent(tun: BorrowedFd<'_>, on: bool) -> Result<()> {
    tell(tun, TUNSETPERSIST, on.into())
}

/// The user that may attach to the device.
///
/// # Errors
/// `EINVAL` for one that this user namespace does not know.
pub fn set_owner(tun: BorrowedFd<'_>, uid: u32) -> Result<()> {
    tell(tun, TUNSETOWNER, uid)
}

/// The group that may.
///
/// # Errors
/// As [`set_owner`].
pub fn set_group(tun: BorrowedFd<'_>, gid: u32) -> Result<()> {
    tell(tun, TUNSETGROUP, gid)
}

/// How many bytes the header of virtio has.
///
/// # Errors
/// `EBADFD` if the descriptor has no device yet.
pub fn header_size(tun: BorrowedFd<'_>) -> Result<i32> {
    get(tun, TUNGETVNETHDRSZ)
}

/// Sets that.
///
/// # Errors
/// `EINVAL` for less than there is in one.
pub fn set_header_size(tun: BorrowedFd<'_>, bytes: i32) -> Result<()> {
    set(tun, TUNSETVNETHDRSZ, bytes)
}

/// How many bytes can be on their way into the kernel.
///
/// # Errors
/// `EBADFD` if the descriptor has no device yet.
pub fn send_buffer(tun: BorrowedFd<'_>) -> Result<i32> {
    get(tun, TUNGETSNDBUF)
}

/// Sets that.
///
/// # Errors
/// `EINVAL` for none.
pub fn set_send_buffer(tun: BorrowedFd<'_>, bytes: i32) -> Result<()> {
    set(tun, TUNSETSNDBUF, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_the_kernels() {
        assert_eq!(size_of::<Request>(), 40);
        assert_eq!(std::mem::offset_of!(Request, flags), 16);
        assert!(Request::new("a-name-of-sixteen", 0).is_err());
        assert!(Request::new("tun0", 1 << 16).is_err());
    }
}
