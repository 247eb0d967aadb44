//! Checkpoint and restore through the CRI.

use std::time::Instant;

use crate::cell::{Cell, Network, Spec, Trouble, Values, ms};
use crate::cgroups;
use crate::cri::messages::ImageSpec;

use super::value;

/// `CheckpointContainer`, and a container that is created from what it wrote.
pub async fn through_cri(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let client = cell.client();
    let pod = cell.pod(Network::Host).await?;
    let spec = Spec::workload("heartbeat --size 16 --file /tmp/beat");
    let launched = cell.launch(&pod, &spec).await?;
    // The location is not truncated by containerd: each is used once.
    let location = format!("{}/checkpoint.tar", pod.config.log_directory);
    let begun = Instant::now();
    let written = client.checkpoint(&launched.id, &location).await;
    let checkpoint = ms(begun);
    if let Err(error) = written {
        cell.finish(&pod).await?;
        return Err(error.into());
    }
    client.stop(&launched.id, 0).await?;
    client.remove(&launched.id).await?;
    let mut values = vec![value("container.checkpoint", checkpoint)];
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
fn refused(error: crate::cri::CallError) -> Trouble {
    Trouble::Unsupported(format!("no container can be created from a checkpoint: {error}"))
}
