//! What a container has changed in its files: the layer `upper` of an overlay, and the archive of it,
//! with whiteouts as OCI has them.

mod apply;

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::fgetxattr;
use tar::{Builder, EntryType, Header};
use torpor_kernel::tree::{self, Entry, Tree};

pub use self::apply::{SetId, apply};
use crate::archive::header;
use crate::error::{Context, Result};

/// What marks a file that is gone, in front of its name.
const WHITEOUT: &str = ".wh.";
/// What marks a directory that hides the one below it.
const OPAQUE: &str = ".wh..wh..opq";
/// The attribute of such a directory in the layer.
const OPAQUE_ATTRIBUTE: &str = "trusted.overlay.opaque";

/// A name in the layer.
#[derive(Debug)]
pub struct Change {
    /// The name in the root file system.
    pub name: PathBuf,
    /// What was said of it when it was listed.
    pub meta: Metadata,
    /// What has that name.
    pub what: What,
}

/// What has a name in the layer.
#[derive(Debug)]
pub enum What {
    /// Nothing any more.
    Gone,
    /// A directory, and whether it hides the one below.
    Dir(bool),
    /// A file with this content.
    File(Content),
    /// A link to this path.
    Link(PathBuf),
    /// A pipe.
    Fifo,
}

/// Where the content of a file is.
#[derive(Debug, Clone)]
pub enum Content {
    /// In the layer, as it was listed.
    Own(Arc<Tree>),
    /// In a copy at this path.
    Copy(PathBuf),
}

/// Lists what was changed in the layer `upper`. Sockets are left out: who restores one makes it; and what goes
/// meanwhile, if tasks run. Those may change the layer, but lead nobody out of it.
///
/// # Errors
/// If it cannot be read.
pub fn list(upper: &Path) -> Result<Vec<Change>> {
    let shown = || upper.display().to_string();
    let Some(tree) = there(Tree::at(upper)).context(shown)? else { return Ok(Vec::new()) };
    let tree = Arc::new(tree);
    let (mut found, mut todo) = (Vec::new(), vec![(PathBuf::new(), None)]);
    while let Some((name, listed)) = todo.pop() {
        let shown = || upper.join(&name).display().to_string();
        let Some(dir) = there(tree.dir(&name)).context(shown)? else { continue };
        let entries = tree::list(&dir, &name).context(shown)?;
        // What is in a directory comes behind it.
        if let Some(meta) = listed {
            found.push(Change { name, meta, what: What::Dir(is_opaque(&dir)) });
        }
        for entry in entries {
            if entry.meta.is_dir() {
                todo.push((entry.name, Some(entry.meta)));
            } else if let Some(what) = What::of(&tree, &entry) {
                found.push(Change { name: entry.name, meta: entry.meta, what });
            }
        }
    }
    Ok(found)
}

/// What is there, if it still is.
fn there<T>(found: rustix::io::Result<T>) -> rustix::io::Result<Option<T>> {
    match found {
        Err(errno) if tree::is_gone(errno) => Ok(None),
        found => found.map(Some),
    }
}

impl What {
    /// What something is that is no directory, if it is of a layer.
    fn of(tree: &Arc<Tree>, entry: &Entry) -> Option<Self> {
        let kind = entry.meta.file_type();
        if kind.is_char_device() && entry.meta.rdev() == 0 {
            Some(Self::Gone)
        } else if kind.is_file() {
            Some(Self::File(Content::Own(Arc::clone(tree))))
        } else if let Some(to) = &entry.link {
            Some(Self::Link(to.clone()))
        } else {
            kind.is_fifo().then_some(Self::Fifo)
        }
    }
}

fn is_opaque(dir: &File) -> bool {
    let mut value = [0; 4];
    let found = fgetxattr(dir, OPAQUE_ATTRIBUTE, &mut value[..]);
    found.is_ok_and(|len| &value[..len] == b"y")
}

/// Writes the archive of what was changed.
///
/// # Errors
/// If a file cannot be read, or the archive not be written.
pub fn write(to: &mut dyn Write, changes: &[Change]) -> Result<()> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    for change in changes {
        change.write(&mut archive).context(|| change.name.display().to_string())?;
    }
    archive.finish().context(|| "the archive of changed files")
}

impl Change {
    /// Opens the content of a file.
    ///
    /// # Errors
    /// If it is not there any more: something else has its name; or if it cannot be opened.
    pub fn open(&self, content: &Content) -> io::Result<File> {
        match content {
            Content::Own(tree) => Ok(tree.file(&self.name, tree::id(&self.meta))?),
            Content::Copy(path) => File::open(path),
        }
    }

    fn write(&self, archive: &mut Builder<&mut dyn Write>) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(&self.meta);
        let name = &self.name;
        match &self.what {
            What::Gone => {
                let mut marked = OsString::from(WHITEOUT);
                marked.push(name.file_name().unwrap_or_default());
                empty(archive, &name.with_file_name(marked))
            }
            What::Dir(opaque) => {
                archive.append_data(&mut header, name, io::empty())?;
                if *opaque { empty(archive, &name.join(OPAQUE)) } else { Ok(()) }
            }
            What::File(content) => archive.append_file(name, &mut self.open(content)?),
            What::Link(target) => archive.append_link(&mut header, name, target),
            What::Fifo => archive.append_data(&mut header, name, io::empty()),
        }
    }
}

fn empty(archive: &mut Builder<&mut dyn Write>, path: &Path) -> io::Result<()> {
    archive.append_data(&mut header(EntryType::Regular, 0, 0o600), path, io::empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_that_becomes_a_link_leads_nowhere() {
        let place = tempfile::tempdir().unwrap();
        let [upper, outside] = ["upper", "outside"].map(|name| place.path().join(name));
        for (dir, content) in [(upper.join("d"), "own"), (outside.clone(), "secret")] {
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("file"), content).unwrap();
        }
        let listed = list(&upper).unwrap();
        let mut archive = Vec::new();
        write(&mut archive, &listed).unwrap();
        assert!(archive.windows(3).any(|part| part == b"own"));
        fs::rename(upper.join("d"), upper.join("old")).unwrap();
        symlink(&outside, upper.join("d")).unwrap();
        let mut archive = Vec::new();
        let said = write(&mut archive, &listed).unwrap_err().to_string();
        assert!(said.contains("d/file"), "{said}");
        assert!(!archive.windows(6).any(|part| part == b"secret"));
        let names: Vec<PathBuf> = list(&upper).unwrap().into_iter().map(|it| it.name).collect();
        assert!(!names.contains(&"d/file".into()), "{names:?}");
    }
}
