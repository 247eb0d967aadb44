//! The root directories of restored mount namespaces, below which paths lead.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use torpor_sys::landlock;
use torpor_sys::rights::{FileRights, Limited};

use crate::error::{Context, Error, Result};
use crate::file::description::{duplicate, open_in, reopen, same_inode, without_waiting};
use crate::file::given_rights::GivenRights;
use crate::namespace::run_in;

/// `CAP_DAC_OVERRIDE`, `CAP_FOWNER` (linux/capability.h).
const DAC_OVERRIDE: u32 = 1;
const FOWNER: u32 = 3;
/// `CAP_SYS_PTRACE`.
const SYS_PTRACE: u32 = 19;

/// The dumped mount that a path was opened through (-1 for the root task's namespace), and the path.
pub(crate) type PathAt<'a> = (i32, &'a [u8]);

/// Where the paths of the images begin.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    /// The root directory of each mount namespace, by its image number.
    pub by_ns: HashMap<u32, OwnedFd>,
    /// The mount namespace (image number) that each dumped mount id belongs to.
    pub of_mount: HashMap<i32, u32>,
    /// The mount namespace of the root task.
    pub first: Option<u32>,
    /// What the calling runtime has given the container, or what a user of this host has, if that is known.
    pub rights: Option<GivenRights>,
    /// Whether they are those of a user of this host (`--files-as`).
    pub of_user: bool,
    /// The namespaces of the root task that are not this program's, of the kinds by which files of the kernel are those of their opener.
    pub homes: Vec<OwnedFd>,
}

impl Roots {
    /// Files are opened and made with the rights of this user of this host, and its group and further groups. It could have put
    /// something else in the place of its files since its tasks were dumped, or links to files of others.
    pub(crate) fn limit_to_user(&mut self, user: u32, groups: (u32, Vec<u32>)) {
        (self.rights, self.of_user) = (Some(GivenRights::of_user(user, groups)), true);
    }

    /// Who has given the rights, and whose they are, for messages.
    pub(crate) fn giver(&self) -> (&'static str, &'static str) {
        match self.of_user {
            true => ("--files-as", "the tasks' user"),
            false => ("the calling runtime", "the container's user"),
        }
    }

    /// Whether the user whose rights files are opened with could not have changed where a path leads: all directories on the
    /// way are the restoring user's, and nobody else can write there. What its tasks had open there they had by other
    /// rights: those of a set-uid program, or of before a mode was changed.
    ///
    /// # Errors
    /// If no mount namespace is known.
    pub(crate) fn is_firm(&self, (mount, path): PathAt<'_>) -> Result<bool> {
        if !self.of_user {
            return Ok(false);
        }
        let own = rustix::process::geteuid().as_raw();
        let mut at = duplicate(self.root_of_mount(mount)?)?;
        for part in Path::new(OsStr::from_bytes(path)).components() {
            let Component::Normal(name) = part else { continue };
            let dir = rustix::fs::fstat(&at).context(|| "fstat".to_owned())?;
            let for_others = Mode::WGRP | Mode::WOTH;
            if dir.st_uid != own || Mode::from_raw_mode(dir.st_mode).intersects(for_others) {
                return Ok(false);
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(next) = rustix::fs::openat(&at, name, flags, Mode::empty()) else {
                return Ok(false);
            };
            at = next;
        }
        let stat = rustix::fs::fstat(&at).context(|| "fstat".to_owned())?;
        Ok(FileType::from_raw_mode(stat.st_mode) != FileType::Symlink)
    }

    /// Opens a path as the tasks of a mount namespace see it. `at`: the
    /// dumped mount that it was opened through, -1 for the root task's namespace.
    /// The path is resolved inside that namespace's root; symbolic links cannot
    /// lead out of it. A fifo at its end is not waited for.
    /// What is there is looked up first (`O_PATH`) and opened, even by a device's driver, only if `judge` lets it be.
    /// `judge` says whether it belongs to a process of the tree, which is a root user's with all rights for the moment.
    /// It is opened with no more than what the calling runtime passed: its descriptor keeps the
    /// credentials of its opener. The owner of a file could give itself the right to open it. Of the kernel's files some keep the
    /// namespaces of their opener as well: who may change a group is told by them, and settings are those of a namespace.
    ///
    /// # Errors
    /// Those of `judge`. If no mount namespace is known; `ENOENT`, `ENOTDIR` or `ELOOP` if the path leads nowhere there, `EACCES` if the
    /// container's user may not open what is there like this, `ENXIO` for a fifo that is to be written to and that nobody reads.
    pub(crate) fn open_path(
        &self,
        at: PathAt<'_>,
        flags: OFlags,
        judge: impl FnOnce(&OwnedFd) -> Result<bool>,
    ) -> Result<OwnedFd> {
        let found = self.find(at, flags)?;
        let is_of_tree = judge(&found)?;
        if flags.contains(OFlags::PATH) {
            return Ok(found);
        }
        if self.homes.is_empty() || !is_of_opener(&found)? {
            return self.open_limited(at, &found, flags, is_of_tree);
        }
        run_in(&self.fds_of_homes(), || {
            let there = self.find(at, flags)?;
            match is_named_alike(&found, &there)? {
                true => self.open_limited(at, &there, flags, is_of_tree),
                false => Err(exchanged(at.1)),
            }
        })
    }

    /// Opens what was found, with no more than what the calling runtime passed, and in the namespaces of the tasks where
    /// they count.
    ///
    /// # Errors
    /// If the file cannot be opened with the flags.
    pub(crate) fn open_limited_at_home(&self, found: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
        let open = || {
            let _limited = self.limit(found.as_fd())?;
            without_waiting(flags, |flags| reopen(found, flags)).map_err(|e| self.said(e))
        };
        match self.homes.is_empty() || !is_of_opener(found)? {
            true => open(),
            false => run_in(&self.fds_of_homes(), open),
        }
    }

    fn fds_of_homes(&self) -> Vec<BorrowedFd<'_>> {
        self.homes.iter().map(AsFd::as_fd).collect()
    }

    /// Opens what a path has led to with no more than what the calling runtime passed.
    fn open_limited(
        &self,
        at: PathAt<'_>,
        found: &OwnedFd,
        flags: OFlags,
        is_of_tree: bool,
    ) -> Result<OwnedFd> {
        let limited = self.limit_over(found, is_of_tree)?;
        let opened = self.open_found(at, found, flags);
        drop(limited);
        match opened {
            Err(denied) if denied.is_denial() => match self.open_as_owner(found, flags)? {
                Some(opened) => Ok(opened),
                None if self.is_firm(at)? => self.open_found(at, found, flags),
                None => Err(self.said(denied)),
            },
            other => other,
        }
    }

    /// What a path leads to, looked up (`O_PATH`) with no more than what the calling runtime passed. Of the flags only those
    /// count that say where a path leads.
    ///
    /// # Errors
    /// As [`Roots::open_path`].
    pub(crate) fn find(&self, at: PathAt<'_>, flags: OFlags) -> Result<OwnedFd> {
        let (mnt_id, path) = at;
        let found = self.find_below(self.root_of_mount(mnt_id)?, path, flags)?;
        match found.context(|| format!("open {}", String::from_utf8_lossy(path))) {
            Err(denied) if denied.is_denial() && self.is_firm(at)? => self.find_own(at, flags),
            found => found.map_err(|e| self.said(e)),
        }
    }

    /// The same below another directory.
    ///
    /// # Errors
    /// If the rights for that cannot be given up. The inner ones are those of openat2(2).
    pub(crate) fn find_below(
        &self,
        root: BorrowedFd<'_>,
        path: &[u8],
        flags: OFlags,
    ) -> Result<rustix::io::Result<OwnedFd>> {
        let flags = place(flags);
        let found = {
            let least = self.rights.as_ref().map(|given| limit_look_up(&given.least()));
            let _limited = least.transpose()?;
            open_in(root, path, flags, Mode::empty())
        };
        match (&self.rights, found) {
            (Some(given), Err(Errno::ACCESS)) if given.differ() => {
                find_in_steps(given, root, path, flags)
            }
            (_, found) => Ok(found),
        }
    }

    /// The same with all rights.
    fn find_own(&self, (mnt_id, path): PathAt<'_>, flags: OFlags) -> Result<OwnedFd> {
        open_in(self.root_of_mount(mnt_id)?, path, place(flags), Mode::empty())
            .context(|| format!("open {}", String::from_utf8_lossy(path)))
    }

    /// Opens what a path has led to. A description keeps `O_NOFOLLOW`, with which no link to a file is followed: then it is
    /// opened by its path once more, on a thread that can open nothing else. Whoever may make devices there could have put one in
    /// its place, and to open a device can do something by itself.
    fn open_found(
        &self,
        (mnt_id, path): PathAt<'_>,
        found: &OwnedFd,
        flags: OFlags,
    ) -> Result<OwnedFd> {
        let what = || format!("open {}", String::from_utf8_lossy(path));
        let root = self.root_of_mount(mnt_id)?;
        let stat = |file: &OwnedFd| rustix::fs::fstat(file).context(|| "fstat".to_owned());
        let before = stat(found)?;
        let is_dir = FileType::from_raw_mode(before.st_mode) == FileType::Directory;
        without_waiting(flags, |flags| {
            if is_dir || !flags.contains(OFlags::NOFOLLOW) {
                // With a slash at its end a link is followed.
                let link = link_of(found) + if is_dir { "/" } else { "" };
                return rustix::fs::open(link, flags | OFlags::CLOEXEC, Mode::empty())
                    .context(what);
            }
            if flags.contains(OFlags::RWMODE) {
                // The thread would be asked for no right.
                let mode = "a file that is open for neither reading nor writing, with O_NOFOLLOW";
                return Err(Error::Unsupported(mode.to_owned()));
            }
            let opened = run_in(&[], || {
                landlock::open_only(found.as_fd()).context(|| "Landlock".to_owned())?;
                open_in(root, path, flags, Mode::empty()).context(what)
            })?;
            match same_inode(&before, &stat(&opened)?) {
                true => Ok(opened),
                false => Err(exchanged(path)),
            }
        })
    }

    /// A refusal, with its reason where a runtime has given rights.
    fn said(&self, error: Error) -> Error {
        match error {
            Error::Os { what, source }
                if self.rights.is_some() && source.kind() == ErrorKind::PermissionDenied =>
            {
                let what = format!("{what} with no more rights than {} gives", self.giver().0);
                Error::Os { what, source }
            }
            other => other,
        }
    }

    /// Opens a regular file that belongs to the container's user, whatever its mode is by now.
    fn open_as_owner(&self, file: &OwnedFd, flags: OFlags) -> Result<Option<OwnedFd>> {
        let Some(given) = &self.rights else { return Ok(None) };
        let stat = rustix::fs::fstat(file).context(|| "fstat".to_owned())?;
        let rights = given.over(&stat);
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_regular || rights.user != Some(stat.st_uid) || flags.contains(OFlags::NOFOLLOW) {
            return Ok(None);
        }
        let _owner = rights.with(DAC_OVERRIDE).limit().context(|| "open a file".to_owned())?;
        Ok(without_waiting(flags, |flags| reopen(file, flags)).ok())
    }

    /// Opens a program to map it, which the container's user may run, but not read: exec(2) maps it as well. `None` if
    /// the user may not run it, or is not limited.
    ///
    /// # Errors
    /// If it cannot be opened with all rights.
    pub(crate) fn open_program(&self, mnt_id: i32, path: &[u8]) -> Result<Option<OwnedFd>> {
        let program = self.allowed(mnt_id, path, FileType::RegularFile, Access::EXEC_OK)?;
        program.map(|file| reopen(&file, OFlags::RDONLY)).transpose()
    }

    /// Opens a fifo for both directions, of which the container's user may have those in `flags` only. `None` if it
    /// may not have them, or is not limited.
    ///
    /// # Errors
    /// If it cannot be opened with all rights.
    pub(crate) fn open_fifo(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
    ) -> Result<Option<OwnedFd>> {
        let access = match flags.intersection(OFlags::RWMODE) {
            OFlags::RDONLY => Access::READ_OK,
            OFlags::WRONLY => Access::WRITE_OK,
            _ => Access::READ_OK | Access::WRITE_OK,
        };
        let fifo = self.allowed(mnt_id, path, FileType::Fifo, access)?;
        fifo.map(|file| reopen(&file, OFlags::RDWR | OFlags::NONBLOCK)).transpose()
    }

    /// Whether the container's user may make files in a directory. Where nobody can, whoever makes one finds out.
    ///
    /// # Errors
    /// If the rights for that cannot be given up.
    pub(crate) fn may_make_in(&self, dir: BorrowedFd<'_>) -> Result<bool> {
        let Some(_limited) = self.limit(dir)? else { return Ok(true) };
        Ok(!is_denied(accessed(dir, Access::WRITE_OK | Access::EXEC_OK)))
    }

    /// Whether the container's user may read a file, or could give itself the right to.
    ///
    /// # Errors
    /// If the rights for that cannot be given up; if the kernel says nothing of the file.
    pub(crate) fn may_read(&self, file: BorrowedFd<'_>) -> Result<bool> {
        let Some(given) = &self.rights else { return Ok(true) };
        let stat = rustix::fs::fstat(file).context(|| "fstat".to_owned())?;
        let rights = given.over(&stat);
        let is_own = rights.user == Some(stat.st_uid);
        let _limited = rights.limit().context(as_user)?;
        Ok(is_own || !is_denied(accessed(file, Access::READ_OK)))
    }

    /// Whether the container's user may take a file's name from it, in a directory where that user may make files: who may
    /// in one for all (`S_ISVTX`), chmod(2) says.
    ///
    /// # Errors
    /// If the kernel says nothing of the directory.
    pub(crate) fn may_take_from(&self, dir: BorrowedFd<'_>, file: &Stat) -> Result<bool> {
        let Some(given) = &self.rights else { return Ok(true) };
        let dir = rustix::fs::fstat(dir).context(|| "fstat".to_owned())?;
        let is_for_all = Mode::from_raw_mode(dir.st_mode).contains(Mode::SVTX);
        let is_own = |stat: &Stat| given.over(stat).user.is_none_or(|user| user == stat.st_uid);
        let has_right = given.over(file).capabilities & 1 << FOWNER != 0;
        Ok(!is_for_all || has_right || is_own(&dir) || is_own(file))
    }

    /// What a path leads to (`O_PATH`), if it is of this type, and the container's user is limited and has this access
    /// to it.
    fn allowed(
        &self,
        mnt_id: i32,
        path: &[u8],
        kind: FileType,
        access: Access,
    ) -> Result<Option<OwnedFd>> {
        let Ok(file) = self.find((mnt_id, path), OFlags::PATH) else { return Ok(None) };
        let Some(_limited) = self.limit(file.as_fd())? else { return Ok(None) };
        let stat = rustix::fs::fstat(&file).context(|| "fstat".to_owned())?;
        let is_of_kind = FileType::from_raw_mode(stat.st_mode) == kind;
        let has_access = accessed(&file, access).is_ok();
        Ok((is_of_kind && has_access).then_some(file))
    }

    /// Opens a path with all rights, for what the restore has put there itself or recognizes by what it is: what is there is
    /// opened only if `judge` lets it be.
    ///
    /// # Errors
    /// Those of `judge`. If no mount namespace is known; `ENOENT`, `ENOTDIR` or `ELOOP` if the path leads nowhere there, `ETXTBSY` for a
    /// program that runs and is to be written to, `ENXIO` for a fifo to be written to that nobody reads.
    pub(crate) fn open_own(
        &self,
        at: PathAt<'_>,
        flags: OFlags,
        judge: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<OwnedFd> {
        let found = self.find_own(at, flags)?;
        judge(&found)?;
        if flags.contains(OFlags::PATH) {
            return Ok(found);
        }
        self.open_found(at, &found, flags)
    }

    /// While the result lives, this thread has no more rights over a file than what the runtime passed.
    ///
    /// # Errors
    /// As [`FileRights::limit`]; if the kernel says nothing of the file.
    pub(crate) fn limit(&self, file: BorrowedFd<'_>) -> Result<Option<Limited>> {
        self.limit_over(file, false)
    }

    /// The same, with the right to the processes of others if it is for `processes`.
    fn limit_over(&self, file: impl AsFd, processes: bool) -> Result<Option<Limited>> {
        let Some(given) = &self.rights else { return Ok(None) };
        let rights = given.over(&rustix::fs::fstat(file).context(|| "fstat".to_owned())?);
        match processes {
            true => limit_look_up(&rights).map(Some),
            false => rights.limit().context(as_user).map(Some),
        }
    }

    /// The root directory of the mount namespace that `mnt_id` belongs to.
    ///
    /// # Errors
    /// If no mount namespace is known at all.
    pub(crate) fn root_of_mount(&self, mnt_id: i32) -> Result<BorrowedFd<'_>> {
        let of_mount = self.of_mount.get(&mnt_id).copied().or(self.first);
        of_mount
            .and_then(|ns| self.by_ns.get(&ns))
            .map(AsFd::as_fd)
            .ok_or_else(|| Error::invalid("mountpoints", format!("no root for mount {mnt_id}")))
    }
}

/// Whether a file is of a file system whose files keep the namespaces of their opener (cgroups), or are those of a namespace
/// (settings, in procfs).
fn is_of_opener(file: &OwnedFd) -> Result<bool> {
    let fs = rustix::fs::fstatfs(file).context(|| "fstatfs".to_owned())?;
    Ok([libc::PROC_SUPER_MAGIC, libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC]
        .contains(&fs.f_type))
}

/// Whether two files of one file system have the same path.
fn is_named_alike(a: &OwnedFd, b: &OwnedFd) -> Result<bool> {
    let what = || "look at a file of the kernel".to_owned();
    let device = |file: &OwnedFd| rustix::fs::fstat(file).map(|stat| stat.st_dev).context(what);
    let path = |file: &OwnedFd| std::fs::read_link(link_of(file)).context(what);
    Ok(device(a)? == device(b)? && path(a)? == path(b)?)
}

fn exchanged(path: &[u8]) -> Error {
    let path = String::from_utf8_lossy(path);
    Error::invalid(path, "somebody has put something else in its place".to_owned())
}

/// What is done with fewer rights, for errors.
fn as_user() -> String {
    "open a file as the container's user".to_owned()
}

/// Limits this thread, but for the right to the processes of others: a procfs can hide who is not of one's user (`hidepid`),
/// and that they are there is all that a look-up tells.
fn limit_look_up(rights: &FileRights) -> Result<Limited> {
    rights.with(SYS_PTRACE).limit().context(as_user)
}

/// Flags that only look up what is there.
fn place(flags: OFlags) -> OFlags {
    flags.intersection(OFlags::NOFOLLOW | OFlags::DIRECTORY) | OFlags::PATH
}

/// What a path leads to below `root`, over no link: each directory on the way is searched with the rights over it. A path of a dump
/// leads over no link, as a rule.
fn find_in_steps(
    given: &GivenRights,
    root: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> Result<rustix::io::Result<OwnedFd>> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let step = |at: &OwnedFd, name: &[u8], flags: OFlags| {
        let stat = rustix::fs::fstat(at).context(|| "fstat".to_owned())?;
        let _limited = limit_look_up(&given.over(&stat))?;
        Ok(match rustix::fs::openat2(at, name, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Err(Errno::LOOP | Errno::XDEV) => Err(Errno::ACCESS),
            next => next,
        })
    };
    let names: Vec<_> = path.split(|&c| c == b'/').filter(|name| !name.is_empty()).collect();
    let Some((last, above)) = names.split_last() else { return Ok(Err(Errno::ACCESS)) };
    let mut at = duplicate(root)?;
    for name in above {
        at = match step(&at, name, place(OFlags::DIRECTORY))? {
            Ok(next) => next,
            denied => return Ok(denied),
        };
    }
    step(&at, last, flags)
}

/// Whether this thread has an access to a file: by the ids for files, and not the real ones.
fn accessed(file: impl AsFd, access: Access) -> rustix::io::Result<()> {
    rustix::fs::accessat(CWD, link_of(file), access, AtFlags::EACCESS)
}

/// Procfs's link to an open file.
fn link_of(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Whether an access was refused. What else is wrong with a file, whoever uses it finds out.
fn is_denied(accessed: rustix::io::Result<()>) -> bool {
    matches!(accessed, Err(Errno::ACCESS | Errno::PERM))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
    use torpor_policy::{Capabilities, IdExtent, Opening, UserMaps};

    use super::*;
    use crate::namespace::NsKind;

    /// What is laid out below `dir`, where paths begin, for a user who may open no more than its own.
    fn of_user(dir: &Path) -> Roots {
        let root = std::fs::File::open(dir).unwrap().into();
        let mut roots =
            Roots { by_ns: HashMap::from([(1, root)]), first: Some(1), ..Roots::default() };
        roots.limit_to_user(65534, (65534, vec![]));
        roots
    }

    /// A user could lay out links while its tasks are images, or exchange directories.
    #[test]
    fn a_path_that_its_user_can_change_leads_to_nothing_that_the_user_may_not_open() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str, mode| {
            std::fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
        };
        for name in ["kept", "kept/below", "own", "shared"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        for name in ["kept/secret", "kept/below/secret", "shared/secret", "own/file"] {
            std::fs::write(at(name), name).unwrap();
            mode(name, 0o600);
        }
        mode("shared", 0o1777);
        mode("kept/below", 0o700);
        symlink("/kept/secret", at("own/link")).unwrap();
        symlink("/kept", at("own/dir")).unwrap();
        ["own", "own/file"].iter().for_each(|name| chown(at(name), Some(65534), None).unwrap());
        let roots = of_user(dir.path());
        let open = |path: &str| {
            let opened = roots.open_path((-1, path.as_bytes()), OFlags::RDWR, |_| Ok(false));
            opened.map(drop).map_err(|e| e.to_string())
        };
        for own in ["/own/file", "/kept/secret", "/kept/below/secret"] {
            assert_eq!(open(own), Ok(()), "{own}");
        }
        for foreign in ["/own/link", "/own/dir/secret", "/own/dir/below/secret", "/shared/secret"] {
            let why = open(foreign).unwrap_err();
            assert!(why.contains("no more rights than --files-as gives"), "{foreign}: {why}");
        }
        // No directory to work in, either.
        assert!(roots.find((-1, b"/own/dir/below/secret"), OFlags::PATH).is_err());
    }

    /// Settings are those of the network of whoever looks for them.
    #[test]
    fn files_of_the_kernel_are_those_of_the_tasks() {
        const SETTING: &str = "/proc/sys/net/ipv4/ip_default_ttl";
        let space = crate::namespace::testing::fresh(NsKind::Net);
        let set = || std::fs::write(SETTING, "77").context(|| SETTING.to_owned());
        run_in(&[space.as_fd()], set).unwrap();
        let root = std::fs::File::open("/").unwrap().into();
        let mut roots =
            Roots { by_ns: HashMap::from([(1, root)]), first: Some(1), ..Roots::default() };
        let read = |roots: &Roots| {
            let opened = roots.open_path((-1, SETTING.as_bytes()), OFlags::RDONLY, |_| Ok(false));
            std::io::read_to_string(std::fs::File::from(opened.unwrap())).unwrap()
        };
        assert_ne!(read(&roots), "77\n");
        roots.homes.push(space);
        assert_eq!(read(&roots), "77\n");
        let ours = roots.open_path((-1, b"/dev/null"), OFlags::RDWR, |_| Ok(false)).unwrap();
        assert!(!is_of_opener(&ours).unwrap());
    }

    /// The list of segments is that of the namespace of whoever opens it.
    #[test]
    fn what_a_handle_leads_to_is_opened_in_the_namespaces_of_the_tasks() {
        let space = crate::namespace::testing::fresh(NsKind::Ipc);
        let make =
            || torpor_sys::ipc::shm_create(0x7073, 4096, 0o1600).context(|| "shmget".to_owned());
        run_in(&[space.as_fd()], make).unwrap();
        let list = rustix::fs::open("/proc/sysvipc/shm", OFlags::PATH, Mode::empty()).unwrap();
        let mut roots = Roots::default();
        let has_it = |roots: &Roots| {
            let opened = roots.open_limited_at_home(&list, OFlags::RDONLY).unwrap();
            let list = std::io::read_to_string(std::fs::File::from(opened)).unwrap();
            list.lines().any(|line| line.trim_start().starts_with("28787 "))
        };
        assert!(!has_it(&roots));
        roots.homes.push(space);
        assert!(has_it(&roots));
    }

    /// To open a device can do something by itself: a watchdog begins to count.
    #[test]
    fn nothing_is_opened_before_it_is_judged() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let watch = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        add_watch(&watch, dir.path().join("file"), WatchFlags::OPEN).unwrap();
        let is_opened = || rustix::io::read(&watch, &mut [0_u8; 4096]).is_ok();
        let root = std::fs::File::open(dir.path()).unwrap().into();
        let roots = Roots { by_ns: HashMap::from([(1, root)]), first: Some(1), ..Roots::default() };
        let refuse = || Error::invalid("file", "no");
        for flags in [OFlags::RDONLY, OFlags::RDWR | OFlags::NOFOLLOW] {
            let at: PathAt<'_> = (-1, b"/file");
            roots.open_path(at, flags, |_| Err(refuse())).unwrap_err();
            roots.open_own(at, flags, |_| Err(refuse())).unwrap_err();
            assert!(!is_opened(), "{flags:?}");
            let opened = roots.open_path(at, flags, |_| Ok(false)).unwrap();
            let got = rustix::fs::fcntl_getfl(&opened).unwrap();
            assert!(is_opened() && got.contains(flags), "{got:?}");
        }
    }

    /// Whoever may write to its directory exchanges it when it was judged.
    #[test]
    fn what_takes_the_place_of_a_file_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        ["file", "other"].iter().for_each(|name| std::fs::write(at(name), name).unwrap());
        std::fs::create_dir(at("dir")).unwrap();
        let watch = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        add_watch(&watch, at("other"), WatchFlags::OPEN).unwrap();
        let root = std::fs::File::open(dir.path()).unwrap().into();
        let roots = Roots { by_ns: HashMap::from([(1, root)]), first: Some(1), ..Roots::default() };
        let open = |path: &str, flags| {
            roots.open_own((-1, path.as_bytes()), flags | OFlags::NOFOLLOW, |_| {
                std::fs::rename(at(path), at("moved")).unwrap();
                std::fs::rename(at("other"), at(path)).unwrap();
                Ok(())
            })
        };
        // The last of these is for neither reading nor writing.
        for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::RWMODE] {
            open("file", flags).unwrap_err();
            std::fs::rename(at("file"), at("other")).unwrap();
            std::fs::rename(at("moved"), at("file")).unwrap();
        }
        // That of a directory is not looked for again.
        let opened = open("dir", OFlags::RDONLY).unwrap();
        assert!(rustix::fs::fcntl_getfl(&opened).unwrap().contains(OFlags::NOFOLLOW));
        let moved = rustix::fs::stat(at("moved")).unwrap();
        assert!(same_inode(&rustix::fs::fstat(&opened).unwrap(), &moved));
        let opened = rustix::io::read(&watch, &mut [0_u8; 4096]).is_ok();
        assert!(!opened || !torpor_sys::process::has_landlock());
    }

    /// Capabilities in a user namespace are over what belongs to its ids, also where somebody may have each of these ids.
    #[test]
    fn rights_in_a_user_namespace_are_over_its_own_ids() {
        let dir = tempfile::tempdir().unwrap();
        let set = |path: &str, owner, group, mode| {
            let path = dir.path().join(path);
            chown(&path, Some(owner), Some(group)).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        };
        let at = |path: &str| dir.path().join(path);
        for name in ["closed", "home"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        let files = [
            ("root's", 0, 0, 0o600, false),
            ("own", 100_005, 100_005, 0o600, true),
            ("own, of root's group", 100_005, 0, 0o600, true),
            ("root's, of an own group", 0, 100_005, 0o660, true),
            ("root's group", 0, 0, 0o060, false),
            ("closed/inside", 100_005, 100_005, 0o666, false),
            ("home/inside", 100_005, 100_005, 0o600, true),
            ("home/root's", 0, 0, 0o600, false),
        ];
        for (name, owner, group, mode, _) in files {
            std::fs::write(at(name), "").unwrap();
            set(name, owner, group, mode);
        }
        set("closed", 0, 0, 0o700);
        set("home", 100_006, 100_006, 0o700);
        set("", 0, 0, 0o755);
        let map = vec![IdExtent::new(0, 100_000, 1000).unwrap()];
        let given = Opening {
            capabilities: Capabilities(1 << DAC_OVERRIDE),
            user: None,
            groups: None,
            ids: Some(UserMaps { users: map.clone(), groups: map }),
        };
        let root = std::fs::File::open(dir.path()).unwrap().into();
        let rights = Some(GivenRights(given));
        let by_ns = HashMap::from([(1, root)]);
        let roots = Roots { by_ns, first: Some(1), rights, ..Roots::default() };
        for (name, .., is_opened) in files {
            let at: PathAt<'_> = (-1, name.as_bytes());
            let opened = roots.open_path(at, OFlags::RDWR, |_| Ok(false));
            assert_eq!(opened.is_ok(), is_opened, "{name}: {opened:?}");
        }
        let may_make = |path: &str| {
            let dir = std::fs::File::open(at(path)).unwrap();
            roots.may_make_in(dir.as_fd()).unwrap()
        };
        assert!(may_make("home") && !may_make("closed") && !may_make(""));
    }
}
