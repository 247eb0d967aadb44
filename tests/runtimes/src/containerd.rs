//! A daemon of unmodified containerd, driven with `ctr`.

use std::fs::{self, File};
use std::process::{Child, Command};

use crate::command::{Run, wait};
use crate::rootfs;
use crate::scratch::Scratch;
use crate::wait::until_true;

/// The image that every container is made from.
pub const IMAGE: &str = "localhost/torpor-test:1";

/// A containerd with its own files, its own socket and one image.
#[derive(Debug)]
pub struct Containerd<'a> {
    scratch: &'a Scratch,
    daemon: Child,
}

impl<'a> Containerd<'a> {
    /// Starts the daemon and loads an image that has busybox and `programs`.
    pub fn start(scratch: &'a Scratch, programs: &[&str]) -> Self {
        let dir = scratch.dir("containerd");
        let at = |name: &str| dir.join(name).display().to_string();
        // The timeout: a shim that has not answered within 2 s has, to containerd, a task of no state and no pid.
        fs::write(
            dir.join("config.toml"),
            format!(
                "version = 2\nroot = {:?}\nstate = {:?}\n\
                 disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
                 [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n\
                 [timeouts]\n\"io.containerd.timeout.task.state\" = \"60s\"\n",
                at("root"),
                at("state"),
                at("socket"),
                at("socket.ttrpc")
            ),
        )
        .unwrap();
        let log = File::create(scratch.join("containerd.log")).unwrap();
        let mut command = scratch.command("containerd");
        command.arg("--config").arg(dir.join("config.toml"));
        // It leaves the images of checkpoints there.
        command.env("TMPDIR", scratch.dir("tmp"));
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let containerd = Self { scratch, daemon: command.spawn().unwrap() };
        until_true("containerd answers", || {
            containerd.call(&["version"]).finish().status.success()
        });
        let archive = scratch.join("image.tar");
        rootfs::make(&scratch.join("rootfs"), programs);
        rootfs::image(IMAGE, &scratch.join("rootfs"), &archive);
        containerd.ctr(&["image", "import", archive.to_str().unwrap()]);
        containerd
    }

    /// A call of `ctr`.
    pub fn call(&self, words: &[&str]) -> Command {
        let mut command = self.scratch.command("ctr");
        command.arg("--address").arg(self.scratch.join("containerd/socket")).args(words);
        command
    }

    /// A call of `ctr` that must succeed.
    #[track_caller]
    pub fn ctr(&self, words: &[&str]) -> String {
        self.call(words).succeed()
    }

    /// A name for a container that nothing else on this machine has, since cgroups are named after it.
    pub fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.scratch.name())
    }

    /// The pid and the status of a container's task, as far as it has one.
    pub fn task(&self, name: &str) -> Option<(i32, String)> {
        let list = self.ctr(&["task", "list"]);
        let line = list.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        let mut words = line.split_whitespace().skip(1);
        Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
    }

    /// Kills and removes a container as far as it is there.
    pub fn remove(&self, name: &str) {
        let _ = self.call(&["task", "delete", "--force", name]).finish();
        let _ = self.call(&["container", "delete", name]).finish();
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        self.scratch.keep_logs();
        let all = self.call(&["container", "list", "--quiet"]).finish().stdout;
        for name in all.lines() {
            self.remove(name);
        }
        crate::process::terminate(&self.daemon);
        let _ = wait(&mut self.daemon);
    }
}
