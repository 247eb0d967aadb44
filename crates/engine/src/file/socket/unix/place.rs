//! What a restore finds where the file of a Unix socket belongs, and what it leaves there if it fails.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use torpor_sys::socket;

use super::name::{address, proc_path};
use crate::error::{Context, Result};
use crate::file::given_rights::GivenRights;

/// How long a socket may take to be gone: the kernel closes some a moment after their last task has ended (those of
/// an io_uring instance, or in flight).
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(5);

/// Removes, from the working directory, the file of a socket that nobody has any more, as a task leaves it behind when
/// it is dumped; its status, if there was one. `path` is for the message, and `rights` are those of the container.
///
/// # Errors
/// If somebody has that socket, or the container's user may not remove the file.
pub(super) fn remove_old(
    leaf: &Path,
    path: &Path,
    rights: Option<&GivenRights>,
) -> Result<Option<Stat>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Then bind will say so.
    let Ok(file) = rustix::fs::open(leaf, flags, Mode::empty()) else { return Ok(None) };
    let what = || format!("remove {}", path.display());
    let stat = rustix::fs::fstat(&file).context(what)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Ok(None);
    }
    let deadline = Instant::now() + PATIENCE;
    while is_in_use(&file)? {
        if Instant::now() > deadline {
            return Err(Errno::ADDRINUSE).context(|| {
                let path = path.display();
                format!("{path}: another program has a socket there now; end it, or have it listen elsewhere")
            });
        }
        std::thread::sleep(PAUSE);
    }
    let _limited = rights.map(|given| given.over(&stat).limit()).transpose().context(what)?;
    rustix::fs::unlink(leaf).context(what)?;
    Ok(Some(stat))
}

/// Whether somebody has the socket that a file belongs to, in whatever network namespace: to connect to one of another
/// kind than one's own is refused with another error (`EPROTOTYPE`), and to one of the same does nothing to it.
fn is_in_use(file: &OwnedFd) -> Result<bool> {
    let probe =
        socket::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).context(|| "socket".to_owned())?;
    let connected =
        socket::connect(probe.as_fd(), &address(proc_path(file).as_os_str().as_bytes()));
    Ok(match connected {
        Ok(()) => true,
        // The last is of one that takes messages from its own peer only.
        Err(e) => matches!(e.raw_os_error(), Some(libc::EPROTOTYPE | libc::EPERM)),
    })
}

/// The files of restored sockets. If it is dropped before they are [kept](Self::keep) there is again what there was.
#[derive(Debug, Default)]
pub(super) struct Placed(Vec<PlacedFile>);

/// Where the file of a restored socket is.
#[derive(Debug)]
struct PlacedFile {
    dir: OwnedFd,
    leaf: Vec<u8>,
    file: OwnedFd,
    /// That of the socket file that was there before, of which nobody had the socket.
    before: Option<Stat>,
}

impl Placed {
    /// A socket has got its file.
    pub(super) fn add(&mut self, dir: OwnedFd, leaf: &[u8], file: OwnedFd, before: Option<Stat>) {
        self.0.push(PlacedFile { dir, leaf: leaf.to_vec(), file, before });
    }

    /// The restore has succeeded.
    pub(super) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        for place in self.0.drain(..).rev() {
            if let Err(e) = place.give_back() {
                tracing::warn!("the socket file {} is left over: {e}", place.leaf.escape_ascii());
            }
        }
    }
}

impl PlacedFile {
    /// Our file goes; where there was one before, it is that of a socket that nobody has, too, as soon as ours is closed.
    fn give_back(&self) -> rustix::io::Result<()> {
        let leaf = OsStr::from_bytes(&self.leaf);
        let here = match rustix::fs::statat(&self.dir, leaf, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            here => here?,
        };
        let ours = rustix::fs::fstat(&self.file)?;
        if (here.st_dev, here.st_ino) != (ours.st_dev, ours.st_ino) {
            return Ok(());
        }
        let Some(before) = &self.before else {
            return rustix::fs::unlinkat(&self.dir, leaf, AtFlags::empty());
        };
        let (uid, gid) = (Uid::from_raw(before.st_uid), Gid::from_raw(before.st_gid));
        rustix::fs::chownat(&self.file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
        let mode = Mode::from_raw_mode(before.st_mode);
        rustix::fs::chmodat(CWD, proc_path(&self.file), mode, AtFlags::empty())
    }
}
