//! What the processor must be able to do.

use std::str::FromStr;

/// What the processor must be able to do (`--cpu-cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuCap {
    /// The floating point unit must do.
    pub fpu: bool,
    /// Every capability of the image must be there.
    pub cpu: bool,
    /// Every instruction of the image must be there.
    pub ins: bool,
}

impl CpuCap {
    /// Nothing is written or checked.
    pub const NONE: Self = Self { fpu: false, cpu: false, ins: false };
    /// Everything is.
    pub const ALL: Self = Self { fpu: true, cpu: true, ins: true };

    /// The bits that stand for something.
    pub const BITS: u32 = 7;

    /// From the bits of the RPC's `cpu_cap`: 1 FPU, 2 CPU, 4 instructions.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self { fpu: bits & 1 != 0, cpu: bits & 2 != 0, ins: bits & 4 != 0 }
    }
}

impl FromStr for CpuCap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cap = Self::NONE;
        for word in text.split(',') {
            let (name, on) = match word.strip_prefix('^') {
                Some(name) => (name, false),
                None => (word, true),
            };
            match name {
                "fpu" => cap.fpu = on,
                "cpu" => cap.cpu = on,
                "ins" => cap.ins = on,
                "all" => cap = if on { Self::ALL } else { Self::NONE },
                "none" => cap = if on { Self::NONE } else { Self::ALL },
                _ => return Err(format!("{name:?} is none of fpu, cpu, ins, all, none")),
            }
        }
        Ok(cap)
    }
}
