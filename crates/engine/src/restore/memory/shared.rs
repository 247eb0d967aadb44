//! Shared memory that has no file: made by the first task that maps it.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_images::ImageDir;
use torpor_images::kind;
use torpor_policy::MemoryInode;
use torpor_policy::memory::{AreaForm, MemoryArea};
use torpor_tracee::Tracee;
use torpor_tracee::syscall;

use crate::error::{Context, Result};
use crate::restore::object;
use crate::restore::pages::Pages;
use crate::restore::tasks::Task;

/// Numbers of objects that images of Torpor's old versions have, which are not files there.
const OLD: u64 = 1 << 40;

/// The object of shared anonymous memory that `inode` describes. The first task that
/// maps it makes it, so that the kernel names it as it did; the supervisor takes a
/// descriptor of it and fills it.
///
/// # Errors
/// If the kernel refuses the memory (it is short, no huge pages are left); if pages cannot be read;
/// if the husk has ended.
pub(in crate::restore) fn open(
    (images, known): (&ImageDir, &mut HashMap<u64, OwnedFd>),
    husk: &mut Tracee,
    area: Option<&MemoryArea>,
    inode: &MemoryInode,
) -> Result<OwnedFd> {
    let (no_reserve, huge) =
        area.map_or((false, None), |area| (area.form.no_reserve, area.form.huge));
    let of_inode = inode.huge.map(|flags| flags >> libc::MAP_HUGE_SHIFT & 0x3f);
    let huge = [of_inode, huge].into_iter().flatten().reduce(|one, other| one | other);
    let (pages, object) = (inode.pages.into(), inode.number.into());
    make((images, known), husk, (no_reserve, huge), (pages, object), inode.size)
}

/// As [`open`], of images that say with the mapping what there is to say: the object has this number and at
/// least this size. See [`length`].
///
/// # Errors
/// As [`open`].
pub(super) fn open_old(
    (images, known): (&ImageDir, &mut HashMap<u64, OwnedFd>),
    husk: &mut Tracee,
    form: &AreaForm,
    (number, size): (u64, u64),
) -> Result<OwnedFd> {
    let form = (form.no_reserve, form.huge);
    make((images, known), husk, form, (number, number | OLD), size)
}

fn make(
    (images, known): (&ImageDir, &mut HashMap<u64, OwnedFd>),
    husk: &mut Tracee,
    (no_reserve, huge): (bool, Option<u32>),
    (shmid, object): (u64, u64),
    size: u64,
) -> Result<OwnedFd> {
    if let Some(file) = known.get(&object) {
        return file.try_clone().context(|| "dup".to_owned());
    }
    let pages = Pages::load(images, kind::SHMEM_PAGEMAP, shmid)?;
    let size = size.max(pages.end());
    let mut flags = MapFlags::SHARED | huge_flags(huge);
    flags.set(MapFlags::NORESERVE, no_reserve);
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let at = husk.call("mmap of shared memory", syscall::mmap_anonymous(0..size, prot, flags))?;
    let name = format!("/proc/{}/map_files/{at:x}-{:x}", husk.pid(), at + size);
    let file =
        File::options().read(true).write(true).open(&name).context(|| format!("open {name}"))?;
    object::fill(&pages, &file, 0)?;
    husk.call("munmap", syscall::munmap(at..at + size))?;
    let clone = file.try_clone().context(|| "dup".to_owned())?;
    known.insert(object, file.into());
    Ok(clone.into())
}

/// What mmap(2) takes for huge pages, by the logarithm of their size.
pub(super) fn huge_flags(huge: Option<u32>) -> MapFlags {
    let of_size = |size: u32| MapFlags::from_bits_retain(size << libc::MAP_HUGE_SHIFT);
    huge.map_or(MapFlags::empty(), |size| MapFlags::HUGETLB | of_size(size))
}

/// The length of the object of a mapping: what the images say, or else where the last of its
/// mappings ends.
pub(super) fn length(tasks: &[Task], area: &MemoryArea) -> u64 {
    if let Some(len) = area.object_len {
        return len;
    }
    let areas = tasks.iter().flat_map(|task| task.image.areas());
    let same = areas.filter(|other| other.kind == area.kind);
    same.map(|part| part.offset.saturating_add(part.len())).max().unwrap_or(0)
}
