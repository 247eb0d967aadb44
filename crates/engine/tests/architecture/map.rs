//! `docs/architecture.md` names what there is.

use std::path::PathBuf;

use super::{crates, files_below, files_of_engine, root, sources};

fn page() -> String {
    std::fs::read_to_string(root().join("docs/architecture.md")).unwrap()
}

/// What stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
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

/// The tests of each attack that docs/security.md says is tried.
#[test]
fn attacks_are_tried_by_tests_that_exist() {
    let page = std::fs::read_to_string(root().join("docs/security.md")).unwrap();
    let tried = page.split("## Which attacks are tried").nth(1).unwrap();
    let tried = tried.split("\n## ").next().unwrap();
    let rows = tried.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").nth(1));
    let named: Vec<&str> = rows.flat_map(quoted).collect();
    assert!(named.len() > 100, "{named:?}");
    let files: Vec<PathBuf> =
        ["crates", "tests", "fuzz"].iter().flat_map(|dir| files_below(&root().join(dir))).collect();
    let code: Vec<String> =
        files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let is_there = |name: &str| {
        if name.contains('/') {
            return root().join(name).exists();
        }
        if name.ends_with(".rs") {
            return files.iter().any(|file| file.ends_with(name));
        }
        let (test, target) = (format!("fn {name}("), format!("fuzz/fuzz_targets/{name}.rs"));
        code.iter().any(|text| text.contains(&test)) || root().join(target).is_file()
    };
    let missing: Vec<&str> = named.into_iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Where somebody who has found something looks.
#[test]
fn it_is_said_what_to_do_about_a_hole() {
    let page = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
    let said = page.split("## If you find a hole").nth(1).unwrap();
    assert!(said.contains("privately") && said.contains("torpor image plan"), "{said}");
}

/// The page with the example is the example that runs (`library.rs`); `UPDATE_DOCS=1` writes it.
#[test]
fn the_example_in_docs_is_the_one_that_runs() {
    let file = root().join("docs/library.md");
    let program = include_str!("../library.rs");
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
