//! Locks by nftables, as CRIU sets them: a table of each dump's own.

use std::fmt::Write as _;

use torpor_images::lock::FAMILY;
pub(super) use torpor_images::lock::table;
use torpor_kernel::netlink::{Body, NETFILTER, Socket};

use super::rules::{MARK, Scope, Script, argv};
use crate::error::{Context, Result};
use crate::file::socket::address::Address;

// linux/netfilter/nf_tables.h, linux/netfilter/nfnetlink.h: messages about tables, of the part of
// netfilter with number 10.
const GET_TABLE: u16 = 10 << 8 | 1;
const DELETE_TABLE: u16 = 10 << 8 | 2;
const NFTA_TABLE_NAME: u16 = 1;
const NFPROTO_INET: u8 = 1;

/// Sets a lock; `more` adds connections to one that is there. One that should not be there is to
/// be [removed](remove) before.
pub(super) fn lock(name: &str, scope: &Scope, more: bool) -> Script {
    let input = match scope {
        Scope::Connections(all) if more => elements(name, all),
        Scope::Connections(all) => {
            rules(name, "accept", &sets(), CONNECTIONS) + &elements(name, all)
        }
        Scope::All => rules(name, "drop", "", ""),
    };
    vec![(argv(&["nft", "-f", "-"]), input)]
}

/// Whether there is a table of a lock in the network namespace of this thread.
pub(super) fn is_there(table: &str) -> bool {
    has(NFPROTO_INET, table)
}

/// Whether there is a table of this family in the network namespace of this thread.
pub(super) fn has(family: u8, table: &str) -> bool {
    let mut socket = match Socket::open(NETFILTER) {
        Ok(socket) => socket,
        Err(_) => return false,
    };
    socket.get(GET_TABLE, &named(family, table)).is_ok_and(|found| found.is_some())
}

/// Removes a table, which need not be there, from the network namespace of this thread.
///
/// # Errors
/// If there is no netlink socket, or the kernel refuses for another cause than that the table is
/// not there.
pub(super) fn remove(table: &str) -> Result<()> {
    let mut socket = Socket::open(NETFILTER)?;
    let done = socket.change_in_batch(DELETE_TABLE, 0, &named(NFPROTO_INET, table))?;
    // Whoever closes it waits until no processor uses the rules any more: 20 ms. Nobody else has to;
    // if there can be no thread it is closed here.
    drop(std::thread::Builder::new().spawn(move || drop(socket)));
    match done {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.context(|| format!("remove the nftables table {FAMILY} {table}")),
    }
}

/// A request about a table.
fn named(family: u8, table: &str) -> Vec<u8> {
    // struct nfgenmsg: family, version, resource.
    let mut body = Body::new(&[family, 0, 0, 0]);
    body.put_text(NFTA_TABLE_NAME, table);
    body.0
}

/// The rules of both chains.
const CONNECTIONS: &str = "  ip saddr . tcp sport . ip daddr . tcp dport @conns4 drop\n  \
                           ip6 saddr . tcp sport . ip6 daddr . tcp dport @conns6 drop\n";

fn sets() -> String {
    [("conns4", "ipv4"), ("conns6", "ipv6")].iter().fold(String::new(), |mut text, (set, kind)| {
        let _ = writeln!(
            text,
            " set {set} {{ type {kind}_addr . inet_service . {kind}_addr . inet_service; }}"
        );
        text
    })
}

fn rules(name: &str, policy: &str, sets: &str, rules: &str) -> String {
    let chain = |hook: &str| {
        format!(
            " chain {hook} {{\n  type filter hook {hook} priority 0; policy {policy};\n  \
             meta mark {MARK:#x} accept\n{rules} }}\n"
        )
    };
    format!("table {FAMILY} {name} {{\n{sets}{}{}}}\n", chain("output"), chain("input"))
}

/// Each connection is in its set both ways round.
fn elements(name: &str, all: &[(Address, Address)]) -> String {
    let mut text = String::new();
    for (v6, set) in [(false, "conns4"), (true, "conns6")] {
        let ends = all.iter().filter(|(remote, _)| remote.is_v6() == v6);
        let both = ends.flat_map(|&(a, b)| [(a, b), (b, a)]);
        let listed: Vec<String> = both
            .map(|(a, b)| format!("{} . {} . {} . {}", a.ip(), a.port, b.ip(), b.port))
            .collect();
        if !listed.is_empty() {
            let _ = writeln!(text, "add element {FAMILY} {name} {set} {{ {} }}", listed.join(", "));
        }
    }
    text
}
