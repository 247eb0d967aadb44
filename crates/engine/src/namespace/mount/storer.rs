//! Stores a stream for gzip(1) without packing it: for a copy of which only what differs from an earlier one goes on.
//!
//! A stream that is packed changes as a whole behind the first byte that changes. Here each byte stays what it is, and
//! what is equal in two streams is at places that differ by a multiple of [`UNIT`], if that holds for the streams: for
//! archives it does.

use std::io::{self, Write};

use flate2::write::GzEncoder;
use flate2::{Compression, Crc};

/// What archives count in.
const UNIT: usize = 512;
/// What is stored at once: as many units as a block of deflate can hold (RFC 1951, 3.2.4).
const PIECE: usize = 127 * UNIT;
/// A member's first bytes (RFC 1952, 2.3): deflate, a field of extra bytes, no time, an unknown system.
const HEAD: [u8; 10] = [0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255];
/// The name of the extra bytes that fill a member up.
const FILL: [u8; 2] = *b"tp";
/// Where the data of a member begins if nothing fills it up: behind its head, the length of the field, the name and the
/// length of what fills it, and the head of a block.
const DATA: usize = HEAD.len() + 2 + 4 + BLOCK;
/// The head of a block that is stored, the last of its member.
const BLOCK: usize = 5;

/// A stream of members, each with one piece. Those that end with so many zeros that little is left are packed: holes, and how
/// each archive ends.
pub(super) struct Storer<W: Write> {
    out: W,
    /// Bytes of the stream so far, within a unit.
    at: usize,
    /// Whether it has a member.
    has_begun: bool,
    /// What does not make a piece yet.
    piece: Vec<u8>,
    /// The member of a whole piece of zeros, once there was one.
    zeros: Option<Vec<u8>>,
}

/// A whole piece of nothing.
static ZEROS: [u8; PIECE] = [0; PIECE];

impl<W: Write> Storer<W> {
    /// Stores to `out`.
    pub(super) fn new(out: W) -> Self {
        let piece = Vec::with_capacity(PIECE);
        Storer { out, at: 0, has_begun: false, piece, zeros: None }
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// Those of what it writes to.
    pub(super) fn finish(mut self) -> io::Result<W> {
        // A stream has one member at least.
        let piece = std::mem::take(&mut self.piece);
        if !piece.is_empty() || !self.has_begun {
            self.store(&piece)?;
        }
        Ok(self.out)
    }

    /// Adds a member. What is stored is not copied before it is written, for tasks stand still meanwhile.
    fn store(&mut self, piece: &[u8]) -> io::Result<()> {
        let last = &piece[piece.len() / 16..];
        if *last != ZEROS[..last.len()] {
            return self.add(&[&head(piece.len(), self.at), piece, &sums(piece)]);
        }
        if *piece != ZEROS {
            return self.add(&[&packed(piece)?]);
        }
        // Databases make their files larger ahead: such a piece is packed once.
        let member = match self.zeros.take() {
            Some(member) => member,
            None => packed(&ZEROS)?,
        };
        let added = self.add(&[&member]);
        self.zeros = Some(member);
        added
    }

    fn add(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        for part in parts {
            self.out.write_all(part)?;
            self.at = (self.at + part.len()) % UNIT;
        }
        self.has_begun = true;
        Ok(())
    }
}

impl<W: Write> Write for Storer<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.piece.is_empty()
            && let Some((piece, _)) = data.split_at_checked(PIECE)
        {
            self.store(piece)?;
            return Ok(PIECE);
        }
        let part = &data[..data.len().min(PIECE - self.piece.len())];
        self.piece.extend_from_slice(part);
        if self.piece.len() == PIECE {
            let piece = std::mem::take(&mut self.piece);
            self.store(&piece)?;
            self.piece = piece;
            self.piece.clear();
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn packed(piece: &[u8]) -> io::Result<Vec<u8>> {
    let mut member = GzEncoder::new(Vec::new(), Compression::fast());
    member.write_all(piece)?;
    member.finish()
}

/// What is before a piece of `len` bytes in a member, which begins `at` bytes behind the start of a unit and fills itself
/// up so that its data begins one.
fn head(len: usize, at: usize) -> Vec<u8> {
    let fill = (UNIT - (at + DATA) % UNIT) % UNIT;
    let len = u16::try_from(len).unwrap_or(u16::MAX);
    let [fill_len, extra_len] = [fill, fill + 4].map(|len| u16::try_from(len).unwrap_or(0));
    let mut head = Vec::with_capacity(DATA + fill);
    head.extend(HEAD);
    head.extend(extra_len.to_le_bytes());
    head.extend(FILL);
    head.extend(fill_len.to_le_bytes());
    head.resize(head.len() + fill, 0);
    head.push(1);
    head.extend(len.to_le_bytes());
    head.extend((!len).to_le_bytes());
    head
}

/// What is behind a piece in its member.
fn sums(piece: &[u8]) -> Vec<u8> {
    let mut sum = Crc::new();
    sum.update(piece);
    [sum.sum(), sum.amount()].map(u32::to_le_bytes).concat()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;

    use flate2::read::MultiGzDecoder;

    use super::*;

    /// Bytes that are different in each unit.
    fn counted(from: usize, units: usize) -> Vec<u8> {
        (from..from + units)
            .flat_map(|unit| {
                let mut bytes = [0x5a; UNIT];
                bytes[..8].copy_from_slice(&unit.to_le_bytes());
                bytes
            })
            .collect()
    }

    fn whole(stream: &[u8], at_once: usize) -> Vec<u8> {
        let mut storer = Storer::new(Vec::new());
        stream.chunks(at_once).for_each(|part| storer.write_all(part).unwrap());
        storer.finish().unwrap()
    }

    /// Whatever comes after what, and however it is written; gzip(1) knows it as well.
    #[test]
    fn what_is_stored_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let zeros = vec![0; 3 * PIECE];
        let long = [counted(1, 300), zeros, counted(7, 200), vec![b'x'; 17]].concat();
        for stream in [Vec::new(), vec![b'x'; 10], vec![b'x'; PIECE], long] {
            let once = whole(&stream, stream.len().max(1));
            assert_eq!(whole(&stream, 10_007), once, "the same stream gives the same bytes");
            let mut back = Vec::new();
            MultiGzDecoder::new(&*once).read_to_end(&mut back).unwrap();
            assert!(back == stream);
            let path = dir.path().join("it.gz");
            std::fs::write(&path, &once).unwrap();
            let output = std::process::Command::new("gzip").arg("-dc").arg(path).output().unwrap();
            assert!(output.status.success() && output.stdout == stream);
        }
        assert!(whole(&vec![0; 100 * PIECE], PIECE).len() < 2 * PIECE, "zeros take no room");
        let small = [counted(1, 5), vec![0; 200 * UNIT]].concat();
        assert!(whole(&small, PIECE).len() < 5 * UNIT, "nor does an archive of little");
    }

    /// What is equal in two streams can be found at multiples of a unit, also behind zeros and something that has come in between.
    #[test]
    fn what_is_equal_is_found() {
        let (first, second) = (counted(0, 500), counted(1000, 500));
        let before = whole(&[&first[..], &second].concat(), PIECE);
        let between = [counted(2000, 3), vec![0; 2 * PIECE]].concat();
        let after = whole(&[&first[..], &between, &second].concat(), PIECE);
        let units: std::collections::HashSet<&[u8]> = before.chunks(UNIT).collect();
        let found = after.chunks(UNIT).filter(|unit| units.contains(unit)).count();
        assert!(found >= 1000 - 20, "{found}");
    }
}
