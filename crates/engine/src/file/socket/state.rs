//! `TCP_*` states (net/tcp_states.h), which the kernel uses for sockets of all families.
#![allow(missing_docs)]

pub(crate) const ESTABLISHED: u32 = 1;
pub(crate) const SYN_SENT: u32 = 2;
pub(crate) const SYN_RECV: u32 = 3;
pub(crate) const FIN_WAIT1: u32 = 4;
pub(crate) const FIN_WAIT2: u32 = 5;
pub(crate) const TIME_WAIT: u32 = 6;
pub(crate) const CLOSE: u32 = 7;
pub(crate) const CLOSE_WAIT: u32 = 8;
pub(crate) const LAST_ACK: u32 = 9;
pub(crate) const LISTEN: u32 = 10;
pub(crate) const CLOSING: u32 = 11;
