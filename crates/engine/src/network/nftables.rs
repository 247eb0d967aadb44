//! Locks by nftables, as CRIU sets them: a table of each dump's own.

use std::collections::HashSet;
use std::fmt::Write as _;

use torpor_images::lock::FAMILY;
pub(super) use torpor_images::lock::{is_table as is_lock, table};
use torpor_kernel::netlink::{
    Body, NETFILTER, NFTA_TABLE_NAME, NetlinkAttributes, Socket, of_netfilter,
};
use torpor_sys::number::byte;

use super::rules::{Commands, MARK, Scope, argv};
use crate::error::{Context, Result};
use crate::file::socket::address::Address;

const GET_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_GETTABLE);
const DELETE_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_DELTABLE);
const GET_ELEMENTS: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_GETSETELEM);
const DELETE_ELEMENTS: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_DELSETELEM);
/// The attributes of elements: their table, their set, a list of them; one in the list; its key, as data.
const LIST_TABLE: u16 = 1;
const LIST_SET: u16 = 2;
const LIST_ELEMENTS: u16 = 3;
const LIST_ELEMENT: u16 = 1;
const ELEMENT_KEY: u16 = 1;
const DATA_VALUE: u16 = 1;
/// How long a structure is that is in front of attributes: `struct nfgenmsg`.
const HEADER: usize = 4;
/// How many elements are named at once: an attribute has at most 64 KiB.
const AT_ONCE: usize = 500;
const NFPROTO_INET: u8 = byte(libc::NFPROTO_INET);

/// A connection: remote and local address.
pub(crate) type Ends = (Address, Address);
/// The sets of the connections that a table holds, and whether they are those of IPv6.
const SETS: [(&str, bool); 2] = [("conns4", false), ("conns6", true)];

/// Sets a lock; `more` adds connections to one that is there. One that should not be there is to
/// be [removed](remove) before.
pub(super) fn lock(name: &str, scope: &Scope, more: bool) -> Commands {
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

/// The tables of locks in the network namespace of this thread; none if this kernel has no nftables.
///
/// # Errors
/// If the kernel's answer makes no sense.
pub(super) fn locks() -> Result<Vec<String>> {
    let Ok(mut socket) = Socket::open(NETFILTER) else { return Ok(Vec::new()) };
    let Ok(listed) = socket.list_as_it_is(GET_TABLE, &[NFPROTO_INET, 0, 0, 0]) else {
        return Ok(Vec::new());
    };
    let names = listed.iter().filter_map(|table| table.attributes(HEADER).text(NFTA_TABLE_NAME));
    Ok(names.filter(|name| is_lock(name)).map(str::to_owned).collect())
}

/// Has a table, in the network namespace of this thread, hold these connections no more; it goes if it holds
/// nothing else. Whether it holds connections, and not all there is.
///
/// # Errors
/// If the kernel refuses to change it.
pub(super) fn lift(table: &str, connections: &[Ends]) -> Result<bool> {
    let mut socket = Socket::open(NETFILTER)?;
    let mut found = Vec::new();
    for (set, is_v6) in SETS {
        match keys(&mut socket, table, set)? {
            Some(keys) => found.push((set, is_v6, keys)),
            None => return Ok(false),
        }
    }
    let mut stays = false;
    for (_, is_v6, keys) in &mut found {
        let ours: HashSet<Vec<u8>> = both_ways(connections, *is_v6).map(key).collect();
        let before = keys.len();
        keys.retain(|key| ours.contains(key));
        stays |= keys.len() < before;
    }
    if !stays {
        return remove(table).map(|()| true);
    }
    for (set, _, keys) in found {
        for some in keys.chunks(AT_ONCE) {
            let body = elements_named(table, set, some);
            let what = || format!("remove connections from the nftables table {FAMILY} {table}");
            socket.change_in_batch(DELETE_ELEMENTS, 0, &body)?.context(what)?;
        }
    }
    Ok(true)
}

/// What is in a set; `None` if there is no such set.
fn keys(socket: &mut Socket, table: &str, set: &str) -> Result<Option<Vec<Vec<u8>>>> {
    let listed = match socket.list_as_it_is(GET_ELEMENTS, &elements_named(table, set, &[])) {
        Err(torpor_kernel::Error::Os { source, .. })
            if source.raw_os_error() == Some(libc::ENOENT) =>
        {
            return Ok(None);
        }
        listed => listed?,
    };
    let elements = listed.iter().flat_map(|some| some.attributes(HEADER).nested(LIST_ELEMENTS));
    let keys = elements.filter_map(|(_, element)| {
        NetlinkAttributes(element).nested(ELEMENT_KEY).find(DATA_VALUE).map(<[u8]>::to_vec)
    });
    Ok(Some(keys.collect()))
}

/// A request about elements of a set: all of them if none is named.
fn elements_named(table: &str, set: &str, keys: &[Vec<u8>]) -> Vec<u8> {
    let mut body = Body::new(&[NFPROTO_INET, 0, 0, 0]);
    body.put_text(LIST_TABLE, table);
    body.put_text(LIST_SET, set);
    if !keys.is_empty() {
        body.nest(LIST_ELEMENTS, &[], |list| {
            for key in keys {
                list.nest(LIST_ELEMENT, &[], |element| {
                    element.nest(ELEMENT_KEY, &[], |data| data.put(DATA_VALUE, key));
                });
            }
        });
    }
    body.0
}

/// A connection as the key of its set: addresses and ports, each filled up to whole words.
fn key((source, destination): Ends) -> Vec<u8> {
    let field = |end: Address| {
        let ip = end.to_image().into_iter().flat_map(u32::to_ne_bytes);
        ip.chain(end.port.to_be_bytes()).chain([0, 0])
    };
    field(source).chain(field(destination)).collect()
}

/// The connections of a set, each in both directions.
fn both_ways(all: &[Ends], is_v6: bool) -> impl Iterator<Item = Ends> {
    let ends = all.iter().filter(move |(remote, _)| remote.is_v6() == is_v6);
    ends.flat_map(|&(a, b)| [(a, b), (b, a)])
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
    SETS.iter().fold(String::new(), |mut text, (set, is_v6)| {
        let kind = if *is_v6 { "ipv6" } else { "ipv4" };
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
fn elements(name: &str, all: &[Ends]) -> String {
    let mut text = String::new();
    for (set, is_v6) in SETS {
        let listed: Vec<String> = both_ways(all, is_v6)
            .map(|(a, b)| format!("{} . {} . {} . {}", a.ip(), a.port, b.ip(), b.port))
            .collect();
        if !listed.is_empty() {
            let _ = writeln!(text, "add element {FAMILY} {name} {set} {{ {} }}", listed.join(", "));
        }
    }
    text
}
