//! Which groups mounts of groups show.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use torpor_kernel::cgroup as kernel;
use torpor_policy::groups::same;

use super::assembly::Assembly;
use super::collect::{mount_id, open_beneath};
use super::mountinfo::{FromOutside, Mount};
use super::tree::Tree;
use crate::cgroup;
use crate::error::{Context, Result};

/// The group that a made file system of groups shows, of those of the tasks where it is to show no others.
pub(super) fn of_made(cx: &Assembly<'_>, mount: &Mount, shown: PathBuf) -> Result<PathBuf> {
    match cgroup::shown_by(mount) {
        Some(hierarchy) if cx.verdict.shows_own_groups(None) => own(cx, &hierarchy, &shown),
        _ => Ok(shown),
    }
}

/// The group that a mount showed, where the caller gives one above it at `path` (runc gives the group of
/// the caller): a task would see the groups of others. What a runtime gives for the groups of a container are the tasks'
/// own, whatever the images say.
///
/// # Errors
/// If these are not to be had.
pub(super) fn of_given(
    cx: &Assembly<'_>,
    (at, path): (BorrowedFd<'_>, &Path),
    mount: &Mount,
    host: &Tree,
) -> Result<Option<OwnedFd>> {
    let what = || format!("open the group for {}", mount.mountpoint.display());
    let id = mount_id(at).context(what)?;
    let on = u32::try_from(id).ok().and_then(|id| host.find(id)).map(|index| host.mount(index));
    let Some((on, hierarchy)) = on.and_then(|on| Some((on, cgroup::shown_by(on)?))) else {
        return Ok(None);
    };
    let is_own = match &mount.external {
        Some(FromOutside::Key(key)) => cx.verdict.shows_own_groups(Some(key)),
        _ => false,
    };
    if !is_own {
        let real = path.canonicalize().context(what)?;
        let given = real.strip_prefix(&on.mountpoint).map(|below| on.root.join(below));
        let below = given.ok().and_then(|given| mount.root.strip_prefix(given).ok());
        return Ok(below.and_then(|below| open_beneath(at, below, false).ok()));
    }
    let group = own(cx, &hierarchy, &mount.root)?;
    let below = group.strip_prefix(&on.root).map_err(|_| Errno::NOENT).context(what)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::open(&on.mountpoint, flags, Mode::empty()).context(what)?;
    let found = open_beneath(top.as_fd(), below, false).context(what)?;
    // Something else may be mounted upon the hierarchy.
    match mount_id(found.as_fd()).context(what)? == id {
        true => Ok(Some(found)),
        false => Err(Errno::XDEV).context(what),
    }
}

/// `shown`, if that is a group of the tasks: at or below where the caller wants them, or else that of the first one. Else that.
fn own(cx: &Assembly<'_>, hierarchy: &str, shown: &Path) -> Result<PathBuf> {
    let chosen = cx.verdict.passed.cgroups.as_ref().and_then(|roots| roots.chosen(hierarchy));
    let bound = match chosen {
        Some(chosen) => chosen.to_owned(),
        None => {
            let groups = kernel::of(cx.root.pid)?;
            let mut groups = groups.into_iter().filter(|(name, _)| same(name, hierarchy));
            groups.next().map_or_else(|| shown.to_owned(), |(_, group)| group)
        }
    };
    let climbs = shown.components().any(|part| part == Component::ParentDir);
    Ok(if !climbs && shown.starts_with(&bound) { shown.to_owned() } else { bound })
}
