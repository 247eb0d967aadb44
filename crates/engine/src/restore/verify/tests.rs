//! Trees that are made otherwise than planned: what differs is named, and nothing is left.

#![allow(clippy::unwrap_used)]

use std::cmp::Ordering;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::DupFlags;
use torpor_images::kind;
use torpor_images::proto::{FileEntry, SkOption, SkOptsEntry};
use torpor_policy::seccomp::Filter;
use torpor_policy::{Capabilities, ClockTimes, IdExtent, Policy, Rules, Sets, UserMaps};
use torpor_sys::kcmp::{Object as Kcmp, kcmp};
use torpor_sys::socket::{self, Instruction};
use torpor_tests::wait::wait_for;
use torpor_tracee::syscall::{self, RemoteFd};

use super::*;
use crate::dump::Session;
use crate::hooks::{Event, Hooks, NoHooks};
use crate::namespace::Namespace;
use crate::options::{CgroupMode, Cgroups, Given, InheritFd, Trust};
use crate::restore::Restore;
use crate::restore::stages::{Complete, Plan};
use crate::task::restore_filters;

/// What the error says, and a way to make a tree otherwise.
type Way = (&'static str, fn(&mut Restore<'_>));

/// Has a file open to read, and a socket, and sleeps.
const SUBJECT: &str = r#"use Socket; $| = 1;
    open F, "<", $ARGV[0] or die;
    socket S, AF_INET, SOCK_DGRAM, 0 or die;
    print "ready\n";
    open STDOUT, ">", "/dev/null" or die;
    sleep 1000;"#;
/// The same, with a child that shares its descriptors (`clone` with `CLONE_FILES`).
const SHARING: &str = r#"$| = 1;
    open F, "<", $ARGV[0] or die;
    print "ready\n";
    open STDOUT, ">", "/dev/null" or die;
    syscall(56, 0x400 | 17, 0, 0, 0, 0);
    sleep 1000;"#;
/// Unix sockets: two connected pairs, one of datagrams, one that is alone, one with a name, and one that
/// waits for a listener to accept it.
const PAIRS: &str = r#"use Socket; use POSIX (); $| = 1;
    POSIX::close($_) for 3 .. 99; # what was inherited
    socketpair A, B, AF_UNIX, SOCK_STREAM, 0 or die;
    socketpair C, D, AF_UNIX, SOCK_STREAM, 0 or die;
    socketpair E, G, AF_UNIX, SOCK_DGRAM, 0 or die;
    socket H, AF_UNIX, SOCK_DGRAM, 0 or die;
    socket J, AF_UNIX, SOCK_DGRAM, 0 or die;
    bind J, pack("Sa*", AF_UNIX, "\0name") or die;
    socket L, AF_UNIX, SOCK_STREAM, 0 or die;
    bind L, pack("Sa*", AF_UNIX, "\0listener") or die;
    listen L, 5 or die;
    socket K, AF_UNIX, SOCK_STREAM, 0 or die;
    connect K, pack("Sa*", AF_UNIX, "\0listener") or die;
    print "ready\n";
    open STDOUT, ">", "/dev/null" or die;
    sleep 1000;"#;
/// The descriptors of the file and of the socket, and a free one.
const FILE: i32 = 3;
const SOCKET: i32 = 4;
const FREE: i32 = 9;

/// A checkpoint of one task in namespaces of its own.
struct Asleep {
    dir: tempfile::TempDir,
    /// What the restore is given.
    given: Given,
}

impl Asleep {
    /// `namespaces` are flags of unshare(1).
    fn new(namespaces: &[&str]) -> Self {
        Asleep::prepared(namespaces, |_| {})
    }

    /// The same, with something done to the task before.
    fn prepared(namespaces: &[&str], prepare: impl Fn(i32)) -> Self {
        Asleep::running(SUBJECT, namespaces, prepare)
    }

    fn running(program: &str, namespaces: &[&str], prepare: impl Fn(i32)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "content").unwrap();
        let mut child = Command::new("unshare")
            .args(namespaces)
            .args(["--fork", "--kill-child", "perl", "-e", program])
            .arg(&file)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let asleep = Asleep { dir, given: Given::default() };
        std::fs::create_dir(asleep.dir.path().join("images")).unwrap();
        let pid = crate::proc::children_of(child.id().cast_signed())[0];
        // It is ready, and a moment later has done with its output.
        let output = || std::fs::read_link(format!("/proc/{pid}/fd/1")).unwrap();
        let is_done = || Ok((output() == Path::new("/dev/null")).then_some(()));
        wait_for("its output to be closed", Duration::from_secs(60), is_done).unwrap();
        prepare(pid);
        asleep.dump(&mut child, pid);
        asleep
    }

    fn dump(&self, child: &mut Child, pid: i32) {
        let opts = Options { pid, ..self.options() };
        let mut session = Session::unguarded(&opts).unwrap();
        let frozen = session.freeze(&opts, &mut NoHooks).unwrap();
        frozen.write(&mut NoHooks).unwrap().kill(&mut NoHooks).unwrap();
        child.wait().unwrap();
    }

    fn options(&self) -> Options {
        let free = Policy { foreign: Rules::default(), ..Policy::default() };
        Options {
            images_dir: self.dir.path().join("images"),
            given: self.given.clone(),
            shell_job: true,
            cgroups: Cgroups { manage: CgroupMode::Soft, ..Cgroups::default() },
            // What is judged is another matter.
            trust: Trust { policy: Arc::new(free), ..Trust::default() },
            ..Options::default()
        }
    }

    /// Makes the tree, changes it or what it was to be, and has it verified.
    fn made_otherwise(&self, change: impl FnOnce(&mut Restore<'_>)) -> Result<()> {
        self.made_with(&mut NoHooks, change)
    }

    /// The same for a caller that does something, too.
    fn made_with(
        &self,
        caller: &mut dyn Hooks,
        change: impl FnOnce(&mut Restore<'_>),
    ) -> Result<()> {
        let opts = self.options();
        let plan = Plan::read(&opts).unwrap();
        let mut complete: Complete<'_> = plan.build(caller).unwrap().finish(caller).unwrap();
        change(complete.made());
        let pid = complete.made().tasks[0].pid;
        let verified = complete.verify(caller).map(drop);
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "task {pid} is left");
        verified
    }

    /// Makes it otherwise in all of these ways; as it was planned it is right.
    fn refused(&self, ways: &[Way]) {
        self.made_otherwise(|_| {}).unwrap();
        for (wanted, change) in ways {
            let error = self.made_otherwise(change).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{wanted:?} is missing: {error}");
        }
        self.made_otherwise(|_| {}).unwrap();
    }
}

/// A system call of the first task.
fn call(cx: &mut Restore<'_>, call: impl Into<torpor_tracee::syscall::Syscall>) {
    cx.tasks[0].remote().unwrap().call("what was not planned", call).unwrap();
}

fn unshare(cx: &mut Restore<'_>, flags: i32) {
    call(cx, (libc::SYS_unshare, [u64::from(flags.cast_unsigned())]));
}

/// Opens a path in the first task, at a number.
fn open_at(cx: &mut Restore<'_>, path: &str, flags: i32, number: i32) {
    let husk = cx.tasks[0].remote().unwrap();
    let mut batch = husk.batch();
    let path = batch.cstr(path).0;
    let flags = u64::from(flags.cast_unsigned());
    let at = u64::from(libc::AT_FDCWD.cast_unsigned());
    let open = batch.call((libc::SYS_openat, [at, path, flags]));
    let fd = batch.run().unwrap().expect(open, || "open".to_owned()).unwrap();
    let (from, to) = (RemoteFd(fd), number.cast_unsigned());
    if from != to.into() {
        call(cx, syscall::dup3(from, to, DupFlags::empty()));
        call(cx, syscall::close(from));
    }
}

/// Has the first task make a call with a path.
fn at_path(cx: &mut Restore<'_>, call: i64, path: &str) {
    let mut batch = cx.tasks[0].remote().unwrap().batch();
    let path = batch.cstr(path).0;
    batch.must((call, [path]));
    assert!(batch.run().unwrap().first_error().is_none());
}

/// A group for these tests in each hierarchy that asks for nothing before a task may enter: that of the second version
/// of cgroups, or one of the first.
fn groups() -> Vec<PathBuf> {
    let all = torpor_kernel::cgroup::hierarchies().into_iter();
    let fit = all.filter(|path| path.join("cgroup.controllers").exists() || path.ends_with("pids"));
    fit.map(|path| path.join(format!("torpor-verify-{}", std::process::id()))).collect()
}

fn enter(group: &Path, pid: i32) {
    std::fs::write(group.join("cgroup.procs"), pid.to_string()).unwrap();
}

fn seccomp_of<'c>(cx: &'c mut Restore<'_>) -> &'c mut Seccomp {
    &mut cx.tasks[0].image.seccomp[0]
}

/// Seccomp filters that allow everything: one instruction, which returns `SECCOMP_RET_ALLOW`.
fn allowing(count: usize) -> Vec<Arc<Filter>> {
    let program = vec![0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];
    std::iter::repeat_n(Arc::new(Filter { program, flags: 0 }), count).collect()
}

fn credentials_of<'c>(cx: &'c mut Restore<'_>) -> &'c mut Credentials {
    cx.tasks[0].image.credentials[0].as_mut().unwrap()
}

/// Has the first task add `CAP_CHOWN` (0) to what its programs may inherit.
fn inherit_chown(cx: &mut Restore<'_>) {
    const VERSION: u32 = 0x2008_0522; // `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h
    let Sets { permitted, effective, .. } = credentials_of(cx).capabilities;
    let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap();
    let halves = |set: Capabilities| [half(set.0), half(set.0 >> 32)];
    let [permitted, effective] = [permitted, effective].map(halves);
    let data = [effective[0], permitted[0], 1, effective[1], permitted[1], 0];
    let bytes =
        |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let mut batch = cx.tasks[0].remote().unwrap().batch();
    let (head, data) = (batch.bytes(&bytes(&[VERSION, 0])).0, batch.bytes(&bytes(&data)).0);
    batch.must((libc::SYS_capset, [head, data]));
    assert!(batch.run().unwrap().first_error().is_none());
}

/// The number of an open file of the first task.
fn id_of(cx: &Restore<'_>, fd: i32) -> u32 {
    let fds = &cx.tasks[0].image.fds;
    fds.iter().find(|descriptor| descriptor.fd == fd.cast_unsigned()).unwrap().file
}

/// What the images say of it.
fn entry(cx: &Restore<'_>, fd: i32) -> FileEntry {
    let files: Vec<FileEntry> = cx.images.read_all(kind::FILES, 0).unwrap();
    files.into_iter().find(|file| file.id == id_of(cx, fd)).unwrap()
}

/// Has them say something else.
fn change(cx: &mut Restore<'_>, fd: i32, change: impl FnOnce(&mut FileEntry)) {
    let mut entry = entry(cx, fd);
    change(&mut entry);
    cx.described.insert(entry.id, OpenFile::read(&entry).unwrap());
}

#[test]
fn what_is_made_otherwise_is_named() {
    Asleep::new(&["-pniuC"]).refused(&[
        ("the uts namespace is", |cx| unshare(cx, libc::CLONE_NEWUTS)),
        ("the ipc namespace is", |cx| unshare(cx, libc::CLONE_NEWIPC)),
        ("the net namespace is", |cx| unshare(cx, libc::CLONE_NEWNET)),
        ("the cgroup namespace is", |cx| unshare(cx, libc::CLONE_NEWCGROUP)),
        ("the mnt namespace is", |cx| unshare(cx, libc::CLONE_NEWNS)),
        ("the user namespace is", |cx| unshare(cx, libc::CLONE_NEWUSER)),
        ("descriptor 3 is closed and was to be open", |cx| {
            call(cx, syscall::close(RemoteFd::from(FILE.cast_unsigned())));
        }),
        ("descriptor 3 is closed and was to be /", |cx| {
            // As many as before.
            call(cx, syscall::close(RemoteFd::from(FILE.cast_unsigned())));
            open_at(cx, "/dev/zero", libc::O_RDONLY, FREE);
        }),
        ("descriptor 9 is /dev/zero and was to be closed", |cx| {
            open_at(cx, "/dev/zero", libc::O_RDONLY, FREE);
        }),
        ("descriptor 0 is /dev/zero and was to be /dev/null", |cx| {
            open_at(cx, "/dev/zero", libc::O_RDONLY, 0);
        }),
        // The same device, opened once more and to be written to.
        ("descriptor 0 is /dev/null and was to be /dev/null", |cx| {
            open_at(cx, "/dev/null", libc::O_RDWR, 0);
        }),
        ("descriptor 4 is socket:[", |cx| {
            let socket = [libc::AF_INET, libc::SOCK_DGRAM, 0].map(|n| u64::from(n.cast_unsigned()));
            let other = cx.tasks[0].remote().unwrap().call("socket", (libc::SYS_socket, socket));
            let (from, to) = (RemoteFd(other.unwrap()), SOCKET.cast_unsigned());
            call(cx, syscall::dup3(from, to, DupFlags::empty()));
            call(cx, syscall::close(from));
        }),
        ("its working directory is inode", |cx| at_path(cx, libc::SYS_chdir, "/proc")),
        ("its root directory is inode", |cx| at_path(cx, libc::SYS_chroot, "/proc")),
        ("its program is inode", |cx| {
            let places = cx.tasks[0].places.as_mut().unwrap();
            places[2] = places[0];
        }),
        ("NoNewPrivs is 0 and was to be 1", |cx| {
            credentials_of(cx).no_new_privileges = Some(true);
        }),
        ("Uid is [0, 0, 0, 0]", |cx| credentials_of(cx).users = [1000; 4]),
        ("Gid is [0, 0, 0, 0]", |cx| credentials_of(cx).groups = [1000; 4]),
        ("the number of a thread is 1 and was to be 4711", |cx| {
            cx.tasks[0].image.tree.threads[0] = 4711;
        }),
        ("its time is monotonic ", |cx| {
            let other = ClockTimes { space: 0, monotonic: (0, 0), boottime: (0, 0), maker: None };
            cx.ns.clocks.insert(0, Offsets::of(&other).unwrap());
        }),
        ("Groups is", |cx| credentials_of(cx).further.push(4711)),
        ("CapInh is CAP_CHOWN", inherit_chown),
        ("CapAmb is CAP_CHOWN", |cx| {
            inherit_chown(cx);
            credentials_of(cx).capabilities.inheritable = Capabilities(1);
            // Of prctl(2): capability 0.
            let raise = [libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, 0, 0, 0];
            call(cx, (libc::SYS_prctl, raise.map(|n| u64::from(n.cast_unsigned()))));
        }),
        ("CapPrm is", |cx| credentials_of(cx).capabilities.permitted = Capabilities(1)),
        ("CapEff is", |cx| credentials_of(cx).capabilities.effective = Capabilities(1)),
        ("CapBnd is", |cx| credentials_of(cx).capabilities.bounding = Capabilities(1)),
        ("the seccomp mode is 0 and was to be 1", |cx| {
            *seccomp_of(cx) = Seccomp::Strict;
        }),
        ("the seccomp mode is 0 and was to be 2", |cx| {
            *seccomp_of(cx) = Seccomp::Filtered(allowing(1));
        }),
        ("the hard limit RLIMIT_NOFILE is ", |cx| {
            // Its number is that of asm-generic/resource.h.
            cx.tasks[0].image.limits.resources[7].hard = 1;
        }),
        ("oom_score_adj is ", |cx| cx.tasks[0].image.limits.oom_score_adj = Some(1001)),
        ("the access mode of descriptor 3 is 0 and was to be 2", |cx| {
            let flags = libc::O_RDWR.cast_unsigned();
            change(cx, FILE, |entry| entry.reg.as_mut().unwrap().flags = flags);
        }),
        ("the access mode of descriptor 4 is 2 and was to be 0", |cx| {
            change(cx, SOCKET, |entry| entry.isk.as_mut().unwrap().flags = 0);
        }),
        ("its network namespace is inode", socket_of_this_host),
    ]);
}

/// The images have the socket in this host's network namespace.
fn socket_of_this_host(cx: &mut Restore<'_>) {
    let hosts = Namespace {
        kind: NsKind::Net,
        id: 900_001,
        inode: 0,
        is_host: true,
        file: None,
        task: 0,
        pid: 0,
    };
    cx.ns.all.push(hosts);
    change(cx, SOCKET, |entry| entry.isk.as_mut().unwrap().ns_id = Some(900_001));
}

/// A filter of sockets that takes so many bytes of each packet: `BPF_RET | BPF_K` of linux/filter.h.
fn taking(bytes: u32) -> Instruction {
    Instruction { code: 0x06, jt: 0, jf: 0, k: bytes }
}

/// Gives the socket of the subject a filter.
fn attach(cx: &mut Restore<'_>, program: &[Instruction]) {
    let id = id_of(cx, SOCKET);
    socket::attach_filter(cx.files.opened.get(id).unwrap(), program).unwrap();
}

#[test]
fn sockets_with_other_filters_are_named() {
    // As images have `taking(5)`, and `SO_LOCK_FILTER` with its number in asm-generic/socket.h.
    const TAKING_FIVE: u64 = 0x0006_0000_0000_0005;
    const LOCK: SkOption = SkOption { level: 1, name: 44, value: vec![] };
    fn options(cx: &mut Restore<'_>, set: impl FnOnce(&mut SkOptsEntry)) {
        change(cx, SOCKET, |entry| set(&mut entry.isk.as_mut().unwrap().opts));
    }
    let asleep = Asleep::new(&["-pn"]);
    asleep.refused(&[
        ("its filter is one of 1 instructions and was to be none", |cx| attach(cx, &[taking(5)])),
        ("its filter is none and was to be one of 1 instructions", |cx| {
            options(cx, |options| options.so_filter = vec![TAKING_FIVE]);
        }),
        ("its filter is another one of 1 instructions", |cx| {
            options(cx, |options| options.so_filter = vec![TAKING_FIVE]);
            attach(cx, &[taking(6)]);
        }),
        ("its filter can be taken away", |cx| {
            options(cx, |options| options.torpor_options.push(LOCK));
        }),
    ]);
    let as_planned = |cx: &mut Restore<'_>| {
        options(cx, |options| options.so_filter = vec![TAKING_FIVE]);
        attach(cx, &[taking(5)]);
    };
    asleep.made_otherwise(as_planned).unwrap();
}

/// Runs a script in the network namespace of a process.
fn ip(pid: i32, script: &str) {
    let net = format!("--net=/proc/{pid}/ns/net");
    let run = Command::new("nsenter").args([&net, "sh", "-ec", script]).status();
    assert!(run.unwrap().success(), "{script}");
}

/// The same in that of the first task.
fn in_network(cx: &mut Restore<'_>, commands: &str) {
    ip(cx.tasks[0].pid, commands);
}

/// What decides where packets go: the addresses, routes and rules of the devices, of both families.
const ROUTES: &str = "
    ip link set lo up
    ip address add 10.77.0.1/24 dev lo
    ip address add fd00:77::1/64 dev lo
    ip link add eth0 type bridge
    ip link set eth0 up
    ip address add 10.78.0.1/24 dev eth0
    ip address add fd00:78::1/64 dev eth0 nodad
    ip route add 192.0.2.0/24 via 10.77.0.9 dev lo
    ip route add default via 192.0.2.7 onlink dev lo metric 5
    ip route add 198.51.100.0/24 nexthop via 10.78.0.2 dev eth0 nexthop via 10.78.0.3 dev eth0
    ip route add unreachable 203.0.113.0/24
    ip -6 route add fd00:88::/64 via fd00:78::2
    ip -6 route add blackhole fd00:99::/64 table 5
    ip rule add from 10.77.0.2 table 77 priority 100
    ip -6 rule add to fd00:99::/64 table 5 priority 50
";

#[test]
fn other_ways_for_packets_are_named() {
    Asleep::prepared(&["-pn"], |pid| ip(pid, ROUTES)).refused(&[
        ("network device \"lo\": address 10.0.0.1/8 is there instead", |cx| {
            in_network(cx, "ip address add 10.0.0.1/8 dev lo");
        }),
        ("network device \"eth0\": address fd00:79::1/64 is there instead", |cx| {
            in_network(cx, "ip address add fd00:79::1/64 dev eth0 nodad");
        }),
        ("network device \"lo\": address fd00:77::1/64 is missing, nothing", |cx| {
            in_network(cx, "ip address del fd00:77::1/64 dev lo");
        }),
        ("nothing is missing, route 10.99.0.0/16 through 10.78.0.7, table 254 is there", |cx| {
            in_network(cx, "ip route add 10.99.0.0/16 via 10.78.0.7");
        }),
        ("nothing is missing, route fd00:9::/32 through fd00:78::9, table 254 is there", |cx| {
            in_network(cx, "ip -6 route add fd00:9::/32 via fd00:78::9 proto kernel");
        }),
        ("route 192.0.2.0/24 through 10.77.0.9, table 254 is missing, nothing", |cx| {
            in_network(cx, "ip route del 192.0.2.0/24");
        }),
        // To another neighbour of several, over another device, and one that leads nowhere.
        ("route 198.51.100.0/24, table 254 is missing, route 198.51.100.0/24", |cx| {
            let hops = "nexthop via 10.78.0.2 dev eth0 nexthop via 10.78.0.4 dev eth0";
            in_network(cx, &format!("ip route replace 198.51.100.0/24 {hops}"));
        }),
        ("route default through 192.0.2.7, table 254 is missing, route default", |cx| {
            in_network(cx, "ip route replace default via 192.0.2.7 onlink dev eth0 metric 5");
        }),
        ("that leads nowhere is missing, route 203.0.113.0/24, table 254 is there", |cx| {
            in_network(cx, "ip route replace 203.0.113.0/24 dev lo");
        }),
        ("rule of priority 40 to table 5 is there instead", |cx| {
            in_network(cx, "ip rule add from all table 5 priority 40");
        }),
        // The same rule of the other family, and for another address.
        ("nothing is missing, rule of priority 50 to table 5", |cx| {
            in_network(cx, "ip rule add to 10.0.0.0/8 table 5 priority 50");
        }),
        ("rule of priority 100 to table 77 is missing, rule of priority 100", |cx| {
            in_network(cx, "ip rule del priority 100; ip rule add table 77 priority 100");
        }),
    ]);
}

/// A caller that sets the network of the tree up, as those do whose scripts are called.
#[derive(Default)]
struct SetsUp {
    root: i32,
}

impl Hooks for SetsUp {
    fn notify(&mut self, event: Event) -> Result<()> {
        match event {
            Event::SetupNamespaces { pid } => {
                self.root = pid;
                ip(pid, "ip -6 route add blackhole fd00:1::/64; ip rule add table 6 priority 60");
            }
            Event::PostSetupNamespaces => ip(
                self.root,
                "ip route del default; ip address add 10.1.0.1/24 dev eth0
                 ip route add default via 10.1.0.7",
            ),
            _ => {}
        }
        Ok(())
    }
}

/// What the caller sets up, or takes away, is no difference; all else is.
#[test]
fn the_caller_sets_networks_up() {
    let asleep = Asleep::prepared(&["-pn"], |pid| ip(pid, ROUTES));
    asleep.made_with(&mut SetsUp::default(), |_| {}).unwrap();
    let more = |cx: &mut Restore<'_>| in_network(cx, "ip route add 10.99.0.0/16 via 10.1.0.8");
    let error = asleep.made_with(&mut SetsUp::default(), more).unwrap_err().to_string();
    assert!(error.contains("nothing is missing, route 10.99.0.0/16 through 10.1.0.8"), "{error}");
}

/// What the caller gives is where it was named only, and all the rest is compared as ever.
#[test]
fn what_is_given_is_where_it_was_named() {
    let mut asleep = Asleep::new(&["-pn"]);
    let (fd, key) = (std::fs::File::open("/etc/passwd").unwrap(), asleep.dir.path().join("file"));
    let key = key.to_str().unwrap().to_owned();
    asleep.given.inherit_fd = vec![InheritFd { fd: Arc::new(fd.into()), key }];
    asleep.refused(&[
        ("is the one that was handed over as", |cx| {
            change(cx, FILE, |entry| entry.reg.as_mut().unwrap().name = b"/another".to_vec());
        }),
        ("is not the one that was handed over for it", |cx| {
            let name = entry(cx, FILE).reg.unwrap().name;
            change(cx, 0, |entry| entry.reg.as_mut().unwrap().name = name);
        }),
        ("its network namespace is inode", socket_of_this_host),
        ("the net namespace is", |cx| unshare(cx, libc::CLONE_NEWNET)),
    ]);
}

/// Has the first task connect a socket.
fn connect(cx: &mut Restore<'_>, fd: i32, address: &[u8]) {
    let mut batch = cx.tasks[0].remote().unwrap().batch();
    let at = batch.bytes(address).0;
    batch.must((libc::SYS_connect, [u64::from(fd.cast_unsigned()), at, address.len() as u64]));
    assert!(batch.run().unwrap().first_error().is_none());
}

/// Gives one socket of the images the peer of another, and that the peer of the first.
fn exchange_peers(cx: &mut Restore<'_>, a: i32, b: i32) {
    let [of_a, of_b] = [a, b].map(|fd| entry(cx, fd).usk.unwrap().peer);
    let mut set = |fd, peer| change(cx, fd, |entry| entry.usk.as_mut().unwrap().peer = peer);
    set(a, of_b);
    set(b, of_a);
}

#[test]
fn unix_sockets_with_other_peers_are_named() {
    // The ends of two pairs, one of a pair of datagrams, those behind it, and those at the listener.
    const A: i32 = 3;
    const C: i32 = 5;
    const E: i32 = 7;
    const H: i32 = 9;
    const LISTENER: i32 = 11;
    const WAITING: i32 = 12;
    Asleep::running(PAIRS, &["-pn"], |_| {}).refused(&[
        ("and was to be to socket", |cx| exchange_peers(cx, A, C)),
        ("is connected to nobody and was to be to socket", |cx| exchange_peers(cx, WAITING, H)),
        ("is connected to nobody and was to be to socket", |cx| connect(cx, E, &[0; 16])),
        ("and was to be to nobody", |cx| connect(cx, H, b"\x01\0\0name")),
        ("and was to be to socket", |cx| connect(cx, E, b"\x01\0\0name")),
        ("and was to be to nobody", |cx| {
            change(cx, A, |entry| entry.usk.as_mut().unwrap().peer = 0);
        }),
        // It waits at no other one, and nobody else waits there.
        ("and was to be to socket", |cx| {
            let listener = entry(cx, LISTENER).usk.unwrap().ino;
            change(cx, A, |entry| entry.usk.as_mut().unwrap().peer = listener);
        }),
    ]);
}

/// A table that two tasks share is compared once, and only if they do share it.
#[test]
fn a_table_of_its_own_is_compared() {
    let child_of = |pid: i32| {
        while crate::proc::children_of(pid).is_empty() {
            std::thread::yield_now();
        }
    };
    let asleep = Asleep::running(SHARING, &["-p"], child_of);
    let share = |cx: &mut Restore<'_>| {
        let [parent, child] = [&cx.tasks[0], &cx.tasks[1]].map(|task| task.pid);
        kcmp(parent, child, Kcmp::Files).unwrap()
    };
    asleep
        .made_otherwise(|cx| assert_eq!(share(cx), Ordering::Equal, "they share no table"))
        .unwrap();
    asleep.refused(&[
        ("task 2: descriptor 3 is closed and was to be open", |cx| {
            let child = cx.tasks[1].remote().unwrap();
            child.call("unshare", (libc::SYS_unshare, [libc::CLONE_FILES as u64])).unwrap();
            child.call("close", syscall::close(RemoteFd::from(FILE.cast_unsigned()))).unwrap();
        }),
        ("task 1: descriptor 3 is closed and was to be open", |cx| {
            let child = cx.tasks[1].remote().unwrap();
            child.call("close", syscall::close(RemoteFd::from(FILE.cast_unsigned()))).unwrap();
        }),
    ]);
}

/// The kernel tells how many filters a thread has, and which.
#[test]
fn a_filter_that_is_missing_is_named() {
    fn install(cx: &mut Restore<'_>, filters: Vec<Arc<Filter>>) {
        restore_filters(&mut cx.tasks[0].threads, &[Seccomp::Filtered(filters)]).unwrap();
    }
    Asleep::new(&["-p"]).refused(&[
        ("the number of seccomp filters is 1 and was to be 2", |cx| {
            *seccomp_of(cx) = Seccomp::Filtered(allowing(2));
            install(cx, allowing(1));
        }),
        ("seccomp filter 0 is another and was to be that of its image", |cx| {
            let mut filters = allowing(2);
            *seccomp_of(cx) = Seccomp::Filtered(filters.clone());
            // It allows everything, too, with another number behind that.
            Arc::make_mut(&mut filters[0]).program[4] = 1;
            install(cx, filters);
        }),
    ]);
}

/// Has the first task live in a user namespace that the plan knows nothing of but that it is one. A tree that has one cannot be
/// dumped here: to look for its limits takes a process of one thread.
fn enter_users(cx: &mut Restore<'_>) {
    unshare(cx, libc::CLONE_NEWUSER);
    let mut all = cx.ns.all.iter_mut();
    all.find(|ns| ns.kind == NsKind::User).unwrap().is_host = false;
}

#[test]
fn ids_of_this_host_that_are_not_planned_are_named() {
    Asleep::new(&["-pn"]).refused(&[
        ("the id map is users 0:0:1, groups 0:0:1 and was to be users 0:4711:1", |cx| {
            enter_users(cx);
            for name in ["uid_map", "gid_map"] {
                let map = format!("/proc/{}/{name}", cx.tasks[0].pid);
                std::fs::write(map, "0 0 1").unwrap();
            }
            let map = |lower| vec![IdExtent::new(0, lower, 1).unwrap()];
            cx.id_maps = IdMaps::new(UserMaps { users: map(4711), groups: map(0) });
        }),
        ("the id map is users, groups and was to be", enter_users),
    ]);
}

/// A group and one in it, which go when the tasks have.
struct Groups(PathBuf);

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(self.0.join("inner"));
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn another_group_is_named() {
    let inner = |outer: &PathBuf| outer.join("inner");
    let all: Vec<_> = groups().into_iter().map(Groups).collect();
    assert!(!all.is_empty(), "there is no hierarchy of cgroups");
    all.iter().for_each(|Groups(outer)| std::fs::create_dir_all(inner(outer)).unwrap());
    let asleep = Asleep::prepared(&["-p"], |pid| {
        groups().iter().for_each(|outer| enter(&inner(outer), pid));
    });
    const WANTED: &str = "it is not in cgroup /torpor-verify-";
    asleep.refused(&[
        (WANTED, |cx| enter(groups().first().unwrap(), cx.tasks[0].pid)),
        (WANTED, |cx| enter(groups().last().unwrap(), cx.tasks[0].pid)),
    ]);
    drop(all);
    assert!(!groups().iter().any(|group| group.exists()), "a group is left");
}
