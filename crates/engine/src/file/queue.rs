//! What is queued in pipes and fifos.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};
use torpor_images::proto::PipeDataEntry;
use torpor_images::{ImageDir, Kind, Writer};
use torpor_policy::PipeContent;

use super::description::{is_readable, reopen};
use crate::error::{Context, Error, Result};

/// Writes the queues of pipes or fifos, each once.
#[derive(Debug)]
pub(crate) struct Queues {
    kind: Kind,
    known: HashSet<u32>,
    writer: Option<Writer>,
}

impl Queues {
    /// Nothing yet; `kind` is the image file.
    pub(crate) fn new(kind: Kind) -> Self {
        Queues { kind, known: HashSet::new(), writer: None }
    }

    /// Saves the queue of the pipe behind `file`, unless that has been done.
    ///
    /// # Errors
    /// If the queue cannot be read without taking from it; if the image cannot be written.
    pub(crate) fn save(&mut self, images: &ImageDir, file: impl AsFd, pipe_id: u32) -> Result<()> {
        if !self.known.insert(pipe_id) {
            return Ok(());
        }
        let size = rustix::pipe::fcntl_getpipe_size(&file)
            .context(|| format!("F_GETPIPE_SZ of pipe {pipe_id}"))?;
        let flags = rustix::fs::fcntl_getfl(&file).context(|| "F_GETFL".to_owned())?;
        let (data, torpor_packets) = if is_readable(flags.bits()) {
            peek(file.as_fd(), size)?
        } else {
            // Without data there is no need to open it once more.
            match queued(file.as_fd())? {
                0 => Default::default(),
                _ => peek(reopen(&file, OFlags::RDONLY | OFlags::NONBLOCK)?.as_fd(), size)?,
            }
        };
        let bytes = u32::try_from(data.len())
            .map_err(|_| Error::invalid("pipes-data.img", "more than 4 GiB in a pipe"))?;
        let size = u32::try_from(size).ok();
        if self.writer.is_none() {
            self.writer = Some(images.writer(self.kind, 0)?);
        }
        if let Some(writer) = &mut self.writer {
            writer.entry(&PipeDataEntry { pipe_id, bytes, size, torpor_packets })?;
            writer.raw(&data)?;
        }
        Ok(())
    }

    /// Completes the image file; there is none if there was no pipe.
    ///
    /// # Errors
    /// If the image cannot be written, or an old one removed.
    pub(crate) fn finish(&mut self, images: &ImageDir) -> Result<()> {
        match self.writer.take() {
            Some(writer) => Ok(writer.finish()?),
            None => Ok(images.remove_kind(self.kind, 0)?),
        }
    }
}

/// The number of bytes in a pipe.
fn queued(pipe: BorrowedFd<'_>) -> Result<usize> {
    let queued = rustix::io::ioctl_fionread(pipe).context(|| "FIONREAD of a pipe".to_owned())?;
    Ok(usize::try_from(queued).unwrap_or(0))
}

/// Copies what is queued in a pipe of `size` bytes, and leaves it there (tee(2)).
/// Where it does not come in one piece, the lengths of the pieces follow.
fn peek(pipe: BorrowedFd<'_>, size: usize) -> Result<(Vec<u8>, Vec<u32>)> {
    let queued = queued(pipe)?;
    if queued == 0 {
        return Ok(Default::default());
    }
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
        .context(|| "pipe".to_owned())?;
    // tee copies slots, not bytes: ours must have as many.
    rustix::pipe::fcntl_setpipe_size(&write, size)
        .context(|| format!("F_SETPIPE_SZ to {size} bytes"))?;
    let copied = rustix::pipe::tee(pipe, &write, queued, SpliceFlags::NONBLOCK)
        .context(|| "tee".to_owned())?;
    let mut data = vec![0; copied];
    let mut pieces = Vec::new();
    let mut filled = 0;
    while filled < copied {
        let n = rustix::io::read(&read, &mut data[filled..])
            .context(|| "read the copy of a pipe".to_owned())?;
        pieces.push(u32::try_from(n).unwrap_or(u32::MAX));
        filled += n;
    }
    if copied != queued {
        let what = format!("tee copied {copied} of {queued} bytes");
        return Err(Error::Os { what, source: Errno::IO.into() });
    }
    Ok((data, if pieces.len() > 1 { pieces } else { Vec::new() }))
}

/// The queues that an image file holds.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    by_pipe: HashMap<u32, PipeContent>,
}

impl Saved {
    /// Reads `kind`; no file is no data.
    ///
    /// # Errors
    /// If images are damaged, or contradict each other.
    pub(crate) fn load(images: &ImageDir, kind: Kind) -> Result<Self> {
        let mut saved = Saved::default();
        PipeContent::each(images, kind, |pipe| {
            saved.by_pipe.insert(pipe.id, pipe);
        })?;
        Ok(saved)
    }

    /// Whether there is nothing for a pipe.
    pub(crate) fn is_empty(&self, pipe_id: u32) -> bool {
        self.by_pipe.get(&pipe_id).is_none_or(|content| content.data.is_empty())
    }

    /// Gives a pipe the size and content of `pipe_id`, through its writing end.
    ///
    /// # Errors
    /// If the size is over the user's limit, or the pipe cannot be written to; `Invalid` if the
    /// content does not fit the size.
    pub(crate) fn fill(&mut self, pipe_id: u32, write: impl AsFd) -> Result<()> {
        let Some(content) = self.by_pipe.remove(&pipe_id) else { return Ok(()) };
        set_size(&write, pipe_id, content.size)?;
        let flags = rustix::fs::fcntl_getfl(&write).context(|| "F_GETFL".to_owned())?;
        let set = |flags| rustix::fs::fcntl_setfl(&write, flags).context(|| "F_SETFL".to_owned());
        let mut rest = content.data.as_slice();
        set(flags | OFlags::NONBLOCK)?;
        for &packet in &content.packets {
            let len = usize::try_from(packet).unwrap_or(0).min(rest.len());
            // What is longer than a page was no packet.
            let direct = if len <= PACKET { OFlags::DIRECT } else { OFlags::empty() };
            set(flags | OFlags::NONBLOCK | direct)?;
            write_all(&write, &rest[..len], pipe_id)?;
            rest = &rest[len..];
        }
        write_all(&write, rest, pipe_id)?;
        set(flags)
    }
}

/// The longest packet of a pipe: a page.
const PACKET: usize = 4096;

fn write_all(pipe: impl AsFd, mut data: &[u8], pipe_id: u32) -> Result<()> {
    while !data.is_empty() {
        match rustix::io::write(&pipe, data) {
            Ok(n) => data = &data[n..],
            Err(Errno::AGAIN) => {
                let reason = format!("the data of pipe {pipe_id} does not fit into it");
                return Err(Error::invalid("pipes-data.img", reason));
            }
            Err(e) => return Err(e).context(|| format!("write to pipe {pipe_id}")),
        }
    }
    Ok(())
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
pub(crate) struct Anchor {
    /// The reading end.
    pub read: OwnedFd,
    /// The writing end.
    pub write: OwnedFd,
}

impl Anchor {
    /// An end with these flags, a description of its own.
    ///
    /// # Errors
    /// `EMFILE` if this process has as many descriptors as it may, `EINVAL` for flags that a pipe does not take.
    pub(crate) fn end(&self, flags: OFlags) -> Result<OwnedFd> {
        reopen(&self.read, flags)
    }
}
