//! Names of Unix sockets: what a socket is bound to, and how to bind another one to
//! just that.
//!
//! A name is bytes. One that starts with a zero byte lives in the network namespace
//! and is bound as it is. Others are paths, and that is where it gets difficult: the
//! bytes of the name stay what they were at bind(2) (relative to a directory that is
//! long forgotten, or in another root), while the file may have been renamed, removed
//! or replaced since.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, Stat, StatxFlags, Uid};
use rustix::io::Errno;
use torpor_images::proto::{FilePermsEntry, UnixSkEntry};
use torpor_policy::{SocketFile, UnixName};
use torpor_sys::number::short;
use torpor_sys::socket;

use super::Neighbours;
use super::place::{self, Placed};
use crate::error::{Context, Error, Result};
use crate::file::Found;
use crate::file::description::open_in;
use crate::file::given_rights::GivenRights;
use crate::file::own_names::random;
use crate::namespace::mount::TreeMounts;
use crate::namespace::run_in;
use crate::namespace::user::IdMaps;

/// Whether a name is the path of a file.
pub(super) fn is_path(name: &[u8]) -> bool {
    name.first().is_some_and(|first| *first != 0)
}

/// A name as an address: with the family in front.
pub(super) fn address(name: &[u8]) -> Vec<u8> {
    const FAMILY: u16 = short(libc::AF_UNIX);
    let mut bytes = FAMILY.to_ne_bytes().to_vec();
    bytes.extend(name);
    bytes
}

/// The path that a name is: up to the zero byte that the kernel adds.
fn path_of(name: &[u8]) -> &Path {
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    Path::new(OsStr::from_bytes(&name[..end]))
}

/// Whether a path leads to some socket from here.
pub(super) fn leads_to_socket(name: &[u8]) -> bool {
    let stat = rustix::fs::stat(path_of(name));
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Describes the file of a socket with the path `name` in its entry.
///
/// # Errors
/// If the socket's file cannot be opened or asked for its status and path.
pub(super) fn dump(
    mounts: &TreeMounts,
    id_maps: &IdMaps,
    found: &Found,
    name: &[u8],
    entry: &mut UnixSkEntry,
) -> Result<()> {
    if !is_path(name) {
        return Ok(());
    }
    let file = socket::bound_file(found.file.as_fd())
        .context(|| format!("file of {}", found.link.display()))?;
    let stat = rustix::fs::fstat(&file).context(|| "fstat of a socket's file".to_owned())?;
    let mount = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .context(|| "statx of a socket's file".to_owned())?;
    let link = rustix::fs::readlink(proc_path(&file), Vec::new())
        .context(|| "path of a socket's file".to_owned())?;
    let removed = link.as_bytes().strip_suffix(b" (deleted)");
    let deleted = stat.st_nlink == 0 || removed.is_some() && !name.ends_with(b" (deleted)\0");
    entry.deleted = Some(deleted);
    entry.mnt_id = i32::try_from(mount.stx_mnt_id).ok().and_then(|id| mounts.number_in_images(id));
    let path = Path::new(OsStr::from_bytes(removed.filter(|_| deleted).unwrap_or(link.as_bytes())));
    match directory(path, path_of(name)) {
        Some(dir) if path_of(name).is_relative() => {
            entry.name_dir = Some(dir.as_os_str().as_bytes().to_vec());
        }
        Some(root) if root == Path::new("/") => {}
        _ => entry.torpor_path = Some(path.as_os_str().as_bytes().to_vec()),
    }
    if !deleted {
        entry.file_perms = Some(FilePermsEntry {
            mode: stat.st_mode,
            uid: id_maps.uid_inside(stat.st_uid).unwrap_or(stat.st_uid),
            gid: id_maps.gid_inside(stat.st_gid).unwrap_or(stat.st_gid),
        });
    }
    Ok(())
}

pub(super) fn proc_path(file: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// The directory (or root) in which `name` leads to `path`, if it can be seen from
/// the two.
fn directory<'p>(path: &'p Path, name: &Path) -> Option<&'p Path> {
    let mut dir = path;
    for part in name.components().rev() {
        match part {
            Component::Normal(part) if dir.file_name() == Some(part) => dir = dir.parent()?,
            Component::RootDir | Component::CurDir => {}
            _ => return None,
        }
    }
    Some(dir)
}

/// The address that leads to a bound socket, wherever its file is and whether or not
/// it still is there.
///
/// # Errors
/// If the socket does not tell its file, or there can be no link to it.
pub(super) fn reach(socket: BorrowedFd<'_>, name: &[u8]) -> Result<Reach> {
    if !is_path(name) {
        return Ok(Reach { address: address(name), file: None });
    }
    let file = socket::bound_file(socket).context(|| "file of a socket".to_owned())?;
    // The link leads to the very inode.
    let address = address(proc_path(&file).as_os_str().as_bytes());
    Ok(Reach { address, file: Some(file) })
}

/// How to reach a socket; good as long as it lives.
#[derive(Debug)]
pub(super) struct Reach {
    pub(super) address: Vec<u8>,
    /// The file that the address leads to.
    pub(super) file: Option<OwnedFd>,
}

/// Binds a new socket to its name, if it has one.
///
/// # Errors
/// If the address is taken, or its directory is not there or may not be written to.
pub(super) fn bind(
    cx: &Neighbours<'_>,
    names: &mut Names,
    socket: BorrowedFd<'_>,
    bound: Option<&UnixName>,
) -> Result<()> {
    let Some(UnixName { name, file, .. }) = bound else { return Ok(()) };
    let Some(file) = file else { return names.scratch.bind(socket, name) };
    let place = Bound::of(cx, file)?;
    if place.rights.is_some() && !cx.roots.may_make_in(place.dir.as_fd())? {
        let (giver, user) = cx.roots.giver();
        let why = format!(
            "a Unix socket would have its file there, and {giver} gives no right to make one; give its directory to {user}"
        );
        return Err(Error::invalid(place.path.display().to_string(), why));
    }
    let before = run_in(&[], || place.bind(socket, name))?;
    let bound = socket::bound_file(socket).context(|| "file of a socket".to_owned())?;
    let permitted = place.set_permissions(&bound);
    names.placed.add(place.copy.unwrap_or(place.dir), &place.leaf, bound, before);
    permitted
}

/// Where the names of restored sockets are.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) scratch: Scratch,
    pub(super) placed: Placed,
}

/// A file system of our own, for names without a file.
#[derive(Debug, Default)]
pub(super) struct Scratch(Option<OwnedFd>);

impl Scratch {
    /// Binds a socket so that it has `name`, and no file if it is a path.
    ///
    /// # Errors
    /// If the name is taken, or there can be no tmpfs for its file.
    pub(super) fn bind(&mut self, socket: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
        if !is_path(name) {
            return socket::bind(socket, &address(name))
                .context(|| format!("bind to the abstract name {}", name.escape_ascii()));
        }
        let root = match &mut self.0 {
            Some(root) => root,
            none => none.insert(tmpfs()?),
        };
        run_in(&[], || Stage::enter(root)?.bind(socket, name, Fate::Unlinked))
    }
}

/// A tmpfs that is mounted nowhere.
fn tmpfs() -> Result<OwnedFd> {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen,
    };
    let context = || "new tmpfs".to_owned();
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).context(context)?;
    fsconfig_create(&fs).context(context)?;
    fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).context(context)
}

/// Where the file of a name belongs.
#[derive(Debug)]
struct Bound {
    /// Its directory.
    dir: OwnedFd,
    /// The same directory through a writable copy of its mount, if there is one.
    copy: Option<OwnedFd>,
    /// Its name there.
    leaf: Vec<u8>,
    /// Its path, for messages.
    path: PathBuf,
    /// The user and the group that are to own it, as this host has them.
    owner: Option<(u32, u32)>,
    mode: Option<Mode>,
    /// With which rights the file of a socket that nobody has goes; `None` for all.
    rights: Option<GivenRights>,
}

impl Bound {
    fn of(cx: &Neighbours<'_>, file: &SocketFile) -> Result<Self> {
        let leaf = file.path.file_name().unwrap_or_default().as_bytes().to_vec();
        let parent = file.path.parent().unwrap_or(Path::new("/"));
        let root = cx.roots.root_of_mount(file.mount)?;
        let bytes = parent.as_os_str().as_bytes();
        let is_firm = cx.roots.is_firm((file.mount, bytes))?;
        let find = |root: BorrowedFd<'_>, path: &[u8]| {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            match is_firm {
                true => Ok(open_in(root, path, flags, Mode::empty())),
                false => cx.roots.find_below(root, path, flags),
            }
        };
        let copy = cx.mounts.on_copy(file.mount, bytes);
        let copy =
            copy.map(|(root, path)| find(root, path)).transpose()?.and_then(|found| found.ok());
        let seen = find(root, bytes)?;
        // What hides the mount is not where the file belongs.
        let hidden = matches!((&seen, &copy), (Ok(a), Some(b)) if !same_file(a, b));
        let dir = match (seen, &copy) {
            (Err(_), Some(copy)) => duplicate(copy)?,
            (Ok(_), Some(copy)) if hidden => duplicate(copy)?,
            (seen, _) => seen.context(|| format!("open {}", parent.display()))?,
        };
        let outside = |(uid, gid): (u32, u32)| {
            let maps = cx.id_maps;
            (maps.uid_outside(uid).unwrap_or(uid), maps.gid_outside(gid).unwrap_or(gid))
        };
        let (owner, mode) = (file.owner.map(outside), file.mode.map(Mode::from_raw_mode));
        let rights = cx.roots.rights.clone().filter(|_| !is_firm);
        Ok(Bound { dir, copy, leaf, path: file.path.clone(), owner, mode, rights })
    }

    /// On a thread of its own; the status of the file of a socket that nobody had, if there was one before.
    fn bind(&self, socket: BorrowedFd<'_>, name: &[u8]) -> Result<Option<Stat>> {
        if self.mode.is_some() {
            // As soon as the file is there others could reach the socket by it.
            rustix::process::umask(Mode::RWXG | Mode::RWXO);
        }
        match self.bind_in(&self.dir, socket, name) {
            Err(Error::Os { source, .. })
                if source.raw_os_error() == Some(libc::EROFS) && self.copy.is_some() =>
            {
                self.bind_in(self.copy.as_ref().unwrap_or(&self.dir), socket, name)
            }
            other => other,
        }
    }

    fn bind_in(&self, dir: &OwnedFd, socket: BorrowedFd<'_>, name: &[u8]) -> Result<Option<Stat>> {
        rustix::process::fchdir(dir).context(|| "fchdir".to_owned())?;
        let leaf = Path::new(OsStr::from_bytes(&self.leaf));
        let before = place::remove_old(leaf, &self.path, self.rights.as_ref())?;
        if path_of(name) == leaf {
            socket::bind(socket, &address(name))
                .context(|| format!("bind a Unix socket to {}", leaf.display()))?;
            return Ok(before);
        }
        let (here, stage) = make_stage(dir)?;
        let bound =
            Stage::enter(&stage).and_then(|stage| stage.bind(socket, name, Fate::Moved(dir, leaf)));
        let removed = rustix::fs::unlinkat(dir, &here, AtFlags::REMOVEDIR);
        bound?;
        removed.context(|| format!("remove {here}"))?;
        Ok(before)
    }

    /// Gives the file its owner and mode, by way of the socket: whoever may write to the directory
    /// could put something else under its name at any moment.
    fn set_permissions(&self, file: &OwnedFd) -> Result<()> {
        let what = || format!("permissions of the socket {}", self.leaf.escape_ascii());
        if let Some((uid, gid)) = self.owner {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            rustix::fs::chownat(file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .context(what)?;
        }
        match self.mode {
            Some(mode) => {
                rustix::fs::chmodat(CWD, proc_path(file), mode, AtFlags::empty()).context(what)
            }
            None => Ok(()),
        }
    }
}

fn same_file(a: &OwnedFd, b: &OwnedFd) -> bool {
    match (rustix::fs::fstat(a), rustix::fs::fstat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

fn duplicate(file: &OwnedFd) -> Result<OwnedFd> {
    file.try_clone().context(|| "dup".to_owned())
}

/// A new directory in `dir`, and its name, which nobody can have laid out before: a link of that name
/// would lead out of `dir`.
fn make_stage(dir: &OwnedFd) -> Result<(String, OwnedFd)> {
    let what = || "a directory to bind a socket in".to_owned();
    let name = format!(".torpor.{:016x}.socket", random().context(what)?);
    rustix::fs::mkdirat(dir, &name, Mode::RWXU).context(what)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let stage = rustix::fs::openat(dir, &name, flags, Mode::empty()).context(what)?;
    Ok((name, stage))
}

fn make_dir(path: &Path) -> Result<()> {
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e).context(|| format!("mkdir {}", path.display())),
    }
}

/// What becomes of the file that a staged bind makes.
enum Fate<'a> {
    /// It goes away.
    Unlinked,
    /// It goes to a directory, under a name.
    Moved(&'a OwnedFd, &'a Path),
}

/// A directory in which all directories that a name mentions are made for the moment
/// of the bind, so that any name can be bound. It belongs to a thread with a root and
/// a working directory of its own.
struct Stage;

impl Stage {
    fn enter(dir: &OwnedFd) -> Result<Self> {
        let what = || "enter the directory that a socket is bound in".to_owned();
        rustix::process::fchdir(dir).context(what)?;
        rustix::process::chroot(".").context(what)?;
        Ok(Stage)
    }

    fn bind(self, socket: BorrowedFd<'_>, name: &[u8], then: Fate<'_>) -> Result<()> {
        let path = path_of(name);
        let mut made = Vec::new();
        let bound = descend(path, &mut made)
            .and_then(|()| {
                socket::bind(socket, &address(name))
                    .context(|| format!("bind to {}", path.display()))
            })
            .and_then(|()| {
                match then {
                    Fate::Unlinked => rustix::fs::unlink(path),
                    Fate::Moved(dir, leaf) => {
                        rustix::fs::renameat_with(CWD, path, dir, leaf, RenameFlags::NOREPLACE)
                            .inspect_err(|_| {
                                let _ = rustix::fs::unlink(path);
                            })
                    }
                }
                .context(|| format!("put {} where it belongs", path.display()))
            });
        for dir in made.iter().rev() {
            if let Err(e) = rustix::fs::rmdir(dir) {
                tracing::warn!("cannot remove the temporary directory {}: {e}", dir.display());
            }
        }
        bound
    }
}

/// Makes the directories of a path, and a working directory that is deep enough for
/// all its `..`. What was made is added to `made`, as absolute paths.
fn descend(path: &Path, made: &mut Vec<PathBuf>) -> Result<()> {
    let mut here = PathBuf::from("/");
    let mut add = |dir: &Path| -> Result<()> {
        if dir != Path::new("/") && !made.iter().any(|m| m == dir) {
            make_dir(dir)?;
            made.push(dir.to_owned());
        }
        Ok(())
    };
    if path.is_relative() {
        for _ in path.components().filter(|c| *c == Component::ParentDir) {
            here.push("d");
            add(&here)?;
        }
        rustix::process::chdir(&here).context(|| "chdir".to_owned())?;
    }
    for part in path.parent().iter().flat_map(|p| p.components()) {
        match part {
            Component::Normal(part) => here.push(part),
            Component::ParentDir => drop(here.pop()),
            _ => {}
        }
        add(&here)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::file::socket::testing::close;

    fn in_dir(path: &str, name: &str) -> Option<String> {
        directory(Path::new(path), Path::new(name)).map(|d| d.to_str().unwrap().to_owned())
    }

    #[test]
    fn directories_are_found() {
        assert_eq!(in_dir("/run/x", "/run/x").as_deref(), Some("/"));
        assert_eq!(in_dir("/jail/run/x", "/run/x").as_deref(), Some("/jail"));
        assert_eq!(in_dir("/a/b/c", "b/c").as_deref(), Some("/a"));
        assert_eq!(in_dir("/a/b/c", "./c").as_deref(), Some("/a/b"));
        assert_eq!(in_dir("/a/b/moved", "name"), None);
        assert_eq!(in_dir("/a/c", "../c"), None);
        assert_eq!(in_dir("/c", "a/c"), None);
    }

    /// Binds to a name without a file, and says what the kernel calls it then.
    fn bound(name: &[u8]) -> Vec<u8> {
        let socket = socket::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        Scratch::default().bind(socket.as_fd(), name).unwrap();
        let file = socket::bound_file(socket.as_fd()).unwrap();
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_nlink, 0);
        socket::local_address(socket.as_fd()).unwrap()[2..].to_vec()
    }

    #[test]
    fn any_name_is_bound_without_a_file() {
        let names: [&[u8]; 6] = [
            b"/run/a/b\0",
            b"plain\0",
            b"./x\0",
            b"../../up/x\0",
            b"/a/../../b//c\0",
            b"a/../b/c\0",
        ];
        for name in names {
            assert_eq!(bound(name), name, "{}", name.escape_ascii());
        }
    }

    /// A place for a socket in a directory, with an owner and a mode that no file of a test has.
    fn place(dir: &Path, leaf: &str) -> Bound {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Bound {
            dir: rustix::fs::open(dir, flags, Mode::empty()).unwrap(),
            copy: None,
            leaf: leaf.as_bytes().to_vec(),
            path: dir.join(leaf),
            owner: Some((4711, 4712)),
            mode: Some(Mode::from_raw_mode(0o622)),
            rights: None,
        }
    }

    /// Binds a new socket that is called `name` to its place.
    fn bind_at(place: &Bound, name: &[u8]) -> Result<OwnedFd> {
        let socket = socket::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        run_in(&[], || place.bind(socket.as_fd(), name))?;
        Ok(socket)
    }

    fn owner_and_mode(path: &Path) -> (u32, u32, u32) {
        let stat = rustix::fs::lstat(path).unwrap();
        (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777)
    }

    #[test]
    fn what_is_in_its_place_meanwhile_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("secret"), "").unwrap();
        let before = owner_and_mode(&at("secret"));
        for name in [&b"socket\0"[..], b"/elsewhere/name\0"] {
            let place = place(dir.path(), "socket");
            let socket = bind_at(&place, name).unwrap();
            std::fs::rename(at("socket"), at("moved")).unwrap();
            std::os::unix::fs::symlink(at("secret"), at("socket")).unwrap();
            place.set_permissions(&socket::bound_file(socket.as_fd()).unwrap()).unwrap();
            assert_eq!(owner_and_mode(&at("moved")), (4711, 4712, 0o622));
            assert_eq!(owner_and_mode(&at("secret")), before);
            std::fs::remove_file(at("socket")).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "a directory is left");
        }
    }

    /// Whatever the restoring program's umask is.
    #[test]
    fn nobody_else_reaches_a_socket_before_its_file_has_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        for (leaf, name) in [("one", &b"one\0"[..]), ("two", b"/elsewhere/name\0")] {
            let place = place(dir.path(), leaf);
            let socket = socket::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
            run_in(&[], || {
                rustix::process::umask(Mode::empty());
                place.bind(socket.as_fd(), name)
            })
            .unwrap();
            assert_eq!(owner_and_mode(&dir.path().join(leaf)).2 & 0o077, 0, "{leaf}");
            place.set_permissions(&socket::bound_file(socket.as_fd()).unwrap()).unwrap();
            assert_eq!(owner_and_mode(&dir.path().join(leaf)), (4711, 4712, 0o622));
        }
    }

    /// Of whatever kind it is, and wherever it listens.
    #[test]
    fn a_socket_that_somebody_has_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET] {
            for name in [&b"socket\0"[..], b"/elsewhere/name\0"] {
                let theirs = socket::socket(libc::AF_UNIX, kind, 0).unwrap();
                socket::bind(theirs.as_fd(), &address(path.as_os_str().as_bytes())).unwrap();
                let before = std::fs::symlink_metadata(&path).unwrap().ino();
                let refused = bind_at(&place(dir.path(), "socket"), name).unwrap_err().to_string();
                assert!(refused.contains(path.to_str().unwrap()), "{refused}");
                assert_eq!(std::fs::symlink_metadata(&path).unwrap().ino(), before);
                close(vec![theirs]);
                close(vec![bind_at(&place(dir.path(), "socket"), name).unwrap()]);
                std::fs::remove_file(&path).unwrap();
            }
        }
    }

    #[test]
    fn what_fails_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let fails = |kept: bool| {
            let place = place(dir.path(), "socket");
            let socket = socket::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
            let before = run_in(&[], || place.bind(socket.as_fd(), b"socket\0")).unwrap();
            let file = socket::bound_file(socket.as_fd()).unwrap();
            place.set_permissions(&file).unwrap();
            let mut placed = Placed::default();
            placed.add(place.dir, &place.leaf, file, before);
            if kept {
                placed.keep();
            }
            drop(placed);
            close(vec![socket]);
        };
        fails(false);
        assert!(!path.exists());
        // Another's, which nobody has any more.
        close(vec![std::os::unix::net::UnixListener::bind(&path).unwrap().into()]);
        std::os::unix::fs::chown(&path, Some(4713), Some(4714)).unwrap();
        let before = owner_and_mode(&path);
        fails(false);
        assert_eq!(owner_and_mode(&path), before);
        fails(true);
        assert_eq!(owner_and_mode(&path), (4711, 4712, 0o622));
    }

    /// What is left of a socket of somebody else stays where only its owner may take it away.
    #[test]
    fn files_of_others_are_removed_with_the_rights_of_the_container() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        close(vec![std::os::unix::net::UnixListener::bind(&path).unwrap().into()]);
        std::os::unix::fs::chown(&path, Some(4713), Some(4714)).unwrap();
        let sticky = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        std::fs::set_permissions(dir.path(), sticky).unwrap();
        let bound = |user: u32| {
            let rights = GivenRights::of_user(user, (user, vec![]));
            bind_at(&Bound { rights: Some(rights), ..place(dir.path(), "socket") }, b"socket\0")
        };
        let before = owner_and_mode(&path);
        assert!(bound(4712).unwrap_err().to_string().contains("remove "));
        assert_eq!(owner_and_mode(&path), before);
        close(vec![bound(4713).unwrap()]);
    }

    #[test]
    fn what_has_its_name_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("socket"), "content").unwrap();
        for name in [&b"socket\0"[..], b"/elsewhere/name\0"] {
            bind_at(&place(dir.path(), "socket"), name).unwrap_err();
            let content = std::fs::read_to_string(dir.path().join("socket")).unwrap();
            assert_eq!(content, "content");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "something is left");
        }
    }
}
