//! An archive: a tar file, as Podman and Kubernetes make of a checkpoint.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use flate2::read::MultiGzDecoder;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use crate::{INVENTORY, Memory, NotRegular, PARENT_LINK, Shelf, Store, each_entry};

/// Where runtimes have the images in their archives.
const IMAGES: &str = "checkpoint";
/// More files than the largest tree has images.
const MAX_FILES: usize = 1 << 20;
/// The first bytes of what gzip and zstd make (RFC 1952, RFC 8878).
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// A checkpoint in a tar file: as Podman, containerd and the kubelet export one, or with the
/// images alone; plain, or compressed by gzip or zstd.
///
/// What is opened is read into memory. What is created is in memory until it is complete;
/// then it is written to the file, plain, which is there as a whole or not at all.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    files: Memory,
    /// Whether the file is to be written, and has been.
    written: Option<Mutex<bool>>,
}

impl Archive {
    /// Reads an archive.
    ///
    /// # Errors
    /// If the file cannot be read; [`io::ErrorKind::Other`] with [`NotRegular`] if it is no regular file;
    /// [`io::ErrorKind::InvalidData`] if it holds no images, a file twice, more files than any checkpoint has, or more bytes
    /// than there is memory for.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::open_with(path.as_ref(), OFlags::empty())
    }

    fn open_with(path: &Path, flags: OFlags) -> io::Result<Self> {
        let files = Shelf::new().place("archive")?;
        let mut file = open_regular(path, flags)?;
        let mut start = [0; 4];
        let len = read_up_to(&mut file, &mut start)?;
        file.seek(SeekFrom::Start(0))?;
        let file = BufReader::new(file);
        let plain: Box<dyn Read> = if start[..len].starts_with(&GZIP) {
            Box::new(MultiGzDecoder::new(file))
        } else if start[..len] == ZSTD {
            Box::new(zstd::Decoder::with_buffer(file)?)
        } else {
            Box::new(file)
        };
        unpack(plain, &files, spare_memory()?)?;
        if !files.exists(INVENTORY)? {
            return Err(invalid("it holds no checkpoint: there is no inventory.img"));
        }
        Ok(Archive { path: path.to_owned(), files, written: None })
    }

    /// An archive that is written to `path` when its checkpoint is complete.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        let files = Shelf::new().place("archive")?;
        Ok(Archive { path: path.as_ref().to_owned(), files, written: Some(Mutex::new(false)) })
    }

    fn write(&self) -> io::Result<()> {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let partial = self.path.with_file_name(name);
        let written = (|| {
            // What is there was left behind, or leads to where somebody else wants it.
            let _ = std::fs::remove_file(&partial);
            let mut options = File::options();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&partial)?;
            pack(&self.files, &mut file)?;
            file.sync_all()?;
            std::fs::rename(&partial, &self.path)
        })();
        if written.is_err() {
            // What made it fail is the error to be told.
            let _ = std::fs::remove_file(&partial);
        }
        written
    }
}

/// A fifo that somebody has laid out could block.
fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP | Errno::NXIO) => return Err(NotRegular::error()),
        Err(errno) => return Err(errno.into()),
    };
    if file.metadata()?.is_file() { Ok(file) } else { Err(NotRegular::error()) }
}

/// How many bytes this host has room for: an archive of a few can unpack to as many as it likes. What is swapped out takes none.
///
/// # Errors
/// If the kernel does not say it.
pub fn spare_memory() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib = |name: &str| -> Option<u64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    let known = kib("MemAvailable:").ok_or_else(|| invalid("/proc/meminfo says nothing of use"))?;
    Ok((known + kib("SwapFree:").unwrap_or(0)).saturating_mul(1024))
}

fn read_up_to(from: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < to.len() {
        match from.read(&mut to[len..])? {
            0 => break,
            more => len += more,
        }
    }
    Ok(len)
}

pub(crate) fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// Writes all files of a store as a tar stream.
pub(crate) fn pack(store: &dyn Store, to: &mut dyn Write) -> io::Result<()> {
    let mut archive = Builder::new(to);
    for name in sorted(store)? {
        let mut header = Header::new_gnu();
        header.set_mode(0o600);
        if name == PARENT_LINK {
            let target = store.parent_path()?.ok_or(io::ErrorKind::NotFound)?;
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            archive.append_link(&mut header, format!("{IMAGES}/{name}"), target)?;
            continue;
        }
        let file = store.open(&name)?;
        let len = file.metadata()?.len();
        header.set_entry_type(EntryType::Regular);
        header.set_size(len);
        archive.append_data(&mut header, format!("{IMAGES}/{name}"), file.take(len))?;
    }
    archive.finish()
}

/// How many bytes [`pack`] writes: a head of a block for each file, its data in blocks, and two
/// blocks at the end. Names of images fit into their heads.
pub(crate) fn packed_len(store: &dyn Store) -> io::Result<u64> {
    const BLOCK: u64 = 512;
    sorted(store)?.iter().try_fold(2 * BLOCK, |sum, name| {
        let len = if name == PARENT_LINK { 0 } else { store.open(name)?.metadata()?.len() };
        Ok(sum + BLOCK + len.next_multiple_of(BLOCK))
    })
}

/// The inventory comes last: what is cut off is no checkpoint.
fn sorted(store: &dyn Store) -> io::Result<Vec<String>> {
    let mut names = store.names()?;
    names.sort_by(|a, b| (a == INVENTORY, a).cmp(&(b == INVENTORY, b)));
    Ok(names)
}

/// Reads the images of a tar stream into `to`: those below `checkpoint/`, or at its top. What
/// else a runtime has put beside them is passed over.
pub(crate) fn unpack(from: impl Read, to: &Memory, max: u64) -> io::Result<()> {
    let (mut files, mut bytes) = (0, 0_u64);
    let failed = |error| error;
    each_entry(from, failed, |entry| {
        let path = entry.path()?.into_owned();
        let Some(name) = image_name(&path) else { return Ok(()) };
        files += 1;
        bytes = bytes.saturating_add(entry.size());
        if files > MAX_FILES {
            return Err(invalid("it holds more files than a checkpoint may have"));
        }
        if bytes > max {
            return Err(invalid(format!(
                "it holds more than {max} bytes, which there is room for"
            )));
        }
        match entry.header().entry_type() {
            EntryType::Regular => {
                let twice = |e: io::Error| match e.kind() {
                    io::ErrorKind::AlreadyExists => invalid(format!("it holds {name} twice")),
                    _ => e,
                };
                io::copy(entry, &mut to.create(&name).map_err(twice)?)?;
            }
            EntryType::Symlink if name == PARENT_LINK => {
                let target = entry.link_name()?.ok_or_else(|| invalid("a link leads nowhere"))?;
                to.set_parent(&target)?;
            }
            _ => return Err(invalid(format!("{name} is not a regular file in it"))),
        }
        Ok(())
    })
}

/// The name of an image by its path in an archive; none if it is something else.
fn image_name(path: &Path) -> Option<String> {
    let mut parts = path.components().filter(|part| *part != Component::CurDir);
    let name = match (parts.next()?, parts.next(), parts.next()) {
        (Component::Normal(name), None, None) => name,
        (Component::Normal(dir), Some(Component::Normal(name)), None) if dir == IMAGES => name,
        _ => return None,
    };
    let name = name.to_str()?;
    let is_image = name == PARENT_LINK || Path::new(name).extension().is_some_and(|e| e == "img");
    is_image.then(|| name.to_owned())
}

impl Store for Archive {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<File> {
        self.files.open(name)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        self.files.create(name)
    }

    fn reopen(&self, name: &str) -> io::Result<File> {
        self.files.reopen(name)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let written =
            self.written.as_ref().map(|w| w.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(mut written) = written.filter(|written| **written && name == INVENTORY) {
            std::fs::remove_file(&self.path)?;
            *written = false;
        }
        self.files.remove(name)
    }

    fn replace(&self, from: &str, name: &str) -> io::Result<()> {
        self.files.replace(from, name)
    }

    fn exists(&self, name: &str) -> io::Result<bool> {
        self.files.exists(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.files.names()
    }

    /// Archives lie side by side, as the directories of rounds do. A link to one would lead to where whoever has made it cannot
    /// read.
    fn relative(&self, path: &Path) -> io::Result<Arc<dyn Store>> {
        let mut parts = path.components();
        let beside = match (parts.next(), parts.next(), parts.next()) {
            (Some(Component::ParentDir), Some(Component::Normal(name)), None) => name,
            _ => return Err(io::ErrorKind::NotFound.into()),
        };
        let beside = self.path.with_file_name(beside);
        Ok(Arc::new(Archive::open_with(&beside, OFlags::NOFOLLOW)?))
    }

    fn inner(&self, name: &str) -> io::Result<Arc<dyn Store>> {
        self.files.inner(name)
    }

    fn parent_path(&self) -> io::Result<Option<PathBuf>> {
        self.files.parent_path()
    }

    fn set_parent(&self, path: &Path) -> io::Result<()> {
        self.files.set_parent(path)
    }

    fn complete(&self) -> io::Result<()> {
        let Some(written) = &self.written else { return Ok(()) };
        self.write()?;
        *written.lock().unwrap_or_else(PoisonError::into_inner) = true;
        Ok(())
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        self.files.identity()
    }

    fn directory(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn put(store: &dyn Store, name: &str, content: &[u8]) {
        store.create(name).unwrap().write_all(content).unwrap();
    }

    fn get(store: &dyn Store, name: &str) -> Vec<u8> {
        let mut content = vec![];
        store.open(name).unwrap().read_to_end(&mut content).unwrap();
        content
    }

    #[test]
    fn an_archive_is_there_when_it_is_complete_and_gone_when_it_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("two.tar");
        let archive = Archive::create(&path).unwrap();
        put(&archive, "core-1.img", b"core");
        put(&archive, INVENTORY, b"inventory");
        assert!(!path.exists());
        archive.complete().unwrap();
        let read = Archive::open(&path).unwrap();
        assert_eq!(get(&read, "core-1.img"), b"core");
        assert_eq!(read.names().unwrap(), ["core-1.img", INVENTORY]);
        archive.remove(INVENTORY).unwrap();
        assert!(!path.exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_archive_builds_on_the_one_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        for (name, parent) in [("1.tar", None), ("2.tar", Some("../1.tar"))] {
            let archive = Archive::create(dir.path().join(name)).unwrap();
            put(&archive, INVENTORY, name.as_bytes());
            parent.iter().for_each(|parent| archive.set_parent(Path::new(parent)).unwrap());
            archive.complete().unwrap();
        }
        let second = Archive::open(dir.path().join("2.tar")).unwrap();
        let first = second.parent().unwrap().unwrap();
        assert_eq!(get(first.as_ref(), INVENTORY), b"1.tar");
        assert!(first.parent().unwrap().is_none());
    }

    fn tar(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        let mut archive = Builder::new(vec![]);
        for (name, kind, content) in entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(content.len() as u64);
            if *kind == EntryType::Symlink {
                archive.append_link(&mut header, name, "/etc").unwrap();
            } else {
                archive.append_data(&mut header, name, *content).unwrap();
            }
        }
        archive.into_inner().unwrap()
    }

    fn open(bytes: &[u8]) -> io::Result<Archive> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tar");
        std::fs::write(&path, bytes).unwrap();
        Archive::open(path)
    }

    #[test]
    fn what_runtimes_put_beside_images_is_passed_over() {
        use EntryType::Regular;
        let bytes = tar(&[
            ("config.dump", Regular, b"{}"),
            ("checkpoint/inventory.img", Regular, b"i"),
            ("checkpoint/descriptors.json", Regular, b"[]"),
            ("rootfs-diff.tar", Regular, b"x"),
        ]);
        assert_eq!(open(&bytes).unwrap().names().unwrap(), [INVENTORY]);
        let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
        gzip.write_all(&bytes).unwrap();
        assert_eq!(open(&gzip.finish().unwrap()).unwrap().names().unwrap(), [INVENTORY]);
        let packed = zstd::encode_all(bytes.as_slice(), 1).unwrap();
        assert_eq!(open(&packed).unwrap().names().unwrap(), [INVENTORY]);
    }

    /// Before it is read: what is packed well is that much by a few bytes.
    #[test]
    fn what_there_is_no_memory_for_is_refused() {
        for sizes in [&[2 * spare_memory().unwrap()][..], &[1, 1 << 62]] {
            let mut bytes = vec![];
            for (number, size) in sizes.iter().enumerate() {
                let mut header = Header::new_gnu();
                header.set_path(format!("checkpoint/pages-{number}.img")).unwrap();
                header.set_entry_type(EntryType::Regular);
                header.set_size(*size);
                header.set_cksum();
                bytes.extend(header.as_bytes());
                bytes.extend([0; 512]);
            }
            let error = open(&bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains("which there is room for"), "{error}");
        }
    }

    /// What is packed well fills the memory by a few bytes.
    #[test]
    fn names_of_any_length_are_not_read() {
        let inventory = ("checkpoint/inventory.img", EntryType::Regular, b"i".as_slice());
        let named = |len: usize| {
            let mut header = Header::new_gnu();
            header.set_path("long").unwrap();
            header.set_entry_type(EntryType::GNULongName);
            header.set_size(len as u64);
            header.set_cksum();
            let mut bytes = header.as_bytes().to_vec();
            bytes.resize(512 + len.next_multiple_of(512), b'a');
            bytes.extend(tar(&[("short", EntryType::Regular, b"x"), inventory]));
            open(&bytes)
        };
        named(1000).unwrap();
        let error = named(5 << 20).unwrap_err().to_string();
        assert!(error.starts_with("an entry is described by more than"), "{error}");
        // What is passed over may be of any length.
        let large = vec![7; 5 << 20];
        open(&tar(&[("rootfs-diff.tar", EntryType::Regular, &large), inventory])).unwrap();
    }

    /// The directory may be somebody else's.
    #[test]
    fn links_and_fifos_beside_are_no_archives() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let [path, other, partial] =
            ["2.tar", "1.tar", "2.tar.partial"].map(|name| dir.path().join(name));
        let kept = dir.path().join("kept");
        std::fs::write(&kept, "kept").unwrap();
        symlink(&kept, &partial).unwrap();
        let archive = Archive::create(&path).unwrap();
        put(&archive, INVENTORY, b"inventory");
        archive.set_parent(Path::new("../1.tar")).unwrap();
        archive.complete().unwrap();
        assert_eq!(std::fs::read(&kept).unwrap(), b"kept");
        assert_eq!(std::fs::symlink_metadata(&path).unwrap().mode(), 0o100_600);
        let parent = || Archive::open(&path).unwrap().parent().map(drop).unwrap_err();
        symlink(&path, &other).unwrap();
        assert!(NotRegular::is(&parent()));
        std::fs::remove_file(&other).unwrap();
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &other, kind, Mode::RWXU, 0).unwrap();
        assert!(NotRegular::is(&parent()));
        assert!(NotRegular::is(&Archive::open(&other).unwrap_err()));
    }

    #[test]
    fn strange_archives_are_refused() {
        use EntryType::{Fifo, Link, Regular, Symlink};
        let inventory = ("checkpoint/inventory.img", Regular, b"i".as_slice());
        for bytes in [
            tar(&[]),
            tar(&[("x", Regular, b"")]),
            tar(&[inventory, inventory]),
            tar(&[inventory, ("checkpoint/core-1.img", Fifo, b"")]),
            tar(&[inventory, ("checkpoint/core-1.img", Symlink, b"")]),
            tar(&[inventory, ("checkpoint/core-1.img", Link, b"")]),
            tar(&[inventory])[..600].to_vec(),
            b"no archive at all".to_vec(),
        ] {
            assert!(open(&bytes).is_err());
        }
    }
}
