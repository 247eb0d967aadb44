//! Tables of nftables, made by messages to the kernel: stopped tasks do not wait for a program to start, and a host need
//! not have one.

use torpor_kernel::netlink::{APPEND, Body, CREATE, Change, NETFILTER, Socket, of_netfilter};
use torpor_sys::number::byte;

use crate::error::{Context, Result};

const NEW_TABLE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWTABLE);
const NEW_CHAIN: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWCHAIN);
const NEW_RULE: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWRULE);
const NEW_SET: u16 = of_netfilter(libc::NFNL_SUBSYS_NFTABLES, libc::NFT_MSG_NEWSET);
/// `struct nfgenmsg`.
const FAMILY: [u8; 4] = [byte(libc::NFPROTO_INET), 0, 0, 0];

/// Attributes of tables, chains, rules and sets (linux/netfilter/nf_tables.h).
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
const SET_TABLE: u16 = 1;
const SET_NAME: u16 = 2;
const SET_KEY_TYPE: u16 = 4;
const SET_KEY_LENGTH: u16 = 5;
const SET_ID: u16 = 10;
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;

/// Where a chain is, and what becomes of packets.
pub(super) const LOCAL_IN: u32 = libc::NF_INET_LOCAL_IN.cast_unsigned();
pub(super) const LOCAL_OUT: u32 = libc::NF_INET_LOCAL_OUT.cast_unsigned();
pub(super) const DROP: u32 = libc::NF_DROP.cast_unsigned();
pub(super) const ACCEPT: u32 = libc::NF_ACCEPT.cast_unsigned();
/// The register of the outcome, and the first one that rules work with.
const VERDICT: u32 = libc::NFT_REG_VERDICT.cast_unsigned();
pub(super) const REGISTER: u32 = libc::NFT_REG_1.cast_unsigned();
/// What is looked at, and how it is compared.
const FAMILY_OF_PACKET: u32 = libc::NFT_META_NFPROTO.cast_unsigned();
const PROTOCOL: u32 = libc::NFT_META_L4PROTO.cast_unsigned();
const MARK: u32 = libc::NFT_META_MARK.cast_unsigned();
const EQUAL: u32 = libc::NFT_CMP_EQ.cast_unsigned();

/// The headers of a packet.
pub(super) const NETWORK: u32 = libc::NFT_PAYLOAD_NETWORK_HEADER.cast_unsigned();
pub(super) const TRANSPORT: u32 = libc::NFT_PAYLOAD_TRANSPORT_HEADER.cast_unsigned();

/// A table that is to be made, with all that is in it.
#[derive(Debug)]
pub(super) struct NewTable<'n> {
    name: &'n str,
    changes: Vec<(u16, u16, Vec<u8>)>,
    sets: u32,
}

impl<'n> NewTable<'n> {
    /// One with nothing in it.
    pub(super) fn new(name: &'n str) -> Self {
        let mut body = Body::new(&FAMILY);
        body.put_text(TABLE_NAME, name);
        NewTable { name, changes: vec![(NEW_TABLE, CREATE, body.0)], sets: 0 }
    }

    /// Adds a chain that filters packets where `hook` says; `policy` is for those that no rule decides on.
    pub(super) fn chain(&mut self, name: &str, hook: u32, policy: u32) {
        let mut body = Body::new(&FAMILY);
        body.put_text(CHAIN_TABLE, self.name);
        body.put_text(CHAIN_NAME, name);
        body.nest(CHAIN_HOOK, &[], |at| {
            put(at, HOOK_NUMBER, hook);
            put(at, HOOK_PRIORITY, 0);
        });
        put(&mut body, CHAIN_POLICY, policy);
        body.put_text(CHAIN_TYPE, "filter");
        self.changes.push((NEW_CHAIN, CREATE, body.0));
    }

    /// Adds a set whose keys have so many bytes, of a type that `nft` knows by this number.
    pub(super) fn set(&mut self, name: &str, (kind, length): (u32, u32)) {
        self.sets += 1;
        let mut body = Body::new(&FAMILY);
        body.put_text(SET_TABLE, self.name);
        body.put_text(SET_NAME, name);
        put(&mut body, SET_KEY_TYPE, kind);
        put(&mut body, SET_KEY_LENGTH, length);
        // By which the messages of this batch could name it.
        put(&mut body, SET_ID, self.sets);
        self.changes.push((NEW_SET, CREATE, body.0));
    }

    /// Adds a rule at the end of a chain.
    pub(super) fn rule(&mut self, chain: &str, expressions: impl FnOnce(&mut Expressions<'_>)) {
        let mut body = Body::new(&FAMILY);
        body.put_text(RULE_TABLE, self.name);
        body.put_text(RULE_CHAIN, chain);
        body.nest(RULE_EXPRESSIONS, &[], |all| expressions(&mut Expressions(all)));
        self.changes.push((NEW_RULE, CREATE | APPEND, body.0));
    }

    /// Makes it in the network namespace of this thread.
    ///
    /// # Errors
    /// If this kernel has no nftables, or refuses a part of the table: then nothing of it is there.
    pub(super) fn make(self) -> Result<()> {
        let changes: Vec<Change<'_>> =
            self.changes.iter().map(|(kind, flags, body)| (*kind, *flags, &body[..])).collect();
        let made = Socket::open(NETFILTER)?.change_in_batch(&changes)?;
        made.context(|| format!("make the nftables table inet {}", self.name))
    }
}

/// The expressions of a rule: it ends at the first that compares and finds another thing.
#[derive(Debug)]
pub(super) struct Expressions<'b>(&'b mut Body);

impl Expressions<'_> {
    /// Whether the packet has this mark.
    pub(super) fn has_mark(&mut self, mark: u32) {
        self.look(MARK);
        self.is_equal(&mark.to_ne_bytes());
    }

    /// Whether the packet is of this family (`NFPROTO_*`).
    pub(super) fn is_of_family(&mut self, family: u8) {
        self.look(FAMILY_OF_PACKET);
        self.is_equal(&[family]);
    }

    /// Whether the packet is of TCP.
    pub(super) fn is_tcp(&mut self) {
        self.look(PROTOCOL);
        self.is_equal(&[byte(libc::IPPROTO_TCP)]);
    }

    fn look(&mut self, at: u32) {
        self.add("meta", |meta| {
            put(meta, 1, REGISTER);
            put(meta, 2, at);
        });
    }

    /// Loads bytes of a header into a register: where they are, and how many.
    pub(super) fn load(&mut self, header: u32, (at, length): (u32, u32), register: u32) {
        self.add("payload", |payload| {
            for (kind, value) in [(1, register), (2, header), (3, at), (4, length)] {
                put(payload, kind, value);
            }
        });
    }

    /// Keeps these bits alone of the byte in the register.
    pub(super) fn mask(&mut self, bits: u8) {
        self.add("bitwise", |bitwise| {
            put(bitwise, 1, REGISTER);
            put(bitwise, 2, REGISTER);
            put(bitwise, 3, 1);
            data(bitwise, 4, &[bits]);
            data(bitwise, 5, &[0]);
        });
    }

    /// Whether the register holds `value`.
    pub(super) fn is_equal(&mut self, value: &[u8]) {
        self.add("cmp", |cmp| {
            put(cmp, 1, REGISTER);
            put(cmp, 2, EQUAL);
            data(cmp, 3, value);
        });
    }

    /// Whether what was loaded, from the first register on, is a key of this set.
    pub(super) fn is_in(&mut self, set: &str) {
        self.add("lookup", |lookup| {
            lookup.put_text(1, set);
            put(lookup, 2, REGISTER);
        });
    }

    /// What becomes of the packet.
    pub(super) fn decide(&mut self, outcome: u32) {
        self.add("immediate", |immediate| {
            put(immediate, 1, VERDICT);
            immediate.nest(2, &[], |value| {
                // NFTA_DATA_VERDICT, NFTA_VERDICT_CODE.
                value.nest(2, &[], |verdict| put(verdict, 1, outcome));
            });
        });
    }

    fn add(&mut self, name: &str, fill: impl FnOnce(&mut Body)) {
        self.0.nest(LIST_ELEMENT, &[], |element| {
            element.put_text(EXPRESSION_NAME, name);
            element.nest(EXPRESSION_DATA, &[], fill);
        });
    }
}

/// All numbers are in the order of the network.
fn put(body: &mut Body, kind: u16, value: u32) {
    body.put(kind, &value.to_be_bytes());
}

/// A value, as data (`NFTA_DATA_VALUE`).
fn data(body: &mut Body, kind: u16, value: &[u8]) {
    body.nest(kind, &[], |data| data.put(1, value));
}
