//! Entries that nothing refers to. Whole files of an earlier dump may lie beside the others.

use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, FileEntry, GhostFileEntry, MemfdInodeEntry, PipeDataEntry, TtyDataEntry, TtyInfoEntry,
    TtyType, UnixSkEntry,
};
use torpor_runtimes_tests::scratch::Scratch;

use super::{Images, bundle, refuses_of};

/// Adds an open file that no task has.
fn nobodys(images: &Images, change: impl FnOnce(&mut FileEntry)) {
    images.files(|files| {
        let mut entry = FileEntry { id: 900_001, ..files[0].clone() };
        change(&mut entry);
        files.push(entry);
    });
}

/// One that is bound to a name, and connected to `peer`.
fn socket(id: u32, peer: u32) -> FileEntry {
    let (ino, name) = (id, format!("\0{id}").into_bytes());
    let usk = UnixSkEntry { id, ino, r#type: 1, state: 1, peer, name, ..Default::default() };
    FileEntry { r#type: FdTypes::Unixsk.into(), id, usk: Some(usk), ..Default::default() }
}

#[test]
fn entries_that_nothing_refers_to() {
    const FILE: &[&str] = &["files.img: file 900001: nothing refers to it"];
    let scratch = Scratch::new("images-leftovers");
    refuses_of(
        &scratch,
        &bundle(&scratch),
        "",
        &[
            (
                "a file",
                |images| {
                    let path = images.file("/dev/null");
                    nobodys(images, |entry| {
                        *entry = FileEntry { id: 900_001, ..path };
                        entry.reg.as_mut().unwrap().id = 900_001;
                    });
                },
                FILE,
            ),
            ("a socket", |images| nobodys(images, |entry| *entry = socket(900_001, 0)), FILE),
            (
                "two that are connected",
                |images| {
                    nobodys(images, |entry| *entry = socket(900_001, 900_002));
                    images.files(|files| files.push(socket(900_002, 900_001)));
                },
                &["files.img: file 90000", "nothing refers to it"],
            ),
            (
                "a file in memory",
                |images| {
                    let inode = MemfdInodeEntry { inode_id: 7, ..Default::default() };
                    images.dir.write_all(kind::MEMFD_INODE, 0, [&inode]).unwrap();
                },
                &["memfd.img: inode 7: nothing refers to it"],
            ),
            (
                "what is queued in a pipe",
                |images| {
                    let pipe = PipeDataEntry { pipe_id: 7, ..Default::default() };
                    images.dir.write_all(kind::PIPES_DATA, 0, [&pipe]).unwrap();
                },
                &["pipes-data.img: pipe 7: nothing refers to it"],
            ),
            (
                "a terminal",
                |images| {
                    let r#type = TtyType::Pty.into();
                    let info = TtyInfoEntry { id: 7, r#type, ..Default::default() };
                    images.dir.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
                },
                &["tty-info.img: terminal 7: nothing refers to it"],
            ),
            (
                "what somebody has typed there",
                |images| {
                    let data = TtyDataEntry { tty_id: 7, ..Default::default() };
                    images.dir.write_all(kind::TTY_DATA, 0, [&data]).unwrap();
                },
                &["tty-data.img: terminal 7: nothing refers to it"],
            ),
        ],
        |images| {
            let ghost = GhostFileEntry { mode: 0o100_600, ..Default::default() };
            images.dir.write_one(kind::GHOST_FILE, 900_001, &ghost).unwrap();
        },
    );
}
