//! What is in the root file system of a bundle.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::oci;

use crate::error::{Context, Result};

/// The digest of what is in `root`: names, kinds, sizes and times of all files. Times count in seconds, as archives
/// keep them. Each file is shown to `seen`, and a directory before it is listed.
///
/// # Errors
/// If a directory cannot be listed, or a file be looked at; what `seen` says.
pub fn digest(root: &Path, seen: &mut dyn FnMut(&Path, &Metadata) -> Result<()>) -> Result<String> {
    let mut context = digest::Context::new(&SHA256);
    let mut todo = vec![root.to_owned()];
    seen(root, &fs::metadata(root).context(|| root.display().to_string())?)?;
    while let Some(dir) = todo.pop() {
        let shown = || dir.display().to_string();
        let mut entries = fs::read_dir(&dir)
            .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
            .context(shown)?;
        entries.sort_unstable_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let meta = entry.metadata().context(shown)?;
            seen(&path, &meta)?;
            let name = path.strip_prefix(root).unwrap_or(&path).as_os_str().as_encoded_bytes();
            context.update(facts(name.len(), &meta).as_bytes());
            context.update(name);
            if meta.is_dir() {
                todo.push(path);
            }
        }
    }
    Ok(oci::written(context.finish().as_ref()))
}

/// What counts of a file, whose name has so many bytes.
fn facts(name: usize, meta: &Metadata) -> String {
    let owned = format!("{name} {:o} {} {}", meta.mode(), meta.uid(), meta.gid());
    match meta.is_dir() {
        // The time of a directory changes with mount points that are made in it.
        true => owned,
        false => format!("{owned} {} {}", meta.size(), meta.mtime()),
    }
}
