//! Memory that comes while its pod runs. All else of a checkpoint is here, and its files of pages have holes: the engine
//! asks for each part of them before it reads it ([`torpor_images::feed`]), and what it does not ask for comes in
//! between. All of it is sealed. Whether it is what was saved the engine finds out, page by page; it ends the tasks if it is
//! not, or if it cannot be had.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use torpor_images::feed::{RETURNS, SOCKET};
use torpor_images::kind;

use crate::error::{Context, Error, Result};
use crate::message::{BEGUN, LOGS, ROUNDS, ROUNDS_DIR, round_images};
use crate::pod::is_name;

/// The list, in what comes first, of the files of pages that come late.
pub(super) const LIST: &str = "late.json";
/// The same, with the pod that they come for, among the logs of a checkpoint, until all is here.
const NOTE: &str = "late.json";
/// The file among the logs that shows that what was to come does not.
const LOST: &str = "late.lost";
/// The directory in a checkpoint with the images of its containers.
const CONTAINERS: &str = "containers";
/// No list is longer.
const MAX_LIST: u64 = 4 << 20;
/// All files of pages together are not longer.
const MAX_LEN: u64 = 1 << 42;
/// No checkpoint has more containers.
const MAX_CONTAINERS: usize = 256;
/// What is brought at once, at least.
const PIECE: u64 = 256 << 10;
/// How many pieces are brought at once, at most.
const MOST: u64 = 8;

/// Images whose memory comes late: those of a container, or of a round before them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct LateImages {
    /// The container.
    pub container: String,
    /// The number of the round, if they are one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u32>,
}

impl LateImages {
    /// Where they are in the checkpoint in `dir`. Another node may have written what they are.
    fn place(&self, dir: &Path) -> Result<PathBuf> {
        let Self { container, round } = self;
        if !is_name(container) {
            return Err(Error::new(format!("{container:?} is no container")));
        }
        match round {
            None => Ok(dir.join(CONTAINERS).join(container)),
            Some(round) if (1..=ROUNDS).contains(round) => Ok(round_images(dir, container, *round)),
            Some(round) => Err(Error::new(format!("{container} has no round {round}"))),
        }
    }
}

/// A file of pages that comes late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LateFile {
    /// The images that it is one of.
    #[serde(flatten)]
    pub images: LateImages,
    /// Its number.
    pub id: u32,
    /// Its length.
    pub len: u64,
}

/// What comes late of a checkpoint, and for which pod: for none, if any number of pods may begin with it.
#[derive(Debug, Serialize, Deserialize)]
struct LateNote {
    pod: String,
    files: Vec<LateFile>,
}

impl LateFile {
    /// The file of pages that has this path in a checkpoint, if it is one.
    pub(super) fn at(path: &Path, len: u64) -> Option<Self> {
        let parts: Option<Vec<&str>> = path.iter().map(|part| part.to_str()).collect();
        let (container, round, name) = match parts?[..] {
            [CONTAINERS, container, name] => (container, None, name),
            [ROUNDS_DIR, container, round, name] => (container, Some(round.parse().ok()?), name),
            _ => return None,
        };
        let id = u32::try_from(kind::PAGES.id_of(name)?).ok()?;
        let images = LateImages { container: container.to_owned(), round };
        // What is written otherwise is at another place.
        let file = Self { images, id, len };
        file.path(Path::new("")).is_ok_and(|found| found == path).then_some(file)
    }

    /// Where it is in a checkpoint.
    fn path(&self, dir: &Path) -> Result<PathBuf> {
        Ok(self.images.place(dir)?.join(kind::PAGES.file_name(self.id.into())))
    }

    /// Makes it, with nothing in it but a hole.
    fn make(&self, dir: &Path) -> Result<()> {
        let path = self.path(dir)?;
        let made = File::create_new(&path).and_then(|file| file.set_len(self.len));
        made.context(|| path.display().to_string())
    }

    /// How many bytes of it are a hole still, in the checkpoint in `dir`; none if there is no such file.
    fn missing(&self, dir: &Path) -> u64 {
        let meta = self.path(dir).ok().and_then(|path| fs::metadata(path).ok());
        // The blocks of files are counted in these units everywhere.
        meta.map_or(0, |meta| self.len.saturating_sub(meta.blocks().saturating_mul(512)))
    }

    /// A part of it, as it is in the checkpoint in `dir`.
    ///
    /// # Errors
    /// If it is not there, or ends before the part does, or the part is longer than what is brought at once.
    pub(super) fn read(&self, dir: &Path, part: &Range<u64>) -> Result<Vec<u8>> {
        let (path, len) = (self.path(dir)?, part.end.saturating_sub(part.start));
        let what = || path.display().to_string();
        if len > PIECE * MOST {
            return Err(Error::new(format!("{}: {len} bytes are too many at once", what())));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        let file = File::open(&path).context(what)?;
        file.read_exact_at(&mut data, part.start).context(what)?;
        Ok(data)
    }
}

/// Makes what comes late of the checkpoint in `dir`, as the list says that has come with the rest, for `pod`; for none, if any number
/// of pods may begin with it.
///
/// # Errors
/// A list that makes no sense; no place.
pub(super) fn prepare(dir: &Path, pod: &str) -> Result<()> {
    let list = dir.join(LIST);
    let Some(files) = read_json::<Vec<LateFile>>(&list)? else { return Ok(()) };
    let len = files.iter().fold(0, |len: u64, file| len.saturating_add(file.len));
    if len > MAX_LEN {
        return Err(Error::new(format!("{}: {len} bytes are too many", list.display())));
    }
    all_images(&files)?;
    files.iter().try_for_each(|file| file.make(dir))?;
    let logs = dir.join(LOGS);
    let note = LateNote { pod: pod.to_owned(), files };
    let bytes = serde_json::to_vec(&note).context(|| NOTE)?;
    fs::create_dir_all(&logs)
        .and_then(|()| fs::write(logs.join(NOTE), bytes))
        .and_then(|()| fs::remove_file(&list))
        .context(|| list.display().to_string())
}

/// The images whose memory comes late.
fn all_images(files: &[LateFile]) -> Result<BTreeSet<LateImages>> {
    let images: BTreeSet<LateImages> = files.iter().map(|file| file.images.clone()).collect();
    let containers: BTreeSet<&String> = images.iter().map(|one| &one.container).collect();
    match containers.len() {
        0..=MAX_CONTAINERS => Ok(images),
        count => Err(Error::new(format!("{count} containers are too many"))),
    }
}

/// What a file says that is not there for each checkpoint.
fn read_json<T: for<'d> Deserialize<'d>>(path: &Path) -> Result<Option<T>> {
    let what = || path.display().to_string();
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.context(what)?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_LIST + 1).read_to_end(&mut bytes).context(what)?;
    if bytes.len() as u64 > MAX_LIST {
        return Err(Error::new(format!("{}: it is too long", what())));
    }
    serde_json::from_slice(&bytes).context(what).map(Some)
}

/// Whether memory of the checkpoint in `dir` is still to come.
pub(super) fn comes_late(dir: &Path) -> bool {
    dir.join(LOGS).join(NOTE).exists()
}

/// How many bytes of it are still to come: the disk has not lost them yet.
pub(super) fn to_come(dir: &Path) -> u64 {
    let note: Option<LateNote> = read_json(&dir.join(LOGS).join(NOTE)).ok().flatten();
    let files = note.into_iter().flat_map(|note| note.files);
    files.map(|file| file.missing(dir)).fold(0, u64::saturating_add)
}

/// Whether it is, and is brought.
pub(super) fn is_awaited(dir: &Path) -> bool {
    comes_late(dir) && !is_lost(dir)
}

/// Whether what was to come of the checkpoint in `dir` does not.
pub(super) fn is_lost(dir: &Path) -> bool {
    dir.join(LOGS).join(LOST).exists()
}

/// Whether a container has begun with the checkpoint in `dir`: of any pod, or of that whose uid it is.
pub(super) fn has_begun(dir: &Path, uid: Option<&str>) -> bool {
    let start = uid.map_or_else(String::new, |uid| format!("{uid}."));
    let mut all = fs::read_dir(dir.join(LOGS).join(BEGUN)).into_iter().flatten().flatten();
    all.any(|entry| entry.file_name().as_bytes().starts_with(start.as_bytes()))
}

/// Who brings a part of a file.
pub(super) type Bring<'b> = dyn Fn(&LateFile, &Range<u64>) -> Result<Vec<u8>> + 'b;

/// How far a piece of a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Missing,
    Coming,
    Here,
}

/// A file of pages on its way.
#[derive(Debug)]
pub(super) struct LatePages {
    what: LateFile,
    file: File,
    pieces: Mutex<Vec<Piece>>,
    changed: Condvar,
}

impl LatePages {
    fn open(dir: &Path, what: LateFile) -> Result<Self> {
        let path = what.path(dir)?;
        let file = File::options().write(true).open(&path);
        let file = file.context(|| path.display().to_string())?;
        let count = usize::try_from(what.len.div_ceil(PIECE)).unwrap_or(0);
        // What an agent before this one has brought comes once more, and is the same.
        let pieces = Mutex::new(vec![Piece::Missing; count]);
        Ok(Self { what, file, pieces, changed: Condvar::new() })
    }

    fn pieces(&self) -> MutexGuard<'_, Vec<Piece>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of it.
    pub(super) fn whole(&self) -> Range<u64> {
        0..self.what.len
    }

    /// Has that of `part` brought which is not here, and waits for what others bring.
    ///
    /// # Errors
    /// As `bring`; if what it brings has another length; if there is no place for it.
    pub(super) fn want(&self, part: &Range<u64>, bring: &Bring<'_>) -> Result<()> {
        let len = self.what.len;
        let wanted = part.start / PIECE..part.end.min(len).div_ceil(PIECE);
        let mut from = wanted.start;
        while let Some(run) = self.next(&wanted, from) {
            from = run.end;
            let bytes = run.start * PIECE..(run.end * PIECE).min(len);
            let brought = bring(&self.what, &bytes).and_then(|data| self.put(&data, &bytes));
            self.note(&run, if brought.is_ok() { Piece::Here } else { Piece::Missing });
            brought?;
        }
        Ok(())
    }

    /// Those of the `wanted` pieces that the caller has to bring next, the first behind `from` if there is one. None when
    /// all are here.
    fn next(&self, wanted: &Range<u64>, from: u64) -> Option<Range<u64>> {
        let mut pieces = self.pieces();
        loop {
            let of = |at: u64| usize::try_from(at).ok().and_then(|at| pieces.get(at).copied());
            let is = |at: u64, how: Piece| of(at) == Some(how);
            let mut order = (from..wanted.end).chain(wanted.start..from);
            if let Some(first) = order.find(|&at| is(at, Piece::Missing)) {
                let most = wanted.end.min(first + MOST);
                let end = (first..most).find(|&at| !is(at, Piece::Missing)).unwrap_or(most);
                set(&mut pieces, &(first..end), Piece::Coming);
                return Some(first..end);
            }
            if !wanted.clone().any(|at| is(at, Piece::Coming)) {
                return None;
            }
            pieces = self.changed.wait(pieces).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn note(&self, run: &Range<u64>, how: Piece) {
        set(&mut self.pieces(), run, how);
        self.changed.notify_all();
    }

    fn put(&self, data: &[u8], place: &Range<u64>) -> Result<()> {
        let what = || kind::PAGES.file_name(self.what.id.into());
        if data.len() as u64 != place.end - place.start {
            return Err(Error::new(format!("{}: a part has another length", what())));
        }
        self.file.write_all_at(data, place.start).context(what)
    }
}

fn set(pieces: &mut [Piece], run: &Range<u64>, how: Piece) {
    let at = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
    if let Some(run) = pieces.get_mut(at(run.start)..at(run.end)) {
        run.fill(how);
    }
}

/// What is still to come of a checkpoint, and where the engine asks for it.
#[derive(Debug)]
pub(super) struct Late {
    /// The pod that it comes for; none, if it comes for all that begin with a snapshot.
    pub pod: String,
    /// The files of pages.
    pub files: Vec<LatePages>,
    /// A socket for the images of each container, and for each round of them.
    pub doors: Vec<(LateImages, UnixListener)>,
}

impl Late {
    /// What is still to come of the checkpoint in `dir`, if anything is.
    ///
    /// # Errors
    /// If a file or a socket cannot be made, or what is written down makes no sense.
    pub(super) fn open(dir: &Path) -> Result<Option<Self>> {
        let Some(LateNote { pod, files }) = read_json(&dir.join(LOGS).join(NOTE))? else {
            return Ok(None);
        };
        let images = all_images(&files)?;
        let open = |file: LateFile| LatePages::open(dir, file);
        let files = files.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let door = |images: LateImages| -> Result<(LateImages, UnixListener)> {
            let listener = listen(&images.place(dir)?)?;
            Ok((images, listener))
        };
        let doors = images.into_iter().map(door).collect::<Result<Vec<_>>>()?;
        // It is tried again. There may be no such file.
        let _ = fs::remove_file(dir.join(LOGS).join(LOST));
        Ok(Some(Self { pod, files, doors }))
    }

    /// The file of pages with this number among these images.
    pub(super) fn file(&self, images: &LateImages, id: u32) -> Option<&LatePages> {
        self.files.iter().find(|file| file.what.images == *images && file.what.id == id)
    }

    /// Where the images are in the checkpoint in `dir`.
    fn places(&self, dir: &Path) -> impl Iterator<Item = PathBuf> {
        // Those that are nowhere have no socket.
        self.doors.iter().filter_map(|(images, _)| images.place(dir).ok())
    }

    /// All is here: nobody has to ask any more who reads it.
    ///
    /// # Errors
    /// If it cannot be written to the disk, or what shows that it is not here cannot be removed from the checkpoint in `dir`.
    pub(super) fn end(&self, dir: &Path) -> Result<()> {
        // If the machine fails, nothing may be missing that nobody brings any more.
        for pages in &self.files {
            pages.file.sync_data().context(|| kind::PAGES.file_name(pages.what.id.into()))?;
        }
        // The note last: whoever finds it looks after the others.
        let shows = self.places(dir).flat_map(|images| [images.join(SOCKET), images.join(RETURNS)]);
        let mut shows = shows.chain([dir.join(LOGS).join(NOTE)]);
        shows.try_for_each(|path| match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).context(|| path.display().to_string())
            }
            _ => Ok(()),
        })
    }

    /// The rest does not come: a container that has not begun with the checkpoint in `dir` is not to wait for somebody who
    /// comes back. The socket stays: whoever finds none takes all to be here.
    pub(super) fn leave(&self, dir: &Path) {
        for images in self.places(dir) {
            // They only wait longer if it stays.
            let _ = fs::remove_file(images.join(RETURNS));
        }
        let _ = fs::write(dir.join(LOGS).join(LOST), "");
    }
}

/// A socket in a directory of images. It takes the place of the one that an agent before this one has left, so that there always
/// is one.
fn listen(images: &Path) -> Result<UnixListener> {
    let what = || format!("a socket in {}", images.display());
    let dir = File::open(images).context(what)?;
    fs::write(images.join(RETURNS), "").context(what)?;
    // The path of the directory may be longer than the address of a socket can be.
    let at = |name: &str| PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
    let new = at("pages.sock.new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).context(what),
        _ => {}
    }
    let listener = UnixListener::bind(&new).context(what)?;
    listener.set_nonblocking(true).context(what)?;
    fs::rename(&new, at(SOCKET)).context(what)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    fn images(container: &str, round: Option<u32>) -> LateImages {
        LateImages { container: container.into(), round }
    }

    fn file(container: &str, len: u64) -> LateFile {
        LateFile { images: images(container, None), id: 1, len }
    }

    fn file_of(round: u32, len: u64) -> LateFile {
        LateFile { images: images("main", Some(round)), id: 1, len }
    }

    /// A checkpoint whose list names `files`.
    fn listed(files: &[LateFile]) -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir_all(place.path().join("containers/main")).unwrap();
        fs::write(place.path().join(LIST), serde_json::to_vec(files).unwrap()).unwrap();
        place
    }

    fn content(range: &Range<u64>) -> Vec<u8> {
        range.clone().map(|at| (at / 1000).to_le_bytes()[0]).collect()
    }

    #[test]
    fn files_of_pages_are_told_from_others() {
        let of = |path: &str| LateFile::at(Path::new(path), 7).map(|file| (file.images, file.id));
        assert_eq!(of("containers/main/pages-12.img"), Some((images("main", None), 12)));
        assert_eq!(of("rounds/main/1/pages-3.img"), Some((images("main", Some(1)), 3)));
        for other in [
            "containers/main/pages-tags-1.img",
            "containers/main/pages-01.img",
            "containers/main/core-1.img",
            "rounds/main/01/pages-1.img",
            "rounds/main/0/pages-1.img",
            "rounds/main/9/pages-1.img",
            "rounds/main/pages-1.img",
            "rounds/main/1/core-1.img",
            "containers/pages-1.img",
            "containers/main/deep/pages-1.img",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_wanted_comes_once() {
        let len = 20 * PIECE + 1;
        let place = listed(&[file("main", len)]);
        prepare(place.path(), "web-0").unwrap();
        assert!(comes_late(place.path()) && !place.path().join(LIST).exists());
        let late = Late::open(place.path()).unwrap().unwrap();
        assert_eq!(late.pod, "web-0");
        let pages = late.file(&images("main", None), 1).unwrap();
        assert!(late.file(&images("main", None), 2).is_none());
        assert!(late.file(&images("main", Some(1)), 1).is_none());
        assert!(late.file(&images("other", None), 1).is_none());
        let brought = AtomicUsize::new(0);
        let bring = |_: &LateFile, part: &Range<u64>| {
            let len = usize::try_from(part.end - part.start).unwrap();
            brought.fetch_add(len, Ordering::Relaxed);
            Ok(content(part))
        };
        pages.want(&(3 * PIECE + 5..3 * PIECE + 6), &bring).unwrap();
        assert_eq!(brought.load(Ordering::Relaxed) as u64, PIECE);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| pages.want(&pages.whole(), &bring).unwrap());
            }
        });
        assert_eq!(brought.load(Ordering::Relaxed) as u64, len);
        // What is behind the end is nowhere.
        pages.want(&(len + PIECE..len + 2 * PIECE), &bring).unwrap();
        let path = place.path().join("containers/main/pages-1.img");
        assert_eq!(fs::read(path).unwrap(), content(&(0..len)));
        late.end(place.path()).unwrap();
        assert!(!comes_late(place.path()) && Late::open(place.path()).unwrap().is_none());
        let left = fs::read_dir(place.path().join("containers/main")).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["pages-1.img"]);
    }

    #[test]
    fn what_is_still_to_come_is_what_the_files_lack() {
        let len = 20 * PIECE;
        let place = listed(&[file("main", len)]);
        assert_eq!(to_come(place.path()), 0, "nothing comes late");
        prepare(place.path(), "web-0").unwrap();
        assert_eq!(to_come(place.path()), len);
        let late = Late::open(place.path()).unwrap().unwrap();
        let bring = |_: &LateFile, part: &Range<u64>| Ok(content(part));
        late.files[0].want(&(0..4 * PIECE), &bring).unwrap();
        late.files[0].file.sync_all().unwrap();
        let left = to_come(place.path());
        assert!((1..=len - 3 * PIECE).contains(&left), "{left} of {len}");
        late.files[0].want(&(0..len), &bring).unwrap();
        late.end(place.path()).unwrap();
        assert_eq!(to_come(place.path()), 0);
    }

    #[test]
    fn what_fails_is_tried_by_the_next() {
        let place = listed(&[file("main", 3 * PIECE)]);
        prepare(place.path(), "web-0").unwrap();
        let late = Late::open(place.path()).unwrap().unwrap();
        let pages = &late.files[0];
        let fails = |_: &LateFile, _: &Range<u64>| Err(Error::new("its node is lost"));
        assert_eq!(pages.want(&(0..1), &fails).unwrap_err().to_string(), "its node is lost");
        let short = |_: &LateFile, _: &Range<u64>| Ok(vec![1]);
        assert!(pages.want(&(0..1), &short).unwrap_err().to_string().contains("another length"));
        let bring = |_: &LateFile, part: &Range<u64>| Ok(content(part));
        pages.want(&pages.whole(), &bring).unwrap();
        assert!(pages.pieces().iter().all(|piece| *piece == Piece::Here));
    }

    #[test]
    fn an_agent_that_comes_back_takes_the_place_of_the_one_before() {
        let place = listed(&[file("main", PIECE)]);
        prepare(place.path(), "web-0").unwrap();
        let _before = Late::open(place.path()).unwrap().unwrap();
        let after = Late::open(place.path()).unwrap().unwrap();
        let socket = place.path().join("containers/main").join(SOCKET);
        let _stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        after.doors[0].1.accept().unwrap();
        // Whoever finds none there takes all to be here.
        assert!(is_awaited(place.path()));
        after.leave(place.path());
        assert!(socket.exists() && !socket.with_file_name(RETURNS).exists());
        assert!(comes_late(place.path()) && !is_awaited(place.path()));
        let _again = Late::open(place.path()).unwrap().unwrap();
        assert!(is_awaited(place.path()));
    }

    #[test]
    fn forged_lists_make_nothing() {
        let there = file("main", 1);
        for files in [
            vec![file("../main", 1)],
            vec![file("", 1)],
            vec![file("main", MAX_LEN + 1)],
            vec![there.clone(), there],
            vec![file("other", 1)],
            vec![file_of(0, 1)],
            vec![file_of(ROUNDS + 1, 1)],
        ] {
            let place = listed(&files);
            prepare(place.path(), "web-0").unwrap_err();
            assert!(!comes_late(place.path()), "{files:?}");
        }
        let place = listed(&[]);
        fs::write(place.path().join(LIST), "{").unwrap();
        prepare(place.path(), "web-0").unwrap_err();
        let long = format!("[]{}", " ".repeat(usize::try_from(MAX_LIST).unwrap()));
        fs::write(place.path().join(LIST), long).unwrap();
        prepare(place.path(), "web-0").unwrap_err();
        let whole = tempfile::tempdir().unwrap();
        prepare(whole.path(), "web-0").unwrap();
        assert!(!comes_late(whole.path()), "all has come");
    }

    #[test]
    fn a_checkpoint_has_not_more_containers_than_fit() {
        for (count, fits) in [(MAX_CONTAINERS, true), (MAX_CONTAINERS + 1, false)] {
            let files: Vec<_> = (0..count).map(|n| file(&format!("c{n}"), 1)).collect();
            let place = listed(&files);
            for file in &files {
                fs::create_dir(place.path().join(CONTAINERS).join(&file.images.container)).unwrap();
            }
            assert_eq!(prepare(place.path(), "web-0").is_ok(), fits);
        }
    }

    #[test]
    fn parts_are_read_of_files_of_pages_alone() {
        let place = listed(&[]);
        let path = place.path().join("containers/main/pages-1.img");
        fs::write(&path, content(&(0..2 * PIECE))).unwrap();
        let part = PIECE..PIECE + 10;
        assert_eq!(file("main", 0).read(place.path(), &part).unwrap(), content(&part));
        for (container, part) in [
            ("../containers/main", part.clone()),
            ("other", part),
            ("main", PIECE..2 * PIECE + 1),
            ("main", 0..(MOST + 1) * PIECE),
        ] {
            file(container, 0).read(place.path(), &part).unwrap_err();
        }
    }
}
