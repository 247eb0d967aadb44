//! Pipes: their ends, their size, and what is queued in them.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, OFlags, Uid};
use rustix::pipe::PipeFlags;
use torpor_images::ImageDir;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry, PipeEntry};
use torpor_policy::{FileKey, PipeEnd};

use super::description::{PIPEFS, access, duplicate, open_flags, reopen, set_status_flags};
use super::open::OpenFiles;
use super::queue::{Anchor, Queues, Saved};
use super::{Found, ext};
use crate::error::{Context, Error, Result};
use crate::namespace::mount::Roots;
use crate::options::InheritFd;

/// The dump half.
#[derive(Debug)]
pub(crate) struct PipeDumper {
    queues: Queues,
}

impl Default for PipeDumper {
    fn default() -> Self {
        PipeDumper { queues: Queues::new(kind::PIPES_DATA) }
    }
}

impl PipeDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if its inode number does not fit the images; if its queue cannot be read or written
    /// to the image.
    pub(crate) fn describe(
        &mut self,
        images: &ImageDir,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        if found.fs_type != PIPEFS || found.is_path_only() {
            return Ok(None);
        }
        let pipe_id = u32::try_from(found.stat.st_ino)
            .map_err(|_| found.refuse("its inode number does not fit the images"))?;
        self.queues.save(images, &found.file, pipe_id)?;
        let pipe = PipeEntry { id: found.id, pipe_id, flags: found.flags(), fown: found.fown };
        Ok(Some(FileEntry { pipe: Some(pipe), ..found.entry(FdTypes::Pipe) }))
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole.
    ///
    /// # Errors
    /// If the image cannot be written.
    pub(crate) fn finish(&mut self, images: &ImageDir) -> Result<()> {
        self.queues.finish(images)
    }
}

/// The restore half. The first reading and the first writing end of a pipe are those
/// that pipe(2) made, the others are opened through procfs.
#[derive(Debug, Default)]
pub(crate) struct PipeRestorer {
    saved: Saved,
    ends: Vec<PipeEnd>,
    anchors: HashMap<u32, Anchor>,
    /// Original ends that are given away, by pipe and access mode.
    given: HashSet<(u32, u32)>,
}

impl PipeRestorer {
    /// Reads and checks the images of this kind, before anything is made.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(&mut self, images: &ImageDir, ends: &[&PipeEnd]) -> Result<()> {
        self.ends = ends.iter().copied().copied().collect();
        self.saved = Saved::load(images, kind::PIPES_DATA)?;
        Ok(())
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If a pipe cannot be made or opened with its flags; if its size is over the limit of the user, or the content does
    /// not fit into it.
    pub(crate) fn open(
        &mut self,
        given: &[InheritFd],
        roots: &Roots,
        pipe: &PipeEnd,
        user: Option<u32>,
    ) -> Result<OwnedFd> {
        match ext::inherited(given, &FileKey::of_pipe(pipe)) {
            Some(file) => match ext::own_null(roots, file, access(pipe.flags))? {
                Some(null) => Ok(null),
                None => self.inherit(roots, file, pipe, user),
            },
            None => self.end(pipe, user),
        }
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// As [`PipeRestorer::open`], for those that only a message in a socket holds.
    pub(crate) fn connect(
        &mut self,
        given: &[InheritFd],
        roots: &Roots,
        files: &mut OpenFiles,
        user: Option<u32>,
    ) -> Result<()> {
        // Ends that only exist in flight in a socket are opened late, and could not be
        // without the anchor.
        for end in std::mem::take(&mut self.ends) {
            if files.get(end.file).is_none() {
                let file = self.open(given, roots, &end, user)?;
                files.insert(end.file, file);
            }
        }
        // Or else nobody would ever see an end of file.
        self.anchors.clear();
        Ok(())
    }
}

impl PipeRestorer {
    fn end(&mut self, pipe: &PipeEnd, user: Option<u32>) -> Result<OwnedFd> {
        if !self.anchors.contains_key(&pipe.pipe) {
            // Its room counts for the real user of whoever makes it: when that is much, further pipes of that one get little.
            let make = || Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?);
            let own = rustix::process::getuid().as_raw();
            let made = torpor_sys::ipc::with_real_user(user.unwrap_or(own), make);
            let (read, write) = made.context(|| "pipe".to_owned())?;
            give(write.as_fd(), user).context(|| "fchown of a pipe".to_owned())?;
            self.saved.fill(pipe.pipe, &write)?;
            self.anchors.insert(pipe.pipe, Anchor { read, write });
        }
        let Some(anchor) = self.anchors.get(&pipe.pipe) else {
            return Err(Error::invalid("files.img", format!("no pipe {}", pipe.pipe)));
        };
        let mode = access(pipe.flags);
        let original = match mode {
            OFlags::RDONLY => Some(&anchor.read),
            OFlags::WRONLY => Some(&anchor.write),
            _ => None,
        };
        match original {
            Some(end) if self.given.insert((pipe.pipe, mode.bits())) => {
                let end = duplicate(end.as_fd())?;
                set_status_flags(&end, pipe.flags)?;
                Ok(end)
            }
            _ => anchor.end(open_flags(pipe.flags)),
        }
    }

    /// Takes the place of an end that was outside: the description that the caller
    /// gave is used if it is like the old one, as sharing it was part of its state. Another one is for no more than what
    /// was given, unless the tasks may open it so: it may be a file of this host, and no pipe.
    fn inherit(
        &mut self,
        roots: &Roots,
        file: BorrowedFd<'_>,
        pipe: &PipeEnd,
        user: Option<u32>,
    ) -> Result<OwnedFd> {
        if let Err(error) = give(file, user) {
            tracing::warn!("the pipe that is given for {} stays its owner's: {error}", pipe.pipe);
        }
        let now = rustix::fs::fcntl_getfl(file).context(|| "F_GETFL".to_owned())?;
        let wanted = open_flags(pipe.flags);
        let mode = access(pipe.flags);
        let first = self.given.insert((pipe.pipe, mode.bits()));
        if first && mode == OFlags::RDONLY {
            self.fill_given(file, pipe.pipe)?;
        }
        if first && access(now.bits()) == mode {
            let end = duplicate(file)?;
            set_status_flags(&end, pipe.flags)?;
            return Ok(end);
        }
        let is_given = [mode, OFlags::RDWR].contains(&access(now.bits()));
        let _limited = if is_given { None } else { roots.limit(file)? };
        reopen(file, wanted)
    }

    /// What was on its way to the tree is in the image, unless it is the same pipe. What was on its way out is the
    /// outside's business.
    fn fill_given(&mut self, file: BorrowedFd<'_>, pipe: u32) -> Result<()> {
        let stat = rustix::fs::fstat(file).context(|| "fstat of a pipe".to_owned())?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo {
            if !self.saved.is_empty(pipe) {
                tracing::warn!(
                    "what waits in pipe {pipe} is lost: what is given for it is no pipe"
                );
            }
            return Ok(());
        }
        match rustix::io::ioctl_fionread(file) {
            Ok(0) => self.saved.fill(pipe, reopen(file, OFlags::WRONLY | OFlags::NONBLOCK)?),
            _ => Ok(()),
        }
    }
}

/// Lets the user of the tasks have a pipe: only its owner may open an end once more, as programs do by `/dev/stderr`. A runtime
/// does it with those that it starts a container with. The files that there can be in place of a pipe stay as they are.
fn give(pipe: BorrowedFd<'_>, user: Option<u32>) -> std::io::Result<()> {
    if rustix::fs::fstatfs(pipe)?.f_type == PIPEFS {
        rustix::fs::fchown(pipe, user.map(Uid::from_raw), None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::fs::Mode;
    use torpor_images::proto::PipeDataEntry;

    use super::*;
    use crate::file::testing::{World, await_readable};
    use crate::options::InheritFd;

    fn read_all(file: &OwnedFd) -> Vec<u8> {
        await_readable(file);
        let mut data = vec![0; 1 << 20];
        let n = rustix::io::read(file, &mut data).unwrap();
        data.truncate(n);
        data
    }

    #[test]
    fn ends_flags_size_and_data_come_back() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK).unwrap();
        rustix::pipe::fcntl_setpipe_size(&write, 1 << 18).unwrap();
        let second = reopen(&read, OFlags::RDWR).unwrap();
        let data: Vec<u8> = (0u32..1 << 16).flat_map(u32::to_le_bytes).collect();
        assert_eq!(rustix::io::write(&write, &data).unwrap(), 1 << 18);
        let files = World::new().round_trip(vec![read, write, second]);
        let flags: Vec<_> = files
            .iter()
            .map(|f| rustix::fs::fcntl_getfl(f).unwrap() & !OFlags::LARGEFILE)
            .collect();
        let nonblock = OFlags::NONBLOCK;
        assert_eq!(flags, [OFlags::RDONLY | nonblock, OFlags::WRONLY | nonblock, OFlags::RDWR]);
        assert_eq!(rustix::pipe::fcntl_getpipe_size(&files[0]).unwrap(), 1 << 18);
        assert_eq!(read_all(&files[0]), data);
        // No anchor is left that keeps the pipe open.
        let [read, write, second] = <[OwnedFd; 3]>::try_from(files).unwrap();
        drop((write, second));
        assert_eq!(read_all(&read), b"");
    }

    #[test]
    fn the_data_is_still_there_after_the_dump() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, b"hello").unwrap();
        let world = World::new();
        world.dump(&[&write]).unwrap();
        assert_eq!(read_all(&read), b"hello");
        drop(write);
        assert_eq!(read_all(&read), b"");
    }

    #[test]
    fn packets_stay_packets() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::DIRECT).unwrap();
        for packet in ["one", "three", &"x".repeat(4096)] {
            rustix::io::write(&write, packet.as_bytes()).unwrap();
        }
        let files = World::new().round_trip(vec![read, write]);
        assert_eq!(read_all(&files[0]), b"one");
        assert_eq!(read_all(&files[0]), b"three");
        assert_eq!(read_all(&files[0]).len(), 4096);
        assert!(rustix::fs::fcntl_getfl(&files[1]).unwrap().contains(OFlags::DIRECT));
    }

    /// Where the caller gives a null device it is the tree's own.
    #[test]
    fn a_null_device_in_place_of_an_end_is_that_of_the_tree() {
        let (_read, write) = rustix::pipe::pipe().unwrap();
        let mut world = World::new();
        let entries = world.dump(&[&write]).unwrap();
        let null = std::fs::File::create("/dev/null").unwrap();
        let key = crate::file::testing::link(&write);
        world.opts.given.inherit_fd = vec![InheritFd { fd: Arc::new(null.into()), key }];
        let files = world.restore(&entries).unwrap();
        assert_eq!(crate::file::testing::link(&files[0]), "/dev/null");
        // Another description than the caller's.
        rustix::fs::fcntl_setfl(&files[0], OFlags::NONBLOCK).unwrap();
        let flags = rustix::fs::fcntl_getfl(&*world.opts.given.inherit_fd[0].fd).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK));
    }

    /// Tasks take none of what this host's root may have, and no more than their own user may.
    #[test]
    fn pipes_count_for_the_user_of_the_tasks() {
        let number = |name: &str| -> u32 {
            std::fs::read_to_string(format!("/proc/sys/fs/{name}")).unwrap().trim().parse().unwrap()
        };
        let (limit, most) = (number("pipe-user-pages-soft"), number("pipe-max-size"));
        if limit == 0 {
            println!("left out: pipes_count_for_the_user_of_the_tasks (this host has no limit)");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        let mut waiting = images.writer(kind::PIPES_DATA, 0).unwrap();
        let all = 0..limit.div_ceil(most / 4096);
        for pipe_id in all.clone() {
            let entry = PipeDataEntry { pipe_id, size: Some(most), ..PipeDataEntry::default() };
            waiting.entry(&entry).unwrap();
        }
        waiting.finish().unwrap();
        let mut pipes = PipeRestorer::default();
        pipes.load(&images, &[]).unwrap();
        // One that nobody else is.
        let user = 3_000_000_000 - std::process::id();
        let mut open = |pipe| {
            let end = PipeEnd { file: pipe, pipe, flags: 0 };
            pipes.open(&[], &Roots::default(), &end, Some(user)).unwrap()
        };
        let ends: Vec<OwnedFd> = all.map(&mut open).collect();
        let make = || Ok(rustix::pipe::pipe()?);
        let room = || {
            let (read, _write) = torpor_sys::ipc::with_ids(user, 0, make).unwrap();
            rustix::pipe::fcntl_getpipe_size(read).unwrap()
        };
        assert_eq!(room(), 2 * 4096);
        drop((ends, pipes));
        assert_eq!(room(), 16 * 4096);
    }

    #[test]
    fn an_end_is_inherited() {
        let (_read, write) = rustix::pipe::pipe().unwrap();
        let mut world = World::new();
        let entries = world.dump(&[&write]).unwrap();
        let (outer, inner) = rustix::pipe::pipe().unwrap();
        let key = crate::file::testing::link(&write);
        world.opts.given.inherit_fd = vec![InheritFd { fd: Arc::new(inner), key }];
        let files = world.restore(&entries).unwrap();
        rustix::io::write(&files[0], b"out").unwrap();
        assert_eq!(read_all(&outer), b"out");
    }

    /// By `/dev/stderr`, for instance.
    #[test]
    fn the_user_of_the_tasks_may_open_an_end_once_more() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        let user = 3_100_000_000 - std::process::id();
        let (_read, write) = rustix::pipe::pipe().unwrap();
        let given = InheritFd { fd: Arc::new(write), key: "pipe:[7]".to_owned() };
        let mut pipes = PipeRestorer::default();
        pipes.load(&images, &[]).unwrap();
        for pipe in [7, 8] {
            let end = PipeEnd { file: pipe, pipe, flags: OFlags::WRONLY.bits() };
            let end = pipes
                .open(std::slice::from_ref(&given), &Roots::default(), &end, Some(user))
                .unwrap();
            assert_eq!(rustix::fs::fstat(end).unwrap().st_uid, user, "{pipe}");
        }
    }

    /// A log, say, of this host's root: images get no more of it than the caller gives, and write nothing there.
    #[test]
    fn what_is_given_for_an_end_may_be_a_file() {
        const BOTH: OFlags = OFlags::RDWR;
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let images = ImageDir::create(dir.path().join("images")).unwrap();
        let mut waiting = images.writer(kind::PIPES_DATA, 0).unwrap();
        let entry = PipeDataEntry { pipe_id: 7, bytes: 4, ..PipeDataEntry::default() };
        waiting.entry(&entry).unwrap();
        waiting.raw(b"text").unwrap();
        waiting.finish().unwrap();
        let mut roots = Roots::default();
        roots.limit_to_user(3_000_000_000 - std::process::id(), (65_534, Vec::new()));
        let open = |given: OFlags, wanted: OFlags| {
            let file = rustix::fs::open(&log, given | OFlags::CREATE, Mode::RUSR | Mode::WUSR);
            let given = InheritFd { fd: Arc::new(file.unwrap()), key: "pipe:[7]".to_owned() };
            let mut pipes = PipeRestorer::default();
            pipes.load(&images, &[]).unwrap();
            let end = PipeEnd { file: 1, pipe: 7, flags: wanted.bits() };
            pipes.open(&[given], &roots, &end, None)
        };
        let (read, write) = (OFlags::RDONLY, OFlags::WRONLY);
        for (given, wanted) in [(read, write), (read, BOTH), (write, read), (write, BOTH)] {
            let error = open(given, wanted).unwrap_err();
            assert!(error.is_denial(), "{given:?}, {wanted:?}: {error}");
        }
        for (given, wanted) in [(read, read), (write, write), (BOTH, read), (BOTH, write)] {
            let file = open(given, wanted).unwrap();
            assert_eq!(rustix::fs::fcntl_getfl(&file).unwrap() & OFlags::RWMODE, wanted);
        }
        assert_eq!(std::fs::read(&log).unwrap(), b"");
    }
}
