use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Instant;

use rustix::io::Errno;

use super::super::testing::{
    cycle, dump, dump_and_close, in_netns, read, restore, restore_in_vain,
};
use super::*;
use crate::options::{Network, NetworkLock, Options};

/// With a lock: packets that pass between the dumps of two ends would be lost.
fn keeping() -> Options {
    Options {
        network: Network {
            tcp_established: true,
            lock: NetworkLock::Nftables,
            ..Network::default()
        },
        ..Options::default()
    }
}

fn pair(address: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn all(files: Vec<OwnedFd>) -> Vec<OwnedFd> {
    cycle(&keeping(), files)
}

fn state_of(socket: impl AsFd) -> u32 {
    let mut info = [0; 4];
    socket::get(socket.as_fd(), Opt::TCP_INFO, &mut info).unwrap();
    info[0].into()
}

fn await_state(socket: impl AsFd, state: u32) {
    let end = Instant::now() + Duration::from_secs(60);
    while state_of(&socket) != state {
        assert!(Instant::now() < end, "state {} instead of {state}", state_of(&socket));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn talk(a: &mut TcpStream, b: &mut TcpStream) {
    for _ in 0..3 {
        a.write_all(b"ping").unwrap();
        assert_eq!(read(&*b, 4), b"ping");
        b.write_all(b"pong").unwrap();
        assert_eq!(read(&*a, 4), b"pong");
    }
}

fn streams<const N: usize>(files: Vec<OwnedFd>) -> [TcpStream; N] {
    let streams: Vec<TcpStream> = files.into_iter().map(TcpStream::from).collect();
    streams.try_into().unwrap()
}

/// Writes until nothing fits any more.
fn stuff(stream: &TcpStream) -> Vec<u8> {
    stream.set_nonblocking(true).unwrap();
    let mut all: Vec<u8> = Vec::new();
    let mut quiet = 0;
    while quiet < 20 {
        let block: Vec<u8> =
            (all.len()..all.len() + 50_000).map(|i| u8::try_from(i * 13 % 251).unwrap()).collect();
        match (&*stream).write(&block) {
            Ok(n) => {
                all.extend(&block[..n]);
                quiet = 0;
            }
            Err(_) => {
                std::thread::sleep(Duration::from_millis(1));
                quiet += 1;
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    all
}

#[test]
fn both_ends_come_back() {
    in_netns(|| {
        for address in ["127.0.0.1", "::1"] {
            let (mut a, mut b) = pair(address);
            talk(&mut a, &mut b);
            a.write_all(b"request").unwrap();
            b.write_all(b"answer").unwrap();
            let names = (a.local_addr().unwrap(), a.peer_addr().unwrap());
            let [mut a, mut b] = streams(all(vec![a.into(), b.into()]));
            assert_eq!((a.local_addr().unwrap(), a.peer_addr().unwrap()), names);
            assert_eq!(read(&b, 7), b"request");
            assert_eq!(read(&a, 6), b"answer");
            talk(&mut a, &mut b);
            drop(a);
            assert_eq!(b.read(&mut [0; 4]).unwrap(), 0);
        }
    });
}

#[test]
fn the_peer_outside_notices_nothing() {
    in_netns(|| {
        let (inside, mut outside) = pair("127.0.0.1");
        outside.write_all(b"before").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let ids = dump_and_close(&keeping(), dir.path(), vec![inside.into()]).unwrap();
        outside.write_all(b"meanwhile").unwrap();
        let [mut inside] = streams(restore(&keeping(), dir.path(), &ids).unwrap());
        assert_eq!(read(&inside, 15), b"beforemeanwhile");
        talk(&mut inside, &mut outside);
    });
}

#[test]
fn who_goes_on_notices_nothing() {
    in_netns(|| {
        for lock in [NetworkLock::Nftables, NetworkLock::Iptables, NetworkLock::Skip] {
            let (a, b) = pair("127.0.0.1");
            let files = [OwnedFd::from(a), OwnedFd::from(b)];
            let reuse = |s: &OwnedFd| {
                socket::get_int(s.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR).unwrap()
            };
            let before = [0, 1];
            assert_eq!([reuse(&files[0]), reuse(&files[1])], before);
            let dir = tempfile::tempdir().unwrap();
            let mut opts = keeping();
            opts.network.lock = lock;
            dump(&opts, dir.path(), &files).unwrap();
            for (file, before) in files.iter().zip(before) {
                assert_eq!(get(file.as_fd(), TCP_REPAIR).unwrap(), 0);
                assert_eq!(reuse(file), before);
            }
            let [mut a, mut b] = streams(files.into());
            talk(&mut a, &mut b);
        }
    });
}

#[test]
fn full_queues_come_back() {
    in_netns(|| {
        let (a, b) = pair("127.0.0.1");
        let sent = [stuff(&a), stuff(&b)];
        let [mut a, mut b] = streams(all(vec![a.into(), b.into()]));
        assert!(read(&b, sent[0].len()) == sent[0]);
        assert!(read(&a, sent[1].len()) == sent[1]);
        talk(&mut a, &mut b);
    });
}

#[test]
fn what_was_negotiated_is_kept() {
    in_netns(|| {
        for address in ["127.0.0.1", "::1"] {
            let (mut a, mut b) = pair(address);
            talk(&mut a, &mut b);
            let info = |s: &TcpStream| {
                let mut info = [0; 24];
                socket::get(s.as_fd(), Opt::TCP_INFO, &mut info).unwrap();
                // Options, scales, MSS.
                (info[5], info[6], info[16..20].to_vec())
            };
            let before = [info(&a), info(&b)];
            let [mut a, mut b] = streams(all(vec![a.into(), b.into()]));
            assert_eq!([info(&a), info(&b)], before);
            talk(&mut a, &mut b);
        }
    });
}

#[test]
fn half_closed_connections_come_back() {
    in_netns(|| {
        for address in ["127.0.0.1", "::1"] {
            let (mut a, mut b) = pair(address);
            a.write_all(b"last words").unwrap();
            a.shutdown(Shutdown::Write).unwrap();
            b.write_all(b"early").unwrap();
            await_state(&a, state::FIN_WAIT2);
            let [mut a, mut b] = streams(all(vec![a.into(), b.into()]));
            assert_eq!([state_of(&a), state_of(&b)], [state::FIN_WAIT2, state::CLOSE_WAIT]);
            let mut text = Vec::new();
            b.read_to_end(&mut text).unwrap();
            assert_eq!(text, b"last words");
            b.write_all(b" and late").unwrap();
            drop(b);
            text.clear();
            a.read_to_end(&mut text).unwrap();
            assert_eq!(text, b"early and late");
        }
    });
}

#[test]
fn connections_closed_with_unsent_data_come_back() {
    in_netns(|| {
        // FIN_WAIT1: more than the peer takes, and the end.
        let (a, b) = pair("127.0.0.1");
        let sent = stuff(&a);
        a.shutdown(Shutdown::Write).unwrap();
        // LAST_ACK: the same, from one whose peer is done.
        let (c, d) = pair("127.0.0.1");
        let more = stuff(&c);
        d.shutdown(Shutdown::Write).unwrap();
        await_state(&c, state::CLOSE_WAIT);
        c.shutdown(Shutdown::Write).unwrap();
        let states = [state::FIN_WAIT1, state::LAST_ACK];
        assert_eq!([&a, &c].map(state_of), states);
        let [mut a, mut b, mut c, mut d] =
            streams(all(vec![a.into(), b.into(), c.into(), d.into()]));
        assert_eq!([&a, &c].map(state_of), states);
        let drain = |s: &mut TcpStream| {
            let mut data = Vec::new();
            s.read_to_end(&mut data).unwrap();
            data
        };
        assert!(drain(&mut b) == sent);
        b.write_all(b"still").unwrap();
        drop(b);
        assert_eq!(drain(&mut a), b"still");
        assert!(drain(&mut d) == more);
        assert_eq!(drain(&mut c), b"");
    });
}

#[test]
fn connections_closed_at_once_come_back() {
    in_netns(|| {
        let (a, b) = pair("127.0.0.1");
        let sent = [stuff(&a), stuff(&b)];
        for s in [&a, &b] {
            s.shutdown(Shutdown::Write).unwrap();
        }
        let [mut a, mut b] = streams(all(vec![a.into(), b.into()]));
        let mut data = Vec::new();
        a.read_to_end(&mut data).unwrap();
        assert!(data == sent[1]);
        data.clear();
        b.read_to_end(&mut data).unwrap();
        assert!(data == sent[0]);
    });
}

/// A firewall that lets no packet of a connection through, but the first ones.
fn drop_packets(port: u16, flags: &str) {
    let rules = format!(
        "table inet test {{ chain out {{ type filter hook output priority 0; \
         meta mark 0xc114 accept; tcp dport {port} tcp flags & {flags} != 0 drop; }}; }}"
    );
    super::super::testing::command("nft", &[&rules]);
}

#[test]
fn a_lost_end_is_sent_again() {
    in_netns(|| {
        let (a, b) = pair("127.0.0.1");
        drop_packets(a.peer_addr().unwrap().port(), "fin");
        a.shutdown(Shutdown::Write).unwrap();
        b.shutdown(Shutdown::Write).unwrap();
        // CLOSING: both are closed, but only one knows.
        await_state(&a, state::CLOSING);
        let states = [&a, &b].map(state_of);
        let [a, b] = streams(all(vec![a.into(), b.into()]));
        assert_eq!([&a, &b].map(state_of), states);
        super::super::testing::command("nft", &["flush ruleset"]);
        await_state(&b, state::CLOSE);
        await_state(&a, state::CLOSE);
    });
}

#[test]
fn closed_connections_keep_what_is_unread() {
    in_netns(|| {
        let (a, mut b) = pair("127.0.0.1");
        b.write_all(b"unread").unwrap();
        b.shutdown(Shutdown::Write).unwrap();
        await_state(&a, state::CLOSE_WAIT);
        a.shutdown(Shutdown::Write).unwrap();
        await_state(&a, state::CLOSE);
        let (reset, mut peer) = pair("127.0.0.1");
        peer.write_all(b"abc").unwrap();
        let linger = [1u32.to_ne_bytes(), 0u32.to_ne_bytes()];
        socket::set(peer.as_fd(), Opt::LINGER, linger.as_flattened()).unwrap();
        drop(peer);
        await_state(&reset, state::CLOSE);
        let [mut a, mut reset] = streams(all(vec![a.into(), reset.into()]));
        assert_eq!([&a, &reset].map(state_of), [state::CLOSE; 2]);
        assert_eq!(read(&a, 6), b"unread");
        assert_eq!(a.read(&mut [0; 4]).unwrap(), 0);
        assert_eq!(rustix::io::write(&a, b"x"), Err(Errno::PIPE));
        assert_eq!(read(&reset, 3), b"abc");
        assert_eq!(reset.read(&mut [0; 4]).unwrap_err().raw_os_error(), Some(libc::ECONNRESET));
        assert_eq!(rustix::io::write(&reset, b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn a_connection_in_the_making_is_made() {
    in_netns(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = listener.local_addr().unwrap();
        drop_packets(name.port(), "syn");
        let dialing = socket::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        rustix::fs::fcntl_setfl(&dialing, rustix::fs::OFlags::NONBLOCK).unwrap();
        assert_eq!(rustix::net::connect(&dialing, &name), Err(Errno::INPROGRESS));
        let local = socket::local_address(dialing.as_fd()).unwrap();
        let [dialing] = all(vec![dialing]).try_into().unwrap();
        assert_eq!(state_of(&dialing), state::SYN_SENT);
        assert_eq!(socket::local_address(dialing.as_fd()).unwrap(), local);
        super::super::testing::command("nft", &["flush ruleset"]);
        let (mut server, _) = listener.accept().unwrap();
        await_state(&dialing, state::ESTABLISHED);
        let mut client = TcpStream::from(dialing);
        client.set_nonblocking(false).unwrap();
        talk(&mut client, &mut server);
    });
}

#[test]
fn connections_come_back_closed_if_so_wanted() {
    in_netns(|| {
        let mut closing = keeping();
        closing.network.tcp_close = true;
        for (first, second) in
            [(&closing, &closing), (&closing, &keeping()), (&keeping(), &closing)]
        {
            let (a, b) = pair("127.0.0.1");
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let dir = tempfile::tempdir().unwrap();
            let files = vec![a.into(), b.into(), listener.into()];
            let ids = dump_and_close(first, dir.path(), files).unwrap();
            let [mut a, b, listener] = streams(restore(second, dir.path(), &ids).unwrap());
            for socket in [&a, &b] {
                assert_eq!(state_of(socket), state::CLOSE);
                let seen = polled(socket.as_fd());
                assert!(seen.ended && seen.hung_up);
                assert_eq!(rustix::io::write(socket, b"x"), Err(Errno::PIPE));
            }
            assert_eq!(a.read(&mut [0; 4]).unwrap(), 0);
            let listener = TcpListener::from(OwnedFd::from(listener));
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        }
    });
}

#[test]
fn connections_are_refused_unless_wanted() {
    in_netns(|| {
        let (a, mut b) = pair("127.0.0.1");
        let dir = tempfile::tempdir().unwrap();
        let files = [OwnedFd::from(a)];
        let error = dump(&Options::default(), dir.path(), &files).unwrap_err().to_string();
        assert!(error.contains("--tcp-established"), "{error}");
        let [mut a] = streams(files.into());
        talk(&mut a, &mut b);
    });
}

#[test]
fn options_of_connections_come_back() {
    in_netns(|| {
        let (a, b) = pair("::1");
        let options = [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::SOL_SOCKET, libc::SO_REUSEADDR, 0),
            (libc::SOL_SOCKET, libc::SO_MARK, 77),
            (libc::IPPROTO_TCP, libc::TCP_CORK, 1),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 12345),
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 33),
        ];
        for (level, name, value) in options {
            socket::set_int(a.as_fd(), level, name, value).unwrap();
        }
        socket::set(a.as_fd(), Opt::BINDTODEVICE, b"lo").unwrap();
        let size = |s: &OwnedFd| socket::get_int(s.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        let files = vec![OwnedFd::from(a), OwnedFd::from(b)];
        let before = size(&files[0]).unwrap();
        let [a, b] = all(files).try_into().unwrap();
        for (level, name, value) in options {
            let now = socket::get_int(a.as_fd(), level, name).unwrap();
            assert_eq!(now, value, "option {name} of level {level}");
        }
        assert_eq!(size(&a).unwrap(), before);
        assert_eq!(socket::filter(a.as_fd()).unwrap(), []);
        socket::set_int(a.as_fd(), libc::IPPROTO_TCP, libc::TCP_CORK, 0).unwrap();
        let [mut a, mut b] = streams(vec![a, b]);
        talk(&mut a, &mut b);
    });
}

#[test]
fn ports_shared_with_a_listener_come_back() {
    in_netns(|| {
        let listener = TcpListener::bind("127.0.0.1:80").unwrap();
        let client = TcpStream::connect("127.0.0.1:80").unwrap();
        let (server, _) = listener.accept().unwrap();
        let files = vec![server.into(), client.into(), listener.into()];
        let [mut server, mut client, listener] = streams(all(files));
        talk(&mut server, &mut client);
        let listener = TcpListener::from(OwnedFd::from(listener));
        let mut next = TcpStream::connect("127.0.0.1:80").unwrap();
        talk(&mut next, &mut listener.accept().unwrap().0);
    });
}

#[test]
fn cut_streams_are_noticed() {
    in_netns(|| {
        let (a, mut b) = pair("127.0.0.1");
        b.write_all(b"some bytes").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let ids = dump_and_close(&keeping(), dir.path(), vec![a.into()]).unwrap();
        let name = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.to_str().unwrap().contains("tcp-stream"))
            .unwrap();
        let bytes = std::fs::read(&name).unwrap();
        for len in [0, 7, 20, bytes.len() - 1] {
            std::fs::write(&name, &bytes[..len]).unwrap();
            let error = restore(&keeping(), dir.path(), &ids).unwrap_err().to_string();
            assert!(error.contains("tcp-stream"), "{error}");
        }
    });
}

#[test]
fn a_restore_that_fails_late_is_not_noticed_by_peers() {
    in_netns(|| {
        let quiet = |stream: &TcpStream| {
            stream.set_nonblocking(true).unwrap();
            let seen = rustix::io::read(stream, &mut [0; 4]);
            stream.set_nonblocking(false).unwrap();
            assert_eq!(seen, Err(Errno::AGAIN));
        };
        let (inside, mut outside) = pair("127.0.0.1");
        // One that has been closed, with what was not sent yet.
        let (closing, reader) = pair("127.0.0.1");
        let unread = stuff(&closing);
        closing.shutdown(Shutdown::Write).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let files = vec![inside.into(), closing.into()];
        let ids = dump_and_close(&keeping(), dir.path(), files).unwrap();
        for _ in 0..2 {
            restore_in_vain(&keeping(), dir.path(), &ids).unwrap();
            quiet(&outside);
        }
        let [mut inside, closing] = streams(restore(&keeping(), dir.path(), &ids).unwrap());
        talk(&mut inside, &mut outside);
        assert_eq!(read(&reader, unread.len() + 1), unread);
        drop(closing);
    });
}

#[test]
fn a_guarded_connection_ends_silently() {
    in_netns(|| {
        let (inside, outside) = pair("::1");
        let inside = OwnedFd::from(inside);
        undo_silence(0).perform(Some(inside.as_fd())).unwrap();
        outside.set_nonblocking(true).unwrap();
        assert_eq!(rustix::io::read(&outside, &mut [0; 4]), Err(Errno::AGAIN));
        // The socket of a holder that is alive leaves repair mode again, any other stays silent.
        let own = i32::try_from(std::process::id()).unwrap();
        for (holder, repaired) in [(own, 0), (i32::MAX, 1)] {
            let (inside, _outside) = pair("::1");
            let socket = OwnedFd::from(inside);
            silence(socket.as_fd()).unwrap();
            undo_repair(holder, 0, 1).perform(Some(socket.as_fd())).unwrap();
            assert_eq!(get(socket.as_fd(), TCP_REPAIR).unwrap(), repaired);
        }
    });
}
