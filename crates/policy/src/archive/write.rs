//! What stands before the data of an entry: the half of [`Archive`](super::Archive) that writes. The same entry makes the
//! same bytes.
//!
//! It is the format posix of tar(1) (pax(1)), with records for what a header has no room for, with attributes as tar writes
//! them, and with maps of holes of its version 1.0.

use super::MAX_HEADER;
use super::entry::{Entry, Make, Stretch};
use super::field::{BLOCK, Result};
use super::list::LISTS;
use super::pax::{ATTRIBUTE, escaped};
use super::sparse::MAX_STRETCHES;

/// How an archive ends.
pub const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// The name of an entry that has records. Only a program that does not know the format makes such a file.
const RECORDS: &[u8] = b"./PaxHeaders";
/// The directory that a file with holes is in for a program that does not know maps: between the file's own and its name.
const WITH_HOLES: &[u8] = b"GNUSparseFile.0/";

/// The zeros that fill up the last block of so many bytes of data.
#[must_use]
pub fn padding(len: u64) -> &'static [u8] {
    let used = usize::try_from(len % BLOCK as u64).unwrap_or(0);
    &END[..(BLOCK - used) % BLOCK]
}

impl Entry {
    /// What stands before its data, which is that of its stretches, with [`padding`] behind its [`data_len`](Self::data_len)
    /// bytes. To tar(1) a file with holes is as long as its last stretch says, which may be empty.
    ///
    /// # Errors
    /// More attributes or holes than the reader takes.
    pub fn header(&self) -> Result<Vec<u8>> {
        let path = self.shown_path();
        let mut header = Header::new(self.kind(), &path);
        let map = self.map(&path, &mut header)?;
        header.number(124..136, "size", map.len() as u64 + self.data_len());
        header.number(100..108, "mode", self.mode.into());
        header.number(108..116, "uid", self.uid.into());
        header.number(116..124, "gid", self.gid.into());
        header.time(self.modified);
        match &self.make {
            Make::Link(target) => header.text(157..257, "linkpath", &[b"./", &target[..]].concat()),
            Make::Symlink(target) => header.text(157..257, "linkpath", target),
            Make::Device(device) => {
                header.number(329..337, "", device.major.unwrap_or_default().into());
                header.number(337..345, "", device.minor.unwrap_or_default().into());
            }
            Make::File { .. } | Make::Directory | Make::Fifo => {}
        }
        for (name, value) in &self.attributes {
            header.record(&[ATTRIBUTE, &escaped(name)].concat(), value);
        }
        for (name, list) in LISTS.iter().zip(&self.lists) {
            if let Some(value) = list.as_ref().and_then(|list| list.attribute(Some, Some)) {
                header.record(&[ATTRIBUTE, name.as_bytes()].concat(), &value);
            }
        }
        Ok([header.finish()?, map].concat())
    }

    /// How many bytes of data are behind its header.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        let Make::File { data, .. } = &self.make else { return 0 };
        data.iter().map(|stretch| stretch.len).fold(0, u64::saturating_add)
    }

    fn kind(&self) -> u8 {
        match &self.make {
            Make::File { .. } => b'0',
            Make::Link(_) => b'1',
            Make::Symlink(_) => b'2',
            Make::Device(device) if device.block => b'4',
            Make::Device(_) => b'3',
            Make::Directory => b'5',
            Make::Fifo => b'6',
        }
    }

    fn shown_path(&self) -> Vec<u8> {
        let slash: &[u8] = match self.make {
            Make::Directory if !self.path.is_empty() => b"/",
            _ => b"",
        };
        [b"./", &self.path[..], slash].concat()
    }

    /// The map of its holes, with which its data begins, and what the header says of it; nothing for a file without.
    fn map(&self, path: &[u8], header: &mut Header) -> Result<Vec<u8>> {
        let Make::File { size, data } = &self.make else { return Ok(Vec::new()) };
        if data[..] == [Stretch { at: 0, len: *size }] {
            return Ok(Vec::new());
        }
        if data.len() > MAX_STRETCHES {
            return Err(format!("a file with more than {MAX_STRETCHES} holes"));
        }
        let name = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        header.block[..100].fill(0);
        header.fill(0..100, &[&path[..name], WITH_HOLES, &path[name..]].concat());
        // The name that counts is this one.
        header.records.clear();
        for (key, value) in [("major", 1), ("minor", 0), ("realsize", *size)] {
            header.record(format!("GNU.sparse.{key}").as_bytes(), value.to_string().as_bytes());
        }
        header.record(b"GNU.sparse.name", path);
        let mut map = format!("{}\n", data.len());
        data.iter().for_each(|stretch| map += &format!("{}\n{}\n", stretch.at, stretch.len));
        let mut map = map.into_bytes();
        map.extend(padding(map.len() as u64));
        Ok(map)
    }
}

/// A header that is being written.
struct Header {
    block: [u8; BLOCK],
    /// What it has no room for.
    records: Vec<u8>,
}

impl Header {
    fn new(kind: u8, path: &[u8]) -> Self {
        let mut header = Header { block: [0; BLOCK], records: Vec::new() };
        header.block[156] = kind;
        header.block[257..265].copy_from_slice(b"ustar\x0000");
        header.text(0..100, "path", path);
        header
    }

    /// As much of a text as there is room for.
    fn fill(&mut self, field: std::ops::Range<usize>, text: &[u8]) {
        let field = &mut self.block[field];
        let len = text.len().min(field.len());
        field[..len].copy_from_slice(&text[..len]);
    }

    fn text(&mut self, field: std::ops::Range<usize>, key: &str, text: &[u8]) {
        if text.len() > field.len() {
            self.record(key.as_bytes(), text);
        }
        self.fill(field, text);
    }

    /// Octal digits, and a zero behind them.
    fn number(&mut self, field: std::ops::Range<usize>, key: &str, number: u64) {
        let width = field.len() - 1;
        let digits = format!("{number:0width$o}");
        if digits.len() > width {
            self.record(key.as_bytes(), number.to_string().as_bytes());
            self.fill(field, &b"00000000000"[..width]);
        } else {
            self.fill(field, digits.as_bytes());
        }
    }

    fn time(&mut self, (seconds, nanos): (i64, u32)) {
        /// One second more than a header has room for.
        const END: u64 = 1 << 33;
        let in_header = u64::try_from(seconds).ok().filter(|&seconds| seconds < END);
        self.number(136..148, "", in_header.unwrap_or_default());
        // What is before 1970 counts backwards.
        let (sign, whole, part) = match (seconds, nanos) {
            (..0, 1..) => {
                ("-", (seconds + 1).unsigned_abs(), 1_000_000_000_u32.saturating_sub(nanos))
            }
            (..0, 0) => ("-", seconds.unsigned_abs(), 0),
            _ => ("", seconds.unsigned_abs(), nanos),
        };
        if in_header.is_none() || part != 0 {
            self.record(b"mtime", format!("{sign}{whole}.{part:09}").as_bytes());
        }
    }

    /// Adds `LENGTH KEY=VALUE\n`: the length counts itself.
    fn record(&mut self, key: &[u8], value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut len = rest;
        while len != rest + len.to_string().len() {
            len = rest + len.to_string().len();
        }
        let len = format!("{len} ");
        for part in [len.as_bytes(), key, b"=", value, b"\n"] {
            self.records.extend_from_slice(part);
        }
    }

    /// The header, behind that of its records if it has some.
    fn finish(self) -> Result<Vec<u8>> {
        let block = with_sum(self.block);
        let len = self.records.len() as u64;
        if len == 0 {
            return Ok(block.to_vec());
        }
        if len > MAX_HEADER {
            return Err(format!("{len} bytes of attributes, and {MAX_HEADER} are the most"));
        }
        let mut first = Header::new(b'x', RECORDS);
        first.number(100..108, "", 0o644);
        first.number(124..136, "", len);
        first.time((0, 0));
        for field in [108..116, 116..124] {
            first.number(field, "", 0);
        }
        Ok([&with_sum(first.block)[..], &self.records, padding(len), &block].concat())
    }
}

fn with_sum(mut block: [u8; BLOCK]) -> [u8; BLOCK] {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::Archive;
    use super::super::list::AccessList;
    use super::super::tests::compressed;
    use super::*;
    use crate::device::Device;

    fn entry(path: &str, make: Make) -> Entry {
        let path = path.as_bytes().to_vec();
        let (attributes, lists) = (Vec::new(), [None, None]);
        Entry { path, make, mode: 0o644, uid: 1, gid: 2, modified: (3, 0), attributes, lists }
    }

    fn file(path: &str, size: u64, data: &[(u64, u64)]) -> Entry {
        let data = data.iter().map(|&(at, len)| Stretch { at, len }).collect();
        entry(path, Make::File { size, data })
    }

    /// An archive of entries whose data is zeros.
    fn archive(entries: &[Entry]) -> Vec<u8> {
        let one = |entry: &Entry| {
            let len = entry.data_len();
            let data = vec![0; usize::try_from(len).unwrap()];
            [&entry.header().unwrap()[..], &data, padding(len)].concat()
        };
        entries.iter().flat_map(one).chain(END).collect()
    }

    fn read(tar: &[u8]) -> Vec<Entry> {
        let tar = compressed(tar);
        let mut archive = Archive::new(&tar[..]);
        std::iter::from_fn(|| archive.next().unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let long = "long ".repeat(60);
        let (name, target) = (long.as_str(), long.as_bytes().to_vec());
        let device =
            |block| Make::Device(Device { block, major: Some(4095), minor: Some(1_048_575) });
        let list = AccessList::of_text("u::rw-,u:7:r--,g::r--,m::r--,o::---").unwrap();
        let all = [
            entry("", Make::Directory),
            Entry { mode: 0o7777, ..entry("dir", Make::Directory) },
            Entry { lists: [None, Some(list.clone())], ..entry(name, Make::Directory) },
            file("dir/empty", 0, &[(0, 0)]),
            file("dir/file", 700, &[(0, 700)]),
            file(name, 512, &[(0, 512)]),
            file("dir/holes", 1 << 40, &[(4096, 600), (1 << 30, 1), (1 << 40, 0)]),
            file(&format!("dir/{name}"), 5000, &[(5000, 0)]),
            entry("link", Make::Link(b"dir/file".to_vec())),
            entry(name, Make::Link(target.clone())),
            entry("symlink", Make::Symlink(b"/somewhere".to_vec())),
            entry(name, Make::Symlink(target)),
            entry("block", device(true)),
            Entry { uid: u32::MAX - 1, gid: 1 << 21, ..entry("char", device(false)) },
            Entry { modified: (1 << 33, 0), ..entry("fifo", Make::Fifo) },
            Entry { modified: ((1 << 33) - 1, 999_999_999), ..entry("fifo", Make::Fifo) },
            Entry { modified: (-2, 750_000_000), ..entry("fifo", Make::Fifo) },
            Entry { modified: (-1, 1), ..entry("fifo", Make::Fifo) },
            Entry { modified: (-1, 0), ..entry("fifo", Make::Fifo) },
            Entry {
                attributes: vec![
                    (b"user.100%=25%3D\n".to_vec(), b"a=\n\0".to_vec()),
                    (b"user.empty".to_vec(), vec![]),
                ],
                lists: [Some(list.clone()), Some(list)],
                ..file("attributes", 1, &[(0, 1)])
            },
        ];
        let tar = archive(&all);
        assert_eq!(read(&tar), all);
        assert_eq!(archive(&all), tar, "the same entries make the same bytes");
    }

    /// Eight gibibytes and more; its data need not be there to be counted.
    #[test]
    fn a_size_may_be_larger_than_a_header_has_room_for() {
        let size = (1 << 33) + 5;
        let large = file("large", size, &[(0, size)]);
        let tar = compressed(&large.header().unwrap());
        assert_eq!(Archive::new(&tar[..]).next().unwrap(), Some(large));
    }

    #[test]
    fn what_the_reader_does_not_take_is_not_written() {
        let values = vec![0; 64 << 10];
        let attributes = (0..16).map(|i| (format!("user.{i}").into_bytes(), values.clone()));
        let many = Entry { attributes: attributes.collect(), ..entry("it", Make::Fifo) };
        let error = many.header().unwrap_err();
        assert!(error.contains("bytes of attributes, and 1048576 are the most"), "{error}");
        let holes: Vec<_> = (0..=MAX_STRETCHES as u64).map(|i| (2 * i, 1)).collect();
        let error = file("it", 1 << 40, &holes).header().unwrap_err();
        assert!(error.contains("more than 1048576 holes"), "{error}");
    }
}
