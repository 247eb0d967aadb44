//! Connections that wait to be accepted belong to no descriptor, and cannot be dumped. A busy
//! server has some at nearly every moment, for some microseconds each. So before a tree is frozen
//! new connections are held off, and its tasks get some time to accept those that wait. The
//! clients of the ones held off try again by themselves: that is what TCP is for.
//!
//! It is an effort, not a promise: what waits when the tree is frozen is refused.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_kernel::sock_diag::InetSocket;

use super::listed::{inodes_of, tcp_sockets};
use super::rules::{self, Removal, Script, Tool, argv};
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

/// How the names of its tables begin, which are not those of a lock.
pub(super) const TABLE: &str = "CRIU-accept-";

/// New connections are held off while this lives.
#[derive(Debug)]
pub(crate) struct HeldOff {
    netns: OwnedFd,
    /// Its inode number.
    space: u64,
    /// What there is to be done at the end.
    undo: Option<Removal>,
}

impl HeldOff {
    /// Lets new connections in again.
    pub(crate) fn end(mut self, guardian: &Guardian) {
        if !self.remove() {
            // The guardian tries again.
            return;
        }
        for undo in self.undo.take().iter().flat_map(|removal| removal.undos(self.space)) {
            if let Err(e) = guardian.forget(&undo) {
                tracing::debug!("{e}");
            }
        }
    }

    fn remove(&self) -> bool {
        let run = || self.undo.as_ref().map_or(Ok(()), Removal::run);
        let done = run_in(&[self.netns.as_fd()], run);
        if let Err(e) = &done {
            tracing::error!("new connections are still held off: {e}");
        }
        done.is_ok()
    }
}

/// The tree was not even frozen, or the dump ended without a word.
impl Drop for HeldOff {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Lets the tasks of a running tree accept the connections that wait for them, while new ones are
/// held off, which they are until the result is ended. Nothing is done where connections are not
/// dumped, or those that wait are left out anyway.
pub(crate) fn settle(network: &Network, tree: Running, guardian: &Guardian) -> Option<HeldOff> {
    let dumped = network.tcp_established && !network.tcp_close && !network.skip_in_flight;
    if !dumped || network.lock == NetworkLock::Skip {
        return None;
    }
    match try_settle(network.lock, tree, guardian) {
        Ok(held) => held,
        Err(e) => {
            tracing::debug!("connections are not waited for to be accepted: {e}");
            None
        }
    }
}

fn try_settle(lock: NetworkLock, tree: Running, guardian: &Guardian) -> Result<Option<HeldOff>> {
    let netns: OwnedFd = proc::open(tree.root, "ns/net")?.into();
    let is_own = proc::ns_inode(tree.root, NsKind::Net.name())?
        != proc::ns_inode(own_pid(), NsKind::Net.name())?;
    let listed = run_in(&[netns.as_fd()], tcp_sockets)?;
    let mut listeners: Vec<InetSocket> =
        listed.into_iter().filter(|s| u32::from(s.state) == state::LISTEN).collect();
    if !is_own && !listeners.is_empty() {
        let inodes = inodes_of(&tree.tasks()?)?;
        listeners.retain(|listener| inodes.contains(&listener.inode));
    }
    let ports: HashSet<u16> = listeners.iter().map(|listener| listener.source_port).collect();
    if ports.is_empty() {
        return Ok(None);
    }
    let held = hold_off((lock, tree.root), guardian, netns, is_own, &ports)?;
    wait(&held, &ports)?;
    Ok(Some(held))
}

/// A tree that runs.
#[derive(Debug, Clone, Copy)]
pub struct Running {
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

fn hold_off(
    (lock, root): (NetworkLock, i32),
    guardian: &Guardian,
    netns: OwnedFd,
    is_own: bool,
    ports: &HashSet<u16>,
) -> Result<HeldOff> {
    let tool = rules::choose(lock)?;
    let (set, undo) = match tool {
        // Rules of this name are left out when those of a namespace are dumped.
        Tool::Nft => by_nftables(ports),
        // Others would be dumped: the tasks get their time, and no more.
        Tool::Iptables if is_own => (Script::new(), Removal::NOTHING),
        Tool::Iptables => (by_iptables("-I", ports), Removal::Programs(by_iptables("-D", ports))),
    };
    let space = proc::ns_inode(root, NsKind::Net.name())?;
    undo.watch(guardian, space, netns.as_fd())?;
    let held = HeldOff { netns, space, undo: Some(undo) };
    let line = guardian.line_for_children()?;
    run_in(&[held.netns.as_fd()], || {
        set.iter().try_for_each(|(argv, input)| rules::run(argv, input))
    })?;
    drop(line);
    Ok(held)
}

/// Rules that drop the first packet of each new connection to these ports, and their removal.
fn by_nftables(ports: &HashSet<u16>) -> (Script, Removal) {
    let name = format!("{TABLE}{}", std::process::id());
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    let rule = format!(
        "table inet {name} {{\n chain input {{\n  type filter hook input priority 0; policy accept;\n  \
         tcp flags & (syn | ack) == syn tcp dport {{ {} }} drop\n }}\n}}\n",
        ports.join(", ")
    );
    (vec![(argv(&["nft", "-f", "-"]), rule)], Removal::Table(name))
}

fn by_iptables(change: &str, ports: &HashSet<u16>) -> Script {
    let rules = ports.iter().fold(String::new(), |mut text, port| {
        let _ = writeln!(text, "{change} INPUT -p tcp --syn --dport {port} -j DROP");
        text
    });
    let has_v6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
    let programs =
        ["iptables-restore", "ip6tables-restore"].into_iter().take(1 + usize::from(has_v6));
    let words = |program: &str| argv(&[program, "-w", "--noflush"]);
    programs.map(|program| (words(program), format!("*filter\n{rules}COMMIT\n"))).collect()
}

/// Waits until nothing waits to be accepted, nor is on its way there; not for long.
fn wait(held: &HeldOff, ports: &HashSet<u16>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    run_in(&[held.netns.as_fd()], || {
        loop {
            let waiting = tcp_sockets()?.iter().any(|socket| {
                ports.contains(&socket.source_port)
                    && match u32::from(socket.state) {
                        state::LISTEN => socket.queued > 0,
                        other => other == state::SYN_RECV,
                    }
            });
            if !waiting || Instant::now() > deadline {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::file::socket::testing::in_netns;

    #[test]
    fn new_connections_are_held_off_and_no_others() {
        in_netns(|| {
            for (is_nft, listen) in [(true, "127.0.0.1:0"), (true, "[::1]:0"), (false, "[::1]:0")] {
                let listener = TcpListener::bind(listen).unwrap();
                let address = listener.local_addr().unwrap();
                let other = TcpListener::bind(listen).unwrap();
                let ports = HashSet::from([address.port()]);
                let patience = Duration::from_millis(200);
                let (set, undo) = if is_nft {
                    by_nftables(&ports)
                } else {
                    let undo = Removal::Programs(by_iptables("-D", &ports));
                    (by_iptables("-I", &ports), undo)
                };
                let before = TcpStream::connect(address).unwrap();
                set.iter().for_each(|(argv, input)| rules::run(argv, input).unwrap());
                assert!(TcpStream::connect_timeout(&address, patience).is_err());
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
