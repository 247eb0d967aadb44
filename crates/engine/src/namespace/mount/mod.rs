//! Mount namespaces.

mod assembly;
mod base;
mod build;
mod collect;
mod content;
mod dump;
mod entry;
mod external;
mod formats;
mod fs;
mod mountinfo;
mod nested;
mod origin;
mod outside;
mod overlay;
mod planned;
mod restore;
mod restored;
mod roots;
mod sharing;
mod superblock;
mod tree;
mod unpack;

pub use assembly::Assembly;
pub use collect::{MountNamespace, Mounts, own_tree, tree_of};
pub use dump::Saving;
pub use mountinfo::{External, Mount};
pub use nested::make_nested;
pub use origin::Forest;
pub use restore::{enter, finish, restore};
pub use restored::{Restored, Wanted};
pub use roots::Roots;
pub use tree::Tree;

#[cfg(test)]
mod tests;
