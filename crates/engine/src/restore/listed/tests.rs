//! What a plan leaves out is found.

#![allow(clippy::unwrap_used)]
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use torpor_images::proto::{
    BinfmtMiscEntry, CgroupEntry, CgroupPropEntry, CoreEntry, EventfdFileEntry, FdTypes,
    FdinfoEntry, FileEntry, FileLockEntry, IpcDescEntry, IpcShmEntry, MemfdInodeEntry, PstreeEntry,
    RegFileEntry, ScmEntry, SeccompEntry, SeccompFilter, SkOptsEntry, SkPacketEntry, SkUcred,
    TorporIoUringEntry, TtyFileEntry, TtyInfoEntry, TtyType, UnixSkEntry,
};
use torpor_policy::{PlainFile, Spec};
use torpor_store::{Archive, Shelf, Store};

use super::*;
use crate::options::{CgroupMode, Cgroups, Trust};

/// Picks what a plan is to lack.
type Pick = fn(&Ask) -> bool;

/// One of the checkpoints of `fuzz/images`.
fn archive(tree: &str) -> Archive {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/images");
    Archive::open(top.join(format!("{tree}.tar.gz"))).unwrap()
}

/// What a restore of one of these checkpoints would make that a plan without the requests
/// that `lacks` picks does not list.
fn missing_without(images: &ImageDir, lacks: impl FnMut(&mut Request) -> bool) -> Vec<Unlisted> {
    missing_in(images, lacks, |_| {})
}

/// The same, where the restore has read something else than the plan's reader: `change`.
fn missing_of(
    tree: &str,
    lacks: impl FnMut(&mut Request) -> bool,
    change: impl FnOnce(&mut Checkpoint),
) -> Vec<Unlisted> {
    missing_in(&ImageDir::of(Arc::new(archive(tree))), lacks, change)
}

fn missing_in(
    images: &ImageDir,
    lacks: impl FnMut(&mut Request) -> bool,
    change: impl FnOnce(&mut Checkpoint),
) -> Vec<Unlisted> {
    compared(images, lacks, change).unwrap()
}

fn compared(
    images: &ImageDir,
    lacks: impl FnMut(&mut Request) -> bool,
    change: impl FnOnce(&mut Checkpoint),
) -> Result<Vec<Unlisted>> {
    let opts = Options {
        cgroups: Cgroups { manage: CgroupMode::Soft, ..Cgroups::default() },
        ..Options::default()
    };
    compared_by(&opts, images, lacks, change)
}

fn compared_by(
    opts: &Options,
    images: &ImageDir,
    mut lacks: impl FnMut(&mut Request) -> bool,
    change: impl FnOnce(&mut Checkpoint),
) -> Result<Vec<Unlisted>> {
    let passed = judge::passed(opts).unwrap();
    let Look { requests: mut plan, told, .. } = look(images, &passed).unwrap();
    plan.retain_mut(|request| !lacks(request));
    let mut checkpoint = load::load(images, load::LookForPages::Later).unwrap();
    change(&mut checkpoint);
    let planned = Planned::new(images, &checkpoint, &passed, &plan).unwrap();
    let view = View {
        opts,
        images,
        planned: &planned,
        checkpoint: &checkpoint,
        passed: &passed,
        told: &told,
    };
    missing(&view, &plan)
}

/// The images of one of these checkpoints, to be changed.
fn copy(tree: &str) -> ImageDir {
    let archive = archive(tree);
    let images = ImageDir::of(Arc::new(Shelf::new().place("edited").unwrap()));
    for name in archive.names().unwrap() {
        let mut bytes = vec![];
        archive.open(&name).unwrap().read_to_end(&mut bytes).unwrap();
        let mut file = images.store().create(&name).unwrap();
        file.write_all(&bytes).unwrap();
    }
    images
}

/// The same, with another `pstree.img`.
fn with_tree(tree: &str, change: impl Fn(&mut PstreeEntry)) -> ImageDir {
    let images = copy(tree);
    let mut all: Vec<PstreeEntry> = images.read_all(kind::PSTREE, 0).unwrap();
    all.iter_mut().for_each(change);
    images.write_all(kind::PSTREE, 0, &all).unwrap();
    images
}

/// Those of the container, with a set-uid file in memory and a group that allows a device and has a file that is not known.
fn with_more() -> ImageDir {
    let images = copy("container");
    let mut files: Vec<MemfdInodeEntry> = images.read_all(kind::MEMFD_INODE, 0).unwrap();
    files[0].mode = Some(0o104_755);
    images.write_all(kind::MEMFD_INODE, 0, &files).unwrap();
    let mut groups: CgroupEntry = images.read_one(kind::CGROUP, 0).unwrap();
    let dirs = groups.controllers.iter_mut().flat_map(|controller| &mut controller.dirs);
    let (name, value) = ("devices.allow".to_owned(), "c 1:3 rwm".to_owned());
    let property = CgroupPropEntry { name, value, perms: None };
    let (name, value) = ("of.nobody".to_owned(), "1".to_owned());
    let unknown = CgroupPropEntry { name, value, perms: None };
    dirs.for_each(|dir| dir.properties.extend([property.clone(), unknown.clone()]));
    images.write_one(kind::CGROUP, 0, &groups).unwrap();
    images
}

#[test]
fn values_of_groups_are_compared() {
    let images = with_more();
    let missing = missing_without(&images, |request| {
        if let Ask::Cgroup { properties, .. } = &mut request.ask {
            properties.iter_mut().for_each(|(_, value)| *value = "c 1:5 r".to_owned());
        }
        false
    });
    let named = |(image, what): &Unlisted| {
        image == "cgroup.img" && what.contains("devices.allow = \"c 1:3 rwm\"")
    };
    assert!(missing.iter().any(named), "{missing:?}");
}

/// Has the restore read other files than the reader.
fn change_files(checkpoint: &mut Checkpoint, change: impl FnOnce(&mut Vec<FileEntry>)) {
    change(&mut checkpoint.entries);
    checkpoint.files = OpenFile::all(&checkpoint.entries).unwrap();
}

/// A limit that this host has is none of a new namespace, whatever the reader has asked for.
#[test]
fn limits_of_this_host_are_no_limits_of_a_new_namespace() {
    let (opts, images) = (Options::default(), copy("container"));
    let passed = judge::passed(&opts).unwrap();
    let Look { requests: mut plan, mut told, .. } = look(&images, &passed).unwrap();
    let mut limits = vec![];
    plan.retain(|request| match &request.ask {
        Ask::IpcLimit { name, value } => {
            told.here.insert(name.replace('.', "/"), Some(value.clone()));
            limits.push(request.ask.to_string());
            false
        }
        _ => true,
    });
    let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
    let planned = Planned::new(&images, &checkpoint, &passed, &plan).unwrap();
    let (images, checkpoint, passed) = (&images, &checkpoint, &passed);
    let view = View { opts: &opts, images, planned: &planned, checkpoint, passed, told: &told };
    let missing = missing(&view, &plan).unwrap();
    let mut missing: Vec<String> = missing.into_iter().map(|(_, what)| what).collect();
    limits.sort_unstable();
    missing.sort_unstable();
    assert!(!limits.is_empty());
    assert_eq!(missing, limits);
}

/// The restore does not take the reader's word for numbers that lead somewhere.
#[test]
fn references_are_looked_at_again() {
    let strange = |checkpoint: &mut Checkpoint| {
        change_files(checkpoint, |files| {
            let mut sockets = files.iter_mut().filter_map(|file| file.isk.as_mut());
            sockets.next().unwrap().ns_id = Some(99);
        });
    };
    let error = compared(&copy("container"), |_| false, strange).unwrap_err().to_string();
    assert!(error.contains("net namespace 99, which is none"), "{error}");
}

/// In the place of one there would be a descriptor of the task that is to make it.
#[test]
fn no_message_has_an_io_uring() {
    let images = copy("container");
    let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
    let id = *checkpoint.files.keys().min().unwrap();
    let scm = vec![ScmEntry { r#type: 1, rights: vec![id] }];
    let takes_datagrams =
        |file: &&OpenFile| file.unix().is_some_and(|end| end.kind.is_of_datagrams());
    let id_for = checkpoint.files.values().find(takes_datagrams).unwrap().id;
    let packet = SkPacketEntry { id_for, scm, ..SkPacketEntry::default() };
    let mut queues = images.writer(kind::SK_QUEUES, 0).unwrap();
    queues.entry(&packet).unwrap();
    queues.finish().unwrap();
    let change = |checkpoint: &mut Checkpoint| {
        let torpor_io_uring = Some(TorporIoUringEntry { id, ..TorporIoUringEntry::default() });
        let ring = FileEntry { id, torpor_io_uring, ..FileEntry::default() };
        let ring = FileEntry { r#type: FdTypes::Ext.into(), ..ring };
        change_files(checkpoint, |files| {
            *files.iter_mut().find(|file| file.id == id).unwrap() = ring;
        });
    };
    let error = compared(&images, |_| false, change).unwrap_err().to_string();
    assert!(error.contains("io_uring instance") && error.contains("no socket carries"), "{error}");
}

/// What filters let through is compared with the profile once more.
#[test]
fn filters_are_looked_at_again() {
    let images = copy("container");
    // Lets everything through (BPF_RET, SECCOMP_RET_ALLOW).
    let filter = vec![0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];
    let filter = SeccompFilter { filter, ..SeccompFilter::default() };
    images.write_one(kind::SECCOMP, 0, &SeccompEntry { seccomp_filters: vec![filter] }).unwrap();
    let mut core: CoreEntry = images.read_one(kind::CORE, 1).unwrap();
    let thread = core.thread_core.as_mut().unwrap();
    (thread.seccomp_mode, thread.seccomp_filter) = (Some(2), Some(0));
    images.write_one(kind::CORE, 1, &core).unwrap();
    let missing = |profile: &str, lacks: Pick| {
        let text = format!(r#"{{"ociVersion": "1.0.2", "linux": {{"seccomp": {profile}}}}}"#);
        let spec = Spec::parse(text.as_bytes()).unwrap().map(Arc::new);
        let opts = Options { trust: Trust { spec, ..Trust::default() }, ..Options::default() };
        compared_by(&opts, &images, |request| lacks(&request.ask), |_| {}).unwrap()
    };
    const NOTHING: &str = r#"{"defaultAction": "SCMP_ACT_ERRNO"}"#;
    assert!(missing(NOTHING, |_| false).is_empty());
    let lacks: Pick = |ask| matches!(ask, Ask::SystemCalls(_));
    // For runtimes this is no profile: nothing is compared with it.
    assert!(missing("{}", lacks).is_empty());
    let missing = missing(NOTHING, lacks);
    let [(image, what)] = &missing[..] else { panic!("{missing:?}") };
    assert_eq!(image, "core-1.img");
    assert!(what.starts_with("a seccomp filter that lets through read, write"), "{what}");
}

/// A leader that its task does not list as a thread is judged like any other.
#[test]
fn leaders_are_threads_also_where_images_do_not_say_it() {
    let plan = |change: fn(&mut PstreeEntry)| {
        let images = with_tree("container", change);
        let look = look(&images, &judge::passed(&Options::default()).unwrap()).unwrap();
        look.requests.into_iter().collect::<HashSet<_>>()
    };
    let whole = plan(|entry| entry.threads = vec![entry.pid]);
    assert!(whole.iter().any(|request| matches!(request.ask, Ask::Capabilities(_))));
    assert!(plan(|entry| entry.threads.clear()) == whole);
}

#[test]
fn sockets_that_became_others_are_found() {
    let changed = |change: fn(&mut SkOptsEntry)| {
        missing_of(
            "container",
            |_| false,
            |checkpoint| {
                change_files(checkpoint, |files| {
                    let sockets = files.iter_mut().filter_map(|file| file.isk.as_mut());
                    sockets.for_each(|socket| change(&mut socket.opts));
                });
            },
        )
    };
    assert!(changed(|_| {}).is_empty());
    for change in [
        |options: &mut SkOptsEntry| options.so_mark = Some(7),
        |options: &mut SkOptsEntry| options.so_priority = Some(7),
    ] {
        let missing = changed(change);
        assert!(missing.iter().any(|(_, what)| what.contains("marked")), "{missing:?}");
    }
}

#[test]
fn peers_of_unix_sockets_are_found() {
    let changed = |change: fn(&mut UnixSkEntry)| {
        missing_of(
            "container",
            |_| false,
            |checkpoint| {
                change_files(checkpoint, |files| {
                    files.iter_mut().filter_map(|file| file.usk.as_mut()).for_each(change);
                });
            },
        )
    };
    let missing = changed(|socket| socket.uflags |= 1);
    assert!(missing.iter().any(|(_, what)| what.contains("outside")), "{missing:?}");
    let missing = changed(|socket| {
        socket.torpor_peer = Some(SkUcred { pid: 1, uid: 4711, gid: 0 });
    });
    assert!(missing.iter().any(|(_, what)| what.contains("4711")), "{missing:?}");
    for change in [
        |socket: &mut UnixSkEntry| socket.backlog += 1,
        |socket: &mut UnixSkEntry| socket.shutdown = Some(3),
        |socket: &mut UnixSkEntry| socket.torpor_pending.push(7),
    ] {
        let missing = changed(change);
        assert!(missing.iter().any(|(_, what)| what.starts_with("Unix ")), "{missing:?}");
    }
}

#[test]
fn segments_of_shared_memory_are_compared() {
    let images = with_tree("container", |_| {});
    let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
    let space = checkpoint.tasks[0].homes.own(NsKind::Ipc).unwrap();
    let desc = IpcDescEntry { cuid: 4711, ..IpcDescEntry::default() };
    let segment = IpcShmEntry { desc, in_pagemaps: Some(true), ..IpcShmEntry::default() };
    images.write_all(kind::IPCNS_SHM, space.into(), [&segment]).unwrap();
    assert!(missing_in(&images, |_| false, |_| {}).is_empty());
    let missing = missing_in(&images, |request| request.ask == Ask::User(4711), |_| {});
    let [(image, what)] = &missing[..] else { panic!("{missing:?}") };
    assert_eq!(image, &kind::IPCNS_SHM.file_name(space.into()));
    assert!(what.contains("4711"), "{what}");
}

#[test]
fn mappings_that_write_to_their_files_are_found() {
    let missing = missing_of(
        "container",
        |_| false,
        |checkpoint| {
            let spaces = checkpoint.tasks.iter_mut().filter_map(|task| task.memory.as_mut());
            let areas = spaces.flat_map(|memory| &mut memory.areas);
            areas.for_each(|area| area.open_flags = area.open_flags.map(|_| 2));
        },
    );
    assert!(missing.iter().any(|(_, what)| what.contains("(flags 0o2)")), "{missing:?}");
}

#[test]
fn whatever_a_plan_leaves_out_is_found() {
    let kinds: [(&str, Pick); 31] = [
        ("capabilities", |ask| matches!(ask, Ask::Capabilities(_))),
        ("seccomp", |ask| matches!(ask, Ask::Seccomp(_))),
        ("new privileges", |ask| matches!(ask, Ask::NoNewPrivileges(_))),
        ("profile", |ask| matches!(ask, Ask::Profile(_))),
        ("user", |ask| matches!(ask, Ask::User(8))),
        ("group", |ask| matches!(ask, Ask::Group(6))),
        ("own namespace", |ask| matches!(ask, Ask::HostNamespace("user"))),
        ("namespace", |ask| matches!(ask, Ask::Namespace { kind: "net", .. })),
        ("file", |ask| matches!(ask, Ask::Open { path, .. } if path == "/dev/null")),
        ("cgroup", |ask| matches!(ask, Ask::Cgroup { .. })),
        ("socket", |ask| matches!(ask, Ask::RawSocket { kind: "packet", .. })),
        ("host names", |ask| matches!(ask, Ask::HostNames(_))),
        ("clocks", |ask| matches!(ask, Ask::Clocks(_))),
        ("descriptors", |ask| matches!(ask, Ask::Descriptors(_))),
        ("fanotify", |ask| matches!(ask, Ask::Fanotify { .. })),
        ("set-uid", |ask| matches!(ask, Ask::SetUid { .. })),
        ("link", |ask| matches!(ask, Ask::Link { name, .. } if name == "pair")),
        ("route", |ask| matches!(ask, Ask::Route { .. })),
        ("setting", |ask| matches!(ask, Ask::Sysctl { .. })),
        ("firewall", |ask| matches!(ask, Ask::Firewall { .. })),
        ("address", |ask| matches!(ask, Ask::Address { .. })),
        ("limit of IPC", |ask| matches!(ask, Ask::IpcLimit { .. })),
        ("socket option", |ask| matches!(ask, Ask::SocketOption { .. })),
        ("program", |ask| matches!(ask, Ask::SetUid { path, .. } if path == "/tmp/removed")),
        ("ghost", |ask| matches!(ask, Ask::Ghost { .. })),
        ("socket as such", |ask| matches!(ask, Ask::Socket(_))),
        ("archive", |ask| matches!(ask, Ask::Fill(_))),
        ("pipe", |ask| matches!(ask, Ask::Raise { name, .. } if *name == "the size of a pipe")),
        (
            "file in memory",
            |ask| matches!(ask, Ask::SetUid { path, .. } if path.starts_with("memfd:")),
        ),
        ("value of a group", |ask| matches!(ask, Ask::GroupLimit { .. })),
        (
            "device of a group",
            |ask| matches!(ask, Ask::Device { path, .. } if path.ends_with("devices.allow")),
        ),
    ];
    let images = with_more();
    assert!(missing_without(&images, |_| false).is_empty());
    for (what, is) in kinds {
        assert!(!missing_without(&images, |request| is(&request.ask)).is_empty(), "{what}");
    }
}

/// Those of the container, with what the tree of the archive does not have of itself: a lock, a
/// format of programs, a terminal, a socket with a name, a file that has to be given.
fn with_unlimited() -> ImageDir {
    let images = copy("container");
    let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
    let (_, table) =
        torpor_images::Kind::of_file(&checkpoint.tasks[0].sharing.table.image()).unwrap();
    let lock = FileLockEntry { flag: 2, pid: 1, fd: 0, ..FileLockEntry::default() };
    images.write_all(kind::FILE_LOCKS, 0, [&lock]).unwrap();
    let (name, interpreter) = ("some".to_owned(), "/bin/cat".to_owned());
    let extension = Some("x".to_owned());
    let format = BinfmtMiscEntry { name, interpreter, extension, ..Default::default() };
    images.write_all(kind::BINFMT_MISC, 0, [&format]).unwrap();
    let info = TtyInfoEntry { id: 7, r#type: TtyType::Pty.into(), ..Default::default() };
    images.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let mut fds: Vec<FdinfoEntry> = images.read_all(kind::FDINFO, table).unwrap();
    let of = |id: u32, ty: FdTypes| FileEntry { id, r#type: ty.into(), ..Default::default() };
    let tty = TtyFileEntry { id: 90_001, tty_info_id: 7, ..TtyFileEntry::default() };
    files.push(FileEntry { tty: Some(tty), ..of(90_001, FdTypes::Tty) });
    let (id, name) = (90_002, b"\0name".to_vec());
    let usk = UnixSkEntry { id, ino: id, name, r#type: 2, state: 7, ..UnixSkEntry::default() };
    files.push(FileEntry { usk: Some(usk), ..of(id, FdTypes::Unixsk) });
    let (id, name) = (90_003, b"file[1f:2a6]".to_vec());
    let reg = RegFileEntry { id, name, ext: Some(true), ..RegFileEntry::default() };
    files.push(FileEntry { reg: Some(reg), ..of(id, FdTypes::Reg) });
    let efd = EventfdFileEntry { id: 90_004, counter: 3, ..EventfdFileEntry::default() };
    files.push(FileEntry { efd: Some(efd), ..of(90_004, FdTypes::Eventfd) });
    let added = files[files.len() - 4..].iter().zip(901..);
    fds.extend(added.map(|(file, fd)| FdinfoEntry {
        id: file.id,
        r#type: file.r#type,
        fd,
        ..FdinfoEntry::default()
    }));
    images.write_all(kind::FILES, 0, &files).unwrap();
    images.write_all(kind::FDINFO, table, &fds).unwrap();
    images
}

#[test]
fn what_no_rule_limits_is_compared() {
    let kinds: [(&str, Pick); 6] = [
        ("lock", |ask| matches!(ask, Ask::Lock(_))),
        (
            "eventfd",
            |ask| matches!(ask, Ask::PlainFile(PlainFile::Eventfd(file)) if file.count == 3),
        ),
        ("format", |ask| matches!(ask, Ask::ProgramFormat(_))),
        ("terminal", |ask| matches!(ask, Ask::Terminal(_))),
        ("name", |ask| matches!(ask, Ask::Bind(name) if name.socket == 90_002)),
        ("given file", |ask| matches!(ask, Ask::GivenFile(given) if given.file == 90_003)),
    ];
    let images = with_unlimited();
    assert!(missing_without(&images, |_| false).is_empty());
    for (what, is) in kinds {
        let missing = missing_without(&images, |request| is(&request.ask));
        assert_eq!(missing.len(), 1, "{what}: {missing:?}");
    }
}
