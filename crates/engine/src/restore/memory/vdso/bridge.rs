//! From the vDSO of another kernel to that of this one.
//!
//! A program keeps the addresses of the functions that it found in its vDSO. So the old code stays
//! where it was, and each of its functions begins with a jump to the same function of this kernel's.
//! Functions that this one lacks become the system call that they stand for.
//!
//! Threads that were dumped inside of the old code run on in it. They find its data empty, for
//! which it makes the system call as well: so it does with any clock that it cannot read.

use elf::ElfBytes;
use elf::endian::LittleEndian;
use torpor_sys::ptrace::Registers;

/// The code of a vDSO and where it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct VdsoCode<'a> {
    pub(super) base: u64,
    pub(super) code: &'a [u8],
}

/// The length of a jump with a 32-bit distance.
const JUMP: usize = 5;
/// More symbols than any vDSO has. Each name can be as long as the image of one, and all are listed for each thread.
const MOST: usize = 256;

/// The functions of any x86-64 vDSO and the system calls with the same arguments.
const FUNCTIONS: [(&str, libc::c_long); 6] = [
    ("__vdso_clock_gettime", libc::SYS_clock_gettime),
    ("__vdso_gettimeofday", libc::SYS_gettimeofday),
    ("__vdso_time", libc::SYS_time),
    ("__vdso_clock_getres", libc::SYS_clock_getres),
    ("__vdso_getcpu", libc::SYS_getcpu),
    (GETRANDOM, libc::SYS_getrandom),
];

/// What it keeps in the program's memory is of another layout with each kernel.
const GETRANDOM: &str = "__vdso_getrandom";

/// Where a function begins in a vDSO, and how long it is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Function {
    name: String,
    start: usize,
    len: usize,
}

/// The functions that a vDSO exports under the names that programs look for.
fn functions(code: &[u8]) -> Option<Vec<Function>> {
    let file = ElfBytes::<LittleEndian>::minimal_parse(code).ok()?;
    let data = file.find_common_data().ok()?;
    let (symbols, names) = (data.dynsyms.filter(|all| all.len() <= MOST)?, data.dynsyms_strs?);
    // Old kernels linked it for another address than 0.
    let first = file.segments()?.iter().find(|part| part.p_type == elf::abi::PT_LOAD)?.p_vaddr;
    let all = symbols
        .iter()
        .filter(|symbol| !symbol.is_undefined() && symbol.st_symtype() == elf::abi::STT_FUNC);
    let function = |symbol: elf::symbol::Symbol| {
        Some(Function {
            name: names.get(usize::try_from(symbol.st_name).ok()?).ok()?.to_owned(),
            start: usize::try_from(symbol.st_value.checked_sub(first)?).ok()?,
            len: usize::try_from(symbol.st_size).ok()?,
        })
    };
    Some(all.filter_map(function).filter(|f| f.name.starts_with("__vdso_")).collect())
}

/// Whether two vDSOs are the same for a program, and for a thread that is in one. They are if they
/// differ in words only, such as the path that one was built in.
pub(super) fn is_same(old: &[u8], new: &[u8]) -> bool {
    let text = |code: &[u8]| -> Option<(u64, Vec<u8>)> {
        let file = ElfBytes::<LittleEndian>::minimal_parse(code).ok()?;
        let header = file.section_header_by_name(".text").ok()??;
        let start = usize::try_from(header.sh_offset).ok()?;
        let end = start.checked_add(usize::try_from(header.sh_size).ok()?)?;
        Some((header.sh_addr, code.get(start..end)?.to_vec()))
    };
    let told = |code: &[u8]| text(code).zip(functions(code));
    old == new || told(old).is_some_and(|old| told(new) == Some(old))
}

/// The old code, with its functions leading to those of the vDSO of this kernel.
///
/// # Errors
/// If one of the two is no ELF file with functions; if there is no room in a function to lead it
/// there.
pub(super) fn build(old: VdsoCode<'_>, new: VdsoCode<'_>) -> Result<Vec<u8>, String> {
    let (theirs, ours) = (
        functions(old.code).ok_or("it is no ELF file with functions")?,
        functions(new.code).ok_or("that of this kernel cannot be read")?,
    );
    let mut code = old.code.to_vec();
    for function in &theirs {
        let name = &function.name;
        let target = ours.iter().find(|f| f.name == *name && name != GETRANDOM);
        let call = FUNCTIONS.iter().find(|(known, _)| known == name).map(|(_, call)| *call);
        let bytes = match (target, call) {
            (Some(to), _) => jump(old.base + function.start as u64, new.base + to.start as u64)?,
            (None, Some(call)) => system_call(call),
            (None, None) => refuse_call(),
        };
        let end = function.start.saturating_add(bytes.len());
        let place = code.get_mut(function.start..end).filter(|_| bytes.len() <= function.len);
        place.ok_or_else(|| format!("there is no room in {name}"))?.copy_from_slice(&bytes);
    }
    Ok(code)
}

fn jump(from: u64, to: u64) -> Result<Vec<u8>, String> {
    let distance = to.wrapping_sub(from.wrapping_add(JUMP as u64)).cast_signed();
    let distance = i32::try_from(distance).map_err(|_| "that of this kernel is too far away")?;
    Ok([&[0xe9][..], &distance.to_le_bytes()].concat())
}

/// `mov $NUMBER, %eax; syscall; ret`.
fn system_call(number: libc::c_long) -> Vec<u8> {
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    [&[0xb8][..], &number.to_le_bytes(), &[0x0f, 0x05, 0xc3]].concat()
}

/// `mov $-ENOSYS, %eax; ret`.
fn refuse_call() -> Vec<u8> {
    [&[0xb8][..], &(-libc::ENOSYS).to_le_bytes(), &[0xc3]].concat()
}

/// Takes a thread that has made the first steps of a function in the old vDSO back to its
/// beginning: these steps are overwritten. `word` reads from its memory.
///
/// # Errors
/// If the steps are none that can be taken back.
pub(super) fn take_back(
    regs: &mut Registers,
    old: VdsoCode<'_>,
    word: impl Fn(u64) -> Option<u64>,
) -> Result<(), String> {
    let Some(at) = regs.rip.checked_sub(old.base).and_then(|at| usize::try_from(at).ok()) else {
        return Ok(());
    };
    let all = functions(old.code).unwrap_or_default();
    // A system call in place of a function is longer than a jump.
    let overwritten = |f: &&Function| at > f.start && at < f.start + JUMP.max(8);
    let Some(function) = all.iter().find(overwritten) else { return Ok(()) };
    let mut steps = old.code.get(function.start..at).unwrap_or_default();
    let (mut sp, mut bp) = (regs.rsp, regs.rbp);
    while !steps.is_empty() {
        steps = match steps {
            // endbr64; cmp $N, %edi
            [0xf3, 0x0f, 0x1e, 0xfa, rest @ ..] | [0x83, 0xff, _, rest @ ..] => rest,
            // push %rbp, and then mov %rsp, %rbp
            [0x55, rest @ ..] => {
                if rest.starts_with(&[0x48, 0x89, 0xe5]) {
                    bp = word(sp).ok_or("a stack that is not in the images")?;
                }
                sp = sp.wrapping_add(8);
                rest.strip_prefix(&[0x48, 0x89, 0xe5]).unwrap_or(rest)
            }
            _ => return Err(format!("a thread has just begun {}", function.name)),
        };
    }
    (regs.rsp, regs.rbp, regs.rip) = (sp, bp, old.base + function.start as u64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::own_code;
    use super::*;

    const OLD: u64 = 0x7000_0000_0000;
    const NEW: u64 = 0x7000_0010_0000;

    #[test]
    fn functions_lead_to_those_of_this_kernel() {
        let code = own_code().unwrap();
        let all = functions(code).unwrap();
        let of = |name: &str| all.iter().find(|f| f.name == name).unwrap();
        let clock = of("__vdso_clock_gettime");
        let built = build(VdsoCode { base: OLD, code }, VdsoCode { base: NEW, code }).unwrap();
        assert_eq!(built.len(), code.len());
        assert_eq!(built[clock.start], 0xe9);
        let distance = built[clock.start + 1..clock.start + JUMP].try_into().unwrap();
        let distance = i64::from(i32::from_le_bytes(distance)).cast_unsigned();
        assert_eq!(distance + JUMP as u64, NEW - OLD);
        // Far away nothing can be reached.
        let far = VdsoCode { base: OLD + (1 << 33), code };
        assert!(build(VdsoCode { base: OLD, code }, far).unwrap_err().contains("too far"));
        assert!(build(VdsoCode { base: OLD, code: b"\x7fELF" }, far).is_err());
        let cut = &code[..code.len() / 3];
        let _ = build(VdsoCode { base: OLD, code: cut }, VdsoCode { base: NEW, code });
    }

    /// A few hundred KiB of an image could have a name of half of it thousands of times, for each thread.
    #[test]
    fn what_lists_more_than_any_other_is_none() {
        let code = own_code().unwrap();
        let file = ElfBytes::<LittleEndian>::minimal_parse(code).unwrap();
        let mut headers = file.section_headers().unwrap().iter().enumerate();
        let (at, _) = headers.find(|(_, it)| it.sh_type == elf::abi::SHT_DYNSYM).unwrap();
        // Where its size is: behind four fields of eight bytes each.
        let size = usize::try_from(file.ehdr.e_shoff).unwrap() + 64 * at + 32;
        let with = |symbols: u64| {
            let mut code = code.to_vec();
            code.resize(1 << 16, 0);
            code[size..size + 8].copy_from_slice(&(24 * symbols).to_le_bytes());
            functions(&code)
        };
        assert!(with(MOST as u64).is_some());
        assert_eq!(with(MOST as u64 + 1), None);
    }

    #[test]
    fn words_make_no_difference() {
        let code = own_code().unwrap();
        let all = functions(code).unwrap();
        let mut words = code.to_vec();
        let soname = words.windows(10).position(|w| w == b"linux-vdso").unwrap();
        words[soname] = b'L';
        assert!(is_same(code, code) && is_same(&words, code));
        words[all[0].start + 20] ^= 1;
        assert!(!is_same(&words, code) && !is_same(b"", code));
    }

    #[test]
    fn first_steps_are_taken_back() {
        let code = own_code().unwrap();
        let all = functions(code).unwrap();
        let old = VdsoCode { base: OLD, code };
        let pushes = all.iter().find(|f| code[f.start] == 0x55);
        let function = pushes.expect("a function that keeps %rbp");
        let start = OLD + function.start as u64;
        let inside = |at: u64| Registers { rip: at, rsp: 0x1000, rbp: 7, ..Default::default() };
        let mut regs = inside(start + 1);
        take_back(&mut regs, old, |_| Some(9)).unwrap();
        assert_eq!((regs.rip, regs.rsp, regs.rbp), (start, 0x1008, 7));
        for elsewhere in [start, start + 64, OLD - 1] {
            let mut regs = inside(elsewhere);
            take_back(&mut regs, old, |_| None).unwrap();
            assert_eq!(regs, inside(elsewhere));
        }
    }
}
