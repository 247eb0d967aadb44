//! A task to put to sleep and to wake up.

#![allow(dead_code, missing_docs, reason = "not every test needs all of it")]

use std::fs;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use prost::Message;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, recv,
    sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use torpor_images::proto::{CriuOpts, CriuReq, CriuReqType, CriuResp};
use torpor_sys::process::{Status, wait};

pub fn criu(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.arg0("criu").args(args).env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE");
    command.stdin(Stdio::null());
    command
}

/// What begins a shell script in a mount namespace of its own: what others have mounted at this moment is no part of
/// the test, and may be gone before a restore. The checkout stays where scripts/test.sh has mounted it.
pub const WITHOUT_MOUNTS_OF_OTHERS: &str = r#"
cut -d' ' -f5 /proc/self/mountinfo | grep -E '^(/tmp|/var/tmp|/var/lib|/run)/.' | grep -v '/torpor-checkout-' |
    while read -r place; do umount --lazy "$place" 2>/dev/null || true; done
"#;

/// Makes a script that can be run. Another process writes it: a file that this one has open for writing is open for
/// a moment in what another thread starts meanwhile, too, and as long as it is nobody can run it (`ETXTBSY`).
pub fn write_script(path: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""]).arg(path).arg(text);
    assert!(shell.status().unwrap().success());
}

/// A word in the environment of each sleeper.
pub const SECRET: &str = "TORPOR_TEST_SECRET_OF_A_SLEEPER";

/// A task that sleeps, in a session of its own, and a place for its images.
pub struct Sleeper {
    pub dir: TempDir,
    pub pid: i32,
}

impl Sleeper {
    pub fn start() -> Self {
        Self::start_as(&["sleep", "1000"])
    }

    /// One that a program makes of itself, by its name.
    pub fn start_as(program: &[&str]) -> Self {
        Self::start_with(program, Stdio::null())
    }

    /// The same with a file as its standard input.
    #[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
    pub fn start_with(program: &[&str], input: Stdio) -> Self {
        let mut command = Command::new("setsid");
        command.args(program).env(SECRET, "1").stdin(input);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        wait_until(|| name_of(pid).as_deref() == Some("sleep"));
        Self { dir: tempfile::tempdir().unwrap(), pid }
    }

    pub fn images(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    pub fn dump(&self, args: &[&str]) -> Output {
        let pid = self.pid.to_string();
        let mut command = criu(&["dump", "-t", &pid, "-D", self.images(), "-o", "dump.log", "-v4"]);
        command.args(args).output().unwrap()
    }

    /// Dumps the task, which must be gone then.
    pub fn put_to_sleep(&self, args: &[&str]) {
        let output = self.dump(args);
        assert!(output.status.success(), "{}", self.log("dump.log"));
        let killed = Status::Signaled(libc::SIGKILL);
        assert_eq!(wait(self.pid, true).unwrap(), Some((self.pid, killed)));
    }

    pub fn restore(&self, args: &[&str]) -> Command {
        let mut command = criu(&["restore", "-D", self.images(), "-o", "restore.log", "-v4"]);
        command.args(args);
        command
    }

    pub fn lives(&self) -> bool {
        name_of(self.pid).as_deref() == Some("sleep")
    }

    /// Whether it does what it does when nobody has stopped it.
    pub fn sleeps(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.contains("(sleep) S ")
    }

    pub fn kill(&self) {
        kill_process(Pid::from_raw(self.pid).unwrap(), Signal::KILL).unwrap();
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if self.lives() {
            self.kill();
        }
    }
}

/// The name of a task that is no zombie.
pub fn name_of(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    (!rest.starts_with(" Z")).then(|| name.to_owned())
}

pub fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !condition() {
        assert!(Instant::now() < deadline, "it does not come true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client of `criu swrk` that writes down its notifications.
pub struct Client {
    pub socket: OwnedFd,
    pub server: std::process::Child,
    pub told: Vec<(String, Option<i32>)>,
}

impl Client {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// One whose server has these environment variables.
    pub fn start_with(environment: &[(&str, &Path)]) -> Self {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (socket, other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let mut server = criu(&["swrk", "0"]);
        server.envs(environment.iter().copied()).stdin(other);
        let server = server.spawn().unwrap();
        Self { socket, server, told: Vec::new() }
    }

    pub fn send(&self, request: &CriuReq) {
        let mut control = SendAncillaryBuffer::default();
        let packet = request.encode_to_vec();
        sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    /// Sends a request and answers notifications, with a failure at `fail_at`, until
    /// the response comes.
    pub fn ask(&mut self, request: &CriuReq, fail_at: &str) -> CriuResp {
        self.send(request);
        loop {
            let mut packet = vec![0; 1 << 16];
            let (_, len) = recv(&self.socket, packet.as_mut_slice(), RecvFlags::empty()).unwrap();
            let response = CriuResp::decode(&packet[..len]).unwrap();
            if response.r#type != i32::from(CriuReqType::Notify) {
                return response;
            }
            let notify = response.notify.unwrap();
            let stage = notify.script.unwrap();
            let notify_success = Some(stage != fail_at);
            self.told.push((stage, notify.pid));
            let kind = i32::from(CriuReqType::Notify);
            self.send(&CriuReq { r#type: kind, notify_success, ..CriuReq::default() });
        }
    }

    pub fn finish(mut self) -> (Option<i32>, Vec<(String, Option<i32>)>) {
        drop(self.socket);
        (self.server.wait().unwrap().code(), self.told)
    }
}

pub fn request(kind: CriuReqType, opts: CriuOpts) -> CriuReq {
    CriuReq { r#type: kind.into(), opts: Some(opts), ..CriuReq::default() }
}
