//! `torpor benchmark`: container runtimes, measured through the CRI.
//!
//! It needs nothing of the engine. Results come from a journal that is written as samples come
//! ([`journal`]), and everything that runtimes do wrong ends in the cell that it belongs to.

#![warn(unreachable_pub, clippy::print_stderr)]

mod agent;
pub mod catalogue;
pub mod cell;
mod cgroups;
pub mod chart;
pub mod command;
pub mod compare;
pub mod config;
pub mod cri;
mod digest;
mod endpoint;
mod filter;
pub mod gather;
mod image;
pub mod journal;
mod keeper;
mod kubernetes;
mod layout;
mod listen;
pub mod machine;
mod many;
pub mod overhead;
mod own;
mod past;
pub mod plan;
mod program;
mod registry;
pub mod report;
pub mod results;
mod run;
mod setting;
pub mod statistics;
mod suite;
mod trust;
mod turn;
mod workload;
mod world;

pub use command::{BenchmarkCommand, WRONG_CALL, run};
