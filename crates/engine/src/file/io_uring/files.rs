//! Files that are registered with an instance.
//!
//! `fdinfo` shows the path of each. That says which socket one is, but not which of several
//! descriptions of any other file: with which position, or flags. The memory of the kernel says it
//! ([`KernelView`]): a file that the task has open is found among its descriptors, and a regular one that
//! nobody has open any more is opened again, as it was. Where that memory is not to be read, a file is
//! kept that the task has open as well, and that nobody else has: the kernel grants a lease on such a
//! file only. A request can make a descriptor of any (`IORING_OP_FIXED_FD_INSTALL`), but each request
//! moves the heads of the ring, which the program counts for itself, and a task whose dump fails must go
//! on as it was.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::proto::TorporIoUringFile;
use torpor_kernel::mountinfo::unescape;
use torpor_sys::fcntl::{F_GETOWN_EX, F_GETSIG, F_SETSIG};
use torpor_tracee::{Tracee, syscall};

use super::inside::{HeldFile, KernelView};
use super::refusal::{advise, refuse};
use crate::error::{Error, Result};
use crate::file::description::{open_flags, open_in};
use crate::file::table::FileTable;
use crate::file::{FdInfo, Found};
use crate::proc;

/// Why a file is refused, and what to do.
const ONLY_A_PATH: &str = "of which only the path is known, which is not supported";
const NOT_ALONE: &str = "of which the kernel does not say that it is open only once, and not which of \
                         several is registered";
const INSTEAD: &str = "let the program use its descriptors, or keep the only one of each file open";

/// A registered file.
#[derive(Debug)]
pub(super) struct RegisteredFile {
    place: u32,
    /// What a link of procfs would say of it.
    path: PathBuf,
    known: Known,
}

/// What is known of a registered file beside its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing.
    Nothing,
    /// The task has no descriptor of it, and it cannot be opened again.
    Closed,
    /// A descriptor that the task has of it.
    Descriptor(i32),
    /// Its number: it was opened again.
    Number(u32),
}

/// How many places for files an instance has, if any were made, and what is registered: lines
/// `N: PATH` after that number, but for empty places.
///
/// # Errors
/// Refused, if the kernel shows them otherwise.
pub(super) fn registered(
    found: &Found,
    info: &FdInfo,
) -> Result<(Option<u32>, Vec<RegisteredFile>)> {
    let mut lines = info.rest.iter().skip_while(|line| !line.starts_with("UserFiles:"));
    let places = lines.next().and_then(|line| line.strip_prefix("UserFiles:")?.trim().parse().ok());
    let lines = lines.take_while(|line| !line.starts_with("UserBufs:"));
    let files: Option<Vec<_>> = lines.map(|line| parse(line)).collect();
    let files =
        files.ok_or_else(|| refuse(found, "its fdinfo does not show its registered files"))?;
    Ok((places.filter(|&places: &u32| places != 0), files))
}

/// A line of a registered file.
fn parse(line: &str) -> Option<RegisteredFile> {
    let (place, path) = line.trim_start().split_once(": ")?;
    let path = OsString::from_vec(unescape(path.as_bytes()));
    Some(RegisteredFile { place: place.parse().ok()?, path: path.into(), known: Known::Nothing })
}

/// Looks in the memory of the kernel which files are registered with an instance.
///
/// # Errors
/// If the task is gone, or there are no more descriptors.
pub(super) fn look(
    view: &KernelView,
    found: &Found,
    table: &mut FileTable,
    files: &mut [RegisteredFile],
) -> Result<()> {
    let places: Vec<u32> = files.iter().map(|file| file.place).collect();
    let instance = view.object(&found.file);
    let Some(all) = instance.and_then(|instance| view.registered(instance, &places)) else {
        return Ok(());
    };
    let open = open_files(found.pid)?;
    let paths: HashSet<&PathBuf> = files.iter().map(|file| &file.path).collect();
    let likely = paths.into_iter().filter_map(|path| open.get(path)).flatten().copied();
    let pidfd = proc::pidfd(found.pid)?;
    let own = first_of_each(likely, |fd| {
        view.description(pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok()?.as_fd())
    });
    let mut places: HashMap<u64, u64> = HashMap::new();
    for &description in &all {
        *places.entry(description).or_default() += 1;
    }
    let mut reopened = HashMap::new();
    for (file, &description) in files.iter_mut().zip(&all) {
        file.known = match (own.get(&description), reopened.get(&description)) {
            (Some(fd), _) => Known::Descriptor(*fd),
            (None, Some(known)) => *known,
            (None, None) => {
                let held = (description, places[&description]);
                let known = reopen((view, table), found, &file.path, held)?;
                reopened.insert(description, known);
                known
            }
        };
    }
    Ok(())
}

/// The first descriptor of each description, of some: each is asked for its description once.
fn first_of_each(
    fds: impl Iterator<Item = i32>,
    mut description: impl FnMut(i32) -> Option<u64>,
) -> HashMap<u64, i32> {
    let mut first = HashMap::new();
    for fd in fds {
        if let Some(description) = description(fd) {
            first.entry(description).or_insert(fd);
        }
    }
    first
}

/// Opens the file of a description again that the task has no descriptor of, and that an instance has at so many
/// places, if nobody else has it.
fn reopen(
    (view, table): (&KernelView, &mut FileTable),
    found: &Found,
    path: &Path,
    (description, places): (u64, u64),
) -> Result<Known> {
    let held = view.held(description).filter(|held| held.references == places);
    let again = held.and_then(|held| open_again(view, found.pid, path, held));
    let id = again.map(|again| table.in_flight(found, again)).transpose()?;
    Ok(id.map_or(Known::Closed, Known::Number))
}

/// Opens the regular file of a description that only an instance has, as that was opened and with its
/// position: if it is where its path says, as this program sees it or process `pid` does.
fn open_again(view: &KernelView, pid: i32, path: &Path, held: HeldFile) -> Option<OwnedFd> {
    let HeldFile { inode, flags, position, .. } = held;
    let roots = [Path::new("/").to_owned(), format!("/proc/{pid}/root").into()];
    let path = path.as_os_str().as_bytes();
    let open = |root: PathBuf| {
        let root = rustix::fs::open(root, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        // Only a file that is the right one is opened as the program has done it, by what was looked at:
        // its path may lead to a pipe by now, which would have the dump wait.
        let there = open_in(root.as_fd(), path, OFlags::PATH, Mode::empty()).ok()?;
        let is_it = |file: &OwnedFd| view.inode(file) == Some(inode);
        is_it(&there).then_some(())?;
        let same = format!("/proc/self/fd/{}", there.as_raw_fd());
        let flags = open_flags(flags).difference(OFlags::NOFOLLOW) | OFlags::CLOEXEC;
        let again = rustix::fs::open(same, flags, Mode::empty()).ok()?;
        rustix::fs::seek(&again, SeekFrom::Start(position)).ok()?;
        is_it(&again).then_some(again)
    };
    roots.into_iter().find_map(open)
}

/// The descriptors of a process, by what links of procfs say of them.
fn open_files(pid: i32) -> Result<HashMap<PathBuf, Vec<i32>>> {
    let mut open: HashMap<PathBuf, Vec<i32>> = HashMap::new();
    for fd in proc::numbers(pid, "fd")? {
        if let Ok(link) = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")) {
            open.entry(link).or_default().push(fd);
        }
    }
    Ok(open)
}

/// What is registered with an instance of process `pid`, by the numbers in the images. `task` is a
/// thread of the process.
///
/// # Errors
/// Refused, if the task does not have a file open, or may not be the only one; if the task is gone.
pub(super) fn resolve<'f>(
    task: &mut Tracee,
    pid: i32,
    table: &FileTable,
    files: &'f [RegisteredFile],
) -> Result<Vec<TorporIoUringFile>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let open = open_files(pid)?;
    // Of each path once, however many places it has.
    let mut known_by_path: HashMap<&Path, ByPath> = HashMap::new();
    let mut number = |RegisteredFile { place, path, known }: &'f RegisteredFile| {
        let file = match known {
            Known::Nothing => match known_by_path.get(path.as_path()) {
                Some(told) => *told,
                None => {
                    let told = told(task, pid, table, path, &open)?;
                    known_by_path.insert(path, told);
                    told
                }
            },
            Known::Closed => Err(ONLY_A_PATH),
            Known::Descriptor(fd) => table.id_of(pid, *fd).ok_or(ONLY_A_PATH),
            Known::Number(id) => Ok(*id),
        };
        let error = |reason: &str| {
            let reason = format!("it has registered a file ({}) {reason}", path.display());
            let reason = advise(pid, &reason, Some(INSTEAD));
            Error::refused(pid, "its io_uring instance", reason)
        };
        file.map(|file| TorporIoUringFile { place: *place, file }).map_err(error)
    };
    files.iter().map(&mut number).collect()
}

/// The number of a registered file of which nothing but its path is known, or why nobody can tell.
type ByPath = std::result::Result<u32, &'static str>;

/// What the path of a registered file tells.
fn told(
    task: &mut Tracee,
    pid: i32,
    table: &FileTable,
    path: &Path,
    open: &HashMap<PathBuf, Vec<i32>>,
) -> Result<ByPath> {
    let own = open.get(path).map(Vec::as_slice).unwrap_or_default();
    Ok(match own.first() {
        Some(&fd) if !is_told(task, path, fd)? => Err(NOT_ALONE),
        _ => one_of(pid, table, own).ok_or(ONLY_A_PATH),
    })
}

/// The number of the description that all of some descriptors have.
fn one_of(pid: i32, table: &FileTable, fds: &[i32]) -> Option<u32> {
    let mut ids = fds.iter().map(|&fd| table.id_of(pid, fd));
    let first = ids.next()??;
    ids.all(|id| id == Some(first)).then_some(first)
}

/// Whether a path tells that a registered file is what the task has open as `fd`.
fn is_told(task: &mut Tracee, path: &Path, fd: i32) -> Result<bool> {
    let path = path.as_os_str().as_bytes();
    // Of a socket there is one description.
    if path.starts_with(b"socket:[") {
        return Ok(true);
    }
    // Several files may have been removed that had one name.
    Ok(!path.ends_with(b" (deleted)") && is_open_once(task, fd)?)
}

/// Whether a file of a task is open by one description only: the kernel grants a write lease then,
/// which is given back at once. That happens in one batch, so that nothing of it stays if the dump
/// is killed meanwhile. Whoever opens the file in this moment waits for its end, and has the kernel
/// send a signal to the task: one that ends nobody.
fn is_open_once(task: &mut Tracee, fd: i32) -> Result<bool> {
    let fcntl = |command, argument| syscall::fcntl(fd.into(), command, argument);
    let mut batch = task.batch();
    // struct f_owner_ex: a type and an id.
    let owner = batch.space(8);
    let lease = batch.call(fcntl(libc::F_GETLEASE, 0));
    let signal = batch.call(fcntl(F_GETSIG, 0));
    let asked = batch.call(fcntl(F_GETOWN_EX, owner.addr.0));
    let out = batch.run()?;
    let is = |call, wanted: u64| out.result(call).is_ok_and(|got| got == wanted);
    let none = u64::from(libc::F_UNLCK.cast_unsigned());
    // To give the lease back would take the program's own one away, and who is told.
    if !is(lease, none) || !is(signal, 0) || !is(asked, 0) || out.u32_at(owner, 4) != 0 {
        return Ok(false);
    }
    let mut batch = task.batch();
    batch.must(fcntl(F_SETSIG, u64::from(libc::SIGURG.cast_unsigned())));
    let taken = batch.call(fcntl(libc::F_SETLEASE, u64::from(libc::F_WRLCK.cast_unsigned())));
    batch.call(fcntl(libc::F_SETLEASE, none));
    batch.call(fcntl(F_SETSIG, 0));
    Ok(batch.run()?.result(taken).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_links() {
        let text =
            |line: &str| parse(line).map(|file| (file.place, file.path.display().to_string()));
        assert_eq!(text("    0: /a\\040b:\\040c"), Some((0, "/a b: c".to_owned())));
        assert_eq!(text("   12: socket:[4711]"), Some((12, "socket:[4711]".to_owned())));
        assert_eq!(text("UserFiles"), None);
        assert_eq!(text("    x: /a"), None);
    }

    #[test]
    fn each_descriptor_is_asked_once() {
        let mut asked = 0;
        // Five descriptors of each description, and some that nobody can tell.
        let first = first_of_each(0..1000, |fd| {
            asked += 1;
            u64::try_from(fd / 5).ok().filter(|description| *description < 100)
        });
        assert_eq!(asked, 1000);
        assert_eq!(first.len(), 100);
        assert!(
            (0..100)
                .all(|description| first[&description] == i32::try_from(description).unwrap() * 5)
        );
    }

    #[test]
    fn a_lease_says_whether_a_file_is_open_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "text").unwrap();
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut batch = husk.batch();
        let name = batch.bytes(&[path.as_os_str().as_bytes(), b"\0"].concat());
        let opened = batch.call(syscall::openat(
            syscall::RemoteFd::CWD,
            name,
            OFlags::RDONLY,
            Mode::empty(),
        ));
        let fd = i32::try_from(batch.run().unwrap().result(opened).unwrap()).unwrap();
        assert!(is_told(&mut husk, &path, fd).unwrap());
        let other = std::fs::File::open(&path).unwrap();
        assert!(!is_told(&mut husk, &path, fd).unwrap());
        drop(other);
        assert!(is_told(&mut husk, &path, fd).unwrap());
        // Another one may have had the name.
        assert!(!is_told(&mut husk, Path::new("/file (deleted)"), fd).unwrap());
        assert!(is_told(&mut husk, Path::new("socket:[1]"), fd).unwrap());
        husk.exit_with(0).unwrap();
    }
}
