//! Entries and streams: what was changed does not open.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation)]

use std::io::{Cursor, Read, Write};

use proptest::prelude::*;
use torpor_seal::header::RecordCipher;
use torpor_seal::kdf::Keys;
use torpor_seal::record::{RECORD, RecordReader, RecordWriter};
use torpor_seal::{Secret, Suite};

const CIPHERS: [RecordCipher; 2] = [RecordCipher::Aes256Gcm, RecordCipher::ChaCha20Poly1305];
/// Magic number and salt.
const HEAD: usize = 24;
/// What stands beside the length of a record that is packed.
const PACKED: u32 = 1 << 30;

fn keys(id: u8) -> Keys {
    Keys::new(&Secret::take(&mut [1; 32]), &[id; 32], Suite::Aes256Gcm)
}

fn seal(cipher: RecordCipher, name: &str, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut writer = RecordWriter::new(&keys(1), cipher, name, Vec::new()).unwrap();
    for entry in entries {
        writer.write_all(entry).unwrap();
        writer.end_entry().unwrap();
    }
    writer.finish().unwrap().0
}

fn open_as(id: u8, cipher: RecordCipher, name: &str, file: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut reader = RecordReader::new(&keys(id), cipher, name, Cursor::new(file)).ok()?;
    let announced = reader.plain_len();
    reader.read_to_end(&mut out).ok()?;
    assert_eq!(out.len() as u64, announced);
    Some(out)
}

fn open(cipher: RecordCipher, file: &[u8]) -> Option<Vec<u8>> {
    open_as(1, cipher, "a", file)
}

/// Where the records of a file lie, the final one last.
fn records(file: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut found = vec![];
    let mut at = HEAD;
    while at < file.len() {
        let len = u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        let len = if len == u32::MAX { 16 } else { (len & !PACKED) as usize };
        found.push(at..at + 4 + len + 16);
        at += 4 + len + 16;
    }
    found
}

fn joined(file: &[u8], parts: &[std::ops::Range<usize>]) -> Vec<u8> {
    let mut out = file[..HEAD].to_vec();
    parts.iter().for_each(|part| out.extend_from_slice(&file[part.clone()]));
    out
}

/// Three entries, of which the first is packed and the others are as long as each other.
fn three() -> Vec<Vec<u8>> {
    let first = [b"first".as_slice(), &[0; 60]].concat();
    vec![first, b"other than the ".to_vec(), b"third, the last".to_vec()]
}

#[test]
fn every_bit_counts() {
    for cipher in CIPHERS {
        let file = seal(cipher, "a", &three());
        assert_eq!(open(cipher, &file).unwrap(), three().concat());
        for at in 0..file.len() * 8 {
            let mut changed = file.clone();
            changed[at / 8] ^= 1 << (at % 8);
            assert_eq!(open(cipher, &changed), None, "bit {at}");
        }
        for len in 0..file.len() {
            assert_eq!(open(cipher, &file[..len]), None, "length {len}");
        }
        assert_eq!(open(cipher, &[file.as_slice(), &[0]].concat()), None);
    }
}

#[test]
fn records_cannot_be_moved() {
    let file = seal(CIPHERS[0], "a", &three());
    let all = records(&file);
    let [a, b, c, end] = all.as_slice() else { panic!("{all:?}") };
    let try_with = |parts: &[&std::ops::Range<usize>]| {
        let parts: Vec<_> = parts.iter().map(|part| (*part).clone()).collect();
        open(CIPHERS[0], &joined(&file, &parts))
    };
    assert!(try_with(&[a, b, c, end]).is_some());
    assert!(try_with(&[b, a, c, end]).is_none());
    assert!(try_with(&[a, c, end]).is_none());
    assert!(try_with(&[a, b, end]).is_none());
    assert!(try_with(&[end]).is_none());
    assert!(try_with(&[a, b, c, c, end]).is_none());
    assert!(try_with(&[a, a, b, c, end]).is_none());
    assert!(try_with(&[a, b, c]).is_none());
    assert!(try_with(&[a, b, c, end, end]).is_none());
}

#[test]
fn files_cannot_be_exchanged() {
    let file = seal(CIPHERS[0], "a", &three());
    assert!(open_as(1, CIPHERS[0], "b", &file).is_none());
    assert!(open_as(2, CIPHERS[0], "a", &file).is_none());
    assert!(open_as(1, CIPHERS[1], "a", &file).is_none());
    // Two writings of one file share nothing: their records cannot be mixed.
    let again = seal(CIPHERS[0], "a", &three());
    let all = records(&file);
    let mut mixed = file.clone();
    mixed[all[1].clone()].copy_from_slice(&again[all[1].clone()]);
    assert!(open(CIPHERS[0], &mixed).is_none());
    assert!(file[HEAD..] != again[HEAD..]);
}

/// What tasks have written is not packed: how much smaller it becomes would tell of it.
#[test]
fn entries_are_packed_and_data_is_not() {
    let (entry, data) = ([7; 1000], [8; 1000]);
    let mut writer = RecordWriter::new(&keys(1), CIPHERS[0], "a", Vec::new()).unwrap();
    writer.write_all(&entry).unwrap();
    writer.end_entry().unwrap();
    writer.write_all(&data).unwrap();
    let (file, _) = writer.finish().unwrap();
    let lens: Vec<usize> = records(&file).iter().map(ExactSizeIterator::len).collect();
    let [packed, plain, _] = lens[..] else { panic!("{lens:?}") };
    assert!(packed < 100, "{packed}");
    assert_eq!(plain, 4 + data.len() + 16);
    assert_eq!(open(CIPHERS[0], &file).unwrap(), [entry, data].concat());
}

#[test]
fn large_entries_take_several_records() {
    let entry: Vec<u8> = (0..3 * RECORD + 5).map(|i| (i % 251) as u8).collect();
    let file = seal(CIPHERS[0], "a", std::slice::from_ref(&entry));
    assert_eq!(records(&file).len(), 5);
    assert!(open(CIPHERS[0], &file).unwrap() == entry);
    assert_eq!(open(CIPHERS[0], &seal(CIPHERS[0], "a", &[])).unwrap(), b"");
}

proptest! {
    #[test]
    fn round_trip(entries in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20)) {
        for cipher in CIPHERS {
            prop_assert_eq!(open(cipher, &seal(cipher, "a", &entries)).unwrap(), entries.concat());
        }
    }

    #[test]
    fn anything_may_be_read(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(open(CIPHERS[0], &bytes).is_none());
        prop_assert!(open(CIPHERS[0], &[b"TORPDATA", bytes.as_slice()].concat()).is_none());
    }

    #[test]
    fn any_change_is_found(at in any::<prop::sample::Index>(), to in 1u8..) {
        let mut file = seal(CIPHERS[0], "a", &three());
        let at = at.index(file.len());
        file[at] ^= to;
        prop_assert!(open(CIPHERS[0], &file).is_none());
    }
}
