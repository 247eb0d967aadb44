//! What a container has changed in its files: the layer `upper` of an overlay, and the archive of it,
//! with whiteouts as OCI has them.

mod apply;
pub mod attributes;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Known;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::fgetxattr;
use tar::{Builder, EntryType, Header};
use torpor_kernel::tree::{self, Attributes, Entry, Id, Tree};

pub use self::apply::{SetId, apply};
use crate::archive::header;
use crate::error::{Context, Error, Result};

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
    /// A directory, whether it hides the one below, and its extended attributes.
    Dir(bool, Attributes),
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
    /// In a copy at this path, of a file that had these extended attributes.
    Copy(PathBuf, Attributes),
}

/// Lists what was changed in the layer `upper`. Sockets are left out: who restores one makes it; and what goes
/// meanwhile, if tasks run. Those may change the layer, but lead nobody out of it.
///
/// # Errors
/// If a directory or a file of the layer cannot be read; if there is a device, which no start would take.
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
            let attributes = attributes::of(&dir).context(shown)?;
            found.push(Change { name, meta, what: What::Dir(is_opaque(&dir), attributes) });
        }
        for entry in entries {
            if entry.meta.is_dir() {
                todo.push((entry.name, Some(entry.meta)));
            } else if let Some(what) = What::of(&tree, &entry)? {
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
    fn of(tree: &Arc<Tree>, entry: &Entry) -> Result<Option<Self>> {
        let kind = entry.meta.file_type();
        if kind.is_char_device() && entry.meta.rdev() == 0 {
            Ok(Some(Self::Gone))
        } else if kind.is_file() {
            Ok(Some(Self::File(Content::Own(Arc::clone(tree)))))
        } else if let Some(to) = &entry.link {
            Ok(Some(Self::Link(to.clone())))
        } else if kind.is_char_device() || kind.is_block_device() {
            let text = format!("the container has made the device /{}", entry.name.display());
            Err(Error::new(text + ", and no start takes one from a snapshot").hint(
                "in a tmpfs at /dev, as runc spec writes it, each start makes devices anew; another one is \
                 removed before: --warmup 'rm FILE'",
            ))
        } else {
            Ok(kind.is_fifo().then_some(Self::Fifo))
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
    let mut links = HashMap::new();
    for change in changes {
        let first = change.first_name(&mut links);
        change.write(&mut archive, first).context(|| change.name.display().to_string())?;
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
            Content::Copy(path, _) => File::open(path),
        }
    }

    /// The name that a file is in the archive with already, if it has several: `links` knows those that were written.
    fn first_name<'c>(&'c self, links: &mut HashMap<Id, &'c Path>) -> Option<&'c Path> {
        if !matches!(self.what, What::File(_)) || self.meta.nlink() < 2 {
            return None;
        }
        match links.entry(tree::id(&self.meta)) {
            Known::Occupied(first) => Some(*first.get()),
            Known::Vacant(place) => {
                place.insert(&self.name);
                None
            }
        }
    }

    /// Writes it; a file that is there under its `first` name as a link to that.
    fn write(&self, archive: &mut Builder<&mut dyn Write>, first: Option<&Path>) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(&self.meta);
        let name = &self.name;
        match &self.what {
            What::Gone => {
                let mut marked = OsString::from(WHITEOUT);
                marked.push(name.file_name().unwrap_or_default());
                empty(archive, &name.with_file_name(marked))
            }
            What::Dir(opaque, attributes) => {
                attributes::write(archive, attributes)?;
                archive.append_data(&mut header, name, io::empty())?;
                if *opaque { empty(archive, &name.join(OPAQUE)) } else { Ok(()) }
            }
            What::File(content) => match first {
                Some(first) => {
                    header.set_entry_type(EntryType::Link);
                    header.set_size(0);
                    archive.append_link(&mut header, name, first)
                }
                None => self.write_file(archive, content),
            },
            What::Link(target) => archive.append_link(&mut header, name, target),
            What::Fifo => archive.append_data(&mut header, name, io::empty()),
        }
    }

    fn write_file(
        &self,
        archive: &mut Builder<&mut dyn Write>,
        content: &Content,
    ) -> io::Result<()> {
        let mut file = self.open(content)?;
        match content {
            Content::Own(_) => attributes::write(archive, &attributes::of(&file)?)?,
            Content::Copy(_, attributes) => attributes::write(archive, attributes)?,
        }
        archive.append_file(&self.name, &mut file)
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

    /// What is packed comes back with all that it was.
    #[test]
    fn links_and_attributes_are_kept() {
        let place = tempfile::tempdir().unwrap();
        let [upper, new] = ["upper", "new"].map(|name| place.path().join(name));
        fs::create_dir_all(upper.join("d")).unwrap();
        fs::create_dir(&new).unwrap();
        fs::write(upper.join("d/file"), "content").unwrap();
        fs::hard_link(upper.join("d/file"), upper.join("other")).unwrap();
        // As setfacl writes them: the owner, user 10, the group, the mask, others.
        let line = |tag: u16, mode: u16, id: u32| {
            [&tag.to_le_bytes()[..], &mode.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        let none = u32::MAX;
        let rights = [line(1, 7, none), line(2, 4, 10), line(4, 5, none), line(16, 5, none)];
        let rights = [&[2, 0, 0, 0][..], &rights.concat(), &line(32, 0, none)].concat();
        let mut capability = vec![0; 20];
        capability[..6].copy_from_slice(&[1, 0, 0, 2, 0, 4]);
        let given: [(&str, &str, &[u8]); 5] = [
            ("d/file", "user.a=b", b"two\nlines\0"),
            ("d/file", "security.capability", &capability),
            ("other", "system.posix_acl_access", &rights),
            ("d", "system.posix_acl_default", &rights),
            ("d", "user.empty", b""),
        ];
        for (file, name, value) in given {
            rustix::fs::setxattr(upper.join(file), name, value, rustix::fs::XattrFlags::empty())
                .unwrap();
        }
        let of_host = "trusted.of-host";
        rustix::fs::setxattr(upper.join("d"), of_host, b"x", rustix::fs::XattrFlags::empty())
            .unwrap();
        fs::write(upper.join("d/late"), "").unwrap();
        rustix::fs::removexattr(upper.join("d/late"), "system.posix_acl_access").unwrap();
        let mut archive = Vec::new();
        write(&mut archive, &list(&upper).unwrap()).unwrap();
        apply(&mut archive.as_slice(), &new, SetId::Taken).unwrap();
        let of = |name: &str| File::open(new.join(name)).unwrap();
        for (file, name, value) in given {
            let found = tree::attributes(of(file)).unwrap();
            let found = found.iter().find(|(known, _)| known == name.as_bytes());
            assert_eq!(found.map(|(_, value)| value.as_slice()), Some(value), "{file}: {name}");
        }
        assert!(tree::attributes(of("d/late")).unwrap().is_empty(), "it has no list of its own");
        let ids = ["d/file", "other"].map(|name| tree::id(&of(name).metadata().unwrap()));
        assert_eq!(ids[0], ids[1]);
        assert_eq!(io::read_to_string(of("other")).unwrap(), "content");
        assert!(
            tree::attributes(of("d")).unwrap().iter().all(|(name, _)| name != of_host.as_bytes())
        );
        // Nobody who is not believed gives a program rights.
        let other = tempfile::tempdir().unwrap();
        let refused = apply(&mut archive.as_slice(), other.path(), SetId::Refused).unwrap_err();
        assert!(refused.to_string().contains("or with capabilities"), "{refused}");
    }

    /// It leads to a file that was judged without them.
    #[test]
    fn a_link_gives_no_rights() {
        let new = tempfile::tempdir().unwrap();
        let mut bytes = Vec::new();
        let mut archive = Builder::new(&mut bytes as &mut dyn Write);
        let head = |kind| {
            let mut head = header(kind, 0, 0o755);
            head.set_uid(0);
            head.set_gid(0);
            head
        };
        archive.append_data(&mut head(EntryType::Regular), "file", io::empty()).unwrap();
        let capability = (b"security.capability".to_vec(), vec![0; 20]);
        attributes::write(&mut archive, &vec![capability]).unwrap();
        archive.append_link(&mut head(EntryType::Link), "link", "file").unwrap();
        archive.finish().unwrap();
        drop(archive);
        let refused = apply(&mut bytes.as_slice(), new.path(), SetId::Refused).unwrap_err();
        assert!(refused.to_string().contains("link has extended attributes"), "{refused}");
        assert!(tree::attributes(File::open(new.path().join("file")).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn a_device_is_refused_by_name() {
        let upper = tempfile::tempdir().unwrap();
        let device = upper.path().join("random");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, &device, kind, mode, rustix::fs::makedev(1, 8))
            .unwrap();
        let refused = list(upper.path()).unwrap_err().to_string();
        assert!(refused.contains("the device /random"), "{refused}");
        fs::remove_file(&device).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &device, kind, mode, 0).unwrap();
        assert_eq!(list(upper.path()).unwrap().len(), 1, "a whiteout is none");
    }

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
