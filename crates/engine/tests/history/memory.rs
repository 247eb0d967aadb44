//! The memory of the tasks of a tree, as others see it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use torpor_tracee::{Mapping, STUB_SIZE, parse_maps};

pub const PAGE: usize = 4096;

/// The memory of a task at some moment: its mappings, and their pages as far as they can be
/// read. Guard pages cannot, nor pages behind the end of a file.
pub struct Memory {
    pub pid: i32,
    pub mappings: Vec<(Mapping, Vec<Page>)>,
}

/// A page, if it can be read. Those of zeros are one: most are.
pub type Page = Option<Rc<[u8; PAGE]>>;

impl Memory {
    /// That of a tree whose members all rest.
    pub fn of_tree(root: i32) -> Vec<Self> {
        tree(root).into_iter().map(Self::of_task).collect()
    }

    fn of_task(pid: i32) -> Self {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let zeros = Rc::new([0; PAGE]);
        let read = |mapping: Mapping| {
            let pages = read_pages(&memory, mapping.start..mapping.end, &zeros);
            (mapping, pages)
        };
        let is_wanted = |mapping: &Mapping| {
            // What the dump itself has mapped is gone before the task goes on. It is never here
            // in the arena, where a history may have made a mapping of its size.
            let is_stub = mapping.end - mapping.start == STUB_SIZE
                && mapping.inode == 0
                && !ARENA.contains(&mapping.start);
            !mapping.name.starts_with("[v") && !is_stub
        };
        Memory {
            pid,
            mappings: parse_maps(&maps).into_iter().filter(is_wanted).map(read).collect(),
        }
    }
}

/// Reads as much at once as can be read.
fn read_pages(memory: &File, range: Range<u64>, zeros: &Rc<[u8; PAGE]>) -> Vec<Page> {
    let mut buffer = vec![0; usize::try_from(range.end - range.start).unwrap()];
    let mut pages = Vec::new();
    while pages.len() * PAGE < buffer.len() {
        let done = pages.len() * PAGE;
        let n = memory.read_at(&mut buffer[done..], range.start + done as u64).unwrap_or(0);
        for page in buffer[done..done + n].chunks_exact(PAGE) {
            let is_zero = page == zeros.as_slice();
            let page = || Rc::new(page.try_into().unwrap());
            pages.push(Some(if is_zero { Rc::clone(zeros) } else { page() }));
        }
        if n < PAGE {
            pages.push(None);
        }
    }
    pages
}

/// The ids of all tasks of a tree, but for twins.
pub fn tree(root: i32) -> Vec<i32> {
    let (mut waiting, mut all) = (vec![root], Vec::new());
    while let Some(pid) = waiting.pop() {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap();
        let children = children.split_ascii_whitespace().map(|pid| pid.parse::<i32>().unwrap());
        waiting.extend(children.filter(|&child| !is_twin(child)));
        all.push(pid);
    }
    all
}

/// Waits until the tasks of a tree miss no pages any more: others could not read them before.
pub fn wait_for_pages(root: i32) {
    let misses = |pid: i32| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        maps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" um"))
    };
    while tree(root).into_iter().any(misses) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Whether a task is the copy of another one in a copy-on-write dump.
fn is_twin(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "torpor-twin\n"
}

/// Where histories take place; the rest of a task depends on its id and on chance.
const ARENA: Range<u64> = 0x1000_0000_0000..0x1000_0060_0000;

/// The pages of a task's arena.
type Arena = BTreeMap<u64, Page>;

/// What tells the histories of two trees apart, which are to be the same; their tasks are in no
/// order.
pub fn compare(found: &[Memory], expected: &[Memory]) -> Result<(), String> {
    let mut expected: Vec<Arena> = expected.iter().map(arena).collect();
    if found.len() != expected.len() {
        return Err(format!("{} tasks instead of {}", found.len(), expected.len()));
    }
    for found in found.iter().map(arena) {
        let differences = expected.iter().map(|expected| difference(&found, expected));
        match differences.enumerate().min_by_key(|(_, difference)| difference.clone()) {
            Some((at, None)) => drop(expected.swap_remove(at)),
            Some((_, Some((Reverse(at), what)))) => return Err(format!("{at:x}: {what}")),
            None => return Err("a task too many".to_owned()),
        }
    }
    Ok(())
}

fn arena(memory: &Memory) -> Arena {
    let mappings = memory.mappings.iter();
    let pages = mappings.flat_map(|(m, pages)| (m.start..).step_by(PAGE).zip(pages.clone()));
    pages.filter(|(address, _)| ARENA.contains(address)).collect()
}

/// The first difference between two arenas, behind all others.
fn difference(found: &Arena, expected: &Arena) -> Option<(Reverse<u64>, String)> {
    let mut addresses: Vec<u64> = found.keys().chain(expected.keys()).copied().collect();
    addresses.sort_unstable();
    let at = addresses.into_iter().find(|at| found.get(at) != expected.get(at))?;
    let page = |arena: &Arena| arena.get(&at).cloned().flatten();
    let bytes = page(found).into_iter().zip(page(expected)).next();
    let byte = bytes.and_then(|(found, expected)| (0..PAGE).find(|&i| found[i] != expected[i]));
    let byte = byte.unwrap_or(0);
    let word = |arena: &Arena| match arena.get(&at) {
        Some(Some(page)) => format!("{:x} at byte {byte}", page[byte]),
        Some(None) => "not readable".to_owned(),
        None => "not mapped".to_owned(),
    };
    Some((Reverse(at), format!("{} instead of {}", word(found), word(expected))))
}
