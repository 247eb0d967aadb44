//! Unmodified Podman with storage, configuration and a network namespace of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::command::{Run, command};
use crate::network::Network;
use crate::rootfs;
use crate::scratch::Scratch;

/// The image that every container is made from.
pub const IMAGE: &str = "localhost/torpor-test:1";

/// Writes the configuration of a Podman that keeps all in `dir`, and finds programs in `bin` first.
pub fn configure(dir: &Path, bin: &Path) {
    let at = |name: &str| dir.join(name).display().to_string();
    let path = format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display());
    // The limits: Podman asks for more than a machine may allow.
    // conmon's PATH: it is conmon that starts `runc restore`, which looks for criu.
    fs::write(
        dir.join("containers.conf"),
        format!(
            "[containers]\n\
             default_ulimits = [\"nofile=20000:20000\", \"nproc=20000:20000\"]\n\
             [engine]\n\
             runtime = \"runc\"\n\
             cgroup_manager = \"cgroupfs\"\n\
             events_logger = \"file\"\n\
             lock_type = \"file\"\n\
             tmp_dir = {:?}\n\
             conmon_env_vars = [{path:?}]\n\
             [network]\n\
             network_backend = \"cni\"\n\
             network_config_dir = {:?}\n",
            at("tmp"),
            at("cni")
        ),
    )
    .unwrap();
    fs::write(
        dir.join("storage.conf"),
        format!(
            "[storage]\ndriver = \"overlay\"\ngraphroot = {:?}\nrunroot = {:?}\n",
            at("root"),
            at("runroot")
        ),
    )
    .unwrap();
}

/// The variables by which Podman finds its configuration in `dir`.
#[must_use]
pub fn variables(dir: &Path) -> [(&'static str, PathBuf); 2] {
    [
        ("CONTAINERS_CONF", dir.join("containers.conf")),
        ("CONTAINERS_STORAGE_CONF", dir.join("storage.conf")),
    ]
}

/// Takes away what Podman keeps mounted in `dir`: its storage, on itself.
pub fn unmount(dir: &Path) {
    let _ = command("umount", &[dir.join("root/overlay").to_str().unwrap()]).finish();
}

/// A Podman with one image and one bridge network.
#[derive(Debug)]
pub struct Podman<'a> {
    scratch: &'a Scratch,
    network: Network,
}

impl<'a> Podman<'a> {
    /// Prepares Podman with an image that has busybox and `programs`, and a bridge network on
    /// `subnet` (its first three numbers).
    pub fn new(scratch: &'a Scratch, programs: &[&str], subnet: &str) -> Self {
        configure(&scratch.dir("podman"), &scratch.join("bin"));
        let podman = Self { scratch, network: Network::new(scratch.name()) };
        let archive = scratch.join("image.tar");
        rootfs::make(&scratch.join("rootfs"), programs);
        rootfs::image(IMAGE, &scratch.join("rootfs"), &archive);
        podman.run(&["load", "--quiet", "--input", archive.to_str().unwrap()]);
        podman.run(&["network", "create", "--subnet", &format!("{subnet}.0/24"), scratch.name()]);
        podman
    }

    /// The namespace with the bridge, from where the containers can be reached.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// A call of Podman.
    pub fn call(&self, words: &[&str]) -> Command {
        let mut command = self.scratch.command("nsenter");
        command.envs(variables(&self.scratch.join("podman")));
        command.arg(format!("--net={}", self.network.path().display()));
        command.arg("podman").args(words);
        command
    }

    /// A call of Podman that must succeed.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> String {
        self.call(words).succeed()
    }

    /// Starts a container on the bridge network.
    #[track_caller]
    pub fn start(&self, name: &str, words: &[&str]) {
        let options = ["run", "--detach", "--name", name, "--network", self.scratch.name(), IMAGE];
        self.run(&[&options[..], words].concat());
        self.expect_running(name);
    }

    /// What Podman knows of a container.
    #[track_caller]
    pub fn inspect(&self, name: &str) -> Value {
        let all: Value = serde_json::from_str(&self.run(&["container", "inspect", name])).unwrap();
        all[0].clone()
    }

    /// The address of a container on the bridge.
    #[track_caller]
    pub fn address(&self, name: &str) -> String {
        let address =
            &self.inspect(name)["NetworkSettings"]["Networks"][self.scratch.name()]["IPAddress"];
        address.as_str().unwrap().to_owned()
    }

    /// The first process of a container, as the host counts.
    #[track_caller]
    pub fn pid(&self, name: &str) -> i32 {
        i32::try_from(self.inspect(name)["State"]["Pid"].as_i64().unwrap()).unwrap()
    }

    /// Fails unless the container runs.
    #[track_caller]
    pub fn expect_running(&self, name: &str) {
        assert_eq!(self.inspect(name)["State"]["Status"], "running", "{name}");
    }
}

impl Drop for Podman<'_> {
    fn drop(&mut self) {
        self.scratch.keep_logs();
        let _ = self.call(&["rm", "--all", "--force", "--time", "0"]).finish();
        let _ = self.call(&["network", "rm", "--force", self.scratch.name()]).finish();
        unmount(&self.scratch.join("podman"));
    }
}
