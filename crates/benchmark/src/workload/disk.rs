//! Files: as fast as the page cache, and past it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{BLOCK, nanoseconds, say};

const PIECE: usize = 16 << 10;

/// Writes and reads a file in several ways.
#[allow(clippy::cast_precision_loss, reason = "a number of MiB")]
pub(super) fn disk(size: usize, path: &Path) -> io::Result<Value> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut block = vec![0; BLOCK];
    random.fill(&mut block);
    let rate = |begun: Instant| size as f64 / begun.elapsed().as_secs_f64();
    let write = |file: &mut File| -> io::Result<f64> {
        let begun = Instant::now();
        for _ in 0..size {
            file.write_all(&block)?;
        }
        file.sync_all()?;
        Ok(rate(begun))
    };
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    let first = write(&mut file)?;
    io::Seek::rewind(&mut file)?;
    let again = write(&mut file)?;
    io::Seek::rewind(&mut file)?;
    let begun = Instant::now();
    let mut buffer = vec![0; BLOCK];
    for _ in 0..size {
        file.read_exact(&mut buffer)?;
    }
    let read = rate(begun);
    let pieces = u64::try_from(size * BLOCK / PIECE).unwrap_or(1);
    let mut place = || random.u64(..pieces) * (PIECE as u64);
    let reads = 5000;
    let begun = Instant::now();
    for _ in 0..reads {
        file.read_exact_at(&mut buffer[..PIECE], place())?;
    }
    let random_read = nanoseconds(begun, reads) / 1000.0;
    let writes = 1000;
    let begun = Instant::now();
    for number in 1..=writes {
        file.write_all_at(&block[..PIECE], place())?;
        if number % 100 == 0 {
            file.sync_data()?;
        }
    }
    let random_write = nanoseconds(begun, writes) / 1000.0;
    Ok(json!({
        "disk.sequential-write": first,
        "disk.sequential-rewrite": again,
        "disk.sequential-read": read,
        "disk.random-read": random_read,
        "disk.random-write": random_write,
    }))
}

/// How many reads are under way at a time: enough for the device to choose from.
const READERS: usize = 4;
/// What reads past the page cache begin and end at multiples of, in memory and in the file.
const SECTOR: usize = 4096;

/// Reads at random for a time, from when the program that has the file `beside` is ready as well; then
/// it stays.
pub(super) fn weigh(path: &Path, size: usize, beside: &Path, time: Duration) -> io::Result<Value> {
    let mut file = File::create(path)?;
    for _ in 0..size {
        file.write_all(&vec![1; BLOCK])?;
    }
    file.sync_all()?;
    File::create(path.with_extension("ready"))?.sync_all()?;
    while !beside.with_extension("ready").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let until = Instant::now() + time;
    let bytes = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|seed| scope.spawn(move || read_until(path, size, seed, until)))
            .collect();
        let ended = readers.into_iter().map(|reader| {
            reader.join().unwrap_or_else(|_| Err(io::Error::other("a reader has ended")))
        });
        ended.sum::<io::Result<u64>>()
    })?;
    say(&json!({ "bytes": bytes }))?;
    // Its control group is looked at as long as it is there.
    loop {
        std::thread::park();
    }
}

/// Reads at random places; returns how many bytes.
fn read_until(path: &Path, size: usize, seed: usize, until: Instant) -> io::Result<u64> {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut random = fastrand::Rng::with_seed(seed as u64);
    let mut buffer = vec![0; PIECE + SECTOR];
    let skip = buffer.as_ptr().align_offset(SECTOR);
    let piece = &mut buffer[skip..skip + PIECE];
    let mut bytes = 0;
    while Instant::now() < until {
        let place = random.usize(..size * BLOCK / PIECE) * PIECE;
        file.read_exact_at(piece, place as u64)?;
        bytes += PIECE as u64;
    }
    Ok(bytes)
}
