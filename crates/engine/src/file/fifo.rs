//! Fifos: pipes that a path leads to, which may be gone.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, OFlags};
use torpor_images::ImageDir;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FifoEntry, FileEntry};
use torpor_policy::{FifoEnd, OpenFile, PathFile};

use super::description::{duplicate, is_readable, same_inode};
use super::open::OpenFiles;
use super::opener::Opener;
use super::queue::{Queues, Saved};
use super::remap::Paths;
use super::{Found, regular};
use crate::error::{Context, Error, Result};

/// The dump half.
#[derive(Debug)]
pub(crate) struct FifoDumper {
    queues: Queues,
    /// Number and one description of each, one to read from if there is any: to open
    /// a fifo can wake a task that waits for its other end.
    known: HashMap<(u64, u64), (u32, OwnedFd)>,
}

impl Default for FifoDumper {
    fn default() -> Self {
        FifoDumper { queues: Queues::new(kind::FIFO_DATA), known: HashMap::new() }
    }
}

impl FifoDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// As [`regular::entry`]; if there are no more descriptors.
    pub(crate) fn describe(
        &mut self,
        paths: &mut Paths<'_>,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        let is_fifo = FileType::from_raw_mode(found.stat.st_mode) == FileType::Fifo;
        if !is_fifo || !found.link_bytes().starts_with(b"/") || found.is_path_only() {
            return Ok(None);
        }
        let key = (found.stat.st_dev, found.stat.st_ino);
        let next = u32::try_from(self.known.len() + 1).unwrap_or(u32::MAX);
        let pipe_id = self.known.get(&key).map_or(next, |known| known.0);
        if is_readable(found.flags()) || pipe_id == next {
            self.known.insert(key, (pipe_id, duplicate(found.file.as_fd())?));
        }
        let regf_id = Some(regular::describe_as_path(paths, found)?);
        let fifo = FifoEntry { id: found.id, pipe_id, regf_id };
        Ok(Some(FileEntry { fifo: Some(fifo), ..found.entry(FdTypes::Fifo) }))
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole.
    ///
    /// # Errors
    /// If a queue cannot be read, or the image cannot be written.
    pub(crate) fn finish(&mut self, images: &ImageDir) -> Result<()> {
        for (pipe_id, file) in self.known.values() {
            self.queues.save(images, file, *pipe_id)?;
        }
        self.queues.finish(images)
    }
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct FifoRestorer {
    saved: Saved,
    ends: Vec<FifoEnd>,
    /// A description of each fifo for both directions: opening it for one only waits
    /// for the other.
    anchors: HashMap<u32, OwnedFd>,
}

impl FifoRestorer {
    /// Reads and checks the images of this kind, before anything is made.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(&mut self, images: &ImageDir, ends: &[&FifoEnd]) -> Result<()> {
        self.ends = ends.iter().copied().copied().collect();
        self.saved = Saved::load(images, kind::FIFO_DATA)?;
        Ok(())
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If its path leads to none; if the content does not fit into it.
    pub(crate) fn open(&mut self, cx: &mut Opener<'_>, fifo: &FifoEnd) -> Result<OwnedFd> {
        let path = path(cx.described, fifo)?;
        if !self.anchors.contains_key(&fifo.pipe) {
            let anchor = self.anchor(cx, fifo.pipe, path)?;
            self.saved.fill(fifo.pipe, &anchor)?;
            self.anchors.insert(fifo.pipe, anchor);
        }
        let opened = regular::open(cx, path)?;
        let stat = |file: &OwnedFd| rustix::fs::fstat(file).context(|| "fstat".to_owned());
        match self.anchors.get(&fifo.pipe) {
            Some(anchor) if !same_inode(&stat(anchor)?, &stat(&opened)?) => {
                Err(Error::invalid(path.text(), "another fifo has its name now"))
            }
            _ => Ok(opened),
        }
    }

    /// A fifo, open for both directions. Who may have one of them only could not put anything into a fifo of others:
    /// then it has to be empty, or to have had its content here.
    fn anchor(&self, cx: &mut Opener<'_>, pipe_id: u32, path: &PathFile) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK;
        match regular::open(cx, &path.opened_with(flags.bits())) {
            Err(denied)
                if denied.is_denial()
                    && (self.saved.is_empty(pipe_id) || cx.are_places_trusted()?) =>
            {
                let wanted = OFlags::from_bits_retain(path.flags);
                cx.roots.open_fifo(path.mount, &path.path, wanted)?.ok_or(denied)
            }
            opened => opened,
        }
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// As [`FifoRestorer::open`], for those that only a message in a socket holds.
    pub(crate) fn connect(&mut self, cx: &mut Opener<'_>, files: &mut OpenFiles) -> Result<()> {
        // Those that only exist in flight in a socket are opened late, and could not be
        // without the anchor.
        for end in std::mem::take(&mut self.ends) {
            if files.get(end.file).is_none() {
                let file = self.open(cx, &end)?;
                files.insert(end.file, file);
            }
        }
        // Or else nobody would ever see an end of file.
        self.anchors.clear();
        Ok(())
    }
}

/// The path of a fifo.
fn path<'a>(all: &'a HashMap<u32, OpenFile>, fifo: &FifoEnd) -> Result<&'a PathFile> {
    all.get(&fifo.path)
        .and_then(OpenFile::path)
        .ok_or_else(|| Error::invalid("files.img", format!("fifo {} has no path", fifo.file)))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode};

    use super::*;
    use crate::file::testing::{World, await_readable, fdinfo, link};

    #[test]
    fn ends_and_data_of_fifos_with_and_without_a_name() {
        let world = World::new();
        let open = |name, flags| rustix::fs::open(world.path(name), flags, Mode::empty()).unwrap();
        let make = |name| {
            let mode = Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, world.path(name), FileType::Fifo, mode, 0).unwrap();
        };
        make("named");
        make("gone");
        let both = open("named", OFlags::RDWR);
        rustix::io::write(&both, b"named").unwrap();
        let read = open("gone", OFlags::RDONLY | OFlags::NONBLOCK);
        let write = open("gone", OFlags::WRONLY);
        rustix::io::write(&write, b"gone").unwrap();
        std::fs::remove_file(world.path("gone")).unwrap();
        let files = vec![write, read, both];
        let before: Vec<_> = files.iter().map(|f| (fdinfo(f), link(f))).collect();
        let files = world.round_trip(files);
        assert_eq!(files.iter().map(|f| (fdinfo(f), link(f))).collect::<Vec<_>>(), before);
        let mut text = [0; 8];
        assert_eq!(rustix::io::read(&files[2], &mut text).unwrap(), 5);
        assert_eq!(&text[..5], b"named");
        assert_eq!(rustix::io::read(&files[1], &mut text).unwrap(), 4);
        assert_eq!(rustix::fs::fstat(&files[0]).unwrap().st_nlink, 0);
        // No anchor is left.
        let [write, read, _] = <[OwnedFd; 3]>::try_from(files).unwrap();
        drop(write);
        await_readable(&read);
        assert_eq!(rustix::io::read(&read, &mut text).unwrap(), 0);
    }
}
