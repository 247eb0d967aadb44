//! How long it takes to pack files in memory, found out by packing some of them: tables of text take ten times as long as
//! room that nothing was written to yet.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use rustix::time::{ClockId, clock_gettime};
use torpor_kernel::tree::{self, Id, Tree};

use crate::forecast::float;
use crate::shape::file_systems;

/// How dumps pack, and what they store as it is: what does not become smaller by a tenth.
const LEVEL: Compression = Compression::new(2);
/// What is packed at once, and how often: 4 MiB.
const PIECE: usize = 64 << 10;
const PIECES: u64 = 64;
/// No more files are looked at.
const MAX_FILES: usize = 4096;

/// What packing all files takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Packing {
    /// Bytes that there are.
    pub bytes: u64,
    /// What is left of them.
    pub packed: u64,
    /// How long it takes to pack them.
    pub pack: Duration,
    /// How long it takes to unpack them.
    pub unpack: Duration,
}

/// A file, and how many bytes of it are in memory.
struct Found {
    system: usize,
    name: PathBuf,
    id: Id,
    size: u64,
    bytes: u64,
}

impl Packing {
    /// What packing does to the files in memory that a process has for itself; nothing, if there are none, or they cannot be read.
    #[must_use]
    pub(crate) fn sample(pid: i32) -> Option<Self> {
        Self::of(&file_systems(pid))
    }

    fn of(places: &[PathBuf]) -> Option<Self> {
        let systems: Vec<Tree> = places.iter().filter_map(|place| Tree::at(place).ok()).collect();
        let mut files = Vec::new();
        for (number, system) in systems.iter().enumerate() {
            find(system, number, &mut files);
        }
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let mut sum = Sum::default();
        for number in 0..PIECES {
            let at = (bytes / PIECES).saturating_mul(number);
            let piece = place(&files, at).and_then(|(file, at)| read(&systems, file, at));
            if let Some(piece) = piece {
                sum.add(&piece)?;
            }
        }
        (sum.bytes > 0).then(|| sum.scaled(bytes))
    }
}

/// What packing some pieces has taken.
#[derive(Default)]
struct Sum {
    bytes: u64,
    packed: u64,
    pack: Duration,
    unpack: Duration,
}

impl Sum {
    fn add(&mut self, piece: &[u8]) -> Option<()> {
        let start = now();
        let mut packer = GzEncoder::new(Vec::new(), LEVEL);
        packer.write_all(piece).ok()?;
        let packed = packer.finish().ok()?;
        let middle = now();
        self.bytes += piece.len() as u64;
        if packed.len() > piece.len() - piece.len() / 10 {
            // An eighth of it is packed to see that, and to store and to read it takes hardly anything.
            self.packed += piece.len() as u64;
            self.pack += middle.saturating_sub(start) / 8;
            return Some(());
        }
        let mut back = Vec::with_capacity(piece.len());
        GzDecoder::new(&*packed).read_to_end(&mut back).ok()?;
        self.packed += packed.len() as u64;
        self.pack += middle.saturating_sub(start);
        self.unpack += now().saturating_sub(middle);
        Some(())
    }

    /// The same of so many bytes.
    fn scaled(&self, bytes: u64) -> Packing {
        let times = float(bytes) / float(self.bytes);
        let packed = share(self.packed, bytes, self.bytes);
        let [pack, unpack] = [self.pack, self.unpack].map(|it| it.mul_f64(times));
        Packing { bytes, packed, pack, unpack }
    }
}

/// The time for which this thread has run: what others do meanwhile they do not do when they are stopped.
fn now() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Finds the files of a file system.
fn find(system: &Tree, number: usize, files: &mut Vec<Found>) {
    let mut dirs = vec![PathBuf::new()];
    while let Some(name) = dirs.pop()
        && files.len() < MAX_FILES
    {
        let entries = system.dir(&name).and_then(|dir| tree::list(&dir, &name));
        for entry in entries.unwrap_or_default() {
            let meta = &entry.meta;
            // Holes are not packed.
            let bytes = meta.len().min(meta.blocks().saturating_mul(512));
            if meta.is_dir() {
                dirs.push(entry.name);
            } else if meta.is_file() && bytes > 0 {
                let (id, size) = (tree::id(meta), meta.len());
                files.push(Found { system: number, name: entry.name, id, size, bytes });
            }
        }
    }
}

/// The file that has a byte of all, and where in that it is.
fn place(files: &[Found], mut at: u64) -> Option<(&Found, u64)> {
    let file = files.iter().find(|file| {
        let is_in = at < file.bytes;
        at -= if is_in { 0 } else { file.bytes };
        is_in
    })?;
    Some((file, share(file.size, at, file.bytes)))
}

/// As large a share of a number as `part` is of all there is.
fn share(number: u64, part: u64, all: u64) -> u64 {
    let share = u128::from(number) * u128::from(part) / u128::from(all.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}

fn read(systems: &[Tree], file: &Found, at: u64) -> Option<Vec<u8>> {
    let open: File = systems.get(file.system)?.file(&file.name, file.id).ok()?;
    let mut piece = vec![0; PIECE];
    let len = open.read_at(&mut piece, at).ok()?;
    piece.truncate(len);
    (len > 0).then_some(piece)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    fn of(files: &[(&str, Vec<u8>)]) -> Option<Packing> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        Packing::of(&[dir.path().to_owned(), dir.path().join("none")])
    }

    fn random(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_is_there_is_packed_in_parts() {
        const LEN: usize = 8 << 20;
        assert_eq!(of(&[]), None);
        let same = of(&[("below/same", vec![b'x'; LEN])]).unwrap();
        assert!(same.bytes >= LEN as u64 && same.packed < same.bytes / 50, "{same:?}");
        assert!(same.pack > Duration::ZERO && same.unpack > Duration::ZERO, "{same:?}");
        let other = of(&[("other", random(LEN))]).unwrap();
        assert_eq!((other.packed, other.unpack), (other.bytes, Duration::ZERO), "{other:?}");
        // Half of each.
        let both = of(&[("other", random(LEN)), ("below/same", vec![b'x'; LEN])]).unwrap();
        let part = float(both.packed) / float(both.bytes);
        assert!((0.4..0.6).contains(&part), "{both:?}");
    }

    #[test]
    fn a_byte_of_all_is_one_of_a_file() {
        let file = |size, bytes| Found { system: 0, name: PathBuf::new(), id: (0, 0), size, bytes };
        // Half of the second one are holes.
        let files = [file(100, 100), file(400, 200)];
        let at = |at| place(&files, at).map(|(file, at)| (file.size, at));
        assert_eq!([at(0), at(99), at(100)], [Some((100, 0)), Some((100, 99)), Some((400, 0))]);
        assert_eq!([at(200), at(300)], [Some((400, 200)), None]);
    }
}
