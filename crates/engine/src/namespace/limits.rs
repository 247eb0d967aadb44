//! Limits of user namespaces (`/proc/sys/user`): how many namespaces of each kind, and what else, can be
//! made in one and below it. Sandboxes set them (`bwrap --disable-userns`), so that nobody in there becomes
//! root of a namespace. They are not kept: what has them is refused, since it would come back without.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{fstat, stat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_sys::ns;

use super::ask::ask;
use crate::error::{Context, Error, Result};

/// Where the kernel shows those of the user namespace that the reader lives in.
const DIRECTORY: &str = "/proc/sys/user";
/// What a new user namespace has for each.
const NONE: &str = "2147483647";

/// Refuses limits of the user namespaces of a tree, `nested` ones and its `root`'s, and of those above that which the
/// restore makes anew or leaves out. `pid` is the root task.
///
/// # Errors
/// The refusal, also where this process has threads and cannot look; if a namespace cannot be entered.
pub(crate) fn check<'f>(
    mut nested: impl Iterator<Item = BorrowedFd<'f>>,
    root: Option<BorrowedFd<'_>>,
    pid: i32,
) -> Result<()> {
    nested.try_for_each(|file| refuse_limited(file, pid))?;
    let Some(root) = root else { return Ok(()) };
    refuse_limited(root, pid)?;
    above(root)?.iter().try_for_each(|file| refuse_limited(file.as_fd(), pid))
}

/// The user namespaces between one and this program's.
fn above(namespace: BorrowedFd<'_>) -> Result<Vec<OwnedFd>> {
    let what = || "look at a user namespace".to_owned();
    let own = stat("/proc/self/ns/user").context(what)?.st_ino;
    let mut found: Vec<OwnedFd> = Vec::new();
    // The kernel shows none above this program's.
    while let Ok(next) = ns::owner(found.last().map_or(namespace, AsFd::as_fd)) {
        if fstat(&next).context(what)?.st_ino == own {
            break;
        }
        found.push(next);
    }
    Ok(found)
}

fn refuse_limited(namespace: BorrowedFd<'_>, pid: i32) -> Result<()> {
    let Some(name) = limit_of(namespace, pid)? else { return Ok(()) };
    Err(Error::refused(
        pid,
        format!("the limit {name} of its user namespace"),
        "is not kept, and the restored sandbox would be weaker; start it without that limit (bwrap: \
         without --disable-userns)",
    ))
}

/// The first limit that a user namespace has been given, if there is one. `root` is the task that is refused if this
/// process cannot look: what is not known may not be lost in silence.
fn limit_of(namespace: BorrowedFd<'_>, root: i32) -> Result<Option<String>> {
    let name = ask(|| {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::User))?;
        Ok(first_limit()?.unwrap_or_default())
    });
    if name.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
        return Err(Error::refused(
            root,
            "the limits of its user namespace",
            "cannot be looked at by a process that has threads; dump it from one without",
        ));
    }
    let name = name.context(|| "look into a user namespace".to_owned())?;
    Ok((!name.is_empty()).then_some(name))
}

/// The same of the user namespace that the caller lives in.
fn first_limit() -> io::Result<Option<String>> {
    let all = match std::fs::read_dir(DIRECTORY) {
        // A kernel without sysctls.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        all => all?,
    };
    let mut limits = Vec::new();
    for file in all {
        let file = file?;
        if std::fs::read_to_string(file.path())?.trim() != NONE {
            limits.push(file.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(limits.into_iter().min())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What runs this has threads.
    #[test]
    fn what_cannot_be_looked_at_is_refused() {
        let namespace = std::fs::File::open("/proc/self/ns/user").unwrap();
        let error = check([namespace.as_fd()].into_iter(), None, 4711).unwrap_err();
        assert!(error.to_string().contains("by a process that has threads"), "{error}");
        check(std::iter::empty(), None, 4711).unwrap();
    }
}
