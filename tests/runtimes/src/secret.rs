//! Whether checkpoints keep what programs had in their memory to themselves.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{SeekFrom, seek};

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
/// are sealed, that they do not, and that only somebody who has the key can decode them.
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

/// One more secret: bytes that are in no argument and no program, only in what calls this, and that no
/// archiver makes smaller.
pub fn bytes(kind: Kind, len: usize) -> Vec<u8> {
    let mut state = 0x0070_7261_6e67_u64.wrapping_mul(kind as u64 + 3);
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).to_le_bytes()[0]
    };
    // Nothing that ends a line of grep's.
    std::iter::from_fn(|| Some(next()))
        .filter(|byte| ![0, b'\n'].contains(byte))
        .take(len)
        .collect()
}

/// Where a program keeps its secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// In its memory.
    Memory,
    /// In a pipe that nobody has read from.
    Pipe,
    /// In the queue of a socket.
    Socket,
    /// In a file of a tmpfs.
    Tmpfs,
    /// In an open file that has no name any more.
    Ghost,
    /// In a file that somebody wrote and removed: what a test of tests looks for.
    Removed,
}

impl Kind {
    /// All of a program.
    pub const ALL: [Self; 5] = [Self::Memory, Self::Pipe, Self::Socket, Self::Tmpfs, Self::Ghost];

    /// Its secret.
    pub fn secret(self) -> Vec<u8> {
        bytes(self, if matches!(self, Self::Pipe | Self::Socket) { 8 << 10 } else { 256 << 10 })
    }
}

/// The secrets of which `file` holds a KiB or more, wherever in it.
pub fn found(file: &File) -> BTreeSet<Kind> {
    const PART: usize = size_of::<u64>();
    let mut parts = HashMap::new();
    // Most places can be ruled out by two of their bytes.
    let mut starts = vec![false; 1 << 16];
    for kind in Kind::ALL.into_iter().chain([Kind::Removed]) {
        for part in kind.secret().chunks(512).map(|chunk| &chunk[..PART]) {
            starts[usize::from(u16::from_le_bytes([part[0], part[1]]))] = true;
            parts.insert(part.to_vec(), kind);
        }
    }
    let mut found = BTreeSet::new();
    let mut bytes = Vec::new();
    let mut from = 0;
    while let Ok(data) = seek(file, SeekFrom::Data(from)) {
        from = seek(file, SeekFrom::Hole(data)).unwrap();
        bytes.resize(usize::try_from(from - data).unwrap(), 0);
        file.read_exact_at(&mut bytes, data).unwrap();
        for part in bytes.windows(PART) {
            if starts[usize::from(u16::from_le_bytes([part[0], part[1]]))] {
                found.extend(parts.get(part).copied());
            }
        }
    }
    found
}
