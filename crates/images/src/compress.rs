//! Compressing and decompressing clusters of pages.
//!
//! Whoever decompresses says how many bytes must come out, and gives room for just these: a
//! hostile cluster cannot make more of it. What goes in is as hostile, since tasks write
//! their memory as they like.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use lz4::block::{self, CompressionMode};
use zstd::bulk;

/// How memory is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// LZ4, with its level: one below zero is how hasty it is, one above how thorough.
    Lz4(i32),
    /// Zstandard, with its level.
    Zstd(i32),
}

/// The levels that are of use for memory: beyond them it takes more time or memory and gains
/// nothing in clusters of this size.
const LZ4_LEVELS: RangeInclusive<i32> = -64..=12;
const ZSTD_LEVELS: RangeInclusive<i32> = -7..=19;

impl Compression {
    /// LZ4 as it is used if nobody asks for a level: a quarter faster than it could be at most
    /// for a fiftieth of what it saves.
    pub const LZ4: Self = Self::Lz4(-4);

    /// Zstandard as it is used if nobody asks for a level: higher ones take much longer for
    /// little.
    pub const ZSTD: Self = Self::Zstd(1);

    /// The method's number in an index, and on the wire; none is 0.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Lz4(_) => 1,
            Self::Zstd(_) => 2,
        }
    }

    /// The method with this number.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        [Self::LZ4, Self::ZSTD].into_iter().find(|method| method.number() == number)
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lz4(level) => write!(f, "lz4:{level}"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let (method, levels, default): (fn(i32) -> Self, _, _) = match name {
            "lz4" => (Self::Lz4, LZ4_LEVELS, Self::LZ4),
            "zstd" => (Self::Zstd, ZSTD_LEVELS, Self::ZSTD),
            _ => return Err("expected lz4 or zstd, with a level or without".to_owned()),
        };
        let Some(level) = level else { return Ok(default) };
        let level = level.parse().ok().filter(|level| levels.contains(level));
        let [low, high] = [levels.start(), levels.end()];
        level.map(method).ok_or(format!("the level is none from {low} to {high}"))
    }
}

/// Compresses, again and again with the same tables.
#[derive(Default)]
pub(crate) struct Compressor {
    zstd: Option<(i32, bulk::Compressor<'static>)>,
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compressor")
    }
}

/// How many bytes of room compressing `len` bytes needs at most.
pub(crate) fn room(len: usize) -> usize {
    block::compress_bound(len).unwrap_or(0).max(zstd::zstd_safe::compress_bound(len))
}

impl Compressor {
    /// Compresses `plain` into `out`, which has [`room`]; returns how many bytes that gave.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn compress(
        &mut self,
        how: Compression,
        plain: &[u8],
        out: &mut [u8],
    ) -> std::io::Result<usize> {
        match how {
            Compression::Lz4(level) => {
                let mode = match level {
                    1.. => CompressionMode::HIGHCOMPRESSION(level),
                    _ => CompressionMode::FAST(level.saturating_neg()),
                };
                block::compress_to_buffer(plain, Some(mode), false, out)
            }
            Compression::Zstd(level) => {
                let zstd = match &mut self.zstd {
                    Some((known, zstd)) if *known == level => zstd,
                    none => &mut none.insert((level, bulk::Compressor::new(level)?)).1,
                };
                zstd.compress_to_buffer(plain, out)
            }
        }
    }
}

/// Decompresses, again and again with the same tables.
#[derive(Default)]
pub struct Decompressor {
    zstd: Option<bulk::Decompressor<'static>>,
}

impl fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decompressor")
    }
}

impl Decompressor {
    /// Decompresses `stored`, which must give as many bytes as `plain` holds.
    ///
    /// # Errors
    /// If `stored` is no such data, or gives more or fewer bytes.
    pub fn decompress(
        &mut self,
        how: Compression,
        stored: &[u8],
        plain: &mut [u8],
    ) -> Result<(), String> {
        let len = match how {
            Compression::Lz4(_) => {
                let len = i32::try_from(plain.len()).map_err(|e| e.to_string())?;
                block::decompress_to_buffer(stored, Some(len), plain).map_err(|e| e.to_string())?
            }
            Compression::Zstd(_) => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(bulk::Decompressor::new().map_err(|e| e.to_string())?),
                };
                zstd.decompress_to_buffer(stored, plain).map_err(|e| e.to_string())?
            }
        };
        if len == plain.len() {
            return Ok(());
        }
        Err(format!("gives {len} bytes instead of {}", plain.len()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ways_have_names() {
        for (text, how) in [
            ("lz4:-4", Compression::LZ4),
            ("lz4:-64", Compression::Lz4(-64)),
            ("lz4:12", Compression::Lz4(12)),
            ("zstd:1", Compression::ZSTD),
            ("zstd:-7", Compression::Zstd(-7)),
            ("zstd:19", Compression::Zstd(19)),
        ] {
            assert_eq!(text.parse(), Ok(how));
            assert_eq!(how.to_string(), text);
        }
        assert_eq!("lz4".parse(), Ok(Compression::LZ4));
        assert_eq!("zstd".parse(), Ok(Compression::ZSTD));
        for wrong in
            ["", "lz4:13", "lz4:-65", "zstd:", "zstd:20", "zstd:-8", "zstd:x", "gzip", "LZ4"]
        {
            assert!(wrong.parse::<Compression>().is_err(), "{wrong}");
        }
    }

    fn data() -> impl Strategy<Value = Vec<u8>> {
        let part = (any::<u8>(), 1..200usize, any::<bool>());
        proptest::collection::vec(part, 0..60).prop_map(|parts| {
            let fill = |(byte, len, same): (u8, usize, bool)| {
                (0..len).map(move |i| if same { byte } else { byte ^ (i * i).to_le_bytes()[0] })
            };
            parts.into_iter().flat_map(fill).collect()
        })
    }

    proptest! {
        #[test]
        fn what_was_compressed_comes_back(data in data(), zstd in any::<bool>()) {
            let how = if zstd { Compression::Zstd(3) } else { Compression::LZ4 };
            let mut stored = vec![0; room(data.len())];
            let len = Compressor::default().compress(how, &data, &mut stored).unwrap();
            let mut plain = vec![0; data.len()];
            Decompressor::default().decompress(how, &stored[..len], &mut plain).unwrap();
            prop_assert_eq!(&plain, &data);
            // Neither less nor more comes out than there has to be.
            let mut long = vec![0; data.len() + 1];
            prop_assert!(Decompressor::default().decompress(how, &stored[..len], &mut long).is_err());
            if let Some(short) = data.len().checked_sub(1) {
                let plain = &mut plain[..short];
                prop_assert!(Decompressor::default().decompress(how, &stored[..len], plain).is_err());
            }
        }

        #[test]
        fn what_was_not_compressed_is_an_error_at_most(
            stored in proptest::collection::vec(any::<u8>(), 0..300),
            len in 0..5000usize,
            zstd in any::<bool>(),
        ) {
            let how = if zstd { Compression::ZSTD } else { Compression::LZ4 };
            let _ = Decompressor::default().decompress(how, &stored, &mut vec![0; len]);
        }
    }
}
