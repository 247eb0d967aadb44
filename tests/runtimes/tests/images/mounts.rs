//! Mounts of what the caller did not give, or in another way.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry, Fstype, MntEntry, RemapFilePathEntry, RemapType};

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, FOREIGN, Images, Row, at, bundle, refuses, refuses_of};

/// The unlinked file of the volume is now one that has this name on another volume.
pub(super) fn linked_as(images: &Images, volume: &str, name: &str) {
    let ghost = images.file("/vol/ghost");
    let mut number = 0;
    images.mounts(|mounts| number = at(mounts, volume).mnt_id);
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

/// A mount below a volume, which `rbind` brings along: this host says how it is mounted, and nobody else.
#[test]
fn what_is_mounted_below_a_volume() {
    let scratch = Scratch::new("images-below-volumes");
    scratch.configure(&format!("{FOREIGN}external mnt[]\n"));
    let below = scratch.dir("outer/below");
    let narrow = "ro,nosuid,nodev,noexec";
    let script =
        format!("mount -t tmpfs below {0} && mount -o bind,remount,{narrow} {0}", below.display());
    command("sh", &["-ec", &script]).succeed();
    let bundle = bundle(&scratch).bind(&scratch.join("outer"), "/outer", "rw");
    let asleep = Asleep::of(&scratch, &bundle);
    let place = format!("{} of this host, which is mounted ", below.display());
    let places: &'static str = place.leak();
    let wanted = |lost: &'static str| -> &'static [&'static str] {
        vec![
            "mount at /outer/below: it is a part of ",
            places,
            lost,
            "(foreign.mounts.file-systems)",
        ]
        .leak()
    };
    fn without(images: &Images, flags: u32) {
        images.mounts(|mounts| {
            let place = b"/outer/below";
            mounts.iter_mut().filter(|m| m.mountpoint == place).for_each(|m| m.flags &= !flags);
        });
    }
    asleep.refused(&[
        ("one that can be written to", |images| without(images, 1), wanted("mounted ro ")),
        ("one with set-uid programs", |images| without(images, 3), wanted("mounted ro, nosuid ")),
        ("one with devices", |images| without(images, 4), wanted("mounted nodev ")),
        ("one with programs", |images| without(images, 8), wanted("mounted noexec ")),
    ]);
    let container = asleep.wakes();
    let list = fs::read_to_string(format!("/proc/{}/mountinfo", container.pid())).unwrap();
    let line = list.lines().find(|line| line.contains(" /outer/below ")).unwrap();
    assert!(line.contains(" /outer/below ro,nosuid,nodev,noexec,"), "{line}");
    drop(container);
    command("umount", &["--lazy"]).arg(&below).succeed();
}

/// A volume without a word for how it is mounted comes as this host has it, whatever the images say, and so does a part of it.
#[test]
fn a_volume_stays_as_this_host_has_it() {
    let scratch = Scratch::new("images-as-it-is");
    scratch.configure(FOREIGN);
    let volume = scratch.dir("narrow");
    let narrow = "ro,nosuid,nodev,noexec";
    let script = format!(
        "mount -t tmpfs narrow {0} && mkdir {0}/below && mount -o bind,remount,{narrow} {0}",
        volume.display()
    );
    command("sh", &["-ec", &script]).succeed();
    let bundle = bundle(&scratch).configure(|config| {
        config["mounts"].as_array_mut().unwrap().push(json!({
            "type": "bind", "source": volume, "destination": "/narrow",
            "options": ["rbind", "rprivate"],
        }));
    });
    let asleep = Asleep::of(&scratch, &bundle);
    let images = Images::of(&scratch);
    images.mounts(|all| {
        all.iter_mut().filter(|m| m.mountpoint == b"/narrow").for_each(|m| m.flags &= !15);
    });
    images.mount(|all, spare| {
        let volume = at(all, "/narrow");
        (spare.root_dev, spare.fstype) = (volume.root_dev, volume.fstype);
        spare.root = b"/below".to_vec();
    });
    let container = asleep.wakes();
    let list = fs::read_to_string(format!("/proc/{}/mountinfo", container.pid())).unwrap();
    for place in ["/narrow", "/spare"] {
        let line = list.lines().find(|line| line.contains(&format!(" {place} "))).unwrap();
        assert!(line.contains(&format!(" {place} {narrow},")), "{line}");
    }
    drop(container);
    command("umount", &["--lazy"]).arg(&volume).succeed();
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
                "a part of a volume that is said to have been removed",
                |images| {
                    again(images, "/vol", |mount| {
                        (mount.ext_key, mount.deleted) = (None, Some(true));
                        mount.root.extend(b"/was");
                    });
                },
                &[
                    "\"/spare\"",
                    "it shows what had been removed, which would be made there again",
                    "(foreign.mounts.file-systems)",
                ],
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
                    linked_as(images, "/ro", "/ro/kept");
                },
                &["remap-fpath.img", "\"/ro/kept\", a name that no dump gives"],
            ),
            (
                "a file of the volume, by the name of a dump",
                |images| {
                    fs::write(images.scratch.join("ro/link_remap.5"), "x").unwrap();
                    linked_as(images, "/ro", "/ro/link_remap.5");
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

/// Puts in the place of a mount one of a file system that shows the kernel.
fn instead(images: &Images, place: &str, fstype: Fstype, root: &str, flags: u32) {
    images.mounts(|mounts| {
        let like = at(mounts, if fstype == Fstype::Sysfs { "/sys" } else { "/proc" }).clone();
        let known = matches!(fstype, Fstype::Proc | Fstype::Sysfs);
        let mount = mounts.iter_mut().find(|mount| mount.mountpoint == place.as_bytes()).unwrap();
        *mount = MntEntry {
            mnt_id: mount.mnt_id,
            parent_mnt_id: mount.parent_mnt_id,
            mountpoint: mount.mountpoint.clone(),
            fstype: fstype as u32,
            root_dev: if known { like.root_dev } else { 0xff_ffe },
            root: root.as_bytes().to_vec(),
            flags,
            ..like
        };
    });
}

/// Adds at /spare what another mount shows, writable.
fn again(images: &Images, place: &str, change: impl FnOnce(&mut MntEntry)) {
    images.mount(|mounts, mount| {
        let (id, parent) = (mount.mnt_id, mount.parent_mnt_id);
        *mount = at(mounts, place).clone();
        (mount.mnt_id, mount.parent_mnt_id, mount.flags) = (id, parent, 0);
        mount.mountpoint = b"/spare".to_vec();
        change(mount);
    });
}

/// Adds what a directory of the kernel's has that is hidden, behind the file system that hides it.
fn behind(images: &Images, hides: &str, name: &str) {
    images.mount(|mounts, mount| {
        let top = if hides.starts_with("/sys") { "/sys" } else { "/proc" };
        let (like, hides_it) = (at(mounts, top), at(mounts, hides));
        (mount.fstype, mount.root_dev, mount.flags) = (like.fstype, like.root_dev, 15);
        (mount.source, mount.options) = (like.source.clone(), like.options.clone());
        mount.parent_mnt_id = hides_it.mnt_id;
        mount.root = format!("{}/{name}", &hides[top.len()..]).into_bytes();
        mount.mountpoint = format!("{hides}/{name}").into_bytes();
    });
}

/// The file systems of the kernel in the place of a volume, and more of them where a container has a part that it
/// cannot write to.
#[test]
fn file_systems_of_the_kernel() {
    const PATTERN: &str = "/sys/kernel/core_pattern";
    fn groups(images: &Images, fstype: Fstype, options: &str) {
        instead(images, "/vol", fstype, "/", 0);
        images.mounts(|mounts| {
            let mount = mounts.iter_mut().find(|mount| mount.mountpoint == b"/vol").unwrap();
            mount.options = options.as_bytes().to_vec();
        });
    }
    refuses(
        "images-kernel",
        &[
            (
                "proc for a volume",
                |images| instead(images, "/vol", Fstype::Proc, "/", 0),
                &[
                    "\"/vol\": file system proc: ",
                    " of this host there (foreign.mounts.file-systems)",
                ],
            ),
            (
                "a file of proc for a volume",
                |images| instead(images, "/vol", Fstype::Proc, PATTERN, 0),
                &["\"/vol\": \"/sys/kernel/core_pattern\" of file system proc: "],
            ),
            (
                "proc for a volume that cannot be written to",
                |images| instead(images, "/ro", Fstype::Proc, "/", 1),
                &["\"/ro\": file system proc, read-only: ", " of this host there"],
            ),
            (
                "sysfs for a volume",
                |images| instead(images, "/vol", Fstype::Sysfs, "/", 0),
                &["\"/vol\": file system sysfs: ", " of this host there"],
            ),
            (
                "groups for a volume",
                |images| groups(images, Fstype::Cgroup, "memory"),
                &["\"/vol\": file system cgroup: ", " of this host there"],
            ),
            (
                "new groups for a volume",
                |images| groups(images, Fstype::Cgroup, "none,name=images-kernel"),
                &["\"/vol\": file system cgroup: ", " of this host there"],
            ),
            (
                "groups of version 2 for a volume",
                |images| groups(images, Fstype::Cgroup2, ""),
                &["\"/vol\": file system cgroup2: "],
            ),
            (
                "proc at its own place, by another name of that",
                |images| {
                    again(images, "/proc", |mount| mount.mountpoint = b"/proc/".to_vec());
                },
                &["mount 900001 is at the place of another one"],
            ),
            (
                "all of proc where a part is protected",
                |images| instead(images, "/proc/bus", Fstype::Proc, "/", 1),
                &["\"/proc/bus\": file system proc, read-only: the calling runtime wants no such"],
            ),
            (
                "another part",
                |images| instead(images, "/proc/sys", Fstype::Proc, "/bus/..", 1),
                &["\"/proc/sys\": \"/bus/..\" of file system proc, read-only: "],
            ),
            (
                "sysfs where a part of proc is protected",
                |images| instead(images, "/proc/bus", Fstype::Sysfs, "/", 1),
                &["\"/proc/bus\": file system sysfs, read-only: "],
            ),
            (
                "a part of sysfs behind what hides it",
                |images| behind(images, "/sys/firmware", "acpi"),
                &[
                    "\"/sys/firmware\" can be reached, which the calling runtime hides",
                    "(foreign.mounts.file-systems)",
                ],
            ),
            (
                "a part of proc behind what hides it",
                |images| behind(images, "/proc/acpi", "wakeup"),
                &["\"/proc/acpi\" can be reached, which the calling runtime hides"],
            ),
            (
                "a part of proc in the place of all",
                |images| instead(images, "/sys", Fstype::Sysfs, "/kernel", 15),
                &["\"/sys\": \"/kernel\" of file system sysfs", "wants all of sysfs there"],
            ),
        ],
    );
}

/// What takes the place of a root that cannot be written to.
#[test]
fn what_lies_over_a_read_only_root() {
    fn over(images: &Images, place: &str, fstype: Fstype, options: &str) {
        images.mount(|_, mount| {
            mount.mountpoint = place.as_bytes().to_vec();
            (mount.fstype, mount.options) = (fstype as u32, options.as_bytes().to_vec());
        });
    }
    const WANTED: &[&str] =
        &["the calling runtime wants the root read-only", "(foreign.mounts.file-systems)"];
    let scratch = Scratch::new("images-over-the-root");
    let bundle = bundle(&scratch);
    bundle.write("count", "");
    let count = bundle.file("count");
    let bundle = bundle
        .bind(&count, "/count", "rw")
        .configure(|config| config["root"]["readonly"] = true.into());
    let rows: &[Row] = &[
        ("a tmpfs", |images| over(images, "/", Fstype::Tmpfs, ""), WANTED),
        ("a tmpfs, by another name of the place", |i| over(i, "/.", Fstype::Tmpfs, ""), WANTED),
        ("new terminals", |i| over(i, "//", Fstype::Devpts, "newinstance"), WANTED),
        (
            "an overlay",
            |images| {
                let layers = "lowerdir=/,upperdir=/vol/upper,workdir=/vol/work";
                over(images, "/", Fstype::Overlayfs, layers);
            },
            WANTED,
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}

/// Has the mount at a place say that it is of the device of /ro, and begins where `root` says for the root of that.
fn stands_for(images: &Images, place: &str, root: impl Fn(&[u8]) -> Vec<u8>) {
    images.mounts(|mounts| {
        let (device, root) = (at(mounts, "/ro").root_dev, root(&at(mounts, "/ro").root));
        let other = mounts.iter_mut().find(|mount| mount.mountpoint == place.as_bytes()).unwrap();
        (other.root_dev, other.root) = (device, root);
    });
}

/// The volume that cannot be written to, as a part of what can, by what images say of devices and roots.
#[test]
fn what_a_part_is_made_of() {
    let scratch = Scratch::new("images-parts");
    scratch.configure(FOREIGN);
    let bundle = bundle(&scratch);
    let asleep = Asleep::of(&scratch, &bundle);
    asleep.refused(&[
        (
            "a part of the root",
            |images| {
                again(images, "/ro", |mount| mount.ext_key = None);
                stands_for(images, "/", |_| b"/".to_vec());
            },
            &[" for /spare: No such file or directory"],
        ),
        (
            "a part of the other volume, which is said to begin further up",
            |images| {
                again(images, "/ro", |mount| mount.ext_key = None);
                stands_for(images, "/vol", |_| b"/".to_vec());
            },
            &[" for /spare: No such file or directory"],
        ),
        (
            "a way up from the other volume",
            |images| {
                again(images, "/vol", |mount| {
                    mount.ext_key = None;
                    mount.root.extend(b"/../ro");
                })
            },
            &["/../ro"],
        ),
        (
            "a way through a link of the other volume",
            |images| {
                again(images, "/vol", |mount| {
                    mount.ext_key = None;
                    mount.root.extend(b"/link/etc");
                })
            },
            &[" for /spare: Too many levels of symbolic links"],
        ),
        (
            "a part of a new file system, which is said to be the same",
            |images| {
                again(images, "/ro", |mount| mount.ext_key = None);
                stands_for(images, "/dev/shm", |root| root.to_vec());
            },
            &["mountpoints-", "has two types of file systems"],
        ),
    ]);
    // What seems to be the same volume, and can be written to.
    let images = Images::of(&scratch);
    again(&images, "/ro", |mount| mount.ext_key = None);
    stands_for(&images, "/vol", |root| root.to_vec());
    let Asleep { mut container, .. } = asleep;
    container.restore(&[]);
    let inside = PathBuf::from(format!("/proc/{}/root", container.pid()));
    assert!(inside.join("spare/link").is_symlink() && !inside.join("spare/kept").exists());
    assert!(inside.join("ro/kept").exists());
}

/// Groups of the caller in place of the container's.
#[test]
fn groups_of_the_caller() {
    const OWN: &str = "/sys/fs/cgroup/pids";
    // Only where a runtime gives each hierarchy by itself.
    if !Path::new(OWN).exists() {
        return;
    }
    let scratch = Scratch::new("images-groups-shown");
    scratch.configure(FOREIGN);
    let bundle = bundle(&scratch);
    let asleep = Asleep::of(&scratch, &bundle);
    asleep.refused(&[
        (
            "writable, elsewhere",
            |images| again(images, OWN, |_| ()),
            &["\"/spare\"", "wants groups at \"/sys/fs/cgroup\" only", "mounts.file-systems"],
        ),
        (
            "for a volume",
            |images| {
                images.mounts(|mounts| {
                    let key = at(mounts, OWN).ext_key.clone();
                    let other = mounts.iter_mut().find(|m| m.mountpoint == b"/vol").unwrap();
                    other.ext_key = key;
                });
            },
            &["\"/vol\"", "wants groups at \"/sys/fs/cgroup\" only"],
        ),
        (
            "writable in place",
            |images| {
                images.mounts(|mounts| {
                    let own = mounts.iter_mut().filter(|m| m.mountpoint == OWN.as_bytes());
                    own.for_each(|mount| mount.flags &= !1);
                });
            },
            &["\"/sys/fs/cgroup/pids\"", "the calling runtime wants it ro", "mounts.file-systems"],
        ),
        (
            "writable, as a part",
            |images| again(images, OWN, |mount| mount.ext_key = None),
            &["\"/spare\"", "a part of the mount at \"/sys/fs/cgroup/pids\", which is ro"],
        ),
    ]);
    // What they say of its root, and of its type, shows no group above that of the tasks.
    let images = Images::of(&scratch);
    images.mounts(|mounts| {
        let own = mounts.iter_mut().find(|mount| mount.mountpoint == OWN.as_bytes()).unwrap();
        own.root = b"/".to_vec();
    });
    let Asleep { mut container, .. } = asleep;
    container.restore(&[]);
    let shown = format!("/proc/{}/root{OWN}/cgroup.procs", container.pid());
    let tasks = fs::read_to_string(shown).unwrap();
    assert!(tasks.lines().any(|task| task == container.pid().to_string()), "{tasks}");
}
