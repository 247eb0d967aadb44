//! A containerd that was there, with a pod of somebody else in it: the benchmark goes, the pod stays as it was.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{TestDir, kill, row, samples, success, wait};
use torpor_benchmark::cri::Client;
use torpor_benchmark::cri::messages::*;

/// The image of the pod, and of the pause programs of all pods here.
const IMAGE: &str = "docker.io/library/foreign:1";

/// Debian's containerd with processes and mounts of its own, and the network of the host.
struct Daemon {
    child: Child,
    dir: PathBuf,
    /// The control group above all of its pods.
    group: String,
}

const SCRIPT: &str = "mount -t tmpfs tmpfs /run && exec /usr/bin/containerd --config \"$0\"";

impl Daemon {
    fn start(dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let at = |name: &str| format!("{:?}", dir.join(name));
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        let config = format!(
            "version = 2\nroot = {}\nstate = {}\n[grpc]\naddress = {}\n[{cri}]\nsandbox_image = {IMAGE:?}\n\
             restrict_oom_score_adj = true\ntolerate_missing_hugetlb_controller = true\n\
             [{cri}.cni]\nconf_dir = {}\n[{cri}.containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n",
            at("root"),
            at("state"),
            at("cri.sock"),
            at("cni"),
        );
        fs::write(dir.join("config.toml"), config).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        // It ends with this test, and all that runs in it ends with it.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc", "--propagation", "private", "sh", "-c", SCRIPT])
            .arg(dir.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let group = format!("torpor-foreign-{}", std::process::id());
        let daemon = Self { child, dir, group };
        let answers = || {
            let asked =
                daemon.ctr(&["version"]).stderr(Stdio::null()).stdout(Stdio::null()).status();
            asked.unwrap().success()
        };
        wait(answers, || fs::read_to_string(daemon.dir.join("log")).unwrap());
        daemon
    }

    fn socket(&self) -> String {
        self.dir.join("cri.sock").display().to_string()
    }

    fn ctr(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.args(["--address", &self.socket(), "--namespace", "k8s.io"]).args(arguments);
        command
    }

    /// Makes the image.
    fn import(&self) {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/rootfs");
        let (files, archive) = (self.dir.join("files"), self.dir.join("image.tar"));
        success(&Command::new(scripts.join("make")).arg(&files).output().unwrap());
        let entry = files.join("entry");
        fs::write(&entry, "#!/bin/sh\nexec sleep 2147483647\n").unwrap();
        fs::set_permissions(&entry, fs::Permissions::from_mode(0o755)).unwrap();
        let mut pack = Command::new(scripts.join("image"));
        success(&pack.arg(IMAGE).arg(&files).arg(&archive).arg("/entry").output().unwrap());
        success(&self.ctr(&["images", "import", archive.to_str().unwrap()]).output().unwrap());
    }

    /// Starts a pod with a container in it, as a kubelet does.
    fn pod(&self) {
        let metadata = PodSandboxMetadata {
            name: "web".into(),
            uid: "web".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let host = NamespaceOption {
            network: namespace::NODE,
            pid: namespace::CONTAINER,
            ipc: namespace::POD,
        };
        let security = LinuxSandboxSecurityContext { namespace_options: Some(host) };
        let pod = PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: self.dir.join("logs").display().to_string(),
            labels: HashMap::from([("app".into(), "web".into())]),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("/{}/web", self.group),
                security_context: Some(security),
            }),
            ..PodSandboxConfig::default()
        };
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "web".into(), attempt: 0 }),
            image: Some(ImageSpec { image: IMAGE.into() }),
            labels: HashMap::from([("app".into(), "web".into())]),
            log_path: "web.log".into(),
            ..ContainerConfig::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::new(&self.socket(), Duration::from_secs(60)).unwrap();
            let id = client.run_sandbox(pod.clone(), "runc").await.unwrap();
            let container = client.create(&id, container, pod).await.unwrap();
            client.start(&container).await.unwrap();
        });
    }

    /// Everything that somebody may have made here: containers with their processes, images, control groups.
    fn all(&self) -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        for list in [&["containers", "ls", "-q"][..], &["images", "ls", "-q"], &["tasks", "ls"]] {
            let said = success(&self.ctr(list).output().unwrap());
            all.extend(said.lines().map(|line| format!("{} {line}", list[0])));
        }
        for dir in self.groups() {
            let groups = fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_dir());
            all.extend(groups.map(|entry| entry.path().display().to_string()));
        }
        all
    }

    /// The control group in each hierarchy that has it.
    fn groups(&self) -> Vec<PathBuf> {
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = fs::read_dir(root).unwrap().flatten().map(|entry| entry.path());
        let all = [root.to_owned()].into_iter().chain(hierarchies);
        all.map(|dir| dir.join(&self.group)).filter(|dir| dir.is_dir()).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // `unshare` passes the end on to the first process of the namespace, and that to all others.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for group in self.groups() {
            let emptied = || {
                let mut find = Command::new("find");
                find.arg(&group).args(["-depth", "-type", "d", "-delete"]).stderr(Stdio::null());
                find.status().unwrap();
                !group.exists()
            };
            wait(emptied, || format!("{} is left", group.display()));
        }
    }
}

#[test]
fn what_belongs_to_others_stays_as_it_was() {
    let test_dir = TestDir::new();
    let daemon = Daemon::start(test_dir.path("daemon"));
    daemon.import();
    daemon.pod();
    let before = daemon.all();
    assert_eq!(before.iter().filter(|line| line.contains("RUNNING")).count(), 2, "{before:?}");
    let config = |runs: u32| {
        test_dir.config(&format!(
            "runs: {runs}\nwarmup: 0\nfilters: [operations.container.*, operations.image.*]\nendpoints:\n\
             - name: here\n  socket: {}\n  cgroup_parent: /{}\n  handlers: [{{name: runc}}]\n",
            daemon.socket(),
            daemon.group,
        ))
    };
    config(1);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    for name in ["container.start", "image.pull"] {
        let row = row(&results, &format!("operations.{name}"), "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
    assert_eq!(daemon.all(), before);
    test_dir.assert_clean();

    // While a container of its own runs.
    config(1000);
    let mut tool = test_dir.run();
    let mut child =
        tool.arg("--again").stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let running = || daemon.all().iter().filter(|line| line.contains("RUNNING")).count();
    wait(|| running() > 2, || "it has started nothing".into());
    kill(&mut child);
    test_dir.assert_clean();
    wait(|| daemon.all() == before, || format!("{:?} instead of {before:?}", daemon.all()));
}
