//! File systems in memory follow when a skeleton becomes the tasks of a later checkpoint.
//!
//! What is mounted stays where it is; only what is in it changes, and what it is judged by is what the
//! plan of that checkpoint says.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use torpor_images::kind;

use super::base::is_layered;
use super::origin::Forest;
use super::restored::Restored;
use super::unpack::{self, UnpackInto};
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;
use crate::restore::bulk::Bulk;

/// The checkpoint that they are to be like.
#[derive(Debug)]
pub(crate) struct Last<'a> {
    /// What fills its file systems.
    pub bulk: Bulk<'a>,
    /// Its mounts, which are those that were made.
    pub forest: &'a Forest,
    /// The ids of the tree's user namespace.
    pub maps: &'a IdMaps,
    /// The files that husks map: inode numbers, by `st_dev` of their file systems.
    pub used: &'a HashMap<u64, HashSet<u64>>,
}

/// Makes the content of the file systems `devices`, as the images number them, what the archives of
/// the last checkpoint say.
///
/// # Errors
/// If a mount is made of directories of others, which must not change below it; if a file that is mapped would change;
/// if an archive is damaged, or has more than was judged; if a file cannot be made. What was made is of no use then.
pub(crate) fn refill(mounts: &mut Restored, devices: &[u32], last: &Last<'_>) -> Result<()> {
    if last.forest.nodes().any(|node| is_layered(last.forest, node)) {
        let why = "files in memory have changed below a mount of several directories";
        return Err(Error::Unsupported(why.to_owned()));
    }
    let none = HashSet::new();
    for &dev in devices {
        let name = kind::TMPFS_DEV.file_name(dev.into());
        let missing = |what: &str| Error::invalid(&*name, what);
        let filled = mounts.filled.remove(&dev).ok_or_else(|| missing("no mount shows it"))?;
        let archive = last.bulk.archive(dev)?;
        let archive = archive.ok_or_else(|| missing("it is missing"))?;
        let root = filled.root.as_fd();
        let stat = rustix::fs::fstat(root).context(|| format!("{name}: look at its root"))?;
        let used = last.used.get(&stat.st_dev).unwrap_or(&none);
        let target =
            UnpackInto { root, name: &name, maps: last.maps, judged: last.forest.judged_of(&name) };
        unpack::refill(target, archive, filled.contents, used)?;
        tracing::debug!("{name}: its files have followed");
    }
    Ok(())
}
