//! The vDSO, which is the kernel's, at the addresses that it had.

use torpor_images::proto::VmaEntry;
use torpor_tracee::{Mapping, STUB_SIZE};

use super::{Restore, STUB_FROM, is_special};
use crate::error::{Context, Error, Result};
use crate::memory::vma::{PAGE, status};

/// Room for one part of the vDSO while the others move.
const PARKING: u64 = 1 << 20;

/// Moves the kernel's vDSO and its data to where the task had them, or away.
///
/// # Errors
/// One that differs from the task's; the kernel's.
pub(super) fn relocate(
    cx: &mut Restore<'_>,
    task: usize,
    wanted: &[VmaEntry],
    here: &[Mapping],
) -> Result<()> {
    let special = |v: &&VmaEntry| v.status & (status::VDSO | status::VVAR) != 0;
    let targets: Vec<&VmaEntry> = wanted.iter().filter(special).collect();
    let sources: Vec<&Mapping> =
        here.iter().filter(|m| is_special(&m.name) && m.name != "[vsyscall]").collect();
    let moves = pair(&cx.tasks[task].image.vpid(), &sources, &targets)?;
    let Some(parking) = parking_place(wanted, here, sources.len()) else {
        return Err(Error::invalid("mm", "the address space has no room to move the vDSO"));
    };
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut batch = cx.remote(task)?.batch();
    let mut second = Vec::new();
    for (i, (from, to)) in moves.iter().enumerate() {
        let len = from.end - from.start;
        match to {
            Some(to) if *to == from.start => {}
            Some(to) => {
                let park = parking + i as u64 * PARKING;
                batch.call(libc::SYS_mremap, [from.start, len, len, flags, park]);
                second.push([park, len, len, flags, *to]);
            }
            None => {
                batch.call(libc::SYS_munmap, [from.start, len]);
            }
        }
    }
    for args in second {
        batch.call(libc::SYS_mremap, args);
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "moving the vDSO".to_owned()),
        None => Ok(()),
    }
}

fn parking_place(wanted: &[VmaEntry], here: &[Mapping], parts: usize) -> Option<u64> {
    let mut taken: Vec<(u64, u64)> = wanted
        .iter()
        .map(|v| (v.start, v.end))
        .chain(here.iter().map(|m| (m.start, m.end)))
        .collect();
    taken.sort_unstable();
    let size = PARKING * (parts as u64 + 1);
    // Above the stub, which was placed by the same rule.
    let mut at = STUB_FROM + 4 * STUB_SIZE;
    for (start, end) in taken {
        if start >= at + size {
            return Some(at);
        }
        at = at.max(end + 2 * STUB_SIZE).next_multiple_of(PAGE);
    }
    (at + size < 1 << 47).then_some(at)
}

/// Says which part of the kernel's vDSO goes where: the parts must be the same, in
/// number and size, as those of the task, unless the task had none of them.
fn pair<'m>(
    pid: &i32,
    sources: &[&'m Mapping],
    targets: &[&VmaEntry],
) -> Result<Vec<(&'m Mapping, Option<u64>)>> {
    let differs = || {
        Error::invalid(
            format!("mm-{pid}.img"),
            "the vDSO differs from that of this kernel; restore on the kernel release of the dump",
        )
    };
    let of = |bit: u32| targets.iter().filter(move |v| v.status & bit != 0).collect::<Vec<_>>();
    let (vdso, vvar) = (of(status::VDSO), of(status::VVAR));
    let mut out = Vec::new();
    let (mut next_vdso, mut next_vvar) = (vdso.iter(), vvar.iter());
    for source in sources {
        let (list, next) =
            if source.name == "[vdso]" { (&vdso, &mut next_vdso) } else { (&vvar, &mut next_vvar) };
        if list.is_empty() {
            out.push((*source, None));
            continue;
        }
        let target = next.next().ok_or_else(differs)?;
        if target.end - target.start != source.end - source.start {
            return Err(differs());
        }
        out.push((*source, Some(target.start)));
    }
    if next_vdso.next().is_some() || next_vvar.next().is_some() {
        return Err(differs());
    }
    Ok(out)
}
