//! Pages that are fetched when they are read.
//!
//! Where a directory of images has a socket of the name [`SOCKET`], its pages files, packed or not, may
//! have holes still: a program that reads a part of one asks there first, and is answered when the part is
//! in place. A request is 20 bytes: the number of the file (4), the offset and the length of the
//! part (8 each); the length has the bit [`PATIENT`] as well where nobody waits for the part yet. The
//! answer is one byte, 0 if the part is there.
//!
//! Where there is a file of the name [`RETURNS`] beside it, whoever answers comes back if it ends, and removes the socket
//! when all is in place. Elsewhere one that ends does not come back.

use std::cell::{Cell, RefCell};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

use crate::dir::ImageDir;
use crate::error::{Error, Result};

/// The name of the socket.
pub const SOCKET: &str = "pages.sock";
/// The name of the file that shows that whoever answers comes back.
pub const RETURNS: &str = "pages.returns";
/// The bytes of a request.
pub const REQUEST: usize = 20;
/// In the length of a part: it is read ahead, and may come when it suits.
pub const PATIENT: u64 = 1 << 63;

/// How long whoever comes back is waited for.
const ABSENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether it is back.
const LOOK: Duration = Duration::from_millis(50);

/// Who fetches the pages of a directory.
#[derive(Debug)]
pub struct Feed {
    dir: OwnedFd,
    /// Device and inode of the directory.
    key: (u64, u64),
    /// Whether whoever answers comes back.
    returns: bool,
}

/// A connection of one thread: of the process and for the directory that it was made for.
struct Line {
    process: u32,
    key: (u64, u64),
    stream: UnixStream,
}

thread_local! {
    static READS_AHEAD: Cell<bool> = const { Cell::new(false) };
    static LINE: RefCell<Option<Line>> = const { RefCell::new(None) };
}

/// What this thread reads from now on is what nobody waits for yet.
pub fn read_ahead() {
    READS_AHEAD.set(true);
}

impl Feed {
    /// Who fetches the pages of `dir`, if anybody does.
    ///
    /// # Errors
    /// If the directory cannot be looked at; if it is somebody who is neither root nor this user, and who may never answer.
    pub fn of(dir: &ImageDir) -> Result<Option<Self>> {
        let failed = |errno: Errno| Error::io(&dir.path().join(SOCKET), "stat", errno.into());
        let path = dir.path();
        let Some(dir) = dir.directory() else { return Ok(None) };
        let is = |name: &str, kind: FileType| match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == kind),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(errno)),
        };
        // It is there before the socket is, and goes after it.
        let returns = is(RETURNS, FileType::RegularFile)?;
        if !is(SOCKET, FileType::Socket)? {
            return Ok(None);
        }
        match own_socket(dir, SOCKET) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|e| Error::io(&path.join(SOCKET), "open", e))?,
        };
        let stat = fstat(dir).map_err(failed)?;
        let dir = dir.try_clone_to_owned().map_err(|e| Error::io(path, "open", e))?;
        Ok(Some(Self { dir, key: (stat.st_dev, stat.st_ino), returns }))
    }

    /// Waits until `len` bytes at `offset` of the pages file `id` are in place.
    ///
    /// # Errors
    /// If whoever fetches them has ended and does not come back, or could not fetch them.
    pub fn want(&self, id: u32, offset: u64, len: u64) -> io::Result<()> {
        let until = Instant::now() + ABSENCE;
        loop {
            match self.ask(id, offset, len) {
                Err(error) if self.returns && error.kind() == io::ErrorKind::NotFound => {
                    return Ok(());
                }
                Err(error) if self.returns && is_gone(&error) && Instant::now() < until => {
                    sleep(LOOK);
                }
                answer => return answer,
            }
        }
    }

    fn ask(&self, id: u32, offset: u64, len: u64) -> io::Result<()> {
        LINE.with_borrow_mut(|line| {
            let process = std::process::id();
            // A fork has the connection of its parent, which goes on using it.
            let mut known = line.take().filter(|l| (l.process, l.key) == (process, self.key));
            let mut stream = match known.take() {
                Some(line) => line.stream,
                None => self.connect()?,
            };
            let mut request = [0; REQUEST];
            request[..4].copy_from_slice(&id.to_le_bytes());
            request[4..12].copy_from_slice(&offset.to_le_bytes());
            let patient = if READS_AHEAD.get() { PATIENT } else { 0 };
            request[12..].copy_from_slice(&(len | patient).to_le_bytes());
            stream.write_all(&request)?;
            let mut answer = [1];
            stream.read_exact(&mut answer)?;
            *line = Some(Line { process, key: self.key, stream });
            match answer {
                [0] => Ok(()),
                _ => Err(io::Error::other("the pages cannot be fetched from where they lie")),
            }
        })
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let socket = own_socket(self.dir.as_fd(), SOCKET)?;
        // Its path may be longer than the address of a socket can be.
        UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd()))
    }
}

/// The socket of this name in a directory (`O_PATH`). Whoever owns the directory could listen there, and answer nothing: it
/// belongs to root or to this user.
///
/// # Errors
/// If there is none; if it belongs to somebody else, or is no socket.
pub fn own_socket(dir: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = openat(dir, name, flags, Mode::empty())?;
    let stat = fstat(&socket)?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    let is_ours = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
    let refuse = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    match (is_socket, is_ours) {
        (true, true) => Ok(socket),
        (true, false) => refuse("it belongs to another user"),
        (false, _) => refuse("it is no socket"),
    }
}

/// Whether the other end of a connection has ended.
fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | UnexpectedEof)
}
