//! Programs that make containers of their own, or live in one.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::{Value, json};
use torpor_runtimes_tests::command::{Run, command, wait};
use torpor_runtimes_tests::criu::{Job, pages};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::rootfs;
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

use super::{Outcome, Row, SLEEPS, Times};

/// A machine of systemd-nspawn, which is registered nowhere. It goes with this value.
struct Machine {
    supervisor: Child,
    /// Where the host hands directories over to it, which the supervisor removes in the end.
    handed: PathBuf,
}

impl Machine {
    fn start(scratch: &Scratch, script: &str) -> Self {
        let root = scratch.join("root");
        rootfs::make(&root, &[]);
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/os-release"), "ID=test\n").unwrap();
        let mut command = scratch.command("systemd-nspawn");
        command.arg("--directory").arg(&root).arg("--machine").arg(scratch.name());
        command.args(["--quiet", "--register=no", "--keep-unit", "--pipe", "sh", "-c", script]);
        // The payload gets the streams of the call: no file of the host's.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let handed = Path::new("/run/systemd/nspawn/propagate").join(scratch.name());
        Self { supervisor: command.spawn().unwrap(), handed }
    }

    /// The first process inside.
    fn payload(&self) -> i32 {
        let supervisor = i32::try_from(self.supervisor.id()).unwrap();
        until("the payload runs", || {
            let tree = process::tree(supervisor);
            // Its children are of this name, too, until they are another program.
            tree.into_keys().find(|&pid| {
                process::inner_pid(pid) == Some(1) && process::name(pid).is_some_and(|n| n == "sh")
            })
        })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        process::kill_tree(i32::try_from(self.supervisor.id()).unwrap());
        let _ = self.supervisor.wait();
        let _ = fs::remove_dir(&self.handed);
    }
}

/// The payload of a machine of systemd-nspawn: its supervisor ends with it.
pub(super) fn nspawn() -> Row {
    let scratch = Scratch::new("real-nspawn");
    // Where it is in its hierarchies, not how many there are: others may mount and leave one meanwhile.
    let script = "n=0; while sleep 0.02; do n=$((n + 1)); \
                  echo $n $$ $(hostname) $(cut -d: -f3 /proc/self/cgroup | sort -u) >>/inside.log; done";
    let mut machine = Machine::start(&scratch, script);
    let inside = || fs::read_to_string(scratch.join("root/inside.log")).unwrap_or_default();
    let works_on = || {
        let goal = inside().lines().count() + 5;
        until_true("it works", || inside().lines().count() > goal);
    };
    works_on();
    let mut job = Job::of_namespace(&scratch, machine.payload());
    // What the supervisor has put over files of /proc was removed at once.
    let options = [
        "--external",
        "mnt[]:ms",
        "--skip-mnt",
        "/proc/sys/kernel/random/boot_id",
        "--skip-mnt",
        "/proc/kmsg",
    ];
    let root = scratch.join("root");
    let mut times = Times::default();
    for sleep in 0..SLEEPS {
        works_on();
        let begin = Instant::now();
        job.dump(&options);
        times.asleep.push(begin.elapsed());
        times.bytes = job.pages();
        if sleep == 0 {
            wait(&mut machine.supervisor).expect("the supervisor ends with its payload");
            fs::create_dir_all(&machine.handed).unwrap();
        }
        let begin = Instant::now();
        job.restore(&["--external", "mnt[]:ms", "--root", root.to_str().unwrap()]);
        times.awake.push(begin.elapsed());
    }
    works_on();
    let output = inside();
    let rest = |line: &str| line.split_once(' ').map(|(_, rest)| rest.to_owned());
    for (number, line) in (1..).zip(output.lines()) {
        assert!(line.starts_with(&format!("{number} 1 {}", scratch.name())), "{line}");
        assert_eq!(rest(line), output.lines().next().and_then(rest));
    }
    Row {
        name: "systemd-nspawn",
        version: &["systemd-nspawn", "--version"],
        how: "the payload of a machine; mounts over files of /proc that were removed are left out",
        outcome: Outcome::Kept(times),
    }
}

/// A page that counts.
const PAGE: &str = "<script>let n = 0; setInterval(() => document.title = ++n, 20)</script>";

/// How far it is, as the browser's own interface shows it.
fn title(network: &Network) -> Option<u64> {
    let answer = network.inside(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9222").ok()?;
        stream.write_all(b"GET /json HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
        let mut answer = String::new();
        // The connection stays: what is whole says its own length.
        let mut part = [0; 4096];
        while !answer.trim_end().ends_with(']') {
            let length = stream.read(&mut part).ok().filter(|length| *length > 0)?;
            answer.push_str(&String::from_utf8_lossy(&part[..length]));
        }
        Some(answer)
    })?;
    let pages: Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()?;
    let page = pages.as_array()?.iter().find(|page| page["type"] == "page")?;
    page["title"].as_str()?.parse().ok()
}

/// With its sandbox: renderers in pid, network and user namespaces of their own, with an empty root
/// and seccomp filters.
pub(super) fn chromium() -> Row {
    let scratch = Scratch::new("real-chromium-runc");
    let network = Network::new(scratch.name());
    let words = "exec chromium --headless --disable-gpu --disable-breakpad --no-first-run \
                 --disable-dev-shm-usage --remote-debugging-port=9222 --user-data-dir=/data \
                 file:///page.html";
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", words]).host_programs();
    let bundle = bundle.network(&network).configure(|config| {
        config["process"]["user"] = json!({ "uid": 1000, "gid": 1000 });
        config["process"]["env"].as_array_mut().unwrap().push(json!("HOME=/data"));
        config["process"]["noNewPrivileges"] = json!(true);
    });
    bundle.write("/page.html", PAGE);
    for dir in ["data", "tmp"] {
        let dir = bundle.file(dir);
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    }
    let mut container = Container::start(&scratch, &bundle);
    let mut count = 0;
    let times = sleeps(&scratch, &mut container, || {
        let counts_on = || title(&network).filter(|title| *title > count + 5);
        count = until("the page counts on", counts_on);
    });
    Row {
        name: "Chromium in a container",
        version: &["chromium", "--version"],
        how: "headless, in a container of runc, with its sandbox; a page that counts",
        outcome: Outcome::Kept(times),
    }
}

/// The program that starts the first process of a pid namespace on the host, and ends with it. It goes with this value.
struct Starter(Child);

impl Starter {
    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    fn first(&self) -> i32 {
        let children = format!("/proc/{0}/task/{0}/children", self.pid());
        until("it has started it", || fs::read_to_string(&children).ok()?.trim().parse().ok())
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        process::kill_tree(self.pid());
        let _ = self.0.wait();
    }
}

/// Not all of this host: what other tests mount there comes and goes.
pub(super) const ALONE: &str = "awk '$5 ~ \"^/(tmp|run|var)/\" { print $5 }' /proc/self/mountinfo | sort -r | \
     xargs --no-run-if-empty -n 1 umount --lazy; exec \"$@\"";

/// The same for an ordinary user of the host, among the host's mounts. Its crash handler leaves it, and so
/// would leave the tree, but for the pid namespace. And others do not take its numbers there.
pub(super) fn chromium_of_a_user() -> Row {
    let scratch = Scratch::new("real-chromium");
    let network = Network::new(scratch.name());
    let data = scratch.dir("data");
    for dir in [scratch.path(), data.as_path()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    }
    fs::write(scratch.join("page.html"), PAGE).unwrap();
    let words = format!(
        "setpriv --reuid=1000 --regid=1000 --clear-groups env HOME={0} setsid chromium --headless \
         --disable-gpu --no-first-run --remote-debugging-port=9222 --user-data-dir={0} \
         file://{1}/page.html",
        data.display(),
        scratch.path().display()
    );
    let mut command = scratch.command("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", ALONE, "sh"]);
    command.args(words.split_whitespace());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let starter = Starter(network.inside(|| command.spawn().unwrap()));
    let mut job = Job::of_namespace(&scratch, starter.first()).within(&network);
    let mut count = 0;
    let mut works_on = || {
        let counts_on = || title(&network).filter(|title| *title > count + 5);
        count = until("the page counts on", counts_on);
    };
    let mut times = Times::default();
    works_on();
    for _ in 0..SLEEPS {
        times.sleep(&mut job, &["--tcp-established", "--file-locks", "--external", "mnt[]:ms"]);
        works_on();
    }
    Row {
        name: "Chromium",
        version: &["chromium", "--version"],
        how: "headless, of a user of the host, in a pid namespace, with its sandbox and its crash \
              handler; a page that counts",
        outcome: Outcome::Kept(times),
    }
}

/// Puts a container of runc to sleep, again and again. `works_on` comes back once it has done something
/// that it had not before.
fn sleeps(scratch: &Scratch, container: &mut Container, mut works_on: impl FnMut()) -> Times {
    let options = ["--tcp-established", "--file-locks"];
    let mut times = Times::default();
    works_on();
    for _ in 0..SLEEPS {
        let begin = Instant::now();
        container.checkpoint(&options);
        times.asleep.push(begin.elapsed());
        times.bytes = pages(&scratch.join("images"));
        let begin = Instant::now();
        container.restore(&options);
        times.awake.push(begin.elapsed());
        works_on();
    }
    times
}

/// What the daemon and its container do; the client is asked later.
const DAEMON: &str = "exec >/out 2>&1 </dev/null; \
    docker() { command docker --host unix:///run/docker.sock \"$@\"; }; \
    dockerd --host unix:///run/docker.sock & \
    until docker version; do sleep 0.1; done; \
    docker import /image.tar busy; \
    docker run --detach --publish 8080:80 --name one --volume /shared:/shared busy sh -c \
    'httpd -h /shared; n=0; while sleep 0.05; do n=$((n + 1)); echo $n $$ >>/shared/log; done'; wait";

/// What the guide says to run in the outer container after a restore. runc knows a container by the time when
/// its first process started; its calls come from the tree, and see that in the tree's time namespace.
fn known_again() -> &'static str {
    let guide = include_str!("../../../../docs/guide.md");
    let (_, rest) =
        guide.split_once("nsenter --time --target 1 sh -c '").expect("the guide has it");
    rest.split_once('\'').expect("it has an end").0
}

/// The daemon, containerd, the shim, the proxy of a port and a container of theirs on the usual bridge, as
/// one container of runc.
pub(super) fn docker() -> Row {
    let scratch = Scratch::new("real-docker-runc");
    scratch.configure("");
    // Networks that runc would leave empty.
    fs::write("/etc/criu/runc.conf", "empty-ns none\n").unwrap();
    let volume = scratch.join("volume");
    fs::create_dir(&volume).unwrap();
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", DAEMON]).host_programs();
    let bundle = bundle.configure(|config| {
        for set in config["process"]["capabilities"].as_object_mut().unwrap().values_mut() {
            *set = json!(CAPABILITIES.split_whitespace().collect::<Vec<_>>());
        }
        config["process"]["noNewPrivileges"] = json!(false);
        config["process"]["rlimits"] =
            json!([{ "type": "RLIMIT_NOFILE", "hard": 20000, "soft": 20000 }]);
        let device = |major: u32, minor: u32| {
            json!({ "allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm" })
        };
        // What its own containers may have: /dev/console, /dev/net/tun.
        let none = json!({ "allow": false, "access": "rwm" });
        config["linux"]["resources"] =
            json!({ "devices": [none, device(5, 1), device(10, 200)] });
        for paths in ["maskedPaths", "readonlyPaths"] {
            config["linux"].as_object_mut().unwrap().remove(paths);
        }
        let mounts = config["mounts"].as_array_mut().unwrap();
        for mount in mounts.iter_mut().filter(|m| m["type"] == "sysfs" || m["type"] == "cgroup") {
            mount["options"].as_array_mut().unwrap().retain(|option| option != "ro");
        }
        let options = json!(["nosuid"]);
        mounts.push(json!({
            "type": "tmpfs", "source": "tmpfs", "destination": "/run", "options": options,
        }));
        // As images with Docker in them have it: layers of overlays cannot lie on one.
        mounts.push(json!({
            "type": "bind", "source": volume, "destination": "/var/lib/docker", "options": ["rbind", "rw"],
        }));
    });
    for dir in ["run", "shared", "opt", "tmp", "var/tmp", "var/lib/docker"] {
        fs::create_dir_all(bundle.file(dir)).unwrap();
    }
    rootfs::make(&scratch.join("root"), &[]);
    command("tar", &["--create", "--file"])
        .arg(bundle.file("image.tar"))
        .arg("--directory")
        .arg(scratch.join("root"))
        .arg(".")
        .succeed();
    let mut container = Container::start(&scratch, &bundle);
    let log = bundle.file("shared/log");
    let lines = || fs::read_to_string(&log).unwrap_or_default();
    let works_on = || {
        let goal = lines().lines().count() + 5;
        until_true("the inner container works", || lines().lines().count() > goal);
    };
    bundle.write("/shared/page", "served");
    let times = sleeps(&scratch, &mut container, works_on);
    let exec = |words: &[&str]| container.runc("exec").arg(container.id()).args(words).succeed();
    let client =
        |words: &[&str]| exec(&[&["docker", "--host", "unix:///run/docker.sock"], words].concat());
    // By the proxy, by a rule of iptables, and straight over the bridge.
    for address in ["127.0.0.1:8080", "172.17.0.1:8080", "172.17.0.2"] {
        let url = format!("http://{address}/page");
        assert_eq!(exec(&["busybox", "wget", "-q", "-O", "-", &url]), "served", "{url}");
    }
    assert_eq!(client(&["info", "--format", "{{.Driver}}"]).trim(), "overlay2");
    // The daemon goes on with its networks.
    assert_eq!(client(&["run", "--rm", "busy", "hostname", "-i"]).trim(), "172.17.0.3");
    assert!(client(&["ps", "--format", "{{.Names}} {{.Status}}"]).starts_with("one Up"));
    assert!(!client(&["images", "--quiet"]).trim().is_empty());
    for (number, line) in (1..).zip(lines().lines()) {
        assert_eq!(line, format!("{number} 1"));
    }
    exec(&["nsenter", "--time", "--target", "1", "sh", "-c", known_again()]);
    assert_eq!(client(&["exec", "one", "hostname", "-i"]).trim(), "172.17.0.2");
    client(&["pause", "one"]);
    client(&["unpause", "one"]);
    works_on();
    client(&["stop", "-t", "1", "one"]);
    assert_eq!(exec(&["sh", "-c", "pgrep httpd || echo none"]).trim(), "none");
    Row {
        name: "Docker in a container",
        version: &["dockerd", "--version"],
        how: "dockerd with its bridge, containerd and a container of theirs with a port, as one \
              container of runc",
        outcome: Outcome::Kept(times),
    }
}

/// Those that a daemon gives to its containers, or takes from them.
const CAPABILITIES: &str = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID \
    CAP_KILL CAP_SETGID CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE CAP_NET_BIND_SERVICE \
    CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_SYS_ADMIN \
    CAP_SYS_NICE CAP_SYS_TTY_CONFIG CAP_MKNOD CAP_AUDIT_WRITE CAP_SETFCAP";
