//! Files that a path leads to: regular files, directories, symbolic links opened with
//! `O_PATH`, and devices without a state of their own such as `/dev/null`.
//!
//! Also all that tasks refer to by path without a descriptor: mapped files,
//! executables, working and root directories.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, FileType, OFlags, SeekFrom, Stat, StatxFlags};
use torpor_images::proto::{FdTypes, FileEntry, RegFileEntry};
use torpor_policy::{FileKey, FoundBy, OpenFile, PathFile};

use super::description::{access, duplicate, is_readable, open_flags, reopen};
use super::given_rights::GivenRights;
use super::opener::Opener;
use super::remap::{Named, Paths};
use super::{Found, buildid, ext, hidden, mqueue};
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::memory::vma::Vma;
use crate::options::FileValidation;

/// Major number of `/dev/null`, `/dev/zero`, `/dev/random` and their like.
const MEM_MAJOR: u32 = 1;
/// Minor numbers below it without a state: null, zero, full, random, urandom.
const STATELESS: [u32; 5] = [3, 5, 7, 8, 9];
/// Minor number of `/dev/kmsg`: what has been read of it is a state.
const KMSG: u32 = 11;

/// What is known of files that tasks refer to without a descriptor.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// Mapped files: mount namespace, device, inode, name, flags.
    pub mapped: HashMap<(u32, u64, u64, String, u32), u32>,
    /// Working and root directories and executables.
    places: HashMap<Linked, u32>,
}

/// What tells files apart that tasks refer to by one of procfs's links.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Linked {
    mount: u64,
    dev: (u32, u32),
    ino: u64,
    path: PathBuf,
    flags: u32,
}

/// Describes the file, or says that it is of another kind (`None`).
///
/// # Errors
/// As [`entry`].
pub(crate) fn describe(paths: &mut Paths<'_>, found: &Found) -> Result<Option<FileEntry>> {
    if !found.link_bytes().starts_with(b"/") {
        return Ok(None);
    }
    match FileType::from_raw_mode(found.stat.st_mode) {
        _ if found.is_path_only() => {}
        FileType::RegularFile | FileType::Directory => {}
        FileType::CharacterDevice if is_plain_device(&found.stat, found.flags()) => {}
        FileType::CharacterDevice if is_only_external(paths, found)? => {}
        _ => return Ok(None),
    }
    let reg = entry(paths, found, found.id)?;
    Ok(Some(FileEntry { reg: Some(reg), ..found.entry(FdTypes::Reg) }))
}

/// Whether the caller brings a device to the restore.
///
/// # Errors
/// Refused, if it was open before: each open file of such a device (a server's connection, of
/// `/dev/fuse`) is another thing, and all have the one name.
fn is_only_external(paths: &Paths<'_>, found: &Found) -> Result<bool> {
    let name = ext::external_file(paths.external, found.info.mnt_id, found.stat.st_ino);
    let Some(name) = name else { return Ok(false) };
    let mut files = paths.table.entries().iter().filter_map(|entry| entry.reg.as_ref());
    if files.any(|reg| reg.ext() && reg.name == name.as_bytes()) {
        let reason = format!("--external {name} names more than one open file of that device");
        return Err(found.refuse(reason));
    }
    Ok(true)
}

/// Whether there is nothing to a character device but its number.
fn is_plain_device(stat: &Stat, flags: u32) -> bool {
    is_stateless(stat)
        || stat.st_rdev == rustix::fs::makedev(MEM_MAJOR, KMSG) && !is_readable(flags)
}

/// Whether a file is a character device without a state, such as `/dev/null`.
pub(crate) fn is_stateless(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && rustix::fs::major(stat.st_rdev) == MEM_MAJOR
        && STATELESS.contains(&rustix::fs::minor(stat.st_rdev))
}

/// Describes what `found` is open on by its path, as description `id`.
///
/// # Errors
/// Refused, if no path leads to it and it cannot be carried along.
pub(crate) fn entry(paths: &mut Paths<'_>, found: &Found, id: u32) -> Result<RegFileEntry> {
    let external = ext::external_file(paths.external, found.info.mnt_id, found.stat.st_ino);
    let is_external = external.is_some();
    let Named { path: name, mnt_id, is_hidden } = match external {
        Some(key) => Named { path: key.into_bytes(), mnt_id: found.info.mnt_id, is_hidden: false },
        None => paths.name(found, id)?,
    };
    let regular = FileType::from_raw_mode(found.stat.st_mode) == FileType::RegularFile;
    let build_id = paths.files.validation == FileValidation::BuildId && regular && !is_external;
    Ok(RegFileEntry {
        id,
        flags: found.flags(),
        pos: u64::try_from(found.info.pos).unwrap_or(0),
        fown: found.fown,
        name,
        mnt_id: paths.mounts.number_in_images(mnt_id),
        size: (regular && !only_appends(found.flags()))
            .then_some(found.stat.st_size.cast_unsigned()),
        ext: is_external.then_some(true),
        torpor_hidden: is_hidden.then_some(true),
        mode: Some(found.stat.st_mode),
        build_id: if build_id { build_id_of(found) } else { Vec::new() },
        ..RegFileEntry::default()
    })
}

/// Whether a description can do nothing but add to the end of its file, as those of logs: it
/// meets neither what the file holds nor how much that is.
fn only_appends(flags: u32) -> bool {
    appends(flags) && access(flags) == OFlags::WRONLY
}

fn appends(flags: u32) -> bool {
    flags & OFlags::APPEND.bits() != 0 && access(flags) != OFlags::RDONLY
}

/// Only of what can be read as it is, or is mapped: opening another task's file once
/// more could break a lease on it.
fn build_id_of(found: &Found) -> Vec<u32> {
    if is_readable(found.flags()) && found.fd >= 0 {
        return buildid::read(&found.file);
    }
    if found.fd < 0 && access(found.flags()) == OFlags::RDONLY {
        let file = reopen(&found.file, OFlags::RDONLY | OFlags::NONBLOCK);
        return file.map(buildid::read).unwrap_or_default();
    }
    Vec::new()
}

/// Describes what `found` is open on by its path, as a further file of the images.
///
/// # Errors
/// As [`entry`].
pub(crate) fn describe_as_path(paths: &mut Paths<'_>, found: &Found) -> Result<u32> {
    let id = paths.table.next_id();
    let reg = entry(paths, found, id)?;
    paths.table.push(FileEntry {
        id,
        r#type: FdTypes::Reg.into(),
        reg: Some(reg),
        ..FileEntry::default()
    });
    Ok(id)
}

/// Describes the file behind a mapping: its number, and the flags it must be opened
/// with. A shared mapping that may become writable needs a writable file.
///
/// # Errors
/// As [`entry`].
pub(crate) fn describe_mapped(
    paths: &mut Paths<'_>,
    links: &mut Links,
    task: &Task,
    vma: &Vma,
) -> Result<(u32, u32)> {
    let writable = vma.map.shared && vma.has(b"mw");
    let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY }.bits();
    let space = task.ids.mnt_ns_id.unwrap_or(0);
    let key = (space, vma.map.dev, vma.map.inode, vma.map.name.clone(), flags);
    if let Some(&known) = links.mapped.get(&key) {
        return Ok((known, flags));
    }
    let found = Found::through_link(task.pid, &vma.map_files_name(), flags)?;
    let id = describe_as_path(paths, &found)?;
    links.mapped.insert(key, id);
    Ok((id, flags))
}

/// Describes the directory behind `cwd` or `root` of a task.
///
/// # Errors
/// As [`entry`].
pub(crate) fn describe_path(
    paths: &mut Paths<'_>,
    links: &mut Links,
    task: &Task,
    name: &str,
) -> Result<u32> {
    describe_link(paths, links, task, name, describe_as_path)
}

/// Describes what one of procfs's links of a task leads to, unless the link of another
/// task has led there before: relatives are in the same place, as a rule.
pub(crate) fn describe_link(
    paths: &mut Paths<'_>,
    links: &mut Links,
    task: &Task,
    name: &str,
    describe: impl FnOnce(&mut Paths<'_>, &Found) -> Result<u32>,
) -> Result<u32> {
    let flags = OFlags::RDONLY.bits();
    let link = format!("/proc/{}/{name}", task.pid);
    let mask = StatxFlags::INO | StatxFlags::MNT_ID;
    let now = rustix::fs::statx(CWD, &link, AtFlags::empty(), mask)
        .context(|| format!("statx {link}"))?;
    let place = Linked {
        mount: now.stx_mnt_id,
        dev: (now.stx_dev_major, now.stx_dev_minor),
        ino: now.stx_ino,
        path: std::fs::read_link(&link).context(|| format!("readlink {link}"))?,
        flags,
    };
    if let Some(&known) = links.places.get(&place) {
        return Ok(known);
    }
    let found = Found::through_link(task.pid, name, flags)?;
    let id = match mapped(links, task, &found) {
        Some(id) => id,
        None => describe(paths, &found)?,
    };
    links.places.insert(place, id);
    Ok(id)
}

/// The file of a mapping that `found`, which no descriptor is of, is as well: as a rule, a task
/// maps its program.
fn mapped(links: &Links, task: &Task, found: &Found) -> Option<u32> {
    let mut vmas = task.vmas.iter();
    let link = found.link.to_str()?;
    let (dev, ino) = (found.stat.st_dev, found.stat.st_ino);
    let same = |vma: &&Vma| (vma.map.dev, vma.map.inode, vma.map.name.as_str()) == (dev, ino, link);
    let map = &vmas.find(same)?.map;
    let space = task.ids.mnt_ns_id.unwrap_or(0);
    let key = (space, map.dev, map.inode, map.name.clone(), found.flags());
    links.mapped.get(&key).copied()
}

/// Opens what a path of the images leads to.
///
/// # Errors
/// If the path leads to nothing, to a file that may not be opened so, or to a device that the tasks
/// may not have; if nobody hands an external file in; `Invalid` if it is not the file that it was.
pub(crate) fn open(cx: &mut Opener<'_>, file: &PathFile) -> Result<OwnedFd> {
    let given = FileKey::of_path(file).and_then(|name| ext::inherited(cx.given, &name));
    match (file.found, given) {
        (FoundBy::Caller, given) => return external(cx, file, given),
        (FoundBy::Queue(namespace), _) => {
            let rights = rights_to_queues(cx, namespace);
            return mqueue::open(cx.spaces, rights, file, namespace);
        }
        (FoundBy::Path | FoundBy::Mount, Some(given)) => return duplicate(given),
        (FoundBy::Path | FoundBy::Mount, None) => {}
    }
    let flags = open_flags(file.flags);
    let opened = match cx.open_remapped(file)? {
        Some(opened) => opened,
        None if file.found == FoundBy::Mount => hidden::open(cx, file)?,
        None => by_path(cx, file)?,
    };
    validate(cx, file, &opened)?;
    if file.position > 0 && !flags.contains(OFlags::PATH) {
        seek(&opened, file)?;
    }
    Ok(opened)
}

/// With which rights queues of an IPC namespace are opened: one that the caller gives has those of others, which are opened
/// with no more than what the calling runtime passed.
fn rights_to_queues<'c>(cx: &'c Opener<'_>, namespace: u32) -> Option<&'c GivenRights> {
    cx.roots.rights.as_ref().filter(|_| cx.spaces.given.contains_key(&namespace))
}

/// Opens what the path of a file leads to now.
fn by_path(cx: &Opener<'_>, file: &PathFile) -> Result<OwnedFd> {
    match cx.open_by_path(file) {
        Err(denied) if denied.is_denial() && is_own_program(cx, file)? => {
            cx.roots.open_program(file.mount, &file.path)?.ok_or(denied)
        }
        opened => opened,
    }
}

/// Whether a file is the program of a task, which no descriptor is of, in images of this host: then exec(2) has mapped
/// it. Other images could have it mapped for a program of theirs to read.
fn is_own_program(cx: &Opener<'_>, file: &PathFile) -> Result<bool> {
    let same = |other: &PathFile| (other.mount, &other.path) == (file.mount, &file.path);
    let is_same = |id| cx.described.get(&id).and_then(OpenFile::path).is_some_and(same);
    let programs = cx.tasks.iter().filter_map(|task| task.image.memory.as_ref());
    let mut programs = programs.map(|memory| memory.program);
    let is_open = cx.tasks.iter().any(|task| task.image.fds.iter().any(|fd| fd.file == file.id));
    let is_mapped_only = access(file.flags) == OFlags::RDONLY && !is_open;
    Ok(is_mapped_only && programs.any(is_same) && cx.are_places_trusted()?)
}

/// The file that the caller hands over.
fn external(cx: &Opener<'_>, file: &PathFile, given: Option<BorrowedFd<'_>>) -> Result<OwnedFd> {
    match given {
        Some(given) => match ext::own_null(cx.roots, given, open_flags(file.flags))? {
            Some(null) => Ok(null),
            None => duplicate(given),
        },
        None => Err(Error::Unsupported(format!(
            "file {} is external: a restore without --inherit-fd fd[N]:{}",
            file.id,
            file.text()
        ))),
    }
}

fn seek(opened: &OwnedFd, file: &PathFile) -> Result<()> {
    match rustix::fs::seek(opened, SeekFrom::Start(file.position)) {
        // Devices that cannot seek count what was read all the same.
        Ok(_) | Err(rustix::io::Errno::SPIPE) => Ok(()),
        Err(e) => Err(e).context(|| format!("seek to {} in {}", file.position, file.text())),
    }
}

/// Fails unless the file is the one of the dump, as far as the images tell.
fn validate(cx: &Opener<'_>, file: &PathFile, opened: &OwnedFd) -> Result<()> {
    let stat = rustix::fs::fstat(opened).context(|| format!("fstat {}", file.text()))?;
    let differs = |what: &str, was: String, now: String, advice: &str| {
        Err(Error::invalid(
            file.text(),
            format!("its {what} was {was} at the dump and is {now} now{advice}"),
        ))
    };
    let now = stat.st_size.cast_unsigned();
    if let Some(size) =
        file.size.filter(|&size| size != now && !may_have_grown(cx, file, size, now))
    {
        let path = String::from_utf8_lossy(&file.path);
        let advice = match size < now && access(file.flags) != OFlags::RDONLY {
            true => format!("; to take away what was written since: truncate -s {size} '{path}'"),
            false => String::new(),
        };
        return differs("size", size.to_string(), now.to_string(), &advice);
    }
    let rights = if cx.files.skip_rwx_check { 0o777 } else { 0 };
    // A ghost gets its mode when it has lost its name, and has come out of the images.
    let is_ghost = cx.temporary.is_ghost(file.id);
    let rights = if is_ghost { 0o7777 } else { rights };
    if let Some(mode) = file.mode.filter(|&mode| mode & !rights != stat.st_mode & !rights) {
        return differs("mode", format!("{mode:o}"), format!("{:o}", stat.st_mode), "");
    }
    let has_build_id = !file.build_id.is_empty() && !is_ghost;
    if has_build_id && cx.files.validation == FileValidation::BuildId {
        // Nothing else has one, and to open a device can do something by itself.
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let now = match is_readable(file.flags) {
            _ if !is_regular => Vec::new(),
            true => buildid::read(opened),
            false => buildid::read(cx.roots.open_limited_at_home(opened, OFlags::RDONLY)?),
        };
        if now != file.build_id {
            return differs("build id", hex(&file.build_id), hex(&now), "");
        }
    }
    Ok(())
}

/// Whether the file of a description may have another size now, by what it is open for: to add
/// to its end or to name it, whatever it holds; to read what the tree itself adds to (a log that
/// is watched, a journal that is read back), if nothing is gone. What is read or overwritten in
/// place, or mapped, must be what it was.
fn may_have_grown(cx: &Opener<'_>, file: &PathFile, size: u64, now: u64) -> bool {
    let same = |other: &PathFile| other.path == file.path && other.mount == file.mount;
    let added_to = || {
        let mut all = cx.described.values().filter_map(OpenFile::path);
        all.any(|other| same(other) && appends(other.flags))
    };
    only_appends(file.flags)
        || open_flags(file.flags).contains(OFlags::PATH)
        || (size < now
            && (access(file.flags) == OFlags::RDONLY || appends(file.flags))
            && added_to())
}

fn hex(build_id: &[u32]) -> String {
    build_id.iter().flat_map(|w| w.to_le_bytes()).map(|b| format!("{b:02x}")).collect()
}

/// Opens the file `id` of the images for a mapping, an executable or a directory to
/// change to: with the flags of its entry, or others.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_otherwise(
    cx: &mut Opener<'_>,
    id: u32,
    flags: Option<u32>,
) -> Result<Option<OwnedFd>> {
    let file = cx.described.get(&id).and_then(OpenFile::path);
    match (file, flags) {
        (Some(file), Some(flags)) if flags != file.flags => {
            open(cx, &file.opened_with(flags)).map(Some)
        }
        _ => Ok(None),
    }
}

/// Opens the file that a mapping is of, as nobody else has it open.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_apart(
    cx: &mut Opener<'_>,
    id: u32,
    flags: Option<u32>,
) -> Result<Option<OwnedFd>> {
    match cx.described.get(&id).and_then(OpenFile::path) {
        Some(file) => open(cx, &file.opened_with(flags.unwrap_or(file.flags))).map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read, Seek, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Arc;

    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    use rustix::fs::{CWD, FileType, Mode};
    use torpor_images::{ImageDir, kind};

    use super::*;
    use crate::dump::{Dump, files};
    use crate::file::testing::{World, fdinfo, link};
    use crate::options::InheritFd;

    fn open_at(path: PathBuf, flags: OFlags) -> OwnedFd {
        rustix::fs::open(path, flags, Mode::from_raw_mode(0o640)).unwrap()
    }

    #[test]
    fn files_directories_and_devices_come_back() {
        let world = World::new();
        let file = world.path("a \\ file");
        fs::write(&file, b"0123456789").unwrap();
        symlink("nowhere", world.path("link")).unwrap();
        let files = vec![
            open_at(file.clone(), OFlags::RDWR | OFlags::APPEND | OFlags::CREATE),
            open_at(file, OFlags::PATH),
            open_at(world.path(""), OFlags::RDONLY | OFlags::DIRECTORY),
            open_at(world.path("link"), OFlags::PATH | OFlags::NOFOLLOW),
            open_at("/dev/null".into(), OFlags::WRONLY | OFlags::NONBLOCK),
            open_at("/proc/1/stat".into(), OFlags::RDONLY),
        ];
        rustix::fs::seek(&files[0], SeekFrom::Start(4)).unwrap();
        let before: Vec<_> = files.iter().map(|f| (fdinfo(f), link(f))).collect();
        let files = world.round_trip(files);
        assert_eq!(files.iter().map(|f| (fdinfo(f), link(f))).collect::<Vec<_>>(), before);
        let mut text = String::new();
        File::from(files.into_iter().next().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "456789");
    }

    /// The kernel lets a process open all of its own, whatever its rights are.
    #[test]
    fn no_file_of_the_restoring_program_is_opened() {
        let refused = |name: &str, why: &str| {
            let world = World::new();
            let file = File::open("/proc/self/environ").unwrap();
            let mut entries = world.dump(&[file]).unwrap();
            let images = ImageDir::open(&world.opts.images_dir).unwrap();
            if !name.is_empty() {
                entries[0].reg.as_mut().unwrap().name = name.into();
            }
            images.write_all(kind::FILES, 0, &entries).unwrap();
            let error = world.restore(&entries).unwrap_err().to_string();
            assert!(error.contains(why), "{name}: {error}");
        };
        refused("", "is a file of the restoring program here");
        for name in ["/proc/self/environ", "/proc/thread-self/environ"] {
            refused(name, "leads to a file of procfs over a link");
        }
    }

    /// A queue that it becomes is one of the network that it was opened in.
    #[test]
    fn no_device_of_the_restoring_programs_network_is_opened() {
        let world = World::new();
        let path = world.path("tun");
        let file = open_at(path.clone(), OFlags::RDWR | OFlags::CREATE);
        let entries = world.dump(&[&file]).unwrap();
        fs::remove_file(&path).unwrap();
        let (kind, device) = (FileType::CharacterDevice, rustix::fs::makedev(10, 200));
        rustix::fs::mknodat(CWD, &path, kind, Mode::from_raw_mode(0o640), device).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("would have the network devices of this host"), "{error}");
    }

    #[test]
    fn a_file_that_has_changed_is_not_taken() {
        let world = World::new();
        let path = world.path("file");
        fs::write(&path, b"old").unwrap();
        let entries = world.dump(&[File::open(&path).unwrap()]).unwrap();
        fs::write(&path, b"longer").unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("size was 3 at the dump and is 6 now"), "{error}");
        fs::write(&path, b"new").unwrap();
        world.restore(&entries).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("mode was"), "{error}");
        fs::remove_file(&path).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("/file"), "{error}");
    }

    #[test]
    fn a_fifo_in_the_place_of_a_file_is_not_waited_for() {
        let world = World::new();
        let path = world.path("file");
        for flags in [OFlags::RDONLY, OFlags::WRONLY] {
            let file = open_at(path.clone(), flags | OFlags::CREATE);
            let entries = world.dump(&[&file]).unwrap();
            fs::remove_file(&path).unwrap();
            let mode = Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
            let error = world.restore(&entries).unwrap_err().to_string();
            assert!(error.contains("/file"), "{error}");
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn what_is_only_added_to_may_have_grown() {
        let world = World::new();
        let path = world.path("log");
        fs::write(&path, b"old").unwrap();
        let open = |flags| rustix::fs::open(&path, flags, Mode::empty()).unwrap();
        let append = OFlags::WRONLY | OFlags::APPEND;
        let sets: [(&[OFlags], bool, bool); 7] = [
            // What is open, whether it may be longer, whether it may be shorter.
            (&[append], true, true),
            (&[OFlags::PATH], true, true),
            (&[OFlags::RDWR | OFlags::APPEND], true, false),
            (&[OFlags::RDONLY, append], true, false),
            (&[OFlags::RDONLY | OFlags::APPEND], false, false),
            (&[OFlags::WRONLY], false, false),
            (&[OFlags::RDWR, append], false, false),
        ];
        for (flags, longer, shorter) in sets {
            fs::write(&path, b"old").unwrap();
            let files: Vec<_> = flags.iter().map(|flags| open(*flags)).collect();
            let entries = world.dump(&files).unwrap();
            fs::write(&path, b"old and new").unwrap();
            assert_eq!(world.restore(&entries).is_ok(), longer, "{flags:?}");
            fs::write(&path, b"").unwrap();
            assert_eq!(world.restore(&entries).is_ok(), shorter, "{flags:?}");
        }
    }

    #[test]
    fn another_program_of_the_same_size_is_not_taken() {
        let world = World::new();
        let path = world.path("program");
        fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        let entries = world.dump(&[File::open(&path).unwrap()]).unwrap();
        let Some(id) = entries[0].reg.as_ref().map(|reg| reg.build_id.clone()) else { panic!() };
        if id.is_empty() {
            return; // This toolchain's linker writes none.
        }
        let mut bytes = fs::read(&path).unwrap();
        let old: Vec<u8> = id.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = bytes.windows(old.len()).position(|w| w == old).unwrap();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("build id"), "{error}");
    }

    /// To open a device can do something by itself.
    #[test]
    fn nothing_but_a_file_of_bytes_is_opened_for_its_build_id() {
        let world = World::new();
        let path = world.path("fifo");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let mut entries = world.dump(&[open_at(path.clone(), OFlags::PATH)]).unwrap();
        entries[0].reg.as_mut().unwrap().build_id = vec![7];
        let images = ImageDir::open(&world.opts.images_dir).unwrap();
        images.write_one(kind::FILES, 0, &entries[0]).unwrap();
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watch, &path, WatchFlags::OPEN).unwrap();
        let error = world.restore(&entries).unwrap_err().to_string();
        assert!(error.contains("build id"), "{error}");
        assert!(rustix::io::read(&watch, &mut [0_u8; 4096]).is_err());
    }

    #[test]
    fn a_device_that_is_left_to_the_caller_is_open_once() {
        let mut world = World::new();
        let open = || File::open("/dev/kmsg").unwrap();
        let (first, second) = (open(), open());
        let refused = world.dump(&[&first]).unwrap_err().to_string();
        assert!(refused.contains("this kind of file is not supported"), "{refused}");
        let mnt_id = fs::read_to_string(format!(
            "/proc/self/fdinfo/{}",
            std::os::fd::AsRawFd::as_raw_fd(&first)
        ));
        let mnt_id = crate::file::FdInfo::parse(&mnt_id.unwrap()).mnt_id;
        let inode = rustix::fs::fstat(&first).unwrap().st_ino;
        let key = format!("file[{mnt_id:x}:{inode:x}]");
        world.opts.given.external = vec![key.parse().unwrap()];
        let entries = world.dump(&[&first]).unwrap();
        let given = Arc::new(OwnedFd::from(open()));
        world.opts.given.inherit_fd = vec![InheritFd { fd: given, key }];
        assert_eq!(link(&world.restore(&entries).unwrap()[0]), "/dev/kmsg");
        let refused = world.dump(&[&first, &second]).unwrap_err().to_string();
        assert!(refused.contains("names more than one open file of that device"), "{refused}");
    }

    #[test]
    fn external_and_inherited_files() {
        let mut world = World::new();
        let path = world.path("file");
        fs::write(&path, b"x").unwrap();
        let file = File::open(&path).unwrap();
        let mnt_id = fs::read_to_string(format!(
            "/proc/self/fdinfo/{}",
            std::os::fd::AsRawFd::as_raw_fd(&file)
        ));
        let mnt_id = crate::file::FdInfo::parse(&mnt_id.unwrap()).mnt_id;
        let inode = rustix::fs::fstat(&file).unwrap().st_ino;
        let key = format!("file[{mnt_id:x}:{inode:x}]");
        let other = || Arc::new(OwnedFd::from(File::open("/etc/hostname").unwrap()));
        world.opts.given.external = vec![key.parse().unwrap()];
        let entries = world.dump(&[&file]).unwrap();
        assert!(world.restore(&entries).unwrap_err().to_string().contains(&key));
        world.opts.given.inherit_fd = vec![InheritFd { fd: other(), key }];
        assert_eq!(link(&world.restore(&entries).unwrap()[0]), "/etc/hostname");
        world.opts.given.external.clear();
        world.opts.given.inherit_fd[0].key = path.to_str().unwrap()[1..].to_owned();
        let entries = world.dump(&[&file]).unwrap();
        assert_eq!(link(&world.restore(&entries).unwrap()[0]), "/etc/hostname");
    }

    #[test]
    fn unknown_devices_are_refused() {
        let world = World::new();
        let (path, device) = (world.path("kmsg"), rustix::fs::makedev(MEM_MAJOR, KMSG));
        let (kind, mode) = (FileType::CharacterDevice, Mode::RUSR | Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, device).unwrap();
        world.dump(&[open_at(path.clone(), OFlags::WRONLY)]).unwrap();
        let error = world.dump(&[open_at(path, OFlags::RDONLY)]).unwrap_err().to_string();
        assert!(error.contains("/kmsg"), "{error}");
    }

    #[test]
    fn what_is_mapped_is_described_once() {
        let world = World::new();
        let mut cx = Dump::of_this_process(&world.opts).unwrap();
        let pid = cx.tasks[0].pid;
        let exe = files::describe_exe(&mut cx, 0).unwrap();
        let cwd = files::describe_path(&mut cx, 0, "cwd").unwrap();
        let vmas = crate::memory::vma::read(pid).unwrap();
        let own: Vec<_> = vmas
            .iter()
            .filter(|v| v.map.name.contains("torpor_engine"))
            .map(|v| files::describe_mapped(&mut cx, 0, v).unwrap())
            .collect();
        assert!(own.len() > 1 && own.iter().all(|o| *o == own[0]));
        let name = |id: u32| {
            let entry = cx.files.entries().iter().find(|e| e.id == id).unwrap();
            String::from_utf8(entry.reg.as_ref().unwrap().name.clone()).unwrap()
        };
        assert_eq!(name(exe), std::env::current_exe().unwrap().to_str().unwrap());
        assert_eq!(name(own[0].0), name(exe));
        assert_eq!(name(cwd), std::env::current_dir().unwrap().to_str().unwrap());
    }

    #[test]
    fn the_offset_of_the_dumped_description_stays() {
        let world = World::new();
        let mut file = File::create_new(world.path("f")).unwrap();
        file.write_all(b"12345").unwrap();
        world.dump(&[&file]).unwrap();
        assert_eq!(file.stream_position().unwrap(), 5);
    }
}
