//! What the processors of this machine can do, as far as programs come to depend on it.

use std::collections::BTreeSet;
use std::fs;

/// The instructions that a program finds once and then counts on, by the kernel's names for them
/// (arch/x86/include/asm/cpufeatures.h; arch/arm64/kernel/cpuinfo.c): those that a restore compares, if it is told
/// nothing else. The other words are of the system, or about speed.
const INSTRUCTIONS: &[&str] = &[
    "fpu",
    "tsc",
    "cx8",
    "cmov",
    "clflush",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "syscall",
    "mmxext",
    "rdtscp",
    "lm",
    "3dnowext",
    "3dnow",
    "pni",
    "pclmulqdq",
    "ssse3",
    "fma",
    "cx16",
    "sse4_1",
    "sse4_2",
    "movbe",
    "popcnt",
    "aes",
    "xsave",
    "f16c",
    "rdrand",
    "lahf_lm",
    "abm",
    "sse4a",
    "misalignsse",
    "3dnowprefetch",
    "xop",
    "fma4",
    "tbm",
    "fsgsbase",
    "bmi1",
    "hle",
    "bmi2",
    "rtm",
    "rdseed",
    "adx",
    "clflushopt",
    "clwb",
    "sha_ni",
    "xsaveopt",
    "xsavec",
    "xgetbv1",
    "waitpkg",
    "gfni",
    "vaes",
    "vpclmulqdq",
    "rdpid",
    "cldemote",
    "movdiri",
    "movdir64b",
    "serialize",
    "asimd",
    "atomics",
];

/// What the names of many others begin with.
const FAMILIES: &[&str] = &["avx", "amx"];

/// The instructions that programs on this machine may use, as the kernel names them; none where it does not say.
#[must_use]
pub fn instructions() -> BTreeSet<String> {
    named(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Those that `cpuinfo` names of the first processor: all have the same.
fn named(cpuinfo: &str) -> BTreeSet<String> {
    let mut lines = cpuinfo.lines();
    let line = lines.find(|line| line.starts_with("flags") || line.starts_with("Features"));
    let words = line.and_then(|line| line.split_once(':')).map_or("", |(_, words)| words);
    words.split_whitespace().filter(|word| is_instruction(word)).map(str::to_owned).collect()
}

fn is_instruction(word: &str) -> bool {
    INSTRUCTIONS.contains(&word) || FAMILIES.iter().any(|start| word.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_told_from_other_words() {
        let text = "processor\t: 0\nflags\t\t: fpu vme sse2 ht avx512f amx_tile erms hypervisor\n\
                    processor\t: 1\nflags\t\t: fpu aes\n";
        assert_eq!(Vec::from_iter(named(text)), ["amx_tile", "avx512f", "fpu", "sse2"]);
        assert!(named("").is_empty() && named("flags").is_empty());
        let arm = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm atomics\n";
        assert_eq!(Vec::from_iter(named(arm)), ["asimd", "atomics"]);
    }
}
