//! `docs/architecture.md` names what there is.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[path = "architecture/imports.rs"]
mod imports;
#[path = "architecture/public.rs"]
mod public;
#[path = "architecture/refusals.rs"]
mod refusals;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    std::fs::read_to_string(root().join("docs/architecture.md")).unwrap()
}

/// What stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
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

#[test]
fn every_crate_is_on_the_map_and_none_besides() {
    let page = page();
    let map = page.split("## Crates").nth(1).unwrap().split("Two shapes").next().unwrap();
    let named = |line: &str| {
        let word = line.trim_start_matches([' ', '|', '+', '-']).split_whitespace().next()?;
        Some(word.to_owned())
    };
    let drawn = map.lines().filter(|line| line.starts_with("    "));
    let mut named: Vec<String> = drawn.filter_map(named).collect();
    named.sort();
    assert_eq!(named, crates());
}

/// The crates of this workspace that a crate needs to be built, tests aside.
fn needed_by(krate: &str) -> Vec<String> {
    let manifest = root().join("crates").join(krate).join("Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    let needed = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let needed = needed.split("\n[").next().unwrap();
    let name = |line: &str| Some(line.strip_prefix("torpor-")?.split_once('.')?.0.to_owned());
    needed.lines().filter_map(name).collect()
}

/// Those that are drawn beside each other: what they have of each other is in their lines.
#[test]
fn siblings_on_the_map_say_what_they_use_of_each_other() {
    let siblings = ["migrate", "queue", "snapshot", "benchmark", "kubernetes"];
    let page = page();
    for krate in siblings {
        let begin = format!("     +-- {krate} ");
        let line = page.lines().find(|line| line.starts_with(&begin)).expect(krate);
        let used = line.split_once("; uses ").map_or("", |(_, used)| used);
        let is_used = |sibling: &&str| used.contains(&format!(" of {sibling}"));
        let said: Vec<&str> = siblings.into_iter().filter(is_used).collect();
        let needed = needed_by(krate);
        let needed = siblings.into_iter().filter(|sibling| needed.iter().any(|n| n == sibling));
        assert_eq!(said, needed.collect::<Vec<_>>(), "{krate}");
    }
}

#[test]
fn the_readme_lists_every_crate_and_none_besides() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let row = |line: &str| Some(line.strip_prefix("| `crates/")?.split_once('`')?.0.to_owned());
    let mut listed: Vec<String> = readme.lines().filter_map(row).collect();
    listed.sort();
    assert_eq!(listed, crates());
}

#[test]
fn files_that_are_named_exist() {
    let page = page();
    let source = root().join("crates/engine/src");
    let files: Vec<&str> = quoted(&page).into_iter().filter(|name| name.ends_with(".rs")).collect();
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let path = if file.starts_with("crates/") { root().join(file) } else { source.join(file) };
        assert!(path.is_file(), "{file}");
    }
}

/// The text of each section on errors, in one line.
fn sections_on_errors(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let behind = lines.split(|line| *line == "/// # Errors").skip(1);
    let text = |rest: &[&str]| {
        let section = rest.iter().map_while(|line| line.strip_prefix("/// "));
        section.collect::<Vec<_>>().join(" ")
    };
    behind.map(text).collect()
}

/// Whether a section begins with nothing but that it fails, whatever is behind that: "If it cannot be made; it is gone then."
fn says_that_it_fails(section: &str) -> bool {
    let begin = section.split([';', ':']).next().unwrap().trim_end_matches('.');
    let denies = |words: &[&str]| words.iter().any(|word| ["cannot", "not"].contains(word));
    let mut parts = begin.split(", ").map(|part| part.split(' ').collect::<Vec<_>>());
    let first = parts.next().unwrap();
    let of_it = matches!(first.as_slice(), ["If", "it" | "they" | "that" | "this" | "one", ..]);
    let adds_nothing =
        |part: Vec<&str>| part[0] == "or" && (part.len() < 3 || part.len() == 3 && denies(&part));
    of_it && first.len() <= 5 && denies(&first) && parts.all(adds_nothing)
}

/// Whether a section says what the error looks like, or whose it is, and not when there is one: "A sentence that names it."
fn says_what_it_is(section: &str) -> bool {
    const BEGINS: [&str; 6] =
        ["A sentence", "A message", "Which ", "Whatever", "The first one", "The first of them"];
    let words = section.split([' ', ';', ',', '.']).take(4);
    let words: Vec<&str> = words.collect();
    let of_others = matches!(words.as_slice(), ["What", "the", _, "says" | "said"]);
    of_others || BEGINS.iter().any(|begin| section.starts_with(begin))
}

#[test]
fn sections_that_say_little_are_known() {
    for little in [
        "If it cannot be made.",
        "If it cannot; the sentence says why.",
        "If that cannot be, or must not.",
        "If it cannot be restored: all is then as before.",
    ] {
        assert!(says_that_it_fails(little), "{little}");
    }
    for little in ["Whatever keeps it here.", "What the daemon said, or that there is none."] {
        assert!(says_what_it_is(little), "{little}");
    }
    for much in ["If it cannot be read, or is damaged.", "If the file cannot be read; a device."] {
        assert!(!says_that_it_fails(much) && !says_what_it_is(much), "{much}");
    }
}

/// A caller wants to know what can happen, and when. That the kernel may say no, or that images
/// may be wrong, is true of each of them.
#[test]
fn sections_on_errors_say_which() {
    const VAGUE: [&str; 10] = [
        "the kernel's",
        "the images'",
        "the image file's",
        "the image files'",
        "the file's",
        "the connection's",
        "the database's",
        "contradictions in the images",
        "if it cannot be restored",
        "whatever the engine meets",
    ];
    let sections = sections_on_errors(&sources(&root().join("crates")));
    assert!(sections.len() > 1000, "there are {} sections on errors", sections.len());
    let is_vague = |section: &&String| {
        let section = section.to_lowercase();
        let mut parts = section.split([';', '.', ',']);
        parts.any(|part| VAGUE.iter().any(|vague| part.ends_with(vague)))
    };
    // Or nothing but a number of the kernel's, or a word.
    let is_bare = |section: &&String| {
        let bare =
            ["gone.", "damaged images.", "a damaged image.", "why not.", "the one that was there."];
        let number = section.strip_prefix("`E").and_then(|rest| rest.strip_suffix("`."));
        bare.contains(&section.to_lowercase().as_str())
            || number.is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_uppercase()))
    };
    let says_little = |s: &&String| {
        is_vague(s) || is_bare(s) || says_that_it_fails(s.as_str()) || says_what_it_is(s.as_str())
    };
    let vague: Vec<_> = sections.iter().filter(says_little).collect();
    assert!(vague.is_empty(), "sections on errors that say neither which nor when: {vague:#?}");
}

/// Whether a section is a manual page's name only: `See open(2).`
fn is_manual_page(section: &str) -> bool {
    let page = section.strip_prefix("See ").and_then(|rest| rest.strip_suffix(")."));
    let named = page.and_then(|page| page.split_once('('));
    named.is_some_and(|(name, chapter)| {
        !name.contains(' ') && chapter.bytes().all(|c| c.is_ascii_digit())
    })
}

/// A system call in Rust's clothes fails as its manual page says. All else says what can happen here.
#[test]
fn only_system_calls_leave_their_errors_to_manual_pages() {
    assert!(is_manual_page("See open(2)."));
    assert!(!is_manual_page("See [`Pages::load`]."));
    assert!(!is_manual_page("See open(2); if nobody is there."));
    let of = |krate: &str| sections_on_errors(&sources(&root().join("crates").join(krate)));
    let named = |krate: &str| of(krate).iter().filter(|text| is_manual_page(text)).count();
    assert!(named("sys") > 20, "system calls name {} pages", named("sys"));
    let others = crates().into_iter().filter(|krate| krate != "sys");
    let found: Vec<_> =
        others.map(|krate| (named(&krate), krate)).filter(|(n, _)| *n > 0).collect();
    assert!(found.is_empty(), "sections on errors that are a page's name only: {found:?}");
}

/// The words of all comments, in their order.
fn words_of_comments(source: &str) -> Vec<&str> {
    let comments = source.lines().filter_map(|line| Some(line.split_once("//")?.1));
    comments.flat_map(|comment| comment.trim_start_matches(['/', '!']).split_whitespace()).collect()
}

/// A reader learns first whom a sentence is about: a clause follows a noun, or begins with
/// "whoever". Questions may stand alone.
#[test]
fn clauses_in_comments_say_whom_they_are_about() {
    const BEFORE: [&str; 8] = ["for", "of", "by", "to", "from", "with", "than", "only"];
    let all = sources(&root().join("crates")) + &sources(&root().join("tests"));
    let words = words_of_comments(&all);
    assert!(words.len() > 100_000, "there are {} words in comments", words.len());
    let has_no_head = |four: &&[&str]| {
        let &[before, who, verb, no] = *four else { return false };
        // Nobody asks who does not do something.
        let is_denied = verb == "cannot" || ["no", "not"].contains(&no);
        let is_first = who == "Who" || (who == "who" && before.ends_with([':', ';']));
        (who == "who" && BEFORE.contains(&before)) || (is_first && is_denied)
    };
    let found = words.windows(4).filter(has_no_head);
    let found: Vec<String> = found.map(|four| four.join(" ")).collect();
    assert!(found.is_empty(), "clauses that do not say whom they are about: {found:#?}");
}

/// The files of the engine, tests aside, and what they say.
fn files_of_engine() -> Vec<(String, String)> {
    files_of("engine")
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
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            all.push((short, text.to_owned()));
        }
    });
    all.sort();
    all
}

/// The names of the types that a file defines.
fn types_in(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let shown = line.strip_prefix("pub").map(|rest| match rest.strip_prefix('(') {
            Some(rest) => rest.split_once(')').map_or("", |(_, rest)| rest),
            None => rest,
        });
        let (kind, rest) = shown.unwrap_or(line).trim_start_matches(' ').split_once(' ')?;
        let is_top = !line.starts_with(' ');
        let is_type = ["struct", "enum", "trait", "union", "type"].contains(&kind);
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        (is_top && is_type).then_some(name)
    })
}

/// A name means one thing: whoever has read one file does not take another for what it is not.
#[test]
fn types_have_names_of_their_own() {
    /// Those that mean the same in each file.
    const TWICE: [(&str, &str); 4] = [
        ("Kinds", "the tables of kinds of files: what a dump and what a restore keeps of each"),
        ("Questions", "what threads are asked for one subject: no file sees that of another"),
        ("Result", "what may fail, with the error of the module: so Rust's own modules have it"),
        ("Task", "a task that is dumped, and one that is restored"),
    ];
    let (mut twice, mut types) = (BTreeMap::new(), 0);
    for krate in &crates() {
        let files = files_of(krate);
        let mut defined: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (file, text) in &files {
            types_in(text).for_each(|name| defined.entry(name).or_default().push(file));
        }
        types += defined.len();
        let found = defined.iter().filter(|(_, files)| files.len() > 1);
        twice
            .extend(found.map(|(name, files)| ((*name).to_owned(), format!("{krate}: {files:?}"))));
    }
    assert!(types > 1500, "there are {types} types");
    let known = TWICE.map(|(name, _)| name);
    assert!(twice.keys().eq(known.iter()), "names of more than one thing: {twice:#?}");
}

/// The types that code takes by reference, by whatever path and for however long: `&Tasks`, `&'a mut tasks::Tasks`.
fn taken_in(text: &str) -> BTreeSet<&str> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let paths = code.flat_map(|line| line.split('&').skip(1)).filter_map(path_behind);
    let names = paths.flat_map(|path| path.split("::"));
    names.filter(|name| name.starts_with(char::is_uppercase)).collect()
}

/// The path behind a `&`, its lifetime and `mut`.
fn path_behind(rest: &str) -> Option<&str> {
    let rest = if rest.starts_with('\'') { rest.split_once(' ')?.1 } else { rest };
    let rest = rest.strip_prefix("mut ").unwrap_or(rest);
    rest.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next()
}

/// The files of the engine, tests aside, that take a type by reference.
fn takers(name: &str) -> Vec<String> {
    let files = files_of_engine().into_iter();
    files.filter(|(_, text)| taken_in(text).contains(name)).map(|(file, _)| file).collect()
}

#[test]
fn types_are_taken_by_whatever_path() {
    for taken in ["f(a: &Tasks)", "a: &mut tasks::Tasks,", "a: &'a Tasks<'b>", "&'a mut x::Tasks"] {
        assert_eq!(taken_in(taken), BTreeSet::from(["Tasks"]), "{taken}");
    }
    for other in
        ["f(a: Tasks)", "a: &AllTasks", "a: &TasksHere", "// &Tasks", "-> Tasks", "x & y Tasks"]
    {
        assert!(!taken_in(other).contains("Tasks"), "{other}");
    }
}

/// Operations are told everything. What they are made of takes the parts of it that it reads: see
/// `options`.
#[test]
fn no_resource_takes_all_options() {
    let names_it = |text: &str| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let imports = text.lines().filter(|line| line.contains("options::"));
        imports.flat_map(|line| line.split(|c| !is_word(c))).any(|word| word == "Options")
    };
    let all = files_of_engine().into_iter().filter(|(_, text)| names_it(text));
    let all: Vec<String> = all.map(|(file, _)| file).filter(|file| file != "lib.rs").collect();
    assert!((1..=21).contains(&all.len()), "{} files know all options: {all:?}", all.len());
    let folders = ["cgroup/", "file/", "memory/", "namespace/", "network/", "task/"];
    let of_resources = |file: &&String| folders.iter().any(|folder| file.starts_with(folder));
    let resources: Vec<_> = all.iter().filter(of_resources).collect();
    assert!(resources.is_empty(), "these are told all: {resources:?}");
}

/// What knows all is for those who bring all together. A resource takes what it needs: else each
/// of them imports, by way of such a type, all others.
#[test]
fn few_files_take_what_knows_all() {
    for (name, folder) in [("Dump", "dump/"), ("Restore", "restore/")] {
        let all = takers(name);
        assert!(all.len() <= 10, "{} files take {name}: {all:?}", all.len());
        assert!(!all.is_empty(), "nobody takes {name}: has it another name now?");
        let others: Vec<_> = all.iter().filter(|file| !file.starts_with(folder)).collect();
        assert!(others.is_empty(), "{name} leaves its folder: {others:?}");
    }
    for name in ["Tasks", "Pids", "Paths", "Opener", "Around", "Neighbours", "Homes", "Assembly"] {
        let all = takers(name);
        assert!((1..=10).contains(&all.len()), "{} files take {name}: {all:?}", all.len());
    }
    // A table that is looked up by number and kind (docs/architecture.md): no more look than do today.
    let all = takers("Namespaces");
    assert!((1..=45).contains(&all.len()), "{} files take Namespaces: {all:?}", all.len());
}

/// A type that many files take is read with each of them. Those are data, each of one thing: none grows unseen.
#[test]
fn types_that_many_files_take_are_data() {
    const MANY: usize = 10;
    /// Types that more files take, and what they are.
    const KNOWN: [(&str, &str); 10] = [
        ("Found", "an open file as a dump finds it, with what procfs says of it"),
        ("IdMaps", "a table: the ids of a user namespace, inside and outside"),
        ("Mount", "a line of mountinfo"),
        ("Namespace", "the number of a namespace in the images, its kind, and its inode"),
        ("Namespaces", "a table of these by their numbers (docs/architecture.md)"),
        ("OpenFiles", "a table: open files by their numbers in the images"),
        ("Options", "what operations are told; no resource takes it"),
        ("Task", "what procfs or the images say of a task, and its stopped threads"),
        ("TaskImage", "what the images say of a task"),
        ("Vma", "a mapping, as procfs shows it"),
    ];
    let files = files_of_engine();
    let own: BTreeSet<&str> = files.iter().flat_map(|(_, text)| types_in(text)).collect();
    let mut takers: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, text) in &files {
        // Others have types of the same names.
        let imported = imports::paths(text).into_iter().filter(|path| path.starts_with("torpor_"));
        let imported: Vec<String> = imported.collect();
        let is_foreign =
            |name: &str| imported.iter().any(|path| path.ends_with(&format!("::{name}")));
        let taken =
            taken_in(text).into_iter().filter(|name| own.contains(name) && !is_foreign(name));
        taken.for_each(|name| *takers.entry(name).or_default() += 1);
    }
    let many: Vec<_> = takers.into_iter().filter(|(_, files)| *files > MANY).collect();
    let names = many.iter().map(|(name, _)| *name);
    assert!(names.eq(KNOWN.map(|(name, _)| name)), "more than {MANY} files take: {many:#?}");
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

/// The entries of images that code names, by the types that they have in Rust.
fn entries_in(text: &str) -> BTreeSet<&str> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
    let is_entry = |word: &&str| word.len() > "Entry".len() && word.ends_with("Entry");
    words.filter(is_entry).filter(|word| word.starts_with(char::is_uppercase)).collect()
}

/// What makes a tree takes types, and not entries of images, which the reader might take for something else
/// (docs/adr/0019-read-twice.md).
#[test]
fn restores_are_made_of_types() {
    /// The file that reads the images, and one that makes nothing: it looks for options without use.
    const READ: [&str; 2] = ["restore/load.rs", "restore/unused.rs"];
    /// They are written.
    const KNOWN: [&str; 2] = ["RestoreStatsEntry", "StatsEntry"];
    /// What a function has that is told of open files by their entries: the table of a dump alone.
    const OF_FILES: [&str; 3] = ["&FileEntry", "[FileEntry]", ", FileEntry>"];
    /// What a task is in the tree, shares and stands in, its memory, the inventory, and what there is besides files.img of
    /// open files: they are named where they are written.
    const WRITTEN: [(&str, &[&str]); 11] = [
        ("PstreeEntry", &["dump/"]),
        ("TaskKobjIdsEntry", &["dump/"]),
        ("FsEntry", &["dump/"]),
        ("InventoryEntry", &["dump/", "host/"]),
        ("VmaEntry", &["dump/", "memory/vma.rs"]),
        ("MmEntry", &["dump/"]),
        ("PipeDataEntry", &["file/queue.rs"]),
        ("RemapFilePathEntry", &["file/remap.rs"]),
        (
            "SkPacketEntry",
            &["file/socket/queue.rs", "file/socket/datagram.rs", "file/socket/unix.rs"],
        ),
        ("TtyDataEntry", &["file/tty/dump.rs"]),
        ("TtyInfoEntry", &["file/tty/dump.rs", "file/tty/info.rs"]),
    ];
    assert_eq!(entries_in("a: &VmaEntry,\n// FsEntry\nEntry::new"), BTreeSet::from(["VmaEntry"]));
    let files = files_of_engine();
    let mut wrong = Vec::new();
    for (file, text) in &files {
        let is_at = |places: &[&str]| places.iter().any(|place| file.starts_with(place));
        let of_files = OF_FILES.iter().filter(|what| text.contains(**what));
        let of_files = of_files.filter(|_| !is_at(&["dump/", "file/table.rs"]));
        wrong.extend(of_files.map(|what| format!("{file}: {what}")));
        for entry in entries_in(text) {
            let is_raw = is_at(&["restore/"]) && !is_at(&READ) && !KNOWN.contains(&entry);
            let written = WRITTEN.iter().find(|(name, _)| *name == entry);
            if is_raw || written.is_some_and(|(_, places)| !is_at(places)) {
                wrong.push(format!("{file}: {entry}"));
            }
        }
    }
    assert!(wrong.is_empty(), "entries of images where things are made: {wrong:#?}");
    for read in READ {
        let (_, text) = files.iter().find(|(file, _)| file == read).unwrap();
        assert!(!entries_in(text).is_empty(), "{read} reads nothing any more");
    }
}

/// Whether code reads what images say: by a call of theirs, or by that of a type that is read of them.
fn reads_images(text: &str) -> bool {
    const CALLS: [&str; 5] = [".read_one", ".read_all", ".read_opt", ".reader(", ".inventory("];
    const OF_TYPES: [&str; 6] = ["::read(", "::read_all(", "::all(", "::each(", "::of(", "::open("];
    /// They are made of images, and read nothing yet.
    const HANDLES: [&str; 2] = ["Bulk", "Identity"];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let code = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let code: String = code.collect();
    code.match_indices("images").any(|(at, name)| {
        let (before, after) = (&code[..at], &code[at + name.len()..]);
        let before = before.trim_end_matches(|c| is_word(c) || ['.', '&'].contains(&c));
        let owner = OF_TYPES.iter().find_map(|call| before.strip_suffix(call));
        let owner = owner.and_then(|path| path.rsplit(|c| !is_word(c)).next());
        let is_type = owner
            .is_some_and(|name| name.starts_with(char::is_uppercase) && !HANDLES.contains(&name));
        let is_given = is_type && !after.starts_with(is_word);
        CALLS.iter().any(|call| after.starts_with(call)) || is_given
    })
}

#[test]
fn reading_is_seen_in_code() {
    let reading = [
        "let a: A = images.read_one(kind::A, 0)?;",
        "cx.images\n    .read_all_or_empty::<A>(kind::A, 0)",
        "A::read(&cx.images, 1)",
        "A::all(\n    images,\n)",
    ];
    let others =
        ["// images.read_one(", "images.writer(a)", "Bulk::of(&last.images)", "A::read(images_of)"];
    assert!(reading.into_iter().all(reads_images));
    assert!(!others.into_iter().any(reads_images));
}

/// What makes a tree does not read images: all that they say was read before anything was made, and judged. What is
/// large is referred to, and read when it is put in place (docs/adr/0019-read-twice.md).
#[test]
fn images_are_read_before_anything_is_made() {
    const MAKERS: [&str; 8] =
        ["cgroup/", "file/", "lazy/", "memory/", "namespace/", "network/", "restore/", "task/"];
    const BEFORE: &str = "before anything is made";
    const CONTENT: &str = "content, which a plan refers to";
    const READERS: [(&str, &str); 14] = [
        ("file/queue.rs", CONTENT),
        ("file/socket/queue.rs", CONTENT),
        ("lazy/daemon.rs", "which checkpoint the pages belong to, to find another that has them"),
        ("lazy/working_set.rs", "in which order pages come"),
        ("namespace/filling.rs", BEFORE),
        ("namespace/ipc/filling.rs", BEFORE),
        ("namespace/net/filling.rs", BEFORE),
        ("restore/compare.rs", "whether two checkpoints are alike; nothing is made of it"),
        ("restore/listed.rs", BEFORE),
        ("restore/load.rs", BEFORE),
        ("restore/pages.rs", CONTENT),
        ("restore/planned.rs", BEFORE),
        ("restore/rounds.rs", "whether a round is damaged; it has pages alone"),
        ("restore/unused.rs", BEFORE),
    ];
    let makes = |file: &str| MAKERS.iter().any(|folder| file.starts_with(folder));
    let code = |text: &str| text.split("#[cfg(test)]\nimpl").next().unwrap().to_owned();
    let files = files_of_engine().into_iter().map(|(file, text)| (file, code(&text)));
    let found = files.filter(|(file, text)| makes(file) && reads_images(text));
    let found: Vec<String> = found.map(|(file, _)| file).collect();
    let known = READERS.map(|(file, _)| file);
    assert!(found.iter().eq(known.iter()), "these read images: {found:#?}");
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

/// Files that import each other, by way of others, are read together or not at all.
#[test]
fn no_circle_of_imports_is_large() {
    let circle = imports::largest_circle(&files_of_engine());
    assert!((2..=12).contains(&circle.len()), "{} files are a circle: {circle:?}", circle.len());
}

/// What a module shows of one below it is an import of that.
#[test]
fn circles_go_through_what_is_shown() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use b::Thing;"),
        ("a.rs", "use crate::Thing;"),
        ("b/mod.rs", "mod c; mod thing;\npub(crate) use c::{Thing, thing};"),
        ("b/c.rs", "use crate::a::A;"),
        ("b/thing.rs", ""),
    ];
    let files = files.map(|(file, text)| (file.to_owned(), text.to_owned()));
    assert_eq!(imports::largest_circle(&files), ["a", "b::c"]);
}

/// Code names what is in a module below without an import. Who may see something is none.
#[test]
fn circles_go_through_what_is_named() {
    let files = [
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b;\nmod c;\npub use c::shown;\nstruct A { of: b::B }"),
        ("a/b.rs", "use super::{A, c::C};"),
        ("a/c.rs", "pub(in crate::a) fn shown() {}\nstruct C;"),
    ];
    let files = files.map(|(file, text)| (file.to_owned(), text.to_owned()));
    assert_eq!(imports::largest_circle(&files), ["a", "a::b"]);
}

/// The page with the example is the example that runs (`library.rs`); `UPDATE_DOCS=1` writes it.
#[test]
fn the_example_in_docs_is_the_one_that_runs() {
    let file = root().join("docs/library.md");
    let program = include_str!("library.rs");
    let is = std::fs::read_to_string(&file).unwrap();
    let (words, _) = is.split_once("```rust\n").unwrap();
    let page = format!("{words}```rust\n{program}```\n");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    assert!(is == page, "run this test with UPDATE_DOCS=1");
}

#[test]
fn processes_and_stages_have_the_names_that_they_have_in_the_code() {
    let page = page();
    let crates = ["engine", "tracee", "migrate", "kubernetes"];
    let code = crates.map(|name| sources(&root().join("crates").join(name).join("src"))).concat();
    let table = page.split("## Processes").nth(1).unwrap().split("## The way").next().unwrap();
    let names: Vec<&str> =
        quoted(table).into_iter().filter(|name| name.starts_with("torpor-")).collect();
    assert_eq!(
        names,
        [
            "torpor-guard",
            "torpor-reader",
            "torpor-keeper",
            "torpor-lazy",
            "torpor-pager",
            "torpor-twin",
            "torpor-template",
            "torpor-watch",
            "torpor-undo"
        ]
    );
    for name in names {
        // Each by itself, or in a process that is made to call itself so.
        let own = code.contains(&format!("set_name(c\"{name}\")"));
        assert!(own || code.contains(&format!("const NAME: &str = \"{name}\";")), "{name}");
    }
    for stage in ["Session", "Frozen", "Written", "Plan", "Skeleton", "Complete", "Ready"] {
        assert!(page.contains(stage), "{stage}");
        assert!(code.contains(&format!("pub struct {stage}")), "{stage}");
    }
}

/// Whoever is forked is on the map, and says what happens if it is killed.
#[test]
fn processes_that_are_forked_are_on_the_map() {
    /// The files that fork, and who is born there.
    const BORN: [(&str, &str); 7] = [
        ("guardian.rs", "guardian"),
        ("lazy/daemon.rs", "pager"),
        ("memory/keeper.rs", "keeper"),
        ("namespace/ask.rs", "helper"),
        ("namespace/ipc/mqueue.rs", "helper"),
        ("namespace/user.rs", "helper"),
        ("reader.rs", "reader"),
    ];
    let forks = files_of_engine().into_iter().filter(|(_, text)| text.contains("process::fork("));
    let files: Vec<String> = forks.map(|(file, _)| file).collect();
    assert_eq!(files, BORN.map(|(file, _)| file));
    let page = page();
    for (_, born) in BORN {
        let drawn = page.lines().any(|line| line.trim_start().starts_with(&format!("+-- {born} ")));
        let row = page.lines().find(|line| line.starts_with(&format!("| {born} |")));
        assert!(drawn && row.is_some_and(|row| row.split(" | ").count() == 5), "{born}");
    }
}
