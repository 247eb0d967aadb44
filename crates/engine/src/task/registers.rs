//! Registers of a thread, and the extended state (x87, SSE, AVX, AVX-512, keys).
//!
//! ptrace shows the extended state as an XSAVE image in the standard format: a
//! legacy area, a header that says which components are not in their initial state,
//! and the components, at offsets that the processor gives. The image of the
//! checkpoint has a field for each component instead, so that it fits another
//! processor whose offsets differ.

use torpor_images::proto::{
    ThreadInfoX86, UserDescT, UserX86CetEntry, UserX86FpregsEntry, UserX86RegsEntry,
    UserX86RegsMode, UserX86XsaveEntry,
};
use torpor_sys::ptrace::{Registers, SegmentDescriptor};
use torpor_sys::xsave::{HEADER, LEGACY, component};
use torpor_tracee::Tracee;

use crate::error::{Error, Result};

/// The result of translating; the error says what is in the way.
type Parsed<T> = std::result::Result<T, String>;

/// The components that the image has fields for, by their number in XCR0.
const X87: u32 = 0;
const SSE: u32 = 1;
const AVX: u32 = 2;
const BNDREGS: u32 = 3;
const BNDCSR: u32 = 4;
const OPMASK: u32 = 5;
const ZMM_UPPER: u32 = 6;
const HI16_ZMM: u32 = 7;
const PKRU: u32 = 9;
const KNOWN: u64 = 1 << X87
    | 1 << SSE
    | 1 << AVX
    | 1 << BNDREGS
    | 1 << BNDCSR
    | 1 << OPMASK
    | 1 << ZMM_UPPER
    | 1 << HI16_ZMM
    | 1 << PKRU;

/// What Linux gives every task, protection keys in use or not.
const DEFAULT_PKRU: u32 = 0x5555_5554;

/// Where the segments of a thread for 32-bit code are in the table of all
/// (`GDT_ENTRY_TLS_MIN` of asm/segment.h).
const FIRST_SEGMENT: u64 = 12;

/// Registers and extended state of a thread; `tid_address` is its `clear_tid_addr`, `is_32bit` says
/// of its process that it runs a 32-bit program.
///
/// # Errors
/// Gone; refused if a component is in use that the image has no field for.
pub(crate) fn dump(tracee: &mut Tracee, tid_address: u64, is_32bit: bool) -> Result<ThreadInfoX86> {
    let r = tracee.restartable_registers();
    let pid = tracee.pid();
    let fpregs = unpack(tracee.xstate()?, component).map_err(|what| {
        Error::refused(pid, format!("processor state ({what})"), "the image has no place for it")
    })?;
    let tls: Vec<UserDescT> = tracee.segments()?.into_iter().map(segment).collect();
    if !r.has_usual_code() {
        return Err(Error::refused(pid, format!("its code segment {:#x}", r.cs), "is its own"));
    }
    let gpregs = if is_32bit { general_of_32bit(&r) } else { general(&r) };
    Ok(ThreadInfoX86 { clear_tid_addr: tid_address, gpregs, fpregs, tls })
}

fn segment(segment: SegmentDescriptor) -> UserDescT {
    let bit = |n: u32| segment.flags >> n & 1 != 0;
    UserDescT {
        entry_number: segment.entry_number,
        base_addr: segment.base_addr,
        limit: segment.limit,
        seg_32bit: bit(0),
        contents_l: bit(1),
        contents_h: bit(2),
        read_exec_only: bit(3),
        limit_in_pages: bit(4),
        seg_not_present: bit(5),
        usable: bit(6),
    }
}

/// Where the segment that a thread's selector names begins: 32-bit code cannot set another base.
fn base_of(selector: u64, tls: &[UserDescT]) -> u64 {
    let number = selector >> 3;
    let entry = tls.iter().find(|entry| u64::from(entry.entry_number) == number);
    entry.filter(|_| number >= FIRST_SEGMENT).map_or(0, |entry| entry.base_addr.into())
}

/// The registers of 32-bit code. Above their 32 bits the kernel has what it left there.
fn general_of_32bit(r: &Registers) -> UserX86RegsEntry {
    let low = |value: u64| value & u64::from(u32::MAX);
    UserX86RegsEntry {
        bp: low(r.rbp),
        bx: low(r.rbx),
        ax: low(r.rax),
        cx: low(r.rcx),
        dx: low(r.rdx),
        si: low(r.rsi),
        di: low(r.rdi),
        orig_ax: low(r.orig_rax),
        ip: low(r.rip),
        sp: low(r.rsp),
        mode: Some(UserX86RegsMode::Compat.into()),
        ..general(r)
    }
}

fn general(r: &Registers) -> UserX86RegsEntry {
    UserX86RegsEntry {
        r15: r.r15,
        r14: r.r14,
        r13: r.r13,
        r12: r.r12,
        bp: r.rbp,
        bx: r.rbx,
        r11: r.r11,
        r10: r.r10,
        r9: r.r9,
        r8: r.r8,
        ax: r.rax,
        cx: r.rcx,
        dx: r.rdx,
        si: r.rsi,
        di: r.rdi,
        orig_ax: r.orig_rax,
        ip: r.rip,
        cs: r.cs,
        flags: r.eflags,
        sp: r.rsp,
        ss: r.ss,
        fs_base: r.fs_base,
        gs_base: r.gs_base,
        ds: r.ds,
        es: r.es,
        fs: r.fs,
        gs: r.gs,
        mode: Some(UserX86RegsMode::Native.into()),
    }
}

/// The registers of a thread, as its image has them: read once, and given to the thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadRegisters {
    /// The general ones.
    pub general: Registers,
    /// Its segments for 32-bit code.
    segments: Vec<SegmentDescriptor>,
    extended: ExtendedState,
}

impl ThreadRegisters {
    /// Reads them.
    ///
    /// # Errors
    /// A code segment that the kernel gives to no program; a field of a wrong size; state that has no field.
    pub fn read(info: &ThreadInfoX86) -> Parsed<Self> {
        let present = info.tls.iter().filter(|entry| !entry.seg_not_present);
        Ok(ThreadRegisters {
            general: registers(info)?,
            segments: present.map(descriptor).collect(),
            extended: ExtendedState::read(&info.fpregs)?,
        })
    }

    /// Gives a husk the segments that it lacks.
    ///
    /// # Errors
    /// Gone; if the kernel gives such a segment to nobody.
    pub(crate) fn restore_segments(&self, husk: &Tracee) -> Result<()> {
        for segment in &self.segments {
            husk.set_segment(segment)?;
        }
        Ok(())
    }

    /// The extended state to set, as an XSAVE image of the husk's own layout.
    ///
    /// # Errors
    /// If this processor lacks a component that was in use, or has it in another size.
    pub(crate) fn extended_for(&self, husk: &mut Tracee) -> Result<Vec<u8>> {
        let template = husk.xstate()?.to_vec();
        self.extended.pack(template, component).map_err(|why| Error::invalid("core", why))
    }
}

fn descriptor(entry: &UserDescT) -> SegmentDescriptor {
    let bits = [
        entry.seg_32bit,
        entry.contents_l,
        entry.contents_h,
        entry.read_exec_only,
        entry.limit_in_pages,
        entry.seg_not_present,
        entry.usable,
    ];
    let flags = bits.iter().rev().fold(0, |flags, &bit| flags << 1 | u32::from(bit));
    let UserDescT { entry_number, base_addr, limit, .. } = *entry;
    SegmentDescriptor { entry_number, base_addr, limit, flags }
}

/// The registers to set for what an image says.
fn registers(info: &ThreadInfoX86) -> Parsed<Registers> {
    let r = &info.gpregs;
    let (fs_base, gs_base) = match r.mode() {
        UserX86RegsMode::Native => (r.fs_base, r.gs_base),
        UserX86RegsMode::Compat => (base_of(r.fs, &info.tls), base_of(r.gs, &info.tls)),
    };
    let registers = Registers {
        r15: r.r15,
        r14: r.r14,
        r13: r.r13,
        r12: r.r12,
        rbp: r.bp,
        rbx: r.bx,
        r11: r.r11,
        r10: r.r10,
        r9: r.r9,
        r8: r.r8,
        rax: r.ax,
        rcx: r.cx,
        rdx: r.dx,
        rsi: r.si,
        rdi: r.di,
        // The dump has wound interrupted calls back: there is nothing to restart.
        orig_rax: u64::MAX,
        rip: r.ip,
        cs: r.cs,
        eflags: r.flags,
        rsp: r.sp,
        ss: r.ss,
        fs_base,
        gs_base,
        ds: r.ds,
        es: r.es,
        fs: r.fs,
        gs: r.gs,
    };
    match registers.has_usual_code() {
        true => Ok(registers),
        false => Err(format!("the code segment {:#x}", r.cs)),
    }
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn words32(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|c| word32(c, 0)).collect()
}

fn words64(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|c| word64(c, 0)).collect()
}

/// Takes an XSAVE image apart. The error says which component has no field.
fn unpack(state: &[u8], layout: impl Fn(u32) -> (usize, usize)) -> Parsed<UserX86FpregsEntry> {
    if state.len() < LEGACY {
        return Err(format!("{} bytes of it", state.len()));
    }
    let in_use = word64(state, LEGACY);
    if in_use & !KNOWN != 0 {
        return Err(format!("XSAVE components {:#x}", in_use & !KNOWN));
    }
    // Of a component that this processor does not have there is nothing to say.
    let part = |number: u32, len: usize| {
        let (size, offset) = layout(number);
        let mut bytes = vec![0u8; if size == 0 { 0 } else { len }];
        if size != 0 && offset >= LEGACY + HEADER && offset + len.min(size) <= state.len() {
            let len = len.min(size);
            bytes[..len].copy_from_slice(&state[offset..offset + len]);
        }
        bytes
    };
    let xsave = UserX86XsaveEntry {
        xstate_bv: in_use,
        ymmh_space: words32(&part(AVX, 256)),
        bndreg_state: words64(&part(BNDREGS, 64)),
        bndcsr_state: words64(&part(BNDCSR, 64)),
        opmask_reg: words64(&part(OPMASK, 64)),
        zmm_upper: words64(&part(ZMM_UPPER, 512)),
        hi16_zmm: words64(&part(HI16_ZMM, 1024)),
        pkru: words32(&part(PKRU, 8)),
        // Dumps of threads with a shadow stack are refused.
        cet: Some(UserX86CetEntry::default()),
    };
    // Intel SDM 10.5.1, layout of the x87 FPU and SSE state in 64-bit mode.
    let low = word32(state, 0);
    let high = word32(state, 4);
    Ok(UserX86FpregsEntry {
        cwd: low & 0xffff,
        swd: low >> 16,
        twd: high & 0xffff,
        fop: high >> 16,
        rip: word64(state, 8),
        rdp: word64(state, 16),
        mxcsr: word32(state, 24),
        mxcsr_mask: word32(state, 28),
        st_space: words32(&state[32..160]),
        xmm_space: words32(&state[160..416]),
        padding: vec![],
        xsave: (state.len() >= LEGACY + HEADER).then_some(xsave),
    })
}

/// The extended state of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ExtendedState {
    /// The control, status, tag and opcode words of the x87.
    words: [u16; 4],
    /// Its last instruction, and the data of that.
    last: [u64; 2],
    mxcsr: u32,
    x87: Vec<u8>,
    sse: Vec<u8>,
    /// The rest; nothing of a processor without XSAVE.
    components: Option<Components>,
}

/// Components of an XSAVE image.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Components {
    /// Those that are in use, a bit each.
    in_use: u64,
    /// Their bytes, by their numbers.
    bytes: Vec<(u32, Vec<u8>)>,
}

/// The components that have a field each, with the most bytes that they have and a name for people.
const PARTS: [(u32, usize, &str); 7] = [
    (AVX, 256, "AVX"),
    (BNDREGS, 64, "MPX"),
    (BNDCSR, 64, "MPX"),
    (OPMASK, 64, "AVX-512"),
    (ZMM_UPPER, 512, "AVX-512"),
    (HI16_ZMM, 1024, "AVX-512"),
    (PKRU, 8, "protection key"),
];

impl ExtendedState {
    fn read(entry: &UserX86FpregsEntry) -> Parsed<Self> {
        let half = |value: u32, what: &str| {
            u16::try_from(value).map_err(|_| format!("{value:#x} in the x87 {what} word"))
        };
        Ok(ExtendedState {
            words: [
                half(entry.cwd, "control")?,
                half(entry.swd, "status")?,
                half(entry.twd, "tag")?,
                half(entry.fop, "opcode")?,
            ],
            last: [entry.rip, entry.rdp],
            mxcsr: entry.mxcsr,
            x87: registers32(&entry.st_space, 32, "x87")?,
            sse: registers32(&entry.xmm_space, 64, "SSE")?,
            components: entry.xsave.as_ref().map(Components::read).transpose()?,
        })
    }

    /// Puts an XSAVE image together, on top of `state`, which is one of this processor.
    fn pack(&self, mut state: Vec<u8>, layout: impl Fn(u32) -> (usize, usize)) -> Parsed<Vec<u8>> {
        if state.len() < LEGACY + HEADER {
            return Err("this processor has no XSAVE".to_owned());
        }
        // What the kernel keeps behind the registers (48 bytes) and the header stay.
        for (i, value) in self.words.into_iter().enumerate() {
            state[2 * i..2 * i + 2].copy_from_slice(&value.to_le_bytes());
        }
        state[8..16].copy_from_slice(&self.last[0].to_le_bytes());
        state[16..24].copy_from_slice(&self.last[1].to_le_bytes());
        // The kernel refuses reserved bits; which those are is a matter of this processor.
        let valid = match word32(&state, 28) {
            0 => 0xffbf,
            mask => mask,
        };
        if self.mxcsr & !valid != 0 {
            return Err(format!("MXCSR {:#x} has bits that this processor lacks", self.mxcsr));
        }
        state[24..28].copy_from_slice(&self.mxcsr.to_le_bytes());
        state[32..160].copy_from_slice(&self.x87);
        state[160..416].copy_from_slice(&self.sse);
        let in_use = match &self.components {
            None => 1 << X87 | 1 << SSE,
            Some(components) => components.put(&mut state, layout)?,
        };
        state[LEGACY..LEGACY + 8].copy_from_slice(&in_use.to_le_bytes());
        Ok(state)
    }
}

impl Components {
    fn read(xsave: &UserX86XsaveEntry) -> Parsed<Self> {
        if xsave.cet.as_ref().is_some_and(|cet| cet.cet != 0) {
            return Err("a shadow stack, which is not supported".to_owned());
        }
        let in_use = xsave.xstate_bv;
        if in_use & !KNOWN != 0 {
            return Err(format!("XSAVE components {in_use:#x}"));
        }
        let fields = [
            from32(&xsave.ymmh_space),
            from64(&xsave.bndreg_state),
            from64(&xsave.bndcsr_state),
            from64(&xsave.opmask_reg),
            from64(&xsave.zmm_upper),
            from64(&xsave.hi16_zmm),
            from32(&xsave.pkru),
        ];
        let used = PARTS.iter().zip(fields).filter(|((number, ..), _)| in_use >> number & 1 != 0);
        let part = |(&(number, most, name), bytes): (&(u32, usize, &str), Vec<u8>)| {
            let len = bytes.len();
            match len > most {
                true => Err(format!("{len} bytes of {name} state, {most} expected")),
                false => Ok((number, bytes)),
            }
        };
        Ok(Components { in_use, bytes: used.map(part).collect::<Parsed<_>>()? })
    }

    /// Puts them where this processor has them. Returns those that are in use then.
    fn put(&self, state: &mut [u8], layout: impl Fn(u32) -> (usize, usize)) -> Parsed<u64> {
        let mut in_use = self.in_use;
        for (number, bytes) in &self.bytes {
            let (size, offset) = layout(*number);
            let name = PARTS.iter().find(|(part, ..)| part == number).map_or("", |part| part.2);
            if size == 0 || offset + size > state.len() {
                if *number == PKRU && word32(bytes, 0) == DEFAULT_PKRU {
                    in_use &= !(1 << PKRU);
                    continue;
                }
                return Err(format!("{name} state, which this processor does not have"));
            }
            if bytes.is_empty() || bytes.len() > size {
                return Err(format!("{} bytes of {name} state, {size} expected", bytes.len()));
            }
            state[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        Ok(in_use)
    }
}

/// The bytes of `len` registers of 32 bits.
fn registers32(words: &[u32], len: usize, name: &str) -> Parsed<Vec<u8>> {
    match words.len() == len {
        true => Ok(from32(words)),
        false => Err(format!("{} words of {name} registers, {len} expected", words.len())),
    }
}

fn from32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn from64(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Sizes and offsets of two processors.
    fn intel(number: u32) -> (usize, usize) {
        match number {
            AVX => (256, 576),
            OPMASK => (64, 832),
            ZMM_UPPER => (512, 896),
            HI16_ZMM => (1024, 1408),
            PKRU => (8, 2432),
            _ => (0, 0),
        }
    }

    fn amd(number: u32) -> (usize, usize) {
        match number {
            AVX => (256, 576),
            PKRU => (8, 832),
            _ => (0, 0),
        }
    }

    fn filled(len: usize, in_use: u64) -> Vec<u8> {
        let mut state: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
        state[24..32].copy_from_slice(&[0x80, 0x1f, 0, 0, 0xff, 0xff, 0, 0]);
        state[LEGACY..LEGACY + HEADER].fill(0);
        state[LEGACY..LEGACY + 8].copy_from_slice(&in_use.to_le_bytes());
        state
    }

    fn pack(
        entry: &UserX86FpregsEntry,
        state: Vec<u8>,
        layout: impl Fn(u32) -> (usize, usize),
    ) -> Parsed<Vec<u8>> {
        ExtendedState::read(entry)?.pack(state, layout)
    }

    fn blank(len: usize) -> Vec<u8> {
        let mut state = vec![0; len];
        state[28..32].copy_from_slice(&[0xff, 0xff, 0, 0]);
        state
    }

    #[test]
    fn everything_comes_back_on_the_same_processor() {
        let state = filled(2440, KNOWN & !(1 << BNDREGS | 1 << BNDCSR));
        let entry = unpack(&state, intel).unwrap();
        let again = pack(&entry, blank(2440), intel).unwrap();
        assert_eq!(state[..416], again[..416]);
        assert_eq!(state[LEGACY..LEGACY + HEADER], again[LEGACY..LEGACY + HEADER]);
        for number in [AVX, OPMASK, ZMM_UPPER, HI16_ZMM, PKRU] {
            let (size, at) = intel(number);
            assert_eq!(state[at..at + size], again[at..at + size], "component {number}");
        }
    }

    #[test]
    fn components_move_to_where_another_processor_has_them() {
        let mut state = filled(2440, 1 << X87 | 1 << SSE | 1 << AVX | 1 << PKRU);
        state[2432..2440].copy_from_slice(&[1, 2, 3, 4, 0, 0, 0, 0]);
        let entry = unpack(&state, intel).unwrap();
        let moved = pack(&entry, blank(840), amd).unwrap();
        assert_eq!(moved[832..836], [1, 2, 3, 4]);
        assert_eq!(moved[576..832], state[576..832]);
    }

    #[test]
    fn what_a_processor_lacks_is_refused() {
        let entry = unpack(&filled(2440, 1 << OPMASK), intel).unwrap();
        assert!(pack(&entry, blank(840), amd).unwrap_err().contains("AVX-512"));
        // Unused, it does not matter.
        let entry = unpack(&filled(2440, 1 << AVX), intel).unwrap();
        pack(&entry, blank(840), amd).unwrap();
        assert!(unpack(&filled(2440, 1 << 18), intel).unwrap_err().contains("0x40000"));
    }

    #[test]
    fn fields_of_a_wrong_size_are_refused() {
        let good = unpack(&filled(2440, 1 << AVX), intel).unwrap();
        let mut bad = good.clone();
        bad.xmm_space.pop();
        assert!(pack(&bad, blank(2440), intel).is_err());
        let mut bad = good.clone();
        bad.xsave.as_mut().unwrap().ymmh_space.extend([0; 64]);
        assert!(pack(&bad, blank(2440), intel).is_err());
        let mut bad = good;
        bad.cwd = 0x10000;
        assert!(pack(&bad, blank(2440), intel).is_err());
    }
}
