//! What is moved elsewhere: a database under load, a walk through a graph, hundreds of processes, and a program that changes
//! what it has. Whoever uses them verifies what it gets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs::{self, File};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::world::{V4, World, host_at, migrate_from};
use support::{Counter, Host, Killed, judge, wait_until};
use torpor_runtimes_tests::mounts::QUIET;

const MODES: [&str; 5] = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];

/// How many of something there are: fewer where not everything is tested at length.
fn at_length(long: u32, short: u32) -> String {
    let is_long = std::env::var_os("TORPOR_LONG").is_some();
    if is_long { long } else { short }.to_string()
}

/// A program that counts moves in each mode, and goes on.
fn moves(program: &'static str, words: &[&str]) {
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let mut counter = Counter::start_program(&["setsid"], program, words);
        let report = here.moves(counter.pid, mode, &there.address);
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
        let pid = i32::try_from(report["pid"].as_i64().unwrap()).unwrap();
        assert_eq!(counter.running(), [(pid, true)], "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
    }
}

#[test]
fn a_walk_through_a_graph_moves() {
    // 16 MiB of nodes; of 8 that it visits it changes one.
    moves("walker", &["262144", "8"]);
}

#[test]
fn hundreds_of_processes_move() {
    moves("ring", &[&at_length(500, 60)]);
}

/// What it has at first is gone later, and other things are there, whose content it knows: descriptors, a mapping, a thread
/// and a child.
const CHANGED: &str = "\
import mmap, os, sys, threading, time
os.chdir(sys.argv[1])
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
def mapping(): return mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
first, old = os.open('first', os.O_RDWR | os.O_CREAT), mapping()
os.dup2(first, 100)
old[:] = b'gone' * (1 << 18)
os.mkdir('begun')
wait('change')
old.close(); os.close(100); os.close(first)
second, new = os.open('second', os.O_RDWR | os.O_CREAT), mapping()
os.write(second, b'before ')
new[:] = b'more' * (1 << 18)
end, own = os.pipe()
child = os.fork()
if not child:
    os.close(own); os.read(end, 1); os._exit(7)
ticks = 0
def tick():
    global ticks
    while True: ticks += 1; time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
os.mkdir('changed')
wait('go')
os.write(second, b'after')
before = ticks
while ticks < before + 5: time.sleep(0.001)
os.close(own)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
wrong = len(new[:].replace(b'more', b''))
print(code, wrong, os.path.exists('/proc/self/fd/100'), file=open('new', 'w'))
os.rename('new', 'done')
wait('killed')
";

/// A tree is built there by the first round, and follows what has changed since.
#[test]
fn what_comes_and_goes_after_it_was_built_is_followed() {
    for mode in ["pipelined", "hybrid"] {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut program = Command::new("setsid");
        program.args(["python3", "-c", CHANGED]).arg(dir.path()).stdin(Stdio::null());
        let mut program = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let killed = Killed(program.id().cast_signed());
        wait_until("it has begun", || path("begun").exists());
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        // It changes between the rounds: the first one has arrived when the second one begins.
        let rounds = format!(
            "test $CRTOOLS_SCRIPT_ACTION != pre-dump || {{ cd {}; \
             if test -e once; then touch change; until test -e changed; do sleep 0.01; done; fi; touch once; }}",
            dir.path().display()
        );
        let (pid, rounds) = (killed.0.to_string(), format!("--dump-option={rounds}"));
        let mut migrate = here.migrate(&["--pid", &pid, "--mode", mode, "--max-downtime", "0"]);
        migrate.args(["--max-rounds", "2", "--dump-option=--action-script", &rounds, "--json"]);
        let report = judge(&migrate.arg(&there.address).output().unwrap());
        let report = report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        let _moved = Killed(i32::try_from(report["pid"].as_i64().unwrap()).unwrap());
        assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
        drop(killed);
        program.wait().unwrap();
        fs::write(path("go"), "").unwrap();
        wait_until("it has seen what it has", || path("done").exists());
        assert_eq!(fs::read_to_string(path("done")).unwrap(), "7 0 False\n", "{mode}");
        assert_eq!(fs::read_to_string(path("second")).unwrap(), "before after", "{mode}");
    }
}

/// MariaDB, with four clients whose connections stay.
#[test]
fn mariadb_moves_under_sysbench() {
    let found = ["mariadbd", "sysbench"].map(|it| Command::new(it).arg("--version").output());
    if found.iter().any(Result::is_err) {
        println!("left out: mariadb_moves_under_sysbench (there is no MariaDB, or no sysbench)");
        return;
    }
    let modes = if std::env::var_os("TORPOR_LONG").is_some() { &MODES[..] } else { &MODES[2..3] };
    for mode in modes {
        mariadb_moves(mode);
    }
}

/// Its files are in memory, which moves along: on a disk that both hosts see, those here would keep its locks.
const SERVER: &str = "mount -t tmpfs tmpfs $0 && \
    mariadbd \"$@\" --bootstrap </dev/null >&2 && \
    exec mariadbd \"$@\" --skip-grant-tables --bind-address=0.0.0.0 --port=3306";

fn mariadb_moves(mode: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let data = path("data");
    fs::create_dir(&data).unwrap();
    let (in_data, socket) = (format!("--datadir={data}"), format!("--socket={data}/socket"));
    let options = ["--no-defaults", "--user=root", "--innodb-log-file-size=8M", &in_data, &socket];
    let world = World::new();
    let script = format!("{QUIET}; {SERVER}");
    let start = ["unshare", "--mount", "sh", "-c", &script, &data];
    let mut service = world.service(&[&start[..], &options].concat());
    let client = |program: &str| {
        let mut command = Command::new("nsenter");
        command.args([&world.client.inside(), program]).stdin(Stdio::null());
        command
    };
    let query = |text: &str| {
        let mut client = client("mariadb");
        client.args(["--no-defaults", &format!("--host={V4}"), "--batch", "-N", "-e", text]);
        client.output().unwrap()
    };
    wait_until("the server answers", || query("CREATE DATABASE sbtest").status.success());
    let sysbench = |action: &str| {
        let mut command = client("sysbench");
        command.arg("oltp_read_write");
        command.args([&format!("--mysql-host={V4}"), "--mysql-user=root", "--threads=4"]);
        command.args(["--tables=2", "--table-size=2000", "--time=0", "--events=0"]);
        command.args(["--report-interval=1", action]);
        command
    };
    let output = sysbench("prepare").output().unwrap();
    assert!(output.status.success(), "{mode}: {output:?}");
    let log = File::create(path("log")).unwrap();
    let mut run = sysbench("run");
    run.stdout(log.try_clone().unwrap()).stderr(log);
    let mut run = run.spawn().unwrap();
    let said = || fs::read_to_string(path("log")).unwrap();
    let transactions = || {
        let status = query("SHOW GLOBAL STATUS LIKE 'Com_commit'").stdout;
        let number = String::from_utf8(status).unwrap();
        number.split_whitespace().last().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0)
    };
    let mut goes_on = || {
        let goal = transactions() + 20;
        wait_until("transactions are made", || {
            assert!(run.try_wait().unwrap().is_none(), "{mode}: {}", said());
            transactions() >= goal
        });
    };
    goes_on();
    let (here, mut there) = (Host::new(), host_at(&world.there, &[]).with_quiet_mounts());
    there.start_agent();
    let args = ["--mode", mode, "--json", &there.address];
    let output = migrate_from(&world.here, &here, service.pid(), &args).output().unwrap();
    let report = judge(&output).unwrap_or_else(|e| panic!("{mode}: {e}\n{}", there.log()));
    // Its files have changed since it was built.
    assert!(!there.log().contains("built anew"), "{mode}: {}", there.log());
    wait_until("it has ended here", || service.0.try_wait().unwrap().is_some());
    goes_on();
    run.kill().unwrap();
    run.wait().unwrap();
    // None of the clients has lost its connection.
    let reports = said();
    let mut reports = reports.lines().filter(|line| line.contains("reconn/s:"));
    assert!(reports.all(|line| line.ends_with("reconn/s: 0.00")), "{mode}: {}", said());
    let check =
        query("CHECK TABLE sbtest.sbtest1, sbtest.sbtest2; SELECT COUNT(*) FROM sbtest.sbtest1");
    let check = String::from_utf8(check.stdout).unwrap();
    assert!(check.matches("\tOK").count() == 2 && check.ends_with("\n2000\n"), "{mode}: {check}");
    let pid = i32::try_from(report["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}
