//! The mappings of a task: what there is, and how it is told in the images.

use torpor_images::proto::VmaEntry;
use torpor_policy::memory::MemoryArea;
pub(crate) use torpor_policy::memory::status;
use torpor_tracee::{Mapping, parse_maps};

use crate::error::{Error, Result};
use crate::proc;

/// Page size of x86-64.
pub(crate) const PAGE: u64 = 4096;

/// A mapping of a dumped task.
#[derive(Debug, Clone)]
pub struct Vma {
    /// Its line in `/proc/PID/maps`.
    pub map: Mapping,
    /// The two-letter codes of `VmFlags` (proc(5)), e.g. `dc`.
    pub flags: Vec<[u8; 2]>,
    /// Bits of [`status`].
    pub status: u32,
    /// Page size: 4096, or that of its hugetlb pages.
    pub page_size: u64,
    /// Whether it has no pages but the zero page, neither in memory nor in swap, if that is known.
    pub is_empty: Option<bool>,
    /// Its protection key (pkeys(7)), if it has one.
    pub key: Option<u32>,
    /// Whether it has pages that the kernel may drop at any moment (`MADV_FREE`).
    pub freed_lazily: bool,
}

impl Vma {
    /// Whether `VmFlags` has `code`.
    pub fn has(&self, code: &[u8; 2]) -> bool {
        self.flags.contains(code)
    }

    /// Whether its pages are in the task's own pagemap.
    pub fn is_private(&self) -> bool {
        !self.map.shared
    }

    /// Whether `status` has a bit.
    pub fn is(&self, bit: u32) -> bool {
        self.status & bit != 0
    }

    /// Whether it maps a file, be it one of the kernel's own.
    pub(crate) fn has_file(&self) -> bool {
        self.map.inode != 0 || self.map.dev != 0
    }

    /// Its name in `/proc/PID/map_files`.
    pub(crate) fn map_files_name(&self) -> String {
        format!("map_files/{:x}-{:x}", self.map.start, self.map.end)
    }
}

/// Reads the mappings of a task. `pid` is stopped.
///
/// # Errors
/// Refused, by name, if a mapping cannot be kept; if the task has ended.
pub(crate) fn read(pid: i32) -> Result<Vec<Vma>> {
    parse(pid, &proc::read(pid, "smaps")?)
}

/// As [`read`], but without flags and page sizes, for which the kernel looks at every
/// page.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_quickly(pid: i32) -> Result<Vec<Vma>> {
    parse(pid, &proc::read(pid, "maps")?)
}

/// The lines of smaps that say how much of a mapping is there.
const THERE: [&str; 4] = ["Rss:", "Swap:", "Shared_Hugetlb:", "Private_Hugetlb:"];

fn kib(text: &str) -> Option<u64> {
    text.trim().trim_end_matches("kB").trim().parse().ok()
}

/// As [`read`], of a text that somebody has read.
///
/// # Errors
/// As [`read`].
pub(super) fn parse(pid: i32, smaps: &str) -> Result<Vec<Vma>> {
    let mut all: Vec<Vma> = Vec::new();
    for line in smaps.lines() {
        if let Some(codes) = line.strip_prefix("VmFlags:") {
            if let Some(vma) = all.last_mut() {
                vma.flags = codes
                    .split_ascii_whitespace()
                    .filter_map(|c| c.as_bytes().try_into().ok())
                    .collect();
            }
        } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
            if let Some(vma) = all.last_mut() {
                vma.page_size = kib(size).unwrap_or(4) * 1024;
            }
        } else if let Some(key) = line.strip_prefix("ProtectionKey:") {
            if let Some(vma) = all.last_mut() {
                vma.key = key.trim().parse().ok().filter(|&key| key != 0);
            }
        } else if let Some(freed) = line.strip_prefix("LazyFree:") {
            if let Some(vma) = all.last_mut() {
                vma.freed_lazily = kib(freed) != Some(0);
            }
        } else if let Some(there) = THERE.iter().find_map(|name| line.strip_prefix(name)) {
            if let Some(vma) = all.last_mut() {
                vma.is_empty = Some(vma.is_empty != Some(false) && kib(there) == Some(0));
            }
        } else if line.as_bytes().first().is_some_and(|c| !c.is_ascii_uppercase()) {
            let map = parse_maps(line).pop().ok_or_else(|| {
                Error::invalid(format!("/proc/{pid}/smaps"), format!("unknown line {line:?}"))
            })?;
            all.push(Vma {
                map,
                flags: Vec::new(),
                status: 0,
                page_size: PAGE,
                is_empty: None,
                key: None,
                freed_lazily: false,
            });
        }
    }
    for vma in &mut all {
        vma.status = classify(pid, vma)?;
    }
    Ok(all)
}

fn refuse(pid: i32, vma: &Vma, reason: &str) -> Error {
    let name = if vma.map.name.is_empty() { "anonymous" } else { &vma.map.name };
    Error::refused(pid, format!("mapping {:x}-{:x} ({name})", vma.map.start, vma.map.end), reason)
}

fn classify(pid: i32, vma: &Vma) -> Result<u32> {
    use status::*;
    match vma.map.name.as_str() {
        "[vsyscall]" => return Ok(VSYSCALL | ANON_PRIVATE),
        "[vdso]" => return Ok(REGULAR | VDSO | ANON_PRIVATE),
        n if n.starts_with("[vvar") => return Ok(REGULAR | VVAR | ANON_PRIVATE),
        "[uprobes]" => {
            return Err(refuse(pid, vma, "it is being probed; remove its uprobes first"));
        }
        _ => {}
    }
    // The kernel takes a key of its own for it, whose number is nobody's to choose.
    if vma.key.is_some() && vma.map.prot == libc::PROT_EXEC {
        return Err(refuse(pid, vma, "memory that can be executed and not read is not supported"));
    }
    if vma.has(b"ss") {
        return Err(refuse(pid, vma, "shadow stacks are not supported"));
    }
    let name = vma.map.name.strip_suffix(" (deleted)").unwrap_or(&vma.map.name);
    if name == "/secretmem" {
        return Err(refuse(
            pid,
            vma,
            "memfd_secret memory is hidden from the kernel itself, so nobody but the program can \
             read it; let the program use memory that is locked (mlock) instead",
        ));
    }
    if name.starts_with("anon_inode:[io_uring]") || name.starts_with("anon_inode:io_uring") {
        return Ok(REGULAR | IO_URING);
    }
    let of_file = vma.map.inode != 0 || vma.map.dev != 0;
    if name == "/[aio]" {
        return Ok(REGULAR | AIO_RING);
    }
    if name.starts_with("socket:[") {
        return Ok(REGULAR | SOCKET);
    }
    if (vma.has(b"io") || vma.has(b"pf")) && !name.starts_with("/dev/zero") {
        return Err(refuse(pid, vma, "it maps a device"));
    }
    let mut bits = REGULAR;
    bits |= match name {
        "[heap]" => HEAP,
        n if n.starts_with("[stack") => STACK,
        _ => 0,
    };
    bits |= if name.starts_with("/SYSV") && vma.map.shared {
        SYSVIPC | ANON_SHARED
    } else if name.starts_with("/memfd:") {
        MEMFD | if vma.map.shared { FILE_SHARED } else { FILE_PRIVATE }
    } else if is_anonymous_file(name, vma.map.shared) {
        if vma.map.shared { ANON_SHARED } else { ANON_PRIVATE }
    } else if of_file {
        if vma.map.shared { FILE_SHARED } else { FILE_PRIVATE }
    } else if vma.map.shared {
        return Err(refuse(pid, vma, "shared memory without a file behind it"));
    } else {
        ANON_PRIVATE
    };
    Ok(bits)
}

/// Mappings that the kernel backs with a file of its own although the program
/// asked for anonymous memory.
fn is_anonymous_file(name: &str, shared: bool) -> bool {
    let shared_zero = shared && name == "/dev/zero";
    shared_zero || name == "/anon_hugepage" || name.starts_with("[anon_shmem:")
}

/// `VmFlags` codes and the advice (madvise(2)) that sets them.
const ADVICE: [(&[u8; 2], u32); 8] = [
    (b"rr", libc::MADV_RANDOM as u32),
    (b"sr", libc::MADV_SEQUENTIAL as u32),
    (b"dc", libc::MADV_DONTFORK as u32),
    (b"dd", libc::MADV_DONTDUMP as u32),
    (b"mg", libc::MADV_MERGEABLE as u32),
    (b"hg", libc::MADV_HUGEPAGE as u32),
    (b"nh", libc::MADV_NOHUGEPAGE as u32),
    (b"wf", libc::MADV_WIPEONFORK as u32),
];

/// The other codes of `VmFlags`, up to Linux 6.19, by what becomes of them. One that is in neither list may be of
/// something that is not kept.
const OTHERS: [&[[u8; 2]]; 8] = [
    // Kept: what the line of the mapping says as well.
    &[*b"rd", *b"wr", *b"ex", *b"sh"],
    // What it may be made to allow, and to share, follows from its file and how that was opened.
    &[*b"mr", *b"mw", *b"me", *b"ms"],
    // Kept: see `to_entry`.
    &[*b"gd", *b"lo", *b"lf", *b"nr", *b"ht", *b"ac", *b"dp", *b"sl"],
    // Kept with the pages: some may be guard pages.
    &[*b"gu"],
    // Kept with the userfaultfd that has registered it.
    &[*b"um", *b"uw", *b"ui"],
    // Refused (see `classify`), or the kernel's and a driver's own, made again with the mapping.
    &[*b"ss", *b"io", *b"pf", *b"de", *b"mm"],
    // Nothing that the program has asked for: written since somebody looked, how its file is written.
    &[*b"sd", *b"sf", *b"dw"],
    // Other processors have these, or kernels that are too old.
    &[*b"ar", *b"bt", *b"mt", *b"mp", *b"nl"],
];

/// The codes of a mapping's `VmFlags` that nobody here knows.
pub(crate) fn unknown_flags(vma: &Vma) -> impl Iterator<Item = [u8; 2]> {
    let is_known = |code: &[u8; 2]| {
        OTHERS.iter().any(|known| known.contains(code))
            || ADVICE.iter().any(|(known, _)| *known == code)
            // A lock on fault: see `to_entry`.
            || code == b"??" && vma.has(b"lo")
    };
    vma.flags.iter().copied().filter(move |code| !is_known(code))
}

/// `MAP_DROPPABLE` (linux/mman.h, Linux 6.11).
pub(crate) const MAP_DROPPABLE: u32 = libc::MAP_DROPPABLE.cast_unsigned();

/// What a restore will take a mapping for, but for the number of its file or object.
///
/// # Errors
/// A bug of Torpor's: a mapping that is described as no reader takes it.
pub(crate) fn as_restored(vma: &Vma) -> Result<MemoryArea> {
    MemoryArea::of(&to_entry(vma)).map_err(Error::Bug)
}

/// Describes a mapping for the images; `shmid` and `fd` are filled by the caller.
pub(crate) fn to_entry(vma: &Vma) -> VmaEntry {
    let bit = |yes: bool, flag: i32| if yes { flag.cast_unsigned() } else { 0 };
    // What is in a ring is its task's alone, although the kernel shows a shared file: CRIU maps
    // what the flags say before it makes the ring, and would take shared memory.
    let ring = vma.is(status::AIO_RING);
    let shared = vma.map.shared && !ring;
    let mut flags = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }.cast_unsigned();
    let anonymous = vma.status & (status::ANON_PRIVATE | status::ANON_SHARED) != 0;
    let anonymous = anonymous && !vma.is(status::MEMFD) || ring;
    flags |= bit(anonymous, libc::MAP_ANONYMOUS);
    flags |= bit(vma.has(b"gd"), libc::MAP_GROWSDOWN);
    flags |= bit(vma.has(b"lo"), libc::MAP_LOCKED);
    // Locked on fault: the images have no place for it, and mmap(2) ignores this flag there.
    // Kernels that have no code for it, before 6.13 or so, show what they have for any such flag.
    let on_fault = vma.has(b"lf") || vma.has(b"lo") && vma.has(b"??");
    flags |= bit(on_fault, libc::MAP_NONBLOCK);
    flags |= bit(vma.has(b"nr"), libc::MAP_NORESERVE);
    if vma.has(b"ht") {
        // The page size goes in as its logarithm (mmap(2), MAP_HUGE_SHIFT).
        flags |= libc::MAP_HUGETLB.cast_unsigned() | vma.page_size.ilog2() << libc::MAP_HUGE_SHIFT;
    }
    if vma.has(b"dp") {
        flags = flags & !libc::MAP_PRIVATE.cast_unsigned() | MAP_DROPPABLE;
    }
    // `ac`: it counts as memory of the task, for ever.
    let was_writable = !shared && !vma.has(b"wr") && vma.has(b"ac");
    let madv = ADVICE.iter().filter(|(code, _)| vma.has(code)).map(|&(_, a)| 1u64 << a).sum();
    VmaEntry {
        start: vma.map.start,
        end: vma.map.end,
        pgoff: vma.map.offset,
        shmid: 0,
        prot: vma.map.prot.cast_unsigned(),
        flags,
        // CRIU has no stack that is known as such.
        status: vma.status & !status::STACK,
        fd: -1,
        madv: (madv != 0).then_some(madv),
        fdflags: None,
        torpor_flock: None,
        torpor_object_len: None,
        torpor_was_writable: was_writable.then_some(true),
        torpor_pkey: vma.key,
        torpor_sealed: vma.has(b"sl").then_some(true),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn reads_this_process() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let vmas = read(pid).unwrap();
        let stack = vmas.iter().find(|v| v.is(status::STACK)).unwrap();
        assert!(
            stack.has(b"gd") && to_entry(stack).flags & libc::MAP_GROWSDOWN.cast_unsigned() != 0
        );
        assert!(vmas.iter().any(|v| v.is(status::VDSO)));
        assert!(vmas.iter().any(|v| v.is(status::FILE_PRIVATE)));
    }

    #[test]
    fn flags_that_nobody_knows_are_found() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = read(pid).unwrap();
        assert!(own.iter().all(|vma| unknown_flags(vma).next().is_none()), "{own:?}");
        let unknown = |flags: &str| {
            let text = format!("7f00000000-7f00001000 rw-p 00000000 00:00 0 \nVmFlags: {flags}\n");
            unknown_flags(&parse(7, &text).unwrap()[0]).collect::<Vec<_>>()
        };
        assert_eq!(unknown("rd wr mr mw me lo ??"), Vec::<[u8; 2]>::new());
        assert_eq!(unknown("rd wr ?? zz sl dc"), [*b"??", *b"zz"]);
    }

    #[test]
    fn what_is_sealed_is_noted() {
        let text = "7f00000000-7f00001000 rw-p 00000000 00:00 0 \nVmFlags: rd wr sl\n";
        assert_eq!(to_entry(&parse(7, text).unwrap()[0]).torpor_sealed, Some(true));
        let text = text.replace(" sl", "");
        assert_eq!(to_entry(&parse(7, &text).unwrap()[0]).torpor_sealed, None);
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        let text =
            "7f00000000-7f00001000 rw-s 00000000 00:01 1 /secretmem (deleted)\nVmFlags: rd wr sh\n";
        let text = parse(7, text).unwrap_err().to_string();
        assert!(text.contains("task 7") && text.contains("memfd_secret"), "{text}");
        let with = |prot: &str, key: u32| {
            let text = format!("7f00000000-7f00001000 {prot} 00000000 00:00 0 \n");
            let all = parse(7, &format!("{text}ProtectionKey: {key:>9}\nVmFlags: rd wr\n"));
            all.map(|all| to_entry(&all[0]).torpor_pkey)
        };
        assert_eq!([with("rw-p", 0).unwrap(), with("rw-p", 3).unwrap()], [None, Some(3)]);
        assert!(with("--xp", 3).unwrap_err().to_string().contains("executed and not read"));
    }
}
