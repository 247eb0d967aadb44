//! The restore policy on real checkpoints: for each rule one that it ends, and the same
//! one under a rule that allows it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod addresses;
mod given;
mod open_files;
#[path = "../sleeper/mod.rs"]
mod sleeper;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use torpor_images::proto::{
    CoreEntry, FdTypes, FdinfoEntry, FileEntry, FownEntry, Fstype, InventoryEntry, MntEntry,
    PstreeEntry, TaskCoreEntry, ThreadCoreEntry, UidGidExtent, UsernsEntry,
};
use torpor_images::{ImageDir, kind};
use torpor_policy::Capabilities;

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

#[test]
fn mounts() {
    let script = "mount --bind /usr /mnt; mount -t tmpfs none /opt";
    let task = Asleep::new(&["--mount", "--propagation=private"], script);
    let given = |path: &str, rules: &[&str]| {
        let (images, key) = (task.images(), task.key());
        let mut audit = torpor(&["image", "audit", images.to_str().unwrap(), "--host-key", &key]);
        audit.args(["--policy", "/dev/null", "--external", &format!("mnt[disk]:{path}")]);
        for rule in rules {
            audit.args(["--policy-rule", rule]);
        }
        said(&audit.output().unwrap())
    };
    // Of all that was found on this host, the mount that is given by its key.
    let denied = |path: &str| {
        let said = given(path, &["mounts.sources=['/srv/data']"]);
        let line = format!("\"/mnt\": {path:?} of this host, as given: ");
        said.lines().any(|l| l.contains(&line) && l.ends_with("(mounts.sources)"))
    };
    assert!(denied("/usr") && denied("/srv/data/../../etc") && denied("/srv/database"));
    assert!(!denied("/srv/data/x") && !denied("/srv/data"));
    task.denied(&["mounts.file-systems=['proc']"], &["\"/opt\": file system tmpfs"]);
}

/// A mount that images say is of a device which the caller gives shows what is on that.
#[test]
fn mounts_of_devices() {
    let task = Asleep::new(&["--mount", "--propagation=private"], "mount -t tmpfs none /opt");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::MNTS).unwrap()[0];
    let whole: Vec<MntEntry> = images.read_all(kind::MNTS, space).unwrap();
    let changed = |fstype: Fstype, name: Option<&str>, options: &str| {
        let mut mounts = whole.clone();
        let mount = mounts.iter_mut().find(|mount| mount.mountpoint == b"/opt").unwrap();
        (mount.fstype, mount.fsname) = (fstype as u32, name.map(ToOwned::to_owned));
        (mount.ext_key, mount.source) = (Some("CRIU:EXTERNAL_DEV".into()), b"disk".to_vec());
        mount.options = options.as_bytes().to_vec();
        images.write_all(kind::MNTS, space, &mounts).unwrap();
    };
    let (auto, other) = (Fstype::Auto, Fstype::Unsupported);
    changed(Fstype::Overlayfs, None, "lowerdir=/etc:/usr");
    task.denied(&[], &["mountpoints-", "is of a device, but its type has none"]);
    changed(auto, Some("overlay"), "lowerdir=/etc:/usr");
    task.denied(&[], &["mountpoints-", "is of type overlay, but goes by its name"]);
    for (fstype, name) in [(auto, "proc"), (other, "cgroup2"), (other, "sysfs")] {
        changed(fstype, Some(name), "");
        task.denied(&[], &[&format!("is of type {name}, but goes by its name")]);
    }
    let given = "\"/opt\": file system xfs of the device that is given as \"disk\"";
    changed(other, Some("xfs"), "rw,logdev=/dev/sda");
    task.denied(
        &["mounts.file-systems=['xfs']"],
        &[given, "the option logdev names a further device (mounts.file-systems)"],
    );
    task.denied(&["mounts.file-systems=['ext4']"], &[given, "this type is not among those"]);
}

#[test]
fn networks() {
    let script = "ip link set lo up
        ip link add br0 type bridge; ip link set br0 up; ip addr add 10.7.0.1/24 dev br0
        ip route add 10.9.0.0/16 via 10.7.0.2
        nft add table inet t; echo 1 >/proc/sys/net/ipv4/conf/br0/accept_local";
    let task = Asleep::new(&["--net"], script);
    task.denied(
        &[
            "network.firewall=false",
            "network.routes=false",
            "network.links=['loopback']",
            "network.sysctls=[]",
        ],
        &[
            "nftables-",
            "10.9.0.0/16 through 10.7.0.2",
            "\"br0\" (bridge)",
            "sysctl net.ipv4.conf.br0.accept_local = \"1\"",
        ],
    );
    // The routes of its own addresses and the first rules are none that are asked for.
    let said = said(&task.run(&["image", "audit"], &[]));
    assert!(!said.contains("10.7.0.0") && !said.contains("rule of priority"), "{said}");
    task.allowed(&["network.links=['loopback', 'bridge']", "network.routes=true"]);
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

/// Rules are allowed, but not what names files of the host, or programs for it to run.
#[test]
fn firewalls_are_rules_only() {
    let task = Asleep::new(&["--net"], "ip link set lo up; nft add table inet t");
    let images = ImageDir::open(task.images()).unwrap();
    let network = images.ids(kind::NFTABLES).unwrap()[0];
    let refused = |image: kind::Kind, text: &str| {
        let path = task.images().join(image.file_name(network));
        let whole = fs::read(&path);
        fs::write(&path, text).unwrap();
        task.denied(&[], &[&format!("{}: line ", image.file_name(network))]);
        whole.map_or_else(|_| fs::remove_file(&path), |whole| fs::write(&path, whole)).unwrap();
    };
    for text in [
        "include \"/etc/shadow\"\n",
        "table ip a {\ninclude \"/etc/shadow\"\n}\n",
        "table ip a { } ; include \"/etc/shadow\"\n",
        "define x = 1\n",
        "flush ruleset\n",
        "table ip a 1include \"/etc/shadow\"\n",
        "table ip a { list ruleset; }\n",
    ] {
        refused(kind::NFTABLES, text);
    }
    for rule in [
        "-A INPUT -M /tmp/x -j ACCEPT",
        "-A INPUT --modprobe=/tmp/x",
        "-A INPUT --modp /tmp/x",
        "-N X -M /tmp/x",
        "-A INPUT -m ../../tmp/x",
        // What the program takes for words and lines is not what is between spaces.
        "-A INPUT -m comment --comment \"x\"-M /tmp/x -j ACCEPT",
        "[0:0]-M/tmp/x -A INPUT -j ACCEPT",
        &format!("#{}-A INPUT -M /tmp/x -j ACCEPT", "x".repeat(10_238)),
    ] {
        let text = format!("*filter\n:INPUT ACCEPT [0:0]\n{rule}\nCOMMIT\n");
        refused(kind::IPTABLES, &text);
        refused(kind::IP6TABLES, &text);
    }
    task.allowed(&[]);
    let tables = task.wakes(&[], |root| {
        let mut nft = Command::new("nsenter");
        nft.args(["-t", &root.to_string(), "-n", "nft", "list", "tables"]);
        said(&nft.output().unwrap())
    });
    assert_eq!(tables, "table inet t\n");
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

#[test]
fn a_bundle_limits_foreign_images() {
    let task = Asleep::new(&["--mount", "--propagation=private"], "mount -t tmpfs none /opt");
    let bundle = tempfile::tempdir().unwrap();
    let audit = |spec: &str| {
        fs::write(bundle.path().join("config.json"), spec).unwrap();
        let images = task.images();
        let mut audit = torpor(&["image", "audit", images.to_str().unwrap(), "--host-key", "none"]);
        audit.args(["--policy", "/dev/null", "--bundle"]).arg(bundle.path());
        said(&audit.output().unwrap())
    };
    let narrow = audit(
        r#"{"ociVersion": "1.0.2", "root": {"readonly": true},
            "process": {"noNewPrivileges": true, "capabilities": {"bounding": ["CAP_KILL"]}},
            "mounts": [{"destination": "/opt", "type": "tmpfs", "options": ["nosuid", "nodev"]}],
            "linux": {"seccomp": {}, "namespaces": [{"type": "pid"}, {"type": "mount"}],
                      "uidMappings": [{"containerID": 0, "hostID": 1000, "size": 1}]}}"#,
    );
    for wanted in [
        "(foreign.capabilities.allow)",
        "(foreign.seccomp.require)",
        "(foreign.no-new-privileges.require)",
        "pid namespace",
        "\"/opt\": file system tmpfs: the calling runtime wants it nosuid, nodev",
        "the calling runtime wants it read-only",
    ] {
        assert!(narrow.contains(wanted), "{wanted:?} is missing: {narrow}");
    }
    assert!(!narrow.contains("mnt namespace: it has"), "{narrow}");
    assert!(audit("{}").contains("no bundle"));
    let odd = audit(r#"{"ociVersion": "1.0.2", "Process": {}}"#);
    assert!(odd.contains("some runtimes take the key \"Process\""), "{odd}");
}

#[test]
fn a_configuration_is_judged_by_itself() {
    let bundle = tempfile::tempdir().unwrap();
    let spec = r#"{"ociVersion": "1.0.2", "root": {"path": "rootfs"},
                   "linux": {"cgroupsPath": "/system.slice"}}"#;
    fs::write(bundle.path().join("config.json"), spec).unwrap();
    let audit = |rule: &str| {
        let mut audit = torpor(&["image", "audit", "--no-images", "--policy", "/dev/null"]);
        audit.arg("--policy-rule").arg(rule).arg(format!("--bundle={}", bundle.path().display()));
        audit.output().unwrap()
    };
    assert!(audit("cgroups.allow=[\"/system.slice\"]").status.success());
    let denied = audit("cgroups.allow=[\"/guests\"]");
    let wanted = "config.json: the control group /system.slice: this path is not among those \
                  allowed (cgroups.allow)";
    assert!(!denied.status.success() && said(&denied).contains(wanted), "{}", said(&denied));
}

/// Without images and bundle it is only found out whether a restore would take the options.
#[test]
fn options_are_judged_by_themselves() {
    let audit =
        |words: &[&str]| torpor(&["image", "audit", "--no-images"]).args(words).output().unwrap();
    let fine = audit(&["--policy", "/dev/null", "--policy-rule", "files.set-uid=false"]);
    assert!(fine.status.success(), "{}", said(&fine));
    for (words, what) in [
        (&["--nosuch"][..], "there is no option --nosuch"),
        (&["--leave-running"], "restore has no option --leave-running"),
        (&["--policy", "/none"], "policy /none"),
        (&["images"], "\"images\" is no option"),
    ] {
        let wrong = audit(words);
        assert!(!wrong.status.success() && said(&wrong).contains(what), "{}", said(&wrong));
    }
}

/// A file on a mount that there is not.
#[test]
fn a_file_of_an_unknown_mount() {
    let task = Asleep::new(&["--mount"], "exec 7>/dev/null");
    let images = ImageDir::open(task.images()).unwrap();
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let file = files.iter_mut().find(|entry| entry.reg.is_some()).unwrap();
    file.reg.as_mut().unwrap().mnt_id = Some(900_001);
    let what = format!("files.img: file {} is of mount 900001, which there is not", file.id);
    images.write_all(kind::FILES, 0, &files).unwrap();
    task.denied(&[], &[&what]);
}

/// What a restore would set for tasks with its own rights, in the name of others or before others.
#[test]
fn what_is_set_with_the_rights_of_the_restore() {
    let task = Asleep::new(&["--uts"], "exec 7>/dev/null");
    let root = task.root();
    let images = ImageDir::open(task.images()).unwrap();
    let whole: CoreEntry = images.read_one(kind::CORE, root.into()).unwrap();
    let of_task = |text: &str| format!("core-{root}.img: task {root}: {text}");
    let changed = |change: fn(&mut TaskCoreEntry, &mut ThreadCoreEntry)| {
        let mut core = whole.clone();
        change(core.tc.as_mut().unwrap(), core.thread_core.as_mut().unwrap());
        images.write_one(kind::CORE, root.into(), &core).unwrap();
    };
    changed(|tc, _| tc.loginuid = Some(4711));
    task.denied(&["users.login=false"], &[&of_task("logged in as user id 4711"), "(users.login)"]);
    task.allowed(&["users.login=true"]);
    changed(|_, thread| thread.torpor_ioprio = Some(1 << 13 | 4));
    task.denied(&["scheduling.allow=false"], &[&of_task("scheduling: priority 0x2004 for I/O")]);
    task.allowed(&["scheduling.allow=true"]);
    changed(|_, thread| thread.torpor_io_flusher = Some(true));
    task.denied(&["limits.raise=false"], &[&of_task("PR_SET_IO_FLUSHER of 1")]);
    changed(|_, _| {});
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let reg = files.iter_mut().find_map(|entry| entry.reg.as_mut()).unwrap();
    reg.fown = FownEntry { pid: root, euid: 4712, ..FownEntry::default() };
    images.write_all(kind::FILES, 0, &files).unwrap();
    task.denied(&["users.allow=['0']"], &["files.img: user id 4712"]);
    task.allowed(&["users.allow=['0', '4712']"]);
}

/// A process in a user namespace of its own, whose ids are those from `LOWER` on here.
struct Joined {
    process: std::process::Child,
}

impl Joined {
    const LOWER: u32 = 70_000;

    fn new() -> Self {
        let process = Command::new("unshare").args(["--user", "cat"]).stdin(Stdio::piped()).spawn();
        let joined = Self { process: process.unwrap() };
        let pid = joined.process.id();
        let inode = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while inode(&pid.to_string()) == inode("self") {
            assert!(Instant::now() < deadline, "process {pid} makes no user namespace");
            std::thread::sleep(Duration::from_millis(5));
        }
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{pid}/{map}"), format!("0 {} 100\n", Self::LOWER)).unwrap();
        }
        joined
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Ids count as those of the user namespace that the tasks join, whatever maps the images have.
#[test]
fn ids_in_a_joined_user_namespace() {
    let task = Asleep::new(&["--uts", "--user", "--map-root-user"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::USERNS).unwrap()[0];
    let map = vec![UidGidExtent { first: 0, lower_first: 4711, count: 1 }];
    let maps = UsernsEntry { uid_map: map.clone(), gid_map: map, torpor_nested: None };
    images.write_one(kind::USERNS, space, &maps).unwrap();
    let joined = Joined::new();
    let pid = joined.process.id();
    for target in [pid.to_string(), format!("/proc/{pid}/ns/user")] {
        let join = format!("--join-ns=user:{target},0,0");
        let restore = ["restore", &*join];
        let output = task.run(&restore, &["users.allow=['4711']", "user-namespace.users=[]"]);
        let text = said(&output);
        assert!(text.contains(&format!("user id {}", Joined::LOWER)), "{target}: {text}");
        // The maps of the images are not made, so nobody asks for them.
        assert!(!text.contains("4711 on"), "{target}: {text}");
        assert!(!Path::new(&format!("/proc/{}", task.root())).exists(), "the task is there");
        // The restoring program has not got all capabilities on every machine.
        let all = "foreign.capabilities.allow='all'";
        let output = task.run(&restore, &["users.allow=['70000']", all]);
        assert!(output.status.success(), "{target}: {}", said(&output));
        let (root, map) = (task.root(), format!("/proc/{}/uid_map", task.root()));
        assert!(fs::read_to_string(map).unwrap().contains("70000"), "{target}");
        kill_process(Pid::from_raw(root.cast_signed()).unwrap(), Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Path::new(&format!("/proc/{root}")).exists() {
            assert!(Instant::now() < deadline, "task {root} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Maps that the kernel would not take are an error of an audit as well: of no ids, and of ids that there are not.
#[test]
fn maps_of_ids_that_cannot_be() {
    let task = Asleep::new(&["--uts", "--user", "--map-root-user"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::USERNS).unwrap()[0];
    let whole: UsernsEntry = images.read_one(kind::USERNS, space).unwrap();
    for (first, lower_first, count) in [(1, 0, 0), (1, 0, u32::MAX), (0, 1, u32::MAX)] {
        let mut maps = whole.clone();
        maps.gid_map.push(UidGidExtent { first, lower_first, count });
        images.write_one(kind::USERNS, space, &maps).unwrap();
        let wanted = format!("userns-{space}.img: its maps are impossible");
        task.denied(&[], &[&wanted]);
    }
}

/// What the restoring program may do while it restores tasks that may do little.
#[test]
fn a_restore_gives_up_what_it_does_not_need() {
    const GONE: &str = "sys_module,sys_rawio,sys_boot,mac_admin,mknod";
    let bounding = format!("--bounding-set=-{}", GONE.replace(',', ",-"));
    let narrow = Asleep::new(&["--uts", "setpriv", &bounding], "");
    let wide = Asleep::new(&["--uts"], "");
    let sets = |task: &Asleep| {
        let (said, script) = (task.dir.path().join("said"), task.dir.path().join("script"));
        // Between them is a shell.
        let text = format!(
            "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-restore ] && exit
            parent=$(sed -n 's/^PPid://p' /proc/$PPID/status)
            cat /proc/$((parent))/status >{}\n",
            said.display()
        );
        write_script(&script, &text);
        let root = task.root();
        let images = task.images();
        let args = ["restore", "-d", "--host-key", &task.key(), "--action-script"];
        let end = torpor(&args).arg(&script).arg("-D").arg(&images).output().unwrap();
        assert!(end.status.success(), "{}", crate::said(&end));
        let of_task = fs::read_to_string(format!("/proc/{root}/status")).unwrap();
        kill_process(Pid::from_raw(root.cast_signed()).unwrap(), Signal::KILL).unwrap();
        (fs::read_to_string(said).unwrap(), of_task)
    };
    let set = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        Capabilities(u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap())
    };
    let gone = Capabilities::parse(GONE.split(',')).unwrap();
    let own = set(&fs::read_to_string("/proc/self/status").unwrap(), "CapPrm");
    let (supervisor, task) = sets(&narrow);
    for name in ["CapPrm", "CapEff", "CapInh"] {
        let kept = set(&supervisor, name);
        assert_eq!(kept.without(gone), kept, "{name}: {supervisor}");
    }
    assert_eq!(set(&task, "CapBnd"), own.without(gone), "{task}");
    // It has to give to the tasks what is theirs.
    let (supervisor, task) = sets(&wide);
    assert_eq!(set(&supervisor, "CapEff"), own, "{supervisor}");
    assert_eq!(set(&task, "CapEff"), own, "{task}");
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
fn a_policy_that_makes_no_sense_ends_the_restore() {
    let task = Asleep::new(&["--uts"], ":");
    let policy = task.dir.path().join("policy.toml");
    fs::write(&policy, "[users]\nalow = []\n").unwrap();
    let images = task.images();
    let args = ["restore", "-D", images.to_str().unwrap(), "--policy", policy.to_str().unwrap()];
    let text = said(&torpor(&args).output().unwrap());
    assert!(
        text.contains("line 2: there is no rule users.alow; did you mean users.allow?"),
        "{text}"
    );
    task.wakes(&[], |_| ());
    let args = ["restore", "-D", images.to_str().unwrap(), "--policy", "/nonexistent"];
    assert!(said(&torpor(&args).output().unwrap()).contains("policy /nonexistent: "));
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
