//! Checkpoint and restore by the OCI runtime itself, with torpor as its `criu`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use prost::Message;
use rustix::time::{ClockId, clock_gettime};

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
    let called = monotonic();
    let places = ["--image-path", &image_path, "--work-path", &work_path];
    let places = if container.sentry { &places[..2] } else { &places[..] };
    let checkpoint = [&["checkpoint", "--leave-running"][..], places, &[id]].concat();
    container.done(&checkpoint).await?;
    let call = [called, monotonic()];
    let client = (call[1] - call[0]).as_secs_f64() * 1000.0;
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
    let parts = named(&frozen, Account::read(&container.dir.join("work/dump.log")), call, client);
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

/// The clock that the times of an engine's log are of, since the machine was started.
fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// What an engine's log tells of its time.
#[derive(Debug, Clone, Copy)]
struct Account {
    /// When its program began, by the clock that the caller has, too.
    began: Duration,
    /// When it wrote its first line, and its last, in ms since.
    first: f64,
    last: f64,
}

impl Account {
    fn read(log: &Path) -> Result<Self, Trouble> {
        Self::of(&fs::read_to_string(log).map_err(failed)?)
    }

    fn of(log: &str) -> Result<Self, Trouble> {
        let (first, last) = times(log)?;
        let began = log.lines().find_map(|line| line.split_once(BEGAN)?.1.split(' ').next());
        let began = began.and_then(|word| word.parse().ok());
        let began = began.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let none = || Trouble::Unsupported("the engine does not tell when it began".into());
        Ok(Self { began: began.ok_or_else(none)?, first, last })
    }
}

/// What the engine says before the time from which the times of its log count, in seconds.
const BEGAN: &str = "CLOCK_MONOTONIC was ";

/// The times of the first and of the last line of a log whose lines begin with `(seconds)`, in ms.
fn times(log: &str) -> Result<(f64, f64), Trouble> {
    let time = |line: &str| line.strip_prefix('(')?.split_once(')')?.0.trim().parse::<f64>().ok();
    let mut times = log.lines().filter_map(time).map(|seconds| seconds * 1000.0);
    let first = times.next().ok_or_else(|| failed("the engine's log holds no times"))?;
    Ok((first, times.next_back().unwrap_or(first)))
}

/// The ms between the first and the last line of a log.
///
/// # Errors
/// If it has no line with a time.
pub(super) fn worked(log: &str) -> Result<f64, Trouble> {
    times(log).map(|(first, last)| last - first)
}

/// The share of the caller's time that may be unaccounted for.
const UNNAMED: f64 = 0.02;

/// Where the caller's time went, besides the frozen time: `call` is when it began and ended, by the clock of
/// the engine's log, and `client` how long it took.
fn named(
    frozen: &Result<f64, Trouble>,
    account: Result<Account, Trouble>,
    call: [Duration; 2],
    client: f64,
) -> Values {
    let none = |trouble: Trouble| -> Values {
        ["engine", "runtime", "unnamed"].map(|name| (name.into(), Err(trouble.clone()))).into()
    };
    let (frozen, account) = match (frozen, account) {
        (Ok(frozen), Ok(account)) => (*frozen, account),
        (Err(trouble), _) => return none(trouble.clone()),
        (_, Err(trouble)) => return none(trouble),
    };
    let [called, returned] =
        call.map(|time| (time.as_secs_f64() - account.began.as_secs_f64()) * 1000.0);
    let (before, after) = (account.first - called, returned - account.last);
    let work = account.last - account.first;
    let unnamed = (client - before - work - after).abs();
    let odd = if before < 0.0 || after < 0.0 {
        Some("the times of the engine's log lie outside of the call".to_owned())
    } else if frozen > work {
        Some("the engine says that it froze the tasks for longer than it worked".to_owned())
    } else if unnamed > UNNAMED * client {
        let share = 100.0 * unnamed / client;
        Some(format!("{share:.1} % of the caller's time is in no part that has a name"))
    } else {
        None
    };
    let unnamed = odd.map_or(Ok(unnamed), |text| Err(Trouble::Invalid(Some(unnamed), text)));
    vec![
        value("engine", work - frozen),
        value("runtime", before + after),
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
        let log = |last: &str| {
            format!(
                "(00.001000) Version: 4.2\n(00.001100) At (00.000000) CLOCK_MONOTONIC was 1000.0100005\n\
                 (00.005000) Frozen\nno time\n({last}) finished\n"
            )
        };
        assert!((worked(&log("00.081000")).unwrap() - 80.0).abs() < 1e-9);
        let (called, frozen) = (Duration::from_secs(1000), Ok(60.0));
        // The program began 10.0005 ms after the call, which took 100 ms.
        let call = [called, called + Duration::from_millis(100)];
        let parts = |last: &str, client: f64| named(&frozen, Account::of(&log(last)), call, client);
        let of = |parts: &Values, name: &str| {
            parts.iter().find(|(n, _)| n == name).unwrap().1.clone().ok()
        };
        let is = |value: Option<f64>, expected: f64| (value.unwrap() - expected).abs() < 1e-6;
        let all = parts("00.081000", 101.0);
        assert!(is(of(&all, "engine"), 20.0), "{all:?}");
        assert!(is(of(&all, "runtime"), 20.0), "{all:?}");
        assert!(is(of(&all, "unnamed"), 1.0), "{all:?}");
        // What ended a millisecond and a half later took that much of the runtime's, to the microsecond.
        assert!(is(of(&parts("00.082503", 100.0), "runtime"), 18.497));
        for (last, client) in [
            // Three of a hundred without a name are too many.
            ("00.081000", 103.0),
            // It did not end after the call, nor work for less than it froze.
            ("00.090000", 100.0),
            ("00.060000", 100.0),
        ] {
            assert_eq!(of(&parts(last, client), "unnamed"), None, "{last} {client}");
        }
        let none = named(&Err(failed("none")), Account::of(&log("00.081000")), call, 100.0);
        assert!(none.iter().all(|(_, part)| part.is_err()), "{none:?}");
        // An engine that does not tell when it began.
        let none = named(&frozen, Account::of("(00.001) a\n(00.081) b\n"), call, 100.0);
        assert!(none.iter().all(|(_, part)| matches!(part, Err(Trouble::Unsupported(_)))));
    }
}
