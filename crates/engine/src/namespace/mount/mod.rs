//! Mount namespaces.

mod assembly;
mod autofs;
mod base;
mod build;
mod collect;
mod content;
mod dump;
mod entry;
mod external;
mod formats;
mod fs;
mod fuse;
mod groups;
mod mountinfo;
mod nested;
mod origin;
mod outside;
mod overlay;
mod pack;
mod packer;
mod planned;
mod refill;
mod restore;
mod restored;
mod roots;
mod sharing;
mod storer;
mod superblock;
mod tree;
mod unpack;

pub(crate) use assembly::Assembly;
pub(crate) use collect::{MountNamespace, TreeMounts, own_groups, own_tree, tree_of};
pub(crate) use dump::{Saving, save_beside};
pub(crate) use entry::DEVICE_KEY;
pub(crate) use fs::{access_times, mount_flag_names};
pub use fuse::FuseServer;
pub(crate) use fuse::{
    DEVICE as FUSE_DEVICE, attach as attach_fuse, is_connection, refusal as fuse_refusal,
};
pub(crate) use mountinfo::Mount;
pub(crate) use nested::make_nested;
pub(crate) use origin::Forest;
pub(crate) use refill::{Last, refill};
pub(crate) use restore::{enter, finish, restore};
#[cfg(test)]
pub(crate) use restored::{GivenFs, MadeFs};
pub(crate) use restored::{Partners, Restored, Wanted, WantedPeers};
pub(crate) use roots::{PathAt, Roots};
pub(crate) use tree::Tree;

#[cfg(test)]
mod tests;
