//! Images that ask for what only a privileged program can set: options of sockets, limits and objects.
//! Each is refused by name, as in [`crate::images`].

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, FileEntry, FileLockEntry, InetSkEntry, IpcDescEntry, IpcMsgEntry, IpcShmEntry,
    IpcVarEntry, MqueueEntry, NetlinkSkEntry, PacketRing, PacketSockEntry, PipeDataEntry,
    PipeEntry, PosixTimerEntry, RegFileEntry, SeccompEntry, SkMembership, SkOption, SkOptsEntry,
    SkUcred, TcpStreamEntry, TermiosEntry, TimerfdEntry, TorporIoUringBuffer, TorporIoUringEntry,
    TorporPacketPosition, TorporUserfaultfdEntry, TtyFileEntry, TtyInfoEntry, TtyType,
    TunfileEntry, UnixSkEntry,
};

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::scratch::Scratch;

use crate::images::{Images, PROGRAM, Row, bundle_of, refuses, refuses_by, refuses_of};

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
            ("a marked listener", |i| with(i, |o| o.so_mark = Some(7)), MARKED),
            ("a listener before others", |i| with(i, |o| o.so_priority = Some(7)), MARKED),
            (
                "a transparent proxy",
                |images| option(images, 0, 19, &[1, 0, 0, 0]),
                &[OPTION, "IP_TRANSPARENT of 1 (file 900001), which takes CAP_NET_RAW", BY],
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
/// Filters that let more through than the profile of the configuration.
#[test]
fn filters_beyond_the_profile() {
    const ALLOW: [u8; 8] = instruction(0x06, 0, 0x7fff_0000);
    /// An instruction of a filter, and how many it leaves out if it is a test that fails.
    const fn instruction(code: u8, otherwise: u8, k: u32) -> [u8; 8] {
        let [k0, k1, k2, k3] = k.to_le_bytes();
        [code, 0, 0, otherwise, k0, k1, k2, k3]
    }
    fn filters(images: &Images, change: impl Fn(&mut Vec<u8>)) {
        let mut entry: SeccompEntry = images.dir.read_one(kind::SECCOMP, 0).unwrap();
        entry.seccomp_filters.iter_mut().for_each(|of| change(&mut of.filter));
        images.dir.write_one(kind::SECCOMP, 0, &entry).unwrap();
    }
    /// Lets through for what the word at `offset` of what filters see is `value`.
    fn if_word(images: &Images, offset: u32, value: u32) {
        filters(images, |program| {
            let test = [instruction(0x20, 0, offset), instruction(0x15, 1, value), ALLOW];
            *program = [test.concat(), std::mem::take(program)].concat();
        });
    }
    const WANTED: &str =
        "the profile that the calling runtime gives does not (foreign.seccomp.more)";
    const BOTH: &str = "that lets through keyctl, fadvise64 (SCMP_ARCH_X86): ";
    let scratch = Scratch::new("images-profile");
    let bundle = bundle_of(&scratch, PROGRAM).configure(|config| {
        let denied = json!({"names": ["keyctl", "bpf"], "action": "SCMP_ACT_ERRNO"});
        config["linux"]["seccomp"] =
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [denied]});
    });
    let rows: &[Row] = &[
        (
            "everything",
            |images| filters(images, |program| *program = ALLOW.to_vec()),
            &["core-1.img: task 1: a seccomp filter that lets through keyctl, bpf, ", WANTED],
        ),
        ("one number, by each convention", |images| if_word(images, 0, 250), &[BOTH, WANTED]),
        (
            "the calls of another convention",
            |images| if_word(images, 4, 0x4000_0003),
            &["restart_syscall (SCMP_ARCH_X86), ", WANTED],
        ),
        (
            "a call, by an argument",
            |images| {
                if_word(images, 16, 7);
                if_word(images, 24, 7);
            },
            &["that lets through keyctl, bpf, ", WANTED],
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}

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

/// The limits of an IPC namespace, and what is in it.
#[test]
fn ipc() {
    fn limits(images: &Images, change: impl FnOnce(&mut IpcVarEntry)) {
        let id = images.root_ids().ipc_ns_id.unwrap().into();
        let mut entry: IpcVarEntry = images.dir.read_one(kind::IPC_VAR, id).unwrap();
        change(&mut entry);
        images.dir.write_one(kind::IPC_VAR, id, &entry).unwrap();
    }
    fn queue(images: &Images, change: impl FnOnce(&mut MqueueEntry)) {
        limits(images, |entry| {
            let mut queue = MqueueEntry {
                name: b"queue".to_vec(),
                mode: 0o600,
                max_messages: 10,
                message_size: 8192,
                ..MqueueEntry::default()
            };
            change(&mut queue);
            entry.torpor_mqueues.push(queue);
        });
    }
    fn desc() -> IpcDescEntry {
        IpcDescEntry { key: 7, mode: 0o600, id: 0, ..IpcDescEntry::default() }
    }
    fn messages(images: &Images, change: impl FnOnce(&mut IpcMsgEntry)) {
        let id = images.root_ids().ipc_ns_id.unwrap().into();
        let mut queue = IpcMsgEntry { desc: desc(), qbytes: 16384, qnum: 0 };
        change(&mut queue);
        images.dir.write_all(kind::IPCNS_MSG, id, [&queue]).unwrap();
    }
    fn segments(images: &Images, all: &[(u64, u32, Option<u32>)]) {
        let id = images.root_ids().ipc_ns_id.unwrap().into();
        let segments = all.iter().zip(0..).map(|(&(size, mode, hugetlb_flag), id)| IpcShmEntry {
            desc: IpcDescEntry { id, key: id, mode, ..desc() },
            size,
            in_pagemaps: Some(true),
            hugetlb_flag,
        });
        let segments: Vec<_> = segments.collect();
        images.dir.write_all(kind::IPCNS_SHM, id, &segments).unwrap();
    }
    const BY: &str = "(foreign.ipc.sysctls)";
    const BEYOND: &str = "(foreign.limits.raise)";
    const LOCKED: &[&str] = &["ipcns-shm-", "locked memory of ", BEYOND];
    refuses_by(
        "images-ipc",
        "foreign.users.allow = ['0']\nforeign.groups.allow = ['0']",
        &[
            (
                "larger segments",
                |images| limits(images, |entry| entry.shm_ctlmax += 1),
                &["ipcns-var-", "sysctl kernel.shmmax = ", BY],
            ),
            (
                "fewer segments",
                |images| limits(images, |entry| entry.shm_ctlmni = 1),
                &["sysctl kernel.shmmni = \"1\"", BY],
            ),
            (
                "more semaphores",
                |images| limits(images, |entry| entry.sem_ctls[1] += 1),
                &["sysctl kernel.sem = ", BY],
            ),
            (
                "longer messages",
                |images| limits(images, |entry| entry.msg_ctlmax = 1 << 20),
                &["sysctl kernel.msgmax = \"1048576\"", BY],
            ),
            (
                "more POSIX queues",
                |images| limits(images, |entry| entry.mq_queues_max = 4096),
                &["sysctl fs.mqueue.queues_max = \"4096\"", BY],
            ),
            (
                "a default that new queues have",
                |images| limits(images, |entry| entry.mq_msgsize_default = Some(4096)),
                &["sysctl fs.mqueue.msgsize_default = \"4096\"", BY],
            ),
            (
                "segments that go with their last user",
                |images| limits(images, |entry| entry.shm_rmid_forced = 1),
                &["sysctl kernel.shm_rmid_forced = \"1\"", BY],
            ),
            (
                "a POSIX queue of more messages than anybody may have",
                |images| queue(images, |queue| queue.max_messages = 11),
                &["ipcns-var-", "mq_maxmsg of 11", BEYOND],
            ),
            (
                "a POSIX queue of longer messages",
                |images| queue(images, |queue| queue.message_size = 8193),
                &["mq_msgsize of 8193", BEYOND],
            ),
            (
                "a POSIX queue of somebody else",
                |images| queue(images, |queue| queue.uid = 4711),
                &["ipcns-var-", "user id 4711", "(foreign.users.allow)"],
            ),
            (
                "a queue that takes more than anybody may let it",
                |images| messages(images, |queue| queue.qbytes = 16385),
                &["ipcns-msg-", "msg_qbytes of 16385", BEYOND],
            ),
            (
                "a queue that somebody else has made",
                |images| messages(images, |queue| queue.desc.cuid = 4711),
                &["ipcns-msg-", "user id 4711", "(foreign.users.allow)"],
            ),
            (
                "a queue of another group",
                |images| messages(images, |queue| queue.desc.gid = 4711),
                &["ipcns-msg-", "group id 4711", "(foreign.groups.allow)"],
            ),
            (
                "a segment that stays in memory",
                |images| segments(images, &[(1 << 40, 0o2600, None)]),
                LOCKED,
            ),
            (
                "two that stay in memory together",
                |images| segments(images, &[(5 << 20, 0o2600, None), (5 << 20, 0o2600, None)]),
                LOCKED,
            ),
            (
                "a segment of huge pages",
                |images| segments(images, &[(1 << 40, 0o600, Some(0o4000 | 21 << 26))]),
                LOCKED,
            ),
        ],
    );
}

/// What is not limited by a configuration alone.
#[test]
fn limits() {
    fn faults(images: &Images, features: u64, user_mode_only: bool) {
        images.open(FdTypes::Ext, |entry| {
            let (id, pid) = (entry.id, 1);
            let faults =
                TorporUserfaultfdEntry { id, pid, features, user_mode_only, ..Default::default() };
            entry.torpor_userfaultfd = Some(faults);
        });
    }
    const USE: &str = "(foreign.capabilities.use)";
    refuses(
        "images-limits",
        &[
            (
                "a higher limit",
                |images| {
                    images.core(1, |core| {
                        let limits = core.tc.as_mut().unwrap().rlimits.as_mut().unwrap();
                        limits.rlimits[7].max = u64::MAX;
                    });
                },
                &["core-1.img: task 1: RLIMIT_NOFILE", "(foreign.limits.raise)"],
            ),
            (
                "real time",
                |images| {
                    images.core(1, |core| {
                        let thread = core.thread_core.as_mut().unwrap();
                        (thread.sched_policy, thread.sched_prio) = (Some(1), Some(99));
                    });
                },
                &["core-1.img: task 1: scheduling: policy 1", "(foreign.scheduling.allow)"],
            ),
            (
                "disks before others, in a number that has more bits",
                |images| {
                    images.core(1, |core| {
                        let thread = core.thread_core.as_mut().unwrap();
                        thread.torpor_ioprio = Some(1 << 16 | 1 << 13);
                    });
                },
                &["scheduling: priority 0x12000 for I/O", "(foreign.scheduling.allow)"],
            ),
            (
                "more locked memory than anybody may have",
                |images| {
                    images.memory(|mm| {
                        let mut vma = mm.vmas[0];
                        (vma.flags, vma.start, vma.end) = (0x2022, 1 << 32, 5 << 32);
                        mm.vmas.push(vma);
                        mm.vmas.sort_by_key(|vma| vma.start);
                    });
                },
                &["mm-1.img: task 1: locked memory of 17179869184", "(foreign.limits.raise)"],
            ),
            (
                "the same in parts",
                |images| {
                    images.memory(|mm| {
                        for place in 1..4 {
                            let mut vma = mm.vmas[0];
                            (vma.flags, vma.start) = (0x2022, place << 32);
                            vma.end = vma.start + (3 << 20);
                            mm.vmas.push(vma);
                        }
                        mm.vmas.sort_by_key(|vma| vma.start);
                    });
                },
                &["locked memory of 9437184", "(foreign.limits.raise)"],
            ),
            (
                "a timer that wakes the host",
                |images| {
                    images.core(1, |core| {
                        let timer = PosixTimerEntry { clock_id: 8, ..Default::default() };
                        let timers = core.tc.as_mut().unwrap().timers.get_or_insert_default();
                        timers.posix.push(timer);
                    });
                },
                &["core-1.img: task 1: a timer that wakes this host, which takes", USE],
            ),
            (
                "one that has a descriptor",
                |images| {
                    images.open(FdTypes::Timerfd, |entry| {
                        let (id, clockid) = (entry.id, 9);
                        entry.tfd = Some(TimerfdEntry { id, clockid, ..Default::default() });
                    });
                },
                &["a timer that wakes this host (file 900001), which takes CAP_WAKE_ALARM", USE],
            ),
            (
                "faults of the kernel",
                |images| faults(images, 1, false),
                &["a userfaultfd for faults of the kernel (file 900001)", "CAP_SYS_PTRACE", USE],
            ),
            (
                "forks",
                |images| faults(images, 3, true),
                &["a userfaultfd that is told of forks (file 900001)", USE],
            ),
            (
                "pinned buffers",
                |images| {
                    images.open(FdTypes::Ext, |entry| {
                        let buffer = TorporIoUringBuffer { address: 1 << 32, length: 1 << 34 };
                        let (id, buffers) = (entry.id, vec![buffer; 2]);
                        let ring = TorporIoUringEntry { id, buffers, ..Default::default() };
                        entry.torpor_io_uring = Some(ring);
                    });
                },
                &["files.img: locked memory of 34359738368", "(foreign.limits.raise)"],
            ),
            (
                "a larger pipe than anybody may have",
                |images| {
                    let (pipe_id, size) = (900_001, Some(1 << 30));
                    images.open(FdTypes::Pipe, |entry| {
                        let id = entry.id;
                        entry.pipe = Some(PipeEntry { id, pipe_id, ..Default::default() });
                    });
                    let pipe = PipeDataEntry { pipe_id, size, ..Default::default() };
                    images.dir.write_all(kind::PIPES_DATA, 0, [&pipe]).unwrap();
                },
                &["pipes-data.img: the size of a pipe of 1073741824", "(foreign.limits.raise)"],
            ),
            (
                "settings of a terminal that are locked",
                |images| {
                    let termios_locked = Some(TermiosEntry { c_lflag: 8, ..Default::default() });
                    let ty = TtyType::Pty.into();
                    let info =
                        TtyInfoEntry { id: 7, r#type: ty, termios_locked, ..Default::default() };
                    images.dir.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
                    images.open(FdTypes::Tty, |entry| {
                        let (id, tty_info_id) = (entry.id, info.id);
                        entry.tty = Some(TtyFileEntry { id, tty_info_id, ..Default::default() });
                    });
                },
                &["settings that are locked (terminal 7), which takes CAP_SYS_ADMIN", USE],
            ),
            (
                "a network device by its descriptor",
                |images| {
                    images.open(FdTypes::Tunf, |entry| {
                        let (id, ns_id) = (entry.id, images.root_ids().net_ns_id);
                        let netdev = Some("tun7".to_owned());
                        let reg = RegFileEntry { id, name: b"/tun".to_vec(), ..Default::default() };
                        let torpor_reg = Some(reg);
                        let tun = TunfileEntry { id, netdev, ns_id, torpor_reg, detached: None };
                        entry.tunf = Some(tun);
                    });
                },
                &["files.img: network device \"tun7\" (tun)", "(foreign.network.links)"],
            ),
            (
                "a higher priority",
                |images| {
                    images.core(1, |core| {
                        core.thread_core.as_mut().unwrap().sched_nice = Some(-20);
                    });
                },
                &["scheduling: nice -20", "(foreign.scheduling.allow)"],
            ),
            (
                "not to be killed",
                |images| {
                    images.core(1, |core| core.tc.as_mut().unwrap().oom_score_adj = Some(-1000))
                },
                &["oom_score_adj of -1000", "(foreign.limits.raise)"],
            ),
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

/// Whose a file is only shows once it is open.
#[test]
fn leases() {
    const OTHERS: i32 = 8;
    const OWN: i32 = 9;
    fn lease(images: &Images, pid: u32, r#type: u32, fd: i32) {
        let pid = pid.cast_signed();
        let lock = FileLockEntry { flag: 8, r#type, pid, fd, start: 0, len: 0 };
        images.dir.write_all(kind::FILE_LOCKS, 0, [&lock]).unwrap();
    }
    const WANTED: &[&str] = &[
        "filelocks.img: task 1: a lease on descriptor 8, a file of user 4711, which takes CAP_LEASE",
        "it is not given (foreign.capabilities.use)",
    ];
    let scratch = Scratch::new("images-leases");
    let program = format!("exec 8</others 9</own; {PROGRAM}");
    let bundle = bundle_of(&scratch, &program);
    bundle.write("others", "");
    bundle.write("own", "");
    std::os::unix::fs::chown(bundle.file("others"), Some(4711), Some(0)).unwrap();
    refuses_of(
        &scratch,
        &bundle,
        // One of them becomes another user.
        "foreign.users.allow = 'all'",
        &[
            ("to read", |images| lease(images, 1, 0, OTHERS), WANTED),
            ("to write", |images| lease(images, 1, 1, OTHERS), WANTED),
            ("one that is being broken", |images| lease(images, 1, 2 | 4, OTHERS), WANTED),
            (
                "by the number that older images have",
                |images| {
                    lease(images, 1, 0, OTHERS);
                    let mut locks: Vec<FileLockEntry> =
                        images.dir.read_all(kind::FILE_LOCKS, 0).unwrap();
                    locks[0].flag = 32;
                    images.dir.write_all(kind::FILE_LOCKS, 0, &locks).unwrap();
                },
                WANTED,
            ),
            (
                "of a child",
                |images| lease(images, *images.tasks().last().unwrap(), 0, OTHERS),
                &["a lease on descriptor 8, a file of user 4711", "(foreign.capabilities.use)"],
            ),
            (
                "by a task that was the owner",
                |images| {
                    lease(images, 1, 0, OWN);
                    for task in images.tasks() {
                        images.core(task, |core| {
                            let creds = &mut core.thread_core.as_mut().unwrap().creds;
                            let creds = creds.as_mut().unwrap();
                            (creds.uid, creds.euid) = (4711, 4711);
                            (creds.suid, creds.fsuid) = (4711, 4711);
                        });
                    }
                },
                &["a lease on descriptor 9, a file of user 0", "(foreign.capabilities.use)"],
            ),
        ],
        |images| lease(images, 1, 0, OWN),
    );
}
