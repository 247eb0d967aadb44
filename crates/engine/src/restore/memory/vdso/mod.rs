//! The vDSO, which is the kernel's, at the addresses that it had.
//!
//! If it is another one than the task had, the task keeps its own, which leads to the kernel's:
//! see [`bridge`].

mod bridge;
mod kind;

use std::ops::Range;
use std::sync::LazyLock;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_policy::memory::{AreaKind, MemoryArea};
use torpor_sys::vm;
use torpor_tracee::syscall;
use torpor_tracee::{Mapping, RemoteAddr, STUB_SIZE, Tracee, parse_maps};

use self::bridge::VdsoCode;
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::restore::pages::Pages;
use crate::restore::tasks::Task;

/// Room for one part of the vDSO while the others move.
const PARKING: u64 = 1 << 20;
/// How far apart the old and the new vDSO are at most: jumps reach twice as far.
const REACH: u64 = 1 << 30;
/// What is left free next to other mappings.
const MARGIN: u64 = 16 << 20;
/// Behind the addresses that a task gets without asking for higher ones.
const END: u64 = 1 << 47;
/// Lowest address at which a stub is placed.
pub(super) const STUB_FROM: u64 = 1 << 20;
/// More than any vDSO has, in bytes.
const MAX_CODE: u64 = 64 * PAGE;

/// Whether a mapping is one that the kernel makes in every task.
pub(super) fn is_special(name: &str) -> bool {
    name == "[vdso]" || name.starts_with("[vvar") || name == "[vsyscall]"
}

/// The code of this kernel's vDSO, if there is one.
fn own_code() -> Option<&'static [u8]> {
    static OWN: LazyLock<Option<Vec<u8>>> = LazyLock::new(|| {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let vdso = parse_maps(&maps).into_iter().find(|map| map.name == "[vdso]")?;
        let mut code = vec![0; usize::try_from(vdso.end - vdso.start).ok()?];
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let read = vm::read(own, vdso.start, &mut code).ok()?;
        (read == code.len()).then_some(code)
    });
    OWN.as_deref()
}

/// The code of the vDSO that the images have, if they have all of it.
fn old_code(pages: &Pages, vdso: &MemoryArea) -> Option<Vec<u8>> {
    let range = vdso.start..vdso.end;
    let there: u64 = pages.within(range.clone()).map(|(_, part)| part.end - part.start).sum();
    if there != range.end - range.start || there > MAX_CODE {
        return None;
    }
    let mut code = vec![0; usize::try_from(there).ok()?];
    // Those of a lazy dump may be elsewhere.
    pages.read(range.start, &mut code).ok().map(|()| code)
}

/// Moves the kernel's vDSO and its data to where the task had them, or away.
///
/// # Errors
/// If this kernel's differs from the task's and calls cannot be led to it; if the kernel refuses to
/// move it; if the husk has ended.
pub(super) fn relocate(task: &mut Task, wanted: &[MemoryArea], here: &[Mapping]) -> Result<()> {
    let is_32bit = task.image.process.is_32bit;
    let changed = kind::choose(task.remote()?, wanted, here, is_32bit)?;
    let here = changed.as_deref().unwrap_or(here);
    let special = |v: &&MemoryArea| v.kind.is_vdso();
    let targets: Vec<&MemoryArea> = wanted.iter().filter(special).collect();
    let sources: Vec<&Mapping> =
        here.iter().filter(|m| is_special(&m.name) && m.name != "[vsyscall]").collect();
    let code = targets.iter().find(|v| v.kind == AreaKind::Vdso);
    let old = code.and_then(|vdso| old_code(&task.image.pages, vdso));
    let of_32bit = if is_32bit { kind::code_of(task.remote()?, here) } else { None };
    let own = if is_32bit { of_32bit.as_deref() } else { own_code() };
    let is_same = |old| own.is_some_and(|own| bridge::is_same(old, own));
    let is_same = old.as_deref().is_none_or(is_same);
    match pair(&sources, &targets).filter(|_| is_same) {
        Some(moves) => place(task.remote()?, wanted, here, &moves),
        None if is_32bit => {
            let name = format!("mm-{}.img", task.image.vpid());
            let why = "the vDSO of a 32-bit program differs from that of this kernel";
            Err(Error::invalid(name, why))
        }
        None => lead_there(task, (wanted, here), &targets, &sources),
    }
}

/// Leaves the task the vDSO that it had, which leads to the kernel's at another place.
fn lead_there(
    task: &mut Task,
    (wanted, here): (&[MemoryArea], &[Mapping]),
    targets: &[&MemoryArea],
    sources: &[&Mapping],
) -> Result<()> {
    let pid = task.image.vpid();
    let differs = |why: &str| {
        let what = "the vDSO differs from that of this kernel, and does not lead there";
        Error::invalid(format!("mm-{pid}.img"), format!("{what}: {why}"))
    };
    let first = sources.iter().map(|m| m.start).min().unwrap_or(0);
    let size = sources.iter().map(|m| m.end).max().unwrap_or(0) - first;
    let old = targets.iter().find(|v| v.kind == AreaKind::Vdso);
    let near = old.or(targets.first()).map_or(STUB_FROM, |v| v.start);
    let place = near_place(wanted, here, near, size)
        .ok_or_else(|| differs("there is no room near its place"))?;
    tracing::info!(
        "task {pid}: its vDSO is of another kernel and leads to this one's at {place:x}"
    );
    let code = match (old, sources.iter().find(|m| m.name == "[vdso]").zip(own_code())) {
        (None, _) => None,
        (Some(vdso), own) => {
            let image = &mut task.image;
            let code = old_code(&image.pages, vdso)
                .ok_or_else(|| differs("the images do not have all of it"))?;
            let old = VdsoCode { base: vdso.start, code: &code };
            let (from, code) = own.ok_or_else(|| differs("this kernel has none"))?;
            let new = VdsoCode { base: place + (from.start - first), code };
            let built = bridge::build(old, new).map_err(|why| differs(&why))?;
            let pages = std::sync::Arc::clone(&image.pages);
            let word = |at: u64| {
                let mut word = [0; 8];
                let there = pages.within(at..at + 8).map(|(_, part)| part.end - part.start);
                (there.sum::<u64>() == 8).then(|| pages.read(at, &mut word).ok())??;
                Some(u64::from_le_bytes(word))
            };
            for registers in image.registers.iter_mut().flatten() {
                let general = &mut registers.general;
                bridge::take_back(general, old, word).map_err(|why| differs(&why))?;
            }
            Some((*vdso, built))
        }
    };
    build(task.remote()?, targets, code, sources.iter().map(|m| (*m, place + (m.start - first))))
}

/// Moves the kernel's parts away, and fills the places that the task had for its own.
fn build<'m>(
    husk: &mut Tracee,
    targets: &[&MemoryArea],
    code: Option<(&MemoryArea, Vec<u8>)>,
    moves: impl Iterator<Item = (&'m Mapping, u64)>,
) -> Result<()> {
    let failed = |e: Option<(usize, std::io::Error)>| match e {
        Some((_, e)) => Err(e).context(|| "building the old vDSO again".to_owned()),
        None => Ok(()),
    };
    let mut batch = husk.batch();
    for (from, to) in moves {
        batch.must(syscall::mremap(from.start..from.end, to));
    }
    let fresh = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    for area in targets {
        let is_code = area.kind == AreaKind::Vdso;
        let prot = if is_code { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        batch.must(syscall::mmap_anonymous(area.range(), prot, fresh));
    }
    failed(batch.run()?.first_error())?;
    let Some((area, code)) = code else { return Ok(()) };
    husk.write(RemoteAddr(area.start), &code)?;
    let mut batch = husk.batch();
    let prot = ProtFlags::from_bits_retain(area.prot);
    batch.must(syscall::mprotect(area.range(), prot));
    failed(batch.run()?.first_error())
}

/// Moves the parts to their places, by way of others.
fn place(
    husk: &mut Tracee,
    wanted: &[MemoryArea],
    here: &[Mapping],
    moves: &[(&Mapping, Option<u64>)],
) -> Result<()> {
    let Some(parking) = parking_place(wanted, here, moves.len()) else {
        return Err(Error::invalid("mm", "the address space has no room to move the vDSO"));
    };
    let mut batch = husk.batch();
    let mut second = Vec::new();
    for (i, (from, to)) in moves.iter().enumerate() {
        let range = from.start..from.end;
        match to {
            Some(to) if *to == from.start => {}
            Some(to) => {
                let park = parking + i as u64 * PARKING;
                second.push(syscall::mremap(park..park + (range.end - range.start), *to));
                batch.call(syscall::mremap(range, park));
            }
            None => {
                batch.call(syscall::munmap(range));
            }
        }
    }
    for call in second {
        batch.call(call);
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "moving the vDSO".to_owned()),
        None => Ok(()),
    }
}

/// The addresses that are in use, or will be.
fn taken(wanted: &[MemoryArea], here: &[Mapping]) -> Vec<(u64, u64)> {
    let wanted = wanted.iter().map(|v| (v.start, v.end));
    let all = wanted.chain(here.iter().map(|m| (m.start, m.end)));
    let mut taken: Vec<_> = all.filter(|(start, _)| *start < END).collect();
    taken.sort_unstable();
    taken
}

/// A free place of `size` bytes within [`REACH`] of an address, and away from heaps and stacks,
/// which grow.
fn near_place(wanted: &[MemoryArea], here: &[Mapping], near: u64, size: u64) -> Option<u64> {
    let mut found = None;
    let mut end = STUB_FROM;
    for (start, next) in taken(wanted, here).into_iter().chain([(END, END)]) {
        let room = size + 2 * MARGIN;
        if start >= end + room {
            let candidates = [end + MARGIN, start - MARGIN - size];
            let closest = candidates.into_iter().map(|at| at / PAGE * PAGE);
            found = found.into_iter().chain(closest).min_by_key(|at| at.abs_diff(near));
        }
        end = end.max(next);
    }
    found.filter(|at| at.abs_diff(near) <= REACH)
}

fn parking_place(wanted: &[MemoryArea], here: &[Mapping], parts: usize) -> Option<u64> {
    let taken = taken(wanted, here);
    let size = PARKING * (parts as u64 + 1);
    // Above the stub, which was placed by the same rule.
    let mut at = STUB_FROM + 4 * STUB_SIZE;
    for (start, end) in taken {
        if start >= at + size {
            return Some(at);
        }
        at = at.max(end + 2 * STUB_SIZE).next_multiple_of(PAGE);
    }
    (at + size < END).then_some(at)
}

/// Says which part of the kernel's vDSO goes where, unless the task had none of its kind:
/// the task's areas must be what these parts fill one after the other. The images have one
/// area for what the kernel shows as several parts side by side; those of Torpor's old
/// versions have one for each. `None` if the parts do not fit.
fn pair<'m>(
    sources: &[&'m Mapping],
    targets: &[&MemoryArea],
) -> Option<Vec<(&'m Mapping, Option<u64>)>> {
    let mut out = Vec::new();
    for (kind, is_code) in [(AreaKind::Vdso, true), (AreaKind::Vvar, false)] {
        let parts = sources.iter().filter(|m| (m.name == "[vdso]") == is_code);
        let areas = targets.iter().filter(|v| v.kind == kind);
        out.extend(fill(parts.copied(), areas.map(|v| v.start..v.end))?);
    }
    Some(out)
}

/// Fills `areas` with `parts`; `None` if they do not fit.
fn fill<'m>(
    parts: impl Iterator<Item = &'m Mapping>,
    areas: impl Iterator<Item = Range<u64>>,
) -> Option<Vec<(&'m Mapping, Option<u64>)>> {
    let mut areas = areas.peekable();
    if areas.peek().is_none() {
        return Some(parts.map(|part| (part, None)).collect());
    }
    let mut room = 0..0;
    let mut out = Vec::new();
    for part in parts {
        if room.is_empty() {
            room = areas.next()?;
        }
        let len = part.end - part.start;
        if len > room.end - room.start {
            return None;
        }
        out.push((part, Some(room.start)));
        room.start += len;
    }
    (room.is_empty() && areas.next().is_none()).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(start: u64, end: u64) -> Mapping {
        let line = format!("{start:x}-{end:x} r--p 00000000 00:00 0 [vvar]\n");
        torpor_tracee::parse_maps(&line).pop().unwrap()
    }

    #[test]
    fn areas_are_one_or_several_and_hold_all_parts() {
        let parts = [part(0x1000, 0x5000), part(0x5000, 0x7000)];
        let places = |areas: &[(u64, u64)]| {
            let filled = fill(parts.iter(), areas.iter().map(|area| area.0..area.1))?;
            Some(filled.into_iter().map(|(_, to)| to).collect::<Vec<_>>())
        };
        assert_eq!(places(&[(0x10000, 0x16000)]), Some(vec![Some(0x10000), Some(0x14000)]));
        let apart = [(0x10000, 0x14000), (0x20000, 0x22000)];
        assert_eq!(places(&apart), Some(vec![Some(0x10000), Some(0x20000)]));
        assert_eq!(places(&[]), Some(vec![None, None]));
        assert_eq!(places(&[(0x10000, 0x14000)]), None);
        assert_eq!(places(&[(0x10000, 0x17000)]), None);
        assert_eq!(places(&[(0x10000, 0x15000), (0x20000, 0x21000)]), None);
    }
}
