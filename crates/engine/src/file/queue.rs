//! What is queued in pipes and fifos.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};
use torpor_images::proto::PipeDataEntry;
use torpor_images::{ImageDir, Kind, Writer};

use super::Found;
use super::description::{is_readable, reopen};
use crate::error::{Context, Error, Result};

/// Writes the queues of pipes or fifos, each once.
#[derive(Debug)]
pub struct Queues {
    kind: Kind,
    known: HashMap<u32, ()>,
    writer: Option<Writer>,
}

impl Queues {
    /// Nothing yet; `kind` is the image file.
    pub fn new(kind: Kind) -> Self {
        Queues { kind, known: HashMap::new(), writer: None }
    }

    /// Saves the queue of the pipe behind `found` unless that has been done.
    ///
    /// # Errors
    /// Refused, if it holds packets.
    pub fn save(&mut self, images: &ImageDir, found: &Found, pipe_id: u32) -> Result<()> {
        if self.known.insert(pipe_id, ()).is_some() {
            return Ok(());
        }
        let size = rustix::pipe::fcntl_getpipe_size(&found.file)
            .context(|| format!("F_GETPIPE_SZ of pipe {pipe_id}"))?;
        // A pipe can be opened at any time; that wakes nobody, while nobody can be
        // waiting for a reader to open it.
        let data = if is_readable(found.flags()) {
            peek(found.file.as_fd(), size)?
        } else {
            peek(reopen(&found.file, OFlags::RDONLY | OFlags::NONBLOCK)?.as_fd(), size)?
        };
        if !data.is_empty() && found.flags() & libc::O_DIRECT.cast_unsigned() != 0 {
            return Err(
                found.refuse("it holds packets (O_DIRECT), whose limits images cannot keep")
            );
        }
        let entry = PipeDataEntry {
            pipe_id,
            bytes: u32::try_from(data.len()).map_err(|_| found.refuse("it holds too much data"))?,
            size: u32::try_from(size).ok(),
        };
        if self.writer.is_none() {
            self.writer = Some(images.writer(self.kind, 0)?);
        }
        if let Some(writer) = &mut self.writer {
            writer.entry(&entry)?;
            writer.raw(&data)?;
        }
        Ok(())
    }

    /// Completes the image file, which is there even if there was no pipe.
    ///
    /// # Errors
    /// The image file's.
    pub fn finish(&mut self, images: &ImageDir) -> Result<()> {
        match self.writer.take() {
            Some(writer) => Ok(writer.finish()?),
            None => Ok(images.writer(self.kind, 0)?.finish()?),
        }
    }
}

/// Copies what is queued in a pipe of `size` bytes, and leaves it there (tee(2)).
fn peek(pipe: BorrowedFd<'_>, size: usize) -> Result<Vec<u8>> {
    let queued = rustix::io::ioctl_fionread(pipe).context(|| "FIONREAD of a pipe".to_owned())?;
    let queued = usize::try_from(queued).unwrap_or(0);
    if queued == 0 {
        return Ok(Vec::new());
    }
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
        .context(|| "pipe".to_owned())?;
    // tee copies slots, not bytes: ours must have as many.
    rustix::pipe::fcntl_setpipe_size(&write, size)
        .context(|| format!("F_SETPIPE_SZ to {size} bytes"))?;
    let copied = rustix::pipe::tee(pipe, &write, queued, SpliceFlags::NONBLOCK)
        .context(|| "tee".to_owned())?;
    let mut data = vec![0; copied];
    let mut filled = 0;
    while filled < copied {
        filled += rustix::io::read(&read, &mut data[filled..])
            .context(|| "read the copy of a pipe".to_owned())?;
    }
    if copied == queued {
        return Ok(data);
    }
    Err(Error::Os {
        what: format!("tee copied {copied} of {queued} bytes"),
        source: Errno::IO.into(),
    })
}

/// The queues that an image file holds.
#[derive(Debug, Default)]
pub struct Saved {
    by_pipe: HashMap<u32, (PipeDataEntry, Vec<u8>)>,
}

impl Saved {
    /// Reads `kind`; no file is no data.
    ///
    /// # Errors
    /// The image file's.
    pub fn load(images: &ImageDir, kind: Kind) -> Result<Self> {
        let mut saved = Saved::default();
        let Some(mut reader) = images.reader(kind, 0)? else { return Ok(saved) };
        while let Some(entry) = reader.next::<PipeDataEntry>()? {
            let data = reader.raw(u64::from(entry.bytes))?;
            saved.by_pipe.insert(entry.pipe_id, (entry, data));
        }
        Ok(saved)
    }

    /// Gives a pipe the size and content of `pipe_id`, through its writing end.
    ///
    /// # Errors
    /// The kernel's; `Invalid` if the content does not fit the size.
    pub fn fill(&mut self, pipe_id: u32, write: impl AsFd) -> Result<()> {
        let Some((entry, data)) = self.by_pipe.remove(&pipe_id) else { return Ok(()) };
        set_size(&write, pipe_id, entry.size)?;
        let flags = rustix::fs::fcntl_getfl(&write).context(|| "F_GETFL".to_owned())?;
        rustix::fs::fcntl_setfl(&write, flags | OFlags::NONBLOCK)
            .context(|| "F_SETFL".to_owned())?;
        let mut rest = data.as_slice();
        while !rest.is_empty() {
            match rustix::io::write(&write, rest) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::AGAIN) => {
                    let reason = format!("{} bytes do not fit into pipe {pipe_id}", entry.bytes);
                    return Err(Error::invalid("pipes-data.img", reason));
                }
                Err(e) => return Err(e).context(|| format!("write to pipe {pipe_id}")),
            }
        }
        rustix::fs::fcntl_setfl(&write, flags).context(|| "F_SETFL".to_owned())
    }
}

fn set_size(pipe: impl AsFd, pipe_id: u32, size: Option<u32>) -> Result<()> {
    let Some(size) = size.and_then(|s| usize::try_from(s).ok()) else { return Ok(()) };
    if rustix::pipe::fcntl_getpipe_size(&pipe).is_ok_and(|now| now == size) {
        return Ok(());
    }
    rustix::pipe::fcntl_setpipe_size(&pipe, size).map(drop).context(|| {
        format!(
            "F_SETPIPE_SZ of pipe {pipe_id} to {size} bytes \
             (the limit is in /proc/sys/fs/pipe-max-size)"
        )
    })
}

/// A pipe with both ends, to open further ends from.
#[derive(Debug)]
pub struct Anchor {
    /// The reading end.
    pub read: OwnedFd,
    /// The writing end.
    pub write: OwnedFd,
}

impl Anchor {
    /// An end with these flags, a description of its own.
    ///
    /// # Errors
    /// See open(2).
    pub fn end(&self, flags: OFlags) -> Result<OwnedFd> {
        reopen(&self.read, flags)
    }
}
