//! POSIX message queues (mq_overview(7)) of the calling thread's IPC namespace. The kernel
//! knows them by their names without the leading slash.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, addr, syscall};

/// `struct mq_attr` of linux/mqueue.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueAttributes {
    flags: i64,
    /// Messages that it has room for.
    pub max_messages: i64,
    /// Bytes that a message can have.
    pub message_size: i64,
    /// Messages in it.
    pub messages: i64,
    reserved: [i64; 4],
}

impl QueueAttributes {
    /// Those of a new queue.
    pub fn new(max_messages: i64, message_size: i64) -> Self {
        QueueAttributes { max_messages, message_size, ..QueueAttributes::default() }
    }
}

fn number(fd: BorrowedFd<'_>) -> u64 {
    u64::from(fd.as_raw_fd().cast_unsigned())
}

/// Opens a queue, or makes one with these attributes if `flags` have `O_CREAT`; close-on-exec.
///
/// # Errors
/// See mq_open(3).
pub fn open(name: &CStr, flags: i32, mode: u32, new: Option<&QueueAttributes>) -> Result<OwnedFd> {
    let flags = u64::from((flags | libc::O_CLOEXEC).cast_unsigned());
    let new = new.map_or(0, |attributes| addr(std::ptr::from_ref(attributes)));
    let args = [addr(name.as_ptr()), flags, u64::from(mode), new, 0, 0];
    // SAFETY: the kernel reads the terminated name and, if there is an address, the
    // attributes, which have its layout.
    let fd = unsafe { syscall(libc::SYS_mq_open, args) }?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap_or(-1)) })
}

/// The attributes of a queue (mq_getattr(3)).
///
/// # Errors
/// `EBADF` if it is none.
pub fn attributes(queue: BorrowedFd<'_>) -> Result<QueueAttributes> {
    let mut now = QueueAttributes::default();
    let args = [number(queue), 0, addr(&raw mut now), 0, 0, 0];
    // SAFETY: the kernel writes one `struct mq_attr` to `now`, which has its layout.
    unsafe { syscall(libc::SYS_mq_getsetattr, args) }?;
    Ok(now)
}

/// Takes the oldest of the most urgent messages; its length and priority (mq_receive(3)).
///
/// # Errors
/// See mq_receive(3); `EMSGSIZE` if `data` is shorter than a message can be.
pub fn receive(queue: BorrowedFd<'_>, data: &mut [u8]) -> Result<(usize, u32)> {
    let mut priority = 0u32;
    let len = data.len() as u64;
    let args = [number(queue), addr(data.as_mut_ptr()), len, addr(&raw mut priority), 0, 0];
    // SAFETY: the kernel writes at most `len` bytes to `data` and one word to `priority`.
    let len = unsafe { syscall(libc::SYS_mq_timedreceive, args) }?;
    Ok((usize::try_from(len).unwrap_or(0), priority))
}

/// Sends a message (mq_send(3)).
///
/// # Errors
/// See mq_send(3).
pub fn send(queue: BorrowedFd<'_>, data: &[u8], priority: u32) -> Result<()> {
    let len = data.len() as u64;
    let args = [number(queue), addr(data.as_ptr()), len, u64::from(priority), 0, 0];
    // SAFETY: the kernel reads `len` bytes of `data`.
    unsafe { syscall(libc::SYS_mq_timedsend, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_kernel_knows_the_layout() {
        assert_eq!(size_of::<QueueAttributes>(), 64);
        let name = std::ffi::CString::new(format!("torpor-{}", std::process::id())).unwrap();
        let new = QueueAttributes::new(3, 9);
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_NONBLOCK;
        let queue = open(&name, flags, 0o600, Some(&new)).unwrap();
        // SAFETY: the kernel reads the terminated name.
        unsafe { syscall(libc::SYS_mq_unlink, [addr(name.as_ptr()), 0, 0, 0, 0, 0]) }.unwrap();
        send(queue.as_fd(), b"low", 1).unwrap();
        send(queue.as_fd(), b"high", 7).unwrap();
        let now = attributes(queue.as_fd()).unwrap();
        assert_eq!((now.max_messages, now.message_size, now.messages), (3, 9, 2));
        let mut data = [0; 9];
        assert_eq!(receive(queue.as_fd(), &mut data).unwrap(), (4, 7));
        assert_eq!(&data[..4], b"high");
    }
}
