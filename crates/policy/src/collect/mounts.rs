//! Mounts.

use std::path::Path;

use torpor_images::kind;
use torpor_images::proto::{Fstype, MntEntry};

use super::{Checkpoint, Requests, Result};
use crate::passed::Passed;
use crate::request::{Ask, From, Mount};

/// The key of a mount whose source is a device that the caller names.
const DEVICE_KEY: &str = "CRIU:EXTERNAL_DEV";
/// The option with which images mark a devpts of the namespace's own; others are this
/// host's.
const NEW_INSTANCE: &[u8] = b"newinstance";

/// Whether a mount shows a tmpfs, which the images have the content of.
pub(super) fn is_tmpfs(mount: &MntEntry) -> bool {
    fs_type(mount) == Fstype::Tmpfs
}

fn fs_type(mount: &MntEntry) -> Fstype {
    Fstype::try_from(mount.fstype.cast_signed()).unwrap_or_default()
}

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let mut spaces = vec![];
    for id in checkpoint.namespaces(|ids| ids.mnt_ns_id) {
        let mounts: Vec<MntEntry> = checkpoint.images.read_all(kind::MNTS, id.into())?;
        spaces.push((id, mounts));
    }
    let root = spaces.first().and_then(|(id, mounts)| Some((*id, root_of(mounts)?)));
    let is_root = |space: u32, mount: &MntEntry| root == Some((space, mount.mnt_id));
    let mut given: Vec<&MntEntry> = vec![];
    for (space, mounts) in &spaces {
        let outside =
            |mount: &&MntEntry| is_root(*space, mount) || external(mount, passed).is_some();
        given.extend(mounts.iter().filter(outside));
    }
    for (space, mounts) in &spaces {
        for mount in mounts {
            let from = match external(mount, passed) {
                _ if is_root(*space, mount) => From::Root,
                Some(from) => from,
                None => match parts(mount, &given) {
                    of if of.is_empty() => file_system(mount),
                    of => From::Part { of },
                },
            };
            let ask = Ask::Mount(Mount {
                space: *space,
                id: (mount.mnt_id, mount.parent_mnt_id),
                at: text(&mount.mountpoint),
                from,
                flags: mount.flags,
            });
            all.add(kind::MNTS.file_name((*space).into()), None, ask);
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The mount whose parent is none of the others.
fn root_of(mounts: &[MntEntry]) -> Option<u32> {
    let has_parent = |mount: &&MntEntry| {
        mount.parent_mnt_id != mount.mnt_id
            && mounts.iter().any(|other| other.mnt_id == mount.parent_mnt_id)
    };
    mounts.iter().find(|mount| !has_parent(mount)).map(|mount| mount.mnt_id)
}

/// What comes from outside.
fn external(mount: &MntEntry, passed: &Passed) -> Option<From> {
    let given = |key: &str, paths: &[(String, String)]| {
        let path = paths.iter().find(|(k, _)| k == key).map(|(_, path)| path.clone());
        Some(From::Given { key: key.to_owned(), path })
    };
    match &mount.ext_key {
        Some(key) if key == DEVICE_KEY => given(&text(&mount.source), &passed.devices),
        Some(key) => given(key, &passed.mounts),
        None if mount.ext_mount() => Some(From::Host(text(&mount.source))),
        None if fs_type(mount) == Fstype::Devpts => {
            let own = mount.options.split(|&b| b == b',').any(|option| option == NEW_INSTANCE);
            (!own).then(|| From::Host("/dev/pts".to_owned()))
        }
        None => None,
    }
}

/// Whether `mount` shows a part of what `whole`, given from outside, shows.
fn is_part(mount: &MntEntry, whole: &MntEntry) -> bool {
    mount.root_dev == whole.root_dev
        && !whole.deleted()
        && Path::new(&text(&mount.root)).starts_with(text(&whole.root))
}

/// Where the mounts are, and which flags they have, that show what `mount` shows a part of.
fn parts(mount: &MntEntry, given: &[&MntEntry]) -> Vec<(String, u32)> {
    let whole = given.iter().filter(|whole| is_part(mount, whole));
    whole.map(|whole| (text(&whole.mountpoint), whole.flags)).collect()
}

fn file_system(mount: &MntEntry) -> From {
    let ty = fs_type(mount);
    let name = match ty {
        Fstype::Overlayfs => "overlay".to_owned(),
        Fstype::Auto | Fstype::Unsupported => mount.fsname.clone().unwrap_or_default(),
        ty => ty.as_str_name().to_ascii_lowercase(),
    };
    From::FileSystem { name, options: text(&mount.options) }
}
