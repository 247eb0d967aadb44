//! The keeper: what is known of changes, between two commands.
//!
//! A small process for each tree, forked by the command that begins to track, that
//! holds the userfaultfds open and sleeps. The next command takes everything over, and
//! the keeper ends, as it does when the tree ends. If it is killed, or the command that
//! has taken over fails, the descriptors close, the kernel ends the tracking, and the
//! next dump saves all pages: knowledge is lost, never wrong.
//!
//! It listens at an abstract address that names the tree. Anybody may bind such a name,
//! so both ends look at the user at the other one; and whether a descriptor belongs to
//! an address space is tried out, not believed ([`super::track`]).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, socket_with, socketpair,
};
use torpor_sys::peer::peer;

use crate::error::{Context, Error, Result};
use crate::{oom, proc};

/// How long an end waits for the other one, which has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest packet: a round's id.
const PACKET: usize = 128;
/// More tasks than any system has.
const MAX_TASKS: usize = 4 << 20;

/// The address space of a task and its userfaultfd.
#[derive(Debug)]
pub struct Tracked {
    /// The task's pid in the pid namespace of the commands.
    pub pid: i32,
    /// When it was started, in clock ticks since the system was.
    pub start_time: u64,
    /// The userfaultfd.
    pub uffd: OwnedFd,
}

/// What is known of a tree.
#[derive(Debug, Default)]
pub struct Knowledge {
    /// The id (`dump_criu_run_id`) of the images that changes are counted from.
    pub round: String,
    /// Its tasks, as far as they are tracked.
    pub tasks: Vec<Tracked>,
}

/// A keeper that waits for its task. If it is dropped before it gets one it ends.
#[derive(Debug)]
pub(crate) struct Keeper {
    line: OwnedFd,
}

/// The root task that a keeper stays for.
#[derive(Debug, Clone, Copy)]
struct Root {
    pid: i32,
    start_time: u64,
}

impl Root {
    fn of(pid: i32) -> Result<Self> {
        Ok(Root { pid, start_time: proc::stat(pid)?.start_time })
    }

    /// Where its keeper listens. The pid namespace makes the pid unique.
    fn address(self) -> Result<SocketAddrUnix> {
        let namespace = proc::ns_inode(rustix::process::getpid().as_raw_nonzero().get(), "pid")?;
        let name = format!("torpor/keeper/{namespace}/{}/{}", self.pid, self.start_time);
        SocketAddrUnix::new_abstract_name(name.as_bytes()).context(|| name)
    }
}

impl Keeper {
    /// Forks the keeper of the tree under `root`. Must come before this process has a
    /// second thread.
    ///
    /// # Errors
    /// `EBUSY` if there are threads already; if the task has ended; if no process can be started.
    pub(crate) fn start(root: i32) -> Result<Self> {
        let what = || "starting the keeper of tracked memory".to_owned();
        let root = Root::of(root)?;
        let address = root.address()?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).context(what)?;
        let child = torpor_sys::process::fork(|| {
            torpor_sys::process::close_but(theirs.as_fd());
            let _ = torpor_sys::process::set_name(c"torpor-keeper");
            oom::give_back();
            let _ = rustix::process::setsid();
            let _ = rustix::process::chdir("/");
            // Nobody is to wait for it: it is not the caller's child.
            let keep = || i32::from(keep(&theirs, root, &address).is_err());
            torpor_sys::process::fork(keep).map_or(1, |_| 0)
        });
        let child = child.context(what)?;
        torpor_sys::process::wait(child, true).context(what)?;
        Ok(Keeper { line: ours })
    }

    /// Gives it what is to be kept.
    ///
    /// # Errors
    /// If it is gone, or another one keeps that tree.
    pub(crate) fn keep(self, knowledge: &Knowledge) -> Result<()> {
        let what = || "handing the tracked memory to its keeper".to_owned();
        set_patience(self.line.as_fd()).context(what)?;
        give(self.line.as_fd(), knowledge).context(what)?;
        let mut answer = [0; 1];
        match receive(self.line.as_fd(), &mut answer).context(what)? {
            (1, _) if answer == [b'k'] => Ok(()),
            _ => Err(std::io::Error::from(std::io::ErrorKind::AddrInUse)).context(what),
        }
    }
}

/// What the keeper of the tree under `root` knows, if there is one; it ends.
///
/// # Errors
/// If the task is gone. Whatever is wrong with the keeper is only logged.
pub fn take(root: i32) -> Result<Option<Knowledge>> {
    let address = Root::of(root)?.address()?;
    match take_at(&address) {
        Ok(found) => Ok(found),
        Err(e) => {
            tracing::warn!("the keeper of tracked memory: {e}; all memory is saved");
            Ok(None)
        }
    }
}

fn take_at(address: &SocketAddrUnix) -> Result<Option<Knowledge>> {
    let what = || "asking it".to_owned();
    let line = new_socket().context(what)?;
    match connect(&line, address) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED) => return Ok(None),
        Err(e) => return Err(e).context(what),
    }
    let keeper = peer(&line).context(what)?;
    if keeper.uid != rustix::process::geteuid().as_raw() {
        return Err(Error::invalid("its socket", "belongs to another user"));
    }
    set_patience(line.as_fd()).context(what)?;
    let end = proc::pidfd(keeper.pid);
    let knowledge = accept_all(line.as_fd())?;
    // Gone when this returns: its address is free again.
    if let Ok(end) = end {
        let mut fds = [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN)];
        let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
        poll(&mut fds, Some(&patience)).context(what)?;
    }
    Ok(Some(knowledge))
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn set_patience(line: BorrowedFd<'_>) -> rustix::io::Result<()> {
    set_socket_timeout(line, Timeout::Recv, Some(PATIENCE))?;
    set_socket_timeout(line, Timeout::Send, Some(PATIENCE))
}

/// The keeper's life: gets the knowledge, and keeps it until it is asked for or the
/// tree has ended.
fn keep(line: &OwnedFd, root: Root, address: &SocketAddrUnix) -> Result<()> {
    let what = || "keeper".to_owned();
    let knowledge = accept_all(line.as_fd())?;
    let listener = new_socket().context(what)?;
    bind(&listener, address).context(what)?;
    listen(&listener, 1).context(what)?;
    let end = proc::pidfd(root.pid)?;
    if proc::stat(root.pid)?.start_time != root.start_time {
        return Err(Error::Gone { pid: root.pid });
    }
    send(line.as_fd(), b"k", None).context(what)?;
    // The command sees that there is nobody else to hear from.
    rustix::net::shutdown(line, rustix::net::Shutdown::Both).context(what)?;
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).context(what),
        }
        if !fds[1].revents().is_empty() {
            return Ok(());
        }
        if fds[0].revents().is_empty() {
            continue;
        }
        let caller = accept_with(&listener, SocketFlags::CLOEXEC).context(what)?;
        if peer(&caller).is_ok_and(|p| p.uid == rustix::process::geteuid().as_raw()) {
            set_patience(caller.as_fd()).context(what)?;
            return give(caller.as_fd(), &knowledge).context(what);
        }
    }
}

/// Sends the id, a packet for each task, and an empty one.
fn give(line: BorrowedFd<'_>, knowledge: &Knowledge) -> rustix::io::Result<()> {
    send(line, format!("round {}", knowledge.round).as_bytes(), None)?;
    for task in &knowledge.tasks {
        let text = format!("task {} {}", task.pid, task.start_time);
        send(line, text.as_bytes(), Some(task.uffd.as_fd()))?;
    }
    send(line, b"end", None)
}

fn send(line: BorrowedFd<'_>, text: &[u8], fd: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    loop {
        match sendmsg(line, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            done => return done.map(drop),
        }
    }
}

/// Receives what [`give`] sends. A task whose descriptor got lost, since there are too
/// many, is left out.
fn accept_all(line: BorrowedFd<'_>) -> Result<Knowledge> {
    let bad = || Error::invalid("what it says", "is not understood");
    let mut knowledge = Knowledge::default();
    for _ in 0..MAX_TASKS {
        let mut packet = [0; PACKET];
        let (len, fd) = receive(line, &mut packet).context(|| "receive".to_owned())?;
        let text = str::from_utf8(&packet[..len]).map_err(|_| bad())?;
        let words: Vec<&str> = text.split(' ').collect();
        match (words.as_slice(), fd) {
            (["round", round], _) => (*round).clone_into(&mut knowledge.round),
            (["task", pid, start], Some(uffd)) => knowledge.tasks.push(Tracked {
                pid: pid.parse().map_err(|_| bad())?,
                start_time: start.parse().map_err(|_| bad())?,
                uffd,
            }),
            (["task", ..], None) => {}
            (["end"], _) => return Ok(knowledge),
            _ => return Err(bad()),
        }
    }
    Err(bad())
}

fn receive(
    line: BorrowedFd<'_>,
    packet: &mut [u8],
) -> rustix::io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let len = loop {
        let mut parts = [IoSliceMut::new(packet)];
        match recvmsg(line, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            done => break done?.bytes,
        }
    };
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let fd = fds.next();
    Ok((len, fd))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::fd::AsRawFd;
    use std::process::{Child, Command};

    fn sleeper() -> (Child, i32) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        (child, pid)
    }

    /// Runs the keeper's life on a thread: the tests have several, and cannot fork.
    fn start(pid: i32) -> (Keeper, std::thread::JoinHandle<Result<()>>) {
        let root = Root::of(pid).unwrap();
        let address = root.address().unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let life = std::thread::spawn(move || keep(&theirs, root, &address));
        (Keeper { line: ours }, life)
    }

    fn knowledge(round: &str, pid: i32) -> Knowledge {
        let uffd = rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        Knowledge { round: round.to_owned(), tasks: vec![Tracked { pid, start_time: 7, uffd }] }
    }

    /// As [`take_at`], but the keeper is a thread of this process, which does not end.
    fn ask(pid: i32) -> Option<Knowledge> {
        let line = new_socket().unwrap();
        connect(&line, &Root::of(pid).unwrap().address().unwrap()).ok()?;
        Some(accept_all(line.as_fd()).unwrap())
    }

    #[test]
    fn knowledge_is_handed_over_once() {
        let (mut child, pid) = sleeper();
        assert!(take(pid).unwrap().is_none());
        let (keeper, life) = start(pid);
        keeper.keep(&knowledge("one", 5)).unwrap();
        let kept = ask(pid).unwrap();
        assert_eq!((kept.round.as_str(), kept.tasks.len()), ("one", 1));
        assert_eq!((kept.tasks[0].pid, kept.tasks[0].start_time), (5, 7));
        let name = format!("/proc/self/fd/{}", kept.tasks[0].uffd.as_raw_fd());
        let link = std::fs::read_link(name).unwrap().display().to_string();
        assert!(link.contains("kept"), "{link}");
        life.join().unwrap().unwrap();
        assert!(ask(pid).is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_keeper_ends_with_its_tree_or_its_command() {
        let (mut child, pid) = sleeper();
        let (keeper, life) = start(pid);
        drop(keeper);
        assert!(life.join().unwrap().is_err());
        let (keeper, life) = start(pid);
        keeper.keep(&knowledge("two", 5)).unwrap();
        // There cannot be two.
        let (second, other) = start(pid);
        assert!(second.keep(&knowledge("three", 5)).is_err());
        assert!(other.join().unwrap().is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        life.join().unwrap().unwrap();
    }
}
