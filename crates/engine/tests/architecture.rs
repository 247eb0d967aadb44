//! The shape of the code, and that `docs/architecture.md` shows it.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[path = "architecture/images.rs"]
mod images;
#[path = "architecture/imports.rs"]
mod imports;
#[path = "architecture/left_out.rs"]
mod left_out;
#[path = "architecture/map.rs"]
mod map;
#[path = "architecture/public.rs"]
mod public;
#[path = "architecture/refusals.rs"]
mod refusals;
#[path = "architecture/sentences.rs"]
mod sentences;
#[path = "architecture/types.rs"]
mod types;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All text of files with source code below a directory.
fn sources(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let text = |path: PathBuf| match path.extension().and_then(|e| e.to_str()) {
        _ if path.is_dir() => sources(&path),
        Some("rs") => std::fs::read_to_string(path).unwrap(),
        _ => String::new(),
    };
    entries.map(text).collect()
}

/// The folders with crates, sorted.
fn crates() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("crates")).unwrap();
    let entries = entries.map(|entry| entry.unwrap()).filter(|entry| entry.path().is_dir());
    let mut all: Vec<String> =
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

/// The files of the engine, tests aside, and what they say.
fn files_of_engine() -> Vec<(String, String)> {
    files_of("engine")
}

/// What a file says before its tests, which others may use.
fn without_tests(text: &str) -> &str {
    let begins = ["", "pub(super) ", "pub(crate) "]
        .map(|shown| format!("#[cfg(test)]\n{shown}mod tests {{"));
    let ends = begins.iter().filter_map(|begin| text.find(begin));
    &text[..ends.min().unwrap_or(text.len())]
}

/// The files of a crate, tests aside, and what they say.
fn files_of(krate: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, found: &mut impl FnMut(&Path)) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found(&path) }
        }
    }
    let source = root().join("crates").join(krate).join("src");
    let mut all = Vec::new();
    walk(&source, &mut |path| {
        let short = path.strip_prefix(&source).unwrap().display().to_string();
        if !short.contains("test") {
            let text = std::fs::read_to_string(path).unwrap();
            all.push((short, without_tests(&text).to_owned()));
        }
    });
    all.sort();
    all
}

/// What nobody outside calls is no part of the engine's interface.
#[test]
fn modules_that_are_shown_are_used_from_outside() {
    let library = std::fs::read_to_string(root().join("crates/engine/src/lib.rs")).unwrap();
    let shown = |line: &'_ str| Some(line.strip_prefix("pub mod ")?.strip_suffix(';')?.to_owned());
    // But for what tests look at.
    let shown = library.lines().filter_map(shown).filter(|module| module != "inside");
    let shown: Vec<String> = shown.collect();
    assert!(shown.len() > 5, "{shown:?}");
    let others = crates().into_iter().filter(|krate| krate != "engine");
    let code: String =
        others.map(|krate| sources(&root().join("crates").join(krate).join("src"))).collect();
    let is_unused = |module: &&String| !code.contains(&format!("torpor_engine::{module}"));
    let unused: Vec<_> = shown.iter().filter(is_unused).collect();
    assert!(unused.is_empty(), "nobody outside uses these: {unused:?}");
}

/// The files with source code below a directory.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_code = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    let files = |path: PathBuf| match path.is_dir() {
        true => files_below(&path),
        false => Some(path).into_iter().filter(is_code).collect(),
    };
    entries.flat_map(files).collect()
}

/// What only its own crate calls is not public, as far as names tell.
#[test]
fn what_is_public_is_used_from_outside() {
    let library = |path: &Path| {
        let mut parts = path.iter().map(|part| part.to_str().unwrap());
        let (Some("crates"), Some(name), Some("src")) = (parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        let is_program = parts.next().is_some_and(|part| part == "main.rs" || part == "bin");
        (!is_program).then(|| name.to_owned())
    };
    let source = |path: PathBuf| {
        let file = path.strip_prefix(root()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        public::Source { file: file.display().to_string(), library: library(file), text }
    };
    let files = ["crates", "bench", "tests", "fuzz/src", "fuzz/fuzz_targets", "fuzz/tests"]
        .map(|dir| files_below(&root().join(dir)));
    let sources: Vec<_> = files.into_iter().flatten().map(source).collect();
    let all = public::all(&sources);
    assert!(all.len() > 1500, "{} names are public", all.len());
    let found: BTreeSet<&str> = all.iter().map(|(_, library, _)| *library).collect();
    // It is no library.
    let libraries = crates().into_iter().filter(|name| name != "protoc");
    assert!(libraries.eq(found), "what of a library is public was not found");
    let unused = public::unused(&sources);
    assert!(unused.is_empty(), "nobody outside of the crate uses these: {unused:#?}");
}

/// A call with typed arguments has no other form: a swapped argument does not compile.
#[test]
fn calls_that_have_typed_forms_have_no_others() {
    const TYPED: &str = " close dup3 fcntl ioctl mmap mprotect mremap munmap openat prctl ";
    let is_typed = |rest: &str| {
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
        TYPED.contains(&format!(" {name} "))
    };
    let is_raw = |text: &str| text.split("libc::SYS_").skip(1).any(is_typed);
    assert!(is_raw("(libc::SYS_close, [fd])") && !is_raw("libc::SYS_close_range"));
    let files = files_of_engine().into_iter().filter(|(_, text)| is_raw(text));
    let files: Vec<String> = files.map(|(file, _)| file).collect();
    assert!(files.is_empty(), "torpor_tracee::syscall has typed forms of calls in {files:?}");
}

/// The constants of the kernel that code defines by a number, by their names there.
fn kernel_constants(text: &str) -> impl Iterator<Item = &str> {
    const FAMILIES: &str =
        " F FUTEX IFLA IORING MADV MAP NFTA NLA NLM PR PTRACE SECCOMP SO SOCK TCP TFD UFFD UFFDIO ";
    text.lines().filter_map(|line| {
        let (_, constant) = line.trim_start().split_once("const ")?;
        let (name, value) = constant.split_once(": ")?;
        let (_, value) = value.split_once(" = ")?;
        let (family, _) = name.split_once('_')?;
        let is_number = value.starts_with(|c: char| c.is_ascii_digit());
        (is_number && FAMILIES.contains(&format!(" {family} "))).then_some(name)
    })
}

/// Who looks for a number of the kernel finds one, and not a second one that might differ.
#[test]
fn constants_of_the_kernel_are_written_once() {
    let text = "pub const F_GETSIG: i32 = 11;\n    const PR_A: u64 = libc::PR_B;\nconst F: u8 = 1;";
    assert!(kernel_constants(text).eq(["F_GETSIG"]));
    let mut written: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for krate in crates() {
        for (file, text) in files_of(&krate) {
            for name in kernel_constants(&text) {
                written.entry(name.to_owned()).or_default().push(format!("{krate}/{file}"));
            }
        }
    }
    assert!(written.len() > 20, "{} constants of the kernel", written.len());
    let twice: Vec<_> = written.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "constants of the kernel in several files: {twice:#?}");
}

/// The guardian runs when all else has gone wrong: it imports nothing that it undoes.
#[test]
fn the_guardian_knows_nothing_of_what_it_undoes() {
    let files = files_of_engine();
    let (_, text) = files.iter().find(|(file, _)| file == "guardian.rs").unwrap();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let used = code.flat_map(|line| line.split("crate::").skip(1));
    let used: BTreeSet<&str> = used.filter_map(|path| path.split("::").next()).collect();
    assert_eq!(used, BTreeSet::from(["error"]));
}

/// Who descends from whom is asked in one place.
#[test]
fn children_are_read_in_one_place() {
    for krate in crates().iter().filter(|krate| *krate != "kernel") {
        let code = sources(&root().join("crates").join(krate).join("src"));
        let reads = |line: &&str| line.contains("/children\"") || line.contains("(\"children\")");
        let found: Vec<_> = code.lines().filter(reads).collect();
        assert!(found.is_empty(), "{krate}: {found:?}");
    }
}
