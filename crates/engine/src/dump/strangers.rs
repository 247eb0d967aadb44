//! Processes that live in the pid namespace of a tree and are not of it, such as those of `runc exec` and nsenter(1): they
//! end with the first process of the namespace, and the images do not have them.

use crate::error::{Error, Result};
use crate::proc;

/// Names those of the namespace whose first process `root` is, each in a warning; with `strict` the first one is refused.
///
/// # Errors
/// The refusal; if the task is gone.
pub(super) fn check(root: i32, strict: bool) -> Result<()> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let space = proc::ns_inode(root, "pid")?;
    let leads = proc::status(root)?.ns_pids().last() == Some(&1);
    if !leads || space == proc::ns_inode(own, "pid")? {
        return Ok(());
    }
    let lives_there = |&pid: &i32| proc::ns_inode(pid, "pid").is_ok_and(|inode| inode == space);
    // One that has ended meanwhile is nobody's loss.
    let is_stranger = |&pid: &i32| proc::descends(pid, root) == Some(false);
    for pid in proc::processes().filter(lives_there).filter(is_stranger) {
        let object = "it lives in the pid namespace of the tree and is not of it, as after exec in a container";
        let reason = "is not kept, and ends with the namespace";
        if strict {
            return Err(Error::refused(pid, object, reason));
        }
        tracing::warn!("task {pid}: {object}: {reason}");
    }
    Ok(())
}
