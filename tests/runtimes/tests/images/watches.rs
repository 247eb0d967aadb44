//! Marks of fanotify, and watches of inotify, on what a container cannot read.

use torpor_images::proto::{
    FanotifyFileEntry, FanotifyInodeMarkEntry, FanotifyMarkEntry, FanotifyMountMarkEntry, FdTypes,
    FhEntry, InotifyFileEntry, InotifyWdEntry, MarkType,
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
    fn inotify(images: &Images, f_handle: FhEntry) {
        images.open(FdTypes::Inotify, |entry| {
            let watch = InotifyWdEntry {
                id: entry.id,
                i_ino: 2,
                mask: 0x20, // IN_OPEN
                wd: 1,
                f_handle,
                ..InotifyWdEntry::default()
            };
            let (id, wd) = (entry.id, vec![watch]);
            entry.ify = Some(InotifyFileEntry { id, wd, ..InotifyFileEntry::default() });
        });
    }
    /// A handle of the root directory of the file system that the container's root is a part of.
    fn outside() -> FhEntry {
        FhEntry { bytes: 8, r#type: 1, handle: vec![2, 0], ..Default::default() }
    }
    const WANTED: &[&str] = &["files.img: fanotify: ", "(foreign.files.fanotify)"];
    const OUT: &[&str] = &["files.img: a watched file's handle leads out of the tasks' mounts"];
    refuses(
        "images-fanotify",
        &[
            ("by handle", |images| watch(images, 0, inode(outside())), WANTED),
            (
                "by path",
                |images| {
                    let path = Some(b"/ro/kept".to_vec());
                    watch(images, 0, inode(FhEntry { path, ..Default::default() }));
                },
                WANTED,
            ),
            ("a mount", |images| watch(images, 0, mount(root(images))), WANTED),
            ("without an end of what waits", |i| watch(i, 0x210, inode(outside())), WANTED),
            ("a mount, with handles", |images| watch(images, 0x200, mount(root(images))), WANTED),
            (
                "a mount that there is not",
                |images| watch(images, 0x200, mount(900_001)),
                &["files.img: file 900001 is of mount 900001, which there is not"],
            ),
            (
                "by handle, with handles, out of the container",
                |images| watch(images, 0x200, inode(outside())),
                OUT,
            ),
            // Anybody may have one.
            ("inotify by handle", |images| inotify(images, outside()), OUT),
            (
                "inotify by handle, from a mount that there is not",
                |images| inotify(images, FhEntry { mnt_id: Some(900_001), ..outside() }),
                OUT,
            ),
            (
                "inotify by a path that climbs",
                |images| {
                    let path = Some(b"/../../../etc/shadow".to_vec());
                    inotify(images, FhEntry { path, ..FhEntry::default() });
                },
                &["/etc/shadow"],
            ),
        ],
    );
}
