//! Checkpoint and restore through the CRI.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::cell::{Cell, Network, Spec, Trouble, Values, failed, ms};
use crate::cgroups;
use crate::cri::CallError;
use crate::cri::messages::ImageSpec;

use super::direct::{ALIVE, frozen_in, mebibytes};
use super::value;
use crate::workload::Beat;

/// `CheckpointContainer`, and a container that is created from what it wrote.
pub async fn through_cri(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let client = cell.client();
    // Who lacks the call says so of a container that is not there, too, and needs none.
    let probe = client.checkpoint("none", "/nonexistent/checkpoint.tar").await;
    if let Err(error @ CallError::Unsupported { .. }) = probe {
        return Err(error.into());
    }
    let pod = cell.pod(Network::Host).await?;
    let spec = Spec::workload("heartbeat --size 16 --file /tmp/beat");
    let launched = cell.launch(&pod, &spec).await?;
    beating(cell, &launched.id).await?;
    // The location is not truncated by containerd: each is used once.
    let location = format!("{}/checkpoint.tar", pod.config.log_directory);
    let begun = Instant::now();
    let written = client.checkpoint(&launched.id, &location).await;
    let checkpoint = ms(begun);
    if let Err(error) = written {
        cell.finish(&pod).await?;
        return Err(error.into());
    }
    let pause = pause(cell, &launched.id).await;
    client.stop(&launched.id, 0).await?;
    client.remove(&launched.id).await?;
    let bytes = fs::metadata(&location).map(|about| mebibytes(about.len())).map_err(failed);
    let mut values = vec![
        value("container.checkpoint", checkpoint),
        ("container.checkpoint-pause".into(), pause),
        ("container.checkpoint-frozen".into(), frozen(Path::new(&location))),
        ("container.checkpoint-bytes".into(), bytes),
    ];
    if cell.config.filters.take("operations.container.restore") {
        let restored = restore(cell, &pod, &spec, &location).await;
        if let (Err(_), Some(group), true) = (&restored, &cell.place.cgroup, cell.place.ours()) {
            // containerd checkpoints what it has paused. What comes back frozen cannot be removed.
            cgroups::thaw(group);
        }
        values.push(("container.restore".into(), restored));
    }
    cell.finish(&pod).await?;
    Ok(values)
}

/// What the program has written: its file is in its own root, where only it can be asked for it.
async fn beat(cell: &Cell<'_>, id: &str) -> Result<Option<Beat>, Trouble> {
    let said = cell.client().exec(id, &["/bin/cat", "/tmp/beat"]).await?;
    Ok(Beat::read(&said.stdout))
}

/// Waits until the program has filled its memory and beats.
async fn beating(cell: &Cell<'_>, id: &str) -> Result<(), Trouble> {
    let until = Instant::now() + Duration::from_secs(cell.config.deadline);
    while Instant::now() < until {
        if beat(cell, id).await?.is_some_and(|beat| beat.count >= ALIVE) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(failed("the container gives no sign of life"))
}

/// The longest silence of the program so far, when it is alive again.
async fn pause(cell: &Cell<'_>, id: &str) -> Result<f64, Trouble> {
    let none = || failed("the container gives no sign of life after its checkpoint");
    let count = beat(cell, id).await?.ok_or_else(none)?.count;
    let until = Instant::now() + Duration::from_secs(cell.config.deadline);
    while Instant::now() < until {
        let now = beat(cell, id).await?.ok_or_else(none)?;
        if now.count > count {
            return Ok(now.silence.as_secs_f64() * 1000.0);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(none())
}

/// The most that statistics of an engine may hold.
const STATISTICS: u64 = 1 << 20;

/// The frozen time that is told by the statistics in an archive of a checkpoint.
fn frozen(archive: &Path) -> Result<f64, Trouble> {
    let mut archive = tar::Archive::new(fs::File::open(archive).map_err(failed)?);
    for entry in archive.entries().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path().map_err(failed)?.into_owned();
        if path.file_name().is_some_and(|name| name == "stats-dump") {
            let mut bytes = Vec::new();
            entry.take(STATISTICS).read_to_end(&mut bytes).map_err(failed)?;
            return frozen_in(&bytes);
        }
    }
    Err(Trouble::Unsupported("the runtime puts no statistics of the engine in its archive".into()))
}

async fn restore(
    cell: &Cell<'_>,
    pod: &crate::cell::Pod,
    spec: &Spec,
    location: &str,
) -> Result<f64, Trouble> {
    let mut config = cell.container(&pod.config, spec);
    config.image = Some(ImageSpec { image: location.to_owned() });
    let begun = Instant::now();
    let id = cell.client().create(&pod.id, config, pod.config.clone()).await.map_err(refused)?;
    cell.client().start(&id).await?;
    Ok(ms(begun))
}

/// A runtime that does not know checkpoints as images takes the path for a name, and says so.
fn refused(error: CallError) -> Trouble {
    Trouble::Unsupported(format!("no container can be created from a checkpoint: {error}"))
}
