//! The end-to-end tests' harness: runs each program of the zoo in each mode through the real
//! `criu` command, in a small world of its own that ends with the case.
//!
//! [`alone`], [`kill`], [`random`] and [`wait`] are for the tests of all crates.

pub mod alone;
pub mod build;
pub mod case;
pub mod commands;
pub mod fault;
pub mod foreign;
pub mod form;
pub mod former;
pub mod inside;
pub mod interchange;
pub mod kill;
mod mounts;
pub mod observe;
pub mod program;
pub mod random;
mod root;
pub mod status;
pub mod wait;
