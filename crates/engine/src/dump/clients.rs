//! Unix connections that wait to be accepted with data in them: only who accepts one can read
//! them, and nothing holds new ones off. So in a tree whose tasks listen on Unix sockets, those
//! that do not listen stop first. The others get some time to accept what waits, and nothing new
//! comes.
//!
//! It is an effort, not a promise: what still waits when the tree is frozen is refused.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use torpor_kernel::sock_diag::{self, UnixSocket};

use super::freeze::{self, Seized};
use crate::error::{Error, Result};
use crate::file::socket::state;
use crate::namespace::run_in;
use crate::network::accept::{self, PATIENCE, PAUSE};
use crate::network::listed::inodes_of;
use crate::options::Options;
use crate::proc;

/// Stops the processes of a running tree that listen on no Unix socket, if others of it do, and
/// waits until these have accepted all connections with data. Not for long.
///
/// # Errors
/// A task that is traced by another program.
pub(super) fn stop(opts: &Options) -> Result<Seized> {
    // A first thread that has ended shows no namespaces.
    let tids = proc::numbers(opts.pid, "task").unwrap_or_default();
    let Some(netns) = tids.into_iter().find_map(|tid| proc::open(tid, "ns/net").ok()) else {
        return Ok(Seized::new());
    };
    let space = TreeNetwork(netns.into());
    match space.listeners() {
        Ok(listeners) if listeners.is_empty() => Ok(Seized::new()),
        Ok(listeners) => stop_others(opts, &space, &listeners),
        Err(e) => {
            tracing::debug!("Unix connections are not waited for to be accepted: {e}");
            Ok(Seized::new())
        }
    }
}

fn stop_others(opts: &Options, space: &TreeNetwork, listeners: &HashSet<u32>) -> Result<Seized> {
    let serves = |pid: i32| inodes_of(&[pid]).map(|held| !held.is_disjoint(listeners));
    let (mut servers, mut clients) = (HashSet::new(), Seized::new());
    loop {
        let known = |pid: &i32| servers.contains(pid) || clients.contains_key(pid);
        let new: Vec<i32> = accept::tree(opts)?.into_iter().filter(|pid| !known(pid)).collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            if serves(pid)? {
                servers.insert(pid);
            } else if !servers.is_empty() {
                clients.insert(pid, seize(pid)?);
            }
        }
        // Nobody to wait for: all stop at once.
        if servers.is_empty() {
            return Ok(clients);
        }
    }
    wait(space, &clients);
    Ok(clients)
}

/// Asks all threads of a process to stop. One that is gone has none.
fn seize(pid: i32) -> Result<Vec<i32>> {
    match freeze::seize_all(pid) {
        Err(Error::Gone { .. }) => Ok(Vec::new()),
        seized => seized,
    }
}

/// Waits until the clients stand still and nothing that they have sent waits to be accepted.
fn wait(space: &TreeNetwork, clients: &Seized) {
    let deadline = Instant::now() + PATIENCE;
    let settled = || {
        clients.iter().all(|(&pid, tids)| tids.iter().all(|&tid| !runs(pid, tid)))
            && space.holds_nothing_unaccepted().unwrap_or(true)
    };
    while !settled() && Instant::now() < deadline {
        std::thread::sleep(PAUSE);
    }
}

/// Whether a thread has yet to stop.
fn runs(pid: i32, tid: i32) -> bool {
    let status = proc::thread_status(pid, tid);
    status.is_ok_and(|status| status.get("State").is_some_and(|s| !s.starts_with(['t', 'Z', 'X'])))
}

/// The network namespace of the tree.
struct TreeNetwork(OwnedFd);

impl TreeNetwork {
    fn sockets(&self) -> Result<Vec<UnixSocket>> {
        run_in(&[self.0.as_fd()], || Ok(sock_diag::unix()?))
    }

    /// The inode numbers of all Unix sockets that listen in it.
    fn listeners(&self) -> Result<HashSet<u32>> {
        let listens = |socket: &UnixSocket| u32::from(socket.state) == state::LISTEN;
        Ok(self.sockets()?.iter().filter(|s| listens(s)).map(|s| s.inode).collect())
    }

    fn holds_nothing_unaccepted(&self) -> Result<bool> {
        let all = self.sockets()?;
        let unread: HashMap<u32, u32> = all.iter().map(|s| (s.inode, s.unread)).collect();
        let mut waiting = all.iter().flat_map(|listener| &listener.pending);
        Ok(waiting.all(|client| unread.get(client).is_none_or(|&bytes| bytes == 0)))
    }
}
