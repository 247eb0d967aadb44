//! Work inside other namespaces.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::error::{Context, Error};

/// Runs `work` on a thread of its own that has entered the given namespaces
/// (any but user and pid), in the given order.
///
/// The thread unshares its file system context first: the kernel lets a task
/// enter a mount namespace only if it shares cwd and root with nobody.
///
/// # Errors
/// If a namespace cannot be entered, or what `work` returns.
pub fn run_in<T: Send, E: From<Error> + Send>(
    namespaces: &[BorrowedFd<'_>],
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            torpor_sys::ns::unshare_fs().context(|| "unshare(CLONE_FS)".to_owned())?;
            for ns in namespaces {
                rustix::thread::move_into_link_name_space(ns.as_fd(), None)
                    .context(|| format!("enter namespace {}", name_of(*ns)))?;
            }
            work()
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::Panicked("a worker thread in another namespace").into()))
    })
}

/// What the kernel calls a namespace, e.g. `net:[4026531840]`.
fn name_of(ns: BorrowedFd<'_>) -> String {
    let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", ns.as_raw_fd()));
    link.map_or_else(|_| "without a name".to_owned(), |link| link.display().to_string())
}
