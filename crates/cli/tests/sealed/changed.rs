//! Images that were changed: no bit of them can be, and it is said what to do.

use std::fs;
use std::path::Path;

use torpor_images::kind;
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::proto::MmEntry;

use super::{Sleeper, fixture, opened, stays_asleep, torpor, wakes};

#[test]
fn what_to_do_about_images_that_were_changed_is_said() {
    let task = Sleeper::start();
    task.put_to_sleep(&["--recipient", &fixture("p256.crt")]);
    let path = task.dir.path().join("inventory.img");
    let mut image = fs::read(&path).unwrap();
    *image.last_mut().unwrap() ^= 1;
    fs::write(&path, image).unwrap();
    let key = fixture("p256.key");
    let output = torpor(&["restore", "-D", task.images(), "--identity", &key, "-d"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    let hint = "they are not what was sealed: use another copy of the images";
    assert!(said.contains(hint) && !said.contains("torpor image info"), "{said}");
}

/// A bit of each part of each file, and of each page: also of those that no task gets.
fn no_byte_can_be_changed(dump: &[&str]) {
    let task = Sleeper::start();
    task.put_to_sleep(&[&["--encrypt", "--recipient", &fixture("p256.crt")], dump].concat());
    let key = fixture("p256.key");
    let names = fs::read_dir(task.images()).unwrap().map(|entry| entry.unwrap().path());
    // Statistics and the log are no part of a checkpoint.
    let sealed: Vec<_> =
        names.filter(|path| path.extension().is_some_and(|e| e == "img")).collect();
    assert!(sealed.len() > 10);
    for path in sealed {
        let whole = fs::read(&path).unwrap();
        let pages = path.file_name().unwrap().to_str().unwrap().starts_with("pages-1");
        // Packed pages are shorter than their 4096 bytes: each of them, and what leads to them.
        let step = if pages { 1024.max(whole.len() / 64) } else { whole.len().div_ceil(4).max(1) };
        for at in (0..whole.len()).step_by(step) {
            let mut changed = whole.clone();
            let within = (at + step / 3).min(whole.len() - 1);
            changed[within] ^= 0x10;
            fs::write(&path, changed).unwrap();
            let said = stays_asleep(&task, &["--identity", &key]);
            assert!(!task.lives(), "byte {within} of {}: {said}", path.display());
        }
        fs::write(&path, whole).unwrap();
    }
    wakes(&task, &["--identity", &key]);
}

#[test]
fn no_byte_of_sealed_pages_can_be_changed() {
    no_byte_can_be_changed(&[]);
}

#[test]
fn no_byte_of_pages_sealed_in_place_can_be_changed() {
    no_byte_can_be_changed(&["--suite", "aes-256-xts+hmac-sha256"]);
}

#[test]
fn no_byte_of_packed_and_sealed_pages_can_be_changed() {
    no_byte_can_be_changed(&["--compress", "zstd"]);
    no_byte_can_be_changed(&["--compress", "lz4"]);
}

/// The kernel has a vDSO of its own for a restored task, which gets none of these pages.
#[test]
fn no_page_of_the_vdso_can_be_changed() {
    /// `VMA_AREA_VDSO`, a bit of the status of a mapping.
    const VDSO: u32 = 1 << 3;
    let task = Sleeper::start();
    task.put_to_sleep(&["--encrypt", "--recipient", &fixture("p256.crt")]);
    let (key, pid) = (fixture("p256.key"), u64::from(task.pid.cast_unsigned()));
    let (dir, _) = opened(Path::new(task.images()), &key);
    let mm: MmEntry = dir.read_one(kind::MM, pid).unwrap();
    let vdso = mm.vmas.iter().find(|vma| vma.status & VDSO != 0).unwrap();
    let map = Pagemap::read(&dir, kind::PAGEMAP, pid).unwrap();
    let of_run = |(run, offset): (Run, Option<u64>)| {
        let pages = run.range().step_by(4096).filter(|page| (vdso.start..vdso.end).contains(page));
        let offset = offset.unwrap();
        pages.map(|page| offset + (page - run.vaddr)).collect::<Vec<_>>()
    };
    let pages: Vec<u64> =
        map.offsets().filter(|(_, offset)| offset.is_some()).flat_map(of_run).collect();
    assert!(!pages.is_empty(), "{vdso:?} {map:?}");
    let path = Path::new(task.images()).join(kind::PAGES.file_name(map.pages_id.into()));
    let whole = fs::read(&path).unwrap();
    for page in pages {
        let mut changed = whole.clone();
        changed[usize::try_from(page).unwrap() + 2047] ^= 1;
        fs::write(&path, changed).unwrap();
        let said = stays_asleep(&task, &["--identity", &key]);
        assert!(said.contains("pages-1.img"), "{said}");
    }
    fs::write(&path, whole).unwrap();
    wakes(&task, &["--identity", &key]);
}
