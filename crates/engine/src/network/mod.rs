//! Holding the network still, from the moment that connections are dumped until their
//! tasks go on.
//!
//! A packet that reaches a connection behind its dump is acknowledged by a kernel whose
//! socket has no future, and is lost; one that arrives while there is no socket at all
//! is answered by a reset. So no packet may pass: in a network namespace of the tree's
//! own, none at all; in the caller's, none of the tree's connections. If the tasks
//! are killed the lock stays, until the restore removes it. The peers send again what was
//! lost meanwhile: that is what TCP is for.

pub mod accept;
mod iptables;
mod nftables;
pub mod rules;
pub mod tracked;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use torpor_images::proto::{FileEntry, InetSkEntry};

use crate::dump::Dump;
use crate::error::{Context, Error, Result};
use crate::file::socket::diag::{self, InetSocket};
use crate::file::socket::tcp::{self, Sleeping};
use crate::file::socket::{Address, Socket, state};
use crate::guardian::{Guardian, Undo};
use crate::namespace::{Namespace, NsKind, run_in};
use crate::options::NetworkLock;
use crate::proc;
use crate::restore::Restore;

use self::rules::{Scope, Script, Tool};

/// What a dump does to the network.
#[derive(Debug, Default)]
pub struct Held {
    /// Names the locks; in the inventory, so that the restore finds them.
    id: String,
    /// What the locks are set with.
    tool: Option<Tool>,
    locks: Vec<Lock>,
    connections: Vec<Connection>,
    /// New connections are held off.
    pub held_off: Option<accept::HeldOff>,
}

/// A connection that was dumped.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    reuse: i32,
    /// How the guardian finds it.
    undo: Undo,
}

/// A lock in one network namespace.
#[derive(Debug)]
struct Lock {
    /// Inode number of the namespace.
    space: u64,
    netns: OwnedFd,
    /// A path that leads to it.
    path: PathBuf,
    scope: Scope,
    undo: Script,
}

impl Held {
    /// The name of this dump's locks.
    ///
    /// # Errors
    /// The kernel's.
    pub fn id(&mut self) -> Result<&str> {
        if self.id.is_empty() {
            let path = "/proc/sys/kernel/random/uuid";
            let id = std::fs::read_to_string(path).context(|| format!("read {path}"))?;
            id.trim().clone_into(&mut self.id);
        }
        Ok(&self.id)
    }

    /// How the network is locked, as the inventory has it.
    pub fn method(&self, asked: NetworkLock) -> u32 {
        match (self.tool, asked) {
            (Some(tool), _) => tool.method(),
            (None, NetworkLock::Any | NetworkLock::Iptables) => Tool::Iptables.method(),
            (None, NetworkLock::Nftables) => Tool::Nft.method(),
            (None, NetworkLock::Skip) => rules::SKIPPED,
        }
    }

    /// Adds a connection that was dumped, with its `SO_REUSEADDR`.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn add_connection(&mut self, socket: BorrowedFd<'_>, reuse: i32, undo: Undo) -> Result<()> {
        let socket = socket.try_clone_to_owned().context(|| "dup".to_owned())?;
        self.connections.push(Connection { socket, reuse, undo });
        Ok(())
    }
}

/// Locks the network of the frozen tree, before its sockets are looked at.
///
/// # Errors
/// If rules cannot be set.
pub fn lock(cx: &mut Dump<'_>) -> Result<()> {
    if cx.opts.network_lock == NetworkLock::Skip {
        return Ok(());
    }
    let spaces: Vec<usize> =
        (0..cx.ns.all.len()).filter(|i| cx.ns.all[*i].kind == NsKind::Net).collect();
    let mut own = None;
    for index in spaces {
        let ns = &cx.ns.all[index];
        let Some(netns) = &ns.file else { continue };
        let listed = run_in(&[netns.as_fd()], tcp_sockets)?;
        if !ns.is_host {
            if !listed.is_empty() {
                set_lock(cx, index, Scope::All)?;
            }
            continue;
        }
        if cx.opts.tcp_close || !cx.opts.tcp_established {
            continue;
        }
        let own = match &mut own {
            Some(own) => own,
            none => none.insert(socket_inodes(cx)?),
        };
        let connections: Vec<_> = listed
            .iter()
            .filter(|s| own.contains(&s.inode) && has_peer(s))
            .filter_map(|s| {
                Some((end(s, s.destination, s.destination_port)?, end(s, s.source, s.source_port)?))
            })
            .collect();
        if !connections.is_empty() {
            set_lock(cx, index, Scope::Connections(connections))?;
        }
    }
    Ok(())
}

fn tcp_sockets() -> Result<Vec<InetSocket>> {
    let mut all = diag::inet(libc::AF_INET, libc::IPPROTO_TCP)?;
    all.extend(diag::inet(libc::AF_INET6, libc::IPPROTO_TCP)?);
    Ok(all)
}

fn has_peer(socket: &InetSocket) -> bool {
    !matches!(u32::from(socket.state), state::LISTEN | state::CLOSE | state::TIME_WAIT)
}

/// An end of a connection as packets have it: IPv4 even if the socket is IPv6.
fn end(socket: &InetSocket, words: [u32; 4], port: u16) -> Option<Address> {
    let address = Address { words, port, ..Address::unspecified(socket.family.into()) };
    (port != 0).then(|| address.as_v4().unwrap_or(address))
}

/// The inode numbers of all sockets in the descriptor tables of the tree.
fn socket_inodes(cx: &Dump<'_>) -> Result<HashSet<u32>> {
    let tasks: Vec<i32> = cx.tasks.iter().filter(|t| !t.is_zombie()).map(|t| t.pid).collect();
    inodes_of(&tasks)
}

/// The inode numbers of all sockets in the descriptor tables of processes. One that has ended
/// has none.
fn inodes_of(pids: &[i32]) -> Result<HashSet<u32>> {
    let mut all = HashSet::new();
    for pid in pids {
        let numbers = match proc::numbers(*pid, "fd") {
            Err(Error::Gone { .. }) => continue,
            numbers => numbers?,
        };
        for fd in numbers {
            let Ok(link) = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")) else {
                continue;
            };
            let link = link.to_string_lossy();
            let inode = link.strip_prefix("socket:[").and_then(|l| l.strip_suffix(']'));
            all.extend(inode.and_then(|i| i.parse::<u32>().ok()));
        }
    }
    Ok(all)
}

/// Sets a lock, which the guardian knows of before it is there.
fn set_lock(cx: &mut Dump<'_>, ns: usize, scope: Scope) -> Result<()> {
    let id = cx.network.id()?.to_owned();
    let Namespace { inode: space, file, task, .. } = &cx.ns.all[ns];
    let (space, task) = (*space, *task);
    let Some(file) = file else { return Ok(()) };
    let netns = file.try_clone().context(|| "dup".to_owned())?;
    let pid = cx.tasks.get(task).map_or_else(std::process::id, |t| t.pid.cast_unsigned());
    let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
    if scope == Scope::All && run_in(&[netns.as_fd()], is_own)? {
        return Err(Error::Unsupported("locking the caller's own network as a whole".to_owned()));
    }
    let tool = match cx.network.tool {
        Some(tool) => tool,
        None => rules::choose(cx.opts.network_lock)?,
    };
    cx.network.tool = Some(tool);
    let undo = rules::unlocking(tool, &id, &scope);
    for (argv, input) in &undo {
        cx.guardian.watch(&Undo::Run(path.clone(), argv.clone(), input.clone()))?;
    }
    let more = cx.network.locks.iter().any(|lock| lock.space == space);
    let line = cx.guardian.line_for_children()?;
    let set = run_in(&[netns.as_fd()], || rules::lock(tool, &id, &scope, more));
    drop(line);
    cx.network.locks.push(Lock { space, netns, path, scope, undo });
    set
}

/// Makes sure that the packets of a connection are held back: one that was not found in
/// a descriptor table, but in flight between sockets.
///
/// # Errors
/// If rules cannot be set.
pub fn hold_connection(
    cx: &mut Dump<'_>,
    about: &Socket,
    remote: Address,
    local: Address,
) -> Result<()> {
    if cx.opts.network_lock == NetworkLock::Skip {
        return Ok(());
    }
    let ends = (remote.as_v4().unwrap_or(remote), local.as_v4().unwrap_or(local));
    let is_held = |lock: &Lock| match &lock.scope {
        Scope::All => true,
        Scope::Connections(all) => all.contains(&ends),
    };
    if cx.network.locks.iter().any(|lock| lock.space == about.space && is_held(lock)) {
        return Ok(());
    }
    match cx.ns.all.iter().position(|ns| ns.inode == about.space) {
        Some(ns) => set_lock(cx, ns, Scope::Connections(vec![ends])),
        None => Ok(()),
    }
}

/// The tasks go on: the network does, too.
pub fn release(cx: &mut Dump<'_>) {
    for connection in std::mem::take(&mut cx.network.connections) {
        // In vain, as a rule: only if the tasks were to be killed.
        if let Err(e) = tcp::leave_repair(connection.socket.as_fd(), connection.reuse) {
            tracing::error!("{e}");
        }
    }
    for lock in std::mem::take(&mut cx.network.locks) {
        for (argv, input) in &lock.undo {
            let done = run_in(&[lock.netns.as_fd()], || rules::run(argv, input));
            if let Err(e) = done {
                // The guardian will try again.
                tracing::error!("the network stays locked: {e}");
                continue;
            }
            let undo = Undo::Run(lock.path.clone(), argv.clone(), input.clone());
            if let Err(e) = cx.guardian.forget(&undo) {
                tracing::debug!("{e}");
            }
        }
    }
}

/// New connections may come again, if they were held off.
pub fn let_in(cx: &mut Dump<'_>) {
    if let Some(held) = cx.network.held_off.take() {
        held.end(&mut cx.guardian);
    }
}

/// The tasks are about to be killed: their connections end without a word to the
/// peers, and what holds the network stays for the restore.
///
/// # Errors
/// The kernel's; the tasks may still go on, see [`release`].
pub fn silence(cx: &mut Dump<'_>) -> Result<()> {
    for connection in &cx.network.connections {
        cx.guardian.watch_file(&connection.undo, connection.socket.as_fd())?;
        tcp::silence(connection.socket.as_fd())?;
    }
    Ok(())
}

/// The tasks end now, whatever happens: nobody lets their connections or the network go on.
///
/// # Errors
/// If the guardian is gone.
pub fn leave_still(cx: &mut Dump<'_>) -> Result<()> {
    for connection in &cx.network.connections {
        cx.guardian.forget(&connection.undo)?;
    }
    for lock in &cx.network.locks {
        for (argv, input) in &lock.undo {
            cx.guardian.forget(&Undo::Run(lock.path.clone(), argv.clone(), input.clone()))?;
        }
    }
    Ok(())
}

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
    undo: Script,
}

impl Relock {
    fn remove(&self, cx: &Restore<'_>) -> Result<()> {
        cx.in_netns(self.ns, || {
            self.undo.iter().try_for_each(|(argv, input)| rules::run(argv, input))
        })
    }
}

/// Locks the network namespaces that the caller hands over and that connections are to
/// be restored in: the first thing of all, since they have addresses already, and answer
/// by a reset what the other ends go on to send.
///
/// # Errors
/// If rules cannot be set.
pub fn lock_external(cx: &mut Restore<'_>) -> Result<()> {
    lock_where(cx, true)
}

/// What was not let go ends, and the peers shall not see it: they wait for the next try.
/// Comes behind the end of the tasks, which is not the last of the connections, since
/// the restore has them as well.
impl Drop for Asleep {
    fn drop(&mut self) {
        self.sleeping.iter().for_each(Sleeping::silence);
    }
}

/// Starts the guardian if there are connections to be guarded. Must come before there is
/// a second thread.
///
/// # Errors
/// See [`Guardian::start`].
pub fn guard(cx: &mut Restore<'_>) -> Result<()> {
    let connected = |e: &FileEntry| e.isk.as_ref().is_some_and(tcp::is_connection);
    if !cx.opts.tcp_close && cx.entries.values().any(connected) {
        cx.network.guardian = Guardian::start()?;
    }
    Ok(())
}

/// The tasks run: the connections are theirs alone.
pub fn let_go(cx: &mut Restore<'_>) {
    cx.network.sleeping.clear();
    cx.network.guardian = Guardian::default();
}

/// Locks the network namespaces that this restore has made, before they get their
/// devices, if there are connections in them.
///
/// # Errors
/// If rules cannot be set.
pub fn lock_new(cx: &mut Restore<'_>) -> Result<()> {
    lock_where(cx, false)
}

fn lock_where(cx: &mut Restore<'_>, external: bool) -> Result<()> {
    let is_meant = |ns: &Namespace| !ns.is_host && ns.file.is_some() == external;
    let wanted: HashSet<u32> = cx
        .entries
        .values()
        .filter_map(|e| e.isk.as_ref())
        .filter(|isk| tcp::is_connection(isk))
        .filter_map(|isk| isk.ns_id)
        .filter(|&ns| cx.ns.by_id(ns).is_some_and(is_meant))
        .collect();
    if cx.opts.network_lock == NetworkLock::Skip || cx.opts.tcp_close || wanted.is_empty() {
        return Ok(());
    }
    let id = lock_id(cx);
    let by_dump = cx.images.inventory()?.network_lock_method.and_then(Tool::of_method);
    for ns in wanted {
        // One that is joined is not there yet, nor ours to lock.
        if cx.in_netns(ns, is_own)? {
            continue;
        }
        if external && cx.in_netns(ns, || Ok(by_dump.is_some_and(|tool| tool.is_locked(&id))))? {
            continue;
        }
        let tool = rules::choose(cx.opts.network_lock)?;
        let set = cx.in_netns(ns, || {
            let is_new = !external || !tool.is_locked(&id);
            is_new.then(|| rules::lock(tool, &id, &Scope::All, false)).transpose()
        })?;
        // The lock of the dump stays if the restore fails, see `unlock_and_wake`.
        if set.is_some() {
            let undo = rules::unlocking(tool, &id, &Scope::All);
            cx.network.locks.push(Relock { ns, external, undo });
        }
    }
    Ok(())
}

/// The restore has failed: takes away the locks of namespaces that do not go with it.
pub fn give_up(cx: &mut Restore<'_>) {
    for lock in std::mem::take(&mut cx.network.locks).iter().filter(|lock| lock.external) {
        if let Err(e) = lock.remove(cx) {
            tracing::error!("the network stays locked: {e}");
        }
    }
}

/// Whether this thread is in the network namespace of the caller.
fn is_own() -> Result<bool> {
    let inode =
        |path: &str| rustix::fs::stat(path).map(|s| s.st_ino).context(|| format!("stat {path}"));
    Ok(inode("/proc/self/ns/net")? == inode("/proc/thread-self/ns/net")?)
}

/// The name of the locks of the dump that the images are from: its id, or, in images from before
/// there were ids, the pid of its root task.
fn lock_id(cx: &Restore<'_>) -> String {
    let inventory = cx.images.inventory().ok();
    let id = inventory.and_then(|i| i.dump_criu_run_id).unwrap_or_default();
    // It goes into rules: nothing but what our own names are made of.
    let id: String = id.chars().filter(|c| c.is_ascii_hexdigit() || *c == '-').take(64).collect();
    let root = cx.tasks.first().map(|task| task.vpid.to_string());
    if id.is_empty() { root.unwrap_or_default() } else { id }
}

/// Takes away what the dump has left to hold the network still, whichever program made it.
fn unlock(cx: &Restore<'_>, made: &HashSet<u32>) -> Result<()> {
    let method = cx.images.inventory()?.network_lock_method;
    let sockets: Vec<&InetSkEntry> = cx
        .entries
        .values()
        .filter_map(|e| e.isk.as_ref())
        .filter(|isk| isk.proto == libc::IPPROTO_TCP.cast_unsigned())
        .collect();
    // The dump has locked the tree's own namespaces with TCP sockets of whomever.
    let own = cx.ns.all.iter().filter(|ns| ns.kind == NsKind::Net && !ns.is_host);
    let spaces: HashSet<u32> =
        sockets.iter().filter_map(|isk| isk.ns_id).chain(own.map(|ns| ns.id)).collect();
    let id = lock_id(cx);
    // Old versions do not say.
    let tools = match method {
        Some(method) => Tool::of_method(method).into_iter().collect(),
        None => vec![Tool::Iptables, Tool::Nft],
    };
    for &ns in spaces.difference(made) {
        let of_space = sockets.iter().filter(|isk| isk.ns_id == Some(ns));
        let connections = of_space.filter(|isk| tcp::is_connection(isk));
        let ends: Vec<_> = connections.filter_map(|isk| tcp::ends(isk)).collect();
        let is_host = cx.ns.by_id(ns).is_none_or(|ns| ns.is_host);
        cx.in_netns(ns, || {
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

/// The last step of a restore before its tasks run: the network goes on, and so do the
/// connections.
///
/// # Errors
/// The kernel's.
pub fn unlock_and_wake(cx: &mut Restore<'_>) -> Result<()> {
    let locks = std::mem::take(&mut cx.network.locks);
    let made: HashSet<u32> = locks.iter().map(|lock| lock.ns).collect();
    locks.iter().try_for_each(|lock| lock.remove(cx))?;
    if cx.opts.network_lock != NetworkLock::Skip {
        unlock(cx, &made)?;
    }
    cx.network.sleeping.iter().try_for_each(|s| s.wake(cx))
}
