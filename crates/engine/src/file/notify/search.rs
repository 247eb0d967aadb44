//! Finds the file that the kernel knows by number and handle.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

use super::{WatchHolder, WatchedInode, has_path, own_path};
use crate::error::{Context, Result};
use crate::file::Found;
use crate::file::description::open_in;
use crate::file::found::own_pid;
use crate::file::remap::Paths;
use crate::proc;

/// How many names are looked at, where handles do not help, before the search is given up.
const AT_MOST: usize = 500_000;

/// The file, opened with `O_PATH` through a mount of the tree, by a path that leads to it.
pub(super) fn find(
    paths: &Paths<'_>,
    space: Option<u32>,
    holder: &WatchHolder,
    target: &WatchedInode,
) -> Result<Option<Found>> {
    if let Some(found) = among_open_files(paths, holder, target)? {
        return Ok(Some(found));
    }
    let places = places(paths, space, target.dev);
    if !paths.files.force_irmap
        && let Some((kind, handle)) = &target.handle
    {
        for place in &places {
            let opened =
                torpor_sys::notify::open_by_handle(place.dir.as_fd(), kind.cast_signed(), handle);
            // Of another kind of file system, or outside of what the mount shows.
            let Ok(file) = opened else { continue };
            // A file without a name is one that no task has open, or it would have been found.
            if let Some(found) = accept(paths, holder, file)?.filter(|f| f.stat.st_nlink > 0) {
                return Ok(Some(found));
            }
        }
    }
    let mut left = AT_MOST;
    for place in &places {
        if let Some(found) = walk(paths, holder, target, place, &mut left)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// A mount that shows the device, as a place to search.
struct Visible<'c> {
    root: BorrowedFd<'c>,
    mountpoint: Vec<u8>,
    dir: OwnedFd,
}

/// The visible mounts of a device; those in the namespace of the watching task first.
fn places<'p>(paths: &Paths<'p>, own: Option<u32>, dev: u32) -> Vec<Visible<'p>> {
    let mut spaces: Vec<_> = paths.mounts.spaces.iter().collect();
    spaces.sort_by_key(|space| Some(space.ns) != own);
    let mut places = Vec::new();
    for space in spaces {
        for mount in space.tree.mounts().iter().filter(|mount| mount.dev == dev) {
            let mountpoint = mount.mountpoint.as_os_str().as_encoded_bytes().to_vec();
            let id = i32::try_from(mount.id).unwrap_or(-1);
            if !paths.mounts.is_visible(id, &mount.mountpoint) {
                continue;
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            if let Ok(dir) = open_in(space.root.as_fd(), &mountpoint, flags, Mode::empty()) {
                places.push(Visible { root: space.root.as_fd(), mountpoint, dir });
            }
        }
    }
    places
}

/// What tasks have open: the only way to a file that was removed.
fn among_open_files(
    paths: &Paths<'_>,
    holder: &WatchHolder,
    target: &WatchedInode,
) -> Result<Option<Found>> {
    for (pid, fd, _) in paths.table.open_on(target.ino) {
        let path = format!("/proc/{pid}/fd/{fd}");
        let Ok(file) = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        else {
            continue;
        };
        if is(&file, target)?
            && let Some(found) = accept(paths, holder, file)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn accept(paths: &Paths<'_>, holder: &WatchHolder, file: OwnedFd) -> Result<Option<Found>> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .context(|| "read the path of a watched file".to_owned())?;
    let found =
        Found::of_path(holder.holder, file, link, (OFlags::PATH | OFlags::NOFOLLOW).bits())?;
    Ok(has_path(paths, &found)?.then_some(found))
}

/// Whether the kernel shows the same for a watch of ours on `file`.
fn is(file: &OwnedFd, target: &WatchedInode) -> Result<bool> {
    let what = || "watch a file".to_owned();
    let own = inotify::init(CreateFlags::CLOEXEC).context(what)?;
    if inotify::add_watch(&own, own_path(file).as_c_str(), WatchFlags::MOVE_SELF).is_err() {
        return Ok(false);
    }
    let info = proc::read(own_pid(), &format!("fdinfo/{}", own.as_raw_fd()))?;
    let mut lines = info.lines().filter(|line| line.starts_with("inotify "));
    Ok(lines.any(|line| WatchedInode::parse(line).as_ref() == Some(target)))
}

/// Looks at all names of a mount, those near its root first; before, at those below
/// the directories that `--irmap-scan-path` names.
fn walk(
    paths: &Paths<'_>,
    holder: &WatchHolder,
    target: &WatchedInode,
    place: &Visible<'_>,
    left: &mut usize,
) -> Result<Option<Found>> {
    let hints = paths.files.irmap_scan_paths.iter().map(|path| path.as_os_str().as_encoded_bytes());
    let mut queue: VecDeque<Vec<u8>> = hints.map(<[u8]>::to_vec).collect();
    queue.push_back(place.mountpoint.clone());
    while let Some(path) = queue.pop_front() {
        if let Some(file) = candidate(place, &path, target)?
            && let Some(found) = accept(paths, holder, file)?
        {
            return Ok(Some(found));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let Ok(dir) = open_in(place.root, &path, flags, Mode::empty()) else { continue };
        for entry in Dir::read_from(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let Some(rest) = left.checked_sub(1) else { return Ok(None) };
            *left = rest;
            let below = [path.strip_suffix(b"/").unwrap_or(&path), b"/", name].concat();
            if entry.file_type() == FileType::Directory {
                if on_device(&dir, name) {
                    queue.push_back(below);
                }
            } else if entry.ino() == target.ino
                && let Some(file) = candidate(place, &below, target)?
                && let Some(found) = accept(paths, holder, file)?
            {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

/// Whether a directory is on the same mount as the one it is in.
fn on_device(dir: &OwnedFd, name: &[u8]) -> bool {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV).is_ok()
}

fn candidate(place: &Visible<'_>, path: &[u8], target: &WatchedInode) -> Result<Option<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    let Ok(file) = open_in(place.root, path, flags, Mode::empty()) else { return Ok(None) };
    let stat = rustix::fs::statat(&file, "", AtFlags::EMPTY_PATH);
    let same = stat.is_ok_and(|stat| stat.st_ino == target.ino);
    Ok(if same && is(&file, target)? { Some(file) } else { None })
}
