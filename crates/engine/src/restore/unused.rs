//! What a restore was given and its images have no use for: a typing error, most likely, that would
//! show as something missing much later.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use torpor_images::ImageDir;
use torpor_images::proto::FdTypes;
use torpor_policy::Terminal;
use torpor_policy::network::{NetDevice, NetKind, Network};

use super::load::Checkpoint;
use crate::error::{Error, Result};
use crate::external::External;
use crate::file::ext;
use crate::namespace::net::conf;
use crate::namespace::{Namespaces, NsKind};
use crate::options::{InheritFd, JoinNs, Options};

/// Refuses descriptors of `--inherit-fd` and devices of `--external` that nothing in the images
/// asks for, or that come second, and namespaces of `--join-ns` that come second. Mounts and terminals are left to themselves: runtimes name those that may be there, as
/// LXC does with the console.
///
/// # Errors
/// The option, and what there is instead; damaged images.
pub(super) fn check(
    opts: &Options,
    images: &ImageDir,
    checkpoint: &Checkpoint,
    namespaces: &Namespaces,
) -> Result<()> {
    joined(&opts.given.join_ns)?;
    let is_device = |external: &External| {
        matches!(
            external,
            External::NetDev { .. } | External::Veth { .. } | External::Macvlan { .. }
        )
    };
    if opts.given.inherit_fd.is_empty() && !opts.given.external.iter().any(is_device) {
        return Ok(());
    }
    let spaces = SpacesGiven::read(images, namespaces)?;
    let keys = keys(images, checkpoint)?;
    let mut seen = HashSet::new();
    for InheritFd { fd, key } in &opts.given.inherit_fd {
        let option = || format!("--inherit-fd fd[N]:{key}");
        let is_used = match ext::is_namespace(fd.as_fd()) {
            true => spaces.external.contains(key),
            false => keys.contains(bare(key)) || key.starts_with("tty["),
        };
        if !is_used {
            return Err(unused(option(), keys.union(&spaces.external)));
        }
        if !seen.insert(bare(key)) {
            return Err(Error::Usage(format!("{}: it is given twice", option())));
        }
    }
    for external in &opts.given.external {
        let (inner, is_kind): (_, fn(&NetKind) -> bool) = match external {
            External::NetDev { inner, .. } => {
                (inner, |kind| matches!(kind, NetKind::External | NetKind::Veth(_)))
            }
            External::Veth { inner, .. } => (inner, |kind| matches!(kind, NetKind::Veth(_))),
            External::Macvlan { inner, .. } => {
                (inner, |kind| matches!(kind, NetKind::Macvlan { .. }))
            }
            _ => continue,
        };
        let fits = |device: &&NetDevice| is_kind(&device.kind);
        let there: HashSet<String> =
            spaces.devices.iter().filter(fits).map(|device| device.name.clone()).collect();
        if !opts.network.empty && !there.contains(inner) {
            return Err(unused(format!("--external {external}"), there.iter()));
        }
    }
    Ok(())
}

/// The tree joins one namespace of a kind: another one would be left out in silence.
fn joined(all: &[JoinNs]) -> Result<()> {
    let mut first: HashMap<NsKind, &JoinNs> = HashMap::new();
    for join in all {
        let kind = NsKind::from(join.kind);
        if let Some(first) = first.get(&kind) {
            return Err(Error::Usage(format!(
                "--join-ns {0}:{1}: nothing would live in it; the tree joins the {0} namespace {2}",
                kind.name(),
                join.file.display(),
                first.file.display()
            )));
        }
        first.insert(kind, join);
    }
    Ok(())
}

fn unused<'t>(option: String, there: impl Iterator<Item = &'t String>) -> Error {
    const SHOWN: usize = 8;
    let mut names: Vec<&str> = there.map(String::as_str).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable_by_key(|name| (!name.contains('['), *name));
    names.truncate(SHOWN);
    let known = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    Error::Usage(format!("{option}: nothing in the images asks for it; there is {known}"))
}

/// A path is given with or without the slash, the number of a pipe or socket with or without the
/// colon of procfs.
fn bare(key: &str) -> &str {
    key.strip_prefix('/').unwrap_or(key)
}

/// What the images have of network and pid namespaces.
struct SpacesGiven {
    /// Names of those that are handed over.
    external: HashSet<String>,
    devices: Vec<NetDevice>,
}

impl SpacesGiven {
    fn read(images: &ImageDir, namespaces: &Namespaces) -> Result<Self> {
        let external = namespaces.given.values().filter_map(|given| given.key.clone()).collect();
        let mut devices = Vec::new();
        for ns in namespaces.of_kind(NsKind::Net).filter(|ns| !ns.is_host) {
            devices.extend(Network::read(images, ns.id, &conf::NAMES)?.devices);
        }
        Ok(SpacesGiven { external, devices })
    }
}

/// All open files that `--inherit-fd` can stand for.
fn keys(images: &ImageDir, checkpoint: &Checkpoint) -> Result<HashSet<String>> {
    let mut keys = HashSet::new();
    let mut number = |kind: &str, number: u32| {
        keys.insert(format!("{kind}:[{number}]"));
        keys.insert(format!("{kind}[{number}]"));
    };
    for file in checkpoint.files.values() {
        match file.r#type() {
            FdTypes::Pipe => number("pipe", file.pipe.map_or(0, |pipe| pipe.pipe_id)),
            FdTypes::Unixsk => number("socket", file.usk.as_ref().map_or(0, |usk| usk.ino)),
            _ => {}
        }
    }
    let paths = checkpoint.files.values().filter_map(|file| file.reg.as_ref());
    keys.extend(paths.map(|reg| bare(&String::from_utf8_lossy(&reg.name)).to_owned()));
    for terminal in Terminal::all(images)? {
        keys.insert(format!("tty[{:x}:{:x}]", terminal.rdev, terminal.devpts.unwrap_or(0)));
    }
    Ok(keys)
}
