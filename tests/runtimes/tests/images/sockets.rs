//! Unix sockets: their files, on a volume that somebody has laid links out on, and their peers.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown, symlink};
use std::os::unix::net::UnixStream;

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry, ScmEntry, SkPacketEntry, UnixSkEntry};
use torpor_runtimes_tests::command::Run;
use torpor_runtimes_tests::runc::Container;
use torpor_runtimes_tests::scratch::Scratch;

use super::{FOREIGN, Images, at, bundle, bundle_of, owners, refuses, refuses_by};
use crate::counting::{COUNT, goes_on};

/// What restores called the directory that they bind a socket in, as long as others could know it.
const STAGE: &str = ".torpor-socket-900001";

/// Adds two Unix sockets that are connected with each other, of which the root task has the first. Their inodes have the
/// numbers of their files.
fn connected(images: &Images, change: impl FnOnce(&mut UnixSkEntry, &mut UnixSkEntry)) {
    let ns_id = images.root_ids().net_ns_id;
    let new = |id, peer| UnixSkEntry {
        id,
        ino: id,
        peer,
        r#type: 1,
        state: 1,
        flags: 2, // O_RDWR
        ns_id,
        ..UnixSkEntry::default()
    };
    let (mut first, mut second) = (new(900_001, 900_002), new(900_002, 900_001));
    change(&mut first, &mut second);
    images.open(FdTypes::Unixsk, |entry| entry.usk = Some(first));
    let (r#type, id) = (FdTypes::Unixsk.into(), second.id);
    let second = FileEntry { r#type, id, usk: Some(second), ..FileEntry::default() };
    images.files(|files| files.push(second));
}

/// Which sockets are connected with which, so that a restore would have to guess.
#[test]
fn peers_that_cannot_be() {
    const NOT_ITS: &[&str] =
        &["files.img: socket 900001: socket 900002 is its peer, but it is not the peer's"];
    const OTHER: &[&str] = &["files.img: socket 900001: cannot be connected to socket 900002"];
    refuses(
        "images-peers-none",
        &[
            ("one that has no peer", |i| connected(i, |_, second| second.peer = 0), NOT_ITS),
            ("one that is its own", |i| connected(i, |_, second| second.peer = 900_002), NOT_ITS),
            (
                "one that there is not",
                |images| {
                    connected(images, |first, _| {
                        (first.peer, first.torpor_pending) = (900_003, vec![900_002]);
                    })
                },
                &["files.img: socket 900001: its peer, inode 900003, is not in the images"],
            ),
            ("one of another type", |i| connected(i, |_, second| second.r#type = 5), OTHER),
            ("one of no network", |i| connected(i, |_, second| second.ns_id = None), OTHER),
            (
                "two with one inode",
                |images| {
                    connected(images, |first, second| {
                        (first.peer, second.ino) = (900_001, 900_001);
                    })
                },
                &["files.img: socket 900002: inode 900001 appears twice"],
            ),
            (
                "a type that there is not",
                |images| connected(images, |first, _| first.r#type = 3),
                &["files.img: socket 900001: is of type 3"],
            ),
            (
                "a state that there is not",
                |images| connected(images, |first, _| first.state = 2),
                &["files.img: socket 900001: is in state 2"],
            ),
        ],
    );
}

/// A policy may let sockets be connected to some outside: without the caller's word they are not, and streams never.
#[test]
fn peers_outside() {
    fn outside(images: &Images, kind: u32, state: u32) {
        connected(images, |first, second| {
            (first.r#type, second.r#type) = (kind, kind);
            (second.uflags, second.peer, second.state) = (1, 0, state);
            second.name = b"/run/host.sock\0".to_vec();
        });
    }
    const STREAM: &[&str] =
        &["socket 900001: its peer, socket 900002, is outside, and not for datagrams"];
    refuses_by(
        "images-peers-outside",
        "foreign.network.external-sockets = true",
        &[
            (
                "without the word",
                |images| outside(images, 2, 7),
                &["its peer \"/run/host.sock\" is outside: --ext-unix-sk allows it"],
            ),
            ("a stream", |images| outside(images, 1, 1), STREAM),
            ("a stream that waits", |images| outside(images, 1, 10), STREAM),
            ("sequenced packets", |images| outside(images, 5, 1), STREAM),
        ],
    );
}

#[test]
fn a_socket_is_bound_where_no_link_leads() {
    let scratch = Scratch::new("images-names");
    scratch.configure(&(FOREIGN.to_owned() + &owners(&scratch)));
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let (hosts, volume) = (scratch.dir("hosts"), scratch.join("vol"));
    fs::write(hosts.join("secret"), "secret").unwrap();
    let is_as_before = || {
        let names = fs::read_dir(&hosts).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["secret"]);
        let meta = fs::metadata(hosts.join("secret")).unwrap();
        assert_eq!((meta.mode() & 0o170_7000, meta.uid()), (0o100_000, 0));
    };
    let is_refused = || {
        container.restore_call(&[]).args(["--detach", container.id()]).fail();
        let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
        let why = "file 900001 (unixsk): put /elsewhere/sock where it belongs: File exists";
        assert!(log.contains(why), "{log}");
    };
    Images::of(&scratch).listen("/elsewhere/sock", "/vol/sock");
    let sock = volume.join("sock");
    // Something else is where it belongs.
    fs::write(&sock, "kept").unwrap();
    is_refused();
    assert_eq!(fs::read_to_string(&sock).unwrap(), "kept");
    fs::remove_file(&sock).unwrap();
    symlink(hosts.join("secret"), &sock).unwrap();
    is_refused();
    assert_eq!(fs::read_link(&sock).unwrap(), hosts.join("secret"));
    fs::remove_file(&sock).unwrap();
    is_as_before();
    // A link has the name that it is bound under.
    symlink(&hosts, volume.join(STAGE)).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    let meta = fs::symlink_metadata(&sock).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o4777, 4711));
    is_as_before();
}

/// A listener and a pair that are only in flight, so that no task has them, and of which the images do not say whom they
/// remember: whoever connects on this host sees the container's user, not the restoring program's.
#[test]
fn what_is_in_flight_only_remembers_the_containers_user() {
    const USER: u32 = 65534;
    let scratch = Scratch::new("images-in-flight");
    scratch.configure(FOREIGN);
    let bundle = bundle_of(&scratch, COUNT).configure(|config| {
        config["process"]["user"] = json!({"uid": USER, "gid": USER});
    });
    bundle.write("count", "");
    for file in [bundle.file("count"), scratch.join("vol")] {
        chown(file, Some(USER), Some(USER)).unwrap();
    }
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    in_flight(&Images::of(&scratch));
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    let client = UnixStream::connect(scratch.join("vol/sock")).unwrap();
    let seen = torpor_sys::peer::peer(&client).unwrap();
    assert_eq!((seen.uid, seen.gid), (USER, USER));
}

/// Adds a socket whose peer is closed to the root task, and sockets that only wait in it: a listener at /vol/sock, and a
/// pair.
fn in_flight(images: &Images) {
    let ns_id = images.root_ids().net_ns_id;
    let new = |id, peer| UnixSkEntry {
        id,
        ino: id,
        peer,
        r#type: 1,
        state: 1,
        flags: 2, // O_RDWR
        ns_id,
        ..UnixSkEntry::default()
    };
    images.open(FdTypes::Unixsk, |entry| entry.usk = Some(new(900_001, 0)));
    let mut mount = 0;
    images.mounts(|mounts| mount = at(mounts, "/vol").mnt_id);
    let listener = UnixSkEntry {
        state: 10,
        backlog: 1,
        name: b"/vol/sock\0".to_vec(),
        mnt_id: Some(mount.cast_signed()),
        ..new(900_002, 0)
    };
    let others = [listener, new(900_003, 900_004), new(900_004, 900_003)];
    let rights = others.iter().map(|socket| socket.id).collect();
    images.files(|files| {
        files.extend(others.map(|socket| {
            let (r#type, id) = (FdTypes::Unixsk.into(), socket.id);
            FileEntry { r#type, id, usk: Some(socket), ..FileEntry::default() }
        }));
    });
    let scm = vec![ScmEntry { r#type: 1, rights }];
    let message = SkPacketEntry { id_for: 900_001, length: 1, scm, ..SkPacketEntry::default() };
    let mut queues = images.dir.writer(kind::SK_QUEUES, 0).unwrap();
    queues.entry(&message).unwrap();
    queues.raw(b"x").unwrap();
    queues.finish().unwrap();
}
