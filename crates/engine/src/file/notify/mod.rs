//! Descriptors that report what happens to files: inotify and fanotify.
//!
//! The kernel shows what is watched by device, inode number and file handle. The dump
//! looks for a path; the image has a file of its own for each, with all that there is
//! to files whose path does not lead to them. The restore sets the watches up at the
//! very end: whatever it does with files before is nobody's event.

pub(crate) mod fanotify;
pub(crate) mod inotify;
mod overflow;
mod search;

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use torpor_images::proto::FhEntry;
use torpor_policy::WatchedHandle;

use super::description::{duplicate, lookup, same_inode};
use super::opener::{Opener, Temporary};
use super::regular::describe_as_path;
use super::remap::{DELETED, Paths};
use super::{Found, OpenFiles};
use crate::error::{Context, Error, Result};
use crate::namespace::mount::Roots;
use crate::namespace::run_in;
use crate::restore::tasks::Task;

pub(crate) use self::fanotify::{FanotifyDumper, FanotifyRestorer};
pub(crate) use self::inotify::{InotifyDumper, InotifyRestorer};

/// A descriptor whose watches are still to be set up.
#[derive(Debug)]
pub(crate) enum Sleeper {
    /// An inotify descriptor.
    Inotify(inotify::WatchesToSet),
    /// A fanotify descriptor.
    Fanotify(fanotify::MarksToAdd),
}

/// Makes a descriptor for `user`, an id of this host: the kernel counts it for whoever makes it, with all that it will
/// watch, and whoever restores has limits of its own, as a rule those of this host's root.
pub(super) fn make_for<T>(
    user: Option<u32>,
    make: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    let (own, group) = (rustix::process::geteuid(), rustix::process::getegid());
    torpor_sys::ipc::with_ids(user.unwrap_or(own.as_raw()), group.as_raw(), make)
}

impl Sleeper {
    fn targets(&mut self) -> Vec<&mut OwnedFd> {
        match self {
            Sleeper::Inotify(instance) => instance.targets().collect(),
            Sleeper::Fanotify(group) => group.targets().collect(),
        }
    }
}

/// Sets up all watches.
///
/// # Errors
/// If a watch is one too many for the user's limit, or its file cannot be watched.
pub(crate) fn wake(tasks: &[Task], mut all: Vec<Sleeper>) -> Result<()> {
    for target in all.iter_mut().flat_map(Sleeper::targets) {
        adopt(tasks, target)?;
    }
    all.into_iter().try_for_each(|sleeper| match sleeper {
        Sleeper::Inotify(instance) => instance.wake(),
        Sleeper::Fanotify(group) => group.wake(),
    })
}

/// A file without a name loses its watches as soon as somebody lets go of any of the
/// dentries that it ever had (fsnotify_inoderemove of the kernel, when `i_nlink` is 0), and
/// here each opening by a name for the moment had its own. So it is watched through what a
/// task has open, and ours is closed before.
fn adopt(tasks: &[Task], target: &mut OwnedFd) -> Result<()> {
    let what = || "look at a watched file".to_owned();
    let stat = rustix::fs::fstat(&*target).context(what)?;
    if stat.st_nlink > 0 {
        return Ok(());
    }
    for task in tasks.iter().filter(|task| !task.threads.is_empty()) {
        for fd in &task.image.fds {
            let path = format!("/proc/{}/fd/{}", task.pid, fd.fd);
            let now = rustix::fs::stat(&path).context(what)?;
            if same_inode(&now, &stat) {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                *target = rustix::fs::open(&path, flags, Mode::empty()).context(what)?;
                return Ok(());
            }
        }
    }
    Err(Error::invalid("files.img", "an unlinked file is watched that no task has open"))
}

/// What the kernel shows of a watched inode.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WatchedInode {
    /// Its number.
    ino: u64,
    /// The device of its superblock, as the kernel encodes it.
    dev: u32,
    /// Type and bytes of its file handle; none on file systems without.
    handle: Option<(u32, Vec<u8>)>,
}

/// The value of `key:value` among the words of a line.
fn field<'l>(line: &'l str, key: &str) -> Option<&'l str> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix(':'))
}

/// As [`field`], a hexadecimal number.
fn hex<T: TryFrom<u64>>(line: &str, key: &str) -> Option<T> {
    u64::from_str_radix(field(line, key)?, 16).ok()?.try_into().ok()
}

impl WatchedInode {
    /// From a line of fdinfo with `ino:` and `sdev:`, which may have `fhandle-bytes:`,
    /// `fhandle-type:` and `f_handle:`.
    fn parse(line: &str) -> Option<Self> {
        let bytes = |text: &str| -> Option<Vec<u8>> {
            let pairs = text.as_bytes().chunks(2);
            pairs.map(|p| u8::from_str_radix(std::str::from_utf8(p).ok()?, 16).ok()).collect()
        };
        let handle = match field(line, "f_handle") {
            Some(text) => Some((hex(line, "fhandle-type")?, bytes(text)?)),
            None => None,
        };
        Some(WatchedInode { ino: hex(line, "ino")?, dev: hex(line, "sdev")?, handle })
    }

    /// The handle as the images have it.
    fn entry(&self) -> FhEntry {
        /// `min_entries` of the format.
        const WORDS: usize = 16;
        let (kind, bytes) = self.handle.clone().unwrap_or_default();
        let mut handle: Vec<u64> = bytes.chunks(8).map(word).collect();
        handle.resize(handle.len().max(WORDS), 0);
        let bytes = u32::try_from(bytes.len()).unwrap_or(0);
        FhEntry { bytes, r#type: kind, handle, path: None, mnt_id: None }
    }

    /// Finds the file: its entry in the images, and handle and path.
    fn describe(
        &self,
        paths: &mut Paths<'_>,
        space: Option<u32>,
        holder: &WatchHolder,
    ) -> Result<(u32, FhEntry)> {
        let file = search::find(paths, space, holder, self)?.ok_or_else(|| {
            let reason = format!(
                "it watches inode {} of device {}:{}, and no path to that was found; \
                 --irmap-scan-path names a directory to look in",
                self.ino,
                self.dev >> 20,
                self.dev & 0xf_ffff
            );
            holder.refuse(reason)
        })?;
        let id = describe_as_path(paths, &file)?;
        let reg = paths.table.entry_mut(id).and_then(|entry| entry.reg.as_ref());
        // Of a file without a name there is the ghost of the same number.
        let path = reg.filter(|_| file.stat.st_nlink > 0).map(|reg| reg.name.clone());
        let mnt_id = paths.mounts.number_in_images(file.info.mnt_id);
        let mnt_id = mnt_id.and_then(|id| u32::try_from(id).ok());
        Ok((id, FhEntry { path, mnt_id, ..self.entry() }))
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// The descriptor that watches, for those who come back to it after all files are known.
#[derive(Debug)]
struct WatchHolder {
    task: usize,
    /// The pid of that.
    holder: i32,
    pid: i32,
    object: String,
}

impl WatchHolder {
    fn of(found: &Found) -> Self {
        let object = format!("fd {} ({})", found.fd, found.link.display());
        WatchHolder { task: found.task, holder: found.holder, pid: found.pid, object }
    }

    fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::refused(self.pid, self.object.clone(), reason)
    }
}

/// Whether a path leads to `found`, or did before it was removed.
fn has_path(paths: &Paths<'_>, found: &Found) -> Result<bool> {
    if found.link_bytes().ends_with(DELETED) && found.stat.st_nlink == 0 {
        return Ok(true);
    }
    let Some((space, _)) = paths.mounts.find(found.info.mnt_id) else { return Ok(false) };
    let now = lookup(space.root.as_fd(), found.link_bytes())?;
    Ok(now.is_some_and(|now| same_inode(&now, &found.stat)))
}

/// The file of the images that is watched, on a device, with an inode number: `id`, or a ghost.
fn file_of(temporary: &Temporary, id: Option<u32>, (dev, ino): (u32, u64)) -> Option<u32> {
    id.or_else(|| temporary.with_ghost_of(dev, ino))
}

/// Opens what is to be watched, on a device (as the kernel encodes it), with an inode number: the
/// file of the images; else, in images of CRIU, the ghost of that number, the path that goes with
/// the handle, or what the handle itself leads to.
fn open_target(
    cx: &Opener<'_>,
    files: &OpenFiles,
    id: Option<u32>,
    inode: (u32, u64),
    handle: Option<&WatchedHandle>,
) -> Result<OwnedFd> {
    let target = find_target(cx, files, id, inode, handle)?;
    let shown = match (id, handle.and_then(|handle| handle.path.as_ref())) {
        (Some(id), _) => format!("file {id}"),
        (None, Some(path)) => String::from_utf8_lossy(path).into_owned(),
        (None, None) => format!("inode {} on device {:x}", inode.1, inode.0),
    };
    cx.check_watched(&target, &shown)?;
    Ok(target)
}

fn find_target(
    cx: &Opener<'_>,
    files: &OpenFiles,
    id: Option<u32>,
    inode: (u32, u64),
    handle: Option<&WatchedHandle>,
) -> Result<OwnedFd> {
    if let Some(id) = file_of(cx.temporary, id, inode) {
        return duplicate(files.need(id)?);
    }
    let handle = handle.ok_or_else(|| Error::invalid("files.img", "a watch without a file"))?;
    if let Some(path) = &handle.path {
        return cx.roots.find((handle.mount, path), OFlags::NOFOLLOW);
    }
    let bytes = handle.bytes.as_deref();
    let bytes =
        bytes.ok_or_else(|| Error::invalid("files.img", "a file handle that is too short"))?;
    let root = cx.roots.root_of_mount(handle.mount)?;
    let file = torpor_sys::notify::open_by_handle(root, handle.kind, bytes)
        .context(|| "open a watched file by its handle".to_owned())?;
    by_path(cx.roots, handle.mount, &file)
}

/// The file that a handle has led to, opened by its path as the tasks see it. A handle leads to any
/// file of the file system, also to those that the tasks have no path to.
fn by_path(roots: &Roots, mount: i32, file: &OwnedFd) -> Result<OwnedFd> {
    let root = roots.root_of_mount(mount)?;
    let what = || "look for a path to a file that a handle leads to".to_owned();
    let stat = rustix::fs::fstat(file).context(what)?;
    let links = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let links = rustix::fs::open("/proc/self/fd", links, Mode::empty()).context(what)?;
    // The path begins at the root of the process that asks.
    let link = run_in(&[], || {
        rustix::process::fchdir(root).context(what)?;
        rustix::process::chroot(".").context(what)?;
        let number = file.as_raw_fd().to_string();
        rustix::fs::readlinkat(&links, number, Vec::new()).context(what)
    })?;
    match roots.find((mount, link.as_bytes()), OFlags::NOFOLLOW) {
        Ok(found) if same_inode(&rustix::fs::fstat(&found).context(what)?, &stat) => Ok(found),
        _ => {
            let reason = "a watched file's handle leads out of the tasks' mounts";
            Err(Error::invalid("files.img", reason))
        }
    }
}

/// A path that leads to an open file, whatever its name is.
fn own_path(file: &OwnedFd) -> CString {
    CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_fdinfo() {
        let line = "inotify wd:3 ino:9e7e sdev:800013 mask:800afce ignored_mask:0 \
                    fhandle-bytes:8 fhandle-type:1 f_handle:7e9e0000640d1b6d";
        let target = WatchedInode::parse(line).unwrap();
        assert_eq!((target.ino, target.dev), (0x9e7e, 0x80_0013));
        assert_eq!(hex::<u32>(line, "mask"), Some(0x800_afce));
        let entry = target.entry();
        assert_eq!((entry.bytes, entry.r#type, entry.handle.len()), (8, 1, 16));
        assert_eq!(entry.handle[0].to_le_bytes(), [0x7e, 0x9e, 0, 0, 0x64, 0x0d, 0x1b, 0x6d]);
        assert!(
            WatchedInode::parse("inotify wd:3 ino:9e7e sdev:800013 mask:1")
                .unwrap()
                .handle
                .is_none()
        );
        for bad in ["", "ino:1", "ino:x sdev:1", "ino:1 sdev:1 fhandle-type:1 f_handle:1g"] {
            assert!(WatchedInode::parse(bad).is_none(), "{bad}");
        }
    }
}
