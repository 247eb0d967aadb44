//! Makes file systems, through fsopen(2): a mount that is in no namespace yet.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, fsconfig_create, fsconfig_reconfigure,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::fs::{Origin, flag_names, split_options};
use super::mountinfo::Mount;
use crate::error::{Context, Error, Result};

/// Options that the kernel shows or the images have, but that are no input.
const NO_INPUT: &[&str] = &["newinstance", "seclabel"];

/// A parameter of a file system: a flag if there is no value.
pub(super) type Parameter = (OsString, Option<OsString>);

/// Longest value that fsconfig(2) takes.
const LONGEST: usize = 255;

/// What the file system of a mount is made with. A file system that is filled
/// first becomes read-only in the end only.
fn parameters(mount: &Mount) -> Vec<Parameter> {
    let source = (OsString::from("source"), Some(mount.source.clone()));
    let flags = flag_names(mount.sb_flags)
        .filter(|name| mount.ty.origin != Origin::Filled || *name != "ro")
        .map(|name| (OsString::from(name), None));
    let options = split_options(&mount.options)
        .filter(|o| !NO_INPUT.iter().any(|n| OsStr::new(n) == *o))
        .flat_map(|o| {
            let bytes = o.as_bytes();
            let os = |bytes| OsStr::from_bytes(bytes).to_owned();
            match bytes.iter().position(|&b| b == b'=') {
                None => vec![(o.to_owned(), None)],
                Some(at) if &bytes[..at] == b"lowerdir" && bytes.len() - at > LONGEST => {
                    let layers = bytes[at + 1..].split(|&b| b == b':');
                    layers.map(|l| (OsString::from("lowerdir+"), Some(os(l)))).collect()
                }
                Some(at) => vec![(os(&bytes[..at]), Some(os(&bytes[at + 1..])))],
            }
        });
    std::iter::once(source).chain(flags).chain(options).collect()
}

fn name(mount: &Mount) -> String {
    let (at, options) = (mount.mountpoint.display(), mount.options.display());
    format!("make the {} at {at} (options {options})", mount.fs)
}

/// Makes the file system of `mount` from within the calling thread.
pub(super) fn make_here(mount: &Mount) -> Result<OwnedFd> {
    make_from(&mount.fs, &parameters(mount)).context(|| name(mount))
}

/// Makes a file system of a type from its parameters, from within the calling thread.
///
/// # Errors
/// fsopen(2), fsconfig(2) and fsmount(2), with what the file system has to say.
pub(super) fn make_from(fs: &str, parameters: &[Parameter]) -> io::Result<OwnedFd> {
    let context = fsopen(fs, FsOpenFlags::FSOPEN_CLOEXEC)?;
    let made = configure(context.as_fd(), parameters)
        .and_then(|()| fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()));
    made.map_err(|e| with_log(e.into(), context.as_fd()))
}

fn configure(context: BorrowedFd<'_>, parameters: &[Parameter]) -> rustix::io::Result<()> {
    for (key, value) in parameters {
        match value {
            Some(value) => fsconfig_set_string(context, key.as_os_str(), value.as_os_str())?,
            None => fsconfig_set_flag(context, key.as_os_str())?,
        }
    }
    fsconfig_create(context)
}

/// Makes the file system of `mount` from within a husk: it belongs to the husk's
/// user namespace, and shows its pid, network or IPC namespace.
pub(super) fn make_in(husk: &mut Tracee, mount: &Mount) -> Result<OwnedFd> {
    let (number, made) = make_numbered(husk, mount)?;
    husk.call("close", syscall::close(RemoteFd(number)))?;
    Ok(made)
}

/// As [`make_in`]; the husk keeps it, by the number that is returned as well.
pub(super) fn make_numbered(husk: &mut Tracee, mount: &Mount) -> Result<(u64, OwnedFd)> {
    make_from_in(husk, &mount.fs, &parameters(mount), || name(mount))
}

/// As [`make_from`], from within a husk, which keeps it by the number that is returned as well.
///
/// # Errors
/// As [`make_from`], with `what` it was for; if the husk is gone.
pub(super) fn make_from_in(
    husk: &mut Tracee,
    fs: &str,
    parameters: &[Parameter],
    what: impl FnOnce() -> String,
) -> Result<(u64, OwnedFd)> {
    let mut batch = husk.batch();
    let name = batch.cstr(fs);
    let opened =
        batch.call((libc::SYS_fsopen, [name.0, FsOpenFlags::FSOPEN_CLOEXEC.bits().into()]));
    let context = batch.run()?.expect(opened, || format!("fsopen {fs}"))?;

    let mut batch = husk.batch();
    for (key, value) in parameters {
        let key = batch.cstr(key.as_bytes()).0;
        let (command, value) = match value {
            Some(value) => (libc::FSCONFIG_SET_STRING, batch.cstr(value.as_bytes()).0),
            None => (libc::FSCONFIG_SET_FLAG, 0),
        };
        batch.must((libc::SYS_fsconfig, [context, command.into(), key, value, 0]));
    }
    batch.must((libc::SYS_fsconfig, [context, libc::FSCONFIG_CMD_CREATE.into(), 0, 0, 0]));
    let cloexec = FsMountFlags::FSMOUNT_CLOEXEC.bits().into();
    let mounted = batch.must((libc::SYS_fsmount, [context, cloexec, 0]));
    let outcome = batch.run()?;
    let result = match outcome.first_error() {
        None => outcome.result(mounted),
        Some((_, error)) => Err(error),
    };
    let made = result.and_then(|number| {
        let fetched = fetch(husk.pid(), number);
        Ok((number, fetched?))
    });
    let log = fetch(husk.pid(), context);
    husk.call("close", syscall::close(RemoteFd(context)))?;
    made.map_err(|e| match &log {
        Ok(log) => with_log(e, log.as_fd()),
        Err(_) => e,
    })
    .context(what)
}

/// Adds what the file system had to say.
fn with_log(error: io::Error, context: BorrowedFd<'_>) -> io::Error {
    let mut line = [0u8; 256];
    match rustix::io::read(context, &mut line) {
        Ok(n) if n > 2 => {
            let text = String::from_utf8_lossy(&line[2..n]).trim().to_owned();
            io::Error::new(error.kind(), format!("{error}: {text}"))
        }
        _ => error,
    }
}

/// Makes the file system below a mount read-only.
pub(super) fn make_read_only(mount: BorrowedFd<'_>) -> Result<()> {
    let flags = FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC;
    fspick(mount, "", flags)
        .and_then(|context| {
            fsconfig_set_flag(&context, "ro")?;
            fsconfig_reconfigure(&context)
        })
        .context(|| "make a file system read-only".to_owned())
}

/// The device that a mounted block device is to be made from.
pub(super) fn on_device(mount: &Mount, device: &str) -> Result<OwnedFd> {
    if mount.fs.is_empty() {
        let why = format!("the file system at {} is of no type", mount.mountpoint.display());
        return Err(Error::invalid("mountpoints", why));
    }
    // It makes the kernel load a type that it does not have yet.
    let _ = fsopen(mount.fs.as_str(), FsOpenFlags::FSOPEN_CLOEXEC);
    let known = std::fs::read_to_string("/proc/filesystems")
        .context(|| "read /proc/filesystems".to_owned())?;
    // Those that need no device are marked. One of them would show something of this host.
    if !known.lines().any(|line| line.strip_prefix('\t') == Some(&mount.fs)) {
        let (at, fs) = (mount.mountpoint.display(), &mount.fs);
        let why = format!("the file system at {at} is of type {fs}, which is on no device");
        return Err(Error::invalid("mountpoints", why));
    }
    make_here(&Mount { source: device.into(), ..mount.clone() })
}

/// A duplicate of a descriptor of another task.
pub(super) fn fetch(pid: i32, number: u64) -> std::io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::super::mountinfo::parse;
    use super::*;

    #[test]
    fn parameters_of_a_tmpfs() {
        let line = b"1 0 0:1 / /x rw - tmpfs shm ro,sync,size=4k,inode64,seclabel";
        let mount = parse(line).unwrap().remove(0);
        let got: Vec<_> = parameters(&mount)
            .into_iter()
            .map(|(k, v)| format!("{}={:?}", k.display(), v.and_then(|v| v.into_string().ok())))
            .collect();
        assert_eq!(got, ["source=Some(\"shm\")", "sync=None", "size=Some(\"4k\")", "inode64=None"]);
    }

    #[test]
    fn a_type_without_a_device_shows_nothing_of_this_host() {
        for fs in ["ramfs", "proc", "overlay", "no-such-type"] {
            let line = format!("1 0 0:1 / /x rw - {fs} disk rw");
            let mount = parse(line.as_bytes()).unwrap().remove(0);
            let error = on_device(&mount, "/dev/null").unwrap_err().to_string();
            assert!(error.contains("which is on no device"), "{error}");
        }
        // This one is, but not on that device.
        let mount = parse(b"1 0 0:1 / /x rw - ext4 disk rw").unwrap().remove(0);
        let error = on_device(&mount, "/dev/null").unwrap_err();
        assert!(matches!(error, Error::Os { .. }), "{error}");
    }

    #[test]
    fn the_kernel_says_what_it_dislikes() {
        let mount = parse(b"1 0 0:1 / /x rw - tmpfs t rw,size=many").unwrap().remove(0);
        let error = make_here(&mount).unwrap_err().to_string();
        assert!(error.contains("size"), "{error}");
        let mount = parse(b"1 0 0:1 / /x rw - tmpfs  rw,size=4k").unwrap().remove(0);
        let made = make_here(&mount).unwrap();
        make_read_only(made.as_fd()).unwrap();
    }
}
