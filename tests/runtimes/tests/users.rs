//! Images whose tasks have other users and groups than the calling runtime gives, or files that these may not open.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{
    CredsEntry, FdTypes, FhEntry, Fstype, InotifyFileEntry, InotifyWdEntry, MemfdFileEntry,
    MemfdInodeEntry, PagemapHead,
};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until;

use crate::counting::{COUNT, goes_on};
use crate::images::archives::{archive, header};
use crate::images::{FOREIGN, Images, at, bundle_of, refuses_of};

/// Why a file is not opened.
const RIGHTS: &str = "with no more rights than the calling runtime gives";

/// What the shell has read from /data is another file, on the mount at `place`.
fn other_file(images: &Images, place: &str, path: &str) {
    let mut mount = 0;
    images.mounts(|mounts| mount = at(mounts, place).mnt_id.cast_signed());
    images.files(|files| {
        let mut named = files.iter_mut().filter_map(|file| file.reg.as_mut());
        let reg = named.find(|reg| reg.name == b"/data").unwrap();
        (reg.name, reg.mnt_id) = (path.into(), Some(mount));
        (reg.size, reg.mode, reg.pos) = (None, None, 0);
    });
}

/// A container that cannot change its ids has those of its configuration.
#[test]
fn users_and_groups() {
    fn creds(images: &Images, change: impl Fn(&mut CredsEntry)) {
        for task in images.tasks() {
            images.core(task, |core| {
                change(core.thread_core.as_mut().unwrap().creds.as_mut().unwrap());
            });
        }
    }
    const USER: &[&str] = &[
        "core-1.img: task 1: user id 0: the calling runtime gives the container another one, and no \
         CAP_SETUID (foreign.users.allow)",
    ];
    const GROUP: &[&str] = &["and no CAP_SETGID (foreign.groups.allow)"];
    const LEFT: &[&str] = &[
        "core-1.img: task 1: is not in group 4711, where it belongs: the calling runtime gives no CAP_SETGID \
         (foreign.groups.allow)",
    ];
    let scratch = Scratch::new("images-users");
    let bundle = bundle_of(&scratch, COUNT);
    let bundle = bundle.configure(|config| {
        config["process"]["user"] = json!({"uid": 65534, "gid": 65533, "additionalGids": [4711]});
        config["process"]["noNewPrivileges"] = json!(false);
    });
    bundle.write("count", "");
    std::os::unix::fs::chown(bundle.file("count"), Some(65534), None).unwrap();
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "this host's root",
                |images| {
                    creds(images, |creds| {
                        (creds.uid, creds.euid, creds.suid, creds.fsuid) = (0, 0, 0, 0);
                    });
                },
                USER,
            ),
            ("one that could become it", |i| creds(i, |creds| creds.suid = 0), USER),
            ("root's files", |i| creds(i, |creds| creds.fsuid = 0), USER),
            ("root's group", |i| creds(i, |creds| creds.egid = 0), GROUP),
            ("the group of disks", |i| creds(i, |creds| creds.groups.push(6)), GROUP),
            ("out of its own group", |i| creds(i, |creds| creds.groups.clear()), LEFT),
        ],
        |images| creds(images, |creds| creds.gid = 4711),
    );
}

/// Files are opened with what the container has, whoever opens them.
#[test]
fn files_of_others() {
    fn watch(images: &Images, path: &str) {
        images.open(FdTypes::Inotify, |entry| {
            let f_handle = FhEntry { path: Some(path.into()), ..FhEntry::default() };
            let (id, mask) = (entry.id, 0x100); // IN_CREATE
            let watch = InotifyWdEntry { id, mask, wd: 1, f_handle, ..InotifyWdEntry::default() };
            entry.ify = Some(InotifyFileEntry { id, wd: vec![watch], ..Default::default() });
        });
    }
    /// What is in memory only is opened with all rights.
    fn in_memory(images: &Images) {
        images.memory(|mm| {
            // Private mappings of files are shared ones of files in memory, open for reading and writing.
            let files = mm.vmas.iter_mut().filter(|area| area.status & 0x40 != 0);
            files.for_each(|area| {
                (area.status, area.flags, area.fdflags) = (0x4081, 1, Some(2));
            });
        });
    }
    const IN_MEMORY: &[&str] = &["mm-1.img: mapping", "which is no file in memory"];
    const UNREADABLE: &str = "would be watched, which the container's user may not read";
    const WATCHED: &[&str] = &["files.img: /secret", UNREADABLE];
    const NAMES: &[&str] = &["files.img: /closed", UNREADABLE];
    const SECRET: &[&str] = &["open /secret", RIGHTS];
    const INSIDE: &[&str] = &["open /closed/inside", RIGHTS];
    let scratch = Scratch::new("images-openers");
    let bundle = bundle_of(&scratch, &format!("exec 8</data; {COUNT}")).configure(|config| {
        config["process"]["user"] = json!({"uid": 65534, "gid": 65534});
    });
    for (file, mode) in [("data", 0o644), ("secret", 0o600), ("closed/inside", 0o644)] {
        fs::create_dir_all(bundle.file(file).parent().unwrap()).unwrap();
        bundle.write(file, file);
        fs::set_permissions(bundle.file(file), Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(bundle.file("closed"), Permissions::from_mode(0o700)).unwrap();
    bundle.write("count", "");
    std::os::unix::fs::chown(bundle.file("count"), Some(65534), None).unwrap();
    // Its user could change the mode.
    bundle.write("mine", "mine");
    std::os::unix::fs::chown(bundle.file("mine"), Some(65534), None).unwrap();
    fs::set_permissions(bundle.file("mine"), Permissions::from_mode(0o000)).unwrap();
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            ("root's file", |images| other_file(images, "/", "/secret"), SECRET),
            ("one in root's directory", |i| other_file(i, "/", "/closed/inside"), INSIDE),
            ("root's file, watched", |images| watch(images, "/secret"), WATCHED),
            ("names in root's directory", |images| watch(images, "/closed"), NAMES),
            ("one in there, watched", |images| watch(images, "/closed/inside"), INSIDE),
            (
                "this host's log",
                |images| other_file(images, "/proc", "/proc/kmsg"),
                &["open /proc/kmsg", RIGHTS],
            ),
            ("root's programs, to be written to", in_memory, IN_MEMORY),
        ],
        |images| {
            other_file(images, "/", "/mine");
            watch(images, "/mine");
        },
    );
}

/// A volume that shows processes of this host: none of their files is opened, nor any of the restoring program.
#[test]
fn processes_of_this_host() {
    let scratch = Scratch::new("images-processes");
    let bundle = bundle_of(&scratch, &format!("exec 8</data; {COUNT}")).configure(|config| {
        let mount = json!({"type": "bind", "source": "/proc", "destination": "/host", "options": ["bind", "rw"]});
        config["mounts"].as_array_mut().unwrap().push(mount);
    });
    fs::create_dir_all(bundle.file("host")).unwrap();
    bundle.write("data", "data");
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "what the first process has begun with",
                |images| other_file(images, "/host", "/host/1/environ"),
                &["open /host/1/environ", RIGHTS],
            ),
            (
                "its memory",
                |images| other_file(images, "/host", "/host/1/mem"),
                &["open /host/1/mem", RIGHTS],
            ),
            (
                "that of the restoring program",
                |images| other_file(images, "/host", "/host/self/mem"),
                &["/host/self/mem", "leads to a file of procfs over a link"],
            ),
        ],
        |images| other_file(images, "/proc", "/proc/1/environ"),
    );
}

/// In a user namespace nobody has a right over what belongs to this host's root, whatever ids and capabilities there are.
#[test]
fn files_of_ids_that_a_user_namespace_lacks() {
    const ROOT: u32 = 300_000;
    let scratch = Scratch::new("images-mapped");
    let mapped = json!([{"containerID": 0, "hostID": ROOT, "size": 65_536}]);
    let bundle = bundle_of(&scratch, &format!("exec 8</data; {COUNT}"))
        .bind(&scratch.dir("files"), "/files", "rw")
        .configure(|config| {
            let all = ["CAP_SETUID", "CAP_SETGID", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"];
            for set in ["bounding", "effective", "permitted"] {
                config["process"]["capabilities"][set] = json!(all);
            }
            // The groups of such a container are its own to change.
            let mounts = config["mounts"].as_array_mut().unwrap();
            let groups = mounts.iter_mut().find(|mount| mount["type"] == "cgroup").unwrap();
            groups["options"].as_array_mut().unwrap().retain(|option| option != "ro");
            let linux = &mut config["linux"];
            linux["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
            (linux["uidMappings"], linux["gidMappings"]) = (mapped.clone(), mapped);
        });
    bundle.write("data", "data");
    fs::create_dir_all(bundle.file("files")).unwrap();
    let owner = format!("{ROOT}:{ROOT}");
    command("chown", &["--recursive", "--no-dereference", &owner]).arg(bundle.file("")).succeed();
    let at = |path: &str| scratch.join("files").join(path);
    fs::create_dir(at("closed")).unwrap();
    for (path, owner) in [("secret", 0), ("closed/inside", ROOT + 5), ("theirs", ROOT + 5)] {
        fs::write(at(path), path).unwrap();
        std::os::unix::fs::chown(at(path), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(at(path), Permissions::from_mode(0o600)).unwrap();
    }
    fs::set_permissions(at("closed"), Permissions::from_mode(0o700)).unwrap();
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "this host's root's",
                |images| other_file(images, "/files", "/files/secret"),
                &["open /files/secret", RIGHTS],
            ),
            (
                "one in this host's root's directory",
                |images| other_file(images, "/files", "/files/closed/inside"),
                &["open /files/closed/inside", RIGHTS],
            ),
        ],
        |images| other_file(images, "/files", "/files/theirs"),
    );
}

/// What the configuration gives as a bound only: without new privileges no task has it.
#[test]
fn what_is_a_bound_only() {
    fn creds(images: &Images, change: impl FnOnce(&mut CredsEntry)) {
        images.core(1, |core| {
            change(core.thread_core.as_mut().unwrap().creds.as_mut().unwrap());
        });
    }
    const BOUND: &[&str] = &[
        "core-1.img: task 1: capabilities that the calling runtime gives the container as a bound only, without new \
         privileges: ",
        "DAC_OVERRIDE",
        "(foreign.capabilities.allow)",
    ];
    const ID: &[&str] =
        &["core-1.img: task 1: user id 0", "and no CAP_SETUID (foreign.users.allow)"];
    let scratch = Scratch::new("images-bounds");
    let bundle = bundle_of_user(&scratch, &format!("exec 8</data; {COUNT}")).configure(|config| {
        let bound = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_SETUID", "CAP_SETGID"];
        config["process"]["capabilities"] = json!({"bounding": bound});
        config["process"]["noNewPrivileges"] = json!(true);
    });
    for (file, mode) in [("data", 0o644), ("secret", 0o600)] {
        bundle.write(file, file);
        fs::set_permissions(bundle.file(file), Permissions::from_mode(mode)).unwrap();
    }
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "all of it",
                |images| {
                    creds(images, |creds| {
                        creds.cap_prm.clone_from(&creds.cap_bnd);
                        creds.cap_eff.clone_from(&creds.cap_bnd);
                    });
                },
                BOUND,
            ),
            (
                "to be used later",
                |images| creds(images, |creds| creds.cap_prm.clone_from(&creds.cap_bnd)),
                BOUND,
            ),
            ("root's files", |images| creds(images, |creds| creds.fsuid = 0), ID),
            (
                "root's file, open",
                |images| other_file(images, "/", "/secret"),
                &["open /secret", RIGHTS],
            ),
        ],
        |_| (),
    );
}

/// A program that makes another user of whoever runs it, for those who cannot become one.
#[test]
fn programs_of_others() {
    fn memory_file(images: &Images, mode: u32) {
        let id = 900_001;
        let pages = PagemapHead { pages_id: id, ..Default::default() };
        images.dir.write_one(kind::SHMEM_PAGEMAP, id.into(), &pages).unwrap();
        images.raw(&kind::PAGES.file_name(id.into()), b"");
        let (inode_id, mode) = (id.into(), Some(mode));
        let inode = MemfdInodeEntry {
            name: b"x".to_vec(),
            inode_id,
            shmid: id,
            mode,
            ..Default::default()
        };
        images.dir.write_all(kind::MEMFD_INODE, 0, [&inode]).unwrap();
        images.open(FdTypes::Memfd, |entry| {
            let (id, inode_id) = (entry.id, id);
            entry.memfd = Some(MemfdFileEntry { id, inode_id, flags: 2, ..Default::default() });
        });
    }
    fn in_archive(images: &Images, mode: &[u8; 7]) {
        archive(images, &[&header(|h| h[100..107].copy_from_slice(mode))]);
    }
    const USER: &[&str] = &["user id 0", "and no CAP_SETUID (foreign.users.allow)"];
    const GROUP: &[&str] = &["group id 0", "and no CAP_SETGID (foreign.groups.allow)"];
    let scratch = Scratch::new("images-programs");
    let bundle = bundle_of_user(&scratch, COUNT)
        .configure(|config| config["process"]["noNewPrivileges"] = json!(false));
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            ("root's, in an archive", |images| in_archive(images, b"0004755"), USER),
            ("of root's group, in an archive", |images| in_archive(images, b"0002755"), GROUP),
            ("root's, in memory", |images| memory_file(images, 0o104_755), USER),
            ("of root's group, in memory", |images| memory_file(images, 0o102_755), GROUP),
        ],
        |images| memory_file(images, 0o100_755),
    );
}

/// Who has made an overlay looks into its layers for all who use it.
#[test]
fn directories_that_an_overlay_opens() {
    fn overlay(images: &Images, options: &str) {
        images.mount(|_, mount| {
            mount.fstype = Fstype::Overlayfs as u32;
            mount.options = options.into();
        });
    }
    const CLOSED: &[&str] = &[
        "the overlay at \"/spare\" shows what is in directories that are closed to the tasks",
        "(foreign.mounts.sources)",
    ];
    let scratch = Scratch::new("images-overlays");
    let bundle = bundle_of_user(&scratch, COUNT);
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            ("a volume below another", |images| overlay(images, "lowerdir=/vol:/ro"), CLOSED),
            (
                "what can be written above",
                |images| overlay(images, "lowerdir=/vol,upperdir=/dev/u,workdir=/dev/w"),
                CLOSED,
            ),
            (
                "a volume that cannot be written to",
                |images| overlay(images, "lowerdir=/ro,upperdir=/vol/u,workdir=/vol/w"),
                CLOSED,
            ),
            ("the root below volumes", |i| overlay(i, "lowerdir=/ro:/vol:/bin"), CLOSED),
        ],
        |_| (),
    );
}

/// A file of the kernel asks for the rights of its opener whenever it is read.
#[test]
fn what_the_kernel_shows_to_some() {
    let scratch = Scratch::new("images-kernel");
    scratch.configure(FOREIGN);
    let program = format!(
        "exec 8</data; while [ ! -e /awake ]; do {} done; dd bs=4096 count=1 <&8 >/seen; \
         while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done",
        "i=$((i+1)); echo $i >> /count; sleep 0.02;"
    );
    let bundle = bundle_of(&scratch, &program);
    bundle.write("data", "");
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    other_file(&Images::of(&scratch), "/proc", "/proc/kallsyms");
    container.restore(&[]);
    bundle.write("awake", "");
    let seen = || fs::read_to_string(bundle.file("seen")).ok().filter(|text| !text.is_empty());
    let symbols = until("it has read", seen);
    let addresses = symbols.lines().filter_map(|line| line.split_once(' '));
    let shown: Vec<_> =
        addresses.filter(|(address, _)| !address.trim_matches('0').is_empty()).collect();
    assert_eq!(shown, []);
}

/// A restore that is to fail, and what its log says.
fn fails(container: &Container<'_>, scratch: &Scratch, wanted: &str) {
    container.restore_call(&[]).args(["--detach", container.id()]).fail();
    let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
    assert!(log.contains(wanted), "{wanted:?} is missing: {log}");
    container.runc("state").arg(container.id()).fail();
}

/// The same, where files have lost rights for all but their owner.
fn fails_with(mode: u32, file: &Path, container: &Container<'_>, scratch: &Scratch, wanted: &str) {
    let before = fs::metadata(file).unwrap().permissions();
    fs::set_permissions(file, Permissions::from_mode(mode)).unwrap();
    fails(container, scratch, wanted);
    fs::set_permissions(file, before).unwrap();
}

/// A container of a user without capabilities, whose root file system is root's.
pub(crate) fn bundle_of_user(scratch: &Scratch, program: &str) -> Bundle {
    let bundle = bundle_of(scratch, program).configure(|config| {
        config["process"]["user"] = json!({"uid": 65534, "gid": 65534});
    });
    bundle.write("count", "");
    std::os::unix::fs::chown(bundle.file("count"), Some(65534), None).unwrap();
    bundle
}

/// Who runs a program has it mapped, and need not be able to read it.
#[test]
fn a_program_that_can_be_run_but_not_read() {
    const DENIED: &str = "busybox with no more rights than the calling runtime gives";
    let scratch = Scratch::new("images-unread-program");
    let bundle = bundle_of_user(&scratch, COUNT);
    let program = bundle.file("bin/busybox");
    fs::set_permissions(&program, Permissions::from_mode(0o711)).unwrap();
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    // It cannot be run any more.
    fails_with(0o700, &program, &container, &scratch, DENIED);
    // Others could have it mapped for a program of theirs to read.
    scratch.configure(FOREIGN);
    fails(&container, &scratch, DENIED);
    scratch.reconfigure("");
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// A fifo of which the user has one direction: nobody but the restore opens it for both.
#[test]
fn a_fifo_that_can_only_be_read() {
    const DENIED: &str = "open /fifo with no more rights than the calling runtime gives";
    let scratch = Scratch::new("images-one-way-fifo");
    let bundle = bundle_of_user(&scratch, &format!("exec 8</fifo; {COUNT}"));
    let fifo = bundle.file("fifo");
    command("mkfifo", &["--mode", "644", fifo.to_str().unwrap()]).succeed();
    // Root writes to it.
    let open = || fs::File::options().read(true).write(true).open(&fifo).unwrap();
    let writer = open();
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    fails_with(0o600, &fifo, &container, &scratch, DENIED);
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    // What root has written is nothing that the user could have put there.
    (&writer).write_all(b"text").unwrap();
    container.checkpoint(&[]);
    drop(writer);
    scratch.configure(FOREIGN);
    fails(&container, &scratch, DENIED);
    scratch.reconfigure("");
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    let mut text = [0; 4];
    open().read_exact(&mut text).unwrap();
    assert_eq!(&text, b"text");
    // Without that, others may have the fifo as well.
    container.checkpoint(&[]);
    scratch.reconfigure(FOREIGN);
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}
