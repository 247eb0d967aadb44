//! Where in the kernel's structures what is: the types that it describes itself (BTF,
//! `/sys/kernel/btf/vmlinux`).

/// Kinds of types (`BTF_KIND_*` of linux/btf.h).
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Those that stand for another type: typedefs, qualifiers, and tags.
const NAMES: [u32; 5] = [8, 9, 10, 11, 18];
/// What the file begins with.
const MAGIC: u16 = 0xeb9f;
/// How many names for a type may follow each other.
const DEPTH: usize = 32;

/// The types of a kernel.
#[derive(Debug)]
pub struct KernelTypes {
    bytes: Vec<u8>,
    /// Where each type is described; the first one is none.
    places: Vec<usize>,
    /// Where structures that have members are.
    structures: Vec<usize>,
    /// Where their names are.
    names: usize,
}

/// Where in a structure a member is, and how long it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// In bytes from its begin.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
}

/// What describes a type: the place of its name, its kind, how many parts it has, whether they are of
/// bits, its size or the type that it is of, and where its parts are described.
#[derive(Debug, Clone, Copy)]
struct Described {
    name: usize,
    kind: u32,
    parts: usize,
    of_bits: bool,
    size_or_type: u32,
    rest: usize,
}

impl KernelTypes {
    /// Those of the running kernel, if it describes them.
    #[must_use]
    pub fn of_this_kernel() -> Option<Self> {
        Self::parse(std::fs::read("/sys/kernel/btf/vmlinux").ok()?)
    }

    /// Those that a file describes, if it does.
    #[must_use]
    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        let number = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let place = |at| usize::try_from(number(at)?).ok();
        if u16::from_ne_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        let begin = place(4)?;
        let (types, length) = (begin.checked_add(place(8)?)?, place(12)?);
        let names = begin.checked_add(place(16)?)?;
        let (places, structures) = (vec![usize::MAX], Vec::new());
        let mut all = KernelTypes { bytes, places, structures, names };
        let mut at = types;
        while at < types.checked_add(length)? {
            let described = all.read(at)?;
            all.places.push(at);
            if described.kind == STRUCT && described.parts > 0 {
                all.structures.push(at);
            }
            at = described.rest.checked_add(length_of_parts(described.kind, described.parts)?)?;
        }
        Some(all)
    }

    /// The member of a structure that a path of names leads to, as `file_table`, `data`, `nr`. Those in
    /// structures and unions without a name are members of what these are in. Parts of the kernel may have structures
    /// of one name: those that have such a member must all have it at the same place.
    #[must_use]
    pub fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
        let mut found = self.named(structure).filter_map(|of| self.member_of(of, path));
        let first = found.next()?;
        found.all(|other| other == first).then_some(first)
    }

    /// The member of a structure that a path of names leads to.
    fn member_of(&self, mut of: Described, path: &[&str]) -> Option<Member> {
        let mut offset = 0;
        for name in path {
            let (bits, kind) = self.find(of, name, DEPTH)?;
            offset += bits.is_multiple_of(8).then_some(bits / 8)?;
            of = self.resolve(kind)?;
        }
        Some(Member { offset, size: self.size(of, DEPTH)? })
    }

    fn number(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*self.bytes.get(at..)?.first_chunk()?))
    }

    fn read(&self, at: usize) -> Option<Described> {
        let (name, info) = (self.number(at)?, self.number(at + 4)?);
        Some(Described {
            name: usize::try_from(name).ok()?,
            kind: info >> 24 & 0x1f,
            parts: usize::try_from(info & 0xffff).ok()?,
            of_bits: info >> 31 != 0,
            size_or_type: self.number(at + 8)?,
            rest: at + 12,
        })
    }

    /// The description of a type by its number.
    fn get(&self, number: u32) -> Option<Described> {
        self.read(*self.places.get(usize::try_from(number).ok()?)?)
    }

    /// Whether a name is this one.
    fn is_named(&self, name: usize, wanted: &str) -> bool {
        let text = self.names.checked_add(name).and_then(|at| self.bytes.get(at..));
        let rest = text.and_then(|text| text.strip_prefix(wanted.as_bytes()));
        rest.and_then(<[u8]>::first) == Some(&0)
    }

    /// The structures of a name.
    fn named(&self, name: &str) -> impl Iterator<Item = Described> {
        let all = self.structures.iter().filter_map(|&at| self.read(at));
        all.filter(move |of| self.is_named(of.name, name))
    }

    /// The type that others are names for.
    fn resolve(&self, mut number: u32) -> Option<Described> {
        for _ in 0..DEPTH {
            let of = self.get(number)?;
            if !NAMES.contains(&of.kind) {
                return Some(of);
            }
            number = of.size_or_type;
        }
        None
    }

    /// In which bit of a structure a member begins, and its type. None of some bits only.
    fn find(&self, of: Described, wanted: &str, depth: usize) -> Option<(u64, u32)> {
        if of.kind != STRUCT && of.kind != UNION {
            return None;
        }
        for part in 0..of.parts {
            let at = of.rest + part * 12;
            let (name, kind, place) =
                (self.number(at)?, self.number(at + 4)?, self.number(at + 8)?);
            let (length, bit) =
                if of.of_bits { (place >> 24, place & 0xff_ffff) } else { (0, place) };
            let bit = u64::from(bit);
            if name != 0 {
                match self.is_named(usize::try_from(name).ok()?, wanted) {
                    true => return (length == 0).then_some((bit, kind)),
                    false => continue,
                }
            }
            let inner = depth
                .checked_sub(1)
                .and_then(|depth| self.find(self.resolve(kind)?, wanted, depth));
            if let Some((inside, kind)) = inner {
                return Some((bit + inside, kind));
            }
        }
        None
    }

    fn size(&self, of: Described, depth: usize) -> Option<u64> {
        match of.kind {
            POINTER => Some(8),
            ARRAY => {
                let (element, count) = (self.number(of.rest)?, self.number(of.rest + 8)?);
                let element = self.size(self.resolve(element)?, depth.checked_sub(1)?)?;
                element.checked_mul(count.into())
            }
            _ => Some(of.size_or_type.into()),
        }
    }
}

/// How many bytes describe the parts of a type of a kind.
fn length_of_parts(kind: u32, parts: usize) -> Option<usize> {
    Some(match kind {
        // Numbers, variables, and tags of declarations.
        1 | 14 | 17 => 4,
        ARRAY => 12,
        // Structures, unions, sections of data, and enumerations of 64 bits.
        STRUCT | UNION | 15 | 19 => 12 * parts,
        // Enumerations, and what functions take.
        6 | 13 => 8 * parts,
        POINTER | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct whole { int first; union { volatile word second; }; struct pair { int a, b[3]; } third; int bits: 3; }`,
    /// and two of one name: `struct twin { int a, b; }` and `struct twin { int a, first, b; }`.
    fn file() -> Vec<u8> {
        const NAMES: &str = "\0int\0whole\0first\0second\0pair\0a\0b\0third\0bits\0word\0twin\0";
        let name = |text: &str| {
            let at = NAMES.find(&format!("\0{text}\0"));
            at.map_or(0, |at| u32::try_from(at).unwrap() + 1)
        };
        let info = |kind: u32, parts: u32| kind << 24 | parts;
        let types = [
            // 1: int, 2: word, 3: volatile word
            vec![name("int"), info(1, 0), 4, 32],
            vec![name("word"), info(8, 0), 1],
            vec![0, info(9, 0), 2],
            // 4: the union, 5: int[3], 6: pair
            vec![0, info(5, 1), 4, name("second"), 3, 0],
            vec![0, info(3, 0), 0, 1, 1, 3],
            vec![name("pair"), info(4, 2), 16, name("a"), 1, 0, name("b"), 5, 32],
            // 7: whole
            [
                vec![name("whole"), info(4, 4) | 1 << 31, 28, name("first"), 1, 0, 0, 4, 32],
                vec![name("third"), 6, 64, name("bits"), 1, 192 | 3 << 24],
            ]
            .concat(),
            // 8 and 9: twin
            vec![name("twin"), info(4, 2), 8, name("a"), 1, 0, name("b"), 1, 32],
            vec![
                name("twin"),
                info(4, 3),
                12,
                name("a"),
                1,
                0,
                name("first"),
                1,
                32,
                name("b"),
                1,
                64,
            ],
        ]
        .concat();
        let [length, names] = [types.len() * 4, NAMES.len()].map(|n| u32::try_from(n).unwrap());
        let head = [u32::from(MAGIC) | 1 << 16, 24, 0, length, length, names];
        let words = head.iter().chain(&types).flat_map(|word| word.to_ne_bytes());
        words.chain(NAMES.bytes()).collect()
    }

    #[test]
    fn members_are_found_by_their_names() {
        let types = KernelTypes::parse(file()).unwrap();
        let member = |path: &[&str]| types.member("whole", path).map(|m| (m.offset, m.size));
        assert_eq!(member(&["first"]), Some((0, 4)));
        assert_eq!(member(&["second"]), Some((4, 4)));
        assert_eq!(member(&["third"]), Some((8, 16)));
        assert_eq!(member(&["third", "b"]), Some((12, 12)));
        // Some bits, a part of a number, and what is not there.
        assert_eq!(member(&["bits"]), None);
        assert_eq!(member(&["first", "a"]), None);
        assert_eq!(member(&["third", "c"]), None);
        assert_eq!(types.member("hole", &["first"]), None);
    }

    #[test]
    fn structures_of_one_name_must_agree() {
        let types = KernelTypes::parse(file()).unwrap();
        let member = |name: &str| types.member("twin", &[name]).map(|m| (m.offset, m.size));
        assert_eq!(member("a"), Some((0, 4)));
        // One of them has it.
        assert_eq!(member("first"), Some((4, 4)));
        assert_eq!(member("b"), None);
    }

    #[test]
    fn a_file_that_is_cut_describes_nothing_or_less() {
        let whole = file();
        for length in 0..whole.len() {
            if let Some(types) = KernelTypes::parse(whole[..length].to_vec()) {
                assert_eq!(types.member("whole", &["third", "c"]), None);
            }
        }
        assert!(KernelTypes::parse(vec![0; 64]).is_none());
    }

    #[test]
    fn this_kernel_describes_its_structures() {
        let Some(types) = KernelTypes::of_this_kernel() else {
            println!("left out: this_kernel_describes_its_structures (it has no BTF)");
            return;
        };
        let files = types.member("task_struct", &["files"]).unwrap();
        assert_eq!(files.size, 8);
        assert_eq!(types.member("file", &["private_data"]).unwrap().size, 8);
    }
}
