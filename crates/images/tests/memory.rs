//! Lengths in a hostile file do not decide how much memory is taken.

#![allow(clippy::unwrap_used)]

use std::alloc::System;
use std::fs::File;
use std::io::Write as _;

use cap::Cap;
use prost::Message;
use torpor_images::kind::{self, Kind};
use torpor_images::payload::{read_messages, read_semaphores};
use torpor_images::proto::{IpcMsgEntry, IpcSemEntry, PstreeEntry};
use torpor_images::{Error, ImageDir};

/// Aborts the test when it takes more memory than it is allowed.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// How much memory reading a small file may take, buffers included.
const LIMIT: usize = 64 << 10;

fn file(kind: Kind, body: &[u8]) -> (tempfile::TempDir, ImageDir, File) {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let mut file = dir.raw_file_create(kind, 0).unwrap();
    for word in kind.header.words() {
        file.write_all(&word.to_le_bytes()).unwrap();
    }
    file.write_all(body).unwrap();
    (temp, dir, file)
}

fn entry(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    let mut entry = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
    entry.extend_from_slice(&bytes);
    entry
}

// One test, since the limit is that of the whole process.
#[test]
fn memory_is_taken_for_what_is_there_only() {
    let (_temp, dir, lengths) = file(kind::PSTREE, &u32::MAX.to_le_bytes());
    let semaphores = IpcSemEntry { nsems: u32::MAX, ..Default::default() };
    let (_temp, sem_dir, _file) = file(kind::IPCNS_SEM, &entry(&semaphores));
    let messages = IpcMsgEntry { qnum: u32::MAX, ..Default::default() };
    let (_temp, msg_dir, _file) = file(kind::IPCNS_MSG, &entry(&messages));
    MEMORY.set_limit(MEMORY.allocated() + LIMIT).unwrap();

    let error = dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap_err();
    assert!(matches!(error, Error::Truncated { left: 0, .. }), "{error}");
    // A hole makes a file large that takes no space; entries are limited.
    lengths.set_len(1 << 40).unwrap();
    let error = dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");

    let mut reader = sem_dir.reader(kind::IPCNS_SEM, 0).unwrap().unwrap();
    let entry: IpcSemEntry = reader.expect().unwrap();
    let error = read_semaphores(&mut reader, &entry).unwrap_err();
    assert!(matches!(error, Error::Truncated { left: 0, .. }), "{error}");

    let mut reader = msg_dir.reader(kind::IPCNS_MSG, 0).unwrap().unwrap();
    let entry: IpcMsgEntry = reader.expect().unwrap();
    read_messages(&mut reader, &entry).unwrap_err();
    MEMORY.set_limit(usize::MAX).unwrap();
}
