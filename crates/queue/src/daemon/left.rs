//! What the dump of a checkpoint has left on this machine for the restore: a lock of the network, so that nobody answers in
//! the name of the connections, and names of files that had none. Without a restore both would stay for ever.
//!
//! `torpor image discard` removes the names, and says which command removes the lock. A dump that was killed with all that
//! would have undone its work has left no images that say it, but a note.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use torpor_images::lock;

use crate::child::run_until;
use crate::shepherd::checkpoint;

/// What a command has printed, in the checkpoint.
const SAID: &str = "said";

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What becomes of the names that the dump has given to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// They go: nobody needs them.
    Go,
    /// They stay: an older checkpoint may need them, or they are in files that go as a whole.
    Stay,
}

/// What `torpor image discard` prints.
#[derive(Deserialize)]
struct Said {
    /// The commands that remove the lock of the network.
    unlock: Vec<Vec<String>>,
}

/// Takes it away.
///
/// # Errors
/// If no key is there for sealed images; if `nft` or `iptables` leaves a part of a lock that is there.
pub(super) fn take_away(place: &Path, names: Names) -> Result<(), String> {
    if !place.join(checkpoint::RECORD).exists() {
        return remove_lock(&noted(place), place);
    }
    let record = checkpoint::record(place).map_err(|e| e.to_string())?;
    if record.boot != checkpoint::boot() {
        return Ok(());
    }
    let root = if names == Names::Go { Path::new("/") } else { place };
    let mut discard = Command::new("/proc/self/exe");
    // It is a job's of this queue, whoever has a key of this host.
    discard.args(["image", "discard", "--json", "--keep-images", "--trusted", "--root"]).arg(root);
    discard.arg(place.join(&record.images));
    if let Some(identity) = &record.identity {
        discard.arg("--identity").arg(identity);
    }
    let said = call(&mut discard, place).map_err(|(why, said)| format!("{why}: {said}"))?;
    let said: Said = serde_json::from_str(&said).map_err(|e| format!("image discard: {e}"))?;
    remove_lock(&said.unlock, place)
}

/// The commands that remove what dumps into the directories of this one have locked and not told of.
fn noted(place: &Path) -> Vec<Vec<String>> {
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let files = names(place).into_iter().flat_map(|round| names(&place.join(round)));
    files.filter_map(|file| lock::noted(&file).map(lock::removal)).collect()
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
