//! Who reads images, and who names their entries.

use std::collections::BTreeSet;

use super::files_of_engine;

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
