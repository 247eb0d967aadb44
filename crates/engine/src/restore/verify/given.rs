//! What the caller has handed over: it is where the images name it, and nowhere else.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::Stat;
use torpor_policy::{FileKey, OpenFile, Terminal};
use torpor_sys::kcmp::{Object, kcmp};

use super::files::Opened;
use super::wrong;
use crate::error::{Context, Result};
use crate::file::description::same_inode;
use crate::file::ext;

/// Compares all open files with those that were handed over.
///
/// # Errors
/// One that is another than the caller has given for it, or one that is given though the images do not name it.
pub(super) fn check(opened: &Opened<'_>, terminals: &HashMap<u32, Terminal>) -> Result<()> {
    if opened.given.is_empty() {
        return Ok(());
    }
    let terminals: Vec<Terminal> = terminals.values().cloned().collect();
    for (&id, described) in opened.described {
        let Some(file) = opened.files.get(id) else { continue };
        // A FIFO is opened by a path that is described by itself.
        let path = described.fifo().and_then(|fifo| opened.described.get(&fifo.path));
        let name = FileKey::of(path.unwrap_or(described), &terminals);
        let given = name.and_then(|name| ext::inherited(opened.given, &name));
        match given {
            Some(given) if !is_as(file, given)? => {
                return Err(wrong(format!("file {id} is not the one that was handed over for it")));
            }
            Some(_) => {}
            None => is_own(opened, id, file)?,
        }
    }
    Ok(())
}

/// Whether the caller has handed over a file, which is no terminal.
pub(super) fn is_given(opened: &Opened<'_>, described: &OpenFile) -> bool {
    let name = FileKey::of(described, &[]);
    name.is_some_and(|name| ext::inherited(opened.given, &name).is_some())
}

/// Whether a file is what the caller gave, or that of the tasks in place of a null device.
fn is_as(file: BorrowedFd<'_>, given: BorrowedFd<'_>) -> Result<bool> {
    let stat =
        |file| rustix::fs::fstat(file).context(|| "fstat of what was handed over".to_owned());
    let (file, given): (Stat, Stat) = (stat(file)?, stat(given)?);
    Ok(same_inode(&file, &given) || ext::is_null(&file) && ext::is_null(&given))
}

/// What nobody gave for a file of the images is no open file of the caller's.
fn is_own(opened: &Opened<'_>, id: u32, file: BorrowedFd<'_>) -> Result<()> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    for inherit in opened.given {
        let fds = Object::File(inherit.fd.as_fd().as_raw_fd(), file.as_raw_fd());
        let compared = kcmp(own, own, fds).context(|| format!("compare file {id}"))?;
        if compared == Ordering::Equal {
            let key = &inherit.key;
            return Err(wrong(format!("file {id} is the one that was handed over as {key:?}")));
        }
    }
    Ok(())
}
