//! A container of an OCI runtime, without CRI, with torpor as the runtime's `criu`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::cell::{Cell, POLL, Trouble, failed, workload};
use crate::image::{self, TOOLS};
use crate::workload::Beat;

use super::seal;

/// How many beats show that a container is alive.
pub(super) const ALIVE: u64 = 50;

/// A container of the runtime, without CRI.
#[derive(Debug)]
pub(super) struct Container<'a> {
    cell: &'a Cell<'a>,
    /// The runtime.
    pub binary: PathBuf,
    /// The `torpor` that is its `criu`.
    pub torpor: PathBuf,
    /// Its bundle, in which all else has its place, too.
    pub dir: PathBuf,
    /// Its identifier.
    pub id: String,
    /// Whether its images are sealed.
    pub sealed: bool,
    /// Whether it is gVisor, whose sentry writes its own state: no engine takes part.
    pub sentry: bool,
}

/// Makes the bundle of a container that gives signs of life, and holds so many MiB of memory.
///
/// # Errors
/// If its runtime cannot make checkpoints, or the kernel refuses a file.
pub(super) async fn prepare<'a>(
    cell: &'a Cell<'a>,
    memory: u32,
    sealed: bool,
) -> Result<Container<'a>, Trouble> {
    let unsupported = |text: &str| Trouble::Unsupported(text.to_owned());
    let sentry = cell.handler.kind.contains("runsc");
    if sentry && sealed {
        return Err(unsupported("gVisor checkpoints by itself, and does not seal"));
    }
    let binary = cell.handler.program();
    let binary = binary.ok_or_else(|| unsupported("the configuration names no `binary`"))?;
    let torpor = cell.config.engine();
    let torpor = torpor.ok_or_else(|| unsupported("there is no torpor to act as criu"))?;
    let id = format!("direct-{}", cell.made.get());
    cell.made.set(cell.made.get() + 1);
    let dir = cell.place.dir.join("direct").join(&id);
    for name in ["out", "bin", "images", "work"] {
        fs::create_dir_all(dir.join(name)).map_err(failed)?;
    }
    seal::plain(&dir)?;
    symlink(&torpor, dir.join("bin/criu")).map_err(failed)?;
    let container = Container { cell, binary, torpor, dir, id, sealed, sentry };
    // gVisor's help ends with an error.
    if !sentry {
        container.knows(&["checkpoint", "restore"]).await?;
    }
    let rootfs = cell.place.dir.join("rootfs");
    if !rootfs.exists() {
        image::unpack(&cell.place.dir.join("store"), TOOLS, &rootfs).map_err(failed)?;
    }
    if sealed {
        seal::sealing(&container.dir, &container.torpor)?;
    }
    let config = container.config(&rootfs, memory);
    fs::write(container.dir.join("config.json"), config.to_string()).map_err(failed)?;
    Ok(container)
}

/// How a command ends that may take so long.
///
/// # Errors
/// If it cannot be started, or takes longer.
pub(super) async fn ended(
    what: &str,
    command: &mut Command,
    limit: Duration,
) -> Result<ExitStatus, Trouble> {
    let status = tokio::time::timeout(limit, command.status()).await;
    let late = |_| failed(format!("{what} did not end within {} s", limit.as_secs()));
    status.map_err(late)?.map_err(failed)
}

fn said(output: &Output) -> String {
    let text = [&output.stderr[..], &output.stdout[..]].concat();
    let text = String::from_utf8_lossy(&text);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

impl Container<'_> {
    /// Whether the runtime has these commands: those that it has not are told all at once.
    async fn knows(&self, commands: &[&str]) -> Result<(), Trouble> {
        let mut lacks = Vec::new();
        for command in commands {
            let help = self.call(&[command, "--help"], Duration::from_secs(10)).await?;
            if !help.status.success() {
                lacks.push(*command);
            }
        }
        if lacks.is_empty() {
            return Ok(());
        }
        let (name, lacks) = (self.binary.display(), lacks.join(", and no "));
        Err(Trouble::Unsupported(format!(
            "this build of {name} has no {lacks} (`--help` of it fails)"
        )))
    }

    /// The configuration of a bundle, as `spec` gives it, with our program in it.
    fn config(&self, rootfs: &Path, memory: u32) -> Value {
        let mounted =
            |to: &str, kind: &str| json!({ "destination": to, "type": kind, "source": kind });
        let namespaces =
            ["pid", "network", "ipc", "uts", "mount"].map(|kind| json!({ "type": kind }));
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": { "uid": 0, "gid": 0 },
                "args": workload(&format!("heartbeat --size {memory} --file /out/beat")),
                "env": ["PATH=/bin"],
                "cwd": "/",
            },
            "root": { "path": rootfs, "readonly": true },
            "hostname": "bench",
            "mounts": [
                mounted("/proc", "proc"),
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
                { "destination": "/out", "type": "bind", "source": self.dir.join("out"), "options": ["bind", "rw"] },
            ],
            "linux": { "namespaces": namespaces, "cgroupsPath": self.group() },
        })
    }

    /// Its control group, below the one that the keeper removes.
    pub(super) fn group(&self) -> String {
        format!("{}/{}", self.cell.place.group, self.id)
    }

    /// A command with torpor as `criu`; in the namespaces of the endpoint, where those are ours. It has no
    /// standard streams: containers keep those of their maker, and what only this process has no engine
    /// could restore.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = match self.cell.place.init() {
            Some(init) => {
                let mut command = Command::new("nsenter");
                command.args(["--target", &init.to_string(), "--mount", "--pid", "--net", "--ipc"]);
                command.arg("--").arg(program);
                command
            }
            None => Command::new(program),
        };
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:{path}", self.dir.join("bin").display()))
            .env("CRIU_CONFIG_FILE", self.dir.join(seal::OPTIONS))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Calls the runtime.
    async fn call(&self, arguments: &[&str], limit: Duration) -> Result<Output, Trouble> {
        let mut command = self.command(&self.binary);
        if self.sentry {
            command.args(["--platform=systrap", "--network=none", "--ignore-cgroups"]);
        }
        let log = self.dir.join("said");
        let _ = fs::remove_file(&log);
        command.arg("--root").arg(self.state()).arg("--log").arg(&log).args(arguments);
        let call = arguments.first().unwrap_or(&"");
        let status = ended(call, &mut command, limit).await?;
        Ok(Output { status, stdout: Vec::new(), stderr: fs::read(&log).unwrap_or_default() })
    }

    /// Where the runtime keeps what it knows of the container.
    pub(super) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Starts it, and waits until it is alive.
    pub(super) async fn start(&self) -> Result<(), Trouble> {
        let bundle = self.dir.display().to_string();
        self.done(&["run", "--detach", "--bundle", &bundle, &self.id]).await?;
        self.until(|beat| beat.count >= ALIVE).await.map(drop)
    }

    /// Calls the runtime, which must succeed.
    pub(super) async fn done(&self, arguments: &[&str]) -> Result<(), Trouble> {
        let limit = Duration::from_secs(self.cell.config.deadline);
        let output = self.call(arguments, limit).await?;
        if output.status.success() {
            return Ok(());
        }
        let log = fs::read_to_string(self.dir.join("work/dump.log")).unwrap_or_default();
        let log = log.lines().find(|line| line.contains("Error")).unwrap_or_default();
        let call = arguments.first().unwrap_or(&"");
        Err(failed(format!("{call}: {} {log}", said(&output))))
    }

    /// Its last sign of life.
    pub(super) fn beat(&self) -> Option<Beat> {
        Beat::read(&fs::read(self.dir.join("out/beat")).ok()?)
    }

    /// Waits for a beat that is as it should be. What is measured of it the program tells by its own clock.
    pub(super) async fn until(&self, right: impl Fn(Beat) -> bool) -> Result<Beat, Trouble> {
        let end = Instant::now() + Duration::from_secs(self.cell.config.deadline);
        loop {
            match self.beat() {
                Some(beat) if right(beat) => return Ok(beat),
                _ if Instant::now() > end => {
                    return Err(failed("the container gives no sign of life"));
                }
                _ => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Ends it, and removes all that it has.
    pub(super) async fn remove(&self) {
        let limit = Duration::from_secs(10);
        let _ = self.call(&["delete", "--force", &self.id], limit).await;
        let _ = fs::remove_dir_all(&self.dir);
    }
}
