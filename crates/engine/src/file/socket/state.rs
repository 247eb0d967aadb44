//! `TCP_*` states (net/tcp_states.h), which the kernel uses for sockets of all families.
#![allow(missing_docs)]

pub const ESTABLISHED: u32 = 1;
pub const SYN_SENT: u32 = 2;
pub const SYN_RECV: u32 = 3;
pub const FIN_WAIT1: u32 = 4;
pub const FIN_WAIT2: u32 = 5;
pub const TIME_WAIT: u32 = 6;
pub const CLOSE: u32 = 7;
pub const CLOSE_WAIT: u32 = 8;
pub const LAST_ACK: u32 = 9;
pub const LISTEN: u32 = 10;
pub const CLOSING: u32 = 11;
