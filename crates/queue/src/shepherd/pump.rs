//! A job's standard streams: pipes whose far ends the shepherd holds.
//!
//! A job writes to pipes and not to the files themselves: programs that open
//! `/dev/stdout` anew would truncate a file, and write at a position of their own. What is
//! in a pipe while the job is frozen is taken out then, so that a checkpoint knows to the
//! byte how much the job had written.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ioctl_fionread};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::files::{self, JobDir};

/// Output and input leave so much of its file system free, and a sixteenth of it if that is less: for the state of the
/// queue, and for how jobs end.
const SPARE: u64 = 64 << 20;

/// How long a wait lasts where nobody can wake the waiter.
const BEAT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// One output stream of a job.
#[derive(Debug)]
pub(crate) struct Output {
    /// The job's end, kept open so that the pipe outlives the job's sleep.
    job_end: OwnedFd,
    inner: Arc<Mutex<Sink>>,
    /// Bytes in the file and on their way there.
    taken: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Sink {
    pipe: OwnedFd,
    file: File,
    /// Read from the pipe, and not in the file yet: the disk was full.
    pending: Vec<u8>,
}

impl Output {
    /// A stream that goes to the end of `path`, which is cut to `length` bytes before.
    ///
    /// # Errors
    /// If the file cannot be opened or cut, or there are no more descriptors.
    pub(crate) fn open(path: &Path, length: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        if file.metadata()?.len() > length {
            file.set_len(length)?;
        }
        let (pipe, job_end) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        let taken = Arc::new(AtomicU64::new(file.metadata()?.len()));
        let inner = Arc::new(Mutex::new(Sink { pipe, file, pending: Vec::new() }));
        let output = Self { job_end, inner: Arc::clone(&inner), taken: Arc::clone(&taken) };
        thread::spawn(move || pump(&inner, &taken));
        Ok(output)
    }

    /// The end that the job writes to.
    #[must_use]
    pub(crate) fn job_end(&self) -> &OwnedFd {
        &self.job_end
    }

    /// What names the pipe in images.
    ///
    /// # Errors
    /// `EOVERFLOW`, where the number does not fit: pipes are not on a file system that could fail.
    pub(crate) fn inode(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.job_end)?.st_ino)
    }

    /// Takes out what is in the pipe; returns how many bytes the job has written.
    ///
    /// # Errors
    /// If the file cannot be written: its disk is full, but for what output leaves free.
    pub(crate) fn drain(&self) -> io::Result<u64> {
        self.take_out(true)
    }

    /// Takes out what is left in the pipe of a job that has ended, be there ever so little room.
    ///
    /// # Errors
    /// If the file cannot be written: its disk is full.
    pub(crate) fn finish(&self) -> io::Result<u64> {
        self.take_out(false)
    }

    fn take_out(&self, spare: bool) -> io::Result<u64> {
        let mut sink = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        while sink.step(&self.taken, spare)? {}
        Ok(self.taken.load(Ordering::Acquire))
    }

    /// Puts what was written on stable storage.
    ///
    /// # Errors
    /// `EIO` or `ENOSPC` if the disk has not taken what was written, `EMFILE` if this process has as many descriptors as it may.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let file = {
            let sink = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            sink.file.try_clone()?
        };
        file.sync_all()
    }
}

impl Sink {
    /// Moves one bufferful; says whether there was one. Fails if there is only what output leaves free,
    /// where that is to be spared.
    fn step(&mut self, taken: &AtomicU64, spare: bool) -> io::Result<bool> {
        if self.pending.is_empty() {
            let mut buffer = vec![0; 64 << 10];
            match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(count) => {
                    buffer.truncate(count);
                    self.pending = buffer;
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => return Ok(true),
                Err(e) => return Err(e.into()),
            }
        }
        if spare && !self.pending.is_empty() && !has_room(&self.file, 0)? {
            return Err(Errno::NOSPC.into());
        }
        while !self.pending.is_empty() {
            let count = self.file.write(&self.pending)?;
            taken.fetch_add(count as u64, Ordering::AcqRel);
            self.pending.drain(..count);
        }
        Ok(true)
    }
}

/// Whether the file system of a file has more free than what output and input leave, when `more` bytes are added.
///
/// # Errors
/// `EIO`, `ESTALE` or the like if the file system does not answer any more.
pub(crate) fn has_room(file: &File, more: u64) -> io::Result<bool> {
    let system = rustix::fs::fstatvfs(file)?;
    let of = |blocks: u64| blocks.saturating_mul(system.f_frsize);
    let spare = SPARE.min(of(system.f_blocks) / 16);
    Ok(of(system.f_bavail) > spare.saturating_add(more))
}

/// Moves what a job writes to its file, for as long as the shepherd lives. A full disk
/// holds the job up: it waits at its pipe.
fn pump(inner: &Mutex<Sink>, taken: &AtomicU64) {
    let Ok(pipe) = inner.lock().unwrap_or_else(PoisonError::into_inner).pipe.try_clone() else {
        return;
    };
    loop {
        let mut fds = [PollFd::new(&pipe, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let moved = inner.lock().unwrap_or_else(PoisonError::into_inner).step(taken, true);
        if moved.is_err() {
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The input stream of a job: a pipe that is fed from the file to which the daemon adds
/// what the client sends. How far it is is noted for the daemon, which takes no more than some bytes beyond.
#[derive(Debug)]
pub(crate) struct Input {
    job_end: OwnedFd,
    fed: Arc<AtomicU64>,
    ours: Arc<Mutex<Option<OwnedFd>>>,
    stop: Arc<AtomicBool>,
}

impl Input {
    /// A stream of a job's input that goes on `offset` bytes into it.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn open(dir: &JobDir, offset: u64) -> io::Result<Self> {
        let (job_end, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setfl(&ours, fcntl_getfl(&ours)? | OFlags::NONBLOCK)?;
        let input = Self {
            job_end,
            fed: Arc::new(AtomicU64::new(offset)),
            ours: Arc::new(Mutex::new(Some(ours))),
            stop: Arc::new(AtomicBool::new(false)),
        };
        let (fed, ours) = (Arc::clone(&input.fed), Arc::clone(&input.ours));
        let (dir, stop) = (dir.clone(), Arc::clone(&input.stop));
        thread::spawn(move || feed(&dir, &fed, &ours, &stop));
        Ok(input)
    }

    /// The end that the job reads from.
    #[must_use]
    pub(crate) fn job_end(&self) -> &OwnedFd {
        &self.job_end
    }

    /// What names the pipe in images.
    ///
    /// # Errors
    /// `EOVERFLOW`, where the number does not fit: pipes are not on a file system that could fail.
    pub(crate) fn inode(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.job_end)?.st_ino)
    }

    /// How many bytes the job has read. Exact while it is frozen.
    ///
    /// # Errors
    /// If the pipe does not say what is in it (`FIONREAD`).
    pub(crate) fn consumed(&self) -> io::Result<u64> {
        // Held so that nothing is fed in between.
        let _held = self.ours.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = ioctl_fionread(&self.job_end)?;
        Ok(self.fed.load(Ordering::Acquire).saturating_sub(waiting))
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// Where it is noted how much of a job's input has gone into its pipe.
struct Note {
    path: PathBuf,
    file: Option<File>,
    /// What is there.
    fed: Option<u64>,
}

impl Note {
    /// Notes it. What cannot be noted now is tried again with the next look at the input.
    fn keep(&mut self, fed: u64) {
        if self.fed != Some(fed) {
            self.fed = self.write(fed).is_ok().then_some(fed);
        }
    }

    fn write(&mut self, fed: u64) -> io::Result<()> {
        let file = match self.file.take() {
            Some(file) => file,
            None => files::own(&self.path)?,
        };
        self.file.insert(file).write_all_at(&fed.to_be_bytes(), 0)
    }
}

/// How much of a job's input has gone into its pipe; nothing if nobody has noted that, as earlier versions.
#[must_use]
pub(crate) fn fed(dir: &JobDir) -> Option<u64> {
    let noted = std::fs::read(dir.stdin_fed()).ok()?;
    Some(u64::from_be_bytes(noted.try_into().ok()?))
}

/// Notes that nothing has of a job that has not begun, as far as nothing is noted.
///
/// # Errors
/// If the file cannot be made: the disk is full.
pub(crate) fn note_nothing_fed(dir: &JobDir) -> io::Result<()> {
    match fed(dir) {
        Some(_) => Ok(()),
        None => files::own(&dir.stdin_fed())?.write_all_at(&0_u64.to_be_bytes(), 0),
    }
}

fn feed(dir: &JobDir, fed: &AtomicU64, ours: &Mutex<Option<OwnedFd>>, stop: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    let (mut file, mut note) = (None, Note { path: dir.stdin_fed(), file: None, fed: None });
    while !stop.load(Ordering::Acquire) {
        if file.is_none() {
            file = File::open(dir.stdin()).ok();
        }
        // Looked for before the file is read: what is read after it is complete.
        let complete = dir.stdin_end().exists();
        let offset = fed.load(Ordering::Acquire);
        note.keep(offset);
        let count = file.as_ref().map_or(0, |f| f.read_at(&mut buffer, offset).unwrap_or(0));
        let mut ours = ours.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pipe) = ours.as_ref() else { return };
        if count == 0 {
            if complete {
                *ours = None;
                return;
            }
            drop(ours);
            let _ = poll(&mut [], Some(&BEAT));
            continue;
        }
        match rustix::io::write(pipe, &buffer[..count]) {
            Ok(written) => {
                fed.fetch_add(written as u64, Ordering::AcqRel);
            }
            Err(Errno::AGAIN) => {
                let Ok(waited) = pipe.try_clone() else { return };
                drop(ours);
                let _ = poll(&mut [PollFd::new(&waited, PollFlags::OUT)], Some(&BEAT));
            }
            Err(Errno::INTR) => {}
            // The job has closed its end.
            Err(_) => *ours = None,
        }
    }
}

/// Reads what a file holds from `offset` on, at most `most` bytes.
///
/// # Errors
/// If the file is not there, or cannot be read.
pub(crate) fn read_from(path: &Path, offset: u64, most: usize) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    if file.metadata()?.size() <= offset {
        return Ok(Vec::new());
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut found = Vec::new();
    file.take(most as u64).read_to_end(&mut found)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_in_the_file_to_the_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::fs::write(&path, "kept, and lost").unwrap();
        let output = Output::open(&path, 6).unwrap();
        let mut job = File::from(output.job_end().try_clone().unwrap());
        job.write_all(b"more").unwrap();
        assert_eq!(output.drain().unwrap(), 10);
        assert_eq!(std::fs::read(&path).unwrap(), b"kept, more");
        assert_eq!(job.metadata().unwrap().ino(), output.inode().unwrap());
    }

    #[test]
    fn input_goes_on_where_it_was_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let dir = JobDir::at(dir.path().to_owned());
        std::fs::write(dir.stdin(), "old new").unwrap();
        assert_eq!(fed(&dir), None);
        let input = Input::open(&dir, 4).unwrap();
        let mut job = File::from(input.job_end().try_clone().unwrap());
        let mut word = [0; 3];
        job.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"new");
        assert_eq!(input.consumed().unwrap(), 7);
        std::fs::write(dir.stdin_end(), "").unwrap();
        assert_eq!(job.read(&mut word).unwrap(), 0);
        assert_eq!(fed(&dir), Some(7));
    }
}
