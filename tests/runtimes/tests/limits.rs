//! Images that ask for what only a privileged program can set: limits, and objects that count for somebody.
//! Each is refused by name, as in [`crate::images`].

use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, FdinfoEntry, FileLockEntry, FsEntry, IpcDescEntry, IpcMsgEntry, IpcShmEntry,
    IpcVarEntry, MqueueEntry, PipeDataEntry, PipeEntry, PosixTimerEntry, RegFileEntry,
    TermiosEntry, TimerfdEntry, TorporIoUringBuffer, TorporIoUringEntry, TorporUserfaultfdEntry,
    TtyFileEntry, TtyInfoEntry, TtyType, TunfileEntry,
};

use torpor_runtimes_tests::scratch::Scratch;

use crate::images::{Images, PROGRAM, bundle_of, refuses, refuses_by, refuses_of};

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
                "pinned buffers of several instances",
                |images| {
                    let ring = |id| {
                        let buffer = TorporIoUringBuffer { address: 1 << 32, length: 1 << 34 };
                        TorporIoUringEntry { id, buffers: vec![buffer], ..Default::default() }
                    };
                    images.open(FdTypes::Ext, |entry| {
                        entry.torpor_io_uring = Some(ring(entry.id));
                    });
                    images.files(|files| {
                        let (mut other, id) = (files.last().unwrap().clone(), 900_002);
                        (other.id, other.torpor_io_uring) = (id, Some(ring(id)));
                        files.push(other);
                    });
                    let table = images.root_ids().files_id.into();
                    let mut fds: Vec<FdinfoEntry> =
                        images.dir.read_all(kind::FDINFO, table).unwrap();
                    let (mut other, id) = (fds.last().unwrap().clone(), 900_002);
                    (other.id, other.fd) = (id, 100);
                    fds.push(other);
                    images.dir.write_all(kind::FDINFO, table, &fds).unwrap();
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
                // Whatever the policy says: the images have no such device.
                &["files.img: file ", " is of \"tun7\", no tun device of the images"],
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
                "a root directory of its own",
                |images| {
                    let (mut entry, id) = (images.file("/dev/null"), 900_001);
                    entry.id = id;
                    let reg = entry.reg.as_mut().unwrap();
                    (reg.id, reg.name, reg.size, reg.mode) = (id, b"/vol".to_vec(), None, None);
                    images.files(|files| files.push(entry));
                    let mut fs: FsEntry = images.dir.read_one(kind::FS, 1).unwrap();
                    fs.root_id = id;
                    images.dir.write_one(kind::FS, 1, &fs).unwrap();
                },
                &["fs-1.img: task 1: the root directory \"/vol\", which takes CAP_SYS_CHROOT", USE],
            ),
            (
                "capabilities that stay when a program becomes another user",
                |images| {
                    images.core(1, |core| {
                        let thread = core.thread_core.as_mut().unwrap();
                        thread.creds.as_mut().unwrap().secbits = 1 << 2;
                    });
                },
                &["core-1.img: task 1: the security bits 0x4, which takes CAP_SETPCAP", USE],
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
