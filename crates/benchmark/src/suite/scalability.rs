//! Many containers: starting them, letting them run, and stopping them, and the memory that each takes.

use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt, TryStreamExt};

use crate::cell::{Cell, Network, Pod, Spec, Trouble, Values, failed};
use crate::cgroups;
use crate::cri::v1::ContainerState;
use crate::image::BASE;
use crate::machine::{field, kibibytes};
use crate::overhead;

use super::value;

/// How long the memory of containers that have just started settles.
const SETTLE: Duration = Duration::from_millis(500);

/// Starts, weighs and stops a number of containers.
pub(super) async fn scale(cell: &Cell<'_>, containers: u32) -> Result<Values, Trouble> {
    let width = usize::try_from(cell.config.concurrency).map_err(failed)?.max(1);
    let before = cell.weighing(|| Weight::now(cell, &[]));
    let begun = Instant::now();
    let pods: Vec<(Pod, String)> = stream::iter(0..containers)
        .map(|_| sleeper(cell))
        .buffer_unordered(width)
        .try_collect()
        .await?;
    let start = begun.elapsed().as_secs_f64();
    tokio::time::sleep(SETTLE).await;
    let after = cell.weighing(|| Weight::now(cell, &pods));
    let running = running(cell, &pods).await?;
    let begun = Instant::now();
    let ends = pods.iter().map(|(pod, id)| end(cell, pod, id));
    stream::iter(ends).buffer_unordered(width).try_collect::<Vec<()>>().await?;
    let stop = begun.elapsed().as_secs_f64();
    let each = |mebibytes: f64| mebibytes / f64::from(containers);
    let grown = |before: Option<f64>, after: Option<f64>, text: &str| match (before, after) {
        (Some(before), Some(after)) => Ok(each(after - before)),
        _ => Err(Trouble::Unsupported(text.into())),
    };
    let alien = "the processes of an endpoint that was there before are not known";
    Ok(vec![
        value("start", start),
        value("stop", stop),
        ("running".into(), running.ok_or_else(|| Trouble::Unsupported(alien.into()))),
        value("available", each(before.available - after.available)),
        ("pss".into(), grown(before.pss, after.pss, alien)),
        ("cgroup".into(), grown(before.cgroup, after.cgroup, "no memory controller is found")),
    ])
}

/// For how long all run.
const RUNNING: Duration = Duration::from_secs(1);

/// Lets all run, and fails if one does not: the CPU time in ms of a second that all processes of the
/// endpoint take for it, if they are known.
async fn running(cell: &Cell<'_>, pods: &[(Pod, String)]) -> Result<Option<f64>, Trouble> {
    let all = || -> Duration { cell.place.processes().into_iter().map(overhead::of).sum() };
    let used = || cell.weighing(all);
    let before = cell.place.ours().then(used);
    let begun = Instant::now();
    tokio::time::sleep(RUNNING).await;
    let time = begun.elapsed().as_secs_f64();
    let taken = before.map(|before| used().saturating_sub(before).as_secs_f64());
    let mut ended = 0;
    for (_, id) in pods {
        let state = cell.client().container(id).await?.state();
        ended += u32::from(state != ContainerState::ContainerRunning);
    }
    if ended > 0 {
        return Err(failed(format!("{ended} of {} containers do not run", pods.len())));
    }
    Ok(taken.map(|taken| 1000.0 * taken / time))
}

/// A sandbox with one container that sleeps.
async fn sleeper(cell: &Cell<'_>) -> Result<(Pod, String), Trouble> {
    let pod = cell.pod(Network::Host).await?;
    let command = ["/bin/sleep", "2147483647"].map(str::to_owned).to_vec();
    let launched = cell.launch(&pod, &Spec { image: BASE, command, ..Spec::default() }).await?;
    Ok((pod, launched.id))
}

async fn end(cell: &Cell<'_>, pod: &Pod, id: &str) -> Result<(), Trouble> {
    // It runs as the first process, and ignores SIGTERM: it is killed at once.
    cell.client().stop(id, 0).await?;
    cell.client().remove(id).await?;
    cell.finish(pod).await
}

/// Memory in MiB, by three measures.
struct Weight {
    available: f64,
    pss: Option<f64>,
    cgroup: Option<f64>,
}

#[allow(clippy::cast_precision_loss, reason = "amounts of memory as MiB")]
impl Weight {
    fn now(cell: &Cell<'_>, pods: &[(Pod, String)]) -> Self {
        let available = field("/proc/meminfo", "MemAvailable").map_or(0, |v| kibibytes(&v));
        let pss = cell.place.ours().then(|| {
            let all = cell.place.processes();
            all.iter().filter_map(|&pid| proportional(pid)).sum::<u64>() as f64 / 1024.0
        });
        let ids: Vec<&str> =
            pods.iter().flat_map(|(pod, id)| [pod.id.as_str(), id.as_str()]).collect();
        let groups = cgroups::all_of("memory", &ids);
        let charged = groups.and_then(|all| all.iter().map(|one| cgroups::memory(one)).sum());
        let cgroup = charged.map(|bytes: u64| bytes as f64 / f64::from(1 << 20));
        Self { available: available as f64 / 1024.0, pss, cgroup }
    }
}

/// The proportional share of a process in KiB.
fn proportional(pid: u32) -> Option<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    Path::new(&path).exists().then_some(())?;
    field(&path, "Pss").map(|value| kibibytes(&value))
}
