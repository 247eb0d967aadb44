//! Files that a restore opens, and those that it makes: unlinked ones, memory files, and
//! what fills a tmpfs.

use std::collections::{BTreeSet, HashMap};

use torpor_images::kind;
use torpor_images::proto::RegFileEntry;

use super::checkpoint::{Checkpoint, Maps, Requests};
use super::unlimited::owned;
use crate::archive::{self, SET_ID};
use crate::error::{Error, Result};
use crate::ghost::Ghost;
use crate::memory::MemoryArea;
use crate::memory_file::MemoryInode;
use crate::mount::Mount;
use crate::mount_options::READ_ONLY;
use crate::path_file::PathFile;
use crate::remap::{FoundElsewhere, Remap};
use crate::request::Ask;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    mounts: &[Mount],
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    ghosts(checkpoint, maps, all)?;
    memory_files(checkpoint, maps, all)?;
    archives(checkpoint, mounts, maps, all)?;
    opened(checkpoint, mounts, all)
}

/// What tasks have open by a path, and what is made or removed for it on mounts that they
/// cannot write to.
fn opened(checkpoint: &Checkpoint<'_>, mounts: &[Mount], all: &mut Requests) -> Result<()> {
    let remaps = Remap::all(checkpoint.images)?.into_iter();
    let remaps: HashMap<u32, FoundElsewhere> = remaps.map(|remap| (remap.file, remap.by)).collect();
    let narrow = || mounts.iter().filter(|mount| mount.flags & READ_ONLY != 0);
    let read_only: BTreeSet<i32> = narrow().map(|mount| mount.id.0.cast_signed()).collect();
    for mount in narrow().filter(|mount| mount.deleted) {
        let path = mount.root.to_string_lossy().into_owned();
        all.add(kind::MNTS.file_name(mount.space.into()), None, Ask::WriteReadOnly { path });
    }
    let image = kind::FILES.file_name(0);
    let files: HashMap<u32, PathFile> = checkpoint
        .files
        .iter()
        .filter_map(|entry| Some((entry.id, PathFile::of(entry)?)))
        .collect();
    for entry in &checkpoint.files {
        if let Some(device) = PathFile::of_tun(entry) {
            all.add(&*image, None, device.ask());
        }
        let Some(file) = files.get(&entry.id) else { continue };
        all.add(&*image, None, file.ask());
        let Some(remap) = remaps.get(&entry.id) else { continue };
        let changed = match remap {
            FoundElsewhere::Ghost(_) => Some(file),
            FoundElsewhere::Linked(other) => files.get(other),
            FoundElsewhere::Process(_) => None,
        };
        for file in changed.into_iter().chain([file]) {
            if changed.is_some() && read_only.contains(&file.mount) {
                all.add(&*image, None, Ask::WriteReadOnly { path: file.text() });
                break;
            }
        }
    }
    opened_for_mappings(checkpoint, &files, all);
    Ok(())
}

/// Files that are opened once more for mappings, with other flags than their descriptors have.
fn opened_for_mappings(
    checkpoint: &Checkpoint<'_>,
    files: &HashMap<u32, PathFile>,
    all: &mut Requests,
) {
    let areas = checkpoint.tasks.iter().flat_map(|task| task.areas);
    let wanted: BTreeSet<(u32, u32)> = areas.filter_map(MemoryArea::opens).collect();
    for (file, flags) in wanted {
        if let Some(file) = files.get(&file).filter(|file| file.flags != flags) {
            all.add(kind::FILES.file_name(0), None, file.opened_with(flags).ask());
        }
    }
}

fn ghosts(checkpoint: &Checkpoint<'_>, maps: &Maps, all: &mut Requests) -> Result<()> {
    let paths = checkpoint.files.iter().filter_map(|entry| Some((entry.id, entry.reg.as_ref()?)));
    let paths: HashMap<u32, &RegFileEntry> = paths.collect();
    let name_of = |file: u32| {
        let name = paths.get(&file).map(|reg| reg.name.as_slice());
        String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
    };
    for (image, name, ghost) in Ghost::all(checkpoint.images, name_of)? {
        owned(ghost.owner, maps, |ask| all.add(&*image, None, ask));
        ghost.asks(name).for_each(|ask| all.add(&*image, None, ask));
    }
    Ok(())
}

/// Files in memory that give whoever runs them the rights of another.
pub(super) fn memory_files(
    checkpoint: &Checkpoint<'_>,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let image = kind::MEMFD_INODE.file_name(0);
    for inode in MemoryInode::all(checkpoint.images)? {
        let mode = inode.mode.unwrap_or_default();
        if mode & SET_ID != 0 {
            let path = format!("memfd:{}", String::from_utf8_lossy(&inode.name));
            all.add(&*image, None, Ask::SetUid { path, mode, capabilities: false });
        }
        let outside = |group, id| maps.outside(group, id);
        archive::lent(mode, inode.owner, &outside).for_each(|ask| all.add(&*image, None, ask));
    }
    Ok(())
}

/// What fills each tmpfs of a mount namespace.
fn archives(
    checkpoint: &Checkpoint<'_>,
    mounts: &[Mount],
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let mut seen = BTreeSet::new();
    for mount in mounts {
        let device = u64::from(mount.device);
        if mount.fs.name != "tmpfs" || !seen.insert((mount.space, device)) {
            continue;
        }
        let Some(file) = checkpoint.images.reader(kind::TMPFS_DEV, device)? else { continue };
        let image = kind::TMPFS_DEV.file_name(device);
        let mut found = vec![];
        let outside = |group, id| maps.outside(group, id);
        let totals = archive::scan(file, &outside, &mut |ask| found.push(ask))
            .map_err(|reason| Error::Invalid { image: image.clone(), reason })?;
        found.into_iter().chain([Ask::Fill(totals)]).for_each(|ask| all.add(&*image, None, ask));
    }
    Ok(())
}
