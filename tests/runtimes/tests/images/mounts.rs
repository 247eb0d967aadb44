//! Mounts of what the caller did not give, or in another way.

use std::fs;

use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry, Fstype, RemapFilePathEntry, RemapType};

use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, FOREIGN, Images, at, bundle, refuses};

/// The unlinked file of the volume is now one that has this name on the read-only volume.
fn linked_as(images: &Images, name: &str) {
    let ghost = images.file("/vol/ghost");
    let mut number = 0;
    images.mounts(|mounts| number = at(mounts, "/ro").mnt_id);
    images.files(|files| {
        let mut reg = ghost.reg.unwrap();
        (reg.id, reg.name) = (900_002, name.as_bytes().to_vec());
        reg.mnt_id = Some(number.cast_signed());
        let (ty, reg) = (FdTypes::Reg.into(), Some(reg));
        files.push(FileEntry { r#type: ty, id: 900_002, reg, ..Default::default() });
    });
    let remap_type = Some(RemapType::Linked.into());
    let remap = RemapFilePathEntry { orig_id: ghost.id, remap_id: 900_002, remap_type };
    images.dir.write_all(kind::REMAP_FPATH, 0, [&remap]).unwrap();
}

/// Links on a volume that lead out of it: where images may name no sources, and where they may name the volume's files.
#[test]
fn sources_that_are_links() {
    fn linked(images: &Images, fstype: Fstype, below: &str) {
        images.mount_of(fstype, &format!("vol/link/{below}"));
    }
    const MOUNT: &str = "mountpoints: mount 900001 at /spare: ";
    for (name, options, wanted) in [
        ("not-given", "", &[MOUNT, "/vol/link/", "of the host is not given"] as &[_]),
        ("given", "external mnt[]\n", &[" for /spare: Too many levels of symbolic links"]),
    ] {
        let scratch = Scratch::new(&format!("images-sources-{name}"));
        scratch.configure(&format!("{FOREIGN}{options}"));
        let bundle = bundle(&scratch);
        let asleep = Asleep::of(&scratch, &bundle);
        asleep.refused(&[
            ("a link to the root, as devpts", |images| linked(images, Fstype::Devpts, ""), wanted),
            (
                "a way through a link, as devpts",
                |images| linked(images, Fstype::Devpts, "etc"),
                wanted,
            ),
            ("a link, as a tmpfs", |images| linked(images, Fstype::Tmpfs, ""), wanted),
            ("a link, as another", |images| linked(images, Fstype::Unsupported, "root"), wanted),
        ]);
        asleep.wakes();
    }
}

#[test]
fn mounts() {
    fn auto(images: &Images, name: &str) {
        images.mount(|_, mount| {
            mount.fstype = Fstype::Auto as u32;
            mount.fsname = Some(name.to_owned());
        });
    }
    refuses(
        "images-mounts",
        &[
            (
                "a path that climbs",
                |images| images.mount_of(Fstype::Devpts, "vol/../../.."),
                &["mountpoints-", "(foreign.mounts.sources)"],
            ),
            ("tmpfs by name", |i| auto(i, "tmpfs"), &["mountpoints-", "is of type tmpfs"]),
            ("overlay by name", |i| auto(i, "overlay"), &["mountpoints-", "is of type overlay"]),
            ("proc by name", |i| auto(i, "proc"), &["mountpoints-", "is of type proc"]),
            ("cgroup2 by name", |i| auto(i, "cgroup2"), &["mountpoints-", "is of type cgroup2"]),
            (
                "another by name",
                |i| auto(i, "ext4"),
                &["file system ext4", "(foreign.mounts.file-systems)"],
            ),
            (
                "one device of two types",
                |images| {
                    images.mount(|mounts, mount| {
                        mount.root_dev = at(mounts, "/proc").root_dev;
                        mount.fstype = Fstype::Tmpfs as u32;
                    });
                },
                &["mountpoints-", "has two types of file systems"],
            ),
            (
                "a second proc",
                |images| {
                    images.mount(|mounts, mount| {
                        mount.root_dev = at(mounts, "/proc").root_dev;
                        mount.fstype = Fstype::Proc as u32;
                    });
                },
                &["\"/spare\": file system proc", "(foreign.mounts.file-systems)"],
            ),
            (
                "a number twice",
                |images| images.mount(|mounts, mount| mount.mnt_id = at(mounts, "/ro").mnt_id),
                &["mountpoints-", "appears twice"],
            ),
            (
                "the volume without its flag",
                |images| {
                    images.mounts(|m| {
                        m.iter_mut().filter(|m| m.mountpoint == b"/ro").for_each(|m| m.flags &= !1)
                    })
                },
                &["\"/ro\"", "which is ro", "(foreign.mounts.file-systems)"],
            ),
            (
                "the volume a second time",
                |images| {
                    images.mount(|mounts, mount| {
                        let (id, parent) = (mount.mnt_id, mount.parent_mnt_id);
                        *mount = at(mounts, "/ro").clone();
                        (mount.mnt_id, mount.parent_mnt_id) = (id, parent);
                        mount.mountpoint = b"/spare".to_vec();
                        mount.flags &= !1;
                    });
                },
                &["\"/spare\"", "a part of the mount at \"/ro\", which is ro"],
            ),
            (
                "the volume a second time, as a part",
                |images| {
                    images.mount(|mounts, mount| {
                        let (id, parent) = (mount.mnt_id, mount.parent_mnt_id);
                        *mount = at(mounts, "/ro").clone();
                        (mount.mnt_id, mount.parent_mnt_id) = (id, parent);
                        mount.mountpoint = b"/spare".to_vec();
                        (mount.flags, mount.ext_key) = (mount.flags & !1, None);
                    });
                },
                &["\"/spare\"", "a part of the mount at \"/ro\", which is ro"],
            ),
            (
                "the volume in the place of another",
                |images| {
                    images.mounts(|mounts| {
                        let key = at(mounts, "/ro").ext_key.clone();
                        let other = mounts.iter_mut().find(|m| m.mountpoint == b"/vol").unwrap();
                        other.ext_key = key;
                    });
                },
                &["\"/vol\"", "which is ro"],
            ),
            (
                "a file of the volume that is removed",
                |images| {
                    linked_as(images, "/ro/kept");
                },
                &["remap-fpath.img", "\"/ro/kept\", a name that no dump gives"],
            ),
            (
                "a file of the volume, by the name of a dump",
                |images| {
                    fs::write(images.scratch.join("ro/link_remap.5"), "x").unwrap();
                    linked_as(images, "/ro/link_remap.5");
                },
                &[
                    "\"/ro/link_remap.5\" on a mount that is read-only",
                    "(foreign.mounts.write-read-only)",
                ],
            ),
            (
                "an unlinked file of the volume",
                |images| {
                    let mut number = 0;
                    images.mounts(|mounts| number = at(mounts, "/ro").mnt_id);
                    images.files(|files| {
                        let regs = files.iter_mut().filter_map(|file| file.reg.as_mut());
                        for reg in regs.filter(|reg| reg.name.ends_with(b"/vol/ghost")) {
                            (reg.name, reg.mnt_id) =
                                (b"/ro/new".to_vec(), Some(number.cast_signed()));
                        }
                    });
                },
                &["\"/ro/new\" on a mount that is read-only", "(foreign.mounts.write-read-only)"],
            ),
        ],
    );
}
