//! How tasks come back: running, stopped or frozen; and what is said meanwhile.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod sleeper;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use elf::ElfBytes;
use elf::endian::LittleEndian;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use sleeper::{Client, Sleeper, criu, request, wait_until, write_script};
use torpor_images::proto::{CoreEntry, CriuOpts, CriuReqType, InventoryEntry, StatsEntry};
use torpor_images::{ImageDir, kind};
use torpor_sys::process::wait;

/// A way to freeze a group: where its hierarchy may be mounted, the file, and what it says of frozen and other
/// groups.
struct Freezer {
    roots: &'static [&'static str],
    file: &'static str,
    words: [&'static str; 2],
}

const SPLIT: Freezer = Freezer {
    roots: &["/sys/fs/cgroup/freezer"],
    file: "freezer.state",
    words: ["FROZEN", "THAWED"],
};

const UNIFIED: Freezer = Freezer {
    roots: &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
    file: "cgroup.freeze",
    words: ["1", "0"],
};

/// A cgroup that can be frozen, which is thawed and removed in the end.
struct Group {
    dir: PathBuf,
    freezer: &'static Freezer,
}

impl Group {
    /// `None`, and a word about it, on a host without this freezer.
    fn new(name: &str, freezer: &'static Freezer) -> Option<Self> {
        let mut roots = freezer.roots.iter().map(Path::new);
        let Some(root) = roots.find(|root| root.join("cgroup.procs").exists()) else {
            println!("SKIPPED {name}: there is no {} here", freezer.file);
            return None;
        };
        let dir = root.join(format!("torpor-test-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Some(Self { dir, freezer })
    }

    fn put(&self, pid: i32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    fn freeze(&self) {
        fs::write(self.dir.join(self.freezer.file), self.freezer.words[0]).unwrap();
    }

    fn thaw(&self) {
        fs::write(self.dir.join(self.freezer.file), self.freezer.words[1]).unwrap();
    }

    /// The file of version 2 says what was asked for, and another one what has become of it.
    fn is_frozen(&self) -> bool {
        let events = fs::read_to_string(self.dir.join("cgroup.events"));
        let state = fs::read_to_string(self.dir.join(self.freezer.file)).unwrap();
        state.trim() == self.freezer.words[0]
            && events.map_or(true, |text| text.lines().any(|line| line == "frozen 1"))
    }

    fn has(&self, pid: i32) -> bool {
        let all = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap();
        all.lines().any(|line| line == pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.dir.join(self.freezer.file), self.freezer.words[1]);
        let procs = || fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        for pid in procs().lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        wait_until(|| procs().is_empty());
        fs::remove_dir(&self.dir).unwrap();
    }
}

fn status(pid: i32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.trim_start_matches(':').trim().to_owned()
}

#[test]
fn a_hook_may_freeze_the_tasks_before_they_run() {
    freezes_in_a_hook(&SPLIT);
}

#[test]
fn a_hook_may_freeze_the_tasks_by_the_unified_freezer() {
    freezes_in_a_hook(&UNIFIED);
}

fn freezes_in_a_hook(freezer: &'static Freezer) {
    let Some(group) = Group::new("hook", freezer) else { return };
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let script = task.dir.path().join("hook");
    let text = format!(
        "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = pre-resume ] || exit 0\n\
         echo $CRTOOLS_INIT_PID >{0}/cgroup.procs && echo {1} >{0}/{2}\n",
        group.dir.display(),
        freezer.words[0],
        freezer.file
    );
    write_script(&script, &text);
    let output = task.restore(&["-d", "--action-script", script.to_str().unwrap()]).output();
    assert!(output.unwrap().status.success(), "{}", task.log("restore.log"));
    wait_until(|| group.is_frozen());
    assert_eq!(status(task.pid, "TracerPid"), "0");
    group.thaw();
    assert!(task.lives());
}

#[test]
fn what_was_paused_comes_back_paused() {
    comes_back_paused(&SPLIT);
}

#[test]
fn what_was_paused_by_the_unified_freezer_comes_back_paused() {
    comes_back_paused(&UNIFIED);
}

fn comes_back_paused(freezer: &'static Freezer) {
    let Some(group) = Group::new("paused", freezer) else { return };
    let task = Sleeper::start();
    group.put(task.pid);
    group.freeze();
    wait_until(|| group.is_frozen());
    let place = group.dir.to_str().unwrap();
    task.put_to_sleep(&["--freeze-cgroup", place, "--manage-cgroups=soft"]);
    group.thaw();
    let output = task.restore(&["-d", "--manage-cgroups=soft"]).output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert!(group.has(task.pid));
    wait_until(|| group.is_frozen());
    group.thaw();
    assert!(task.lives());
}

/// A program whose child waits for a file before it runs another, and which waits for that.
const VFORK: &str = "#include <unistd.h>
int main(int argc, char **argv)
{
	if (vfork() == 0) {
		while (access(argv[1], F_OK) != 0)
			;
		execl(\"/bin/sleep\", \"sleep\", \"1000\", NULL);
		_exit(1);
	}
	for (;;)
		pause();
}
";

#[test]
fn a_child_of_vfork_is_let_go_for_its_parent_to_stop() {
    for freezer in [&SPLIT, &UNIFIED] {
        let Some(group) = Group::new("vfork", freezer) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let [source, program, ready] = ["vfork.c", "sleep", "go"].map(|name| dir.path().join(name));
        fs::write(&source, VFORK).unwrap();
        let compiled = Command::new("cc").args([&source, Path::new("-o"), &program]).status();
        assert!(compiled.unwrap().success());
        let task = Sleeper::start_as(&[program.to_str().unwrap(), ready.to_str().unwrap()]);
        wait_until(|| child_of(task.pid).is_some());
        let child = child_of(task.pid).unwrap();
        for pid in [task.pid, child] {
            group.put(pid);
        }
        group.freeze();
        // A parent in vfork is not frozen by the unified freezer, but its child is.
        wait_until(|| !status(child, "State").starts_with('R'));
        fs::write(&ready, "").unwrap();
        let place = group.dir.to_str().unwrap();
        let output = task.dump(&["--freeze-cgroup", place, "--manage-cgroups=ignore", "-R"]);
        assert!(output.status.success(), "{}", task.log("dump.log"));
        wait_until(|| group.is_frozen());
        let [ran, sleep] =
            [format!("/proc/{child}/exe").as_str(), "/bin/sleep"].map(fs::canonicalize);
        assert_eq!(ran.unwrap(), sleep.unwrap());
    }
}

fn child_of(pid: i32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().next()?.parse().ok()
}

/// A server of Unix sockets that serves one connection after the other, and clients each of which is a
/// process for a moment.
const SERVED: &str = r#"
import os, socket, sys
os.chdir(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind("server")
listener.listen(16)
if os.fork() == 0:
    while True:
        with listener.accept()[0] as connection:
            connection.recv(1)
            connection.send(b"!")
listener.close()
for client in range(3):
    if os.fork():
        continue
    while True:
        pid = os.fork()
        if pid == 0:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect("server")
                connection.send(b"?")
                os._exit(connection.recv(1) != b"!")
        assert os.waitpid(pid, 0)[1] == 0
with open("/proc/self/comm", "w") as file:
    file.write("sleep")
os.wait()
"#;

/// All processes of a session, which end with this.
struct Session(i32);

impl Drop for Session {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_raw(self.0).unwrap(), Signal::KILL);
    }
}

#[test]
fn connections_of_clients_that_are_just_born_are_accepted_first() {
    let dir = tempfile::tempdir().unwrap();
    let task = Sleeper::start_as(&["python3", "-c", SERVED, dir.path().to_str().unwrap()]);
    let _session = Session(task.pid);
    for _ in 0..30 {
        assert!(task.dump(&["-R"]).status.success(), "{}", task.log("dump.log"));
    }
    assert!(task.lives());
}

#[test]
fn tasks_wait_frozen_for_whoever_thaws_them() {
    let Some(group) = Group::new("wake", &SPLIT) else { return };
    let task = Sleeper::start();
    group.put(task.pid);
    task.put_to_sleep(&["--manage-cgroups=soft"]);
    let output = task.restore(&["-d", "--manage-cgroups=soft", "--wake-frozen"]).output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert!(group.has(task.pid));
    wait_until(|| group.is_frozen());
    assert_eq!(status(task.pid, "TracerPid"), "0");
    group.thaw();
    assert!(task.lives());
}

#[test]
fn a_client_gets_its_tasks_frozen() {
    let Some(group) = Group::new("client", &SPLIT) else { return };
    let task = Sleeper::start();
    group.put(task.pid);
    task.put_to_sleep(&["--manage-cgroups=soft"]);
    let dir = fs::File::open(task.dir.path()).unwrap();
    let mut client = Client::start();
    let opts = CriuOpts {
        images_dir_fd: std::os::fd::AsRawFd::as_raw_fd(&dir),
        images_dir: Some(task.images().to_owned()),
        manage_cgroups: Some(true),
        torpor_option: vec!["wake-frozen".to_owned()],
        ..CriuOpts::default()
    };
    let response = client.ask(&request(CriuReqType::Restore, opts), "");
    assert!(response.success, "{response:?}");
    assert!(group.has(task.pid));
    wait_until(|| group.is_frozen());
    assert_eq!(status(task.pid, "TracerPid"), "0");
    client.finish();
    group.thaw();
    assert!(task.lives());
}

/// The list of devices of a group of version 1.
const DEVICES: Freezer =
    Freezer { roots: &["/sys/fs/cgroup/devices"], file: "devices.list", words: ["", ""] };

/// The kernel takes one entry at a time.
#[test]
fn a_group_is_made_again_with_each_device_that_it_allowed() {
    let Some(group) = Group::new("devices", &DEVICES) else { return };
    let list = || fs::read_to_string(group.dir.join("devices.list")).unwrap();
    fs::write(group.dir.join("devices.deny"), "a").unwrap();
    for entry in ["c 1:3 rwm", "c 1:5 r", "b 7:* rm"] {
        fs::write(group.dir.join("devices.allow"), entry).unwrap();
    }
    let allowed = list();
    assert_eq!(allowed.lines().count(), 3, "{allowed}");
    let task = Sleeper::start();
    group.put(task.pid);
    task.put_to_sleep(&["--manage-cgroups=soft"]);
    fs::remove_dir(&group.dir).unwrap();
    let output = task.restore(&["-d", "--manage-cgroups=soft"]).output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert!(group.has(task.pid));
    assert_eq!(list(), allowed);
}

#[test]
fn tasks_that_share_our_groups_are_not_frozen() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let output = task.restore(&["-d", "--wake-frozen"]).output().unwrap();
    assert!(!output.status.success());
    assert!(
        task.log("restore.log").contains("--wake-frozen of task"),
        "{}",
        task.log("restore.log")
    );
    assert!(!task.lives());
}

#[test]
fn a_client_gets_its_tasks_stopped() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let dir = fs::File::open(task.dir.path()).unwrap();
    let mut client = Client::start();
    let opts = CriuOpts {
        images_dir_fd: std::os::fd::AsRawFd::as_raw_fd(&dir),
        images_dir: Some(task.images().to_owned()),
        leave_stopped: Some(true),
        ..CriuOpts::default()
    };
    let response = client.ask(&request(CriuReqType::Restore, opts), "");
    assert!(response.success, "{response:?}");
    wait_until(|| status(task.pid, "State").starts_with('T'));
    kill_process(Pid::from_raw(task.pid).unwrap(), Signal::CONT).unwrap();
    wait_until(|| status(task.pid, "State").starts_with('S'));
    assert!(task.lives());
    client.finish();
}

/// What a worker answers, which has a socket for nothing but its client and must say nothing elsewhere.
fn asked(kind: CriuReqType, opts: CriuOpts) -> torpor_images::proto::CriuResp {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
    let flags = SocketFlags::CLOEXEC;
    let (socket, other) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let mut server = criu(&["swrk", "0"])
        .stdin(other)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let packet = prost::Message::encode_to_vec(&request(kind, opts));
    send(&socket, &packet, SendFlags::NOSIGNAL).unwrap();
    let mut answer = vec![0; 1 << 16];
    let flags = rustix::net::RecvFlags::empty();
    let (_, len) = rustix::net::recv(&socket, answer.as_mut_slice(), flags).unwrap();
    drop(socket);
    let answer: torpor_images::proto::CriuResp = prost::Message::decode(&answer[..len]).unwrap();
    assert_eq!(server.wait().unwrap().success(), answer.success);
    let mut said = String::new();
    server.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    server.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
    answer
}

#[test]
fn the_worker_of_a_client_says_nothing_elsewhere() {
    let opts = CriuOpts { images_dir: Some("/nonexistent".to_owned()), ..CriuOpts::default() };
    let answer = asked(CriuReqType::Restore, opts);
    assert!(!answer.success && answer.cr_errmsg().contains("/nonexistent"), "{answer:?}");
}

/// Its warnings are in the log.
#[test]
fn the_worker_of_a_client_warns_in_its_log() {
    let task = Sleeper::start();
    let config = task.dir.path().join("config");
    fs::write(&config, "cow\n").unwrap();
    let opts = CriuOpts {
        images_dir: Some(task.images().to_owned()),
        log_file: Some("worker.log".to_owned()),
        log_level: Some(2),
        ..CriuOpts::default()
    };
    let dump = CriuOpts {
        pid: Some(task.pid),
        config_file: config.to_str().map(str::to_owned),
        ..opts.clone()
    };
    let answer = asked(CriuReqType::Dump, dump);
    assert!(answer.success, "{answer:?}");
    let log = task.log("worker.log");
    assert!(log.contains("--cow has no effect"), "{log}");
    wait(task.pid, true).unwrap();
    // It has only run on a processor that no machine has.
    let (images, id) = (ImageDir::open(task.dir.path()).unwrap(), task.pid.cast_unsigned());
    let mut core: CoreEntry = images.read_one(kind::CORE, id.into()).unwrap();
    let mut processors = vec![0; 128];
    processors[127] = 128;
    core.thread_core.as_mut().unwrap().torpor_affinity = Some(processors);
    fs::remove_file(task.dir.path().join(format!("core-{id}.img"))).unwrap();
    images.write_one(kind::CORE, id.into(), &core).unwrap();
    let answer = asked(CriuReqType::Restore, opts);
    assert!(answer.success && task.lives(), "{answer:?}");
    let log = task.log("worker.log");
    assert!(log.contains("none of the processors that it ran on is here"), "{log}");
}

#[test]
fn features_are_said_to_be_supported() {
    let said = |args: &[&str]| {
        let output = criu(args).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (_, names) = said(&["check", "--feature", "list"]);
    let known = names.split_whitespace().filter(|name| {
        let (success, text) = said(&["-verbosity=0", "check", "--feature", name]);
        assert_eq!(success, text == format!("{name} is supported\n"), "{name}: {text}");
        success
    });
    assert!(known.count() > 0, "{names}");
}

#[test]
fn counters_of_shared_pages_are_always_there() {
    let task = Sleeper::start();
    let pid = task.pid.to_string();
    let output = criu(&["pre-dump", "-t", &pid, "-D", task.images()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let images = ImageDir::open(task.dir.path()).unwrap();
    let stats: StatsEntry = images.read_one(kind::STATS_DUMP, 0).unwrap();
    let stats = stats.dump.unwrap();
    let shared = [stats.shpages_scanned, stats.shpages_skipped_parent, stats.shpages_written];
    assert_eq!(shared, [Some(0); 3]);
    assert_eq!((stats.page_pipes, stats.irmap_resolve), (Some(0), Some(0)));
}

/// Asks all functions of its vDSO when it is told to, and compares with the system calls.
const CLOCKS: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile sig_atomic_t asked;
static void ask(int s) { asked = s; }
int main(int argc, char **argv) {
	sigset_t none, one;
	struct timespec a, b, res;
	struct timeval tv;
	unsigned cpu, node;
	int bad = 0;
	(void)argc;
	clock_gettime(CLOCK_MONOTONIC, &a), gettimeofday(&tv, 0), time(0), getcpu(&cpu, &node);
	sigemptyset(&none), sigemptyset(&one), sigaddset(&one, SIGUSR1);
	sigprocmask(SIG_BLOCK, &one, 0);
	signal(SIGUSR1, ask);
	FILE *ready = fopen(argv[2], "w");
	fclose(ready);
	while (!asked) sigsuspend(&none);
	for (int i = 0; i < 1000; i++) {
		syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &a);
		bad |= clock_gettime(CLOCK_MONOTONIC, &b) != 0;
		bad |= b.tv_sec < a.tv_sec || b.tv_sec > a.tv_sec + 600;
		bad |= (gettimeofday(&tv, 0) != 0) << 1 | (tv.tv_sec < time(0) - 600) << 2;
		bad |= (clock_getres(CLOCK_MONOTONIC, &res) != 0 || res.tv_nsec == 0) << 3;
		bad |= (getcpu(&cpu, &node) != 0) << 4;
	}
	FILE *f = fopen(argv[1], "w");
	fprintf(f, "%s %d\n", bad ? "bad" : "good", bad);
	fclose(f);
	for (;;) pause();
}
"#;

/// Makes a breakpoint of everything in the functions of a vDSO but their first bytes.
fn ruin(code: &mut [u8]) -> usize {
    let copy = code.to_vec();
    let file = ElfBytes::<LittleEndian>::minimal_parse(&copy).unwrap();
    let (symbols, _) = file.dynamic_symbol_table().unwrap().unwrap();
    let functions = symbols.iter().filter(|symbol| symbol.st_size > 16);
    functions
        .map(|symbol| {
            let start = usize::try_from(symbol.st_value).unwrap();
            let end = start + usize::try_from(symbol.st_size).unwrap();
            code[start + 8..end].fill(0xcc);
        })
        .count()
}

#[test]
#[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
fn the_vdso_of_another_kernel_leads_to_this_one() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    fs::write(place("clocks.c"), CLOCKS).unwrap();
    let built = Command::new("gcc")
        .args(["-O1", "-o"])
        .args([place("sleep"), place("clocks.c")])
        .status()
        .unwrap();
    assert!(built.success());
    let mut command = Command::new("setsid");
    command.arg(place("sleep")).args([place("result"), place("ready")]).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    wait_until(|| place("ready").exists());
    let task = Sleeper { dir: tempfile::tempdir().unwrap(), pid };
    task.put_to_sleep(&[]);
    let pages = task.dir.path().join("pages-1.img");
    let mut bytes = fs::read(&pages).unwrap();
    let is_vdso = |page: &[u8]| {
        page.starts_with(b"\x7fELF") && page.windows(10).any(|words| words == b"linux-vdso")
    };
    let at = bytes.chunks(4096).position(is_vdso).expect("the vDSO is among the pages") * 4096;
    // As long as that of this kernel.
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
    let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
    let number = |text| usize::from_str_radix(text, 16).unwrap();
    let len = number(end) - number(start);
    assert!(ruin(&mut bytes[at..at + len]) > 4);
    fs::write(&pages, bytes).unwrap();
    let output = task.restore(&["-d"]).output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert!(task.log("restore.log").contains("is of another kernel"));
    kill_process(Pid::from_raw(pid).unwrap(), Signal::USR1).unwrap();
    let result = || fs::read_to_string(place("result")).unwrap_or_default();
    wait_until(|| result().ends_with('\n') || !task.lives());
    assert_eq!(result(), "good 0\n");
    // And again: what leads there is dumped and restored like all else.
    fs::remove_file(place("result")).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until(|| !Path::new(&format!("/proc/{pid}")).exists());
}

/// What a dump does not write again is nothing that a restore could find.
#[test]
fn a_dump_leaves_nothing_of_the_one_before() {
    let task = Sleeper::start();
    assert!(task.dump(&["--leave-running"]).status.success(), "{}", task.log("dump.log"));
    let old = ["sk-queues.img", "core-9999.img", "seal.img"].map(|name| task.dir.path().join(name));
    for place in &old {
        fs::write(place, "of a dump before").unwrap();
    }
    task.put_to_sleep(&[]);
    assert!(old.iter().all(|place| !place.exists()));
    assert!(task.restore(&["-d"]).status().unwrap().success(), "{}", task.log("restore.log"));
    assert!(task.sleeps() || task.lives());
    task.kill();
}

/// A service manager has started it anew, say. What fails leaves what was there.
#[test]
fn a_path_where_another_program_listens_by_now_is_left_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listen = || UnixListener::bind(&path).unwrap();
    let task = Sleeper::start_with(&["sleep", "1000"], OwnedFd::from(listen()).into());
    task.put_to_sleep(&[]);
    fs::remove_file(&path).unwrap();

    let other = listen();
    let restores = |options: &[&str]| task.restore(options).status().unwrap().success();
    assert!(!restores(&["-d"]));
    let said = format!("{}: another program has a socket there", path.display());
    assert!(task.log("restore.log").contains(&said), "{}", task.log("restore.log"));
    UnixStream::connect(&path).unwrap();
    other.accept().unwrap();
    drop(other);
    fs::remove_file(&path).unwrap();

    let fails = ["-d", "--action-script", "[ $CRTOOLS_SCRIPT_ACTION != pre-resume ]"];
    assert!(!restores(&fails) && !path.exists());
    // One that nobody has any more.
    drop(listen());
    fs::set_permissions(&path, Permissions::from_mode(0o614)).unwrap();
    assert!(!restores(&fails));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o614);

    assert!(restores(&["-d"]), "{}", task.log("restore.log"));
    UnixStream::connect(&path).unwrap();
    assert_ne!(fs::metadata(&path).unwrap().mode() & 0o777, 0o614);
}

/// As by a runtime whose time is over. An unlinked file, and the directory that it was in, have names for the moment.
#[test]
fn a_restore_that_is_killed_leaves_no_names() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("gone");
    fs::create_dir(&gone).unwrap();
    let file = fs::File::create(gone.join("file")).unwrap();
    fs::remove_dir_all(&gone).unwrap();
    let task = Sleeper::start_with(&["sleep", "1000"], file.into());
    task.put_to_sleep(&[]);
    let seen = task.dir.path().join("seen");
    let kills = format!(
        "[ $CRTOOLS_SCRIPT_ACTION != pre-resume ] || {{ ls -A {} >{}; kill -9 $PPID; }}",
        gone.display(),
        seen.display()
    );
    let killed = task.restore(&["-d", "--action-script", &kills]).status().unwrap();
    assert_eq!(killed.signal(), Some(libc::SIGKILL), "{}", task.log("restore.log"));
    assert!(fs::read_to_string(seen).unwrap().starts_with(".torpor."));
    wait_until(|| !gone.exists());
    assert!(task.restore(&["-d"]).status().unwrap().success(), "{}", task.log("restore.log"));
    assert!(task.lives() && !gone.exists());
    task.kill();
}

/// A task with a file of two names, `gone` that was removed and `other`, to which the dump has given a name in the directory.
fn asleep_with_a_given_name() -> (tempfile::TempDir, Sleeper) {
    let dir = tempfile::tempdir().unwrap();
    let (gone, other) = (dir.path().join("gone"), dir.path().join("other"));
    let file = fs::File::create(&gone).unwrap();
    fs::hard_link(&gone, other).unwrap();
    fs::remove_file(&gone).unwrap();
    let task = Sleeper::start_with(&["sleep", "1000"], file.into());
    task.put_to_sleep(&["--link-remap"]);
    (dir, task)
}

/// Its name was there for the first restore.
#[test]
fn a_second_restore_with_a_file_of_a_given_name_says_why_it_fails() {
    let (dir, task) = asleep_with_a_given_name();
    let gone = dir.path().join("gone");
    assert!(task.restore(&["-d"]).status().unwrap().success(), "{}", task.log("restore.log"));
    task.kill();
    wait_until(|| !Path::new(&format!("/proc/{}", task.pid)).exists());
    assert!(!task.restore(&["-d"]).status().unwrap().success());
    let log = task.log("restore.log");
    assert!(log.contains("can be restored once only") && log.contains(gone.to_str().unwrap()));
}

/// Those of others could name what belongs to another checkpoint.
#[test]
fn only_images_of_this_host_have_names_removed_outside() {
    let (dir, task) = asleep_with_a_given_name();
    let changed = dir.path().join("changed");
    fs::create_dir(&changed).unwrap();
    for image in fs::read_dir(task.images()).unwrap().map(Result::unwrap) {
        fs::copy(image.path(), changed.join(image.file_name())).unwrap();
    }
    let images = ImageDir::open(&changed).unwrap();
    let inventory = images.inventory().unwrap();
    let run_id = Some("another".to_owned());
    let inventory = InventoryEntry { dump_criu_run_id: run_id, ..inventory };
    images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    // The other name of the file, and the one that the dump has given.
    let names = || {
        let names = fs::read_dir(dir.path()).unwrap().map(|name| name.unwrap());
        names.filter(|name| name.file_type().unwrap().is_file()).count()
    };
    let discard = |images: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
        assert!(command.args(["image", "discard", images]).status().unwrap().success());
    };
    discard(changed.to_str().unwrap());
    assert_eq!(names(), 2);
    discard(task.images());
    assert_eq!(names(), 1);
}

/// Whoever restores may have fewer files open at once, as root's shells are set up, than the tree has.
#[test]
fn a_tree_may_have_more_files_than_the_caller() {
    let open = "for ((i = 0; i < 80; i++)); do sleep 1000 & done
        for ((i = 0; i < 600; i++)); do exec {fd}</dev/null; done; exec sleep 1000";
    let server = Sleeper::start_as(&["bash", "-c", open]);
    let children = || {
        let children = format!("/proc/{0}/task/{0}/children", server.pid);
        let children = fs::read_to_string(children).unwrap();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<i32>>()
    };
    let limits = || fs::read_to_string(format!("/proc/{}/limits", server.pid)).unwrap();
    let family = children();
    assert_eq!(family.len(), 80);
    let before = limits();
    // The limits of whoever calls are those that it came with, and so are those of what it becomes.
    let few = |action: &str, log: &str, rest: &str| {
        let program = criu(&[]).get_program().to_str().unwrap().to_owned();
        let command = format!(
            "ulimit -Sn 128; exec -a criu \"$1\" {action} -D {} -o {log} -v4 {rest}",
            server.images()
        );
        let mut shell = Command::new("bash");
        shell.args(["-c", &command, "bash", &program]).env("HOME", "/nonexistent");
        shell
    };
    let dump = few(&format!("dump -t {}", server.pid), "dump.log", "").status().unwrap();
    assert!(dump.success(), "{}", server.log("dump.log"));
    wait(server.pid, true).unwrap();
    wait_until(|| !family.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()));
    let rest = "--exec-cmd -- sh -c 'ulimit -Sn; read line'";
    let mut restore = few("restore", "restore.log", rest);
    let mut restore = restore.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(restore.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "128\n", "{}", server.log("restore.log"));
    assert!(server.lives());
    assert_eq!(limits(), before);
    assert!(fs::read_dir(format!("/proc/{}/fd", server.pid)).unwrap().count() > 600);
    assert_eq!(children(), family);
    for child in family {
        kill_process(Pid::from_raw(child).unwrap(), Signal::KILL).unwrap();
    }
    server.kill();
    drop(restore.stdin.take());
    restore.wait().unwrap();
}
