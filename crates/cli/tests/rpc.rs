//! The RPC as a client sees it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use prost::Message;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with, socketpair,
};
use torpor_images::proto::{
    CriuFeatures, CriuOpts, CriuPageServerInfo, CriuReq, CriuReqType, CriuResp, InheritFd,
};

fn criu(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.arg0("criu").args(args).env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE");
    command
}

/// A client, and the server that it started.
struct Client {
    socket: OwnedFd,
    server: Child,
}

impl Client {
    fn start() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (own, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let mut command = criu(&["swrk", "0"]);
        let server = command.stdin(other).stdout(Stdio::null()).stderr(Stdio::null());
        Self { socket: own, server: server.spawn().unwrap() }
    }

    fn ask(&self, request: &CriuReq) -> CriuResp {
        send(&self.socket, &request.encode_to_vec());
        receive(&self.socket).expect("a response")
    }

    /// The server's exit code, once it has ended by itself.
    fn exit_code(mut self) -> Option<i32> {
        self.server.wait().unwrap().code()
    }

    /// The server's exit code after the client has gone.
    fn leave(self) -> Option<i32> {
        let Self { socket, mut server } = self;
        drop(socket);
        server.wait().unwrap().code()
    }
}

fn send(socket: impl AsFd, packet: &[u8]) {
    let mut control = SendAncillaryBuffer::default();
    let flags = SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags).unwrap();
}

fn receive(socket: impl AsFd) -> Option<CriuResp> {
    let mut packet = vec![0; 1 << 16];
    let mut control = RecvAncillaryBuffer::default();
    let mut parts = [IoSliceMut::new(&mut packet)];
    let len = recvmsg(socket, &mut parts, &mut control, RecvFlags::empty()).unwrap().bytes;
    (len > 0).then(|| CriuResp::decode(&packet[..len]).unwrap())
}

fn request(kind: CriuReqType) -> CriuReq {
    let mut request = CriuReq::default();
    request.set_type(kind);
    request
}

fn recorded(name: &str) -> CriuReq {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/requests");
    CriuReq::decode(fs::read(dir.join(format!("{name}.bin"))).unwrap().as_slice()).unwrap()
}

#[test]
fn version() {
    let client = Client::start();
    let response = client.ask(&recorded("runc-version"));
    assert!(response.success && response.r#type == i32::from(CriuReqType::Version));
    let version = response.version.unwrap();
    assert_eq!((version.major_number, version.minor_number), (4, 2));
    assert_eq!(client.exit_code(), Some(0));
}

#[test]
fn features_of_runc() {
    let client = Client::start();
    let response = client.ask(&recorded("runc-feature-mem-track"));
    assert!(response.success);
    let features = response.features.unwrap();
    // Only what was asked for is answered.
    assert!(features.mem_track.is_some() && features.lazy_pages.is_none());
    assert_eq!(client.exit_code(), Some(0));
}

#[test]
fn features() {
    let client = Client::start();
    let mut all = request(CriuReqType::FeatureCheck);
    let yes = Some(true);
    all.features = Some(CriuFeatures { mem_track: yes, lazy_pages: yes, pidfd_store: yes });
    assert_eq!(client.ask(&all).features.unwrap().pidfd_store, yes);
    // Without features there is nothing to check.
    let client = Client::start();
    let response = client.ask(&request(CriuReqType::FeatureCheck));
    assert!(!response.success);
    assert_eq!(client.exit_code(), Some(1));
}

#[test]
fn check() {
    let client = Client::start();
    assert!(client.ask(&request(CriuReqType::Check)).success);
    assert_eq!(client.exit_code(), Some(0));
}

#[test]
fn a_connection_can_be_kept() {
    let client = Client::start();
    let mut kept = request(CriuReqType::Version);
    kept.keep_open = Some(true);
    for _ in 0..3 {
        assert!(client.ask(&kept).success);
    }
    assert_eq!(client.leave(), Some(0));
}

#[test]
fn a_client_that_leaves_at_once_is_no_failure() {
    assert_eq!(Client::start().leave(), Some(0));
}

fn refusal(request: &CriuReq) -> (i32, String) {
    let client = Client::start();
    let response = client.ask(request);
    assert!(!response.success);
    assert_eq!(response.r#type, request.r#type);
    assert_eq!(client.exit_code(), Some(1));
    (response.cr_errno(), response.cr_errmsg().to_owned())
}

fn with_opts(kind: CriuReqType, opts: CriuOpts) -> CriuReq {
    CriuReq { opts: Some(opts), ..request(kind) }
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    use CriuReqType::{Dump, Restore, WaitPid};
    let dir = tempfile::tempdir().unwrap();
    let opened = fs::File::open(dir.path()).unwrap();
    let file = fs::File::open("/dev/null").unwrap();
    let opts = || CriuOpts { images_dir_fd: opened.as_raw_fd(), ..CriuOpts::default() };

    let cases: Vec<(CriuReq, i32, &str)> = vec![
        (request(Dump), libc::EINVAL, "the request has no options"),
        (request(CriuReqType::Empty), libc::EOPNOTSUPP, "EMPTY"),
        (request(CriuReqType::Notify), libc::EOPNOTSUPP, "NOTIFY"),
        (
            with_opts(Dump, CriuOpts::default()),
            libc::EINVAL,
            "neither images_dir_fd nor images_dir is given",
        ),
        (
            with_opts(Dump, CriuOpts { images_dir_fd: 9999, ..CriuOpts::default() }),
            libc::EBADF,
            "images_dir_fd 9999",
        ),
        (
            with_opts(Dump, CriuOpts { images_dir_fd: file.as_raw_fd(), ..CriuOpts::default() }),
            libc::ENOTDIR,
            "/dev/null",
        ),
        (with_opts(Dump, opts()), libc::EINVAL, "a task cannot be dumped by its own child"),
        (with_opts(Dump, CriuOpts { pid: Some(-4), ..opts() }), libc::EINVAL, "-4"),
        (
            with_opts(Dump, CriuOpts { empty_ns: Some(0x2000_0000), ..opts() }),
            libc::EOPNOTSUPP,
            "empty_ns 0x20000000",
        ),
        (
            with_opts(Dump, CriuOpts { manage_cgroups_mode: Some(77), ..opts() }),
            libc::EINVAL,
            "manage_cgroups_mode: 77",
        ),
        (
            with_opts(Dump, CriuOpts { external: vec!["gpu[0]".into()], ..opts() }),
            libc::EINVAL,
            "external: external resources of type \"gpu\"",
        ),
        (
            with_opts(Dump, CriuOpts { status_fd: Some(9999), ..opts() }),
            libc::EBADF,
            "status_fd 9999",
        ),
        (
            with_opts(Restore, CriuOpts { ext_sharing: Some(true), ..opts() }),
            libc::EINVAL,
            "--external mnt[]",
        ),
        (CriuReq { pid: Some(u32::MAX), ..request(WaitPid) }, libc::EINVAL, "pid"),
        (CriuReq { pid: Some(1), ..request(WaitPid) }, libc::ECHILD, "wait for task 1"),
    ];
    for (request, errno, text) in cases {
        let (found, message) = refusal(&request);
        assert!(found == errno && message.contains(text), "{request:?}: {found} {message}");
    }
}

#[test]
fn values_that_are_out_of_range_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let opened = fs::File::open(dir.path()).unwrap();
    let ps = |port: Option<i32>, fd: Option<i32>| {
        Some(CriuPageServerInfo { port, fd, ..CriuPageServerInfo::default() })
    };
    type Change = Box<dyn Fn(&mut CriuOpts)>;
    let cases: Vec<(&str, Change)> = vec![
        ("pid: -5 ", Box::new(|opts| opts.pid = Some(-5))),
        ("pid: -2147483648 ", Box::new(|opts| opts.pid = Some(i32::MIN))),
        ("images_dir_fd: -2 ", Box::new(|opts| opts.images_dir_fd = -2)),
        ("work_dir_fd: -7 ", Box::new(|opts| opts.work_dir_fd = Some(-7))),
        ("status_fd: -2 ", Box::new(|opts| opts.status_fd = Some(-2))),
        ("pidfd_store_sk: -2 ", Box::new(|opts| opts.pidfd_store_sk = Some(-2))),
        ("ps.fd: -3 ", Box::new(move |opts| opts.ps = ps(None, Some(-3)))),
        ("ps.port: -1 ", Box::new(move |opts| opts.ps = ps(Some(-1), None))),
        ("ps.port: 65536 ", Box::new(move |opts| opts.ps = ps(Some(65536), None))),
        ("log_level: -1 ", Box::new(|opts| opts.log_level = Some(-1))),
        ("log_level: 256 ", Box::new(|opts| opts.log_level = Some(256))),
        ("cpu_cap: 8 ", Box::new(|opts| opts.cpu_cap = Some(8))),
        ("manage_cgroups_mode: -1 ", Box::new(|opts| opts.manage_cgroups_mode = Some(-1))),
        ("manage_cgroups_mode: 99 ", Box::new(|opts| opts.manage_cgroups_mode = Some(99))),
        ("network_lock: 0 ", Box::new(|opts| opts.network_lock = Some(0))),
        ("pre_dump_mode: 3 ", Box::new(|opts| opts.pre_dump_mode = Some(3))),
        (
            "inherit_fd.fd: -1 ",
            Box::new(|opts| opts.inherit_fd = vec![InheritFd { key: "k".to_owned(), fd: -1 }]),
        ),
    ];
    use CriuReqType::{CpuinfoDump, Dump, PageServer, PreDump, Restore};
    for kind in [Dump, PreDump, Restore, PageServer, CpuinfoDump] {
        for (text, change) in &cases {
            let mut opts = CriuOpts { images_dir_fd: opened.as_raw_fd(), ..CriuOpts::default() };
            change(&mut opts);
            let (errno, message) = refusal(&with_opts(kind, opts));
            assert!(
                errno == libc::EINVAL && message.starts_with(text),
                "{kind:?}: {errno} {message}"
            );
        }
    }
    for pid in [0, u32::MAX] {
        let request = CriuReq { pid: Some(pid), ..request(CriuReqType::WaitPid) };
        let (errno, message) = refusal(&request);
        assert!(errno == libc::EINVAL && message.starts_with(&format!("pid: {pid} ")), "{message}");
    }
    let client = Client::start();
    let response = client.ask(&CriuReq { r#type: 99, ..CriuReq::default() });
    assert_eq!((response.cr_errno(), response.cr_errmsg()), (libc::EINVAL, "type: 99 is unknown"));
}

#[test]
fn logs_go_where_the_request_says() {
    let (images, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (i, w) = (fs::File::open(images.path()).unwrap(), fs::File::open(work.path()).unwrap());
    let opts = CriuOpts { images_dir_fd: i.as_raw_fd(), log_level: Some(4), ..Default::default() };
    refusal(&with_opts(CriuReqType::Dump, opts.clone()));
    let log = fs::read_to_string(images.path().join("criu.log")).unwrap();
    assert!(log.starts_with("(0") && log.contains("cannot be dumped by its own child"), "{log}");
    let named =
        CriuOpts { work_dir_fd: Some(w.as_raw_fd()), log_file: Some("dump.log".into()), ..opts };
    refusal(&with_opts(CriuReqType::Dump, named));
    assert!(work.path().join("dump.log").exists());
    assert!(!images.path().join("dump.log").exists());
}

#[test]
fn the_request_s_configuration_file_has_the_last_word() {
    let images = tempfile::tempdir().unwrap();
    let dir = fs::File::open(images.path()).unwrap();
    let config = images.path().join("runc.conf");
    fs::write(&config, "log-file other.log\n").unwrap();
    let opts = CriuOpts {
        images_dir_fd: dir.as_raw_fd(),
        log_file: Some("dump.log".into()),
        config_file: Some(config.to_str().unwrap().into()),
        ..Default::default()
    };
    refusal(&with_opts(CriuReqType::Dump, opts.clone()));
    assert!(images.path().join("other.log").exists() && !images.path().join("dump.log").exists());
    fs::write(&config, "frobnicate\n").unwrap();
    let (_, message) = refusal(&with_opts(CriuReqType::Dump, opts));
    assert!(message.contains("runc.conf, line 1"), "{message}");
}

/// Sends bytes that are no request.
fn hostile(packet: &[u8]) -> CriuResp {
    let client = Client::start();
    send(&client.socket, packet);
    let response = receive(&client.socket).unwrap();
    assert_eq!(client.exit_code(), Some(1));
    assert!(!response.success && response.r#type == i32::from(CriuReqType::Empty));
    response
}

#[test]
fn hostile_packets_are_answered() {
    for packet in [&b"\0"[..], b"\xff\xff\xff\xff", b"\x12\x7f\x08", b"GET / HTTP/1.0\r\n\r\n"] {
        let response = hostile(packet);
        assert_eq!(response.cr_errno(), libc::EBADMSG, "{packet:?}: {}", response.cr_errmsg());
    }
    // An option that this version does not have.
    let mut newer = vec![0x08, 0x01, 0x12, 0x05, 0x08, 0x03];
    newer.extend([0xc0, 0x04, 0x01]);
    let response = hostile(&newer);
    assert_eq!(response.cr_errmsg(), "field 72 of criu_opts is not known");
    assert_eq!(response.cr_errno(), libc::EOPNOTSUPP);
}

#[test]
fn other_sockets_are_refused() {
    let (_own, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let output = criu(&["swrk", "0"]).stdin(OwnedFd::from(other)).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "Error: the RPC socket is not a SOCK_SEQPACKET Unix socket\n");
}

/// A service on a socket of its own, ended with the test.
struct Service {
    dir: tempfile::TempDir,
    process: Child,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Service {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let args = ["service", "--address", path.to_str().unwrap(), "--pidfile", "pid", "-W"];
        let mut command = criu(&args);
        let process = command.arg(dir.path()).stdin(Stdio::null()).spawn().unwrap();
        // The pid file comes after the socket, and is empty for a moment.
        wait_until(|| fs::read(dir.path().join("pid")).is_ok_and(|pid| !pid.is_empty()));
        Self { dir, process }
    }

    fn connect(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(self.dir.path().join("socket")).unwrap()).unwrap();
        socket
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !condition() {
        assert!(Instant::now() < deadline, "it does not come true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_service_serves_many() {
    let mut service = Service::start();
    let pid = fs::read_to_string(service.dir.path().join("pid")).unwrap();
    assert_eq!(pid, service.process.id().to_string());
    let mut kept = request(CriuReqType::Version);
    kept.keep_open = Some(true);
    let packet = kept.encode_to_vec();
    let clients: Vec<OwnedFd> = (0..5).map(|_| service.connect()).collect();
    // In another order than they came in.
    for client in clients.iter().rev() {
        send(client, &packet);
        assert!(receive(client).unwrap().success);
    }
    // One that sends nonsense hurts nobody else.
    send(&clients[0], b"\xff\xff");
    assert!(!receive(&clients[0]).unwrap().success);
    send(&clients[1], &packet);
    assert!(receive(&clients[1]).unwrap().success);
    assert!(service.process.try_wait().unwrap().is_none());
}

#[test]
fn a_service_does_not_push_another_away() {
    let service = Service::start();
    let path = service.dir.path().join("socket");
    let output = criu(&["service", "--address", path.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("is in use"));
    // Nor a file that is no socket.
    let file = service.dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    let output = criu(&["service", "--address", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_service_takes_over_from_a_dead_one() {
    let mut service = Service::start();
    service.process.kill().unwrap();
    service.process.wait().unwrap();
    let path = service.dir.path().join("socket");
    assert!(path.exists());
    fs::remove_file(service.dir.path().join("pid")).unwrap();
    let args = ["service", "--address", path.to_str().unwrap(), "--pidfile", "pid", "-W"];
    service.process = criu(&args).arg(service.dir.path()).spawn().unwrap();
    wait_until(|| service.dir.path().join("pid").exists());
    let client = service.connect();
    send(&client, &request(CriuReqType::Version).encode_to_vec());
    assert!(receive(&client).unwrap().success);
}

#[test]
fn a_service_in_the_background() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["service", "-d", "--address", "socket", "--pidfile", "pid", "-W"];
    // The command returns once the socket listens.
    assert!(criu(&args).arg(dir.path()).stdin(Stdio::null()).status().unwrap().success());
    assert!(dir.path().join("socket").exists());
    wait_until(|| fs::read_to_string(dir.path().join("pid")).is_ok_and(|pid| !pid.is_empty()));
    let pid: i32 = fs::read_to_string(dir.path().join("pid")).unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[test]
fn a_directory_without_a_name_will_do() {
    let images = tempfile::tempdir().unwrap();
    let dir = fs::File::open(images.path()).unwrap();
    images.close().unwrap();
    let opts = CriuOpts {
        images_dir_fd: dir.as_raw_fd(),
        log_to_stderr: Some(true),
        ..Default::default()
    };
    let (_, message) = refusal(&with_opts(CriuReqType::Dump, opts));
    assert!(message.contains("by its own child"), "{message}");
}
