//! Unix connections that wait to be accepted with data in them: only a task that accepts one can
//! read them, and nothing holds new ones off. So in a tree whose tasks listen on Unix sockets,
//! those that do not listen stop first. The others get some time to accept what waits, and nothing
//! new comes.
//!
//! It is an effort, not a promise: what still waits when the tree is frozen is refused.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_kernel::sock_diag::{self, UnixSocket};

use super::freeze::{self, Seized};
use crate::error::{Error, Result};
use crate::file::socket::state;
use crate::namespace::run_in;
use crate::network::accept::{PATIENCE, PAUSE, Running};
use crate::network::listed::inodes_of;
use crate::options::Options;
use crate::proc;

/// How often the clients are stopped anew. A server may have to serve one connection before it
/// accepts the next, and the client of that one may have stopped before it has asked.
const ATTEMPTS: u32 = 12;
/// For how long a server may accept at the first attempt, and each time twice as long as before: one that waits for a
/// client that has stopped accepts nothing, and one on a busy machine needs its time.
const FIRST: Duration = Duration::from_millis(50);

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
        Ok(listeners) => stop_well(opts, &space, &listeners),
        Err(e) => {
            tracing::debug!("Unix connections are not waited for to be accepted: {e}");
            Ok(Seized::new())
        }
    }
}

/// Stops the clients until nothing waits, or nothing is accepted any more.
fn stop_well(opts: &Options, space: &TreeNetwork, listeners: &HashSet<u32>) -> Result<Seized> {
    let mut patience = FIRST;
    for _ in 1..ATTEMPTS {
        let (clients, waiting) = stop_others(opts, space, listeners, patience)?;
        if waiting.is_empty() {
            return Ok(clients);
        }
        tracing::debug!("Unix sockets {waiting:?} are not accepted yet: their tasks go on");
        freeze::let_go(clients, Instant::now() + opts.stop.patience())?;
        if !one_is_accepted(space, listeners, &waiting) {
            break;
        }
        patience = (2 * patience).min(PATIENCE);
    }
    Ok(stop_others(opts, space, listeners, PATIENCE)?.0)
}

/// Whether a connection that waits is accepted before long.
fn one_is_accepted(space: &TreeNetwork, doors: &HashSet<u32>, waiting: &HashSet<u32>) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let still = space.unaccepted(doors).unwrap_or_default();
        if !waiting.is_subset(&still) || Instant::now() > deadline {
            return !waiting.is_subset(&still);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the processes that were stopped, and the connections that still wait with data, for which the servers have
/// had `patience`.
fn stop_others(
    opts: &Options,
    space: &TreeNetwork,
    listeners: &HashSet<u32>,
    patience: Duration,
) -> Result<(Seized, HashSet<u32>)> {
    let (mut servers, mut clients) = (HashSet::new(), Seized::new());
    let mut doors: HashSet<u32> = HashSet::new();
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Before the look at the tree: a task that has not stopped yet may make another process
        // after it.
        let rest = clients.iter().all(|(&pid, tids)| has_stopped(pid, tids));
        let new = newcomers(opts, &servers, &clients)?;
        if new.is_empty() && (rest || Instant::now() > deadline) {
            break;
        }
        if new.is_empty() {
            std::thread::sleep(PAUSE);
        }
        for pid in new {
            let held = inodes_of(&[pid])?;
            if !held.is_disjoint(listeners) {
                servers.insert(pid);
                doors.extend(held.intersection(listeners));
            } else if !servers.is_empty() {
                clients.insert(pid, seize(pid)?);
            }
        }
        // Nobody to wait for: all stop at once.
        if servers.is_empty() {
            return Ok((clients, HashSet::new()));
        }
    }
    let deadline = Instant::now() + patience;
    loop {
        let waiting = space.unaccepted(&doors).unwrap_or_default();
        if waiting.is_empty() || Instant::now() > deadline {
            return Ok((clients, waiting));
        }
        std::thread::sleep(PAUSE);
    }
}

/// The processes of the tree that are neither known yet nor in a call of vfork(2): those would stop,
/// and their parents not.
fn newcomers(opts: &Options, servers: &HashSet<i32>, clients: &Seized) -> Result<Vec<i32>> {
    let is_borrowed = |pid: i32| {
        let parent = proc::stat(pid).map_or(0, |stat| stat.ppid);
        let rests = clients.get(&parent).is_some_and(|tids| has_stopped(parent, tids));
        !rests && pid != opts.pid && freeze::borrows(pid, parent)
    };
    let mut all = Running { root: opts.pid, workers: opts.memory.workers() }.tasks()?;
    all.retain(|pid| !servers.contains(pid) && !clients.contains_key(pid) && !is_borrowed(*pid));
    Ok(all)
}

/// Asks all threads of a process to stop. One that is gone has none.
fn seize(pid: i32) -> Result<Vec<i32>> {
    match freeze::seize_all(pid) {
        Err(Error::Gone { .. }) => Ok(Vec::new()),
        seized => seized,
    }
}

/// Whether the threads of a process have stopped.
fn has_stopped(pid: i32, tids: &[i32]) -> bool {
    tids.iter().all(|&tid| !runs(pid, tid))
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

    /// Who has sent data into a connection that waits at one of these listeners.
    fn unaccepted(&self, doors: &HashSet<u32>) -> Result<HashSet<u32>> {
        let all = self.sockets()?;
        let unread: HashMap<u32, u32> = all.iter().map(|s| (s.inode, s.unread)).collect();
        let doors = all.iter().filter(|listener| doors.contains(&listener.inode));
        let mut waiting: HashSet<u32> = doors.flat_map(|door| &door.pending).copied().collect();
        waiting.retain(|client| unread.get(client).is_some_and(|&bytes| bytes > 0));
        Ok(waiting)
    }
}
