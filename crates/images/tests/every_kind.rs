//! Each kind of image: what is written is read back, whatever the messages
//! are, and a damaged file is an error that says where.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
#[path = "common/types.rs"]
mod types;

use std::path::Path;

use common::Numbers;
use proptest::prelude::*;
use prost::Message;
use prost_reflect::Cardinality;
use torpor_images::kind::{self, Kind};
use torpor_images::proto::PstreeEntry;
use torpor_images::{Error, ImageDir, Reader, Result};
use types::{Check, Entry, every_kind};

/// An arbitrary message, through its wire format.
fn arbitrary<M: Entry>(numbers: &mut Numbers) -> M {
    let descriptor = common::POOL.get_message_by_name(&M::full_name()).unwrap();
    M::decode(common::message(&descriptor, numbers).encode_to_vec().as_slice()).unwrap()
}

/// Reads a file as what [`written`] has written.
fn read<H: Entry, M: Entry>(kind: Kind, bytes: &[u8]) -> Result<(H, Vec<M>)> {
    let mut reader = Reader::from_bytes(kind, Path::new("image"), bytes)?;
    let head = reader.expect()?;
    let mut entries = vec![];
    while let Some(entry) = reader.next()? {
        entries.push(entry);
    }
    Ok((head, entries))
}

fn written<H: Entry, M: Entry>(kind: Kind, head: &H, entries: &[M]) -> Vec<u8> {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let mut writer = dir.writer(kind, 7).unwrap();
    writer.entry(head).unwrap();
    for entry in entries {
        writer.entry(entry).unwrap();
    }
    let offset = writer.offset();
    writer.finish().unwrap();
    let bytes = std::fs::read(temp.path().join(kind.file_name(7))).unwrap();
    assert_eq!(bytes.len() as u64, offset);
    bytes
}

struct RoundTrip(Numbers);

impl Check for RoundTrip {
    fn check<H: Entry, M: Entry>(&mut self, kind: Kind) {
        let head: H = arbitrary(&mut self.0);
        let entries: Vec<M> = (0..self.0.below(3)).map(|_| arbitrary::<M>(&mut self.0)).collect();
        let bytes = written(kind, &head, &entries);
        assert_eq!(read::<H, M>(kind, &bytes).unwrap(), (head, entries), "{kind:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_kind_is_read_back(seed: u64) {
        every_kind(&mut RoundTrip(Numbers(seed)));
    }
}

struct Truncate;

impl Check for Truncate {
    fn check<H: Entry, M: Entry>(&mut self, kind: Kind) {
        let mut numbers = Numbers(1);
        let (head, entry): (H, M) = (arbitrary(&mut numbers), arbitrary(&mut numbers));
        let short = written::<H, M>(kind, &head, &[]).len();
        let bytes = written(kind, &head, &[entry]);
        let header = kind.header.words().len() * 4;
        for len in 0..bytes.len() {
            let result = read::<H, M>(kind, &bytes[..len]);
            if len == short {
                assert!(result.unwrap().1.is_empty());
                continue;
            }
            let error = result.unwrap_err();
            match &error {
                Error::Empty { offset, .. } => assert_eq!(*offset, header as u64),
                Error::Truncated { offset, left, wanted, .. } => {
                    assert_eq!(offset + left, len as u64, "{kind:?}: {error}");
                    assert!(wanted > left, "{kind:?}: {error}");
                }
                _ => panic!("{kind:?}: {error}"),
            }
            assert!(error.to_string().starts_with("image: offset "), "{error}");
        }
    }
}

#[test]
fn a_file_that_is_cut_off_says_where() {
    every_kind(&mut Truncate);
}

struct Flip;

impl Check for Flip {
    fn check<H: Entry, M: Entry>(&mut self, kind: Kind) {
        let mut numbers = Numbers(2);
        let bytes = written(kind, &arbitrary::<H>(&mut numbers), &[arbitrary::<M>(&mut numbers)]);
        let header = kind.header.words().len() * 4;
        for bit in 0..header * 8 {
            let error = read::<H, M>(kind, &flipped(&bytes, bit)).unwrap_err();
            let word = (bit / 32 * 4) as u64;
            assert!(
                matches!(error, Error::BadMagic { offset, .. } if offset == word),
                "{kind:?}: {error}"
            );
        }
        // A wrong length or message can be one that fits by chance: it only
        // must not panic, and an error must say where.
        for bit in header * 8..bytes.len() * 8 {
            if let Err(error) = read::<H, M>(kind, &flipped(&bytes, bit)) {
                assert!(error.to_string().starts_with("image: offset "), "{error}");
            }
        }
    }
}

fn flipped(bytes: &[u8], bit: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    bytes
}

#[test]
fn a_flipped_bit_is_never_a_panic() {
    every_kind(&mut Flip);
}

#[test]
fn a_message_that_is_none_says_where() {
    let mut bytes = written::<PstreeEntry, PstreeEntry>(kind::PSTREE, &PstreeEntry::default(), &[]);
    let end = bytes.len() as u64;
    bytes.extend_from_slice(&[1, 0, 0, 0, 0xff]);
    let error = read::<PstreeEntry, PstreeEntry>(kind::PSTREE, &bytes).unwrap_err();
    assert!(matches!(error, Error::Decode { offset, .. } if offset == end), "{error}");
}

/// A reader that does not know our own fields must get along without them.
#[test]
fn our_own_fields_are_optional_and_documented() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/image-format.md");
    let page = std::fs::read_to_string(page).unwrap();
    for message in common::POOL.all_messages() {
        for field in message.fields().filter(|field| field.number() >= 1000) {
            let named = field.name().starts_with("torpor_") && field.number() > 10_000;
            assert!(named, "{}", field.full_name());
            assert!(field.cardinality() != Cardinality::Required, "{}", field.full_name());
            let row = |line: &str| {
                line.contains(&format!("| {} |", message.name())) && line.contains(field.name())
            };
            assert!(page.lines().any(row), "{} is not documented", field.full_name());
        }
    }
}
