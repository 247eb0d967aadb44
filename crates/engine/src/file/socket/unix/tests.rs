use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use torpor_sys::socket::{Credentials, Message};
use torpor_tracee::Tracee;

use super::super::testing::{close, cycle, dump, dump_and_close, in_netns, read, restore};
use super::*;
use crate::options::{Files, Given, InheritFd, Options};

fn all(files: Vec<OwnedFd>) -> Vec<OwnedFd> {
    cycle(&Options::default(), files)
}

fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
}

fn new(kind: i32) -> OwnedFd {
    socket::socket(libc::AF_UNIX, kind, 0).unwrap()
}

fn write(fd: impl AsFd, data: &[u8]) {
    assert_eq!(rustix::io::write(fd, data).unwrap(), data.len());
}

fn send(fd: &OwnedFd, data: &[u8], files: &[&OwnedFd]) {
    let files: Vec<_> = files.iter().map(|f| f.as_fd()).collect();
    let message = Message { data, files: &files, ..Message::default() };
    assert_eq!(socket::send(fd.as_fd(), &message, 0).unwrap(), data.len());
}

fn receive(fd: &OwnedFd) -> (Vec<u8>, socket::Received) {
    let mut data = vec![0; 1 << 20];
    let received = socket::receive(fd.as_fd(), &mut data, libc::MSG_DONTWAIT).unwrap();
    data.truncate(received.len);
    (data, received)
}

fn is_empty(fd: &OwnedFd) -> bool {
    let error = socket::receive(fd.as_fd(), &mut [0], libc::MSG_DONTWAIT).map(|r| r.len);
    error.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
}

fn name_of(fd: impl AsFd) -> Vec<u8> {
    socket::local_address(fd.as_fd()).unwrap()[2..].to_vec()
}

fn path_name(path: &Path) -> Vec<u8> {
    let mut name = path.as_os_str().as_bytes().to_vec();
    name.push(0);
    name
}

fn abstract_name(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).unwrap()
}

#[test]
fn pairs_keep_their_queues() {
    in_netns(|| {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
            let (a, b) = pair(kind);
            for text in ["one", "three"] {
                write(&a, text.as_bytes());
                write(&b, text.to_uppercase().as_bytes());
            }
            let [a, b] = all(vec![a, b]).try_into().unwrap();
            if kind == SocketType::STREAM {
                assert_eq!(receive(&a).0, b"ONETHREE");
                assert_eq!(receive(&b).0, b"onethree");
            } else {
                assert_eq!(receive(&a).0, b"ONE");
                assert_eq!(receive(&a).0, b"THREE");
                assert_eq!(receive(&b).0, b"one");
                assert_eq!(receive(&b).0, b"three");
            }
            assert!(is_empty(&a) && is_empty(&b));
            write(&a, b"new");
            assert_eq!(receive(&b).0, b"new");
        }
    });
}

#[test]
fn a_look_changes_nothing() {
    in_netns(|| {
        let (a, b) = pair(SocketType::DGRAM);
        for text in ["", "x", "", "y"] {
            write(&a, text.as_bytes());
        }
        let files = [a, b];
        let dir = tempfile::tempdir().unwrap();
        dump(&Options::default(), dir.path(), &files).unwrap();
        let [_a, b] = files;
        for text in ["", "x", "", "y"] {
            assert_eq!(receive(&b).0, text.as_bytes());
        }
        assert!(is_empty(&b));
    });
}

#[test]
fn empty_packets_are_kept() {
    in_netns(|| {
        for kind in [SocketType::SEQPACKET, SocketType::DGRAM] {
            let (a, b) = pair(kind);
            for text in ["", "x", "", "", "y", ""] {
                write(&a, text.as_bytes());
            }
            let [_a, b] = all(vec![a, b]).try_into().unwrap();
            for text in ["", "x", "", "", "y", ""] {
                assert_eq!(receive(&b).0, text.as_bytes());
            }
            assert!(is_empty(&b));
        }
    });
}

#[test]
fn listeners_and_their_connections_come_back() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("listener");
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o623)).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        write(&client, b"request");
        write(&server, b"answer");
        let files = vec![server.into(), listener.into(), client.into()];
        let [server, listener, client] = all(files).try_into().unwrap();
        assert_eq!(receive(&server).0, b"request");
        assert_eq!(receive(&client).0, b"answer");
        assert_eq!(name_of(&server), path_name(&path));
        assert_eq!(socket::peer_address(client.as_fd()).unwrap()[2..], path_name(&path));
        let meta = std::fs::metadata(&path).unwrap();
        assert!(meta.file_type().is_socket());
        assert_eq!(meta.mode() & 0o7777, 0o623);
        let next = UnixStream::connect(&path).unwrap();
        let (server, _) = UnixListener::from(listener).accept().unwrap();
        write(&next, b"hello");
        assert_eq!(read(&server, 5), b"hello");
    });
}

#[test]
fn abstract_names_come_back() {
    in_netns(|| {
        let listener = UnixListener::bind_addr(&abstract_name("a\0b")).unwrap();
        let client = UnixStream::connect_addr(&abstract_name("a\0b")).unwrap();
        let (server, _) = listener.accept().unwrap();
        // One whose listener is gone.
        let other = UnixListener::bind_addr(&abstract_name("other")).unwrap();
        let lone = UnixStream::connect_addr(&abstract_name("other")).unwrap();
        let (orphan, _) = other.accept().unwrap();
        close(vec![other.into()]);
        let bound = new(libc::SOCK_STREAM);
        socket::bind(bound.as_fd(), b"\x01\0\0bound").unwrap();
        let files: Vec<OwnedFd> =
            vec![client.into(), server.into(), listener.into(), lone.into(), orphan.into(), bound];
        let names: Vec<_> = files.iter().map(name_of).collect();
        let restored = all(files);
        assert_eq!(restored.iter().map(name_of).collect::<Vec<_>>(), names);
        let [client, server, listener, lone, orphan, bound] = restored.try_into().unwrap();
        write(&client, b"1");
        assert_eq!(receive(&server).0, b"1");
        write(&orphan, b"2");
        assert_eq!(receive(&lone).0, b"2");
        UnixStream::connect_addr(&abstract_name("a\0b")).unwrap();
        UnixListener::from(listener).accept().unwrap();
        assert!(UnixStream::connect_addr(&abstract_name("bound")).is_err());
        rustix::net::listen(&bound, 1).unwrap();
        UnixStream::connect_addr(&abstract_name("bound")).unwrap();
    });
}

#[test]
fn who_waits_is_accepted() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("listener");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let first = UnixStream::connect(&path).unwrap();
        let second = UnixStream::connect(&path).unwrap();
        let files = vec![second.into(), first.into(), listener.into()];
        let [second, first, listener] = all(files).try_into().unwrap();
        let listener = UnixListener::from(listener);
        for client in [first, second] {
            write(&client, b"me");
            assert_eq!(read(listener.accept().unwrap().0, 2), b"me");
        }
    });
}

/// Another process, which connects to a name over and over until `over`, and lets go at once.
fn connect_until(over: &AtomicBool, name: &[u8]) {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
    let [family, kind] = [libc::AF_UNIX, kind].map(|n| u64::from(n.cast_unsigned()));
    while !over.load(Ordering::Relaxed) {
        let mut batch = husk.batch();
        let at = batch.bytes(name).0;
        for fd in 0..8 {
            batch.call((libc::SYS_socket, [family, kind, 0]));
            batch.call((libc::SYS_connect, [fd, at, name.len() as u64]));
            batch.call((libc::SYS_close, [fd]));
        }
        batch.run().unwrap();
    }
}

/// A name is everybody's in its network, and a file everybody's on a volume: as soon as a listener listens somebody may connect, long
/// before its tasks run.
#[test]
fn strangers_get_no_connection_of_the_tree() {
    in_netns(|| {
        let listener = UnixListener::bind_addr(&abstract_name("known")).unwrap();
        rustix::net::listen(&listener, 2).unwrap();
        let mut files = vec![];
        for _ in 0..50 {
            let client = UnixStream::connect_addr(&abstract_name("known")).unwrap();
            files.extend([listener.accept().unwrap().0.into(), client.into()]);
        }
        let waiting = UnixStream::connect_addr(&abstract_name("known")).unwrap();
        files.extend([listener.into(), waiting.into()]);
        let dir = tempfile::tempdir().unwrap();
        let ids = dump_and_close(&Options::default(), dir.path(), files).unwrap();
        let over = AtomicBool::new(false);
        let restored = std::thread::scope(|scope| {
            scope.spawn(|| connect_until(&over, &super::name::address(b"\0known")));
            let restored = restore(&Options::default(), dir.path(), &ids);
            over.store(true, Ordering::Relaxed);
            restored
        });
        let mut restored = restored.unwrap();
        let waiting = restored.pop().unwrap();
        let listener = UnixListener::from(restored.pop().unwrap());
        for (number, ends) in (0..).zip(restored.chunks(2)) {
            write(&ends[1], &[number]);
            assert_eq!(receive(&ends[0]).0, [number]);
        }
        write(&waiting, b"me");
        let mut accepted = std::iter::repeat_with(|| listener.accept().unwrap().0);
        assert!(accepted.any(|server| read(server, 2) == b"me"));
    });
}

#[test]
fn who_waits_outside_is_refused() {
    in_netns(|| {
        let listener = UnixListener::bind_addr(&abstract_name("busy")).unwrap();
        let _client = UnixStream::connect_addr(&abstract_name("busy")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let error = dump(&Options::default(), dir.path(), &[listener.into()]).unwrap_err();
        assert!(error.to_string().contains("waits to be accepted"), "{error}");
    });
}

#[test]
fn datagram_sockets_keep_peers_and_senders() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let server = UnixDatagram::bind(path("server")).unwrap();
        let clients = ["one", "two"].map(|name| {
            let client = UnixDatagram::bind(path(name)).unwrap();
            client.connect(path("server")).unwrap();
            client.send(name.as_bytes()).unwrap();
            client
        });
        // Senders that are gone: with a name, and without.
        let gone = [UnixDatagram::bind(path("gone")).unwrap(), UnixDatagram::unbound().unwrap()];
        for (sender, text) in gone.iter().zip(["late", "nobody"]) {
            sender.send_to(text.as_bytes(), path("server")).unwrap();
        }
        close(gone.map(OwnedFd::from).into());
        std::fs::remove_file(path("gone")).unwrap();
        let own = UnixDatagram::bind(path("own")).unwrap();
        own.connect(path("own")).unwrap();
        own.send(b"to myself").unwrap();
        let [one, two] = clients;
        let files = vec![one.into(), server.into(), own.into(), two.into()];
        let [one, server, own, two] = all(files).try_into().unwrap();
        for (text, name) in [("one", "one"), ("two", "two"), ("late", "gone")] {
            let (data, received) = receive(&server);
            assert_eq!(data, text.as_bytes());
            assert_eq!(received.address[2..], path_name(&path(name)));
        }
        assert_eq!(receive(&server).0, b"nobody");
        assert!(is_empty(&server));
        assert!(!path("gone").exists());
        assert_eq!(receive(&own).0, b"to myself");
        write(&two, b"more");
        assert_eq!(receive(&server).0, b"more");
        UnixDatagram::from(server).send_to(b"back", path("one")).unwrap();
        assert_eq!(receive(&one).0, b"back");
        let stranger = UnixDatagram::unbound().unwrap();
        assert!(stranger.send_to(b"x", path("own")).is_err());
    });
}

#[test]
fn unnamed_datagram_ends_stay_connected() {
    in_netns(|| {
        // An end of a pair that has turned to another, and still can be sent to.
        let (a, b) = pair(SocketType::DGRAM);
        let other = UnixDatagram::bind_addr(&abstract_name("other")).unwrap();
        socket::connect(b.as_fd(), &socket::local_address(other.as_fd()).unwrap()).unwrap();
        // One whose peer is closed, with what that had sent.
        let (widow, peer) = pair(SocketType::DGRAM);
        write(&peer, b"farewell");
        close(vec![peer]);
        let files = vec![a, b, other.into(), widow];
        let [_a, b, other, widow] = all(files).try_into().unwrap();
        write(&b, b"to other");
        assert_eq!(receive(&other).0, b"to other");
        assert_eq!(receive(&widow).0, b"farewell");
        assert_eq!(rustix::io::write(&widow, b"x"), Err(Errno::CONNREFUSED));
    });
}

#[test]
fn long_queues_fit() {
    in_netns(|| {
        let (a, b) = pair(SocketType::DGRAM);
        let (c, d) = pair(SocketType::STREAM);
        let block = vec![7; 10_000];
        let fill = |fd: &OwnedFd| {
            rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK).unwrap();
            let mut count = 0;
            while let Ok(n) = rustix::io::write(fd, &block) {
                count += n;
            }
            count
        };
        let sent = [fill(&a), fill(&b), fill(&c), fill(&d)];
        let [a, b, c, d] = all(vec![a, b, c, d]).try_into().unwrap();
        for (fd, sent) in [&b, &a, &d, &c].into_iter().zip(sent) {
            let mut got = 0;
            while !is_empty_now(fd) {
                got += receive(fd).0.len();
            }
            assert_eq!(got, sent);
        }
    });
}

fn is_empty_now(fd: &OwnedFd) -> bool {
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    socket::receive(fd.as_fd(), &mut [0], flags).is_err()
}

#[test]
fn shutdowns_come_back() {
    in_netns(|| {
        for how in [Shutdown::Read, Shutdown::Write, Shutdown::Both] {
            for kind in [SocketType::STREAM, SocketType::DGRAM] {
                let (a, b) = pair(kind);
                write(&a, b"data");
                rustix::net::shutdown(&a, how).unwrap();
                let ask = |fd: &OwnedFd| (polled(fd.as_fd()).ended, polled(fd.as_fd()).hung_up);
                let before = (ask(&a), ask(&b));
                let [a, b] = all(vec![a, b]).try_into().unwrap();
                assert_eq!((ask(&a), ask(&b)), before, "{how:?} {kind:?}");
                assert_eq!(receive(&b).0, b"data");
                let writes = rustix::io::write(&a, b"x").is_ok();
                assert_eq!(writes, how == Shutdown::Read);
            }
        }
    });
}

#[test]
fn what_was_shut_down_early_does_not_show_at_the_peer() {
    in_netns(|| {
        let listener = UnixListener::bind_addr(&abstract_name("early")).unwrap();
        let client = new(libc::SOCK_STREAM);
        rustix::net::shutdown(&client, Shutdown::Read).unwrap();
        socket::connect(client.as_fd(), b"\x01\0\0early").unwrap();
        let (server, _) = listener.accept().unwrap();
        let files = vec![client, server.into(), listener.into()];
        let [client, server, _listener] = all(files).try_into().unwrap();
        assert!(polled(client.as_fd()).ended);
        write(&client, b"x");
        assert_eq!(receive(&server).0, b"x");
        assert_eq!(rustix::io::write(&server, b"y"), Err(Errno::PIPE));
    });
}

#[test]
fn closed_peers_stay_closed() {
    in_netns(|| {
        let (left, peer) = pair(SocketType::STREAM);
        write(&peer, b"left");
        close(vec![peer]);
        let (reset, peer) = pair(SocketType::STREAM);
        write(&reset, b"unread");
        close(vec![peer]);
        let [left, reset] = all(vec![left, reset]).try_into().unwrap();
        assert_eq!(receive(&left).0, b"left");
        assert_eq!(receive(&left).0, b"");
        assert_eq!(rustix::io::write(&left, b"x"), Err(Errno::PIPE));
        assert_eq!(rustix::io::read(&reset, &mut [0u8; 4]), Err(Errno::CONNRESET));
        assert_eq!(rustix::io::read(&reset, &mut [0u8; 4]), Ok(0));
    });
}

#[test]
fn removed_and_renamed_files_stay_so() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir(path("dir")).unwrap();
        let server = UnixDatagram::bind(path("dir/dgram")).unwrap();
        let client = UnixDatagram::unbound().unwrap();
        client.connect(path("dir/dgram")).unwrap();
        std::fs::remove_dir_all(path("dir")).unwrap();
        let older = UnixListener::bind(path("name")).unwrap();
        std::fs::rename(path("name"), path("moved")).unwrap();
        let newer = UnixListener::bind(path("name")).unwrap();
        let files: Vec<OwnedFd> = vec![client.into(), server.into(), older.into(), newer.into()];
        let names: Vec<_> = files.iter().map(name_of).collect();
        let restored = all(files);
        assert_eq!(restored.iter().map(name_of).collect::<Vec<_>>(), names);
        let [client, server, older, newer] = restored.try_into().unwrap();
        write(&client, b"still here");
        assert_eq!(receive(&server).0, b"still here");
        assert!(!path("dir").exists());
        for (name, listener) in [("moved", older), ("name", newer)] {
            let _client = UnixStream::connect(path(name)).unwrap();
            rustix::fs::fcntl_setfl(&listener, rustix::fs::OFlags::NONBLOCK).unwrap();
            UnixListener::from(listener).accept().unwrap();
        }
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    });
}

#[test]
fn relative_names_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::open(dir.path()).unwrap();
    in_netns(|| {
        let listener = new(libc::SOCK_STREAM);
        crate::namespace::run_in(&[], || {
            rustix::process::fchdir(&file).unwrap();
            socket::bind(listener.as_fd(), b"\x01\0relative").unwrap();
            Ok(())
        })
        .unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let [listener] = all(vec![listener]).try_into().unwrap();
        assert_eq!(name_of(&listener), b"relative\0");
        UnixStream::connect(dir.path().join("relative")).unwrap();
    });
}

#[test]
fn descriptors_in_flight_arrive() {
    in_netns(|| {
        for kind in [SocketType::DGRAM, SocketType::SEQPACKET, SocketType::STREAM] {
            let (a, b) = pair(kind);
            let (inner, outer) = pair(SocketType::DGRAM);
            write(&outer, b"deep");
            send(&a, b"before", &[]);
            send(&a, b"two", &[&inner, &a]);
            send(&a, b"itself", &[&b]);
            send(&a, b"after", &[]);
            drop(inner);
            let [a, b, outer] = all(vec![a, b, outer]).try_into().unwrap();
            let (mut data, mut received) = receive(&b);
            if kind == SocketType::STREAM {
                assert_eq!(data, b"beforetwo");
            } else {
                assert_eq!(data, b"before");
                (data, received) = receive(&b);
                assert_eq!(data, b"two", "{kind:?}");
            }
            let [inner, again] = received.files.try_into().unwrap();
            assert_eq!(receive(&inner).0, b"deep");
            write(&inner, b"up");
            assert_eq!(receive(&outer).0, b"up");
            let inode = |f: &OwnedFd| rustix::fs::fstat(f).unwrap().st_ino;
            assert_eq!(inode(&again), inode(&a));
            let (data, received) = receive(&b);
            assert_eq!(data, b"itself");
            assert_eq!(inode(&received.files[0]), inode(&b));
            assert_eq!(receive(&b).0, b"after");
        }
    });
}

#[test]
fn credentials_in_flight_arrive() {
    in_netns(|| {
        let (a, b) = pair(SocketType::DGRAM);
        socket::set_int(b.as_fd(), libc::SOL_SOCKET, libc::SO_PASSCRED, 1).unwrap();
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let credentials = Credentials { pid: own, uid: 123, gid: 45 };
        let message =
            Message { data: b"who", credentials: Some(credentials), ..Message::default() };
        socket::send(a.as_fd(), &message, 0).unwrap();
        let [_a, b] = all(vec![a, b]).try_into().unwrap();
        assert_eq!(receive(&b).1.credentials, Some(credentials));
    });
}

#[test]
fn peers_outside_are_refused_or_found_by_name() {
    in_netns(|| {
        let log = UnixDatagram::bind_addr(&abstract_name("log")).unwrap();
        let client = UnixDatagram::unbound().unwrap();
        client.connect_addr(&abstract_name("log")).unwrap();
        let (stream, _peer) = pair(SocketType::STREAM);
        let files = [OwnedFd::from(client)];
        let dir = tempfile::tempdir().unwrap();
        let error = dump(&Options::default(), dir.path(), &files).unwrap_err().to_string();
        assert!(error.contains("--ext-unix-sk") && error.contains("@log"), "{error}");
        let opts = Options {
            files: Files { ext_unix_sk: true, ..Files::default() },
            ..Options::default()
        };
        let ids = dump(&opts, dir.path(), &files).unwrap();
        drop(files);
        let [client] = restore(&opts, dir.path(), &ids).unwrap().try_into().unwrap();
        write(&client, b"line");
        assert_eq!(receive(&log.into()).0, b"line");
        let error = dump(&opts, dir.path(), &[stream]).unwrap_err().to_string();
        assert!(error.contains("--external unix["), "{error}");
    });
}

#[test]
fn brought_along_sockets_are_used() {
    in_netns(|| {
        let (inside, outside) = pair(SocketType::STREAM);
        let inode = rustix::fs::fstat(&inside).unwrap().st_ino;
        let given = Given { external: vec![External::Unix { inode }], ..Given::default() };
        let opts = Options { given, ..Options::default() };
        let dir = tempfile::tempdir().unwrap();
        let ids = dump(&opts, dir.path(), &[inside]).unwrap();
        drop(outside);
        assert!(restore(&opts, dir.path(), &ids).is_err());
        let (fresh, outside) = pair(SocketType::STREAM);
        let brought = InheritFd { fd: fresh.into(), key: format!("socket[{inode}]") };
        let given = Given { inherit_fd: vec![brought], ..Given::default() };
        let opts = Options { given, ..Options::default() };
        let [inside] = restore(&opts, dir.path(), &ids).unwrap().try_into().unwrap();
        write(&inside, b"x");
        assert_eq!(receive(&outside).0, b"x");
    });
}
