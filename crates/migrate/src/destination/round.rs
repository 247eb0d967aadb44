//! One round that comes in: pages through a page server, all other images as they are.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use torpor_worker::{Event, Idle, Worker};

use crate::engine::{self, PAGES, judge, over_pages, repeat};
use crate::error::{Context, Error, Result};
use crate::record::make_private;
use crate::wire::difference;
use crate::wire::frame::Line;
use crate::wire::message::{Kind, is_image};

/// Images of one round.
const MAX_FILES: usize = 1 << 20;
/// Bytes of one image that holds no pages.
const MAX_LEN: u64 = 1 << 40;

/// The pages of a round.
#[derive(Debug)]
enum Pages {
    /// The page server writes them.
    Coming(Worker),
    /// It has written all of them.
    There,
    /// They are fetched over this when the tasks run, by a process that waits for that.
    Later(OwnedFd, Idle),
}

/// A round that is coming in.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Its number.
    pub number: u32,
    /// What it is of.
    pub kind: Kind,
    dir: PathBuf,
    pages: Pages,
    files: usize,
}

impl Incoming {
    /// Starts to receive pages over `pages`.
    ///
    /// # Errors
    /// If the directory of the round cannot be made, or the page server not be started.
    pub(super) fn start(parent: &Path, number: u32, kind: Kind, pages: OwnedFd) -> Result<Self> {
        let dir = parent.join(number.to_string());
        make_private(&dir)?;
        let before = format!("../{}", number - 1);
        if kind == Kind::Lazy {
            if number > 1 {
                symlink(before, dir.join("parent")).context(|| dir.display().to_string())?;
            }
            return Ok(Self {
                number,
                kind,
                dir,
                pages: Pages::Later(pages, engine::idle()?),
                files: 0,
            });
        }
        let mut args =
            ["page-server", "--images-dir", &number.to_string()].map(str::to_owned).to_vec();
        args.extend(over_pages());
        if number > 1 {
            args.extend(["--prev-images-dir".to_owned(), before]);
        }
        let server = engine::start(args, parent, &[], &[(PAGES, pages.as_fd())])?;
        Ok(Self { number, kind, dir, pages: Pages::Coming(server), files: 0 })
    }

    /// One whose pages do not come.
    ///
    /// # Errors
    /// If its directory cannot be made.
    pub(super) fn without_pages(dir: PathBuf) -> Result<Self> {
        make_private(&dir)?;
        Ok(Self { number: 1, kind: Kind::Lazy, dir, pages: Pages::There, files: 0 })
    }

    /// Readable when the page server says something; it says nothing after its end, which
    /// comes before that of the round.
    pub(super) fn voice(&self) -> Option<BorrowedFd<'_>> {
        match &self.pages {
            Pages::Coming(server) => Some(server.as_fd()),
            Pages::There | Pages::Later(..) => None,
        }
    }

    /// What the page server says.
    ///
    /// # Errors
    /// If the page server has failed, or says nothing that can be understood.
    pub(super) fn listen(&mut self) -> Result<()> {
        let Pages::Coming(server) = &mut self.pages else { return Ok(()) };
        match server.next_event()? {
            Event::Ended(outcome) => {
                judge("page server", outcome)?;
                self.pages = Pages::There;
            }
            event => repeat(&event),
        }
        Ok(())
    }

    /// An image: all of it, or what makes it of that which the round `since` has brought.
    ///
    /// # Errors
    /// If it is none that a round may hold, or not as long as was said; if there is no such round before, or it has no such
    /// image; if the connection ends; if the file cannot be written.
    pub(super) fn receive(
        &mut self,
        line: &mut Line,
        name: &str,
        len: u64,
        since: Option<u32>,
    ) -> Result<()> {
        self.files += 1;
        if !is_image(name) || len > MAX_LEN || self.files > MAX_FILES {
            return Err(Error::Protocol(format!("image {name:?} of {len} bytes")));
        }
        let path = self.dir.join(name);
        let failed = || path.display().to_string();
        let mut file: File = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .context(failed)?;
        if let Some(round) = since {
            if !(1..self.number).contains(&round) {
                return Err(Error::Protocol(format!("image {name:?} of round {round}")));
            }
            let earlier = self.dir.with_file_name(round.to_string()).join(name);
            return difference::make(&earlier, (&file, &path), len, &mut || line.receive_data());
        }
        let mut left = len;
        while left > 0 {
            let data = line.receive_data()?;
            let piece = data.len() as u64;
            if piece == 0 || piece > left {
                return Err(Error::Protocol(format!("image {name:?} is longer than {len} bytes")));
            }
            file.write_all(&data).context(failed)?;
            left -= piece;
        }
        Ok(())
    }

    /// The round has all its images: where they are, and the connection that pages are to be
    /// fetched over, with the worker that is to do that.
    ///
    /// # Errors
    /// If the page server has failed.
    pub(super) fn finish(self) -> Result<(PathBuf, Option<(OwnedFd, Idle)>)> {
        match self.pages {
            Pages::Coming(server) => {
                engine::finish("page server", server)?;
                Ok((self.dir, None))
            }
            Pages::There => Ok((self.dir, None)),
            Pages::Later(connection, idle) => Ok((self.dir, Some((connection, idle)))),
        }
    }
}
