//! Marks of fanotify on what a container cannot read.

use torpor_images::proto::{
    FanotifyFileEntry, FanotifyInodeMarkEntry, FanotifyMarkEntry, FanotifyMountMarkEntry, FdTypes,
    FhEntry, MarkType,
};

use super::{Images, at, refuses};

#[test]
fn what_watches_files() {
    fn watch(images: &Images, faflags: u32, mark: FanotifyMarkEntry) {
        images.open(FdTypes::Fanotify, |entry| {
            let mark = FanotifyMarkEntry { id: entry.id, mask: 0x20, ..mark };
            let id = entry.id;
            entry.ffy =
                Some(FanotifyFileEntry { id, faflags, mark: vec![mark], ..Default::default() });
        });
    }
    fn inode(f_handle: FhEntry) -> FanotifyMarkEntry {
        let ie = Some(FanotifyInodeMarkEntry { i_ino: 2, f_handle });
        FanotifyMarkEntry { r#type: MarkType::Inode.into(), ie, ..Default::default() }
    }
    fn root(images: &Images) -> u32 {
        let mut root = 0;
        images.mounts(|mounts| root = at(mounts, "/").mnt_id);
        root
    }
    fn mount(mnt_id: u32) -> FanotifyMarkEntry {
        let me = Some(FanotifyMountMarkEntry { mnt_id, path: Some(b"/ro".to_vec()) });
        FanotifyMarkEntry { r#type: MarkType::Mount.into(), me, ..Default::default() }
    }
    const WANTED: &[&str] = &["files.img: fanotify: ", "(foreign.files.fanotify)"];
    refuses(
        "images-fanotify",
        &[
            (
                "by handle",
                |images| {
                    let handle =
                        FhEntry { bytes: 8, r#type: 1, handle: vec![2, 0], ..Default::default() };
                    watch(images, 0, inode(handle));
                },
                WANTED,
            ),
            (
                "by path",
                |images| {
                    let path = Some(b"/ro/kept".to_vec());
                    watch(images, 0, inode(FhEntry { path, ..Default::default() }));
                },
                WANTED,
            ),
            ("a mount", |images| watch(images, 0, mount(root(images))), WANTED),
            ("a mount, with handles", |images| watch(images, 0x200, mount(root(images))), WANTED),
            (
                "a mount that there is not",
                |images| watch(images, 0x200, mount(900_001)),
                &["files.img: file 900001 is of mount 900001, which there is not"],
            ),
            (
                "by handle, with handles, out of the container",
                |images| {
                    let handle =
                        FhEntry { bytes: 8, r#type: 1, handle: vec![2, 0], ..Default::default() };
                    watch(images, 0x200, inode(handle));
                },
                &["files.img: a watched file's handle leads out of the tasks' mounts"],
            ),
        ],
    );
}
