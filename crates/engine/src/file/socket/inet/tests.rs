use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;

use libc::IPV6_FREEBIND;
use torpor_images::kind;

use super::super::inet_options::ICMP_FILTER;
use super::super::testing::{
    close, command, cycle, dump, dump_and_close, entries, in_netns, restore,
};
use super::*;
use crate::file::testing::await_readable;
use crate::options::{Network, Options};

fn get(fd: &OwnedFd, level: i32, name: i32) -> i32 {
    socket::get_int(fd.as_fd(), level, name).unwrap()
}

fn set(fd: impl AsFd, level: i32, name: i32, value: i32) {
    socket::set_int(fd.as_fd(), level, name, value).unwrap();
}

fn new(family: i32, kind: i32, protocol: i32) -> OwnedFd {
    socket::socket(family, kind, protocol).unwrap()
}

#[test]
fn listeners_listen_again() {
    in_netns(|| {
        let v4 = TcpListener::bind("127.0.0.1:80").unwrap();
        let v6 = TcpListener::bind("[::1]:80").unwrap();
        let any = TcpListener::bind("[::]:81").unwrap();
        v4.set_nonblocking(true).unwrap();
        let restored = cycle(&Options::default(), vec![v4.into(), v6.into(), any.into()]);
        let [v4, v6, any] = restored.try_into().unwrap();
        assert_eq!(get(&v4, libc::SOL_SOCKET, libc::SO_REUSEADDR), 1);
        let v4 = TcpListener::from(v4);
        assert_eq!(v4.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        v4.set_nonblocking(false).unwrap();
        for (listener, address) in
            [(v4, "127.0.0.1:80"), (v6.into(), "[::1]:80"), (any.into(), "127.0.0.1:81")]
        {
            let client = TcpStream::connect(address).unwrap();
            let (_, from) = listener.accept().unwrap();
            assert_eq!(client.local_addr().unwrap().port(), from.port());
        }
    });
}

#[test]
fn a_shared_port_outlives_its_option() {
    in_netns(|| {
        let listen = || {
            let s = new(libc::AF_INET, libc::SOCK_STREAM, 0);
            set(&s, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
            socket::bind(s.as_fd(), &[2, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            rustix::net::listen(&s, 5).unwrap();
            s
        };
        let (a, b) = (listen(), listen());
        set(&b, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
        let restored = cycle(&Options::default(), vec![a, b]);
        let reuse: Vec<_> =
            restored.iter().map(|s| get(s, libc::SOL_SOCKET, libc::SO_REUSEPORT)).collect();
        assert_eq!(reuse, [1, 0]);
    });
}

/// The kernel lets the sockets of one user share a port; root, who restores, is another one.
#[test]
fn a_port_is_not_shared_with_root() {
    in_netns(|| {
        let listen = |user: u32| {
            let s = new(libc::AF_INET, libc::SOCK_STREAM, 0);
            set(&s, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
            rustix::fs::fchown(&s, Some(rustix::fs::Uid::from_raw(user)), None).unwrap();
            socket::bind(s.as_fd(), &[2, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            rustix::net::listen(&s, 5).unwrap();
            s
        };
        let dir = tempfile::tempdir().unwrap();
        let opts = Options::default();
        let ids = dump_and_close(&opts, dir.path(), vec![listen(1000)]).unwrap();
        let roots = listen(0);
        let error = restore(&opts, dir.path(), &ids).unwrap_err().to_string();
        assert!(error.contains("Address already in use"), "{error}");
        drop(roots);
        restore(&opts, dir.path(), &ids).unwrap();
    });
}

#[test]
fn a_waiting_connection_is_refused() {
    in_netns(|| {
        let listener = TcpListener::bind("127.0.0.1:80").unwrap();
        let _client = TcpStream::connect("127.0.0.1:80").unwrap();
        // The client has its answer a moment before the listener has the client.
        await_readable(&listener);
        let dir = tempfile::tempdir().unwrap();
        let files = [listener.into()];
        let error = dump(&Options::default(), dir.path(), &files).unwrap_err().to_string();
        assert!(error.contains("--skip-in-flight"), "{error}");
        let skip = Options {
            network: Network { skip_in_flight: true, ..Network::default() },
            ..Options::default()
        };
        dump(&skip, dir.path(), &files).unwrap();
        let entries = entries(dir.path());
        assert_eq!(entries[0].isk.as_ref().unwrap().backlog, 128);
    });
}

#[test]
fn closed_sockets_stay_what_they_were() {
    in_netns(|| {
        let fresh = new(libc::AF_INET, libc::SOCK_STREAM, 0);
        let bound = new(libc::AF_INET6, libc::SOCK_STREAM, 0);
        socket::bind(bound.as_fd(), &{
            let mut address = Address::unspecified(libc::AF_INET6);
            address.port = 4000;
            address.to_bytes()
        })
        .unwrap();
        let ended = new(libc::AF_INET, libc::SOCK_STREAM, 0);
        shut_down(ended.as_fd(), SkShutdown::Both.into());
        let restored = cycle(&Options::default(), vec![fresh, bound, ended]);
        let [fresh, bound, ended] = restored.try_into().unwrap();
        let name = |s: &OwnedFd| Address::parse(&socket::local_address(s.as_fd()).unwrap());
        assert_eq!(name(&fresh).unwrap().port, 0);
        assert_eq!(name(&bound).unwrap().to_string(), "[::]:4000");
        let errno = |r: rustix::io::Result<usize>| r.map_err(rustix::io::Errno::raw_os_error);
        let buf = &mut [0u8; 4];
        assert_eq!(errno(rustix::io::read(&fresh, &mut *buf)), Err(libc::ENOTCONN));
        assert_eq!(errno(rustix::io::read(&ended, &mut *buf)), Ok(0));
        rustix::net::listen(&bound, 1).unwrap();
        TcpStream::connect("[::1]:4000").unwrap();
    });
}

#[test]
fn datagram_sockets_keep_their_peers() {
    in_netns(|| {
        let server = UdpSocket::bind("127.0.0.1:53").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect("127.0.0.1:53").unwrap();
        let silent = UdpSocket::bind("[::]:54").unwrap();
        shut_down(silent.as_fd(), SkShutdown::Read.into());
        set(&silent, libc::SOL_SOCKET, libc::SO_BROADCAST, 1);
        let address = client.local_addr().unwrap();
        let restored =
            cycle(&Options::default(), vec![server.into(), client.into(), silent.into()]);
        let [server, client, silent] = restored.try_into().unwrap();
        assert_eq!(get(&silent, libc::SOL_SOCKET, libc::SO_BROADCAST), 1);
        assert_eq!(rustix::io::read(&silent, &mut [0u8; 4]), Ok(0));
        let (server, client) = (UdpSocket::from(server), UdpSocket::from(client));
        client.send(b"question").unwrap();
        let mut data = [0; 16];
        assert_eq!(server.recv_from(&mut data).unwrap(), (8, address));
        server.send_to(b"answer", address).unwrap();
        assert_eq!(client.recv(&mut data).unwrap(), 6);
    });
}

#[test]
fn corked_data_is_refused() {
    in_netns(|| {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect("127.0.0.1:9").unwrap();
        set(&socket, libc::IPPROTO_UDP, libc::UDP_CORK, 1);
        socket.send(b"half").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let files = [socket.into()];
        let error = dump(&Options::default(), dir.path(), &files).unwrap_err().to_string();
        assert!(error.contains("UDP_CORK"), "{error}");
    });
}

#[test]
fn options_come_back() {
    let options: &[(i32, i32, i32)] = &[
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 17),
        (libc::SOL_SOCKET, libc::SO_MARK, 0x1234),
        (libc::SOL_SOCKET, libc::SO_DONTROUTE, 1),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR, 0),
        (libc::IPPROTO_IP, libc::IP_TTL, 33),
        (libc::IPPROTO_IP, libc::IP_TOS, 0x10),
        // Behind the type of service, which changes it.
        (libc::SOL_SOCKET, libc::SO_PRIORITY, 5),
        (libc::IPPROTO_IP, libc::IP_PKTINFO, 1),
        (libc::IPPROTO_IP, libc::IP_RECVTTL, 1),
        (libc::IPPROTO_IP, libc::IP_FREEBIND, 1),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (libc::IPPROTO_TCP, libc::TCP_CORK, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 50),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 6),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 7000),
    ];
    in_netns(|| {
        let s = new(libc::AF_INET, libc::SOCK_STREAM, 0);
        for (level, name, value) in options {
            set(&s, *level, *name, *value);
        }
        set(&s, libc::SOL_SOCKET, libc::SO_SNDBUF, 20000);
        socket::set(s.as_fd(), Opt::LINGER, &[1, 0, 0, 0, 9, 0, 0, 0]).unwrap();
        socket::set(s.as_fd(), Opt::BINDTODEVICE, b"lo").unwrap();
        socket::set(s.as_fd(), Opt::TCP_CONGESTION, b"reno").unwrap();
        let program = [
            socket::Instruction { code: 0x28, jt: 0, jf: 0, k: 0 },
            socket::Instruction { code: 0x06, jt: 0, jf: 0, k: 0xffff },
        ];
        socket::attach_filter(s.as_fd(), &program).unwrap();
        let locks = get(&s, libc::SOL_SOCKET, libc::SO_BUF_LOCK);
        rustix::fs::fchown(&s, Some(rustix::fs::Uid::from_raw(12)), None).unwrap();
        let [s] = cycle(&Options::default(), vec![s]).try_into().unwrap();
        for (level, name, value) in options {
            assert_eq!(get(&s, *level, *name), *value, "option {name} of level {level}");
        }
        assert_eq!(get(&s, libc::SOL_SOCKET, libc::SO_SNDBUF), 40000);
        assert_eq!(get(&s, libc::SOL_SOCKET, libc::SO_BUF_LOCK), locks);
        let mut value = [0; 16];
        let len = socket::get(s.as_fd(), Opt::LINGER, &mut value).unwrap();
        assert_eq!(&value[..len], [1, 0, 0, 0, 9, 0, 0, 0]);
        socket::get(s.as_fd(), Opt::BINDTODEVICE, &mut value).unwrap();
        assert_eq!(&value[..3], b"lo\0");
        socket::get(s.as_fd(), Opt::TCP_CONGESTION, &mut value).unwrap();
        assert_eq!(&value[..5], b"reno\0");
        assert_eq!(socket::filter(s.as_fd()).unwrap(), program);
        assert_eq!(rustix::fs::fstat(&s).unwrap().st_uid, 12);
    });
}

#[test]
fn foreign_addresses_and_devices_come_back() {
    in_netns(|| {
        let s = new(libc::AF_INET6, libc::SOCK_DGRAM, 0);
        set(&s, libc::IPPROTO_IPV6, IPV6_FREEBIND, 1);
        let foreign = Address {
            words: [0xb80d_0120, 0, 0, 0x0100_0000],
            port: 5,
            ..Address::unspecified(libc::AF_INET6)
        };
        socket::bind(s.as_fd(), &foreign.to_bytes()).unwrap();
        set(&s, libc::IPPROTO_IPV6, IPV6_FREEBIND, 0);
        let [s] = cycle(&Options::default(), vec![s]).try_into().unwrap();
        let now = Address::parse(&socket::local_address(s.as_fd()).unwrap()).unwrap();
        assert_eq!(now, foreign);
        assert_eq!(get(&s, libc::IPPROTO_IPV6, IPV6_FREEBIND), 0);
    });
}

#[test]
fn raw_and_ping_sockets_come_back() {
    in_netns(|| {
        let raw = new(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP);
        set(&raw, ICMP_FILTER.0, ICMP_FILTER.1, 0x101);
        set(&raw, libc::IPPROTO_IP, libc::IP_HDRINCL, 1);
        let raw6 = new(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6);
        socket::set(raw6.as_fd(), Opt::ICMP6_FILTER, &[7; 32]).unwrap();
        let mut local = Address::parse(&[2, 0, 0, 0, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        let bound = new(libc::AF_INET, libc::SOCK_RAW, 253);
        socket::bind(bound.as_fd(), &local.as_mut().unwrap().to_bytes()).unwrap();
        let restored = cycle(&Options::default(), vec![raw, raw6, bound]);
        let [raw, raw6, bound] = restored.try_into().unwrap();
        assert_eq!(get(&raw, ICMP_FILTER.0, ICMP_FILTER.1), 0x101);
        assert_eq!(get(&raw, libc::IPPROTO_IP, libc::IP_HDRINCL), 1);
        let mut value = [0; 32];
        socket::get(raw6.as_fd(), Opt::ICMP6_FILTER, &mut value).unwrap();
        assert_eq!(value, [7; 32]);
        let name = Address::parse(&socket::local_address(bound.as_fd()).unwrap()).unwrap();
        assert_eq!(name.words, local.unwrap().words);
        assert_eq!(get(&bound, libc::SOL_SOCKET, libc::SO_PROTOCOL), 253);
    });
}

#[test]
fn what_is_left_of_connections_does_not_keep_a_port() {
    in_netns(|| {
        // Not with the standard library, which sets SO_REUSEADDR.
        let listener = new(libc::AF_INET, libc::SOCK_STREAM, 0);
        socket::bind(listener.as_fd(), &[2, 0, 0, 97, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
            .unwrap();
        rustix::net::listen(&listener, 5).unwrap();
        let client = TcpStream::connect("127.0.0.1:97").unwrap();
        let accepted = rustix::net::accept(&listener).unwrap();
        // The end that closes first keeps the connection for a minute.
        drop(accepted);
        drop(client);
        let again = cycle(&Options::default(), vec![listener]);
        assert_eq!(get(&again[0], libc::SOL_SOCKET, libc::SO_REUSEADDR), 0);
        TcpStream::connect("127.0.0.1:97").unwrap();
    });
}

#[test]
fn sockets_without_ports_stay_connected() {
    in_netns(|| {
        let address = [2, 0, 0, 0, 127, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        let raw = new(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_TCP);
        socket::connect(raw.as_fd(), &address).unwrap();
        let udp = new(libc::AF_INET, libc::SOCK_DGRAM, 0);
        socket::connect(udp.as_fd(), &address).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let look = |files: &[OwnedFd]| {
            dump(&Options::default(), dir.path(), files).unwrap();
            let peer = |e: &FileEntry| {
                let isk = e.isk.as_ref().unwrap();
                (isk.state, isk.dst_addr.clone(), isk.dst_port)
            };
            entries(dir.path()).iter().map(peer).collect::<Vec<_>>()
        };
        let files = vec![raw, udp];
        let peers = look(&files);
        let there = u32::from_ne_bytes([127, 0, 0, 2]);
        assert_eq!(peers, [(1, vec![there], 0), (1, vec![there], 0)]);
        assert_eq!(look(&cycle(&Options::default(), files)), peers);
    });
}

#[test]
fn a_closed_socket_takes_no_port_that_somebody_listens_at() {
    in_netns(|| {
        let closed = new(libc::AF_INET, libc::SOCK_STREAM, 0);
        socket::bind(closed.as_fd(), &[2, 0, 0, 99, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let ids = dump_and_close(&Options::default(), dir.path(), vec![closed]).unwrap();
        // As it is, and as one that had a peer once.
        for peer in [None, Some(7)] {
            with_last_peers(dir.path(), &[peer]);
            let listener = TcpListener::bind("127.0.0.1:99").unwrap();
            let error = restore(&Options::default(), dir.path(), &ids).unwrap_err().to_string();
            assert!(error.contains("Address already in use"), "{error}");
            drop(listener);
            close(restore(&Options::default(), dir.path(), &ids).unwrap());
        }
    });
}

/// Gives sockets of images last peers, by their ports.
fn with_last_peers(dir: &Path, peers: &[Option<u32>]) {
    let mut files = entries(dir);
    for (file, peer) in files.iter_mut().zip(peers) {
        let socket = file.isk.as_mut().unwrap();
        (socket.torpor_peer_port, socket.torpor_peer_addr) = (*peer, socket.src_addr.clone());
    }
    ImageDir::open(dir).unwrap().write_all(kind::FILES, 0, &files).unwrap();
}

/// Each waits a second for a packet that something drops, and images can have any number of them.
#[test]
fn a_few_last_peers_are_waited_for_in_vain() {
    in_netns(|| {
        let rules = "table inet test { chain in { type filter hook input priority 0; \
                     tcp sport { 7, 9 } drop; }; }";
        command("nft", &[rules]);
        let closed = |port: u8| {
            let closed = new(libc::AF_INET, libc::SOCK_STREAM, 0);
            let address = [2, 0, 0, port, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
            socket::bind(closed.as_fd(), &address).unwrap();
            closed
        };
        let dir = tempfile::tempdir().unwrap();
        let closed = [90, 91, 92].map(closed).into();
        let ids = dump_and_close(&Options::default(), dir.path(), closed).unwrap();
        let peers = |ports: [u32; 3]| {
            with_last_peers(dir.path(), &ports.map(Some));
            let restored = restore(&Options::default(), dir.path(), &ids).unwrap();
            let known = |fd: &OwnedFd| socket::last_peer_address(fd.as_fd(), 16).is_ok();
            let known: Vec<bool> = restored.iter().map(known).collect();
            close(restored);
            known
        };
        assert_eq!(peers([7, 11, 12]), [false, true, true]);
        assert_eq!(peers([7, 9, 12]), [false, false, false]);
    });
}
