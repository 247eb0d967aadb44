//! Mount namespaces.

mod base;
mod build;
mod collect;
mod content;
mod dump;
mod entry;
mod external;
mod fs;
mod mountinfo;
mod origin;
mod overlay;
mod restore;
mod restored;
mod sharing;
mod superblock;
mod tree;
mod unpack;

pub use collect::{Mounts, Space, own_tree, tree_of};
pub use dump::dump;
pub use mountinfo::{External, Malformed, Mount};
pub use restore::{enter, finish, restore};
pub use restored::Restored;
pub use tree::Tree;

#[cfg(test)]
mod tests;
