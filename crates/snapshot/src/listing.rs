//! The digest of what is in a directory and below it: names, kinds, sizes and times of all files.
//!
//! Each start from a snapshot looks at all of them before anything else. So several threads do, at the directories of one
//! level after the other.

use std::fs::{self, DirEntry};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::oci;
use torpor_kernel::parallel;

use crate::error::{Context, Result};

/// How many threads look at most.
const THREADS: usize = 8;

/// What is said of the entries of a directory, and those of them that are directories.
struct Listed {
    said: Vec<u8>,
    below: Vec<PathBuf>,
}

/// A directory among all: what is said of its entries, and the numbers of the directories in it.
struct Directory {
    said: Vec<u8>,
    below: Range<usize>,
}

/// The digest of what is in `root`. Times count in seconds, as archives keep them.
///
/// # Errors
/// If a directory cannot be listed, or a file be looked at.
pub fn digest(root: &Path) -> Result<String> {
    let all = directories(root)?;
    let mut context = digest::Context::new(&SHA256);
    let mut todo = vec![0];
    while let Some(number) = todo.pop() {
        context.update(&all[number].said);
        todo.extend(all[number].below.clone());
    }
    Ok(oci::written(context.finish().as_ref()))
}

/// `root`, and all directories below it.
fn directories(root: &Path) -> Result<Vec<Directory>> {
    let workers = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let mut all = Vec::new();
    let mut level = vec![root.to_owned()];
    while !level.is_empty() {
        let (first, mut next) = (all.len() + level.len(), Vec::new());
        for Listed { said, below } in parallel::map(&level, workers, |dir| list(root, dir))? {
            let start = first + next.len();
            next.extend(below);
            all.push(Directory { said, below: start..first + next.len() });
        }
        level = next;
    }
    Ok(all)
}

/// Lists a directory, which is `root` or below it.
fn list(root: &Path, dir: &Path) -> Result<Listed> {
    let shown = || dir.display().to_string();
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut entries = entries.context(shown)?;
    entries.sort_by_cached_key(DirEntry::file_name);
    let place = dir.strip_prefix(root).unwrap_or(dir);
    let mut listed = Listed { said: Vec::new(), below: Vec::new() };
    for entry in entries {
        let meta = entry.metadata().context(shown)?;
        let name = place.join(entry.file_name());
        let name = name.as_os_str().as_encoded_bytes();
        let said = &mut listed.said;
        let (mode, user, group) = (meta.mode(), meta.uid(), meta.gid());
        write!(said, "{} {mode:o} {user} {group}", name.len()).context(shown)?;
        // The time of a directory changes with mount points that are made in it.
        if !meta.is_dir() {
            write!(said, " {} {}", meta.size(), meta.mtime()).context(shown)?;
        }
        said.extend(name);
        if meta.is_dir() {
            listed.below.push(entry.path());
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;

    /// The same by one thread, one directory after the other, as snapshots of all versions have it.
    fn one_by_one(root: &Path) -> String {
        let mut context = digest::Context::new(&SHA256);
        let mut todo = vec![root.to_owned()];
        while let Some(dir) = todo.pop() {
            let mut entries: Vec<_> = fs::read_dir(&dir).unwrap().map(Result::unwrap).collect();
            entries.sort_by_key(DirEntry::file_name);
            for entry in entries {
                let (path, meta) = (entry.path(), entry.metadata().unwrap());
                let name = path.strip_prefix(root).unwrap().as_os_str().as_encoded_bytes();
                let (mode, uid, gid) = (meta.mode(), meta.uid(), meta.gid());
                let facts = match meta.is_dir() {
                    true => format!("{} {mode:o} {uid} {gid}", name.len()),
                    false => {
                        let (size, time) = (meta.size(), meta.mtime());
                        format!("{} {mode:o} {uid} {gid} {size} {time}", name.len())
                    }
                };
                context.update(facts.as_bytes());
                context.update(name);
                if meta.is_dir() {
                    todo.push(path);
                }
            }
        }
        oci::written(context.finish().as_ref())
    }

    #[test]
    fn it_is_the_same_however_many_look() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(digest(root).unwrap(), one_by_one(root), "empty");
        for number in 0..80 {
            let below = root.join(format!("usr/{number}/lib"));
            fs::create_dir_all(&below).unwrap();
            fs::write(below.join("file"), vec![1; number]).unwrap();
            fs::write(root.join(format!("usr/{number}/other")), "text").unwrap();
        }
        symlink("usr/1/lib/file", root.join("link")).unwrap();
        fs::create_dir(root.join("empty")).unwrap();
        let before = digest(root).unwrap();
        assert_eq!(before, one_by_one(root));
        fs::write(root.join("usr/7/lib/file"), "changed meanwhile").unwrap();
        assert_ne!(digest(root).unwrap(), before);
        assert!(digest(&root.join("absent")).is_err());
    }
}
