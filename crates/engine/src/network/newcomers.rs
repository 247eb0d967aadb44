//! A table of nftables that drops the first packet of each new TCP connection to some ports. It is made by
//! messages to the kernel, so that it takes no program, whichever tools a host has.

use std::collections::BTreeSet;

use torpor_kernel::netlink::{APPEND, Body, CREATE, NETFILTER, Socket, of_netfilter};
use torpor_sys::number::byte;

use crate::error::{Context, Result};

const NEW_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWTABLE);
const NEW_CHAIN: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWCHAIN);
const NEW_RULE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWRULE);
/// `struct nfgenmsg`.
const FAMILY: [u8; 4] = [byte(libc::NFPROTO_INET), 0, 0, 0];

/// Attributes of tables, chains and rules (linux/netfilter/nf_tables.h).
const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;

/// Where the chain is, and what becomes of packets.
const LOCAL_IN: u32 = libc::NF_INET_LOCAL_IN.cast_unsigned();
const DROP: u32 = libc::NF_DROP.cast_unsigned();
const ACCEPT: u32 = libc::NF_ACCEPT.cast_unsigned();
/// The register of the outcome, and the one that the rules work with.
const VERDICT: u32 = libc::NFT_REG_VERDICT.cast_unsigned();
const REGISTER: u32 = libc::NFT_REG_1.cast_unsigned();
/// What is looked at, and how it is compared.
const PROTOCOL: u32 = libc::NFT_META_L4PROTO.cast_unsigned();
const TRANSPORT: u32 = libc::NFT_PAYLOAD_TRANSPORT_HEADER.cast_unsigned();
const EQUAL: u32 = libc::NFT_CMP_EQ.cast_unsigned();

/// Where a TCP header has the port that it goes to, and its flags.
const PORT_AT: u32 = 2;
const FLAGS_AT: u32 = 13;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

const CHAIN: &str = "input";

/// Makes the table in the network namespace of this thread.
///
/// # Errors
/// If this kernel has no nftables, or refuses a part of the table.
pub(super) fn hold_off(table: &str, ports: &BTreeSet<u16>) -> Result<()> {
    let mut socket = Socket::open(NETFILTER)?;
    let what = || format!("make the nftables table inet {table}");
    let mut body = Body::new(&FAMILY);
    body.put_text(TABLE_NAME, table);
    socket.change_in_batch(NEW_TABLE, CREATE, &body.0)?.context(what)?;
    socket.change_in_batch(NEW_CHAIN, CREATE, &chain(table))?.context(what)?;
    for &port in ports {
        socket.change_in_batch(NEW_RULE, CREATE | APPEND, &rule(table, port))?.context(what)?;
    }
    Ok(())
}

/// All of its numbers are in the order of the network.
fn put(body: &mut Body, kind: u16, value: u32) {
    body.put(kind, &value.to_be_bytes());
}

fn chain(table: &str) -> Vec<u8> {
    let mut body = Body::new(&FAMILY);
    body.put_text(CHAIN_TABLE, table);
    body.put_text(CHAIN_NAME, CHAIN);
    body.nest(CHAIN_HOOK, &[], |hook| {
        put(hook, HOOK_NUMBER, LOCAL_IN);
        put(hook, HOOK_PRIORITY, 0);
    });
    put(&mut body, CHAIN_POLICY, ACCEPT);
    body.put_text(CHAIN_TYPE, "filter");
    body.0
}

/// TCP with SYN and without ACK to `port` is dropped.
fn rule(table: &str, port: u16) -> Vec<u8> {
    let mut body = Body::new(&FAMILY);
    body.put_text(RULE_TABLE, table);
    body.put_text(RULE_CHAIN, CHAIN);
    body.nest(RULE_EXPRESSIONS, &[], |all| {
        expression(all, "meta", |meta| {
            put(meta, 1, REGISTER);
            put(meta, 2, PROTOCOL);
        });
        is_equal(all, &[byte(libc::IPPROTO_TCP)]);
        load(all, FLAGS_AT, 1);
        expression(all, "bitwise", |bitwise| {
            put(bitwise, 1, REGISTER);
            put(bitwise, 2, REGISTER);
            put(bitwise, 3, 1);
            data(bitwise, 4, &[SYN | ACK]);
            data(bitwise, 5, &[0]);
        });
        is_equal(all, &[SYN]);
        load(all, PORT_AT, 2);
        is_equal(all, &port.to_be_bytes());
        expression(all, "immediate", |immediate| {
            put(immediate, 1, VERDICT);
            immediate.nest(2, &[], |value| {
                // NFTA_DATA_VERDICT, NFTA_VERDICT_CODE.
                value.nest(2, &[], |verdict| put(verdict, 1, DROP));
            });
        });
    });
    body.0
}

fn expression(all: &mut Body, name: &str, fill: impl FnOnce(&mut Body)) {
    all.nest(LIST_ELEMENT, &[], |element| {
        element.put_text(EXPRESSION_NAME, name);
        element.nest(EXPRESSION_DATA, &[], fill);
    });
}

/// Loads bytes of the header.
fn load(all: &mut Body, at: u32, length: u32) {
    expression(all, "payload", |payload| {
        for (kind, value) in [(1, REGISTER), (2, TRANSPORT), (3, at), (4, length)] {
            put(payload, kind, value);
        }
    });
}

/// The rule goes on where the register holds `value`.
fn is_equal(all: &mut Body, value: &[u8]) {
    expression(all, "cmp", |cmp| {
        put(cmp, 1, REGISTER);
        put(cmp, 2, EQUAL);
        data(cmp, 3, value);
    });
}

/// A value, as data (`NFTA_DATA_VALUE`).
fn data(body: &mut Body, kind: u16, value: &[u8]) {
    body.nest(kind, &[], |data| data.put(1, value));
}
