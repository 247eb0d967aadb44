//! Checkpoint and restore by the OCI runtime itself, with torpor as its `criu`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use prost::Message;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::cell::{Cell, Trouble, Values, failed, ms, workload};
use crate::image::{self, TOOLS};
use crate::own;
use crate::workload::Beat;

use super::value;

/// How many beats show that a container is alive.
pub const ALIVE: u64 = 50;

/// The file of the engine's options, empty unless images are sealed. The runtime hands the
/// environment that names it on to the engine.
const OPTIONS: &str = "criu.conf";

/// A container of the runtime, without CRI.
struct Container<'a> {
    cell: &'a Cell<'a>,
    binary: PathBuf,
    dir: PathBuf,
    id: String,
    sealed: bool,
    /// Whether it is gVisor, whose sentry writes its own state: no engine takes part.
    sentry: bool,
}

/// What is told of parts that only an engine has.
const NO_ENGINE: &str =
    "gVisor checkpoints by itself, and does not tell how long it froze the container";

/// gVisor's program, beside its shim.
fn beside(path: &[PathBuf]) -> Option<PathBuf> {
    path.iter().map(|dir| dir.join("runsc")).find(|file| file.is_file())
}

/// One checkpoint that leaves its container running, and one restore from it.
pub async fn measure(cell: &Cell<'_>, memory: u32, sealed: bool) -> Result<Values, Trouble> {
    let container = prepare(cell, memory, sealed).await?;
    let done = container.sample().await;
    container.remove().await;
    done
}

async fn prepare<'a>(
    cell: &'a Cell<'a>,
    memory: u32,
    sealed: bool,
) -> Result<Container<'a>, Trouble> {
    let unsupported = |text: &str| Trouble::Unsupported(text.to_owned());
    let sentry = cell.handler.kind.contains("runsc");
    if sentry && sealed {
        return Err(unsupported("gVisor checkpoints by itself, and does not seal"));
    }
    let binary = cell.handler.binary.clone().or_else(|| beside(&cell.handler.path));
    let binary = binary.ok_or_else(|| unsupported("the configuration names no `binary`"))?;
    let torpor = cell.config.criu.clone().or_else(own::torpor);
    let torpor = torpor.ok_or_else(|| unsupported("there is no torpor to act as criu"))?;
    let id = format!("direct-{}", cell.made.get());
    cell.made.set(cell.made.get() + 1);
    let dir = cell.place.dir.join("direct").join(&id);
    for name in ["out", "bin", "images", "work"] {
        fs::create_dir_all(dir.join(name)).map_err(failed)?;
    }
    fs::write(dir.join(OPTIONS), "").map_err(failed)?;
    symlink(&torpor, dir.join("bin/criu")).map_err(failed)?;
    let container = Container { cell, binary, dir, id, sealed, sentry };
    let help = container.call(&["checkpoint", "--help"], Duration::from_secs(10)).await?;
    // gVisor's help ends with an error.
    if !sentry && !help.status.success() {
        let name = container.binary.display();
        let text =
            format!("this build of {name} has no checkpoint (`{name} checkpoint --help` fails)");
        return Err(Trouble::Unsupported(text));
    }
    let rootfs = cell.place.dir.join("rootfs");
    if !rootfs.exists() {
        image::unpack(&cell.place.dir.join("store"), TOOLS, &rootfs).map_err(failed)?;
    }
    if sealed {
        container.seal(&torpor)?;
    }
    let config = container.config(&rootfs, memory);
    fs::write(container.dir.join("config.json"), config.to_string()).map_err(failed)?;
    Ok(container)
}

fn said(output: &Output) -> String {
    let text = [&output.stderr[..], &output.stdout[..]].concat();
    let text = String::from_utf8_lossy(&text);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

impl Container<'_> {
    /// The configuration of a bundle, as `spec` gives it, with our program in it.
    fn config(&self, rootfs: &Path, memory: u32) -> Value {
        let mounted =
            |to: &str, kind: &str| json!({ "destination": to, "type": kind, "source": kind });
        let namespaces =
            ["pid", "network", "ipc", "uts", "mount"].map(|kind| json!({ "type": kind }));
        let mut config = json!({
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
            "linux": { "namespaces": namespaces },
        });
        if let Some(group) = &self.cell.place.cgroup {
            config["linux"]["cgroupsPath"] = json!(format!("{group}/{}", self.id));
        }
        config
    }

    /// Makes a key, and the file of options that seals with it.
    fn seal(&self, torpor: &Path) -> Result<(), Trouble> {
        let key = self.dir.join("key");
        let made = std::process::Command::new(torpor)
            .args(["key", "generate"])
            .arg(&key)
            .output()
            .map_err(failed)?;
        let recipient = String::from_utf8_lossy(&made.stdout).trim().to_owned();
        if !made.status.success() {
            return Err(failed(format!("torpor key generate: {}", said(&made))));
        }
        let text = format!("encrypt\nrecipient {recipient}\nidentity {}\n", key.display());
        fs::write(self.dir.join(OPTIONS), text).map_err(failed)
    }

    /// Calls the runtime; in the namespaces of the endpoint, where those are ours.
    async fn call(&self, arguments: &[&str], limit: Duration) -> Result<Output, Trouble> {
        let mut command = match self.cell.place.init() {
            Some(init) => {
                let mut command = Command::new("nsenter");
                command.args(["--target", &init.to_string(), "--mount", "--pid", "--net", "--ipc"]);
                command.arg("--").arg(&self.binary);
                command
            }
            None => Command::new(&self.binary),
        };
        if self.sentry {
            command.args(["--platform=systrap", "--network=none", "--ignore-cgroups"]);
        }
        let path = std::env::var("PATH").unwrap_or_default();
        // A container keeps the standard streams of its maker: they must be nothing that only this
        // process has, or no engine could restore them.
        let log = self.dir.join("said");
        let _ = fs::remove_file(&log);
        command
            .arg("--root")
            .arg(self.dir.join("state"))
            .arg("--log")
            .arg(&log)
            .args(arguments)
            .env("PATH", format!("{}:{path}", self.dir.join("bin").display()))
            .env("CRIU_CONFIG_FILE", self.dir.join(OPTIONS))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let status = tokio::time::timeout(limit, command.status()).await;
        let status = status.map_err(|_| {
            let (call, limit) = (arguments.first().unwrap_or(&""), limit.as_secs());
            failed(format!("{call} did not end within {limit} s"))
        })?;
        let stderr = fs::read(&log).unwrap_or_default();
        Ok(Output { status: status.map_err(failed)?, stdout: Vec::new(), stderr })
    }

    async fn done(&self, arguments: &[&str]) -> Result<(), Trouble> {
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

    fn beat(&self) -> Option<Beat> {
        Beat::read(&fs::read(self.dir.join("out/beat")).ok()?)
    }

    /// Waits for a beat that is as it should be.
    async fn until(&self, right: impl Fn(Beat) -> bool) -> Result<Beat, Trouble> {
        let end = Instant::now() + Duration::from_secs(self.cell.config.deadline);
        loop {
            match self.beat() {
                Some(beat) if right(beat) => return Ok(beat),
                _ if Instant::now() > end => {
                    return Err(failed("the container gives no sign of life"));
                }
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    async fn sample(&self) -> Result<Values, Trouble> {
        let id = self.id.as_str();
        let dir = self.dir.display();
        let (image_path, work_path) = (format!("{dir}/images"), format!("{dir}/work"));
        let bundle = dir.to_string();
        self.done(&["run", "--detach", "--bundle", &bundle, id]).await?;
        self.until(|beat| beat.count >= ALIVE).await?;
        let called = SystemTime::now();
        let begun = Instant::now();
        let places = ["--image-path", &image_path, "--work-path", &work_path];
        let places = if self.sentry { &places[..2] } else { &places[..] };
        let checkpoint = [&["checkpoint", "--leave-running"][..], places, &[id]].concat();
        self.done(&checkpoint).await?;
        let client = ms(begun);
        let count = self.beat().map_or(0, |beat| beat.count);
        let alive = self.until(|beat| beat.count > count + ALIVE).await?;
        self.done(&["kill", id, "KILL"]).await?;
        self.done(&["delete", "--force", id]).await?;
        let images = self.dir.join("images");
        if self.sealed && !images.join("seal.img").exists() {
            return Err(failed("the engine was told to seal its images, and has not"));
        }
        let bytes = size(&images);
        let none = || Err(Trouble::Unsupported(NO_ENGINE.into()));
        let frozen = if self.sentry { none() } else { frozen(&self.dir) };
        // Before the restore, which may write beside it.
        let parts = named(&frozen, Account::read(&self.dir.join("work/dump.log")), called, client);
        let last = self.beat().map_or(0, |beat| beat.count);
        let begun = Instant::now();
        let restore = [&["restore", "--detach", "--bundle", &bundle][..], places, &[id]].concat();
        let (restored, answered) = tokio::join!(
            async { self.done(&restore).await.map(|()| ms(begun)) },
            // The count goes back to what it was when the container was frozen.
            async { self.until(|beat| beat.count != last).await.map(|_| ms(begun)) },
        );
        let mut values = vec![
            value("checkpoint", client),
            value("pause", alive.silence.as_secs_f64() * 1000.0),
            ("frozen".into(), frozen),
            value("bytes", bytes),
            ("restore".into(), restored),
            ("answer".into(), answered),
        ];
        values.extend(parts);
        Ok(values)
    }

    async fn remove(&self) {
        let limit = Duration::from_secs(10);
        let _ = self.call(&["delete", "--force", &self.id], limit).await;
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Bytes as MiB.
#[allow(clippy::cast_precision_loss, reason = "a number of bytes as MiB")]
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The MiB of all files in a directory.
fn size(dir: &Path) -> f64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    mebibytes(entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum())
}

/// What an engine's log tells of its time.
#[derive(Debug, Clone, Copy)]
struct Account {
    /// From its first line to its last, by the engine's own clock, in ms.
    work: f64,
    /// The same by the times of the file: when it was made, and last written.
    made: SystemTime,
    written: SystemTime,
}

impl Account {
    fn read(log: &Path) -> Result<Self, Trouble> {
        let about = fs::metadata(log).map_err(failed)?;
        let text = fs::read_to_string(log).map_err(failed)?;
        let work = worked(&text).ok_or_else(|| failed("the engine's log holds no times"))?;
        let (made, written) = (about.created().map_err(failed)?, about.modified().map_err(failed)?);
        Ok(Self { work, made, written })
    }
}

/// The ms between the first and the last line of a log whose lines begin with `(seconds)`.
fn worked(log: &str) -> Option<f64> {
    let time = |line: &str| line.strip_prefix('(')?.split_once(')')?.0.trim().parse::<f64>().ok();
    let mut times = log.lines().filter_map(time);
    let first = times.next()?;
    Some((times.next_back().unwrap_or(first) - first) * 1000.0)
}

/// The ms from one time to another, which may be before it.
fn between(from: SystemTime, to: SystemTime) -> f64 {
    match to.duration_since(from) {
        Ok(time) => time.as_secs_f64() * 1000.0,
        Err(error) => -error.duration().as_secs_f64() * 1000.0,
    }
}

/// The share of the caller's time that may be unaccounted for.
const UNNAMED: f64 = 0.02;

/// Where the caller's time went, besides the frozen time.
fn named(
    frozen: &Result<f64, Trouble>,
    account: Result<Account, Trouble>,
    called: SystemTime,
    client: f64,
) -> Values {
    let names = ["engine", "runtime", "unnamed"];
    let (frozen, account) = match (frozen, account) {
        (Ok(frozen), Ok(account)) => (*frozen, account),
        (Err(trouble), _) => return names.map(|n| (n.into(), Err(trouble.clone()))).into(),
        (_, Err(trouble)) => return names.map(|n| (n.into(), Err(trouble.clone()))).into(),
    };
    let runtime = client - between(account.made, account.written);
    let unnamed = (client - runtime - account.work).abs();
    let before = between(called, account.made);
    let odd = if before < 0.0 || runtime < 0.0 {
        Some("the times of the engine's log lie outside of the call".to_owned())
    } else if unnamed > UNNAMED * client {
        let share = 100.0 * unnamed / client;
        Some(format!("{share:.1} % of the caller's time is in no part that has a name"))
    } else {
        None
    };
    let unnamed = odd.map_or(Ok(unnamed), |text| Err(Trouble::Invalid(unnamed, text)));
    vec![
        value("engine", account.work - frozen),
        value("runtime", runtime),
        ("unnamed".into(), unnamed),
    ]
}

/// The times that an engine writes into `stats-dump`, in microseconds.
#[derive(Clone, PartialEq, Message)]
struct DumpTimes {
    #[prost(uint32, tag = "2")]
    frozen_time: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Times {
    #[prost(message, optional, tag = "1")]
    dump: Option<DumpTimes>,
}

/// How long the tasks were frozen, by the engine's own account.
fn frozen(dir: &Path) -> Result<f64, Trouble> {
    let places = ["work/stats-dump", "images/stats-dump"];
    let bytes = places.iter().find_map(|name| fs::read(dir.join(name)).ok());
    frozen_in(&bytes.ok_or_else(|| failed("the engine has written no statistics"))?)
}

/// The frozen time in ms that `stats-dump` holds.
pub fn frozen_in(bytes: &[u8]) -> Result<f64, Trouble> {
    // two magic numbers, the length of the message, the message
    let message = bytes.get(12..).unwrap_or_default();
    let times = Times::decode(message).map_err(failed)?;
    let dump = times.dump.ok_or_else(|| failed("the statistics are not those of a dump"))?;
    Ok(f64::from(dump.frozen_time) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_callers_time_is_in_parts_with_names() {
        let log = "(00.001000) Version: 4.2\n(00.005000) Frozen\nno time\n(00.081000) finished\n";
        assert!((worked(log).unwrap() - 80.0).abs() < 1e-9);
        let called = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let after = |ms: u64| called + Duration::from_millis(ms);
        let account =
            |written| Ok(Account { work: 80.0, made: after(10), written: after(written) });
        let parts = named(&Ok(60.0), account(91), called, 100.0);
        let of = |parts: &Values, name: &str| {
            parts.iter().find(|(n, _)| n == name).unwrap().1.clone().ok().map(f64::round)
        };
        assert_eq!(of(&parts, "engine"), Some(20.0));
        assert_eq!(of(&parts, "runtime"), Some(19.0));
        assert_eq!(of(&parts, "unnamed"), Some(1.0));
        // Three of a hundred without a name are too many.
        assert_eq!(of(&named(&Ok(60.0), account(93), called, 100.0), "unnamed"), None);
        let none = named(&Err(failed("none")), account(91), called, 100.0);
        assert!(none.iter().all(|(_, part)| part.is_err()), "{none:?}");
    }
}
