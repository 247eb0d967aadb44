//! Files that a restore makes: unlinked ones, memory files, and what fills a tmpfs.
//! And the devices that its cgroups may use.

use std::collections::BTreeSet;

use torpor_images::kind;
use torpor_images::proto::{
    CgroupDirEntry, CgroupEntry, GhostFileEntry, MemfdInodeEntry, MntEntry, RemapFilePathEntry,
    RemapType,
};

use super::mounts::is_tmpfs;
use super::{Checkpoint, Requests, Result};
use crate::archive::{self, SET_ID};
use crate::request::{Ask, Device};

/// The type of a file in its mode (`S_IFMT`), and some of its values.
const TYPE: u32 = 0o170_000;
const CHARACTER: u32 = 0o020_000;
const BLOCK: u32 = 0o060_000;
const REGULAR: u32 = 0o100_000;
/// The bit that marked ghosts before `remap_type` was there.
const OLD_GHOST: u32 = 1 << 31;

pub(super) fn collect(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    ghosts(checkpoint, all)?;
    memory_files(checkpoint, all)?;
    for id in checkpoint.namespaces(|ids| ids.mnt_ns_id) {
        archives(checkpoint, id, all)?;
    }
    cgroups(checkpoint, all)
}

fn ghosts(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    let mut seen = BTreeSet::new();
    for entry in checkpoint.images.read_all_or_empty::<RemapFilePathEntry>(kind::REMAP_FPATH, 0)? {
        let is_ghost = match entry.remap_type {
            Some(_) => entry.remap_type() == RemapType::Ghost,
            None => entry.remap_id & OLD_GHOST != 0,
        };
        let id = match entry.remap_type {
            Some(_) => entry.remap_id,
            None => entry.remap_id & !OLD_GHOST,
        };
        if !is_ghost || !seen.insert(id) {
            continue;
        }
        // One that is missing ends the restore by itself.
        let Some(mut reader) = checkpoint.images.reader(kind::GHOST_FILE, id.into())? else {
            continue;
        };
        let ghost: GhostFileEntry = reader.expect()?;
        let image = kind::GHOST_FILE.file_name(id.into());
        let path = name_of(checkpoint, entry.orig_id);
        match ghost.mode & TYPE {
            kind @ (CHARACTER | BLOCK) => {
                let device = Device::from_number(kind == BLOCK, ghost.rdev());
                all.add(image, None, Ask::Device { path, device });
            }
            REGULAR if ghost.mode & SET_ID != 0 => {
                all.add(image, None, Ask::SetUid { path, mode: ghost.mode, capabilities: false });
            }
            _ => {}
        }
    }
    Ok(())
}

fn name_of(checkpoint: &Checkpoint<'_>, file: u32) -> String {
    let entry = checkpoint.files.iter().find(|entry| entry.id == file);
    let name = entry.and_then(|entry| entry.reg.as_ref()).map(|reg| reg.name.as_slice());
    String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
}

fn memory_files(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    for inode in checkpoint.images.read_all_or_empty::<MemfdInodeEntry>(kind::MEMFD_INODE, 0)? {
        let mode = inode.mode.unwrap_or_default();
        if mode & SET_ID != 0 {
            let path = format!("memfd:{}", String::from_utf8_lossy(&inode.name));
            let ask = Ask::SetUid { path, mode, capabilities: false };
            all.add(kind::MEMFD_INODE.file_name(0), None, ask);
        }
    }
    Ok(())
}

/// What fills each tmpfs of a mount namespace.
fn archives(checkpoint: &Checkpoint<'_>, space: u32, all: &mut Requests) -> Result<()> {
    let images = checkpoint.images;
    let mut seen = BTreeSet::new();
    for mount in images.read_all::<MntEntry>(kind::MNTS, space.into())? {
        let device = u64::from(mount.root_dev);
        if !is_tmpfs(&mount) || !seen.insert(device) {
            continue;
        }
        let Some(file) = images.reader(kind::TMPFS_DEV, device)? else { continue };
        let image = kind::TMPFS_DEV.file_name(device);
        let mut found = vec![];
        if let Err(reason) = archive::scan(file, &mut |ask| found.push(ask)) {
            found.push(Ask::Obscure { reason });
        }
        found.into_iter().for_each(|ask| all.add(&*image, None, ask));
    }
    Ok(())
}

/// The devices that tasks may use by the rules of their cgroups.
fn cgroups(checkpoint: &Checkpoint<'_>, all: &mut Requests) -> Result<()> {
    let Some(entry) = checkpoint.images.read_opt::<CgroupEntry>(kind::CGROUP, 0)? else {
        return Ok(());
    };
    let mut left: Vec<&CgroupDirEntry> = entry.controllers.iter().flat_map(|c| &c.dirs).collect();
    while let Some(dir) = left.pop() {
        left.extend(&dir.children);
        let lists = ["devices.list", "devices.allow"];
        for property in dir.properties.iter().filter(|p| lists.contains(&p.name.as_str())) {
            for device in property.value.lines().flat_map(allowed) {
                let path = format!("{}/{}", String::from_utf8_lossy(&dir.dir_name), property.name);
                all.add(kind::CGROUP.file_name(0), None, Ask::Device { path, device });
            }
        }
    }
    Ok(())
}

/// The devices of a line such as `c 1:3 rwm`; `a` is all of both kinds. To make a node
/// (`m`) is no use of the device.
fn allowed(line: &str) -> Vec<Device> {
    let mut words = line.split_whitespace();
    let (kind, numbers) = (words.next().unwrap_or_default(), words.next().unwrap_or("*:*"));
    if words.next() == Some("m") {
        return vec![];
    }
    let kinds: &[&str] = if kind == "a" { &["b", "c"] } else { &[kind] };
    kinds.iter().filter_map(|kind| Device::parse(&format!("{kind} {numbers}")).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_device_lists() {
        let text = |line| allowed(line).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(text("c 1:3 rwm"), ["c 1:3"]);
        assert_eq!(text("a *:* rwm"), ["b *:*", "c *:*"]);
        assert_eq!(text("b *:* m"), Vec::<String>::new());
        assert_eq!(text("a"), ["b *:*", "c *:*"]);
    }
}
