//! Lazy migrations: the tasks run elsewhere while their pages are still in the tasks that were
//! dumped. Whoever is killed on the way: the tasks go on at one of the two places.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use torpor_images::pagemap::Pagemap;
use torpor_images::proto::{CriuOpts, CriuPageServerInfo, CriuReqType};
use torpor_images::{ImageDir, kind};

mod certificates;
mod keys;
mod memory;
mod sleeper;

use certificates::certificates;
use keys::seal;
use memory::{PAGES, Task};
use sleeper::{Client, name_of, request, wait_until};

const LOCAL: [&str; 2] = ["--address", "127.0.0.1"];

/// A task that is being moved: to another pid namespace, which is as good as another host.
struct Migration {
    task: Task,
    dump: Child,
    port: String,
    daemon: Option<Child>,
    restore: Option<Child>,
}

impl Migration {
    /// Dumps a task, up to where the restore is waited for.
    fn start(args: &[&str]) -> Self {
        Self::of(Task::start(PAGES), args)
    }

    fn of(task: Task, args: &[&str]) -> Self {
        let pid = task.pid.to_string();
        let mut dump = task.command(&["dump", "--lazy-pages", "-t", &pid], "dump.log");
        dump.args(LOCAL).args(["--port", "0"]).args(args).stdout(Stdio::piped());
        let mut dump = dump.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(dump.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("PORT: ").expect("the dump listens").to_owned();
        Self { task, dump, port, daemon: None, restore: None }
    }

    fn start_daemon(&mut self, args: &[&str]) {
        let mut daemon = self.task.command(&["lazy-pages", "--page-server"], "lazy.log");
        let daemon = daemon.args(LOCAL).args(["--port", &self.port]).args(args).spawn();
        self.daemon = Some(daemon.unwrap());
    }

    fn serve(&mut self, args: &[&str]) {
        self.start_daemon(args);
        wait_until(|| self.task.path("lazy-pages.socket").exists());
    }

    fn start_restore(&mut self, args: &[&str]) {
        let inner = self.task.command(&["restore", "--lazy-pages"], "restore.log");
        let mut restore = Command::new("unshare");
        restore.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
        restore.arg(inner.get_program()).args(inner.get_args()).args(args);
        // What the task leaves behind when it ends is nobody's but the first process's.
        restore.stdin(Stdio::null()).process_group(0);
        self.restore = Some(restore.spawn().unwrap());
    }

    fn restore(&mut self, args: &[&str]) {
        self.start_restore(args);
        wait_until(|| {
            let ended = self.restore.as_mut().unwrap().try_wait().unwrap().is_some();
            assert!(!ended, "{}", self.logs());
            self.task.log("restore.log").contains("Tasks resumed")
        });
    }

    fn logs(&self) -> String {
        ["dump.log", "lazy.log", "restore.log"].map(|log| self.task.log(log)).join("\n")
    }

    /// The task is elsewhere now, and whole.
    fn arrives(&mut self) {
        let found = self.task.look();
        assert_eq!(found, format!("ok {PAGES}\n"), "{}", self.logs());
        assert!(self.restore.take().unwrap().wait().unwrap().success(), "{}", self.logs());
        if let Some(mut daemon) = self.daemon.take() {
            assert!(daemon.wait().unwrap().success(), "{}", self.logs());
        }
        assert!(self.dump.wait().unwrap().success(), "{}", self.logs());
        assert!(self.task.is_gone());
    }

    /// The task has stayed where it was: nothing is left elsewhere, nor of the dump.
    fn stays(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            assert!(!daemon.wait().unwrap().success(), "{}", self.logs());
        }
        if let Some(mut restore) = self.restore.take() {
            restore.wait().unwrap();
        }
        assert!(!self.dump.wait().unwrap().success(), "{}", self.logs());
        assert_eq!(self.task.look(), format!("ok {PAGES}\n"), "{}", self.logs());
        assert!(!self.task.path("lazy-pages.socket").exists());
    }

    /// Listens to what the dump says to the daemon.
    fn overhear(&mut self) -> std::thread::JoinHandle<Vec<u8>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port =
            std::mem::replace(&mut self.port, listener.local_addr().unwrap().port().to_string());
        std::thread::spawn(move || {
            let daemon = listener.accept().unwrap().0;
            let mut dump = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
            let ends = (daemon.try_clone().unwrap(), dump.try_clone().unwrap());
            std::thread::spawn(move || forward(&ends.0, &ends.1, Duration::ZERO));
            let (mut daemon, mut heard) = (daemon, Vec::new());
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(len @ 1..) = dump.read(&mut buffer) {
                heard.extend_from_slice(&buffer[..len]);
                daemon.write_all(&buffer[..len]).unwrap();
            }
            heard
        })
    }

    /// Puts a slow line between the daemon and the dump: a restore needs few pages, and when it
    /// is done there are many still to come.
    fn slow_down(&mut self) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dump = TcpStream::connect(format!("127.0.0.1:{}", self.port)).unwrap();
        self.port = listener.local_addr().unwrap().port().to_string();
        std::thread::spawn(move || {
            let daemon = listener.accept().unwrap().0;
            let ends = (daemon.try_clone().unwrap(), dump.try_clone().unwrap());
            std::thread::spawn(move || forward(&ends.0, &ends.1, Duration::ZERO));
            forward(&dump, &daemon, Duration::from_millis(20));
        });
    }
}

fn forward(mut from: &TcpStream, mut to: &TcpStream, pause: Duration) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        std::thread::sleep(pause);
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

impl Drop for Migration {
    fn drop(&mut self) {
        let others = [&mut self.daemon, &mut self.restore].into_iter().flatten();
        for child in others.chain([&mut self.dump]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn memory_comes_from_the_dump() {
    let mut migration = Migration::start(&[]);
    let images = ImageDir::open(migration.task.dir.path()).unwrap();
    let id = u64::from(migration.task.pid.cast_unsigned());
    let map = Pagemap::read(&images, kind::PAGEMAP, id).unwrap();
    let lazy = map.runs.iter().filter(|run| run.lazy && !run.present);
    assert!(lazy.map(|run| run.pages).sum::<u64>() > PAGES / 2);
    assert!(map.present_bytes() < PAGES * 4096 / 4);
    migration.serve(&[]);
    migration.restore(&[]);
    migration.arrives();
    assert!(migration.task.log("lazy.log").contains("All pages are in place"));
}

#[test]
fn a_restore_fetches_the_pages_itself() {
    let mut migration = Migration::start(&[]);
    let port = migration.port.clone();
    // Its pager would end with the pid namespace that it is in: the task waits for its gate.
    migration.restore(&["--page-server", "--address", "127.0.0.1", "--port", &port]);
    assert!(migration.dump.wait().unwrap().success(), "{}", migration.logs());
    migration.arrives();
}

#[test]
fn the_connection_is_encrypted() {
    let keys = tempfile::tempdir().unwrap();
    let tls = certificates(keys.path());
    let tls: Vec<&str> = tls.iter().map(String::as_str).collect();
    let mut migration = Migration::start(&tls);
    migration.serve(&tls);
    migration.restore(&[]);
    migration.arrives();
}

/// Of a plain dump pages can be overheard, of a sealed one they cannot; with a round before it
/// that is compressed.
#[test]
fn pages_of_a_sealed_dump_are_sealed_on_their_way() {
    // The beginning of a page, as the task has it.
    let plain = 0x9e37_79b9_7f4a_7c15_u64.to_le_bytes();
    for is_sealed in [false, true] {
        let task = Task::start(PAGES);
        let seal = seal(task.dir.path());
        let seal = seal.each_ref().map(String::as_str);
        let seal = if is_sealed { &seal[..] } else { &[] };
        let (pid, round) = (task.pid.to_string(), task.path("round"));
        fs::create_dir(&round).unwrap();
        let mut first = sleeper::criu(&["pre-dump", "--compress", "lz4", "-t", &pid, "-D"]);
        assert!(first.arg(&round).args(seal).status().unwrap().success());
        let args =
            if is_sealed { [seal, &["--prev-images-dir", "round"]].concat() } else { vec![] };
        let mut migration = Migration::of(task, &args);
        let heard = migration.overhear();
        let identity = &seal[..seal.len().min(2)];
        migration.serve(identity);
        migration.restore(identity);
        migration.arrives();
        let heard = heard.join().unwrap();
        let found = heard.windows(8).any(|part| part == plain);
        assert!(found != is_sealed, "{} bytes", heard.len());
    }
}

/// Asked for, pages are compressed whatever the connection is, sealed ones before they are sealed.
#[test]
fn pages_are_compressed_on_their_way() {
    for (is_sealed, method) in [(false, "lz4"), (true, "zstd:3")] {
        let task = Task::start(PAGES);
        let seal = seal(task.dir.path());
        let seal = seal.each_ref().map(String::as_str);
        let seal = if is_sealed { &seal[..] } else { &[] };
        let mut migration = Migration::of(task, &[seal, &["--compress", method]].concat());
        let heard = migration.overhear();
        let identity = &seal[..seal.len().min(2)];
        migration.serve(identity);
        migration.restore(identity);
        migration.arrives();
        let heard = heard.join().unwrap().len() as u64;
        assert!(heard < PAGES * 4096 / 2, "{heard} bytes");
        let log = migration.task.log("dump.log");
        assert!(log.contains("bytes of pages to"), "{log}");
    }
}

#[test]
fn a_dump_of_other_images_serves_nothing() {
    let (mut migration, mut other) = (Migration::start(&[]), Migration::start(&[]));
    migration.port.clone_from(&other.port);
    migration.start_daemon(&[]);
    assert!(!migration.daemon.take().unwrap().wait().unwrap().success());
    other.stays();
    let log = other.task.log("dump.log");
    assert!(log.contains("the restore on the other end has other images"), "{log}");
    signal(&migration.dump, Signal::TERM);
    migration.stays();
}

/// Nor does one keep the tasks from going where they are to go: not one with another certificate, nor one that says nothing.
#[test]
fn a_stranger_gets_nothing() {
    let keys = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [own, strange] = [0, 1].map(|i| certificates(keys[i].path()));
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let strange: Vec<&str> = strange.iter().map(String::as_str).collect();
    let mut migration = Migration::start(&own);
    let _silent = TcpStream::connect(format!("127.0.0.1:{}", migration.port)).unwrap();
    migration.start_daemon(&strange);
    assert!(!migration.daemon.take().unwrap().wait().unwrap().success());
    migration.serve(&own);
    migration.restore(&[]);
    migration.arrives();
}

#[test]
fn rounds_are_fetched_where_they_are() {
    let task = Task::start(PAGES);
    let (pid, round) = (task.pid.to_string(), task.path("round"));
    fs::create_dir(&round).unwrap();
    let mut first = sleeper::criu(&["pre-dump", "-t", &pid, "-D"]);
    assert!(first.arg(&round).status().unwrap().success());
    let mut migration = Migration::of(task, &["--prev-images-dir", "round"]);
    migration.serve(&[]);
    migration.restore(&[]);
    migration.arrives();
}

#[test]
fn a_dump_that_is_killed_keeps_the_task() {
    let mut migration = Migration::start(&[]);
    migration.slow_down();
    migration.serve(&[]);
    migration.restore(&[]);
    signal(&migration.dump, Signal::KILL);
    migration.stays();
    assert!(migration.task.log("lazy.log").contains("the tasks are killed"));
}

/// Of the two processes that bring pages in the first or the second.
fn daemon_killed(pager: bool) {
    let mut migration = Migration::start(&[]);
    migration.slow_down();
    migration.serve(&[]);
    migration.restore(&[]);
    let daemon = migration.daemon.as_ref().unwrap().id();
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
    let child: i32 = children.trim().parse().unwrap();
    assert_eq!(name_of(child).unwrap(), "torpor-pager");
    let victim = if pager { child } else { daemon.cast_signed() };
    kill_process(Pid::from_raw(victim).unwrap(), Signal::KILL).unwrap();
    migration.stays();
}

#[test]
fn a_pager_that_is_killed_leaves_the_task_where_it_was() {
    daemon_killed(true);
}

#[test]
fn so_does_a_daemon() {
    daemon_killed(false);
}

#[test]
fn a_restore_that_fails_leaves_the_task_where_it_was() {
    let mut migration = Migration::start(&[]);
    migration.serve(&[]);
    // It has everything by then.
    let script = "test $CRTOOLS_SCRIPT_ACTION != post-restore || { sleep 1; false; }";
    migration.start_restore(&["--action-script", script]);
    migration.stays();
    assert!(migration.task.log("lazy.log").contains("the restore has failed"));
}

#[test]
fn what_is_elsewhere_is_not_restored_at_once() {
    let mut migration = Migration::start(&[]);
    let restore = |args: &[&str]| {
        let mut restore = migration.task.command(&["restore", "-d"], "restore.log");
        assert!(!restore.args(args).status().unwrap().success());
        migration.task.log("restore.log")
    };
    let log = restore(&[]);
    assert!(log.contains("--lazy-pages is not given"), "{log}");
    let log = restore(&["--lazy-pages"]);
    assert!(log.contains("no lazy-pages command with --page-server"), "{log}");
    // One that was there, and is not any more.
    let socket = migration.task.path("lazy-pages.socket");
    drop(UnixListener::bind(&socket).unwrap());
    let log = restore(&["--lazy-pages"]);
    fs::remove_file(socket).unwrap();
    assert!(log.contains("the lazy-pages process has ended"), "{log}");
    signal(&migration.dump, Signal::TERM);
    migration.stays();
}

#[test]
fn what_cannot_be_lazy_is_said() {
    let task = Task::start(64);
    let seal = seal(task.dir.path());
    let seal = seal.each_ref().map(String::as_str);
    let sums = [&seal[..], &["--suite", "aes-256-xts+hmac-sha256"]].concat();
    for (args, reason) in
        [(&["-R"][..], "which would then run twice"), (&sums, "--lazy-pages with the suite")]
    {
        assert!(!task.dump(&[&["--lazy-pages", "--port", "0"], args].concat()));
        assert!(task.log("dump.log").contains(reason), "{}", task.log("dump.log"));
    }
    assert!(!task.is_gone());
}

#[test]
fn a_lazy_dump_by_request() {
    // In a network of this thread's own, and of all that it starts, no port is anybody else's.
    torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNET).unwrap();
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.unwrap().success());
    let port = 7777_u16;
    let task = Task::start(PAGES);
    let images = fs::File::open(task.dir.path()).unwrap();
    let mut client = Client::start();
    let opts = CriuOpts {
        images_dir_fd: std::os::fd::AsRawFd::as_raw_fd(&images),
        pid: Some(task.pid),
        log_file: Some("dump.log".to_owned()),
        log_level: Some(4),
        lazy_pages: Some(true),
        notify_scripts: Some(true),
        ps: Some(CriuPageServerInfo {
            address: Some("127.0.0.1".to_owned()),
            port: Some(port.into()),
            ..CriuPageServerInfo::default()
        }),
        ..CriuOpts::default()
    };
    let dump = std::thread::spawn(move || {
        let response = client.ask(&request(CriuReqType::Dump, opts), "");
        (response.success, client.finish().1)
    });
    wait_until(|| task.log("dump.log").contains("Waiting for the restore"));
    let mut daemon = task.command(&["lazy-pages", "--page-server"], "lazy.log");
    let mut daemon = daemon.args(LOCAL).args(["--port", &port.to_string()]).spawn().unwrap();
    wait_until(|| task.path("lazy-pages.socket").exists());
    let inner = task.command(&["restore", "--lazy-pages"], "restore.log");
    let mut restore = Command::new("unshare");
    restore.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(inner.get_program());
    let mut restore = restore.args(inner.get_args()).stdin(Stdio::null()).spawn().unwrap();
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    assert!(restore.wait().unwrap().success() && daemon.wait().unwrap().success());
    let (success, told) = dump.join().unwrap();
    assert!(success);
    assert_eq!(told.last().unwrap().0, "status-ready");
}
