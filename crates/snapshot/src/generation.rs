//! How an application learns that it is a copy: by a number that no other start has.
//!
//! - `/dev/sysgenid`, which a file of each container's own is mounted at: 32 bits that programs map. It stands
//!   there before the tasks run, so no instruction sees the number of another container. Libraries that look
//!   at it before they give random numbers away (AWS-LC) make these anew. The device of that name, which
//!   Linux never took in, works the same way.
//! - `/run/torpor/restored`, which is there after a restore only. A program that watches the directory (inotify) hears
//!   when it is written.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use serde_json::{Value, json};

use crate::error::{Context, Error, Result};
use crate::instance::write_inside;

/// The file that is mounted, in the directory of a container.
const FILE: &str = "generation";
/// Where it is mounted.
const PLACE: &str = "/dev/sysgenid";

/// A number that no other start has.
///
/// # Errors
/// If the kernel gives no random numbers.
pub fn new() -> Result<u64> {
    let bytes = torpor_seal::secret::random::<8>().map_err(|e| Error::new(e.to_string()))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Whether a container of this configuration can have the file: its devices are in a file system of its own,
/// and it has nothing else there.
fn has_place(config: &Value) -> bool {
    let mounts = || config["mounts"].as_array().into_iter().flatten();
    let has = |at: &str| mounts().any(|mount| mount["destination"] == at);
    mounts().any(|mount| mount["destination"] == "/dev" && mount["type"] == "tmpfs") && !has(PLACE)
}

/// Gives the container whose files are in `dir` a number, of which programs see 32 bits.
///
/// # Errors
/// If the file cannot be written.
pub fn give(dir: &Path, config: &mut Value, number: u64) -> Result<()> {
    if !has_place(config) {
        return Ok(());
    }
    let file = dir.join(FILE);
    let shown = || file.display().to_string();
    fs::write(&file, &number.to_le_bytes()[..4]).context(shown)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).context(shown)?;
    let options = ["bind", "rprivate", "ro", "nosuid", "nodev", "noexec"];
    let mount = json!({
        "type": "bind",
        "source": file,
        "destination": PLACE,
        "options": options,
    });
    if let Some(mounts) = config["mounts"].as_array_mut() {
        mounts.push(mount);
    }
    Ok(())
}

/// Whether the container whose files are in `dir` has such a file.
#[must_use]
pub fn is_given(dir: &Path) -> bool {
    let config = fs::read(dir.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&config).unwrap_or_default();
    let file = json!(dir.join(FILE));
    let mut mounts = config["mounts"].as_array().into_iter().flatten();
    mounts.any(|mount| mount["destination"] == PLACE && mount["source"] == file)
}

/// Writes down inside of the file system `root` that a container was restored.
///
/// # Errors
/// If `/run/torpor` cannot be made in there, or its file cannot be written.
pub fn mark(root: &Path, number: u64) -> Result<()> {
    write_inside(root, "restored", &text(number))
}

fn text(number: u64) -> String {
    format!("{number}\n")
}

fn open(root: &Path, flags: OFlags) -> rustix::io::Result<File> {
    let root =
        openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat2(&root, "run/torpor/restored", flags, Mode::empty(), ResolveFlags::IN_ROOT)
        .map(File::from)
}

/// Whether that is written down already in the file system `root`.
#[must_use]
pub fn is_marked(root: &Path, number: u64) -> bool {
    let mut found = String::new();
    open(root, OFlags::RDONLY).is_ok_and(|file| file.take(32).read_to_string(&mut found).is_ok())
        && found == text(number)
}

/// Has those who watch the mark hear that it was written: when the tasks were made it was there already.
///
/// # Errors
/// If the file is not there any more, or cannot be written.
pub fn announce(root: &Path, number: u64) -> Result<()> {
    let what = || "/run/torpor/restored";
    // The same once more: nobody ever reads anything else.
    open(root, OFlags::WRONLY).context(what)?.write_all(text(number).as_bytes()).context(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_thousand_have_nothing_in_common() {
        let numbers: HashSet<u64> = (0..1000).map(|_| new().unwrap()).collect();
        assert_eq!(numbers.len(), 1000);
    }

    #[test]
    fn who_has_devices_of_its_own_is_given_a_number() {
        let dir = tempfile::tempdir().unwrap();
        let of_host = json!({"mounts": [{"destination": "/dev", "type": "bind"}]});
        let own = json!({"mounts": [{"destination": "/dev", "type": "tmpfs"}]});
        for (config, given) in [(of_host, 1), (own, 2)] {
            let mut new = config.clone();
            give(dir.path(), &mut new, 7 << 32 | 5).unwrap();
            assert_eq!(new["mounts"].as_array().unwrap().len(), given);
            fs::write(dir.path().join("config.json"), new.to_string()).unwrap();
            assert_eq!(is_given(dir.path()), given == 2);
        }
        assert_eq!(fs::read(dir.path().join(FILE)).unwrap(), [5, 0, 0, 0]);
    }

    #[test]
    fn a_mark_is_written_again_as_it_was() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_marked(root.path(), 12));
        mark(root.path(), 12).unwrap();
        announce(root.path(), 12).unwrap();
        assert!(is_marked(root.path(), 12) && !is_marked(root.path(), 1));
    }
}
