//! Checkpoint and restore through the CRI.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::catalogue::{self, Group};
use crate::cell::{Cell, POLL, Spec, Trouble, Values, failed, ms};
use crate::cgroups;
use crate::cri::{CallError, image_spec};

use super::bare::ALIVE;
use super::direct::{frozen_in, mebibytes, worked};
use super::operations::without_cni;
use super::seal::{self, SEAL};
use super::value;
use crate::workload::Beat;

/// `CheckpointContainer`, and a container that is created from what it wrote.
pub(super) async fn through_cri(
    cell: &Cell<'_>,
    memory: u32,
    sealed: bool,
) -> Result<Values, Trouble> {
    let client = cell.client();
    // A runtime that lacks the call says so of a container that is not there, too, and needs none.
    let probe = client.checkpoint("none", "/nonexistent/checkpoint.tar").await;
    if let Err(unsupported @ Trouble::Unsupported(_)) = probe.map_err(lacking) {
        return Err(unsupported);
    }
    if !sealed {
        return sample(cell, memory, false).await;
    }
    let unsupported = |text: &str| Trouble::Unsupported(text.to_owned());
    if !cell.place.ours() {
        return Err(unsupported("the engine's options are not ours at an endpoint that was there"));
    }
    let torpor = cell.config.engine().ok_or_else(|| unsupported("there is no torpor to seal"))?;
    seal::sealing(&cell.place.dir, &torpor)?;
    let done = sample(cell, memory, true).await;
    seal::plain(&cell.place.dir)?;
    done
}

async fn sample(cell: &Cell<'_>, memory: u32, sealed: bool) -> Result<Values, Trouble> {
    let client = cell.client();
    // containerd forgets at a restore that a container had the network of the host.
    let pod = cell.pod(cell.place.network()).await.map_err(without_cni)?;
    let spec = Spec::workload(&format!("heartbeat --size {memory} --file /tmp/beat"));
    let launched = cell.launch(&pod, &spec).await?;
    beating(cell, &launched.id).await?;
    // The location is not truncated by containerd: each is used once.
    let location = format!("{}/checkpoint.tar", pod.config.log_directory);
    let begun = Instant::now();
    let written = client.checkpoint(&launched.id, &location).await;
    let checkpoint = ms(begun);
    if let Err(error) = written {
        cell.finish(&pod).await?;
        return Err(lacking(error));
    }
    let pause = pause(cell, &launched.id).await;
    client.stop(&launched.id, 0).await?;
    client.remove(&launched.id).await?;
    let archive = Archive::read(Path::new(&location));
    if sealed && archive.as_ref().is_ok_and(|archive| !archive.sealed) {
        cell.finish(&pod).await?;
        return Err(failed("the engine was told to seal its images, and has not"));
    }
    let mut values = vec![
        value("checkpoint", checkpoint),
        ("checkpoint-pause".into(), pause),
        ("checkpoint-bytes".into(), size(&location)),
    ];
    values.extend(parts(archive, checkpoint));
    if wanted(cell, memory, sealed) {
        let restored = restore(cell, &pod, &spec, &location).await;
        if let (Err(_), Some(group), true) = (&restored, &cell.place.cgroup, cell.place.ours()) {
            // containerd checkpoints what it has paused. What comes back frozen cannot be removed.
            cgroups::thaw(group);
        }
        let [restored, answered] = match restored {
            Ok(times) => times.map(Ok),
            Err(trouble) => [Err(trouble.clone()), Err(trouble)],
        };
        values.push(("restore".into(), restored));
        values.push(("restore-answer".into(), answered));
    }
    cell.finish(&pod).await?;
    Ok(values)
}

/// Whether a restore is asked for: the names of its rows are those of this size and kind.
fn wanted(cell: &Cell<'_>, memory: u32, sealed: bool) -> bool {
    let group = Group::Checkpoint { memory, sealed };
    let mut asked = catalogue::wanted(cell.config).into_iter();
    asked.any(|one| one.group == group && one.name.contains(".restore"))
}

fn size(location: &str) -> Result<f64, Trouble> {
    fs::metadata(location).map(|about| mebibytes(about.len())).map_err(failed)
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
        tokio::time::sleep(POLL).await;
    }
    Err(failed("the container gives no sign of life"))
}

/// The longest silence of the program so far, when it is alive again.
async fn pause(cell: &Cell<'_>, id: &str) -> Result<f64, Trouble> {
    let none = || failed("the container does not go on after its checkpoint");
    let count = beat(cell, id).await?.ok_or_else(none)?.count;
    let until = Instant::now() + Duration::from_secs(cell.config.deadline);
    while Instant::now() < until {
        let now = beat(cell, id).await?.ok_or_else(none)?;
        if now.count > count {
            return Ok(now.silence.as_secs_f64() * 1000.0);
        }
        tokio::time::sleep(POLL).await;
    }
    Err(none())
}

/// The most that statistics and the log of an engine may hold.
const LARGEST: u64 = 16 << 20;

/// What an archive of a checkpoint tells of the engine.
#[derive(Debug, Default)]
struct Archive {
    statistics: Option<Vec<u8>>,
    log: Option<Vec<u8>>,
    sealed: bool,
}

impl Archive {
    fn read(path: &Path) -> Result<Self, Trouble> {
        let mut told = Self::default();
        let mut archive = tar::Archive::new(fs::File::open(path).map_err(failed)?);
        // Pages of memory are most of it, and are not read.
        for entry in archive.entries_with_seek().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.path().map_err(failed)?.into_owned();
            let content = |entry: tar::Entry<'_, fs::File>| {
                let mut bytes = Vec::new();
                entry.take(LARGEST).read_to_end(&mut bytes).map(|_| bytes).map_err(failed)
            };
            match path.file_name().and_then(|name| name.to_str()) {
                Some("stats-dump") => told.statistics = Some(content(entry)?),
                Some("dump.log") => told.log = Some(content(entry)?),
                Some(SEAL) => told.sealed = true,
                _ => {}
            }
        }
        Ok(told)
    }
}

/// Where the caller's time went.
fn parts(archive: Result<Archive, Trouble>, client: f64) -> Values {
    let none = |what: &str| {
        Trouble::Unsupported(format!("the runtime puts no {what} of the engine in its archive"))
    };
    let (frozen, work) = match archive {
        Err(trouble) => (Err(trouble.clone()), Err(trouble)),
        Ok(archive) => {
            let statistics = archive.statistics.ok_or_else(|| none("statistics"));
            let log = archive.log.ok_or_else(|| none("log"));
            let work = log.and_then(|log| worked(&String::from_utf8_lossy(&log)));
            (statistics.and_then(|bytes| frozen_in(&bytes)), work)
        }
    };
    let engine = match (&frozen, &work) {
        (Ok(frozen), Ok(work)) => Ok(work - frozen),
        (Err(trouble), _) | (_, Err(trouble)) => Err(trouble.clone()),
    };
    vec![
        ("checkpoint-frozen".into(), frozen),
        ("checkpoint-engine".into(), engine),
        ("checkpoint-storage".into(), work.map(|work| client - work)),
    ]
}

/// A container from a checkpoint: the ms until it was started, and those to its next sign of life.
async fn restore(
    cell: &Cell<'_>,
    pod: &crate::cell::Pod,
    spec: &Spec,
    location: &str,
) -> Result<[f64; 2], Trouble> {
    let mut config = cell.container(&pod.config, spec);
    config.image = Some(image_spec(location));
    let (called, begun) = (SystemTime::now(), Instant::now());
    let id = cell.client().create(&pod.id, config, pod.config.clone()).await.map_err(refused)?;
    cell.client().start(&id).await?;
    let time = ms(begun);
    // What does not go on was not restored.
    Ok([time, answered(cell, &id, called).await?])
}

/// The ms from a call to the program's next sign of life.
async fn answered(cell: &Cell<'_>, id: &str, called: SystemTime) -> Result<f64, Trouble> {
    let until = Instant::now() + Duration::from_secs(cell.config.deadline);
    while Instant::now() < until {
        if let Some(time) = beat(cell, id).await?.and_then(|beat| beat.woke_after(called)) {
            return Ok(time.as_secs_f64() * 1000.0);
        }
        tokio::time::sleep(POLL).await;
    }
    Err(failed("the container does not go on after its restore"))
}

/// What containerd says, from 2.2.7 on, where its configuration does not allow it.
const DISABLED: &str = "checkpoint restore via CreateContainer is disabled by configuration";

/// What CRI-O says that makes no checkpoints: it answers as to a call that has failed.
const SWITCHED_OFF: &str = "checkpoint/restore support not available";

/// A runtime that lacks the call, or whose shim has no checkpoint.
fn lacking(error: CallError) -> Trouble {
    match &error {
        CallError::Failed { text, .. } if text.contains(SWITCHED_OFF) => {
            Trouble::Unsupported(format!(
                "this CRI-O makes checkpoints only with `enable_criu_support = true` in its \
                 configuration and a `criu` on its PATH: {error}"
            ))
        }
        CallError::Unsupported { text, .. } if text.contains("checkpointing container") => {
            Trouble::Unsupported(format!("the shim of this runtime makes no checkpoints: {error}"))
        }
        CallError::Unsupported { .. } => Trouble::Unsupported(format!(
            "this version of the endpoint makes no checkpoints (containerd does from 2.0 on): {error}"
        )),
        _ => error.into(),
    }
}

/// A runtime that does not know checkpoints as images takes the path for a name, and says so. One that
/// says nothing has failed.
fn refused(error: CallError) -> Trouble {
    match error {
        CallError::Failed { text, .. } if text.contains(DISABLED) => Trouble::Unsupported(format!(
            "this containerd restores only with `enable_experimental_restore_via_create = true` in \
             its configuration of the CRI: {text}"
        )),
        CallError::Failed { .. } => {
            Trouble::Unsupported(format!("no container can be created from a checkpoint: {error}"))
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    /// An archive with files as containerd makes them.
    fn packed(files: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut archive = tar::Builder::new(file.reopen().unwrap());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o600);
            archive.append_data(&mut header, format!("checkpoint/{name}"), *content).unwrap();
        }
        archive.finish().unwrap();
        file
    }

    #[test]
    fn the_callers_time_is_told_by_the_archive() {
        // Twelve bytes of magic numbers, then the frozen time: 60000 us.
        let statistics = [&[0; 12][..], &[0x0a, 4, 0x10, 0xe0, 0xd4, 3]].concat();
        let log = b"(00.001000) begins\n(00.081000) ends\n";
        let all: &[(&str, &[u8])] =
            &[("stats-dump", &statistics), ("dump.log", log), ("seal.img", b"x")];
        let of = |files: &[(&str, &[u8])]| {
            let archive = Archive::read(packed(files).path()).unwrap();
            let sealed = archive.sealed;
            let parts = parts(Ok(archive), 100.0).into_iter();
            (sealed, parts.map(|(_, part)| part.ok().map(f64::round)).collect::<Vec<_>>())
        };
        assert_eq!(of(all), (true, vec![Some(60.0), Some(20.0), Some(20.0)]));
        assert_eq!(of(&all[..1]), (false, vec![Some(60.0), None, None]));
        assert_eq!(of(&[]), (false, vec![None, None, None]));
    }

    /// A container's memory before what is read: no time is enough to read all of it.
    #[test]
    fn pages_in_an_archive_are_passed_over() {
        let size = 1_u64 << 40;
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_path("checkpoint/pages-1.img").unwrap();
        header.set_size(size);
        header.set_mode(0o600);
        header.set_cksum();
        let mut pages = file.reopen().unwrap();
        pages.write_all(header.as_bytes()).unwrap();
        pages.seek_relative(size.cast_signed()).unwrap();
        let mut rest = tar::Builder::new(pages);
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o600);
        rest.append_data(&mut header, "checkpoint/dump.log", &b"x"[..]).unwrap();
        rest.finish().unwrap();
        assert_eq!(Archive::read(file.path()).unwrap().log, Some(b"x".to_vec()));
    }

    #[test]
    fn only_who_answers_does_not_support_a_restore() {
        let (call, text) = ("CreateContainer", "invalid reference format".to_owned());
        let said = refused(CallError::Failed { call, text });
        assert!(matches!(said, Trouble::Unsupported(text) if text.contains("invalid reference")));
        let limit = Duration::from_secs(30);
        assert!(matches!(refused(CallError::Deadline { call, limit }), Trouble::Failed(_)));
        let text = "broken pipe".to_owned();
        assert!(matches!(refused(CallError::Gone { call, text }), Trouble::Failed(_)));
    }

    #[test]
    fn what_a_version_cannot_do_is_told_by_its_reason() {
        let text = format!("rpc error: {DISABLED}, see the documentation");
        let said = refused(CallError::Failed { call: "CreateContainer", text });
        let option = "enable_experimental_restore_via_create";
        assert!(matches!(said, Trouble::Unsupported(text) if text.contains(option)));
        for (text, reason) in [
            ("method CheckpointContainer not implemented", "containerd does from 2.0 on"),
            ("checkpointing container \"09\" failed: not implemented", "the shim of this runtime"),
        ] {
            let call = "CheckpointContainer";
            let said = lacking(CallError::Unsupported { call, text: text.to_owned() });
            assert!(
                matches!(&said, Trouble::Unsupported(all) if all.contains(reason) && all.contains(text)),
                "{said}"
            );
        }
        let (call, text) = ("CheckpointContainer", format!("rpc error: {SWITCHED_OFF}"));
        let said = lacking(CallError::Failed { call, text });
        assert!(matches!(said, Trouble::Unsupported(text) if text.contains("enable_criu_support")));
        let text = "no space left on device".to_owned();
        assert!(matches!(lacking(CallError::Failed { call, text }), Trouble::Failed(_)));
        let limit = Duration::from_secs(30);
        let late = lacking(CallError::Deadline { call: "CheckpointContainer", limit });
        assert!(matches!(late, Trouble::Failed(_)));
    }

    #[test]
    fn what_is_no_archive_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [7; 600]).unwrap();
        assert!(Archive::read(file.path()).is_err());
        let parts = parts(Archive::read(Path::new("/nonexistent")), 1.0);
        assert!(parts.iter().all(|(_, part)| part.is_err()), "{parts:?}");
    }
}
