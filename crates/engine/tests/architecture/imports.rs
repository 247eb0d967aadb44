//! Who imports whom among the files of a crate.

use std::collections::{BTreeMap, BTreeSet};

use super::{crates, files_of};

/// A module, as its path has it: `restore::stages` is `["restore", "stages"]`, the library's own is empty.
type Module = Vec<String>;

/// The largest set of files each of which imports, by way of others, each other one.
fn largest_circle(files: &[(String, String)]) -> Vec<String> {
    let known: BTreeSet<Module> = files.iter().map(|(file, _)| module(file)).collect();
    let shown: BTreeMap<Module, Module> =
        files.iter().flat_map(|(file, text)| shown(&module(file), text)).collect();
    let imports: BTreeMap<Module, BTreeSet<Module>> = files
        .iter()
        .map(|(file, text)| {
            let own = module(file);
            let paths = paths(text).into_iter().chain(paths_below(text));
            let full = paths.filter_map(|path| full(&own, &path));
            let named = full.filter_map(|full| resolve(full, &shown, &known));
            (own.clone(), named.filter(|named| *named != own).collect())
        })
        .collect();
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        imports.keys().map(|from| (from, reach(from, &imports))).collect();
    let circle = |of: &Module| -> Vec<String> {
        let back = |other: &&&Module| reached[**other].contains(of);
        reached[of].iter().filter(back).map(|module| module.join("::")).collect()
    };
    imports.keys().map(circle).max_by_key(Vec::len).unwrap()
}

fn module(file: &str) -> Module {
    let path = file.strip_suffix(".rs").unwrap();
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.split('/').filter(|part| *part != "lib").map(str::to_owned).collect()
}

fn reach<'i>(
    from: &Module,
    imports: &'i BTreeMap<Module, BTreeSet<Module>>,
) -> BTreeSet<&'i Module> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&Module> = imports[from].iter().collect();
    while let Some(module) = next.pop() {
        if reached.insert(module) {
            next.extend(&imports[module]);
        }
    }
    reached
}

/// What a module shows under a name of its own (`pub use child::Name`), and where that is.
fn shown(own: &Module, text: &str) -> Vec<(Module, Module)> {
    let statements = text.split(';').filter_map(|statement| {
        let (visible, named) = statement.rsplit_once("use ")?;
        let line = visible.lines().last().unwrap_or_default().trim();
        line.starts_with("pub").then_some(named.trim())
    });
    let mut all = Vec::new();
    statements.for_each(|named| expand("", named, &mut all));
    let place = |path: String| {
        // A path that begins with neither is one of a module below.
        let place = full(own, &path).or_else(|| full(own, &format!("self::{path}")))?;
        let name = [own.as_slice(), &place[place.len() - 1..]].concat();
        (name != place).then_some((name, place))
    };
    all.into_iter().filter_map(place).collect()
}

/// The file that a path leads to, where what it names is written: the longest beginning of it that is one.
fn resolve(
    mut full: Module,
    shown: &BTreeMap<Module, Module>,
    known: &BTreeSet<Module>,
) -> Option<Module> {
    // A name may be shown on, from one module to the next. Where it is one of a module as well, that is meant.
    let step = |full: &Module| {
        let mut ends = (1..=full.len()).filter(|end| !known.contains(&full[..*end]));
        ends.find_map(|end| Some([shown.get(&full[..end])?, &full[end..]].concat()))
    };
    while let Some(further) = step(&full) {
        full = further;
    }
    while !known.contains(&full) {
        full.pop()?;
    }
    Some(full)
}

/// A path from the library's own module; none if it is one of another library.
fn full(own: &Module, path: &str) -> Option<Module> {
    let mut parts: Vec<&str> = path.split("::").collect();
    let mut full: Module = match parts[0] {
        "crate" => Vec::new(),
        "self" | "super" => own.clone(),
        _ => return None,
    };
    while let Some("crate" | "self" | "super") = parts.first().copied() {
        if parts.remove(0) == "super" {
            full.pop();
        }
    }
    full.extend(parts.into_iter().map(|part| part.trim().to_owned()));
    Some(full)
}

/// The paths that a source names: those of its imports, and those that begin at the library.
pub(super) fn paths(text: &str) -> Vec<String> {
    let code = without_comments(text);
    let mut all = Vec::new();
    for statement in code.split(';') {
        if let Some((_, named)) = statement.rsplit_once("use ") {
            expand("", named.trim(), &mut all);
        }
    }
    for start in ["crate::", "super::"] {
        // Who may see something is no import.
        let begins = |at: &usize| !code[..*at].ends_with("::") && !code[..*at].ends_with("in ");
        for at in code.match_indices(start).map(|(at, _)| at).filter(begins) {
            let path = path_at(&code[at..]);
            // One that a `use` goes on with, which was taken apart above.
            if !path.ends_with("::") {
                all.push(path.to_owned());
            }
        }
    }
    all
}

/// The paths into modules below that a source names: `child::Name`. What it only shows under a name of its own is not
/// among them.
fn paths_below(text: &str) -> Vec<String> {
    let code = without_comments(text);
    let module = |line: &'_ str| {
        let (_, name) = line.strip_suffix(';')?.rsplit_once("mod ")?;
        Some(format!("{name}::"))
    };
    let modules: Vec<String> = code.lines().map(str::trim).filter_map(module).collect();
    let mut all = Vec::new();
    for statement in code.split(';') {
        let (code, used) = statement.rsplit_once("use ").unwrap_or((statement, ""));
        if !code.lines().last().unwrap_or_default().trim().starts_with("pub") {
            expand("", used.trim(), &mut all);
        }
        for module in &modules {
            let is_inner = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            let begins = |at: &usize| !code[..*at].ends_with(is_inner);
            let found = code.match_indices(module.as_str()).map(|(at, _)| at).filter(begins);
            all.extend(found.map(|at| path_at(&code[at..]).to_owned()));
        }
    }
    let is_below = |path: &String| modules.iter().any(|module| path.starts_with(module));
    all.into_iter().filter(is_below).map(|path| format!("self::{path}")).collect()
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap().to_owned() + "\n").collect()
}

/// The path that code begins with.
fn path_at(code: &str) -> &str {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    code.find(|c: char| !is_path(c)).map_or(code, |end| &code[..end])
}

/// The single paths of `a::{b, c::{d, e}}`.
fn expand(before: &str, tree: &str, all: &mut Vec<String>) {
    let Some((shared, rest)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap().trim();
        all.push(format!("{before}{name}"));
        return;
    };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let (mut depth, mut from) = (0, 0);
    let shared = format!("{before}{}", shared.trim());
    for (at, letter) in inner.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&shared, inner[from..at].trim(), all);
                from = at + 1;
            }
            _ => {}
        }
    }
    if !inner[from..].trim().is_empty() {
        expand(&shared, inner[from..].trim(), all);
    }
}

/// Files that import each other, by way of others, are read together or not at all.
#[test]
fn no_circle_of_imports_is_large() {
    let circle = |krate: String| {
        let code = files_of(&krate).into_iter().filter(|(file, _)| file.ends_with(".rs"));
        (largest_circle(&code.collect::<Vec<_>>()), krate)
    };
    let all: Vec<(Vec<String>, String)> = crates().into_iter().map(circle).collect();
    let is_found = |(circle, krate): &(Vec<String>, String)| krate == "engine" && circle.len() > 1;
    assert!(all.iter().any(is_found), "no circle is found");
    for (circle, krate) in all {
        assert!(circle.len() <= 12, "{} files of {krate} are a circle: {circle:?}", circle.len());
    }
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
    assert_eq!(largest_circle(&files), ["a", "b::c"]);
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
    assert_eq!(largest_circle(&files), ["a", "a::b"]);
}
