//! The restore policy on real checkpoints: for each rule one that it ends, and the same
//! one under a rule that allows it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod addresses;
mod configuration;
mod given;
mod ids;
mod mounts;
mod networks;
mod open_files;
mod rights;
#[path = "../sleeper/mod.rs"]
mod sleeper;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use torpor_images::proto::{
    CoreEntry, FdTypes, FdinfoEntry, FileEntry, InventoryEntry, PstreeEntry,
};
use torpor_images::{ImageDir, kind};

use sleeper::{WITHOUT_MOUNTS_OF_OTHERS, write_script};

fn torpor(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.args(args).env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE");
    command.stdin(Stdio::null());
    command
}

/// A checkpoint of `script`, which a shell runs in namespaces of its own and which says
/// `ready` when it is done.
struct Asleep {
    dir: TempDir,
    /// Options for what is restored and judged.
    options: Vec<&'static str>,
}

impl Asleep {
    #[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
    fn new(unshare: &[&str], script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ready = dir.path().join("ready");
        // Nothing may have been opened outside of the namespaces, nor be inherited.
        let close = "for fd in /proc/$$/fd/*; do fd=${fd##*/}; \
                     if [ $fd -gt 2 ]; then eval \"exec $fd>&-\"; fi; done";
        let own = "cd /; exec </dev/null >/dev/null 2>&1";
        // Here it would be this host's mounts.
        let has_mounts = unshare.contains(&"--mount");
        let alone = if has_mounts { WITHOUT_MOUNTS_OF_OTHERS } else { "" };
        let script =
            format!("{own}; {close}\n{alone}\n{script}\n: >{}\nexec sleep 1000", ready.display());
        let mut command = Command::new("setsid");
        command.arg("unshare").args(unshare).args(["bash", "-ec", &script]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let mut task = Self { dir, options: vec![] };
        let deadline = Instant::now() + Duration::from_secs(60);
        let name = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        while !(ready.exists() && name(child.id()) == "sleep\n") {
            assert!(Instant::now() < deadline, "the script does not get ready: {script}");
            std::thread::sleep(Duration::from_millis(5));
        }
        // What is given and is not there is an error.
        let disk = if script.contains(" /mnt") { Some("mnt[/mnt]:disk") } else { None };
        task.dump(child.id(), disk);
        task
    }

    fn dump(&mut self, pid: u32, disk: Option<&str>) {
        let (pid, key) = (pid.to_string(), self.key());
        fs::create_dir(self.images()).unwrap();
        let images = self.images();
        let args = ["dump", "-t", &pid, "-D", images.to_str().unwrap(), "--host-key", &key];
        let given = ["mnt[]"].into_iter().chain(disk).flat_map(|given| ["--external", given]);
        let output = torpor(&args).args(given).output().unwrap();
        let pid: i32 = pid.parse().unwrap();
        if !output.status.success() {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        }
        torpor_sys::process::wait(pid, true).unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }

    fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    fn key(&self) -> String {
        self.dir.path().join("host.key").to_str().unwrap().to_owned()
    }

    fn run(&self, command: &[&str], rules: &[&str]) -> Output {
        let (images, key) = (self.images(), self.key());
        let mut all = torpor(command);
        if command[0] == "restore" {
            all.args(["-d", "-D"]);
        }
        all.arg(images).args(["--host-key", &key]).args(&self.options);
        // Neither a policy of the machine nor one for foreign images counts here.
        all.args(["--policy", "/dev/null"]);
        for rule in rules {
            all.args(["--policy-rule", rule]);
        }
        all.output().unwrap()
    }

    /// Gives the task one more open file in its images, with number 900001 and in place of the last one.
    fn open(&self, ty: FdTypes, change: impl FnOnce(&mut FileEntry)) {
        let (id, fd, r#type) = (900_001, 99, ty.into());
        let images = ImageDir::open(self.images()).unwrap();
        let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
        files.retain(|file| file.id != id);
        let mut file = FileEntry { r#type, id, ..FileEntry::default() };
        change(&mut file);
        files.push(file);
        images.write_all(kind::FILES, 0, &files).unwrap();
        let core: CoreEntry = images.read_one(kind::CORE, self.root().into()).unwrap();
        let ids =
            core.ids.unwrap_or_else(|| images.read_one(kind::IDS, self.root().into()).unwrap());
        let table = u64::from(ids.files_id);
        let mut fds: Vec<FdinfoEntry> = images.read_all_or_empty(kind::FDINFO, table).unwrap();
        fds.retain(|open| open.fd != fd);
        fds.push(FdinfoEntry { id, r#type, fd, ..FdinfoEntry::default() });
        images.write_all(kind::FDINFO, table, &fds).unwrap();
    }

    /// Both the audit and the restore name all of `wanted`; nothing has been made.
    fn denied(&self, rules: &[&str], wanted: &[&str]) {
        for command in [&["image", "audit"][..], &["restore"]] {
            let output = self.run(command, rules);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(1), "{rules:?}: {said}");
            for text in wanted {
                assert!(said.contains(text), "{text:?} is missing for {rules:?}: {said}");
            }
        }
        let root = self.root();
        assert!(!Path::new(&format!("/proc/{root}")).exists(), "task {root} is there");
    }

    /// The audit finds nothing against the rules.
    fn allowed(&self, rules: &[&str]) {
        let output = self.run(&["image", "audit"], rules);
        assert!(output.status.success(), "{rules:?}: {}", said(&output));
    }

    /// A restore under the rules succeeds; what `look` sees of the task, which is gone then.
    fn wakes<T>(&self, rules: &[&str], look: impl FnOnce(u32) -> T) -> T {
        let output = self.run(&["restore"], rules);
        assert!(output.status.success(), "{}", said(&output));
        let seen = look(self.root());
        kill_process(Pid::from_raw(self.root().cast_signed()).unwrap(), Signal::KILL).unwrap();
        seen
    }

    fn root(&self) -> u32 {
        let images = ImageDir::open(self.images()).unwrap();
        images.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap()[0].pid
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn what_a_task_may_do() {
    let task = Asleep::new(&["--uts"], ":");
    for (rule, wanted, other) in [
        ("capabilities.allow=['CHOWN']", "(capabilities.allow)", "capabilities.allow='all'"),
        ("seccomp.require=true", "(seccomp.require)", "seccomp.require=false"),
        ("no-new-privileges.require=true", "(no-new-privileges.require)", "seccomp.require=false"),
        ("users.allow=['1000-1999']", "user id 0", "users.allow=['0']"),
        ("groups.allow=[]", "group id 0", "groups.allow='all'"),
        ("namespaces.require=['uts','net']", "net namespace", "namespaces.require=['uts']"),
        ("lsm.profiles=['strict']", "(lsm.profiles)", "lsm.profiles='all'"),
        ("signature.signed=true", "(signature.signed)", "signature.signed=false"),
        ("signature.sealed=true", "not sealed", "signature.sealed=false"),
        ("signature.signers=['ops']", "(signature.signers)", "signature.signers='all'"),
    ] {
        task.denied(&[rule], &[wanted]);
        task.allowed(&[other]);
    }
    // All at once, each with its rule.
    task.denied(
        &["seccomp.require=true", "users.allow=[]", "capabilities.allow=[]"],
        &["(seccomp.require)", "(users.allow)", "(capabilities.allow)", "not given by the policy"],
    );
    task.wakes(&["users.allow=['0']"], |_| ());
}

#[test]
fn what_a_task_has_given_up() {
    let script = "exec 9>&1";
    let task =
        Asleep::new(&["--uts", "setpriv", "--no-new-privs", "--bounding-set=-all,+kill"], script);
    task.allowed(&["no-new-privileges.require=true"]);
    // Root's permitted set is what it was; only the bounding set is smaller.
    task.denied(&["capabilities.allow=[]"], &["(capabilities.allow)"]);
}

#[test]
fn files_that_would_be_made() {
    let script = "mount -t tmpfs none /opt
        cp /bin/sh /opt/su; chmod 4755 /opt/su
        mknod /opt/disk b 259 7
        cp /bin/sh /opt/ghost; chmod 2755 /opt/ghost; exec 7</opt/ghost; rm /opt/ghost";
    let task = Asleep::new(&["--mount", "--propagation=private"], script);
    task.denied(
        &["files.set-uid=false"],
        &["ghost-file-1.img", "\"/opt/ghost\"", "tmpfs-dev-", "\"./su\"", "(files.set-uid)"],
    );
    task.denied(&["files.devices=['c *:*']"], &["b 259:7", "\"./disk\"", "(files.devices)"]);
    task.allowed(&["files.devices=['b 259:*']"]);
    task.allowed(&["files.set-uid=true"]);
}

/// What a new IPC namespace has anyway is not asked for.
#[test]
fn limits_of_ipc_namespaces() {
    Asleep::new(&["--ipc"], "ipcmk --queue").allowed(&["ipc.sysctls=[]"]);
    let task = Asleep::new(&["--ipc"], "echo 70000 >/proc/sys/kernel/shmmax");
    let asked = "sysctl kernel.shmmax = \"70000\"";
    task.denied(&["ipc.sysctls=[]"], &["ipcns-var-", asked, "(ipc.sysctls)"]);
    task.denied(&["ipc.sysctls=['fs.mqueue.*']"], &[asked]);
    task.allowed(&["ipc.sysctls=['kernel.shmmax']"]);
    for command in [&["image", "audit"][..], &["image", "plan"]] {
        let output = task.run(command, &[]);
        assert!(said(&output).contains(asked), "{}", said(&output));
        let json = said(&task.run(&[command, &["--json"]].concat(), &[]));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let list = if command.contains(&"plan") { "items" } else { "requests" };
        let all = json[list].as_array().unwrap();
        assert!(all.iter().any(|ask| ask["kind"] == "ipc" && ask["text"] == asked), "{json}");
    }
}

/// What anybody may have is in the plan, though no policy limits it.
#[test]
fn sockets_unlinked_files_and_archives_are_in_the_plan() {
    let script = "ip link set lo up; mount -t tmpfs none /opt; mkdir /opt/dir
        echo 12345 >/opt/dir/file; mkfifo /opt/fifo
        exec 7<>/dev/udp/127.0.0.1/9; exec 8>/opt/gone; chmod 640 /opt/gone; echo >&8; rm /opt/gone";
    let mut task = Asleep::new(&["--mount", "--propagation=private", "--net"], script);
    task.options = vec!["--external", "mnt[]"];
    let images = ImageDir::open(task.images()).unwrap();
    let network = images.ids(kind::NETNS).unwrap()[0];
    let files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let socket = files.iter().find_map(|file| file.isk.as_ref()).unwrap();
    let (id, port) = (socket.id, socket.src_port);
    let connected = format!(
        "IPv4 datagram socket of UDP in net namespace {network} at 127.0.0.1:{port}, connected to \
         127.0.0.1:9, established (file {id})"
    );
    let all = [
        ("network", &*connected),
        ("files", "unlinked \"/opt/gone\": file of 1 bytes, of 0:0, mode 640"),
        ("mounts", "fills a new file system: 1 files of 6 bytes, 1 directories, 1 others"),
    ];
    let plan = said(&task.run(&["image", "plan"], &[]));
    let json = said(&task.run(&["image", "plan", "--json"], &[]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let audit = said(&task.run(&["image", "audit"], &[]));
    for (kind, text) in all {
        assert!(plan.contains(&format!("\n  {text}\n")), "{text}: {plan}");
        let mut items = json["items"].as_array().unwrap().iter();
        assert!(items.any(|item| item["kind"] == kind && item["text"] == text), "{text}: {json}");
        assert!(!audit.contains(text), "{audit}");
    }
    task.wakes(&[], |_| ());
}

#[test]
fn images_that_were_changed_are_no_longer_this_hosts() {
    let task = Asleep::new(&["--uts"], ":");
    let rules = ["foreign.users.allow=[]"];
    task.allowed(&rules);
    let text = said(&task.run(&["image", "audit"], &[]));
    assert!(text.starts_with("made on this host"), "{text}");
    // Somebody adds an image, or takes the mark of another checkpoint.
    fs::write(task.images().join("autofs-99.img"), "x").unwrap();
    task.denied(&rules, &["(foreign.users.allow)"]);
    fs::remove_file(task.images().join("autofs-99.img")).unwrap();
    task.allowed(&rules);
    // Or changes what a program has in memory.
    let pages = task.images().join("pages-1.img");
    let whole = fs::read(&pages).unwrap();
    let mut other = whole.clone();
    other[whole.len() / 2] ^= 1;
    fs::write(&pages, &other).unwrap();
    task.denied(&rules, &["(foreign.users.allow)"]);
    assert!(!said(&task.run(&["image", "audit"], &[])).starts_with("made on this host"));
    fs::write(&pages, &whole).unwrap();
    task.allowed(&rules);
    let images = ImageDir::open(task.images()).unwrap();
    let inventory = images.inventory().unwrap();
    assert!(inventory.torpor_host_mark.is_some());
    let changed = InventoryEntry { torpor_host_mark: Some(vec![0; 32]), ..inventory };
    images.write_one(kind::INVENTORY, 0, &changed).unwrap();
    task.denied(&rules, &["(foreign.users.allow)"]);
}

/// Pages are too many to be kept as they were judged.
#[test]
fn pages_that_are_changed_after_the_verdict_end_the_restore() {
    let mut task = Asleep::new(&["--uts"], ":");
    let rules = ["foreign.users.allow=[]"];
    let pages = task.images().join("pages-1.img");
    let whole = fs::read(&pages).unwrap();
    let change = format!(
        "[ $CRTOOLS_SCRIPT_ACTION != pre-restore ] || printf other | dd of={} conv=notrunc",
        pages.display()
    );
    let script = task.dir.path().join("change");
    write_script(&script, &change);
    let script: &'static str = script.to_str().unwrap().to_owned().leak();
    task.options.extend(["--action-script", script]);
    let output = task.run(&["restore"], &rules);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let wanted =
        "pages-1.img: its content, owner, mode or names were changed while it was restored";
    assert!(said.contains(wanted), "{said}");
    task.options.clear();
    fs::write(&pages, &whole).unwrap();
    task.wakes(&rules, |_| ());
}

/// Many entries that are small in the file and large in memory.
#[test]
fn images_that_would_take_all_memory() {
    let task = Asleep::new(&["--uts"], "");
    // Its length; the type 1 and the number of a file.
    let entry = |number: u32| {
        let number = [number & 0x7f | 0x80, number >> 7 & 0x7f | 0x80, number >> 14 & 0x7f];
        [6, 0, 0, 0, 8, 1, 16].into_iter().chain(number.map(|byte| byte.to_le_bytes()[0]))
    };
    let magic = kind::FILES.header.words().into_iter().flat_map(u32::to_le_bytes);
    let bytes: Vec<u8> = magic.chain((1..500_000).flat_map(entry)).collect();
    fs::write(task.images().join("files.img"), bytes).unwrap();
    task.denied(&[], &["MiB of memory, more than any dump's need"]);
}

#[test]
fn the_audit_as_json() {
    let task = Asleep::new(&["--uts"], ":");
    let output = task.run(&["image", "audit", "--json"], &["users.allow=[]"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["allowed"].as_bool(), json["made_here"].as_bool()), (Some(false), Some(true)));
    assert_eq!(json["violations"][0]["rule"], "users.allow");
    assert_eq!(json["violations"][0]["task"], task.root());
    assert!(json["requests"].as_array().unwrap().iter().any(|r| r["kind"] == "capabilities"));
    // What it names makes up for it.
    let line = json["allowing"][0].as_str().unwrap();
    assert!(line.starts_with("users.allow = [\""), "{line}");
    task.denied(&["users.allow=[]"], &[line]);
    task.allowed(&["users.allow=[]", line]);
}
