//! What a restore was given and its images have no use for: a typing error, most likely, that would
//! show as something missing much later.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use torpor_images::proto::MntEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::network::{NetDevice, NetKind};
use torpor_policy::{FileKey, Terminal};

use super::load::Checkpoint;
use crate::error::{Error, Result};
use crate::external::External;
use crate::file::ext;
use crate::namespace::mount::DEVICE_KEY;
use crate::namespace::{Namespaces, NsKind};
use crate::options::{Given, InheritFd, JoinNs, Options};

/// Refuses descriptors of `--inherit-fd` and devices of `--external` that nothing in the images
/// asks for, or that come second, and namespaces of `--join-ns` that come second. So are mounts and
/// their devices, or else they are warned of: a runtime may name those that might be there.
///
/// # Errors
/// The option, and what there is instead; damaged images.
pub(super) fn check(
    opts: &Options,
    images: &ImageDir,
    checkpoint: &Checkpoint,
    (namespaces, terminals): (&Namespaces, &[Terminal]),
) -> Result<()> {
    joined(&opts.given.join_ns)?;
    mounts(&opts.given, images, namespaces)?;
    let is_device = |external: &External| {
        matches!(
            external,
            External::NetDev { .. } | External::Veth { .. } | External::Macvlan { .. }
        )
    };
    if opts.given.inherit_fd.is_empty() && !opts.given.external.iter().any(is_device) {
        return Ok(());
    }
    let spaces = SpacesGiven::of(namespaces);
    let files = checkpoint.files.values();
    let files: Vec<FileKey<'_>> = files.filter_map(|file| FileKey::of(file, terminals)).collect();
    let mut seen = HashSet::new();
    for InheritFd { fd, key } in &opts.given.inherit_fd {
        let option = || match opts.given.fuse.iter().find(|new| Arc::ptr_eq(&new.connection.fd, fd))
        {
            Some(new) => format!("--fuse {new}"),
            None => format!("--inherit-fd fd[N]:{key}"),
        };
        let name = match ext::is_namespace(fd.as_fd()) {
            true => spaces.external.get(key).cloned(),
            false => {
                let file = files.iter().find(|file| file.is(key)).map(ToString::to_string);
                file.or_else(|| key.starts_with("tty[").then(|| key.clone()))
            }
        };
        let Some(name) = name else {
            let files = files.iter().map(ToString::to_string);
            return Err(unused(option(), files.chain(spaces.external)));
        };
        if !seen.insert(name) {
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
            return Err(unused(format!("--external {external}"), there.into_iter()));
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

/// Refuses mounts and devices of `--external` that no mount of the images is left to, or warns of them.
///
/// # Errors
/// The option, and what there is instead; damaged images.
fn mounts(given: &Given, images: &ImageDir, namespaces: &Namespaces) -> Result<()> {
    let is_wanted =
        |external: &External| matches!(external, External::Dev { .. } | External::Mnt { .. });
    if !given.external.iter().any(is_wanted) && given.fuse.is_empty() {
        return Ok(());
    }
    let mut there = HashSet::new();
    for ns in namespaces.of_kind(NsKind::Mnt).filter(|ns| !ns.is_host) {
        let mounts: Vec<MntEntry> = images.read_all_or_empty(kind::MNTS, ns.id.into())?;
        there.extend(mounts.into_iter().filter_map(|mount| match mount.ext_key? {
            key if key == DEVICE_KEY => {
                Some(format!("dev[{}]", String::from_utf8_lossy(&mount.source)))
            }
            key => Some(format!("mnt[{key}]")),
        }));
    }
    for external in &given.external {
        let name = match external {
            External::Dev { key, .. } => format!("dev[{key}]"),
            External::Mnt { key, .. } => format!("mnt[{key}]"),
            _ => continue,
        };
        if !there.contains(&name) {
            given.unused(external, &nothing_asks(there.iter().cloned()))?;
        }
    }
    let is_there = |name: &str| there.contains(&format!("mnt[{name}]"));
    match given.fuse.iter().find(|new| new.stands_for().is_some_and(|name| !is_there(name))) {
        Some(new) => Err(unused(format!("--fuse {new}"), there.into_iter())),
        None => Ok(()),
    }
}

fn unused(option: String, there: impl Iterator<Item = String>) -> Error {
    Error::Usage(format!("{option}: {}", nothing_asks(there)))
}

/// That nothing asks for something, and what is asked for.
fn nothing_asks(there: impl Iterator<Item = String>) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<String> = there.filter(|name| !name.is_empty()).collect();
    names.sort_unstable_by(|a, b| (!a.contains('['), a).cmp(&(!b.contains('['), b)));
    names.dedup();
    names.truncate(SHOWN);
    match names.as_slice() {
        [] => "nothing in the images asks for it, nor for anything else of the kind".to_owned(),
        known => format!("nothing in the images asks for it; there is {}", known.join(", ")),
    }
}

/// What the images have of network and pid namespaces.
struct SpacesGiven {
    /// Names of those that are handed over.
    external: HashSet<String>,
    devices: Vec<NetDevice>,
}

impl SpacesGiven {
    fn of(namespaces: &Namespaces) -> Self {
        let external = namespaces.given.values().filter_map(|given| given.key.clone()).collect();
        let networks = namespaces.of_kind(NsKind::Net);
        // Those that are handed over have none that are made.
        let networks = networks.filter_map(|ns| namespaces.filling.network(ns.id).ok());
        let devices = networks.flat_map(|filling| filling.network.devices.clone()).collect();
        SpacesGiven { external, devices }
    }
}
