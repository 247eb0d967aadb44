//! `docs/task-state.md` has a verdict for each field that this kernel keeps for a task, as its
//! description of its own types (BTF) tells.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};

const VERDICTS: [&str; 5] = ["kept", "refused", "warned", "anew", "kernel"];
const STRUCTURES: [&str; 4] = ["task_struct", "mm_struct", "signal_struct", "cred"];
/// The kernel that the list is of.
const RELEASE: &str = "6.18.";

/// A type of the description: its kind, the offset of its name, its size or the type it is of, and
/// its members: offset of the name, and type.
struct Type {
    kind: u32,
    name: usize,
    of: usize,
    members: Vec<(usize, usize)>,
}

/// The kernel's description of its types (Documentation/bpf/btf.rst).
struct Btf {
    types: Vec<Type>,
    strings: Vec<u8>,
}

impl Btf {
    const STRUCT: u32 = 4;
    const UNION: u32 = 5;

    fn parse(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let at = |n: usize| usize::try_from(word(n)).unwrap();
        let (start, types_len) = (at(4) + at(8), at(12));
        let strings = at(4) + at(16);
        let strings = bytes[strings..strings + at(20)].to_vec();
        let mut types = vec![Type { kind: 0, name: 0, of: 0, members: Vec::new() }];
        let mut place = start;
        while place < start + types_len {
            let (kind, count) = (word(place + 4) >> 24 & 31, at(place + 4) & 0xffff);
            // What follows a type: a fixed part, or a part for each of its members.
            let (fixed, each) = match kind {
                1 | 14 | 17 => (4, 0),
                3 => (12, 0),
                Self::STRUCT | Self::UNION | 15 | 19 => (0, 12),
                6 | 13 => (0, 8),
                _ => (0, 0),
            };
            let members = match kind {
                Self::STRUCT | Self::UNION => {
                    (0..count).map(|n| place + 12 + 12 * n).map(|m| (at(m), at(m + 4))).collect()
                }
                _ => Vec::new(),
            };
            types.push(Type { kind, name: at(place), of: at(place + 8), members });
            place += 12 + fixed + each * count;
        }
        Btf { types, strings }
    }

    fn text(&self, at: usize) -> &str {
        let rest = &self.strings[at..];
        std::str::from_utf8(rest.split(|&b| b == 0).next().unwrap()).unwrap()
    }

    /// The names of the members of a type, those of members without a name among them.
    fn members(&self, of: usize) -> Vec<&str> {
        let mut names = Vec::new();
        for &(name, mut inner) in &self.types[of].members {
            if !self.text(name).is_empty() {
                names.push(self.text(name));
                continue;
            }
            // Behind names and qualifiers.
            while (8..=11).contains(&self.types[inner].kind) {
                inner = self.types[inner].of;
            }
            names.extend(self.members(inner));
        }
        names
    }

    fn fields(&self, structure: &str) -> BTreeSet<&str> {
        let is = |t: &Type| t.kind == Self::STRUCT && self.text(t.name) == structure;
        let of = self.types.iter().position(is).expect("the kernel has such a structure");
        self.members(of).into_iter().collect()
    }
}

/// The fields of each structure in the document, all of them with a verdict.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/task-state.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut structure = None;
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            structure = Some(title.trim_matches('`').to_owned());
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (Some(structure), ["", fields, verdict, _, ""]) = (&structure, &cells[..]) else {
            continue;
        };
        if !fields.starts_with('`') {
            continue;
        }
        assert!(VERDICTS.contains(verdict), "{verdict:?} is no verdict: {line}");
        for field in fields.split_whitespace().map(|field| field.trim_matches('`')) {
            let list = all.entry(structure.clone()).or_default();
            assert!(list.insert(field.to_owned()), "{structure}.{field} is there twice");
        }
    }
    all
}

#[test]
fn each_field_has_a_verdict() {
    let documented = documented();
    let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
        println!("each_field_has_a_verdict is left out: the kernel does not describe its types");
        return;
    };
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let kernel = Btf::parse(&bytes);
    for structure in STRUCTURES {
        let known = &documented[structure];
        let fields = kernel.fields(structure);
        assert!(fields.len() > 20, "{structure}: {fields:?}");
        let missing: Vec<_> = fields.iter().filter(|field| !known.contains(**field)).collect();
        if release.starts_with(RELEASE) {
            assert!(missing.is_empty(), "no verdict for {missing:?} of {structure}");
        } else {
            println!("not known of {structure} in Linux {}: {missing:?}", release.trim());
        }
    }
}
