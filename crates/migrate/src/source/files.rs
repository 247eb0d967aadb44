//! The root file system and the volumes that go along with a container.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use serde_json::Value;
use torpor_kernel::mountinfo::{self, Mount};

use super::link::{result_of, unexpected};
use super::{Plan, Source};
use crate::error::{Error, Result};
use crate::files::{mapped, networked, write_out};
use crate::runtime::{Container, configuration, is_bind};
use crate::task::{self, Task};
use crate::wire::message::{Reply, Request};

/// Rounds that files are sent in before those of memory.
const MAX_ROUNDS: u32 = 10;
/// What is sent as fast when the tasks are stopped.
const LITTLE: u64 = 1 << 20;

/// The trees of files that go along, in the order that the destination counts them in.
///
/// # Errors
/// If the configuration of the container names none of these.
pub(super) fn trees(plan: &Plan) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    if plan.with_rootfs
        && let Some(container) = &plan.container
    {
        let root = config(container)?["root"]["path"].as_str().unwrap_or_default().to_owned();
        all.push(PathBuf::from(root));
    }
    all.extend(volumes(plan)?);
    Ok(all)
}

/// The directories of this host that are the volumes that go along. One that lies in another one comes with that.
///
/// # Errors
/// If the container has no such volume; if one lies in another one, and would not come with it.
pub(super) fn volumes(plan: &Plan) -> Result<Vec<PathBuf>> {
    let Some(container) = plan.container.as_ref().filter(|_| !plan.with_volumes.is_empty()) else {
        return Ok(Vec::new());
    };
    let config = config(container)?;
    let mut all = Vec::new();
    for at in &plan.with_volumes {
        let source = volume(&config, at)?;
        if !all.contains(&source) {
            all.push(source);
        }
    }
    let mounts = mountinfo::of(std::process::id().cast_signed());
    outermost(&all, &mounts.map_err(|error| Error::refused(error.to_string()))?)
}

/// Those of these directories that are in none of the others.
fn outermost(all: &[PathBuf], mounts: &[Mount]) -> Result<Vec<PathBuf>> {
    let mut outer = Vec::new();
    for path in all {
        let around = all.iter().find(|other| *other != path && path.starts_with(other));
        let Some(around) = around else {
            outer.push(path.clone());
            continue;
        };
        // What is mounted in a directory does not go along with it.
        let mount = mountinfo::holding(mounts, path).map(|mount| &mount.mountpoint);
        if let Some(mount) = mount.filter(|it| *it != around && it.starts_with(around)) {
            return Err(Error::refused_with(
                format!(
                    "volume {} lies in volume {}, and in a file system that is mounted there, at {}",
                    path.display(),
                    around.display(),
                    mount.display()
                ),
                "mount that elsewhere, or leave one of both where both hosts see it",
            ));
        }
    }
    Ok(outer)
}

/// The directory that is mounted in the container at `at`.
fn volume(config: &Value, at: &Path) -> Result<PathBuf> {
    let mounts = config["mounts"].as_array().map_or(&[][..], Vec::as_slice);
    let is_there = |mount: &&Value| mount["destination"].as_str().map(Path::new) == Some(at);
    let mount = mounts.iter().filter(|mount| is_bind(mount)).find(is_there);
    let source = mount.and_then(|mount| mount["source"].as_str()).map(PathBuf::from);
    match source {
        Some(source) if source.is_absolute() && source.is_dir() => Ok(source),
        Some(source) => Err(Error::refused(format!(
            "volume {} is {}, which is no directory with a whole path",
            at.display(),
            source.display()
        ))),
        None => Err(Error::refused_with(
            format!("no directory of this host is mounted in the container at {}", at.display()),
            "its config.json has the mounts: --with-volume takes a destination of one",
        )),
    }
}

/// The configuration of a container that runs.
fn config(container: &Container) -> Result<Value> {
    let text = configuration(&container.running()?.bundle)?;
    serde_json::from_str(&text).map_err(|error| Error::refused(error.to_string()))
}

impl Source<'_> {
    /// Sends files until little is left that has changed meanwhile.
    pub(super) fn send_files_in_rounds(&mut self) -> Result<()> {
        let mut before = u64::MAX;
        for _ in 0..MAX_ROUNDS {
            let sent = self.send_files()?;
            if sent < LITTLE || sent >= before / 10 * 9 {
                break;
            }
            before = sent;
        }
        Ok(())
    }

    /// Has files that both hosts see over a network written out. A server may be gone: somebody may cancel meanwhile.
    pub(super) fn write_out(&self) -> Result<()> {
        let mounts = networked(&Task::find(self.plan.pid)?)?;
        if mounts.is_empty() {
            return Ok(());
        }
        let tasks = task::tree(self.plan.pid)?;
        let writing = thread::spawn(move || write_out(&tasks, &mounts));
        let files = result_of(writing, Some(&self.cancel))?;
        tracing::debug!("{files} files of a network are written out");
        Ok(())
    }

    /// Sends what is different in the files by now; how many bytes that were.
    pub(super) fn send_files(&mut self) -> Result<u64> {
        if self.trees.is_empty() {
            return Ok(0);
        }
        let (start, before) = (Instant::now(), self.link.meter.sent());
        let mapped = mapped(&task::tree(self.plan.pid)?)?;
        let (link, cancel) = (&mut self.link, &self.cancel);
        for (number, tree) in self.trees.iter_mut().enumerate() {
            link.say_unless(&Request::Tree { number }, Some(cancel))?;
            tree.tell(&mapped, &mut |step| {
                if cancel.is_due() { Err(Error::Cancelled) } else { link.tell(step, cancel) }
            })?;
        }
        self.link.say_unless(&Request::Settle, Some(&self.cancel))?;
        match self.reply()? {
            Reply::Settled => {}
            reply => return Err(unexpected(reply)),
        }
        let sent = self.link.meter.sent() - before;
        self.files_bytes += sent;
        self.files_time = start.elapsed();
        Ok(sent)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The other host would find the directory of the inner one there already.
    #[test]
    fn a_volume_in_another_one_comes_with_that() {
        let at = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let all = at(&["/srv/web/in", "/srv/web", "/srv/webs", "/srv/web/in/deeper"]);
        let mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /srv/web rw - ext4 /dev/b rw\n";
        let outer = |more: &str| {
            let mounts = [mounts, more].concat();
            outermost(&all, &mountinfo::parse(mounts.as_bytes()).unwrap())
        };
        assert_eq!(outer("").unwrap(), at(&["/srv/web", "/srv/webs"]));
        let error = outer("3 2 8:2 /x /srv/web/in rw - ext4 /dev/b rw\n").unwrap_err();
        let error = error.to_string();
        assert!(error.contains("/srv/web/in lies in volume /srv/web,"), "{error}");
    }
}
