//! Entries of memory, as they are read.
#![allow(clippy::unwrap_used)]

use torpor_images::proto::{AioRingEntry, TorporMemoryName, VmaEntry};

use super::*;
use crate::file_lock::LockMode;

const START: u64 = 0x10_0000;
const LOCKED: u32 = libc::MAP_LOCKED.cast_unsigned();
const ON_FAULT: u32 = libc::MAP_NONBLOCK.cast_unsigned();
const NO_RESERVE: u32 = libc::MAP_NORESERVE.cast_unsigned();
const HUGE: u32 = libc::MAP_HUGETLB.cast_unsigned();

/// Private memory of one page.
fn plain() -> VmaEntry {
    VmaEntry {
        start: START,
        end: START + PAGE,
        prot: 3,
        flags: 0x22,
        status: status::REGULAR | status::ANON_PRIVATE,
        fd: -1,
        ..VmaEntry::default()
    }
}

fn area(change: impl FnOnce(&mut VmaEntry)) -> MemoryArea {
    let mut entry = plain();
    change(&mut entry);
    MemoryArea::of(&entry).unwrap()
}

/// Why an entry is refused, without its addresses.
fn refusal(change: impl FnOnce(&mut VmaEntry)) -> String {
    let mut entry = plain();
    change(&mut entry);
    let why = MemoryArea::of(&entry).unwrap_err();
    why.splitn(3, ' ').last().unwrap().to_owned()
}

fn memory(change: impl FnOnce(&mut MmEntry)) -> Result<ProcessMemory, String> {
    let mut entry = MmEntry { vmas: vec![plain()], ..MmEntry::default() };
    change(&mut entry);
    ProcessMemory::of(entry)
}

#[test]
fn each_kind_is_read_from_the_bits_that_dumps_give() {
    use status::*;
    let kind = |status: u32, flags: u32| {
        let entry = VmaEntry { shmid: 7, status, flags, ..plain() };
        MemoryArea::of(&entry).map(|area| (area.kind, area.form.sharing))
    };
    let (own, shared) = (Sharing::Private, Sharing::Shared);
    for (status, flags, wanted) in [
        (VSYSCALL | ANON_PRIVATE, 0x22, (AreaKind::Vsyscall, own)),
        (REGULAR | VDSO | ANON_PRIVATE, 0x22, (AreaKind::Vdso, own)),
        (REGULAR | VVAR | ANON_PRIVATE, 0x22, (AreaKind::Vvar, own)),
        (REGULAR | ANON_PRIVATE, 0x22, (AreaKind::Anonymous, own)),
        (REGULAR | ANON_PRIVATE, 0x28, (AreaKind::Anonymous, Sharing::Droppable)),
        (REGULAR | HEAP | ANON_PRIVATE, 0x22, (AreaKind::Anonymous, own)),
        (REGULAR | STACK | USERFAULTFD | ANON_PRIVATE, 0x122, (AreaKind::Anonymous, own)),
        (REGULAR | FILE_PRIVATE, 2, (AreaKind::File(7), own)),
        (REGULAR | FILE_SHARED, 1, (AreaKind::File(7), shared)),
        (REGULAR | MEMFD | FILE_PRIVATE, 2, (AreaKind::MemoryFile(7), own)),
        (REGULAR | MEMFD | FILE_SHARED, 1, (AreaKind::MemoryFile(7), shared)),
        (REGULAR | MEMFD | ANON_SHARED, 1, (AreaKind::MemoryFile(7), shared)),
        (REGULAR | ANON_SHARED, 0x21, (AreaKind::SharedObject(7), shared)),
        (REGULAR | SYSVIPC | ANON_SHARED, 0x21, (AreaKind::Segment(7), shared)),
        (REGULAR | SOCKET, 1, (AreaKind::PacketRing(7), shared)),
        (REGULAR | IO_URING, 1, (AreaKind::IoUring(7), shared)),
        (REGULAR | AIO_RING, 0x22, (AreaKind::AioRing, own)),
        (REGULAR | AIO_RING | ANON_PRIVATE, 0x21, (AreaKind::AioRing, shared)),
    ] {
        assert_eq!(kind(status, flags), Ok(wanted), "{status:#x} {flags:#x}");
    }
    for (status, flags) in [
        // Two kinds, none, and one that is another CRIU's: a shadow stack.
        (REGULAR | FILE_PRIVATE | ANON_PRIVATE, 2),
        (REGULAR | FILE_SHARED | SYSVIPC, 1),
        (REGULAR | MEMFD | SOCKET, 1),
        (REGULAR | VDSO | VVAR, 2),
        (REGULAR, 2),
        (0, 2),
        (REGULAR | 1 << 4 | ANON_PRIVATE, 2),
        (REGULAR | 1 << 26 | ANON_PRIVATE, 2),
        // Another sharing than the kind has, or none.
        (REGULAR | FILE_PRIVATE, 1),
        (REGULAR | FILE_SHARED, 2),
        (REGULAR | FILE_PRIVATE, 8),
        (REGULAR | ANON_PRIVATE, 1),
        (REGULAR | ANON_SHARED, 2),
        (REGULAR | SYSVIPC, 2),
        (REGULAR | ANON_PRIVATE, 0),
        (REGULAR | ANON_PRIVATE, 3),
        (REGULAR | FILE_PRIVATE, 0xa),
        (REGULAR | ANON_SHARED, 9),
    ] {
        assert!(kind(status, flags).is_err(), "{status:#x} {flags:#x}");
    }
    assert!(!area(|vma| (vma.status, vma.flags) = (REGULAR | AIO_RING, 0x22)).is_private());
    for flags in [8, 0xa] {
        let dropped = area(|vma| vma.flags = flags);
        assert!(dropped.is_private() && dropped.form.sharing == Sharing::Droppable, "{flags}");
    }
}

#[test]
fn numbers_are_those_of_files_segments_or_objects() {
    use status::*;
    let large = |status, flags| {
        let entry = VmaEntry { shmid: 1 << 32, status: REGULAR | status, flags, ..plain() };
        MemoryArea::of(&entry).map(|area| area.kind)
    };
    for (status, flags) in
        [(FILE_PRIVATE, 2), (MEMFD | FILE_SHARED, 1), (SYSVIPC, 1), (SOCKET, 1), (IO_URING, 1)]
    {
        assert!(large(status, flags).unwrap_err().ends_with("4294967296, which is out of range"));
    }
    assert_eq!(large(ANON_SHARED, 1), Ok(AreaKind::SharedObject(1 << 32)));
    assert_eq!([AreaKind::File(3).file(), AreaKind::IoUring(4).file()], [Some(3), Some(4)]);
    assert_eq!([AreaKind::Segment(3).file(), AreaKind::SharedObject(4).file()], [None; 2]);
}

#[test]
fn only_mappings_of_files_open_one() {
    use status::*;
    let opens = |status, flags, fdflags| {
        let entry = VmaEntry { shmid: 7, status: REGULAR | status, flags, fdflags, ..plain() };
        MemoryArea::of(&entry).unwrap().opens()
    };
    assert_eq!(opens(FILE_PRIVATE, 2, Some(2)), Some((7, 2)));
    assert_eq!(opens(FILE_SHARED, 1, Some(2)), Some((7, 2)));
    assert_eq!(opens(FILE_SHARED, 1, None), None);
    for (status, flags) in
        [(ANON_PRIVATE, 2), (SYSVIPC, 1), (MEMFD | FILE_PRIVATE, 2), (SOCKET, 1), (IO_URING, 1)]
    {
        assert_eq!(opens(status, flags, Some(2)), None, "{status:#x}");
    }
}

#[test]
fn what_else_a_mapping_has() {
    let locked = |flags: u32| area(|vma| vma.flags |= flags).locked;
    assert_eq!(locked(LOCKED), Some(MemoryLock::All));
    assert_eq!(locked(LOCKED | ON_FAULT), Some(MemoryLock::OnFault));
    assert_eq!([locked(0), locked(ON_FAULT)], [None; 2]);
    let form = |flags: u32| area(|vma| vma.flags |= flags).form;
    assert_eq!(form(HUGE | 21 << 26).huge, Some(21));
    assert_eq!([form(HUGE).huge, form(NO_RESERVE).huge], [Some(0), None]);
    assert!(form(NO_RESERVE).no_reserve && form(0x100).grows_down && !form(0).grows_down);
    let advice = area(|vma| vma.madv = Some(1 << 18 | 1 << 1)).advice;
    assert!(advice.wipes_on_fork() && advice.each().eq([1, 18]));
    let all = area(|vma| {
        vma.torpor_pkey = Some(15);
        vma.torpor_flock = Some(1);
        vma.torpor_sealed = Some(true);
        vma.torpor_was_writable = Some(true);
        vma.status |= status::HEAP | status::USERFAULTFD | status::PINNED;
    });
    assert_eq!((all.key, all.flock), (Some(15), Some(LockMode::Write)));
    assert!(all.sealed && all.was_writable && all.heap && all.watched && all.pinned);
}

#[test]
fn what_there_cannot_be_is_refused_by_its_addresses() {
    let why = MemoryArea::of(&VmaEntry { prot: 8, ..plain() }).unwrap_err();
    assert_eq!(why, "mapping 100000-101000 has the protection 0x8, which there is not");
    let impossible = "is impossible here";
    assert_eq!(refusal(|vma| vma.end = START), impossible);
    assert_eq!(refusal(|vma| vma.end += 1), impossible);
    assert_eq!(refusal(|vma| vma.pgoff = 1), impossible);
    assert_eq!(refusal(|vma| vma.pgoff = !(PAGE - 1)), impossible);
    let high = |vma: &mut VmaEntry| (vma.start, vma.end) = (1 << 56, (1 << 56) + PAGE);
    assert_eq!(refusal(high), impossible);
    let vsyscall = area(|vma| {
        high(vma);
        vma.status = status::VSYSCALL;
    });
    assert_eq!(vsyscall.kind, AreaKind::Vsyscall);
    // MADV_REMOVE punches holes into files, and MADV_DONTNEED drops memory.
    assert!(refusal(|vma| vma.madv = Some(1 << 9)).contains("advice"));
    assert!(refusal(|vma| vma.madv = Some(1 << 4 | 1 << 18)).contains("bits 0x10"));
    assert!(refusal(|vma| vma.flags |= 0x10).contains("flags that no dump gives (bits 0x10)"));
    assert!(refusal(|vma| vma.flags |= 21 << 26).contains("flags that no dump gives"));
    assert!(refusal(|vma| vma.torpor_pkey = Some(0)).contains("protection key 0"));
    assert!(refusal(|vma| vma.torpor_pkey = Some(16)).contains("protection key 16"));
    assert!(refusal(|vma| vma.torpor_flock = Some(2)).contains("a lock of type 2"));
}

#[test]
fn mappings_are_in_order_and_guard_pages_in_them() {
    let next = VmaEntry { start: START + PAGE, end: START + 2 * PAGE, ..plain() };
    let guard = |start: u64, end: u64| VmaEntry {
        start: START + start,
        end: START + end,
        status: status::GUARD,
        ..VmaEntry::default()
    };
    let of = |vmas: Vec<VmaEntry>| memory(|mm| mm.vmas = vmas);
    let both = of(vec![plain(), next, guard(0, 2 * PAGE)]).unwrap();
    assert_eq!(
        (both.areas.len(), &both.guards[..]),
        (2, std::slice::from_ref(&(START..START + 2 * PAGE)))
    );
    for vmas in [vec![next, plain()], vec![plain(), plain()]] {
        assert!(of(vmas).unwrap_err().contains("is impossible here"));
    }
    for (start, end) in [(0, 2 * PAGE), (PAGE, 2 * PAGE), (0, 0), (0, PAGE / 2), (PAGE, 0)] {
        let why = of(vec![plain(), guard(start, end)]).unwrap_err();
        assert!(why.ends_with("are in no mapping"), "{start} {end}: {why}");
    }
    // Two mappings with a hole between them are none for what lies across.
    let far = VmaEntry { start: START + 2 * PAGE, end: START + 3 * PAGE, ..plain() };
    assert!(of(vec![plain(), far, guard(0, 3 * PAGE)]).is_err());
}

#[test]
fn contexts_have_rings_of_their_own() {
    let ring = VmaEntry { status: status::REGULAR | status::AIO_RING, ..plain() };
    let entry = |id, ring_len| AioRingEntry { id, nr_req: 9, ring_len };
    let of = |aios: &[AioRingEntry]| {
        memory(|mm| (mm.vmas, mm.aios) = (vec![ring], aios.to_vec())).map(|mm| mm.contexts)
    };
    let fits = entry(START, 4096);
    assert_eq!(of(&[fits]), Ok(vec![AioContext { start: START, requests: 9 }]));
    assert_eq!(of(&[]), Ok(vec![]));
    for aios in [&[entry(START, 8192)][..], &[entry(START + PAGE, 4096)], &[fits, fits]] {
        assert!(of(aios).unwrap_err().contains("has no ring of its own"), "{aios:?}");
    }
    assert!(memory(|mm| mm.aios = vec![fits]).is_err());
}

#[test]
fn names_keys_and_vectors_have_limits() {
    let named = |start, end, len| {
        let name = TorporMemoryName { start, end, name: "x".repeat(len) };
        memory(|mm| mm.torpor_names = vec![name]).map(|mm| mm.names.len())
    };
    assert_eq!(named(START, START + PAGE, 79), Ok(1));
    assert_eq!(named(START, START + PAGE, 80), Err("has a name of 80 bytes for memory".into()));
    assert!(named(START, START + 2 * PAGE, 1).unwrap_err().contains("which it lacks"));
    let keys = |bits| memory(|mm| mm.torpor_pkeys = Some(bits)).map(|mm| mm.keys);
    assert_eq!([keys(0), keys(0xfffe)], [Ok(0), Ok(0xfffe)]);
    assert!([keys(1), keys(0x1_0000)].iter().all(Result::is_err));
    assert!(memory(|mm| mm.mm_saved_auxv = vec![0; 128]).is_ok());
    assert!(memory(|mm| mm.mm_saved_auxv = vec![0; 129]).unwrap_err().contains("129 words"));
    let dumpable = |number| memory(|mm| mm.dumpable = Some(number)).map(|mm| mm.dumpable);
    assert_eq!(dumpable(2), Ok(Some(Dumpable::ByRoot)));
    assert!([dumpable(-1), dumpable(3)].iter().all(Result::is_err));
    let off = memory(|mm| (mm.thp_disabled, mm.torpor_thp_flags) = (Some(true), Some(2)));
    assert_eq!(off.unwrap().no_huge_pages, Some(2));
    assert_eq!(memory(|mm| mm.thp_disabled = Some(false)).unwrap().no_huge_pages, None);
}

/// An error names the image of the task.
#[test]
fn images_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let images = ImageDir::open(dir.path()).unwrap();
    let vmas = vec![VmaEntry { prot: 8, ..plain() }];
    images.write_one(kind::MM, 7, &MmEntry { vmas, ..MmEntry::default() }).unwrap();
    let why = ProcessMemory::read(&images, 7).unwrap_err().to_string();
    assert!(why.starts_with("mm-7.img: mapping 100000-101000 has the protection"), "{why}");
    assert!(ProcessMemory::read(&images, 8).unwrap_err().to_string().contains("mm-8.img"));
}
