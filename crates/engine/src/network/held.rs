//! The network of a dumped tree: held still until its tasks go on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use torpor_images::{ImageDir, lock};
use torpor_kernel::sock_diag::InetSocket;
use torpor_policy::LockedBy;
use torpor_store::Store;

use super::accept::{self, Running};
use super::listed::{inodes_of, is_own, is_shared, tcp_sockets};
use super::nftables::Ends;
use super::rules::{self, Removal, Scope, Tool};
use crate::error::{Context, Error, Result};
use crate::file::found::own_pid;
use crate::file::socket::address::Address;
use crate::file::socket::repair::{silence, undo_silence};
use crate::file::socket::state;
use crate::guardian::{Guardian, Undo};
use crate::namespace::{Namespace, Namespaces, NsKind, run_in};
use crate::options::{Network, NetworkLock};
use crate::proc;

/// What a dump does to the network.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Names the locks; in the inventory, so that the restore finds them.
    id: String,
    /// Where they are noted until there is an inventory, if that is a directory.
    images: Option<Arc<dyn Store>>,
    /// The name of that note.
    note: Option<String>,
    /// What the locks are set with.
    tool: Option<Tool>,
    locks: Vec<Lock>,
    connections: Vec<HeldConnection>,
    /// New connections are held off.
    pub held_off: Option<accept::HeldOff>,
}

/// A connection that was dumped.
#[derive(Debug)]
struct HeldConnection {
    socket: OwnedFd,
    inode: u32,
}

/// A lock in one network namespace.
#[derive(Debug)]
struct Lock {
    /// Inode number of the namespace.
    space: u64,
    netns: OwnedFd,
    scope: Scope,
    undo: Removal,
}

impl Held {
    /// Of a dump whose images lie there.
    pub(crate) fn of(images: &ImageDir) -> Self {
        let images = images.directory().is_some().then(|| images.store().clone());
        Self { images, ..Self::default() }
    }

    /// The name of this dump's locks.
    ///
    /// # Errors
    /// If the kernel's source of random ids cannot be read.
    pub(crate) fn id(&mut self) -> Result<&str> {
        if self.id.is_empty() {
            let path = "/proc/sys/kernel/random/uuid";
            let id = std::fs::read_to_string(path).context(|| format!("read {path}"))?;
            id.trim().clone_into(&mut self.id);
        }
        Ok(&self.id)
    }

    /// How the network is locked, as the inventory has it.
    pub(crate) fn locked_by(&self, asked: NetworkLock) -> LockedBy {
        match (self.tool, asked) {
            (Some(tool), _) => tool.in_inventory(),
            (None, NetworkLock::Any | NetworkLock::Iptables) => LockedBy::Iptables,
            (None, NetworkLock::Nftables) => LockedBy::Nft,
            (None, NetworkLock::Skip) => LockedBy::Nothing,
        }
    }

    /// Adds a connection that was dumped, with the inode number of its socket.
    ///
    /// # Errors
    /// `EMFILE` if this process has as many descriptors as it may.
    pub(crate) fn add_connection(&mut self, socket: BorrowedFd<'_>, inode: u32) -> Result<()> {
        let socket = socket.try_clone_to_owned().context(|| "dup".to_owned())?;
        self.connections.push(HeldConnection { socket, inode });
        Ok(())
    }
}

pub(crate) fn has_peer(socket: &InetSocket) -> bool {
    !matches!(u32::from(socket.state), state::LISTEN | state::CLOSE | state::TIME_WAIT)
}

/// The remote end of a connection and the local one, as packets have them: IPv4 even if the socket is IPv6.
pub(crate) fn ends(socket: &InetSocket) -> Option<Ends> {
    let end = |words: [u32; 4], port: u16| {
        let address = Address { words, port, ..Address::unspecified(socket.family.into()) };
        (port != 0).then(|| address.as_v4().unwrap_or(address))
    };
    let remote = end(socket.destination, socket.destination_port)?;
    Some((remote, end(socket.source, socket.source_port)?))
}

/// Finds out, before a tree is stopped, what its network is to be locked with: a program is started for that. It is an effort:
/// what is not known when it has stopped is found out then.
pub(crate) fn choose_ahead(network: &Network, tree: Running) {
    let is_chosen = will_lock(network, tree)
        .and_then(|yes| if yes { rules::choose(network.lock).map(drop) } else { Ok(()) });
    if let Err(e) = is_chosen {
        tracing::debug!("it is not known yet what the network is to be locked with: {e}");
    }
}

/// Whether [`Held::lock`] will set a lock, as far as can be seen of a tree that runs.
fn will_lock(network: &Network, tree: Running) -> Result<bool> {
    let own = proc::ns_inode(own_pid(), NsKind::Net.name())?;
    let keeps_connections = network.tcp_established && !network.tcp_close;
    let is_apart = proc::ns_inode(tree.root, NsKind::Net.name())? != own;
    if network.lock == NetworkLock::Skip || !(keeps_connections || is_apart) {
        return Ok(false);
    }
    let tasks = tree.tasks()?;
    for (space, member) in accept::networks(&tasks) {
        let netns: OwnedFd = proc::open(member, "ns/net")?.into();
        let mut sockets = run_in(&[netns.as_fd()], tcp_sockets)?;
        if space == own {
            let inodes = inodes_of(&tasks)?;
            sockets.retain(|s| keeps_connections && has_peer(s) && inodes.contains(&s.inode));
        }
        if !sockets.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Held {
    /// Locks the network of the frozen tree, before its sockets are looked at: its own namespaces as a whole, of
    /// those that others live in as well only its connections.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn lock(
        &mut self,
        network: &Network,
        guardian: &Guardian,
        spaces: &Namespaces,
        tasks: &[i32],
    ) -> Result<()> {
        if network.lock == NetworkLock::Skip {
            return Ok(());
        }
        let mut own = None;
        for ns in spaces.of_kind(NsKind::Net) {
            let Some(netns) = &ns.file else { continue };
            let listed = run_in(&[netns.as_fd()], tcp_sockets)?;
            if listed.is_empty() {
                continue;
            }
            if !ns.is_host && !is_shared(ns.inode, tasks) {
                self.set_lock(network, guardian, ns, Scope::All)?;
                continue;
            }
            if network.tcp_close || !network.tcp_established {
                continue;
            }
            let own = match &mut own {
                Some(own) => own,
                none => none.insert(inodes_of(tasks)?),
            };
            let connections: Vec<_> = listed
                .iter()
                .filter(|s| own.contains(&s.inode) && has_peer(s))
                .filter_map(ends)
                .collect();
            if !connections.is_empty() {
                self.set_lock(network, guardian, ns, Scope::Connections(connections))?;
            }
        }
        Ok(())
    }

    /// Sets a lock, which the guardian knows of before it is there.
    fn set_lock(
        &mut self,
        network: &Network,
        guardian: &Guardian,
        ns: &Namespace,
        scope: Scope,
    ) -> Result<()> {
        let id = self.id()?.to_owned();
        let space = ns.inode;
        let Some(file) = &ns.file else { return Ok(()) };
        let netns = file.try_clone().context(|| "dup".to_owned())?;
        if scope == Scope::All && run_in(&[netns.as_fd()], is_own)? {
            return Err(Error::Unsupported(
                "locking the caller's own network as a whole".to_owned(),
            ));
        }
        let tool = match self.tool {
            Some(tool) => tool,
            None => rules::choose(network.lock)?,
        };
        self.tool = Some(tool);
        self.note(tool, &id)?;
        let undo = Removal::of_lock(tool, &id, &scope);
        undo.watch(guardian, space, netns.as_fd())?;
        let more = self.locks.iter().any(|lock| lock.space == space);
        let line = guardian.line_for_children()?;
        let set = run_in(&[netns.as_fd()], || rules::lock(tool, &id, &scope, more));
        drop(line);
        self.locks.push(Lock { space, netns, scope, undo });
        set
    }

    /// Notes the table of a lock, which nobody else would find should all of this be killed.
    fn note(&mut self, tool: Tool, id: &str) -> Result<()> {
        let Some(images) = self.images.as_ref().filter(|_| tool == Tool::Nft) else {
            return Ok(());
        };
        if self.note.is_none() {
            let name = lock::note(&lock::table(id));
            images.create(&name).context(|| format!("create {name}"))?;
            self.note = Some(name);
        }
        Ok(())
    }

    /// The inventory names the locks, or they are gone.
    pub(crate) fn forget_note(&mut self) {
        let Some((images, name)) = self.images.as_ref().zip(self.note.take()) else { return };
        if let Err(e) = images.remove(&name) {
            tracing::warn!("remove {name}: {e}");
        }
    }

    /// Makes sure that the packets of a connection are held back: one that was not found in
    /// a descriptor table, but in flight between sockets.
    ///
    /// # Errors
    /// If rules cannot be set.
    pub(crate) fn hold(
        &mut self,
        network: &Network,
        guardian: &Guardian,
        spaces: &Namespaces,
        (space, remote, local): (u64, Address, Address),
    ) -> Result<()> {
        if network.lock == NetworkLock::Skip {
            return Ok(());
        }
        let ends = (remote.as_v4().unwrap_or(remote), local.as_v4().unwrap_or(local));
        let is_held = |lock: &Lock| match &lock.scope {
            Scope::All => true,
            Scope::Connections(all) => all.contains(&ends),
        };
        if self.locks.iter().any(|lock| lock.space == space && is_held(lock)) {
            return Ok(());
        }
        match spaces.by_inode(space) {
            Some(ns) => self.set_lock(network, guardian, ns, Scope::Connections(vec![ends])),
            None => Ok(()),
        }
    }

    /// The tasks go on: the network does, too.
    pub(crate) fn release(&mut self, guardian: &Guardian) {
        self.connections.clear();
        let mut are_gone = true;
        for lock in std::mem::take(&mut self.locks) {
            if let Err(e) = run_in(&[lock.netns.as_fd()], || lock.undo.run()) {
                // The guardian will try again.
                tracing::error!("the network stays locked: {e}");
                are_gone = false;
                continue;
            }
            let undos = lock.undo.undos(lock.space);
            if let Err(e) = undos.iter().try_for_each(|undo| guardian.forget(undo)) {
                tracing::debug!("{e}");
            }
        }
        if are_gone {
            self.forget_note();
        }
    }

    /// New connections may come again, if they were held off.
    pub(crate) fn let_in(&mut self, guardian: &Guardian) {
        if let Some(held) = self.held_off.take() {
            held.end(guardian);
        }
    }

    /// The tasks are about to be killed: should we not come to [`Held::silence`], the guardian does, as
    /// soon as it is their end that it is to bring.
    ///
    /// # Errors
    /// If the guardian is gone. The tasks may still go on, see [`Held::release`].
    pub(crate) fn prepare_silence(&self, guardian: &Guardian) -> Result<()> {
        self.connections.iter().try_for_each(|HeldConnection { socket, inode }| {
            guardian.prepare_file(&undo_silence(*inode), socket.as_fd())
        })
    }

    /// The tasks do not run any more: their connections end without a word to the peers, and what holds
    /// the network stays for the restore.
    pub(crate) fn silence(&self) {
        for HeldConnection { socket, inode } in &self.connections {
            if let Err(e) = silence(socket.as_fd()) {
                tracing::error!("the peer of socket {inode} may see it end: {e}");
            }
        }
    }

    /// What lets the network go on: nobody is to do that for tasks that end.
    pub(crate) fn undos(&self) -> Vec<Undo> {
        self.locks.iter().flat_map(|lock| lock.undo.undos(lock.space)).collect()
    }
}
