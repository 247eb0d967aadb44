//! Which mounts a dump leaves to the caller of the restore.

use std::path::{Path, PathBuf};

use torpor_images::proto::Fstype;

use super::fs::{AUTO, UNSUPPORTED};
use super::mountinfo::{FromOutside, Mount};
use super::origin::{ContentSource, Forest, Node};
use super::tree::Tree;
use crate::error::Result;
use crate::external;
use crate::options::Given;

/// Marks the mounts that come from outside: those that `externals` name, and those
/// that are found among the mounts of the host where these ask for that. File systems of the types
/// `enabled` are brought back by a plain mount call.
pub(super) fn mark(
    forest: &mut Forest,
    host: &Tree,
    externals: &[external::External],
    enabled: &[String],
) {
    let nodes: Vec<Node> = forest.nodes().collect();
    for &node in &nodes {
        let mount = forest.mount_mut(node);
        let is_enabled = enabled.iter().any(|name| *name == mount.fs || name == "all");
        if is_enabled && mount.ty == UNSUPPORTED {
            mount.ty = AUTO;
        }
        mount.external = by_device(mount, externals);
        if mount.ty.code == Fstype::Devpts && mount.external.is_none() {
            mount.external = on_host(mount, host).map(FromOutside::Auto);
        }
    }
    // A mount point means one in the first namespace; a nested one can have
    // something else there.
    for &node in nodes.iter().filter(|n| n.space == 0) {
        name(forest, node, externals);
    }
    if externals.iter().any(|e| matches!(e, external::External::MntAuto { .. })) {
        for &node in &nodes {
            find(forest, node, host);
        }
    }
    for &node in nodes.iter().filter(|n| n.space != 0) {
        if forest.source(node).is_err() {
            name(forest, node, externals);
        }
    }
}

fn name(forest: &mut Forest, node: Node, externals: &[external::External]) {
    if forest.is_root(node) {
        return;
    }
    let mount = forest.mount_mut(node);
    let named = externals.iter().find_map(|e| match e {
        external::External::Mnt { key, val } if Path::new(key) == mount.mountpoint => Some(val),
        _ => None,
    });
    if let Some(name) = named {
        mount.external = Some(FromOutside::Key(name.clone()));
    }
}

/// Refuses mounts and devices that were named and no mount is, or warns of them.
///
/// # Errors
/// The option, and that there is no such mount.
pub(super) fn check_used(forest: &Forest, given: &Given) -> Result<()> {
    let mounts: Vec<&Mount> = forest.nodes().map(|node| forest.mount(node)).collect();
    let is_used = |external: &&external::External| match external {
        external::External::Mnt { key, val } => mounts.iter().any(|mount| {
            mount.external.as_ref() == Some(&FromOutside::Key(val.clone()))
                && mount.mountpoint == Path::new(key)
        }),
        external::External::Dev { val, .. } => {
            mounts.iter().any(|m| m.external.as_ref() == Some(&FromOutside::Device(val.clone())))
        }
        _ => true,
    };
    let mut unused = given.external.iter().filter(|external| !is_used(external));
    unused
        .try_for_each(|unused| given.unused(unused, "no mount of the tree's own namespace is that"))
}

fn by_device(mount: &Mount, externals: &[external::External]) -> Option<FromOutside> {
    let numbers = format!("{}/{}", mount.dev >> 20, mount.dev & 0xf_ffff);
    externals.iter().find_map(|e| match e {
        external::External::Dev { key, val } if *key == numbers && mount.root == Path::new("/") => {
            Some(FromOutside::Device(val.clone()))
        }
        _ => None,
    })
}

/// Looks for the mount on the host, unless it is a part of something given already.
fn find(forest: &mut Forest, node: Node, host: &Tree) {
    if matches!(forest.source(node), Err(_) | Ok(ContentSource::FileSystem)) {
        let path = on_host(forest.mount(node), host);
        forest.mount_mut(node).external = path.map(FromOutside::Auto);
    }
}

/// A path of the host that leads to the root of the mount.
fn on_host(mount: &Mount, host: &Tree) -> Option<PathBuf> {
    let trees = host.mounts().iter().enumerate().filter(|(_, h)| h.dev == mount.dev && !h.deleted);
    trees
        .filter_map(|(i, h)| {
            let below = mount.root.strip_prefix(&h.root).ok()?;
            let empty = below.as_os_str().is_empty();
            Some((i, if empty { h.mountpoint.clone() } else { h.mountpoint.join(below) }))
        })
        .find(|(i, path)| host.is_visible(*i, path))
        .map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::super::mountinfo::parse;
    use super::*;

    fn tree(text: &str) -> Tree {
        Tree::new(parse(text.as_bytes()).unwrap()).unwrap()
    }

    fn externals(opts: &[&str], host: &str, spaces: &[&str]) -> Vec<(u32, FromOutside)> {
        let externals: Vec<_> = opts.iter().map(|o| o.parse().unwrap()).collect();
        let spaces = spaces.iter().zip(1..).map(|(text, ns)| (ns, tree(text))).collect();
        let mut forest = Forest { spaces, ..Forest::default() };
        mark(&mut forest, &tree(host), &externals, &[]);
        let found = forest.nodes().map(|n| forest.mount(n).clone());
        found.filter_map(|m| Some((m.id, m.external?))).collect()
    }

    const HOST: &str = "1 0 8:1 / / rw - ext4 d rw
2 1 0:9 / /dev/pts rw - devpts devpts rw
3 1 0:8 / /srv rw - xfs x rw
4 1 8:7 / /hidden rw - ext4 e rw
5 4 0:7 / /hidden rw - ext4 e rw
";

    #[test]
    fn by_name_in_the_first_namespace() {
        let inside = "11 0 8:1 /c / rw - ext4 d rw\n12 11 0:8 /v /data rw - xfs x rw\n";
        let nested = "21 0 8:1 /c / rw - ext4 d rw\n22 21 0:5 / /data rw - tmpfs t rw\n";
        let key = FromOutside::Key("disk".into());
        assert_eq!(externals(&["mnt[/data]:disk"], HOST, &[inside, nested]), [(12, key)]);
        assert_eq!(externals(&["mnt[/]:disk"], HOST, &[inside]), []);
    }

    #[test]
    fn found_on_the_host() {
        let inside = "11 0 8:1 /c / rw - ext4 d rw
12 11 0:8 /v /data rw - xfs x rw
13 11 8:1 /c/x /part rw - ext4 d rw
14 11 8:1 /y /whole rw - ext4 d rw
15 11 8:7 / /none rw - ext4 d rw
";
        let auto = |path: &str| FromOutside::Auto(path.into());
        assert_eq!(
            externals(&["mnt[]"], HOST, &[inside]),
            [(12, auto("/srv/v")), (14, auto("/y"))]
        );
    }

    #[test]
    fn the_devpts_of_the_host_and_devices() {
        let inside = "11 0 8:1 /c / rw - ext4 d rw
12 11 0:9 / /dev/pts rw - devpts devpts rw
13 11 0:10 / /pts rw - devpts devpts rw
14 11 8:7 / /disk rw - ext4 d rw
";
        let found = externals(&["dev[8/7]:sda7"], HOST, &[inside]);
        let pts = FromOutside::Auto("/dev/pts".into());
        assert_eq!(found, [(12, pts), (14, FromOutside::Device("sda7".into()))]);
    }
}
