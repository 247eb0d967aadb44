//! Files with holes: where their data belongs.

use super::entry::Stretch;
use super::field::{BLOCK, Result, number};
use super::pax::Sparse;

/// No file has more stretches of data.
pub(super) const MAX_STRETCHES: usize = 1 << 20;

/// A map that is being read.
#[derive(Debug, Default)]
pub(super) struct Map {
    stretches: Vec<Stretch>,
    size: u64,
    goes_on: bool,
}

impl Map {
    /// The one of the format gnu: it begins in the header of the file.
    pub(super) fn old(header: &[u8; BLOCK]) -> Result<Self> {
        let mut map = Map { size: number(&header[483..495])?, ..Map::default() };
        map.fields(&header[386..482])?;
        map.goes_on = header[482] != 0;
        Ok(map)
    }

    /// Whether a further block of the map follows.
    pub(super) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Such a block.
    pub(super) fn more(&mut self, block: &[u8; BLOCK]) -> Result<()> {
        self.fields(&block[..504])?;
        self.goes_on = block[504] != 0;
        Ok(())
    }

    fn fields(&mut self, fields: &[u8]) -> Result<()> {
        for field in fields.chunks_exact(24) {
            if field.iter().all(|&b| b == 0) {
                continue;
            }
            self.push(number(&field[..12])?, number(&field[12..])?)?;
        }
        Ok(())
    }

    /// The one of the format posix: lines with numbers before the data, which it counts
    /// as. `read` reads of them, as [`Archive::read`](super::Archive::read) does.
    pub(super) fn new(
        mut read: impl FnMut(&mut [u8]) -> Result<usize>,
        sparse: &Sparse,
    ) -> Result<Self> {
        let (Some(1), Some(0), Some(size), Some(_)) =
            (sparse.major, sparse.minor, sparse.size, &sparse.name)
        else {
            return Err("a file with holes in a form that is not known".to_owned());
        };
        let mut map = Map { size, ..Map::default() };
        let mut lines = Lines { block: [0; BLOCK], used: BLOCK };
        let count = lines.number(&mut read)?;
        for _ in 0..count {
            let at = lines.number(&mut read)?;
            map.push(at, lines.number(&mut read)?)?;
        }
        match lines.block[lines.used..].iter().all(|&b| b == 0) {
            true => Ok(map),
            false => Err("a map of holes that goes on behind its end".to_owned()),
        }
    }

    fn push(&mut self, at: u64, len: u64) -> Result<()> {
        if self.stretches.len() >= MAX_STRETCHES {
            return Err("a file with too many holes".to_owned());
        }
        self.stretches.push(Stretch { at, len });
        Ok(())
    }

    /// The file's length and its data, of which `data` bytes are in the archive.
    pub(super) fn finish(self, data: u64) -> Result<(u64, Vec<Stretch>)> {
        let (mut end, mut sum) = (0_u64, 0_u64);
        for stretch in &self.stretches {
            let next = stretch.at.checked_add(stretch.len);
            match next.filter(|&next| stretch.at >= end && next <= self.size) {
                Some(next) => end = next,
                None => return Err("a map of holes that is in disorder".to_owned()),
            }
            sum += stretch.len;
        }
        match sum == data {
            true => Ok((self.size, self.stretches)),
            false => {
                Err(format!("a map of holes for {sum} bytes of data, of which there are {data}"))
            }
        }
    }
}

/// Lines of digits in blocks.
struct Lines {
    block: [u8; BLOCK],
    used: usize,
}

impl Lines {
    fn number(&mut self, read: &mut impl FnMut(&mut [u8]) -> Result<usize>) -> Result<u64> {
        let wrong = || "a map of holes that is none".to_owned();
        let mut number: Option<u64> = None;
        loop {
            if self.used == BLOCK {
                if read(&mut self.block)? != BLOCK {
                    return Err(wrong());
                }
                self.used = 0;
            }
            let byte = self.block[self.used];
            self.used += 1;
            match (byte, number) {
                (b'\n', Some(number)) => return Ok(number),
                (b'0'..=b'9', so_far) => {
                    let tens = so_far.unwrap_or(0).checked_mul(10);
                    let sum = tens.and_then(|n| n.checked_add(u64::from(byte - b'0')));
                    number = Some(sum.ok_or_else(wrong)?);
                }
                _ => return Err(wrong()),
            }
        }
    }
}
