//! The two kinds of vDSO, for 64-bit and for 32-bit programs: a task has that of its kind.

use torpor_policy::memory::MemoryArea;
use torpor_sys::vm;
use torpor_tracee::{Mapping, Tracee, parse_maps, syscall};

use super::{MAX_CODE, is_special, parking_place};
use crate::error::{Context, Error, Result};
use crate::proc;

/// Of `arch_prctl(2)`, asm/prctl.h.
const ARCH_MAP_VDSO_32: u64 = 0x2002;
const ARCH_MAP_VDSO_64: u64 = 0x2003;
/// Where an ELF file says of which kind it is, and what it says there (elf(5)).
const CLASS_AT: u64 = 4;
const CLASS_32: u8 = 1;

/// The code of the vDSO that a husk with these mappings has.
pub(super) fn code_of(husk: &Tracee, here: &[Mapping]) -> Option<Vec<u8>> {
    start_of(husk, here, MAX_CODE)
}

/// The first bytes of it, `most` of them.
fn start_of(husk: &Tracee, here: &[Mapping], most: u64) -> Option<Vec<u8>> {
    let vdso = here.iter().find(|map| map.name == "[vdso]")?;
    let len = (vdso.end - vdso.start).min(most);
    let mut code = vec![0; usize::try_from(len).ok()?];
    let read = vm::read(husk.pid(), vdso.start, &mut code).ok()?;
    (read == code.len()).then_some(code)
}

/// Gives a husk the vDSO of the kind that its task had, in place of the other one. Returns the
/// mappings that it has then, or nothing if it has the right one already.
///
/// # Errors
/// If this kernel has none for 32-bit programs; if the husk has ended.
pub(super) fn choose(
    husk: &mut Tracee,
    wanted: &[MemoryArea],
    here: &[Mapping],
    is_32bit: bool,
) -> Result<Option<Vec<Mapping>>> {
    let Some(start) = start_of(husk, here, CLASS_AT + 1) else { return Ok(None) };
    if (start.last() == Some(&CLASS_32)) == is_32bit {
        return Ok(None);
    }
    let place = parking_place(wanted, here, 1)
        .ok_or_else(|| Error::invalid("mm", "the address space has no room for a vDSO"))?;
    let mut batch = husk.batch();
    for map in here.iter().filter(|map| is_special(&map.name) && map.name != "[vsyscall]") {
        batch.must(syscall::munmap(map.start..map.end));
    }
    let kind = if is_32bit { ARCH_MAP_VDSO_32 } else { ARCH_MAP_VDSO_64 };
    batch.must((libc::SYS_arch_prctl, [kind, place]));
    if let Some((_, e)) = batch.run()?.first_error() {
        let bits = if is_32bit { 32 } else { 64 };
        return Err(e).context(|| format!("mapping the vDSO of {bits}-bit programs"));
    }
    Ok(Some(parse_maps(&proc::read(husk.pid(), "maps")?)))
}
