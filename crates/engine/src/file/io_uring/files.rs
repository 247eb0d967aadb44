//! Files that are registered with an instance.
//!
//! The kernel shows the path of each. That says which socket one is, but not which of several
//! descriptions of any other file: with which position, or flags. So a file is kept that the task has
//! open as well, and that nobody else has: the kernel grants a lease on such a file only. A request
//! can make a descriptor of any (`IORING_OP_FIXED_FD_INSTALL`), but each request moves the heads of
//! the ring, which the program counts for itself, and a task whose dump fails must go on as it was.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use torpor_images::proto::TorporIoUringFile;
use torpor_kernel::mountinfo::unescape;
use torpor_tracee::{Tracee, syscall};

use super::{advise, refuse};
use crate::error::{Error, Result};
use crate::file::table::FileTable;
use crate::file::{FdInfo, Found};
use crate::proc;

/// Commands of fcntl(2).
const F_GETSIG: i32 = 11;
const F_SETSIG: i32 = 10;
const F_GETOWN_EX: i32 = 16;
/// Why a file is refused, and what to do.
const ONLY_A_PATH: &str = "of which only the path is known, which is not supported";
const NOT_ALONE: &str = "of which the kernel does not say that it is open only once, and not which of \
                         several is registered";
const INSTEAD: &str = "let the program use its descriptors, or keep the only one of each file open";

/// A place, and what a link of procfs would say of the file that is there.
pub(super) type RegisteredFile = (u32, PathBuf);

/// How many places for files an instance has, if any were made, and what is registered: lines
/// `N: PATH` after that number, but for empty places.
///
/// # Errors
/// Refused, if the kernel shows them otherwise.
pub(super) fn registered(
    found: &Found,
    info: &FdInfo,
) -> Result<(Option<u32>, Vec<RegisteredFile>)> {
    let mut lines = info.rest.iter().skip_while(|line| !line.starts_with("UserFiles:"));
    let places = lines.next().and_then(|line| line.strip_prefix("UserFiles:")?.trim().parse().ok());
    let lines = lines.take_while(|line| !line.starts_with("UserBufs:"));
    let files: Option<Vec<_>> = lines.map(|line| parse(line)).collect();
    let files =
        files.ok_or_else(|| refuse(found, "its fdinfo does not show its registered files"))?;
    Ok((places.filter(|&places: &u32| places != 0), files))
}

/// A line of a registered file.
fn parse(line: &str) -> Option<RegisteredFile> {
    let (place, path) = line.trim_start().split_once(": ")?;
    let path = OsString::from_vec(unescape(path.as_bytes()));
    Some((place.parse().ok()?, path.into()))
}

/// What is registered with an instance of process `pid`, by the numbers in the images. `task` is a
/// thread of the process.
///
/// # Errors
/// Refused, if the task does not have a file open, or may not be the only one; if the task is gone.
pub(super) fn resolve(
    task: &mut Tracee,
    pid: i32,
    table: &FileTable,
    files: &[RegisteredFile],
) -> Result<Vec<TorporIoUringFile>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut open: HashMap<PathBuf, Vec<i32>> = HashMap::new();
    for fd in proc::numbers(pid, "fd")? {
        if let Ok(link) = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")) {
            open.entry(link).or_default().push(fd);
        }
    }
    let number = |(place, path): &RegisteredFile| {
        let own = open.get(path).map(Vec::as_slice).unwrap_or_default();
        let file = one_of(pid, table, own).ok_or(ONLY_A_PATH);
        let file = match own.first() {
            Some(&fd) if !is_told(task, path, fd)? => Err(NOT_ALONE),
            _ => file,
        };
        let error = |reason: &str| {
            let reason = format!("it has registered a file ({}) {reason}", path.display());
            let reason = advise(pid, &reason, Some(INSTEAD));
            Error::refused(pid, "its io_uring instance", reason)
        };
        file.map(|file| TorporIoUringFile { place: *place, file }).map_err(error)
    };
    files.iter().map(number).collect()
}

/// The number of the description that all of some descriptors have.
fn one_of(pid: i32, table: &FileTable, fds: &[i32]) -> Option<u32> {
    let mut ids = fds.iter().map(|&fd| table.id_of(pid, fd));
    let first = ids.next()??;
    ids.all(|id| id == Some(first)).then_some(first)
}

/// Whether a path tells that a registered file is what the task has open as `fd`.
fn is_told(task: &mut Tracee, path: &Path, fd: i32) -> Result<bool> {
    let path = path.as_os_str().as_bytes();
    // Of a socket there is one description.
    if path.starts_with(b"socket:[") {
        return Ok(true);
    }
    // Several files may have been removed that had one name.
    Ok(!path.ends_with(b" (deleted)") && is_open_once(task, fd)?)
}

/// Whether a file of a task is open by one description only: the kernel grants a write lease then,
/// which is given back at once. That happens in one batch, so that nothing of it stays if the dump
/// is killed meanwhile. Whoever opens the file in this moment waits for its end, and has the kernel
/// send a signal to the task: one that ends nobody.
fn is_open_once(task: &mut Tracee, fd: i32) -> Result<bool> {
    let fcntl = |command, argument| syscall::fcntl(fd.into(), command, argument);
    let mut batch = task.batch();
    // struct f_owner_ex: a type and an id.
    let owner = batch.space(8);
    let lease = batch.call(fcntl(libc::F_GETLEASE, 0));
    let signal = batch.call(fcntl(F_GETSIG, 0));
    let asked = batch.call(fcntl(F_GETOWN_EX, owner.addr.0));
    let out = batch.run()?;
    let is = |call, wanted: u64| out.result(call).is_ok_and(|got| got == wanted);
    let none = u64::from(libc::F_UNLCK.cast_unsigned());
    // To give the lease back would take the program's own one away, and who is told.
    if !is(lease, none) || !is(signal, 0) || !is(asked, 0) || out.u32_at(owner, 4) != 0 {
        return Ok(false);
    }
    let mut batch = task.batch();
    batch.must(fcntl(F_SETSIG, u64::from(libc::SIGURG.cast_unsigned())));
    let taken = batch.call(fcntl(libc::F_SETLEASE, u64::from(libc::F_WRLCK.cast_unsigned())));
    batch.call(fcntl(libc::F_SETLEASE, none));
    batch.call(fcntl(F_SETSIG, 0));
    Ok(batch.run()?.result(taken).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_links() {
        let text =
            |line: &str| parse(line).map(|(place, path)| (place, path.display().to_string()));
        assert_eq!(text("    0: /a\\040b:\\040c"), Some((0, "/a b: c".to_owned())));
        assert_eq!(text("   12: socket:[4711]"), Some((12, "socket:[4711]".to_owned())));
        assert_eq!(text("UserFiles"), None);
        assert_eq!(text("    x: /a"), None);
    }
}
