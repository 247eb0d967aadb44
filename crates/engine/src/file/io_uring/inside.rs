//! What the kernel holds of an instance and no call tells: it is read where it is.
//!
//! The tasks are stopped and nothing is in flight, so that nothing changes meanwhile. Where this program may
//! not read the kernel's memory, or the kernel does not say where in it something is, nothing is known.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use torpor_images::proto::TorporIoUringRestrictions;
use torpor_kernel::btf::{KernelTypes, Member};
use torpor_sys::io_uring;
use torpor_sys::kernel_memory::KernelMemory;

use crate::memory::frames;
use crate::memory::vma::PAGE;

/// A structure of the kernel, and which of its members is meant.
type MemberName = (&'static str, &'static [&'static str]);

/// The lowest bits of the address of a registered file say what the kernel knows about it (`FFS_MASK`).
const FILE_BITS: u64 = 3;
/// Lists of locks and leases.
const LOCKS: [MemberName; 3] = [
    ("file_lock_context", &["flc_flock"]),
    ("file_lock_context", &["flc_posix"]),
    ("file_lock_context", &["flc_lease"]),
];
/// What no restore can make, each with its name: other calls tell of it, but not of a restricted instance.
const UNRESTORABLE: [(MemberName, &str); 3] = [
    (
        ("io_ring_ctx", &["io_bl_xa", "xa_head"]),
        "buffers to choose from (IORING_REGISTER_PBUF_RING)",
    ),
    (("io_ring_ctx", &["personalities", "xa_head"]), "credentials (IORING_REGISTER_PERSONALITY)"),
    (
        ("io_ring_ctx", &["param_region", "nr_pages"]),
        "memory for its waits (IORING_REGISTER_MEM_REGION)",
    ),
];

/// The memory of the kernel, and where in it what is.
#[derive(Debug)]
pub(super) struct KernelView {
    memory: KernelMemory,
    types: KernelTypes,
    found: RefCell<HashMap<MemberName, Option<Member>>>,
}

/// What the kernel holds of a description that no task has a descriptor of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeldFile {
    /// Where its inode is.
    pub inode: u64,
    /// How it was opened.
    pub flags: u32,
    /// Its position.
    pub position: u64,
    /// How many have it: descriptors, mappings, instances.
    pub references: u64,
}

/// What the kernel holds of a ring of buffers in memory of a program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeldGroup {
    pub number: u32,
    pub entries: u32,
    /// Which one is the next.
    pub head: u32,
    /// Whether a request may take a part of one.
    pub parts: bool,
    /// The numbers of the page frames that it is in.
    pub frames: Vec<u64>,
}

impl KernelView {
    /// Looks whether this program may read the memory of a kernel that says what is in it.
    pub(super) fn open() -> Option<Self> {
        let memory = KernelMemory::open();
        if let Err(e) = &memory {
            tracing::debug!("the memory of the kernel is not to be read: {e}");
        }
        let (memory, types) = (memory.ok()?, KernelTypes::of_this_kernel()?);
        Some(KernelView { memory, types, found: RefCell::default() })
    }

    /// The word at an address.
    fn word(&self, at: u64) -> Option<u64> {
        self.memory.word(at).ok().map(u64::from_le_bytes)
    }

    /// Where a member of the structure at `base` is, and its length.
    fn place(&self, base: u64, name: MemberName) -> Option<(u64, u64)> {
        let mut found = self.found.borrow_mut();
        let member = found.entry(name).or_insert_with(|| self.types.member(name.0, name.1));
        let Member { offset, size } = (*member)?;
        Some((base.checked_add(offset)?, size))
    }

    /// The number that a member is, or the address in it; at most 8 bytes.
    fn number(&self, base: u64, name: MemberName) -> Option<u64> {
        let (at, size) = self.place(base, name).filter(|(_, size)| *size <= 8)?;
        let mut bytes = self.memory.word(at).ok()?;
        bytes[usize::try_from(size).ok()?..].fill(0);
        Some(u64::from_le_bytes(bytes))
    }

    /// Which bits are set in a member, in their order.
    fn bits(&self, base: u64, name: MemberName) -> Option<Vec<u32>> {
        let (at, size) = self.place(base, name)?;
        let mut set = Vec::new();
        for from in (0..size).step_by(8) {
            let word = self.word(at + from)?;
            let first = u32::try_from(from * 8).ok()?;
            set.extend((0..64).filter(|bit| word >> bit & 1 != 0).map(|bit| first + bit));
        }
        Some(set)
    }

    /// Where the description is that a descriptor of this process is open on.
    pub(super) fn description(&self, file: BorrowedFd<'_>) -> Option<u64> {
        let task = self.memory.current_task().ok()?;
        let files = self.number(task, ("task_struct", &["files"]))?;
        let table = self.number(files, ("files_struct", &["fdt"]))?;
        let all = self.number(table, ("fdtable", &["fd"]))?;
        let number = u64::try_from(file.as_raw_fd()).ok()?;
        self.word(all + number * 8)
    }

    /// Where the object is that is open as a descriptor of this process: an instance, or an eventfd.
    pub(super) fn object(&self, file: impl AsFd) -> Option<u64> {
        self.number(self.description(file.as_fd())?, ("file", &["private_data"]))
    }

    /// Where the inode is that a descriptor of this process is open on.
    pub(super) fn inode(&self, file: impl AsFd) -> Option<u64> {
        self.number(self.description(file.as_fd())?, ("file", &["f_inode"]))
    }

    /// Where the descriptions are that an instance has at places.
    pub(super) fn registered(&self, instance: u64, places: &[u32]) -> Option<Vec<u64>> {
        let nodes = self.number(instance, ("io_ring_ctx", &["file_table", "data", "nodes"]))?;
        let count = self.number(instance, ("io_ring_ctx", &["file_table", "data", "nr"]))?;
        let description = |&place: &u32| {
            let place = Some(u64::from(place)).filter(|place| *place < count)?;
            let node = self.word(nodes + place * 8)?;
            Some(self.number(node, ("io_rsrc_node", &["file_ptr"]))? & !FILE_BITS)
        };
        places.iter().map(description).collect()
    }

    /// What the kernel holds of a description of a regular file, if that is all: nobody is told of
    /// changes in it, and nobody has locked the file.
    pub(super) fn held(&self, description: u64) -> Option<HeldFile> {
        const REGULAR: u64 = libc::S_IFREG as u64;
        let inode = self.number(description, ("file", &["f_inode"]))?;
        let mode = self.number(inode, ("inode", &["i_mode"]))?;
        let owner = self.number(description, ("file", &["f_owner"]))?;
        if mode & u64::from(libc::S_IFMT) != REGULAR || owner != 0 || self.is_locked(inode)? {
            return None;
        }
        Some(HeldFile {
            inode,
            flags: u32::try_from(self.number(description, ("file", &["f_flags"]))?).ok()?,
            position: self.number(description, ("file", &["f_pos"]))?,
            references: self.references(description)?,
        })
    }

    /// How many have a description. Linux 6.13 and later count those after the first one.
    fn references(&self, description: u64) -> Option<u64> {
        match self.number(description, ("file", &["f_ref"])) {
            Some(others) => others.checked_add(1),
            None => self.number(description, ("file", &["f_count"])),
        }
    }

    /// Whether anybody has a lock or a lease on a file.
    fn is_locked(&self, inode: u64) -> Option<bool> {
        let locks = self.number(inode, ("inode", &["i_flctx"]))?;
        if locks == 0 {
            return Some(false);
        }
        for name in LOCKS {
            if self.has_some(locks, name)? {
                return Some(true);
            }
        }
        Some(false)
    }

    /// Where the eventfd is that an instance tells of answers, if there is one, and whether only of those
    /// that its workers give.
    pub(super) fn event(&self, instance: u64) -> Option<Option<(u64, bool)>> {
        let event = self.number(instance, ("io_ring_ctx", &["io_ev_fd"]))?;
        if event == 0 {
            return Some(None);
        }
        let object = self.number(event, ("io_ev_fd", &["cq_ev_fd"]))?;
        let later = self.number(event, ("io_ev_fd", &["eventfd_async"]))? != 0;
        Some(Some((object, later)))
    }

    /// How an instance was set up (`IORING_SETUP_*`).
    pub(super) fn setup(&self, instance: u64) -> Option<u32> {
        u32::try_from(self.number(instance, ("io_ring_ctx", &["flags"]))?).ok()
    }

    /// The first of what an instance has that no restore can make, if it has any.
    pub(super) fn unrestorable(&self, instance: u64) -> Option<Option<&'static str>> {
        for (name, what) in UNRESTORABLE {
            if self.number(instance, name)? != 0 {
                return Some(Some(what));
            }
        }
        Some(None)
    }

    /// The most workers of the kernel, for files and for all else, if an instance limits them.
    pub(super) fn workers(&self, instance: u64) -> Option<Vec<u32>> {
        let both = self.number(instance, ("io_ring_ctx", &["iowq_limits"]))?;
        let (files, others) =
            (u32::try_from(both & 0xffff_ffff).ok()?, u32::try_from(both >> 32).ok()?);
        Some(if both == 0 { Vec::new() } else { vec![files, others] })
    }

    /// The rings of buffers that requests of an instance choose from. `None` also if one is not in memory of the
    /// program, or if it has groups of another kind.
    pub(super) fn groups(&self, instance: u64) -> Option<Vec<HeldGroup>> {
        // Older kernels keep some groups elsewhere (`io_bl`), and have no such member.
        self.place(instance, ("io_buffer_list", &["region", "nr_pages"]))?;
        let lists = self.lists(instance)?;
        if lists.is_empty() {
            return Some(Vec::new());
        }
        let first = self.first_frame()?;
        lists.into_iter().map(|list| self.group(list, first)).collect()
    }

    /// Where the lists of buffers of an instance are.
    fn lists(&self, instance: u64) -> Option<Vec<u64>> {
        /// How many levels an array of 65,536 places has at most, and more.
        const LEVELS: usize = 6;
        let head = self.number(instance, ("io_ring_ctx", &["io_bl_xa", "xa_head"]))?;
        let mut lists = Vec::new();
        self.elements(head, LEVELS, &mut lists)?;
        Some(lists)
    }

    /// What a part of an array (`struct xarray`) has, in the order of its places.
    fn elements(&self, part: u64, levels: usize, all: &mut Vec<u64>) -> Option<()> {
        /// The lowest bits say that it is no pointer but a node (`xa_is_node`), which no small number is.
        const NODE: u64 = 2;
        match part & 3 {
            0 if part == 0 => {}
            0 => all.push(part),
            NODE if part > 4096 => {
                let (slots, size) = self.place(part - NODE, ("xa_node", &["slots"]))?;
                for at in (slots..slots.checked_add(size)?).step_by(8) {
                    self.elements(self.word(at)?, levels.checked_sub(1)?, all)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The ring that a list of buffers is, if it is one in memory of a program. `first` is where frames are described.
    fn group(&self, list: u64, first: u64) -> Option<HeldGroup> {
        /// `IOBL_BUF_RING` and `IOBL_INC`; `IO_REGION_F_USER_PROVIDED`; and no ring has more pages.
        const RING: u64 = 1;
        const PARTS: u64 = 2;
        const OF_PROGRAM: u64 = 2;
        const PAGES: u64 = 128;
        let of = |name| self.number(list, ("io_buffer_list", name));
        let small = |name| u32::try_from(of(name)?).ok();
        let flags = of(&["flags"])?;
        // Of later kernels: how much of a buffer must be left for it to be taken again.
        let least = of(&["min_left_sub_one"]).unwrap_or_default();
        let count = of(&["region", "nr_pages"])?;
        let is_known = flags & RING != 0 && flags & !(RING | PARTS) == 0 && least == 0;
        if !is_known || of(&["region", "flags"])? & OF_PROGRAM == 0 || count > PAGES {
            return None;
        }
        let pages = of(&["region", "pages"])?;
        let frame = |page: u64| self.frame(self.word(pages + page * 8)?, first);
        Some(HeldGroup {
            number: small(&["bgid"])?,
            entries: small(&["nr_entries"])?,
            head: small(&["head"])?,
            parts: flags & PARTS != 0,
            frames: (0..count).map(frame).collect::<Option<_>>()?,
        })
    }

    /// The size of what describes a page frame (`struct page`).
    fn size_of_frame(&self) -> Option<u64> {
        Some(self.types.member("page", &[])?.size)
    }

    /// The number of the frame that is described at a place.
    fn frame(&self, described: u64, first: u64) -> Option<u64> {
        let (at, size) = (described.checked_sub(first)?, self.size_of_frame()?);
        at.is_multiple_of(size).then(|| at / size)
    }

    /// Where the first frame would be described: the kernel describes all in a row, and of a page that this program
    /// has it is known which one it is.
    fn first_frame(&self) -> Option<u64> {
        let known = KnownPage::keep()?;
        let list = *self.lists(self.object(&known.instance)?)?.first()?;
        let described = self.word(self.number(list, ("io_buffer_list", &["region", "pages"]))?)?;
        described.checked_sub(known.frame.checked_mul(self.size_of_frame()?)?)
    }

    /// Whether a timeout of an instance waits for its time.
    pub(super) fn has_timeouts(&self, instance: u64) -> Option<bool> {
        self.has_some(instance, ("io_ring_ctx", &["timeout_list"]))
    }

    /// Whether there is anything in a list: one that is empty leads to itself.
    fn has_some(&self, object: u64, name: MemberName) -> Option<bool> {
        let (list, _) = self.place(object, name)?;
        Some(self.word(list)? != list)
    }

    /// Whether credentials are registered with an instance.
    pub(super) fn has_credentials(&self, instance: u64) -> Option<bool> {
        Some(self.number(instance, ("io_ring_ctx", &["personalities", "xa_head"]))? != 0)
    }

    /// Whether an instance is restricted.
    pub(super) fn is_restricted(&self, instance: u64) -> Option<bool> {
        Some(self.number(instance, ("io_ring_ctx", &["restrictions", "registered"]))? != 0)
    }

    /// What an instance is restricted to, if it is and this kernel keeps that as is known.
    pub(super) fn restrictions(&self, instance: u64) -> Option<TorporIoUringRestrictions> {
        self.is_restricted(instance)?.then_some(())?;
        let flags = |name| u32::try_from(self.number(instance, name)?).ok();
        Some(TorporIoUringRestrictions {
            registers: self.bits(instance, ("io_ring_ctx", &["restrictions", "register_op"]))?,
            requests: self.bits(instance, ("io_ring_ctx", &["restrictions", "sqe_op"]))?,
            flags_allowed: flags(("io_ring_ctx", &["restrictions", "sqe_flags_allowed"]))?,
            flags_required: flags(("io_ring_ctx", &["restrictions", "sqe_flags_required"]))?,
        })
    }
}

/// A page of this process that an instance of its own keeps where it is, and its frame.
struct KnownPage {
    instance: OwnedFd,
    frame: u64,
    _page: Box<AlignedPage>,
}

/// A page of memory.
#[repr(align(4096))]
struct AlignedPage([u8; 4096]);

impl KnownPage {
    fn keep() -> Option<Self> {
        let page = Box::new(AlignedPage([1; 4096]));
        let instance = io_uring::instance().ok()?;
        io_uring::keep_page(instance.as_fd(), &page.0).ok()?;
        let at = page.0.as_ptr().addr() as u64;
        let pagemap = File::open("/proc/self/pagemap").ok()?;
        let frame = frames::entries(&pagemap, &(at..at + PAGE)).ok()?.first()?.frame()?;
        Some(KnownPage { instance, frame, _page: page })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom};

    use super::*;

    #[test]
    fn the_kernel_holds_what_calls_tell() {
        let Some(view) = KernelView::open() else {
            println!("left out: the_kernel_holds_what_calls_tell (its memory is not to be read)");
            return;
        };
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        file.seek(SeekFrom::Start(7)).unwrap();
        let same = file.try_clone().unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        let of = |file: &std::fs::File| view.description(file.as_fd()).unwrap();
        assert_eq!(of(&file), of(&same));
        assert_ne!(of(&file), of(&other));
        let held = view.held(of(&file)).unwrap();
        assert_eq!((held.inode, held.position), (view.inode(&same).unwrap(), 7));
        assert_eq!(held.references, 2);
        assert_eq!(held.flags & libc::O_ACCMODE.cast_unsigned(), libc::O_RDWR.cast_unsigned());
        let known = KnownPage::keep().unwrap();
        let of_known = view.object(&known.instance).unwrap();
        let (number, entries, frames) = (0, 256, vec![known.frame]);
        let group = HeldGroup { number, entries, head: 0, parts: false, frames };
        assert_eq!(view.groups(of_known), Some(vec![group]));
        // No regular file.
        assert_eq!(view.held(of(&other)), None);
        file.lock().unwrap();
        assert_eq!(view.held(of(&file)), None);
        file.unlock().unwrap();
        assert!(view.held(of(&file)).is_some());
    }
}
