//! Moving a container of an OCI runtime to another host with `torpor migrate`.
//!
//! The other host is an agent with processes, mounts and a network of its own, and a state of its own for
//! the runtime. It is reached through a Unix socket, so that no link of a network is in the times.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::process::Child;

use crate::catalogue::Mode;
use crate::cell::{Cell, Trouble, Values, failed, ms};
use crate::cgroups;
use crate::endpoint::version_of;
use crate::image::find;

use super::bare::{ALIVE, Container, ended, prepare};
use super::value;

/// A host: what it keeps while something moves lies in memory, under short names, since sockets have no
/// long ones.
const HOST: &str = r#"mount -t tmpfs tmpfs /run && exec "$0" "$@""#;

/// Where `torpor migrate` and its agent work, each on its own host.
const WORK: [&str; 4] = ["--state-dir", "/run/record", "--work-dir", "/run/work"];

/// What an agent says when it can be called.
const READY: &str = "Listening at";

/// How often it is looked whether it has.
const POLL: Duration = Duration::from_millis(5);

/// One move.
///
/// # Errors
/// If the runtime's containers cannot move, or this one does not.
pub(super) async fn measure(cell: &Cell<'_>, memory: u32, mode: Mode) -> Result<Values, Trouble> {
    let container = prepare(cell, memory, false).await?;
    let there = there(&container, cell.config.deadline).await;
    let moved = match &there {
        Ok(_) => moved(&container, mode, cell.config.deadline).await,
        Err(trouble) => Err(trouble.clone()),
    };
    if let Ok(agent) = there {
        leave(agent).await;
    }
    container.remove().await;
    // What ended with its host has left its control group.
    cgroups::remove(&container.group());
    moved
}

/// Starts the other host, and its agent.
async fn there(container: &Container<'_>, deadline: u64) -> Result<Child, Trouble> {
    let program = find_program(&container.binary)?;
    symlink(program, container.dir.join("bin/runc")).map_err(failed)?;
    let (said, log) = (container.dir.join("agent"), container.dir.join("agent.log"));
    // It ends with this process, and all that has come to it ends with it.
    let mut command = container.command(Path::new("setpriv"));
    command.args(["--pdeathsig", "KILL", "unshare", "--net", "--pid", "--mount", "--fork"]);
    command.args(["--kill-child", "--mount-proc", "sh", "-c", HOST]);
    command.arg(&container.torpor).args(["agent", "--listen", &address(container)]).args(WORK);
    command.arg("--runtime-root").arg(container.dir.join("there"));
    command.stdout(File::create(&said).map_err(failed)?);
    command.stderr(File::create(&log).map_err(failed)?);
    let mut agent = command.spawn().map_err(failed)?;
    let until = Instant::now() + Duration::from_secs(deadline);
    while !fs::read_to_string(&said).unwrap_or_default().contains(READY) {
        let gone = agent.try_wait().map_err(failed)?.is_some();
        if gone || Instant::now() > until {
            leave(agent).await;
            return Err(failed(format!("torpor agent does not listen: {}", last(&log))));
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(agent)
}

/// The program of a runtime whose containers can move.
fn find_program(binary: &Path) -> Result<std::path::PathBuf, Trouble> {
    let version = version_of(binary).map_err(failed)?;
    if !version.starts_with("runc ") {
        let text = format!("torpor migrate moves containers of runc; this is {version:?}");
        return Err(Trouble::Unsupported(text));
    }
    let found = if binary.is_absolute() { None } else { binary.to_str().and_then(find) };
    Ok(found.unwrap_or_else(|| binary.to_owned()))
}

fn address(container: &Container<'_>) -> String {
    format!("unix:{}", container.dir.join("agent.sock").display())
}

/// Ends a host. The kernel ends all that runs there before it is gone.
async fn leave(mut agent: Child) {
    // If it has ended by itself, so has its namespace.
    let _ = agent.kill().await;
}

fn last(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

async fn moved(container: &Container<'_>, mode: Mode, deadline: u64) -> Result<Values, Trouble> {
    container.start().await?;
    let (said, log) = (container.dir.join("moved"), container.dir.join("moved.log"));
    let mut command = container.command(Path::new("unshare"));
    command.args(["--mount", "sh", "-c", HOST]).arg(&container.torpor);
    command.args(["migrate", &container.id, &address(container), "--json"]).args(WORK);
    command.args(["--mode", mode.name()]).arg("--runtime-root").arg(container.state());
    command.stdout(File::create(&said).map_err(failed)?);
    command.stderr(File::create(&log).map_err(failed)?);
    let begun = Instant::now();
    let status = ended("torpor migrate", &mut command, Duration::from_secs(deadline)).await?;
    let total = ms(begun);
    if !status.success() {
        return Err(failed(format!("torpor migrate: {}", last(&log))));
    }
    let count = container.beat().map_or(0, |beat| beat.count);
    let alive = container.until(|beat| beat.count > count + ALIVE).await?;
    let report = fs::read(&said).map_err(failed)?;
    let report: Value = serde_json::from_slice(&report).map_err(failed)?;
    let told = |member: &str, scale: f64| match report[member].as_f64() {
        Some(number) => Ok(number / scale),
        None => Err(failed(format!("torpor migrate tells no `{member}`"))),
    };
    let mebibyte = f64::from(1 << 20);
    Ok(vec![
        value("total", total),
        value("pause", alive.silence.as_secs_f64() * 1000.0),
        ("stopped".into(), told("downtime_ms", 1.0)),
        ("freeze".into(), told("freeze_ms", 1.0)),
        ("transfer".into(), told("transfer_ms", 1.0)),
        ("restore".into(), told("restore_ms", 1.0)),
        ("bytes".into(), told("bytes", mebibyte)),
    ])
}
