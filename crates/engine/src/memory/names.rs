//! Names that programs give to anonymous memory (`PR_SET_VMA_ANON_NAME`), for those who read `/proc/PID/maps`. Kernels
//! without them (before Linux 5.17, or without `CONFIG_ANON_VMA_NAME`) show none, and take none.

use torpor_images::proto::TorporMemoryName;
use torpor_policy::memory::{AreaName, ProcessMemory};
use torpor_tracee::{Tracee, syscall};

use super::vma::Vma;
use crate::error::Result;

/// What the kernel puts before the name of private memory, and of shared memory.
const KINDS: [&str; 2] = ["[anon:", "[anon_shmem:"];
/// So many names have room in a process at once.
const AT_ONCE: usize = 32;
/// What prctl(2) is to set of a mapping.
const NAME: u64 = libc::PR_SET_VMA_ANON_NAME as u64;

/// The names among the mappings of a task.
pub(crate) fn of(vmas: &[Vma]) -> Vec<TorporMemoryName> {
    let name = |vma: &Vma| {
        let name = KINDS.iter().find_map(|kind| vma.map.name.strip_prefix(kind))?;
        let name = name.strip_suffix(']')?.to_owned();
        Some(TorporMemoryName { start: vma.map.start, end: vma.map.end, name })
    };
    vmas.iter().filter_map(name).collect()
}

/// Gives the memory of a process its names, as far as this kernel has any.
///
/// # Errors
/// If the husk has ended.
pub(crate) fn restore(husk: &mut Tracee, memory: &ProcessMemory) -> Result<()> {
    for names in memory.names.chunks(AT_ONCE) {
        let mut batch = husk.batch();
        for AreaName { range, name } in names {
            let name = batch.cstr(name).0;
            let len = range.end - range.start;
            batch.call(syscall::prctl(libc::PR_SET_VMA, [NAME, range.start, len, name]));
        }
        // Nothing works otherwise without.
        batch.run()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma::parse;

    #[test]
    fn names_are_found_in_the_lines_of_mappings() {
        let text = "7f00000000-7f00001000 rw-p 00000000 00:00 0 [anon:a heap: [1]]\n\
                    7f00001000-7f00002000 rw-p 00000000 00:00 0 \n\
                    7f00002000-7f00004000 rw-s 00000000 00:01 9 [anon_shmem:queue]\n\
                    7f00004000-7f00005000 rw-p 00000000 00:00 0 [heap]\n";
        let vmas = parse(7, text).unwrap();
        let names = of(&vmas);
        let found: Vec<_> =
            names.iter().map(|name| (name.start, name.end, name.name.as_str())).collect();
        let wanted = [
            (0x7f_0000_0000, 0x7f_0000_1000, "a heap: [1]"),
            (0x7f_0000_2000, 0x7f_0000_4000, "queue"),
        ];
        assert_eq!(found, wanted);
    }
}
