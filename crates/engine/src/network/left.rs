//! Locks that other dumps have left, and that would hold the connections of a restore for ever.
//!
//! A tree that is restored from a checkpoint that it has run on from (`--leave-running`) may have been put to
//! sleep since: its connections are those that the later dump has locked. The lock of a connection
//! whose other end sleeps on this host, too, stays: that end could only be answered for by a reset. Whoever
//! restores it takes the lock away.

use std::collections::HashSet;
use std::net::UdpSocket;

use torpor_images::lock::FAMILY;

use super::held::{ends, has_peer};
use super::listed::tcp_sockets;
use super::nftables::{self, Ends};
use super::{accept, iptables};
use crate::error::Result;
use crate::file::socket::address::Address;
use crate::network::rules::Scope;

/// Takes away, in the network namespace of this thread, what holds one of these connections; what holds all
/// others as well is named.
///
/// # Errors
/// If the kernel does not tell of its tables or sockets, or does not change them.
pub(super) fn lift(connections: &[Ends]) -> Result<()> {
    let tables = nftables::locks()?;
    let others: Vec<&String> =
        tables.iter().filter(|table| !table.starts_with(accept::NAME)).collect();
    if others.is_empty() && !iptables::may_lock() {
        return Ok(());
    }
    let awake = awake(connections)?;
    for table in others {
        if !nftables::lift(table, &awake)? {
            tracing::warn!(
                "another dump has left its lock of this whole network, which holds what was restored as well; if nothing \
                 is to be restored from that dump: nft delete table {FAMILY} {table}, in the network namespace of the \
                 restored tasks"
            );
        }
    }
    iptables::remove(&Scope::Connections(awake))
}

/// Those whose other ends are not of this network namespace, or are here.
fn awake(connections: &[Ends]) -> Result<Vec<Ends>> {
    let listed = tcp_sockets()?;
    let here: HashSet<Ends> =
        listed.iter().filter(|socket| has_peer(socket)).filter_map(ends).collect();
    let is_awake = |(remote, local): &Ends| here.contains(&(*local, *remote)) || !is_local(*remote);
    Ok(connections
        .iter()
        .map(|(remote, local)| (without_scope(*remote), without_scope(*local)))
        .filter(is_awake)
        .collect())
}

/// As the kernel lists it.
fn without_scope(address: Address) -> Address {
    Address { scope: 0, ..address }
}

/// Whether it is an address of this network namespace: a socket can have it.
fn is_local(address: Address) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;
    use crate::file::socket::testing::in_netns;
    use crate::network::rules::{self, Tool};
    use torpor_sys::socket;

    fn ends(stream: &TcpStream) -> Ends {
        let parse = |bytes: std::io::Result<Vec<u8>>| Address::parse(&bytes.unwrap()).unwrap();
        (parse(socket::peer_address(stream.as_fd())), parse(socket::local_address(stream.as_fd())))
    }

    fn lock(tool: Tool, id: &str, connections: &[Ends]) {
        rules::lock(tool, id, &Scope::Connections(connections.to_vec()), false).unwrap();
    }

    /// Whether rules name the port of this end.
    fn holds((_, local): Ends) -> bool {
        let listed = rules::output(&rules::argv(&["nft", "list", "ruleset"])).unwrap();
        listed.split(|c: char| !c.is_ascii_digit()).any(|word| word == local.port.to_string())
    }

    #[test]
    fn a_lock_of_another_dump_goes_and_what_it_holds_else_stays() {
        for (tool, listen) in [
            (Tool::Nft, "127.0.0.1:0"),
            (Tool::Nft, "[::1]:0"),
            (Tool::Iptables, "127.0.0.1:0"),
            (Tool::Iptables, "[::1]:0"),
        ] {
            in_netns(|| {
                let listener = TcpListener::bind(listen).unwrap();
                let connect = || {
                    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                    (client, listener.accept().unwrap().0)
                };
                let ((ours, _server), (other, _too)) = (connect(), connect());
                let (ours, other) = (ends(&ours), ends(&other));
                lock(tool, "a11", &[ours, other]);
                lift(&[ours]).unwrap();
                assert!(!holds(ours) && holds(other));
                lift(&[ours, other]).unwrap();
                assert!(!holds(other));
                assert!(!tool.is_locked("a11"));
            });
        }
    }

    #[test]
    fn a_lock_stays_whose_other_end_sleeps_here() {
        in_netns(|| {
            let at = |ip: [u8; 4], port| Address {
                words: [u32::from_ne_bytes(ip), 0, 0, 0],
                port,
                ..Address::unspecified(libc::AF_INET)
            };
            let sleeps = (at([127, 0, 0, 1], 7), at([127, 0, 0, 1], 4711));
            let elsewhere = (at([192, 0, 2, 1], 7), at([127, 0, 0, 1], 4712));
            lock(Tool::Nft, "a11", &[sleeps, elsewhere]);
            lift(&[sleeps, elsewhere]).unwrap();
            assert!(holds(sleeps) && !holds(elsewhere));
        });
    }

    #[test]
    fn a_lock_of_a_whole_network_stays_as_do_connections_that_are_held_off() {
        in_netns(|| {
            let connection = Address::unspecified(libc::AF_INET);
            rules::lock(Tool::Nft, "a11", &Scope::All, false).unwrap();
            let held_off = format!("table inet {}1 {{ }}", accept::NAME);
            rules::run(&rules::argv(&["nft", "-f", "-"]), &held_off).unwrap();
            lift(&[(connection, connection)]).unwrap();
            assert_eq!(nftables::locks().unwrap().len(), 2);
        });
    }
}
