//! An image as what differs from one of the same name that an earlier round has brought.
//!
//! ```text
//!     step    from u64  same u64  new u64  new bytes
//! ```
//!
//! A step makes `same` bytes, those of the earlier image from its byte `from` on, and then `new` ones, which follow. Numbers
//! are little-endian. A frame has whole steps; all steps of an image make as many bytes as were announced.
//!
//! Both hosts have the earlier image. What was changed in place is found where it was, and what has moved, since something
//! before it has become longer or shorter, by sums of what the earlier one has.
//!
//! A step of few bytes can repeat many. So both ends count: what images repeat is at most twice what has come over the link of
//! all images ([`Allowance`]), and a source that tells otherwise fails, before it fills a disk.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufWriter, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use super::frame::MAX_FRAME;
use crate::error::{Context, Error, Result};

/// What is compared by itself. Archives keep what is equal at distances of that, if they are stored.
const UNIT: usize = 512;
/// Of so many units of an earlier image the sum of one is known.
const STRIDE: u64 = 8;
/// Bytes that are read and compared at once.
const PIECE: usize = 128 << 10;
/// A frame that has so many bytes is sent; a step adds a piece at most.
const FULL: usize = MAX_FRAME / 2;
/// Three numbers.
const HEADER: usize = 24;

/// How much of earlier images others may repeat, in all rounds of a migration.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowance {
    /// Bytes of images that have come over the link.
    came: u64,
    /// Bytes that images have which were repeated, less those of images that are gone.
    repeated: u64,
}

impl Allowance {
    /// What comes is so many bytes.
    pub(crate) fn add(&mut self, bytes: usize) {
        self.came = self.came.saturating_add(bytes as u64);
    }

    /// Whether so many may be repeated; they count then.
    fn take(&mut self, bytes: u64) -> bool {
        let all = self.repeated.saturating_add(bytes);
        let may = all <= self.came.saturating_mul(2);
        if may {
            self.repeated = all;
        }
        may
    }

    /// An image of so many bytes is gone.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.repeated = self.repeated.saturating_sub(bytes);
    }
}

/// An image that both hosts have.
#[derive(Debug)]
pub(crate) struct Earlier {
    file: File,
    path: PathBuf,
    /// Bytes of it, and where they are.
    piece: Vec<u8>,
    start: u64,
    /// Where units are, by their sums.
    places: HashMap<u64, u64>,
}

impl Earlier {
    /// Reads it once.
    ///
    /// # Errors
    /// If the file of the image cannot be opened or read.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).context(|| path.display().to_string())?;
        let path = path.to_owned();
        let (piece, places) = (Vec::new(), HashMap::new());
        let mut earlier = Self { file, path, piece, start: 0, places };
        let mut at = 0;
        while earlier.note(at)? {
            at += STRIDE * UNIT as u64;
        }
        Ok(earlier)
    }

    /// Removes it: nobody compares with it any more. How long it was.
    ///
    /// # Errors
    /// If its file cannot be removed.
    pub(crate) fn remove(self) -> Result<u64> {
        let Self { file, path, places, .. } = self;
        let len = unlink(&path, &file)?;
        let_go((file, places));
        Ok(len)
    }

    /// Notes the unit at a place; whether there is one. What is the same all over is everywhere, and leads nowhere.
    fn note(&mut self, at: u64) -> Result<bool> {
        let Some(unit) = self.bytes(at, UNIT)? else { return Ok(false) };
        if unit.iter().any(|byte| *byte != unit[0]) {
            let sum = sum(unit);
            self.places.entry(sum).or_insert(at);
        }
        Ok(true)
    }

    fn bytes(&mut self, at: u64, len: usize) -> Result<Option<&[u8]>> {
        let end = self.start + self.piece.len() as u64;
        if at < self.start || at.saturating_add(len as u64) > end {
            self.fill(at)?;
        }
        let from = usize::try_from(at - self.start).unwrap_or(usize::MAX);
        Ok(self.piece.get(from..from.saturating_add(len)))
    }

    fn fill(&mut self, at: u64) -> Result<()> {
        self.start = at;
        self.piece.resize(PIECE, 0);
        let mut len = 0;
        while len < PIECE {
            let read = self.file.read_at(&mut self.piece[len..], at.saturating_add(len as u64));
            match read.context(|| self.path.display().to_string())? {
                0 => break,
                read => len += read,
            }
        }
        self.piece.truncate(len);
        Ok(())
    }

    fn has(&mut self, bytes: &[u8], at: u64) -> Result<bool> {
        Ok(self.bytes(at, bytes.len())? == Some(bytes))
    }

    /// Where a unit is: at `at`, or anywhere.
    fn find(&mut self, unit: &[u8], at: u64) -> Result<Option<u64>> {
        if self.has(unit, at)? {
            return Ok(Some(at));
        }
        match self.places.get(&sum(unit)) {
            Some(&place) => Ok(self.has(unit, place)?.then_some(place)),
            None => Ok(None),
        }
    }
}

/// Removes an earlier image; how long it was.
///
/// # Errors
/// If the file is gone, or cannot be removed.
pub(crate) fn remove(path: &Path) -> Result<u64> {
    let file = File::open(path).context(|| path.display().to_string())?;
    let len = unlink(path, &file)?;
    let_go(file);
    Ok(len)
}

/// Takes the name of a file away that is open; how long it is.
fn unlink(path: &Path, file: &File) -> Result<u64> {
    let removed = file.metadata().and_then(|it| std::fs::remove_file(path).map(|()| it));
    removed.map(|it| it.len()).context(|| path.display().to_string())
}

/// Lets go of something large in a thread of its own: the tasks are stopped, and to free hundreds of megabytes takes tens of
/// milliseconds. Without a thread it is done here.
fn let_go(what: impl Send + 'static) {
    let _ = thread::Builder::new().spawn(move || drop(what));
}

fn sum(unit: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(unit);
    hasher.finish()
}

/// Sends, frame by frame, the steps that make an image of `len` bytes of an earlier one. What may not be repeated is sent
/// as if it were new. Before each piece `goes_on` is asked: of what is the same nothing goes out for long.
///
/// # Errors
/// If either cannot be read; those of `goes_on` and `send`.
pub(crate) fn tell(
    earlier: &mut Earlier,
    (image, path): (&mut File, &Path),
    len: u64,
    allowance: &mut Allowance,
    goes_on: &dyn Fn() -> Result<()>,
    send: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut steps = StepWriter::default();
    let mut piece = vec![0; PIECE];
    let (mut left, mut at) = (len, 0);
    while left > 0 {
        goes_on()?;
        let want = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        let piece = &mut piece[..want];
        image.read_exact(piece).context(|| path.display().to_string())?;
        at = compare(earlier, piece, at, (&mut steps, &mut *allowance))?;
        left -= want as u64;
        if steps.frame.len() >= FULL {
            send(&std::mem::take(&mut steps.frame))?;
        }
    }
    steps.end();
    if steps.frame.is_empty() { Ok(()) } else { send(&steps.frame) }
}

/// Adds the steps for a piece that is expected at `at`; where that behind it is expected.
fn compare(
    earlier: &mut Earlier,
    piece: &[u8],
    mut at: u64,
    (steps, allowance): (&mut StepWriter, &mut Allowance),
) -> Result<u64> {
    if earlier.has(piece, at)? && allowance.take(piece.len() as u64) {
        steps.add_same(at, piece.len());
        return Ok(at + piece.len() as u64);
    }
    for unit in piece.chunks(UNIT) {
        match earlier.find(unit, at)? {
            Some(place) if allowance.take(unit.len() as u64) => {
                steps.add_same(place, unit.len());
                at = place;
            }
            _ => {
                allowance.add(unit.len());
                steps.add_new(unit);
            }
        }
        at += unit.len() as u64;
    }
    Ok(at)
}

/// Steps: those of a frame, and one that may become longer.
#[derive(Debug, Default)]
struct StepWriter {
    frame: Vec<u8>,
    same: Range<u64>,
    new: Vec<u8>,
}

impl StepWriter {
    fn add_same(&mut self, from: u64, len: usize) {
        if !self.new.is_empty() || !self.same.is_empty() && self.same.end != from {
            self.end();
        }
        if self.same.is_empty() {
            self.same = from..from;
        }
        self.same.end += len as u64;
    }

    fn add_new(&mut self, bytes: &[u8]) {
        if self.new.len() + bytes.len() > PIECE {
            self.end();
        }
        self.new.extend_from_slice(bytes);
    }

    fn end(&mut self) {
        let same = std::mem::take(&mut self.same);
        if same.is_empty() && self.new.is_empty() {
            return;
        }
        for number in [same.start, same.end - same.start, self.new.len() as u64] {
            self.frame.extend(number.to_le_bytes());
        }
        self.frame.append(&mut self.new);
    }
}

/// Makes an image of `len` bytes of an earlier one, by the frames that `next` brings.
///
/// # Errors
/// If a frame makes no sense, or more than was announced or may be repeated; if the earlier image is not there or cannot be read, or the new one
/// cannot be written; those of `next`.
pub(crate) fn make(
    earlier: &Path,
    (image, path): (&File, &Path),
    len: u64,
    allowance: &mut Allowance,
    next: &mut dyn FnMut() -> Result<Vec<u8>>,
) -> Result<()> {
    let failed = || path.display().to_string();
    let source = File::open(earlier).context(|| earlier.display().to_string())?;
    let mut out = BufWriter::with_capacity(PIECE, image);
    let mut left = len;
    while left > 0 {
        let frame = next()?;
        let mut rest = &frame[..];
        while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
            let step = StepHeader::read(header, left).ok_or_else(nonsense)?;
            let (new, behind) = behind.split_at_checked(step.new).ok_or_else(nonsense)?;
            allowance.add(step.new);
            if !allowance.take(step.same.end - step.same.start) {
                return Err(nonsense());
            }
            copy(&source, step.same, &mut out, earlier)?;
            out.write_all(new).context(failed)?;
            left -= step.len;
            rest = behind;
        }
        if frame.is_empty() || !rest.is_empty() {
            return Err(nonsense());
        }
    }
    out.flush().context(failed)
}

fn nonsense() -> Error {
    Error::Protocol("what differs in an image makes no sense".to_owned())
}

/// What a header says.
struct StepHeader {
    same: Range<u64>,
    new: usize,
    /// Bytes that it makes.
    len: u64,
}

impl StepHeader {
    /// One that makes something, and no more than `left` bytes.
    fn read(header: &[u8; HEADER], left: u64) -> Option<Self> {
        let number = |at: usize| {
            let bytes = header.get(at..)?.first_chunk()?;
            Some(u64::from_le_bytes(*bytes))
        };
        let (from, same, new) = (number(0)?, number(8)?, number(16)?);
        let len = same.checked_add(new).filter(|len| (1..=left).contains(len))?;
        let same = from..from.checked_add(same)?;
        Some(Self { same, new: usize::try_from(new).ok()?, len })
    }
}

fn copy(source: &File, range: Range<u64>, out: &mut impl Write, path: &Path) -> Result<()> {
    let failed = || path.display().to_string();
    let mut piece = vec![0; PIECE.min(usize::try_from(range.end - range.start).unwrap_or(PIECE))];
    let mut at = range.start;
    while at < range.end {
        let want = usize::try_from(range.end - at).unwrap_or(PIECE).min(PIECE);
        let piece = &mut piece[..want];
        source.read_exact_at(piece, at).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => nonsense(),
            _ => Error::Io { what: failed(), source: error },
        })?;
        out.write_all(piece).context(failed)?;
        at += want as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::VecDeque;

    use tempfile::TempDir;

    use super::*;

    /// Bytes that are different in each unit.
    fn counted(from: u64, units: u64) -> Vec<u8> {
        (from..from + units)
            .flat_map(|unit| {
                let mut bytes = [0x5a; UNIT];
                bytes[..8].copy_from_slice(&unit.to_le_bytes());
                bytes
            })
            .collect()
    }

    /// What a round may repeat when so many bytes have come.
    fn after(came: usize) -> Allowance {
        let mut allowance = Allowance::default();
        allowance.add(came);
        allowance
    }

    /// Brings `now` to where `before` is; how many bytes that took.
    fn bring(before: &[u8], now: &[u8]) -> usize {
        let dir = TempDir::new().unwrap();
        let [old, new, made] = ["old", "new", "made"].map(|name| dir.path().join(name));
        std::fs::write(&old, before).unwrap();
        std::fs::write(&new, now).unwrap();
        let mut frames = VecDeque::new();
        let mut earlier = Earlier::read(&old).unwrap();
        let (mut image, len) = (File::open(&new).unwrap(), now.len() as u64);
        let image = (&mut image, new.as_path());
        tell(&mut earlier, image, len, &mut after(before.len()), &|| Ok(()), &mut |frame| {
            assert!(frame.len() <= MAX_FRAME);
            frames.push_back(frame.to_vec());
            Ok(())
        })
        .unwrap();
        let sent = frames.iter().map(Vec::len).sum();
        let out = File::create(&made).unwrap();
        let mut next = || Ok(frames.pop_front().unwrap());
        make(&old, (&out, &made), len, &mut after(before.len()), &mut next).unwrap();
        assert!(frames.is_empty() && std::fs::read(&made).unwrap() == now);
        sent
    }

    #[test]
    fn what_is_there_is_not_sent_again() {
        let before =
            [counted(0, 3000), vec![0; 4096], counted(9000, 3000), b"end".to_vec()].concat();
        assert!(bring(&before, &before) < 100);
        let mut changed = before.clone();
        for at in [0, 5, 700_000, 700_600, 2_900_000] {
            changed[at] ^= 1;
        }
        assert!(bring(&before, &changed) < 10 * UNIT);
        // Something has come in between, something has gone, and something is at another place.
        let (head, tail) = before.split_at(1000 * UNIT);
        let longer = [head, &counted(50_000, 3), tail].concat();
        assert!(bring(&before, &longer) < 16 * UNIT);
        assert!(bring(&longer, &before) < 16 * UNIT);
        let turned = [&before[..3000 * UNIT], &before].concat();
        assert!(bring(&before, &turned) < 16 * UNIT);
        assert!(bring(&before, &before[..700_001]) < 2 * UNIT);
    }

    #[test]
    fn what_is_not_there_is_sent() {
        let (one, other) = (counted(0, 5000), counted(7000, 5000));
        let all = other.len() + other.len() / 100;
        for before in [&one[..], b"", b"short"] {
            let sent = bring(before, &other);
            assert!((other.len()..all).contains(&sent), "{sent}");
        }
        assert_eq!(bring(&one, b""), 0);
        assert!(bring(&one, &vec![7; 3 * PIECE]) < 4 * PIECE);
    }

    #[test]
    fn nonsense_makes_nothing() {
        let dir = TempDir::new().unwrap();
        let [old, made] = ["old", "made"].map(|name| dir.path().join(name));
        std::fs::write(&old, [1; 100]).unwrap();
        let step =
            |numbers: [u64; 3], new: &[u8]| [&numbers.map(u64::to_le_bytes).concat(), new].concat();
        let made_of = |frame: Vec<u8>| {
            let out = File::create(&made).unwrap();
            make(&old, (&out, &made), 50, &mut after(100), &mut || Ok(frame.clone()))
                .map_err(|e| e.to_string())
        };
        made_of(step([50, 48, 2], b"ab")).unwrap();
        for frame in [
            vec![],
            vec![0; HEADER - 1],
            step([0, 0, 0], b""),
            step([0, 51, 0], b""),
            step([51, 50, 0], b""),
            step([u64::MAX, 50, 0], b""),
            step([0, u64::MAX, 2], b"ab"),
            step([0, 48, 2], b"a"),
            step([0, 48, 2], b"abc"),
        ] {
            let error = made_of(frame).unwrap_err();
            assert!(error.contains("makes no sense"), "{error}");
        }
    }
    /// One frame of small steps would make a thousand times what has come.
    #[test]
    fn little_does_not_become_much() {
        const MIB: usize = 1 << 20;
        let dir = TempDir::new().unwrap();
        let [old, made] = ["old", "made"].map(|name| dir.path().join(name));
        std::fs::write(&old, vec![1; MIB]).unwrap();
        let step = [0, MIB as u64, 0].map(u64::to_le_bytes).concat();
        let made_by = |steps: usize| {
            let out = File::create(&made).unwrap();
            let (frame, len) = (step.repeat(steps), (steps * MIB) as u64);
            make(&old, (&out, &made), len, &mut after(MIB), &mut || Ok(frame.clone()))
                .map_err(|error| error.to_string())
        };
        made_by(2).unwrap();
        let error = made_by(1024).unwrap_err();
        assert!(error.contains("makes no sense"), "{error}");
        assert!(std::fs::metadata(&made).unwrap().len() <= 2 * MIB as u64);
    }

    /// What an honest source has more often is sent again, and comes.
    #[test]
    fn much_of_the_same_comes() {
        let before = counted(0, 3000);
        let now = before.repeat(5);
        let sent = bring(&before, &now);
        assert!((before.len()..2 * before.len()).contains(&sent), "{sent}");
        // Whatever the round; what is gone counts no more.
        let mut allowance = after(100);
        assert!(allowance.take(200) && !allowance.take(1));
        allowance.give_back(50);
        assert!(!allowance.take(51) && allowance.take(50));
    }
}
