//! Mount namespaces.

mod collect;
mod entry;
mod external;
mod fs;
mod mountinfo;
mod origin;
mod restored;
mod sharing;
mod tree;

pub use collect::{Mounts, Space};
pub use mountinfo::{External, Malformed, Mount};
pub use restored::Restored;
pub use tree::Tree;
