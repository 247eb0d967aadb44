//! Unix sockets: with which of the tree each is connected.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};

use torpor_kernel::sock_diag::{self as diag, UnixSocket};
use torpor_policy::{UnixEnd, UnixState};
use torpor_sys::socket::{self, Credentials};

use super::files::Opened;
use super::{given, wrong};
use crate::error::{Context, Result};
use crate::namespace::run_in;

/// What the kernel lists in a network namespace, by inode number.
type List = HashMap<u32, UnixSocket>;

/// Compares all Unix sockets of the tree. Each namespace is listed once, if it has any.
///
/// # Errors
/// If a socket has another peer, or one that it was not to have; if the kernel does not list its sockets
/// (sock_diag(7)).
pub(super) fn peers(opened: &Opened<'_>) -> Result<()> {
    let (mut outside, mut sockets) = (HashSet::new(), vec![]);
    for described in opened.described.values() {
        let Some(end) = described.unix() else { continue };
        // Some are found by their names, and no task has them; what the caller has handed over has the peer that the
        // caller has given it.
        if end.outside.is_some() || given::is_given(opened, described) {
            outside.insert(end.link.inode);
        } else {
            sockets.extend(SocketHere::of(opened, end)?);
        }
    }
    let by_image: HashMap<u32, &SocketHere<'_>> =
        sockets.iter().map(|socket| (socket.end.link.inode, socket)).collect();
    let mut lists: HashMap<u64, List> = HashMap::new();
    let known = JudgedUsers::of(opened, &sockets);
    for socket in &sockets {
        socket.check_remembered(&known)?;
        let peer = socket.end.link.peer;
        if !peer.is_some_and(|inode| outside.contains(&inode)) {
            let peer = peer.and_then(|inode| by_image.get(&inode)).copied();
            socket.check(peer, socket.list(&mut lists)?)?;
        }
    }
    Ok(())
}

/// Users and groups of processes that sockets may remember, as this host has them.
struct JudgedUsers(HashSet<(u32, u32)>);

impl JudgedUsers {
    /// Those that were judged: of the images' sockets, and of the tasks, where the images do not say.
    fn of(opened: &Opened<'_>, sockets: &[SocketHere<'_>]) -> Self {
        let remembered = sockets.iter().filter_map(|socket| socket.end.link.remembered);
        let remembered = remembered.map(|ids| (ids.user, ids.group));
        let tasks = opened.tasks.iter().map(|task| task.image.ids().unwrap_or_default());
        let outside = |(user, group)| {
            let maps = opened.id_maps;
            let user = maps.uid_outside(user).unwrap_or(user);
            (user, maps.gid_outside(group).unwrap_or(group))
        };
        JudgedUsers(remembered.chain(tasks).map(outside).collect())
    }
}

/// A socket of the images, as it is here.
struct SocketHere<'c> {
    end: &'c UnixEnd,
    file: BorrowedFd<'c>,
    inode: u32,
}

impl<'c> SocketHere<'c> {
    fn of(opened: &'c Opened<'_>, end: &'c UnixEnd) -> Result<Option<Self>> {
        let Some(file) = opened.files.get(end.file) else { return Ok(None) };
        let stat = rustix::fs::fstat(file).context(|| format!("fstat of socket {}", end.file))?;
        Ok(u32::try_from(stat.st_ino).ok().map(|inode| SocketHere { end, file, inode }))
    }

    /// What the kernel lists where it is.
    fn list<'l>(&self, lists: &'l mut HashMap<u64, List>) -> Result<&'l List> {
        let what = || format!("network namespace of socket {}", self.end.file);
        let space = socket::network_namespace(self.file).context(what)?;
        let inode = rustix::fs::fstat(&space).context(what)?.st_ino;
        match lists.entry(inode) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => {
                let all = run_in(&[space.as_fd()], || Ok(diag::unix()?))?;
                Ok(new.insert(all.into_iter().map(|socket| (socket.inode, socket)).collect()))
            }
        }
    }

    /// The process that it remembers, and shows to others, is one of those.
    fn check_remembered(&self, known: &JudgedUsers) -> Result<()> {
        let id = self.end.file;
        let what = || format!("SO_PEERCRED of socket {id}");
        let Credentials { uid, gid, .. } = socket::peer_credentials(self.file).context(what)?;
        if uid == u32::MAX || known.0.contains(&(uid, gid)) {
            return Ok(());
        }
        Err(wrong(format!("Unix socket {id} remembers user {uid} and group {gid}")))
    }

    /// It is connected with `peer`, or waits there to be accepted; without one, with nobody.
    fn check(&self, peer: Option<&SocketHere<'_>>, list: &List) -> Result<()> {
        let pending = |socket: &UnixSocket| socket.pending.contains(&self.inode);
        let waits = peer.filter(|peer| peer.end.link.state == UnixState::Listening);
        if waits.is_some_and(|listener| list.get(&listener.inode).is_some_and(pending)) {
            return Ok(());
        }
        // A peer that is closed, or has not accepted yet, has no number.
        let now = list.get(&self.inode).and_then(|socket| socket.peer).filter(|&peer| peer != 0);
        if waits.is_none() && now == peer.map(|peer| peer.inode) {
            return Ok(());
        }
        let wanted = peer.map_or("nobody".to_owned(), |peer| format!("socket {}", peer.end.file));
        let now = now.map_or("nobody".to_owned(), |inode| format!("inode {inode}"));
        let id = self.end.file;
        Err(wrong(format!("Unix socket {id} is connected to {now} and was to be to {wanted}")))
    }
}
