//! The images of a round that are not pages. Small ones go together: a message and a piece for each would take longer than
//! their bytes.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread;

use super::{Link, Written, result_of};
use crate::cancel::Cancel;
use crate::error::{Context, Error, Result};
use crate::wire::difference::{self, Earlier};
use crate::wire::frame::MAX_FRAME;
use crate::wire::message::{Request, is_archive, is_image};

/// Images below this length are sent as they are, together with others.
pub(in crate::source) const MIN_COMPARED: u64 = 64 << 10;
/// A parcel that has so many bytes is sent; an image adds less than [`MIN_COMPARED`].
const FULL: usize = MAX_FRAME / 4;
/// So is one that has so many images: their names fit into a message, however long they are.
const MOST: usize = 2048;

/// Images that the destination has, by their names, and the rounds that have brought them.
pub(super) type KnownImages = HashMap<String, (u32, Earlier)>;

/// Bytes of images that hold no pages.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::source) struct Sent {
    /// Those of images that may be compared with those of another round.
    pub large: u64,
    /// Those of the others.
    pub small: u64,
}

/// Small images that go together.
#[derive(Debug, Default)]
struct Parcel {
    files: Vec<(String, u64)>,
    data: Vec<u8>,
}

impl Parcel {
    /// Adds an image.
    fn add(&mut self, name: String, file: File, len: u64) -> Result<()> {
        let read = file.take(len).read_to_end(&mut self.data).context(|| name.clone())?;
        if read as u64 != len {
            return Err(Error::refused(format!("image {name} has lost bytes after {read}")));
        }
        self.files.push((name, len));
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.data.len() >= FULL || self.files.len() >= MOST
    }
}

impl Link {
    /// Sends all images of a round that are not pages, as far as they were not sent while they were written. How many bytes
    /// those have.
    ///
    /// # Errors
    /// If the link is down, or they cannot be read; if somebody cancels, or one of the earlier images that they are compared
    /// with cannot be read; if one is not any more what was sent.
    pub(in crate::source) fn send_images(
        &mut self,
        dir: &Path,
        number: u32,
        cancel: Option<&Cancel>,
    ) -> Result<Sent> {
        self.know_earlier(cancel)?;
        let (mut sent, mut parcel, mut written) =
            (Sent::default(), Parcel::default(), self.written.take());
        for (name, path) in images(dir)? {
            if let Some(len) = written.as_mut().map_or(Ok(None), |it| it.finish(&name))? {
                sent.small += len;
                continue;
            }
            let failed = || path.display().to_string();
            let file = File::open(&path).context(failed)?;
            let len = file.metadata().context(failed)?.len();
            *(if len < MIN_COMPARED { &mut sent.small } else { &mut sent.large }) += len;
            if !self.goes_in_parcel(&name, len) {
                self.send_file((file, &path, len), name, cancel)?;
                continue;
            }
            parcel.add(name, file, len)?;
            if parcel.is_full() {
                self.send_parcel(std::mem::take(&mut parcel), cancel)?;
            }
        }
        self.send_parcel(parcel, cancel)?;
        written.map_or(Ok(()), Written::end)?;
        self.say_unless(&Request::End { number }, cancel)?;
        Ok(sent)
    }

    /// Sends those small images that the job has written so far.
    ///
    /// # Errors
    /// If the link is down, or one cannot be read; if somebody cancels.
    pub(in crate::source) fn send_written(&mut self, cancel: Option<&Cancel>) -> Result<()> {
        let Some(mut written) = self.written.take() else { return Ok(()) };
        let mut parcel = Parcel::default();
        written.look();
        while let Some((name, file, metadata)) = written.next() {
            if !self.goes_in_parcel(&name, metadata.len()) {
                continue;
            }
            written.is_sent(name.clone(), &metadata);
            parcel.add(name, file, metadata.len())?;
            if parcel.is_full() {
                self.send_early(std::mem::take(&mut parcel), cancel)?;
                written.look();
            }
        }
        self.written = Some(written);
        self.send_early(parcel, cancel)
    }

    /// Whether an image goes as it is, and together with others.
    fn goes_in_parcel(&self, name: &str, len: u64) -> bool {
        len < MIN_COMPARED && !self.earlier.contains_key(name)
    }

    fn send_parcel(&mut self, parcel: Parcel, cancel: Option<&Cancel>) -> Result<()> {
        match self.announce(parcel, cancel)? {
            Some(data) => self.send_data(&data, cancel),
            None => Ok(()),
        }
    }

    /// Sends a parcel before all images are there. These bytes do not count as the first ones of the pause, which pages are;
    /// and nothing holds back what is sent then.
    fn send_early(&mut self, parcel: Parcel, cancel: Option<&Cancel>) -> Result<()> {
        let Some(data) = self.announce(parcel, cancel)? else { return Ok(()) };
        self.meter.add(data.len() as u64);
        self.send_unless(&data, cancel)
    }

    /// Says which images a parcel has, whose bytes follow; `None` if it has none.
    fn announce(&mut self, parcel: Parcel, cancel: Option<&Cancel>) -> Result<Option<Vec<u8>>> {
        let Parcel { files, data } = parcel;
        if files.is_empty() {
            return Ok(None);
        }
        self.say_unless(&Request::Files { files }, cancel)?;
        self.allowance.add(data.len());
        Ok(Some(data))
    }

    /// From now on what differs from the large images of this round is sent of later ones of the same names. They are read
    /// while the next round is taken.
    pub(in crate::source) fn compare_with(&mut self, dir: PathBuf, number: u32) {
        self.reading = Some(thread::spawn(move || read_large(&dir, number)));
    }

    /// Waits until those are read, or somebody cancels: the tasks are not stopped for that.
    ///
    /// # Errors
    /// If somebody does; if one of those images cannot be read.
    pub(in crate::source) fn know_earlier(&mut self, cancel: Option<&Cancel>) -> Result<()> {
        let Some(reading) = self.reading.take() else { return Ok(()) };
        self.earlier.extend(result_of(reading, cancel)?);
        Ok(())
    }

    /// Sends an image by itself.
    fn send_file(
        &mut self,
        (mut file, path, len): (File, &Path, u64),
        name: String,
        cancel: Option<&Cancel>,
    ) -> Result<()> {
        if let Some((round, earlier)) = self.earlier.remove(&name) {
            let since = Some(round);
            self.say_unless(&Request::File { name: name.clone(), len, since }, cancel)?;
            let image = (&mut file, path, len);
            return self.send_difference((round, earlier), image, &name, cancel);
        }
        self.say_unless(&Request::File { name, len, since: None }, cancel)?;
        let mut left = len;
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(MAX_FRAME).min(MAX_FRAME);
            let mut data = vec![0; piece];
            file.read_exact(&mut data).context(|| path.display().to_string())?;
            self.send_data(&data, cancel)?;
            self.allowance.add(piece);
            left -= piece as u64;
        }
        Ok(())
    }

    /// Sends what differs from an earlier image. Files in memory are large: an earlier archive is not read any more.
    fn send_difference(
        &mut self,
        (round, mut earlier): (u32, Earlier),
        (file, path, len): (&mut File, &Path, u64),
        name: &str,
        cancel: Option<&Cancel>,
    ) -> Result<()> {
        let mut allowance = self.allowance;
        let image = (file, path);
        let goes_on = || match cancel.is_some_and(Cancel::is_due) {
            true => Err(Error::Cancelled),
            false => Ok(()),
        };
        difference::tell(&mut earlier, image, len, &mut allowance, &goes_on, &mut |data| {
            self.send_data(data, cancel)
        })?;
        self.allowance = allowance;
        if is_archive(name) {
            let gone = earlier.remove()?;
            // There it goes only then.
            self.allowance.give_back(if round > self.built { gone } else { 0 });
        }
        Ok(())
    }
}

/// Reads the large images of a round.
fn read_large(dir: &Path, number: u32) -> Result<KnownImages> {
    let mut known = KnownImages::new();
    for (name, path) in images(dir)? {
        let len = fs::metadata(&path).context(|| path.display().to_string())?.len();
        if len >= MIN_COMPARED {
            known.insert(name, (number, Earlier::read(&path)?));
        }
    }
    Ok(known)
}

/// The images of a round that are not pages, by their names.
fn images(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let listed = || dir.display().to_string();
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).context(listed)? {
        let entry = entry.context(listed)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if is_image(&name) && entry.file_type().context(listed)?.is_file() {
            all.push((name, entry.path()));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::os::unix::net::UnixStream;
    use std::thread::JoinHandle;

    use super::super::tests::over;
    use super::*;
    use crate::wire::frame::Line;

    /// What the other end hears of a round: the names that come with each message, and all images with their bytes.
    type Heard = (Vec<Vec<String>>, HashMap<String, Vec<u8>>);

    fn hear(far: UnixStream) -> Heard {
        let mut line = Line::open(far.into()).unwrap();
        let (mut messages, mut images) = (Vec::new(), HashMap::new());
        loop {
            let (files, data) = match line.hear().unwrap() {
                Request::Files { files } => (files, line.receive_data().unwrap()),
                Request::File { name, len, since: None } => {
                    let mut data = Vec::new();
                    while (data.len() as u64) < len {
                        data.extend(line.receive_data().unwrap());
                    }
                    (vec![(name, len)], data)
                }
                Request::End { number: 3 } => return (messages, images),
                request => panic!("{request:?}"),
            };
            let mut left = &data[..];
            for (name, len) in &files {
                let own = left.split_off(..usize::try_from(*len).unwrap()).unwrap();
                assert!(images.insert(name.clone(), own.to_vec()).is_none(), "{name} comes twice");
            }
            assert!(left.is_empty());
            messages.push(files.into_iter().map(|(name, _)| name).collect());
        }
    }

    fn link() -> (Link, JoinHandle<Heard>) {
        let (near, far) = UnixStream::pair().unwrap();
        let hearing = thread::spawn(move || hear(far));
        (over(near, None), hearing)
    }

    /// Writes an image, whose bytes tell it apart.
    fn write(dir: &Path, name: &str, len: usize) -> (String, Vec<u8>) {
        let data: Vec<u8> = name.bytes().cycle().take(len).collect();
        fs::write(dir.join(name), &data).unwrap();
        (name.to_owned(), data)
    }

    #[test]
    fn small_images_go_together() {
        let dir = tempfile::tempdir().unwrap();
        let mut all: HashMap<_, _> =
            (0..3000).map(|n| write(dir.path(), &format!("core-{n}.img"), n % 200)).collect();
        all.extend([write(dir.path(), "files.img", 200 << 10)]);
        all.extend([write(dir.path(), "mm-1.img", (64 << 10) - 1)]);
        all.extend([write(dir.path(), "descriptors.json", 20)]);
        fs::write(dir.path().join("dump.log"), "no image").unwrap();
        let (mut link, hearing) = link();
        let sent = link.send_images(dir.path(), 3, None).unwrap();
        let bytes = |len: &dyn Fn(u64) -> bool| {
            all.values().map(|data| data.len() as u64).filter(|&it| len(it)).sum::<u64>()
        };
        assert_eq!(sent.large, bytes(&|len| len >= MIN_COMPARED));
        assert_eq!(sent.small, bytes(&|len| len < MIN_COMPARED));
        let (messages, images) = hearing.join().unwrap();
        assert!(images == all, "{} images of {}", images.len(), all.len());
        assert!(messages.len() <= 5, "{} messages", messages.len());
    }

    /// What was sent while others were written does not come once more, and large ones wait for the end.
    #[test]
    fn what_is_complete_goes_before_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let (mut link, hearing) = link();
        link.send_as_written(dir.path());
        let mut all: HashMap<_, _> =
            (0..20).map(|n| write(dir.path(), &format!("core-{n}.img"), 100)).collect();
        all.extend([write(dir.path(), "files.img", 100 << 10)]);
        link.send_written(None).unwrap();
        assert_eq!((link.meter.sent(), link.meter.first()), (2000, None), "these are no pages");
        all.extend((20..30).map(|n| write(dir.path(), &format!("core-{n}.img"), 100)));
        let sent = link.send_images(dir.path(), 3, None).unwrap();
        assert_eq!((sent.small, sent.large), (3000, 100 << 10));
        let (mut messages, images) = hearing.join().unwrap();
        assert!(images == all, "{} images of {}", images.len(), all.len());
        messages[0].sort();
        let mut first: Vec<String> = (0..20).map(|n| format!("core-{n}.img")).collect();
        first.sort();
        assert_eq!(messages[0], first);
    }

    /// An image that is written once more makes the other end one of what there never was at one time.
    #[test]
    fn what_changes_after_it_was_sent_ends_the_round() {
        let dir = tempfile::tempdir().unwrap();
        let (mut link, hearing) = link();
        link.send_as_written(dir.path());
        write(dir.path(), "core-1.img", 100);
        link.send_written(None).unwrap();
        write(dir.path(), "core-1.img", 101);
        let error = link.send_images(dir.path(), 3, None).unwrap_err();
        assert!(error.to_string().contains("core-1.img has changed"), "{error}");
        drop(link);
        hearing.join().unwrap_err();
    }
}
