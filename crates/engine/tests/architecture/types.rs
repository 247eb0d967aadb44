//! The names of types, and how many files take each.

use std::collections::{BTreeMap, BTreeSet};

use super::{crates, files_of, files_of_engine, imports};

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
