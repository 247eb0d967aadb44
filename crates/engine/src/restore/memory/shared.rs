//! Shared memory that has no file: made by the first task that maps it.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_images::ImageDir;
use torpor_images::kind;
use torpor_images::proto::VmaEntry;
use torpor_policy::MemoryInode;
use torpor_tracee::Tracee;
use torpor_tracee::syscall;

use crate::error::{Context, Result};
use crate::memory::vma::status;
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
    vma: &VmaEntry,
    inode: &MemoryInode,
) -> Result<OwnedFd> {
    let huge = inode.huge.map_or(0, |flags| {
        libc::MAP_HUGETLB.cast_unsigned() | flags & 0x3f << libc::MAP_HUGE_SHIFT
    });
    let vma = VmaEntry { flags: vma.flags | huge, ..*vma };
    make((images, known), husk, &vma, (inode.pages.into(), inode.number.into()), inode.size)
}

/// As [`open`], of images that say with the mapping what there is to say: see [`length`].
///
/// # Errors
/// As [`open`].
pub(super) fn open_old(
    (images, known): (&ImageDir, &mut HashMap<u64, OwnedFd>),
    husk: &mut Tracee,
    vma: &VmaEntry,
    size: u64,
) -> Result<OwnedFd> {
    make((images, known), husk, vma, (vma.shmid, vma.shmid | OLD), size)
}

fn make(
    (images, known): (&ImageDir, &mut HashMap<u64, OwnedFd>),
    husk: &mut Tracee,
    vma: &VmaEntry,
    (shmid, object): (u64, u64),
    size: u64,
) -> Result<OwnedFd> {
    if let Some(file) = known.get(&object) {
        return file.try_clone().context(|| "dup".to_owned());
    }
    let pages = Pages::load(images, kind::SHMEM_PAGEMAP, shmid)?;
    let size = size.max(pages.end());
    let keep =
        (libc::MAP_HUGETLB | libc::MAP_NORESERVE).cast_unsigned() | 0x3f << libc::MAP_HUGE_SHIFT;
    let flags = MapFlags::SHARED | MapFlags::from_bits_retain(vma.flags & keep);
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

/// The length of the object of a mapping: what the images say, or else where the last of its
/// mappings ends.
pub(super) fn length(tasks: &[Task], vma: &VmaEntry) -> u64 {
    if let Some(len) = vma.torpor_object_len {
        return len;
    }
    let vmas = tasks.iter().flat_map(|task| task.image.vmas());
    let same = vmas.filter(|v| v.shmid == vma.shmid && v.status & status::ANON_SHARED != 0);
    same.map(|v| v.pgoff.saturating_add(v.end - v.start)).max().unwrap_or(0)
}
