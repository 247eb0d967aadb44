//! What a program gets done inside of a container.

use std::fs;

use serde_json::Value;

use crate::cell::{Cell, Network, Spec, Trouble, Values, failed, parse, workload};
use crate::cri::v1::Mount;
use crate::image::TOOLS;

use super::operations::without_cni;
use super::value;

/// A piece of work that takes about a second at an effort of 1.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an effort is from 0 to 1000, and amounts are below a million"
)]
fn amount(cell: &Cell<'_>, at_one: f64) -> u64 {
    (at_one * cell.config.effort).max(1.0) as u64
}

/// The values of a program whose names are those of benchmarks.
fn named(values: &Value) -> Values {
    let entries = values.as_object().into_iter().flatten();
    entries.filter_map(|(name, v)| Some(value(name, v.as_f64()?))).collect()
}

/// What the report of sysbench has after a title, as ms.
fn reported(text: &str, title: &str) -> Result<f64, Trouble> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix(title));
    let word = line.map(|rest| rest.trim_start_matches(':').trim());
    let (word, factor) = match word.and_then(|w| w.strip_suffix('s')) {
        Some(seconds) => (Some(seconds), 1000.0),
        None => (word, 1.0),
    };
    let number = word.and_then(|word| word.parse::<f64>().ok()).map(|number| number * factor);
    number.ok_or_else(|| failed(format!("sysbench has not reported `{title}`: {text}")))
}

/// What sysbench tells of `events` of a component. It rounds latencies to 0.01 ms, the total to 0.1 ms: the average
/// is that of the total.
#[allow(clippy::cast_precision_loss, reason = "events are far fewer than 2^52")]
fn latencies(component: &str, text: &str, events: u64) -> Values {
    let total = reported(text, "total time");
    let average = total.clone().map(|total| total / events as f64);
    let facets = [
        ("total", total),
        ("minimal", reported(text, "min")),
        ("average", average),
        ("maximal", reported(text, "max")),
    ];
    facets.map(|(facet, value)| (format!("{component}.{facet}"), value)).into()
}

async fn sysbench(cell: &Cell<'_>, arguments: &str) -> Result<String, Trouble> {
    if !cell.place.contents.sysbench {
        let text = "sysbench is not installed (Debian: apt-get install sysbench)";
        return Err(Trouble::Unsupported(text.into()));
    }
    let words = format!("/usr/bin/sysbench {arguments} --threads=1 run");
    let command = words.split_whitespace().map(str::to_owned).collect();
    cell.program(&Spec { image: TOOLS, command, ..Spec::default() }).await
}

/// Primes.
pub(super) async fn cpu(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let events = amount(cell, 4000.0);
    let text =
        sysbench(cell, &format!("cpu --cpu-max-prime=10000 --time=0 --events={events}")).await?;
    Ok(latencies("cpu", &text, events))
}

/// The MiB of a block. sysbench tells the shortest and the longest time to 0.01 ms, which is a twentieth of the time
/// that such a block takes; larger ones are beyond the caches, and their times those of whoever shares the memory.
const BLOCK: u64 = 4;

/// Memory.
pub(super) async fn memory(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let fault = cell.values(&Spec::workload("fault --size 64")).await;
    let mut all: Values = match fault {
        Ok(values) => named(&values),
        Err(trouble) => vec![("memory.fault".into(), Err(trouble))],
    };
    let blocks = amount(cell, 4096.0);
    let arguments = format!(
        "memory --memory-block-size={BLOCK}M --memory-total-size={}M --time=0",
        blocks * BLOCK
    );
    match sysbench(cell, &arguments).await {
        Ok(text) => all.extend(latencies("memory", &text, blocks)),
        Err(trouble) => all.extend(
            ["total", "minimal", "average", "maximal"]
                .map(|facet| (format!("memory.{facet}"), Err(trouble.clone()))),
        ),
    }
    Ok(all)
}

/// A file in the container's own root.
pub(super) async fn disk(cell: &Cell<'_>) -> Result<Values, Trouble> {
    Ok(named(&cell.values(&on_file(cell, "/tmp/data")).await?))
}

/// A file in a directory of the host.
pub(super) async fn disk_bind(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let dir = cell.place.dir.join(format!("bind-{}", cell.made.get()));
    fs::create_dir(&dir).map_err(failed)?;
    let mounts = vec![Mount {
        container_path: "/data".into(),
        host_path: dir.display().to_string(),
        ..Mount::default()
    }];
    let done = cell.values(&Spec { mounts, ..on_file(cell, "/data/file") }).await;
    fs::remove_dir_all(&dir).map_err(failed)?;
    let values = named(&done?).into_iter();
    Ok(values.map(|(name, value)| (name.replace("disk.", "disk-bind."), value)).collect())
}

/// The program that writes and reads a file.
fn on_file(cell: &Cell<'_>, file: &str) -> Spec {
    let size = amount(cell, 128.0);
    Spec::workload(&format!("disk --size {size} --file {file}"))
}

/// System calls and switches.
pub(super) async fn calls(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let times = amount(cell, 500_000.0);
    let values = cell.values(&Spec::workload(&format!("calls --times {times}"))).await?;
    Ok(named(&values))
}

fn connection(component: &str, values: &Value) -> Values {
    ["throughput", "latency"]
        .into_iter()
        .filter_map(|facet| Some(value(&format!("{component}.{facet}"), values[facet].as_f64()?)))
        .collect()
}

/// TCP inside of one container.
pub(super) async fn loopback(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let size = amount(cell, 512.0);
    // gVisor has no loopback device where it shares the network of the host.
    let pod = cell.pod(cell.place.network()).await.map_err(without_cni)?;
    let launched = cell.launch(&pod, &Spec::workload(&format!("loopback --size {size}"))).await?;
    let values = parse(&cell.output(&launched).await?)?;
    cell.finish(&pod).await?;
    Ok(connection("loopback", &values))
}

/// TCP between two sandboxes.
pub(super) async fn network(cell: &Cell<'_>) -> Result<Values, Trouble> {
    if let Some(reason) = &cell.place.no_network {
        return Err(Trouble::Unsupported(reason.clone()));
    }
    let size = amount(cell, 512.0);
    let server = cell.pod(Network::Own).await.map_err(without_cni)?;
    cell.launch(&server, &Spec::workload("serve")).await?;
    let address = cell.client().address(&server.id).await?;
    if address.is_empty() {
        return Err(failed("the runtime tells no address of the sandbox"));
    }
    let client = cell.pod(Network::Own).await?;
    let command = workload(&format!("connect {address} --size {size}"));
    let launched = cell.launch(&client, &Spec { image: TOOLS, command, ..Spec::default() }).await?;
    let text = cell.output(&launched).await?;
    cell.finish(&client).await?;
    cell.finish(&server).await?;
    Ok(connection("bridge", &parse(&text)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_sysbench_are_read() {
        let text = "General statistics:\n    total time:                          0.8812s\n\
                    Latency (ms):\n         min:                                    0.71\n";
        assert!((reported(text, "total time").unwrap() - 881.2).abs() < 1e-9);
        assert!((reported(text, "min").unwrap() - 0.71).abs() < 1e-9);
        assert!(reported(text, "max").is_err());
    }

    #[test]
    fn the_average_is_more_exact_than_what_is_printed() {
        let text = "total time: 0.9216s\nmin: 0.86\navg: 0.90\nmax: 3.11\n";
        let values = latencies("memory", text, 1024);
        let of = |name: &str| values.iter().find(|(n, _)| n == name).unwrap().1.clone().unwrap();
        assert!((of("memory.average") - 0.9).abs() < 1e-9, "{values:?}");
        assert!((of("memory.minimal") - 0.86).abs() < 1e-9, "{values:?}");
        let slower = latencies("memory", "total time: 0.9308s\n", 1024);
        assert!(
            (slower[2].1.clone().unwrap() - 0.909).abs() < 1e-4,
            "1 % more is seen: {slower:?}"
        );
    }
}
