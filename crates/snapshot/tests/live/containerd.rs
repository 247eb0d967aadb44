//! An unmodified containerd 2.2 or 2.3 starts a snapshot of an image, asked through its CRI. It lives in
//! namespaces of its own, in the network of a Podman that makes the snapshot and of a registry.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::json;
use torpor_benchmark::cri::v1::{
    ContainerConfig, ContainerMetadata, LinuxContainerConfig, LinuxContainerSecurityContext,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, Mount, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use torpor_benchmark::cri::{CallError, Client, image_spec};
use torpor_runtimes_tests::podman::{IMAGE, Podman};
use torpor_runtimes_tests::scratch::Scratch;

use crate::fixture::{shown, until};
use crate::podman::{HOST, registry, snapshot};

/// What containerd and its shims keep below /run is its own.
const WORLD: &str = "mount -t tmpfs tmpfs /run && \"$@\"";

/// What a container does not see, as the kubelet asks for it.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// What it only reads.
const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// containerd 2, which Debian does not have, built from its Go modules: the version that is measured, or another.
fn build(other: Option<&str>) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut script = Command::new(root.join("scripts/benchmark-runtimes.sh"));
    if let Some(version) = other {
        script.arg(format!("target/benchmark-runtimes-{version}")).env("CONTAINERD", version);
    }
    let output = script.env("RUNTIMES", "containerd").output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let matrix = PathBuf::from(String::from_utf8(output.stdout).unwrap().lines().last().unwrap());
    Some(matrix.with_file_name("bin").join("containerd")).filter(|program| program.exists())
}

/// A containerd with its CRI.
struct Containerd<'a> {
    scratch: &'a Scratch,
    unshare: Child,
}

impl<'a> Containerd<'a> {
    fn start(scratch: &'a Scratch, podman: &Podman<'_>, program: &Path) -> Self {
        let dir = scratch.dir("containerd");
        let quoted = |name: &str| json!(dir.join(name)).to_string();
        let network = json!({
            "cniVersion": "0.4.0",
            "name": "snapshot",
            "plugins": [{
                "type": "bridge",
                "bridge": "snapshot0",
                "isGateway": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": "10.97.63.0/24" }]],
                    "dataDir": dir.join("addresses"),
                },
            }],
        });
        fs::create_dir(dir.join("cni")).unwrap();
        fs::write(dir.join("cni/bridge.conflist"), network.to_string()).unwrap();
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        let config = format!(
            "version = 2\nroot = {}\nstate = {}\n[grpc]\naddress = {}\n[{cri}]\n\
             sandbox_image = \"{HOST}/pause:1\"\nrestrict_oom_score_adj = true\n\
             tolerate_missing_hugetlb_controller = true\n\
             enable_experimental_restore_via_create = true\n[{cri}.cni]\n\
             bin_dir = \"/usr/lib/cni\"\nconf_dir = {}\n[{cri}.containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n",
            quoted("root"),
            quoted("state"),
            quoted("socket"),
            quoted("cni"),
        );
        fs::write(dir.join("config.toml"), config).unwrap();
        let log = File::create(scratch.join("containerd.log")).unwrap();
        let mut command = scratch.command("nsenter");
        // Its own shim lies beside it.
        let path = [scratch.path().join("bin"), program.parent().unwrap().to_owned()];
        let path = path.map(|dir| dir.display().to_string()).join(":");
        command.env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap()));
        command.env("TMPDIR", scratch.dir("tmp"));
        command.arg(format!("--net={}", podman.network().path().display()));
        command.args(["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--ipc"]);
        command.args(["--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c", WORLD, "sh"]);
        command.arg(program).arg("--config").arg(dir.join("config.toml"));
        let unshare = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        Self { scratch, unshare }
    }

    /// The control groups of all that it starts.
    fn group(&self) -> String {
        format!("/{}", self.scratch.name())
    }

    fn client(&self) -> Client {
        let socket = self.scratch.join("containerd/socket").display().to_string();
        Client::new(&socket, Duration::from_secs(60)).unwrap()
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        // The kernel ends all that is in its pid namespace before `unshare` has ended.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            let group = hierarchy.path().join(self.group().trim_start_matches('/'));
            if group.exists() {
                until("its control groups are empty", || {
                    let remove = ["-depth", "-type", "d", "-delete"];
                    Command::new("find").arg(&group).args(remove).output().unwrap().status.success()
                });
            }
        }
    }
}

/// A container with the image `image`, in a pod of its own; what it says to `words`.
async fn run(
    containerd: &Containerd<'_>,
    image: &str,
    words: &[&str],
) -> Result<String, CallError> {
    let client = containerd.client();
    let scratch = containerd.scratch;
    let options = || NamespaceOption {
        network: NamespaceMode::Pod.into(),
        pid: NamespaceMode::Container.into(),
        ipc: NamespaceMode::Pod.into(),
        ..NamespaceOption::default()
    };
    let security = LinuxSandboxSecurityContext {
        namespace_options: Some(options()),
        ..LinuxSandboxSecurityContext::default()
    };
    let pod = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "warm".to_owned(),
            uid: scratch.name().to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: "warm".to_owned(),
        log_directory: scratch.dir("logs").display().to_string(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: containerd.group(),
            security_context: Some(security),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    };
    let sandbox = client.run_sandbox(pod.clone(), "runc").await?;
    // Podman gives each of its containers this file.
    let file = scratch.join("containerenv");
    fs::write(&file, "").unwrap();
    let mount = Mount {
        container_path: "/run/.containerenv".to_owned(),
        host_path: file.display().to_string(),
        ..Mount::default()
    };
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "warm".to_owned(), attempt: 0 }),
        image: Some(image_spec(image)),
        log_path: "warm.log".to_owned(),
        mounts: vec![mount],
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(options()),
                masked_paths: MASKED.map(str::to_owned).to_vec(),
                readonly_paths: READ_ONLY.map(str::to_owned).to_vec(),
                ..LinuxContainerSecurityContext::default()
            }),
            ..LinuxContainerConfig::default()
        }),
        ..ContainerConfig::default()
    };
    let id = client.create(&sandbox, config, pod).await?;
    client.start(&id).await?;
    let said = client.exec(&id, words).await?;
    client.stop_sandbox(&sandbox).await?;
    client.remove_sandbox(&sandbox).await?;
    Ok(String::from_utf8(said.stdout).unwrap().trim().to_owned())
}

#[test]
fn containerd_restores_the_image() {
    restores("snapshot-cri", "10.97.62", None);
}

#[test]
fn containerd_2_3_restores_the_image() {
    restores("snapshot-cri-2-3", "10.97.72", Some("v2.3.7"));
}

/// containerd pulls a snapshot from a registry, and its CRI restores it.
#[track_caller]
fn restores(name: &str, subnet: &str, other: Option<&str>) {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: {name} (TORPOR_LONG=1 runs it)");
        return;
    }
    let Some(program) = build(other) else {
        eprintln!("left out: {name} (containerd 2 does not build here)");
        return;
    };
    let scratch = Scratch::new(name);
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], subnet);
    let _registry = registry(&podman, &scratch);

    // What pods run beside their containers, and what the snapshot is made of.
    let (pause, base) = (format!("{HOST}/pause:1"), format!("{HOST}/base:1"));
    podman.run(&["create", "--name", "pause", IMAGE]);
    let sleep = "CMD [\"/bin/sleep\", \"2147483647\"]";
    podman.run(&["commit", "--quiet", "--change", sleep, "pause", &pause]);
    podman.run(&["rm", "pause"]);
    podman.run(&["tag", IMAGE, &base]);
    for image in [&pause, &base] {
        podman.run(&["push", "--quiet", "--tls-verify=false", image]);
    }
    podman.run(&["rmi", &base]);
    podman.run(&["pull", "--quiet", "--tls-verify=false", &base]);
    let warm = format!("{HOST}/warm:1");
    snapshot(&podman, &scratch, &warm, &base);

    let containerd = Containerd::start(&scratch, &podman, &program);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = containerd.client();
        let mut last = String::new();
        for _ in 0..300 {
            match client.version().await {
                Ok(_) => break,
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        client.version().await.unwrap_or_else(|e| panic!("containerd: {e}, {last}"));
        for image in [&pause, &base, &warm] {
            client.pull(image).await.unwrap();
        }
        let said = run(&containerd, &warm, &["redis-cli", "get", "kept"]).await;
        assert_eq!(said.unwrap(), "warm");
    });
}
