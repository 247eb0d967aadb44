//! Packs a stream for gzip(1), as fast as it can be while tasks are frozen: what cannot be packed is stored as it is.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

/// What is packed, or stored, at once. It is a matter of the stream alone: a restore in rounds compares archives.
const BLOCK: usize = 256 << 10;
/// How much of a block is packed to see whether it is worth it.
const PROBE: usize = 8 << 10;
/// The lowest level that leaves as it is what cannot be packed; that below it makes that larger.
const PACK: Compression = Compression::new(2);
/// Random bytes are packed at 50 MB a second, and stored at 500 (zlib-rs on one core of 2026).
const STORE: Compression = Compression::none();

/// A stream of members (RFC 1952), which are packed or stored. There is neither a name nor a time in them.
pub(super) struct Packer<W: Write> {
    /// What is written to, as long as no member is open.
    out: Option<W>,
    member: Option<(Compression, GzEncoder<W>)>,
    block: Vec<u8>,
}

impl<W: Write> Packer<W> {
    /// Packs to `out`.
    pub(super) fn new(out: W) -> Self {
        Packer { out: Some(out), member: None, block: Vec::with_capacity(BLOCK) }
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// Those of what it writes to.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.pack_block()?;
        if self.member.is_none() {
            // A stream has one member at least.
            self.begin(PACK)?;
        }
        self.end_member()?;
        self.out.ok_or_else(|| io::Error::other("nothing to write to"))
    }

    fn pack_block(&mut self) -> io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        let how = if shrinks(&self.block)? { PACK } else { STORE };
        if self.member.as_ref().is_none_or(|(now, _)| *now != how) {
            self.end_member()?;
            self.begin(how)?;
        }
        if let Some((_, member)) = &mut self.member {
            member.write_all(&self.block)?;
        }
        self.block.clear();
        Ok(())
    }

    fn begin(&mut self, how: Compression) -> io::Result<()> {
        let out = self.out.take().ok_or_else(|| io::Error::other("nothing to write to"))?;
        self.member = Some((how, GzEncoder::new(out, how)));
        Ok(())
    }

    fn end_member(&mut self) -> io::Result<()> {
        if let Some((_, member)) = self.member.take() {
            self.out = Some(member.finish()?);
        }
        Ok(())
    }
}

impl<W: Write> Write for Packer<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let part = &data[..data.len().min(BLOCK - self.block.len())];
        self.block.extend_from_slice(part);
        if self.block.len() == BLOCK {
            self.pack_block()?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether packing makes it smaller by a tenth at least, going by a piece from its middle.
fn shrinks(block: &[u8]) -> io::Result<bool> {
    let from = (block.len() / 2).saturating_sub(PROBE / 2);
    let piece = &block[from..block.len().min(from + PROBE)];
    let mut probe = GzEncoder::new(Vec::with_capacity(PROBE), PACK);
    probe.write_all(piece)?;
    Ok(probe.finish()?.len() < piece.len() - piece.len() / 10)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::io::Read;

    use flate2::read::MultiGzDecoder;

    use super::*;

    fn packed(stream: &[u8], at_once: usize) -> Vec<u8> {
        let mut packer = Packer::new(Vec::new());
        stream.chunks(at_once).for_each(|part| packer.write_all(part).unwrap());
        packer.finish().unwrap()
    }

    fn random(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whatever it is that comes after what, and however it is written.
    #[test]
    fn what_is_packed_and_what_is_stored_come_back() {
        let blocks = [vec![b'a'; BLOCK], random(BLOCK), random(BLOCK), vec![0; BLOCK], random(17)];
        let stream = blocks.concat();
        let once = packed(&stream, stream.len());
        assert_eq!(packed(&stream, 10_007), once, "the same stream gives the same bytes");
        let mut back = Vec::new();
        MultiGzDecoder::new(&*once).read_to_end(&mut back).unwrap();
        assert!(back == stream);
        let stored = 2 * BLOCK + 17;
        assert!(once.len() > stored && once.len() < stored + BLOCK / 20, "{}", once.len());
    }

    /// Other programs know it.
    #[test]
    fn gzip_unpacks_it() {
        let dir = tempfile::tempdir().unwrap();
        for stream in [Vec::new(), vec![b'x'; 10], [random(BLOCK), vec![1; BLOCK]].concat()] {
            let path = dir.path().join("it.gz");
            std::fs::write(&path, packed(&stream, 4096)).unwrap();
            let output = std::process::Command::new("gzip").arg("-dc").arg(path).output().unwrap();
            assert!(output.status.success() && output.stdout == stream);
        }
    }
}
