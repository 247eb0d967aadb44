//! Pages that are fetched when they are read.
//!
//! Where a directory of images has a socket of the name [`SOCKET`], its packed pages files may
//! have holes still: a program that reads a part of one asks there first, and is answered when the part is
//! in place. A request is 20 bytes: the number of the file (4), the offset and the length of the
//! part (8 each); the length has the bit [`PATIENT`] as well where nobody waits for the part yet. The
//! answer is one byte, 0 if the part is there.

use std::cell::{Cell, RefCell};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{AtFlags, FileType, fstat, statat};
use rustix::io::Errno;

use crate::dir::ImageDir;
use crate::error::{Error, Result};

/// The name of the socket.
pub const SOCKET: &str = "pages.sock";
/// The bytes of a request.
pub const REQUEST: usize = 20;
/// In the length of a part: it is read ahead, and may come when it suits.
pub const PATIENT: u64 = 1 << 63;

/// Who fetches the pages of a directory.
#[derive(Debug)]
pub struct Feed {
    dir: OwnedFd,
    /// Device and inode of the directory.
    key: (u64, u64),
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
    /// If the directory cannot be looked at.
    pub fn of(dir: &ImageDir) -> Result<Option<Self>> {
        let failed = |errno: Errno| Error::io(&dir.path().join(SOCKET), "stat", errno.into());
        let path = dir.path();
        let Some(dir) = dir.directory() else { return Ok(None) };
        match statat(dir, SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {}
            Ok(_) | Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        let stat = fstat(dir).map_err(failed)?;
        let dir = dir.try_clone_to_owned().map_err(|e| Error::io(path, "open", e))?;
        Ok(Some(Self { dir, key: (stat.st_dev, stat.st_ino) }))
    }

    /// Waits until `len` bytes at `offset` of the packed pages file `id` are in place.
    ///
    /// # Errors
    /// If whoever fetches them has ended, or could not fetch them.
    pub fn want(&self, id: u32, offset: u64, len: u64) -> io::Result<()> {
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
        // Its path may be longer than the address of a socket can be.
        UnixStream::connect(format!("/proc/self/fd/{}/{SOCKET}", self.dir.as_raw_fd()))
    }
}
