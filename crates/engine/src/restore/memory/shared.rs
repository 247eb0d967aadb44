//! Shared memory that has no file: made by the first task that maps it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use torpor_images::kind;
use torpor_images::proto::{MemfdInodeEntry, VmaEntry};
use torpor_sys::vm;

use super::Restore;
use super::fill::CHUNK;
use crate::error::{Context, Result};
use crate::memory::vma::status;
use crate::restore::layers::Pages;

/// Numbers of objects that images of Torpor's old versions have, which are not files there.
const OLD: u64 = 1 << 40;

/// The object of shared anonymous memory that `inode` describes. The first task that
/// maps it makes it, so that the kernel names it as it did; the supervisor takes a
/// descriptor of it and fills it.
///
/// # Errors
/// The kernel's; the image files'.
pub(super) fn open(
    cx: &mut Restore<'_>,
    task: usize,
    vma: &VmaEntry,
    inode: &MemfdInodeEntry,
) -> Result<OwnedFd> {
    let huge = inode.hugetlb_flag.map_or(0, |flags| {
        libc::MAP_HUGETLB.cast_unsigned() | flags & 0x3f << libc::MAP_HUGE_SHIFT
    });
    let vma = VmaEntry { flags: vma.flags | huge, ..*vma };
    make(cx, task, &vma, (inode.shmid.into(), inode.inode_id), Some(inode.size))
}

/// As [`open`], of images that say with the mapping what there is to say.
///
/// # Errors
/// As [`open`].
pub(super) fn open_old(cx: &mut Restore<'_>, task: usize, vma: &VmaEntry) -> Result<OwnedFd> {
    make(cx, task, vma, (vma.shmid, vma.shmid | OLD), None)
}

fn make(
    cx: &mut Restore<'_>,
    task: usize,
    vma: &VmaEntry,
    (shmid, object): (u64, u64),
    size: Option<u64>,
) -> Result<OwnedFd> {
    if let Some(file) = cx.shared.get(&object) {
        return file.try_clone().context(|| "dup".to_owned());
    }
    let pages = Pages::load(&cx.images, kind::SHMEM_PAGEMAP, shmid)?;
    let size = size.unwrap_or_else(|| length(cx, vma)).max(pages.end());
    let husk = cx.remote(task)?;
    let keep =
        (libc::MAP_HUGETLB | libc::MAP_NORESERVE).cast_unsigned() | 0x3f << libc::MAP_HUGE_SHIFT;
    let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS).cast_unsigned() | vma.flags & keep;
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let at = husk.call(
        "mmap of shared memory",
        libc::SYS_mmap,
        [0, size, prot, u64::from(flags), u64::MAX, 0],
    )?;
    let name = format!("/proc/{}/map_files/{at:x}-{:x}", husk.pid(), at + size);
    let file =
        File::options().read(true).write(true).open(&name).context(|| format!("open {name}"))?;
    fill(&pages, &file, 0)?;
    cx.remote(task)?.call("munmap", libc::SYS_munmap, [at, size])?;
    let clone = file.try_clone().context(|| "dup".to_owned())?;
    cx.shared.insert(object, file.into());
    Ok(clone.into())
}

/// The length of the object of a mapping: what the images say, or else where the last of its
/// mappings ends.
fn length(cx: &Restore<'_>, vma: &VmaEntry) -> u64 {
    if let Some(len) = vma.torpor_object_len {
        return len;
    }
    let vmas = cx.tasks.iter().flat_map(|task| task.image.vmas());
    let same = vmas.filter(|v| v.shmid == vma.shmid && v.status & status::ANON_SHARED != 0);
    same.map(|v| v.pgoff.saturating_add(v.end - v.start)).max().unwrap_or(0)
}

/// Writes the pages of a shared object into its file, or into memory where it begins
/// at `base`.
///
/// # Errors
/// The kernel's; the image files'.
pub fn fill(pages: &Pages, file: &File, base: u64) -> Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    // The object is new: what it does not hold yet is zero.
    for stretch in pages.stretches().iter().filter(|stretch| !stretch.is_zero()) {
        let mut at = stretch.range.start;
        while at < stretch.range.end {
            let len = usize::try_from(stretch.range.end - at).unwrap_or(CHUNK).min(CHUNK);
            stretch.read(at, &mut buffer[..len])?;
            write_object(file, &buffer[..len], base + at)
                .context(|| "filling shared memory".to_owned())?;
            at += len as u64;
        }
    }
    Ok(())
}

fn write_object(file: &File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    match file.write_all_at(bytes, offset) {
        // hugetlbfs can only be written through a mapping.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            vm::write_mapped(file.as_fd(), offset, bytes)
        }
        done => done,
    }
}
