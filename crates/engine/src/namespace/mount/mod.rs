//! Mount namespaces.

mod collect;
mod fs;
mod mountinfo;
mod restored;
mod tree;

pub use collect::{Mounts, Space};
pub use mountinfo::{External, Malformed, Mount};
pub use restored::Restored;
pub use tree::Tree;
