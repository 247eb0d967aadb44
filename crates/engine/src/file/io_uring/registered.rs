//! What is registered with an instance: buffers, and groups of buffers.

use std::os::fd::AsFd;
use std::thread::JoinHandle;

use torpor_images::proto::TorporIoUringBuffer;
use torpor_sys::io_uring::{PBUF_STATUS, is_group, tells_of_groups};
use torpor_tracee::Tracee;

use super::refusal::{advise, refuse};
use super::requests::NOWHERE;
use crate::error::{Context, Error, Result};
use crate::file::description::duplicate;
use crate::file::{FdInfo, Found};
use crate::memory::vma::{Vma, status};

/// Size of `struct io_uring_buf_status`, which begins with the number of a group.
const STATUS: usize = 40;
/// How many groups an instance can have, and how many are asked for at once.
const GROUPS: u32 = 1 << 16;
const AT_ONCE: u32 = 4096;

/// Registered buffers: lines `N: ADDRESS/LENGTH` after their number.
///
/// # Errors
/// Refused, if the kernel does not show them.
pub(super) fn buffers(found: &Found, info: &FdInfo) -> Result<Vec<TorporIoUringBuffer>> {
    let mut lines = info.rest.iter().skip_while(|line| !line.starts_with("UserBufs:"));
    let count = lines.next().and_then(|line| line.strip_prefix("UserBufs:")?.trim().parse().ok());
    let count: usize = count.unwrap_or(0);
    let parse = |line: &String| -> Option<TorporIoUringBuffer> {
        let (_, place) = line.split_once(':')?;
        let Some((address, length)) = place.trim().split_once('/') else {
            return Some(TorporIoUringBuffer { address: 0, length: 0 });
        };
        let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
        Some(TorporIoUringBuffer { address, length: length.parse().ok()? })
    };
    let all: Option<Vec<_>> = lines.take(count).map(parse).collect();
    all.filter(|all| all.len() == count)
        .ok_or_else(|| refuse(found, "its fdinfo does not show its registered buffers"))
}

/// Marks the mappings that buffers, or rings of buffers, are in: `pinned` has addresses and lengths.
pub(super) fn note_pinned(vmas: &mut [Vma], pinned: &[(u64, u64)]) {
    for vma in vmas {
        let is_in = |&(start, length): &(u64, u64)| {
            start < vma.map.end && vma.map.start < start.saturating_add(length)
        };
        if pinned.iter().any(is_in) {
            vma.status |= status::PINNED;
        }
    }
}

/// The number of a group, or what else the kernel says.
type GroupAnswer = std::io::Result<Option<u16>>;

/// The question whether an instance has groups of buffers, of which requests take one
/// (`IOSQE_BUFFER_SELECT`): the kernel tells that there is one, but not where it is. To ask for all
/// numbers takes longer than all the rest, so that the dump goes on meanwhile.
#[derive(Debug)]
pub(super) struct GroupQuestion {
    /// A thread that asks; `None` where there is none, so that the task has to be asked.
    asked: Option<JoinHandle<GroupAnswer>>,
    /// Whether there is nothing to ask: all are known.
    is_known: bool,
    pid: i32,
    /// What messages call the descriptor.
    object: String,
}

impl GroupQuestion {
    /// Begins to ask. Where there is no room for another descriptor or thread, the task asks later.
    pub(super) fn ask(found: &Found) -> Self {
        let asked = duplicate(found.file.as_fd()).and_then(|file| {
            let ask = move || torpor_sys::io_uring::group_of_buffers(file.as_fd());
            let thread = std::thread::Builder::new().spawn(ask);
            thread.context(|| "a thread that asks an io_uring for groups".to_owned())
        });
        if let Err(e) = &asked {
            tracing::debug!("{e}");
        }
        GroupQuestion { asked: asked.ok(), is_known: false, ..Self::known(found) }
    }

    /// For an instance all of whose groups are known.
    pub(super) fn known(found: &Found) -> Self {
        GroupQuestion { asked: None, is_known: true, pid: found.pid, object: found.object() }
    }

    /// What messages call the task and the instance.
    pub(super) fn about(&self) -> (i32, &str) {
        (self.pid, &self.object)
    }

    /// Waits for the answer. `task` has the instance, as `fd`.
    ///
    /// # Errors
    /// Refused, if it has any, or everything is wanted (`strict`) and this kernel does not tell; if the
    /// task is gone.
    pub(super) fn check(self, task: &mut Tracee, fd: i32, strict: bool) -> Result<()> {
        let join = |asked: JoinHandle<GroupAnswer>| {
            asked.join().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
        };
        if self.is_known {
            return Ok(());
        }
        let answer = match self.asked.map(join) {
            None => group_of_buffers(task, fd)?,
            // Only its maker may ask (`IORING_SETUP_SINGLE_ISSUER`).
            Some(Err(e)) if e.raw_os_error() == Some(libc::EEXIST) => group_of_buffers(task, fd)?,
            Some(answer) => answer,
        };
        let group = match answer {
            Err(e) if e.kind() == std::io::ErrorKind::Unsupported => {
                return untold(self.pid, self.object, strict);
            }
            answer => answer.context(|| "asking an io_uring for groups of buffers".to_owned())?,
        };
        let Some(group) = group else { return Ok(()) };
        let reason = format!(
            "it has buffers to choose from (group {group} of IORING_REGISTER_PBUF_RING or \
             IORING_OP_PROVIDE_BUFFERS), and the kernel does not tell where they are"
        );
        let reason =
            advise(self.pid, &reason, Some("let the program name a buffer in each request"));
        Err(Error::refused(self.pid, self.object, reason))
    }
}

/// This kernel does not tell whether an instance has groups of buffers.
fn untold(pid: i32, object: String, strict: bool) -> Result<()> {
    let reason =
        "groups of its buffers would not be kept: whether there are any is told by Linux 6.8";
    if strict {
        return Err(Error::refused(pid, object, reason));
    }
    tracing::warn!("task {pid}: {object}: {reason}");
    Ok(())
}

/// A group of buffers of an instance, if it has any: its task asks. The inner result is what
/// [`torpor_sys::io_uring::group_of_buffers`] would say in the task.
fn group_of_buffers(task: &mut Tracee, fd: i32) -> Result<GroupAnswer> {
    let fd = u64::from(fd.cast_unsigned());
    let ask = |place: u64| (libc::SYS_io_uring_register, [fd, PBUF_STATUS, place, 1]);
    let mut batch = task.batch();
    let asked = batch.call(ask(NOWHERE));
    if let Err(e) = tells_of_groups(batch.run()?.result(asked)) {
        return Ok(Err(e));
    }
    for from in (0..GROUPS).step_by(AT_ONCE as usize) {
        let mut batch = task.batch();
        let mut status = [0; STATUS];
        let asked: Vec<_> = (from..from + AT_ONCE)
            .map(|group| {
                status[..4].copy_from_slice(&group.to_ne_bytes());
                let place = batch.bytes(&status);
                (group, batch.call(ask(place.0)))
            })
            .collect();
        let out = batch.run()?;
        for (group, call) in asked {
            match is_group(out.result(call)) {
                Ok(false) => {}
                Ok(true) => return Ok(Ok(u16::try_from(group).ok())),
                Err(e) => return Ok(Err(e)),
            }
        }
    }
    Ok(Ok(None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_this_kernel_does_not_tell_of_are_said_or_refused() {
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut check = |strict| {
            let untold = || Err(std::io::ErrorKind::Unsupported.into());
            let asked = Some(std::thread::spawn(untold));
            let object = "fd 3".to_owned();
            let question = GroupQuestion { asked, is_known: false, pid: 1, object };
            question.check(&mut husk, 3, strict)
        };
        check(false).unwrap();
        let error = check(true).unwrap_err().to_string();
        assert!(error.contains("told by Linux 6.8"), "{error}");
        husk.exit_with(0).unwrap();
    }
}
