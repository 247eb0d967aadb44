//! File handles, and fanotify(7), which rustix lacks.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, addr, check, syscall};

/// No file handle is longer.
const MAX_HANDLE: usize = libc::MAX_HANDLE_SZ as usize;

#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; MAX_HANDLE],
}

/// Opens a file by its handle (open_by_handle_at(2)) with `O_PATH`, through the mount
/// of `directory`, which may be an `O_PATH` descriptor itself.
///
/// # Errors
/// `ESTALE` if there is no such file any more; `EOPNOTSUPP` on file systems without
/// such handles; `EINVAL` for one that is too long.
pub fn open_by_handle(directory: BorrowedFd<'_>, kind: i32, handle: &[u8]) -> Result<OwnedFd> {
    let mut raw = FileHandle { bytes: 0, kind, handle: [0; MAX_HANDLE] };
    let room = raw.handle.get_mut(..handle.len()).ok_or(io::ErrorKind::InvalidInput)?;
    room.copy_from_slice(handle);
    raw.bytes = u32::try_from(handle.len()).unwrap_or(0);
    // The call takes no O_PATH descriptor, but the working directory; opening the
    // directory for reading could be seen by those who watch it.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: this thread ends with the closure; the others keep their directory.
            check(unsafe { libc::unshare(libc::CLONE_FS) })?;
            rustix::process::fchdir(directory)?;
            let at = u64::from(libc::AT_FDCWD.cast_unsigned());
            let flags = u64::from((libc::O_PATH | libc::O_CLOEXEC).cast_unsigned());
            let args = [at, addr(&raw const raw), flags, 0, 0, 0];
            // SAFETY: `raw` is a struct file_handle whose length is that of its content.
            let fd = unsafe { syscall(libc::SYS_open_by_handle_at, args) }?;
            // SAFETY: a new descriptor that nobody else owns.
            Ok(unsafe { OwnedFd::from_raw_fd(libc::c_int::try_from(fd).unwrap_or(-1)) })
        });
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

/// The handle of an open file, which may be an `O_PATH` descriptor: type and bytes
/// (name_to_handle_at(2)).
///
/// # Errors
/// `EOPNOTSUPP` on file systems without such handles.
pub fn handle_of(file: BorrowedFd<'_>) -> Result<(i32, Vec<u8>)> {
    let room = u32::try_from(MAX_HANDLE).unwrap_or(0);
    let mut raw = FileHandle { bytes: room, kind: 0, handle: [0; MAX_HANDLE] };
    let (mut mount, dir) = (0i32, u64::from(file.as_raw_fd().cast_unsigned()));
    let flags = u64::from(libc::AT_EMPTY_PATH.cast_unsigned());
    let args = [dir, addr(c"".as_ptr()), addr(&raw mut raw), addr(&raw mut mount), flags, 0];
    // SAFETY: `raw` is a struct file_handle with room for as much as it says, the path is
    // a C string, and `mount` an int; the call fills the first and the last.
    unsafe { syscall(libc::SYS_name_to_handle_at, args) }?;
    let len = usize::try_from(raw.bytes).unwrap_or(0).min(MAX_HANDLE);
    Ok((raw.kind, raw.handle[..len].to_vec()))
}

/// Makes a fanotify descriptor (fanotify_init(2)).
///
/// # Errors
/// `EINVAL` for unknown flags, `EPERM` without `CAP_SYS_ADMIN`.
pub fn fanotify_init(flags: u32, event_flags: u32) -> Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::fanotify_init(flags, event_flags) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds events to the mark on what `path` leads to (fanotify_mark(2)).
///
/// # Errors
/// `EINVAL` for unknown flags or events; `ENODEV` and `EXDEV` for file systems that
/// cannot be told apart.
pub fn fanotify_add(group: impl AsFd, flags: u32, mask: u64, path: &CStr) -> Result<()> {
    let (fd, flags) = (group.as_fd().as_raw_fd(), flags | libc::FAN_MARK_ADD);
    // SAFETY: `path` is a C string, and the rest are numbers.
    check(unsafe { libc::fanotify_mark(fd, flags, mask, libc::AT_FDCWD, path.as_ptr()) }).map(drop)
}

/// The length of an event without further records (`struct fanotify_event_metadata`).
pub const FANOTIFY_EVENT: usize = size_of::<libc::fanotify_event_metadata>();

/// Reads one event of a fanotify descriptor into `buffer`, which must have room for one and no
/// more, and so takes it out of the queue. Returns the file that comes with it.
///
/// # Errors
/// `EINVAL` if the event is longer; `EAGAIN` if there is none and the descriptor does not wait.
pub fn fanotify_take(group: impl AsFd, buffer: &mut [u8]) -> Result<Option<OwnedFd>> {
    let place = std::mem::offset_of!(libc::fanotify_event_metadata, fd);
    let read = rustix::io::read(group, &mut *buffer)?;
    let number = buffer[..read].get(place..place + 4).and_then(|bytes| bytes.try_into().ok());
    let number = number.map_or(libc::FAN_NOFD, libc::c_int::from_ne_bytes);
    // SAFETY: the kernel has made this descriptor for the reader of the event, unless it is
    // FAN_NOFD.
    Ok((number >= 0).then(|| unsafe { OwnedFd::from_raw_fd(number) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_file_handles() {
        assert_eq!(std::mem::offset_of!(FileHandle, handle), 8);
        assert_eq!(std::mem::size_of::<FileHandle>(), 8 + MAX_HANDLE);
    }

    #[test]
    fn a_file_is_opened_by_its_handle() {
        let open = |path: &str| {
            rustix::fs::open(path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap()
        };
        let (root, file) = (open("/dev/shm"), open("/dev/shm"));
        let Ok((kind, handle)) = handle_of(file.as_fd()) else {
            println!("left out: a_file_is_opened_by_its_handle (/dev/shm gives none)");
            return;
        };
        let again = open_by_handle(root.as_fd(), kind, &handle).unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        assert_eq!(inode(&again), inode(&file));
    }

    #[test]
    fn handles_that_are_none() {
        let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty());
        let root = root.unwrap();
        assert!(open_by_handle(root.as_fd(), 1, &[0xff; 8]).is_err());
        assert!(open_by_handle(root.as_fd(), 1, &[0; MAX_HANDLE + 1]).is_err());
    }
}
