//! The service and its workers: each client is served by a program of its own, which is the service's in all
//! that a client sees.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};
use torpor_images::proto::{CriuOpts, CriuReq, CriuReqType, CriuResp, InheritFd};
use torpor_sys::process::{Status, wait};

mod sleeper;

use sleeper::{Client, Sleeper, criu, request, wait_until, write_script};

/// A service that is started in one directory and works in another, with a configuration file in the first one.
struct Service {
    there: tempfile::TempDir,
    work: tempfile::TempDir,
    process: Child,
}

impl Service {
    fn start(config: &str) -> Self {
        let (there, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(there.path().join("service.conf"), config).unwrap();
        let files = ["--address", "socket", "--pidfile", "pid", "-o", "service.log"];
        let mut command = criu(&["service", "--config", "service.conf", "-v4"]);
        command.args(files).arg("-W").arg(work.path()).current_dir(there.path());
        let process = command.spawn().unwrap();
        wait_until(|| fs::read(work.path().join("pid")).is_ok_and(|pid| !pid.is_empty()));
        Self { there, work, process }
    }

    fn client(&self) -> Client {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(self.work.path().join("socket")).unwrap()).unwrap();
        // The one that serves it is the service's.
        let server = Command::new("true").spawn().unwrap();
        Client { socket, server, told: Vec::new() }
    }

    /// The children of all its threads.
    fn children(&self) -> Vec<i32> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        let files = threads.map(|thread| thread.unwrap().path().join("children"));
        let text: String = files.map(|file| fs::read_to_string(file).unwrap_or_default()).collect();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn version() -> CriuReq {
    CriuReq { keep_open: Some(true), ..request(CriuReqType::Version, CriuOpts::default()) }
}

#[test]
fn a_worker_is_a_program_of_its_own() {
    let service = Service::start("");
    let mut clients = [service.client(), service.client()];
    for client in &mut clients {
        assert!(client.ask(&version(), "").success);
    }
    let workers = service.children();
    assert_eq!(workers.len(), 2);
    for worker in &workers {
        let line = fs::read(format!("/proc/{worker}/cmdline")).unwrap();
        assert_eq!(line.split(|byte| *byte == 0).nth(1), Some(&b"worker"[..]));
        assert_eq!(fs::read_dir(format!("/proc/{worker}/task")).unwrap().count(), 1);
    }
    // One that is killed takes its own client along, and no other.
    kill_process(Pid::from_raw(workers[0]).unwrap(), Signal::KILL).unwrap();
    wait_until(|| service.children() == workers[1..]);
    let answered = clients.iter_mut().filter(|client| {
        let packet = prost::Message::encode_to_vec(&version());
        send(&client.socket, &packet, SendFlags::NOSIGNAL).is_ok()
    });
    assert_eq!(answered.count(), 1);
    for client in clients {
        client.finish();
    }
    wait_until(|| service.children().is_empty());
}

/// Descriptors that a worker has got are the service's: its connection to that is 0.
#[test]
fn a_client_gives_no_descriptor_of_the_service() {
    let service = Service::start("");
    let images = tempfile::tempdir().unwrap();
    let opened = fs::File::open(images.path()).unwrap();
    let inherit_fd = vec![InheritFd { key: "k".to_owned(), fd: 0 }];
    let images_dir_fd = opened.as_raw_fd();
    let opts = CriuOpts { images_dir_fd, inherit_fd, ..CriuOpts::default() };
    let mut client = service.client();
    let response = client.ask(&request(CriuReqType::Restore, opts), "");
    let wanted = "inherit_fd: descriptor 0 is none that the client has passed on";
    client.finish();
    assert_eq!((response.success, response.cr_errmsg()), (false, wanted));
}

#[test]
fn a_client_has_the_options_and_the_tasks_of_its_service() {
    let script = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    write_script(&script, "#!/bin/sh\necho $CRTOOLS_SCRIPT_ACTION >>acted\n");
    let service = Service::start(&format!("action-script {}\n", script.display()));
    let task = Sleeper::start();
    let images = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts {
        images_dir_fd: images.as_raw_fd(),
        notify_scripts: Some(true),
        shell_job: Some(true),
        log_level: Some(4),
        ..CriuOpts::default()
    };
    let mut client = service.client();
    let dump = request(CriuReqType::Dump, CriuOpts { pid: Some(task.pid), ..opts.clone() });
    let response = client.ask(&dump, "");
    assert!(response.success, "{response:?} {}", task.log("criu.log"));
    let (_, told) = client.finish();
    let killed = Status::Signaled(libc::SIGKILL);
    assert_eq!(wait(task.pid, true).unwrap(), Some((task.pid, killed)));
    // The scripts of the service's configuration have run where the images are, after the client was told.
    let acted = fs::read_to_string(task.dir.path().join("acted")).unwrap();
    let told: Vec<String> = told.into_iter().map(|(stage, _)| stage).collect();
    assert_eq!(acted.lines().collect::<Vec<_>>(), told);

    let mut client = service.client();
    let opts = CriuOpts { rst_sibling: Some(true), ..opts };
    let response = client.ask(&request(CriuReqType::Restore, opts), "");
    assert!(response.success, "{response:?} {}", task.log("criu.log"));
    assert_eq!(response.restore.unwrap().pid, task.pid);
    client.finish();
    // It is the service's child, which takes note of its end when it hears of the next client.
    wait_until(|| service.children() == [task.pid]);
    task.kill();
    wait_until(|| {
        assert!(service.client().ask(&version(), "").success);
        !service.children().contains(&task.pid)
    });
}

/// Asks over the socket `$1` with the request `$2`, in hexadecimal digits, with the directory `$3` as descriptor 9,
/// and writes each answer down, until the connection ends.
const ASKS: &str = r#"
import os, socket, sys, time
os.dup2(os.open(sys.argv[3], os.O_RDONLY), 9)
service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
service.connect(sys.argv[1])
service.send(bytes.fromhex(sys.argv[2]))
answers = []
while True:
    answers.append(service.recv(65536).hex())
    if not answers[-1]:
        break
with open(sys.argv[3] + "/new", "w") as file:
    file.write("\n".join(answers))
os.rename(sys.argv[3] + "/new", sys.argv[3] + "/answers")
time.sleep(1000)
"#;

/// A task that asks the service to dump it.
struct Asker {
    dir: tempfile::TempDir,
    process: Child,
}

impl Asker {
    fn start(service: &Service, opts: CriuOpts) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let level = Some(4);
        let opts = CriuOpts { images_dir_fd: 9, log_level: level, ..opts };
        let asked = prost::Message::encode_to_vec(&request(CriuReqType::Dump, opts));
        let asked: String = asked.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut command = Command::new("setsid");
        command.args(["python3", "-c", ASKS]).arg(service.work.path().join("socket"));
        command.arg(asked).arg(dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
        let process = command.stderr(Stdio::null()).spawn().unwrap();
        Self { dir, process }
    }

    fn pid(&self) -> i32 {
        self.process.id().try_into().unwrap()
    }

    /// All that it has been told until the connection was closed.
    fn answers(&self) -> Vec<CriuResp> {
        let file = self.dir.path().join("answers");
        wait_until(|| file.exists());
        let text = fs::read_to_string(file).unwrap();
        let decode = |line: &str| {
            let byte = |at| u8::from_str_radix(&line[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..line.len()).step_by(2).map(byte).collect();
            prost::Message::decode(bytes.as_slice()).unwrap()
        };
        text.lines().map(decode).collect()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("criu.log")).unwrap_or_default()
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_raw(self.pid()).unwrap(), Signal::KILL);
        let _ = self.process.wait();
    }
}

#[test]
fn a_client_that_dumps_itself_finds_its_answer_when_it_is_restored() {
    let service = Service::start("");
    // One that goes on is told by the service.
    let opts = CriuOpts { leave_running: Some(true), ..CriuOpts::default() };
    let asker = Asker::start(&service, opts);
    let [answer] = asker.answers().try_into().unwrap();
    assert!(answer.success, "{answer:?} {}", asker.log());
    assert_eq!(answer.dump.unwrap().restored, None);

    // One that was dumped is told by the restore: by the command, and by the service.
    for by_command in [true, false] {
        let mut asker = Asker::start(&service, CriuOpts::default());
        let ended = asker.process.wait().unwrap();
        assert_eq!(ended.signal(), Some(libc::SIGKILL), "{}", asker.log());
        let images = asker.dir.path();
        if by_command {
            let mut restore = criu(&["restore", "-d", "-o", "restore.log", "-D"]);
            assert!(restore.arg(images).status().unwrap().success());
        } else {
            let images = fs::File::open(images).unwrap();
            let opts = CriuOpts { images_dir_fd: images.as_raw_fd(), ..CriuOpts::default() };
            let mut client = service.client();
            let response = client.ask(&request(CriuReqType::Restore, opts), "");
            assert!(response.success, "{response:?} {}", asker.log());
            client.finish();
        }
        let [answer] = asker.answers().try_into().unwrap();
        assert!(answer.success, "{answer:?}");
        assert_eq!(answer.r#type, i32::from(CriuReqType::Dump));
        assert_eq!(answer.dump.unwrap().restored, Some(true));
    }

    // It could not answer what it is asked while it is stopped.
    let opts = CriuOpts { notify_scripts: Some(true), ..CriuOpts::default() };
    let [answer] = Asker::start(&service, opts).answers().try_into().unwrap();
    let why = answer.cr_errmsg();
    assert!(!answer.success && why.contains("cannot answer notifications"), "{why}");
}

#[test]
fn what_is_said_before_there_is_a_log_is_in_that_of_the_service() {
    let service = Service::start("");
    let client = service.client();
    send(&client.socket, b"\xff\xff", SendFlags::NOSIGNAL).unwrap();
    let log = || fs::read_to_string(service.work.path().join("service.log")).unwrap();
    wait_until(|| log().contains("malformed request"));
    assert!(log().contains("Error ("), "{}", log());
    // A configuration that makes no sense any more is told there, too, and the service goes on.
    fs::write(service.there.path().join("service.conf"), "frobnicate\n").unwrap();
    drop(service.client().socket);
    wait_until(|| log().contains("service.conf, line 1"));
    fs::write(service.there.path().join("service.conf"), "").unwrap();
    assert!(service.client().ask(&version(), "").success);
}
