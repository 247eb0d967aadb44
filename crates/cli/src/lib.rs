//! The command line, the configuration files and the RPC of Torpor.
//!
//! One program with three names: `torpor`, `criu` and `crit`.

#![warn(unreachable_pub)]

pub mod audit;
pub mod check;
mod daemon;
pub mod failure;
pub mod help;
pub mod hooks;
pub mod key;
pub mod log;
pub mod options;
mod pages;
pub mod policy;
pub mod program;
mod rounds;
pub mod rpc;
pub mod seal;
pub mod stats;
pub mod work;
mod worker;

/// The version of CRIU that the program is compatible with.
pub(crate) const COMPATIBLE: &str = "4.2";
