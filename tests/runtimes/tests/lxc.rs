//! Containers of Debian's LXC: `lxc-checkpoint` dumps and restores them, with the options that LXC
//! gives on its own (the console's terminal, a profile that confines nobody).

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use torpor_runtimes_tests::command::{Run, write_script};
use torpor_runtimes_tests::rootfs;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until_true;

use crate::counting::{COUNT, goes_on};

/// A container of LXC, in a directory of its own; it goes with this.
struct Container<'a> {
    scratch: &'a Scratch,
}

impl<'a> Container<'a> {
    fn start(scratch: &'a Scratch) -> Self {
        let dir = scratch.dir(&format!("lxc/{}", scratch.name()));
        let rootfs = dir.join("rootfs");
        rootfs::make(&rootfs, &[]);
        for place in ["proc", "sys", "dev"] {
            fs::create_dir_all(rootfs.join(place)).unwrap();
        }
        let init = rootfs.join("count.sh");
        write_script(&init, &format!("#!/bin/sh\n{COUNT}\n"));
        let config = format!(
            "lxc.uts.name = sleeper\n\
             lxc.rootfs.path = dir:{}\n\
             lxc.net.0.type = empty\n\
             lxc.mount.auto = proc:mixed sys:mixed\n\
             lxc.tty.max = 0\n\
             lxc.pty.max = 1\n\
             lxc.apparmor.profile = unconfined\n\
             lxc.init.cmd = /count.sh\n",
            rootfs.display()
        );
        fs::write(dir.join("config"), config).unwrap();
        let container = Self { scratch };
        container.tool("lxc-start").arg("--daemon").succeed();
        container.note_calls();
        container
    }

    /// Has each call of the engine written down before it is made.
    fn note_calls(&self) {
        let (engine, real) = (self.scratch.criu(), self.scratch.dir("real").join("criu"));
        fs::rename(&engine, &real).unwrap();
        let (calls, real) = (self.scratch.join("calls"), real.display());
        let text = format!("#!/bin/sh\necho \"$*\" >>{}\nexec {real} \"$@\"\n", calls.display());
        write_script(&engine, &text);
    }

    /// A tool of LXC for this container.
    fn tool(&self, name: &str) -> Command {
        let mut command = self.scratch.command(name);
        command.arg("--lxcpath").arg(self.scratch.join("lxc"));
        command.args(["--name", self.scratch.name(), "--logfile"]);
        command.arg(self.scratch.join("tool.log"));
        command
    }

    fn state(&self) -> String {
        self.tool("lxc-info").args(["--state", "--no-humanize"]).succeed()
    }

    fn counter(&self) -> PathBuf {
        self.scratch.join(&format!("lxc/{}/rootfs/count", self.scratch.name()))
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let _ = self.tool("lxc-stop").arg("--kill").finish();
    }
}

#[test]
fn a_container_of_lxc_goes_on() {
    let scratch = Scratch::new("lxc");
    let container = Container::start(&scratch);
    let images = scratch.join("images");
    for _ in 0..2 {
        goes_on(&container.counter());
        container.tool("lxc-checkpoint").args(["-s", "-v", "-D"]).arg(&images).succeed();
        until_true("the container has stopped", || container.state() == "STOPPED");
        container.tool("lxc-checkpoint").args(["-r", "-v", "-D"]).arg(&images).succeed();
        until_true("the container runs", || container.state() == "RUNNING");
        goes_on(&container.counter());
        container.tool("lxc-attach").args(["--", "/bin/sh", "-c", "exit 0"]).succeed();
        fs::remove_dir_all(&images).unwrap();
    }
    let calls = fs::read_to_string(scratch.join("calls")).unwrap();
    let restores: Vec<&str> = calls.lines().filter(|call| call.starts_with("restore ")).collect();
    assert_eq!(restores.len(), 2, "{calls}");
    let given = [" --ext-mount-map console:/dev/pts/", " --external apparmor:unconfined"];
    let names = |call: &&str| given.iter().all(|words| call.contains(words));
    assert!(restores.iter().all(names), "{calls}");
}
