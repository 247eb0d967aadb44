//! Containers of the distribution's runtimes and real applications, put to sleep and woken.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod applications;
mod containerd;
mod counting;
mod docker;
mod edits;
mod failure;
mod filters;
mod hostile;
mod images;
mod limits;
mod lxc;
mod mariadb;
mod own;
mod podman;
mod policy;
mod postgres;
mod races;
mod real;
mod redis;
mod rights;
mod runc;
mod sandboxes;
mod secrecy;
mod shown;
mod terminals;
mod users;
