//! Calls of which a socket's peer remembers the caller (`SO_PEERCRED`): socketpair(2),
//! listen(2) and connect(2) note process, user and group. So they are made by the
//! process that made them before, or by one that has its number and its users for this
//! moment, if it has ended since.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::PidfdGetfdFlags;
use torpor_policy::{ProcessIds, SocketKind};
use torpor_sys::socket;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, Call, Outcome, Tracee};

use super::Neighbours;
use super::name::Reach;
use crate::error::{Context, Error, Result};
use crate::file::description::duplicate;
use crate::file::found::own_pid;
use crate::file::socket::about::netns_of;
use crate::namespace::{NsKind, send_into};
use crate::proc;
use crate::restore::process::with_process;
use crate::restore::tasks::{Task, real_pid};
use crate::restore::transport::Transport;

/// That of capget(2) and capset(2): version 3, of the calling thread.
const CAPABILITY_HEADER: [u8; 8] = [0x22, 0x05, 0x08, 0x20, 0, 0, 0, 0];

/// Sockets that a process lets listen at once.
const AT_ONCE: usize = 32;

/// A pair of connected sockets.
pub(super) fn socketpair(
    cx: &mut Neighbours<'_>,
    who: Option<ProcessIds>,
    socket: &SocketKind,
) -> Result<(OwnedFd, OwnedFd)> {
    let space = netns_of(cx.spaces, socket.network());
    let [_, kind, _] = socket.arguments().map(i32::cast_unsigned);
    let made = as_maker(cx, who, Some(space), |husk, who| {
        let mut batch = husk.batch();
        let pair = batch.space(8);
        let kind = u64::from(kind) | libc::SOCK_CLOEXEC as u64;
        let family = libc::AF_UNIX as u64;
        let out = in_the_name_of(batch, who, |batch| {
            vec![batch.call((libc::SYS_socketpair, [family, kind, 0, pair.addr.0]))]
        })?;
        let numbers = [0, 4].map(|at| out.u32_at(pair, at));
        let pidfd = proc::pidfd(husk.pid())?;
        let take = |number: u32| {
            rustix::process::pidfd_getfd(&pidfd, number.cast_signed(), PidfdGetfdFlags::empty())
                .context(|| "pidfd_getfd of a new socket".to_owned())
        };
        let taken = (take(numbers[0])?, take(numbers[1])?);
        let mut batch = husk.batch();
        for number in numbers {
            batch.call(syscall::close(number.into()));
        }
        batch.run()?;
        Ok(taken)
    })?;
    match made {
        Some(pair) => Ok(pair),
        None => cx.spaces.in_netns(space, || {
            let kind = SocketType::from_raw(kind);
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
                .context(|| "socketpair".to_owned())
        }),
    }
}

/// Lets sockets listen, each with its backlog.
pub(super) fn listen(
    cx: &mut Neighbours<'_>,
    who: Option<ProcessIds>,
    sockets: &[(BorrowedFd<'_>, u32)],
) -> Result<()> {
    let done = as_maker(cx, who, None, |husk, who| {
        sockets.chunks(AT_ONCE).try_for_each(|sockets| listen_from(husk, who, sockets))
    })?;
    if done.is_some() {
        return Ok(());
    }
    let mut all = sockets.iter();
    all.try_for_each(|&(fd, backlog)| rustix::net::listen(fd, backlog_of(backlog)))
        .context(|| "listen on a Unix socket".to_owned())
}

/// As listen(2) takes it.
fn backlog_of(wanted: u32) -> i32 {
    i32::try_from(wanted).unwrap_or(i32::MAX)
}

fn listen_from(
    husk: &mut Tracee,
    who: ProcessIds,
    sockets: &[(BorrowedFd<'_>, u32)],
) -> Result<()> {
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(|&(fd, _)| fd).collect();
    // Behind the sockets, which get the lowest numbers.
    let at = i32::try_from(fds.len()).unwrap_or(i32::MAX);
    let mut transport = Transport::open(husk, at)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &fds)?;
    in_the_name_of(batch, who, |batch| {
        let backlogs = sockets.iter().map(|&(_, backlog)| backlog_of(backlog).cast_unsigned());
        let calls = (0..).zip(backlogs);
        calls.map(|(fd, backlog)| batch.call((libc::SYS_listen, [fd, backlog.into()]))).collect()
    })?;
    clear(husk, transport)
}

/// Connects a socket, without waiting for a place in the queue of a listener: whoever else knows its name could keep that full.
/// Returns the process that has connected it, which the other end remembers; `None` if there was no place.
pub(super) fn connect(
    cx: &mut Neighbours<'_>,
    who: Option<ProcessIds>,
    fd: BorrowedFd<'_>,
    reach: &Reach,
) -> Result<Option<i32>> {
    let file = reach.file.as_ref().map(|file| duplicate(file.as_fd())).transpose()?;
    let flags = rustix::fs::fcntl_getfl(fd).context(|| "F_GETFL".to_owned())?;
    let set = |flags| rustix::fs::fcntl_setfl(fd, flags).context(|| "F_SETFL".to_owned());
    set(flags | OFlags::NONBLOCK)?;
    let connected = as_maker(cx, who, None, |husk, who| {
        let connected = connect_from(husk, who, fd, reach, file)?;
        Ok(connected.then(|| husk.pid()))
    });
    let connected = connected.and_then(|by| match by {
        Some(by) => Ok(by),
        None => match socket::connect(fd, &reach.address) {
            Err(full) if full.kind() == ErrorKind::WouldBlock => Ok(None),
            connected => {
                connected.map(|()| Some(own_pid())).context(|| "connect a Unix socket".to_owned())
            }
        },
    });
    set(flags).and(connected)
}

/// A file is reached through the husk's own descriptor of it, whatever file systems the
/// husk has: its working directory is that of its descriptors meanwhile. False if there was no place in the queue.
fn connect_from(
    husk: &mut Tracee,
    who: ProcessIds,
    fd: BorrowedFd<'_>,
    reach: &Reach,
    file: Option<OwnedFd>,
) -> Result<bool> {
    const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
    let path = format!("/proc/{}/fd", husk.pid());
    let descriptors =
        rustix::fs::open(&path, DIRECTORY, Mode::empty()).context(|| format!("open {path}"))?;
    // The socket is 0, its file 1, the directory of descriptors 2, the old one 4.
    let file = file.map_or_else(|| duplicate(fd), Ok)?;
    let mut transport = Transport::open(husk, 3)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[fd, file.as_fd(), descriptors.as_fd()])?;
    let address = match &reach.file {
        Some(_) => super::name::address(b"1\0"),
        None => reach.address.clone(),
    };
    let dot = batch.cstr(".");
    batch.must(syscall::openat(RemoteFd::CWD, dot, DIRECTORY, Mode::empty()));
    batch.must((libc::SYS_fchdir, [2]));
    let bytes = batch.bytes(&address).0;
    let len = address.len() as u64;
    let out =
        in_the_name_of(batch, who, |batch| vec![batch.call((libc::SYS_connect, [0, bytes, len]))]);
    husk.call("fchdir", (libc::SYS_fchdir, [4]))?;
    clear(husk, transport)?;
    match out {
        Err(Error::Tracee(torpor_tracee::Error::Remote { source, .. }))
            if source.kind() == ErrorKind::WouldBlock =>
        {
            Ok(false)
        }
        out => out.map(|_| true),
    }
}

/// Closes everything that the husk has been given.
fn clear(husk: &mut Tracee, mut transport: Transport) -> Result<()> {
    let mut batch = husk.batch();
    transport.close(&mut batch);
    batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
    batch.run()?;
    Ok(())
}

/// Runs calls as the user and group that are to be noted, and goes back. Meanwhile it keeps the capabilities, which the
/// change of the user takes away: the permissions of a socket's file may have changed since.
fn in_the_name_of(
    mut batch: Batch<'_>,
    who: ProcessIds,
    calls: impl FnOnce(&mut Batch<'_>) -> Vec<Call>,
) -> Result<Outcome> {
    const SAME: u64 = u64::MAX;
    let others = who.user != 0 || who.group != 0;
    let become_it = others.then(|| {
        let header = batch.bytes(&CAPABILITY_HEADER).0;
        let sets = batch.space(24).addr.0;
        batch.must((libc::SYS_capget, [header, sets]));
        let gid = batch.call((libc::SYS_setresgid, [SAME, who.group.into(), SAME]));
        let uid = batch.call((libc::SYS_setresuid, [SAME, who.user.into(), SAME]));
        batch.call((libc::SYS_capset, [header, sets]));
        (gid, uid)
    });
    let calls = calls(&mut batch);
    if others {
        batch.call((libc::SYS_setresuid, [SAME, 0, SAME]));
        batch.call((libc::SYS_setresgid, [SAME, 0, SAME]));
    }
    let out = batch.run()?;
    let what = || format!("a call as user {} and group {}", who.user, who.group);
    if let Some((gid, uid)) = become_it {
        out.expect(gid, what)?;
        out.expect(uid, what)?;
    }
    calls.into_iter().try_for_each(|call| out.expect(call, what).map(drop))?;
    Ok(out)
}

/// Works in the husk of a process with the number and in the network namespace that are
/// wanted, or of one for this moment. `None` without knowledge of the process.
fn as_maker<T>(
    cx: &mut Neighbours<'_>,
    who: Option<ProcessIds>,
    space: Option<u32>,
    work: impl FnOnce(&mut Tracee, ProcessIds) -> Result<T>,
) -> Result<Option<T>> {
    let Some(who) = who.filter(|_| !cx.tasks.is_empty()) else { return Ok(None) };
    let vpid = who.pid.cast_signed();
    let lives_there = |task: &Task| {
        let home = task.image.homes.number(NsKind::Net);
        space.is_none_or(|space| home == Some(space))
    };
    let is_it = |t: &Task| t.vpid == vpid && !t.threads.is_empty() && lives_there(t);
    if let Some(task) = cx.tasks.iter().position(is_it) {
        return work(cx.tasks[task].remote()?, who).map(Some);
    }
    let away = match space.filter(|_| !lives_there(&cx.tasks[0])) {
        Some(space) => away(cx, space)?,
        None => None,
    };
    // One that has ended: its number may belong to somebody else by now.
    let number = (vpid != 0 && real_pid(cx.tasks, vpid).is_none()).then_some(vpid);
    let free = number.filter(|_| !is_taken(cx, vpid));
    with_process(cx.tasks[0].remote()?, free, |husk| {
        if let Some(space) = &away {
            send_into(husk, NsKind::Net, space)?;
        }
        work(husk, who).map(Some)
    })
}

/// The network namespace that a child of the root task has to enter, unless both are this host's: old images have no
/// number of that.
fn away(cx: &Neighbours<'_>, space: u32) -> Result<Option<OwnedFd>> {
    let home = cx.tasks[0].image.homes.number(NsKind::Net);
    let is_own = |id: u32| cx.spaces.by_id(id).is_none_or(|ns| ns.is_host);
    match cx.spaces.netns(space)? {
        Some(file) => Ok(Some(file)),
        None if home.is_none_or(is_own) => Ok(None),
        None => {
            let own = rustix::process::getpid().as_raw_nonzero().get();
            Ok(Some(proc::open(own, "ns/net")?.into()))
        }
    }
}

/// Whether the number is in use in the pid namespace of the tree.
fn is_taken(cx: &Neighbours<'_>, vpid: i32) -> bool {
    let shared = cx.spaces.of_kind(NsKind::Pid).any(|ns| ns.is_host);
    shared
        && rustix::process::Pid::from_raw(vpid).is_none_or(|pid| {
            rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
        })
}
