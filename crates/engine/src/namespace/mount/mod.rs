//! Mount namespaces.

mod collect;
mod fs;
mod mountinfo;
mod tree;

pub use collect::{Mounts, Space};
pub use mountinfo::{External, Malformed, Mount};
pub use tree::Tree;
