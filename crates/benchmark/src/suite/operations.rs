//! What a runtime does for Kubernetes, call by call. Only the call is timed, on the client's side.

use std::fs;
use std::time::{Duration, Instant, SystemTime};

use crate::cell::{Cell, IDLE, Launched, Network, QUARTER, Spec, Trouble, Values, failed, ms};
use crate::image::PULLED;

use super::value;

/// Seconds that StopContainer waits before it kills.
const GRACE: i64 = 10;

/// The whole life of a container with the network of the host.
pub(super) async fn life(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let client = cell.client();
    let sandbox = cell.sandbox(Network::Host, None);
    fs::create_dir_all(&sandbox.log_directory).map_err(failed)?;
    let begun = Instant::now();
    let pod = client.run_sandbox(sandbox.clone(), cell.handler.handler()).await?;
    let sandbox_create = ms(begun);
    let config = cell.container(&sandbox, &Spec::script(IDLE));
    let log = format!("{}/{}", sandbox.log_directory, config.log_path);
    let begun = Instant::now();
    let id = client.create(&pod, config, sandbox.clone()).await?;
    let create = ms(begun);
    let called = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let begun = Instant::now();
    client.start(&id).await?;
    let start = ms(begun);
    let answer = first_answer(&Launched { id: id.clone(), log }, called).await;
    let exec = exec(cell, &id).await?;
    let begun = Instant::now();
    client.stop(&id, GRACE).await?;
    let stop = ms(begun);
    let begun = Instant::now();
    client.remove(&id).await?;
    let remove = ms(begun);
    let begun = Instant::now();
    client.stop_sandbox(&pod).await?;
    let sandbox_stop = ms(begun);
    let begun = Instant::now();
    client.remove_sandbox(&pod).await?;
    let sandbox_remove = ms(begun);
    let _ = fs::remove_dir_all(&sandbox.log_directory);
    let total = sandbox_create + create + start + stop + remove + sandbox_stop + sandbox_remove;
    Ok(vec![
        value("sandbox.create", sandbox_create),
        value("container.create", create),
        value("container.start", start),
        ("container.answer".into(), answer),
        value("container.exec", exec),
        value("container.stop", stop),
        value("container.remove", remove),
        value("sandbox.stop", sandbox_stop),
        value("sandbox.remove", sandbox_remove),
        value("life.total", total),
    ])
}

/// How many calls of ExecSync a sample holds: one alone varies by more than runtimes differ.
const EXECS: u32 = 10;

/// The mean time of a program in a container, in ms.
async fn exec(cell: &Cell<'_>, id: &str) -> Result<f64, Trouble> {
    let mut all = 0.0;
    for _ in 0..EXECS {
        let begun = Instant::now();
        let said = cell.client().exec(id, &["/bin/true"]).await?;
        all += ms(begun);
        if said.exit_code != 0 {
            let text = String::from_utf8_lossy(&said.stderr);
            return Err(failed(format!("`true` ended with {}: {text}", said.exit_code)));
        }
    }
    Ok(all / f64::from(EXECS))
}

/// From the call of StartContainer to the first line, by the time that the runtime has put to it.
async fn first_answer(launched: &Launched, called: f64) -> Result<f64, Trouble> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(line) = launched.first_line() {
            return Ok((line - called).rem_euclid(QUARTER) * 1000.0);
        }
        if Instant::now() > until {
            return Err(failed("the program's first line is not in the log"));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A sandbox with a network of its own.
pub(super) async fn bridge(cell: &Cell<'_>) -> Result<Values, Trouble> {
    if let Some(reason) = &cell.place.no_network {
        return Err(Trouble::Unsupported(reason.clone()));
    }
    let begun = Instant::now();
    let pod = cell.pod(Network::Own).await.map_err(without_cni)?;
    let create = ms(begun);
    let begun = Instant::now();
    cell.client().stop_sandbox(&pod.id).await?;
    let stop = ms(begun);
    cell.finish(&pod).await?;
    Ok(vec![value("bridge.create", create), value("bridge.stop", stop)])
}

/// A runtime without a network configuration is not one that failed.
pub(super) fn without_cni(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Failed(text) if text.contains("cni plugin not initialized") => {
            Trouble::Unsupported(text)
        }
        other => other,
    }
}

/// Pulling an image, and removing it.
pub(super) async fn image(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let name = cell.place.image(PULLED);
    let begun = Instant::now();
    cell.client().pull(&name).await?;
    let pull = ms(begun);
    let begun = Instant::now();
    cell.client().remove_image(&name).await?;
    let remove = ms(begun);
    Ok(vec![value("image.pull", pull), value("image.remove", remove)])
}
