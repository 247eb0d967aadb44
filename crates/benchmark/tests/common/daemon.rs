//! A containerd that was there: a real one, which a test starts and the benchmark finds at its socket.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::json;
use torpor_benchmark::cri::v1::{
    ContainerConfig, ContainerMetadata, LinuxPodSandboxConfig, LinuxSandboxSecurityContext,
    NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
};
use torpor_benchmark::cri::{Client, image_spec};

use super::{success, wait};

/// The image of the pod, and of the pause programs of all pods here.
const IMAGE: &str = "docker.io/library/foreign:1";

/// A containerd with processes and mounts of its own.
pub struct Daemon {
    child: Child,
    dir: PathBuf,
    /// The control group above all of its pods.
    pub group: String,
}

/// A network of a containerd's own, and what its pods have of it.
pub struct Bridged<'a> {
    /// Where the CNI plugins are.
    pub plugins: &'a Path,
    /// What is looked for first on its PATH.
    pub bin: &'a Path,
}

const SCRIPT: &str =
    "mount -t tmpfs tmpfs /run && { ip link set lo up || true; } && exec \"$1\" --config \"$0\"";

/// A bridge that goes with the network it is in.
fn network(dir: &Path) -> serde_json::Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "test",
        "plugins": [{
            "type": "bridge",
            "bridge": "test0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": "10.112.0.0/16" }]],
                "dataDir": dir.join("addresses"),
            },
        }],
    })
}

impl Daemon {
    /// Starts one: with the network of the host, in which its pods have none of their own, or with a bridge.
    pub fn start(dir: PathBuf, program: &Path, bridged: Option<&Bridged<'_>>) -> Self {
        fs::create_dir_all(dir.join("cni")).unwrap();
        let at = |name: &str| format!("{:?}", dir.join(name));
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        let plugins = bridged.map_or(Path::new("/opt/cni/bin"), |bridged| bridged.plugins);
        let config = format!(
            "version = 2\nroot = {}\nstate = {}\n[grpc]\naddress = {}\n[{cri}]\nsandbox_image = {IMAGE:?}\n\
             restrict_oom_score_adj = true\ntolerate_missing_hugetlb_controller = true\n\
             [{cri}.cni]\nbin_dir = {plugins:?}\nconf_dir = {}\n[{cri}.containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n",
            at("root"),
            at("state"),
            at("cri.sock"),
            at("cni"),
        );
        fs::write(dir.join("config.toml"), config).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        // It ends with this test, and all that runs in it ends with it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"]);
        if let Some(Bridged { bin, .. }) = bridged {
            let path = std::env::var("PATH").unwrap();
            command.arg("--net").env("PATH", format!("{}:{path}", bin.display()));
            fs::write(dir.join("cni/test.conflist"), network(&dir).to_string()).unwrap();
        }
        command
            .args(["--kill-child", "--mount-proc", "--propagation", "private", "sh", "-c", SCRIPT])
            .arg(dir.join("config.toml"))
            .arg(program)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = command.spawn().unwrap();
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

    /// Lets a command run in the network of this containerd.
    pub fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--net=/proc/{}/ns/net", self.child.id())).arg("--");
        inside.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside
    }

    pub fn socket(&self) -> String {
        self.dir.join("cri.sock").display().to_string()
    }

    fn ctr(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.args(["--address", &self.socket(), "--namespace", "k8s.io"]).args(arguments);
        command
    }

    /// Makes the image.
    pub fn import(&self) {
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
    pub fn pod(&self) {
        let metadata = PodSandboxMetadata {
            name: "web".into(),
            uid: "web".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let host = NamespaceOption {
            network: NamespaceMode::Node.into(),
            pid: NamespaceMode::Container.into(),
            ipc: NamespaceMode::Pod.into(),
            ..NamespaceOption::default()
        };
        let security = LinuxSandboxSecurityContext {
            namespace_options: Some(host),
            ..LinuxSandboxSecurityContext::default()
        };
        let pod = PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: self.dir.join("logs").display().to_string(),
            labels: HashMap::from([("app".into(), "web".into())]),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("/{}/web", self.group),
                security_context: Some(security),
                ..LinuxPodSandboxConfig::default()
            }),
            ..PodSandboxConfig::default()
        };
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "web".into(), attempt: 0 }),
            image: Some(image_spec(IMAGE)),
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
    pub fn all(&self) -> BTreeSet<String> {
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
