//! What libraries make public, and who else names it.

use std::collections::{BTreeMap, BTreeSet};

/// A file with source code. Programs and tests of a crate are outside of its library.
pub(super) struct Source {
    pub file: String,
    pub library: Option<String>,
    pub text: String,
}

/// A function, constant or static, the library that makes it public, and the file.
type Public<'s> = (&'s str, &'s str, &'s str);

/// Types are left out: they may be public for what returns them.
pub(super) fn all(sources: &[Source]) -> Vec<Public<'_>> {
    let mut all = Vec::new();
    for Source { file, library, text } in sources {
        let Some(library) = library else { continue };
        let code = super::without_tests(text);
        let names = code.lines().filter_map(published);
        all.extend(names.map(|name| (name, library.as_str(), file.as_str())));
    }
    all
}

/// Those that only their own library names. What has the name of something else counts as used.
pub(super) fn unused<'s>(sources: &'s [Source]) -> Vec<Public<'s>> {
    let mut users: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for Source { library, text, .. } in sources {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for word in code.flat_map(words) {
            users.entry(word).or_default().insert(library.as_deref());
        }
    }
    let is_unused = |(name, library, _): &Public<'s>| users[name].iter().eq([&Some(*library)]);
    all(sources).into_iter().filter(is_unused).collect()
}

/// What a line makes public.
fn published(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let is_function = |before: &&str| {
        words(before).all(|word| ["const", "unsafe", "async", "extern", "C"].contains(&word))
    };
    let of_function = rest.split_once("fn ").filter(|(before, _)| is_function(before));
    let of_value = || rest.strip_prefix("const ").or_else(|| rest.strip_prefix("static "));
    words(of_function.map(|(_, rest)| rest).or_else(of_value)?).find(|word| *word != "mut")
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

#[test]
fn what_a_line_publishes_is_known() {
    for (line, name) in [
        ("    pub fn of(a: u32) {", Some("of")),
        ("pub const fn short(number: i32) -> u16 {", Some("short")),
        ("pub async unsafe fn a()", Some("a")),
        ("pub const MOST: usize = 3;", Some("MOST")),
        ("pub static ALL: Mutex<fn ()> = a;", Some("ALL")),
        ("pub(crate) fn inner()", None),
        ("pub struct Fn { a: fn (u32) }", None),
        ("    pub work: fn (u32),", None),
    ] {
        assert_eq!(published(line), name, "{line}");
    }
}

#[test]
fn what_nobody_else_names_is_found() {
    let source = |file: &str, library: Option<&str>, text: &str| Source {
        file: file.to_owned(),
        library: library.map(str::to_owned),
        text: text.to_owned(),
    };
    let sources = [
        source(
            "a.rs",
            Some("a"),
            "pub fn used() {}\n    pub fn inner() {}\npub const TOLD: u8 = 1;",
        ),
        source("a/more.rs", Some("a"), "fn f() { inner() + TOLD }"),
        source("b.rs", Some("b"), "/// See TOLD.\nfn used_twice() { a::used() }"),
        source("main.rs", None, "pub fn of_a_program() {}"),
    ];
    assert_eq!(all(&sources).len(), 3);
    assert_eq!(unused(&sources), [("inner", "a", "a.rs"), ("TOLD", "a", "a.rs")]);
}
