//! A service moves with its address from one host to another, and its client, on a third one, hears
//! every byte and no reset.
//!
//! Hosts are network namespaces, which a bridge in a fourth one joins. Each is kept by a process, so
//! that nothing is left of them when these have ended.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use support::{Host, compiled, judge, wait_until};
use torpor_sys::socket;

const V4: &str = "10.77.0.5";
const V6: &str = "fd77::5";
const PORT: u16 = 7000;

/// A process with a network namespace of its own.
struct Net(Child);

impl Net {
    /// The process ends up in a network namespace that is none of `others`.
    fn new(command: &mut Command, others: &[&str]) -> Self {
        let link = |path: &str| std::fs::read_link(path).unwrap();
        let others: Vec<_> = others.iter().map(|path| link(path)).collect();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let net = Self(child);
        let theirs = net.path();
        let is_apart = || std::fs::read_link(&theirs).is_ok_and(|link| !others.contains(&link));
        wait_until("it has a network of its own", is_apart);
        net.shell("ip link set lo up");
        net
    }

    fn host() -> Self {
        let mut command = Command::new("unshare");
        Self::new(command.args(["--net", "sleep", "100000"]), &["/proc/self/ns/net"])
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.pid())
    }

    fn inside(&self) -> String {
        format!("--net={}", self.path())
    }

    fn shell(&self, script: &str) -> String {
        let output =
            Command::new("nsenter").arg(self.inside()).args(["sh", "-ec", script]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A thread in a network namespace.
fn within<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let namespace = File::open(path).unwrap();
    thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    })
}

/// Two hosts and a client at a switch.
struct World {
    _switch: Net,
    here: Net,
    there: Net,
    client: Net,
}

impl World {
    fn new() -> Self {
        let [switch, here, there, client] = [(); 4].map(|()| Net::host());
        switch.shell("ip link add s0 type bridge; ip link set s0 up");
        for (name, host) in [("here", &here), ("there", &there)] {
            switch.shell(&format!(
                "ip link add {name} type veth peer name uplink netns {}; ip link set {name} master s0 up",
                host.pid()
            ));
            host.shell(
                "ip link add br0 type bridge; ip link set br0 up; ip link set uplink master br0 up",
            );
        }
        switch.shell(&format!(
            "ip link add client type veth peer name eth0 netns {}; ip link set client master s0 up",
            client.pid()
        ));
        client.shell(
            "ip link set eth0 up; ip address add 10.77.0.9/24 dev eth0; \
             ip address add fd77::9/64 dev eth0 nodad",
        );
        Self { _switch: switch, here, there, client }
    }

    /// A service with an address of its own, at the bridge of the first host.
    fn service(&self, program: &std::path::Path) -> Net {
        let mut command = Command::new("nsenter");
        command.arg(self.here.inside()).args(["setsid", "unshare", "--net"]);
        command.arg(program).arg(PORT.to_string()).stderr(Stdio::null());
        let service = Net::new(&mut command, &["/proc/self/ns/net", &self.here.path()]);
        self.here.shell(&format!(
            "ip link add outside type veth peer name eth0 netns {}; ip link set outside master br0 up",
            service.pid()
        ));
        service.shell(&format!(
            "ip link set eth0 up; ip address add {V4}/24 dev eth0; ip address add {V6}/64 dev eth0 nodad"
        ));
        // When the kernel has found no duplicate of the address that it gave itself, it adds a route: a tree
        // that was built before that is built anew.
        service
            .shell("while ip -6 address show tentative | grep --quiet inet6; do sleep 0.05; done");
        service
    }
}

/// Says something new all the time, and hears it again.
struct Client {
    heard: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Client {
    fn start(path: &str, address: &'static str) -> Self {
        let (heard, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counter, stopped) = (Arc::clone(&heard), Arc::clone(&stop));
        let thread = within(path, move || {
            let address: IpAddr = address.parse().unwrap();
            let mut stream = TcpStream::connect((address, PORT))?;
            let mut seed = 1_u64;
            while !stopped.load(Ordering::Relaxed) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let len = usize::try_from(seed >> 40).unwrap() % 100_000 + 1;
                let said: Vec<u8> = seed.to_le_bytes().into_iter().cycle().take(len).collect();
                let mut writing = stream.try_clone()?;
                let mut answer = vec![0; len];
                thread::scope(|scope| {
                    let sent = scope.spawn(|| writing.write_all(&said));
                    stream.read_exact(&mut answer)?;
                    sent.join().unwrap()
                })?;
                assert!(answer == said, "another answer");
                counter.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let client = Self { heard, stop, thread };
        client.goes_on();
        client
    }

    fn goes_on(&self) {
        let before = self.heard.load(Ordering::Relaxed);
        wait_until("the client hears answers", || {
            assert!(!self.thread.is_finished(), "the client has ended");
            self.heard.load(Ordering::Relaxed) > before + 5
        });
    }

    fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap().unwrap();
    }
}

/// Listens for announcements of the addresses, at the client's host.
fn listen(path: &str) -> mpsc::Receiver<&'static str> {
    let (tell, told) = mpsc::channel();
    let (ready, is_ready) = mpsc::channel();
    within(path, move || {
        let all = i32::from(u16::try_from(libc::ETH_P_ALL).unwrap().to_be());
        let packets = socket::socket(libc::AF_PACKET, libc::SOCK_DGRAM, all).unwrap();
        let (v4, v6): (std::net::Ipv4Addr, std::net::Ipv6Addr) =
            (V4.parse().unwrap(), V6.parse().unwrap());
        ready.send(()).unwrap();
        let mut packet = [0; 2000];
        while let Ok(len) = rustix::io::read(&packets, &mut packet[..]) {
            let packet = &packet[..len];
            let is_arp = len >= 28 && packet[..8] == [0, 1, 8, 0, 6, 4, 0, 1];
            let what = if is_arp && packet[14..18] == v4.octets() && packet[24..28] == v4.octets() {
                "arp"
            } else if len == 72
                && packet[40] == 136
                && packet[48..64] == v6.octets()
                && packet[44] == 0x20
            {
                "advertisement"
            } else {
                continue;
            };
            if tell.send(what).is_err() {
                return;
            }
        }
    });
    is_ready.recv().unwrap();
    told
}

/// Waits for both kinds of announcement.
fn hear(told: &mpsc::Receiver<&'static str>) {
    let (mut arp, mut advertisement) = (false, false);
    while !(arp && advertisement) {
        let what = told.recv_timeout(Duration::from_secs(60)).expect("an announcement");
        arp |= what == "arp";
        advertisement |= what == "advertisement";
    }
}

#[test]
fn connections_move_with_the_address() {
    let programs = tempfile::tempdir().unwrap();
    let program = compiled(programs.path(), "server");
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let world = World::new();
        let mut service = world.service(&program);
        let clients = [V4, V6].map(|address| Client::start(&world.client.path(), address));
        let here = Host::new();
        let mut there = Host::apart(&["nsenter", &world.there.inside()]);
        for word in ["--external", "veth[eth0]:outside@br0"] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let told = listen(&world.client.path());
        let migration =
            here.migrate(&["--pid", &service.pid().to_string(), "--mode", mode, "--json"]);
        let mut command = Command::new("nsenter");
        command.arg(world.here.inside()).arg(migration.get_program()).args(migration.get_args());
        let output = command.arg(&there.address).stdin(Stdio::null()).output().unwrap();
        let report =
            judge(&output).unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        // What was built early is what runs, though each dump has locked the network by rules of its own.
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        hear(&told);
        clients.iter().for_each(Client::goes_on);
        clients.into_iter().for_each(Client::finish);
        wait_until("it has ended here", || service.0.try_wait().unwrap().is_some());
        let pid = i32::try_from(report["pid"].as_i64().unwrap()).unwrap();
        let moved = format!("--net=/proc/{pid}/ns/net");
        // Nothing holds packets back any more.
        for net in [world.here.inside(), world.there.inside(), moved] {
            let rules = Command::new("nsenter").arg(net).args(["nft", "list", "ruleset"]).output();
            let rules = rules.unwrap();
            assert!(rules.status.success() && rules.stdout.is_empty(), "{mode}: {rules:?}");
        }
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
}

#[test]
fn connections_stay_with_what_stays() {
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let service = world.service(&compiled(programs.path(), "server"));
    let client = Client::start(&world.client.path(), V4);
    for point in ["setup-namespaces", "pre-resume"] {
        let here = Host::new();
        let mut there = Host::apart(&["nsenter", &world.there.inside()]);
        let script = format!("test $CRTOOLS_SCRIPT_ACTION != {point}");
        for word in ["--external", "veth[eth0]:outside@br0", "--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let migration = here.migrate(&["--pid", &service.pid().to_string(), "--json"]);
        let mut command = Command::new("nsenter");
        command.arg(world.here.inside()).arg(migration.get_program()).args(migration.get_args());
        let output = command.arg(&there.address).stdin(Stdio::null()).output().unwrap();
        judge(&output).unwrap_err();
        client.goes_on();
        let links = world.there.shell("ip -brief link");
        assert!(!links.contains("outside"), "{point}: {links}");
        let rules = service.shell("nft list ruleset");
        assert!(rules.is_empty(), "{point}: {rules}");
    }
    client.finish();
}

/// Whoever is killed while packets are held back: the client goes on, and nothing holds them back any more, here or there.
#[test]
fn nothing_holds_packets_back_when_somebody_was_killed() {
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let service = world.service(&compiled(programs.path(), "server"));
    let client = Client::start(&world.client.path(), V4);
    for (mode, point) in [("pipelined", "setup-namespaces"), ("pre-copy", "setup-namespaces")] {
        for victim in ["source", "agent", "nobody"] {
            let here = Host::new();
            let mut there = Host::apart(&["nsenter", &world.there.inside()]);
            let [reached, released] = ["reached", "released"].map(|name| here.path(name));
            let script = format!(
                "test $CRTOOLS_SCRIPT_ACTION != {point} || \
                 {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
                reached.display(),
                released.display()
            );
            for word in ["--external", "veth[eth0]:outside@br0", "--action-script", &script] {
                there.options.push(format!("--restore-option={word}"));
            }
            there.start_agent();
            let pid = service.pid().to_string();
            let migration = here.migrate(&["--pid", &pid, "--mode", mode, "--id", "one"]);
            let mut command = Command::new("nsenter");
            command.arg(world.here.inside()).arg(migration.get_program());
            command.args(migration.get_args()).arg(&there.address);
            let mut migration = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            wait_until("it is being made there", || reached.exists());
            match victim {
                "source" => migration.kill().unwrap(),
                "agent" => there.stop_agent(),
                _ => assert!(here.migrate(&["--cancel", "one"]).status().unwrap().success()),
            }
            std::fs::write(released, "").unwrap();
            assert!(!migration.wait().unwrap().success());
            client.goes_on();
            if victim == "agent" {
                there.start_agent();
            }
            let told = format!("{mode}, {victim}");
            wait_until(&format!("{told}: both tidy up"), || here.is_clean() && there.is_clean());
            wait_until(&format!("{told}: its packets go"), || {
                let nets = [&service, &world.here, &world.there];
                nets.iter().all(|net| net.shell("nft list ruleset").is_empty())
            });
            wait_until(&format!("{told}: no device is left there"), || {
                !world.there.shell("ip -brief link").contains("outside")
            });
        }
    }
    client.finish();
}
