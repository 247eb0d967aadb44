//! Holding the network still, from the moment that connections are dumped until their
//! tasks go on.
//!
//! A packet that reaches a connection behind its dump is acknowledged by a kernel whose
//! socket has no future, and is lost; one that arrives while there is no socket at all
//! is answered by a reset. So no packet may pass: in a network namespace of the tree's
//! own, none at all; in the caller's, none of the tree's connections. If the tasks
//! are killed the lock stays, until the restore removes it. The peers send again what was
//! lost meanwhile: that is what TCP is for.

pub(crate) mod accept;
pub(crate) mod asleep;
pub(crate) mod held;
mod iptables;
mod left;
pub(crate) mod listed;
mod new_table;
mod newcomers;
mod nftables;
pub(crate) mod rules;
pub(crate) mod tracked;
