//! Automatic mounts (autofs): who comes to one waits in the kernel, which asks a process group, the daemon,
//! through a pipe. It answers when it has mounted what was asked for.
//!
//! A restore makes the mount for a helper of its own and leaves it *catatonic*: nobody is asked, so that nothing
//! waits for tasks that do not run yet. When these have their descriptors the mount gets its pipe (`/dev/autofs`
//! is there for daemons that have died and were started again), from a process of the daemon's group: whoever
//! gives the pipe becomes the one who is asked.
//!
//! The kernel does not tell when what is mounted there was last used, nor who asked for it.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, fstatfs, openat};
use rustix::io::{DupFlags, Errno, ioctl_fionread};
use torpor_images::proto::{AutofsEntry, TorporAutofsDirectory};
use torpor_policy::{Automatic, TableNumber, Triggers};
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{RemoteAddr, Tracee};

use super::fs::{join_options, split_options};
use super::mountinfo::Mount;
use super::superblock::{self, fetch};
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::file::description::{PIPEFS, access, reopen};
use crate::file::found::FdInfo;
use crate::proc;
use crate::restore::process::with_process;
use crate::restore::tasks::Task as Made;
use crate::restore::transport::{Transport, place_words};

// linux/auto_fs.h.
const SET_TIMEOUT: libc::Ioctl = libc::_IOWR::<u64>(0x93, 0x64);
const BE_CATATONIC: libc::Ioctl = libc::_IO(0x93, 0x62);

/// Where daemons give a mount a new pipe.
const DEVICE: &str = "/dev/autofs";
/// `struct autofs_dev_ioctl` of linux/auto_dev-ioctl.h: version, its size, the mount, and eight bytes that depend on the call.
const REQUEST: usize = 24;
/// `AUTOFS_DEV_IOCTL_SETPIPEFD`.
const SET_PIPE: libc::Ioctl = libc::_IOWR::<[u64; REQUEST / 8]>(0x93, 0x78);

/// Options that the kernel shows, and that a mount is made with again as they are.
const KEPT: [&str; 2] = ["strictexpire", "ignore"];

/// The highest number for the writing end of a pipe that a restored mount shows. It stands for nothing. The
/// three numbers above it are used as well, and nobody raises the limit of open files of the husk, so that it
/// is well below the limits that are usual.
const HIGHEST: u32 = 200;

/// What the kernel shows of such a mount.
#[derive(Debug, Default, PartialEq, Eq)]
struct ShownAutomatic {
    /// The number of the writing end of the pipe, in the process that has mounted it.
    writing: i32,
    /// The process group that is asked, here.
    group: i32,
    timeout: i32,
    protocols: (i32, i32),
    triggers: Triggers,
    owner: (Option<i32>, Option<i32>),
    /// The inode number of the pipe; `None` if nobody is asked.
    pipe: Option<u64>,
}

impl ShownAutomatic {
    /// `None` for options that are not understood.
    fn parse(options: &OsStr) -> Option<Self> {
        let mut shown = ShownAutomatic { writing: -1, ..ShownAutomatic::default() };
        for option in split_options(options) {
            let option = option.to_str()?;
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let number = || value.parse::<i32>().ok();
            match key {
                "fd" => shown.writing = number()?,
                "pgrp" => shown.group = number()?,
                "timeout" => shown.timeout = number()?,
                "minproto" => shown.protocols.0 = number()?,
                "maxproto" => shown.protocols.1 = number()?,
                "uid" => shown.owner.0 = Some(number()?),
                "gid" => shown.owner.1 = Some(number()?),
                "direct" => shown.triggers = Triggers::Direct,
                "indirect" => shown.triggers = Triggers::Indirect,
                "offset" => shown.triggers = Triggers::Offset,
                // It is -1 where nobody is asked.
                "pipe_ino" => shown.pipe = value.parse().ok(),
                key if KEPT.contains(&key) => {}
                _ => return None,
            }
        }
        Some(shown)
    }
}

/// What the images say of an automatic mount of these tasks, whose file system has the root directory `root`.
///
/// # Errors
/// Why it cannot be kept, in an `Ok`; if the kernel does not tell what is in it.
pub(super) fn describe(
    tasks: &[Task],
    mount: &Mount,
    root: BorrowedFd<'_>,
) -> Result<std::result::Result<AutofsEntry, String>> {
    let Some(shown) = ShownAutomatic::parse(&mount.options) else {
        return Ok(Err(format!("its options {} are not known", mount.options.display())));
    };
    let mut entry = AutofsEntry {
        fd: -1,
        pgrp: 0,
        timeout: shown.timeout,
        minproto: shown.protocols.0,
        maxproto: shown.protocols.1,
        mode: shown.triggers.number(),
        uid: shown.owner.0,
        gid: shown.owner.1,
        ..AutofsEntry::default()
    };
    if let Some(pipe) = shown.pipe {
        match daemon(tasks, shown.group, pipe, &mount.mountpoint)? {
            Ok((group, reading)) => {
                (entry.fd, entry.pgrp, entry.read_fd) = (shown.writing, group, Some(reading));
            }
            Err(why) => return Ok(Err(why)),
        }
    }
    let found = directories(root, Path::new(""), &mut entry.torpor_directories);
    Ok(found?.map(|()| entry))
}

/// The daemon that a mount asks through `pipe`: its process group in the images, and the number that the reading end
/// of the pipe has in a task of it. Or why it cannot be asked after a restore.
fn daemon(
    tasks: &[Task],
    group: i32,
    pipe: u64,
    at: &Path,
) -> Result<std::result::Result<(i32, i32), String>> {
    let members: Vec<&Task> =
        tasks.iter().filter(|task| !task.is_zombie() && task.stat.pgid == group).collect();
    let root = tasks.first().and_then(|root| root.ids.pid_ns_id);
    let vpgid = members.first().and_then(|first| first.number("NSpgid")).filter(|&id| id != 0);
    let Some(vpgid) = vpgid else {
        return Ok(Err(format!(
            "its daemon, process group {group}, is not of the tree, and nobody else is asked for mounts; \
             provide the mount with --external mnt[{0}]:KEY, or leave it out with --skip-mnt {0}",
            at.display()
        )));
    };
    if members.iter().any(|member| member.ids.pid_ns_id != root) {
        return Ok(Err(format!(
            "its daemon, process group {group}, lives in a pid namespace below that of the tree's first task; \
             unmount it, and start the daemon after the restore"
        )));
    }
    for member in members {
        let Some(number) = reading_end(member.pid, pipe)? else { continue };
        let what = || format!("look into the pipe of the automatic mount at {}", at.display());
        let unread = fetch(member.pid, number.cast_unsigned().into()).context(what)?;
        if ioctl_fionread(&unread).context(what)? > 0 {
            return Ok(Err(
                "somebody waits for a mount there that its daemon has not heard of yet; dump again"
                    .to_owned(),
            ));
        }
        return Ok(Ok((vpgid, number)));
    }
    Ok(Err(format!(
        "no task of process group {group}, which is its daemon, has the pipe open that it asks through; unmount it"
    )))
}

/// The number of a descriptor that process `pid` reads `pipe` by.
fn reading_end(pid: i32, pipe: u64) -> Result<Option<i32>> {
    let name = OsString::from(format!("pipe:[{pipe}]"));
    for number in proc::numbers(pid, "fd")? {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{number}"));
        if !link.is_ok_and(|link| link.as_os_str() == name) {
            continue;
        }
        let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{number}"))?);
        if access(info.flags) != OFlags::WRONLY {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// Lists the directories in `dir`, which is at `path`. Nobody is asked for mounts by that: no name is walked over, and
/// none looked for that is not there.
fn directories(
    dir: BorrowedFd<'_>,
    path: &Path,
    all: &mut Vec<TorporAutofsDirectory>,
) -> Result<std::result::Result<(), String>> {
    let what = || format!("list the directory {:?} of an automatic mount", path.display());
    let list =
        match openat(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        {
            // What an empty one without a mount says to all but its daemon.
            Err(Errno::NOENT) => return Ok(Ok(())),
            list => list.context(what)?,
        };
    for name in Dir::new(list).context(what)? {
        let name = name.context(what)?.file_name().to_owned();
        if [".", ".."].iter().any(|own| name.as_bytes() == own.as_bytes()) {
            continue;
        }
        let path = path.join(OsStr::from_bytes(name.as_bytes()));
        let what = || format!("look at {:?} of an automatic mount", path.display());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = openat(dir, &name, flags, Mode::empty()).context(what)?;
        let mode = fstat(&found).context(what)?.st_mode;
        if FileType::from_raw_mode(mode) != FileType::Directory {
            return Ok(Err(format!("{:?} in it is no directory; remove it", path.display())));
        }
        let mode = mode & 0o7777;
        all.push(TorporAutofsDirectory { path: path.as_os_str().as_bytes().to_vec(), mode });
        if let Err(why) = directories(found.as_fd(), &path, all)? {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// An automatic mount that is to get its pipe.
#[derive(Debug)]
pub(crate) struct WaitingForDaemon {
    /// Its root directory.
    root: OwnedFd,
    /// Its place.
    at: PathBuf,
    daemon: torpor_policy::Daemon,
}

/// Makes the file system of an automatic mount, catatonic. `root` is the husk of the root task, in whose pid
/// namespace the daemon is to be.
///
/// # Errors
/// If its image is missing; if the kernel does not make it or a directory in it.
pub(super) fn make(
    root: &mut Tracee,
    mount: &Mount,
) -> Result<(OwnedFd, Option<WaitingForDaemon>)> {
    let missing = || {
        let why = "there is no image of what it is made with";
        Error::invalid("mountpoints", format!("mount {}: {why}", mount.id))
    };
    let automatic = mount.automatic.as_ref().ok_or_else(missing)?;
    let made = with_process(root, None, |helper| {
        // Only the group that is asked may make directories.
        helper.call("setpgid", (libc::SYS_setpgid, [0, 0]))?;
        let options =
            join_options(options(helper, automatic, mount)?.iter().map(OsString::as_os_str));
        let (number, made) =
            superblock::make_numbered(helper, &Mount { options, ..mount.clone() })?;
        furnish(helper, RemoteFd(number), automatic, mount)?;
        Ok(made)
    })?;
    let Some(daemon) = automatic.daemon else { return Ok((made, None)) };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(&made, ".", flags, Mode::empty())
        .context(|| format!("open the automatic mount at {}", mount.mountpoint.display()))?;
    let waiting = WaitingForDaemon { root, at: mount.mountpoint.clone(), daemon };
    Ok((made, Some(waiting)))
}

/// The options to make it with, and a pipe of the helper's among them.
fn options(helper: &mut Tracee, automatic: &Automatic, mount: &Mount) -> Result<Vec<OsString>> {
    let mut batch = helper.batch();
    let ends = batch.space(8);
    let made = batch.call((libc::SYS_pipe2, [ends.addr.0, libc::O_CLOEXEC as u64]));
    let outcome = batch.run()?;
    outcome.expect(made, || "pipe".to_owned())?;
    let writing = outcome.u32_at(ends, 4);
    let (lowest, highest) = automatic.protocols;
    let (user, group) = automatic.owner;
    let numbers = [
        ("fd", Some(writing)),
        ("minproto", Some(lowest)),
        ("maxproto", Some(highest)),
        ("uid", user),
        ("gid", group),
    ];
    let numbers = numbers.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
    let kept = split_options(&mount.options).filter(|o| KEPT.iter().any(|kept| o == kept));
    let all = numbers.chain([automatic.triggers.name().to_owned()]).map(OsString::from);
    Ok(all.chain(kept.map(OsStr::to_owned)).collect())
}

/// Makes its directories and sets its timeout; after that nobody is asked.
fn furnish(
    helper: &mut Tracee,
    number: RemoteFd,
    automatic: &Automatic,
    mount: &Mount,
) -> Result<()> {
    let at = mount.mountpoint.display();
    helper.call("umask", (libc::SYS_umask, [0]))?;
    for directory in &automatic.directories {
        let mut batch = helper.batch();
        let path = batch.cstr(directory.path.as_os_str().as_bytes());
        let made = batch.call((libc::SYS_mkdirat, [number.0, path.0, directory.mode.into()]));
        let what = || {
            format!(
                "make the directory {} of the automatic mount at {at}",
                directory.path.display()
            )
        };
        batch.run()?.expect(made, what)?;
    }
    let mut batch = helper.batch();
    let here = batch.cstr(".");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = batch.call(syscall::openat(number, here, flags, Mode::empty()));
    let root =
        RemoteFd(batch.run()?.expect(opened, || format!("open the automatic mount at {at}"))?);
    let mut batch = helper.batch();
    let timeout = place_words(&mut batch, &[automatic.timeout.into()]);
    batch.must(syscall::ioctl(root, SET_TIMEOUT, timeout));
    batch.must(syscall::ioctl(root, BE_CATATONIC, RemoteAddr(0)));
    let failed = batch.run()?.first_error();
    failed.map_or(Ok(()), |(_, e)| Err(e)).context(|| format!("set up the automatic mount at {at}"))
}

impl WaitingForDaemon {
    /// A task of the daemon's group that reads the pipe by the number that the images have, and the file that this is.
    ///
    /// # Errors
    /// `ESRCH` if no task of the group reads the pipe.
    pub(crate) fn reader(&self, tasks: &[Made]) -> Result<(usize, u32)> {
        let daemon = self.daemon;
        let number = daemon.reading.unwrap_or(daemon.writing);
        let is_member =
            |task: &Made| !task.image.is_zombie() && task.image.tree.pgid == daemon.group;
        // Of those with the same table only the first has its descriptors.
        let descriptors = |table: TableNumber| {
            let all = tasks.iter().filter(move |task| task.image.sharing.table == table);
            all.flat_map(|task| &task.image.fds)
        };
        let mut members = tasks.iter().enumerate().filter(|(_, task)| is_member(task));
        let found = members.find_map(|(member, task)| {
            let fd = descriptors(task.image.sharing.table).find(|fd| fd.fd == number)?;
            Some((member, fd.file))
        });
        found.ok_or(Errno::SRCH).context(|| self.what())
    }

    fn what(&self) -> String {
        format!(
            "have process group {} asked for mounts at {}",
            self.daemon.group,
            self.at.display()
        )
    }

    /// Has the group of `husk` asked through `pipe`. From then on whoever comes to the mount may wait for a task.
    ///
    /// # Errors
    /// If `pipe` is none; if the kernel does not take it.
    pub(crate) fn ask(&self, husk: &mut Tracee, pipe: BorrowedFd<'_>) -> Result<()> {
        let what = || self.what();
        let file_type = FileType::from_raw_mode(fstat(pipe).context(what)?.st_mode);
        // A FIFO with a name is of another file system.
        let fs_type = fstatfs(pipe).context(what)?.f_type;
        if file_type != FileType::Fifo || fs_type != PIPEFS {
            return Err(Errno::PIPE).context(what);
        }
        let pipe = reopen(pipe, OFlags::WRONLY | OFlags::NONBLOCK)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let device =
            rustix::fs::open(DEVICE, flags, Mode::empty()).context(|| format!("open {DEVICE}"))?;
        let number = self.daemon.writing.min(HIGHEST);
        with_process(husk, None, |asked| {
            let mut transport = Transport::open(asked, number.cast_signed() + 3)?;
            let mut batch = asked.batch();
            transport.send(&mut batch, &[pipe.as_fd(), self.root.as_fd(), device.as_fd()])?;
            let [writing, root, through] = [0, 1, 2].map(|more| number + more);
            // The highest first: each arrives at or below its own number.
            for (from, to) in [(2_u32, through), (1, root), (0, writing)] {
                if from != to {
                    batch.must(syscall::dup3(from.into(), to, DupFlags::CLOEXEC));
                }
            }
            let request = [1, REQUEST as u64 | u64::from(root) << 32, writing.into()];
            let request = place_words(&mut batch, &request);
            batch.must(syscall::ioctl(through.into(), SET_PIPE, request));
            let failed = batch.run()?.first_error();
            failed.map_or(Ok(()), |(_, e)| Err(e)).context(what)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_the_kernel_shows_is_understood() {
        let options = "fd=4,uid=7,pgrp=1014,timeout=30,minproto=5,maxproto=5,indirect,strictexpire,pipe_ino=71770";
        let shown = ShownAutomatic::parse(OsStr::new(options)).unwrap();
        let wanted = ShownAutomatic {
            writing: 4,
            group: 1014,
            timeout: 30,
            protocols: (5, 5),
            triggers: Triggers::Indirect,
            owner: (Some(7), None),
            pipe: Some(71770),
        };
        assert_eq!(shown, wanted);
        let options = "fd=-1,pgrp=7,timeout=0,minproto=5,maxproto=5,direct,pipe_ino=-1";
        let shown = ShownAutomatic::parse(OsStr::new(options)).unwrap();
        assert_eq!((shown.triggers, shown.pipe), (Triggers::Direct, None));
        assert_eq!(ShownAutomatic::parse(OsStr::new("fd=4,new=1")), None);
    }
}
