//! What the end-to-end tests stand on: drivers of the runtimes (runc, Podman, containerd, Docker)
//! and of `criu` itself, clients that prove that a program went on, and a scratch directory for each
//! test whose logs are printed when the test fails.
//!
//! Each test names what it makes after itself, keeps its processes, networks and daemons apart from
//! the machine's own and from other tests', waits for conditions and never for a time, and takes
//! away what it made.
// This crate is part of the tests alone: here a panic is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod certificates;
pub mod command;
pub mod containerd;
pub mod criu;
pub mod disk;
pub mod docker;
pub mod load;
pub mod migration;
pub mod mounts;
pub mod network;
pub mod objects;
pub mod podman;
pub mod port;
pub mod process;
pub mod redis;
pub mod rootfs;
pub mod runc;
pub mod scratch;
pub mod secret;
pub mod terminal;
pub mod wait;
