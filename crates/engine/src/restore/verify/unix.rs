//! Unix sockets: with which of the tree each is connected.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};

use torpor_images::proto::{FileEntry, UnixSkEntry};
use torpor_kernel::sock_diag::{self as diag, UnixSocket};
use torpor_sys::socket;

use super::files::Opened;
use super::{given, wrong};
use crate::error::{Context, Result};
use crate::file::socket::{EXTERN, state};
use crate::namespace::run_in;

/// What the kernel lists in a network namespace, by inode number.
type List = HashMap<u32, UnixSocket>;

/// Compares all Unix sockets of the tree. Each namespace is listed once, if it has any.
///
/// # Errors
/// The first one with another peer, or with one that it was not to have; if the kernel does not list its
/// sockets (sock_diag(7)).
pub(super) fn peers(opened: &Opened<'_>) -> Result<()> {
    // Some are found by their names, and no task has them; what the caller has handed over has the peer that the
    // caller has given it.
    let is_outside = |entry: &&FileEntry| {
        let is_external = entry.usk.as_ref().is_some_and(|usk| usk.uflags & EXTERN != 0);
        is_external || given::is_given(opened, entry)
    };
    let (outside, within): (Vec<_>, Vec<_>) = opened.entries.values().partition(is_outside);
    let outside = outside.into_iter().filter_map(|entry| entry.usk.as_ref());
    let outside: HashSet<u32> = outside.map(|usk| usk.ino).collect();
    let within = within.into_iter().filter_map(|entry| entry.usk.as_ref());
    let sockets = within.filter_map(|entry| SocketHere::of(opened, entry).transpose());
    let sockets: Vec<SocketHere<'_>> = sockets.collect::<Result<_>>()?;
    let by_image: HashMap<u32, &SocketHere<'_>> =
        sockets.iter().map(|s| (s.entry.ino, s)).collect();
    let mut lists: HashMap<u64, List> = HashMap::new();
    for socket in sockets.iter().filter(|socket| !outside.contains(&socket.entry.peer)) {
        let peer = by_image.get(&socket.entry.peer).copied();
        socket.check(peer, socket.list(&mut lists)?)?;
    }
    Ok(())
}

/// A socket of the images, as it is here.
struct SocketHere<'c> {
    entry: &'c UnixSkEntry,
    file: BorrowedFd<'c>,
    inode: u32,
}

impl<'c> SocketHere<'c> {
    fn of(opened: &'c Opened<'_>, entry: &'c UnixSkEntry) -> Result<Option<Self>> {
        let Some(file) = opened.files.get(entry.id) else { return Ok(None) };
        let stat = rustix::fs::fstat(file).context(|| format!("fstat of socket {}", entry.id))?;
        Ok(u32::try_from(stat.st_ino).ok().map(|inode| SocketHere { entry, file, inode }))
    }

    /// What the kernel lists where it is.
    fn list<'l>(&self, lists: &'l mut HashMap<u64, List>) -> Result<&'l List> {
        let what = || format!("network namespace of socket {}", self.entry.id);
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

    /// It is connected with `peer`, or waits there to be accepted; without one, with nobody.
    fn check(&self, peer: Option<&SocketHere<'_>>, list: &List) -> Result<()> {
        let pending = |socket: &UnixSocket| socket.pending.contains(&self.inode);
        let waits = peer.filter(|peer| peer.entry.state == state::LISTEN);
        if waits.is_some_and(|listener| list.get(&listener.inode).is_some_and(pending)) {
            return Ok(());
        }
        // A peer that is closed, or has not accepted yet, has no number.
        let now = list.get(&self.inode).and_then(|socket| socket.peer).filter(|&peer| peer != 0);
        if waits.is_none() && now == peer.map(|peer| peer.inode) {
            return Ok(());
        }
        let wanted = peer.map_or("nobody".to_owned(), |peer| format!("socket {}", peer.entry.id));
        let now = now.map_or("nobody".to_owned(), |inode| format!("inode {inode}"));
        let id = self.entry.id;
        Err(wrong(format!("Unix socket {id} is connected to {now} and was to be to {wanted}")))
    }
}
