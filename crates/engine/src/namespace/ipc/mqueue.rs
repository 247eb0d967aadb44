//! POSIX message queues. They live in the namespace, whether a task has them open or not.
//!
//! Nobody can look at a message without taking it. So all are taken and sent again, in the
//! same order, by a process that does nothing else: it comes to its end even if the
//! supervisor is killed. The tasks are stopped meanwhile.

use std::ffi::CString;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Dir, MemfdFlags, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use torpor_images::proto::{MqueueEntry, MqueueMessage};
use torpor_policy::ipc::PosixQueue;
use torpor_sys::mqueue::{self, QueueAttributes};
use torpor_sys::process::Status;

use super::here;
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// Bytes of all messages of a queue that are kept.
const MOST: i64 = 32 << 20;

/// The queues of the calling thread's namespace, without their messages.
///
/// # Errors
/// Refused, if a queue cannot be kept; if the file system of queues cannot be mounted and read.
pub(super) fn open_all(pid: i32, maps: &IdMaps) -> Result<Vec<(MqueueEntry, OwnedFd)>> {
    let what = || "looking at the POSIX message queues".to_owned();
    let fs = match fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC) {
        // A kernel without them.
        Err(rustix::io::Errno::NODEV) => return Ok(Vec::new()),
        other => other.context(what)?,
    };
    fsconfig_create(fs.as_fd()).context(what)?;
    let mount = fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        .context(what)?;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let list = rustix::fs::openat(&mount, ".", flags, Mode::empty()).context(what)?;
    let mut queues = Vec::new();
    for entry in Dir::read_from(&list).context(what)? {
        let entry = entry.context(what)?;
        let name = entry.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            queues.push(open(pid, list.as_fd(), name, maps)?);
        }
    }
    Ok(queues)
}

fn open(
    pid: i32,
    list: BorrowedFd<'_>,
    name: CString,
    maps: &IdMaps,
) -> Result<(MqueueEntry, OwnedFd)> {
    let shown = format!("message queue /{}", name.to_string_lossy());
    let refuse = |reason| Err(Error::refused(pid, shown.clone(), reason));
    let what = || shown.clone();
    let state = rustix::fs::openat(list, name.as_c_str(), OFlags::CLOEXEC, Mode::empty());
    let mut text = String::new();
    std::fs::File::from(state.context(what)?).read_to_string(&mut text).context(what)?;
    // `QSIZE:0 NOTIFY:0 SIGNO:0 NOTIFY_PID:0`
    let notified = text.split_ascii_whitespace().find_map(|word| word.strip_prefix("NOTIFY_PID:"));
    if notified.is_some_and(|pid| pid != "0") {
        return refuse("a task waits to be told of its next message (mq_notify)");
    }
    let flags = libc::O_RDWR | libc::O_NONBLOCK;
    let queue = mqueue::open(&name, flags, 0, None).context(what)?;
    let now = mqueue::attributes(queue.as_fd()).context(what)?;
    if now.messages.saturating_mul(now.message_size) > MOST {
        return refuse("its messages may have more than 32 MiB");
    }
    let stat = rustix::fs::fstat(&queue).context(what)?;
    let (uid, gid) = (maps.uid_inside(stat.st_uid), maps.gid_inside(stat.st_gid));
    let (Some(uid), Some(gid)) = (uid, gid) else {
        return refuse("its owner is not mapped in the user namespace of the tree");
    };
    let entry = MqueueEntry {
        name: name.into_bytes(),
        mode: stat.st_mode & 0o7777,
        uid,
        gid,
        max_messages: now.max_messages.cast_unsigned(),
        message_size: now.message_size.cast_unsigned(),
        messages: Vec::new(),
    };
    Ok((entry, queue))
}

/// Adds the messages of a queue, which keeps them. To be called while this process has one
/// thread.
///
/// # Errors
/// If a message cannot be received, or cannot be put back.
pub(super) fn look(entry: &mut MqueueEntry, queue: &OwnedFd) -> Result<()> {
    let what = || format!("messages of queue /{}", String::from_utf8_lossy(&entry.name));
    if mqueue::attributes(queue.as_fd()).context(what)?.messages == 0 {
        return Ok(());
    }
    let size = usize::try_from(entry.message_size).unwrap_or(0);
    let copy = rustix::fs::memfd_create("messages", MemfdFlags::CLOEXEC).context(what)?;
    let mut copy = std::fs::File::from(copy);
    let child = torpor_sys::process::fork(|| {
        // Not to end with a Ctrl-C for the supervisor.
        let _ = rustix::process::setsid();
        turn_over(queue.as_fd(), size, &copy).map_or(1, |()| 0)
    });
    let status = torpor_sys::process::wait(child.context(what)?, true).context(what)?;
    if !matches!(status, Some((_, Status::Exited(0)))) {
        return Err(std::io::Error::other("they could not be looked at")).context(what);
    }
    let mut bytes = Vec::new();
    copy.rewind().and_then(|()| copy.read_to_end(&mut bytes)).context(what)?;
    entry.messages = parse(&bytes);
    Ok(())
}

/// Takes all messages, sends them again and writes a copy of each: priority, length, data.
fn turn_over(queue: BorrowedFd<'_>, size: usize, mut copy: &std::fs::File) -> std::io::Result<()> {
    let mut all = Vec::new();
    let mut data = vec![0; size];
    let taken = loop {
        match mqueue::receive(queue, &mut data) {
            Ok((len, priority)) => all.push((priority, data[..len].to_vec())),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break Ok(()),
            Err(e) => break Err(e),
        }
    };
    // Whatever was taken goes back first.
    for (priority, data) in &all {
        mqueue::send(queue, data, *priority)?;
    }
    taken?;
    for (priority, data) in all {
        let len = u32::try_from(data.len()).unwrap_or(0);
        copy.write_all(&[priority.to_ne_bytes(), len.to_ne_bytes()].concat())?;
        copy.write_all(&data)?;
    }
    Ok(())
}

fn parse(mut bytes: &[u8]) -> Vec<MqueueMessage> {
    let mut messages = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<8>() {
        let [priority, len] =
            [0, 4].map(|at| u32::from_ne_bytes(std::array::from_fn(|i| head[at + i])));
        let len = usize::try_from(len).unwrap_or(0).min(rest.len());
        let (data, rest) = rest.split_at(len);
        messages.push(MqueueMessage { priority, data: data.to_vec() });
        bytes = rest;
    }
    messages
}

/// Makes queues in the calling thread's namespace.
///
/// # Errors
/// If a queue cannot be made, with its name, limits and owner, or its messages not be sent; damaged
/// images.
pub(super) fn restore(queues: &[PosixQueue], maps: &IdMaps) -> Result<()> {
    for planned in queues {
        let what = || format!("message queue /{}", String::from_utf8_lossy(&planned.name));
        let name = CString::new(planned.name.clone());
        let name = name.map_err(|_| Error::invalid("ipcns-var", what()))?;
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let new = QueueAttributes::new(number(planned.max_messages), number(planned.message_size));
        // What it can take counts for its owner, and not for this host's root.
        let (uid, gid) = here(planned.owner, maps)?;
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_NONBLOCK;
        let queue =
            torpor_sys::ipc::with_ids(uid, gid, || mqueue::open(&name, flags, 0o600, Some(&new)));
        let queue = queue.context(what)?;
        let mode = Mode::from_raw_mode(planned.mode & 0o7777);
        rustix::fs::fchmod(&queue, mode).context(what)?;
        for (priority, text) in &planned.messages {
            mqueue::send(queue.as_fd(), text, *priority).context(what)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_messages_are_parsed() {
        let mut bytes = [7u32.to_ne_bytes(), 3u32.to_ne_bytes()].concat();
        bytes.extend(b"abc");
        bytes.extend([[0u8; 4], [0u8; 4]].concat());
        let found = parse(&bytes);
        let expected = [(7, b"abc".to_vec()), (0, Vec::new())]
            .map(|(priority, data)| MqueueMessage { priority, data });
        assert_eq!(found, expected);
    }

    /// Tasks take none of what this host's root may have, and no more than their own user may.
    #[test]
    fn queues_count_for_their_owner() {
        let space = crate::namespace::testing::fresh(crate::namespace::NsKind::Ipc);
        // One that nobody else is.
        let user = 3_000_000_000 - std::process::id();
        let queue = |number: u32, owner: u32| PosixQueue {
            name: number.to_string().into_bytes(),
            mode: 0o600,
            owner: (owner, 0),
            max_messages: 10,
            message_size: 8192,
            messages: Vec::new(),
        };
        let make = |queue| restore(&[queue], &IdMaps::identity());
        let (_, error, root) = super::super::run_in(&[space.as_fd()], || {
            // By default there is room for nine of them (RLIMIT_MSGQUEUE).
            let made = (0..200).map_while(|number| make(queue(number, user)).ok()).count();
            Ok((made, make(queue(300, user)), make(queue(301, 0))))
        })
        .unwrap();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("message queue /300: Too many open files"), "{error}");
        root.unwrap();
    }
}
