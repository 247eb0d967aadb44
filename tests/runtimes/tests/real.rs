//! Programs that many have, put to sleep and woken under load, and a table of how that went:
//! `TORPOR_LONG=1 UPDATE_DOCS=1 cargo test -p torpor-runtimes-tests -- real::programs` writes
//! docs/real-programs.md anew. What is refused is in it, too, with what is said then.

mod containers;
mod fio;
mod fuse;

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs};

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::load::{Load, Step, wrong};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

/// How often a busy server is dumped in a row while it runs.
const IN_A_ROW: u32 = 100;
/// The same where it is to take seconds.
const SOME_IN_A_ROW: u32 = 20;
/// How often a program sleeps and wakes.
const SLEEPS: u32 = 5;
/// The page, from the root of the repository.
const PAGE: &str = "docs/real-programs.md";

/// What became of a program.
struct Row {
    name: &'static str,
    /// The command that shows its version.
    version: &'static [&'static str],
    how: &'static str,
    outcome: Outcome,
}

enum Outcome {
    Kept(Times),
    /// What the dump says.
    Refused(String),
}

/// How long the dumps and the restores of one program took.
#[derive(Default)]
struct Times {
    asleep: Vec<Duration>,
    awake: Vec<Duration>,
    running: usize,
    bytes: u64,
}

impl Times {
    /// Puts the tree to sleep and wakes it.
    fn sleep(&mut self, job: &mut Job<'_>, options: &[&str]) {
        let begin = Instant::now();
        job.dump(options);
        self.asleep.push(begin.elapsed());
        self.bytes = job.pages();
        let begin = Instant::now();
        job.restore(options);
        self.awake.push(begin.elapsed());
    }

    /// Dumps the tree and lets it go on.
    fn glance(&mut self, job: &mut Job<'_>, options: &[&str]) {
        job.dump_running(options);
        self.running += 1;
        // Hundreds of checkpoints need not be kept.
        fs::remove_dir_all(job.images()).unwrap();
    }
}

fn median(times: &[Duration]) -> u128 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2].as_millis()
}

/// A program that is missing was not shown to work: that is no success.
#[track_caller]
fn must_have(program: &str) {
    let found = command("which", &[program]).finish().status.success();
    assert!(
        found,
        "{program} is not installed: `make setup` installs it, and `make setup-long` what only \
         the long tests take"
    );
}

fn is_long() -> bool {
    let long = env::var_os("TORPOR_LONG").is_some();
    if !long {
        println!("skipped: it wants TORPOR_LONG=1");
    }
    long
}

/// A program, and what is done with it.
type Program = (&'static str, fn() -> Row);

fn run(programs: &[Program]) -> Vec<Row> {
    // All of them first: the others take minutes.
    programs.iter().for_each(|(program, _)| must_have(program));
    programs.iter().map(|(_, run)| run()).collect()
}

#[test]
#[should_panic(expected = "torpor-no-such is not installed: `make setup` installs it")]
fn a_missing_program_is_no_success() {
    run(&[("torpor-no-such", || unreachable!())]);
}

/// Those that take seconds.
#[test]
fn session_bus_and_sandbox() {
    run(&[("dbus-daemon", dbus), ("bwrap", bubblewrap), ("bwrap", bubblewrap_of_a_user)]);
}

#[test]
fn captures_and_tracers() {
    run(&[("tcpdump", tcpdump), ("gdb", gdb), ("strace", strace)]);
}

#[test]
fn verified_writes() {
    run(&[("fio", fio::fio)]);
}

#[test]
fn servers_of_file_systems() {
    run(&[
        ("fuse-overlayfs", fuse::overlay),
        ("sshfs", fuse::sshfs),
        ("sshfs", fuse::sshfs_of_an_owner),
    ]);
}

#[test]
fn machine_of_systemd() {
    run(&[("systemd-nspawn", containers::nspawn)]);
}

#[test]
fn programs() {
    if !is_long() {
        return;
    }
    let rows = run(&[
        ("mariadbd", mariadb),
        ("etcd", etcd),
        ("php-fpm8.2", php_fpm),
        ("dbus-daemon", dbus),
        ("bwrap", bubblewrap),
        ("bwrap", bubblewrap_of_a_user),
        ("systemd-nspawn", containers::nspawn),
        ("tcpdump", tcpdump),
        ("fio", fio::fio),
        ("fuse-overlayfs", fuse::overlay),
        ("sshfs", fuse::sshfs),
        ("sshfs", fuse::sshfs_of_an_owner),
        ("gdb", gdb),
        ("strace", strace),
        ("chromium", containers::chromium_of_a_user),
        ("chromium", containers::chromium),
        ("dockerd", containers::docker),
    ]);
    let page = page(&rows);
    println!("{page}");
    if env::var_os("UPDATE_DOCS").is_some() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        fs::write(root.join(PAGE), page).unwrap();
    }
}

fn page(rows: &[Row]) -> String {
    let mut text = "# Real programs\n\n\
         Written by `TORPOR_LONG=1 UPDATE_DOCS=1 cargo test -p torpor-runtimes-tests -- \
         real::programs`; do not edit.\n\
         Each program works under the load of clients that check every answer while it is dumped \
         and goes on, and while it is\nput to sleep and woken. Medians of one run with the build of the \
         tests, which is not optimized: they say what is\npossible, not how fast it is. Asleep \
         is when nothing of the tree is left, not even for the machine's first\nprocess to \
         collect, which it does every second or two.\n\n\
         | program | load | dumped running | asleep | awake | memory saved | right |\n\
         | --- | --- | ---: | ---: | ---: | ---: | --- |\n"
        .to_owned();
    for Row { name, version, how, outcome } in rows {
        let version = command(version[0], &version[1..]).finish();
        let version = (version.stdout + &version.stderr).lines().next().unwrap_or("").to_owned();
        let _ = match outcome {
            Outcome::Kept(Times { asleep, awake, running, bytes }) => writeln!(
                text,
                "| {name} ({version}) | {how} | {running} | {} ms | {} ms | {} MiB | yes |",
                median(asleep),
                median(awake),
                bytes >> 20
            ),
            Outcome::Refused(why) => {
                writeln!(text, "| {name} ({version}) | {how} | – | – | – | – | refused: {why} |")
            }
        };
    }
    text
}

/// What a dump that must be refused says; the program must go on.
fn refusal(job: &mut Job<'_>, options: &[&str], expected: &str) -> Outcome {
    let said = job.dump_call(options).fail();
    let line = said.lines().find(|line| line.contains(expected));
    let line = line.unwrap_or_else(|| panic!("{expected:?} is not said: {said}"));
    let state = process::state(job.pid());
    assert!(process::alive(job.pid()) && state != Some('t') && state != Some('T'), "{state:?}");
    // Without the numbers, which are others each time.
    Outcome::Refused(expected.to_owned() + line.split_once(expected).map_or("", |(_, rest)| rest))
}

/// How the clients of a server connect. While it is asleep nobody listens: then they try again. While
/// it is awake they may not be refused.
#[derive(Clone, Default)]
struct Door(Arc<AtomicBool>);

impl Door {
    fn connect(&self, address: &str) -> io::Result<TcpStream> {
        loop {
            match TcpStream::connect(address) {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && self.may_be_shut() => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                done => return done,
            }
        }
    }

    fn may_be_shut(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Dumps a busy server many times in a row, then puts it to sleep a few times.
fn busy(job: &mut Job<'_>, load: &Load, door: &Door, options: &[&str]) -> Outcome {
    let mut times = Times::default();
    for number in 0..IN_A_ROW {
        times.glance(job, options);
        // A connection that was held off is tried again after a second.
        if number % 5 == 0 {
            load.advance(1);
        }
    }
    load.advance(20);
    door.0.store(true, Ordering::Relaxed);
    for _ in 0..SLEEPS {
        times.sleep(job, options);
        load.advance(20);
    }
    Outcome::Kept(times)
}

fn clients(
    network: &Network,
    count: usize,
    step: impl Fn(usize) -> io::Result<Step> + Send + Sync,
) -> Load {
    let client = |number| {
        until("the server answers", || {
            let mut step = step(number).ok()?;
            step().ok().map(|()| step)
        })
    };
    // Threads are where those are that make them: these connect again and again.
    network.inside(|| Load::start((0..count).map(client).collect()))
}

/// Transactions of sysbench, over connections that stay.
fn mariadb() -> Row {
    let scratch = Scratch::new("real-mariadb");
    let network = Network::new(scratch.name());
    let data = format!("--datadir={}", scratch.dir("data").display());
    let socket = format!("--socket={}", scratch.join("s").display());
    let server = ["mariadbd", "--no-defaults", "--user=root", &data, &socket];
    command("mariadbd", &[&server[1..], &["--bootstrap"]].concat()).succeed();
    let more = ["--skip-grant-tables", "--bind-address=127.0.0.1", "--port=3306"];
    let mut job = Job::start(&scratch, Some(&network), &[&server[..], &more].concat());
    let query = |text: &str| {
        command("mariadb", &["--no-defaults", &socket, "--batch", "-N", "-e", text]).finish()
    };
    until_true("the server answers", || query("CREATE DATABASE sbtest").status.success());
    let sysbench = |action: &str| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.path().display()));
        command.args(["sysbench", "oltp_read_write", "--mysql-host=127.0.0.1"]);
        command.args(["--mysql-user=root", "--tables=2", "--table-size=2000", "--threads=4"]);
        command.args(["--time=0", "--events=0", "--report-interval=1", action]);
        command
    };
    sysbench("prepare").succeed();
    let log = scratch.join("sysbench.log");
    let mut run = sysbench("run");
    run.stdin(Stdio::null()).stdout(fs::File::create(&log).unwrap());
    let mut run = run.spawn().unwrap();
    let transactions = || {
        let status = query("SHOW GLOBAL STATUS LIKE 'Com_commit'").stdout;
        status.split_whitespace().last().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
    };
    let advance = || {
        let goal = transactions() + 20;
        until_true("transactions are made", || transactions() >= goal);
    };
    let options = ["--tcp-established", "--file-locks"];
    let mut times = Times::default();
    for _ in 0..SLEEPS {
        advance();
        assert!(process::has_ring(job.pid()), "it does not use io_uring");
        times.sleep(&mut job, &options);
    }
    advance();
    assert!(process::has_ring(job.pid()), "it does not use io_uring any more");
    assert!(run.try_wait().unwrap().is_none(), "{}", fs::read_to_string(&log).unwrap());
    run.kill().unwrap();
    run.wait().unwrap();
    let check = query("CHECK TABLE sbtest.sbtest1, sbtest.sbtest2").stdout;
    assert_eq!(check.matches("OK").count(), 2, "{check}");
    let log = fs::read_to_string(&log).unwrap();
    let mut reports = log.lines().filter(|line| line.contains("reconn/s:"));
    assert!(reports.all(|line| line.ends_with("reconn/s: 0.00")), "{log}");
    Row {
        name: "MariaDB",
        version: &["mariadbd", "--version"],
        how: "sysbench oltp_read_write, four connections that stay; io_uring",
        outcome: Outcome::Kept(times),
    }
}

/// One request over HTTP, on a connection of its own; the body of the answer.
fn request(door: &Door, path: &str, body: &str) -> io::Result<String> {
    let mut stream = door.connect("127.0.0.1:2379")?;
    let length = body.len();
    let head = format!("POST {path} HTTP/1.0\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or(("nothing", ""));
    if head.starts_with("HTTP/1.0 200") { Ok(body.to_owned()) } else { Err(wrong(&answer)) }
}

/// Revisions go up with each write, and what was written is read again.
fn etcd_client(door: Door, number: usize) -> io::Result<Step> {
    // Keys and values are base64: any four letters, or eight, will do.
    let key = format!("key{number}");
    let mut value = 0_u32;
    Ok(Box::new(move || {
        value += 1;
        let text = format!("v{value:07}");
        request(&door, "/v3/kv/put", &format!("{{\"key\":\"{key}\",\"value\":\"{text}\"}}"))?;
        let read = request(&door, "/v3/kv/range", &format!("{{\"key\":\"{key}\"}}"))?;
        if read.contains(&text) { Ok(()) } else { Err(wrong(&read)) }
    }))
}

fn etcd() -> Row {
    let scratch = Scratch::new("real-etcd");
    let network = Network::new(scratch.name());
    let data = scratch.join("data").display().to_string();
    let mut job = Job::start(&scratch, Some(&network), &["etcd", "--data-dir", &data]);
    let door = Door::default();
    let load = clients(&network, 4, |number| etcd_client(door.clone(), number));
    let outcome = busy(&mut job, &load, &door, &["--tcp-established", "--file-locks"]);
    Row {
        name: "etcd",
        version: &["etcd", "--version"],
        how: "four clients that write and read, each request on a new connection",
        outcome,
    }
}

/// One request by FastCGI, on a connection of its own.
fn php_client(door: Door, script: &Path, number: usize) -> io::Result<Step> {
    let mut count = 0_u32;
    let script = script.display().to_string();
    Ok(Box::new(move || {
        count += 1;
        let query = format!("{number}-{count}");
        let mut stream = door.connect("127.0.0.1:9000")?;
        let mut parameters = Vec::new();
        for (name, value) in [
            ("SCRIPT_FILENAME", script.as_str()),
            ("REQUEST_METHOD", "GET"),
            ("QUERY_STRING", query.as_str()),
        ] {
            parameters.extend([length(name), length(value)]);
            parameters.extend(name.bytes().chain(value.bytes()));
        }
        // FCGI_BEGIN_REQUEST with the role of a responder, FCGI_PARAMS, FCGI_STDIN.
        let mut request = record(1, &[0, 1, 0, 0, 0, 0, 0, 0]);
        request.extend(record(4, &parameters));
        request.extend(record(4, &[]).into_iter().chain(record(5, &[])));
        stream.write_all(&request)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        match answer.contains(&format!("answer {query};")) {
            true => Ok(()),
            false => Err(wrong(&format!("{answer:?} to {query}"))),
        }
    }))
}

fn length(text: &str) -> u8 {
    u8::try_from(text.len()).unwrap()
}

/// A record of FastCGI, of request 1.
fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&[1, kind, 0, 1, length[0], length[1], 0, 0], content].concat()
}

fn php_fpm() -> Row {
    let scratch = Scratch::new("real-php");
    let network = Network::new(scratch.name());
    let script = scratch.join("answer.php");
    fs::write(&script, "<?php usleep(500); echo 'answer ', $_SERVER['QUERY_STRING'], ';';")
        .unwrap();
    let log = scratch.join("fpm.log");
    let conf = scratch.join("fpm.conf");
    fs::write(
        &conf,
        format!(
            "[global]\nerror_log = {}\ndaemonize = no\n[www]\nuser = root\ngroup = root\n\
             listen = 127.0.0.1:9000\npm = static\npm.max_children = 2\n",
            log.display()
        ),
    )
    .unwrap();
    let words = ["php-fpm8.2", "--allow-to-run-as-root", "-y", conf.to_str().unwrap()];
    let mut job = Job::start(&scratch, Some(&network), &words);
    let door = Door::default();
    let load = clients(&network, 4, |number| php_client(door.clone(), &script, number));
    let outcome = busy(&mut job, &load, &door, &["--tcp-established", "--file-locks"]);
    Row {
        name: "PHP-FPM",
        version: &["php-fpm8.2", "--version"],
        how: "four clients by FastCGI, two workers, each request on a new connection",
        outcome,
    }
}

/// The number of lines that a program has written.
fn lines(scratch: &Scratch) -> usize {
    fs::read_to_string(scratch.join("output.log")).unwrap().lines().count()
}

fn writes_on(scratch: &Scratch) {
    let goal = lines(scratch) + 5;
    until_true("it writes on", || lines(scratch) >= goal);
}

fn dbus() -> Row {
    let scratch = Scratch::new("real-dbus");
    let client = "while sleep 0.02; do echo $(dbus-send --print-reply=literal \
                  --dest=org.freedesktop.DBus / org.freedesktop.DBus.GetId); done";
    let mut job = Job::start(&scratch, None, &["dbus-run-session", "--", "sh", "-c", client]);
    writes_on(&scratch);
    let mut times = Times::default();
    let in_a_row = if env::var_os("TORPOR_LONG").is_some() { IN_A_ROW } else { SOME_IN_A_ROW };
    for _ in 0..in_a_row {
        times.glance(&mut job, &[]);
    }
    for _ in 0..SLEEPS {
        writes_on(&scratch);
        times.sleep(&mut job, &[]);
    }
    writes_on(&scratch);
    let output = fs::read_to_string(scratch.join("output.log")).unwrap();
    // The daemon itself has a word about limits.
    let ids: Vec<&str> = output.lines().filter(|line| !line.starts_with("dbus-daemon[")).collect();
    assert!(ids.iter().all(|id| *id == ids[0] && id.len() == 32), "{output}");
    Row {
        name: "dbus-daemon",
        version: &["dbus-daemon", "--version"],
        how: "a session with a client after the other, each a process of its own",
        outcome: Outcome::Kept(times),
    }
}

/// A sandbox in pid and mount namespaces of its own, with the task outside that has made it.
fn bubblewrap() -> Row {
    let scratch = Scratch::new("real-bwrap");
    // Not all of this host: what other tests mount there goes with them.
    let own = scratch.path().display();
    let words = format!(
        "bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \
         --symlink usr/lib64 /lib64 --bind {own} {own} --dev-bind /dev /dev --proc /proc \
         --unshare-pid --unshare-ipc --unshare-uts -- sh -c"
    );
    // What its /proc shows is to be what it knows of itself.
    let script = "exec >inside.log 2>&1; while sleep 0.02; do \
                  echo $$ $PPID $(readlink /proc/self/../$$/ns/pid /proc/1/ns/pid); done";
    let words: Vec<&str> = words.split_whitespace().chain([script]).collect();
    let mut job = Job::start(&scratch, None, &words);
    let inside = || fs::read_to_string(scratch.join("inside.log")).unwrap_or_default();
    let works_on = || {
        let goal = inside().lines().count() + 5;
        until_true("it works", || inside().lines().count() > goal);
    };
    let mut times = Times::default();
    for _ in 0..SLEEPS {
        works_on();
        times.sleep(&mut job, &["--external", "mnt[]:ms"]);
    }
    works_on();
    for line in inside().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(matches!(words[..], ["2", "1", own, first] if own == first), "{line}");
    }
    Row {
        name: "bubblewrap",
        version: &["bwrap", "--version"],
        how: "a sandbox with pid, mount, IPC and UTS namespaces, and the task that has made it",
        outcome: Outcome::Kept(times),
    }
}

/// The same for an ordinary user, with namespaces of all kinds: a user namespace that nobody lives
/// in any more owns them, and the sandbox lives in one below that.
fn bubblewrap_of_a_user() -> Row {
    let scratch = Scratch::new("real-bwrap-user");
    let own = scratch.path().display();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let words = format!(
        "setpriv --reuid=1000 --regid=1001 --groups=1001,27 bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \
         --symlink usr/lib64 /lib64 --bind {own} {own} --dev /dev --proc /proc \
         --unshare-all --new-session --uid 7 --gid 8 --hostname sandbox -- sh -c"
    );
    let script = "exec >inside.log 2>&1; while sleep 0.02; do \
                  echo $$ $PPID $(id -u) $(id -g) $(hostname) $(cat /proc/self/uid_map) \
                  $(readlink /proc/self/../$$/ns/user /proc/1/ns/user); done";
    let words: Vec<&str> = words.split_whitespace().chain([script]).collect();
    let mut job = Job::start(&scratch, None, &words);
    let inside = || fs::read_to_string(scratch.join("inside.log")).unwrap_or_default();
    let works_on = || {
        let goal = inside().lines().count() + 5;
        until_true("it works", || inside().lines().count() > goal);
    };
    let mut times = Times::default();
    for _ in 0..SLEEPS {
        works_on();
        times.sleep(&mut job, &["--external", "mnt[]:ms"]);
    }
    works_on();
    for line in inside().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(
            matches!(words[..], ["2", "1", "7", "8", "sandbox", "7", "0", "1", own, first] if own == first),
            "{line}"
        );
    }
    Row {
        name: "bubblewrap of a user",
        version: &["bwrap", "--version"],
        how: "a sandbox with a user namespace that owns namespaces of all other kinds",
        outcome: Outcome::Kept(times),
    }
}

fn tcpdump() -> Row {
    let scratch = Scratch::new("real-tcpdump");
    let network = Network::new(scratch.name());
    let words = ["tcpdump", "-i", "lo", "-w", "capture", "-U", "-Z", "root", "udp"];
    let mut job = Job::start(&scratch, Some(&network), &words);
    until_true("it captures", || scratch.join("capture").exists());
    let sender = network.inside(|| UdpSocket::bind("127.0.0.1:0").unwrap());
    let word = |number: u32| format!("packet {number:05}").into_bytes();
    // How often a packet is in the capture.
    let found = |number: u32| {
        let (capture, word) = (fs::read(scratch.join("capture")).unwrap(), word(number));
        capture.windows(word.len()).filter(|part| *part == word).count()
    };
    let mut times = Times::default();
    let mut sent = 0;
    for round in 0..=SLEEPS {
        let first = sent;
        while sent < first + 10 {
            sender.send_to(&word(sent), "127.0.0.1:9").unwrap();
            sent += 1;
        }
        // At once, and not when the ring has been filled up to where the program waits.
        until_true("all are captured", || (first..sent).all(|number| found(number) == 1));
        match round {
            SLEEPS => {}
            0 => times.glance(&mut job, &[]),
            _ => times.sleep(&mut job, &[]),
        }
    }
    assert!((0..sent).all(|number| found(number) == 1), "some are there twice");
    Row {
        name: "tcpdump",
        version: &["tcpdump", "--version"],
        how: "a capture, with all packets that are sent while it is awake",
        outcome: Outcome::Kept(times),
    }
}

fn gdb() -> Row {
    let scratch = Scratch::new("real-gdb");
    let words = ["gdb", "-q", "-batch", "-ex", "run", "--args", "sleep", "1000"];
    traced(&scratch, &words, "gdb", "(gdb); type detach in it")
}

fn strace() -> Row {
    let scratch = Scratch::new("real-strace");
    traced(&scratch, &["strace", "-o", "out", "sleep", "1000"], "strace", "(strace); end it with")
}

fn traced(scratch: &Scratch, words: &[&str], name: &'static str, expected: &str) -> Row {
    let mut job = Job::start(scratch, None, words);
    until_true("its program runs", || {
        process::tree(job.pid()).into_keys().any(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "sleep\n")
                && process::state(pid) == Some('S')
        })
    });
    let outcome = refusal(&mut job, &[], expected);
    let version: &'static [&'static str] =
        if name == "gdb" { &["gdb", "--version"] } else { &["strace", "--version"] };
    Row { name, version, how: "a program that it has started", outcome }
}
