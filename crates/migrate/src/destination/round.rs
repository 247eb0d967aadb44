//! One round that comes in: pages through a page server, all other images as they are.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use torpor_worker::{Event, Worker};

use super::pager::PagerToBe;
use crate::engine::{self, PAGES, judge, over_pages, repeat};
use crate::error::{Context, Error, Result};
use crate::record::make_private;
use crate::wire::difference::{self, Allowance};
use crate::wire::frame::Line;
use crate::wire::message::{RoundKind, is_archive, is_image};
use crate::work::WorkDir;

/// Images of one round.
const MAX_FILES: usize = 1 << 20;
/// Bytes of one image that holds no pages.
const MAX_LEN: u64 = 1 << 40;

/// The pages of a round.
#[derive(Debug)]
enum RoundPages {
    /// The page server writes them.
    Coming(Worker),
    /// It has written all of them.
    There,
    /// They are fetched over this when the tasks run, by a process that waits for that.
    Later(OwnedFd, PagerToBe),
}

/// A round that is coming in.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Its number.
    pub number: u32,
    /// What it is of.
    pub kind: RoundKind,
    dir: PathBuf,
    pages: RoundPages,
    files: usize,
    /// The last round whose files in memory are read once more, if a tree is built early.
    built: u32,
    allowance: Allowance,
}

impl Incoming {
    /// Starts to receive pages over `pages`. The tree is built once the round `built` is there, if that is not 0.
    ///
    /// # Errors
    /// If the directory of the round cannot be made, or the page server or the pager not be started.
    pub(super) fn start(
        work: &WorkDir,
        (number, kind): (u32, RoundKind),
        pages: OwnedFd,
        built: u32,
        allowance: Allowance,
    ) -> Result<Self> {
        let parent = work.path();
        let dir = parent.join(number.to_string());
        make_private(&dir)?;
        let before = format!("../{}", number - 1);
        if kind == RoundKind::Lazy {
            if number > 1 {
                symlink(before, dir.join("parent")).context(|| dir.display().to_string())?;
            }
            let pages = RoundPages::Later(pages, PagerToBe::new(parent)?);
            return Ok(Self { number, kind, dir, pages, files: 0, built, allowance });
        }
        let mut args =
            ["page-server", "--images-dir", &number.to_string()].map(str::to_owned).to_vec();
        args.extend(over_pages());
        if number > 1 {
            args.extend(["--prev-images-dir".to_owned(), before]);
        }
        // Nobody reads pages any more that a later round has, unless a tree is still to be built of the round.
        let frees = kind == RoundKind::Running && number > built.max(1);
        if frees && work.takes_holes() {
            args.push("--auto-dedup".to_owned());
        }
        let server = engine::start(args, parent, &[], &[(PAGES, pages.as_fd())])?;
        let pages = RoundPages::Coming(server);
        Ok(Self { number, kind, dir, pages, files: 0, built, allowance })
    }

    /// One whose pages do not come.
    ///
    /// # Errors
    /// If its directory cannot be made.
    pub(super) fn without_pages(dir: PathBuf) -> Result<Self> {
        make_private(&dir)?;
        let (kind, pages, allowance) = (RoundKind::Lazy, RoundPages::There, Allowance::default());
        Ok(Self { number: 1, kind, dir, pages, files: 0, built: 0, allowance })
    }

    /// Readable when the page server says something; it says nothing after its end, which
    /// comes before that of the round.
    pub(super) fn voice(&self) -> Option<BorrowedFd<'_>> {
        match &self.pages {
            RoundPages::Coming(server) => Some(server.as_fd()),
            RoundPages::There | RoundPages::Later(..) => None,
        }
    }

    /// What the page server says.
    ///
    /// # Errors
    /// If the page server has failed, or says nothing that can be understood.
    pub(super) fn listen(&mut self) -> Result<()> {
        let RoundPages::Coming(server) = &mut self.pages else { return Ok(()) };
        match server.next_event()? {
            Event::Ended(outcome) => {
                judge("page server", outcome)?;
                self.pages = RoundPages::There;
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
        let (mut file, path) = self.create(name, len)?;
        let failed = || path.display().to_string();
        if let Some(round) = since {
            return self.make(line, name, (&file, &path, len), round);
        }
        let mut left = len;
        while left > 0 {
            let data = line.receive_data()?;
            let piece = data.len() as u64;
            if piece == 0 || piece > left {
                return Err(Error::Protocol(format!("image {name:?} is longer than {len} bytes")));
            }
            file.write_all(&data).context(failed)?;
            self.allowance.add(data.len());
            left -= piece;
        }
        Ok(())
    }

    /// Several images, whose bytes come in one piece.
    ///
    /// # Errors
    /// If one is none that a round may hold; if the piece is not as long as all of them; if the connection ends; if a file
    /// cannot be written.
    pub(super) fn receive_together(
        &mut self,
        line: &mut Line,
        files: &[(String, u64)],
    ) -> Result<()> {
        let data = line.receive_data()?;
        let other = || Error::Protocol(format!("{} images in {} bytes", files.len(), data.len()));
        let mut left = &data[..];
        for (name, len) in files {
            let own = usize::try_from(*len).ok().and_then(|len| left.split_off(..len));
            let own = own.ok_or_else(other)?;
            let (mut file, path) = self.create(name, *len)?;
            file.write_all(own).context(|| path.display().to_string())?;
        }
        self.allowance.add(data.len());
        if left.is_empty() { Ok(()) } else { Err(other()) }
    }

    /// A file for an image that is to come, and its path.
    fn create(&mut self, name: &str, len: u64) -> Result<(File, PathBuf)> {
        self.files += 1;
        if !is_image(name) || len > MAX_LEN || self.files > MAX_FILES {
            return Err(Error::Protocol(format!("image {name:?} of {len} bytes")));
        }
        let path = self.dir.join(name);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        Ok((file.context(|| path.display().to_string())?, path))
    }

    /// Makes an image of that which the round `since` has brought. Files in memory are large: an earlier archive goes when
    /// nobody reads it any more.
    fn make(
        &mut self,
        line: &mut Line,
        name: &str,
        (file, path, len): (&File, &Path, u64),
        since: u32,
    ) -> Result<()> {
        if !(1..self.number).contains(&since) {
            return Err(Error::Protocol(format!("image {name:?} of round {since}")));
        }
        let earlier = self.dir.with_file_name(since.to_string()).join(name);
        let next = &mut || line.receive_data();
        difference::make(&earlier, (file, path), len, &mut self.allowance, next)?;
        if since > self.built && is_archive(name) {
            self.allowance.give_back(difference::remove(&earlier)?);
        }
        Ok(())
    }

    /// What later rounds may repeat of earlier images.
    pub(super) fn allowance(&self) -> Allowance {
        self.allowance
    }

    /// The round has all its images: where they are, and the connection that pages are to be
    /// fetched over, with whoever is to do that.
    ///
    /// # Errors
    /// If the page server has failed.
    pub(super) fn finish(self) -> Result<(PathBuf, Option<(OwnedFd, PagerToBe)>)> {
        match self.pages {
            RoundPages::Coming(server) => {
                engine::finish("page server", server)?;
                Ok((self.dir, None))
            }
            RoundPages::There => Ok((self.dir, None)),
            RoundPages::Later(connection, pager) => Ok((self.dir, Some((connection, pager)))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixStream;

    use super::*;

    /// An archive that the second round of a migration has made of the first one's, and whether that is there still, if a
    /// tree is built of the round `built`.
    fn second(built: u32) -> (Vec<u8>, bool) {
        const NAME: &str = "tmpfs-dev-62.tar.gz.img";
        let work = tempfile::tempdir().unwrap();
        let [one, two] = ["1", "2"].map(|name| work.path().join(name));
        [&one, &two].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        std::fs::write(one.join(NAME), b"abcdefgh").unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let source = std::thread::spawn(move || {
            let step = [[0_u64, 8, 2].map(u64::to_le_bytes).concat(), b"ij".to_vec()].concat();
            Line::open(far.into()).and_then(|mut line| line.send_data(&step))
        });
        let mut line = Line::open(near.into()).unwrap();
        let mut allowance = Allowance::default();
        allowance.add(8);
        let round = Incoming::without_pages(work.path().join("none")).unwrap();
        let mut round = Incoming { number: 2, dir: two.clone(), built, allowance, ..round };
        round.receive(&mut line, NAME, 10, Some(1)).unwrap();
        source.join().unwrap().unwrap();
        (std::fs::read(two.join(NAME)).unwrap(), one.join(NAME).exists())
    }

    /// What becomes of a piece with these bytes that is said to have these images, and which there are then.
    fn together(files: &[(&str, u64)], data: &[u8]) -> (Result<()>, Vec<(String, Vec<u8>)>) {
        let work = tempfile::tempdir().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let data = data.to_vec();
        let source = std::thread::spawn(move || {
            Line::open(far.into()).and_then(|mut line| line.send_data(&data))
        });
        let mut line = Line::open(near.into()).unwrap();
        let mut round = Incoming::without_pages(work.path().join("1")).unwrap();
        let files: Vec<_> = files.iter().map(|&(name, len)| (name.to_owned(), len)).collect();
        let received = round.receive_together(&mut line, &files);
        source.join().unwrap().unwrap();
        let there = std::fs::read_dir(work.path().join("1")).unwrap();
        let read = |path: PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        };
        let mut there: Vec<_> = there.map(|entry| read(entry.unwrap().path())).collect();
        there.sort();
        (received, there)
    }

    #[test]
    fn images_that_come_together_are_told_apart() {
        let files = [("core-1.img", 3), ("fs-1.img", 0), ("mm-1.img", 2)];
        let (received, there) = together(&files, b"abcde");
        received.unwrap();
        let expected: [(&str, &[u8]); 3] =
            [("core-1.img", b"abc"), ("fs-1.img", b""), ("mm-1.img", b"de")];
        assert_eq!(there, expected.map(|(name, data)| (name.to_owned(), data.to_vec())));
    }

    /// Whatever lengths and names are said, nothing is written but what has come, and nowhere else.
    #[test]
    fn images_that_come_together_are_what_was_said() {
        let one: &[(&str, u64)] = &[("core-1.img", 3)];
        for (files, data) in [
            (one, &b"ab"[..]),
            (one, b"abcd"),
            (&[], b"a"),
            (&[("core-1.img", u64::MAX)], b"abc"),
            (&[("core-1.img", 3), ("core-2.img", u64::MAX - 2)], b"abc"),
            (&[("../core-1.img", 3)], b"abc"),
            (&[("core-1.img", 1), ("core-1.img", 2)], b"abc"),
        ] {
            let (received, there) = together(files, data);
            let error = received.unwrap_err();
            assert!(there.iter().all(|(_, kept)| kept.len() <= data.len()), "{there:?}");
            let is_twice = files.len() == 2 && files[0].0 == files[1].0;
            assert_eq!(matches!(error, Error::Protocol(_)), !is_twice, "{files:?}: {error}");
        }
    }

    #[test]
    fn no_round_has_more_images_however_they_come() {
        let work = tempfile::tempdir().unwrap();
        let mut round = Incoming::without_pages(work.path().join("1")).unwrap();
        round.files = MAX_FILES - 1;
        round.create("core-1.img", 0).unwrap();
        assert!(matches!(round.create("core-2.img", 0), Err(Error::Protocol(_))));
    }

    #[test]
    fn an_earlier_archive_stays_if_a_tree_is_built_of_it() {
        assert_eq!(second(0), (b"abcdefghij".to_vec(), false));
        assert_eq!(second(1), (b"abcdefghij".to_vec(), true));
    }
}
