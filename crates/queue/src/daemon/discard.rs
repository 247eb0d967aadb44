//! Checkpoints that jobs sleep in and that nobody wants any more.
//!
//! While a job sleeps, its dump has left something on the machine for the restore: a lock of the network, so
//! that nobody answers in the name of its connections, and names of files that had none. Without a restore
//! both would stay for ever. `torpor image discard` removes the names, and says which command removes the lock. A daemon
//! may be killed after any of these steps, and the next one takes all of them again: the images go last.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use torpor_worker::tell;

use super::core::Core;
use super::record::{Place, Record};
use crate::child::run_until;
use crate::files;
use crate::scheduler::JobId;
use crate::shepherd::checkpoint;

/// Where they wait for that, in the data directory: on the disk of the jobs.
const DISCARDED: &str = "jobs/discarded";

/// What a command has printed, in such a checkpoint.
const SAID: &str = "said";

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A checkpoint that was put aside.
#[derive(Debug)]
pub(super) struct Discarded(PathBuf);

/// What becomes of the names that the dump has given to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// They go: nobody needs them.
    Go,
    /// They stay: an older checkpoint may need them, or they are in files that go as a whole.
    Stay,
}

impl Core {
    /// Puts the newest checkpoint of a job aside, if it was made since this machine was started: what was left
    /// for another's restore is not here.
    pub(super) fn put_aside(&self, id: JobId) -> Option<Discarded> {
        let dir = self.dir(id);
        let seq = checkpoint::numbers(&dir).pop()?;
        let place = dir.checkpoint(seq);
        checkpoint::record(&place).ok().filter(|record| record.boot == checkpoint::boot())?;
        let all = self.data.join(DISCARDED);
        let aside = all.join(format!("{id}-{seq}"));
        let moved = fs::create_dir_all(&all).and_then(|()| fs::rename(&place, &aside));
        match moved {
            Ok(()) => Some(Discarded(aside)),
            Err(e) => {
                tell!("torpor queue: put {} aside: {e}", place.display());
                None
            }
        }
    }

    /// Discards those that a daemon before this one has put aside.
    pub(super) fn discard_the_rest(&self) {
        for entry in fs::read_dir(self.data.join(DISCARDED)).into_iter().flatten().flatten() {
            // A job that is not over may have an older checkpoint that needs them.
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.split('-').next()?.parse().ok());
            let is_over =
                id.and_then(|id| self.jobs.get(&id)).is_some_and(|job| job.place == Place::Ended);
            let names = id.filter(|_| is_over).map_or(Names::Stay, |id| self.names(id));
            Discarded(entry.path()).discard(names);
        }
    }

    /// What becomes of the names that a dump has given to files of a job that does not go on from there.
    pub(super) fn names(&self, id: JobId) -> Names {
        let is_container = |job: &Record| job.spec.container.is_some();
        if self.jobs.get(&id).is_some_and(is_container) { Names::Stay } else { Names::Go }
    }
}

impl Discarded {
    /// Removes it with all that its dump has left on this machine. Nobody waits for that.
    pub(super) fn discard(self, names: Names) {
        thread::spawn(move || {
            if let Err(e) = unlock(&self.0, names) {
                tell!("torpor queue: {}: what its dump has left: {e}", self.0.display());
            }
            if let Err(e) = files::remove_trees(&[&self.0]) {
                tell!("torpor queue: remove {}: {e}", self.0.display());
            }
        });
    }
}

/// What `torpor image discard` prints.
#[derive(Deserialize)]
struct Said {
    /// The commands that remove the lock of the network.
    unlock: Vec<Vec<String>>,
}

fn unlock(place: &Path, names: Names) -> Result<(), String> {
    let record = checkpoint::record(place).map_err(|e| e.to_string())?;
    if record.boot != checkpoint::boot() {
        return Ok(());
    }
    let root = if names == Names::Go { Path::new("/") } else { place };
    let mut discard = Command::new("/proc/self/exe");
    discard.args(["image", "discard", "--json", "--keep-images", "--root"]).arg(root);
    discard.arg(place.join(&record.images));
    if let Some(identity) = &record.identity {
        discard.arg("--identity").arg(identity);
    }
    let said = call(&mut discard, place).map_err(|(why, said)| format!("{why}: {said}"))?;
    let said: Said = serde_json::from_str(&said).map_err(|e| format!("image discard: {e}"))?;
    remove_lock(&said.unlock, place)
}

/// Calls commands, each of which removes a part of a lock. One that fails keeps none of the others from it.
fn remove_lock(commands: &[Vec<String>], place: &Path) -> Result<(), String> {
    let remove = |words: &Vec<String>| {
        let (program, arguments) = words.split_first()?;
        let done = call(Command::new(program).args(arguments).env("LC_ALL", "C"), place);
        let (why, said) = done.err()?;
        // It was removed by a restore, or with the network that it was in: so say nft, and iptables.
        let is_gone = said.contains("No such file or directory") || said.contains("Bad rule");
        (!is_gone).then(|| format!("{}: {why}: {said}", words.join(" ")))
    };
    let failed: Vec<String> = commands.iter().filter_map(remove).collect();
    match failed.first() {
        None => Ok(()),
        Some(first) => Err(format!("{} of {} parts: {first}", failed.len(), commands.len())),
    }
}

/// What a command prints; or why it has failed, and what it has printed.
fn call(command: &mut Command, place: &Path) -> Result<String, (String, String)> {
    let path = place.join(SAID);
    let files = || File::create(&path).and_then(|file| Ok((file.try_clone()?, file)));
    let (out, err) = files().map_err(|e: io::Error| (e.to_string(), String::new()))?;
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    let done = run_until(command, Instant::now() + PATIENCE);
    let said = fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
    match done {
        Ok(()) => Ok(said),
        Err(why) => Err((why, said)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That one part of a lock is gone says nothing of the others.
    #[test]
    fn each_part_of_a_lock_is_removed_and_judged_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let sh = |script: &str| ["sh", "-c", script].map(str::to_owned).to_vec();
        let mark = |name: &str| format!("touch {}", dir.path().join(name).display());
        let gone = sh(
            "echo 'iptables: Bad rule (does a matching rule exist in that chain?).' >&2; exit 1",
        );
        let no_table = sh("echo 'Error: No such file or directory' >&2; exit 1");
        assert_eq!(remove_lock(&[gone.clone(), no_table], dir.path()), Ok(()));
        let locked = sh("echo 'Another app is currently holding the xtables lock' >&2; exit 4");
        let none = vec!["/nonexistent/iptables".to_owned()];
        let commands = [sh(&mark("first")), locked, gone, none, sh(&mark("last"))];
        let why = remove_lock(&commands, dir.path()).unwrap_err();
        assert!(why.starts_with("2 of 5 parts: sh ") && why.contains("xtables lock"), "{why}");
        assert!(["first", "last"].iter().all(|name| dir.path().join(name).exists()));
    }
}
