//! Entries and streams: everything in a checkpoint that is not memory.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `TORPDATA` |
//! | 16 | salt: random, so that each writing of a file has a key of its own |
//! | | records: length, at most 64 KiB, and whether it is packed (4 bytes), cipher text, tag (16) |
//! | 36 | the final record: `ff ff ff ff`, number of records and of plain bytes (8 each), tag |
//!
//! The plain text is the plain image file, magic numbers and all. Each entry begins a
//! record, and a record ends with each entry. The record of an entry is packed where that is
//! smaller: entries are full of zeros, and what they save pays for the tags. Data that tasks
//! have written (queues, files) is never packed, because sizes would tell of it. What is
//! sealed then is the length of the plain text less one (2 bytes), and an LZ4 block. The nonce of a record is its number (8
//! bytes) behind its kind (4): data or final. The key is this file's alone, so neither
//! a record of another file nor one at another place opens, and the final record, which
//! is checked first, tells how many there must be.

use std::io::{self, Read, Seek, SeekFrom, Write};

use aws_lc_rs::aead::{
    AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use aws_lc_rs::digest;
use lz4::block;
use zeroize::Zeroizing;

use crate::error::{Error, Result};
use crate::header::RecordCipher;
use crate::kdf::Keys;
use crate::manifest::Sum;
use crate::secret::{Secret, random};

/// What a sealed file begins with.
pub const MAGIC: &[u8; 8] = b"TORPDATA";
/// The largest piece that is sealed at once, in bytes.
pub const RECORD: usize = 64 << 10;

const SALT: usize = 16;
const HEAD: usize = MAGIC.len() + SALT;
const TAG: usize = 16;
const FINAL: usize = 4 + 16 + TAG;
/// How much room there is for a record at first: most files are small, and all of it is made
/// zeros in the end, byte by byte.
const ROOM: usize = 4 << 10;
/// The bit beside the length of a record that is packed.
const PACKED: u32 = 1 << 30;
/// What stands in the final record where others have their length.
const FINAL_MARK: u32 = u32::MAX;

/// The kinds of records, the first part of their nonces.
#[derive(Clone, Copy)]
enum RecordKind {
    Data = 0,
    Final = 1,
}

fn nonce(kind: RecordKind, number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

pub(crate) fn aead(cipher: RecordCipher, key: &Secret) -> Result<LessSafeKey> {
    let algorithm = match cipher {
        RecordCipher::Aes256Gcm => &AES_256_GCM,
        RecordCipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
    };
    let key = UnboundKey::new(algorithm, key.expose()).map_err(|_| Error::Crypto("using a key"))?;
    Ok(LessSafeKey::new(key))
}

fn file_key(keys: &Keys, cipher: RecordCipher, name: &str, salt: &[u8]) -> Result<LessSafeKey> {
    aead(cipher, &keys.derive("records", name, salt)?)
}

/// What a record of `plain` holds if it is packed; none if that is not smaller.
fn pack(plain: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let last = u16::try_from(plain.len().checked_sub(1)?).ok()?;
    let mut packed = Zeroizing::new(vec![0; plain.len() - 1]);
    let (head, block) = packed.split_first_chunk_mut()?;
    *head = last.to_le_bytes();
    // What has no room for itself has not become smaller.
    let len = block::compress_to_buffer(plain, None, false, block).ok()?;
    let len = head.len() + len;
    packed.truncate(len);
    Some(packed)
}

/// Undoes [`pack`]; none if it was something else.
fn unpack(packed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (last, block) = packed.split_first_chunk()?;
    let len = i32::from(u16::from_le_bytes(*last)) + 1;
    let mut plain = Zeroizing::new(vec![0; usize::try_from(len).ok()?]);
    let found = block::decompress_to_buffer(block, Some(len), &mut plain).ok()?;
    (found == plain.len()).then_some(plain)
}

/// Whether a file that begins with `word`, four bytes or more, is a sealed one.
#[must_use]
pub fn is_sealed(word: &[u8]) -> bool {
    word.len() >= 4 && MAGIC.starts_with(&word[..word.len().min(MAGIC.len())])
}

/// Seals what is written to it.
pub struct RecordWriter<W> {
    out: W,
    key: LessSafeKey,
    /// Never grows by itself: a vector that does leaves what it held behind in memory.
    buffer: Zeroizing<Vec<u8>>,
    records: u64,
    plain: u64,
    written: u64,
    digest: digest::Context,
}

impl<W> std::fmt::Debug for RecordWriter<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordWriter({} records, {} bytes)", self.records, self.plain)
    }
}

impl<W: Write> RecordWriter<W> {
    /// Starts the file `name` in `out`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(keys: &Keys, cipher: RecordCipher, name: &str, out: W) -> Result<Self> {
        Self::with_salt(keys, cipher, name, out, random()?)
    }

    fn with_salt(
        keys: &Keys,
        cipher: RecordCipher,
        name: &str,
        out: W,
        salt: [u8; SALT],
    ) -> Result<Self> {
        let mut writer = Self {
            out,
            key: file_key(keys, cipher, name, &salt)?,
            buffer: Zeroizing::new(Vec::with_capacity(ROOM)),
            records: 0,
            plain: 0,
            written: 0,
            digest: digest::Context::new(&digest::SHA256),
        };
        writer.put(MAGIC)?;
        writer.put(&salt)?;
        Ok(writer)
    }

    /// Ends the record: what comes next is sealed by itself.
    ///
    /// # Errors
    /// If the file cannot be read or written, as the kernel says.
    pub fn end_record(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let mut record = std::mem::take(&mut self.buffer);
        let done = self.record(0, record.len(), &mut record);
        record.clear();
        self.buffer = record;
        done
    }

    /// Ends the record like [`Self::end_record`], packed if that makes it smaller.
    ///
    /// # Errors
    /// If the file cannot be read or written, as the kernel says.
    pub fn end_entry(&mut self) -> io::Result<()> {
        match pack(&self.buffer) {
            None => self.end_record(),
            Some(mut packed) => {
                let plain = self.buffer.len();
                self.buffer.clear();
                self.record(PACKED, plain, &mut packed)
            }
        }
    }

    /// Seals `stored`, which holds `plain` bytes.
    fn record(&mut self, mark: u32, plain: usize, stored: &mut [u8]) -> io::Result<()> {
        let len = u32::try_from(stored.len()).map_err(io::Error::other)?;
        let number = self.records;
        self.records += 1;
        self.plain += plain as u64;
        self.seal(RecordKind::Data, number, len | mark, stored)
    }

    /// Writes the final record.
    ///
    /// # Errors
    /// If the file cannot be read or written, as the kernel says.
    pub fn finish(mut self) -> io::Result<(W, Sum)> {
        self.end_record()?;
        let mut end = [self.records.to_le_bytes(), self.plain.to_le_bytes()].concat();
        self.seal(RecordKind::Final, 0, FINAL_MARK, &mut end)?;
        self.out.flush()?;
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(self.digest.finish().as_ref());
        Ok((self.out, Sum { len: self.written, sha256: Some(sha256) }))
    }

    fn seal(
        &mut self,
        kind: RecordKind,
        number: u64,
        head: u32,
        data: &mut [u8],
    ) -> io::Result<()> {
        let head = head.to_le_bytes();
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(kind, number), Aad::from(head), data)
            .map_err(|_| io::Error::other("sealing failed"))?;
        self.put(&head)?;
        self.put(data)?;
        self.put(tag.as_ref())
    }

    fn make_room(&mut self, len: usize) {
        if len > self.buffer.capacity() {
            let mut larger = Zeroizing::new(Vec::with_capacity(RECORD));
            larger.extend_from_slice(&self.buffer);
            self.buffer = larger;
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.update(bytes);
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }
}

impl<W: Write> Write for RecordWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.buffer.len() == RECORD {
            self.end_record()?;
        }
        let count = data.len().min(RECORD - self.buffer.len());
        self.make_room(self.buffer.len() + count);
        self.buffer.extend_from_slice(&data[..count]);
        Ok(count)
    }

    /// Does not end the record; see [`RecordWriter::end_record`].
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Opens what a [`RecordWriter`] wrote.
pub struct RecordReader<R> {
    source: R,
    key: LessSafeKey,
    name: String,
    /// Plain bytes of the current record, and how many of them were read.
    buffer: Zeroizing<Vec<u8>>,
    at: usize,
    /// Records opened, their bytes in the file, and their plain bytes.
    records: u64,
    stored: u64,
    plain: u64,
    end: End,
}

/// What the final record says, and how many bytes the records before it have.
#[derive(Clone, Copy)]
struct End {
    records: u64,
    plain: u64,
    stored: u64,
}

impl<R> std::fmt::Debug for RecordReader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordReader({}, record {} of {})", self.name, self.records, self.end.records)
    }
}

impl<R: Read + Seek> RecordReader<R> {
    /// Begins to read the file `name`, which must be at its start.
    ///
    /// # Errors
    /// If it is no sealed file, another file of the checkpoint, or was cut.
    pub fn new(keys: &Keys, cipher: RecordCipher, name: &str, mut source: R) -> Result<Self> {
        let damaged = |reason: &str| Error::damaged(name, reason);
        let len = source.seek(SeekFrom::End(0))?;
        let stored = len.checked_sub((HEAD + FINAL) as u64);
        let stored = stored.ok_or_else(|| damaged("is too short for a sealed file"))?;
        source.seek(SeekFrom::Start(0))?;
        let mut head = [0; HEAD];
        source.read_exact(&mut head)?;
        let (magic, salt) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(damaged("is not sealed, as the other files of the checkpoint are"));
        }
        let key = file_key(keys, cipher, name, salt)?;
        source.seek(SeekFrom::Start(HEAD as u64 + stored))?;
        let mut last = [0; FINAL];
        source.read_exact(&mut last)?;
        let Some(Totals { records, plain }) = Totals::open(&key, &mut last) else {
            return Err(damaged("was changed or cut off: its final record does not open"));
        };
        if (records == 0) != (stored == 0) || (records == 0) != (plain == 0) {
            return Err(damaged("has another length than its final record says"));
        }
        source.seek(SeekFrom::Start(HEAD as u64))?;
        Ok(Self {
            source,
            key,
            name: name.to_owned(),
            buffer: Zeroizing::new(Vec::new()),
            at: 0,
            records: 0,
            stored: 0,
            plain: 0,
            end: End { records, plain, stored },
        })
    }

    /// How many bytes the plain file has.
    #[must_use]
    pub fn plain_len(&self) -> u64 {
        self.end.plain
    }

    /// Opens the next record. The last one is not handed out before it is certain that
    /// it is the last.
    fn next_record(&mut self) -> Result<()> {
        let changed = |reason: &str| Error::damaged(&self.name, reason.to_owned());
        let mut head = [0; 4];
        self.source.read_exact(&mut head)?;
        let word = u32::from_le_bytes(head);
        let len = (word & !PACKED) as usize;
        if len == 0 || len > RECORD {
            return Err(changed("was changed: a record has an impossible length"));
        }
        let mut data = std::mem::take(&mut self.buffer);
        data.resize(len + TAG, 0);
        self.source.read_exact(&mut data)?;
        let nonce = nonce(RecordKind::Data, self.records);
        if self.key.open_in_place(nonce, Aad::from(head), &mut data).is_err() {
            let reason = format!("was changed: record {} does not open", self.records);
            return Err(changed(&reason));
        }
        data.truncate(len);
        if word & PACKED != 0 {
            data = unpack(&data).ok_or_else(|| changed("holds a record that does not unpack"))?;
        }
        let stored = self.stored + (4 + len + TAG) as u64;
        let plain = self.plain + data.len() as u64;
        let (records, end) = (self.records + 1, self.end);
        let last = records == end.records;
        let fits = (plain == end.plain) == last && (stored == end.stored) == last;
        if !fits || records > end.records || plain > end.plain {
            return Err(changed("has another length than its final record says"));
        }
        (self.records, self.stored, self.plain) = (records, stored, plain);
        (self.buffer, self.at) = (data, 0);
        Ok(())
    }
}

struct Totals {
    records: u64,
    plain: u64,
}

impl Totals {
    fn open(key: &LessSafeKey, last: &mut [u8; FINAL]) -> Option<Self> {
        let (head, body) = last.split_first_chunk_mut::<4>()?;
        if *head != FINAL_MARK.to_le_bytes() {
            return None;
        }
        let plain = key.open_in_place(nonce(RecordKind::Final, 0), Aad::from(*head), body).ok()?;
        let ([records, plain, ..], _) = plain.as_chunks::<8>() else { return None };
        Some(Self { records: u64::from_le_bytes(*records), plain: u64::from_le_bytes(*plain) })
    }
}

impl<R: Read + Seek> Read for RecordReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.buffer.len() {
            if self.records == self.end.records {
                return Ok(0);
            }
            self.next_record().map_err(|error| match error {
                Error::Io(error) => error,
                other => io::Error::new(io::ErrorKind::InvalidData, other),
            })?;
        }
        let count = out.len().min(self.buffer.len() - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Cursor;

    use super::*;
    use crate::header::Suite;

    /// Computed with Python's cryptography from the description of the format.
    #[test]
    fn known_answers() {
        let answers = [
            (
                RecordCipher::Aes256Gcm,
                "544f5250444154410303030303030303030303030303030305000000d615875c80850e75606a874d359887279f7c77c9ca0600000081eb1e8252985b61c16bf7d824f87811935c8d626ffaffffffff8081bfffea692ddd434d5386d9e46948b3a2253f97a351d26b971d4debcad7c7",
            ),
            (
                RecordCipher::ChaCha20Poly1305,
                "544f5250444154410303030303030303030303030303030305000000731b3f5b366502c8f5fe9d0d4a0a8f5d7399ee95a7060000001254bc44a03055712923fd5c8db43711de66725946c1fffffffff4e6f3436163470049b949240089cde9efc2b2999b38a5611922fdce394b4d84",
            ),
        ];
        for (cipher, hex) in answers {
            let keys = Keys::new(&Secret::take(&mut [1; 32]), &[2; 32], Suite::Aes256Gcm);
            let name = "core-1.img";
            let mut writer =
                RecordWriter::with_salt(&keys, cipher, name, Vec::new(), [3; SALT]).unwrap();
            writer.write_all(b"hello").unwrap();
            writer.end_record().unwrap();
            writer.write_all(b" there").unwrap();
            let (file, sum) = writer.finish().unwrap();
            let found: String = file.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, hex);
            assert_eq!(sum, Sum::of(file.as_slice()).unwrap());
            let mut text = String::new();
            let mut reader = RecordReader::new(&keys, cipher, name, Cursor::new(file)).unwrap();
            reader.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello there");
        }
    }

    /// An entry of 64 zeros, packed by hand.
    #[test]
    fn known_answers_packed() {
        let answers = [
            (
                RecordCipher::Aes256Gcm,
                "544f525044415441030303030303030303030303030303030d0000408170f430ee4d4a6c1caf7ff5a5316375970466f706684c003dc3a105aeffffffff8381bfffea692ddd084d5386d9e46948f4cfd21cd8603529fd38b35e0439e437",
            ),
            (
                RecordCipher::ChaCha20Poly1305,
                "544f525044415441030303030303030303030303030303030d000040247e4c3758e75890396138710343d5d738919c630e84c323ad1e077cb7fffffffff7e6f3436163470002b949240089cde90e534ac8fe73540af487bde2dcbd2f25",
            ),
        ];
        for (cipher, hex) in answers {
            let keys = Keys::new(&Secret::take(&mut [1; 32]), &[2; 32], Suite::Aes256Gcm);
            let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            let file: Vec<u8> = (0..hex.len()).step_by(2).map(digit).collect();
            let mut reader =
                RecordReader::new(&keys, cipher, "core-1.img", Cursor::new(file)).unwrap();
            let mut entry = Vec::new();
            reader.read_to_end(&mut entry).unwrap();
            assert_eq!(entry, [0; 64]);
        }
    }

    #[test]
    fn what_was_packed_comes_back() {
        for len in [5, 64, RECORD - 1, RECORD] {
            let plain = vec![0; len];
            let packed = pack(&plain);
            assert_eq!(packed.is_some(), len > 5, "{len}");
            let Some(packed) = packed else { continue };
            assert!(packed.len() < len.div_ceil(2));
            assert_eq!(*unpack(&packed).unwrap(), plain);
            // Neither more nor less comes out than it says.
            for wrong in [-1, 1] {
                let mut changed = packed.clone();
                let last = u16::from_le_bytes([packed[0], packed[1]]).wrapping_add_signed(wrong);
                changed[..2].copy_from_slice(&last.to_le_bytes());
                assert!(unpack(&changed).is_none(), "{len}, {wrong}");
            }
        }
        assert!(unpack(&[]).is_none());
        assert!(unpack(&[1, 0]).is_none());
        assert!(pack(&[]).is_none());
    }

    #[test]
    fn nonces_differ() {
        let mut seen = std::collections::HashSet::new();
        for number in 0..1000 {
            assert!(seen.insert(*nonce(RecordKind::Data, number).as_ref()));
        }
        assert!(seen.insert(*nonce(RecordKind::Final, 0).as_ref()));
    }
}
