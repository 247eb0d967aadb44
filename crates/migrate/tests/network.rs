//! A service moves with its address from one host to another, and its client, on a third one, hears
//! every byte and no reset.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::proxy::{Fault, Plan, Point, Proxy, Seen};
use support::world::{Net, V4, V6, World, agent_at, host_at, migrate_from, within};
use support::{Host, Killed, compiled, judge, pids_of, wait_until};
use torpor_sys::socket;
use torpor_tests::random::Random;

const MODES: [&str; 5] = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];
const PORT: u16 = 7000;

/// A service that answers each byte with the same one.
fn echo(world: &World, program: &Path) -> Net {
    world.service(&[program.to_str().unwrap(), &PORT.to_string()])
}

/// Says something new all the time, and hears it again.
struct Client {
    heard: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Ends with how many segments it has sent again.
    thread: Option<JoinHandle<std::io::Result<u32>>>,
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
            Ok(sent_again(&stream))
        });
        let mut client = Self { heard, stop, thread: Some(thread) };
        client.goes_on();
        client
    }

    fn goes_on(&mut self) {
        let before = self.heard.load(Ordering::Relaxed);
        wait_until("the client hears answers", || {
            if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
                panic!("the client has ended: {:?}", thread.join());
            }
            self.heard.load(Ordering::Relaxed) > before + 5
        });
    }

    /// How many segments it has sent again: what a pause looks like from there.
    fn finish(mut self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap()
    }
}

/// `tcpi_total_retrans` of a connection.
fn sent_again(stream: &TcpStream) -> u32 {
    const PLACE: usize = 100;
    let mut info = [0; PLACE + 4];
    let len = socket::get(stream.as_fd(), socket::Opt::TCP_INFO, &mut info).unwrap();
    assert_eq!(len, info.len());
    u32::from_ne_bytes(info[PLACE..].try_into().unwrap())
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
    for mode in MODES {
        let world = World::new();
        let mut service = echo(&world, &program);
        let mut clients = [V4, V6].map(|address| Client::start(&world.client.path(), address));
        let here = Host::new();
        let there = agent_at(&world.there, &[]);
        let told = listen(&world.client.path());
        let args = ["--mode", mode, "--json", &there.address];
        let output = migrate_from(&world.here, &here, service.pid(), &args).output().unwrap();
        let report =
            judge(&output).unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        // What was built early is what runs, though each dump has locked the network by rules of its own.
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        hear(&told);
        clients.iter_mut().for_each(Client::goes_on);
        for client in clients {
            client.finish();
        }
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

/// A script of the agent's takes long when the tasks run: the addresses that are there are told before.
#[test]
fn addresses_are_announced_before_a_script_has_ended() {
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let service = echo(&world, &compiled(programs.path(), "server"));
    let (here, mut there) = (Host::new(), host_at(&world.there, &[]));
    // Nobody else sleeps for so long.
    let sleeps = format!("500000.{}", std::process::id());
    there.options.push(format!("--script=test $TORPOR_STAGE != moved || exec sleep {sleeps}"));
    there.start_agent();
    let told = listen(&world.client.path());
    let args = ["--json", &there.address];
    let output = migrate_from(&world.here, &here, service.pid(), &args).output().unwrap();
    let report = judge(&output).unwrap_or_else(|error| panic!("{error}\n{}", there.log()));
    let _moved = Killed(i32::try_from(report["pid"].as_i64().unwrap()).unwrap());
    let mut script = None;
    wait_until("the script runs", || {
        script = pids_of(&["sleep", &sleeps]).first().copied();
        script.is_some()
    });
    let _script = Killed(script.unwrap().as_raw_nonzero().get());
    hear(&told);
}

/// One service goes there and back again and again, in every mode in turn, and its clients keep their connections.
#[test]
fn no_reset_in_a_hundred_moves() {
    let count = if std::env::var_os("TORPOR_LONG").is_some() { 100 } else { 10 };
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let mut service = echo(&world, &compiled(programs.path(), "server"));
    let mut clients = [V4, V6].map(|address| Client::start(&world.client.path(), address));
    let ends = [&world.here, &world.there].map(|net| {
        let mut host = host_at(net, &[]).with_quiet_mounts();
        host.start_agent();
        (net, host)
    });
    let mut pid = service.pid();
    for number in 0..count {
        let ((net, from), (_, to)) = (&ends[number % 2], &ends[(number + 1) % 2]);
        let args = ["--mode", MODES[number % MODES.len()], "--json", &to.address];
        let output = migrate_from(net, from, pid, &args).output().unwrap();
        let report = judge(&output).unwrap_or_else(|e| panic!("move {number}: {e} {}", to.log()));
        pid = u32::try_from(report["pid"].as_u64().unwrap()).unwrap();
        clients.iter_mut().for_each(Client::goes_on);
        // Its name is the next one's.
        wait_until("its device is gone here", || !net.shell("ip -brief link").contains("outside"));
    }
    // Whether the client has something under way when packets begin to be held back is up to chance.
    let again: Vec<u32> = clients.into_iter().map(Client::finish).collect();
    println!("{count} moves: the clients have sent {again:?} segments again");
    wait_until("it has ended here", || service.0.try_wait().unwrap().is_some());
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn connections_stay_with_what_stays() {
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let service = echo(&world, &compiled(programs.path(), "server"));
    let mut client = Client::start(&world.client.path(), V4);
    for point in ["setup-namespaces", "pre-resume"] {
        let here = Host::new();
        let script = format!("test $CRTOOLS_SCRIPT_ACTION != {point}");
        let there = agent_at(&world.there, &["--action-script", &script]);
        let args = ["--json", &there.address];
        let output = migrate_from(&world.here, &here, service.pid(), &args).output().unwrap();
        judge(&output).unwrap_err();
        client.goes_on();
        // The kernel removes it together with its network, some time after the last task is gone.
        wait_until(&format!("{point}: its device is gone there"), || {
            !world.there.shell("ip -brief link").contains("outside")
        });
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
    let service = echo(&world, &compiled(programs.path(), "server"));
    let mut client = Client::start(&world.client.path(), V4);
    for (mode, point) in [("pipelined", "setup-namespaces"), ("pre-copy", "setup-namespaces")] {
        for victim in ["source", "agent", "nobody"] {
            let here = Host::new();
            let [reached, released] = ["reached", "released"].map(|name| here.path(name));
            let script = format!(
                "test $CRTOOLS_SCRIPT_ACTION != {point} || \
                 {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
                reached.display(),
                released.display()
            );
            let mut there = agent_at(&world.there, &["--action-script", &script]);
            let args = ["--mode", mode, "--id", "one", &there.address];
            let mut migration = migrate_from(&world.here, &here, service.pid(), &args);
            let mut migration = migration.stderr(Stdio::null()).spawn().unwrap();
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

/// The source is killed when the tasks run there already, and does not know it: its kernel must not answer their packets any
/// more, nor tell the client that they have ended.
#[test]
fn connections_move_although_the_source_is_killed() {
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let (mut service, _first) = Service::start(&world, programs.path());
    let mut client = Client::start(&world.client.path(), V4);
    for mode in ["pipelined", "pre-copy", "stop-and-copy"] {
        let point = Point::Said("\"say\":\"running\"");
        let before = service.is_away;
        let seen = service.moves(mode, Trouble::Fault(Plan { fault: Fault::KillSource, point }));
        assert!(seen.struck && service.is_away != before, "{mode}: {seen:?}");
        client.goes_on();
    }
    client.finish();
    kill_process(Pid::from_raw(service.pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
}

/// What happens to a migration.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    None,
    Fault(Plan),
    /// The destination does not make it, from this point on.
    Refusal(&'static str),
}

/// A service, wherever it is.
struct Service<'a> {
    world: &'a World,
    program: String,
    pid: u32,
    is_away: bool,
}

impl<'w> Service<'w> {
    /// Starts one at the first host, with the network that it has there.
    fn start(world: &'w World, programs: &Path) -> (Self, Net) {
        let program = compiled(programs, "server");
        let first = echo(world, &program);
        let program = program.display().to_string();
        (Self { world, program, pid: first.pid(), is_away: false }, first)
    }

    /// Has it move to where it is not, with trouble.
    fn moves(&mut self, mode: &str, trouble: Trouble) -> Seen {
        let (here, there) = (&self.world.here, &self.world.there);
        let (net, to) = if self.is_away { (there, here) } else { (here, there) };
        let script = |point| format!("test $CRTOOLS_SCRIPT_ACTION != {point}");
        let (plan, script) = match trouble {
            Trouble::None => (None, None),
            Trouble::Fault(plan) => (Some(plan), None),
            Trouble::Refusal(point) => (None, Some(script(point))),
        };
        let more = script.iter().flat_map(|script| ["--action-script", script]);
        let (here, there) = (Host::new(), host_at(to, &more.collect::<Vec<_>>()));
        let mut there = there.with_quiet_mounts();
        there.start_agent();
        let paths = (here.path("proxy.socket"), there.path("agent.socket"));
        let proxy = Proxy::start(paths.0, paths.1, plan);
        let address = format!("unix:{}", proxy.path.display());
        let args = ["--mode", mode, "--id", "one", "--max-rounds", "2", &address];
        let migration = migrate_from(net, &here, self.pid, &args).spawn().unwrap();
        let output = proxy.disturb(migration, &mut there);
        let said = String::from_utf8_lossy(&output.stderr);
        let told = format!("{mode} {trouble:?}: {said}\n{}", there.log());
        wait_until(&format!("it is decided: {told}"), || {
            let phases = here.phases("source");
            phases.is_empty() || phases == ["moved"] || phases == ["stayed"]
        });
        let mut running = None;
        wait_until(&format!("it runs, once: {told}"), || {
            running = self.running();
            running.is_some()
        });
        let has_moved = running != Some(self.pid);
        assert_eq!(here.phases("source") == ["moved"], has_moved, "{told}");
        assert!(has_moved || !matches!(trouble, Trouble::None), "{told}");
        assert!(!has_moved || !matches!(trouble, Trouble::Refusal(_)), "{told}");
        wait_until(&format!("both tidy up: {told}"), || here.is_clean() && there.is_clean());
        let left = if has_moved { net } else { to };
        wait_until(&format!("its device is at one host: {told}"), || {
            !left.shell("ip -brief link").contains("outside")
        });
        self.is_away ^= has_moved;
        self.pid = running.unwrap_or(self.pid);
        proxy.seen()
    }

    /// Its first process, if there is one such tree only, and all of it runs.
    fn running(&self) -> Option<u32> {
        let all = pids_of(&[&self.program]);
        let stat = |pid: &Pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut words = stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned);
            Some((*pid, words.next()?, Pid::from_raw(words.next()?.parse().ok()?)))
        };
        let stats: Vec<_> = all.iter().map(stat).collect::<Option<_>>()?;
        let is_child = |parent: &Option<Pid>| parent.is_some_and(|pid| all.contains(&pid));
        let mut roots = stats.iter().filter(|(.., parent)| !is_child(parent));
        let (root, None) = (roots.next()?, roots.next()) else { return None };
        let run = stats.iter().all(|(_, state, _)| matches!(state.as_str(), "R" | "S" | "D"));
        run.then(|| root.0.as_raw_nonzero().get().cast_unsigned())
    }
}

/// Whatever happens to its migrations, a service is at one of two hosts, and its client keeps its connection and hears every
/// answer.
#[test]
fn a_client_notices_no_fault() {
    const POINTS: [&str; 4] = ["pre-restore", "setup-namespaces", "post-restore", "pre-resume"];
    const FAULTS: [Fault; 3] = [Fault::CutLink, Fault::KillAgent, Fault::KillSource];
    const MOVES: usize = 6;
    let least = if std::env::var_os("TORPOR_LONG").is_some() { 200 } else { 1 };
    let random = Random::printed();
    let programs = tempfile::tempdir().unwrap();
    let world = World::new();
    let (mut service, _first) = Service::start(&world, programs.path());
    let mut client = Client::start(&world.client.path(), V4);
    let (mut whole, mut struck, mut faults, mut number) = ([Seen::default(); 2], 0, 0, 0);
    while number < MOVES || struck < least {
        assert!(faults < 10 * (least + 1), "{struck} of {faults} points were hit");
        // First without any trouble, which says how much there is.
        let (mode, kind) = (number / 5 % 2, number % 5);
        let trouble = match kind {
            0 => Trouble::None,
            4 => Trouble::Refusal(POINTS[random.place(POINTS.len())]),
            _ => {
                let point = match random.below(3) {
                    0 => {
                        let at = random.place(whole[mode].messages);
                        Point::Message { at, passed: true }
                    }
                    1 => whole[mode].byte(&random),
                    _ => whole[mode].call(&random),
                };
                Trouble::Fault(Plan { fault: FAULTS[kind - 1], point })
            }
        };
        println!("{number}: {trouble:?}");
        let seen = service.moves(["pipelined", "pre-copy"][mode], trouble);
        if kind == 0 {
            whole[mode] = seen;
        }
        faults += usize::from(matches!(trouble, Trouble::Fault(_)));
        struck += usize::from(seen.struck);
        client.goes_on();
        number += 1;
    }
    println!("{struck} of {faults} points were hit in {number} moves");
    client.finish();
    kill_process(Pid::from_raw(service.pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
}
