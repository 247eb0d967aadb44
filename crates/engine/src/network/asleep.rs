//! The network of a restored tree: asleep until its tasks run.

use std::collections::{HashMap, HashSet};

use torpor_images::ImageDir;
use torpor_images::proto::{FileEntry, InetSkEntry};

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
pub struct Asleep {
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
    /// Whether the namespace is the caller's, and stays when the restore fails.
    external: bool,
    undo: Removal,
}

impl Relock {
    fn remove(&self, spaces: &Namespaces) -> Result<()> {
        spaces.in_netns(self.ns, || self.undo.run())
    }
}

/// What the images say of the connections and locks of a network.
#[derive(Debug)]
pub struct Connections<'a> {
    /// What was asked for.
    pub network: &'a Network,
    /// The images.
    pub images: &'a ImageDir,
    /// What `files.img` says, by id.
    pub entries: &'a HashMap<u32, FileEntry>,
    /// The namespaces, new and old.
    pub spaces: &'a Namespaces,
    /// The pid of the root task in the images.
    pub root: Option<i32>,
}

impl Connections<'_> {
    /// Whether there are connections, which somebody has to silence should the restore be
    /// killed.
    pub fn any(&self) -> bool {
        let connected = |e: &FileEntry| e.isk.as_ref().is_some_and(tcp::is_connection);
        !self.network.tcp_close && self.entries.values().any(connected)
    }

    /// The name of the locks of the dump that the images are from: its id, or, in images from before
    /// there were ids, the pid of its root task.
    fn lock_id(&self) -> String {
        let inventory = self.images.inventory().ok();
        let id = inventory.and_then(|i| i.dump_criu_run_id).unwrap_or_default();
        // It goes into rules: nothing but what our own names are made of.
        let id: String =
            id.chars().filter(|c| c.is_ascii_hexdigit() || *c == '-').take(64).collect();
        let root = self.root.map(|vpid| vpid.to_string());
        if id.is_empty() { root.unwrap_or_default() } else { id }
    }

    /// Takes away what the dump has left to hold the network still, whichever program made it.
    fn unlock(&self, made: &HashSet<u32>) -> Result<()> {
        let method = self.images.inventory()?.network_lock_method;
        let sockets: Vec<&InetSkEntry> = self
            .entries
            .values()
            .filter_map(|e| e.isk.as_ref())
            .filter(|isk| isk.proto == libc::IPPROTO_TCP.cast_unsigned())
            .collect();
        // The dump has locked the tree's own namespaces with TCP sockets of whomever.
        let own = self.spaces.all.iter().filter(|ns| ns.kind == NsKind::Net && !ns.is_host);
        let spaces: HashSet<u32> =
            sockets.iter().filter_map(|isk| isk.ns_id).chain(own.map(|ns| ns.id)).collect();
        let id = self.lock_id();
        let tools = Tool::all_of(method);
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
                if method.is_none() {
                    rules::unlock_old(&id);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The ends of the connections in a network namespace.
    fn connections_in(&self, ns: u32) -> Vec<(Address, Address)> {
        let sockets = self.entries.values().filter_map(|e| e.isk.as_ref());
        let of_space = sockets.filter(|isk| isk.ns_id == Some(ns) && tcp::is_connection(isk));
        of_space.filter_map(tcp::ends).collect()
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
        let sockets = self.entries.values().filter_map(|e| e.isk.as_ref());
        let connected = sockets.filter(|isk| tcp::is_connection(isk));
        let spaces: HashSet<u32> = connected.filter_map(|isk| isk.ns_id).collect();
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
    pub fn lock_external(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, true, |ns| ns.file.is_some())
    }

    /// Locks the network namespace that the root husk was born into, before it gets its
    /// devices, if there are connections in it that lead out.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub fn lock_new(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, false, |ns| ns.file.is_none() && ns.task == 0)
    }

    /// The same of those that only other tasks live in, once they were made.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub fn lock_nested(&mut self, of: &Connections<'_>) -> Result<()> {
        self.lock(of, false, |ns| ns.task != 0 && !of.spaces.given.contains_key(&ns.id))
    }

    fn lock(
        &mut self,
        of: &Connections<'_>,
        external: bool,
        is_one: impl Fn(&Namespace) -> bool,
    ) -> Result<()> {
        // What a skeleton was built with is locked as a whole, by the name of the dump that it was built by.
        let is_locked = |ns: &Namespace| self.locks.iter().any(|lock| lock.ns == ns.id);
        let is_meant = |ns: &Namespace| !ns.is_host && is_one(ns) && !is_locked(ns);
        let wanted: HashSet<u32> = of
            .entries
            .values()
            .filter_map(|e| e.isk.as_ref())
            .filter(|isk| tcp::is_connection(isk))
            .filter_map(|isk| isk.ns_id)
            .filter(|&ns| of.spaces.by_id(ns).is_some_and(is_meant))
            .filter(|&ns| external || !of.are_inner(ns))
            .collect();
        if of.network.lock == NetworkLock::Skip || of.network.tcp_close || wanted.is_empty() {
            return Ok(());
        }
        let id = of.lock_id();
        let by_dump = of.images.inventory()?.network_lock_method.and_then(Tool::of_method);
        for ns in wanted {
            // One that is joined is not there yet, nor ours to lock.
            if of.spaces.in_netns(ns, is_own)? {
                continue;
            }
            if external
                && of.spaces.in_netns(ns, || Ok(by_dump.is_some_and(|tool| tool.is_locked(&id))))?
            {
                continue;
            }
            let tool = rules::choose(of.network.lock)?;
            let set = of.spaces.in_netns(ns, || {
                let is_new = !external || !tool.is_locked(&id);
                is_new.then(|| rules::lock(tool, &id, &Scope::All, false)).transpose()
            })?;
            // The lock of the dump stays if the restore fails, see `unlock_and_wake`.
            if set.is_some() {
                let undo = Removal::of_lock(tool, &id, &Scope::All);
                self.locks.push(Relock { ns, external, undo });
            }
        }
        Ok(())
    }

    /// The last step of a restore before its tasks run: the network goes on, and so do the
    /// connections.
    ///
    /// # Errors
    /// If a lock cannot be removed, or a connection does not wake.
    pub fn wake(&mut self, of: &Connections<'_>, id_maps: &IdMaps) -> Result<()> {
        let locks = std::mem::take(&mut self.locks);
        let made: HashSet<u32> = locks.iter().map(|lock| lock.ns).collect();
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
    pub fn let_go(&mut self) {
        self.sleeping.clear();
        self.guardian = Guardian::default();
    }

    /// The restore has failed: takes away the locks of namespaces that do not go with it.
    pub fn give_up(&mut self, spaces: &Namespaces) {
        for lock in std::mem::take(&mut self.locks).iter().filter(|lock| lock.external) {
            if let Err(e) = lock.remove(spaces) {
                tracing::error!("the network stays locked: {e}");
            }
        }
    }
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
    use torpor_images::kind;
    use torpor_images::proto::InventoryEntry;

    use super::*;
    use crate::network::nftables::table;

    #[test]
    fn locks_have_the_name_of_the_dump_or_of_its_root() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let name = |id: Option<&str>, root| {
            let dump_criu_run_id = id.map(str::to_owned);
            let inventory =
                InventoryEntry { img_version: 2, dump_criu_run_id, ..InventoryEntry::default() };
            images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
            let (network, spaces) = (&Network::default(), &Namespaces::default());
            let (images, entries) = (&images, &HashMap::new());
            table(&Connections { network, images, entries, spaces, root }.lock_id())
        };
        assert_eq!(name(None, Some(42)), "CRIU-42");
        assert_eq!(name(Some(""), Some(42)), "CRIU-42");
        assert_eq!(name(Some("0a5f-7"), Some(42)), "CRIU-0a5f-7");
        assert_eq!(name(Some("0a5f; drop"), Some(42)), "CRIU-0a5fd");
    }
}
