//! Images that ask for what only a privileged program can set: options of sockets, connections and ports.
//! Each is refused by name, as in [`crate::images`].

use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, FileEntry, InetSkEntry, NetlinkSkEntry, PacketRing, PacketSockEntry, SkMembership,
    SkOption, SkOptsEntry, SkUcred, TcpStreamEntry, TorporPacketPosition, UnixSkEntry,
};

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::scratch::Scratch;

use crate::images::{Images, PROGRAM, bundle_of, refuses_by, refuses_of};

#[test]
fn sockets() {
    fn packet(images: &Images, ns_id: Option<u32>) {
        images.open(FdTypes::Packetsk, |entry| {
            let id = entry.id;
            entry.psk = Some(PacketSockEntry {
                id,
                r#type: 3,
                protocol: 0x0300,
                ns_id,
                ..Default::default()
            });
        });
    }
    fn listener(images: &Images, ns_id: Option<u32>) {
        images.open(FdTypes::Inetsk, |entry| {
            entry.isk = Some(InetSkEntry {
                id: entry.id,
                ino: 900_001,
                family: 2,
                r#type: 1,
                proto: 6,
                state: 10,
                src_port: 8080,
                backlog: 1,
                src_addr: vec![0],
                dst_addr: vec![0],
                ns_id,
                opts: SkOptsEntry::default(),
                ..Default::default()
            });
        });
    }
    /// What sees packets of others by its type.
    fn raw(images: &Images, family: u32, proto: u32) {
        listener(images, images.root_ids().net_ns_id);
        images.files(|files| {
            let sockets = files.iter_mut().filter(|file| file.id == 900_001);
            for isk in sockets.filter_map(|file| file.isk.as_mut()) {
                (isk.family, isk.r#type, isk.proto, isk.state) = (family, 3, proto, 7);
                let address = vec![0; if family == 2 { 1 } else { 4 }];
                (isk.src_port, isk.src_addr, isk.dst_addr) = (proto, address.clone(), address);
            }
        });
    }
    /// A listener with options that only a privileged program can set.
    fn with(images: &Images, change: impl Fn(&mut SkOptsEntry)) {
        listener(images, images.root_ids().net_ns_id);
        images.files(|files| {
            let sockets = files.iter_mut().filter(|file| file.id == 900_001);
            sockets.filter_map(|file| file.isk.as_mut()).for_each(|isk| change(&mut isk.opts));
        });
    }
    fn option(images: &Images, level: u32, name: u32, value: &[u8]) {
        with(images, |options| {
            options.torpor_options = vec![SkOption { level, name, value: value.to_vec() }];
        });
    }
    fn netlink(images: &Images, protocol: u32, change: impl Fn(&mut NetlinkSkEntry)) {
        images.open(FdTypes::Netlinksk, |entry| {
            let (id, ns_id) = (entry.id, images.root_ids().net_ns_id);
            let mut socket = NetlinkSkEntry { id, protocol, ns_id, ..Default::default() };
            change(&mut socket);
            entry.nlsk = Some(socket);
        });
    }
    fn unix(images: &Images, kind: u32, ns_id: Option<u32>) {
        let name = b"/run/host.sock\0".to_vec();
        let base = UnixSkEntry { r#type: kind, state: 7, ns_id, ..Default::default() };
        let peer = UnixSkEntry { id: 900_002, ino: 900_002, uflags: 1, name, ..base.clone() };
        images.files(|files| {
            let ty = FdTypes::Unixsk.into();
            files.push(FileEntry {
                r#type: ty,
                id: 900_002,
                usk: Some(peer),
                ..Default::default()
            });
        });
        images.open(FdTypes::Unixsk, |entry| {
            entry.usk = Some(UnixSkEntry { id: entry.id, ino: 900_001, peer: 900_002, ..base });
        });
    }
    const UNKNOWN: &[&str] = &["files.img: file 90000", " is of net namespace ", "which is none"];
    const RAW: &[&str] = &["files.img: a packet socket", "(foreign.network.raw-sockets)"];
    const RAW_INET: &[&str] =
        &["files.img: a raw socket (file 900001)", "(foreign.network.raw-sockets)"];
    const MARKED: &[&str] = &["files.img: a marked socket", "(foreign.network.raw-sockets)"];
    const OPTION: &str = "files.img: a socket with ";
    const BY: &str = "(foreign.network.socket-options)";
    const OUTSIDE: &[&str] = &["\"/run/host.sock\" outside", "(foreign.network.external-sockets)"];
    refuses_by(
        "images-sockets",
        "foreign.users.allow = ['0']",
        &[
            (
                "a socket in somebody else's name",
                |images| {
                    images.open(FdTypes::Unixsk, |entry| {
                        let peer = SkUcred { pid: 1, uid: 4711, gid: 0 };
                        entry.usk = Some(UnixSkEntry {
                            id: entry.id,
                            ino: 900_001,
                            r#type: 1,
                            state: 10,
                            ns_id: images.root_ids().net_ns_id,
                            name: b"\0listener".to_vec(),
                            torpor_peer: Some(peer),
                            ..Default::default()
                        });
                    });
                },
                &["files.img: user id 4711", "(foreign.users.allow)"],
            ),
            ("a packet socket of an unknown namespace", |i| packet(i, Some(900_001)), UNKNOWN),
            ("a listener of an unknown namespace", |i| listener(i, Some(900_001)), UNKNOWN),
            ("a listener of namespace 0", |i| listener(i, Some(0)), UNKNOWN),
            (
                "a listener of a namespace of another kind",
                |images| listener(images, images.root_ids().pid_ns_id),
                UNKNOWN,
            ),
            (
                "a listener of this host's namespace",
                |images| {
                    images.inventory(|i| {
                        i.root_ids.get_or_insert_default().net_ns_id = Some(900_005)
                    });
                    listener(images, Some(900_005));
                },
                &["files.img: lives in this host's net namespace", "(foreign.namespaces.require)"],
            ),
            ("a packet socket", |i| packet(i, i.root_ids().net_ns_id), RAW),
            ("a packet socket that does not say where", |i| packet(i, None), RAW),
            (
                "a packet socket of the old kind",
                |images| {
                    packet(images, images.root_ids().net_ns_id);
                    images.files(|files| {
                        let sockets = files.iter_mut().filter_map(|file| file.psk.as_mut());
                        sockets.for_each(|socket| socket.r#type = 10);
                    });
                },
                RAW,
            ),
            ("a raw socket", |i| raw(i, 2, 1), RAW_INET),
            ("one that writes its headers", |i| raw(i, 2, 255), RAW_INET),
            ("one of the sixth version", |i| raw(i, 10, 58), RAW_INET),
            ("a marked listener", |i| with(i, |o| o.so_mark = Some(7)), MARKED),
            ("a listener before others", |i| with(i, |o| o.so_priority = Some(7)), MARKED),
            (
                "a transparent proxy",
                |images| option(images, 0, 19, &[1, 0, 0, 0]),
                &[OPTION, "IP_TRANSPARENT of 1 (file 900001), which takes CAP_NET_RAW", BY],
            ),
            (
                "one that is switched on by another number",
                |images| option(images, 0, 19, &[0xff; 4]),
                &["IP_TRANSPARENT of 4294967295", "CAP_NET_RAW", BY],
            ),
            (
                "one of the sixth version",
                |images| option(images, 41, 75, &[1, 0, 0, 0]),
                &["IPV6_TRANSPARENT of 1", BY],
            ),
            (
                "marks of others",
                |images| option(images, 1, 75, &[1, 0, 0, 0]),
                &["SO_RCVMARK of 1", BY],
            ),
            (
                "a processor that asks a device all the time",
                |images| option(images, 1, 46, &[200, 0, 0, 0]),
                &["SO_BUSY_POLL of 200", "CAP_NET_ADMIN", BY],
            ),
            (
                "a module of this host for connections",
                |images| option(images, 6, 13, b"no-such-module"),
                &["TCP_CONGESTION of \"no-such-module\"", BY],
            ),
            (
                "a buffer above the limits of this host",
                |images| with(images, |options| options.so_rcvbuf = 1 << 30),
                &["SO_RCVBUF of 1073741824", BY],
            ),
            (
                "a buffer that is set to what others grow to",
                |images| {
                    with(images, |options| {
                        (options.so_sndbuf, options.so_buf_lock) = (20 << 20, Some(1));
                    });
                },
                &["SO_SNDBUF of 20971520", BY],
            ),
            (
                "events of the audit",
                |images| netlink(images, 9, |socket| socket.groups = vec![1]),
                &["group 1 of netlink protocol 9 (file 900001), which takes CAP_AUDIT_READ", BY],
            ),
            (
                "events of packet filters, in a second word",
                |images| netlink(images, 12, |socket| socket.groups = vec![0, 1]),
                &["group 33 of netlink protocol 12", "CAP_NET_ADMIN", BY],
            ),
            (
                "routes of multicasts",
                |images| netlink(images, 0, |socket| socket.groups = vec![1 << 29]),
                &["group 30 of netlink protocol 0", BY],
            ),
            (
                "device events that come from a task",
                |images| netlink(images, 15, |socket| (socket.state, socket.dst_group) = (1, 1)),
                &["a peer by netlink protocol 15 that is not the kernel", BY],
            ),
            (
                "all namespaces that a socket knows",
                |images| {
                    netlink(images, 0, |socket| {
                        let value = vec![1, 0, 0, 0];
                        let all = SkOption { level: 270, name: 8, value };
                        socket.opts.torpor_options = vec![all];
                    });
                },
                &["NETLINK_LISTEN_ALL_NSID of 1", "CAP_NET_BROADCAST", BY],
            ),
            ("a datagram peer outside", |i| unix(i, 2, i.root_ids().net_ns_id), OUTSIDE),
            ("a stream's peer outside", |i| unix(i, 1, i.root_ids().net_ns_id), OUTSIDE),
            ("a packet peer outside", |i| unix(i, 5, None), OUTSIDE),
            ("a peer outside in another namespace", |i| unix(i, 2, Some(900_001)), UNKNOWN),
        ],
    );
}

/// Connections of TCP that the caller has not asked for, memory of the kernel that counts for nobody, and
/// what there cannot be.
#[test]
fn connections_and_rings() {
    /// A connection in a state, and its numbers.
    fn connection(images: &Images, family: u32, state: u32, stream: Option<TcpStreamEntry>) {
        images.open(FdTypes::Inetsk, |entry| {
            let address = vec![0x0100_007f; if family == 2 { 1 } else { 4 }];
            entry.isk = Some(InetSkEntry {
                id: entry.id,
                ino: 900_001,
                family,
                r#type: 1,
                proto: 6,
                state,
                src_port: 40000,
                dst_port: 40001,
                flags: 2,
                src_addr: address.clone(),
                dst_addr: address,
                ns_id: images.root_ids().net_ns_id,
                ..Default::default()
            });
        });
        if let Some(stream) = stream {
            images.dir.write_one(kind::TCP_STREAM, 900_001, &stream).unwrap();
        }
    }
    fn goes_on(images: &Images, family: u32, state: u32) {
        connection(images, family, state, Some(TcpStreamEntry::default()));
    }
    fn packets(images: &Images, change: impl Fn(&mut PacketSockEntry)) {
        images.open(FdTypes::Packetsk, |entry| {
            let (id, ns_id) = (entry.id, images.root_ids().net_ns_id);
            let mut socket = PacketSockEntry { id, r#type: 3, ns_id, ..Default::default() };
            change(&mut socket);
            entry.psk = Some(socket);
        });
    }
    fn ring(blocks: u32) -> Option<PacketRing> {
        let (block_size, frame_size) = (1 << 20, 1 << 20);
        Some(PacketRing {
            block_size,
            block_nr: blocks,
            frame_size,
            frame_nr: blocks,
            ..Default::default()
        })
    }
    fn group(images: &Images, level: u32, group: usize, source: usize) {
        images.open(FdTypes::Inetsk, |entry| {
            let membership = SkMembership {
                level,
                group: vec![7; group],
                device: "lo".to_owned(),
                exclude: true,
                sources: vec![vec![7; source]],
            };
            let torpor_memberships = vec![membership];
            entry.isk = Some(InetSkEntry {
                id: entry.id,
                ino: 900_001,
                family: 2,
                r#type: 2,
                proto: 17,
                state: 7,
                src_addr: vec![0],
                dst_addr: vec![0],
                ns_id: images.root_ids().net_ns_id,
                opts: SkOptsEntry { torpor_memberships, ..SkOptsEntry::default() },
                ..Default::default()
            });
        });
    }
    const LIVES: &[&str] = &[
        "files.img: a connection of TCP that goes on (file 900001)",
        "the caller has not said --tcp-established (foreign.network.connections)",
    ];
    const RINGS: &[&str] =
        &["files.img: the size of rings of packets of ", "(foreign.limits.raise)"];
    const GROUP: &[&str] = &["files.img: socket 900001: is in a multicast group that cannot be"];
    refuses_by(
        "images-connections",
        "foreign.network.raw-sockets = true",
        &[
            ("an established connection", |i| goes_on(i, 2, 1), LIVES),
            ("one of the sixth version", |i| goes_on(i, 10, 1), LIVES),
            ("one that is being established", |i| goes_on(i, 2, 2), LIVES),
            ("one that the peer has closed", |i| goes_on(i, 2, 8), LIVES),
            (
                "one without numbers",
                |images| connection(images, 2, 1, None),
                &["files.img: socket 900001: is connected, but has no tcp-stream image"],
            ),
            (
                "one whose windows count as none can",
                |images| {
                    let stream =
                        TcpStreamEntry { opt_mask: 4, snd_wscale: 15, ..Default::default() };
                    connection(images, 2, 1, Some(stream));
                },
                &["tcp-stream-dbba1.img: its windows have scales 15 and 0"],
            ),
            (
                "one with more data than there is",
                |images| {
                    let stream = TcpStreamEntry { inq_len: 1, ..Default::default() };
                    connection(images, 2, 7, Some(stream));
                },
                &["tcp-stream-dbba1.img: offset 26: 1 bytes expected for data, the file has 0"],
            ),
            ("a large ring", |i| packets(i, |socket| socket.rx_ring = ring(257)), RINGS),
            ("a large one to send", |i| packets(i, |socket| socket.tx_ring = ring(4095)), RINGS),
            (
                "two that are large together",
                |i| packets(i, |socket| (socket.rx_ring, socket.tx_ring) = (ring(200), ring(57))),
                RINGS,
            ),
            (
                "a large one that the kernel has gone round",
                |images| {
                    packets(images, |socket| {
                        socket.rx_ring = ring(257);
                        socket.torpor_position = Some(TorporPacketPosition::default());
                    });
                },
                &["files.img: socket 900001: its rings of 269484032 bytes are mapped"],
            ),
            ("a group of another family", |i| group(i, 41, 4, 4), GROUP),
            ("sources of another family", |i| group(i, 0, 4, 16), GROUP),
            ("a group of no address", |i| group(i, 0, 0, 0), GROUP),
            ("a group of another protocol", |i| group(i, 6, 4, 4), GROUP),
        ],
    );
}

/// The network is the caller's: its settings say who may have what, and are not those of this host.
#[test]
fn ports_and_pings_in_a_network_of_the_callers() {
    /// An Internet socket of a family, a type and a protocol, with a port, in a state.
    fn socket(images: &Images, family: u32, (ty, proto): (u32, u32), port: u32, state: u32) {
        images.open(FdTypes::Inetsk, |entry| {
            let address = vec![0; if family == 2 { 1 } else { 4 }];
            entry.isk = Some(InetSkEntry {
                id: entry.id,
                ino: 900_001,
                family,
                r#type: ty,
                proto,
                state,
                src_port: port,
                backlog: 1,
                flags: 2,
                src_addr: address.clone(),
                dst_addr: address,
                ns_id: images.root_ids().net_ns_id,
                ..Default::default()
            });
        });
    }
    const TCP: (u32, u32) = (1, 6);
    const UDP: (u32, u32) = (2, 17);
    const PORT: &str = "files.img: a socket with port 52 of the caller's network (file 900001)";
    const BY: &str = "CAP_NET_BIND_SERVICE is not given (foreign.network.ports)";
    const LOW: &[&str] = &[PORT, BY];
    const PING: &[&str] =
        &["files.img: a ping socket (file 900001)", "(foreign.network.raw-sockets)"];
    let scratch = Scratch::new("images-ports");
    let network = Network::new(scratch.name());
    let set = |setting: &str| {
        let enter = format!("--net={}", network.path().display());
        command("nsenter", &[&enter, "sysctl", "--quiet", "--write", setting]).succeed();
    };
    set("net.ipv4.ip_unprivileged_port_start=53");
    let program = format!("nc -l -p 53 >/dev/null & {PROGRAM}");
    let bundle = bundle_of(&scratch, &program).network(&network).configure(|config| {
        for set in config["process"]["capabilities"].as_object_mut().unwrap().values_mut() {
            set.as_array_mut().unwrap().retain(|name| name != "CAP_NET_BIND_SERVICE");
        }
    });
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            ("a listener", |images| socket(images, 2, TCP, 52, 10), LOW),
            ("a listener of the sixth version", |images| socket(images, 10, TCP, 52, 10), LOW),
            ("a bound socket that is closed", |images| socket(images, 2, TCP, 52, 7), LOW),
            ("one of UDP", |images| socket(images, 2, UDP, 52, 7), LOW),
            ("one of UDP that has a peer", |images| socket(images, 10, UDP, 52, 1), LOW),
            ("one of UDP-Lite", |images| socket(images, 2, (2, 136), 52, 7), LOW),
            ("a listener of several paths", |images| socket(images, 2, (1, 262), 52, 10), LOW),
            ("pings", |images| socket(images, 2, (2, 1), 0, 7), PING),
            ("pings of the sixth version", |images| socket(images, 10, (2, 58), 0, 7), PING),
            ("pings by a number", |images| socket(images, 2, (2, 1), 52, 7), PING),
            ("pings to a peer", |images| socket(images, 2, (2, 1), 0, 1), PING),
        ],
        |images| {
            set("net.ipv4.ping_group_range=0 0");
            socket(images, 2, (2, 1), 52, 7);
        },
    );
}
