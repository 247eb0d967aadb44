//! The network of a restored tree: asleep until its tasks run.

use std::collections::{HashMap, HashSet};

use torpor_policy::{InetSocket, Inventory, OpenFile};

use super::left;
use super::listed::is_own;
use super::rules::{self, Removal, Scope, Tool};
use crate::error::Result;
use crate::file::socket::address::Address;
use crate::file::socket::tcp::{self, Sleeping};
use crate::guardian::Guardian;
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespace, Namespaces, NsKind};
use crate::options::{Network, NetworkLock};

/// What a restore has still to do with the network.
#[derive(Debug, Default)]
pub(crate) struct Asleep {
    /// Silences connections if the restore is killed; nobody without connections.
    pub guardian: Guardian,
    /// Connections that were made, but wait for their tasks.
    pub sleeping: Vec<Sleeping>,
    /// The locks that this restore has set.
    locks: Vec<Relock>,
}

/// A lock that a restore has set in a network namespace.
#[derive(Debug)]
struct Relock {
    /// The number of the namespace.
    ns: u32,
    origin: NetworkOrigin,
    undo: Removal,
}

impl Relock {
    fn remove(&self, spaces: &Namespaces) -> Result<()> {
        spaces.in_netns(self.ns, || self.undo.run())
    }
}

/// Where a network namespace comes from that a restore locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NetworkOrigin {
    /// The caller hands it over (`--external`): it is there before the tree, and is the tree's alone.
    External,
    /// The root task joins it (`--join-ns`): others live there as well.
    Joined,
    /// The root husk is born into it.
    New,
    /// Only other tasks than the root live in it.
    Nested,
}

impl NetworkOrigin {
    fn of(ns: &Namespace, spaces: &Namespaces) -> Self {
        match spaces.given.get(&ns.id) {
            Some(given) if given.key.is_some() => NetworkOrigin::External,
            Some(_) => NetworkOrigin::Joined,
            None if ns.is_host => NetworkOrigin::Joined,
            None if ns.task == 0 => NetworkOrigin::New,
            None => NetworkOrigin::Nested,
        }
    }

    /// Whether the namespace is the caller's, and stays when the restore fails.
    fn is_callers(self) -> bool {
        matches!(self, NetworkOrigin::External | NetworkOrigin::Joined)
    }

    /// What is locked of it.
    fn scope(self, connections: Vec<(Address, Address)>) -> Scope {
        match self {
            NetworkOrigin::Joined => Scope::Connections(connections),
            NetworkOrigin::External | NetworkOrigin::New | NetworkOrigin::Nested => Scope::All,
        }
    }
}

/// What the images say of the connections and locks of a network.
#[derive(Debug)]
pub(crate) struct Connections<'a> {
    /// What was asked for.
    pub network: &'a Network,
    /// What the images are from.
    pub inventory: &'a Inventory,
    /// The open files of the images, by their numbers.
    pub described: &'a HashMap<u32, OpenFile>,
    /// The namespaces, new and old.
    pub spaces: &'a Namespaces,
    /// The pid of the root task in the images.
    pub root: Option<i32>,
}

impl Connections<'_> {
    /// Whether there are connections, which somebody has to silence should the restore be
    /// killed.
    pub(crate) fn any(&self) -> bool {
        !self.network.tcp_close && self.sockets().any(InetSocket::is_kept)
    }

    /// All Internet sockets.
    fn sockets(&self) -> impl Iterator<Item = &InetSocket> {
        self.described.values().filter_map(OpenFile::inet)
    }

    /// The name of the locks of the dump that the images are from: its id, or, in images from before
    /// there were ids, the pid of its root task.
    fn lock_id(&self) -> String {
        let root = || self.root.map(|vpid| vpid.to_string()).unwrap_or_default();
        self.inventory.name.clone().unwrap_or_else(root)
    }

    /// Takes away what the dump has left to hold the network still, whichever program made it.
    fn unlock(&self, made: &HashSet<u32>) -> Result<()> {
        let locked_by = self.inventory.locked_by;
        let sockets = self.sockets().filter(|socket| socket.kind.is_of_tcp());
        // The dump has locked the tree's own namespaces with TCP sockets of whomever.
        let own = self.spaces.all.iter().filter(|ns| ns.kind == NsKind::Net && !ns.is_host);
        let spaces: HashSet<u32> =
            sockets.filter_map(|of| of.kind.network()).chain(own.map(|ns| ns.id)).collect();
        let id = self.lock_id();
        let tools = Tool::all_of(locked_by);
        for &ns in spaces.difference(made) {
            let ends = self.connections_in(ns);
            let is_host = self.spaces.by_id(ns).is_none_or(|ns| ns.is_host);
            self.spaces.in_netns(ns, || {
                let ends = Scope::Connections(ends);
                for &tool in &tools {
                    rules::unlock(tool, &id, &ends)?;
                    if !is_host {
                        rules::unlock(tool, &id, &Scope::All)?;
                    }
                }
                if locked_by.is_none() {
                    rules::unlock_old(&id);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The ends of the connections in a network namespace.
    fn connections_in(&self, ns: u32) -> Vec<(Address, Address)> {
        let kept = self.sockets().filter(|of| of.kind.network() == Some(ns) && of.is_kept());
        kept.map(|of| tcp::ends(&of.ends)).collect()
    }

    /// Whether all connections in a network namespace are between sockets of the images: they sleep until both
    /// ends are there, and no packet comes from elsewhere.
    fn are_inner(&self, ns: u32) -> bool {
        let all: HashSet<(Address, Address)> = self.connections_in(ns).into_iter().collect();
        let is_inner = |(remote, local): &(Address, Address)| {
            local.is_loopback() && all.contains(&(*local, *remote))
        };
        all.iter().all(is_inner)
    }

    /// Takes away what other dumps have left that holds one of these connections.
    fn lift_left(&self) {
        let kept = self.sockets().filter(|of| of.is_kept());
        let spaces: HashSet<u32> = kept.filter_map(|of| of.kind.network()).collect();
        for ns in spaces {
            let ends = self.connections_in(ns);
            if let Err(e) = self.spaces.in_netns(ns, || left::lift(&ends)) {
                tracing::warn!("a lock that another dump has left may hold connections: {e}");
            }
        }
    }
}

impl Asleep {
    /// Locks the network namespaces that the caller hands over and that connections are to
    /// be restored in: the first thing of all, since they have addresses already, and answer
    /// by a reset what the other ends go on to send.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock_external(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, &[NetworkOrigin::External])
    }

    /// Locks the network namespace that the root husk was born into, before it gets its
    /// devices, if there are connections in it that lead out.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock_new(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, &[NetworkOrigin::New])
    }

    /// The same of those that only other tasks live in, once they were made.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock_nested(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, &[NetworkOrigin::Nested])
    }

    /// Locks the connections, and nothing else, of the network namespace that the root husk has joined. Not before the
    /// last of several rounds: the source may run in that namespace until then.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock_joined(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, &[NetworkOrigin::Joined])
    }

    /// Locks what nothing else has locked when the last of several rounds is there, for connections that no earlier
    /// one had: their namespaces have addresses already, and no sockets yet.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock_late(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(
            of,
            &[
                NetworkOrigin::External,
                NetworkOrigin::New,
                NetworkOrigin::Nested,
                NetworkOrigin::Joined,
            ],
        )
    }

    fn lock(&mut self, of: &Connections<'_>, meant: &[NetworkOrigin]) -> Result<()> {
        if of.network.lock == NetworkLock::Skip || of.network.tcp_close {
            return Ok(());
        }
        let kept = of.sockets().filter(|socket| socket.is_kept());
        let wanted: HashSet<u32> = kept.filter_map(|socket| socket.kind.network()).collect();
        for id in wanted {
            // What a skeleton was built with is locked by the name of the dump that it was built by.
            let is_locked = self.locks.iter().any(|lock| lock.ns == id);
            let is_hosts = |ns: &Namespace| ns.is_host && of.spaces.joined_network.is_none();
            let Some(ns) = of.spaces.by_id(id).filter(|ns| !is_hosts(ns) && !is_locked) else {
                continue;
            };
            let origin = NetworkOrigin::of(ns, of.spaces);
            let leads_out = origin == NetworkOrigin::External || !of.are_inner(id);
            if meant.contains(&origin) && leads_out {
                self.locks.extend(lock_one(of, id, origin)?);
            }
        }
        Ok(())
    }

    /// The last step of a restore before its tasks run: the network goes on, and so do the
    /// connections.
    ///
    /// # Errors
    /// If a lock cannot be removed, or a connection does not wake.
    pub(crate) fn wake(&mut self, of: &Connections<'_>, id_maps: &IdMaps) -> Result<()> {
        let locks = std::mem::take(&mut self.locks);
        // The lock of the dump may be there beside that of single connections.
        let made: HashSet<u32> = locks
            .iter()
            .filter(|lock| lock.origin != NetworkOrigin::Joined)
            .map(|lock| lock.ns)
            .collect();
        locks.iter().try_for_each(|lock| lock.remove(of.spaces))?;
        if of.network.lock != NetworkLock::Skip {
            of.unlock(&made)?;
            if !of.network.tcp_close {
                of.lift_left();
            }
        }
        self.sleeping.iter().try_for_each(|s| s.wake(id_maps))
    }

    /// The tasks run: the connections are theirs alone.
    pub(crate) fn let_go(&mut self) {
        self.sleeping.clear();
        self.guardian = Guardian::default();
    }

    /// The restore has failed: takes away the locks of namespaces that do not go with it.
    pub(crate) fn give_up(&mut self, spaces: &Namespaces) {
        for lock in std::mem::take(&mut self.locks).iter().filter(|lock| lock.origin.is_callers()) {
            if let Err(e) = lock.remove(spaces) {
                tracing::error!("the network stays locked: {e}");
            }
        }
    }
}

/// Locks a network namespace, if the dump has not: its lock stays if the restore fails.
fn lock_one(of: &Connections<'_>, ns: u32, origin: NetworkOrigin) -> Result<Option<Relock>> {
    let scope = origin.scope(of.connections_in(ns));
    // That of the caller itself is not ours to lock as a whole.
    if scope == Scope::All && of.spaces.in_netns(ns, is_own)? {
        return Ok(None);
    }
    let id = of.lock_id();
    let is_locked = |tool: Tool| of.spaces.in_netns(ns, || Ok(tool.is_locked(&id)));
    if origin.is_callers() {
        let by_dump = of.inventory.locked_by.and_then(Tool::of_inventory);
        if by_dump.map_or(Ok(false), is_locked)? {
            return Ok(None);
        }
    }
    let tool = rules::choose(of.network.lock)?;
    if origin.is_callers() && is_locked(tool)? {
        return Ok(None);
    }
    of.spaces.in_netns(ns, || rules::lock(tool, &id, &scope, false))?;
    Ok(Some(Relock { ns, origin, undo: Removal::of_lock(tool, &id, &scope) }))
}

/// What was not let go ends, and the peers shall not see it: they wait for the next try.
/// Comes behind the end of the tasks, which is not the last of the connections, since
/// the restore has them as well.
impl Drop for Asleep {
    fn drop(&mut self) {
        self.sleeping.iter().for_each(Sleeping::silence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::nftables::table;

    #[test]
    fn locks_have_the_name_of_the_dump_or_of_its_root() {
        let name = |id: Option<&str>, root| {
            let inventory = &Inventory { name: id.map(str::to_owned), ..Inventory::default() };
            let (network, spaces) = (&Network::default(), &Namespaces::default());
            let described = &HashMap::new();
            table(&Connections { network, inventory, described, spaces, root }.lock_id())
        };
        assert_eq!(name(None, Some(42)), "CRIU-42");
        assert_eq!(name(Some("0a5f-7"), Some(42)), "CRIU-0a5f-7");
    }
}
