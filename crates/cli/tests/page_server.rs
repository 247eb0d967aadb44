//! Memory that goes to a page server, by the command line and over the RPC.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use torpor_images::proto::{CriuOpts, CriuPageServerInfo, CriuReqType};
use torpor_images::{ImageDir, kind};
use torpor_sys::process::Status;

mod certificates;
mod keys;
mod memory;
mod sleeper;

use certificates::certificates;
use keys::seal;
use memory::Task;
use sleeper::{Client, criu, request, write_script};

/// Of the task's memory.
const PAGES: u64 = 4096;

/// A page server with a directory of its own.
struct Server {
    child: Child,
    dir: PathBuf,
    port: String,
}

impl Server {
    fn start(dir: &Path, args: &[&str]) -> Self {
        let mut command = criu(&["page-server", "--port", "0", "--address", "127.0.0.1"]);
        command.args(["-o", "server.log", "-v4", "-D"]).arg(dir).args(args);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("PORT: ").unwrap().to_owned();
        Self { child, dir: dir.to_owned(), port }
    }

    fn options(&self) -> [&str; 5] {
        ["--page-server", "--address", "127.0.0.1", "--port", &self.port]
    }

    /// Waits until it has ended, well or not.
    fn end(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }

    /// What it wrote goes to another directory, as between hosts.
    fn hand_over(&self, to: &Path) {
        for entry in fs::read_dir(&self.dir).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_str().unwrap().ends_with(".img") {
                fs::rename(self.dir.join(&name), to.join(&name)).unwrap();
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Without an address nobody but this host reaches any of the servers.
#[test]
fn servers_listen_on_this_host_alone() {
    // One that has nothing to serve ends at once.
    let task = Task::start(PAGES);
    assert!(task.dump(&["--leave-running"]));
    let pid = task.pid.to_string();
    for words in [
        &["page-server"][..],
        &["page-server", "--lazy-pages"],
        &["page-server", "--auto-dedup"],
        &["page-server", "--address", ""],
        &["dump", "--lazy-pages", "-t", &pid],
    ] {
        let mut command = criu(words);
        command.args(["--port", "0", "-D"]).arg(task.path(""));
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let dir = task.path("");
        let mut server = Server { child, dir, port: String::new() };
        let mut line = String::new();
        let said = server.child.stdout.take().unwrap();
        BufReader::new(said).read_line(&mut line).unwrap();
        let port: u16 = line.trim().strip_prefix("PORT: ").unwrap().parse().unwrap();
        // Another address of this host stands for one of a network.
        let refused = TcpStream::connect(("127.0.0.2", port)).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{words:?}");
        TcpStream::connect(("127.0.0.1", port)).unwrap();
    }
}

/// As the one that a dump writes to.
#[test]
fn torpor_makes_the_directory_of_a_server() {
    let dir = tempfile::tempdir().unwrap();
    for (name, makes) in [("criu", false), ("torpor", true)] {
        let images = dir.path().join(name);
        let mut command = criu(&["page-server", "--port", "0", "-D"]);
        let mut child = command.arg0(name).arg(&images).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!((said.starts_with("PORT: "), images.is_dir()), (makes, makes), "{name}");
        let _ = child.kill();
        child.wait().unwrap();
    }
}

/// A user who cannot have a port or an address is told what to do.
#[test]
fn a_server_that_cannot_listen_says_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let dir = tempfile::tempdir().unwrap();
    for (args, what, hint) in [
        (
            ["--port", &port, "--address", ""],
            format!("listen at 127.0.0.1 port {port}: "),
            "choose another --port",
        ),
        (
            ["--port", "0", "--address", "192.0.2.1"],
            "listen at 192.0.2.1 port 0: ".to_owned(),
            "must be one of this machine",
        ),
        (
            ["--port", "0", "--address", "nobody.invalid"],
            "address nobody.invalid: ".to_owned(),
            "a name that stands for one",
        ),
    ] {
        let output = criu(&["page-server", "-D"]).arg(dir.path()).args(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(&what) && said.contains(hint), "{said}");
    }
}

/// The directory of the images is what some programs name as the checkpoint before the first.
#[test]
fn images_are_no_parent_of_themselves() {
    let task = Task::start(PAGES);
    for _ in 0..2 {
        assert!(task.dump(&["--leave-running", "--track-mem", "--prev-images-dir", "."]));
        let log = task.log("dump.log");
        assert!(log.contains(". is the directory of these images: all memory is saved"), "{log}");
        assert!(!log.contains("Warn"), "{log}");
        assert!(!task.path("parent").is_symlink());
    }
    task.put_to_sleep(&["--track-mem", "--prev-images-dir", "."]);
    task.restore(&[]);
    task.go();
}

/// What a server's directory has already is neither replaced nor deleted by a client, and no client writes where a link leads.
#[test]
fn files_that_a_server_has_stay_as_they_are() {
    let task = Task::start(PAGES);
    let own = format!("pagemap-{}.img", task.pid);
    let elsewhere = tempfile::tempdir().unwrap();
    let (file, nothing) = (elsewhere.path().join("file"), elsewhere.path().join("nothing"));
    fs::write(&file, "precious").unwrap();
    for name in [&own, "pages-1.img"] {
        refuses_to_write(&task, name, |taken| fs::write(taken, "precious").unwrap());
        refuses_to_write(&task, name, |taken| fs::hard_link(&file, taken).unwrap());
        refuses_to_write(&task, name, |taken| symlink(&file, taken).unwrap());
        refuses_to_write(&task, name, |taken| symlink(&nothing, taken).unwrap());
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 1, "a link was followed");
}

/// A dump to a server whose directory has `taken`, as `lay` has put it there, and other images.
fn refuses_to_write(task: &Task, taken: &str, lay: impl Fn(&Path)) {
    let there = tempfile::tempdir().unwrap();
    lay(&there.path().join(taken));
    let others = ["pagemap-1.img", "pages-9.img", "inventory.img"];
    for name in others {
        fs::write(there.path().join(name), "precious").unwrap();
    }
    let is = || {
        let found = there.path().join(taken);
        (found.read_link().ok(), fs::symlink_metadata(&found).unwrap().len(), fs::read(&found).ok())
    };
    let was = is();
    let mut server = Server::start(there.path(), &[]);
    assert!(!task.dump(&server.options()), "{taken} was replaced");
    assert!(!server.end());
    assert_eq!(is(), was, "{taken} is not what it was");
    for name in others {
        assert_eq!(fs::read_to_string(there.path().join(name)).unwrap(), "precious", "{name}");
    }
    let names = fs::read_dir(there.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let images = names.filter(|name| name.to_str().unwrap().ends_with(".img")).count();
    assert_eq!(images, others.len() + 1, "something was left beside them");
    assert!(!task.is_gone());
}

/// Peers that connect and say nothing, or begin to, do not hold the place of a peer that has a certificate.
#[test]
fn silent_peers_keep_nobody_waiting() {
    let keys = tempfile::tempdir().unwrap();
    let secured = certificates(keys.path());
    let secured: Vec<&str> = secured.iter().map(String::as_str).collect();
    for options in [&secured[..], &[]] {
        let (task, there) = (Task::start(PAGES), tempfile::tempdir().unwrap());
        let mut server = Server::start(there.path(), options);
        let port: u16 = server.port.parse().unwrap();
        // They are there until the dump is over.
        let says = |words: &[u8]| {
            let mut peer = TcpStream::connect(("127.0.0.1", port)).unwrap();
            peer.write_all(words).unwrap();
            peer
        };
        // Nothing; the head of a record of TLS, which does not come; less than a word of the server's own.
        let silent = [&[][..], &[0x16, 3, 1, 2, 0], &[0; 3]].map(says);
        task.put_to_sleep(&[&server.options()[..], options].concat());
        assert!(server.end());
        drop(silent);
        server.hand_over(task.dir.path());
        task.restore(&[]);
        assert_eq!(task.look(), format!("ok {PAGES}\n"));
    }
}

/// Dumps a task to a server with these options of both ends, and restores it. Returns the log
/// of the dump.
fn there_and_back(client: &[&str], server: &[&str]) -> String {
    let (task, there) = (Task::start(PAGES), tempfile::tempdir().unwrap());
    let mut server = Server::start(there.path(), server);
    task.put_to_sleep(&[&server.options(), client].concat());
    assert!(server.end());
    let local = ImageDir::open(task.dir.path()).unwrap();
    assert!(local.ids(kind::PAGEMAP).unwrap().is_empty(), "pagemaps are left here");
    let mut restore = task.command(&["restore", "-d"], "restore.log");
    assert!(!restore.status().unwrap().success());
    server.hand_over(task.dir.path());
    task.restore(&[]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    task.log("dump.log")
}

#[test]
fn memory_goes_to_a_page_server() {
    there_and_back(&[], &[]);
}

#[test]
fn a_server_knows_of_no_relatives() {
    let log = there_and_back(&["--dedup-relatives"], &[]);
    assert!(log.contains("pages that tasks share are sent for each"), "{log}");
}

#[test]
fn the_connection_is_encrypted() {
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path());
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    there_and_back(&options, &options);
}

#[test]
fn rounds_build_on_each_other() {
    rounds([&[], &[]], &[]);
}

/// What the server has of the first round are files of pages, which the second one builds on.
#[test]
fn so_do_sealed_and_compressed_ones() {
    let keys = tempfile::tempdir().unwrap();
    let seal = seal(keys.path());
    let seal: Vec<&str> = seal.iter().map(String::as_str).collect();
    let packed = [&seal[..], &["--compress", "zstd"]].concat();
    rounds([&seal, &packed], &seal[..2]);
    rounds([&["--compress", "lz4"], &["--compress", "zstd"]], &[]);
}

/// Dumps a task in two rounds with these options, to a page server each, and restores it.
fn rounds(options: [&[&str]; 2], restore_options: &[&str]) {
    let task = Task::start(PAGES);
    let top = task.dir.path();
    let dir = |name: &str| {
        let dir = top.join(name);
        fs::create_dir(&dir).unwrap();
        dir
    };
    let [first, second] = ["1", "2"].map(dir);
    let [first_there, second_there] = ["1-there", "2-there"].map(dir);
    let pid = task.pid.to_string();
    let round = |what: &str, images: &Path, server: &mut Server, args: &[&str]| {
        let mut command = criu(&[what, "-t", &pid, "-o", "dump.log", "-v4", "-D"]);
        let output = command.arg(images).args(server.options()).args(args).output().unwrap();
        let log = fs::read_to_string(images.join("dump.log")).unwrap();
        assert!(output.status.success(), "{log}");
        assert!(server.end());
    };
    round("pre-dump", &first, &mut Server::start(&first_there, &[]), options[0]);
    let mut server =
        Server::start(&second_there, &["--prev-images-dir", "../1-there", "--auto-dedup"]);
    let second_options = [&["--prev-images-dir", "../1"], options[1]].concat();
    round("dump", &second, &mut server, &second_options);
    torpor_sys::process::wait(task.pid, true).unwrap();
    // The images of both hosts belong together.
    for (from, to) in [(&first_there, &first), (&second_there, &second)] {
        let server = Server { child: noop(), dir: from.clone(), port: String::new() };
        server.hand_over(to);
    }
    fs::remove_file(second.join("parent")).unwrap();
    symlink("../1", second.join("parent")).unwrap();
    let mut show = std::process::Command::new(env!("CARGO_BIN_EXE_torpor"));
    show.args(["image", "show"]).arg(second.join(format!("pagemap-{pid}.img")));
    let shown = show.args(restore_options).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("PE_PARENT"), "no page was found unchanged: {shown}");
    let mut restore = criu(&["restore", "-d", "-o", "restore.log", "-v4", "-D"]);
    let restored = restore.arg(&second).args(restore_options).status().unwrap().success();
    assert!(restored, "{}", fs::read_to_string(second.join("restore.log")).unwrap());
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

fn noop() -> Child {
    std::process::Command::new("true").spawn().unwrap()
}

#[test]
fn a_server_that_cannot_be_reached_stops_nothing() {
    let task = Task::start(PAGES);
    assert!(!task.dump(&["--page-server", "--address", "127.0.0.1", "--port", "1"]));
    assert!(task.log("dump.log").contains("page server 127.0.0.1 port 1"));
    assert!(!task.is_gone());
}

#[test]
fn a_dump_that_fails_leaves_nothing_at_the_server() {
    let (task, there) = (Task::start(PAGES), tempfile::tempdir().unwrap());
    let mut server = Server::start(there.path(), &[]);
    let script = task.dir.path().join("script");
    write_script(&script, "#!/bin/sh\ntest $CRTOOLS_SCRIPT_ACTION != network-lock\n");
    let script = ["--action-script", script.to_str().unwrap()];
    assert!(!task.dump(&[&server.options()[..], &script].concat()));
    assert!(!server.end());
    assert!(ImageDir::open(there.path()).unwrap().ids(kind::PAGEMAP).unwrap().is_empty());
    assert!(!task.is_gone());
}

/// Sealed or compressed memory is stored as it is: dumps a task to a server with these
/// options, which gets files of one kind and nothing else, and restores it.
fn stored_there_and_back(client: &[&str], restore: &[&str], kind: kind::Kind) {
    let (task, there) = (Task::start(PAGES), tempfile::tempdir().unwrap());
    let mut server = Server::start(there.path(), &[]);
    task.put_to_sleep(&[&server.options(), client].concat());
    assert!(server.end());
    let (local, stored) = (task.dir.path(), ImageDir::open(there.path()).unwrap());
    let images = || fs::read_dir(there.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let images = images().filter(|name| name.to_str().unwrap().ends_with(".img")).count();
    assert!(images > 0 && stored.ids(kind).unwrap().len() == images, "other files than pages");
    assert!(ImageDir::open(local).unwrap().ids(kind).unwrap().is_empty(), "pages are left here");
    assert!(
        !task.command(&["restore", "-d"], "restore.log").args(restore).status().unwrap().success()
    );
    server.hand_over(local);
    // The beginning of a page, as the task has it.
    let plain = 0x9e37_79b9_7f4a_7c15_u64.to_le_bytes();
    let is_sealed = client.contains(&"--encrypt");
    for id in ImageDir::open(local).unwrap().ids(kind).unwrap() {
        let bytes = fs::read(local.join(kind.file_name(id))).unwrap();
        let is_plain = bytes.windows(8).any(|part| part == plain);
        assert!(!is_sealed || !is_plain, "a page is in plain");
    }
    task.restore(restore);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

#[test]
fn sealed_pages_are_stored_as_they_are() {
    let keys = tempfile::tempdir().unwrap();
    let seal = seal(keys.path());
    let seal: Vec<&str> = seal.iter().map(String::as_str).collect();
    stored_there_and_back(&seal, &seal[..2], kind::PAGES);
    let sums = [&seal[..], &["--suite", "aes-256-xts+hmac-sha256"]].concat();
    stored_there_and_back(&sums, &seal[..2], kind::PAGES);
    let packed = [&seal[..], &["--compress", "lz4"]].concat();
    stored_there_and_back(&packed, &seal[..2], kind::PAGES_PACKED);
}

#[test]
fn compressed_pages_are_stored_as_they_are() {
    stored_there_and_back(&["--compress", "zstd"], &[], kind::PAGES_PACKED);
}

/// A page server that says of any question whether it has something: no. So does CRIU's of
/// whether it is Torpor's. Returns what it was told.
fn other_server() -> (String, std::thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let server = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut told = vec![0; 24];
        client.read_exact(&mut told).unwrap();
        client.write_all(&[0; 4]).unwrap();
        client.read_to_end(&mut told).unwrap();
        told
    });
    (port, server)
}

#[test]
fn only_a_server_of_torpors_gets_sealed_or_compressed_pages() {
    let task = Task::start(PAGES);
    let seal = seal(task.dir.path());
    let seal: Vec<&str> = seal.iter().map(String::as_str).collect();
    for options in [&seal[..], &["--compress", "lz4"]] {
        let (port, server) = other_server();
        let at = ["--page-server", "--address", "127.0.0.1", "--port", &port];
        assert!(!task.dump(&[&at[..], options].concat()));
        let log = task.log("dump.log");
        assert!(log.contains("with a page server that is not Torpor's"), "{log}");
        assert_eq!(server.join().unwrap().len(), 2 * 24, "a question and an end");
        assert!(!task.is_gone());
    }
}

#[test]
fn a_page_server_by_request() {
    let (task, there) = (Task::start(PAGES), tempfile::tempdir().unwrap());
    let images = fs::File::open(there.path()).unwrap();
    let mut client = Client::start();
    let opts = CriuOpts {
        images_dir_fd: images.as_raw_fd(),
        ps: Some(CriuPageServerInfo {
            address: Some("127.0.0.1".into()),
            port: Some(0),
            ..CriuPageServerInfo::default()
        }),
        ..CriuOpts::default()
    };
    let mut asked = request(CriuReqType::PageServerChld, opts);
    asked.keep_open = Some(true);
    let response = client.ask(&asked, "");
    assert!(response.success, "{response:?}");
    let server = response.ps.unwrap();
    let images = fs::File::open(task.dir.path()).unwrap();
    let mut dumper = Client::start();
    let opts = CriuOpts {
        images_dir_fd: images.as_raw_fd(),
        pid: Some(task.pid),
        ps: Some(CriuPageServerInfo {
            address: Some("127.0.0.1".into()),
            port: server.port,
            ..CriuPageServerInfo::default()
        }),
        ..CriuOpts::default()
    };
    let response = dumper.ask(&request(CriuReqType::Dump, opts), "");
    assert!(response.success, "{response:?}");
    dumper.finish();
    let killed = Status::Signaled(libc::SIGKILL);
    let ended = torpor_sys::process::wait(task.pid, true).unwrap();
    assert_eq!(ended, Some((task.pid, killed)));
    let mut asked = request(CriuReqType::WaitPid, CriuOpts::default());
    asked.pid = Some(server.pid().cast_unsigned());
    let response = client.ask(&asked, "");
    assert_eq!((response.success, response.status), (true, Some(0)));
    client.finish();
    Server { child: noop(), dir: there.path().to_owned(), port: String::new() }
        .hand_over(task.dir.path());
    task.restore(&[]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}
