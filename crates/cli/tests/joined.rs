//! A tree that comes back in namespaces that are there already (`--join-ns`). In that of its network its connections
//! go on, and the lock of the dump, which is in that namespace, is gone.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

mod sleeper;

use sleeper::{Sleeper, criu, wait_until, write_script};

/// Both ends of connections in one process, one of IPv4 and one of IPv6, which send to each other and count.
const PROGRAM: &str = r#"
import socket, sys, time
pairs = []
for address, family in [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]:
    listener = socket.create_server((address, 7777), family=family)
    ours = socket.create_connection((address, 7777))
    pairs.append((ours, listener.accept()[0], listener))
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        for ours, theirs, _ in pairs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
        print("counted", file=file)
        time.sleep(0.02)
"#;

/// Two connections that another program has made and half closed; it counts as long as both say so.
const HALF: &str = r#"
import socket, sys, time
listeners = [socket.create_server((address, 7777), family=family)
    for address, family in [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]]
accepted = [listener.accept()[0] for listener in listeners]
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        for connection in accepted:
            assert connection.recv(1) == b""
        print("counted", file=file)
        time.sleep(0.02)
"#;

/// The other program.
const CLIENT: &str = r#"
import socket, time
made = []
for address in ["127.0.0.1", "::1"]:
    while True:
        try:
            made.append(socket.create_connection((address, 7777)))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    made[-1].shutdown(socket.SHUT_WR)
time.sleep(1000)
"#;

/// A network namespace with a name of its own, in a directory of its own.
struct Network {
    dir: tempfile::TempDir,
}

impl Network {
    fn new() -> Self {
        let network = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(network.file(), "").unwrap();
        let mut make = Command::new("unshare");
        make.arg(format!("--net={}", network.file().display()));
        succeeds(make.args(["ip", "link", "set", "lo", "up"]));
        network
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("network")
    }

    /// A command that is started inside.
    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.file().display())).arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// A program that is started inside, in a session of its own.
    fn python(&self, source: &str, args: &[&Path]) -> Started {
        let mut program = self.inside("setsid");
        program.args(["python3", "-c", source]).args(args);
        Started(program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.file()).status();
    }
}

/// A program that has to end with the test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that was restored, which has to end with the test as well.
struct Restored(i32);

impl Drop for Restored {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", &self.0.to_string()]).status();
        wait_until(|| !Path::new(&format!("/proc/{}", self.0)).exists());
    }
}

fn succeeds(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).unwrap_or_default().lines().count()
}

fn goes_on(file: &Path) {
    let before = lines(file);
    wait_until(|| lines(file) > before + 3);
}

/// Firewalls that let through what they have seen begin, and nothing else: none, one of nftables whose chains come
/// before and after those of the lock as well, and one of iptables.
const FIREWALLS: [&str; 3] = [
    "",
    r#"for priority in -150 0 10; do
        for hook in input output; do
            nft "table inet strict { chain $hook$priority {
                type filter hook $hook priority $priority; policy drop; ct state new,established accept; }; }"
        done
    done"#,
    r#"for program in iptables ip6tables; do
        for chain in INPUT OUTPUT; do
            $program -w -A $chain -m conntrack --ctstate NEW,ESTABLISHED -j ACCEPT
            $program -w -P $chain DROP
        done
    done"#,
];

fn there_and_back(lock: &'static str) {
    for firewall in FIREWALLS {
        behind(firewall, lock);
    }
}

/// The program, in a directory of its own.
struct Program {
    dir: tempfile::TempDir,
    lock: &'static str,
}

impl Program {
    fn count(&self) -> PathBuf {
        self.dir.path().join("count")
    }

    fn start(&self, network: &Network, source: &str) -> Started {
        let started = network.python(source, &[&self.count()]);
        goes_on(&self.count());
        started
    }

    /// `criu` with what both halves are told.
    fn criu(&self, words: &[&str]) -> Command {
        let mut command = criu(words);
        command.args(["--tcp-established", "--network-lock", self.lock, "-D"]);
        command.arg(self.dir.path());
        command
    }

    fn put_to_sleep(&self, mut started: Started) {
        succeeds(&mut self.criu(&["dump", "--tree", &started.0.id().to_string()]));
        started.0.wait().unwrap();
    }

    fn wake(&self, network: &Network) -> Restored {
        let (joined, pidfile) = (network.file(), self.dir.path().join("pid"));
        let mut restore = self.criu(&["restore", "--restore-detached"]);
        restore.arg("--join-ns").arg(format!("net:{}", joined.display()));
        succeeds(restore.arg("--pidfile").arg(&pidfile));
        Restored(fs::read_to_string(pidfile).unwrap().trim().parse().unwrap())
    }
}

/// Puts the program behind a firewall to sleep, and wakes it in the namespace where it was.
fn behind(firewall: &str, lock: &'static str) {
    let network = Network::new();
    succeeds(network.inside("sh").args(["-ec", firewall]));
    let program = Program { dir: tempfile::tempdir().unwrap(), lock };
    let started = program.start(&network, PROGRAM);
    // Of the firewall, and of the lock.
    let drops = || {
        let rules = succeeds(network.inside("nft").args(["list", "ruleset"]));
        rules.to_lowercase().matches("drop").count()
    };
    let before = drops();
    assert_eq!(before == 0, firewall.is_empty());
    program.put_to_sleep(started);
    assert!(drops() > before, "nothing is locked");

    let restored = program.wake(&network);
    goes_on(&program.count());
    assert_eq!(drops(), before, "still locked, or the firewall is gone");
    let inside = fs::read_link(format!("/proc/{}/ns/net", restored.0)).unwrap();
    let wanted = succeeds(network.inside("readlink").arg("/proc/self/ns/net"));
    assert_eq!(inside.to_str().unwrap(), wanted.trim());
}

/// What ends a connection is invalid to a firewall that has not seen it begin: its other end, which is not restored,
/// has ended half of each of these.
#[test]
fn half_a_connection_comes_to_a_firewall_that_does_not_know_it() {
    for firewall in &FIREWALLS[1..] {
        let (network, other) = (Network::new(), Network::new());
        succeeds(other.inside("sh").args(["-ec", firewall]));
        let program = Program { dir: tempfile::tempdir().unwrap(), lock: "nftables" };
        let _client = network.python(CLIENT, &[]);
        program.put_to_sleep(program.start(&network, HALF));
        let _restored = program.wake(&other);
        goes_on(&program.count());
    }
}

/// A connection that the firewall's kernel has not seen begin, and would not pick up: it is made known to it.
#[test]
fn connections_come_to_a_firewall_that_picks_up_none() {
    for firewall in &FIREWALLS[1..] {
        let (network, other) = (Network::new(), Network::new());
        succeeds(other.inside("sh").args(["-ec", firewall]));
        let strict = "echo 0 >/proc/sys/net/netfilter/nf_conntrack_tcp_loose";
        succeeds(other.inside("sh").args(["-ec", strict]));
        let program = Program { dir: tempfile::tempdir().unwrap(), lock: "nftables" };
        program.put_to_sleep(program.start(&network, PROGRAM));
        let _restored = program.wake(&other);
        goes_on(&program.count());
    }
}

#[test]
fn a_lock_of_nftables_goes() {
    there_and_back("nftables");
}

/// A program takes its time to start: what the network is to be locked with is asked while the tasks run, and the lock
/// is set without one.
#[test]
fn stopped_tasks_wait_for_no_program() {
    let network = Network::new();
    let program = Program { dir: tempfile::tempdir().unwrap(), lock: "nftables" };
    let mut started = program.start(&network, PROGRAM);
    let tree = started.0.id().to_string();
    let bin = tempfile::tempdir().unwrap();
    let path = std::env::var("PATH").unwrap();
    let script = format!(
        "#!/bin/sh\ngrep State: /proc/{tree}/status >>{0}/log\nPATH={path} exec nft \"$@\"\n",
        bin.path().display()
    );
    write_script(&bin.path().join("nft"), &script);
    let plain = program.criu(&["dump", "--tree", &tree]);
    // From inside of their network, whose rules are not dumped then.
    let mut dump = network.inside(plain.get_program().to_str().unwrap());
    dump.args(plain.get_args()).env("PATH", format!("{}:{path}", bin.path().display()));
    succeeds(&mut dump);
    started.0.wait().unwrap();
    let states = fs::read_to_string(bin.path().join("log")).unwrap();
    assert!(!states.is_empty() && !states.contains("t (tracing stop)"), "{states}");
    assert!(succeeds(network.inside("nft").args(["list", "tables"])).contains("CRIU-"));
}

#[test]
fn a_lock_of_iptables_goes() {
    there_and_back("iptables");
}

/// As in a pod: its other containers live in the network as well.
#[test]
fn others_in_the_network_are_not_cut_off() {
    let network = Network::new();
    let [program, others] =
        [(); 2].map(|()| Program { dir: tempfile::tempdir().unwrap(), lock: "nftables" });
    let _others = others.start(&network, &PROGRAM.replace("7777", "8888"));
    program.put_to_sleep(program.start(&network, PROGRAM));
    goes_on(&others.count());
    let _restored = program.wake(&network);
    goes_on(&program.count());
    goes_on(&others.count());
}

/// The program goes back to what it was before it was put to sleep: the lock of that holds the same connections. From
/// inside of their namespace only they are locked; from outside all of it, which may be somebody else's as well.
#[test]
fn a_later_sleep_does_not_hold_the_connections_of_an_earlier_checkpoint() {
    for (lock, from_inside) in [("nftables", true), ("iptables", true), ("nftables", false)] {
        let network = Network::new();
        let earlier = Program { dir: tempfile::tempdir().unwrap(), lock: "nftables" };
        let later = Program { dir: tempfile::tempdir().unwrap(), lock };
        let mut started = earlier.start(&network, PROGRAM);
        let tree = started.0.id().to_string();
        let run = |program: &Program, words: &[&str]| {
            let plain = program.criu(words);
            let mut command = if from_inside {
                network.inside(plain.get_program().to_str().unwrap())
            } else {
                Command::new(plain.get_program())
            };
            // By another name it is `torpor`, which has the same commands.
            succeeds(command.args(plain.get_args()));
        };
        // It goes back to what its file was, too.
        let keep = format!(
            "[ $CRTOOLS_SCRIPT_ACTION != post-dump ] || cp {0} {0}.then",
            earlier.count().display()
        );
        run(&earlier, &["dump", "--leave-running", "--tree", &tree, "--action-script", &keep]);
        run(&later, &["dump", "--tree", &tree]);
        started.0.wait().unwrap();
        fs::copy(earlier.count().with_extension("then"), earlier.count()).unwrap();

        let tables = || succeeds(network.inside("nft").args(["list", "tables"]));
        let pidfile = earlier.dir.path().join("pid");
        let mut words =
            vec!["restore", "-d", "-o", "restore.log", "--pidfile", pidfile.to_str().unwrap()];
        let joined = format!("net:{}", network.file().display());
        if !from_inside {
            words.extend(["--join-ns", &joined]);
        }
        run(&earlier, &words);
        let pid = fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap();
        let _restored = Restored(pid);
        if !from_inside {
            let log = fs::read_to_string(earlier.dir.path().join("restore.log")).unwrap();
            let (_, command) = log.split_once("from that dump: ").expect(&log);
            let (command, _) = command.split_once(',').unwrap();
            succeeds(network.inside("sh").args(["-ec", command]));
        }
        goes_on(&earlier.count());
        assert!(!tables().contains("CRIU-"), "{}", tables());
    }
}

/// A process in a namespace of its own.
struct Host(Child);

impl Host {
    fn new(kind: &str) -> Self {
        let mut command = Command::new("unshare");
        command.arg(format!("--{kind}")).args(["sleep", "1000"]).stdin(Stdio::null());
        let host = Self(command.spawn().unwrap());
        let of = PathBuf::from(format!("/proc/{}", host.0.id()));
        wait_until(|| fs::read(of.join("comm")).is_ok_and(|name| name == b"sleep\n"));
        // Root of this host has no name there.
        for map in ["uid_map", "gid_map"].iter().filter(|_| kind == "user") {
            fs::write(of.join(map), "0 70000 100").unwrap();
        }
        host
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The images say that it was in this host's.
#[test]
fn a_tree_of_this_host_joins_namespaces() {
    for kind in ["net", "uts", "ipc", "user"] {
        let (task, host) = (Sleeper::start(), Host::new(kind));
        task.put_to_sleep(&[]);
        let join = format!("{kind}:{}", host.0.id());
        let output = task.restore(&["-d", "--join-ns", &join]).output().unwrap();
        assert!(output.status.success(), "{kind}: {}", task.log("restore.log"));
        let space = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_eq!(space(task.pid.cast_unsigned()), space(host.0.id()), "{kind}");
        task.kill();
    }
}

/// A listener at a port that is free, which it counts.
const LISTENER: &str = r#"
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        print(listener.getsockname()[1], file=file)
        time.sleep(0.02)
"#;

/// They are where their task is, and not in the network that the images say.
#[test]
fn sockets_of_a_tree_of_this_host_join_its_network() {
    let (network, dir) = (Network::new(), tempfile::tempdir().unwrap());
    let program = Program { dir, lock: "nftables" };
    let mut listener = Command::new("setsid");
    listener.args(["python3", "-c", LISTENER]).arg(program.count()).stdin(Stdio::null());
    let started = listener.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    goes_on(&program.count());
    program.put_to_sleep(Started(started));
    let _restored = program.wake(&network);
    goes_on(&program.count());
    let counted = fs::read_to_string(program.count()).unwrap();
    let port = counted.lines().next().unwrap();
    let connect = format!("import socket; socket.create_connection(('127.0.0.1', {port}))");
    succeeds(network.inside("python3").args(["-c", &connect]));
}

/// A tree lives in one namespace of a kind.
#[test]
fn a_second_namespace_of_a_kind_is_no_use() {
    let (task, one, other) = (Sleeper::start(), Host::new("uts"), Host::new("uts"));
    task.put_to_sleep(&[]);
    let [one, other] = [one.0.id(), other.0.id()].map(|pid| format!("uts:{pid}"));
    let twice = ["-d", "--join-ns", &one, "--join-ns", &other];
    assert!(!task.restore(&twice).status().unwrap().success());
    let space = |join: &str| join.replace(':', ":/proc/") + "/ns/uts";
    let said = format!("--join-ns {}: nothing would live in it", space(&other));
    assert!(task.log("restore.log").contains(&said), "{}", task.log("restore.log"));
    assert!(task.restore(&twice[..3]).status().unwrap().success());
}
