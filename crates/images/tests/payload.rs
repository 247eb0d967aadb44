//! The data behind entries.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use prost::Message;
use torpor_images::kind::{self, Kind};
use torpor_images::payload::{
    next_chunk, read_messages, read_semaphores, write_message, write_semaphores,
};
use torpor_images::proto::{GhostChunkEntry, IpcMsg, IpcMsgEntry, IpcSemEntry};
use torpor_images::{Error, ImageDir, Reader, Writer};

/// The bytes that `write` writes into an image of `kind`, without its header.
fn written(kind: Kind, write: impl Fn(&mut Writer)) -> Vec<u8> {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let mut writer = dir.writer(kind, 7).unwrap();
    write(&mut writer);
    writer.finish().unwrap();
    std::fs::read(temp.path().join(kind.file_name(7))).unwrap().split_off(8)
}

fn reader(kind: Kind, bytes: &[u8]) -> Reader {
    let header = kind.header.words().into_iter().flat_map(u32::to_le_bytes);
    let bytes: Vec<u8> = header.chain(bytes.iter().copied()).collect();
    Reader::from_bytes(kind, Path::new("image"), &bytes).unwrap()
}

#[test]
fn semaphores_are_padded_to_eight() {
    let values = [1, 2, 3, 4, 0xffff];
    let bytes = written(kind::IPCNS_SEM, |writer| write_semaphores(writer, &values).unwrap());
    assert_eq!(bytes, [1, 0, 2, 0, 3, 0, 4, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0]);
    let mut reader = reader(kind::IPCNS_SEM, &bytes);
    let entry = IpcSemEntry { nsems: 5, ..Default::default() };
    assert_eq!(read_semaphores(&mut reader, &entry).unwrap(), values);
    reader.end().unwrap();
}

#[test]
fn messages_are_padded_to_eight() {
    let message = IpcMsg { mtype: 1, msize: 5 };
    let bytes = written(kind::IPCNS_MSG, |writer| {
        write_message(writer, &message, b"hello").unwrap();
        write_message(writer, &IpcMsg { mtype: 2, msize: 0 }, b"").unwrap();
    });
    let mut whole = reader(kind::IPCNS_MSG, &bytes);
    let entry = IpcMsgEntry { qnum: 2, ..Default::default() };
    let messages = read_messages(&mut whole, &entry).unwrap();
    assert_eq!(messages[0], (message, b"hello".to_vec()));
    assert_eq!(messages[1].1, b"");
    whole.end().unwrap();
    let mut many = reader(kind::IPCNS_MSG, &bytes);
    let entry = IpcMsgEntry { qnum: u32::MAX, ..Default::default() };
    let error = read_messages(&mut many, &entry).unwrap_err();
    assert!(matches!(error, Error::Empty { .. }), "{error}");
}

#[test]
fn chunks_come_in_order_and_within_the_file() {
    let chunk = |off, len| GhostChunkEntry { off, len };
    let bytes = |chunks: &[GhostChunkEntry]| {
        let mut bytes = vec![];
        for chunk in chunks {
            let entry = chunk.encode_to_vec();
            bytes.extend_from_slice(&u32::try_from(entry.len()).unwrap().to_le_bytes());
            bytes.extend_from_slice(&entry);
        }
        bytes
    };
    let good = bytes(&[chunk(0, 0), chunk(4096, 4096)]);
    let mut reader_of_good = reader(kind::GHOST_FILE, &good);
    let mut next = |end| next_chunk(&mut reader_of_good, end, Some(8192)).unwrap();
    assert_eq!(next(0), Some(chunk(0, 0)));
    assert_eq!(next(0), Some(chunk(4096, 4096)));
    assert_eq!(next(8192), None);
    for (bad, end, size) in [
        (chunk(0, 1), 1, None),
        (chunk(8192, 1), 0, Some(8192)),
        (chunk(u64::MAX, 2), 0, None),
        (chunk(1 << 63, 0), 0, None),
    ] {
        let error = next_chunk(&mut reader(kind::GHOST_FILE, &bytes(&[bad])), end, size);
        assert!(matches!(error, Err(Error::Invalid { offset: 8, .. })), "{bad:?}");
    }
}

#[test]
fn data_is_copied_as_far_as_it_is_there() {
    let mut out = vec![];
    let mut source = reader(kind::GHOST_FILE, b"contents");
    source.copy_to(4, &mut out, "contents").unwrap();
    assert_eq!((out.as_slice(), source.offset()), (b"cont".as_slice(), 12));
    let error = source.copy_to(5, &mut out, "contents").unwrap_err();
    assert!(matches!(error, Error::Truncated { offset: 12, left: 4, .. }), "{error}");
}
