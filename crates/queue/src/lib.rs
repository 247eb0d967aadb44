//! `torpor queue`: long jobs give way to urgent ones by checkpoint, and lose nothing.
//!
//! - [`preemption`] knows what giving way costs and by which means it is done;
//! - [`scheduler`] decides who runs, a pure function of state and time;
//! - `daemon` keeps the state of one machine and does what was decided;
//! - `shepherd` is the process that keeps one job, and outlives the daemon;
//! - [`http`] is as much of HTTP as daemons need;
//! - `command` is what people and scripts call.

#![warn(unreachable_pub, clippy::print_stderr)]

#[macro_use]
mod say;

mod bundle;
mod cgroup;
mod child;
mod command;
mod container;
mod copy;
mod daemon;
mod files;
mod holes;
pub mod http;
mod kind;
mod marks;
mod name;
mod objects;
mod order;
pub mod preemption;
mod rlimits;
pub mod scheduler;
mod shepherd;
mod spec;
mod walk;

pub use command::{OWN_ERROR, QueueCommand, run};
