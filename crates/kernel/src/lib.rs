//! What the kernel tells about tasks, mounts, control groups, sockets and networks, and how it is
//! asked: procfs, cgroupfs, netlink and its lists of sockets, from inside any namespace, and its types. It knows nothing of images, dumps or restores.

#![warn(unreachable_pub)]

pub mod btf;
pub mod cgroup;
mod error;
pub mod mountinfo;
pub mod namespace;
pub mod netlink;
pub mod oom;
pub mod parallel;
pub mod proc;
pub mod processor;
pub mod shortage;
pub mod sock_diag;
pub mod sparse;
pub mod tree;

pub use error::{Context, Error, Result};
