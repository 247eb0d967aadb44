//! A daemon of unmodified Docker with experimental features, which checkpoints are one of.

use std::fs::{self, File};
use std::process::{Child, Command};

use serde_json::Value;

use crate::command::{Run, wait};
use crate::network::Network;
use crate::rootfs;
use crate::scratch::Scratch;
use crate::wait::until_true;

/// The image that every container is made from.
pub const IMAGE: &str = "localhost/torpor-test:1";

/// The client, as the distribution's package has it: another one may come earlier on PATH.
const CLIENT: &str = "/usr/bin/docker";

/// A dockerd with its own files, socket, network and one image.
#[derive(Debug)]
pub struct Docker<'a> {
    scratch: &'a Scratch,
    network: Network,
    daemon: Child,
}

impl<'a> Docker<'a> {
    /// Starts the daemon and loads an image that has busybox and `programs`.
    pub fn start(scratch: &'a Scratch, programs: &[&str]) -> Self {
        let dir = scratch.dir("docker");
        let network = Network::new(scratch.name());
        fs::write(dir.join("daemon.json"), "{}").unwrap();
        let log = File::create(scratch.join("dockerd.log")).unwrap();
        // Its own mounts and network: what it sets up there goes with it.
        let mut command = scratch.command("nsenter");
        command.arg(format!("--net={}", network.path().display()));
        command.args([
            "unshare",
            "--mount",
            "dockerd",
            "--experimental",
            "--storage-driver",
            "overlay2",
        ]);
        command.arg("--config-file").arg(dir.join("daemon.json"));
        command.arg("--data-root").arg(dir.join("data"));
        command.arg("--exec-root").arg(dir.join("exec"));
        command.arg("--pidfile").arg(dir.join("pid"));
        command.arg("--host").arg(format!("unix://{}", dir.join("socket").display()));
        command.args(["--bip", "10.98.1.1/24"]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let docker = Self { scratch, network, daemon: command.spawn().unwrap() };
        until_true("dockerd answers", || docker.call(&["version"]).finish().status.success());
        let archive = scratch.join("image.tar");
        rootfs::make(&scratch.join("rootfs"), programs);
        rootfs::image(IMAGE, &scratch.join("rootfs"), &archive);
        docker.run(&["load", "--quiet", "--input", archive.to_str().unwrap()]);
        docker
    }

    /// The namespace with the bridge, from where the containers can be reached.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// A call of the client.
    pub fn call(&self, words: &[&str]) -> Command {
        let mut command = self.scratch.command(CLIENT);
        command
            .arg("--host")
            .arg(format!("unix://{}", self.scratch.join("docker/socket").display()));
        command.args(words);
        command
    }

    /// A call of the client that must succeed.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> String {
        self.call(words).succeed()
    }

    /// What the daemon knows of a container.
    #[track_caller]
    pub fn inspect(&self, name: &str) -> Value {
        let all: Value = serde_json::from_str(&self.run(&["container", "inspect", name])).unwrap();
        all[0].clone()
    }

    /// The address of a container on the bridge.
    #[track_caller]
    pub fn address(&self, name: &str) -> String {
        self.inspect(name)["NetworkSettings"]["IPAddress"].as_str().unwrap().to_owned()
    }

    /// The first process of a container, as the host counts.
    #[track_caller]
    pub fn pid(&self, name: &str) -> i32 {
        i32::try_from(self.inspect(name)["State"]["Pid"].as_i64().unwrap()).unwrap()
    }
}

impl Drop for Docker<'_> {
    fn drop(&mut self) {
        self.scratch.keep_logs();
        let all = self.call(&["ps", "--all", "--quiet"]).finish().stdout;
        for name in all.lines() {
            let _ = self.call(&["rm", "--force", name]).finish();
        }
        crate::process::terminate(&self.daemon);
        let _ = wait(&mut self.daemon);
    }
}
