//! Images that were changed to get more than the calling runtime gives: each is refused by name,
//! nothing is made, nothing is left, and the unchanged images come back.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use torpor_images::proto::{
    CgSetEntry, CgroupDirEntry, CgroupEntry, CgroupPerms, CgroupPropEntry, CoreEntry,
    FanotifyFileEntry, FanotifyInodeMarkEntry, FanotifyMarkEntry, FanotifyMountMarkEntry, FdTypes,
    FdinfoEntry, FhEntry, FileEntry, Fstype, InventoryEntry, MarkType, MmEntry, MntEntry,
    PstreeEntry, RemapFilePathEntry, RemapType, TaskKobjIdsEntry, TtyFileEntry, TtyInfoEntry,
    TtyType, UidGidExtent, UsernsEntry,
};
use torpor_images::{ImageDir, kind};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::goes_on;

/// A machine that takes no images for its own, and that asks for the groups of the images.
pub(crate) const FOREIGN: &str = "host-key none\nmanage-cgroups soft\n";

/// Counts, beside a process that does nothing, and keeps an unlinked file open.
pub(crate) const PROGRAM: &str = "echo content >/dev/shm/file; exec 7>/vol/ghost; rm /vol/ghost; \
    sleep 1000 & i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done";

/// A container, asleep.
struct Asleep<'a> {
    scratch: &'a Scratch,
    bundle: &'a Bundle,
    container: Container<'a>,
}

/// A way to change images, and what the refusal names.
pub(crate) type Row = (&'static str, fn(&Images), &'static [&'static str]);

/// Images that are being changed.
pub(crate) struct Images {
    pub(crate) dir: ImageDir,
    pub(crate) path: PathBuf,
    /// The scratch directory.
    scratch: PathBuf,
}

pub(crate) fn bundle(scratch: &Scratch) -> Bundle {
    bundle_of(scratch, PROGRAM)
}

/// A bundle with two volumes, of which one cannot be written to.
pub(crate) fn bundle_of(scratch: &Scratch, program: &str) -> Bundle {
    for volume in ["ro", "vol"] {
        scratch.dir(volume);
    }
    fs::write(scratch.join("ro/kept"), "kept").unwrap();
    std::os::unix::fs::symlink("/", scratch.join("vol/link")).unwrap();
    let bundle = Bundle::new(scratch, &[], &["sh", "-c", program])
        .bind(&scratch.join("ro"), "/ro", "ro")
        .bind(&scratch.join("vol"), "/vol", "rw");
    for place in ["spare", "ro", "vol"] {
        fs::create_dir_all(bundle.file(place)).unwrap();
    }
    // What every container may use, though not by this name.
    command("mknod", &[bundle.file("tun").to_str().unwrap(), "c", "10", "200"]).succeed();
    bundle
        .configure(|config| config["linux"]["cgroupsPath"] = json!(format!("/{}", scratch.name())))
}

impl Asleep<'_> {
    /// Changes a copy of the images in each of the ways.
    fn refused(&self, rows: &[Row]) {
        let images = self.scratch.join("images");
        let whole = self.scratch.join("whole");
        let _ = fs::remove_dir_all(&whole);
        fs::rename(&images, &whole).unwrap();
        for (what, change, wanted) in rows {
            eprintln!("{what}");
            command("cp", &["-a"]).arg(&whole).arg(&images).succeed();
            change(&Images::of(self.scratch));
            let id = self.container.id();
            let _ = fs::remove_file(self.scratch.join("work/restore.log"));
            self.container.restore_call(&[]).args(["--detach", id]).fail();
            let log = fs::read_to_string(self.scratch.join("work/restore.log")).unwrap();
            let errors = log.lines().filter(|line| line.contains("Error ("));
            let error = errors.collect::<Vec<_>>().join("\n");
            for part in *wanted {
                assert!(error.contains(part), "{what}: {part:?} is missing: {error}");
            }
            assert!(!cgroup_left(id), "{what}: a cgroup is left");
            self.container.runc("state").arg(id).fail();
            assert_eq!(fs::read_to_string(self.scratch.join("ro/kept")).unwrap(), "kept", "{what}");
            let left = fs::read_dir(self.scratch.join("vol")).unwrap().count();
            assert_eq!(left, 1, "{what}: something is left in the volume");
            fs::remove_dir_all(&images).unwrap();
        }
        fs::rename(&whole, &images).unwrap();
    }
}

/// The mount at a place.
fn at<'m>(mounts: &'m [MntEntry], place: &str) -> &'m MntEntry {
    mounts.iter().find(|mount| mount.mountpoint == place.as_bytes()).unwrap()
}

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

/// Changes images in all of these ways; the unchanged ones come back at the end.
pub(crate) fn refuses(name: &str, rows: &[Row]) {
    refuses_by(name, "", rows);
}

/// The same, under a policy.
pub(crate) fn refuses_by(name: &str, policy: &str, rows: &[Row]) {
    let scratch = Scratch::new(name);
    refuses_of(&scratch, &bundle(&scratch), policy, rows, |_| {});
}

/// The same with the container of a bundle, whose images come back after a change of another kind.
pub(crate) fn refuses_of(
    scratch: &Scratch,
    bundle: &Bundle,
    policy: &str,
    rows: &[Row],
    harmless: impl FnOnce(&Images),
) {
    let file = scratch.join("policy.toml");
    fs::write(&file, policy).unwrap();
    scratch.configure(&format!("{FOREIGN}policy {}\n", file.display()));
    let container = Container::start(scratch, bundle);
    goes_on(&bundle.file("count"));
    let mut asleep = Asleep { scratch, bundle, container };
    asleep.container.checkpoint(&[]);
    asleep.refused(rows);
    // The group of the unchanged container may use what the policy of some rows denies.
    fs::write(&file, "").unwrap();
    harmless(&Images::of(scratch));
    asleep.container.restore(&[]);
    goes_on(&asleep.bundle.file("count"));
}

impl Images {
    /// Those of the container of this scratch directory.
    pub(crate) fn of(scratch: &Scratch) -> Self {
        let path = scratch.join("images");
        let dir = ImageDir::open(&path).unwrap();
        Images { dir, path, scratch: scratch.path().to_owned() }
    }

    /// Changes the bytes of one.
    pub(crate) fn bytes(&self, name: &str, change: impl FnOnce(&mut [u8])) {
        let file = self.path.join(name);
        let mut bytes = fs::read(&file).unwrap();
        change(&mut bytes);
        fs::write(&file, bytes).unwrap();
    }

    /// The tasks that had not ended.
    pub(crate) fn tasks(&self) -> Vec<u32> {
        let tree = self.dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap();
        let pids = tree.iter().map(|entry| entry.pid);
        pids.filter(|&pid| self.dir.has(kind::MM, pid.into()).unwrap()).collect()
    }

    pub(crate) fn core(&self, task: u32, change: impl FnOnce(&mut CoreEntry)) {
        let mut core: CoreEntry = self.dir.read_one(kind::CORE, task.into()).unwrap();
        change(&mut core);
        self.dir.write_one(kind::CORE, task.into(), &core).unwrap();
    }

    /// Changes the mappings of all tasks.
    pub(crate) fn memory(&self, change: fn(&mut MmEntry)) {
        for task in self.tasks() {
            let mut mm: MmEntry = self.dir.read_one(kind::MM, task.into()).unwrap();
            change(&mut mm);
            self.dir.write_one(kind::MM, task.into(), &mm).unwrap();
        }
    }

    fn ids_of(&self, task: u32) -> TaskKobjIdsEntry {
        let core: CoreEntry = self.dir.read_one(kind::CORE, task.into()).unwrap();
        core.ids.unwrap_or_else(|| self.dir.read_one(kind::IDS, task.into()).unwrap())
    }

    /// Changes what a task shares.
    fn ids(&self, task: u32, change: impl FnOnce(&mut TaskKobjIdsEntry)) {
        let mut ids = self.ids_of(task);
        change(&mut ids);
        self.core(task, |core| core.ids = Some(ids));
    }

    /// That of all tasks.
    fn all_ids(&self, change: fn(&mut TaskKobjIdsEntry)) {
        self.tasks().into_iter().for_each(|task| self.ids(task, change));
    }

    pub(crate) fn root_ids(&self) -> TaskKobjIdsEntry {
        self.ids_of(self.tasks()[0])
    }

    pub(crate) fn inventory(&self, change: impl FnOnce(&mut InventoryEntry)) {
        let mut inventory = self.dir.inventory().unwrap();
        change(&mut inventory);
        self.dir.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    }

    /// Changes the mounts of the root task.
    fn mounts(&self, change: impl FnOnce(&mut Vec<MntEntry>)) {
        let space = u64::from(self.root_ids().mnt_ns_id.unwrap());
        let mut mounts: Vec<MntEntry> = self.dir.read_all(kind::MNTS, space).unwrap();
        change(&mut mounts);
        self.dir.write_all(kind::MNTS, space, &mounts).unwrap();
    }

    /// Adds a mount at /spare.
    fn mount(&self, change: impl FnOnce(&[MntEntry], &mut MntEntry)) {
        self.mounts(|mounts| {
            let root = mounts.iter().find(|mount| mount.mountpoint == b"/").unwrap();
            let mut spare = MntEntry {
                mnt_id: 900_001,
                root_dev: 0xff_fff,
                parent_mnt_id: root.mnt_id,
                root: b"/".to_vec(),
                mountpoint: b"/spare".to_vec(),
                source: b"none".to_vec(),
                ..MntEntry::default()
            };
            change(mounts, &mut spare);
            mounts.push(spare);
        });
    }

    pub(crate) fn files(&self, change: impl FnOnce(&mut Vec<FileEntry>)) {
        let mut files: Vec<FileEntry> = self.dir.read_all(kind::FILES, 0).unwrap();
        change(&mut files);
        self.dir.write_all(kind::FILES, 0, &files).unwrap();
    }

    /// Adds an open file to the root task.
    pub(crate) fn open(&self, ty: FdTypes, change: impl FnOnce(&mut FileEntry)) {
        let id = 900_001;
        let mut entry = FileEntry { r#type: ty.into(), id, ..FileEntry::default() };
        change(&mut entry);
        self.files(|files| files.push(entry));
        let table = u64::from(self.root_ids().files_id);
        let mut fds: Vec<FdinfoEntry> = self.dir.read_all(kind::FDINFO, table).unwrap();
        fds.push(FdinfoEntry {
            id,
            flags: 0,
            r#type: ty.into(),
            fd: 99,
            xattr_security_selinux: None,
        });
        self.dir.write_all(kind::FDINFO, table, &fds).unwrap();
    }

    /// The number of the file that has this end of its path.
    fn file(&self, end: &str) -> FileEntry {
        let files: Vec<FileEntry> = self.dir.read_all(kind::FILES, 0).unwrap();
        let named = |entry: &FileEntry| {
            entry.reg.as_ref().is_some_and(|reg| reg.name.ends_with(end.as_bytes()))
        };
        files.into_iter().find(named).unwrap()
    }

    fn cgroups(&self, change: impl FnOnce(&mut CgroupEntry)) {
        let mut groups: CgroupEntry = self.dir.read_one(kind::CGROUP, 0).unwrap();
        change(&mut groups);
        self.dir.write_one(kind::CGROUP, 0, &groups).unwrap();
    }

    pub(crate) fn raw(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path.join(name), bytes).unwrap();
    }
}

#[test]
fn namespace_numbers() {
    fn user_as(images: &Images, of: fn(&TaskKobjIdsEntry) -> Option<u32>) {
        let number = of(&images.root_ids()).unwrap();
        for task in images.tasks() {
            images.ids(task, |ids| ids.user_ns_id = Some(number));
        }
        let map = || vec![UidGidExtent { first: 0, lower_first: 0, count: u32::MAX }];
        let entry = UsernsEntry { uid_map: map(), gid_map: map(), torpor_nested: None };
        images.dir.write_one(kind::USERNS, number.into(), &entry).unwrap();
    }
    refuses(
        "images-numbers",
        &[
            (
                "user as pid",
                |images| user_as(images, |ids| ids.pid_ns_id),
                &["core-1.img: number ", " is a user and a pid namespace"],
            ),
            (
                "user as mnt",
                |images| user_as(images, |ids| ids.mnt_ns_id),
                &["core-1.img: ", " is a user and a mnt namespace"],
            ),
            (
                "net as pid",
                |images| images.all_ids(|ids| ids.net_ns_id = ids.pid_ns_id),
                &["core-1.img: ", " is a pid and a net namespace"],
            ),
            (
                "ipc as uts",
                |images| images.all_ids(|ids| ids.ipc_ns_id = ids.uts_ns_id),
                &[" is a uts and a ipc namespace"],
            ),
            (
                "uts as mnt",
                |images| images.all_ids(|ids| ids.uts_ns_id = ids.mnt_ns_id),
                &[" is a uts and a mnt namespace"],
            ),
            (
                "only that of a child",
                |images| {
                    let (child, root) = (*images.tasks().last().unwrap(), images.root_ids());
                    images.ids(child, |ids| ids.net_ns_id = root.ipc_ns_id);
                },
                &[" namespace"],
            ),
            (
                "the host's",
                |images| {
                    let root = images.root_ids();
                    images.inventory(|i| {
                        i.root_ids.get_or_insert_default().user_ns_id = root.pid_ns_id;
                    });
                },
                &["core-1.img: ", " is a pid and a user namespace"],
            ),
            (
                "the host's own pid namespace",
                |images| {
                    let root = images.root_ids();
                    images.inventory(|i| {
                        i.root_ids.get_or_insert_default().pid_ns_id = root.pid_ns_id;
                    });
                },
                &["lives in this host's pid namespace", "(foreign.namespaces.require)"],
            ),
            ("no number", |images| images.all_ids(|ids| ids.net_ns_id = None), &["net namespace"]),
            (
                "a nested pid namespace",
                |images| {
                    let child = *images.tasks().last().unwrap();
                    images.ids(child, |ids| ids.pid_ns_id = Some(900_001));
                },
                &["its pid namespace is one that its parent has entered"],
            ),
            (
                "a namespace that nobody lives in",
                |images| {
                    let entry = UsernsEntry::default();
                    images.dir.write_one(kind::USERNS, 900_001, &entry).unwrap();
                },
                &["userns-900001.img: no task lives in user namespace 900001"],
            ),
        ],
    );
}

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
                &["files.img", "handle"],
            ),
        ],
    );
}

#[test]
fn mounts() {
    const HOST: &[&str] = &["mountpoints"];
    fn linked(images: &Images, fstype: Fstype, below: &str) {
        let source = images.scratch.join("vol/link").join(below);
        images.mount(|_, mount| {
            mount.fstype = fstype as u32;
            mount.ext_mount = Some(true);
            mount.source = source.to_str().unwrap().as_bytes().to_vec();
        });
    }
    fn auto(images: &Images, name: &str) {
        images.mount(|_, mount| {
            mount.fstype = Fstype::Auto as u32;
            mount.fsname = Some(name.to_owned());
        });
    }
    refuses(
        "images-mounts",
        &[
            ("a link to the root, as devpts", |images| linked(images, Fstype::Devpts, ""), HOST),
            (
                "a way through a link, as devpts",
                |images| linked(images, Fstype::Devpts, "etc"),
                HOST,
            ),
            ("a link, as a tmpfs", |images| linked(images, Fstype::Tmpfs, ""), HOST),
            ("a link, as another", |images| linked(images, Fstype::Unsupported, "root"), HOST),
            (
                "a path that climbs",
                |images| {
                    let source = images.scratch.join("vol/../../..");
                    images.mount(|_, mount| {
                        mount.fstype = Fstype::Devpts as u32;
                        mount.ext_mount = Some(true);
                        mount.source = source.to_str().unwrap().as_bytes().to_vec();
                    });
                },
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

#[test]
fn groups_and_devices() {
    const BELOW: &[&str] = &["cgroup.img: cgroup \"/\"", "(foreign.cgroups.allow)"];
    fn to_root(set: &mut CgSetEntry) {
        set.ctls.iter_mut().for_each(|member| member.path = b"/".to_vec());
    }
    fn new_set(images: &Images, change: fn(&mut CgSetEntry)) {
        images.cgroups(|groups| {
            let mut set = groups.sets.last().unwrap().clone();
            set.id = 900_001;
            change(&mut set);
            groups.sets.push(set);
        });
    }
    /// A group inside that of the container.
    fn child(images: &Images, change: fn(&mut CgroupDirEntry)) {
        images.cgroups(|groups| {
            let own = &mut groups.controllers[0].dirs[0];
            let mut child =
                CgroupDirEntry { dir_name: b"inside".to_vec(), children: vec![], ..own.clone() };
            change(&mut child);
            own.children.push(child);
        });
    }
    refuses(
        "images-cgroups",
        &[
            (
                "a child at the root",
                |images| {
                    new_set(images, to_root);
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                BELOW,
            ),
            (
                "two sets for one task",
                |images| {
                    new_set(images, to_root);
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.tc.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["core-", "two sets of cgroups"],
            ),
            (
                "a group beside that of the container",
                |images| {
                    new_set(images, |set| {
                        set.ctls.iter_mut().for_each(|member| member.path = b"/other".to_vec());
                    });
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["cgroup \"/other\"", "(foreign.cgroups.allow)"],
            ),
            (
                "a cgroup namespace that begins above the group of the container",
                |images| {
                    let last = *images.tasks().last().unwrap();
                    new_set(images, |set| {
                        // A part of the path, which is the name of another group.
                        set.ctls.iter_mut().for_each(|member| member.cgns_prefix = Some(4));
                    });
                    images.core(last, |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                    images.ids(last, |ids| ids.cgroup_ns_id = Some(900_002));
                },
                &["cgroup.img: cgroup \"/", "(foreign.cgroups.allow)"],
            ),
            (
                "a path that climbs",
                |images| {
                    new_set(images, |set| {
                        set.ctls.iter_mut().for_each(|member| member.path.extend(b"/../.."))
                    });
                },
                &["cgroup.img: set 900001: ", "is no path of a group"],
            ),
            (
                "a set that there is not",
                |images| {
                    images.core(*images.tasks().last().unwrap(), |core| {
                        core.thread_core.as_mut().unwrap().cg_set = Some(900_001);
                    });
                },
                &["core-", "its set of cgroups, 900001, is not in cgroup.img"],
            ),
            (
                "a group inside that belongs to somebody",
                |images| child(images, |child| child.dir_perms.as_mut().unwrap().uid = 1000),
                &["/inside\" belongs to 1000:", "(foreign.cgroups.delegate)"],
            ),
            (
                "a group inside that everybody may change",
                |images| child(images, |child| child.dir_perms.as_mut().unwrap().mode = 0o777),
                &["/inside\" belongs to 0:0 (mode 777)", "(foreign.cgroups.delegate)"],
            ),
            (
                "a limit that somebody may lift",
                |images| {
                    child(images, |child| {
                        let perms = Some(CgroupPerms { mode: 0o100_644, uid: 1000, gid: 0 });
                        let (name, value) = ("pids.max".into(), "10".into());
                        child.properties = vec![CgroupPropEntry { name, value, perms }];
                    });
                },
                &["/inside\" belongs to 1000:0 (mode 644)", "(foreign.cgroups.delegate)"],
            ),
            (
                "a program of this host for an empty group",
                |images| {
                    child(images, |child| {
                        let (name, value) = ("release_agent".into(), "/vol/program".into());
                        child.properties.push(CgroupPropEntry { name, value, perms: None });
                    });
                },
                &["has \"/vol/program\" run on this host", "(foreign.cgroups.release-agent)"],
            ),
            (
                "all devices, at the root",
                |images| {
                    images.cgroups(|groups| {
                        let property = CgroupPropEntry {
                            name: "devices.allow".into(),
                            value: "a *:* rwm".into(),
                            perms: None,
                        };
                        let dir = CgroupDirEntry {
                            dir_name: b"/".to_vec(),
                            properties: vec![property],
                            ..Default::default()
                        };
                        groups.controllers[0].dirs.push(dir);
                    });
                },
                &["cgroup.img: device b *:* at \"//devices.allow\"", "(foreign.files.devices)"],
            ),
        ],
    );
}

/// A policy without a device, and images that lead there by a descriptor and in other ways.
#[test]
fn devices() {
    const DENIED: &[&str] = &["files.img: open device c 10:200 at \"/tun\"", "files.devices)"];
    fn lead(images: &Images, which: impl Fn(&FileEntry) -> bool) {
        let mut led = 0;
        images.files(|files| {
            for file in files.iter_mut().filter(|file| which(file)) {
                let reg = file.reg.as_mut().unwrap();
                (reg.name, reg.size, reg.mode) = (b"/tun".to_vec(), None, None);
                reg.mnt_id = None;
                led += 1;
            }
        });
        assert!(led > 0);
        // What a group may use is another matter.
        images.cgroups(|groups| {
            let dirs = groups.controllers.iter_mut().flat_map(|controller| &mut controller.dirs);
            dirs.for_each(|dir| dir.properties.clear());
        });
    }
    /// A descriptor that is said to be a terminal, by the path of something else.
    fn terminal(images: &Images, ty: TtyType) {
        let sid = images.dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap()[0].sid;
        let info = TtyInfoEntry { id: 900_010, r#type: ty.into(), sid, ..Default::default() };
        images.dir.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
        let path = images.file("/dev/null");
        images.files(|files| {
            let mut reg = path.reg.unwrap();
            (reg.id, reg.size, reg.mode) = (900_011, None, None);
            files.push(FileEntry { id: 900_011, reg: Some(reg), ..path });
        });
        images.open(FdTypes::Tty, |entry| {
            let regf_id = Some(900_011);
            entry.tty = Some(TtyFileEntry {
                id: entry.id,
                tty_info_id: info.id,
                regf_id,
                ..Default::default()
            });
        });
        lead(images, |file| file.id == 900_011);
    }
    fn has_path(file: &FileEntry, path: &str) -> bool {
        file.reg.as_ref().is_some_and(|reg| reg.name.ends_with(path.as_bytes()))
    }
    refuses_by(
        "images-devices",
        "foreign.files.devices = ['c 1:*', 'c 5:*', 'c 136:*']",
        &[
            ("a descriptor", |images| lead(images, |file| has_path(file, "/dev/null")), DENIED),
            ("a program", |images| lead(images, |file| has_path(file, "/busybox")), DENIED),
            ("a serial line", |images| terminal(images, TtyType::Serial), DENIED),
            ("a console", |images| terminal(images, TtyType::Console), DENIED),
            ("the terminal of the session", |images| terminal(images, TtyType::Ctty), DENIED),
            (
                "a mapping with flags of its own",
                |images| {
                    lead(images, |file| has_path(file, "/busybox"));
                    images.memory(|mm| mm.vmas.iter_mut().for_each(|vma| vma.fdflags = Some(2)));
                },
                DENIED,
            ),
            (
                "a mapping that is locked",
                |images| {
                    lead(images, |file| has_path(file, "/busybox"));
                    images.memory(|mm| {
                        let files = mm.vmas.iter_mut().filter(|vma| vma.status & 0xc0 != 0);
                        files.for_each(|vma| vma.torpor_flock = Some(1));
                    });
                },
                DENIED,
            ),
        ],
    );
}

/// A tar header for a file.
fn header(change: impl Fn(&mut [u8; 512])) -> [u8; 512] {
    let mut header = [0; 512];
    header[..6].copy_from_slice(b"./file");
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    change(&mut header);
    header[148..156].copy_from_slice(b"        ");
    let sum: u32 = header.iter().map(|&b| u32::from(b)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

#[test]
fn archives() {
    /// In the place of what is in /dev.
    fn archive(images: &Images, parts: &[&[u8]]) {
        let mut device = 0;
        images.mounts(|mounts| {
            device = mounts.iter().find(|mount| mount.mountpoint == b"/dev").unwrap().root_dev;
        });
        let tar = images.scratch.join("archive");
        fs::write(&tar, [&parts.concat()[..], &[0; 1024]].concat()).unwrap();
        let packed = command("gzip", &["--force", "--stdout"]).arg(&tar).output().unwrap();
        images.raw(&kind::TMPFS_DEV.file_name(device.into()), &packed.stdout);
    }
    refuses(
        "images-archive",
        &[
            (
                "a file that looks like a directory",
                |images| {
                    let file = header(|h| (h[6], h[134]) = (b'/', b'1'));
                    let inner = header(|h| h[100..107].copy_from_slice(b"0004755"));
                    archive(images, &[&file, &inner]);
                },
                &["tmpfs-dev-", "ends with a slash, but is no directory"],
            ),
            (
                "a map of more data than there is",
                |images| {
                    let sparse = header(|h| {
                        h[156] = b'S';
                        h[386..397].copy_from_slice(b"00000000000");
                        h[398..409].copy_from_slice(b"00000001000");
                        h[483..494].copy_from_slice(b"00000001000");
                    });
                    let inner = header(|h| h[100..107].copy_from_slice(b"0004755"));
                    archive(images, &[&sparse, &inner]);
                },
                &["tmpfs-dev-", "512 bytes of data, of which there are 0"],
            ),
            (
                "a path that climbs",
                |images| archive(images, &[&header(|h| h[..6].copy_from_slice(b"../../"))]),
                &["tmpfs-dev-"],
            ),
            (
                "something behind the end",
                |images| archive(images, &[&header(|_| {}), &[0; 1024], &header(|_| {})]),
                &["tmpfs-dev-", "goes on behind its end"],
            ),
            (
                "a set-uid program",
                |images| archive(images, &[&header(|h| h[100..107].copy_from_slice(b"0004755"))]),
                &["tmpfs-dev-", "(mode 4755)", "(foreign.files.set-uid)"],
            ),
            (
                "a device",
                |images| {
                    let disk = header(|h| {
                        h[156] = b'4';
                        h[329..336].copy_from_slice(b"0000010");
                        h[337..344].copy_from_slice(b"0000000");
                    });
                    archive(images, &[&disk]);
                },
                &["tmpfs-dev-", "device b 8:0", "(foreign.files.devices)"],
            ),
        ],
    );
}

/// The policy file's line that a refusal names makes up for it.
#[test]
fn a_rule_allows_it() {
    let scratch = Scratch::new("images-allowed");
    scratch.configure(&format!("{FOREIGN}policy-rule foreign.scheduling.allow=true\n"));
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let path: &Path = &scratch.join("images");
    let dir = ImageDir::open(path).unwrap();
    let mut core: CoreEntry = dir.read_one(kind::CORE, 1).unwrap();
    core.thread_core.as_mut().unwrap().sched_nice = Some(-5);
    dir.write_one(kind::CORE, 1, &core).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}
