//! What a processor can do: `cpuinfo.img`.
//!
//! A program asks its processor once and then counts on the answer. Restored where an
//! instruction that it found is missing it would die much later, so that a restore
//! compares first.

use core::arch::x86_64::{__cpuid_count, CpuidResult};

use torpor_images::proto::cpuinfo_x86_entry::Vendor;
use torpor_images::proto::{CpuinfoEntry, CpuinfoX86Entry};
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::options::CpuCap;

/// The layout of `capability` that is written and read here.
const CAPABILITY_VERSION: u32 = 2;

/// How many words it has.
const WORDS: usize = 21;

/// The words of `capability` that hold instruction set bits. They stand where Linux
/// has them in its own table of features (asm/cpufeatures.h).
mod word {
    pub(super) const LEAF_1_EDX: usize = 0;
    pub(super) const LEAF_8000_0001_EDX: usize = 1;
    pub(super) const LEAF_1_ECX: usize = 4;
    pub(super) const LEAF_8000_0001_ECX: usize = 6;
    pub(super) const LEAF_7_EBX: usize = 9;
    pub(super) const LEAF_D_1_EAX: usize = 10;
    pub(super) const LEAF_8000_0008_EBX: usize = 13;
    pub(super) const LEAF_7_ECX: usize = 16;
    pub(super) const LEAF_7_EDX: usize = 18;
}

/// A set of bits, by their numbers.
const fn bits(numbers: &[u32]) -> u32 {
    let mut mask = 0;
    let mut i = 0;
    while i < numbers.len() {
        mask |= 1 << numbers[i];
        i += 1;
    }
    mask
}

/// The bits that stand for instructions that programs use (Intel SDM volume 2A, CPUID;
/// AMD APM volume 3, appendix E). The others are of the system, or about speed.
const INSTRUCTIONS: &[(usize, u32)] = &[
    (word::LEAF_1_EDX, bits(&[0, 4, 8, 15, 19, 23, 24, 25, 26])),
    (word::LEAF_8000_0001_EDX, bits(&[11, 22, 27, 29, 30, 31])),
    (word::LEAF_1_ECX, bits(&[0, 1, 9, 12, 13, 19, 20, 22, 23, 25, 26, 27, 28, 29, 30])),
    (word::LEAF_8000_0001_ECX, bits(&[0, 5, 6, 7, 8, 11, 16, 21])),
    (
        word::LEAF_7_EBX,
        bits(&[0, 3, 4, 5, 8, 11, 16, 17, 18, 19, 21, 23, 24, 26, 27, 28, 29, 30, 31]),
    ),
    (word::LEAF_D_1_EAX, bits(&[0, 1, 2])),
    (word::LEAF_7_ECX, bits(&[0, 1, 5, 6, 8, 9, 10, 11, 12, 14, 22, 25, 27, 28])),
    (word::LEAF_7_EDX, bits(&[2, 3, 8, 14, 22, 23, 24, 25])),
];

/// The bits that a floating point state depends on: FXSAVE, SSE, XSAVE.
const FPU: &[(usize, u32)] =
    &[(word::LEAF_1_EDX, bits(&[0, 24, 25])), (word::LEAF_1_ECX, bits(&[26, 27]))];

/// A leaf, or zeros if the processor does not have it: it would give another one.
fn leaf(number: u32, sub: u32) -> CpuidResult {
    let highest = __cpuid_count(number & 0x8000_0000, 0).eax;
    if number <= highest {
        return __cpuid_count(number, sub);
    }
    CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 }
}

/// This processor.
#[must_use]
pub fn own() -> CpuinfoEntry {
    let basic = leaf(0, 0);
    let name: Vec<u8> =
        [basic.ebx, basic.edx, basic.ecx].iter().flat_map(|word| word.to_le_bytes()).collect();
    let vendor = match name.as_slice() {
        b"GenuineIntel" => Vendor::Intel,
        b"AuthenticAMD" => Vendor::Amd,
        _ => Vendor::Unknown,
    };
    let (family, model, stepping) = identity(leaf(1, 0).eax);
    let states = leaf(0xd, 0);
    let mut entry = CpuinfoX86Entry {
        cpu_family: family,
        model,
        stepping,
        capability_ver: CAPABILITY_VERSION,
        capability: capabilities(),
        model_id: Some(model_name()),
        xfeatures_mask: Some(u64::from(states.edx) << 32 | u64::from(states.eax)),
        xsave_size: Some(states.ebx),
        xsave_size_max: Some(states.ecx),
        ..CpuinfoX86Entry::default()
    };
    entry.set_vendor_id(vendor);
    CpuinfoEntry { x86_entry: vec![entry], ..CpuinfoEntry::default() }
}

/// Family, model and stepping from the signature in leaf 1.
fn identity(signature: u32) -> (u32, u32, u32) {
    let field = |from: u32, width: u32| signature >> from & ((1 << width) - 1);
    let (stepping, model, family) = (field(0, 4), field(4, 4), field(8, 4));
    let (more_model, more_family) = (field(16, 4), field(20, 8));
    let full_family = if family == 15 { family + more_family } else { family };
    let full_model = if full_family >= 6 { more_model << 4 | model } else { model };
    (full_family, full_model, stepping)
}

fn capabilities() -> Vec<u32> {
    let mut words = vec![0; WORDS];
    let (one, extended, seven) = (leaf(1, 0), leaf(0x8000_0001, 0), leaf(7, 0));
    words[word::LEAF_1_EDX] = one.edx;
    words[word::LEAF_1_ECX] = one.ecx;
    words[word::LEAF_8000_0001_EDX] = extended.edx;
    words[word::LEAF_8000_0001_ECX] = extended.ecx;
    words[word::LEAF_7_EBX] = seven.ebx;
    words[word::LEAF_7_ECX] = seven.ecx;
    words[word::LEAF_7_EDX] = seven.edx;
    words[word::LEAF_D_1_EAX] = leaf(0xd, 1).eax;
    words[word::LEAF_8000_0008_EBX] = leaf(0x8000_0008, 0).ebx;
    words
}

fn model_name() -> String {
    let parts = [0x8000_0002, 0x8000_0003, 0x8000_0004].map(|number| leaf(number, 0));
    let bytes: Vec<u8> = parts
        .iter()
        .flat_map(|r| [r.eax, r.ebx, r.ecx, r.edx])
        .flat_map(u32::to_le_bytes)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Writes `cpuinfo.img`.
///
/// # Errors
/// If the image cannot be made or written: a full disk.
pub fn dump(images: &ImageDir) -> Result<()> {
    Ok(images.write_one(kind::CPUINFO, 0, &own())?)
}

/// Compares this processor with the one of `cpuinfo.img`, as far as `cap` asks for.
///
/// # Errors
/// If something is missing here, or the image makes no sense or is not there.
pub fn check(images: &ImageDir, cap: CpuCap) -> Result<()> {
    if cap == CpuCap::NONE {
        return Ok(());
    }
    let image: CpuinfoEntry = images.read_one(kind::CPUINFO, 0)?;
    compare(&image, &own(), cap).map_err(|reason| Error::invalid("cpuinfo.img", reason))
}

/// The processor's part of a dump that was told `cap`. Untold, the inventory has it.
///
/// # Errors
/// As [`dump`].
pub(crate) fn dump_for(images: &ImageDir, cap: Option<CpuCap>) -> Result<Option<CpuinfoEntry>> {
    match cap {
        None => images.remove_kind(kind::CPUINFO, 0)?,
        Some(CpuCap::NONE) => {}
        Some(_) => dump(images)?,
    }
    Ok(cap.is_none().then(own))
}

/// The processor's part of a restore that was told `cap`. Untold, it compares what the
/// tasks' saved states and instructions need, if the dump has written that down.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_for(images: &ImageDir, cap: Option<CpuCap>) -> Result<()> {
    let usual = CpuCap { fpu: true, cpu: false, ins: true };
    if images.has(kind::CPUINFO, 0)? {
        return check(images, cap.unwrap_or(usual));
    }
    let inventory = images.inventory()?;
    match (&inventory.torpor_cpuinfo, cap) {
        (_, Some(CpuCap::NONE)) | (None, None) => Ok(()),
        (None, Some(cap)) => check(images, cap),
        (Some(image), cap) => compare(image, &own(), cap.unwrap_or(usual))
            .map_err(|reason| Error::invalid(kind::INVENTORY.file_name(0), reason)),
    }
}

/// What is missing.
type Comparison = std::result::Result<(), String>;

fn compare(image: &CpuinfoEntry, here: &CpuinfoEntry, cap: CpuCap) -> Comparison {
    let ([image], [here]) = (image.x86_entry.as_slice(), here.x86_entry.as_slice()) else {
        return Err("it does not describe one x86 processor".into());
    };
    if cap.fpu {
        compare_fpu(image, here)?;
    }
    if cap.cpu {
        compare_all(image, here)?;
    } else if cap.ins {
        compare_bits(image, here, INSTRUCTIONS)?;
    }
    Ok(())
}

/// The state that XSAVE wrote there must fit in what XRSTOR reads here.
fn compare_fpu(image: &CpuinfoX86Entry, here: &CpuinfoX86Entry) -> Comparison {
    compare_bits(image, here, FPU)?;
    let missing = image.xfeatures_mask() & !here.xfeatures_mask();
    if missing != 0 {
        return Err(format!("the processor lacks the extended states {missing:#x}"));
    }
    if image.xsave_size() > here.xsave_size_max() {
        return Err(format!(
            "extended states of {} bytes, but {} is the largest size here",
            image.xsave_size(),
            here.xsave_size_max()
        ));
    }
    Ok(())
}

fn compare_all(image: &CpuinfoX86Entry, here: &CpuinfoX86Entry) -> Comparison {
    if image.vendor_id() != here.vendor_id() || image.cpu_family != here.cpu_family {
        return Err(format!(
            "the processor was {}, and is {} here",
            image.model_id(),
            here.model_id()
        ));
    }
    let every: Vec<(usize, u32)> = (0..WORDS).map(|word| (word, u32::MAX)).collect();
    compare_bits(image, here, &every)
}

/// Every bit of `masks` that is set in the image must be set here.
fn compare_bits(
    image: &CpuinfoX86Entry,
    here: &CpuinfoX86Entry,
    masks: &[(usize, u32)],
) -> Comparison {
    if image.capability_ver != CAPABILITY_VERSION {
        return Err(format!("capabilities of version {}", image.capability_ver));
    }
    let at =
        |entry: &CpuinfoX86Entry, word: usize| entry.capability.get(word).copied().unwrap_or(0);
    for (word, mask) in masks {
        let missing = at(image, *word) & mask & !at(here, *word);
        if missing != 0 {
            return Err(format!(
                "the processor lacks what {} has: bits {missing:#x} of capability word {word}",
                image.model_id()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(cpu: &mut CpuinfoEntry) -> &mut CpuinfoX86Entry {
        &mut cpu.x86_entry[0]
    }

    #[test]
    fn the_same_machine_is_good() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        assert!(check(&images, CpuCap::ALL).is_err());
        assert!(check(&images, CpuCap::NONE).is_ok());
        dump(&images).unwrap();
        check(&images, CpuCap::ALL).unwrap();
        let own = own();
        assert!(own.x86_entry[0].xsave_size() >= 576);
        assert_ne!(own.x86_entry[0].cpu_family, 0);
    }

    #[test]
    fn what_is_missing_is_found() {
        let ins = CpuCap { fpu: false, cpu: false, ins: true };
        let fpu = CpuCap { fpu: true, cpu: false, ins: false };
        let (image, mut here) = (own(), own());
        // Without SSE2.
        entry(&mut here).capability[word::LEAF_1_EDX] &= !(1 << 26);
        assert!(compare(&image, &here, ins).unwrap_err().contains("0x4000000"));
        assert!(compare(&image, &here, fpu).is_ok());
        assert!(compare(&here, &image, ins).is_ok(), "more is no harm");

        let (image, mut here) = (own(), own());
        entry(&mut here).xfeatures_mask = Some(1);
        assert!(compare(&image, &here, fpu).unwrap_err().contains("extended states"));
        let (mut image, here) = (own(), own());
        entry(&mut image).xsave_size = Some(1 << 20);
        assert!(compare(&image, &here, fpu).unwrap_err().contains("1048576"));

        let all = CpuCap { fpu: false, cpu: true, ins: false };
        let (mut image, here) = (own(), own());
        entry(&mut image).cpu_family += 1;
        assert!(compare(&image, &here, all).is_err());
        assert!(compare(&image, &here, ins).is_ok());
    }

    #[test]
    fn nonsense_is_refused() {
        let here = own();
        assert!(compare(&CpuinfoEntry::default(), &here, CpuCap::ALL).is_err());
        let mut image = own();
        entry(&mut image).capability_ver = 77;
        assert!(compare(&image, &here, CpuCap::ALL).unwrap_err().contains("77"));
        // Fewer words than expected are words without bits.
        let mut image = own();
        entry(&mut image).capability.clear();
        assert!(compare(&image, &here, CpuCap::ALL).is_ok());
    }

    #[test]
    fn signatures() {
        assert_eq!(identity(0x0008_06f8), (6, 0x8f, 8));
        assert_eq!(identity(0x00a2_0f12), (25, 0x21, 2));
        assert_eq!(identity(0x0000_0f41), (15, 4, 1));
    }
}
