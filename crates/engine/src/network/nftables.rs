//! Locks by nftables, as CRIU sets them: a table of each dump's own.

use std::collections::HashSet;

use torpor_images::lock::FAMILY;
pub(super) use torpor_images::lock::{is_table as is_lock, table};
use torpor_kernel::netlink::{
    Body, CREATE, NETFILTER, NFTA_TABLE_NAME, NetlinkAttributes, Socket, of_netfilter,
};
use torpor_sys::number::byte;

use super::new_table::{ACCEPT, DROP, LOCAL_IN, LOCAL_OUT, NETWORK, NewTable, TRANSPORT};
use super::rules::{MARK, Scope};
use crate::error::{Context, Result};
use crate::file::socket::address::Address;

const GET_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_GETTABLE);
const DELETE_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_DELTABLE);
const NEW_ELEMENTS: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWSETELEM);
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

/// A set of connections of one family.
#[derive(Debug)]
struct ConnectionSet {
    name: &'static str,
    is_v6: bool,
    /// Its number in rules.
    family: u8,
    /// Where a header has the addresses that a packet comes from and goes to, and how long each is.
    addresses: [u32; 2],
    length: u32,
    /// What `nft` calls the type of an address.
    kind: u32,
}

/// The sets of the connections that a table holds.
const SETS: [ConnectionSet; 2] = [
    ConnectionSet {
        name: "conns4",
        is_v6: false,
        family: byte(libc::NFPROTO_IPV4),
        addresses: [12, 16],
        length: 4,
        kind: 7,
    },
    ConnectionSet {
        name: "conns6",
        is_v6: true,
        family: byte(libc::NFPROTO_IPV6),
        addresses: [8, 24],
        length: 16,
        kind: 8,
    },
];
/// Where a TCP header has the ports that a packet comes from and goes to; how long each is.
const PORTS: [u32; 2] = [0, 2];
const PORT: u32 = 2;
/// What `nft` calls the type of a port, and the width of such numbers where several are one key.
const PORT_KIND: u32 = 13;
const KIND_BITS: u32 = 6;
/// Keys are in registers of this width, from this one on.
const WORD: u32 = 4;
const FIRST_WORD: u32 = libc::NFT_REG32_00.cast_unsigned();

impl ConnectionSet {
    /// The type and the length of its keys: two ends, each an address and a port that fills a word.
    fn keys(&self) -> (u32, u32) {
        let end = self.kind << KIND_BITS | PORT_KIND;
        (end << (2 * KIND_BITS) | end, 2 * (self.length + WORD))
    }

    /// Drops the packets of its connections.
    fn drop_all(&self, table: &mut NewTable<'_>, chain: &str) {
        table.rule(chain, |rule| {
            rule.is_of_family(self.family);
            rule.is_tcp();
            let mut register = FIRST_WORD;
            for (address, port) in self.addresses.into_iter().zip(PORTS) {
                rule.load(NETWORK, (address, self.length), register);
                register += self.length / WORD;
                rule.load(TRANSPORT, (port, PORT), register);
                register += 1;
            }
            rule.is_in(self.name);
            rule.decide(DROP);
        });
    }
}

/// Sets a lock in the network namespace of this thread; `more` adds connections to one that is there.
///
/// # Errors
/// If this kernel has no nftables, or refuses a part of the lock.
pub(super) fn lock(name: &str, scope: &Scope, more: bool) -> Result<()> {
    if !more {
        make(name, scope)?;
    }
    match scope {
        Scope::All => Ok(()),
        Scope::Connections(all) => add(name, all),
    }
}

/// Makes the table of a lock. It holds no connections yet.
fn make(name: &str, scope: &Scope) -> Result<()> {
    let (policy, sets): (_, &[_]) = match scope {
        Scope::All => (DROP, &[]),
        Scope::Connections(_) => (ACCEPT, &SETS),
    };
    let mut table = NewTable::new(name);
    sets.iter().for_each(|set| table.set(set.name, set.keys()));
    for (chain, hook) in [("output", LOCAL_OUT), ("input", LOCAL_IN)] {
        table.chain(chain, hook, policy);
        table.rule(chain, |rule| {
            rule.has_mark(MARK);
            rule.decide(ACCEPT);
        });
        sets.iter().for_each(|set| set.drop_all(&mut table, chain));
    }
    table.make()
}

/// Has a table hold these connections as well: each is in its set both ways round.
fn add(table: &str, connections: &[Ends]) -> Result<()> {
    let mut socket = Socket::open(NETFILTER)?;
    let what = || format!("add connections to the nftables table {FAMILY} {table}");
    for set in &SETS {
        let keys: Vec<Vec<u8>> = both_ways(connections, set.is_v6).map(key).collect();
        for some in keys.chunks(AT_ONCE) {
            let body = elements_named(table, set.name, some);
            socket.change_in_batch(&[(NEW_ELEMENTS, CREATE, &body)])?.context(what)?;
        }
    }
    Ok(())
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
    let found = socket.get(GET_TABLE, &named(family, table));
    close(socket);
    found.is_ok_and(|found| found.is_some())
}

/// Closes a socket that netfilter was asked by. If a table has gone just now, whichever socket it was removed by, whoever
/// closes one waits until no processor uses its rules any more: 20 ms. Nobody else has to; if there can be no thread
/// it is closed here.
fn close(socket: Socket) {
    drop(std::thread::Builder::new().spawn(move || drop(socket)));
}

/// Removes a table, which need not be there, from the network namespace of this thread.
///
/// # Errors
/// If there is no netlink socket, or the kernel refuses for another cause than that the table is
/// not there.
pub(super) fn remove(table: &str) -> Result<()> {
    let mut socket = Socket::open(NETFILTER)?;
    let done = socket.change_in_batch(&[(DELETE_TABLE, 0, &named(NFPROTO_INET, table))])?;
    close(socket);
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
    let listed = socket.list_as_it_is(GET_TABLE, &[NFPROTO_INET, 0, 0, 0]);
    close(socket);
    let Ok(listed) = listed else { return Ok(Vec::new()) };
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
    for set in &SETS {
        match keys(&mut socket, table, set.name)? {
            Some(keys) => found.push((set, keys)),
            None => return Ok(false),
        }
    }
    let mut stays = false;
    for (set, keys) in &mut found {
        let ours: HashSet<Vec<u8>> = both_ways(connections, set.is_v6).map(key).collect();
        let before = keys.len();
        keys.retain(|key| ours.contains(key));
        stays |= keys.len() < before;
    }
    if !stays {
        return remove(table).map(|()| true);
    }
    for (set, keys) in found {
        for some in keys.chunks(AT_ONCE) {
            let body = elements_named(table, set.name, some);
            let what = || format!("remove connections from the nftables table {FAMILY} {table}");
            socket.change_in_batch(&[(DELETE_ELEMENTS, 0, &body)])?.context(what)?;
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
