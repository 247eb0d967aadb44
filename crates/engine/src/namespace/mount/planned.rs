//! What each mount of the images will show, in the words of the plan that the policy judges.

use std::collections::BTreeSet;

use torpor_images::{ImageDir, kind};
use torpor_policy::{From, Mount};

use super::fs::Origin;
use super::mountinfo::{self, External};
use super::origin::{Forest, Node, Source};
use super::restore::read;
use crate::cgroup::View;
use crate::error::Result;
use crate::namespace::Namespaces;

/// The mounts that a restore makes, as [`super::restore()`] reads them, with what the caller gives
/// left open. Those that it cannot make are left out. A mount of cgroups shows what it
/// showed at the dump: where the groups are now is not known before there is a task.
///
/// # Errors
/// Mounts that form no tree; damaged images.
pub fn planned(images: &ImageDir, spaces: &Namespaces) -> Result<Vec<Mount>> {
    let forest = read(images, spaces, &View::default())?;
    let from = |node| Some((node, from(&forest, node, forest.source(node).ok()?)));
    let made = forest.nodes().filter_map(from);
    Ok(made
        .map(|(node, from)| as_asked(forest.spaces[node.space].0, &forest, node, from))
        .collect())
}

/// The archives that new file systems are filled from.
///
/// # Errors
/// As [`planned`].
pub fn archives(images: &ImageDir, spaces: &Namespaces) -> Result<BTreeSet<String>> {
    let forest = read(images, spaces, &View::default())?;
    let is_filled = |node: &Node| {
        let made = matches!(forest.source(*node), Ok(Source::FileSystem));
        made && forest.mount(*node).ty.origin == Origin::Filled
    };
    let devices = forest.nodes().filter(is_filled).map(|node| forest.mount(node).dev);
    Ok(devices.map(|device| kind::TMPFS_DEV.file_name(device.into())).collect())
}

fn as_asked(space: u32, forest: &Forest, node: Node, from: From) -> Mount {
    let mount = forest.mount(node);
    Mount { space, id: (mount.id, mount.parent), at: at(mount), from, flags: flags(mount) }
}

fn at(mount: &mountinfo::Mount) -> String {
    mount.mountpoint.to_string_lossy().into_owned()
}

/// Flags of mount(2) have 32 bits.
fn flags(mount: &mountinfo::Mount) -> u32 {
    u32::try_from(mount.flags).unwrap_or(u32::MAX)
}

fn from(forest: &Forest, node: Node, source: Source) -> From {
    let mount = forest.mount(node);
    let options = mount.options.to_string_lossy().into_owned();
    match source {
        Source::Root => From::Root,
        Source::Part { of, .. } => {
            let whole = forest.mount(of);
            From::Part { of: vec![(at(whole), flags(whole))] }
        }
        Source::FileSystem => From::FileSystem { name: mount.fs.clone(), options },
        Source::External => match mount.external.clone() {
            Some(External::Key(key)) => From::Given { key, path: None },
            Some(External::Device(key)) => {
                From::Device { key, path: None, name: mount.fs.clone(), options }
            }
            Some(External::Auto(path)) => From::Host(path.to_string_lossy().into_owned()),
            None => From::Root,
        },
    }
}
