//! Checkpoint and restore by the OCI runtime itself, with torpor as its `criu`.

use std::fs;
use std::path::Path;
use std::time::{Instant, SystemTime};

use prost::Message;

use crate::cell::{Cell, Trouble, Values, failed, ms};

use super::bare::{ALIVE, Container, prepare};
use super::seal::SEAL;
use super::value;

/// What is told of parts that only an engine has.
const NO_ENGINE: &str =
    "gVisor checkpoints by itself, and does not tell how long it froze the container";

/// One checkpoint that leaves its container running, and one restore from it.
pub(super) async fn measure(cell: &Cell<'_>, memory: u32, sealed: bool) -> Result<Values, Trouble> {
    let container = prepare(cell, memory, sealed).await?;
    let done = sample(&container).await;
    container.remove().await;
    done
}

/// One sample of everything that is measured in a container.
async fn sample(container: &Container<'_>) -> Result<Values, Trouble> {
    let id = container.id.as_str();
    let dir = container.dir.display();
    let (image_path, work_path) = (format!("{dir}/images"), format!("{dir}/work"));
    let bundle = dir.to_string();
    container.start().await?;
    let called = SystemTime::now();
    let begun = Instant::now();
    let places = ["--image-path", &image_path, "--work-path", &work_path];
    let places = if container.sentry { &places[..2] } else { &places[..] };
    let checkpoint = [&["checkpoint", "--leave-running"][..], places, &[id]].concat();
    container.done(&checkpoint).await?;
    let client = ms(begun);
    let count = container.beat().map_or(0, |beat| beat.count);
    let alive = container.until(|beat| beat.count > count + ALIVE).await?;
    container.done(&["kill", id, "KILL"]).await?;
    container.done(&["delete", "--force", id]).await?;
    let images = container.dir.join("images");
    if container.sealed && !images.join(SEAL).exists() {
        return Err(failed("the engine was told to seal its images, and has not"));
    }
    let bytes = size(&images);
    let none = || Err(Trouble::Unsupported(NO_ENGINE.into()));
    let frozen = if container.sentry { none() } else { frozen(&container.dir) };
    // Before the restore, which may write beside it.
    let parts = named(&frozen, Account::read(&container.dir.join("work/dump.log")), called, client);
    let (called, begun) = (SystemTime::now(), Instant::now());
    let restore = [&["restore", "--detach", "--bundle", &bundle][..], places, &[id]].concat();
    let restored = container.done(&restore).await.map(|()| ms(begun));
    let answered = match &restored {
        Ok(_) => answered(container, called).await,
        Err(trouble) => Err(trouble.clone()),
    };
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

/// The ms from a call to the next sign of life.
async fn answered(container: &Container<'_>, called: SystemTime) -> Result<f64, Trouble> {
    let beat = container.until(|beat| beat.woke_after(called).is_some()).await?;
    Ok(beat.woke_after(called).unwrap_or_default().as_secs_f64() * 1000.0)
}

/// Bytes as MiB.
#[allow(clippy::cast_precision_loss, reason = "a number of bytes as MiB")]
pub(super) fn mebibytes(bytes: u64) -> f64 {
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
        let work = worked(&text)?;
        let (made, written) = (about.created().map_err(failed)?, about.modified().map_err(failed)?);
        Ok(Self { work, made, written })
    }
}

/// The ms between the first and the last line of a log whose lines begin with `(seconds)`.
///
/// # Errors
/// If no line does.
pub(super) fn worked(log: &str) -> Result<f64, Trouble> {
    let time = |line: &str| line.strip_prefix('(')?.split_once(')')?.0.trim().parse::<f64>().ok();
    let mut times = log.lines().filter_map(time);
    let first = times.next().ok_or_else(|| failed("the engine's log holds no times"))?;
    Ok((times.next_back().unwrap_or(first) - first) * 1000.0)
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
pub(super) fn frozen_in(bytes: &[u8]) -> Result<f64, Trouble> {
    // two magic numbers, the length of the message, the message
    let message = bytes.get(12..).unwrap_or_default();
    let times = Times::decode(message).map_err(failed)?;
    let dump = times.dump.ok_or_else(|| failed("the statistics are not those of a dump"))?;
    Ok(f64::from(dump.frozen_time) / 1000.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
