//! A table of nftables that drops the first packet of each new TCP connection to some ports.

use std::collections::BTreeSet;

use super::new_table::{ACCEPT, DROP, LOCAL_IN, NewTable, REGISTER, TRANSPORT};
use crate::error::Result;

/// Where a TCP header has the port that it goes to, and its flags; how long these are.
const PORT: (u32, u32) = (2, 2);
const FLAGS: (u32, u32) = (13, 1);
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

const CHAIN: &str = "input";

/// Makes the table in the network namespace of this thread.
///
/// # Errors
/// If this kernel has no nftables, or refuses a part of the table.
pub(super) fn hold_off(table: &str, ports: &BTreeSet<u16>) -> Result<()> {
    let mut new = NewTable::new(table);
    new.chain(CHAIN, LOCAL_IN, ACCEPT);
    for port in ports {
        new.rule(CHAIN, |rule| {
            rule.is_tcp();
            rule.load(TRANSPORT, FLAGS, REGISTER);
            rule.mask(SYN | ACK);
            rule.is_equal(&[SYN]);
            rule.load(TRANSPORT, PORT, REGISTER);
            rule.is_equal(&port.to_be_bytes());
            rule.decide(DROP);
        });
    }
    new.make()
}
