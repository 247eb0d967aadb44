//! Connections that wait to be accepted belong to no descriptor, and cannot be dumped. A busy
//! server has some at nearly every moment, for some microseconds each. So before a tree is frozen
//! new connections are held off, and its tasks get some time to accept those that wait. The
//! clients of the ones held off try again by themselves: that is what TCP is for.
//!
//! It is an effort, not a promise: what waits when the tree is frozen is refused.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_kernel::sock_diag::InetSocket;

use super::listed::{inodes_of, tcp_sockets};
use super::rules::{self, Removal, Tool};
use super::{iptables, newcomers};
use crate::error::Result;
use crate::file::found::own_pid;
use crate::file::socket::state;
use crate::guardian::Guardian;
use crate::namespace::{NsKind, run_in};
use crate::options::{Network, NetworkLock};
use crate::proc;

/// How long the tasks have to accept what waits. On a busy machine a task may get no processor for some tenths of a
/// second.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked.
pub(crate) const PAUSE: Duration = Duration::from_millis(2);

/// How the names begin of what holds connections off, which is no lock: a table of nftables, or a chain of iptables.
pub(crate) const NAME: &str = "CRIU-accept-";

/// New connections are held off while this lives.
#[derive(Debug)]
pub(crate) struct HeldOff(Vec<Door>);

/// A network namespace, and the ports there that the tree listens on.
#[derive(Debug)]
struct Door {
    netns: OwnedFd,
    /// Its inode number.
    space: u64,
    ports: BTreeSet<u16>,
    /// What there is to be done at the end.
    undo: Option<Removal>,
}

impl HeldOff {
    /// Lets new connections in again.
    pub(crate) fn end(self, guardian: &Guardian) {
        self.0.into_iter().for_each(|door| door.end(guardian));
    }
}

impl Door {
    fn end(mut self, guardian: &Guardian) {
        // Where it fails the guardian tries again.
        if self.let_in() {
            self.forget(guardian);
        }
    }

    fn let_in(&self) -> bool {
        let done = self.remove();
        if let Err(e) = &done {
            tracing::error!("new connections are still held off: {e}");
        }
        done.is_ok()
    }

    /// An attempt to hold connections off was in vain: what it has left is taken away, and nobody tries
    /// that again.
    fn give_up(&mut self, guardian: &Guardian) {
        if let Err(e) = self.remove() {
            tracing::debug!("{e}");
        }
        self.forget(guardian);
    }

    fn remove(&self) -> Result<()> {
        match &self.undo {
            Some(undo) => run_in(&[self.netns.as_fd()], || undo.run()),
            None => Ok(()),
        }
    }

    /// Nothing is to be done at the end any more.
    fn forget(&mut self, guardian: &Guardian) {
        for undo in self.undo.take().iter().flat_map(|removal| removal.undos(self.space)) {
            if let Err(e) = guardian.forget(&undo) {
                tracing::debug!("{e}");
            }
        }
    }
}

/// The tree was not even frozen, or the dump ended without a word.
impl Drop for Door {
    fn drop(&mut self) {
        self.let_in();
    }
}

/// Lets the tasks of a running tree accept the connections that wait for them, in all networks that they live in, while
/// new ones are held off, which they are until the result is ended. Nothing is done where connections are not
/// dumped, or those that wait are left out anyway.
pub(crate) fn settle(network: &Network, tree: Running, guardian: &Guardian) -> Option<HeldOff> {
    let dumped = network.tcp_established && !network.tcp_close && !network.skip_in_flight;
    if !dumped || network.lock == NetworkLock::Skip {
        return None;
    }
    let skip = |e| tracing::debug!("connections are not waited for to be accepted: {e}");
    let tasks = tree.tasks().map_err(skip).unwrap_or_default();
    let mut doors = Vec::new();
    for (space, member) in networks(&tasks) {
        let held = Door::find(space, member, &tasks).and_then(|door| match door {
            Some(door) => door.hold_off(network.lock, guardian).map(Some),
            None => Ok(None),
        });
        doors.extend(held.map_err(skip).ok().flatten());
    }
    wait(&doors);
    (!doors.is_empty()).then_some(HeldOff(doors))
}

/// The network namespaces of tasks, by their inode numbers, each with a task that lives there. One whose first thread has
/// ended shows none.
pub(super) fn networks(tasks: &[i32]) -> HashMap<u64, i32> {
    let space = |&pid: &i32| Some((proc::ns_inode(pid, NsKind::Net.name()).ok()?, pid));
    tasks.iter().filter_map(space).collect()
}

/// A tree that runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    /// Its first process.
    pub root: i32,
    /// How many threads look for the others.
    pub workers: usize,
}

impl Running {
    /// Its processes, as far as they are there.
    ///
    /// # Errors
    /// If the children of a task cannot be read. One that ends meanwhile is no error.
    pub(crate) fn tasks(self) -> Result<Vec<i32>> {
        let mut all = vec![self.root];
        let mut next = 0;
        while let Some(&pid) = all.get(next) {
            next += 1;
            let Ok(tids) = proc::numbers(pid, "task") else { continue };
            let children = proc::children(pid, &tids, self.workers)?;
            all.extend(
                children.into_iter().filter(|child| !all.contains(child)).collect::<Vec<_>>(),
            );
        }
        Ok(all)
    }
}

impl Door {
    /// Where the tree listens in the network namespace `space` that `member` lives in, if it does.
    fn find(space: u64, member: i32, tasks: &[i32]) -> Result<Option<Self>> {
        let netns: OwnedFd = proc::open(member, "ns/net")?.into();
        let listed = run_in(&[netns.as_fd()], tcp_sockets)?;
        let mut listeners: Vec<InetSocket> =
            listed.into_iter().filter(|s| u32::from(s.state) == state::LISTEN).collect();
        let is_own = space != proc::ns_inode(own_pid(), NsKind::Net.name())?;
        if !is_own && !listeners.is_empty() {
            let inodes = inodes_of(tasks)?;
            listeners.retain(|listener| inodes.contains(&listener.inode));
        }
        let ports: BTreeSet<u16> = listeners.iter().map(|listener| listener.source_port).collect();
        Ok((!ports.is_empty()).then_some(Door { netns, space, ports, undo: None }))
    }

    /// Holds new connections off, as long as this lives.
    fn hold_off(mut self, lock: NetworkLock, guardian: &Guardian) -> Result<Self> {
        // Whoever asks for iptables gets a table of nftables only where there is no iptables.
        if lock == NetworkLock::Iptables && rules::choose(lock)? == Tool::Iptables {
            return self.hold_off_by_programs(lock, guardian);
        }
        let name = name();
        let undo = Removal::Table(name.clone());
        undo.watch(guardian, self.space, self.netns.as_fd())?;
        self.undo = Some(undo);
        let made = run_in(&[self.netns.as_fd()], || newcomers::hold_off(&name, &self.ports));
        match made {
            Ok(()) => Ok(self),
            Err(e) => {
                tracing::debug!("without nftables: {e}");
                self.give_up(guardian);
                self.hold_off_by_programs(lock, guardian)
            }
        }
    }

    /// The same by iptables, if that is the tool.
    fn hold_off_by_programs(mut self, lock: NetworkLock, guardian: &Guardian) -> Result<Self> {
        // The tasks get their time, and no more.
        if rules::choose(lock)? != Tool::Iptables {
            return Ok(self);
        }
        let line = guardian.line_for_children()?;
        let undo = Removal::Programs(iptables::let_in(&name()));
        undo.watch(guardian, self.space, self.netns.as_fd())?;
        self.undo = Some(undo);
        let set = iptables::hold_off(&name(), &self.ports);
        let made = run_in(&[self.netns.as_fd()], || {
            set.iter().try_for_each(|(argv, input)| rules::run(argv, input))
        });
        if made.is_err() {
            self.give_up(guardian);
        }
        drop(line);
        made.map(|()| self)
    }

    /// Whether a connection waits to be accepted, or is on its way there.
    fn has_waiting(&self) -> Result<bool> {
        let waits = |socket: &InetSocket| {
            self.ports.contains(&socket.source_port)
                && match u32::from(socket.state) {
                    state::LISTEN => socket.queued > 0,
                    other => other == state::SYN_RECV,
                }
        };
        run_in(&[self.netns.as_fd()], || Ok(tcp_sockets()?.iter().any(waits)))
    }
}

/// The name of what this process holds connections off with.
fn name() -> String {
    format!("{NAME}{}", std::process::id())
}

/// Waits until nothing waits to be accepted any more; not for long.
fn wait(doors: &[Door]) {
    let deadline = Instant::now() + PATIENCE;
    let waiting = |door: &Door| {
        door.has_waiting().unwrap_or_else(|e| {
            tracing::debug!("{e}");
            false
        })
    };
    while doors.iter().any(waiting) && Instant::now() <= deadline {
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::file::socket::testing::in_netns;
    use crate::network::nftables;

    /// How long a connection that is held off is waited for.
    const HELD_OFF: Duration = Duration::from_millis(200);

    /// A door of the network namespace of this thread, as if it were that of this process.
    fn door(port: u16) -> Door {
        Door {
            netns: std::fs::File::open("/proc/thread-self/ns/net").unwrap().into(),
            space: proc::ns_inode(own_pid(), NsKind::Net.name()).unwrap(),
            ports: BTreeSet::from([port]),
            undo: None,
        }
    }

    #[test]
    fn nothing_stays_of_an_attempt_in_vain() {
        in_netns(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let mut door = door(address.port());
            let name = format!("{NAME}vain");
            newcomers::hold_off(&name, &door.ports).unwrap();
            assert!(TcpStream::connect_timeout(&address, HELD_OFF).is_err());
            door.undo = Some(Removal::Table(name));
            door.give_up(&Guardian::default());
            assert!(door.undo.is_none());
            TcpStream::connect(address).unwrap();
            // Rules that were not even made.
            door.undo = Some(Removal::Programs(iptables::let_in("CRIU-accept-vain")));
            door.give_up(&Guardian::default());
            assert!(door.undo.is_none());
        });
    }

    #[test]
    fn who_asks_for_iptables_gets_no_table_of_nftables() {
        in_netns(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let guardian = Guardian::default();
            let door = door(address.port()).hold_off(NetworkLock::Iptables, &guardian).unwrap();
            assert!(matches!(door.undo, Some(Removal::Programs(_))));
            assert!(!nftables::is_there(&name()));
            assert!(TcpStream::connect_timeout(&address, HELD_OFF).is_err());
            door.end(&guardian);
            TcpStream::connect(address).unwrap();
        });
    }

    #[test]
    fn new_connections_are_held_off_and_no_others() {
        in_netns(|| {
            for (is_nft, listen) in [(true, "127.0.0.1:0"), (true, "[::1]:0"), (false, "[::1]:0")] {
                let listener = TcpListener::bind(listen).unwrap();
                let address = listener.local_addr().unwrap();
                let other = TcpListener::bind(listen).unwrap();
                let ports = BTreeSet::from([address.port()]);
                let name = format!("{NAME}test");
                let undo = match is_nft {
                    true => Removal::Table(name.clone()),
                    false => Removal::Programs(iptables::let_in(&name)),
                };
                let before = TcpStream::connect(address).unwrap();
                match is_nft {
                    true => newcomers::hold_off(&name, &ports).unwrap(),
                    false => iptables::hold_off(&name, &ports)
                        .iter()
                        .for_each(|(argv, input)| rules::run(argv, input).unwrap()),
                }
                assert!(TcpStream::connect_timeout(&address, HELD_OFF).is_err());
                TcpStream::connect(other.local_addr().unwrap()).unwrap();
                rustix::io::write(&before, b"x").unwrap();
                let (served, _) = listener.accept().unwrap();
                assert_eq!(rustix::io::read(&served, &mut [0u8; 4]).unwrap(), 1);
                undo.run().unwrap();
                TcpStream::connect(address).unwrap();
            }
        });
    }
}
