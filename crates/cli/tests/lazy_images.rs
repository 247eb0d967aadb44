//! Images whose pages stay where they are: a page server has them, and a lazy restore in another
//! network namespace fetches them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

mod keys;
mod memory;
mod sleeper;

use keys::seal;
use memory::Task;
use sleeper::{criu, wait_until};
use tempfile::TempDir;

/// Some of the pages of each task are not those that its relatives have.
const PAGES: u64 = 4096;
const RELATIVES: u64 = 2;
/// What stays where it is.
const PAGES_FILES: [&str; 3] = ["pages-", "pages-packed-", "pages-index-"];
const SERVER: &str = "10.81.0.1";
/// Runs a program, and ends like it when no other process is there.
const LAST: &str = r#""$@"; ended=$?
while set -- /proc/[0-9]*; [ $# -gt 1 ]; do sleep 0.01; done; exit $ended"#;

/// A network namespace, as a host has it.
struct Host(Child);

impl Host {
    fn start() -> Self {
        let mut command = Command::new("unshare");
        let child = command.args(["--net", "sleep", "100000"]).stdin(Stdio::null()).spawn();
        let host = Self(child.unwrap());
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        wait_until(|| fs::read_link(host.path()).is_ok_and(|net| net != own));
        host
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    /// A command in the network of this host.
    fn runs(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--net={}", self.path())).arg(command.get_program());
        inside.args(command.get_args()).stdin(Stdio::null());
        inside
    }

    fn shell(&self, script: &str) {
        let mut shell = Command::new("sh");
        assert!(self.runs(shell.args(["-ec", script])).status().unwrap().success(), "{script}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Whether a file has this name, and behind it a number.
fn is_of(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// A task that sleeps on one host, and its images without its pages on the other.
struct Away {
    task: Task,
    images: TempDir,
    here: Host,
    there: Host,
    server: Option<Child>,
    restore: Option<Child>,
    port: String,
}

impl Away {
    fn of(task: Task, args: &[&str]) -> Self {
        task.put_to_sleep(args);
        let [here, there] = [(); 2].map(|()| Host::start());
        here.shell(&format!(
            "ip link add eth0 type veth peer name eth0 netns {}; ip link set eth0 up; \
             ip link set lo up; ip address add {SERVER}/24 dev eth0",
            there.0.id()
        ));
        there.shell("ip link set eth0 up; ip link set lo up; ip address add 10.81.0.2/24 dev eth0");
        let images = tempfile::tempdir().unwrap();
        for file in fs::read_dir(task.dir.path()).unwrap().map(Result::unwrap) {
            let name = file.file_name().into_string().unwrap();
            if name == "parent" {
                std::os::unix::fs::symlink("../nowhere", images.path().join(name)).unwrap();
            } else if name.ends_with(".img") && !PAGES_FILES.iter().any(|p| is_of(&name, p)) {
                fs::copy(file.path(), images.path().join(name)).unwrap();
            }
        }
        Self { task, images, here, there, server: None, restore: None, port: String::new() }
    }

    fn start(args: &[&str]) -> Self {
        Self::of(Task::start_with_relatives(PAGES, RELATIVES, PAGES / 4), args)
    }

    fn serve(&mut self, args: &[&str]) {
        let mut server = self.task.command(&["page-server", "--lazy-pages"], "server.log");
        server.args(["--address", SERVER, "--port", "0"]).args(args);
        let mut server = self.here.runs(&server).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        self.port = line.trim().strip_prefix("PORT: ").expect("the server listens").to_owned();
        self.server = Some(server);
    }

    /// A command for the other host, which knows the server if it is to.
    fn command(&self, words: &[&str], log: &str, knows: bool) -> Command {
        let mut command = criu(words);
        command.args(["-v4", "-o", log, "-D"]).arg(self.images.path());
        if knows {
            command.args(["--page-server", "--address", SERVER, "--port", &self.port]);
        }
        command
    }

    /// Starts a pager there, which a restore finds.
    fn start_pager(&self) -> Child {
        let pager = self.command(&["lazy-pages"], "lazy.log", true);
        let pager = self.there.runs(&pager).spawn().unwrap();
        wait_until(|| self.images.path().join("lazy-pages.socket").exists());
        pager
    }

    /// Restores in a pid namespace: nobody has to wait until the old tasks are reaped. Its first
    /// process waits for all others: with it ends the pager of a restore, whatever that has still
    /// to tell the server.
    fn start_restore(&mut self, args: &[&str], knows: bool) {
        let words = [&["restore", "--lazy-pages"], args].concat();
        let inner = self.command(&words, "restore.log", knows);
        let mut restore = Command::new("unshare");
        restore.args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", LAST, "sh"]);
        restore.arg(inner.get_program()).args(inner.get_args());
        self.restore = Some(self.there.runs(&restore).process_group(0).spawn().unwrap());
    }

    fn cannot_restore(&mut self, args: &[&str], knows: bool) {
        self.start_restore(args, knows);
        assert!(!self.restore.take().unwrap().wait().unwrap().success());
    }

    fn log(&self, name: &str) -> String {
        let read = |dir: &Path| fs::read_to_string(dir.join(name)).unwrap_or_default();
        read(self.images.path()) + &read(self.task.dir.path())
    }

    /// The task runs and has its memory, and the server has ended well.
    fn arrives(&mut self) {
        let expected = format!("ok {PAGES}\n");
        let restore = self.restore.as_mut().unwrap();
        self.task.go();
        wait_until(|| {
            self.task.log("report").ends_with('\n') || restore.try_wait().unwrap().is_some()
        });
        assert_eq!(self.task.log("report"), expected, "{}", self.log("restore.log"));
        assert!(self.restore.take().unwrap().wait().unwrap().success());
        let served = self.server.take().unwrap().wait().unwrap();
        assert!(served.success(), "{}", self.log("server.log"));
    }

    /// The server ends and says so.
    fn fails(&mut self, reason: &str) {
        assert!(!self.server.take().unwrap().wait().unwrap().success());
        let log = self.log("server.log");
        assert!(log.contains(reason), "{log}");
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        for child in [&mut self.restore, &mut self.server].into_iter().flatten() {
            let _ = (child.kill(), child.wait());
        }
    }
}

#[test]
fn a_restore_fetches_what_it_needs() {
    let mut away = Away::start(&[]);
    away.serve(&[]);
    away.start_restore(&[], true);
    away.arrives();
}

#[test]
fn a_pager_fetches_what_is_touched_later() {
    let mut away = Away::start(&["--compress", "lz4"]);
    away.serve(&[]);
    let mut pager = away.start_pager();
    away.start_restore(&[], true);
    away.arrives();
    assert!(pager.wait().unwrap().success(), "{}", away.log("lazy.log"));
}

#[test]
fn a_restore_says_what_it_needs_at_once() {
    let mut away = Away::start(&[]);
    away.serve(&[]);
    let mut pager = away.start_pager();
    away.cannot_restore(&[], false);
    let log = away.log("restore.log");
    assert!(log.contains("give the restore the address of the page server"), "{log}");
    assert!(!pager.wait().unwrap().success());
    away.fails("a client has gone");
}

/// As CRIU's restore, which does not know the server: what is needed at once is here.
#[test]
fn what_is_here_is_read_here() {
    let mut away = Away::start(&[]);
    for file in fs::read_dir(away.task.dir.path()).unwrap().map(Result::unwrap) {
        if file.file_name().as_encoded_bytes().starts_with(b"pages-") {
            fs::copy(file.path(), away.images.path().join(file.file_name())).unwrap();
        }
    }
    away.serve(&[]);
    let mut pager = away.start_pager();
    away.start_restore(&[], false);
    away.arrives();
    assert!(pager.wait().unwrap().success(), "{}", away.log("lazy.log"));
}

#[test]
fn pages_of_a_parent_that_is_not_there_come_too() {
    let task = Task::start_with_relatives(PAGES, RELATIVES, PAGES / 4);
    let (pid, round) = (task.pid.to_string(), task.path("round"));
    fs::create_dir(&round).unwrap();
    let mut first = criu(&["pre-dump", "-t", &pid, "-D"]);
    assert!(first.arg(&round).status().unwrap().success());
    let mut away = Away::of(task, &["--prev-images-dir", "round"]);
    away.serve(&[]);
    away.start_restore(&[], true);
    away.arrives();
}

#[test]
fn who_has_the_key_serves_sealed_images() {
    let task = Task::start_with_relatives(PAGES, RELATIVES, PAGES / 4);
    let seal = seal(task.dir.path());
    let seal = seal.each_ref().map(String::as_str);
    let mut away = Away::of(task, &seal);
    away.serve(&seal[..2]);
    away.start_restore(&seal[..2], true);
    away.arrives();
}

#[test]
fn sums_over_all_pages_need_all_pages() {
    let task = Task::start_with_relatives(PAGES, RELATIVES, PAGES / 4);
    let seal = seal(task.dir.path());
    let seal = seal.each_ref().map(String::as_str);
    let mut away = Away::of(task, &[&seal[..], &["--suite", "aes-256-xts+hmac-sha256"]].concat());
    away.serve(&seal[..2]);
    away.cannot_restore(&seal[..2], true);
    away.fails("can only be verified all together");
}
