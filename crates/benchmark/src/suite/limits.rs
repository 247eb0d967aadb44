//! Limits: whether they hold, and how soon.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::cell::{Cell, IDLE, Network, POLL, Spec, Trouble, Values, failed, ms, parse};
use crate::cgroups;
use crate::cri::v1::LinuxContainerResources;
use crate::endpoint::limited;
use crate::image;

use super::value;

/// The period of a quota in microseconds.
const PERIOD: i64 = 100_000;
/// A quota of a fifth of a processor.
const QUOTA: i64 = 20_000;
/// The same as a share.
const SHARE: f64 = 0.2;

fn quota_of(quota: i64) -> LinuxContainerResources {
    LinuxContainerResources { cpu_period: PERIOD, cpu_quota: quota, ..Default::default() }
}

/// A program that computes under a quota. The kernel's own numbers say whether the quota held.
pub(super) async fn quota(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let pod = cell.pod(Network::Host).await?;
    let spec = Spec { resources: quota_of(QUOTA), ..Spec::workload("burn --time 600000") };
    let burning = cell.launch(&pod, &spec).await?;
    // The start of the program, and the first period with it, are not what is asked about.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let groups = Processors::of(&[&pod.id, &burning.id])?;
    let share = groups.share_during(Duration::from_secs(1)).await;
    cell.client().stop(&burning.id, 0).await?;
    let spec = Spec { resources: quota_of(QUOTA), ..Spec::workload("work --time 200") };
    let working = cell.launch(&pod, &spec).await?;
    let printed = parse(&cell.output(&working).await?)?;
    cell.finish(&pod).await?;
    let work = printed["wall"].as_f64().unwrap_or(f64::NAN) * 1000.0;
    let work = match &share {
        Err(Trouble::Invalid(_, reason)) => Err(Trouble::Invalid(Some(work), reason.clone())),
        _ => Ok(work),
    };
    Ok(vec![("cpu.share".into(), share), ("cpu.work".into(), work)])
}

fn not_found() -> Trouble {
    failed("the control group of the container is not found")
}

/// The groups of a container and of its sandbox that tell of processors: gVisor runs all containers of a pod in the group of
/// its sandbox. They are found before anything is read of them, since that takes some ms.
struct Processors {
    /// Those that account for CPU time.
    accounts: Vec<PathBuf>,
    /// Those that have a quota, where there are such.
    quotas: Vec<PathBuf>,
}

impl Processors {
    fn of(ids: &[&str]) -> Result<Self, Trouble> {
        let accounts = cgroups::all_of(cgroups::accounts(), ids).ok_or_else(not_found)?;
        let quotas = ids.iter().filter_map(|id| cgroups::all_of("cpu", &[id])).flatten().collect();
        Ok(Self { accounts, quotas })
    }

    /// The CPU time in seconds that they have used.
    fn used(&self) -> Result<f64, Trouble> {
        let all = self.accounts.iter().map(|group| cgroups::cpu_seconds(group));
        all.sum::<Option<f64>>().ok_or_else(not_found)
    }

    /// How often they were throttled.
    fn throttled(&self) -> u64 {
        self.quotas.iter().filter_map(|group| cgroups::throttled(group)).sum()
    }

    /// How far the CPU used is from the quota, in percent of the quota.
    async fn share_during(&self, time: Duration) -> Result<f64, Trouble> {
        let (before, throttled) = (self.used()?, self.throttled());
        let begun = Instant::now();
        tokio::time::sleep(time).await;
        let share = (self.used()? - before) / begun.elapsed().as_secs_f64();
        judge(share, self.throttled().saturating_sub(throttled))
    }
}

/// A limit is one if the kernel has made the program wait for it, `times` times, and `share`, what it has used of a processor, is
/// within 5 % of the quota.
fn judge(share: f64, times: u64) -> Result<f64, Trouble> {
    let off = 100.0 * (share - SHARE).abs() / SHARE;
    let used = format!("{:.1} % of a CPU were used under a quota of 20 %", 100.0 * share);
    match (times, off) {
        (0, _) => Err(Trouble::Invalid(Some(off), format!("the kernel has not throttled; {used}"))),
        (_, off) if off > 5.0 => {
            Err(Trouble::Invalid(Some(off), format!("the limit is not exact: {used}")))
        }
        _ => Ok(off),
    }
}

/// A quota that is raised while the program runs.
pub(super) async fn raise(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let pod = cell.pod(Network::Host).await?;
    let spec = Spec { resources: quota_of(QUOTA), ..Spec::workload("burn --time 2000") };
    let launched = cell.launch(&pod, &spec).await?;
    tokio::time::sleep(Duration::from_millis(700)).await;
    let called = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let begun = Instant::now();
    let updated = cell.client().update(&launched.id, quota_of(4 * QUOTA)).await;
    let call = ms(begun);
    if let Err(error) = updated {
        cell.finish(&pod).await?;
        return Err(error.into());
    }
    let printed = parse(&cell.output(&launched).await?)?;
    cell.finish(&pod).await?;
    let windows = printed["windows"].as_array().cloned().unwrap_or_default();
    let after = |w: &&serde_json::Value| w[0].as_f64().is_some_and(|time| time > called);
    let more = windows.iter().filter(after).find(|w| w[1].as_f64().is_some_and(|s| s > 0.5));
    let before = windows.iter().find(|w| w[0].as_f64().is_some_and(|time| time < called - 0.15));
    let held = before.and_then(|w| w[1].as_f64()).is_some_and(|share| share < 0.5);
    let effect = match more.and_then(|w| w[0].as_f64()) {
        _ if !held => Err(Trouble::Invalid(None, "the first limit did not hold".into())),
        Some(time) => Ok((time - called) * 1000.0),
        None => Err(failed("the program has not got more CPU")),
    };
    Ok(vec![value("raise.call", call), ("raise.effect".into(), effect)])
}

/// The MiB that a container may take before it is ended.
const LIMIT: i64 = 64;
/// How often the state of a container is asked for whose end is timed: no latency is told more exactly.
const CLOSE: Duration = Duration::from_millis(2);
/// How long a runtime may take to tell why a container has ended.
const CAUSE: Duration = Duration::from_secs(5);

/// A program that takes more memory than it may.
pub(super) async fn oom(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let pod = cell.pod(Network::Host).await?;
    let resources = LinuxContainerResources {
        memory_limit_in_bytes: LIMIT << 20,
        memory_swap_limit_in_bytes: LIMIT << 20,
        ..Default::default()
    };
    let spec = Spec { resources, ..Spec::workload("hog --limit 1024") };
    let launched = cell.launch(&pod, &spec).await?;
    let mut status = cell.ended_asking(&launched.id, |_| CLOSE).await?;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    // The runtime hears of the end and of its cause by two events, in any order.
    let until = Instant::now() + CAUSE;
    while status.reason != "OOMKilled" && Instant::now() < until {
        tokio::time::sleep(POLL).await;
        status = cell.ended(&launched.id).await?;
    }
    let text = launched.text();
    cell.finish(&pod).await?;
    let printed = parse(&text)?;
    if !printed["survived"].is_null() {
        let text = format!("the program took 1024 MiB under a limit of {LIMIT} MiB");
        return Ok(vec![("memory.oom".into(), Err(Trouble::Invalid(None, text)))]);
    }
    let last = printed["time"].as_f64().unwrap_or(now);
    let latency = (now - last).max(0.0) * 1000.0;
    let latency = if status.reason == "OOMKilled" {
        Ok(latency)
    } else {
        let text = format!("the runtime says `{}`, not OOMKilled", status.reason);
        Err(Trouble::Invalid(Some(latency), text))
    };
    Ok(vec![("memory.oom".into(), latency)])
}

/// A program that starts more processes than it may.
pub(super) async fn pids(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let name = format!("pids-{}", cell.made.get());
    let group = limited(cell.place, "pids", &name, "pids.max", "32");
    let text =
        "the CRI has no limit of processes, and the control group above is not ours to limit";
    let group = group.ok_or_else(|| Trouble::Unsupported(text.into()))?.map_err(failed)?;
    let pod = cell.pod_in(Network::Host, Some(group.clone())).await?;
    let launched = cell.launch(&pod, &Spec::workload("fork --limit 100")).await?;
    let printed = parse(&cell.output(&launched).await?)?;
    cell.finish(&pod).await?;
    let _ = fs::remove_dir(cgroups::hierarchy("pids").join(group.trim_start_matches('/')));
    let started = printed["started"].as_f64().unwrap_or(f64::NAN);
    let started = if started < 32.0 {
        Ok(started)
    } else {
        Err(Trouble::Invalid(Some(started), "the limit of 32 did not hold".into()))
    };
    Ok(vec![("pids.refusal".into(), started)])
}

/// What groups are charged for until the program in them sleeps.
#[derive(Debug, Clone, Copy)]
struct Charged {
    /// Memory in MiB.
    memory: f64,
    /// CPU time in ms.
    cpu: f64,
}

#[allow(clippy::cast_precision_loss, reason = "a number of bytes as MiB")]
impl Charged {
    /// What the groups are charged for whose names hold these.
    fn of(ids: &[&str]) -> Result<Self, Trouble> {
        let groups = cgroups::all_of("memory", ids).ok_or_else(not_found)?;
        let bytes = groups.iter().map(|group| cgroups::memory(group)).sum::<Option<u64>>();
        let memory = bytes.ok_or_else(not_found)? as f64 / f64::from(1 << 20);
        Ok(Self { memory, cpu: Processors::of(ids)?.used()? * 1000.0 })
    }
}

/// How long a program that has said that it is up may take to fall asleep.
const ASLEEP: Duration = Duration::from_millis(300);

/// What an idle container is charged for, and how much of it is not its program's.
pub(super) async fn charge(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let pod = cell.pod(Network::Host).await?;
    let launched = cell.launch(&pod, &Spec::script(IDLE)).await?;
    tokio::time::sleep(ASLEEP).await;
    let whole = Charged::of(&[&pod.id, &launched.id])?;
    let bare = alone(cell).await;
    cell.finish(&pod).await?;
    let own = |part: fn(&Charged) -> f64| bare.clone().map(|bare| part(&whole) - part(&bare));
    Ok(vec![
        value("charge.idle", whole.memory),
        value("charge.cpu", whole.cpu),
        ("charge.runtime".into(), own(|it| it.memory)),
        ("charge.runtime-cpu".into(), own(|it| it.cpu)),
    ])
}

/// What the same sleeping program is charged for in a group that no runtime has made.
async fn alone(cell: &Cell<'_>) -> Result<Charged, Trouble> {
    let text =
        "the control group above is not ours: the program cannot sleep in one without a runtime";
    let parent = cell.place.cgroup.as_ref().filter(|_| cell.place.ours());
    let parent = parent.ok_or_else(|| Trouble::Unsupported(text.into()))?;
    let name = format!("alone-{}", cell.made.get());
    let group = format!("{parent}/{name}");
    let made = ["memory", cgroups::accounts()].map(|controller| cgroups::make(controller, &group));
    let [memory, cpu] = made.map(|dir| dir.map_err(failed));
    let busybox = image::find("busybox").ok_or_else(|| failed("busybox is not there"))?;
    // A shell of the host goes into the groups and becomes the program: its own memory is charged elsewhere.
    let mut program = Command::new("/bin/sh")
        .args(["-c", "echo 0 >$0/cgroup.procs; echo 0 >$1/cgroup.procs; exec $2 sh -c \"$3\""])
        .args([memory?, cpu?, busybox])
        .arg(IDLE)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let mut up = String::new();
    if let Some(output) = program.stdout.take() {
        BufReader::new(output).read_line(&mut up).await.map_err(failed)?;
    }
    tokio::time::sleep(ASLEEP).await;
    let charged = Charged::of(&[&name]);
    cgroups::remove(&group);
    let _ = program.wait().await;
    if up.trim_end() == "up" { charged } else { Err(failed("the program did not start")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_counts_if_it_throttles_and_is_exact() {
        for (share, off) in [(0.2, 0.0), (0.191, 4.5), (0.209, 4.5)] {
            let judged = judge(share, 1);
            assert!(matches!(judged, Ok(it) if (it - off).abs() < 1e-6), "{share}: {judged:?}");
        }
        for (share, times, word) in [
            (0.2, 0, "has not throttled"),
            (0.189, 7, "not exact"),
            (0.211, 7, "not exact"),
            (1.0, 0, "has not throttled"),
        ] {
            let judged = judge(share, times);
            let is_told =
                matches!(&judged, Err(Trouble::Invalid(_, reason)) if reason.contains(word));
            assert!(is_told, "{share} {times}: {judged:?}");
        }
    }
}
