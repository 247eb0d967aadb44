//! Ghosts: files that have no name any more. Their content goes into the images, and
//! comes back under a name for as long as the restore needs one.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps};
use torpor_images::payload::next_chunk;
use torpor_images::proto::{GhostChunkEntry, GhostFileEntry, Timeval};
use torpor_images::{ImageDir, Reader, Writer, kind};
use torpor_kernel::sparse;
use torpor_policy::ghost::{Ghost, GhostKind};

use super::description::{inside, kernel_number, outside, reopen};
use super::{Found, own_names};
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// Bytes copied at once.
const CHUNK: u64 = 1 << 20;

/// Writes the image of a ghost.
///
/// # Errors
/// Refused, if it is too large or of a type that cannot be made again.
pub(crate) fn save(
    images: &ImageDir,
    limit: u64,
    id_maps: &IdMaps,
    found: &Found,
    ghost: u32,
) -> Result<()> {
    let stat = &found.stat;
    let kind = FileType::from_raw_mode(stat.st_mode);
    // Blocks of stat(2) are 512 bytes.
    let data = stat.st_blocks.cast_unsigned().saturating_mul(512);
    if kind == FileType::RegularFile && data > limit {
        return Err(found.refuse(format!(
            "it is unlinked and holds {data} bytes, and {} are allowed; allow more with \
             --ghost-limit",
            limit
        )));
    }
    let sparse = kind == FileType::RegularFile && data < stat.st_size.cast_unsigned();
    let target = match kind {
        FileType::Symlink => Some(read_link(found)?),
        FileType::Unknown => return Err(found.refuse("it is unlinked and of an unknown type")),
        _ => None,
    };
    let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
    let (uid, gid) = inside(id_maps, stat);
    let entry = GhostFileEntry {
        uid,
        gid,
        mode: stat.st_mode,
        dev: Some(kernel_number(stat.st_dev)),
        ino: Some(stat.st_ino),
        rdev: if is_device { u32::try_from(stat.st_rdev).ok() } else { None },
        atim: timeval(stat.st_atime, stat.st_atime_nsec),
        mtim: timeval(stat.st_mtime, stat.st_mtime_nsec),
        chunks: sparse.then_some(true),
        size: (kind == FileType::RegularFile).then_some(stat.st_size.cast_unsigned()),
        symlnk_target: target,
    };
    let mut writer = images.writer(kind::GHOST_FILE, u64::from(ghost))?;
    writer.entry(&entry)?;
    if kind == FileType::RegularFile && stat.st_size > 0 {
        // A description of our own: the task's would share its offset with us.
        let file = File::from(reopen(&found.file, OFlags::RDONLY | OFlags::NONBLOCK)?);
        if sparse {
            write_chunks(&mut writer, &file, stat)?;
        } else {
            copy(&file, 0, stat.st_size.cast_unsigned(), &mut writer)?;
        }
    }
    Ok(writer.finish()?)
}

fn read_link(found: &Found) -> Result<Vec<u8>> {
    let target = rustix::fs::readlinkat(&found.file, "", Vec::new())
        .context(|| format!("readlink {}", found.link.display()))?;
    Ok(target.into_bytes())
}

fn timeval(sec: i64, nsec: u64) -> Option<Timeval> {
    Some(Timeval { tv_sec: sec.cast_unsigned(), tv_usec: nsec / 1000 })
}

fn write_chunks(writer: &mut Writer, file: &File, stat: &Stat) -> Result<()> {
    let size = stat.st_size.cast_unsigned();
    let mut at = 0;
    let next = |at| sparse::next_data(file, at, size).context(|| "look for data".to_owned());
    while let Some((off, len)) = next(at)? {
        writer.entry(&GhostChunkEntry { len, off })?;
        copy(file, off, len, writer)?;
        at = off + len;
    }
    Ok(())
}

fn copy(file: &File, offset: u64, len: u64, to: &mut impl Write) -> Result<()> {
    let what = || "copy an unlinked file".to_owned();
    let mut buffer = vec![0; usize::try_from(len.min(CHUNK)).unwrap_or(0)];
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let part = usize::try_from((end - at).min(CHUNK)).unwrap_or(0);
        file.read_exact_at(&mut buffer[..part], at).context(what)?;
        to.write_all(&buffer[..part]).context(what)?;
        at += part as u64;
    }
    Ok(())
}

/// A ghost as its image describes it; its content is still in the reader.
#[derive(Debug)]
pub(crate) struct GhostImage {
    /// What it is.
    ghost: Ghost,
    name: String,
    reader: Reader,
}

/// Opens the image of the content of a ghost.
///
/// # Errors
/// If the image is missing or damaged.
pub(crate) fn open(images: &ImageDir, number: u32, ghost: Ghost) -> Result<GhostImage> {
    let name = kind::GHOST_FILE.file_name(u64::from(number));
    let reader = Ghost::content(images, number)?
        .ok_or_else(|| Error::invalid(&name, "is missing, but remap-fpath.img refers to it"))?;
    Ok(GhostImage { ghost, name, reader })
}

impl GhostImage {
    /// The type of the file.
    pub(crate) fn file_type(&self) -> FileType {
        match self.ghost.kind {
            GhostKind::Regular { .. } => FileType::RegularFile,
            GhostKind::Directory => FileType::Directory,
            GhostKind::Link(_) => FileType::Symlink,
            GhostKind::Fifo => FileType::Fifo,
            GhostKind::Socket => FileType::Socket,
            GhostKind::Device { block: true, .. } => FileType::BlockDevice,
            GhostKind::Device { block: false, .. } => FileType::CharacterDevice,
        }
    }

    /// Makes the file as `name` in `dir`, where there must be nothing of that name. Returns it
    /// (`O_PATH`): all that is changed about it later is changed through that. Others may write to
    /// the directory, and put something else in its place at any moment.
    ///
    /// # Errors
    /// If there is a file of that name, or it cannot be made or filled, of which something may be left then; damaged images.
    pub(crate) fn create(
        &mut self,
        maps: &IdMaps,
        dir: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<OwnedFd> {
        let what = || format!("make {} again", String::from_utf8_lossy(name));
        let mode = Mode::RUSR | Mode::WUSR;
        let file = match &self.ghost.kind {
            GhostKind::Regular { .. } => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = rustix::fs::openat(dir, name, flags, mode).context(what)?;
                // A program is not run as long as anybody has it open for writing.
                let kept = reopen(&file, OFlags::PATH)?;
                self.fill(File::from(file))?;
                kept
            }
            kind => own_names::make((dir, name), maps, |private, name| match kind {
                GhostKind::Directory => rustix::fs::mkdirat(private, name, Mode::RWXU),
                GhostKind::Link(target) => rustix::fs::symlinkat(target.as_slice(), private, name),
                _ => {
                    let (kind, device) = (self.file_type(), self.device().unwrap_or(0));
                    rustix::fs::mknodat(private, name, kind, mode, device)
                }
            })?,
        };
        Ok(file)
    }

    /// The number of a device.
    fn device(&self) -> Option<u64> {
        match self.ghost.kind {
            GhostKind::Device { number, .. } => Some(number.into()),
            _ => None,
        }
    }

    fn fill(&mut self, mut file: File) -> Result<()> {
        let GhostKind::Regular { size: known, in_chunks } = self.ghost.kind else { return Ok(()) };
        if !in_chunks {
            let len = self.reader.remaining();
            if let Some(size) = known.filter(|&size| size != len) {
                let what = format!("holds {len} of the {size} bytes of an unlinked file");
                return Err(Error::invalid(&self.name, what));
            }
            return Ok(self.reader.copy_to(len, &mut file, "an unlinked file")?);
        }
        let mut end = 0;
        while let Some(chunk) = next_chunk(&mut self.reader, end, known)? {
            rustix::fs::seek(&file, SeekFrom::Start(chunk.off)).context(|| "lseek".to_owned())?;
            self.reader.copy_to(chunk.len, &mut file, "a chunk of an unlinked file")?;
            end = chunk.off + chunk.len;
        }
        let size = known.unwrap_or(end).max(end);
        rustix::fs::ftruncate(&file, size)
            .context(|| format!("ftruncate an unlinked file to {size} bytes"))
    }

    /// Sets owner, mode and times of the file: the owner before the mode, which a change of
    /// owner could cut, and times last. What others may do with it comes when its last name is gone.
    ///
    /// # Errors
    /// If the file's owner, mode or times cannot be set.
    pub(crate) fn set_attributes(&self, maps: &IdMaps, file: BorrowedFd<'_>) -> Result<()> {
        let what = || format!("set attributes of the file of {}", self.name);
        let (uid, gid) = self.ghost.owner;
        let (uid, gid) = outside(maps, uid, gid);
        rustix::fs::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH).context(what)?;
        if self.file_type() != FileType::Symlink {
            let mode = Mode::from_raw_mode(self.early_mode());
            rustix::fs::chmodat(CWD, through(file), mode, AtFlags::empty()).context(what)?;
        }
        let Some(times) = self.ghost.times else { return Ok(()) };
        let [last_access, last_modification] =
            times.map(|(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec });
        let times = Timestamps { last_access, last_modification };
        rustix::fs::utimensat(file, "", &times, AtFlags::EMPTY_PATH).context(what)
    }

    /// The mode as long as the file has a name, by which others on this host could open or start it, who could not when it
    /// had none. A program is one only if somebody may run it; a directory has nothing in it.
    fn early_mode(&self) -> u32 {
        let mode = self.ghost.permissions;
        let for_owner = if mode & 0o111 == 0 { mode & 0o600 } else { mode & 0o600 | 0o100 };
        if self.file_type() == FileType::Directory { mode & 0o1777 } else { for_owner }
    }

    /// The mode that the file gets when it has lost its name; `None` if it has it already.
    pub(crate) fn late_mode(&self) -> Option<Mode> {
        let mode = self.ghost.permissions;
        let differs = self.file_type() != FileType::Symlink && mode != self.early_mode();
        differs.then(|| Mode::from_raw_mode(mode))
    }
}

/// A path that leads to an open file, whatever its name is.
fn through(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives a file that has lost its name its mode. Nobody can give it another name any more.
///
/// # Errors
/// If it is to run with the rights of its owner or group, and has a name, since somebody has given it another one meanwhile; if
/// chmod(2) refuses it.
pub(crate) fn set_mode(file: BorrowedFd<'_>, mode: Mode) -> Result<()> {
    let what = || "set the mode of an unlinked file".to_owned();
    let gives_rights = mode.intersects(Mode::SUID | Mode::SGID);
    if gives_rights && rustix::fs::fstat(file).context(what)?.st_nlink > 0 {
        let why = "somebody has given an unlinked file a name, which is to run with the rights of its owner or group";
        return Err(Error::invalid("ghost-file", why));
    }
    rustix::fs::chmodat(CWD, through(file), mode, AtFlags::empty()).context(what)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
    use std::path::PathBuf;

    use super::*;
    use crate::file::testing::{World, fdinfo, link};
    use crate::restore::Restore;

    fn create(path: &PathBuf) -> File {
        File::options().read(true).write(true).create_new(true).mode(0o640).open(path).unwrap()
    }

    fn left_over(world: &World) -> Vec<String> {
        let names = fs::read_dir(world.dir.path()).unwrap();
        let mut names: Vec<_> =
            names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "images");
        names
    }

    #[test]
    fn an_unlinked_file_comes_back_with_all_its_descriptions() {
        let world = World::new();
        let path = world.path("with \n \" (deleted)");
        let file = create(&path);
        file.write_all_at(b"content", 0).unwrap();
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o6711)).unwrap();
        rustix::fs::fchown(&file, Some(rustix::fs::Uid::from_raw(7)), None).unwrap();
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o6711)).unwrap();
        let old = Timespec { tv_sec: 86400, tv_nsec: 5000 };
        let times = Timestamps { last_access: old, last_modification: old };
        rustix::fs::futimens(&file, &times).unwrap();
        let write = File::options().append(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        // A new file with the same name is left alone.
        fs::write(&path, b"new").unwrap();
        let files = vec![file.into(), write.into()];
        let before: Vec<_> = files.iter().map(|f: &OwnedFd| (fdinfo(f), link(f))).collect();
        let files = world.round_trip(files);
        assert_eq!(files.iter().map(|f| (fdinfo(f), link(f))).collect::<Vec<_>>(), before);
        let [read, write] = <[OwnedFd; 2]>::try_from(files).unwrap().map(File::from);
        let meta = read.metadata().unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.nlink()), (0o6711, 7, 0));
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (86400, 5000));
        (&write).write_all(b" more").unwrap();
        let mut text = [0; 12];
        read.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"content more");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(left_over(&world), [path.file_name().unwrap().to_str().unwrap()]);
    }

    #[test]
    fn two_unlinked_names_are_one_inode() {
        let world = World::new();
        let (a, b) = (world.path("a"), world.path("b"));
        let first = create(&a);
        fs::hard_link(&a, &b).unwrap();
        let second = File::open(&b).unwrap();
        fs::remove_file(&a).unwrap();
        fs::remove_file(&b).unwrap();
        let files = world.round_trip(vec![first.into(), second.into()]);
        let inode = |f: &OwnedFd| rustix::fs::fstat(f).unwrap().st_ino;
        assert_eq!(inode(&files[0]), inode(&files[1]));
        assert!(link(&files[0]).ends_with("/a (deleted)"));
        assert!(link(&files[1]).ends_with("/b (deleted)"));
        assert!(left_over(&world).is_empty());
    }

    #[test]
    fn holes_stay_holes_and_only_data_counts() {
        let mut world = World::new();
        let file = create(&world.path("sparse"));
        file.set_len(1 << 30).unwrap();
        for at in [1 << 20, 1 << 29] {
            file.write_all_at(&[7; 5000], at).unwrap();
        }
        fs::remove_file(world.path("sparse")).unwrap();
        world.opts.files.ghost_limit = 4096;
        let error = world.dump(&[&file]).unwrap_err().to_string();
        assert!(error.contains("--ghost-limit"), "{error}");
        world.opts.files.ghost_limit = 1 << 20;
        let file = File::from(world.round_trip(vec![file.into()]).pop().unwrap());
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), 1 << 30);
        assert!(meta.blocks() < 64, "{} blocks", meta.blocks());
        let mut data = [0; 5001];
        file.read_exact_at(&mut data, 1 << 29).unwrap();
        assert!(data[..5000].iter().all(|&b| b == 7) && data[5000] == 0);
    }

    /// A file system that is full, say, or an image that was cut.
    #[test]
    fn nothing_is_left_of_a_file_that_cannot_be_filled() {
        let world = World::new();
        let path = world.path("gone");
        let file = create(&path);
        file.write_all_at(b"content", 0).unwrap();
        fs::remove_file(&path).unwrap();
        let entries = world.dump(&[&file]).unwrap();
        let image = world.opts.images_dir.join(kind::GHOST_FILE.file_name(1));
        let bytes = fs::read(&image).unwrap();
        fs::write(&image, &bytes[..bytes.len() - 1]).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("unlinked file"), "{error}");
        assert!(left_over(&world).is_empty());
    }

    /// Whoever may write to the directory can do so while it has a name for the moment.
    #[test]
    fn what_has_a_name_again_gets_no_rights() {
        let world = World::new();
        let (path, other) = (world.path("file"), world.path("other"));
        let file = create(&path);
        fs::hard_link(&path, &other).unwrap();
        fs::remove_file(&path).unwrap();
        let error = set_mode(file.as_fd(), Mode::from_raw_mode(0o4755)).unwrap_err().to_string();
        assert!(error.contains("somebody has given an unlinked file a name"), "{error}");
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o640);
        fs::remove_file(&other).unwrap();
        set_mode(file.as_fd(), Mode::from_raw_mode(0o4755)).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o4755);
    }

    /// Whoever may look into the directory finds the name that it has for the moment.
    #[test]
    fn what_has_a_name_again_is_its_owners_alone() {
        let world = World::new();
        let modes = [0o666, 0o751, 0o011, 0o040];
        let files = modes.map(|mode| {
            let path = world.path("file");
            let file = create(&path);
            file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
            fs::remove_file(&path).unwrap();
            file
        });
        let entries = world.dump(&files).unwrap();
        let ids: Vec<u32> = entries.iter().map(|entry| entry.id).collect();
        let mut cx = Restore::into_this_process(&world.opts).unwrap();
        let files = cx.open_all(&ids).unwrap();
        let now = || {
            let modes = files.iter().map(|file| rustix::fs::fstat(file).unwrap().st_mode & 0o7777);
            modes.collect::<Vec<_>>()
        };
        assert_eq!(left_over(&world).len(), modes.len());
        assert_eq!(now(), [0o600, 0o700, 0o100, 0]);
        cx.temporary.succeed().unwrap();
        assert!(left_over(&world).is_empty());
        assert_eq!(now(), modes);
    }

    /// A directory that is made in one with this bit has it, too.
    #[test]
    fn a_directory_comes_back_where_its_group_is_inherited() {
        let world = World::new();
        let (shared, dir) = (world.path("shared"), world.path("shared/dir"));
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o2770)).unwrap();
        fs::create_dir(&dir).unwrap();
        let file = File::open(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o2750)).unwrap();
        fs::remove_dir(&dir).unwrap();
        let file = File::from(world.round_trip(vec![file.into()]).pop().unwrap());
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o2750);
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    }

    #[test]
    fn directories_and_what_was_in_them() {
        let world = World::new();
        let (upper, lower) = (world.path("upper"), world.path("upper/lower"));
        fs::create_dir_all(&lower).unwrap();
        let in_it = create(&lower.join("file"));
        let dirs = [&lower, &upper].map(|p| File::open(p).unwrap());
        fs::remove_file(lower.join("file")).unwrap();
        fs::remove_dir(&lower).unwrap();
        fs::remove_dir(&upper).unwrap();
        let [a, b] = dirs;
        let files = vec![OwnedFd::from(in_it), a.into(), b.into()];
        let before: Vec<_> = files.iter().map(link).collect();
        let files = world.round_trip(files);
        assert_eq!(files.iter().map(link).collect::<Vec<_>>(), before);
        assert!(left_over(&world).is_empty());
    }

    #[test]
    fn symbolic_links_fifos_devices_and_tmpfiles() {
        let world = World::new();
        let path = |name| world.path(name);
        std::os::unix::fs::symlink("target", path("link")).unwrap();
        let device = rustix::fs::makedev(1, 3);
        let kind = FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, path("null"), kind, Mode::RUSR, device).unwrap();
        let open = |name, flags| rustix::fs::open(path(name), flags, Mode::RUSR).unwrap();
        let files = vec![
            open("link", OFlags::PATH | OFlags::NOFOLLOW),
            open("null", OFlags::RDONLY),
            open("", OFlags::TMPFILE | OFlags::RDWR),
        ];
        fs::remove_file(path("link")).unwrap();
        fs::remove_file(path("null")).unwrap();
        let files = world.round_trip(files);
        let target = rustix::fs::readlinkat(&files[0], "", Vec::new()).unwrap();
        assert_eq!(target.as_bytes(), b"target");
        assert_eq!(rustix::fs::fstat(&files[1]).unwrap().st_rdev, device);
        assert_eq!(rustix::io::read(&files[1], &mut [0; 4]).unwrap(), 0);
        assert_eq!(rustix::fs::fstat(&files[2]).unwrap().st_nlink, 0);
        assert!(left_over(&world).is_empty());
    }

    #[test]
    fn a_file_with_another_name_is_linked_for_the_time_being() {
        let mut world = World::new();
        fs::create_dir(world.path("dir")).unwrap();
        let (path, other) = (world.path("dir/file"), world.path("other"));
        let file = create(&path);
        file.write_all_at(b"x", 0).unwrap();
        fs::hard_link(&path, &other).unwrap();
        fs::remove_dir_all(world.path("dir")).unwrap();
        let error = world.dump(&[&file]).unwrap_err().to_string();
        assert!(error.contains("--link-remap"), "{error}");
        world.opts.files.link_remap = true;
        let before = link(&file);
        let inode = file.metadata().unwrap().ino();
        let file = world.round_trip(vec![file.into()]).pop().unwrap();
        assert_eq!((link(&file), rustix::fs::fstat(&file).unwrap().st_ino), (before, inode));
        assert_eq!(left_over(&world), ["other"]);
    }
}
