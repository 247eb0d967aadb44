//! Whether checkpoints keep what programs had in their memory to themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::Run;
use crate::scratch::Scratch;

/// What a program has in its memory, and no other file than an image says.
pub const SECRET: &str = "SECRET-e73a05c1-OF-THE-TESTS";

/// The start of a shell script that has [`SECRET`] in its memory from then on, without having it in
/// its arguments, which runtimes write down.
pub const KEEP_SECRET: &str = "secret=$(printf SECRET-%s-OF-THE-TESTS e73a05c1); ";

/// The files below `dir` that show the secret.
pub fn leaks(dir: &Path) -> Vec<PathBuf> {
    files(dir)
        .into_iter()
        .filter(|file| {
            let bytes = fs::read(file).unwrap_or_default();
            bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
        })
        .collect()
}

/// Checks that the images in `dir` show the secret if the test's checkpoints are plain; and, if they
/// are sealed, that they do not, and that only who has the key can decode them.
#[track_caller]
pub fn check_images(scratch: &Scratch, dir: &Path) {
    assert!(dir.join("inventory.img").exists(), "no images in {}", dir.display());
    if !scratch.is_sealed() {
        assert!(!leaks(dir).is_empty(), "the secret is not even in plain images");
        return;
    }
    assert_eq!(leaks(dir), Vec::<PathBuf>::new());
    assert!(dir.join("seal.img").exists() && dir.join("manifest.img").exists());
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let show = |mut command: Command| {
        command.arg(&torpor).args(["image", "show"]).arg(dir.join("inventory.img")).finish()
    };
    let shown = show(Command::new("env"));
    assert!(shown.stdout.contains("img_version"), "{shown:?}");
    // The machine itself has no such configuration.
    let outside = format!("--mount=/proc/{}/ns/mnt", std::process::id());
    let mut nsenter = Command::new("nsenter");
    nsenter.arg(outside);
    let shown = show(nsenter);
    assert!(shown.stderr.contains("no key to open them"), "{shown:?}");
}

/// All regular files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.append(&mut files(&entry.path()));
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    found
}
