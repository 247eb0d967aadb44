//! Weights of input and output, on a disk of our own: a file as a loop device, with the one scheduler that
//! weighs control groups in both of their versions, BFQ. No disk of the machine is touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::process::Command;
use torpor_kernel::cgroup;
use torpor_kernel::mountinfo;
use torpor_worker::tell;

use crate::cell::{Cell, Launched, Network, POLL, Pod, Spec, Trouble, Values, failed, parse};
use crate::cgroups;
use crate::cri::v1::{ContainerState, Mount};
use crate::endpoint::limited;
use crate::setting::Setting;

/// The weights of both containers.
const WEIGHTS: [u32; 2] = [800, 100];

/// The size of the disk, and of each file that is read, in MiB.
const DISK: u64 = 320;
const FILE: u64 = 96;

/// For how long both read, in ms.
const TIME: u64 = 1000;

/// How BFQ keeps to weights instead of speed: one request at a time, and no favours for what has just begun.
const EXACT: [(&str, &str); 2] = [("strict_guarantees", "1"), ("low_latency", "0")];

/// The share of what was read that the kernel must have charged to the groups. What a runtime reads for
/// its containers by itself, or has read before, no weight applies to.
const CHARGED: f64 = 0.95;

/// Two containers that read as fast as they can at the same time.
pub(super) async fn measure(cell: &Cell<'_>) -> Result<Values, Trouble> {
    let names = WEIGHTS.map(|weight| format!("weight-{}-{weight}", cell.made.get()));
    let mut groups = Vec::new();
    for (name, weight) in names.iter().zip(WEIGHTS) {
        groups.push(group(cell, name, weight)?);
    }
    let disk = Disk::make(cell).await?;
    let done = shares(cell, &disk, &groups).await;
    disk.remove().await;
    for group in &groups {
        cgroups::remove(group);
    }
    Ok(vec![("io.weight".into(), done?)])
}

/// A control group with a weight.
fn group(cell: &Cell<'_>, name: &str, weight: u32) -> Result<String, Trouble> {
    let unsupported = |text: &str| Trouble::Unsupported(text.to_owned());
    let (controller, file) =
        if cgroup::is_unified() { ("io", "io.bfq.weight") } else { ("blkio", "blkio.bfq.weight") };
    let group = limited(cell.place, controller, name, file, &weight.to_string());
    let text = "the CRI has no weights, and the control group above is not ours";
    match group.ok_or_else(|| unsupported(text))? {
        Ok(group) => Ok(group),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(unsupported("no scheduler of this kernel weighs control groups: it has no BFQ"))
        }
        Err(error) => Err(failed(error)),
    }
}

/// Both read; how exact their shares are.
async fn shares(
    cell: &Cell<'_>,
    disk: &Disk<'_>,
    groups: &[String],
) -> Result<Result<f64, Trouble>, Trouble> {
    let mut pods: Vec<(Pod, Launched)> = Vec::new();
    for group in groups {
        let pod = cell.pod_in(Network::Host, Some(group.clone())).await?;
        let (own, other) = (pods.len(), 1 - pods.len());
        let program =
            format!("weigh --file /data/{own} --size {FILE} --beside /data/{other} --time {TIME}");
        let mounts = vec![Mount {
            container_path: "/data".into(),
            host_path: disk.mounted.display().to_string(),
            ..Mount::default()
        }];
        let launched = cell.launch(&pod, &Spec { mounts, ..Spec::workload(&program) }).await?;
        pods.push((pod, launched));
    }
    let mut read = Vec::new();
    for (_, launched) in &pods {
        read.push(said(cell, launched).await?);
    }
    // While the containers are there: with a group the kernel forgets what it was charged.
    let charged = groups.iter().map(|group| cgroups::bytes_read(group)).sum::<Option<u64>>();
    for (pod, _) in &pods {
        cell.finish(pod).await?;
    }
    Ok(judged(&read, charged))
}

/// What a program says that it has read; it stays.
async fn said(cell: &Cell<'_>, launched: &Launched) -> Result<f64, Trouble> {
    let until = Instant::now() + Duration::from_secs(cell.config.deadline);
    loop {
        let text = launched.text();
        if let Some(bytes) = parse(&text).ok().and_then(|printed| printed["bytes"].as_f64()) {
            return Ok(bytes);
        }
        let state = cell.client().container(&launched.id).await?.state();
        if state == ContainerState::ContainerExited || Instant::now() > until {
            let last = text.lines().last().unwrap_or("nothing");
            return Err(failed(format!("the program has not read: it said {last}")));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How far the share of the heavier one is from what it should be, in percent points, if the kernel
/// has charged what was read.
#[allow(clippy::cast_precision_loss, reason = "bytes of a second")]
fn judged(read: &[f64], charged: Option<u64>) -> Result<f64, Trouble> {
    let all: f64 = read.iter().sum();
    let weights: u32 = WEIGHTS.iter().sum();
    let share = read[0] / all;
    let off = 100.0 * (share - f64::from(WEIGHTS[0]) / f64::from(weights)).abs();
    let charged = charged.unwrap_or(0) as f64 / all;
    if charged < CHARGED {
        let text = format!(
            "the kernel has charged {:.0} % of what was read; the share was {:.1} %",
            100.0 * charged,
            100.0 * share
        );
        return Err(Trouble::Invalid(Some(off), text));
    }
    Ok(off)
}

/// A disk that only this sample has.
#[derive(Debug)]
struct Disk<'a> {
    cell: &'a Cell<'a>,
    file: PathBuf,
    mounted: PathBuf,
    setting: Option<Setting>,
}

impl<'a> Disk<'a> {
    /// Makes and mounts it, where the endpoint sees it.
    async fn make(cell: &'a Cell<'a>) -> Result<Self, Trouble> {
        let dir = &cell.place.dir;
        let (file, mounted) = (dir.join("disk"), dir.join("mounted"));
        fs::create_dir_all(&mounted).map_err(failed)?;
        fs::File::create(&file).and_then(|made| made.set_len(DISK << 20)).map_err(failed)?;
        call("mkfs.ext4", &["-q", "-F"], &[&file]).await?;
        let mut disk = Self { cell, file, mounted, setting: None };
        disk.inside("mount", &["-o", "loop"], &[&disk.file, &disk.mounted]).await?;
        match disk.schedule() {
            Ok(setting) => disk.setting = Some(setting),
            Err(trouble) => {
                disk.remove().await;
                return Err(trouble);
            }
        }
        Ok(disk)
    }

    /// Calls a program in the mount namespace of the endpoint.
    async fn inside(
        &self,
        program: &str,
        options: &[&str],
        files: &[&Path],
    ) -> Result<(), Trouble> {
        let init = self.cell.place.init().ok_or_else(|| failed("the endpoint has ended"))?;
        let target = init.to_string();
        let before = ["--target", &target, "--mount", "--", program];
        call("nsenter", &[&before, options].concat(), files).await
    }

    /// Gives the device the scheduler that weighs; the keeper takes it back if this process cannot.
    fn schedule(&self) -> Result<Setting, Trouble> {
        let init = self.cell.place.init().ok_or_else(|| failed("the endpoint has ended"))?;
        let mounts = mountinfo::of(init.cast_signed()).map_err(failed)?;
        let device =
            device_at(&mounts, &self.mounted).ok_or_else(|| failed("it is not mounted"))?;
        let path = PathBuf::from(format!("/sys/block/{device}/queue/scheduler"));
        let setting = Setting::read(path).map_err(failed)?;
        setting.note(&self.cell.place.dir).map_err(failed)?;
        let none =
            |error| Trouble::Unsupported(format!("the kernel has no scheduler BFQ: {error}"));
        setting.change("bfq").map_err(none)?;
        let queue = Path::new("/sys/block").join(&device).join("queue/iosched");
        for (name, to) in EXACT {
            fs::write(queue.join(name), to).map_err(failed)?;
        }
        Ok(setting)
    }

    async fn remove(self) {
        if let Some(Err(error)) = self.setting.as_ref().map(Setting::restore) {
            tell!("{error}");
        }
        // What keeps it mounted ends with the endpoint.
        let _ = self.inside("umount", &[], &[&self.mounted]).await;
        let _ = fs::remove_file(&self.file);
    }
}

async fn call(program: &str, options: &[&str], files: &[&Path]) -> Result<(), Trouble> {
    let mut command = Command::new(program);
    // With the sample, when that takes too long.
    let output = command.args(options).args(files).kill_on_drop(true).output().await;
    let output = output.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Trouble::Unsupported(format!("there is no {program}")),
        _ => failed(error),
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// The device that is mounted at a place.
fn device_at(mounts: &[mountinfo::Mount], place: &Path) -> Option<String> {
    let mount = mounts.iter().find(|mount| mount.mountpoint == place)?;
    mount.source.to_str()?.strip_prefix("/dev/").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_charged_counts() {
        assert!(judged(&[800.0, 100.0], Some(900)).unwrap() < 1e-9);
        assert!((judged(&[450.0, 450.0], Some(880)).unwrap() - 38.9).abs() < 0.1);
        for charged in [Some(800), None] {
            let trouble = judged(&[450.0, 450.0], charged).unwrap_err();
            assert!(matches!(trouble, Trouble::Invalid(Some(off), _) if off > 38.0), "{trouble}");
        }
    }

    #[test]
    fn a_device_is_found_by_its_mount() {
        let text = "30 1 254:0 / / rw - ext4 /dev/vda rw\n40 30 7:3 / /a/b rw,x - ext4 /dev/loop3 rw\n\
                    41 30 0:5 / /a/c rw - tmpfs tmpfs rw\n";
        let mounts = mountinfo::parse(text.as_bytes()).unwrap();
        assert_eq!(device_at(&mounts, Path::new("/a/b")).as_deref(), Some("loop3"));
        assert_eq!(device_at(&mounts, Path::new("/a/c")), None);
        assert_eq!(device_at(&mounts, Path::new("/a")), None);
    }
}
